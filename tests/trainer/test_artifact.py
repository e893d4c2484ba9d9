"""The artifact codec: what comes back, what is refused, and that other programs can read it."""

import dataclasses
import errno
import json
import math
import os
import random
import zlib
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from tests.kit import helpers
from train_gpt import DataError, decode_artifact, encode_artifact

TOKENIZER = bytes(range(32)).hex()  # its sha256
ODD_SIZES = [0.0, 1e-45, 1e-40, 1e-6, 65504.0, 1e30, 1e38]


def settings_of(vocabulary: int = 200, layers: int = 2):
    env = helpers.tiny_env(VOCAB_SIZE=vocabulary, MODEL_DIM=8, NUM_HEADS=2, NUM_KV_HEADS=1, NUM_LAYERS=layers)
    return train_gpt.load_settings(env, "smoke")[0]


def random_weights(s, seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {p.name: p.shape for p in train_gpt.parameter_table(s)}
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def encode(s, weights: dict[str, np.ndarray]) -> bytes:
    return encode_artifact(s, weights, TOKENIZER)


@pytest.fixture(scope="module")
def artifact():
    """Settings, weights and their artifact: one of each scheme."""
    s = settings_of()
    weights = random_weights(s, 0)
    return s, weights, encode(s, weights)


def contents(blob: bytes) -> tuple[dict[str, np.ndarray], dict]:
    """The tensors and the facts in an artifact, by zlib, safetensors and JSON alone."""
    raw = zlib.decompress(blob)
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return safetensors.numpy.load(raw), json.loads(header["__metadata__"]["bytegolf"])


def decode(blob: bytes) -> dict[str, np.ndarray] | None:
    """Its weights, or None if it is refused by the file's name. Any other error is a failure."""
    try:
        with np.errstate(all="ignore"):
            return decode_artifact(blob, "some/model.ptz")[1]
    except DataError as error:
        assert str(error).startswith("some/model.ptz is damaged or of another script: ")
        return None


# --- the whole artifact -----------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1e-30, 1e-8, 1e-3, 1.0, 10.0, 1e3]),
    st.integers(1, 3),
)
def test_each_tensor_comes_back_as_its_scheme_promises(seed, scale, layers):
    """Also rows of zeros, and of the smallest and the largest numbers."""
    s = settings_of(layers=layers)
    weights = random_weights(s, seed, scale)
    weights["tok_emb"][: len(ODD_SIZES)] = np.outer(ODD_SIZES, np.linspace(-1, 1, 8))
    carried, decoded, tokenizer = decode_artifact(encode(s, weights), "some/model.ptz")
    assert tokenizer == TOKENIZER
    assert carried == {name: getattr(s, name) for name in carried} and "num_layers" in carried
    assert list(decoded) == list(weights)
    for param in train_gpt.parameter_table(s):
        found, want = decoded[param.name], weights[param.name]
        assert (found.dtype, found.shape) == (np.float32, want.shape)
        if param.group == "vector":
            assert np.array_equal(found, want)
        else:
            step = np.abs(want).max(-1, keepdims=True) / 127
            assert (np.abs(found - want) <= 0.502 * step + 1e-42).all()


def test_matrices_of_six_bits_take_less_and_the_embedding_stays():
    env = helpers.tiny_env(VOCAB_SIZE=800, MODEL_DIM=96, NUM_LAYERS=4, MATRIX_LEVELS=31)
    s = train_gpt.load_settings(env, "smoke")[0]
    weights = random_weights(s, 0)
    blob = encode(s, weights)
    (stored, _), decoded = contents(blob), decode(blob)
    assert [np.abs(stored[name]).max() for name in ("qkv", "mlp_down", "tok_emb")] == [31, 31, 127]
    step = np.abs(weights["qkv"]).max(-1, keepdims=True) / 31
    assert (np.abs(decoded["qkv"] - weights["qkv"]) <= 0.502 * step).all()
    assert len(blob) < 0.86 * len(encode(dataclasses.replace(s, matrix_levels=127), weights))


@pytest.mark.parametrize("name, bad", [("tok_emb", math.nan), ("qkv", math.inf), ("q_gain", math.nan)])
def test_what_is_not_finite_is_not_exported(artifact, name, bad):
    s, weights, _ = artifact
    damaged = weights | {name: weights[name].copy()}
    damaged[name].flat[-1] = bad
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match=name):
        encode(s, damaged)


def test_another_program_can_read_it(artifact):
    """zlib and safetensors, nothing of ours: int8 times scale, or a float.

    The bytes follow from the values. Of a transposed view, safetensors.numpy writes the memory as it lies.
    """
    s, weights, blob = artifact
    assert encode(s, {name: np.asfortranarray(weights[name]) for name in reversed(weights)}) == blob
    (stored, about), decoded = contents(blob), decode(blob)
    assert set(about["schemes"]) == set(weights) == {name for name in stored if not name.endswith(".scale")}
    dtypes = {"int8 rows": np.int8, "float32": np.float32}
    assert set(about["schemes"].values()) == set(dtypes)
    for name, scheme in about["schemes"].items():
        assert stored[name].dtype == dtypes[scheme]
        scale = stored[name + ".scale"].astype(np.float32)[..., None] if scheme == "int8 rows" else 1
        assert np.array_equal(stored[name].astype(np.float32) * scale, decoded[name])


# --- damage -----------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> bytes:
    s = settings_of(vocabulary=20)
    return encode(s, random_weights(s, 1))


def test_300_damaged_files_are_refused(small):
    rng = random.Random(1)
    found = [decode(helpers.damaged(small, rng)) for _ in range(300)]
    assert found.count(None) > 290
    for weights in filter(None, found):
        np.testing.assert_equal(weights, decode(small))


def test_300_damaged_contents_are_refused_or_decoded_but_never_crash(small):
    """Damage under a good zlib stream, in the header above all: no checksum helps there."""
    raw, rng = zlib.decompress(small), random.Random(2)
    ends = (len(raw), *[8 + int.from_bytes(raw[:8], "little")] * 2)
    blobs = (helpers.damaged(raw[:end], rng) + raw[end:] for end in 100 * ends)
    assert [decode(zlib.compress(blob, 1)) for blob in blobs].count(None) > 150


GONE = object()
FORGED = [  # what is changed, and to what
    ("about", "schemes", {}),
    ("about", "settings", [1]),
    ("about", "settings", {}),
    ("schemes", "qkv", "int4"),
    ("schemes", "q_gain", "int8 rows"),  # of which there are no scales
    ("schemes", "tok_emb", "float32"),  # then its scales have no place
    ("settings", "num_layers", 3),
    ("settings", "num_layers", 10**30),
    ("settings", "num_layers", "two"),
    ("settings", "model_dim", 0),
    ("settings", "num_heads", 0),
    ("settings", "logit_softcap", math.nan),
    ("settings", "num_loops", 2),  # which there is not
    ("tensors", "more", np.zeros(3, np.float32)),
    ("tensors", "qkv", np.zeros((2, 3), np.float16)),
    ("tensors", "q_gain", np.full((2, 2), np.nan, np.float32)),
    ("tensors", "tok_emb.scale", np.full(200, np.inf, np.float16)),
    ("tensors", "tok_emb.scale", np.ones(3, np.float16)),
    ("tensors", "tok_emb.scale", GONE),
    ("tensors", "mlp_up", GONE),
]


def forged(blob: bytes, part: str, name: str, value) -> bytes:
    """The artifact with one thing changed in its tensors, or in what it says about them."""
    tensors, about = contents(blob)
    place = {"tensors": tensors, "about": about}.get(part) or about[part]
    place[name] = value
    if value is GONE:
        del place[name]
    return zlib.compress(safetensors.numpy.save(tensors, {"bytegolf": json.dumps(about)}), 9)


def test_a_whole_file_with_wrong_contents_is_refused(artifact):
    *_, blob = artifact
    assert decode(forged(blob, "about", "more", 1)) is not None
    for change in FORGED:
        assert decode(forged(blob, *change)) is None, change


def test_what_is_no_artifact_is_refused():
    """Nor what is nested deeper than Python can read."""
    deep = "[" * 100_000
    assert decode(b"") is None
    for raw in (
        len(deep).to_bytes(8, "little") + deep.encode(),
        safetensors.numpy.save({}),
        safetensors.numpy.save({"a": np.zeros(3)}, {"bytegolf": deep}),
    ):
        assert decode(zlib.compress(raw)) is None


# --- files ------------------------------------------------------------------------------------------------


def test_write_whole_replaces_or_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model"
    for blob in (b"old", b"", b"newer"):
        train_gpt.write_whole(path, blob)
        assert path.read_bytes() == blob and list(tmp_path.iterdir()) == [path]

    fail = mock.Mock(side_effect=OSError(errno.ENOSPC, "no space"))
    for broken in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, fail)
            with pytest.raises(OSError, match="no space"):
                train_gpt.write_whole(path, b"never")
        assert path.read_bytes() == b"newer" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="no folder/there/model"):
        train_gpt.write_whole(tmp_path / "no folder" / "there" / "model", b"x")
