"""What all commands share: errors in one line, signals, and the commands that they print."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import command, door
from tests.kit.data_kit import call, refused
from tests.kit.helpers import ROOT


@pytest.mark.parametrize(
    "words",
    [
        "data download --train-shards -1",
        "data download --workers 0",
        "data download --repo-id a/b/c",
        "data download --variannt x",
        "data prepare demo --name x",
        "data prepare text x --name x --val-fraction 1",
        "data prepare text x --name x --val-fraction nan",
        "data verify",
        "records follow logs --to nothing",
        "records verify x --retrain -1",
        "records nothing",
        "records board --html",
        "records compare --base a b --new c --html",
        "records track fill",
    ],
)
def test_bad_arguments_are_one_line(words):
    said = call(*words.split(), code=2)
    assert said.count("\n") == 1
    assert re.search(rf"; python -m {words.split()[0]} .*--help explains the arguments$", refused(said))


@pytest.mark.parametrize("folder", [ROOT, ROOT / "data"])
def test_training_command(monkeypatch, folder):
    monkeypatch.chdir(folder)
    tokenizer = ROOT / "data/tokenizers/a b.model"
    line = command.training_command(ROOT / "data/datasets/x", tokenizer, 300)
    python = command.shell(Path(sys.executable))  # which need not be called python, or be on PATH
    if folder == ROOT:
        places = f"DATA_PATH=data/datasets/x TOKENIZER_PATH='data/tokenizers/a b.model' {python} train_gpt.py"
    else:
        places = f"DATA_PATH=datasets/x TOKENIZER_PATH='tokenizers/a b.model' {python} {ROOT}/train_gpt.py"
    assert line == f"VOCAB_SIZE=300 {places}"


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1))
@example(["rm", "-r", "/home/me/My Projects/a'b", "a\nb", "$HOME", ""])
@settings(max_examples=30, deadline=None)
def test_a_shell_gets_the_words_of_a_command_and_they_stay_on_its_line(words):
    line = command.shell(*words)
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command.printable(line)}"], capture_output=True)
    assert done.stdout == "".join(word + "\0" for word in words).encode()


COMMAND = re.compile(r"(\brm|-m (data|records) |\bpip install|\bDATA_PATH=)[^;:,]*(?<!hub:)$")


def bare_words(tree: ast.Module) -> list[int]:
    """Lines on which an f-string has a value within a command, and not by command.shell."""
    found = []
    for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
        said = ""
        for part in text.values:
            if isinstance(part, ast.Constant):
                said += part.value
            elif COMMAND.search(said) and "shell(" not in ast.unparse(part):
                found.append(part.lineno)
    return found


def test_every_command_that_a_message_prints_is_quoted():
    names = [*(ROOT / "data").rglob("*.py"), *(ROOT / "records").rglob("*.py")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in names if "track_" not in str(path)}
    assert not {path: lines for path, tree in trees.items() if (lines := bare_words(tree))}


def test_a_signal_waits_for_the_end_of_an_import(tmp_path):
    """Python swallows an exception that is raised in a callback of its import system."""
    (tmp_path / "signalled.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.1)\nprint('imported')\n"
    )
    program = (
        "import importlib, sys, time\nfrom data import door\n"
        "sys.exit(door.run(lambda: [importlib.import_module('signalled'), time.sleep(60)]))"
    )
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (door.INTERRUPTED, "imported\n")


def test_what_takes_long_says_how_far_it_is(monkeypatch, capsys):
    """A line every 30 seconds where stderr is no terminal, and a bar where it is one."""
    clock = iter([0, *range(10, 110, 10)])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    assert [*command.advancing(range(10), "a text")] == [*range(10)]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert [line[: line.index("|")] for line in lines] == ["a text:  20%", "a text:  50%", "a text:  80%"]
    monkeypatch.undo()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert [*command.advancing(range(3), "a text")] == [0, 1, 2]
    assert "a text: " in capsys.readouterr().err
