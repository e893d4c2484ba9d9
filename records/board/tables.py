"""The board in Markdown: the tables of records/README.md."""

from pathlib import Path

from data.command import shell
from records.archive.tracks import ReferenceCompressor, Track
from records.archive.verdicts import read_draws
from records.board.entries import Entry

ESCAPED = {sign: "\\" + sign for sign in "\\`*_[]|#!"} | {"<": "&lt;", ">": "&gt;"}
HEAD = "rank | record | by | date | bits per byte | bytes | dataset | what changed | beats | verdict"
HEAD_OF_COMPRESSORS = "compressor | version | settings | after | bytes | bits per byte"
TITLES = {
    "records": "",
    "waiting": "\n**Not judged yet**: what they claim holds. A rank needs the judge's own training.\n\n",
    "others": "\n**Other submissions**: they claim no record, or were not scored again yet.\n\n",
    "small": "\n**Not enough gain**: they hold, but gain too little over the record before them.\n\n",
    "disputed": "\n**Disputed**: they fail a check, changed after it, or somebody doubts them.\n\n",
}


def cell(text: str) -> str:
    """Somebody's words in one cell of a table: no markup, no line ends."""
    return " ".join(text.translate(str.maketrans(ESCAPED)).split())


def table(head: str, rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |\n" for cells in rows]
    return f"| {head} |\n" + "|---" * (head.count("|") + 1) + "|\n" + "".join(lines)


def row(rank: str, entry: Entry, root: Path) -> list[str]:
    cells = entry.cells
    cells |= {name: cell(cells[name]) for name in ("by", "what changed", "beats", "verdict")}
    cells["record"] = f"[{cell(entry.short_name)}]({entry.record.path.relative_to(root).as_posix()}/)"
    return [rank, *(cells[name] for name in HEAD.split(" | ")[1:])]


def section(kind: str, entries: list[Entry], root: Path) -> str:
    """The entries of a kind. Empty without any."""
    chosen = [entry for entry in entries if entry.kind == kind]
    ranked = kind == "records"
    rows = [row(str(place) if ranked else "", entry, root) for place, entry in enumerate(chosen, 1)]
    return TITLES[kind] + table(HEAD, rows) if rows else ""


def limits(track: Track) -> str:
    """Machine, operations, seconds and bytes in words."""
    flops = f"{track['train_flops']:g} operations in " if track.counts_flops else ""
    seconds = f"{track['train_seconds']:g} s at most"
    return f"{track['hardware']}; {flops}{seconds}, {track['budget_bytes']:,} bytes"


def words_of_track(track: Track) -> str:
    """Its limits, and how often its records were judged, also those whose folders are gone."""
    draws = read_draws(track.folder)
    folders = {draw.folder for draw in draws}
    judged = f"; evaluations so far: {len(draws)}, of folders: {len(folders)}" if draws else ""
    return limits(track) + judged


def tables(track: Track, entries: list[Entry]) -> str:
    """A track and its records."""
    head = f"### {track['title']} (`{track.name}`)\n\n{words_of_track(track)}\n\n"
    sections = [section(kind, entries, track.folder.parent) for kind in TITLES]
    return head + ("".join(sections) or "No record yet.\n")


def compressors(track: Track, rows: list[ReferenceCompressor]) -> str:
    """What stands below a track's records: sizes to compare a record with. Empty without rows."""
    if not rows:
        return ""
    command = shell("python", "-m", "records", "track", "compressors", f"records/{track.name}", "--write")
    cells = []
    for one in rows:
        words = map(cell, (one.name, one.version, one.settings, one.after))
        cells.append([*words, f"{one.bytes:,}", f"{one.bits_per_byte:.4f}"])
    title = f"\n**What well-known compressors need**: `{command}`\n\n"
    return title + table(HEAD_OF_COMPRESSORS, cells)
