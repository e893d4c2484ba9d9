"""Style of a record's script, read from its text; nothing of it runs here.

These rules help people who read the script. They do not protect the score, because Python has ways round each
of them. The sandbox protects it: it holds no data, no network and no packages but those of the track. The
limit on the script's size bounds how much text a script can contain, and none of it should look like data.
"""

import ast
import io
import sys
import tokenize
import unicodedata
import zlib
from collections.abc import Iterator

from records.archive.checks import Check, check, none_wrong
from records.archive.tracks import Track

MAX_CODE = 48 << 10  # bytes of a script at zlib level 9; a text that was learned by heart needs more
PART = 4096  # bytes of a script
MAX_DENSITY = 0.55  # what a part compresses to: programs 0.47, base64 0.76, hex 0.57


def data_in(script: bytes) -> Iterator[str]:
    """Parts of the script that compress so little that they must be data."""
    for start in range(0, len(script) - PART + 1, PART // 2):
        density = len(zlib.compress(script[start : start + PART], 9)) / PART
        if density > MAX_DENSITY:
            line = script.count(b"\n", 0, start) + 1
            yield f"line {line} on compresses to {density:.0%}, programs to {MAX_DENSITY:.0%} at most"
            return


def unreadable(script: bytes) -> Iterator[str]:
    """Why a person cannot see what Python runs: encoding, invisible characters. Raises SyntaxError."""
    encoding = tokenize.detect_encoding(io.BytesIO(script).readline)[0]
    if encoding != "utf-8":
        yield f"declares the encoding {encoding}, expected utf-8"
        return
    odd = sorted({c for c in script.decode() if unicodedata.category(c) in ("Cc", "Cf")} - set("\t\n\r\f"))
    if odd:
        yield f"holds the invisible character U+{ord(odd[0]):04X}, expected none"


def foreign_imports(tree: ast.Module, allowed: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." if node.level else node.module]
        else:
            continue
        for module in modules:
            if module.split(".")[0] not in allowed:
                yield f"line {node.lineno} imports {module}, which the track does not list"


def check_source(script: bytes, track: Track) -> Iterator[Check]:
    """`compiles`: this Python reads the script and finds load_predictor. `style`: people can read it."""
    try:
        tree = ast.parse(script)
        odd = [*unreadable(script), *data_in(script)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield check(
            "compiles", False, f"{error}, expected Python {sys.version_info[0]}.{sys.version_info[1]}"
        )
        return
    there = any(getattr(node, "name", "") == "load_predictor" for node in tree.body)
    yield check("compiles", there, f"load_predictor is {'' if there else 'not '}defined, expected so")
    odd += foreign_imports(tree, {*track["imports"], *sys.stdlib_module_names, "__future__"})
    size = len(zlib.compress(script, 9))
    if size > MAX_CODE:
        odd.append(f"compresses to {size} bytes, expected {MAX_CODE} at most")
    yield none_wrong("style", odd, "no data, no invisible characters, no imports but the track's")
