"""The proof: real text compressed by a record's probabilities, and decompressed in a fresh sandbox."""

from collections.abc import Iterator

import numpy as np

from data.command import DataError, UsageError
from records.checks import Check, check
from records.coder import HEAD, compress, decompress, others
from records.jobs import Job
from records.scoring import score, with_windows
from records.text import Text, encode, load_tokenizer

LEAST_PROOF = 16  # bytes of text
PROOF = 0.005  # how much larger than the model's nats the proof may be
PROOF_BYTES = 8  # and by how many bytes more: the coder ends on whole words


def proof_text(text: Text, size: int, rng: np.random.Generator) -> bytes:
    """So many bytes of real validation text from the start of a random document on."""
    whole = b"".join(text.documents)
    starts = np.cumsum([0, *map(len, text.documents)])[:-1]
    fitting = [start for start in starts if start + size <= len(whole)] or [0]
    start = int(rng.choice(fitting))
    return whole[start : start + size].decode(errors="ignore").encode()


def prove(job: Job, text: Text, size: int, rng: np.random.Generator) -> Iterator[Check]:
    """Compress real text, decompress it in a fresh sandbox, compare. Raises SandboxError."""
    if size < LEAST_PROOF:
        raise UsageError(f"--bytes {size}: expected {LEAST_PROOF} at least")
    tokenizer, sample = load_tokenizer(job.tokenizer_path), proof_text(text, size, rng)
    try:
        with job.predictor() as predictor:
            job = with_windows(job, predictor)
            packed, coded = compress(predictor, job.evaluation, tokenizer, job.name, sample)
        with job.predictor() as predictor:
            back = decompress(predictor, job.evaluation.state, tokenizer, job.name, packed)
    except DataError as error:
        yield check("proof", False, str(error))
        return
    yield check(
        "proof",
        back == sample,
        f"{len(sample)} bytes of validation text came back from {len(packed)}, expected the same",
    )
    with job.predictor() as predictor:
        nats = float(score(predictor, encode(tokenizer, [sample]).tokens, job.evaluation)[1:].sum())
    payload, model = len(packed) - HEAD.size, nats / np.log(2) / 8
    yield check(
        "proof-size",
        abs(payload - model) <= PROOF * model + PROOF_BYTES,
        f"{payload} bytes coded, {model:.1f} by nll, "
        f"{coded / np.log(2) / 8:.1f} by logprobs, expected within "
        f"{PROOF:.1%} and {PROOF_BYTES} bytes; " + table(sample, payload),
    )


def table(text: bytes, size: int) -> str:
    """A size beside those of well-known programs."""
    rows = {"bytes": len(text), **others(text), "this model": size}
    return ", ".join(
        f"{name} {value} ({8 * value / max(len(text), 1):.3f} bits per byte)" for name, value in rows.items()
    )
