"""A dataset of text on the Hugging Face hub, read like files of one's own: one file is fetched at a time."""

import re
from collections import Counter
from pathlib import Path, PurePosixPath

from data import hub
from data.command import DataError, UsageError, say, some
from data.sources import KINDS, Source, reader

TRAIN = ("train", "training")  # words in a path, as the hub's own library reads them
OTHERS = ("validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")
BESIDE = (hub.CARD, "dataset_infos.json")  # what lies beside the text in many repos
CONVERTED = "@refs/convert/parquet"  # a branch that the hub itself makes of most datasets


def find_text(repo: hub.Repo, revision: str, subset: str, most: int | None) -> Source:
    """The files to train on, the first `most` of them. Raises DataError, UsageError.

    They stay in the client's cache.
    """
    say(f"asking {hub.constants.ENDPOINT} for {repo.id} at {revision}")
    commit, listing = hub.ask_listing(repo, revision)
    paths = choose([*listing], subset, repo.named)[:most]

    def bring(path: Path) -> Path:
        file = listing[path.as_posix()]
        place = f"file {paths.index(file.path) + 1} of {len(paths)}"
        say(f"{repo.id}: {place}, {file.path}, {file.size / 1e6:,.1f} MB")
        return hub.fetch(repo, commit, file)

    return Source(tuple(map(Path, paths)), origin=f"hub:{repo.id}@{commit}", bring=bring)


def choose(paths: list[str], subset: str, named: str) -> list[str]:
    """The files to train on, in order: those of the first kind of parquet, JSON and plain text that is there.

    Without `subset`, a folder or a file of the repo, all of them lie in one folder: others may hold the same
    text again. Raises DataError, UsageError.
    """
    inside = [path for path in sorted(paths) if subset == "." or PurePosixPath(path).is_relative_to(subset)]
    if not inside:
        raise UsageError(f"{named}: holds no --subset {subset!r}, expected one of {folders_of(paths)}")
    kinds = {path: reader(Path(path)) for path in inside if PurePosixPath(path).name not in BESIDE}
    kind = next((kind for kind in KINDS if kind in kinds.values()), None)
    if kind is None:
        raise DataError(
            f"{named}: holds no files of parquet, JSON or plain text, but {some(inside)}; {CONVERTED} after "
            "the name reads what the hub made of them, where it did"
        )
    of_kind = [path for path in inside if kinds.get(path) == kind]
    best = max(map(for_training, of_kind))
    found = [path for path in of_kind if for_training(path) == best]
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


def for_training(path: str) -> int:
    """2 where the last word of a path that names a split names training, 1 where none does, else 0."""
    words = [word for word in re.split(r"[^a-z0-9]+", path.lower()) if word in (*TRAIN, *OTHERS)]
    return (words[-1] in TRAIN) * 2 if words else 1
