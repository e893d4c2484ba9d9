"""The commands that make pages of records: board and pictures."""

import re
from pathlib import Path

import click

from data.command import DataError, say
from data.door import Command
from data.files import read_bytes, write_whole
from records.archive.tracks import RECORDS, Track, load_track, read_reference_compressors
from records.board.entries import load_entries
from records.board.tables import compressors, tables

of_records = click.option("--records", type=Path, default=RECORDS, help="folder of the tracks")
to_check = click.option("--check", is_flag=True, help="write nothing, exit 1 if something would change")

BOARD = r"(<!-- board -->\n).*(<!-- /board -->)"  # in the README
TRACK = "track_floppy"  # of the pictures


def write_tables(readme: Path, tracks: list[Track], check: bool) -> int:
    """The exit code: 1 if `check` found that they are not up to date."""
    old = read_bytes(readme).decode()
    board = "\n".join(
        tables(track, load_entries(track)) + compressors(track, read_reference_compressors(track))
        for track in tracks
    )
    new, count = re.subn(BOARD, lambda found: found[1] + board + found[2], old, flags=re.DOTALL)
    if not count:
        raise DataError(f"{readme}: no {BOARD}")
    if new == old:
        return 0
    if check:
        print(f"{readme}: is not up to date: python -m records board")
        return 1
    write_whole(readme, new.encode())
    print(f"{readme}: written")
    return 0


@click.command(cls=Command)
@of_records
@to_check
@click.option("--html", type=Path, metavar="DIR", help="write a site of pages there, and nothing else")
def board(records: Path, check: bool, html: Path | None) -> int:
    """The tables of records/README.md, from the folders and the verdicts on them, or a site of pages.

    python -m records board             write the tables
    python -m records board --check     exit 1 if they are not up to date
    python -m records board --html DIR  write the site, DIR/index.html first
    """
    tracks = [load_track(path.parent) for path in sorted(records.glob("*/track.json"))]
    if not html:
        return write_tables(records / "README.md", tracks, check)
    from records.board.site import write_site  # charts, which the tables need not load

    print(f"{html}: {write_site(html, tracks)} pages written")
    return 0


@click.command(cls=Command)
@of_records
@to_check
def pictures(records: Path, check: bool) -> int:
    """The pictures of the READMEs, from what is committed: the ladder, two curves and the scaling fit.

    python -m records pictures            write them to records/images/
    python -m records pictures --check    exit 1 if what they show has changed since
    """
    from records.board.pictures import pictures as drawn  # its charts need docstrings: no python -OO

    code = 0
    for name, picture in drawn(load_track(records / TRACK)).items():
        path = records / "images" / name
        if path.exists() and picture.digest.encode() in read_bytes(path):
            continue
        if check:
            print(f"{path}: is not up to date: python -m records pictures")
            code = 1
        else:
            write_whole(path, picture.svg())
            say(f"{path}: written")
    return code
