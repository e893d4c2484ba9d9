"""Text that a record's model writes, for people to look at."""

from collections.abc import Iterator

import numpy as np
import sentencepiece

from data.command import DataError
from records.sandbox import Predictor

CONTEXT = 512  # tokens that the model sees at most: each new token costs a pass over all of them
UNFINISHED = "\ufffd"  # ends a decoded text whose last character still lacks bytes


def choose(logprobs: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """A token by float[V] nats; temperature 0 takes the most probable. Raises DataError."""
    if not np.isfinite(logprobs.max()):
        raise DataError("the record's probabilities are not finite")
    if temperature == 0:
        return int(logprobs.argmax())
    p = np.exp((logprobs - logprobs.max()) / temperature)
    return int(rng.choice(len(p), p=p / p.sum()))


def write_tokens(
    predictor: Predictor, ids: list[int], count: int, temperature: float, rng: np.random.Generator
) -> Iterator[int]:
    """So many tokens after `ids`, whose first, the BOS, is never written again: the document goes on."""
    ids, bos = list(ids), ids[0]
    for _ in range(count):
        seen = ids[-min(predictor.max_len, CONTEXT) :]
        logprobs = predictor.logprobs(np.array([seen]), len(seen) - 1)[0, 0].astype(np.float64)
        logprobs[bos] = -np.inf
        ids.append(choose(logprobs, temperature, rng))
        yield ids[-1]


def sample(
    predictor: Predictor,
    tokenizer: sentencepiece.SentencePieceProcessor,
    prompt: str,
    count: int,
    temperature: float,
    rng: np.random.Generator,
) -> Iterator[str]:
    """The prompt, and then the text of `count` tokens, whole characters at a time. Raises DataError."""
    ids = [tokenizer.bos_id(), *tokenizer.encode(prompt)]
    if max(ids) >= predictor.vocab_size:
        raise DataError(f"the tokenizer's ids do not fit the record's vocabulary of {predictor.vocab_size}")
    yield prompt
    shown = tokenizer.decode(ids[1:])
    for token in write_tokens(predictor, ids, count, temperature, rng):
        ids.append(token)
        text = tokenizer.decode(ids[1:])
        if not text.endswith(UNFINISHED):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids[1:])[len(shown) :]
