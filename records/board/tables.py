"""The board: the tables of records/README.md, from the folders and the verdicts on them, or a site of pages.

python -m records.board             write the tables
python -m records.board --check     exit 1 if they are not up to date
python -m records.board --html DIR  write the site, DIR/index.html first
"""

import argparse
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from data.command import DataError, Parser, open_streams, run
from data.files import read_bytes, write_whole
from records.archive.ranks import best_before, has_rank, judged_scores
from records.archive.record import Record
from records.archive.tracks import RECORDS, Track, Yardstick, load_track, read_yardsticks, schema_errors
from records.archive.verdicts import FAILED, PASSED, folder_sha256, read_verdicts

BOARD = r"(<!-- board -->\n).*(<!-- /board -->)"  # in the README
SHOWN = {
    "ranked": "judged",
    "holds": "holds",
    "fails": "failed",
    "not judged": "not judged",
    "pass": "passed",  # this and the next: by earlier referees
    "fail": "failed",
    "papers": "papers only",
    "stale": "changed since",
    "none": "not verified",
}


@dataclass(frozen=True)
class Entry:
    """A record on the board."""

    record: Record
    verdict: dict

    @property
    def state(self) -> str:
        """The verdict's word; stale if the folder is no longer what was verified; none."""
        if not self.verdict:
            return "none"
        return (
            self.verdict["verdict"] if self.verdict["sha256"] == folder_sha256(self.record.path) else "stale"
        )

    @property
    def short_name(self) -> str:
        """The record's name without its date."""
        return self.record.name.partition("_")[2]

    @property
    def half(self) -> float | None:
        """Half the width of the mean's 95 % confidence interval by Student's t; None of one score."""
        from scipy.stats import t  # a second

        scores = self.scores
        if len(scores) < 2:
            return None
        return float(t.ppf(0.975, len(scores) - 1) * statistics.stdev(scores) / len(scores) ** 0.5)

    @property
    def interval(self) -> str:
        """The mean, and half the width of its confidence interval."""
        half = self.half
        return f"{self.mean:.4f}" + (f" ± {half:.4f}" if half is not None else "")

    @property
    def kind(self) -> str:
        """Which table it stands in, one of TITLES."""
        if self.verdict.get("disputed") or self.state in (*FAILED, "stale"):
            return "disputed"
        if self.record.field("claim") == "none" or self.state not in PASSED:
            return "others"
        return "records" if has_rank(self.record, self.verdict) else "waiting"

    @property
    def scores(self) -> list[float]:
        """Those of the judge's rooms where it was judged, else the submission's."""
        judged = judged_scores(self.verdict) if self.state in PASSED else []
        return judged or [*self.record.scores.values()]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def beats(self) -> str:
        """The best record before it; what an earlier referee passed says so itself."""
        if self.state != "ranked":
            return self.record.field("beats") or ""
        rival = best_before(self.record.track, self.record.name)
        return rival.name if rival else ""

    @property
    def words(self) -> str:
        """The verdict in words."""
        its = self.verdict
        text = SHOWN[self.state] + (f", {its['date']}" if its else "")
        if its:
            earlier = "earlier " if its["verdict"] in ("pass", "fail") else ""
            text += f", by {earlier}referee {its.get('referee') or 'of no version'}"
        if self.state in FAILED:
            text += ": " + ", ".join(its["failed"][:3])
        elif its.get("left"):
            text += ": " + "; ".join(f"{name}: {why}" for name, why in [*its["left"].items()][:3])
        text += self.words_of_the_judge
        if its.get("disputed"):
            text += f": {its['disputed']}"
        if self.state in ("holds", "pass") and "retrained" in its:
            again = its["retrained"]
            what = again["what"].removesuffix(", expected so")  # a check's words for "as it should"
            text += f"; retrained on {again['date']} by {again['by']} ({again['processor']}): {what}"
        return text

    @property
    def words_of_the_judge(self) -> str:
        """Gain and seeds of the judging, and how many there were."""
        its = self.verdict.get("judged") or {}
        text = ""
        if "gain" in its:
            text += f"; {its['gain']:.4f} below {its['beats']}, p {its['p']:.2g}"
        if its and self.state == "ranked":
            text += f"; seeds {', '.join(its['seeds'])} on {self.verdict['machine']['processor']}"
        if tries := self.verdict.get("judgings"):
            text += f"; judging {tries['folder']} of this folder, {tries['track']} on the track so far"
        return text


def load_entries(track: Track) -> list[Entry]:
    """All folders of a track, the best first. Raises DataError."""
    verdicts = read_verdicts(track.folder)
    entries = []
    for folder in track.records:
        record = Record(folder)
        if errors := schema_errors(record.submission, "submission"):
            raise DataError(f"{folder / 'submission.json'}: {errors[0]}")
        entries.append(Entry(record, verdicts.get(folder.name, {})))
    unknown = sorted(verdicts.keys() - {folder.name for folder in track.records})
    if unknown:
        raise DataError(f"{track.folder / 'verdicts.json'}: speaks of {unknown[0]}, which is no folder")
    return sorted(entries, key=lambda entry: entry.mean)


# --- tables -----------------------------------------------------------------------------------------------


ESCAPED = {sign: "\\" + sign for sign in "\\`*_[]|#!"} | {"<": "&lt;", ">": "&gt;"}


def cell(text: str) -> str:
    """Somebody's words in one cell of a table: no markup, no line ends."""
    return " ".join(text.translate(str.maketrans(ESCAPED)).split())


def row(rank: str, entry: Entry, root: Path) -> str:
    record = entry.record
    date, _, name = record.name.partition("_")
    author, what = (cell(record.field(key) or "") for key in ("author", "what_changed"))
    beats = cell(entry.beats)
    link = f"[{cell(name)}]({record.path.relative_to(root).as_posix()}/)"
    return (
        f"| {rank} | {link} | {author} | {date} | {entry.interval} | {record.total_bytes:,} | "
        f"{record.field('dataset')} | {what} | {beats} | {cell(entry.words)} |\n"
    )


COLUMNS = "rank | record | by | date | bits per byte | bytes | dataset | what changed | beats | verdict"
HEAD = f"| {COLUMNS} |\n{'|---' * (COLUMNS.count('|') + 1)}|\n"
TITLES = {
    "records": "",
    "waiting": "\n**Not judged yet**: what they claim holds. A rank needs the judge's own training.\n\n",
    "others": "\n**Other submissions**: they claim no record, or were not scored again yet.\n\n",
    "disputed": "\n**Disputed**: they fail a check, changed after it, or somebody doubts them.\n\n",
}


def tables(track: Track, entries: list[Entry]) -> str:
    """All of one track in Markdown."""
    head = f"### {track['title']} (`{track.name}`)\n\n{track['hardware']}; "
    flops = f"{track['train_flops']:.0e} operations in " if track.counts_flops else ""
    head += f"{flops}{track['train_seconds']:g} s at most, {track['budget_bytes']:,} bytes\n\n"
    if not entries:
        return head + "No record yet.\n"
    parts = [head]
    for kind, title in TITLES.items():
        chosen = [entry for entry in entries if entry.kind == kind]
        if chosen:
            parts.append(title + HEAD)
            for place, entry in enumerate(chosen, 1):
                parts.append(row(str(place) if kind == "records" else "", entry, track.folder.parent))
    return "".join(parts)


def yardsticks(track: Track, rows: list[Yardstick]) -> str:
    """What stands below a track's records: sizes to compare a record with. Empty without rows."""
    if not rows:
        return ""
    command = f"python -m records.yardsticks records/{track.name} --write"
    lines = [f"\n**What well-known compressors need**: `{command}`\n\n"]
    lines.append("| compressor | version | settings | after | bytes | bits per byte |\n")
    lines.append("|---|---|---|---|---|---|\n")
    for one in rows:
        words = " | ".join(map(cell, (one.name, one.version, one.settings, one.after)))
        lines.append(f"| {words} | {one.bytes:,} | {one.bits_per_byte:.4f} |\n")
    return "".join(lines)


# --- command line -----------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.board", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--records", type=Path, default=RECORDS, help="folder of the tracks")
    add("--check", action="store_true", help="write nothing, exit 1 if something would change")
    add("--html", type=Path, metavar="DIR", help="write a site of pages into this folder, and nothing else")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    tracks = [load_track(path.parent) for path in sorted(args.records.glob("*/track.json"))]
    if args.html:
        from records.board.site import write_site

        print(f"{args.html}: {write_site(args.html, tracks)} pages written")
        return 0
    readme = args.records / "README.md"
    old = read_bytes(readme).decode()
    board = "\n".join(
        tables(track, load_entries(track)) + yardsticks(track, read_yardsticks(track)) for track in tracks
    )
    new, count = re.subn(BOARD, lambda found: found[1] + board + found[2], old, flags=re.DOTALL)
    if not count:
        raise DataError(f"{readme}: no {BOARD}")
    if new == old:
        return 0
    if args.check:
        print(f"{readme}: is not up to date: python -m records.board")
        return 1
    write_whole(readme, new.encode())
    print(f"{readme}: written")
    return 0


def main(argv: list[str] | None = None) -> int:
    open_streams()
    args = parse_args(argv)
    return run(lambda: work(args), "write the board again")
