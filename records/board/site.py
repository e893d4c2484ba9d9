"""The board as a site of plain files: the tracks on one page, and a page for each record.

Any server serves it as it is, and so does a disk. Nothing is run for it: curves come from the records'
metrics.
"""

import difflib
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from data.command import DataError
from data.files import read_bytes, write_whole
from records.archive.metrics import find_runs
from records.archive.runs import SCRIPT, Record
from records.archive.tracks import ReferenceCompressor, Track, read_reference_compressors
from records.board.curves import Curves, curves_of
from records.board.documents import PROGRAM, markdown, program, render
from records.board.entries import KINDS, Entry, load_entries
from records.board.ladder import SAID, draw_ladder, points
from records.board.look import PAGE
from records.board.tables import words_of_track

HEIGHT = 360  # pixels of the ladder
HEAD = ["rank", "record", "date", "bits per byte", "bytes", "kind", "by", "verdict"]


def address(record: Record) -> str:
    """Of a record's page, from the page of the tracks."""
    return f"{quote(record.track.name)}/{quote(record.name)}.html"


# --- a record's page --------------------------------------------------------------------------------------


def facts(entry: Entry) -> list[list]:
    """What the page says of it; (text, address) for a link."""
    record = entry.record
    cells = entry.cells
    score = f"{entry.interval} (mean of {len(entry.scores)} seeds, 95 % interval)"
    rows: list[list] = [["bits per byte", score]]
    rows += [[name, cells[name]] for name in ("verdict", "by", "date", "dataset")]
    rows.append(["bytes", f"{cells['bytes']} of {record.track['budget_bytes']:,}"])
    rows.append(["beats", entry.beats or "nothing"])
    if before := entry.built_on:
        known = entry.before and entry.before.name == before
        rows.append(["built on", (before, f"{quote(before)}.html") if known else before])
    if idea := record.submission.get("idea_from"):
        rows.append(["idea from", idea])
    return [*rows, ["folder", f"records/{record.track.name}/{record.name}"]]


def scores(entry: Entry) -> list[list[str]]:
    """Of each seed: the referee's score, the log's, steps and bytes."""
    rows = []
    for seed, score in sorted(entry.record.scores.items()):
        run = entry.record.runs[seed]
        sizes = [f"{run.value(name):,}" for name in ("steps", "artifact_bytes")]
        rows.append([str(seed), f"{score:.6f}", f"{run.value('val_bpb'):.6f}", *sizes])
    return rows


def read_curves(entry: Entry) -> tuple[Curves | None, str]:
    """The curves, or why there are none: scripts of other people may log less than they need."""
    try:
        runs = [replace(run, name=f"seed {run.seed}") for run in find_runs(entry.record.path)]
    except DataError as error:
        return None, Path(str(error)).name
    return curves_of([("", runs)]), ""


def script_changes(entry: Entry) -> str:
    """The script against that of the record before it, as a diff; empty where there is none, or no change."""
    if entry.before is None:
        return ""
    records = (entry.before, entry.record)
    scripts = [one.script.decode(errors="replace").splitlines() for one in records]
    names = [f"{one.name}/{SCRIPT}" for one in records]
    return "\n".join(difflib.unified_diff(*scripts, *names, lineterm=""))


def record_page(entry: Entry) -> bytes:
    record = entry.record
    curves, no_curves = read_curves(entry)
    return render(
        "record.html",
        {"curves": curves.spec} if curves else {},
        f"../{PROGRAM}",
        entry=entry,
        what_changed=record.field("what_changed"),
        why=record.field("why"),
        facts=facts(entry),
        scores=scores(entry),
        curves=curves,
        no_curves=no_curves,
        changes=script_changes(entry),
        readme=markdown(read_bytes(record.path / "README.md").decode(errors="replace")),
    )


# --- the tracks' page -------------------------------------------------------------------------------------


def board_rows(entries: list[Entry]) -> list[list]:
    """All records of a track by HEAD, the best of each kind first."""
    rows = []
    for kind in KINDS:
        for place, entry in enumerate((entry for entry in entries if entry.kind == kind), 1):
            cells: dict = {"rank": str(place) if kind == "records" else "", **entry.cells}
            cells["record"] = (entry.short_name, address(entry.record))
            rows.append([cells[name] for name in HEAD])
    return rows


def compressor_rows(rows: list[ReferenceCompressor]) -> list[list[str]]:
    return [[row.name, row.settings, row.after, f"{row.bytes:,}", f"{row.bits_per_byte:.4f}"] for row in rows]


def ladder(entries: list[Entry], compressors: list[ReferenceCompressor]) -> dict:
    """All records, whose points say what they are and lead to their pages."""
    said = []
    for point, entry in zip(points(entries), sorted(entries, key=lambda one: one.name)):
        cells = {name: entry.cells[name] for name in SAID}
        said.append({**point, **cells, "href": address(entry.record)})
    return draw_ladder(said, compressors, PAGE, width="container", height=HEIGHT)


def write_site(folder: Path, tracks: list[Track]) -> int:
    """Write the site; the number of its pages."""
    charts, sections, files = {}, [], {PROGRAM: program().encode()}
    for track in sorted(tracks, key=lambda one: not one.records):  # those without a record last
        entries = load_entries(track)
        compressors = read_reference_compressors(track)
        chart = re.sub(r"\W", "-", f"{track.name}-ladder")
        section = {"chart": chart, "title": track["title"], "facts": words_of_track(track)}
        section |= {"rows": board_rows(entries), "compressors": compressor_rows(compressors)}
        sections.append(section)
        if entries:
            charts[chart] = ladder(entries, compressors)
        files |= {address(entry.record): record_page(entry) for entry in entries}
    files["index.html"] = render("index.html", charts, PROGRAM, head=HEAD, tracks=sections)
    for name, page in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    return len(files) - 1
