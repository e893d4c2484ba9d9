"""`python -m records.referee`, which pages of frozen records have: `python -m records`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("records", run_name="__main__", alter_sys=True)
