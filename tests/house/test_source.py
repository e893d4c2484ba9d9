"""The sources: form, length, types, imports, pins, and what the README says of them."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from graphlib import TopologicalSorter
from unittest import mock

import pytest

import train_gpt
from records.verify.version import INSIDE, JUDGES, sources_of
from tests.house import test_papers as papers
from tests.kit import helpers, readme, record_kit

README = readme.README.read_text(encoding="utf-8")
WORKFLOW = (helpers.ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
SCRIPTS = ("train_gpt.py", "train_gpt_mlx.py")
MYPY = f"-m mypy --strict --ignore-missing-imports {' '.join(SCRIPTS)} records/referee/scoring.py"
PYTHON = [name for name in papers.FILES if name.endswith(".py")]
TOOLS = [name for name in PYTHON if name.startswith(("data/", "records/"))]


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((helpers.ROOT / name).read_text(encoding="utf-8"))


# --- form and limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_is_content(command):
    """To mend it: python -m ruff format . && python -m ruff check --fix ."""
    done = helpers.python("-m", "ruff", *command.split(), "--no-cache", ".", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_is_content():
    """CI runs the same command in a job of its own: the types are checked where nothing else can fail."""
    done = helpers.python(*MYPY.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"- run: python {MYPY}\n" in WORKFLOW


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_stays_short_and_is_not_packed(name):
    """At most 13.5 tokens a code line; docstrings do not count."""
    text = (helpers.ROOT / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 1500
    tokens = Counter()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.line.lstrip().startswith('"""')
        if token.string.strip() and token.type != tokenize.COMMENT and not docstring:
            tokens[token.start[0]] += 1
    assert tokens.total() <= 13.5 * len(tokens)


@pytest.mark.slow
def test_functions_are_short_and_larger_ones_of_a_script_say_what_they_do():
    for name in PYTHON:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines < 80, f"{name}:{node.lineno}: {node.name}"
                silent = name not in SCRIPTS or node.name in ("__init__", "forward", "backward")
                assert lines < 17 or silent or ast.get_docstring(node), f"{name}: {node.name}"


# --- imports ----------------------------------------------------------------------------------------------


def imported(name: str) -> set[str]:
    """The packages that a file imports, and of ours the modules."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES
            found |= modules or {node.module if node.module in MODULES else node.module.split(".")[0]}
    return found


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(name) for name in TOOLS}


def test_the_trainer_is_one_file_and_the_twin_needs_nothing_else():
    needed = {name: imported(name) - sys.stdlib_module_names for name in SCRIPTS}
    assert needed["train_gpt.py"] == {"numpy", "safetensors", "sentencepiece", "torch"}
    assert needed["train_gpt_mlx.py"] == {"numpy", "torch", "mlx", "train_gpt"}


# Each package of records/ and the packages that it may import beside itself.
PACKAGES = {
    "archive": set(),
    "sandbox": {"archive", "sandbox.inside"},
    "sandbox.inside": set(),
    "referee": {"archive", "sandbox"},
    "verify": {"archive", "sandbox", "sandbox.inside", "referee"},
    "board": {"archive"},
    "compare": {"archive", "board"},
    "follow": {"archive"},
    "campaign": {"archive", "sandbox", "referee"},
}


def package_of(module: str) -> str:
    """sandbox.inside of records.sandbox.inside.worker."""
    return module.removeprefix("records.").rpartition(".")[0]


def test_tools_import_what_stands_below_them_and_never_in_a_circle():
    """And nothing of the trainer or of the tests."""
    imports = {module_of(name): imported(name) for name in TOOLS}
    for module, found in imports.items():
        assert not found & {"train_gpt", "train_gpt_mlx", "tests"}, module
        packages = {package_of(one) for one in found & MODULES if one.startswith("records.")}
        own = package_of(module)
        if module.startswith("data."):
            assert not packages, module
        elif own in PACKAGES:
            assert packages - {""} <= {own, *PACKAGES[own]}, module
    graph = {module: found & MODULES - {module} for module, found in imports.items()}
    TopologicalSorter(graph).prepare()


def test_what_a_verdict_rests_on_imports_no_command():
    sources = sources_of({*JUDGES, *INSIDE})
    assert len(sources) > 20 and "data/door.py" not in sources


def test_commands_are_listed_without_what_they_work_with():
    code = "import sys, data.__main__, records.__main__\n"
    code += "assert data.__main__.main(['--help']) == records.__main__.main([]) == 0\n"
    code += "assert not {'torch', 'numpy', 'huggingface_hub'} & sys.modules.keys()\n"
    code += "import records.board.commands, records.referee.commands, records.verify.commands\n"
    code += "assert not {'huggingface_hub', 'ray'} & sys.modules.keys()"
    done = helpers.python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_the_trainer_says_and_makes_nothing(tmp_path):
    """Even with settings that would stop a run."""
    env = {"PYTHONPATH": helpers.ROOT, "PYTHONDONTWRITEBYTECODE": 1, "ITERATION": "typo", "PRESET": "none"}
    env = helpers.clean_environment(**env)
    done = helpers.python("-c", "import train_gpt", cwd=tmp_path, env=env, timeout=120)
    assert (done.stdout, done.stderr, done.returncode, [*tmp_path.iterdir()]) == ("", "", 0, [])


# --- README -----------------------------------------------------------------------------------------------


def test_the_tables_are_the_generated_ones():
    """After a change of the settings or a campaign: python -m tests.kit.readme"""
    assert readme.with_tables(README) == README


def test_ci_runs_the_test_command_of_the_readme():
    """With all that it needs in the command, also on a machine without a sandbox."""
    tests, _ = WORKFLOW.split("\n  types:\n")
    assert "- run: .ci/run\n" in tests and "install" not in tests
    assert "setting: user.max_user_namespaces=0\n" in tests
    block = re.search(r"<!-- test command -->\n```bash\n(.*?)```", README, re.DOTALL)[1]
    assert block.count("\n") == 1 and "-m pytest" in block
    echo = {"BASH_FUNC_exec%%": "() { printf '%s\\n' \"$@\"; }"}  # in place of bash's own
    done = subprocess.run(
        ["bash", helpers.ROOT / ".ci/run"], cwd="/", env=echo, text=True, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, f"+ {block}bash\n-c\n{block}")


def test_exit_codes_are_the_same_everywhere(monkeypatch):
    codes = {0, 4}
    monkeypatch.setenv("PRESET", "smoke")
    for error in (train_gpt.SettingError, train_gpt.DataError, FloatingPointError, InterruptedError):
        codes.add(train_gpt.main(open_machine=mock.Mock(side_effect=error("as raised"))))
    text = re.search(r"## Exit codes\n(.*?)\n##", README, re.DOTALL)[1]
    assert {int(code) for code in re.findall(r"^\| (\d+) ", text, re.MULTILINE)} == codes
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
    code += "import data.prepare, train_gpt\n"
    code += "from records.archive import tracks\nfrom records.referee import commands\n"
    code += "print(*commands.beside(tracks.load_track(tracks.RECORDS / 'track_floppy')))"
    done = helpers.python("-c", code, check=True)
    assert re.fullmatch(r"beside: zlib 1[.]7556, .*, zpaq 1[.]0994, 20\S+ 0[.]\d{4}\n", done.stdout)


@pytest.mark.slow
def test_all_tests_are_collected_and_those_of_the_sandbox_skipped_where_none_can_be_made(tmp_path):
    """Of a set in which anything fails to import, or makes a fixture first, the exit code is not 0.

    CI has such machines. What is skipped says why.
    """
    env = helpers.clean_environment(**record_kit.without_sandbox(tmp_path))
    words = ["-q", "-rs", "-p", "no:cacheprovider", "-m", "sandbox", "tests"]
    done = helpers.python("-m", "pytest", *words, env=env, timeout=300)
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    ended = re.fullmatch(r"(\d+) skipped, \d+ deselected.*", said.splitlines()[-1])
    assert ended and int(ended[1]) > 20, said
    reasons = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert len(reasons) == 1 and ": no sandbox can be made here (" in reasons[0], said
    assert f"{tmp_path / 'bwrap'}: bwrap: no permissions" in reasons[0]
