"""A record's folder made from the run directories of its seeds, as `records freeze --help` says."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from data.command import DataError, UsageError, say
from data.files import growing_folder, read_bytes, read_json, sha256, write_beside
from records.archive.runs import (
    ARTIFACT,
    SCRIPT,
    ClaimedRun,
    Record,
    named_dataset,
    nearest_runs,
    pack,
    parse_run,
    this_machine,
)
from records.archive.tracks import Track
from records.referee.scoring import Result, referee
from records.referee.text import Text, validation_text
from records.sandbox.jobs import PredictorJob, find_job
from records.sandbox.predictor import NoSandbox, SandboxError
from records.verify.claims import OF_THE_RUNS, PAPERS, check_papers
from records.verify.version import referee_version

KEPT = "referee.json"  # in a run's folder: its score, and what that is a score of


def freeze(
    sources: tuple[Path, ...], track: Track, target: Path, data: Path, trust: bool, words: dict[str, str]
) -> None:
    """Write the folder; it appears whole or not at all. Raises UsageError, DataError.

    `words`: what its author says of it, by the names in submission.json.
    """
    runs = {source: load_run(source) for source in sources}
    by_logs = {run.value("seed"): run.value("val_bpb") for run in runs.values()}
    if len(by_logs) < len(runs):
        raise UsageError(f"{len(runs)} runs of the seeds {sorted(by_logs)}, expected one run of each")
    about = {"format": "bytegolf record", "version": 2, "dataset": named_dataset(sources[0]), **words}
    about["scored_on"] = this_machine()
    track = track.using(about["dataset"])
    with growing_folder(target) as folder:
        copy_files(folder, runs, track["artifact_below"])
        # before the referee takes its minutes
        write_words(folder, target.name, about | {"scores": by_logs}, OF_THE_RUNS)
        text = validation_text(track, data)
        scores = {}
        for source, run in runs.items():
            job = find_job(folder, track.folder, source / ARTIFACT, data, trust=trust)
            scores[run.value("seed")] = score(job, text, source)
        write_words(folder, target.name, about | {"scores": scores}, PAPERS)


def load_run(source: Path) -> ClaimedRun:
    """A finished run with its script and its artifact. Raises DataError."""
    if not source.is_dir():
        raise DataError(f"{source}: no such folder{nearest_runs(source)}")
    if not (source / SCRIPT).exists():
        raise DataError(f"{source}: holds no {SCRIPT}; copy the script as it ran into the folder")
    log, metrics, artifact = (source / name for name in ("train.log", "metrics.jsonl", ARTIFACT))
    found = parse_run(str(log), read_bytes(log), read_bytes(metrics), str(metrics))
    if sha256(read_bytes(artifact)) != found.value("artifact_sha256"):
        raise DataError(f"{artifact} and {log} differ: the log is of another artifact")
    return found


def copy_files(folder: Path, runs: dict[Path, ClaimedRun], most: int) -> None:
    """The script, and of every run log, metrics and an artifact of less than `most` bytes."""
    (folder / SCRIPT).write_bytes(read_bytes(next(iter(runs)) / SCRIPT))
    for source, found in runs.items():
        seed = found.value("seed")
        (folder / f"train_seed{seed}.log").write_bytes(read_bytes(source / "train.log"))
        (folder / f"metrics_seed{seed}.jsonl.gz").write_bytes(pack(found.metrics))
        artifact = read_bytes(source / ARTIFACT)
        if len(artifact) < most:
            (folder / f"model_seed{seed}.ptz").write_bytes(artifact)
        else:
            print(f"{source}: its artifact is left out, since the track's artifact_below is {most}")


def score(job: PredictorJob, text: Text, source: Path) -> float:
    """The referee's score of a run's artifact, counted once: its folder keeps it. Raises DataError."""
    kept = source / KEPT
    of = {"model": job.name.hex(), "text": text.sha256, "referee": referee_version(), **this_machine()}
    found = read_json(kept) if kept.exists() else {}
    if not of.items() <= found.items():
        try:
            first = next(iter(referee(job, text, proof=False)))
        except (NoSandbox, SandboxError) as error:
            raise DataError(str(error)) from None
        if not isinstance(first, Result):
            raise DataError(f"{source}: the referee cannot score it: {first}")
        found = of | {"score": round(first.bpb, 8)}
        with contextlib.suppress(OSError):  # an archive of runs may be for reading alone
            write_beside(kept, json.dumps(found).encode())
    say(f"{source}: {found['score']:.8f} bits per byte{f', kept in {kept}' if kept.exists() else ''}")
    return found["score"]


def write_words(folder: Path, name: str, submission: dict, checks: list[Callable]) -> None:
    """Write submission.json and README.md. Raises UsageError where a check fails then."""
    text = json.dumps(submission, indent=1, ensure_ascii=False)
    (folder / "submission.json").write_text(f"{text}\n", encoding="utf-8")
    record = Record(folder, name)
    page = readme(record, submission["what_changed"], submission["why"])
    (folder / "README.md").write_text(page, encoding="utf-8")
    for line in check_papers(record, checks):
        if line.verdict == "FAIL":
            raise UsageError(f"nothing was frozen, since verify would say: {line}")


def readme(record: Record, what: str, why: str) -> str:
    rows = "".join(
        f"| {seed} | {record.scores[seed]:.8f} | {run.value('val_bpb'):.8f} | {run.value('steps'):,} |\n"
        for seed, run in record.runs.items()
    )
    given = " ".join(f"{name}={value}" for name, value in next(iter(record.runs.values())).given.items())
    return f"""# {record.name}: {record.mean:.4f} bits per byte

{what}

Why: {why}

| seed | score | by its log | steps |
|---|---|---|---|
{rows}
The first seed was run with `{given} python {SCRIPT}`.

## Ablation

One change taken away at a time, the same seeds. Fill in what you measured; delete what you did not.

| without | score | difference | seeds |
|---|---|---|---|
| (nothing: the record) | {record.mean:.4f} | 0 | {len(record.scores)} |
|  |  |  |  |
"""
