"""Text to nats, to bits and back by a record's own probabilities: the proof is the score.

A text's tokens are cut into contiguous streams. At each step the record gives the logits of the next token
of every stream. Once the referee has its own copy of them, the record is fed the token that comes. The copy
is normalised in float64, and the token charged. An arithmetic coder (the package constriction) spends
-log2 p bits on a token that has probability p. The decoder makes the same calls, so that its floats agree bit
for bit.
"""

import bz2
import gzip
import lzma
import math
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import constriction
import numpy as np
import zstandard

from data.command import DataError, advancing
from records.referee.text import Tokenizer, encode

LN2 = math.log(2)
HEAD = struct.Struct("<4s8sIIII")  # magic, record, rows, tokens, bytes and crc32 of the text
MAGIC = b"BGc2"
MAX_TOKENS = 1 << 24  # of one compressed file
STREAM_TOKENS = 2048  # a file is cut into streams of no fewer: what stands before is no context across a cut
Coder = Callable[[np.ndarray, np.ndarray], np.ndarray]  # logits float32[k, V], places int64[k] -> int64[k]
CATEGORICAL = constriction.stream.model.Categorical(perfect=False)


class Predictor(Protocol):
    """A record's model; records/referee/README.md has its contract."""

    vocab_size: int
    rows: int

    def start(self, rows: int) -> np.ndarray: ...

    def step(self, ids: np.ndarray) -> np.ndarray: ...


def weigh(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[k, V] logits -> (float64[k, V] unnormalised probabilities, float32[k, 1] largest logits)."""
    top = logits.max(1, keepdims=True)
    weights = np.subtract(logits, top, dtype=np.float64)
    np.exp(weights, out=weights)
    return weights, top


class Charge:
    """A coder for known tokens. If `writing`, it also encodes them.

    It charges in a thread, while the record computes its next answer. So the logits that it is called with
    must stay as they are until it was called once more.
    """

    def __init__(self, tokens: np.ndarray, writing: bool = False):
        self.tokens = tokens
        self.charged = np.zeros(len(tokens))
        self.stream = constriction.stream.queue.RangeEncoder() if writing else None
        self.thread = ThreadPoolExecutor(1, "charge")
        self.work: Future[Any] = self.thread.submit(int)  # what was called for last

    def __call__(self, logits: np.ndarray, places: np.ndarray) -> np.ndarray:
        ids: np.ndarray = self.tokens[places].astype(np.int64)
        self.work.result()
        self.work = self.thread.submit(self.charge, logits, places, ids)
        return ids

    @property
    def nats(self) -> np.ndarray:
        """float64[n]: what each token costs."""
        self.work.result()
        return self.charged

    def charge(self, logits: np.ndarray, places: np.ndarray, ids: np.ndarray) -> None:
        """Add what tokens cost, and encode them."""
        weights, top = weigh(logits)
        below = np.subtract(top[:, 0], logits[np.arange(len(ids)), ids], dtype=np.float64)
        # the two small numbers alone: beside a logit of 1e17 the logarithm would be lost
        self.charged[places] = np.log(weights.sum(1)) + below
        if self.stream is not None:
            self.stream.encode(ids.astype(np.int32), CATEGORICAL, weights)

    def payload(self) -> bytes:
        """The encoded tokens; empty if not `writing`."""
        self.work.result()
        if self.stream is None:
            return b""
        words: np.ndarray = self.stream.get_compressed()
        return words.astype(">u4").tobytes().rstrip(b"\0")


class Decoder:
    """A coder that decodes tokens. Raises DataError for bits that no encoder has written."""

    def __init__(self, payload: bytes):
        filled = payload + bytes(-len(payload) % 4 + 8)
        self.stream = constriction.stream.queue.RangeDecoder(np.frombuffer(filled, ">u4").astype(np.uint32))

    def __call__(self, logits: np.ndarray, places: np.ndarray) -> np.ndarray:
        try:
            ids: np.ndarray = self.stream.decode(CATEGORICAL, weigh(logits)[0])
        except AssertionError as error:
            raise DataError(f"damaged: {error}") from None
        return ids.astype(np.int64)


def stream_starts(total: int, rows: int) -> np.ndarray:
    """int64[rows + 1]: where each stream starts, and the end. The longer ones come first."""
    lengths = total // rows + (np.arange(rows) < total % rows)
    return np.concatenate([[0], np.cumsum(lengths)])


def code(predictor: Predictor, starts: np.ndarray, bos: int | None, coder: Coder) -> np.ndarray:
    """int64[n]: all tokens of the streams that begin at `starts`, from the calls of a predictor and a coder.

    The coder names the token at each place. Only `bos`, if the text begins with it, is free. A stream that
    has ended is fed zeros.
    """
    rows = len(starts) - 1
    lengths = np.diff(starts)
    tokens = np.zeros(starts[-1], np.int64)
    tokens[:1] = bos or 0
    fed = np.zeros(rows, np.int64)
    for at in advancing(range(lengths[0]), f"the text in {rows} streams"):
        logits = predictor.step(fed) if at else predictor.start(rows)
        active = np.count_nonzero(lengths > at)  # the first ones
        free = int(at == 0 and bos is not None)
        places = starts[free:active] + at
        if len(places):
            tokens[places] = coder(logits[free:active], places)
        fed[active:] = 0
        fed[:active] = tokens[starts[:active] + at]
    return tokens


# --- files ------------------------------------------------------------------------------------------------


def compress(predictor: Predictor, tokenizer: Tokenizer, record: bytes, text: bytes) -> bytes:
    """A compressed file. `record`: the eight bytes that identify the record. Raises DataError."""
    try:
        tokens = encode(tokenizer, [text]).tokens
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start} is no UTF-8: these models know text only") from None
    if tokens.max() >= predictor.vocab_size or len(tokens) > MAX_TOKENS:
        raise DataError(
            f"the text has {len(tokens)} tokens up to {tokens.max()}, the record's vocabulary "
            f"ends at {predictor.vocab_size - 1}, and {MAX_TOKENS} tokens are the most"
        )
    rows = max(1, min(predictor.rows, len(tokens) // STREAM_TOKENS))
    encoder = Charge(tokens, writing=True)
    code(predictor, stream_starts(len(tokens), rows), tokenizer.bos_id(), encoder)
    return HEAD.pack(MAGIC, record, rows, len(tokens), len(text), zlib.crc32(text)) + encoder.payload()


def decompress(predictor: Predictor, tokenizer: Tokenizer, record: bytes, data: bytes) -> bytes:
    """The text of a compressed file. Raises DataError if it is damaged, or another record's."""
    if len(data) < HEAD.size or data[:4] != MAGIC:
        raise DataError("no file that python -m records compress has written")
    _, theirs, rows, total, size, crc32 = HEAD.unpack_from(data)
    if theirs != record:
        raise DataError(f"was compressed by the record {theirs.hex()}, this is {record.hex()}")
    if not (1 <= rows <= predictor.rows and rows <= total <= min(size + 1, MAX_TOKENS)):
        raise DataError("damaged: its header is impossible")
    tokens = code(predictor, stream_starts(total, rows), tokenizer.bos_id(), Decoder(data[HEAD.size :]))
    if tokens.max() >= tokenizer.vocab_size():
        raise DataError("damaged: holds a token that the tokenizer does not know")
    text: bytes = tokenizer.decode(tokens[1:].tolist()).encode()
    if len(text) != size or zlib.crc32(text) != crc32:
        raise DataError(
            f"what was decompressed has {len(text)} bytes and crc32 {zlib.crc32(text):08x}, expected {size} "
            f"and {crc32:08x}: damaged, or this machine computes other floats than the one that compressed"
        )
    return text


def table(text: bytes, size: int) -> str:
    """A table: a compressed size beside those of well-known programs for the same text."""
    sizes = {
        "bytes": len(text),
        "gzip -9": len(gzip.compress(text, 9)),
        "bzip2 -9": len(bz2.compress(text, 9)),
        "xz -9e": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
        "zstd -19": len(zstandard.ZstdCompressor(level=19).compress(text)),
        "this model": size,
    }
    bits = 8 / max(len(text), 1)
    return ", ".join(f"{name} {value} ({bits * value:.3f} bits per byte)" for name, value in sizes.items())
