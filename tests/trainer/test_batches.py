"""Batch order against a plain reference, for every number of ranks, across shards."""

import itertools
import os
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import helpers
from train_gpt import BatchReader, DataError, Machine, TokenStream, load_settings


def small_settings(folder: Path, **more):
    """Settings of a corpus in `folder` whose tokens are any uint16; a slot has four tokens."""
    sizes = {"VOCAB_SIZE": 65536, "TRAIN_SEQ_LEN": 4, "TRAIN_BATCH_TOKENS": 32}
    return load_settings(helpers.tiny_env(**{"DATA_PATH": folder} | sizes | more), "smoke")[0]


def stream_of(folder: Path, tokens: list[int], sizes: list[int], extended: bool = True) -> TokenStream:
    """The training stream of these tokens in shards of these sizes."""
    parts = np.split(np.array(tokens, np.uint16), np.cumsum(sizes)[:-1])
    helpers.write_shards(folder, "train", parts, vocabulary=65536, extended=extended)
    return TokenStream(small_settings(folder), "train", bytes(32).hex(), helpers.BOS, [])


@st.composite
def streams(draw) -> tuple[list[int], list[int]]:
    """Tokens of short documents, and the sizes of their shards: most cases go around the end."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    tokens = rng.integers(helpers.BOS + 1, 65536, sum(sizes))
    tokens[rng.random(len(tokens)) < 0.1] = helpers.BOS
    return tokens.tolist(), sizes


def reference_windows(tokens: list[int], length: int, most: int) -> tuple[list[int], float]:
    """Where the windows begin whose middle is in a document of at most `most` tokens, and their share.

    All windows, where those are less than a tenth of the text.
    """
    everything = [*range(0, len(tokens) - length + 1, length)]
    starts = [i for i, token in enumerate(tokens) if token == helpers.BOS or i == 0]
    small = set()
    for begin, end in itertools.pairwise([*starts, len(tokens)]):
        if end - begin <= most:
            small |= {*range(begin, end)}
    short = [at for at in everything if at + length // 2 in small]
    share = len(short) / len(everything)
    return short if share >= 0.1 else everything, share


@settings(max_examples=80)
@given(
    streams(),
    st.booleans(),
    st.sampled_from([0, 3, 10, 40]),
    st.integers(1, 16),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 28),
    st.integers(0, 2**40),
)
def test_every_rank_reads_its_slots_of_the_reference_order(
    stream, extended, most, slots, sequence, rows, first, seed
):
    """In an order of the seed, for every number of ranks, and for a run that goes on from any step.

    Also where DOC_TOKENS lets short documents through alone.
    """
    tokens, sizes = stream
    length = sequence * rows + 1  # the last token of a slot is a target only
    if len(tokens) < length:
        return
    windows, share = reference_windows(tokens, length, most or len(tokens))
    rng = np.random.Generator(np.random.Philox(key=seed))
    order = itertools.cycle(rng.permutation(windows).tolist())
    env = {"BATCH_SLOTS": slots, "TRAIN_SEQ_LEN": sequence, "TRAIN_BATCH_TOKENS": slots * sequence * rows}
    with tempfile.TemporaryDirectory() as folder:
        read = stream_of(Path(folder), tokens, sizes, extended)
        s = small_settings(Path(folder), SEED=seed, ITERATIONS=30, DOC_TOKENS=most, **env)
        batches = [[next(order) for _ in range(slots)] for _ in range(30)]
        for world in (world for world in range(1, slots + 1) if slots % world == 0):
            for rank in range(world):
                notes: list[str] = []
                reader = BatchReader(s, read, Machine(torch.device("cpu"), rank, world), notes)
                for step, places in enumerate(batches[first : first + 2], first):
                    found = reader.read(step)
                    assert found.dtype == torch.int64
                    assert found.tolist() == [tokens[at : at + length] for at in places[rank::world]]
                assert [note.split()[1] for note in notes] == ([f"{share:.0%}"] if most else [])


def test_training_text_shorter_than_a_slot_is_refused(tmp_path):
    s = small_settings(tmp_path)
    machine = Machine(torch.device("cpu"))
    enough = BatchReader(s, stream_of(tmp_path, list(range(5)), [5]), machine, [])
    assert enough.read(0).tolist() == [[0, 1, 2, 3, 4]] * 8
    with pytest.raises(DataError, match=r"4 training tokens.* 5: TRAIN_SEQ_LEN=2 TRAIN_BATCH_TOKENS=16 fit"):
        BatchReader(s, stream_of(tmp_path, list(range(4)), [4]), machine, [])


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
    BatchReader(s, stream, Machine(torch.device("cpu")), [])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (stream.total, len(stream.documents)) == (8 * len(tokens), 8 * np.count_nonzero(tokens))
    assert peak < 3 * tokens.nbytes, f"{peak / tokens.nbytes:.1f} shards"
