"""Follow runs to a tracker: what they write to metrics.jsonl is sent on, while they live or after.

    python -m records follow logs/RUN [RUN ...] --to wandb | tensorboard

RUN is a run's folder, or a folder above. The command ends when all runs have ended; it can be stopped at any
time, and given again. A training never waits for it.
"""

import collections
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import click

from data.command import DataError, UsageError, printable, say, shell
from data.door import Command
from data.files import locked, read_json, write_whole
from records.archive.runs import configuration
from records.follow.events import Event, Tail, row_of, summary
from records.follow.trackers import TRACKERS, Cursor, TensorBoard, Wandb

METRICS = "metrics.jsonl"
LOOK_SECONDS = 1  # between two looks at the runs
BATCH = 1000  # events; a kill may send as many again


def load_cursor(path: Path, project: str, name: str) -> Cursor:
    """The cursor of this folder and project, or a new one. Raises DataError."""
    new = Cursor(path.parent.stat().st_ino, project, name)
    kept = read_json(path) if path.exists() else vars(new)
    if {key: type(value) for key, value in kept.items()} != Cursor.__annotations__:
        raise DataError(f"{path}: is no cursor; remove it, and the run begins anew at the tracker")
    found = Cursor(**kept)
    return found if (found.folder, found.project) == (new.folder, project) else new


class Sender:
    """Sends a run's rows to a tracker. The cursor has what outlives a kill there."""

    def __init__(self, folder: Path, to: str, project: str, name: str):
        self.folder = folder
        self.to = to
        self.path = folder / f"follow-{to}.json"
        self.cursor = load_cursor(self.path, project, name)
        self.tracker: TensorBoard | Wandb | None = None
        self.taken: collections.deque[tuple[float, int]] = collections.deque()  # when, and up to which place
        self.place = self.cursor.place  # of the last row sent
        self.sent = 0

    def save(self, **changes: int) -> None:
        self.cursor = dataclasses.replace(self.cursor, **changes)
        write_whole(self.path, json.dumps(vars(self.cursor), indent=1).encode())

    def open(self) -> TensorBoard | Wandb:
        """The tracker, with its run begun."""
        if self.tracker is None:
            self.save()  # first: after a kill the same run goes on there
            self.tracker = TRACKERS[self.to](self.folder, self.cursor, configuration(self.folder))
        return self.tracker

    def send(self, events: list[Event]) -> None:
        """Send the rows that the tracker does not have."""
        rows = []
        for row in [row_of(event) for event in events if event["event"] in ("step", "val")]:
            if row.place > self.place:  # else a resume wrote it a second time
                self.place = row.place
                rows.append(row)
        if rows:
            self.open().send(rows)
            self.taken.append((time.monotonic(), self.place))
            self.sent += len(rows)

    def settle(self) -> None:
        """Move the cursor to the last row that outlives a kill. After a kill later rows may be sent again."""
        while self.taken and time.monotonic() - self.taken[0][0] >= self.tracker.settles:
            self.save(place=self.taken.popleft()[1])

    def close(self, final: Event | None) -> None:
        """Send the final block, or None: leave a run open that has not ended."""
        tracker = self.open() if final else self.tracker
        self.tracker = None  # it is closed once
        if tracker:
            tracker.close(final and summary(self.folder, final))
            self.save(place=self.place, ended=final is not None)


def name_of(folder: Path) -> str:
    """The run's path below logs/, or else the folder's name. Raises DataError."""
    if str(folder).encode(errors="ignore") != os.fsencode(folder):
        raise DataError(f"{str(folder)!r:.200}: expected a name in UTF-8; trackers take no other")
    _, logs, below = folder.as_posix().rpartition("/logs/")
    return below if logs else folder.name


def follow(folder: Path, to: str, project: str = "bytegolf", patience: int = 600) -> Iterator[None]:
    """Send what a run writes, until it has ended or was silent for too long; yield where it has to grow."""
    name = name_of(folder)
    tail = Tail(folder / METRICS)
    refusal = f"{folder}: is followed to {to} already, expected one at a time"
    with locked(folder, file=f".follow-{to}.lock", refusal=refusal):
        sender = Sender(folder, to, project, name)
        goes_on = "; the same command goes on with it"
        words = f"has not ended{goes_on}"
        try:
            for look in itertools.count():
                events = tail.events()
                while batch := list(itertools.islice(events, BATCH)):
                    sender.send(batch)
                    sender.settle()
                    if batch[-1]["event"] != "final":
                        continue
                    words = f"has ended and is at {to} already"
                    if not sender.cursor.ended:
                        sender.close(batch[-1])
                        words = "has ended"
                    return
                sender.settle()
                silent = time.time() - tail.path.stat().st_mtime
                if silent > patience:
                    words = f"has not ended and was silent for {silent:.0f} s{goes_on}"
                    return
                if look == 0:
                    say(f"{name}: {sender.sent} rows sent to {to}, has not ended and is waited for")
                yield
        finally:
            with contextlib.suppress(Exception):
                sender.close(None)
            say(f"{name}: {sender.sent} rows sent, {words}")


def run_folders(path: Path) -> list[Path]:
    """The folders of runs that this is or holds."""
    return [each.parent.resolve() for each in sorted(path.rglob(METRICS)) if each.is_file()]


@click.command(cls=Command, help=__doc__)
@click.argument("folders", nargs=-1, required=True, type=Path, metavar="RUN...")
@click.option("--to", type=click.Choice([*TRACKERS]), required=True, help="the tracker")
@click.option("--project", default="bytegolf", metavar="NAME", help="its project, for wandb")
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
                except Exception as error:  # which ends it for this run alone
                    ours = isinstance(error, (DataError, UsageError, OSError))
                    words = str(error) if ours else f"{to} says {type(error).__name__}: {error}"[:300]
                    code = max(code, getattr(error, "exit_code", DataError.exit_code))
                    print(f"error: {printable(words)}", file=sys.stderr)
            if not living:
                return code
            time.sleep(LOOK_SECONDS)
    finally:
        for run in runs.values():
            run.close()
