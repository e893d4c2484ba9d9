"""How often a track's folders were judged, the verdicts on them, and which of them have a rank.

judgings.jsonl has a line for each evaluation by the judge, written before its seeds are trained. None is ever
taken out. verdicts.json has a verdict for each folder, in the words of records/verify/README.md.

A rank is derived. It rests on the scores of what the judge trained; what an earlier referee passed, with a
seed that it trained again, stands with the scores of its submission.
"""

import datetime
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import zstandard

from data.command import DataError, printable
from data.files import locked, parse_json, read_bytes, read_json, sha256, write_whole
from records.archive.checks import Check, check
from records.archive.runs import Record, this_machine
from records.archive.tracks import Track

EARLIER_WORDS = {"holds": "verified", "papers": "checked", "not judged": "unverified"}  # in verdicts of then
PASSED = ("ranked", "verified", "pass")  # scored and proven
FAILED = ("fails", "fail")
NEEDED = ("score", "proof", "second-text", "sandbox")  # checks without which nothing is verified
RETRAINED = "retrained"  # a seed of the submission was trained again
ASIDE = ("gain", RETRAINED)  # what may be left out, since `verified` does not speak of it
SAID = ("score", "proof")  # lines that a verdict keeps, with their seeds, scores and bytes
EVIDENCE = ("nothing", "papers", "claims", "rooms")  # what a verdict may rest on, the least first
NOTHING, ON_PAPERS, ON_CLAIMS, ON_TRAINING = EVIDENCE
JUDGINGS = "judgings.jsonl"
# The least standard deviation of scores, over the track's least gain. On track_floppy it is 0.0023 bits per
# byte: pooled over the five evaluations of before number 3, that of the scores in verdicts.json is 0.00227.
LEAST_SPREAD = 0.46


def today() -> str:
    return datetime.date.today().isoformat()


# --- evaluations ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """The seeds of one evaluation, and what they were drawn for."""

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


def read_draws(folder: Path) -> list[Draw]:
    """The evaluations that a folder keeps, in order. Raises DataError."""
    path = folder / JUDGINGS
    draws = []
    for number, line in enumerate(read_bytes(path).splitlines() if path.exists() else [], 1):
        try:
            value = parse_json(line)
            draws.append(Draw(**value | {"seeds": tuple(map(int, value["seeds"]))}))
        except (ValueError, TypeError, KeyError):
            mend = "git knows it as it was written"
            raise DataError(f"{path}: line {number} is no whole evaluation; {mend}") from None
    return list(dict.fromkeys(draws))  # a merge may have kept one of them twice


def record_draw(folder: Path, draw: Draw) -> None:
    """Add an evaluation to those that a folder keeps, whole or not at all. Raises UsageError, DataError."""
    path = folder / JUDGINGS
    line = json.dumps(asdict(draw)).encode()
    with locked(folder):  # two evaluations may begin at once
        kept = read_bytes(path).splitlines() if read_draws(folder) else []
        write_whole(path, b"\n".join([*kept, line, b""]))


def number_of(draws: Iterable[Draw], name: str, digest: str, seeds: tuple[int, ...]) -> int:
    """The place of an evaluation among those of its folder, from 1; of the next one if it is not recorded."""
    its = (draw for draw in draws if draw.is_of(name, digest))
    before = itertools.takewhile(lambda draw: draw.seeds != seeds, its)
    return 1 + sum(1 for _ in before)


# --- what a verdict is about ------------------------------------------------------------------------------


def folder_sha256(folder: Path) -> str:
    """Of all that a verdict rests on: every file but the README, which may still be mended."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "README.md"]
    return sha256("".join(f"{path.name} {sha256(read_bytes(path))}\n" for path in paths).encode())


def track_sha256(track: Path) -> str:
    return sha256(read_bytes(track / "track.json"))


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


def replaces(new: Finding, old: dict, digest: str) -> bool:
    """Whether a finding takes the place of a kept verdict: never of a stronger one of the same folder."""
    if not old or old["sha256"] != digest:
        return True
    kept = old.get("rests_on", ON_CLAIMS)  # which an earlier referee's `pass` does not say
    if new.evidence != kept:
        return EVIDENCE.index(new.evidence) > EVIDENCE.index(kept)
    ranked_before = old["verdict"] == "pass" and RETRAINED in old
    return not (ranked_before and new.verdict == "verified")  # which says less


def write_finding(folder: Path, found: Finding, by: str, referee: str, again: Check | None = None) -> bool:
    """Keep a finding beside those on other folders; what people wrote under 'disputed' stays.

    False where a stronger verdict on the same folder stands, which stays. `by`: who did it; `referee`: its
    version; `again`: the line on a seed that was trained again, which is kept as long as the folder is the
    same.
    """
    track = folder.resolve().parent
    with locked(track):  # two evaluations may end at once
        verdicts = kept_verdicts(track)
        entry = verdicts.get(folder.name, {})
        digest = folder_sha256(folder)
        taken = replaces(found, entry, digest)
        if taken:
            stays = ("disputed", RETRAINED) if entry.get("sha256") == digest else ("disputed",)
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
                **{name: entry[name] for name in stays if name in entry},
                **found.more,
            }
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


# --- the rule of a gain -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """Bits per byte below the incumbent, and how sure that is."""

    bpb: float
    p: float  # one-sided, Welch's
    least: float  # that the rule asks for
    below: float  # that p must be
    new_bytes: int  # of script and settings, which are paid for

    @property
    def enough(self) -> bool:
        return round(self.bpb, 9) >= self.least and self.p < self.below

    def __str__(self) -> str:
        words = f"{self.bpb:.4f} bits per byte, Welch p {self.p:.4g}; expected {self.least:.4f} at least"
        if self.new_bytes:
            words += f", since {self.new_bytes} bytes of script and settings are new"
        return f"{words}, p below {self.below:g}"


@dataclass(frozen=True)
class ScoredRecord:
    """A record, and the scores of its seeds by which it is compared with another."""

    record: Record
    seeds: dict[str, dict]  # of each what a verdict keeps: its score, once there is one, and more
    machine: dict  # that the scores came from
    evaluation: int | None = 1  # its place among those of the folder; None: an earlier referee passed it

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def scores(self) -> list[float]:
        return [its["score"] for its in self.seeds.values() if "score" in its]

    @property
    def complete(self) -> bool:
        return len(self.scores) == len(self.seeds)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    def gain_over(self, incumbent: "ScoredRecord") -> Gain:
        """Raises DataError."""
        track = self.record.track
        new_bytes = count_new_bytes(self.record, incumbent.record)
        text_bytes = track.dataset["val_bytes"] or min(self.record.values("val_bytes"))
        return Gain(
            bpb=incumbent.mean - self.mean,
            p=p_below(self.scores, incumbent.scores, LEAST_SPREAD * track["min_gain_bpb"]),
            least=track["min_gain_bpb"] + 8 * new_bytes / text_bytes,
            below=track["alpha"] / (self.evaluation or 1),
            new_bytes=new_bytes,
        )

    def ranks_after(self, incumbent: "ScoredRecord | None") -> bool:
        """Whether it gains enough. An earlier referee has seen to that."""
        return incumbent is None or self.evaluation is None or self.gain_over(incumbent).enough


def claimed_scores(record: Record) -> dict[str, dict]:
    """The submission's scores by seed, as a verdict would keep them."""
    return {str(seed): {"score": score} for seed, score in record.scores.items()}


def check_gain(its: ScoredRecord, incumbent: ScoredRecord | None, by: str) -> Check:
    """The track's rule. `by`: whose scores these are."""
    if incumbent is None:
        return check("gain", True, "no record stands before it, expected so or a gain over the best one")
    gain = its.gain_over(incumbent)
    return check("gain", gain.enough, f"over {incumbent.name}, by {by}: {gain}")


def count_new_bytes(record: Record, before: Record) -> int:
    """Bytes of what is new in a script, packed with the script before as dictionary, and of the settings.

    A text of so many bits could stand in them, and no more. By zstandard, since the dictionaries of zlib
    end after 32 KiB, a third of a script.
    """
    script = record.script
    known = zstandard.ZstdCompressionDict(before.script, zstandard.DICT_TYPE_RAWCONTENT)
    window = zstandard.ZstdCompressionParameters.from_level(
        zstandard.MAX_COMPRESSION_LEVEL,
        source_size=len(script),
        dict_size=len(before.script),
        write_content_size=False,
        write_dict_id=False,
    )
    packed = zstandard.ZstdCompressor(dict_data=known, compression_params=window).compress(script)
    return len(packed) + len(record.settings)


def p_below(new: list[float], old: list[float], least: float = 0.0) -> float:
    """One-sided p of Welch's t-test that `new` is not below `old`. Without any spread the means decide.

    `least`: the standard deviation that the scores of either have at least, however near they lie. Of one
    score nothing is sure: p is 1.
    """
    from scipy.stats import ttest_ind_from_stats  # a second that other checks need not pay

    if min(len(new), len(old)) < 2:
        return 1.0
    sides = []
    for scores in (new, old):
        sides += [np.mean(scores), max(np.std(scores, ddof=1), least), len(scores)]
    if sides[1] == sides[4] == 0:
        return float(sides[0] >= sides[3])
    return float(ttest_ind_from_stats(*sides, equal_var=False, alternative="less").pvalue)


# --- who has a rank ---------------------------------------------------------------------------------------


def judged_seeds(verdict: dict) -> dict[str, dict]:
    """What a verdict keeps of each seed that the judge trained; nothing where it was never judged."""
    return verdict.get("judged", {}).get("seeds", {})


def number_of_evaluation(verdict: dict, name: str, draws: Sequence[Draw]) -> int:
    """The place of the evaluation that a verdict rests on, among those of its folder."""
    return number_of(draws, name, verdict["sha256"], tuple(map(int, judged_seeds(verdict))))


def standing(record: Record, verdict: dict, draws: Sequence[Draw]) -> ScoredRecord | None:
    """The record and the scores that count, if it passed, did not change, and nobody doubts it."""
    judged = verdict.get("verdict") == "ranked"
    earlier = verdict.get("verdict") == "pass" and RETRAINED in verdict
    if not (judged or earlier) or verdict.get("disputed"):
        return None
    if record.submission.get("claim") == "none" or verdict["sha256"] != folder_sha256(record.path):
        return None
    if earlier:
        return ScoredRecord(record, claimed_scores(record), record.machine, evaluation=None)
    number = number_of_evaluation(verdict, record.name, draws)
    return ScoredRecord(record, judged_seeds(verdict), verdict.get("machine", {}), number)


def folders_before(track: Track, name: str, verdicts: dict[str, dict], draws: Sequence[Draw]) -> list[Path]:
    """The records before one, the first first: by day, and of one day by their first evaluations.

    What an earlier referee passed came before all evaluations. What was never judged comes last, by name.
    """
    judged = list(dict.fromkeys(draw.folder for draw in draws))

    def place(one: str) -> tuple[str, int, str]:
        if verdicts.get(one, {}).get("verdict") in ("pass", "fail"):
            return one[:10], -1, one
        return one[:10], judged.index(one) if one in judged else len(judged), one

    before = [folder for folder in track.records if place(folder.name) < place(name)]
    return sorted(before, key=lambda folder: place(folder.name))


def best_before(track: Track, name: str) -> ScoredRecord | None:
    """The incumbent: the best record with a rank among those before a folder's name. Raises DataError."""
    verdicts = read_verdicts(track.folder)
    draws = read_draws(track.folder)
    best = None
    for folder in folders_before(track, name, verdicts, draws):
        its = standing(Record(folder), verdicts.get(folder.name, {}), draws)
        if its and its.ranks_after(best) and (best is None or its.mean < best.mean):
            best = its
    return best
