"""A record's folder: the names that may stand in it, its code, its metrics and its artifacts."""

import gzip
import re
import zlib
from pathlib import Path, PurePath

from data.command import DataError
from data.files import read_bytes

FOLDER = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})_([A-Za-z0-9][A-Za-z0-9-]{0,59})")
SCRIPT = "train_gpt.py"  # what the referee loads
SEED = "seed(?:0|[1-9][0-9]{0,9})"  # one way to write each number: seed01 would be seed1 again
FILES = re.compile(
    r"README\.md|submission\.json|train_gpt\.py"
    rf"|train_{SEED}\.log|metrics_{SEED}\.jsonl(?:\.gz)?|model_{SEED}\.ptz"
)
PACKED = ".gz"
MAX_SEEDS = 60  # of a record
MOST_FILES = 3 * (1 + MAX_SEEDS)  # README, submission and script; of each seed log, metrics and artifact
MAX_METRICS = 16 << 20  # bytes of a run's metrics, unpacked
MAX_PAPERS = 64 << 20  # bytes of the logs and metrics of all seeds, unpacked
MAX_FILE = {".log": 4 << 20, ".jsonl": MAX_METRICS, ".md": 1 << 17, ".json": 1 << 20, ".py": 1 << 20}
MAX_FILE |= {PACKED: 16 << 20}


def most_bytes(path: PurePath, budget: int) -> int:
    """How large a file of a record may be, by its name; an artifact has the track's budget."""
    return MAX_FILE.get(path.suffix, budget)


def is_address(place: object) -> bool:
    """Whether a command names a repo of the hub in place of a folder: hub:user/name[@commit]."""
    return str(place).startswith("hub:")


def seed_of(name: str) -> int:
    """The seed in a file's name."""
    return int(re.search(r"seed(\d+)", name)[1])


def artifact_paths(folder: Path) -> dict[int, Path]:
    """The artifacts of a record by seed."""
    return {seed_of(path.name): path for path in sorted(folder.glob("model_seed*.ptz"))}


def metrics_path(folder: Path, seed: int) -> Path:
    """The metrics of a seed, packed or not. Where they lie in both forms, verify fails the folder."""
    plain = folder / f"metrics_seed{seed}.jsonl"
    packed = plain.with_name(plain.name + PACKED)
    return packed if packed.exists() and not plain.exists() else plain


def pack(data: bytes) -> bytes:
    """The same bytes each time, so that a folder made again has the same digest."""
    return gzip.compress(data, 9, mtime=0)


def read_metrics(path: Path, most: int = MAX_METRICS) -> bytes:
    """The bytes of metrics, unpacked where the name ends with .gz.

    Of a packed file no more than `most` bytes are unpacked: a thousandth of them may hold them all. Raises
    DataError.
    """
    blob = read_bytes(path)
    if path.suffix != PACKED:
        return blob
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        data = unpacker.decompress(blob, most + 1)
    except zlib.error as error:
        raise DataError(f"{path}: cannot be unpacked: {error}") from None
    if len(data) > most:
        raise DataError(f"{path}: unpacks to more than {most} bytes, which no run needs")
    if not unpacker.eof or unpacker.unused_data:
        raise DataError(
            f"{path}: is no whole gzip file, or more than one; python -m records freeze packs one"
        )
    return data


def run_artifact(folder: Path) -> Path:
    """The artifact of a run's folder."""
    return folder / "model.ptz"


def record_folders(root: Path) -> list[Path]:
    """All records of all tracks below `root`, in order of date and name."""
    return sorted(
        path
        for track in sorted(root.glob("*/track.json"))
        for path in track.parent.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name != "__pycache__"
    )
