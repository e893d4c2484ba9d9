"""A Hugging Face hub on 127.0.0.1, as far as a download sees one, that can be made to misbehave.

    with HubServer() as hub:
        commit = hub.commit("owner/name", {"datasets/manifest.json": b"{}", "datasets/big.bin": b"..."})
        hub.fault("GET /cdn/.*big.bin", times=2, dies_after=1000)
        ...                               # run the real client with HF_ENDPOINT=hub.url
        hub.requests                      # what it asked for

It speaks repo info and tree listing of a commit with git and LFS checksums, HEAD and GET of /resolve/ with
X-Repo-Commit, ETag, X-Linked-Etag and X-Linked-Size, a redirect to a "CDN" of another origin for LFS files,
ranges, and the hub's error codes. Files that end in .bin or .model are in LFS. It speaks no Xet.
"""

import hashlib
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit


@dataclass
class Fault:
    """What to do wrong with the next `times` requests whose "METHOD /path" matches `where`. Lengths count the
    bytes of that response's body."""

    where: str
    times: float = float("inf")
    before: Callable[[], None] = lambda: None  # called before the answer
    status: int = 0  # answer with this and no body
    headers: dict = field(default_factory=dict)  # add these
    without: tuple = ()  # leave these out
    hangs_up: bool = False  # close the connection before any answer
    body: Callable[[bytes], bytes] | None = None  # another content, under the old checksums
    dies_after: int | None = None  # then close the connection in the middle
    resets_after: int | None = None  # then reset it
    stalls_after: int | None = None  # then send nothing more
    ends_after: int | None = None  # say that this is all
    drips: float = 0  # seconds between single bytes
    drips_headers: bool = False  # those of the headers too
    endless: bool = False  # go on after the end, without a length
    ignores_range: bool = False


@dataclass
class Request:
    method: str
    path: str
    range: str
    token: str
    query: dict
    time: float


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
        self.lists_siblings = True  # in repo info; else only the tree lists files
        self.lists_sizes = True
        self.page = 1000  # entries of a tree page
        self.active = self.most_active = 0  # downloads at the same time
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
    """One connection. Paths: /api/datasets/ID/(revision|tree)/REV, /datasets/ID/resolve/REV/PATH, /cdn/..."""

    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_):  # the tests look at hub.requests
        return

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url = urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        request = Request(
            self.command,
            unquote(url.path),
            self.headers.get("Range", ""),
            token,
            parse_qs(url.query),
            time.monotonic(),
        )
        self.hub.requests.append(request)
        self.fault = self.hub.take_fault(f"{self.command} {request.path}")
        self.fault.before()
        try:
            if self.fault.hangs_up:
                self.close_connection = True
            elif self.fault.status:
                self.answer(self.fault.status, {}, b"")
            elif match := re.fullmatch("/cdn/(.+?/.+?)/([0-9a-f]{40})/(.+)", request.path):
                assert not token, "the hub's token must not leave the hub"
                self.send_file(self.hub.repos[match[1]]["commits"][match[2]][match[3]], {})
            elif match := re.fullmatch("/api/datasets/(.+?/.+?)/(revision|tree)/([^/]+)", url.path):
                self.api(request, *map(unquote, match.groups()))
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

    def api(self, request: Request, repo_id: str, kind: str, revision: str) -> None:
        if not (found := self.open(request, repo_id, revision)):
            return
        commit, files = found
        entries = [self.entry(path, data) for path, data in sorted(files.items())]
        if kind == "revision":
            info = {"id": repo_id, "sha": commit, "private": False, "tags": []}
            if self.hub.lists_siblings:
                keys = ("size", "blobId", "lfs") if "blobs" in request.query and self.hub.lists_sizes else ()
                info["siblings"] = [
                    {"rfilename": e["path"]} | {key: e[key] for key in keys if key in e} for e in entries
                ]
            return self.answer(200, {"Content-Type": "application/json"}, json.dumps(info).encode())
        folders = sorted({path.rsplit("/", n)[0] for path in files for n in range(1, path.count("/") + 1)})
        entries += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
        start = int(request.query.get("cursor", ["0"])[0])
        end = start + self.hub.page
        more = f'<{self.hub.url}{quote(request.path)}?recursive=true&cursor={end}>; rel="next"'
        headers = {"Link": more} if end < len(entries) else {}
        self.answer(200, headers, json.dumps(entries[start:end]).encode())

    def entry(self, path: str, data: bytes) -> dict:
        git, sha256 = checksums(data)
        entry = {"type": "file", "path": path, "size": len(data), "oid": git, "blobId": git}
        if is_lfs(path):
            entry["lfs"] = {"size": len(data), "sha256": sha256, "oid": sha256, "pointerSize": 130}
        return entry

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
        with self.hub.lock:
            self.hub.active += self.command == "GET"
            self.hub.most_active = max(self.hub.active, self.hub.most_active)
        try:
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if not wanted or self.fault.ignores_range:
                return self.answer(200, headers, data)
            start = int(wanted[1])
            if start >= len(data):
                return self.answer(416, headers | {"Content-Range": f"bytes */{len(data)}"}, b"no such range")
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.answer(206, headers, data[start:])
        finally:
            with self.hub.lock:
                self.hub.active -= self.command == "GET"

    def answer(self, status: int, headers: dict, body: bytes) -> None:
        """Send a response, as wrong as the fault wants it."""
        fault = self.fault
        body = fault.body(body) if fault.body else body
        if fault.ends_after is not None:
            body = body[: fault.ends_after]
        self.send_response(status)
        length = {} if fault.endless else {"Content-Length": str(len(body))}
        for key, value in (length | headers | fault.headers).items():
            if key not in fault.without:
                self.send_header(key, value)
        if fault.endless:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        stops = [n for n in (fault.dies_after, fault.resets_after, fault.stalls_after) if n is not None]
        self.send(body[: stops[0]] if stops else body)
        if fault.stalls_after is not None:
            self.hub.closing.wait(60)
        if fault.resets_after is not None:
            time.sleep(0.1)  # else the reset overtakes what was sent
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
        while fault.endless and not self.hub.closing.is_set():
            self.wfile.write(bytes(65536))
        self.close_connection = self.close_connection or bool(stops)

    def flush_headers(self) -> None:
        if self.fault.drips_headers:
            self.send(b"".join(self._headers_buffer))
            self._headers_buffer = []
        super().flush_headers()

    def send(self, data: bytes) -> None:
        if not self.fault.drips:
            self.wfile.write(data)
            return
        for byte in data:
            self.wfile.write(bytes([byte]))
            if self.hub.closing.wait(self.fault.drips):
                return
