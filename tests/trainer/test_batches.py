"""Batch order against a plain reference, for every number of ranks; reading across shards."""

import itertools
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import helpers
from train_gpt import BatchReader, DataError, Machine, TokenStream, load_settings

WORLDS = (1, 2, 4, 8)


def small_settings(folder: Path, **more):
    """Settings of a corpus in `folder` whose tokens are any uint16; a slot has four tokens."""
    sizes = {"VOCAB_SIZE": 65536, "TRAIN_SEQ_LEN": 4, "TRAIN_BATCH_TOKENS": 32}
    return load_settings(helpers.tiny_env(**{"DATA_PATH": folder} | sizes | more), "smoke")[0]


def stream_of(folder: Path, tokens: list[int], sizes: list[int], extended: bool = True) -> TokenStream:
    """The training stream of these tokens in shards of these sizes."""
    parts = np.split(np.array(tokens, np.uint16), np.cumsum(sizes)[:-1])
    helpers.write_shards(folder, "train", parts, vocabulary=65536, extended=extended)
    return TokenStream(small_settings(folder), "train", bytes(32).hex())


def batches(s, stream: TokenStream, count: int, step: int = 0, rank: int = 0, world: int = 1):
    """`count` batches of one rank from `step` on, lists of slots, and the sum of their checksums."""
    made, total = [], 0
    reader = BatchReader(s, stream, Machine(torch.device("cpu"), rank, world), step)
    for _ in range(count):
        batch, crc32, waited = reader.next()
        assert batch.dtype == torch.int64 and batch.shape == (s.batch_slots // world, s.slot_tokens + 1)
        assert 0 <= waited < 60
        made.append(batch.tolist())
        total += crc32
    return made, total


def reference_sequential(tokens: list[int], slots: int, length: int, steps: int) -> list[list[list[int]]]:
    """The stream goes around for ever, each slot takes the next tokens."""
    endless = itertools.cycle(tokens)
    return [[list(itertools.islice(endless, length)) for _ in range(slots)] for _ in range(steps)]


def reference_shuffled(
    tokens: list[int], slots: int, length: int, steps: int, seed: int
) -> list[list[list[int]]]:
    """The stream cut in windows, the rest left out; slots take them in an order drawn from the seed."""
    windows = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
    rng = np.random.Generator(np.random.Philox(key=seed))
    order = itertools.cycle(rng.permutation(len(windows)).tolist())
    return [[windows[next(order)] for _ in range(slots)] for _ in range(steps)]


def reference_checksum(batches: list[list[list[int]]], step: int) -> int:
    """Of whole batches from `step` on: a crc32 of each slot, begun with the slot's number."""
    slots = enumerate(itertools.chain(*batches), step * len(batches[0]))
    return sum(zlib.crc32(np.array(slot, "<u2").tobytes(), number) for number, slot in slots)


@st.composite
def streams(draw) -> tuple[list[int], list[int]]:
    """Tokens, and the sizes of their shards; short, so that most cases go around the end."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    return np.random.default_rng(draw(st.integers(0, 9))).integers(0, 65536, sum(sizes)).tolist(), sizes


@settings(max_examples=60)
@given(
    streams(),
    st.sampled_from(["sequential", "shuffled"]),
    st.sampled_from([8, 16]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 40),
    st.integers(0, 2**40),
)
def test_every_rank_reads_its_slots_of_the_reference_order(stream, order, slots, sequence, rows, step, seed):
    tokens, sizes = stream
    length = sequence * rows + 1  # the last token of a slot is a target only
    if len(tokens) < length:
        return
    if order == "sequential":
        reference = reference_sequential(tokens, slots, length, step + 2)[step:]
    else:
        reference = reference_shuffled(tokens, slots, length, step + 2, seed)[step:]
    env = {"BATCH_SLOTS": slots, "TRAIN_SEQ_LEN": sequence, "TRAIN_BATCH_TOKENS": slots * sequence * rows}
    with tempfile.TemporaryDirectory() as folder:
        read = stream_of(Path(folder), tokens, sizes)
        s = small_settings(Path(folder), SEED=seed, DATA_ORDER=order, **env)
        for world in WORLDS:
            total = 0
            for rank in range(world):
                got, crc32 = batches(s, read, 2, step, rank, world)
                assert got == [batch[rank::world] for batch in reference]
                total += crc32
            assert total == reference_checksum(reference, step)


@settings(max_examples=40)
@given(streams(), st.integers(1, 6), st.integers(1, 40), st.integers(0, 9))
def test_windows_are_of_documents_of_at_most_doc_tokens(stream, sequence, most, seed):
    tokens, sizes = stream
    length, bos = sequence + 1, helpers.BOS
    tokens = [bos, *(bos if token % 9 == 0 else max(token, bos + 1) for token in tokens[1:])]
    if len(tokens) < length:
        return
    starts = [*(i for i, token in enumerate(tokens) if token == bos), len(tokens)]
    small = {at for i, j in itertools.pairwise(starts) if j - i <= most for at in range(i, j)}
    windows = [at for at in range(0, len(tokens) - length + 1, length) if at + length // 2 in small]
    env = {"TRAIN_SEQ_LEN": sequence, "TRAIN_BATCH_TOKENS": 8 * sequence}
    with tempfile.TemporaryDirectory() as folder:
        read = stream_of(Path(folder), tokens, sizes)
        s = small_settings(Path(folder), SEED=seed, DOC_TOKENS=most, **env)
        if not windows:
            with pytest.raises(DataError, match=r"no slot of .* in a document of DOC_TOKENS"):
                batches(s, read, 1)
            return
        order = np.random.Generator(np.random.Philox(key=seed)).permutation(windows).tolist()
        reference = itertools.islice(itertools.cycle(order), 8)
        assert batches(s, read, 1)[0] == [[tokens[at : at + length] for at in reference]]


def test_legacy_shards_do_not_say_where_documents_begin(tmp_path):
    stream = stream_of(tmp_path, [0, 1, 2, 3, 4] * 20, [100], extended=False)
    with pytest.raises(DataError, match=r"no slot of .* in a document of DOC_TOKENS"):
        batches(small_settings(tmp_path, DOC_TOKENS=50), stream, 1)


def test_an_epoch_of_windows_overlaps_nowhere_and_the_next_has_the_same_order(tmp_path):
    stream = stream_of(tmp_path, list(range(203)), [100, 103])
    two, _ = batches(small_settings(tmp_path), stream, 10)
    windows = [window for batch in two for window in batch]
    epoch, again = windows[:40], windows[40:]
    assert epoch == again and sorted(token for window in epoch for token in window) == list(range(200))
    other, _ = batches(small_settings(tmp_path, SEED=1), stream, 5)
    another = [window for batch in other for window in batch]
    assert sorted(another) == sorted(epoch) and another != epoch


@settings(max_examples=80)
@given(streams(), st.integers(0, 500), st.integers(1, 200), st.booleans())
def test_a_stream_reads_across_shards_and_around(parts, start, length, extended):
    tokens, sizes = parts
    with tempfile.TemporaryDirectory() as folder:
        stream = stream_of(Path(folder), tokens, sizes, extended)
        got = stream.read(start, length)
    assert stream.total == len(tokens) and got.dtype == np.uint16
    assert got.tolist() == list(itertools.islice(itertools.cycle(tokens), start, start + length))


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_training_text_shorter_than_a_slot_is_refused(tmp_path, order):
    s = small_settings(tmp_path, DATA_ORDER=order)
    enough = stream_of(tmp_path, list(range(5)), [5])
    assert batches(s, enough, 1)[0] == [[[0, 1, 2, 3, 4]] * 8]
    with pytest.raises(DataError, match="4 training tokens, no slot of 5"):
        batches(s, stream_of(tmp_path, list(range(4)), [4]), 1)


def test_damage_is_found_before_the_first_step(tmp_path):
    """Reading whole shards for their crc32 takes no second of the training's clock."""
    stream_of(tmp_path, list(range(200)), [100, 100])
    with open(tmp_path / "tiny_train_000001.bin", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(DataError, match=r"tiny_train_000001\.bin: crc32"):
        TokenStream(small_settings(tmp_path), "train", bytes(32).hex())


def test_a_reader_raises_in_the_step_that_needs_the_missing_tokens(tmp_path):
    """The read-ahead thread neither loses an error nor raises it before its time, and may raise it again."""
    stream = stream_of(tmp_path, list(range(200)), [100, 100])
    os.truncate(tmp_path / "tiny_train_000001.bin", 1024)
    s = small_settings(tmp_path, DATA_ORDER="sequential")
    assert len(batches(s, stream, 2)[0]) == 2  # 80 tokens of 100
    for _ in range(2):
        with pytest.raises(DataError, match=r"tiny_train_000001\.bin: .* the file was cut"):
            batches(s, stream, 3)
    assert len(batches(s, stream, 3, world=8)[0]) == 3  # rank 0 of 8 reads tokens 0 to 84


SPARSE = """
import resource, sys
import train_gpt
from tests.trainer.test_batches import small_settings
s = small_settings(sys.argv[1], DOC_TOKENS=100_000, TRAIN_SEQ_LEN=512, TRAIN_BATCH_TOKENS=4096)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stream = train_gpt.TokenStream(s, "train", bytes(32).hex())
reader = train_gpt.BatchReader(s, stream, train_gpt.Machine(train_gpt.torch.device("cpu")), 0)
print(stream.total, len(stream.documents), len(reader.order), before,
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_documents_of_two_billion_tokens_are_found_in_two_gibibytes(tmp_path):
    """One sparse shard of 4 GB: zeros, a document every 99,999 tokens in its first half, one in the rest."""
    tokens, every, half = 2 * 10**9, 99_999, 10**9
    path = tmp_path / "tiny_train_000000.bin"
    starts = np.arange(0, half, every)
    with open(path, "wb") as file:
        os.truncate(file.fileno(), 1024 + 2 * tokens)
        for start in starts:
            file.seek(1024 + 2 * int(start))
            file.write(helpers.BOS.to_bytes(2, "little"))
    crc32 = 0
    with open(path, "rb") as file:
        file.seek(1024)
        while piece := file.read(2**26):
            crc32 = zlib.crc32(piece, crc32)
    with open(path, "r+b") as file:
        blob = bytearray(helpers.header(np.zeros(1, np.uint16), vocabulary=65536, shards=1, split=1))
        blob[8:12] = tokens.to_bytes(4, "little")
        blob[44:48] = crc32.to_bytes(4, "little")
        file.write(blob)
    command = [sys.executable, "-c", SPARSE, tmp_path]
    done = subprocess.run(command, cwd=helpers.ROOT, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    total, documents, windows, before, peak = map(int, done.stdout.split())
    assert (total, documents) == (tokens, 1 + len(starts))
    assert windows == len(range(256, int(starts[-1]), 513)), "the last document is too long"
    assert peak < 2 * 2**20, f"{peak / 2**20:.2f} GiB, of which {before / 2**20:.2f} before the data"
