"""Judge a record: fresh seeds are drawn and trained in sealed rooms, and what comes out of them is scored.

    python -m records.judge records/<track>/<folder> --write    the judging is counted, its verdict kept
    python -m records.judge records/<track>/<folder>            a trial, of which no verdict can be kept

The verdict is `ranked` where their scores are a record by the track's rule, `holds` for a record that
claims nothing, `fails` with the checks that failed, or `not judged` with the reasons. A judging that was
stopped goes on when the same command is given again. --again begins another one of the same folder.

Exit code 0 if the verdict is `ranked` or `holds`, 1 for any other. 2 and 3 say that the judging itself cannot
be done: then there is no verdict.
"""

import argparse
import os
import sys
from pathlib import Path

from data import command
from data.command import REPO, Parser, printable, utf8
from records.archive.checks import VerifierError
from records.archive.tracks import DATA
from records.archive.verdicts import PASSED, write_finding
from records.verify.claims import our_errors
from records.verify.judging import Judge
from records.verify.version import referee_version, who

WORK = REPO / "logs/judge"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.judge", description=__doc__)
    add = parser.add_argument
    add("record", type=Path, metavar="RECORD", help="a record's folder in its track's")
    add("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
    add("--second", type=Path, help="second text: a JSON string a line, one for a document")
    work = "folder in which judgings are kept, so that they can go on (default: logs/judge)"
    add("--work", type=Path, default=WORK, help=work)
    add("--again", action="store_true", help="judge once more what was judged already, with other seeds")
    add("--read-by", type=utf8, metavar="NAME", help="who has read the script, where its code grew much")
    add("--write", action="store_true", help="record the seeds before they are trained, and the verdict")
    add("--by", type=utf8, default=who(), help="with --write: who judges (default: git's user.name)")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    args.record = Path(os.path.abspath(args.record))
    if not args.record.is_dir():
        raise VerifierError(f"{args.record}: no such folder")
    judge = Judge(args.record, args)
    with our_errors(args.work):
        for line in judge.lines():
            print(line, flush=True)
    print(f"verdict: {printable(judge.finding.words)}")
    if not args.write:
        print("this verdict is not kept, since --write was not given")
    elif not write_finding(args.record, judge.finding, args.by, referee_version()):
        print("the verdict that is kept rests on more, and stays")
    return 0 if judge.finding.verdict in PASSED else 1


def main(argv: list[str] | None = None) -> int:
    return command.main(parse_args, work, "judge again", argv)


if __name__ == "__main__":
    sys.exit(main())
