"""The verdicts of verify.py --write, which the board shows: records/<track>/verdicts.json."""

import datetime
import json
from collections import Counter
from pathlib import Path

from data.command import DataError
from records.checks import Check
from records.files import read_bytes, read_json, sha256, write_whole

WORDS = ("what_changed", "why")  # of a submission
NEEDED = "score"  # without this check having passed, a verdict is no more than one on the papers


def without_words(path: Path) -> bytes:
    """A submission but for its words; a file that is no JSON as it is."""
    try:
        numbers = {key: value for key, value in read_json(path).items() if key not in WORDS}
    except DataError:
        return read_bytes(path)
    return json.dumps(numbers, sort_keys=True).encode()


def folder_sha256(folder: Path) -> str:
    """Of all that a verdict rests on: every file but the README, and a submission without its words.

    Words may still be mended when the verdict is there; every number is sealed.
    """
    lines = []
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name == "README.md":
            continue
        data = without_words(path) if path.name == "submission.json" else read_bytes(path)
        lines.append(f"{path.name} {sha256(data)}\n")
    return sha256("".join(lines).encode())


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
