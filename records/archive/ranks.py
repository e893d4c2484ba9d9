"""Which records of a track have a rank, and which one each had to beat: derived, not read from a submission.

A rank rests on the scores that the judge found in its own rooms. What an earlier referee passed, with a seed
that it trained again, stands with the scores of its submission. A record must beat the best one that has a
rank among those before it; where that is disputed later, the next one takes its place, here as in the judge.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard

from records.archive.judgings import Draw, number_of, read_draws
from records.archive.record import Record
from records.archive.statistics import p_below
from records.archive.tracks import Track
from records.archive.verdicts import RETRAINED, folder_sha256, read_verdicts

PRICED = 3  # the number of the first referee whose rule prices new bytes and bounds luck
# The least standard deviation of scores, over the track's least gain. On track_floppy it is 0.0023 bits per
# byte: pooled over the five judgings of before number 3, that of the scores in verdicts.json is 0.00227.
LEAST_SPREAD = 0.46


@dataclass(frozen=True)
class Rival:
    """A record that may have a rank, and the scores that others must beat."""

    record: Record
    scores: list[float]
    machine: dict  # that they came from
    judging: int | None  # its place among those of the folder; None: an earlier referee passed it
    priced: bool = False  # whether it was judged by the rule that prices new bytes and bounds luck

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
        return gain_over(before, self.scores, self.record, self.judging, self.priced).enough


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


def gain_over(
    rival: Rival, scores: list[float], record: Record, judging: int = 1, priced: bool = True
) -> Gain:
    """What a record's scores gain over a rival's. Raises DataError.

    `judging`: its place among those of the folder. `priced`: by the rule that prices new bytes and bounds
    luck.
    """
    track = record.track
    bpb = rival.mean - statistics.fmean(scores)
    spread = LEAST_SPREAD * track["min_gain_bpb"] if priced else 0.0
    p = p_below(scores, rival.scores, spread)
    new_bytes = count_new_bytes(record, rival.record) if priced else 0
    text_bytes = track.dataset["val_bytes"] or min(record.values("val_bytes"))
    least = track["min_gain_bpb"] + 8 * new_bytes / text_bytes
    return Gain(bpb, p, least, track["alpha"] / judging, new_bytes)


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
