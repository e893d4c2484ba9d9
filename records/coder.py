"""Text to bytes and back by a record's own probabilities: the proof that its score is one.

An arithmetic coder (the package constriction) spends -log2 p bits on a token to which the model gives p. The
decoder knows only what it has decoded so far, so whatever a model cannot really predict, it cannot decode
either. Encoder and decoder make the same calls, one for each token, so that their floats agree bit for bit.
"""

import bz2
import gzip
import lzma
import math
import struct
import zlib
from dataclasses import dataclass, field

import numpy as np

from data.command import DataError

LN2 = math.log(2)
HEAD = struct.Struct(
    "<4s8sIIIIII"
)  # magic, record, window, stride, rows, tokens, bytes and crc32 of the text
MAGIC = b"BGc1"
MAX_TOKENS = 1 << 24  # of one compressed file: each is a call of the model
PAD = 64  # contexts are filled up to a multiple of it: few shapes, same floats


@dataclass(frozen=True)
class Evaluation:
    """How a text is cut into windows. As in submission.json."""

    window: int
    stride: int
    rows: int
    state: str = "none"

    def windows(self, total: int) -> np.ndarray:
        """int64[n, 3]: (start, first scored, end). A window reads tokens start .. end and scores the targets
        first .. end; it moves by `stride`, and only the first scores all it sees, each later one what is new.
        """
        window, stride = min(self.window, total - 1), min(self.stride, total - 1)
        starts = np.arange(1 + max(0, -(-(total - 1 - window) // stride)), dtype=np.int64) * stride
        ends = np.minimum(starts + window, total - 1)
        return np.stack([starts, np.concatenate([[1], ends[:-1] + 1]), ends], axis=1)

    def read(self, tokens: np.ndarray, windows: np.ndarray) -> np.ndarray:
        """int64[n, window + 1]: what the windows read. Past its end a row repeats its last token."""
        width = min(self.window, len(tokens) - 1)
        place = windows[:, :1] + np.arange(width + 1)
        return tokens[np.minimum(place, windows[:, 2:])].astype(np.int64)


@dataclass
class Encoder:
    """Takes known symbols. `nats`: what the probabilities say that they cost."""

    known: np.ndarray
    at: int = 1
    nats: float = 0.0

    def __post_init__(self):
        import constriction

        self.stream = constriction.stream.queue.RangeEncoder()
        self.model = constriction.stream.model.Categorical

    def code(self, p: np.ndarray) -> int:
        symbol = int(self.known[self.at])
        self.stream.encode(symbol, self.model(p, perfect=False))
        self.nats -= float(np.log(max(p[symbol], 1e-300)))
        self.at += 1
        return symbol

    def payload(self) -> bytes:
        return self.stream.get_compressed().astype(">u4").tobytes().rstrip(b"\0")


@dataclass
class Decoder:
    """Gives symbols back."""

    payload: bytes
    words: np.ndarray = field(init=False)

    def __post_init__(self):
        import constriction

        filled = self.payload + bytes(-len(self.payload) % 4 + 8)
        self.words = np.frombuffer(filled, ">u4").astype(np.uint32)
        self.stream = constriction.stream.queue.RangeDecoder(self.words)
        self.model = constriction.stream.model.Categorical

    def code(self, p: np.ndarray) -> int:
        return int(self.stream.decode(self.model(p, perfect=False)))


def code(predictor, evaluation: Evaluation, bos: int, total: int, coder: Encoder | Decoder) -> np.ndarray:
    """uint16[total]: BOS and what the coder makes of each next token's distribution."""
    tokens, windows = np.zeros(total, np.uint16), evaluation.windows(total)
    tokens[0] = bos
    for number, (start, first, end) in enumerate(windows):
        for target in range(first, end + 1):
            length = target - start
            ids = np.zeros((1, min(-(-length // PAD) * PAD, evaluation.window)), np.int64)
            ids[0, :length] = tokens[start:target]
            logp = predictor.logprobs(ids, length - 1, length)[0, 0].astype(np.float64)
            p = np.exp(logp)
            if not np.isfinite(p).all() or not 0.99 < p.sum() < 1.01:
                raise DataError(f"token {target}: the record's probabilities sum to {p.sum():g}, expected 1")
            tokens[target] = coder.code(p / p.sum())
        if evaluation.state == "adapt" and (number + 1) % evaluation.rows == 0:
            predictor.adapt(evaluation.read(tokens, windows[number + 1 - evaluation.rows : number + 1]))
    return tokens


def compress(predictor, evaluation: Evaluation, tokenizer, record: bytes, text: bytes) -> tuple[bytes, float]:
    """(compressed file, nats of its tokens by the model's own probabilities). `record`: bytes[8], names
    it."""
    try:
        ids = tokenizer.encode(text.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start} is no UTF-8: these models know text only") from None
    if tokenizer.decode(ids).encode() != text:
        raise DataError("the tokenizer does not give this text back")
    tokens = np.array([tokenizer.bos_id(), *ids], np.uint16)
    if tokens.max() >= predictor.vocab_size or len(tokens) > MAX_TOKENS:
        raise DataError(
            f"the text has {len(tokens)} tokens up to {tokens.max()}, the record's vocabulary "
            f"ends at {predictor.vocab_size - 1}, and {MAX_TOKENS} tokens are the most"
        )
    encoder = Encoder(tokens)
    if len(tokens) > 1:
        code(predictor, evaluation, tokenizer.bos_id(), len(tokens), encoder)
    head = HEAD.pack(
        MAGIC,
        record,
        evaluation.window,
        evaluation.stride,
        evaluation.rows,
        len(tokens),
        len(text),
        zlib.crc32(text),
    )
    return head + (encoder.payload() if len(tokens) > 1 else b""), encoder.nats


def decompress(predictor, state: str, tokenizer, record: bytes, data: bytes) -> bytes:
    """The text of a compressed file. Raises DataError if it is damaged, or another record's."""
    if len(data) < HEAD.size or data[:4] != MAGIC:
        raise DataError("no file that records.referee compress has written")
    _, theirs, window, stride, rows, total, size, crc32 = HEAD.unpack_from(data)
    if theirs != record:
        raise DataError(f"was compressed by the record {theirs.hex()}, this is {record.hex()}")
    if not (0 < stride <= window <= 1 << 20 and rows > 0 and 0 < total <= min(size + 1, MAX_TOKENS)):
        raise DataError("damaged: its header is impossible")
    tokens = np.array([tokenizer.bos_id()])
    if total > 1:
        try:
            tokens = code(
                predictor,
                Evaluation(window, stride, rows, state),
                tokenizer.bos_id(),
                total,
                Decoder(data[HEAD.size :]),
            )
        except AssertionError as error:  # constriction's word for data that no encoder has written
            raise DataError(f"damaged: {error}") from None
    if tokens.max() >= tokenizer.vocab_size():
        raise DataError("damaged: holds a token that the tokenizer does not know")
    text = tokenizer.decode(tokens[1:].tolist()).encode()
    if len(text) != size or zlib.crc32(text) != crc32:
        raise DataError(
            f"what was decompressed has {len(text)} bytes and crc32 {zlib.crc32(text):08x}, expected {size} "
            f"and {crc32:08x}: damaged, or this machine computes other floats than the one that compressed"
        )
    return text


def others(text: bytes) -> dict[str, int]:
    """Sizes that well-known programs make of the same bytes."""
    import zstandard

    return {
        "gzip -9": len(gzip.compress(text, 9)),
        "bzip2 -9": len(bz2.compress(text, 9)),
        "xz -9e": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
        "zstd -19": len(zstandard.ZstdCompressor(level=19).compress(text)),
    }


def bits_per_byte(nats: float, size: int) -> float:
    return nats / LN2 / max(size, 1)
