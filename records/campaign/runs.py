"""The runs of a campaign: one arm with one seed, as a process in the arm's folder."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from data.command import DataError, say
from data.files import parse_json, read_bytes, read_json
from records.archive.runs import SCRIPT, ClaimedRun
from records.campaign.arms import Arm

# What runs see of our environment: settings of the shell must not change them.
KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Share:
    """The part of a machine that a run gets."""

    threads: int | None = None  # None: as many as torch takes
    gpus: int = 0  # several: a process for each, started by torchrun


def end_with_parent() -> None:
    """Have Linux stop this process when the thread that started it is gone, whatever ended that one."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True)
class ArmRun:
    """One arm, one seed."""

    arm: Arm
    seed: int

    def __str__(self) -> str:
        return f"{self.arm.name} {self.seed}"

    @property
    def folder(self) -> Path:
        return self.arm.folder / "logs" / str(self.seed)

    @property
    def output(self) -> Path:
        """Everything that the process of the last attempt printed."""
        return self.arm.folder / f"output_{self.seed}.txt"

    @property
    def places(self) -> Path:
        """The nodes of a cluster that it was on, a JSON object a line."""
        return self.arm.folder / f"places_{self.seed}.jsonl"

    @property
    def score_file(self) -> Path:
        return self.folder / "score.json"

    def start(self, share: Share, **options) -> subprocess.Popen:
        """Start the run's process, which resumes an earlier one."""
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment |= {"OMP_NUM_THREADS": str(share.threads)} if share.threads else {}
        environment |= self.arm.settings | self.arm.dataset.settings
        environment |= {"SEED": str(self.seed), "RUN_ID": str(self.seed)}
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={share.gpus}"]
        words = [sys.executable, *(ranks if share.gpus > 1 else []), SCRIPT]
        with open(self.output, "wb") as out:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            return subprocess.Popen(words, cwd=self.arm.folder, env=environment, **pipes, **options)

    def end(self) -> ClaimedRun | None:
        """The final event; None if the run has not ended."""
        path = self.folder / "metrics.jsonl"
        whole = read_bytes(path).rpartition(b"\n")[0] if path.exists() else b""
        last = whole.rpartition(b"\n")[2]
        if not last.startswith(b'{"event": "final"'):
            return None
        values = {key: str(value) for key, value in parse_json(last).items()}
        return ClaimedRun(str(self.folder), "", values)

    def bpb(self, scored: bool) -> float | None:
        """Bits per byte, by its predictor if `scored`, else by its log; None: not known. Raises DataError."""
        if scored:
            return read_json(self.score_file)["val_bpb"] if self.score_file.exists() else None
        end = self.end()
        if end and "partial" in end.final.get("val_bpb", ""):
            raise DataError(f"{self.folder}: scored on a part of the text, though VAL_TOKENS_LIMIT was 0")
        return end and end.value("val_bpb")

    def failure(self, code: int) -> str:
        """Exit code and last line of its process; empty if the run has ended."""
        if self.end():
            return ""
        lines = self.output.read_text(errors="backslashreplace").split("\n")
        return f"exit code {code}: {next(filter(str.strip, reversed(lines)), 'said nothing')}"


Endings = Iterator[tuple[ArmRun, int]]  # runs with the exit codes of their processes, as they end

# --- on this machine --------------------------------------------------------------------------------------


def run_here(runs: list[ArmRun], at_once: int, share: Share) -> Endings:
    """So many at a time. Closed before its end, it stops those that are at work: they write checkpoints."""
    stopped = threading.Event()
    lock = threading.Lock()
    started: list[subprocess.Popen] = []

    def run_one(run: ArmRun) -> int:
        with lock:
            if stopped.is_set():
                return signal.SIGTERM
            process = run.start(share)
            started.append(process)
        return process.wait()

    with ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(run_one, run): run for run in runs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            with lock:
                stopped.set()
            for process in started:
                process.terminate()


def run_all(runs: list[ArmRun], run_them: Callable[[list[ArmRun]], Endings]) -> set[int]:
    """Run what has not ended and print how it ends. Returns the exit codes of the runs that failed.

    A KeyboardInterrupt terminates the processes, so that they write checkpoints.
    """
    failed = set()
    with contextlib.closing(run_them([run for run in runs if not run.end()])) as endings:
        for run, code in endings:
            if failure := run.failure(code):
                failed.add(code)
            say(f"{run}: {failure or f'{run.bpb(False):.4f} bits per byte'}")
    return failed
