"""The lines of a verification: PASS | FAIL | SKIP name: what was found, what was expected."""

from dataclasses import dataclass
from typing import Any

from data.command import printable

MAX_TEXT = 2000  # characters of one line
MAX_REASONS = 3  # in one line


@dataclass(frozen=True)
class Check:
    """One line of a verification."""

    verdict: str  # PASS, FAIL or SKIP
    name: str
    text: str  # what was found, what was expected

    def __str__(self) -> str:
        """One line of printable characters, whatever a record's files put into `text`."""
        return f"{self.verdict} {self.name}: {printable(self.text)[:MAX_TEXT]}"


def check(name: str, good: bool, text: str) -> Check:
    return Check("PASS" if good else "FAIL", name, text)


def skip(name: str, why: str) -> Check:
    return Check("SKIP", name, why)


def equal(name: str, what: str, found: Any, expected: Any) -> Check:
    """PASS if both are the same."""
    return check(name, found == expected, f"{what} {found}, expected {expected}")


def none_wrong(name: str, wrong: list[str], good: str) -> Check:
    """PASS with the text `good` if `wrong` is empty; else FAIL with its first reasons."""
    return check(name, not wrong, "; ".join(wrong[:MAX_REASONS]) or f"{good}, expected so")
