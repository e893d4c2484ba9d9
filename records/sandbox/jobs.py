"""A record, a track and a machine: all that it takes to run a record's predictor."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.command import REPO, DataError, printable
from data.files import read_bytes, sha256
from records.archive.folders import SCRIPT, run_artifact
from records.archive.runs import configuration, is_run, named_dataset, named_tokenizer, own_track
from records.archive.tracks import DATA, RECORDS, Track, is_ours, load_track, tokenizer_path
from records.sandbox.inside import worker
from records.sandbox.limits import Limits, Watchdog
from records.sandbox.predictor import Mode, RemotePredictor, SandboxError, memory_file, watched

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
    own_tokenizer: bool = False  # which a stranger made

    @property
    def name(self) -> bytes:
        """Eight bytes of the hash of script and artifact, which identify a record."""
        digest = hashlib.sha256()
        for path in (self.script, self.artifact):
            digest.update(hashlib.sha256(read_bytes(path)).digest())
        return digest.digest()[:8]

    @contextlib.contextmanager
    def predictor(self) -> Iterator[RemotePredictor]:
        """The record in a process of its own, which ends with the block.

        Raises NoSandbox, and SandboxError for whatever the record does wrong, here or in the block.
        """
        seen = {"train_gpt.py": self.script, "model.ptz": self.artifact, "worker.py": worker.__file__}
        with tempfile.TemporaryDirectory(prefix="bytegolf-record-") as stage, memory_file() as memory:
            os.chmod(stage, 0o755)  # another user reads it
            for name, source in seen.items():
                shutil.copyfile(source, f"{stage}/{name}")
                os.chmod(f"{stage}/{name}", 0o644)
            inside = stage if self.mode.trust else "/record"
            python = [os.path.abspath(sys.executable), "-I", "-B", "-u", f"{inside}/worker.py"]
            words = [*python, inside, self.mode.device, str(memory.fileno())]
            room = [(Path(stage), inside, False)], self.track["imports"], self.mode, self.limits
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            with watched(words, *room, (memory.fileno(),), **pipes) as watchdog:
                yield self.loaded(memory, watchdog)

    def loaded(self, memory: BinaryIO, watchdog: Watchdog) -> RemotePredictor:
        """The predictor once it is there. Raises SandboxError, which names a script that cannot load."""
        try:
            return RemotePredictor(memory, watchdog, self.track["rows"])
        except SandboxError as error:
            if error.kind != "record":
                raise
            text = f"{self.script} cannot load {self.artifact}: {error}"
            raise SandboxError(error.kind, text) from None


def processor_speed() -> float:
    """float32 operations in a processor second of one core, measured with a product of matrices."""
    matrix = np.ones((SPEED_SIZE, SPEED_SIZE), np.float32)
    count = 0
    began = time.process_time()
    while time.process_time() - began < SPEED_SECONDS:
        np.matmul(matrix, matrix)
        count += 1
    return 2 * SPEED_SIZE**3 * count / (time.process_time() - began)


def slowness(track: Track) -> float:
    """How many times more processor seconds than the track's machine this one needs now, measured.

    At least 1, and at most SLOWEST.
    """
    return float(np.clip(track["eval_gflops"] * 1e9 / processor_speed(), 1, SLOWEST))


def find_track(record: Path, artifact: Path, data: Path, dataset: str | None) -> Track:
    """The track in whose folder a record lies, or, for a run, the first one with the run's dataset.

    A folder whose text is no track's gets rules of its own. Raises DataError.
    """
    home = record.resolve().parent
    name = dataset or named_dataset(record)
    if (home / "track.json").exists():
        return load_track(home).using(name)
    wanted = named_tokenizer(record, artifact)
    for path in sorted(RECORDS.glob("*/track.json")) if name and is_run(record) else ():
        with contextlib.suppress(DataError):  # not this track's
            track = load_track(path.parent).using(name)
            if dataset or not wanted or track.dataset["tokenizer_sha256"] in (None, wanted):
                return track
    return own_track(record, wanted, data).using(dataset)


def warn_of_another_script(run: Path) -> None:
    """Warn if the repository's script, which loads a run's artifact, is not the script that trained it."""
    wrote = configuration(run).get("script_sha256")
    if wrote not in (None, sha256(read_bytes(REPO / SCRIPT))):
        words = f"{run}: was written by another {SCRIPT} than is here now, script_sha256 {wrote!s:.16}"
        mend = f"put that {SCRIPT} into the folder, and it is loaded in its place"
        print(f"warning: {printable(words)}; {mend}", file=sys.stderr)


def find_artifact(record: Path) -> Path:
    """The artifact of a run, or the first one of a record. Raises DataError."""
    if is_run(record) and not run_artifact(record).exists():
        raise DataError(f"{record}: holds no {run_artifact(record).name}, which a run writes at its end")
    found = [run_artifact(record)] if is_run(record) else sorted(record.glob("model*"))
    if not found:
        raise DataError(f"{record}: holds no model_seed<N>.ptz; --artifact names the file")
    return found[0]


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
        raise DataError(f"{record}: no such folder")
    script = record / SCRIPT
    if not script.exists() and is_run(record):
        script = REPO / SCRIPT
        warn_of_another_script(record)
    artifact = artifact or find_artifact(record)
    for path in (script, artifact):
        read_bytes(path)
    if track:
        rules = load_track(track).using(dataset or named_dataset(record))
    else:
        rules = find_track(record, artifact, data, dataset)
    slow = slowness(rules)
    seconds = 2 * slow * rules["eval_seconds"]  # the exact limit is a check of the score
    tokenizer = tokenizer_path(rules, data, record)
    hidden = (data / "datasets", *([second] if second else []))
    return PredictorJob(
        rules,
        script,
        artifact,
        tokenizer,
        Mode(device or rules["device"], trust, alone, hidden=hidden),
        Limits(processor=seconds, seconds=2 * seconds, answer=seconds / 2),
        slow,
        second,
        own_tokenizer=not is_ours(tokenizer, data),
    )
