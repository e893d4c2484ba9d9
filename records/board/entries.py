"""The records of a track as the board shows them: each with its verdict, the best first."""

from dataclasses import dataclass
from functools import cached_property

from data.command import DataError
from records.archive.record import Record
from records.archive.tracks import Track, schema_errors
from records.archive.verdicts import folder_sha256, read_verdicts

BEST = 10  # records that the README shows, beside those on the path to the best one
KINDS = ("records", "waiting", "others", "disputed")  # an entry is one of these
STATES = {
    "pass": "passed",
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

    @cached_property
    def sha256(self) -> str:
        """The folder's digest, which reads all of its files: once a command."""
        return folder_sha256(self.record.path)

    @property
    def state(self) -> str:
        """pass, fail or papers; stale if the folder is no longer what was verified; none."""
        if not self.verdict:
            return "none"
        return self.verdict["verdict"] if self.verdict["sha256"] == self.sha256 else "stale"

    @property
    def name(self) -> str:
        """The folder's, <YYYY-MM-DD>_<Name>."""
        return self.record.name

    @property
    def date(self) -> str:
        return self.name[:10]

    @property
    def short_name(self) -> str:
        """The record's name without its date."""
        return self.name.partition("_")[2]

    @cached_property
    def half(self) -> float | None:
        """Half the width of the mean's 95 % confidence interval by Student's t; None of one score."""
        from scipy import stats  # a second

        scores = [*self.record.scores.values()]
        if len(scores) < 2:
            return None
        error = stats.sem(scores)
        return float(stats.t.interval(0.95, len(scores) - 1, scale=error)[1]) if error > 0 else 0.0

    @property
    def interval(self) -> str:
        """The mean, and half the width of its confidence interval."""
        half = self.half
        return f"{self.record.mean:.4f}" + (f" ± {half:.4f}" if half is not None else "")

    @property
    def kind(self) -> str:
        """Which table it stands in, one of KINDS."""
        if self.verdict.get("disputed") or self.state in ("fail", "stale"):
            return "disputed"
        if self.record.field("claim") == "none" or self.state != "pass":
            return "others"
        return "records" if "retrained" in self.verdict else "waiting"

    @property
    def words(self) -> str:
        """The verdict in words."""
        its = self.verdict
        text = STATES[self.state] + (f", {its['date']}" if its else "")
        if self.state == "fail":
            text += ": " + ", ".join(its["failed"][:3])
        if its.get("disputed"):
            text += f": {its['disputed']}"
        if self.state == "pass" and "retrained" in its:
            again = its["retrained"]
            what = again["what"].removesuffix(", expected so")  # a check's words for "as it should"
            text += f"; retrained on {again['date']} by {again['by']} ({again['processor']}): {what}"
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
    return sorted(entries, key=lambda entry: entry.record.mean)


def path_to_best(entries: list[Entry]) -> list[Entry]:
    """The records that were the best of their time, in the order of their names: date, then name."""
    path = []
    for entry in sorted(entries, key=lambda one: one.name):
        if entry.kind == "records" and (not path or entry.record.mean < path[-1].record.mean):
            path.append(entry)
    return path


def best_and_path(chosen: list[Entry], entries: list[Entry]) -> list[Entry]:
    """Of those that are chosen the BEST first ones and those on the path to the best, in their order."""
    path = {entry.name for entry in path_to_best(entries)}
    return [entry for at, entry in enumerate(chosen) if at < BEST or entry.name in path]
