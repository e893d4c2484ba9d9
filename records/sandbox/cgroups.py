"""The kernel's account of a sandbox (cgroups): what it used is counted, bounded and ended as a whole.

A group holds a process and all that descends from it, whoever waits for them, and all memory that they touch:
memory files and page tables as well. Version 1 is used where its hierarchies are mounted and can be written
to. Version 2 is used in a folder that was delegated to us, or in a scope that systemd makes. Groups are made
below the caller's own, so that none of the caller's limits is evaded.
"""

import abc
import contextlib
import fcntl
import functools
import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from data.files import locked

PREFIX = "bytegolf-"  # of every group's name
NEEDED_V1 = ("memory", "cpuacct", "pids")
NEEDED_V2 = {"memory", "pids"}  # seconds are counted without a controller
END_SECONDS = 10  # that killed processes may take to leave
SCOPE_SECONDS = 10  # that systemd may take to make a scope
# The first program of a group joins it and becomes the sandbox: no moment is spent outside.
JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs" || exit 120; shift; done; shift; exec "$@"'


@dataclass(frozen=True)
class Usage:
    """What a sandbox used so far.

    The kernel counts caches of files toward the peak and gives them back when memory is short, so a peak at
    the limit is no fault: `killed` is.
    """

    seconds: float  # of all processors
    memory: int  # bytes at most at once
    tasks: int  # processes and threads now
    killed: bool = False  # whether the kernel ended a process of it for want of memory
    refused: int = 0  # tasks that the kernel refused


def pairs(path: Path) -> dict[str, int]:
    """A file of lines such as `oom_kill 1`; empty where there is none."""
    try:
        lines = path.read_text().split("\n")
    except OSError:
        return {}
    return {name: int(value) for name, _, value in (line.partition(" ") for line in lines) if value.isdigit()}


def number(path: Path) -> int:
    """A file that holds one number; 0 where it has none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


# --- groups -----------------------------------------------------------------------------------------------


class Group(abc.ABC):
    """One sandbox's own folders. A lock on the first one is held as long as its referee lives."""

    kind = ""

    def __init__(self, folders: list[Path]):
        self.folders = folders
        self.lock = -1

    def words(self) -> list[str]:
        """The command line that runs what follows it inside."""
        return ["/bin/sh", "-c", JOIN, "sh", *map(str, self.folders), "--"]

    def make(self, memory: int, tasks: int) -> None:
        """Raises OSError."""
        first = self.folders[0]
        with locked(first.parent):  # nobody takes it for one that a killed referee left
            first.mkdir()
            self.lock = os.open(first, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        for folder in self.folders[1:]:
            folder.mkdir()
        self.bound(memory, tasks)

    @abc.abstractmethod
    def bound(self, memory: int, tasks: int) -> None:
        """Set the most bytes of memory and the most tasks."""

    @abc.abstractmethod
    def usage(self) -> Usage:
        """What its processes have used so far."""

    def kill(self) -> None:
        """End all that live in it."""
        for folder in reversed(self.folders):  # the one that bounds tasks first
            end_all(folder)

    def remove(self) -> None:
        """End what lives in it, and the group too."""
        self.kill()
        for folder in self.folders:
            remove(folder)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


class GroupV1(Group):
    """One folder in each of three hierarchies."""

    kind = "cgroup v1"

    @property
    def memory(self) -> Path:
        return self.folders[0]

    @property
    def processor(self) -> Path:
        return self.folders[1]

    @property
    def tasks(self) -> Path:
        return self.folders[2]

    def bound(self, memory: int, tasks: int) -> None:
        (self.memory / "memory.limit_in_bytes").write_text(str(memory))
        with contextlib.suppress(OSError):  # this kernel counts no swap
            (self.memory / "memory.memsw.limit_in_bytes").write_text(str(memory))
        (self.tasks / "pids.max").write_text(str(tasks))

    def usage(self) -> Usage:
        return Usage(
            number(self.processor / "cpuacct.usage") / 1e9,
            number(self.memory / "memory.max_usage_in_bytes"),
            number(self.tasks / "pids.current"),
            pairs(self.memory / "memory.oom_control").get("oom_kill", 0) > 0,
            pairs(self.tasks / "pids.events").get("max", 0),
        )


class GroupV2(Group):
    """One folder of the only hierarchy."""

    kind = "cgroup v2"

    @property
    def folder(self) -> Path:
        return self.folders[0]

    def bound(self, memory: int, tasks: int) -> None:
        (self.folder / "memory.max").write_text(str(memory))
        with contextlib.suppress(OSError):  # this kernel counts no swap
            (self.folder / "memory.swap.max").write_text("0")
        (self.folder / "pids.max").write_text(str(tasks))

    def usage(self) -> Usage:
        return Usage(
            pairs(self.folder / "cpu.stat").get("usage_usec", 0) / 1e6,
            number(self.folder / "memory.peak") or number(self.folder / "memory.current"),
            number(self.folder / "pids.current"),
            pairs(self.folder / "memory.events").get("oom_kill", 0) > 0,
            pairs(self.folder / "pids.events").get("max", 0),
        )


class Scope(GroupV2):
    """A scope of systemd, which makes and removes the folder."""

    def __init__(self, words: list[str]):
        super().__init__([])
        self.manager = words
        self.unit = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}.scope"
        self.options: list[str] = []
        self.last = Usage(0.0, 0, 0)

    def make(self, memory: int, tasks: int) -> None:
        values = {"MemoryMax": memory, "MemorySwapMax": 0, "TasksMax": tasks, "MemoryAccounting": "yes"}
        self.options = [f"--property={name}={value}" for name, value in values.items()]

    def words(self) -> list[str]:
        return [*self.manager, "--scope", "--quiet", "--collect", f"--unit={self.unit}", *self.options, "--"]

    def find(self) -> None:
        """The folder, once systemd has made it."""
        root = mounts().get("cgroup2")
        found = next(root.rglob(self.unit), None) if root and not self.folders else None
        self.folders = [found] if found else self.folders

    def usage(self) -> Usage:
        """The last one that could be read: an empty scope is removed at once."""
        self.find()
        if self.folders and (self.folder / "cpu.stat").exists():
            found = super().usage()
            if found.seconds >= self.last.seconds:
                self.last = found
        return self.last

    def kill(self) -> None:
        self.find()
        super().kill()


def processes(folder: Path) -> list[int]:
    """The processes of a group."""
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def end_all(folder: Path) -> None:
    """End the processes of a group."""
    with contextlib.suppress(OSError):
        (folder / "pids.max").write_text("0")  # nothing new is born meanwhile
    ends = time.monotonic() + END_SECONDS
    while (members := processes(folder)) and time.monotonic() < ends:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def remove(folder: Path) -> None:
    """A group without processes goes once the kernel has let go of the last one."""
    ends = time.monotonic() + END_SECONDS
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > ends:
                return
            time.sleep(0.02)


# --- what this machine has --------------------------------------------------------------------------------


@functools.cache
def mounts() -> dict[str, Path]:
    """Where each controller of version 1 is mounted, and version 2 as `cgroup2`."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                found[kind] = Path(place)
            elif kind == "cgroup":
                found |= {name: Path(place) for name in options.split(",")}
    return found


def own() -> dict[str, str]:
    """This process's group by controller; version 2's has the name `cgroup2`."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            found |= dict.fromkeys((names or "cgroup2").split(","), path)
    return found


def home(controller: str) -> Path | None:
    """The folder of this process's group; in a container it is the mount itself."""
    root = mounts().get(controller)
    if root is None or controller not in own():
        return None
    folder = root / own()[controller].lstrip("/")
    return folder if folder.is_dir() else root


def groups_v1() -> GroupV1 | None:
    """A group of version 1 that is still to be made."""
    homes = [home(name) for name in NEEDED_V1]
    if None in homes:
        return None
    name = PREFIX + secrets.token_hex(8)
    return GroupV1([folder / name for folder in homes])


def groups_v2() -> GroupV2 | None:
    """A group of version 2 below the own one, if that was delegated to us and hands its controllers on."""
    folder = home("cgroup2")
    if folder is None:
        return None
    with contextlib.suppress(OSError):  # refused where processes live in it, this one among them
        (folder / "cgroup.subtree_control").write_text("+memory +pids")
    for parent in (folder, folder.parent):  # systemd delegates the parent of the group that we are in
        with contextlib.suppress(OSError):
            given = set((parent / "cgroup.subtree_control").read_text().split())
            if given >= NEEDED_V2 and os.access(parent, os.W_OK):
                return GroupV2([parent / (PREFIX + secrets.token_hex(8))])
    return None


def scope() -> Scope | None:
    """A scope of systemd's that is still to be made."""
    if shutil.which("systemd-run") is None or "cgroup2" not in mounts():
        return None
    return Scope(["systemd-run"] if os.geteuid() == 0 else ["systemd-run", "--user"])


WAYS = [groups_v1, scope, groups_v2]


def works(group: Group | None) -> bool:
    """Whether a process can be put into such a group, and is counted there."""
    if group is None:
        return False
    try:
        group.make(1 << 30, 64)
        burn = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; sleep 0.2; echo"
        words = [*group.words(), "/bin/sh", "-c", burn]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            ends = time.monotonic() + SCOPE_SECONDS
            while group.usage().tasks == 0 and process.poll() is None and time.monotonic() < ends:
                time.sleep(0.02)
            seen = group.usage().tasks
            good = process.wait() == 0
        return good and seen > 0 and group.usage().seconds > 0
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        group.remove()


@functools.cache
def find() -> int | None:
    """Which of WAYS works here; None where none does. What killed referees left is removed on the way."""
    clean()
    return next((place for place, way in enumerate(WAYS) if works(way())), None)


def make(memory: int, tasks: int) -> Group | None:
    """A group with these limits, in bytes and in processes and threads; None where there are no cgroups."""
    place = find()
    if place is None:
        return None
    group = WAYS[place]()
    try:
        group.make(memory, tasks)
    except BaseException:
        group.remove()
        raise
    return group


def clean() -> None:
    """Remove the groups of referees that were killed, wherever they ran: nobody holds their locks."""
    roots = {mounts()[name] for name in (*NEEDED_V1, "cgroup2") if name in mounts()}
    found = [path for root in sorted(roots) for path in root.rglob(f"{PREFIX}*") if path.is_dir()]
    by_name = itertools.groupby(sorted(found, key=lambda path: path.name), lambda path: path.name)
    for name, folders in by_name:
        if re.fullmatch(f"{PREFIX}[0-9a-f]{{16}}", name):
            clean_one(list(folders))


def clean_one(folders: list[Path]) -> None:
    """Remove the folders of one group, unless its referee lives."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        for folder in folders:
            stack.enter_context(locked(folder.parent))
        for folder in folders:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for folder in sorted(folders, key=lambda folder: not (folder / "pids.max").exists()):
            end_all(folder)
            remove(folder)
