"""Curves of runs as charts: losses, validations, step times, learning rates, over four axes.

All charts of a document share four parameters, which embed.js sets: `axis` is one of AXES, `shown` says which
runs are, `singles` whether single steps stand behind their means, and `zoom` which part of the axis is seen.
A run's colour is the variable --run-N of the document, so that the style sheet knows light, dark and paper.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import altair as alt
import numpy as np

from records.archive.metrics import Metrics
from records.board.look import DASH, SOLID, finished

BUCKETS, ALL_BUCKETS = 400, 2000  # of a curve, and of that kind of curve in a page
MEANS, ALL_MEANS = 120, 600  # points of a curve's means, and of that kind of curve in a page: each is read
PLACES = 40  # rows of a chart's table
AXES = {"steps": "steps", "tokens": "tokens", "seconds": "seconds of training", "flops": "operations"}
PLACE = "axis == 'seconds' ? datum.seconds : datum.step * datum[axis]"
PLACE_WORDS = "format(datum.value, axis == 'steps' || axis == 'seconds' ? ',' : '~s')"
SEEN = (
    "[ends[axis][0] + zoom[0] * (ends[axis][1] - ends[axis][0]), "
    "ends[axis][0] + zoom[1] * (ends[axis][1] - ends[axis][0])]"
)
HEIGHT = 280  # pixels
DATA = "curves"


@dataclass(frozen=True)
class Curve:
    """Values of a run at some of its steps. `role`: pale ones stand behind bold ones, rings are points."""

    role: str  # pale, bold or ring
    steps: list[int]
    seconds: list[float]
    values: list[float | None]  # None: not finite
    every: int = 1  # steps that a value is the mean of, at most


@dataclass(frozen=True)
class CurveChart:
    """A chart with its title and the table of its numbers."""

    name: str
    title: str
    note: str
    spec: dict  # Vega-Lite
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Side:
    """Runs that are switched together."""

    title: str
    runs: list[dict]


@dataclass(frozen=True)
class Curves:
    """What the template `curves_of` takes."""

    sides: list[Side]
    axes: dict[str, str]
    has_means: bool
    colours: list[str]  # of the runs, in CSS
    charts: list[CurveChart]

    @property
    def specs(self) -> dict[str, dict]:
        return {one.name: one.spec for one in self.charts}


@dataclass(frozen=True)
class Detail:
    """How many a curve has: less of each where there are many runs."""

    buckets: int
    means: int


def detail_of(runs: int) -> Detail:
    return Detail(
        max(50, min(BUCKETS, ALL_BUCKETS // max(1, runs))), max(30, min(MEANS, ALL_MEANS // max(1, runs)))
    )


# --- numbers ----------------------------------------------------------------------------------------------


def short(values: np.ndarray, digits: int = 5) -> list[float | int | None]:
    """Numbers as JSON should have them: few digits, None for those that are not finite."""
    rounded = [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
    return [int(value) if value is not None and value == int(value) else value for value in rounded]


def thin(values: np.ndarray, buckets: int) -> np.ndarray:
    """Places of the first and the last value, and of the least and the greatest of each bucket, int[n]."""
    if len(values) <= 2 * buckets:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), buckets + 1).astype(int)
    low, high = (np.where(np.isfinite(values), values, worst) for worst in (np.inf, -np.inf))
    found = {0, len(values) - 1}
    for start, end in itertools.pairwise(edges):
        found |= {start + int(np.argmin(low[start:end])), start + int(np.argmax(high[start:end]))}
    return np.array(sorted(found))


def curve(run: Metrics, role: str, places: np.ndarray, values: np.ndarray, every: int = 1) -> Curve:
    """`places`: of the values among the run's steps, from 0."""
    seconds = short(run.table["train_seconds"][places], 6)
    return Curve(role, (places + 1).tolist(), seconds, short(values), every)


def with_means(run: Metrics, values: np.ndarray, mean: Callable, detail: Detail) -> list[Curve]:
    """The values; of a long run also the means of buckets, each at the middle of its bucket."""
    seen = thin(values, detail.buckets)
    if len(values) < 2 * detail.means:
        return [curve(run, "bold", seen, values[seen])]
    parts = np.array_split(np.arange(len(values)), detail.means)
    middles = np.array([part[len(part) // 2] for part in parts])
    means = np.array([mean(values[part]) for part in parts])
    return [curve(run, "pale", seen, values[seen]), curve(run, "bold", middles, means, len(parts[0]))]


def losses(run: Metrics, detail: Detail) -> list[Curve]:
    return with_means(run, run.table["train_loss"], np.mean, detail)


def step_times(run: Metrics, detail: Detail) -> list[Curve]:
    """Milliseconds, and rings around stalls."""
    times = np.maximum(1e3 * run.seconds, 1e-3)
    slow = np.flatnonzero(run.stalls)
    return [*with_means(run, times, np.median, detail), curve(run, "ring", slow, times[slow])]


def validations(run: Metrics, detail: Detail) -> list[Curve]:
    """A ring is a score on all of the text where the run has others on a part of it."""
    found = []
    for partial in (True, False):
        chosen = [val for val in run.vals if val["partial"] == partial and 0 < val["step"] <= run.steps]
        places = np.array([int(val["step"]) - 1 for val in chosen], int)
        found.append(curve(run, "bold", places, np.array([val["val_bpb"] for val in chosen])))
    part, whole = found
    return [part, Curve("ring", whole.steps, whole.seconds, whole.values)] if part.steps else [whole]


def rates(run: Metrics, detail: Detail) -> list[Curve]:
    values = run.table["lr_mul"]
    few = np.arange(0) if np.isnan(values).all() else thin(values, detail.means // 2)
    return [curve(run, "bold", few, values[few])]


# --- charts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """One of the charts."""

    name: str
    title: str
    unit: str
    curves: Callable[[Metrics, Detail], list[Curve]]
    note: str = ""
    logarithmic: bool = False
    points: bool = False  # values are few: each is marked, and each has a row in the table


QUANTITIES = [
    Quantity("loss", "Loss of training", "nats a token", losses),
    Quantity(
        "bpb",
        "Bits per byte of validation",
        "bits per byte",
        validations,
        "Before the export. A ring is a score on the whole text where the others are on a part of it.",
        points=True,
    ),
    Quantity(
        "time",
        "Step times and stalls",
        "ms, logarithmic",
        step_times,
        "A ring is a stall, a step that took far longer than those around it.",
        logarithmic=True,
    ),
    Quantity("rate", "Learning rate", "multiplier", rates),
]


def colour(side: int, place: int, of: int) -> str:
    """Colours of a side lie near each other. Sides differ in hue, and in dashes for whoever sees no hue."""
    at = place / (of - 1) if of > 1 else 0.4
    if side:
        hue, saturation, light, dark = 350 + 42 * at, 88, 32 + 4 * at, 76 - 18 * at
    else:
        hue, saturation, light, dark = 250 - 55 * at, 75, 30 + 12 * at, 80 - 18 * at
    shades = (f"hsl({hue % 360:.0f} {saturation}% {lightness:.0f}%)" for lightness in (light, dark))
    return f"light-dark({', '.join(shades)})"


def ends(runs: list[Metrics]) -> dict[str, list[float]]:
    """The first and the last place of all runs on each of the AXES that all of them have."""
    factors = {
        "steps": [1.0 for _ in runs],
        "tokens": [run.tokens_per_step for run in runs],
        "flops": [run.flops_per_step for run in runs],
    }
    found = {}
    for axis, each in factors.items():
        if all(each):
            found[axis] = [min(each), max(run.steps * one for run, one in zip(runs, each))]
    clocks = [run.table["train_seconds"] for run in runs]
    found["seconds"] = [float(min(clock[0] for clock in clocks)), float(max(clock[-1] for clock in clocks))]
    return {axis: widened(*found[axis]) for axis in AXES if axis in found}


def widened(first: float, last: float) -> list[float]:
    """A single place becomes a part of the axis."""
    return [first, last] if first < last else [first - 1, last + 1]


def data_of(runs: list[tuple[int, Metrics]], each: list[list[Curve]]) -> list[dict]:
    """Curves as columns, which the chart makes rows of: a tenth of the bytes."""
    rows = []
    for at, ((side, run), curves) in enumerate(zip(runs, each)):
        about = {"at": at, "name": run.name, "side": side, "colour": f"var(--run-{at})"}
        about |= {"steps": 1, "tokens": run.tokens_per_step, "flops": run.flops_per_step}
        for one in curves:
            columns = {"step": one.steps, "seconds": one.seconds, "value": one.values}
            rows.append({**about, "role": one.role, "every": one.every, **columns})
    return rows


def encoded(quantity: Quantity, which: str, switch: str = "true") -> alt.Chart:
    """The part of some curves that is seen, without a mark. `which` and `switch` are expressions.

    What changes comes last: Vega then adds and removes points, and makes none of them again.
    """
    scale = alt.Scale(type="log", nice=False) if quantity.logarithmic else alt.Scale(zero=False, nice=True)
    return (
        alt.Chart(alt.NamedData(name=DATA))
        .transform_filter(which)
        .transform_flatten(["step", "seconds", "value"])
        .transform_calculate(place=PLACE)
        .transform_filter(f"{switch} && shown[datum.at] && inrange(datum.place, seen)")
        .encode(
            x=alt.X(
                "place:Q",
                title=None,
                axis=alt.Axis(
                    labelExpr=PLACE_WORDS, labelOverlap=True, tickCount=alt.ExprRef("ceil(width / 90)")
                ),
                scale=alt.Scale(domain=alt.ExprRef("seen"), nice=False, zero=False),
            ),
            y=alt.Y("value:Q", title=quantity.unit, scale=scale),
            color=alt.Color("colour:N", scale=None),
            detail="at:N",
            strokeDash=alt.StrokeDash(
                "side:O", legend=None, scale=alt.Scale(domain=[0, 1], range=[SOLID, DASH])
            ),
            tooltip=[
                alt.Tooltip("name:N", title="run"),  # Vega lets no expression read a "run"
                alt.Tooltip("step:Q", format=","),
                alt.Tooltip("seconds:Q", format=",.1f"),
                alt.Tooltip("value:Q", title=quantity.unit, format=".5~g"),
                alt.Tooltip("every:Q", title="mean of steps"),
            ],
        )
    )


@cache  # Altair takes half a second for what no run changes
def design(quantity: Quantity) -> dict:
    """The chart without its data and without the parameters of the document."""
    brush = alt.selection_interval(name="brush", encodings=["x"])
    nearest = alt.selection_point(
        name="nearest", nearest=True, on="pointermove", clear="pointerout", empty=False, fields=["at", "step"]
    )
    pale = encoded(quantity, "datum.role == 'pale'", "singles").mark_line(
        strokeWidth=1, opacity=0.3, clip=True, aria=False
    )
    lines = encoded(quantity, "datum.role == 'bold'").mark_line(
        strokeWidth=2, clip=True, aria=False, point={"size": 30} if quantity.points else False
    )
    rings = encoded(quantity, "datum.role == 'ring'").mark_point(
        size=90, filled=False, strokeWidth=2, strokeDash=SOLID, aria=False
    )
    read = (
        encoded(quantity, "datum.role != 'pale'")
        .mark_point(size=70, filled=True, strokeDash=SOLID, aria=False)
        .encode(opacity=alt.condition(nearest, alt.value(1), alt.value(0)))
    )
    title = alt.TitleParams(text=alt.ExprRef("titles[axis]"), orient="bottom", offset=8)
    layers = alt.layer(pale, lines.add_params(brush), rings, read.add_params(nearest))
    return finished(layers.properties(width="container", height=HEIGHT, title=title))


def draw(quantity: Quantity, runs: list[tuple[int, Metrics]], each: list[list[Curve]]) -> dict:
    """A chart in Vega-Lite, which compiles parameters in this order."""
    places = ends([run for _, run in runs])
    parameters = {
        "axis": next(iter(places)),
        "shown": [True] * len(runs),
        "singles": True,
        "zoom": [0, 1],
        "ends": places,
        "titles": AXES,
    }
    spec = design(quantity)
    params = [{"name": name, "value": value} for name, value in parameters.items()]
    params.append({"name": "seen", "expr": SEEN})
    return {**spec, "params": [*params, *spec["params"]], "datasets": {DATA: data_of(runs, each)}}


# --- tables -----------------------------------------------------------------------------------------------


def reading(curves: list[Curve], step: int, run: Metrics, exact: bool) -> str:
    """What a run's bold values and rings say of a step: the value there, else the nearest one's."""
    if step > run.steps:
        return "ended"
    known = {at: value for one in curves if one.role != "pale" for at, value in zip(one.steps, one.values)}
    if not known or (exact and step not in known):
        return ""
    value = known[min(known, key=lambda at: abs(at - step))]
    return "not finite" if value is None else f"{value:.5g}"


def table(
    quantity: Quantity, runs: list[Metrics], each: list[list[Curve]]
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a chart's numbers: at every validation, else at PLACES steps."""
    steps = {at for curves in each for one in curves if one.role != "pale" for at in one.steps}
    if not quantity.points:
        steps = set(np.linspace(1, max(run.steps for run in runs), PLACES).round().astype(int).tolist())
    if quantity.name == "time":  # a ring is another thing than a median
        each = [[one for one in curves if one.role != "ring"] for curves in each]
    rows = []
    for step in sorted(steps):
        words = [reading(curves, step, run, quantity.points) for run, curves in zip(runs, each)]
        rows.append([f"{step:,}", *words])
    return ["step", *(run.name for run in runs)], rows


def curves_of(sides: list[tuple[str, list[Metrics]]]) -> Curves:
    """All charts of the runs of all sides, each a title and its runs."""
    runs = [(side, run) for side, (_, members) in enumerate(sides) for run in members]
    few = detail_of(len(runs))
    colours = [
        colour(side, place, len(members))
        for side, (_, members) in enumerate(sides)
        for place in range(len(members))
    ]
    shown, at = [], itertools.count()
    for side, (title, members) in enumerate(sides):
        line = "dashed" if side else "solid"
        shown.append(Side(title, [{"at": next(at), "name": run.name, "line": line} for run in members]))
    alone = [run for _, run in runs]
    charts, has_means = [], False
    for quantity in QUANTITIES:
        each = [quantity.curves(run, few) for run in alone]
        has_means |= any(one.role == "pale" for curves in each for one in curves)
        head, rows = table(quantity, alone, each)
        spec = draw(quantity, runs, each)
        charts.append(CurveChart(quantity.name, quantity.title, quantity.note, spec, head, rows))
    axes = {axis: AXES[axis] for axis in ends(alone)}
    return Curves(shown, axes, has_means, colours, charts)


def stall_rows(runs: list[Metrics]) -> list[list[str]]:
    """Each stall's run, step and seconds."""
    stalls = [stall for run in runs for stall in run.stalled]
    return [[one["run"], f"{one['step']:,}", f"{one['seconds']:.1f} s"] for one in stalls]
