"""Make a record's folder from the run directories of its seeds.

    python -m records.freeze logs/RUN... --track track_floppy --name NAME --author WHO \\
        --what "what changed" --why "why it helps" [--claim record|none] [--artifacts hub:user/name]

Script, logs and artifacts are copied byte for byte, metrics are packed by gzip, and the referee scores every
artifact. A folder that records.verify would fail on its papers is not made.

With --artifacts all of them are put on the Hugging Face hub. Then the folder keeps that of one seed, if it is
small, and submission.json names where the others lie.
"""

import argparse
import datetime
import re
import sys
from pathlib import Path

from data import command
from data.command import REPO, Parser, utf8
from records.archive.folders import SCRIPT
from records.archive.tracks import DATA, RECORDS
from records.verify.freezing import freeze


def record_name(text: str) -> str:
    """The type of --name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,59}", text):
        raise argparse.ArgumentTypeError(f"{text!r} given, expected letters, digits and -, at most 60")
    return text


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.freeze", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run directories, one for each seed")
    add("--track", required=True, help="folder of records/ that holds track.json")
    add("--name", required=True, type=record_name, help="letters, digits and -, as in 'LongerContext'")
    add("--author", type=utf8, required=True)
    add("--what", type=utf8, required=True, help="what changed, in a sentence or two")
    add("--why", type=utf8, required=True, help="why it helps")
    add("--claim", choices=["record", "none"], default="record")
    add("--date", default=datetime.date.today().isoformat(), help="(default: today)")
    add("--script", type=Path, default=REPO / SCRIPT, help="as it ran")
    about = "repo of the hub that gets the artifacts, all but one in place of the folder"
    add("--artifacts", type=utf8, metavar="hub:USER/NAME", help=about)
    add("--plain", action="store_true", help="leave metrics as they are (default: packed by gzip)")
    add("--records", type=Path, default=RECORDS, help="folder of the tracks")
    add("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
    add("--trust", action="store_true", help="score the record without a sandbox where there is none")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    target = freeze(args)
    verify = command.shell("python", "-m", "records.verify", target)
    print(f"{target}: fill in the README's ablation, then {verify}")
    return 0


def main(argv: list[str] | None = None) -> int:
    return command.main(parse_args, work, "freeze again", argv)


if __name__ == "__main__":
    sys.exit(main())
