"""The board as a site of plain files: the tracks on one page, and a page for each record.

Any server serves it as it is, and so does a disk. Nothing is run for it: curves come from the records'
metrics, and what a model writes from excerpts.json, which `python -m records.excerpts` writes.
"""

import datetime
import html
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from data.command import DataError
from data.files import read_bytes, write_whole
from records.archive.metrics import find_runs
from records.archive.tracks import NOTHING, TRAINING, Track, Yardstick, read_yardsticks
from records.board.tables import TITLES, Entry, load_entries
from records.compare.page import charts, document, encoded, runs_data, stalls, table
from records.excerpts import read_excerpts

escape = html.escape
KINDS = {
    "records": "record",
    "waiting": "not retrained yet",
    "others": "not scored again yet",
    "disputed": "disputed",
}


def kind_of(entry: Entry) -> str:
    """In words."""
    if entry.kind == "others" and entry.record.field("claim") == "none":
        return "claims no record"
    return KINDS[entry.kind]


def address(entry: Entry) -> str:
    """Of a record's page, from the page of the tracks."""
    return f"{quote(entry.record.track.name)}/{quote(entry.record.name)}.html"


def markdown(text: str) -> str:
    """HTML of somebody's Markdown. HTML in it is shown as text, and links lead to the web alone."""
    from markdown_it import MarkdownIt

    rules = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    rules.validateLink = lambda link: link.startswith(("https://", "http://"))
    return rules.render(text)


# --- a record's page --------------------------------------------------------------------------------------


def facts(entry: Entry) -> str:
    record = entry.record
    told = {
        "bits per byte": f"{entry.interval} (mean of {len(entry.scores)} seeds, 95 % interval)",
        "verdict": entry.words,
        "by": record.field("author"),
        "date": record.name[:10],
        "dataset": record.field("dataset"),
        "bytes": f"{record.total_bytes:,} of {record.track['budget_bytes']:,}",
        "beats": entry.beats or "nothing",
        "folder": f"records/{record.track.name}/{record.name}",
    }
    return table(["what", "value"], [("", [name, str(value)]) for name, value in told.items()], "facts")


def scores(entry: Entry) -> str:
    rows = []
    for seed, score in sorted(entry.record.scores.items()):
        run = entry.record.runs[seed]
        cells = [str(seed), f"{score:.6f}", f"{run.value('val_bpb'):.6f}", f"{run.value('steps'):,}"]
        rows.append(("", [*cells, f"{run.value('artifact_bytes'):,}"]))
    head = ["seed", "bits per byte", "by its log", "steps", "artifact bytes"]
    words = "The first is the referee's, which counts. The log's is the script's own, after the export. "
    words += "It knows nothing of what a model learns while it is scored."
    return f'<p class="quiet">{words}</p>' + table(head, rows, "scores by seed", range(1, 5))


def curves(entry: Entry) -> tuple[str, dict]:
    """Where the curves go, and their numbers. Scripts of other people may log less than they need."""
    try:
        runs = [replace(run, name=f"seed {run.seed}") for run in find_runs(entry.record.path)]
    except DataError as error:
        return f'<p class="quiet">Its metrics have no curves: {escape(Path(str(error)).name)}</p>', {}
    return f"{charts()}<h2>Stalls</h2>{stalls(runs)}", runs_data([("Runs", runs)])


def writing(sample: dict | None) -> str:
    if not sample:
        return '<p class="quiet">No sample is kept. <code>python -m records.excerpts</code> makes one.</p>'
    prompt, text = sample["prompt"], sample["text"]
    rest = text.removeprefix(prompt)
    return (
        f'<p class="quiet">After the words in bold, at temperature {sample["temperature"]:g}: '
        f"<code>{escape(sample['command'])}</code></p>"
        f'<pre tabindex="0"><b>{escape(prompt)}</b>{escape(rest)}</pre>'
    )


def record_page(entry: Entry, sample: dict | None, index: str) -> str:
    record = entry.record
    readme = read_bytes(record.path / "README.md").decode(errors="replace")
    place, data = curves(entry)
    body = [
        f'<main><p><a href="../{quote(index)}">All records</a></p><h1>{escape(entry.short_name)}</h1>',
        f'<p class="lead">{escape(record.field("what_changed"))}</p>',
        facts(entry),
        f"<h2>Why</h2><p>{escape(record.field('why'))}</p>",
        f"<h2>Scores</h2>{scores(entry)}",
        f"<h2>Curves</h2>{place}",
        f"<h2>What the model writes</h2>{writing(sample)}",
        f'<h2>Its README</h2><article class="readme">{lower_heads(markdown(readme))}</article></main>',
    ]
    return document(f"{record.name}: {entry.mean:.4f} bits per byte", "".join(body), data)


def lower_heads(text: str) -> str:
    """Headings of a README two levels down, below those of the page."""
    for level in (4, 3, 2, 1):
        text = text.replace(f"<h{level}>", f"<h{level + 2}>").replace(f"</h{level}>", f"</h{level + 2}>")
    return text.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace(
        "</table>", "</table></div>"
    )


# --- the tracks' page -------------------------------------------------------------------------------------


def points(entries: list[Entry], x) -> list[dict]:
    """What a chart shows of records; `x`: a function of one and its hour, as if a day was shared evenly."""
    found = []
    of_day = Counter(entry.record.name[:10] for entry in entries)
    before = Counter()
    for entry in sorted(entries, key=lambda one: one.record.name):
        day = entry.record.name[:10]
        hour = 24 * before[day] / of_day[day]
        before[day] += 1
        words = f"{entry.short_name}: {entry.interval} bits per byte, {entry.record.total_bytes:,} bytes"
        found.append(
            {
                "x": x(entry, hour),
                "y": entry.mean,
                "half": entry.half,
                "name": entry.short_name,
                "text": f"{words}, {day}, {kind_of(entry)}",
                "href": address(entry),
                "open": entry.kind != "records",
            }
        )
    return found


def time_of(entry: Entry, hour: float) -> float:
    """Seconds since 1970."""
    date = datetime.datetime.fromisoformat(entry.record.name[:10]).replace(tzinfo=datetime.UTC)
    return date.timestamp() + 3600 * hour


def best_so_far(found: list[dict]) -> list[float | None]:
    """The lowest score of a record up to each point; None before the first."""
    best = []
    for point in found:
        before = [best[-1]] if best and best[-1] is not None else []
        best.append(min([*before, *([] if point["open"] else [point["y"]])], default=None))
    return best


def track_data(track: Track, entries: list[Entry], rows: list[Yardstick]) -> dict:
    """The two charts of a track, by the names that its section gives them."""
    more = {NOTHING: "", TRAINING: "+"}
    rules = [{"y": row.bits_per_byte, "name": row.name + more.get(row.after, "")} for row in rows]
    ladder = points(entries, time_of)
    sizes = points(entries, lambda entry, hour: entry.record.total_bytes)
    return {
        f"{track.name}-time": {
            "points": ladder,
            "best": best_so_far(ladder),
            "rules": rules,
            "time": True,
            "xlabel": "day of the record",
        },
        f"{track.name}-bytes": {
            "points": sizes,
            "rules": rules,
            "budget": track["budget_bytes"],
            "xlabel": "bytes of artifact and code; the vertical line is the budget",
        },
    }


def board_table(track: Track, entries: list[Entry]) -> str:
    """All records of a track in one table, the best of each kind first; names lead to their pages."""
    rows = []
    for kind in TITLES:
        chosen = [entry for entry in entries if entry.kind == kind]
        for place, entry in enumerate(chosen, 1):
            rank = str(place) if kind == "records" else ""
            link = f'<a href="{address(entry)}">{escape(entry.short_name)}</a>'
            told = [entry.record.name[:10], entry.interval, f"{entry.record.total_bytes:,}", kind_of(entry)]
            told += [entry.record.field("author"), entry.words]
            cells = "".join(f"<td>{escape(one)}</td>" for one in told)
            rows.append(f'<tr><td>{rank}</td><th scope="row">{link}</th>{cells}</tr>')
    names = ("rank", "record", "date", "bits per byte", "bytes", "kind", "by", "verdict")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    box = f'class="scroll" tabindex="0" role="region" aria-label="records of {track.name}"'
    body = f"<table class=wide><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<div {box}>{body}</div>"


def yardstick_table(track: Track, rows: list[Yardstick]) -> str:
    if not rows:
        return ""
    lines = [
        ("", [row.name, row.settings, row.after, f"{row.bytes:,}", f"{row.bits_per_byte:.4f}"])
        for row in rows
    ]
    head = ["compressor", "settings", "after", "bytes", "bits per byte"]
    return "<h3>What well-known compressors need</h3>" + table(
        head, lines, f"yardsticks of {track.name}", range(3, 5)
    )


def track_section(track: Track, entries: list[Entry], rows: list[Yardstick]) -> str:
    limits = f"{track['hardware']}; {track['train_seconds']:g} s at most, {track['budget_bytes']:,} bytes"
    if track.counts_flops:
        limits = f"{track['train_flops']:.0e} operations, {limits}"
    head = f'<h2>{escape(track["title"])}</h2><p class="quiet">{escape(limits)}</p>'
    if not entries:
        return head + "<p>No record yet.</p>"
    parts = [head]
    for name, title in (("time", "The ladder over time"), ("bytes", "Bytes against bits per byte")):
        words = f"{title}: a chart whose points are links; the table below has the same numbers"
        box = f'class="chart" role="group" aria-label="{words}" data-board="{track.name}-{name}"'
        parts.append(f"<h3>{title}</h3><div {box}></div>")
    note = "Bars are 95 % intervals of the mean over seeds; one that is cut off goes further than the chart. "
    note += "Filled points are records, hollow ones are not. Dashed lines are compressors; "
    note += "those with + were given the training text before. Records of one day stand side by side."
    parts += [f'<p class="quiet">{note}</p>', board_table(track, entries), yardstick_table(track, rows)]
    return "".join(parts)


def write_site(target: Path, tracks: list[Track]) -> int:
    """Write the site; the number of its pages. `target`: a folder, or the file of the tracks' page in one."""
    folder, index = (target.parent, target.name) if target.suffix == ".html" else (target, "index.html")
    data, sections, pages = {}, [], {}
    for track in sorted(tracks, key=lambda one: not one.records):  # those without a record last
        entries, rows, samples = load_entries(track), read_yardsticks(track), read_excerpts(track)
        sections.append(track_section(track, entries, rows))
        data |= track_data(track, entries, rows) if entries else {}
        pages |= {address(one): record_page(one, samples.get(one.record.name), index) for one in entries}
    title = "bytegolf: the best language model that fits a byte budget"
    lead = "Bits per byte of text that no model has seen, measured by a referee; lower is better."
    body = f'<main><h1>{title}</h1><p class="lead">{lead}</p>{"".join(sections)}</main>'
    pages[index] = document(title, body, data)
    for name, page in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, encoded(page))
    return len(pages)
