"""Tracks, their rules, and the schemas by which track.json and submission.json are read."""

import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from data.command import DataError
from records.files import read_json
from records.folders import record_folders

RECORDS = Path(__file__).resolve().parent


@cache
def schemas() -> dict:
    return read_json(RECORDS / "schema.json")["$defs"]


def schema_errors(value: dict, name: str) -> list[str]:
    """What is wrong with a JSON object by the schema of that name: 'place: message', sorted."""
    import jsonschema  # 0.1 s that a scoring need not pay

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
    """What a track allows: its track.json, checked, and which of its vocabularies is used."""

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
        """Its records' folders, in order of date and name."""
        return [path for path in record_folders(self.folder.parent) if path.parent == self.folder]

    @property
    def dataset(self) -> dict:
        """The text and one way to cut it into tokens."""
        return self.rules["dataset"] | self.vocabulary

    @property
    def counts_flops(self) -> bool:
        """Whether operations limit a run; else its machine does."""
        return "train_flops" in self.rules

    def using(self, name: str | None) -> "Track":
        """The same track with the vocabulary of the dataset `name`; None: as it is. Raises DataError."""
        offered = {one["name"]: one for one in self.rules["dataset"]["vocabularies"]}
        if name is not None and name not in offered:
            raise DataError(f"{self.name} has no dataset {name!r}, expected one of {', '.join(offered)}")
        return self if name is None else replace(self, vocabulary=offered[name])

    def code_size(self, code: bytes) -> int:
        """Bytes that a record's code counts for."""
        return len(code) if self["code_bytes"] == "raw" else len(zlib.compress(code, 9))


def load_track(folder: Path) -> Track:
    """The track of a folder that holds track.json, with its first vocabulary. Raises DataError."""
    path = folder / "track.json"
    if not path.exists():
        raise DataError(f"{folder}: holds no track.json; name a track's folder, as records/track_floppy")
    rules = read_json(path)
    if errors := schema_errors(rules, "track"):
        raise DataError(f"{path}: {errors[0]}")
    return Track(folder, rules, rules["dataset"]["vocabularies"][0])
