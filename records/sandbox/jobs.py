"""A record, a track and a machine: all that it takes to run a record's predictor."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import corpus
from data.command import DataError
from data.files import parse_json, read_bytes, scratch_folder
from records.archive.runs import (
    SCRIPT,
    is_run,
    named_dataset,
    named_tokenizer,
    nearest_runs,
    own_track,
    run_artifact,
)
from records.archive.tracks import DATA, RECORDS, Track, load_track, tokenizer_path
from records.sandbox import SandboxError
from records.sandbox.inside import worker
from records.sandbox.limits import Limits
from records.sandbox.predictor import Mode, RemotePredictor, memory_file, on_this_machine, watched

SLOWEST = 8  # how many times slower than the track's machine a machine may be
SPEED_SIZE = 1024  # of the square matrices whose product is timed
SPEED_SECONDS = 0.2


@dataclass(frozen=True)
class PredictorJob:
    """A record and how to run it."""

    track: Track
    script: Path
    artifact: Path
    tokenizer_path: Path
    mode: Mode
    limits: Limits
    slowness: float  # of this machine beside the track's
    second: Path | None = None  # file with the second text

    @property
    def device(self) -> str:
        return self.mode.device

    def measured_slowness(self) -> float:
        """`slowness` once more, now."""
        return slowness(self.track)

    def second_documents(self) -> list[bytes] | None:
        """A second text of the same kind, which is in no shard; None if the track has none.

        It comes from a file, or, for the demo corpus, from the installed packages. Raises DataError.
        """
        if self.second:
            return read_documents(self.second)
        if self.track.dataset["second"] == "demo":
            return [text for _, text in corpus.demo_documents("second")]
        return None

    @property
    def name(self) -> bytes:
        """Eight bytes of the hash of script and artifact, which identify a record."""
        digest = hashlib.sha256()
        for path in (self.script, self.artifact):
            digest.update(hashlib.sha256(read_bytes(path)).digest())
        return digest.digest()[:8]

    @contextlib.contextmanager
    def predictor(self, scored: bool = True) -> Iterator[RemotePredictor]:
        """The record in a process of its own, which ends with the block.

        No other sandbox lives meanwhile, unless nothing is `scored`: a sample leaves nothing that counts.
        Raises NoSandbox, and SandboxError for whatever the record does wrong, here or in the block.
        """
        seen = {"train_gpt.py": self.script, "model.ptz": self.artifact, "worker.py": worker.__file__}
        free = self.mode.trust or not scored
        machine = contextlib.nullcontext() if free else on_this_machine(sees_text=True)
        with machine, scratch_folder() as stage, memory_file() as memory:
            for name, source in seen.items():
                shutil.copyfile(source, stage / name)
            given = {f"/record/{name}": stage / name for name in seen}
            inside = str(stage) if self.mode.trust else "/record"
            python = [os.path.abspath(sys.executable), "-I", "-B", "-u", f"{inside}/worker.py"]
            words = [*python, inside, self.mode.device, str(memory.fileno())]
            sandbox = given, self.track["imports"], self.mode, self.limits
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            with watched(words, *sandbox, (memory.fileno(),), **pipes) as watchdog:
                try:
                    yield RemotePredictor(memory, watchdog, self.track["rows"])
                except SandboxError as error:
                    where = f"{self.script}: " if error.kind == "record" else ""
                    raise SandboxError(error.kind, f"{where}{error}") from None


def read_documents(path: Path) -> list[bytes]:
    """Raw documents: a JSON string a line. Raises DataError."""
    try:
        lines = read_bytes(path).decode().split("\n")
        return [parse_json(line).encode() for line in lines if line]
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: {error}; expected a JSON string a line, one for a document") from None


def processor_speed(size: int = SPEED_SIZE) -> float:
    """float32 operations in a processor second of one core, measured with products of matrices of a size."""
    matrices = np.ones((SPEED_SIZE**2 // size**2, size, size), np.float32)
    count = 0
    began = time.process_time()
    while time.process_time() - began < SPEED_SECONDS:
        np.matmul(matrices, matrices)
        count += len(matrices)
    return 2 * size**3 * count / (time.process_time() - began)


def slowness(track: Track) -> float:
    """How many times more processor seconds than the track's machine this one needs now, measured.

    At least 1, and at most SLOWEST.
    """
    return float(np.clip(track["eval_gflops"] * 1e9 / processor_speed(), 1, SLOWEST))


def find_track(record: Path, data: Path, track: Path | None, dataset: str | None) -> Track:
    """The track that is given, in whose folder a record lies, or, of a run, the first with its dataset.

    A folder whose text is no track's gets rules of its own. Raises DataError.
    """
    home = track or record.resolve().parent
    name = dataset or named_dataset(record)
    if track or (home / "track.json").exists():
        return load_track(home).using(name)
    wanted = named_tokenizer(record)
    for path in sorted(RECORDS.glob("*/track.json")) if name and is_run(record) else ():
        with contextlib.suppress(DataError):  # not this track's
            rules = load_track(path.parent).using(name)
            if dataset or not wanted or rules.dataset["tokenizer_sha256"] in (None, wanted):
                return rules
    return own_track(record, wanted, data).using(dataset)


def find_artifact(record: Path) -> Path:
    """A record's first artifact, or a run's. Raises DataError."""
    if is_run(record):
        artifact = run_artifact(record)
        if not artifact.exists():
            mend = f"to resume it, train with RUN_ID={record.name} and the settings that begin its train.log"
            raise DataError(f"{record}: holds no {artifact.name}, which a run writes at its end; {mend}")
        return artifact
    artifacts = sorted(record.glob("model*"))
    if not artifacts:
        raise DataError(f"{record}: is no run, and holds no model_seed<N>.ptz; --artifact names the file")
    return artifacts[0]


def find_job(
    record: Path,
    track: Path | None = None,
    artifact: Path | None = None,
    data: Path = DATA,
    device: str | None = None,
    trust: bool = False,
    second: Path | None = None,
    dataset: str | None = None,
    alone: bool = False,
) -> PredictorJob:
    """The job of a record's folder; None takes what the folder or its track says. Raises DataError.

    `alone`: the job is for one stream only.
    """
    if not record.is_dir():
        raise DataError(f"{record}: no such folder{nearest_runs(record)}")
    script = record / SCRIPT
    artifact = artifact or find_artifact(record)
    if not script.exists():
        raise DataError(f"{record}: holds no {SCRIPT}, expected the script that made its model")
    for path in (script, artifact):
        read_bytes(path)
    rules = find_track(record, data, track, dataset)
    slow = slowness(rules)
    seconds = 2 * slow * rules["eval_seconds"]  # the exact limit is a check of the score
    device = device or rules["device"]
    hidden = (data / "datasets", *([second] if second else []))
    return PredictorJob(
        rules,
        script,
        artifact,
        tokenizer_path(rules, data),
        Mode(device, trust, alone, device == "cpu", hidden),
        Limits(processor=seconds, seconds=2 * seconds, answer=seconds / 2),
        slow,
        second,
    )
