"""What the models of records write, as a track keeps it for the pages: records/<track>/excerpts.json."""

import json
import subprocess
import sys
from pathlib import Path

from data.command import REPO, DataError, shell
from data.files import read_json, write_whole
from records.archive.tracks import Track
from records.archive.verdicts import folder_sha256

FILE = "excerpts.json"
FIELDS = {"sha256": str, "command": str, "prompt": str, "temperature": float, "text": str}
SETTINGS = {
    "--prompt": 'def read_file(path):\n    """',  # how the text begins
    "--tokens": 300,
    "--temperature": 0.8,
    "--seed": 1,
}


def make_excerpt(record: Path, options: list[str]) -> dict:
    """Raises DataError with the referee's words."""
    settings = [str(word) for pair in SETTINGS.items() for word in pair]
    called = [sys.executable, "-m", "records", "sample", str(record), *settings, *options]
    done = subprocess.run(
        called, cwd=REPO, capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        raise DataError(f"{record}: no sample: {done.stderr.strip()[-300:]}")
    shown = f"records/{record.parent.name}/{record.name}"
    return {
        "sha256": folder_sha256(record),
        "command": shell("python", "-m", "records", "sample", shown, *settings),
        "prompt": SETTINGS["--prompt"],
        "temperature": SETTINGS["--temperature"],
        "text": done.stdout.removesuffix("\n"),
    }


def keep_excerpt(track: Track, name: str, made: dict) -> Path:
    """Write it beside those of the other records; the file."""
    path = track.folder / FILE
    kept = read_json(path) if path.exists() else {}
    value = dict(sorted({**kept, name: made}.items()))
    write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def read_excerpts(track: Track, digests: dict[str, str]) -> dict[str, dict]:
    """The samples of a track's records by name, without those of folders that changed since.

    `digests`: folder_sha256 by name, of the folders as they are now. Raises DataError.
    """
    path = track.folder / FILE
    kept = read_json(path) if path.exists() else {}
    for name, its in kept.items():
        if not isinstance(its, dict) or not all(isinstance(its.get(key), FIELDS[key]) for key in FIELDS):
            mend = "python -m records excerpts writes it again"
            raise DataError(f"{path}: {name!r} is no whole sample: {mend}")
    return {name: its for name, its in kept.items() if digests.get(name) == its["sha256"]}
