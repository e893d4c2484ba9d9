"""What is known of a difference of runs, whenever one looks: intervals that more runs never widen."""

import math
import warnings
from collections.abc import Iterable, Iterator

import numpy as np

LEVEL = 0.05  # probability that the interval misses the true difference, however often one looks
DIGITS = 12  # differences of one size differ in the digits behind
FIRST = 3  # runs of a side: two that lie close together by chance would tell too much


def looks(count: int) -> Iterator[tuple[int, float]]:
    """After how many runs an interval is made, and its level. All levels, without end, add up to LEVEL."""
    for seen in range(FIRST, count + 1):
        yield seen, LEVEL / ((seen - 1) * (seen - 2))


def pairs_interval(differences: list[float]) -> tuple[float, float]:
    """Where the true mean of paired differences lies: what Student's intervals after each pair share.

    So it never grows with more pairs. Pairs that all differ alike leave it no width.
    """
    from scipy.stats import ttest_1samp  # a second that other checks need not pay

    found = looks(len(differences))
    return shared(ends(ttest_1samp, level, differences[:seen], popmean=0) for seen, level in found)


def means_interval(old: list[float], new: list[float]) -> tuple[float, float]:
    """The same of a difference of means, new less old, without pairs: by Welch."""
    from scipy.stats import ttest_ind

    fewest, most = sorted([len(old), len(new)])
    if fewest < FIRST:
        return -math.inf, math.inf
    return shared(
        ends(ttest_ind, level, new[:seen], old[:seen], equal_var=False) for seen, level in looks(most)
    )


def shared(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """What lies in all of them; of none, everything."""
    lows, highs = zip((-math.inf, math.inf), *intervals)
    return max(lows), min(highs)


def ends(test, level: float, *samples: list[float], **options) -> tuple[float, float]:
    """The interval of one of scipy's tests. Numbers that are too large for it leave nothing known."""
    rounded = [np.round(sample, DIGITS) for sample in samples]
    if not any(map(np.ptp, rounded)):
        new, *old = (float(sample[0]) for sample in rounded)
        return new - sum(old), new - sum(old)
    # numbers that are almost alike make scipy warn
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        found = test(*rounded, **options).confidence_interval(1 - level)
    if math.isnan(found.low) or math.isnan(found.high):
        return -math.inf, math.inf
    return float(found.low), float(found.high)
