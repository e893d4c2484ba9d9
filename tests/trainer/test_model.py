"""Model, optimizer and score beyond what parity.py checks.

Long rows, bfloat16, operations, windows, ranks, and the predictor that is fed one token at a time.
"""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from tests.kit import helpers
from tests.trainer.twin.test_parity import torch_logits
from train_gpt import Machine, Plan, Predictor, Run, Trainer, evaluate, load_settings

CPU = Machine(torch.device("cpu"))
# small in every dimension, but no two are equal
SHAPE = """
    VOCAB_SIZE=50 MODEL_DIM=24 NUM_HEADS=6 NUM_KV_HEADS=2 NUM_LAYERS=3 MLP_MULT=3
    TRAIN_SEQ_LEN=20 TRAIN_BATCH_TOKENS=320
"""


def tiny(**more):
    return load_settings(helpers.tiny_env(**helpers.pairs(SHAPE) | more), "smoke")[0]


def random_trainer(s, machine=CPU) -> Trainer:
    """All weights random, those too that start at zero or one."""
    trainer = Trainer(s, machine)
    rng = np.random.default_rng(0)
    weights = {}
    for param in trainer.model.table:
        value = rng.standard_normal(param.shape) * 0.3
        if param.group == "vector":
            value += 1
        weights[param.name] = value.astype(np.float32)
    trainer.load(weights)
    return trainer


def random_ids(s, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, s.vocab_size, (rows, length))


def logprobs_of(trainer, ids: np.ndarray) -> np.ndarray:
    """float64[B, T, V] of int64[B, T]."""
    return torch_logits(trainer, ids).double().log_softmax(-1).numpy()


# --- model ------------------------------------------------------------------------------------------------


def test_a_position_depends_on_nothing_right_of_it_or_in_other_rows():
    s = tiny(TRAIN_SEQ_LEN=300, TRAIN_BATCH_TOKENS=2400)
    trainer = random_trainer(s)
    ids = random_ids(s, 2, 300)
    whole = logprobs_of(trainer, ids)
    for cut in (1, 127, 128, 200, 299):
        changed = ids.copy()
        changed[0, cut:] = (changed[0, cut:] + 7) % s.vocab_size
        found = logprobs_of(trainer, changed)
        assert np.allclose(found[0, :cut], whole[0, :cut], atol=1e-5)
        assert np.abs(found[0, cut] - whole[0, cut]).max() > 1e-3
        assert np.allclose(found[1], whole[1], atol=1e-5)
        assert np.allclose(logprobs_of(trainer, ids[:, :cut]), whole[:, :cut], atol=1e-5)


def test_nll_is_what_the_logits_say():
    """Not bit for bit: the two come from products of another shape."""
    s = tiny()
    trainer = random_trainer(s)
    ids = random_ids(s, 4, 33)
    logprobs = logprobs_of(trainer, ids[:, :-1])
    reference = -np.take_along_axis(logprobs, ids[:, 1:, None], 2)[..., 0]
    nll = trainer.model.nll(ids)
    assert nll.dtype == np.float32
    assert nll.shape == (4, 32)
    assert np.abs(nll - reference).max() < 1e-5


@pytest.mark.parametrize("micro_tokens", [1, 100])
def test_the_gradient_is_the_same_however_many_slots_share_a_pass(monkeypatch, micro_tokens):
    s = tiny()
    trainer = random_trainer(s)
    batch = torch.from_numpy(random_ids(s, s.batch_slots, s.slot_tokens + 1))
    loss, together = trainer.loss_and_gradient(batch, s.train_seq_len)
    monkeypatch.setattr(train_gpt, "MICRO_TOKENS", micro_tokens)
    found, apart = trainer.loss_and_gradient(batch, s.train_seq_len)
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    assert (apart - together).abs().max() < 1e-5 * together.abs().max()


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 1.0, 30.0, 1e4])
def test_the_softcap_is_exact_for_small_and_large_logits(size):
    matrix = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * size
    x = torch.eye(8)
    found = train_gpt.head_logits(x, matrix, 30.0, torch.float32)
    reference = 30 * torch.tanh(F.linear(train_gpt.rms_norm(x), matrix).double() / 30)
    assert ((found - reference).abs() <= 1e-6 * reference.abs()).all()


def test_rms_norm_has_its_own_eps():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, -1e-3]])
    size = math.sqrt(12.5 + 1e-6)
    half = math.sqrt(0.5)
    reference = torch.tensor([[3 / size, 4 / size], [0, 0], [half, -half]])
    assert torch.allclose(train_gpt.rms_norm(x), reference, rtol=1e-6)
    assert train_gpt.rms_norm(x.bfloat16()).dtype == torch.float32


# --- attention: B, T, H, G, K as in train_gpt.py ----------------------------------------------------------


def attention_case(B, T, H, G, K, dtype=torch.float32, gain=1.0):
    """RMS-normalised q [B, T, G, R, K] (times gain) and k, and random v."""
    generator = torch.Generator().manual_seed(T * H + K)
    q = torch.randn(B, T, G, H // G, K, generator=generator)
    k, v = torch.randn(2, B, T, G, K, generator=generator)
    parts = (train_gpt.rms_norm(q) * gain, train_gpt.rms_norm(k), v)
    return [part.to(dtype).requires_grad_() for part in parts]


def math_attention(q, k, v, window=math.inf):
    """PyTorch's own, in float64; a position sees the last `window` ones, itself among them."""
    shape = q.shape
    q = q.flatten(2, 3)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    places = torch.arange(q.size(2), device=q.device)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < window)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return out.transpose(1, 2).reshape(shape)


CASES = """
    2x256x4x2x16 2x130x4x4x8 3x1x2x1x8 1x7x6x2x4 2x127x3x1x16 1x257x8x2x8 1x640x2x2x64 1x300x6x3x2
"""


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("case", CASES.split())
@pytest.mark.parametrize("window", [math.inf, 300, 128, 100, 1])
def test_attention_is_pytorchs_with_its_gradients(case, dtype, error, window):
    parts = attention_case(*map(int, case.split("x")), dtype)
    out = train_gpt.attention(*parts, window)
    reference = math_attention(*parts, window)
    assert out.shape == reference.shape
    assert out.dtype == dtype
    furthest = (out.double() - reference).abs().max()
    assert furthest < error / 2 * reference.abs().max()
    weight = torch.randn(reference.shape, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad((out.float() * weight).sum(), parts)
    slopes = torch.autograd.grad((reference * weight).sum(), parts)
    for grad, want in zip(found, slopes):  # of a single token q and k have no gradient
        furthest = (grad.double() - want).abs().max()
        assert furthest < error * max(want.abs().max().item(), 1.0)


@pytest.mark.parametrize(
    "dtype, window, way",
    [
        (torch.bfloat16, math.inf, "whole"),
        (torch.bfloat16, 8, "window"),
        (torch.float32, 8, "blocks"),
    ],
)
def test_a_gpu_has_kernels_for_whole_sequences_and_for_windows(monkeypatch, dtype, window, way):
    """In float32 there are none. Tensors here only say that they are on a GPU."""
    calls = {"whole": [], "window": [], "blocks": []}

    def noted(name: str):
        def call(q, *rest, **named):
            calls[name].append((q, *rest, named))
            return q

        return call

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted("whole"))
    monkeypatch.setattr(varlen, "varlen_attn", noted("window"))
    monkeypatch.setattr(train_gpt, "attention_by_blocks", noted("blocks"))
    with FakeTensorMode():
        q = torch.empty(2, 30, 2, 4, 16, dtype=dtype, device="cuda")
        k = v = torch.empty(2, 30, 2, 16, dtype=dtype, device="cuda")
        train_gpt.attention(q, k, v, window)
    (call,) = calls[way]
    assert sum(map(len, calls.values())) == 1
    if way == "whole":
        q, k, v, _ = call
        assert q.shape == (2, 8, 30, 16)
        assert k.shape == v.shape == (2, 2, 30, 16)
        assert call[3] == {"is_causal": True, "enable_gqa": True}
    if way == "window":
        assert [x.shape for x in call[:3]] == [(60, 8, 16)] * 3
        assert call[-1] == {"window_size": (7, 0)}


@pytest.mark.parametrize("gain", [0.0, 12.0, 200.0])
def test_attention_is_exact_for_any_gain_it_may_learn(gain):
    """A gain of 200 at width 16 makes scores of +-800 nats."""
    parts = attention_case(1, 200, 4, 2, 16, gain=gain)
    reference = math_attention(*parts)
    furthest = (train_gpt.attention(*parts, math.inf) - reference).abs().max()
    assert furthest < 1e-4 * reference.abs().max()


@pytest.mark.parametrize("gain", [-30.0, 100.0, 1e4])
def test_a_runaway_gain_gives_no_nan(gain):
    """Where a query is the key times -30, all that the first token sees has a score of -120 nats."""
    _, k, v = attention_case(1, 200, 2, 2, 16)
    assert train_gpt.attention(k.unsqueeze(3) * gain, k, v, math.inf).isfinite().all()


# --- operations -------------------------------------------------------------------------------------------

COUNTED = """
    TRAIN_SEQ_LEN=20
    NUM_KV_HEADS=1
    NUM_LAYERS=1
    NUM_LAYERS=6,MUON_BACKEND_STEPS=3
    MLP_MULT=7
    TRAIN_SEQ_LEN=1,TRAIN_BATCH_TOKENS=8
    BATCH_SLOTS=1,TRAIN_SEQ_LEN=257,TRAIN_BATCH_TOKENS=514
    BATCH_SLOTS=1,TRAIN_SEQ_LEN=700,TRAIN_BATCH_TOKENS=700,NUM_KV_HEADS=6
    BATCH_SLOTS=1,TRAIN_SEQ_LEN=700,TRAIN_BATCH_TOKENS=700,SHORT_WINDOW=128
    BATCH_SLOTS=1,TRAIN_SEQ_LEN=700,TRAIN_BATCH_TOKENS=700,SHORT_WINDOW=300,NUM_KV_HEADS=6
    BATCH_SLOTS=2,TRAIN_SEQ_LEN=300,TRAIN_BATCH_TOKENS=600,MODEL_DIM=192,NUM_HEADS=3,NUM_KV_HEADS=3
"""


@pytest.mark.parametrize("shape", COUNTED.split())
def test_the_operations_of_a_step_are_those_that_torch_counts(shape):
    s = tiny(**helpers.pairs(shape.replace(",", " ")))
    trainer, step = Trainer(s, CPU), next(Plan(s).steps())
    batch = torch.zeros(s.batch_slots, s.slot_tokens + 1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        trainer.step(batch, step, 1.0)
    assert step.flops == pytest.approx(counter.get_total_flops(), rel=0.01)


# --- start weights ----------------------------------------------------------------------------------------


def start_weights(**more) -> dict[str, np.ndarray]:
    s = tiny(**more)
    return {p.name: train_gpt.draw(p, s.seed) for p in train_gpt.parameter_table(s)}


def test_start_weights_have_their_spread_or_are_constant():
    w = start_weights(VOCAB_SIZE=2000, TIED_EMBED_INIT_STD=0.005, QK_GAIN_INIT=1.25, KEY_SHIFT=0.25)
    assert w["tok_emb"].std() == pytest.approx(0.005, rel=0.02)
    assert abs(w["tok_emb"].mean()) < 1e-4
    ones = dict.fromkeys(("attn_scale", "mlp_scale", "mix_x", "skip_weight"), 1)
    zeros = dict.fromkeys(("attn_out", "mlp_down", "mix_x0"), 0)
    for name, value in (ones | zeros | {"q_gain": 1.25}).items():
        assert (w[name] == value).all(), name
    assert (w["key_shift"][:-1] == 0).all()
    assert (w["key_shift"][-1] == 0.25).all()
    for name in ("qkv", "mlp_up"):
        assert np.abs(w[name]).max() == pytest.approx(24**-0.5, rel=0.01)
        assert w[name].std() == pytest.approx((24 * 3) ** -0.5, rel=0.05)


def test_start_weights_depend_on_the_seed_and_the_name_alone():
    one = start_weights(SEED=5)
    other = start_weights(SEED=6)
    same = start_weights(SEED=5, MATRIX_LR=1, VOCAB_SIZE=60)
    for name in ("qkv", "mlp_up"):
        assert np.array_equal(one[name], same[name])
        assert not np.array_equal(one[name], other[name])
    assert not np.array_equal(one["qkv"][0, :24], one["mlp_up"][0, :24])


# --- optimizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, low, high, loose", [(torch.float32, 0.65, 1.25, 1e-4), (torch.bfloat16, 0.5, 1.35, 0.1)]
)
@pytest.mark.parametrize("rows, cols", [(1, 1), (1, 9), (8, 8), (24, 25), (64, 512)])
def test_newton_schulz_brings_singular_values_to_a_band(rows, cols, dtype, low, high, loose):
    """And the singular vectors stay where they are, of wide matrices and of tall ones."""
    generator = torch.Generator().manual_seed(rows)
    u = torch.linalg.qr(torch.randn(rows, rows, generator=generator).double())[0]
    v = torch.linalg.qr(torch.randn(cols, rows, generator=generator).double())[0]
    for scale in (1e-4, 1.0, 1e4):
        x = u * torch.from_numpy(np.geomspace(0.05, 1, rows) * scale) @ v.T
        done = train_gpt.newton_schulz(x[None], 5, dtype)[0].double()
        tall = train_gpt.newton_schulz(x.mT[None], 5, dtype)[0].double()
        assert torch.allclose(tall.mT, done, atol=loose)
        found = u.T @ done @ v
        assert low < found.diagonal().min()
        assert found.diagonal().max() < high
        assert (found - found.diagonal().diag()).abs().max() < loose


@pytest.mark.parametrize("place", [0, -1, None], ids=["a matrix", "a vector", "the loss"])
def test_a_step_without_finite_numbers_changes_nothing(monkeypatch, place):
    s = tiny()
    trainer = random_trainer(s)
    first, second = itertools.islice(Plan(s).steps(), 2)
    batch = torch.from_numpy(random_ids(s, s.batch_slots, s.slot_tokens + 1))
    trainer.step(batch, first, 1.0)
    before = trainer.sha256(*trainer.optimizer.state)
    loss, gradient = trainer.loss_and_gradient(batch, s.train_seq_len)
    bad = loss if place is None else gradient[place]
    bad.fill_(math.nan)
    monkeypatch.setattr(trainer, "loss_and_gradient", lambda *_: (loss, gradient))
    *_, finite = trainer.step(batch, second, 1.0)
    assert not finite
    assert trainer.sha256(*trainer.optimizer.state) == before


# --- score ------------------------------------------------------------------------------------------------


def reference_nats(tokens: list[int], window: int, value) -> float:
    """Window by window, token by token: what `value` makes of each target and all before it in its window."""
    nats = 0.0
    for target in range(1, len(tokens)):
        start = (target - 1) // window * window
        nats += value(tokens[start : target + 1])
    return nats


class Rank:
    """One of several ranks, each a thread: what evaluate asks of a Machine."""

    def __init__(self, rank: int, box: list, barrier: threading.Barrier):
        self.rank, self.world = rank, len(box)
        self.box, self.barrier = box, barrier
        self.signals = []

    def all_gather(self, *numbers):
        self.box[self.rank] = numbers
        self.barrier.wait(30)
        everyone = np.array(self.box, np.float64)
        self.barrier.wait(30)  # all have read it
        return everyone


def on_ranks(world: int, work) -> list:
    """What `work` returns for each Rank, side by side."""
    box, barrier = [None] * world, threading.Barrier(world)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, (Rank(rank, box, barrier) for rank in range(world))))


@settings(max_examples=80)
@given(
    st.integers(2, 200),
    st.integers(1, 60),
    st.integers(1, 4000),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, 2, 3, 50, 250]),
)
def test_the_score_is_the_expected_one_for_any_window_batch_and_number_of_ranks(
    total, window, batch, world, limit
):
    s = tiny(VAL_BATCH_SIZE=batch, VAL_TOKENS_LIMIT=limit, EVAL_SEQ_LEN=window)
    rng = np.random.default_rng(total)
    tokens = rng.integers(0, 65536, total).astype(np.uint16)
    worth = rng.integers(1, 9, total)
    text = SimpleNamespace(val_tokens=tokens, bytes_per_token=worth)
    shapes = set()

    def nll(ids: np.ndarray) -> np.ndarray:
        """A stand-in for a model: a value for each target that depends on all tokens before it."""
        assert ids.dtype == np.int64
        shapes.add(ids.shape)
        return (np.cumsum(ids, 1)[:, 1:] % 97).astype(np.float32)

    used = min(total, limit or total)
    scored, scored_bytes = used - 1, worth[1:used].sum()
    nats = reference_nats(tokens[:used].tolist(), window, lambda seen: sum(seen) % 97)
    for score in on_ranks(world, lambda rank: evaluate(s, nll, text, Run(rank, s), limit)):
        assert (score["val_tokens"], score["val_bytes"]) == (scored, scored_bytes)
        assert score["val_loss"] == pytest.approx(nats / scored, rel=1e-12)
        assert score["val_bpb"] == pytest.approx(nats / math.log(2) / scored_bytes, rel=1e-12)
        assert score["partial"] == (used < total)
    assert len(shapes) == 1, "one shape, so that a compiled model compiles once"


# --- predictor: fed one token after the other -------------------------------------------------------------


def nats_of_steps(predictor: Predictor, ids: np.ndarray) -> np.ndarray:
    """float64[rows, T]: nats of int64[rows, T], each token fed after its price."""
    logits = [predictor.start(len(ids)), *map(predictor.step, ids.T[:-1])]
    assert {(each.dtype, each.shape) for each in logits} == {
        (np.dtype("float32"), (len(ids), predictor.vocab_size))
    }
    logprobs = torch.from_numpy(np.stack(logits, 1)).double().log_softmax(-1)
    return -logprobs.gather(-1, torch.from_numpy(ids)[..., None])[..., 0].numpy()


def nats_of_windows(model, ids: np.ndarray, window: int) -> np.ndarray:
    """The same by nll, in windows side by side."""
    rows, length = ids.shape
    first = np.full((rows, 1), math.log(model.s.vocab_size))
    starts = range(0, length - 1, window)
    scored = [model.nll(ids[:, at : at + window + 1]) for at in starts]
    return np.concatenate([first, *scored], 1)


@pytest.mark.parametrize("more", [{}, {"KEY_SHIFT": 0}, {"SHORT_WINDOW": 9}, {"SHORT_WINDOW": 200}])
@pytest.mark.parametrize("window", [7, 20, 250])
def test_a_predictor_says_what_attention_in_a_sliding_window_says(window, more, monkeypatch):
    """A layer with a short window sees that or the evaluation's, whichever is shorter."""
    s = tiny(EVAL_SEQ_LEN=window, **more)
    model = random_trainer(s).model
    ids = random_ids(s, 3, 190)
    found = nats_of_steps(Predictor(model), ids)
    whole = train_gpt.attention

    def bounded(q, k, v, short):
        return whole(q, k, v, min(short, window))

    monkeypatch.setattr(train_gpt, "attention", bounded)
    assert np.abs(found - nats_of_windows(model, ids, 190)).max() < 1e-5


def test_a_predictor_in_bfloat16_is_near_the_windows_in_bfloat16():
    s = tiny(EVAL_SEQ_LEN=60)
    model = random_trainer(s, Machine(torch.device("cpu"), dtype=torch.bfloat16)).model
    ids = random_ids(s, 3, 60)
    difference = nats_of_steps(Predictor(model), ids) - nats_of_windows(model, ids, 60)
    assert np.abs(difference).max() < 0.2
    assert abs(difference.mean()) < 0.01


def test_a_predictor_begins_anew_with_any_number_of_rows():
    """What one text was, and in how many streams, shows in no other."""
    s = tiny()
    predictor = Predictor(random_trainer(s).model)
    ids = random_ids(s, 5, 50)
    first = nats_of_steps(predictor, ids)
    for rows in (slice(0, 1), slice(1, 4), slice(0, 5)):
        assert np.abs(nats_of_steps(predictor, ids[rows]) - first[rows]).max() < 1e-5
    assert np.array_equal(nats_of_steps(predictor, ids), first)
