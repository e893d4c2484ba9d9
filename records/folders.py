"""A record's folder: the names that may stand in it, its code and its artifacts."""

import re
from pathlib import Path

from records.files import read_bytes

FOLDER = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})_([A-Za-z0-9][A-Za-z0-9-]{0,59})")
SCRIPT = "train_gpt.py"  # what the referee loads
TWIN = "train_gpt_mlx.py"  # beside it where the runs were MLX runs; it imports the script
SEED = "seed(?:0|[1-9][0-9]{0,9})"  # one way to write each number: seed01 would be seed1 again
FILES = re.compile(
    r"README\.md|submission\.json|train_gpt\.py|train_gpt_mlx\.py|tokenizer\.model"
    rf"|train_{SEED}\.log|metrics_{SEED}\.jsonl|model_{SEED}(?:\.int8)?\.ptz"
)
ARTIFACTS = ("model.ptz", "model.int8.ptz")  # in a run's folder; the second is the name that it had first


def read_scripts(folder: Path) -> dict[str, bytes]:
    """The scripts of a folder by name. Raises DataError where there is no train_gpt.py."""
    scripts = {SCRIPT: read_bytes(folder / SCRIPT)}
    if (folder / TWIN).exists():
        scripts[TWIN] = read_bytes(folder / TWIN)
    return scripts


def code_of(scripts: dict[str, bytes]) -> bytes:
    """What code_bytes counts and script_sha256 is taken of: the scripts end to end, train_gpt.py first."""
    return b"".join(scripts[name] for name in (SCRIPT, TWIN) if name in scripts)


def seed_of(name: str) -> int:
    """The seed in a file's name."""
    return int(re.search(r"seed(\d+)", name)[1])


def artifact_paths(folder: Path) -> dict[int, Path]:
    """The artifacts of a record by seed."""
    return {seed_of(path.name): path for path in sorted(folder.glob("model_seed*.ptz"))}


def run_artifact(folder: Path) -> Path:
    """The artifact of a run's folder."""
    paths = [folder / name for name in ARTIFACTS]
    return next((path for path in paths if path.exists()), paths[0])


def record_folders(root: Path) -> list[Path]:
    """All records of all tracks below `root`, in order of date and name."""
    return sorted(
        path
        for track in sorted(root.glob("*/track.json"))
        for path in track.parent.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name != "__pycache__"
    )
