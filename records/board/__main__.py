"""`python -m records.board`, which pages of frozen records have: `python -m records board`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "board")
    runpy.run_module("records", run_name="__main__", alter_sys=True)
