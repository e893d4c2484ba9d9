"""Model and score beyond what test_parity.py checks.

Long rows, bfloat16, operations, and the predictor that is fed one token at a time.
"""

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from tests import parity
from tests.kit import helpers
from train_gpt import Machine, Predictor, Trainer, load_settings

CPU = Machine(torch.device("cpu"))
# small in every dimension, but no two are equal
SHAPE = """
    VOCAB_SIZE=50 MODEL_DIM=24 NUM_HEADS=6 NUM_KV_HEADS=2 NUM_LAYERS=3 MLP_MULT=3
    TRAIN_SEQ_LEN=20 TRAIN_BATCH_TOKENS=320
"""


def tiny(**more):
    return load_settings(helpers.tiny_env(**helpers.pairs(SHAPE) | more), "smoke")[0]


def random_model(s, machine=CPU) -> train_gpt.GPT:
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
    return trainer.model


def random_ids(s, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, s.vocab_size, (rows, length))


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 1.0, 30.0, 1e4])
def test_the_softcap_is_exact_for_small_and_large_logits(size):
    matrix = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * size
    x = torch.eye(8)
    reference = 30 * torch.tanh((train_gpt.rms_norm(x) @ matrix.T).double() / 30)
    found = train_gpt.head_logits(x, matrix, 30.0, torch.float32)
    assert ((found - reference).abs() <= 1e-6 * reference.abs()).all()


# --- attention: B, T, H, G, K as in train_gpt.py ----------------------------------------------------------


def attention_case(B, T, H, G, K, dtype=torch.float32, gain=1.0, device="cpu"):
    """RMS-normalised q [B, T, G, R, K] (times gain) and k, and random v."""
    generator = torch.Generator().manual_seed(T * H + K)
    q = torch.randn(B, T, G, H // G, K, generator=generator)
    k, v = torch.randn(2, B, T, G, K, generator=generator)
    q = gain * train_gpt.rms_norm(q)
    k = train_gpt.rms_norm(k)
    return [part.to(device, dtype).requires_grad_() for part in (q, k, v)]


def reference_attention(q, k, v, window):
    """parity.py's, in float64 on the CPU, of the same shape as q."""
    parts = (x.double().cpu() for x in (q.flatten(2, 3), k, v))
    return parity.attention(*parts, window).reshape(q.shape).to(q.device)


def assert_attention(parts: list[torch.Tensor], window: float, error: float) -> None:
    """train_gpt's is the reference's: what it finds, within half the error, and its gradients."""
    out = train_gpt.attention(*parts, window)
    reference = reference_attention(*parts, window)
    assert (out.shape, out.dtype) == (reference.shape, parts[0].dtype)
    furthest = (out.double() - reference).abs().max()
    assert furthest < error / 2 * reference.abs().max()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(reference.shape, generator=generator).to(out.device)
    found = torch.autograd.grad((out.float() * weight).sum(), parts)
    slopes = torch.autograd.grad((reference * weight).sum(), parts)
    for grad, want in zip(found, slopes):  # of a single token q and k have no gradient
        furthest = (grad.double() - want).abs().max()
        largest = want.abs().max().item()
        assert furthest < error * max(largest, 1.0)


CASES = """
    2x256x4x2x16 2x130x4x4x8 3x1x2x1x8 1x7x6x2x4 2x127x3x1x16 1x257x8x2x8 1x640x2x2x64 1x300x6x3x2
"""


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("case", CASES.split())
@pytest.mark.parametrize("window", [math.inf, 300, 128, 100, 1])
def test_attention_is_the_references_with_its_gradients(case, dtype, error, window):
    assert_attention(attention_case(*map(int, case.split("x")), dtype), window, error)


@pytest.mark.parametrize("gain", [0.0, 12.0, 200.0])
def test_attention_is_exact_for_any_gain_it_may_learn(gain):
    """A gain of 200 at width 16 makes scores of +-800 nats."""
    parts = attention_case(1, 200, 4, 2, 16, gain=gain)
    reference = reference_attention(*parts, math.inf)
    furthest = (train_gpt.attention(*parts, math.inf) - reference).abs().max()
    assert furthest < 1e-4 * reference.abs().max()


@pytest.mark.parametrize("gain", [-30.0, 100.0, 1e4])
def test_a_runaway_gain_gives_no_nan(gain):
    """Where a query is the key times -30, all that the first token sees has a score of -120 nats."""
    _, k, v = attention_case(1, 200, 2, 2, 16)
    q = k.unsqueeze(3) * gain
    assert train_gpt.attention(q, k, v, math.inf).isfinite().all()


# --- operations -------------------------------------------------------------------------------------------

COUNTED = """
    TRAIN_SEQ_LEN=20
    NUM_KV_HEADS=1
    NUM_LAYERS=6,MUON_BACKEND_STEPS=3,MLP_MULT=7
    TRAIN_SEQ_LEN=1,TRAIN_BATCH_TOKENS=8,NUM_LAYERS=1
    BATCH_SLOTS=1,TRAIN_SEQ_LEN=257,TRAIN_BATCH_TOKENS=514
    BATCH_SLOTS=1,TRAIN_SEQ_LEN=700,TRAIN_BATCH_TOKENS=700,NUM_KV_HEADS=6
    BATCH_SLOTS=1,TRAIN_SEQ_LEN=700,TRAIN_BATCH_TOKENS=700,SHORT_WINDOW=128
    BATCH_SLOTS=1,TRAIN_SEQ_LEN=700,TRAIN_BATCH_TOKENS=700,SHORT_WINDOW=300,NUM_KV_HEADS=6
    BATCH_SLOTS=2,TRAIN_SEQ_LEN=300,TRAIN_BATCH_TOKENS=600,MODEL_DIM=192,NUM_HEADS=3,NUM_KV_HEADS=3
"""


def assert_operations(module, s) -> None:
    """What a step takes is what torch counts. Of the script, or of a patched one."""
    trainer = module.Trainer(s, module.Machine(torch.device("cpu")))
    shape = (s.batch_slots, s.slot_tokens + 1)
    batch = torch.arange(math.prod(shape)).view(shape) % s.vocab_size
    plan = module.Plan(s)
    with FlopCounterMode(display=False) as counter:
        trainer.step(batch, plan.step(0))
    assert plan.flops == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("shape", COUNTED.split())
def test_the_operations_of_a_step_are_those_that_torch_counts(shape):
    assert_operations(train_gpt, tiny(**helpers.pairs(shape.replace(",", " "))))


# --- CUDA graphs, without a GPU ---------------------------------------------------------------------------


class Replaying(Machine):
    """Its recorded functions give every answer in the place of the first, as a CUDA graph does."""

    def recorded(self, function):
        places: list[torch.Tensor] = []

        def replay(x):
            answers = function(x.clone())
            places.extend(answers[len(places) :])
            for place, answer in zip(places, answers):
                place.copy_(answer)
            return tuple(places)

        return replay


def test_steps_are_the_same_when_graphs_overwrite_their_answers():
    """And the weights stay where a graph looks for them: through warm-up, steps, a resume and a load."""
    s = tiny(WARMUP_STEPS=2)
    batches = torch.from_numpy(random_ids(s, 4 * s.batch_slots, s.slot_tokens + 1)).split(s.batch_slots)
    plan = train_gpt.Plan(s)
    done = []
    for machine in (CPU, Replaying(torch.device("cpu"))):
        trainer = Trainer(s, machine)
        place = trainer.model.flat.data_ptr()
        trainer.warm_up(plan)
        losses = [float(trainer.step(batch, plan.step(i))[0]) for i, batch in enumerate(batches)]
        done.append((losses, trainer.sha256(*trainer.optimizer.state)))
        trainer.restore({name: x.numpy().copy() for name, x in trainer.optimizer.state.items()})
        trainer.load(
            {name: x.numpy() for name, x in trainer.model.views(trainer.model.flat.detach()).items()}
        )
        assert trainer.model.flat.data_ptr() == trainer.optimizer.state["weights"].data_ptr() == place
        assert trainer.sha256(*trainer.optimizer.state) == done[-1][1]
    assert done[0] == done[1]


# --- start weights ----------------------------------------------------------------------------------------


def test_start_weights_are_as_the_table_says_by_seed_and_name_alone():
    """The table itself: tests/golden/dry_run_floppy.txt."""
    table = train_gpt.parameter_table(load_settings({}, "floppy")[0])
    drawn = {param.name: train_gpt.draw(param, 5) for param in table}
    for param in table:
        x, scale = drawn[param.name], np.float32(param.scale)
        assert (x.dtype, x.shape) == (np.float32, param.shape)
        assert np.array_equal(x, train_gpt.draw(param._replace(lr=1.0), 5))
        assert np.array_equal(x, train_gpt.draw(param, 6)) == (param.init in ("constant", "last"))
        if param.init == "normal":
            assert x.std() == pytest.approx(scale, rel=0.02)
            assert abs(x.mean()) < scale / 50
        elif param.init == "uniform":
            assert np.abs(x).max() == pytest.approx(scale, rel=0.01)
            assert x.std() == pytest.approx(scale / 3**0.5, rel=0.05)
        else:
            assert (x[-1] == scale).all()
            before = scale if param.init == "constant" else 0
            assert (x[:-1] == before).all()
    assert not np.array_equal(drawn["qkv"][0, :100], drawn["mlp_up"][0, :100])


# --- predictor: fed one token after the other -------------------------------------------------------------


def nats_of_steps(predictor: Predictor, ids: np.ndarray) -> np.ndarray:
    """float64[rows, T]: nats of int64[rows, T], each token fed after its price."""
    logits = [predictor.start(len(ids))]
    for column in ids.T[:-1]:
        logits.append(predictor.step(column))
    for each in logits:
        assert each.dtype == np.float32
        assert each.shape == (len(ids), predictor.vocab_size)
    logprobs = torch.from_numpy(np.stack(logits, 1)).double().log_softmax(-1)
    paid = logprobs.gather(-1, torch.from_numpy(ids).unsqueeze(-1))
    return -paid.squeeze(-1).numpy()


MODELS = {
    "preset": {},
    "no shift": {"KEY_SHIFT": 0},
    "short": {"SHORT_WINDOW": 9},
    "long": {"SHORT_WINDOW": 200},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("window", [7, 20, 250])
def test_a_predictor_says_what_attention_in_a_sliding_window_says(window, kind, monkeypatch):
    """A layer with a short window sees that or the evaluation's, whichever is shorter.

    So in rows of 190 tokens, too, nothing depends on what comes later.
    """
    s = tiny(EVAL_SEQ_LEN=window, **MODELS[kind])
    model = random_model(s)
    ids = random_ids(s, 3, 190)
    found = nats_of_steps(Predictor(model), ids)
    whole = train_gpt.attention

    def bounded(q, k, v, short):
        return whole(q, k, v, min(short, window))

    monkeypatch.setattr(train_gpt, "attention", bounded)
    assert np.abs(found[:, 1:] - model.nll(ids)).max() < 1e-5
    assert np.allclose(found[:, 0], math.log(s.vocab_size))


def test_a_predictor_in_bfloat16_is_near_the_windows_in_bfloat16():
    s = tiny(EVAL_SEQ_LEN=60)
    model = random_model(s, Machine(torch.device("cpu"), dtype=torch.bfloat16))
    ids = random_ids(s, 3, 60)
    difference = nats_of_steps(Predictor(model), ids)[:, 1:] - model.nll(ids)
    assert np.abs(difference).max() < 0.2
    assert abs(difference.mean()) < 0.01


def test_a_predictor_begins_anew_with_any_number_of_rows():
    """What one text was, and in how many streams, shows in no other."""
    s = tiny()
    predictor = Predictor(random_model(s))
    ids = random_ids(s, 5, 50)
    first = nats_of_steps(predictor, ids)
    for rows in (slice(0, 1), slice(1, 4), slice(0, 5)):
        assert np.abs(nats_of_steps(predictor, ids[rows]) - first[rows]).max() < 1e-5
    assert np.array_equal(nats_of_steps(predictor, ids), first)
