"""A comparison: two sides of runs, and all that can be said of them."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from data.command import UsageError
from records.archive.metrics import Metrics, find_runs
from records.archive.runs import METRICS, OF_ONE_RUN
from records.compare.bands import Difference, compare
from records.compare.measures import measures

HASH = re.compile("([0-9a-f]{16})[0-9a-f]{48}")  # people tell them apart by the first part


@dataclass(frozen=True)
class Comparison:
    """Two sides and what can be said of them."""

    base: list[Metrics]
    new: list[Metrics]
    on: str  # the key of the measure that decides

    @property
    def runs(self) -> list[Metrics]:
        return [*self.base, *self.new]

    @cached_property
    def rows(self) -> list[Difference]:
        return [compare(one, self.base, self.new) for one in measures(self.runs)]

    @property
    def decisive(self) -> Difference:
        """The row that decides. Raises UsageError."""
        rows = {found.measure.key: found for found in self.rows}
        if self.on not in rows:
            raise UsageError(f"--on is {self.on!r}, expected one of {', '.join(rows)}")
        return rows[self.on]

    @property
    def whole(self) -> bool:
        """Whether all settings of all runs are known. Records have no config.json, only what was given."""
        return all(run.settings for run in self.runs)

    @property
    def settings(self) -> list[list[str]]:
        """[name, values of base, values of new] of the settings that differ."""
        read = (lambda run: run.settings) if self.whole else (lambda run: run.given)
        return [row for row in self.differing(read) if row[0] not in OF_ONE_RUN]

    @property
    def environment(self) -> list[list[str]]:
        """The same of the machine, the script and the data."""
        rows = self.differing(lambda run: run.environment)
        return [[name, *(HASH.sub(r"\1", side) for side in sides)] for name, *sides in rows]

    def differing(self, read) -> list[list[str]]:
        """[name, values of base, values of new] where not all runs say the same."""
        found = []
        for name in sorted({name for run in self.runs for name in read(run)}):
            sides = [{read(run).get(name, "unset") for run in side} for side in (self.base, self.new)]
            if len(sides[0] | sides[1]) > 1:
                found.append([name, *(", ".join(sorted(side)) for side in sides)])
        return found

    @property
    def stalls(self) -> list[dict]:
        """Each with the run, the step and its seconds."""
        return [stall for run in self.runs for stall in run.stalled]

    @property
    def partings(self) -> list[dict]:
        """Of each seed that both sides have: the step where the train losses part, or None."""
        pairs = [(one, other) for one in self.base for other in self.new]
        return [parting(*pair) for pair in pairs if pair[0].seed == pair[1].seed is not None]


def parting(one: Metrics, other: Metrics) -> dict:
    """The first step whose losses differ."""
    count = min(one.steps, other.steps)
    a, b = (run.table["train_loss"][:count] for run in (one, other))
    unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
    first = int(np.argmax(unequal)) + 1 if unequal.any() else None
    return {"seed": one.seed, "base": one.name, "new": other.name, "steps": count, "first": first}


def load(base: Sequence[Path], new: Sequence[Path], living: bool = False, on: str = "val_bpb") -> Comparison:
    """The runs that the paths name. Raises DataError, UsageError."""
    sides = [[run for path in side for run in find_runs(path, living)] for side in (base, new)]
    for side in sides:
        (path, times), *_ = Counter(run.path.resolve() for run in side).most_common(1)
        if times > 1:
            raise UsageError(f"{path}: is named twice on one side, expected repeats of a run")
    names = Counter(run.name for side in sides for run in side)

    def named(run: Metrics) -> Metrics:
        """Runs of one name are called by their paths."""
        path = run.path.parent if run.path.name == METRICS else run.path
        return replace(run, name=str(path)) if names[run.name] > 1 else run

    return Comparison(*([named(run) for run in side] for side in sides), on)
