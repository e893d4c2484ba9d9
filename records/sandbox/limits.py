"""Measure what a process and all its descendants use, and end them if it is more than they may.

The kernel's cgroups do it where they can be had. Elsewhere a watchdog looks at the processes every 0.1 s.
"""

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from records.sandbox import MachineFull
from records.sandbox.cgroups import Group, Usage

LEAST_FREE = 256 << 20  # bytes of memory that this machine must keep, whoever holds them
NEAR = 0.9  # of its limit: below, it was the machine that had no more memory
TAIL = 2000  # bytes that are kept of what a process writes
LOOK_SECONDS = 0.1  # between two looks


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use."""

    memory: int = 8 << 30  # bytes of all its processes together; mapped files are none of it
    tasks: int = 2048  # processes and threads: numpy and torch start one of each for each of 128 cores
    processor: float = 1800.0  # seconds of all its tasks together
    seconds: float = 3600.0  # of the wall clock, a wide stop for what sleeps
    answer: float = 900.0  # of the wall clock, from a question to its answer; loading is the first
    output: int = 1 << 20  # bytes on stdout and stderr
    files: int = 1 << 28  # bytes of one file, and a quarter of those of all files that it writes


def kill(process: subprocess.Popen) -> None:
    """End a process with its group; bubblewrap's first process takes the rest of the sandbox along."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def tree(root: int) -> dict[psutil.Process, dict]:
    """A process and all that descend from it, with what they use."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(root)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found[process] = process.as_dict(["num_threads", "memory_info", "cpu_times"])
    return found


class Tree:
    """The account of a process tree where there are no cgroups.

    It misses what lives shorter than a look, and memory that belongs to no process, such as memory files.
    """

    kind = "watchdog"

    def __init__(self, process: subprocess.Popen):
        self.process = process
        self.seen: dict[psutil.Process, float] = {}  # seconds: no parent counts a child that it leaves alone

    def usage(self) -> Usage:
        """What the tree holds now, and the seconds of all that were seen, or are counted with those there."""
        tasks = tree(self.process.pid)
        times = {process: task["cpu_times"] for process, task in tasks.items()}
        self.seen |= {process: own.user + own.system for process, own in times.items()}
        accounts = sum(sum(own[:4]) for own in times.values())  # with the children that have ended
        seconds = max(accounts, sum(self.seen.values()))
        memory = sum(task["memory_info"].rss for task in tasks.values())
        return Usage(seconds, memory, sum(task["num_threads"] for task in tasks.values()))


class Watchdog(threading.Thread):
    """Ends a tree of processes that uses more than it may. Reads its output and limits that, too.

    `process` leads a group of its own (start_new_session=True) and lives in the cgroup `group`, if there is
    one. `kind` says which account was believed. `verdict` is (kind, message) once it ended the process; the
    kind `machine` is no fault of the process. `space`: where the process writes its files.
    """

    def __init__(
        self,
        process: subprocess.Popen,
        limits: Limits,
        group: Group | None = None,
        space: Path | None = None,
    ):
        super().__init__(daemon=True)
        self.process = process
        self.out: BinaryIO = process.stderr or process.stdout
        self.limits = limits
        self.group = group
        self.account = group or Tree(process)
        self.kind = self.account.kind
        self.space = space
        self.verdict: tuple[str, str] | None = None
        self.seconds = 0.0  # of all processors so far
        self.tail = b""
        self.written = 0
        self.began = time.monotonic()
        self.asked: float | None = None  # when the question was put that is not answered yet
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        os.set_blocking(self.out.fileno(), False)
        try:
            while not self.stopped.is_set() and self.verdict is None:
                self.read()
                self.look()
        finally:  # whoever waits for the process must not wait for ever
            self.usage()
            kill(self.process)

    def read(self) -> None:
        """What was written since the last look."""
        if select.select([self.out], [], [], LOOK_SECONDS)[0]:
            chunk = os.read(self.out.fileno(), 1 << 16)
            self.written += len(chunk)
            self.tail = (self.tail + chunk)[-TAIL:]
            if not chunk:
                self.stopped.wait(LOOK_SECONDS)

    def usage(self) -> Usage:
        used = self.account.usage()
        self.seconds = max(self.seconds, used.seconds)
        return used

    def look(self) -> None:
        """One look at the account, the clock and the machine."""
        limits = self.limits
        used = self.usage()
        now = time.monotonic()
        waited = now - (self.asked or now)
        tasks = used.tasks + min(used.refused, 1)
        if self.written > limits.output:
            self.verdict = "output", f"wrote more than {limits.output} bytes to stdout"
        elif tasks > limits.tasks or used.refused:
            found = f"has {tasks} processes and threads, at most {limits.tasks} are allowed"
            self.verdict = "tasks", found
        elif used.memory > limits.memory or (used.killed and used.memory > NEAR * limits.memory):
            found = f"holds {used.memory >> 20} MiB, at most {limits.memory >> 20} are allowed"
            self.verdict = "memory", found
        elif self.seconds > limits.processor:
            found = f"used more than {limits.processor:.4g} processor seconds: {self.seconds:.4g}"
            self.verdict = "time", found
        elif now - self.began > limits.seconds:
            self.verdict = "time", f"took longer than {limits.seconds:.4g} seconds"
        elif waited > limits.answer:
            self.verdict = "time", f"gave no answer for more than {limits.answer:.4g} seconds"
        elif used.killed or psutil.virtual_memory().available < LEAST_FREE:
            self.verdict = "machine", "this machine is out of memory"

    def stop(self) -> None:
        """Look a last time, and end what still lives."""
        self.stopped.set()
        self.join()
        if self.group:
            self.group.kill()
        self.process.wait()
        self.usage()

    def check_machine(self) -> None:
        """Raises MachineFull if it was this machine that ended the process."""
        if self.verdict and self.verdict[0] == "machine":
            raise MachineFull(f"{self.verdict[1]}: make room, then do it again; no verdict on the record")
