"""How often a track's folders were judged, and the verdicts on them, which the board shows.

records/<track>/judgings.jsonl has a line for each judging, written when its seeds are drawn and before any of
them is trained. None is ever taken out: a judging that was thrown away counts as any other. Branches are
merged by keeping the lines of both (.gitattributes).

records/<track>/verdicts.json has a verdict for each folder. It says what is known, and on what that rests:

    ranked      the referee trained fresh seeds itself, and their scores are a record by the track's rule
    verified    papers, score and proof of the submission's own artifacts are good
    checked     what can be said without running anything is good
    fails       something is wrong; `failed` names the checks
    unverified  the judge could not do all that a rank needs; `left` names the reasons

Missing evidence is never a pass. `pass` and `fail` are words of earlier referees, and are read as they are.
"""

import datetime
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from data.command import DataError, printable, warn_once
from data.files import locked, parse_json, read_bytes, read_json, sha256, write_whole
from records.archive.checks import Check
from records.archive.runs import this_machine

EARLIER_WORDS = {"holds": "verified", "papers": "checked", "not judged": "unverified"}  # in verdicts of then
PASSED = ("ranked", "verified", "pass")  # scored and proven
FAILED = ("fails", "fail")
NEEDED = ("score", "proof", "second-text", "sandbox")  # checks without which nothing is verified
RETRAINED = "retrained"  # a seed of the submission was trained again
BESIDE = "rooms"  # the judge's scores, beside a verdict that does not rest on them
ASIDE = ("gain", RETRAINED)  # what may be left out, since `verified` does not speak of it
SAID = ("score", "proof")  # lines that a verdict keeps, with their seeds, scores and bytes
EVIDENCE = ("nothing", "papers", "claims", "rooms")  # what a verdict may rest on, the least first
NOTHING, ON_PAPERS, ON_CLAIMS, ON_TRAINING = EVIDENCE
JUDGINGS = "judgings.jsonl"
BROKEN = (ValueError, TypeError, KeyError)  # what a line that is no judging leads to


def today() -> str:
    return datetime.date.today().isoformat()


# --- judgings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """The seeds of one judging, and what they were drawn for."""

    folder: str
    sha256: str  # of the folder
    track: str  # sha256 of its rules
    referee: str  # its version
    date: str
    by: str
    seeds: tuple[int, ...]

    def is_of(self, name: str, digest: str) -> bool:
        """Whether it judged this folder: neither other files nor another name make a first try."""
        return self.folder == name or self.sha256 == digest


def parse_draw(line: bytes) -> Draw:
    """The judging of a line. Raises BROKEN."""
    value = parse_json(line)
    return Draw(**value | {"seeds": tuple(map(int, value["seeds"]))})


def read_lines(folder: Path) -> list[bytes]:
    """The lines of a folder's judgings. Raises DataError.

    A last line without its end is left out, and named, if it is no whole judging. A full disk cut it before
    any of its seeds was trained.
    """
    path = folder / JUDGINGS
    if not path.exists():
        return []
    *lines, rest = read_bytes(path).split(b"\n")
    try:
        return [*lines, rest] if rest and parse_draw(rest) else lines
    except BROKEN:
        what = "was cut off before its judging began, and does not count"
        warn_once(f"{path}: line {len(lines) + 1} {what}; the next judging takes its place")
        return lines


def read_draws(folder: Path) -> list[Draw]:
    """The judgings that a folder keeps, in order. Raises DataError."""
    draws = []
    for number, line in enumerate(read_lines(folder), 1):
        try:
            draws.append(parse_draw(line))
        except BROKEN:
            mend = "git knows it as it was written"
            raise DataError(f"{folder / JUDGINGS}: line {number} is no whole judging; {mend}") from None
    return list(dict.fromkeys(draws))  # a merge may have kept one of them twice


def record_draw(folder: Path, draw: Draw) -> None:
    """Add a judging to those that a folder keeps, whole or not at all. Raises UsageError, DataError."""
    line = json.dumps(asdict(draw)).encode()
    with locked(folder):  # two judgings may begin at once
        write_whole(folder / JUDGINGS, b"\n".join([*read_lines(folder), line, b""]))


def number_of(draws: Iterable[Draw], name: str, digest: str, seeds: tuple[int, ...]) -> int:
    """The place of a judging among those of its folder, from 1; of the next one if it is not recorded."""
    its = (draw for draw in draws if draw.is_of(name, digest))
    before = itertools.takewhile(lambda draw: draw.seeds != seeds, its)
    return 1 + sum(1 for _ in before)


# --- what a verdict is about ------------------------------------------------------------------------------


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
    return sha256(read_bytes(track / "track.json"))


def number_of_referee(version: str) -> str:
    """What decides of a version <number>+<digest>. Earlier referees have a digest alone, or nothing."""
    return version.partition("+")[0]


# --- verdicts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    verdict: str
    evidence: str  # of EVIDENCE
    failed: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # what could not be done, and why
    more: dict = field(default_factory=dict)  # of the judge: seeds, scores, gain, and who had these

    def __str__(self) -> str:
        reasons = ", ".join(self.failed) or "; ".join(f"{name}: {why}" for name, why in self.left.items())
        return printable(f"verdict: {self.verdict}" + (f" ({reasons})" if reasons else ""))


def finding_of(lines: list[Check], second: bool = True) -> Finding:
    """What the lines of a verification amount to. `second`: whether the track has a second text."""
    failed = [line.name for line in lines if line.verdict == "FAIL"]
    passed = {line.name for line in lines if line.verdict == "PASS"}
    left = {line.name: line.text for line in lines if line.verdict == "SKIP" and line.name not in ASIDE}
    needed = [name for name in NEEDED if second or name != "second-text"]
    if not second:
        left.pop("second-text", None)
    if failed:
        ran = passed.union(failed) & {"score", "sandbox"}
        return Finding("fails", ON_CLAIMS if ran else ON_PAPERS, failed, left)
    missing = [name for name in needed if name not in passed]
    if missing or left:
        return Finding("checked", ON_PAPERS, [], left or dict.fromkeys(missing, "was not done"))
    found = [line.text for line in lines if line.name in SAID]
    return Finding("verified", ON_CLAIMS, more={"found": found})


def kept_verdicts(track: Path) -> dict[str, dict]:
    """verdicts.json as it was written. Raises DataError."""
    path = track / "verdicts.json"
    verdicts = read_json(path) if path.exists() else {}
    for name, its in verdicts.items():
        if not isinstance(its, dict) or not {"verdict", "date", "sha256", "failed"} <= its.keys():
            raise DataError(f"{path}: {name!r} has no whole verdict; remove it and verify again with --write")
    return verdicts


def read_verdicts(track: Path) -> dict[str, dict]:
    """The verdicts on a track's folders by name, in the words of today. Raises DataError."""
    return {
        name: its | {"verdict": EARLIER_WORDS.get(its["verdict"], its["verdict"])}
        for name, its in kept_verdicts(track).items()
    }


def evidence_of(verdict: dict) -> str:
    """What a verdict rests on. An earlier referee's words rest on claims."""
    if verdict.get("rests_on") in EVIDENCE:
        return verdict["rests_on"]
    return ON_PAPERS if verdict["verdict"] == "checked" else ON_CLAIMS


def replaces(new: Finding, old: dict, digest: str) -> bool:
    """Whether a finding takes the place of a kept verdict: never of a stronger one of the same folder."""
    if not old or old["sha256"] != digest:
        return True
    kept = evidence_of(old)
    if new.evidence != kept:
        return EVIDENCE.index(new.evidence) > EVIDENCE.index(kept)
    ranked_before = old["verdict"] == "pass" and RETRAINED in old
    return not (ranked_before and new.verdict == "verified")  # which says less


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


def write_finding(folder: Path, found: Finding, by: str, referee: str, again: Check | None = None) -> bool:
    """Keep a finding beside those on other folders; what people wrote under 'disputed' stays.

    False where a stronger verdict on the same folder stands, which stays; what the judge has trained is kept
    beside it. `by`: who did it; `referee`: its version; `again`: the line on a seed that was trained again,
    which is kept as long as the folder is the same.
    """
    track = folder.resolve().parent
    with locked(track):  # two judgings may end at once
        verdicts = kept_verdicts(track)
        before = read_verdicts(track).get(folder.name, {})
        digest = folder_sha256(folder)
        taken = replaces(found, before, digest)
        entry = verdicts.get(folder.name, {})
        if taken:
            stays = ("disputed", RETRAINED, BESIDE) if before.get("sha256") == digest else ("disputed",)
            entry = {
                "verdict": found.verdict,
                "rests_on": found.evidence,
                "date": today(),
                "by": by,
                "sha256": digest,
                "referee": referee,
                "track": track_sha256(track),
                "machine": this_machine(),
                "failed": found.failed,
                **({"left": found.left} if found.left else {}),
                **{name: before[name] for name in stays if name in before},
                **found.more,
            }
        elif "judged" in found.more:
            entry = entry | {BESIDE: {"left": found.left, **found.more}}
        if found.evidence == ON_TRAINING:
            entry.pop(BESIDE, None)
        if again:
            entry = entry | {RETRAINED: {"what": again.text, "by": by, "date": today(), **this_machine()}}
        verdicts[folder.name] = entry
        text = json.dumps(dict(sorted(verdicts.items())), indent=1)
        write_whole(track / "verdicts.json", f"{text}\n".encode())
    return taken


def write_verdict(folder: Path, lines: list[Check], by: str, referee: str = "", second: bool = True) -> bool:
    """Keep what a verification amounts to; whether it took the place of what was kept."""
    found = finding_of(lines, second)
    again = [line for line in lines if (line.name, line.verdict) == (RETRAINED, "PASS")]
    return write_finding(folder, found, by, referee, again[0] if again and found.verdict != "fails" else None)
