"""Calls of data.download for tests, in processes forked from this one, because most of a call is imports.

A line on stdin is a JSON list of calls, each a list of arguments. Its answer is a line on stdout, a list of
[exit code, output, errors].
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

from data import download

AT_A_TIME = 8


def run(argv: list[str]) -> tuple[int, str, str]:
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = download.main(argv)
    return code, out.getvalue(), err.getvalue()


def run_all(calls: list[list[str]], folder: Path) -> list:
    """The results in order. This process has one thread: of others a fork might copy a lock that is held."""
    for i, argv in enumerate(calls):
        if i >= AT_A_TIME:
            os.wait()
        if not os.fork():
            (folder / str(i)).write_text(json.dumps(run(argv)))
            os._exit(0)
    for _ in calls[:AT_A_TIME]:
        os.wait()
    return [json.loads((folder / str(i)).read_text()) for i in range(len(calls))]


if __name__ == "__main__":
    download.PATIENCE = 90  # its end would be the end of a fork, and a loaded machine is slow
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(run_all(json.loads(line), Path(name))), flush=True)
