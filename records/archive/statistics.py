"""The statistical test that compares the scores of two records."""

import numpy as np


def p_below(new: list[float], old: list[float]) -> float:
    """One-sided p of Welch's t-test that `new` is not below `old`. Without any spread the means decide."""
    from scipy.stats import ttest_ind  # a second that other checks need not pay

    if np.std(new) == np.std(old) == 0:
        return float(np.mean(new) >= np.mean(old))
    return float(ttest_ind(new, old, equal_var=False, alternative="less").pvalue)
