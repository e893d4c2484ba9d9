"""What changed between runs: numbers side by side, and which differences are more than noise.

    python -m records compare --base logs/A1 logs/A2 logs/A3 --new logs/B1 logs/B2 logs/B3
    python -m records compare --base records/track_floppy/2026-11-22_Par --new logs/mine --html page.html

Each side names folders of runs, metrics.jsonl files, or records and variants of a campaign, which stand for
all their seeds. One measure decides the exit code, bits per byte unless --on names another: 0 better or the
same, 1 worse, 2 usage, 3 bad logs, 4 not known. records/compare/README.md has the rules.
"""

import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from tabulate import tabulate

from data.command import printable
from data.door import Command
from data.files import write_whole
from records.archive.intervals import FIRST
from records.archive.metrics import Metrics
from records.compare.bands import BETTER, NONE, OTHER, SAME, UNKNOWN, WORSE, Difference
from records.compare.comparison import Comparison, load

SIDES = ("--base", "--new")
CODES = {BETTER: 0, SAME: 0, WORSE: 1}  # exit codes; with any other verdict it is not known
NOT_KNOWN = 4
HEAD = ["", "base", "new", "difference", "which lies in", "verdict"]
COLOURS = {BETTER: "green", WORSE: "red"}


# --- for people -------------------------------------------------------------------------------------------


def cells(found: Difference) -> list[str]:
    """A line of the table by HEAD: the difference and its interval in the measure's unit or in per cent."""
    its = found.measure
    label = f"{its.label}, {its.unit}" if its.unit else its.label
    means = [NONE if mean is None else format(mean, its.form) for mean in found.means]
    if found.difference is None:
        return [label, *means, NONE, found.note, found.verdict]
    form, factor, unit = ("+.1f", 100.0, " %") if its.relative else ("+" + its.form, 1.0, "")
    ends = (found.difference, found.low, found.high)
    difference, low, high = (f"{factor * end:{form}}{unit}" for end in ends)
    interval = "exact" if found.low == found.high else f"{low} to {high}"
    if found.note or math.isinf(found.low):
        interval = found.note
    return [label, *means, difference if found.difference else "0", interval, found.verdict]


def table(rows: list[Difference], colour: bool) -> Iterator[str]:
    """The lines of the table, the head first. Noise is grey."""
    aligned = ["left"] + ["right"] * (len(HEAD) - 1)
    text = tabulate(map(cells, rows), HEAD, "plain", disable_numparse=True, colalign=aligned)
    head, *lines = text.split("\n")
    yield head
    for line, found in zip(lines, rows):
        style = {"fg": COLOURS.get(found.verdict, "bright_black")}
        if found.verdict == OTHER:
            style = {"bold": True}
        yield click.style(line, **style) if colour else line


def before_the_table(its: Comparison) -> Iterator[str]:
    """The runs, and what differs before their start."""
    for side, runs in (("base", its.base), ("new", its.new)):
        names = ", ".join(one.name for one in runs)
        yield f"{side}: {len(runs)} run{'s' if len(runs) > 1 else ''}: {names}"
    for one in its.runs:
        if not one.final:
            yield f"{one.name} {one.state}"
    settings = "settings" if its.whole else "given settings (the others are the script's own)"
    for title, lines in ((settings, its.settings), ("environment", its.environment)):
        yield ""
        yield f"{title}, what differs:" if lines else f"{title}: the same"
        yield from (f"  {name}: {base} | {new}" for name, base, new in lines)


def behind_the_table(its: Comparison) -> Iterator[str]:
    """Stalls, and where losses part."""
    yield f"stalls, which no speed counts: {len(its.stalls) or 'none'}"
    yield from (f"  {one['run']}: step {one['step']} took {one['seconds']:.1f} s" for one in its.stalls)
    if not its.partings:
        yield "no seed is on both sides: losses are not held step by step"
    for one in its.partings:
        words = f"the losses are the same to the last bit over {one['steps']} steps"
        if one["first"]:
            words = f"the losses part at step {one['first']} of {one['steps']}"
        yield f"seed {one['seed']}, {one['base']} and {one['new']}: {words}"


def advice(found: Difference) -> Iterator[str]:
    """Why there is no verdict, and what to run where there are too few seeds for an interval."""
    if found.verdict == NONE:
        yield f"no verdict: {found.note}"
    elif found.verdict == UNKNOWN and found.low == -math.inf:
        yield f"no interval: it takes {FIRST} seeds on each side, or {FIRST} seeds that both sides have"
        yield "  SEED=N RUN_ID=NAME and the run's own settings before python train_gpt.py train another one"
        yield "  python -m records sweep --try trains such pairs of train_gpt.py and HEAD's"
    elif found.verdict == UNKNOWN:
        yield f"not known: {found.note or 'zero is inside of an interval that is wider than the noise'}"


def verdict_line(found: Difference) -> str:
    numbers = {"difference": found.difference, "low": found.low, "high": found.high}
    words = [f"{name}:{NONE if number is None else f'{number:+.4g}'}" for name, number in numbers.items()]
    return f"{found.measure.key}: {found.verdict} {' '.join(words)}"


def text(its: Comparison, colour: bool) -> Iterator[str]:
    """All of it, a line at a time."""
    yield from map(printable, before_the_table(its))
    yield ""
    yield from table(its.rows, colour)
    yield ""
    yield from map(printable, behind_the_table(its))
    yield from advice(its.decisive)
    yield verdict_line(its.decisive)


def page(its: Comparison) -> bytes:
    """The same and curves, as one HTML document."""
    # charts, which a table need not load
    from records.board.curves import draw_curves
    from records.board.documents import render

    return render(
        "comparison.html",
        {"curves": draw_curves([("base", its.base), ("new", its.new)])},
        its=its,
        before="\n".join(map(printable, before_the_table(its))),
        behind="\n".join(map(printable, behind_the_table(its))),
        verdict=verdict_line(its.decisive),
        head=HEAD,
        rows=[cells(found) for found in its.rows],
        classes=[found.verdict if found.verdict in COLOURS else "quiet" for found in its.rows],
    )


# --- for programs -----------------------------------------------------------------------------------------


def value(its: Comparison) -> dict:
    parts = ("settings", "environment", "stalls", "partings", "on")
    return {
        "base": [*map(run_value, its.base)],
        "new": [*map(run_value, its.new)],
        **{name: getattr(its, name) for name in parts},
        "rows": [*map(row_value, its.rows)],
        "verdict": its.decisive.verdict,
    }


def run_value(run: Metrics) -> dict:
    about = {name: getattr(run, name) for name in ("name", "seed", "steps", "state")}
    return {**about, "path": str(run.path)}


def row_value(found: Difference) -> dict:
    base, new = found.means
    return {
        **{name: getattr(found.measure, name) for name in ("key", "label", "unit", "relative")},
        **{"base": finite(base), "new": finite(new)},
        **{name: finite(getattr(found, name)) for name in ("difference", "low", "high")},
        "base_runs": [*map(finite, found.base)],
        "new_runs": [*map(finite, found.new)],
        "verdict": found.verdict,
        "note": found.note,
    }


def finite(number: float | None) -> float | None:
    """What JSON has; null for other numbers."""
    return number if number is not None and math.isfinite(number) else None


# --- the command ------------------------------------------------------------------------------------------


class TwoSides(Command):
    """A side takes all words up to the next option, as a shell makes them of logs/mine-*."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = []
        side = None
        for word in args:
            if word.startswith("-"):
                side = word if word in SIDES else None
            if side is None:
                words.append(word)
            elif word != side:
                words += [side, word]
        return super().parse_args(ctx, words)


runs = {"multiple": True, "required": True, "type": Path, "metavar": "RUN..."}


@click.command(cls=TwoSides, help=__doc__)
@click.option("--base", **runs, help="what is compared with")
@click.option("--new", **runs, help="what is compared")
@click.option("--on", default="val_bpb", metavar="KEY", help="the measure that decides the exit code")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--html", type=Path, metavar="FILE", help="write a page, too: one file that needs no network")
@click.option("--unfinished", is_flag=True, help="take runs that have not ended")
def main(
    base: tuple[Path, ...], new: tuple[Path, ...], on: str, as_json: bool, html: Path | None, unfinished: bool
) -> int:
    # losses may be as large as they like
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        its = load(base, new, unfinished, on)
        code = CODES.get(its.decisive.verdict, NOT_KNOWN)
        if html:
            write_whole(html, page(its))
        if as_json:
            print(json.dumps(value(its), indent=1))
        else:
            print("\n".join(text(its, sys.stdout.isatty())))
    return code
