"""Is a record what it says? One line a check: PASS | FAIL | SKIP name: what was found, what was expected.

    python -m records.verify records/<track>/<folder>...     all checks, the sandbox ones included
    python -m records.verify --all [--again]                 every record; those that passed and have not
                                                             changed since are not run --again
    python -m records.verify --all --static                  papers alone: nothing of a record runs
    python -m records.verify FOLDER --retrain any            train a seed again in a sealed room, too
    python -m records.verify hub:user/name[@commit]          a record of the Hugging Face hub
    python -m records.verify --all --ray auto                what runs a record runs on a Ray cluster's nodes

Exit code 1 if a check fails, 2 and 3 if the verification itself cannot be done: then there is no verdict.
"""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from data import command
from data.command import DataError, Parser, printable, say, shell, utf8, whole
from records.archive.checks import Check
from records.archive.folders import is_address, record_folders
from records.archive.record import Record
from records.archive.runs import is_run
from records.archive.tracks import DATA, RECORDS
from records.archive.verdicts import still_holds, write_verdict
from records.referee.scoring import LEAST_PROOF
from records.verify.claims import our_errors, verify
from records.verify.version import referee_version, who

Machines = dict[Path, dict[str, str]]  # of a cluster, on which folders were run


def seed_or_any(text: str) -> str:
    """The type of --retrain."""
    return text if text == "any" else str(whole(0)(text))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.verify", description=__doc__)
    add = parser.add_argument
    add("folders", nargs="*", metavar="FOLDER", help="a record's folder, or hub:user/name[@commit]")
    add("--track", type=Path, help="of a record from the hub (default: the one that its repo names)")
    add("--all", action="store_true", help="every record of every track")
    again = "with --all: run those, too, whose kept verdict still holds for folder, track and referee"
    add("--again", action="store_true", help=again)
    add("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
    add("--second", type=Path, help="second text: a JSON string a line, one for a document")
    add("--static", action="store_true", help="only what needs no run")
    add("--every-seed", action="store_true", help="score and prove every artifact (default: of one seed)")
    add("--trust", action="store_true", help="score the record without a sandbox where there is none")
    part = "prove a part only, for looking: it gives no verdict; 0: no proof (default: all)"
    add("--proof-bytes", type=whole(0), metavar="N", help=part)
    what = "train a seed again, which takes as long as it does; any: one that is drawn"
    add("--retrain", type=seed_or_any, metavar="SEED", help=what)
    add("--by", type=utf8, help="with --write: who trained again (default: git's user.name)")
    add("--write", action="store_true", help="keep the verdicts for records.board")
    ray = "a record is run on a node of a Ray cluster: auto, or the HOST:PORT of its head"
    add("--ray", metavar="ADDRESS", help=ray)
    args = parser.parse_args(argv)
    if args.proof_bytes and args.proof_bytes < LEAST_PROOF:
        parser.error(f"--proof-bytes {args.proof_bytes}: expected 0, or {LEAST_PROOF} at least")
    if args.write and args.proof_bytes is not None:
        parser.error("--write keeps verdicts, and --proof-bytes gives none: leave one of them out")
    if args.write and args.trust:
        parser.error("--write keeps verdicts, and a record without a sandbox earns none: leave out --trust")
    if args.trust and args.retrain is not None:
        parser.error("--retrain needs the sealed room, which --trust does without: leave one of them out")
    if args.write and any(map(is_address, args.folders)):
        parser.error("--write keeps the verdicts on records of this repository: leave it out with hub:")
    if args.ray is not None and args.static:
        parser.error("--ray runs records on nodes, and --static runs none: leave one of them out")
    if bool(args.folders) == args.all:
        parser.error("name folders, or --all")
    return args


def passed_before(folder: Path, args: argparse.Namespace) -> str:
    """Since when a folder has passed all that the command asks for; '' where it must be run."""
    more = args.every_seed or args.second or args.retrain is not None
    if not args.all or args.again or args.static or more:
        return ""
    return still_holds(folder, referee_version())


def find_folder(place: str, args: argparse.Namespace) -> tuple[Path, Path | None]:
    """A record's folder; and its track, where it does not lie in that."""
    if not is_address(place):
        return Path(os.path.abspath(place)), None
    from records.archive.hub import fetch_record  # which loads the hub's client

    found = fetch_record(place, args.data, args.track)
    say(f"{found.address}, of {found.track.name}:")
    return found.path, found.track


def cases(args: argparse.Namespace) -> Iterator[tuple[Path, str, Callable[..., Iterator[Check]]]]:
    """Each folder, since when it has passed, and its checks. Raises DataError."""
    for place in record_folders(RECORDS) if args.all else args.folders:
        folder, track = find_folder(place, args)
        if not folder.is_dir():
            raise DataError(f"{printable(folder)}: no such folder")
        if is_run(folder) and not (folder.parent / "track.json").exists():
            mend = (
                f"{shell('python', '-m', 'records.referee', 'prove', folder)} scores it and proves the score"
            )
            raise DataError(f"{printable(folder)}: is a run, no record: {mend}")
        since = passed_before(folder, args)
        yield folder, since, functools.partial(verify, folder, args, since, track)


def checked(args: argparse.Namespace, machines: Machines) -> Iterator[tuple[Path, str, Iterator[Check]]]:
    """Each folder, since when it has passed, and the lines of its checks, here or from a cluster."""
    found = cases(args)
    if args.ray is None:
        for folder, since, checks in found:
            yield folder, since, checks()
        return
    from records.verify import cluster  # which loads Ray

    found = [*found]
    all_checks = [checks for *_, checks in found]
    with contextlib.closing(cluster.verify_there(all_checks, args.ray, machines)) as lines:
        for (folder, since, _), its in zip(found, lines):
            yield folder, since, its


def work(args: argparse.Namespace) -> int:
    count = 0
    failed = 0
    left = 0
    machines: Machines = {}
    with contextlib.closing(checked(args, machines)) as found:
        for folder, since, its in found:
            print(f"{printable(folder)}:")
            lines = []
            with our_errors(folder):
                for line in its:
                    lines.append(line)
                    print(line, flush=True)
            wrong = sum(line.verdict == "FAIL" for line in lines)
            count += 1
            failed += wrong
            left += bool(since) and not wrong
            if args.write and (wrong or not since):
                keep(folder, lines, args, machines.get(folder))
    if left:
        print(f"{left} records were left, as nothing has changed since they passed; --again judges all")
    print(f"{count} records, {failed} checks failed")
    return 1 if failed else 0


def keep(folder: Path, lines: list[Check], args: argparse.Namespace, machine: dict | None) -> None:
    """Write the verdict for records.board, unless the one that is kept rests on more."""
    second = Record(folder).track["dataset"]["second"] is not None
    if not write_verdict(folder, lines, args.by or who(), referee_version(), second, machine):
        print("the verdict that is kept rests on more, and stays")


def main(argv: list[str] | None = None) -> int:
    return command.main(parse_args, work, "verify again", argv)


if __name__ == "__main__":
    sys.exit(main())
