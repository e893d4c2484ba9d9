"""data.shards: the bytes of the format, damaged shards, leaked validation text, older files."""

import json
import os
import re
import shutil
import struct
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import shards
from data.check import verify_shard
from tests.kit import helpers
from tests.kit.data_kit import call, prepare
from tests.kit.helpers import flip, patch, put

MODEL = "../../tokenizers/t_500_bpe.model"


def run(*args: object, code: int = 0) -> str:
    return call("data", *args, code=code)


def failed(*args: object) -> list[str]:
    lines = run(*args, code=3).splitlines()
    return [line for line in lines if line.startswith("FAIL")]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A root that `data prepare` filled: one validation shard, several for training."""
    root = tmp_path_factory.mktemp("made")
    options = ["--vocab-size", 500, "--shard-tokens", 5_000, "--val-docs", 30]
    prepare(root, helpers.documents(600, 1), *options)
    return root


@pytest.fixture
def dataset(made, tmp_path) -> Path:
    """A copy of it that a test may damage."""
    shutil.copytree(made / "data", tmp_path / "data")
    return tmp_path / "data/datasets/t_sp500"


def legacy_shard(path: Path, tokens: list[int] | np.ndarray) -> Path:
    """A shard as the other projects write it: three numbers, zeros, tokens."""
    header = struct.pack("<3i", 20240520, 1, len(tokens)) + bytes(1012)
    path.write_bytes(header + np.asarray(tokens, "<u2").tobytes())
    return path


# --- bytes of the format ---------------------------------------------------------------------------------


def test_golden_bytes(tmp_path):
    """The format, byte for byte; whoever changes it changes the version."""
    of_file, of_corpus = bytes(range(32)), bytes(range(100, 132))
    header = shards.Header(
        0, 1024, 1, index=2, count=3, split=shards.VAL, tokenizer=of_file, corpus=of_corpus
    )
    path = tmp_path / "t_val_000002.bin"
    documents = [([1, 300, 513], 5, False), ([1, 1015], 2**33, False)]
    shards.write_shard(
        path, header, ((np.array(ids, np.uint16), size, lossy) for ids, size, lossy in documents)
    )
    words = [20240520, 1, 5, 0x31464C47, 1, 1024, 1, 2, 1015, 5, 2, 0xCF32BE85, 2, 3, 0, 0]
    payload = bytes.fromhex("01002c0101020100f703")
    assert path.read_bytes() == struct.pack("<16I", *words) + of_file + of_corpus + bytes(896) + payload
    counted = {"tokens": 5, "documents": 2, "text_bytes": 2**33 + 5, "max_id": 1015, "crc32": 0xCF32BE85}
    assert shards.read_header(path) == replace(header, **counted)
    assert shards.read_shard(path).tolist() == [1, 300, 513, 1, 1015]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_hundredth_of_the_documents_is_drawn_and_left_out(made, tmp_path, legacy):
    """Each shard without them is as good as one that `data prepare` made."""
    dataset = made / "data/datasets/t_sp500"
    tokenizer = shards.Tokenizer(dataset / MODEL)

    def documents(path: Path) -> Counter[bytes]:
        _, tokens = shards.open_shard(path)
        return Counter(part.tobytes() for part in np.split(tokens, np.flatnonzero(tokens == 1))[1:])

    for source in sorted(dataset.glob("*_train_*.bin")):
        if legacy:
            source = legacy_shard(tmp_path / source.name, shards.open_shard(source)[1])
        drawn = [shards.without_some(source, tokenizer, seed) for seed in range(20)]
        assert shards.without_some(source, tokenizer, 5) == drawn[5]
        assert len({*drawn}) > 5
        target = tmp_path / source.name.replace("t_", "fewer_", 1)
        target.write_bytes(drawn[5])
        assert not [line for line in verify_shard(target, tokenizer) if line.startswith("FAIL")]
        assert shards.read_header(target).legacy == legacy
        whole, fewer = documents(source), documents(target)
        assert fewer < whole and fewer.total() == whole.total() - -(-(whole.total() - 1) // 100)


@given(st.binary(min_size=1024, max_size=1024))
@settings(max_examples=200)
def test_any_header_is_read_or_refused(noise):
    for raw in (noise, struct.pack("<3iI", 20240520, 1, 7, 0x31464C47) + noise[16:]):
        try:
            shards.parse(raw, "x")
        except shards.DataError as error:
            assert "expected" in str(error)


# --- inspect, verify, and thirty kinds of damage ----------------------------------------------------------


def test_whole_data_pass(dataset):
    said = run("verify", dataset)
    assert "FAIL" not in said
    assert "validation documents among" in said
    assert "sha256 of the validation text" in said
    paths = sorted(dataset.glob("*.bin"))
    assert run("verify", *paths).count("bytes of text") == len(paths)
    said = run("inspect", dataset)
    manifest = json.loads((dataset / "manifest.json").read_text())
    assert f"tokenizer {manifest['tokenizer']['sha256']}" in said
    assert all(words in said for words in ("vocab_size 500", "split val", "lossy False"))
    del manifest["validation"], manifest["options"]["val_max_bytes"]  # as older versions wrote it
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    assert "FAIL" not in run("verify", dataset)
    os.truncate(paths[0], 100)
    said = run("inspect", dataset, code=3)
    assert "header has 100 bytes, expected 1024" in said
    assert said.count("vocab_size 500") == len(paths) - 1


def rewrite(path: Path, tokens: np.ndarray | None = None, **changes) -> None:
    """Write a shard anew with another header, its crc and counts of the payload right."""
    header, old = shards.open_shard(path)
    tokens = np.array(old if tokens is None else tokens, "<u2")
    counted = {"tokens": len(tokens), "crc32": zlib.crc32(tokens), "max_id": int(tokens.max())}
    path.unlink()  # it may be mapped
    path.write_bytes(shards.pack(replace(header, **counted | changes)) + tokens.tobytes())


def edit(folder: Path, entry: int, **changes: object) -> None:
    """Change fields of one of the manifest's files."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"][entry] |= changes
    path.write_text(json.dumps(manifest))


MANIFEST = "manifest.json"
DAMAGES = {  # what is done to the dataset and its second training shard, words of the message
    "magic": (lambda d, s: put(s, 0, 16777216), "magic number is 16777216, expected 20240520"),
    "version": (lambda d, s: put(s, 1, 2), "version is 2, expected 1"),
    "extension": (lambda d, s: put(s, 3, 2), "extension mark is 0x2"),
    "vocabulary size": (lambda d, s: put(s, 5, 0), "vocabulary size 0"),
    "count negative": (lambda d, s: put(s, 2, -1), "counts -1 tokens, expected"),
    "one token short": (lambda d, s: os.truncate(s, s.stat().st_size - 2), "bytes, expected"),
    "extension version": (lambda d, s: put(s, 4, 2), "extension version is 2, expected 1"),
    "id beyond": (lambda d, s: rewrite(s, np.array([1, 500])), "below the vocabulary's 500 is False"),
    "highest id": (lambda d, s: rewrite(s, max_id=7), "expected 7"),
    "flipped bit": (lambda d, s: flip(s, 1524), "crc32 is"),
    "documents": (lambda d, s: rewrite(s, documents=7), "expected 7"),
    "bytes of text": (lambda d, s: rewrite(s, text_bytes=7), "bytes of text is"),
    "other corpus": (lambda d, s: rewrite(s, corpus=b"1" * 32), "different values of corpus is 2"),
    "first missing": (lambda d, s: (d / "t_train_000000.bin").unlink(), "headers is ['t_train_000001.bin', "),
    "train as val": (lambda d, s: shutil.copy(s, d / "t_val_000000.bin"), "split is 1, expected 0"),
    "no val": (lambda d, s: (d / "t_val_000000.bin").unlink(), "val: no shards"),
    "no numbers": (lambda d, s: [p.rename(f"{p}.bin") for p in [*d.glob("*")]], ".bin.bin like this"),
    "directory": (lambda d, s: [s.unlink(), s.mkdir()], "Is a directory"),
    "other tokenizer": (lambda d, s: rewrite(s, tokenizer=b"1" * 32), "sha256 of the tokenizer is"),
    "no tokenizer": (lambda d, s: (d / MODEL).unlink(), "expected a SentencePiece model"),
    "manifest without end": (lambda d, s: (d / MANIFEST).write_text("[" * 99_999), "manifest.json: no JSON"),
    "manifest of another shape": (lambda d, s: edit(d, 0, tokens="1"), "[0].tokens: '1' is not of type 'int"),
    "manifest of other counts": (lambda d, s: edit(d, 1, bytes=54321), ", expected 54321"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found(dataset, kind):
    damage, words = DAMAGES[kind]
    damage(dataset, dataset / "t_train_000001.bin")
    lines = failed("verify", dataset)
    assert any(words in line for line in lines), lines
    assert all("expected" in line for line in lines), lines


# --- names and order -------------------------------------------------------------------------------------

LEFT_OUT = ["x_val_bytes_000000.bin", "x_val_000000 (1).bin", "x_old.bin", "x_train.bin", "valuable.bin"]
HIDDEN = ["._x_val_000000.bin", ".x_val_000000.bin", ".x_train_000007.bin"]
REFUSED = {
    "x_val_00000004.bin": "shards of one number is [4]",
    "x_val_14.bin": "missing shards by their names is [12]",
    "y_train_000000.bin": "number of sets (x, y) is 2",
    "x_val_train_000000.bin": "number of sets (x, x_val) is 2",
}


def test_shards_are_read_by_number_and_no_other_file_is(tmp_path, tokenizer_path, capsys):
    for number in range(12):
        legacy_shard(tmp_path / f"x_val_{number:0{number % 3}d}.bin", [1, number + 5])
    legacy_shard(tmp_path / "x_train_1.bin", [1, 3])
    for name in HIDDEN:
        (tmp_path / name).write_bytes(b"Mac OS X")
    verify = ("verify", tmp_path, "--tokenizer", tokenizer_path)
    assert "left out" not in run(*verify)
    for name in LEFT_OUT:
        legacy_shard(tmp_path / name, [1, 2])
    assert shards.read_split(tmp_path, "val")[1::2].tolist() == list(range(5, 17))
    named = ", ".join(sorted(LEFT_OUT))
    line = f"{tmp_path}: left out, not named as shards: {named}"
    assert capsys.readouterr().err == f"warning: {line}\n"
    assert f"note {line}\n" in run(*verify)
    for name, words in REFUSED.items():
        legacy_shard(tmp_path / name, [1, 2])
        assert words in run(*verify, code=3)
        with pytest.raises(shards.DataError, match=re.escape(words)):
            shards.read_split(tmp_path, "val")
        (tmp_path / name).unlink()


def test_read_split(dataset):
    tokens = shards.read_split(dataset, "train")
    paths = sorted(dataset.glob("*_train_*.bin"))
    assert tokens.tobytes() == b"".join(path.read_bytes()[1024:] for path in paths)
    patch(paths[1], 1500, b"\xff\xff")
    with pytest.raises(
        shards.DataError, match=r"t_train_000001\.bin: crc32 is .*, expected .*: make or fetch"
    ):
        shards.read_split(dataset, "train")
    with pytest.raises(shards.DataError, match=r"holds no .*_val_.*python -m data prepare demo"):
        shards.read_split(dataset.parent, "val")


def test_the_first_training_shards_pass_with_a_note(dataset):
    """All that are asked for may be fewer than there are. Of the validation shards none may be missing."""
    paths = sorted(dataset.glob("*_train_*.bin"))
    for left in range(len(paths) - 1, 0, -1):
        paths[left].unlink()
        said = run("verify", dataset)
        assert f"note {dataset}: train: the first {left} of {len(paths)} shards" in said
    paths[0].unlink()
    assert f"note {dataset}: train: no shards" in run("verify", dataset)
    rewrite(dataset / "t_val_000000.bin", count=2)
    assert "val: number of shards is 1, expected 2" in run("verify", dataset, code=3)


# --- validation documents in training shards, and what others made ---------------------------------------


def random_documents(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Documents that begin and end alike, so that fingerprints of the ends alone would not do."""
    first = [1, *[7] * 20]
    last = [8] * 20
    return [np.concatenate([first, rng.integers(2, 400, rng.integers(1, 60)), last]) for _ in range(count)]


@pytest.mark.parametrize("leaked", [0, 1, 3])
@pytest.mark.parametrize("cut", [False, True])
def test_leaked_documents_are_counted(tmp_path, tokenizer_path, leaked, cut):
    """Also where other projects cut documents at the ends of shards."""
    rng = np.random.default_rng(leaked)
    val = random_documents(rng, 50)
    train = random_documents(rng, 500)
    for i in range(leaked):
        train.insert(100 * i + 17, val[i])
    ends = np.cumsum([len(document) for document in train])
    places = ends[[17, 117, 217]] - 5 if cut else ends[[100, 217, 390]]  # cut: within leaked documents
    for i, part in enumerate(np.split(np.concatenate(train), places)):
        legacy_shard(tmp_path / f"x_train_{i + 1:06d}.bin", part)
    legacy_shard(tmp_path / "x_val_000000.bin", np.concatenate(val))
    said = run("verify", tmp_path, "--tokenizer", tokenizer_path, code=3 if leaked else 0)
    expected = f"is {leaked}, expected 0 (in x_train" if leaked else "0"
    assert f"validation documents among {500 + leaked} training documents {expected}" in said
    assert "BOS id unknown" in run("verify", tmp_path)


def test_legacy_shards(dataset):
    """As if another project had written them: readable, and checked as far as three numbers go."""
    (dataset / "manifest.json").unlink()
    paths = sorted(dataset.glob("*.bin"))
    extended = paths[0].read_bytes()
    for path in paths:
        patch(path, 12, bytes(1012))
    what_to_set = "TOKENIZER_PATH names the SentencePiece model that made them, and VOCAB_SIZE its number"
    assert run("inspect", dataset).count("highest id ") == len(paths)
    said = run("verify", dataset)
    assert said.count("highest id ") == len(paths) and said.count(what_to_set) == 1
    with_model = ("verify", dataset, "--tokenizer", dataset / MODEL)
    assert run(*with_model).count("legacy; its tokens decode to ") == len(paths)
    paths[0].write_bytes(extended)
    assert f"{len(paths) - 1} of {len(paths)} shards are legacy" in run(*with_model, code=3)
    legacy_shard(paths[1], [1, 50256])
    assert "name the model that made it, here and as TOKENIZER_PATH" in run(*with_model, code=3)
    assert "highest id 50256\n" in run("inspect", paths[1])
