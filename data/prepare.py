"""From text to a tokenizer, shards and a manifest. data/README.md explains the options.

    python -m data.prepare demo
    python -m data.prepare development
    python -m data.prepare text PATH... --name NAME --vocab-size 1024

All run the same pipeline, in bounded memory whatever the size of the text:
  1. spool     read every document once, hash it, put it in one of 64 buckets by its hash; sort each bucket
  2. split     by another part of the same hash
  3. tokenizer train it on training documents only, or take the one that was given
  4. encode    in parallel, in the order of the hashes; decode again and compare
  5. seal      complete the headers, verify everything, give the finished folder its name
All of it grows in a hidden folder beside the target. A second run continues from the parts that are whole.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import struct
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import filelock
import numpy as np
from tqdm import tqdm

from data import command, copies, files, shards
from data.command import REPO, DataError, UsageError, say
from data.shards import SPLIT_NAMES, TRAIN, VAL
from data.sources import MAX_DOCUMENT, READERS, Document, Source, find_files

# --- plan: everything that decides the bytes of the result -----------------------------------------------


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

    def last_keys(self, smallest: int) -> tuple[int, int]:
        """Last key of val and of the second text; `smallest` is the key that val must hold at the least."""
        share = 0 if self.val_docs else int(self.val_fraction * 2**64)
        last_val = max(share - 1, smallest)
        return last_val, last_val + int(self.second_fraction * 2**64)


@dataclass(frozen=True)
class Job:
    """A plan, where its documents come from, and where its results go."""

    plan: Plan
    documents: Iterable[Document]
    state: list  # of the source, as JSON: another state, another spool
    root: Path = REPO
    workers: int = 2
    given: bytes | None = None  # tokenizer file to use instead of training one
    expected: str | None = None  # sha256 that the corpus must have

    @property
    def target(self) -> Path:
        return self.root / "data" / self.plan.dataset

    @property
    def tokenizer(self) -> Path:
        return self.root / "data" / self.plan.tokenizer

    @property
    def work(self) -> Path:
        return self.root / "data" / f".spool_{self.target.name}"


# --- spool: documents on disk, by hash -------------------------------------------------------------------

BUCKETS = 64  # by the first bits of the hash; macOS allows 256 open files, two each

# Where a document lies in its bucket: its name (of that many bytes) stands at `offset`, its text after it.
# The hash as four numbers, because numpy sorts numbers and not bytes with zeros at the end.
# train: whether it is for training alone.
PLACE = np.dtype([("hash", ">u8", 4), ("offset", "<u8"), ("name", "<u4"), ("size", "<u4"), ("train", "?")])
_PLACE = struct.Struct("<32sQII?")


def spool(documents: Iterable[Document], plan: Plan, folder: Path) -> None:
    """Put all documents into `folder`, which appears only when it is whole. Empty ones are left out."""
    partial = files.beside(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    empty = 0
    with contextlib.ExitStack() as stack, progress("read", None) as bar:
        texts = [stack.enter_context(open(partial / f"{b:02x}.text", "wb")) for b in range(BUCKETS)]
        places = [stack.enter_context(open(partial / f"{b:02x}.places", "wb")) for b in range(BUCKETS)]
        for name, text in documents:
            if not text:
                empty += 1
                continue
            digest = hashlib.sha256(text).digest()
            label = name.encode(errors="replace")
            bucket = digest[0] * BUCKETS // 256
            train = len(text) > plan.val_max_bytes
            train |= bool(plan.train_names and re.match(plan.train_names, name))
            places[bucket].write(_PLACE.pack(digest, texts[bucket].tell(), len(label), len(text), train))
            texts[bucket].write(label + text)
            bar.update(len(text))
    duplicates = sum(sort_bucket(partial / f"{b:02x}.places") for b in range(BUCKETS))
    (partial / "dropped.json").write_text(json.dumps({"empty": empty, "duplicates": duplicates}))
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


SPLITS = ("val", "second", "train")  # in order of their keys


class Corpus:
    """The spooled documents: hashed, without duplicates, split.

    A document's key, which decides its split, is the second eight bytes of its sha256 as a number; its place
    in the split is decided by the whole sha256. Two parts, so that the order within a split is a shuffle.
    """

    def __init__(self, folder: Path, plan: Plan, expected: str | None = None):
        self.folder = folder
        self.dropped = files.read_json(folder / "dropped.json")
        identity = hashlib.sha256()
        smallest = np.zeros(0, np.uint64)  # keys, as many as val must hold
        documents = 0
        at_least = max(plan.val_docs, 1)
        for bucket in range(BUCKETS):
            places = self.places(bucket)
            identity.update(places["hash"].tobytes())
            keys = places["hash"][~places["train"], 1].astype(np.uint64)
            smallest = np.sort(np.concatenate([smallest, keys]))[:at_least]
            documents += len(places)
        if documents <= at_least or len(smallest) < at_least:
            raise DataError(
                f"the text has {documents} distinct documents that are not empty, expected at least "
                f"{at_least + 1}: one to train on and {at_least} for validation, of at most "
                f"{plan.val_max_bytes} bytes (--separator LINE splits .txt files)"
            )
        self.sha256 = identity.digest()
        if expected not in (None, self.sha256.hex()):
            raise DataError(
                f"the corpus has sha256 {self.sha256.hex()}, expected {expected}; to mend changed "
                "packages: pip install --force-reinstall --no-deps -r requirements.txt"
            )
        self.last_keys = np.array(plan.last_keys(int(smallest[-1])), np.uint64)
        self.count_splits()
        if not self.text_bytes["train"]:
            raise DataError(
                f"all {documents} documents fall to validation, expected one to train on at "
                "least: choose a smaller --val-fraction"
            )

    def count_splits(self) -> None:
        """Bytes of text of each split and of its largest document, sha256 over its documents' digests."""
        self.text_bytes = dict.fromkeys(SPLITS, 0)
        self.largest = dict.fromkeys(SPLITS, 0)
        digests = {split: hashlib.sha256() for split in SPLITS}
        for bucket in range(BUCKETS):
            for split in SPLITS:
                places = self.places(bucket, split)
                self.text_bytes[split] += int(places["size"].sum(dtype=np.int64))
                self.largest[split] = max(self.largest[split], int(places["size"].max(initial=0)))
                digests[split].update(places["hash"].tobytes())
        self.split_sha256 = {split: digest.hexdigest() for split, digest in digests.items()}

    def places(self, bucket: int, split: str | None = None) -> np.ndarray:
        """PLACE [documents] of one bucket in order: all, or those of val, second or train."""
        places = np.fromfile(self.folder / f"{bucket:02x}.places", PLACE)
        if split is None:
            return places
        sides = np.searchsorted(self.last_keys, places["hash"][:, 1])
        sides[places["train"]] = SPLITS.index("train")
        return places[sides == SPLITS.index(split)]

    def read(self, split: str, skip: int = 0) -> Iterator[Document]:
        """The documents of a split, in order of their hashes, without the first `skip`."""
        for bucket in range(BUCKETS):
            places = self.places(bucket, split)
            todo = places[skip:].tolist()
            skip = max(0, skip - len(places))
            if not todo:
                continue
            with open(self.folder / f"{bucket:02x}.text", "rb") as file:
                for _, offset, name, size, _ in todo:
                    file.seek(offset)
                    yield file.read(name).decode(), file.read(size)


def progress(what: str, total: int | None, initial: int = 0) -> tqdm:
    """A bar of bytes with a rate on a terminal, nothing elsewhere."""
    return tqdm(desc=what, total=total, initial=initial, unit="B", unit_scale=True, disable=None, leave=False)


# --- tokenizer -------------------------------------------------------------------------------------------

SAMPLE_CHARS = {"bpe": 8_000_000, "unigram": 1_000_000}  # two seconds of training, and ten
DOCUMENT_CHARS = 50_000  # from one document: huge generated files would else fill the vocabulary
WINDOW_CHARS = 500  # trained on windows across lines: 1.92 bytes a token, on single words 1.84
SPECIAL_PIECES = 3 + 256  # unknown, BOS, EOS, and every byte


def train_tokenizer(texts: Iterable[bytes], plan: Plan) -> bytes:
    """A SentencePiece model, lossless by its settings, trained on windows of the documents.

    Pieces may cross spaces, line ends and scripts: on source code that gives more bytes a token, since line
    end and indentation become one piece. What has no piece is written in bytes.
    """
    import sentencepiece  # 0.1 s that reading the demo's documents need not pay

    say(f"training a tokenizer: {plan.vocab_size} pieces, {plan.model_type}")
    starts = sample(texts, SAMPLE_CHARS[plan.model_type])
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(starts, plan.vocab_size),
            model_writer=model,
            vocab_size=plan.vocab_size,
            model_type=plan.model_type,
            character_coverage=1.0,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_by_whitespace=False,
            split_by_unicode_script=False,
            split_by_number=False,
            max_sentence_length=4 * WINDOW_CHARS + 4,
            num_threads=2,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=3,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        most = re.search(r"set it to a value <= (\d+)", reason)
        if not most:
            raise DataError(f"no tokenizer could be trained on this text: {reason}") from error
        raise UsageError(
            f"--vocab-size is {plan.vocab_size}, expected at most {most[1]}, all that this text "
            "has pieces for"
        ) from error
    return model.getvalue()


def sample(texts: Iterable[bytes], limit: int) -> list[str]:
    """The start of each document until there are `limit` characters; documents come shuffled by hash."""
    taken = []
    chars = 0
    for text in texts:
        taken.append(text[: 4 * DOCUMENT_CHARS].decode(errors="ignore")[:DOCUMENT_CHARS])
        chars += len(taken[-1])
        if chars >= limit:
            break
    return taken


def sentences(texts: list[str], vocab_size: int) -> Iterator[str]:
    """Windows to train on, cut at rare characters: half of the free pieces may be single characters.

    Otherwise a text in many scripts has more characters than the vocabulary has places. NUL and the marks
    that SentencePiece keeps for itself are cut out too. The space is always kept: without a piece of its own
    its mark would come back from decoding in its place.
    """
    counts = np.bincount(np.frombuffer("".join(texts).encode("utf-32-le"), "<u4"))
    codes = np.flatnonzero(counts)
    codes = codes[np.argsort(-counts[codes], kind="stable")]  # of equally many the lower code first
    characters = [chr(code) for code in codes]
    common = [c for c in characters if c not in " \0\u2581\u2585"]
    kept = {" ", *common[: (vocab_size - SPECIAL_PIECES - 1) // 2]}
    rare = "".join(c for c in characters if c not in kept)
    cut = re.compile(f"[{re.escape(rare)}]+") if rare else None
    yield " "
    for text in texts:
        for start in range(0, len(text), WINDOW_CHARS):
            window = text[start : start + WINDOW_CHARS]
            yield from cut.split(window) if cut else [window]


# --- encoding --------------------------------------------------------------------------------------------

BATCH_BYTES = 300_000
RUNNING_BYTES = MAX_DOCUMENT  # being encoded at a time; this bounds the memory, whatever the threads
SAMPLED = 32  # one training document in so many is decoded again and compared


@dataclass(frozen=True)
class Encoded:
    """One document: uint16 tokens with BOS first, bytes of its text, whether decoding loses some of it."""

    tokens: np.ndarray
    text_bytes: int
    lossy: bool


def encode_batch(
    batch: list[Document], tokenizer: shards.Tokenizer, compare_every: int, lossy_ok: bool
) -> list[Encoded]:
    """Encode documents; decode one in `compare_every` again, and each whose tokens have other bytes than it.

    Its content decides which one, so that a resumed run compares the same. SentencePiece lets go of Python's
    lock, so this runs in threads, which copy nothing.
    """
    ids = tokenizer.processor.encode([text for _, text in batch], add_bos=True, return_type="numpy")
    lengths = [len(document) for document in ids]
    ends = np.cumsum(lengths)
    tokens = np.concatenate(ids).astype(np.uint16)
    sizes = tokenizer.document_bytes(tokens, ends - lengths).tolist()
    done = []
    for (name, text), document, size in zip(batch, np.split(tokens, ends[:-1]), sizes):
        lossy = False
        if size != len(text) or zlib.crc32(text) % compare_every == 0:
            decoded = tokenizer.processor.decode(document.tolist()).encode()
            lossy = decoded != text
            if lossy and not lossy_ok:
                raise text_lost(name, text, decoded)
        done.append(Encoded(document, len(text), lossy))
    return done


def text_lost(name: str, text: bytes, decoded: bytes) -> DataError:
    differing = (i for i, (a, b) in enumerate(zip(text, decoded)) if a != b)
    at = next(differing, min(len(text), len(decoded)))
    return DataError(
        f"{name}: the tokenizer is not lossless: byte {at} of the document begins "
        f"{decoded[at : at + 12]!r} when decoded, expected {text[at : at + 12]!r}; take the document "
        "out, choose another tokenizer, or accept the loss with --lossy-ok"
    )


def batches(documents: Iterator[Document], least: int) -> Iterator[tuple[list[Document], int]]:
    """Group documents into lists of `least` bytes or a little more, each with its size."""
    batch = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= least:
            yield batch, size
            batch = []
            size = 0
    if batch:
        yield batch, size


def encode(
    documents: Iterator[Document],
    tokenizer: shards.Tokenizer,
    compare_every: int,
    lossy_ok: bool,
    workers: int,
) -> Iterator[Encoded]:
    """The documents in order, encoded in `workers` threads. Raises DataError where text would be lost."""
    pool = ThreadPoolExecutor(workers)
    running = deque()
    running_bytes = 0
    try:
        for batch, size in batches(documents, BATCH_BYTES):
            while running and (running_bytes + size > RUNNING_BYTES or running[0][0].done()):
                future, done_bytes = running.popleft()
                yield from future.result()
                running_bytes -= done_bytes
            running.append((pool.submit(encode_batch, batch, tokenizer, compare_every, lossy_ok), size))
            running_bytes += size
        for future, _ in running:
            yield from future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def write_split(split: int, job: Job, corpus: Corpus, tokenizer: shards.Tokenizer, folder: Path) -> None:
    """Write the shards of one split that `folder` does not hold yet. A shard holds whole documents only."""
    name = SPLIT_NAMES[split]
    whole = [shards.read_header(path) for path in shards.by_split(folder.iterdir())[split]]
    header = shards.Header(
        tokens=0,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        index=len(whole),
        split=split,
        tokenizer=tokenizer.sha256,
        corpus=corpus.sha256,
    )
    compare_every = 1 if split == VAL else SAMPLED
    todo = corpus.read(name, sum(h.documents for h in whole))
    documents = encode(todo, tokenizer, compare_every, job.plan.lossy_ok, job.workers)
    writer = None
    total = corpus.text_bytes[name]
    say(f"encoding {name}: {total:,} bytes")
    with progress(f"encode {name}", total, sum(h.text_bytes for h in whole)) as bar:
        for document in documents:
            if writer and writer.header.tokens + len(document.tokens) > job.plan.shard_tokens:
                writer.close()
                header = replace(header, index=header.index + 1)
                writer = None
            if writer is None:
                path = folder / shards.shard_name(job.plan.name, split, header.index)
                writer = shards.ShardWriter(path, header)
            writer.add(document.tokens, document.text_bytes, document.lossy)
            bar.update(document.text_bytes)
    if writer:
        writer.close()


# --- the validation text: does one document decide the score, is it known from training? ------------------

# At most so many bytes of validation text are looked for in so many of training text: 40 seconds and 200 MB.
# Both are samples, since documents come in the order of their hashes.
LOOKED_FOR = 4 << 20
LOOKED_IN = 1 << 30


def judge_validation(corpus: Corpus) -> dict:
    """What part of the validation text is one document, and what part stands in the training text."""
    say("looking for validation text in the training text")
    documents, looked_for = next(batches(corpus.read("val"), LOOKED_FOR))
    # Neither byte is UTF-8: no window that reaches over two documents is found.
    search = copies.Search(b"\xff".join(text for _, text in documents))
    looked_in = 0
    for documents, size in batches(corpus.read("train"), BATCH_BYTES):
        search.look_in(b"\xfe".join(text for _, text in documents))
        looked_in += size
        if looked_in >= LOOKED_IN:
            break
    return {
        "largest_document": round(corpus.largest["val"] / corpus.text_bytes["val"], 4),
        "repeated": round(search.covered() / looked_for, 4),
        "looked_for": looked_for,
        "looked_in": looked_in,
    }


# --- the pipeline ----------------------------------------------------------------------------------------


def prepare(job: Job) -> dict:
    """Make the dataset of `job`, or continue making it, or find that it is there. Its manifest.

    Raises DataError and UsageError, after which nothing stays behind: the next run will have other text or
    other options. What ends a run otherwise leaves what is whole to the next one.
    """
    job.work.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(job.work / "lock", timeout=0):
            try:
                manifest = finished(job, job.expected) or build(job)
            except (DataError, UsageError):
                remove(job.work)
                raise
            remove(job.work)
            return manifest
    except filelock.Timeout as error:
        raise UsageError(
            f"{job.work}: another data.prepare is at work there, expected to be alone"
        ) from error


def clear(work: Path) -> None:
    """Empty the hidden folder; the plan first, so that no later run trusts what a kill may leave of it."""
    (work / "plan.json").unlink(missing_ok=True)
    for leftover in ("documents", "documents.partial", "dataset"):
        shutil.rmtree(work / leftover, ignore_errors=True)
    for leftover in ("tokenizer.model", "tokenizer.model.partial", "plan.json.partial"):
        (work / leftover).unlink(missing_ok=True)


def remove(work: Path) -> None:
    """Remove the hidden folder, the lock last: whoever waits for it finds it gone and makes a new one."""
    clear(work)
    (work / "lock").unlink()
    with contextlib.suppress(OSError):  # another run may have begun there
        work.rmdir()


def finished(job: Job, corpus_sha256: str | None) -> dict | None:
    """The manifest of the target if that is there, whole, and of this corpus (None: not known yet).

    Raises UsageError where something else is in its place, DataError where it is damaged.
    """
    if not job.target.exists():
        return None
    try:
        manifest = shards.load_manifest(job.target) or {}
        same = manifest.get("options") == asdict(job.plan)
        if not same or corpus_sha256 not in (None, manifest["corpus_sha256"]):
            both = job.target if job.given else f"{job.target} {job.tokenizer}"
            raise UsageError(
                f"{job.target}: exists and was made from other text or with other options, expected "
                f"a free place; choose another --name, or remove it: rm -r {both}"
            )
        if corpus_sha256 is None:
            return None
        shards.raise_failed(shards.verify_folder(job.target, shards.Tokenizer(job.tokenizer)))
    except DataError as error:
        raise DataError(f"{error}; rm -r {job.target} and the same command makes it anew") from error
    say(f"{job.target}: is whole, made by the same command")
    return manifest


def build(job: Job) -> dict:
    """The five steps, each skipped where its result is whole. The manifest."""
    begin(job)
    documents = job.work / "documents"
    dataset = job.work / "dataset"
    model = job.work / "tokenizer.model"
    if not documents.exists():
        say("reading the documents")
        spool(job.documents, job.plan, documents)
    corpus = Corpus(documents, job.plan, job.expected)
    if manifest := finished(job, corpus.sha256.hex()):
        return manifest
    if not model.exists():
        texts = (text for _, text in corpus.read("train"))
        files.write_beside(model, job.given or train_tokenizer(texts, job.plan))
    if job.tokenizer.exists() and job.tokenizer.read_bytes() != model.read_bytes():
        raise UsageError(
            f"{job.tokenizer}: another tokenizer has this name, expected a free place; choose "
            f"another --name, or remove it: rm {job.tokenizer}"
        )
    tokenizer = shards.Tokenizer(model)
    dataset.mkdir(exist_ok=True)
    for split in (VAL, TRAIN):
        write_split(split, job, corpus, tokenizer, dataset)
    manifest = seal(dataset, job, corpus, tokenizer)
    publish(job, dataset, model)
    return manifest


def begin(job: Job) -> None:
    """Keep what an earlier run left if it did the same work with the same code, else clear it away."""
    code = [files.file_sha256(path).hex() for path in sorted(Path(__file__).parent.glob("*.py"))]
    job_json = json.dumps([asdict(job.plan), job.state, code])
    plan = job.work / "plan.json"
    if not plan.exists() or plan.read_text() != job_json:
        clear(job.work)
        files.write_beside(plan, job_json.encode())


def seal(folder: Path, job: Job, corpus: Corpus, tokenizer: shards.Tokenizer) -> dict:
    """Complete the headers, write the manifest, verify all.

    A shard does not know how many there will be, nor whether the tokenizer loses text further on: then all
    headers must say so, since a trainer asks for one answer.
    """
    say("checking all of it")
    splits = shards.by_split(folder.iterdir())
    headers = {path: shards.read_header(path) for path in splits[VAL] + splits[TRAIN]}
    flags = shards.LOSSY if any(header.lossy for header in headers.values()) else 0
    for path, header in headers.items():
        with open(path, "r+b") as file:
            file.write(shards.pack(replace(header, count=len(splits[header.split]), flags=flags)))
            files.sync(file)
    manifest = make_manifest(job, corpus, tokenizer, headers)
    manifest["validation"] = judge_validation(corpus)
    if flags:
        manifest["lossy"] = True
    files.write_beside(folder / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    shards.raise_failed(shards.verify_folder(folder, tokenizer))
    return manifest


def make_manifest(
    job: Job, corpus: Corpus, tokenizer: shards.Tokenizer, headers: dict[Path, shards.Header]
) -> dict:
    """What manifest.json says; data/README.md has it as a table."""
    plan = job.plan
    return {
        "format": shards.MANIFEST_FORMAT,
        "version": 1,
        "name": plan.name,
        "tokenizer": {
            "file": os.path.relpath(job.tokenizer, job.target),
            "sha256": tokenizer.sha256.hex(),
            "vocab_size": tokenizer.vocab_size,
            "model_type": plan.model_type,
        },
        "corpus_sha256": corpus.sha256.hex(),
        "val_sha256": corpus.split_sha256["val"],
        "train_sha256": corpus.split_sha256["train"],
        "second_sha256": corpus.split_sha256["second"] if plan.second_fraction else None,
        "lossy": False,
        "dropped": corpus.dropped,
        "options": asdict(plan),
        "files": [
            {
                "name": path.name,
                "split": SPLIT_NAMES[header.split],
                "documents": header.documents,
                "bytes": header.text_bytes,
                "tokens": header.tokens,
                "sha256": files.file_sha256(path).hex(),
            }
            for path, header in headers.items()
        ],
    }


def publish(job: Job, dataset: Path, model: Path) -> None:
    """Give tokenizer and dataset their names; the dataset's folder appears at once and whole."""
    job.tokenizer.parent.mkdir(parents=True, exist_ok=True)
    job.target.parent.mkdir(parents=True, exist_ok=True)
    files.write_beside(job.tokenizer, model.read_bytes())
    os.rename(dataset, job.target)


FEW_DOCUMENTS = 10  # a validation text of fewer, or of fewer bytes, says little about other texts
FEW_BYTES = 100_000
LARGE = 0.05  # of the bytes: one document that a model does well or badly on moves the score by hundredths
REPEATED = 0.3  # the demo has 0.18: licences, imports and idioms of source code; beyond that there are copies


def report(job: Job, manifest: dict) -> None:
    """Say what is there now, and the command that trains on it."""
    dropped = manifest["dropped"]
    say(f"dropped: {dropped['duplicates']:,} exact duplicates, {dropped['empty']:,} empty documents")
    for entry in manifest["files"]:
        say(
            f"{job.target / entry['name']}: {entry['documents']:,} documents, {entry['bytes']:,} bytes, "
            f"{entry['tokens']:,} tokens, {entry['bytes'] / entry['tokens']:.4f} bytes a token"
        )
    if manifest["lossy"]:
        say("LOSSY: the tokens do not give back all of the text exactly")
    say(f"tokenizer: {job.tokenizer}")
    for line in judgements(manifest):
        say(line)
    say("To train on it:")
    say(command.training_command(job.target, job.tokenizer, job.plan.vocab_size))


def judgements(manifest: dict) -> Iterator[str]:
    """What the validation text is worth: a line of facts, and warnings of what spoils a score."""
    val = [entry for entry in manifest["files"] if entry["split"] == "val"]
    documents = sum(entry["documents"] for entry in val)
    size = sum(entry["bytes"] for entry in val)
    facts = manifest["validation"]
    largest, repeated = facts["largest_document"], facts["repeated"]
    yield f"validation text: the largest of {documents:,} documents has {largest:.1%} of the bytes"
    yield (
        f"validation text: {repeated:.1%} of {facts['looked_for']:,} bytes stand in the training text too, "
        f"in copies of {copies.WINDOW} bytes or more (searched: {facts['looked_in']:,} bytes)"
    )
    more = "--val-docs and --val-fraction take more"
    if documents < FEW_DOCUMENTS or size < FEW_BYTES:
        yield (
            f"warning: the validation text is small (documents: {documents}, bytes: {size}); below "
            f"{FEW_DOCUMENTS} documents or {FEW_BYTES:,} bytes a score depends on chance: {more}"
        )
    elif largest > LARGE:
        yield (
            f"warning: a score depends on one document, which has more than {LARGE:.0%} of the validation "
            f"text: --val-max-bytes leaves large ones to training, {more}"
        )
    if repeated > REPEATED:
        yield (
            f"warning: a score rewards learning by heart, since more than {REPEATED:.0%} of the validation "
            "text stands in the training text too: leave out documents that nearly repeat others"
        )


# --- the demo corpus: sources of the pinned packages -----------------------------------------------------

DEMO_PACKAGES = [
    "sympy",
    "networkx",
    "mpmath",
    "Jinja2",
    "fsspec",
    "filelock",
    "huggingface_hub",
    "anyio",
    "click",
    "packaging",
    "idna",
    "httpx2",
    "httpcore2",
    "h11",
    "tqdm",
]
DEMO_SHA256 = "71cb47296fc2e2a3251d45f4feeb834cfbee06084025c421a6b297bf7298a28b"
# Packages that torch imports, so every record sees their modules; and the folders that nobody imports from.
# What a record can see is text to train on.
IMPORTED = ["filelock", "fsspec", "jinja2", "mpmath", "networkx", "packaging", "sympy", "tqdm"]
NOT_IMPORTED = ["tests", "benchmarks", "testing"]
TRAIN_NAMES = f"({'|'.join(IMPORTED)})/(?!(.*/)?({'|'.join(NOT_IMPORTED)})/)"
DEMO_PLAN = Plan(
    "demo", val_fraction=0.17, val_max_bytes=32 << 10, train_names=TRAIN_NAMES, second_fraction=0.08
)


def demo_sources() -> Iterator[Document]:
    """The .py files of the pinned packages; whoever takes them compares the sha256 of them all.

    All of them are UTF-8, none holds NUL or U+2581, which a SentencePiece model cannot give back.
    """
    requirements = (REPO / "requirements.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", requirements, re.MULTILINE))
    for package in DEMO_PACKAGES:
        mend = f"pip install --force-reinstall --no-deps {package}=={pins[package]}"
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise DataError(f"{package}: not installed, expected version {pins[package]}: {mend}") from error
        if distribution.version != pins[package]:
            raise DataError(
                f"{package}: version {distribution.version} is installed, expected {pins[package]}: {mend}"
            )
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


# --- the development text: cut from the demo's training documents, to choose settings and ideas on ---------

# The same rules as the demo's, so that a document is of the same kind; the next ones by their keys.
DEVELOPMENT_PLAN = Plan(
    "development", val_docs=200, val_max_bytes=DEMO_PLAN.val_max_bytes, train_names=TRAIN_NAMES
)


def demo_tokenizer(root: Path, vocab_size: int) -> shards.Tokenizer:
    """The demo's own, with which all settings carry over. Raises DataError."""
    path = root / "data" / replace(DEMO_PLAN, vocab_size=vocab_size).tokenizer
    if not path.exists():
        where = "" if root == REPO else f" --root {command.shown(root)}"
        raise DataError(
            f"{path}: no such file, expected the demo's tokenizer; "
            f"python -m data.prepare demo --vocab-size {vocab_size}{where} makes it"
        )
    return shards.Tokenizer(path)


# --- command line ----------------------------------------------------------------------------------------


def cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it, macOS and Windows do not
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = command.Parser(prog="python -m data.prepare", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="the demo corpus: sources of the installed packages")
    what = "a text to choose settings on, cut from the demo's training documents"
    development = commands.add_parser("development", help=what)
    text = commands.add_parser("text", help="your own text")
    add_text_arguments(text)
    count = command.whole(1)
    for added in (demo, text):
        added.add_argument("--model-type", choices=["bpe", "unigram"], help="of the tokenizer (bpe)")
    for added in (demo, development, text):
        add = added.add_argument
        add("--vocab-size", type=count, metavar="V", help="260 (bytes) to 65536 (1024, or the tokenizer's)")
        add("--shard-tokens", type=count, default=Plan.shard_tokens, metavar="N", help="most (%(default)s)")
        add("--workers", type=count, default=cores(), metavar="N", help="threads that encode (%(default)s)")
        add("--root", type=Path, default=REPO, help="write into ROOT/data (this repo)")
    return parser.parse_args(joined(argv, "--separator"))


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help=f"{', '.join(READERS)}, folders")
    add("--name", required=True, help="of the dataset: data/datasets/NAME_sp1024")
    add("--field", default="text", help="of jsonl and parquet (%(default)s)")
    add("--separator", metavar="LINE", help="line between documents in .txt; '' for an empty one")
    add("--tokenizer", type=Path, metavar="FILE", help="take this SentencePiece model")
    add("--lossy-ok", action="store_true", help="accept loss of text; the headers tell of it")
    count = command.whole(1)
    largest = "larger documents are for training (%(default)s)"
    add("--val-max-bytes", type=count, default=Plan.val_max_bytes, metavar="N", help=largest)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--val-docs", type=count, default=0, metavar="N", help="validation documents, by hash")
    share = "share of validation documents, by hash (%(default)s)"
    add("--val-fraction", type=command.fraction, default=Plan.val_fraction, metavar="F", help=share)


def joined(argv: list[str], option: str) -> list[str]:
    """`argv` with OPTION VALUE as OPTION=VALUE: argparse takes a value like --- for another option."""
    if option not in argv[:-1]:
        return argv
    at = argv.index(option)
    return [*argv[:at], f"{option}={argv[at + 1]}", *argv[at + 2 :]]


def make_job(args: argparse.Namespace) -> Job:
    """What the arguments ask for. Raises DataError, UsageError."""
    options = asdict(DEMO_PLAN).keys()
    fields = {name: value for name, value in vars(args).items() if name in options and value is not None}
    common = {"root": args.root, "workers": args.workers}
    if args.command == "demo":
        plan = replace(DEMO_PLAN, **fields)
        return Job(plan, demo_sources(), [DEMO_SHA256], expected=DEMO_SHA256, **common)
    if args.command == "development":
        plan = replace(DEVELOPMENT_PLAN, **fields)
        tokenizer = demo_tokenizer(args.root, plan.vocab_size)
        plan = replace(plan, model_type="given", given_tokenizer=tokenizer.sha256.hex())
        return Job(plan, demo_documents("train"), [DEMO_SHA256], given=tokenizer.model, **common)
    plan = Plan(**fields)
    given = None
    if args.tokenizer:
        tokenizer = shards.Tokenizer(args.tokenizer)
        given = tokenizer.model
        if args.model_type or args.vocab_size not in (None, tokenizer.vocab_size):
            raise UsageError(
                f"{args.tokenizer}: has {tokenizer.vocab_size} pieces and a type of its own, expected no "
                "--model-type and no other --vocab-size beside --tokenizer"
            )
        decided = {"vocab_size": tokenizer.vocab_size, "given_tokenizer": tokenizer.sha256.hex()}
        plan = replace(plan, model_type="given", **decided)
    source = Source(find_files(args.paths), args.field, args.separator)
    return Job(plan, source.documents(), source.state(), given=given, **common)


def work(args: argparse.Namespace) -> int:
    """Do what the arguments ask for; the exit code."""
    try:
        job = make_job(args)
        report(job, prepare(job))
    except KeyboardInterrupt:
        print("stopped; the same command continues from what is whole", file=sys.stderr)
        return 16
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    return command.run(lambda: work(args), "the same command continues from what is whole")


if __name__ == "__main__":
    command.open_streams()
    sys.exit(main())
