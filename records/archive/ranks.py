"""Which records of a track have a rank, and which one each had to beat: derived, not read from a submission.

A rank rests on the scores that the judge found in its own rooms. What an earlier referee passed stands with
the scores of its submission. A record must beat the best one that stands before it at the time of judging;
where that is disputed later, the next one before it takes its place, here as in the judge.
"""

import statistics
from dataclasses import dataclass

from records.archive.record import Record
from records.archive.statistics import p_below
from records.archive.tracks import Track
from records.archive.verdicts import folder_sha256, read_verdicts

RANKED = ("ranked", "pass")  # the second: by an earlier referee


@dataclass(frozen=True)
class Rival:
    """A record that stands, and the scores that others must beat."""

    record: Record
    scores: list[float]
    machine: dict  # that they came from

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)


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


def judged_scores(verdict: dict) -> list[float]:
    """The scores of the judge's rooms; none where it was never judged."""
    return [one["score"] for one in verdict.get("judged", {}).get("seeds", {}).values() if "score" in one]


def standing(record: Record, verdict: dict) -> Rival | None:
    """The record and the scores that count, if it stands: it passed, did not change, and nobody doubts it."""
    if verdict.get("verdict") not in RANKED or verdict.get("disputed"):
        return None
    if record.submission.get("claim") == "none" or verdict["sha256"] != folder_sha256(record.path):
        return None
    if verdict["verdict"] == "ranked":
        return Rival(record, judged_scores(verdict), verdict.get("machine", {}))
    return Rival(record, [*record.scores.values()], record.machine)


def best_before(track: Track, name: str) -> Rival | None:
    """The best record that stands among those before a folder's name. Raises DataError."""
    verdicts = read_verdicts(track.folder)
    folders = [folder for folder in track.records if folder.name < name]
    found = [standing(Record(folder), verdicts.get(folder.name, {})) for folder in folders]
    return min((one for one in found if one), key=lambda one: one.mean, default=None)


def gain_over(rival: Rival, scores: list[float], track: Track, judgings: int = 1) -> Gain:
    """What scores gain over a rival's. `judgings`: how often the folder was judged; each try is paid for."""
    bpb = rival.mean - statistics.fmean(scores)
    p = p_below(scores, rival.scores)
    return Gain(bpb, p, track["min_gain_bpb"], track["alpha"] / judgings)


def has_rank(record: Record, verdict: dict) -> bool:
    """Whether a record stands and, if it was judged, still gains enough over the best one before it."""
    its = standing(record, verdict)
    if its is None or verdict["verdict"] == "pass":
        return its is not None and "retrained" in verdict
    rival = best_before(record.track, record.name)
    count = verdict.get("judgings", {}).get("folder", 1)
    return rival is None or gain_over(rival, its.scores, record.track, count).enough
