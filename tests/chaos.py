"""Kills and signals against the real script, at random moments, counted.

\b
    python -m tests.chaos                all rows, about a quarter of an hour on two cores
    python -m tests.chaos kill world     some rows

One row a promise: tried, survived, and the median of the seconds to the first new step. A try that fails is
reported with the folder that it leaves. No two calls hit the same places: what the machine does at a moment
is not in our hands. What takes no random moment is in tests/trainer/test_reliability.py.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import psutil

from tests.kit import helpers, readme
from tests.kit.launch import Launch, end_of, is_done

JOBS = 2  # calls at a time
SEED = 5
# small as can be, so that a process's life is steps and checkpoints, not arithmetic
SMALL = {"ITERATIONS": 200, "TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 50, "CKPT_SECONDS": 0.05, "RUN_ID": "run"}


class Shared:
    """The corpus, and runs that are made once and left alone, to compare with."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = threading.RLock()
        tokenizer = helpers.train_tokenizer(folder / "tiny.model", helpers.documents(400, 3))
        self.corpus = helpers.make_corpus(folder / "data", tokenizer)


@dataclass
class Try:
    """One call of a row's function: some tries in a folder of their own."""

    shared: Shared
    folder: Path
    rng: random.Random
    index: int  # of the call: rows take their variants in turn
    count: int

    @property
    def run(self) -> Path:
        return self.folder / "logs/run"

    def env(self, ranks: int = 0, **more: Any) -> dict[str, str]:
        slots = max(2, ranks)
        sizes = {"BATCH_SLOTS": slots, "TRAIN_BATCH_TOKENS": 64 * slots}
        return self.shared.corpus.env(**SMALL | sizes | more)

    def launch(self, ranks: int = 0, provoke: str = "", **more: Any) -> Launch:
        return Launch(self.folder, self.env(ranks, **more), ranks, provoke)

    def alone(self, ranks: int = 0, **more: Any) -> Path:
        """The folder of a run that nothing disturbed."""
        folder = self.shared.folder / "_".join(["alone", str(ranks), *map(str, more.values())])
        with self.shared.lock:
            if not folder.exists():
                replace(self, folder=folder).launch(ranks, **more).need(0)
        return folder / "logs/run"

    def check_end(self, ranks: int = 0) -> None:
        assert end_of(self.run) == end_of(self.alone(ranks)), "another end than that of a run alone"

    def resume(self, ranks: int = 0) -> list[float]:
        """Go on to the end, which must be that of a run left alone. The seconds to the first new step."""
        again = self.launch(ranks)
        again.need(0)
        self.check_end(ranks)
        return [again.first_step] if again.first_step else []


# --- rows: kills and signals ------------------------------------------------------------------------------


def again_and_again(task: Try, ranks: int, disturb: Callable[[Try, int], Launch]) -> list[float]:
    """A run is disturbed, resumed, disturbed ... so many times; if it is done too soon, another one is begun.

    The seconds are those to the first step of each.
    """
    seconds, disturbed = [], 0
    while disturbed < task.count:
        first_step = disturb(task, ranks).first_step
        seconds += [first_step] if first_step else []
        if is_done(task.run):  # perhaps between its last line and its end
            task.check_end(ranks)
            shutil.rmtree(task.run)
        else:
            disturbed += 1
    return seconds + task.resume(ranks)


def kill_once(task: Try, ranks: int) -> Launch:
    """Start or go on, and kill: at any moment, or inside a checkpoint's write."""
    rng = task.rng
    provoke = f"cut@{rng.randint(1, 199)}" if rng.random() < 0.3 else ""
    run = task.launch(ranks, provoke, CKPT_SECONDS=rng.choice((1e-6, 0.02, 0.1)))
    if provoke:
        code = run.wait()
    elif rng.random() < 0.15:
        code = run.wait(rng.uniform(0, 6))
    else:
        code = run.wait_for_step(rng.uniform(0, 1))
    if code is None:
        run.kill()
    fine = (None, 0, -signal.SIGKILL, 1) if ranks else (None, 0, -signal.SIGKILL)
    assert code in fine, f"exit {code}: {run.err[-1500:]}"
    return run


def signal_once(task: Try, ranks: int) -> Launch:
    """Start or go on, and signal: to torchrun, or to one rank."""
    number = task.rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    run = task.launch(ranks)
    if run.wait_for_step(task.rng.uniform(0, 1.2)) is not None:
        run.need(0)
        return run
    pids = [run.process.pid, *run.ranks().values()] if ranks else [run.process.pid]
    with contextlib.suppress(ProcessLookupError):  # a rank that ended meanwhile
        os.kill(task.rng.choice(pids), number)
    code = run.wait()
    if not is_done(task.run):
        assert code == (1 if ranks else 16), f"exit {code} after {number.name}: {run.err[-1500:]}"
        said = re.search(r"train_gpt\.py: stopped by a signal .*RUN_ID=run goes on", run.err)
        assert said, f"it does not say how to go on: {run.err[-1500:]}"
    return run


def killed(task: Try) -> list[float]:
    return again_and_again(task, 2 * (task.index % 4 == 3), kill_once)


def signalled(task: Try) -> list[float]:
    return again_and_again(task, 2 * (task.index % 3 == 1), signal_once)


# --- rows: ranks ------------------------------------------------------------------------------------------

WORLDS = [(a, b) for a in (0, 2, 4, 8) for b in (0, 2, 4, 8) if a != b]  # 0: without torchrun
EIGHT = {"BATCH_SLOTS": 8, "TRAIN_BATCH_TOKENS": 512, "ITERATIONS": 60, "DIST_TIMEOUT": 120}


def other_world(task: Try) -> list[float]:
    """Begun on one number of ranks, ended on another: the same losses but for rounding."""
    before, behind = WORLDS[(task.index * 5 + 3) % 12]
    task.launch(before, "kill@30", CKPT_SECONDS=1e-6, **EIGHT).wait()
    assert [*task.run.glob("checkpoint/*.ckpt")], "no checkpoint"
    run = task.launch(behind, **EIGHT)
    run.need(0)
    both = [helpers.events(folder, "step") for folder in (task.run, task.alone(**EIGHT))]
    losses = [[event["train_loss"] for event in events] for events in both]
    assert np.allclose(*losses, rtol=1e-3), "losses differ by more than rounding"
    return [run.first_step]


# --- the table --------------------------------------------------------------------------------------------


class Row(NamedTuple):
    name: str
    promise: str
    calls: int
    each: int  # tries in one call
    attempt: Callable[[Try], list[float]]


ROWS = [
    Row("kill", "SIGKILL at random moments, resumed until done: bit-exact end", 12, 5, killed),
    Row("signal", "SIGTERM, SIGINT, SIGHUP: exit 16, bit-exact end", 4, 5, signalled),
    Row("world", "resumed on other numbers of ranks (1, 2, 4, 8): same losses", 6, 1, other_world),
]


Outcome = tuple[int, list[float], str]


def outcome(row: Row, task: Try) -> Outcome:
    """How many tries of a call survived, its seconds, and why it failed: then it leaves its folder."""
    task.folder.mkdir(parents=True)
    try:
        seconds = row.attempt(task)
    except Exception as error:  # what is wrong in this file counts, too
        where = f"{row.name}: {type(error).__name__}: {error} (see {task.folder})"
        return 0, [], where.splitlines()[0]
    finally:
        end_all_below(task.folder)
    shutil.rmtree(task.folder)
    return task.count, seconds, ""


def end_all_below(folder: Path) -> None:
    """What a failed try leaves running in its folder."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if folder in Path(process.cwd(), "x").parents:
                process.kill()


def cells(row: Row, outcomes: list[Outcome]) -> str:
    """A row of the table."""
    survived = sum(count for count, *_ in outcomes)
    seconds = [second for _, some, _ in outcomes for second in some]
    median = f"{statistics.median(seconds):.1f} s to the first new step" if seconds else "-"
    return readme.table_row(row.promise, str(row.calls * row.each), str(survived), median)


@click.command(help=__doc__)
@click.argument("only", type=click.Choice([row.name for row in ROWS]), nargs=-1)
def main(only: tuple[str, ...]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    shared = Shared(folder)
    begun = {}
    with ThreadPoolExecutor(JOBS) as pool:
        for row in [row for row in ROWS if row.name in only or not only]:
            begun[row] = []
            for index in range(row.calls):
                rng = random.Random(f"{SEED} {row.name} {index}")
                task = Try(shared, folder / row.name / str(index), rng, index, row.each)
                begun[row].append(pool.submit(outcome, row, task))
        print("| promise | tried | survived | median |\n| --- | ---: | ---: | --- |")
        failed = []
        for row, outcomes in begun.items():
            ended = [one.result() for one in outcomes]
            print(cells(row, ended), end="", flush=True)
            failed += [trouble for *_, trouble in ended if trouble]
    if failed:
        sys.exit("\n".join(failed))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
