"""Published shards and their tokenizer from the Hugging Face hub: each file whole and checked, or not there.

    python -m data.download --variant sp1024 --train-shards 80
    python -m data.download --variant sp1024 --train-shards 0      # the validation split alone
    python -m data.download --variant sp1024 --verify              # check every byte of what is there

The hub client finds repo, commit, token, mirror and proxy; HF_ENDPOINT, HF_TOKEN and its other variables
count. The bytes are received here, because the client (2.4) throws away a file that it could not finish and
never gives up on a server that trickles. Here a part waits in .partial/ beside its target, a later call goes
on where it ends, and it gets its name when size, checksum and header are right: any moment is safe to stop.
All comes from one commit of one repo, which source.json in the data set's folder remembers. Validation shards
come last, so a first download that was cut short cannot be trained on.

Exit codes: 0 all is there, 2 bad argument, 3 it is not (the last line says why, and what to do), 130 Ctrl-C.
"""

import argparse
import fnmatch
import hashlib
import io
import itertools
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import filelock
import httpx2
from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_session, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFolder
from huggingface_hub.utils import build_hf_headers, parse_ratelimit_headers, validate_repo_id
from tqdm import tqdm

from data import command, files, shards
from data.command import DataError

REPO_ID = "willdepueoai/parameter-golf"
PREFIX = "datasets"  # the manifest's paths start from this folder of the repo
MANIFEST = f"{PREFIX}/manifest.json"
RECORD = "source.json"
PARTIAL = ".partial"
LOCK = "datasets/.download.lock"
TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT  # s without a byte; 10, or what the variable of that name says
SLOWEST = 1024  # bytes/s over TIMEOUT; a shard would take two days at this rate
RENEWAL = 1 << 20  # bytes of progress after which tries count anew
LONGEST_WAIT = 300  # s; the hub counts requests in windows of five minutes
PATIENCE = 6 * TIMEOUT  # s that a request may take without any part of a file coming
LARGEST_ANSWER = 64 << 20  # bytes; a listing of 100,000 files has 30 MB
GO_ON = "run the same command again to go on"
OWNER = "tell the repo's owner, or use another --revision"


class Unreachable(DataError):
    """The hub does not answer at all."""


class Damaged(DataError):
    """What came is not what was published; another try may bring it."""


class Stopped(Exception):
    """Another file has failed, so this one need not go on."""


def tell(line: str) -> None:
    """Tell of trouble, above the bar where there is one."""
    tqdm.write(line, file=sys.stderr)


# --- what is published: files, and the plan of a variant -------------------------------------------------


@dataclass(frozen=True)
class File:
    """A published file."""

    path: str  # below PREFIX in the repo, and below the root here
    size: int | None  # bytes
    etag: str  # the hub's name for the content: sha256 of a large file, sha1 of a small one, "" if unknown

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True)
class Plan:
    """What a variant consists of at one commit; `train` holds all shards, asked for or not."""

    repo_id: str
    revision: str  # as asked for; `commit` is what it meant then
    commit: str
    name: str
    folder: str  # below the root
    vocab_size: int | None
    tokenizer: tuple[File, ...]  # first the one that TOKENIZER_PATH names
    train: tuple[File, ...]
    val: tuple[File, ...]

    @property
    def origin(self) -> str:
        return f"{self.repo_id}@{self.commit[:12]}"

    def needed(self, train_shards: int) -> tuple[File, ...]:
        return self.tokenizer + self.train[:train_shards] + self.val


def checksum_or_none(text: object) -> str:
    """`text` where it can be a sha1 or sha256, else "": some mirrors make up etags of their own."""
    text = str(text or "").lower()
    return text if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", text) else ""


def same_content(stream: BinaryIO, etag: str) -> bool:
    """Whether the whole stream has the checksum `etag`; True where there is none to compare."""
    size = stream.seek(0, os.SEEK_END)
    kinds = {
        0: [],
        # a mirror like Artifactory gives the plain sha1 where the hub gives the one that git would
        40: [lambda: hashlib.sha1(b"blob %d\0" % size), hashlib.sha1],
        64: [hashlib.sha256],
    }[len(etag)]
    for kind in kinds:
        stream.seek(0)
        if hashlib.file_digest(stream, kind).hexdigest() == etag:
            return True
    return not kinds


# --- the hub: ask, wait and ask again --------------------------------------------------------------------


class Hub:
    """One repo on one hub. Every method raises DataError, in one line, once it gives up."""

    def __init__(self, repo_id: str, revision: str, retries: int):
        self.repo_id = repo_id
        self.revision = revision
        self.retries = retries
        self.stop = threading.Event()
        # some of the client's requests have no time limit and none a limit of size
        get_session().event_hooks["request"].append(limit_time)
        get_session().event_hooks["response"].append(limit_size)
        self.since: dict[str, float] = {}  # of each request under way, when it last came forward
        threading.Thread(target=self.watch, daemon=True).start()

    def patiently(self, what: str, attempt: Callable, progress: Callable[[], int] = lambda: 0):
        """Return attempt(), tried again after a failure that may pass, at most `retries` times in a row.

        It waits 1, 2, 4, ... s or as long as the hub asks. The count starts anew whenever `progress()`, in
        bytes, has passed its best by RENEWAL: so a bad line gets there in the end, and a broken server
        cannot hold us for ever.
        """
        best = progress()
        failures = 0
        while True:
            self.since[what] = time.monotonic()
            try:
                return attempt()
            except (HfHubHTTPError, httpx2.RequestError, OfflineModeIsEnabled, Damaged) as error:
                if progress() >= best + RENEWAL:
                    best = progress()
                    failures = 0
                ours = min(2.0**failures, 60) * random.uniform(0.75, 1.25)
                wait = max(ours, asked_wait(error))
                failures += 1
                if not may_pass(error) or failures > self.retries or wait > LONGEST_WAIT:
                    raise self.verdict(what, error, failures) from error
                tell(f"{what}: {brief(error)}: trying again in {wait:.0f} s ({failures} of {self.retries})")
            finally:
                del self.since[what]
            if self.stop.wait(wait):
                raise Stopped

    def watch(self) -> None:
        """End the program, which is safe at any moment, where a request trickles in for ever.

        The client's own time limit begins anew with each byte of an answer.
        """
        mend = f"check network, proxy and HF_ENDPOINT {constants.ENDPOINT}, then {GO_ON}"
        while not self.stop.wait(TIMEOUT / 4):
            for what, since in list(self.since.items()):
                if time.monotonic() - since > PATIENCE:
                    line = f"error: {what}: no answer that ends within {PATIENCE} s: {mend}"
                    print(line, file=sys.stderr, flush=True)
                    os._exit(DataError.exit_code)

    def verdict(self, what: str, error: Exception, tries: int) -> DataError:
        """The error to end with: what happened, and what mends it."""
        what = f"{what}: {brief(error)}"
        if tries > 1:
            what += f", {tries} times"
        if isinstance(error, OfflineModeIsEnabled):
            return Unreachable(what)
        if isinstance(error, httpx2.RequestError):
            return Unreachable(
                f"{what}: check network, proxy and HF_ENDPOINT {constants.ENDPOINT}, then {GO_ON}"
            )
        if isinstance(error, Damaged):
            return DataError(f"{what}: {GO_ON}; if this stays, tell the owner of {self.repo_id}")
        if isinstance(error, RevisionNotFoundError):
            return DataError(f"{what}: the repo has no revision {self.revision!r}: check --revision")
        if error.response.status_code in (401, 403, 404):
            token = "check that your token" if get_token() else "set HF_TOKEN to a token that"
            return DataError(
                f"{what}: not there, private or gated: check --repo-id {self.repo_id}, or {token} may read it"
            )
        wait = asked_wait(error)
        when = f" in {wait:.0f} s" if wait else ""
        return DataError(f"{what}: {GO_ON}{when}")

    def listing(self) -> tuple[str, dict[str, File]]:
        """The commit that the revision means now, and what lies below PREFIX then, by path."""
        try:
            commit, found = self.patiently(f"{self.repo_id} at {self.revision}", self.ask_listing)
            files = [
                File(
                    path=file.rfilename.removeprefix(PREFIX + "/"),
                    size=file.size,
                    etag=checksum_or_none(file.lfs and file.lfs.sha256),
                )
                for file in found
                if file.rfilename.startswith(PREFIX + "/")
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{constants.ENDPOINT} does not answer as a Hugging Face hub does ({brief(error)}"
                "): check HF_ENDPOINT and proxy"
            ) from error
        return commit, {file.path: file for file in files}

    def ask_listing(self) -> tuple[str, list]:
        """One try of `listing`: the commit, and the client's own objects for the files."""
        api = HfApi()
        info = api.dataset_info(self.repo_id, revision=self.revision, files_metadata=True)
        if not info.sha:
            raise ValueError("no commit")
        found = info.siblings  # some mirrors list no files here
        if not found:
            found = api.list_repo_tree(self.repo_id, repo_type="dataset", revision=info.sha, recursive=True)
        return info.sha, [file for file in found if not isinstance(file, RepoFolder)]

    def complete(self, file: File, commit: str) -> File:
        """`file` with the size and etag that listings leave out for small files, and some mirrors for all."""
        if file.size is not None and file.etag:
            return file
        url = self.url(file, commit)
        found = self.patiently(file.path, lambda: get_hf_file_metadata(url))
        size = found.size if file.size is None else file.size
        if found.commit_hash not in (None, commit) or size is None:
            raise DataError(
                f"{url}: the answer is for commit {found.commit_hash} and {size} bytes, expected "
                f"{commit} and a size: check HF_ENDPOINT and proxy, then {GO_ON}"
            )
        return File(file.path, size, file.etag or checksum_or_none(found.etag))

    def url(self, file: File, commit: str) -> str:
        return hf_hub_url(self.repo_id, f"{PREFIX}/{file.path}", repo_type="dataset", revision=commit)

    def fetch(self, file: File, commit: str, out: BinaryIO, bar: tqdm) -> None:
        """Append to `out` what it lacks of `file`, and check the whole."""
        self.patiently(
            file.path, lambda: self.receive(file, commit, out, bar), progress=lambda: out.seek(0, os.SEEK_END)
        )

    def receive(self, file: File, commit: str, out: BinaryIO, bar: tqdm) -> None:
        """One try of `fetch`. Raises Damaged, and empties `out` where nothing in it can be trusted."""
        if out.seek(0, os.SEEK_END) < file.size:
            self.request(file, commit, out, bar)
        size = out.seek(0, os.SEEK_END)
        if size < file.size:
            raise Damaged(f"ended after {size} of {file.size} bytes")
        if size > file.size:
            empty(out, bar)
            raise Damaged(f"more than the {file.size} bytes published")
        if not same_content(out, file.etag):
            empty(out, bar)
            raise Damaged(f"checksum is not {file.etag[:16]}..., the published one")

    def request(self, file: File, commit: str, out: BinaryIO, bar: tqdm) -> None:
        """Ask for what follows the bytes in `out`, and append it."""
        start = out.tell()
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        url = self.url(file, commit)
        limit = {"limit": file.size + LARGEST_ANSWER}
        session = get_session()
        with session.stream("GET", url, headers=headers, timeout=TIMEOUT, extensions=limit) as response:
            if response.status_code == 416:
                empty(out, bar)  # the server has nothing that could follow what we have
                return
            check_offer(response, start, file.size)
            if response.status_code == 200:
                empty(out, bar)  # it knows no ranges, and sends all of it again
            self.copy(response, file, out, bar)

    def copy(self, response: httpx2.Response, file: File, out: BinaryIO, bar: tqdm) -> None:
        """Write the body to `out`, but at most one chunk more than `file` has."""
        since = time.monotonic()
        received = 0  # bytes since then
        for chunk in response.iter_bytes():
            if self.stop.is_set():
                raise Stopped
            out.write(chunk)
            bar.update(len(chunk))
            now = time.monotonic()
            self.since[file.path] = now
            if out.tell() > file.size:
                return
            received += len(chunk)
            if now - since > TIMEOUT:
                rate = received / (now - since)
                if rate < SLOWEST:
                    raise Damaged(f"came at {rate:.0f} bytes/s, too slow to go on")
                since = now
                received = 0


def limit_time(request: httpx2.Request) -> None:
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {key: TIMEOUT if limits[key] is None else limits[key] for key in limits}


class Limited(httpx2.SyncByteStream):
    """The body of a response, but at most `limit` bytes: the client keeps an answer in memory."""

    def __init__(self, stream: httpx2.SyncByteStream, limit: int):
        self.stream, self.limit = stream, limit

    def __iter__(self) -> Iterator[bytes]:
        received = 0
        for chunk in self.stream:
            received += len(chunk)
            if received > self.limit:
                raise httpx2.RemoteProtocolError(f"answer of more than {self.limit} bytes")
            yield chunk

    def close(self) -> None:
        self.stream.close()


def limit_size(response: httpx2.Response) -> None:
    response.stream = Limited(response.stream, response.request.extensions.get("limit", LARGEST_ANSWER))


def check_offer(response: httpx2.Response, start: int, size: int) -> None:
    """Raise Damaged where the headers already show another content, HfHubHTTPError where there is none.

    So a sign-in page or an LFS pointer costs nothing that is there.
    """
    if response.status_code not in (200, 206):
        raise HfHubHTTPError("", response=response)
    if response.status_code == 206:
        told = response.headers.get("Content-Range", "no range")
        right = told.startswith(f"bytes {start}-") and told.rpartition("/")[2] in (str(size), "*")
    else:
        told = response.headers.get("Content-Length", str(size)) + " bytes"
        right = told == f"{size} bytes" or "Content-Encoding" in response.headers
    if not right:
        raise Damaged(f"the server offers {told}, expected {size} bytes from {start} on")


def empty(out: BinaryIO, bar: tqdm) -> None:
    bar.update(-out.seek(0, os.SEEK_END))
    out.seek(0)
    out.truncate()


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return not isinstance(error, OfflineModeIsEnabled)


def asked_wait(error: Exception) -> float:
    """Seconds that the hub asks to wait, 0 where it does not."""
    headers = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    limit = parse_ratelimit_headers(headers)
    if limit and limit.remaining == 0 and error.response.status_code == 429:
        return limit.reset_in_seconds
    return float(headers["Retry-After"]) if headers.get("Retry-After", "").isdecimal() else 0


def brief(error: Exception) -> str:
    """What happened, in one line, without advice."""
    if isinstance(error, HfHubHTTPError):
        return f"HTTP {error.response.status_code} from {error.response.url.netloc.decode()}"
    name = "" if isinstance(error, DataError) else type(error).__name__
    return " ".join([name, *str(error).split()]).strip()


# --- the manifest: from a variant to its files -----------------------------------------------------------


def ask_plan(hub: Hub, variant: str, workers: int) -> Plan:
    """What the hub publishes as `variant` now. Raises DataError."""
    commit, files = hub.listing()
    origin = f"{hub.repo_id}@{commit[:12]}"
    if "manifest.json" not in files:
        raise DataError(f"{origin} has no {MANIFEST}, and so no shards: check --repo-id and --revision")
    manifest = read_manifest(hub, hub.complete(files["manifest.json"], commit), commit)
    try:
        dataset, tokenizer = choose(manifest, variant, origin)
        folder = inside(dataset.get("path") or f"datasets/{dataset['name']}").rstrip("/")
        claims = claimed(dataset, tokenizer)
        groups = {"tokenizer": tokenizer_files(tokenizer, files, origin)}
        for which in "train", "val":  # some manifests have the folder in the patterns, or no patterns
            pattern = PurePosixPath(dataset.get(f"{which}_glob") or f"*_{which}_*.bin").name
            groups[which] = split(files, folder, pattern, origin)
        promised = (dataset.get("stats") or {}).get("files_val", max(1, len(groups["val"])))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{origin}: {MANIFEST} is not as it should be ({brief(error)}): {OWNER}") from error
    if len(groups["val"]) != promised:
        raise DataError(
            f"{origin} holds {len(groups['val'])} validation shards of {promised} in {folder}, "
            f"and a score needs the whole split: {OWNER}"
        )

    def complete(file: File) -> File:
        return agree(hub.complete(file, commit), claims.get(file.name, {}))

    with ThreadPoolExecutor(workers) as pool:
        whole = {key: tuple(pool.map(complete, group)) for key, group in groups.items()}
    return Plan(
        repo_id=hub.repo_id,
        revision=hub.revision,
        commit=commit,
        name=dataset["name"],
        folder=folder,
        vocab_size=tokenizer.get("vocab_size"),
        **whole,
    )


def read_manifest(hub: Hub, file: File, commit: str) -> dict:
    """The manifest at `commit`. It is never kept, so that none can go stale."""
    out = io.BytesIO()
    hub.fetch(file, commit, out, tqdm(disable=True))
    try:
        return json.loads(out.getvalue())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{hub.url(file, commit)}: not JSON ({brief(error)}): {OWNER}") from error


def fits(name: str, variant: str) -> bool:
    return name == variant or name.endswith("_" + variant)


def choose(manifest: dict, variant: str, origin: str) -> tuple[dict, dict]:
    """The manifest's entries of the variant and of its tokenizer."""
    datasets = [entry for entry in manifest["datasets"] if fits(entry["name"], variant)]
    if len(datasets) != 1:
        names = ", ".join(sorted(entry["name"] for entry in datasets or manifest["datasets"]))
        raise DataError(
            f"{origin} has {'more than one' if datasets else 'no'} variant {variant!r}: "
            f"call with --variant and one of: {names or 'none at all'}"
        )
    name = datasets[0]["tokenizer_name"]
    tokenizers = [entry for entry in manifest["tokenizers"] if entry["name"] == name]
    if not tokenizers:
        raise DataError(f"{origin}: {MANIFEST} lacks the tokenizer {name} of {datasets[0]['name']}: {OWNER}")
    return datasets[0], tokenizers[0]


def tokenizer_files(tokenizer: dict, files: dict[str, File], origin: str) -> list[File]:
    """The tokenizer, then its vocabulary as text where that is published too."""
    paths = [inside(tokenizer[key]) for key in ("model_path", "path", "vocab_path") if tokenizer.get(key)]
    if not paths or paths[0] not in files:
        raise DataError(f"{origin} lacks the file of the tokenizer {tokenizer['name']} {paths[:1]}: {OWNER}")
    return [files[path] for path in paths if path in files]


def split(files: dict[str, File], folder: str, pattern: str, origin: str) -> list[File]:
    """The shards of a split in the order of their numbers. Raises DataError where one is missing."""
    found = []
    for path, file in files.items():
        number = re.search(r"([0-9]+)\.bin$", path)
        if number and path == f"{folder}/{file.name}" and fnmatch.fnmatchcase(file.name, pattern):
            found.append((int(number[1]), file.name, file))
    found.sort()
    for (before, name, _), (after, next_name, _) in itertools.pairwise(found):
        if after != before + 1:
            raise DataError(
                f"{origin}: {next_name} follows {name} in {folder}, expected number {before + 1}: {OWNER}"
            )
    return [file for _, _, file in found]


def inside(path: str) -> str:
    """`path` where it stays below the root on every system. Raises DataError."""
    if not path or path.startswith("/") or ".." in path.split("/") or re.search(r"[\\:\0]", path):
        raise DataError(f"{MANIFEST} has the path {path!r}, which leads out of the folder: use another repo")
    return path


def claimed(dataset: dict, tokenizer: dict) -> dict[str, dict]:
    """What the manifest says of single files, by name: `sha256`, and `size` in bytes or `tokens`."""
    claims = {PurePosixPath(f.get("path") or f["name"]).name: f for f in dataset.get("files") or ()}
    path = tokenizer.get("model_path") or tokenizer.get("path") or ""
    sha256 = tokenizer.get("model_sha256") or tokenizer.get("sha256")
    return claims | {PurePosixPath(path).name: {"sha256": sha256}}


def agree(file: File, claim: dict) -> File:
    """`file` as the repo has it. Raises DataError where the manifest claims another content."""
    size = claim.get("size", file.size)
    if "tokens" in claim:
        size = shards.HEADER_BYTES + 2 * claim["tokens"]
    sha256 = checksum_or_none(claim.get("sha256"))
    other_content = sha256 and len(file.etag) == 64 and sha256 != file.etag
    if size != file.size or other_content:
        raise DataError(
            f"{file.path}: {MANIFEST} promises {size} bytes, sha256 {sha256 or 'unknown'}, "
            f"and the repo holds {file.size} bytes, {file.etag}: {OWNER}"
        )
    return replace(file, etag=sha256 or file.etag)


# --- the folder: where it came from, what it holds, what it lacks ----------------------------------------


def read_record(folder: Path) -> Plan | None:
    """The plan that `folder` was fetched by, None where this program did not fetch it."""
    path = folder / RECORD
    try:
        if not path.exists():
            return None
        raw = files.read_json(path)
        parts = {key: tuple(File(**file) for file in raw[key]) for key in ("tokenizer", "train", "val")}
        return Plan(**raw | parts)
    except (DataError, TypeError, KeyError) as error:
        raise DataError(
            f"{path}: not what this program wrote ({brief(error)}): "
            f"rm -r {shlex.quote(str(folder))}, then run the same command again"
        ) from error


def recorded_plan(root: Path, hub: Hub, variant: str) -> Plan | None:
    """The plan of an earlier call for the same repo, revision and variant."""
    for path in root.glob(f"datasets/*/{RECORD}"):
        plan = read_record(path.parent)
        same_commit = hub.revision in (plan.revision, plan.commit)
        if same_commit and plan.repo_id == hub.repo_id and fits(plan.name, variant):
            return plan
    return None


def is_bound(root: Path, plan: Plan) -> bool:
    """Whether the data set's folder was fetched by this plan.

    Raises DataError where it comes from another repo or commit, or holds files that are not of this one.
    """
    folder = root / plan.folder
    record = read_record(folder)
    mend = f"use another --root, or rm -r {shlex.quote(str(folder))}"
    if record and (record.repo_id, record.commit) != (plan.repo_id, plan.commit):
        raise DataError(
            f"{folder} is from {record.origin}, and this call asks for {plan.origin}: go on with "
            f"--repo-id {record.repo_id} --revision {record.commit}, {mend}"
        )
    strangers = {path.name for path in folder.glob("*.bin")} - {file.name for file in plan.train + plan.val}
    if strangers:
        raise DataError(
            f"{folder} holds {min(strangers)}, which is not of {plan.origin}, and a trainer "
            f"would take two sets for one: {mend}"
        )
    if record:
        return True
    there = [file for file in plan.tokenizer + plan.train + plan.val if (root / file.path).is_file()]
    if there:
        tell(f"comparing {len(there)} files of unknown origin in {root} with those of {plan.origin}")
    for file in there:
        path = root / file.path
        if problem := damage(path, file, thorough=True):
            raise DataError(
                f"{path} is not the one of {plan.origin} ({problem}): use another --root, or rm "
                f"{shlex.quote(str(path))}"
            )
    return False


def bind(root: Path, plan: Plan) -> None:
    """Remember, before any file comes, where the data set's files will have come from."""
    (root / plan.folder).mkdir(parents=True, exist_ok=True)
    files.write_beside(root / plan.folder / RECORD, (json.dumps(asdict(plan), indent=1) + "\n").encode())


def damage(path: Path, file: File, thorough: bool) -> str:
    """What is wrong with `path`, "" if nothing. Only `thorough` compares checksums."""
    if not path.is_file():
        return "absent"
    with open(path, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size != file.size:
            return f"{size} bytes, expected {file.size}"
        if thorough and not same_content(stream, file.etag):
            return f"checksum is not {file.etag[:16]}..."
    return ""


def lacking(root: Path, files: tuple[File, ...], thorough: bool, workers: int) -> dict[File, str]:
    """Those of `files` that are not there, or there but damaged, and then in what way."""
    if thorough:
        tell(f"comparing the checksums of {len(files)} files in {root}")
    with ThreadPoolExecutor(workers) as pool:
        problems = pool.map(lambda file: damage(root / file.path, file, thorough), files)
        return {file: problem for file, problem in zip(files, problems) if problem}


def part_path(root: Path, plan: Plan, file: File) -> Path:
    """Where `file` grows: on the target's file system, under a name that another commit does not use."""
    key = hashlib.sha256(f"{plan.repo_id} {plan.commit} {file}".encode()).hexdigest()
    return (root / file.path).parent / PARTIAL / f"{file.name}.{key[:16]}"


def check_shard(path: Path, name: str) -> None:
    """Raises DataError where `path`, which is what was published as `name`, is no shard."""
    try:
        shards.read_shard(path)
    except DataError as error:
        raise DataError(f"{name} as published is no shard ({error}): {OWNER}") from error


# --- the download ----------------------------------------------------------------------------------------


def fetch_file(root: Path, plan: Plan, file: File, hub: Hub, bar: tqdm) -> None:
    """Bring one file under its name, whole and checked."""
    part = part_path(root, plan, file)
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "a+b") as out:
        hub.fetch(file, plan.commit, out, bar)
        files.sync(out)
    if file.name.endswith(".bin"):
        try:
            check_shard(part, file.path)
        except DataError:
            part.unlink()
            raise
    os.replace(part, root / file.path)


def fetch_all(root: Path, plan: Plan, missing: dict[File, str], hub: Hub, workers: int) -> None:
    """Bring all `missing` files, `workers` at a time. Raises the first error, having stopped the others."""
    for file, problem in missing.items():
        if (root / file.path).is_file():
            tell(f"{root / file.path}: {problem}: removed, to be fetched again")
            (root / file.path).unlink()
    parts = [part_path(root, plan, file) for file in missing]
    total = sum(file.size for file in missing)
    there = sum(part.stat().st_size for part in parts if part.exists())
    to_come = total - there
    free = shutil.disk_usage(root / plan.folder).free
    if to_come > free:
        raise DataError(f"{root}: {to_come} bytes to come and {free} free: make room, then {GO_ON}")
    command.say(f"{plan.name} of {plan.origin}: {len(missing)} files, {to_come / 1e6:.1f} MB to come")
    bar = tqdm(total=total, initial=there, unit="B", unit_scale=True, desc=plan.name, disable=None)
    with bar, ThreadPoolExecutor(workers) as pool:
        for is_last in (False, True):
            group = [file for file in missing if (file in plan.val) == is_last]
            futures = [pool.submit(fetch_file, root, plan, file, hub, bar) for file in group]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                hub.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    for folder in {part.parent for part in parts}:
        shutil.rmtree(folder)  # with parts of other commits, which nobody will go on with


def find_plan(args: argparse.Namespace, hub: Hub) -> Plan:
    """The hub's word, or the folder's own where that cannot have changed or the hub is out of reach."""
    known = recorded_plan(args.root, hub, args.variant)
    if known and known.commit == hub.revision:
        return known
    command.say(f"asking {constants.ENDPOINT} for {hub.repo_id} at {hub.revision}")
    try:
        return ask_plan(hub, args.variant, args.workers)
    except Unreachable as error:
        if not known or lacking(args.root, known.needed(args.train_shards), False, args.workers):
            raise
        tell(f"{error}. Yet all files of {known.origin} are there, whatever {known.revision} may be by now")
        return known


def download(args: argparse.Namespace) -> int:
    """Make the folder hold what `args` asks for; the exit code. Raises DataError, OSError."""
    hub = Hub(args.repo_id, args.revision, args.retries)
    plan = find_plan(args, hub)
    if args.train_shards > len(plan.train):
        raise DataError(
            f"{plan.name} of {plan.origin} has {len(plan.train)} training shards, and not "
            f"{args.train_shards}: call with --train-shards {len(plan.train)} or fewer"
        )
    needed = plan.needed(args.train_shards)

    def survey() -> tuple[bool, dict[File, str]]:
        return is_bound(args.root, plan), lacking(args.root, needed, args.verify, args.workers)

    bound, missing = survey()
    if not bound or missing:  # else nothing is written, since the root may be read-only
        (args.root / "datasets").mkdir(parents=True, exist_ok=True)
        with lock(args.root):
            bound, missing = survey()  # now that no other download changes anything
            bind(args.root, plan)
            if missing:
                fetch_all(args.root, plan, missing, hub, args.workers)
    if not missing:
        checked = "checksums are right" if args.verify else "sizes are right (--verify checks every byte)"
        print(f"nothing to download: all {len(needed)} files are there, {checked}")
    report(args.root, plan)
    return 0


def lock(root: Path) -> filelock.AcquireReturnProxy:
    """One download at a time into a root; a second one waits for the first, and then finds its files."""
    file = filelock.FileLock(root / LOCK)
    try:
        return file.acquire(timeout=0)
    except filelock.Timeout:
        tell(f"another download into {root} is under way: waiting for it to end")
        return file.acquire()


def report(root: Path, plan: Plan) -> None:
    """Say what is there and the command that trains on it."""
    train = [file for file in plan.train if (root / file.path).is_file()]
    tokens = sum((file.size - shards.HEADER_BYTES) // 2 for file in train)
    tokenizer = plan.tokenizer[0]
    print(
        f"{plan.name} of {plan.origin}: {len(train)} training shards ({tokens:,} tokens), "
        f"{len(plan.val)} validation shards, tokenizer {tokenizer.name}. To train on it:"
    )
    print(command.training_command(root / plan.folder, root / tokenizer.path, plan.vocab_size))


# --- the command line ------------------------------------------------------------------------------------


def repo_id(text: str) -> str:
    validate_repo_id(text)
    return text


def parse(argv: list[str] | None) -> argparse.Namespace:
    summary, _, details = __doc__.partition("\n")
    parser = command.Parser(prog="python -m data.download", description=summary, epilog=details)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    count = command.whole(0)
    add = parser.add_argument
    add("--variant", default="sp1024", help="data set by its name or the end of it (%(default)s)")
    add("--train-shards", type=count, default=80, help="how many, from the first on (%(default)s)")
    add("--repo-id", type=repo_id, default=REPO_ID, help="dataset repo (%(default)s)")
    add("--revision", default="main", help="branch, tag or commit (%(default)s)")
    folder = command.REPO / "data"
    add("--root", type=Path, default=folder, help="gets datasets/ and tokenizers/ (%(default)s)")
    add("--workers", type=command.whole(1), default=8, help="files at a time (%(default)s)")
    add("--retries", type=count, default=4, help="further tries in a row (%(default)s)")
    add("--verify", action="store_true", help="compare the checksums of files that are there")
    return parser.parse_args(argv)


def interrupt(*_) -> None:
    print(f"\ninterrupted: {GO_ON}", file=sys.stderr, flush=True)
    os._exit(130)  # at once: a part may end anywhere, and a file never does


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.root = args.root.absolute()
    signal.signal(signal.SIGINT, interrupt)
    return command.run(lambda: download(args), f"{GO_ON}, or use another --root")


if __name__ == "__main__":
    command.open_streams()
    sys.exit(main())
