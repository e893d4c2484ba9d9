"""Which referee judged: its number, and a digest of the sources that decide; and who ran it."""

import re
import subprocess
from functools import cache
from modulefinder import ModuleFinder
from pathlib import Path

from data.command import REPO, printable
from data.files import read_bytes, sha256

CHANGES = "records/referee/CHANGES.md"
JUDGES = {"records/verify/evaluation.py", "records/verify/claims.py"}  # whose imports decide, too
INSIDE = {
    "records/sandbox/inside/worker.py",
    "records/sandbox/inside/training.py",
}  # which run by their paths
SCHEMA = "records/schema.json"


def sources_of(starts: set[str], root: Path = REPO) -> set[str]:
    """Files of data/ and records/, and all that they import of these, in functions too."""
    finder = ModuleFinder(path=[str(root)])
    for name in starts:
        finder.import_hook(name.removesuffix(".py").replace("/", "."))
    files = [module.__file__ for module in finder.modules.values() if module.__file__]
    return {Path(file).relative_to(root).as_posix() for file in files}


def sources_digest(root: Path = REPO) -> str:
    """16 hexadecimal digits of the sha256 over names and contents of all files that a verdict rests on."""
    names = sorted(sources_of({*JUDGES, *INSIDE}, root) | {SCHEMA})
    lines = [f"{name} {sha256(read_bytes(root / name))}\n" for name in names]
    return sha256("".join(lines).encode())[:16]


@cache
def referee_version() -> str:
    """The newest number of CHANGES, which people raise, and behind a + the digest, which is information."""
    number = re.search(r"^## (\d+)$", read_bytes(REPO / CHANGES).decode(), re.MULTILINE)[1]
    return f"{number}+{sources_digest()}"


def who() -> str:
    """git's user.name: who verifies."""
    done = subprocess.run(["git", "config", "user.name"], cwd=REPO, capture_output=True)
    return printable(done.stdout.decode(errors="replace").strip()) or "unknown"
