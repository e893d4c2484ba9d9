"""The records of a track as the board shows them: each with its verdict, the best first."""

import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data.command import DataError
from records.archive.runs import Record
from records.archive.tracks import Track, schema_errors
from records.archive.verdicts import (
    FAILED,
    PASSED,
    Draw,
    ScoredRecord,
    best_before,
    folder_sha256,
    judged_seeds,
    number_of_judging,
    read_draws,
    read_verdicts,
    standing,
)

BEST = 10  # records that the README shows, beside those on the path to the best one
KINDS = {  # an entry is one of these; in words
    "records": "record",
    "waiting": "not judged yet",
    "others": "not scored again yet",
    "small": "not enough gain",
    "disputed": "disputed",
}
STATES = {
    "ranked": "judged",
    "verified": "verified",
    "fails": "failed",
    "unverified": "unverified",
    "pass": "passed",  # this and the next: by earlier referees
    "fail": "failed",
    "checked": "checked",
    "stale": "changed since",
    "none": "never verified",
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
    def short_name(self) -> str:
        """The record's name without its date."""
        return self.name.partition("_")[2]

    @property
    def cells(self) -> dict[str, str]:
        """What tables say of it, by their heads."""
        record = self.record
        found = {"record": self.short_name, "by": record.field("author"), "date": self.name[:10]}
        found |= {"bits per byte": self.interval, "bytes": f"{record.total_bytes:,}"}
        found |= {"dataset": record.field("dataset"), "what changed": record.field("what_changed")}
        if self.built_on:
            found["what changed"] += f" Built on {self.built_on}."
        return found | {"beats": self.beats, "verdict": self.words, "kind": self.kind_words}

    @cached_property
    def half(self) -> float:
        """Half the width of the mean's 95 % confidence interval by Student's t; 0 of one score."""
        from scipy import stats  # a second

        if len(set(self.scores)) < 2:
            return 0.0
        error = stats.sem(self.scores)
        return float(stats.t.interval(0.95, len(self.scores) - 1, scale=error)[1])

    @property
    def interval(self) -> str:
        """The mean, and half the width of its confidence interval."""
        return f"{self.mean:.4f}" + (f" ± {self.half:.4f}" if len(self.scores) > 1 else "")

    @cached_property
    def incumbent(self) -> ScoredRecord | None:
        """The best record before it."""
        return best_before(self.record.track, self.record.name)

    @property
    def built_on(self) -> str:
        """The folder whose script it began with, if it says so."""
        return self.record.submission.get("built_on", "")

    @property
    def before(self) -> Record | None:
        """What its script is held against: the record that it is built on, else the best one before it."""
        for folder in self.record.track.records:
            if folder.name == self.built_on:
                return Record(folder)
        return self.incumbent and self.incumbent.record

    @cached_property
    def kind(self) -> str:
        """Which table it stands in, one of KINDS."""
        its = standing(self.record, self.verdict, self.draws)
        if its:
            return "records" if its.ranks_after(self.incumbent) else "small"
        if self.verdict.get("disputed") or self.state in (*FAILED, "stale"):
            only_gain = self.state in FAILED and self.verdict["failed"] == ["gain"]
            return "small" if only_gain and not self.verdict.get("disputed") else "disputed"
        return "others" if self.record.field("claim") == "none" or self.state not in PASSED else "waiting"

    @property
    def kind_words(self) -> str:
        claims_none = self.kind == "others" and self.record.field("claim") == "none"
        return "claims no record" if claims_none else KINDS[self.kind]

    @property
    def scores(self) -> list[float]:
        """Those of the judge's sandboxes where it was judged, else the submission's."""
        judged = judged_seeds(self.verdict).values() if self.state in PASSED else ()
        scores = [its["score"] for its in judged if "score" in its]
        return scores or [*self.record.scores.values()]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def beats(self) -> str:
        """The record that it took the first place from, if it has a rank."""
        return self.incumbent.name if self.incumbent and self.kind == "records" else ""

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
        if self.state in ("verified", "pass") and "retrained" in its:
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
        if self.state == "ranked" and self.kind == "small" and self.incumbent:
            text += f"; too little below {self.incumbent.name}, which stands before it now"
        if its and self.state == "ranked":
            text += f"; seeds {', '.join(its['seeds'])} on {self.verdict['machine']['processor']}"
        total = sum(draw.is_of(self.name, self.sha256) for draw in self.draws)
        if its:
            number = number_of_judging(self.verdict, self.name, self.draws)
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
