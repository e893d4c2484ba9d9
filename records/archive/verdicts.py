"""The verdicts that `records.verify --write` keeps for the board: records/<track>/verdicts.json."""

import datetime
import json
from functools import cache
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
    return files_sha256(tuple((path, state_of(path)) for path in paths))


def state_of(path: Path) -> tuple[int, ...]:
    """What changes when a file does, as the system keeps it."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@cache
def files_sha256(files: tuple[tuple[Path, tuple[int, ...]], ...]) -> str:
    """Of names and contents. A command reads files once, and again only those of a folder that changed."""
    return sha256("".join(f"{path.name} {sha256(read_bytes(path))}\n" for path, _ in files).encode())


def track_sha256(track: Path) -> str:
    """Of a track's rules."""
    return sha256(read_bytes(track / "track.json"))


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


def still_holds(folder: Path, referee: str) -> str:
    """Since when a folder has passed, where nothing that decided it has changed since; else ''.

    That is its digest, its track's rules and the referee's version. Verdicts of before these were kept are an
    older referee's, and those of which a part was left out by --proof-bytes hold for no other run. DataError.
    """
    kept = read_verdicts(folder.parent).get(folder.name, {})
    now = {"referee": referee, "track": track_sha256(folder.parent), "sha256": folder_sha256(folder)}
    same = {name: kept.get(name) for name in now} == now
    return kept["date"] if same and kept["verdict"] == "pass" and not kept.get("partly") else ""


def write_verdict(folder: Path, lines: list[Check], by: str, referee: str = "", partly: bool = False) -> None:
    """Write the verdict on a folder into its track's verdicts.json.

    What people wrote under 'disputed' stays, and so does 'retrained' while the folder is unchanged.
    `by`: who has trained the record again. `referee`: its version. `partly`: --proof-bytes left a part of the
    text unproven.
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
        "referee": referee,
        "track": track_sha256(track),
        **({"partly": True} if partly else {}),
        "failed": [line.name for line in lines if line.verdict == "FAIL"],
        **kept,
    }
    text = json.dumps(dict(sorted(verdicts.items())), indent=1)
    write_whole(track / "verdicts.json", f"{text}\n".encode())
