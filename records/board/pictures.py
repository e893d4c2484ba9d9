"""The pictures of the README, from what is committed: the ladder, two curves of loss, and the law."""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import altair as alt
import numpy as np

from data.command import DataError
from data.files import read_json, sha256
from records.archive.metrics import find_runs
from records.archive.tracks import NOTHING, Track, Yardstick, read_yardsticks
from records.board.entries import Entry, best_and_path, load_entries
from records.board.ladder import (
    RECORDS,
    data_of,
    interval_layers,
    limits,
    line_of,
    point_layer,
    rule_layer,
    together,
    value,
)
from records.board.look import MANY, PICTURE, finished

LAW = "campaigns/scaling.json"  # written by records sweep --law
PAR = "Par"  # what every record has to beat
WIDTH, HEIGHT = 620, 260  # pixels
POINTS = 150  # of a curve's means
CLEAR = 0.7  # lines of text between the middle of a score's digits and a rule
PLACES = (0.9, -0.9, 0.0)  # of a score's digits, in lines of text above its point


def ladder_data(entries: list[Entry], rules: list[Yardstick]) -> dict:
    """The best records and the path to them in order of date, and compressors that saw nothing before."""
    drawn = [entry for entry in entries if entry.kind not in ("small", "disputed")]
    shown = sorted(best_and_path(drawn, entries), key=lambda one: one.name)
    rows = [[one.short_name, one.mean, one.half or 0.0, one.kind == "records"] for one in shown]
    return {
        "records": rows,
        "rules": [[row.name, row.bits_per_byte] for row in rules if row.after == NOTHING],
    }


def curves_data(entries: list[Entry]) -> dict:
    """Loss over operations of par and of the best record: [operations, bits per byte] of each seed's means.

    A token is worth as many bytes as in the validation text: nats of other tokenizers could not be compared.
    """
    best = [*(one for one in entries if one.kind == "records"), *entries][0]
    par = [one for one in entries if one.short_name == PAR] or [best]
    chosen = {one.short_name: one for one in (par[0], best)}
    curves = {}
    for name, entry in chosen.items():
        curves[name] = []
        for one in find_runs(entry.record.path):
            parts = np.array_split(np.arange(one.steps), POINTS)
            flops, losses = (one.table[key] for key in ("train_flops", "train_loss"))
            losses = losses * (one.logged("val_bpb") / one.logged("val_loss"))
            means = [[float(f"{values[part].mean():.4g}") for part in parts] for values in (flops, losses)]
            curves[name].append(means)
    return curves


def free_place(mean: float, rules: list[float], line: float) -> float:
    """Where a score's digits stand: the first of PLACES, in lines from it, that no rule runs through."""
    room = lambda place: min([CLEAR, *(abs(mean + place * line - bpb) / line for bpb in rules)])
    return mean + line * max(PLACES, key=room)


def draw_ladder(data: dict) -> dict:
    """Records in order of date from left to right, with their intervals."""
    rules = data["rules"]
    domain = limits([bpb for _, bpb in rules] + [mean for _, mean, _, _ in data["records"]])
    line = line_of(domain, HEIGHT)
    shown = [
        {
            "name": name,
            "mean": mean,
            "low": mean - half,
            "high": mean + half,
            "counts": counts,
            "digits": f"{mean:.4f}",
            "digits_at": free_place(mean, [bpb for _, bpb in rules], line),
        }
        for name, mean, half, counts in data["records"]
    ]
    axis = alt.Axis(labelAngle=-25, grid=False, title=None, labelLimit=200)
    x = alt.X("name:N", sort=None, axis=axis)
    digits = (
        alt.Chart(alt.NamedData(name=RECORDS))
        .mark_text(align="left", baseline="middle", dx=8, fontSize=11, color=PICTURE.mark)
        .encode(x=x, y=value("digits_at", domain), text="digits:N")
    )
    layers = [
        *([rule_layer(rules, domain, PICTURE, HEIGHT)] if rules else []),
        *interval_layers(x, domain, PICTURE),
        point_layer(x, domain, PICTURE),
        digits,
    ]
    chart = together(layers, width=WIDTH, height=HEIGHT)
    return {**finished(chart, PICTURE, "sans-serif"), "datasets": data_of(shown, rules)}


def draw_curves(data: dict) -> dict:
    """Train loss over operations; of each record its seeds in one colour."""
    names = [*data]
    rows = [
        {"name": name, "seed": seed, "flops": flops, "loss": loss}
        for name, seeds in data.items()
        for seed, (flops, loss) in enumerate(seeds)
    ]
    colours = alt.Scale(domain=names, range=[PICTURE.other, PICTURE.mark][: len(names)])
    legend = alt.Legend(
        title=None, orient="top-right", labelColor=PICTURE.quiet, labelFontSize=12, symbolStrokeWidth=2
    )
    words = "datum.value ? format(datum.value, '~e') : '0'"
    operations = alt.Axis(labelExpr=words, tickCount=5, grid=False)
    chart = (
        alt.Chart(alt.NamedData(name=RECORDS))
        .transform_flatten(["flops", "loss"])
        .mark_line(strokeWidth=1.5, opacity=0.8)
        .encode(
            x=alt.X("flops:Q", title="operations of training", axis=operations),
            y=alt.Y("loss:Q", title="train loss, bits per byte", scale=alt.Scale(zero=False)),
            color=alt.Color("name:N", scale=colours, legend=legend),
            detail="seed:N",
        )
        .properties(width=WIDTH, height=HEIGHT)
    )
    return {**finished(alt.layer(chart), PICTURE, "sans-serif"), "datasets": {RECORDS: rows}}


def law_data(law: dict) -> dict:
    """Of each arm the means, [operations, bits per byte], and the ends of its line."""
    shown = {}
    for name, arm in law["arms"].items():
        means = [
            [float(budget) * law["flops"], float(f"{statistics.mean(scores.values()):.4f}")]
            for budget, scores in arm["scores"].items()
        ]
        ends = []
        if fall := arm["fall"]:
            for flops, _ in (means[0], means[-1]):
                at = fall["bpb"] * math.exp(fall["slope"] * math.log10(flops / law["flops"]))
                ends.append([flops, float(f"{at:.4f}")])
        shown[name] = {"means": means, "line": ends}
    return shown


def draw_law(data: dict) -> dict:
    """Scores over operations, both in logarithms: a point for each mean, a line for each arm."""
    names = [*data]
    rows = {
        kind: [
            {"name": name, "flops": flops, "bpb": bpb}
            for name, arm in data.items()
            for flops, bpb in arm[kind]
        ]
        for kind in ("means", "line")
    }
    colours = alt.Scale(domain=names, range=[*MANY])
    legend = alt.Legend(title=None, orient="top-right", labelColor=PICTURE.quiet, labelFontSize=12)
    operations = alt.Axis(format="~e", tickCount=3, grid=False)
    low, high = (pick(row["bpb"] for row in rows["means"]) for pick in (min, max))
    bits = alt.Scale(type="log", domain=[low / 1.05, high * 1.05])
    places = {
        "x": alt.X("flops:Q", title="operations of training", scale=alt.Scale(type="log"), axis=operations),
        "y": alt.Y("bpb:Q", title="bits per byte", scale=bits, axis=alt.Axis(format=".1f")),
        "color": alt.Color("name:N", scale=colours, legend=legend),
    }
    layers = [
        alt.Chart(alt.NamedData(name="line")).mark_line(strokeWidth=1.5, opacity=0.8).encode(**places),
        alt.Chart(alt.NamedData(name="means")).mark_point(filled=True, size=45, opacity=1).encode(**places),
    ]
    chart = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
    return {**finished(chart, PICTURE, "sans-serif"), "datasets": rows}


@dataclass(frozen=True)
class Picture:
    """What is drawn, and how."""

    title: str
    data: dict
    draw: Callable[[dict], dict]  # data to Vega-Lite

    @property
    def digest(self) -> str:
        return sha256(json.dumps(self.data, sort_keys=True).encode())

    def svg(self) -> bytes:
        """With the title for whoever does not see it, and the digest of the data."""
        import vl_convert  # which --check need not load

        start, tag, rest = vl_convert.vegalite_to_svg(self.draw(self.data)).partition(">")
        return f"{start}{tag}<title>{self.title}</title><metadata>{self.digest}</metadata>{rest}\n".encode()


def pictures(track: Track) -> dict[str, Picture]:
    """By file name. Raises DataError of a track without records."""
    entries = load_entries(track)
    if not entries:
        raise DataError(f"{track.folder}: holds no record to draw")
    ladder = ladder_data(entries, read_yardsticks(track))
    drawn = {
        "ladder.svg": Picture(
            "Bits per byte of the floppy track's records and of compressors", ladder, draw_ladder
        ),
        "curves.svg": Picture("Train loss of par and of the best record", curves_data(entries), draw_curves),
    }
    if (path := track.folder.parent / LAW).exists():
        title = "Bits per byte over operations of training, with a line for each arm of a campaign"
        drawn["law.svg"] = Picture(title, law_data(read_json(path)), draw_law)
    return drawn
