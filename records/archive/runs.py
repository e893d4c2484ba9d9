"""A run's folder in logs/: what it was trained on, and, where no track has its text, rules of its own."""

import math
import zlib
from pathlib import Path
from typing import Any

from data import shards
from data.command import REPO, DataError, shell
from data.files import file_sha256, parse_json, read_bytes, read_json
from records.archive.folders import SCRIPT
from records.archive.tracks import RECORDS, Track, load_track

MAX_HEADER = 1 << 20  # bytes of an artifact, unpacked, in which its metadata must end
SECONDS = 86_400  # of one scoring: no track limits them, but a model that hangs ends


def is_run(folder: Path) -> bool:
    """Whether this is a run's folder in logs/."""
    return (folder / "config.json").exists()


def is_own(folder: Path) -> bool:
    """Whether a run's script is the user's: it lies in logs/ of this checkout or of the working folder.

    Links are followed first. Nothing below records/ is own.
    """
    place = (folder / SCRIPT).resolve()
    homes = [(root / "logs").resolve() for root in (REPO, Path.cwd())]
    inside = any(place.is_relative_to(home) for home in homes)
    return is_run(folder) and inside and not place.is_relative_to(RECORDS.resolve())


def configuration(folder: Path) -> dict[str, str | int | float]:
    """Settings, environment and hashes of a run by their names in config.json. Raises DataError."""
    path = folder / "config.json"
    about = read_json(path) if path.exists() else {}
    found = {}
    for part in ("settings", "environment", "sha256"):
        if isinstance(about.get(part), dict):  # else it is another program's
            found |= about[part]
    return plain(found)


def plain(values: dict[str, Any]) -> dict[str, str | int | float]:
    return {name: value for name, value in values.items() if isinstance(value, str | int | float)}


def named_dataset(record: Path) -> str | None:
    """The dataset that a record's submission.json names, or that a run was trained on. Raises DataError."""
    if (record / "submission.json").exists():
        name = read_json(record / "submission.json").get("dataset")
    else:
        name = Path(str(configuration(record).get("data_path", ""))).name
    return str(name) if name else None


def named_tokenizer(record: Path, artifact: Path) -> str | None:
    """sha256 of the tokenizer by the artifact; by config.json where that is of another format, or old."""
    try:
        head = zlib.decompressobj().decompress(read_bytes(artifact), MAX_HEADER)
        header = parse_json(head[8 : 8 + int.from_bytes(head[:8], "little")])
        return str(parse_json(header["__metadata__"]["bytegolf"])["tokenizer_sha256"])
    except (zlib.error, ValueError, LookupError, TypeError):
        found = configuration(record).get("tokenizer_sha256")
        return found and str(found)


def places(record: Path, setting: str, home: Path) -> list[Path]:
    """Where a path leads that a run was given, from this folder or the repository, and its name in `home`."""
    path = Path(str(configuration(record).get(setting, "")))
    return [Path.cwd() / path, REPO / path, home.absolute() / path.name] if path.name else []


def find_tokenizer(record: Path, wanted: str | None, dataset: Path, data: Path) -> Path:
    """The file of the sha256 `wanted`, from data/tokenizers where it is there. Raises DataError."""
    home = data / "tokenizers"
    named = []
    if is_own(record):  # a stranger's folder may not name what is parsed here
        named = places(record, "tokenizer_path", home)
        if manifest := shards.load_manifest(dataset):
            named.append(shards.own_tokenizer(dataset, manifest))
    for path in [*sorted(home.absolute().glob("*.model")), *named]:
        if path.is_file() and file_sha256(path).hex() == wanted:
            return path
    looked = ", ".join(map(str, [*named, home / "*.model"]))
    raise DataError(
        f"{record}: is of no track, and none of {looked} has its tokenizer's sha256, "
        f"{wanted or 'which neither artifact nor config.json names'}: {shell('cp', 'FILE.model', home)} "
        "brings the tokenizer; --track records/track_floppy names a track"
    )


def own_track(record: Path, wanted: str | None, data: Path) -> Track:
    """Rules for a folder whose text is no track's: those of track_floppy, which holds for any machine.

    Its dataset and its tokenizer are absolute paths. `wanted`: the tokenizer's sha256. Raises DataError.
    """
    folders = places(record, "data_path", data / "datasets") or [record.absolute()]
    dataset = next((path for path in folders if path.is_dir()), folders[0])
    tokenizer = find_tokenizer(record, wanted, dataset, data)
    known = configuration(record).get("val_sha256")
    vocabulary = {"name": str(dataset), "tokenizer": str(tokenizer), "logged_val_sha256": known}
    text = {"tokenizer_policy": "provided", "val_sha256": None, "second": None, "vocabularies": [vocabulary]}
    more = {"eval_seconds": SECONDS, "second_band": [0, math.inf], "dataset": text}
    return Track(record, load_track(RECORDS / "track_floppy").rules | more, vocabulary)
