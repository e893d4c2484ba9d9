"""Batch order against a plain reference, for every number of ranks; reading across shards."""

import itertools
import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import helpers
from train_gpt import BatchReader, DataError, Machine, Plan, TokenStream, load_settings


def small_settings(folder: Path, **more):
    """Settings of a corpus in `folder` whose tokens are any uint16; a slot has four tokens."""
    sizes = {"VOCAB_SIZE": 65536, "TRAIN_SEQ_LEN": 4, "TRAIN_BATCH_TOKENS": 32}
    return load_settings(helpers.tiny_env(**{"DATA_PATH": folder} | sizes | more), "smoke")[0]


def stream_of(folder: Path, tokens: list[int], sizes: list[int], extended: bool = True) -> TokenStream:
    """The training stream of these tokens in shards of these sizes."""
    parts = np.split(np.array(tokens, np.uint16), np.cumsum(sizes)[:-1])
    helpers.write_shards(folder, "train", parts, vocabulary=65536, extended=extended)
    return TokenStream(small_settings(folder), "train", bytes(32).hex(), helpers.BOS, [])


def reader_of(s, stream: TokenStream, rank: int = 0, world: int = 1) -> BatchReader:
    return BatchReader(s, stream, Machine(torch.device("cpu"), rank, world), [])


def windows_of(tokens: list[int], length: int) -> list[int]:
    """Where the windows of a stream begin; the rest is left out."""
    return [*range(0, len(tokens) - length + 1, length)]


def batches(reader: BatchReader, plan: Plan, count: int, first: int = 0) -> list[list[list[int]]]:
    """`count` batches of one rank from step `first` on, as lists of slots."""
    steps = list(itertools.islice(plan.steps(), first, first + count))
    made = [reader.read(step) for step in steps]
    for step, batch in zip(steps, made):
        assert batch.dtype == torch.int64
        assert batch.shape == (step.slots // reader.machine.world, reader.length)
    return [batch.tolist() for batch in made]


def reference_slots(tokens: list[int], length: int, seed: int) -> Iterator[list[int]]:
    """The stream cut in windows; slots take them in an order drawn from the seed."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    order = rng.permutation(windows_of(tokens, length)).tolist()
    return itertools.cycle(tokens[at : at + length] for at in order)


@st.composite
def streams(draw) -> tuple[list[int], list[int]]:
    """Tokens, and the sizes of their shards; short, so that most cases go around the end."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    tokens = rng.integers(0, 65536, sum(sizes)).tolist()
    return tokens, sizes


@settings(max_examples=60)
@given(
    streams(),
    st.integers(1, 16),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 28),
    st.integers(0, 2**40),
)
def test_every_rank_reads_its_slots_of_the_reference_order(stream, slots, grows, sequence, rows, first, seed):
    """For every number of ranks, and for a run that goes on from any step, also where the batch grows."""
    tokens, sizes = stream
    length = sequence * rows + 1  # the last token of a slot is a target only
    if len(tokens) < length:
        return
    env = {"BATCH_SLOTS": slots, "TRAIN_SEQ_LEN": sequence, "TRAIN_BATCH_TOKENS": slots * sequence * rows}
    with tempfile.TemporaryDirectory() as folder:
        read = stream_of(Path(folder), tokens, sizes)
        s = small_settings(Path(folder), SEED=seed, ITERATIONS=30, **env)
        plan = Plan(s)
        plan.stages = [(0.5, sequence, slots), (1.0, sequence, grows * slots)]
        endless = reference_slots(tokens, length, seed)
        reference = [list(itertools.islice(endless, step.slots)) for step in plan.steps()]
        for world in (world for world in range(1, slots + 1) if slots % world == 0):
            for rank in range(world):
                got = batches(reader_of(s, read, rank, world), plan, 2, first)
                assert got == [batch[rank::world] for batch in reference[first : first + 2]]


@settings(max_examples=40)
@given(streams(), st.integers(1, 6), st.integers(1, 40), st.integers(0, 9), st.booleans())
def test_windows_are_of_documents_of_at_most_doc_tokens(stream, sequence, most, seed, extended):
    """Unless those are less than a tenth of the text: then all of it is read."""
    tokens, sizes = stream
    length, bos = sequence + 1, helpers.BOS
    later = [bos if token % 9 == 0 else max(token, bos + 1) for token in tokens[1:]]
    tokens = [bos, *later]
    if len(tokens) < length:
        return
    starts = [i for i, token in enumerate(tokens) if token == bos]
    small = set()
    for i, j in itertools.pairwise([*starts, len(tokens)]):
        if j - i <= most:
            small |= {*range(i, j)}
    everything = windows_of(tokens, length)
    windows = [at for at in everything if at + length // 2 in small]
    windows = windows if 10 * len(windows) >= len(everything) else everything
    env = {"TRAIN_SEQ_LEN": sequence, "TRAIN_BATCH_TOKENS": 8 * sequence}
    with tempfile.TemporaryDirectory() as folder:
        read = stream_of(Path(folder), tokens, sizes, extended)
        s = small_settings(Path(folder), SEED=seed, DOC_TOKENS=most, **env)
        rng = np.random.Generator(np.random.Philox(key=seed))
        order = itertools.cycle(rng.permutation(windows).tolist())
        reference = [tokens[at : at + length] for at in itertools.islice(order, 8)]
        assert batches(reader_of(s, read), Plan(s), 1) == [reference]


@pytest.mark.parametrize(("most", "share"), [(5, "100%"), (4, "0%")])
def test_a_note_says_how_much_of_the_text_is_in_short_documents(tmp_path, most, share):
    notes: list[str] = []
    stream = stream_of(tmp_path, [helpers.BOS, 10, 11, 12, 13] * 20, [100], extended=False)
    s = small_settings(tmp_path, DOC_TOKENS=most)
    BatchReader(s, stream, Machine(torch.device("cpu")), notes)
    assert [note.split()[1] for note in notes] == [share]


@settings(max_examples=80)
@given(streams(), st.integers(0, 500), st.integers(1, 200), st.booleans())
def test_a_stream_reads_across_shards_and_around(parts, start, length, extended):
    tokens, sizes = parts
    with tempfile.TemporaryDirectory() as folder:
        stream = stream_of(Path(folder), tokens, sizes, extended)
        got = stream.read(start, length)
    assert stream.total == len(tokens) and got.dtype == np.uint16
    assert got.tolist() == list(itertools.islice(itertools.cycle(tokens), start, start + length))


def test_training_text_shorter_than_a_slot_is_refused(tmp_path):
    s = small_settings(tmp_path)
    enough = reader_of(s, stream_of(tmp_path, list(range(5)), [5]))
    assert batches(enough, Plan(s), 1) == [[[0, 1, 2, 3, 4]] * 8]
    with pytest.raises(DataError, match=r"4 training tokens.* 5: TRAIN_SEQ_LEN=2 TRAIN_BATCH_TOKENS=16 fit"):
        reader_of(s, stream_of(tmp_path, list(range(4)), [4]))


def test_documents_are_found_with_one_shard_in_memory_at_a_time(tmp_path):
    """Eight shards, which are one file; the twenty of FineWeb have 4 GB."""
    tokens = np.zeros(4_000_000, np.uint16)
    tokens[::99_999] = helpers.BOS
    (path,) = helpers.write_shards(tmp_path, "train", [tokens], extended=False)
    for index in range(1, 8):
        os.link(path, tmp_path / f"tiny_train_{index:06}.bin")
    s = small_settings(tmp_path, DOC_TOKENS=100_000, TRAIN_SEQ_LEN=512, TRAIN_BATCH_TOKENS=4096)
    tracemalloc.start()
    stream = TokenStream(s, "train", bytes(32).hex(), helpers.BOS, [])
    reader_of(s, stream)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (stream.total, len(stream.documents)) == (8 * len(tokens), 8 * np.count_nonzero(tokens))
    assert peak < 3 * tokens.nbytes, f"{peak / tokens.nbytes:.1f} shards"
