"""The lines of a verification: PASS | FAIL | SKIP name: what was found, what was expected."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from data.command import UsageError, printable

MAX_TEXT = 2000  # characters of one line
MAX_REASONS = 3  # in one line


class VerifierError(UsageError):
    """The verifier cannot do its part: a text, a tool or room is missing here. It is no fault of a record.

    Exit code 2, and no verdict.
    """


@dataclass(frozen=True)
class Check:
    """One line of a verification."""

    verdict: str  # PASS, FAIL, SKIP, or NOTE: something to know, which decides nothing
    name: str
    text: str  # what was found, what was expected

    def __str__(self) -> str:
        """One line of printable characters, whatever a record's files put into `text`."""
        return f"{self.verdict} {self.name}: {printable(self.text)[:MAX_TEXT]}"


def check(name: str, good: bool, text: str) -> Check:
    return Check("PASS" if good else "FAIL", name, text)


def skip(name: str, why: str) -> Check:
    return Check("SKIP", name, why)


def note(name: str, text: str) -> Check:
    return Check("NOTE", name, text)


def of_seed(seed: int, lines: Iterable[Check]) -> Iterator[Check]:
    """The same lines, which say whose they are."""
    return (replace(line, text=f"seed {seed}: {line.text}") for line in lines)


def equal(name: str, what: str, found: Any, expected: Any) -> Check:
    return check(name, found == expected, f"{what} {found}, expected {expected}")


def none_wrong(name: str, wrong: list[str], good: str) -> Check:
    """PASS with the text `good` if `wrong` is empty; else FAIL with its first reasons."""
    return check(name, not wrong, "; ".join(wrong[:MAX_REASONS]) or f"{good}, expected so")
