"""Put a record on the Hugging Face hub: folder, tokenizer, and a card with its score and verdict.

    python -m records.publish records/<track>/<folder> --to user/name

The token is HF_TOKEN, or that of `hf auth login`. A record that did not pass is published as such. When the
same command is given again, only what has changed is sent, and an upload that was cut off goes on. A repo
that holds anything else is left as it is.
"""

import argparse
import os
import sys
from pathlib import Path

from data import command
from data.command import DataError, Parser, say
from data.hub import client
from records.archive.tracks import DATA
from records.archive.verdicts import PASSED
from records.board.publishing import publish_record


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.publish", description=__doc__)
    add = parser.add_argument
    add("record", type=Path, metavar="RECORD", help="a record's folder in its track's")
    add("--to", type=client.own_repo, required=True, metavar="USER/NAME", help="the model repo that gets it")
    add("--license", default="mit", help="of the script and its artifacts, as the hub names it (%(default)s)")
    add("--data", type=Path, default=DATA, help="folder with tokenizers/")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    folder = Path(os.path.abspath(args.record))
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    found = publish_record(folder, args.to, args.license, args.data)
    if found.state not in PASSED:
        say(f"the record did not pass, and its card says so: {found.state}")
    if not found.changed:
        say(f"nothing to publish: {found.address} holds all {found.files} files")
    else:
        say(f"{found.address}: {len(found.changed)} of {found.files} files were sent")
    return 0


def main(argv: list[str] | None = None) -> int:
    return command.main(parse_args, work, "publish again", argv)


if __name__ == "__main__":
    sys.exit(main())
