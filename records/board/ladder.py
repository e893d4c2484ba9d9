"""Charts of a track's records: the ladder, and bytes against bits per byte, with lines of compressors."""

import datetime
from collections import Counter

import altair as alt

from records.archive.tracks import TRAINING, Yardstick
from records.board.entries import Entry, path_to_best
from records.board.look import PAGE, Look, finished

Rule = tuple[str, float]  # a compressor and its bits per byte
LINE = 14  # pixels of a line of small text
DASHES = [4, 3]
DAY = 86_400_000  # milliseconds
HEIGHT = 360  # pixels
DAY_TICKS = 6
RECORDS, RULES, BUDGET = "records", "rules", "budget"  # names of data
MOST_NAMES = 20  # points; of more, those on the path to the best alone have their names
NAME = 75  # pixels from one name to the next
NARROW = 500  # pixels; names do not fit into less


def day_of(entries: list[Entry]) -> dict[str, float]:
    """Milliseconds since 1970 by name, as if the records of a day shared it evenly."""
    of_day = Counter(entry.date for entry in entries)
    before: Counter = Counter()
    found = {}
    for entry in sorted(entries, key=lambda one: one.name):
        start = datetime.datetime.fromisoformat(entry.date).replace(tzinfo=datetime.UTC).timestamp()
        found[entry.name] = 1000 * start + DAY * before[entry.date] / of_day[entry.date]
        before[entry.date] += 1
    return found


def apart(values: list[float], gap: float) -> list[float]:
    """The values, moved down where they lie nearer than `gap` to the one above."""
    moved: dict[int, float] = {}
    above = float("inf")
    for at in sorted(range(len(values)), key=lambda one: -values[one]):
        above = moved[at] = min(values[at], above - gap)
    return [moved[at] for at in range(len(values))]


def points(
    entries: list[Entry], kinds: dict[str, str], addresses: dict[str, str] | None = None
) -> list[dict]:
    """What the charts show of records, in the order of their names. `kinds`: words by name."""
    days = day_of(entries)
    ordered = sorted(entries, key=lambda one: one.name)
    path = {entry.name for entry in path_to_best(entries)}
    found = []
    for entry in ordered:
        mean, half = entry.record.mean, entry.half or 0.0
        found.append(
            {
                "name": entry.short_name,
                "date": entry.date,
                "day": days[entry.name],
                "bytes": entry.record.total_bytes,
                "mean": mean,
                "low": mean - half,
                "high": mean + half,
                "interval": entry.interval,
                "kind": kinds[entry.name],
                "counts": entry.kind == "records",
                "on_path": entry.name in path,
                "named": entry.name in path or len(ordered) <= MOST_NAMES,
                "href": addresses.get(entry.name, ""),
            }
        )
    return found


def named(rules: list[Yardstick]) -> list[Rule]:
    """Those that were given the training text have a + behind their names."""
    return [(rule.name + ("+" if rule.after == TRAINING else ""), rule.bits_per_byte) for rule in rules]


def limits(values: list[float]) -> list[float]:
    """Bits per byte that a chart goes from and to: intervals may be wider."""
    room = max(0.02, 0.08 * (max(values) - min(values)))
    return [min(values) - room, max(values) + room]


def line_of(domain: list[float], height: int) -> float:
    """A line of small text as bits per byte."""
    return LINE / height * (domain[1] - domain[0])


def rule_names(rules: list[Rule], near: float) -> dict[float, str]:
    """The names of the compressors by where they stand; those nearer than a line of text share one."""
    groups: list[list[tuple[float, str]]] = []
    for name, bpb in sorted(rules, key=lambda rule: -rule[1]):
        if groups and groups[-1][0][0] - bpb < near:
            groups[-1].append((bpb, name))
        else:
            groups.append([(bpb, name)])
    middles = [sum(bpb for bpb, _ in group) / len(group) for group in groups]
    words = (", ".join(name for _, name in group) for group in groups)
    return dict(zip(apart(middles, near), words))


def value(field: str, domain: list[float], axis: alt.Axis | None = None) -> alt.Y:
    """Bits per byte; of all layers one has the axis to the left, and one the axis to the right."""
    return alt.Y(f"{field}:Q", axis=axis, scale=alt.Scale(domain=domain, nice=False, zero=False))


def rule_layer(rules: list[Rule], domain: list[float], look: Look, height: int = HEIGHT) -> alt.Chart:
    """Dashed lines, and their names on an axis to the right."""
    names = rule_names(rules, line_of(domain, height))
    places = sorted(names)
    words = alt.param(name="rule_names", value=[names[place] for place in places])
    values = alt.param(name="rule_places", value=places)
    axis = alt.Axis(
        orient="right",
        values=places,
        labelExpr="rule_names[indexof(rule_places, datum.value)]",
        title=None,
        grid=False,
        ticks=False,
        domain=False,
        labelPadding=6,
        labelFontSize=11,
        labelOverlap=False,
    )
    return (
        alt.Chart(alt.NamedData(name=RULES))
        .mark_rule(color=look.quiet, strokeDash=DASHES, opacity=0.6, aria=False)
        .encode(y=value("bpb", domain, axis))
        .add_params(words, values)
    )


def interval_layers(x: alt.X, domain: list[float], look: Look) -> list[alt.Chart]:
    """Lines from the low to the high end of each interval; one that is cut off has no tick at its end."""
    base = alt.Chart(alt.NamedData(name=RECORDS)).encode(x=x)
    line = base.mark_rule(color=look.mark, strokeWidth=2, opacity=0.45, clip=True, aria=False)
    tick = base.mark_tick(
        color=look.mark, orient="horizontal", size=9, thickness=2, opacity=0.45, clip=True, aria=False
    )
    axis = alt.Axis(orient="left", title="bits per byte, lower is better")
    return [
        line.encode(y=value("low", domain, axis), y2="high:Q"),
        *(tick.encode(y=value(end, domain)) for end in ("low", "high")),
    ]


def point_layer(x: alt.X, domain: list[float], look: Look) -> alt.Chart:
    """Points: filled ones are records."""
    return (
        alt.Chart(alt.NamedData(name=RECORDS))
        .mark_point(size=110, strokeWidth=2, stroke=look.mark, opacity=1, aria=False)
        .encode(
            x=x,
            y=value("mean", domain),
            fill=alt.condition("datum.counts", alt.value(look.mark), alt.value(look.paper)),
        )
    )


def link_layer(x: alt.X, domain: list[float]) -> alt.Chart:
    """The same on a page: points lead to the records' pages, and say what they are."""
    tooltip = [
        alt.Tooltip("name:N", title="record"),
        alt.Tooltip("interval:N", title="bits per byte"),
        alt.Tooltip("bytes:Q", format=","),
        alt.Tooltip("date:N"),
        alt.Tooltip("kind:N"),
    ]
    return point_layer(x, domain, PAGE).encode(tooltip=tooltip, href="href:N")


def name_layer(x: alt.X, domain: list[float], field: str, dy: int, room: int) -> alt.Chart:
    """Names beside the points, where there is room for them. `field`: where they stand;
    `room`: pixels that the chart needs for them."""
    return (
        alt.Chart(alt.NamedData(name=RECORDS))
        .transform_filter("datum.named")
        .mark_text(
            align="left",
            baseline="middle",
            color=PAGE.ink,
            dx=9,
            dy=dy,
            fontSize=11,
            opacity=alt.ExprRef(f"width < {room} ? 0 : 1"),
            aria=False,
        )
        .encode(x=x, y=value(field, domain), text="name:N")
    )


def together(layers: list[alt.Chart], **properties) -> alt.LayerChart:
    """Layers on one scale. The names of the rules stand on an axis of their own, so axes are independent."""
    return alt.layer(*layers).resolve_axis(y="independent").properties(**properties)


def data_of(shown: list[dict], rules: list[Rule]) -> dict[str, list[dict]]:
    return {RECORDS: shown, RULES: [{"bpb": bpb} for _, bpb in rules]}


def day_axis(days: list[float]) -> alt.X:
    """A tick at midnight of at most DAY_TICKS days."""
    first, last = DAY * (min(days) // DAY), max(days)
    count = int((last - first) // DAY) + 2
    step = max(1, -(-count // DAY_TICKS))
    room = max(last - first, DAY / 2)
    axis = alt.Axis(
        values=[first + DAY * day for day in range(0, count, step)],
        labelExpr="utcFormat(datum.value, '%Y-%m-%d')",
        labelOverlap=True,
    )
    scale = alt.Scale(domain=[first - 0.06 * room, last + 0.16 * room], nice=False, zero=False)
    return alt.X("day:Q", title="day of the record", scale=scale, axis=axis)


def over_time(shown: list[dict], rules: list[Rule]) -> dict:
    """The ladder: records by day, and the line of the best so far."""
    domain = limits([one["mean"] for one in shown] + [bpb for _, bpb in rules])
    x = day_axis([one["day"] for one in shown])
    line = (
        alt.Chart(alt.NamedData(name=RECORDS))
        .transform_filter("datum.on_path")
        .mark_line(interpolate="step-after", color=PAGE.mark, strokeWidth=2, aria=False)
        .encode(x=x, y=value("mean", domain))
    )
    layers = [
        *([rule_layer(rules, domain, PAGE)] if rules else []),
        *interval_layers(x, domain, PAGE),
        line,
        link_layer(x, domain),
        name_layer(x, domain, "mean", dy=-9, room=NAME * sum(one["named"] for one in shown)),
    ]
    spec = finished(together(layers, width="container", height=HEIGHT))
    return {**spec, "datasets": data_of(shown, rules)}


def over_bytes(shown: list[dict], rules: list[Rule], budget: int) -> dict:
    """Records by their bytes, and the budget as a line."""
    domain = limits([one["mean"] for one in shown] + [bpb for _, bpb in rules])
    sizes = [one["bytes"] for one in shown]
    room = 0.04 * (max(budget, *sizes) - min(sizes))
    scale = alt.Scale(domain=[min(sizes) - room, max(budget, *sizes) + room], nice=False, zero=False)
    title = "bytes of artifact and code; the vertical line is the budget"
    x = alt.X(
        "bytes:Q",
        title=title,
        scale=scale,
        axis=alt.Axis(format=".3~s", tickCount=alt.ExprRef("ceil(width / 90)"), labelOverlap=True),
    )
    line = (
        alt.Chart(alt.NamedData(name=BUDGET))
        .mark_rule(color=PAGE.quiet, strokeWidth=2, aria=False)
        .encode(x=x)
    )
    layers = [
        *([rule_layer(rules, domain, PAGE)] if rules else []),
        line,
        *interval_layers(x, domain, PAGE),
        link_layer(x, domain),
        name_layer(x, domain, "name_at", dy=0, room=NARROW),
    ]
    names_at = apart([one["mean"] for one in shown], line_of(domain, HEIGHT))
    shown = [{**one, "name_at": name_at} for one, name_at in zip(shown, names_at)]
    data = {**data_of(shown, rules), BUDGET: [{"bytes": budget}]}
    return {**finished(together(layers, width="container", height=HEIGHT)), "datasets": data}
