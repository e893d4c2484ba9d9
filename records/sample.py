"""Text that a record's model writes, for people to look at."""

from collections.abc import Iterator

import numpy as np
import sentencepiece

from data.command import DataError
from records.sandbox import Predictor

UNFINISHED = "\ufffd"  # ends a decoded text whose last character still lacks bytes


def choose(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """A token by float[V]; temperature 0 takes the most probable."""
    if temperature == 0:
        return int(logits.argmax())
    p = np.exp((logits - logits.max()) / temperature)
    return int(rng.choice(len(p), p=p / p.sum()))


def sample(
    predictor: Predictor,
    tokenizer: sentencepiece.SentencePieceProcessor,
    prompt: str,
    count: int,
    temperature: float,
    rng: np.random.Generator,
) -> Iterator[str]:
    """The prompt, and then the text of `count` tokens, whole characters at a time. Raises DataError.

    The BOS is never written again: the document goes on.
    """
    ids = [tokenizer.bos_id(), *tokenizer.encode(prompt)]
    if max(ids) >= predictor.vocab_size:
        raise DataError(f"the tokenizer's ids do not fit the record's vocabulary of {predictor.vocab_size}")
    yield prompt
    shown = tokenizer.decode(ids[1:])
    predictor.start(1)
    for token in ids[:-1]:
        predictor.step(np.array([token]))
    for _ in range(count):
        logits = predictor.step(np.array(ids[-1:]))[0].astype(np.float64)
        logits[ids[0]] = -np.inf
        ids.append(choose(logits, temperature, rng))
        text = tokenizer.decode(ids[1:])
        if not text.endswith(UNFINISHED):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids[1:])[len(shown) :]
