"""train_gpt.py on MLX: a Mac's GPU, CUDA or a CPU.

    python train_gpt_mlx.py                                    one process
    torchrun --standalone --nproc_per_node=2 train_gpt_mlx.py  two processes on this machine
    mlx.launch --hostfile hosts.json python train_gpt_mlx.py   one process on each of several machines

Here stand the model, its optimizer, the gradient and the machine in MLX's words. All else is train_gpt.py's:
settings, data, score, artifact, checkpoints, log and the training loop. Both scripts read the same batches
and begin with the same weights. Each goes on from the other's checkpoints and scores the other's artifacts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import sys
import timeit
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import torch.distributed as dist

import train_gpt
from train_gpt import MICRO_TOKENS, NORM_EPS, SettingError

# --- model: B batch, T tokens, D width, H heads, G key-value heads, K head width, V vocabulary ------------


def rms_norm(x):
    """x / sqrt(mean(x^2) + eps) over the last dimension, float32, no weights (Zhang and Sennrich 2019)."""
    return mx.fast.rms_norm(x.astype(mx.float32), None, NORM_EPS)


def rope_tables(s, length):
    """(cos, cos) and (sin, -sin), float32[T, 1, K], of the rotary position embedding (Su et al. 2021)."""
    inverse = s.rope_base ** (-np.arange(0, s.head_dim, 2) / s.head_dim)
    angles = np.outer(np.arange(length), inverse)[:, None]
    angles = np.concatenate([angles, -angles], axis=-1)
    return mx.array(np.cos(angles), mx.float32), mx.array(np.sin(angles), mx.float32)


def norm_and_rotate(x, cos, sin):
    """RMS-normalise each head and turn its pairs (first half, second half) by the angle of their position."""
    x = rms_norm(x)
    first, second = mx.split(x, 2, axis=-1)
    swapped = mx.concatenate([second, first], axis=-1)
    return x * cos + swapped * sin


def attention(q_BTHK, k_BTGK, v_BTGK, window):
    """Causal softmax attention of a query to its last `window` keys, at scale 1 / sqrt(K): of q's shape."""
    q, k, v = (x.swapaxes(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    mask = "causal"
    if window < q.shape[2]:
        places = mx.arange(q.shape[2])
        own = places[:, None]
        mask = (places <= own) & (places > own - window)
    scale = q.shape[-1] ** -0.5
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    return out.swapaxes(1, 2)


def without_own(y_BTHK, v_BTGK):
    """What attention found, without its part along each token's own value; heads of a group share that."""
    v = v_BTGK.astype(mx.float32)
    square = mx.maximum(v.square().sum(-1, keepdims=True), 1e-24)  # a norm has no slope at 0
    own_BTG1K = (v * mx.rsqrt(square))[..., None, :]
    y = mx.unflatten(y_BTHK, 2, (v.shape[2], -1))
    y = y - (y * own_BTG1K).sum(-1, keepdims=True) * own_BTG1K
    return y.reshape(y_BTHK.shape)


def mix_before(k_BTGK, share_GK):
    """Keys in float32, each mixed with the one before: what followed a token is found in a single layer."""
    k = k_BTGK.astype(mx.float32)
    before = mx.pad(k[:, :-1], [(0, 0), (1, 0), (0, 0), (0, 0)])
    return k + share_GK * (before - k)


def block(s, x, x0, cos, sin, w, window):
    """One pre-norm transformer block, [B, T, D] to the same; vectors among its weights act in float32."""
    dtype = x.dtype
    x = w["mix_x"] * x + w["mix_x0"] * x0
    qkv = rms_norm(x).astype(dtype) @ w["qkv"].T
    qkv = mx.unflatten(qkv, 2, (-1, s.head_dim))
    q, k, v = mx.split(qkv, (s.num_heads, s.num_heads + s.num_kv_heads), axis=2)
    q = norm_and_rotate(q, cos, sin) * w["q_gain"][:, None]
    if "key_shift" in w:
        k = mix_before(k, w["key_shift"].reshape(s.num_kv_heads, -1))
    k = norm_and_rotate(k, cos, sin)
    y = attention(q.astype(dtype), k.astype(dtype), v, window)
    if s.exclusive_attention:  # of 2026: what a token's own value says, the stream already holds
        y = without_own(y, v).astype(dtype)
    x = x + w["attn_scale"] * (y.flatten(2) @ w["attn_out"].T)
    y = rms_norm(x).astype(dtype) @ w["mlp_up"].T
    y = mx.maximum(y, s.mlp_leak * y).square()  # So et al. 2021 without the leak, by which all units learn
    x = x + w["mlp_scale"] * (y @ w["mlp_down"].T)
    return x.astype(dtype)


def head_logits(x, matrix, softcap, dtype):
    """[..., D] -> float32[..., V]: final norm, product in dtype, softcap c tanh(z / c)."""
    z = rms_norm(x).astype(dtype) @ matrix.astype(dtype).T
    return softcap * mx.tanh(z.astype(mx.float32) / softcap)


def head_nll(x, matrix, targets, softcap, dtype):
    """float32[B, T]: cross-entropy of each target in nats."""
    logits = head_logits(x, matrix, softcap, dtype)
    hit = mx.take_along_axis(logits, targets[..., None], axis=-1)
    return mx.logsumexp(logits, axis=-1) - hit[..., 0]


def in_passes(ids):
    """Rows of tokens in groups of about MICRO_TOKENS: a Mac's memory may not hold more at once."""
    rows = max(1, MICRO_TOKENS // ids.shape[1])
    return [ids[at : at + rows] for at in range(0, len(ids), rows)]


class GPT:
    """A U-Net of transformer blocks, all parameters of which lie in one flat float32 array.

    MLX takes the gradient of a function, so this array is an argument of the forward pass.
    """

    def __init__(self, s, machine):
        self.s = s
        self.machine = machine
        self.table = train_gpt.parameter_table(s)
        self.sizes = [math.prod(p.shape) for p in self.table]
        self.flat = mx.zeros(sum(self.sizes))
        self.positions = functools.cache(functools.partial(rope_tables, s))
        self.exact_nll = machine.compiled(functools.partial(self.token_nll, dtype=mx.float32))

    def views(self, flat):
        """A flat array as arrays by parameter name."""
        parts = mx.split(flat, np.cumsum(self.sizes)[:-1].tolist())
        return {p.name: part.reshape(p.shape) for p, part in zip(self.table, parts)}

    def weights(self, flat):
        """By name, what is read once and what each layer reads; matrices in the compute dtype."""
        once = {}
        layers = [{} for _ in range(self.s.num_layers)]
        for param, view in zip(self.table, self.views(flat).values()):
            if param.group == "matrix":
                view = view.astype(self.machine.mx_dtype)
            if param.layered:
                for layer, part in zip(layers, mx.split(view, len(layers))):
                    layer[param.name] = part[0]
            else:
                once[param.name] = view
        return once, layers

    def trunk(self, flat, ids):
        """int[B, T] -> the last block's output, [B, T, D] in the compute dtype, and the output matrix."""
        once, layers = self.weights(flat)
        cos, sin = self.positions(ids.shape[1])
        x0 = rms_norm(once["tok_emb"][ids]).astype(self.machine.mx_dtype)
        x = x0
        half = len(layers) // 2
        outputs = []
        for i, (layer, window) in enumerate(zip(layers, self.s.windows)):
            if i >= half and outputs:  # the second half takes up what the first left, last in first out
                skip = once["skip_weight"][i - half] * outputs.pop()
                x = x + skip.astype(x.dtype)
            x = block(self.s, x, x0, cos, sin, layer, window)
            if i < half:
                outputs.append(x)
        return x, once.get("head", once["tok_emb"])

    def token_nll(self, flat, ids, targets, dtype):
        """int[B, T] and their targets -> float32[B, T], nats; the last product in dtype."""
        x, head = self.trunk(flat, ids)
        return head_nll(x, head, targets, self.s.logit_softcap, dtype)

    def loss(self, flat, ids, targets):
        """float32[]: what training minimises."""
        return self.token_nll(flat, ids, targets, self.machine.mx_dtype).mean()

    def nll(self, ids):
        """int64[B, T+1] -> float32[B, T]: nats of ids[:, 1:], each given what stands left of it."""
        parts = []
        for part in in_passes(mx.array(ids)):
            nats = self.exact_nll(self.flat, part[:, :-1], part[:, 1:])
            parts.append(np.array(nats))
        return np.concatenate(parts)


# --- optimizer: Muon for the block matrices, Adam for everything else -------------------------------------


def newton_schulz(stack, steps, dtype):
    """Singular values of [n, rows, cols] to 0.7 to 1.2, in dtype: Muon's quintic (Jordan et al. 2024)."""
    if stack.shape[1] > stack.shape[2]:
        done = newton_schulz(stack.swapaxes(1, 2), steps, dtype)
        return done.swapaxes(1, 2)
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.astype(dtype)
    norm = mx.linalg.norm(x.astype(mx.float32), axis=(1, 2), keepdims=True)
    x = x / (norm + 1e-7).astype(dtype)
    for _ in range(steps):
        gram = x @ x.swapaxes(1, 2)
        even = mx.addmm(gram, gram, gram, alpha=c, beta=b)
        x = mx.addmm(x, even, x, beta=a)
    return x


class Optimizer:
    """One step over the flat parameters. `state`: all that the next step depends on but for its number."""

    def __init__(self, s, model, machine):
        self.s = s
        self.model = model
        self.machine = machine
        self.num_matrix = sum(math.prod(p.shape) for p in model.table if p.group == "matrix")
        matrices, rest = self.split(model.flat)
        self.moments = {
            "momentum": mx.zeros_like(matrices),
            "moment1": mx.zeros_like(rest),
            "moment2": mx.zeros_like(rest),
        }
        rates = np.repeat([p.lr for p in model.table], model.sizes)
        self.rates = mx.array(rates, mx.float32)
        self.adam = machine.compiled(self.adam)

    @property
    def state(self):
        """Arrays by the names that a checkpoint gives them."""
        return {"weights": self.model.flat} | self.moments

    def split(self, flat):
        """A flat array's matrices, which stand first, and the rest."""
        return mx.split(flat, [self.num_matrix])

    def orthogonalize(self, flat):
        """Newton-Schulz on a flat array's matrices, times sqrt(max(1, out / in)); flat, without the rest."""
        s, views = self.s, self.model.views(flat)
        updates = []
        for param in self.model.table:
            if param.group == "matrix":
                ends = np.cumsum(param.parts).tolist()
                done = []
                for stack in mx.split(views[param.name], ends[:-1], axis=1):
                    factor = max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5
                    x = newton_schulz(stack, s.muon_backend_steps, self.machine.mx_dtype)
                    done.append(x.astype(mx.float32) * factor)
                updates.append(mx.concatenate(done, axis=1).flatten())
        return mx.concatenate(updates)

    def adam(self, state, grad, rate, numbers):
        """Weights and moments after a step (Kingma and Ba 2015); what changes with the step: float32[3]."""
        s = self.s
        take, unbias1, unbias2 = numbers
        moment1 = state["moment1"] + (grad - state["moment1"]) * (take * (1 - s.beta1))
        moment2 = state["moment2"] + (grad.square() - state["moment2"]) * (take * (1 - s.beta2))
        root = mx.sqrt(moment2 / unbias2) + s.adam_eps
        weights = state["weights"] - rate * (moment1 / unbias1) / root
        return {"weights": weights, "moment1": moment1, "moment2": moment2}

    def step(self, grad, step, multiplier, take):
        """Update the weights from the flat gradient, float32; where take is 0, and it too, they stay."""
        matrices, rest = self.split(self.model.flat)
        matrix_grad, rest_grad = self.split(grad)
        matrix_rate, rest_rate = self.split(self.rates * (take * multiplier))
        momentum = self.s.plan.muon_momentum(step)
        kept = self.moments["momentum"] * mx.where(take > 0, momentum, 1.0)
        self.moments["momentum"] = kept + matrix_grad
        nesterov = matrix_grad + momentum * self.moments["momentum"]
        update = self.orthogonalize(mx.concatenate([nesterov, rest_grad]))
        matrices = matrices - update * matrix_rate
        unbias = mx.array([1 - beta ** (step + 1) for beta in (self.s.beta1, self.s.beta2)])
        numbers = mx.concatenate([take[None], unbias])
        new = self.adam(self.moments | {"weights": rest}, rest_grad, rest_rate, numbers)
        self.model.flat = mx.concatenate([matrices, new.pop("weights")])
        self.moments |= new


# --- training: a step; the loop is train_gpt.py's ---------------------------------------------------------


class Trainer(train_gpt.Trainer):
    """Model and optimizer of one run on this rank."""

    def __init__(self, s, machine):
        self.s = s
        self.machine = machine
        self.model = GPT(s, machine)
        self.size = sum(self.model.sizes)
        self.loss_and_slope = machine.compiled(mx.value_and_grad(self.model.loss))
        self.reset()

    def reset(self):
        """Start weights, and an optimizer that has seen nothing."""
        self.load({p.name: train_gpt.draw(p, self.s.seed) for p in self.model.table})
        self.optimizer = Optimizer(self.s, self.model, self.machine)

    def load(self, weights):
        """Take over float32 weights by name."""
        flat = np.concatenate([weights[p.name].ravel() for p in self.model.table])
        self.model.flat = mx.array(flat)

    def gradient(self, batch, seq_len):
        """float32[size + 1]: gradient of the mean loss of int64[n, slot_tokens + 1], and that loss."""
        total = mx.zeros(self.size + 1)
        ids = batch[:, :-1].reshape(-1, seq_len)
        targets = batch[:, 1:].reshape(-1, seq_len)
        for part, wanted in zip(in_passes(ids), in_passes(targets)):
            loss, slope = self.loss_and_slope(self.model.flat, part, wanted)
            weight = part.size / (ids.size * self.machine.world)
            total = total + mx.concatenate([slope, loss[None]]) * weight
            mx.async_eval(total)  # else all passes would wait in memory for the last one
        return total

    def step(self, batch, step, multiplier):
        """One optimizer step on this rank's slots, int64[n, slot_tokens + 1]: float32[4], as train_gpt's."""
        total = self.gradient(batch, self.s.plan.step(step).seq_len)
        bad = ~mx.isfinite(total.sum())
        total = self.machine.all_sum(total)
        grad, loss = total[: self.size], total[self.size]
        norm = mx.linalg.norm(grad)
        take = mx.isfinite(loss + norm)  # not so on one rank is not so in the sum: all ranks skip alike
        if self.s.grad_clip_norm:
            grad = grad * mx.minimum(self.s.grad_clip_norm / (norm + 1e-6), 1.0)
        grad = mx.where(take, grad, 0.0)
        self.optimizer.step(grad, step, multiplier, take.astype(mx.float32))
        stats = mx.stack([x.astype(mx.float32) for x in (loss, norm, take, bad)])
        mx.async_eval(stats, self.optimizer.state)
        return stats

    def restore(self, arrays):
        """Take over the state of a checkpoint, float32 arrays by name."""
        self.model.flat = mx.array(arrays["weights"])
        for name in self.optimizer.moments:
            self.optimizer.moments[name] = mx.array(arrays[name])


# --- machine: device, ranks, number format, compiler ------------------------------------------------------


@dataclasses.dataclass
class Machine(train_gpt.Machine):
    """Where this process computes. `device` and `dtype` are torch's names of what MLX uses.

    The ranks speak through torch's gloo: MLX's ring waits for a lost rank for ever, and does not name it.
    """

    @property
    def mx_dtype(self):
        """MLX's name of `dtype`."""
        return getattr(mx, str(self.dtype).removeprefix("torch."))

    def all_sum(self, x):
        """The sum of all ranks' arrays, float32."""
        if self.world == 1:
            return x
        tensor = torch.from_numpy(np.array(x))
        self.all(dist.all_reduce, tensor)
        return mx.array(tensor.numpy())

    def tensor(self, array):
        return mx.array(array)

    def numpy(self, tensor):
        return np.array(tensor)

    def compiled(self, function):
        """The function through mx.compile, where that works."""
        return mx.compile(function) if self.compile else function

    def product_speed(self, dtype):
        """Operations per second of a large matrix product, the best of three."""
        side = 512 if self.device.type == "cpu" else 4096
        a, b = mx.random.normal((2, side, side)).astype(getattr(mx, dtype))
        mx.eval(a, b)
        seconds = timeit.repeat(lambda: mx.eval(a @ b), number=1, repeat=4)
        return 2 * side**3 / min(seconds[1:])

    def facts(self):
        """What bits may depend on."""
        gpu = "none"
        if self.device.type != "cpu":
            gpu = mx.device_info().get("device_name", "of no name")
        dtype = str(self.dtype).removeprefix("torch.")
        return {"mlx": mx.__version__, "torch": torch.__version__, "gpu": gpu, "dtype": dtype}

    def peak_memory_mib(self):
        """Of MLX's arrays."""
        return mx.get_peak_memory() // 2**20


def open_machine(s):
    """Device, process group and compiler. Raises SettingError for what is not there."""
    here = {"mps": mx.metal.is_available(), "cuda": mx.cuda.is_available(), "cpu": True}
    kind = s.device
    if kind == "auto":
        kind = next(name for name, found in here.items() if found)
    if not here[kind]:
        raise SettingError(f"DEVICE={kind}: mlx {mx.__version__} finds none here")
    mx.set_default_device(mx.cpu if kind == "cpu" else mx.gpu)
    listen_to_mlx_launch()
    ranks = train_gpt.open_machine(dataclasses.replace(s, device="cpu", compile=False))
    machine = Machine(**vars(ranks))
    machine.device = torch.device(kind)
    machine.compile = s.compile and can_compile(kind)
    return machine


def can_compile(kind):
    """Whether mx.compile works; if not, a line says why."""
    why = ""
    if kind == "cpu" and not shutil.which("g++"):  # MLX would do without it and not say so
        why = "no g++"
    try:
        mx.eval(mx.compile(lambda x: mx.exp(x) * x)(mx.ones(3)))
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
    if why:
        print(f"compile:0 (mx.compile fails, so eager and slower: {why})", flush=True)
    return not why


def listen_to_mlx_launch():
    """Write what mlx.launch gives each process where torch looks for its ranks. Raises SettingError."""
    path = os.environ.get("MLX_HOSTFILE", os.devnull)
    try:
        hosts = json.loads(Path(path).read_text() or "[]")
        if not hosts:  # one process
            return
        address, port = hosts[0][0].rsplit(":", 1)
        rank = range(len(hosts))[int(os.environ["MLX_RANK"])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise SettingError(f"MLX_HOSTFILE={path}: takes what mlx.launch writes; {found}") from None
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


if __name__ == "__main__":
    sys.exit(train_gpt.main(open_machine, Trainer, __file__))
