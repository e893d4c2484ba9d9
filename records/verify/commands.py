"""The commands that make a record of runs, check it, and judge it: freeze, verify and judge."""

import os
import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import click

from data.command import REPO, DataError, printable, say, shell
from data.door import Command, text
from records.archive.checks import Check, VerifierError
from records.archive.record import ArtifactAddress, Record, is_address
from records.archive.runs import SCRIPT, is_run
from records.archive.tracks import DATA, RECORDS, record_folders
from records.archive.verdicts import PASSED, Finding, still_holds, write_finding, write_verdict
from records.sandbox.predictor import NoSandbox
from records.verify import claims, freezing, judging
from records.verify.version import referee_version, who

of_data = click.option("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
of_second = click.option("--second", type=Path, help="second text: a JSON string a line, one for a document")
of_trust = click.option("--trust", is_flag=True, help="score it without a sandbox where there is none")
by_whom = click.option("--by", type=text, metavar="NAME", help="with --write  [default: git's user.name]")
STAYS = "the verdict that is kept rests on more, and stays"


def print_lines(lines: Iterable[Check | Finding], place: Path) -> list[Check | Finding]:
    """Print line by line. Raises VerifierError for what no record caused, at the latest at `place`."""
    printed = []
    try:
        for line in lines:
            printed.append(line)
            print(line, flush=True)
    except NoSandbox as error:
        raise VerifierError(str(error)) from None
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a file that went
        raise VerifierError(f"{error.filename or place}: {error.strerror or error}") from None
    return printed


# --- freeze -----------------------------------------------------------------------------------------------


def record_name(word: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,59}", word):
        raise ValueError(f"{word!r} given, expected letters, digits and -, at most 60")
    return word


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, type=Path, metavar="RUN...")
@click.option("--track", required=True, help="folder of records/ that holds track.json")
@click.option("--name", required=True, type=record_name, metavar="NAME", help="such as LongerContext")
@click.option("--author", type=text, required=True, metavar="WHO")
@click.option(
    "--what",
    "what_changed",
    type=text,
    required=True,
    metavar="TEXT",
    help="what changed, in a sentence or two",
)
@click.option("--why", type=text, required=True, metavar="TEXT", help="why it helps")
@click.option("--built-on", type=text, metavar="RECORD", help="folder of the track whose script it changes")
@click.option("--idea-from", type=text, metavar="TEXT", help="whose idea it is: a name, a paper, an address")
@click.option("--claim", type=click.Choice(["record", "none"]), default="record")
@click.option("--date", "day", default=lambda: date.today().isoformat(), show_default="today")
@click.option("--script", type=Path, default=REPO / SCRIPT, help="as it ran")
@click.option("--artifacts", type=text, metavar="hub:USER/NAME", help="repo of the hub that gets all of them")
@click.option("--records", type=Path, default=RECORDS, help="folder of the tracks")
@of_data
@of_trust
def freeze(
    author: str,
    claim: str,
    what_changed: str,
    why: str,
    built_on: str | None,
    idea_from: str | None,
    **asked: Any,
) -> int:
    """Make a record's folder from the run directories of its seeds.

        python -m records freeze logs/RUN... --track track_floppy --name NAME --author WHO \\
            --what "what changed" --why "why it helps" [--claim record|none] [--artifacts hub:user/name]

    Script, logs and artifacts are copied byte for byte, metrics are packed by gzip, and the referee scores
    every artifact. A folder that `verify` would fail on its papers is not made.

    With --artifacts all of them are put on the Hugging Face hub. Then the folder keeps that of one seed, if
    it is small, and submission.json names where the others lie.
    """
    words = {"author": author, "claim": claim, "what_changed": what_changed, "why": why}
    lineage = {"built_on": built_on, "idea_from": idea_from}
    words |= {name: given for name, given in lineage.items() if given is not None}
    target = freezing.freeze(freezing.FreezeOptions(**asked), words)
    command = shell("python", "-m", "records", "verify", target)
    print(f"{target}: fill in the README's ablation, then {command}")
    return 0


# --- verify -----------------------------------------------------------------------------------------------


def seed_or_any(word: str) -> str:
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


def fetch(named: ArtifactAddress) -> Path:
    from records.archive.hub import fetch_artifact  # which loads the hub's client

    return fetch_artifact(named)


@click.command(cls=Command)
@click.argument("folders", nargs=-1, metavar="[FOLDER...]")
@click.option("--all", "everything", is_flag=True, help="every record of every track")
@click.option("--again", is_flag=True, help="with --all: those, too, whose kept verdict still holds")
@click.option("--static", is_flag=True, help="only what needs no run")
@click.option("--every-seed", is_flag=True, help="score and prove every artifact, not that of one seed")
@click.option(
    "--retrain", type=seed_or_any, metavar="SEED", help="train a seed again; any: one that is drawn"
)
@click.option("--write", is_flag=True, help="keep the verdicts for the board")
@by_whom
@click.option("--track", type=Path, help="of a record from the hub  [default: the one that its repo names]")
@of_data
@of_second
@of_trust
def verify(
    folders: tuple[str, ...],
    everything: bool,
    again: bool,
    write: bool,
    by: str | None,
    track: Path | None,
    **asked: Any,
) -> int:
    """Is a record what it says? One line a check: PASS | FAIL | SKIP name: what was found, what was expected.

        python -m records verify records/<track>/<name>...  all checks, the sandbox ones included
        python -m records verify --all [--again]            every record; those that passed and have not
                                                            changed since are not run --again
        python -m records verify --all --static             papers alone: nothing of a record runs
        python -m records verify FOLDER --retrain any       train a seed again in a training sandbox, too
        python -m records verify hub:user/name[@commit]     a record of the Hugging Face hub

    Exit code 1 if a check fails, 2 and 3 if the verification itself cannot be done: then there is no verdict.
    """
    options = claims.VerifyOptions(**asked, fetch=fetch)
    refuse_contradictions(folders, everything, write, options)
    more = options.static or options.every_seed or options.second or options.retrain is not None
    places = record_folders(RECORDS) if everything else folders
    count = 0
    failed = 0
    left = 0
    for place in places:
        folder, its_track = find_folder(place, options.data, track)
        since = "" if more or again or not everything else still_holds(folder, referee_version())
        print(f"{printable(folder)}:")
        lines = print_lines(claims.verify(folder, options, since, its_track), folder)
        wrong = sum(line.verdict == "FAIL" for line in lines)
        count += 1
        failed += wrong
        left += bool(since) and not wrong
        if write and (wrong or not since):
            second = Record(folder).track["dataset"]["second"] is not None
            if not write_verdict(folder, lines, by or who(), referee_version(), second):
                print(STAYS)
    if left:
        print(f"{left} records were left, as nothing has changed since they passed; --again judges all")
    print(f"{count} records, {failed} checks failed")
    return 1 if failed else 0


def refuse_contradictions(
    folders: tuple[str, ...], everything: bool, write: bool, options: claims.VerifyOptions
) -> None:
    """Arguments that do not go together are an error, which says what to do."""
    wrong = {
        "--write keeps verdicts, and a record without a sandbox earns none: leave out --trust": (
            write and options.trust
        ),
        "--retrain needs the training sandbox, which --trust does without: leave one of them out": (
            options.trust and options.retrain is not None
        ),
        "--write keeps the verdicts on records of this repository: leave it out with hub:": (
            write and any(map(is_address, folders))
        ),
        "name folders, or --all": bool(folders) == everything,
    }
    for words, found in wrong.items():
        if found:
            click.get_current_context().fail(words)


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
    """Judge a record: fresh seeds are drawn and trained in sandboxes, and what comes out is scored.

        python -m records judge records/<track>/<folder> --write    the judging is counted, its verdict kept
        python -m records judge records/<track>/<folder>            a trial, of which no verdict can be kept

    The verdict is `ranked` where their scores are a record by the track's rule, `verified` for a record that
    claims nothing, `fails` with the checks that failed, or `unverified` with the reasons. A judging that was
    stopped goes on when the same command is given again. --again begins another one of the same folder.

    Exit code 0 if the verdict is `ranked` or `verified`, 1 for any other. 2 and 3 say that the judging itself
    cannot be done: then there is no verdict.
    """
    options = judging.JudgeOptions(by=by or who(), referee=referee_version(), **asked)
    record = Path(os.path.abspath(record))
    if not record.is_dir():
        raise VerifierError(f"{record}: no such folder")
    *_, finding = print_lines(judging.judge(record, options), options.work)
    if not options.write:
        print("this verdict is not kept, since --write was not given")
    elif not write_finding(record, finding, options.by, referee_version()):
        print(STAYS)
    return 0 if finding.verdict in PASSED else 1
