"""The pictures of the README, from what is committed: the ladder, two curves of loss, and the law.

python -m records.pictures            write them to records/images/
python -m records.pictures --check    exit 1 if what they show has changed since
"""

import argparse
import sys
from pathlib import Path

from data import command
from data.command import Parser, say
from data.files import read_bytes, write_whole
from records.archive.tracks import RECORDS, load_track

TRACK = "track_floppy"


def work(args: argparse.Namespace) -> int:
    from records.board.pictures import pictures  # its charts need docstrings, which python -OO takes away

    code = 0
    for name, picture in pictures(load_track(args.records / TRACK)).items():
        path = args.records / "images" / name
        if path.exists() and picture.digest.encode() in read_bytes(path):
            continue
        if args.check:
            print(f"{path}: is not up to date: python -m records.pictures")
            code = 1
        else:
            write_whole(path, picture.svg())
            say(f"{path}: written")
    return code


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.pictures", description=__doc__)
    add = parser.add_argument
    add("--records", type=Path, default=RECORDS, help="folder of the tracks")
    add("--check", action="store_true", help="write nothing, exit 1 if something would change")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return command.main(parse_args, work, "draw again", argv)


if __name__ == "__main__":
    sys.exit(main())
