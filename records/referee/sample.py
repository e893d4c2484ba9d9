"""Text that a record's model writes, for people to look at."""

import codecs
from collections.abc import Iterator

import numpy as np

from data.command import DataError
from records.referee.coder import Predictor
from records.referee.text import Tokenizer

SPACE = "\u2581"  # stands for a space in SentencePiece's pieces


def choose(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """Draw a token from the logits float[V]; temperature 0 takes the most probable."""
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # the least of temperatures
        p = np.exp((logits - logits.max()) / temperature)
    return int(rng.choice(len(p), p=p / p.sum()))


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """The UTF-8 bytes of a token. A byte piece is one byte, which may be a part of a character."""
    if tokenizer.is_control(token):
        return b""
    piece = tokenizer.id_to_piece(token)
    if tokenizer.is_byte(token):
        return bytes.fromhex(piece[3:5])  # <0xF0>
    return piece.replace(SPACE, " ").encode()


def sample(
    predictor: Predictor,
    tokenizer: Tokenizer,
    prompt: list[int],
    count: int,
    temperature: float,
    rng: np.random.Generator,
) -> Iterator[str]:
    """The text of `count` tokens that the model writes after the `prompt`, whole characters at a time.

    Bytes that cannot be part of a character become U+FFFD. The BOS is never drawn, so the document goes on.
    Raises DataError.
    """
    bos = tokenizer.bos_id()
    if max([bos, *prompt]) >= predictor.vocab_size:
        raise DataError(f"the tokenizer's ids do not fit the record's vocabulary of {predictor.vocab_size}")
    predictor.start(1)
    *before, token = bos, *prompt
    for each in before:
        predictor.step(np.array([each]))
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    for _ in range(count):
        weights = predictor.step(np.array([token]))[0].astype(np.float64)
        weights[[bos, *range(tokenizer.vocab_size(), len(weights))]] = -np.inf
        token = choose(weights, temperature, rng)
        yield characters.decode(bytes_of(tokenizer, token))
    yield characters.decode(b"", final=True)
