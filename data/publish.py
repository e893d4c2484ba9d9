"""`python -m data.publish`, which older pages have: `python -m data publish`."""

import sys

from data.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["publish", *sys.argv[1:]]))
