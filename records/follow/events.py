"""What a run writes: metrics.jsonl as it grows, and the final block."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data.command import DataError
from data.files import parse_json
from records.archive.runs import plain

Event = dict[str, Any]
STEPS = {"step": "step", "val": "step", "final": "steps"}  # where an event has its step
SCORES = ("val_loss", "val_bpb", "val_bpb_unquantized")  # text in the final block, maybe with " partial"
NOT_FINITE = ("nan", "inf", "-inf")  # as train_gpt.py writes them


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


class Measured(NamedTuple):
    """What a tracker gets of a step or of a validation."""

    step: int
    place: int  # in the order of the run: a validation is behind its step
    numbers: dict[str, float]


def row_of(event: Event) -> Measured:
    numbers = {}
    for name, value in event.items():
        if name != "step" and (isinstance(value, int | float) or value in NOT_FINITE):
            with contextlib.suppress(OverflowError):  # of a whole number; no tracker takes all of those
                numbers[name] = float(value)
    return Measured(event["step"], 2 * event["step"] + (event["event"] == "val"), numbers)


def summary(folder: Path, final: Event) -> dict[str, Any]:
    """The final block, its scores as numbers, and where the artifact lies."""
    found = plain(final)
    del found["event"]
    for name in SCORES:
        score, partial, _ = str(found.get(name)).partition(" partial")
        with contextlib.suppress(ValueError):  # there is none, or one of another version
            found[name] = float(score)
        if partial:
            found["partial"] = True
    if (folder / "model.ptz").exists():
        found["artifact"] = str(folder / "model.ptz")
    return found
