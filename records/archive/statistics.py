"""The statistics by which scores of records and of runs are compared."""

import numpy as np


def p_below(new: list[float], old: list[float]) -> float:
    """One-sided p of Welch's t-test that `new` is not below `old`. Without any spread the means decide."""
    from scipy.stats import ttest_ind  # a second that other checks need not pay

    if np.std(new) == np.std(old) == 0:
        return float(np.mean(new) >= np.mean(old))
    return float(ttest_ind(new, old, equal_var=False, alternative="less").pvalue)


def mean_interval(values: list[float], level: float) -> tuple[float, float]:
    """Student's interval, which misses the mean of what `values` are drawn from with probability `level`.

    Values without any spread leave it no width.
    """
    from scipy.stats import ttest_1samp

    if np.ptp(values) == 0:
        return values[0], values[0]
    found = ttest_1samp(values, 0).confidence_interval(1 - level)
    return float(found.low), float(found.high)
