"""The campaign: kills, signals, damage, full disks and lost machines against the real script, counted.

    python -m tests.chaos                      all cases, about a quarter of an hour on two cores
    python -m tests.chaos --quick              a few tries of each, about two minutes
    python -m tests.chaos --only kill,disk     some rows; --seed N: other moments
    python -m tests.chaos --write              all cases, written to tests/RELIABILITY.md and README.md
    python -m tests.chaos --write --resume /tmp/chaos_x     a campaign that was cut short goes on

One row a promise: tried, survived, and the median of what the row times. A try that fails is reported with
the folder that it leaves. What this machine does not allow (mounts, network namespaces) is reported as
skipped. The seed gives the moments, but not what the machine does then, so no two campaigns hit the same
places.
Each try is a line of tries.jsonl in the campaign's folder, which the first line of the output names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import train_gpt
from tests.kit import launch, readme
from tests.kit import tries as campaigns
from tests.kit.launch import Launch, check, check_same, end_of
from tests.kit.tries import Campaign, Promise, Skip, Try

MARGIN = 10.0  # seconds beyond DIST_TIMEOUT in which a rank has ended: Python's exit on a busy machine


def newest_step(run: Path) -> int:
    """The step of the run's newest checkpoint, which must be whole; 0 where there is none."""
    paths = sorted((run / "checkpoint").glob("step_*.ckpt"))
    if not paths:
        return 0
    blob = paths[-1].read_bytes()
    return train_gpt.unpack_tensors(blob)[1]["counters"]["steps"]


# --- rows: kills and signals ------------------------------------------------------------------------------


def kill_once(campaign: Campaign, task: Try, cwd: Path, ranks: int) -> tuple[int, list[float]]:
    """Start or go on, and kill: at any moment, or inside a checkpoint's write. (exit code, see killed)"""
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
        code = -signal.SIGKILL
    fine = (0, -signal.SIGKILL, 1) if ranks else (0, -signal.SIGKILL)
    check(code in fine, f"exit {code}: {run.err[-1500:]}")
    return code, [run.first_step] if run.first_step else []


def killed(campaign: Campaign, task: Try) -> list[float]:
    """A run is killed, resumed, killed ... until it is done; if that is too soon, another one is begun.

    Every fourth has two ranks. The seconds are those to the first step of each.
    """
    ranks, seconds, kills, copy = 2 * (task.index % 4 == 3), [], 0, 0
    while kills < task.count:
        cwd = task.folder / str(copy)
        code, first = kill_once(campaign, task, cwd, ranks)
        seconds += first
        kills += code != 0
        if launch.is_done(cwd / "logs/run"):  # perhaps between its last line and its end
            check_same(end_of(cwd / "logs/run"), campaign.reference(ranks))
            copy += 1
    if (cwd / "logs/run").exists() and not launch.is_done(cwd / "logs/run"):
        seconds += campaign.resume(cwd, ranks)
    return seconds


SIGNALS = [signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGHUP]


def signal_once(campaign: Campaign, task: Try, cwd: Path, ranks: int) -> tuple[int | None, list[float]]:
    """Start or go on, and signal: to torchrun, or to one rank. (0 if it ended before, seconds to a step)"""
    number, run = task.rng.choice(SIGNALS), campaign.launch(cwd, ranks)
    if run.wait_for_step(task.rng.uniform(0, 1.2)) is not None:
        run.need(0)
        return 0, []
    pid = run.process.pid
    if ranks:
        pid = task.rng.choice([pid, *run.ranks().values()])
    with contextlib.suppress(ProcessLookupError):  # a rank that ended meanwhile
        os.kill(pid, number)
    code = run.wait()
    if launch.is_done(cwd / "logs/run"):  # the signal came between the run's last line and its end
        return 0, [run.first_step]
    if code:
        check(code == (1 if ranks else 16), f"exit {code} after {number.name}: {run.err[-1500:]}")
        said = re.search(r"train_gpt\.py: stopped by a signal .*RUN_ID=run goes on", run.err)
        check(said, f"it does not say how to go on: {run.err[-1500:]}")
    return code, [run.first_step]


def signalled(campaign: Campaign, task: Try) -> list[float]:
    """As for kills."""
    ranks, seconds, signals, copy, code = 2 * (task.index % 3 == 1), [], 0, 0, 0
    while signals < task.count:
        cwd = task.folder / str(copy)
        code, first = signal_once(campaign, task, cwd, ranks)
        seconds += first
        signals += code != 0
        if code == 0:
            check_same(end_of(cwd / "logs/run"), campaign.reference(ranks))
            copy += 1
    return seconds + (campaign.resume(cwd, ranks) if code else [])


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


def harmful(blob: bytes, rng: random.Random) -> bytes:
    """A damage that is noticed; one that is not must change nothing, as few bits of zlib's own do."""
    arrays, facts = train_gpt.unpack_tensors(blob)
    while True:
        found = damage(blob, rng)
        try:
            others, other_facts = train_gpt.unpack_tensors(found)
        except train_gpt.DAMAGED:
            return found
        check(facts == other_facts and same_arrays(arrays, others), "taken with other numbers")


def damage_checkpoints(folder: Path, rng: random.Random) -> tuple[list[Path], int]:
    """Damage the newest, or both. (checkpoints, newest first; how many)"""
    paths, number = sorted(folder.glob("step_*.ckpt"), reverse=True), rng.choice((1, 1, 2))
    for path in paths[:number]:
        path.write_bytes(harmful(path.read_bytes(), rng))
    return paths, number


def same_arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    same = [name in other and np.array_equal(array, other[name]) for name, array in one.items()]
    return set(one) == set(other) and all(same)


def bad_checkpoint(campaign: Campaign, task: Try) -> list[float]:
    """Most of them read in process, the last of a call by the script."""
    source = stopped_run(campaign)
    for number in range(task.count - 1):
        folder = task.folder / str(number)
        shutil.copytree(source / "logs/run/checkpoint", folder)
        whole = {path.name: path.read_bytes() for path in folder.glob("step_*.ckpt")}
        paths, bad = damage_checkpoints(folder, task.rng)
        try:
            arrays, facts, notes = train_gpt.newest_checkpoint(folder)
        except train_gpt.DataError as error:
            check(bad == len(paths), f"refused though one is whole: {error}")
        else:
            check(bad < len(paths), "loaded though all are damaged")
            expected, facts_then = train_gpt.unpack_tensors(whole[paths[bad].name])
            same = facts == facts_then and same_arrays(arrays, expected)
            check(same, "not what the whole checkpoint before it holds")
            check(str(paths[0]) in notes[0], f"not reported: {notes}")
        shutil.rmtree(folder)
    return damaged_by_script(campaign, task.folder / "script", task.rng)


def damaged_by_script(campaign: Campaign, cwd: Path, rng: random.Random) -> list[float]:
    shutil.copytree(stopped_run(campaign), cwd)
    paths, bad = damage_checkpoints(cwd / "logs/run/checkpoint", rng)
    if bad < len(paths):
        seconds = campaign.resume(cwd)
        log = (cwd / "logs/run/train.log").read_text(encoding="utf-8")
        check(f"{paths[0].name} is damaged" in log, "the log does not report the damage")
        return seconds
    run = campaign.launch(cwd)
    run.need(3)
    check("all damaged and put aside" in run.err, f"not reported: {run.err}")
    return campaign.resume(cwd)  # from the start


def bad_artifact(campaign: Campaign, task: Try) -> list[float]:
    """Refused, or the very same weights: not every bit of a zlib stream means something."""
    campaign.reference()
    blob = (campaign.folder / "made/alone_0/logs/run/model.ptz").read_bytes()
    settings, weights, _ = train_gpt.decode_artifact(blob, "whole")
    for _ in range(task.count):
        with contextlib.suppress(train_gpt.DataError):
            found, arrays, _ = train_gpt.decode_artifact(damage(blob, task.rng), "damaged")
            check(found == settings and same_arrays(arrays, weights), "taken with other weights")
    (task.folder / "model.ptz").write_bytes(blob[:-1])
    run = campaign.launch(task.folder, EVAL_ONLY="model.ptz")
    run.need(3)
    check("model.ptz is damaged or of another script" in run.err, f"not reported: {run.err}")
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
    logged = launch.events(task.folder / "logs/run")
    texts = [event["text"] for event in logged if event["event"] == "warning"]
    warned = {int(re.search(r"\d+", text)[0]): text for text in texts}
    check(
        [*warned] == steps and logged[-1]["skipped_steps"] == len(steps), f"skipped {[*warned]}, not {steps}"
    )
    states = dict(re.findall(r"state before step (\d+ on rank \d+): (\w+)", run.out))
    for step in steps:
        for rank in range(max(1, ranks)):
            before, behind = (states[f"{at} on rank {rank}"] for at in (step, step + 1))
            check(before == behind, f"step {step} changed rank {rank}")
    return []


def endless_nan(campaign: Campaign, task: Try) -> list[float]:
    """MAX_SKIPPED in a row end the run."""
    ranks, faults = 2 * (task.index % 2), ",".join(f"nan@{step}" for step in (8, 10, 11, 12))
    run = campaign.launch(task.folder, ranks, faults, MAX_SKIPPED=3)
    run.need(1 if ranks else 17)
    check(re.search(r"train_gpt\.py: step 12\b.*MAX_SKIPPED", run.err), f"not reported: {run.err[-1500:]}")
    return []


def drifted(campaign: Campaign, task: Try) -> list[float]:
    """One replica's weights change: the next validation finds it, but not which of two ranks is right."""
    ranks = (2, 4)[task.index % 2]
    step, rank = task.rng.randint(2, 19), task.rng.randrange(ranks == 2, ranks)
    run = campaign.launch(task.folder, ranks, f"drift@{step}:rank={rank}", VAL_LOSS_EVERY=20)
    run.need(1)
    named = re.search(rf"step 20: the weights of rank \[?{rank}\]? differ", run.err)
    check(named, f"not reported: {run.err[-1500:]}")
    check(set(re.findall(r"exitcode\s*: (-?\d+)", run.err)) <= {"17", "-15"}, run.err[-1500:])
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


def disk_full(campaign: Campaign, task: Try) -> list[float]:
    """Others fill the disk while the run trains: it stops, and goes on when there is room."""
    with small_disk(task.folder / "logs") as disk:
        run = campaign.launch(task.folder)
        check(run.wait_for_step(task.rng.uniform(0, 0.8)) is None, "ended too soon")
        fill(disk, 0.3)
        kept = newest_step(disk / "run")
        run.need(16)
        check("No space left on device" in run.err, f"not reported: {run.err}")
        check(newest_step(disk / "run") >= kept, "the last good checkpoint is gone")
        campaign.launch(task.folder).need(16)
        (disk / "filler").unlink()
        return campaign.resume(task.folder)


def file_limit(campaign: Campaign, task: Try) -> list[float]:
    """A quota: no file may grow beyond so many KiB. Below metrics.jsonl's size the run cannot end."""
    limit = task.rng.choice((task.rng.randint(1, 20), task.rng.randint(70, 180)))
    limited = ["bash", "-c", f'ulimit -f {limit}; exec "$0" "$@"', *launch.command()]
    run = Launch(task.folder, campaign.env(), limited)
    run.need(0, 16)
    path = task.folder / "logs/run/train.log"
    log = path.read_text(encoding="utf-8") if path.exists() else ""
    check("File too large" in log + run.err, "not reported")
    if run.process.returncode:
        return campaign.resume(task.folder)
    check_same(end_of(task.folder / "logs/run"), campaign.reference())
    return []


def read_only(campaign: Campaign, task: Try) -> list[float]:
    """The checkpoints' folder becomes read-only while the run trains, then the whole disk for a resume."""
    with small_disk(task.folder / "logs") as disk:
        run, folder = campaign.launch(task.folder), str(disk / "run/checkpoint")
        check(run.wait_for_step(task.rng.uniform(0.2, 0.8)) is None, "ended too soon")
        as_root("mount", "--bind", folder, folder)
        as_root("mount", "-o", "remount,ro,bind", folder)
        time.sleep(0.3)
        kept = newest_step(disk / "run")
        run.process.send_signal(signal.SIGTERM)
        run.need(16)
        check("warning: no checkpoint" in run.out and "Read-only file system" in run.out, "no warning")
        as_root("umount", folder)
        check(newest_step(disk / "run") >= kept, "the last good checkpoint is gone")
        as_root("mount", "-o", "remount,ro", str(disk))
        run = campaign.launch(task.folder)
        run.need(2, 16)
        check("Read-only file system" in run.err, f"not reported: {run.err}")
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

    def begin(cwd: Path) -> None:
        campaign.launch(cwd, before, "kill@30", CKPT_SECONDS=1e-6, **EIGHT).wait()
        check(newest_step(cwd / "logs/run") > 0, "no checkpoint")

    cwd = task.folder / "run"
    shutil.copytree(campaign.made(f"world_{before}", begin), cwd)
    run = campaign.launch(cwd, behind, **EIGHT)
    run.need(0)
    found, expected = end_of(cwd / "logs/run"), campaign.reference(0, **EIGHT)
    launch.check_steps(found, EIGHT["ITERATIONS"])
    losses = ([event["train_loss"] for event in end.steps] for end in (found, expected))
    check(np.allclose(*losses, rtol=1e-3), "losses differ by more than rounding")
    return [run.first_step]


def watch_the_others(lost: list[int], others: dict[int, int], timeout: float) -> float:
    """Seconds from the loss of some processes to the end of all other ranks, which must be in time."""
    end = time.monotonic() + launch.PATIENCE
    while not all(launch.state_of(pid) in ("", "Z", "T") for pid in lost):
        check(time.monotonic() < end, "the rank was never lost")
        time.sleep(0.02)
    began = time.monotonic()
    while alive := [rank for rank, pid in others.items() if not launch.ended(pid)]:
        late = time.monotonic() - began > timeout + MARGIN
        check(not late, f"ranks {alive} still run {timeout + MARGIN:.0f} s after the loss")
        time.sleep(0.02)
    return time.monotonic() - began


def all_ranks(launches: list[Launch], world: int) -> dict[int, int]:
    """Process ids of all ranks, once each trains."""
    launches[0].wait_for_step()
    found = {rank: pid for each in launches for rank, pid in each.ranks().items()}
    check(len(found) == world, f"ranks {found}: {launches[0].err[-1500:]}")
    return found


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
    check(said == ranks - 1, f"{said} of {ranks - 1} say that a rank was lost: {run.err[-1500:]}")
    named = re.search(rf"rank +: {rank} .*\n +exitcode +: -9 ", run.err)
    check(kind == "stop" or named, f"torchrun does not name rank {rank}: {run.err[-1500:]}")
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
    options = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=10.77.0.1", "--master_port=29555"]
    for number, name in enumerate(names):
        env = campaign.env(2, GLOO_SOCKET_IFNAME=f"veth{number}", DIST_TIMEOUT=timeout)
        torchrun = launch.under_torchrun(*options, f"--node_rank={number}")
        launches.append(Launch(cwd, env, ["ip", "netns", "exec", name, *torchrun]))
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
        check("lost a rank: " in said, f"{kind} is not reported: {said[-1500:]}")
        if kind == "link":
            as_root("ip", "-n", names[0], "link", "set", "veth0", "up")
        for each in launch_nodes(campaign, task.folder, names, timeout):
            each.need(0)
    check_same(end_of(task.folder / "logs/run"), campaign.reference(2))
    return [seconds]


def restarted(campaign: Campaign, task: Try) -> list[float]:
    """torchrun --max-restarts: a rank is killed, torchrun starts all again, they go on by themselves."""
    torchrun = launch.under_torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=1")
    run = Launch(task.folder, campaign.env(2), torchrun)
    found = all_ranks([run], 2)
    run.wait(task.rng.uniform(0.1, 0.4))
    steps, began = run.out.count("step:"), time.monotonic()
    os.kill(task.rng.choice([*found.values()]), signal.SIGKILL)
    run.wait(until=lambda: run.out.count("step:") > steps + 2 and "resumed from" in run.out)
    seconds = time.monotonic() - began
    run.need(0)
    check("resumed from" in run.out, "it did not go on from a checkpoint")
    check_same(end_of(task.folder / "logs/run"), campaign.reference(2))
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
    check_same(end_of(task.folder / "again/logs/run"), end_of(task.folder / "logs/run"))
    return []


def second_copy(campaign: Campaign, task: Try) -> list[float]:
    """A second copy is refused, the first goes on undisturbed."""
    run, ranks = campaign.launch(task.folder, provoke="sleep@40:seconds=15"), 2 * (task.index % 2)
    run.wait_for_step(task.rng.uniform(0, 0.3))
    second = campaign.launch(task.folder, ranks)
    second.need(1 if ranks else 2)
    check("RUN_ID=run: " in second.err and "in use by" in second.err, f"not reported: {second.err[-1500:]}")
    check(run.look(), "the first had ended: the try shows nothing")
    run.need(0)
    check_same(end_of(task.folder / "logs/run"), campaign.reference())
    return []


STEP, END = "to the first new step", "until the others had ended"
ROWS = [
    Promise("kill", "SIGKILL at random moments, resumed until done: bit-exact end", STEP, 60, 3, 5, killed),
    Promise("signal", "SIGTERM, SIGINT, SIGHUP: exit 16, bit-exact end", STEP, 20, 2, 5, signalled),
    Promise(
        "checkpoint", "checkpoint damaged: the one before, or refused", STEP, 180, 30, 30, bad_checkpoint
    ),
    Promise("artifact", "artifact damaged: refused, or the same weights", "", 400, 100, 100, bad_artifact),
    Promise("numbers", "NaN or infinity: step skipped, state untouched", "", 30, 10, 10, not_finite),
    Promise("endless", "MAX_SKIPPED bad steps in a row: exit 17", "", 2, 1, 1, endless_nan),
    Promise("disk", "disk full, file limit, read-only: reported, bit-exact end", STEP, 8, 2, 1, disks),
    Promise(
        "world", "resumed on other numbers of ranks (1, 2, 4, 8): same losses", STEP, 6, 1, 1, other_world
    ),
    Promise("rank", "a rank stopped or killed (DIST_TIMEOUT=6): others end in time", END, 8, 1, 1, lost_rank),
    Promise("node", "two nodes, one or the link lost: ends in time, bit-exact end", END, 3, 1, 1, lost_node),
    Promise("replica", "a replica's weights changed: exit 17, rank named", "", 4, 1, 1, drifted),
    Promise("replay", "a run that MAX_FLOPS ends, repeated by its seed: same bits", "", 4, 1, 1, replayed),
    Promise(
        "copy", "a second copy of a running run: refused, the first undisturbed", "", 3, 1, 1, second_copy
    ),
    Promise("restart", "torchrun --max-restarts: a rank killed, bit-exact end", STEP, 2, 0, 1, restarted),
]


# --- main -------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few tries of each row")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--only", default=",".join(names), help="rows by name, with commas between them")
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with a campaign that was cut")
    parser.add_argument("--write", action="store_true", help="write the report, and the README's table")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if not set(chosen) <= set(names):
        parser.error(f"--only takes some of {', '.join(names)}")
    args.rows = [row for row in ROWS if row.name in chosen]
    if args.write and (args.quick or len(args.rows) < len(ROWS)):
        parser.error("--write takes a campaign of all cases")
    return args


def main() -> int:
    args = arguments()
    campaign = campaigns.open_campaign(args)
    print(f"{campaign.folder}: tries.jsonl has each try; --resume {campaign.folder} goes on", flush=True)
    results = campaign.run(args.rows, args.jobs, lambda line: print(line, flush=True))
    text = campaigns.report(campaign, results)
    print(text)
    if args.write:
        campaigns.REPORT.write_text(text, encoding="utf-8")
        page = readme.with_tables(readme.README.read_text(encoding="utf-8"))
        readme.README.write_text(page, encoding="utf-8")
    if any(result.survived < result.tried for result in results):
        return 1
    shutil.rmtree(campaign.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
