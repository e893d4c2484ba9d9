"""How scores fall with operations: a power law for each arm, and whether an arm's gain grows or fades.

Kaplan et al. 2020 (arXiv:2001.08361): loss = a C^-b. In logarithms that is a line, fitted by least squares.
"""

import math
import statistics
from pathlib import Path

from data.command import DataError
from data.files import read_json
from records.archive.tracks import Track
from records.campaign.arms import Arm
from records.campaign.standings import Scores, scores_of, table

LEAST = 3  # budgets that a line takes: two leave nothing to measure its error by
LAW = "arm | bits per byte at all operations, by the line | falls by, for ten times the operations | budgets"
GAINS = "arm | gain over the base, first budget to last | change for ten times the operations | so it"
Points = dict[float, Scores]  # by budget


def line(points: list[tuple[float, float]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Least squares: the value at x = 0 and the slope, each with half of its 95 % interval."""
    from scipy import stats  # a second that other reports need not pay

    fit = stats.linregress(*zip(*points))
    most = stats.t.ppf(0.975, len(points) - 2)
    return (fit.intercept, most * fit.intercept_stderr), (fit.slope, most * fit.stderr)


def points_of(arms_at: dict[float, list[Arm]], seeds: list[int], scored: bool) -> dict[str, Points]:
    """Scores of every arm at the budgets at which it was run. Raises DataError."""
    found: dict[str, Points] = {}
    for budget, arms in sorted(arms_at.items()):
        for arm in arms:
            if scores := scores_of(arm, seeds, scored):
                found.setdefault(arm.name, {})[budget] = scores
    return found


def earlier(path: Path, scored: bool) -> dict[str, Points]:
    """The points that `law` wrote before, if they were scored alike: those runs may lie on another machine.

    Raises DataError.
    """
    if not path.exists():
        return {}
    facts = read_json(path)
    try:
        if facts["command"].endswith("--score") != scored:
            return {}
        return {name: points_from(arm["scores"]) for name, arm in facts["arms"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: no law: {error!r}; move it away, and --law writes a new one") from None


def points_from(scores: dict[str, dict[str, float]]) -> Points:
    return {
        float(budget): {int(seed): float(bpb) for seed, bpb in its.items()} for budget, its in scores.items()
    }


def joined(names: list[str], older: dict[str, Points], newer: dict[str, Points]) -> dict[str, Points]:
    """The points of the arms of these names. At a budget that both have, the newer ones count."""
    found = {name: older.get(name, {}) | newer.get(name, {}) for name in names}
    return {name: dict(sorted(points.items())) for name, points in found.items() if points}


def fall(points: Points) -> dict:
    """The line of an arm's logarithms of scores; empty where it has too few budgets."""
    if len(points) < LEAST:
        return {}
    logs = [
        (math.log10(budget), math.log(bpb)) for budget, scores in points.items() for bpb in scores.values()
    ]
    (at_one, spread), (slope, error) = line(logs)
    return {"bpb": math.exp(at_one), "bpb_factor": math.exp(spread), "slope": slope, "slope_error": error}


def gain(points: Points, base: Points) -> dict:
    """The line of an arm's gains over the base; empty where they have too few budgets in common."""
    gains = {
        budget: statistics.mean(base[budget].values()) - statistics.mean(points[budget].values())
        for budget in points
        if budget in base
    }
    if len(gains) < LEAST:
        return {}
    _, (slope, error) = line([(math.log10(budget), value) for budget, value in gains.items()])
    facts = {"first": gains[min(gains)], "last": gains[max(gains)], "slope": slope, "slope_error": error}
    if abs(slope) > error:
        word = "grows" if slope > 0 else "fades"
    else:
        word = "holds" if error < abs(facts["last"]) else "is not known"  # an error as large as the gain
    return facts | {"so": word}


def law(found: dict[str, Points], base: str, track: Track, command: str) -> dict:
    """Everything that the tables and the picture show."""
    arms = {}
    for name, points in found.items():
        arms[name] = {
            "scores": {f"{budget:g}": scores for budget, scores in points.items()},
            "fall": fall(points),
            "gain": gain(points, found.get(base, {})) if name != base else {},
        }
    return {"command": command, "flops": track["train_flops"], "base": base, "arms": arms}


def law_tables(facts: dict) -> str:
    """In Markdown."""
    falls, gains = [], []
    for name, arm in facts["arms"].items():
        if one := arm["fall"]:
            rate = 1 - math.exp(one["slope"])
            error = math.exp(one["slope"]) * one["slope_error"]
            near = one["bpb"] * (one["bpb_factor"] - 1)
            budgets = ", ".join(arm["scores"])
            falls.append(
                [f"`{name}`", f"{one['bpb']:.4f} ± {near:.4f}", f"{rate:.1%} ± {error:.1%}", budgets]
            )
        if one := arm["gain"]:
            change = f"{one['slope']:+.4f} ± {one['slope_error']:.4f}"
            gains.append([f"`{name}`", f"{one['first']:+.4f}, {one['last']:+.4f}", change, one["so"]])
    return table(LAW, falls) + "\n" + table(GAINS, gains)
