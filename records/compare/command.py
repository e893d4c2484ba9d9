"""What changed between runs: numbers side by side, and which differences are more than noise.

    python -m records compare --base logs/A1 logs/A2 logs/A3 --new logs/B1 logs/B2 logs/B3
    python -m records compare --base records/track_floppy/2026-11-22_Par --new logs/mine --html page.html

Each side names folders of runs, metrics.jsonl files, or records, which stand for all their seeds. One measure
decides the exit code, bits per byte unless --on names another: 0 better or the same, 1 worse, 2 usage, 3 bad
logs, 4 not known. records/compare/README.md has the rules.
"""

import json
import sys
import warnings
from pathlib import Path

import click
import numpy as np

from data.door import Command
from data.files import write_whole
from records.compare.bands import BETTER, SAME, WORSE
from records.compare.comparison import load
from records.compare.report import comparison_page, text

SIDES = ("--base", "--new")
CODES = {BETTER: 0, SAME: 0, WORSE: 1}  # exit codes; with any other verdict it is not known
NOT_KNOWN = 4


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
            write_whole(html, comparison_page(its))
        if as_json:
            print(json.dumps(its.value(), indent=1))
        else:
            print("\n".join(text(its, sys.stdout.isatty())))
    return code
