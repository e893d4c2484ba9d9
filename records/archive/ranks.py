"""Which records of a track have a rank, and which one each had to beat: derived, not read from a submission.

A rank rests on the scores of what the judge trained. What an earlier referee passed, with a seed that it
trained again, stands with the scores of its submission. A record must beat the incumbent: the best one that
has a rank among those before it. Where that is disputed later, the next one takes its place, here as in the
judge.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

from records.archive.checks import Check, check
from records.archive.record import Record
from records.archive.tracks import Track
from records.archive.verdicts import (
    BESIDE,
    RETRAINED,
    Draw,
    folder_sha256,
    number_of,
    read_draws,
    read_verdicts,
)

PRICED = 3  # the number of the first referee whose rule prices new bytes and bounds luck
# The least standard deviation of scores, over the track's least gain. On track_floppy it is 0.0023 bits per
# byte: pooled over the five judgings of before number 3, that of the scores in verdicts.json is 0.00227.
LEAST_SPREAD = 0.46
RULE = {"gain", "machine"}  # checks that have another answer where another record is the incumbent


# --- the rule ---------------------------------------------------------------------------------------------


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
    judging: int | None = 1  # its place among those of the folder; None: an earlier referee passed it
    referee: str | None = None  # its version; None: that of today
    track: str = ""  # sha256 of the rules that it was judged by

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

    @property
    def priced(self) -> bool:
        """Whether the rule of its referee prices new bytes and bounds luck. The first had no number."""
        if self.referee is None:
            return True
        number, plus, _ = self.referee.partition("+")
        return bool(plus) and int(number) >= PRICED

    def gain_over(self, incumbent: "ScoredRecord") -> Gain:
        """Raises DataError."""
        track = self.record.track
        spread = LEAST_SPREAD * track["min_gain_bpb"] if self.priced else 0.0
        new_bytes = count_new_bytes(self.record, incumbent.record) if self.priced else 0
        text_bytes = track.dataset["val_bytes"] or min(self.record.values("val_bytes"))
        return Gain(
            bpb=incumbent.mean - self.mean,
            p=p_below(self.scores, incumbent.scores, spread),
            least=track["min_gain_bpb"] + 8 * new_bytes / text_bytes,
            below=track["alpha"] / (self.judging or 1),
            new_bytes=new_bytes,
        )

    def ranks_after(self, incumbent: "ScoredRecord | None") -> bool:
        """Whether it gains enough. An earlier referee has seen to that."""
        return incumbent is None or self.judging is None or self.gain_over(incumbent).enough


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


# --- who stands -------------------------------------------------------------------------------------------


def judged_seeds(verdict: dict) -> dict[str, dict]:
    """What a verdict keeps of each seed that the judge trained; nothing where it was never judged."""
    return verdict.get("judged", {}).get("seeds", {})


def number_of_judging(verdict: dict, name: str, draws: Sequence[Draw]) -> int:
    """The place of the judging that a verdict rests on, among those of its folder."""
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
        return ScoredRecord(record, claimed_scores(record), record.machine, judging=None, referee="")
    number = number_of_judging(verdict, record.name, draws)
    machine = verdict.get("machine", {})
    return ScoredRecord(record, judged_seeds(verdict), machine, number, verdict.get("referee", ""))


def folders_before(track: Track, name: str, verdicts: dict[str, dict], draws: Sequence[Draw]) -> list[Path]:
    """The records before one, the first first: by day, and of one day by their first judgings.

    What an earlier referee passed came before all judgings. What was never judged comes last, by name.
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


def kept_scores(record: Record) -> ScoredRecord | None:
    """What a kept verdict says of the folder's last judging, if only the rule is left to be applied."""
    its = read_verdicts(record.track.folder).get(record.name, {})
    its |= its.get(BESIDE, {})
    seeds = judged_seeds(its)
    draws = read_draws(record.track.folder)
    newest = [draw.seeds for draw in draws if draw.folder == record.name][-1:]
    if not seeds or its["sha256"] != folder_sha256(record.path):
        return None
    if newest not in ([], [tuple(map(int, seeds))]) or {*its["failed"], *its.get("left", ())} - RULE:
        return None
    number = number_of_judging(its, record.name, draws)
    found = ScoredRecord(record, seeds, its["machine"], number, its["referee"], its["track"])
    return found if found.complete else None
