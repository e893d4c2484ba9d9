"""The runs of a campaign: one variant with one seed, as a process in the variant's folder."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.command import DataError, say
from data.files import parse_json, read_bytes, read_json
from records.archive.runs import METRICS, SCRIPT, ClaimedRun
from records.campaign.variants import Variant

# What runs see of our environment: settings of the shell must not change them.
KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Share:
    """The part of a machine that a run gets."""

    threads: int | None = None  # None: as many as torch takes
    gpus: int = 0  # several: a process for each, started by torchrun


@dataclass(frozen=True)
class SeedRun:
    """One variant, one seed."""

    variant: Variant
    seed: int

    def __str__(self) -> str:
        return f"{self.variant.name} {self.seed}"

    @property
    def folder(self) -> Path:
        return self.variant.folder / "logs" / str(self.seed)

    @property
    def output(self) -> Path:
        """Everything that the process of the last attempt printed."""
        return self.variant.folder / f"output_{self.seed}.txt"

    @property
    def score_file(self) -> Path:
        return self.folder / "score.json"

    def start(self, share: Share, **options) -> subprocess.Popen:
        """Start the run's process, which resumes an earlier one."""
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment |= {"OMP_NUM_THREADS": str(share.threads)} if share.threads else {}
        environment |= self.variant.settings | self.variant.dataset.settings
        environment |= {"SEED": str(self.seed), "RUN_ID": str(self.seed)}
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={share.gpus}"]
        words = [sys.executable, *(ranks if share.gpus > 1 else []), SCRIPT]
        with open(self.output, "wb") as out:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            return subprocess.Popen(words, cwd=self.variant.folder, env=environment, **pipes, **options)

    def end(self) -> ClaimedRun | None:
        """The final event; None if the run has not ended."""
        path = self.folder / METRICS
        whole = read_bytes(path).rpartition(b"\n")[0] if path.exists() else b""
        last = whole.rpartition(b"\n")[2]
        if not last.startswith(b'{"event": "final"'):
            return None
        values = {key: str(value) for key, value in parse_json(last).items()}
        return ClaimedRun(str(self.folder), "", values)

    def is_over(self) -> bool:
        """Whether its artifact is over the budget of bytes. It has ended."""
        return self.end().value("budget") == "over"

    def bpb(self, scored: bool) -> float | None:
        """Bits per byte, by its predictor if `scored`, else by its log; None: not known. Raises DataError."""
        if scored:
            return read_json(self.score_file)["val_bpb"] if self.score_file.exists() else None
        end = self.end()
        if end and "partial" in end.final.get("val_bpb", ""):
            raise DataError(f"{self.folder}: scored on a part of the text, though VAL_TOKENS_LIMIT was 0")
        return end and end.value("val_bpb")

    def last_lines(self, count: int) -> list[str]:
        """What the process of the last attempt printed last."""
        lines = self.output.read_text(errors="backslashreplace").split("\n")
        return [line for line in lines if line.strip()][-count:] or ["said nothing"]

    def failure(self, code: int) -> str:
        """Exit code and last line of its process; empty if the run has ended."""
        return "" if self.end() else f"exit code {code}: {self.last_lines(1)[0]}"


Endings = Iterator[tuple[SeedRun, int]]  # runs with the exit codes of their processes, as they end


def run_here(runs: list[SeedRun], at_once: int, share: Share) -> Endings:
    """On this machine. Closed before its end, it stops those that are at work: they write checkpoints."""
    waiting = [*reversed(runs)]
    working: dict[SeedRun, subprocess.Popen] = {}
    try:
        while waiting or working:
            while waiting and len(working) < at_once:
                run = waiting.pop()
                working[run] = run.start(share)
            time.sleep(0.02)
            for run in [run for run, process in working.items() if process.poll() is not None]:
                yield run, working.pop(run).returncode
    finally:
        for process in working.values():
            process.terminate()
        for process in working.values():
            process.wait()


def run_all(
    runs: list[SeedRun], run_them: Callable[[list[SeedRun]], Endings], to_the_end: bool = True
) -> set[int]:
    """Run what has not ended and print how it ends. Returns the exit codes of the runs that failed.

    `to_the_end`: also what comes after a run that failed.
    """
    failed = set()
    with contextlib.closing(run_them([run for run in runs if not run.end()])) as endings:
        for run, code in endings:
            failure = run.failure(code)
            say(f"{run}: {failure or f'{run.bpb(False):.4f} bits per byte'}")
            if failure:
                failed.add(code)
                if not to_the_end:
                    break
    return failed
