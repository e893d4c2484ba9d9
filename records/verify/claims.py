"""All checks of what a record claims: its papers, score and proof of its artifacts, and a seed again."""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.command import DataError, UsageError
from records.archive.checks import Check, VerifierError, check, skip
from records.archive.record import Record
from records.archive.submission import this_machine
from records.archive.tracks import DATA
from records.referee.scoring import PART, Result, referee
from records.referee.text import validation_text
from records.sandbox.jobs import PredictorJob, find_job
from records.sandbox.predictor import NoSandbox
from records.verify.papers import check_papers
from records.verify.retrain import retrain

NO_ARTIFACT = skip("score", "no artifact is here or has an address; the judge scores those of its rooms")
LOOSE, DECIMALS = 1e-4, 5.1e-9  # of a score: on another machine, and on one of the same kind


@dataclass(frozen=True)
class VerifyOptions:
    """What a verification does, as the command's help has it."""

    data: Path = DATA
    second: Path | None = None
    static: bool = False
    every_seed: bool = False
    trust: bool = False
    proof_bytes: int | None = None
    retrain: str | None = None


@contextlib.contextmanager
def our_errors(place: Path) -> Iterator[None]:
    """Errors that say nothing of a record, of the sandbox or the system, as a VerifierError."""
    try:
        yield
    except NoSandbox as error:
        raise VerifierError(str(error)) from None
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a file that went
        raise VerifierError(f"{error.filename or place}: {error.strerror or error}") from None


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


def find_artifact(record: Record, seed: int) -> Path:
    """A seed's artifact in the folder, or fetched from its address. Raises DataError."""
    here = record.path / f"model_seed{seed}.ptz"
    if here.exists():
        return here
    from records.archive.hub import fetch_artifact  # which loads the hub's client

    return fetch_artifact(record.addresses[seed])


def check_by_referee(record: Record, options: VerifyOptions) -> Iterator[Check]:
    """Score again and prove; then train again. Raises NoSandbox, VerifierError, DataError."""
    text = validation_text(record.track, options.data)

    def job_of(artifact: Path) -> PredictorJob:
        return find_job(
            record.path,
            record.home,
            artifact,
            options.data,
            trust=options.trust,
            second=options.second,
        )

    seeds = sorted(record.artifacts.keys() | record.addresses)
    if not seeds:
        yield NO_ARTIFACT
    elif not options.every_seed:
        seeds = [secrets.choice(seeds)]
    drawn = np.random.default_rng()
    proof = True if options.proof_bytes is None else options.proof_bytes
    if proof is not True:
        yield PART
    for seed in seeds:
        try:
            artifact = find_artifact(record, seed)
        except (DataError, UsageError) as error:  # of the hub: what is missing is no fault, and never a pass
            yield skip(f"artifact-seed{seed}", f"was not found, so it was not scored: {error}")
            continue
        for line in referee(job_of(artifact), text, proof, drawn):
            yield compare_score(record, seed, line) if isinstance(line, Result) else line
    if options.retrain is None:
        yield skip("retrained", "--retrain SEED trains a seed again")
    else:
        drawn_seed = secrets.choice(sorted(record.runs))  # by nobody who sent the record
        seed = drawn_seed if options.retrain == "any" else int(options.retrain)
        yield from retrain(record, seed, options.data, job_of, text)


def check_runs(record: Record, options: VerifyOptions) -> Iterator[Check]:
    """All checks that run anything of a record, on this machine. Raises NoSandbox, VerifierError."""
    if record.track["device"] == "cuda" and not Path("/dev/nvidiactl").exists():
        yield skip("score", "the track's machine has a CUDA GPU, this one has none")
    elif not (record.artifacts or record.addresses) and options.retrain is None:
        yield NO_ARTIFACT
    else:
        try:
            yield from check_by_referee(record, options)
        except DataError as error:  # what is missing here says nothing of a record
            raise VerifierError(str(error)) from None


def verify(
    path: Path,
    options: VerifyOptions,
    since: str = "",
    track: Path | None = None,
    run: Callable[[Record, VerifyOptions], Iterator[Check]] = check_runs,
) -> Iterator[Check]:
    """All checks of one folder. Raises NoSandbox.

    `since`: when it passed those that run it, if that still holds. `track`: of a folder that lies in none.
    `run`: `check_runs`, here or elsewhere.
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
    else:
        yield from run(record, options)
