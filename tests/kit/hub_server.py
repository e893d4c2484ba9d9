"""A Hugging Face hub on 127.0.0.1, as far as a download sees one, that can be made to misbehave.

    with HubServer() as hub:
        commit = hub.commit("owner/name", {"datasets/manifest.json": b"{}", "datasets/big.bin": b"..."})
        hub.fault("GET /cdn/.*big.bin", times=2, dies_after=1000)
        ...                               # run the real client with HF_ENDPOINT=hub.url
        hub.requests                      # what it asked for

It speaks repo info of a commit with git and LFS checksums, HEAD and GET of /resolve/ with X-Repo-Commit,
ETag, X-Linked-Etag and X-Linked-Size, a redirect to a "CDN" of another origin for LFS files, ranges, and the
hub's error codes. Files that end in .bin or .model are in LFS. It speaks no Xet.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit


@dataclass
class Fault:
    """What to do wrong with the next `times` requests whose "METHOD /path" matches `where`. Lengths count the
    bytes of that response's body."""

    where: str
    times: float = float("inf")
    before: Callable[[], None] = lambda: None  # called before the answer
    status: int = 0  # answer with this and no body
    headers: dict = field(default_factory=dict)  # add these
    body: Callable[[bytes], bytes] | None = None  # another content, under the old checksums
    dies_after: int | None = None  # then close the connection in the middle
    stalls_after: int | None = None  # then send nothing more
    ends_after: int | None = None  # say that this is all


@dataclass
class Request:
    method: str
    path: str
    token: str


class HubServer:
    def __init__(self):
        self.lock = threading.Lock()
        self.reset()
        self.servers = [self.listen(), self.listen()]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self.servers)

    def reset(self) -> None:
        """Forget all repos, faults and requests."""
        self.repos: dict[str, dict] = {}  # id -> refs {name: commit}, commits {commit: files}, token
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.closing = threading.Event()  # ends the answers that stall

    def listen(self) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closing.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def commit(self, repo_id: str, files: dict[str, bytes], ref: str = "main", token: str = "") -> str:
        """Make `ref` of a repo mean exactly `files`; returns the commit. Only `token`, if given, may read."""
        content = "".join(f"{path} {hashlib.sha1(data).hexdigest()}" for path, data in sorted(files.items()))
        commit = hashlib.sha1((repo_id + content).encode()).hexdigest()
        repo = self.repos.setdefault(repo_id, {"refs": {}, "commits": {}})
        repo["refs"][ref], repo["commits"][commit], repo["token"] = commit, files, token
        return commit

    def fault(self, where: str, **how) -> Fault:
        self.faults.append(Fault(where, **how))
        return self.faults[-1]

    def take_fault(self, line: str) -> Fault:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.where, line):
                    fault.times -= 1
                    return fault
        return Fault("")

    def fetched(self, pattern: str = "", since: int = 0, repo_id: str = ".+?/.+?") -> list[str]:
        """Names of the files whose content was asked for, in order; `since` counts requests."""
        contents = [
            request.path
            for request in self.requests[since:]
            if request.method == "GET"
            and re.search(f"^/(cdn|datasets)/{repo_id}/.*{pattern}", request.path)
            and request.path.startswith("/cdn/") == is_lfs(request.path)
        ]
        return [path.rsplit("/", 1)[1] for path in contents]


def is_lfs(path: str) -> bool:
    return path.endswith((".bin", ".model"))


def checksums(data: bytes) -> tuple[str, str]:
    """(git blob sha1, sha256) of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), hashlib.sha256(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One connection. Paths: /api/datasets/ID/revision/REV, /datasets/ID/resolve/REV/PATH, /cdn/..."""

    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_):  # the tests look at hub.requests
        return

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url = urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        request = Request(self.command, unquote(url.path), token)
        self.hub.requests.append(request)
        self.fault = self.hub.take_fault(f"{self.command} {request.path}")
        self.fault.before()
        try:
            if self.fault.status:
                self.answer(self.fault.status, {}, b"")
            elif match := re.fullmatch("/cdn/(.+?/.+?)/([0-9a-f]{40})/(.+)", request.path):
                assert not token, "the hub's token must not leave the hub"
                self.send_file(self.hub.repos[match[1]]["commits"][match[2]][match[3]], {})
            elif match := re.fullmatch("/api/datasets/(.+?/.+?)/revision/([^/]+)", url.path):
                self.info(request, *map(unquote, match.groups()))
            elif match := re.fullmatch("/datasets/(.+?/.+?)/resolve/([^/]+)/(.+)", url.path):
                self.resolve(request, *map(unquote, match.groups()))
            else:
                self.refuse(404, "")
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client went away, as some tests want it to

    def open(self, request: Request, repo_id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """(commit, files), or None after a refusal."""
        repo = self.hub.repos.get(repo_id)
        if not repo or repo["token"] not in ("", request.token):
            return self.refuse(401, "RepoNotFound")
        commit = repo["refs"].get(revision, revision)
        if commit not in repo["commits"]:
            return self.refuse(404, "RevisionNotFound")
        return commit, repo["commits"][commit]

    def info(self, request: Request, repo_id: str, revision: str) -> None:
        if not (found := self.open(request, repo_id, revision)):
            return
        commit, files = found
        siblings = [self.sibling(path, data) for path, data in sorted(files.items())]
        info = {"id": repo_id, "sha": commit, "private": False, "tags": [], "siblings": siblings}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def sibling(self, path: str, data: bytes) -> dict:
        git, sha256 = checksums(data)
        found = {"rfilename": path, "size": len(data), "blobId": git}
        if is_lfs(path):
            found["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 130}
        return found

    def resolve(self, request: Request, repo_id: str, revision: str, path: str) -> None:
        if not (found := self.open(request, repo_id, revision)):
            return
        commit, files = found
        if path not in files:
            return self.refuse(404, "EntryNotFound")
        git, sha256 = checksums(files[path])
        if not is_lfs(path):
            return self.send_file(files[path], {"X-Repo-Commit": commit, "ETag": f'"{git}"'})
        self.answer(
            302,
            {
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{sha256}"',
                "ETag": f'"{git}"',
                "X-Linked-Size": str(len(files[path])),
                "Location": f"{self.hub.cdn}/cdn/{quote(repo_id)}/{commit}/{quote(path)}",
            },
            b"",
        )

    def refuse(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code}
        self.answer(status, headers, json.dumps({"error": code}).encode())

    def send_file(self, data: bytes, headers: dict) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if not wanted:
            return self.answer(200, headers, data)
        start = int(wanted[1])
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206, headers, data[start:])

    def answer(self, status: int, headers: dict, body: bytes) -> None:
        """Send a response, as wrong as the fault wants it."""
        fault = self.fault
        body = fault.body(body) if fault.body else body
        if fault.ends_after is not None:
            body = body[: fault.ends_after]
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers | fault.headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        stops = [n for n in (fault.dies_after, fault.stalls_after) if n is not None]
        self.wfile.write(body[: stops[0]] if stops else body)
        if fault.stalls_after is not None:
            self.hub.closing.wait(60)
        self.close_connection = self.close_connection or bool(stops)
