"""How often a track's folders were judged: records/<track>/judgings.jsonl, a line for each judging.

A line is written when seeds are drawn, before any of them is trained, and none is ever taken out: a judging
that was thrown away counts as any other. Branches are merged by keeping the lines of both (.gitattributes).
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data.command import DataError, warn_once
from data.files import locked, parse_json, read_bytes, write_whole

JUDGINGS = "judgings.jsonl"
BROKEN = (ValueError, TypeError, KeyError)  # what a line that is no judging leads to


@dataclass(frozen=True)
class Draw:
    """The seeds of one judging, and what they were drawn for."""

    folder: str
    sha256: str  # of the folder
    track: str  # sha256 of its rules
    referee: str  # its version
    date: str
    by: str
    seeds: tuple[int, ...]

    def is_of(self, name: str, digest: str) -> bool:
        """Whether it judged this folder: neither other files nor another name make a first try."""
        return self.folder == name or self.sha256 == digest


def parse_draw(line: bytes) -> Draw:
    """The judging of a line. Raises BROKEN."""
    value = parse_json(line)
    return Draw(**value | {"seeds": tuple(map(int, value["seeds"]))})


def read_lines(folder: Path) -> list[bytes]:
    """The lines of a folder's judgings. Raises DataError.

    A last line without its end is left out, and named, if it is no whole judging. A full disk cut it before
    any of its seeds was trained.
    """
    path = folder / JUDGINGS
    if not path.exists():
        return []
    *lines, rest = read_bytes(path).split(b"\n")
    try:
        return [*lines, rest] if rest and parse_draw(rest) else lines
    except BROKEN:
        what = "was cut off before its judging began, and does not count"
        warn_once(f"{path}: line {len(lines) + 1} {what}; the next judging takes its place")
        return lines


def read_draws(folder: Path) -> list[Draw]:
    """The judgings that a folder keeps, in order. Raises DataError."""
    draws = []
    for number, line in enumerate(read_lines(folder), 1):
        try:
            draws.append(parse_draw(line))
        except BROKEN:
            mend = "git knows it as it was written"
            raise DataError(f"{folder / JUDGINGS}: line {number} is no whole judging; {mend}") from None
    return list(dict.fromkeys(draws))  # a merge may have kept one of them twice


def record_draw(folder: Path, draw: Draw) -> None:
    """Add a judging to those that a folder keeps, whole or not at all. Raises UsageError, DataError."""
    line = json.dumps(dataclasses.asdict(draw)).encode()
    with locked(folder):  # two judgings may begin at once
        write_whole(folder / JUDGINGS, b"\n".join([*read_lines(folder), line, b""]))


def number_of(draws: Iterable[Draw], name: str, digest: str, seeds: tuple[int, ...]) -> int:
    """The place of a judging among those of its folder, from 1; of the next one if it is not recorded."""
    its = (draw for draw in draws if draw.is_of(name, digest))
    before = itertools.takewhile(lambda draw: draw.seeds != seeds, its)
    return 1 + sum(1 for _ in before)
