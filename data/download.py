"""Published shards and their tokenizer from the Hugging Face hub, each file whole and checked or not there.

    python data/download.py --variant sp1024 --train-shards 80
    python data/download.py --variant sp1024 --train-shards 0      # the validation split alone
    python data/download.py --variant sp1024 --verify              # check every byte of what is there

The hub client finds the repo, the commit, the token, the proxies and the mirror (HF_ENDPOINT, HF_TOKEN and its
other variables count). The bytes are received here, because the client (2.4) forgets a file that it could not
finish, and never gives up a server that trickles: here a part lies in .partial/ beside its target, a later call
goes on where it ends, and it gets its name only when size, checksum and header are right. So any moment is safe
to stop at. Everything comes from one commit of one repo; source.json in the data set's folder says which.

Exit codes: 0 all is there, 2 bad argument, 3 it is not (the last line says why), 130 Ctrl-C.
"""
import argparse
import fnmatch
import hashlib
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Callable

import filelock
import httpx2
from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_session, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFolder
from huggingface_hub.utils import build_hf_headers, parse_ratelimit_headers, validate_repo_id
from tqdm import tqdm

import shards
from shards import DataError

REPO_ID = "willdepueoai/parameter-golf"
PREFIX = "datasets"                         # the paths in the manifest start from this folder of the repo
MANIFEST = f"{PREFIX}/manifest.json"
RECORD = "source.json"
PARTIAL = ".partial"
TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT  # s without a byte, 10 unless the variable of that name says else
SLOWEST = 1024                              # bytes/s over TIMEOUT; at this rate one shard would take two days
RENEWAL = 1 << 20                           # bytes of progress after which the tries count anew
LONGEST_WAIT = 300                          # s; the hub counts its requests in windows of five minutes


class Unreachable(DataError):
    """No answer from the hub at all."""


class Damaged(DataError):
    """What came is not what was published; another try may bring it."""


class Stopped(Exception):
    """Another file has failed, so this one need not go on."""


def say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)       # above the bar where there is one


# --------------------------------------------------------------------------------------------------
# what is published: files, and the plan of a data set
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A published file: `path` below PREFIX in the repo and below the root here, `size` in bytes, `etag` as the
    hub names content: the sha256 of a large file, the git or plain sha1 of a small one, "" if unknown."""
    path: str
    size: int | None = None
    etag: str = ""

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True)
class Plan:
    """Everything that a variant consists of at one commit. `train` has all shards, asked for or not."""
    repo_id: str
    revision: str                           # as asked for; `commit` is what it meant
    commit: str
    name: str
    folder: str
    vocab_size: int | None
    tokenizer: tuple[File, ...]             # first the one that TOKENIZER_PATH names
    train: tuple[File, ...]
    val: tuple[File, ...]

    def needed(self, train_shards: int) -> tuple[File, ...]:
        """The files of a call. Raises DataError where so many training shards do not exist."""
        if train_shards > len(self.train):
            raise DataError(f"{self.name} has {len(self.train)} training shards at {self.origin}, "
                            f"{train_shards} were asked for: call with --train-shards {len(self.train)}")
        return self.tokenizer + self.train[:train_shards] + self.val

    @property
    def origin(self) -> str:
        return f"{self.repo_id}@{self.commit[:12]}"


def same_content(stream: BinaryIO, etag: str) -> bool:
    """Whether the whole stream has the checksum `etag`; True where there is none to compare."""
    size = stream.seek(0, os.SEEK_END)
    # mirrors such as Artifactory give a small file's plain sha1 where the hub gives the one git would
    kinds = {64: [hashlib.sha256], 40: [lambda: hashlib.sha1(b"blob %d\0" % size), hashlib.sha1]}

    def checksum(kind) -> str:
        stream.seek(0)
        return hashlib.file_digest(stream, kind).hexdigest()
    return not etag or any(checksum(kind) == etag for kind in kinds[len(etag)])


def checksum_or_none(text: object) -> str:
    """`text` where it can be a sha1 or sha256, else "": some mirrors make up etags of their own."""
    text = str(text or "").lower()
    return text if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", text) else ""


# --------------------------------------------------------------------------------------------------
# the hub: ask, wait and ask again
# --------------------------------------------------------------------------------------------------


class Hub:
    """One repo on one hub. Every method raises DataError, in one line, when it gives up."""

    def __init__(self, repo_id: str, revision: str, retries: int):
        self.repo_id, self.revision, self.retries = repo_id, revision, retries
        self.stop = threading.Event()

    def patiently(self, what: str, attempt: Callable, progress: Callable[[], int] = lambda: 0):
        """Return attempt(). After a failure that may pass, wait 1, 2, 4, ... s, or what the hub asks for, and try
        again, at most `retries` times; the count starts anew whenever `progress()`, in bytes, has passed its best
        by RENEWAL, so a bad line gets there in the end and a broken server does not hold us for ever."""
        best, failures = progress(), 0
        while True:
            try:
                return attempt()
            except (HfHubHTTPError, httpx2.RequestError, OfflineModeIsEnabled, Damaged) as error:
                if progress() >= best + RENEWAL:
                    best, failures = progress(), 0
                wait = max(min(2.0 ** failures, 60) * random.uniform(0.75, 1.25), asked_wait(error))
                failures += 1
                if not may_pass(error) or failures > self.retries or wait > LONGEST_WAIT:
                    raise self.verdict(what, error, failures) from error
                say(f"{what}: {brief(error)}; again in {wait:.0f} s (try {failures + 1} of {self.retries + 1})")
            if self.stop.wait(wait):
                raise Stopped

    def verdict(self, what: str, error: Exception, tries: int) -> DataError:
        """The error to end with, and what mends it."""
        tried = f" ({tries} tries)" if tries > 1 else ""
        if isinstance(error, OfflineModeIsEnabled):
            return Unreachable(f"{what}: HF_HUB_OFFLINE is set, so the hub may not be asked: unset it")
        if isinstance(error, httpx2.RequestError):
            return Unreachable(f"{what}: {brief(error)}{tried}: check network, proxy and HF_ENDPOINT "
                               f"({constants.ENDPOINT}), then run the same command again to go on")
        if isinstance(error, Damaged):
            return DataError(f"{what}: {error}{tried}: run the same command again; if it stays, tell {self.repo_id}")
        status = error.response.status_code
        if isinstance(error, RevisionNotFoundError):
            return DataError(f"{self.repo_id} has no revision {self.revision!r}: check --revision")
        if status in (401, 403, 404):
            token = "the token in use may not read it" if get_token() else "set HF_TOKEN to a token that may read it"
            return DataError(f"{what}: {brief(error)}: {self.repo_id} does not exist or is private or gated: "
                             f"check --repo-id, or {token}")
        if asked_wait(error) > LONGEST_WAIT:
            return DataError(f"{what}: {brief(error)}: the hub asks to wait {asked_wait(error):.0f} s: "
                             "run the same command again then")
        return DataError(f"{what}: {brief(error)}{tried}: run the same command again later to go on")

    def listing(self) -> tuple[str, dict[str, File]]:
        """The commit that the revision means now, and what it holds below PREFIX by path from there."""
        api = HfApi()

        def ask():
            info = api.dataset_info(self.repo_id, revision=self.revision, files_metadata=True, timeout=TIMEOUT)
            # list_repo_tree asks without a time limit, and a hub that stalls must not hang us
            limit = httpx2.Timeout(TIMEOUT).as_dict()
            get_session().event_hooks["request"].append(lambda request: request.extensions.update(timeout=limit))
            tree = info.siblings or api.list_repo_tree(self.repo_id, recursive=True, revision=info.sha,
                                                       repo_type="dataset")
            return info.sha, [f for f in tree if not isinstance(f, RepoFolder)]
        try:
            commit, found = self.patiently(f"{self.repo_id} at {self.revision}", ask)
            if not isinstance(commit, str) or not commit:
                raise ValueError("no commit")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{constants.ENDPOINT} does not answer as a Hugging Face hub does "
                            f"({brief(error)}): check HF_ENDPOINT and proxy") from error
        files = [File(f.rfilename.removeprefix(PREFIX + "/"), f.size, checksum_or_none(f.lfs and f.lfs.sha256))
                 for f in found if f.rfilename.startswith(PREFIX + "/")]
        return commit, {file.path: file for file in files}

    def complete(self, file: File, commit: str) -> File:
        """`file` with the size and etag that a listing leaves out for small files, and some mirrors for all."""
        if file.size is not None and file.etag:
            return file
        url = self.url(file, commit)
        found = self.patiently(file.path, lambda: get_hf_file_metadata(url, timeout=TIMEOUT))
        if found.commit_hash not in (None, commit):
            raise DataError(f"{url}: the answer is of commit {found.commit_hash}, expected {commit}: "
                            "run the same command again; if it stays, check HF_ENDPOINT")
        size = found.size if file.size is None else file.size
        if size is None:
            raise DataError(f"{url}: the answer gives no size, expected X-Linked-Size or Content-Length: "
                            "check HF_ENDPOINT and proxy")
        return replace(file, size=size, etag=file.etag or checksum_or_none(found.etag))

    def url(self, file: File, commit: str) -> str:
        return hf_hub_url(self.repo_id, f"{PREFIX}/{file.path}", repo_type="dataset", revision=commit)

    def fetch(self, file: File, commit: str, out: BinaryIO, bar: tqdm) -> None:
        """Append to `out` what it lacks of `file`, and check it."""
        self.patiently(file.path, lambda: self.receive(file, commit, out, bar),
                       progress=lambda: out.seek(0, os.SEEK_END))

    def receive(self, file: File, commit: str, out: BinaryIO, bar: tqdm) -> None:
        """One try of `fetch`. Raises Damaged, and empties `out` where nothing in it can be trusted."""
        start = out.seek(0, os.SEEK_END)
        if start < file.size:
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            if start:
                headers["Range"] = f"bytes={start}-"
            with get_session().stream("GET", self.url(file, commit), headers=headers, timeout=TIMEOUT) as response:
                if response.status_code not in (200, 206, 416):
                    raise HfHubHTTPError("", response=response)
                if response.status_code != 206:
                    empty(out, bar)         # a server that knows no ranges sends all of it again
                self.copy(response, file, out, bar)
        size = out.seek(0, os.SEEK_END)
        if size < file.size:
            raise Damaged(f"ended after {size} of {file.size} bytes")
        if size > file.size or not same_content(out, file.etag):
            empty(out, bar)
            raise Damaged(f"more than the {file.size} bytes published" if size > file.size else
                          f"checksum is not {file.etag[:16]}..., the one published")

    def copy(self, response: httpx2.Response, file: File, out: BinaryIO, bar: tqdm) -> None:
        """Write the body to `out`, no more than a chunk beyond the size of `file`."""
        since, received = time.monotonic(), 0
        for chunk in response.iter_bytes():
            if self.stop.is_set():
                raise Stopped
            out.write(chunk)
            bar.update(len(chunk))
            received += len(chunk)
            if out.tell() > file.size:
                return
            if (seconds := time.monotonic() - since) > TIMEOUT:
                if received < SLOWEST * seconds:
                    raise Damaged(f"came at {received / seconds:.0f} bytes a second")
                since, received = time.monotonic(), 0


def empty(out: BinaryIO, bar: tqdm) -> None:
    bar.update(-out.seek(0, os.SEEK_END))
    out.seek(0)
    out.truncate()


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, (httpx2.RequestError, Damaged))


def asked_wait(error: Exception) -> float:
    """Seconds that the hub asks to wait, 0 where it does not."""
    headers = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    limit = parse_ratelimit_headers(headers)
    if limit and limit.remaining == 0 and error.response.status_code == 429:
        return limit.reset_in_seconds
    return float(headers["Retry-After"]) if headers.get("Retry-After", "").isdecimal() else 0


def brief(error: Exception) -> str:
    """What happened, on one line, without advice."""
    if isinstance(error, HfHubHTTPError):
        return f"HTTP {error.response.status_code} from {error.response.url.host}"
    if isinstance(error, Damaged):
        return str(error)
    return " ".join(f"{type(error).__name__} {error}".split())


# --------------------------------------------------------------------------------------------------
# the manifest: from a variant to its files
# --------------------------------------------------------------------------------------------------


def ask_plan(hub: Hub, variant: str, workers: int) -> Plan:
    """What the hub publishes under `variant` now."""
    commit, files = hub.listing()
    origin = f"{hub.repo_id}@{commit[:12]}"
    if "manifest.json" not in files:
        raise DataError(f"{origin} has no {MANIFEST}, so it publishes no shards: check --repo-id and --revision")
    manifest = read_manifest(hub, hub.complete(files["manifest.json"], commit), commit)
    try:
        plan = plan_of(manifest, variant, files, Plan(hub.repo_id, hub.revision, commit, "", "", None, (), (), ()))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{origin}: {MANIFEST} is not of the published form ({brief(error)}): tell its owner") from error
    with ThreadPoolExecutor(workers) as pool:
        def complete(group):
            return tuple(pool.map(lambda file: hub.complete(file, commit), group))
        return replace(plan, tokenizer=complete(plan.tokenizer), train=complete(plan.train), val=complete(plan.val))


def read_manifest(hub: Hub, file: File, commit: str) -> dict:
    out = io.BytesIO()
    hub.fetch(file, commit, out, tqdm(disable=True))
    try:
        return json.loads(out.getvalue())
    except ValueError as error:
        raise DataError(f"{hub.url(file, commit)}: not JSON ({error}): tell the repo's owner") from error


def plan_of(manifest: dict, variant: str, files: dict[str, File], plan: Plan) -> Plan:
    """Complete `plan` from the manifest, and check the one against what the repo really holds."""
    matches = [d for d in manifest["datasets"] if fits(d["name"], variant)]
    if len(matches) != 1:
        names = ", ".join(sorted(d["name"] for d in (matches or manifest["datasets"]))) or "none"
        raise DataError(f"{plan.origin} has {'no' if not matches else 'more than one'} variant {variant!r}: "
                        f"call with --variant and one of: {names}")
    entry, = matches
    found = [t for t in manifest["tokenizers"] if t["name"] == entry["tokenizer_name"]]
    if not found:
        raise DataError(f"{plan.origin}: {MANIFEST} has no tokenizer {entry['tokenizer_name']!r}, which "
                        f"{entry['name']} needs: tell its owner")
    paths = [found[0][key] for key in ("model_path", "path", "vocab_path") if found[0].get(key)]
    missing = [path for path in paths[:1] or ["a tokenizer file"] if path not in files]
    if missing:
        raise DataError(f"{plan.origin}: {missing[0]} is missing, the tokenizer of {entry['name']}: tell its owner")
    claims = {PurePosixPath(f.get("path") or f["name"]).name: f for f in entry.get("files") or ()}
    claims[PurePosixPath(paths[0]).name] = {"sha256": found[0].get("model_sha256") or found[0].get("sha256")}

    def published(paths):
        return tuple(agree(files[inside(path)], claims.get(PurePosixPath(path).name, {})) for path in paths)
    folder = inside(entry["path"]).rstrip("/")
    train, val = (split(files, folder, entry[f"{s}_glob"], entry.get("stats", {}).get(f"files_{s}"), plan.origin)
                  for s in ("train", "val"))
    return replace(plan, name=entry["name"], folder=folder, vocab_size=found[0].get("vocab_size"),
                   tokenizer=published(path for path in paths if path in files), train=published(train),
                   val=published(val))


def fits(name: str, variant: str) -> bool:
    return name == variant or name.endswith("_" + variant)


def inside(path: str) -> str:
    """`path` where it stays below the root on every system. Raises DataError."""
    if not path or path.startswith("/") or ".." in path.split("/") or re.search(r"[\\:\0]", path):
        raise DataError(f"{MANIFEST} names the path {path!r}, which leads out of the folder: do not use this repo")
    return path


def split(files: dict[str, File], folder: str, pattern: str, count: int | None, origin: str) -> list[str]:
    """Paths of a split's shards in order, none missing among them. `count` is how many the manifest promises."""
    paths = sorted(p for p in files if p.startswith(folder + "/") and fnmatch.fnmatchcase(p[len(folder) + 1:], pattern))
    numbers = [int(n) for p in paths for n in re.findall(r"(\d+)\.bin$", p)]
    gap = next((i for i, number in enumerate(numbers) if number != numbers[0] + i), None)
    if gap is not None:
        raise DataError(f"{origin}: shard {numbers[0] + gap} of {folder}/{pattern} is missing, the next is "
                        f"{PurePosixPath(paths[gap]).name}: tell its owner, or use another --revision")
    if "val" in pattern and (not paths or count not in (None, len(paths))):
        raise DataError(f"{origin} holds {len(paths)} of {count or 'at least 1'} validation shards {folder}/{pattern}, "
                        "and a score needs the whole split: tell its owner, or use another --revision")
    return paths


def agree(file: File, claim: dict) -> File:
    """`file` as the repo has it, refused where the manifest claims another content."""
    size = claim.get("size", shards.HEADER_BYTES + 2 * claim["tokens"] if "tokens" in claim else file.size)
    etag = checksum_or_none(claim.get("sha256"))
    for what, ours, theirs in (("bytes", file.size, size), ("sha256", file.etag if len(file.etag) == 64 else "", etag)):
        if ours and theirs and ours != theirs:
            raise DataError(f"{file.path}: {MANIFEST} promises {what} {theirs}, the repo holds {ours}: one of them "
                            "is stale: tell the owner, or use another --revision")
    return replace(file, size=size, etag=etag or file.etag)


# --------------------------------------------------------------------------------------------------
# the folder: what is there, where it came from, what it lacks
# --------------------------------------------------------------------------------------------------


def read_record(folder: Path) -> Plan | None:
    """The plan that `folder` was fetched by, None where it was not fetched by this program."""
    path = folder / RECORD
    try:
        raw = json.loads(path.read_bytes())
        files = {key: tuple(File(**file) for file in raw[key]) for key in ("tokenizer", "train", "val")}
        return Plan(**raw | files)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not what this program wrote ({brief(error)}): "
                        f"rm -r {shlex.quote(str(folder))}, then run the same command again") from error


def recorded_plan(root: Path, hub: Hub, variant: str) -> Plan | None:
    """The plan of an earlier call with the same repo, revision and variant."""
    plans = [read_record(path.parent) for path in root.glob(f"datasets/*/{RECORD}")]
    return next((p for p in plans if p and fits(p.name, variant) and p.repo_id == hub.repo_id
                 and hub.revision in (p.revision, p.commit)), None)


def bind(root: Path, plan: Plan) -> bool:
    """Tie the data set's folder to the plan's repo and commit, or raise DataError if it is tied to others.
    Returns False where files of unknown origin lie there, so that their content must be compared."""
    folder = root / plan.folder
    remove, record = f"rm -r {shlex.quote(str(folder))}", read_record(folder)
    if record and (record.repo_id, record.commit) != (plan.repo_id, plan.commit):
        raise DataError(f"{folder} holds {record.origin}, and {plan.revision} is now {plan.origin}: go on with "
                        f"--repo-id {record.repo_id} --revision {record.commit}, or take the new one "
                        f"with another --root or after {remove}")
    strangers = {p.name for p in folder.glob("*.bin")} - {f.name for f in plan.train + plan.val}
    if strangers:
        raise DataError(f"{folder}: {min(strangers)} is not of {plan.origin}, and two sets in one folder would be "
                        f"trained on as one: use another --root, or {remove}")
    if not record:
        for file in (f for f in plan.tokenizer + plan.train + plan.val if (root / f.path).is_file()):
            if problem := damage(root / file.path, file, thorough=True):
                raise DataError(f"{root / file.path}: not the file of {plan.origin} ({problem}): "
                                f"use another --root, or rm {shlex.quote(str(root / file.path))}")
    (folder / PARTIAL).mkdir(parents=True, exist_ok=True)
    draft = folder / PARTIAL / RECORD
    draft.write_text(json.dumps(asdict(plan), indent=1) + "\n")
    os.replace(draft, folder / RECORD)
    return bool(record)


def damage(path: Path, file: File, thorough: bool) -> str:
    """What is wrong with the bytes at `path`, "" if nothing; checksums are compared if `thorough`."""
    with open(path, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size != file.size:
            return f"{size} bytes, expected {file.size}"
        if thorough and not same_content(stream, file.etag):
            return f"its checksum is not {file.etag[:16]}..."
    return ""


def lacking(root: Path, needed: tuple[File, ...], thorough: bool, workers: int) -> list[File]:
    """The files that are not there; one that is there but damaged is removed, and said so."""
    def whole(file: File) -> bool:
        path = root / file.path
        if not path.is_file():
            return False
        problem = damage(path, file, thorough) 
        if problem:
            say(f"{path}: {problem}: removed, it will be fetched again")
            path.unlink()
        return not problem
    with ThreadPoolExecutor(workers) as pool:
        return [file for file, there in zip(needed, pool.map(whole, needed)) if not there]
