"""The statistical test that compares the scores of two records."""

import numpy as np


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
