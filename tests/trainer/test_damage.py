"""Damaged shards and tokenizers, and such as do not belong together: each refused in one line, exit 3."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from tests.kit import helpers
from tests.kit.helpers import TinyCorpus, flip, patch, put

VAL, VAL1 = "tiny_val_000000.bin", "tiny_val_000001.bin"
FIRST, TRAIN, LAST = (f"tiny_train_00000{index}.bin" for index in range(3))
OTHER = bytes(range(32))


@pytest.fixture
def broken(tmp_path, corpus) -> TinyCorpus:
    """A copy of the corpus that a test may damage."""
    shutil.copytree(corpus.data_path, tmp_path / "data")
    shutil.copy(corpus.tokenizer_path, tmp_path / "tiny.model")
    return TinyCorpus(tmp_path / "data", tmp_path / "tiny.model", corpus.tokens, corpus.texts)


def make_legacy(*paths: Path) -> None:
    """As other projects write a shard: three ints, zeros, tokens."""
    for path in paths:
        patch(path, 12, bytes(1012))


def legacy_with(token: int, name: str, at: int, folder: Path) -> None:
    """Legacy shards with a token at a byte of one."""
    make_legacy(*folder.glob("*.bin"))
    patch(folder / name, at, token.to_bytes(2, "little"))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


NO_TOKENS = helpers.header(np.zeros(0, np.uint16))

# damage: (what to do to the folder, the file that is named or "" for the folder, words of the line)
SHARDS = {
    "truncated": (lambda d: os.truncate(d / VAL, 1026), VAL, "file size is .* expected"),
    "another magic": (lambda d: put(d / VAL, 0, 9), VAL, r"is \(9, 1\), expected \(20240520, 1\)"),
    "another version": (lambda d: put(d / TRAIN, 1, 2), TRAIN, r"version is \(20240520, 2\), expected"),
    "another extension": (lambda d: put(d / TRAIN, 3, 0x31464C48), TRAIN, "extension is .*, expected"),
    "header only, no tokens": (lambda d: (d / VAL).write_bytes(NO_TOKENS), VAL, "expected"),
    "half a header": (lambda d: os.truncate(d / VAL, 512), VAL, "file size is 512, expected"),
    "empty file": (lambda d: os.truncate(d / TRAIN, 0), TRAIN, "magic.* is .* expected"),
    "negative token count": (lambda d: put(d / TRAIN, 2, -5), TRAIN, "expected"),
    "huge token count": (lambda d: put(d / VAL, 2, 2**31 - 1), VAL, "file size is .*, expected"),
    "another tokenizer": (lambda d: patch(d / TRAIN, 64, OTHER), TRAIN, "tokenizer is 0001.*expected"),
    "a flipped token": (lambda d: flip(d / VAL, 1024), VAL, "crc32 .*expected"),
    "count wrong": (lambda d: put(d / VAL, 13, 7), VAL, "shards is 2, expected 7"),
    "train labelled val": (lambda d: put(d / TRAIN, 14, 0), TRAIN, r"is \(1, 0\), expected \(1, True\)"),
    "val labelled train": (lambda d: put(d / VAL, 14, 1), VAL, r"is \(0, 1\), expected \(0, False\)"),
    "a middle shard missing": (lambda d: remove(d / TRAIN), "", f"missing one is .*{LAST}"),
    "the first shard missing": (lambda d: remove(d / FIRST), TRAIN, r"is \(1, 1\), expected \(0, True\)"),
    "the last of validation missing": (lambda d: remove(d / VAL1), VAL, "shards is 1, expected 2"),
    "two sets": (
        lambda d: shutil.copy(d / TRAIN, d / "z_train_0.bin"),
        "",
        "another dataset.* is .*z_train_0",
    ),
    "two of one number": (lambda d: shutil.copy(d / TRAIN, d / "tiny_train_1.bin"), "", "one number"),
    "mixed legacy and extended": (lambda d: make_legacy(d / TRAIN), TRAIN, "extension is 0, expected 8266"),
    "byte total wrong": (lambda d: put(d / VAL, 9, 12345), "", r"byte.* is \d+, expected \d+"),
    "legacy, last token too high": (lambda d: legacy_with(65535, VAL, -2, d), VAL, "65535.*expected"),
    "legacy, a token too high": (lambda d: legacy_with(400, TRAIN, 1038, d), TRAIN, "is 400, expected 399"),
    "a folder named like a shard": (lambda d: make_folder(d / TRAIN), TRAIN, "[Dd]irectory"),
    "no training": (lambda d: remove(*d.glob("*_train_*")), "", r"no <set>_train_<number>\.bin; .* prepare"),
}


def loaded(corpus: TinyCorpus, **env) -> train_gpt.Corpus:
    s = train_gpt.load_settings(corpus.env(**env), "smoke")[0]
    return train_gpt.load_corpus(s, train_gpt.Machine(torch.device("cpu")))


def refusal(broken: TinyCorpus, **env) -> str:
    """The one line that refuses the corpus."""
    with pytest.raises(train_gpt.DataError) as caught:
        loaded(broken, **env)
    line = str(caught.value)
    assert "\n" not in line
    return line


# Each line says how to go on: a command, settings, or, where only their origin can help, what to do.
HELP = r"python -m data (verify|prepare|download)|see (VOCAB_SIZE|DATA_PATH)|(make|move) or fetch|there are"


@pytest.mark.parametrize("kind", SHARDS)
def test_a_damaged_or_foreign_shard_is_refused_by_name_with_help(broken, kind):
    damage, named, words = SHARDS[kind]
    damage(broken.data_path)
    line = refusal(broken)
    assert str(broken.data_path / named) in line and re.search(words, line) and re.search(HELP, line), line


def test_a_data_path_without_shards_names_the_datasets_of_this_folder(broken, tmp_path, monkeypatch):
    here = tmp_path / "here/data/datasets"
    here.mkdir(parents=True)
    broken.data_path.rename(here / "poems")
    monkeypatch.chdir(tmp_path / "here")
    assert "there are data/datasets/poems;" in refusal(broken)


def test_a_shard_that_shrinks_under_the_run_is_refused_not_a_crash(broken):
    """Reading a memory map past the end of its file would end the process by SIGBUS."""
    train = loaded(broken).train
    train.read(0, 10)
    os.truncate(broken.data_path / FIRST, 2000)
    with pytest.raises(train_gpt.DataError, match=f"{FIRST}: .* expected .*cut"):
        train.read(600, 10)


# --- tokenizers -------------------------------------------------------------------------------------------


TOKENIZERS = {
    "missing": (lambda c: c.tokenizer_path.unlink(), {}, "No such file"),
    "a folder": (lambda c: make_folder(c.tokenizer_path), {}, "[Dd]irectory"),
    "empty": (lambda c: c.tokenizer_path.write_bytes(b""), {}, "SentencePiece|is 0, expected 400"),
    "noise": (lambda c: c.tokenizer_path.write_bytes(b"\x00\xff{}" * 99), {}, "SentencePiece"),
    "cut short": (lambda c: c.tokenizer_path.write_bytes(c.tokenizer_path.read_bytes()[:3000]), {}, ""),
    "of another size": (lambda c: None, {"VOCAB_SIZE": 1024}, "400, expected 1024"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_that_is_none_or_of_another_size_is_refused(broken, kind):
    damage, env, words = TOKENIZERS[kind]
    damage(broken)
    line = refusal(broken, **env)
    assert str(broken.tokenizer_path) in line and re.search(words, line), line


def test_legacy_shards_are_taken_whatever_their_first_number_and_the_log_says_so(tmp_path, tokenizer_path):
    """llm.c and modded-nanogpt number from 0 or, where 0 is validation, training from 1."""
    made = helpers.make_corpus(tmp_path, tokenizer_path, extended=False, train_shards=1)
    (tmp_path / FIRST).rename(tmp_path / TRAIN)
    found = loaded(made)
    assert np.array_equal(found.val_tokens, made.tokens["val"])
    assert np.array_equal(found.train.read(0, found.train.total), made.tokens["train"])
    assert found.bytes_per_token.sum() == made.val_bytes()
    assert "legacy shards" in " ".join(found.notes)


# --- through the script -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_ends_with_exit_3_and_one_line_before_the_run_has_a_folder(broken, tmp_path):
    """Damage behind the headers of the training data is found before anything is made."""
    for path in broken.data_path.glob("*_train_*"):
        flip(path, -1)
    run = helpers.run_here(train_gpt.main, tmp_path / "cwd", broken.env(RUN_ID="damaged"))
    assert (run.code, run.out) == (3, "")
    assert run.err.startswith(f"train_gpt.py: {broken.data_path}") and run.err.count("\n") == 1
    assert not (tmp_path / "cwd/logs").exists()
