"""Whether two sets of repeats differ: rows of a comparison, and the band within which a difference is noise.

The band of a row, for a difference of means (of logarithms, where a row is `relative`):

    repeats on both sides   Welch's interval: t(1 - level / 2, df) sqrt(s_base^2 / n + s_new^2 / m)
    as many on both sides   or, if that is narrower, the interval of the paired differences, each of the two
                            at half the level: t(1 - level / 4, n - 1) s_pairs / sqrt(n)
    known noise             what two single runs of one commit may lie apart, see rows.py. It is the band
                            between single runs
    repeats on one side     the interval of one more run, t(1 - FAMILY / 2, n - 1) s sqrt(1 + 1 / n), or the
                            known noise if that is wider
    ceiling                 the known noise, or three times the way from the lowest to the highest of a side's
                            repeats (nine times of two repeats), whichever is more: t says little of a few
    floor                   the least that a band can be: a tenth of noise_bpb, 1 % of speed and memory

`level` is FAMILY / QUANTITIES, after Bonferroni: all rows together call two sets of runs of one commit
different once in a hundred comparisons. Runs are paired by seed where both sides have the same seeds, else in
the order in which they are named. A seed's losses come out the same again on one machine. So where the sides
have other seeds, its repeats count as one run in the rows that are `seeded`.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from records.archive.metrics import Metrics

FAMILY = 0.01  # probability that at least one row of two equal sides gets a colour
QUANTITIES = 8  # that are measured: tokens/s, MFU and step time are one, loss and bits per byte another
APART = {2: 9, 3: 3}  # how far means may lie apart, in ranges of two repeats, and of three or more
LEVEL = FAMILY / QUANTITIES
FEW = 10  # steady steps: fewer say nothing of a speed
BETTER, WORSE, SAME, OTHER, UNKNOWN = "better", "worse", "same", "differs", "-"


@dataclass(frozen=True)
class Row:
    """A line of the table."""

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
    """A row, filled in."""

    row: Row
    base: list[float | None]
    new: list[float | None]
    difference: float | None  # new - base; a part of base where the row is relative
    band: float | None  # the same unit: up to there, a difference in this direction is noise
    verdict: str
    note: str = ""  # why there is no verdict

    @property
    def means(self) -> tuple[float | None, float | None]:
        """Of base and new: the geometric mean where the row is relative."""
        return tuple(mean(self.row, side) for side in (self.base, self.new))


def mean(row: Row, values: list[float | None]) -> float | None:
    if None in values or not all(map(math.isfinite, values)):
        return None
    if row.relative and min(values) > 0:
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


def welch(base: list[float], new: list[float], level: float) -> float:
    """Half of the width of the interval for the difference of means."""
    from scipy.stats import t

    parts = [float(np.var(side, ddof=1)) / len(side) for side in (base, new)]
    total = sum(parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (base, new)))
    return t.isf(level / 2, freedom) * math.sqrt(total)


def paired(differences: list[float], level: float) -> float:
    """The same for pairs."""
    from scipy.stats import t

    freedom = len(differences) - 1
    return t.isf(level / 2, freedom) * float(np.std(differences, ddof=1)) / math.sqrt(len(differences))


def one_more(side: list[float], level: float) -> float:
    """Half of the width of the interval for another run, around the mean of these."""
    from scipy.stats import t

    spread = float(np.std(side, ddof=1)) * math.sqrt(1 + 1 / len(side))
    return t.isf(level / 2, len(side) - 1) * spread


def band(base: list[float], new: list[float], partners: list[int] | None, known: float) -> float:
    """Within which a difference of means is noise; see the top."""
    several = [side for side in (base, new) if len(side) > 1]
    if not several:
        return known
    apart = max(max(side) - min(side) for side in several)
    ceiling = max(known, APART[min(3, *map(len, several))] * apart)
    if len(several) == 1:
        return max(known, min(one_more(several[0], FAMILY), ceiling))
    if partners is None:
        width = welch(base, new, LEVEL)
    else:
        differences = [new[at] - value for at, value in zip(partners, base)]
        width = min(welch(base, new, LEVEL / 2), paired(differences, LEVEL / 2))
    return min(width, ceiling)


def unlike(row: Row, base: list[Metrics], new: list[Metrics]) -> str:
    """Why a row cannot be compared; empty if it can."""
    for name in row.needs:
        if len({run.fact(name) for run in [*base, *new]} - {None}) > 1:
            return f"other {name.replace('_', ' ')}"
    if row.steady and any(run.steady.sum() < FEW for run in [*base, *new]):
        return "few steps"
    return row.unjudged


def compare(row: Row, base: list[Metrics], new: list[Metrics]) -> Difference:
    """One row of two sides."""
    values = [[row.value(run) for run in side] for side in (base, new)]
    both = values[0] + values[1]
    if None in both:
        return Difference(row, *values, None, None, UNKNOWN)
    if not all(map(math.isfinite, both)):
        worse = row.good and all(map(math.isfinite, values[0]))
        return Difference(row, *values, None, None, WORSE if worse else UNKNOWN, "not finite")
    if note := unlike(row, base, new) or ("not above 0" if row.relative and min(both) <= 0 else ""):
        return Difference(row, *values, None, None, UNKNOWN, note)
    sides = [[math.log(value) for value in side] for side in values] if row.relative else values
    difference = float(np.mean(sides[1]) - np.mean(sides[0]))
    seeds = [[run.seed for run in side] for side in (base, new)]
    if row.seeded and set(seeds[0]) != set(seeds[1]):
        seeds, sides = zip(*map(by_seed, seeds, sides))
    known, floor = row.known([*base, *new]), row.floor([*base, *new])
    if row.relative:
        known, floor = math.log1p(known), math.log1p(floor)
    width = max(band(*sides, pairs(*seeds), known), floor)
    verdict = SAME
    if abs(difference) > width:
        verdict = (BETTER if difference * row.good > 0 else WORSE) if row.good else OTHER
    if row.relative:  # a fall of the same logarithm is a smaller part than a rise
        width = growth(width) if difference > 0 else -growth(-width)
        difference = growth(difference)
    return Difference(row, *values, difference, width, verdict)
