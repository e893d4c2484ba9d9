"""Makes file systems for one sandbox in memory, where nobody else sees them, and becomes bubblewrap.

    python mounts.py SOCKET PLACE BYTES INODES COMMAND...

One is PLACE/files; the other one, PLACE/space, is to be written to and has a size. Their folders go through
SOCKET to the referee, which fills the first one and answers. The command starts in PLACE. bubblewrap.py
starts this program, outside of the sandbox. It imports nothing of this repository.
"""

import ctypes
import os
import socket
import sys
from pathlib import Path

NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000  # flags of unshare(2)
NO_SET_USER, NO_DEVICES, RECURSIVE, PRIVATE = 2, 4, 0x4000, 0x40000  # flags of mount(2)


def call(name: str, *values) -> None:
    """A function of libc. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*values):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def leave() -> None:
    """Have mounts of our own. Who is not root also needs a namespace of users, where it may mount."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEW_MOUNTS | (NEW_USER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)


def mount(place: str, options: str) -> int:
    """A new file system, and its open folder."""
    call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", NO_SET_USER | NO_DEVICES, options.encode())
    return os.open(place, os.O_RDONLY | os.O_DIRECTORY)


def main() -> None:
    number, place, size, inodes, *command = sys.argv[1:]
    with socket.socket(fileno=int(number)) as referee:
        try:
            leave()
            os.chdir(place)
            os.mkdir("files")
            os.mkdir("space")
            files = mount("files", "mode=0755,size=100%")
            space = mount("space", f"mode=0755,size={size},nr_inodes={inodes}")
        except OSError as error:
            sys.exit(referee.send(str(error).encode()))
        socket.send_fds(referee, [b"."], [files, space])
        if not referee.recv(1):
            sys.exit(1)
    try:
        os.execv(command[0], command)
    except OSError as error:  # a program for another processor
        sys.exit(str(error))


if __name__ == "__main__":
    main()
