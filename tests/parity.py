"""The model, its gradients and its optimizer once more: numpy, float64, every derivative by hand.

    python -m tests.parity          writes tests/golden/parity.npz anew: the same bytes on the same machine

Written matrix by matrix, for reading and not for speed. It imports neither script: both are held against it
(test_parity.py). A fork that changes the model changes it here, too, and writes the file anew.

The file holds, for each case of CASES, under `<case>/`: settings (text, NAME=value words), start/<parameter>
float32, tokens uint16[steps, slots, slot tokens + 1], logits float64[rows, T, V] of the first slot of step 0,
grad/<parameter> float64 of step 0's mean loss, and, each float64[steps], losses (nats),
grad_norms, lr_muls and momenta.

Each function of the model returns its value and a function: from the gradient of the loss by the value to
the gradients by the arguments. Letters: B batch, T tokens (S when they are keys), D width, H heads, G
key-value heads, R = H / G, K head width, V vocabulary.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "parity.npz"
NORM_EPS = 1e-6
STEPS = 10
MATRICES = ("qkv", "attn_out", "mlp_up", "mlp_down")
Array = np.ndarray
Weights = dict[str, Array]


# --- layers: value, and gradients of the arguments --------------------------------------------------------


def norm(x: Array) -> tuple[Array, Callable]:
    """y = x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019)."""
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + NORM_EPS)
    y = x * r

    def back(dy: Array) -> Array:
        along = (dy * y).mean(-1, keepdims=True)
        return r * (dy - y * along)

    return y, back


def linear(x: Array, w: Array) -> tuple[Array, Callable]:
    """x [..., in] times w [out, in]."""

    def back(dy: Array) -> tuple[Array, Array]:
        rows = dy.reshape(-1, len(w))
        dw = rows.T @ x.reshape(-1, w.shape[1])
        return dy @ w, dw

    return x @ w.T, back


def scale(x: Array, w: Array) -> tuple[Array, Callable]:
    """x [B, T, ...] times a vector (or one number a head), the same for every token."""
    shared = tuple(range(x.ndim - w.ndim))

    def back(dy: Array) -> tuple[Array, Array]:
        dw = (dy * x).sum(shared)
        return dy * w, dw

    return x * w, back


def rotate(x: Array, base: float) -> tuple[Array, Callable]:
    """RoPE by halves (Su et al. 2021), x [B, T, heads, K]: each pair turns by position * base^(-2j / K)."""
    length, width = x.shape[1], x.shape[3]
    angle = np.arange(length)[:, None, None] * base ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(angle), np.sin(angle)

    def turn(x: Array, sin: Array) -> Array:
        first, second = np.split(x, 2, -1)
        return np.concatenate([first * cos + second * sin, -first * sin + second * cos], -1)

    return turn(x, sin), lambda dy: turn(dy, -sin)  # the inverse of a rotation is its transpose


def attention(q: Array, k: Array, v: Array, window: int) -> tuple[Array, Callable]:
    """Causal softmax attention, q [B, T, H, K], k and v [B, T, G, K]: head h reads key-value head h // R.

    A position sees the last `window` ones, itself among them.
    """
    (B, T, H, K), G = q.shape, k.shape[2]
    grouped = q.reshape(B, T, G, H // G, K)
    scores = np.einsum("btgrk,bsgk->bgrts", grouped, k) / np.sqrt(K)
    distance = np.arange(T)[:, None] - np.arange(T)
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)

    def back(dy: Array) -> tuple[Array, Array, Array]:
        dy = dy.reshape(B, T, G, H // G, K)
        dp = np.einsum("btgrk,bsgk->bgrts", dy, v)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(K)
        dq = np.einsum("bgrts,bsgk->btgrk", ds, k).reshape(q.shape)
        return dq, np.einsum("bgrts,btgrk->bsgk", ds, grouped), np.einsum("bgrts,btgrk->bsgk", p, dy)

    return np.einsum("bgrts,bsgk->btgrk", p, v).reshape(q.shape), back


def remove_own_value(y: Array, v: Array) -> tuple[Array, Callable]:
    """y [B, T, H, K] without its part along the same token's values v [B, T, G, K], h by h // R."""
    size = np.linalg.norm(v, axis=-1, keepdims=True)
    own = v / size
    repeats = y.shape[2] // v.shape[2]
    unit = np.repeat(own, repeats, axis=2)
    along = (y * unit).sum(-1, keepdims=True)

    def back(dout: Array) -> tuple[Array, Array]:
        dalong = (dout * unit).sum(-1, keepdims=True)
        dunit = -dalong * y - along * dout
        down = dunit.reshape(*v.shape[:3], repeats, -1).sum(3)
        turn = down - (down * own).sum(-1, keepdims=True) * own  # longer values have the same direction
        return dout - dalong * unit, turn / size

    return y - along * unit, back


def leaky_squared(x: Array, slope: float) -> tuple[Array, Callable]:
    """So et al. 2021, whose slope below zero is 0."""
    leaky = np.where(x > 0, x, slope * x)
    return leaky**2, lambda dy: dy * 2 * leaky * np.where(x > 0, 1, slope)


def kv_shift(x: Array, share: Array) -> tuple[Array, Callable]:
    """x [B, T, G, K]; of the token before each comes a share [G, K]. Before the first stand zeros."""
    before = np.zeros_like(x)
    before[:, 1:] = x[:, :-1]

    def back(dy: Array) -> tuple[Array, Array]:
        later = np.zeros_like(dy)
        later[:, :-1] = dy[:, 1:]
        dshare = (dy * (before - x)).sum((0, 1))
        return (1 - share) * dy + share * later, dshare

    return (1 - share) * x + share * before, back


def softcap(z: Array, c: float) -> tuple[Array, Callable]:
    y = c * np.tanh(z / c)
    return y, lambda dy: dy * (1 - (y / c) ** 2)


def cross_entropy(logits: Array, targets: Array) -> tuple[float, Array]:
    """Mean nats of targets [B, T], and its gradient by the logits."""
    top = logits.max(-1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    hit = np.arange(logits.shape[-1]) == targets[..., None]
    return -logprobs[hit].mean(), (np.exp(logprobs) - hit) / targets.size


# --- model ------------------------------------------------------------------------------------------------


def self_attention(s: Any, w: Weights, x: Array, window: int) -> tuple[Array, Callable]:
    """The attention half of a block, [B, T, D], without its residual."""
    B, T, D = x.shape
    K = D // s.num_heads
    kv_dim = s.num_kv_heads * K
    normed, norm_back = norm(x)
    flat, project_back = linear(normed, w["qkv"])
    parts = np.split(flat, [D, D + kv_dim], -1)
    q, k, v = (part.reshape(B, T, -1, K) for part in parts)
    if s.key_shift:
        k, mix_back = kv_shift(k, w["key_shift"].reshape(-1, K))
    q, q_norm_back = norm(q)
    k, k_norm_back = norm(k)
    q, q_turn_back = rotate(q, s.rope_base)
    k, k_turn_back = rotate(k, s.rope_base)
    q, gain_back = scale(q, w["q_gain"][:, None])
    y, attend_back = attention(q, k, v, window)
    if s.exclusive_attention:
        y, own_back = remove_own_value(y, v)
    out, out_back = linear(y.reshape(B, T, D), w["attn_out"])

    def back(dout: Array) -> tuple[Array, Weights]:
        dy, d_attn_out = out_back(dout)
        dy, d_own = own_back(dy.reshape(y.shape)) if s.exclusive_attention else (dy, 0.0)
        dq, dk, dv = attend_back(dy)
        dv = dv + d_own
        dq, d_gain = gain_back(dq)
        dq = q_norm_back(q_turn_back(dq))
        dk = k_norm_back(k_turn_back(dk))
        grads = {}
        if s.key_shift:
            dk, d_shift = mix_back(dk)
            grads["key_shift"] = d_shift.reshape(-1)
        dflat = np.concatenate([part.reshape(B, T, -1) for part in (dq, dk, dv)], -1)
        dnormed, d_qkv = project_back(dflat)
        # the gain is one number for all K of a head
        grads |= {"qkv": d_qkv, "attn_out": d_attn_out, "q_gain": d_gain.sum(-1)}
        return norm_back(dnormed), grads

    return out, back


def mlp(s: Any, w: Weights, x: Array) -> tuple[Array, Callable]:
    """The other half of a block, [B, T, D], without its residual."""
    normed, norm_back = norm(x)
    up, up_back = linear(normed, w["mlp_up"])
    hidden, relu_back = leaky_squared(up, s.mlp_leak)
    down, down_back = linear(hidden, w["mlp_down"])

    def back(dy: Array) -> tuple[Array, Weights]:
        dhidden, d_down = down_back(dy)
        dnormed, d_up = up_back(relu_back(dhidden))
        return norm_back(dnormed), {"mlp_up": d_up, "mlp_down": d_down}

    return down, back


def block(s: Any, w: Weights, x: Array, x0: Array, window: int) -> tuple[Array, Callable]:
    """Mix with x0, add attention, add MLP. Back: gradients of x, x0 and, by name, of the weights."""
    kept, kept_back = scale(x, w["mix_x"])
    again, again_back = scale(x0, w["mix_x0"])
    mixed = kept + again
    y, attention_back = self_attention(s, w, mixed, window)
    scaled, attn_scale_back = scale(y, w["attn_scale"])
    middle = mixed + scaled
    z, mlp_back = mlp(s, w, middle)
    more, mlp_scale_back = scale(z, w["mlp_scale"])

    def back(dout: Array) -> tuple[Array, Array, Weights]:
        dz, d_mlp_scale = mlp_scale_back(dout)
        dmiddle, d_mlp = mlp_back(dz)
        dmiddle = dmiddle + dout
        dy, d_attn_scale = attn_scale_back(dmiddle)
        dmixed, d_attention = attention_back(dy)
        dmixed = dmixed + dmiddle
        (dx, d_mix_x), (dx0, d_mix_x0) = kept_back(dmixed), again_back(dmixed)
        grads = {**d_attention, **d_mlp, "mix_x": d_mix_x, "mix_x0": d_mix_x0}
        return dx, dx0, grads | {"attn_scale": d_attn_scale, "mlp_scale": d_mlp_scale}

    return middle + more, back


def trunk(s: Any, w: Weights, ids: Array) -> tuple[Array, Callable]:
    """ids [B, T] -> the last block's output [B, T, D]. Back: gradients of all weights of the trunk."""
    half, stack, skips, block_backs = s.num_layers // 2, [], {}, []
    x0, embed_back = norm(w["tok_emb"][ids])
    x = x0
    for i in range(s.num_layers):
        if i >= half and stack:
            pushed_by, left = stack.pop()
            skipped, skip_back = scale(left, w["skip_weight"][i - half])
            skips[i] = pushed_by, skip_back
            x = x + skipped
        own = {name: w[name][i] for name in w if name not in ("tok_emb", "skip_weight")}
        last = i == s.num_layers - 1
        window = s.train_seq_len if last or not s.short_window else s.short_window
        x, back_of_block = block(s, own, x, x0, window)
        block_backs.append(back_of_block)
        if i < half:
            stack.append((i, x))

    def back(dx: Array) -> Weights:
        grads = {name: np.zeros_like(value) for name, value in w.items()}
        dx0, later = 0.0, {}  # gradients that reach the output of a first-half block by its skip
        for i in reversed(range(s.num_layers)):
            dx, dx0_here, here = block_backs[i](dx + later.pop(i, 0.0))
            dx0 = dx0 + dx0_here
            for name, grad in here.items():
                grads[name][i] = grad
            if i in skips:
                pushed_by, skip_back = skips[i]
                later[pushed_by], grads["skip_weight"][i - half] = skip_back(dx)
        np.add.at(grads["tok_emb"], ids, embed_back(dx0 + dx))
        return grads

    return x, back


def logits_and_gradient(s: Any, w: Weights, ids: Array, targets: Array) -> tuple[Array, float, Weights]:
    """float64 logits [B, T, V] of ids [B, T], the mean loss of the targets in nats, its gradient by name."""
    x, trunk_back = trunk(s, w, ids)
    normed, norm_back = norm(x)
    z, head_back = linear(normed, w["tok_emb"])
    logits, cap_back = softcap(z, s.logit_softcap)
    loss, dlogits = cross_entropy(logits, targets)
    dnormed, d_matrix = head_back(cap_back(dlogits))
    grads = trunk_back(norm_back(dnormed))
    grads["tok_emb"] += d_matrix  # beside what it gets as the input's table
    return logits, loss, grads


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
    return min(1.0, rise) * (min(1.0, (s.iterations - step) / fall) if fall else 1.0)


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

    def __init__(self, s: Any, w: Weights):
        self.s, self.w = s, w
        self.first = {name: np.zeros_like(value) for name, value in w.items()}
        self.second = {name: np.zeros_like(value) for name, value in w.items()}

    def muon(self, w: Array, m: Array, g: Array, step: int, rate: float) -> None:
        """One matrix [out, in] and its momentum, in place; Nesterov."""
        mu = muon_momentum(self.s, step)
        m[:] = mu * m + g
        update = newton_schulz(g + mu * m, self.s.muon_backend_steps)
        w -= rate * max(1.0, w.shape[0] / w.shape[1]) ** 0.5 * update

    def adam(self, name: str, g: Array, step: int, rate: float) -> None:
        """Kingma and Ba 2015."""
        b1, b2 = self.s.beta1, self.s.beta2
        m, v = self.first[name], self.second[name]
        m[:] = b1 * m + (1 - b1) * g
        v[:] = b2 * v + (1 - b2) * g * g
        root = np.sqrt(v / (1 - b2 ** (step + 1)))
        self.w[name] -= rate * m / (1 - b1 ** (step + 1)) / (root + self.s.adam_eps)

    def step(self, grads: Weights, step: int, multiplier: float) -> float:
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
    ITERATIONS=10 WARMDOWN_ITERS=0.4 LR_WARMUP_STEPS=3 TIED_EMBED_LR=0.02
    MATRIX_LR=0.02 SCALAR_LR=0.03 MUON_MOMENTUM=0.95 MUON_MOMENTUM_WARMUP_START=0.8
    MUON_MOMENTUM_WARMUP_STEPS=6 MUON_BACKEND_STEPS=5 BETA1=0.85 BETA2=0.96 ADAM_EPS=1e-8
"""
PLAIN = """
    NUM_LAYERS=4 MODEL_DIM=12 NUM_HEADS=6 NUM_KV_HEADS=1 KEY_SHIFT=0 MLP_MULT=3 VOCAB_SIZE=33
    SHORT_WINDOW=0 EXCLUSIVE_ATTENTION=0 MLP_LEAK=0
    MATRIX_LR=0.01 TIED_EMBED_LR=0.01 MUON_BACKEND_STEPS=3 ADAM_EPS=1e-4 WARMDOWN_ITERS=5
    ROPE_BASE=10000 LOGIT_SOFTCAP=30
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


def start_weights(s: Any, rng: np.random.Generator, fresh: bool = False) -> Weights:
    """float32 by name; unless fresh, everything is moved away from where it starts, so that all has slope."""
    ones = dict.fromkeys(("attn_scale", "mlp_scale", "mix_x", "skip_weight"), 1.0)
    zeros = dict.fromkeys(("attn_out", "mlp_down", "mix_x0"), 0.0)
    constant, weights = ones | zeros | {"q_gain": s.qk_gain_init, "key_shift": s.key_shift}, {}
    for name, shape in shapes(s).items():
        spread = s.model_dim**-0.5 if name in (*MATRICES, "tok_emb") else 0.3
        if fresh and name in constant:
            spread = 0.0
        value = constant.get(name, 0.0) + 3**0.5 * spread * (2 * rng.random(shape) - 1)
        weights[name] = value.astype(np.float32)
    return weights


def results(s: Any, start: Weights, tokens: Array) -> dict[str, Array]:
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


def make() -> dict[str, Array]:
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
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()  # refuses all but --help
    np.savez(GOLDEN, **make())  # not compressed: the bytes depend on no version of zlib
    sys.stdout.write(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes\n")
