"""File systems that one sandbox has for itself: made for it, filled by us, and gone with it.

The kernel remembers which names were looked up, which pages of a file are in memory, and which numbers inodes
got. So on a file system that two sandboxes see one after the other, the first can tell the second what it
knows. Here each of them gets a copy, in memory, of all the files that it sees, and writes to a file system
with a size and a number of inodes. The memory of the copy is the referee's, and none of the sandbox's.
"""

import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import copyfile

from data.files import scratch_folder
from records.sandbox import MachineFull, NoSandbox, mounts
from records.sandbox.installation import Files
from records.sandbox.limits import kill

INODES = 1 << 16  # files and folders that a sandbox may make
WRITABLE = {"tmp": "/tmp", "shm": "/dev/shm", "work": "/room/work"}  # the space's folders, and where they are
EMPTY = "/etc/empty"  # a file to lay over others
FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


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
