"""train_gpt.py and train_gpt_mlx.py side by side: what names no framework is word for word the same in both.

Nobody keeps two programs alike by good will. So the sources are taken apart into top-level statements, and
classes into their methods and fields. A part may differ only if a framework's word stands in it, or if it is
listed here with a reason; what is in one script alone must be so for the same reasons.
"""
import ast
import difflib
import re

import pytest

import helpers

TORCH, MLX = (path.read_text(encoding="utf-8") for path in (helpers.SCRIPT, helpers.MLX_SCRIPT))
WORDS = re.compile(r"torch|\bTensor\b|\bF\.|\bdist\.|\bmx\.|\bmlx", re.IGNORECASE)
DIFFERENT = {       # without a framework's word, and yet not the same
    "GPT": "torch: compiled parts and their layers, once; MLX: leaves are arguments, for mx.compile",
    "GPT.__init__": "as GPT",
    "Machine.beat": "torch: through the store; MLX, which has none, by datagrams",
    "Machine.who_is_lost": "as Machine.beat",
    "Trainer.check_replicas": "torch brings tensors to the host first",
    "Trainer.export": "as Trainer.check_replicas",
    "Trainer.score": "torch copies what it will change in place; MLX changes nothing in place",
}
ALONE = {           # in one script only, without a framework's word
    "keep_freed_memory": "torch: glibc's; a step of MLX takes as long without it (1.34 s, smoke)",
    "Machine.store": "torch: what the ranks' hearts beat in",
    "Machine.heart": "MLX: instead of the store, as are places, heard and calls",
    "Machine.places": "as Machine.heart",
    "Machine.heard": "as Machine.heart",
    "Machine.calls": "as Machine.heart",
    "Machine.waiter": "MLX: its collectives know no timeout",
    "Machine.timeout": "as Machine.waiter",
    "Machine.memory": "MLX: memory is shared with all that runs, so a pass is sized to it",
    "GPT.rows_at_once": "as Machine.memory",
}
GLUE = ["environment", "finish", "catch_signals", "run", "sample", "choose_dtype", "measure_flops"]


def named(nodes: list[ast.stmt], lines: list[str], prefix: str = "") -> dict[str, str]:
    """Name -> source of each statement that defines one; of a class its first lines and each member."""
    found = {}
    for node in nodes:
        target = getattr(node, "targets", [getattr(node, "target", node)])[0]
        name = getattr(target, "name", None) or getattr(target, "id", None) or (
            ast.unparse(target) if isinstance(target, (ast.Subscript, ast.Tuple)) else None)
        if name is None:        # an import, a docstring, the last lines
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        last = node.end_lineno
        if isinstance(node, ast.ClassDef):
            found |= named(node.body, lines, f"{name}.")
            documented = isinstance(node.body[0], ast.Expr)
            last = node.body[0].end_lineno if documented else node.body[0].lineno
        found[prefix + name] = "\n".join(lines[first:last])
    return found


PARTS = [named(ast.parse(source).body, source.splitlines()) for source in (TORCH, MLX)]
TORCH_PARTS, MLX_PARTS = PARTS
SHARED = [name for name in TORCH_PARTS if name in MLX_PARTS]


def says(name: str) -> bool:
    """Whether a framework's word stands in a part, in either script."""
    return bool(WORDS.search(TORCH_PARTS.get(name, "") + MLX_PARTS.get(name, "")))


@pytest.mark.parametrize("name", [name for name in SHARED if not says(name) and name not in DIFFERENT])
def test_what_names_no_framework_is_the_same(name):
    assert MLX_PARTS[name] == TORCH_PARTS[name]


@pytest.mark.parametrize("name", GLUE)
def test_glue_differs_only_in_lines_that_name_a_framework(name):
    """Long functions that need a framework for a word or two."""
    torch, mlx = (parts[name].splitlines() for parts in PARTS)
    for kind, a, b, c, d in difflib.SequenceMatcher(None, torch, mlx, autojunk=False).get_opcodes():
        assert kind == "equal" or WORDS.search("\n".join(torch[a:b] + mlx[c:d])), (torch[a:b], mlx[c:d])


def test_what_is_in_one_script_alone_names_a_framework():
    alone = set(TORCH_PARTS) ^ set(MLX_PARTS)
    assert [name for name in sorted(alone) if not says(name) and name not in ALONE] == []


def test_the_exceptions_are_needed():
    """No entry for what is the same, gone, or excused by its words anyhow: so the lists stay short."""
    assert [name for name in DIFFERENT if name not in SHARED or says(name)
            or MLX_PARTS[name] == TORCH_PARTS[name]] == []
    assert [name for name in ALONE if says(name) or (name in MLX_PARTS) == (name in TORCH_PARTS)] == []


def test_the_order_and_the_banners_are_the_same():
    lines = [[(line if line.startswith("# ---") else line.split("(")[0].split(":")[0])
              for line in source.splitlines() if re.match(r"# --- |def |class |[A-Z_]+\b.* = ", line)]
             for source in (TORCH, MLX)]
    shared = set(lines[0]) & set(lines[1])
    assert [line for line in lines[0] if line in shared] == [line for line in lines[1] if line in shared]
    assert [line for line in lines[0] if line.startswith("#")] == \
        [line for line in lines[1] if line.startswith("#")]


def test_more_than_half_is_shared():
    same = [name for name in SHARED if TORCH_PARTS[name] == MLX_PARTS[name]]
    assert sum(TORCH_PARTS[name].count("\n") + 1 for name in same) > 850 and len(same) > 200
