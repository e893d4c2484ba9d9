"""data/shards.py: the bytes of the format, damaged shards, leaked validation text, upgrades."""
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DATA = Path(__file__).resolve().parent.parent / "data"
sys.path.insert(0, str(DATA))
import shards  # noqa: E402
from test_data_prepare import documents, run as prepare_run, train_model, write_jsonl  # noqa: E402


def run(*args, code: int = 0, **options) -> str:
    """Run data/shards.py; its output, after its exit code was checked."""
    result = subprocess.run([sys.executable, DATA / "shards.py", *map(str, args)], text=True,
                            capture_output=True, timeout=100, **options)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A root that prepare.py filled: one validation shard, several for training."""
    root = tmp_path_factory.mktemp("made")
    corpus = write_jsonl(root / "texts.jsonl", documents())
    prepare_run("text", corpus, "--name", "t", "--vocab-size", 300, "--shard-tokens", 40_000,
                "--val-docs", 30, "--root", root)
    return root


@pytest.fixture
def dataset(made, tmp_path) -> Path:
    """A copy of it that a test may damage."""
    shutil.copytree(made / "data", tmp_path / "data")
    return tmp_path / "data/datasets/t_sp300"


def legacy_shard(path: Path, tokens: list[int] | np.ndarray) -> Path:
    """A shard as the other projects write it: three numbers, zeros, tokens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<3i", 20240520, 1, len(tokens)) + bytes(1012)
                     + np.asarray(tokens, "<u2").tobytes())
    return path


# --------------------------------------------------------------------------------------------------
# bytes of the format
# --------------------------------------------------------------------------------------------------


def test_golden_bytes(tmp_path):
    """The format, byte for byte; whoever changes it changes the version."""
    header = shards.Header(0, vocab_size=1024, bos_id=1, index=2, count=3, split=shards.VAL,
                           tokenizer=bytes(range(32)), corpus=bytes(range(100, 132)))
    path = tmp_path / "t_val_000002.bin"
    texts = [np.array([1, 300, 513], np.uint16), np.array([1, 1015], np.uint16)]
    writer = shards.ShardWriter(path, header)
    for tokens, text_bytes in zip(texts, [5, 2**33]):
        writer.add(tokens, text_bytes)
    assert not path.exists()
    h = writer.close()
    payload = bytes.fromhex("01002c010102" "0100f703")
    words = [20240520, 1, 5, 0x31464C47, 1, 1024, 1, 2, 1015, 5, 2, 0xCF32BE85, 2, 3, 0, 0]
    expected = struct.pack("<16I", *words) + bytes(range(32)) + bytes(range(100, 132)) + bytes(896) + payload
    assert path.read_bytes() == expected
    assert shards.read_header(path) == h and h.tokens == 5 and h.text_bytes == 5 + 2**33
    assert shards.open_shard(path)[1].tolist() == [1, 300, 513, 1, 1015]
    assert not list(tmp_path.glob("*.partial"))


@given(st.builds(shards.Header, tokens=st.integers(1, 2**31 - 1), vocab_size=st.integers(65000, 65536),
                 bos_id=st.integers(0, 64999), documents=st.integers(0, 2**31 - 1),
                 max_id=st.integers(0, 65535), text_bytes=st.integers(0, 2**64 - 1),
                 crc32=st.integers(0, 2**32 - 1), index=st.integers(0, 2**31 - 1),
                 count=st.integers(0, 2**31 - 1), split=st.integers(0, 1), flags=st.integers(0, 1),
                 tokenizer=st.binary(min_size=32, max_size=32), corpus=st.binary(min_size=32, max_size=32)))
def test_headers_come_back(header):
    raw = shards.pack(header)
    assert len(raw) == 1024 and shards.parse(raw, "x") == header


@given(st.binary(min_size=1024, max_size=1024))
@settings(max_examples=200)
def test_any_header_is_read_or_refused(noise):
    for raw in (noise, struct.pack("<3iI", 20240520, 1, 7, 0x31464C47) + noise[16:]):
        try:
            shards.parse(raw, "x")
        except shards.DataError as error:
            assert "expected" in str(error)


# --------------------------------------------------------------------------------------------------
# inspect, verify, and twenty kinds of damage
# --------------------------------------------------------------------------------------------------


def test_whole_data_pass(dataset):
    said = run("verify", dataset)
    assert "FAIL" not in said
    assert "validation documents among" in said and "sha256 of the validation text" in said
    assert run("verify", *dataset.glob("*.bin")).count("bytes of text") == len(list(dataset.glob("*.bin")))
    said = run("inspect", dataset)
    assert "vocab_size 300" in said and "split val" in said and "lossy False" in said
    manifest = json.loads((dataset / "manifest.json").read_text())
    assert f"tokenizer {manifest['tokenizer']['sha256']}" in said


def patch(path: Path, at: int, new: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(new)


def rewrite(path: Path, tokens: np.ndarray | None = None, **changes) -> None:
    """Write a shard anew with another header, its crc and counts of the payload right."""
    header, old = shards.open_shard(path)
    tokens = np.array(old if tokens is None else tokens, "<u2")
    changes = {"tokens": len(tokens), "crc32": zlib.crc32(tokens), "max_id": int(tokens.max())} | changes
    path.unlink()                             # it may be mapped
    path.write_bytes(shards.pack(replace(header, **changes)) + tokens.tobytes())


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def other_tokenizer(dataset: Path, shard: Path) -> None:
    train_model(dataset.parents[1] / "tokenizers/t_300_bpe.model", documents(60), vocab_size=700)


def duplicate(dataset: Path, shard: Path) -> None:
    shutil.copy(shard, dataset / "t_train_1.bin")


def val_as_train(dataset: Path, shard: Path) -> None:
    shutil.copy(dataset / "t_val_000000.bin", shard)


def directory(dataset: Path, shard: Path) -> None:
    shard.unlink()
    shard.mkdir()


def dangling(dataset: Path, shard: Path) -> None:
    shard.unlink()
    shard.symlink_to("nowhere.bin")


def swap_bytes(dataset: Path, shard: Path) -> None:
    raw = shard.read_bytes()
    shard.write_bytes(np.frombuffer(raw[:1024], ">i4").astype("<i4").tobytes()
                      + np.frombuffer(raw[1024:], ">u2").astype("<u2").tobytes())


def edit_manifest(dataset: Path, change) -> None:
    path = dataset / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def count_of(shard: Path) -> int:
    return struct.unpack_from("<i", shard.read_bytes(), 8)[0]


DAMAGES = {                                   # what is done to the data, words of the message
    "magic": (lambda d, s: patch(s, 0, b"\0\0\0\1"), "magic number is 16777216, expected 20240520"),
    "version": (lambda d, s: patch(s, 4, b"\2"), "version is 2, expected 1"),
    "extension": (lambda d, s: patch(s, 12, b"\2"), "extension mark"),
    "extension version": (lambda d, s: patch(s, 16, b"\2"), "extension version is 2, expected 1"),
    "vocabulary size": (lambda d, s: patch(s, 20, bytes(4)), "vocabulary size 0"),
    "count too high": (lambda d, s: patch(s, 8, struct.pack("<i", count_of(s) + 1)), "bytes, expected"),
    "count too low": (lambda d, s: patch(s, 8, struct.pack("<i", count_of(s) - 1)), "bytes, expected"),
    "count negative": (lambda d, s: patch(s, 8, b"\xff\xff\xff\xff"), "counts -1 tokens, expected"),
    "one byte short": (lambda d, s: os.truncate(s, s.stat().st_size - 1), "bytes, expected"),
    "one token short": (lambda d, s: os.truncate(s, s.stat().st_size - 2), "bytes, expected"),
    "empty": (lambda d, s: os.truncate(s, 0), "header has 0 bytes, expected 1024"),
    "half a header": (lambda d, s: os.truncate(s, 512), "header has 512 bytes, expected 1024"),
    "header alone": (lambda d, s: os.truncate(s, 1024), "file has 1024 bytes, expected"),
    "appended": (lambda d, s: append(s, b"\0\0"), "bytes, expected"),
    "byte-swapped": (swap_bytes, "big-endian"),
    "payload swapped": (lambda d, s: s.write_bytes(s.read_bytes()[:1024] + np.frombuffer(
        s.read_bytes()[1024:], ">u2").astype("<u2").tobytes()), "crc32 is"),
    "32-bit tokens": (lambda d, s: s.write_bytes(s.read_bytes()[:1024] + np.frombuffer(
        s.read_bytes()[1024:], "<u2").astype("<u4").tobytes()), "bytes, expected"),
    "id beyond": (lambda d, s: rewrite(s, np.append(shards.open_shard(s)[1], [300])), "below"),
    "flipped bit": (lambda d, s: patch(s, 1524, bytes([s.read_bytes()[1524] ^ 1])), "crc32 is"),
    "crc": (lambda d, s: patch(s, 44, b"\1\2\3\4"), "crc32 is"),
    "highest id": (lambda d, s: rewrite(s, max_id=7), "expected 7"),
    "documents": (lambda d, s: rewrite(s, documents=7), "expected 7"),
    "bytes of text": (lambda d, s: rewrite(s, text_bytes=7), "bytes of text is"),
    "missing": (lambda d, s: s.unlink(), "missing shards is [1], expected []"),
    "last missing": (lambda d, s: sorted(d.glob("*train*"))[-1].unlink(), "number of shards is"),
    "duplicate": (duplicate, "shards of one number is [1], expected []"),
    "two sets": (lambda d, s: shutil.copy(s, d / "u_train_000000.bin"), "number of sets (t, u) is 2"),
    "another name": (lambda d, s: shutil.copy(s, d / "extra.bin"), "extra.bin: the name is no shard's"),
    "directory": (directory, "Is a directory"),
    "dangling": (dangling, "No such file"),
    "val as train": (val_as_train, "split is 0, expected 1"),
    "other tokenizer": (other_tokenizer, "sha256 of the tokenizer is"),
    "other corpus": (lambda d, s: rewrite(s, corpus=bytes(31) + b"1"), "different values of corpus is 2"),
    "other order": (lambda d, s: rewrite(s, index=3), "another index is ['t_train_000001.bin'], expected []"),
    "no manifest": (lambda d, s: (d / "manifest.json").write_text("{"), "manifest.json: cannot be read"),
    "half a manifest": (lambda d, s: (d / "manifest.json").write_text('{"format": "bytegolf dataset"}'),
                        "the manifest lacks"),
    "manifest of another shape": (lambda d, s: edit_manifest(d, lambda m: m["files"][0].pop("tokens")),
                                  "the manifest's files[0] lacks ['tokens'], expected all of"),
    "manifest without a tokenizer": (lambda d, s: edit_manifest(d, lambda m: m.update(tokenizer=None)),
                                     "the manifest's tokenizer is null, expected dict"),
    "manifest of other counts": (lambda d, s: edit_manifest(d, lambda m: m["files"][1].update(bytes=5)),
                                 "'bytes': 5,"),
    "no val": (lambda d, s: (d / "t_val_000000.bin").unlink(), "val: no shards"),
    "nothing": (lambda d, s: [p.unlink() for p in d.glob("*.bin")], "holds no shards"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found(dataset, kind):
    damage, words = DAMAGES[kind]
    damage(dataset, dataset / "t_train_000001.bin")
    start = time.perf_counter()
    said = run("verify", dataset, code=3)
    assert time.perf_counter() - start < 5
    failed = [line for line in said.splitlines() if line.startswith("FAIL")]
    assert any(words in line for line in failed), said
    assert all("expected" in line for line in failed), said


def test_unreadable(dataset):
    shard = dataset / "t_train_000001.bin"
    shard.chmod(0)
    if os.access(shard, os.R_OK):
        pytest.skip("this user may read everything")
    assert "Permission denied" in run("verify", dataset, code=3)


# --------------------------------------------------------------------------------------------------
# validation documents in training shards
# --------------------------------------------------------------------------------------------------


def random_documents(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Documents that begin and end alike, so that fingerprints of the ends alone would not do."""
    return [np.concatenate([[1], np.full(20, 7), rng.integers(2, 900, rng.integers(1, 60)), np.full(20, 8)])
            for _ in range(count)]


@pytest.mark.parametrize("leaked", [0, 1, 3])
@pytest.mark.parametrize("cut", [False, True])
def test_leaked_documents_are_counted(tmp_path, leaked, cut):
    """Also where other projects cut documents at the ends of shards."""
    rng = np.random.default_rng(leaked)
    val, train = random_documents(rng, 50), random_documents(rng, 500)
    for i in range(leaked):
        train.insert(100 * i + 17, val[i])
    tokens = np.concatenate(train)
    ends = np.cumsum([len(d) for d in train])
    places = ends[[100, 217, 390]] if not cut else ends[[17, 117, 217]] - 5    # cut: within leaked documents
    for i, part in enumerate(np.split(tokens, places)):
        legacy_shard(tmp_path / f"x_train_{i + 1:06d}.bin", part)
    legacy_shard(tmp_path / "x_val_000000.bin", np.concatenate(val))
    model = train_model(tmp_path / "m.model", documents(80), vocab_size=900)
    said = run("verify", tmp_path, "--tokenizer", model, code=3 if leaked else 0)
    expected = f"is {leaked}, expected 0 (in x_train" if leaked else "0"
    assert f"validation documents among {500 + leaked} training documents {expected}" in said
    assert "BOS id unknown" in run("verify", tmp_path)


def test_leak_in_our_own_shards(dataset):
    val = next(shards.read_runs([dataset / "t_val_000000.bin"], 1)).document(3)
    shard = dataset / "t_train_000001.bin"
    h, tokens = shards.open_shard(shard)
    sp = shards.Tokenizer(dataset.parents[1] / "tokenizers/t_300_bpe.model").processor
    rewrite(shard, np.concatenate([tokens, val]), documents=h.documents + 1,
            text_bytes=h.text_bytes + len(sp.decode(val.tolist()).encode()))
    assert "is 1, expected 0 (in t_train_000001.bin)" in run("verify", dataset, code=3)


# --------------------------------------------------------------------------------------------------
# upgrade
# --------------------------------------------------------------------------------------------------


def make_legacy(dataset: Path) -> dict[Path, bytes]:
    """Take the extension out of all headers, as if another project had written the shards."""
    (dataset / "manifest.json").unlink()
    old = {}
    for path in sorted(dataset.glob("*.bin")):
        raw = path.read_bytes()
        path.write_bytes(raw[:12] + bytes(1012) + raw[1024:])
        old[path] = raw
    return old


def test_upgrade(dataset):
    model = dataset.parents[1] / "tokenizers/t_300_bpe.model"
    old = make_legacy(dataset)
    assert "legacy" in run("inspect", dataset) and "legacy" in run("verify", dataset)
    run("upgrade", dataset, "--tokenizer", model)
    for path, raw in old.items():
        assert path.read_bytes()[1024:] == raw[1024:]
        new, before = shards.read_header(path), shards.parse(raw, path)
        assert new == replace(before, corpus=shards.UNKNOWN)
    said = run("verify", dataset, "--tokenizer", model)
    assert "bytes of text" in said and "legacy" not in said
    after = {path: path.read_bytes() for path in old}
    run("upgrade", *old, "--tokenizer", model)
    assert after == {path: path.read_bytes() for path in old}


def test_upgrade_refuses_and_leaves_alone(made, dataset, tmp_path):
    model = dataset.parents[1] / "tokenizers/t_300_bpe.model"
    whole = {path: path.read_bytes() for path in dataset.glob("*.bin")}
    assert run("upgrade", dataset, "--tokenizer", model).count("left as it is") == len(whole)
    assert whole == {path: path.read_bytes() for path in whole}
    make_legacy(dataset)
    small = train_model(tmp_path / "small.model", ["aa ab"] * 9, vocab_size=263)
    before = {path: path.read_bytes() for path in whole}
    assert "highest id is" in run("upgrade", dataset, "--tokenizer", small, code=3)
    (dataset / "t_train_000001.bin").rename(tmp_path / "aside")
    assert "missing shards is [1]" in run("upgrade", dataset, "--tokenizer", model, code=3)
    (tmp_path / "aside").rename(dataset / "t_train_000001.bin")
    legacy_shard(dataset / "name.bin", [1, 2])
    assert "the name is no shard's" in run("upgrade", dataset / "name.bin", "--tokenizer", model, code=3)
    assert before == {path: path.read_bytes() for path in whole}
    assert "required: --tokenizer" in run("upgrade", dataset, code=2)


def test_upgrade_on_a_full_disk(dataset):
    """A limit on the size of files stands in for it. Shards stay as they were, no part stays behind."""
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    make_legacy(dataset)
    before = {path: path.read_bytes() for path in dataset.iterdir()}
    said = run("upgrade", dataset, "--tokenizer", dataset.parents[1] / "tokenizers/t_300_bpe.model", code=3,
               preexec_fn=limit)
    assert "File too large: mend this, then run the same command again" in said
    assert before == {path: path.read_bytes() for path in dataset.iterdir()}


def test_inspect_goes_on_after_a_damaged_shard(dataset):
    os.truncate(sorted(dataset.glob("*.bin"))[0], 100)
    said = run("inspect", dataset, code=3)
    assert "FAIL" in said and "header has 100 bytes, expected 1024" in said
    assert said.count("vocab_size 300") == len(list(dataset.glob("*.bin"))) - 1


def test_upgrade_replaces_links(dataset, tmp_path):
    """A link into a download cache: the cache keeps its bytes."""
    model = dataset.parents[1] / "tokenizers/t_300_bpe.model"
    make_legacy(dataset)
    for name in ("t_train_000000.bin", "t_train_000001.bin"):
        shutil.move(dataset / name, tmp_path / name)
    (dataset / "t_train_000000.bin").symlink_to(tmp_path / "t_train_000000.bin")
    os.link(tmp_path / "t_train_000001.bin", dataset / "t_train_000001.bin")
    run("upgrade", dataset, "--tokenizer", model)
    for name in ("t_train_000000.bin", "t_train_000001.bin"):
        assert shards.read_header(tmp_path / name).legacy
        assert not shards.read_header(dataset / name).legacy


def test_upgrade_killed(dataset):
    """At any moment each shard is the old one or the new one, and a second call completes the work."""
    model = dataset.parents[1] / "tokenizers/t_300_bpe.model"
    make_legacy(dataset)
    old = {path: path.read_bytes() for path in sorted(dataset.glob("*.bin"))}
    start = time.perf_counter()
    run("upgrade", dataset, "--tokenizer", model)
    duration = time.perf_counter() - start
    new = {path: path.read_bytes() for path in old}
    rng = random.Random(3)
    for _ in range(10):
        for path, raw in old.items():
            path.write_bytes(raw)
        command = [sys.executable, DATA / "shards.py", "upgrade", dataset, "--tokenizer", model]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.5, 1) * duration)
        process.kill()
        process.wait()
        assert all(path.read_bytes() in (old[path], new[path]) for path in old)
    run("upgrade", dataset, "--tokenizer", model)
    assert {path: path.read_bytes() for path in old} == new
    assert not list(dataset.glob("*.partial"))


# --------------------------------------------------------------------------------------------------
# speed
# --------------------------------------------------------------------------------------------------


def test_verification_rate(tmp_path):
    """Two shards of 30 million tokens; data/README.md has the figures. Other programs may run beside."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 900, 30_000_000).astype(np.uint16)
    tokens[::900] = 1
    legacy_shard(tmp_path / "x_train_000000.bin", tokens)
    legacy_shard(tmp_path / "x_train_000001.bin", tokens[::-1])
    legacy_shard(tmp_path / "x_val_000000.bin", np.append([1], rng.integers(2, 900, 1_000_000)))
    model = train_model(tmp_path / "m.model", documents(80), vocab_size=900)
    run("upgrade", tmp_path, "--tokenizer", model)
    said = run("verify", tmp_path, "--tokenizer", model)
    rate = said.strip().splitlines()[-1]
    print(rate)
    assert int(rate.split()[-2]) > 200
