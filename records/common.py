"""What the referee's tools share: errors, files, tracks, and the text, read by the referee's own means."""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import sentencepiece

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
LN2 = math.log(2)


class UsageError(Exception):
    """The command was called with something impossible: exit code 2."""
    exit_code = 2


class DataError(Exception):
    """A file is not what it should be: exit code 3."""
    exit_code = 3


# --- files ------------------------------------------------------------------------------------------------

def read_bytes(path: Path) -> bytes:
    """A plain file's bytes: a pipe or a link to /dev/zero would never end. Raises DataError."""
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is no plain file, expected one")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def parse_json(text: str | bytes):
    """A JSON value; NaN, Infinity and doubled keys, which readers understand differently, are refused. Raises
    ValueError and RecursionError."""
    def no_constant(name: str):
        raise ValueError(f"{name} is no JSON")

    def once(pairs: list) -> dict:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice in one object")
        return dict(pairs)
    return json.loads(text, parse_constant=no_constant, object_pairs_hook=once)


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises DataError."""
    try:
        value = parse_json(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write beside and rename, so that a file of this name is always whole. Raises UsageError."""
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def growing_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` that gets its name only when the block ends well. Raises UsageError."""
    if target.exists():
        raise UsageError(f"{target}: exists and is never overwritten; remove it or choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)      # of a block that failed; else it has gone


def exit_code_of(main) -> int:
    """Run a command; an error of the user's or of the data is one line."""
    try:
        return main()
    except (UsageError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


# --- schemas ----------------------------------------------------------------------------------------------

@cache
def schemas() -> dict:
    return read_json(HERE / "schema.json")["$defs"]


def schema_errors(value: dict, name: str) -> list[str]:
    """What is wrong with a JSON object by the schema of that name: 'place: message', sorted."""
    import jsonschema           # 0.1 s that a scoring need not pay
    validator = jsonschema.Draft202012Validator({"$defs": schemas(), "$ref": f"#/$defs/{name}"})
    return sorted("/".join(map(str, error.absolute_path)) + ": " + error.message[:200]
                  for error in validator.iter_errors(value))


# --- tracks -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Track:
    """What a track allows: its track.json, checked."""
    folder: Path
    rules: dict

    def __getitem__(self, name: str):
        return self.rules[name]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def dataset(self) -> dict:
        return self.rules["dataset"]

    def code_size(self, script: bytes) -> int:
        """Bytes that the script counts for."""
        return len(script) if self["code_bytes"] == "raw" else len(zlib.compress(script, 9))


def load_track(folder: Path) -> Track:
    """The track of a folder that holds track.json. Raises DataError."""
    rules = read_json(folder / "track.json")
    if errors := schema_errors(rules, "track"):
        raise DataError(f"{folder / 'track.json'}: {errors[0]}")
    return Track(folder, rules)


# --- text -------------------------------------------------------------------------------------------------

HEADER_BYTES = 1024
MAGIC, EXTENSION = 20240520, 0x31464C47
MAX_VOCAB = 1 << 16     # tokens are uint16


def read_shard(path: Path) -> np.ndarray:
    """uint16 tokens of one shard (data/README.md has the format). Raises DataError."""
    blob = read_bytes(path)
    if len(blob) < HEADER_BYTES:
        raise DataError(f"{path}: {len(blob)} bytes, expected a header of {HEADER_BYTES}")
    ints = struct.unpack_from("<256I", blob)
    payload = blob[HEADER_BYTES:]
    if ints[0] != MAGIC or ints[1] != 1 or len(payload) != 2 * ints[2]:
        raise DataError(f"{path}: no whole shard: magic {ints[0]}, version {ints[1]}, {ints[2]} tokens in "
                        f"{len(payload)} bytes; python data/shards.py inspect {path}")
    if ints[3] == EXTENSION and zlib.crc32(payload) != ints[11]:
        raise DataError(f"{path}: damaged, its checksum does not hold; make or fetch it again")
    return np.frombuffer(payload, "<u2")


def read_split(folder: Path, split: str) -> np.ndarray:
    """All tokens of a split in order. Raises DataError."""
    paths = sorted(folder.glob(f"*_{split}_*.bin"))
    if not paths:
        raise DataError(
            f"{folder}: holds no *_{split}_*.bin; python data/prepare.py demo makes the demo corpus"
        )
    return np.concatenate([read_shard(path) for path in paths])


@dataclass(frozen=True)
class Text:
    """Documents and their tokens. A document's tokens are a BOS and what the tokenizer makes of it."""
    documents: list[bytes]
    tokens: np.ndarray              # uint16[n], of all documents end to end

    @cached_property
    def bytes(self) -> int:
        """Raw UTF-8 bytes: what a score is divided by."""
        return sum(map(len, self.documents))

    @property
    def sha256(self) -> str:
        """Over the sha256 of each document, in order: as the manifest has it."""
        return sha256(b"".join(hashlib.sha256(text).digest() for text in self.documents))


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    """Raises DataError."""
    if not path.exists():
        raise DataError(f"{path}: no such file; python data/prepare.py demo makes the demo corpus and its "
                        "tokenizer, --data names another folder")
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=read_bytes(path))
    except RuntimeError:
        raise DataError(f"{path}: is no SentencePiece model") from None
    if tokenizer.bos_id() < 0 or tokenizer.vocab_size() > MAX_VOCAB:
        raise DataError(f"{path}: has BOS id {tokenizer.bos_id()} and {tokenizer.vocab_size()} pieces, "
                        f"expected a BOS and at most {MAX_VOCAB} pieces")
    return tokenizer


def decode(tokenizer: sentencepiece.SentencePieceProcessor, tokens: np.ndarray) -> Text:
    """The documents that stand in tokens, each after its BOS. Raises DataError."""
    starts = np.flatnonzero(tokens == tokenizer.bos_id())
    if not len(tokens) or not len(starts) or starts[0] or int(tokens.max()) >= tokenizer.vocab_size():
        raise DataError("the tokens are not this tokenizer's: expected a BOS first and ids below "
                        f"{tokenizer.vocab_size()}")
    parts = np.split(tokens, starts[1:])
    return Text([tokenizer.decode(part[1:].tolist()).encode() for part in parts], tokens)


def encode(tokenizer: sentencepiece.SentencePieceProcessor, documents: list[bytes]) -> Text:
    """Tokens of documents. Raises DataError where the tokenizer does not give a document back."""
    rows = [[tokenizer.bos_id(), *ids] for ids in tokenizer.encode([text.decode() for text in documents])]
    for text, row in zip(documents, rows):
        if tokenizer.decode(row[1:]).encode() != text:
            raise DataError(f"the tokenizer does not give back a document that begins {text[:40]!r}")
    return Text(documents, np.array([i for row in rows for i in row], np.uint16))


def tokenizer_path(track: Track, data: Path, record: Path | None = None) -> Path:
    """The record's own tokenizer where the track allows one and it has one, else the track's."""
    own = record / "tokenizer.model" if record and track.dataset["tokenizer_policy"] == "own" else None
    return own if own and own.exists() else data / "tokenizers" / track.dataset["tokenizer"]


def read_documents(path: Path) -> list[bytes]:
    """Raw documents: a JSON string a line. Raises DataError."""
    try:
        return [json.loads(line).encode() for line in read_bytes(path).decode().split("\n") if line]
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: {error}; expected a JSON string a line, one for a document") from None


def validation_text(
    track: Track, data: Path, record: Path | None = None, documents: Path | None = None
) -> Text:
    """The validation text in the record's tokens, from shards or, if given, raw documents; its sha256 is held
    against the track's. Raises DataError."""
    dataset, source = track.dataset, documents or data / "datasets" / track.dataset["name"]
    theirs, ours = tokenizer_path(track, data, record), tokenizer_path(track, data)
    if documents:
        text = encode(load_tokenizer(theirs), read_documents(documents))
    else:
        text = decode(load_tokenizer(ours), read_split(source, "val"))
    if dataset["val_sha256"] not in (None, text.sha256):
        raise DataError(f"{source}: the validation text has sha256 {text.sha256}, the track's is "
                        f"{dataset['val_sha256']}")
    return text if documents or ours == theirs else encode(load_tokenizer(theirs), text.documents)


def second_text(
    track: Track, tokenizer: sentencepiece.SentencePieceProcessor, given: Path | None
) -> Text | None:
    """The text of the same kind that nobody published: from a file of JSON strings (one document a line), or,
    for the demo corpus, from the installed packages. None where the track has none."""
    if given:
        documents = read_documents(given)
    elif track.dataset["second"] == "demo":
        sys.path.insert(0, str(REPO / "data"))
        import prepare
        try:
            documents = [text for _, text in prepare.demo_documents("second")]
        except prepare.DataError as error:
            raise DataError(str(error)) from None
    else:
        return None
    return encode(tokenizer, documents)


# --- names ------------------------------------------------------------------------------------------------

FOLDER = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})_([A-Za-z0-9][A-Za-z0-9-]{0,59})")
SEED = "seed(?:0|[1-9][0-9]{0,9})"      # one way to write each number: seed01 would be seed1 again
FILES = re.compile(r"README\.md|submission\.json|train_gpt\.py|tokenizer\.model"
                   rf"|train_{SEED}\.log|metrics_{SEED}\.jsonl|model_{SEED}\.int8\.ptz")


def record_folders(root: Path) -> list[Path]:
    """All records of all tracks below `root`, in order of date and name."""
    return sorted(path for track in sorted(root.glob("*/track.json")) for path in track.parent.iterdir()
                  if path.is_dir() and not path.name.startswith("."))


def show(value) -> str:
    """A setting as its environment variable would be written."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(int(value) if isinstance(value, bool) else value)


# --- verdicts ---------------------------------------------------------------------------------------------

def printable(text) -> str:
    """One line without control characters, so that no text from a record looks like another check's line."""
    return "".join(c if c.isprintable() else " " for c in str(text))


@dataclass(frozen=True)
class Check:
    """One line of a verification."""
    verdict: str            # PASS, FAIL or SKIP
    name: str
    text: str               # what was found, what was expected

    def __str__(self) -> str:
        """One line, whatever a stranger's files put into it."""
        return f"{self.verdict} {self.name}: {printable(self.text)[:2000]}"


def check(name: str, good: bool, text: str) -> Check:
    return Check("PASS" if good else "FAIL", name, text)


def skip(name: str, why: str) -> Check:
    return Check("SKIP", name, why)


def equal(name: str, what: str, found, expected) -> Check:
    """PASS if both are the same."""
    return check(name, found == expected, f"{what} {found}, expected {expected}")
