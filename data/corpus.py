"""Documents on disk: hashed, without duplicates, split, in bounded memory whatever the size of the text."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import files, shards
from data.command import DataError, UsageError, printable, say, some
from data.sources import DEMO_SHA256, MAX_DOCUMENT, TRAIN_NAMES, Document, Read, demo_sources

# --- plan: everything that decides the bytes of the result -----------------------------------------------

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
            raise UsageError(
                f"--name is {self.name!r}, expected up to 100 letters, digits and . _ - without "
                "the words train and val"
            )
        if not (SPECIAL_PIECES < self.vocab_size <= shards.IDS or self.given_tokenizer):
            raise UsageError(
                f"--vocab-size is {self.vocab_size}, expected {SPECIAL_PIECES + 1} (every byte, "
                f"three specials, the space) to {shards.IDS} (tokens are uint16)"
            )
        if self.shard_tokens > shards.MAX_TOKENS:
            raise UsageError(f"--shard-tokens is {self.shard_tokens}, expected 1 to {shards.MAX_TOKENS}")

    @property
    def dataset(self) -> str:
        return f"datasets/{self.name}_sp{self.vocab_size}"

    @property
    def tokenizer(self) -> str:
        return f"tokenizers/{self.name}_{self.vocab_size}_{self.model_type}.model"


# --- spool: documents on disk, by hash -------------------------------------------------------------------

BUCKETS = 64  # by the first bits of the hash; macOS allows 256 open files, two each
SPLITS = ("val", "second", "train")  # in order of their keys

# Where a document lies in its bucket: its name (of that many bytes) stands at `offset`, its text after it.
# The hash as four numbers, because numpy sorts numbers and not bytes with zeros at the end.
# train: whether it is for training alone.
PLACE = np.dtype([("hash", ">u8", 4), ("offset", "<u8"), ("name", "<u4"), ("size", "<u4"), ("train", "?")])
_PLACE = struct.Struct("<32sQII?")


def usable(documents: Iterable[Read], plan: Plan, skip_bad: bool, dropped: Counter) -> Iterator[Document]:
    """The documents that can be used. Raises DataError for others, or names the first and counts them all."""
    marked = []
    for name, text in documents:
        if isinstance(text, bytes) and MARK in text and not plan.lossy_ok:
            marked.append(name)
            text = DataError(f"{name}: holds U+2581, which SentencePiece takes for a space")
            if not skip_bad:
                continue
        if isinstance(text, bytes):
            yield name, text
        elif not skip_bad:
            raise DataError(f"{text}; --skip-bad leaves such documents out")
        else:
            dropped["skipped"] += 1
            if dropped["skipped"] <= 10:
                say(f"skipped: {printable(text)}")
    if marked and not skip_bad:
        raise DataError(
            f"documents that hold U+2581, which SentencePiece takes for a space: {len(marked):,} "
            f"({some(marked)}); --skip-bad leaves them out, --lossy-ok accepts the loss"
        )


def spool(documents: Iterable[Read], plan: Plan, folder: Path, skip_bad: bool = False) -> None:
    """Put all documents into `folder`, which appears only when it is whole. Empty ones are left out."""
    partial = files.beside(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    dropped = Counter(empty=0, duplicates=0, skipped=0)
    with contextlib.ExitStack() as stack, progress("read", None) as bar:
        texts = [stack.enter_context(open(partial / f"{b:02x}.text", "wb")) for b in range(BUCKETS)]
        places = [stack.enter_context(open(partial / f"{b:02x}.places", "wb")) for b in range(BUCKETS)]
        for name, text in usable(documents, plan, skip_bad, dropped):
            if not text:
                dropped["empty"] += 1
                continue
            digest = hashlib.sha256(text).digest()
            label = name.encode(errors="replace")
            bucket = digest[0] * BUCKETS // 256
            train = len(text) > plan.val_max_bytes
            train |= bool(plan.train_names and re.match(plan.train_names, name))
            places[bucket].write(_PLACE.pack(digest, texts[bucket].tell(), len(label), len(text), train))
            texts[bucket].write(label + text)
            bar.update(len(text))
    dropped["duplicates"] = sum(sort_bucket(partial / f"{b:02x}.places") for b in range(BUCKETS))
    (partial / "dropped.json").write_text(json.dumps(dropped))
    os.rename(partial, folder)


def sort_bucket(path: Path) -> int:
    """Order a bucket by hash and drop exact duplicates; how many there were."""
    places = np.fromfile(path, PLACE)
    h = places["hash"]
    places = places[np.lexsort((~places["train"], h[:, 3], h[:, 2], h[:, 1], h[:, 0]))]
    new = np.ones(len(places), bool)
    new[1:] = (places["hash"][1:] != places["hash"][:-1]).any(axis=1)
    places[new].tofile(path)
    return int((~new).sum())


class Corpus:
    """The spooled documents: hashed, without duplicates, split.

    A document's key, which decides its split, is the second eight bytes of its sha256 as a number; its place
    in the split is decided by the whole sha256. Two parts, so that the order within a split is a shuffle.
    `text_bytes`, `largest` (document, in bytes) and `sha256_of` (its documents' digests) are by split.
    """

    def __init__(self, folder: Path, plan: Plan, expected: str | None = None):
        self.folder = folder
        self.dropped = files.read_json(folder / "dropped.json")
        identity = hashlib.sha256()
        smallest = np.zeros(0, np.uint64)  # keys, as many as val must hold
        documents = 0
        for bucket in range(BUCKETS):
            places = np.fromfile(folder / f"{bucket:02x}.places", PLACE)
            identity.update(places["hash"].tobytes())
            keys = places["hash"][~places["train"], 1].astype(np.uint64)
            smallest = np.sort(np.concatenate([smallest, keys]))[: plan.val_docs or 2]
            documents += len(places)
        at_least = plan.val_docs or (2 if documents > 2 else 1)  # one alone would decide a score
        if documents <= at_least or len(smallest) < at_least:
            raise DataError(
                f"the text has {documents} distinct documents that are not empty, expected at least "
                f"{at_least + 1}: one to train on and {at_least} for validation, of at most "
                f"{plan.val_max_bytes} bytes (--separator LINE splits plain text)"
            )
        self.sha256 = identity.digest()
        if expected not in (None, self.sha256.hex()):
            raise DataError(
                f"the corpus has sha256 {self.sha256.hex()}, expected {expected}; to mend changed "
                "packages: pip install --force-reinstall --no-deps -r requirements.txt"
            )
        share = 0 if plan.val_docs else int(plan.val_fraction * 2**64)
        last_val = max(share - 1, int(smallest[at_least - 1]))
        last_second = last_val + int(plan.second_fraction * 2**64)
        self.last_keys = np.array([last_val, last_second], np.uint64)
        self.text_bytes = dict.fromkeys(SPLITS, 0)
        self.largest = dict.fromkeys(SPLITS, 0)
        digests = {split: hashlib.sha256() for split in SPLITS}
        for bucket, split in itertools.product(range(BUCKETS), SPLITS):
            places = self.places(bucket, split)
            self.text_bytes[split] += int(places["size"].sum(dtype=np.int64))
            self.largest[split] = max(self.largest[split], int(places["size"].max(initial=0)))
            digests[split].update(places["hash"].tobytes())
        self.sha256_of = {split: digest.hexdigest() for split, digest in digests.items()}
        if not self.text_bytes["train"]:
            raise DataError(
                f"all {documents} documents fall to validation, expected one to train on at "
                "least: choose a smaller --val-fraction"
            )

    def places(self, bucket: int, split: str) -> np.ndarray:
        """PLACE [documents] of one bucket's val, second or train, in order."""
        places = np.fromfile(self.folder / f"{bucket:02x}.places", PLACE)
        sides = np.searchsorted(self.last_keys, places["hash"][:, 1])
        sides[places["train"]] = SPLITS.index("train")
        return places[sides == SPLITS.index(split)]

    def read(self, split: str, skip: int = 0) -> Iterator[Document]:
        """The documents of a split, in order of their hashes, without the first `skip`."""
        for bucket in range(BUCKETS):
            places = self.places(bucket, split)
            todo = places[skip:].tolist()
            skip = max(0, skip - len(places))
            with open(self.folder / f"{bucket:02x}.text", "rb") as file:
                for _, offset, name, size, _ in todo:
                    file.seek(offset)
                    yield file.read(name).decode(), file.read(size)


def progress(what: str, total: int | None, initial: int = 0) -> tqdm:
    """A bar of bytes with a rate on a terminal, nothing elsewhere."""
    return tqdm(desc=what, total=total, initial=initial, unit="B", unit_scale=True, disable=None, leave=False)


# --- the demo corpus -------------------------------------------------------------------------------------

DEMO_PLAN = Plan(
    "demo", val_fraction=0.17, val_max_bytes=32 << 10, train_names=TRAIN_NAMES, second_fraction=0.08
)


def demo_documents(split: str) -> list[Document]:
    """Documents of the demo corpus in order: split is val, train, or second, which is in no shard.

    Read from the installed packages, for the referee, who needs no shards. Raises DataError.
    """
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder, "documents")
        spool(demo_sources(), DEMO_PLAN, documents)
        return list(Corpus(documents, DEMO_PLAN, DEMO_SHA256).read(split))
