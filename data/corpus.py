"""Documents on disk: hashed, without duplicates, split, in bounded memory whatever the size of the text."""

import contextlib
import errno
import hashlib
import importlib.metadata
import os
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data import files
from data.command import REPO, DataError, UsageError, advancing, printable, say, shell

# --- plan: everything that decides the bytes of the result -----------------------------------------------

Document = tuple[str, bytes]  # a name for people ("book.txt", "a.jsonl:17") and UTF-8 text
Read = tuple[str, bytes | DataError]  # the same, or why there is no text
MAX_DOCUMENT = 16 << 20  # bytes; SentencePiece needs about 30 times as much memory
MARK = "\u2581".encode()
SPECIAL_PIECES = 3 + 256  # unknown, BOS, EOS, and every byte


@dataclass(frozen=True)
class Plan:
    """Options of one preparation. Equal plans over equal text give equal files."""

    name: str
    vocab_size: int = 1024
    model_type: str = "bpe"  # or "unigram", or "given" of a tokenizer that was
    given_tokenizer: str = ""  # sha256 of a tokenizer that was given, else empty
    val_fraction: float = 0.01
    val_docs: int = 0  # if not 0, this many documents instead of the fraction
    val_max_bytes: int = MAX_DOCUMENT  # larger documents are for training, so that none decides a score
    train_names: str = ""  # regular expression: documents whose names begin so are for training alone
    second_fraction: float = 0.0  # kept out of both splits: the referee's second text
    shard_tokens: int = 100_000_000
    lossy_ok: bool = False

    def __post_init__(self):
        words = self.name.split("_")  # the trainer finds its files by *_train_*.bin and *_val_*.bin
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.name) or {"train", "val"} & set(words):
            takes = "up to 100 letters, digits and . _ - without the words train and val"
            raise UsageError(f"--name is {self.name!r}, expected {takes}")

    @property
    def dataset(self) -> str:
        return f"datasets/{self.name}_sp{self.vocab_size}"

    @property
    def tokenizer(self) -> str:
        return f"tokenizers/{self.name}_{self.vocab_size}_{self.model_type}.model"


# --- spool: documents on disk, by hash -------------------------------------------------------------------

SPLITS = ("val", "second", "train")
TABLES = """
CREATE TABLE documents (hash BLOB PRIMARY KEY, train INTEGER, size INTEGER, name TEXT, text BLOB);
CREATE TABLE dropped (why TEXT, count INTEGER);
PRAGMA journal_mode = OFF;  -- the file has no name before it is whole
PRAGMA synchronous = OFF;
"""
# Of two equal documents one that is for training alone decides.
ADD = """
INSERT INTO documents VALUES (?, ?, ?, ?, ?)
ON CONFLICT (hash) DO UPDATE SET train = 1 WHERE excluded.train > train
"""

# The split of a document: in SQL, for a signal within a function of Python would be an error of SQLite.
SPLIT = """CASE
    WHEN train OR substr(hash, 9, 8) > :last_second THEN 'train'
    WHEN substr(hash, 9, 8) > :last_val THEN 'second'
    ELSE 'val'
END"""


def size_of(document: Document) -> int:
    return len(document[1])


def usable(documents: Iterable[Read], plan: Plan, skip_bad: bool, dropped: Counter) -> Iterator[Document]:
    """The documents that can be used. Others are skipped and counted, or ten of them end it: DataError."""
    bad = []
    for name, text in documents:
        if isinstance(text, bytes) and MARK in text and not plan.lossy_ok:
            mend = "--lossy-ok accepts the loss"
            text = DataError(f"{name}: holds U+2581, which SentencePiece takes for a space; {mend}")
        if isinstance(text, bytes):
            yield name, text
        elif skip_bad:
            dropped["skipped"] += 1
            if dropped["skipped"] <= 10:
                say(f"skipped: {printable(text)}")
        else:
            bad.append((name, text))
            if len(bad) == 10:
                break
    if bad:
        others = f", as {', '.join(name for name, _ in bad[1:])}" if bad[1:] else ""
        raise DataError(f"{bad[0][1]}; --skip-bad leaves such documents out{others}")


def spool(documents: Iterable[Read], plan: Plan, path: Path, skip_bad: bool = False) -> None:
    """Put all documents into a database, which appears only when it is whole. Empty ones are left out."""
    partial = files.beside(path)
    partial.unlink(missing_ok=True)
    dropped = Counter(empty=0, duplicates=0, skipped=0)
    found = advancing(usable(documents, plan, skip_bad, dropped), "read", size=size_of)
    try:
        with contextlib.closing(sqlite3.connect(partial)) as database:
            database.executescript(TABLES)
            added = add_all(database, found, plan, dropped)
            (kept,) = database.execute("SELECT count(*) FROM documents").fetchone()
            dropped["duplicates"] = added - kept
            database.executemany("INSERT INTO dropped VALUES (?, ?)", dropped.items())
            database.commit()
    except sqlite3.OperationalError as error:  # it does not say why
        raise OSError(errno.ENOSPC, f"cannot be written ({error})", str(path)) from error
    os.rename(partial, path)


def add_all(database: sqlite3.Connection, documents: Iterable[Document], plan: Plan, dropped: Counter) -> int:
    """Add all documents that are not empty; how many there were."""
    added = 0
    for name, text in documents:
        if not text:
            dropped["empty"] += 1
            continue
        train = len(text) > plan.val_max_bytes
        train |= bool(plan.train_names and re.match(plan.train_names, name))
        label = name.encode(errors="replace").decode()
        database.execute(ADD, (hashlib.sha256(text).digest(), train, len(text), label, text))
        added += 1
    return added


class Corpus:
    """The spooled documents: hashed, without duplicates, split.

    A document's key, which decides its split, is the second eight bytes of its sha256 as a number; its place
    in the split is decided by the whole sha256. Two parts, so that the order within a split is a shuffle.
    `text_bytes`, `largest` (document, in bytes) and `sha256_of` (its documents' digests) are by split.
    `more` says what gives more documents.
    """

    def __init__(self, path: Path, plan: Plan, expected: str | None = None, more: str = ""):
        self.database = sqlite3.connect(path)
        self.dropped = dict(self.database.execute("SELECT * FROM dropped"))
        self.last_keys = last_keys(self.database, plan, more)
        self.text_bytes = dict.fromkeys(SPLITS, 0)
        self.largest = dict.fromkeys(SPLITS, 0)
        digests = {split: hashlib.sha256() for split in SPLITS}
        identity = hashlib.sha256()
        rows = f"SELECT hash, {SPLIT}, size FROM documents ORDER BY hash"
        for digest, split, size in self.database.execute(rows, self.last_keys):
            self.text_bytes[split] += size
            self.largest[split] = max(self.largest[split], size)
            digests[split].update(digest)
            identity.update(digest)
        self.sha256 = identity.digest()
        self.sha256_of = {split: digest.hexdigest() for split, digest in digests.items()}
        if expected not in (None, self.sha256.hex()):
            mend = "to mend changed packages: pip install --force-reinstall --no-deps -r requirements.txt"
            raise DataError(f"the corpus has sha256 {self.sha256.hex()}, expected {expected}; {mend}")
        if not self.text_bytes["train"]:
            mend = "choose a smaller --val-fraction"
            raise DataError(f"all documents fall to validation, expected one to train on at least: {mend}")

    def read(self, split: str, skip: int = 0) -> Iterator[Document]:
        """The documents of a split, in order of their hashes, without the first `skip`."""
        chosen = f"FROM documents WHERE {SPLIT} = :split ORDER BY hash LIMIT -1 OFFSET :skip"
        values = self.last_keys | {"split": split, "skip": skip}
        yield from self.database.execute(f"SELECT name, text {chosen}", values)


def last_keys(database: sqlite3.Connection, plan: Plan, more: str) -> dict[str, bytes]:
    """The last keys of val and of second, for SPLIT. Raises DataError where there are too few documents."""
    (documents,) = database.execute("SELECT count(*) FROM documents").fetchone()
    at_least = plan.val_docs or (2 if documents > 2 else 1)  # one alone would decide a score
    keys = "SELECT substr(hash, 9, 8) FROM documents WHERE NOT train ORDER BY 1 LIMIT ?"
    smallest = [int.from_bytes(key) for (key,) in database.execute(keys, [at_least])]
    if documents <= at_least or len(smallest) < at_least:
        small = f", of at most {plan.val_max_bytes:,} bytes" if plan.val_max_bytes < MAX_DOCUMENT else ""
        least = f"at least {at_least + 1}: one to train on and {at_least} for validation{small}"
        raise DataError(f"the text has {documents} distinct documents with text, expected {least}; {more}")
    share = 0 if plan.val_docs else int(plan.val_fraction * 2**64)
    last_val = max(share - 1, smallest[-1])
    last_second = min(last_val + int(plan.second_fraction * 2**64), 2**64 - 1)
    return {"last_val": last_val.to_bytes(8), "last_second": last_second.to_bytes(8)}


# --- the demo corpus -------------------------------------------------------------------------------------

# Packages that torch imports, so every record sees their modules; and the folders that nobody imports from.
# What a record can see is text to train on.
IMPORTED = ["filelock", "fsspec", "jinja2", "mpmath", "networkx", "packaging", "sympy", "tqdm"]
NOT_IMPORTED = ["tests", "benchmarks", "testing"]
TRAIN_NAMES = f"({'|'.join(IMPORTED)})/(?!(.*/)?({'|'.join(NOT_IMPORTED)})/)"
DEMO_PACKAGES = [*IMPORTED, "huggingface_hub", "anyio", "click", "idna", "httpx2", "httpcore2", "h11"]
DEMO_SHA256 = "71cb47296fc2e2a3251d45f4feeb834cfbee06084025c421a6b297bf7298a28b"
DEMO_PLAN = Plan(
    "demo", val_fraction=0.17, val_max_bytes=32 << 10, train_names=TRAIN_NAMES, second_fraction=0.08
)


def demo_sources() -> Iterator[Document]:
    """The .py files of the pinned packages; whoever takes them compares the sha256 of them all.

    All of them are UTF-8, none holds NUL or U+2581, which a SentencePiece model cannot give back.
    """
    requirements = (REPO / "requirements.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", requirements.lower(), re.MULTILINE))
    for package in DEMO_PACKAGES:
        mend = shell("pip", "install", "--force-reinstall", "--no-deps", f"{package}=={pins[package]}")
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            raise DataError(f"{package}: not installed, expected version {pins[package]}: {mend}") from None
        version = distribution.version
        if version != pins[package]:
            raise DataError(f"{package}: version {version} is installed, expected {pins[package]}: {mend}")
        for file in distribution.files or ():
            # in the package's own folder: installers write elsewhere, as into ../../bin, and bytecode
            if file.suffix == ".py" and len(file.parts) > 1 and file.parts[0] != ".." and file.hash:
                try:
                    yield str(file), Path(file.locate()).read_bytes()
                except OSError as error:
                    raise DataError(f"{file}: cannot be read ({error.strerror}): {mend}") from error


def demo_documents(split: str) -> list[Document]:
    """Documents of the demo corpus in order: split is val, train, or second, which is in no shard.

    Read from the installed packages, for the referee, who needs no shards. Raises DataError.
    """
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder, "documents")
        spool(demo_sources(), DEMO_PLAN, documents)
        return list(Corpus(documents, DEMO_PLAN, DEMO_SHA256).read(split))
