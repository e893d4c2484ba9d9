"""The machinery of tests/chaos.py: tries in folders of their own, noted in a file, counted and reported."""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from records.archive.submission import cpuinfo
from tests.kit import helpers, launch
from tests.kit.launch import Launch, check_same, end_of

# small as can be, so that a process's life is steps and checkpoints, not arithmetic
SMALL = {"ITERATIONS": 200, "TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 50, "CKPT_SECONDS": 0.05, "RUN_ID": "run"}


class Skip(Exception):
    """What this machine does not let us try."""


class Promise(NamedTuple):
    name: str
    promise: str
    timed: str  # what the median is of
    full: int  # tries
    quick: int
    each: int  # tries in one call
    attempt: Callable[[Campaign, Try], list[float]]


class Try(NamedTuple):
    """One call of a row's function: some tries in a folder of their own."""

    folder: Path
    rng: random.Random
    index: int  # of the call: rows take their variants in turn
    count: int


class Campaign:
    """The corpus, runs left alone to compare with, and the tries so far."""

    def __init__(self, folder: Path, seed: int = 5, quick: bool = False):
        self.folder, self.seed, self.quick = folder, seed, quick
        self.began = time.monotonic()
        self.lock, self.locks = threading.Lock(), collections.defaultdict(threading.Lock)
        folder.mkdir(parents=True, exist_ok=True)
        self.tries = folder / "tries.jsonl"
        self.script = helpers.sha256(helpers.SCRIPT).hex()
        tokenizer = self.made("tokenizer", self.make_tokenizer) / "tiny.model"
        data = self.made("data", lambda path: helpers.make_corpus(path, tokenizer))
        self.corpus = helpers.TinyCorpus(data, tokenizer, {}, {})

    @staticmethod
    def make_tokenizer(folder: Path) -> None:
        helpers.train_tokenizer(folder / "tiny.model", helpers.documents(400, 3))

    def made(self, name: str, make: Callable[[Path], Any]) -> Path:
        """A folder that is made once: what `make` left unfinished is made anew."""
        path, unfinished = self.folder / "made" / name, self.folder / "unfinished" / name
        with self.lock:
            lock = self.locks[name]
        with lock:
            if not path.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
                make(unfinished)
                path.parent.mkdir(exist_ok=True)
                unfinished.rename(path)
        return path

    def env(self, ranks: int = 0, **more: Any) -> dict[str, str]:
        slots = max(2, ranks)
        sizes = {"BATCH_SLOTS": slots, "TRAIN_BATCH_TOKENS": 64 * slots}
        return self.corpus.env(**SMALL | sizes | more)

    def launch(self, cwd: Path, ranks: int = 0, provoke: str = "", **more: Any) -> Launch:
        env = self.env(ranks, **more)
        if provoke:
            env["PROVOKE"] = provoke
        return Launch(cwd, env, launch.command(ranks, provoke))

    def reference(self, ranks: int = 0, **more: Any) -> launch.End:
        """The end of a run left alone."""
        usual = self.env(ranks)
        more = {k: v for k, v in more.items() if str(v) != usual.get(k)}
        name = "_".join(["alone", str(ranks), *(f"{k}={v}" for k, v in sorted(more.items()))])
        folder = self.made(name, lambda cwd: self.launch(cwd, ranks, **more).need(0))
        return end_of(folder / "logs/run")

    def resume(self, cwd: Path, ranks: int = 0, **more: Any) -> list[float]:
        """Go on to the end, which must be that of a run left alone. The seconds to the first new step."""
        again = self.launch(cwd, ranks, **more)
        again.need(0)
        check_same(end_of(cwd / "logs/run"), self.reference(ranks, **more))
        return [again.first_step] if again.first_step else []

    def lines(self) -> list[dict[str, Any]]:
        """What tries.jsonl holds: the campaign, then its tries."""
        if not self.tries.exists():
            return []
        return [json.loads(line) for line in self.tries.read_text(encoding="utf-8").splitlines()]

    def note(self, **facts: Any) -> None:
        with self.lock, open(self.tries, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def tasks(self, row: Promise) -> Iterator[Try]:
        """The calls of a row."""
        tries = row.quick if self.quick else row.full
        for index, done in enumerate(range(0, tries, row.each)):
            rng = random.Random(f"{self.seed} {row.name} {index}")
            yield Try(self.folder / row.name / str(index), rng, index, min(row.each, tries - done))

    def attempt(self, row: Promise, task: Try) -> None:
        """One call of a row, noted in tries.jsonl. What fails loses all its tries."""
        shutil.rmtree(task.folder, ignore_errors=True)  # of a campaign that was cut
        task.folder.mkdir(parents=True)
        began, seconds, failure, skipped = time.monotonic(), [], "", ""
        try:
            seconds = row.attempt(self, task)
        except Skip as error:
            skipped = str(error)
        except Exception as error:  # what is wrong in the campaign itself is noted and counted, too
            failure = f"{row.name}: {type(error).__name__}: {error} (see {task.folder})"
        finally:
            for each in [*launch.STARTED]:
                if task.folder in each.files[0].parents and each.process.poll() is None:
                    each.kill()
        if not failure:
            shutil.rmtree(task.folder)
        tried = 0 if skipped else task.count
        took = time.monotonic() - began
        self.note(
            row=row.name,
            index=task.index,
            tried=tried,
            survived=0 if failure else tried,
            took=took,
            seconds=seconds,
            failure=failure,
            skipped=skipped,
        )

    def run(self, rows: list[Promise], jobs: int, say: Callable[[str], None]) -> list[Outcome]:
        """All tries that are still to be done, so many at a time, evenly over the rows."""
        done = {(line["row"], line["index"]) for line in self.lines() if "row" in line}
        order = []
        for row in rows:
            tasks = [*self.tasks(row)]
            order += [((task.index + 0.5) / len(tasks), row.name, row, task) for task in tasks]
        with ThreadPoolExecutor(jobs) as pool:
            for _, name, row, task in sorted(order):
                if (name, task.index) not in done:
                    pool.submit(self.attempt, row, task)
        results = [self.result(row) for row in rows]
        for result in results:
            say(" | ".join(result.cells()))
            for failure in result.failures:
                say(f"FAILED {failure}")
        return results

    def result(self, row: Promise) -> Outcome:
        lines = [line for line in self.lines() if line.get("row") == row.name]
        tried, survived = (sum(line[name] for line in lines) for name in ("tried", "survived"))
        seconds = [second for line in lines for second in line["seconds"]]
        failures = [line["failure"] for line in lines if line["failure"]]
        skipped = next((line["skipped"] for line in lines if line["skipped"]), "")
        return Outcome(row, tried, survived, seconds, failures, skipped)


class Outcome(NamedTuple):
    """What came of a row."""

    row: Promise
    tried: int
    survived: int
    seconds: list[float]
    failures: list[str]
    skipped: str

    def cells(self) -> tuple[str, ...]:
        if self.skipped and not self.tried:
            return self.row.promise, "-", "-", f"skipped: {self.skipped}"
        median = f"{statistics.median(self.seconds):.1f} s {self.row.timed}" if self.seconds else "-"
        return self.row.promise, str(self.tried), str(self.survived), median


# --- the report ----------------------------------------------------------------------------------------

REPORT = helpers.ROOT / "tests/RELIABILITY.md"


def machine() -> str:
    processor = cpuinfo("model name") or platform.processor()
    return f"{processor}, {os.cpu_count()} cores, {platform.platform()}"


def table(results: list[Outcome]) -> list[str]:
    cells = [("promise", "tried", "survived", "median"), ("---", "---:", "---:", "---")]
    cells += [result.cells() for result in results]
    return ["| " + " | ".join(row) + " |" for row in cells]


def report(campaign: Campaign, results: list[Outcome]) -> str:
    """The text of RELIABILITY.md."""
    head, *tries = campaign.lines()
    minutes = sum(line["took"] for line in tries) / head["jobs"] / 60
    failures = [failure.splitlines()[0] for result in results for failure in result.failures]
    lines = [
        "# Reliability",
        "",
        "What `tests/chaos.py` did to the script, and what survived. Written by one campaign, never by hand:",
        "",
        "```bash",
        head["command"],
        "```",
        "",
        f"{head['date']}, about {minutes:.0f} minutes on {machine()}; torch {torch.__version__}.",
        f"The script: train_gpt.py of commit {head['commit']}, sha256 {head['script']}.",
        "",
        *table(results),
        "",
        *(f"- failed: {failure}" for failure in failures),
    ]
    return "\n".join(lines).rstrip() + "\n"


def commit() -> str:
    """The commit of train_gpt.py, marked if the file is not as committed."""
    git = ["git", "-C", str(helpers.ROOT)]
    log = [*git, "log", "-1", "--format=%h", "--abbrev=12", "--", "train_gpt.py"]
    found = subprocess.run(log, capture_output=True, text=True)
    same = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "train_gpt.py"]).returncode == 0
    return found.stdout.strip() + "" * same + " and changes" * (not same)


def open_campaign(args: argparse.Namespace) -> Campaign:
    """A new one, or one that goes on; it must be of the script as it is now."""
    folder = args.resume or Path(tempfile.mkdtemp(prefix="chaos_"))
    campaign = Campaign(folder, args.seed, args.quick)
    if lines := campaign.lines():
        if (lines[0]["script"], lines[0]["seed"], lines[0]["quick"]) != (
            campaign.script,
            args.seed,
            args.quick,
        ):
            sys.exit(
                f"chaos.py: {folder} is a campaign with another train_gpt.py, --seed or --quick: begin anew"
            )
    else:
        words = ["python -m tests.chaos", f"--seed {args.seed}" * (args.seed != 5), "--quick" * args.quick]
        campaign.note(
            command=" ".join(filter(None, words)),
            script=campaign.script,
            commit=commit(),
            date=time.strftime("%Y-%m-%d"),
            seed=args.seed,
            quick=args.quick,
            jobs=args.jobs,
        )
    return campaign
