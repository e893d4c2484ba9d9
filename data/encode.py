"""From documents to tokens: a tokenizer is trained, documents are encoded and written as shards."""

import io
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from data import shards
from data.command import DataError, UsageError, advancing, say
from data.corpus import MAX_DOCUMENT, SPECIAL_PIECES, Corpus, Document, Plan, size_of
from data.shards import SPLIT_NAMES, VAL

# --- tokenizer -------------------------------------------------------------------------------------------

SAMPLE_CHARS = {"bpe": 8_000_000, "unigram": 1_000_000}  # two seconds of training, and ten
DOCUMENT_CHARS = 50_000  # from one document: huge generated files would else fill the vocabulary
WINDOW_CHARS = 500  # trained on windows across lines: 1.92 bytes a token, on single words 1.84


def train_tokenizer(texts: Iterable[bytes], plan: Plan) -> bytes:
    """A SentencePiece model, lossless by its settings, trained on windows of the documents.

    Pieces may cross spaces, line ends and scripts: on source code that gives more bytes a token, since line
    end and indentation become one piece. What has no piece is written in bytes.
    """
    import sentencepiece  # 0.1 s that reading the demo's documents need not pay

    say(f"training a tokenizer: {plan.vocab_size} pieces, {plan.model_type}")
    starts = []
    chars = 0
    for text in texts:  # which come shuffled by hash
        starts.append(text[: 4 * DOCUMENT_CHARS].decode(errors="ignore")[:DOCUMENT_CHARS])
        chars += len(starts[-1])
        if chars >= SAMPLE_CHARS[plan.model_type]:
            break
    model = io.BytesIO()
    # a list: a signal that comes while the trainer runs code of Python would be an error of the trainer's
    windows = [*sentences(starts, plan.vocab_size)]
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(windows),
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
        if most := re.search(r"set it to a value <= (\d+)", reason):
            what = f"expected at most {most[1]}, all that this text has pieces for"
            raise UsageError(f"--vocab-size is {plan.vocab_size}, {what}") from error
        raise DataError(f"no tokenizer could be trained on this text: {reason}") from error
    return model.getvalue()


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

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS
RUNNING_BYTES = MAX_DOCUMENT  # being encoded at a time; this bounds the memory, whatever the threads
SAMPLED = 32  # one training document in so many is decoded again and compared

Item = TypeVar("Item")


class Encoded(NamedTuple):
    """One document: uint16 tokens with BOS first, bytes of its text, whether decoding loses some of it."""

    tokens: np.ndarray
    text_bytes: int
    lossy: bool


def encode(
    documents: Iterable[Document], tokenizer: shards.Tokenizer, compare_every: int, lossy_ok: bool
) -> Iterator[Encoded]:
    """The documents in order, encoded in threads. Raises DataError where text would be lost.

    One in `compare_every` is decoded again, and each whose tokens have other bytes than it. Its content
    decides which one, so that a resumed run compares the same.
    """
    processor = tokenizer.processor
    for batch in map(list, groups(documents, RUNNING_BYTES, size_of)):
        texts = [text for _, text in batch]
        encoded = processor.encode(texts, add_bos=True, num_threads=CORES, return_type="numpy")
        for (name, text), ids in zip(batch, encoded):
            tokens = ids.astype(np.uint16)
            lossy = False
            if tokenizer.text_bytes(tokens) != len(text) or zlib.crc32(text) % compare_every == 0:
                decoded = processor.decode(ids.tolist()).encode()
                lossy = decoded != text
            if lossy and not lossy_ok:
                differing = (i for i, (a, b) in enumerate(zip(text, decoded)) if a != b)
                at = next(differing, min(len(text), len(decoded)))
                found = f"byte {at} begins {decoded[at : at + 12]!r} when decoded"
                mend = "take the document out, choose another tokenizer, or accept the loss with --lossy-ok"
                expected = f"expected {text[at : at + 12]!r}"
                raise DataError(f"{name}: the tokenizer is not lossless: {found}, {expected}; {mend}")
            yield Encoded(tokens, len(text), lossy)


def groups(items: Iterable[Item], most: int, size: Callable[[Item], int]) -> Iterator[Iterator[Item]]:
    """The items in order, in groups whose sizes add up to `most` at most, or of a single item."""
    group = total = 0

    def group_of(item: Item) -> int:
        nonlocal group, total
        total += size(item)
        if total > most and total > size(item):
            group += 1
            total = size(item)
        return group

    for _, members in itertools.groupby(items, group_of):
        yield members


def write_split(split: int, plan: Plan, corpus: Corpus, tokenizer: shards.Tokenizer, folder: Path) -> None:
    """Write the shards of one split that `folder` does not hold yet. A shard holds whole documents only."""
    name = SPLIT_NAMES[split]
    whole = [shards.read_header(path) for path in shards.by_split(folder.iterdir())[split]]
    header = shards.Header(
        tokens=0,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        split=split,
        tokenizer=tokenizer.sha256,
        corpus=corpus.sha256,
    )
    total = corpus.text_bytes[name] - sum(shard.text_bytes for shard in whole)
    say(f"encoding {name}: {total:,} bytes")
    left = corpus.read(name, sum(shard.documents for shard in whole))
    todo = advancing(left, f"encode {name}", total, size_of)
    encoded = encode(todo, tokenizer, 1 if split == VAL else SAMPLED, plan.lossy_ok)
    in_shards = groups(encoded, plan.shard_tokens, lambda document: len(document.tokens))
    for index, documents in enumerate(in_shards, len(whole)):
        path = folder / f"{plan.name}_{name}_{index:06d}.bin"
        shards.write_shard(path, replace(header, index=index), documents)
