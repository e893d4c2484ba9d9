"""The score: nats of every token by a record's predictor, summed by the referee."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from records.checks import Check, check
from records.coder import Evaluation, bits_per_byte
from records.jobs import Job
from records.sandbox import Predictor
from records.text import Text

LEAST = -1e-3  # nats of a token: rounding may take a certain one below 0


def read_batches(tokens: np.ndarray, evaluation: Evaluation) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(windows, ids) of each call. All calls have one shape: rows of zeros fill the last one up."""
    windows = evaluation.windows(len(tokens))
    rows = min(evaluation.rows, len(windows))
    for at in range(0, len(windows), rows):
        part = windows[at : at + rows]
        ids = evaluation.read(tokens, part)
        yield part, np.pad(ids, ((0, rows - len(ids)), (0, 0)))


def score(
    predictor: Predictor, tokens: np.ndarray, evaluation: Evaluation, batches: range | None = None
) -> np.ndarray:
    """float64[n]: nats of each token, written once; the first, and what is in no batch of `batches` (default:
    all), stays nan."""
    nats = np.full(len(tokens), np.nan)
    for number, (windows, ids) in enumerate(read_batches(tokens, evaluation)):
        if batches is not None and number not in batches:
            continue
        found = predictor.nll(ids)
        for (start, first, end), row in zip(windows, found):
            assert np.isnan(nats[first : end + 1]).all(), "a token is scored once"
            nats[first : end + 1] = row[first - start - 1 : end - start]
        if evaluation.state == "adapt":
            predictor.adapt(ids[: len(windows)])  # every token of it has its score by now
    return nats


def with_windows(job: Job, predictor: Predictor) -> Job:
    """The job with windows as long as the predictor takes, where nothing was declared."""
    if job.evaluation.window:
        return job
    window = min(predictor.max_len, 4096)
    state = "adapt" if predictor.adapts else "none"
    return replace(job, evaluation=Evaluation(window, window, max(1, 16384 // window), state))


@dataclass(frozen=True)
class Result:
    """A score by the referee."""

    job: Job
    nats: np.ndarray
    bpb: float
    loss: float
    seconds: float  # of the referee's clock, without starting the process
    said: str  # the last that the record wrote to stdout


def score_record(job: Job, text: Text) -> tuple[Result, list[Check]]:
    """Score the whole text in a sandbox. Raises SandboxError, NoSandbox."""
    with job.predictor(compiling=True) as predictor:
        job = with_windows(job, predictor)
        checks = [
            check(
                "contract",
                predictor.vocab_size > int(text.tokens.max())
                and predictor.max_len >= job.evaluation.window
                and (job.evaluation.state == "none" or predictor.adapts),
                f"vocab_size {predictor.vocab_size}, max_len {predictor.max_len}, adapt {predictor.adapts}; "
                f"expected a vocabulary above {int(text.tokens.max())} and what {job.evaluation} needs",
            )
        ]
        if checks[0].verdict == "FAIL":
            return Result(job, np.full(len(text.tokens), np.nan), np.nan, np.nan, 0.0, ""), checks
        began = time.monotonic()
        nats = score(predictor, text.tokens, job.evaluation)
        seconds, said = time.monotonic() - began, predictor.said
    good = np.isfinite(nats[1:]).all() and (nats[1:] >= LEAST).all()
    checks.append(
        check(
            "finite",
            bool(good),
            f"nats from {nats[1:].min():.6g} to {nats[1:].max():.6g}, expected finite numbers, none below 0",
        )
    )
    total = float(nats[1:].sum())
    limit = job.track["eval_seconds"]
    checks.append(
        check("eval-time", seconds <= limit, f"scored in {seconds:.1f} s, expected at most {limit} s")
    )
    return Result(job, nats, bits_per_byte(total, text.bytes), total / (len(nats) - 1), seconds, said), checks
