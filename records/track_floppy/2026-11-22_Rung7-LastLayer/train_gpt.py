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
from tqdm import tqdm


class SettingError(ValueError):  # does not parse, is impossible, or looks misspelt
    exit_code = 2


class DataError(ValueError):  # shard, tokenizer, artifact or checkpoint damaged, or not of one kind
    exit_code = 3


class NumericalError(ArithmeticError):  # no finite numbers, or replicas that differ
    exit_code = 17


class Stopped(Exception):  # by a signal or a lost rank: the run can go on, as after an OSError
    exit_code = 16


# --- settings: one table of environment variables; a preset is an environment of defaults -----------------

FLOPPY = """
    DATA_PATH=./data/datasets/demo_sp1024 TOKENIZER_PATH=./data/tokenizers/demo_1024_bpe.model
    NUM_LAYERS=4 MODEL_DIM=192 NUM_HEADS=3 NUM_KV_HEADS=1 KEY_SHIFT=1 QK_GAIN_INIT=4 EVAL_SLIDING=1
    TRAIN_SEQ_LEN=512 TRAIN_BATCH_TOKENS=8192 BATCH_SLOTS=16 VAL_BATCH_SIZE=65536
    ITERATIONS=100000 MAX_WALLCLOCK_SECONDS=0 MAX_FLOPS=1e14 BUDGET_BYTES=1474560 CODE_BYTES=zlib
    DOC_TOKENS=16384 WARMDOWN_ITERS=0.6 WARMUP_STEPS=2 LR_WARMUP_STEPS=20
    MATRIX_LR=0.06 MUON_MOMENTUM=0.95 MUON_MOMENTUM_WARMUP_START=0.85 MUON_MOMENTUM_WARMUP_STEPS=300
"""
SMOKE = """
    DOC_TOKENS=0 EVAL_SLIDING=0 NUM_LAYERS=3 MODEL_DIM=64 NUM_HEADS=2 QK_GAIN_INIT=1.5
    TRAIN_SEQ_LEN=128 TRAIN_BATCH_TOKENS=4096 BATCH_SLOTS=8
    VAL_LOSS_EVERY=0 VAL_TOKENS_LIMIT=65536 TRAIN_LOG_EVERY=10
    ITERATIONS=60 MAX_WALLCLOCK_SECONDS=60 MAX_FLOPS=0 WARMDOWN_ITERS=0.5 WARMUP_STEPS=1 LR_WARMUP_STEPS=5
    MATRIX_LR=0.02 MUON_MOMENTUM_WARMUP_STEPS=30 COMPILE=0
"""
PRESETS = {"10min_16mb": "", "floppy": FLOPPY, "smoke": FLOPPY + SMOKE}
LARGE = 1e300  # no limit


def var(default, doc, low=-LARGE, high=LARGE, **flags):
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
    eval_sliding: bool = var(False, "in streams a token's window ends with it, not where the next begins")
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
    train_seq_len: int = var(4096, "tokens of one training sequence", 1)
    batch_slots: int = var(8, "parts of a step's batch; the number of ranks must divide it", 1)
    vocab_size: int = var(1024, "pieces of the tokenizer", 2, 65536)
    num_layers: int = var(9, "blocks", 1)
    model_dim: int = var(512, "width of the residual stream", 1)
    num_heads: int = var(8, "query heads", 1)
    num_kv_heads: int = var(4, "key and value heads", 1)
    key_shift: float = var(0.0, "start of the share of the token before in the last keys; 0: none", 0, 1)
    mlp_mult: int = var(2, "hidden width of the MLP in model widths", 1)
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

    @property
    def slot_tokens(self):
        return self.train_batch_tokens // self.batch_slots

    @property
    def head_dim(self):
        return self.model_dim // self.num_heads

    @property
    def eval_window(self):
        return self.eval_seq_len or self.train_seq_len

    @property
    def steps(self):
        return min(self.iterations, int(self.max_flops // step_flops(self) if self.max_flops else LARGE))


ROWS = {row.name: row for row in dataclasses.fields(Settings)}
TAKES = {"int": "a whole number", "float": "a number", "bool": "0 or 1", "str": "a text"}


def parse_setting(row, text):
    """The value of one environment variable. Raises SettingError naming what it takes."""
    low, high, pick = row.metadata["low"], row.metadata["high"], row.metadata.get("pick")
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
        takes += f" from {low:g}" * (low > -1e300) + f" to {high:g}" * (high < 1e300)
        raise SettingError(f"{row.name.upper()}={text!r}: takes {takes}")
    return value


def refuse_near_misses(env):
    """Stop at a variable that was probably meant as a setting (ITERATION, num_layers)."""
    names = {name.upper() for name in ROWS}
    for name in sorted(env.keys() - names - {"COMPILER", "MODEL_DIR"}):  # other programs' own
        for meant in difflib.get_close_matches(name.upper(), names, 1, cutoff=0.85):
            raise SettingError(f"{name}={env[name]!r} is no setting, {meant} is: write that or unset it")


def load_settings(env, default_preset):
    """The settings, and the origin of each: 'preset' or 'environment'. Raises SettingError."""
    refuse_near_misses(env)
    preset = parse_setting(ROWS["preset"], env.get("PRESET", default_preset))
    texts = dict(word.split("=") for word in PRESETS[preset].split()) | {"PRESET": preset} | env
    given = [row for name, row in ROWS.items() if name.upper() in texts]
    s = Settings(**{row.name: parse_setting(row, texts[row.name.upper()]) for row in given})
    check_settings(s)
    return s, {name: "environment" if name.upper() in env else "preset" for name in ROWS}


def check_settings(s):
    """Refuse values that are possible alone but not together. Raises SettingError."""
    unit = s.batch_slots * s.train_seq_len
    letters = "at most 100 letters, digits, '.', '_', '-', the first no '.'"
    for name, good, takes in (
        ("num_heads", s.model_dim % (2 * s.num_heads) == 0, f"a divisor of half of MODEL_DIM={s.model_dim}"),
        ("num_kv_heads", s.num_heads % s.num_kv_heads == 0, f"a divisor of NUM_HEADS={s.num_heads}"),
        ("train_batch_tokens", s.train_batch_tokens % unit == 0, f"a multiple of {unit}, a sequence a slot"),
        ("doc_tokens", not s.doc_tokens or s.data_order == "shuffled", "0 with DATA_ORDER=sequential"),
        ("run_id", re.fullmatch(r"([\w-][\w.-]{0,99})?", s.run_id), letters),
        ("val_tokens_limit", s.val_tokens_limit != 1, "0 or at least 2: the first token is not scored"),
    ):
        if not good:
            raise SettingError(f"{name.upper()}={getattr(s, name)}: takes {takes}")
    if s.steps < 1:
        takes = f"0 or at least those of a step, {step_flops(s)}"
        raise SettingError(f"MAX_FLOPS={show(s.max_flops)}: takes {takes}")


def show(value):
    """A setting's value as its environment variable would be written."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(int(value) if isinstance(value, bool) else value)


# --- parameters: names, shapes, start values and learning rates of everything that is learned -------------


class Param(NamedTuple):
    """One learned tensor, float32. Of a layered one, (layers, ...), each block reads its own."""

    name: str
    shape: tuple[int, ...]
    init: str  # normal, uniform (by scale), constant, or last: of the last layer, else 0
    scale: float
    group: str  # matrix: updated by Muon, products in the compute dtype; others: by Adam
    lr: float
    layered: bool = True


def parameter_table(s):
    """All parameters in storage order, matrices first; qkv holds three matrices, [out, in]."""
    layers, dim, hidden = s.num_layers, s.model_dim, s.mlp_mult * s.model_dim
    kv_dim = s.head_dim * s.num_kv_heads
    vocab, bound = (s.vocab_size, dim), dim**-0.5  # uniform in +-1/sqrt(fan in): usual for a linear layer
    table = [
        Param("qkv", (layers, dim + 2 * kv_dim, dim), "uniform", bound, "matrix", s.matrix_lr),
        Param("attn_out", (layers, dim, dim), "constant", 0.0, "matrix", s.matrix_lr),
        Param("mlp_up", (layers, hidden, dim), "uniform", bound, "matrix", s.matrix_lr),
        Param("mlp_down", (layers, dim, hidden), "constant", 0.0, "matrix", s.matrix_lr),
    ]
    std, lr = (s.tied_embed_init_std, s.tied_embed_lr) if s.tie_embeddings else (1.0, s.embed_lr)
    table.append(Param("tok_emb", vocab, "normal", std, "embed", lr, layered=False))
    if not s.tie_embeddings:
        table.append(Param("head", vocab, "constant", 0.0, "head", s.head_lr, layered=False))
    for name, start in {"attn_scale": 1.0, "mlp_scale": 1.0, "mix_x": 1.0, "mix_x0": 0.0}.items():
        table.append(Param(name, (layers, dim), "constant", start, "vector", s.scalar_lr))
    if s.key_shift:
        table.append(Param("key_shift", (layers, kv_dim), "last", s.key_shift, "vector", s.scalar_lr))
    table.append(Param("q_gain", (layers, s.num_heads), "constant", s.qk_gain_init, "vector", s.scalar_lr))
    skips = (layers // 2, dim)
    return [*table, Param("skip_weight", skips, "constant", 1.0, "vector", s.scalar_lr, layered=False)]


def draw(param, seed):
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


def part_rows(s, param):
    """Rows of each of the matrices that stand in a layer of a parameter."""
    kv_dim = s.head_dim * s.num_kv_heads
    return (s.model_dim, kv_dim, kv_dim) if param.name == "qkv" else (param.shape[1],)


def query_block(ratio):
    """Queries that are multiplied at once with the keys up to their last: 256 rows fill a product's tiles."""
    return max(128, 256 // ratio)


@functools.cache
def step_flops(s):
    """Operations of a training step: 2 m n k for each product, forward, backward and of the optimizer.

    A weight is in three products of a token, a query with a key in six. Newton-Schulz counts on one rank.
    """
    weights, newton_schulz = s.vocab_size * s.model_dim, 0
    for param in parameter_table(s):
        if param.group == "matrix":
            weights += math.prod(param.shape)
            for rows in part_rows(s, param):
                low, high = sorted((rows, param.shape[2]))
                newton_schulz += s.num_layers * (4 * low * low * high + 2 * low**3)
    length, size = s.train_seq_len, query_block(s.num_heads // s.num_kv_heads)
    whole, rest = divmod(length, size)
    pairs = size * size * whole * (whole + 1) // 2 + rest * length
    sequence = 6 * weights * length + 12 * s.num_layers * s.model_dim * pairs
    return s.train_batch_tokens // length * sequence + s.muon_backend_steps * newton_schulz


# --- model: B batch, T tokens, D width, H heads, G key-value heads, R = H / G, K head width, V vocabulary --

NORM_EPS = 1e-6  # written down: the default of rms_norm differs between torch versions


def rms_norm(x):
    """x / sqrt(mean(x^2) + eps) over the last dimension, float32, no weights (Zhang and Sennrich 2019)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)


def rope_tables(s, device, length):
    """(cos, cos) and (sin, -sin), float32[T, 1, K], of the rotary position embedding (Su et al. 2021)."""
    inverse = s.rope_base ** (-torch.arange(0, s.head_dim, 2, dtype=torch.float64) / s.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse)[:, None]
    angles = torch.cat([angles, -angles], -1)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def norm_and_rotate(x, cos, sin):
    """RMS-normalise each head and turn its pairs (first half, second half) by the angle of their position."""
    x = rms_norm(x)
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x * cos + swapped * sin


def attention(q_BTGRK, k_BTGK, v_BTGK):
    """Causal grouped-query softmax attention at scale 1 / sqrt(K): [B, T, H * K]."""
    if q_BTGRK.device.type == "cpu":
        return attention_by_blocks(q_BTGRK, k_BTGK, v_BTGK)
    q, k, v = (x.transpose(1, 2) for x in (q_BTGRK.flatten(2, 3), k_BTGK, v_BTGK))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def attention_by_blocks(q_BTGRK, k_BTGK, v_BTGK):
    """attention for CPUs: blocks of queries, the R heads of a group as rows, on the keys up to their last."""
    scale = q_BTGRK.size(-1) ** -0.5 * math.log2(math.e)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q_BTGRK * scale, k_BTGK, v_BTGK))  # or bmm copies
    outs, end = [], 0
    for block_BGtRK in q.split(query_block(q.size(3)), dim=2):
        start, end = end, end + block_BGtRK.size(2)
        keys, values = k[:, :, :end].flatten(0, 1), v[:, :, :end].flatten(0, 1)
        queries = block_BGtRK.flatten(2, 3).flatten(0, 1)
        rows = torch.arange(queries.size(1), dtype=torch.int32, device=q.device)[:, None]
        causal = torch.arange(end, dtype=torch.int32, device=q.device) <= rows // q.size(3) + start
        scores = torch.bmm(queries, keys.mT).float().where(causal, -math.inf)
        weight = torch.exp2(scores - scores.detach().amax(-1, keepdim=True)).to(v.dtype)
        total = weight.sum(-1, keepdim=True, dtype=torch.float32)
        out = torch.bmm(weight, values).float() / total
        outs.append(out.to(v.dtype).view_as(block_BGtRK))
    return torch.cat(outs, 2).transpose(1, 2).flatten(2)


def cached_attention(q_BTGRK, k_BTGK, v_BTGK, cache, start):
    """attention of position `start`; cache: [2, B, G, T + 1, K], T keys and values, in any order: a ring."""
    length = cache.size(3) - 1
    cache[:, :, :, start % length] = torch.stack((k_BTGK[:, 0], v_BTGK[:, 0]))
    out_BGRK = F.scaled_dot_product_attention(q_BTGRK[:, 0], *cache[:, :, :, : min(start + 1, length)])
    return out_BGRK.flatten(1)[:, None]


def mix_before(k_BTGK, share_GK, past):
    """Keys in float32, each mixed with the one before: what followed a token is found in a single layer."""
    before = F.pad(k_BTGK, (0, 0, 0, 0, 1, -1))
    if past:  # the last key as it was waits behind the ring
        (keys_BGTK, _), start = past
        before[:, 0] = keys_BGTK[:, :, -1] if start else 0.0
        keys_BGTK[:, :, -1] = k_BTGK[:, 0]
    return torch.lerp(k_BTGK.float(), before.float(), share_GK)


def block(x, x0, cos, sin, w, head_dim, past=None):
    """One pre-norm transformer block, [B, T, D] to the same; vectors among its weights act in float32."""
    dtype, heads = x.dtype, x.size(2) // head_dim
    x = w["mix_x"] * x + w["mix_x0"] * x0
    qkv = F.linear(rms_norm(x).to(dtype), w["qkv"]).unflatten(2, (-1, head_dim))
    groups = (qkv.size(2) - heads) // 2
    q, k, v = qkv.split((heads, groups, groups), dim=2)
    q = q.unflatten(2, (groups, -1))  # (G, R): over H Inductor vectorizes no loop
    q = norm_and_rotate(q, cos[:, None], sin[:, None]) * w["q_gain"].view(groups, -1, 1)
    if "key_shift" in w:
        k = mix_before(k, w["key_shift"].view(groups, head_dim), past)
    q, k = q.to(dtype), norm_and_rotate(k, cos, sin).to(dtype)
    y = cached_attention(q, k, v, *past) if past else attention(q, k, v)
    x = x + w["attn_scale"] * F.linear(y, w["attn_out"])
    y = F.relu(F.linear(rms_norm(x).to(dtype), w["mlp_up"])).square()  # relu squared: So et al. 2021
    return (x + w["mlp_scale"] * F.linear(y, w["mlp_down"])).to(dtype)


def head_logits(x, matrix, softcap, dtype):
    """[..., D] -> float32[..., V]: final norm, product in dtype, softcap c tanh(z / c)."""
    z = F.linear(rms_norm(x).to(dtype), matrix.to(dtype)).float()
    m = torch.expm1((z * (2 / softcap)).clamp(max=80.0))  # tanh = m / (m + 2): its own is slow on a CPU
    return softcap * (m / (m + 2))


def head_nll(x, matrix, targets, softcap, dtype):
    """float32[B, T]: cross-entropy of each target in nats."""
    logits = head_logits(x, matrix, softcap, dtype)
    hit = torch.arange(logits.size(-1), dtype=torch.int32, device=x.device) == targets[..., None].int()
    top = softcap if softcap <= 40 else logits.detach().amax(-1, keepdim=True)  # range of exp
    total = (logits - top).exp().sum(-1, keepdim=True).log() + top
    return total[..., 0] - (logits * hit).sum(-1)  # a gather's backward, a scatter, is slow


class GPT:
    """A U-Net of transformer blocks, all parameters of which lie in one flat float32 tensor."""

    def __init__(self, s, machine):
        self.s, self.machine, self.table = s, machine, parameter_table(s)
        self.sizes = [math.prod(p.shape) for p in self.table]
        self.flat = torch.zeros(sum(self.sizes), device=machine.device, requires_grad=True)
        self.positions = functools.cache(functools.partial(rope_tables, s, machine.device))
        compiled = functools.partial(torch.compile, dynamic=False) if machine.compile else lambda part: part
        self.block, self.head_nll = compiled(block), compiled(head_nll)

    def views(self, flat):
        return {p.name: part.view(p.shape) for p, part in zip(self.table, flat.split(self.sizes))}

    def weights(self):
        """By name, what is read once, and what each layer reads; matrices in the compute dtype."""
        read = self.views(self.flat)
        read |= {p.name: read[p.name].to(self.machine.dtype) for p in self.table if p.group == "matrix"}
        parts = {p.name: read.pop(p.name).unbind(0) for p in self.table if p.layered}
        return read, [dict(zip(parts, layer)) for layer in zip(*parts.values())]

    def trunk(self, ids, cache=None, start=0):
        """int64[B, T] -> the last block's output, [B, T, D] in the compute dtype, and the output matrix."""
        once, layers = self.weights()
        end = start + ids.size(1)
        cos, sin = (table[start:end] for table in self.positions(1 << end.bit_length()))  # a few lengths
        x0 = rms_norm(F.embedding(ids, once["tok_emb"])).to(self.machine.dtype)
        x = x0.view_as(x0)  # were it x0 itself, the block would be compiled once more for that case
        half, outputs = len(layers) // 2, []
        for i, layer in enumerate(layers):
            if i >= half and outputs:  # the second half takes up what the first left, last in first out
                x = x + (once["skip_weight"][i - half] * outputs.pop()).to(x.dtype)
            past = None if cache is None else (cache[i], start)
            x = self.block(x, x0, cos, sin, layer, self.s.head_dim, past)
            if i < half:
                outputs.append(x)
        return x, once.get("head", once["tok_emb"])

    def token_nll(self, ids, targets, dtype):
        """int64[B, T] and their targets -> float32[B, T], nats; the last product in dtype."""
        x, head = self.trunk(ids)
        return self.head_nll(x, head, targets, self.s.logit_softcap, dtype)

    def loss(self, ids, targets):
        return self.token_nll(ids, targets, self.machine.dtype).mean()

    @torch.no_grad()
    def nll(self, ids):
        """int64[B, T+1] -> float32[B, T]: nats of ids[:, 1:], each given what stands left of it."""
        tensor = torch.from_numpy(ids).to(self.machine.device)
        return self.token_nll(tensor[:, :-1], tensor[:, 1:], torch.float32).cpu().numpy()


# --- optimizer and schedules: Muon for the block matrices, Adam for everything else -----------------------


def newton_schulz(stack, steps, dtype):
    """Singular values of [n, rows, cols] to 0.7 to 1.2, in dtype: Muon's quintic (Jordan et al. 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = stack.size(1) > stack.size(2)
    x = (stack.mT if tall else stack).to(dtype)
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True) + 1e-7).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Optimizer:
    """One step over the flat parameters. `state`: all that the next step depends on but for its number."""

    def __init__(self, s, model, machine):
        self.s, self.model, self.machine = s, model, machine
        matrix = sum(math.prod(p.shape) for p in model.table if p.group == "matrix")
        self.sizes = matrix, len(model.flat) - matrix  # of the matrices, which stand first, and of the rest
        matrices, rest = model.flat.detach().split(self.sizes)
        self.state = {"weights": model.flat.detach(), "momentum": torch.zeros_like(matrices)}
        self.state |= {"moment1": torch.zeros_like(rest), "moment2": torch.zeros_like(rest)}
        self.rates = torch.empty_like(model.flat)
        for param, view in zip(model.table, model.views(self.rates).values()):
            view.fill_(param.lr)

    @torch.no_grad()
    def step(self, grad, step, multiplier, take):
        """Update the weights from the flat gradient, float32; where take is 0, and it too, they stay."""
        s, state, rate = self.s, self.state, self.rates * (take * multiplier)
        matrix_grad, rest_grad = grad.split(self.sizes)
        matrix_rate, rest_rate = rate.split(self.sizes)
        matrices, rest = state["weights"].split(self.sizes)
        momentum = muon_momentum(s, step)
        state["momentum"].mul_(torch.where(take > 0, momentum, 1.0)).add_(matrix_grad)
        matrix_grad.add_(state["momentum"], alpha=momentum)  # Nesterov
        for param, view in zip(self.model.table, self.model.views(grad).values()):
            if param.group == "matrix":
                for stack in view.split(part_rows(s, param), dim=1):
                    done = newton_schulz(stack, s.muon_backend_steps, self.machine.dtype)
                    stack.copy_(done).mul_(max(1.0, stack.size(1) / stack.size(2)) ** 0.5)
        matrices.sub_(matrix_grad * matrix_rate)
        state["moment1"].lerp_(rest_grad, take * (1 - s.beta1))  # Adam (Kingma and Ba 2015)
        state["moment2"].lerp_(rest_grad.square(), take * (1 - s.beta2))
        moment1 = state["moment1"] / (1 - s.beta1 ** (step + 1))
        root = (state["moment2"] / (1 - s.beta2 ** (step + 1))).sqrt_().add_(s.adam_eps)
        rest.sub_(rest_rate * moment1 / root)


def lr_multiplier(s, step, elapsed):
    """Linear rise, constant, linear fall to 0 over the last part of the run, by its steps or its seconds."""
    by_clock = elapsed / s.max_wallclock_seconds if s.max_wallclock_seconds else 0.0
    progress = min(1.0, max(step / s.steps, by_clock))
    rise = min(1.0, (step + 1) / max(s.lr_warmup_steps, 1))
    part = s.warmdown_iters if s.warmdown_iters < 1 else s.warmdown_iters / s.steps
    return rise * (min(1.0, (1.0 - progress) / part) if part else 1.0)


def muon_momentum(s, step):
    done = min(1.0, step / s.muon_momentum_warmup_steps) if s.muon_momentum_warmup_steps else 1.0
    return (1 - done) * s.muon_momentum_warmup_start + done * s.muon_momentum


# --- training ---------------------------------------------------------------------------------------------

MICRO_TOKENS = 8192  # slots below it share a forward pass: fewer calls, and a CPU's cache still holds them


class Trainer:
    """Model and optimizer of one run on this rank. The twin on another framework derives from it."""

    def __init__(self, s, machine):
        self.s, self.machine, self.model = s, machine, GPT(s, machine)
        self.size = sum(self.model.sizes)
        self.reset()

    def reset(self):
        """Start weights, and an optimizer that has seen nothing."""
        self.load({p.name: draw(p, self.s.seed) for p in self.model.table})
        self.optimizer = Optimizer(self.s, self.model, self.machine)

    def load(self, weights):
        flat = np.concatenate([weights[p.name].ravel() for p in self.model.table])
        self.model.flat.data.copy_(torch.from_numpy(flat))

    def gradient(self, batch):
        """float32[size + 1]: gradient of the mean loss of int64[n, slot_tokens + 1], and that loss."""
        total = torch.zeros(self.size + 1, device=self.machine.device)
        together = math.gcd(len(batch), max(1, MICRO_TOKENS // self.s.slot_tokens))
        for slots in batch.to(self.machine.device, non_blocking=True).split(together):
            ids = slots[:, :-1].reshape(-1, self.s.train_seq_len)
            targets = slots[:, 1:].reshape(-1, self.s.train_seq_len)
            loss = self.model.loss(ids, targets) * (len(slots) / self.s.batch_slots)
            total[: self.size] += torch.autograd.grad(loss, self.model.flat)[0]
            total[self.size] += loss.detach()
        return total

    def step(self, batch, step, multiplier):
        """One optimizer step: loss, gradient norm, 1 if it was taken, and a mark for each bad rank."""
        total = self.gradient(batch)
        marks = torch.zeros(self.machine.world, device=total.device)
        marks[self.machine.rank] = ~total.sum().isfinite()
        total = torch.cat((total, marks))
        self.machine.all(dist.all_reduce, total)
        grad, loss, bad = total.tensor_split([self.size, self.size + 1])
        norm = grad.norm()[None]
        take = (loss + norm).isfinite()  # not so on one rank is not so in the sum: all ranks skip alike
        if self.s.grad_clip_norm:
            grad *= (self.s.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step(grad.masked_fill_(~take, 0.0), step, multiplier, take.float())
        return torch.cat((loss, norm, take, bad))

    def warm_up(self):
        """Compile and touch everything with WARMUP_STEPS steps on dummy tokens, then forget them."""
        shape = (self.s.batch_slots // self.machine.world, self.s.slot_tokens + 1)
        for step in range(self.s.warmup_steps):
            self.step(self.machine.tensor(np.zeros(shape, np.int64)), step, 1.0)
        self.reset()

    def restore(self, arrays):
        for name, tensor in self.optimizer.state.items():
            tensor.copy_(torch.from_numpy(arrays[name]))

    def sha256(self, *names):
        arrays = [self.machine.numpy(self.optimizer.state[name]) for name in names]
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()

    def export(self):
        views = self.model.views(self.optimizer.state["weights"])
        weights = {name: self.machine.numpy(view) for name, view in views.items()}
        return encode_artifact(dataclasses.replace(self.s, dtype=self.machine.facts()["dtype"]), weights)

    def validate(self, corpus, run, limit):
        """Compare the replicas, score `limit` tokens, 0: all; bits per byte. Raises NumericalError."""
        s, step, seconds = self.s, run.counters.steps, run.counters.train_seconds
        hashes = self.machine.share(*self.sha256("weights")).tolist()
        odd = [rank for rank, found in enumerate(hashes) if found != max(hashes, key=hashes.count)]
        if odd:
            raise NumericalError(f"step {step}: the weights of rank {odd} differ from the others'")
        if not len(corpus.val_tokens):
            return None
        began = time.perf_counter()
        score = evaluate(s, self.model.nll, corpus, self.machine, limit)
        run.counters.eval_seconds += time.perf_counter() - began
        found = f"val_loss:{score['val_loss']:.4f} val_bpb:{score['val_bpb']:.4f}"
        found += " partial" * score["partial"]
        run.line(f"step:{step}/{s.steps} {found} train_time:{seconds * 1e3:.0f}ms")
        run.event("val", step=step, train_seconds=seconds, **score)
        return score["val_bpb"]


def train(trainer, corpus, run):
    """Step and validate until the last step, the clock's cap or a signal (Stopped)."""
    s, machine, counters = trainer.s, trainer.machine, run.counters
    reader = BatchReader(s, corpus.train, machine, counters.steps)
    bar = tqdm(total=s.steps, initial=counters.steps, leave=False, disable=machine.rank > 0 or None)
    saved = time.perf_counter()
    began = saved - counters.train_seconds  # validation moves it: its seconds do not count
    while True:
        now, step = time.perf_counter(), counters.steps
        due = 0 < s.ckpt_seconds <= now - saved
        shared = machine.share(now - began, due, len(machine.signals))
        counters.train_seconds, due, _ = shared[0].tolist()  # rank 0's clock decides for all ranks,
        stop = shared[:, 2].any()  # any rank's signal stops all
        done = step == s.steps or 0 < s.max_wallclock_seconds <= counters.train_seconds
        due_score = step and s.val_loss_every and step % s.val_loss_every == 0
        if done or due or stop or due_score:  # the clock stands still
            run.flush()
            machine.synchronize()
            pause = time.perf_counter()
            run.save(trainer)
            saved = time.perf_counter()
            if done or stop:
                break
            if due_score:
                trainer.validate(corpus, run, min(8 * s.val_batch_size, s.val_tokens_limit or 2**63))
            began += time.perf_counter() - pause
        lr_mul = lr_multiplier(s, step, counters.train_seconds)
        batch, crc32, wait = reader.next()
        stats = trainer.step(batch, step, lr_mul)
        counters.steps += 1
        counters.batches_crc32 += crc32
        facts = {"step": step + 1, "lr_mul": lr_mul, "data_wait_seconds": wait}
        facts |= {"train_seconds": time.perf_counter() - began, "train_flops": (step + 1) * step_flops(s)}
        report = machine.report(stats)
        run.flush()
        run.pending = report, facts
        bar.update()
    bar.close()
    if stop:
        raise Stopped(f"stopped by a signal after step {step} of {s.steps}")


# --- data: shards of 256 little-endian int32 and uint16 tokens (format: data/README.md) -------------------

WORDS = "magic version tokens extension extension_version vocabulary bos documents highest_id"
INTS = [(word, "<u4") for word in WORDS.split()] + [("text_bytes", "<u8")]
INTS += [(word, "<u4") for word in ("crc32", "index", "shards", "split", "flags")]
HEADER = np.dtype([*INTS, ("tokenizer", "V32"), ("corpus", "V32"), ("unused", "V896")])
BASE, SET = "magic version extension", "vocabulary index shards split flags tokenizer corpus"
GET_DATA = "python -m data.prepare demo makes the demo corpus, python -m data.download fetches FineWeb"


def need(where, what, found, expected, more=""):
    """Raise DataError unless what was found is what was expected."""
    if found != expected:
        found, expected = (x.hex() if isinstance(x, bytes) else x for x in (found, expected))
        raise DataError(f"{where}: {what} is {found}, expected {expected}{more}")


def read_file(name, path, start=0, size=-1):
    """Bytes of a file. Raises DataError that begins with `name`."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError as error:
        raise DataError(f"{name}{path} (in {os.getcwd()}): {error.strerror}; {GET_DATA}") from None


class TokenStream:
    """The tokens of all shards of a split, end to end and around again. Raises DataError."""

    def __init__(self, s, split, expected):
        """expected: what the headers must claim; the first adds to it what the others must claim, too."""
        folder, self.vocab_size, self.checked = Path(s.data_path), s.vocab_size, set()
        self.paths = sorted(folder.glob(f"*_{split}_*.bin"))
        if not self.paths:
            raise DataError(f"DATA_PATH={folder} (in {os.getcwd()}): no *_{split}_*.bin; {GET_DATA}")
        blobs = [read_file("", path, 0, HEADER.itemsize).ljust(HEADER.itemsize, b"\0") for path in self.paths]
        self.headers = np.frombuffer(b"".join(blobs), HEADER)
        here = {"magic": 20240520, "version": 1, "shards": len(blobs), "split": ("val", "train").index(split)}
        for index, (path, header) in enumerate(zip(self.paths, self.headers)):
            for what in f"{BASE} {SET}".split() if header["extension"] else BASE.split():
                found, here["index"] = header[what].item(), index
                hint = f"; see python -m data.shards verify {folder}"
                need(path, what, found, here.get(what, expected.setdefault(what, found)), hint)
            size = HEADER.itemsize + 2 * max(header["tokens"].item(), 1)
            need(path, "file size", path.stat().st_size, size, "; make or fetch it again")
        self.ends = np.cumsum(self.headers["tokens"].astype(np.int64))
        self.total = int(self.ends[-1])

    def read(self, start, length):
        """uint16[length] from token `start` on, the first token following the last."""
        start %= self.total
        index = int(np.searchsorted(self.ends, start, "right"))
        path, header, end = self.paths[index], self.headers[index], int(self.ends[index])
        offset = start - end + int(header["tokens"])
        count = min(length, end - start)
        if header["extension"] and index not in self.checked:  # when it is first touched
            found = zlib.crc32(read_file("", path, HEADER.itemsize))
            need(path, "crc32 of the tokens", found, header["crc32"], ": damaged, make or fetch it again")
            self.checked.add(index)
        tokens = np.frombuffer(read_file("", path, HEADER.itemsize + 2 * offset, 2 * count), "<u2")
        need(path, f"number of tokens from {offset} on", len(tokens), count, ": the file was cut")
        if tokens.max() >= self.vocab_size:
            hint = f"below VOCAB_SIZE={self.vocab_size}; see python -m data.shards inspect {path}"
            raise DataError(f"{path}: token {tokens.max()} from number {offset} on, expected {hint}")
        return tokens if count == length else np.append(tokens, self.read(start + count, length - count))


class BatchReader:
    """Reads a rank's part of the next batch in a thread. What a slot holds depends on its number alone."""

    def __init__(self, s, stream, machine, step):
        self.s, self.stream, self.machine, self.step = s, stream, machine, step
        self.length = s.slot_tokens + 1  # the last is a target only
        rng = np.random.Generator(np.random.Philox(key=s.seed))
        windows = np.arange(stream.total // self.length)
        if s.doc_tokens:
            bos = stream.headers["bos"][0] if stream.headers["extension"][0] else -1  # legacy: one document
            document = np.cumsum(stream.read(0, stream.total) == bos)
            middles = windows * self.length + self.length // 2
            windows = windows[np.bincount(document)[document[middles]] <= s.doc_tokens]
        if not len(windows):
            least = f"expected the {self.length} of a slot at least; lower TRAIN_BATCH_TOKENS"
            small = f", none in a known document of DOC_TOKENS={s.doc_tokens} at most" * (s.doc_tokens > 0)
            raise DataError(f"DATA_PATH={s.data_path}: {stream.total} training tokens{small}, {least}")
        self.order = rng.permutation(windows)
        self.thread = ThreadPoolExecutor(1, "batch reader")
        self.coming = self.thread.submit(self.read, step)

    def read(self, step):
        """This rank's slots of a step, int64[n, slot_tokens + 1] of the framework, and a checksum."""
        rows, crc32 = [], 0
        for slot in range(self.machine.rank, self.s.batch_slots, self.machine.world):
            number = step * self.s.batch_slots + slot
            place = number if self.s.data_order == "sequential" else self.order[number % len(self.order)]
            rows.append(self.stream.read(place * self.length, self.length))
            crc32 += zlib.crc32(rows[-1], number % 2**32)
        return self.machine.tensor(np.stack(rows).astype(np.int64)), crc32

    def next(self):
        """(batch, its checksum, seconds waited for it). Raises what reading it raised."""
        began = time.perf_counter()
        batch, crc32 = self.coming.result()
        self.step += 1
        self.coming = self.thread.submit(self.read, self.step)
        return batch, crc32, time.perf_counter() - began


def byte_table(tokenizer):
    """UTF-8 bytes that a token adds, int64[vocab]: after text; after a control token; which are control."""
    ids = range(tokenizer.vocab_size())
    control = np.array([tokenizer.is_control(i) for i in ids])
    silent = control | np.array([tokenizer.is_unknown(i) for i in ids])
    single = np.array([tokenizer.is_byte(i) for i in ids])

    def sizes(prefix):
        texts = tokenizer.decode([[*prefix, i] for i in ids])
        return np.array([len(text.encode()) for text in texts])

    first = sizes([])  # here a dummy prefix is dropped
    anchor = int(np.argmax(~silent & (first > 0)))  # any piece of text
    inner = np.where(single, 1, sizes([anchor]) - first[anchor])
    return np.where(silent, 0, inner), np.where(silent, 0, np.where(single, 1, first)), control


def token_bytes(tokenizer, tokens):
    """Bytes of each token of a stream, int64[n]; documents begin after a control token."""
    inner, first, control = byte_table(tokenizer)
    after_control = np.concatenate([[True], control[tokens[:-1]]])
    return np.where(after_control, first[tokens], inner[tokens])


class Corpus(NamedTuple):
    """All data of a run, checked."""

    train: TokenStream | None
    val_tokens: np.ndarray  # uint16[n]
    val_bytes: np.ndarray  # int[n]: what each is worth
    notes: list[str]
    sha256: dict[str, str]  # of the training headers, the validation tokens, the tokenizer's file


def data_hashes(**texts):
    return {f"{name}_sha256": hashlib.sha256(text).hexdigest() for name, text in texts.items()}


def load_corpus(s, with_train=True):
    """The tokenizer and the shards, which must belong together. Raises DataError."""
    blob, where = read_file("TOKENIZER_PATH=", s.tokenizer_path), f"TOKENIZER_PATH={s.tokenizer_path}"
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=blob)
    except RuntimeError:
        raise DataError(f"{where} is no SentencePiece model; {GET_DATA}") from None
    need(where, "vocabulary", tokenizer.vocab_size(), s.vocab_size, " (VOCAB_SIZE)")
    expected = {"vocabulary": s.vocab_size, "tokenizer": hashlib.sha256(blob).digest()}
    train = TokenStream(s, "train", expected) if with_train else None
    headers = train.headers if train else b""
    if with_train and not any(Path(s.data_path).glob("*_val_*.bin")):
        none, notes = np.zeros(0, np.uint16), ["note: no validation text: this run is not scored"]
        return Corpus(train, none, none, notes, data_hashes(train=headers, tokenizer=blob))
    val = TokenStream(s, "val", expected)
    tokens = val.read(0, val.total)
    worth, notes = token_bytes(tokenizer, tokens), []
    total, stated = int(worth.sum(dtype=np.int64)), int(val.headers["text_bytes"].sum())
    if not expected["extension"]:
        notes.append(f"note: legacy shards: {total} validation bytes by decoding, no header vouches for them")
    elif expected["flags"] & 1:  # the tokenizer does not give the text back: its true bytes, spread
        worth = np.diff(np.cumsum(worth, dtype=np.int64) * stated // max(total, 1), prepend=0)
        notes.append(f"note: lossy tokenizer: {total} bytes decoded of {stated}")
    else:
        hint = f" by the headers; see python -m data.shards verify {s.data_path}"
        need(s.data_path, "byte count of the validation tokens", total, stated, hint)
    return Corpus(train, tokens, worth, notes, data_hashes(train=headers, val=tokens, tokenizer=blob))


# --- score: windows over the validation tokens, every token but the first scored exactly once -------------


def evaluate(s, nll, corpus, machine, limit):
    """val_loss (nats a token) and val_bpb of the first `limit` tokens; 0: all. Raises DataError, Stopped."""
    tokens = corpus.val_tokens[: limit or None]
    last = len(tokens) - 1
    if last < 1:
        raise DataError(f"DATA_PATH={s.data_path}: {len(tokens)} validation tokens, expected at least 2")
    window = min(s.eval_window, last)
    rows = max(1, s.val_batch_size // s.batch_slots // window)
    nats = 0.0
    for at in range(machine.rank * rows, -(-last // window), machine.world * rows):
        place = (at + np.arange(rows))[:, None] * window + np.arange(window + 1)
        ids = tokens[np.minimum(place, last)].astype(np.int64)  # one shape, so that a model compiles once
        nats += float(nll(ids)[place[:, 1:] <= last].sum(dtype=np.float64))
        if machine.signals:
            break
    nats, signals = machine.share(nats, len(machine.signals)).sum(0).tolist()
    if signals:
        raise Stopped("stopped by a signal during an evaluation")
    scored_bytes = int(corpus.val_bytes[1 : last + 1].sum(dtype=np.int64))
    score = {"val_loss": nats / last, "val_bpb": nats / math.log(2) / max(scored_bytes, 1)}
    partial = last + 1 < len(corpus.val_tokens)
    return score | {"val_tokens": last, "val_bytes": scored_bytes, "partial": partial}


# --- artifact: zlib level 9 over a safetensors file (format: records/FORMAT.md) ---------------------------

INT8_ABOVE = 65536  # elements: smaller tensors are not worth a scale for each row
INT8_CLIP = 0.9999984  # quantile of |w| in a row that int8's 127 stands for


def quantize_rows(matrix):
    """int8 by rows; scales are float16 where all fit, else float32, without a floor under small rows."""
    scale = (np.quantile(np.abs(matrix), INT8_CLIP, axis=-1) / 127).astype(np.float32)
    half = np.finfo(np.float16)
    if np.all((scale == 0) | (scale >= half.tiny) & (scale <= half.max)):
        scale = scale.astype(np.float16)
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
    return {"": np.clip(np.rint(matrix / divisor), -127, 127).astype(np.int8), ".scale": scale}


SCHEMES = {  # name: (float32 array -> arrays by what is added to the tensor's name, and back)
    "int8 rows": (quantize_rows, lambda y: y[""] * y[".scale"][..., None].astype(np.float32)),
    "float16": (lambda x: {"": x.astype(np.float16)}, lambda y: y[""].astype(np.float32)),
    "float32": (lambda x: {"": x}, lambda y: y[""]),
}


def scheme_of(param):
    """Large stacks of matrices int8 by rows, small ones float16, vectors (which steer) float32."""
    large = "int8 rows" if math.prod(param.shape) > INT8_ABOVE else "float16"
    return "float32" if param.group == "vector" else large


def pack_tensors(tensors, about):
    """A safetensors file. One metadata key only: safetensors writes several in no fixed order."""
    plain = {name: np.ascontiguousarray(array) for name, array in tensors.items()}  # stored as it lies
    return safetensors.numpy.save(plain, {"bytegolf": json.dumps(about, sort_keys=True)})


def unpack_tensors(blob):
    """The tensors and what pack_tensors was told about them. Raises one of DAMAGED."""
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    return safetensors.numpy.load(blob), json.loads(header["__metadata__"]["bytegolf"])


DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, zlib.error)
DAMAGED += (safetensors.SafetensorError,)


def encode_artifact(s, weights):
    """float32 weights by name -> the artifact's bytes."""
    schemes, tensors = {p.name: scheme_of(p) for p in parameter_table(s)}, {}
    for name, scheme in schemes.items():
        encode, _ = SCHEMES[scheme]
        parts = encode(weights[name])
        if not all(np.isfinite(array).all() for array in parts.values()):
            raise NumericalError(f"{name} is not finite, or too large for {scheme}: nothing was exported")
        tensors |= {name + part: array for part, array in parts.items()}
    settings = {name: getattr(s, name) for name, row in ROWS.items() if "free" not in row.metadata}
    return zlib.compress(pack_tensors(tensors, {"schemes": schemes, "settings": settings}), 9)


def decode_artifact(blob, path):
    """The settings and float32 weights by name in the bytes of an artifact. Raises DataError if damaged."""
    try:
        inflater = zlib.decompressobj()
        tensors, about = unpack_tensors(inflater.decompress(blob))
        if not inflater.eof or inflater.unused_data:
            raise ValueError("zlib stream cut short or longer than it should be")
        settings = {key: parse_setting(ROWS[key], show(value)) for key, value in about["settings"].items()}
        s, weights = Settings(**settings), {}
        check_settings(s)
        for p in parameter_table(s):
            parts = [key for key in tensors if key.partition(".")[0] == p.name]
            _, decode = SCHEMES[about["schemes"][p.name]]
            value = weights[p.name] = decode({key[len(p.name) :]: tensors.pop(key) for key in parts})
            if (value.shape, value.dtype) != (p.shape, np.float32) or not np.isfinite(value).all():
                raise ValueError(f"{p.name} is {value.dtype}{value.shape}, expected finite float32{p.shape}")
        if tensors:
            raise ValueError(f"holds {min(tensors)!r}, which the model has no place for")
    except DAMAGED as error:
        raise DataError(f"{path} is no whole artifact: {type(error).__name__}: {error}") from None
    return settings, weights


def count_code(s, script):
    return len(script) if s.code_bytes == "raw" else len(zlib.compress(script, 9))


def dry_run(s, origins, script):
    """The lines of DRY_RUN=1: all settings, all parameters, the planned size. Needs no data or device."""
    for name, origin in origins.items():
        yield f"{name.upper()}={show(getattr(s, name))} ({origin})"
    params, artifact, code = 0, 0, count_code(s, script)
    for p in parameter_table(s):
        way = "muon" if p.group == "matrix" else "adam"
        yield f"{p.name} {'x'.join(map(str, p.shape))} float32 init {p.init} {p.scale:.6g} {way} {p.group}"
        encode, _ = SCHEMES[scheme_of(p)]
        row = encode(np.zeros((1, p.shape[-1]), np.float32))
        artifact += math.prod(p.shape[:-1]) * sum(array.nbytes for array in row.values())
        params += math.prod(p.shape)
    yield f"params: {params}\nsteps: {s.steps}\nstep_flops: {step_flops(s)}"
    yield f"planned_artifact_bytes: {artifact} (before zlib)\ncode_bytes: {code}"
    yield f"budget: {'ok' if artifact + code <= s.budget_bytes else 'over before zlib'}"


# --- a run's folder: train.log for people, metrics.jsonl for programs, checkpoints to go on from ----------

TIMES = {"train_seconds": 0.0, "eval_seconds": 0.0, "data_wait_seconds": 0.0}
COUNTERS = TIMES | {"steps": 0, "skipped_steps": 0, "skipped_in_a_row": 0, "resumes": 0, "batches_crc32": 0}


def write_whole(path, blob):
    """Write beside and rename, so that a file of this name is always whole."""
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def newest_checkpoint(folder):
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
    return {}, {}, notes


def open_run(s, about):
    """logs/<RUN_ID>/, locked, and its newest_checkpoint. SettingError, DataError: not begun with `about`."""
    folder = Path("logs", s.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{s.preset}-{os.getpid()}")
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    metrics, refused = folder / "metrics.jsonl", f"RUN_ID={folder.name}: choose another, {folder}"
    metrics.touch()
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
    except BlockingIOError:
        raise SettingError(f"{refused} is in use by another process") from None
    told = metrics.read_bytes()
    if b'{"event": "final"' in told.rpartition(b"\n")[0]:
        raise SettingError(f"{refused} is a run that has ended and is never overwritten")
    arrays, facts, notes = newest_checkpoint(folder / "checkpoint")
    for name, now in about["settings"].items():
        was = facts.get("settings", {}).get(name, now)
        if now != was and "free" not in ROWS[name].metadata and (name, s.dtype) != ("dtype", "auto"):
            was = f"{folder} was begun with {show(was)}"
            raise SettingError(f"{name.upper()}={show(now)}: {was}; set that or choose another RUN_ID")
    for name, was in facts.get("sha256", {}).items():
        need(folder, name, about["sha256"].get(name), was, ", the data that the run was begun with")
    os.truncate(metrics, min(facts.get("metrics_bytes", 0), len(told)))  # steps beyond are done again
    write_whole(folder / "config.json", json.dumps(about, indent=1).encode())
    return folder, arrays, facts, notes


class Run:
    """What a run tells and keeps: rank 0 prints and, if there is a folder, writes."""

    def __init__(self, machine, s, folder=None, about=None, counters=()):
        self.machine, self.s, self.folder, self.about = machine, s, folder, about
        self.counters = types.SimpleNamespace(**COUNTERS | dict(counters))
        self.logged = self.counters.steps, self.counters.train_seconds, self.counters.data_wait_seconds
        self.pending = None  # the last step's report

    def write(self, name, text):
        if self.folder and self.machine.rank == 0:
            with open(self.folder / name, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text + "\n")

    def line(self, *texts):
        if self.machine.rank == 0:
            with contextlib.suppress(OSError):  # of a terminal that was closed: the run goes on
                tqdm.write("\n".join(texts), file=sys.stdout)
                sys.stdout.flush()
        self.write("train.log", "\n".join(texts))

    def event(self, event, **values):
        """An object for programs: floats exact, those that are not finite as text."""
        plain = {k: str(v) if v in (math.inf, -math.inf) or v != v else v for k, v in values.items()}
        self.write("metrics.jsonl", json.dumps({"event": event, **plain}))

    def warn(self, text):
        self.line(f"warning: {text}")
        self.event("warning", text=text)

    def final(self, rows):
        """The last lines, a `key: value` each, and the event that marks the end of the run."""
        self.line("---", *(f"{key}: {value}" for key, value in rows.items()))
        self.event("final", **rows)

    def flush(self):
        """Report the pending step while the next is under way. Raises NumericalError after MAX_SKIPPED."""
        if not self.pending:
            return
        (report, facts), self.pending = self.pending, None
        loss, norm, taken, *bad = report()
        s, step, counters = self.s, facts["step"], self.counters
        counters.data_wait_seconds += facts["data_wait_seconds"]
        counters.skipped_steps += not taken
        counters.skipped_in_a_row = 0 if taken else counters.skipped_in_a_row + 1
        self.event("step", train_loss=loss, grad_norm=norm, **facts)
        if not taken:
            ranks = [rank for rank, mark in enumerate(bad) if mark] or "all"
            found = f"step {step} skipped: train_loss {loss}, gradient norm {norm}, from rank {ranks}"
            self.warn(f"{found}; weights and optimizer are as before")
            if counters.skipped_in_a_row == s.max_skipped:
                mend = "lower MATRIX_LR, SCALAR_LR or TIED_EMBED_LR"
                raise NumericalError(f"{found}, the last of MAX_SKIPPED in a row; {mend}")
        if step > 10 and step % s.train_log_every and step != s.steps:
            return
        now = step, facts["train_seconds"], counters.data_wait_seconds  # the line has averages since the last
        steps, spent, waited = (new - old for new, old in zip(now, self.logged))
        self.logged = now
        rate = steps * s.train_batch_tokens / max(spent, 1e-9)
        mfu = steps * step_flops(s) / max(spent, 1e-9) / (self.machine.peak_flops * self.machine.world)
        self.line(
            f"step:{step}/{s.steps} train_loss:{loss:.4f} lr_mul:{facts['lr_mul']:.3f} "
            f"train_time:{now[1] * 1e3:.0f}ms step_avg:{spent / steps * 1e3:.2f}ms tok_s:{rate:.0f} "
            f"mfu:{mfu:.1%} data_wait:{waited / steps * 1e3:.1f}ms train_flops:{facts['train_flops']:.4e}"
        )

    def save(self, trainer):
        """Write a checkpoint: safetensors, and the sha256 of that behind it. The last two are kept."""
        counters = vars(self.counters) | {"batches_crc32": self.checksum()}
        if self.machine.rank:
            return
        size = (self.folder / "metrics.jsonl").stat().st_size
        about = self.about | {"counters": counters, "metrics_bytes": size}
        state = {name: self.machine.numpy(tensor) for name, tensor in trainer.optimizer.state.items()}
        blob, path = pack_tensors(state, about), self.folder / f"checkpoint/step_{counters['steps']:08}.ckpt"
        try:
            write_whole(path, blob + hashlib.sha256(blob).digest())
            for old in sorted(path.parent.glob("step_*.ckpt"))[:-2]:
                old.unlink()
        except OSError as error:  # the others stay, and training goes on
            self.warn(f"no checkpoint: {error}")

    def checksum(self):
        """Of all training tokens that all ranks have seen, whatever their number."""
        return int(self.machine.share(self.counters.batches_crc32).sum()) % 2**32


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
    signals: list[int] = dataclasses.field(default_factory=list)  # those to stop that came

    def all(self, operation, *args, **named):
        """A collective operation. If it fails, raises Stopped; rank 0 names the ranks that are lost."""
        if self.world == 1:
            return
        try:
            operation(*args, **named)
        except RuntimeError as error:
            lost = ", ".join(map(str, self.lost_ranks())) or "unknown"
            raise Stopped(f"lost rank {lost}: dead, or silent for DIST_TIMEOUT") from error

    def lost_ranks(self):
        """Who does not answer a call on connections that the failed operation has not used."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        calls, lost = {}, []
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

    def on_rank_0(self, function):
        """What a function returns on rank 0, on every rank; if it raises there, the others exit."""
        box = [None, True]
        try:
            box = [function(), False] if self.rank == 0 else box
        finally:
            self.all(dist.broadcast_object_list, box, device=torch.device("cpu"))
        return sys.exit(1) if box[1] else box[0]

    def share(self, *numbers):
        """float64[world, n]: these numbers of every rank."""
        own = torch.tensor(numbers, dtype=torch.float64)
        everyone = [own.clone() for _ in range(self.world)]
        self.all(dist.all_gather, everyone, own)
        return torch.stack(everyone).numpy()

    def tensor(self, array):
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def numpy(self, tensor):
        return tensor.detach().cpu().numpy()

    def report(self, stats):
        """Begin to copy numbers to the host; the function returned waits for them and gives a list."""
        if self.device.type != "cuda":
            return stats.tolist
        on_host = torch.empty_like(stats, device="cpu", pin_memory=True).copy_(stats, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return lambda: copied.synchronize() or on_host.tolist()

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def choose_dtype(self, wanted):
        """Set dtype and peak_flops, on rank 0's word for all; returns a line for the log."""
        side, flops = 8192 if self.device.type == "cuda" else 512, {}
        for name in ["bfloat16", "float32"] if wanted == "auto" else [wanted]:
            a, b = torch.randn(2, side, side, device=self.device).to(getattr(torch, name))
            seconds = []
            for _ in range(4):
                began = time.perf_counter()
                a @ b
                self.synchronize()
                seconds.append(time.perf_counter() - began)
            flops[name] = 2 * side**3 / min(seconds[1:])
        flops = self.on_rank_0(lambda: flops)
        name = max(flops, key=flops.get)
        self.dtype, self.peak_flops = getattr(torch, name), flops[name]
        speeds = " ".join(f"{n}:{f / 1e9:.0f}GFLOP/s" for n, f in flops.items())
        return f"device:{self.device} dtype:{name} compile:{self.compile:d} {speeds}"

    def facts(self):
        """What bits may depend on."""
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else "none"
        dtype = str(self.dtype).rpartition(".")[2]
        return {"torch": torch.__version__, "threads": torch.get_num_threads(), "gpu": gpu, "dtype": dtype}

    def peak_memory_mib(self):
        """Of the GPU, else of this process; macOS counts it in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() // 2**20
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


def open_machine(s):
    """Device, process group and compiler. Raises SettingError for what is not there."""
    world = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun sets them
    rank, local = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    if s.batch_slots % world:
        raise SettingError(f"WORLD_SIZE={world}: takes a divisor of BATCH_SLOTS={s.batch_slots}")
    cuda = s.device == "cuda" or (s.device == "auto" and torch.cuda.is_available())
    if cuda and local >= torch.cuda.device_count():
        raise SettingError(f"DEVICE={s.device}: torch finds no GPU of number LOCAL_RANK={local}")
    device = torch.device(f"cuda:{local}" if cuda else "cpu")
    machine = Machine(device, rank, world, compile=s.compile and can_compile(device), timeout=s.dist_timeout)
    keep_freed_memory()
    if cuda:
        torch.cuda.set_device(local)
    if world > 1:  # small decisions travel as CPU tensors over gloo: no GPU waits for them
        patience = datetime.timedelta(seconds=0.45 * s.dist_timeout)  # then half for the search for the lost
        store, *_ = next(dist.rendezvous("env://", timeout=patience))  # outlives torchrun's restarts
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        kind = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(kind, timeout=patience, store=store, rank=rank, world_size=world)
        machine.watch = dist.new_group(backend="gloo")
    return machine


def can_compile(device):
    """Whether torch.compile works; if not, a line says why."""
    try:
        torch.compile(torch.neg, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:  # no C++ compiler, a broken one, no folder for what it makes: eager runs
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(f"compile:0 (torch.compile fails, so eager and slower: {why})")
        return False
    return True


def keep_freed_memory():
    """Let glibc keep freed memory: page faults of large temporaries slow a step. Elsewhere: nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-2, 2**26)  # M_TOP_PAD


# --- main -------------------------------------------------------------------------------------------------


class Memory:
    """What all streams were told: successors of contexts of 2 to 24 tokens, which correct a network's logits.

    A candidate is a token that has followed the context before. The longest context that knows it decides its
    class: that order, how often the candidate came, how often others did. It gains a + b (-log p) in logits,
    p by the network; a and b are the class's own, learned by a step of Adagrad (Duchi et al. 2011) after each
    token. So this is a log-linear model, and what it learns from was charged before.
    """

    orders, slots, kept = (2, 3, 4, 5, 6, 8, 11, 16, 24), 1 << 21, 8
    levels, others, rate = 6, 4, 0.3  # classes of the two counts, by powers of two

    def __init__(self, rows, vocab_size):
        self.vocab_size = vocab_size
        self.history = np.zeros((rows, max(self.orders)), np.uint64)
        shape = len(self.orders), self.slots
        self.tags = np.zeros(shape, np.uint32)  # which context has a slot
        self.ids, self.counts = (np.zeros((*shape, self.kept), np.uint16) for _ in range(2))
        self.trust = np.full((len(self.orders) * self.levels * self.others, 2), 0.5)  # a and b
        self.squares = np.ones_like(self.trust)
        self.find()

    def find(self):
        """The slot of each context, [orders, rows], and whether that holds it."""
        found, hashed = [], np.zeros(len(self.history), np.uint64)
        for order in range(1, max(self.orders) + 1):
            hashed = (hashed + self.history[:, -order] + 1) * np.uint64(0x9E3779B97F4A7C15)
            hashed ^= hashed >> np.uint64(29)
            if order in self.orders:
                found.append(hashed)
        found = np.stack(found)
        self.at = np.arange(len(found))[:, None], found % np.uint64(self.slots)
        self.tag = (found >> np.uint64(32)).astype(np.uint32)
        self.known = self.tags[self.at] == self.tag

    def correct(self, logits):
        """float32[rows, V] -> float32[rows, V], log-probabilities."""
        log_p = logits - logits.max(1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
        ids, counts = self.ids[self.at].astype(np.int64), self.counts[self.at] * self.known[..., None]
        rest = counts.sum(-1, keepdims=True) - counts
        level = np.log2(np.maximum(counts, 1)).astype(int).clip(max=self.levels - 1)
        other = np.log2(rest + 1).astype(int).clip(max=self.others - 1)
        order = np.arange(len(self.orders))[:, None, None]
        kind = (order * self.levels + level) * self.others + other
        place = ids + np.arange(len(logits))[:, None] * self.vocab_size
        place, kind = (x[::-1][counts[::-1] > 0] for x in (place, kind))  # the longest context first
        self.place, first = np.unique(place, return_index=True)
        self.kind = kind[first]
        self.inputs = np.stack((np.ones(len(first)), -log_p.flat[self.place]))
        log_p.flat[self.place] += (self.trust[self.kind] * self.inputs.T).sum(1)
        log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
        self.p = np.exp(log_p.flat[self.place])
        return log_p

    def tell(self, ids):
        """Told the next token of every stream: learn whom to trust, then count."""
        error = (ids[self.place // self.vocab_size] == self.place % self.vocab_size) - self.p
        found = [np.bincount(self.kind, error * x, len(self.trust)) for x in self.inputs]
        gradient = np.stack(found, 1)
        self.squares += gradient**2
        self.trust += self.rate * gradient / np.sqrt(self.squares)
        known, counts = self.ids[self.at], self.counts[self.at] * self.known[..., None]
        hit = (known == ids[:, None]) & (counts > 0)
        chosen = np.where(hit.any(-1), hit.argmax(-1), counts.argmin(-1))[..., None]  # or the rarest goes
        before = np.take_along_axis(counts, chosen, -1)[..., 0].clip(max=65534)
        value = np.where(hit.any(-1), before + 1, 1)
        np.put_along_axis(counts, chosen, value[..., None], -1)
        np.put_along_axis(known, chosen, ids[None, :, None], -1)
        self.tags[self.at], self.ids[self.at], self.counts[self.at] = self.tag, known, counts
        self.history = np.concatenate((self.history[:, 1:], ids[:, None].astype(np.uint64)), 1)
        self.find()


class Predictor:
    """A model that is told one token after the other, in many streams at once: what the referee calls.

    It keeps the keys and values of the last EVAL_SEQ_LEN tokens; without EVAL_SLIDING, those of one window.
    """

    rows = 64  # streams: enough of them to fill a product's tiles, few enough to learn often
    every, batch, rate = 256, 16, 0.3  # tokens from lesson to lesson, streams of a step, part of the rate

    def __init__(self, model):
        self.model, self.vocab_size = model, model.s.vocab_size
        self.trained = model.flat.detach().clone()

    def start(self, rows):
        """float32[rows, V]: logits of the first token of every stream, of which nothing is known."""
        s, machine = self.model.s, self.model.machine
        self.model.flat.data.copy_(self.trained)
        self.optimizer = Optimizer(s, self.model, machine)
        self.recent = torch.empty(rows, 0, dtype=torch.int64, device=machine.device)
        shape = s.num_layers, 2, rows, s.num_kv_heads, s.eval_window + 1, s.head_dim  # + 1 for mix_before
        self.cache = torch.empty(shape, dtype=machine.dtype, device=machine.device)
        self.told = 0
        self.memory = Memory(rows, s.vocab_size)
        return self.memory.correct(np.zeros((rows, s.vocab_size), np.float32))

    @torch.enable_grad()
    def learn(self):
        """Train on what was told last, as before but with a smaller rate."""
        s = self.model.s
        for told in self.recent.split(self.batch):
            loss = self.model.loss(told[:, :-1], told[:, 1:])
            (grad,) = torch.autograd.grad(loss, self.model.flat)
            self.optimizer.step(grad, s.steps, self.rate, torch.ones(1, device=grad.device))

    @torch.no_grad()
    def step(self, ids):
        """Told the next token of every stream, int64[rows]: logits of the one after, float32[rows, V]."""
        self.memory.tell(ids)
        s, new = self.model.s, torch.from_numpy(ids).to(self.cache.device)[:, None]
        if self.told and self.told % self.every == 0:
            self.learn()
        self.recent = torch.cat((self.recent, new), 1)[:, -s.train_seq_len - 1 :]
        start = self.told if s.eval_sliding else self.told % s.eval_window
        x, head = self.model.trunk(new, self.cache, start)
        self.told += 1
        logits = head_logits(x[:, -1], head, s.logit_softcap, torch.float32).cpu().numpy()
        return self.memory.correct(logits)


def load_predictor(artifact: Path, device: str = "cpu") -> Predictor:
    """An artifact's model as the referee asks for it (records/README.md). Raises DataError."""
    settings, weights = decode_artifact(read_file("", artifact), artifact)
    keep_freed_memory()
    machine = Machine(torch.device(device))  # float32: a score is the same on machines without bfloat16
    trainer = Trainer(Settings(**settings), machine)
    trainer.load(weights)
    return Predictor(trainer.model)


def score_artifact(trainer, blob, path, corpus, run):
    """The result: what the weights of an artifact score. Raises NumericalError if that is no number."""
    began = time.perf_counter()
    trainer.load(decode_artifact(blob, path)[1])
    rows = {"artifact_bytes": len(blob), "artifact_sha256": hashlib.sha256(blob).hexdigest()}
    if not len(corpus.val_tokens):
        return rows
    run.line(f"scoring {path}")
    score = evaluate(trainer.s, trainer.model.nll, corpus, trainer.machine, trainer.s.val_tokens_limit)
    if not math.isfinite(score["val_loss"]):
        raise NumericalError(f"{path}: scores {score['val_loss']} nats a token")
    mark = " partial" * score.pop("partial")
    score |= {name: f"{score[name]:.8f}{mark}" for name in ("val_loss", "val_bpb")}
    return score | rows | {"eval_seconds": time.perf_counter() - began}


def eval_only(s, origins, machine, make):
    """EVAL_ONLY=path: score an artifact of any shape, write nothing. The window can be overridden."""
    blob = read_file("EVAL_ONLY=", s.eval_only)
    carried, _ = decode_artifact(blob, s.eval_only)
    own = {k for k in carried if k.startswith(("eval_", "val_", "dtype")) and origins[k] == "environment"}
    s = dataclasses.replace(s, **{k: v for k, v in carried.items() if k not in own})
    check_settings(s)
    corpus, run = load_corpus(s, with_train=False), Run(machine, s)
    run.line(machine.choose_dtype(s.dtype), *corpus.notes)
    run.final(score_artifact(make(s, machine), blob, s.eval_only, corpus, run) | corpus.sha256)
    return 0


def finish(trainer, corpus, run, script):
    """Write the artifact, and score it: the result. Returns the exit code."""
    s, machine, path = trainer.s, trainer.machine, run.folder / "model.ptz"
    trained = trainer.validate(corpus, run, s.val_tokens_limit)
    state_sha256 = trainer.sha256(*trainer.optimizer.state).hex()
    blob = machine.on_rank_0(lambda: write_whole(path, trainer.export()) or path.read_bytes())
    rows = score_artifact(trainer, blob, path, corpus, run)
    if trained is not None:
        run.counters.eval_seconds += rows["eval_seconds"]
        rows["val_bpb_unquantized"] = f"{trained:.8f}"
    code = count_code(s, script)
    total = rows["artifact_bytes"] + code
    rows |= vars(run.counters) | {"train_flops": run.counters.steps * step_flops(s)}
    rows["batches_crc32"] = f"{run.checksum():08x}"
    rows |= {"tokens_seen": run.counters.steps * s.train_batch_tokens, "params": trainer.size}
    rows |= {"code_bytes": code, "total_bytes": total, "budget_bytes": s.budget_bytes}
    rows |= {"budget": "ok" if total <= s.budget_bytes else "over", "device": str(machine.device)}
    rows |= {"preset": s.preset, "seed": s.seed, "run_id": run.folder.name, "torch": torch.__version__}
    rows |= {"script_sha256": hashlib.sha256(script).hexdigest(), "state_sha256": state_sha256}
    run.final(rows | {"peak_memory_mib": machine.peak_memory_mib()} | corpus.sha256)
    return 0 if total <= s.budget_bytes else 4


def catch_signals(machine):
    """Note signals to stop; the second SIGINT kills, if no torchrun passes on what a terminal sent."""

    def note(number, frame):
        machine.signals.append(number)
        if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # not under nohup
            signal.signal(number, note)


def run_all(s, origins, script, machine, make):
    """A whole run on this rank. Returns the exit code."""
    catch_signals(machine)
    if s.eval_only:
        return eval_only(s, origins, machine, make)
    corpus = load_corpus(s)
    BatchReader(s, corpus.train, machine, 0).read(0)  # damage shows before anything is made
    speed, cpu = machine.choose_dtype(s.dtype), os.uname().machine
    if os.path.exists("/proc/cpuinfo"):
        cpu = re.search(r"model name\s*: (.*)|$", Path("/proc/cpuinfo").read_text())[1]
    environment = machine.facts() | {"ranks": machine.world, "processor": cpu}
    environment["script_sha256"] = hashlib.sha256(script).hexdigest()
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
        *corpus.notes,
        *notes,
        f"warming up: {s.warmup_steps} untimed steps, then forgotten",
    )
    try:
        trainer.warm_up()
    except RuntimeError:
        if machine.signals:  # they reached the compiler, too
            raise Stopped("stopped by a signal while compiling") from None
        raise
    if facts:
        try:
            trainer.restore(arrays)
        except (KeyError, RuntimeError):
            raise DataError(f"{folder}: its checkpoint is another script's; choose another RUN_ID") from None
        run.counters.resumes += 1
        run.counters.batches_crc32 *= machine.rank == 0
    try:
        train(trainer, corpus, run)
        return finish(trainer, corpus, run, script)
    except (Stopped, OSError) as error:
        raise Stopped(f"{error}; the same command with RUN_ID={folder.name} goes on") from error


def main(open_machine=open_machine, make=Trainer, file=__file__):
    """The program, on this framework or the twin's, whose file counts, too. Returns the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        s, origins = load_settings(os.environ, "10min_16mb" if torch.cuda.is_available() else "floppy")
        script = b"".join(Path(path).read_bytes() for path in dict.fromkeys([__file__, file]))
        if s.dry_run:
            print("\n".join(dry_run(s, origins, script)))
            return 0
        code = run_all(s, origins, script, open_machine(s), make)
    except (SettingError, DataError, NumericalError, Stopped, OSError, MemoryError, RuntimeError) as error:
        text, code = f"{error}", getattr(error, "exit_code", 16)
        if "emory" in f"{type(error)} {text}":  # MemoryError, OutOfMemoryError, can't allocate memory
            text, code = "out of memory: lower MODEL_DIM or TRAIN_BATCH_TOKENS", 2
        elif isinstance(error, RuntimeError) and not isinstance(error, dist.DistError):
            raise
        rank = os.environ.get("RANK", "0")
        if rank == "0" or code != 2:  # bad settings are so on all ranks
            print(f"{Path(file).name}: {text}" + f" (rank {rank})" * (rank != "0"), file=sys.stderr)
    if dist.is_initialized():  # what waits for a rank which is gone would not end
        sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
