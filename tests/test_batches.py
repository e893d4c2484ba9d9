"""Batch order against a plain re-telling of DESIGN.md, for every number of ranks; reading across shards."""
import itertools
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
import train_gpt
from train_gpt import BatchReader, DataError, TokenStream, find_shards, load_settings, shuffled_windows

WORLDS = (1, 2, 4, 8)


def small_settings(folder: Path, **more):
    """Settings of a corpus in `folder` whose tokens are any uint16."""
    env = helpers.tiny_env(**dict(DATA_PATH=folder, VOCAB_SIZE=65536) | more)
    return load_settings(env, "smoke")[0]


def stream_of(folder: Path, parts: list[list[int]], extended: bool = True) -> TokenStream:
    """The training stream of shards with these tokens."""
    helpers.write_shards(folder, "train", [np.array(part, np.uint16) for part in parts], vocabulary=65536,
                         extended=extended)
    return TokenStream(find_shards(small_settings(folder), "train", {}), 65536)


def batches(s, stream: TokenStream, rank: int, world: int, step: int, count: int) -> tuple[list, list[int]]:
    """`count` batches of one rank from `step` on as lists, and the last checksums of its slots."""
    made, crc32s = [], [0] * (s.batch_slots // world)
    reader = BatchReader(s, stream, rank, world, step, crc32s, lambda tokens: tokens)
    for _ in range(count):
        batch, crc32s, waited = reader.next()
        assert batch.dtype == np.int64 and batch.shape == (s.batch_slots // world, s.slot_tokens + 1)
        assert 0 <= waited < 60
        made.append(batch.tolist())
    return made, crc32s


def told_sequential(tokens: list[int], slots: int, length: int, steps: int) -> list[list[list[int]]]:
    """DESIGN.md in plain words: the stream goes around for ever, each slot takes the next L + 1 tokens."""
    endless = itertools.cycle(tokens)
    return [[[next(endless) for _ in range(length + 1)] for _ in range(slots)] for _ in range(steps)]


def told_shuffled(tokens: list[int], slots: int, length: int, steps: int, seed: int) -> list[list[list[int]]]:
    """The stream cut in windows of L + 1, the rest left out; slots take them in a permutation's order."""
    windows = [tokens[at:at + length + 1] for at in range(0, len(tokens) - length, length + 1)]
    order = itertools.cycle(told_permutation(seed, len(windows)))
    return [[windows[next(order)] for _ in range(slots)] for _ in range(steps)]


def told_permutation(seed: int, count: int) -> list[int]:
    """0 .. count - 1 sorted by their splitmix64 hash (Steele et al. 2014), in Python's integers."""
    def mixed(number: int) -> int:
        z = (seed * 0xD1342543DE82EF95 + number + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31
    return sorted(range(count), key=mixed)


@st.composite
def cases(draw):
    """Shards, slots, length and the first step: short streams, so that most cases go around the end."""
    slots, sequence = draw(st.sampled_from([8, 16])), draw(st.integers(1, 6))
    length = sequence * draw(st.integers(1, 3))
    shards = st.lists(st.integers(1, 60), min_size=1, max_size=4)
    sizes = draw(shards.filter(lambda sizes: sum(sizes) > length))
    tokens = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 65536, sum(sizes)).tolist()
    ends = list(itertools.accumulate(sizes))
    parts = [tokens[end - size:end] for end, size in zip(ends, sizes)]
    return slots, sequence, length, parts, draw(st.integers(0, 40)), draw(st.integers(0, 2**40))


@settings(max_examples=300)
@given(cases(), st.sampled_from(["sequential", "shuffled"]))
def test_every_rank_reads_its_slots_of_the_told_order(case, order):
    slots, sequence, length, parts, step, seed = case
    tokens = [token for part in parts for token in part]
    if order == "sequential":
        told = told_sequential(tokens, slots, length, step + 2)
    else:
        told = told_shuffled(tokens, slots, length, step + 2, seed)
    with tempfile.TemporaryDirectory() as folder:
        stream = stream_of(Path(folder), parts)
        s = small_settings(Path(folder), BATCH_SLOTS=slots, TRAIN_SEQ_LEN=sequence, SEED=seed,
                           TRAIN_BATCH_TOKENS=slots * length, DATA_ORDER=order)
        for world in WORLDS:
            for rank in {0, world - 1}:
                got, crc32s = batches(s, stream, rank, world, step, 2)
                # slot = micro_step * world + rank
                expected = [[batch[slot] for slot in range(rank, slots, world)] for batch in told[step:]]
                assert got == expected
                assert crc32s == [zlib.crc32(np.array([row[at] for row in expected], "<u2").tobytes())
                                  for at in range(slots // world)]


@given(st.integers(0, 2**70), st.integers(1, 400))
def test_shuffled_is_the_told_permutation(seed, count):
    windows = shuffled_windows(seed, count)
    assert windows.dtype == np.int64 and sorted(windows.tolist()) == list(range(count))
    assert windows.tolist() == told_permutation(seed, count)


def test_shuffled_depends_on_the_seed_and_spreads_evenly():
    orders = {tuple(shuffled_windows(seed, 100).tolist()) for seed in range(1000)}
    assert len(orders) == 1000 and tuple(range(100)) not in orders
    # where window 0 stands, over many seeds: uniform, so each tenth of the places about 100 times
    places = np.array([list(order).index(0) for order in orders])
    assert np.histogram(places, 10, (0, 100))[0].min() > 60
    assert abs(np.corrcoef(shuffled_windows(1337, 10_000), np.arange(10_000))[0, 1]) < 0.05


def test_an_epoch_of_windows_overlaps_nowhere_and_the_next_has_the_same_order(tmp_path):
    s = small_settings(tmp_path, TRAIN_SEQ_LEN=4, TRAIN_BATCH_TOKENS=32)
    stream = stream_of(tmp_path, [list(range(0, 100)), list(range(100, 203))])
    read = [row for batch in batches(s, stream, 0, 1, 0, 10)[0] for row in batch]
    epoch, again = read[:40], read[40:80]
    assert epoch == again and sorted(token for row in epoch for token in row) == list(range(200))
    other = small_settings(tmp_path, TRAIN_SEQ_LEN=4, TRAIN_BATCH_TOKENS=32, SEED=1)
    assert [row for batch in batches(other, stream, 0, 1, 0, 5)[0] for row in batch] != epoch


@settings(max_examples=300)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 500), st.integers(1, 200),
       st.booleans())
def test_a_stream_reads_across_shards_and_around(sizes, start, length, extended):
    tokens = np.random.default_rng(sum(sizes)).integers(0, 65536, sum(sizes)).tolist()
    ends = list(itertools.accumulate(sizes))
    with tempfile.TemporaryDirectory() as folder:
        parts = [tokens[end - size:end] for end, size in zip(ends, sizes)]
        stream = stream_of(Path(folder), parts, extended)
        assert stream.total == len(tokens)
        got = stream.read(start, length)
        assert got.dtype == np.uint16
        assert got.tolist() == list(itertools.islice(itertools.cycle(tokens), start, start + length))


@pytest.mark.parametrize("total, enough", [(9, True), (8, False), (1, False)])
@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_training_text_shorter_than_a_slot_is_refused(tmp_path, total, enough, order):
    stream = stream_of(tmp_path, [list(range(total))])
    s = small_settings(tmp_path, TRAIN_SEQ_LEN=8, TRAIN_BATCH_TOKENS=64, DATA_ORDER=order)
    if enough:
        assert batches(s, stream, 0, 1, 0, 1)[0] == [[list(range(9))] * 8]
        return
    with pytest.raises(DataError, match=f"{total} .*tokens.*expected.*9"):
        batches(s, stream, 0, 1, 0, 1)


def damaged_stream(folder: Path) -> TokenStream:
    """Two shards of 100 tokens; the last token of the second is not the one its checksum is of."""
    stream_of(folder, [list(range(100)), list(range(100))])
    second = folder / "tiny_train_000001.bin"
    blob = bytearray(second.read_bytes())
    blob[-1] ^= 1
    second.write_bytes(blob)
    return TokenStream(find_shards(small_settings(folder), "train", {}), 65536)


def test_a_reader_raises_in_the_step_that_needs_the_damaged_tokens(tmp_path):
    """The read-ahead thread must not lose an error, nor raise it before its time."""
    s = small_settings(tmp_path, TRAIN_SEQ_LEN=4, TRAIN_BATCH_TOKENS=32, DATA_ORDER="sequential")
    # a folder each: to overwrite a file that a reader has mapped would end the process
    assert len(batches(s, damaged_stream(tmp_path / "a"), 0, 1, 0, 2)[0]) == 2      # 80 tokens of 100
    with pytest.raises(DataError, match="tiny_train_000001.bin: crc32"):
        batches(s, damaged_stream(tmp_path / "b"), 0, 1, 0, 3)
    # rank 0 of 8 reads tokens 0 to 84 in three steps
    assert len(batches(s, damaged_stream(tmp_path / "c"), 0, 8, 0, 3)[0]) == 3


def test_a_failed_checksum_is_not_forgotten(tmp_path):
    stream = damaged_stream(tmp_path)
    for _ in range(2):
        with pytest.raises(DataError, match="tiny_train_000001.bin: crc32"):
            stream.read(100, 10)
