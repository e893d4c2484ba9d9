"""train_gpt.py on MLX: a Mac's GPU, CUDA or a CPU.

    python train_gpt_mlx.py                                    one process
    torchrun --standalone --nproc_per_node=2 train_gpt_mlx.py  two on this machine
    mlx.launch --hostfile hosts.json train_gpt_mlx.py          one on each of several machines

Here stand the model, its optimizer, the gradient and the machine, in MLX's words. Settings, data, score,
artifact, checkpoints, log and the training loop are train_gpt.py's own. The two scripts read the same batches
from the same start weights, and each goes on from the other's checkpoints and scores the other's artifacts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import torch.distributed as dist
from mlx.core import array as Array

import train_gpt
from train_gpt import MICRO_TOKENS, NORM_EPS, SettingError, Settings, draw, muon_momentum, parameter_table

# --- model: B batch, T tokens, D width, H heads, G key-value heads, K head width, V vocabulary ------------


def rms_norm(x: Array) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last dimension, float32, no weights (Zhang and Sennrich 2019)."""
    return mx.fast.rms_norm(x.astype(mx.float32), None, NORM_EPS)


def rope_tables(s: Settings, length: int) -> tuple[Array, Array]:
    """(cos, cos) and (sin, -sin), float32[T, 1, K], of the rotary position embedding (Su et al. 2021)."""
    inverse = s.rope_base ** (-np.arange(0, s.head_dim, 2) / s.head_dim)
    angles = np.outer(np.arange(length), inverse)[:, None]
    cos = np.concatenate([np.cos(angles), np.cos(angles)], -1)
    sin = np.concatenate([np.sin(angles), -np.sin(angles)], -1)
    return mx.array(cos.astype(np.float32)), mx.array(sin.astype(np.float32))


def norm_and_rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RMS-normalise each head and turn its pairs (first half, second half) by the angle of their position."""
    x = rms_norm(x)
    first, second = mx.split(x, 2, axis=-1)
    return x * cos + mx.concatenate([second, first], axis=-1) * sin


def attention(q_BTHK: Array, k_BTGK: Array, v_BTGK: Array) -> Array:
    """Causal grouped-query softmax attention at scale 1 / sqrt(K): [B, T, H * K]."""
    q, k, v = (x.swapaxes(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask="causal")
    return out.swapaxes(1, 2).flatten(2)


def block(x: Array, x0: Array, cos: Array, sin: Array, w: dict[str, Array]) -> Array:
    """One pre-norm transformer block, [B, T, D] to the same; vectors among its weights act in float32."""
    dtype, heads, head_dim = x.dtype, w["q_gain"].size, cos.shape[-1]
    x = w["mix_x"] * x + w["mix_x0"] * x0
    qkv = (rms_norm(x).astype(dtype) @ w["qkv"].T).reshape(*x.shape[:2], -1, head_dim)
    groups = (qkv.shape[2] - heads) // 2
    q, k, v = mx.split(qkv, (heads, heads + groups), axis=2)
    q = norm_and_rotate(q, cos, sin) * w["q_gain"][:, None]
    k = norm_and_rotate(k, cos, sin)
    y = attention(q.astype(dtype), k.astype(dtype), v)
    x = x + w["attn_scale"] * (y @ w["attn_out"].T)
    y = mx.maximum(rms_norm(x).astype(dtype) @ w["mlp_up"].T, 0).square()  # relu squared: So et al. 2021
    return (x + w["mlp_scale"] * (y @ w["mlp_down"].T)).astype(dtype)


def head_logits(x: Array, matrix: Array, softcap: float, dtype: mx.Dtype) -> Array:
    """[..., D] -> float32[..., V]: final norm, product in dtype, softcap c tanh(z / c)."""
    z = (rms_norm(x).astype(dtype) @ matrix.astype(dtype).T).astype(mx.float32)
    return softcap * mx.tanh(z / softcap)


class GPT:
    """A U-Net of transformer blocks, all parameters of which lie in one flat float32 array.

    MLX takes the gradient of a function, so what is learned is an argument of the forward pass.
    """

    def __init__(self, s: Settings, machine: Machine):
        self.s, self.machine, self.table = s, machine, parameter_table(s)
        self.sizes = [math.prod(p.shape) for p in self.table]
        self.ends = np.cumsum(self.sizes)[:-1].tolist()
        self.flat = mx.zeros(sum(self.sizes))
        self.positions = functools.cache(functools.partial(rope_tables, s))
        self.exact_nll = machine.compiled(functools.partial(self.token_nll, dtype=mx.float32))

    def views(self, flat: Array) -> dict[str, Array]:
        """A flat array as arrays by parameter name."""
        parts = mx.split(flat, self.ends)
        return {p.name: part.reshape(p.shape) for p, part in zip(self.table, parts)}

    def set(self, flat: Array) -> None:
        """Take over a flat array, float32 in the table's order."""
        self.flat = flat

    def weights(self, flat: Array) -> tuple[dict[str, Array], list[dict[str, Array]]]:
        """By name, what is read once and what each layer reads; matrices in the compute dtype."""
        once, layers = {}, [{} for _ in range(self.s.num_layers)]
        for param, view in zip(self.table, self.views(flat).values()):
            if param.group == "matrix":
                view = view.astype(self.machine.mx_dtype)
            if param.layered:
                for layer, part in zip(layers, mx.split(view, len(layers))):
                    layer[param.name] = part[0]
            else:
                once[param.name] = view
        return once, layers

    def trunk(self, flat: Array, ids: Array) -> tuple[Array, Array]:
        """int[B, T] -> the last block's output, [B, T, D] in the compute dtype, and the output matrix."""
        once, layers = self.weights(flat)
        cos, sin = self.positions(ids.shape[1])
        x = x0 = rms_norm(once["tok_emb"][ids]).astype(self.machine.mx_dtype)
        half, outputs = len(layers) // 2, []
        for i, layer in enumerate(layers):
            if i >= half and outputs:  # the second half takes up what the first left, last in first out
                x = x + (once["skip_weight"][i - half] * outputs.pop()).astype(x.dtype)
            x = block(x, x0, cos, sin, layer)
            if i < half:
                outputs.append(x)
        return x, once.get("head", once["tok_emb"])

    def token_nll(self, flat: Array, ids: Array, targets: Array, dtype: mx.Dtype) -> Array:
        """int[B, T] and targets [B, n] of the last n positions -> float32[B, n], nats; product in dtype."""
        x, head = self.trunk(flat, ids)
        logits = head_logits(x[:, -targets.shape[1] :], head, self.s.logit_softcap, dtype)
        hit = mx.take_along_axis(logits, targets[..., None], axis=-1)
        return mx.logsumexp(logits, axis=-1) - hit[..., 0]

    def loss(self, flat: Array, ids: Array, targets: Array) -> Array:
        """float32[]: what training minimises."""
        return self.token_nll(flat, ids, targets, self.machine.mx_dtype).mean()

    def nll(self, ids: np.ndarray, last: int = 0) -> np.ndarray:
        """int64[B, T+1] -> float32[B, T]: nats of ids[:, 1:] given what stands left; of the last, if > 0."""
        parts = []
        for rows in in_passes(mx.array(ids)):
            nats = self.exact_nll(self.flat, rows[:, :-1], rows[:, 1:][:, -last:])
            parts.append(np.array(nats))
        return np.concatenate(parts)


def in_passes(ids: Array) -> list[Array]:
    """Rows of tokens in groups of about MICRO_TOKENS: a Mac's memory may not hold more at once."""
    rows = max(1, MICRO_TOKENS // ids.shape[1])
    return [ids[at : at + rows] for at in range(0, len(ids), rows)]


# --- optimizer: Muon for the block matrices, Adam for everything else -------------------------------------


def newton_schulz(x: Array, steps: int) -> Array:
    """Singular values of a stack [n, rows, cols] to 0.7 to 1.2: Muon's quintic (Jordan et al. 2024)."""
    if x.shape[1] > x.shape[2]:
        return newton_schulz(x.swapaxes(1, 2), steps).swapaxes(1, 2)
    a, b, c = 3.4445, -4.7750, 2.0315
    norm = mx.linalg.norm(x.astype(mx.float32), axis=(1, 2), keepdims=True)
    x = x / (norm + 1e-7).astype(x.dtype)
    for _ in range(steps):
        gram = x @ x.swapaxes(1, 2)
        x = mx.addmm(x, mx.addmm(gram, gram, gram, alpha=c, beta=b), x, beta=a)
    return x


class Optimizer:
    """One step over the flat parameters. `state`: all that the next step depends on but for its number."""

    def __init__(self, s: Settings, model: GPT, machine: Machine):
        self.s, self.model, self.machine = s, model, machine
        self.num_matrix = sum(math.prod(p.shape) for p in model.table if p.group == "matrix")
        matrices, rest = self.split(model.flat)
        self.moments = {
            "momentum": mx.zeros_like(matrices),
            "moment1": mx.zeros_like(rest),
            "moment2": mx.zeros_like(rest),
        }
        rates = np.repeat([p.lr for p in model.table], model.sizes)
        self.adam_rates = self.split(mx.array(rates.astype(np.float32)))[1]
        self.adam = machine.compiled(self.adam)

    @property
    def state(self) -> dict[str, Array]:
        """By the names that a checkpoint has."""
        return {"weights": self.model.flat} | self.moments

    def set(self, state: dict[str, Array]) -> None:
        """Take over the arrays of a whole state."""
        self.model.set(state["weights"])
        self.moments = {name: state[name] for name in self.moments}

    def split(self, flat: Array) -> list[Array]:
        """A flat array's matrices, which stand first, and the rest."""
        return mx.split(flat, [self.num_matrix])

    def orthogonalize(self, update: Array) -> Array:
        """A flat array's matrices after Newton-Schulz, times their learning rates; flat, without the rest."""
        s, done = self.s, []
        for param, view in zip(self.model.table, self.model.views(update).values()):
            if param.group != "matrix":
                continue
            cuts = (s.model_dim, s.model_dim + s.kv_dim) if param.name == "qkv" else ()
            parts = []
            for stack in mx.split(view, cuts, axis=1):
                factor = param.lr * max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5
                parts.append(self.shared_newton_schulz(stack) * factor)
            done.append(mx.concatenate(parts, axis=1).flatten())
        return mx.concatenate(done)

    def shared_newton_schulz(self, stack: Array) -> Array:
        """Newton-Schulz of [n, rows, cols] in the compute dtype, dealt to the ranks and gathered, float32."""
        rank, world = self.machine.rank, self.machine.world
        share = -(-len(stack) // world)  # zeros fill up what the number of ranks does not divide
        filled = mx.pad(stack, [(0, share * world - len(stack)), (0, 0), (0, 0)])
        own = filled[rank * share : (rank + 1) * share].astype(self.machine.mx_dtype)
        done = newton_schulz(own, self.s.muon_backend_steps).astype(mx.float32)
        return self.machine.all_gather(done)[: len(stack)]

    def adam(
        self, rest: Array, moment1: Array, moment2: Array, grad: Array, numbers: Array
    ) -> tuple[Array, ...]:
        """Weights and moments after a step of Adam (Kingma and Ba 2015); numbers: float32[4], of the step."""
        s, (take, multiplier, unbias1, unbias2) = self.s, numbers
        moment1 = moment1 + (grad - moment1) * (take * (1 - s.beta1))
        moment2 = moment2 + (grad.square() - moment2) * (take * (1 - s.beta2))
        root = mx.sqrt(moment2 / unbias2) + s.adam_eps
        rate = self.adam_rates * (take * multiplier / unbias1)
        return rest - rate * moment1 / root, moment1, moment2

    def step(self, grad: Array, step: int, multiplier: float, take: Array) -> None:
        """Update the weights from the flat gradient, float32, at learning rates times multiplier.

        take: 1, or 0 with a gradient of zeros to leave everything as it is: the host need not know.
        """
        s, momentum = self.s, muon_momentum(self.s, step)
        (matrices, rest), (matrix_grad, rest_grad) = self.split(self.model.flat), self.split(grad)
        moments = self.moments
        moments["momentum"] = moments["momentum"] * mx.where(take > 0, momentum, 1.0) + matrix_grad
        nesterov = mx.concatenate([matrix_grad + momentum * moments["momentum"], rest_grad])
        matrices = matrices - self.orthogonalize(nesterov) * (take * multiplier)
        unbias = mx.array([multiplier, 1 - s.beta1 ** (step + 1), 1 - s.beta2 ** (step + 1)])
        numbers = mx.concatenate([take[None], unbias])
        rest, moments["moment1"], moments["moment2"] = self.adam(
            rest, moments["moment1"], moments["moment2"], rest_grad, numbers
        )
        self.model.set(mx.concatenate([matrices, rest]))


# --- training: what a step is made of; the loop is train_gpt's ---------------------------------------------


class Trainer(train_gpt.Trainer):
    """Model and optimizer of one run on this rank."""

    def __init__(self, s: Settings, machine: Machine):
        self.s, self.machine = s, machine
        self.model = GPT(s, machine)
        self.size = sum(self.model.sizes)
        self.loss_and_slope = machine.compiled(mx.value_and_grad(self.model.loss))
        self.reset()

    def reset(self) -> None:
        """Start weights, and an optimizer that has seen nothing."""
        self.load({p.name: draw(p, self.s.seed) for p in self.model.table})
        self.optimizer = Optimizer(self.s, self.model, self.machine)

    def gradient(self, batch: Array) -> Array:
        """float32[size + 1]: gradient of the mean loss of int64[slots, slot_tokens + 1], and the loss."""
        total, length = mx.zeros(self.size + 1), self.s.train_seq_len
        ids, targets = (part.reshape(-1, length) for part in (batch[:, :-1], batch[:, 1:]))
        for part, its_targets in zip(in_passes(ids), in_passes(targets)):
            loss, slope = self.loss_and_slope(self.model.flat, part, its_targets)
            weight = part.size / self.s.train_batch_tokens
            total = total + mx.concatenate([slope, loss[None]]) * weight
            mx.async_eval(total)  # else all passes would wait in memory for the last one
        return total

    def step(self, batch: Array, step: int, multiplier: float) -> Array:
        """One optimizer step: loss, gradient norm, 1 if it was taken, and a mark for each bad rank.

        What is not finite on one rank is so in the sum, and all ranks skip it alike.
        """
        total = self.gradient(batch)
        marks = mx.zeros(self.machine.world)
        marks[self.machine.rank] = ~mx.isfinite(total.sum())
        total = self.machine.all_sum(mx.concatenate([total, marks]))
        grad, loss, bad = mx.split(total, [self.size, self.size + 1])
        norm = mx.linalg.norm(grad)
        take = mx.isfinite(loss[0] + norm)
        if self.s.grad_clip_norm:
            grad = grad * mx.minimum(self.s.grad_clip_norm / (norm + 1e-6), 1.0)
        self.optimizer.step(mx.where(take, grad, 0.0), step, multiplier, take.astype(mx.float32))
        stats = mx.concatenate([loss, norm[None], take[None], bad])
        mx.async_eval(stats, self.optimizer.state)
        return stats

    def snapshot(self) -> dict[str, Array]:
        """The optimizer's state as it is now: arrays never change, so to keep them is to copy them."""
        state = self.optimizer.state
        mx.eval(state)  # here, because another thread reads them
        return state

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Take over a checkpoint's arrays."""
        self.optimizer.set({name: mx.array(array) for name, array in arrays.items()})


# --- machine: device, ranks, number format, compiler ------------------------------------------------------


@dataclasses.dataclass
class Machine(train_gpt.Machine):
    """Where this process computes. `device` and `dtype` are torch's names for what MLX uses here.

    The ranks speak through torch's gloo: MLX's ring would wait for a lost rank for ever and not name it.
    """

    @property
    def mx_dtype(self) -> mx.Dtype:
        return getattr(mx, self.dtype_name)

    def all_sum(self, x: Array) -> Array:
        """The sum of all ranks' arrays."""
        if self.world == 1:
            return x
        tensor = torch.from_numpy(np.array(x))
        self.all(dist.all_reduce, tensor)
        return mx.array(tensor.numpy())

    def all_gather(self, x: Array) -> Array:
        """All ranks' arrays of one shape [n, ...], end to end."""
        if self.world == 1:
            return x
        own = torch.from_numpy(np.array(x))
        everyone = [torch.empty_like(own) for _ in range(self.world)]
        self.all(dist.all_gather, everyone, own)
        return mx.array(torch.cat(everyone).numpy())

    def tensor(self, array: np.ndarray) -> Array:
        return mx.array(array)

    def numpy(self, tensor: Array) -> np.ndarray:
        return np.array(tensor)

    def report(self, stats: Array) -> Callable[[], list[float]]:
        """A function that waits for numbers which are being computed."""
        return stats.tolist

    def synchronize(self) -> None:
        mx.synchronize()

    def compiled(self, function: Callable) -> Callable:
        """The function through mx.compile; where that does not work a line, and eager from then on."""
        if self.compile:
            why = "no g++" if self.device.type == "cpu" and not shutil.which("g++") else ""
            try:
                mx.eval(mx.compile(lambda x: mx.exp(x) * x + x)(mx.ones(3)))  # a failure shows when it runs
            except RuntimeError as error:
                why = " ".join(str(error).split())
            if why:
                self.compile = False
                self.say(f"compile:0 (failed, so eager and slower: {why[:200]})")
        return mx.compile(function) if self.compile else function

    def measure(self, dtype: torch.dtype) -> float:
        """Floating-point operations per second of a square product: the best of three, after one."""
        side, seconds = 512 if self.device.type == "cpu" else 4096, []
        kind = getattr(mx, str(dtype).rpartition(".")[2])
        a, b = mx.random.normal((2, side, side), key=mx.random.key(0)).astype(kind)
        for _ in range(4):
            mx.eval(a, b)
            began = time.perf_counter()
            mx.eval(a @ b)
            seconds.append(time.perf_counter() - began)
        return 2 * side**3 / min(seconds[1:])

    def peak_memory_mib(self) -> float:
        return mx.get_peak_memory() / 2**20

    def environment(self) -> dict[str, Any]:
        """What bits may depend on beside settings and script."""
        gpu = "none" if self.device.type == "cpu" else mx.device_info().get("device_name", "of no name")
        return {"mlx": mx.__version__, "torch": torch.__version__, "gpu": gpu}


def open_machine(s: Settings) -> Machine:
    """Device and ranks. Raises SettingError for what is not there."""
    here = {"mps": mx.metal.is_available(), "cuda": mx.cuda.is_available(), "cpu": True}
    kind = s.device
    if kind == "auto":
        kind = next(name for name, found in here.items() if found)
    if not here[kind]:
        raise SettingError(f"DEVICE={kind}: mlx {mx.__version__} finds none here")
    mx.set_default_device(mx.cpu if kind == "cpu" else mx.gpu)
    listen_to_mlx_launch()
    ranks = train_gpt.open_machine(dataclasses.replace(s, device="cpu"))
    return Machine(**vars(ranks) | {"device": torch.device(kind)})


def listen_to_mlx_launch() -> None:
    """Write what mlx.launch tells each process where torch looks for its ranks. Raises SettingError."""
    path, rank = os.environ.get("MLX_HOSTFILE"), os.environ.get("MLX_RANK", "0")
    if not path:
        return
    try:
        hosts = json.loads(Path(path).read_text())
        address, port = hosts[0][0].rsplit(":", 1)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingError(f"MLX_HOSTFILE={path}: takes what mlx.launch writes: {error}") from None
    os.environ |= {"RANK": rank, "WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": address, "MASTER_PORT": port}


if __name__ == "__main__":
    sys.exit(train_gpt.main(open_machine, Trainer))
