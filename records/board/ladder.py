"""The ladder: a track's records in the order of their dates, before dashed lines of compressors."""

import altair as alt

from records.board.look import PAGE, Look, finished

Rule = tuple[str, float]  # a compressor and its bits per byte
LINE = 14  # pixels of a line of small text
FEW = 30  # points; all of more have no room for their names
ROOM = 38  # pixels that a score's digits take
RECORDS, RULES = "records", "rules"  # names of data


def limits(values: list[float]) -> list[float]:
    """Bits per byte that a chart goes from and to: intervals may be wider."""
    room = max(0.02, 0.08 * (max(values) - min(values)))
    return [min(values) - room, max(values) + room]


def rule_rows(rules: list[Rule], near: float) -> list[dict]:
    """The lines, the highest first. Names that would lie nearer than `near` stand at the highest of them."""
    rows: list[dict] = []
    named: dict = {}
    for name, bpb in sorted(rules, key=lambda rule: -rule[1]):
        row = {"bpb": bpb, "words": ""}
        if rows and named["bpb"] - bpb < near:
            named["words"] += f", {name}"
        else:
            row["words"] = name
            named = row
        rows.append(row)
    return rows


def bits(field: str, scale: alt.Scale) -> alt.Y:
    axis = alt.Axis(grid=False, title="bits per byte, lower is better")
    return alt.Y(f"{field}:Q", axis=axis, scale=scale)


def rule_layers(scale: alt.Scale, look: Look) -> list[alt.Chart]:
    """Dashed lines with their names beside the right end."""
    base = alt.Chart(alt.NamedData(name=RULES)).encode(y=bits("bpb", scale))
    lines = base.mark_rule(color=look.quiet, strokeDash=[4, 3], opacity=0.6, aria=False)
    words = base.mark_text(align="left", dx=6, fontSize=11, color=look.quiet, aria=False)
    return [lines, words.encode(x=alt.value("width"), text="words:N")]


def interval_layer(base: alt.Chart, scale: alt.Scale, look: Look) -> alt.Chart:
    """Intervals, which the chart may cut off."""
    faint = {"color": look.mark, "opacity": 0.45}
    rule = {"size": 2, **faint}
    ticks = {"size": 9, "thickness": 2, **faint}
    bars = base.mark_errorbar(rule=rule, ticks=ticks, clip=True)
    return bars.encode(y=bits("low", scale), y2="high:Q")


def point_layer(base: alt.Chart, look: Look) -> alt.Chart:
    """Filled points are records. Those of a page say what they are, and lead to the records' pages."""
    fill = alt.condition("datum.counts", alt.value(look.mark), alt.value(look.paper))
    points = base.mark_point(
        size=110,
        strokeWidth=2,
        stroke=look.mark,
        opacity=1,
        aria=False,
    )
    points = points.encode(fill=fill)
    if look is not PAGE:
        return points
    size = alt.Tooltip("bytes:Q", format=",")
    return points.encode(tooltip=["name:N", "interval:N", size, "date:N", "kind:N"], href="href:N")


def record_layers(scale: alt.Scale, look: Look, count: int) -> list[alt.Chart]:
    """The records with their scores, as far as there is room for digits and names."""
    axis = alt.Axis(
        labelAngle=-45,
        grid=False,
        title=None,
        labelLimit=200,
        labelOverlap=count > FEW,
    )
    base = alt.Chart(alt.NamedData(name=RECORDS)).encode(x=alt.X("name:N", sort=None, axis=axis))
    means = base.encode(y=bits("mean", scale))
    seen = alt.ExprRef(f"width < {ROOM * count} ? 0 : 1")
    digits = means.mark_text(
        align="left", dx=8, dy=-11, fontSize=11, color=look.mark, opacity=seen, aria=False
    )
    digits = digits.encode(text=alt.Text("mean:Q", format=".4f"))
    return [interval_layer(base, scale, look), point_layer(means, look), digits]


def draw_ladder(records: list[dict], rules: list[Rule], look: Look, **size: int | str) -> dict:
    """The chart in Vega-Lite. `records`: name, mean, low, high and counts; on a page also what points say."""
    domain = limits([one["mean"] for one in records] + [bpb for _, bpb in rules])
    scale = alt.Scale(domain=domain, nice=False, zero=False)
    layers = rule_layers(scale, look) + record_layers(scale, look, len(records))
    chart = alt.layer(*layers).properties(**size)
    near = LINE / size["height"] * (domain[1] - domain[0])
    data = {RECORDS: records, RULES: rule_rows(rules, near)}
    return {**finished(chart, look), "datasets": data}
