"""The sources: limits that keep them readable, imports, pins, and that the README says what is true."""
import ast
import re
import subprocess
import sys

import pytest

import helpers
import readme
import train_gpt

README = readme.README.read_text(encoding="utf-8")
SOURCE = helpers.SCRIPT.read_text(encoding="utf-8")
EXIT_CODES = {0, 2, 3, 4, 16, 17}       # DESIGN.md
TRAINER_IMPORTS = {"numpy", "safetensors", "sentencepiece", "torch", "tqdm"}
SECTIONS = ["errors", "settings", "parameters", "schedules", "shards", "batch order", "tokens and bytes",
            "score", "artifact", "run directory", "checkpoints", "machine", "model", "optimizer", "training",
            "main"]


def tracked(pattern: str) -> list[str]:
    """Files of the repository; where there is no git, all but those of the virtual environment."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", pattern], cwd=helpers.ROOT,
                          text=True, capture_output=True)
    here = [path.relative_to(helpers.ROOT) for path in helpers.ROOT.rglob(pattern)]
    return done.stdout.split() or sorted(str(path) for path in here if ".venv" not in path.parts)


PYTHON = tracked("*.py")


# --- limits -----------------------------------------------------------------------------------------------

def test_the_trainer_has_1500_lines_at_most():
    assert len(SOURCE.splitlines()) <= 1500


@pytest.mark.parametrize("name", PYTHON)
def test_no_line_is_wider_than_110_columns(name):
    lines = (helpers.ROOT / name).read_text(encoding="utf-8").splitlines()
    assert not [f"{name}:{at}" for at, line in enumerate(lines, 1) if len(line) > 110]


@pytest.mark.parametrize("name", PYTHON)
def test_no_function_is_longer_than_80_lines_and_no_error_is_swallowed(name):
    tree = ast.parse((helpers.ROOT / name).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 80, node.name
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None and not isinstance(node.body[0], ast.Pass), f"{name}:{node.lineno}"


def test_the_banners_are_the_contents_in_the_order_in_which_data_flows():
    banners = re.findall(r"^# --- (.*?) -+$", SOURCE, re.MULTILINE)
    assert [re.split(r":| \(", banner)[0] for banner in banners] == SECTIONS
    assert SOURCE.count("\n# ---") == len(banners)


def test_every_larger_function_of_the_trainer_says_what_it_does():
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 15:
            assert ast.get_docstring(node) or node.name in ("main", "__init__"), node.name


# --- imports ----------------------------------------------------------------------------------------------

def test_the_trainer_is_one_file_that_imports_nothing_of_the_repo():
    found = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module.split(".")[0])
    assert found - sys.stdlib_module_names == TRAINER_IMPORTS


def test_data_tools_and_trainer_know_nothing_of_each_other():
    for name in PYTHON:
        if name.startswith(("data/", "records/")):
            text = (helpers.ROOT / name).read_text(encoding="utf-8")
            assert not re.search(r"^\s*(import|from) train_gpt", text, re.MULTILINE)


IMPORTED = """
import os, signal, sys, threading
import numpy, torch, sentencepiece, safetensors.numpy, tqdm, torch.distributed
def state():
    return [dict(os.environ), os.getcwd(), sorted(os.listdir()), sorted(os.listdir("/proc/self/fd")),
            threading.active_count(), [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)],
            torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(), torch.is_grad_enabled(),
            torch.get_rng_state().tolist(), torch.get_float32_matmul_precision(),
            numpy.random.get_state()[1].tolist(), torch.distributed.is_initialized(), sys.argv[:]]
sys.path.insert(0, sys.argv[1])
before = state()
import train_gpt
after = state()
assert before == after, [pair for pair in zip(before, after) if pair[0] != pair[1]]
print("same")
"""


def test_importing_the_trainer_has_no_side_effect(tmp_path):
    """No file, thread, signal handler, seed or default changes, even with settings that would stop a run."""
    env = helpers.clean_environment(ITERATION="typo", PRESET="none", PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([sys.executable, "-c", IMPORTED, str(helpers.ROOT)], cwd=tmp_path, env=env,
                          text=True, capture_output=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("same\n", "", 0)
    assert list(tmp_path.iterdir()) == []


# --- README -----------------------------------------------------------------------------------------------

def test_the_tables_are_the_generated_ones():
    """After a change of the settings or a campaign: python tests/readme.py"""
    assert readme.with_tables(README) == README
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \|", readme.settings_table(), re.MULTILINE)
    assert len(rows) == len(set(rows)) > 50 and {"PRESET", "ITERATIONS", "CODE_BYTES"} <= set(rows)


def test_ci_runs_the_test_command_of_the_readme_word_for_word(tmp_path):
    block = re.search(r"<!-- test command -->\n```bash\n(.*?)```", README, re.DOTALL)[1]
    assert block.count("\n") == 1 and "-m pytest" in block and block.rstrip().endswith("tests")
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_bytes((helpers.ROOT / ".ci/run").read_bytes())
    stand_in = "echo \"in $PWD\" && printf '%s|' a 'b c' && exit 7"
    (tmp_path / "README.md").write_text(README.replace(block, stand_in + "\n"), encoding="utf-8")
    done = subprocess.run(["bash", tmp_path / ".ci/run"], cwd="/", text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (7, f"+ {stand_in}\nin {tmp_path}\na|b c|")
    (tmp_path / "README.md").write_text("no command here")
    assert subprocess.run(["bash", tmp_path / ".ci/run"], capture_output=True).returncode == 1


def test_the_first_commands_set_everything_up_themselves():
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert re.fullmatch(r"python3 -m venv \.venv && .*-r requirements\.txt && .*data/prepare\.py demo && .*"
                        r"MAX_WALLCLOCK_SECONDS=60 .*train_gpt\.py\n", blocks[0])
    assert re.fullmatch(r"python3 -m venv \.venv && .*-r tests/requirements\.txt && .*pytest.* tests\n",
                        blocks[1])


def test_exit_codes_are_told_alike_everywhere():
    told = re.search(r"## Exit codes\n(.*?)\n##", README, re.DOTALL)[1]
    assert {int(code) for code in re.findall(r"(?:^|· )\s*(\d+) ", told, re.MULTILINE)} == EXIT_CODES
    told = re.search(r"[Ee]xit code.*?(\d.*?)(\n\n|$)", train_gpt.__doc__, re.DOTALL)[1]
    assert {int(code) for code in re.findall(r"\b(\d+) ", told)} == EXIT_CODES
    errors = (train_gpt.SettingError, train_gpt.DataError, train_gpt.NumericalError)
    assert [error.exit_code for error in errors] == [2, 3, 17]


def test_files_and_settings_that_the_readme_names_exist():
    for name in set(re.findall(r"\b(?:data|tests|records)/[\w./-]+\.(?:py|md|txt)", README)):
        assert (helpers.ROOT / name).exists(), name
    known = set(re.findall(r"^\| `([A-Z0-9_]+)` \|", readme.settings_table(), re.MULTILINE))
    assert set(re.findall(r"\b([A-Z][A-Z_]{4,})=", README)) <= known


def test_every_requirement_is_pinned_exactly():
    for name in ("requirements.txt", "tests/requirements.txt"):
        lines = [line.split("#")[0].strip() for line in (helpers.ROOT / name).read_text().splitlines()]
        pins = [line for line in lines if line]
        assert pins and all(re.fullmatch(r"[A-Za-z0-9_.-]+==\d+(\.\d+)*", pin) for pin in pins), pins
