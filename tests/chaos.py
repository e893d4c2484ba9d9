"""The campaign: kills, signals, damage, full disks and lost machines against the real script, counted.

    python tests/chaos.py                       everything, about 40 minutes on two cores
    python tests/chaos.py --quick               a few tries of each, about two minutes: what CI does
    python tests/chaos.py --only kill,disk      some rows; --seed N: other moments
    python tests/chaos.py --cost --write        the guards' cost too, and all results to tests/RELIABILITY.md

One row a promise: tried, survived, and the median of what the row times. A try that fails is told with the
folder it leaves. What this machine does not allow (mounts, network namespaces) is skipped and said. The
moments come from the seed; what the machine is doing then does not, so no two campaigns hit the same places.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np

import helpers

sys.path.insert(0, str(helpers.ROOT))
import train_gpt  # noqa: E402

PATIENCE = 280.0    # seconds that any process gets: nothing here takes a tenth of it
MARGIN = 10.0       # seconds beyond DIST_TIMEOUT in which a rank has ended: Python's exit on a busy machine
FIRST_STEP = re.compile(r"^step:\d+/\d+ train_loss", re.M)
# small as can be, so that a process's life is steps and checkpoints, not arithmetic
SMALL = dict(ITERATIONS=200, TRAIN_LOG_EVERY=1, VAL_LOSS_EVERY=50, CKPT_SECONDS=0.05, RUN_ID="run")


class Broken(Exception):
    """A promise that did not hold."""


class Skip(Exception):
    """What this machine does not let us try."""


def check(ok: Any, text: str) -> None:
    if not ok:
        raise Broken(text)


# --- processes --------------------------------------------------------------------------------------------

def descendants(pid: int) -> list[int]:
    """The process and all below it, parents first."""
    parents = collections.defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):      # it ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(fields[1])].append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += parents[each]
    return found


def state_of(pid: int) -> str:
    """R, S, D running, T stopped, Z ended, or nothing: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def ended(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


class Launch:
    """The script started in `cwd`, alone or under torchrun; what it prints goes to files there."""
    started: list[Launch] = []

    def __init__(self, cwd: Path, env: dict[str, str], command: list[str]):
        cwd.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in cwd.glob("*.out"))
        self.files = cwd / f"{number}.out", cwd / f"{number}.err"
        self.began, self.first_step = time.monotonic(), None
        with open(self.files[0], "w") as out, open(self.files[1], "w") as err:
            self.process = subprocess.Popen(command, cwd=cwd, env=helpers.clean_environment(**env),
                                            stdout=out, stderr=err, start_new_session=True)
        self.started.append(self)

    out = property(lambda self: self.files[0].read_text(encoding="utf-8", errors="replace"))
    err = property(lambda self: self.files[1].read_text(encoding="utf-8", errors="replace"))

    def look(self) -> bool:
        """Whether it still runs; notes when its first step was told."""
        running = self.process.poll() is None
        if self.first_step is None and FIRST_STEP.search(self.out):
            self.first_step = time.monotonic() - self.began
        return running

    def wait(self, seconds: float = PATIENCE, until: Callable[[], Any] = lambda: False) -> int | None:
        """The exit code, or None after so many seconds or when `until` holds."""
        end = time.monotonic() + seconds
        while self.look():
            if until():
                return None
            if time.monotonic() > end:
                if seconds < PATIENCE:
                    return None
                self.kill()
                raise Broken(f"still runs after {seconds:.0f} s")
            time.sleep(0.01)
        return self.process.returncode

    def wait_for_step(self, more: float = 0.0) -> int | None:
        """Until the first step is told and some seconds more; the exit code if it ends before."""
        code = self.wait(until=lambda: self.first_step is not None)
        return code if code is not None else self.wait(more)

    def kill(self) -> None:
        """SIGKILL to all its processes, parents first: as when the power fails."""
        for pid in descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks under torchrun."""
        found = {}
        for pid in descendants(self.process.pid)[1:]:
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if rank := re.search(rb"(?:^|\0)RANK=(\d+)\0", environment):
                    found.setdefault(int(rank[1]), pid)
        return found


def under(torchrun: list[str]) -> list[str]:
    """The script under torchrun with options of our own."""
    return [sys.executable, "-m", "torch.distributed.run", *torchrun, str(helpers.SCRIPT)]


def need_ok(launch: Launch, *codes: int) -> None:
    """The launch ends with one of these exit codes, and without a traceback of ours."""
    code = launch.wait()
    check(code in codes, f"exit {code}, expected {codes}: {launch.err[-1500:]}")
    check("Traceback" not in launch.err.split("torch/distributed")[0], f"a traceback: {launch.err[-1500:]}")


# --- what a run leaves ------------------------------------------------------------------------------------

class End(NamedTuple):
    """What must be equal of two runs that did the same."""
    hashes: dict[str, Any]
    steps: list[dict[str, Any]]
    vals: list[dict[str, Any]]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def is_done(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and b'"event": "final"' in metrics.read_bytes()


def end_of(folder: Path) -> End:
    """Read a finished run: without its seconds. Raises Broken if it is not finished."""
    told = [{k: v for k, v in event.items() if "seconds" not in k} for event in events(folder)]
    final = [event for event in told if event["event"] == "final"]
    check(len(final) == 1, f"{len(final)} final events in {folder}")
    artifact = helpers.sha256(folder / "model.int8.ptz").hex()
    check(artifact == final[0]["artifact_sha256"], "the artifact is not the one that the run tells of")
    check(not list(folder.rglob("*.part")), "a part of a file is left")
    names = ("state_sha256", "artifact_sha256", "batches_crc32", "val_bpb", "steps", "tokens_seen")
    return End({name: final[0][name] for name in names}, [e for e in told if e["event"] == "step"],
               [e for e in told if e["event"] == "val"])


def check_steps(found: End, count: int) -> None:
    check([e["step"] for e in found.steps] == list(range(1, count + 1)), "steps twice or missing")


def check_same(found: End, expected: End) -> None:
    """To the last bit, every step told once."""
    check_steps(found, len(expected.steps))
    for one, other in zip(found.steps, expected.steps):
        check(one == other, f"a step differs: {one}, expected {other}")
    check(found.hashes == expected.hashes, f"the end differs: {found.hashes}, expected {expected.hashes}")
    check(found.vals == expected.vals, f"validations differ: {found.vals}, expected {expected.vals}")


def whole_checkpoint(run: Path) -> int:
    """The step of the run's newest checkpoint, which must be whole; 0 where there is none."""
    paths = sorted((run / "checkpoint").glob("step_*.ckpt"))
    return train_gpt.decode_checkpoint(paths[-1].read_bytes(), str(paths[-1]))[1]["step"] if paths else 0


# --- the campaign -----------------------------------------------------------------------------------------

class Row(NamedTuple):
    name: str
    promise: str
    timed: str          # what the median is of
    full: int           # tries
    quick: int
    each: int           # tries in one call
    attempt: Callable[[Campaign, Try], list[float]]


class Try(NamedTuple):
    """One call of a row's function: some tries in a folder of their own."""
    folder: Path
    rng: random.Random
    index: int          # of the call: rows take their variants in turn
    count: int


@functools.cache
def lock_of(name: str) -> threading.Lock:
    return threading.Lock()


class Campaign:
    """The corpus, runs left alone to compare with, and the results."""
    def __init__(self, folder: Path, seed: int, quick: bool, minutes: float):
        self.folder, self.seed, self.quick = folder, seed, quick
        self.deadline = time.monotonic() + 60 * minutes
        tokenizer = helpers.train_tokenizer(folder / "tiny.model", helpers.documents(400, 3))
        self.corpus = helpers.make_corpus(folder / "data", tokenizer)
        self.lock, self.counts = threading.RLock(), collections.Counter()

    def env(self, ranks: int = 0, **more: Any) -> dict[str, str]:
        slots = max(2, ranks)
        sizes = dict(BATCH_SLOTS=slots, TRAIN_BATCH_TOKENS=64 * slots)
        return self.corpus.env(**SMALL | sizes | more)

    def launch(self, cwd: Path, ranks: int = 0, **more: Any) -> Launch:
        return Launch(cwd, self.env(ranks, **more), helpers.command(ranks))

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder that is made once."""
        path = self.folder / "made" / name
        with self.lock:
            lock = lock_of(str(path))
        with lock:
            if not path.exists():
                path.mkdir(parents=True)
                make(path)
        return path

    def reference(self, ranks: int = 0, **more: Any) -> End:
        """The end of a run left alone."""
        usual = self.env(ranks)
        more = {k: v for k, v in more.items() if str(v) != usual.get(k)}
        name = "_".join(["alone", str(ranks), *(f"{k}={v}" for k, v in sorted(more.items()))])
        folder = self.made(name, lambda cwd: need_ok(self.launch(cwd, ranks, **more), 0))
        return end_of(folder / "logs/run")

    def count(self, what: str, number: int = 1) -> None:
        with self.lock:
            self.counts[what] += number

    def resume(self, cwd: Path, ranks: int = 0, **more: Any) -> list[float]:
        """Go on to the end, which must be that of a run left alone. The seconds to the first new step."""
        launch = self.launch(cwd, ranks, **more)
        need_ok(launch, 0)
        check_same(end_of(cwd / "logs/run"), self.reference(ranks, **more))
        return [launch.first_step] if launch.first_step else []


class Result(NamedTuple):
    row: Row
    tried: int
    survived: int
    seconds: list[float]
    failures: list[str]
    skipped: str

    def cells(self) -> tuple[str, ...]:
        median = f"{statistics.median(self.seconds):.1f} s {self.row.timed}" if self.seconds else "-"
        if self.skipped and not self.tried:
            return self.row.promise, "-", "-", f"skipped: {self.skipped}"
        some = f"{self.tried} of {self.row.full}" if self.skipped else str(self.tried)
        return self.row.promise, some, str(self.survived), median


def attempt(campaign: Campaign, row: Row, task: Try) -> tuple[int, list[float], str, str]:
    """(tries, seconds, failure, reason to skip) of one call. What fails loses all its tries."""
    if time.monotonic() > campaign.deadline:
        return 0, [], "", "no time was left"
    task.folder.mkdir(parents=True)
    try:
        seconds = row.attempt(campaign, task)
    except Skip as error:
        return 0, [], "", str(error)
    except Exception as error:      # not ours alone: what is wrong in the campaign, too, is told and counted
        return task.count, [], f"{row.name}: {type(error).__name__}: {error} (see {task.folder})", ""
    finally:
        for launch in [*Launch.started]:        # what a failed try left running
            if task.folder in launch.files[0].parents and launch.process.poll() is None:
                launch.kill()
    shutil.rmtree(task.folder)
    return task.count, seconds, "", ""


def tasks_of(campaign: Campaign, row: Row) -> Iterator[Try]:
    left, index = row.quick if campaign.quick else row.full, 0
    while left > 0:
        count = min(row.each, left)
        rng = random.Random(f"{campaign.seed} {row.name} {index}")
        yield Try(campaign.folder / row.name / str(index), rng, index, count)
        left, index = left - count, index + 1


def run_rows(campaign: Campaign, rows: list[Row], jobs: int, say: Callable[[str], None]) -> list[Result]:
    """All rows, so many calls at a time, evenly: if the time ends, every row has had its part."""
    tasks = {row.name: [*tasks_of(campaign, row)] for row in rows}
    order = sorted(((task.index + 0.5) / len(tasks[row.name]), row.name, row, task) for row in rows
                   for task in tasks[row.name])
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {(name, task.index): pool.submit(attempt, campaign, row, task)
                   for _, name, row, task in order}
        results = []
        for row in rows:
            done = [waiting[row.name, task.index].result() for task in tasks[row.name]]
            failures = [failure for _, _, failure, _ in done if failure]
            skipped = next((reason for *_, reason in done if reason), "")
            results.append(Result(
                row, sum(tries for tries, *_ in done), sum(tries for tries, _, bad, _ in done if not bad),
                sum((seconds for _, seconds, *_ in done), []), failures, skipped))
            say(" | ".join(results[-1].cells()))
            for failure in failures:
                say(f"FAILED {failure}")
    return results


# --- rows: kills and signals ------------------------------------------------------------------------------

KINDS = [(0, "float32"), (0, "bfloat16"), (0, "float32"), (2, "bfloat16"),
         (0, "bfloat16"), (0, "float32"), (0, "bfloat16"), (2, "float32")]


def kill_once(campaign: Campaign, task: Try, cwd: Path, ranks: int, dtype: str) -> tuple[int, list[float]]:
    """Start or go on, and kill. (exit code, seconds to the first step)"""
    rng, more = task.rng, dict(DTYPE=dtype, CKPT_SECONDS=task.rng.choice((1e-6, 0.02, 0.1)))
    if rng.random() < 0.3:
        launch = campaign.launch(cwd, ranks, **more, FAULT=f"kill@ckpt:{rng.randint(1, 9)}")
        code = launch.wait()
    else:
        launch = campaign.launch(cwd, ranks, **more)
        early, seconds = rng.random() < 0.15, rng.uniform(0, 1)
        code = launch.wait(6 * seconds) if early else launch.wait_for_step(seconds)
        if code is None:
            launch.kill()
            code = -signal.SIGKILL
    fine = (0, -signal.SIGKILL) if not ranks else (0, -signal.SIGKILL, 1)
    check(code in fine, f"exit {code}: {launch.err[-1500:]}")
    return code, [launch.first_step] if launch.first_step else []


def killed(campaign: Campaign, task: Try) -> list[float]:
    """A run is killed, resumed, killed ... until it is done; if that is too soon, another one is begun."""
    ranks, dtype = KINDS[task.index % len(KINDS)]
    seconds, kills, copy = [], 0, 0
    while kills < task.count:
        cwd = task.folder / str(copy)
        code, first = kill_once(campaign, task, cwd, ranks, dtype)
        seconds += first
        if code:
            kills += 1
            campaign.count("kills inside a checkpoint's write", any(cwd.glob("logs/run/checkpoint/*.part")))
        if is_done(cwd / "logs/run"):       # perhaps in the second between the last line and its end
            check_same(end_of(cwd / "logs/run"), campaign.reference(ranks, DTYPE=dtype))
            copy += 1
    if not is_done(cwd / "logs/run"):
        seconds += campaign.resume(cwd, ranks, DTYPE=dtype)
    return seconds


SIGNALS = 2 * [signal.SIGTERM, signal.SIGINT] + [signal.SIGHUP]


def signal_once(campaign: Campaign, task: Try, cwd: Path, ranks: int) -> tuple[int | None, list[float]]:
    """Start or go on, and signal: to torchrun, or to one rank. (0 if it ended before, seconds to a step)"""
    rng, number = task.rng, task.rng.choice(SIGNALS)
    launch = campaign.launch(cwd, ranks)
    if launch.wait_for_step(rng.uniform(0, 1.2)) is not None:
        need_ok(launch, 0)
        return 0, []
    pid = rng.choice([launch.process.pid, *launch.ranks().values()]) if ranks else launch.process.pid
    with contextlib.suppress(ProcessLookupError):       # a rank that ended meanwhile
        os.kill(pid, number)
    code = launch.wait()
    if code:
        check(code == (1 if ranks else 16), f"exit {code} after {number.name}: {launch.err[-1500:]}")
        again = re.search(r"train_gpt\.py: stopped by a signal .*; to go on: .*RUN_ID=run", launch.err)
        check(again, f"it does not tell how to go on: {launch.err[-1500:]}")
    return code, [launch.first_step]


def second_interrupt(campaign: Campaign, task: Try, cwd: Path) -> list[float]:
    """In a step that takes a minute: the first SIGINT waits for it, the second ends the run at once."""
    launch = campaign.launch(cwd, FAULT="sleep@60:60", RUN_ID="run")
    check(launch.wait(until=lambda: "step:58/" in launch.out) is None, "ended too soon")
    time.sleep(0.5)
    launch.process.send_signal(signal.SIGINT)
    check(launch.wait(task.rng.uniform(0.1, 1)) is None, "did not finish its step")
    launch.process.send_signal(signal.SIGINT)
    code, began = launch.wait(), time.monotonic()
    check(code == -signal.SIGINT and time.monotonic() - began < 20, f"exit {code} after the second SIGINT")
    return campaign.resume(cwd)


def signalled(campaign: Campaign, task: Try) -> list[float]:
    """As for kills; one in ten is the second SIGINT."""
    ranks, seconds, signals, copy, code = 2 * (task.index % 3 == 1), [], 0, 0, 0
    if task.index % 2 == 0:
        seconds, signals = second_interrupt(campaign, task, task.folder / "twice"), 1
    while signals < task.count:
        cwd = task.folder / str(copy)
        code, first = signal_once(campaign, task, cwd, ranks)
        seconds += first
        if code:
            signals += 1
        else:
            check_same(end_of(cwd / "logs/run"), campaign.reference(ranks))
            copy += 1
    return seconds + (campaign.resume(cwd, ranks) if code else [])


# --- rows: damage -----------------------------------------------------------------------------------------

def damage(blob: bytes, rng: random.Random) -> bytes:
    """A byte changed, near the ends as often as anywhere, or the file cut or lengthened."""
    size, place = len(blob), rng.choice("flip flip flip head tail tail cut grow".split())
    if place == "cut":
        return blob[:rng.choice((rng.randrange(size), size - rng.randint(1, 64), 0))]
    if place == "grow":
        return blob + rng.randbytes(rng.randint(1, 64))
    at = {"flip": rng.randrange(size), "head": rng.randrange(16), "tail": size - rng.randint(1, 40)}[place]
    mask = rng.choice((1 << rng.randrange(8), rng.randint(1, 255)))
    return blob[:at] + bytes([blob[at] ^ mask]) + blob[at + 1:]


def stopped_run(campaign: Campaign) -> Path:
    """A folder with a run that was killed and has three checkpoints."""
    def make(cwd: Path) -> None:
        launch = campaign.launch(cwd, CKPT_KEEP=3, CKPT_SECONDS=0.02)
        checkpoints = cwd / "logs/run/checkpoint"
        launch.wait(until=lambda: len(list(checkpoints.glob("step_*.ckpt"))) >= 3)
        launch.kill()
    return campaign.made("stopped", make)


def damage_checkpoints(folder: Path, rng: random.Random) -> tuple[list[Path], int]:
    """Damage the newest, or the newest two, or all. (checkpoints, newest first; how many)"""
    paths, number = sorted(folder.glob("step_*.ckpt"), reverse=True), rng.choice((1, 1, 2, 3))
    for path in paths[:number]:
        path.write_bytes(damage(path.read_bytes(), rng))
    return paths, number


def damaged_checkpoint(campaign: Campaign, task: Try) -> list[float]:
    """Most of them read in process, the last of a call by the script."""
    source = stopped_run(campaign)
    for number in range(task.count - 1):
        folder = task.folder / str(number)
        shutil.copytree(source / "logs/run/checkpoint", folder)
        whole = {path.name: path.read_bytes() for path in folder.glob("step_*.ckpt")}
        paths, bad = damage_checkpoints(folder, task.rng)
        try:
            arrays, facts, notes = train_gpt.load_checkpoint(folder)
        except train_gpt.DataError as error:
            check(bad == len(paths) and str(paths[0]) in str(error), f"refused though one is whole: {error}")
        else:
            check(bad < len(paths), "loaded though all are damaged")
            expected, facts_then = train_gpt.decode_checkpoint(whole[paths[bad].name], "")
            same = facts == facts_then and set(arrays) == set(expected) and all(
                np.array_equal(arrays[name], expected[name], equal_nan=True) for name in expected)
            check(same, "not what the whole checkpoint before it holds")
            check(all(any(str(path) in note for note in notes) for path in paths[:bad]), f"not told: {notes}")
        shutil.rmtree(folder)
    return damaged_by_script(campaign, task, source)


def damaged_by_script(campaign: Campaign, task: Try, source: Path) -> list[float]:
    cwd = task.folder / "script"
    shutil.copytree(source, cwd)
    paths, bad = damage_checkpoints(cwd / "logs/run/checkpoint", task.rng)
    if bad == len(paths):
        before = {path: path.read_bytes() for path in cwd.rglob("logs/**/*") if path.is_file()}
        launch = campaign.launch(cwd)
        need_ok(launch, 3)
        after = {path: path.read_bytes() for path in cwd.rglob("logs/**/*") if path.is_file()}
        check(paths[0].name in launch.err and before == after, f"not told or touched: {launch.err}")
        return []
    seconds = campaign.resume(cwd)
    log = (cwd / "logs/run/train.log").read_text(encoding="utf-8")
    check(f"{paths[0].name} is no whole checkpoint" in log, "the log does not tell of the damage")
    return seconds


def damaged_artifact(campaign: Campaign, task: Try) -> list[float]:
    """Most of them decoded in process, the last of a call by the script."""
    campaign.reference()
    blob = next(campaign.folder.glob("made/alone_0/logs/run/model.int8.ptz")).read_bytes()
    for _ in range(task.count - 1):
        bad = damage(blob, task.rng)
        try:
            train_gpt.decode_artifact(bad, "model")
        except train_gpt.DataError:
            continue
        at = next(i for i in range(len(blob)) if blob[i] != bad[i])
        raise Broken(f"taken: byte {at} of {len(blob)} is {bad[at]:#04x}, was {blob[at]:#04x}")
    (task.folder / "model").write_bytes(damage(blob, task.rng))
    launch = campaign.launch(task.folder, EVAL_ONLY="model")
    need_ok(launch, 3)
    check("model is no whole artifact" in launch.err, f"not told: {launch.err}")
    return []


# --- rows: numbers ----------------------------------------------------------------------------------------

PLACES = "qkv attn_out mlp_up mlp_down tok_emb attn_scale mlp_scale mix_x mix_x0 q_gain skip_weight".split()


def not_finite(campaign: Campaign, task: Try) -> list[float]:
    """A run with so many bad steps, a checkpoint before and behind each: they hold the same."""
    rng, ranks = task.rng, (0, 2, 4, 2, 0)[task.index % 5]
    steps, faults, rank_of = [5 + 4 * n + rng.randrange(2) for n in range(task.count)], [], {}
    for step in steps:
        rank_of[step], micro = rng.randrange(max(1, ranks)), rng.randrange(1 if ranks else 2)
        place = rng.choice(("", "." + rng.choice(PLACES)))
        faults += [f"{rng.choice(('nan', 'inf'))}@{step}:rank{rank_of[step]}:{micro}{place}",
                   f"sleep@{step - 1}:0.3", f"sleep@{step}:0.3"]     # the checkpoints shall not overtake
    dtype = rng.choice(("float32", "bfloat16"))
    launch = campaign.launch(task.folder, ranks, DTYPE=dtype, ITERATIONS=steps[-1] + 6, CKPT_SECONDS=1e-6,
                             CKPT_KEEP=10**6, FAULT=",".join(faults), EMA_DECAY=0.9)
    need_ok(launch, 0)
    run = task.folder / "logs/run"
    told = events(run)
    skipped = [event["step"] for event in told if event["event"] == "step" and event.get("skipped")]
    check(skipped == steps and told[-1]["skipped_steps"] == len(steps), f"skipped {skipped}, not {steps}")
    for step in steps:
        paths = (run / f"checkpoint/step_{at:08}.ckpt" for at in (step - 1, step))
        before, behind = (train_gpt.decode_checkpoint(path.read_bytes(), "")[0] for path in paths)
        changed = [name for name in before if not np.array_equal(before[name], behind[name], equal_nan=True)]
        check(not changed, f"step {step} changed {changed}")
        named = f"step {step} skipped.* from rank {rank_of[step]};"
        check(any(re.match(named, event.get("text", "")) for event in told), f"not told: {named}")
    if task.index % 3 == 0:
        endless_nan(campaign, task, ranks)
    return []


def endless_nan(campaign: Campaign, task: Try, ranks: int) -> None:
    """MAX_SKIPPED in a row end the run."""
    faults = ",".join(f"nan@{step}" for step in (8, 10, 11, 12))
    launch = campaign.launch(task.folder / "endless", ranks, FAULT=faults, MAX_SKIPPED=3)
    need_ok(launch, 1 if ranks else 17)
    check(re.search(r"train_gpt\.py: step 12\b.*MAX_SKIPPED", launch.err), f"not told: {launch.err[-1500:]}")


def drifted(campaign: Campaign, task: Try) -> list[float]:
    """One replica's weights change: the next validation tells. Of two ranks none can tell who is right."""
    ranks = (2, 4)[task.index % 2]
    step, rank = task.rng.randint(2, 19), task.rng.randrange(ranks == 2, ranks)
    launch = campaign.launch(task.folder, ranks, FAULT=f"drift@{step}:rank{rank}", VAL_LOSS_EVERY=20)
    need_ok(launch, 1)
    check(f"step 20: the weights of rank {rank} differ" in launch.err, f"not told: {launch.err[-1500:]}")
    check(set(re.findall(r"exitcode\s*: (-?\d+)", launch.err)) <= {"17", "-15"}, launch.err[-1500:])
    return []


# --- rows: disks ------------------------------------------------------------------------------------------

def as_root(*command: str) -> None:
    """Raises Skip if this machine does not let us."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise Skip(f"no command {command[0]} here") from None
    if done.returncode:
        raise Skip(f"{' '.join(command[:2])}: {done.stderr.strip()}")


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    path.mkdir(parents=True, exist_ok=True)
    as_root("mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path))
    try:
        yield path
    finally:
        as_root("umount", "-l", str(path))


def fill(disk: Path, seconds: float) -> None:
    """Take all that is free, again and again: what the run frees, others take."""
    end = time.monotonic() + seconds
    with open(disk / "filler", "ab", buffering=0) as file:
        while time.monotonic() < end:
            for size in (65536, 4096, 512, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        continue
            time.sleep(0.01)


def disk_full(campaign: Campaign, task: Try, freed: bool) -> list[float]:
    """Others fill the disk while the run trains, for a while or for good."""
    with small_disk(task.folder / "logs") as disk:
        launch = campaign.launch(task.folder)
        check(launch.wait_for_step(task.rng.uniform(0, 0.8)) is None, "ended too soon")
        fill(disk, 0.3)
        kept = whole_checkpoint(disk / "run")
        if freed:
            fill(disk, task.rng.uniform(0, 0.5))
            (disk / "filler").unlink()
        code = launch.wait()
        check(code in ((0, 16) if freed else (16,)), f"exit {code}: {launch.err[-1500:]}")
        check("warning: no checkpoint" in launch.out, "no warning in the log")
        check(whole_checkpoint(disk / "run") >= kept, "the last good checkpoint is gone")
        seconds = []
        if code:
            check("No space left on device" in launch.err, f"not told: {launch.err}")
            need_ok(campaign.launch(task.folder), 16)       # still full: says so again
            (disk / "filler").unlink(missing_ok=True)
            launch = campaign.launch(task.folder)
            need_ok(launch, 0)
            seconds = [launch.first_step] if launch.first_step else []
        else:
            check(any(event["event"] == "warning" for event in events(disk / "run")), "no warning in metrics")
        check_same(end_of(disk / "run"), campaign.reference())
    return seconds


def file_limit(campaign: Campaign, task: Try) -> list[float]:
    """A quota: no file may grow beyond so many KiB. Below the artifact's size the run cannot end."""
    limit = task.rng.choice((task.rng.randint(1, 40), task.rng.randint(70, 300)))
    command = ["bash", "-c", f'ulimit -f {limit}; exec "$0" "$@"', *helpers.command()]
    launch = Launch(task.folder, campaign.env(), command)
    code = launch.wait()
    check(code == (16 if limit < 40 else 0), f"exit {code} at {limit} KiB: {launch.err[-1500:]}")
    path = task.folder / "logs/run/train.log"       # not even that below a few KiB
    log = path.read_text(encoding="utf-8") if path.exists() else ""
    check("File too large" in log + launch.err, "not told")
    if code:
        return campaign.resume(task.folder)
    check_same(end_of(task.folder / "logs/run"), campaign.reference())
    return []


def read_only(campaign: Campaign, task: Try) -> list[float]:
    """The checkpoints' folder becomes read-only while the run trains, then the whole disk for a resume."""
    with small_disk(task.folder / "logs") as disk:
        launch, folder = campaign.launch(task.folder), str(disk / "run/checkpoint")
        check(launch.wait_for_step(task.rng.uniform(0.2, 0.8)) is None, "ended too soon")
        as_root("mount", "--bind", folder, folder)
        as_root("mount", "-o", "remount,ro,bind", folder)
        time.sleep(0.3)
        kept = whole_checkpoint(disk / "run")
        launch.process.send_signal(signal.SIGTERM)
        need_ok(launch, 16)
        check("warning: no checkpoint" in launch.out and "Read-only file system" in launch.out, "no warning")
        as_root("umount", folder)
        check(whole_checkpoint(disk / "run") >= kept, "the last good checkpoint is gone")
        as_root("mount", "-o", "remount,ro", str(disk))
        launch = campaign.launch(task.folder)
        need_ok(launch, 2, 16)
        check("Read-only file system" in launch.err, f"not told: {launch.err}")
        as_root("mount", "-o", "remount,rw", str(disk))
        return campaign.resume(task.folder)


def disks(campaign: Campaign, task: Try) -> list[float]:
    kind = task.index % 4
    if kind < 2:
        return disk_full(campaign, task, freed=kind == 0)
    return (file_limit if kind == 2 else read_only)(campaign, task)


# --- rows: ranks and nodes --------------------------------------------------------------------------------

WORLDS = [(a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) if a != b]
EIGHT = dict(BATCH_SLOTS=8, TRAIN_BATCH_TOKENS=512, ITERATIONS=60, DIST_TIMEOUT=120)


def other_world(campaign: Campaign, task: Try) -> list[float]:
    """Begun on one number of ranks, ended on another: the same batches."""
    before, behind = WORLDS[(task.index * 5 + 3) % 12]

    def begin(cwd: Path) -> None:
        launch = campaign.launch(cwd, before if before > 1 else 0, FAULT="kill@30",
                                 CKPT_SECONDS=1e-6, **EIGHT)
        launch.wait()
        check(whole_checkpoint(cwd / "logs/run") > 0, f"no checkpoint: {launch.err[-1500:]}")
    cwd = task.folder / "run"
    shutil.copytree(campaign.made(f"world_{before}", begin), cwd)
    launch = campaign.launch(cwd, behind if behind > 1 else 0, **EIGHT)
    need_ok(launch, 0)
    found, expected = end_of(cwd / "logs/run"), campaign.reference(0, **EIGHT)
    check(found.hashes["batches_crc32"] == expected.hashes["batches_crc32"], "other batches")
    check_steps(found, EIGHT["ITERATIONS"])
    check(all(np.isclose(a["train_loss"], b["train_loss"], rtol=1e-3) for a, b in
              zip(found.steps, expected.steps)), "losses differ by more than rounding")
    return [launch.first_step]


def watch_the_others(launches: list[Launch], lost: dict[int, int], others: dict[int, int],
                     timeout: float) -> float:
    """Seconds from the loss of a rank to the end of all other ranks, which must be in time."""
    end = time.monotonic() + PATIENCE
    while not all(state_of(pid) in ("", "Z", "T") for pid in lost.values()):
        check(time.monotonic() < end, "the rank was never lost")
        time.sleep(0.02)
    began = time.monotonic()
    while not all(map(ended, others.values())):
        if time.monotonic() - began > timeout + MARGIN:
            alive = [rank for rank, pid in others.items() if not ended(pid)]
            raise Broken(f"ranks {alive} still run {timeout + MARGIN:.0f} s after the loss of {[*lost]}")
        time.sleep(0.02)
    return time.monotonic() - began


def all_ranks(launches: list[Launch], world: int) -> dict[int, int]:
    """Process ids of all ranks, once each trains."""
    launches[0].wait_for_step()
    found = {rank: pid for launch in launches for rank, pid in launch.ranks().items()}
    check(len(found) == world, f"ranks {found}: {launches[0].err[-1500:]}")
    return found


def check_named(launches: list[Launch], lost: int) -> None:
    named = re.findall(r"lost rank ([\d, ]+|unknown)", "".join(launch.err for launch in launches))
    check(named, f"rank {lost} is not named: {launches[0].err[-1500:]}")
    check(set(named) == {str(lost)}, f"rank {lost} was lost, named were {named}")


def lost_rank(campaign: Campaign, task: Try) -> list[float]:
    """FAULT stops or kills a rank."""
    ranks, kind = (2, 4)[task.index % 2], ("stop", "kill")[task.index // 2 % 2]
    rank, timeout, step = task.rng.randrange(ranks), 6.0, task.rng.randint(40, 90)
    launch = campaign.launch(task.folder, ranks, FAULT=f"{kind}@{step}:rank{rank}", DIST_TIMEOUT=timeout)
    found = all_ranks([launch], ranks)
    lost = {rank: found.pop(rank)}
    seconds = watch_the_others([launch], lost, found, timeout)
    if not ended(lost[rank]):
        os.kill(lost[rank], signal.SIGKILL)     # torchrun would wait half a minute for the stopped one
    launch.wait()
    check_named([launch], rank)
    if task.index % 4 in (0, 3):
        campaign.resume(task.folder, ranks)
    return [seconds]


@contextlib.contextmanager
def two_nodes(name: str) -> Iterator[list[str]]:
    """Two network namespaces joined by a veth pair: 10.77.0.1 and 10.77.0.2 on it."""
    names = [f"{name}a", f"{name}b"]
    try:
        for each in names:
            as_root("ip", "netns", "add", each)
        as_root("ip", "link", "add", "veth0", "netns", names[0], "type", "veth",
                "peer", "veth1", "netns", names[1])
        for number, each in enumerate(names):
            as_root("ip", "-n", each, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"veth{number}")
            for device in ("lo", f"veth{number}"):
                as_root("ip", "-n", each, "link", "set", device, "up")
        yield names
    finally:
        for each in names:
            subprocess.run(["ip", "netns", "del", each], capture_output=True)


def launch_nodes(campaign: Campaign, cwd: Path, names: list[str], timeout: float) -> list[Launch]:
    """torchrun on both nodes, one rank each; they share the folder."""
    launches = []
    for number, name in enumerate(names):
        torchrun = ["--nnodes=2", "--nproc_per_node=1", f"--node_rank={number}", "--master_addr=10.77.0.1",
                    "--master_port=29555"]
        env = campaign.env(2, GLOO_SOCKET_IFNAME=f"veth{number}", DIST_TIMEOUT=timeout)
        launches.append(Launch(cwd, env, ["ip", "netns", "exec", name, *under(torchrun)]))
    return launches


def lost_node(campaign: Campaign, task: Try) -> list[float]:
    """A node dies, or the link between them; the same command goes on, to the end of a run on one node."""
    kind, timeout = ("node 1", "node 0", "link")[task.index % 3], 8.0
    with two_nodes(f"bg{os.getpid()}n{task.index}") as names:
        launches = launch_nodes(campaign, task.folder, names, timeout)
        found = all_ranks(launches, 2)
        launches[0].wait(task.rng.uniform(0, 0.4))
        lost = 0 if kind == "node 0" else 1
        if kind == "link":
            as_root("ip", "-n", names[0], "link", "set", "veth0", "down")
        else:
            launches[lost].kill()
        pids = {} if kind == "link" else {lost: found.pop(lost)}
        seconds = watch_the_others(launches, pids, found, timeout)
        for launch in launches:
            launch.kill()       # torchrun itself may wait for the other node
        text = launches[1 - lost].err
        words = "lost (rank 0|the node)" if kind == "node 0" else "lost rank 1"
        check(re.search(words, text), f"{kind} is not named: {text[-1500:]}")
        if kind == "link":
            as_root("ip", "-n", names[0], "link", "set", "veth0", "up")
        for launch in launch_nodes(campaign, task.folder, names, timeout):
            need_ok(launch, 0)
    check_same(end_of(task.folder / "logs/run"), campaign.reference(2))
    return [seconds]


def restarted(campaign: Campaign, task: Try) -> list[float]:
    """torchrun --max-restarts: a rank is killed, torchrun starts all again, they go on by themselves."""
    torchrun = ["--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    launch = Launch(task.folder, campaign.env(2), under(torchrun))
    found = all_ranks([launch], 2)
    launch.wait(task.rng.uniform(0.1, 0.4))
    os.kill(task.rng.choice([*found.values()]), signal.SIGKILL)
    told, began = launch.out.count("step:"), time.monotonic()
    launch.wait(until=lambda: launch.out.count("step:") > told + 2 and "resumed from" in launch.out)
    seconds = time.monotonic() - began
    code = launch.wait()
    check(code == 0 and "resumed from" in launch.out, f"exit {code}: {launch.err[-1500:]}")
    check_same(end_of(task.folder / "logs/run"), campaign.reference(2))
    return [seconds]


# --- rows: replay, second copy ----------------------------------------------------------------------------

def replayed(campaign: Campaign, task: Try) -> list[float]:
    """A run under a cap, killed and resumed in every second try, and its repetition by its own trace."""
    ranks, dtype = KINDS[task.index % len(KINDS)]
    env = dict(DTYPE=dtype, ITERATIONS=10**5, MAX_WALLCLOCK_SECONDS=task.rng.uniform(0.8, 1.6))
    if task.index % 2:
        launch = campaign.launch(task.folder, ranks, **env)
        launch.wait_for_step(task.rng.uniform(0, 0.5))
        launch.kill()
    need_ok(campaign.launch(task.folder, ranks, **env), 0)
    trace = task.folder / "logs/run/metrics.jsonl"
    need_ok(campaign.launch(task.folder / "again", ranks, **env, LR_TRACE=trace), 0)
    check_same(end_of(task.folder / "again/logs/run"), end_of(task.folder / "logs/run"))
    return []


def second_copy(campaign: Campaign, task: Try) -> list[float]:
    """A second copy is refused, the first goes on undisturbed."""
    launch, ranks = campaign.launch(task.folder, FAULT="sleep@40:15"), 2 * (task.index % 2)
    launch.wait_for_step(task.rng.uniform(0, 0.3))
    second = campaign.launch(task.folder, ranks, RESUME=task.rng.choice(("auto", "must")))
    need_ok(second, 1 if ranks else 2)
    check("RUN_ID=run: " in second.err and "in use by" in second.err, f"not told: {second.err[-1500:]}")
    check(launch.look(), "the first had ended: the try tells nothing")
    need_ok(launch, 0)
    check_same(end_of(task.folder / "logs/run"), campaign.reference())
    return []


STEP = "to the first new step"
ROWS = [
    Row("kill", "SIGKILL at random moments, resumed until done: bit-exact end", STEP, 200, 3, 5, killed),
    Row("signal", "SIGTERM, SIGINT, SIGHUP at random moments: exit 16, bit-exact end", STEP, 50, 2, 5,
        signalled),
    Row("checkpoint", "checkpoint with a byte changed or cut: the one before, or refused", STEP, 300, 30, 30,
        damaged_checkpoint),
    Row("artifact", "artifact with a byte changed or cut: refused", "", 600, 100, 100, damaged_artifact),
    Row("numbers", "NaN or infinity, any rank, micro-step and place: skipped, named, weights untouched", "",
        50, 10, 10, not_finite),
    Row("disk", "disk full, file limit, read-only: goes on or stops clearly, bit-exact end", STEP, 20, 2, 1,
        disks),
    Row("world", "resumed on another number of ranks (pairs of 1, 2, 4, 8): same batches", STEP, 12, 1, 1,
        other_world),
    Row("rank", "a rank stopped or killed (DIST_TIMEOUT=6): the others end in time and name it",
        "until the others had ended", 20, 1, 1, lost_rank),
    Row("replay", "a run under a wall-clock cap repeated by LR_TRACE: identical to the last bit", "",
        10, 1, 1, replayed),
    Row("node", "two nodes (DIST_TIMEOUT=8), one or the link lost: the other ends in time, bit-exact resume",
        "until the other had ended", 5, 1, 1, lost_node),
    Row("replica", "weights of a replica changed: exit 17 at the next validation, naming the rank", "",
        5, 1, 1, drifted),
    Row("copy", "a second copy of a running run: refused, the first undisturbed", "", 3, 1, 1, second_copy),
    Row("restart", "torchrun --max-restarts: a rank killed, all restarted, bit-exact end", STEP, 2, 0, 1,
        restarted),
]


# --- what the guards cost ---------------------------------------------------------------------------------

def floppy_env(**more: Any) -> dict[str, str]:
    """The floppy preset on the demo corpus, with the machine's threads, a minute or two long."""
    preset = train_gpt.PRESETS["10min_floppy"]
    paths = {name.upper(): helpers.ROOT / preset[name] for name in ("data_path", "tokenizer_path")}
    return {name: str(value) for name, value in dict(
        paths, PRESET="10min_floppy", DEVICE="cpu", OMP_NUM_THREADS=os.cpu_count(), MAX_WALLCLOCK_SECONDS=0,
        VAL_TOKENS_LIMIT=65536, VAL_LOSS_EVERY=0, RUN_ID="floppy", **more).items()}


def stalls(folder: Path) -> tuple[float, list[str]]:
    """A real run with a checkpoint every three seconds: milliseconds of its median step, and lines."""
    launch = Launch(folder, floppy_env(ITERATIONS=100, CKPT_SECONDS=3), helpers.command())
    need_ok(launch, 0)
    told = events(folder / "logs/floppy")
    ends = {event["step"]: event["train_seconds"] for event in told if event["event"] == "step"}
    seconds = {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends and step > 10}
    stall = {event["step"]: event["stall_seconds"] for event in told if event["event"] == "checkpoint"}
    during = [seconds[step + 1] for step in stall if step + 1 in seconds]
    step, usual, worst = (1e3 * x for x in (statistics.median(seconds.values()),
                                            statistics.median(stall.values()), max(stall.values())))
    blob = max(path.stat().st_size for path in folder.glob("logs/floppy/checkpoint/*.ckpt"))
    return step, [
        f"median step: {step:.1f} ms",
        f"a checkpoint ({blob / 2**20:.1f} MiB) stalls training for {usual:.1f} ms (median of {len(stall)}), "
        f"at most {worst:.1f} ms = {worst / step:.2f} steps (asked: under 1)",
        f"the step while it is written takes {1e3 * statistics.median(during) / step:.2f} times the median"]


def guards(sigma: float) -> list[tuple[Callable, Callable]]:
    """What the guards add to a step of the trainer, and what would stand there without them."""
    import torch
    s, _ = train_gpt.load_settings({"PRESET": "10min_floppy", "SKIP_SIGMA": str(sigma)}, "10min_floppy")
    torch.set_num_threads(os.cpu_count())
    trainer = train_gpt.Trainer(s, train_gpt.Machine(torch.device("cpu")))
    grad, optimizer, size = trainer.grad.normal_(), trainer.optimizer, trainer.size
    matrices, rest = optimizer.weights.flat.tensor_split([optimizer.weights.num_matrix])
    update, small, yes = torch.randn_like(matrices), torch.randn_like(rest), torch.tensor(1.0)
    root, on_way = torch.ones_like(rest), torch.tensor(True)
    judge = optimizer.judge if hasattr(optimizer, "judge") else trainer.judge

    def mark() -> None:
        grad[size + 1] = ~grad[:size + 1].sum().isfinite()

    def scalars() -> tuple[Any, ...]:
        return torch.where(yes > 0, 0.95, 1.0), yes * 0.03, yes * 0.1
    momentum, rate, weight = scalars()
    return [
        (mark, lambda: None),
        (lambda: judge(torch.stack((grad[size], on_way.float()))), lambda: None),
        (lambda: grad[:size].masked_fill_(~on_way, 0.0), lambda: None),
        (scalars, lambda: None),
        (lambda: optimizer.momentum.mul_(momentum), lambda: optimizer.momentum.mul_(0.95)),
        (lambda: matrices.addcmul_(update, rate, value=-1), lambda: matrices.add_(update, alpha=-0.03)),
        (lambda: optimizer.moment1.lerp_(small, weight), lambda: optimizer.moment1.lerp_(small, 0.1)),
        (lambda: optimizer.moment2.lerp_(small, weight), lambda: optimizer.moment2.lerp_(small, 0.1)),
        (lambda: rest.addcdiv_(optimizer.moment1 * (optimizer.adam_rates * yes), root, value=-1e-9),
         lambda: rest.addcdiv_(optimizer.moment1 * optimizer.adam_rates, root, value=-1e-9)),
        (lambda: trainer.machine.share(1.0, 0.0, 0.0), lambda: None),
        (lambda: train_gpt.provoke(trainer, 1, range(s.batch_slots)), lambda: None)]


def guard_cost(step: float, sigma: float) -> str:
    """Each pair in turns, a thousand times; the medians' differences, summed."""
    total = 0.0
    for pair in guards(sigma):
        seconds: tuple[list[float], list[float]] = [], []
        for _ in range(1000):
            for call, times in zip(pair, seconds):
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
        total += 1e3 * (statistics.median(seconds[0]) - statistics.median(seconds[1]))
    return (f"the guards take {total:.3f} ms of a step = {total / step:.2%} (asked: under 0.5 %)"
            + (f", with SKIP_SIGMA={sigma:g}" if sigma else ""))


def cost(folder: Path) -> list[str]:
    step, lines = stalls(folder / "cost")
    return [*lines, guard_cost(step, 0.0), guard_cost(step, 6.0)]


# --- main -------------------------------------------------------------------------------------------------

REPORT = helpers.ROOT / "tests/RELIABILITY.md"


def table(results: list[Result]) -> list[str]:
    cells = [("promise", "tried", "survived", "median"), ("---", "---:", "---:", "---"),
             *(result.cells() for result in results)]
    return ["| " + " | ".join(row) + " |" for row in cells]


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{found[1] if found else platform.processor()}, {os.cpu_count()} cores, {platform.platform()}"


def report(campaign: Campaign, results: list[Result], lines: list[str], minutes: float) -> str:
    """The text of RELIABILITY.md."""
    import torch
    commit = subprocess.run(["git", "describe", "--always", "--dirty=+dirty", "--abbrev=12", "--exclude=*"],
                            cwd=helpers.ROOT, capture_output=True, text=True).stdout.strip()
    failures = [failure.splitlines()[0] for result in results for failure in result.failures]
    about = [f"{number} {what}." for what, number in campaign.counts.items()]
    return "\n".join([
        "# Reliability", "",
        "What `tests/chaos.py` did to the real script, and what survived. Written by it, never by hand:", "",
        "```bash", "python " + " ".join(sys.argv), "```", "",
        f"{time.strftime('%Y-%m-%d')}, {minutes:.0f} minutes on {machine()}; torch {torch.__version__}, "
        f"commit {commit}, train_gpt.py {helpers.sha256(helpers.SCRIPT).hex()[:12]}.", "",
        *table(results), "", *about, *(f"- failed: {failure}" for failure in failures), "",
        *(["At the shape of the floppy:", "", *(f"- {line}" for line in lines), ""] if lines else [])])


def arguments() -> argparse.Namespace:
    names = ", ".join(row.name for row in ROWS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few tries of each row")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--only", default="", help=f"rows by name, with commas: {names}; or none")
    parser.add_argument("--minutes", type=float, default=90.0, help="no try begins later")
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time")
    parser.add_argument("--cost", action="store_true", help="measure what guards and checkpoints cost")
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.name}")
    args = parser.parse_args()
    args.rows = [row for row in ROWS if not args.only or row.name in args.only.split(",")]
    if args.only and args.only != "none" and len(args.rows) < len(args.only.split(",")):
        parser.error(f"--only takes some of {names}")
    return args


def main() -> int:
    args, began = arguments(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    campaign = Campaign(folder, args.seed, args.quick, args.minutes)
    lines = cost(folder) if args.cost else []       # first, while the machine is quiet
    results = run_rows(campaign, args.rows, args.jobs, lambda line: print(line, flush=True))
    text = report(campaign, results, lines, (time.monotonic() - began) / 60)
    print(text)
    if args.write:
        REPORT.write_text(text, encoding="utf-8")
    if all(result.survived == result.tried for result in results):
        shutil.rmtree(folder)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
