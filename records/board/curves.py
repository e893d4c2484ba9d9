"""Curves of runs: losses, validations, step times and learning rates, as panels of one chart.

The panels share what they show of the axis, which is one of AXES, and a legend that switches runs off and on.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import altair as alt
import numpy as np

from records.archive.metrics import Metrics
from records.board.look import DASH, SOLID, finished

BUCKETS, ALL_BUCKETS = 200, 1000  # points of a curve, and of that kind of curve in a page
WIDTH, HEIGHT = 860, 240  # pixels of a panel; embed.js knows the width of its page
AXES = {"steps": "steps", "tokens": "tokens", "seconds": "seconds of training", "flops": "operations"}
PLACE = "axis == 'seconds' ? datum.seconds : datum.step * datum[axis]"
PLACE_WORDS = "format(datum.value, axis == 'steps' || axis == 'seconds' ? ',' : '~s')"
ZOOM = "wheel![event.ctrlKey || event.metaKey]"  # a wheel alone scrolls the page
DATA = "curves"


# --- numbers ----------------------------------------------------------------------------------------------


class Series(NamedTuple):
    """Values at some steps of a run."""

    steps: np.ndarray  # int[n]
    values: np.ndarray  # float64[n]


def at_all_steps(values: np.ndarray) -> Series:
    return Series(np.arange(1, len(values) + 1), values)


def validations(run: Metrics) -> Series:
    """Those on a part of the text, where a run has such ones, else those on all of it."""
    vals = [val for val in run.vals if 0 < val["step"] <= run.steps]
    vals = [val for val in vals if val["partial"]] or vals
    steps = np.array([val["step"] for val in vals], int)
    return Series(steps, np.array([val["val_bpb"] for val in vals]))


@dataclass(frozen=True)
class Quantity:
    """One of the panels."""

    name: str
    title: str
    unit: str
    read: Callable[[Metrics], Series]
    typical: Callable = np.mean  # what the values of a bucket are drawn as
    logarithmic: bool = False
    dots: bool = False  # values are few: each is marked


QUANTITIES = [
    Quantity("loss", "Loss of training", "nats a token", lambda run: at_all_steps(run.table["train_loss"])),
    Quantity(
        "bpb", "Bits per byte of validation, before the export", "bits per byte", validations, dots=True
    ),
    Quantity(
        "time",
        "Step times and stalls",
        "ms, logarithmic",
        lambda run: at_all_steps(np.maximum(1e3 * run.seconds, 1e-3)),
        np.median,
        logarithmic=True,
    ),
    Quantity("rate", "Learning rate", "multiplier", lambda run: at_all_steps(run.table["lr_mul"])),
]


def short(values: list[float], digits: int = 5) -> list[float | None]:
    """Numbers as JSON should have them: few digits, None for those that are not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def in_buckets(run: Metrics, quantity: Quantity, most: int) -> dict[str, list]:
    """A run's values; of a long run each stands for the steps of a bucket, from the least to the greatest."""
    series = quantity.read(run)
    count = len(series.steps)
    buckets = np.array_split(np.arange(count), min(most, count)) if count else []
    steps = [int(series.steps[bucket[len(bucket) // 2]]) for bucket in buckets]
    columns = {"step": steps, "seconds": short(run.table["train_seconds"][np.array(steps, int) - 1], 6)}
    for name, of in (("value", quantity.typical), ("low", np.min), ("high", np.max)):
        columns[name] = short([of(series.values[bucket]) for bucket in buckets])
    return columns


# --- the chart --------------------------------------------------------------------------------------------


def colour(side: int, place: int, of: int) -> str:
    """Colours of a side lie near each other. Sides differ in hue, and in dashes for whoever sees no hue."""
    at = place / (of - 1) if of > 1 else 0.4
    if side:
        hue, saturation, light, dark = 350 + 42 * at, 88, 32 + 4 * at, 76 - 18 * at
    else:
        hue, saturation, light, dark = 250 - 55 * at, 75, 30 + 12 * at, 80 - 18 * at
    shades = (f"hsl({hue % 360:.0f} {saturation}% {lightness:.0f}%)" for lightness in (light, dark))
    return f"light-dark({', '.join(shades)})"


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
    dots = alt.OverlayMarkDef(size=40, opacity=1 if quantity.dots else 0, strokeDash=SOLID)
    line = base.mark_line(point=dots, strokeWidth=2, clip=True, aria=False).encode(
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


def chart_of(colours: dict[str, str], axes: list[str]) -> dict:
    """The chart without its data. `colours`: by the runs' names."""
    columns = alt.ExprRef("max(1, floor(width / 210))")
    legend = alt.Legend(title=None, orient="top", columns=columns, labelLimit=180)
    scale = alt.Scale(domain=[*colours], range=[*colours.values()])
    colour = alt.Color("name:N", scale=scale, legend=legend)
    words = [AXES[name] for name in axes]
    switch = alt.binding_radio(options=axes, labels=words, name="horizontal axis: ")
    shown = alt.selection_point(name="shown", fields=["name"], bind="legend", toggle="true")
    zoom = alt.selection_interval(name="zoom", encodings=["x"], bind="scales", zoom=ZOOM)
    panels = alt.vconcat(*(panel(quantity, colour) for quantity in QUANTITIES)).resolve_scale(x="shared")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that panels share their parameters
        chart = panels.add_params(alt.param(name="axis", value="steps", bind=switch), shown, zoom)
        return finished(chart)


def draw_curves(sides: list[tuple[str, list[Metrics]]]) -> dict:
    """The chart of the runs of all sides, each a title and its runs, in Vega-Lite."""
    runs = [run for _, side in sides for run in side]
    most = max(50, min(BUCKETS, ALL_BUCKETS // len(runs)))
    colours, data = {}, []
    for side, (title, its) in enumerate(sides):
        for place, run in enumerate(its):
            about = {"name": f"{title} {run.name}".strip(), "side": side, "steps": 1}
            about |= {"tokens": run.tokens_per_step, "flops": run.flops_per_step}
            colours[about["name"]] = colour(side, place, len(its))
            # as columns, of which the chart makes rows: a tenth of the bytes
            for quantity in QUANTITIES:
                data.append({"quantity": quantity.name, **about, **in_buckets(run, quantity, most)})
    axes = [name for name in AXES if name == "seconds" or all(row[name] for row in data)]
    return {**chart_of(colours, axes), "datasets": {DATA: data}}
