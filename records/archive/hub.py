"""Records from the Hugging Face hub. All that comes from there is a stranger's.

A repo of a record holds what `records publish` puts there: the folder as it lies in records/, and beside it
the track's tokenizer. Only files that a record may have are fetched, none larger than a record's may be, and
each must have the checksum that the hub lists at the commit. Nothing of it runs outside the sandbox.
"""

import os
import re
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from huggingface_hub.utils import disable_progress_bars

from data import hub
from data.command import DataError
from data.files import file_sha256, locked, read_bytes, write_whole
from data.hub import COMMIT, RemoteFile, Repo
from records.archive.runs import FILES, FOLDER, MOST_FILES, most_bytes
from records.archive.tracks import RECORDS, Track, load_track

PLACE = re.compile(rf"(track_[a-z0-9_]+)/({FOLDER.pattern})/(?P<file>[^/]+)", re.ASCII)
TOKENIZERS = "tokenizers"  # a folder of the repo, as of data/
say = partial(print, file=sys.stderr, flush=True)  # apart from what a model writes, which goes to stdout


def cache_folder() -> Path:
    """Beside the client's own cache, which HF_HOME moves."""
    return Path(hub.constants.HF_HOME) / "bytegolf"


@dataclass(frozen=True)
class FetchedRecord:
    """A record's folder that was fetched, and the track of ours that it belongs to."""

    address: str  # hub:user/name@commit
    path: Path
    track: Path


# --- a record ---------------------------------------------------------------------------------------------


def fetch_record(text: str, data: Path, track: Path | None = None) -> FetchedRecord:
    """The record at an address, from the cache if it is there. Raises UsageError, DataError.

    Its track is that of our records/ which the repo names, or `track`.
    """
    repo, commit = hub.read_address(text, "model")
    home = cache_folder() / "records" / repo.id.replace("/", "--")
    if not (COMMIT.fullmatch(commit) and (home / commit).is_dir()):
        commit, listing = hub.ask_listing(repo, commit)
        rules = our_track(only_folder([*listing], text).parts[0], text, track)
        home.mkdir(parents=True, exist_ok=True)
        with locked(home, file=".lock"):
            bring(repo, commit, wanted(listing, rules, text), home)
    here = home / commit
    place = only_folder([path.relative_to(here).as_posix() for path in here.rglob("*")], text)
    rules = our_track(place.parts[0], text, track)
    supply_tokenizer(here / TOKENIZERS, rules, data)
    return FetchedRecord(f"hub:{repo.id}@{commit}", here / place, rules.folder)


def only_folder(paths: list[str], text: str) -> PurePosixPath:
    """<track>/<record> of a repo that holds one record. Raises DataError."""
    found = {PurePosixPath(path).parent for path in paths if PLACE.fullmatch(path)}
    if len(found) != 1:
        raise DataError(
            f"{text}: holds {len(found)} folders <track>/<date>_<name>, expected the one of a record, "
            "as python -m records publish puts it there"
        )
    return found.pop()


def our_track(name: str, text: str, given: Path | None) -> Track:
    """The rules are ours, never the repo's. Raises DataError."""
    if given is None and not (RECORDS / name / "track.json").exists():
        raise DataError(f"{text}: is of {name}, which is no track of ours; --track names the track")
    return load_track(given or RECORDS / name)


def wanted(listing: dict[str, RemoteFile], rules: Track, text: str) -> list[RemoteFile]:
    """The files to fetch. Raises DataError where one is not a record's, or too large for one."""
    folder = only_folder([*listing], text)
    budget = rules["budget_bytes"]
    files = [file for path, file in listing.items() if PurePosixPath(path).is_relative_to(folder)]
    for file in files:
        if not FILES.fullmatch(str(PurePosixPath(file.path).relative_to(folder))):
            raise DataError(f"{text}: {file.path} has no place in a record")
        if file.size > (most := most_bytes(PurePosixPath(file.path), budget)):
            raise DataError(f"{text}: {file.path} has {file.size} bytes, expected {most} at most")
    if len(files) > MOST_FILES:
        raise DataError(f"{text}: holds {len(files)} files of a record, expected {MOST_FILES} at most")
    tokenizers = {f"{TOKENIZERS}/{one['tokenizer']}" for one in rules["dataset"]["vocabularies"]}
    return files + [file for path, file in listing.items() if path in tokenizers and file.size <= budget]


def bring(repo: Repo, commit: str, files: list[RemoteFile], home: Path) -> None:
    """The files in the folder of their commit, which appears when all are there and right."""
    if (home / commit).is_dir():
        return
    disable_progress_bars()  # the client's own: one for each of many files
    stage = home / f".{commit}.partial"
    say(f"hub:{repo.id}@{commit}: {len(files)} files, {sum(file.size for file in files) / 1e6:.1f} MB")
    for file in files:
        hub.fetch(repo, commit, file, stage)
    shutil.rmtree(stage / ".cache", ignore_errors=True)  # the client's own notes
    os.rename(stage, home / commit)


def supply_tokenizer(folder: Path, rules: Track, data: Path) -> None:
    """Copy to data/ the track's tokenizers that it lacks: those alone whose hash the track names."""
    for one in rules["dataset"]["vocabularies"]:
        here, there = data / "tokenizers" / one["tokenizer"], folder / one["tokenizer"]
        if not here.exists() and there.is_file() and file_sha256(there).hex() == one["tokenizer_sha256"]:
            here.parent.mkdir(parents=True, exist_ok=True)
            write_whole(here, read_bytes(there))
            say(f"{here}: the track's tokenizer, which was not here")
