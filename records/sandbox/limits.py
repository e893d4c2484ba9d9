"""Measure what a process and all its descendants use, and end them if it is more than they may."""

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import BinaryIO

import psutil

LEAST_FREE = 256 << 20  # bytes of memory that this machine must keep, whoever holds them
TAIL = 2000  # bytes that are kept of what a process writes
LOOK_SECONDS = 0.1  # between two looks


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use."""

    memory: int = 8 << 30  # bytes of all its processes together
    tasks: int = 128  # processes and threads
    processor: float = 1800.0  # seconds of all its tasks together
    seconds: float = 3600.0  # of the wall clock, a wide stop for what sleeps
    output: int = 1 << 20  # bytes on stdout and stderr
    files: int = 1 << 28  # bytes of one file, and four times that of all of /tmp


def tree(root: int) -> dict[psutil.Process, dict]:
    """A process and all that descend from it, with what they use."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(root)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found[process] = process.as_dict(["num_threads", "memory_info", "cpu_times"])
    return found


def kill(process: subprocess.Popen) -> None:
    """End a process with its group; bubblewrap's first process takes the rest of the sandbox along."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


class Watchdog(threading.Thread):
    """Ends a tree of processes that uses more than it may. Reads its output `out` and limits that, too.

    `process` leads a group of its own (start_new_session=True). `verdict` is (kind, message) once it ended
    the process; `seconds` are those of all processors so far.
    """

    def __init__(self, process: subprocess.Popen, out: BinaryIO, limits: Limits):
        super().__init__(daemon=True)
        self.process = process
        self.out = out
        self.limits = limits
        self.verdict = None
        self.seconds = 0.0
        self.tail = b""
        self.written = 0
        self.seen = {}
        self.began = time.monotonic()
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        os.set_blocking(self.out.fileno(), False)
        try:
            while not self.stopped.is_set() and self.verdict is None:
                self.read()
                self.look()
        finally:  # whoever waits for the process must not wait for ever
            self.count_seconds(tree(self.process.pid))
            kill(self.process)

    def read(self) -> None:
        """What was written since the last look."""
        if select.select([self.out], [], [], LOOK_SECONDS)[0]:
            chunk = os.read(self.out.fileno(), 1 << 16)
            self.written += len(chunk)
            self.tail = (self.tail + chunk)[-TAIL:]
            if not chunk:
                self.stopped.wait(LOOK_SECONDS)

    def look(self) -> None:
        """One look at the tree."""
        limits = self.limits
        tasks = tree(self.process.pid)
        self.count_seconds(tasks)
        threads = sum(task["num_threads"] for task in tasks.values())
        memory = sum(task["memory_info"].rss for task in tasks.values())
        if self.written > limits.output:
            self.end("output", f"wrote more than {limits.output} bytes to stdout")
        elif threads > limits.tasks:
            self.end("tasks", f"has {threads} processes and threads, at most {limits.tasks} are allowed")
        elif memory > limits.memory or psutil.virtual_memory().available < LEAST_FREE:
            self.end("memory", f"holds {memory >> 20} MiB, at most {limits.memory >> 20} are allowed")
        elif self.seconds > limits.processor:
            self.end("time", f"used more than {limits.processor:.4g} processor seconds")
        elif time.monotonic() - self.began > limits.seconds:
            self.end("time", f"took longer than {limits.seconds:.4g} seconds")

    def count_seconds(self, tasks: dict[psutil.Process, dict]) -> None:
        """Add up every process seen so far: no parent counts a child that it does not wait for."""
        times = {process: task["cpu_times"] for process, task in tasks.items()}
        self.seen |= {process: own.user + own.system for process, own in times.items()}
        accounts = sum(sum(own[:4]) for own in times.values())  # with the children that have ended
        self.seconds = max(self.seconds, accounts, sum(self.seen.values()))

    def end(self, kind: str, message: str) -> None:
        self.verdict = kind, message

    def stop(self) -> None:
        """Look a last time, and end what still lives."""
        self.stopped.set()
        self.join()
        self.process.wait()
