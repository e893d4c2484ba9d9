"""The command: see records/board/tables.py."""

import sys

from records.board.tables import main

if __name__ == "__main__":
    sys.exit(main())
