"""The sources: form, length, types, imports, pins, and what the README says of them."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict

import pytest

import train_gpt
from records.verify.version import INSIDE, JUDGES, sources_of
from tests.house import test_papers as papers
from tests.kit import helpers, readme

README = readme.README.read_text(encoding="utf-8")
SCRIPTS = ("train_gpt.py", "train_gpt_mlx.py")
SOURCES = {name: (helpers.ROOT / name).read_text(encoding="utf-8") for name in SCRIPTS}
MYPY = f"-m mypy --strict --ignore-missing-imports {' '.join(SCRIPTS)}"
TRAINER_IMPORTS = {"numpy", "safetensors", "sentencepiece", "torch"}
TWIN_IMPORTS = {"numpy", "torch", "mlx", "train_gpt"}
RINGS = {"train_gpt", "train_gpt_mlx", "data", "records", "tests"}
PYTHON = [name for name in papers.FILES if name.endswith(".py") and not name.startswith("records/track_")]


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((helpers.ROOT / name).read_text(encoding="utf-8"))


# --- form and limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_is_content(command):
    """To mend it: python -m ruff format . && python -m ruff check --fix ."""
    ruff = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", "."]
    done = subprocess.run(ruff, cwd=helpers.ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_is_content():
    """CI runs the same command in a job of its own: the types are checked where nothing else can fail."""
    done = subprocess.run([sys.executable, *MYPY.split()], cwd=helpers.ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"- run: python {MYPY}\n" in (helpers.ROOT / ".github/workflows/tests.yml").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_stays_short(name):
    assert len(SOURCES[name].splitlines()) <= 1489


# Tokens a line at most, so that no lines are saved by packing them. These numbers may fall, not rise.
DENSITY = {
    "imports": 4.2,
    "settings": 13.7,
    "parameters and plan": 11.3,
    "model": 16.0,
    "optimizer": 15.1,
    "evaluation": 17.9,
    "rounding": 13.2,
    "predictor": 15.2,
    "data": 14.7,
    "run": 11.5,
    "machine": 12.8,
    "main": 13.0,
}
MARKS = "COMMENT NL NEWLINE INDENT DEDENT ENCODING ENDMARKER"  # tokens that are not counted


def docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Where they begin."""
    bearers = (ast.Module, ast.ClassDef, ast.FunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, bearers) and ast.get_docstring(node)]
    return {(body[0].lineno, body[0].col_offset) for body in bodies}


def tokens_of_lines(name: str) -> dict[str, Counter[int]]:
    """Of each section of a script, the number of tokens in each line that bears one."""
    section, sections, silent = "imports", defaultdict(Counter), docstrings(tree_of(name))
    for token in tokenize.generate_tokens(io.StringIO(SOURCES[name]).readline):
        title = re.match(r"# --- ([\w ]+)", token.string)
        section = title[1] if title else section
        if tokenize.tok_name[token.type] not in MARKS.split() and token.start not in silent:
            sections[section][token.start[0]] += 1
    return sections


def test_no_section_of_the_script_is_denser_than_it_was():
    sections = tokens_of_lines("train_gpt.py")
    assert sections.keys() == DENSITY.keys()
    found = {name: lines.total() / len(lines) for name, lines in sections.items()}
    assert not {name: density for name, density in found.items() if density > DENSITY[name]}


def test_no_function_is_longer_than_80_lines():
    long = []
    for name in PYTHON:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 79:
                long.append(f"{name}:{node.lineno}: {node.name}")
    assert not long


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_larger_function_of_a_script_says_what_it_does(name):
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 15:
            described = ast.get_docstring(node) or node.name in ("__init__", "forward", "backward")
            assert described, node.name


# --- imports ----------------------------------------------------------------------------------------------


def imported(name: str) -> set[str]:
    """The packages that a file imports."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


def test_the_trainer_is_one_file_and_the_twin_needs_nothing_else():
    assert imported("train_gpt.py") - sys.stdlib_module_names == TRAINER_IMPORTS
    assert imported("train_gpt_mlx.py") - sys.stdlib_module_names == TWIN_IMPORTS


def test_data_tools_and_referee_know_nothing_of_the_trainer_and_the_tests():
    tools = [name for name in PYTHON if name.startswith(("data/", "records/"))]
    assert len(tools) > 10 and not [name for name in tools if imported(name) & RINGS - {"data", "records"}]


# Each room of records/ and the rooms that it may import beside itself.
ROOMS = {
    "archive": set(),
    "sandbox": {"archive", "sandbox.inside"},
    "sandbox.inside": set(),
    "referee": {"archive", "sandbox"},
    "cluster": set(),
    "verify": {"archive", "sandbox", "sandbox.inside", "referee", "cluster"},
    "board": {"archive"},
    "compare": {"archive", "board"},
    "follow": {"archive"},
    "campaign": {"archive", "sandbox", "referee", "cluster"},
}


def modules_of(name: str) -> set[str]:
    """The modules of data/ and records/ that a file imports."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("data", "records"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            files = {one for one in names if module_file(one)}
            found |= files or {node.module}
    return found


def module_file(module: str) -> bool:
    path = helpers.ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def room_of(module: str) -> str:
    """sandbox.inside of records.sandbox.inside.worker."""
    return module.removeprefix("records.").rpartition(".")[0]


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


TOOLS = {module_of(name): modules_of(name) for name in PYTHON if name.startswith(("data/", "records/"))}


def test_rooms_import_what_stands_below_them():
    for module, found in TOOLS.items():
        room = room_of(module)
        rooms = {room_of(one) for one in found if one.startswith("records.")}
        if module.startswith("data."):
            assert not rooms, module
        elif room in ROOMS:
            assert rooms - {""} <= {room, *ROOMS[room]}, module


def test_what_a_verdict_rests_on_imports_no_command():
    sources = sources_of({*JUDGES, *INSIDE})
    assert len(sources) > 30 and "data/door.py" not in sources


def test_commands_are_listed_without_what_they_work_with():
    code = "import sys, data.__main__, records.__main__\n"
    code += "assert data.__main__.main(['--help']) == records.__main__.main([]) == 0\n"
    code += "assert not {'torch', 'numpy', 'huggingface_hub'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=helpers.ROOT, check=True, stdout=subprocess.DEVNULL)


def test_imports_run_in_no_circle():
    left = dict(TOOLS)
    while free := [module for module, found in left.items() if not found & left.keys() - {module}]:
        left = {module: found for module, found in left.items() if module not in free}
    assert not left


def test_a_class_has_its_name_alone():
    names = [
        node.name
        for name in PYTHON
        if name.startswith(("data/", "records/", "tests/"))
        for node in tree_of(name).body
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in names if names.count(name) > 1} <= {"Plan"}  # of prepare and of download


IMPORTING = """
import os, signal, sys, threading
import numpy, sentencepiece, safetensors.numpy, torch, torch.distributed

def state():
    return {
        "environment": dict(os.environ),
        "files": [os.getcwd(), os.listdir(), sorted(os.listdir("/proc/self/fd"))],
        "threads": [threading.active_count(), torch.get_num_threads()],
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
        "random": [numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()],
        "torch": [torch.get_default_dtype(), torch.is_grad_enabled(), torch.distributed.is_initialized()],
    }

before = state()
import train_gpt
after = state()
assert before == after, [name for name in before if before[name] != after[name]]
"""


@pytest.mark.slow
def test_importing_the_trainer_has_no_side_effect(tmp_path):
    """No file, thread, signal handler, seed or default changes, even with settings that would stop a run."""
    env = {"PYTHONPATH": helpers.ROOT, "PYTHONDONTWRITEBYTECODE": 1, "ITERATION": "typo", "PRESET": "none"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        cwd=tmp_path,
        env=helpers.clean_environment(**env),
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


# --- README -----------------------------------------------------------------------------------------------


def test_the_tables_are_the_generated_ones():
    """After a change of the settings or a campaign: python -m tests.kit.readme"""
    assert readme.with_tables(README) == README


def test_ci_runs_the_test_command_of_the_readme_word_for_word(tmp_path):
    block = re.search(r"<!-- test command -->\n```bash\n(.*?)```", README, re.DOTALL)[1]
    assert block.count("\n") == 1 and "-m pytest" in block
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_bytes((helpers.ROOT / ".ci/run").read_bytes())
    stand_in = "echo \"in $PWD\" && printf '%s|' a 'b c' && exit 7"
    (tmp_path / "README.md").write_text(README.replace(block, stand_in + "\n"), encoding="utf-8")
    done = subprocess.run(["bash", tmp_path / ".ci/run"], cwd="/", text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (7, f"+ {stand_in}\nin {tmp_path}\na|b c|")


def test_exit_codes_are_the_same_everywhere(monkeypatch):
    codes = {0, 4}
    monkeypatch.setenv("PRESET", "smoke")
    for error in (train_gpt.SettingError, train_gpt.DataError, FloatingPointError, InterruptedError):

        def fail(*_, error=error):
            raise error("as told")

        codes.add(train_gpt.main(open_machine=fail))
    text = re.search(r"## Exit codes\n(.*?)\n##", README, re.DOTALL)[1]
    assert {int(code) for code in re.findall(r"(?:^|· |\| )\**(\d+)\b", text, re.MULTILINE)} == codes
    text = re.search(r"Exit codes: (.*)", train_gpt.__doc__, re.DOTALL)[1]
    assert {int(code) for code in re.findall(r"\b(\d+) ", text)} == codes


@pytest.mark.parametrize("name", ["requirements.txt", "tests/requirements.txt"])
def test_every_requirement_is_pinned_exactly(name):
    lines = [line.split("#")[0].strip() for line in (helpers.ROOT / name).read_text().splitlines()]
    pin = r"[A-Za-z0-9_.-]+(\[\w+\])?==\d+(\.\d+)*(\.post\d+)?(; sys_platform == \"\w+\")?"
    assert not [line for line in lines if line and not re.fullmatch(pin, line)]


@pytest.mark.slow
def test_the_first_commands_of_the_readme_need_requirements_txt_alone():
    lines = (helpers.ROOT / "tests/requirements.txt").read_text().splitlines()
    names = [re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines if line[:1].isalpha()]
    code = f"import sys; sys.modules.update(dict.fromkeys({names}))\n"  # an import of these fails
    code += "import data.prepare, records.referee.commands, train_gpt"
    subprocess.run([sys.executable, "-c", code], cwd=helpers.ROOT, check=True)
