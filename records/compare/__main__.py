"""What changed between runs: numbers side by side, and which differences are more than noise.

    python -m records.compare logs/A1 logs/A2 logs/A3 -- logs/B1 logs/B2 logs/B3
    python -m records.compare records/track_floppy/2026-11-22_Par -- logs/mine --html page.html

BASE and NEW are folders of runs, metrics.jsonl files, or records, which stand for all their seeds. Exit code
1: something got worse by more than noise. records/compare/noise.py has the formula of the noise.
"""

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from data.command import Parser, UsageError, open_streams, printable, run
from data.files import write_whole
from records.archive.metrics import Metrics, find_runs
from records.archive.record import OF_ONE_RUN
from records.compare.noise import BETTER, OTHER, UNKNOWN, WORSE, Difference, Row, compare
from records.compare.rows import rows

HASH = re.compile("([0-9a-f]{16})[0-9a-f]{48}")  # people tell them apart by the first part
BETWEEN = "--"  # BASE and NEW
VISIBLE = 0.01  # a part of the loss by which two curves lie apart for whoever looks
COLOURS = {BETTER: "\033[32m", WORSE: "\033[31m", OTHER: "\033[1m"}
GREY, PLAIN = "\033[90m", "\033[0m"


# --- a comparison -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Two sides and what can be said of them."""

    base: list[Metrics]
    new: list[Metrics]

    @property
    def runs(self) -> list[Metrics]:
        return [*self.base, *self.new]

    @cached_property
    def rows(self) -> list[Difference]:
        return [compare(row, self.base, self.new) for row in rows(self.runs)]

    @property
    def worse(self) -> list[Difference]:
        return [found for found in self.rows if found.verdict == WORSE]

    @property
    def whole(self) -> bool:
        """Whether all settings of all runs are known. Records have no config.json, only what was given."""
        return all(run.settings for run in self.runs)

    @property
    def settings_title(self) -> str:
        return "settings" if self.whole else "given settings (the others are the script's own)"

    @property
    def settings(self) -> list[list[str]]:
        """[name, values of base, values of new] of the settings that differ.

        All settings where every run has its config.json, else those that were given.
        """
        told = [[run.settings if self.whole else run.given for run in side] for side in (self.base, self.new)]
        return differing(*told, leave=OF_ONE_RUN)

    @property
    def environment(self) -> list[list[str]]:
        """The same of the machine, the script and the data."""
        found = differing(*([run.environment for run in side] for side in (self.base, self.new)))
        return [[name, *(HASH.sub(r"\1", side) for side in sides)] for name, *sides in found]

    @property
    def stalls(self) -> list[dict]:
        """Each with the run, the step and its seconds."""
        return [stall for run in self.runs for stall in run.stalled]

    @property
    def partings(self) -> list[dict]:
        """Of each seed that both sides have: the steps where the train losses part, or None."""
        found = []
        for one in self.base:
            for other in self.new:
                if one.seed is not None and one.seed == other.seed:
                    found.append(
                        {"seed": one.seed, "base": one.name, "new": other.name, **parting(one, other)}
                    )
        return found

    def value(self) -> dict:
        """For programs."""
        return {
            "base": [describe(run) for run in self.base],
            "new": [describe(run) for run in self.new],
            "settings": self.settings,
            "environment": self.environment,
            "rows": [row_value(found) for found in self.rows],
            "stalls": self.stalls,
            "partings": self.partings,
            "worse": [found.row.key for found in self.worse],
        }


def load(base: list[Path], new: list[Path], living: bool = False) -> Comparison:
    """The runs that the paths name. Raises DataError, UsageError."""
    sides = [[run for path in side for run in find_runs(path, living)] for side in (base, new)]
    for side in sides:
        (path, times), *_ = Counter(run.path.resolve() for run in side).most_common(1)
        if times > 1:
            raise UsageError(f"{path}: is named twice on one side, expected repeats of a run")
    names = Counter(run.name for side in sides for run in side)
    alike = [home(run).parent for side in sides for run in side if names[run.name] > 1]
    above = os.path.commonpath(alike) if alike else ""

    def named(run: Metrics) -> Metrics:
        """Runs of one name are called by their paths from where these part."""
        return replace(run, name=os.path.relpath(home(run), above)) if names[run.name] > 1 else run

    return Comparison(*([named(run) for run in side] for side in sides))


def home(run: Metrics) -> Path:
    """The run's folder; of a record's run, and of metrics by another name, the file."""
    path = run.path.resolve()
    return path.parent if path.name == "metrics.jsonl" else path


def differing(base: list[dict], new: list[dict], leave: tuple[str, ...] = ()) -> list[list[str]]:
    """[name, values of base, values of new] where not all runs say the same."""
    names = sorted({name for told in [*base, *new] for name in told} - set(leave))
    found = []
    for name in names:
        sides = [sorted({told.get(name, "unset") for told in side}) for side in (base, new)]
        if len({*sides[0], *sides[1]}) > 1:
            found.append([name, ", ".join(sides[0]), ", ".join(sides[1])])
    return found


def parting(one: Metrics, other: Metrics) -> dict:
    """The first step whose losses differ at all, and the first from which they differ by VISIBLE."""
    count = min(one.steps, other.steps)
    a, b = (run.table["train_loss"][:count] for run in (one, other))
    unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):  # of losses that are not finite
        near = np.isfinite(a) & np.isfinite(b) & (np.abs(a - b) <= VISIBLE * np.abs(a))
        visible = unequal & ~near
    first, seen = (int(np.argmax(marks)) + 1 if marks.any() else None for marks in (unequal, visible))
    return {"steps": count, "first": first, "visible": seen}


def describe(run: Metrics) -> dict:
    about = {"path": str(run.path), "seed": run.seed, "steps": run.steps, "state": run.state}
    return {"name": run.name, **about}


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def row_value(found: Difference) -> dict:
    row = found.row
    words = {"key": row.key, "label": row.label, "unit": row.unit, "relative": row.relative}
    sides = {
        "base": found.means[0],
        "new": found.means[1],
        "difference": found.difference,
        "band": found.band,
    }
    runs = {"base_runs": [*map(finite, found.base)], "new_runs": [*map(finite, found.new)]}
    return {
        **words,
        **{name: finite(value) for name, value in sides.items()},
        **runs,
        "verdict": found.verdict,
        "note": found.note,
    }


# --- for people -------------------------------------------------------------------------------------------


def shown(row: Row, value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else format(value, row.form)


def shown_difference(found: Difference) -> tuple[str, str]:
    """The difference and the band, in the row's unit or in per cent."""
    if found.difference is None:
        return UNKNOWN, found.note
    if found.row.relative:
        return f"{100 * found.difference:+.1f} %", f"± {100 * found.band:.1f} %"
    form = found.row.form
    difference = format(found.difference, "+" + form) if found.difference else "0"
    return difference, f"± {format(found.band, form)}" if found.band else "exact"


def cells(found: Difference) -> list[str]:
    """A row's cells: label, base, new, difference, noise, verdict."""
    row = found.row
    label = f"{row.label}, {row.unit}" if row.unit else row.label
    return [label, *(shown(row, value) for value in found.means), *shown_difference(found), found.verdict]


HEAD = ["", "base", "new", "difference", "noise", "verdict"]


def aligned(lines: list[list[str]]) -> list[str]:
    """Lines of cells in columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        )
        for line in lines
    ]


def coloured(line: str, verdict: str) -> str:
    return f"{COLOURS.get(verdict, GREY)}{line}{PLAIN}"


def parting_line(found: dict) -> str:
    who = f"seed {found['seed']}, {found['base']} and {found['new']}"
    if found["first"] is None:
        return f"{who}: the losses are the same to the last bit over {found['steps']} steps"
    seen = (
        f"by 1 % from step {found['visible']}"
        if found["visible"]
        else f"never by 1 % in {found['steps']} steps"
    )
    return f"{who}: the losses part at step {found['first']}, {seen}"


def before_the_table(its: Comparison) -> Iterator[str]:
    for side, runs in (("base", its.base), ("new", its.new)):
        names = ", ".join(one.name for one in runs)
        yield f"{side}: {len(runs)} run{'s' * (len(runs) > 1)}: {names}"
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
    yield f"worse by more than noise: {', '.join(found.row.label for found in its.worse) or 'nothing'}"


def text(its: Comparison, colour: bool) -> Iterator[str]:
    """All of it, a line at a time."""
    yield from map(printable, before_the_table(its))
    head, *lines = aligned([HEAD, *map(cells, its.rows)])
    yield head
    for line, found in zip(lines, its.rows):
        yield coloured(line, found.verdict) if colour else line
    yield from map(printable, behind_the_table(its))


# --- command line -----------------------------------------------------------------------------------------


@np.errstate(all="ignore")  # losses may be as large as they like
def work(args: argparse.Namespace) -> int:
    at = args.runs.index(BETWEEN) if BETWEEN in args.runs else 0
    if not 0 < at < len(args.runs) - 1:
        raise UsageError("BASE and NEW expected, with -- between them: records.compare logs/A -- logs/B")
    sides = [[*map(Path, names)] for names in (args.runs[:at], args.runs[at + 1 :])]
    its = load(*sides, args.unfinished)
    if args.html:
        from records.compare.page import comparison_page, encoded

        write_whole(args.html, encoded(comparison_page(its, cells, parting_line)))
    if args.json:
        print(json.dumps(its.value(), indent=1))
    else:
        print("\n".join(text(its, sys.stdout.isatty())))
    return 1 if its.worse else 0


class Words(Parser):
    """A parser that keeps the word -- where it stands."""

    def parse_args(self, args: list[str] | None = None, namespace=None):
        words = [
            f"\0{BETWEEN}" if word == BETWEEN else word for word in (sys.argv[1:] if args is None else args)
        ]
        found = self.parse_intermixed_args(words, namespace)
        found.runs = [name.removeprefix("\0") for name in found.runs]
        return found


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Words(
        prog="python -m records.compare",
        description=__doc__.splitlines()[0],
        epilog="exit codes: 0 nothing got worse, 1 something did by more than noise, 2 usage, 3 bad logs",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="BASE... -- NEW...", help="runs' folders, metrics.jsonl files or records")
    add("--json", action="store_true", help="print one JSON object")
    add("--html", type=Path, metavar="FILE", help="write a page, too: one file that needs no network")
    add("--unfinished", action="store_true", help="take runs that have not ended")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    open_streams()
    args = parse_args(argv)
    return run(lambda: work(args), "compare again")


if __name__ == "__main__":
    sys.exit(main())
