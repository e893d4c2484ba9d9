"""What a sandbox may use: measured, bounded and ended as a whole.

The kernel's account (cgroups) does it where it can be had. A group holds a process and all that descends from
it, whoever waits for them, and all memory that they touch: memory files and page tables as well. Root has
groups of version 1 where these are mounted, or of version 2 where no systemd manages them. Else systemd makes
a scope, for root or for a user. Groups are made below the caller's own, so that none of the caller's limits
is evaded. Elsewhere a watchdog looks at the processes every 0.1 s.
"""

import contextlib
import functools
import operator
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from records.sandbox import MachineFull

V1, V2 = "cgroup v1", "cgroup v2"
CONTROLLERS_V1 = ("pids", "cpuacct", "memory")
PREFIX = "bytegolf-"  # of every group's name; the number of its referee's process follows
END_SECONDS = 10  # that killed processes may take to leave
SCOPE_SECONDS = "10"  # that systemd may take to make a scope
# The first program of a group joins it and becomes the sandbox: no moment is spent outside.
JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs" || exit 120; shift; done; shift; exec "$@"'
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


@dataclass(frozen=True)
class Usage:
    """What a sandbox used so far.

    The kernel counts caches of files toward the peak and gives them back when memory is short, so a peak at
    the limit is no fault: `killed` is.
    """

    seconds: float = 0.0  # of all processors
    memory: int = 0  # bytes at most at once
    tasks: int = 0  # processes and threads now
    killed: bool = False  # whether the kernel ended a process of it for want of memory
    refused: int = 0  # tasks that the kernel refused


# --- groups -----------------------------------------------------------------------------------------------


def new_name() -> str:
    return f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


class Group:
    """One sandbox's own folders: one in each hierarchy of version 1, or one alone in that of version 2."""

    def __init__(self, kind: str, folders: list[Path]):
        self.kind = kind
        self.folders = folders

    def words(self) -> list[str]:
        """The command line that runs what follows it inside."""
        return ["/bin/sh", "-c", JOIN, "sh", *map(str, self.folders), "--"]

    def make(self, memory: int, tasks: int) -> None:
        """`memory`, `tasks`: the most bytes and the most tasks of it. Raises OSError."""
        for folder in self.folders:
            folder.mkdir()
        self.bound(memory, tasks)

    def bound(self, memory: int, tasks: int) -> None:
        limit, swap, most_swap = "memory.max", "memory.swap.max", 0
        if self.kind == V1:
            limit, swap, most_swap = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", memory
        self.file(limit).write_text(str(memory))
        with contextlib.suppress(OSError):  # this kernel counts no swap
            self.file(swap).write_text(str(most_swap))
        self.file("pids.max").write_text(str(tasks))

    def file(self, name: str) -> Path:
        """A file of the account, in whichever folder; one that does not exist where no folder has it."""
        places = [folder / name for folder in self.folders]
        return next((path for path in places if path.exists()), Path("/nonexistent", name))

    def value(self, name: str, word: str = "") -> int:
        """The number in a file, or behind a word of it; 0 where this version or kernel has none."""
        with contextlib.suppress(OSError):
            if found := re.search(rf"^{word}\s*(\d+)$", self.file(name).read_text(), re.MULTILINE):
                return int(found[1])
        return 0

    def usage(self) -> Usage:
        """What its processes have used so far."""
        peak = self.value("memory.max_usage_in_bytes") or self.value("memory.peak")
        killed = self.value("memory.oom_control", "oom_kill") or self.value("memory.events", "oom_kill")
        return Usage(
            self.value("cpuacct.usage") / 1e9 or self.value("cpu.stat", "usage_usec") / 1e6,
            peak or self.value("memory.current"),
            self.value("pids.current"),
            killed > 0,
            self.value("pids.events", "max"),
        )

    def kill(self) -> None:
        """End all that live in it."""
        with contextlib.suppress(OSError):
            self.file("pids.max").write_text("0")  # nothing new is born meanwhile
        ends = time.monotonic() + END_SECONDS
        with contextlib.suppress(OSError):  # the group has gone
            while (pids := self.file("cgroup.procs").read_text().split()) and time.monotonic() < ends:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.01)

    def remove(self) -> None:
        """End what lives in it, and the group too, once the kernel has let go of the last process."""
        self.kill()
        ends = time.monotonic() + END_SECONDS
        while any(folder.exists() for folder in self.folders) and time.monotonic() < ends:
            for folder in self.folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            time.sleep(0.01)


class Scope(Group):
    """A scope of systemd, which makes the folder, and removes it once it is empty."""

    def __init__(self):
        super().__init__(V2, [])
        self.unit = new_name() + ".scope"
        self.options: list[str] = []
        self.last = Usage()

    def make(self, memory: int, tasks: int) -> None:
        values = {"MemoryMax": memory, "MemorySwapMax": 0, "TasksMax": tasks, "MemoryAccounting": "yes"}
        self.options = [f"--property={name}={value}" for name, value in values.items()]

    def words(self) -> list[str]:
        manager = [] if os.geteuid() == 0 else ["--user"]
        scope = ["systemd-run", "--scope", "--quiet", "--collect", f"--unit={self.unit}"]
        return [*scope, *manager, *self.options, "--"]

    def usage(self) -> Usage:
        """The last one that could be read."""
        self.folders = self.folders or [*mounts()["cgroup2"].rglob(self.unit)]
        self.last = max(super().usage(), self.last, key=operator.attrgetter("seconds"))
        return self.last

    def kill(self) -> None:
        self.usage()
        super().kill()


# --- what this machine has --------------------------------------------------------------------------------


@functools.cache
def mounts() -> dict[str, Path]:
    """Where each controller of version 1 is mounted, and version 2 as `cgroup2`."""
    found = {}
    for one in psutil.disk_partitions(all=True):
        if one.fstype == "cgroup2":
            found["cgroup2"] = Path(one.mountpoint)
        elif one.fstype == "cgroup":
            found |= dict.fromkeys(one.opts.split(","), Path(one.mountpoint))
    return found


def home(controller: str) -> Path | None:
    """The folder of this process's group; in a container it is the mount itself."""
    root = mounts().get(controller)
    for line in Path("/proc/self/cgroup").read_text().splitlines() if root else ():
        _, names, path = line.split(":", 2)
        if controller in (names or "cgroup2").split(","):
            folder = root / path.lstrip("/")
            return folder if folder.is_dir() else root
    return None


def group_v1() -> Group | None:
    """A group of version 1 that is still to be made."""
    homes = dict.fromkeys(home(name) for name in CONTROLLERS_V1)  # some are mounted together
    name = new_name()
    return None if None in homes else Group(V1, [folder / name for folder in homes])


def scope() -> Scope | None:
    """A scope of systemd's that is still to be made."""
    return Scope() if shutil.which("systemd-run") and "cgroup2" in mounts() else None


def group_v2() -> Group | None:
    """A group of version 2 that is still to be made, below the one that root has without systemd."""
    folder = home("cgroup2")
    if folder is None:
        return None
    with contextlib.suppress(OSError):  # refused where another than root's own group has processes
        (folder / "cgroup.subtree_control").write_text("+memory +pids")
    return Group(V2, [folder / new_name()])


def works(group: Group | None) -> bool:
    """Whether a process can be put into such a group, and is counted there."""
    if group is None:
        return False
    silent = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    try:
        group.make(1 << 30, 64)
        words = ["timeout", SCOPE_SECONDS, *group.words(), "sleep", "0.2"]
        seen = 0
        with subprocess.Popen(words, **silent) as process:
            while process.poll() is None:
                seen = max(seen, group.usage().tasks)
                time.sleep(0.02)
        return process.returncode == 0 and seen > 0 and group.usage().seconds > 0
    except OSError:
        return False
    finally:
        group.remove()


@functools.cache
def find() -> Callable[[], Group] | None:
    """What makes groups here; None where nothing does. What killed referees left is removed on the way."""
    clean()
    return next((way for way in (group_v1, scope, group_v2) if works(way())), None)


def make(memory: int, tasks: int) -> Group | None:
    """A group with these limits, in bytes and in processes and threads; None where there are no cgroups."""
    way = find()
    if way is None:
        return None
    group = way()
    try:
        group.make(memory, tasks)
    except BaseException:
        group.remove()
        raise
    return group


def clean() -> None:
    """Remove the empty groups of referees that were killed, wherever they ran."""
    for root in {place for name, place in mounts().items() if name in (*CONTROLLERS_V1, "cgroup2")}:
        for folder in [*root.rglob(f"{PREFIX}[0-9]*-*")]:
            pid = int(folder.name.split("-")[1])
            if not psutil.pid_exists(pid):
                with contextlib.suppress(OSError):  # something lives in it
                    folder.rmdir()


# --- the watchdog ---------------------------------------------------------------------------------------


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
