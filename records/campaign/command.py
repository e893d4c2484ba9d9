"""Compare ideas by runs on a development text: every arm with every seed, at a share of a track's operations.

    python -m records sweep FILE                  run what is still to be run, then report
    python -m records sweep FILE --budget 0.1     each run with a tenth of the track's operations
    python -m records sweep FILE --score          also score the artifacts in streams, as the referee does
    python -m records sweep FILE --ray auto       runs are tasks of a Ray cluster
    python -m records sweep FILE --report         report what has been run so far
    python -m records sweep FILE --law            report how scores fall with operations, and write it down
    python -m records sweep --try                 is train_gpt.py as it stands here better than HEAD's?

records/campaign/README.md says what FILE holds. Exit codes: 0 done, 1 a run failed, 2 a bad FILE, 3 bad data
or an arm that changed, 16 stopped by a signal; the same command continues. --try: 0 keep, 1 discard, 2 not
known, and no verdict with the others.
"""

import contextlib
import functools
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from data import shards
from data.command import REPO, DataError, UsageError, say, shell
from data.door import Command, Number, on_signals
from data.files import locked, write_whole
from records.archive.runs import SCRIPT, run_artifact
from records.archive.tracks import DATA, RECORDS, Track, load_track
from records.campaign import attempt, law, standings
from records.campaign.arms import Arm, base_script, load_arms, load_dataset, read_campaign
from records.campaign.runs import ArmRun, Endings, Share, run_all, run_here
from records.referee.scoring import score_record
from records.referee.text import Text, decode, load_tokenizer
from records.sandbox import bubblewrap
from records.sandbox.jobs import find_job
from records.sandbox.predictor import SandboxError

STOPPED = 16  # exit code of a run, and of a campaign, with which the same command goes on

# --- scores in streams ------------------------------------------------------------------------------------


@functools.cache
def text_to_score(dataset: Path, tokenizer: Path) -> Text:
    return decode(load_tokenizer(tokenizer), shards.read_split(dataset, "val"))


def score(run: ArmRun, track: Track, data: Path) -> None:
    """Charge the text token after token, as the referee does. Raises SandboxError, DataError."""
    dataset = run.arm.dataset
    trust = bubblewrap.find() is None  # the script is ours
    job = find_job(run.arm.folder, track.folder, run_artifact(run.folder), data, trust=trust)
    result = score_record(job, text_to_score(dataset.folder, dataset.tokenizer))
    facts = {"val_bpb": result.bpb, "rows": result.rows, "processor_seconds": result.seconds}
    write_whole(run.score_file, json.dumps(facts, indent=1).encode())


def score_all(runs: list[ArmRun], track: Track, data: Path) -> int:
    """Score the runs that have ended and have no score. Returns how many could not be scored."""
    failed = 0
    for run in runs:
        if run.end() and not run.score_file.exists():
            try:
                score(run, track, data)
                say(f"{run}: {run.bpb(True):.4f} bits per byte in streams")
            except SandboxError as error:
                failed += 1
                say(f"{run}: cannot be scored: {error.kind}: {error}")
    return failed


# --- command line -----------------------------------------------------------------------------------------


def way_to_run(args: SimpleNamespace) -> Callable[[list[ArmRun]], Endings]:
    """On this machine or, with --ray, on a cluster. Raises UsageError."""
    if args.ray is None:
        share = Share(1 if args.cores else args.threads_per_run, args.gpus_per_run)
        return functools.partial(run_here, at_once=args.cores or 1, share=share)
    from records.campaign import cluster  # which loads Ray

    share = Share(args.threads_per_run or 1, args.gpus_per_run)
    return functools.partial(cluster.run_there, address=args.ray, share=share, every=args.keep_every)


def carry_out(arms: list[Arm], value: dict, track: Track, args: SimpleNamespace) -> int:
    """Run and score all that is not done yet. The exit code. Raises DataError, UsageError."""
    base = base_script(value, args.script)
    for arm in arms:
        arm.make_folder(base)
    runs = [ArmRun(arm, seed) for seed in value["seeds"] for arm in arms]
    codes = run_all(runs, way_to_run(args))
    unscored = score_all(runs, track, args.data) if args.score else 0
    if unscored or codes - {STOPPED}:
        return 1
    return STOPPED if codes else 0


def try_script(args: SimpleNamespace) -> int:
    """Judge the script of the working tree. The exit code. Raises DataError, UsageError."""
    track = load_track(args.records / args.track)
    if not track.counts_flops:
        raise UsageError(f"{track.name} counts no operations, expected a track with train_flops")
    dataset = load_dataset(args.data / "datasets" / args.dataset, track)
    share = args.budget or 0.03
    settings = {"PRESET": args.preset, "VAL_TOKENS_LIMIT": "0"}
    settings["MAX_FLOPS"] = str(round(share * track["train_flops"]))
    home = args.logs / f"try/{args.dataset}_{args.preset}_{share:g}"
    arms = attempt.arms_of_try(args.script, settings, dataset, home)
    say(f"HEAD's script is {arms[0].name}, the one here {arms[1].name}; their runs lie in {home}")

    def run_pair(runs: list[ArmRun]) -> list[float]:
        codes = run_all(runs, way_to_run(args))
        if codes == {STOPPED}:
            raise KeyboardInterrupt
        if codes or (args.score and score_all(runs, track, args.data)):
            raise DataError("a run failed, so there is no verdict; mend the script, then try again")
        return [run.bpb(args.score) for run in runs]

    with alone(home):
        found = attempt.attempt(arms, args.pairs, run_pair)
    if found.over:
        say("the artifact is over its budget of bytes, and HEAD's is not")
    say(json.dumps(found.value()) if args.as_json else f"verdict: {found.verdict} {found}")
    return attempt.CODES[found.verdict]


def alone(home: Path) -> contextlib.AbstractContextManager[None]:
    """Nobody else runs into this folder until the block ends. Raises UsageError."""
    home.mkdir(parents=True, exist_ok=True)
    refusal = f"{home}: this campaign is at work there already, expected one at a time"
    return locked(home, file="lock", refusal=refusal)


def budgets_of(home: Path) -> list[float]:
    """Those that were begun."""
    found = []
    for path in home.glob("[0-9]*"):
        with contextlib.suppress(ValueError):
            found.append(float(path.name))
    return found


def report(arms_at: functools.partial, value: dict, home: Path, args: SimpleNamespace) -> str:
    """In Markdown. Raises DataError."""
    seeds, base = value["seeds"], value["base"]
    arms = arms_at(args.budget)
    for arm in arms:
        if arm.folder.exists():
            arm.check_same()
    by = "in streams" if args.score else "by the runs' own logs"
    said = f"{args.file.stem}: {args.budget:g} of the operations of {value['track']}, scored {by}\n\n"
    said += standings.arms_table(arms, base, seeds, args.score)
    begun = budgets_of(home)
    if len(begun) > 1:
        said += "\n" + standings.budgets_table({each: arms_at(each) for each in begun}, seeds, args.score)
    if places := standings.places_table(arms, seeds):
        said += "\n" + places
    return said


def write_law(arms_at: functools.partial, value: dict, home: Path, args: SimpleNamespace) -> str:
    """Write the law beside the campaign's file; its tables. Raises DataError."""
    path = args.file.with_suffix(".json")
    newer = law.points_of({each: arms_at(each) for each in budgets_of(home)}, value["seeds"], args.score)
    found = law.joined([*value["arms"]], law.earlier(path, args.score), newer)
    same = shell("python", "-m", "records", "sweep", args.file, "--law")
    same += " --score" if args.score else ""
    facts = law.law(found, value["base"], load_track(args.records / value["track"]), same)
    write_whole(path, (json.dumps(facts, indent=1) + "\n").encode())
    return law.law_tables(facts)


def work(args: SimpleNamespace) -> int:
    """Do what the arguments ask for; the exit code."""
    if bool(args.file) == args.trying:
        raise UsageError("expected FILE, or --try without one")
    if args.trying:
        return try_script(args)
    args.budget = args.budget or 1.0
    value = read_campaign(args.file)
    track = load_track(args.records / value["track"])
    if not track.counts_flops:
        raise UsageError(f"{args.file}: {track.name} counts no operations, expected a track with train_flops")
    home = args.logs / args.file.stem
    arms_at = functools.partial(load_arms, value, track, home, args.data)
    arms = arms_at(args.budget)
    if args.law:
        say(write_law(arms_at, value, home, args))
        return 0
    code = 0
    if not args.report:
        with alone(home):
            code = carry_out(arms, value, track, args)
    say(report(arms_at, value, home, args))
    return code


COUNT = click.IntRange(1)
GPUS = click.IntRange(0)
POSITIVE = Number(0, min_open=True)
SHARE = "share of the track's operations  [default: 1; with --try: 0.03]"


@click.command(cls=Command, help=__doc__)
@click.argument("file", type=Path, required=False)
@click.option("--budget", type=POSITIVE, metavar="F", help=SHARE)
@click.option("--cores", type=COUNT, metavar="N", help="N runs at a time, each with one thread")
@click.option("--threads-per-run", type=COUNT, metavar="N", help="[default: torch's choice; with --ray: 1]")
@click.option(
    "--gpus-per-run", type=GPUS, default=0, metavar="N", help="2 or more: torchrun, a process for each"
)
@click.option("--ray", metavar="ADDRESS", help="run on a Ray cluster: auto, or the HOST:PORT of its head")
@click.option("--keep-every", type=POSITIVE, default=180.0, metavar="S", help="with --ray: fetch checkpoints")
@click.option("--score", is_flag=True, help="score artifacts in streams, and report these scores")
@click.option("--try", "trying", is_flag=True, help="run the script here beside HEAD's, pair by pair")
@click.option("--pairs", type=click.IntRange(3), default=8, metavar="N", help="with --try: at most")
@click.option("--preset", default="minute", help="with --try: of both scripts")
@click.option("--track", default="track_floppy", help="with --try: the one with the operations")
@click.option("--dataset", default="development_sp1024", help="with --try: never a validation text")
@click.option("--json", "as_json", is_flag=True, help="with --try: the last line is one JSON object")
@click.option("--report", is_flag=True, help="run nothing")
@click.option("--law", is_flag=True, help="run nothing; fit lines to all budgets, write FILE's .json")
@click.option("--script", type=Path, default=REPO / SCRIPT, help="to patch, where FILE names no commit")
@click.option("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
@click.option("--records", type=Path, default=RECORDS, help="folder of the tracks")
@click.option("--logs", type=Path, default=REPO / "logs/campaigns", help="folder of all runs")
def main(**options: Any) -> int:
    on_signals(signal.default_int_handler, signal.SIGTERM, signal.SIGINT)
    try:
        return work(SimpleNamespace(**options))
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return STOPPED
