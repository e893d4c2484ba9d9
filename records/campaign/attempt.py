"""The verdict of --try: what pairs of runs, each of one seed, say of a new script against an old one.

What is judged is the mean of their differences, by an interval that holds whenever one looks.
"""

import json
import math
import statistics
from typing import NamedTuple

from records.archive.intervals import pairs_interval

KEEP, DISCARD, UNKNOWN = "keep", "discard", "unknown"
CODES = {KEEP: 0, DISCARD: 1, UNKNOWN: 2}  # exit codes


class TryResult(NamedTuple):
    """What is known after some pairs: the difference is of bits per byte, new less old, so less is better."""

    verdict: str
    differences: list[float]  # of the pairs, in order
    low: float
    high: float
    over: bool  # the new script's artifact is over the budget of bytes, and the old one's is not

    @property
    def difference(self) -> float:
        return statistics.fmean(self.differences)

    def __str__(self) -> str:
        return f"difference:{self.difference:+.4f} low:{self.low:+.4f} high:{self.high:+.4f}"

    def json(self) -> str:
        """For programs. An end of the interval that is not known yet is null."""
        low, high = (end if math.isfinite(end) else None for end in (self.low, self.high))
        known = self._asdict() | {"low": low, "high": high, "difference": self.difference}
        return json.dumps(known | {"pairs": len(self.differences)})


def judge(differences: list[float], over: bool) -> TryResult:
    """The verdict after these pairs. No gain at all, as where the scripts do the same, is nothing to keep."""
    low, high = pairs_interval(differences)
    verdict = UNKNOWN
    if over or 0 <= low <= high:
        verdict = DISCARD
    elif low <= high < 0:
        verdict = KEEP
    return TryResult(verdict, differences, low, high, over)
