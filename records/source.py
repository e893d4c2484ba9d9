"""Rules for a record's script, read from its syntax tree; nothing of it runs here."""
import ast
import io
import itertools
import sys
import tokenize
import unicodedata
from collections.abc import Iterator

from common import Check, Track, check, skip

PICKLES = {"pickle", "_pickle", "pickletools", "copyreg", "dill", "cloudpickle", "joblib", "shelve"}
UNPICKLERS = ("torch.load", "torch.save", "numpy.load", "numpy.lib.format", "numpy.lib.npyio",
              "numpy.memmap.load", "torch.jit.load", "torch.package", "torch.hub", "torch.serialization",
              "torch.utils.model_zoo")
HIDERS = {"exec", "eval", "compile", "__import__", "__builtins__", "__loader__", "__spec__", "breakpoint",
          "globals"}
LOADERS = {"importlib", "imp", "runpy", "marshal", "zipimport", "code", "codeop", "builtins", "pkgutil",
           "timeit", "cProfile", "profile", "pdb", "bdb", "trace", "doctest", "gc", "site", "test", "lib2to3"}
RUNNERS = ("types.CodeType", "types.FunctionType", "sys.modules", "sys.executable", "sys._getframe",
           "os.system", "os.popen",
           *(f"os.{how}{end}" for how in ("exec", "spawn") for end in "l le lp lpe v ve vp vpe".split()),
           "os.posix_spawn", "os.posix_spawnp", "logging.config", "ctypes.pythonapi", "ctypes.PyDLL",
           "torch.utils.cpp_extension", "torch.jit.CompilationUnit", "numpy.f2py")
MEMBERS = {"builtins", "importlib", "marshal", "runpy", "load_library", "load_inline", "f_globals",
           "f_builtins", "f_locals"}          # of whatever object
DUNDERS = {"__init__", "__post_init__", "__new__", "__call__", "__enter__", "__exit__", "__setattr__",
           "__name__", "__qualname__", "__version__", "__doc__", "__class__", "__dataclass_fields__",
           "__annotations__"}
C_CODE = "PyRun_", "PyEval_", "PyImport_", "PyMarshal_"
MAX_BITS = 512          # of one integer constant
MANY = 32               # times as much text in all, and as many numbers, as in one constant and one table


def names(tree: ast.AST) -> dict[str, str]:
    """What the script's names for modules and members stand for: after import torch as t, t is torch."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """'a.b.c' of an attribute chain by the modules' own names, else ''."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([known.get(node.id, node.id), *reversed(parts)]) if isinstance(node, ast.Name) else ""


def among(name: str, listed: tuple[str, ...]) -> bool:
    """Whether a dotted name is a listed one, in it, or the same through another module (torch.os.system)."""
    return any(name == one or name.startswith(one + ".")
               or one.startswith(("os.", "sys.")) and name.endswith("." + one) for one in listed)


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) of every import; '.' for a relative one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield "." if node.level else node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of the constants that are docstrings."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(id(first.value))
    return found


def pickles(tree: ast.AST) -> Iterator[str]:
    known = names(tree)
    for module, line in imported(tree):
        if module.split(".")[0] in PICKLES or among(module, UNPICKLERS):
            yield f"line {line} imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node, known)
            if among(name, UNPICKLERS) or node.attr in PICKLES:
                yield f"line {node.lineno} uses {name or node.attr}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"line {node.value.lineno} sets allow_pickle"


def hidden_code(tree: ast.AST) -> Iterator[str]:
    known = names(tree)
    for module, line in imported(tree):
        if module.split(".")[0] in LOADERS or among(module, RUNNERS):
            yield f"line {line} imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in HIDERS and isinstance(node.ctx, ast.Load):
            yield f"line {node.lineno} uses {node.id}"
        if isinstance(node, ast.Constant) and node.value in HIDERS - {"compile", "globals"}:
            yield f"line {node.lineno} has the text {node.value!r}"
        if isinstance(node, ast.Attribute):
            name, last = dotted(node, known), node.attr
            special = last.startswith("__") and last.endswith("__") and last not in DUNDERS
            if special or last in MEMBERS or last.startswith(C_CODE):
                yield f"line {node.lineno} uses .{last}"
            elif among(name, RUNNERS):
                yield f"line {node.lineno} uses {name}"


def elements(node: ast.AST) -> int:
    """Constants in a list, tuple, set or dict, those of nested ones included."""
    return sum(isinstance(inner, ast.Constant) for inner in ast.walk(node))


def large_constants(tree: ast.AST, max_literal: int, max_table: int) -> Iterator[str]:
    """One constant or table that is too large, and many small ones that are together."""
    words, text, numbers = docstrings(tree), 0, 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, (str, bytes)):
                text += len(node.value)
            if isinstance(node.value, (str, bytes)) and len(node.value) > max_literal:
                what = "a docstring" if id(node) in words else "a constant"
                yield f"line {node.lineno} holds {what} of {len(node.value)}, {max_literal} are allowed"
            if isinstance(node.value, int) and node.value.bit_length() > MAX_BITS:
                yield f"line {node.lineno} holds a number of {node.value.bit_length()} bits"
            numbers += isinstance(node.value, (int, float, complex))
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)) and elements(node) > max_table:
            yield f"line {node.lineno} holds a table of {elements(node)}, {max_table} are allowed"
        if isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > max_table:
            yield f"line {node.lineno} calls with {len(node.args) + len(node.keywords)} arguments"
    if text > MANY * max_literal:
        yield f"all texts together have {text} characters, {MANY * max_literal} are allowed"
    if numbers > MANY * max_table:
        yield f"{numbers} numbers stand in it, {MANY * max_table} are allowed"


def large_lines(text: str, max_literal: int) -> Iterator[str]:
    """Comments can hold weights too: the script can read itself."""
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > max_literal:
            yield f"line {number} has {len(line)} characters, {max_literal} are allowed"
    comments = sum(len(token.string) for token in tokenize.generate_tokens(io.StringIO(text).readline)
                   if token.type == tokenize.COMMENT)
    if comments > MANY * max_literal:
        yield f"all comments together have {comments} characters, {MANY * max_literal} are allowed"


def unreadable(script: bytes) -> str:
    """Why a person would not read in the script what Python does, else ''. Raises SyntaxError."""
    encoding = tokenize.detect_encoding(io.BytesIO(script).readline)[0]
    if encoding != "utf-8":
        return f"declares the encoding {encoding}, expected utf-8"
    odd = sorted({c for c in script.decode() if unicodedata.category(c) in ("Cc", "Cf")} - set("\t\n\r\f"))
    return f"holds the invisible character U+{ord(odd[0]):04X}, expected none" if odd else ""


def none_of(name: str, found: Iterator[str]) -> Check:
    found = list(dict.fromkeys(found))
    return check(name, not found, "; ".join(found[:3]) or "none found, none expected")


def check_source(script: bytes, track: Track) -> Iterator[Check]:
    """All rules for a script."""
    try:
        tree, odd = ast.parse(script), unreadable(script)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield check(
            "compiles", False, f"{error}, expected Python {sys.version_info[0]}.{sys.version_info[1]}"
        )
        return
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    yield check(
        "compiles",
        "load_predictor" in functions and not odd,
        odd or "defines " + ("" if "load_predictor" in functions else "no ") + "load_predictor, expected one",
    )
    if odd:
        return
    lines, most = len(script.splitlines()), track["max_lines"]
    yield check("lines", lines <= most, f"{lines} lines, expected {most} at most") if most else \
        skip("lines", "the track has no limit")
    allowed = {*track["imports"], *sys.stdlib_module_names, "__future__"}
    yield none_of("imports", (f"line {line} imports {module}, which the track does not list"
                              for module, line in imported(tree) if module.split(".")[0] not in allowed))
    yield none_of("no-pickle", pickles(tree))
    yield none_of("no-packed-code", hidden_code(tree))
    yield none_of("no-large-constants", itertools.chain(
        large_constants(tree, track["max_literal"], track["max_table"]),
        large_lines(script.decode(), track["max_literal"])))
