"""Model, optimizer and score against plain re-tellings of SEED.md in float64, matrix by matrix."""
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
import train_gpt
from train_gpt import GPT, Machine, Optimizer, Predictor, Trainer, eval_windows, evaluate, load_settings

CPU = Machine(torch.device("cpu"))


def tiny(**more):
    """Settings of a model that is small in every dimension, but has no two equal."""
    shape = dict(VOCAB_SIZE=50, MODEL_DIM=24, NUM_HEADS=6, NUM_KV_HEADS=2, NUM_LAYERS=3, TRAIN_SEQ_LEN=20,
                 TRAIN_BATCH_TOKENS=320, MLP_MULT=3)
    return load_settings(helpers.tiny_env(**shape | more), "smoke")[0]


def random_model(s, seed: int = 0) -> GPT:
    """All weights random, those too that start at zero or one."""
    model, rng = GPT(s, CPU), np.random.default_rng(seed)
    values = {p.name: (rng.standard_normal(p.shape) * 0.3 + (p.group == "vector")).astype(np.float32)
              for p in train_gpt.parameter_table(s)}
    model.weights.set(model.weights.pack(values))
    return model


def random_ids(s, rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, s.vocab_size, (rows, length))


# --- the model of SEED.md, told once more -----------------------------------------------------------------

def told_norm(x):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def told_rotation(x, base: float):
    """RoPE by halves, x: [T, K]."""
    length, width = x.shape
    angle = torch.arange(length)[:, None].double() * base ** (-torch.arange(0, width, 2).double() / width)
    a, b = x[:, :width // 2], x[:, width // 2:]
    return torch.cat([a * angle.cos() + b * angle.sin(), -a * angle.sin() + b * angle.cos()], 1)


def told_attention(q, k, v):
    """One head, [T, K] each."""
    scores = q @ k.T / math.sqrt(q.size(1))
    future = torch.ones(len(q), len(q)).triu(1).bool()
    return scores.masked_fill(future, -math.inf).softmax(1) @ v


def told_block(s, w: dict, i: int, x, x0):
    dim, kv = s.model_dim, s.kv_dim
    x = w["mix_x"][i] * x + w["mix_x0"][i] * x0
    q, k, v = ((told_norm(x) @ part.T).split(s.head_dim, 1) for part in w["qkv"][i].split([dim, kv, kv]))
    heads = []
    for h in range(s.num_heads):
        g = h // (s.num_heads // s.num_kv_heads)
        turned = [told_rotation(told_norm(part), s.rope_base) for part in (q[h], k[g])]
        heads.append(told_attention(turned[0] * w["q_gain"][i, h], turned[1], v[g]))
    x = x + w["attn_scale"][i] * (torch.cat(heads, 1) @ w["attn_out"][i].T)
    hidden = torch.relu(told_norm(x) @ w["mlp_up"][i].T) ** 2
    return x + w["mlp_scale"][i] * (hidden @ w["mlp_down"][i].T)


def told_logits(s, w: dict, ids):
    """float64 [T, V] of one row of ids: a U-Net of blocks."""
    x = x0 = told_norm(w["tok_emb"][ids])
    stack = []
    for i in range(s.num_layers):
        if i >= s.num_layers // 2 and stack:
            x = x + w["skip_weight"][i - s.num_layers // 2] * stack.pop()
        x = told_block(s, w, i, x, x0)
        if i < s.num_layers // 2:
            stack.append(x)
    z = told_norm(x) @ w["tok_emb" if s.tie_embeddings else "head"].T
    return s.logit_softcap * torch.tanh(z / s.logit_softcap)


def told_weights(model: GPT) -> dict:
    views = model.weights.views(model.weights.flat)
    return {name: view.detach().double().requires_grad_() for name, view in views.items()}


SHAPES = [dict(), dict(NUM_LAYERS=1), dict(NUM_LAYERS=4, TIE_EMBEDDINGS=0),
          dict(NUM_KV_HEADS=6, ROPE_BASE=100), dict(NUM_LAYERS=5, NUM_KV_HEADS=1, LOGIT_SOFTCAP=2),
          dict(MODEL_DIM=32, NUM_HEADS=4, NUM_KV_HEADS=4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_and_loss_are_those_of_the_told_model(shape):
    s = tiny(**shape)
    model, ids = random_model(s), random_ids(s, 3, 41)
    predictor, w = Predictor(model), told_weights(model)
    with torch.no_grad():
        told = torch.stack([told_logits(s, w, row).log_softmax(-1) for row in torch.from_numpy(ids)]).numpy()
    found = predictor.logprobs(ids)
    assert found.dtype == np.float32 and found.shape == (3, 41, 50)
    assert np.abs(found - told).max() < 1e-5 * np.abs(told).max()
    nll = predictor.nll(ids)
    assert nll.dtype == np.float32 and nll.shape == (3, 40)
    expected = -np.take_along_axis(told[:, :-1], ids[:, 1:, None], 2)[..., 0]
    assert np.abs(nll - expected).max() < 1e-5 * np.abs(told).max()
    assert nll.mean(dtype=np.float64) == pytest.approx(expected.mean(), rel=1e-5)


def told_gradient(s, model: GPT, batch: np.ndarray) -> dict:
    """float64, by name, of the mean loss over all slots; a slot is cut in sequences."""
    w, losses = told_weights(model), []
    for tokens in torch.from_numpy(batch):
        for ids, targets in zip(tokens[:-1].split(s.train_seq_len), tokens[1:].split(s.train_seq_len)):
            losses.append(F.cross_entropy(told_logits(s, w, ids), targets))
    loss = torch.stack(losses).mean()
    loss.backward()
    return {"loss": loss.item()} | {name: value.grad for name, value in w.items()}


def gradient_of_a_step(s, model_seed: int, batch: np.ndarray, monkeypatch) -> tuple[Trainer, float, dict]:
    """What Trainer.step hands to the optimizer."""
    trainer, seen = Trainer(s, CPU), []
    trainer.weights.set(random_model(s, model_seed).weights.flat)
    monkeypatch.setattr(trainer.optimizer, "step", lambda grad, *_: seen.append(grad.clone()))
    stats = trainer.step(torch.from_numpy(batch), 0, 1.0)
    return trainer, float(stats[0]), trainer.weights.views(seen[0])


@pytest.mark.parametrize("micro_tokens", [1, 100, 8192])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_the_gradient_of_a_step_is_that_of_the_told_model(shape, micro_tokens, monkeypatch):
    """However many slots share a forward pass."""
    monkeypatch.setattr(train_gpt, "MICRO_TOKENS", micro_tokens)
    s = tiny(**shape)
    batch = random_ids(s, s.batch_slots, s.slot_tokens + 1)
    trainer, loss, found = gradient_of_a_step(s, 1, batch, monkeypatch)
    told = told_gradient(s, trainer.model, batch)
    assert loss == pytest.approx(told["loss"], rel=1e-5)
    for name, grad in found.items():
        if grad.numel():        # one layer has no skip weights
            largest = told[name].abs().max()
            assert 0 < largest and (grad - told[name]).abs().max() <= 2e-5 * largest, name


def test_the_gradient_is_the_slope_of_the_loss(monkeypatch):
    """Finite differences in the told model: no derivative is taken for granted."""
    s = tiny(NUM_LAYERS=2)
    batch = random_ids(s, s.batch_slots, s.slot_tokens + 1)
    trainer, _, found = gradient_of_a_step(s, 2, batch, monkeypatch)
    w = {name: value.detach() for name, value in told_weights(trainer.model).items()}
    rng = np.random.default_rng(0)

    def loss() -> float:
        rows = torch.from_numpy(batch).view(-1, s.slot_tokens + 1)
        parts = [F.cross_entropy(told_logits(s, w, ids), targets) for row in rows for ids, targets in
                 zip(row[:-1].split(s.train_seq_len), row[1:].split(s.train_seq_len))]
        return torch.stack(parts).mean().item()
    for name, value in w.items():
        flat, at = value.view(-1), int(rng.integers(value.numel()))
        kept = flat[at].item()
        flat[at] = kept + 1e-5
        above = loss()
        flat[at] = kept - 1e-5
        slope = (above - loss()) / 2e-5
        flat[at] = kept
        grad = found[name].flatten()[at].item()
        assert slope == pytest.approx(grad, rel=1e-3, abs=1e-7), name


def test_the_gradient_is_clipped_to_its_norm(monkeypatch):
    s = tiny(NUM_LAYERS=2)
    batch = random_ids(s, s.batch_slots, s.slot_tokens + 1)
    whole = torch.cat([part.flatten() for part in gradient_of_a_step(s, 1, batch, monkeypatch)[2].values()])
    for limit in (whole.norm().item() / 10, whole.norm().item() * 10):
        clipped = gradient_of_a_step(tiny(NUM_LAYERS=2, GRAD_CLIP_NORM=limit), 1, batch, monkeypatch)[2]
        found = torch.cat([part.flatten() for part in clipped.values()])
        assert torch.allclose(found, whole * min(1.0, limit / whole.norm().item()), rtol=1e-4, atol=1e-9)


def test_a_row_of_the_predictor_depends_on_nothing_right_of_it_or_in_other_rows():
    s = tiny(TRAIN_SEQ_LEN=300, TRAIN_BATCH_TOKENS=2400)
    predictor, ids = Predictor(random_model(s)), random_ids(s, 2, 300)
    whole = predictor.logprobs(ids)
    for cut in (1, 127, 128, 200, 299):
        changed = ids.copy()
        changed[0, cut:] = (changed[0, cut:] + 7) % s.vocab_size
        found = predictor.logprobs(changed)
        assert np.allclose(found[0, :cut], whole[0, :cut], atol=1e-5)
        assert np.abs(found[0, cut] - whole[0, cut]).max() > 1e-3
        assert np.allclose(found[1], whole[1], atol=1e-5)
        shorter = predictor.logprobs(ids[:, :cut])
        assert np.allclose(shorter, whole[:, :cut], atol=1e-5)


def test_logprobs_are_distributions_and_agree_with_nll():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        s = tiny()
        model = GPT(s, Machine(torch.device("cpu"), dtype=dtype))
        model.weights.set(random_model(s).weights.flat)
        predictor, ids = Predictor(model), random_ids(s, 4, 33)
        logprobs = predictor.logprobs(ids)
        assert np.allclose(np.exp(logprobs.astype(np.float64)).sum(-1), 1, atol=1e-5)
        expected = -np.take_along_axis(logprobs[:, :-1], ids[:, 1:, None], 2)[..., 0]
        # not bit for bit: the two come from products of another shape
        assert np.abs(predictor.nll(ids) - expected).max() < (tolerance if dtype == torch.float32 else 0.1)
        assert (predictor.vocab_size, predictor.max_len) == (50, 20)


def test_logits_are_softcapped():
    s = tiny(LOGIT_SOFTCAP=0.5)
    logprobs = Predictor(random_model(s)).logprobs(random_ids(s, 2, 20))
    spread = logprobs.max(-1) - logprobs.min(-1)
    assert spread.max() <= 1.0 and spread.max() > 0.9


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 1.0, 30.0, 1e4])
def test_the_softcap_is_exact_for_small_and_large_logits(size):
    z = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 8)) * size).float()
    identity = torch.eye(8) * math.sqrt(8)
    x = train_gpt.rms_norm(torch.eye(8))    # rows of sqrt(8) at one place: the product picks z / sqrt(8)
    found = train_gpt.head_logits(x, z / math.sqrt(8), 30.0, torch.float32)
    told = 30 * torch.tanh(F.linear(identity.double(), (z / math.sqrt(8)).double()) / 30)
    assert ((found - told).abs() <= 1e-6 * told.abs()).all()


# --- attention --------------------------------------------------------------------------------------------

def attention_case(B, T, H, G, K, dtype, gain=1.0):
    """RMS-normalised q (times gain) and k, random v and a random weight of each output."""
    generator = torch.Generator().manual_seed(T * H + K)
    q, k, v, out = (torch.randn(B, T, n, K, generator=generator) for n in (H, G, G, H))
    parts = [(train_gpt.rms_norm(q) * gain), train_gpt.rms_norm(k), v]
    return [part.to(dtype).requires_grad_() for part in parts], out.flatten(2)


def math_attention(q, k, v):
    """PyTorch's own, in float64."""
    repeats = q.size(2) // k.size(2)
    q, k, v = q.double(), k.double().repeat_interleave(repeats, 2), v.double().repeat_interleave(repeats, 2)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2).flatten(2)


CASES = [(2, 256, 4, 2, 16), (1, 128, 2, 1, 32), (2, 130, 4, 4, 8), (3, 1, 2, 1, 8), (1, 7, 6, 2, 4),
         (2, 127, 3, 1, 16), (1, 257, 8, 2, 8), (1, 640, 2, 2, 64), (1, 300, 6, 3, 2)]


@pytest.mark.parametrize("dtype, out_error, grad_error",
                         [(torch.float32, 2e-6, 1e-5), (torch.bfloat16, 0.02, 0.04)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_causal_attention_is_pytorchs_with_its_gradients(case, dtype, out_error, grad_error):
    parts, weight = attention_case(*case, dtype, gain=1.5)
    for function in (train_gpt.block_causal_attention, train_gpt.attention):
        out = function(*parts)
        told = math_attention(*parts)
        assert out.shape == told.shape and out.dtype == dtype
        assert (out.double() - told).abs().max() < out_error * told.abs().max()
        grads = torch.autograd.grad((out.float() * weight).sum(), parts)
        expected = torch.autograd.grad((told * weight).sum(), parts)
        for grad, want in zip(grads, expected):     # of a single token q and k have no gradient
            assert (grad.double() - want).abs().max() < grad_error * max(want.abs().max().item(), 1.0)


@pytest.mark.parametrize("gain", [0.0, 12.0, 20.0, 200.0])
def test_attention_is_exact_for_any_gain_it_may_learn(gain):
    """A gain of 200 at width 16 makes scores of +-800 nats."""
    parts, _ = attention_case(1, 200, 4, 2, 16, torch.float32, gain)
    out = train_gpt.block_causal_attention(*parts)
    told = math_attention(*parts)
    assert (out - told).abs().max() < 1e-4 * told.abs().max()


@pytest.mark.parametrize("gain", [-30.0, 100.0, 1e4])
def test_a_runaway_gain_gives_no_nan(gain):
    """Where a query is the key times -30, all that the first token sees has a score of -120 nats."""
    (_, k, v), _ = attention_case(1, 200, 2, 2, 16, torch.float32)
    assert train_gpt.block_causal_attention(k * gain, k, v).isfinite().all()


def test_rms_norm_has_its_own_eps():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, -1e-3]])
    size, half = math.sqrt(12.5 + 1e-6), math.sqrt(0.5)
    expected = [[3 / size, 4 / size], [0, 0], [half, -half]]
    assert torch.allclose(train_gpt.rms_norm(x), torch.tensor(expected), rtol=1e-6)
    assert train_gpt.rms_norm(x.bfloat16()).dtype == torch.float32


# --- start weights ----------------------------------------------------------------------------------------

def start_weights(**more) -> dict:
    trainer = Trainer(tiny(**more), CPU)
    return {name: view.clone() for name, view in trainer.weights.views(trainer.weights.flat).items()}


def test_start_weights_are_those_of_seed_md():
    w = start_weights(VOCAB_SIZE=2000, TIED_EMBED_INIT_STD=0.005, QK_GAIN_INIT=1.25)
    assert w["tok_emb"].std().item() == pytest.approx(0.005, rel=0.02) and abs(w["tok_emb"].mean()) < 1e-4
    for name, value in dict(attn_out=0, mlp_down=0, attn_scale=1, mlp_scale=1, mix_x=1, mix_x0=0, q_gain=1.25,
                            skip_weight=1).items():
        assert (w[name] == value).all(), name
    for name in ("qkv", "mlp_up"):
        assert w[name].std() > 0.05 and len(w[name].unique()) > 0.99 * w[name].numel()


def test_start_weights_depend_on_the_seed_and_the_name_alone():
    torch.manual_seed(5)
    one = start_weights(SEED=5)
    torch.manual_seed(6)
    again, other = start_weights(SEED=5, MATRIX_LR=1, DATA_ORDER="sequential"), start_weights(SEED=6)
    untied = start_weights(SEED=5, TIE_EMBEDDINGS=0, TIED_EMBED_INIT_STD=0.005)
    for name in ("qkv", "mlp_up", "tok_emb"):
        assert torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name])
    assert torch.equal(one["qkv"], untied["qkv"])
    assert not torch.equal(one["qkv"][0, :24], one["mlp_up"][0, :24])
    wider = start_weights(SEED=5, VOCAB_SIZE=60)
    assert torch.equal(one["tok_emb"], wider["tok_emb"][:50]) and torch.equal(one["mlp_up"], wider["mlp_up"])


# --- optimizer --------------------------------------------------------------------------------------------

def with_singular_values(values: np.ndarray, rows: int, cols: int, seed: int) -> tuple[torch.Tensor, ...]:
    """(U S V^T, U, V) in float32 with random singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, rows, generator=generator).double())[0]
    v = torch.linalg.qr(torch.randn(cols, rows, generator=generator).double())[0]
    return (u * torch.tensor(values).double() @ v.T).float(), u, v


@pytest.mark.parametrize("dtype, low, high, loose",
                         [(torch.float32, 0.65, 1.25, 1e-4), (torch.bfloat16, 0.5, 1.35, 0.1)])
@pytest.mark.parametrize("rows, cols", [(1, 1), (1, 9), (8, 8), (16, 64), (24, 25), (64, 512)])
def test_newton_schulz_brings_singular_values_to_a_band(rows, cols, dtype, low, high, loose):
    """And the singular vectors stay where they are."""
    for scale in (1e-4, 1.0, 1e4):
        values = np.geomspace(0.05, 1, rows) * scale
        x, u, v = with_singular_values(values, rows, cols, rows)
        done = train_gpt.newton_schulz(x[None].to(dtype), 5)[0].double()
        found = u.T @ done @ v
        assert low < found.diagonal().min() and found.diagonal().max() < high
        assert (found - found.diagonal().diag()).abs().max() < loose


def test_newton_schulz_of_a_stack_is_that_of_each_matrix_alone():
    sizes = torch.tensor([1, 9, 1e-3, 5, 0.0])[:, None, None]
    stack = torch.randn(5, 12, 40, generator=torch.Generator().manual_seed(0)) * sizes
    done = train_gpt.newton_schulz(stack.clone(), 5)
    for single, one in zip(stack, done):
        assert torch.allclose(train_gpt.newton_schulz(single[None], 5)[0], one, atol=1e-5)
    assert (done[4] == 0).all() and done.isfinite().all()


def told_newton_schulz(g: np.ndarray, steps: int) -> np.ndarray:
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class ToldOptimizer:
    """SEED.md's Muon and Adam in float64, matrix by matrix and vector by vector."""

    def __init__(self, s, weights: dict):
        self.s, self.w = s, {name: value.astype(np.float64) for name, value in weights.items()}
        self.m = {name: np.zeros_like(value) for name, value in self.w.items()}
        self.v = {name: np.zeros_like(value) for name, value in self.w.items()}
        self.ema = {name: value.copy() for name, value in self.w.items()}

    def muon(self, name: str, grad, mu: float, rate: float):
        s, w, m = self.s, self.w[name], self.m[name]
        ends = np.cumsum([s.model_dim, s.kv_dim])       # where qkv falls into three matrices
        for layer in range(s.num_layers):
            m[layer] = mu * m[layer] + grad[layer]
            update = grad[layer] + mu * m[layer]
            parts = np.split(update, ends) if name == "qkv" else [update]
            done = [told_newton_schulz(part, s.muon_backend_steps)
                    * max(1, part.shape[0] / part.shape[1]) ** 0.5 for part in parts]
            w[layer] -= rate * s.weight_decay * w[layer] + rate * np.concatenate(done)

    def step(self, grads: dict, step: int, multiplier: float):
        s = self.s
        warm = min(1, step / s.muon_momentum_warmup_steps)
        mu = s.muon_momentum_warmup_start + warm * (s.muon_momentum - s.muon_momentum_warmup_start)
        rates = {"tok_emb": s.tied_embed_lr if s.tie_embeddings else s.embed_lr, "head": s.head_lr}
        for name, grad in grads.items():
            if name in ("qkv", "attn_out", "mlp_up", "mlp_down"):
                self.muon(name, grad, mu, s.matrix_lr * multiplier)
                continue
            self.m[name] = s.beta1 * self.m[name] + (1 - s.beta1) * grad
            self.v[name] = s.beta2 * self.v[name] + (1 - s.beta2) * grad ** 2
            m, v = self.m[name] / (1 - s.beta1 ** (step + 1)), self.v[name] / (1 - s.beta2 ** (step + 1))
            rate = rates.get(name, s.scalar_lr) * multiplier
            self.w[name] = self.w[name] - rate * m / (np.sqrt(v) + s.adam_eps)
        decay = min(s.ema_decay, (1 + step) / (10 + step))      # forgets the start weights soon
        self.ema = {name: decay * self.ema[name] + (1 - decay) * value for name, value in self.w.items()}


@pytest.mark.parametrize("more", [
    dict(), dict(TIE_EMBEDDINGS=0, WEIGHT_DECAY=0.5, EMA_DECAY=0.9, MUON_BACKEND_STEPS=3)], ids=str)
def test_six_steps_are_those_of_the_told_optimizer(more):
    s = tiny(MUON_MOMENTUM_WARMUP_STEPS=4, SCALAR_LR=0.05, ADAM_EPS=1e-3, **more)
    model, rng = random_model(s), np.random.default_rng(7)
    optimizer = Optimizer(s, model.weights, CPU)
    start = {name: view.numpy().copy() for name, view in model.weights.views(model.weights.flat).items()}
    told = ToldOptimizer(s, start)
    for step in range(6):
        grads = {name: rng.standard_normal(value.shape).astype(np.float32) for name, value in start.items()}
        optimizer.step(model.weights.pack(grads), step, multiplier := 1 - step / 10)
        told.step({name: grad.astype(np.float64) for name, grad in grads.items()}, step, multiplier)
    for name, view in model.weights.views(model.weights.flat).items():
        moved = np.abs(told.w[name] - start[name]).max(initial=0)
        assert moved > 0.01 or not view.numel()
        assert np.abs(view.numpy() - told.w[name]).max(initial=0) < 1e-3 * moved, name
    if s.ema_decay:
        for name, view in model.weights.views(optimizer.ema).items():
            assert np.abs(view.numpy() - told.ema[name]).max(initial=0) < 1e-3, name


def test_the_optimizer_changes_what_the_model_computes():
    """The compute copy of the weights must not lag behind the master weights."""
    s = tiny()
    model, ids = random_model(s), random_ids(s, 2, 20)
    optimizer, before = Optimizer(s, model.weights, CPU), Predictor(model).logprobs(ids)
    optimizer.step(torch.randn(len(model.weights.flat), generator=torch.Generator().manual_seed(0)), 0, 1.0)
    after, fresh = Predictor(model).logprobs(ids), random_model(s, 5)
    fresh.weights.set(model.weights.flat)
    assert np.abs(after - before).max() > 1e-3 and np.array_equal(Predictor(fresh).logprobs(ids), after)


def test_a_moving_average_is_what_is_scored_and_exported():
    s = tiny(EMA_DECAY=0.5, VAL_BATCH_SIZE=400)
    trainer = Trainer(s, CPU)
    for step in range(3):
        trainer.step(torch.from_numpy(random_ids(s, s.batch_slots, s.slot_tokens + 1, step)), step, 1.0)
    trained = trainer.weights.flat.clone()
    tokens = random_ids(s, 1, 200)[0].astype(np.uint16)
    text = SimpleNamespace(val_tokens=tokens, val_bytes=np.ones(200, np.int32))
    averaged = GPT(s, CPU)
    averaged.weights.set(trainer.optimizer.ema)
    found, expected = trainer.score(text), evaluate(s, Predictor(averaged).nll, text, CPU)
    assert found == expected != evaluate(s, trainer.predictor.nll, text, CPU)
    assert torch.equal(trainer.weights.flat, trained)
    decoded = train_gpt.decode_artifact(trainer.export(), "x")[1]
    ema = averaged.weights.views(averaged.weights.flat)
    assert np.array_equal(decoded["q_gain"], ema["q_gain"].numpy())
    assert np.allclose(decoded["qkv"], ema["qkv"].numpy(), rtol=1e-3, atol=1e-6)


# --- score ------------------------------------------------------------------------------------------------

sizes = st.tuples(st.integers(2, 200), st.integers(1, 60), st.data())


@settings(max_examples=300)
@given(sizes)
def test_windows_score_every_token_once_with_enough_before_it(case):
    total, window, data = case
    stride = data.draw(st.integers(1, window))
    window, stride = min(window, total - 1), min(stride, window, total - 1)
    scored = []
    for start, first, end in eval_windows(total, window, stride).tolist():
        assert 0 <= start < first <= end <= total - 1 and end - start <= window
        scored += range(first, end + 1)
        assert all(target - start >= min(target, window - stride) for target in range(first, end + 1))
    assert scored == list(range(1, total))


def told_nats(tokens: list[int], window: int, stride: int, value) -> float:
    """Window by window, token by token: what `value` makes of each target and all before it in its window."""
    nats, done, start = 0.0, 0, 0
    while done < len(tokens) - 1:
        end = min(start + window, len(tokens) - 1)
        nats += sum(value(tokens[start:target + 1]) for target in range(done + 1, end + 1))
        done, start = end, start + stride
    return nats


def checksum_nll(ids: np.ndarray, last: int = 0) -> np.ndarray:
    """A stand-in for a model: a value for each of the last targets that depends on all tokens before it."""
    return (np.cumsum(ids, 1)[:, 1:] % 97).astype(np.float32)[:, -last:]


class Rank:
    """One of several ranks, each a thread: what evaluate asks of a Machine."""

    def __init__(self, rank: int, world: int, box: list, barrier: threading.Barrier):
        self.rank, self.world, self.box, self.barrier, self.signals = rank, world, box, barrier, []

    def share(self, *numbers):
        self.box[self.rank] = [float(number) for number in numbers]
        self.barrier.wait(30)
        return list(self.box)


def scores_of_ranks(world: int, s, text, nll) -> list:
    box, barrier, scores = [None] * world, threading.Barrier(world), [None] * world

    def score(rank: int) -> None:
        try:
            scores[rank] = evaluate(s, nll, text, Rank(rank, world, box, barrier))
        except BaseException:
            barrier.abort()         # the others need not wait
            raise
    threads = [threading.Thread(target=score, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in scores, "a rank failed"
    return scores


@settings(max_examples=150)
@given(sizes, st.integers(1, 4000), st.sampled_from([1, 2, 4, 8]), st.integers(0, 250))
def test_the_score_is_the_told_one_for_any_window_batch_and_number_of_ranks(case, batch, world, limit):
    total, window, data = case
    limit = 0 if limit < 2 else limit
    stride = data.draw(st.integers(1, window))
    s = tiny(EVAL_SEQ_LEN=window, EVAL_STRIDE=stride, VAL_BATCH_SIZE=batch, VAL_TOKENS_LIMIT=limit)
    rng, shapes = np.random.default_rng(total), set()
    tokens = rng.integers(0, 65536, total).astype(np.uint16)
    worth = rng.integers(0, 9, total).astype(np.int32)
    worth[1] += 1

    def nll(ids: np.ndarray, *last: int) -> np.ndarray:
        assert ids.dtype == np.int64
        shapes.add(ids.shape)
        return checksum_nll(ids, *last)
    scores = scores_of_ranks(world, s, SimpleNamespace(val_tokens=tokens, val_bytes=worth), nll)
    used = min(total, limit or total)
    nats = told_nats(tokens[:used].tolist(), min(window, used - 1), min(stride, window, used - 1),
                     lambda seen: sum(seen) % 97)
    for score in scores:
        assert score[2:] == (used - 1, worth[1:used].sum(), used < total)       # tokens, bytes, partial
        assert score.val_loss == pytest.approx(nats / (used - 1), rel=1e-12)
        assert score.val_bpb == pytest.approx(nats / math.log(2) / worth[1:used].sum(), rel=1e-12)
        assert score.line().endswith("partial") == (used < total)
    assert len(shapes) == 1, "one shape, so that a compiled model compiles once"


@pytest.mark.parametrize("window, stride", [(20, 20), (20, 7), (33, 1), (1, 1)])
def test_the_score_of_a_model_is_what_its_distributions_say(window, stride):
    s = tiny(EVAL_SEQ_LEN=window, EVAL_STRIDE=stride, VAL_BATCH_SIZE=1600)
    predictor, tokens = Predictor(random_model(s)), random_ids(s, 1, 150)[0].astype(np.uint16)
    text = SimpleNamespace(val_tokens=tokens, val_bytes=np.full(150, 3, np.int32))

    def surprise(seen: list[int]) -> float:
        return -float(predictor.logprobs(np.array([seen[:-1]]))[0, -1, seen[-1]])
    score = evaluate(s, predictor.nll, text, CPU)
    nats = told_nats(tokens.tolist(), window, stride, surprise)
    assert score.val_loss * 149 == pytest.approx(nats, rel=1e-5)
    assert score.val_bpb == pytest.approx(score.val_loss / math.log(2) / 3, rel=1e-9)


def test_text_of_one_token_cannot_be_scored():
    text = SimpleNamespace(val_tokens=np.zeros(1, np.uint16), val_bytes=np.zeros(1, np.int32))
    with pytest.raises(train_gpt.DataError, match="expected at least 2"):
        evaluate(tiny(), checksum_nll, text, CPU)


# --- sampling ---------------------------------------------------------------------------------------------

def test_a_sample_follows_the_distribution_the_seed_and_nothing_else(tokenizer_path):
    tokenizer = train_gpt.load_tokenizer(tiny(TOKENIZER_PATH=tokenizer_path, VOCAB_SIZE=400))[0]
    word = next(i for i in range(3, 400) if len(tokenizer.decode([i])) > 2)
    certain = SimpleNamespace(max_len=300, vocab_size=400, logprobs=lambda ids: np.where(
        np.arange(400) == word, 0.0, -1e9)[None, None].repeat(ids.shape[1], 1).astype(np.float32))
    text = train_gpt.sample(certain, tokenizer, 1)
    assert 100 < len(text) < 600 and text == (tokenizer.decode([word]) * 200)[:len(text)]
    s = tiny(VOCAB_SIZE=400)
    predictor = Predictor(random_model(s))
    texts = [train_gpt.sample(predictor, tokenizer, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and all(0 < len(text) < 600 for text in texts)
