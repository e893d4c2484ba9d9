"""Rules for a record's script, read from its syntax tree; nothing of it runs here."""
import ast
import sys
from collections.abc import Iterator

from common import Check, Track, check, skip

PICKLES = {"pickle", "_pickle", "pickletools", "copyreg", "dill", "cloudpickle", "joblib", "shelve"}
UNPICKLERS = {"torch.load", "torch.save", "np.load", "numpy.load", "torch.jit.load", "torch.package",
              "torch.hub", "np.memmap.load"}
HIDERS = {"exec", "eval", "compile", "__import__", "__builtins__", "__loader__", "breakpoint"}
LOADERS = {"importlib", "imp", "runpy", "marshal", "zipimport", "code", "codeop", "builtins", "pkgutil"}
MAX_BITS = 512          # of one integer constant


def dotted(node: ast.AST) -> str:
    """'a.b.c' of an attribute chain, else ''."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


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
    for module, line in imported(tree):
        if module.split(".")[0] in PICKLES or module in UNPICKLERS:
            yield f"line {line} imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in UNPICKLERS:
            yield f"line {node.lineno} uses {dotted(node)}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"line {node.value.lineno} sets allow_pickle"


def hidden_code(tree: ast.AST) -> Iterator[str]:
    for module, line in imported(tree):
        if module.split(".")[0] in LOADERS:
            yield f"line {line} imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in HIDERS and isinstance(node.ctx, ast.Load):
            yield f"line {node.lineno} uses {node.id}"
        if isinstance(node, ast.Attribute) and node.attr in (
            "__globals__",
            "__builtins__",
            "__code__",
            "__subclasses__",
        ):
            yield f"line {node.lineno} uses .{node.attr}"
        if isinstance(node, ast.Constant) and node.value in HIDERS - {"compile"}:
            yield f"line {node.lineno} has the text {node.value!r}"
        if isinstance(node, ast.Attribute) and dotted(node) in (
            "types.CodeType",
            "types.FunctionType",
            "sys.modules",
        ):
            yield f"line {node.lineno} uses {dotted(node)}"


def elements(node: ast.AST) -> int:
    """Constants in a list, tuple, set or dict, those of nested ones included."""
    return sum(isinstance(inner, ast.Constant) for inner in ast.walk(node))


def large_constants(tree: ast.AST, max_literal: int, max_table: int) -> Iterator[str]:
    words = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, (str, bytes)) and len(node.value) > max_literal:
                what = "a docstring" if id(node) in words else "a constant"
                yield f"line {node.lineno} holds {what} of {len(node.value)}, {max_literal} are allowed"
            if isinstance(node.value, int) and node.value.bit_length() > MAX_BITS:
                yield f"line {node.lineno} holds a number of {node.value.bit_length()} bits"
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)) and elements(node) > max_table:
            yield f"line {node.lineno} holds a table of {elements(node)}, {max_table} are allowed"


def none_of(name: str, found: Iterator[str]) -> Check:
    found = list(dict.fromkeys(found))
    return check(name, not found, "; ".join(found[:3]) or "none found, none expected")


def check_source(script: bytes, track: Track) -> Iterator[Check]:
    """All rules for a script."""
    try:
        tree = ast.parse(script)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield check(
            "compiles", False, f"{error}, expected Python {sys.version_info[0]}.{sys.version_info[1]}"
        )
        return
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    yield check(
        "compiles",
        "load_predictor" in functions,
        "defines " + ("" if "load_predictor" in functions else "no ") + "load_predictor, expected one",
    )
    lines, most = len(script.splitlines()), track["max_lines"]
    yield check("lines", lines <= most, f"{lines} lines, expected {most} at most") if most else \
        skip("lines", "the track has no limit")
    allowed = {*track["imports"], *sys.stdlib_module_names, "__future__"}
    yield none_of("imports", (f"line {line} imports {module}, which the track does not list"
                              for module, line in imported(tree) if module.split(".")[0] not in allowed))
    yield none_of("no-pickle", pickles(tree))
    yield none_of("no-packed-code", hidden_code(tree))
    yield none_of("no-large-constants", large_constants(tree, track["max_literal"], track["max_table"]))
