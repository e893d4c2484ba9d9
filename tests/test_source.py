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
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in (helpers.SCRIPT, helpers.MLX_SCRIPT)}
EXIT_CODES = {0, 2, 3, 4, 16, 17}       # DESIGN.md
FRAMEWORKS = {"train_gpt.py": "torch", "train_gpt_mlx.py": "mlx"}
TRAINER_IMPORTS = {"numpy", "safetensors", "sentencepiece", "tqdm"}
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

@pytest.mark.parametrize("trainer", SOURCES)
def test_a_trainer_has_1500_lines_at_most(trainer):
    assert len(SOURCES[trainer].splitlines()) <= 1500


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


@pytest.mark.parametrize("trainer", SOURCES)
def test_the_banners_are_the_contents_in_the_order_in_which_data_flows(trainer):
    banners = re.findall(r"^# --- (.*?) -+$", SOURCES[trainer], re.MULTILINE)
    assert [re.split(r":| \(", banner)[0] for banner in banners] == SECTIONS
    assert SOURCES[trainer].count("\n# ---") == len(banners)


@pytest.mark.parametrize("trainer", SOURCES)
def test_every_larger_function_of_a_trainer_says_what_it_does(trainer):
    for node in ast.walk(ast.parse(SOURCES[trainer])):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 15:
            assert ast.get_docstring(node) or node.name in ("main", "__init__"), node.name


# --- imports ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("trainer", SOURCES)
def test_a_trainer_is_one_file_that_imports_nothing_of_the_repo(trainer):
    found = set()
    for node in ast.walk(ast.parse(SOURCES[trainer])):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module.split(".")[0])
    assert found - sys.stdlib_module_names == TRAINER_IMPORTS | {FRAMEWORKS[trainer]}


def test_data_tools_and_trainer_know_nothing_of_each_other():
    for name in PYTHON:
        if name.startswith(("data/", "records/")):
            text = (helpers.ROOT / name).read_text(encoding="utf-8")
            assert not re.search(r"^\s*(import|from) train_gpt", text, re.MULTILINE)


IMPORTED = """
import os, signal, sys, threading
import numpy, sentencepiece, safetensors.numpy, tqdm
if sys.argv[2] == "torch":
    import torch, torch.distributed
    def own():
        return [torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(),
                torch.is_grad_enabled(), torch.get_rng_state().tolist(),
                torch.get_float32_matmul_precision(), torch.distributed.is_initialized()]
else:
    import mlx.core as mx, mlx.utils
    def own():
        return [mx.default_device(), mx.random.state[0].tolist(), mx.get_memory_limit(),
                mx.get_active_memory(), "torch" in sys.modules]
def state():
    return [dict(os.environ), os.getcwd(), sorted(os.listdir()), sorted(os.listdir("/proc/self/fd")),
            threading.active_count(), [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)],
            numpy.random.get_state()[1].tolist(), sys.argv[:], *own()]
sys.path.insert(0, sys.argv[1])
before = state()
__import__({"torch": "train_gpt", "mlx": "train_gpt_mlx"}[sys.argv[2]])
after = state()
assert before == after, [pair for pair in zip(before, after) if pair[0] != pair[1]]
assert sys.argv[2] == "torch" or "torch" not in sys.modules
print("same")
"""


@pytest.mark.parametrize("framework", FRAMEWORKS.values())
def test_importing_a_trainer_has_no_side_effect(tmp_path, framework):
    """No file, thread, signal handler, seed or default changes, even with settings that would stop a run."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    env = helpers.clean_environment(ITERATION="typo", PRESET="none", PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([sys.executable, "-c", IMPORTED, str(helpers.ROOT), framework], cwd=tmp_path,
                          env=env, text=True, capture_output=True, timeout=120)
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
        pin = r"[A-Za-z0-9_.-]+(\[\w+\])?==\d+(\.\d+)*(; sys_platform == \"\w+\")?"
        assert pins and all(re.fullmatch(pin, line) for line in pins), pins
