"""Token shards: 1024 bytes of header, then uint16 tokens. data/README.md has the format as a table.

    python data/shards.py inspect FILE|FOLDER...
    python data/shards.py verify  FILE|FOLDER... [--tokenizer MODEL]
    python data/shards.py upgrade FILE|FOLDER...  --tokenizer MODEL
"""
import hashlib
import os
import re
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

# --------------------------------------------------------------------------------------------------
# errors: one line each, naming what is wrong, where, what was expected and what mends it
# --------------------------------------------------------------------------------------------------


class DataError(Exception):
    """The data are not what they should be: exit code 3."""
    exit_code = 3


class UsageError(Exception):
    """The command was called with something impossible: exit code 2."""
    exit_code = 2


# --------------------------------------------------------------------------------------------------
# header
# --------------------------------------------------------------------------------------------------

MAGIC, VERSION = 20240520, 1                  # as llm.c, modded-nanogpt and the challenge write them
EXTENSION, EXTENSION_VERSION = 0x31464C47, 1  # "GLF1"; a legacy shard has 0 in this place
HEADER_BYTES = 1024
MAX_TOKENS = 2**31 - 1                        # the token count is a signed 32-bit integer
LOSSY = 1                                     # flag: the tokens do not give back the text exactly
VAL, TRAIN = 0, 1
SPLIT_NAMES = ("val", "train")
UNKNOWN = bytes(32)                           # a digest that nobody could compute

_LEGACY = struct.Struct("<3iI")
_EXTENDED = struct.Struct("<3iI5iQI3iI32s32s896x")
assert _EXTENDED.size == HEADER_BYTES


@dataclass(frozen=True)
class Header:
    """What a shard says about itself. A legacy shard knows only its number of tokens."""
    tokens: int
    vocab_size: int = 0
    bos_id: int = -1
    documents: int = 0
    max_id: int = 0
    text_bytes: int = 0               # raw UTF-8 bytes of the source documents
    crc32: int = 0                    # of the payload
    index: int = 0
    count: int = 0
    split: int = TRAIN
    flags: int = 0
    tokenizer: bytes = UNKNOWN        # sha256 of the tokenizer file
    corpus: bytes = UNKNOWN           # sha256 identity of the whole corpus, both splits
    legacy: bool = False

    @property
    def lossy(self) -> bool:
        return bool(self.flags & LOSSY)

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + 2 * self.tokens


def pack(h: Header) -> bytes:
    """The 1024 bytes of an extended header."""
    return _EXTENDED.pack(MAGIC, VERSION, h.tokens, EXTENSION, EXTENSION_VERSION, h.vocab_size, h.bos_id,
                          h.documents, h.max_id, h.text_bytes, h.crc32, h.index, h.count, h.split, h.flags,
                          h.tokenizer, h.corpus)


def parse(raw: bytes, where: object) -> Header:
    """Read the first 1024 bytes of a shard; `where` names it in errors. Raises DataError."""
    if len(raw) < HEADER_BYTES:
        raise DataError(f"{where}: header has {len(raw)} bytes, expected {HEADER_BYTES}")
    magic, version, tokens, extension = _LEGACY.unpack_from(raw)
    if magic != MAGIC:
        swapped = " (the bytes are in big-endian order)" if raw[:4] == struct.pack(">i", MAGIC) else ""
        raise DataError(f"{where}: magic number is {magic}, expected {MAGIC}{swapped}")
    if version != VERSION:
        raise DataError(f"{where}: format version is {version}, expected {VERSION}")
    if tokens < 0:
        raise DataError(f"{where}: header counts {tokens} tokens, expected 0 or more")
    if extension == 0:
        return Header(tokens, legacy=True)
    if extension != EXTENSION:
        raise DataError(f"{where}: extension mark is {extension:#x}, expected {EXTENSION:#x} or 0")
    _, _, _, _, extension_version, *fields = _EXTENDED.unpack_from(raw)
    if extension_version != EXTENSION_VERSION:
        raise DataError(f"{where}: extension version is {extension_version}, expected {EXTENSION_VERSION}")
    return Header(tokens, *fields)


# --------------------------------------------------------------------------------------------------
# reading and writing
# --------------------------------------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """Header of the shard at `path`, its exact file size checked against it. Raises DataError."""
    try:
        with open(path, "rb") as file:
            header = parse(file.read(HEADER_BYTES), path)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), expected a shard") from error
    if size != header.file_bytes:
        raise DataError(f"{path}: file has {size} bytes, expected {header.file_bytes} "
                        f"({HEADER_BYTES} of header and 2 for each of {header.tokens} tokens)")
    return header


def read_shard(path: Path) -> tuple[Header, np.ndarray]:
    """Header and memory-mapped tokens, uint16 [tokens]. Raises DataError."""
    header = read_header(path)
    if not header.tokens:                     # an empty file range cannot be mapped
        return header, np.zeros(0, np.uint16)
    return header, np.memmap(path, np.dtype("<u2"), "r", HEADER_BYTES, (header.tokens,))


def sync(file) -> None:
    """Put a file's bytes on the disk, so that no rename can overtake them."""
    file.flush()
    os.fsync(file.fileno())


def write_beside(path: Path, data: bytes) -> None:
    """Write a small file so that `path` holds the old bytes or the new ones, never a part."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(data)
        sync(file)
    os.replace(partial, path)


class ShardWriter:
    """Write one shard as its documents come; it has its name only once it is whole.

    `header` holds what is known beforehand; tokens, documents, bytes, highest id and crc are counted here.
    """

    def __init__(self, path: Path, header: Header):
        self.path, self.partial, self.header = path, path.with_name(path.name + ".partial"), header
        self.file = open(self.partial, "wb")
        self.file.write(bytes(HEADER_BYTES))

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append one document: uint16 [n], BOS first, made from `text_bytes` bytes of text."""
        h, payload = self.header, np.ascontiguousarray(tokens, dtype="<u2")
        self.file.write(payload)
        self.header = replace(h, tokens=h.tokens + payload.size, documents=h.documents + 1,
                              text_bytes=h.text_bytes + text_bytes, crc32=zlib.crc32(payload, h.crc32),
                              max_id=max(h.max_id, int(payload.max())))

    def close(self) -> None:
        """Fill in the header and give the file its name."""
        self.file.seek(0)
        self.file.write(pack(self.header))
        sync(self.file)
        self.file.close()
        os.replace(self.partial, self.path)


def write_shard(path: Path, documents: list[np.ndarray], text_bytes: list[int], header: Header) -> Header:
    """Write one whole shard from token arrays; returns the header as completed by the count."""
    writer = ShardWriter(path, header)
    for tokens, size in zip(documents, text_bytes, strict=True):
        writer.add(tokens, size)
    writer.close()
    return writer.header


def file_sha256(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


# --------------------------------------------------------------------------------------------------
# names: <set>_<split>_<index>.bin
# --------------------------------------------------------------------------------------------------

_NAME = re.compile(r"(?P<set>.+)_(?P<split>val|train)_(?P<index>\d+)\.bin")


def shard_name(name: str, split: int, index: int) -> str:
    return f"{name}_{SPLIT_NAMES[split]}_{index:06d}.bin"


def parse_name(path: Path) -> tuple[str, int, int] | None:
    """(set, split, index) that a file name claims, or None where it follows no such pattern."""
    match = _NAME.fullmatch(path.name)
    return match and (match["set"], SPLIT_NAMES.index(match["split"]), int(match["index"]))


# --------------------------------------------------------------------------------------------------
# tokenizer
# --------------------------------------------------------------------------------------------------


class Tokenizer:
    """A SentencePiece model with what the shards need to know of it.

    sha256: of the file; vocab_size, bos_id: ints; piece_bytes: int64 [V], bytes of text that each piece
    stands for (control and unknown 0); opens_with_space: bool [V]; drops_first_space: whether decoding
    swallows the space that opens a document. Raises DataError where the file is no usable model.
    """

    def __init__(self, path: Path):
        import sentencepiece                  # 0.1 s that reading headers need not pay
        try:
            model = Path(path).read_bytes()
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: no SentencePiece model ({str(error).splitlines()[0]})") from error
        sp = self.processor
        self.path, self.sha256 = Path(path), hashlib.sha256(model).digest()
        self.vocab_size, self.bos_id = sp.vocab_size(), sp.bos_id()
        if self.bos_id < 0:
            raise DataError(f"{path}: the tokenizer has no BOS piece, and every document starts with one")
        self.piece_bytes = np.array([self._bytes_of(i) for i in range(self.vocab_size)], np.int64)
        self.opens_with_space = np.array([not sp.is_control(i) and sp.id_to_piece(i).startswith("\u2581")
                                          for i in range(self.vocab_size)])
        opener = np.flatnonzero(self.opens_with_space)[:1].tolist()
        self.drops_first_space = bool(opener) and not sp.decode(opener).startswith(" ")

    def _bytes_of(self, i: int) -> int:
        sp = self.processor
        if sp.is_control(i) or sp.is_unknown(i):
            return 0
        return 1 if sp.is_byte(i) else len(sp.id_to_piece(i).replace("\u2581", " ").encode())

    def text_bytes(self, tokens: np.ndarray) -> int:
        """Bytes of the text that `tokens` (uint16 [n], whole documents) decode to."""
        total = int(self.piece_bytes[tokens].sum())
        if self.drops_first_space:
            first = tokens[1:][tokens[:-1] == self.bos_id]
            total -= int(self.opens_with_space[first].sum())
        return total
