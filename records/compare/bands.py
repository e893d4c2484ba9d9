"""How far two sides may lie apart by noise: the band of a difference, and the verdict that follows.

README.md has the rules as a table by the number of repeats, with a worked example. Differences are of means;
where a measure is `relative`, of means of logarithms. Runs are paired by seed where both sides have the same
seeds, else in the order in which they are named. A seed's losses come out the same again on one machine: so
where the sides have other seeds, its repeats count as one run of the measures that are `seeded`.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from records.archive.metrics import Metrics

FAMILY = 0.01  # probability that at least one row of two equal sides gets a colour
QUANTITIES = 8  # that are measured: tokens/s, MFU and step time are one, loss and bits per byte another
APART = {2: 9, 3: 3}  # how far means may lie apart, in ranges of two repeats, and of three or more
LEVEL = FAMILY / QUANTITIES  # of one measure, after Bonferroni
FEW = 10  # steady steps: fewer say nothing of a speed
BETTER, WORSE, SAME, OTHER, UNKNOWN = "better", "worse", "same", "differs", "-"


@dataclass(frozen=True)
class Measure:
    """What is measured of a run: a line of the table."""

    key: str
    label: str
    unit: str
    form: str  # of a value
    value: Callable[[Metrics], float | None]
    good: int = 0  # -1: less is better, +1: more is better, 0: neither
    relative: bool = False  # differences are of logarithms, known noise and floors are parts
    seeded: bool = False  # a seed has the same value again
    steady: bool = False  # of the steady steps
    known: Callable[[list[Metrics]], float] = lambda runs: 0.0
    floor: Callable[[list[Metrics]], float] = lambda runs: 0.0
    needs: tuple[str, ...] = ()  # what must be the same for the two sides to be compared
    unjudged: str = ""  # why it has no verdict


@dataclass(frozen=True)
class Difference:
    """What two sides have of a measure, and the verdict."""

    measure: Measure
    base: list[float | None]
    new: list[float | None]
    difference: float | None  # new - base; a part of base where the measure is relative
    band: float | None  # the same unit: up to there, a difference in this direction is noise
    verdict: str
    note: str = ""  # why there is no verdict

    @property
    def means(self) -> tuple[float | None, float | None]:
        """Of base and new: the geometric mean where the measure is relative."""
        return tuple(mean(self.measure, side) for side in (self.base, self.new))


def mean(measure: Measure, values: list[float | None]) -> float | None:
    if None in values or not all(map(math.isfinite, values)):
        return None
    if measure.relative and min(values) > 0:
        return statistics.geometric_mean(values)
    return float(np.mean(values))


def growth(logarithm: float) -> float:
    """e^x - 1, which may be infinite."""
    try:
        return math.expm1(logarithm)
    except OverflowError:
        return math.inf


def pairs(base: list[int | None], new: list[int | None]) -> list[int] | None:
    """For each seed of base the place of its partner in new; None where the sides differ in number."""
    unique = all(None not in side and len(set(side)) == len(side) for side in (base, new))
    if unique and set(base) == set(new):
        return [new.index(seed) for seed in base]
    return [*range(len(base))] if len(base) == len(new) else None


def by_seed(seeds: list[int | None], values: list[float]) -> tuple[list[int | None], list[float]]:
    """Seeds without repeats, and the mean of each one's values. Runs that tell no seed stay."""
    unique = [seed for seed in dict.fromkeys(seeds) if seed is not None]
    means = [float(np.mean([value for one, value in zip(seeds, values) if one == seed])) for seed in unique]
    other = [value for seed, value in zip(seeds, values) if seed is None]
    return unique + [None] * len(other), means + other


def half(interval) -> float:
    """Of a confidence interval's width."""
    return float(interval.high - interval.low) / 2


def welch(base: list[float], new: list[float], level: float) -> float:
    """Half of the width of the interval for the difference of means."""
    if np.ptp(base) == np.ptp(new) == 0:
        return 0.0
    return half(stats.ttest_ind(new, base, equal_var=False).confidence_interval(1 - level))


def paired(base: list[float], new: list[float], level: float) -> float:
    """The same for pairs."""
    if np.ptp(np.subtract(new, base)) == 0:
        return 0.0
    return half(stats.ttest_rel(new, base).confidence_interval(1 - level))


def one_more(side: list[float], level: float) -> float:
    """Half of the width of the interval for another run, around the mean of these."""
    spread = float(np.std(side, ddof=1)) * math.sqrt(1 + 1 / len(side))
    return float(stats.t.isf(level / 2, len(side) - 1)) * spread


def between_several(base: list[float], new: list[float], partners: list[int] | None) -> float:
    """The band of a difference of means where both sides have repeats."""
    if partners is None:
        return welch(base, new, LEVEL)
    return min(welch(base, new, LEVEL / 2), paired(base, [new[at] for at in partners], LEVEL / 2))


def band(base: list[float], new: list[float], partners: list[int] | None, known: float) -> float:
    """Within which a difference of means is noise; README.md has the rules as a table."""
    several = [side for side in (base, new) if len(side) > 1]
    if not several:
        return known
    apart = max(max(side) - min(side) for side in several)
    ceiling = max(known, APART[min(3, *map(len, several))] * apart)
    if len(several) == 1:
        return max(known, min(one_more(several[0], FAMILY), ceiling))
    return min(between_several(base, new, partners), ceiling)


def unlike(measure: Measure, base: list[Metrics], new: list[Metrics]) -> str:
    """Why a measure cannot be compared; empty if it can."""
    for name in measure.needs:
        if len({run.fact(name) for run in [*base, *new]} - {None}) > 1:
            return f"other {name.replace('_', ' ')}"
    if measure.steady and any(run.steady.sum() < FEW for run in [*base, *new]):
        return "few steps"
    return measure.unjudged


def compare(measure: Measure, base: list[Metrics], new: list[Metrics]) -> Difference:
    """One measure of two sides."""
    values = [[measure.value(run) for run in side] for side in (base, new)]
    both = values[0] + values[1]
    if None in both:
        return Difference(measure, *values, None, None, UNKNOWN)
    if not all(map(math.isfinite, both)):
        worse = measure.good and all(map(math.isfinite, values[0]))
        return Difference(measure, *values, None, None, WORSE if worse else UNKNOWN, "not finite")
    if note := unlike(measure, base, new) or ("not above 0" if measure.relative and min(both) <= 0 else ""):
        return Difference(measure, *values, None, None, UNKNOWN, note)
    sides = [[math.log(value) for value in side] for side in values] if measure.relative else values
    difference = float(np.mean(sides[1]) - np.mean(sides[0]))
    seeds = [[run.seed for run in side] for side in (base, new)]
    if measure.seeded and set(seeds[0]) != set(seeds[1]):
        seeds, sides = zip(*map(by_seed, seeds, sides))
    known, floor = measure.known([*base, *new]), measure.floor([*base, *new])
    if measure.relative:
        known, floor = math.log1p(known), math.log1p(floor)
    width = max(band(*sides, pairs(*seeds), known), floor)
    verdict = SAME
    if abs(difference) > width:
        verdict = (BETTER if difference * measure.good > 0 else WORSE) if measure.good else OTHER
    if measure.relative:  # a fall of the same logarithm is a smaller part than a rise
        width = growth(width) if difference > 0 else -growth(-width)
        difference = growth(difference)
    return Difference(measure, *values, difference, width, verdict)
