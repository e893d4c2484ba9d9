"""The verdicts of verify.py --write, which the board shows: records/<track>/verdicts.json."""

import datetime
import json
from collections import Counter
from pathlib import Path

from data.command import DataError
from records.checks import Check
from records.files import read_bytes, read_json, sha256, write_whole

NEEDED = "score"  # without this check having passed, a verdict is no more than one on the papers


def folder_sha256(folder: Path) -> str:
    """Of all files of a record but its README, which may still be filled in."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != "README.md")
    return sha256("".join(f"{name} {sha256(read_bytes(folder / name))}\n" for name in names).encode())


def verdict_of(lines: list[Check]) -> str:
    """pass, fail, or papers: all that could be checked is good, but it was not scored again."""
    if any(line.verdict == "FAIL" for line in lines):
        return "fail"
    return "pass" if any(line.name == NEEDED and line.verdict == "PASS" for line in lines) else "papers"


def read_verdicts(track: Path) -> dict[str, dict]:
    """The verdicts on a track's folders by name. Raises DataError."""
    path = track / "verdicts.json"
    if not path.exists():
        return {}
    verdicts = read_json(path)
    for name, its in verdicts.items():
        if not isinstance(its, dict) or not {"verdict", "date", "sha256", "failed"} <= its.keys():
            raise DataError(f"{path}: {name!r} has no whole verdict; remove it and verify again with --write")
    return verdicts


def write_verdict(folder: Path, lines: list[Check]) -> None:
    """Keep the verdict on a folder beside those on others; what people wrote under 'disputed' stays."""
    track = folder.resolve().parent
    verdicts = read_verdicts(track)
    kept = {key: value for key, value in verdicts.get(folder.name, {}).items() if key == "disputed"}
    verdicts[folder.name] = {
        "verdict": verdict_of(lines),
        "date": datetime.date.today().isoformat(),
        "sha256": folder_sha256(folder),
        "checks": dict(sorted(Counter(line.verdict for line in lines).items())),
        "failed": [line.name for line in lines if line.verdict == "FAIL"],
        **kept,
    }
    text = json.dumps(dict(sorted(verdicts.items())), indent=1)
    write_whole(track / "verdicts.json", f"{text}\n".encode())
