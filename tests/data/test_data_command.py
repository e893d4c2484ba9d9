"""What all commands share: errors in one line, signals, the commands that they print, odd machines."""

import errno
import fcntl
import io
import os
import re
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from data import command, files, shards
from data.__main__ import COMMANDS, main
from records.__main__ import COMMANDS as OF_RECORDS
from tests.kit.data_kit import call, prepare, refused, write_jsonl
from tests.kit.helpers import documents, python

# --- arguments, help, words for a shell ------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "data download --train-shards -1",
        "data download --repo-id a/b/c",
        "data download --variannt x",
        "data prepare text x --name x --val-fraction nan",
        "data verify",
        "records follow logs --to nothing",
        "records verify x --retrain -1",
        "records nothing",
        "records board --html",
        "records track new",
    ],
)
def test_bad_arguments_are_one_line(words):
    said = call(*words.split(), code=2)
    assert said.count("\n") == 1
    assert re.search(rf"; python -m {words.split()[0]} .*--help explains the arguments$", refused(said))


def test_a_misspelt_command_gets_the_nearest_one():
    assert "no command 'verfy'; the nearest is verify; " in refused(call("records", "verfy", code=2))


HELPED = """
import importlib
import sys

for line in sys.argv[1:]:
    package, *words = line.split()
    if importlib.import_module(f"{package}.__main__").main([*words, "--help"]):
        sys.exit(line)
"""


def test_every_command_has_its_help_without_docstrings():
    lines = [f"data {name}" for name in ("", *COMMANDS)] + [f"records {name}" for name in ("", *OF_RECORDS)]
    done = python("-OO", "-W", "ignore", "-c", HELPED, *lines)
    assert (done.returncode, done.stderr, done.stdout.count("Usage: ")) == (0, "", 22)


@pytest.mark.slow
@pytest.mark.parametrize(
    "old",
    ["data.shards", "data.prepare", "data.download", "data.publish", "records.referee", "records.board"],
)
def test_pages_that_cannot_change_name_commands_that_work(old):
    """Frozen records are such pages, and whatever was copied from a README."""
    done = python("-m", old, "--help")
    assert done.returncode == 0 and "Usage: " in done.stdout


def test_a_path_that_is_not_there_gets_the_nearest_name_that_is(tmp_path):
    prepared(tmp_path)
    text, dataset = tmp_path / "texts.jsonl", tmp_path / "r/data/datasets/t_sp260"
    wrong = dataset.with_name("t_sp26")
    for code, there, words in (
        (3, dataset, ["verify", wrong]),
        (3, dataset.parent, ["inspect", tmp_path / "r/data/dataset/t_sp260"]),
        (3, dataset, ["publish", wrong, "--to", "me/x"]),
        (2, text, ["prepare", "text", tmp_path / "text.jsonl", "--name", "x"]),
    ):
        assert f"; the nearest name there is {there}\n" in call("data", *words, code=code)
    with pytest.raises(command.DataError, match=f"; the nearest name there is {dataset}$"):
        shards.read_split(wrong, "val")


# --- output -------------------------------------------------------------------------------------


def test_what_takes_long_says_how_far_it_is(monkeypatch, capsys):
    """A line every 30 seconds where stderr is no terminal, and a bar where it is one."""
    clock = iter([0, *range(10, 110, 10)])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    assert [*command.advancing(range(10), "a text")] == [*range(10)]
    lines = capsys.readouterr().err.splitlines()
    assert [line[: line.index("|")] for line in lines] == ["a text:  20%", "a text:  50%", "a text:  80%"]
    monkeypatch.undo()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert [*command.advancing(range(3), "a text")] == [0, 1, 2]
    assert "a text: " in capsys.readouterr().err


# --- machines that lack something: locks, a disk's sync, one file system, a terminal ---------------------


def prepared(root: Path) -> str:
    return prepare(root / "r", write_jsonl(root / "texts.jsonl", documents(60, 1)), "--val-docs", 5)


@pytest.mark.parametrize(
    "module, name, codes", [(fcntl, "flock", files.NO_LOCK), (os, "fsync", files.NO_SYNC)]
)
def test_what_a_file_system_cannot_do_is_a_warning(tmp_path, monkeypatch, module, name, codes):
    """Once for each place, which it names. Any other error ends the command."""
    for code in codes:
        monkeypatch.setattr(module, name, mock.Mock(side_effect=OSError(code, os.strerror(code))))
        root = tmp_path / str(code)
        root.mkdir()
        said = prepared(root)
        warned = [line for line in said.splitlines() if line.startswith(f"warning: {root}/r/data")]
        assert warned and len(set(warned)) == len(warned)
        with files.locked(root):
            assert (root / "r/data/datasets/t_sp260/manifest.json").exists()
    monkeypatch.setattr(module, name, lambda *_: os.stat(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError), files.locked(tmp_path), open(tmp_path / "x", "w") as file:
        files.sync(file)


def test_nothing_moves_to_another_file_system(tmp_path, monkeypatch):
    """Each folder of data/ may be a link to one of its own, and the tokenizer is found from the dataset."""

    def device(path: object) -> str:
        return Path(path).resolve().relative_to(tmp_path).parts[0]

    def move(old, new, real=os.replace):
        if device(old) != device(Path(new).parent):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(old, new)

    monkeypatch.setattr(os, "rename", move)
    monkeypatch.setattr(os, "replace", move)
    (tmp_path / "r/data").mkdir(parents=True)
    for name in ("datasets", "tokenizers"):
        (tmp_path / f"own_{name}").mkdir()
        (tmp_path / "r/data" / name).symlink_to(tmp_path / f"own_{name}")
    prepared(tmp_path)
    call("data", "verify", tmp_path / "r/data/datasets/t_sp260")


def test_a_command_runs_in_a_thread_with_streams_that_are_no_terminals(tmp_path, monkeypatch):
    prepared(tmp_path)
    dataset = tmp_path / "r/data/datasets/t_sp260"
    codes = []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    for words in (["verify", str(dataset)], ["prepare", "demo", "--root", "/dev/null"]):
        thread = threading.Thread(target=lambda words=words: codes.append(main(words)))
        thread.start()
        thread.join()
    assert codes == [0, 3] and "ok   " in sys.stdout.getvalue()
