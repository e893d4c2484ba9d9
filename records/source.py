"""Rules for a record's script, read from its syntax tree; nothing of it runs here."""

import ast
import io
import sys
import tokenize
import unicodedata
from collections.abc import Iterator

from records.checks import Check, none_wrong
from records.folders import SCRIPT, TWIN
from records.tracks import Track


def words(text: str) -> set[str]:
    return set(text.split())


# modules and names that a script may not use, by what they would let it do
PICKLES = words("pickle _pickle pickletools copyreg dill cloudpickle joblib shelve")
UNPICKLERS = words(
    "torch.load torch.save torch.jit.load torch.package torch.hub torch.serialization torch.utils.model_zoo "
    "numpy.load numpy.lib.format numpy.lib.npyio numpy.memmap.load"
)
HIDERS = words("exec eval compile __import__ __builtins__ __loader__ __spec__ breakpoint globals")
LOADERS = words(
    "importlib imp runpy marshal zipimport code codeop builtins pkgutil timeit cProfile profile pdb bdb "
    "trace doctest gc site test lib2to3"
)
RUNNERS = words(
    "os.execl os.execle os.execlp os.execlpe os.execv os.execve os.execvp os.execvpe os.spawnl os.spawnle "
    "os.spawnlp os.spawnlpe os.spawnv os.spawnve os.spawnvp os.spawnvpe os.posix_spawn os.posix_spawnp "
    "os.system os.popen types.CodeType types.FunctionType sys.modules sys.executable sys._getframe "
    "logging.config ctypes.pythonapi ctypes.PyDLL torch.utils.cpp_extension torch.jit.CompilationUnit "
    "numpy.f2py"
)
MEMBERS = words(  # of whatever object
    "builtins importlib marshal runpy load_library load_inline f_globals f_builtins f_locals"
)
DUNDERS = words(  # the only ones that may be used
    "__init__ __post_init__ __new__ __call__ __enter__ __exit__ __setattr__ __name__ __qualname__ "
    "__version__ __doc__ __class__ __dataclass_fields__ __annotations__"
)
C_CODE = "PyRun_", "PyEval_", "PyImport_", "PyMarshal_"
MAX_BITS = 512  # of one integer constant
MANY = 32  # times as much text in all, and as many numbers, as in one constant and one table


Nodes = list[ast.AST]  # of a script's syntax tree, each once


def names(nodes: Nodes) -> dict[str, str]:
    """What the script's names for modules and members stand for: after import torch as t, t is torch."""
    found = {}
    for node in nodes:
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


def among(name: str, listed: set[str]) -> bool:
    """Whether a dotted name is a listed one, in it, or the same through another module (torch.os.system)."""
    for one in listed:
        if name == one or name.startswith(one + "."):
            return True
        if one.startswith(("os.", "sys.")) and name.endswith("." + one):
            return True
    return False


def imported(nodes: Nodes) -> Iterator[tuple[str, int]]:
    """(module, line) of every import; '.' for a relative one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield "." if node.level else node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def foreign_imports(nodes: Nodes, allowed: set[str]) -> Iterator[str]:
    for module, line in imported(nodes):
        if module.split(".")[0] not in allowed:
            yield f"line {line} imports {module}, which the track does not list"


def pickles(nodes: Nodes) -> Iterator[str]:
    known = names(nodes)
    for module, line in imported(nodes):
        if module.split(".")[0] in PICKLES or among(module, UNPICKLERS):
            yield f"line {line} imports {module}"
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name = dotted(node, known)
            if among(name, UNPICKLERS) or node.attr in PICKLES:
                yield f"line {node.lineno} uses {name or node.attr}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"line {node.value.lineno} sets allow_pickle"


def hidden_code(nodes: Nodes) -> Iterator[str]:
    known = names(nodes)
    for module, line in imported(nodes):
        if module.split(".")[0] in LOADERS or among(module, RUNNERS):
            yield f"line {line} imports {module}"
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in HIDERS and isinstance(node.ctx, ast.Load):
            yield f"line {node.lineno} uses {node.id}"
        if isinstance(node, ast.Constant) and node.value in HIDERS - {"compile", "globals"}:
            yield f"line {node.lineno} has the text {node.value!r}"
        if isinstance(node, ast.Attribute):
            name = dotted(node, known)
            last = node.attr
            special = last.startswith("__") and last.endswith("__") and last not in DUNDERS
            if special or last in MEMBERS or last.startswith(C_CODE):
                yield f"line {node.lineno} uses .{last}"
            elif among(name, RUNNERS):
                yield f"line {node.lineno} uses {name}"


def elements(node: ast.AST) -> int:
    """Constants in a list, tuple, set or dict, those of nested ones included."""
    return sum(isinstance(inner, ast.Constant) for inner in ast.walk(node))


def large_constants(nodes: Nodes, max_literal: int, max_table: int) -> Iterator[str]:
    """One constant or table that is too large, and many small ones that are together."""
    text, numbers = 0, 0
    for node in nodes:
        if isinstance(node, ast.Constant):
            size = len(node.value) if isinstance(node.value, (str, bytes)) else 0
            text += size
            if size > max_literal:
                yield f"line {node.lineno} holds a text of {size}, {max_literal} are allowed"
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
    comments = sum(len(line.partition("#")[2]) for line in text.split("\n"))
    if comments > MANY * max_literal:
        yield f"all comments together have {comments} characters, {MANY * max_literal} are allowed"


def large_parts(script: bytes, nodes: Nodes, max_literal: int, max_table: int) -> Iterator[str]:
    yield from large_constants(nodes, max_literal, max_table)
    yield from large_lines(script.decode(), max_literal)


def unreadable(script: bytes) -> str:
    """Why a person would not read in the script what Python does, else ''. Raises SyntaxError."""
    encoding = tokenize.detect_encoding(io.BytesIO(script).readline)[0]
    if encoding != "utf-8":
        return f"declares the encoding {encoding}, expected utf-8"
    odd = sorted({c for c in script.decode() if unicodedata.category(c) in ("Cc", "Cf")} - set("\t\n\r\f"))
    return f"holds the invisible character U+{ord(odd[0]):04X}, expected none" if odd else ""


def check_compiles(scripts: dict[str, bytes]) -> tuple[Check, dict[str, Nodes]]:
    """The check, and what the scripts consist of if it passes."""
    parts, wrong = {}, []
    for name, script in scripts.items():
        try:
            tree = ast.parse(script)
            odd = unreadable(script)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
            wrong.append(f"{name}: {error}, expected {version}")
            continue
        parts[name] = list(ast.walk(tree))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if odd:
            wrong.append(f"{name} {odd}")
        if name == SCRIPT and "load_predictor" not in functions:
            wrong.append(f"{name} defines no load_predictor, expected one")
    line = none_wrong("compiles", wrong, f"{' and '.join(scripts)}, load_predictor defined")
    return line, {} if wrong else parts


def check_source(scripts: dict[str, bytes], track: Track) -> Iterator[Check]:
    """All rules for the scripts of a record, by name."""
    line, parts = check_compiles(scripts)
    yield line
    if not parts:
        return
    listed = {*track["imports"], *sys.stdlib_module_names, "__future__"}
    found = {"imports": [], "no-pickle": [], "no-packed-code": [], "no-large-constants": []}
    for name, nodes in parts.items():
        allowed = listed | {SCRIPT.removesuffix(".py")} if name == TWIN else listed
        sins = {
            "imports": foreign_imports(nodes, allowed),
            "no-pickle": pickles(nodes),
            "no-packed-code": hidden_code(nodes),
            "no-large-constants": large_parts(scripts[name], nodes, track["max_literal"], track["max_table"]),
        }
        for rule, whats in sins.items():
            found[rule] += [f"{name} {what}" for what in dict.fromkeys(whats)]
    for rule, wrong in found.items():
        yield none_wrong(rule, wrong, "nothing found")
