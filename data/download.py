"""`python -m data.download`, which older pages have: `python -m data download`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "download")
    runpy.run_module("data", run_name="__main__", alter_sys=True)
