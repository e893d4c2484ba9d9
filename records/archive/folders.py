"""A record's folder: the names that may stand in it, its code and its artifacts."""

import re
from pathlib import Path

FOLDER = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})_([A-Za-z0-9][A-Za-z0-9-]{0,59})")
SCRIPT = "train_gpt.py"  # what the referee loads
SEED = "seed(?:0|[1-9][0-9]{0,9})"  # one way to write each number: seed01 would be seed1 again
FILES = re.compile(
    r"README\.md|submission\.json|train_gpt\.py|tokenizer\.model"
    rf"|train_{SEED}\.log|metrics_{SEED}\.jsonl|model_{SEED}\.ptz"
)


def seed_of(name: str) -> int:
    """The seed in a file's name."""
    return int(re.search(r"seed(\d+)", name)[1])


def artifact_paths(folder: Path) -> dict[int, Path]:
    """The artifacts of a record by seed."""
    return {seed_of(path.name): path for path in sorted(folder.glob("model_seed*.ptz"))}


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
