"""The records of a track as the board shows them: each with its verdict, the best first."""

import statistics
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote

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
    number_of_evaluation,
    read_draws,
    read_verdicts,
    standing,
)

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
    draws: tuple[Draw, ...] = ()  # all evaluations of the track

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
    def address(self) -> str:
        """Of its page in a site, from the page of all records."""
        return f"{quote(self.record.track.name)}/{quote(self.name)}.html"

    @property
    def cells(self) -> dict[str, str]:
        """What tables say of it, by their heads."""
        record = self.record
        built_on = f" Built on {self.built_on}." if self.built_on else ""
        return {
            "record": self.short_name,
            "by": record.field("author"),
            "date": self.name[:10],
            "bits per byte": self.interval,
            "bytes": f"{record.total_bytes:,}",
            "dataset": record.field("dataset"),
            "what changed": record.field("what_changed") + built_on,
            "beats": self.beats,
            "verdict": self.words,
            "kind": self.kind_words,
        }

    @property
    def facts(self) -> dict[str, str]:
        """What its own page says of it, by name; without what it does not say."""
        record, cells = self.record, self.cells
        seeds = f"{len(self.scores)} seeds of {'the judge' if self.judged else 'its author'}"
        found = {
            "bits per byte": f"{self.interval}, the mean of {seeds} and its 95 % interval",
            "verdict": cells["verdict"],
            "by": cells["by"],
            "date": cells["date"],
            "dataset": cells["dataset"],
            "bytes": f"{cells['bytes']} of {record.track['budget_bytes']:,}",
            "beats": self.beats,
            "built on": self.built_on,
            "idea from": record.submission.get("idea_from"),
            "folder": f"records/{record.track.name}/{self.name}",
        }
        return {name: words for name, words in found.items() if words}

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
    def judged(self) -> dict[str, dict]:
        """By seed what the verdict keeps of those that the judge trained and scored."""
        seeds = judged_seeds(self.verdict) if self.state in PASSED else {}
        return {seed: its for seed, its in seeds.items() if "score" in its}

    @property
    def scores(self) -> list[float]:
        """Those of the judge's seeds where it was judged, else the submission's."""
        judged = [its["score"] for its in self.judged.values()]
        return judged or [*self.record.scores.values()]

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
        parts = [self.outcome, *self.words_of_the_judge]
        if doubt := self.verdict.get("disputed"):
            parts.append(f"disputed: {doubt}")
        if self.state in ("verified", "pass") and "retrained" in self.verdict:
            again = self.verdict["retrained"]
            what = again["what"].removesuffix(", expected so")  # a check's words for "as it should"
            parts.append(f"retrained on {again['date']} by {again['by']} ({again['processor']}): {what}")
        return "; ".join(parts)

    @property
    def outcome(self) -> str:
        """The state, by whom, and the reasons."""
        its = self.verdict
        if not its:
            return STATES["none"]
        number, plus, _ = (its.get("referee") or "").partition("+")  # the first ones had no number
        referee = f"referee {number}" if plus else "an earlier referee"
        left = [f"{name}: {why}" for name, why in its.get("left", {}).items()]
        reasons = its["failed"] if self.state in FAILED else left
        why = ": " + ", ".join(reasons[:3]) if reasons else ""
        return f"{STATES[self.state]}, {its['date']}, by {referee}{why}"

    @property
    def words_of_the_judge(self) -> list[str]:
        """Gain and seeds of the evaluation, and how many there were of this folder."""
        its = self.verdict.get("judged") or {}
        total = sum(draw.is_of(self.name, self.sha256) for draw in self.draws)
        if not its:
            return [f"evaluations without a verdict: {total}"] if total else []
        found = []
        if "gain" in its:
            found.append(f"{its['gain']:.4f} below {its['beats']}, p {its['p']:.2g}")
        if self.state == "ranked" and self.kind == "small" and self.incumbent:
            found.append(f"too little below {self.incumbent.name}, which stands before it now")
        if self.state == "ranked":
            processor = self.verdict["machine"]["processor"]
            found.append(f"seeds {', '.join(its['seeds'])} on {processor}")
        number = number_of_evaluation(self.verdict, self.name, self.draws)
        return [*found, f"evaluation {number} of {max(number, total)} of this folder"]


def load_entries(track: Track) -> list[Entry]:
    """All folders of a track, the best first. Raises DataError."""
    verdicts = read_verdicts(track.folder)
    draws = tuple(read_draws(track.folder))
    entries = []
    for folder in track.records:
        record = Record(folder)
        if errors := schema_errors(record.submission, "submission"):
            raise DataError(f"{folder / 'submission.json'}: {errors[0]}")
        entries.append(Entry(record, verdicts.get(folder.name, {}), draws))
    return sorted(entries, key=lambda entry: entry.mean)
