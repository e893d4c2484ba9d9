"""Yardsticks: sizes that come from real round trips, rows after the training text, the file and the board."""

import bz2
import json
import lzma
import random
import shutil
import zlib
from dataclasses import replace

import brotli
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.command import DataError
from records import yardsticks
from records.archive.tracks import NOTHING, TRAINING, Yardstick, load_track
from records.board import __main__ as board
from records.referee import compressors
from tests.kit import record_kit
from tests.kit.data_kit import call
from tests.kit.data_kit import refused as one_line

HERE = [compressors.ZLIB, compressors.BZIP2, compressors.BROTLI, compressors.XZ, compressors.PPMD]
HERE += [compressors.zstd(), compressors.zstd(b"what the reader has")]
needs_zpaq = pytest.mark.skipif(not shutil.which("zpaq"), reason="no zpaq: apt-get install zpaq")


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """A tiny corpus: data/ and the folder of its track."""
    root = tmp_path_factory.mktemp("yardsticks")
    corpus = record_kit.make_data(root / "data")
    record_kit.make_track(root / "records/track_tiny", corpus)
    return root, corpus


def arguments(root, *more):
    return [root / "records/track_tiny", "--dataset", "tiny_sp400", "--data", root / "data", *more]


def text_of(corpus, split):
    return "".join(corpus.texts[split]).encode()


@pytest.fixture(scope="module")
def written(kit):
    """What the command said, and what it wrote."""
    root, _ = kit
    said = call(yardsticks.main, *arguments(root, "--write"))
    return said, json.loads((root / "records/track_tiny/yardsticks.json").read_text())


@pytest.fixture
def track(kit, written, tmp_path):
    """A copy of the track with its yardsticks, and a README beside it."""
    shutil.copytree(kit[0] / "records/track_tiny", tmp_path / "track_tiny")
    (tmp_path / "README.md").write_text("<!-- board -->\n<!-- /board -->\n")
    return tmp_path / "track_tiny"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", HERE, ids=lambda one: f"{one.name} {one.settings}")
@settings(max_examples=5)
@given(text=st.binary(min_size=1, max_size=2000) | st.text(min_size=1).map(str.encode))
def test_every_text_comes_back(compressor, text):
    packed = compressor.pack(text)
    assert compressor.unpack(packed) == text
    assert compressors.cost(compressor, text) == len(packed)


@needs_zpaq
def test_zpaq_gives_the_text_back(kit):
    text = text_of(kit[1], "val")
    compressor = compressors.zpaq()
    packed = compressor.pack(text)
    assert compressor.unpack(packed) == text and compressor.version[0].isdigit()
    with pytest.raises(DataError, match="zpaq extract"):
        compressor.unpack(b"no archive")


def test_sizes_are_those_of_the_libraries(kit, written):
    text, training = text_of(kit[1], "val"), text_of(kit[1], "train")
    extreme = 9 | lzma.PRESET_EXTREME
    expected = {
        ("zlib", NOTHING): len(zlib.compress(text, 9)),
        ("bzip2", NOTHING): len(bz2.compress(text)),
        ("brotli", NOTHING): len(brotli.compress(text)),
        ("xz", NOTHING): len(lzma.compress(text, preset=extreme)),
        ("xz", TRAINING): len(lzma.compress(training + text, preset=extreme))
        - len(lzma.compress(training, preset=extreme)),
    }
    rows = {(row["name"], row["after"]): row for row in written[1]["rows"]}
    assert {key: rows[key]["bytes"] for key in expected} == expected
    for row in rows.values():
        assert row["bits_per_byte"] == pytest.approx(8 * row["bytes"] / len(text), abs=1e-6)


@pytest.mark.parametrize("name", ["zstd", "xz", "PPMd"])
def test_the_training_text_helps(written, name):
    sizes = {row["after"]: row["bytes"] for row in written[1]["rows"] if row["name"] == name}
    assert 0 < sizes[TRAINING] < 0.9 * sizes[NOTHING]


@pytest.mark.parametrize("name", ["zstd", "xz", "PPMd"])
def test_a_text_that_was_read_is_cheap_and_noise_before_it_is_no_help(kit, name):
    text = text_of(kit[1], "val")

    def after(before):
        if name == "zstd":
            return compressors.cost(compressors.zstd(before), text)
        return compressors.cost({"xz": compressors.XZ, "PPMd": compressors.PPMD}[name], text, before)

    alone = after(b"")
    assert after(text) < 0.2 * alone
    assert after(random.Random(1).randbytes(20_000)) > 0.9 * alone


def test_a_compressor_that_loses_something_is_an_error():
    broken = replace(compressors.ZLIB, unpack=lambda packed: b"")
    with pytest.raises(DataError, match=r"zlib .*: does not give back"):
        compressors.cost(broken, b"text")


# --- the command ------------------------------------------------------------------------------------------


def test_the_file_tells_its_command_and_its_texts(kit, written):
    said, value = written
    assert "python -m records.yardsticks" in value["written"] and "--write" in value["written"]
    assert value["val_sha256"] == load_track(kit[0] / "records/track_tiny").dataset["val_sha256"]
    sizes = [len(text_of(kit[1], split)) for split in ("val", "train")]
    assert [value["val_bytes"], value["train_bytes"]] == sizes
    printed = [line for line in said.splitlines() if "bits per byte" in line]
    assert printed == [str(Yardstick(**row)) for row in value["rows"]]


def test_what_cannot_be_measured_is_skipped(kit, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for most in (10, len(text_of(kit[1], "train")) - 1):  # tokens, bytes
        monkeypatch.setattr(compressors, "MOST_BYTES", most)
        said = call(yardsticks.main, *arguments(kit[0]))
        assert "SKIP zpaq -m5: is not installed: apt-get install zpaq\n" in said
        assert f"SKIP after the training text: it has more than {most} bytes\n" in said
        assert said.count("bits per byte") == 6


def test_a_wrong_track_or_text_is_reported(kit, track):
    def refused(*words, code=3):
        line = one_line(call(yardsticks.main, *words, code=code))
        assert not list(track.parent.rglob("*.partial"))
        return line

    options = arguments(kit[0], "--write")[1:]
    assert "holds no track.json" in refused(track.parent, *options)
    assert "expected one of tiny_sp260, tiny_sp400" in refused(track, "--dataset", "other")
    assert "no such file" in refused(track, "--dataset", "tiny_sp400", "--data", track)
    path = track / "track.json"
    dataset = json.loads(path.read_text())["dataset"]
    edit(path, dataset=dataset | {"train_sha256": "ab" * 32})
    assert "training text has sha256" in refused(track, *options)
    edit(path, dataset=dataset | {"val_sha256": "ab" * 32})
    assert "validation text has sha256" in refused(track, *options)
    one_line(call(yardsticks.main, code=2))


# --- the board --------------------------------------------------------------------------------------------


def test_the_board_shows_them(track, written):
    root = ("--records", track.parent)
    call(board.main, *root, "--check", code=1)
    call(board.main, *root)
    call(board.main, *root, "--check")
    text = (track.parent / "README.md").read_text()
    assert "python -m records.yardsticks records/track_tiny --write" in text
    for row in written[1]["rows"]:
        assert f"| {row['after']} | {row['bytes']:,} | {row['bits_per_byte']:.4f} |\n" in text
    (track / "yardsticks.json").unlink()
    call(board.main, *root)
    assert "yardsticks" not in (track.parent / "README.md").read_text()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"val_sha256": "ab" * 32}, "measured a text of sha256 abab"),
        ({"rows": []}, "'rows' is no list of whole rows"),
        ({"rows": [1]}, "'rows' is no list of whole rows"),
        ({"rows": [{"name": "zlib"}]}, "'rows' is no list of whole rows"),
        ({"rows": [dict(zip(Yardstick.__annotations__, "abcdef"))]}, "'rows' is no list of whole rows"),
    ],
)
def test_the_board_refuses_those_of_another_text_and_damaged_ones(track, change, message):
    edit(track / "yardsticks.json", **change)
    before = (track.parent / "README.md").read_bytes()
    line = one_line(call(board.main, "--records", track.parent, code=3))
    assert message in line and "python -m records.yardsticks" in line
    assert (track.parent / "README.md").read_bytes() == before
