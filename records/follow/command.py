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
import filelock

from data.command import DataError, UsageError, printable, say, shell
from data.door import Command
from records.archive.runs import configuration
from records.follow.cursor import Cursor
from records.follow.events import Event, Tail, measured, summary
from records.follow.trackers import TRACKERS, Tracker

METRICS = "metrics.jsonl"
LOOK_SECONDS = 1  # between two looks at the runs
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


class Followed:
    """One run, and where it is sent to. `done`: it is no longer followed."""

    def __init__(self, folder: Path, to: str, project: str = "bytegolf", patience: int = 600):
        self.folder = folder
        self.to = to
        self.project = project
        self.patience = patience
        self.lock = filelock.FileLock(folder / f".follow-{self.to}.lock")
        self.path = folder / f"follow-{self.to}.json"
        self.tail = Tail(folder / METRICS)
        self.cursor: Cursor | None = None
        self.tracker: Tracker | None = None
        self.taken: collections.deque[tuple[float, int]] = collections.deque()  # when, and up to which place
        self.place = -1  # of the last row sent
        self.sent = 0
        self.waits = False
        self.done = False
        self.code = 0

    def try_to_look(self) -> None:
        """Look at the run if it is still followed. An error is printed and ends it for this run alone."""
        try:
            if not self.done:
                self.look()
        except (DataError, UsageError, OSError) as error:
            self.code = getattr(error, "exit_code", DataError.exit_code)
            print(f"error: {printable(error)}", file=sys.stderr)
            self.leave("is followed no longer")

    def look(self) -> None:
        """Send what is new. Raises DataError, UsageError, OSError."""
        if self.cursor is None:
            self.begin()
        events = self.tail.events()
        while batch := list(itertools.islice(events, BATCH)):
            self.send(batch)
            if batch[-1]["event"] == "final":
                self.end(batch[-1])
                return
        self.settle()
        silent = time.time() - self.tail.path.stat().st_mtime
        if silent > self.patience:
            self.stop(f"has not ended and was silent for {silent:.0f} s; the same command goes on with it")
        elif not self.waits:
            self.waits = True
            say(f"{self.name}: {self.sent} rows sent to {self.to}, has not ended and is waited for")

    def begin(self) -> None:
        """Read the cursor, as the only follower to this tracker. Raises DataError, UsageError."""
        if str(self.folder).encode(errors="ignore") != os.fsencode(self.folder):
            raise DataError(f"{str(self.folder)!r:.200}: expected a name in UTF-8; trackers take no other")
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            found = f"{self.folder}: is followed to {self.to} already"
            raise UsageError(f"{found}, expected one at a time") from None
        self.cursor = Cursor.load(self.path, self.project, self.name)
        self.place = self.cursor.place

    @property
    def name(self) -> str:
        """The run's path below logs/, or else the folder's name."""
        _, logs, below = self.folder.as_posix().rpartition("/logs/")
        return below if logs else self.folder.name

    def open(self) -> Tracker:
        """The tracker, with its run begun."""
        if self.tracker is None:
            self.cursor.save(self.path)  # first: after a kill the same run goes on there
            self.tracker = TRACKERS[self.to](self.folder, self.cursor, configuration(self.folder))
        return self.tracker

    def send(self, batch: list[Event]) -> None:
        """Send the rows that the tracker does not have."""
        rows = []
        for row in [measured(event) for event in batch if event["event"] in ("step", "val")]:
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

    def end(self, final: Event) -> None:
        """The run has ended."""
        if self.cursor.ended:
            self.stop(f"has ended and is at {self.to} already")
            return
        with one_line(self.to):
            tracker = self.open()
            self.tracker = None  # it is closed once
            tracker.close(summary(self.folder, final))
        self.cursor.move(self.path, self.place, ended=True)
        self.stop("has ended")

    def stop(self, words: str) -> None:
        """Follow it no longer."""
        self.done = True
        try:
            if self.tracker is not None:
                with one_line(self.to):
                    self.tracker.close(None)
                if self.taken:
                    self.cursor.move(self.path, self.taken[-1][1])
        finally:
            self.lock.release()
        say(f"{self.name}: {self.sent} rows sent, {words}")

    def leave(self, words: str) -> None:
        """Stop following a run that is still followed, after an error of another run or a signal."""
        if self.cursor and not self.done:
            with contextlib.suppress(DataError, OSError):
                self.stop(words)
        self.done = True


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
    runs: dict[Path, Followed] = {}
    try:
        while True:
            for folder in itertools.chain(*map(run_folders, folders)):  # new ones may come
                if folder not in runs:
                    runs[folder] = Followed(folder, to, project, patience)
            for each in runs.values():
                each.try_to_look()
            if all(each.done for each in runs.values()):
                return max(each.code for each in runs.values())
            time.sleep(LOOK_SECONDS)
    finally:
        for each in runs.values():
            each.leave("has not ended; the same command goes on with it")
