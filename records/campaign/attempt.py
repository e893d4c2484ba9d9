"""Is the script of the working tree better than HEAD's? Runs of both, pair by pair, until that is known.

The two runs of a pair have one seed. What is judged is the mean of their differences, by the interval of
records.archive.intervals, which holds whenever one looks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data.command import UsageError, say
from data.files import read_bytes, sha256
from records.archive.intervals import pairs_interval
from records.archive.runs import SCRIPT
from records.campaign.arms import Arm, Dataset, script_of
from records.campaign.runs import ArmRun

KEEP, DISCARD, UNKNOWN = "keep", "discard", "unknown"
CODES = {KEEP: 0, DISCARD: 1, UNKNOWN: 2}  # exit codes
SEED = 1337  # of the first pair


@dataclass(frozen=True)
class TryResult:
    """What is known after some pairs: the difference is of bits per byte, new less old, so less is better."""

    verdict: str
    differences: list[float]  # of the pairs, in order
    low: float
    high: float
    over: bool = False  # the new script's artifact is over the budget of bytes, and the old one's is not

    @property
    def difference(self) -> float:
        return math.fsum(self.differences) / len(self.differences)

    def __str__(self) -> str:
        return f"difference:{self.difference:+.4f} low:{self.low:+.4f} high:{self.high:+.4f}"

    def value(self) -> dict:
        """For programs. An end of the interval that is not known yet is null."""
        low, high = (end if math.isfinite(end) else None for end in (self.low, self.high))
        known = {"verdict": self.verdict, "difference": self.difference, "low": low, "high": high}
        return known | {"pairs": len(self.differences), "differences": self.differences, "over": self.over}


def judge(differences: list[float], over: bool = False) -> TryResult:
    """The verdict after these pairs. No gain at all, as where the scripts do the same, is nothing to keep."""
    low, high = pairs_interval(differences)
    verdict = UNKNOWN
    if over or 0 <= low <= high:
        verdict = DISCARD
    elif low <= high < 0:
        verdict = KEEP
    return TryResult(verdict, differences, low, high, over)


def arms_of_try(script: Path, settings: dict[str, str], dataset: Dataset, home: Path) -> tuple[Arm, Arm]:
    """HEAD's arm and the working tree's, each in a folder named by its script: HEAD's runs serve many tries.

    Raises UsageError, DataError.
    """
    scripts = script_of("HEAD"), read_bytes(script)
    if scripts[0] == scripts[1]:
        raise UsageError(f"{script}: is {SCRIPT} as HEAD has it, expected an idea in it; edit it, then try")
    arms = []
    for text in scripts:
        arm = Arm(home / sha256(text)[:12], settings, [], dataset)
        arm.make_folder(text)
        arms.append(arm)
    return arms[0], arms[1]


def is_over(run: ArmRun) -> bool:
    return run.end().value("budget") == "over"


def attempt(arms: tuple[Arm, Arm], most: int, run_pair: Callable[[list[ArmRun]], list[float]]) -> TryResult:
    """Run pair after pair until the verdict is known, or `most` have run. `run_pair` gives their scores."""
    differences: list[float] = []
    for seed in range(SEED, SEED + most):
        runs = [ArmRun(arm, seed) for arm in arms]
        old, new = run_pair(runs)
        differences.append(new - old)
        over = is_over(runs[1]) and not is_over(runs[0])
        found = judge(differences, over)
        if found.verdict != UNKNOWN:
            break
        say(f"pair {len(differences)} of {most} at most: {found}")
    return found
