"""Token shards: 1024 bytes of header, then uint16 tokens. data/README.md has the format as a table.

python -m data.shards inspect FILE|FOLDER...
python -m data.shards verify  FILE|FOLDER... [--tokenizer MODEL]
python -m data.shards upgrade FILE|FOLDER...  --tokenizer MODEL
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
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

MAGIC, VERSION = 20240520, 1  # as llm.c, modded-nanogpt and the challenge write them
EXTENSION, EXTENSION_VERSION = 0x31464C47, 1  # "GLF1"; a legacy shard has 0 in this place
HEADER_BYTES = 1024
IDS = 2**16  # what uint16 can tell apart
MAX_TOKENS = 2**31 - 1  # the token count is a signed 32-bit integer
LOSSY = 1  # flag: the tokens do not give back the text exactly
VAL, TRAIN = 0, 1
SPLIT_NAMES = ("val", "train")
UNKNOWN = bytes(32)  # a digest that nobody could compute

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
    text_bytes: int = 0  # raw UTF-8 bytes of the source documents
    crc32: int = 0  # of the payload
    index: int = 0
    count: int = 0
    split: int = TRAIN
    flags: int = 0
    tokenizer: bytes = UNKNOWN  # sha256 of the tokenizer file
    corpus: bytes = UNKNOWN  # sha256 identity of the whole corpus, both splits
    legacy: bool = False

    @property
    def lossy(self) -> bool:
        return bool(self.flags & LOSSY)

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + 2 * self.tokens


def pack(h: Header) -> bytes:
    """The 1024 bytes of an extended header."""
    return _EXTENDED.pack(
        MAGIC,
        VERSION,
        h.tokens,
        EXTENSION,
        EXTENSION_VERSION,
        h.vocab_size,
        h.bos_id,
        h.documents,
        h.max_id,
        h.text_bytes,
        h.crc32,
        h.index,
        h.count,
        h.split,
        h.flags,
        h.tokenizer,
        h.corpus,
    )


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
    if tokens < 1:
        raise DataError(f"{where}: header counts {tokens} tokens, expected 1 or more")
    if extension == 0:
        return Header(tokens, legacy=True)
    if extension != EXTENSION:
        raise DataError(f"{where}: extension mark is {extension:#x}, expected {EXTENSION:#x} or 0")
    _, _, _, _, extension_version, *fields = _EXTENDED.unpack_from(raw)
    if extension_version != EXTENSION_VERSION:
        raise DataError(f"{where}: extension version is {extension_version}, expected {EXTENSION_VERSION}")
    header = Header(tokens, *fields)
    if not (0 <= header.bos_id < header.vocab_size <= IDS and header.split in (VAL, TRAIN)):
        raise DataError(
            f"{where}: BOS id {header.bos_id}, vocabulary size {header.vocab_size}, split "
            f"{header.split}; expected BOS id < vocabulary size <= {IDS} and split 0 or 1"
        )
    return header


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
        raise DataError(
            f"{path}: file has {size} bytes, expected {header.file_bytes} "
            f"({HEADER_BYTES} of header and 2 for each of {header.tokens} tokens)"
        )
    return header


def open_shard(path: Path) -> tuple[Header, np.ndarray]:
    """Header and memory-mapped tokens, uint16 [tokens]. Raises DataError."""
    header = read_header(path)
    return header, np.memmap(path, np.dtype("<u2"), "r", HEADER_BYTES, (header.tokens,))


def read_shard(path: Path) -> np.ndarray:
    """Tokens of one shard in memory, uint16 [tokens]: header, size and checksum hold. Raises DataError.

    A legacy shard has no checksum.
    """
    header, mapped = open_shard(path)
    tokens = np.array(mapped)
    if not header.legacy and zlib.crc32(tokens) != header.crc32:
        raise DataError(
            f"{path}: crc32 is {zlib.crc32(tokens):08x}, expected {header.crc32:08x}, as its header "
            "has it; make or fetch the dataset again"
        )
    return tokens


def read_split(folder: Path, split: str) -> np.ndarray:
    """All tokens of a split ("val" or "train") in memory, in order of its shards. Raises DataError."""
    paths = by_split(folder.glob("*.bin"))[SPLIT_NAMES.index(split)]
    if not paths:
        raise DataError(
            f"{folder}: holds no *_{split}_*.bin; python -m data.prepare demo makes the demo corpus"
        )
    return np.concatenate([read_shard(path) for path in paths])


def sync(file) -> None:
    """Put a file's bytes on the disk, so that no rename can overtake them."""
    file.flush()
    os.fsync(file.fileno())


def write_beside(path: Path, data: bytes) -> None:
    """Write a small file so that `path` holds the old bytes or the new ones, never a part."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            sync(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # of a disk that was full


class ShardWriter:
    """Write one shard as its documents come; it has its name only once it is whole.

    `header` holds what is known beforehand; tokens, documents, bytes, highest id and crc are counted here.
    """

    def __init__(self, path: Path, header: Header):
        self.path, self.partial, self.header = path, path.with_name(path.name + ".partial"), header
        self.tokens = self.documents = self.text_bytes = self.max_id = self.crc32 = 0
        self.file = open(self.partial, "wb")
        self.file.write(bytes(HEADER_BYTES))

    def add(self, tokens: np.ndarray, text_bytes: int, lossy: bool = False) -> None:
        """Append one document: uint16 [n], BOS first, made from `text_bytes` bytes of text."""
        payload = tokens.astype("<u2", copy=False).tobytes()
        self.file.write(payload)
        self.crc32 = zlib.crc32(payload, self.crc32)
        self.tokens += len(tokens)
        self.documents += 1
        self.text_bytes += text_bytes
        self.max_id = max(self.max_id, int(tokens.max()))
        if lossy:
            self.header = replace(self.header, flags=self.header.flags | LOSSY)

    def close(self) -> Header:
        """Fill in the header and give the file its name."""
        self.header = replace(
            self.header,
            tokens=self.tokens,
            documents=self.documents,
            crc32=self.crc32,
            text_bytes=self.text_bytes,
            max_id=self.max_id,
        )
        self.file.seek(0)
        self.file.write(pack(self.header))
        sync(self.file)
        self.file.close()
        os.replace(self.partial, self.path)
        return self.header


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

    sha256: of the file; vocab_size, bos_id: ints; piece_bytes: uint16 [65536], bytes of text that each piece
    stands for (control and unknown 0); opens_with_space: bool [65536]; drops_first_space: whether decoding
    swallows the space that opens a document. Raises DataError where the file is no usable model.
    """

    def __init__(self, path: Path):
        import sentencepiece  # 0.1 s that reading headers need not pay

        try:
            model = Path(path).read_bytes()
            self.processor = sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: cannot be used ({reason}), expected a SentencePiece model") from error
        self.path, self.sha256 = Path(path), hashlib.sha256(model).digest()
        self.vocab_size, self.bos_id = sp.vocab_size(), sp.bos_id()
        if self.bos_id < 0 or self.vocab_size > IDS:
            raise DataError(
                f"{path}: {self.vocab_size} pieces and BOS id {self.bos_id}, expected at most "
                f"{IDS} pieces and a BOS, with which every document starts"
            )
        self.piece_bytes, self.opens_with_space = np.zeros(IDS, np.uint16), np.zeros(IDS, bool)
        for i in range(self.vocab_size):
            piece = sp.id_to_piece(i)
            if not sp.is_control(i) and not sp.is_unknown(i):
                self.piece_bytes[i] = 1 if sp.is_byte(i) else len(piece.replace("\u2581", " ").encode())
                self.opens_with_space[i] = piece.startswith("\u2581")
        opener = np.flatnonzero(self.opens_with_space)[:1].tolist()
        self.drops_first_space = bool(opener) and not sp.decode(opener).startswith(" ")

    def document_bytes(self, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Bytes of text of each document, int64 [documents]; `starts` says where in `tokens` they begin."""
        sizes = np.add.reduceat(np.take(self.piece_bytes, tokens), starts, dtype=np.int64)
        if self.drops_first_space:
            sizes -= self.opens_with_space[tokens[np.minimum(starts + 1, len(tokens) - 1)]]
        return sizes

    def text_bytes(self, tokens: np.ndarray, histogram: np.ndarray) -> int:
        """Bytes of text of a whole shard; `histogram` counts its tokens."""
        total = int(histogram @ self.piece_bytes.astype(np.int64))
        if self.drops_first_space:
            first = find(tokens, self.bos_id) + 1
            total -= int(self.opens_with_space[tokens[first[first < len(tokens)]]].sum())
        return total


# --------------------------------------------------------------------------------------------------
# counting in payloads
# --------------------------------------------------------------------------------------------------

CHUNK = 1 << 18  # tokens; numpy is fastest where its temporary arrays fit the cache


def count_ids(tokens: np.ndarray) -> np.ndarray:
    """How often each id stands in uint16 tokens: int64 [65536]."""
    total = np.zeros(IDS, np.int64)
    for start in range(0, len(tokens), CHUNK):
        part = np.bincount(tokens[start : start + CHUNK])
        total[: len(part)] += part
    return total


def highest_id(histogram: np.ndarray) -> int:
    return int(np.flatnonzero(histogram)[-1])


def find(tokens: np.ndarray, token: int) -> np.ndarray:
    """Where an id stands in uint16 tokens: int64 [matches]."""
    parts = [
        np.flatnonzero(tokens[start : start + CHUNK] == token) + start
        for start in range(0, len(tokens), CHUNK)
    ]
    return np.concatenate([np.zeros(0, np.int64), *parts])


# --------------------------------------------------------------------------------------------------
# documents in payloads
# --------------------------------------------------------------------------------------------------

PROBES = 8  # tokens of a document that its fingerprint takes in


@dataclass(frozen=True)
class Run:
    """Whole documents, one after the other: where from, uint16 tokens, int64 starts of the documents."""

    path: Path
    tokens: np.ndarray
    starts: np.ndarray

    def document(self, i: int) -> np.ndarray:
        """Tokens of one document, its BOS included where the shard has it."""
        return self.tokens[self.starts[i] : self.starts[i + 1] if i + 1 < len(self.starts) else None]

    def fingerprints(self) -> np.ndarray:
        """A number for each document from its length and some of its tokens, spread over it: uint64."""
        lengths = np.diff(self.starts, append=len(self.tokens))
        key = lengths.astype(np.uint64)
        for probe in range(PROBES):
            token = self.tokens[self.starts + (lengths - 1) * probe // (PROBES - 1)]
            key = key * np.uint64(0x9E3779B97F4A7C15) + token  # wraps around, as a hash may
        return key

    def sha256(self, i: int) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(self.document(i))).digest()


def read_runs(paths: list[Path], bos_id: int) -> Iterator[Run]:
    """All documents of a split in order. Other projects cut documents at a shard's end: these are joined.

    Raises DataError where a shard holds no start of a document.
    """
    cut, begun, only = np.zeros(0, np.uint16), None, np.zeros(1, np.int64)
    for path in paths:
        tokens = open_shard(path)[1]
        starts = find(tokens, bos_id)
        if not len(starts):
            raise DataError(f"{path}: holds no token {bos_id}, expected this BOS before every document")
        cut = np.concatenate([cut, tokens[: starts[0]]])
        if len(cut):
            yield Run(begun or path, cut, only)
        yield Run(path, tokens[starts[0] : starts[-1]], starts[:-1] - starts[0])
        cut, begun = tokens[starts[-1] :], path
    if len(cut):
        yield Run(begun, cut, only)


# --------------------------------------------------------------------------------------------------
# verify: one line a check, "ok ..." or "FAIL ...", and "note ..." for what could not be checked
# --------------------------------------------------------------------------------------------------

MANIFEST_FORMAT = "bytegolf dataset"
MANIFEST = {
    "tokenizer": {"file": str, "sha256": str},
    "corpus_sha256": str,
    "val_sha256": str,
    "lossy": bool,
    "files": [{"name": str, "sha256": str, "tokens": int, "bytes": int, "documents": int}],
}
THREADS = 4  # each maps a whole shard; numpy and zlib let go of the lock


def check(where: object, what: str, found: object, expected: object) -> str:
    if found == expected:
        return f"ok   {where}: {what} {found}"
    return f"FAIL {where}: {what} is {found}, expected {expected}"


def raise_failed(lines: Iterable[str]) -> None:
    """Raise DataError at the first check that failed."""
    for line in lines:
        if line.startswith("FAIL"):
            raise DataError(line.removeprefix("FAIL "))


def load_manifest(folder: Path) -> dict | None:
    """The dataset's manifest, None where there is none of ours. Raises DataError where it is damaged."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}), expected JSON") from error
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        return None
    if problem := misfit(manifest, MANIFEST, "the manifest"):
        raise DataError(f"{path}: {problem}; make the dataset anew")
    return manifest


def misfit(value: object, shape: object, what: str) -> str:
    """The first place where JSON has another shape than expected, "" where it has none such."""
    kind = shape if isinstance(shape, type) else type(shape)
    if not isinstance(value, kind):
        return f"{what} is {json.dumps(value)[:40]}, expected {kind.__name__}"
    if isinstance(shape, dict):
        if missing := sorted(shape.keys() - value.keys()):
            return f"{what} lacks {missing}, expected all of {sorted(shape)}"
        inner = [(value[key], shape[key], f"{what}'s {key}") for key in shape]
    else:
        inner = [(item, shape[0], f"{what}[{i}]") for i, item in enumerate(value)] if kind is list else []
    return next(filter(None, (misfit(*triple) for triple in inner)), "")


def verify_folder(folder: Path, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Check a dataset: each shard alone, all as a set, the manifest, and that val stands apart from train."""
    paths, failed = sorted(folder.glob("*.bin")), False
    if not paths:
        yield f"FAIL {folder}: holds no shards, expected *_train_*.bin and *_val_*.bin"
        return
    for line in verify_files(paths, tokenizer):
        failed |= line.startswith("FAIL")
        yield line
    if failed:
        yield f"note {folder}: not checked as a set while single shards fail"
        return
    headers, splits = {path: read_header(path) for path in paths}, by_split(paths)
    yield from verify_set(folder, headers, splits)
    manifest = load_manifest(folder)
    if manifest:
        yield from verify_manifest(folder, headers, manifest)
    else:
        yield f"note {folder}: no manifest.json of data/prepare.py"
    if manifest and tokenizer and not manifest["lossy"]:
        yield verify_val_text(folder, splits[VAL], tokenizer, manifest)
    bos_id = tokenizer.bos_id if tokenizer else max(h.bos_id for h in headers.values())
    if bos_id < 0:
        yield f"note {folder}: val was not looked for in train: BOS id unknown, --tokenizer MODEL tells it"
    else:
        yield verify_apart(folder, splits, bos_id)


Splits = tuple[list[Path], list[Path]]


def by_split(paths: Iterable[Path]) -> Splits:
    """(val, train) shards in order of the numbers in their names; files with other names are left out."""
    named = sorted((p for p in paths if parse_name(p)), key=lambda p: parse_name(p)[2])
    return tuple([p for p in named if parse_name(p)[1] == split] for split in (VAL, TRAIN))


def verify_files(paths: list[Path], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Check each shard alone, several at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        for lines in pool.map(lambda path: verify_shard(path, tokenizer), paths):
            yield from lines


def verify_shard(path: Path, tokenizer: Tokenizer | None) -> list[str]:
    """Check one shard: header, size, name, checksum, and what its tokens say."""
    try:
        header, tokens = open_shard(path)
    except DataError as error:
        return [f"FAIL {error}"]
    lines = [f"ok   {path}: size {header.file_bytes}"]
    histogram = count_ids(tokens)
    if header.legacy:
        lines.append(f"note {path}: legacy, its header vouches for the number of tokens only")
    else:
        lines += verify_claims(path, header, tokens, histogram)
    if tokenizer:
        lines += verify_tokenizer(path, header, tokens, histogram, tokenizer)
    return lines


def verify_claims(path: Path, h: Header, tokens: np.ndarray, histogram: np.ndarray) -> list[str]:
    """Check what an extended header says of its tokens, and the file's name against it."""
    highest = highest_id(histogram)
    lines = [
        check(path, "crc32", f"{zlib.crc32(tokens):08x}", f"{h.crc32:08x}"),
        check(path, "highest id", highest, h.max_id),
        check(path, f"highest id below the vocabulary's {h.vocab_size}", highest < h.vocab_size, True),
        check(path, "documents (BOS tokens)", int(histogram[h.bos_id]), h.documents),
    ]
    if h.corpus != UNKNOWN:  # an upgraded shard may begin within a document
        lines.append(check(path, "first token", tokens[:1].tolist(), [h.bos_id]))
    if name := parse_name(path):
        lines.append(check(path, "split", h.split, name[1]))
    return lines


def verify_tokenizer(
    path: Path, h: Header, tokens: np.ndarray, histogram: np.ndarray, tokenizer: Tokenizer
) -> list[str]:
    """Check a shard against its tokenizer: hash, vocabulary, and bytes by decoding."""
    lines, highest = [], highest_id(histogram)
    if not h.legacy:
        lines = [
            check(path, "sha256 of the tokenizer", tokenizer.sha256.hex(), h.tokenizer.hex()),
            check(path, "vocabulary size", h.vocab_size, tokenizer.vocab_size),
        ]
    if highest >= tokenizer.vocab_size:
        return [*lines, f"FAIL {path}: highest id is {highest}, expected below {tokenizer.vocab_size}"]
    size = tokenizer.text_bytes(tokens, histogram)
    if h.legacy or h.lossy:
        why = "LOSSY, the tokens do not give back the text exactly" if h.lossy else "legacy"
        return [*lines, f"note {path}: {why}; its tokens decode to {size} bytes"]
    return [*lines, check(path, "bytes of text", size, h.text_bytes)]


def verify_set(folder: Path, headers: dict[Path, Header], splits: Splits) -> Iterator[str]:
    """Check that the shards belong together and that none is missing."""
    for path in sorted(headers.keys() - set(splits[VAL] + splits[TRAIN])):
        yield f"FAIL {path}: the name is no shard's, expected <set>_train_<number>.bin or _val_"
    sets = sorted({parse_name(path)[0] for path in splits[VAL] + splits[TRAIN]})
    yield check(folder, f"number of sets ({', '.join(sets)})", len(sets), 1)
    for split in (VAL, TRAIN):
        where, paths = f"{folder}: {SPLIT_NAMES[split]}", splits[split]
        yield from verify_numbers(where, paths)
        extended = [(i, path, headers[path]) for i, path in enumerate(paths) if not headers[path].legacy]
        if extended:
            moved = [path.name for i, path, h in extended if h.index != i]
            yield check(where, "shards whose header has another index", moved, [])
            yield check(where, "number of shards", [len(paths)], sorted({h.count for _, _, h in extended}))
    for field in ("tokenizer", "vocab_size", "bos_id", "corpus", "lossy"):
        values = {getattr(h, field) for h in headers.values() if not h.legacy}
        if values:
            yield check(folder, f"different values of {field}", len(values), 1)


def verify_numbers(where: str, paths: list[Path]) -> Iterator[str]:
    """Check the numbers in the names of one split's shards. They may start at 1: some projects do."""
    if not paths:
        yield f"FAIL {where}: no shards, expected at least one"
        return
    numbers = [parse_name(path)[2] for path in paths]
    yield check(where, "missing shards", sorted(set(range(numbers[0], numbers[-1])) - set(numbers)), [])
    yield check(where, "shards of one number", sorted({n for n in numbers if numbers.count(n) > 1}), [])


def verify_manifest(folder: Path, headers: dict[Path, Header], manifest: dict) -> Iterator[str]:
    """Check manifest.json against the files."""
    listed = {entry["name"]: entry for entry in manifest["files"]}
    yield check(folder, "files by the manifest", sorted(path.name for path in headers), sorted(listed))
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(file_sha256, headers)
    for (path, h), digest in zip(headers.items(), digests):
        if entry := listed.get(path.name):
            counts = {"tokens": h.tokens, "bytes": h.text_bytes, "documents": h.documents}
            yield check(path, "sha256", digest.hex(), entry["sha256"])
            yield check(path, "counts", counts, {key: entry[key] for key in counts})
            yield check(path, "lossy", h.lossy, manifest["lossy"])
            yield check(path, "corpus", h.corpus.hex(), manifest["corpus_sha256"])
            yield check(path, "tokenizer", h.tokenizer.hex(), manifest["tokenizer"]["sha256"])


def verify_val_text(folder: Path, val: list[Path], tokenizer: Tokenizer, manifest: dict) -> str:
    """Decode the validation documents; the manifest has the sha256 over the sha256 of their texts."""
    total = hashlib.sha256()
    for run in read_runs(val, tokenizer.bos_id):
        for i in range(len(run.starts)):
            text = tokenizer.processor.decode(run.document(i).tolist()).encode()
            total.update(hashlib.sha256(text).digest())
    return check(folder, "sha256 of the validation text", total.hexdigest(), manifest["val_sha256"])


def verify_apart(folder: Path, splits: Splits, bos_id: int) -> str:
    """Check that no validation document stands in the training shards, by the sha256 of its tokens.

    One tokenizer makes one sequence of tokens of one text, so equal texts are equal sequences. Training
    documents are hashed only where the fingerprint is a validation document's: the work is reading.
    """
    keys, digests, documents, found = [np.zeros(0, np.uint64)], set(), 0, []
    for run in read_runs(splits[VAL], bos_id):
        keys.append(run.fingerprints())
        digests.update(run.sha256(i) for i in range(len(run.starts)))
    keys = np.concatenate(keys)
    for run in read_runs(splits[TRAIN], bos_id):
        documents += len(run.starts)
        for i in np.flatnonzero(np.isin(run.fingerprints(), keys)):
            if run.sha256(i) in digests:
                found.append(run.path.name)
    where = f" (in {', '.join(sorted(set(found)))})" if found else ""
    return check(folder, f"validation documents among {documents} training documents", len(found), 0) + where


# --------------------------------------------------------------------------------------------------
# inspect, upgrade
# --------------------------------------------------------------------------------------------------


def inspect(path: Path) -> str:
    """The header of a shard as text, or a line that says FAIL."""
    try:
        h = read_header(path)
    except DataError as error:
        return f"FAIL {error}\n"
    if h.legacy:
        return f"{path}\n  tokens {h.tokens}\n  legacy: nothing else is known; upgrade fills the header in\n"
    values = asdict(h) | {
        "split": SPLIT_NAMES[h.split != VAL],
        "tokenizer": h.tokenizer.hex(),
        "crc32": f"{h.crc32:08x}",
        "lossy": h.lossy,
        "corpus": "unknown" if h.corpus == UNKNOWN else h.corpus.hex(),
    }
    del values["legacy"], values["flags"]
    return "\n".join([str(path)] + [f"  {key} {value}" for key, value in values.items()]) + "\n"


def extended_header(path: Path, siblings: list[Path], tokenizer: Tokenizer) -> Header:
    """What the extended header of a legacy shard must say; `siblings` are all shards of its split."""
    header, tokens = open_shard(path)
    histogram = count_ids(tokens)
    highest = highest_id(histogram)
    if highest >= tokenizer.vocab_size:
        raise DataError(
            f"{path}: highest id is {highest}, expected below {tokenizer.vocab_size}, the "
            f"vocabulary of {tokenizer.path}; --tokenizer takes the one that made the shard"
        )
    if not header.legacy and header.tokenizer != tokenizer.sha256:
        raise DataError(
            f"{path}: made with the tokenizer of sha256 {header.tokenizer.hex()}, expected "
            f"{tokenizer.sha256.hex()}, that of {tokenizer.path}"
        )
    return Header(
        header.tokens,
        tokenizer.vocab_size,
        tokenizer.bos_id,
        int(histogram[tokenizer.bos_id]),
        highest,
        tokenizer.text_bytes(tokens, histogram),
        zlib.crc32(tokens),
        siblings.index(path),
        len(siblings),
        parse_name(path)[1],
        tokenizer=tokenizer.sha256,
    )


def siblings_of(path: Path) -> list[Path]:
    """All shards of the set and split of `path`, in order. Raises DataError where one is missing."""
    name = parse_name(path)
    if name is None:
        raise DataError(f"{path}: the name is no shard's, expected <set>_train_<number>.bin or _val_")
    found = by_split(p for p in path.parent.glob("*.bin") if parse_name(p) and parse_name(p)[0] == name[0])
    raise_failed(verify_numbers(path.parent, found[name[1]]))
    return found[name[1]]


def upgrade(paths: list[Path], tokenizer: Tokenizer) -> Iterator[str]:
    """Fill in the headers of legacy shards; all are checked before the first is changed. Raises DataError.

    Each is copied, the copy gets the header and then the name: at any moment the old shard or the new one is
    there, and a link into a download cache is replaced, not written through. The corpus stays unknown, since
    a part of it may be all that was downloaded; so a second call, with more shards there, counts anew.
    """
    headers = {}
    for path in paths:
        if read_header(path).corpus == UNKNOWN:
            headers[path] = extended_header(path, siblings_of(path), tokenizer)
        else:
            yield f"ok   {path}: has the header of data/prepare.py, left as it is"
    for path, header in headers.items():
        partial = path.with_name(path.name + ".partial")
        try:
            shutil.copyfile(path, partial)
            with open(partial, "r+b") as file:
                file.write(pack(header))
                sync(file)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)  # of a disk that was full
        yield f"ok   {path}: {header.documents} documents, {header.text_bytes} bytes of text"


# --------------------------------------------------------------------------------------------------
# command line
# --------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("inspect", "print headers"),
        ("verify", "check everything; exit code 3 if a check fails"),
        ("upgrade", "fill in the extended header of legacy shards, payload untouched"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="shards, or folders of them")
        if name != "inspect":
            default = " (default: the manifest's)" if name == "verify" else ""
            command.add_argument(
                "--tokenizer",
                type=Path,
                metavar="MODEL",
                required=name == "upgrade",
                help="the SentencePiece model that made the shards" + default,
            )
    return parser.parse_args(argv)


def expand(paths: list[Path]) -> list[Path]:
    """The shards that `paths` name or hold. Raises DataError where a folder holds none."""
    found = []
    for path in paths:
        inside = sorted(path.glob("*.bin")) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path}: holds no shards, expected *.bin")
        found += inside
    return found


def find_tokenizer(folder: Path, given: Path | None) -> Tokenizer | None:
    """The tokenizer that was given, else the manifest's, else None."""
    manifest = None if given else load_manifest(folder)
    if manifest:
        given = folder / manifest["tokenizer"]["file"]
    return Tokenizer(given) if given else None


def verify(paths: list[Path], given: Path | None) -> Iterator[str]:
    """Check datasets (folders) and single shards."""
    start, size = time.perf_counter(), 0
    for path in paths:
        folder = path if path.is_dir() else path.parent
        try:
            tokenizer = find_tokenizer(folder, given)
            if tokenizer is None:
                yield f"note {folder}: tokenizer unknown, so text is not counted; --tokenizer MODEL tells it"
            yield from verify_folder(path, tokenizer) if path.is_dir() else verify_shard(path, tokenizer)
            size += sum(file.stat().st_size for file in expand([path]))
        except DataError as error:
            yield f"FAIL {error}"
    seconds = time.perf_counter() - start
    yield f"note {size} bytes in {seconds:.2f} s, {size / seconds / 1e6:.0f} MB/s"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    failed = 0
    try:
        if args.command == "inspect":
            lines = map(inspect, expand(args.paths))
        elif args.command == "verify":
            lines = verify(args.paths, args.tokenizer)
        else:
            lines = upgrade(expand(args.paths), Tokenizer(args.tokenizer))
        for line in lines:
            print(line, flush=True)
            failed += line.startswith("FAIL")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(
            f"error: {error.filename or args.paths[0]}: {error.strerror or error}: mend this, then run the "
            "same command again",
            file=sys.stderr,
        )
        return DataError.exit_code
    if failed:
        print(f"error: {failed} checks failed, see the FAIL lines", file=sys.stderr)
    return DataError.exit_code if failed else 0


if __name__ == "__main__":
    sys.exit(main())
