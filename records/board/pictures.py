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
from records.board.ladder import draw_ladder
from records.board.look import MANY, OTHER, PICTURE, finished

LAW = "campaigns/scaling.json"  # written by records sweep --law
PAR = "Par"  # what every record has to beat
WIDTH, HEIGHT = 620, 260  # pixels
DATA = "curves"
POINTS = 150  # of a curve's means
FLOPS = "datum.value ? format(datum.value, '~e') : '0'"
LADDER_TITLE = "Bits per byte of the floppy track's records and of compressors"
CURVES_TITLE = "Train loss of par and of the best record"
LAW_TITLE = "Bits per byte over operations of training, with a line for each arm of a campaign"


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


def picture_of_ladder(data: dict) -> dict:
    """Records in order of date from left to right, with their intervals."""
    records = [
        {"name": name, "mean": mean, "low": mean - half, "high": mean + half, "counts": counts}
        for name, mean, half, counts in data["records"]
    ]
    return draw_ladder(records, data["rules"], PICTURE, width=WIDTH, height=HEIGHT)


def picture_of_curves(data: dict) -> dict:
    """Train loss over operations; of each record its seeds in one colour."""
    rows = [
        {"name": name, "seed": seed, "flops": flops, "loss": loss}
        for name, seeds in data.items()
        for seed, (flops, loss) in enumerate(seeds)
    ]
    operations = alt.Axis(labelExpr=FLOPS, tickCount=5, grid=False)
    chart = (
        alt.Chart(alt.NamedData(name=DATA))
        .transform_flatten(["flops", "loss"])
        .mark_line(strokeWidth=1.5, opacity=0.8)
        .encode(
            x=alt.X("flops:Q", title="operations of training", axis=operations),
            y=alt.Y("loss:Q", title="train loss, bits per byte", scale=alt.Scale(zero=False)),
            color=colours_of([*data], [OTHER, PICTURE.mark]),
            detail="seed:N",
        )
    )
    return {**finished(chart.properties(width=WIDTH, height=HEIGHT), PICTURE), "datasets": {DATA: rows}}


def colours_of(names: list[str], colours: list[str]) -> alt.Color:
    legend = alt.Legend(title=None, orient="top-right", symbolStrokeWidth=2)
    return alt.Color("name:N", scale=alt.Scale(domain=names, range=colours[: len(names)]), legend=legend)


def law_data(law: dict) -> dict:
    """Of each variant the means, [operations, bits per byte], and the ends of its line."""
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


def picture_of_law(data: dict) -> dict:
    """Scores over operations, both in logarithms: a point for each mean, a line for each variant."""
    rows = {
        kind: [
            {"name": name, "flops": flops, "bpb": bpb}
            for name, variant in data.items()
            for flops, bpb in variant[kind]
        ]
        for kind in ("means", "line")
    }
    operations = alt.Axis(format="~e", tickCount=3, grid=False)
    scale = alt.Scale(type="log", nice=False, padding=12)
    base = alt.Chart().encode(
        x=alt.X("flops:Q", title="operations of training", scale=scale, axis=operations),
        y=alt.Y("bpb:Q", title="bits per byte", scale=scale, axis=alt.Axis(format=".1f")),
        color=colours_of([*data], MANY),
    )
    lines = base.mark_line(strokeWidth=1.5, opacity=0.8).properties(data=alt.NamedData(name="line"))
    points = base.mark_point(filled=True, size=45, opacity=1).properties(data=alt.NamedData(name="means"))
    chart = alt.layer(lines, points).properties(width=WIDTH, height=HEIGHT)
    return {**finished(chart, PICTURE), "datasets": rows}


# --- files ------------------------------------------------------------------------------------------------


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
        "ladder.svg": Picture(LADDER_TITLE, ladder, picture_of_ladder),
        "curves.svg": Picture(CURVES_TITLE, curves_data(entries), picture_of_curves),
    }
    if (path := track.folder.parent / LAW).exists():
        drawn["law.svg"] = Picture(LAW_TITLE, law_data(read_json(path)), picture_of_law)
    return drawn
