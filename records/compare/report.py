"""A comparison for people: lines for a terminal, or one HTML file that holds all that it needs."""

import math
from collections.abc import Iterator

import click
from tabulate import tabulate

from data.command import printable
from records.compare.bands import BETTER, NONE, OTHER, SAME, UNKNOWN, WORSE, Difference, Measure
from records.compare.comparison import Comparison

HEAD = ["", "base", "new", "difference", "which lies in", "verdict"]
COLOURS = {BETTER: "green", WORSE: "red"}
SIGNS = {BETTER: "▲", WORSE: "▼", SAME: "=", OTHER: "≠", UNKNOWN: "?", NONE: ""}


def shown(measure: Measure, value: float | None) -> str:
    return NONE if value is None or not math.isfinite(value) else format(value, measure.form)


def shown_difference(found: Difference) -> tuple[str, str]:
    """The difference and the interval for it, in the measure's unit or in per cent."""
    if found.difference is None:
        return NONE, found.note
    form, factor, unit = "+" + found.measure.form, 1.0, ""
    if found.measure.relative:
        form, factor, unit = "+.1f", 100.0, " %"
    difference, low, high = (
        format(factor * number, form) + unit for number in (found.difference, found.low, found.high)
    )
    if found.difference == 0:
        difference = "0"
    if found.note or math.isinf(found.low):
        return difference, found.note
    return difference, "exact" if found.low == found.high else f"{low} to {high}"


def cells(found: Difference) -> list[str]:
    """A line of the table by HEAD."""
    its = found.measure
    label = f"{its.label}, {its.unit}" if its.unit else its.label
    return [label, *(shown(its, value) for value in found.means), *shown_difference(found), found.verdict]


def table(rows: list[Difference]) -> list[str]:
    """The lines of the table, the head first."""
    sides = ["left"] + ["right"] * (len(HEAD) - 1)
    lines = [cells(found) for found in rows]
    return tabulate(lines, HEAD, "plain", disable_numparse=True, colalign=sides).split("\n")


def coloured(line: str, verdict: str) -> str:
    """Noise is grey."""
    if verdict == OTHER:
        return click.style(line, bold=True)
    return click.style(line, fg=COLOURS.get(verdict, "bright_black"))


def parting_line(found: dict) -> str:
    """From which step on the losses of two runs of one seed differ."""
    who = f"seed {found['seed']}, {found['base']} and {found['new']}"
    if found["first"] is None:
        return f"{who}: the losses are the same to the last bit over {found['steps']} steps"
    seen = f"never by 1 % in {found['steps']} steps"
    if found["visible"]:
        seen = f"by 1 % from step {found['visible']}"
    return f"{who}: the losses part at step {found['first']}, {seen}"


def before_the_table(its: Comparison) -> Iterator[str]:
    for side, runs in (("base", its.base), ("new", its.new)):
        names = ", ".join(one.name for one in runs)
        yield f"{side}: {len(runs)} run{'s' if len(runs) > 1 else ''}: {names}"
    for one in its.runs:
        if not one.final:
            yield f"{one.name} {one.state}"
    for title, lines in ((its.settings_title, its.settings), ("environment", its.environment)):
        yield ""
        yield f"{title}, what differs:" if lines else f"{title}: the same"
        yield from (f"  {name}: {base} | {new}" for name, base, new in lines)
    yield ""


def behind_the_table(its: Comparison) -> Iterator[str]:
    yield ""
    yield f"stalls, which no speed counts: {len(its.stalls) or 'none'}"
    yield from (f"  {one['run']}: step {one['step']} took {one['seconds']:.1f} s" for one in its.stalls)
    if its.partings:
        yield from map(parting_line, its.partings)
    else:
        yield "no seed is on both sides: losses are not held step by step"
    found = its.decisive
    numbers = {"difference": found.difference, "low": found.low, "high": found.high}
    words = [f"{name}:{NONE if number is None else f'{number:+.4g}'}" for name, number in numbers.items()]
    yield f"{found.measure.key}: {found.verdict} {' '.join(words)}"


def text(its: Comparison, colour: bool) -> Iterator[str]:
    """All of it, a line at a time."""
    yield from map(printable, before_the_table(its))
    head, *lines = table(its.rows)
    yield head
    for line, found in zip(lines, its.rows):
        yield coloured(line, found.verdict) if colour else line
    yield from map(printable, behind_the_table(its))


def comparison_page(its: Comparison) -> bytes:
    """The whole HTML document."""
    # charts, which a table need not load
    from records.board.curves import curves_of, stall_rows
    from records.board.documents import render

    curves = curves_of([("base", its.base), ("new", its.new)])
    return render(
        "comparison.html",
        {"curves": curves.spec},
        its=its,
        head=HEAD,
        rows=[[*cells(found)[:-1], f"{SIGNS[found.verdict]} {found.verdict}"] for found in its.rows],
        classes=[found.verdict if found.verdict in COLOURS else "quiet" for found in its.rows],
        stalls=stall_rows(its.runs),
        partings=[parting_line(found) for found in its.partings],
        curves=curves,
    )
