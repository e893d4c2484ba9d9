"""`data prepare`: text in, the same text out of the shards; bad input, kills and full disks.

The reader in this file is written against the format's table in data/README.md, not against data/shards.py.
"""

import bz2
import gzip
import hashlib
import importlib.metadata
import itertools
import json
import lzma
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import filelock
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import zstandard

from data import command, encode, prepare, shards, sources
from data import corpus as corpora
from tests.kit import data_kit, helpers
from tests.kit.data_kit import call, manifest_of, refused, start, write_jsonl
from tests.kit.launch import contents

ODD = [
    *["a\0b", "\0", "\r\n", "one\r\ntwo\r\n", "\t\tx\n", " ", "   lead", "trail   ", "\n\n\n", "\ufeffbom"],
    *["e\u0301 \u00e9 \ufb01 \u00a0 \u2028 \u200b \x0b \x0c", "x" * 70_000, "日" * 30_000, " " * 5_000],
    *["\r\n" * 3_000, "y\n" * 9_000, "<s></s><unk><0x41>", "\U0010ffff \uffff \ue000", "\u2585 block"],
]


def documents(count: int = 120) -> list[str]:
    """Documents in ten scripts and emoji, with all kinds of white space, and the odd ones."""
    return ODD + helpers.documents(count, 1)


def encoded(texts: list[str]) -> list[bytes]:
    """What the shards of these documents hold, in order of the bytes."""
    return sorted({text.encode() for text in texts if text})


def run(*args: object, code: int = 0) -> str:
    return call("data", "prepare", *args, code=code)


make = data_kit.prepare


def words(root: Path, source: object, *more: object, name: str = "t") -> list[object]:
    """`text` with the smallest vocabulary; of an option that `more` gives again the last one holds."""
    return ["text", source, "--name", name, "--vocab-size", 260, "--root", root, *more]


def place(root: Path, name: str = "t", vocab: int = 260) -> Path:
    return root / f"data/datasets/{name}_sp{vocab}"


def read_split(folder: Path, split: str) -> tuple[list[bytes], list[np.ndarray]]:
    """(texts, int32 headers) of a split, decoded by SentencePiece; the format written down a second time."""
    model = folder / manifest_of(folder)["tokenizer"]["file"]
    sp = sentencepiece.SentencePieceProcessor(model_file=str(model))
    texts = []
    headers = []
    for path in sorted(folder.glob(f"*_{split}_*.bin")):
        raw = path.read_bytes()
        headers.append(np.frombuffer(raw[:1024], "<i4"))
        tokens = np.frombuffer(raw[1024:], "<u2")
        assert headers[-1][2] == len(tokens)
        assert tokens[0] == 1
        for document in np.split(tokens, np.flatnonzero(tokens == 1)[1:]):
            texts.append(sp.decode(document.tolist()).encode())
    return texts, headers


def read_all(folder: Path) -> list[bytes]:
    return sorted(read_split(folder, "val")[0] + read_split(folder, "train")[0])


def sha(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def by_key(texts: set[bytes] | list[bytes]) -> list[bytes]:
    return sorted(texts, key=lambda text: sha(text)[8:16])


def side(text: bytes, fraction: float) -> str:
    """The split rule, written down a second time."""
    return "val" if int.from_bytes(sha(text)[8:16]) < int(fraction * 2**64) else "train"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "texts.jsonl", documents())


# --- text in, the same text out --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "vocab, model_type", [(260, "bpe"), (300, "bpe"), pytest.param(600, "unigram", marks=pytest.mark.slow)]
)
def test_every_document_comes_back(corpus, tmp_path, vocab, model_type):
    """With headers and a manifest that say so: their digests are computed here from the text."""
    options = ["--vocab-size", vocab, "--model-type", model_type, "--val-fraction", 0.2]
    make(tmp_path, corpus, "--shard-tokens", 15_000, *options)
    folder = place(tmp_path, vocab=vocab)
    manifest = manifest_of(folder)
    found = {}
    for number, split in enumerate(("val", "train")):
        texts, headers = read_split(folder, split)
        digests = [sha(text) for text in texts]
        found[split] = texts
        assert {side(text, 0.2) for text in texts} == {split}
        assert digests == sorted(digests), "order is by hash"
        assert manifest[f"{split}_sha256"] == sha(b"".join(digests)).hex()
        assert [h[12] for h in headers] == list(range(len(headers)))
        for h in headers:
            expected = [20240520, 1, 0x31464C47, 1, vocab, 1, len(headers), number, 0]
            assert list(h[[0, 1, 3, 4, 5, 6, 13, 14, 15]]) == expected
        assert sum(int(h[9:11].view("<u8")[0]) for h in headers) == sum(map(len, texts))
        assert sum(int(h[7]) for h in headers) == len(texts)
    assert len(headers) > 1
    everything = found["val"] + found["train"]
    assert sorted(everything) == encoded(documents())
    assert manifest["corpus_sha256"] == sha(b"".join(sorted(map(sha, everything)))).hex()
    tokenizer = sha((folder / manifest["tokenizer"]["file"]).read_bytes()).hex()
    assert manifest["tokenizer"]["sha256"] == tokenizer
    for entry in manifest["files"]:
        raw = (folder / entry["name"]).read_bytes()
        assert sha(raw).hex() == entry["sha256"]
        assert (raw[64:96].hex(), raw[96:128].hex()) == (tokenizer, manifest["corpus_sha256"])
    assert not [p for p in (tmp_path / "data").iterdir() if p.name.startswith(".")]


def test_formats_compressions_order_and_duplicates_do_not_matter(corpus, tmp_path):
    """Two members of a file are one text; an array may have any white space, and plain strings."""
    texts = [text for text in documents() if text][::-1]
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    parts = [("\n\n".join(lines[50:70]) + "\n").encode(), "\n".join(lines[70:100]).encode()]
    array = " [\n\t" + " ,\r\n".join(lines[100:110]) + f", {json.dumps(texts[110])}]\n"
    files = {f"{i}.TXT": text.encode() for i, text in enumerate(texts[:20])}
    files |= {
        "a.md.bz2": bz2.compress(texts[20].encode()),
        "b.py.XZ": lzma.compress(texts[21].encode()),
        "c.log.gz": gzip.compress(texts[22].encode()),
        "enwik": texts[23].encode(),
        "d.jsonl": "\n".join([*lines[24:60], '{"text": ""}']).encode(),
        "e.NDJSON.gz": gzip.compress(parts[0]) + gzip.compress(parts[1]),
        "f.json.zst": zstandard.compress(array.encode()),
        "g.json": "\n".join(lines[111:115]).encode(),
    }
    mixed = tmp_path / "mixed/inner"
    mixed.mkdir(parents=True)
    for name, content in files.items():
        (mixed / name).write_bytes(content)
    column = pyarrow.array([*texts[115:], None]).dictionary_encode()
    table = pyarrow.table({"n": range(len(column)), "text": column})
    pyarrow.parquet.write_table(table, mixed / "h.parquet", row_group_size=7)
    options = ["--vocab-size", 400, "--val-fraction", 0.1]
    make(tmp_path / "one", corpus, *options)
    said = make(tmp_path / "two", mixed.parent, *options, mixed / "c.log.gz", mixed / "enwik")
    assert "documents dropped: 2 empty, 10 duplicates, 0 skipped" in said
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    manifests = [json.loads(found.pop("data/datasets/t_sp400/manifest.json")) for found in (one, two)]
    assert one == two
    assert manifests[0] | {"dropped": 0} == manifests[1] | {"dropped": 0}


def test_a_text_is_cut_alike_packed_or_from_a_pipe(tmp_path):
    """By the size of the text: a pipe's file has none."""
    text = "".join(f"Der {number}. Satz.\n\n" for number in range(3000)).encode()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text))
    threading.Thread(target=(tmp_path / "pipe").write_bytes, args=[text]).start()
    paths = [tmp_path / name for name in ("a.txt", "b.txt.gz", "pipe")]
    one, *others = ([read for _, read in sources.Source((path,)).documents()] for path in paths)
    assert b"".join(one) == text and 20 < len(one) < 40
    assert others == [one, one]


@pytest.mark.parametrize(
    "separator, raw, texts",
    [
        ("<|end|>", "a\r\nb\n<|end|>\r\n<|end|>\nc <|end|>\n<|end|>\né", ["a\r\nb\n", "c <|end|>\n", "é"]),
        ("", "one\n\ntwo\n\n\n\nthree\n", ["one\n", "three\n", "two\n"]),
    ],
)
def test_text_files_split_at_a_separator(tmp_path, separator, raw, texts):
    file = tmp_path / "all.txt"
    file.write_bytes(raw.encode())
    make(tmp_path, file, "--separator", separator)
    assert read_all(place(tmp_path)) == encoded(texts)


def test_a_file_without_the_separator_and_a_line_that_is_nearly_one_are_named(tmp_path):
    texts = {"a.txt": "one\n---\ntwo\n", "b.txt": "three\n--- \nfour\n"}
    one, other = paths = [tmp_path / name for name in texts]
    for path in paths:
        path.write_text(texts[path.name])
    said = make(tmp_path, one, other, "--separator", "---")
    assert (
        f"'---', expected as a line of every file, is missing from 1 of 2; one document each: {other}\n"
        in said
    )
    assert f"{other}:2 is '--- ', which is no --separator '---': remove the white" in said
    assert ": give more text, or another --separator than '---'; without --separator a few" in said
    assert len(read_all(place(tmp_path))) == 3


def test_large_documents_are_for_training(corpus, tmp_path):
    """Of the documents that are small enough the same are chosen as without the limit, or the next ones."""
    for name, more in (("t", []), ("u", ["--val-docs", 9]), ("w", ["--val-fraction", 0.3])):
        make(tmp_path, corpus, "--val-max-bytes", 100, *more, name=name)
    found = {name: read_split(place(tmp_path, name), "val")[0] for name in "tuw"}
    ranked = by_key([text for text in encoded(documents()) if len(text) <= 100])
    assert set(found["t"]) == {t for t in ranked if side(t, 0.01) == "val"} | set(ranked[:2])
    assert sorted(found["u"]) == sorted(ranked[:9])
    assert set(found["w"]) == {t for t in ranked if side(t, 0.3) == "val"}
    assert read_all(place(tmp_path, "w")) == encoded(documents())


@pytest.mark.slow
def test_tokenizer_never_sees_validation_text(tmp_path):
    """Other validation documents, the same training documents: the same tokenizer."""
    texts = [text for text in documents() if text]
    train = [text for text in texts if side(text.encode(), 0.1) == "train"]
    extra = ("zq" * 50 + str(n) for n in itertools.count())
    other = list(itertools.islice((t for t in extra if side(t.encode(), 0.1) == "val"), 40))
    models = set()
    for name, lines in (("one", texts), ("two", train + other)):
        file = write_jsonl(tmp_path / f"{name}.jsonl", lines)
        make(tmp_path / name, file, "--vocab-size", 400, "--val-fraction", 0.1)
        models.add((tmp_path / name / "data/tokenizers/t_400_bpe.model").read_bytes())
    assert len(models) == 1


@pytest.mark.slow
def test_what_the_validation_text_is_worth_and_the_command_that_trains(tmp_path):
    """Too much of the text, or small, or one document decides the score, or all is well."""
    rng = random.Random(3)
    texts = [rng.randbytes(1_000).hex() for _ in range(300)]
    longs = (f"{i} " + "y" * 30_000 for i in itertools.count())
    long = next(text for text in longs if sha(text.encode())[8] == 0)
    root = tmp_path / "r o"
    for name, lines, count, line in (
        ("plain", texts, 60, "its largest document has 1.7% of the bytes"),
        ("small", texts, 1, "or 100,000 bytes a score depends on chance: take --val-docs 51; "),
        ("half", texts[:60], 50, "bytes, the training text 20,000: take --val-docs 12, and give more text; "),
        ("one", [*texts, long], 60, "than 5% of the validation text: take --val-max-bytes 7400, which "),
        ("most", [*texts[:3], long], 1, " bytes, the training text 6,000: give more text; "),
    ):
        said = make(root, write_jsonl(tmp_path / "t.jsonl", lines), "--val-docs", count, name=name)
        assert line in said and ("warning" in said) == (name != "plain")
        sizes = [len(text) for text in read_split(place(root, name), "val")[0]]
        found = manifest_of(place(root, name))["validation"]
        assert found["largest_document"] == round(max(sizes) / sum(sizes), 4)
    python = command.near(Path(sys.executable))
    assert f"\nPRESET=minute DATA_PATH='{root}/data/datasets/most_sp260' {python} " in said


# --- lossless or refused ---------------------------------------------------------------------------------


def test_space_marks_are_refused_with_their_places(tmp_path):
    many = write_jsonl(tmp_path / "m.jsonl", [f"{i} \u2581" if i % 3 else f"{i}" for i in range(60)])
    names = ", ".join(f"{many}:{n}" for n in (3, 5, 6, 8, 9, 11, 12, 14, 15))
    line = refused(make(tmp_path, many, code=3))
    assert line.startswith(f"error: {many}:2: holds U+2581") and "; --lossy-ok accepts the loss; " in line
    assert line.endswith(f"; --skip-bad leaves such documents out, as {names}")
    assert not contents(tmp_path / "data")
    said = make(tmp_path, many, "--skip-bad", name="m")
    assert said.count(": holds U+2581") == 10 and ", 40 skipped" in said
    assert len(read_all(place(tmp_path, "m"))) == 20
    texts = ["plain one", "plain two", "plain three", "é then \u2581 mark"]
    assert "LOSSY" in make(tmp_path, write_jsonl(tmp_path / "t.jsonl", texts), "--lossy-ok")
    assert manifest_of(place(tmp_path))["lossy"]
    headers = read_split(place(tmp_path), "val")[1] + read_split(place(tmp_path), "train")[1]
    assert [h[15] for h in headers] == [1, 1]
    assert sum(h[9] for h in headers) == sum(len(text.encode()) for text in texts)
    assert "val was not looked for in train: LOSSY" in call("data", "verify", place(tmp_path))


PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": True}


def given_tokenizer(folder: Path, **options: object) -> Path:
    texts = [f"{a} {b}" for a in helpers.SENTENCES for b in helpers.SENTENCES]
    return helpers.train_tokenizer(folder / "m.model", texts, **PLAIN | options)


def test_a_tokenizer_with_a_dummy_prefix_gives_the_text_back(corpus, tmp_path):
    model = given_tokenizer(tmp_path)
    run("text", corpus, "--name", "t", "--tokenizer", model, "--root", tmp_path, "--val-fraction", 0.2)
    assert read_all(place(tmp_path, vocab=400)) == encoded(documents())
    assert (tmp_path / "data/tokenizers/t_400_given.model").read_bytes() == model.read_bytes()
    for other in (["--vocab-size", 300], ["--model-type", "bpe"]):
        said = run("text", corpus, "--name", "u", "--root", tmp_path, "--tokenizer", model, *other, code=2)
        assert f"{model}: has 400 pieces and a type of its own" in refused(said)


@pytest.mark.parametrize(
    "options, line",
    [
        ({"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}, "not lossless"),
        ({"byte_fallback": False}, "not lossless"),
        ({"bos_id": -1}, "spm_train --bos_id=1"),
    ],
)
def test_tokenizers_that_are_refused(corpus, tmp_path, options, line):
    model = given_tokenizer(tmp_path, **options)
    said = run("text", corpus, "--name", "q", "--tokenizer", model, "--root", tmp_path, code=3)
    assert line in refused(said)
    assert not contents(tmp_path / "data")


# --- formats ---------------------------------------------------------------------------------------------

LINE = b'{"text": "fine"}\n'
ZIPPED = gzip.compress(LINE * 2000)
BAD_FILES = {
    "bytes.txt": (b"good \xff bad", ["byte 5 of the document is 0xff"]),
    "wide.txt": ("bad".encode("utf-16"), ["byte 0", "iconv -f UTF-16"]),
    "bytes.jsonl": (LINE + b'{"text": "a\xfe"}\n', ["bytes.jsonl:2", "byte 0xfe in position 11"]),
    "half.jsonl": (LINE + b'{"text": "a\\ud800b"}\n', ["half.jsonl:2", "surrogate"]),
    "broken.jsonl": (LINE + b'{"text": "a\n', ["broken.jsonl:2", "no JSON"]),
    "list.jsonl": (LINE + b'["text"]\n', ["list.jsonl:2", "holds a list"]),
    "other.jsonl": (LINE + b'{"body": "a"}\n', ["other.jsonl:2", "no field 'text'", "--field"]),
    "two.jsonl": (b'{"a": "1", "b": "2"}\n', ["two.jsonl:1", "has a, b", "--field"]),
    "number.jsonl": (LINE + b'{"text": 5}\n', ["number.jsonl:2", "holds a int"]),
    "deep.jsonl": (b"[" * 100_000 + b"\n", ["deep.jsonl:1", "no JSON"]),
    "cut.jsonl.gz": (ZIPPED[:-20], ["cut.jsonl.gz"]),
    "flipped.jsonl.gz": (ZIPPED[:30] + b"\0\0\0\0" + ZIPPED[34:], ["flipped.jsonl.gz"]),
    "not.jsonl.gz": (LINE, ["not.jsonl.gz", "gzip"]),
    "not.parquet": (LINE * 10, ["not.parquet", "no parquet file"]),
    "large.jsonl": (LINE + b'{"text": "' + b"x" * (16 * 2**20 + 1) + b'"}\n', ["large.jsonl:2", "split it"]),
    "open.json": (b'[{"text": "a"}, {"text": "b"}, {"te', ["open.json", "no JSON", "an array"]),
    "bytes.json": (b'["a", "\xff"]', ["bytes.json", "0xff"]),
    "cut.jsonl.zst": (zstandard.compress(LINE * 2000)[:-5], ["cut.jsonl.zst", "Truncated"]),
    "cut.txt.xz": (lzma.compress(LINE * 2000)[:-20], ["cut.txt.xz"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named(tmp_path, name):
    content, parts = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    line = refused(make(tmp_path, tmp_path / name, code=3))
    assert all(part in line for part in [*parts, "--skip-bad leaves such documents out"]), line
    assert not contents(tmp_path / "data")
    good = write_jsonl(tmp_path / "good.jsonl", ["one", "two", "three"])
    said = make(tmp_path, good, tmp_path / name, "--skip-bad")
    assert ", 1 skipped" in said
    assert f"skipped: {tmp_path / name}" in said
    assert {b"one", b"two", b"three"} <= set(read_all(place(tmp_path)))


def test_few_files_are_cut_so_that_validation_has_a_part_of_them(tmp_path):
    """A book, a text without line ends, a short one: always the same text, and two documents or more."""
    rng = random.Random(4)
    book = "\n\n".join(text + str(rng.random()) for text in helpers.documents(900, 3))
    texts = {"book.md": book, "line.txt": book.replace("\n", " "), "short.txt": book[:2000]}
    paths = [tmp_path / name for name in texts]
    for path in paths:
        path.write_text(texts[path.name], encoding="utf-8", newline="")
        found = list(sources.Source((path,)).documents())
        assert b"".join(text for _, text in found).decode() == texts[path.name] and len(found) > 8
        assert max(len(text) for _, text in found) <= 8192
        assert found[1][0] == f"{path}:{1 + found[0][1].count(10)}", "its first line"
        make(tmp_path, path, name=path.name)
        assert set(read_all(place(tmp_path, path.name))) == {text for _, text in found}
    make(tmp_path, paths[0], *paths[1:], name="three")
    for name in ("three", *texts):
        val, train = (read_split(place(tmp_path, name), split)[0] for split in ("val", "train"))
        assert len(val) >= 2 and sum(map(len, val)) < 0.3 * sum(map(len, train))


def test_what_a_folder_holds_is_read_listed_or_refused(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    texts = {"a.txt": b"one", "inner/b.txt": b"two", "c.log": b"three", "Makefile": b"four"}
    for name, content in (texts | {"._a.txt": b"Mac OS X \xff", ".git/d.txt": b"five"}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "linked").symlink_to(tmp_path)
    (folder / "d.txt").symlink_to("nowhere")
    said = make(tmp_path, folder)
    kinds = "1 .log, 2 hidden, 2 links that lead to no file, 1 without a suffix"
    assert f"left out in {folder}: {kinds}" in said
    assert read_all(place(tmp_path)) == [b"one", b"two"]
    make(tmp_path, folder, folder / "c.log", folder / "Makefile", name="s")
    assert read_all(place(tmp_path, "s")) == sorted(texts.values())

    locked = PermissionError(13, "Permission denied", f"{folder}/inner")  # root may read everything
    monkeypatch.setattr(os, "scandir", mock.Mock(side_effect=locked))
    line = refused(make(tmp_path, folder, name="u", code=3))
    assert f"{folder}/inner: cannot be read (Permission denied)" in line


# --- arguments -------------------------------------------------------------------------------------------

BAD_ARGUMENTS = [
    (["--name", "a/b"], "--name"),
    (["--name", "x_val"], "--name"),
    (["--vocab-size", 259], "'--vocab-size': 259 is not in the range 260<=x<=65536"),
    (["--val-fraction", 1], "'--val-fraction': 1.0 is not in the range 0<x<1"),
    (["--val-fraction", 0.5, "--val-docs", 3], "--val-docs and --val-fraction given, expected one of them"),
    (["--shard-tokens", 2**31], "is not in the range 1<=x<=2147483647"),
    (["--vocab-size", 60_000], "expected at most"),
    (["nowhere"], "does not exist"),
    (["empty"], ".json, .jsonl"),
]
BAD_FOR_THE_TEXT = [
    (["--tokenizer", helpers.ROOT / "README.md"], "expected a SentencePiece model"),
    (["--val-docs", 100_000], "at least 100001"),
    (["--val-max-bytes", 3, "--val-docs", 90], "of at most 3 bytes"),
    (["--val-fraction", 0.999999999], "smaller --val-fraction"),
]


def test_bad_arguments(corpus, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for code, cases in ((2, BAD_ARGUMENTS), (3, BAD_FOR_THE_TEXT)):
        for args, line in cases:
            assert line in refused(make(tmp_path / "root", corpus, *args, code=code))
            assert not contents(tmp_path / "root"), args


def test_what_is_there_is_kept(corpus, tmp_path):
    root = tmp_path / "my root"  # which a printed command quotes
    make(root, corpus)
    before = contents(root / "data")
    assert "is whole" in make(root, corpus)
    said = refused(make(root, corpus, "--val-docs", 5, code=2))
    model = root / "data/tokenizers/t_260_bpe.model"
    assert said.endswith(f"rm -r '{place(root)}' '{model}'")
    assert "was made from other text" in refused(make(root, ["one", "two"], code=2))
    assert contents(root / "data") == before
    folder = place(root)
    shard = folder / "t_train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert f"rm -r '{folder}' and the same command" in refused(make(root, corpus, code=3))
    folder.rename(tmp_path / "gone")
    model.write_bytes(b"another")
    said = refused(make(root, corpus, code=2))
    assert "another tokenizer has this name" in said and said.endswith(f"rm '{model}'")


def test_two_at_once(corpus, tmp_path):
    (tmp_path / "data/datasets/.spool_t_sp260").mkdir(parents=True)
    with filelock.FileLock(tmp_path / "data/datasets/.spool_t_sp260/lock"):
        assert "another python -m data prepare is at work" in refused(make(tmp_path, corpus, code=2))


@pytest.mark.slow
def test_closed_and_broken_output(tmp_path):
    """No traceback, no broken file; in the C locale too."""
    (tmp_path / "ü.txt").write_text("one\n\ntwo\n")

    def begin(name: str, **options) -> subprocess.Popen:
        line = words(tmp_path, tmp_path / "ü.txt", "--separator", "", name=name)
        return start("data", "prepare", *line, **options)

    closed = begin("a", stdout=None, preexec_fn=lambda: os.close(1))
    broken = begin("b")
    broken.stdout.close()
    plain = begin("c", env={"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert (closed.communicate()[1], closed.returncode) == ("", 0)
    assert (broken.stderr.read(), broken.wait()) == ("", 141)
    assert ("error" in plain.communicate()[1], plain.returncode) == (False, 0)
    assert read_all(place(tmp_path, "a")) == read_all(place(tmp_path, "c"))


# --- killed, stopped, out of space: a second run gives the same bytes ------------------------------------

MOMENTS = ["dataset", "documents", "tokenizer.model", "dataset/t_val_*", "dataset/t_train_*3.bin"]


@pytest.mark.slow
def test_whatever_stops_a_run_the_next_one_makes_the_same_bytes(tmp_path):
    """Soon after each of the steps has begun; and a full disk, for which a limit on files stands in."""
    corpus = write_jsonl(tmp_path / "texts.jsonl", documents(500))
    line = words(tmp_path / "plain", corpus, "--vocab-size", 400, "--shard-tokens", 5_000, "--val-docs", 40)
    run(*line)
    expected = contents(tmp_path / "plain")
    rng = random.Random(20)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        root = tmp_path / number.name
        for moment in MOMENTS:
            process = start("data", "prepare", *line, "--root", root)
            while not list(root.glob(f"data/datasets/.spool*/*/{moment}")) and process.poll() is None:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.05))
            process.send_signal(number)
            said = process.communicate()[1]
            if moment == MOMENTS[0] and number != signal.SIGKILL:
                assert process.returncode == 16 and "continues" in said, said
            if place(root, vocab=400).exists():
                assert contents(root).items() >= expected.items()
        run(*line, "--root", root)
        assert contents(root) == expected
    root = tmp_path / "full"

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    full = start("data", "prepare", *line, "--root", root, preexec_fn=limit, stdout=subprocess.DEVNULL)
    said = refused(full.communicate()[1])
    assert full.returncode == 3 and not place(root, vocab=400).exists()
    assert "cannot be written" in said and "make room, then run the same command again" in said
    run(*line, "--root", root)
    assert contents(root) == expected


def test_second_run_continues(corpus, tmp_path, monkeypatch):
    """What is whole is not made again: the spool, the tokenizer, and the shards."""
    options = ["--vocab-size", 300, "--shard-tokens", 10_000]
    monkeypatch.setattr(prepare, "seal", lambda *_: signal.raise_signal(signal.SIGINT))
    assert "continues" in make(tmp_path / "cut", corpus, *options, code=16)
    monkeypatch.undo()
    written = sorted(tmp_path.glob("cut/data/datasets/.spool_t_sp300/*/dataset/t_train_*.bin"))
    missing = shards.read_header(written[-1]).text_bytes
    written[-1].unlink()
    said = make(tmp_path / "cut", corpus, *options)
    assert said.startswith(f"encoding val: 0 bytes\nencoding train: {missing:,} bytes\n")
    make(tmp_path / "plain", corpus, *options)
    assert contents(tmp_path / "cut") == contents(tmp_path / "plain")


# --- the demo corpus -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_demo(tmp_path):
    """In bytes; no document decides the score. CI prepares the usual vocabulary before all tests."""
    texts = {split: corpora.demo_documents(split) for split in ("val", "second", "train")}
    digests = {split: [sha(text) for _, text in found] for split, found in texts.items()}
    made = start("data", "prepare", "demo", "--vocab-size", 260, "--root", tmp_path, cwd="/")
    assert made.wait() == 0
    folder = place(tmp_path, "demo")
    names = ["demo_train_000000.bin", "demo_val_000000.bin", "manifest.json"]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert (tmp_path / "data/tokenizers/demo_260_bpe.model").exists()
    for split in ("val", "train"):
        assert [sha(text) for text in read_split(folder, split)[0]] == digests[split]
    manifest = manifest_of(folder)
    assert manifest["second_sha256"] == sha(b"".join(digests["second"])).hex()
    (val,) = (entry for entry in manifest["files"] if entry["split"] == "val")
    assert val["documents"] >= 200
    assert val["bytes"] >= 1_500_000
    assert val["tokens"] == val["documents"] + val["bytes"], "byte level"
    assert manifest["validation"]["largest_document"] < 0.025
    assert len(texts["second"]) >= 50
    assert all(may_be_validated(*document) for document in texts["val"] + texts["second"])
    everything = digests["val"] + digests["second"] + digests["train"]
    assert len(everything) == len(set(everything))
    assert sha(b"".join(sorted(everything))).hex() == corpora.DEMO_SHA256


def may_be_validated(name: str, text: bytes) -> bool:
    """The demo's rule, written down a second time: nothing large, nothing that records import."""
    return len(text) <= 32_768 and not re.match(corpora.TRAIN_NAMES, name)


@pytest.mark.slow
def test_development_text_is_cut_from_the_demos_training_documents(tmp_path):
    """The 200 smallest keys of the documents that could have been validated; nothing of val and second."""
    line = refused(run("development", "--vocab-size", 260, "--root", tmp_path, code=3))
    assert f"python -m data prepare demo --vocab-size 260 --root {tmp_path} makes it" in line
    model = encode.train_tokenizer([b"def f(x):\n"], corpora.Plan("demo", vocab_size=260))
    (tmp_path / "data/tokenizers").mkdir(parents=True)
    (tmp_path / "data/tokenizers/demo_260_bpe.model").write_bytes(model)
    for _ in range(2):  # the second time all is there, and is found to be the same
        made = start("data", "prepare", "development", "--vocab-size", 260, "--root", tmp_path)
        assert made.wait() == 0, made.stderr.read()
    folder = place(tmp_path, "development")
    val, train = (read_split(folder, split)[0] for split in ("val", "train"))
    train_of_demo = corpora.demo_documents("train")
    eligible = [text for name, text in train_of_demo if may_be_validated(name, text)]
    assert val == sorted(by_key(eligible)[:200], key=sha)
    assert sorted(map(sha, val + train)) == [sha(text) for _, text in train_of_demo]
    assert 1_500_000 < sum(map(len, val)) < 2_000_000
    manifest = manifest_of(folder)
    assert manifest["tokenizer"]["sha256"] == sha(model).hex()
    assert manifest["validation"]["largest_document"] < 0.025


def test_demo_sources_are_checked(tmp_path, monkeypatch):
    version = importlib.metadata.version("h11")
    monkeypatch.setattr(corpora, "REPO", tmp_path)
    monkeypatch.setattr(Path, "read_bytes", lambda path: os.stat(tmp_path / "gone"))
    for pin, line in (
        (f"h11=={version}", r"h11/.*\.py: cannot be read.*pip install"),
        ("h11==0.1", rf"version {version} is installed, expected 0\.1: pip install"),
        ("absent==2.0", r"absent: not installed.*pip install"),
    ):
        (tmp_path / "requirements.txt").write_text(pin)
        monkeypatch.setattr(corpora, "DEMO_PACKAGES", [pin.split("==")[0]])
        with pytest.raises(shards.DataError, match=line):
            list(corpora.demo_sources())


def test_a_changed_demo_corpus_is_refused(tmp_path, monkeypatch):
    for module in (corpora, prepare):
        monkeypatch.setattr(module, "demo_sources", lambda: iter([(name, name.encode()) for name in "abc"]))
    with pytest.raises(shards.DataError, match=r"the corpus has sha256 .*: pip install --force-reinstall"):
        corpora.demo_documents("second")
    assert "pip install --force-reinstall" in refused(run("demo", "--root", tmp_path, code=3))
    assert not contents(tmp_path / "data")
