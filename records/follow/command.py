"""Show runs in TensorBoard: what they write to metrics.jsonl becomes event files in their folders.

    python -m records follow logs/RUN [RUN ...] --to tensorboard
    tensorboard --logdir logs

RUN is a run's folder, or a folder above. The command ends when all runs have ended; it can be stopped at any
time, and given again. A training never waits for it.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from data.command import DataError, UsageError, printable, say
from data.door import Command
from data.files import locked, parse_json
from records.archive.runs import METRICS, configuration, nearest_runs

LOOK_SECONDS = 1  # between two looks at the runs
STEPS = {"step": "step", "val": "step", "final": "steps"}  # where an event has its step
NOT_FINITE = ("nan", "inf", "-inf")  # as train_gpt.py writes them
Event = dict[str, Any]

# --- what a run writes ------------------------------------------------------------------------------------


class Tail:
    """The events of a file that grows, and that a resume truncates and writes on."""

    def __init__(self, path: Path):
        self.path = path
        self.begin()

    def begin(self) -> None:
        self.at = 0  # bytes read
        self.number = 0  # of the last line
        self.line = b""  # that line: where it no longer stands, the file was cut

    def events(self) -> Iterator[Event]:
        """The events of new whole lines; all if the file was truncated. Raises DataError, OSError."""
        with open(self.path, "rb") as file:
            file.seek(self.at - len(self.line))
            if file.read(len(self.line)) != self.line:
                self.begin()
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                self.at += len(line)
                self.number += 1
                self.line = line
                try:
                    yield checked(parse_json(line.decode()))
                except ValueError as error:
                    where = f"{self.path}: line {self.number}"
                    raise DataError(f"{where}: {error}; expected the events of a train_gpt.py") from None


def checked(event: Any) -> Event:
    """An event, if it is one. Raises ValueError."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("no object with a name at 'event'")
    name = STEPS.get(event["event"])
    if name and (type(event.get(name)) is not int or not 0 <= event[name] < 2**53):
        raise ValueError(f"{name} is {event.get(name)!r:.99}, no whole number")
    return event


def numbers_of(event: Event) -> dict[str, float]:
    """What TensorBoard gets of an event. Scores in the final block are text, maybe with ' partial' behind."""
    found = {}
    for name, value in event.items():
        if isinstance(value, str) and value not in NOT_FINITE and "." not in value:
            continue  # a hash may look like a number, too
        # of other text, of lists, and of a whole number that no float holds
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            found[name] = float(value.removesuffix(" partial") if isinstance(value, str) else value)
    return found


# --- what TensorBoard gets --------------------------------------------------------------------------------


class Sender:
    """Writes a run's events to a new event file, in place of those of earlier calls."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.rows = 0
        self.last = -1  # row in the order of the run: a validation is behind its step
        # a TensorBoard that is open forgets what it has read of the old files
        self.writer = SummaryWriter(str(folder), purge_step=0)
        _, settings, _ = hparams(configuration(folder), {})
        self.writer.file_writer.add_summary(settings)

    def send(self, event: Event) -> None:
        """A step or a validation; a row that a resume wrote a second time is left out."""
        row = 2 * event["step"] + (event["event"] == "val")
        if row > self.last:
            self.last = row
            self.rows += 1
            self.add("", event, event["step"])

    def add(self, prefix: str, event: Event, step: int) -> None:
        for name, value in numbers_of(event).items():
            if name != STEPS[event["event"]]:
                self.writer.add_scalar(prefix + name, value, step)


def follow(folder: Path, patience: int) -> Iterator[None]:
    """Send what a run writes, until it has ended or was silent for too long; yield where it has to grow."""
    tail = Tail(folder / METRICS)
    refusal = f"{folder}: is followed already, expected one command at a time"
    with locked(folder, file=".follow.lock", refusal=refusal):
        sender = Sender(folder)
        with contextlib.closing(sender.writer):
            words = "has not ended; the same command sends it anew"
            try:
                for look in itertools.count():
                    for event in tail.events():
                        if event["event"] == "final":
                            sender.add("final/", event, event["steps"])
                            words = "has ended"
                            return
                        if event["event"] in STEPS:
                            sender.send(event)
                    sender.writer.flush()
                    silent = time.time() - tail.path.stat().st_mtime
                    if silent > patience:
                        words = f"was silent for {silent:.0f} s, {words}"
                        return
                    if look == 0:
                        say(f"{printable(folder)}: {sender.rows} rows sent, waiting for more")
                    yield
            finally:
                say(f"{printable(folder)}: {sender.rows} rows sent, {words}")


# --- the command ------------------------------------------------------------------------------------------


def run_folders(path: Path) -> list[Path]:
    """The folders of runs that this is or holds."""
    return [each.parent.resolve() for each in sorted(path.rglob(METRICS)) if each.is_file()]


def follow_all(folders: tuple[Path, ...], patience: int) -> int:
    """Until all have ended, those too that begin meanwhile; the exit code. An error ends one run alone."""
    runs: dict[Path, Iterator[None]] = {}
    code = 0
    with contextlib.ExitStack() as stack:
        while True:
            for folder in itertools.chain(*map(run_folders, folders)):
                if folder not in runs:
                    runs[folder] = stack.enter_context(contextlib.closing(follow(folder, patience)))
            living = 0
            for run in runs.values():
                try:
                    living += next(run, True) is None
                except (DataError, UsageError, OSError) as error:
                    code = max(code, getattr(error, "exit_code", DataError.exit_code))
                    print(f"error: {printable(error)}", file=sys.stderr)
            if not living:
                return code
            time.sleep(LOOK_SECONDS)


@click.command(cls=Command, help=__doc__)
@click.argument("folders", nargs=-1, required=True, type=Path, metavar="RUN...")
@click.option("--to", type=click.Choice(["tensorboard"]), default="tensorboard", help="where they are shown")
@click.option("--patience", type=click.IntRange(0), default=600, metavar="S", help="a run so silent is dead")
def main(folders: tuple[Path, ...], to: str, patience: int) -> int:
    """Follow all until they have ended; the exit code."""
    for path in folders:
        if not run_folders(path):
            wrong = f"holds no {METRICS}" if path.is_dir() else "is no folder"
            wrong += f", expected a run's folder in logs/, or one above{nearest_runs(path)}"
            raise DataError(f"{path}: {wrong}")
    return follow_all(folders, patience)
