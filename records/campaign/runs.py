"""The runs of a campaign: one variant with one seed, as a process in the variant's folder."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.command import QUIET, DataError, printable, say
from data.files import parse_json, read_bytes, read_json
from records.archive.runs import METRICS, SCRIPT, ClaimedRun
from records.campaign.variants import Variant


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
        environment = self.variant.environment() | {"SEED": str(self.seed), "RUN_ID": str(self.seed)}
        environment |= {"OMP_NUM_THREADS": str(share.threads)} if share.threads else {}
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


Endings = Iterator[tuple[SeedRun, int | None]]  # as runs end, their exit codes; None: one is at work
Runner = Callable[[list[SeedRun]], Endings]


class Clock:
    """Says on stderr how many runs have ended, and what the others take at most: a try may know sooner."""

    def __init__(self, total: int):
        self.total, self.ended = total, 0
        self.began = self.said = time.monotonic()

    def look(self, run: SeedRun, ended: bool) -> None:
        """Say it when a run has ended, and of one at work where nothing was said for QUIET seconds."""
        now = time.monotonic()
        if not ended and now - self.said < QUIET:
            return
        self.said = now
        self.ended += ended
        line = f"{self.ended} of {self.total} trainings have ended"
        if 0 < self.ended < self.total:
            rest = (now - self.began) * (self.total / self.ended - 1)
            line += f", the rest takes about {rest:.0f} s at most"
        if not ended and run.output.exists():  # a cluster's are elsewhere
            line += f"; {run}: {run.last_lines(1)[0]}"
        print(printable(line), file=sys.stderr, flush=True)


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
            for run, process in [*working.items()]:
                if process.poll() is not None:
                    del working[run]
                yield run, process.returncode
    finally:
        for process in working.values():
            process.terminate()
        for process in working.values():
            process.wait()


def run_all(runs: list[SeedRun], run_them: Runner, of_all: Clock | None = None) -> set[int]:
    """Run what has not ended and print how it ends. Returns the exit codes of the runs that failed.

    `of_all`: these are a part of what it counts, and the first one that fails is the last.
    """
    failed = set()
    missing = [run for run in runs if not run.end()]
    clock = of_all or Clock(len(missing))
    with contextlib.closing(run_them(missing)) as endings:
        for run, code in endings:
            if code is not None:
                failure = run.failure(code)
                say(f"{run}: {failure or f'{run.bpb(False):.4f} bits per byte'}")
                failed |= {code} if failure else set()
                if failure and of_all:
                    break
            clock.look(run, ended=code is not None)
    return failed
