"""The score: the nats of every token by a record's predictor, summed by the referee. And its proof.

For the proof the text is encoded with the record's probabilities, and decoded in a fresh sandbox.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from data import shards
from data.command import DataError
from records.archive.checks import Check, check, skip
from records.referee.coder import LN2, Charge, Decoder, Predictor, code, stream_starts, table
from records.referee.text import Rules, Text, Tokenizer, decode, encode, load_tokenizer
from records.sandbox import SandboxError

PROOF = 0.001  # how much larger than the model's nats the proof may be
PROOF_BYTES = 8  # and by how many bytes more: the coder ends on whole words
CODER_STEP = 2.0**-24  # the least probability that the coder gives to each token of the vocabulary
BUSY = 1.25  # times its limit: up to there, other programs may have slowed a scoring
TINY = 1e-9  # bits per byte below which a document counts no less


class Sandboxed(Predictor, Protocol):
    """A record's predictor in a process of its own, whose account is exact once it has ended."""

    seconds: float  # of all its processors, its start included
    limits: str  # who counted and bounded it: "cgroup v1", "cgroup v2" or "watchdog"


class Scored(Protocol):
    """What a score needs of a record, its track and this machine: records/sandbox/jobs.py has it."""

    track: Rules
    tokenizer_path: Path
    device: str
    slowness: float  # of this machine beside the track's, before the score

    def predictor(self) -> AbstractContextManager[Sandboxed]: ...

    def measured_slowness(self) -> float: ...

    def second_documents(self) -> list[bytes] | None: ...


@dataclass(frozen=True)
class Result:
    """A score by the referee."""

    job: Scored
    text: Text
    rows: int  # streams that the text was cut into
    vocab_size: int
    nats: np.ndarray  # float64[n], of each token; the first, which everybody knows, is free
    payload: bytes  # the text in the coder's bits, where that was asked for
    seconds: float  # of all processors of the sandbox, its start included
    wall: float  # seconds of the clock, without the start
    limits: str = ""  # who counted and bounded the sandbox

    @property
    def most_payload(self) -> float:
        """Bytes of the bits that nats and the coder's own rounding explain."""
        leak = len(self.nats) * self.vocab_size * CODER_STEP / LN2 / 8
        return (1 + PROOF) * float(self.nats.sum()) / LN2 / 8 + PROOF_BYTES + leak

    @property
    def charged(self) -> float:
        """Nats of the whole text: those of its tokens, or of its bits where these are more than explained.

        Bits that rounding explains are no one's gain, and a score stays the same with and without a proof.
        """
        nats = float(self.nats.sum())
        size = len(self.payload)
        return nats if size <= self.most_payload else max(nats, 8 * size * LN2)

    @property
    def bpb(self) -> float:
        return self.charged / LN2 / max(self.text.bytes, 1)

    def __str__(self) -> str:
        scored = len(self.nats) - 1
        rows = {
            "val_loss": f"{self.charged / max(scored, 1):.8f}",
            "val_bpb": f"{self.bpb:.8f}",
            "val_bytes": self.text.bytes,
            "val_tokens": scored,
            "rows": self.rows,
            "processor_seconds": f"{self.seconds:.2f}",
            "seconds": f"{self.wall:.2f}",
            "limits": self.limits,
        }
        return "\n".join(f"{name}: {value}" for name, value in rows.items())


def score_record(job: Scored, text: Text, coding: bool = False, most_rows: int = shards.IDS) -> Result:
    """Charge the record for the whole text in a sandbox. If `coding`, also encode the text.

    Raises SandboxError, NoSandbox.
    """
    charge = Charge(text.tokens, coding)
    highest = int(text.tokens.max())
    with job.predictor() as predictor:
        size = predictor.vocab_size
        if size <= highest:
            raise SandboxError(
                "contract", f"the predictor has vocab_size {size}, the text has token {highest}"
            )
        rows = min(most_rows, predictor.rows, len(text.tokens))
        began = time.monotonic()
        code(predictor, stream_starts(len(text.tokens), rows), int(text.tokens[0]), charge)
        wall = time.monotonic() - began
    return Result(
        job, text, rows, size, charge.nats, charge.payload(), predictor.seconds, wall, predictor.limits
    )


def check_time(result: Result) -> Check:
    """Processor seconds (for a GPU wall clock) within the track's limit, stretched on a slower machine."""
    job = result.job
    track = job.track
    if job.device != track["device"]:
        return skip("eval-time", f"on {job.device}, the track's machine has {track['device']}")
    stretch = max(job.slowness, job.measured_slowness())  # before the score, and after it
    seconds, kind = result.seconds, "processor seconds"
    if track["device"] == "cuda":
        stretch, seconds, kind = 1, result.wall, "seconds"
    limit = stretch * track["eval_seconds"]
    text = (
        f"{seconds:.2f} {kind} ({result.wall:.2f} by the clock), expected at most {limit:.0f}: "
        f"{track['eval_seconds']} of the track on a machine that is {stretch:.2f} times slower"
    )
    if limit < seconds <= BUSY * limit:
        return skip("eval-time", f"{text}; other programs may have slowed it: score it again without them")
    return check("eval-time", seconds <= limit, text)


# --- the second text --------------------------------------------------------------------------------------


def by_document(result: Result) -> float:
    """Geometric mean of the documents' bits per byte: no large or odd document decides it alone."""
    tokens = result.text.tokens
    nats = np.add.reduceat(result.nats, np.flatnonzero(tokens == tokens[0]))
    bpb = nats / LN2 / [max(len(document), 1) for document in result.text.documents]
    return float(np.exp(np.log(np.maximum(bpb, TINY)).mean()))


def check_second(result: Result, tokenizer: Tokenizer) -> Check:
    """A model that has memorised the public text is worse on other text of its kind.

    Raises DataError, SandboxError.
    """
    documents = result.job.second_documents()
    if documents is None:
        return skip("second-text", "the track has no second text here; --second FILE names one")
    second = encode(tokenizer, documents)
    rows = round(result.rows * len(second.tokens) / len(result.text.tokens))  # streams as long as the text's
    public = by_document(result)
    hidden = by_document(score_record(result.job, second, most_rows=max(1, rows)))
    low, high = result.job.track["second_band"]
    return check(
        "second-text",
        low <= hidden / public <= high,
        f"{hidden:.4f} bits per byte, the mean over {len(documents)} documents that are in no "
        f"shard, is {hidden / public:.3f} times that of the public ones, expected {low} to {high}",
    )


# --- the proof --------------------------------------------------------------------------------------------


def check_proof(result: Result, tokenizer: Tokenizer) -> Iterator[Check]:
    """Decode the text in a fresh sandbox, and compare the code's size with the nats. Raises SandboxError."""
    text = result.text
    starts = stream_starts(len(text.tokens), result.rows)
    try:
        with result.job.predictor() as predictor:
            tokens = code(predictor, starts, tokenizer.bos_id(), Decoder(result.payload))
        same = np.array_equal(tokens, text.tokens) and decode(tokenizer, tokens).documents == text.documents
        found = "came back" if same else "came back as another text"
    except DataError as error:
        same = False
        found = f"did not come back: {error}"
    size = len(result.payload)
    yield check("proof", same, f"{text.bytes} bytes {found} from {size}, expected the same")
    model = float(result.nats.sum()) / LN2 / 8
    yield check(
        "proof-size",
        size <= result.most_payload,
        f"{size} bytes for {model:.1f} by nats, expected at most {result.most_payload:.1f} with the coder's "
        "rounding; " + table(b"".join(text.documents), size),
    )


# --- all of it ----------------------------------------------------------------------------------------------


def referee(job: Scored, text: Text, proof: bool) -> Iterator[Check | Result]:
    """Score, second text and proof; the Result comes first. A SandboxError becomes a FAIL, the last line."""
    try:
        tokenizer = load_tokenizer(job.tokenizer_path)
        result = score_record(job, text, proof)
        yield result
        yield check_time(result)
        yield check_second(result, tokenizer)
        if proof:
            yield from check_proof(result, tokenizer)
        yield check("sandbox", True, "within its limits, expected so")
    except SandboxError as error:
        yield check("sandbox", False, f"{error.kind}: {error}")
