"""A Hugging Face hub on 127.0.0.1, as far as our commands see one, that can be made to misbehave.

    with HubServer() as hub:
        commit = hub.commit("owner/name", {"datasets/manifest.json": b"{}", "datasets/big.bin": b"..."})
        hub.fault("GET .*big.bin", times=2, dies_after=1000)
        ...                               # run the real client with HF_ENDPOINT=hub.url
        hub.requests                      # what it asked for

It speaks repo info of a commit with git and LFS checksums, HEAD and GET of /resolve/ with X-Repo-Commit and
ETag, ranges, and the hub's error codes. Files that end in .bin, .model, .ptz or .parquet are in LFS. It sends
their content itself, where the hub leads elsewhere, and speaks no Xet.

For uploads it speaks the creation of a repo, preupload, LFS batch, PUT, and commits as NDJSON.
hub.writers says which token may write in which namespace.
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
from typing import ClassVar
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
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.server.daemon_threads, self.server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reset(self) -> None:
        """Forget all repos, faults and requests."""
        self.repos: dict[str, dict] = {}  # kind/id -> refs {name: commit}, commits {commit: files}, token
        self.writers = {"hf_write": "me"}  # token -> namespace
        self.blobs: dict[str, bytes] = {}  # sha256 -> what was uploaded
        self.home = Path()  # of the client
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.closing = threading.Event()  # ends the answers that stall

    @contextlib.contextmanager
    def here(self, token: str = "hf_write", url: str | None = None) -> Iterator[None]:
        """The client of this process asks this hub, which it would else learn when it is imported."""
        url = url or self.url
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_TOKEN", token)
            patch.setattr(constants, "ENDPOINT", url)
            patch.setattr(
                constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
            )
            patch.setattr(constants, "HF_HOME", str(self.home))
            patch.setattr(constants, "HF_HUB_CACHE", str(self.home / "hub"))
            patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
            patch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
            yield

    def environment(self, **variables: str) -> dict[str, str]:
        """Of a process whose client asks this hub."""
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        return ours | {"HF_TOKEN": "", "NO_PROXY": "*"} | variables

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

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
        repo["refs"][ref], repo["commits"][commit], repo["token"] = commit, files, token
        return commit

    def files(self, repo_id: str, kind: str = "datasets") -> dict[str, bytes]:
        """What main of a repo holds."""
        repo = self.repos[f"{kind}/{repo_id}"]
        return repo["commits"][repo["refs"]["main"]]

    def sent(self, since: int = 0) -> list[str]:
        """sha256 of the blobs that were put, in order."""
        return [one.path.split("/")[2] for one in self.requests[since:] if one.method == "PUT"]

    def fault(self, where: str, **how) -> None:
        self.faults.append(Fault(where, **how))

    def take_fault(self, line: str) -> Fault:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.where, line):
                    fault.times -= 1
                    return fault
        return Fault("")

    def fetched(self, pattern: str = "", since: int = 0) -> list[str]:
        """Names of the files whose content was asked for, in order; `since` counts requests."""
        asked = [one.path for one in self.requests[since:] if one.method == "GET"]
        contents = [path for path in asked if "/resolve/" in path]
        return [path.rpartition("/")[2] for path in contents if re.search(pattern, path)]


def is_lfs(path: str) -> bool:
    return path.endswith((".bin", ".model", ".ptz", ".parquet"))


def checksums(data: bytes) -> tuple[str, str]:
    """(git blob sha1, sha256) of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), hashlib.sha256(data).hexdigest()


KIND = "(datasets|models)"
NAME = "([^/]+/[^/]+?)"


class Handler(BaseHTTPRequestHandler):
    """One connection. What is read: /api/KIND/ID[/revision/REV], [/datasets]/ID/resolve/REV/PATH."""

    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_):  # the tests look at hub.requests
        return

    def do_GET(self):
        self.serve(self.read)

    def do_POST(self):
        self.serve(self.write)

    do_HEAD = do_GET
    do_PUT = do_POST

    def serve(self, work: Callable[[Request, str], None]) -> None:
        url = urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        request = Request(self.command, unquote(url.path), token)
        self.hub.requests.append(request)
        self.fault = self.hub.take_fault(f"{self.command} {request.path}")
        try:
            self.fault.before()
            self.sent = self.body() if self.command in ("POST", "PUT") else b""
            if self.fault.status:
                self.answer(self.fault.status, {}, b"")
            else:
                work(request, url.path)
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client went away, as some tests want it to

    def read(self, request: Request, path: str) -> None:
        if match := re.fullmatch(f"/api/{KIND}/{NAME}(?:/revision/([^/]+))?", path):
            self.info(request, match[1], match[2], unquote(match[3] or "main"))
        elif match := re.fullmatch(f"/(?:(datasets)/)?{NAME}/resolve/([^/]+)/(.+)", path):
            self.resolve(request, match[1] or "models", *map(unquote, match.groups()[1:]))
        else:
            self.refuse(404, "")

    def open(self, request: Request, kind: str, repo_id: str, revision: str) -> tuple[str, dict] | None:
        """(commit, files), or None after a refusal."""
        repo = self.hub.repos.get(f"{kind}/{repo_id}")
        if not repo or repo["token"] not in ("", request.token):
            return self.refuse(401, "RepoNotFound")
        commit = repo["refs"].get(revision, revision)
        if commit not in repo["commits"]:
            return self.refuse(404, "RevisionNotFound")
        return commit, repo["commits"][commit]

    def info(self, request: Request, kind: str, repo_id: str, revision: str) -> None:
        if not (found := self.open(request, kind, repo_id, revision)):
            return
        commit, files = found
        siblings = [self.sibling(path, data) for path, data in sorted(files.items())]
        self.say({"id": repo_id, "sha": commit, "private": False, "tags": [], "siblings": siblings})

    def say(self, value: object) -> None:
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def sibling(self, path: str, data: bytes) -> dict:
        git, sha256 = checksums(data)
        found = {"rfilename": path, "size": len(data), "blobId": git}
        if is_lfs(path):
            found["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 130}
        return found

    def resolve(self, request: Request, kind: str, repo_id: str, revision: str, path: str) -> None:
        if not (found := self.open(request, kind, repo_id, revision)):
            return
        commit, files = found
        if path not in files:
            return self.refuse(404, "EntryNotFound")
        etag = checksums(files[path])[is_lfs(path)]
        return self.send_file(files[path], {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})

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

    def write(self, request: Request, path: str) -> None:
        if match := re.fullmatch("/blob/([0-9a-f]{64})", path):
            self.hub.blobs[match[1]] = self.sent
            return self.answer(200, {}, b"")
        if request.token not in self.hub.writers:
            return self.refuse(401, "")
        if path == "/api/validate-yaml":
            return self.say({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(request)
        for what, work in self.WRITES.items():
            if match := re.fullmatch(what.format(KIND=KIND, NAME=NAME), path):
                kind, repo_id = match[1] or "models", match[2]
                if repo_id.split("/")[0] != self.hub.writers[request.token]:
                    return self.refuse(403, "")
                if found := self.open(request, kind, repo_id, "main"):
                    return work(self, kind, repo_id, *found)
                return None
        return self.refuse(404, "")

    def create(self, request: Request) -> None:
        asked = json.loads(self.sent)
        if asked["organization"] != self.hub.writers[request.token]:
            return self.refuse(403, "")
        repo_id = f"{asked['organization']}/{asked['name']}"
        kind = f"{asked['type'] or 'model'}s"
        if f"{kind}/{repo_id}" in self.hub.repos:
            return self.refuse(409, "")
        self.hub.commit(repo_id, {".gitattributes": b"*.bin filter=lfs\n"}, kind=kind)
        self.say({"url": f"{self.hub.url}/{repo_id if kind == 'models' else f'datasets/{repo_id}'}"})

    def preupload(self, kind: str, repo_id: str, commit: str, files: dict[str, bytes]) -> None:
        said = []
        for file in json.loads(self.sent)["files"]:
            mode = "lfs" if is_lfs(file["path"]) else "regular"
            said.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        self.say({"files": said})

    def batch(self, kind: str, repo_id: str, commit: str, files: dict[str, bytes]) -> None:
        """Where to put the blobs; those that are here already need no action."""
        objects = json.loads(self.sent)["objects"]
        for one in objects:
            if one["oid"] not in self.hub.blobs:
                one["actions"] = {"upload": {"href": f"{self.hub.url}/blob/{one['oid']}"}}
        self.say({"transfer": "basic", "objects": objects})

    def take(self, kind: str, repo_id: str, commit: str, files: dict[str, bytes]) -> None:
        """A commit: a line for what it is, and one for each file."""
        head, *lines = map(json.loads, self.sent.splitlines())
        if head["value"].get("parentCommit") not in (None, commit):
            return self.refuse(412, "")
        after = dict(files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                after[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                after[value["path"]] = self.hub.blobs[value["oid"]]
        made = self.hub.commit(repo_id, after, kind=kind)
        self.say({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{made}", "commitOid": made})

    WRITES: ClassVar[dict] = {
        "/api/{KIND}/{NAME}/preupload/main": preupload,
        "/(?:(datasets)/)?{NAME}.git/info/lfs/objects/batch": batch,
        "/api/{KIND}/{NAME}/commit/main": take,
    }

    # --- answers ------------------------------------------------------------------------------------------

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
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        stops = [n for n in (fault.dies_after, fault.stalls_after) if n is not None]
        self.wfile.write(body[: stops[0]] if stops else body)
        if fault.stalls_after is not None:
            self.hub.closing.wait(60)
        self.close_connection = self.close_connection or bool(stops)
