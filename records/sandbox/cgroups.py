"""The kernel's account of a sandbox (cgroups): what it used is counted, bounded and ended as a whole.

A group holds a process and all that descends from it, whoever waits for them, and all memory that they touch:
memory files and page tables as well. Root has groups of version 1 where these are mounted, or of version 2
where no systemd manages them. Else systemd makes a scope, for root or for a user. Groups are made below the
caller's own, so that none of the caller's limits is evaded.
"""

import contextlib
import functools
import operator
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

V1, V2 = "cgroup v1", "cgroup v2"
CONTROLLERS_V1 = ("pids", "cpuacct", "memory")
PREFIX = "bytegolf-"  # of every group's name; the number of its referee's process follows
END_SECONDS = 10  # that killed processes may take to leave
SCOPE_SECONDS = "10"  # that systemd may take to make a scope
# The first program of a group joins it and becomes the sandbox: no moment is spent outside.
JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs" || exit 120; shift; done; shift; exec "$@"'


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
