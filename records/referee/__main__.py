"""`python -m records.referee`, which pages of frozen records have: `python -m records`."""

import sys

from records.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
