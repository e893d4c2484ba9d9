"""What all of data/ and records/ share: errors with their exit codes, lines of output, words of a command."""

import contextlib
import difflib
import functools
import operator
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

QUIET = 30  # seconds that a command may say nothing where no terminal shows a bar
Step = TypeVar("Step")
REPO = Path(__file__).resolve().parent.parent
tqdm.monitor_interval = 0  # no thread of its own: who counts a process's tasks would find it


class DataError(Exception):
    """The data are not what they should be: exit code 3."""

    exit_code = 3


class UsageError(Exception):
    """The command was called with something impossible: exit code 2."""

    exit_code = 2


def open_streams() -> None:
    """Give standard streams that the caller closed a place, and let all of them take any text.

    Otherwise the next file to be opened would get the number of the closed stream, and its messages too.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="backslashreplace")  # in the C locale a stream takes ASCII alone


def printable(text: object) -> str:
    """One line without control characters, so that no stranger's text looks like another line of ours."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def some(names: Sequence[str]) -> str:
    """The first ten, and how many more there are."""
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def say(line: str) -> None:
    """Print what has been done, or what is going to take a while."""
    print(line, flush=True)


def advancing(
    steps: Iterable[Step], what: str, total: int | None = None, size: Callable[[Step], int] = lambda step: 1
) -> Iterator[Step]:
    """`steps`, each when it is taken. A terminal shows a bar; elsewhere a line comes every QUIET seconds.

    `total`: what their sizes add up to, where this is more than their number.
    """
    total = total or operator.length_hint(steps) or None
    began = said = time.monotonic()
    done = 0
    with tqdm(desc=what, total=total, unit_scale=True, disable=None, leave=False, miniters=1) as bar:
        for step in steps:
            now = time.monotonic()
            if bar.disable and now - said >= QUIET:
                said = now
                line = tqdm.format_meter(done, total or 0, now - began, prefix=what, unit_scale=True)
                print(line, file=sys.stderr, flush=True)
            yield step
            taken = size(step)
            done += taken
            bar.update(taken)


@functools.cache
def warn_once(line: str) -> None:
    print(f"warning: {printable(line)}", file=sys.stderr, flush=True)


def training_command(**settings: object) -> str:
    """The command line that trains with these settings, for the folder that the user is in."""
    given = [f"{name}={shell(value)}" for name, value in settings.items() if value]
    return " ".join([*given, shell(Path(sys.executable or "python"), REPO / "train_gpt.py")])


def shell(*words: object) -> str:
    """Words of a command for a shell, quoted; a path is relative where it lies below the working folder."""
    return shlex.join(near(word) if isinstance(word, Path) else str(word) for word in words)


def nearest(path: Path) -> str:
    """What a message adds about a path that is not there: the nearest name that is, or nothing."""
    missing = path.absolute()
    found = []
    with contextlib.suppress(OSError):  # of a folder that is locked
        while not missing.parent.exists():
            missing = missing.parent
        names = os.listdir(missing.parent)
        found = [] if missing.name in names else difflib.get_close_matches(missing.name, names, 1)
    return f"; the nearest name there is {shell(missing.parent / found[0])}" if found else ""


def near(path: Path) -> str:
    found = os.path.relpath(path)
    return str(path.absolute()) if found.startswith(("..", "-")) else found
