"""`python -m data.publish`, which older pages have: `python -m data publish`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "publish")
    runpy.run_module("data", run_name="__main__", alter_sys=True)
