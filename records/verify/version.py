"""Which referee judged: a digest of the sources that decide."""

import ast
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

from data.command import REPO
from data.files import read_bytes, sha256

JUDGE = "records/verify/judge.py"  # whose imports decide, too
WORKER = "records/sandbox/inside/worker.py"  # which the sandbox runs by its path
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


def deciding_sources(root: Path = REPO) -> list[str]:
    """The files of data/ and records/ on which a verdict rests: the judge and all that it imports."""
    found = {SCHEMA}
    waiting = {JUDGE, WORKER}
    while waiting:
        name = waiting.pop()
        found.add(name)
        package = str(Path(name).parent).replace("/", ".")
        modules = imported_modules(read_bytes(root / name), package)
        waiting |= {source_of(root, module) for module in modules} - found - {None}
    return sorted(found)


@cache
def referee_version(root: Path = REPO) -> str:
    """16 hexadecimal digits of the sha256 over names and contents of `deciding_sources`.

    A change of the board, the pages or the data's downloads leaves it as it is. A change of a comment in the
    judge does not: nobody has to trust a rule of what counts.
    """
    lines = [f"{name} {sha256(read_bytes(root / name))}\n" for name in deciding_sources(root)]
    return sha256("".join(lines).encode())[:16]
