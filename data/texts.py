"""A dataset of text on the Hugging Face hub, read like files of one's own: one file is fetched at a time."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from data import hub
from data.command import DataError, UsageError, say, some
from data.hub import RemoteFile, Repo
from data.sources import Read, Source, kind_of

# Words in a path that say which split a file is of, as the hub's own library reads them.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
BESIDE = (hub.CARD, "dataset_infos.json")  # what lies beside the text in many repos
CONVERTED = "@refs/convert/parquet"  # a branch that the hub itself makes of most datasets


@dataclass(frozen=True)
class HubText:
    """The chosen files of a dataset at one commit. `source` says how to read them."""

    repo: Repo
    commit: str
    files: tuple[RemoteFile, ...]
    source: Source

    @property
    def origin(self) -> str:
        return f"hub:{self.repo.id}@{self.commit}"

    def state(self) -> list:
        """What changes when the text, or how it is read, changes."""
        names = [file.path for file in self.files]
        return [self.origin, names, self.source.field, self.source.separator]

    def documents(self) -> Iterator[Read]:
        """The documents in the order of the files, which stay in the client's cache. Raises DataError."""
        for number, file in enumerate(self.files, 1):
            size = f"{file.size / 1e6:,.1f} MB"
            say(f"{self.repo.id}: file {number} of {len(self.files)}, {file.path}, {size}")
            yield from self.source.read(hub.fetch(self.repo, self.commit, file))


def find_text(
    repo: Repo,
    revision: str,
    split: str,
    subset: str,
    most: int | None,
    field: str,
    separator: str | None,
) -> HubText:
    """The files of a split, the first `most` of them. Raises DataError, UsageError."""
    say(f"asking {hub.constants.ENDPOINT} for {repo.id} at {revision}")
    commit, listing = hub.ask_listing(repo, revision)
    chosen = choose([*listing], split, subset, repo.named)[:most]
    source = Source(tuple(map(Path, chosen)), field, separator)
    return HubText(repo, commit, tuple(listing[path] for path in chosen), source)


def choose(paths: list[str], split: str, subset: str, named: str) -> list[str]:
    """The files of one split in order: those of the first kind of parquet, JSON and plain text that is there.

    Without `subset`, a folder or a file of the repo, all of them lie in one folder: others may hold the same
    text again. Raises DataError, UsageError.
    """
    inside = [path for path in sorted(paths) if subset == "." or PurePosixPath(path).is_relative_to(subset)]
    if not inside:
        raise UsageError(f"{named}: holds no --subset {subset!r}, expected one of {folders_of(paths)}")
    kinds = {path: kind_of(Path(path)) for path in inside if PurePosixPath(path).name not in BESIDE}
    kind = min((kind for kind in kinds.values() if kind is not None), default=None)
    if kind is None:
        raise DataError(
            f"{named}: holds no files of parquet, JSON or plain text, but {some(inside)}; {CONVERTED} after "
            "the name reads what the hub made of them, where it did"
        )
    splits = {path: split_of(path) for path in inside if kinds.get(path) == kind}
    found = [path for path in splits if splits[path] == split]
    if not any(splits.values()) and split == "train":
        found = [*splits]  # a repo that has no splits is all for training
    if not found:
        there = sorted({name for name in splits.values() if name} or {"train"})
        raise UsageError(f"{named}: has no files of --split {split}, expected one of {', '.join(there)}")
    if not subset and len({PurePosixPath(path).parent for path in found}) > 1:
        raise UsageError(
            f"{named}: has text in several folders, expected --subset and one of them, or . for all: "
            f"{folders_of(found)}"
        )
    return found


def folders_of(paths: list[str]) -> str:
    """The folders of files, in words: of more than five in one folder only their number."""
    folders = sorted({PurePosixPath(path).parent for path in paths} - {PurePosixPath(".")})
    siblings = Counter(folder.parent for folder in folders)
    many = [f"{parent} ({count} folders)" for parent, count in siblings.items() if count > 5]
    return some(many + [str(folder) for folder in folders if siblings[folder.parent] <= 5]) or "none"


def split_of(path: str) -> str:
    """The split that a path names, by the last word of it that does; "" where none does."""
    for word in reversed(re.split(r"[^a-z0-9]+", path.lower())):
        for split, words in SPLITS.items():
            if word in words:
                return split
    return ""
