"""Token shards: 1024 bytes of header, then uint16 tokens. data/README.md has the format as a table."""

import hashlib
import importlib
import itertools
import os
import re
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from data import files
from data.command import DataError, nearest, some, warn_once

# --- header ----------------------------------------------------------------------------------------------

MAGIC = 20240520  # magic and version as llm.c, modded-nanogpt and the challenge write them
VERSION = 1
EXTENSION = 0x31464C47  # "GLF1"; a legacy shard has 0 in this place
EXTENSION_VERSION = 1
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
    corpus: bytes = UNKNOWN  # sha256 of the whole corpus, both splits
    legacy: bool = False

    @property
    def lossy(self) -> bool:
        return bool(self.flags & LOSSY)

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + 2 * self.tokens


def pack(header: Header) -> bytes:
    """The 1024 bytes of a header."""
    if header.legacy:
        return _LEGACY.pack(MAGIC, VERSION, header.tokens, 0).ljust(HEADER_BYTES, b"\0")
    fields = asdict(header)
    tokens = fields.pop("tokens")
    del fields["legacy"]
    return _EXTENDED.pack(MAGIC, VERSION, tokens, EXTENSION, EXTENSION_VERSION, *fields.values())


NO_SHARD = "make or fetch it again, or make shards of its text: python -m data prepare text"


def parse(raw: bytes, where: object) -> Header:
    """Read the first 1024 bytes of a shard; `where` names it in errors. Raises DataError."""
    if len(raw) < HEADER_BYTES:
        raise DataError(f"{where}: header has {len(raw)} bytes, expected {HEADER_BYTES}: {NO_SHARD}")
    magic, version, tokens, extension = _LEGACY.unpack_from(raw)
    if magic != MAGIC:
        raise DataError(f"{where}: magic number is {magic}, expected {MAGIC}, no shard: {NO_SHARD}")
    expect(where, "format version", version, VERSION)
    if tokens < 1:
        raise DataError(f"{where}: header counts {tokens} tokens, expected 1 or more")
    if extension == 0:
        return Header(tokens, legacy=True)
    expect(where, "extension mark", hex(extension), hex(EXTENSION))
    _, _, _, _, extension_version, *fields = _EXTENDED.unpack_from(raw)
    expect(where, "extension version", extension_version, EXTENSION_VERSION)
    header = Header(tokens, *fields)
    if not (0 <= header.bos_id < header.vocab_size <= IDS and header.split in (VAL, TRAIN)):
        found = f"BOS id {header.bos_id}, vocabulary size {header.vocab_size}, split {header.split}"
        takes = f"BOS id < vocabulary size <= {IDS} and split 0 or 1"
        raise DataError(f"{where}: {found}; expected {takes}")
    return header


# --- names: <set>_<split>_<digits>.bin, by number; data/README.md has the rule -----------------------------

_NAME = re.compile(r"(?P<set>[^.].*)_(?P<split>val|train)_(?P<number>[0-9]+)\.bin")
Splits = tuple[list[Path], list[Path]]  # val, train


def parse_name(path: PurePath) -> tuple[str, int, int] | None:
    """(set, split, number) that a file name claims, or None where it follows no such pattern."""
    match = _NAME.fullmatch(path.name)
    return match and (match["set"], SPLIT_NAMES.index(match["split"]), int(match["number"]))


def by_split(paths: Iterable[Path]) -> Splits:
    """(val, train) shards by the numbers in their names; hidden ones and other names are left out."""
    splits: Splits = ([], [])
    named = [(name, path) for path in paths if (name := parse_name(path))]
    for (_, split, _), path in sorted(named, key=lambda shard: shard[0][2]):
        splits[split].append(path)
    return splits


def verify_names(where: object, paths: Iterable[Path]) -> Iterator[str]:
    """Check that files, hidden ones apart, are shards of one set, and none is missing between others."""
    names = [path for path in paths if not path.name.startswith(".")]
    splits = by_split(names)
    named = splits[VAL] + splits[TRAIN]
    if others := sorted(path.name for path in set(names) - set(named)):
        yield f"note {where}: left out, not named as shards: {some(others)}"
    claims = {path: claim for path in named if (claim := parse_name(path))}
    sets = sorted({set_name for set_name, *_ in claims.values()})
    yield check(where, f"number of sets ({', '.join(sets)})", len(sets), 1)
    for name, split in zip(SPLIT_NAMES, splits):
        numbers = [claims[path][2] for path in split]
        doubled = [n for n, after in itertools.pairwise(numbers) if n == after]
        before = [min(numbers[0], 1) - 1] if numbers else []  # they begin with 0 or 1
        yield check(f"{where}: {name}", "missing shards by their names", gaps(before + numbers), [])
        yield check(f"{where}: {name}", "shards of one number", sorted({*doubled}), [])


def find_shards(folder: Path) -> Splits:
    """(val, train) shards of a folder in order; says what is left out. Raises DataError by `verify_names`."""
    paths = list(folder.glob("*.bin"))
    splits = by_split(paths)
    if splits != ([], []):
        lines = list(verify_names(folder, paths))
        raise_failed(lines)
        for line in lines:
            if line.startswith("note"):
                warn_once(line.removeprefix("note "))
    return splits


def gaps(numbers: list[int]) -> list[int]:
    """The first number of each gap in sorted numbers. The first number may be 1: some projects' is."""
    return [before + 1 for before, after in itertools.pairwise(numbers) if after > before + 1]


def check(where: object, what: str, found: object, expected: object) -> str:
    """A line for a check: "ok ..." or "FAIL ..."; a line "note ..." is of what could not be checked."""
    if found == expected:
        return f"ok   {where}: {what} {found}"
    return f"FAIL {where}: {what} is {found}, expected {expected}"


def raise_failed(lines: Iterable[str]) -> None:
    """Raise DataError at the first check that failed."""
    for line in lines:
        if line.startswith("FAIL"):
            raise DataError(line.removeprefix("FAIL "))


def expect(where: object, what: str, found: object, expected: object) -> None:
    raise_failed([check(where, what, found, expected)])


# --- reading ---------------------------------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """Header of the shard at `path`, its exact file size checked against it. Raises DataError."""
    try:
        with open(path, "rb") as file:
            header = parse(file.read(HEADER_BYTES), path)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        what = f"cannot be read ({error.strerror}), expected a shard"
        raise DataError(f"{path}: {what}{nearest(path)}") from error
    if size != header.file_bytes:
        parts = f"{HEADER_BYTES} of header and 2 for each of {header.tokens} tokens"
        raise DataError(f"{path}: file has {size} bytes, expected {header.file_bytes} ({parts})")
    return header


def open_shard(path: Path) -> tuple[Header, np.ndarray]:
    """Header and memory-mapped tokens, uint16 [tokens]; the checksum is not compared. Raises DataError."""
    header = read_header(path)
    return header, np.memmap(path, np.dtype("<u2"), "r", HEADER_BYTES, (header.tokens,))


def read_shard(path: Path) -> np.ndarray:
    """Memory-mapped tokens of a shard, uint16 [tokens]: header, size and checksum hold. Raises DataError.

    A legacy shard has no checksum.
    """
    header, tokens = open_shard(path)
    crc32 = zlib.crc32(tokens.data)
    if not header.legacy and crc32 != header.crc32:
        raise DataError(f"{path}: crc32 is {crc32:08x}, expected {header.crc32:08x}: make or fetch it again")
    return tokens


def read_split(folder: Path, split: str) -> np.ndarray:
    """All tokens of a split ("val" or "train") in memory, in order of its shards. Raises DataError."""
    paths = find_shards(folder)[SPLIT_NAMES.index(split)]
    if not paths:
        make = "; python -m data prepare demo makes the demo corpus, python -m data prepare text your own"
        what = f"holds no *_{split}_*.bin, expected one or more"
        raise DataError(f"{folder}: {what}{nearest(folder) or make}")
    return np.concatenate([read_shard(path) for path in paths])


# --- writing ---------------------------------------------------------------------------------------------


def write_shard(path: Path, header: Header, documents: Iterable[tuple[np.ndarray, int, bool]]) -> None:
    """Write a shard as its documents come: uint16 [n] with BOS first, bytes of text, whether some is lost.

    `header` holds what is known beforehand, all else is counted. It has its name only once it is whole.
    """
    with files.beside(path).open("wb") as file:
        file.write(bytes(HEADER_BYTES))
        for tokens, text_bytes, lossy in documents:
            payload = tokens.astype("<u2", copy=False).tobytes()
            file.write(payload)
            header = replace(
                header,
                tokens=header.tokens + len(tokens),
                documents=header.documents + 1,
                text_bytes=header.text_bytes + text_bytes,
                max_id=max(header.max_id, int(tokens.max())),
                crc32=zlib.crc32(payload, header.crc32),
                flags=header.flags | (LOSSY if lossy else 0),
            )
        file.seek(0)
        file.write(pack(header))
        files.sync(file)
    os.replace(files.beside(path), path)


# --- tokenizer -------------------------------------------------------------------------------------------

CHUNK = 1 << 18  # tokens; numpy is fastest where its temporary arrays fit the cache


def chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(tokens), CHUNK):
        yield tokens[start : start + CHUNK]


class Tokenizer:
    """A SentencePiece model with what the shards need to know of it.

    `piece_bytes`, uint16 [65536], has the bytes of text that each piece stands for (control and unknown: 0),
    `opens_with_space`, bool [65536], whether it begins with one. `drops_first_space` says whether decoding
    swallows the space that opens a document. Raises DataError where the file is no usable model.
    """

    def __init__(self, path: Path):
        import sentencepiece  # 0.1 s that reading headers need not pay

        try:
            self.model = Path(path).read_bytes()
            self.processor = sp = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            what = f"cannot be used ({reason}), expected a SentencePiece model"
            raise DataError(f"{path}: {what}{nearest(Path(path))}") from error
        self.path = Path(path)
        self.sha256 = hashlib.sha256(self.model).digest()
        self.vocab_size = sp.vocab_size()
        self.bos_id = sp.bos_id()
        if self.vocab_size > IDS:
            raise DataError(f"{path}: {self.vocab_size} pieces, expected at most {IDS}: tokens are uint16")
        if self.bos_id < 0:
            mend = "train it anew with spm_train --bos_id=1, or prepare text without --tokenizer"
            raise DataError(f"{path}: has no BOS, with which every document starts: {mend}")
        self.piece_bytes = np.zeros(IDS, np.uint16)
        self.opens_with_space = np.zeros(IDS, bool)
        for i in range(self.vocab_size):
            if sp.is_control(i) or sp.is_unknown(i):
                continue
            text = sp.id_to_piece(i).replace("\u2581", " ")
            self.piece_bytes[i] = 1 if sp.is_byte(i) else len(text.encode())
            self.opens_with_space[i] = text.startswith(" ")
        opener = np.flatnonzero(self.opens_with_space)[:1].tolist()
        self.drops_first_space = bool(opener) and not sp.decode(opener).startswith(" ")

    def text_bytes(self, tokens: np.ndarray) -> int:
        """Bytes of text of a document, or of all that begin in a shard."""
        total = sum(int(self.piece_bytes[part].sum(dtype=np.int64)) for part in chunks(tokens))
        if self.drops_first_space:
            first = np.flatnonzero(tokens == self.bos_id) + 1
            first = first[first < len(tokens)]
            total -= int(self.opens_with_space[tokens[first]].sum())
        return total


# --- documents -------------------------------------------------------------------------------------------


def documents(paths: Iterable[Path], bos_id: int) -> Iterator[tuple[Path, np.ndarray]]:
    """The documents of a split in order: the shard that each begins in, and its tokens, uint16 [tokens].

    Other projects cut documents at a shard's end: these are joined. Raises DataError where a shard holds no
    start of a document.
    """
    begun: Path | None = None
    cut: np.ndarray = np.zeros(0, np.uint16)  # the last document so far, which may go on in the next shard
    for path in paths:
        tokens = np.asarray(open_shard(path)[1])
        starts = np.flatnonzero(tokens == bos_id).tolist()
        if not starts:
            raise DataError(f"{path}: holds no token {bos_id}, expected this BOS before every document")
        cut = np.concatenate([cut, tokens[: starts[0]]])
        if len(cut):
            yield begun or path, cut
        for start, end in itertools.pairwise(starts):
            yield path, tokens[start:end]
        begun = path
        cut = tokens[starts[-1] :]
    if begun:
        yield begun, cut


LEFT_OUT = 100  # one of so many documents


def without_some(source: Path, tokenizer: Tokenizer, seed: int) -> bytes:
    """A shard without a hundredth of its documents, those that `seed` draws. Raises DataError.

    They are drawn by hashes, which every version of every library computes alike.
    """
    header, tokens = open_shard(source)
    starts = np.flatnonzero(tokens == tokenizer.bos_id)
    ends = np.append(starts[1:], len(tokens))

    def lot(document: int) -> bytes:
        return hashlib.sha256(f"{seed} {source.name} {document}".encode()).digest()

    count = -(-(len(starts) - 1) // LEFT_OUT)  # one at least, but never the only one
    drawn = sorted(range(len(starts)), key=lot)[:count]
    kept = np.ones(len(tokens), bool)
    for document in drawn:
        kept[starts[document] : ends[document]] = False
    left = tokens[kept]
    gone = tokens[~kept]
    header = replace(
        header,
        tokens=len(left),
        documents=header.documents - count,
        max_id=int(left.max()),
        text_bytes=header.text_bytes - tokenizer.text_bytes(gone),
        crc32=zlib.crc32(left.data),
    )
    return pack(header) + left.tobytes()


# --- manifest --------------------------------------------------------------------------------------------

MANIFEST_FORMAT = "bytegolf dataset"
TEXT = {"type": "string"}
COUNT = {"type": "integer"}


def an_object(fields: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with these fields at least."""
    return {"type": "object", "required": sorted(fields), "properties": fields}


MANIFEST = an_object(
    {
        "tokenizer": an_object({"file": TEXT, "sha256": TEXT}),
        "corpus_sha256": TEXT,
        "val_sha256": TEXT,
        "lossy": {"type": "boolean"},
        "files": {
            "type": "array",
            "items": an_object(
                {"name": TEXT, "sha256": TEXT, "tokens": COUNT, "bytes": COUNT, "documents": COUNT}
            ),
        },
    }
)


def load_manifest(folder: Path) -> dict[str, Any] | None:
    """The dataset's manifest, None where there is none of ours. Raises DataError where it is damaged."""
    path = folder / "manifest.json"
    if not path.exists():
        return None
    manifest = files.read_json(path)
    if manifest.get("format") != MANIFEST_FORMAT:
        return None
    import jsonschema  # 0.1 s that folders without a manifest need not pay

    errors = jsonschema.Draft202012Validator(MANIFEST).iter_errors(manifest)
    if error := jsonschema.exceptions.best_match(errors):
        mend = "expected what python -m data prepare writes; make the dataset anew"
        raise DataError(f"{path}: {error.json_path}: {error.message[:200]}, {mend}")
    return manifest


def totals(manifest: dict[str, Any], split: str) -> Counter[str]:
    """What the shards of a split hold together: `shards`, `documents`, `bytes` and `tokens`."""
    found: Counter[str] = Counter(shards=0, documents=0, bytes=0, tokens=0)
    for file in manifest["files"]:
        if file["split"] == split:
            found.update(shards=1, **{key: file[key] for key in ("documents", "bytes", "tokens")})
    return found


def own_tokenizer(folder: Path, manifest: dict[str, Any]) -> Path:
    """The file that the manifest names, from where `folder` stands; else from where a link leads."""
    file = manifest["tokenizer"]["file"]
    beside = Path(os.path.normpath(folder.absolute() / file))
    return beside if beside.exists() else folder / file


def main(argv: list[str] | None = None) -> int:
    """`python -m data.shards verify`, as frozen records name it. By name: a verdict imports no command."""
    code: int = importlib.import_module("data.__main__").main(argv)
    return code


if __name__ == "__main__":
    sys.exit(main())
