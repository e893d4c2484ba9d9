"""A record's folder: the names and sizes that its files may have, and the folder as one object."""

import re
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from data.command import DataError
from data.files import read_bytes, read_json
from records.archive.runs import MAX_METRICS, PACKED, SCRIPT, ClaimedRun, parse_run, read_metrics
from records.archive.tracks import Track, load_track

FOLDER = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})_([A-Za-z0-9][A-Za-z0-9-]{0,59})")
SEED = "seed(?:0|[1-9][0-9]{0,9})"  # one way to write each number: seed01 would be seed1 again
FILES = re.compile(
    r"README\.md|submission\.json|train_gpt\.py"
    rf"|train_{SEED}\.log|metrics_{SEED}\.jsonl(?:\.gz)?|model_{SEED}\.ptz"
)
MAX_SEEDS = 60  # of a record
MOST_FILES = 3 * (1 + MAX_SEEDS)  # README, submission and script; of each seed log, metrics and artifact
MAX_PAPERS = 64 << 20  # bytes of the logs and metrics of all seeds, unpacked
MAX_FILE = {".log": 4 << 20, ".jsonl": MAX_METRICS, ".md": 1 << 17, ".json": 1 << 20, ".py": 1 << 20}
MAX_FILE |= {PACKED: 16 << 20}
OF_ONE_RUN = ("SEED", "RUN_ID")  # settings in which the runs of one record may differ
OF_THE_SANDBOX = (*OF_ONE_RUN, "DATA_PATH", "TOKENIZER_PATH", "DTYPE")  # which the judge sets itself


def most_bytes(path: PurePath, budget: int) -> int:
    """How large a file of a record may be, by its name; an artifact has the track's budget."""
    return MAX_FILE.get(path.suffix, budget)


def is_address(place: object) -> bool:
    """Whether a command names a repo of the hub in place of a folder: hub:user/name[@commit]."""
    return str(place).startswith("hub:")


def seed_of(name: str) -> int:
    return int(re.search(r"seed(\d+)", name)[1])


def metrics_path(folder: Path, seed: int) -> Path:
    """The metrics of a seed, packed or not. Where they lie in both forms, verify fails the folder."""
    plain = folder / f"metrics_seed{seed}.jsonl"
    packed = plain.with_name(plain.name + PACKED)
    return packed if packed.exists() and not plain.exists() else plain


def read_runs(folder: Path) -> dict[int, ClaimedRun]:
    """The runs of a record's folder by seed. Raises DataError."""
    runs = {}
    left = MAX_PAPERS
    for path in sorted(folder.glob("train_seed*.log")):
        seed = seed_of(path.name)
        log = read_bytes(path)
        metrics = read_metrics(metrics_path(folder, seed))
        left -= len(log) + len(metrics)
        if left < 0:
            raise DataError(f"{folder}: logs and metrics have more than {MAX_PAPERS} bytes, unpacked")
        runs[seed] = parse_run(path.name, log, metrics)
    if not runs:
        raise DataError(f"{folder}: holds no train_seed<N>.log")
    return runs


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
        return {seed_of(path.name): path for path in sorted(self.path.glob("model_seed*.ptz"))}

    @cached_property
    def addresses(self) -> dict[int, ArtifactAddress]:
        """Of artifacts that lie on the hub, by seed. An artifact may lie in the folder, too."""
        named = self.submission.get("artifacts", {})
        return {int(seed): ArtifactAddress(**about) for seed, about in named.items()}

    @cached_property
    def settings(self) -> bytes:
        """What the judge sets for the script as its runs had it set: text that no artifact need hold.

        A preset that the script knows says nothing that is not in the script.
        """
        run = next(iter(self.runs.values()))
        given = {name: value for name, value in run.given.items() if name not in OF_THE_SANDBOX}
        if given["PRESET"].encode() in self.script:
            del given["PRESET"]
        return " ".join(f"{name}={value}" for name, value in given.items()).encode()

    @property
    def code_bytes(self) -> int:
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
        if key not in self.submission:
            raise DataError(f"submission.json has no {key}")
        return self.submission[key]

    def values(self, name: str) -> list:
        return [run.value(name) for run in self.runs.values()]
