"""data/prepare.py as people run it: real processes, real files, text read back from the shards.

The reader in this file is written against the format's table in data/README.md, not against data/shards.py.
"""
import base64
import gzip
import hashlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece

DATA = Path(__file__).resolve().parent.parent / "data"
sys.path.insert(0, str(DATA))
import prepare  # noqa: E402
import shards  # noqa: E402

# --------------------------------------------------------------------------------------------------
# helpers
# --------------------------------------------------------------------------------------------------

SCRIPTS = [
    "the quick brown fox jumps over the lazy dogs", "Το γρήγορο καφέ αλεπού πηδά πάνω από το σκυλί",
    "Быстрая коричневая лиса прыгает через собаку", "الثعلب البني السريع يقفز فوق الكلب الكسول",
    "השועל החום המהיר קופץ מעל הכלב העצלן", "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है",
    "สุนัข จิ้งจอก สีน้ำตาล กระโดด ข้าม สุนัข ขี้เกียจ", "敏捷 的 棕色 狐狸 跳过 懒狗 天地 玄黄 宇宙 洪荒",
    "すばやい ちゃいろの きつねは のろまな いぬを",
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다", "სწრაფი ყავისფერი მელა ზარმაც ძაღლს ახტება",
    "விரைவான பழுப்பு நரி சோம்பேறி நாயைத்", "👩‍👩‍👧‍👦 🇩🇪 🦊 🏳️‍🌈 ✨ 👍🏽"]
ODD = ["a\0b", "\0", "\r\n", "one\r\ntwo\r\n", "\t\tx\n", " ", "   lead", "trail   ", "\n\n\n", "\ufeffbom",
       "e\u0301 \u00e9 \ufb01 \u00a0 \u2028 \u200b \x0b \x0c", "x" * 70_000, "日" * 30_000, " " * 5_000,
       "\r\n" * 3_000, "y\n" * 9_000, "<s></s><unk><0x41>", "\U0010ffff \uffff \ue000", "\u2585 block"]


def documents(count: int = 260, seed: int = 1) -> list[str]:
    """Documents in twelve scripts and emoji, with all kinds of white space, and the odd ones."""
    rng = random.Random(seed)
    made = list(ODD)
    for i in range(count):
        words = SCRIPTS[i % len(SCRIPTS)].split(" ")
        text = "".join(rng.choice(words) + rng.choice([" ", " ", " ", "  ", "\n", "\n    ", ", ", ""])
                       for _ in range(rng.randint(1, 150)))
        made.append(text)
    return made


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run(*args, code: int = 0, **options) -> str:
    """Run data/prepare.py; its output, after its exit code was checked."""
    result = subprocess.run([sys.executable, DATA / "prepare.py", *map(str, args)], text=True, timeout=300,
                            capture_output=True, **options)
    assert result.returncode == code, result.stdout + result.stderr
    if code:
        lines = result.stderr.strip().splitlines()
        assert lines[-1].startswith(("error: ", "usage: ", "prepare.py", "stopped")), result.stderr
        assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def read_split(folder: Path, split: str) -> tuple[list[bytes], list[np.ndarray]]:
    """(texts, int32 headers) of a split, decoded by SentencePiece; the format told once more."""
    manifest = json.loads((folder / "manifest.json").read_text())
    sp = sentencepiece.SentencePieceProcessor(model_file=str(folder / manifest["tokenizer"]["file"]))
    texts, headers = [], []
    for path in sorted(folder.glob(f"*_{split}_*.bin")):
        raw = path.read_bytes()
        headers.append(np.frombuffer(raw[:1024], "<i4"))
        tokens = np.frombuffer(raw[1024:], "<u2")
        assert headers[-1][2] == len(tokens) and tokens[0] == 1
        for document in np.split(tokens, np.flatnonzero(tokens == 1)[1:]):
            texts.append(sp.decode(document.tolist()).encode())
    return texts, headers


def tree(root: Path) -> dict[str, bytes]:
    """Everything that a run left under root/data."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def sha(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def side(text: bytes, fraction: float) -> str:
    """The split rule, told once more."""
    return "val" if int.from_bytes(sha(text)[8:16]) < int(fraction * 2**64) else "train"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "texts.jsonl", documents())


# --------------------------------------------------------------------------------------------------
# text in, the same text out
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab, model_type", [(260, "bpe"), (261, "bpe"), (300, "bpe"), (600, "bpe"),
                                               (600, "unigram")])
def test_every_document_comes_back(corpus, tmp_path, vocab, model_type):
    run("text", corpus, "--name", "t", "--vocab-size", vocab, "--model-type", model_type, "--root", tmp_path,
        "--val-fraction", 0.2, "--shard-tokens", 60_000)
    folder = tmp_path / f"data/datasets/t_sp{vocab}"
    expected = {text.encode() for text in documents() if text}
    found = {}
    for number, split in enumerate(("val", "train")):
        texts, headers = read_split(folder, split)
        assert {side(text, 0.2) for text in texts} == {split}
        assert [sha(t) for t in texts] == sorted(sha(t) for t in texts), "order is by hash"
        found[split] = texts
        assert [h[12] for h in headers] == list(range(len(headers)))
        for h in headers:
            assert list(h[[0, 1, 3, 4, 5, 6, 13, 14, 15]]) == [
                20240520, 1, 0x31464C47, 1, vocab, 1, len(headers), number, 0]
        sizes = [int(h[9:11].view("<u8")[0]) for h in headers]
        assert sum(sizes) == sum(map(len, texts)) and sum(int(h[7]) for h in headers) == len(texts)
    assert len(headers) > 1
    assert sorted(found["val"] + found["train"]) == sorted(expected)
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
        assert raw[64:96].hex() == tokenizer and raw[96:128].hex() == everything


def test_formats_order_and_duplicates_do_not_matter(corpus, tmp_path):
    texts = [text for text in documents() if text]
    mixed = tmp_path / "mixed" / "inner"
    mixed.mkdir(parents=True)
    shuffled = texts[::-1]
    for i, text in enumerate(shuffled[:60]):
        (mixed / f"{i}.TXT").write_bytes(text.encode())
    write_jsonl(mixed / "a.jsonl", shuffled[50:120] + [""])
    with gzip.open(mixed / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n\n" for text in shuffled[100:200])
    table = pyarrow.table({"n": range(len(shuffled) - 200 + 1), "text": [*shuffled[200:], None]})
    pyarrow.parquet.write_table(table, mixed / "c.parquet", row_group_size=7)
    (mixed / "ignored.md").write_text("not a text file of ours")
    options = ["--name", "t", "--vocab-size", 400, "--val-fraction", 0.1]
    run("text", corpus, *options, "--root", tmp_path / "one", "--workers", 1)
    said = run("text", mixed.parent, *options, "--root", tmp_path / "two", "--workers", 3)
    assert "dropped: 30 exact duplicates, 2 empty documents" in said
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == ["data/datasets/t_sp400/manifest.json"]
    manifests = [json.loads(t["data/datasets/t_sp400/manifest.json"]) for t in (one, two)]
    assert manifests[0] | {"dropped": 0} == manifests[1] | {"dropped": 0}


def test_same_bytes_again_and_on_one_core(corpus, tmp_path):
    options = ["text", corpus, "--name", "t", "--vocab-size", 500]
    for name in ("one", "two"):
        run(*options, "--root", tmp_path / name)
    core = {min(os.sched_getaffinity(0))}
    run(*options, "--root", tmp_path / "core", preexec_fn=lambda: os.sched_setaffinity(0, core))
    assert tree(tmp_path / "one") == tree(tmp_path / "two") == tree(tmp_path / "core")


def test_text_files_split_at_a_separator(tmp_path):
    file = tmp_path / "all.txt"
    file.write_bytes(b"first\r\nline two\n<|end|>\r\n<|end|>\nsecond <|end|>\n<|end|>\nthird\xc3\xa9")
    run("text", file, "--name", "t", "--vocab-size", 260, "--separator", "<|end|>", "--root", tmp_path,
        "--val-docs", 1)
    folder = tmp_path / "data/datasets/t_sp260"
    texts = read_split(folder, "val")[0] + read_split(folder, "train")[0]
    assert sorted(texts) == [b"first\r\nline two\n", b"second <|end|>\n", b"third\xc3\xa9"]
    file.write_bytes(b"one\n\ntwo\n\n\n\nthree\n")
    run("text", file, "--name", "u", "--vocab-size", 260, "--separator", "", "--root", tmp_path)
    folder = tmp_path / "data/datasets/u_sp260"
    texts = read_split(folder, "val")[0] + read_split(folder, "train")[0]
    assert sorted(texts) == [b"one\n", b"three\n", b"two\n"]


def test_val_docs_and_the_side_of_a_text(corpus, tmp_path):
    run("text", corpus, "--name", "t", "--vocab-size", 300, "--val-docs", 17, "--root", tmp_path)
    val = read_split(tmp_path / "data/datasets/t_sp300", "val")[0]
    ranked = sorted({t.encode() for t in documents() if t}, key=lambda t: sha(t)[8:16])
    assert sorted(val) == sorted(ranked[:17])


def test_tokenizer_never_sees_validation_text(tmp_path):
    """Other validation documents, the same training documents: the same tokenizer."""
    texts = [text for text in documents() if text]
    train = [text for text in texts if side(text.encode(), 0.1) == "train"]
    extra = ("zq" * 50 + str(n) for n in itertools.count())
    other = list(itertools.islice((t for t in extra if side(t.encode(), 0.1) == "val"), 40))
    models = []
    for name, lines in (("one", texts), ("two", train + other)):
        file = write_jsonl(tmp_path / f"{name}.jsonl", lines)
        run("text", file, "--name", "t", "--vocab-size", 400, "--val-fraction", 0.1, "--root",
            tmp_path / name)
        models.append((tmp_path / name / "data/tokenizers/t_400_bpe.model").read_bytes())
    assert models[0] == models[1]


# --------------------------------------------------------------------------------------------------
# lossless or refused
# --------------------------------------------------------------------------------------------------


def train_model(path: Path, texts: list[str], **options) -> Path:
    """A tokenizer of another project."""
    settings = dict(vocab_size=400, model_type="bpe", byte_fallback=True, minloglevel=3) | options
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=file, **settings)
    return path


def test_space_mark_is_refused_with_its_place(tmp_path):
    file = write_jsonl(tmp_path / "t.jsonl", ["plain one", "plain two", "plain three", "é then \u2581 mark"])
    for docs in (1, 3):                           # whether it is validation or training text
        said = run("text", file, "--name", "t", "--vocab-size", 260, "--root", tmp_path, "--val-docs", docs,
                   code=3)
        assert "t.jsonl:4: the tokenizer is not lossless: byte 8 of the document" in said
        assert "--lossy-ok" in said
        assert not list((tmp_path / "data").iterdir())
    said = run("text", file, "--name", "t", "--vocab-size", 260, "--root", tmp_path, "--lossy-ok")
    assert "LOSSY" in said
    folder = tmp_path / "data/datasets/t_sp260"
    assert json.loads((folder / "manifest.json").read_text())["lossy"]
    flags = [h[15] for split in ("val", "train") for h in read_split(folder, split)[1]]
    sizes = [h[9] for split in ("val", "train") for h in read_split(folder, split)[1]]
    assert flags == [1, 1] and sum(sizes) == 9 + 9 + 11 + len("é then \u2581 mark".encode())


def test_other_tokenizers(corpus, tmp_path):
    texts = [f"{a} {b}" for a in SCRIPTS for b in SCRIPTS]
    plain = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    prefix = train_model(tmp_path / "prefix.model", texts, **plain, vocab_size=700)
    run("text", corpus, "--name", "p", "--tokenizer", prefix, "--root", tmp_path, "--val-fraction", 0.2)
    folder = tmp_path / "data/datasets/p_sp700"
    texts_back = read_split(folder, "val")[0] + read_split(folder, "train")[0]
    assert set(texts_back) == {text.encode() for text in documents() if text}
    assert (tmp_path / "data/tokenizers/p_700_bpe.model").read_bytes() == prefix.read_bytes()
    squeeze = train_model(tmp_path / "squeeze.model", texts, vocab_size=700)    # nmt_nfkc, fewer spaces
    said = run("text", corpus, "--name", "q", "--tokenizer", squeeze, "--root", tmp_path, code=3)
    assert "not lossless" in said
    gaps = train_model(tmp_path / "gaps.model", texts, **plain, byte_fallback=False, character_coverage=0.98)
    said = run("text", corpus, "--name", "q", "--tokenizer", gaps, "--root", tmp_path, code=3)
    assert "not lossless" in said
    no_bos = train_model(tmp_path / "no_bos.model", texts, **plain, bos_id=-1, vocab_size=700)
    assert "BOS" in run("text", corpus, "--name", "q", "--tokenizer", no_bos, "--root", tmp_path, code=3)
    assert [p.name for p in (tmp_path / "data/datasets").iterdir()] == ["p_sp700"]


# --------------------------------------------------------------------------------------------------
# bad input
# --------------------------------------------------------------------------------------------------


def bad_files() -> dict[str, tuple[bytes, list[str]]]:
    line = b'{"text": "fine"}\n'
    whole = gzip.compress(line * 2000)
    return {
        "bytes.txt": (b"good \xff bad", ["byte 5 is 0xff"]),
        "cut.txt": ("ends in the middle of é".encode()[:-1], ["byte 22", "unexpected end"]),
        "surrogate.txt": (b"x\xed\xa0\x80", ["byte 1"]),
        "bytes.jsonl": (line + b'{"text": "a\xfe"}\n', ["bytes.jsonl:2", "byte 28 is 0xfe"]),
        "half.jsonl": (line + b'{"text": "a\\ud800b"}\n', ["half.jsonl:2", "surrogate"]),
        "broken.jsonl": (line + b'{"text": "a\n', ["broken.jsonl:2", "no JSON"]),
        "list.jsonl": (line + b'["text"]\n', ["list.jsonl:2", "holds a list"]),
        "other.jsonl": (line + b'{"body": "a"}\n', ["other.jsonl:2", "no field 'text'", "--field"]),
        "number.jsonl": (line + b'{"text": 5}\n', ["number.jsonl:2", "holds a int"]),
        "deep.jsonl": (b"[" * 100_000 + b"\n", ["deep.jsonl:1", "no JSON"]),
        "cut.jsonl.gz": (whole[:-20], ["cut.jsonl.gz"]),
        "flipped.jsonl.gz": (whole[:30] + b"\0\0\0\0" + whole[34:], ["flipped.jsonl.gz"]),
        "not.jsonl.gz": (line, ["not.jsonl.gz", "gzip"]),
        "not.parquet": (line * 10, ["not.parquet", "no parquet file"]),
        "large.txt": (b"x" * (16 * 2**20 + 1), ["large.txt", "--separator"]),
        "one.txt": (b"a single document", ["1 distinct documents", "--separator"])}


@pytest.mark.parametrize("name", bad_files())
def test_bad_files_are_named(tmp_path, name):
    content, words = bad_files()[name]
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    said = run("text", tmp_path / name, "--name", "t", "--vocab-size", 260, "--root", out, code=3)
    assert len(said.strip().splitlines()) == 1
    for word in words:
        assert word in said, said
    assert not list((tmp_path / "out/data").iterdir())


def test_bad_arguments(corpus, tmp_path):
    def refused(*args) -> str:
        return run("text", *args, "--root", tmp_path, code=2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("x")
    assert "does not exist" in refused(tmp_path / "nowhere", "--name", "t")
    assert "expected .txt, .jsonl" in refused(tmp_path / "empty", "--name", "t")
    assert "expected .txt, .jsonl" in refused(tmp_path / "notes.md", "--name", "t")
    for name in ("a/b", "", "x_val", "train_x", "..", "a b"):
        assert "--name" in refused(corpus, "--name", name)
    assert "--vocab-size is 259, expected 260" in refused(corpus, "--name", "t", "--vocab-size", 259)
    assert "expected 260" in refused(corpus, "--name", "t", "--vocab-size", 65537)
    assert "expected at most" in refused(corpus, "--name", "t", "--vocab-size", 60_000)
    assert "--val-fraction" in refused(corpus, "--name", "t", "--val-fraction", 1)
    assert "not allowed with" in refused(corpus, "--name", "t", "--val-fraction", 0.5, "--val-docs", 3)
    assert "--val-docs" in refused(corpus, "--name", "t", "--val-docs", 0)
    said = run("text", corpus, "--name", "t", "--val-docs", 100_000, "--root", tmp_path, code=3)
    assert "at least 100001" in said
    said = run("text", corpus, "--name", "t", "--val-fraction", 0.999999999, "--root", tmp_path, code=3)
    assert "smaller --val-fraction" in said
    model = train_model(tmp_path / "m.model", SCRIPTS, vocab_size=600)
    said = refused(corpus, "--name", "t", "--tokenizer", model, "--vocab-size", 300)
    assert "--vocab-size is 300, expected 600" in said
    (tmp_path / "no.model").write_bytes(b"nothing")
    assert "SentencePiece" in run("text", corpus, "--name", "t", "--tokenizer", tmp_path / "no.model",
                                  "--root", tmp_path, code=3)
    assert not list((tmp_path / "data").rglob("*.bin"))


def test_what_is_there_is_kept(corpus, tmp_path):
    options = ["text", corpus, "--name", "t", "--vocab-size", 300, "--root", tmp_path]
    run(*options)
    before = tree(tmp_path)
    assert "is whole" in run(*options)
    assert "exists and was made" in run(*options, "--val-docs", 5, code=2)
    other = write_jsonl(tmp_path / "other.jsonl", documents(seed=2))
    assert "exists and was made" in run("text", other, *options[2:], code=2)
    other.unlink()
    assert tree(tmp_path) == before
    shard = tmp_path / "data/datasets/t_sp300/t_train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert "rm -r" in run(*options, code=3)
    (tmp_path / "data/datasets/t_sp300").rename(tmp_path / "gone")
    (tmp_path / "data/tokenizers/t_300_bpe.model").write_bytes(b"another")
    assert "another tokenizer has this name" in run(*options, code=2)
    (tmp_path / "data/tokenizers/t_300_bpe.model").unlink()
    run(*options)


# --------------------------------------------------------------------------------------------------
# killed, stopped, out of space: a second run gives the same bytes
# --------------------------------------------------------------------------------------------------

KILLS = 21


def test_kill_9_at_random_moments(tmp_path):
    corpus = write_jsonl(tmp_path / "texts.jsonl", documents(500))
    options = ["text", corpus, "--name", "t", "--vocab-size", 400, "--shard-tokens", 5_000, "--val-docs", 40]
    start = time.perf_counter()
    run(*options, "--root", tmp_path / "undisturbed")
    whole_time = time.perf_counter() - start
    expected = tree(tmp_path / "undisturbed")
    rng, killed, survived, root = random.Random(20), 0, set(), None
    while killed < KILLS:
        root = root or tmp_path / f"killed{killed}"
        process = subprocess.Popen([sys.executable, DATA / "prepare.py", *map(str, options), "--root", root],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(0.2, 1) * whole_time)
            assert process.returncode == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        target = root / "data/datasets/t_sp400"
        if target.exists():                       # then it is whole
            assert {k: v for k, v in expected.items() if "datasets" in k} == tree_of(root, target)
        survived |= {path.name for path in root.glob("data/.spool*/*")}
        if killed % 3 == 0 or process.returncode == 0:
            run(*options, "--root", root)
            assert tree(root) == expected
            root = None
    assert {"documents", "dataset"} <= survived, "the kills should hit several of the five steps"


def tree_of(root: Path, folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(root).items() if str(folder.relative_to(root)) in name}


def test_second_run_continues(corpus, tmp_path, monkeypatch):
    """What is whole is not made again: the spool, the tokenizer, and the shards."""
    args = ["text", str(corpus), "--name", "t", "--vocab-size", "300", "--root", str(tmp_path),
            "--shard-tokens", "20000"]
    monkeypatch.setattr(prepare, "seal", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert prepare.main(args) == 16
    monkeypatch.undo()
    written = {p: p.stat().st_ino for p in tmp_path.glob("data/.spool_t_sp300/*/*")}
    assert len([p for p in written if p.suffix == ".bin"]) > 3
    last = sorted(tmp_path.glob("data/.spool_t_sp300/dataset/t_train_*.bin"))[-1]
    last.unlink()
    encoded = []
    monkeypatch.setattr(prepare, "encode_batch", lambda batch, *a, real=prepare.encode_batch: (
        encoded.extend(batch), real(batch, *a))[1])
    monkeypatch.setattr(prepare, "spool", None)
    monkeypatch.setattr(prepare, "train_tokenizer", None)
    assert prepare.main(args) == 0
    shard = tmp_path / "data/datasets/t_sp300" / last.name
    assert len(encoded) == shards.read_header(shard).documents
    run(*args[:-4], "--root", tmp_path / "plain", "--shard-tokens", 20000)
    plain = tree(tmp_path / "plain")
    assert {name: (tmp_path / name).read_bytes() for name in plain} == plain


def test_stopped_by_a_signal(corpus, tmp_path):
    options = ["text", corpus, "--name", "t", "--vocab-size", 400, "--root"]
    run(*options, tmp_path / "plain")
    for number in (signal.SIGTERM, signal.SIGINT):
        root = tmp_path / number.name
        process = subprocess.Popen([sys.executable, DATA / "prepare.py", *map(str, options), root],
                                   stderr=subprocess.PIPE, text=True)
        while not list(root.glob("data/.spool*/plan.json")) and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(number)
        assert "continues" in process.communicate()[1]
        assert process.returncode == 16
        run(*options, root)
        assert tree(root) == tree(tmp_path / "plain")


def test_no_space_left(corpus, tmp_path):
    """A limit on the size of files stands in for a full disk: the same errors come from the same places."""
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    options = ["text", corpus, "--name", "t", "--vocab-size", 400, "--root", tmp_path / "full"]
    said = run(*options, code=3, preexec_fn=limit)
    assert "File too large" in said and "continues" in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path / "full/data/datasets").exists()
    run(*options)
    run(*options[:-1], tmp_path / "plain")
    assert tree(tmp_path / "full") == tree(tmp_path / "plain")


def test_two_at_once(corpus, tmp_path):
    import filelock
    (tmp_path / "data/.spool_t_sp300").mkdir(parents=True)
    with filelock.FileLock(tmp_path / "data/.spool_t_sp300/lock"):
        said = run("text", corpus, "--name", "t", "--vocab-size", 300, "--root", tmp_path, code=2)
    assert "another prepare.py is at work" in said


# --------------------------------------------------------------------------------------------------
# the demo corpus
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("demo")
    start = time.perf_counter()
    run("demo", "--root", root, cwd="/")
    print(f"prepare.py demo: {time.perf_counter() - start:.1f} s")
    return root


def test_demo(demo):
    folder = demo / "data/datasets/demo_sp1024"
    names = ["demo_train_000000.bin", "demo_val_000000.bin", "manifest.json"]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert (demo / "data/tokenizers/demo_1024_bpe.model").exists()
    digests = {}
    for split in ("val", "second", "train"):
        texts = [text for _, text in prepare.demo_documents(split)]
        digests[split] = list(map(sha, texts))
        if split != "second":
            assert read_split(folder, split)[0] == texts
        if split == "val":
            assert sum(map(len, texts)) > 1_000_000
    everything = sum(digests.values(), [])
    assert len(everything) == len(set(everything))
    assert sha(b"".join(sorted(everything))).hex() == prepare.DEMO_SHA256
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["second_sha256"] == sha(b"".join(digests["second"])).hex()
    assert 0.005 < len(digests["second"]) / len(everything) < 0.015


def make_package(folder: Path, source: bytes) -> None:
    """An installed distribution, as pip leaves it."""
    (folder / "pkg/__pycache__").mkdir(parents=True)
    (folder / "pkg/a.py").write_bytes(source)
    (folder / "pkg/__pycache__/a.pyc").write_bytes(b"bytecode")
    info = folder / "pkg-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n")
    digest = base64.urlsafe_b64encode(sha(source)).rstrip(b"=").decode()
    info.joinpath("RECORD").write_text(f"pkg/a.py,sha256={digest},{len(source)}\npkg/__pycache__/a.pyc,,\n"
                                       f"../../bin/tool.py,sha256=xxx,3\nsingle.py,sha256=xxx,3\n")


def test_demo_sources_are_checked(tmp_path, monkeypatch):
    make_package(tmp_path / "site", b"print()\n")
    (tmp_path / "requirements.txt").write_text("pkg==1.0\nabsent==2.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(prepare, "REPO", tmp_path)
    monkeypatch.setattr(prepare, "DEMO_PACKAGES", ["pkg"])
    assert list(prepare.demo_sources()) == [("pkg/a.py", b"print()\n")]
    (tmp_path / "site/pkg/a.py").write_bytes(b"print(1)\n")
    with pytest.raises(shards.DataError, match=r"pkg/a\.py: sha256 is .*pip install .*pkg==1\.0"):
        list(prepare.demo_sources())
    (tmp_path / "site/pkg/a.py").unlink()
    with pytest.raises(shards.DataError, match=r"pkg/a\.py: cannot be read.*pip install"):
        list(prepare.demo_sources())
    (tmp_path / "requirements.txt").write_text("pkg==1.1\nabsent==2.0\n")
    with pytest.raises(shards.DataError, match=r"version 1\.0 is installed, expected 1\.1: pip install"):
        list(prepare.demo_sources())
    monkeypatch.setattr(prepare, "DEMO_PACKAGES", ["absent"])
    with pytest.raises(shards.DataError, match=r"absent: not installed.*pip install"):
        list(prepare.demo_sources())


def test_encoding_rate(demo):
    """At least the rate of SentencePiece's own threads on the same text, side by side; see data/README.md.

    The limit here is lower than the figure there: other programs may run beside the tests.
    """
    texts = [text for _, text in prepare.demo_documents("train")][:400]
    size = sum(map(len, texts))
    tokenizer = shards.Tokenizer(demo / "data/tokenizers/demo_1024_bpe.model")
    plain, ours = [], []
    for _ in range(3):
        start = time.perf_counter()
        tokenizer.processor.encode(texts, num_threads=2)
        plain.append(size / (time.perf_counter() - start) / 1e6)
        start = time.perf_counter()
        for document in prepare.encode(iter(("", text) for text in texts), tokenizer, 32, False, 2):
            del document
        ours.append(size / (time.perf_counter() - start) / 1e6)
    print(f"encoding: {max(ours):.1f} MB/s, SentencePiece alone {max(plain):.1f} MB/s")
    assert max(ours) > 0.7 * max(plain)
