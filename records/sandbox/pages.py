"""The pages of all files that a sandbox sees are in one state before it starts: all of them in memory.

A process may drop a page of any file that it can read, and the next one may see which pages are there: by the
clock, or by a read that does not wait. So one sandbox could pass on to the next what it knows. Files are read
here in full, whoever dropped what. No two sandboxes of a judging live at once.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterable, Iterator
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


def mounted(options: Iterable[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """What bubblewrap's options mount from outside, and the folders that they cover."""
    words = list(options)
    pairs = list(itertools.pairwise(words))
    sources = {value for word, value in pairs if word.startswith(("--ro-bind", "--bind"))}
    return tuple(sorted(sources)), frozenset(value for word, value in pairs if word == "--tmpfs")


@functools.lru_cache(maxsize=8)
def unchanging_files(sources: tuple[str, ...], hidden: frozenset[str]) -> tuple[str, ...]:
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


def settle(system: Iterable[str], binds: Iterable[Path]) -> int:
    """Read in all that a sandbox will see: bubblewrap's options `system`, and what is bound beside them."""
    sources, hidden = mounted(system)
    own = [path for bind in binds for path in files_below(Path(bind), frozenset())]
    return read_in(unchanging_files(sources, hidden)) + read_in(own)
