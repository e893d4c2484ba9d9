"""The pictures of the READMEs, from what is committed: the ladder, two curves and the scaling fit."""

import json
import math
import statistics
from dataclasses import dataclass

import altair as alt
import numpy as np

from data.command import DataError
from data.files import read_json, sha256
from records.archive.metrics import Metrics, find_runs
from records.archive.tracks import NOTHING, ReferenceCompressor, Track, read_reference_compressors
from records.board.entries import Entry, best_and_path, load_entries
from records.board.ladder import draw_ladder, points
from records.board.look import MANY, OTHER, PICTURE, finished

FIT = "campaigns/scaling.json"  # written by records sweep --scaling
BASELINE = "Par"  # what every record has to beat
SIZE = {"width": 620, "height": 260}  # pixels
POINTS = 150  # of a curve's means
FLOPS = "datum.value ? format(datum.value, '~e') : '0'"


@dataclass(frozen=True)
class Picture:
    """A chart in Vega-Lite, and its title for whoever does not see it."""

    title: str
    spec: dict

    @property
    def digest(self) -> str:
        return sha256(json.dumps(self.spec, sort_keys=True).encode())

    def svg(self) -> bytes:
        """With the digest of what it was drawn from."""
        import vl_convert  # which --check need not load

        start, tag, rest = vl_convert.vegalite_to_svg(self.spec).partition(">")
        return f"{start}{tag}<title>{self.title}</title><metadata>{self.digest}</metadata>{rest}\n".encode()


def pictures(track: Track) -> dict[str, Picture]:
    """By file name. Raises DataError of a track without records."""
    entries = load_entries(track)
    if not entries:
        raise DataError(f"{track.folder}: holds no record to draw")
    title = "Bits per byte of the floppy track's records and of compressors"
    drawn = {"ladder.svg": Picture(title, ladder_of_best(entries, read_reference_compressors(track)))}
    title = "Train loss of the baseline and of the best record"
    drawn["curves.svg"] = Picture(title, two_curves(entries))
    if (path := track.folder.parent / FIT).exists():
        title = "Bits per byte over operations of training, with a line for each variant of a campaign"
        drawn["law.svg"] = Picture(title, scaling_fit(read_json(path)))
    return drawn


def ladder_of_best(entries: list[Entry], compressors: list[ReferenceCompressor]) -> dict:
    """The best records and the path to them, and compressors that saw nothing before."""
    drawn = [entry for entry in entries if entry.kind not in ("small", "disputed")]
    alone = [one for one in compressors if one.after == NOTHING]
    return draw_ladder(points(best_and_path(drawn, entries)), alone, PICTURE, **SIZE)


def two_curves(entries: list[Entry]) -> dict:
    """Train loss over operations, of the baseline and of the best record; seeds of one in one colour."""
    best = next((one for one in entries if one.kind == "records"), entries[0])
    baseline = next((one for one in entries if one.short_name == BASELINE), best)
    rows = []
    for entry in {one.name: one for one in (baseline, best)}.values():
        for run in find_runs(entry.record.path):
            rows.append({"name": entry.short_name, "seed": run.seed, **means_of(run)})
    axis = alt.Axis(labelExpr=FLOPS, tickCount=5, grid=False)
    chart = (
        alt.Chart(alt.NamedData(name="curves"))
        .transform_flatten(["flops", "loss"])
        .mark_line(strokeWidth=1.5, opacity=0.8)
        .encode(
            x=alt.X("flops:Q", title="operations of training", axis=axis),
            y=alt.Y("loss:Q", title="train loss, bits per byte", scale=alt.Scale(zero=False)),
            color=colours_of([row["name"] for row in rows], [OTHER, PICTURE.mark]),
            detail="seed:N",
        )
    )
    return {**finished(chart.properties(**SIZE), PICTURE), "datasets": {"curves": rows}}


def means_of(run: Metrics) -> dict[str, list[float]]:
    """Operations and losses of a run.

    A token is worth as many bytes as in the validation text: nats of other tokenizers could not be compared.
    """
    worth = run.logged("val_bpb") / run.logged("val_loss")
    values = {"flops": run.table["train_flops"], "loss": run.table["train_loss"] * worth}
    parts = np.array_split(np.arange(run.steps), POINTS)
    return {name: [float(f"{each[part].mean():.4g}") for part in parts] for name, each in values.items()}


def colours_of(names: list[str], colours: list[str]) -> alt.Color:
    names = [*dict.fromkeys(names)]
    legend = alt.Legend(title=None, orient="top-right", symbolStrokeWidth=2)
    return alt.Color("name:N", scale=alt.Scale(domain=names, range=colours[: len(names)]), legend=legend)


def scaling_fit(found: dict) -> dict:
    """Scores over operations, both in logarithms: a point for each mean, a line for each variant."""
    rows: dict[str, list[dict]] = {"means": [], "line": []}
    for name, variant in found["arms"].items():
        flops = [float(budget) * found["flops"] for budget in variant["scores"]]
        for at, scores in zip(flops, variant["scores"].values()):
            rows["means"].append(
                {"name": name, "flops": at, "bpb": round(statistics.mean(scores.values()), 4)}
            )
        if fall := variant["fall"]:
            for at in (flops[0], flops[-1]):
                bpb = fall["bpb"] * math.exp(fall["slope"] * math.log10(at / found["flops"]))
                rows["line"].append({"name": name, "flops": at, "bpb": round(bpb, 4)})
    scale = alt.Scale(type="log", nice=False, padding=12)
    ticks = alt.Axis(format="~e", tickCount=3, grid=False)
    base = alt.Chart().encode(
        x=alt.X("flops:Q", title="operations of training", scale=scale, axis=ticks),
        y=alt.Y("bpb:Q", title="bits per byte", scale=scale, axis=alt.Axis(format=".1f")),
        color=colours_of([*found["arms"]], MANY),
    )
    lines = base.mark_line(strokeWidth=1.5, opacity=0.8).properties(data=alt.NamedData(name="line"))
    dots = base.mark_point(filled=True, size=45, opacity=1).properties(data=alt.NamedData(name="means"))
    return {**finished(alt.layer(lines, dots).properties(**SIZE), PICTURE), "datasets": rows}
