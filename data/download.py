"""`python -m data.download`, which older pages have: `python -m data download`."""

import sys

from data.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["download", *sys.argv[1:]]))
