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

from data.command import DataError
from data.files import parse_json, read_bytes, sync

JUDGINGS = "judgings.jsonl"


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


def read_draws(folder: Path) -> list[Draw]:
    """The judgings that a folder keeps, in order. Raises DataError."""
    path = folder / JUDGINGS
    if not path.exists():
        return []
    draws = []
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        try:
            value = parse_json(line)
            draws.append(Draw(**value | {"seeds": tuple(map(int, value["seeds"]))}))
        except (ValueError, TypeError, KeyError):
            mend = "git knows it as it was written"
            raise DataError(f"{path}: line {number} is no whole judging; {mend}") from None
    return list(dict.fromkeys(draws))  # a merge may have kept one of them twice


def record_draw(folder: Path, draw: Draw) -> None:
    """Add a judging to those that a folder keeps, by one write: other processes may add theirs."""
    line = json.dumps(dataclasses.asdict(draw))
    with open(folder / JUDGINGS, "ab") as file:
        file.write(f"{line}\n".encode())
        sync(file)


def number_of(draws: Iterable[Draw], name: str, digest: str, seeds: tuple[int, ...]) -> int:
    """The place of a judging among those of its folder, from 1; of the next one if it is not recorded."""
    its = (draw for draw in draws if draw.is_of(name, digest))
    before = itertools.takewhile(lambda draw: draw.seeds != seeds, its)
    return 1 + sum(1 for _ in before)
