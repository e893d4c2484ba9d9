"""The board: the tables of records/README.md and a chart of each track, from the folders and their verdicts.

python -m records.board             write them
python -m records.board --check     exit 1 if they are not up to date
"""

import argparse
import datetime
import io
import sys
from dataclasses import dataclass
from pathlib import Path

from data.command import DataError, open_streams, run
from records.files import read_bytes, read_json, write_whole
from records.folders import record_folders
from records.tracks import RECORDS, Track, load_track, schema_errors
from records.verdicts import folder_sha256, read_verdicts

MARKS = "<!-- board -->\n", "<!-- /board -->"
MEANS, SEEDS = "#1f6f8b", "#d1495b"  # colours of the chart
SHOWN = {
    "pass": "passed",
    "fail": "failed",
    "papers": "papers only",
    "stale": "changed since",
    "none": "not verified",
}


@dataclass(frozen=True)
class Entry:
    """A record on the board."""

    folder: Path
    submission: dict
    verdict: dict

    @property
    def state(self) -> str:
        """pass, fail or papers; stale if the folder is no longer what was verified; none."""
        if not self.verdict:
            return "none"
        return self.verdict["verdict"] if self.verdict["sha256"] == folder_sha256(self.folder) else "stale"

    @property
    def bpb(self) -> float:
        return self.submission["val_bpb"]["mean"]

    @property
    def half_width(self) -> float | None:
        """Of the 95 % confidence interval of the mean, by Student's t."""
        from scipy.stats import t  # a second

        count = len(self.submission["seeds"])
        if count < 2:
            return None
        return float(t.ppf(0.975, count - 1)) * self.submission["val_bpb"]["std"] / count**0.5

    @property
    def kind(self) -> str:
        """Which table it stands in: records, others or disputed."""
        if self.verdict.get("disputed") or self.state in ("fail", "stale"):
            return "disputed"
        return "records" if self.submission["claim"] != "none" and self.state == "pass" else "others"


def load_entries(track: Track) -> list[Entry]:
    """All folders of a track. Raises DataError."""
    verdicts = read_verdicts(track.folder)
    entries = []
    for folder in record_folders(track.folder.parent):
        if folder.parent != track.folder:
            continue
        submission = read_json(folder / "submission.json")
        if errors := schema_errors(submission, "submission"):
            raise DataError(f"{folder / 'submission.json'}: {errors[0]}")
        entries.append(Entry(folder, submission, verdicts.get(folder.name, {})))
    unknown = sorted(verdicts.keys() - {entry.folder.name for entry in entries})
    if unknown:
        raise DataError(f"{track.folder / 'verdicts.json'}: speaks of {unknown[0]}, which is no folder")
    return entries


# --- tables -----------------------------------------------------------------------------------------------


ESCAPED = {sign: "\\" + sign for sign in "\\`*_[]|#!"} | {"<": "&lt;", ">": "&gt;"}


def cell(text: str) -> str:
    """Somebody's words in one cell of a table: no markup, no line ends."""
    return " ".join(text.translate(str.maketrans(ESCAPED)).split())


def row(rank: str, entry: Entry, root: Path) -> str:
    s = entry.submission
    width = entry.half_width
    link = f"[{cell(s['name'])}]({entry.folder.relative_to(root).as_posix()}/)"
    interval = f"{entry.bpb:.4f}" + (f" ± {width:.4f}" if width is not None else "")
    when = f", {entry.verdict['date']}" if entry.verdict else ""
    why = f": {cell(entry.verdict['disputed'])}" if entry.verdict.get("disputed") else ""
    if entry.state == "fail":
        why += ": " + ", ".join(entry.verdict["failed"][:3])
    return (
        f"| {rank} | {link} | {cell(s['author'])} | {s['date']} | {interval} | {s['total_bytes']:,} | "
        f"{s['train_seconds']['mean']:.0f} | {cell(s['what_changed'])} | {cell(s['beats'] or '')} | "
        f"{SHOWN[entry.state]}{when}{why} |\n"
    )


HEAD = (
    "| rank | record | by | date | bits per byte | bytes | seconds | what changed | beats | verdict |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)
TITLES = {
    "records": "",
    "others": "\n**Other submissions**: they claim no record, or were not scored again yet.\n\n",
    "disputed": "\n**Disputed**: they fail a check, changed after it, or somebody doubts them.\n\n",
}


def tables(track: Track, entries: list[Entry]) -> str:
    """All of one track in Markdown."""
    head = f"### {track['title']} (`{track.name}`)\n\n{track['hardware']}; "
    head += f"{track['train_seconds']:g} s, {track['budget_bytes']:,} bytes\n\n"
    if not entries:
        return head + "No record yet.\n"
    parts = [head]
    for kind, title in TITLES.items():
        chosen = sorted((entry for entry in entries if entry.kind == kind), key=lambda entry: entry.bpb)
        if chosen:
            parts.append(title + HEAD)
            for place, entry in enumerate(chosen, 1):
                parts.append(row(str(place) if kind == "records" else "", entry, track.folder.parent))
    if any(entry.kind == "records" for entry in entries):
        parts.append(f"\n![records over time]({track.name}/board.svg)\n")
    return "".join(parts)


def with_board(text: str, board: str) -> str:
    """The README with the board between its marks. Raises DataError."""
    before, start, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not start or not end:
        raise DataError(f"README.md: no {MARKS[0].strip()} … {MARKS[1]}")
    return before + start + board + end + after


# --- chart ------------------------------------------------------------------------------------------------


def chart(track: Track, entries: list[Entry]) -> bytes:
    """Records over time with their intervals, every seed a dot: SVG, equal bytes for equal records."""
    import matplotlib  # a second that the command's other errors need not wait for

    matplotlib.use("svg")
    from matplotlib import dates, pyplot

    matplotlib.rcParams.update({"svg.hashsalt": track.name, "svg.fonttype": "none", "font.size": 10})
    shown = sorted((e for e in entries if e.kind == "records"), key=lambda e: e.folder.name)
    days = [datetime.date.fromisoformat(entry.submission["date"]) for entry in shown]
    scores = [e.bpb for e in shown]
    widths = [e.half_width or 0 for e in shown]
    best = [min(scores[: i + 1]) for i in range(len(scores))]
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    axes.errorbar(days, scores, widths, fmt="o", capsize=3, color=MEANS)
    axes.step(days, best, where="post", color=MEANS, alpha=0.5)
    for entry, day in zip(shown, days):
        seeds = [seed["val_bpb"] for seed in entry.submission["seeds"]]
        axes.plot([day] * len(seeds), seeds, ".", color=SEEDS, markersize=4)
        place = {"textcoords": "offset points", "xytext": (6, 6), "fontsize": 8}
        axes.annotate(entry.submission["name"], (day, entry.bpb), **place)
    axes.xaxis.set_major_locator(dates.AutoDateLocator(minticks=2, maxticks=8))
    axes.xaxis.set_major_formatter(dates.DateFormatter("%Y-%m-%d"))
    axes.margins(0.15)
    axes.set_ylabel("bits per byte, lower is better")
    axes.set_title(track["title"])
    axes.grid(alpha=0.3)
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "records/board.py"})
    pyplot.close(figure)
    return out.getvalue()


# --- command line -----------------------------------------------------------------------------------------


def build(root: Path) -> dict[Path, bytes]:
    """What the generated files must hold."""
    files, parts = {}, []
    for path in sorted(root.glob("*/track.json")):
        track = load_track(path.parent)
        entries = load_entries(track)
        parts.append(tables(track, entries))
        if any(entry.kind == "records" for entry in entries):
            files[path.parent / "board.svg"] = chart(track, entries)
    readme = root / "README.md"
    files[readme] = with_board(read_bytes(readme).decode(), "\n".join(parts)).encode()
    return files


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m records.board", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--records", type=Path, default=RECORDS, help="folder of the tracks")
    add("--check", action="store_true", help="write nothing, exit 1 if something would change")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    files = build(args.records)
    old = [path for path, data in files.items() if not path.exists() or path.read_bytes() != data]
    for path in old:
        if not args.check:
            write_whole(path, files[path])
        print(f"{path}: {'is not up to date: python -m records.board' if args.check else 'written'}")
    return 1 if args.check and old else 0


def main(argv: list[str] | None = None) -> int:
    open_streams()
    args = parse_args(argv)
    return run(lambda: work(args), "write the board again")


if __name__ == "__main__":
    sys.exit(main())
