"""All checks of what a record claims: its papers, score and proof of its artifacts, and a seed again."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.command import DataError, UsageError
from data.files import file_sha256, scratch_folder
from records.archive.checks import Check, VerifierError, check, of_seed, skip
from records.archive.record import ArtifactAddress, Record
from records.archive.runs import ARTIFACT, this_machine
from records.archive.tracks import DATA
from records.referee.scoring import Result, referee
from records.referee.text import Text, validation_text
from records.sandbox.jobs import PredictorJob, find_job
from records.verify.papers import check_papers
from records.verify.training import check_ended, check_work, train

NO_ARTIFACT = skip("score", "no artifact is here or has an address; the judge scores those that it trains")
LOOSE, DECIMALS = 1e-4, 5.1e-9  # of a score: on another machine, and on one of the same kind


def no_hub(named: ArtifactAddress) -> Path:
    raise UsageError(f"{named.at}: is not asked here")


@dataclass(frozen=True)
class VerifyOptions:
    data: Path = DATA
    second: Path | None = None
    static: bool = False
    every_seed: bool = False
    trust: bool = False
    retrain: str | None = None
    fetch: Callable[[ArtifactAddress], Path] = no_hub  # from an artifact's address; its hash is checked here


def verify(path: Path, options: VerifyOptions, since: str = "", track: Path | None = None) -> Iterator[Check]:
    """All checks of one folder. Raises NoSandbox, VerifierError.

    `since`: when it passed those that run it, if that still holds. `track`: of a folder that lies in none.
    """
    record = Record(path, track_folder=track)
    failed = False
    for line in check_papers(record):
        failed |= line.verdict == "FAIL"
        yield line
    if options.static:
        return
    if failed:
        yield skip("score", "nothing of a record that fails already is run")
    elif since:
        words = f"passed on {since}; folder, track and referee are as they were, --again judges once more"
        yield skip("score", words)
    elif record.track["device"] == "cuda" and not Path("/dev/nvidiactl").exists():
        yield skip("score", "the track's machine has a CUDA GPU, this one has none")
    elif not (record.artifacts or record.addresses) and options.retrain is None:
        yield NO_ARTIFACT
    else:
        try:
            yield from check_by_referee(record, options)
        except DataError as error:  # what is missing here says nothing of a record
            raise VerifierError(str(error)) from None


# --- artifacts --------------------------------------------------------------------------------------------


def check_by_referee(record: Record, options: VerifyOptions) -> Iterator[Check]:
    """Score again and prove; then train again. Raises NoSandbox, VerifierError, DataError."""
    text = validation_text(record.track, options.data)
    seeds = sorted(record.artifacts.keys() | record.addresses)
    if not seeds:
        yield NO_ARTIFACT
    elif not options.every_seed:
        seeds = [secrets.choice(seeds)]
    for seed in seeds:
        try:
            artifact = find_artifact(record, seed, options)
        except (DataError, UsageError) as error:  # what is missing is no fault, and never a pass
            yield skip(f"artifact-seed{seed}", f"was not found, so it was not scored: {error}")
            continue
        for line in referee(job_of(record, artifact, options), text, True, np.random.default_rng()):
            yield compare_score(record, seed, line) if isinstance(line, Result) else line
    if options.retrain is None:
        yield skip("retrained", "--retrain SEED trains a seed again")
    else:
        drawn = secrets.choice(sorted(record.runs))  # by nobody who sent the record
        yield from retrain(record, drawn if options.retrain == "any" else int(options.retrain), text, options)


def find_artifact(record: Record, seed: int, options: VerifyOptions) -> Path:
    """A seed's artifact in the folder, or fetched from its address. Raises DataError, UsageError."""
    if seed in record.artifacts:
        return record.artifacts[seed]
    named = record.addresses[seed]
    path = options.fetch(named)
    if file_sha256(path).hex() != named.sha256:
        raise DataError(f"{named.at}: gave another file than that of sha256 {named.sha256}")
    return path


def job_of(record: Record, artifact: Path, options: VerifyOptions) -> PredictorJob:
    """How the referee scores an artifact with the record's script. Raises DataError."""
    return find_job(
        record.path,
        record.home,
        artifact,
        options.data,
        trust=options.trust,
        second=options.second,
    )


def compare_score(record: Record, seed: int, result: Result) -> Check:
    """The referee's score is the submission's: to eight decimals on the same kind of machine."""
    claimed = record.scores[seed]
    same = this_machine() == record.field("scored_on")
    bound, kind = (DECIMALS, "the same kind") if same else (LOOSE, "another kind")
    off = result.bpb - claimed
    return check(
        "score",
        abs(off) <= bound,
        f"seed {seed}: {result.bpb:.8f} bits per byte, {off:+.1e} from the submission's {claimed:.8f}, "
        f"expected within {bound:g} on {kind} of machine",
    )


# --- a seed again -----------------------------------------------------------------------------------------


def retrain(record: Record, seed: int, text: Text, options: VerifyOptions) -> Iterator[Check]:
    """Train one seed again. Raises NoSandbox and VerifierError, which are no fault of the record."""
    if seed not in record.runs:
        raise VerifierError(f"--retrain {seed}: the record has the seeds {sorted(record.runs)}")
    with scratch_folder() as folder:
        found = train(record, seed, options.data, folder)
        (ended,) = of_seed(seed, [check_ended("retrain", found)])
        yield ended
        if ended.verdict == "PASS":
            yield compare_artifact(record, seed, folder / ARTIFACT, text, options)
            yield from check_work(record.track, found)


def compare_artifact(record: Record, seed: int, artifact: Path, text: Text, options: VerifyOptions) -> Check:
    """The new artifact is the record's bit for bit, or scores as it does, within the track's noise.

    Another processor rounds differently, which gives another run. If the record claims nothing, the new
    artifact may lie as far away as its seeds lie apart.
    """
    if file_sha256(artifact).hex() == record.runs[seed].value("artifact_sha256"):
        return check("retrained", True, f"seed {seed}: the artifact came back bit for bit, expected so")
    first = next(iter(referee(job_of(record, artifact, options), text, False, np.random.default_rng(0))))
    if not isinstance(first, Result):
        return check("retrained", False, f"seed {seed}: the new artifact cannot be scored: {first.text}")
    noise, own = record.track["noise_bpb"], record.scores[seed]
    near = record.scores.values() if record.field("claim") == "none" else [own]
    low, high = min(near) - noise, max(near) + noise
    return check(
        "retrained",
        low <= first.bpb <= high,
        f"seed {seed}: other bits than the record's; the new artifact scores {first.bpb:.8f}, "
        f"{first.bpb - own:+.4f} from the record's, expected {low:.4f} to {high:.4f}",
    )
