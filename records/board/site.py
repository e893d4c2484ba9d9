"""The board as a site of plain files: the tracks on one page, and a page for each record.

Any server serves it as it is, and so does a disk. Nothing is run for it: curves come from the records'
metrics.
"""

import difflib
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from data.command import DataError
from data.files import read_bytes, read_json, write_whole
from records.archive.metrics import find_runs
from records.archive.runs import SCRIPT, Record
from records.archive.tracks import ReferenceCompressor, Track, read_reference_compressors
from records.board.curves import draw_curves
from records.board.documents import PROGRAM, markdown, program, render
from records.board.entries import KINDS, Entry
from records.board.ladder import draw_ladder
from records.board.look import PAGE
from records.board.tables import words_of_track

HEIGHT = 360  # pixels of the ladder
HEAD = ["rank", "record", "bits per byte", "kind", "bytes", "date", "by", "what changed"]
EXCERPTS = "excerpts.json"  # of a track: what models of records wrote


# --- a record's page --------------------------------------------------------------------------------------


def scores(entry: Entry) -> list[list[str]]:
    """Of each seed: who trained it, the referee's score, the log's, steps and bytes."""
    rows = []
    for seed, its in entry.judged.items():
        rows.append([seed, "the judge", f"{its['score']:.6f}", "", "", f"{its['artifact_bytes']:,}"])
    for seed, score in sorted(entry.record.scores.items()):
        run = entry.record.runs[seed]
        sizes = [f"{run.value(name):,}" for name in ("steps", "artifact_bytes")]
        rows.append([str(seed), "its author", f"{score:.6f}", f"{run.value('val_bpb'):.6f}", *sizes])
    return rows


def excerpt(record: Record) -> str:
    """What the model wrote, where the track keeps it."""
    path = record.track.folder / EXCERPTS
    kept = read_json(path) if path.exists() else {}
    return kept.get(record.name, {}).get("text", "")


def read_curves(entry: Entry) -> tuple[dict, str]:
    """The chart, or why there is none: scripts of other people may log less than it needs."""
    try:
        runs = [replace(run, name=f"seed {run.seed}") for run in find_runs(entry.record.path)]
    except DataError as error:
        return {}, Path(str(error)).name
    return {"curves": draw_curves([("", runs)])}, ""


def script_changes(entry: Entry) -> list[str]:
    """The lines of a diff against the script of the record before it; none where no record is before it."""
    if entry.before is None:
        return []
    records = (entry.before, entry.record)
    scripts = [one.script.decode(errors="replace").splitlines() for one in records]
    names = [f"{one.name}/{SCRIPT}" for one in records]
    return [*difflib.unified_diff(*scripts, *names, lineterm="")]


def record_page(entry: Entry) -> bytes:
    record = entry.record
    charts, no_curves = read_curves(entry)
    return render(
        "record.html",
        charts,
        f"../{PROGRAM}",
        entry=entry,
        scores=scores(entry),
        no_curves=no_curves,
        changes=script_changes(entry),
        excerpt=excerpt(record),
        readme=markdown(read_bytes(record.path / "README.md").decode(errors="replace")),
    )


# --- the tracks' page -------------------------------------------------------------------------------------


def board_rows(entries: list[Entry]) -> list[list]:
    """All records of a track by HEAD, the best of each kind first."""
    rows = []
    for kind in KINDS:
        for place, entry in enumerate((entry for entry in entries if entry.kind == kind), 1):
            cells: dict = {"rank": str(place) if kind == "records" else "", **entry.cells}
            cells["record"] = (entry.short_name, entry.address)
            rows.append([cells[name] for name in HEAD])
    return rows


def compressor_rows(rows: list[ReferenceCompressor]) -> list[list[str]]:
    return [[row.name, row.after, f"{row.bits_per_byte:.4f}", f"{row.bytes:,}", row.settings] for row in rows]


def write_site(folder: Path, board: list[tuple[Track, list[Entry]]]) -> int:
    """Write the site; the number of its pages."""
    charts, sections, files = {}, [], {PROGRAM: program().encode()}
    for track, entries in sorted(board, key=lambda one: not one[1]):  # those without a record last
        compressors = read_reference_compressors(track)
        chart = f"{track.name}-ladder"
        section = {"chart": chart, "title": track["title"], "facts": words_of_track(track)}
        section |= {"rows": board_rows(entries), "compressors": compressor_rows(compressors)}
        sections.append(section)
        if entries:
            charts[chart] = draw_ladder(entries, compressors, PAGE, width="container", height=HEIGHT)
        files |= {unquote(entry.address): record_page(entry) for entry in entries}
    files["index.html"] = render("index.html", charts, PROGRAM, head=HEAD, tracks=sections)
    for name, page in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    return len(files) - 1
