"""Which referee judged: its number, and a digest of the sources that decide; and who ran it."""

import ast
import re
import subprocess
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

from data.command import REPO, printable
from data.files import read_bytes, sha256

CHANGES = "records/referee/CHANGES.md"
JUDGES = {"records/verify/judging.py", "records/verify/claims.py"}  # whose imports decide, too
INSIDE = {"records/sandbox/inside/worker.py", "records/sandbox/inside/room.py"}  # which run by their paths
SCHEMA = "records/schema.json"


def imported_modules(source: bytes, package: str) -> set[str]:
    """What a source imports, in functions too: modules, and names that may be modules."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def source_of(root: Path, module: str) -> str | None:
    """The file of a module of data/ or records/, from `root`; None of any other name."""
    if module.split(".")[0] not in ("data", "records"):
        return None
    place = module.replace(".", "/")
    for name in (f"{place}.py", f"{place}/__init__.py"):
        if (root / name).exists():
            return name
    return None


def sources_of(starts: set[str], root: Path = REPO) -> set[str]:
    """Files of data/ and records/, and all that they import of these, in functions too."""
    found = set()
    waiting = {*starts}
    while waiting:
        name = waiting.pop()
        found.add(name)
        package = str(Path(name).parent).replace("/", ".")
        modules = imported_modules(read_bytes(root / name), package)
        waiting |= {source_of(root, module) for module in modules} - found - {None}
    return found


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
