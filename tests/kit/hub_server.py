"""A Hugging Face hub on 127.0.0.1, as far as our commands see one, that can be made to misbehave.

    with HubServer() as hub:
        commit = hub.commit("owner/name", {"datasets/manifest.json": b"{}", "datasets/big.bin": b"..."})
        hub.fault("GET .*big.bin", times=2, dies_after=1000)
        ...                               # run the real client with HF_ENDPOINT=hub.url
        hub.requests                      # what it asked for

It speaks repo info of a commit with git and LFS checksums, HEAD and GET of /resolve/ with X-Repo-Commit and
ETag, ranges, and the hub's error codes. Files that end in .bin, .model, .ptz or .parquet are in LFS. It sends
their content itself, where the hub leads elsewhere, and speaks no Xet.

For uploads it speaks the creation of a repo, and commits as NDJSON with all files in them: sending to LFS is
the client's own. The token hf_write may write in the namespace me.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants


@dataclass
class Fault:
    """What to do wrong with the next `times` requests whose "METHOD /path" matches `where`. Lengths count the
    bytes of that response's body."""

    where: str
    times: float = float("inf")
    before: Callable[[], None] = lambda: None  # called before the answer
    status: int = 0  # answer with this and no body
    body: Callable[[bytes], bytes] | None = None  # another content, under the old checksums
    dies_after: int | None = None  # then close the connection in the middle
    stalls_after: int | None = None  # then send nothing more


class RefusalError(Exception):
    """A status, and the hub's word for why."""


class HubServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.reset()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def reset(self) -> None:
        """Forget all repos, faults and requests."""
        self.repos: dict[str, dict] = {}  # kind/id -> refs {name: commit}, commits {commit: files}, token
        self.home = Path()  # of the client
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # METHOD /path
        self.closing = threading.Event()  # ends the answers that stall

    @contextlib.contextmanager
    def here(self, token: str = "hf_write", url: str | None = None) -> Iterator[None]:
        """The client of this process asks this hub, which it would else learn when it is imported."""
        url = url or self.url
        settings = {
            "ENDPOINT": url,
            "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HOME": str(self.home),
            "HF_HUB_CACHE": str(self.home / "hub"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DOWNLOAD_TIMEOUT": 1,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_TOKEN", token)
            for name, value in settings.items():
                patch.setattr(constants, name, value)
            yield

    def environment(self, **variables: str) -> dict[str, str]:
        """Of a process whose client asks this hub."""
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        return ours | {"HF_TOKEN": "", "NO_PROXY": "*"} | variables

    def commit(
        self,
        repo_id: str,
        files: dict[str, bytes],
        ref: str = "main",
        token: str = "",
        kind: str = "datasets",
    ) -> str:
        """Make `ref` of a repo mean exactly `files`; returns the commit. Only `token`, if given, may read."""
        content = "".join(f"{path} {hashlib.sha1(data).hexdigest()}" for path, data in sorted(files.items()))
        commit = hashlib.sha1((repo_id + content).encode()).hexdigest()
        repo = self.repos.setdefault(f"{kind}/{repo_id}", {"refs": {}, "commits": {}})
        repo["refs"][ref] = commit
        repo["commits"][commit] = files
        repo["token"] = token
        return commit

    def files(self, repo_id: str, kind: str = "datasets") -> dict[str, bytes]:
        """What main of a repo holds."""
        repo = self.repos[f"{kind}/{repo_id}"]
        return repo["commits"][repo["refs"]["main"]]

    def fetched(self, pattern: str = "", since: int = 0) -> list[str]:
        """Names of the files whose content was asked for, in order; `since` counts requests."""
        asked = [line for line in self.requests[since:] if re.match(f"GET .*/resolve/.*({pattern})", line)]
        return [line.rpartition("/")[2] for line in asked]

    def fault(self, where: str, **how) -> None:
        self.faults.append(Fault(where, **how))

    def take_fault(self, line: str) -> Fault:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.where, line):
                    fault.times -= 1
                    return fault
        return Fault("")


def is_lfs(path: str) -> bool:
    return path.endswith((".bin", ".model", ".ptz", ".parquet"))


def checksums(data: bytes) -> tuple[str, str]:
    """(git blob sha1, sha256) of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), hashlib.sha256(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One connection. ROUTES, below, says what is understood."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):  # the tests look at hub.requests
        return

    def serve(self) -> None:
        path = urlsplit(self.path).path
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        line = f"{self.command} {unquote(path)}"
        self.server.requests.append(line)
        self.fault = self.server.take_fault(line)
        try:
            self.fault.before()
            self.sent = self.body() if self.command == "POST" else b""
            if self.fault.status:
                self.answer(self.fault.status, {}, b"")
            else:
                self.route(f"{self.command.replace('HEAD', 'GET')} {path}")
        except RefusalError as refusal:
            status, code = refusal.args
            headers = {"X-Error-Code": code, "X-Error-Message": code}
            self.answer(status, headers, json.dumps({"error": code}).encode())
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client went away, as some tests want it to

    do_GET = do_HEAD = do_POST = serve

    def route(self, line: str) -> None:
        for pattern, work in ROUTES.items():
            if match := re.fullmatch(pattern, line):
                return work(self, *(group and unquote(group) for group in match.groups()))
        raise RefusalError(404, "")

    def check_writer(self, namespace: str) -> None:
        if self.token != "hf_write":
            raise RefusalError(401, "")
        if namespace != "me":
            raise RefusalError(403, "")

    def open(self, kind: str | None, repo_id: str, revision: str = "main") -> tuple[str, dict]:
        """The commit and its files."""
        if self.command == "POST":
            self.check_writer(repo_id.partition("/")[0])
        repo = self.server.repos.get(f"{kind or 'models'}/{repo_id}")
        if not repo or repo["token"] not in ("", self.token):
            raise RefusalError(401, "RepoNotFound")
        commit = repo["refs"].get(revision, revision)
        if commit not in repo["commits"]:
            raise RefusalError(404, "RevisionNotFound")
        return commit, repo["commits"][commit]

    def info(self, kind: str, repo_id: str, revision: str | None) -> None:
        commit, files = self.open(kind, repo_id, revision or "main")
        siblings = []
        for path, data in sorted(files.items()):
            git, sha256 = checksums(data)
            siblings.append({"rfilename": path, "size": len(data), "blobId": git})
            if is_lfs(path):
                siblings[-1]["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 130}
        self.say({"id": repo_id, "sha": commit, "private": False, "tags": [], "siblings": siblings})

    def resolve(self, kind: str | None, repo_id: str, revision: str, path: str) -> None:
        commit, files = self.open(kind, repo_id, revision)
        if path not in files:
            raise RefusalError(404, "EntryNotFound")
        data = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{checksums(data)[is_lfs(path)]}"'}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if not wanted:
            return self.answer(200, headers, data)
        start = int(wanted[1])
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self.answer(206, headers, data[start:])

    # --- uploads ------------------------------------------------------------------------------------------

    def body(self) -> bytes:
        """What the client sends, of a known length or in chunks."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def create(self) -> None:
        asked = json.loads(self.sent)
        repo_id = f"{asked['organization']}/{asked['name']}"
        kind = f"{asked['type'] or 'model'}s"
        self.check_writer(asked["organization"])
        if f"{kind}/{repo_id}" in self.server.repos:
            raise RefusalError(409, "")
        self.server.commit(repo_id, {".gitattributes": b"*.bin filter=lfs\n"}, kind=kind)
        self.say({"url": f"{self.server.url}/{repo_id if kind == 'models' else f'datasets/{repo_id}'}"})

    def preupload(self, kind: str, repo_id: str) -> None:
        self.open(kind, repo_id)
        paths = [file["path"] for file in json.loads(self.sent)["files"]]
        mode = {"uploadMode": "regular", "shouldIgnore": False}
        self.say({"files": [{"path": path} | mode for path in paths]})

    def take(self, kind: str, repo_id: str) -> None:
        """A commit: a line for what it is, and one for each file."""
        commit, files = self.open(kind, repo_id)
        head, *lines = map(json.loads, self.sent.splitlines())
        if head["value"].get("parentCommit") not in (None, commit):
            raise RefusalError(412, "")
        after = dict(files)
        for line in lines:
            assert line["key"] == "file"
            after[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        made = self.server.commit(repo_id, after, kind=kind)
        self.say({"commitUrl": f"{self.server.url}/{repo_id}/commit/{made}", "commitOid": made})

    # --- answers ------------------------------------------------------------------------------------------

    def say(self, value: object) -> None:
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def answer(self, status: int, headers: dict, body: bytes) -> None:
        """Send a response, as wrong as the fault wants it."""
        fault = self.fault
        body = fault.body(body) if fault.body else body
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        stops = [n for n in (fault.dies_after, fault.stalls_after) if n is not None]
        self.wfile.write(body[: stops[0]] if stops else body)
        if fault.stalls_after is not None:
            self.server.closing.wait(60)
        self.close_connection = self.close_connection or bool(stops)


ANY = "/api/(datasets|models)/([^/]+/[^/]+?)"
OF_FILES = "/(?:(datasets)/)?([^/]+/[^/]+?)"
ROUTES = {
    f"GET {ANY}(?:/revision/([^/]+))?": Handler.info,
    f"GET {OF_FILES}/resolve/([^/]+)/(.+)": Handler.resolve,
    "POST /api/validate-yaml": lambda handler: handler.say({"errors": [], "warnings": []}),
    "POST /api/repos/create": Handler.create,
    f"POST {ANY}/preupload/main": Handler.preupload,
    f"POST {ANY}/commit/main": Handler.take,
}
