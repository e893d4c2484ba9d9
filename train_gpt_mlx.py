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
import importlib.metadata
import json
import math
import os
import shutil
import sys
import timeit
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import torch.distributed as dist

import train_gpt
from train_gpt import MICRO_TOKENS, NORM_EPS, Arrays, Facts, Function, SettingError, Settings, Step

Weights = dict[str, mx.array]  # by parameter name
MLX_VERSION = importlib.metadata.version("mlx")
evaluate_soon: Function = mx.async_eval

# --- model: B batch, T tokens, D width, H heads, G key-value heads, K head width, V vocabulary


def rms_norm(x: mx.array) -> mx.array:
    """x / sqrt(mean(x^2) + eps) over the last dimension, float32 (Zhang and Sennrich 2019)."""
    return mx.fast.rms_norm(x.astype(mx.float32), None, NORM_EPS)


def rope_tables(s: Settings, length: int) -> tuple[mx.array, mx.array]:
    """(cos, cos) and (sin, -sin), float32[T, 1, K], of rotary positions (Su et al. 2021)."""
    inverse = s.rope_base ** (-np.arange(0, s.head_dim, 2) / s.head_dim)
    angles = np.outer(np.arange(length), inverse)[:, None]
    angles = np.concatenate([angles, -angles], axis=-1)
    return mx.array(np.cos(angles), mx.float32), mx.array(np.sin(angles), mx.float32)


def norm_and_rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """RMS-normalise each head and turn its pairs, one of each half, by the position."""
    x = rms_norm(x)
    first, second = mx.split(x, 2, axis=-1)
    swapped = mx.concatenate([second, first], axis=-1)
    return x * cos + swapped * sin


def attention(q_BTHK: mx.array, k_BTGK: mx.array, v_BTGK: mx.array, window: float) -> mx.array:
    """Causal softmax attention to the last `window` keys, scale 1 / sqrt(K): of q's shape."""
    q, k, v = (x.swapaxes(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    mask: Any = "causal"
    if window < q.shape[2]:
        places = mx.arange(q.shape[2])
        own = places[:, None]
        mask = (places <= own) & (places > own - window)
    scale = q.shape[-1] ** -0.5
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    return out.swapaxes(1, 2)


def kv_shift(k_BTGK: mx.array, share_GK: mx.array) -> mx.array:
    """float32 keys, each mixed with the one before: induction (Olsson et al. 2022)."""
    # KV-shifting attention (Xu et al. 2024, arXiv:2411.19574), RWKV (Peng et al. 2023).
    k = k_BTGK.astype(mx.float32)
    before = mx.pad(k[:, :-1], [(0, 0), (1, 0), (0, 0), (0, 0)])
    return k + share_GK * (before - k)


def remove_own_value(y_BTHK: mx.array, v_BTGK: mx.array) -> mx.array:
    """What attention found, float32, without its part along each token's own value."""
    # Exclusive self-attention (Zhai 2026, arXiv:2603.09078): the stream already holds that.
    v = v_BTGK.astype(mx.float32)
    square = mx.maximum(v.square().sum(-1, keepdims=True), 1e-24)  # a norm has no slope at 0
    own_BTG1K = (v * mx.rsqrt(square))[..., None, :]
    y = mx.unflatten(y_BTHK, 2, (v.shape[2], -1))
    along = (y * own_BTG1K).sum(-1, keepdims=True)
    return (y - along * own_BTG1K).reshape(y_BTHK.shape)


def attend(s: Settings, x: mx.array, rope: tuple[mx.array, mx.array], w: Weights, window: float) -> mx.array:
    """The attention of a block, [B, T, D] in the compute dtype to the same."""
    cos, sin = rope
    qkv = mx.unflatten(x @ w["qkv"].T, 2, (-1, s.head_dim))
    q, k, v = mx.split(qkv, [s.num_heads, s.num_heads + s.num_kv_heads], axis=2)
    # Norms keep logits small (Henry et al. 2020); a gain for each head sharpens them.
    q = norm_and_rotate(q, cos, sin) * w["q_gain"][:, None]
    if "key_shift" in w:
        k = kv_shift(k, w["key_shift"].reshape(s.num_kv_heads, -1))
    k = norm_and_rotate(k, cos, sin)
    y = attention(q.astype(x.dtype), k.astype(x.dtype), v, window)
    if s.exclusive_attention:
        y = remove_own_value(y, v).astype(x.dtype)
    return y.flatten(2) @ w["attn_out"].T


def mlp(s: Settings, x: mx.array, w: Weights) -> mx.array:
    """The units of a block, [B, T, D] in the compute dtype to the same."""
    y = x @ w["mlp_up"].T
    # Relu squared (So et al. 2021), leaky as in openai/parameter-golf (#493, #518).
    y = mx.maximum(y, s.mlp_leak * y).square()
    return y @ w["mlp_down"].T


def block(
    s: Settings, x: mx.array, x0: mx.array, rope: tuple[mx.array, mx.array], w: Weights, window: float
) -> mx.array:
    """One pre-norm transformer block, [B, T, D] to the same; vectors act in float32."""
    dtype = x.dtype
    x = w["mix_x"] * x + w["mix_x0"] * x0  # a look at the embedding (modded-nanogpt, 2024)
    x = x + w["attn_scale"] * attend(s, rms_norm(x).astype(dtype), rope, w, window)
    x = x + w["mlp_scale"] * mlp(s, rms_norm(x).astype(dtype), w)
    return x.astype(dtype)


def head_logits(x: mx.array, matrix: mx.array, softcap: float, dtype: mx.Dtype) -> mx.array:
    """[..., D] -> float32[..., V]: norm, product in dtype, c tanh(z / c) (Gemma 2, 2024)."""
    z = rms_norm(x).astype(dtype) @ matrix.astype(dtype).T
    return softcap * mx.tanh(z.astype(mx.float32) / softcap)


def cross_entropy(
    x: mx.array, matrix: mx.array, targets: mx.array, softcap: float, dtype: mx.Dtype
) -> mx.array:
    """float32[B, T]: nats of each target, given the last block's output."""
    logits = head_logits(x, matrix, softcap, dtype)
    hit = mx.take_along_axis(logits, targets[..., None], axis=-1)
    return mx.logsumexp(logits, axis=-1) - hit[..., 0]


def in_passes(ids: mx.array) -> list[mx.array]:
    """Rows of tokens in groups of about MICRO_TOKENS: a Mac's memory may not hold more at once."""
    rows = max(1, MICRO_TOKENS // ids.shape[1])
    return [ids[at : at + rows] for at in range(0, len(ids), rows)]


class GPT:
    """A U-Net of transformer blocks, all parameters of which lie in one flat float32 array.

    MLX takes the gradient of a function, so this array is an argument of the forward pass.
    """

    def __init__(self, s: Settings, machine: Machine) -> None:
        self.s = s
        self.machine = machine
        self.table = train_gpt.parameter_table(s)
        self.sizes = [math.prod(p.shape) for p in self.table]
        self.flat = mx.zeros(sum(self.sizes))
        self.positions = functools.cache(functools.partial(rope_tables, s))
        self.exact_nll = machine.compiled(functools.partial(self.token_nll, dtype=mx.float32))

    def views(self, flat: mx.array) -> Weights:
        """A flat array as arrays by parameter name."""
        parts = mx.split(flat, np.cumsum(self.sizes)[:-1].tolist())
        return {p.name: part.reshape(p.shape) for p, part in zip(self.table, parts)}

    def weights(self, flat: mx.array) -> tuple[Weights, list[Weights]]:
        """By name, what is read once, and by each layer; matrices in the compute dtype."""
        shared: Weights = {}
        layers: list[Weights] = [{} for _ in range(self.s.num_layers)]
        views = self.views(flat)
        for param in self.table:
            view = views[param.name]
            if param.group == "matrix":
                view = view.astype(self.machine.mx_dtype)
            if param.layered:
                for layer, part in zip(layers, mx.split(view, len(layers))):
                    layer[param.name] = part[0]
            else:
                shared[param.name] = view
        return shared, layers

    def trunk(self, flat: mx.array, ids: mx.array) -> tuple[mx.array, mx.array]:
        """int[B, T] -> the last block's output, [B, T, D], and the output matrix."""
        shared, layers = self.weights(flat)
        rope = self.positions(ids.shape[1])
        x0 = rms_norm(shared["tok_emb"][ids]).astype(self.machine.mx_dtype)
        x = x0
        half = len(layers) // 2
        outputs: list[mx.array] = []
        for i, (layer, window) in enumerate(zip(layers, self.s.windows)):
            if i >= half and outputs:
                # What the first half left, last in first out (Ronneberger et al. 2015).
                skip = shared["skip_weight"][i - half] * outputs.pop()
                x = x + skip.astype(x.dtype)
            x = block(self.s, x, x0, rope, layer, window)
            if i < half:
                outputs.append(x)
        return x, shared["tok_emb"]  # one matrix for input and output (Press and Wolf 2017)

    def token_nll(self, flat: mx.array, ids: mx.array, targets: mx.array, dtype: mx.Dtype) -> mx.array:
        """int[B, T] and their targets -> float32[B, T], nats; the last product in dtype."""
        x, head = self.trunk(flat, ids)
        return cross_entropy(x, head, targets, self.s.logit_softcap, dtype)

    def loss(self, flat: mx.array, ids: mx.array, targets: mx.array) -> mx.array:
        """float32[]: what training minimises."""
        return self.token_nll(flat, ids, targets, self.machine.mx_dtype).mean()

    def nll(self, ids: np.ndarray) -> np.ndarray:
        """int64[B, T+1] -> float32[B, T]: nats of ids[:, 1:], each given what is before it."""
        parts = []
        for part in in_passes(mx.array(ids)):
            nats = self.exact_nll(self.flat, part[:, :-1], part[:, 1:])
            parts.append(np.array(nats))
        return np.concatenate(parts)


# --- optimizer: Muon for the block matrices, Adam for everything else ---------------------


def newton_schulz(stack: mx.array, steps: int, dtype: mx.Dtype) -> mx.array:
    """Singular values of [n, rows, cols] to about 1: Muon's quintic (Jordan et al. 2024)."""
    if stack.shape[1] > stack.shape[2]:
        done = newton_schulz(stack.swapaxes(1, 2), steps, dtype)
        return done.swapaxes(1, 2)
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.astype(dtype)
    norm = mx.linalg.norm(x.astype(mx.float32), axis=[1, 2], keepdims=True)
    x = x / (norm + 1e-7).astype(dtype)
    for _ in range(steps):
        gram = x @ x.swapaxes(1, 2)
        even = mx.addmm(gram, gram, gram, alpha=c, beta=b)
        x = mx.addmm(x, even, x, beta=a)
    return x


class Optimizer:
    """One step over the flat parameters. `state`: what the next step depends on."""

    def __init__(self, s: Settings, model: GPT, machine: Machine) -> None:
        self.s = s
        self.model = model
        self.machine = machine
        self.num_matrix = sum(param.size for param in model.table if param.group == "matrix")
        matrices, rest = self.split(model.flat)
        self.moments = {
            "momentum": mx.zeros_like(matrices),
            "moment1": mx.zeros_like(rest),
            "moment2": mx.zeros_like(rest),
        }
        rates = np.repeat([param.lr for param in model.table], model.sizes)
        self.rates = mx.array(rates, mx.float32)
        self.compiled_adam = machine.compiled(self.adam)

    @property
    def state(self) -> Weights:
        """Arrays by the names that a checkpoint gives them."""
        return {"weights": self.model.flat} | self.moments

    def split(self, flat: mx.array) -> list[mx.array]:
        """A flat array's matrices, which stand first, and the rest."""
        matrices, rest = mx.split(flat, [self.num_matrix])
        return [matrices, rest]

    def orthogonalized(self, flat: mx.array) -> list[mx.array]:
        """Newton-Schulz on each of the matrices in a flat array, times sqrt(max(1, out / in))."""
        views = self.model.views(flat)
        updates = []
        for param in self.model.table:
            if param.group == "matrix":
                ends = np.cumsum(param.parts).tolist()
                done = []
                for stack in mx.split(views[param.name], ends[:-1], axis=1):
                    factor = max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5
                    x = newton_schulz(stack, self.s.muon_backend_steps, self.machine.mx_dtype)
                    done.append(x.astype(mx.float32) * factor)
                updates.append(mx.concatenate(done, axis=1).flatten())
        return updates

    def adam(self, grad: mx.array, moment1: mx.array, moment2: mx.array, unbias: mx.array) -> list[mx.array]:
        """Update and moments (Kingma and Ba 2015); what changes with the step: float32[2]."""
        s = self.s
        moment1 = moment1 + (grad - moment1) * (1 - s.beta1)
        moment2 = moment2 + (grad.square() - moment2) * (1 - s.beta2)
        root = mx.sqrt(moment2 / unbias[1]) + s.adam_eps
        return [moment1 / unbias[0] / root, moment1, moment2]

    def step(self, grad: mx.array, step: Step, finite: mx.array) -> None:
        """Apply the update, unless a gradient was not finite: then nothing changes."""
        # Muon goes along Nesterov's momentum, orthogonalized (Jordan et al. 2024).
        matrix_grad, rest_grad = self.split(grad)
        momentum = step.momentum * self.moments["momentum"] + matrix_grad
        nesterov = matrix_grad + step.momentum * momentum
        direction = self.orthogonalized(mx.concatenate([nesterov, rest_grad]))
        unbias = mx.array([1 - beta ** (step.number + 1) for beta in (self.s.beta1, self.s.beta2)])
        moments = self.moments["moment1"], self.moments["moment2"]
        adam_update, moment1, moment2 = self.compiled_adam(rest_grad, *moments, unbias)
        # Decoupled from the gradient (Loshchilov and Hutter 2019).
        matrices, _ = self.split(self.model.flat)
        decayed = mx.concatenate(direction) + self.s.weight_decay * matrices
        update = mx.concatenate([decayed, adam_update])
        new = {"weights": self.model.flat - step.lr_mul * self.rates * update}
        new |= {"momentum": momentum, "moment1": moment1, "moment2": moment2}
        kept = {name: mx.where(finite, new[name], old) for name, old in self.state.items()}
        self.model.flat = kept.pop("weights")
        self.moments = kept


# --- training: a step; the loop is train_gpt.py's -----------------------------------------


class Trainer(train_gpt.Trainer):
    """Model and optimizer of one run on this rank."""

    machine: Machine

    def __init__(self, s: Settings, machine: Machine) -> None:
        self.s = s
        self.machine = machine
        self.model = GPT(s, machine)
        self.loss_and_slope = machine.compiled(mx.value_and_grad(self.model.loss))
        self.gradient = self.loss_and_gradient
        self.load({param.name: train_gpt.draw(param, s.seed) for param in self.model.table})
        self.optimizer = Optimizer(s, self.model, machine)

    def load(self, weights: Arrays) -> None:
        """Take over float32 weights by name."""
        flat = np.concatenate([weights[param.name].ravel() for param in self.model.table])
        self.model.flat = mx.array(flat)

    def loss_and_gradient(self, batch: Any) -> tuple[Any, Any]:
        """This rank's share of the mean loss of int64[n, slot_tokens + 1]; its gradient."""
        loss = mx.zeros(())
        gradient = mx.zeros_like(self.model.flat)
        ids = batch[:, :-1].reshape(-1, self.s.train_seq_len)
        targets = batch[:, 1:].reshape(-1, self.s.train_seq_len)
        for part, wanted in zip(in_passes(ids), in_passes(targets)):
            nats, slope = self.loss_and_slope(self.model.flat, part, wanted)
            share = part.size / (ids.size * self.machine.world)
            loss = loss + nats * share
            gradient = gradient + slope * share
            evaluate_soon(loss, gradient)  # else all passes would wait in memory for the last one
        return loss, gradient

    def step(self, batch: Any, step: Step) -> tuple[Any, Any, Any]:
        """One optimizer step on this rank's slots, int64[n, slot_tokens + 1]."""
        loss, grad = self.gradient(batch)
        loss, grad = self.machine.all_sum(loss), self.machine.all_sum(grad)
        grad_norm = mx.linalg.norm(grad)
        finite = mx.isfinite(loss + grad_norm)  # if not on one rank, not in the sum
        self.optimizer.step(grad, step, finite)
        evaluate_soon(loss, grad_norm, finite, *self.optimizer.state.values())
        return loss, grad_norm, finite

    def restore(self, arrays: Arrays) -> None:
        """Take over the state of a checkpoint, float32 arrays by name."""
        self.model.flat = mx.array(arrays["weights"])
        for name in self.optimizer.moments:
            self.optimizer.moments[name] = mx.array(arrays[name])


# --- machine: device, ranks, number format, compiler --------------------------------------


@dataclasses.dataclass
class Machine(train_gpt.Machine):
    """Where this process computes. `device` and `dtype` are torch's names of what MLX uses.

    The ranks speak through torch's gloo: MLX's ring waits for a lost rank for ever, and does not name it.
    """

    @property
    def mx_dtype(self) -> mx.Dtype:
        """MLX's name of `dtype`."""
        name = str(self.dtype).removeprefix("torch.")
        return mx.bfloat16 if name == "bfloat16" else mx.float32

    def all_sum(self, x: mx.array) -> mx.array:
        """The sum of all ranks' arrays, float32."""
        if self.world == 1:
            return x
        tensor = torch.from_numpy(np.array(x))
        self.collective(dist.all_reduce, tensor)
        return mx.array(tensor.numpy())

    def tensor(self, array: np.ndarray) -> Any:
        return mx.array(array)

    def numpy(self, tensor: Any) -> Any:
        return np.array(tensor)

    def compiled(self, function: Function) -> Function:
        """The function through mx.compile, where that works."""
        return mx.compile(function) if self.compile else function

    def choose_dtype(self, wanted: str) -> str:
        """Set dtype, auto: bfloat16 on a GPU, which a CPU only emulates, and peak_flops; dtype's name."""
        if wanted == "auto":
            wanted = "float32" if self.device.type == "cpu" else "bfloat16"
        self.dtype = getattr(torch, wanted)
        side = 512 if self.device.type == "cpu" else 4096
        a, b = mx.random.normal((2, side, side)).astype(self.mx_dtype)
        mx.eval(a, b)
        seconds = timeit.repeat(lambda: mx.eval(a @ b), number=1, repeat=4)
        self.peak_flops = 2 * side**3 / min(seconds[1:])
        return wanted

    def facts(self) -> Facts:
        """What bits may depend on, for the log and config.json."""
        cpu = dataclasses.replace(self, device=torch.device("cpu"))
        gpu = mx.device_info().get("device_name", "of no name") if self.device.type != "cpu" else "none"
        return train_gpt.Machine.facts(cpu) | {"mlx": MLX_VERSION, "gpu": gpu}


def open_machine(s: Settings) -> Machine:
    """Device, process group and compiler. Raises SettingError for what is not there."""
    here = {"mps": mx.metal.is_available(), "cuda": mx.cuda.is_available(), "cpu": True}
    kind = s.device
    if kind == "auto":
        kind = next(name for name, found in here.items() if found)
    if not here[kind]:
        raise SettingError(f"DEVICE={kind}: mlx {MLX_VERSION} finds none here")
    mx.set_default_device(mx.cpu if kind == "cpu" else mx.gpu)
    listen_to_mlx_launch()
    ranks = train_gpt.open_machine(dataclasses.replace(s, device="cpu", compile=False))
    machine = Machine(**vars(ranks))
    machine.device = torch.device(kind)
    machine.compile = s.compile and can_compile(kind)
    return machine


def can_compile(kind: str) -> bool:
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


def listen_to_mlx_launch() -> None:
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
    sys.exit(train_gpt.main(open_machine, Trainer, sys.argv))
