"""The artifact codec: what comes back, what is refused, and that other programs can read it."""
import errno
import json
import math
import os
import random
import subprocess
import sys
import zlib

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import helpers
import train_gpt
from train_gpt import DataError, NumericalError, decode_artifact, encode_artifact, quantize_rows

FLOAT32_MAX = float(np.finfo(np.float32).max)


def shape_settings(**more):
    """A model of two layers whose embedding is just large enough for int8 (over 65,536 elements)."""
    env = helpers.tiny_env(**dict(VOCAB_SIZE=8200, MODEL_DIM=8, NUM_HEADS=2, NUM_KV_HEADS=1) | more)
    return train_gpt.load_settings(env, "smoke")[0]


def random_weights(s, seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {p.name: (scale * rng.standard_normal(p.shape)).astype(np.float32)
            for p in train_gpt.parameter_table(s)}


@pytest.fixture(scope="module")
def artifact():
    """Settings, weights and their artifact: one of each scheme."""
    s = shape_settings()
    weights = random_weights(s, 0)
    return s, weights, encode_artifact(s, weights)


# --- int8 rows --------------------------------------------------------------------------------------------

def told_percentile(values: list[float], percentile: float) -> float:
    """Linear interpolation between the sorted values."""
    place, values = percentile / 100 * (len(values) - 1), sorted(values)
    low = math.floor(place)
    return values[low] + (place - low) * (values[min(low + 1, len(values) - 1)] - values[low])


ROWS = st.one_of(arrays.array_shapes(min_dims=2, max_dims=3, max_side=7),
                 st.tuples(st.integers(1, 3), st.integers(100, 300)))
VALUES = st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False),
                   st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-6, 1.0, 65504.0, 1e30, FLOAT32_MAX]))


@settings(max_examples=400)
@given(arrays.arrays(np.float32, ROWS, elements=VALUES, fill=st.sampled_from([0.0, 1e-3, -7.5, 1e20])),
       st.floats(50, 100))
@example(np.zeros((2, 3), np.float32), 100.0)
@example(np.full((2, 3), -FLOAT32_MAX, np.float32), 99.99984)
def test_rows_come_back_within_half_a_step_inside_the_clip(matrix, percentile):
    with np.errstate(over="ignore"):        # what lies far outside the clip may overflow on its way there
        levels, scale = quantize_rows(matrix, percentile, 0.0)
    assert levels.dtype == np.int8 and levels.shape == matrix.shape and scale.shape == matrix.shape[:-1]
    assert levels.min() >= -127, "as many levels below zero as above"
    assert scale.dtype in (np.float16, np.float32) and np.isfinite(scale).all() and (scale >= 0).all()
    for row, got, step in zip(matrix.reshape(-1, matrix.shape[-1]).astype(np.float64),
                              levels.reshape(-1, matrix.shape[-1]), scale.ravel().astype(np.float64)):
        limit = told_percentile(np.abs(row).tolist(), percentile)
        assert step == pytest.approx(limit / 127, rel=1e-3, abs=1e-43)
        inside = np.abs(row) <= limit
        assert (np.abs(row - got * step)[inside] <= 0.5001 * step + 1e-42).all()
        assert (np.sign(row) * got >= 0).all()
        if step > 1e-37:                    # a step among float32's denormals is only a coarse guess
            assert (np.abs(got[~inside].astype(int)) >= 126).all()


@settings(max_examples=200)
@given(arrays.arrays(np.float32, ROWS, elements=st.floats(-1e6, 1e6, width=32)), st.floats(0.1, 20))
def test_the_clip_can_be_a_number_of_standard_deviations(matrix, std):
    levels, scale = quantize_rows(matrix, 50.0, std)
    for row, got, step in zip(matrix.reshape(-1, matrix.shape[-1]).astype(np.float64),
                              levels.reshape(-1, matrix.shape[-1]), scale.ravel().astype(np.float64)):
        limit = std * math.sqrt(sum((x - row.mean()) ** 2 for x in row) / len(row))
        assert step == pytest.approx(limit / 127, rel=2e-3, abs=1e-6 * np.abs(row).max() + 1e-43)
        clipped = np.clip(row, -127 * step, 127 * step)
        assert step == 0 or (np.abs(clipped - got * step) <= 0.5001 * step + 1e-42).all()


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e-3, 1.0, 1e4, 1e9])
def test_small_rows_keep_all_their_levels(size):
    """The fault of the reference: under its floor of 1/127, a row of maximum 0.1 has 25 levels."""
    row = (np.linspace(-1, 1, 20_000) * size).astype(np.float32)[None]
    levels, scale = quantize_rows(row, 100.0, 0.0)
    assert len(np.unique(levels)) == 255
    assert np.abs(levels * scale.astype(np.float32)[:, None] - row).max() <= 0.5001 * size / 127


def test_rows_of_zeros_stay_zero_beside_others():
    matrix = np.array([[0, 0, 0], [1, -2, 3], [-0.0, 0, 0]], np.float32)
    levels, scale = quantize_rows(matrix, 100.0, 0.0)
    assert levels.tolist() == [[0, 0, 0], [42, -85, 127], [0, 0, 0]]
    assert (levels * scale[:, None].astype(np.float32) == 0)[[0, 2]].all()


# --- the whole artifact -----------------------------------------------------------------------------------

def test_each_tensor_comes_back_as_its_scheme_promises(artifact):
    s, weights, blob = artifact
    shape, decoded = decode_artifact(blob, "x")
    assert list(decoded) == list(weights)
    assert {name: value.shape for name, value in decoded.items()} == {n: v.shape for n, v in weights.items()}
    assert all(value.dtype == np.float32 for value in decoded.values())
    for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp_mult",
                 "tie_embeddings", "rope_base", "logit_softcap", "train_seq_len"):
        assert getattr(shape, name) == getattr(s, name)
    for param in train_gpt.parameter_table(s):
        found, want = decoded[param.name], weights[param.name]
        if param.group == "vector":
            assert np.array_equal(found, want)                  # fp32
        elif math.prod(param.shape) > 65536:
            step = np.abs(want).max(-1, keepdims=True) / 127
            assert (np.abs(found - want) <= 0.502 * step).all() and not np.array_equal(found, want)
        else:
            assert np.array_equal(found, want.astype(np.float16).astype(np.float32))


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 1e-30, 1e-8, 1e-3, 10.0, 1e6, 1e30]), st.booleans(),
       st.integers(1, 3), st.sampled_from([(0.0, 100.0), (3.0, 99.0), (0.0, 99.99984)]))
def test_any_finite_weights_make_the_trip(seed, scale, tied, layers, clip):
    s = shape_settings(NUM_LAYERS=layers, TIE_EMBEDDINGS=int(tied), CLIP_STD=clip[0], CLIP_PERCENTILE=clip[1])
    weights = random_weights(s, seed, scale)
    decoded = decode_artifact(encode_artifact(s, weights), "x")[1]
    for name, want in weights.items():
        rows, largest = want.astype(np.float64), np.abs(want).max(initial=0)
        is_int8 = name in ("tok_emb", "head")
        limit = clip[0] * rows.std(-1, keepdims=True) if clip[0] and is_int8 else largest
        # a step of int8 rows is limit / 127; float16 keeps 11 bits and ends at 2^-24
        bound = limit / 250 + (0 if is_int8 else 2**-25)
        assert (np.abs(np.clip(rows, -limit, limit) - decoded[name]) <= bound).all(), name


def test_values_that_float16_cannot_hold_are_kept_in_float32(artifact):
    s, weights, _ = artifact
    large = weights | {"qkv": weights["qkv"] * 1e5}
    assert np.array_equal(decode_artifact(encode_artifact(s, large), "x")[1]["qkv"], large["qkv"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_exported(artifact, bad):
    s, weights, _ = artifact
    for name in ("tok_emb", "qkv", "q_gain"):
        damaged = weights | {name: weights[name].copy()}
        damaged[name].flat[-1] = bad
        with pytest.raises(NumericalError, match=name):
            encode_artifact(s, damaged)


def test_bytes_are_a_function_of_the_values(artifact):
    s, weights, blob = artifact
    assert encode_artifact(s, {name: weights[name].copy() for name in reversed(weights)}) == blob
    decoded = decode_artifact(blob, "x")[1]
    again = decode_artifact(encode_artifact(s, decoded), "x")[1]    # floats are a fixed point, int8 nearly
    assert all(np.array_equal(again[name], decoded[name]) for name in decoded if name != "tok_emb")
    program = ("import sys, zlib; sys.path[:0] = sys.argv[1:]; import test_artifact as t\n"
               "s = t.shape_settings(); print(zlib.crc32(t.encode_artifact(s, t.random_weights(s, 0))))")
    done = subprocess.run([sys.executable, "-c", program, str(helpers.ROOT), str(helpers.ROOT / "tests")],
                          env=helpers.clean_environment(PYTHONHASHSEED="7"), text=True, capture_output=True,
                          timeout=120)         # another process: the order of dicts and sets must not show
    assert (done.stdout.strip(), done.stderr) == (str(zlib.crc32(blob)), "")


def test_the_memory_order_of_the_weights_does_not_show(artifact):
    """safetensors.numpy writes a transposed view's memory as it lies, under the view's shape."""
    s, weights, blob = artifact
    assert encode_artifact(s, {name: np.asfortranarray(value) for name, value in weights.items()}) == blob


def test_another_program_can_read_it(artifact):
    """zlib and safetensors, nothing of ours: int8 times scale, or a float."""
    _, weights, blob = artifact
    raw = zlib.decompress(blob)
    assert blob == zlib.compress(raw, 9)
    stored, decoded = safetensors.numpy.load(raw), decode_artifact(blob, "x")[1]
    about = json.loads(json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["bytegolf"])
    assert set(about["schemes"]) == set(weights) == {name for name in stored if not name.endswith(".scale")}
    dtypes = {"int8 rows": np.int8, "float16": np.float16, "float32": np.float32}
    assert set(about["schemes"].values()) == set(dtypes)
    for name, scheme in about["schemes"].items():
        assert stored[name].dtype == dtypes[scheme]
        scale = stored[name + ".scale"].astype(np.float32)[..., None] if scheme == "int8 rows" else 1
        assert np.array_equal(stored[name].astype(np.float32) * scale, decoded[name])


# --- damage -----------------------------------------------------------------------------------------------

def outcome(blob: bytes) -> dict[str, np.ndarray] | None:
    """Decoded weights, or None if refused in one line that names the file. Anything else is a failure."""
    try:
        return decode_artifact(blob, "some/model.int8.ptz")[1]
    except DataError as error:
        assert "some/model.int8.ptz" in str(error) and "\n" not in str(error)[:200]
        return None


def damaged(blob: bytes, rng: random.Random) -> bytes:
    """Some bits flipped, or the end cut off, or bytes put in, taken out or doubled."""
    blob, kind, at = bytearray(blob), rng.randrange(5), rng.randrange(len(blob))
    if kind == 0:
        return bytes(blob[:at])
    if kind == 1:
        return bytes(blob[:at] + rng.randbytes(rng.randint(1, 9)) + blob[at:])
    if kind == 2:
        return bytes(blob[:at] + blob[at + rng.randint(1, 9):])
    for _ in range(rng.choice([1, 1, 2, 20])):
        blob[rng.randrange(len(blob)) if kind == 3 else rng.randrange(60)] ^= 1 << rng.randrange(8)
    return bytes(blob)


def small_artifact() -> bytes:
    s = shape_settings(VOCAB_SIZE=20)
    return encode_artifact(s, random_weights(s, 1))


def test_600_damaged_files_are_refused():
    blob, rng = small_artifact(), random.Random(1)
    whole = outcome(blob)
    refused = 0
    for _ in range(600):
        got = outcome(damaged(blob, rng))
        refused += got is None
        assert got is None or all(np.array_equal(got[name], whole[name]) for name in whole)
    assert refused > 590


def test_600_damaged_contents_are_refused_or_decoded_but_never_crash():
    """Damage under a good zlib stream, in the header above all: no checksum helps there."""
    raw, rng = zlib.decompress(small_artifact()), random.Random(2)
    header = 8 + int.from_bytes(raw[:8], "little")
    refused = 0
    for number in range(600):
        part = header if number % 3 else len(raw)
        refused += outcome(zlib.compress(damaged(raw[:part], rng) + raw[part:], 1)) is None
    assert refused > 300


def rewritten(blob: bytes, change) -> bytes:
    """The artifact after `change(tensors, about)` worked on its contents."""
    raw = zlib.decompress(blob)
    tensors = safetensors.numpy.load(raw)
    about = json.loads(json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["bytegolf"])
    change(tensors, about)
    return zlib.compress(safetensors.numpy.save(tensors, {"bytegolf": json.dumps(about)}), 9)


def set_at(path: str, value):
    """A change that sets one value: 'settings.num_layers' in the metadata, or 'tensors.qkv'."""
    def change(tensors, about):
        *where, last = path.split(".", 1) if path.startswith("tensors.") else path.split(".")
        place = {"tensors": tensors, **about} if where else about
        for key in where:
            place = place[key]
        place[last] = value
    return change


FORGED = {
    "another format": set_at("format", "bytegolf-9"),
    "no schemes": set_at("schemes", {}),
    "settings are a list": set_at("settings", [1]),
    "an unknown scheme": set_at("schemes.qkv", "int4"),
    "a scheme that is not the tensor's": set_at("schemes.qkv", "float32"),
    "another depth": set_at("settings.num_layers", 3),
    "a depth beyond all bounds": set_at("settings.num_layers", 10**30),
    "a depth of text": set_at("settings.num_layers", "two"),
    "no depth": set_at("settings", {}),
    "a width below 1": set_at("settings.model_dim", 0),
    "no heads": set_at("settings.num_heads", 0),
    "a softcap that is not a number": set_at("settings.logit_softcap", math.nan),
    "a tensor too many": set_at("tensors.more", np.zeros(3, np.float32)),
    "a tensor of another shape": set_at("tensors.qkv", np.zeros((2, 3), np.float16)),
    "a tensor that is not finite": set_at("tensors.q_gain", np.full((2, 2), np.nan, np.float32)),
    "a scale that is infinite": set_at("tensors.tok_emb.scale", np.full(8200, np.inf, np.float16)),
    "scales of another shape": set_at("tensors.tok_emb.scale", np.ones(3, np.float16)),
    "scales that are not there": lambda tensors, about: tensors.pop("tok_emb.scale"),
    "a tensor that is not there": lambda tensors, about: tensors.pop("mlp_up"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_whole_file_with_wrong_contents_is_refused(artifact, kind):
    assert outcome(rewritten(artifact[2], lambda tensors, about: None)) is not None
    assert outcome(rewritten(artifact[2], FORGED[kind])) is None


@pytest.mark.parametrize("blob", [
    b"", b"\0", b"x" * 1000, zlib.compress(b""), zlib.compress(b"\xff" * 8), zlib.compress(bytes(8)),
    zlib.compress((100_000).to_bytes(8, "little") + b"[" * 100_000),
    zlib.compress(safetensors.numpy.save({})),
    zlib.compress(safetensors.numpy.save({"a": np.zeros(3)}, {"bytegolf": "{}"})),
    zlib.compress(safetensors.numpy.save({"a": np.zeros(3)}, {"bytegolf": "[" * 50_000})),
    b"\x80\x04\x95\x01\x00"], ids=lambda blob: f"{len(blob)} bytes")
def test_what_is_no_artifact_is_refused(blob):
    assert outcome(blob) is None


def test_bytes_after_the_end_are_refused(artifact):
    assert outcome(artifact[2] + b"\0") is None and outcome(artifact[2] * 2) is None


# --- files ------------------------------------------------------------------------------------------------

def test_write_whole_replaces_or_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model"
    for blob in (b"old", b"", b"newer"):
        train_gpt.write_whole(path, blob)
        assert path.read_bytes() == blob and list(tmp_path.iterdir()) == [path]

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space")
    for broken in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, fail)
            with pytest.raises(OSError, match="no space"):
                train_gpt.write_whole(path, b"never")
        assert path.read_bytes() == b"newer" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="no folder/there/model"):
        train_gpt.write_whole(tmp_path / "no folder" / "there" / "model", b"x")
