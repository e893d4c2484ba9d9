"""The campaign: kills, signals, damage, full disks and lost machines against the real script, counted.

    python -m tests.chaos                      all cases, about a quarter of an hour on two cores
    python -m tests.chaos --only kill,disk     some rows
    python -m tests.chaos --write              all cases, written to tests/RELIABILITY.md and README.md

One row a promise: tried, survived, and the median of what the row times. A try that fails is reported with
the folder that it leaves. What this machine does not allow (mounts, network namespaces) is reported as
skipped. No two campaigns hit the same places: what the machine does at a moment is not in our hands.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

import train_gpt
from tests.kit import helpers, launch, readme
from tests.kit.launch import Launch, all_ranks, end_of, is_done, watch_the_others

JOBS = 2  # tries at a time
SEED = 5
# small as can be, so that a process's life is steps and checkpoints, not arithmetic
SMALL = {"ITERATIONS": 200, "TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 50, "CKPT_SECONDS": 0.05, "RUN_ID": "run"}


class Skip(Exception):
    """What this machine does not let us try."""


class Campaign:
    """The corpus, and what tries share: runs left alone to compare with, and begun ones to go on from."""

    def __init__(self, folder: Path):
        self.folder, self.lock = folder, threading.RLock()
        tokenizer = helpers.train_tokenizer(folder / "tiny.model", helpers.documents(400, 3))
        self.corpus = helpers.make_corpus(folder / "data", tokenizer)

    def made(self, name: str, make: Callable[[Path], Any]) -> Path:
        """A folder that is made once."""
        path = self.folder / "made" / name
        with self.lock:
            if not path.exists():
                make(path)
        return path

    def launch(self, cwd: Path, ranks: int = 0, provoke: str = "", **more: Any) -> Launch:
        return Launch(cwd, self.env(ranks, **more), ranks, provoke)

    def env(self, ranks: int = 0, **more: Any) -> dict[str, str]:
        slots = max(2, ranks)
        sizes = {"BATCH_SLOTS": slots, "TRAIN_BATCH_TOKENS": 64 * slots}
        return self.corpus.env(**SMALL | sizes | more)

    def alone(self, ranks: int = 0, **more: Any) -> Path:
        """The folder of a run that nothing disturbed."""
        name = "_".join(["alone", str(ranks), *map(str, more.values())])
        return self.made(name, lambda cwd: self.launch(cwd, ranks, **more).need(0)) / "logs/run"

    def resume(self, cwd: Path, ranks: int = 0) -> list[float]:
        """Go on to the end, which must be that of a run left alone. The seconds to the first new step."""
        again = self.launch(cwd, ranks)
        again.need(0)
        self.check_end(cwd, ranks)
        return [again.first_step] if again.first_step else []

    def check_end(self, cwd: Path, ranks: int = 0) -> None:
        assert end_of(cwd / "logs/run") == end_of(self.alone(ranks)), "another end than that of a run alone"


class Try(NamedTuple):
    """One call of a row's function: some tries in a folder of their own."""

    folder: Path
    rng: random.Random
    index: int  # of the call: rows take their variants in turn
    count: int


# --- rows: kills and signals ------------------------------------------------------------------------------


Disturb = Callable[[Campaign, Try, Path, int], Launch]


def again_and_again(campaign: Campaign, task: Try, ranks: int, disturb: Disturb) -> list[float]:
    """A run is disturbed, resumed, disturbed ... until it is done; if that is too soon, another one is begun.

    The seconds are those to the first step of each.
    """
    seconds, disturbed, copy = [], 0, 0
    while disturbed < task.count:
        cwd = task.folder / str(copy)
        run = disturb(campaign, task, cwd, ranks)
        seconds += [run.first_step] if run.first_step else []
        if is_done(cwd / "logs/run"):  # perhaps between its last line and its end
            campaign.check_end(cwd, ranks)
            copy += 1
        else:
            disturbed += 1
    return seconds if is_done(cwd / "logs/run") else seconds + campaign.resume(cwd, ranks)


def kill_once(campaign: Campaign, task: Try, cwd: Path, ranks: int) -> Launch:
    """Start or go on, and kill: at any moment, or inside a checkpoint's write."""
    rng, seconds = task.rng, task.rng.choice((1e-6, 0.02, 0.1))
    provoke = f"cut@{rng.randint(1, 199)}" if rng.random() < 0.3 else ""
    run = campaign.launch(cwd, ranks, provoke, CKPT_SECONDS=seconds)
    early, moment = rng.random() < 0.15, rng.uniform(0, 1)
    if provoke:
        code = run.wait()
    else:
        code = run.wait(6 * moment) if early else run.wait_for_step(moment)
    if code is None:
        run.kill()
    fine = (None, 0, -signal.SIGKILL, 1) if ranks else (None, 0, -signal.SIGKILL)
    assert code in fine, f"exit {code}: {run.err[-1500:]}"
    return run


def killed(campaign: Campaign, task: Try) -> list[float]:
    """Every fourth has two ranks."""
    return again_and_again(campaign, task, 2 * (task.index % 4 == 3), kill_once)


SIGNALS = [signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGHUP]


def signal_once(campaign: Campaign, task: Try, cwd: Path, ranks: int) -> Launch:
    """Start or go on, and signal: to torchrun, or to one rank."""
    number, run = task.rng.choice(SIGNALS), campaign.launch(cwd, ranks)
    if run.wait_for_step(task.rng.uniform(0, 1.2)) is not None:
        run.need(0)
        return run
    pid = run.process.pid
    if ranks:
        pid = task.rng.choice([pid, *run.ranks().values()])
    with contextlib.suppress(ProcessLookupError):  # a rank that ended meanwhile
        os.kill(pid, number)
    code = run.wait()
    if not is_done(cwd / "logs/run"):
        assert code == (1 if ranks else 16), f"exit {code} after {number.name}: {run.err[-1500:]}"
        said = re.search(r"train_gpt\.py: stopped by a signal .*RUN_ID=run goes on", run.err)
        assert said, f"it does not say how to go on: {run.err[-1500:]}"
    return run


def signalled(campaign: Campaign, task: Try) -> list[float]:
    return again_and_again(campaign, task, 2 * (task.index % 3 == 1), signal_once)


# --- rows: damage -----------------------------------------------------------------------------------------


def damage(blob: bytes, rng: random.Random) -> bytes:
    """A byte changed, near the ends as often as anywhere, or the file cut or lengthened."""
    size, place = len(blob), rng.choice(["flip", "flip", "flip", "head", "tail", "tail", "cut", "grow"])
    if place == "cut":
        return blob[: rng.choice((rng.randrange(size), size - rng.randint(1, 64), 0))]
    if place == "grow":
        return blob + rng.randbytes(rng.randint(1, 64))
    at = {"flip": rng.randrange(size), "head": rng.randrange(16), "tail": size - rng.randint(1, 40)}[place]
    mask = rng.choice((1 << rng.randrange(8), rng.randint(1, 255)))
    return blob[:at] + bytes([blob[at] ^ mask]) + blob[at + 1 :]


def stopped_run(campaign: Campaign) -> Path:
    """A folder with a run that was killed and has two checkpoints."""
    return campaign.made(
        "stopped", lambda cwd: campaign.launch(cwd, provoke="kill@100").need(-signal.SIGKILL)
    )


def same_arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    same = [name in other and np.array_equal(array, other[name]) for name, array in one.items()]
    return set(one) == set(other) and all(same)


def harmful(blob: bytes, rng: random.Random) -> bytes:
    """A damage that is noticed; one that is not must change nothing, as few bits of zlib's own do."""
    arrays, facts = train_gpt.unpack_tensors(blob)
    while True:
        found = damage(blob, rng)
        try:
            others, other_facts = train_gpt.unpack_tensors(found)
        except train_gpt.DAMAGED:
            return found
        assert facts == other_facts and same_arrays(arrays, others), "taken with other numbers"


def damage_checkpoints(folder: Path, rng: random.Random) -> tuple[list[Path], int]:
    """Damage the newest, or both. (checkpoints, newest first; how many)"""
    paths, number = sorted(folder.glob("step_*.ckpt"), reverse=True), rng.choice((1, 1, 2))
    for path in paths[:number]:
        path.write_bytes(harmful(path.read_bytes(), rng))
    return paths, number


def read_damaged(folder: Path, rng: random.Random) -> None:
    """In this process: the newest whole checkpoint is read, or all are refused."""
    whole = {path.name: path.read_bytes() for path in folder.glob("step_*.ckpt")}
    paths, bad = damage_checkpoints(folder, rng)
    try:
        arrays, facts, notes = train_gpt.newest_checkpoint(folder)
    except train_gpt.DataError:
        assert bad == len(paths), "refused though one is whole"
        return
    assert bad < len(paths), "loaded though all are damaged"
    expected, facts_then = train_gpt.unpack_tensors(whole[paths[bad].name])
    assert facts == facts_then and same_arrays(arrays, expected), "not what the one before it holds"
    assert str(paths[0]) in notes[0], f"not reported: {notes}"


def resume_damaged(campaign: Campaign, cwd: Path, rng: random.Random) -> list[float]:
    """By the script: it goes on from the newest whole one, or refuses once and then begins anew."""
    paths, bad = damage_checkpoints(cwd / "logs/run/checkpoint", rng)
    if bad < len(paths):
        seconds = campaign.resume(cwd)
        log = (cwd / "logs/run/train.log").read_text(encoding="utf-8")
        assert f"{paths[0].name} is damaged" in log, "the log does not report the damage"
        return seconds
    run = campaign.launch(cwd)
    run.need(3)
    assert "all damaged and put aside" in run.err, f"not reported: {run.err}"
    return campaign.resume(cwd)


def bad_checkpoint(campaign: Campaign, task: Try) -> list[float]:
    """The last one of a call by the script."""
    cwds = [task.folder / str(number) for number in range(task.count)]
    for cwd in cwds:
        shutil.copytree(stopped_run(campaign), cwd)
    for cwd in cwds[:-1]:
        read_damaged(cwd / "logs/run/checkpoint", task.rng)
    return resume_damaged(campaign, cwds[-1], task.rng)


def bad_artifact(campaign: Campaign, task: Try) -> list[float]:
    """Refused, or the very same weights: not every bit of a zlib stream means something."""
    blob = (campaign.alone() / "model.ptz").read_bytes()
    settings, weights, _ = train_gpt.decode_artifact(blob, "whole")
    for _ in range(task.count):
        with contextlib.suppress(train_gpt.DataError):
            found, arrays, _ = train_gpt.decode_artifact(damage(blob, task.rng), "damaged")
            assert found == settings and same_arrays(arrays, weights), "taken with other weights"
    (task.folder / "model.ptz").write_bytes(blob[:-1])
    run = campaign.launch(task.folder, EVAL_ONLY="model.ptz")
    run.need(3)
    assert "model.ptz is damaged or of another script" in run.err, f"not reported: {run.err}"
    return []


# --- rows: numbers ----------------------------------------------------------------------------------------

PARTS = [param.name for param in train_gpt.parameter_table(train_gpt.Settings())]


def not_finite(campaign: Campaign, task: Try) -> list[float]:
    """A run with so many bad steps: before and behind each, all ranks hold the same state."""
    rng, ranks = task.rng, (0, 2, 4, 2, 0)[task.index % 5]
    steps = [5 + 4 * n + rng.randrange(2) for n in range(task.count)]
    faults = []
    for step in steps:
        where = rng.choice((f":part={rng.choice(PARTS)}", ""))
        faults += [f"{rng.choice(('nan', 'inf'))}@{step}:rank={rng.randrange(max(1, ranks))}{where}"]
        faults += [f"hash@{step}", f"hash@{step + 1}"]
    run = campaign.launch(task.folder, ranks, ",".join(faults), ITERATIONS=steps[-1] + 6)
    run.need(0)
    warnings = helpers.events(task.folder / "logs/run", "warning")
    skipped = [int(re.search(r"\d+", event["text"])[0]) for event in warnings]
    (final,) = helpers.events(task.folder / "logs/run", "final")
    assert skipped == steps and final["skipped_steps"] == len(steps), f"skipped {skipped}, not {steps}"
    states = dict(re.findall(r"state before step (\d+ on rank \d+): (\w+)", run.out))
    for step in steps:
        for rank in range(max(1, ranks)):
            before, behind = (states[f"{at} on rank {rank}"] for at in (step, step + 1))
            assert before == behind, f"step {step} changed rank {rank}"
    return []


def endless_nan(campaign: Campaign, task: Try) -> list[float]:
    """MAX_SKIPPED in a row end the run."""
    ranks, faults = 2 * (task.index % 2), ",".join(f"nan@{step}" for step in (8, 10, 11, 12))
    run = campaign.launch(task.folder, ranks, faults, MAX_SKIPPED=3)
    run.need(1 if ranks else 17)
    assert re.search(r"train_gpt\.py: step 12\b.*MAX_SKIPPED", run.err), f"not reported: {run.err[-1500:]}"
    return []


def drifted(campaign: Campaign, task: Try) -> list[float]:
    """One replica's weights change: the next validation finds it, but not which of two ranks is right."""
    ranks = (2, 4)[task.index % 2]
    step, rank = task.rng.randint(2, 19), task.rng.randrange(ranks == 2, ranks)
    run = campaign.launch(task.folder, ranks, f"drift@{step}:rank={rank}", VAL_LOSS_EVERY=20)
    run.need(1)
    named = re.search(rf"step 20: the weights of rank \[?{rank}\]? differ", run.err)
    assert named, f"not reported: {run.err[-1500:]}"
    assert set(re.findall(r"exitcode\s*: (-?\d+)", run.err)) <= {"17", "-15"}, run.err[-1500:]
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


def newest_step(run: Path) -> int:
    """The step of the run's newest checkpoint, which must be whole; 0 where there is none."""
    paths = sorted((run / "checkpoint").glob("step_*.ckpt"))
    return train_gpt.unpack_tensors(paths[-1].read_bytes())[1]["counters"]["steps"] if paths else 0


def disk_full(campaign: Campaign, task: Try) -> list[float]:
    """Others fill the disk while the run trains: it stops, and goes on when there is room."""
    with small_disk(task.folder / "logs") as disk:
        run = campaign.launch(task.folder)
        assert run.wait_for_step(task.rng.uniform(0, 0.8)) is None, "ended too soon"
        fill(disk, 0.3)
        kept = newest_step(disk / "run")
        run.need(16)
        assert "No space left on device" in run.err, f"not reported: {run.err}"
        assert newest_step(disk / "run") >= kept, "the last good checkpoint is gone"
        campaign.launch(task.folder).need(16)
        (disk / "filler").unlink()
        return campaign.resume(task.folder)


def file_limit(campaign: Campaign, task: Try) -> list[float]:
    """A quota: no file may grow beyond so many KiB. Below metrics.jsonl's size the run cannot end."""
    limit = task.rng.choice((task.rng.randint(1, 20), task.rng.randint(70, 180)))
    limited = ["bash", "-c", f'ulimit -f {limit}; exec "$0" "$@"', *helpers.command()]
    run = Launch(task.folder, campaign.env(), command=limited)
    run.need(0, 16)
    path = task.folder / "logs/run/train.log"
    log = path.read_text(encoding="utf-8") if path.exists() else ""
    assert "File too large" in log + run.err, "not reported"
    if run.process.returncode:
        return campaign.resume(task.folder)
    campaign.check_end(task.folder)
    return []


def read_only(campaign: Campaign, task: Try) -> list[float]:
    """The checkpoints' folder becomes read-only while the run trains, then the whole disk for a resume."""
    with small_disk(task.folder / "logs") as disk:
        run, folder = campaign.launch(task.folder), str(disk / "run/checkpoint")
        assert run.wait_for_step(task.rng.uniform(0.2, 0.8)) is None, "ended too soon"
        as_root("mount", "--bind", folder, folder)
        as_root("mount", "-o", "remount,ro,bind", folder)
        time.sleep(0.3)
        kept = newest_step(disk / "run")
        run.process.send_signal(signal.SIGTERM)
        run.need(16)
        assert "warning: no checkpoint" in run.out and "Read-only file system" in run.out, "no warning"
        as_root("umount", folder)
        assert newest_step(disk / "run") >= kept, "the last good checkpoint is gone"
        as_root("mount", "-o", "remount,ro", str(disk))
        run = campaign.launch(task.folder)
        run.need(2, 16)
        assert "Read-only file system" in run.err, f"not reported: {run.err}"
        as_root("mount", "-o", "remount,rw", str(disk))
        return campaign.resume(task.folder)


def disks(campaign: Campaign, task: Try) -> list[float]:
    return (disk_full, file_limit, read_only)[task.index % 3](campaign, task)


# --- rows: ranks and nodes --------------------------------------------------------------------------------

WORLDS = [(a, b) for a in (0, 2, 4, 8) for b in (0, 2, 4, 8) if a != b]  # 0: without torchrun
EIGHT = {"BATCH_SLOTS": 8, "TRAIN_BATCH_TOKENS": 512, "ITERATIONS": 60, "DIST_TIMEOUT": 120}


def other_world(campaign: Campaign, task: Try) -> list[float]:
    """Begun on one number of ranks, ended on another: the same losses but for rounding."""
    before, behind = WORLDS[(task.index * 5 + 3) % 12]
    campaign.launch(task.folder, before, "kill@30", CKPT_SECONDS=1e-6, **EIGHT).wait()
    assert newest_step(task.folder / "logs/run") > 0, "no checkpoint"
    run = campaign.launch(task.folder, behind, **EIGHT)
    run.need(0)
    found, expected = (end_of(folder) for folder in (task.folder / "logs/run", campaign.alone(0, **EIGHT)))
    losses = ([event["train_loss"] for event in end["logged"]] for end in (found, expected))
    assert np.allclose(*losses, rtol=1e-3), "losses differ by more than rounding"
    return [run.first_step]


def lost_rank(campaign: Campaign, task: Try) -> list[float]:
    """A rank stops or kills itself; the others say so and end, and torchrun names a dead one."""
    ranks, kind = (2, 4)[task.index % 2], ("stop", "kill")[task.index // 2 % 2]
    rank, timeout, step = task.rng.randrange(ranks), 6.0, task.rng.randint(40, 90)
    run = campaign.launch(task.folder, ranks, f"{kind}@{step}:rank={rank}", DIST_TIMEOUT=timeout)
    others = all_ranks([run], ranks)
    lost = others.pop(rank)
    seconds = watch_the_others([lost], others, timeout)
    if not launch.ended(lost):
        os.kill(lost, signal.SIGKILL)  # torchrun would wait half a minute for the stopped one
    run.wait()
    said = run.err.count("train_gpt.py: lost a rank: ")
    assert said == ranks - 1, f"{said} of {ranks - 1} say that a rank was lost: {run.err[-1500:]}"
    named = re.search(rf"rank +: {rank} .*\n +exitcode +: -9 ", run.err)
    assert kind == "stop" or named, f"torchrun does not name rank {rank}: {run.err[-1500:]}"
    if task.index % 4 in (0, 3):
        campaign.resume(task.folder, ranks)
    return [seconds]


@contextlib.contextmanager
def two_nodes(name: str) -> Iterator[list[str]]:
    """Two network namespaces joined by a veth pair: 10.77.0.1 and 10.77.0.2 on it."""
    names = [f"{name}a", f"{name}b"]
    ends = ["veth0", "netns", names[0], "type", "veth", "peer", "veth1", "netns", names[1]]
    try:
        for each in names:
            as_root("ip", "netns", "add", each)
        as_root("ip", "link", "add", *ends)
        for number, each in enumerate(names):
            address = f"10.77.0.{number + 1}/24"
            as_root("ip", "-n", each, "addr", "add", address, "dev", f"veth{number}")
            for device in ("lo", f"veth{number}"):
                as_root("ip", "-n", each, "link", "set", device, "up")
        yield names
    finally:
        for each in names:
            subprocess.run(["ip", "netns", "del", each], capture_output=True)


def launch_nodes(campaign: Campaign, cwd: Path, names: list[str], timeout: float) -> list[Launch]:
    """torchrun on both nodes, one rank each; they share the folder."""
    launches = []
    options = ["--nnodes=2", "--master_addr=10.77.0.1", "--master_port=29555"]
    for number, name in enumerate(names):
        env = campaign.env(2, GLOO_SOCKET_IFNAME=f"veth{number}", DIST_TIMEOUT=timeout)
        torchrun = helpers.command(1, torchrun=(*options, f"--node_rank={number}"))
        launches.append(Launch(cwd, env, command=["ip", "netns", "exec", name, *torchrun]))
    return launches


def lost_node(campaign: Campaign, task: Try) -> list[float]:
    """A node dies, or the link between them; the same command goes on, to the end of a run on one node."""
    kind, timeout = ("node 1", "node 0", "link")[task.index % 3], 8.0
    lost = 0 if kind == "node 0" else 1
    with two_nodes(f"bg{os.getpid()}n{task.index}") as names:
        launches = launch_nodes(campaign, task.folder, names, timeout)
        others, dead = all_ranks(launches, 2), []
        launches[0].wait(task.rng.uniform(0, 0.4))
        began = time.monotonic()
        if kind == "link":
            as_root("ip", "-n", names[0], "link", "set", "veth0", "down")
        else:
            dead = [others.pop(lost)]
            launches[lost].kill()
        watch_the_others(dead, others, timeout)
        seconds = time.monotonic() - began
        for each in launches:
            each.kill()  # torchrun itself may wait for the other node
        said = launches[1 - lost].err
        assert "lost a rank: " in said, f"{kind} is not reported: {said[-1500:]}"
        if kind == "link":
            as_root("ip", "-n", names[0], "link", "set", "veth0", "up")
        for each in launch_nodes(campaign, task.folder, names, timeout):
            each.need(0)
    campaign.check_end(task.folder, 2)
    return [seconds]


def restarted(campaign: Campaign, task: Try) -> list[float]:
    """torchrun --max-restarts: a rank is killed, torchrun starts all again, they go on by themselves."""
    torchrun = helpers.command(2, torchrun=("--standalone", "--max-restarts=1"))
    run = Launch(task.folder, campaign.env(2), command=torchrun)
    found = all_ranks([run], 2)
    run.wait(task.rng.uniform(0.1, 0.4))
    steps, began = run.out.count("step:"), time.monotonic()
    os.kill(task.rng.choice([*found.values()]), signal.SIGKILL)
    run.wait(until=lambda: run.out.count("step:") > steps + 2 and "resumed from" in run.out)
    seconds = time.monotonic() - began
    run.need(0)
    assert "resumed from" in run.out, "it did not go on from a checkpoint"
    campaign.check_end(task.folder, 2)
    return [seconds]


# --- rows: replay, second copy ----------------------------------------------------------------------------


def replayed(campaign: Campaign, task: Try) -> list[float]:
    """A run that operations end, killed and resumed in every second try, and its repetition."""
    ranks = 2 * (task.index % 4 == 3)
    env = {"ITERATIONS": 10**5, "MAX_FLOPS": task.rng.uniform(1e10, 2e10), "CKPT_SECONDS": 0.3}
    if task.index % 2:
        run = campaign.launch(task.folder, ranks, **env)
        run.wait_for_step(task.rng.uniform(0, 0.7))
        run.kill()
    for cwd in (task.folder, task.folder / "again"):
        campaign.launch(cwd, ranks, **env).need(0)
    assert end_of(task.folder / "again/logs/run") == end_of(task.folder / "logs/run")
    return []


def second_copy(campaign: Campaign, task: Try) -> list[float]:
    """A second copy is refused, the first goes on undisturbed."""
    run, ranks = campaign.launch(task.folder, provoke="sleep@40:seconds=15"), 2 * (task.index % 2)
    run.wait_for_step(task.rng.uniform(0, 0.3))
    second = campaign.launch(task.folder, ranks)
    second.need(1 if ranks else 2)
    assert "RUN_ID=run: " in second.err and "in use by" in second.err, f"not reported: {second.err[-1500:]}"
    assert run.runs(), "the first had ended: the try shows nothing"
    run.need(0)
    campaign.check_end(task.folder)
    return []


# --- main -------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    name: str
    promise: str
    timed: str  # what the median is of
    tries: int
    each: int  # tries in one call
    attempt: Callable[[Campaign, Try], list[float]]

    def calls(self, folder: Path) -> list[Try]:
        found = []
        for index, done in enumerate(range(0, self.tries, self.each)):
            rng = random.Random(f"{SEED} {self.name} {index}")
            count = min(self.each, self.tries - done)
            found.append(Try(folder / self.name / str(index), rng, index, count))
        return found


STEP, END = "to the first new step", "until the others had ended"
ROWS = [
    Row("kill", "SIGKILL at random moments, resumed until done: bit-exact end", STEP, 60, 5, killed),
    Row("signal", "SIGTERM, SIGINT, SIGHUP: exit 16, bit-exact end", STEP, 20, 5, signalled),
    Row("checkpoint", "checkpoint damaged: the one before, or refused", STEP, 180, 30, bad_checkpoint),
    Row("artifact", "artifact damaged: refused, or the same weights", "", 400, 100, bad_artifact),
    Row("numbers", "NaN or infinity: step skipped, state untouched", "", 30, 10, not_finite),
    Row("endless", "MAX_SKIPPED bad steps in a row: exit 17", "", 2, 1, endless_nan),
    Row("disk", "disk full, file limit, read-only: reported, bit-exact end", STEP, 8, 1, disks),
    Row("world", "resumed on other numbers of ranks (1, 2, 4, 8): same losses", STEP, 6, 1, other_world),
    Row("rank", "a rank stopped or killed (DIST_TIMEOUT=6): others end in time", END, 8, 1, lost_rank),
    Row("node", "two nodes, one or the link lost: ends in time, bit-exact end", END, 3, 1, lost_node),
    Row("replica", "a replica's weights changed: exit 17, rank named", "", 4, 1, drifted),
    Row("replay", "a run that MAX_FLOPS ends, repeated by its seed: same bits", "", 4, 1, replayed),
    Row("copy", "a second copy of a running run: refused, the first undisturbed", "", 3, 1, second_copy),
    Row("restart", "torchrun --max-restarts: a rank killed, bit-exact end", STEP, 2, 1, restarted),
]


class Outcome(NamedTuple):
    """What came of a call."""

    tried: int
    survived: int
    seconds: list[float]
    trouble: str  # why it failed, or was skipped


def outcome(campaign: Campaign, row: Row, task: Try) -> Outcome:
    """One call of a row. What fails loses all its tries, and leaves its folder."""
    task.folder.mkdir(parents=True)
    try:
        seconds = row.attempt(campaign, task)
    except Skip as error:
        return Outcome(0, 0, [], f"skipped: {error}")
    except Exception as error:  # what is wrong in the campaign itself counts, too
        return Outcome(task.count, 0, [], f"{row.name}: {type(error).__name__}: {error} (see {task.folder})")
    finally:
        end_all_below(task.folder)
    shutil.rmtree(task.folder)
    return Outcome(task.count, task.count, seconds, "")


def end_all_below(folder: Path) -> None:
    """What a failed try leaves running in its folder."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if folder in Path(process.cwd(), "x").parents:
                process.kill()


def cells(row: Row, outcomes: list[Outcome]) -> tuple[str, ...]:
    """A row of the table."""
    tried = sum(one.tried for one in outcomes)
    if not tried:
        return row.promise, "-", "-", outcomes[0].trouble
    seconds = [second for one in outcomes for second in one.seconds]
    median = f"{statistics.median(seconds):.1f} s {row.timed}" if seconds else "-"
    return row.promise, str(tried), str(sum(one.survived for one in outcomes)), median


def report(results: dict[Row, list[Outcome]], minutes: float) -> str:
    """The text of RELIABILITY.md."""
    describe = ["git", "-C", helpers.ROOT, "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    machine = train_gpt.Machine(torch.device("cpu")).facts()["processor"]
    table = [("promise", "tried", "survived", "median"), ("---", "---:", "---:", "---")]
    table += [cells(row, outcomes) for row, outcomes in results.items()]
    failures = [one.trouble for outcomes in results.values() for one in outcomes if one.survived < one.tried]
    lines = [
        "# Reliability",
        "",
        "What `tests/chaos.py` did to the script, and what survived. Written by one campaign, never by hand:",
        "",
        "```bash",
        "python -m tests.chaos",
        "```",
        "",
        f"{time.strftime('%Y-%m-%d')}, about {minutes:.0f} minutes on {machine}, {os.cpu_count()} cores; "
        f"torch {torch.__version__}.",
        f"The script: train_gpt.py of commit {commit}, sha256 {helpers.sha256(helpers.SCRIPT).hex()}.",
        "",
        *("| " + " | ".join(row) + " |" for row in table),
        "",
        *(f"- failed: {failure.splitlines()[0]}" for failure in failures),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--only", default=",".join(names), help="rows by name, with commas between them")
    parser.add_argument("--write", action="store_true", help="write the report, and the README's table")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if not set(chosen) <= set(names):
        parser.error(f"--only takes some of {', '.join(names)}")
    rows = [row for row in ROWS if row.name in chosen]
    if args.write and len(rows) < len(ROWS):
        parser.error("--write takes a campaign of all cases")
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="chaos_"))
    campaign = Campaign(folder)
    with ThreadPoolExecutor(JOBS) as pool:
        begun = {
            row: [pool.submit(outcome, campaign, row, task) for task in row.calls(folder)] for row in rows
        }
        results = {row: [one.result() for one in outcomes] for row, outcomes in begun.items()}
    text = report(results, (time.monotonic() - began) / 60)
    print(text)
    if args.write:
        readme.RELIABILITY.write_text(text, encoding="utf-8")
        readme.write()
    if "- failed: " in text:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
