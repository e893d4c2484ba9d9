"""Calls of data.download for tests, in processes forked from this one, because most of a call is imports.

A line on stdin is JSON: [environment, [arguments of a call, ...]]. Its answer is a line on stdout, a list of
[exit code, output, errors]. A first fork imports the hub client, which reads the environment then; it forks
for each call. Until then each process has one thread: of others a fork might copy a lock that is held.
"""

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

AT_A_TIME = 8
OF_THE_CLIENT = ["httpx2", "yaml", "fsspec", "data.shards"]  # what takes long to import beside the client


def in_fork(work: Callable[[], None]) -> None:
    if not os.fork():
        work()
        os._exit(0)


def run(argv: list[str], result: Path) -> None:
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = sys.modules["data.download"].main(argv)
    result.write_text(json.dumps([code, out.getvalue(), err.getvalue()]))


def run_all(environment: dict[str, str], calls: list[list[str]], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    importlib.import_module("data.download").PATIENCE = 90  # a loaded machine is slow
    for i, argv in enumerate(calls):
        if i >= AT_A_TIME:
            os.wait()
        in_fork(lambda argv=argv, i=i: run(argv, folder / str(i)))
    for _ in calls[:AT_A_TIME]:
        os.wait()


def answer(line: str) -> str:
    environment, calls = json.loads(line)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_fork(lambda: run_all(environment, calls, folder))
        os.wait()
        return json.dumps([json.loads((folder / str(i)).read_text()) for i in range(len(calls))])


if __name__ == "__main__":
    for name in OF_THE_CLIENT:
        importlib.import_module(name)
    for line in sys.stdin:
        print(answer(line), flush=True)
