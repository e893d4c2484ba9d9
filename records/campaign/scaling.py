"""How scores fall with operations: a power law for each variant, and whether its gain grows or fades.

Kaplan et al. 2020 (arXiv:2001.08361): loss = a C^-b. In logarithms that is a line, fitted by least squares.
"""

import math

from data.command import DataError
from records.campaign.report import Scores, mean, scores_of, table
from records.campaign.variants import Variant

LEAST = 3  # budgets that a line takes: two leave nothing to measure its error by
FALLS = "variant | bits per byte at all operations | falls by, for ten times the operations | budgets"
GAINS = "variant | gain over the base, first budget to last | change for ten times the operations | so it"
Points = dict[float, Scores]  # by budget


def line(points: list[tuple[float, float]]) -> dict[str, float]:
    """Least squares: the value at x = 0 and the slope, each with half of its 95 % interval."""
    from scipy import stats  # a second that other reports need not pay

    fit = stats.linregress(*zip(*points))
    most = stats.t.ppf(0.975, len(points) - 2)
    start = {"start": fit.intercept, "start_error": most * fit.intercept_stderr}
    return start | {"slope": fit.slope, "slope_error": most * fit.stderr}


def points_of(begun: dict[float, list[Variant]], seeds: list[int], scored: bool) -> dict[str, Points]:
    """The scores of every variant at the budgets at which it was run. Raises DataError."""
    found: dict[str, Points] = {}
    for budget, variants in begun.items():
        for variant in variants:
            if scores := scores_of(variant, seeds, scored):
                found.setdefault(variant.name, {})[budget] = scores
    return found


def fall(points: Points) -> dict:
    """The line of a variant's logarithms of scores; empty where it has too few budgets."""
    if len(points) < LEAST:
        return {}
    pairs = [(budget, bpb) for budget, scores in points.items() for bpb in scores.values()]
    found = line([(math.log10(budget), math.log(bpb)) for budget, bpb in pairs])
    at_one = {"bpb": math.exp(found.pop("start")), "bpb_factor": math.exp(found.pop("start_error"))}
    return at_one | found


def gain(points: Points, base: Points) -> dict:
    """The line of a variant's gains over the base; empty where they have too few budgets in common."""
    gains = {budget: mean(base[budget]) - mean(points[budget]) for budget in points if budget in base}
    if len(gains) < LEAST:
        return {}
    found = line([(math.log10(budget), value) for budget, value in gains.items()])
    first, *_, last = gains.values()
    slope, error = found["slope"], found["slope_error"]
    if abs(slope) > error:
        word = "grows" if slope > 0 else "fades"
    else:
        word = "holds" if error < abs(last) else "is not known"  # an error as large as the gain
    return {"first": first, "last": last, "slope": slope, "slope_error": error, "so": word}


def fit(found: dict[str, Points], base: str) -> dict[str, dict]:
    """Scores, fall and gain of each variant. Raises DataError where no variant has runs enough."""
    if max(map(len, found.values()), default=0) < LEAST:
        raise DataError(f"a line takes runs at {LEAST} budgets; --budget F makes those of one")
    return {
        name: {
            "scores": {f"{budget:g}": scores for budget, scores in points.items()},
            "fall": fall(points),
            "gain": gain(points, found.get(base, {})) if name != base else {},
        }
        for name, points in found.items()
    }


def tables(variants: dict[str, dict]) -> str:
    """What `fit` found, in Markdown."""
    falls, gains = [], []
    for name, variant in variants.items():
        if one := variant["fall"]:
            rest = math.exp(one["slope"])
            near = one["bpb"] * (one["bpb_factor"] - 1)
            rate = f"{1 - rest:.1%} ± {rest * one['slope_error']:.1%}"
            falls.append([f"`{name}`", f"{one['bpb']:.4f} ± {near:.4f}", rate, ", ".join(variant["scores"])])
        if one := variant["gain"]:
            change = f"{one['slope']:+.4f} ± {one['slope_error']:.4f}"
            gains.append([f"`{name}`", f"{one['first']:+.4f}, {one['last']:+.4f}", change, one["so"]])
    return table(FALLS, falls) + "\n" + table(GAINS, gains)
