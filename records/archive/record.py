"""A record's folder as one object: its track, its submission, its runs and its artifacts."""

import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data.command import DataError
from data.files import read_bytes, read_json
from records.archive.folders import SCRIPT, artifact_paths
from records.archive.submission import ClaimedRun, read_runs
from records.archive.tracks import Track, load_track

OF_ONE_RUN = ("SEED", "RUN_ID")  # settings in which the runs of one record may differ
OF_THE_ROOM = (*OF_ONE_RUN, "DATA_PATH", "TOKENIZER_PATH", "DTYPE")  # which a sealed room sets itself


@dataclass(frozen=True)
class ArtifactAddress:
    """Where an artifact lies that is not in the folder, and how it is known again."""

    at: str  # hub:user/name@commit
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Record:
    """A record's folder, whose files are read when they are needed. All properties raise DataError."""

    path: Path
    frozen_as: str | None = None  # the name that a folder which still grows will have
    track_folder: Path | None = None  # of a record that was fetched, and lies in no track's folder

    @property
    def name(self) -> str:
        """<YYYY-MM-DD>_<Name>"""
        return self.frozen_as or self.path.name

    @property
    def home(self) -> Path:
        """Its track's folder."""
        return self.track_folder or self.path.parent

    @cached_property
    def track(self) -> Track:
        """The track, with the vocabulary that the record names."""
        track = load_track(self.home)
        try:
            return track.using(self.field("dataset"))
        except DataError:  # which check_submission reports
            return track

    @cached_property
    def submission(self) -> dict:
        return read_json(self.path / "submission.json")

    @cached_property
    def script(self) -> bytes:
        return read_bytes(self.path / SCRIPT)

    @cached_property
    def runs(self) -> dict[int, ClaimedRun]:
        return read_runs(self.path)

    @cached_property
    def artifacts(self) -> dict[int, Path]:
        return artifact_paths(self.path)

    @cached_property
    def addresses(self) -> dict[int, ArtifactAddress]:
        """Of artifacts that lie on the hub, by seed. An artifact may lie in the folder, too."""
        named = self.submission.get("artifacts", {})
        return {int(seed): ArtifactAddress(**about) for seed, about in named.items()}

    @cached_property
    def settings(self) -> bytes:
        """What a sealed room tells the script as its runs were told: text that no artifact need hold.

        A preset that the script knows says nothing that is not in the script.
        """
        run = next(iter(self.runs.values()))
        told = {name: value for name, value in run.given.items() if name not in OF_THE_ROOM}
        if told["PRESET"].encode() in self.script:
            del told["PRESET"]
        return " ".join(f"{name}={value}" for name, value in told.items()).encode()

    @property
    def code_bytes(self) -> int:
        """Bytes of the script, by the track's rule, and of the settings."""
        return self.track.code_size(self.script) + len(self.settings)

    @property
    def total_bytes(self) -> int:
        """Bytes that must fit the budget: code, and the largest artifact of all seeds."""
        return max(self.values("artifact_bytes")) + self.code_bytes

    @property
    def scores(self) -> dict[int, float]:
        """The referee's bits per byte by seed."""
        return {int(seed): score for seed, score in self.field("scores").items()}

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores.values())

    @property
    def machine(self) -> dict[str, str | None]:
        about = next(iter(self.runs.values())).about
        return {name: about.get(name) for name in ("processor", "gpu", "threads", "ranks")}

    def field(self, key: str) -> Any:
        """A value of submission.json."""
        if key not in self.submission:
            raise DataError(f"submission.json has no {key}")
        return self.submission[key]

    def values(self, name: str) -> list:
        """A value of every run's log."""
        return [run.value(name) for run in self.runs.values()]
