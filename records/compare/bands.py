"""What is known of the difference of two sides: an interval, and the verdict that follows.

README.md has the rules. Differences are of means; where a measure is `relative`, of means of logarithms.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from records.archive.intervals import means_interval, pairs_interval
from records.archive.metrics import Metrics

ROUNDING = 1e-9
FEW = 10  # steady steps: fewer say nothing of a speed
BETTER, WORSE, SAME, OTHER, UNKNOWN, NONE = "better", "worse", "same", "differs", "not known", "-"


@dataclass(frozen=True)
class Measure:
    """What is measured of a run: a line of the table."""

    key: str
    label: str
    value: Callable[[Metrics], float | None]
    unit: str = ""
    form: str = ",.0f"  # of a value
    good: int = 0  # -1: less is better, +1: more is better, 0: neither
    relative: bool = False  # differences, noise, single and least are of logarithms
    exact: bool = False  # a run of the same settings has the same value
    steady: bool = False  # of the steady steps
    noise: float = 0.0  # up to which two sides may be called the same
    single: float = math.inf  # how far two runs of one program lie apart at most; infinite: not known
    least: float = 0.0  # a smaller difference is none
    needs: tuple[str, ...] = ()  # what must be the same for the two sides to be compared
    judged: bool = True  # whether it has a verdict


@dataclass(frozen=True)
class Difference:
    """What two sides have of a measure, and the verdict."""

    measure: Measure
    base: list[float | None]
    new: list[float | None]
    verdict: str = NONE
    note: str = ""  # why there is no verdict
    difference: float | None = None  # new - base; a part of base where the measure is relative
    low: float | None = None  # the ends of the interval for it
    high: float | None = None

    @property
    def means(self) -> list[float | None]:
        """Of base and new; None where a value is not known or not finite."""
        sides = (self.base, self.new)
        known = [None not in side and all(map(math.isfinite, side)) for side in sides]
        return [float(np.mean(side)) if its else None for side, its in zip(sides, known)]


def by_seed(runs: list[Metrics], values: list[float]) -> dict[object, float]:
    """The mean of each seed's values: repeats of one are no evidence about others. No seed: a run alone."""
    groups: dict[object, list[float]] = {}
    for place, (run, value) in enumerate(zip(runs, values)):
        groups.setdefault(("run", place) if run.seed is None else run.seed, []).append(value)
    return {seed: float(np.mean(group)) for seed, group in groups.items()}


def judge(measure: Measure, difference: float, low: float, high: float) -> tuple[str, str]:
    """The verdict and a note."""
    if not measure.judged:
        return NONE, "not judged"
    if not low - ROUNDING <= difference <= high + ROUNDING:
        return UNKNOWN, "runs contradict each other"
    if low > measure.least or high < -measure.least:
        if not measure.good:
            return OTHER, ""
        return (BETTER if difference * measure.good > 0 else WORSE), ""
    wide = high - low > 2 * max(measure.noise, measure.least) * (1 + ROUNDING)
    return (UNKNOWN if wide else SAME), ""


def unlike(measure: Measure, runs: list[Metrics], values: list[float]) -> str:
    """Why a measure cannot be compared; empty if it can."""
    for name in measure.needs:
        if len({run.fact(name) for run in runs} - {None}) > 1:
            return f"other {name.replace('_', ' ')}"
    if measure.steady and any(run.steady.sum() < FEW for run in runs):
        return "few steps"
    if measure.relative and min(values) <= 0:
        return "not above 0"
    return ""


def compare(measure: Measure, base: list[Metrics], new: list[Metrics]) -> Difference:
    """One measure of two sides."""
    values = [[measure.value(run) for run in side] for side in (base, new)]
    both = values[0] + values[1]
    if None in both:
        note = "a run has none" if all(run.final for run in base + new) else "a run has not ended"
        return Difference(measure, *values, note=note)
    if not all(map(math.isfinite, both)):
        worse = measure.good and all(map(math.isfinite, values[0]))
        return Difference(measure, *values, WORSE if worse else NONE, "not finite")
    if note := unlike(measure, base + new, both):
        return Difference(measure, *values, NONE, note)
    numbers = [[math.log(value) for value in side] for side in values] if measure.relative else values
    seeds = by_seed(base, numbers[0]), by_seed(new, numbers[1])
    common = [seed for seed in seeds[0] if seed in seeds[1]]
    paired = len(common) > 1 or (len(common) == 1 and min(map(len, seeds)) == 1)
    before, after = ([side[seed] for seed in (common if paired else side)] for side in seeds)
    difference = float(np.mean(after) - np.mean(before))
    if paired:
        low, high = pairs_interval([new - old for old, new in zip(before, after)])
    else:
        low, high = means_interval(before, after)
    alike = before == after or (measure.exact and np.ptp(before) == np.ptp(after) == 0)
    single = 0.0 if alike else measure.single
    # runs that lie further apart than single ones do show that nothing was known of these
    if low <= difference + single and high >= difference - single:
        low, high = max(low, difference - single), min(high, difference + single)
    verdict = judge(measure, difference, low, high)
    ends = difference, low, high
    if measure.relative:
        ends = (float(np.expm1(end)) if end > -math.inf else end for end in ends)
    return Difference(measure, *values, *verdict, *ends)
