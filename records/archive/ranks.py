"""Which records of a track have a rank, and which one each had to beat: derived, not read from a submission.

A rank rests on the scores that the judge found in its own rooms. What an earlier referee passed, with a seed
that it trained again, stands with the scores of its submission. A record must beat the best one that has a
rank among those before it; where that is disputed later, the next one takes its place, here as in the judge.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from records.archive.checks import Check, check
from records.archive.judgings import Draw, number_of, read_draws
from records.archive.record import Record
from records.archive.tracks import Track
from records.archive.verdicts import RETRAINED, ROOMS, folder_sha256, read_verdicts

PRICED = 3  # the number of the first referee whose rule prices new bytes and bounds luck
# The least standard deviation of scores, over the track's least gain. On track_floppy it is 0.0023 bits per
# byte: pooled over the five judgings of before number 3, that of the scores in verdicts.json is 0.00227.
LEAST_SPREAD = 0.46
RULE = {"gain", "machine"}  # checks that have another answer where another record stands before


# --- the rule ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """Bits per byte below a rival, and how sure that is."""

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
class Rival:
    """A record, and the scores by which it is compared with another."""

    record: Record
    scores: list[float]
    machine: dict  # that they came from
    judging: int | None = 1  # its place among those of the folder; None: an earlier referee passed it
    priced: bool = True  # by the rule that prices new bytes and bounds luck

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    def gain_over(self, before: "Rival") -> Gain:
        """What its scores gain over those of the record before it. Raises DataError."""
        track = self.record.track
        spread = LEAST_SPREAD * track["min_gain_bpb"] if self.priced else 0.0
        new_bytes = count_new_bytes(self.record, before.record) if self.priced else 0
        text_bytes = track.dataset["val_bytes"] or min(self.record.values("val_bytes"))
        return Gain(
            bpb=before.mean - self.mean,
            p=p_below(self.scores, before.scores, spread),
            least=track["min_gain_bpb"] + 8 * new_bytes / text_bytes,
            below=track["alpha"] / (self.judging or 1),
            new_bytes=new_bytes,
        )

    def ranks_after(self, before: "Rival | None") -> bool:
        """Whether it gains enough over the best record before it. An earlier referee has seen to that."""
        return before is None or self.judging is None or self.gain_over(before).enough


def check_gain(its: Rival, before: Rival | None, by: str) -> Check:
    """The track's rule. `before`: the best record before it; `by`: whose scores these are."""
    if before is None:
        return check("gain", True, "no record stands before it, expected so or a gain over the best one")
    gain = its.gain_over(before)
    return check("gain", gain.enough, f"over {before.name}, by {by}: {gain}")


def count_new_bytes(record: Record, before: Record) -> int:
    """Bytes of what is new in a script, packed with the script before as dictionary, and of the settings.

    A text of so many bits could be told in them, and no more. By zstandard, since the dictionaries of zlib
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


def is_priced(referee: str) -> bool:
    """Whether the rule of a referee's version prices new bytes and bounds luck. The first had no number."""
    number, plus, _ = referee.partition("+")
    return bool(plus) and int(number) >= PRICED


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


# --- who stands -------------------------------------------------------------------------------------------


def judged_scores(verdict: dict) -> list[float]:
    """The scores of the judge's rooms; none where it was never judged."""
    return [one["score"] for one in verdict.get("judged", {}).get("seeds", {}).values() if "score" in one]


def judged_seeds(verdict: dict) -> tuple[int, ...]:
    """The seeds of the judging that a verdict rests on; none where it rests on none."""
    return tuple(map(int, verdict.get("judged", {}).get("seeds", {})))


def standing(record: Record, verdict: dict, draws: Sequence[Draw]) -> Rival | None:
    """The record and the scores that count, if it passed, did not change, and nobody doubts it."""
    judged = verdict.get("verdict") == "ranked"
    earlier = verdict.get("verdict") == "pass" and RETRAINED in verdict
    if not (judged or earlier) or verdict.get("disputed"):
        return None
    if record.submission.get("claim") == "none" or verdict["sha256"] != folder_sha256(record.path):
        return None
    if earlier:
        return Rival(record, [*record.scores.values()], record.machine, None, priced=False)
    number = number_of(draws, record.name, verdict["sha256"], judged_seeds(verdict))
    machine = verdict.get("machine", {})
    return Rival(record, judged_scores(verdict), machine, number, is_priced(verdict.get("referee", "")))


def best_before(track: Track, name: str) -> Rival | None:
    """The best record with a rank among those before a folder's name. Raises DataError."""
    verdicts = read_verdicts(track.folder)
    draws = read_draws(track.folder)
    best = None
    for folder in (folder for folder in track.records if folder.name < name):
        its = standing(Record(folder), verdicts.get(folder.name, {}), draws)
        if its and its.ranks_after(best) and (best is None or its.mean < best.mean):
            best = its
    return best


# --- what was judged --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """What came out of a judging's rooms: all that a rank rests on, beside the script."""

    seeds: dict[str, dict]  # of each what a verdict keeps
    judging: int  # its place among those of the folder, each of which is paid for
    referee: str  # its version, as the rooms were judged
    track: str  # sha256 of the rules then
    machine: dict[str, str]

    @property
    def scores(self) -> list[float]:
        return [its["score"] for its in self.seeds.values() if "score" in its]

    @property
    def complete(self) -> bool:
        return len(self.scores) == len(self.seeds)

    def rival(self, record: Record) -> Rival:
        return Rival(record, self.scores, self.machine, self.judging, is_priced(self.referee))


def kept_evidence(record: Record) -> Evidence | None:
    """What a kept verdict says of the folder's last judging, if only the rule is left to be applied."""
    its = read_verdicts(record.track.folder).get(record.name, {})
    its |= its.get(ROOMS, {})
    seeds = judged_seeds(its)
    draws = read_draws(record.track.folder)
    newest = [draw.seeds for draw in draws if draw.folder == record.name][-1:]
    if not seeds or its["sha256"] != folder_sha256(record.path) or newest not in ([], [seeds]):
        return None
    if {*its["failed"], *its.get("left", ())} - RULE:
        return None
    number = number_of(draws, record.name, its["sha256"], seeds)
    found = Evidence(its["judged"]["seeds"], number, its["referee"], its["track"], its["machine"])
    return found if found.complete else None
