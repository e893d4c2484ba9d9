"""What the models of records write, as a track keeps it for the pages: records/<track>/excerpts.json."""

from data.command import DataError
from data.files import read_json
from records.archive.tracks import Track

FILE = "excerpts.json"
FIELDS = {"sha256": str, "command": str, "prompt": str, "temperature": float, "text": str}


def read_excerpts(track: Track, digests: dict[str, str]) -> dict[str, dict]:
    """The samples of a track's records by name, without those of folders that changed since.

    `digests`: folder_sha256 by name, of the folders as they are now. Raises DataError.
    """
    path = track.folder / FILE
    if not path.exists():
        return {}
    kept = read_json(path)
    for name, its in kept.items():
        wrong = not isinstance(its, dict) or [
            key for key in FIELDS if not isinstance(its.get(key), FIELDS[key])
        ]
        if wrong:
            raise DataError(
                f"{path}: {name!r} is no whole sample: python -m records excerpts writes it again"
            )
    return {name: its for name, its in kept.items() if digests.get(name) == its["sha256"]}
