"""Tracks, their rules, and the schemas by which track.json and submission.json are read."""

import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from data.command import REPO, DataError, shell
from data.files import read_json

RECORDS = REPO / "records"
DATA = REPO / "data"
FLOPPY_BYTES = 1_200_000  # what the preset floppy needs; on tracks with less, minute is the one that fits


@cache
def schemas() -> dict:
    return read_json(RECORDS / "schema.json")["$defs"]


def schema_errors(value: dict, name: str) -> list[str]:
    """The errors of a JSON object by the schema `name`, sorted: 'place: message'."""
    import jsonschema  # 0.1 s that --help need not pay

    validator = jsonschema.Draft202012Validator({"$defs": schemas(), "$ref": f"#/$defs/{name}"})
    try:
        return sorted(
            "/".join(map(str, error.absolute_path)) + ": " + error.message[:200]
            for error in validator.iter_errors(value)
        )
    except RecursionError:
        return [": lists or objects are nested too deep"]


@dataclass(frozen=True)
class Track:
    folder: Path
    rules: dict
    vocabulary: dict

    def __getitem__(self, name: str) -> Any:
        return self.rules[name]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def records(self) -> list[Path]:
        return [path for path in record_folders(self.folder.parent) if path.parent == self.folder]

    @property
    def dataset(self) -> dict:
        return self.rules["dataset"] | self.vocabulary

    @property
    def devices(self) -> int:
        """How many devices its machine has, each with a process of its own."""
        return self.rules.get("devices", 1)

    @property
    def counts_flops(self) -> bool:
        """Whether the track limits operations; else it limits seconds on one kind of machine."""
        return "train_flops" in self.rules

    def using(self, name: str | None) -> "Track":
        """The same track with the vocabulary of the dataset `name`; None: unchanged. Raises DataError."""
        offered = {one["name"]: one for one in self.rules["dataset"]["vocabularies"]}
        if name is not None and name not in offered:
            raise DataError(f"{self.name} has no dataset {name!r}, expected one of {', '.join(offered)}")
        return self if name is None else replace(self, vocabulary=offered[name])

    def code_size(self, code: bytes) -> int:
        """Bytes of a script by the track's rule: its size, or its size at zlib level 9."""
        return len(code) if self["code_bytes"] == "raw" else len(zlib.compress(code, 9))


def record_folders(root: Path) -> list[Path]:
    """All records of all tracks below `root`, in order of date and name."""
    return sorted(
        path
        for track in sorted(root.glob("*/track.json"))
        for path in track.parent.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name != "__pycache__"
    )


def load_track(folder: Path) -> Track:
    """The track of a folder that holds track.json, with its first vocabulary. Raises DataError."""
    path = folder / "track.json"
    if not path.exists():
        raise DataError(f"{folder}: holds no track.json; name a track's folder, as records/track_floppy")
    rules = read_json(path)
    if errors := schema_errors(rules, "track"):
        raise DataError(f"{path}: {errors[0]}")
    return Track(folder, rules, rules["dataset"]["vocabularies"][0])


def tokenizer_path(track: Track, data: Path) -> Path:
    return data / "tokenizers" / track.dataset["tokenizer"]


# --- reference compressors --------------------------------------------------------------------------------

REFERENCE = "yardsticks.json"
NOTHING, TRAINING = "nothing", "the training text"  # what a compressor has before the text


@dataclass(frozen=True)
class ReferenceCompressor:
    """What a compressor needs for a track's validation text."""

    name: str
    version: str
    settings: str
    after: str  # NOTHING or TRAINING
    bytes: int
    bits_per_byte: float

    def __str__(self) -> str:
        words = f"{self.name} {self.settings} ({self.version}) after {self.after}"
        return f"{words}: {self.bytes:,} bytes, {self.bits_per_byte:.4f} bits per byte"


def read_reference_compressors(track: Track) -> list[ReferenceCompressor]:
    """The rows of the track's yardsticks.json; [] without that file.

    Raises DataError if the file is damaged, or is of another text.
    """
    path = track.folder / REFERENCE
    if not path.exists():
        return []
    kept = read_json(path)
    mend = shell("python", "-m", "records", "track", "compressors", track.folder, "--write")
    if errors := schema_errors(kept, "reference_compressors"):
        raise DataError(f"{path}: {errors[0]}: {mend}")
    found, expected = kept["val_sha256"], track.dataset["val_sha256"]
    if expected not in (None, found):
        raise DataError(f"{path}: measured a text of sha256 {found}, the track's is {expected}: {mend}")
    return [ReferenceCompressor(**row) for row in kept["rows"]]
