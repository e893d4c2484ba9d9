"""Files from repos of the Hugging Face hub and into them, by the hub's own client.

The client does the transfer: token, mirror, proxy, retries and rate limits are its own, set by HF_ENDPOINT,
HF_TOKEN and its other variables. Here every file that comes is checked, and every error is one line.
"""

import contextlib
import fcntl
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import httpx2
from huggingface_hub import CommitOperationAdd, HfApi, _local_folder, constants, errors, file_download
from huggingface_hub.utils import disable_progress_bars, get_token, validate_repo_id

from data.command import DataError, UsageError

GO_ON = "run the same command again to go on"
MAIN = "main"
HUBS_OWN = ".gitattributes"  # which the hub puts into every new repo
CARD = "README.md"
ADDRESS = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")


@contextlib.contextmanager
def lock(path: str | Path, **options: object) -> Iterator[None]:
    """The client's lock of a file; none where the file system has none, where its own would end."""
    with open(path, "a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


file_download.WeakFileLock = _local_folder.WeakFileLock = lock


@dataclass(frozen=True)
class Repo:
    """A repo of the hub."""

    id: str
    kind: str  # model or dataset
    named: str  # as the user named it, for advice


@dataclass(frozen=True)
class RemoteFile:
    """A published file."""

    path: str
    size: int  # bytes
    etag: str  # the hub's name for the content: sha256 of a large file, git's sha1 of a small one

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


def repo_id(text: str) -> str:
    """The type of an argument that names a repo."""
    if text.count("/") != 1:
        raise ValueError(f"{text!r} given, expected USER/NAME")
    validate_repo_id(text)
    return text


def read_address(text: str, kind: str) -> tuple[Repo, str]:
    """The repo and the revision of hub:user/name, or hub:user/name@revision. Raises UsageError."""
    found = ADDRESS.fullmatch(text)
    try:
        validate_repo_id(found[1] if found else "")
    except errors.HFValidationError:
        raise UsageError(f"{text}: is no address, expected hub:user/name or hub:user/name@commit") from None
    return Repo(found[1], kind, text), found[2] or MAIN


# --- errors -----------------------------------------------------------------------------------------------

# What the client raises: on the way to the hub (RuntimeError: from its storage, Xet), and where an answer is
# not a hub's.
NO_CONNECTION = (OSError, httpx2.RequestError, RuntimeError, errors.XetDownloadError)
NO_HUB = (ValueError, TypeError, KeyError, AttributeError)


@contextlib.contextmanager
def one_line(what: str, repo: Repo, revision: str, writing: bool = False) -> Iterator[None]:
    """Raises DataError for what the client raises in the block; errors of the disk pass."""
    try:
        yield
    except (*NO_CONNECTION, *NO_HUB) as error:
        hidden = isinstance(error, errors.LocalEntryNotFoundError) or type(error) is RuntimeError
        if hidden and error.__cause__:  # it looked on the disk when the hub failed, or a thread of its failed
            error = error.__cause__
        if isinstance(error, OSError) and error.errno is not None:
            raise error
        raise explained(error, what, repo, revision, writing) from error


def explained(error: BaseException, what: str, repo: Repo, revision: str, writing: bool) -> DataError:
    """The error to end with: what happened, and what mends it."""
    token = "check that your token" if get_token() else "set HF_TOKEN to a token that"
    if isinstance(error, errors.RevisionNotFoundError):
        mend = f"the repo has no revision {revision!r}: check the revision that you named"
    elif isinstance(error, errors.HfHubHTTPError) and error.response.status_code not in (401, 403, 404):
        mend = GO_ON
    elif isinstance(error, errors.HfHubHTTPError) and writing:
        mend = f"{token} may write to {repo.id}"
    elif isinstance(error, errors.HfHubHTTPError):
        mend = f"no {repo.kind} repo, private or gated: check {repo.named}, or {token} may read it"
    elif isinstance(error, NO_CONNECTION):
        mend = f"check network, proxy and HF_ENDPOINT {constants.ENDPOINT}, then {GO_ON}"
    else:
        mend = f"{constants.ENDPOINT} does not answer as a Hugging Face hub does: check HF_ENDPOINT and proxy"
    return DataError(f"{what}: {brief(error)}: {mend}")


def brief(error: BaseException) -> str:
    """What happened, in one line, without advice."""
    if isinstance(error, errors.HfHubHTTPError):
        return f"HTTP {error.response.status_code} from {error.response.url.netloc.decode()}"
    return " ".join([type(error).__name__, *str(error).split()])


# --- reading ----------------------------------------------------------------------------------------------


def ask_listing(repo: Repo, revision: str) -> tuple[str, dict[str, RemoteFile]]:
    """The commit that the revision means now, and what the repo holds then, by path. Raises DataError."""
    with one_line(f"{repo.id} at {revision}", repo, revision):
        asked = {"repo_type": repo.kind, "revision": revision, "files_metadata": True}
        info = HfApi().repo_info(repo.id, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, **asked)
        if not COMMIT.fullmatch(info.sha):
            raise ValueError(f"commit {info.sha!r}")
        listing = {}
        for file in info.siblings:
            etag = file.lfs.sha256 if file.lfs else file.blob_id
            listing[file.rfilename] = RemoteFile(file.rfilename, int(file.size), etag.lower())
    return info.sha, listing


def fetch(repo: Repo, commit: str, file: RemoteFile, stage: Path | None = None) -> Path:
    """Have the client bring a file into `stage`, or its cache, and check all of it. Raises DataError."""
    with one_line(file.path, repo, commit):
        found = HfApi().hf_hub_download(
            repo.id, file.path, repo_type=repo.kind, revision=commit, local_dir=stage
        )
    path = Path(found)
    if problem := damage(path, file):
        path.resolve().unlink()  # else the client would take it for whole
        raise DataError(f"{file.path}: {problem}: {GO_ON}; if this stays, tell the owner of {repo.id}")
    return path


def damage(path: Path, file: RemoteFile) -> str:
    """What is wrong with `path`, "" if nothing."""
    if not path.is_file():
        return "absent"
    size = path.stat().st_size
    if size != file.size:
        return f"{size} bytes, expected {file.size}"
    start = hashlib.sha256() if len(file.etag) == 64 else hashlib.sha1(b"blob %d\0" % size)
    with open(path, "rb") as stream:
        found = hashlib.file_digest(stream, lambda: start).hexdigest()
    return "" if found == file.etag else f"checksum is not {file.etag[:16]}..., the published one"


# --- writing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RepoContents:
    """What a repo holds before something is published in it; no commit: there is no such repo yet."""

    repo: Repo
    commit: str
    listing: dict[str, RemoteFile]

    def refuse_strangers(self, ours: Callable[[str], bool], what: str) -> None:
        """Raises DataError where the repo holds anything that is not `ours`: it is never overwritten.

        A card is ours where one of our files lies beside it.
        """
        paths = self.listing.keys() - {HUBS_OWN}
        strangers = sorted(path for path in paths if path != CARD and not ours(path))
        if strangers or paths == {CARD}:
            stranger = (strangers or [CARD])[0]
            mend = f"nothing was changed, name another repo than {self.repo.named}"
            raise DataError(f"{self.repo.id} holds {stranger}, which is not of {what}: {mend}")


def look(repo: Repo) -> RepoContents:
    """What is in a repo that we are going to write to. Raises DataError."""
    if not get_token():
        raise DataError(f"no token: set HF_TOKEN to one that may write to {repo.id}, or run hf auth login")
    with one_line(repo.id, repo, MAIN, writing=True):
        if not HfApi().repo_exists(repo.id, repo_type=repo.kind):
            return RepoContents(repo, "", {})
    return RepoContents(repo, *ask_listing(repo, MAIN))


def publish(there: RepoContents, sources: dict[str, Path], message: str) -> tuple[str, list[str]]:
    """Make a repo hold files, by their paths in it: the commit, and which of them have changed.

    They appear in one commit, so nobody sees a part of them. Large files that came before an upload was cut
    off are not sent again: the hub knows them by their hash. Raises DataError.
    """
    repo, listing = there.repo, there.listing
    changed = [path for path in sources if path not in listing or damage(sources[path], listing[path])]
    if not changed:
        return there.commit, []
    if not sys.stderr.isatty():
        disable_progress_bars()
    with one_line(f"{repo.id}: {len(changed)} files to send", repo, MAIN, writing=True):
        if not there.commit:
            HfApi().create_repo(repo.id, repo_type=repo.kind, exist_ok=True)
        done = HfApi().create_commit(
            repo.id,
            [CommitOperationAdd(path, sources[path]) for path in changed],
            repo_type=repo.kind,
            commit_message=message,
            parent_commit=there.commit or None,  # so that nobody else's commit is lost
        )
    return done.oid, changed
