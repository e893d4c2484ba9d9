"""The commands that make a record of runs, check it, and judge it: freeze, verify and judge."""

import os
import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import click

from data.command import REPO, DataError, UsageError, printable, say, shell
from data.door import Command, text
from records.archive.checks import Check, VerifierError
from records.archive.runs import Record, is_address, is_run
from records.archive.tracks import DATA, RECORDS, Track, load_track, record_folders
from records.archive.verdicts import PASSED, Finding, write_finding, write_verdict
from records.sandbox.predictor import NoSandbox
from records.verify import claims, evaluation, freezing
from records.verify.version import referee_version, who

of_data = click.option("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
of_second = click.option("--second", type=Path, help="second text: a JSON string a line, one for a document")
of_trust = click.option("--trust", is_flag=True, help="score it without a sandbox where there is none")
by_whom = click.option("--by", type=text, metavar="NAME", help="with --write  [default: git's user.name]")
STAYS = "the verdict that is kept rests on more, and stays"
UNSCORED = 3  # exit code: no check failed, and of a record nothing was scored


def print_lines(lines: Iterable[Check | Finding]) -> list[Check | Finding]:
    """Print line by line. Raises VerifierError where no sandbox can be made."""
    printed = []
    try:
        for line in lines:
            printed.append(line)
            print(line, flush=True)
    except NoSandbox as error:
        raise VerifierError(str(error)) from None
    return printed


# --- freeze -----------------------------------------------------------------------------------------------


def record_name(word: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,59}", word):
        raise ValueError(f"{word!r} given, expected letters, digits and -, at most 60")
    return word


def find_track(word: str) -> Track:
    """A track by the path of its folder or by its name in records/. Raises DataError."""
    path = Path(word)
    return load_track(path if (path / "track.json").exists() else RECORDS / word)


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, type=Path, metavar="RUN...")
@click.option("--track", required=True, help="a track's folder, or its name in records/")
@click.option("--name", required=True, type=record_name, metavar="NAME", help="such as LongerContext")
@click.option("--author", type=text, required=True, metavar="WHO")
@click.option("--what", "what_changed", type=text, required=True, metavar="TEXT", help="what changed")
@click.option("--why", type=text, required=True, metavar="TEXT", help="why it helps")
@click.option("--built-on", type=text, metavar="RECORD", help="folder of the track whose script it changes")
@click.option("--idea-from", type=text, metavar="TEXT", help="whose idea it is: a name, a paper, an address")
@click.option("--claim", type=click.Choice(["record", "none"]), default="record")
@click.option("--date", "day", default=lambda: date.today().isoformat(), show_default="today")
@of_data
@of_trust
def freeze(
    runs: tuple[Path, ...], track: str, name: str, day: str, data: Path, trust: bool, **words: str | None
) -> int:
    """Make a record's folder from the run directories of its seeds.

        python -m records freeze logs/RUN... --track track_floppy --name NAME --author WHO \\
            --what "what changed" --why "why it helps" [--claim record|none]

    Script, logs and artifacts are copied byte for byte, metrics are packed by gzip, and the referee scores
    every artifact, once: a run's folder keeps its score. No folder is made whose papers `verify` would fail.
    """
    rules = find_track(track)
    target = rules.folder / f"{day}_{name}"
    given = {key: word for key, word in words.items() if word is not None}
    try:
        freezing.freeze(runs, rules, target, data, trust, given)
    except KeyboardInterrupt:
        kept = "scores that were kept stay, the one under way is lost"
        click.echo(f"stopped, nothing is frozen: {kept}; the same command goes on", err=True)
        return 16
    command = shell("python", "-m", "records", "verify", target)
    print(f"{target}: fill in the README's ablation, then {command}")
    return 0


# --- verify -----------------------------------------------------------------------------------------------


def seed_or_any(word: str) -> str:
    if word != "any" and not word.isdecimal():
        raise ValueError(f"{word!r} given, expected a seed, or any")
    return word


def find_folder(place: str, data: Path, track: Path | None) -> tuple[Path, Path | None]:
    """A record's folder; and its track, where it does not lie in that. Raises DataError, UsageError."""
    if is_address(place):
        from records.archive.hub import fetch_record  # which loads the hub's client

        found = fetch_record(place, data, track)
        say(f"{found.address}, of {found.track.name}:")
        return found.path, found.track
    folder = Path(os.path.abspath(place))
    if not folder.is_dir():
        raise DataError(f"{printable(folder)}: no such folder")
    if (folder / "track.json").exists():
        mend = "name folders of records in it, or --all for those of every track"
        raise UsageError(f"{printable(folder)}: is a track, no record: {mend}")
    if is_run(folder) and not (folder.parent / "track.json").exists():
        mend = f"{shell('python', '-m', 'records', 'prove', folder)} scores it and proves the score"
        raise DataError(f"{printable(folder)}: is a run, no record: {mend}")
    return folder, None


@click.command(cls=Command)
@click.argument("folders", nargs=-1, metavar="[FOLDER...]")
@click.option("--all", "everything", is_flag=True, help="every record of every track")
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
    write: bool,
    by: str | None,
    track: Path | None,
    **asked: Any,
) -> int:
    """Is a record what it says? One line a check: PASS | FAIL | SKIP name: what was found, what was expected.

        python -m records verify records/<track>/<name>...  all checks, the sandbox ones included
        python -m records verify --all --static             papers of all records: nothing of them runs
        python -m records verify FOLDER --retrain any       train a seed again in a training sandbox, too
        python -m records verify hub:user/name[@commit]     a record of the Hugging Face hub

    Exit code 1 if a check fails, 2 and 3 if the verification itself cannot be done: then there is no verdict.
    It is 3, too, if nothing of a record could be scored here.
    """
    options = claims.VerifyOptions(**asked)
    refuse_contradictions(folders, everything, write, options)
    places = record_folders(RECORDS) if everything else folders
    failed = 0
    unscored = 0
    for place in places:
        folder, its_track = find_folder(place, options.data, track)
        print(f"{printable(folder)}:")
        lines = print_lines(claims.verify(folder, options, its_track))
        wrong = sum(line.verdict == "FAIL" for line in lines)
        scored = any(line.name in ("score", "retrained") and line.verdict == "PASS" for line in lines)
        failed += wrong
        unscored += not (wrong or scored or options.static)
        if write:
            second = Record(folder).track["dataset"]["second"] is not None
            if not write_verdict(folder, lines, by or who(), referee_version(), second):
                print(STAYS)
    missing = f", {unscored} not scored: their scores are claims" if unscored else ""
    print(f"{len(places)} records, {failed} checks failed{missing}")
    if failed:
        return 1
    return UNSCORED if unscored else 0


def refuse_contradictions(
    folders: tuple[str, ...], everything: bool, write: bool, options: claims.VerifyOptions
) -> None:
    """Arguments that do not go together are an error, which says what to do."""
    fail = click.get_current_context().fail
    if bool(folders) == everything:
        fail("name folders, or --all")
    if options.trust and (write or options.retrain is not None):
        fail("--write and --retrain need the sandbox, which --trust does without: leave one of them out")
    if write and any(map(is_address, folders)):
        fail("--write keeps the verdicts on records of this repository: leave it out with hub:")


# --- judge ------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("record", type=Path)
@of_data
@of_second
@click.option(
    "--work", type=Path, default=REPO / "logs/judge", help="keeps what was trained, so that it can go on"
)
@click.option("--again", is_flag=True, help="judge once more what was judged already, with other seeds")
@click.option("--write", is_flag=True, help="record the seeds before they are trained, and the verdict")
@by_whom
def judge(record: Path, by: str | None, **asked: Any) -> int:
    """Judge a record: fresh seeds are drawn and trained in sandboxes, and what comes out is scored.

        python -m records judge records/<track>/<folder> --write    it is counted, its verdict kept
        python -m records judge records/<track>/<folder>            a trial, of which no verdict is kept

    The verdict is `ranked` where their scores are a record by the track's rule, `verified` for a record that
    claims nothing, `fails` with the checks that failed, or `unverified` with the reasons. An evaluation
    that was stopped goes on when the same command is given again. --again begins another one of the folder.

    Exit code 0 if the verdict is `ranked` or `verified`, 1 for any other. 2 and 3 say that the evaluation
    cannot be done: then there is no verdict.
    """
    options = evaluation.JudgeOptions(by=by or who(), referee=referee_version(), **asked)
    folder, _ = find_folder(str(record), options.data, None)
    *_, finding = print_lines(evaluation.judge(folder, options))
    if not options.write:
        print("this verdict is not kept, since --write was not given")
    elif not write_finding(folder, finding, options.by, referee_version()):
        print(STAYS)
    return 0 if finding.verdict in PASSED else 1
