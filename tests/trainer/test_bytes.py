"""What each token is worth: over a document its UTF-8 length, for any kind of SentencePiece model."""

import random

import numpy as np
import pytest
import sentencepiece

import train_gpt
from tests.kit import helpers
from tests.trainer.test_damage import loaded

COUNT = 3000
SPACE_MARK = "\u2581"  # SentencePiece's own sign for a space: no identity normaliser gives it back
ALPHABET = sorted(set("".join(helpers.SENTENCES)) | set(" \n\t"))
USER_SYMBOLS = [text.replace(" ", SPACE_MARK) for text in ["<a>", "  x ", "x", "    ", "\n", "é"]]
SPACE_PIECES = {"allow_whitespace_only_pieces": True, "user_defined_symbols": USER_SYMBOLS}
COVERED = {"byte_fallback": False, "character_coverage": 1.0}


def random_character(rng: random.Random) -> str:
    """Any code point that UTF-8 can write, the usual ones more often."""
    ranges = [(32, 127)] * 3 + [(9, 11), (1, 0x3000), (0x3000, 0xD800), (0xE000, 0x110000)]
    made = chr(rng.randrange(*rng.choice(ranges)))
    return made if made != SPACE_MARK else " "


def random_documents(seed: int, character=random_character) -> list[str]:
    """Random characters before, inside or instead of words; runs of spaces at both ends; empty documents."""
    rng, made = random.Random(seed), []
    for words in helpers.documents(COUNT, seed):
        noise = "".join(character(rng) for _ in range(rng.randrange(25)))
        cut = rng.randrange(len(words) + 1)
        made.append(" " * rng.choice([0, 0, 1, 2, 5]) + words[:cut] + noise + " " * rng.choice([0, 0, 1, 3]))
    return made + ["", " ", "  ", "\n", "x", "  x ", "    "]


@pytest.fixture(scope="module")
def any_text():
    return random_documents(5) + ["<a>", " <a>x <a>", "x<a>  x    é"]


@pytest.fixture(scope="module")
def covered_text():
    """Only characters that a model without byte fallback has seen."""
    return random_documents(6, lambda rng: rng.choice(ALPHABET))


def worth(path, texts: list[str], closing: tuple[int, ...] = ()) -> tuple[list[int], list[int]]:
    """Bytes of each document by the trainer's count, and by the tokenizer's own decoding."""
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = tokenizer.encode(texts)
    stream = np.array([i for document in ids for i in [helpers.BOS, *document, *closing]], np.uint16)
    per_token = train_gpt.bytes_of_tokens(tokenizer, stream)
    assert len(per_token) == len(stream) and per_token.min() >= 0
    per_document = np.add.reduceat(per_token, np.flatnonzero(stream == helpers.BOS))
    return per_document.tolist(), [len(text.encode()) for text in tokenizer.decode(ids)]


LOSSLESS = {
    "bpe, bytes": {},
    "bpe, bytes, dummy prefix": {"add_dummy_prefix": True},
    "bpe, bytes, dummy prefix, white space pieces, user symbols": {"add_dummy_prefix": True, **SPACE_PIECES},
    "bpe, bytes, pieces across spaces, user symbols": {"split_by_whitespace": False, **SPACE_PIECES},
    "bpe, bytes, spaces as suffix": {"treat_whitespace_as_suffix": True},
    "unigram, bytes, white space pieces": {"model_type": "unigram", **SPACE_PIECES},
    "unigram, covered, dummy prefix": {"model_type": "unigram", "add_dummy_prefix": True, **COVERED},
    "characters, covered, dummy prefix": {"model_type": "char", "add_dummy_prefix": True, **COVERED},
    "bpe, covered": COVERED,
}


@pytest.mark.parametrize("kind", LOSSLESS)
def test_bytes_of_documents_are_exact_for_any_kind_of_tokenizer(tmp_path, any_text, covered_text, kind):
    # a model that covers all characters must have seen all of them
    seen = helpers.documents(1000, 7) + ALPHABET
    path = helpers.train_tokenizer(tmp_path / "x.model", seen, **LOSSLESS[kind])
    texts = covered_text if "covered" in kind else any_text
    true = [len(text.encode()) for text in texts]
    for closing in ((), (2,)):  # documents with and without an end mark
        found, decoded = worth(path, texts, closing)
        assert decoded == true, "this kind of tokenizer should give every text back"
        wrong = [(text, got) for text, got, want in zip(texts, found, true) if got != want]
        assert not wrong, wrong[:3]


NFKC = {"normalization_rule_name": "nmt_nfkc", "add_dummy_prefix": True, "remove_extra_whitespaces": True}
FOLDED = {"normalization_rule_name": "nfkc_cf", "model_type": "unigram"}
SUFFIX = {"treat_whitespace_as_suffix": True, "add_dummy_prefix": True}


@pytest.mark.parametrize("options", [NFKC, FOLDED, SUFFIX], ids=["nfkc", "folded", "dummy suffix"])
def test_bytes_of_a_lossy_tokenizer_are_those_of_its_own_decoding(tmp_path, any_text, options):
    """Texts do not come back whole: what counts then is what the tokens decode to."""
    path = helpers.train_tokenizer(tmp_path / "x.model", helpers.documents(1000, 7), **options)
    texts = any_text[::4]
    found, decoded = worth(path, texts)
    assert found == decoded and decoded != [len(text.encode()) for text in texts]


def test_unknown_tokens_of_a_legacy_shard_count_nothing(tmp_path):
    path = helpers.train_tokenizer(tmp_path / "x.model", ["ab ba aab bba "] * 50, vocab_size=12, **COVERED)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = np.array([1, *tokenizer.encode("ab ☃ ba")], np.uint16)
    assert (ids == tokenizer.unk_id()).sum() == 1
    for split in ("train", "val"):
        helpers.write_shards(tmp_path / "data", split, [ids], extended=False)
    found = loaded(helpers.TinyCorpus(tmp_path / "data", path, {}, {}), VOCAB_SIZE=len(tokenizer))
    assert found.bytes_per_token.sum() == len("ab  ba")


@pytest.mark.parametrize("change", [-300, -1, 1, 5000])
def test_a_lossy_tokenizer_is_scored_on_the_bytes_of_the_text(tmp_path, tokenizer_path, change):
    """Flag 1 of the header: the tokens do not give the text back, its true size stands in the header."""
    corpus = helpers.make_corpus(tmp_path, tokenizer_path, flags=1)
    size = corpus.val_bytes() + change
    for path in tmp_path.glob("*_val_*"):
        path.unlink()
    about = {"vocabulary": 400, "flags": 1, "tokenizer": helpers.sha256(tokenizer_path)}
    helpers.write_shards(tmp_path, "val", [corpus.tokens["val"]], text_bytes=[size], **about)
    found = loaded(corpus)
    assert found.bytes_per_token.sum() == size and found.bytes_per_token.min() >= 0
    assert any("lossy" in note for note in found.notes)
