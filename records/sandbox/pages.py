"""The pages of all files that a sandbox sees are in one state before it starts: all of them in memory.

A process may drop a page of any file that it can read, and the next one may see which pages are there: by the
clock, or by a read that does not wait. So one sandbox could pass on to the next what it knows. Files are read
here in full, whoever dropped what. Of the sandboxes that see a text, a judging has one at a time.

For a script that needs torch these are 2.8 GB. Where all of it is in memory already, that takes half a second
of a processor.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

CHUNK = 1 << 30  # bytes that the system moves in one call


def files_below(source: Path, hidden: frozenset[str]) -> Iterator[str]:
    """The plain files of a mounted file or folder; folders that a sandbox does not see are left out."""
    if not source.is_dir():
        yield str(source)
        return
    for root, folders, names in os.walk(source):
        folders[:] = [name for name in folders if os.path.join(root, name) not in hidden]
        for name in names:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                yield path


def mounted(options: Sequence[str]) -> tuple[set[str], frozenset[str]]:
    """What bubblewrap's options mount read-only from outside, and the folders that they cover."""
    pairs = list(itertools.pairwise(options))
    sources = {value for word, value in pairs if word.startswith("--ro-bind")}
    return sources, frozenset(value for word, value in pairs if word == "--tmpfs")


@functools.lru_cache(maxsize=8)
def unchanging_files(sources: frozenset[str], hidden: frozenset[str]) -> tuple[str, ...]:
    """The files of the system and of the packages, which stay while a command runs."""
    found = {path for source in sources for path in files_below(Path(source), hidden)}
    return tuple(sorted(found))


def read_in(paths: Iterable[str]) -> int:
    """Read files in full; how many bytes these were. What cannot be read, a sandbox cannot read either."""
    total = 0
    with open(os.devnull, "wb", buffering=0) as nothing:
        for path in paths:
            with contextlib.suppress(OSError):
                total += read_file(path, nothing.fileno())
    return total


def read_file(path: str, nothing: int) -> int:
    """Move a file's pages to nowhere, which brings all of them into memory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        done = 0
        while moved := os.sendfile(nothing, descriptor, done, CHUNK):
            done += moved
        return done
    finally:
        os.close(descriptor)


def settle(options: Sequence[str], own: Iterable[Path]) -> int:
    """Read in all that a sandbox with these options will see; how many bytes.

    `own`: the files and folders among them that belong to this one sandbox. What it may write is new and its
    own, and is left as it is.
    """
    sources, hidden = mounted(options)
    passing = sources & set(map(str, own))
    files = [path for source in passing for path in files_below(Path(source), frozenset())]
    return read_in(unchanging_files(frozenset(sources - passing), hidden)) + read_in(files)
