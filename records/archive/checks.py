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
        """One line, whatever a stranger's files put into it."""
        return f"{self.verdict} {self.name}: {printable(self.text)[:MAX_TEXT]}"


def check(name: str, good: bool, text: str) -> Check:
    return Check("PASS" if good else "FAIL", name, text)


def skip(name: str, why: str) -> Check:
    return Check("SKIP", name, why)


def equal(name: str, what: str, found: Any, expected: Any) -> Check:
    """PASS if both are the same."""
    return check(name, found == expected, f"{what} {found}, expected {expected}")


def none_wrong(name: str, wrong: list[str], good: str) -> Check:
    """PASS if nothing is wrong; `good` is what the line says then."""
    return check(name, not wrong, "; ".join(wrong[:MAX_REASONS]) or f"{good}, expected so")
