"""How much of a run was sent to a tracker: follow-<tracker>.json in the run's folder."""

import dataclasses
import json
import uuid
from pathlib import Path
from typing import Self

from data.command import DataError
from data.files import read_json, write_whole


@dataclasses.dataclass
class Cursor:
    """How a tracker knows a run, and how far the run has been sent there."""

    folder: int  # the inode of the run's folder: a copied folder holds the cursor of another run
    project: str
    name: str
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:8])
    place: int = -1  # of the last row that the tracker has
    ended: bool = False  # whether it has the final block

    @classmethod
    def load(cls, path: Path, project: str, name: str) -> Self:
        """The cursor of this folder and project, or a new one. Raises DataError."""
        new = cls(path.parent.stat().st_ino, project, name)
        found = read_json(path) if path.exists() else vars(new)
        if {key: type(found[key]) for key in found} != {key: type(value) for key, value in vars(new).items()}:
            raise DataError(f"{path}: is no cursor; remove it, and the run begins anew at the tracker")
        own = (found["folder"], found["project"]) == (new.folder, project)
        return cls(**found) if own else new

    def move(self, path: Path, place: int, ended: bool = False) -> None:
        """Write the place, if it is another."""
        if (place, ended) != (self.place, self.ended):
            self.place = place
            self.ended = ended
            self.save(path)

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(vars(self), indent=1).encode())
