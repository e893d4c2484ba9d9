"""Tokens per second of the trainer beside its recipe in plain PyTorch, side by side on one machine.

    python -m tests.peers --rounds 6 --seconds 10

The two train at the same time, each on a core of its own, and swap cores after every round. So whatever else
the machine does, it does to both. The shape is that of tests/bench.py, and the environment sets others.
"Plain" is the recipe of openai/parameter-golf's early records as most people would write it: nn.Module,
autocast, scaled_dot_product_attention, torch.compile of the whole model, a loop over matrices for Muon, fused
Adam. It begins with the script's own weights and must have the script's loss.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import bench


class Block(nn.Module):
    def __init__(self, s: Any) -> None:
        super().__init__()
        self.s, kv_dim = s, s.head_dim * s.num_kv_heads
        self.q = nn.Linear(s.model_dim, s.model_dim, bias=False)
        self.k = nn.Linear(s.model_dim, kv_dim, bias=False)
        self.v = nn.Linear(s.model_dim, kv_dim, bias=False)
        self.attn_out = nn.Linear(s.model_dim, s.model_dim, bias=False)
        self.mlp_up = nn.Linear(s.model_dim, s.mlp_mult * s.model_dim, bias=False)
        self.mlp_down = nn.Linear(s.mlp_mult * s.model_dim, s.model_dim, bias=False)
        for name in ("attn_scale", "mlp_scale", "mix_x", "mix_x0"):
            self.register_parameter(name, nn.Parameter(torch.ones(s.model_dim)))
        self.q_gain = nn.Parameter(torch.ones(s.num_heads))

    def norm_and_rotate(self, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.unflatten(2, (heads, self.s.head_dim)).transpose(1, 2)
        a, b = F.rms_norm(x.float(), x.shape[-1:], eps=1e-6).chunk(2, dim=-1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.s
        x = self.mix_x * x + self.mix_x0 * x0
        y = F.rms_norm(x, x.shape[-1:], eps=1e-6)
        v = self.v(y).unflatten(2, (s.num_kv_heads, s.head_dim)).transpose(1, 2)
        q = self.norm_and_rotate(self.q(y), s.num_heads, cos, sin) * self.q_gain[:, None, None]
        k = self.norm_and_rotate(self.k(y), s.num_kv_heads, cos, sin)
        q, k = q.to(v.dtype), k.to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attn_scale * self.attn_out(y.transpose(1, 2).flatten(2))
        y = F.rms_norm(x, x.shape[-1:], eps=1e-6)
        return x + self.mlp_scale * self.mlp_down(F.relu(self.mlp_up(y)).square())


class Plain(nn.Module):
    """int64[B, T] and targets -> mean nats."""

    def __init__(self, s: Any) -> None:
        super().__init__()
        self.s = s
        self.tok_emb = nn.Parameter(torch.zeros(s.vocab_size, s.model_dim))
        self.skip_weight = nn.Parameter(torch.ones(s.num_layers // 2, s.model_dim))
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.num_layers))
        angles = torch.outer(
            torch.arange(s.train_seq_len), s.rope_base ** (-torch.arange(0, s.head_dim, 2) / s.head_dim)
        )
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = x0 = F.rms_norm(F.embedding(ids, self.tok_emb), (self.s.model_dim,), eps=1e-6)
        skips: list[Tensor] = []
        half = self.s.num_layers // 2
        for i, block in enumerate(self.blocks):
            if i >= half and skips:
                x = x + self.skip_weight[i - half] * skips.pop()
            x = block(x, x0, self.cos, self.sin)
            if i < half:
                skips.append(x)
        logits = F.linear(F.rms_norm(x, x.shape[-1:], eps=1e-6), self.tok_emb).float()
        logits = self.s.logit_softcap * torch.tanh(logits / self.s.logit_softcap)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """The script's weights, by its names."""
        self.tok_emb.copy_(weights["tok_emb"])
        self.skip_weight.copy_(weights["skip_weight"])
        for i, block in enumerate(self.blocks):
            sizes = [block.q.out_features, block.k.out_features, block.v.out_features]
            parts = dict(zip(("q", "k", "v"), weights["qkv"][i].split(sizes)))
            for name, parameter in block.named_parameters():
                own = name.removesuffix(".weight")
                parameter.copy_(parts[own] if own in parts else weights[own][i])


def newton_schulz(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    x = (matrix.T if matrix.size(0) > matrix.size(1) else matrix).to(dtype)
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


def plain(s: Any) -> Callable[[], float]:
    """A step of the plain trainer. Its loss must be the script's, whose weights it begins with."""
    trainer, batch = bench.make_trainer(dataclasses.replace(s, dtype="float32", compile=False))
    model = Plain(s)
    model.load(trainer.model.views(trainer.model.flat.detach()))
    micro = [
        (slot[:, :-1].reshape(-1, s.train_seq_len), slot[:, 1:].reshape(-1, s.train_seq_len))
        for slot in batch.split(1)
    ]
    with torch.no_grad():
        mine = statistics.fmean(float(model(*pair)) for pair in micro)
    expected = float(trainer.loss_and_gradient(batch)[0])
    if abs(mine - expected) > 1e-4:
        sys.exit(f"error: the plain model's loss is {mine}, that of the script {expected}")
    dtype = bench.faster_dtype()
    compiled = torch.compile(model)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    adam = torch.optim.Adam(others, lr=s.scalar_lr, betas=(s.beta1, s.beta2), fused=True)
    momenta = [torch.zeros_like(p) for p in matrices]

    def step() -> float:
        total = 0.0
        for pair in micro:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = compiled(*pair) / len(micro)
            loss.backward()
            total += float(loss.detach())
        with torch.no_grad():
            for matrix, momentum in zip(matrices, momenta):
                momentum.mul_(s.muon_momentum).add_(matrix.grad)
                update = newton_schulz(matrix.grad.add(momentum, alpha=s.muon_momentum), dtype)
                factor = max(1.0, matrix.size(0) / matrix.size(1)) ** 0.5
                matrix.add_(update.float(), alpha=-s.matrix_lr * factor)
        adam.step()
        model.zero_grad()
        return total

    return step


def script(s: Any) -> Callable[[], float]:
    trainer, batch = bench.make_trainer(s)
    call = bench.step_call(trainer, batch)
    return lambda: float(call()[0])


def train(peer: str) -> None:
    """One of the two processes: a line in, a round of the seconds that it says, the tokens per second out."""
    s = bench.settings(**bench.SHAPE)
    step = {"script": script, "plain": plain}[peer](s)
    for _ in range(3):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        began, steps = time.perf_counter(), 0
        while time.perf_counter() < began + float(line):
            step()
            steps += 1
        print(json.dumps(steps * s.train_batch_tokens / (time.perf_counter() - began)), flush=True)


def race(rounds: int, seconds: float) -> list[list[float]]:
    """Tokens per second of the script and of plain PyTorch, a row a round."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runs = [
        subprocess.Popen([sys.executable, "-m", "tests.peers", "--train", peer], env=env, **pipes)
        for peer in ("script", "plain")
    ]
    rows = []
    cores = sorted(psutil.Process().cpu_affinity())[:2]
    try:
        for run in runs:
            if run.stdout.readline() != "ready\n":
                sys.exit(f"error: {' '.join(map(str, run.args))} ended before it was ready")
        for _ in range(rounds):
            cores.reverse()
            for run, core in zip(runs, cores):
                for thread in psutil.Process(run.pid).threads():
                    os.sched_setaffinity(thread.id, [core])
                run.stdin.write(f"{seconds}\n")
                run.stdin.flush()
            rows.append([float(run.stdout.readline()) for run in runs])
    finally:
        for run in runs:
            run.kill()
            run.wait()
    return rows


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a round")
    parser.add_argument("--train", choices=("script", "plain"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.train)
    if not hasattr(os, "sched_setaffinity") or os.cpu_count() < 2:
        sys.exit("error: this machine gives no process a core of its own, expected Linux with two cores")
    rows = race(args.rounds, args.seconds)
    mine, others = (statistics.median(column) for column in zip(*rows))
    low, middle, high = statistics.quantiles(script / plain for script, plain in rows)
    print(f"script: {mine:.0f} tokens/s, plain: {others:.0f} tokens/s")
    print(f"script / plain: {middle:.2f} (quartiles {low:.2f} to {high:.2f} of {args.rounds} rounds)")


if __name__ == "__main__":
    main()
