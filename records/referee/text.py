"""Documents and their tokens, and the bytes of text that a score is divided by."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece

from data import shards
from data.command import DataError, nearest
from data.files import sha256

Tokenizer = sentencepiece.SentencePieceProcessor


class Rules(Protocol):
    """What a score needs of a track: its rules by name, and its text with one vocabulary."""

    dataset: dict[str, Any]

    def __getitem__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Text:
    """Documents and their tokens. A document's tokens are a BOS and what the tokenizer makes of it."""

    documents: list[bytes]
    tokens: np.ndarray  # uint16[n], of all documents end to end

    @cached_property
    def bytes(self) -> int:
        """Raw UTF-8 bytes: what a score is divided by."""
        return sum(map(len, self.documents))

    @property
    def sha256(self) -> str:
        """sha256 over the sha256 of each document in order, as in the manifest."""
        return sha256(b"".join(hashlib.sha256(text).digest() for text in self.documents))


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises DataError."""
    if not path.exists():
        mend = "; python -m data prepare demo makes the demo's, --data names another folder"
        raise DataError(f"{path}: no such file{nearest(path) or mend}")
    return shards.Tokenizer(path).processor


def decode(tokenizer: Tokenizer, tokens: np.ndarray) -> Text:
    """The documents that the tokens decode to; each begins with a BOS. Raises DataError."""
    starts = np.flatnonzero(tokens == tokenizer.bos_id())
    if not len(tokens) or not len(starts) or starts[0] or int(tokens.max()) >= tokenizer.vocab_size():
        raise DataError(
            "the tokens are not this tokenizer's: expected a BOS first and ids below "
            f"{tokenizer.vocab_size()}; python -m data verify DATASET says more"
        )
    parts = np.split(tokens, starts[1:])
    texts = tokenizer.decode([part[1:].tolist() for part in parts])
    return Text([text.encode() for text in texts], tokens)


def encode(tokenizer: Tokenizer, documents: list[bytes]) -> Text:
    """Tokens of documents. Raises DataError where the tokenizer does not give a document back."""
    ids = tokenizer.encode([text.decode() for text in documents])
    for text, back in zip(documents, tokenizer.decode(ids)):
        if back.encode() != text:
            raise DataError(f"the tokenizer does not give back a document that begins {text[:40]!r}")
    rows = [[tokenizer.bos_id(), *row] for row in ids]
    return Text(documents, np.array([i for row in rows for i in row], np.uint16))


def validation_text(track: Rules, data: Path) -> Text:
    """The track's validation text. Raises DataError if it is another text."""
    folder = data / "datasets" / track.dataset["name"]
    tokenizer = load_tokenizer(data / "tokenizers" / track.dataset["tokenizer"])
    tokens = shards.read_split(folder, "val")
    text = decode(tokenizer, tokens)
    for name, found in (("val_sha256", text.sha256), ("logged_val_sha256", sha256(tokens.data))):
        if (expected := track.dataset[name]) not in (None, found):
            raise DataError(f"{folder}: the validation text has {name} {found}, expected {expected}")
    return text
