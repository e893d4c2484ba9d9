"""Yardsticks: how many bytes well-known compressors need for a track's validation text.

`python -m records.yardsticks` measures them and writes records/<track>/yardsticks.json.
"""

from dataclasses import dataclass, fields

from data.command import DataError, shown
from records.files import read_json
from records.tracks import Track

FILE = "yardsticks.json"
NOTHING, TRAINING = "nothing", "the training text"  # what a reader has before the text


@dataclass(frozen=True)
class Yardstick:
    """What a compressor needs for the text."""

    name: str
    version: str
    settings: str
    after: str  # NOTHING or TRAINING
    bytes: int
    bits_per_byte: float

    def __str__(self) -> str:
        words = f"{self.name} {self.settings} ({self.version}) after {self.after}"
        return f"{words}: {self.bytes:,} bytes, {self.bits_per_byte:.4f} bits per byte"


def read_yardsticks(track: Track) -> list[Yardstick]:
    """Those that a track keeps; none where nobody measured.

    Raises DataError if the file is damaged, or speaks of another text.
    """
    path = track.folder / FILE
    if not path.exists():
        return []
    kept = read_json(path)
    mend = f"python -m records.yardsticks {shown(track.folder)} --write"
    found, expected = kept.get("val_sha256"), track.dataset["val_sha256"]
    if expected not in (None, found):
        raise DataError(f"{path}: measured a text of sha256 {found}, the track's is {expected}: {mend}")
    try:
        rows = [Yardstick(**value) for value in kept["rows"]]
    except (KeyError, TypeError):
        rows = []
    whole = all(
        isinstance(getattr(one, field.name), field.type) for one in rows for field in fields(Yardstick)
    )
    if not rows or not whole:
        raise DataError(f"{path}: 'rows' is no list of whole rows: {mend}")
    return rows
