"""The pictures of the READMEs, from what is committed: the ladder and the scaling fit."""

import json
import math
import statistics
from dataclasses import dataclass

import altair as alt

from data.files import read_json, sha256
from records.archive.tracks import NOTHING, ReferenceCompressor, Track, read_reference_compressors
from records.board.entries import Entry
from records.board.ladder import draw_ladder, points
from records.board.look import MANY, PICTURE, finished

FIT = "campaigns/scaling.json"  # written by records sweep --scaling
SIZE = {"width": 620, "height": 260}  # pixels


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
        import vl_convert

        start, tag, rest = vl_convert.vegalite_to_svg(self.spec).partition(">")
        return f"{start}{tag}<title>{self.title}</title><metadata>{self.digest}</metadata>{rest}\n".encode()


def pictures(track: Track, entries: list[Entry]) -> dict[str, Picture]:
    """By file name. `entries`: those of the track."""
    title = "Bits per byte of the floppy track's records and of compressors"
    drawn = {"ladder.svg": Picture(title, ladder_of(entries, read_reference_compressors(track)))}
    if (path := track.folder.parent / FIT).exists():
        title = "Bits per byte over operations of training, with a line for each variant of a campaign"
        drawn["law.svg"] = Picture(title, scaling_fit(read_json(path)))
    return drawn


def ladder_of(entries: list[Entry], compressors: list[ReferenceCompressor]) -> dict:
    """All records that nothing speaks against, and compressors that saw nothing before."""
    shown = [entry for entry in entries if entry.kind not in ("small", "disputed")]
    alone = [one for one in compressors if one.after == NOTHING]
    return draw_ladder(points(shown), alone, PICTURE, **SIZE)


def scaling_fit(found: dict) -> dict:
    """Scores over operations, both in logarithms: a point for each mean, a line for each variant."""
    rows: dict[str, list[dict]] = {"means": [], "line": []}
    for name, variant in found["arms"].items():
        flops = [float(budget) * found["flops"] for budget in variant["scores"]]
        for at, scores in zip(flops, variant["scores"].values()):
            rows["means"].append({"name": name, "flops": at, "bpb": statistics.mean(scores.values())})
        if fall := variant["fall"]:
            for at in (flops[0], flops[-1]):
                bpb = fall["bpb"] * math.exp(fall["slope"] * math.log10(at / found["flops"]))
                rows["line"].append({"name": name, "flops": at, "bpb": bpb})
    for row in rows["means"] + rows["line"]:
        row["bpb"] = round(row["bpb"], 4)
    scale = alt.Scale(type="log", nice=False, padding=12)
    ticks = alt.Axis(format="~e", tickCount=3, grid=False)
    names = [*found["arms"]]
    colours = alt.Scale(domain=names, range=MANY[: len(names)])
    legend = alt.Legend(title=None, orient="top-right", symbolStrokeWidth=2)
    base = alt.Chart().encode(
        x=alt.X("flops:Q", title="operations of training", scale=scale, axis=ticks),
        y=alt.Y("bpb:Q", title="bits per byte", scale=scale, axis=alt.Axis(format=".1f")),
        color=alt.Color("name:N", scale=colours, legend=legend),
    )
    lines = base.mark_line(strokeWidth=1.5, opacity=0.8).properties(data=alt.NamedData(name="line"))
    dots = base.mark_point(filled=True, size=45, opacity=1).properties(data=alt.NamedData(name="means"))
    return {**finished(alt.layer(lines, dots).properties(**SIZE), PICTURE), "datasets": rows}
