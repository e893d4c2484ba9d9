"""Follow runs to a tracker: what they write to metrics.jsonl is sent on, while they live or after.

    python -m records.follow logs/RUN [RUN ...] --to wandb | trackio | tensorboard

RUN is a run's folder, or a folder above. The command ends when all runs have ended; it can be stopped at any
time, and given again. A training never waits for it.
"""

import argparse
import contextlib
import importlib.util
import itertools
import os
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from data.command import DataError, Parser, UsageError, open_streams, printable, run, say, whole
from data.files import parse_json, read_json
from records.archive.folders import run_artifact
from records.follow.trackers import TRACKERS, Tracker, place

METRICS = "metrics.jsonl"
LOOK_SECONDS = 1.0  # between two looks at the runs
LARGEST = 2**53  # whole numbers beyond it are sent as floats: not all trackers take them
SCORES = {"val_loss", "val_bpb", "val_bpb_unquantized"}  # text in the final block, maybe with " partial"
NOT_FINITE = ("nan", "inf", "-inf")  # as train_gpt.py writes them


# --- what a run writes ------------------------------------------------------------------------------------


class Tail:
    """The whole lines of a file that grows, and that a resume cuts and writes again."""

    def __init__(self, path: Path):
        self.path = path
        self.begin()

    def begin(self) -> None:
        self.at = 0  # bytes read
        self.number = 0  # of the last line
        self.line = b""  # that line: where it no longer stands, the file was cut

    def new(self) -> Iterator[bytes]:
        """Lines since the last call; from the first one on, if the file was cut since. Raises OSError."""
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
                yield line

    def events(self) -> Iterator[dict]:
        """The objects of new lines. Raises DataError, OSError."""
        for line in self.new():
            try:
                yield checked(parse_json(line.decode()))
            except ValueError as error:
                raise DataError(
                    f"{self.path}: line {self.number}: {error}; expected the events of a train_gpt.py"
                ) from None


def checked(event: Any) -> dict:
    """An event, if it is one. Raises ValueError."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("no object with a name at 'event'")
    name = {"step": "step", "val": "step", "final": "steps"}.get(event["event"])
    step = event.get(name, 0 if name == "steps" else None)
    if name and (type(step) is not int or not 0 <= step < LARGEST):
        raise ValueError(f"{name} is {step!r:.99}, no whole number")
    return event


def numbers(event: dict) -> dict[str, float]:
    """The numbers of an event by their names."""
    found = {}
    for name, value in event.items():
        large = isinstance(value, int) and abs(value) > LARGEST
        if large or value in NOT_FINITE:
            value = float(str(value))  # float() of a huge int would raise
        if isinstance(value, int | float) and name != "step":
            found[name] = value
    return found


def configuration(folder: Path) -> dict[str, Any]:
    """Settings, environment and hashes of a run by their names in config.json. Raises DataError."""
    path = folder / "config.json"
    if not path.exists():
        return {}
    about = read_json(path)
    found = {}
    for part in ("settings", "environment", "sha256"):
        if not isinstance(about.get(part, {}), dict):
            raise DataError(f"{path}: '{part}' is no object, expected the config.json of a train_gpt.py")
        found |= about.get(part, {})
    return {name: value for name, value in found.items() if isinstance(value, str | int | float)}


def summary(folder: Path, final: dict) -> dict[str, Any]:
    """The final block, its scores as numbers, and where the artifact lies."""
    found = {name: value for name, value in final.items() if isinstance(value, str | int | float)}
    del found["event"]
    for name in SCORES & found.keys():
        score, partial, _ = str(found[name]).partition(" partial")
        with contextlib.suppress(ValueError):  # of another version
            found[name] = float(score)
        if partial:
            found["partial"] = True
    found |= numbers(found)
    if run_artifact(folder).exists():
        found["artifact"] = str(run_artifact(folder))
    return found


# --- following --------------------------------------------------------------------------------------------


def name_of(folder: Path) -> str:
    """The run's path below logs/, or else the folder's name."""
    parts = folder.parts
    below = len(parts) - parts[::-1].index("logs") if "logs" in parts[:-1] else len(parts) - 1
    return "/".join(parts[below:])


@contextlib.contextmanager
def one_line(to: str) -> Iterator[None]:
    """Whatever a tracker's package raises as it reads its files or logs in: a DataError."""
    try:
        yield
    except (DataError, UsageError, OSError):
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{to} says {text:.300}") from None


class Followed:
    """One run, and where it is sent to. `done`: it is no longer followed."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        if str(folder).encode(errors="ignore") != os.fsencode(folder):
            raise DataError(f"{str(folder)!r:.200}: expected a name in UTF-8; trackers take no other")
        self.folder = folder
        self.to = args.to
        self.name = name_of(folder)
        self.lock = filelock.FileLock(folder / f".follow-{args.to}.lock")
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UsageError(f"{folder}: is followed to {args.to} already, expected one at a time") from None
        self.tail = Tail(folder / METRICS)
        with one_line(args.to):
            self.tracker: Tracker = TRACKERS[args.to](folder, self.name, args.project)
        self.opened = False
        self.sent = 0
        self.waits = False
        self.done = False

    def open(self) -> Tracker:
        """The tracker, with its run begun."""
        if not self.opened:
            config = configuration(self.folder)
            with one_line(self.to):
                self.tracker.open(config)
            self.opened = True
        return self.tracker

    def look(self, patience: float) -> None:
        """Send what is new. Raises DataError, OSError."""
        for event in self.tail.events():
            if event["event"] == "final":
                self.end(event)
                return
            if event["event"] in ("step", "val") and place(event) > self.tracker.held:
                tracker = self.open()
                if place(event) > tracker.held:  # which the server told
                    with one_line(self.to):
                        tracker.log(event, numbers(event))
                    tracker.held = place(event)
                    self.sent += 1
        if self.opened:
            with one_line(self.to):
                self.tracker.flush()
        silent = time.time() - self.tail.path.stat().st_mtime
        if silent > patience:
            self.stop(f"has not ended and was silent for {silent:.0f} s; the same command goes on with it")
        elif not self.waits:
            self.waits = True
            say(f"{self.name}: {self.sent} rows sent to {self.to}, has not ended and is waited for")

    def end(self, final: dict) -> None:
        """The run has ended."""
        if self.tracker.ended:
            self.stop(f"has ended and is at {self.to} already")
            return
        tracker = self.open()
        self.opened = False
        with one_line(self.to):
            tracker.close(summary(self.folder, final))
        self.stop("has ended")

    def stop(self, words: str) -> None:
        """Follow it no longer."""
        self.done = True
        try:
            if self.opened:
                with one_line(self.to):
                    self.tracker.close(None)
        finally:
            self.lock.release()
        say(f"{self.name}: {self.sent} rows sent, {words}")


def run_folders(path: Path) -> list[Path]:
    """The folders of runs that this is or holds."""
    return [each.parent.resolve() for each in sorted(path.rglob(METRICS)) if each.is_file()]


def check_folders(paths: list[Path]) -> None:
    """Raises DataError where one holds no run. Later they may come and go."""
    for path in paths:
        if not path.is_dir():
            raise DataError(f"{path}: no such folder, expected a run's in logs/, or one above")
        if not run_folders(path):
            raise DataError(f"{path}: holds no {METRICS}, expected a run's folder in logs/, or one above")


def work(args: argparse.Namespace) -> int:
    """Follow all until they have ended; the exit code."""
    if importlib.util.find_spec(args.to) is None:
        install = shlex.join([sys.executable, "-m", "pip", "install", args.to])
        raise UsageError(f"--to {args.to}: the package is not installed: {install}")
    check_folders(args.runs)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(message)}\n"  # of trackers
    followed = {}
    code = 0
    try:
        while True:
            found = itertools.chain(followed, *map(run_folders, args.runs))
            for folder in dict.fromkeys(found):
                try:
                    if folder not in followed:
                        followed[folder] = None  # not tried again, if it cannot be followed
                        followed[folder] = Followed(folder, args)
                    if followed[folder] and not followed[folder].done:
                        followed[folder].look(args.patience)
                except (DataError, UsageError, OSError) as error:
                    code = getattr(error, "exit_code", DataError.exit_code)
                    print(f"error: {printable(error)}", file=sys.stderr)
                    if followed[folder]:
                        with contextlib.suppress(DataError, OSError):  # the first error has been told
                            followed[folder].stop("is followed no longer")
            if all(each is None or each.done for each in followed.values()):
                return code
            time.sleep(LOOK_SECONDS)
    finally:
        for each in followed.values():
            if each and not each.done:
                with contextlib.suppress(DataError, OSError):  # the others end, too
                    each.stop("has not ended; the same command goes on with it")


# --- command line -----------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.follow", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder, or one above several")
    add("--to", choices=TRACKERS, required=True, help="the tracker")
    add("--project", default="bytegolf", help="its project, for wandb and trackio (%(default)s)")
    words = "silent seconds after which a run counts as dead (%(default)s)"
    add("--patience", type=whole(0), metavar="S", default=600, help=words)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    open_streams()
    args = parse_args(argv)
    return run(lambda: work(args), "follow the runs again")


if __name__ == "__main__":
    sys.exit(main())
