"""The model and its optimizer once more, in float64 and as plain as can be; torch derives the gradients.

    python -m tests.parity          writes tests/golden/parity.npz anew: the same bytes on the same machine

Written matrix by matrix, for reading and not for speed. It imports neither script: both are held against it
(test_parity.py). A fork that changes the model changes it here, too, and writes the file anew.

The file holds, for each case of CASES, under `<case>/`: settings (text, NAME=value words), start/<parameter>
float32, tokens uint16[steps, slots, slot tokens + 1], logits float64[rows, T, V] of the first slot of step 0,
grad/<parameter> float64 of step 0's mean loss, and, each float64[steps], losses (nats),
grad_norms, lr_muls and momenta.

Letters: B batch, T tokens, D width, H heads, G key-value heads, R = H / G, K head width, V vocabulary.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden" / "parity.npz"
NORM_EPS = 1e-6
STEPS = 10
MATRICES = ("qkv", "attn_out", "mlp_up", "mlp_down")
Array = np.ndarray
Arrays = dict[str, Array]
Weights = dict[str, Tensor]


# --- model ------------------------------------------------------------------------------------------------


def norm(x: Tensor) -> Tensor:
    """Over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)


def rotate(x: Tensor, base: float) -> Tensor:
    """RoPE by halves (Su et al. 2021), x [B, T, heads, K]: each pair turns by position * base^(-2j / K)."""
    length, width = x.shape[1], x.shape[3]
    position = torch.arange(length)[:, None, None]
    pair = torch.arange(0, width, 2).double()
    angle = position * base ** (-pair / width)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, -1)
    turned = (first * cos + second * sin, second * cos - first * sin)
    return torch.cat(turned, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal, q [B, T, H, K], k and v [B, T, G, K]; a position sees itself and the `window - 1` before it."""
    position = torch.arange(q.shape[1])
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2)


def remove_own_value(y: Tensor, v: Tensor) -> Tensor:
    """y [B, T, H, K] without its part along the same token's values v [B, T, G, K], h by h // R."""
    own = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    unit = own.repeat_interleave(y.shape[2] // v.shape[2], 2)
    return y - (y * unit).sum(-1, keepdim=True) * unit


def kv_shift(x: Tensor, share: Tensor) -> Tensor:
    """x [B, T, G, K]; of the token before each comes a share [G, K]. Before the first stand zeros."""
    before = torch.zeros_like(x)
    before[:, 1:] = x[:, :-1]
    return (1 - share) * x + share * before


def self_attention(s: Any, w: Weights, x: Tensor, window: int) -> Tensor:
    """The attention half of a block, [B, T, D], without its residual."""
    B, T, D = x.shape
    K = D // s.num_heads
    kv_dim = s.num_kv_heads * K
    flat = norm(x) @ w["qkv"].T
    parts = flat.split([D, kv_dim, kv_dim], -1)
    q, k, v = (part.reshape(B, T, -1, K) for part in parts)
    if s.key_shift:
        k = kv_shift(k, w["key_shift"].reshape(-1, K))
    q, k = (rotate(norm(x), s.rope_base) for x in (q, k))
    y = attention(q * w["q_gain"][:, None], k, v, window)
    if s.exclusive_attention:
        y = remove_own_value(y, v)
    return y.reshape(B, T, D) @ w["attn_out"].T


def mlp(s: Any, w: Weights, x: Tensor) -> Tensor:
    """The other half of a block, [B, T, D]; So et al. 2021, whose slope below zero is 0."""
    up = norm(x) @ w["mlp_up"].T
    leaky = torch.where(up > 0, up, s.mlp_leak * up)
    return leaky**2 @ w["mlp_down"].T


def block(s: Any, w: Weights, x: Tensor, x0: Tensor, window: int) -> Tensor:
    """Mix with x0, add attention, add MLP."""
    x = w["mix_x"] * x + w["mix_x0"] * x0
    x = x + w["attn_scale"] * self_attention(s, w, x, window)
    return x + w["mlp_scale"] * mlp(s, w, x)


def trunk(s: Any, w: Weights, ids: Tensor) -> Tensor:
    """ids [B, T] -> the last block's output [B, T, D]: a U-Net, whose second half takes up the first's."""
    layered = w.keys() - {"tok_emb", "skip_weight"}
    half, stack = s.num_layers // 2, []
    x = x0 = norm(w["tok_emb"][ids])
    for i in range(s.num_layers):
        if i >= half and stack:
            skip = w["skip_weight"][i - half]
            x = x + skip * stack.pop()
        own = {name: w[name][i] for name in layered}
        last = i == s.num_layers - 1
        window = s.train_seq_len if last or not s.short_window else s.short_window
        x = block(s, own, x, x0, window)
        if i < half:
            stack.append(x)
    return x


def logits_and_gradient(s: Any, w: Arrays, ids: Array, targets: Array) -> tuple[Array, float, Arrays]:
    """float64 logits [B, T, V] of ids [B, T], the mean loss of the targets in nats, its gradient by name."""
    weights = {name: torch.tensor(value, requires_grad=True) for name, value in w.items()}
    x = norm(trunk(s, weights, torch.from_numpy(ids)))
    z = x @ weights["tok_emb"].T
    logits = s.logit_softcap * torch.tanh(z / s.logit_softcap)
    every = torch.from_numpy(targets).flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), every)
    grads = torch.autograd.grad(loss, [*weights.values()], materialize_grads=True)  # one layer has no skips
    by_name = {name: grad.numpy() for name, grad in zip(weights, grads)}
    return logits.detach().numpy(), loss.item(), by_name


def sequences(s: Any, slots: Array) -> tuple[Array, Array]:
    """Tokens [slots, slot tokens + 1] -> ids and targets [sequences, T]."""
    slots = slots.astype(np.int64)
    ids, targets = slots[:, :-1], slots[:, 1:]
    return ids.reshape(-1, s.train_seq_len), targets.reshape(-1, s.train_seq_len)


# --- schedules and optimizer ------------------------------------------------------------------------------


def lr_multiplier(s: Any, step: int) -> float:
    """Linear rise, constant, linear fall to zero over the last WARMDOWN_ITERS steps (below 1: part)."""
    fall = s.warmdown_iters * s.iterations if s.warmdown_iters < 1 else s.warmdown_iters
    rise = (step + 1) / s.lr_warmup_steps if s.lr_warmup_steps else 1.0
    left = (s.iterations - step) / fall if fall else 1.0
    return min(1.0, rise) * min(1.0, left)


def muon_momentum(s: Any, step: int) -> float:
    if step >= s.muon_momentum_warmup_steps:
        return s.muon_momentum
    start = s.muon_momentum_warmup_start
    return start + (s.muon_momentum - start) * step / s.muon_momentum_warmup_steps


def newton_schulz(g: Array, steps: int) -> Array:
    """Muon's quintic iteration on one matrix (Jordan et al. 2024), on its transpose if that is wider."""
    if g.shape[0] > g.shape[1]:
        return newton_schulz(g.T, steps).T
    x = g / (np.sqrt((g * g).sum()) + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class Optimizer:
    """Muon for the blocks' matrices, one by one, Adam for the rest. Changes the weights in place."""

    def __init__(self, s: Any, w: Arrays):
        self.s, self.w = s, w
        self.first = {name: np.zeros_like(value) for name, value in w.items()}
        self.second = {name: np.zeros_like(value) for name, value in w.items()}

    def muon(self, w: Array, m: Array, g: Array, step: int, rate: float) -> None:
        """One matrix [out, in] and its momentum, in place; Nesterov."""
        mu = muon_momentum(self.s, step)
        m[:] = mu * m + g
        update = newton_schulz(g + mu * m, self.s.muon_backend_steps)
        longer = max(1.0, w.shape[0] / w.shape[1])
        w -= rate * (longer**0.5 * update + self.s.weight_decay * w)

    def adam(self, name: str, g: Array, step: int, rate: float) -> None:
        """Kingma and Ba 2015."""
        b1, b2 = self.s.beta1, self.s.beta2
        m, v = self.first[name], self.second[name]
        m[:] = b1 * m + (1 - b1) * g
        v[:] = b2 * v + (1 - b2) * g * g
        mean = m / (1 - b1 ** (step + 1))
        root = np.sqrt(v / (1 - b2 ** (step + 1)))
        self.w[name] -= rate * mean / (root + self.s.adam_eps)

    def step(self, grads: Arrays, step: int, multiplier: float) -> float:
        """Returns the norm of the whole gradient."""
        s = self.s
        kv_dim = s.model_dim // s.num_heads * s.num_kv_heads
        for name, g in grads.items():
            if name not in MATRICES:
                rate = s.tied_embed_lr if name == "tok_emb" else s.scalar_lr
                self.adam(name, g, step, multiplier * rate)
                continue
            cuts = [s.model_dim, s.model_dim + kv_dim] if name == "qkv" else []  # q, k and v apart
            for layer in zip(self.w[name], self.first[name], g):
                parts = zip(*(np.split(stack, cuts) for stack in layer))  # views
                for w, m, part in parts:
                    self.muon(w, m, part, step, multiplier * s.matrix_lr)
        return np.sqrt(sum((g * g).sum() for g in grads.values()))


# --- golden file ------------------------------------------------------------------------------------------

SHAPE = """
    VOCAB_SIZE=40 NUM_LAYERS=3 MODEL_DIM=16 NUM_HEADS=4 NUM_KV_HEADS=2 KEY_SHIFT=0.5 MLP_MULT=2
    SHORT_WINDOW=5 EXCLUSIVE_ATTENTION=1 MLP_LEAK=0.3
    ROPE_BASE=100 LOGIT_SOFTCAP=4 QK_GAIN_INIT=1.5
    TRAIN_SEQ_LEN=12 BATCH_SLOTS=2 TRAIN_BATCH_TOKENS=48
"""
# Every schedule is in motion within the ten steps.
TRAINING = """
    ITERATIONS=10 WEIGHT_DECAY=0.3 WARMDOWN_ITERS=0.4 LR_WARMUP_STEPS=3 TIED_EMBED_LR=0.02
    MATRIX_LR=0.02 SCALAR_LR=0.03 MUON_MOMENTUM=0.95 MUON_MOMENTUM_WARMUP_START=0.8
    MUON_MOMENTUM_WARMUP_STEPS=6 MUON_BACKEND_STEPS=5 BETA1=0.85 BETA2=0.96 ADAM_EPS=1e-8
"""
PLAIN = """
    NUM_LAYERS=4 MODEL_DIM=12 NUM_HEADS=6 NUM_KV_HEADS=1 KEY_SHIFT=0 MLP_MULT=3 VOCAB_SIZE=33
    SHORT_WINDOW=0 EXCLUSIVE_ATTENTION=0 MLP_LEAK=0
    MATRIX_LR=0.01 TIED_EMBED_LR=0.01 MUON_BACKEND_STEPS=3 ADAM_EPS=1e-4 WARMDOWN_ITERS=5
    ROPE_BASE=10000 LOGIT_SOFTCAP=30 WEIGHT_DECAY=0
"""
FRESH = "NUM_LAYERS=2 MODEL_DIM=8 NUM_HEADS=2 NUM_KV_HEADS=2 LOGIT_SOFTCAP=30"
# A later word counts. In `fresh` the weights are as at a run's start: zero or one where they begin so.
CASES = {"full": SHAPE + TRAINING, "plain": SHAPE + TRAINING + PLAIN, "fresh": SHAPE + TRAINING + FRESH}


def read_settings(text: str) -> SimpleNamespace:
    """The NAME=value words of a case as numbers by name in lower case."""
    words = dict(word.lower().split("=") for word in text.split())
    return SimpleNamespace(**{name: json.loads(value) for name, value in words.items()})


def shapes(s: Any) -> dict[str, tuple[int, ...]]:
    """Of all parameters: stacks over the layers, matrices [out, in], qkv three of them."""
    L, D, kv_dim = s.num_layers, s.model_dim, s.model_dim // s.num_heads * s.num_kv_heads
    named = {
        "qkv": (L, D + 2 * kv_dim, D),
        "attn_out": (L, D, D),
        "mlp_up": (L, s.mlp_mult * D, D),
        "mlp_down": (L, D, s.mlp_mult * D),
        "tok_emb": (s.vocab_size, D),
        "attn_scale": (L, D),
        "mlp_scale": (L, D),
        "mix_x": (L, D),
        "mix_x0": (L, D),
        "key_shift": (L, kv_dim),
        "q_gain": (L, s.num_heads),
        "skip_weight": (L // 2, D),
    }
    if not s.key_shift:
        del named["key_shift"]
    return named


def start_weights(s: Any, rng: np.random.Generator, fresh: bool = False) -> Arrays:
    """float32 by name; unless fresh, everything is moved away from where it starts, so that all has slope."""
    ones = dict.fromkeys(("attn_scale", "mlp_scale", "mix_x", "skip_weight"), 1.0)
    zeros = dict.fromkeys(("attn_out", "mlp_down", "mix_x0"), 0.0)
    constant, weights = ones | zeros | {"q_gain": s.qk_gain_init, "key_shift": s.key_shift}, {}
    for name, shape in shapes(s).items():
        spread = s.model_dim**-0.5 if name in (*MATRICES, "tok_emb") else 0.3
        if fresh and name in constant:
            spread = 0.0
        uniform = 2 * rng.random(shape) - 1
        value = constant.get(name, 0.0) + 3**0.5 * spread * uniform
        weights[name] = value.astype(np.float32)
    return weights


def results(s: Any, start: Arrays, tokens: Array) -> Arrays:
    """What the golden file says of a model that begins with these weights and trains on these tokens."""
    w = {name: value.astype(np.float64) for name, value in start.items()}
    optimizer, steps = Optimizer(s, w), []
    logits, _, grads = logits_and_gradient(s, w, *sequences(s, tokens[0]))
    named = {f"grad/{name}": grad for name, grad in grads.items()}
    for step, slots in enumerate(tokens):
        _, loss, grads = logits_and_gradient(s, w, *sequences(s, slots))
        multiplier = lr_multiplier(s, step)
        steps.append((loss, optimizer.step(grads, step, multiplier), multiplier, muon_momentum(s, step)))
    rows = dict(zip(("losses", "grad_norms", "lr_muls", "momenta"), np.array(steps).T))
    return {"logits": logits[: len(logits) // s.batch_slots], **named, **rows}


def make() -> Arrays:
    """All arrays of the golden file by name."""
    arrays = {}
    for seed, (case, text) in enumerate(CASES.items()):
        s, rng = read_settings(text), np.random.Generator(np.random.PCG64(seed))
        start = start_weights(s, rng, case == "fresh")
        slot = (s.batch_slots, s.train_batch_tokens // s.batch_slots + 1)
        tokens = (s.vocab_size * rng.random((STEPS, *slot)) ** 2).astype(np.uint16)  # low ids are frequent
        arrays[f"{case}/settings"] = np.array(" ".join(text.split()))
        arrays |= {f"{case}/tokens": tokens} | {f"{case}/start/{name}": w for name, w in start.items()}
        arrays |= {f"{case}/{name}": value for name, value in results(s, start, tokens).items()}
    return arrays


if __name__ == "__main__":
    np.savez(GOLDEN, **make())  # not compressed: the bytes depend on no version of zlib
    sys.stdout.write(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes\n")
