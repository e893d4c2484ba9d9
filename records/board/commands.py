"""`records board`: the tables and the picture of the READMEs, or a site of pages."""

import re
from pathlib import Path

import click

from data.command import DataError
from data.door import Command
from data.files import read_bytes, write_whole
from records.archive.tracks import RECORDS, Track, load_track, read_reference_compressors
from records.board.entries import Entry, load_entries
from records.board.tables import compressors, tables

MARKERS = "<!-- board -->", "<!-- /board -->"  # in the README, each on a line of its own
OF_PICTURE = "track_floppy"
FOLDER = click.Path(file_okay=False, path_type=Path)
Board = list[tuple[Track, list[Entry]]]


def changed_tables(readme: Path, board: Board) -> dict[Path, bytes]:
    """The README with the tables of today, if they are others."""
    old = read_bytes(readme).decode()
    start, end = (f"{marker}\n" for marker in MARKERS)
    text = "\n".join(
        tables(track, entries) + compressors(track, read_reference_compressors(track))
        for track, entries in board
    )
    pattern = f"(?<={start}).*(?={end})"
    new, count = re.subn(pattern, lambda _: text, old, flags=re.DOTALL)
    if not count:
        raise DataError(f"{readme}: expected lines {' and '.join(MARKERS)}, between which the tables stand")
    return {} if new == old else {readme: new.encode()}


def changed_picture_of(folder: Path, board: Board) -> dict[Path, bytes]:
    """The picture of the README, if it shows something else today."""
    path = folder / "ladder.svg"
    for track, entries in board:
        if track.name == OF_PICTURE and entries:
            from records.board.ladder import changed_picture  # a second, which other tables need not pay

            old = read_bytes(path) if path.exists() else b""
            new = changed_picture(old, entries, read_reference_compressors(track))
            return {} if new == old else {path: new}
    return {}


@click.command(cls=Command)
@click.option("--records", type=Path, default=RECORDS, help="folder of the tracks")
@click.option("--check", is_flag=True, help="write nothing, exit 1 if something would change")
@click.option("--html", type=FOLDER, metavar="DIR", help="write a site of pages there, and nothing else")
def board(records: Path, check: bool, html: Path | None) -> int:
    """The tables of records/README.md and the picture of records/images/, or a site of pages.

    python -m records board             write tables and picture
    python -m records board --check     exit 1 if they are not up to date
    python -m records board --html DIR  write the site, DIR/index.html first
    """
    tracks = [load_track(path.parent) for path in sorted(records.glob("*/track.json"))]
    found = [(track, load_entries(track)) for track in tracks]
    if html:
        from records.board.site import write_site  # charts, which the tables need not load

        print(f"{html}: {write_site(html, found)} pages written")
        return 0
    changed = changed_tables(records / "README.md", found) | changed_picture_of(records / "images", found)
    for path, content in changed.items():
        if check:
            print(f"{path}: is not up to date: python -m records board")
        else:
            write_whole(path, content)
            print(f"{path}: written")
    return 1 if check and changed else 0
