"""The ladder: a track's records in the order of their dates, before dashed lines of compressors.

Pages have all of it. The README's picture has the records that nothing speaks against, and compressors that
saw nothing before the text.
"""

import json
from functools import partial

import altair as alt

from data.files import sha256
from records.archive.tracks import NOTHING, TRAINING, ReferenceCompressor
from records.board.entries import Entry
from records.board.look import PAGE, PICTURE, Look, finished

LINE = 14  # pixels of a line of small text
FEW = 30  # points; all of more have no room for their names
ROOM = 38  # pixels that a score's digits take
SLANTED = 20  # pixels that a slanted name takes
RECORDS, RULES = "records", "rules"  # names of data
SAID = ("bits per byte", "bytes", "date", "kind")  # cells of an entry that a page's points say
TITLE = "Bits per byte of the floppy track's records and of compressors"  # for whoever does not see it


def points(entries: list[Entry]) -> list[dict]:
    """What the chart shows of records, in the order of their dates."""
    found = []
    for entry in sorted(entries, key=lambda one: one.name):
        ends = {"mean": entry.mean, "low": entry.mean - entry.half, "high": entry.mean + entry.half}
        about = {name: entry.cells[name] for name in SAID}
        about |= {name: round(value, 6) for name, value in ends.items()}
        about |= {"counts": entry.kind == "records", "href": entry.address}
        found.append({"name": entry.short_name, **about})
    return found


def rule_rows(compressors: list[ReferenceCompressor], near: float) -> list[dict]:
    """The lines, the highest first. Names that would lie nearer than `near` stand at the highest of them.

    Compressors that were given the training text have a + behind their names.
    """
    rows: list[dict] = []
    named: dict = {}
    for one in sorted(compressors, key=lambda one: -one.bits_per_byte):
        name = one.name + ("+" if one.after == TRAINING else "")
        row = {"bpb": one.bits_per_byte, "words": ""}
        if rows and named["bpb"] - row["bpb"] < near:
            named["words"] += f", {name}"
        else:
            row["words"] = name
            named = row
        rows.append(row)
    return rows


def draw_ladder(
    entries: list[Entry], compressors: list[ReferenceCompressor], look: Look, **size: int | str
) -> dict:
    """The chart in Vega-Lite."""
    records = points(entries)
    values = [one["mean"] for one in records] + [one.bits_per_byte for one in compressors]
    room = max(0.02, 0.08 * (max(values) - min(values)))
    domain = [min(values) - room, max(values) + room]  # intervals may be wider, and are cut off
    near = LINE / size["height"] * (domain[1] - domain[0])
    bits = partial(
        alt.Y,
        axis=alt.Axis(grid=False, title="bits per byte, lower is better"),
        scale=alt.Scale(domain=domain, nice=False, zero=False),
    )
    layers = rule_layers(bits, look) + record_layers(bits, look, len(records))
    data = {RECORDS: records, RULES: rule_rows(compressors, near)}
    return {**finished(alt.layer(*layers).properties(**size), look), "datasets": data}


def changed_picture(old: bytes, entries: list[Entry], compressors: list[ReferenceCompressor]) -> bytes:
    """The picture as SVG; `old` where that was drawn from the same: it holds the digest of its chart."""
    shown = [entry for entry in entries if entry.kind not in ("small", "disputed")]
    if not shown:
        return old
    alone = [one for one in compressors if one.after == NOTHING]
    spec = draw_ladder(shown, alone, PICTURE, width=620, height=260)
    digest = sha256(json.dumps(spec, sort_keys=True).encode())
    if digest.encode() in old:
        return old
    import vl_convert

    start, tag, rest = vl_convert.vegalite_to_svg(spec).partition(">")
    return f"{start}{tag}<title>{TITLE}</title><metadata>{digest}</metadata>{rest}\n".encode()


def rule_layers(bits: partial, look: Look) -> list[alt.Chart]:
    """Dashed lines with their names beside the right end."""
    base = alt.Chart(alt.NamedData(name=RULES)).encode(y=bits("bpb:Q"))
    lines = base.mark_rule(color=look.quiet, strokeDash=[4, 3], opacity=0.6, aria=False)
    words = base.mark_text(align="left", dx=6, fontSize=11, color=look.quiet, aria=False)
    return [lines, words.encode(x=alt.value("width"), text="words:N")]


def record_layers(bits: partial, look: Look, count: int) -> list[alt.Chart]:
    """Intervals, points of which those of records are filled, and scores where there is room for digits."""
    angle = alt.ExprRef(f"width < {SLANTED * count} ? -90 : -45")
    axis = alt.Axis(labelAngle=angle, grid=False, title=None, labelLimit=200, labelOverlap=count > FEW)
    base = alt.Chart(alt.NamedData(name=RECORDS)).encode(x=alt.X("name:N", sort=None, axis=axis))
    faint = {"color": look.mark, "opacity": 0.45}
    rule = {"size": 2, **faint}
    ticks = {"size": 9, "thickness": 2, **faint}
    bars = base.mark_errorbar(rule=rule, ticks=ticks, clip=True)
    bars = bars.encode(y=bits("low:Q"), y2="high:Q")

    base = base.encode(y=bits("mean:Q"))
    fill = alt.condition("datum.counts", alt.value(look.mark), alt.value(look.paper))
    dots = base.mark_point(size=110, strokeWidth=2, stroke=look.mark, opacity=1, aria=False)
    dots = dots.encode(fill=fill)
    if look is PAGE:
        said = [f"{name}:N" for name in ("name", *SAID)]
        dots = dots.encode(tooltip=said, href="href:N")

    seen = alt.ExprRef(f"width < {ROOM * count} ? 0 : 1")
    place = {"align": "left", "dx": 8, "dy": -11}
    digits = base.mark_text(fontSize=11, color=look.mark, opacity=seen, aria=False, **place)
    digits = digits.encode(text=alt.Text("mean:Q", format=".4f"))
    return [bars, dots, digits]
