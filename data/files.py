"""Files that strangers sent are read here, and files of ours written whole or not at all."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.command import DataError, UsageError


def read_bytes(path: Path) -> bytes:
    """A plain file's bytes: a pipe or a link to /dev/zero would never end. Raises DataError."""
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is no plain file, expected one")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def parse_json(text: str | bytes) -> Any:
    """A JSON value. Raises ValueError.

    It refuses what readers understand differently: NaN, Infinity, doubled keys and half characters.
    """

    def refuse_constant(name: str):
        raise ValueError(f"{name} is no JSON")

    def refuse_doubles(pairs: list) -> dict:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice in one object")
        return dict(pairs)

    try:
        value = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_doubles)
        if (b"\\u" if isinstance(text, bytes) else "\\u") in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a character raises a ValueError
        return value
    except RecursionError:
        raise ValueError("lists or objects are nested too deep") from None


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises DataError."""
    try:
        value = parse_json(read_bytes(path))
    except ValueError as error:
        raise DataError(f"{path}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write beside and rename, so that a file of this name is always whole. Raises UsageError."""
    if not path.name or (path.exists() and not path.is_file()):
        raise UsageError(f"{path}: is no plain file and cannot be replaced by one")
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be written: {getattr(error, 'strerror', error)}") from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            beside.unlink()


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
