"""What changed between runs: numbers side by side, and which differences are more than noise.

    python -m records.compare --base logs/A1 logs/A2 logs/A3 --new logs/B1 logs/B2 logs/B3
    python -m records.compare --base records/track_floppy/2026-11-22_Par --new logs/mine --html page.html

Each side names folders of runs, metrics.jsonl files, or records, which stand for all their seeds. Exit code
1: something got worse by more than noise. records/compare/README.md has the rules.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

import numpy as np

from data import command
from data.command import Parser
from data.files import write_whole
from records.compare.comparison import load
from records.compare.words import text


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m records.compare",
        description=__doc__,
        epilog="exit codes: 0 nothing got worse, 1 something did by more than noise, 2 usage, 3 bad logs",
    )
    add = parser.add_argument
    runs = {"nargs": "+", "type": Path, "metavar": "RUN", "required": True}
    add("--base", **runs, help="runs' folders, metrics.jsonl files or records: what is compared with")
    add("--new", **runs, help="the same of what is compared")
    add("--json", action="store_true", help="print one JSON object")
    add("--html", type=Path, metavar="FILE", help="write a page, too: one file that needs no network")
    add("--unfinished", action="store_true", help="take runs that have not ended")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    its = load(args.base, args.new, args.unfinished)
    if args.html:
        from records.compare.page import comparison_page  # charts, which a table need not load

        write_whole(args.html, comparison_page(its))
    if args.json:
        print(json.dumps(its.value(), indent=1))
    else:
        print("\n".join(text(its, sys.stdout.isatty())))
    return 1 if its.worse else 0


def main(argv: list[str] | None = None) -> int:
    # losses may be as large as they like
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return command.main(parse_args, work, "compare again", argv)


if __name__ == "__main__":
    sys.exit(main())
