"""The board: the tables of records/README.md, from the folders and the verdicts on them, or a site of pages.

python -m records.board             write the tables
python -m records.board --check     exit 1 if they are not up to date
python -m records.board --html DIR  write the site, DIR/index.html first
"""

import argparse
import re
import sys
from pathlib import Path

from data import command
from data.command import DataError, Parser
from data.files import read_bytes, write_whole
from records.archive.tracks import RECORDS, Track, load_track, read_yardsticks
from records.board.entries import load_entries
from records.board.tables import tables, yardsticks

BOARD = r"(<!-- board -->\n).*(<!-- /board -->)"  # in the README


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.board", description=__doc__)
    add = parser.add_argument
    add("--records", type=Path, default=RECORDS, help="folder of the tracks")
    add("--check", action="store_true", help="write nothing, exit 1 if something would change")
    add("--html", type=Path, metavar="DIR", help="write a site of pages into this folder, and nothing else")
    return parser.parse_args(argv)


def write_tables(readme: Path, tracks: list[Track], check: bool) -> int:
    """The exit code: 1 if `check` found that they are not up to date."""
    old = read_bytes(readme).decode()
    board = "\n".join(
        tables(track, load_entries(track)) + yardsticks(track, read_yardsticks(track)) for track in tracks
    )
    new, count = re.subn(BOARD, lambda found: found[1] + board + found[2], old, flags=re.DOTALL)
    if not count:
        raise DataError(f"{readme}: no {BOARD}")
    if new == old:
        return 0
    if check:
        print(f"{readme}: is not up to date: python -m records.board")
        return 1
    write_whole(readme, new.encode())
    print(f"{readme}: written")
    return 0


def work(args: argparse.Namespace) -> int:
    tracks = [load_track(path.parent) for path in sorted(args.records.glob("*/track.json"))]
    if not args.html:
        return write_tables(args.records / "README.md", tracks, args.check)
    from records.board.site import write_site  # charts, which the tables need not load

    print(f"{args.html}: {write_site(args.html, tracks)} pages written")
    return 0


def main(argv: list[str] | None = None) -> int:
    return command.main(parse_args, work, "write the board again", argv)


if __name__ == "__main__":
    sys.exit(main())
