"""`python -m records.board`, which pages of frozen records have: `python -m records board`."""

import sys

from records.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["board", *sys.argv[1:]]))
