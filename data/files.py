"""Files that strangers sent are read here, and files of ours are written whole or not at all."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from data.command import QUIET, DataError, UsageError, nearest, warn_once

# What file systems of a network or of a program may answer.
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
NO_LOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
SCRATCH = "bytegolf-scratch-"  # of every scratch folder's name


def read_bytes(path: Path) -> bytes:
    """A plain file's bytes: a pipe or a link to /dev/zero would never end. Raises DataError."""
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is no plain file, expected one")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}{nearest(path)}") from None


def parse_json(text: str | bytes) -> Any:
    """A JSON value. Raises ValueError.

    It refuses what readers understand differently: NaN, Infinity, 1e999, doubled keys and half characters.
    """

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    def finite(number: str) -> float:
        value = float(number)
        if math.isinf(value):
            raise ValueError(f"{number[:40]} is too large for a number")
        return value

    def refuse_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice in one object")
        return dict(pairs)

    try:
        value = json.loads(
            text, parse_constant=refuse_constant, parse_float=finite, object_pairs_hook=refuse_doubles
        )
        if "\\u" in (text.decode() if isinstance(text, bytes) else text):
            json.dumps(value, ensure_ascii=False).encode()  # half a character raises a ValueError
        return value
    except RecursionError:
        raise ValueError("lists or objects are nested too deep") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises DataError."""
    try:
        value = parse_json(read_bytes(path))
    except ValueError as error:
        raise DataError(f"{path}: no JSON: {error}; expected a JSON object") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@contextlib.contextmanager
def warned(what: str, *errors: int) -> Iterator[None]:
    """What some file systems cannot do is a warning, once for each of them, and no end."""
    try:
        yield
    except OSError as error:
        if error.errno not in errors:
            raise
        warn_once(f"{what} ({error.strerror})")


def sync(file: IO[Any]) -> None:
    """Put a file's bytes on the disk, so that no rename can overtake them."""
    file.flush()
    folder = os.path.dirname(os.path.abspath(file.name))
    with warned(f"{folder}: a power failure may cut files here", *NO_SYNC):
        os.fsync(file.fileno())


def beside(path: Path) -> Path:
    """Where a file or folder grows until it is whole."""
    return path.with_name(path.name + ".partial")


def write_beside(path: Path, data: bytes) -> None:
    """Write a file so that `path` holds the old bytes or the new ones, never a part."""
    partial = beside(path)
    try:
        with open(partial, "wb") as file:
            file.write(data)
            sync(file)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError, ValueError):  # it is there where a disk was full
            partial.unlink()


def write_whole(path: Path, data: bytes) -> None:
    """The same at a place that a user named. Raises UsageError."""
    if not path.name or (path.exists() and not path.is_file()):
        raise UsageError(f"{path}: is no plain file and cannot be replaced by one")
    try:
        write_beside(path, data)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be written: {getattr(error, 'strerror', error)}") from None


@contextlib.contextmanager
def repeated(line: str) -> Iterator[None]:
    """Print a line now, and each half a minute with the seconds so far until the block ends."""
    done = threading.Event()

    def say() -> None:
        began = time.monotonic()
        while not done.wait(QUIET):
            print(f"{line} ({time.monotonic() - began:.0f} s so far)", file=sys.stderr, flush=True)

    print(line, file=sys.stderr, flush=True)
    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def locked(
    folder: Path, shared: bool = False, file: str = "", waiting: str = "", refusal: str = ""
) -> Iterator[None]:
    """Nobody else who asks for this folder's lock has it until the block ends, or this process does.

    `shared`: nobody has it who asks for it alone. `file`: it is made in the folder and has the lock in its
    place, since NFS locks no folders. Where another process has the lock, this says `waiting` and waits, or
    raises `refusal` as a UsageError.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    flags = os.O_RDWR | os.O_CREAT if file else os.O_RDONLY | os.O_DIRECTORY
    lock = os.open(folder / file, flags, 0o666)
    try:
        unlocked = f"{folder}: no lock can be had here, so let no second command write at the same time"
        with warned(unlocked, *NO_LOCK):
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if refusal:
                    raise UsageError(refusal) from None
                with repeated(waiting) if waiting else contextlib.nullcontext():
                    fcntl.flock(lock, kind)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, removed at the end with all that a stranger put into it, however deep.

    It is locked as long as this process lives. Those that killed processes left are removed first.
    """
    home = Path(tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        with locked(home):  # nobody takes the new one for one that was left
            remove_left(home)
            folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=home))
            stack.enter_context(locked(folder))
        try:
            yield folder
        finally:
            subprocess.run(["rm", "-rf", folder])


def remove_left(home: Path) -> None:
    """Remove the scratch folders whose locks nobody holds."""
    for folder in home.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # another user's, or one whose process lives
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                subprocess.run(["rm", "-rf", folder])
            finally:
                os.close(lock)


@contextlib.contextmanager
def growing_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` that gets its name only when the block ends well. Raises UsageError."""
    if target.exists():
        raise UsageError(f"{target}: exists and is never overwritten; remove it or choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # of a block that failed; else it has gone
