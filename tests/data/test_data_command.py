"""What data's three commands share: numbers as arguments, errors in one line, the command that trains."""

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import command, download, prepare, shards
from tests.kit.data_kit import call, refused
from tests.kit.helpers import ROOT


@pytest.mark.parametrize("text", ["", "1_0", "٣", " 5", "+5", "-1", "1e3", "1.0", "x", "9" * 30])
def test_whole_numbers_are_plain_digits(text):
    assert command.whole(0)("0") == 0
    with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number of 0 or more"):
        command.whole(0)(text)


@pytest.mark.parametrize("text", ["", "0", "1", "1.5", "0.0_1", "٠.٥", "nan", "-0.5", ".5x"])
def test_fractions_lie_between_0_and_1(text):
    assert [command.fraction(right) for right in ("0.5", ".5", "5e-1")] == [0.5] * 3
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number between 0 and 1"):
        command.fraction(text)


@pytest.mark.parametrize(
    "main, args",
    [
        (download.main, ["--train-shards", "-1"]),
        (download.main, ["--workers", "0"]),
        (download.main, ["--repo-id", "a/b/c"]),
        (download.main, ["--variannt", "x"]),
        (prepare.main, ["demo", "--name", "x"]),
        (shards.main, ["verify"]),
    ],
)
def test_bad_arguments_are_one_line(main, args):
    said = call(main, *args, code=2)
    assert said.count("\n") == 1
    assert "--help explains the arguments" in refused(said)


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


COMMAND = re.compile(r"(\brm|-m (data|records)\.|\bpip install|\bDATA_PATH=)[^;:,]*(?<!hub:)$")


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
        "import importlib, sys, time\nfrom data import command\n"
        "sys.exit(command.run(lambda: [importlib.import_module('signalled'), time.sleep(60)], 'again'))"
    )
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (command.INTERRUPTED, "imported\n")
