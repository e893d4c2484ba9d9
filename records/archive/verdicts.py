"""The verdicts that `records.verify --write` keeps for the board: records/<track>/verdicts.json."""

import datetime
import json
from pathlib import Path

from data.command import DataError
from data.files import read_bytes, read_json, sha256, write_whole
from records.archive.checks import Check
from records.archive.submission import this_machine

NEEDED = "score"  # without this check having passed, a verdict is no more than one on the papers
RETRAINED = "retrained"  # the check that a first place needs


def folder_sha256(folder: Path) -> str:
    """The digest of all that a verdict rests on: every file but the README, which may still be edited."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "README.md"]
    return sha256("".join(f"{path.name} {sha256(read_bytes(path))}\n" for path in paths).encode())


def verdict_of(lines: list[Check]) -> str:
    """pass, fail, or papers: no check failed, but the record was not scored again."""
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


def write_verdict(folder: Path, lines: list[Check], by: str) -> None:
    """Write the verdict on a folder into its track's verdicts.json.

    What people wrote under 'disputed' stays, and so does 'retrained' while the folder is unchanged.
    `by`: who has trained the record again.
    """
    track = folder.resolve().parent
    verdicts = read_verdicts(track)
    before = verdicts.get(folder.name, {})
    digest = folder_sha256(folder)
    today = datetime.date.today().isoformat()
    kept = {key: before[key] for key in ("disputed",) if key in before}
    if before.get("sha256") == digest and "retrained" in before:
        kept["retrained"] = before["retrained"]
    found = verdict_of(lines)
    for line in lines:
        if (line.name, line.verdict) == (RETRAINED, "PASS") and found != "fail":
            kept["retrained"] = {"what": line.text, "by": by, "date": today, **this_machine()}
    verdicts[folder.name] = {
        "verdict": found,
        "date": today,
        "sha256": digest,
        "failed": [line.name for line in lines if line.verdict == "FAIL"],
        **kept,
    }
    text = json.dumps(dict(sorted(verdicts.items())), indent=1)
    write_whole(track / "verdicts.json", f"{text}\n".encode())
