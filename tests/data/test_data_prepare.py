"""`data prepare`: text in, the same text out of the shards; bad input, kills and full disks.

The reader in this file is written against the format's table in data/README.md, not against data/shards.py.
"""

import base64
import bz2
import gzip
import hashlib
import itertools
import json
import lzma
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import zstandard

from data import command, encode, prepare, shards, sources
from data import corpus as corpora
from tests.kit import helpers
from tests.kit.data_kit import call, refused, start, write_jsonl

SCRIPTS = [
    "the quick brown fox jumps over the lazy dogs",
    "Το γρήγορο καφέ αλεπού πηδά πάνω από το σκυλί",
    "Быстрая коричневая лиса прыгает через собаку",
    "الثعلب البني السريع يقفز فوق الكلب الكسول",
    "השועל החום המהיר קופץ מעל הכלב העצלן",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है",
    "สุนัข จิ้งจอก สีน้ำตาล กระโดด ข้าม สุนัข ขี้เกียจ",
    "敏捷 的 棕色 狐狸 跳过 懒狗 天地 玄黄 宇宙 洪荒",
    "すばやい ちゃいろの きつねは のろまな いぬを",
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다",
    "სწრაფი ყავისფერი მელა ზარმაც ძაღლს ახტება",
    "விரைவான பழுப்பு நரி சோம்பேறி நாயைத்",
    "👩‍👩‍👧‍👦 🇩🇪 🦊 🏳️‍🌈 ✨ 👍🏽",
]
ODD = [
    *["a\0b", "\0", "\r\n", "one\r\ntwo\r\n", "\t\tx\n", " ", "   lead", "trail   ", "\n\n\n", "\ufeffbom"],
    *["e\u0301 \u00e9 \ufb01 \u00a0 \u2028 \u200b \x0b \x0c", "x" * 70_000, "日" * 30_000, " " * 5_000],
    *["\r\n" * 3_000, "y\n" * 9_000, "<s></s><unk><0x41>", "\U0010ffff \uffff \ue000", "\u2585 block"],
]
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": True}


def documents(count: int = 120, seed: int = 1) -> list[str]:
    """Documents in twelve scripts and emoji, with all kinds of white space, and the odd ones."""
    return ODD + helpers.documents(count, seed, SCRIPTS)


def run(*args: object, code: int = 0) -> str:
    return call("data", "prepare", *args, code=code)


def read_split(folder: Path, split: str) -> tuple[list[bytes], list[np.ndarray]]:
    """(texts, int32 headers) of a split, decoded by SentencePiece; the format written down a second time."""
    manifest = json.loads((folder / "manifest.json").read_text())
    sp = sentencepiece.SentencePieceProcessor(model_file=str(folder / manifest["tokenizer"]["file"]))
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


def tree(root: Path) -> dict[str, bytes]:
    """Everything that a run left below a folder."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def sha(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


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
    options = ["--vocab-size", vocab, "--model-type", model_type, "--val-fraction", 0.2]
    run("text", corpus, "--name", "t", "--root", tmp_path, "--shard-tokens", 15_000, *options)
    folder = tmp_path / f"data/datasets/t_sp{vocab}"
    found = {}
    for number, split in enumerate(("val", "train")):
        texts, headers = read_split(folder, split)
        found[split] = texts
        assert {side(text, 0.2) for text in texts} == {split}
        assert [sha(t) for t in texts] == sorted(sha(t) for t in texts), "order is by hash"
        assert [h[12] for h in headers] == list(range(len(headers)))
        for h in headers:
            expected = [20240520, 1, 0x31464C47, 1, vocab, 1, len(headers), number, 0]
            assert list(h[[0, 1, 3, 4, 5, 6, 13, 14, 15]]) == expected
        assert sum(int(h[9:11].view("<u8")[0]) for h in headers) == sum(map(len, texts))
        assert sum(int(h[7]) for h in headers) == len(texts)
    assert len(headers) > 1
    assert sorted(found["val"] + found["train"]) == sorted({text.encode() for text in documents() if text})
    check_manifest(folder, found)
    assert not [p for p in (tmp_path / "data").iterdir() if p.name.startswith(".")]


def check_manifest(folder: Path, found: dict[str, list[bytes]]) -> None:
    """The digests of the manifest and of the headers, recomputed from the text."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for split, texts in found.items():
        assert manifest[f"{split}_sha256"] == sha(b"".join(map(sha, texts))).hex()
    everything = sha(b"".join(sorted(map(sha, found["val"] + found["train"])))).hex()
    assert manifest["corpus_sha256"] == everything
    tokenizer = sha((folder / manifest["tokenizer"]["file"]).read_bytes()).hex()
    assert manifest["tokenizer"]["sha256"] == tokenizer
    for entry in manifest["files"]:
        raw = (folder / entry["name"]).read_bytes()
        assert sha(raw).hex() == entry["sha256"]
        assert raw[64:96].hex() == tokenizer
        assert raw[96:128].hex() == everything


@pytest.mark.slow
def test_formats_order_and_duplicates_do_not_matter(corpus, tmp_path):
    texts = [text for text in documents() if text][::-1]
    mixed = tmp_path / "mixed/inner"
    mixed.mkdir(parents=True)
    for i, text in enumerate(texts[:30]):
        (mixed / f"{i}.TXT").write_bytes(text.encode())
    write_jsonl(mixed / "a.jsonl", [*texts[25:60], ""])
    with gzip.open(mixed / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n\n" for text in texts[50:100])
    table = pyarrow.table({"n": range(len(texts) - 100 + 1), "text": [*texts[100:], None]})
    pyarrow.parquet.write_table(table, mixed / "c.parquet", row_group_size=7)
    options = ["--name", "t", "--vocab-size", 400, "--val-fraction", 0.1]
    run("text", corpus, *options, "--root", tmp_path / "one", "--workers", 1)
    said = run("text", mixed.parent, *options, "--root", tmp_path / "two", "--workers", 3)
    assert "dropped: 15 exact duplicates, 2 empty documents" in said
    one = tree(tmp_path / "one")
    two = tree(tmp_path / "two")
    name = "data/datasets/t_sp400/manifest.json"
    manifests = [json.loads(files.pop(name)) for files in (one, two)]
    assert one == two
    assert manifests[0] | {"dropped": 0} == manifests[1] | {"dropped": 0}


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
    run("text", file, "--separator", separator, "--name", "t", "--vocab-size", 260, "--root", tmp_path)
    assert read_all(tmp_path / "data/datasets/t_sp260") == [text.encode() for text in texts]


def test_large_documents_are_for_training(corpus, tmp_path):
    """Of the documents that are small enough the same are chosen as without the limit, or the next ones."""
    small = {text.encode() for text in documents() if 0 < len(text.encode()) <= 100}
    for name, more in (("t", []), ("u", ["--val-docs", 9]), ("w", ["--val-fraction", 0.3])):
        options = ["--name", name, "--vocab-size", 260, "--val-max-bytes", 100]
        run("text", corpus, *options, *more, "--root", tmp_path)
    found = {name: read_split(tmp_path / f"data/datasets/{name}_sp260", "val")[0] for name in "tuw"}
    ranked = sorted(small, key=lambda text: sha(text)[8:16])
    assert set(found["t"]) == {t for t in small if side(t, 0.01) == "val"} | set(ranked[:2])
    assert sorted(found["u"]) == sorted(ranked[:9])
    assert set(found["w"]) == {t for t in small if side(t, 0.3) == "val"}
    assert read_all(tmp_path / "data/datasets/w_sp260") == sorted({t.encode() for t in documents() if t})


@pytest.mark.slow
def test_tokenizer_never_sees_validation_text(tmp_path):
    """Other validation documents, the same training documents: the same tokenizer."""
    texts = [text for text in documents() if text]
    train = [text for text in texts if side(text.encode(), 0.1) == "train"]
    extra = ("zq" * 50 + str(n) for n in itertools.count())
    other = list(itertools.islice((t for t in extra if side(t.encode(), 0.1) == "val"), 40))
    models = []
    for name, lines in (("one", texts), ("two", train + other)):
        file = write_jsonl(tmp_path / f"{name}.jsonl", lines)
        root = tmp_path / name
        run("text", file, "--name", "t", "--vocab-size", 400, "--val-fraction", 0.1, "--root", root)
        models.append((root / "data/tokenizers/t_400_bpe.model").read_bytes())
    assert models[0] == models[1]


def test_the_last_line_trains_and_a_small_validation_text_is_reported(tmp_path):
    file = write_jsonl(tmp_path / "t.jsonl", helpers.documents(3000, 5, SCRIPTS))
    options = ["text", file, "--name", "t", "--vocab-size", 260, "--root", tmp_path / "r o"]
    said = run(*options, "--val-docs", 1)
    folder = tmp_path / "r o/data"
    assert shlex.split(said.splitlines()[-1])[:4] == [
        "VOCAB_SIZE=260",
        f"DATA_PATH={folder}/datasets/t_sp260",
        f"TOKENIZER_PATH={folder}/tokenizers/t_260_bpe.model",
        command.near(Path(sys.executable)),
    ]
    assert "warning: the validation text is small (documents: 1, " in said
    options[3] = "u"
    assert "warning" not in run(*options, "--val-docs", 1000)


@pytest.mark.slow
def test_a_document_that_decides_the_score_is_reported(tmp_path):
    """Its share of the validation text, in manifest and output."""
    rng = random.Random(3)
    texts = [rng.randbytes(1_000).hex() for _ in range(300)]
    longs = (f"{i} " + "y" * 30_000 for i in itertools.count())
    long = next(text for text in longs if sha(text.encode())[8] == 0)
    for name, extra, words in (
        ("plain", [], "of 60 documents has 1.7% of the bytes"),
        ("one", [long], "warning: a score depends on one document, which has more than 5% "),
    ):
        file = write_jsonl(tmp_path / f"{name}.jsonl", texts + extra)
        options = ["--name", name, "--vocab-size", 260, "--val-docs", 60, "--root", tmp_path]
        said = run("text", file, *options)
        assert words in said and ("warning" in said) == bool(extra)
        folder = tmp_path / f"data/datasets/{name}_sp260"
        sizes = [len(text) for text in read_split(folder, "val")[0]]
        found = json.loads((folder / "manifest.json").read_text())["validation"]
        assert found["largest_document"] == round(max(sizes) / sum(sizes), 4)


# --- lossless or refused ---------------------------------------------------------------------------------


def test_space_marks_are_refused_with_all_their_places(tmp_path):
    file = write_jsonl(tmp_path / "t.jsonl", ["plain one", "plain two", "plain three", "é then \u2581 mark"])
    options = ["text", file, "--name", "t", "--vocab-size", 260, "--root", tmp_path]
    many = write_jsonl(tmp_path / "m.jsonl", [f"{i} \u2581" if i % 3 else f"{i}" for i in range(60)])
    names = ", ".join(f"{many}:{n}" for n in (2, 3, 5, 6, 8, 9, 11, 12, 14, 15))
    line = refused(run("text", many, *options[2:], code=3))
    assert f": 40 ({names} and 30 more); --skip-bad leaves them out, --lossy-ok accepts the loss" in line
    assert not list((tmp_path / "data").iterdir())
    said = run("text", many, "--name", "m", *options[4:], "--skip-bad")
    assert said.count(": holds U+2581") == 10 and "skipped: 40 documents" in said
    assert len(read_all(tmp_path / "data/datasets/m_sp260")) == 20
    assert "LOSSY" in run(*options, "--lossy-ok")
    folder = tmp_path / "data/datasets/t_sp260"
    assert json.loads((folder / "manifest.json").read_text())["lossy"]
    headers = read_split(folder, "val")[1] + read_split(folder, "train")[1]
    assert [h[15] for h in headers] == [1, 1]
    assert sum(h[9] for h in headers) == 9 + 9 + 11 + len("é then \u2581 mark".encode())


def test_a_tokenizer_with_a_dummy_prefix_gives_the_text_back(corpus, tmp_path):
    texts = [f"{a} {b}" for a in SCRIPTS for b in SCRIPTS]
    model = helpers.train_tokenizer(tmp_path / "m.model", texts, **PLAIN, vocab_size=700)
    run("text", corpus, "--name", "p", "--tokenizer", model, "--root", tmp_path, "--val-fraction", 0.2)
    assert read_all(tmp_path / "data/datasets/p_sp700") == sorted(t.encode() for t in documents() if t)
    assert (tmp_path / "data/tokenizers/p_700_given.model").read_bytes() == model.read_bytes()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}, "not lossless"),
        ({"byte_fallback": False}, "not lossless"),
        ({"bos_id": -1}, "spm_train --bos_id=1"),
    ],
)
def test_tokenizers_that_are_refused(corpus, tmp_path, options, words):
    texts = [f"{a} {b}" for a in SCRIPTS for b in SCRIPTS]
    model = helpers.train_tokenizer(tmp_path / "m.model", texts, **PLAIN | {"vocab_size": 700} | options)
    said = run("text", corpus, "--name", "q", "--tokenizer", model, "--root", tmp_path, code=3)
    assert words in refused(said)
    assert not list((tmp_path / "data").glob("*"))


def test_different_texts_of_equal_tokens(tmp_path):
    """Without byte fallback all that is rare is one token: the splits have tokens in common, but no text."""
    rare = [f"fox {chr(0x4E00 + i)}" for i in range(100)]
    common = [f"the fox {i}" for i in range(300)]
    model = helpers.train_tokenizer(tmp_path / "m.model", common, **PLAIN, byte_fallback=False, vocab_size=40)
    file = write_jsonl(tmp_path / "t.jsonl", rare)
    options = ["--name", "t", "--tokenizer", model, "--root", tmp_path, "--val-docs", 10, "--lossy-ok"]
    run("text", file, *options)
    (folder,) = (tmp_path / "data/datasets").iterdir()
    said = call("data", "verify", folder)
    assert "tokens of validation documents among 90 training documents: 90 (in t_train_000000.bin)" in said


# --- bad input -------------------------------------------------------------------------------------------

LINE = b'{"text": "fine"}\n'
ZIPPED = gzip.compress(LINE * 2000)
BAD_FILES = {
    "bytes.txt": (b"good \xff bad", ["byte 5 is 0xff"]),
    "cut.txt": ("ends in the middle of é".encode()[:-1], ["byte 22", "unexpected end"]),
    "surrogate.txt": (b"x\xed\xa0\x80", ["byte 1"]),
    "bytes.jsonl": (LINE + b'{"text": "a\xfe"}\n', ["bytes.jsonl:2", "byte 0xfe in position 11"]),
    "half.jsonl": (LINE + b'{"text": "a\\ud800b"}\n', ["half.jsonl:2", "surrogate"]),
    "broken.jsonl": (LINE + b'{"text": "a\n', ["broken.jsonl:2", "no JSON"]),
    "list.jsonl": (LINE + b'["text"]\n', ["list.jsonl:2", "holds a list"]),
    "other.jsonl": (LINE + b'{"body": "a"}\n', ["other.jsonl:2", "no field 'text'", "--field"]),
    "number.jsonl": (LINE + b'{"text": 5}\n', ["number.jsonl:2", "holds a int"]),
    "deep.jsonl": (b"[" * 100_000 + b"\n", ["deep.jsonl:1", "no JSON"]),
    "cut.jsonl.gz": (ZIPPED[:-20], ["cut.jsonl.gz"]),
    "flipped.jsonl.gz": (ZIPPED[:30] + b"\0\0\0\0" + ZIPPED[34:], ["flipped.jsonl.gz"]),
    "not.jsonl.gz": (LINE, ["not.jsonl.gz", "gzip"]),
    "not.parquet": (LINE * 10, ["not.parquet", "no parquet file"]),
    "large.jsonl": (LINE + b'{"text": "' + b"x" * (16 * 2**20 + 1) + b'"}\n', ["large.jsonl:2", "split it"]),
    "open.json": (b'[{"text": "a"}, {"text": "b"}, {"te', ["open.json", "no JSON", "an array"]),
    "number.json": (b'["a", 5]', ["number.json:2", "holds a int"]),
    "bytes.json": (b'["a", "\xff"]', ["bytes.json", "0xff"]),
    "cut.jsonl.zst": (zstandard.compress(LINE * 2000)[:-5], ["cut.jsonl.zst", "Truncated"]),
    "cut.txt.xz": (lzma.compress(LINE * 2000)[:-20], ["cut.txt.xz"]),
    "cut.md.bz2": (bz2.compress(LINE * 2000)[:-5], ["cut.md.bz2"]),
    "one.txt": (b"a single document", ["1 distinct documents", "--separator"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named(tmp_path, name):
    content, words = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    root = tmp_path / "out"
    line = refused(run("text", tmp_path / name, "--name", "t", "--vocab-size", 260, "--root", root, code=3))
    assert all(word in line for word in words), line
    assert not list((root / "data").iterdir())
    good = write_jsonl(tmp_path / "good.jsonl", ["one", "two", "three"])
    options = ["--name", "t", "--vocab-size", 260, "--root", root, "--skip-bad"]
    said = run("text", tmp_path / name, good, *options)
    if name != "one.txt":
        assert "--skip-bad leaves such documents out" in line
        assert "skipped: 1 documents that could not be used" in said
        assert f"skipped: {tmp_path / name}" in said
    assert {b"one", b"two", b"three"} <= set(read_all(root / "data/datasets/t_sp260"))


PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".XZ": lzma.compress,
    ".zst": zstandard.compress,
}


@pytest.mark.parametrize("ending", PACKED)
def test_every_format_and_compression_gives_the_same_documents(tmp_path, ending):
    """Two members of a compressed file are one text; an array may have any white space, and plain strings."""
    texts = [*(text for text in documents(20) if "\ud800" not in text), "a, [b] ]"]
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    array = " [\n\t" + " ,\r\n".join(lines[:-1]) + f", {json.dumps(texts[-1])}]\n"
    half = len(lines) // 2
    parts = [("\n".join(lines[:half]) + "\n").encode(), "\n".join(lines[half:]).encode()]
    for name, raw in {
        "a.json": [array.encode()],
        "b.json": parts,
        "c.jsonl": parts,
        "d.NDJSON": parts,
    }.items():
        path = tmp_path / f"{name}{ending}"
        path.write_bytes(b"".join(map(PACKED[ending], raw)))
        assert [text.decode() for _, text in sources.Source((path,)).documents()] == texts, name
    paths = tuple(tmp_path / f"{name}{ending}" for name in ("a.md", "b.py", "enwik", "c.json"))
    for path in paths:
        path.write_bytes(PACKED[ending](b'{"not": "read as JSON"}'))
    as_text = ("enwik", "c.json")
    assert sources.find_files([*paths], as_text) == tuple(sorted(paths))
    found = sources.Source(paths, as_text=as_text).documents()
    assert [text for _, text in found] == [b'{"not": "read as JSON"}'] * 4


def test_a_file_that_is_alone_is_cut_and_no_single_document_is_validation(tmp_path):
    """A book, a text without line ends, a short one: always the same text, and two documents or more."""
    rng = random.Random(4)
    book = "\n\n".join(text + str(rng.random()) for text in helpers.documents(900, 3, SCRIPTS))
    for name, text in {
        "book.md": book,
        "line.txt": book.replace("\n", " "),
        "short.txt": book[:2000],
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
        run("text", tmp_path / name, "--name", name, "--vocab-size", 260, "--root", tmp_path)
        folder = tmp_path / f"data/datasets/{name}_sp260"
        assert len(read_split(folder, "val")[0]) >= 2
        found = list(sources.Source((tmp_path / name,)).documents())
        assert b"".join(text for _, text in found).decode() == text and len(found) > 8
        assert max(len(text) for _, text in found) <= 8192
        assert set(read_all(folder)) == {text for _, text in found}
        assert found[1][0] == f"{tmp_path / name}:{1 + found[0][1].count(10)}", "its first line"
    for number in (3, 10, 40):
        file = write_jsonl(tmp_path / "t.jsonl", [f"document {n} of {number}" for n in range(number)])
        run("text", file, "--name", f"n{number}", "--vocab-size", 260, "--root", tmp_path)
        assert len(read_split(tmp_path / f"data/datasets/n{number}_sp260", "val")[0]) >= 2


def test_what_a_folder_holds_is_read_listed_or_refused(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "inner/b.txt").write_text("two")
    (folder / "c.log").write_text("three")
    (folder / "Makefile").write_text("four")
    (folder / "._a.txt").write_bytes(b"Mac OS X \xff")
    (folder / ".git").mkdir()
    (folder / ".git/d.txt").write_text("five")
    (tmp_path / "elsewhere").mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    options = ["text", folder, "--vocab-size", 260, "--root", tmp_path, "--name"]
    said = run(*options, "t")
    assert f"left out: {folder}/linked, a link to a folder" in said
    assert f"left out in {folder}: 1 .log, 2 hidden, 1 without a suffix" in said
    assert read_all(tmp_path / "data/datasets/t_sp260") == [b"one", b"two"]
    run(*options, "s", "--as-text", ".LOG", "--as-text", "makefile")
    assert read_all(tmp_path / "data/datasets/s_sp260") == [b"four", b"one", b"three", b"two"]
    (folder / "e.txt").write_bytes(b"x" * (16 * 2**20 + 1))
    assert "e.txt: a document of more than 16,777,216 bytes, expected less: --separator LINE" in refused(
        run(*options, "u", code=3)
    )
    (folder / "e.txt").unlink()
    (folder / "d.txt").symlink_to("nowhere")
    assert f"{folder}/d.txt: a dangling link" in refused(run(*options, "u", code=3))
    (folder / "d.txt").unlink()

    def locked(path, real=os.scandir):  # the tests may run as a user who may read everything
        if str(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", locked)
    assert f"{folder}/inner: cannot be read (Permission denied)" in refused(run(*options, "u", code=3))


BAD_ARGUMENTS = [
    (["--name", ""], "--name"),
    (["--name", "a/b"], "--name"),
    (["--name", "x_val"], "--name"),
    (["--vocab-size", 259], "--vocab-size is 259, expected 260"),
    (["--vocab-size", 65537], "expected 260"),
    (["--val-fraction", 1], "'--val-fraction': 1.0 is not in the range 0<x<1"),
    (["--val-fraction", 0.5, "--val-docs", 3], "--val-docs and --val-fraction given, expected one of them"),
    (["--val-docs", 0], "'--val-docs': 0 is not in the range x>=1"),
    (["--shard-tokens", 2**31], "--shard-tokens is 2147483648, expected 1 to 2147483647"),
    (["--tokenizer", helpers.ROOT / "README.md"], "expected a SentencePiece model"),
]


@pytest.mark.parametrize("args, words", BAD_ARGUMENTS)
def test_bad_arguments(tmp_path, args, words):
    (tmp_path / "t.txt").write_text("x")
    code = 3 if "--tokenizer" in args else 2
    line = refused(run("text", tmp_path / "t.txt", "--name", "t", "--root", tmp_path, *args, code=code))
    assert words in line
    assert not (tmp_path / "data").exists()


def test_arguments_that_do_not_fit_the_text(corpus, tmp_path):
    options = ["text", corpus, "--name", "t", "--root", tmp_path]
    (tmp_path / "empty").mkdir()
    (tmp_path / "my notes.log").write_text("x")
    for name, words in (
        ("nowhere", "does not exist"),
        ("empty", ".json, .jsonl"),
        ("my notes.log", "--as-text .log says that it is plain text"),
    ):
        assert words in refused(run("text", tmp_path / name, "--name", "t", "--root", tmp_path, code=2))
    assert "expected at most" in refused(run(*options, "--vocab-size", 60_000, code=2))
    assert "at least 100001" in refused(run(*options, "--val-docs", 100_000, code=3))
    assert "of at most 3 bytes" in refused(run(*options, "--val-max-bytes", 3, "--val-docs", 90, code=3))
    assert "smaller --val-fraction" in refused(run(*options, "--val-fraction", 0.999999999, code=3))
    model = helpers.train_tokenizer(tmp_path / "m.model", SCRIPTS, vocab_size=500)
    for other in (["--vocab-size", 300], ["--model-type", "bpe"]):
        said = run(*options, "--tokenizer", model, *other, code=2)
        assert f"{model}: has 500 pieces and a type of its own" in refused(said)
    assert not list((tmp_path / "data").iterdir())


def test_what_is_there_is_kept(corpus, tmp_path):
    root = tmp_path / "root"
    options = ["text", corpus, "--name", "t", "--vocab-size", 260, "--root", root]
    run(*options)
    before = tree(root)
    assert "is whole" in run(*options)
    said = refused(run(*options, "--val-docs", 5, code=2))
    assert said.endswith(f"rm -r {root}/data/datasets/t_sp260 {root}/data/tokenizers/t_260_bpe.model")
    other = write_jsonl(tmp_path / "other.jsonl", ["one", "two"])
    assert "exists and was made" in refused(run("text", other, *options[2:], code=2))
    assert tree(root) == before
    folder = root / "data/datasets/t_sp260"
    shard = folder / "t_train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert f"rm -r {folder} and the same command" in refused(run(*options, code=3))
    (folder / "manifest.json").write_text("[" * 100_000)
    assert f"rm -r {folder} and the same command" in refused(run(*options, code=3))
    folder.rename(tmp_path / "gone")
    (root / "data/tokenizers/t_260_bpe.model").write_bytes(b"another")
    assert "another tokenizer has this name" in refused(run(*options, code=2))


def test_two_at_once(corpus, tmp_path):
    (tmp_path / "data/datasets/.spool_t_sp300").mkdir(parents=True)
    with filelock.FileLock(tmp_path / "data/datasets/.spool_t_sp300/lock"):
        said = run("text", corpus, "--name", "t", "--vocab-size", 300, "--root", tmp_path, code=2)
    assert "another python -m data prepare is at work" in refused(said)


# --- output that nobody reads ----------------------------------------------------------------------------


@pytest.mark.slow
def test_closed_and_broken_output(tmp_path):
    """No traceback, no broken file; in the C locale too."""
    (tmp_path / "ü.txt").write_text("one\n\ntwo\n")
    options = ["text", tmp_path / "ü.txt", "--separator", "", "--vocab-size", 260, "--root", tmp_path]
    options += ["--name"]
    closed = start("data", "prepare", *options, "a", stdout=None, preexec_fn=lambda: os.close(1))
    broken = start("data", "prepare", *options, "b")
    broken.stdout.close()
    plain = start("data", "prepare", *options, "c", env={"LC_ALL": "C", "PYTHONUTF8": "0"})
    wrong = start("data", "prepare", *options, "é", env={"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert closed.communicate()[1] == ""
    assert closed.returncode == 0
    assert broken.stderr.read() == ""
    assert broken.wait() == 141
    assert "error" not in plain.communicate()[1]
    assert plain.returncode == 0
    assert "--name is" in refused(wrong.communicate()[1])
    assert read_all(tmp_path / "data/datasets/a_sp260") == read_all(tmp_path / "data/datasets/c_sp260")


# --- killed, stopped, out of space: a second run gives the same bytes ------------------------------------

MOMENTS = ["plan.json", "documents", "tokenizer.model", "dataset/t_val_*", "dataset/t_train_*3.bin"]


@pytest.mark.slow
def test_kill_9_at_many_moments(tmp_path):
    """Killed soon after each of the steps has begun, a run makes the same bytes in the end."""
    corpus = write_jsonl(tmp_path / "texts.jsonl", documents(500))
    options = ["text", corpus, "--name", "t", "--vocab-size", 400, "--shard-tokens", 5_000, "--val-docs", 40]
    run(*options, "--root", tmp_path / "undisturbed")
    expected = tree(tmp_path / "undisturbed")
    rng = random.Random(20)
    for attempt in range(2):
        root = tmp_path / f"killed{attempt}"
        for moment in MOMENTS:
            process = start("data", "prepare", *options, "--root", root)
            while not list(root.glob(f"data/datasets/.spool_t_sp400/{moment}")) and process.poll() is None:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            process.communicate()
            left = tree(root)
            if (root / "data/datasets/t_sp400").exists():
                assert left.items() >= expected.items()
        run(*options, "--root", root)
        assert tree(root) == expected


def test_second_run_continues(corpus, tmp_path, monkeypatch):
    """What is whole is not made again: the spool, the tokenizer, and the shards."""
    options = ["text", corpus, "--name", "t", "--vocab-size", 300, "--shard-tokens", 10_000, "--root"]

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "seal", stop)
    assert "continues" in run(*options, tmp_path / "cut", code=16)
    monkeypatch.undo()
    written = sorted(tmp_path.glob("cut/data/datasets/.spool_t_sp300/dataset/t_train_*.bin"))
    assert len(written) > 3
    written[-1].unlink()
    encoded = []

    def batches(*args, real=encode.batches):
        for batch in real(*args):
            encoded.extend(batch)
            yield batch

    monkeypatch.setattr(encode, "batches", batches)
    monkeypatch.setattr(prepare, "spool", None)
    monkeypatch.setattr(prepare, "train_tokenizer", None)
    run(*options, tmp_path / "cut")
    monkeypatch.undo()
    last = tmp_path / "cut/data/datasets/t_sp300" / written[-1].name
    assert len(encoded) == shards.read_header(last).documents
    run(*options, tmp_path / "plain")
    assert tree(tmp_path / "cut") == tree(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal(corpus, tmp_path, number):
    options = ["text", corpus, "--name", "t", "--vocab-size", 400, "--root"]
    process = start("data", "prepare", *options, tmp_path / "cut")
    while not list(tmp_path.glob("cut/data/datasets/.spool*/plan.json")) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    assert "continues" in process.communicate()[1]
    assert process.returncode == 16
    run(*options, tmp_path / "cut")
    run(*options, tmp_path / "plain")
    assert tree(tmp_path / "cut") == tree(tmp_path / "plain")


@pytest.mark.slow
def test_no_space_left(corpus, tmp_path):
    """A limit on the size of files stands in for a full disk: the same errors come from the same places."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    options = ["text", corpus, "--name", "t", "--vocab-size", 300, "--root", tmp_path / "full"]
    full = start("data", "prepare", *options, preexec_fn=limit, stdout=subprocess.DEVNULL)
    line = refused(full.communicate()[1])
    assert full.returncode == 3
    assert "File too large" in line
    assert "run the same command again" in line
    assert not (tmp_path / "full/data/datasets/t_sp300").exists()
    run(*options)
    run(*options[:-1], tmp_path / "plain")
    assert tree(tmp_path / "full") == tree(tmp_path / "plain")


# --- the demo corpus -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_demo(tmp_path):
    """Vocabularies of one split; no document decides the score."""
    digests = {}
    for split in ("val", "second", "train"):
        digests[split] = [sha(text) for _, text in corpora.demo_documents(split)]
    for vocab in (1024, 260):
        options = [] if vocab == 1024 else ["--vocab-size", vocab]
        assert start("data", "prepare", "demo", *options, "--root", tmp_path, cwd="/").wait() == 0
        folder = tmp_path / f"data/datasets/demo_sp{vocab}"
        names = ["demo_train_000000.bin", "demo_val_000000.bin", "manifest.json"]
        assert sorted(p.name for p in folder.iterdir()) == names
        assert (tmp_path / f"data/tokenizers/demo_{vocab}_bpe.model").exists()
        for split in ("val", "train"):
            assert [sha(text) for text in read_split(folder, split)[0]] == digests[split]
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["second_sha256"] == sha(b"".join(digests["second"])).hex()
    (val,) = (entry for entry in manifest["files"] if entry["split"] == "val")
    assert val["documents"] >= 200
    assert val["bytes"] >= 1_500_000
    assert val["tokens"] == val["documents"] + val["bytes"], "byte level"
    assert manifest["validation"]["largest_document"] < 0.025
    second = corpora.demo_documents("second")
    assert len(second) >= 50
    assert max(len(text) for _, text in second) <= 32_768
    names = [name for name, _ in second + corpora.demo_documents("val")]
    assert not [name for name in names if re.match(sources.TRAIN_NAMES, name)], "what records import"
    everything = digests["val"] + digests["second"] + digests["train"]
    assert len(everything) == len(set(everything))
    assert sha(b"".join(sorted(everything))).hex() == sources.DEMO_SHA256


def may_be_validated(name: str, text: bytes) -> bool:
    """The demo's rule, written down a second time."""
    return len(text) <= 32_768 and not re.match(sources.TRAIN_NAMES, name)


@pytest.mark.slow
def test_development_text_is_cut_from_the_demos_training_documents(tmp_path):
    """The 200 smallest keys of the documents that could have been validated; nothing of val and second."""
    model = encode.train_tokenizer([b"def f(x):\n"], corpora.Plan("demo", vocab_size=260))
    (tmp_path / "data/tokenizers").mkdir(parents=True)
    (tmp_path / "data/tokenizers/demo_260_bpe.model").write_bytes(model)
    for _ in range(2):  # the second time all is there, and is found to be the same
        made = start("data", "prepare", "development", "--vocab-size", 260, "--root", tmp_path)
        assert made.wait() == 0, made.stderr.read()
    folder = tmp_path / "data/datasets/development_sp260"
    val, train = (read_split(folder, split)[0] for split in ("val", "train"))
    documents = corpora.demo_documents("train")
    eligible = [text for name, text in documents if may_be_validated(name, text)]
    assert val == sorted(sorted(eligible, key=lambda text: sha(text)[8:16])[:200], key=sha)
    assert sorted(map(sha, val + train)) == [sha(text) for _, text in documents]
    assert 1_500_000 < sum(map(len, val)) < 2_000_000
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tokenizer"]["sha256"] == sha(model).hex()
    assert manifest["validation"]["largest_document"] < 0.025
    kept_out = corpora.demo_documents("val") + corpora.demo_documents("second")
    assert not {sha(text) for _, text in kept_out} & set(map(sha, val + train))


def test_development_needs_the_demos_tokenizer(tmp_path):
    line = refused(run("development", "--vocab-size", 300, "--root", tmp_path, code=3))
    assert f"python -m data prepare demo --vocab-size 300 --root {tmp_path} makes it" in line


def make_package(folder: Path, source: bytes) -> None:
    """An installed distribution, as pip leaves it."""
    (folder / "pkg/__pycache__").mkdir(parents=True)
    (folder / "pkg/a.py").write_bytes(source)
    (folder / "pkg/__pycache__/a.pyc").write_bytes(b"bytecode")
    info = folder / "pkg-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n")
    digest = base64.urlsafe_b64encode(sha(source)).rstrip(b"=").decode()
    info.joinpath("RECORD").write_text(
        f"pkg/a.py,sha256={digest},{len(source)}\npkg/__pycache__/a.pyc,,\n"
        "../../bin/tool.py,sha256=xxx,3\nsingle.py,sha256=xxx,3\n"
    )


def test_demo_sources_are_checked(tmp_path, monkeypatch):
    make_package(tmp_path / "site", b"print()\n")
    (tmp_path / "requirements.txt").write_text("pkg==1.0\nabsent==2.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sources, "REPO", tmp_path)
    monkeypatch.setattr(sources, "DEMO_PACKAGES", ["pkg"])
    assert list(sources.demo_sources()) == [("pkg/a.py", b"print()\n")]
    (tmp_path / "site/pkg/a.py").unlink()
    with pytest.raises(shards.DataError, match=r"pkg/a\.py: cannot be read.*pip install"):
        list(sources.demo_sources())
    (tmp_path / "requirements.txt").write_text("pkg==1.1\nabsent==2.0\n")
    with pytest.raises(shards.DataError, match=r"version 1\.0 is installed, expected 1\.1: pip install"):
        list(sources.demo_sources())
    monkeypatch.setattr(sources, "DEMO_PACKAGES", ["absent"])
    with pytest.raises(shards.DataError, match=r"absent: not installed.*pip install"):
        list(sources.demo_sources())


def test_a_changed_demo_corpus_is_refused(tmp_path, monkeypatch):
    for module in (corpora, prepare):
        monkeypatch.setattr(module, "demo_sources", lambda: iter([(name, name.encode()) for name in "abc"]))
    with pytest.raises(shards.DataError, match=r"the corpus has sha256 .*: pip install --force-reinstall"):
        corpora.demo_documents("second")
    assert "pip install --force-reinstall" in refused(run("demo", "--root", tmp_path, code=3))
    assert not list((tmp_path / "data").iterdir())
