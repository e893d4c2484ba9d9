"""Is a record what it says? One line a check: PASS | FAIL | SKIP name: what was found, what was expected.

    python -m records.verify records/<track>/<folder>...     all checks, the sandbox ones included
    python -m records.verify --all [--static]                every record; --static: nothing of it runs
    python -m records.verify FOLDER --retrain any            train a seed again in a sealed room, too

Exit code 1 if a check fails, 2 and 3 if the verification itself cannot be done.
"""

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # its file may be called from any folder

from data.command import DataError, Parser, open_streams, printable, run, whole
from records.checks import Check, check, skip
from records.files import utf8
from records.folders import artifact_paths, record_folders
from records.jobs import Job, find_job
from records.papers import Record, check_papers
from records.referee import referee
from records.retrain import retrain
from records.sandbox import NoSandbox
from records.scoring import LEAST_PROOF, Result
from records.submission import this_machine
from records.text import DATA, validation_text
from records.tracks import RECORDS
from records.verdicts import write_verdict

LOOSE, DECIMALS = 1e-4, 5.1e-9  # of a score: on another machine, and on one of the same kind


def compare_score(record: Record, seed: int, result: Result) -> Check:
    """The referee's score against the submission's: to eight decimals where both computed alike."""
    told = record.scores[seed]
    same = this_machine() == record.field("scored_on")
    bound, kind = (DECIMALS, "the same kind") if same else (LOOSE, "another kind")
    off = result.bpb - told
    return check(
        "score",
        abs(off) <= bound,
        f"seed {seed}: {result.bpb:.8f} bits per byte, {off:+.1e} from the submission's {told:.8f}, expected "
        f"within {bound:g} on {kind} of machine",
    )


def check_by_referee(record: Record, options: argparse.Namespace) -> Iterator[Check]:
    """Score again and prove; then train again. Raises NoSandbox, DataError."""
    text = validation_text(record.track, options.data, record.path)

    def job_of(artifact: Path) -> Job:
        return find_job(
            record.path, artifact=artifact, data=options.data, trust=options.trust, second=options.second
        )

    paths = artifact_paths(record.path)
    seeds = sorted(paths) if options.every_seed else [secrets.choice(sorted(paths))]
    drawn = np.random.default_rng()
    proof = True if options.proof_bytes is None else options.proof_bytes
    for seed in seeds:
        for line in referee(job_of(paths[seed]), text, proof, drawn):
            yield compare_score(record, seed, line) if isinstance(line, Result) else line
    if options.retrain is None:
        yield skip("retrained", "--retrain SEED trains again, which a first place needs")
    else:
        drawn_seed = secrets.choice(sorted(record.runs))  # by nobody who sent the record
        seed = drawn_seed if options.retrain == "any" else int(options.retrain)
        yield from retrain(record, seed, options.data, job_of, text)


def verify(path: Path, options: argparse.Namespace) -> Iterator[Check]:
    """All checks of one folder. Raises NoSandbox."""
    record = Record(path)
    failed = False
    for line in check_papers(record):
        failed |= line.verdict == "FAIL"
        yield line
    if options.static:
        return
    if failed:
        yield skip("score", "nothing of a record that fails already is run")
    elif record.track["device"] == "cuda" and not Path("/dev/nvidiactl").exists():
        yield skip("score", "the track's machine has a CUDA GPU, this one has none")
    elif not record.artifacts:
        yield skip("score", "no artifact is here")
    else:
        try:
            yield from check_by_referee(record, options)
        except DataError as error:  # the text is not here, or the record's own tokenizer cannot cut it
            yield skip("score", str(error))


def seed_or_any(text: str) -> str:
    """The type of --retrain."""
    return text if text == "any" else str(whole(0)(text))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.verify", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER")
    add("--all", action="store_true", help="every record of every track")
    add("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
    add("--second", type=Path, help="second text: a JSON string a line, one for a document")
    add("--static", action="store_true", help="only what needs no run")
    add("--every-seed", action="store_true", help="score and prove every artifact (default: of one seed)")
    add("--trust", action="store_true", help="score the record without a sandbox where there is none")
    add("--proof-bytes", type=whole(0), metavar="N", help="prove a part only; 0: no proof (default: all)")
    what = "train a seed again, which takes as long as it does; any: one that is drawn"
    add("--retrain", type=seed_or_any, metavar="SEED", help=what)
    add("--by", type=utf8, help="with --write: who trained again (default: git's user.name)")
    add("--write", action="store_true", help="keep the verdicts for records.board")
    args = parser.parse_args(argv)
    if args.proof_bytes and args.proof_bytes < LEAST_PROOF:
        parser.error(f"--proof-bytes {args.proof_bytes}: expected 0, or {LEAST_PROOF} at least")
    if bool(args.folders) == args.all:
        parser.error("name folders, or --all")
    return args


def who() -> str:
    """The one who verifies, by git."""
    done = subprocess.run(["git", "config", "user.name"], cwd=RECORDS, capture_output=True, text=True)
    return printable(done.stdout.strip()) or "unknown"


def work(args: argparse.Namespace) -> int:
    folders = record_folders(RECORDS) if args.all else [Path(os.path.abspath(f)) for f in args.folders]
    failed = 0
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{printable(folder)}: no such folder")
        print(f"{printable(folder)}:")
        lines = []
        try:
            for line in verify(folder, args):
                lines.append(line)
                print(line, flush=True)
        except NoSandbox as error:
            raise DataError(str(error)) from None
        failed += sum(line.verdict == "FAIL" for line in lines)
        if args.write:
            write_verdict(folder, lines, args.by or who())
    print(f"{len(folders)} records, {failed} checks failed")
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    open_streams()
    args = parse_args(argv)
    return run(lambda: work(args), "verify again")


if __name__ == "__main__":
    sys.exit(main())
