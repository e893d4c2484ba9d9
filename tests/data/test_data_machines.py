"""Machines that lack something: locks, a disk's sync, one file system, docstrings, a terminal."""

import errno
import fcntl
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data import files
from data.__main__ import COMMANDS, main
from records.__main__ import COMMANDS as OF_RECORDS
from tests.kit import helpers
from tests.kit.data_kit import call, write_jsonl

OPTIONS = ["--name", "t", "--vocab-size", 260, "--val-docs", 5]


def prepared(root: Path, *more: object) -> str:
    corpus = write_jsonl(root / "texts.jsonl", helpers.documents(60, 1))
    return call("data", "prepare", "text", corpus, *OPTIONS, "--root", root / "r", *more)


@pytest.mark.parametrize(
    "module, name, codes", [(fcntl, "flock", files.NO_LOCK), (os, "fsync", files.NO_SYNC)]
)
def test_what_a_file_system_cannot_do_is_a_warning(tmp_path, monkeypatch, module, name, codes):
    """Once for each place, which it names. Any other error ends the command."""
    for code in codes:

        def fail(*_, code=code):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(module, name, fail)
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

    def device(path: object) -> Path:
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
    program = [sys.executable, "-OO", "-W", "ignore", "-c", HELPED, *lines]
    done = subprocess.run(program, cwd=helpers.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count("Usage: ")) == (0, "", 24)


@pytest.mark.parametrize(
    "old",
    ["data.shards", "data.prepare", "data.download", "data.publish", "records.referee", "records.board"],
)
def test_pages_that_cannot_change_name_commands_that_work(old):
    """Frozen records are such pages, and whatever was copied from a README."""
    done = subprocess.run(
        [sys.executable, "-m", old, "--help"], cwd=helpers.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Usage: " in done.stdout
