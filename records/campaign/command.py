"""Compare ideas by runs on a development text: every variant with every seed, at a share of a track's
operations.

    python -m records sweep FILE                  run what is still to be run, then report
    python -m records sweep FILE --budget 0.1     each run with a tenth of the track's operations
    python -m records sweep FILE --score          also score the artifacts in streams, as the referee does
    python -m records sweep FILE --ray auto       runs are tasks of a Ray cluster
    python -m records sweep FILE --report         report what has been run so far
    python -m records sweep FILE --scaling        report how scores fall with operations, and write it down
    python -m records sweep --try                 is train_gpt.py as it stands here better than HEAD's?

records/campaign/README.md says what FILE holds. Exit codes: 0 done, 1 a run failed, 2 a bad FILE, 3 bad data
or a variant that changed, 16 stopped by a signal; the same command continues. --try: 0 keep, 1 discard, 2 not
known, and no verdict with the others.
"""

import contextlib
import functools
import importlib
import json
import os
import re
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from data import shards
from data.command import REPO, DataError, UsageError, say, some, warn_once
from data.door import Command, Number
from data.files import locked, read_bytes, sha256, write_whole
from records.archive.runs import SCRIPT, run_artifact
from records.archive.tracks import DATA, RECORDS, Track, load_track
from records.campaign import report, scaling
from records.campaign.attempt import CODES, UNKNOWN, judge
from records.campaign.runs import Clock, SeedRun, Share, run_all, run_here
from records.campaign.variants import (
    Campaign,
    Dataset,
    Variant,
    load_dataset,
    read_campaign,
    script_of,
)
from records.referee.scoring import score_record
from records.referee.text import Text, decode, load_tokenizer
from records.sandbox import bubblewrap
from records.sandbox.jobs import find_job
from records.sandbox.predictor import SandboxError

FIRST_SEED = 1337  # of --try
STOPPED = 16  # exit code of a run, and of a campaign, with which the same command goes on

LAST_LINES = 10  # of a run that failed
NOT_REACHED = (
    "pair 1 is alike to the last bit: the edit changes nothing in a run with PRESET={preset}. If it is of a "
    f"default of Settings: a preset's row in {SCRIPT} overrides it. Edit it there, or name another --preset"
)

# --- runs and their scores --------------------------------------------------------------------------------


def run_missing(runs: list[SeedRun], args: SimpleNamespace, clock: Clock | None = None) -> set[int]:
    """Run what has not ended, here or on a cluster. The exit codes of the runs that failed.

    With --try, which has a clock for all pairs, the first one that fails is the last.
    """
    if args.ray is None:
        share = Share(1 if args.cores else args.threads_per_run, args.gpus_per_run)
        here = functools.partial(run_here, at_once=args.cores or 1, share=share)
        return run_all(runs, here, clock)
    from records.campaign import cluster  # which loads Ray

    share = Share(args.threads_per_run or 1, args.gpus_per_run)
    there = functools.partial(cluster.run_there, address=args.ray, share=share)
    return run_all(runs, there, clock)


@functools.cache
def text_to_score(dataset: Path, tokenizer: Path) -> Text:
    return decode(load_tokenizer(tokenizer), shards.read_split(dataset, "val"))


def score_missing(runs: list[SeedRun], track: Track, data: Path) -> int:
    """Score in streams, as the referee does, what has ended. How many could not be scored."""
    trust = bubblewrap.find() is None  # the script is ours
    failed = 0
    for run in runs:
        if not run.end() or run.score_file.exists():
            continue
        dataset = run.variant.dataset
        job = find_job(run.variant.folder, track.folder, run_artifact(run.folder), data, trust=trust)
        try:
            result = score_record(job, text_to_score(dataset.folder, dataset.tokenizer))
        except SandboxError as error:
            failed += 1
            say(f"{run}: cannot be scored: {error.kind}: {error}")
            continue
        facts = {"val_bpb": result.bpb, "rows": result.rows, "processor_seconds": result.seconds}
        write_whole(run.score_file, json.dumps(facts, indent=1).encode())
        say(f"{run}: {result.bpb:.4f} bits per byte in streams")
    return failed


def alone(home: Path) -> contextlib.AbstractContextManager[None]:
    """Nobody else runs into this folder until the block ends. Raises UsageError."""
    home.mkdir(parents=True, exist_ok=True)
    refusal = f"{home}: this campaign is at work there already; wait for its end, or stop it"
    return locked(home, file="lock", refusal=refusal)


def track_of(args: SimpleNamespace, name: str, where: str = "") -> Track:
    """A track whose limit is operations. Raises DataError, UsageError."""
    track = load_track(args.records / name)
    if not track.counts_flops:
        raise UsageError(f"{where}{name} counts no operations, expected a track with train_flops")
    return track


# --- what the command does --------------------------------------------------------------------------------


def name_ignored(script: bytes) -> None:
    """Runs have their variant's settings alone: say which of the shell's they will not see."""
    lines = script.decode(errors="replace")
    known = [name for name in os.environ if re.search(rf"^    {name.lower()}: \w+ = ", lines, re.MULTILINE)]
    if known:
        mend = f"write them into {SCRIPT}; a preset is --preset, and a campaign's file has [settings]"
        warn_once(f"settings of the shell do not count: {some(sorted(known))}; {mend}")


def two_variants(args: SimpleNamespace, dataset: Dataset, home: Path, flops: int) -> list[Variant]:
    """The working tree's and HEAD's, each in a folder named by its script: HEAD's runs serve many tries."""
    old, new = script_of("HEAD"), read_bytes(args.script)
    name_ignored(new)
    if old == new:
        mend = "expected an idea in it; edit it, then try"
        raise UsageError(f"{args.script}: is {SCRIPT} as HEAD has it, {mend}")
    settings = {"PRESET": args.preset, "VAL_TOKENS_LIMIT": "0", "MAX_FLOPS": str(flops)}
    variants = [Variant(home / sha256(script)[:12], settings, [], dataset) for script in (new, old)]
    say(f"HEAD's script is {variants[1].name}, the one here {variants[0].name}; their runs lie in {home}")
    for variant, script in zip(variants, (new, old)):
        variant.make_folder(script)
    return variants


def run_pair(pair: list[SeedRun], track: Track, args: SimpleNamespace, clock: Clock) -> float:
    """The new script's bits per byte less those of the old one. Raises KeyboardInterrupt, DataError."""
    if run_missing(pair, args, clock) == {STOPPED}:
        raise KeyboardInterrupt
    for run in pair:
        if not run.end():
            print(*run.last_lines(LAST_LINES), sep="\n", file=sys.stderr)
            raise DataError(f"run {run} failed, so there is no verdict; {run.output} has all that it said")
    if args.score and score_missing(pair, track, args.data):
        raise DataError("a run cannot be scored, so there is no verdict; mend the script, then try again")
    new, old = (run.bpb(args.score) for run in pair)
    return new - old


def try_script(args: SimpleNamespace) -> int:
    """Run both scripts, pair by pair, until the verdict is known. The exit code. Raises DataError."""
    track = track_of(args, args.track)
    folder = args.dataset if args.dataset.is_dir() else args.data / "datasets" / args.dataset
    dataset = load_dataset(folder, track)
    share = args.budget or 0.03
    home = args.logs / f"try/{folder.name}_{args.preset}_{share:g}"
    variants = two_variants(args, dataset, home, round(share * track["train_flops"]))
    seeds = range(FIRST_SEED, FIRST_SEED + args.pairs)
    pairs = [[SeedRun(variant, seed) for variant in variants] for seed in seeds]  # the new one may fail
    differences = []
    with alone(home):
        clock = Clock(sum(not run.end() for pair in pairs for run in pair))
        for pair in pairs:
            differences.append(run_pair(pair, track, args, clock))
            found = judge(differences, over=pair[0].is_over() and not pair[1].is_over())
            if not any(differences):
                say(NOT_REACHED.format(preset=args.preset))
                break
            if found.verdict != UNKNOWN:
                break
            say(f"pair {len(differences)} of {args.pairs} at most: {found}")
    if found.over:
        say("the artifact is over its budget of bytes, and HEAD's is not")
    say(found.json() if args.as_json else f"verdict: {found.verdict} {found}")
    return CODES[found.verdict]


def sweep(campaign: Campaign, budget: float, args: SimpleNamespace) -> int:
    """Run and score all that is not done yet. The exit code. Raises DataError, UsageError."""
    base = script_of(campaign.value["commit"]) if "commit" in campaign.value else read_bytes(args.script)
    name_ignored(base)
    variants = campaign.variants(budget)
    for variant in variants:
        variant.make_folder(base)
    runs = [SeedRun(variant, seed) for seed in campaign.value["seeds"] for variant in variants]
    codes = run_missing(runs, args)
    unscored = score_missing(runs, campaign.track, args.data) if args.score else 0
    if unscored or codes - {STOPPED}:
        return 1
    return STOPPED if codes else 0


def report_of(campaign: Campaign, budget: float, args: SimpleNamespace) -> str:
    """In Markdown. Raises DataError."""
    value = campaign.value
    variants = campaign.variants(budget)
    for variant in variants:
        if variant.folder.exists():
            variant.check_same()
    by = "in streams" if args.score else "by the runs' own logs"
    title = f"{args.file.stem}: {budget:g} of the operations of {value['track']}, scored {by}"
    return f"{title}\n\n{report.variants_table(variants, value['base'], value['seeds'], args.score)}"


def scaling_of(campaign: Campaign, args: SimpleNamespace) -> str:
    """Write the fit beside the campaign's file; its tables. Raises DataError."""
    points = scaling.points_of(campaign.begun(), campaign.value["seeds"], args.score)
    variants = scaling.fit(points, campaign.value["base"])
    facts = {"flops": campaign.track["train_flops"], "base": campaign.value["base"], "arms": variants}
    write_whole(args.file.with_suffix(".json"), (json.dumps(facts, indent=1) + "\n").encode())
    return scaling.tables(variants)


def work(args: SimpleNamespace) -> int:
    """Do what the arguments ask for; the exit code."""
    if bool(args.file) == args.trying or (args.trying and (args.report or args.scaling)):
        raise UsageError("expected FILE, or --try without FILE, --report and --scaling")
    importlib.import_module("scipy")  # which judges the runs: before any is trained
    if args.trying:
        return try_script(args)
    budget = args.budget or 1.0
    value = read_campaign(args.file)
    track = track_of(args, value["track"], f"{args.file}: ")
    campaign = Campaign(value, track, args.logs / args.file.stem, args.data)
    if args.scaling:
        say(scaling_of(campaign, args))
        return 0
    code = 0
    if not args.report:
        campaign.variants(budget)  # refuses what is wrong before the folder is made
        with alone(campaign.home):
            code = sweep(campaign, budget, args)
    say(report_of(campaign, budget, args))
    return code


COUNT = click.IntRange(1)
POSITIVE = Number(0, min_open=True)
SHARE = "share of the track's operations  [default: 1; with --try: 0.03]"
THREADS = "[default: torch's choice; with --ray: 1]"
GPUS = "2 or more: torchrun, a process for each"


@click.command(cls=Command, help=__doc__)
@click.argument("file", type=Path, required=False)
@click.option("--budget", type=POSITIVE, metavar="F", help=SHARE)
@click.option("--cores", type=COUNT, metavar="N", help="N runs at a time, each with one thread")
@click.option("--threads-per-run", type=COUNT, metavar="N", help=THREADS)
@click.option("--gpus-per-run", type=click.IntRange(0), default=0, metavar="N", help=GPUS)
@click.option("--ray", metavar="ADDRESS", help="run on a Ray cluster: auto, or the HOST:PORT of its head")
@click.option("--score", is_flag=True, help="score artifacts in streams, and report these scores")
@click.option("--try", "trying", is_flag=True, help="run the script here beside HEAD's, pair by pair")
@click.option("--pairs", type=click.IntRange(3), default=8, metavar="N", help="with --try: at most")
@click.option("--preset", default="minute", help="with --try: of both scripts")
@click.option("--track", default="track_floppy", help="with --try: the one with the operations")
@click.option(
    "--dataset", type=Path, default="development_sp1024", help="with --try: your text, but no track's own"
)
@click.option("--json", "as_json", is_flag=True, help="with --try: the last line is one JSON object")
@click.option("--report", is_flag=True, help="run nothing")
@click.option("--scaling", "--law", is_flag=True, help="run nothing; fit lines, write FILE's .json")
@click.option("--script", type=Path, default=REPO / SCRIPT, help="to patch, where FILE names no commit")
@click.option("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
@click.option("--records", type=Path, default=RECORDS, help="folder of the tracks")
@click.option("--logs", type=Path, default=REPO / "logs/campaigns", help="folder of all runs")
def main(**options: Any) -> int:
    try:
        return work(SimpleNamespace(**options))
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return STOPPED
    except Exception as error:
        if not options["trying"] or isinstance(error, DataError | UsageError | OSError | ModuleNotFoundError):
            raise
        traceback.print_exc()  # Python's own exit code would be that of discard
        return DataError.exit_code
