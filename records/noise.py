"""Whether two sets of repeats differ: rows of a comparison, and the band within which a difference is noise.

The band of a row, for a difference of means (of logarithms, where a row is `relative`):

    repeats on both sides   Welch's interval: t(1 - level / 2, df) sqrt(s_base^2 / n + s_new^2 / m)
    as many on both sides   or, if that is narrower, the interval of the paired differences, each of the two
                            at half the level: t(1 - level / 4, n - 1) s_pairs / sqrt(n)
    known noise             what two single runs of one commit may lie apart. It is the band where a side
                            has one run: for bits per byte the track's noise_bpb; for speed 5 %, or as far as
                            the machine's speed wandered within the runs
    ceiling                 the known noise, or three times the way from the lowest to the highest of a side's
                            repeats (nine times of two repeats), whichever is more: t says little of a few
    floor                   the least that a band can be: a tenth of noise_bpb, 1 % of speed and memory

`level` is FAMILY / QUANTITIES, after Bonferroni: all rows together call two sets of runs of one commit
different once in a hundred comparisons. Runs are paired by seed where both sides have the same seeds, else in
the order in which they are named.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from records.metrics import Metrics

FAMILY = 0.01  # probability that at least one row of two equal sides gets a colour
QUANTITIES = 8  # that are measured: tokens/s, MFU and step time are one, loss and bits per byte another
APART = {2: 9, 3: 3}  # how far means may lie apart, in ranges of two repeats, and of three or more
LEVEL = FAMILY / QUANTITIES
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
    relative: bool = False  # differences are of logarithms
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
    band: float | None  # the same unit
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
    return statistics.fmean(values)


def growth(logarithm: float) -> float:
    """e^x - 1, which may be infinite."""
    try:
        return math.expm1(logarithm)
    except OverflowError:
        return math.inf


def pairs(base: list[Metrics], new: list[Metrics]) -> list[int] | None:
    """For each run of base the place of its partner in new; None where the sides differ in number."""
    seeds = [[run.seed for run in side] for side in (base, new)]
    unique = all(None not in side and len(set(side)) == len(side) for side in seeds)
    if unique and set(seeds[0]) == set(seeds[1]):
        return [seeds[1].index(seed) for seed in seeds[0]]
    return [*range(len(base))] if len(base) == len(new) else None


def welch(base: list[float], new: list[float], level: float) -> float:
    """Half of the width of the interval for the difference of means."""
    from scipy.stats import t

    parts = [statistics.variance(side) / len(side) for side in (base, new)]
    total = sum(parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (base, new)))
    return t.isf(level / 2, freedom) * math.sqrt(total)


def paired(differences: list[float], level: float) -> float:
    """The same for pairs."""
    from scipy.stats import t

    freedom = len(differences) - 1
    return t.isf(level / 2, freedom) * statistics.stdev(differences) / math.sqrt(len(differences))


def band(base: list[float], new: list[float], partners: list[int] | None, known: float) -> float:
    """Within which a difference of means is noise; see the top."""
    if min(len(base), len(new)) < 2:
        return known
    if partners is None:
        width = welch(base, new, LEVEL)
    else:
        differences = [new[at] - value for at, value in zip(partners, base)]
        width = min(welch(base, new, LEVEL / 2), paired(differences, LEVEL / 2))
    apart = max(max(side) - min(side) for side in (base, new))
    return min(width, max(known, APART[min(3, len(base), len(new))] * apart))


def unlike(row: Row, base: list[Metrics], new: list[Metrics]) -> str:
    """Why a row cannot be compared; empty if it can."""
    for name in row.needs:
        if len({run.fact(name) for run in [*base, *new]} - {None}) > 1:
            return f"other {name.replace('_', ' ')}"
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
    difference = statistics.fmean(sides[1]) - statistics.fmean(sides[0])
    width = max(band(*sides, pairs(base, new), row.known([*base, *new])), row.floor([*base, *new]))
    verdict = SAME
    if abs(difference) > width:
        verdict = (BETTER if difference * row.good > 0 else WORSE) if row.good else OTHER
    if row.relative:
        difference, width = growth(difference), growth(width)
    return Difference(row, *values, difference, width, verdict)
