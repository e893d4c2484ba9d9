"""Curves of runs: losses, validations, step times and learning rates, as panels of one chart.

The panels share what they show of the axis, which is one of AXES, and a legend that switches runs off and on.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import altair as alt
import numpy as np

from records.archive.metrics import Metrics
from records.board.look import DASH, SOLID, finished

BUCKETS, ALL_BUCKETS = 200, 1000  # points of a curve, and of that kind of curve in a page
ROWS = 40  # of a table
WIDTH, HEIGHT = 860, 240  # pixels of a panel; embed.js knows the width of its page
AXES = {"steps": "steps", "tokens": "tokens", "seconds": "seconds of training", "flops": "operations"}
PLACE = "axis == 'seconds' ? datum.seconds : datum.step * datum[axis]"
PLACE_WORDS = "format(datum.value, axis == 'steps' || axis == 'seconds' ? ',' : '~s')"
ZOOM = "wheel![event.ctrlKey || event.metaKey]"  # a wheel alone scrolls the page
DATA = "curves"


@dataclass(frozen=True)
class Curve:
    """Values of a run at some of its steps; of a long run each stands for the steps of a bucket."""

    steps: list[int]
    seconds: list[float]
    values: list[float | None]  # None: not finite
    low: list[float | None]  # the least of the bucket
    high: list[float | None]


@dataclass(frozen=True)
class NumberTable:
    """The numbers of a panel, for whoever cannot see it."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Curves:
    """What the template `curves_of` takes."""

    spec: dict  # Vega-Lite
    tables: list[NumberTable]


# --- numbers ----------------------------------------------------------------------------------------------


def short(values: np.ndarray, digits: int = 5) -> list[float | int | None]:
    """Numbers as JSON should have them: few digits, None for those that are not finite."""
    rounded = [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
    return [int(value) if value is not None and value == int(value) else value for value in rounded]


def in_buckets(run: Metrics, values: np.ndarray, typical: Callable, most: int) -> Curve:
    """A run's values, one for each step, by buckets. `typical`: what a bucket's values are drawn as."""
    buckets = np.array_split(np.arange(len(values)), min(most, len(values)))
    middles = np.array([bucket[len(bucket) // 2] for bucket in buckets])
    seconds = short(run.table["train_seconds"][middles], 6)
    drawn = [[of(values[bucket]) for bucket in buckets] for of in (typical, np.min, np.max)]
    return Curve((middles + 1).tolist(), seconds, *map(short, drawn))


def losses(run: Metrics, most: int) -> Curve:
    return in_buckets(run, run.table["train_loss"], np.mean, most)


def step_times(run: Metrics, most: int) -> Curve:
    """Milliseconds; a stall is the high end of its bucket."""
    return in_buckets(run, np.maximum(1e3 * run.seconds, 1e-3), np.median, most)


def rates(run: Metrics, most: int) -> Curve:
    return in_buckets(run, run.table["lr_mul"], np.mean, most)


def validations(run: Metrics, most: int) -> Curve:
    """Those on a part of the text, where a run has such ones, else those on all of it."""
    vals = [val for val in run.vals if 0 < val["step"] <= run.steps]
    vals = [val for val in vals if val["partial"]] or vals
    steps = [int(val["step"]) for val in vals]
    seconds = short(run.table["train_seconds"][np.array(steps, int) - 1], 6)
    values = short(np.array([val["val_bpb"] for val in vals]))
    return Curve(steps, seconds, values, values, values)


# --- the chart --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """One of the panels."""

    name: str
    title: str
    unit: str
    curve: Callable[[Metrics, int], Curve]
    logarithmic: bool = False
    exact: bool = False  # values are few: each is marked, and each has a row in the table


QUANTITIES = [
    Quantity("loss", "Loss of training", "nats a token", losses),
    Quantity(
        "bpb", "Bits per byte of validation, before the export", "bits per byte", validations, exact=True
    ),
    Quantity("time", "Step times and stalls", "ms, logarithmic", step_times, logarithmic=True),
    Quantity("rate", "Learning rate", "multiplier", rates),
]


@dataclass(frozen=True)
class Line:
    """A run in the chart."""

    run: Metrics
    side: int
    label: str
    colour: str  # CSS


def colour(side: int, place: int, of: int) -> str:
    """Colours of a side lie near each other. Sides differ in hue, and in dashes for whoever sees no hue."""
    at = place / (of - 1) if of > 1 else 0.4
    if side:
        hue, saturation, light, dark = 350 + 42 * at, 88, 32 + 4 * at, 76 - 18 * at
    else:
        hue, saturation, light, dark = 250 - 55 * at, 75, 30 + 12 * at, 80 - 18 * at
    shades = (f"hsl({hue % 360:.0f} {saturation}% {lightness:.0f}%)" for lightness in (light, dark))
    return f"light-dark({', '.join(shades)})"


def lines_of(sides: list[tuple[str, list[Metrics]]]) -> list[Line]:
    """Every run with its place in the chart."""
    found = []
    for side, (title, runs) in enumerate(sides):
        for place, run in enumerate(runs):
            label = f"{title} {run.name}".strip()
            found.append(Line(run, side, label, colour(side, place, len(runs))))
    return found


def axes_of(runs: list[Metrics]) -> dict[str, str]:
    """Those of the AXES that all runs have."""
    known = {
        "tokens": all(run.tokens_per_step for run in runs),
        "flops": all(run.flops_per_step for run in runs),
    }
    return {name: words for name, words in AXES.items() if known.get(name, True)}


def data_of(lines: list[Line], quantity: Quantity, curves: list[Curve]) -> list[dict]:
    """Curves as columns, of which the chart makes rows: a tenth of the bytes."""
    rows = []
    for line, curve in zip(lines, curves):
        about = {"quantity": quantity.name, "name": line.label, "side": line.side, "steps": 1}
        about |= {"tokens": line.run.tokens_per_step, "flops": line.run.flops_per_step}
        columns = {"step": curve.steps, "value": curve.values}
        columns |= {"seconds": curve.seconds, "low": curve.low, "high": curve.high}
        rows.append(about | columns)
    return rows


def panel(quantity: Quantity, colours: alt.Color) -> alt.LayerChart:
    """The values of each run, before the band from the least to the greatest of each bucket."""
    scale = alt.Scale(type="log", nice=False) if quantity.logarithmic else alt.Scale(zero=False)
    ticks = alt.ExprRef("ceil(width / 90)")
    axis = alt.Axis(title=None, labelExpr=PLACE_WORDS, labelOverlap=True, tickCount=ticks)
    base = (
        alt.Chart(alt.NamedData(name=DATA))
        .transform_filter(f"datum.quantity == '{quantity.name}'")
        .transform_flatten(["step", "seconds", "value", "low", "high"])
        .transform_calculate(place=PLACE)
        .transform_filter(alt.param(name="shown"))
        .encode(x=alt.X("place:Q", axis=axis, scale=alt.Scale(zero=False, nice=False)), color=colours)
    )
    band = base.mark_area(opacity=0.2, clip=True, aria=False).encode(
        y=alt.Y("low:Q", title=quantity.unit, scale=scale), y2="high:Q"
    )
    dashes = alt.Scale(domain=[0, 1], range=[SOLID, DASH])
    points = alt.OverlayMarkDef(size=40, opacity=1 if quantity.exact else 0, strokeDash=SOLID)
    line = base.mark_line(point=points, strokeWidth=2, clip=True, aria=False).encode(
        y=alt.Y("value:Q", title=quantity.unit, scale=scale),
        strokeDash=alt.StrokeDash("side:O", legend=None, scale=dashes),
        tooltip=[
            alt.Tooltip("name:N", title="run"),  # Vega lets no expression read a "run"
            alt.Tooltip("step:Q", format=","),
            alt.Tooltip("seconds:Q", format=",.1f"),
            alt.Tooltip("value:Q", title=quantity.unit, format=".5~g"),
        ],
    )
    return alt.layer(band, line).properties(width=WIDTH, height=HEIGHT, title=quantity.title)


def draw(lines: list[Line], data: list[dict]) -> dict:
    """The chart in Vega-Lite."""
    columns = alt.ExprRef("max(1, floor(width / 210))")
    legend = alt.Legend(title=None, orient="top", columns=columns, labelLimit=180)
    scale = alt.Scale(domain=[line.label for line in lines], range=[line.colour for line in lines])
    colours = alt.Color("name:N", scale=scale, legend=legend)
    axes = axes_of([line.run for line in lines])
    switch = alt.binding_radio(options=[*axes], labels=[*axes.values()], name="horizontal axis: ")
    shown = alt.selection_point(name="shown", fields=["name"], bind="legend", toggle="true")
    zoom = alt.selection_interval(name="zoom", encodings=["x"], bind="scales", zoom=ZOOM)
    panels = alt.vconcat(*(panel(quantity, colours) for quantity in QUANTITIES)).resolve_scale(x="shared")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that panels share their parameters
        chart = panels.add_params(alt.param(name="axis", value="steps", bind=switch), shown, zoom)
        return {**finished(chart), "datasets": {DATA: data}}


# --- tables -----------------------------------------------------------------------------------------------


def reading(line: Line, curve: Curve, step: int, exact: bool) -> str:
    """What a curve says of a step: the value there or, if not `exact`, the nearest one."""
    if step > line.run.steps:
        return "ended"
    if not curve.steps or (exact and step not in curve.steps):
        return ""
    nearest = min(range(len(curve.steps)), key=lambda at: abs(curve.steps[at] - step))
    value = curve.values[nearest]
    return "not finite" if value is None else f"{value:.5g}"


def table_of(lines: list[Line], quantity: Quantity, curves: list[Curve]) -> NumberTable:
    """A panel's numbers: at every validation, else at ROWS steps."""
    if quantity.exact:
        steps = {step for curve in curves for step in curve.steps}
    else:
        longest = max(line.run.steps for line in lines)
        steps = {*np.linspace(1, longest, ROWS).round().astype(int).tolist()}
    read = partial(reading, exact=quantity.exact)
    rows = [[f"{step:,}", *map(partial(read, step=step), lines, curves)] for step in sorted(steps)]
    return NumberTable(quantity.title, ["step", *(line.label for line in lines)], rows)


def curves_of(sides: list[tuple[str, list[Metrics]]]) -> Curves:
    """The chart and the tables of the runs of all sides, each a title and its runs."""
    lines = lines_of(sides)
    most = max(50, min(BUCKETS, ALL_BUCKETS // max(1, len(lines))))
    data, tables = [], []
    for quantity in QUANTITIES:
        curves = [quantity.curve(line.run, most) for line in lines]
        data += data_of(lines, quantity, curves)
        tables.append(table_of(lines, quantity, curves))
    return Curves(draw(lines, data), tables)


def stall_rows(runs: list[Metrics]) -> list[list[str]]:
    """Each stall's run, step and seconds."""
    stalls = [stall for run in runs for stall in run.stalled]
    return [[one["run"], f"{one['step']:,}", f"{one['seconds']:.1f} s"] for one in stalls]
