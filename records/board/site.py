"""The board as a site of plain files: the tracks on one page, and a page for each record.

Any server serves it as it is, and so does a disk. Nothing is run for it: curves come from the records'
metrics, and what a model writes from excerpts.json, which `python -m records excerpts` writes.
"""

import difflib
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from data.command import DataError
from data.files import read_bytes, write_whole
from records.archive.folders import SCRIPT
from records.archive.metrics import Metrics, find_runs
from records.archive.tracks import TRAINING, Track, Yardstick, read_yardsticks
from records.board.curves import Curves, curves_of, stall_rows
from records.board.documents import PROGRAM, markdown, program, render
from records.board.entries import KINDS, Entry, load_entries
from records.board.excerpts import read_excerpts
from records.board.ladder import Rule, draw_ladder
from records.board.look import PAGE
from records.board.tables import words_of_track

HEIGHT = 360  # pixels of the ladder
KIND_WORDS = {
    "records": "record",
    "waiting": "not judged yet",
    "others": "not scored again yet",
    "small": "not enough gain",
    "disputed": "disputed",
}


def kind_words(entry: Entry) -> str:
    if entry.kind == "others" and entry.record.field("claim") == "none":
        return "claims no record"
    return KIND_WORDS[entry.kind]


def address(entry: Entry) -> str:
    """Of a record's page, from the page of the tracks."""
    return f"{quote(entry.record.track.name)}/{quote(entry.name)}.html"


# --- a record's page --------------------------------------------------------------------------------------


def facts(entry: Entry) -> list[list[str]]:
    record = entry.record
    return [
        ["bits per byte", f"{entry.interval} (mean of {len(entry.scores)} seeds, 95 % interval)"],
        ["verdict", entry.words],
        ["by", record.field("author")],
        ["date", entry.date],
        ["dataset", record.field("dataset")],
        ["bytes", f"{record.total_bytes:,} of {record.track['budget_bytes']:,}"],
        ["beats", entry.beats or "nothing"],
        ["folder", f"records/{record.track.name}/{record.name}"],
    ]


def scores(entry: Entry) -> list[list[str]]:
    """Of each seed: the referee's score, the log's, steps and bytes."""
    rows = []
    for seed, score in sorted(entry.record.scores.items()):
        run = entry.record.runs[seed]
        sizes = [f"{run.value(name):,}" for name in ("steps", "artifact_bytes")]
        rows.append([str(seed), f"{score:.6f}", f"{run.value('val_bpb'):.6f}", *sizes])
    return rows


def read_curves(entry: Entry) -> tuple[list[Metrics], Curves | None, str]:
    """The runs, their curves, and why there are none: scripts of other people may log less than they need."""
    try:
        runs = [replace(run, name=f"seed {run.seed}") for run in find_runs(entry.record.path)]
    except DataError as error:
        return [], None, Path(str(error)).name
    return runs, curves_of([("", runs)]), ""


def script_changes(entry: Entry) -> str:
    """The script against that of the record before it, as a diff; empty where there is none, or no change."""
    if entry.rival is None:
        return ""
    before, after = (
        read_bytes(record.path / SCRIPT).decode(errors="replace").splitlines()
        for record in (entry.rival.record, entry.record)
    )
    names = (f"{entry.rival.name}/{SCRIPT}", f"{entry.name}/{SCRIPT}")
    return "\n".join(difflib.unified_diff(before, after, *names, lineterm=""))


def record_page(entry: Entry, sample: dict | None) -> bytes:
    record = entry.record
    runs, curves, no_curves = read_curves(entry)
    readme = read_bytes(record.path / "README.md").decode(errors="replace")
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
        stalls=stall_rows(runs),
        changes=script_changes(entry),
        sample=sample,
        sample_rest=sample["text"].removeprefix(sample["prompt"]) if sample else "",
        readme=markdown(readme),
    )


# --- the tracks' page -------------------------------------------------------------------------------------


def board_rows(entries: list[Entry]) -> list[list]:
    """All records of a track, the best of each kind first."""
    rows = []
    for kind in KINDS:
        for place, entry in enumerate((entry for entry in entries if entry.kind == kind), 1):
            rank = str(place) if kind == "records" else ""
            numbers = [entry.date, entry.interval, f"{entry.record.total_bytes:,}"]
            words = [kind_words(entry), entry.record.field("author"), entry.words]
            rows.append([rank, (entry.short_name, address(entry)), *numbers, *words])
    return rows


def yardstick_rows(rows: list[Yardstick]) -> list[list[str]]:
    return [[row.name, row.settings, row.after, f"{row.bytes:,}", f"{row.bits_per_byte:.4f}"] for row in rows]


def points(entries: list[Entry]) -> list[dict]:
    """What the ladder shows of records, in the order of their dates."""
    found = []
    for entry in sorted(entries, key=lambda one: one.name):
        mean, half = entry.mean, entry.half or 0.0
        point = {"name": entry.short_name, "mean": mean, "low": mean - half, "high": mean + half}
        point |= {"counts": entry.kind == "records", "kind": kind_words(entry), "interval": entry.interval}
        point |= {"date": entry.date, "bytes": entry.record.total_bytes, "href": address(entry)}
        found.append(point)
    return found


def rules_of(rows: list[Yardstick]) -> list[Rule]:
    """Those that were given the training text have a + behind their names."""
    return [(row.name + ("+" if row.after == TRAINING else ""), row.bits_per_byte) for row in rows]


def track_section(track: Track, entries: list[Entry]) -> tuple[dict, dict]:
    """What the template shows of a track, and its charts by name."""
    yardsticks = read_yardsticks(track)
    name = re.sub(r"\W", "-", track.name)
    shown = {
        "name": name,
        "title": track["title"],
        "facts": words_of_track(track),
        "rows": board_rows(entries),
        "yardsticks": yardstick_rows(yardsticks),
    }
    if not entries:
        return shown, {}
    ladder = draw_ladder(points(entries), rules_of(yardsticks), PAGE, width="container", height=HEIGHT)
    return shown, {f"{name}-ladder": ladder}


def write_site(folder: Path, tracks: list[Track]) -> int:
    """Write the site; the number of its pages."""
    charts, sections, files = {}, [], {PROGRAM: program().encode()}
    for track in sorted(tracks, key=lambda one: not one.records):  # those without a record last
        entries = load_entries(track)
        samples = read_excerpts(track, {entry.name: entry.sha256 for entry in entries})
        shown, its_charts = track_section(track, entries)
        sections.append(shown)
        charts |= its_charts
        files |= {address(entry): record_page(entry, samples.get(entry.name)) for entry in entries}
    files["index.html"] = render("index.html", charts, PROGRAM, tracks=sections)
    for name, page in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    return len(files) - 1
