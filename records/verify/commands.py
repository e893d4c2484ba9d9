"""The commands that make a record of runs, check it, and judge it: freeze, verify and judge."""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import click

from data.command import REPO, DataError, printable, say, shell
from data.door import Command, text
from records.archive.checks import Check, VerifierError
from records.archive.folders import SCRIPT, is_address, record_folders
from records.archive.record import Record
from records.archive.runs import is_run
from records.archive.tracks import DATA, RECORDS
from records.archive.verdicts import PASSED, still_holds, write_finding, write_verdict
from records.referee.scoring import LEAST_PROOF
from records.verify import freezing
from records.verify.claims import VerifyOptions, our_errors
from records.verify.claims import verify as verify_folder
from records.verify.freezing import FreezeOptions
from records.verify.judging import Judge, JudgeOptions
from records.verify.version import referee_version, who

of_data = click.option("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
of_second = click.option("--second", type=Path, help="second text: a JSON string a line, one for a document")
by_whom = click.option("--by", type=text, metavar="NAME", help="with --write  [default: git's user.name]")

# --- freeze -----------------------------------------------------------------------------------------------


def record_name(word: str) -> str:
    """The type of --name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,59}", word):
        raise ValueError(f"{word!r} given, expected letters, digits and -, at most 60")
    return word


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, type=Path, metavar="RUN...")
@click.option("--track", required=True, help="folder of records/ that holds track.json")
@click.option("--name", required=True, type=record_name, metavar="NAME", help="such as LongerContext")
@click.option("--author", type=text, required=True, metavar="WHO")
@click.option("--what", type=text, required=True, metavar="TEXT", help="what changed, in a sentence or two")
@click.option("--why", type=text, required=True, metavar="TEXT", help="why it helps")
@click.option("--claim", type=click.Choice(["record", "none"]), default="record")
@click.option("--date", "day", default=lambda: date.today().isoformat(), show_default="today")
@click.option("--script", type=Path, default=REPO / SCRIPT, help="as it ran")
@click.option("--artifacts", type=text, metavar="hub:USER/NAME", help="repo of the hub that gets all of them")
@click.option("--plain", is_flag=True, help="leave metrics as they are, not packed by gzip")
@click.option("--records", type=Path, default=RECORDS, help="folder of the tracks")
@of_data
@click.option("--trust", is_flag=True, help="score the record without a sandbox where there is none")
def freeze(**options: Any) -> int:
    """Make a record's folder from the run directories of its seeds.

        python -m records freeze logs/RUN... --track track_floppy --name NAME --author WHO \\
            --what "what changed" --why "why it helps" [--claim record|none] [--artifacts hub:user/name]

    Script, logs and artifacts are copied byte for byte, metrics are packed by gzip, and the referee scores
    every artifact. A folder that `verify` would fail on its papers is not made.

    With --artifacts all of them are put on the Hugging Face hub. Then the folder keeps that of one seed, if
    it is small, and submission.json names where the others lie.
    """
    target = freezing.freeze(FreezeOptions(**options))
    print(
        f"{target}: fill in the README's ablation, then {shell('python', '-m', 'records', 'verify', target)}"
    )
    return 0


# --- verify -----------------------------------------------------------------------------------------------

Case = tuple[Path, str, Callable[..., Iterator[Check]]]  # a folder, since when it has passed, its checks


def seed_or_any(word: str) -> str:
    """The type of --retrain."""
    if word != "any" and not word.isdecimal():
        raise ValueError(f"{word!r} given, expected a seed, or any")
    return word


def find_folder(place: str, data: Path, track: Path | None) -> tuple[Path, Path | None]:
    """A record's folder; and its track, where it does not lie in that. Raises DataError."""
    if is_address(place):
        from records.archive.hub import fetch_record  # which loads the hub's client

        found = fetch_record(place, data, track)
        say(f"{found.address}, of {found.track.name}:")
        return found.path, found.track
    folder = Path(os.path.abspath(place))
    if not folder.is_dir():
        raise DataError(f"{printable(folder)}: no such folder")
    if is_run(folder) and not (folder.parent / "track.json").exists():
        mend = f"{shell('python', '-m', 'records', 'prove', folder)} scores it and proves the score"
        raise DataError(f"{printable(folder)}: is a run, no record: {mend}")
    return folder, None


def cases(places: list, track: Path | None, lazy: bool, options: VerifyOptions) -> Iterator[Case]:
    """What is to be checked. `lazy`: what has passed and has not changed is not run. Raises DataError."""
    for place in places:
        folder, its_track = find_folder(place, options.data, track)
        since = still_holds(folder, referee_version()) if lazy else ""
        yield folder, since, functools.partial(verify_folder, folder, options, since, its_track)


def checked(
    found: Iterator[Case], ray: str | None, machines: dict[Path, dict[str, str]]
) -> Iterator[tuple[Path, str, Iterable[Check]]]:
    """Each folder, since when it has passed, and the lines of its checks, here or from a cluster."""
    if ray is None:
        for folder, since, checks in found:
            yield folder, since, checks()
        return
    from records.verify import cluster  # which loads Ray

    found = [*found]
    all_checks = [checks for *_, checks in found]
    with contextlib.closing(cluster.verify_there(all_checks, ray, machines)) as lines:
        for (folder, since, _), its in zip(found, lines):
            yield folder, since, its


def print_lines(lines: Iterable[Check], place: Path) -> list[Check]:
    """Print line by line. `place`: where the verifier works."""
    printed = []
    with our_errors(place):
        for line in lines:
            printed.append(line)
            print(line, flush=True)
    return printed


def keep(folder: Path, lines: list[Check], by: str, machine: dict | None) -> None:
    """Write the verdict for the board, unless the one that is kept rests on more."""
    second = Record(folder).track["dataset"]["second"] is not None
    if not write_verdict(folder, lines, by, referee_version(), second, machine):
        print("the verdict that is kept rests on more, and stays")


@click.command(cls=Command)
@click.argument("folders", nargs=-1, metavar="[FOLDER...]")
@click.option("--all", "everything", is_flag=True, help="every record of every track")
@click.option("--again", is_flag=True, help="with --all: those, too, whose kept verdict still holds")
@click.option("--static", is_flag=True, help="only what needs no run")
@click.option("--every-seed", is_flag=True, help="score and prove every artifact, not that of one seed")
@click.option(
    "--retrain", type=seed_or_any, metavar="SEED", help="train a seed again; any: one that is drawn"
)
@click.option(
    "--proof-bytes", type=click.IntRange(0), metavar="N", help="of text; 0: no proof  [default: all]"
)
@click.option("--write", is_flag=True, help="keep the verdicts for the board")
@by_whom
@click.option("--track", type=Path, help="of a record from the hub  [default: the one that its repo names]")
@of_data
@of_second
@click.option("--trust", is_flag=True, help="score the record without a sandbox where there is none")
@click.option("--ray", metavar="ADDRESS", help="run records on a Ray cluster: auto, or its head's HOST:PORT")
def verify(
    folders: tuple[str, ...],
    everything: bool,
    again: bool,
    write: bool,
    by: str | None,
    track: Path | None,
    ray: str | None,
    **asked: Any,
) -> int:
    """Is a record what it says? One line a check: PASS | FAIL | SKIP name: what was found, what was expected.

        python -m records verify records/<track>/<name>...  all checks, the sandbox ones included
        python -m records verify --all [--again]            every record; those that passed and have not
                                                            changed since are not run --again
        python -m records verify --all --static             papers alone: nothing of a record runs
        python -m records verify FOLDER --retrain any       train a seed again in a sealed room, too
        python -m records verify hub:user/name[@commit]     a record of the Hugging Face hub
        python -m records verify --all --ray auto           what runs a record runs on a Ray cluster's nodes

    Exit code 1 if a check fails, 2 and 3 if the verification itself cannot be done: then there is no verdict.
    """
    options = VerifyOptions(**asked)
    if wrong := contradiction(folders, everything, write, ray, options):
        click.get_current_context().fail(wrong)
    more = options.every_seed or options.second or options.retrain is not None
    lazy = everything and not (again or options.static or more)
    found = cases(record_folders(RECORDS) if everything else folders, track, lazy, options)
    count = 0
    failed = 0
    left = 0
    machines: dict[Path, dict[str, str]] = {}  # of a cluster, on which folders were run
    with contextlib.closing(checked(found, ray, machines)) as all_lines:
        for folder, since, its in all_lines:
            print(f"{printable(folder)}:")
            lines = print_lines(its, folder)
            wrong = sum(line.verdict == "FAIL" for line in lines)
            count += 1
            failed += wrong
            left += bool(since) and not wrong
            if write and (wrong or not since):
                keep(folder, lines, by or who(), machines.get(folder))
    if left:
        print(f"{left} records were left, as nothing has changed since they passed; --again judges all")
    print(f"{count} records, {failed} checks failed")
    return 1 if failed else 0


def contradiction(
    folders: tuple[str, ...], everything: bool, write: bool, ray: str | None, options: VerifyOptions
) -> str:
    """What of the arguments does not go together, and what to do; '' where all do."""
    if options.proof_bytes and options.proof_bytes < LEAST_PROOF:
        return f"--proof-bytes {options.proof_bytes}: expected 0, or {LEAST_PROOF} at least"
    if write and options.proof_bytes is not None:
        return "--write keeps verdicts, and --proof-bytes gives none: leave one of them out"
    if write and options.trust:
        return "--write keeps verdicts, and a record without a sandbox earns none: leave out --trust"
    if options.trust and options.retrain is not None:
        return "--retrain needs the sealed room, which --trust does without: leave one of them out"
    if write and any(map(is_address, folders)):
        return "--write keeps the verdicts on records of this repository: leave it out with hub:"
    if ray is not None and options.static:
        return "--ray runs records on nodes, and --static runs none: leave one of them out"
    if bool(folders) == everything:
        return "name folders, or --all"
    return ""


# --- judge ------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("record", type=Path)
@of_data
@of_second
@click.option("--work", type=Path, default=REPO / "logs/judge", help="keeps judgings, so that they can go on")
@click.option("--again", is_flag=True, help="judge once more what was judged already, with other seeds")
@click.option("--write", is_flag=True, help="record the seeds before they are trained, and the verdict")
@by_whom
def judge(record: Path, by: str | None, **asked: Any) -> int:
    """Judge a record: fresh seeds are drawn and trained in sealed rooms, and what comes out is scored.

        python -m records judge records/<track>/<folder> --write    the judging is counted, its verdict kept
        python -m records judge records/<track>/<folder>            a trial, of which no verdict can be kept

    The verdict is `ranked` where their scores are a record by the track's rule, `holds` for a record that
    claims nothing, `fails` with the checks that failed, or `not judged` with the reasons. A judging that was
    stopped goes on when the same command is given again. --again begins another one of the same folder.

    Exit code 0 if the verdict is `ranked` or `holds`, 1 for any other. 2 and 3 say that the judging itself
    cannot be done: then there is no verdict.
    """
    options = JudgeOptions(by=by or who(), **asked)
    record = Path(os.path.abspath(record))
    if not record.is_dir():
        raise VerifierError(f"{record}: no such folder")
    judged = Judge(record, options)
    print_lines(judged.lines(), options.work)
    print(f"verdict: {printable(judged.finding.words)}")
    if not options.write:
        print("this verdict is not kept, since --write was not given")
    elif not write_finding(record, judged.finding, options.by, referee_version()):
        print("the verdict that is kept rests on more, and stays")
    return 0 if judged.finding.verdict in PASSED else 1
