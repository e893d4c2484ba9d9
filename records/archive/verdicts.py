"""The verdicts on a track's folders, which the board shows: records/<track>/verdicts.json.

A verdict says what is known, and on what it rests:

    ranked      the referee trained fresh seeds itself, and their scores are a record by the track's rule
    holds       papers, score and proof of the submission's own artifacts are good
    papers      what can be said without running anything is good
    fails       something is wrong; `failed` names the checks
    not judged  the judge could not do all that a rank needs; `left` names the reasons

Missing evidence is never a pass. `pass` and `fail` are words of earlier referees, and are read as they are.
"""

import datetime
import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from data.command import DataError
from data.files import locked, read_bytes, read_json, sha256, write_whole
from records.archive.checks import Check
from records.archive.submission import this_machine

PASSED = ("ranked", "holds", "pass")  # scored and proven
FAILED = ("fails", "fail")
NEEDED = ("score", "proof", "second-text", "sandbox")  # checks without which nothing holds
RETRAINED = "retrained"  # a seed of the submission came out of a room again
ROOMS = "rooms"  # what came out of the judge's rooms, beside a verdict that does not rest on them
ASIDE = ("gain", RETRAINED)  # what may be left out, since no `holds` speaks of it
SAID = ("score", "proof")  # lines that a verdict keeps, with their seeds, scores and bytes
NOTHING, ON_PAPERS, ON_CLAIMS, ON_ROOMS = range(4)  # what a verdict may rest on, the least first
EVIDENCE = ("nothing", "papers", "claims", "rooms")  # their words


def folder_sha256(folder: Path) -> str:
    """Of all that a verdict rests on: every file but the README, which may still be mended."""
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


@dataclass(frozen=True)
class Finding:
    """What was found of a folder, and what it rests on."""

    verdict: str
    evidence: int
    failed: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # what could not be done, and why
    more: dict = field(default_factory=dict)  # of the judge: seeds, scores, gain, and who had these

    @property
    def words(self) -> str:
        reasons = ", ".join(self.failed) or "; ".join(f"{name}: {why}" for name, why in self.left.items())
        return self.verdict + f" ({reasons})" * bool(reasons)


def finding_of(lines: list[Check], second: bool = True) -> Finding:
    """What the lines of a verification amount to. `second`: whether the track has a second text."""
    failed = [line.name for line in lines if line.verdict == "FAIL"]
    passed = {line.name for line in lines if line.verdict == "PASS"}
    left = {line.name: line.text for line in lines if line.verdict == "SKIP" and line.name not in ASIDE}
    if not second:
        left.pop("second-text", None)
    evidence = ON_CLAIMS if passed.union(failed) & {"score", "sandbox"} else ON_PAPERS
    if failed:
        return Finding("fails", evidence, failed, left)
    missing = [name for name in NEEDED if name not in passed and (second or name != "second-text")]
    if missing or left:
        return Finding("papers", ON_PAPERS, [], left or dict.fromkeys(missing, "was not done"))
    found = [line.text for line in lines if line.name in SAID]
    return Finding("holds", ON_CLAIMS, more={"found": found})


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


def evidence_of(verdict: dict) -> int:
    """What a kept verdict rests on. An earlier referee's words rest on claims."""
    if verdict.get("rests_on") in EVIDENCE:
        return EVIDENCE.index(verdict["rests_on"])
    return ON_PAPERS if verdict["verdict"] == "papers" else ON_CLAIMS


def replaces(new: Finding, old: dict, digest: str) -> bool:
    """Whether a finding takes the place of a kept verdict: never of a stronger one of the same folder."""
    if not old or old["sha256"] != digest:
        return True
    if new.evidence != evidence_of(old):
        return new.evidence > evidence_of(old)
    ranked_before = old["verdict"] == "pass" and RETRAINED in old
    return not (ranked_before and new.verdict == "holds")  # which says less


def number_of_referee(version: str) -> str:
    """What decides of a version <number>+<digest>. Earlier referees have a digest alone, or nothing."""
    return version.partition("+")[0]


def still_holds(folder: Path, referee: str) -> str:
    """Since when a folder has passed, where nothing that decided it has changed since; else ''.

    That is its digest, its track's rules and the referee's number. Verdicts of before these were kept are an
    older referee's. Raises DataError.
    """
    kept = read_verdicts(folder.parent).get(folder.name, {})
    now = {"track": track_sha256(folder.parent), "sha256": folder_sha256(folder)}
    same = {name: kept.get(name) for name in now} == now
    same = same and number_of_referee(kept.get("referee", "")) == number_of_referee(referee)
    return kept["date"] if same and kept["verdict"] in PASSED else ""


def today() -> str:
    return datetime.date.today().isoformat()


def kept_words(before: dict, digest: str) -> dict:
    """What stays of the verdict before: what people wrote, and of the same folder, what was trained again."""
    keys = ("disputed", RETRAINED, ROOMS) if before.get("sha256") == digest else ("disputed",)
    return {key: before[key] for key in keys if key in before}


def write_finding(folder: Path, found: Finding, by: str, referee: str, more: dict | None = None) -> bool:
    """Keep a finding beside those on other folders; what people wrote under 'disputed' stays.

    False where a stronger verdict on the same folder stands, which stays; what the judge has trained is kept
    beside it. `by`: who did it; `referee`: its version; `more`: what else the entry gets, whichever verdict
    stays.
    """
    track = folder.resolve().parent
    with locked(track):  # two judgings may end at once
        verdicts = read_verdicts(track)
        before = verdicts.get(folder.name, {})
        digest = folder_sha256(folder)
        taken = replaces(found, before, digest)
        entry = before
        if taken:
            entry = {
                "verdict": found.verdict,
                "rests_on": EVIDENCE[found.evidence],
                "date": today(),
                "by": by,
                "sha256": digest,
                "referee": referee,
                "track": track_sha256(track),
                "machine": this_machine(),
                "failed": found.failed,
                **({"left": found.left} if found.left else {}),
                **kept_words(before, digest),
                **found.more,
            }
        elif "judged" in found.more:
            entry = before | {ROOMS: {"left": found.left, **found.more}}
        if found.evidence == ON_ROOMS:
            entry.pop(ROOMS, None)
        verdicts[folder.name] = entry | (more or {})
        text = json.dumps(dict(sorted(verdicts.items())), indent=1)
        write_whole(track / "verdicts.json", f"{text}\n".encode())
    return taken


def write_verdict(
    folder: Path,
    lines: list[Check],
    by: str,
    referee: str = "",
    second: bool = True,
    machine: dict[str, str] | None = None,
) -> bool:
    """Keep what a verification amounts to; whether it took the place of what was kept.

    So is the word that somebody trained a seed again, as long as the folder is the same. `machine`: what ran
    the record, if it was not this one.
    """
    machine = machine or this_machine()
    found = finding_of(lines, second)
    found = replace(found, more=found.more | {"machine": machine})
    again = {}
    for line in lines:
        if (line.name, line.verdict) == (RETRAINED, "PASS") and found.verdict != "fails":
            again[RETRAINED] = {"what": line.text, "by": by, "date": today(), **machine}
    return write_finding(folder, found, by, referee, again)
