"""Train the best language model that fits a byte budget, and score it in bits per byte.

    python train_gpt.py                                        one process, on a GPU or a CPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py      one process for each GPU
    PRESET=smoke ITERATIONS=20 python train_gpt.py             every setting is an environment variable
    DRY_RUN=1 python train_gpt.py                              settings, parameters and size, then stop

Exit codes: 0 done, 2 bad setting, 3 bad data or tokenizer, 4 artifact over its byte budget, 16 stopped by
a signal, a lost rank or a full disk (the same command with its RUN_ID goes on), 17 numerical failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import difflib
import fcntl
import functools
import hashlib
import json
import math
import os
import re
import resource
import signal
import sys
import time
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import sentencepiece

if __name__ == "__main__":  # read when torch loads: waiting threads soon sleep, for other programs' sake
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer
from tqdm import tqdm

Arrays = dict[str, np.ndarray]
Facts = dict[str, Any]  # that JSON can hold
sha256 = lambda blob: hashlib.sha256(blob).hexdigest()


class SettingError(ValueError):  # does not parse, is impossible, or looks misspelt
    exit_code = 2


class DataError(ValueError):  # shard, tokenizer, artifact or checkpoint damaged, or not of one kind
    exit_code = 3


# --- settings: one table of environment variables; a preset is a row of other defaults --------------------

FLOPPY = (
    {"data_path": "./data/datasets/demo_sp1024", "tokenizer_path": "./data/tokenizers/demo_1024_bpe.model"}
    | {"num_layers": 4, "model_dim": 192, "num_heads": 3, "num_kv_heads": 1, "qk_gain_init": 4.0}
    | {"key_shift": 1.0, "short_window": 128, "exclusive_attention": True, "mlp_leak": 0.5}
    | {"doc_tokens": 16384, "train_seq_len": 1024, "train_batch_tokens": 8192, "batch_slots": 8}
    | {"iterations": 100000, "max_wallclock_seconds": 0.0, "max_flops": 1e14, "val_batch_size": 65536}
    | {"budget_bytes": 1474560, "code_bytes": "zlib"}
    | {"warmdown_iters": 0.6, "warmup_steps": 2, "lr_warmup_steps": 20, "matrix_lr": 0.06}
    | {"muon_momentum": 0.95, "muon_momentum_warmup_start": 0.85, "muon_momentum_warmup_steps": 300}
)
SMOKE = (
    {"num_layers": 3, "model_dim": 64, "num_heads": 2, "qk_gain_init": 1.5, "compile": False}
    | {"train_seq_len": 128, "train_batch_tokens": 4096, "batch_slots": 8, "doc_tokens": 0}
    | {"short_window": 0, "val_loss_every": 0, "val_tokens_limit": 65536, "train_log_every": 10}
    | {"iterations": 60, "max_wallclock_seconds": 60.0, "max_flops": 0.0, "warmdown_iters": 0.5}
    | {"warmup_steps": 1, "lr_warmup_steps": 5, "matrix_lr": 0.02, "muon_momentum_warmup_steps": 30}
)
PRESETS = {"10min_16mb": {}, "floppy": FLOPPY, "smoke": FLOPPY | SMOKE}
RUN_NAME = r"([\w-][\w.-]{0,99})?"
LARGE = 1e300  # no limit; infinity is no value of a setting


def var(default: Any, doc: str, low: float = -LARGE, high: float = LARGE, **flags: Any) -> Any:
    """A row of the settings table. pick: all values it takes; free: a resumed run may change it."""
    return dataclasses.field(default=default, metadata={"doc": doc, "low": low, "high": high, **flags})


free = functools.partial(var, free=True)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Every setting, read once. Its environment variable is the field's name in upper case."""

    preset: str = free("10min_16mb", "row of defaults; unset, without CUDA: floppy", pick=(*PRESETS,))
    dry_run: bool = free(False, "print settings, parameters and planned bytes, then stop")
    data_path: str = free("./data/datasets/fineweb10B_sp1024", "folder of *_train_*.bin and *_val_*.bin")
    tokenizer_path: str = free("./data/tokenizers/fineweb_1024_bpe.model", "SentencePiece model file")
    data_order: str = var("shuffled", "of training windows", pick=("shuffled", "sequential"))
    doc_tokens: int = var(0, "train on documents of at most so many tokens; 0: on all", 0)
    run_id: str = free("", "name of the run's folder under logs/; empty: date, time and process id")
    seed: int = var(1337, "draws the start weights and the data order", 0)
    device: str = free("auto", "where to compute", pick=("auto", "cuda", "cpu"))
    dtype: str = var("auto", "of products; auto: the faster, measured", pick=("auto", "bfloat16", "float32"))
    compile: bool = free(True, "compile the model where that works")
    val_batch_size: int = free(524288, "validation tokens of one forward pass over all slots", 1)
    val_loss_every: int = free(1000, "steps between validations on the first eight batches; 0: at the end", 0)
    val_tokens_limit: int = var(0, "score only so many tokens and mark the result partial; 0: all", 0)
    eval_seq_len: int = var(0, "window of the evaluation in tokens; 0: TRAIN_SEQ_LEN", 0)
    eval_only: str = free("", "path of an artifact to score; nothing is trained or written")
    train_log_every: int = free(200, "steps between log lines; the first ten steps are logged too", 1)
    ckpt_seconds: float = free(60.0, "between checkpoints; 0: at the end and on a signal only", 0)
    max_skipped: int = free(10, "steps in a row without finite numbers that end the run", 1)
    dist_timeout: float = free(60.0, "seconds after which a silent rank ends the others", 1)
    iterations: int = var(20000, "optimizer steps at most", 1)
    max_wallclock_seconds: float = var(600.0, "training seconds at most on rank 0's clock; 0: no cap", 0)
    max_flops: float = var(0.0, "operations of training at most, in products; 0: no cap", 0)
    warmdown_iters: float = var(3000.0, "last steps, while the rate falls; below 1: part of the run", 0)
    warmup_steps: int = free(20, "untimed steps on dummy tokens before the start, then forgotten", 0)
    lr_warmup_steps: int = var(10, "steps over which the learning rate rises linearly", 0)
    train_batch_tokens: int = var(393216, "tokens of one optimizer step over all ranks", 1)
    train_seq_len: int = var(4096, "tokens of one training sequence", 1, 262144)
    batch_slots: int = var(8, "parts of a step's batch; the number of ranks must divide it", 1)
    vocab_size: int = var(1024, "pieces of the tokenizer", 2, 65536)
    num_layers: int = var(9, "blocks", 1, 1024)
    model_dim: int = var(512, "width of the residual stream", 1)
    num_heads: int = var(8, "query heads", 1)
    num_kv_heads: int = var(4, "key and value heads", 1)
    key_shift: float = var(0.0, "start of the share of the token before in the last keys; 0: none", 0, 1)
    short_window: int = var(0, "tokens that all layers but the last attend to; 0: all", 0, 262144)
    exclusive_attention: bool = var(False, "leave out what attention says along a token's own value")
    mlp_mult: int = var(2, "hidden width of the MLP in model widths", 1)
    mlp_leak: float = var(0.0, "slope of the MLP's units below zero, before the square", 0, 1)
    tie_embeddings: bool = var(True, "the output matrix is the token embedding")
    rope_base: float = var(10000.0, "longest wavelength of the rotary positions over 2 pi", 1)
    logit_softcap: float = var(30.0, "c in c tanh(z / c)", 1e-3)
    qk_gain_init: float = var(1.5, "start of the learned gain of each query head")
    embed_lr: float = var(0.6, "Adam rate of an untied embedding", 0)
    head_lr: float = var(0.008, "Adam rate of an untied output matrix", 0)
    tied_embed_lr: float = var(0.03, "Adam rate of a tied embedding", 0)
    tied_embed_init_std: float = var(0.005, "start of a tied embedding", 0)
    matrix_lr: float = var(0.02, "Muon rate of the blocks' matrices", 0)
    scalar_lr: float = var(0.02, "Adam rate of vectors and scalars", 0)
    muon_momentum: float = var(0.99, "momentum of Muon", 0, 0.99999)
    muon_backend_steps: int = var(5, "Newton-Schulz steps", 1)
    muon_momentum_warmup_start: float = var(0.92, "momentum of Muon at step 0", 0, 0.99999)
    muon_momentum_warmup_steps: int = var(1500, "steps over which it rises linearly", 0)
    beta1: float = var(0.9, "Adam, first moment", 0, 0.99999)
    beta2: float = var(0.95, "Adam, second moment", 0, 0.99999)
    adam_eps: float = var(1e-8, "Adam, added to the root of the second moment", 0)
    grad_clip_norm: float = var(0.0, "largest norm of the whole gradient; 0: off", 0)
    budget_bytes: int = var(16000000, "most bytes of artifact and code together", 1)
    code_bytes: str = var("raw", "how the script counts: its size, or at zlib level 9", pick=("raw", "zlib"))

    slot_tokens = property(lambda s: s.train_batch_tokens // s.batch_slots)
    head_dim = property(lambda s: s.model_dim // s.num_heads)
    eval_window = property(lambda s: s.eval_seq_len or s.train_seq_len)
    windows = property(lambda s: [s.short_window or math.inf] * (s.num_layers - 1) + [math.inf])
    plan = functools.cached_property(lambda s: Plan(s))


ROWS = {row.name: row for row in dataclasses.fields(Settings)}
TAKES = {"int": "a whole number", "float": "a number", "bool": "0 or 1", "str": "a text"}


def parse_setting(row: dataclasses.Field, text: str) -> Any:
    """The value of one environment variable. Raises SettingError naming what it takes."""
    low, high, pick = (row.metadata.get(key) for key in ("low", "high", "pick"))
    value, good = text, not pick or text in pick
    if row.type == "bool":
        value, good = text == "1", text in ("0", "1")
    elif row.type != "str":
        try:  # Python also reads 1_0, and digits of other scripts
            value = int(text) if row.type == "int" else float(text)
            good = low <= value <= high and text.isascii() and "_" not in text
        except ValueError:
            good = False
    if not good:
        takes = "one of " + ", ".join(pick) if pick else TAKES[row.type]
        takes += f" from {low:g}" if low > -LARGE else ""
        takes += f" to {high:g}" if high < LARGE else ""
        raise SettingError(f"{row.name.upper()}={text!r}: takes {takes}")
    return value


def load_settings(env: Mapping[str, str], default_preset: str) -> tuple[Settings, dict[str, str]]:
    """The settings, and the origin of each: 'preset' or 'environment'. Raises SettingError."""
    names = {name.upper() for name in ROWS}
    for name in sorted(env.keys() - names - {"COMPILER", "MODEL_DIR"}):  # the last are other programs' own
        for meant in difflib.get_close_matches(name.upper(), names, 1, cutoff=0.85):  # ITERATION, num_layers
            raise SettingError(f"{name}={env[name]!r} is no setting, {meant} is: write that or unset it")
    preset = parse_setting(ROWS["preset"], env.get("PRESET", default_preset))
    given = {name: parse_setting(row, env[name.upper()]) for name, row in ROWS.items() if name.upper() in env}
    s = Settings(**PRESETS[preset] | {"preset": preset} | given)
    check_settings(s)
    return s, {name: "environment" if name in given else "preset" for name in ROWS}


def check_settings(s: Settings):
    """Refuse values that are possible alone but not together. Raises SettingError."""
    unit = s.batch_slots * s.train_seq_len
    for name, good, takes in (
        ("num_heads", s.model_dim % (2 * s.num_heads) == 0, f"a divisor of half of MODEL_DIM={s.model_dim}"),
        ("num_kv_heads", s.num_heads % s.num_kv_heads == 0, f"a divisor of NUM_HEADS={s.num_heads}"),
        ("train_batch_tokens", s.train_batch_tokens % unit == 0, f"a multiple of {unit}, a sequence a slot"),
        ("doc_tokens", not s.doc_tokens or s.data_order == "shuffled", "0 with DATA_ORDER=sequential"),
        ("run_id", re.fullmatch(RUN_NAME, s.run_id), "100 letters, digits, . _ - at most, the first no ."),
        ("val_tokens_limit", s.val_tokens_limit != 1, "0 or at least 2: the first token is not scored"),
        ("max_flops", s.plan.steps > 0, f"0 or at least those of a step, {s.plan.flops[0]}"),
    ):
        if not good:
            raise SettingError(f"{name.upper()}={show(getattr(s, name))}: takes {takes}")


def show(value: Any) -> str:
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(int(value) if isinstance(value, bool) else value)


# --- parameters and plan: everything that is learned, and what each step consists of ----------------------


class Param(NamedTuple):
    """One learned tensor, float32. Of a layered one, (layers, ...), each block reads its own."""

    name: str
    shape: tuple[int, ...]
    init: str  # normal, uniform (by scale), constant, or last: of the last layer, else 0
    scale: float
    group: str  # matrix: updated by Muon, products in the compute dtype; others: by Adam
    lr: float
    parts: tuple[int, ...] = ()  # rows of the matrices in each layer of it
    layered: bool = True


def parameter_table(s: Settings) -> list[Param]:
    """All parameters in storage order, matrices first; qkv holds three matrices, [out, in]."""
    layers, dim, hidden = s.num_layers, s.model_dim, s.mlp_mult * s.model_dim
    kv_dim = s.head_dim * s.num_kv_heads
    qkv = (dim, kv_dim, kv_dim)
    bound = dim**-0.5  # uniform in +-1/sqrt(fan in), as usual for a linear layer
    # What a block adds to the stream starts at zero, so deep models train from step 0 (Zhang et al. 2019).
    table = [
        Param("qkv", (layers, sum(qkv), dim), "uniform", bound, "matrix", s.matrix_lr, qkv),
        Param("attn_out", (layers, dim, dim), "constant", 0.0, "matrix", s.matrix_lr, (dim,)),
        Param("mlp_up", (layers, hidden, dim), "uniform", bound, "matrix", s.matrix_lr, (hidden,)),
        Param("mlp_down", (layers, dim, hidden), "constant", 0.0, "matrix", s.matrix_lr, (dim,)),
    ]
    vocab = (s.vocab_size, dim)
    std, lr = (s.tied_embed_init_std, s.tied_embed_lr) if s.tie_embeddings else (1.0, s.embed_lr)
    table.append(Param("tok_emb", vocab, "normal", std, "embed", lr, layered=False))
    if not s.tie_embeddings:  # tied: Press and Wolf 2017
        table.append(Param("head", vocab, "constant", 0.0, "head", s.head_lr, layered=False))
    for name, start in {"attn_scale": 1.0, "mlp_scale": 1.0, "mix_x": 1.0, "mix_x0": 0.0}.items():
        table.append(Param(name, (layers, dim), "constant", start, "vector", s.scalar_lr))
    if s.key_shift:
        table.append(Param("key_shift", (layers, kv_dim), "last", s.key_shift, "vector", s.scalar_lr))
    table.append(Param("q_gain", (layers, s.num_heads), "constant", s.qk_gain_init, "vector", s.scalar_lr))
    skips = (layers // 2, dim)
    return [*table, Param("skip_weight", skips, "constant", 1.0, "vector", s.scalar_lr, layered=False)]


def draw(param: Param, seed: int) -> np.ndarray:
    """Start value, float32, from the seed and the parameter's name alone: equal in every framework."""
    digest = hashlib.sha256(f"{seed}:{param.name}".encode()).digest()
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    unit = np.ones(param.shape, np.float32)
    if param.init == "normal":
        unit = rng.standard_normal(param.shape, dtype=np.float32)
    elif param.init == "uniform":
        unit = 2 * rng.random(param.shape, dtype=np.float32) - 1
    elif param.init == "last":
        unit[:-1] = 0.0
    return unit * np.float32(param.scale)


class Step(NamedTuple):
    """What one optimizer step consists of, and all steps before it."""

    seq_len: int  # tokens of a sequence; divides those of a slot
    slots: int  # of the batch; the number of ranks divides it
    slots_before: int
    flops_before: int


class Plan:
    """The shape of each step, and how many there are: as many as ITERATIONS and MAX_FLOPS allow."""

    def __init__(self, s: Settings):
        self.s = s
        # Parts of the run whose steps have one shape: share of all steps at its end, seq_len, slots.
        self.stages = [(1.0, s.train_seq_len, s.batch_slots)]
        self.flops = [step_flops(s, seq_len, slots) for _, seq_len, slots in self.stages]
        self.steps = s.iterations
        if s.max_flops:
            shares = np.diff([until for until, *_ in self.stages], prepend=0.0)
            self.steps = min(self.steps, int(s.max_flops // np.dot(shares, self.flops)))
        while s.max_flops and self.step(self.steps).flops_before > s.max_flops:
            self.steps -= 1  # the end of a stage was rounded up

    def step(self, number: int) -> Step:
        """The step of this number. The one after the last says what the whole run was."""
        first, slots_before, flops_before = 0, 0, 0
        for (until, seq_len, slots), flops in zip(self.stages, self.flops):
            end = round(until * self.steps) if until < 1 else math.inf
            done = min(number, end) - first
            slots_before += done * slots
            flops_before += done * flops
            if number < end:
                return Step(seq_len, slots, slots_before, flops_before)
            first = end

    def lr_multiplier(self, step: int, elapsed: float) -> float:
        """Linear rise, constant, linear fall to 0 over the last part of the run's operations or seconds."""
        s = self.s
        by_flops = self.step(step).flops_before / self.step(self.steps).flops_before
        progress = max(by_flops, elapsed / (s.max_wallclock_seconds or math.inf))
        part = s.warmdown_iters if s.warmdown_iters < 1 else s.warmdown_iters / self.steps
        rise = min(1.0, (step + 1) / max(s.lr_warmup_steps, 1))
        fall = min(1.0, max(0.0, 1.0 - progress) / part) if part else 1.0
        return rise * fall

    def muon_momentum(self, step: int) -> float:
        s = self.s
        done = min(1.0, step / s.muon_momentum_warmup_steps) if s.muon_momentum_warmup_steps else 1.0
        return (1 - done) * s.muon_momentum_warmup_start + done * s.muon_momentum


def step_flops(s: Settings, seq_len: int, slots: int) -> int:
    """Operations of a training step: 2 m n k for each product, forward, backward and of the optimizer.

    A weight is in three products of a token, a query with a key in six. Newton-Schulz counts on one rank.
    """
    weights, newton_schulz = s.vocab_size * s.model_dim, 0  # of the output matrix
    for param in parameter_table(s):
        if param.group == "matrix":
            weights += math.prod(param.shape)
            for rows in param.parts:
                low, high = sorted((rows, param.shape[2]))
                products = 4 * low * low * high + 2 * low**3  # of the short side, [low, high]
                newton_schulz += s.num_layers * products
    # A block of queries meets its own keys, and those before it that are in its first query's window.
    starts = np.arange(0, seq_len, query_block(s.num_heads // s.num_kv_heads))
    sizes = np.diff(starts, append=seq_len)
    pairs = sum(int(sizes @ (sizes + np.minimum(starts, window))) for window in s.windows)
    sequence = 6 * weights * seq_len + 12 * s.model_dim * pairs
    sequences = slots * s.slot_tokens // seq_len
    return sequences * sequence + s.muon_backend_steps * newton_schulz


# --- model: B batch, T tokens, D width, H heads, G key-value heads, R = H / G, K head width, V vocabulary --

# Queries that attention multiplies at once with the keys up to their last: 256 rows fill a product's tiles.
query_block = lambda heads_a_key: max(128, 256 // max(heads_a_key, 1))
NORM_EPS = 1e-6  # written down: the default of rms_norm differs between torch versions
Weights = dict[str, Tensor]  # by parameter name
Rope = tuple[Tensor, Tensor]


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, float32, no weights (Zhang and Sennrich 2019)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)


def rope_tables(s: Settings, device: torch.device, length: int) -> Rope:
    """(cos, cos) and (sin, -sin), float32[T, 1, K], of the rotary position embedding (Su et al. 2021)."""
    pairs = torch.arange(0, s.head_dim, 2, dtype=torch.float64)
    frequencies = s.rope_base ** (-pairs / s.head_dim)
    positions = torch.arange(length, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)[:, None]
    angles = torch.cat([angles, -angles], -1)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def norm_and_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RMS-normalise each head and turn its pairs (first half, second half) by the angle of their position."""
    x = rms_norm(x)
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x * cos + swapped * sin


def attention(q_BTGRK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, window: float) -> Tensor:
    """Causal softmax attention of a query to its last `window` keys, at scale 1 / sqrt(K): of q's shape."""
    # A group of queries shares a key (Ainslie et al. 2023); a window is short or all (Beltagy et al. 2020).
    if q_BTGRK.device.type == "cpu" or q_BTGRK.dtype == torch.float32 or q_BTGRK.size(-1) % 8:
        return attention_by_blocks(q_BTGRK, k_BTGK, v_BTGK, window)
    q, tokens = q_BTGRK.flatten(2, 3), q_BTGRK.size(1)
    if window < tokens:  # FlashAttention 2 (Dao 2023) has windows, torch's function for all kernels has none
        causal = k_BTGK, v_BTGK, None, None, tokens, tokens, 0.0, True, False
        flash = torch.ops.aten._flash_attention_forward
        return flash(q, *causal, window_size_left=window - 1, window_size_right=0)[0].view_as(q_BTGRK)
    q, k, v = (x.transpose(1, 2) for x in (q, k_BTGK, v_BTGK))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).view_as(q_BTGRK)


def attention_by_blocks(q_BTGRK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, window: float) -> Tensor:
    """attention by blocks of queries, the R heads of a group as rows, on the keys that one of them meets."""
    scale = q_BTGRK.size(-1) ** -0.5 * math.log2(math.e)  # softmax to base 2: exp2 is quicker than exp
    q = (q_BTGRK * scale).transpose(1, 2).contiguous()  # else bmm copies a slice of each
    k = k_BTGK.transpose(1, 2).contiguous()
    v = v_BTGK.transpose(1, 2).contiguous()
    outs, end = [], 0
    for block_BGtRK in q.split(query_block(q.size(3)), dim=2):
        start, end = end, end + block_BGtRK.size(2)
        queries = block_BGtRK.flatten(2, 3).flatten(0, 1)
        begin = max(0, start - window)
        keys = k[:, :, begin:end].flatten(0, 1)
        values = v[:, :, begin:end].flatten(0, 1)
        # Row i of the queries is head i % R at position start + i // R, and sees the keys up to there.
        rows = torch.arange(queries.size(1), dtype=torch.int32, device=q.device)[:, None]
        places = torch.arange(begin, end, dtype=torch.int32, device=q.device)
        own = rows // q.size(3) + start
        seen = places <= own
        if window < end - begin:
            seen = seen & (places > own - window)
        scores = torch.bmm(queries, keys.mT).float().where(seen, -math.inf)
        largest = scores.detach().amax(-1, keepdim=True)
        weight = torch.exp2(scores - largest).to(v.dtype)
        total = weight.sum(-1, keepdim=True, dtype=torch.float32)
        out = torch.bmm(weight, values).float() / total
        outs.append(out.to(v.dtype).view_as(block_BGtRK))
    return torch.cat(outs, 2).transpose(1, 2)


class Cache:
    """What one layer keeps of the tokens before: their keys and values, a ring of the last T positions."""

    def __init__(self, s: Settings, rows: int, machine: Machine, window: float):
        shape = rows, s.num_kv_heads, min(window, s.eval_window), s.head_dim  # [B, G, T, K]
        self.keys = torch.empty(shape, dtype=machine.dtype, device=machine.device)
        self.values = torch.empty_like(self.keys)
        self.last_key = None  # [B, 1, G, K] of the token before, as it was before it was mixed
        self.position = 0  # of the token that comes; at 0 all is forgotten


def cached_attention(q_BTGRK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, cache: Cache) -> Tensor:
    """attention of one token, T = 1, to itself and what its cache holds."""
    place = cache.position % cache.keys.size(2)
    cache.keys[:, :, place] = k_BTGK[:, 0]
    cache.values[:, :, place] = v_BTGK[:, 0]
    cache.position += 1
    held = cache.keys[:, :, : cache.position], cache.values[:, :, : cache.position]
    return F.scaled_dot_product_attention(q_BTGRK[:, 0], *held)[:, None]


def mix_before(k_BTGK: Tensor, share_GK: Tensor, cache: Cache | None) -> Tensor:
    """Keys in float32, each mixed with the one before: induction (Olsson et al. 2022) in a single layer."""
    before = F.pad(k_BTGK, (0, 0, 0, 0, 1, -1))  # zeros before the first
    if cache:
        before = cache.last_key if cache.position else before
        cache.last_key = k_BTGK
    return torch.lerp(k_BTGK.float(), before.float(), share_GK)


def block(
    s: Settings, x: Tensor, x0: Tensor, rope: Rope, w: Weights, window: float, cache: Cache | None
) -> Tensor:
    """One pre-norm transformer block, [B, T, D] to the same; vectors among its weights act in float32."""
    dtype = x.dtype
    cos, sin = rope
    x = w["mix_x"] * x + w["mix_x0"] * x0  # each block may look at the embedding (modded-nanogpt, 2024)
    qkv = F.linear(rms_norm(x).to(dtype), w["qkv"]).unflatten(2, (-1, s.head_dim))
    q, k, v = qkv.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=2)
    q = q.unflatten(2, (s.num_kv_heads, -1))  # (G, R): over H Inductor vectorizes no loop
    # Normed queries and keys keep logits small (Henry et al. 2020); a gain for each head sharpens them.
    gain = w["q_gain"].view(s.num_kv_heads, -1, 1)
    q = (norm_and_rotate(q, cos[:, None], sin[:, None]) * gain).to(dtype)
    if "key_shift" in w:
        k = mix_before(k, w["key_shift"].view(s.num_kv_heads, -1), cache)
    k = norm_and_rotate(k, cos, sin).to(dtype)
    y = cached_attention(q, k, v, cache) if cache else attention(q, k, v, window)
    if s.exclusive_attention:  # a token's own value is in the stream already: heads speak of the others
        own_BTG1K = F.normalize(v.float(), dim=-1).unsqueeze(3)
        y = (y - (y * own_BTG1K).sum(-1, keepdim=True) * own_BTG1K).to(dtype)
    x = x + w["attn_scale"] * F.linear(y.flatten(2), w["attn_out"])
    y = F.linear(rms_norm(x).to(dtype), w["mlp_up"])
    y = F.leaky_relu(y, s.mlp_leak).square()  # So et al. 2021 without the leak, by which all units learn
    x = x + w["mlp_scale"] * F.linear(y, w["mlp_down"])
    return x.to(dtype)


def head_logits(x: Tensor, matrix: Tensor, softcap: float, dtype: torch.dtype) -> Tensor:
    """[..., D] -> float32[..., V]: final norm, product in dtype, softcap c tanh(z / c) (Gemma 2, 2024)."""
    z = F.linear(rms_norm(x).to(dtype), matrix.to(dtype)).float()
    m = torch.expm1((z * (2 / softcap)).clamp(max=80.0))  # tanh = m / (m + 2): its own is slow on a CPU
    return softcap * (m / (m + 2))


def head_nll(x: Tensor, matrix: Tensor, targets: Tensor, softcap: float, dtype: torch.dtype) -> Tensor:
    """float32[B, T]: cross-entropy of each target in nats."""
    logits = head_logits(x, matrix, softcap, dtype)
    ids = torch.arange(logits.size(-1), dtype=torch.int32, device=x.device)
    hit = ids == targets[..., None].int()
    top = softcap if softcap <= 40 else logits.detach().amax(-1, keepdim=True)  # exp's range in float32
    total = (logits - top).exp().sum(-1, keepdim=True).log() + top
    return total[..., 0] - (logits * hit).sum(-1)  # a gather's backward, a scatter, is slow


class GPT:
    """A U-Net of transformer blocks, all parameters of which lie in one flat float32 tensor."""

    def __init__(self, s: Settings, machine: Machine):
        self.s, self.machine, self.table = s, machine, parameter_table(s)
        self.sizes = [math.prod(p.shape) for p in self.table]
        self.flat = torch.zeros(sum(self.sizes), device=machine.device, requires_grad=True)
        self.positions = functools.cache(functools.partial(rope_tables, s, machine.device))
        self.block = machine.compiled(functools.partial(block, s))
        self.add = machine.compiled(lambda x, weight, skip: (x + weight * skip).to(x.dtype))
        self.head_nll = machine.compiled(head_nll)

    def views(self, flat: Tensor) -> Weights:
        """A flat tensor as tensors by parameter name."""
        return {p.name: part.view(p.shape) for p, part in zip(self.table, flat.split(self.sizes))}

    def weights(self) -> tuple[Weights, list[Weights]]:
        """By name, what is read once and what each layer reads; matrices in the compute dtype."""
        once = {}
        layers = [{} for _ in range(self.s.num_layers)]
        for param, view in zip(self.table, self.views(self.flat).values()):
            if param.group == "matrix":
                view = view.to(self.machine.dtype)
            if param.layered:
                for layer, part in zip(layers, view.unbind(0)):
                    layer[param.name] = part
            else:
                once[param.name] = view
        return once, layers

    def trunk(self, ids: Tensor, caches: list[Cache] | None = None) -> tuple[Tensor, Tensor]:
        """int64[B, T] -> the last block's output, [B, T, D] in the compute dtype, and the output matrix."""
        once, layers = self.weights()
        start = caches[0].position if caches else 0
        end = start + ids.size(1)
        cos, sin = self.positions(1 << end.bit_length())  # powers of two, so that few tables are made
        rope = cos[start:end], sin[start:end]
        x0 = rms_norm(F.embedding(ids, once["tok_emb"])).to(self.machine.dtype)
        x = x0.view_as(x0)  # were it x0 itself, the block would be compiled once more for that case
        half = len(layers) // 2
        outputs = []
        for i, (layer, window) in enumerate(zip(layers, self.s.windows)):
            if i >= half and outputs:  # the second half takes up what the first left, last in first out:
                x = self.add(x, once["skip_weight"][i - half], outputs.pop())  # Ronneberger et al. 2015
            x = self.block(x, x0, rope, layer, window, caches[i] if caches else None)
            if i < half:
                outputs.append(x)
        return x, once.get("head", once["tok_emb"])

    def token_nll(self, ids: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """int64[B, T] and their targets -> float32[B, T], nats; the last product in dtype."""
        x, head = self.trunk(ids)
        return self.head_nll(x, head, targets, self.s.logit_softcap, dtype)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """float32[]: what training minimises."""
        return self.token_nll(ids, targets, self.machine.dtype).mean()

    @torch.no_grad()
    def nll(self, ids: np.ndarray) -> np.ndarray:
        """int64[B, T+1] -> float32[B, T]: nats of ids[:, 1:], each given what stands left of it."""
        tensor = torch.from_numpy(ids).to(self.machine.device)
        return self.token_nll(tensor[:, :-1], tensor[:, 1:], torch.float32).cpu().numpy()


# --- optimizer and training: Muon for the block matrices, Adam for everything else ------------------------

MICRO_TOKENS = 8192  # slots below it share a forward pass: fewer calls, and a CPU's cache still holds them


def newton_schulz(stack: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Singular values of [n, rows, cols] to 0.7 to 1.2, in dtype: Muon's quintic (Jordan et al. 2024)."""
    if stack.size(1) > stack.size(2):
        return newton_schulz(stack.mT, steps, dtype).mT
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.to(dtype)
    norm = torch.linalg.matrix_norm(x.float(), keepdim=True)
    x = x / (norm + 1e-7).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        even = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, even, x, beta=a)
    return x


class Optimizer:
    """One step over the flat parameters. `state`: all that the next step depends on but for its number."""

    def __init__(self, s: Settings, model: GPT, machine: Machine):
        self.s, self.machine = s, machine
        self.matrices = [p for p in model.table if p.group == "matrix"]
        self.matrix_sizes = [math.prod(p.shape) for p in self.matrices]
        num_matrix = sum(self.matrix_sizes)  # the matrices stand first
        self.sizes = [num_matrix, len(model.flat) - num_matrix]
        weights = model.flat.detach()
        matrices, rest = weights.split(self.sizes)
        self.state = {"weights": weights, "momentum": torch.zeros_like(matrices)}
        self.state |= {"moment1": torch.zeros_like(rest), "moment2": torch.zeros_like(rest)}
        rates = torch.tensor([p.lr for p in model.table])
        self.rates = rates.repeat_interleave(torch.tensor(model.sizes)).to(machine.device)
        self.orthogonalize = machine.recorded(self.orthogonalize)

    def orthogonalize(self, flat: Tensor) -> Tensor:
        """Newton-Schulz on each of the matrices in a flat tensor, times sqrt(max(1, out / in))."""
        updates = []
        for param, part in zip(self.matrices, flat.split(self.matrix_sizes)):
            done = []
            for stack in part.view(param.shape).split(param.parts, dim=1):
                factor = max(1.0, stack.size(1) / stack.size(2)) ** 0.5
                x = newton_schulz(stack, self.s.muon_backend_steps, self.machine.dtype)
                done.append(x.float() * factor)
            updates.append(torch.cat(done, dim=1).flatten())
        return torch.cat(updates)

    def muon(self, weights: Tensor, grad: Tensor, rate: Tensor, step: int, take: Tensor):
        """The direction of Nesterov's momentum, orthogonalized (Jordan et al. 2024)."""
        beta = self.s.plan.muon_momentum(step)
        momentum = self.state["momentum"]
        momentum.mul_(torch.where(take > 0, beta, 1.0)).add_(grad)
        weights.sub_(self.orthogonalize(grad.add(momentum, alpha=beta)) * rate)

    def adam(self, weights: Tensor, grad: Tensor, rate: Tensor, step: int, take: Tensor):
        """Kingma and Ba 2015."""
        s = self.s
        moment1, moment2 = self.state["moment1"], self.state["moment2"]
        moment1.lerp_(grad, take * (1 - s.beta1))
        moment2.lerp_(grad.square(), take * (1 - s.beta2))
        unbiased1 = moment1 / (1 - s.beta1 ** (step + 1))
        unbiased2 = moment2 / (1 - s.beta2 ** (step + 1))
        root = unbiased2.sqrt_().add_(s.adam_eps)
        weights.sub_(rate * unbiased1 / root)

    @torch.no_grad()
    def step(self, grad: Tensor, step: int, multiplier: float, take: Tensor):
        """Update the weights from the flat gradient, float32; where take is 0, and it too, they stay."""
        rates = self.rates * (take * multiplier)
        matrices, rest = zip(*(x.split(self.sizes) for x in (self.state["weights"], grad, rates)))
        self.muon(*matrices, step, take)
        self.adam(*rest, step, take)


class Trainer:
    """Model and optimizer of one run on this rank. The twin on another framework derives from it."""

    def __init__(self, s: Settings, machine: Machine):
        self.s, self.machine, self.model = s, machine, GPT(s, machine)
        self.size = sum(self.model.sizes)
        self.gradient = machine.recorded(self.gradient)
        self.reset()

    def reset(self):
        self.load({p.name: draw(p, self.s.seed) for p in self.model.table})
        self.optimizer = Optimizer(self.s, self.model, self.machine)

    def load(self, weights: Arrays):
        flat = np.concatenate([weights[p.name].ravel() for p in self.model.table])
        self.model.flat.data.copy_(torch.from_numpy(flat))

    def gradient(self, batch: Tensor, seq_len: int) -> Tensor:
        """float32[size + 1]: gradient of the mean loss of int64[n, slot_tokens + 1], and that loss."""
        total = torch.zeros(self.size + 1, device=self.machine.device)
        together = math.gcd(len(batch), max(1, MICRO_TOKENS // self.s.slot_tokens))
        for slots in batch.to(self.machine.device, non_blocking=True).split(together):
            ids = slots[:, :-1].reshape(-1, seq_len)
            targets = slots[:, 1:].reshape(-1, seq_len)
            share = len(slots) / (len(batch) * self.machine.world)
            loss = self.model.loss(ids, targets) * share
            total[: self.size] += torch.autograd.grad(loss, self.model.flat)[0]
            total[self.size] += loss.detach()
        return total

    def step(self, batch: Tensor, step: int, multiplier: float) -> Tensor:
        """One optimizer step on this rank's slots, int64[n, slot_tokens + 1]: float32[4], as in log_step."""
        total = self.gradient(batch, self.s.plan.step(step).seq_len)
        bad = ~total.sum().isfinite()
        self.machine.all(dist.all_reduce, total, group=self.machine.reducers)
        grad, loss = total[: self.size], total[self.size]
        norm = grad.norm()
        take = (loss + norm).isfinite()  # not so on one rank is not so in the sum: all ranks skip alike
        if self.s.grad_clip_norm:
            grad = grad * (self.s.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step(grad.masked_fill(~take, 0.0), step, multiplier, take.float())
        return torch.stack([loss, norm, take, bad])

    def warm_up(self):
        """Compile and touch everything with steps of every shape on dummy tokens, then forget them."""
        rows = max(1, self.s.val_batch_size // self.s.batch_slots // self.s.eval_window)
        self.model.nll(np.zeros((rows, self.s.eval_window + 1), np.int64))
        for _, seq_len, slots in self.s.plan.stages:
            shape = slots // self.machine.world, self.s.slot_tokens + 1
            batch = self.machine.tensor(np.zeros(shape, np.int64))
            self.gradient(batch, seq_len)
        patience = datetime.timedelta(seconds=10 * self.s.dist_timeout)  # who has to compile is not lost
        self.machine.all(dist.monitored_barrier, timeout=patience)
        for step in range(self.s.warmup_steps):
            self.step(batch, step, 1.0)
        self.reset()

    def restore(self, arrays: Arrays):
        for name, tensor in self.optimizer.state.items():
            need("checkpoint", f"shape of {name}", np.shape(arrays.get(name)), tuple(tensor.shape), OTHER_RUN)
            tensor.copy_(torch.from_numpy(arrays[name]))

    def sha256(self, *names: str) -> bytes:
        arrays = [self.machine.numpy(self.optimizer.state[name]) for name in names]
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()

    def export(self) -> bytes:
        views = self.model.views(self.optimizer.state["weights"])
        weights = {name: self.machine.numpy(view) for name, view in views.items()}
        return encode_artifact(dataclasses.replace(self.s, dtype=self.machine.facts()["dtype"]), weights)

    def validate(self, corpus: Corpus, run: Run, limit: int) -> float | None:
        """Compare the replicas, score `limit` tokens, 0: all; bits per byte. Raises FloatingPointError."""
        s, step, seconds = self.s, run.counters.steps, run.counters.train_seconds
        hashes = self.machine.share(*self.sha256("weights")).tolist()
        odd = [rank for rank, found in enumerate(hashes) if found != max(hashes, key=hashes.count)]
        if odd:
            raise FloatingPointError(f"step {step}: the weights of rank {odd} differ from the others'")
        if not len(corpus.val_tokens):
            return None
        began = time.perf_counter()
        score = evaluate(s, self.model.nll, corpus, self.machine, limit)
        run.counters.eval_seconds += time.perf_counter() - began
        mark = " partial" if score["partial"] else ""
        found = f"val_loss:{score['val_loss']:.4f} val_bpb:{score['val_bpb']:.4f}{mark}"
        run.line(f"step:{step}/{s.plan.steps} {found} train_time:{seconds * 1e3:.0f}ms")
        run.event("val", step=step, train_seconds=seconds, **score)
        return score["val_bpb"]


def train(trainer: Trainer, corpus: Corpus, run: Run):
    """Step and validate until the last step, the clock's cap or a signal (InterruptedError)."""
    s, machine, counters = trainer.s, trainer.machine, run.counters
    reader = BatchReader(s, corpus.train, machine, counters.steps)
    steps, hidden = range(counters.steps, s.plan.steps + 1), machine.rank > 0 or not sys.stderr or None
    bar = tqdm(steps, None, s.plan.steps, leave=False, initial=steps[0], disable=hidden)
    saved, logged, crc32 = time.perf_counter(), counters.train_seconds, 0
    began = saved - counters.train_seconds  # validation moves it: its seconds do not count
    for step in bar:
        now = time.perf_counter()
        wants_checkpoint = s.ckpt_seconds > 0 and now - saved >= s.ckpt_seconds
        shared = machine.share(now - began, wants_checkpoint, len(machine.signals), crc32)
        counters.train_seconds, checkpoint_due, *_ = shared[0].tolist()  # rank 0's clock decides for all
        signalled = shared[:, 2].any()  # on any rank
        counters.batches_crc32 = (counters.batches_crc32 + int(shared[:, 3].sum())) % 2**32
        time_is_up = s.max_wallclock_seconds > 0 and counters.train_seconds >= s.max_wallclock_seconds
        done = step == s.plan.steps or time_is_up
        validation_due = step > 0 and s.val_loss_every > 0 and step % s.val_loss_every == 0
        if done or signalled or checkpoint_due or validation_due:  # the clock stands still
            run.flush()
            paused = time.perf_counter()
            run.save(trainer)
            saved = time.perf_counter()
            if done or signalled:
                break
            if validation_due:
                trainer.validate(corpus, run, min(8 * s.val_batch_size, s.val_tokens_limit or 2**63))
            began += time.perf_counter() - paused
        lr_mul = s.plan.lr_multiplier(step, counters.train_seconds)
        batch, crc32, wait = reader.next()
        stats = trainer.step(batch, step, lr_mul)
        counters.steps += 1
        facts = {"step": step + 1, "lr_mul": lr_mul, "data_wait_seconds": wait}
        facts["train_seconds"] = time.perf_counter() - began
        facts["train_flops"] = s.plan.step(step + 1).flops_before
        run.pending.append((stats, facts))
        if step < 10 or counters.train_seconds - logged >= 2:  # to read numbers from a GPU is to wait for it
            run.flush()
            logged = counters.train_seconds
    bar.close()
    if signalled:
        raise InterruptedError(f"stopped by a signal after step {step} of {s.plan.steps}")


# --- data and score: shards of 256 little-endian int32 and uint16 tokens (format: data/README.md) ---------

WORDS = "magic version tokens extension extension_version vocabulary bos documents highest_id"
INTS = [(word, "<u4") for word in WORDS.split()] + [("text_bytes", "<u8")]
INTS += [(word, "<u4") for word in ("crc32", "index", "shards", "split", "flags")]
HEADER = np.dtype([*INTS, ("tokenizer", "V32"), ("corpus", "V32"), ("unused", "V896")])
GET_DATA = "python -m data.prepare demo makes the demo corpus, python -m data.download fetches FineWeb"
OTHER_RUN = "set that or choose another RUN_ID"
MEND = "damaged, make or fetch it again; python -m data.shards verify says more"


def need(where: Any, what: str, found: Any, expected: Any, more: str = MEND):
    if found != expected:
        found, expected = (x.hex() if isinstance(x, bytes) else x for x in (found, expected))
        raise DataError(f"{where}: {what} is {found}, expected {expected}: {more}")


def read_file(name: str, path: Any, start: int = 0, size: int = -1) -> bytes:
    """Bytes of a file. Raises DataError that begins with `name`."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError as error:
        raise DataError(f"{name}{path} (in {os.getcwd()}): {error.strerror}; {GET_DATA}") from None


class TokenStream:
    """The tokens of all shards of a split, end to end and around again. Raises DataError."""

    def __init__(self, s: Settings, split: str, tokenizer_sha256: str):
        self.vocab_size = s.vocab_size
        self.paths = sorted(Path(s.data_path).glob(f"*_{split}_*.bin"))
        if not self.paths:
            raise DataError(f"DATA_PATH={s.data_path} (in {os.getcwd()}): no *_{split}_*.bin; {GET_DATA}")
        blobs = [read_file("", path, 0, HEADER.itemsize).ljust(HEADER.itemsize, b"\0") for path in self.paths]
        self.headers = np.frombuffer(b"".join(blobs), HEADER)
        self.extended = bool(self.headers["extension"][0])  # else legacy: no header says more than its size
        claims = {"magic": 20240520, "version": 1, "extension": 0x31464C47 if self.extended else 0}
        if self.extended:
            claims |= {"vocabulary": s.vocab_size, "tokenizer": bytes.fromhex(tokenizer_sha256)}
            claims |= {"shards": len(self.paths), "split": int(split == "train")}
        for path, header in zip(self.paths, self.headers):
            for what, expected in claims.items():
                need(path, what, header[what].item(), expected)
            size = HEADER.itemsize + 2 * max(header["tokens"].item(), 1)
            need(path, "file size", path.stat().st_size, size)
        self.starts = [0, *np.cumsum(self.headers["tokens"], dtype=np.int64).tolist()]  # of shards; the end
        self.total = self.starts[-1]
        documents = [np.zeros(1, np.int64)]
        for path, header, start, end in zip(self.paths, self.headers, self.starts, self.starts[1:]):
            crc32 = 0
            for at in range(start, end if self.extended else start, 2**24):  # whole shards may be too large
                tokens = self.read(at, min(2**24, end - at))
                crc32 = zlib.crc32(tokens, crc32)
                documents.append(at + np.flatnonzero(tokens == header["bos"]))
            need(path, "crc32 of the tokens", crc32, header["crc32"])
        self.documents = np.concatenate(documents)  # int64[n]: where they begin; the last goes on at 0

    def read(self, start: int, length: int) -> np.ndarray:
        """uint16[length] from token `start` on, the first token following the last."""
        parts = [np.zeros(0, np.uint16)]
        while length:
            start %= self.total
            index = int(np.searchsorted(self.starts, start, "right")) - 1
            path, at = self.paths[index], start - self.starts[index]
            count = min(length, self.starts[index + 1] - start)
            parts.append(np.frombuffer(read_file("", path, HEADER.itemsize + 2 * at, 2 * count), "<u2"))
            need(path, f"number of tokens from {at} on", len(parts[-1]), count, "the file was cut")
            if parts[-1].max() >= self.vocab_size:
                found = f"{path}: token {parts[-1].max()} from number {at} on"
                raise DataError(f"{found}, expected below VOCAB_SIZE={self.vocab_size}: {MEND}")
            start, length = start + count, length - count
        return np.concatenate(parts)


class BatchReader:
    """Reads a rank's part of the next batch in a thread. What a slot holds depends on its number alone."""

    def __init__(self, s: Settings, stream: TokenStream, machine: Machine, step: int):
        self.s, self.stream, self.machine, self.step = s, stream, machine, step
        self.length = s.slot_tokens + 1  # the last is a target only
        windows = np.arange(stream.total // self.length)
        if s.doc_tokens:  # windows whose middle stands in a short document
            sizes = np.diff(stream.documents, append=stream.total)
            middles = windows * self.length + self.length // 2
            document = np.searchsorted(stream.documents, middles, "right") - 1
            windows = windows[sizes[document] <= s.doc_tokens]
        if not len(windows):
            found = f"DATA_PATH={s.data_path}: {stream.total} training tokens, no slot of {self.length}"
            raise DataError(f"{found} in a document of DOC_TOKENS; lower TRAIN_BATCH_TOKENS")
        self.order = np.random.Generator(np.random.Philox(key=s.seed)).permutation(windows)
        self.thread = ThreadPoolExecutor(1, "batch reader")
        self.coming = self.thread.submit(self.read, step)

    def read(self, step: int) -> tuple[Any, int]:
        """This rank's slots of a step, int64[n, slot_tokens + 1] of the framework, and a checksum."""
        shape, rows, crc32 = self.s.plan.step(step), [], 0
        for slot in range(self.machine.rank, shape.slots, self.machine.world):
            number = shape.slots_before + slot
            place = number if self.s.data_order == "sequential" else self.order[number % len(self.order)]
            rows.append(self.stream.read(int(place) * self.length, self.length))
            crc32 += zlib.crc32(rows[-1], number % 2**32)
        return self.machine.tensor(np.stack(rows).astype(np.int64)), crc32

    def next(self) -> tuple[Any, int, float]:  # batch, its checksum, seconds waited for it
        began = time.perf_counter()
        batch, crc32 = self.coming.result()
        self.step += 1
        self.coming = self.thread.submit(self.read, self.step)
        return batch, crc32, time.perf_counter() - began


def byte_table(tokenizer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """UTF-8 bytes that a token adds, int64[vocab]: after text; after a control token; which are control."""
    ids = range(tokenizer.vocab_size())
    control = np.array([tokenizer.is_control(i) for i in ids])
    silent = control | [tokenizer.is_unknown(i) for i in ids]
    first = np.array([len(text.encode()) for text in tokenizer.decode([[i] for i in ids])])
    anchor = int(np.argmax(~silent & (first > 0)))  # any piece of text: behind it no dummy prefix is dropped
    inner = [len(text.encode()) for text in tokenizer.decode([[anchor, i] for i in ids])] - first[anchor]
    for sizes in (inner, first):
        sizes[[tokenizer.is_byte(i) for i in ids]] = 1
        sizes[silent] = 0
    return inner, first, control


def token_bytes(tokenizer: Any, tokens: np.ndarray) -> np.ndarray:
    """Bytes of each token of a stream, int64[n]; documents begin after a control token."""
    inner, first, control = byte_table(tokenizer)
    after_control = np.concatenate([[True], control[tokens[:-1]]])
    return np.where(after_control, first[tokens], inner[tokens])


class Corpus(NamedTuple):
    train: TokenStream | None
    val_tokens: np.ndarray  # uint16[n]
    val_bytes: np.ndarray  # int[n]: what each is worth
    notes: list[str]
    sha256: dict[str, str]  # of the training headers, the validation tokens, the tokenizer's file


def load_corpus(s: Settings, with_train: bool = True) -> Corpus:
    """The tokenizer and the shards, which must belong together. Raises DataError."""
    where = f"TOKENIZER_PATH={s.tokenizer_path}"
    blob = read_file("TOKENIZER_PATH=", s.tokenizer_path)
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=blob)
    except RuntimeError:
        raise DataError(f"{where} is no SentencePiece model; {GET_DATA}") from None
    need(where, "vocabulary", tokenizer.vocab_size(), s.vocab_size, "VOCAB_SIZE must be the tokenizer's")
    train = TokenStream(s, "train", sha256(blob)) if with_train else None
    hashes = {"train_sha256": sha256(train.headers if train else b""), "tokenizer_sha256": sha256(blob)}
    if train and not any(Path(s.data_path).glob("*_val_*.bin")):
        none, notes = np.zeros(0, np.uint16), ["note: no validation text: this run is not scored"]
        return Corpus(train, none, none, notes, hashes)
    val = TokenStream(s, "val", sha256(blob))
    tokens = val.read(0, val.total)
    worth, notes = token_bytes(tokenizer, tokens), []
    total, stated = int(worth.sum(dtype=np.int64)), int(val.headers["text_bytes"].sum())
    if not val.extended:
        notes.append(f"note: legacy shards: {total} validation bytes by decoding, no header vouches for them")
    elif val.headers["flags"][0] & 1:  # the tokenizer does not give the text back: its true bytes, spread
        worth = np.diff(np.cumsum(worth, dtype=np.int64) * stated // max(total, 1), prepend=0)
        notes.append(f"note: lossy tokenizer: {total} bytes decoded of {stated}")
    else:
        need(s.data_path, "byte count of the validation tokens", total, stated)
    return Corpus(train, tokens, worth, notes, hashes | {"val_sha256": sha256(tokens)})


def evaluate(s: Settings, nll: Callable, corpus: Corpus, machine: Machine, limit: int) -> dict[str, Any]:
    """val_loss (nats a token) and val_bpb of the first `limit` tokens; 0: all. Raises DataError."""
    tokens = corpus.val_tokens[: limit or None]
    last = len(tokens) - 1
    if last < 1:
        raise DataError(f"DATA_PATH={s.data_path}: {len(tokens)} validation tokens, expected at least 2")
    nats, window = 0.0, min(s.eval_window, last)
    rows = max(1, s.val_batch_size // s.batch_slots // window)
    for first in range(machine.rank * rows, math.ceil(last / window), machine.world * rows):
        starts = (first + np.arange(rows)) * window
        places = starts[:, None] + np.arange(window + 1)
        ids = tokens[np.minimum(places, last)].astype(np.int64)  # one shape, so that a model compiles once
        scored = places[:, 1:] <= last
        nats += float(nll(ids)[scored].sum(dtype=np.float64))
    nats = float(machine.share(nats).sum())
    size = int(corpus.val_bytes[1 : len(tokens)].sum(dtype=np.int64))
    score = {"val_loss": nats / last, "val_bpb": nats / math.log(2) / max(size, 1)}
    return score | {"val_tokens": last, "val_bytes": size, "partial": len(tokens) < len(corpus.val_tokens)}


# --- files: the artifact, zlib over a safetensors file (format: records/FORMAT.md), and a run's folder -----

INT8_ABOVE = 65536  # elements: smaller tensors are not worth a scale for each row
TIMES = {"train_seconds": 0.0, "eval_seconds": 0.0, "data_wait_seconds": 0.0}
COUNTERS = TIMES | {"steps": 0, "skipped_steps": 0, "skipped_in_a_row": 0, "resumes": 0, "batches_crc32": 0}
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, zlib.error)
DAMAGED += (safetensors.SafetensorError,)


def quantize_rows(matrix: np.ndarray) -> Arrays:
    """int8[..., rows, columns], and a scale for each row: float16 if all are normal numbers in it."""
    scale = np.abs(matrix).max(axis=-1) / np.float32(127)
    half = np.finfo(np.float16)
    if np.all((scale == 0) | ((scale >= half.tiny) & (scale <= half.max))):
        scale = scale.astype(np.float16)
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
    return {"": np.clip(np.rint(matrix / divisor), -127, 127).astype(np.int8), ".scale": scale}


SCHEMES = {  # name: (float32 array -> arrays by what is added to the tensor's name, and back)
    "int8 rows": (quantize_rows, lambda parts: parts[""] * np.float32(parts[".scale"])[..., None]),
    "float16": (lambda x: {"": x.astype(np.float16)}, lambda parts: parts[""].astype(np.float32)),
    "float32": (lambda x: {"": x}, lambda parts: parts[""]),
}


def scheme_of(param: Param) -> str:
    """Vectors stay float32: their few numbers steer whole layers. Of the rest, large tensors are int8."""
    if param.group == "vector":
        return "float32"
    return "int8 rows" if math.prod(param.shape) > INT8_ABOVE else "float16"


def pack_tensors(tensors: Arrays, about: Facts) -> bytes:
    """A safetensors file. One metadata key only: safetensors writes several in no fixed order."""
    plain = {name: np.ascontiguousarray(array) for name, array in tensors.items()}  # stored as it lies
    return safetensors.numpy.save(plain, {"bytegolf": json.dumps(about, sort_keys=True)})


def unpack_tensors(blob: bytes) -> tuple[Arrays, Facts]:
    """The tensors and what pack_tensors wrote about them. Raises one of DAMAGED."""
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    return safetensors.numpy.load(blob), json.loads(header["__metadata__"]["bytegolf"])


def encode_artifact(s: Settings, weights: Arrays) -> bytes:
    """float32 weights by name -> the artifact's bytes. Raises FloatingPointError."""
    schemes, tensors = {p.name: scheme_of(p) for p in parameter_table(s)}, {}
    for name, scheme in schemes.items():
        parts = SCHEMES[scheme][0](weights[name])
        if not all(np.isfinite(array).all() for array in parts.values()):
            raise FloatingPointError(f"{name} is not finite, or too large for {scheme}: nothing was exported")
        tensors |= {name + part: array for part, array in parts.items()}
    settings = {name: getattr(s, name) for name, row in ROWS.items() if "free" not in row.metadata}
    return zlib.compress(pack_tensors(tensors, {"schemes": schemes, "settings": settings}), 9)


def decode_artifact(blob: bytes, path: Any) -> tuple[Facts, Arrays]:
    """The settings and float32 weights by name in the bytes of an artifact. Raises DataError if damaged."""
    try:
        tensors, about = unpack_tensors(zlib.decompress(blob))
        settings = {key: parse_setting(ROWS[key], show(value)) for key, value in about["settings"].items()}
        s, weights = Settings(**settings), {}
        check_settings(s)
        for p in parameter_table(s):
            parts = {end: tensors.pop(p.name + end) for end in ("", ".scale") if p.name + end in tensors}
            value = SCHEMES[about["schemes"][p.name]][1](parts)
            if (value.shape, value.dtype) != (p.shape, np.float32) or not np.isfinite(value).all():
                raise ValueError(f"{p.name} is {value.dtype}{value.shape}, expected finite float32{p.shape}")
            weights[p.name] = value
        if tensors:
            raise ValueError(f"holds {min(tensors)!r}, which the model has no place for")
    except DAMAGED as error:
        raise DataError(f"{path} is no whole artifact: {type(error).__name__}: {error}") from None
    return settings, weights


def dry_run(s: Settings, origins: dict[str, str], code: int) -> Iterator[str]:
    """The lines of DRY_RUN=1: all settings, all parameters, the planned size. Needs no data or device."""
    for name, origin in origins.items():
        yield f"{name.upper()}={show(getattr(s, name))} ({origin})"
    params, artifact = 0, 0
    for p in parameter_table(s):
        way = "muon" if p.group == "matrix" else "adam"
        yield f"{p.name} {'x'.join(map(str, p.shape))} float32 init {p.init} {p.scale:.6g} {way} {p.group}"
        row = SCHEMES[scheme_of(p)][0](np.zeros((1, p.shape[-1]), np.float32))
        artifact += math.prod(p.shape[:-1]) * sum(array.nbytes for array in row.values())
        params += math.prod(p.shape)
    yield f"params: {params}\nsteps: {s.plan.steps}\nstep_flops: {s.plan.flops[0]}"
    yield f"planned_artifact_bytes: {artifact} (before zlib)\ncode_bytes: {code}"
    yield f"budget: {'ok' if artifact + code <= s.budget_bytes else 'over before zlib'}"


def write_whole(path: Path, blob: bytes):  # so that a file of this name is always whole
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def newest_checkpoint(folder: Path) -> tuple[Arrays, Facts, list[str]]:
    """Arrays, facts and notes of the newest whole one, if any. Raises DataError if all are damaged."""
    notes, paths = [], sorted(folder.glob("step_*.ckpt"), reverse=True)
    for at, path in enumerate(paths):
        blob = read_file("", path)
        if hashlib.sha256(blob[:-32]).digest() == blob[-32:]:
            for damaged in paths[:at]:
                damaged.rename(damaged.with_suffix(".damaged"))
            return *unpack_tensors(blob[:-32]), [*notes, f"resumed from {path}"]
        notes.append(f"warning: {path} is damaged; the one before is taken")
    if paths:
        raise DataError(f"{paths[0]} and all before it are damaged; to begin anew remove {folder.parent}")
    return {}, {}, []


def open_run(s: Settings, about: Facts) -> tuple[Path, Arrays, Facts, list[str]]:
    """logs/<RUN_ID>/, locked, and its newest whole checkpoint. SettingError, DataError: not of `about`."""
    folder = Path("logs", s.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{s.preset}-{os.getpid()}")
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    metrics, refused = folder / "metrics.jsonl", f"RUN_ID={folder.name}: choose another, {folder}"
    metrics.touch()
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
    except BlockingIOError:
        raise SettingError(f"{refused} is in use by another process") from None
    events = metrics.read_bytes()
    if b'{"event": "final"' in events.rpartition(b"\n")[0]:
        raise SettingError(f"{refused} is a run that has ended and is never overwritten")
    arrays, facts, notes = newest_checkpoint(folder / "checkpoint")
    for name, was in facts.get("settings", {}).items():
        now, free = show(about["settings"][name]), "free" in ROWS[name].metadata
        if now != show(was) and not free and (name, s.dtype) != ("dtype", "auto"):
            raise SettingError(f"{name.upper()}={now}: {folder} was begun with {show(was)}; {OTHER_RUN}")
    for name, was in facts.get("sha256", {}).items():
        need(folder, name, about["sha256"].get(name), was, "the data that the run was begun with")
    os.truncate(metrics, min(facts.get("metrics_bytes", 0), len(events)))  # steps beyond are done again
    write_whole(folder / "config.json", json.dumps(about, indent=1).encode())
    return folder, arrays, facts, notes


class Run:
    """What a run tells and keeps; rank 0 writes train.log for people and metrics.jsonl for programs."""

    def __init__(self, machine: Machine, s: Settings, folder: Any = None, about: Any = None, was: Any = ()):
        self.machine, self.s, self.folder, self.about = machine, s, folder, about
        self.counters = types.SimpleNamespace(**COUNTERS | dict(was))
        self.pending = []  # stats and facts of the steps since the last flush

    def write(self, name: str, text: str):
        if self.folder and self.machine.rank == 0:
            with open(self.folder / name, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text + "\n")

    def line(self, *texts: str):
        if self.machine.rank == 0:
            with contextlib.suppress(OSError, AttributeError):  # a terminal that was closed: the run goes on
                tqdm.write("\n".join(texts), file=sys.stdout)
                sys.stdout.flush()
        self.write("train.log", "\n".join(texts))

    def event(self, event: str, **values: Any):  # floats exact, those that are not finite as text
        plain = {k: str(v) if v in (math.inf, -math.inf) or v != v else v for k, v in values.items()}
        self.write("metrics.jsonl", json.dumps({"event": event, **plain}))
        if event == "warning":
            self.line(f"warning: {values['text']}")

    def final(self, rows: Facts):
        self.line("---", *(f"{key}: {value}" for key, value in rows.items()))
        self.event("final", **rows)  # marks the end of the run

    def flush(self):
        for stats, facts in self.pending:
            self.log_step(*stats.tolist(), **facts)
        self.pending = []

    def log_step(self, loss: float, norm: float, taken: float, bad: float, **facts: Any):
        """An event, and a line of some steps. Raises FloatingPointError after MAX_SKIPPED in a row."""
        # taken: 0 if a number was not finite: the step changed nothing; bad: 1 if that was one of this rank's
        s, step, counters = self.s, facts["step"], self.counters
        counters.data_wait_seconds += facts["data_wait_seconds"]
        counters.skipped_steps += not taken
        counters.skipped_in_a_row = 0 if taken else counters.skipped_in_a_row + 1
        self.event("step", train_loss=loss, grad_norm=norm, **facts)
        if not taken:
            ranks = np.flatnonzero(self.machine.share(bad)).tolist() or "all"
            found = f"step {step} skipped: train_loss {loss}, gradient norm {norm}"
            self.event("warning", text=f"{found}, from rank {ranks}; weights and optimizer are as before")
            if counters.skipped_in_a_row == s.max_skipped:
                raise FloatingPointError(f"{found}, the last of MAX_SKIPPED; lower MATRIX_LR or SCALAR_LR")
        seconds, at = max(facts["train_seconds"], 1e-9), s.plan.step(step)
        if step <= 10 or step % s.train_log_every == 0 or step == s.plan.steps:
            self.line(  # speeds are averages over the run
                f"step:{step}/{s.plan.steps} train_loss:{loss:.4f} lr_mul:{facts['lr_mul']:.3f} "
                f"train_time:{seconds * 1e3:.0f}ms step_avg:{seconds / step * 1e3:.2f}ms "
                f"tok_s:{at.slots_before * s.slot_tokens / seconds:.0f} "
                f"mfu:{at.flops_before / seconds / self.machine.peak_flops / self.machine.world:.1%} "
                f"data_wait:{counters.data_wait_seconds / step * 1e3:.1f}ms train_flops:{at.flops_before:.4e}"
            )

    def save(self, trainer: Trainer):
        """Write a checkpoint: safetensors, and the sha256 of that behind it. The last two are kept."""
        if self.machine.rank:
            return
        about = self.about | {"counters": vars(self.counters)}
        about["metrics_bytes"] = (self.folder / "metrics.jsonl").stat().st_size
        state = {name: self.machine.numpy(tensor) for name, tensor in trainer.optimizer.state.items()}
        blob = pack_tensors(state, about)
        path = self.folder / f"checkpoint/step_{self.counters.steps:08}.ckpt"
        try:
            write_whole(path, blob + hashlib.sha256(blob).digest())
            for old in sorted(path.parent.glob("step_*.ckpt"))[:-2]:
                old.unlink()
        except OSError as error:  # the others stay, and training goes on
            self.event("warning", text=f"no checkpoint: {error}")


# --- machine: device, ranks, number format, compiler ------------------------------------------------------


@dataclasses.dataclass
class Machine:
    """Where this process computes. rank and world are its place among the processes of the run."""

    device: torch.device
    rank: int = 0
    world: int = 1
    dtype: torch.dtype = torch.float32
    peak_flops: float = math.inf  # per second, measured, of one process in dtype
    compile: bool = False
    timeout: float = 60.0  # DIST_TIMEOUT
    watch: Any = None  # a process group for the search for lost ranks alone
    reducers: Any = None  # the process group that sums gradients
    signals: list[int] = dataclasses.field(default_factory=list)  # those to stop that came

    def all(self, operation: Callable, *args: Any, **named: Any):
        """A collective operation. If it fails, raises InterruptedError, which names the lost ranks."""
        if self.world == 1:
            return
        try:
            operation(*args, **named)
        except RuntimeError as error:
            lost = ", ".join(map(str, self.lost_ranks())) or "unknown"
            raise InterruptedError(f"lost rank {lost}: dead, or silent for DIST_TIMEOUT") from error

    def lost_ranks(self) -> list[int]:
        """Who does not answer a call on connections that the failed operation has not used."""
        calls, lost, others = {}, [], [rank for rank in range(self.world) if rank != self.rank]
        for rank in others:
            with contextlib.suppress(RuntimeError):  # it is dead
                calls[rank] = [call(torch.zeros(1), rank, self.watch) for call in (dist.isend, dist.irecv)]
        for rank in others:
            try:
                for call in calls[rank]:
                    call.wait(datetime.timedelta(seconds=self.timeout / 2))
            except (RuntimeError, KeyError):
                lost.append(rank)
        return lost

    def note(self, number: int, frame: Any):
        """Note a signal to stop; the second SIGINT kills, if no torchrun passes on what a terminal sent."""
        self.signals.append(number)
        if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)

    def on_rank_0(self, function: Callable) -> Any:
        """What a function returns on rank 0, on every rank; if it raises there, the others lose rank 0."""
        answer = [function() if self.rank == 0 else None]
        self.all(dist.broadcast_object_list, answer, device=torch.device("cpu"))
        return answer[0]

    def share(self, *numbers: float) -> np.ndarray:  # float64[world, n]: these numbers of every rank
        everyone = [torch.tensor(numbers, dtype=torch.float64) for _ in range(self.world)]
        self.all(dist.all_gather, everyone, everyone[self.rank].clone())
        return torch.stack(everyone).numpy()

    def tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def numpy(self, tensor: Tensor) -> np.ndarray:
        return tensor.detach().cpu().numpy()

    def compiled(self, function: Callable) -> Callable:
        return torch.compile(function, dynamic=False) if self.compile else function

    def recorded(self, function: Callable) -> Callable:
        """A function of a tensor; on a GPU all its kernels are launched at once, as a CUDA graph."""
        if self.device.type == "cpu" or not self.compile:
            return function

        @functools.cache
        def record(shape: torch.Size, dtype: torch.dtype, *more: int) -> tuple[Tensor, Tensor, Any]:
            given, graph = torch.zeros(shape, dtype=dtype, device=self.device), torch.cuda.CUDAGraph()
            function(given, *more)  # compiles
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # others may work meanwhile
                return given, function(given, *more), graph

        def replay(tensor: Tensor, *more: int) -> Tensor:
            given, made, graph = record(tensor.shape, tensor.dtype, *more)
            given.copy_(tensor, non_blocking=True)
            graph.replay()
            return made  # which the next call overwrites

        return replay

    def product_speed(self, dtype: str) -> float:
        side = 8192 if self.device.type == "cuda" else 512
        a, b = torch.randn(2, side, side, device=self.device).to(getattr(torch, dtype))
        timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
        return 2 * side**3 / min(timer.timeit(1).mean for _ in range(3))

    def choose_dtype(self, wanted: str) -> str:
        """Set dtype and peak_flops, on rank 0's word for all; returns a line for the log."""
        names = ["bfloat16", "float32"] if wanted == "auto" else [wanted]
        flops = dict(zip(names, self.share(*map(self.product_speed, names))[0].tolist()))
        name = max(flops, key=flops.get)
        self.dtype, self.peak_flops = getattr(torch, name), flops[name]
        speeds = " ".join(f"{n}:{f / 1e9:.0f}GFLOP/s" for n, f in flops.items())
        return f"device:{self.device} dtype:{name} compile:{self.compile:d} {speeds}"

    def facts(self) -> Facts:
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else "none"
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "gpu": gpu}
        return facts | {"dtype": str(self.dtype).removeprefix("torch.")}

    def peak_memory_mib(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() // 2**20
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most // (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes


def open_machine(s: Settings) -> Machine:
    """Device, process group and compiler. Raises SettingError for what is not there."""
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets the three
    if any(slots % world for _, _, slots in s.plan.stages):
        raise SettingError(f"WORLD_SIZE={world}: takes a divisor of BATCH_SLOTS={s.batch_slots}")
    cuda = s.device == "cuda" or (s.device == "auto" and torch.cuda.is_available())
    if cuda and local >= torch.cuda.device_count():
        raise SettingError(f"DEVICE={s.device}: torch finds no GPU of number LOCAL_RANK={local}")
    machine = Machine(torch.device(f"cuda:{local}" if cuda else "cpu"), rank, world, timeout=s.dist_timeout)
    try:
        machine.compile = s.compile
        machine.compiled(torch.neg)(torch.zeros(2, device=machine.device))
    except Exception as error:  # no C++ compiler, a broken one, no folder for what it makes: eager runs
        machine.compile, why = False, " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(f"compile:0 (torch.compile fails, so eager and slower: {why})")
    keep_freed_memory()
    if world > 1:  # small decisions travel as CPU tensors over gloo: no GPU waits for them
        patience = datetime.timedelta(seconds=0.45 * s.dist_timeout)  # then half for the search for the lost
        store, *_ = next(dist.rendezvous("env://", timeout=patience))  # outlives torchrun's restarts
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("gloo", timeout=patience, store=store, rank=rank, world_size=world)
        machine.watch = dist.new_group()
        if cuda:  # NCCL's watchdog kills the process: gloo has to find a lost rank before
            torch.cuda.set_device(local)
            machine.reducers = dist.new_group(backend="nccl", timeout=5 * patience)
    return machine


def keep_freed_memory():
    """Let glibc keep freed memory: page faults of large temporaries slow a step. Elsewhere: nothing."""
    with contextlib.suppress(AttributeError):
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):  # mmap's use, trim's threshold, top pad
            ctypes.CDLL(None).mallopt(option, value)


# --- main: a whole run, an evaluation alone, and what the referee calls -----------------------------------

# What torch says of a CPU's memory, and MLX of any, in a RuntimeError of no kind of its own:
NO_MEMORY = "DefaultCPUAllocator: can't allocate|Unable to allocate|Attempting to allocate"


class Predictor:
    """A model that is given one token after the other, in many streams at once: what the referee calls."""

    def __init__(self, model: GPT):
        self.model, self.s, self.vocab_size = model, model.s, model.s.vocab_size
        self.rows = 32  # streams: few, so that each is long

    def start(self, rows: int) -> np.ndarray:
        """float32[rows, V]: logits of the first token of every stream, of which nothing is known."""
        self.caches = [Cache(self.s, rows, self.model.machine, window) for window in self.s.windows]
        return np.zeros((rows, self.vocab_size), np.float32)

    @torch.no_grad()
    def step(self, ids: np.ndarray) -> np.ndarray:
        """Given the next token of every stream, int64[rows]: logits of the one after, float32[rows, V]."""
        column = torch.from_numpy(ids).to(self.model.machine.device)[:, None]
        x, head = self.model.trunk(column, self.caches)
        return head_logits(x[:, -1], head, self.s.logit_softcap, torch.float32).cpu().numpy()


def load_predictor(artifact: Path, device: str = "cpu") -> Predictor:
    """An artifact's model as the referee asks for it (records/README.md). Raises DataError."""
    settings, weights = decode_artifact(read_file("", artifact), artifact)
    keep_freed_memory()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # float32: alike on all processors
    torch.backends.cuda.enable_cudnn_sdp(False)  # which plans anew for each number of keys
    trainer = Trainer(Settings(**settings), Machine(torch.device(device), dtype=dtype))
    trainer.load(weights)
    return Predictor(trainer.model)


def score_artifact(trainer: Trainer, blob: bytes, path: Any, corpus: Corpus, run: Run) -> Facts:
    """The result: what the weights of an artifact score. Raises FloatingPointError if that is no number."""
    began, s = time.perf_counter(), trainer.s
    trainer.load(decode_artifact(blob, path)[1])
    rows = {"artifact_bytes": len(blob), "artifact_sha256": sha256(blob)}
    if not len(corpus.val_tokens):
        return rows
    run.line(f"scoring {path}")
    score = evaluate(s, trainer.model.nll, corpus, trainer.machine, s.val_tokens_limit)
    if not math.isfinite(score["val_loss"]):
        raise FloatingPointError(f"{path}: scores {score['val_loss']} nats a token")
    mark = " partial" if score.pop("partial") else ""
    score |= {name: f"{score[name]:.8f}{mark}" for name in ("val_loss", "val_bpb")}
    return score | rows | {"eval_seconds": time.perf_counter() - began}


def finish(trainer: Trainer, corpus: Corpus, run: Run, code: Facts) -> int:
    """Write the artifact, and score it: the result. Returns the exit code."""
    s, machine, counters, path = trainer.s, trainer.machine, run.counters, run.folder / "model.ptz"
    trained = trainer.validate(corpus, run, s.val_tokens_limit)
    state_sha256 = trainer.sha256(*trainer.optimizer.state).hex()
    machine.on_rank_0(lambda: write_whole(path, trainer.export()))
    blob = machine.on_rank_0(path.read_bytes)
    rows = score_artifact(trainer, blob, path, corpus, run)
    if trained is not None:
        counters.eval_seconds += rows["eval_seconds"]
        rows["val_bpb_unquantized"] = f"{trained:.8f}"
    done, total = s.plan.step(counters.steps), len(blob) + code["code_bytes"]
    budget = "ok" if total <= s.budget_bytes else "over"
    rows |= vars(counters) | {"batches_crc32": f"{counters.batches_crc32:08x}"}
    rows |= {"train_flops": done.flops_before, "tokens_seen": done.slots_before * s.slot_tokens}
    rows |= code | {"total_bytes": total, "budget_bytes": s.budget_bytes, "budget": budget}
    rows |= {"device": str(machine.device), "preset": s.preset, "seed": s.seed, "run_id": run.folder.name}
    rows |= {"params": trainer.size, "torch": torch.__version__, "state_sha256": state_sha256}
    run.final(rows | {"peak_memory_mib": machine.peak_memory_mib()} | corpus.sha256)
    return 0 if budget == "ok" else 4


def run_all(s: Settings, origins: dict[str, str], code: Facts, machine: Machine, make: Callable) -> int:
    """A whole run on this rank. Returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # not under nohup
            signal.signal(number, machine.note)
    if s.eval_only:  # score an artifact of any shape, write nothing; the window can be overridden
        blob = read_file("EVAL_ONLY=", s.eval_only)
        carried, _ = decode_artifact(blob, s.eval_only)
        own = {k for k in carried if k.startswith(("eval_", "val_", "dtype")) and origins[k] == "environment"}
        s = dataclasses.replace(s, **{k: v for k, v in carried.items() if k not in own})
        check_settings(s)
        corpus, run = load_corpus(s, with_train=False), Run(machine, s)
        run.line(machine.choose_dtype(s.dtype), *corpus.notes)
        run.final(score_artifact(make(s, machine), blob, s.eval_only, corpus, run) | corpus.sha256)
        return 0
    corpus, speed, cpu = load_corpus(s), machine.choose_dtype(s.dtype), os.uname().machine
    if os.path.exists("/proc/cpuinfo"):
        cpu = re.search(r"model name\s*: (.*)|$", Path("/proc/cpuinfo").read_text())[1]
    environment = machine.facts() | {"ranks": machine.world, "processor": cpu}
    environment["script_sha256"] = code["script_sha256"]
    settings = dataclasses.asdict(s) | {"dtype": environment["dtype"]}
    about = {"settings": settings, "sha256": corpus.sha256, "origins": origins, "environment": environment}
    folder, arrays, facts, notes = machine.on_rank_0(lambda: open_run(s, about))
    run = Run(machine, s, folder, about, facts.get("counters", {}))
    if facts:  # DTYPE=auto may have found another one this time
        machine.choose_dtype(facts["settings"]["dtype"])
    trainer = make(s, machine)
    given = [f"{k.upper()}={show(getattr(s, k))}" for k in origins if origins[k] == "environment"]
    run.line(
        f"run:{folder} preset:{s.preset} {' '.join(given)}",
        " ".join(f"{k}:{v}" for k, v in environment.items()),
        speed,
        f"params:{trainer.size} batch:{s.batch_slots}x{s.slot_tokens} train_tokens:{corpus.train.total} "
        f"val_tokens:{len(corpus.val_tokens)} val_bytes:{corpus.val_bytes.sum(dtype=np.int64)}",
        *(corpus.notes + notes),
        f"warming up: {s.warmup_steps} untimed steps, then forgotten",
    )
    try:
        trainer.warm_up()
        if facts:
            trainer.restore(arrays)
            run.counters.resumes += 1
        train(trainer, corpus, run)
        return finish(trainer, corpus, run, code)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not machine.signals:  # those reach the compiler, too
            raise
        raise InterruptedError(f"{error}; the same command with RUN_ID={folder.name} goes on") from error


def main(open_machine: Callable = open_machine, make: Callable = Trainer, file: str = __file__) -> int:
    """The program, on this framework or the twin's, whose file counts, too. Returns the exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where who started us has closed it
        stream.reconfigure(errors="backslashreplace")
    try:
        s, origins = load_settings(os.environ, "10min_16mb" if torch.cuda.is_available() else "floppy")
        script = b"".join(Path(path).read_bytes() for path in dict.fromkeys([__file__, file]))
        size = len(script) if s.code_bytes == "raw" else len(zlib.compress(script, 9))
        if s.dry_run:
            print("\n".join(dry_run(s, origins, size)))
            return 0
        about_code = {"code_bytes": size, "script_sha256": sha256(script)}
        code = run_all(s, origins, about_code, open_machine(s), make)
    except (SettingError, DataError, FloatingPointError, OSError, MemoryError, RuntimeError) as error:
        text, code = str(error), getattr(error, "exit_code", 17 if isinstance(error, ArithmeticError) else 16)
        no_memory = type(error) is RuntimeError and re.search(NO_MEMORY, text)
        if no_memory or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            text, code = "out of memory: lower MODEL_DIM or TRAIN_BATCH_TOKENS", 2
        elif isinstance(error, RuntimeError) and not isinstance(error, dist.DistError):
            raise
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not isinstance(error, SettingError):  # a bad setting is one on all ranks
            print(f"{Path(file).name}: {text}" + (f" (rank {rank})" if rank != "0" else ""), file=sys.stderr)
    if dist.is_initialized():  # what waits for a rank which is gone would not end
        print(end="", flush=True)
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
