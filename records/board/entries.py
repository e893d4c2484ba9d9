"""The records of a track as the board shows them: each with its verdict, the best first."""

import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data.command import DataError
from records.archive.judgings import Draw, number_of, read_draws
from records.archive.ranks import Rival, best_before, judged_scores, judged_seeds, standing
from records.archive.record import Record
from records.archive.tracks import Track, schema_errors
from records.archive.verdicts import FAILED, PASSED, folder_sha256, read_verdicts

BEST = 10  # records that the README shows, beside those on the path to the best one
KINDS = ("records", "waiting", "others", "small", "disputed")  # an entry is one of these
STATES = {
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
    draws: tuple[Draw, ...] = ()  # all judgings of the track

    @cached_property
    def sha256(self) -> str:
        """The folder's digest, which reads all of its files: once a command."""
        return folder_sha256(self.record.path)

    @property
    def state(self) -> str:
        """The verdict's word; stale if the folder is no longer what was verified; none."""
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

        scores = self.scores
        if len(scores) < 2:
            return None
        error = stats.sem(scores)
        return float(stats.t.interval(0.95, len(scores) - 1, scale=error)[1]) if error > 0 else 0.0

    @property
    def interval(self) -> str:
        """The mean, and half the width of its confidence interval."""
        half = self.half
        return f"{self.mean:.4f}" + (f" ± {half:.4f}" if half is not None else "")

    @cached_property
    def rival(self) -> Rival | None:
        """The best record before it."""
        return best_before(self.record.track, self.record.name)

    @cached_property
    def kind(self) -> str:
        """Which table it stands in, one of KINDS."""
        its = standing(self.record, self.verdict, self.draws)
        if its:
            return "records" if its.ranks_after(self.rival) else "small"
        if self.verdict.get("disputed") or self.state in (*FAILED, "stale"):
            only_gain = self.state in FAILED and self.verdict["failed"] == ["gain"]
            return "small" if only_gain and not self.verdict.get("disputed") else "disputed"
        return "others" if self.record.field("claim") == "none" or self.state not in PASSED else "waiting"

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
        """The record that it took the first place from, if it has a rank."""
        return self.rival.name if self.rival and self.kind == "records" else ""

    @property
    def words(self) -> str:
        """The verdict in words."""
        its = self.verdict
        text = STATES[self.state] + (f", {its['date']}" if its else "")
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
        """Gain and seeds of the judging, and how many there were of this folder."""
        its = self.verdict.get("judged") or {}
        text = ""
        if "gain" in its:
            text += f"; {its['gain']:.4f} below {its['beats']}, p {its['p']:.2g}"
        if self.state == "ranked" and self.kind == "small" and self.rival:
            text += f"; too little below {self.rival.name}, which stands before it now"
        if its and self.state == "ranked":
            text += f"; seeds {', '.join(its['seeds'])} on {self.verdict['machine']['processor']}"
        total = sum(draw.is_of(self.name, self.sha256) for draw in self.draws)
        if its:
            number = number_of(self.draws, self.name, self.verdict["sha256"], judged_seeds(self.verdict))
            text += f"; judging {number} of {max(number, total)} of this folder"
        elif total:
            text += f"; judgings without a verdict: {total}"
        return text


def whole_record(folder: Path) -> Record:
    """Raises DataError of a submission.json that has not all of its fields."""
    record = Record(folder)
    if errors := schema_errors(record.submission, "submission"):
        raise DataError(f"{folder / 'submission.json'}: {errors[0]}")
    return record


def load_entries(track: Track) -> list[Entry]:
    """All folders of a track, the best first. Raises DataError."""
    verdicts = read_verdicts(track.folder)
    draws = tuple(read_draws(track.folder))
    entries = []
    for folder in track.records:
        entries.append(Entry(whole_record(folder), verdicts.get(folder.name, {}), draws))
    unknown = sorted(verdicts.keys() - {folder.name for folder in track.records})
    if unknown:
        raise DataError(f"{track.folder / 'verdicts.json'}: speaks of {unknown[0]}, which is no folder")
    return sorted(entries, key=lambda entry: entry.mean)


def words_of_judgings(track: Track) -> str:
    """How many judgings there were on a track, also of folders that are gone; empty before the first."""
    draws = read_draws(track.folder)
    folders = {draw.folder for draw in draws}
    return f"judgings so far: {len(draws)}, of folders: {len(folders)}" if draws else ""


def path_to_best(entries: list[Entry]) -> list[Entry]:
    """The records that were the best of their time, in the order of their names: date, then name."""
    path = []
    for entry in sorted(entries, key=lambda one: one.name):
        if entry.kind == "records" and (not path or entry.mean < path[-1].mean):
            path.append(entry)
    return path


def best_and_path(chosen: list[Entry], entries: list[Entry]) -> list[Entry]:
    """Of those that are chosen the BEST first ones and those on the path to the best, in their order."""
    path = {entry.name for entry in path_to_best(entries)}
    return [entry for at, entry in enumerate(chosen) if at < BEST or entry.name in path]
