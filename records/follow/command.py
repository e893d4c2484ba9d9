"""Follow runs to a tracker: what they write to metrics.jsonl is sent on, while they live or after.

    python -m records follow logs/RUN [RUN ...] --to wandb | trackio | tensorboard

RUN is a run's folder, or a folder above. The command ends when all runs have ended; it can be stopped at any
time, and given again. A training never waits for it.
"""

import collections
import contextlib
import importlib.util
import itertools
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import click

from data.command import DataError, UsageError, printable, say, shell
from data.door import Command
from data.files import locked
from records.archive.runs import configuration
from records.follow.cursor import Cursor
from records.follow.events import Event, Tail, measured, summary
from records.follow.trackers import TRACKERS, Tracker

METRICS = "metrics.jsonl"
LOOK_SECONDS = 1  # between two looks at the runs
UNENDED = "has not ended; the same command goes on with it"
BATCH = 1000  # events; a kill may send as many again


@contextlib.contextmanager
def one_line(to: str) -> Iterator[None]:
    """Turn any error of a tracker's package, such as a failed login, into a DataError of one line."""
    try:
        yield
    except (DataError, UsageError, OSError):
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{to} says {text:.300}") from None


class Sender:
    """Sends a run's rows to a tracker. The cursor has what outlives a kill there."""

    def __init__(self, folder: Path, to: str, project: str, name: str):
        self.folder = folder
        self.to = to
        self.path = folder / f"follow-{to}.json"
        self.cursor = Cursor.load(self.path, project, name)
        self.tracker: Tracker | None = None
        self.taken: collections.deque[tuple[float, int]] = collections.deque()  # when, and up to which place
        self.place = self.cursor.place  # of the last row sent
        self.sent = 0

    def open(self) -> Tracker:
        """The tracker, with its run begun."""
        if self.tracker is None:
            self.cursor.save(self.path)  # first: after a kill the same run goes on there
            self.tracker = TRACKERS[self.to](self.folder, self.cursor, configuration(self.folder))
        return self.tracker

    def send(self, events: list[Event]) -> None:
        """Send the rows that the tracker does not have."""
        rows = []
        for row in [measured(event) for event in events if event["event"] in ("step", "val")]:
            if row.place > self.place:  # else a resume wrote it a second time
                self.place = row.place
                rows.append(row)
        if rows:
            with one_line(self.to):
                self.open().send(rows)
            self.taken.append((time.monotonic(), self.place))
            self.sent += len(rows)
            self.settle()

    def settle(self) -> None:
        """Move the cursor to the last row that outlives a kill. After a kill later rows may be sent again."""
        place = self.cursor.place
        while self.taken and time.monotonic() - self.taken[0][0] >= self.tracker.settles:
            _, place = self.taken.popleft()
        self.cursor.move(self.path, place)

    def end(self, final: Event) -> str:
        """Send the final block, if the tracker does not have it. What is to be said of the run."""
        if self.cursor.ended:
            return f"has ended and is at {self.to} already"
        with one_line(self.to):
            tracker = self.open()
            self.tracker = None  # it is closed once
            tracker.close(summary(self.folder, final))
        self.cursor.move(self.path, self.place, ended=True)
        return "has ended"

    def close(self) -> None:
        """Leave a run open that has not ended."""
        if self.tracker is not None:
            with one_line(self.to):
                self.tracker.close(None)
            self.cursor.move(self.path, self.place)


def name_of(folder: Path) -> str:
    """The run's path below logs/, or else the folder's name. Raises DataError."""
    if str(folder).encode(errors="ignore") != os.fsencode(folder):
        raise DataError(f"{str(folder)!r:.200}: expected a name in UTF-8; trackers take no other")
    _, logs, below = folder.as_posix().rpartition("/logs/")
    return below if logs else folder.name


def follow(folder: Path, to: str, project: str = "bytegolf", patience: int = 600) -> Iterator[None]:
    """Send what a run writes, until it has ended or was silent for too long; yield where it has to grow.

    Raises DataError, UsageError, OSError.
    """
    name = name_of(folder)
    tail = Tail(folder / METRICS)
    refusal = f"{folder}: is followed to {to} already, expected one at a time"
    with locked(folder, file=f".follow-{to}.lock", refusal=refusal):
        sender = Sender(folder, to, project, name)
        words = UNENDED
        waits = False
        try:
            while True:
                events = tail.events()
                while batch := list(itertools.islice(events, BATCH)):
                    sender.send(batch)
                    if batch[-1]["event"] == "final":
                        words = sender.end(batch[-1])
                        return
                sender.settle()
                silent = time.time() - tail.path.stat().st_mtime
                if silent > patience:
                    words = (
                        f"has not ended and was silent for {silent:.0f} s; the same command goes on with it"
                    )
                    return
                if not waits:
                    waits = True
                    say(f"{name}: {sender.sent} rows sent to {to}, has not ended and is waited for")
                yield
        except (DataError, UsageError, OSError):
            words = "is followed no longer"
            raise
        finally:
            with contextlib.suppress(DataError, OSError):
                sender.close()
            say(f"{name}: {sender.sent} rows sent, {words}")


def run_folders(path: Path) -> list[Path]:
    """The folders of runs that this is or holds."""
    return [each.parent.resolve() for each in sorted(path.rglob(METRICS)) if each.is_file()]


@click.command(cls=Command, help=__doc__)
@click.argument("folders", nargs=-1, required=True, type=Path, metavar="RUN...")
@click.option("--to", type=click.Choice([*TRACKERS]), required=True, help="the tracker")
@click.option("--project", default="bytegolf", metavar="NAME", help="its project, for wandb and trackio")
@click.option(
    "--patience", type=click.IntRange(0), default=600, metavar="S", help="a run silent so long is dead"
)
def main(folders: tuple[Path, ...], to: str, project: str, patience: int) -> int:
    """Follow all until they have ended; the exit code."""
    if importlib.util.find_spec(to) is None:
        install = shell(sys.executable, "-m", "pip", "install", to)
        raise UsageError(f"--to {to}: the package is not installed: {install}")
    for path in folders:
        if not run_folders(path):
            raise DataError(f"{path}: holds no {METRICS}, expected a run's folder in logs/, or one above")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(message)}\n"  # of trackers
    runs: dict[Path, Iterator[None]] = {}
    code = 0
    try:
        while True:
            for folder in itertools.chain(*map(run_folders, folders)):  # new ones may come
                if folder not in runs:
                    runs[folder] = follow(folder, to, project, patience)
            living = 0
            for run in runs.values():
                try:
                    living += next(run, True) is None
                except (DataError, UsageError, OSError) as error:  # which ends it for this run alone
                    code = max(code, getattr(error, "exit_code", DataError.exit_code))
                    print(f"error: {printable(error)}", file=sys.stderr)
            if not living:
                return code
            time.sleep(LOOK_SECONDS)
    finally:
        for run in runs.values():
            run.close()
