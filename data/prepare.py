"""From text to a tokenizer, shards and a manifest. data/README.md explains the options.

    python data/prepare.py demo
    python data/prepare.py text PATH... --name NAME --vocab-size 1024

Both run the same pipeline, in bounded memory whatever the size of the text:
  1. spool     read every document once, hash it, put it in one of 256 buckets by its hash; sort each bucket
  2. split     by another part of the same hash
  3. tokenizer train it on training documents only, or take the one that was given
  4. encode    in parallel processes, in the order of the hashes; decode again and compare
  5. seal      complete the headers, verify everything, give the finished folder its name
All of it grows in a hidden folder beside the target. A second run continues from the parts that are whole.
"""
import argparse
import base64
import hashlib
import importlib.metadata
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

import shards
from shards import SPLIT_NAMES, TRAIN, VAL, DataError, UsageError

REPO = Path(__file__).resolve().parent.parent

# --------------------------------------------------------------------------------------------------
# plan: everything that decides the bytes of the result
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Options of one preparation. Two equal plans over equal text give equal files."""
    name: str
    vocab_size: int = 1024
    model: str = "bpe"                # or "unigram"
    tokenizer_sha256: str = ""        # of a tokenizer that was given, else empty
    val_fraction: float = 0.01
    val_docs: int = 0                 # if not 0, this many documents instead of the fraction
    second_fraction: float = 0.0      # kept out of both splits: the referee's second text
    shard_tokens: int = 100_000_000
    lossy_ok: bool = False

    @property
    def dataset(self) -> str:
        return f"datasets/{self.name}_sp{self.vocab_size}"

    @property
    def tokenizer(self) -> str:
        return f"tokenizers/{self.name}_{self.vocab_size}_{self.model}.model"


# --------------------------------------------------------------------------------------------------
# spool: documents on disk, by hash
# --------------------------------------------------------------------------------------------------

BUCKETS = 256                         # by the first byte of the hash
Document = tuple[str, bytes]          # a name for people ("book.txt", "a.jsonl:17"), and UTF-8 text

# Where a document lies in its bucket: the name (of that many bytes) stands at `offset`, the text after it.
# The hash as four numbers, because numpy sorts numbers faster than bytes.
PLACE = np.dtype([("hash", ">u8", 4), ("offset", "<u8"), ("name", "<u4"), ("size", "<u4")])


def spool(documents: Iterable[Document], folder: Path) -> None:
    """Put all documents into `folder`, which appears only when it is whole. Empty ones are left out."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    texts = [open(partial / f"{b:02x}.text", "wb") for b in range(BUCKETS)]
    places = [open(partial / f"{b:02x}.places", "wb") for b in range(BUCKETS)]
    empty = 0
    for name, text in documents:
        if not text:
            empty += 1
            continue
        digest, label = hashlib.sha256(text).digest(), name.encode(errors="replace")
        file = texts[digest[0]]
        place = (np.frombuffer(digest, ">u8"), file.tell(), len(label), len(text))
        places[digest[0]].write(np.array(place, PLACE).tobytes())
        file.write(label)
        file.write(text)
    for file in texts + places:
        file.close()
    kept = [sort_bucket(partial / f"{b:02x}.places") for b in range(BUCKETS)]
    dropped = {"empty": empty, "duplicates": sum(before - after for before, after in kept)}
    shards.write_beside(partial / "dropped.json", json.dumps(dropped).encode())
    os.rename(partial, folder)


def sort_bucket(path: Path) -> tuple[int, int]:
    """Order a bucket by hash and drop exact duplicates; number of documents before and after."""
    places = np.fromfile(path, PLACE)
    h = places["hash"]
    order = np.lexsort((places["offset"], h[:, 3], h[:, 2], h[:, 1], h[:, 0]))
    places = places[order]
    new = np.ones(len(places), bool)
    new[1:] = (places["hash"][1:] != places["hash"][:-1]).any(axis=1)
    places[new].tofile(path)
    return len(places), int(new.sum())


class Corpus:
    """The spooled documents of one plan: hashed, without duplicates, split.

    The second eight bytes of a document's sha256, as a number, decide its split; the whole sha256 decides
    its place in the split. Two parts, so that the order within a split stays a shuffle.
    """

    def __init__(self, folder: Path, plan: Plan):
        self.folder = folder
        self.dropped = json.loads((folder / "dropped.json").read_text())
        identity, smallest, self.documents, self.text_bytes = hashlib.sha256(), np.zeros(0, np.uint64), 0, 0
        for bucket in range(BUCKETS):
            places = self.places(bucket)
            identity.update(places["hash"].tobytes())
            keys = np.concatenate([smallest, places["hash"][:, 1].astype(np.uint64)])
            smallest = np.sort(keys)[:max(plan.val_docs, 1)]
            self.documents += len(places)
            self.text_bytes += int(places["size"].sum(dtype=np.int64))
        if self.documents <= max(plan.val_docs, 1):
            raise DataError(f"the text has {self.documents} distinct documents that are not empty, expected "
                            f"more than {max(plan.val_docs, 1)}, the validation split's")
        self.sha256 = identity.digest()
        share = 0 if plan.val_docs else int(plan.val_fraction * 2**64) - 1
        self.last_val = max(share, int(smallest[-1]))     # at least one document, whatever the fraction
        self.last_second = self.last_val + int(plan.second_fraction * 2**64)

    def places(self, bucket: int, split: str | None = None) -> np.ndarray:
        """PLACE [documents] of one bucket in order: all, or those of a split."""
        places = np.fromfile(self.folder / f"{bucket:02x}.places", PLACE)
        if split is None:
            return places
        ends = np.array([self.last_val, self.last_second], np.uint64)
        return places[np.searchsorted(ends, places["hash"][:, 1]) == ("val", "second", "train").index(split)]

    def read(self, split: str, skip: int = 0) -> Iterator[Document]:
        """The documents of a split, in order of their hashes, without the first `skip`."""
        for bucket in range(BUCKETS):
            places = self.places(bucket, split)
            todo, skip = places[skip:], max(0, skip - len(places))
            with open(self.folder / f"{bucket:02x}.text", "rb") as file:
                for place in todo:
                    file.seek(int(place["offset"]))
                    name = file.read(int(place["name"])).decode()
                    yield name, file.read(int(place["size"]))

    def split_sha256(self, split: str) -> str:
        """sha256 over the sha256 digests of the split's documents, in order."""
        total = hashlib.sha256()
        for bucket in range(BUCKETS):
            total.update(self.places(bucket, split)["hash"].tobytes())
        return total.hexdigest()

    def count(self, split: str) -> tuple[int, int]:
        """Documents and bytes of a split."""
        sizes = [self.places(bucket, split)["size"] for bucket in range(BUCKETS)]
        return sum(map(len, sizes)), sum(int(s.sum(dtype=np.int64)) for s in sizes)


# --------------------------------------------------------------------------------------------------
# tokenizer
# --------------------------------------------------------------------------------------------------

SAMPLE_CHARS = 8_000_000      # 1.87 bytes a token with 8 million, 1.90 with 16 and twice the time
DOCUMENT_CHARS = 50_000       # from one document: huge generated files would else fill the vocabulary
WINDOW_CHARS = 500            # trained on windows across lines: 1.92 bytes a token, 1.84 on words alone
SPECIAL_PIECES = 3 + 256      # unknown, BOS, EOS, and every byte


def train_tokenizer(texts: Iterable[bytes], plan: Plan) -> bytes:
    """A SentencePiece model, lossless by its settings, trained on windows of the documents.

    Pieces may cross spaces, line ends and scripts: on source code that gives more bytes a token, since line
    end and indentation become one piece. What has no piece is written in bytes.
    """
    import sentencepiece
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences(sample(texts), plan.vocab_size)), model_writer=model,
            vocab_size=plan.vocab_size, model_type=plan.model, character_coverage=1.0, byte_fallback=True,
            normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True, split_by_whitespace=False, split_by_unicode_script=False,
            split_by_number=False, max_sentence_length=4 * WINDOW_CHARS + 4, num_threads=2,
            unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2)
    except RuntimeError as error:
        most = re.search(r"set it to a value <= (\d+)", str(error))
        if most is None:
            raise DataError(f"no tokenizer could be trained: {' '.join(str(error).split())}") from error
        raise UsageError(f"--vocab-size {plan.vocab_size} is more than this text can fill: at most "
                         f"{most[1]}") from error
    return model.getvalue()


def sample(texts: Iterable[bytes]) -> list[str]:
    """The start of each document until the sample is full; documents come shuffled by their hashes."""
    taken, chars = [], 0
    for text in texts:
        taken.append(text[:4 * DOCUMENT_CHARS].decode(errors="ignore")[:DOCUMENT_CHARS])
        chars += len(taken[-1])
        if chars >= SAMPLE_CHARS:
            break
    return taken


def sentences(texts: list[str], vocab_size: int) -> Iterator[str]:
    """Windows to train on, cut at rare characters: half of the free pieces may be single characters.

    Otherwise a text in many scripts has more characters than the vocabulary has places. NUL and the marks
    that SentencePiece keeps for itself are cut out too.
    """
    counts = Counter()
    for text in texts:
        counts.update(text)
    common = sorted(counts.keys() - set("\0\u2581\u2585"), key=lambda c: (-counts[c], c))
    rare = counts.keys() - set(common[:max(1, (vocab_size - SPECIAL_PIECES) // 2)])
    cut = re.compile("[" + re.escape("".join(sorted(rare))) + "]+") if rare else None
    for text in texts:
        for start in range(0, len(text), WINDOW_CHARS):
            window = text[start:start + WINDOW_CHARS]
            yield from cut.split(window) if cut else [window]


# --------------------------------------------------------------------------------------------------
# encoding, in parallel processes
# --------------------------------------------------------------------------------------------------

BATCH_BYTES = 500_000
SAMPLED = 32                          # one training document in so many is decoded again and compared

_tokenizer: shards.Tokenizer


def start_worker(model: Path) -> None:
    """Load the tokenizer, and end when the parent process does, however it ends."""
    global _tokenizer
    _tokenizer = shards.Tokenizer(model)
    signal.signal(signal.SIGINT, signal.SIG_IGN)          # the parent decides
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_batch(texts: list[bytes], compare_every: int) -> tuple[list[np.ndarray], dict[int, int]]:
    """Tokens of each document, uint16 with BOS first, and {document: first differing byte} where one is lost.

    One document in `compare_every` is decoded and compared; of every one the bytes are counted.
    """
    sp = _tokenizer.processor
    tokens = [np.fromiter(ids, np.uint16, len(ids)) for ids in sp.encode(texts, add_bos=True)]
    lost = {}
    for i, (text, ids) in enumerate(zip(texts, tokens)):
        if i % compare_every == 0 or _tokenizer.text_bytes(ids) != len(text):
            decoded = sp.decode(ids.tolist()).encode()
            if decoded != text:
                lost[i] = len(os.path.commonprefix([decoded, text]))
    return tokens, lost


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into lists of about BATCH_BYTES."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(documents: Iterator[Document], pool: ProcessPoolExecutor, compare_every: int,
           lossy_ok: bool) -> Iterator[tuple[np.ndarray, int]]:
    """(tokens, bytes of text) of each document, in order. Raises DataError where text would be lost."""
    running = deque()
    source = batches(documents)
    while True:
        for batch in itertools.islice(source, 2 * pool._max_workers + 1 - len(running)):
            running.append((batch, pool.submit(encode_batch, [t for _, t in batch], compare_every)))
        if not running:
            return
        batch, future = running.popleft()
        tokens, lost = future.result()
        for i, offset in sorted(lost.items())[:0 if lossy_ok else 1]:
            text = batch[i][1]
            raise DataError(f"{batch[i][0]}: the tokenizer loses text at byte {offset}: expected "
                            f"{text[offset:offset + 12]!r}; remove it, choose another tokenizer, or accept "
                            "the loss with --lossy-ok")
        yield from zip(tokens, (len(text) for _, text in batch))


def write_split(split: int, corpus: Corpus, header: shards.Header, plan: Plan, folder: Path, pool) -> None:
    """Write the shards of one split that `folder` does not hold yet. Whole documents only."""
    name = SPLIT_NAMES[split]
    whole = sorted(folder.glob(f"{plan.name}_{name}_*.bin"))
    skip = sum(shards.read_header(path).documents for path in whole)
    header, index, writer = replace(header, split=split), len(whole), None
    documents, text_bytes = corpus.count(name)
    bar = progress(f"encode {name}", text_bytes)
    check = 1 if split == VAL else SAMPLED
    for tokens, size in encode(corpus.read(name, skip), pool, check, plan.lossy_ok):
        if writer and writer.header.tokens + len(tokens) > plan.shard_tokens:
            writer.close()
            writer = None
        if writer is None:
            path = folder / shards.shard_name(plan.name, split, index)
            writer, index = shards.ShardWriter(path, replace(header, index=index)), index + 1
        writer.add(tokens, size)
        bar.update(size)
    if writer:
        writer.close()
    bar.close()


def progress(what: str, text_bytes: int | None) -> tqdm:
    """A bar with a rate on a terminal, nothing elsewhere."""
    return tqdm(desc=what, total=text_bytes, unit="B", unit_scale=True, disable=None, leave=False)


# --------------------------------------------------------------------------------------------------
# the pipeline
# --------------------------------------------------------------------------------------------------


def prepare(plan: Plan, documents: Iterable[Document], root: Path, workers: int, given: Path | None = None,
            expected_sha256: str | None = None) -> None:
    target, model = root / "data" / plan.dataset, root / "data" / plan.tokenizer
    work = root / "data" / f".spool_{target.name}"
    work.mkdir(parents=True, exist_ok=True)
    spool_whole = work / "documents"
    if not spool_whole.exists():
        spool(documents, spool_whole)
    corpus = Corpus(spool_whole, plan)
    if expected_sha256 not in (None, corpus.sha256.hex()):
        raise DataError(f"the corpus has sha256 {corpus.sha256.hex()}, expected {expected_sha256}")
    trained = work / "tokenizer.model"
    if not trained.exists():
        proto = given.read_bytes() if given else train_tokenizer((t for _, t in corpus.read("train")), plan)
        shards.write_beside(trained, proto)
    tokenizer = shards.Tokenizer(trained)
    header = shards.Header(0, tokenizer.vocab_size, tokenizer.bos_id, tokenizer=tokenizer.sha256,
                           corpus=corpus.sha256, flags=shards.LOSSY if plan.lossy_ok else 0)
    new = work / "dataset"
    new.mkdir(exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, start_worker, (trained,)) as pool:
        for split in (VAL, TRAIN):
            write_split(split, corpus, header, plan, new, pool)
    seal(new, plan, corpus, tokenizer)
    model.parent.mkdir(parents=True, exist_ok=True)
    os.replace(trained, model)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(new, target)
    shutil.rmtree(work)
    manifest = json.loads((target / "manifest.json").read_text())
    for entry in manifest["files"]:
        print(f"{target / entry['name']}: {entry['documents']:,} documents, {entry['bytes']:,} bytes, "
              f"{entry['tokens']:,} tokens")


def seal(folder: Path, plan: Plan, corpus: Corpus, tokenizer: shards.Tokenizer) -> None:
    """Write the number of shards into each header, and last of all the manifest."""
    files = []
    for split in (VAL, TRAIN):
        paths = sorted(folder.glob(f"{plan.name}_{SPLIT_NAMES[split]}_*.bin"))
        for path in paths:
            header = replace(shards.read_header(path), count=len(paths))
            with open(path, "r+b") as file:
                file.write(shards.pack(header))
                shards.sync(file)
            files.append({"name": path.name, "split": SPLIT_NAMES[split],
                          "sha256": shards.file_sha256(path).hex(), "tokens": header.tokens,
                          "bytes": header.text_bytes, "documents": header.documents})
    manifest = {
        "format": "bytegolf dataset", "version": 1, "name": plan.name,
        "tokenizer": {"file": f"data/{plan.tokenizer}", "sha256": tokenizer.sha256.hex(),
                      "vocab_size": tokenizer.vocab_size, "model": plan.model},
        "corpus_sha256": corpus.sha256.hex(), "val_sha256": corpus.split_sha256("val"),
        "train_sha256": corpus.split_sha256("train"), "lossy": plan.lossy_ok,
        "dropped": corpus.dropped, "options": asdict(plan), "files": files}
    shards.write_beside(folder / "manifest.json", (json.dumps(manifest, indent=2) + "\n").encode())


# --------------------------------------------------------------------------------------------------
# the demo corpus: sources of the pinned packages
# --------------------------------------------------------------------------------------------------

DEMO_PACKAGES = ("sympy networkx mpmath Jinja2 fsspec filelock huggingface_hub anyio click packaging idna "
                 "httpx2 httpcore2 h11 tqdm").split()
DEMO_SHA256 = ""
DEMO_PLAN = Plan("demo", val_fraction=0.03, second_fraction=0.01)


def demo_sources() -> Iterator[Document]:
    """The .py files of the pinned packages, each checked against the hash that its package recorded."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (REPO / "requirements.txt").read_text(), re.MULTILINE))
    for package in DEMO_PACKAGES:
        mend = f"pip install --force-reinstall --no-deps {package}=={pins[package]}"
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise DataError(f"{package} is not installed, expected {pins[package]}: {mend}") from error
        if distribution.version != pins[package]:
            raise DataError(f"{package} is version {distribution.version}, expected {pins[package]}: {mend}")
        for file in distribution.files or ():
            # in the package's own folder: no installer writes there, as it does in bin and __pycache__
            if file.suffix == ".py" and len(file.parts) > 1 and file.parts[0] != ".." and file.hash:
                yield str(file), read_recorded(file, mend)


def read_recorded(file: importlib.metadata.PackagePath, mend: str) -> bytes:
    """Bytes of an installed file, as its package's RECORD has them. Raises DataError."""
    path = Path(file.locate())
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}): {mend}") from error
    found = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, text).digest()).rstrip(b"=").decode()
    if found != file.hash.value:
        raise DataError(f"{path}: sha256 is {found}, expected {file.hash.value} of its package: {mend}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["demo"])
    parser.add_argument("--root", type=Path, default=REPO)
    args = parser.parse_args()
    prepare(DEMO_PLAN, demo_sources(), args.root, 2)


if __name__ == "__main__":
    try:
        main()
    except (DataError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
