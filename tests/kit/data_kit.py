"""What the tests of data/ share: the commands run in this process or in one of their own, and texts."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

from data.__main__ import main as data
from records.__main__ import main as records
from tests.kit import helpers


def call(package: str, *args: object, code: int = 0) -> str:
    """What a command says that runs in this process; its exit code is checked."""
    main = {"data": data, "records": records}[package]
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        found = main([str(arg) for arg in args])
    text = said.buffer.getvalue().decode()
    assert found == code, text
    return text


def start(package: str, *args: object, **options) -> subprocess.Popen:
    """A command as a process of its own; its output is read as text."""
    options = {"cwd": helpers.ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    environment = os.environ | {"PYTHONPATH": str(helpers.ROOT)} | options.pop("env", {})
    command = [sys.executable, "-m", package, *map(str, args)]
    return subprocess.Popen(command, text=True, env=environment, **options)


def refused(said: str) -> str:
    """The error in what a command said: one line, the last one."""
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    line = said.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def prepare(root: Path, source: Path | list[str], *options: object, name: str = "t", code: int = 0) -> str:
    """What `data prepare text` says of a file or of documents; 260 pieces, or as `options` have it."""
    if isinstance(source, list):
        source = write_jsonl(root / f"{name}.jsonl", source)
    given = ("--name", name, "--vocab-size", 260, "--root", root, *options)
    return call("data", "prepare", "text", source, *given, code=code)


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
