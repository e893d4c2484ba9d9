"""Which records of a track have a rank, and which one each had to beat: derived, not read from a submission.

A rank rests on the scores that the judge found in its own rooms. What an earlier referee passed, with a seed
that it trained again, stands with the scores of its submission. A record must beat the best one that has a
rank among those before it; where that is disputed later, the next one takes its place, here as in the judge.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from records.archive.judgings import Draw, number_of, read_draws
from records.archive.record import Record
from records.archive.statistics import p_below
from records.archive.tracks import Track
from records.archive.verdicts import RETRAINED, folder_sha256, read_verdicts


@dataclass(frozen=True)
class Rival:
    """A record that may have a rank, and the scores that others must beat."""

    record: Record
    scores: list[float]
    machine: dict  # that they came from
    judging: int | None  # its place among those of the folder; None: an earlier referee passed it

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    def ranks_after(self, before: "Rival | None") -> bool:
        """Whether it gains enough over the best record before it. An earlier referee has seen to that."""
        if before is None or self.judging is None:
            return True
        return gain_over(before, self.scores, self.record.track, self.judging).enough


@dataclass(frozen=True)
class Gain:
    """Bits per byte below a rival, and how sure that is."""

    bpb: float
    p: float  # one-sided, Welch's
    least: float  # that the track asks for
    below: float  # that p must be

    @property
    def enough(self) -> bool:
        return round(self.bpb, 9) >= self.least and self.p < self.below

    def __str__(self) -> str:
        words = f"{self.bpb:.4f} bits per byte, Welch p {self.p:.4g}; expected {self.least} at least"
        return f"{words}, p below {self.below:g}"


def gain_over(rival: Rival, scores: list[float], track: Track, judging: int = 1) -> Gain:
    """What scores gain over a rival's. `judging`: its place among those of the folder."""
    bpb = rival.mean - statistics.fmean(scores)
    p = p_below(scores, rival.scores)
    return Gain(bpb, p, track["min_gain_bpb"], track["alpha"] / judging)


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
        return Rival(record, [*record.scores.values()], record.machine, None)
    number = number_of(draws, record.name, verdict["sha256"], judged_seeds(verdict))
    return Rival(record, judged_scores(verdict), verdict.get("machine", {}), number)


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
