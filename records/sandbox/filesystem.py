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

from records.sandbox import MachineFull, NoSandbox, mounts
from records.sandbox.installation import Files
from records.sandbox.limits import kill

INODES = 1 << 16  # files and folders that a sandbox may make
CHUNK = 1 << 30  # bytes that the system copies in one call
WRITABLE = {"tmp": "/tmp", "shm": "/dev/shm", "work": "/room/work"}  # the space's folders, and where they are
EMPTY = "/etc/empty"  # a file to lay over others
FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


class Filler:
    """Writes files, links and folders below the open folder `root`, whatever the caller's umask."""

    def __init__(self, root: int):
        self.root = root
        self.made = {""}

    def folder(self, place: str, mode: int = 0o755) -> None:
        """A folder, and those above it."""
        if place not in self.made:
            self.folder(place.rpartition("/")[0])
            os.mkdir(place[1:], dir_fd=self.root)
            os.chmod(place[1:], mode, dir_fd=self.root)
            self.made.add(place)

    def file(self, place: str, source: Path | bytes | str) -> None:
        self.folder(place.rpartition("/")[0])
        if isinstance(source, str):
            os.symlink(source, place[1:], dir_fd=self.root)
            return
        new = os.open(place[1:], os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=self.root)
        try:
            if isinstance(source, bytes):
                os.fchmod(new, 0o644)
                os.write(new, source)
            else:
                copy(source, new)
        finally:
            os.close(new)


def copy(source: Path, new: int) -> None:
    """A file's bytes, and whether it may be executed."""
    old = os.open(source, os.O_RDONLY)
    try:
        os.fchmod(new, 0o755 if os.fstat(old).st_mode & 0o100 else 0o644)
        while os.sendfile(new, old, None, CHUNK):
            pass
    finally:
        os.close(old)


def fill(files: Files, root: int, space: int) -> None:
    """Copy all files, and make the folders that something is mounted on. Raises NoSandbox."""
    try:
        filler = Filler(root)
        for place, source in {**files, EMPTY: b""}.items():
            filler.file(place, source)
        for place in ("/proc", "/dev", *WRITABLE.values()):
            filler.folder(place)
        for name in WRITABLE:
            Filler(space).folder(f"/{name}", 0o1777)
    except OSError as error:
        if error.errno in FULL:
            raise MachineFull("this machine has no memory for a sandbox's files: make room") from None
        raise NoSandbox(f"a sandbox's files cannot be copied: {error}") from None


@contextlib.contextmanager
def own_files(
    place: Path,
    words: Sequence[str],
    files: Files,
    size: int,
    before: Sequence[str] = (),
    pass_fds: tuple[int, ...] = (),
    **options,
) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Run a command line that shows PLACE/files and PLACE/space to a sandbox; the process, and the space.

    `place`: an empty folder. `before`: what runs the line. `size`: bytes of the space. `options` are Popen's.
    The space can be read until the block ends, also of a process that has ended. Raises NoSandbox.
    """
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ours)
        with theirs:
            python = [sys.executable, "-I", "-S", "-B", mounts.__file__]
            mounting = [*python, theirs.fileno(), place, size, INODES]
            line = [*before, *map(str, mounting), *words]
            process = subprocess.Popen(line, pass_fds=(*pass_fds, theirs.fileno()), **options)
        stack.enter_context(process)
        stack.callback(kill, process)
        said, folders, *_ = socket.recv_fds(ours, 1 << 10, 2)
        for folder in folders:
            stack.callback(os.close, folder)
        if len(folders) < 2:
            raise NoSandbox(f"no file system can be made for a sandbox: {said.decode() or 'it ended'}")
        fill(files, *folders)
        try:
            ours.send(b".")
        except BrokenPipeError:  # which a command would take for its own closed output
            raise NoSandbox("a sandbox ended while its files were copied") from None
        yield process, Path(f"/proc/self/fd/{folders[1]}")
