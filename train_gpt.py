"""Train the best language model that fits a byte budget, and score it in bits per byte.

    python train_gpt.py                                    one process, on a GPU or a CPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py  one process for each GPU
    PRESET=minute python train_gpt.py                      settings are environment variables
    DRY_RUN=1 python train_gpt.py                          settings, parameters and size

Exit codes: 0 done, 2 bad setting, 3 bad data, 4 artifact over its byte budget, 16 stopped by a
signal, a lost rank or a full disk (the same command goes on), 17 numerical failure.
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
import signal
import sys
import time
import timeit
import types
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # threads that wait let other programs compute
import numpy as np
import safetensors.numpy
import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Arrays = dict[str, np.ndarray]  # by tensor name
Facts = dict[str, Any]  # that JSON can hold
Function = Callable[..., Any]
sha256: Function = lambda blob: hashlib.sha256(blob).hexdigest()


class SettingError(ValueError): ...  # does not parse, is impossible, or looks misspelt


class DataError(ValueError): ...  # a file is damaged, or another's


# --- settings: one table of environment variables; a preset is a row of other defaults ----

FLOPPY = (
    dict(data_path="./data/datasets/demo_sp1024", tokenizer_path="./data/tokenizers/demo_1024_bpe.model")
    | dict(num_layers=4, model_dim=192, num_heads=3, num_kv_heads=1, qk_gain_init=4.0)
    | dict(key_shift=1.0, short_window=128, exclusive_attention=True, mlp_leak=0.5)
    | dict(train_seq_len=1024, train_batch_tokens=8192, val_batch_size=65536, iterations=10**5)
    | dict(warmup_steps=2, lr_warmup_steps=20, warmdown_iters=0.6, matrix_lr=0.06, max_flops=1e14)
    | dict(muon_momentum=0.95, muon_momentum_warmup_start=0.85, muon_momentum_warmup_steps=300)
    | dict(doc_tokens=16384, max_wallclock_seconds=0.0, budget_bytes=1474560, code_bytes="zlib")
)
MINUTE = FLOPPY | (
    dict(num_layers=2, model_dim=128, num_heads=2, short_window=0, qk_gain_init=1.5)
    | dict(train_seq_len=256, train_batch_tokens=2048, eval_seq_len=320, val_loss_every=0)
    | dict(lr_warmup_steps=5, warmdown_iters=0.5, muon_momentum_warmup_steps=30)
    | dict(matrix_lr=0.04, max_flops=3e12, compile=False)
)
SMOKE = MINUTE | dict(train_seq_len=128, train_batch_tokens=1024, doc_tokens=0, eval_seq_len=0)
SMOKE |= dict(iterations=60, max_flops=0.0, val_tokens_limit=65536)
INT6 = (
    dict(num_layers=10, mlp_mult=3, qk_gain_init=4.0, matrix_lr=0.03, warmdown_iters=0.5)
    | dict(key_shift=1.0, short_window=256, exclusive_attention=True, mlp_leak=0.5)
    | dict(train_seq_len=2048, weight_decay=0.04, matrix_levels=24)
)
PRESETS: Facts = {"10min_16mb": {}, "int6": INT6, "floppy": FLOPPY, "minute": MINUTE, "smoke": SMOKE}
LARGE = 1e38  # no limit; infinity is no value of a setting
free: Function = lambda *row, **flags: var(*row, free=True, **flags)


def var(value: Any, doc: str, low: float = -LARGE, high: float = LARGE, **flags: Any) -> Any:
    """A row of the settings. choices: what it takes; free: a resumed run may change it."""
    return dataclasses.field(default=value, metadata=dict(flags, doc=doc, low=low, high=high))


@dataclasses.dataclass(frozen=True)
class Settings:
    """Every setting, read once. Its environment variable is the field's name in upper case."""

    preset: str = free("10min_16mb", "row of defaults; on a CPU: floppy", choices=(*PRESETS,))
    dry_run: bool = free(False, "print settings, parameters and planned bytes, then stop")
    data_path: str = free("./data/datasets/fineweb10B_sp1024", "folder of the shards")
    tokenizer_path: str = free("./data/tokenizers/fineweb_1024_bpe.model", "SentencePiece")
    doc_tokens: int = var(0, "train on documents of at most so many tokens; 0: on all", 0)
    run_id: str = free("", "name of the run's folder under logs/; empty: date and time")
    seed: int = var(1337, "draws the start weights and the data order", 0)
    device: str = free("auto", "where to compute", choices=("auto", "cuda", "cpu"))
    dtype: str = var("auto", "of products", choices=("auto", "bfloat16", "float32"))
    compile: bool = free(True, "compile the model where that works")
    val_batch_size: int = free(524288, "validation tokens of a pass, all slots", 1, 1e12)
    val_loss_every: int = free(1000, "steps between validations on as many; 0: at the end", 0)
    val_tokens_limit: int = var(0, "score only so many tokens, a partial score; 0: all", 0)
    eval_seq_len: int = var(0, "tokens of the evaluation's window; 0: TRAIN_SEQ_LEN", 0, 262144)
    eval_only: str = free("", "path of an artifact to score; nothing is trained or written")
    train_log_every: int = free(200, "steps between log lines; the first ten are logged", 1)
    ckpt_seconds: float = free(60.0, "seconds between checkpoints; 0: at the end", 0)
    dist_timeout: float = free(60.0, "seconds after which a silent rank ends the others", 1)
    iterations: int = var(20000, "optimizer steps at most", 1)
    max_wallclock_seconds: float = var(600.0, "training seconds at most; 0: no cap", 0)
    max_flops: float = var(0.0, "operations of training at most, in products; 0: no cap", 0)
    warmdown_iters: float = var(3000.0, "last steps, as the rate falls; below 1: a part", 0)
    warmup_steps: int = free(20, "untimed steps on dummy tokens, then forgotten", 0)
    lr_warmup_steps: int = var(10, "steps over which the learning rate rises linearly", 0)
    train_batch_tokens: int = var(393216, "tokens of a step over all ranks", 1, 1e12)
    train_seq_len: int = var(4096, "tokens of one training sequence", 1, 262144)
    batch_slots: int = var(8, "parts of a step's batch; the number of ranks must divide it", 1)
    vocab_size: int = var(1024, "pieces of the tokenizer", 2, 65536)
    num_layers: int = var(9, "blocks", 1, 1024)
    model_dim: int = var(512, "width of the residual stream", 1, 65536)
    num_heads: int = var(8, "query heads", 1)
    num_kv_heads: int = var(4, "key and value heads", 1)
    key_shift: float = var(0.0, "start of the last keys' share of the token before", 0, 1)
    short_window: int = var(0, "tokens that layers but the last see; 0: all", 0, 262144)
    exclusive_attention: bool = var(False, "leave out what a token's own value says")
    mlp_mult: int = var(2, "hidden width of the MLP in model widths", 1, 1024)
    mlp_leak: float = var(0.0, "slope of the MLP's units below zero, before the square", 0, 1)
    rope_base: float = var(10000.0, "longest wavelength of the rotary positions over 2 pi", 1)
    logit_softcap: float = var(30.0, "c in c tanh(z / c)", 1e-3)
    qk_gain_init: float = var(1.5, "start of the learned gain of each query head")
    tied_embed_lr: float = var(0.03, "Adam rate of the embedding", 0)
    tied_embed_init_std: float = var(0.005, "deviation of the embedding at the start", 0)
    matrix_lr: float = var(0.02, "Muon rate of the blocks' matrices", 0)
    scalar_lr: float = var(0.02, "Adam rate of vectors and scalars", 0)
    muon_momentum: float = var(0.99, "momentum of Muon", 0, 0.99999)
    muon_backend_steps: int = var(5, "Newton-Schulz steps", 1, 1024)
    weight_decay: float = var(0.0, "of the matrices, decoupled (Loshchilov, Hutter 2019)", 0)
    muon_momentum_warmup_start: float = var(0.92, "momentum of Muon at step 0", 0, 0.99999)
    muon_momentum_warmup_steps: int = var(1500, "steps over which it rises linearly", 0)
    beta1: float = var(0.9, "Adam, first moment", 0, 0.99999)
    beta2: float = var(0.95, "Adam, second moment", 0, 0.99999)
    adam_eps: float = var(1e-8, "Adam, added to the root of the second moment", 1e-30)
    matrix_levels: int = var(127, "rounding steps each side of 0; 31: six bits", 1, 127)
    budget_bytes: int = var(16000000, "most bytes of artifact and code together", 1)
    code_bytes: str = var("raw", "how code counts: raw, or as zlib", choices=("raw", "zlib"))

    slot_tokens = property(lambda s: s.train_batch_tokens // s.batch_slots)
    head_dim = property(lambda s: s.model_dim // s.num_heads)
    eval_window = property(lambda s: s.eval_seq_len or s.train_seq_len)
    eval_rows = property(lambda s: max(1, s.val_batch_size // s.batch_slots // s.eval_window))
    windows = property(lambda s: [s.short_window or LARGE] * (s.num_layers - 1) + [LARGE])


ROWS = {row.name: row for row in dataclasses.fields(Settings)}
KINDS: Facts = {"int": (int, "a whole number"), "float": (float, "a number")}
KINDS["bool"] = ({"0": False, "1": True}.get, "0 or 1")


def parse_setting(name: str, text: str) -> Any:
    """The value of one environment variable. Raises SettingError naming what it takes."""
    about = ROWS[name].metadata
    low, high, choices = about["low"], about["high"], about.get("choices", [text])
    if ROWS[name].type == "str" and text in choices:
        return text
    parse, takes = KINDS.get(str(ROWS[name].type), (None, f"one of {', '.join(choices)}"))
    if parse and re.fullmatch("[0-9.eE+-]+", text):  # Python also reads 1_0
        with contextlib.suppress(ValueError, TypeError):
            if low <= parse(text) <= high:
                return parse(text)
    takes += f" from {low:g}" if low > -LARGE else ""
    takes += f" to {high:g}" if high < LARGE else ""
    raise SettingError(f"{name.upper()}={text!r}: takes {takes}")


def format_value(value: Any) -> str:
    """A setting's value as the text that parse_setting reads."""
    text = str(int(value) if isinstance(value, bool) else value)
    return text.removesuffix(".0") if isinstance(value, float) else text


def load_settings(env: Mapping[str, str], default: str) -> tuple[Settings, dict[str, str]]:
    """The settings, and the origin of each. Raises SettingError."""
    names = {name.upper(): name for name in ROWS}
    for name in sorted(env.keys() - names - {"MODEL_DIR"}):  # which is others'
        for meant in difflib.get_close_matches(name.upper(), names, 1, cutoff=0.85):
            found = f"{name}={env[name]!r} is no setting, {meant} is"
            places = [i for i in range(1, len(meant)) if meant[i] > "9"]  # one letter off?
            if re.fullmatch("|".join(f"{meant[:i]}.?{meant[i + 1 :]}" for i in places), name.upper()):
                raise SettingError(f"{found}: write that or unset it")
            print(f"note: {found}", file=sys.stderr)  # other tools' words
    given = {name: parse_setting(name, env[key]) for key, name in names.items() if key in env}
    preset = given.get("preset", default)
    described = dataset_settings(Path(given["data_path"])) if "data_path" in given else {}
    s = Settings(**(PRESETS[preset] | {"preset": preset} | described | given))
    check_settings(s)
    origins = dict.fromkeys(ROWS, "preset") | dict.fromkeys(described, "dataset")
    return s, origins | dict.fromkeys(given, "environment")


def dataset_settings(folder: Path) -> Facts:
    """Tokenizer and vocabulary by the manifest of data prepare, if the folder has one."""
    with contextlib.suppress(OSError, *DAMAGED):
        about = json.loads((folder / "manifest.json").read_bytes())["tokenizer"]
        path = os.path.normpath(folder / about["file"])
        return {"tokenizer_path": path, "vocab_size": int(about["vocab_size"])}
    return {}


def check_settings(s: Settings) -> None:
    """Refuse values that are possible alone but not together. Raises SettingError."""
    unit = s.batch_slots * s.train_seq_len
    for key, valid, takes in (
        ("num_heads", s.model_dim % (2 * s.num_heads) == 0, f"a divisor of half of MODEL_DIM={s.model_dim}"),
        ("num_kv_heads", s.num_heads % s.num_kv_heads == 0, f"a divisor of NUM_HEADS={s.num_heads}"),
        ("train_batch_tokens", s.train_batch_tokens % unit == 0, f"a multiple of {unit}, a sequence a slot"),
        ("run_id", re.fullmatch(r"([\w-][\w.-]{0,99})?", s.run_id), "up to 100 letters, digits, . _ -"),
        ("val_tokens_limit", s.val_tokens_limit != 1, "0 or at least 2 tokens"),
        ("max_flops", Plan(s).num_steps, f"0 or at least a step's {step_flops(s)}"),
    ):
        if not valid:
            raise SettingError(f"{key.upper()}={format_value(getattr(s, key))}: takes {takes}")


# --- parameters and plan: everything that is learned, and what each step consists of ------


class Param(NamedTuple):
    """One learned tensor, float32. Of a layered one, (layers, ...), a block reads its own."""

    name: str
    shape: tuple[int, ...]
    init: str  # normal, uniform, constant, or last: of the last layer, else 0
    scale: float
    group: str  # matrix: updated by Muon, products in the compute dtype; others: by Adam
    lr: float
    parts: list[int] = []  # rows of the matrices in each layer of it  # noqa: RUF012
    layered: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def parameter_table(s: Settings) -> list[Param]:
    """All parameters in storage order, matrices first; qkv holds three matrices, [out, in]."""
    layers, dim, hidden = s.num_layers, s.model_dim, s.mlp_mult * s.model_dim
    kv_dim = s.head_dim * s.num_kv_heads
    bound = dim**-0.5  # uniform in +-1/sqrt(fan in), as usual for a linear layer
    table = []
    # What a block adds starts at zero: deep models train from step 0 (Zhang et al. 2019).
    for name, init, scale, columns, rows in (
        ("qkv", "uniform", bound, dim, (dim, kv_dim, kv_dim)),
        ("attn_out", "constant", 0.0, dim, (dim,)),
        ("mlp_up", "uniform", bound, dim, (hidden,)),
        ("mlp_down", "constant", 0.0, hidden, (dim,)),
    ):
        shape = (layers, sum(rows), columns)
        table.append(Param(name, shape, init, scale, "matrix", s.matrix_lr, [*rows]))
    std, lr = s.tied_embed_init_std, s.tied_embed_lr
    table.append(Param("tok_emb", (s.vocab_size, dim), "normal", std, "embed", lr, layered=False))
    for name, init, scale, width in (
        ("attn_scale", "constant", 1.0, dim),
        ("mlp_scale", "constant", 1.0, dim),
        ("mix_x", "constant", 1.0, dim),
        ("mix_x0", "constant", 0.0, dim),
        ("key_shift", "last", s.key_shift, kv_dim),  # -0.013 bpb if in the last alone
        ("q_gain", "constant", s.qk_gain_init, s.num_heads),
    ):
        if name != "key_shift" or s.key_shift:
            table.append(Param(name, (layers, width), init, scale, "vector", s.scalar_lr))
    skips = (layers // 2, dim)
    return [*table, Param("skip_weight", skips, "constant", 1.0, "vector", s.scalar_lr, layered=False)]


def draw(param: Param, seed: int) -> np.ndarray:
    """Start value, float32, from seed and name alone: equal in every framework."""
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


class Step(NamedTuple):  # what differs from one optimizer step to the next
    number: int  # from 0
    lr_mul: float  # times the rate of each parameter
    momentum: float  # Muon's


class Plan:
    """The steps of a run, as many as ITERATIONS and MAX_FLOPS allow, and their rates."""

    def __init__(self, s: Settings) -> None:
        self.s = s
        self.flops = step_flops(s)  # of each step
        self.num_steps = min(s.iterations, int((s.max_flops or LARGE) // self.flops))

    def step(self, number: int, elapsed: float = 0.0) -> Step:
        """Its rate: a linear rise, constant, a linear fall to 0 over the run's last part."""
        s = self.s
        clock = elapsed / (s.max_wallclock_seconds or math.inf)
        progress = max(number / s.iterations, number * self.flops / (s.max_flops or math.inf), clock)
        part = s.warmdown_iters if s.warmdown_iters < 1 else s.warmdown_iters / s.iterations
        rise = min(1.0, (number + 1) / max(s.lr_warmup_steps, 1))
        fall = min(1.0, max(0.0, 1.0 - progress) / part) if part else 1.0
        risen = min(1.0, number / s.muon_momentum_warmup_steps) if s.muon_momentum_warmup_steps else 1.0
        momentum = (1 - risen) * s.muon_momentum_warmup_start + risen * s.muon_momentum
        return Step(number, rise * fall, momentum)


def step_flops(s: Settings) -> int:
    """Operations of a step: 2 m n k a product, forward, backward and of one optimizer."""
    # A weight is in three products of a token, a query with a key in six.
    weights = s.vocab_size * s.model_dim  # of the output matrix
    muon = 0
    for param in parameter_table(s):
        if param.group == "matrix":
            weights += param.size
        for rows in param.parts:
            short, long = sorted((rows, param.shape[2]))
            products = 4 * short * short * long + 2 * short**3
            muon += s.muon_backend_steps * param.shape[0] * products
    # A block of queries meets its own keys, and those that its first query sees before it.
    starts = np.arange(0, s.train_seq_len, query_block(s.num_heads // s.num_kv_heads))
    sizes = np.diff(starts, append=s.train_seq_len)
    pairs = sum(int(sizes @ (sizes + np.minimum(starts, window))) for window in s.windows)
    sequence = 6 * weights * s.train_seq_len + 12 * s.model_dim * pairs
    return int(s.train_batch_tokens // s.train_seq_len * sequence + muon)


# --- model: B batch, T tokens, D width, H heads, G kv heads, R = H / G, K head width, V vocab

NORM_EPS = 1e-6  # written down: the default of rms_norm differs between torch versions
MICRO_TOKENS = 8192  # slots below it share a pass: fewer calls, still in a CPU's cache
# Queries that attention multiplies at once: with their heads, 256 rows fill the tiles.
query_block: Function = lambda heads_per_key: max(128, 256 // max(heads_per_key, 1))
Weights = dict[str, Tensor]  # by parameter name
Rope = tuple[Tensor, Tensor]


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, float32 (Zhang and Sennrich 2019)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)


def rope_tables(s: Settings, device: torch.device, length: int) -> Rope:
    """(cos, cos) and (sin, -sin), float32[T, 1, K], of rotary positions (Su et al. 2021)."""
    pairs = torch.arange(0, s.head_dim, 2, dtype=torch.float64)
    frequencies = s.rope_base ** (-pairs / s.head_dim)
    positions = torch.arange(length, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)[:, None]
    angles = torch.cat([angles, -angles], dim=-1)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def norm_and_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RMS-normalise each head and turn its pairs, one of each half, by the position."""
    x = rms_norm(x)
    swapped = torch.unflatten(x, -1, (2, -1)).flip(-2).flatten(-2)  # quicker than joining
    return x * cos + swapped * sin


def attention(q_BTGRK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, window: float) -> Tensor:
    """Causal softmax attention to the last `window` keys, scale 1 / sqrt(K): of q's shape."""
    # R queries share a key (Ainslie et al. 2023); windows are of Beltagy et al. 2020.
    tokens, width = q_BTGRK.size(1), q_BTGRK.size(4)
    on_gpu = q_BTGRK.device.type == "cuda" and q_BTGRK.dtype == torch.bfloat16
    if not on_gpu or width % 16 or (window < tokens and not torch.compiler.is_compiling()):
        return attention_by_blocks(q_BTGRK, k_BTGK, v_BTGK, window)
    q, k, v = (x.transpose(1, 2) for x in (q_BTGRK.flatten(2, 3), k_BTGK, v_BTGK))
    if window >= tokens:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:  # 1.4 times as fast as FlashAttention 2 (H100); Dong et al. 2024
        seen = lambda batch, head, query, key: (key <= query) & (key > query - window)
        mask = create_block_mask(seen, None, None, tokens, tokens, q.device)
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).view_as(q_BTGRK)


def attention_by_blocks(q_BTGRK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, window: float) -> Tensor:
    """attention by blocks of queries: torch's own makes a step 1.4 to 1.7 times as long."""
    scale = q_BTGRK.size(-1) ** -0.5 * math.log2(math.e)  # exp2 is quicker than exp
    q_BGTRK = (q_BTGRK * scale).transpose(1, 2).contiguous()  # else bmm copies a slice of each
    k_BGTK = k_BTGK.transpose(1, 2).contiguous()
    v_BGTK = v_BTGK.transpose(1, 2).contiguous()
    positions = torch.arange(q_BTGRK.size(1), dtype=torch.int32, device=q_BTGRK.device)
    outs = []
    end = 0
    for q_BGtRK in q_BGTRK.split(query_block(q_BTGRK.size(3)), dim=2):
        start, end = end, end + q_BGtRK.size(2)
        begin = max(0, start - window)
        ago_t1S = positions[start:end, None, None] - positions[begin:end]
        seen_t1S = (ago_t1S >= 0) & (ago_t1S < window)
        queries = q_BGtRK.flatten(2, 3).flatten(0, 1)  # R heads as rows of one product
        keys = k_BGTK[:, :, begin:end].flatten(0, 1)
        values = v_BGTK[:, :, begin:end].flatten(0, 1)
        scores = torch.bmm(queries, keys.mT).float()
        scores = torch.unflatten(scores, 1, q_BGtRK.shape[2:4])
        scores = scores.where(seen_t1S, -math.inf).flatten(1, 2)
        largest = scores.detach().amax(-1, keepdim=True)
        weight = torch.exp2(scores - largest).to(values.dtype)
        total = weight.sum(-1, keepdim=True, dtype=torch.float32)
        out = torch.bmm(weight, values).float() / total
        outs.append(out.to(values.dtype).view_as(q_BGtRK))
    return torch.cat(outs, 2).transpose(1, 2)


class Cache:
    """What one layer keeps of the tokens before: keys and values, a ring of T positions."""

    def __init__(self, s: Settings, rows: int, machine: Machine, window: float) -> None:
        shape = (rows, s.num_kv_heads, int(min(window, s.eval_window)), s.head_dim)  # BGTK
        self.keys = torch.empty(shape, dtype=machine.dtype, device=machine.device)
        self.values = torch.empty_like(self.keys)
        self.last_key = torch.zeros_like(self.keys[:, None, :, 0])  # of the token before
        self.position = 0  # of the token that comes

    def attend(self, q_BTGRK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
        """attention of one token, T = 1, to itself and what is kept."""
        place = self.position % self.keys.size(2)
        self.keys[:, :, place] = k_BTGK[:, 0]
        self.values[:, :, place] = v_BTGK[:, 0]
        self.position += 1
        keys, values = self.keys[:, :, : self.position], self.values[:, :, : self.position]
        return F.scaled_dot_product_attention(q_BTGRK[:, 0], keys, values)[:, None]


def kv_shift(k_BTGK: Tensor, share_GK: Tensor, cache: Cache | None) -> Tensor:
    """float32 keys, each mixed with the one before: induction (Olsson et al. 2022)."""
    # KV-shifting attention (Xu et al. 2024, arXiv:2411.19574), RWKV (Peng et al. 2023).
    before = cache.last_key if cache else F.pad(k_BTGK, (0, 0, 0, 0, 1, -1))  # first: zeros
    if cache:
        cache.last_key = k_BTGK
    return torch.lerp(k_BTGK.float(), before.float(), share_GK)


def remove_own_value(y_BTGRK: Tensor, v_BTGK: Tensor) -> Tensor:
    """What attention found, float32, without its part along each token's own value."""
    # Exclusive self-attention (Zhai 2026, arXiv:2603.09078): the stream already holds that.
    own_BTG1K = F.normalize(v_BTGK.float(), dim=-1).unsqueeze(3)
    along = (y_BTGRK * own_BTG1K).sum(-1, keepdim=True)
    return y_BTGRK - along * own_BTG1K


def attend(s: Settings, x: Tensor, rope: Rope, w: Weights, window: float, cache: Cache | None) -> Tensor:
    """The attention of a block, [B, T, D] in the compute dtype to the same."""
    cos, sin = rope
    qkv = torch.unflatten(F.linear(x, w["qkv"]), 2, (-1, s.head_dim))
    q, k, v = torch.split(qkv, [s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=2)
    q = torch.unflatten(q, 2, (s.num_kv_heads, -1))
    # Norms keep logits small (Henry et al. 2020); a gain for each head sharpens them.
    gain = w["q_gain"].view(s.num_kv_heads, -1, 1)
    q = norm_and_rotate(q, cos[:, None], sin[:, None]) * gain
    if "key_shift" in w:
        share = w["key_shift"].view(s.num_kv_heads, -1)
        k = kv_shift(k, share, cache)
    k = norm_and_rotate(k, cos, sin)
    q, k = q.to(x.dtype), k.to(x.dtype)
    y = cache.attend(q, k, v) if cache else attention(q, k, v, window)
    if s.exclusive_attention:
        y = remove_own_value(y, v).to(x.dtype)
    return F.linear(y.flatten(2), w["attn_out"])


def mlp(s: Settings, x: Tensor, w: Weights) -> Tensor:
    """The units of a block, [B, T, D] in the compute dtype to the same."""
    y = F.linear(x, w["mlp_up"])
    # Relu squared (So et al. 2021), leaky as in openai/parameter-golf (#493, #518).
    y = F.leaky_relu(y, s.mlp_leak).square()
    return F.linear(y, w["mlp_down"])


def block(s: Settings, x: Tensor, x0: Tensor, rope: Rope, w: Weights, window: float, cache: Any) -> Tensor:
    """One pre-norm transformer block, [B, T, D] to the same; vectors act in float32."""
    dtype = x.dtype
    x = w["mix_x"] * x + w["mix_x0"] * x0  # a look at the embedding (modded-nanogpt, 2024)
    x = x + w["attn_scale"] * attend(s, rms_norm(x).to(dtype), rope, w, window, cache)
    x = x + w["mlp_scale"] * mlp(s, rms_norm(x).to(dtype), w)
    return x.to(dtype)


def head_logits(x: Tensor, matrix: Tensor, softcap: float, dtype: torch.dtype) -> Tensor:
    """[..., D] -> float32[..., V]: norm, product in dtype, c tanh(z / c) (Gemma 2, 2024)."""
    x = rms_norm(x).to(dtype)
    z = F.linear(x, matrix.to(dtype)).float()
    # tanh as m / (m + 2): torch's makes floppy's step 1.2 % slower (AMD EPYC, two cores).
    m = torch.expm1((z * (2 / softcap)).clamp(max=80.0))
    return softcap * (m / (m + 2))


def cross_entropy(x: Tensor, matrix: Tensor, targets: Tensor, softcap: float, dtype: torch.dtype) -> Tensor:
    """float32[B, T]: nats of each target, given the last block's output."""
    logits = head_logits(x, matrix, softcap, dtype)
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view_as(targets)


class GPT:
    """A U-Net of transformer blocks. Its parameters lie in one flat float32 tensor."""

    def __init__(self, s: Settings, machine: Machine) -> None:
        self.s, self.machine = s, machine
        self.table = parameter_table(s)
        self.sizes = [param.size for param in self.table]
        self.flat = torch.zeros(sum(self.sizes), device=machine.device, requires_grad=True)
        self.positions = functools.cache(functools.partial(rope_tables, s, machine.device))
        self.block = machine.compiled(functools.partial(block, s))  # one graph for all layers
        self.cross_entropy = machine.compiled(cross_entropy)

    def views(self, flat: Tensor) -> Weights:
        parts = torch.split(flat, self.sizes)
        return {param.name: part.view(param.shape) for param, part in zip(self.table, parts)}

    def weights(self) -> tuple[Weights, list[Weights]]:
        """By name; and those of each layer by name, where matrices have the compute dtype."""
        views = self.views(self.flat)
        layers: list[Weights] = [{} for _ in range(self.s.num_layers)]
        for param, view in zip(self.table, views.values()):
            if param.group == "matrix":
                view = view.to(self.machine.dtype)
            if param.layered:
                for layer, part in zip(layers, view.unbind(0)):
                    layer[param.name] = part
        return views, layers

    def trunk(self, ids: Tensor, caches: list[Cache] | None = None) -> tuple[Tensor, Tensor]:
        """int64[B, T] -> the last block's output, [B, T, D], and the output matrix."""
        shared, layers = self.weights()
        start = caches[0].position if caches else 0
        end = start + ids.size(1)
        cos, sin = self.positions(1 << end.bit_length())  # of few lengths: few tables
        rope = cos[start:end], sin[start:end]
        embedded = F.embedding(ids, shared["tok_emb"])
        x0 = rms_norm(embedded).to(self.machine.dtype)
        x = x0.view_as(x0)  # else the block is compiled once more, for x is x0
        half = len(layers) // 2
        outputs: list[Tensor] = []
        for i, (layer, window) in enumerate(zip(layers, self.s.windows)):
            if i >= half and outputs:
                # What the first half left, last in first out (Ronneberger et al. 2015).
                skip = shared["skip_weight"][i - half] * outputs.pop()
                x = (x + skip).to(x.dtype)
            cache = caches[i] if caches else None
            x = self.block(x, x0, rope, layer, window, cache)
            if i < half:
                outputs.append(x)
        return x, shared["tok_emb"]  # one matrix for input and output (Press and Wolf 2017)

    def token_nll(self, ids: Tensor, targets: Tensor, dtype: torch.dtype) -> Any:
        """int64[B, T] and their targets -> float32[B, T], nats; the last product in dtype."""
        x, head = self.trunk(ids)
        return self.cross_entropy(x, head, targets, self.s.logit_softcap, dtype)

    @torch.no_grad()
    def nll(self, ids: np.ndarray) -> np.ndarray:
        """int64[B, T+1] -> float32[B, T]: nats of ids[:, 1:], each given what is before it."""
        tensor = torch.from_numpy(ids).to(self.machine.device)
        nats = self.token_nll(tensor[:, :-1], tensor[:, 1:], torch.float32)
        return np.asarray(nats.cpu())


# --- optimizer: Muon for the block matrices, Adam for everything else; a step -------------


def newton_schulz(stack: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Singular values of [n, rows, cols] to about 1: Muon's quintic (Jordan et al. 2024)."""
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
    """One step over the flat parameters. `state`: what the next step depends on."""

    def __init__(self, s: Settings, model: GPT, machine: Machine) -> None:
        self.s, self.dtype = s, machine.dtype
        self.matrices = [param for param in model.table if param.group == "matrix"]
        self.num_matrix = sum(param.size for param in self.matrices)  # they stand first
        weights = model.flat.detach()
        matrices, rest = torch.zeros_like(weights).tensor_split([self.num_matrix])
        self.state = {"weights": weights, "momentum": matrices}
        self.state |= {"moment1": rest, "moment2": rest.clone()}
        rates = torch.tensor([param.lr for param in model.table])
        self.rates = rates.repeat_interleave(torch.tensor(model.sizes)).to(machine.device)
        self.orthogonalize = machine.recorded(self.orthogonalized)

    def orthogonalized(self, flat: Tensor) -> list[Tensor]:
        """Newton-Schulz on each matrix of a flat tensor, times sqrt(max(1, out / in))."""
        updates = []
        for param, part in zip(self.matrices, torch.split(flat, [p.size for p in self.matrices])):
            done = []
            # Matrices of one shape, of all layers, are a stack: one product for all of them.
            for stack in torch.split(part.view(param.shape), param.parts, dim=1):
                factor = max(1.0, stack.size(1) / stack.size(2)) ** 0.5
                x = newton_schulz(stack, self.s.muon_backend_steps, self.dtype)
                done.append(x.float() * factor)
            updates.append(torch.cat(done, dim=1).flatten())
        return updates

    @torch.no_grad()
    def step(self, grad: Tensor, step: Step, finite: Tensor) -> None:
        """Apply the update, unless a gradient was not finite: then nothing changes."""
        s, state, number = self.s, self.state, step.number + 1
        matrix_grad, rest_grad = grad.tensor_split([self.num_matrix])
        # Muon goes along Nesterov's momentum, orthogonalized (Jordan et al. 2024).
        momentum = matrix_grad.add(state["momentum"], alpha=step.momentum)
        direction = self.orthogonalize(matrix_grad.add(momentum, alpha=step.momentum))
        moment1 = state["moment1"].lerp(rest_grad, 1 - s.beta1)  # Adam (Kingma and Ba 2015)
        moment2 = state["moment2"].lerp(rest_grad.square(), 1 - s.beta2)
        root = (moment2 / (1 - s.beta2**number)).sqrt()
        adam = moment1 / (1 - s.beta1**number) / (root + s.adam_eps)
        update = torch.cat([*direction, adam])
        update[: self.num_matrix] += s.weight_decay * state["weights"][: self.num_matrix]
        weights = state["weights"].addcmul(self.rates, update, value=-step.lr_mul)
        new_state = weights, momentum, moment1, moment2
        for old, new in zip(state.values(), new_state):
            torch.where(finite, new, old, out=old)


class Trainer:
    """Model and optimizer of one run on this rank. The MLX twin derives from it."""

    def __init__(self, s: Settings, machine: Machine) -> None:
        self.s, self.machine = s, machine
        self.model: Any = GPT(s, machine)
        self.load({param.name: draw(param, s.seed) for param in self.model.table})
        self.optimizer: Any = Optimizer(s, self.model, machine)
        self.gradient = machine.recorded(self.loss_and_gradient)

    def load(self, weights: Arrays) -> None:
        flat = np.concatenate([weights[param.name].ravel() for param in self.model.table])
        self.model.flat.data.copy_(torch.from_numpy(flat))

    def restore(self, arrays: Arrays) -> None:
        """Take over the state of a checkpoint, float32 arrays by name."""
        for name, tensor in self.optimizer.state.items():
            tensor.copy_(torch.from_numpy(arrays[name]))

    def loss_and_gradient(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's share of the mean loss of int64[n, slot_tokens + 1]; its gradient."""
        loss = torch.zeros((), device=self.machine.device)
        gradient = torch.zeros_like(self.model.flat)
        together = math.gcd(len(batch), max(1, MICRO_TOKENS // self.s.slot_tokens))
        for slots in torch.split(batch.to(self.machine.device), together):
            ids = slots[:, :-1].reshape(-1, self.s.train_seq_len)
            targets = slots[:, 1:].reshape(-1, self.s.train_seq_len)
            share = len(slots) / (len(batch) * self.machine.world)
            part = self.model.token_nll(ids, targets, self.machine.dtype).mean() * share
            gradient += torch.autograd.grad(part, self.model.flat)[0]
            loss += part.detach()
        return loss, gradient

    def step(self, batch: Any, step: Step) -> tuple[Any, Any, Any]:
        """One step, of int64[n, slot_tokens + 1], this rank's: loss, gradient norm, finite."""
        loss, grad = self.gradient(batch)
        for part in (loss, grad):
            self.machine.collective(dist.all_reduce, part, group=self.machine.reducers)
        grad_norm = grad.norm()
        finite = (loss + grad_norm).isfinite()  # if not on one rank, not in the sum
        self.optimizer.step(grad, step, finite)
        return loss, grad_norm, finite

    def warm_up(self, plan: Plan) -> None:
        """Compile and touch everything with dummy steps, then forget them."""
        s, slots = self.s, self.s.batch_slots // self.machine.world
        old = {name: self.machine.numpy(x) for name, x in self.optimizer.state.items()}
        self.model.nll(np.zeros((s.eval_rows, s.eval_window + 1), np.int64))
        batch = self.machine.tensor(np.zeros((slots, s.slot_tokens + 1), np.int64))
        self.gradient(batch)
        self.machine.collective(dist.barrier, group=self.machine.patient)  # compilers are slow
        for _ in range(s.warmup_steps):
            self.step(batch, plan.step(0))
        self.restore(old)

    def sha256(self, *names: str) -> bytes:
        arrays = [self.machine.numpy(self.optimizer.state[name]) for name in names]
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()

    def export(self, tokenizer_sha256: str) -> bytes:
        views = self.model.views(self.optimizer.state["weights"])
        arrays = {name: self.machine.numpy(view) for name, view in views.items()}
        return encode_artifact(self.s, arrays, tokenizer_sha256)


# --- evaluation: bits per byte of the validation text -------------------------------------


def byte_table(tokenizer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes that a token adds, int64[vocab], after text, after control; which are control."""
    ids = range(tokenizer.vocab_size())
    control = np.array([tokenizer.is_control(i) for i in ids])
    silent = control | [tokenizer.is_unknown(i) for i in ids]
    first = np.array([len(text.encode()) for text in tokenizer.decode([[i] for i in ids])])
    anchor = int(np.argmax(~silent & (first > 0)))  # text: after it no dummy prefix is dropped
    pairs = tokenizer.decode([[anchor, i] for i in ids])
    inner = np.array([len(text.encode()) for text in pairs]) - first[anchor]
    for sizes in (inner, first):
        sizes[[tokenizer.is_byte(i) for i in ids]] = 1
        sizes[silent] = 0
    return inner, first, control


def bytes_of_tokens(tokenizer: Any, tokens: np.ndarray) -> np.ndarray:
    """Bytes of each token of a stream, int64[n]; documents begin after a control token."""
    inner, first, control = byte_table(tokenizer)
    after_control = np.append(True, control[tokens[:-1]])  # the first is
    return np.asarray(np.where(after_control, first[tokens], inner[tokens]))


def evaluate(s: Settings, nll: Function, corpus: Corpus, run: Run, limit: int) -> Facts:
    """val_loss and val_bpb of the first `limit` tokens, 0: all, in windows side by side."""
    machine, rows, window = run.machine, s.eval_rows, s.eval_window
    tokens = corpus.val_tokens[: limit or None]
    last = len(tokens) - 1
    together = machine.world * rows * window  # tokens of a pass of all ranks
    nats = 0.0
    for start in range(0, last, together):
        own = np.arange(machine.rank * rows, (machine.rank + 1) * rows)
        places = start + own[:, None] * window + np.arange(window + 1)
        ids = tokens[np.minimum(places, last)].astype(np.int64)  # one shape: compiled once
        scored = places[:, 1:] <= last
        found = nll(ids)[scored].sum(dtype=np.float64)
        # All ranks speak after each pass: a slow one is waited for, a signal ends all.
        everyone = machine.all_gather(float(found), len(machine.signals))
        nats += float(everyone[:, 0].sum())
        if everyone[:, 1].any():
            raise InterruptedError("stopped by a signal in an evaluation")
        run.line(f"scored {min(start + together, last)} of {last} tokens", pause=10)
    size = int(corpus.bytes_per_token[1 : len(tokens)].sum(dtype=np.int64))
    facts = {"val_tokens": last, "val_bytes": size, "partial": last + 1 < len(corpus.val_tokens)}
    return facts | {"val_loss": nats / last, "val_bpb": nats / math.log(2) / max(size, 1)}


# --- rounding: the artifact, zlib over a safetensors file (format: records/FORMAT.md) -----

SCHEMES = {"int8 rows": ["", ".scale"], "float32": [""], "float16": [""]}  # ends of names


def quantize_rows(matrix: np.ndarray, levels: int) -> Arrays:
    """int8[..., rows, columns] and a scale for each row, float16 if that holds them."""
    scale = np.abs(matrix).max(axis=-1) / np.float32(levels)
    half = scale.clip(max=65504).astype(np.float16)
    if np.allclose(half, scale, rtol=1e-3, atol=0):  # to one part in 1000
        scale = half
    rounded = np.rint(matrix / np.where(scale > 0, scale, 1).astype(np.float32)[..., None])
    return {"": np.clip(rounded, -levels, levels).astype(np.int8), ".scale": scale}


def levels_of(s: Settings, param: Param) -> int:
    """Rounding steps each side of 0; 0 for vectors, which steer whole layers: float32."""
    return {"vector": 0, "matrix": s.matrix_levels}.get(param.group, 127)


def encode_artifact(s: Settings, weights: Arrays, tokenizer_sha256: str) -> bytes:
    """float32 weights by name -> the artifact's bytes. Raises FloatingPointError."""
    tensors: Arrays = {}
    schemes: Facts = {}
    for param in parameter_table(s):
        name, x, levels = param.name, weights[param.name], levels_of(s, param)
        if not np.isfinite(x).all():
            raise FloatingPointError(f"{name} is not finite: nothing was exported")
        schemes[name] = "int8 rows" if levels else "float32"
        parts = quantize_rows(x, levels) if levels else {"": x}
        tensors |= {name + part: array for part, array in parts.items()}
    settings = {k: getattr(s, k) for k, row in ROWS.items() if "free" not in row.metadata}
    about = {"schemes": schemes, "settings": settings, "tokenizer_sha256": tokenizer_sha256}
    return pack_tensors(tensors, about, level=9)


def decode_artifact(blob: bytes, path: Any) -> tuple[Facts, Arrays, str]:
    """Settings, float32 weights by name, sha256 of the tokenizer. Raises DataError."""
    try:
        tensors, head = unpack_tensors(blob)
        settings = {k: parse_setting(k, format_value(v)) for k, v in head["settings"].items()}
        s = Settings(**settings)
        check_settings(s)
        weights = {}
        for name, shape, *_ in parameter_table(s):
            x, *scale = (tensors.pop(name + part) for part in SCHEMES[head["schemes"][name]])
            weights[name] = x.astype(np.float32)
            if scale:
                weights[name] *= scale[0].astype(np.float32)[..., None]
            if x.shape != shape or not np.isfinite(weights[name]).all():
                raise ValueError(f"{name} is {x.shape}, expected finite numbers of {shape}")
        if tensors:
            raise ValueError(f"its {min(tensors)!r} has no place in the model")
        return settings, weights, head["tokenizer_sha256"]
    except DAMAGED as error:
        raise DataError(f"{path} is damaged or of another script: {error!r}") from None


# --- predictor: what the referee calls (records/README.md) --------------------------------


class Predictor:  # a model that is given one token after the other, in many streams at once
    def __init__(self, model: GPT) -> None:
        self.model, self.s = model, model.s
        self.vocab_size = model.s.vocab_size
        self.rows = 256 if model.machine.device.type == "cpu" else 2048  # streams

    def start(self, rows: int) -> np.ndarray:
        """float32[rows, V]: logits of the first token of every stream: nothing is known."""
        self.caches = [Cache(self.s, rows, self.model.machine, w) for w in self.s.windows]
        return np.zeros((rows, self.vocab_size), np.float32)

    @torch.no_grad()
    def step(self, ids: np.ndarray) -> np.ndarray:
        """Next token of every stream, int64[rows] -> logits after it, float32[rows, V]."""
        column = torch.from_numpy(ids).to(self.model.machine.device)[:, None]
        x, head = self.model.trunk(column, self.caches)
        logits = head_logits(x[:, -1], head, self.s.logit_softcap, torch.float32)
        return logits.cpu().numpy()


def load_predictor(artifact: Path, device: str = "cpu") -> Predictor:
    """An artifact's model as the referee asks for it. Raises DataError."""
    settings, weights, _ = decode_artifact(read_file(artifact), artifact)
    keep_freed_memory()
    torch.backends.cuda.enable_cudnn_sdp(False)  # which plans anew for each number of keys
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # float32: alike on all CPUs
    machine = Machine(torch.device(device), dtype=dtype)
    trainer = Trainer(Settings(**settings), machine)
    trainer.load(weights)
    return Predictor(trainer.model)


# --- data: shards of 256 little-endian int32 and uint16 tokens (format: data/README.md) ---

FIELDS = ["magic", "version", "tokens", "extension", "extension_version", "vocabulary", "bos"]
FIELDS += ["documents", "highest_id", "bytes_low", "bytes_high", "crc32", "index", "shards", "split", "flags"]
HEADER = np.dtype([(x, "<u4") for x in FIELDS] + [("tokenizer", "V32"), ("rest", "V928")])
GET_DATA = "in this script's folder, python -m data prepare demo, prepare text FILE or download makes data"
MEND = "make or fetch it again; python -m data verify says more"


def need(where: Any, what: str, found: Any, expected: Any, more: str = MEND) -> None:
    """Raises DataError where what was found is not what was expected."""
    if found != expected:
        raise DataError(f"{where}: {what} is {found}, expected {expected}: {more}")


def read_file(path: Any, name: str = "", size: int = -1) -> bytes:
    """Bytes of a file. Raises DataError that begins with `name`, the path's setting."""
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        raise DataError(f"{name}{path} (in {os.getcwd()}): {error.strerror}; {GET_DATA}") from None


def find_shards(folder: str, split: str, notes: list[str]) -> list[Path]:
    """Files <set>_<split>_<number>.bin by number; a note of others. Raises DataError."""
    names = sorted(path.name for path in Path(folder).glob("[!.]*.bin"))
    shards = [re.fullmatch(r"(.+)_(train|val)_([0-9]+)\.bin", name) for name in names]
    others = ", ".join([name for name, shard in zip(names, shards) if not shard][:3])
    notes += [f"note: {folder}: left out, not named as shards: {others}"] if others else []
    own = sorted((int(shard[3]), shard[1], shard[0]) for shard in shards if shard and shard[2] == split)
    if not own:
        here = {str(p.parent) for p in Path("data/datasets").glob(f"*/*_{split}_*.bin")}
        there = others or ", ".join(difflib.get_close_matches(folder, here, 3, cutoff=0)) or "none"
        found = f"no <set>_{split}_<number>.bin; there are {there}; {GET_DATA}"
        raise DataError(f"DATA_PATH={folder} (in {os.getcwd()}): {found}")
    first = min(own[0][0], 1)  # numbers begin with 0 or 1
    odd = [name for i, (*place, name) in enumerate(own) if place != [first + i, own[0][1]]]
    need(folder, "shards of another dataset, of one number, or after a missing one", odd, [], "move or fetch")
    return [Path(folder, name) for *_, name in own]


class TokenStream:
    """The tokens of all shards of a split, end to end and around again. Raises DataError."""

    def __init__(self, s: Settings, split: str, tokenizer_sha256: str, bos: int, notes: list[str]) -> None:
        self.paths = find_shards(s.data_path, split, notes)
        blobs = [read_file(path, size=HEADER.itemsize).ljust(HEADER.itemsize, b"\0") for path in self.paths]
        self.headers = np.frombuffer(bytearray().join(blobs), HEADER)
        self.extended = bool(self.headers["extension"][0])  # else legacy
        self.starts = np.cumsum([0, *self.headers["tokens"]], dtype=np.int64)
        self.total = int(self.starts[-1])
        begins = [np.zeros(1, np.int64)]
        for index, (path, header, start) in enumerate(zip(self.paths, self.headers, self.starts)):
            need(path, "magic, version", header[["magic", "version"]].item(), (20240520, 1))
            size = HEADER.itemsize + 2 * max(header["tokens"].item(), 1 + (split == "val"))
            need(path, "file size", path.stat().st_size, size)
            need(path, "extension", header["extension"], 0x31464C47 if self.extended else 0)
            tokens = self.read(start, int(header["tokens"]))
            highest = max(int(tokens.max()), s.vocab_size - 1)
            need(path, "highest token", highest, s.vocab_size - 1, "see VOCAB_SIZE")
            crc32 = zlib.crc32(tokens.data)
            if self.extended:
                need(path, "index and split", header[["index", "split"]].item(), (index, split == "train"))
                if split == "val":  # of training text a part will do
                    need(path, "number of shards", len(self.paths), header["shards"])
                own = header["tokenizer"].item().hex()
                need(path, "sha256 of the tokenizer", own, tokenizer_sha256, "see DATA_PATH, TOKENIZER_PATH")
                need(path, "crc32 of the tokens", crc32, header["crc32"])
            header["crc32"] = crc32  # so a resume knows the text of legacy shards, too
            begins.append(start + np.flatnonzero(tokens == bos))
        self.documents = np.unique(np.concatenate(begins))  # starts; the last goes on at 0

    def read(self, start: int, length: int) -> np.ndarray:
        """uint16[length] from token `start` on, the first token following the last."""
        start %= self.total
        shard = int(np.searchsorted(self.starts, start, "right")) - 1
        path, at = self.paths[shard], start - self.starts[shard]
        count = min(length, self.starts[shard + 1] - start)
        tokens = np.fromfile(path, "<u2", count, offset=HEADER.itemsize + 2 * at)
        need(path, f"number of tokens from {at} on", len(tokens), count, "the file was cut")
        rest = length - count
        return np.concatenate([tokens, self.read(start + count, rest)]) if rest else tokens


class BatchReader:
    """Reads this rank's part of each batch. What a slot holds depends on its number alone."""

    def __init__(self, s: Settings, stream: TokenStream, machine: Machine, notes: list[str]) -> None:
        self.stream, self.machine = stream, machine
        self.slots, self.length = s.batch_slots, s.slot_tokens + 1  # the last is a target only
        windows = np.arange(stream.total // self.length)
        if not len(windows):
            fits = 1 << max(0, (stream.total - 1).bit_length() - 1)
            found = f"DATA_PATH={s.data_path}: {stream.total} training tokens, a slot takes {self.length}"
            raise DataError(f"{found}: TRAIN_SEQ_LEN={fits} TRAIN_BATCH_TOKENS={fits * s.batch_slots} fit")
        if s.doc_tokens:  # windows whose middle stands in a short document
            sizes = np.diff(stream.documents, append=stream.total)
            middles = windows * self.length + self.length // 2
            document = np.searchsorted(stream.documents, middles, "right") - 1
            short = sizes[document] <= s.doc_tokens
            windows = windows[short] if short.mean() >= 0.1 else windows
            notes.append(f"note: {short.mean():.0%} in short documents (DOC_TOKENS); below 10% all is read")
        self.order = np.random.Generator(np.random.Philox(key=s.seed)).permutation(windows)

    def read(self, step: int) -> Any:
        """This rank's slots of a step, int64[n, slot_tokens + 1] of the framework."""
        numbers = step * self.slots + np.arange(self.machine.rank, self.slots, self.machine.world)
        places = self.order[numbers % len(self.order)] * self.length
        rows = [self.stream.read(int(place), self.length) for place in places]
        return self.machine.tensor(np.stack(rows).astype(np.int64))


class Corpus(NamedTuple):  # what a run reads, and what the log says of it
    train: Any  # TokenStream; None: EVAL_ONLY
    val_tokens: np.ndarray  # uint16[n]
    bytes_per_token: np.ndarray  # int[n]
    notes: list[str]
    sha256: dict[str, str]  # of training headers, validation tokens, tokenizer


def load_corpus(s: Settings, machine: Machine, with_train: bool = True) -> Corpus:
    """The tokenizer and the shards, which must belong together. Raises DataError."""
    find_shards(s.data_path, "train" if with_train else "val", [])  # error names near ones
    blob = read_file(s.tokenizer_path, "TOKENIZER_PATH=")
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=blob)
    except RuntimeError:
        raise DataError(f"TOKENIZER_PATH={s.tokenizer_path} is no SentencePiece model; {GET_DATA}") from None
    need(s.tokenizer_path, "vocabulary", tokenizer.vocab_size(), s.vocab_size, "see DATA_PATH, VOCAB_SIZE")
    notes: list[str] = []
    train = TokenStream(s, "train", sha256(blob), tokenizer.bos_id(), notes) if with_train else None
    hashes = {"tokenizer_sha256": sha256(blob)} | ({"train_sha256": sha256(train.headers)} if train else {})
    if train and not any(Path(s.data_path).glob("[!.]*_val_*.bin")):  # as in a retraining
        none = np.zeros(0, np.uint16)
        return Corpus(train, none, none, [*notes, "note: no validation text or score"], hashes)
    val = TokenStream(s, "val", sha256(blob), tokenizer.bos_id(), notes)
    tokens = val.read(0, val.total)
    sizes = bytes_of_tokens(tokenizer, tokens)
    total = int(sizes.sum(dtype=np.int64))
    stated = int(val.headers["bytes_low"].sum()) + (int(val.headers["bytes_high"].sum()) << 32)
    if not val.extended:
        spaceless = tokenizer.is_unknown(tokenizer.piece_to_id("\u2581"))
        need(s.tokenizer_path, "whether spaces have no piece", spaceless, False, "bytes cannot be counted")
        unknown = np.sum(tokens == tokenizer.unk_id())
        notes.append(f"warning: legacy shards: scored as made by {s.tokenizer_path}; unknown: {unknown}")
    elif val.headers["flags"][0] & 1:  # lossy tokenizer: the true bytes, spread
        sizes = np.diff(np.cumsum(sizes, dtype=np.int64) * stated // max(total, 1), prepend=0)
        notes.append(f"note: lossy tokenizer: {total} bytes decoded of {stated}")
    else:
        need(s.data_path, "byte count of the validation tokens", total, stated)
    hashes["val_sha256"] = sha256(tokens)
    need(s.data_path, "text", hashes, machine.on_rank_0(lambda: hashes), "rank 0's differs")
    return Corpus(train, tokens, sizes, notes, hashes)


# --- run: its folder, log, metrics and checkpoints ----------------------------------------

DAMAGED: Any = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
DAMAGED += (RecursionError, zlib.error, safetensors.SafetensorError)  # of a damaged file


def pack_tensors(tensors: Arrays, about: Facts, level: int) -> bytes:
    """zlib over a safetensors file. One metadata key: it writes several in no fixed order."""
    plain = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    blob = safetensors.numpy.save(plain, {"bytegolf": json.dumps(about, sort_keys=True)})
    packer = zlib.compressobj(level, strategy=zlib.Z_FILTERED)  # weights repeat nothing
    return packer.compress(blob) + packer.flush()


def unpack_tensors(blob: bytes) -> tuple[Arrays, Facts]:
    """The tensors and what pack_tensors wrote about them. Raises one of DAMAGED."""
    plain = zlib.decompress(blob)  # which checks a checksum
    header = json.loads(plain[8 : 8 + int.from_bytes(plain[:8], "little")])
    return safetensors.numpy.load(plain), json.loads(header["__metadata__"]["bytegolf"])


def write_whole(path: Path, blob: bytes) -> None:
    """Write a file so that one of this name is always whole. Raises OSError."""
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "wb") as file:
            file.write(blob)
            file.flush()
            try:
                os.fsync(file.fileno())
            except OSError as error:  # some mounts have none
                if error.errno not in (22, 38, 95):  # EINVAL, ENOSYS, ENOTSUP
                    raise
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def newest_checkpoint(folder: Path) -> tuple[Arrays, Facts, list[str]]:
    """Arrays, facts, notes of the newest whole one. Raises DataError if all are damaged."""
    notes: list[str] = []
    for path in sorted(folder.glob("step_*.ckpt"), reverse=True):
        try:
            return *unpack_tensors(read_file(path)), [*notes, f"resumed from {path}"]
        except DAMAGED:
            path.rename(path.with_suffix(".damaged"))
            notes.append(f"warning: {path} is damaged and put aside; the one before is taken")
    if notes:
        raise DataError(f"{folder}: all damaged and put aside; the same command begins anew")
    return {}, {}, []


def open_run(s: Settings, about: Facts, code: Facts) -> tuple[Path, Arrays, Facts, list[str]]:
    """logs/<RUN_ID>/, locked, and its checkpoint. SettingError, DataError: not of `about`."""
    folder = Path("logs", s.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{s.preset}-{os.getpid()}")
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    metrics.touch()
    refused = f"RUN_ID={folder.name}: choose another, {folder}"
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # to its end
    except BlockingIOError:
        raise SettingError(f"{refused} is in use by another process") from None
    except OSError as error:
        print(f"note: {folder} has no lock, so start no second process of it: {error}")
    events = metrics.read_bytes()
    if b'{"event": "final"' in events.rpartition(b"\n")[0]:
        raise SettingError(f"{refused} is a run that has ended and is never overwritten")
    arrays, facts, notes = newest_checkpoint(folder / "checkpoint")
    begun = facts["settings"] | facts["sha256"] if facts else {}
    for name, was in begun.items():
        now = (about["settings"] | about["sha256"]).get(name)
        if now == was or "free" in ROWS.get(name, ROWS["seed"]).metadata:
            continue
        found = f"{name.upper()}={format_value(now)}: {folder} began with {format_value(was)}"
        by = f"PRESET={begun['preset']} DATA_PATH={begun['data_path']} {folder}/train_gpt.py"
        kind = DataError if name in facts["sha256"] else SettingError
        raise kind(f"{found}, by {by}: give that again, or a new RUN_ID")
    began, here = facts.get("environment", {}), about["environment"]
    if changed := ", ".join(name for name in began if began[name] != here.get(name)):
        notes.append(f"note: {changed}: not as {folder} began, so other bits may follow")
    os.truncate(metrics, min(facts.get("metrics_bytes", 0), len(events)))  # steps again
    for name, blob in (code | {"config.json": json.dumps(about, indent=1).encode()}).items():
        write_whole(folder / name, blob)
    return folder, arrays, facts, notes


class Run:
    """What a run says and keeps: train.log for people, metrics.jsonl for programs."""

    def __init__(self, machine: Machine, s: Settings, folder: Any = None, about: Any = None) -> None:
        self.machine, self.s = machine, s
        self.folder, self.about = folder, about  # without a folder nothing is written
        names = "train_seconds eval_seconds steps tokens_seen train_flops resumes"
        names += " skipped_steps skipped_in_a_row"
        self.counters = types.SimpleNamespace(**dict.fromkeys(names.split(), 0))
        self.plan = Plan(s)
        self.spoke = 0.0

    def write(self, name: str, text: str) -> None:
        if self.folder and self.machine.rank == 0:
            with open(self.folder / name, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text + "\n")

    def line(self, text: str, pause: float = 0.0) -> None:
        """A line for people, unless there was one in the last `pause` seconds."""
        if self.machine.rank > 0 or time.monotonic() < self.spoke + pause:
            return
        self.spoke = time.monotonic()
        with contextlib.suppress(OSError, AttributeError, ValueError):  # no such terminal
            print(text, flush=True)
        self.write("train.log", text)

    def event(self, event: str, **values: Any) -> None:
        """For programs: floats exact, those that are not finite as text."""
        odd = {k: str(v) for k, v in values.items() if type(v) is float and not math.isfinite(v)}
        self.write("metrics.jsonl", json.dumps({"event": event} | values | odd))
        if event == "warning":
            self.line(f"warning: {values['text']}")

    def final(self, rows: Facts) -> None:
        self.line("\n".join(["---", *(f"{key}: {value}" for key, value in rows.items())]))
        self.event("final", **rows)

    def log_step(self, stats: list[float], lr_mul: float) -> None:
        """An event, and some lines. Raises FloatingPointError at the tenth skipped."""
        s, counters, step = self.s, self.counters, self.counters.steps
        seconds, flops = counters.train_seconds, counters.train_flops
        loss, grad_norm, finite = stats
        facts = {"step": step, "train_loss": loss, "grad_norm": grad_norm, "lr_mul": lr_mul}
        self.event("step", **facts, train_seconds=seconds, train_flops=flops)
        counters.skipped_in_a_row = 0 if finite else counters.skipped_in_a_row + 1
        if not finite:
            counters.skipped_steps += 1
            found = f"step {step} skipped: train_loss {loss}, gradient norm {grad_norm}"
            self.event("warning", text=f"{found}; weights and optimizer are as before")
            if counters.skipped_in_a_row >= 10:
                raise FloatingPointError(f"{found}, the tenth in a row; lower MATRIX_LR or SCALAR_LR")
        clock = seconds / (s.max_wallclock_seconds or math.inf)
        done = max(step / s.iterations, flops / (s.max_flops or math.inf), clock)  # of the run
        self.line(  # speeds are averages over the run
            f"step:{step}/{self.plan.num_steps} train_loss:{loss:.4f} time:{seconds:.0f}s "
            f"left:{seconds / done - seconds:.0f}s tok_s:{counters.tokens_seen / seconds:.0f} "
            f"mfu:{flops / seconds / self.machine.peak_flops / self.machine.world:.0%}",
            pause=0 if step <= 10 or step % s.train_log_every == 0 or step == self.plan.num_steps else 10,
        )

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint. The last two are kept. If there is no room, training goes on."""
        about = self.about | {"counters": vars(self.counters)}
        about["metrics_bytes"] = (self.folder / "metrics.jsonl").stat().st_size
        state = {name: self.machine.numpy(x) for name, x in trainer.optimizer.state.items()}
        path = self.folder / f"checkpoint/step_{self.counters.steps:08}.ckpt"
        try:
            write_whole(path, pack_tensors(state, about, level=0))
            for old in sorted(path.parent.glob("step_*.ckpt"))[:-2]:
                old.unlink()
        except OSError as error:
            self.event("warning", text=f"no checkpoint: {error}")


# --- machine: device, ranks, number format, compiler --------------------------------------

read_proc: Function = lambda name: Path(name).read_text() if os.access(name, os.R_OK) else ""
CPUINFO = read_proc("/proc/cpuinfo")


@dataclasses.dataclass
class Machine:
    """Where this process computes. rank and world: its place among those of the run."""

    device: torch.device
    rank: int = 0
    world: int = 1
    dtype: torch.dtype = torch.float32  # of products
    peak_flops: float = math.inf  # per second, measured, of one process in dtype
    compile: bool = False  # not under python -O: torch makes wrong code there
    timeout: float = math.inf  # seconds that the other ranks may be silent
    patient: Any = None  # process group that waits for compilers and slow disks
    reducers: Any = None  # the process group that sums gradients
    signals: list[int] = dataclasses.field(default_factory=list)  # those to stop that came

    def collective(self, operation: Function, *args: Any, **named: Any) -> None:
        """What all ranks do together. Raises InterruptedError if one is dead or silent."""
        if self.world > 1:
            try:
                operation(*args, **named)
                end = time.monotonic() + self.timeout
                while self.reducers and not torch.cuda.current_stream().query():
                    if time.monotonic() > end:  # NCCL's kernels wait for a dead rank for ever
                        raise RuntimeError("NCCL waits")
            except RuntimeError as error:
                raise InterruptedError(f"lost a rank: dead or silent (DIST_TIMEOUT): {error}") from error

    def all_gather(self, *numbers: float) -> np.ndarray:
        """float64[world, n]: these numbers of every rank."""
        everyone = [torch.tensor(numbers, dtype=torch.float64) for _ in range(self.world)]
        self.collective(dist.all_gather, everyone, everyone[self.rank].clone())
        return torch.stack(everyone).numpy()

    def on_rank_0(self, function: Function) -> Any:
        """What a function returns on rank 0, on every rank; if it raises, rank 0 is lost."""
        answer = [function() if self.rank == 0 else None]
        self.collective(dist.broadcast_object_list, answer, group=self.patient, device=torch.device("cpu"))
        return answer[0]

    def tensor(self, array: np.ndarray) -> Any:
        return torch.from_numpy(array)

    def numpy(self, tensor: Any) -> Any:
        return tensor.detach().cpu().numpy().copy()

    def compiled(self, function: Function) -> Function:
        return torch.compile(function, dynamic=False) if self.compile else function

    def recorded(self, function: Function) -> Function:
        """On a GPU a CUDA graph: kernels start at once. A call overwrites the last answer."""
        if self.device.type != "cuda" or not self.compile:
            return function
        make, zeros = torch.cuda.make_graphed_callables, functools.partial(torch.zeros, device=self.device)
        graph = functools.cache(lambda shape, dtype: make(function, (zeros(shape, dtype=dtype),)))
        return lambda x: graph(x.shape, x.dtype)(x.to(self.device))

    def choose_dtype(self, wanted: str) -> str:
        """Set dtype, by a rule: a timing may differ next time, and peak_flops; its name."""
        if wanted == "auto":
            fast = self.device.type != "cpu" or re.search(r"\b(amx_|avx512_)?bf16\b", CPUINFO)
            wanted = "bfloat16" if fast else "float32"
        self.dtype = getattr(torch, wanted)
        side = 512 if self.device.type == "cpu" else 8192
        a, b = torch.randn(2, side, side, device=self.device).to(self.dtype)
        seconds = timeit.repeat(lambda: (a @ b)[0, 0].item(), number=1, repeat=10)  # waits
        self.peak_flops = 2 * side**3 / min(seconds)
        return wanted

    def facts(self) -> Facts:
        processor = (re.findall(r"model name\s*: (.*)", CPUINFO) or [os.uname().machine])[0]
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else "none"
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "ranks": self.world}
        return facts | {"zlib": zlib.ZLIB_RUNTIME_VERSION, "gpu": gpu, "processor": processor}


def open_machine(s: Settings) -> Machine:
    """Device, compiler and process groups. Raises SettingError for what is not there."""
    defaults = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}  # torchrun's, and MASTER_ADDR
    given = os.environ if "MASTER_ADDR" in os.environ else {}
    world, rank, local = (int(given.get(name) or value) for name, value in defaults.items())
    fits = [n for n in range(1, s.batch_slots + 1) if s.batch_slots % n == 0]
    if world not in fits:
        raise SettingError(f"WORLD_SIZE={world}: by BATCH_SLOTS takes one of {', '.join(map(str, fits))}")
    cuda = s.device == "cuda" or (s.device == "auto" and torch.cuda.is_available())
    if world == 1 and os.environ.get("SLURM_NTASKS", "1") != "1":
        print("note: SLURM_NTASKS without MASTER_ADDR: each task trains alone, use torchrun")
    if cuda and local >= torch.cuda.device_count():
        raise SettingError(f"DEVICE={s.device}: torch finds no GPU LOCAL_RANK={local}")
    device = torch.device(f"cuda:{local}" if cuda else "cpu")
    machine = Machine(device, rank, world, compile=s.compile and __debug__, timeout=s.dist_timeout)
    if world > 1:  # small decisions travel as CPU tensors over gloo: no GPU waits for them
        timeout = datetime.timedelta(seconds=s.dist_timeout)
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)  # type: ignore
        dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=world)
        dist.barrier()  # else the next line waits an hour for a rank that is gone
        machine.patient = dist.new_group(timeout=datetime.timedelta(hours=1))
        if cuda:  # NCCL's watchdog kills the process: `collective` has to notice before
            torch.cuda.set_device(local)
            machine.reducers = dist.new_group(backend="nccl", timeout=10 * timeout)
    if " " in os.environ.get("TMPDIR", "") + os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""):  # not quoted
        os.environ |= {"TMPDIR": "/tmp", "TORCHINDUCTOR_CACHE_DIR": f"/tmp/torchinductor_{os.getuid()}"}
    try:
        machine.compiled(torch.neg)(torch.zeros(2, device=machine.device))
    except Exception as error:  # no C++ compiler, or a broken one: eager runs
        machine.compile = False
        print("compile:0 (torch.compile fails, so eager):", *str(error).rpartition("Output:")[2].split()[:30])
    torch._dynamo.config.suppress_errors = True  # a damaged cache: eager, and a warning
    keep_freed_memory()
    own = re.findall(r"(?:^0:|\bcpu\b.*):(.*[^/\n])?", read_proc("/proc/self/cgroup"))
    for group in {path[: end.start()] for path in own for end in re.finditer("/|$", path)}:
        for files in ([f"{group}/cpu.max"], [f"/cpu{group}/cpu.cfs_{x}_us" for x in ("quota", "period")]):
            with contextlib.suppress(OSError, *DAMAGED):  # no limit is max, or -1
                text = " ".join(Path(f"/sys/fs/cgroup{name}").read_text() for name in files)
                quota, period = map(int, text.split())
                if 0 <= quota // period <= torch.get_num_threads():
                    torch.set_num_threads(max(1, quota // period))
                    print(f"note: /sys/fs/cgroup{files[0]} limits the threads")
    return machine


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: its page faults make a step 1.4 times as long."""
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):  # mmap, trim, top pad
        getattr(ctypes.CDLL(None), "mallopt", min)(option, value)  # elsewhere nothing happens


# --- main: a whole run, or an evaluation alone --------------------------------------------


def train(trainer: Trainer, corpus: Corpus, reader: BatchReader, run: Run) -> None:
    """Step and validate until the last step, the cap or a signal (InterruptedError)."""
    s, machine, counters, plan = trainer.s, trainer.machine, run.counters, run.plan
    saved = time.perf_counter()
    began = saved - counters.train_seconds  # evaluations move it: their seconds do not count
    signalled = False
    for number in range(counters.steps, plan.num_steps):
        now = time.perf_counter()
        save_due = s.ckpt_seconds > 0 and now - saved >= s.ckpt_seconds
        everyone = machine.all_gather(now - began, save_due, len(machine.signals))
        elapsed, save_due, _ = everyone[0].tolist()  # rank 0's clock decides for all
        signalled = bool(everyone[:, 2].any())  # on any rank
        if signalled or 0 < s.max_wallclock_seconds <= elapsed:
            break
        validation_due = number > 0 and s.val_loss_every > 0 and number % s.val_loss_every == 0
        if save_due or validation_due:
            machine.on_rank_0(lambda: run.save(trainer))
            if validation_due:
                validate(trainer, corpus, run, s.val_batch_size + 1)
            saved = time.perf_counter()
            began += saved - now  # the clock stood still
        step = plan.step(number, elapsed)
        stats = [*map(float, trainer.step(reader.read(number), step))]  # waits for the GPU
        counters.steps += 1
        counters.tokens_seen += s.train_batch_tokens
        counters.train_flops += plan.flops
        counters.train_seconds = time.perf_counter() - began
        run.log_step(stats, step.lr_mul)
    machine.on_rank_0(lambda: run.save(trainer))
    if signalled:
        raise InterruptedError(f"stopped by a signal after step {counters.steps} of {plan.num_steps}")


def validate(trainer: Trainer, corpus: Corpus, run: Run, limit: int, what: str = "val") -> Facts:
    """Score the first `limit` tokens, 0: all. FloatingPointError: the replicas differ."""
    counters, began = run.counters, time.perf_counter()
    hashes = trainer.machine.all_gather(*trainer.sha256("weights")).tolist()
    odd = [rank for rank, found in enumerate(hashes) if found != max(hashes, key=hashes.count)]
    if odd:
        raise FloatingPointError(f"step {counters.steps}: the weights of rank {odd} differ")
    if not len(corpus.val_tokens):
        return {}
    score = evaluate(trainer.s, trainer.model.nll, corpus, run, limit)
    counters.eval_seconds += time.perf_counter() - began
    run.event(what, step=counters.steps, train_seconds=counters.train_seconds, **score)
    mark = " partial" if score.pop("partial") else ""
    found = f"val_loss:{score['val_loss']:.4f} val_bpb:{score['val_bpb']:.4f}{mark}"
    place = f"step:{counters.steps}/{run.plan.num_steps}" if what == "val" else what
    run.line(f"{place} {found} time:{counters.train_seconds:.0f}s")
    return score | {name: f"{score[name]:.8f}{mark}" for name in ("val_loss", "val_bpb")}


def score_artifact(trainer: Trainer, blob: bytes, path: Any, corpus: Corpus, run: Run) -> Facts:
    """The result: what an artifact scores. Raises FloatingPointError if that is no number."""
    _, weights, tokenizer_sha256 = decode_artifact(blob, path)
    own = corpus.sha256["tokenizer_sha256"]
    need(path, "sha256 of the tokenizer", tokenizer_sha256, own, "see DATA_PATH")
    trainer.load(weights)
    score = validate(trainer, corpus, run, trainer.s.val_tokens_limit, "artifact")
    if re.match("nan|inf", score.get("val_loss", "")):
        raise FloatingPointError(f"{path}: scores {score['val_loss']} nats a token")
    return corpus.sha256 | {"artifact_sha256": sha256(blob), "artifact_bytes": len(blob)} | score


def finish(trainer: Trainer, corpus: Corpus, run: Run) -> int:
    """Write the artifact, and score it: the result. Returns the exit code."""
    s, machine, path = trainer.s, trainer.machine, run.folder / "model.ptz"
    validate(trainer, corpus, run, s.val_batch_size + 1)  # a sample, of the unrounded weights
    state_sha256 = trainer.sha256(*trainer.optimizer.state).hex()
    machine.on_rank_0(lambda: write_whole(path, trainer.export(corpus.sha256["tokenizer_sha256"])))
    blob = machine.on_rank_0(path.read_bytes)
    score = score_artifact(trainer, blob, path, corpus, run)
    total = len(blob) + run.about["environment"]["code_bytes"]
    fits = total <= s.budget_bytes
    rows = run.about["environment"] | {"device": str(machine.device), "state_sha256": state_sha256}
    memory = torch.cuda.max_memory_allocated() >> 20
    rows |= {"params": sum(trainer.model.sizes)} | ({"peak_memory_mib": memory} if memory else {})
    rows |= {"preset": s.preset, "seed": s.seed, "run_id": run.folder.name} | vars(run.counters)
    rows |= {"total_bytes": total, "budget_bytes": s.budget_bytes, "budget": "ok" if fits else "over"}
    run.final(rows | score | {"next": f"{os.path.relpath(sys.executable)} -m records sample {run.folder}"})
    return 0 if fits else 4


def run_all(s: Settings, about: Facts, code: Facts, machine: Machine, make: Function) -> int:
    """A whole run on this rank. Returns the exit code."""
    s = dataclasses.replace(s, dtype=machine.choose_dtype(s.dtype))
    corpus, settings, origins = load_corpus(s, machine), dataclasses.asdict(s), about["origins"]
    environment = machine.facts() | {"dtype": s.dtype} | about["environment"]
    size = {"params": sum(param.size for param in parameter_table(s))}  # forks differ
    about |= {"settings": settings, "sha256": corpus.sha256 | size, "environment": environment}
    folder, arrays, facts, notes = machine.on_rank_0(lambda: open_run(s, about, code))
    reader = BatchReader(s, corpus.train, machine, corpus.notes)
    run, trainer = Run(machine, s, folder, about), make(s, machine)
    given = [f"{name.upper()}={format_value(settings[name])}" for name in ROWS if origins[name] != "preset"]
    run.line(f"run:{folder} preset:{s.preset} {' '.join(given)}")
    run.line(" ".join(f"{name}:{value}" for name, value in environment.items()))
    run.line(f"device:{machine.device} compile:{machine.compile:d} {machine.peak_flops / 1e9:.0f}GFLOP/s")
    epochs = run.plan.num_steps * s.batch_slots / len(reader.order)
    run.line(f"train_tokens:{corpus.train.total} val_tokens:{len(corpus.val_tokens)} epochs:{epochs:.1f}")
    run.line("\n".join([*dict.fromkeys(corpus.notes + notes), f"warming up: {s.warmup_steps} untimed steps"]))
    try:
        trainer.warm_up(run.plan)
        if facts:
            need(folder, "state", sorted(arrays), sorted(trainer.optimizer.state), "of another script")
            trainer.restore(arrays)
            vars(run.counters).update(facts["counters"])
            run.counters.resumes += 1
        train(trainer, corpus, reader, run)
        return finish(trainer, corpus, run)
    except (OSError, RuntimeError) as error:
        how = f"the same command with RUN_ID={folder.name} goes on from the last checkpoint, if any"
        if isinstance(error, RuntimeError) and not machine.signals:  # compilers get them
            error.add_note(how)  # below the traceback of a broken GPU, or fork
            raise
        raise InterruptedError(f"{error}; {how}") from error


def score_only(s: Settings, origins: dict[str, str], machine: Machine, make: Function) -> int:
    """EVAL_ONLY: score an artifact of any shape, write nothing; its window can be set."""
    carried, *_ = decode_artifact(blob := read_file(s.eval_only, "EVAL_ONLY="), s.eval_only)
    own = [k for k in carried if re.match("eval_|val_|dtype", k) and origins[k] != "preset"]
    s = dataclasses.replace(s, **(carried | {name: getattr(s, name) for name in own}))
    machine.choose_dtype(s.dtype)
    corpus, run = load_corpus(s, machine, with_train=False), Run(machine, s)
    run.line("\n".join([f"scoring {s.eval_only} on {s.data_path}", *corpus.notes]))
    run.final(score_artifact(make(s, machine), blob, s.eval_only, corpus, run))
    return 0


def dry_run(s: Settings, origins: dict[str, str], code_bytes: int) -> int:
    """Print all settings, all parameters and the planned size. Needs no data or device."""
    for name, origin in origins.items():
        print(f"{name.upper()}={format_value(getattr(s, name))} ({origin}): {ROWS[name].metadata['doc']}")
    planned = params = 0
    for p in parameter_table(s):
        # zlib comes near the entropy of a Gaussian whose largest of a row is 3.2 deviations.
        bits = math.log2(1 + 1.3 * levels_of(s, p)) or 32
        print(f"{p.name} {p.shape} float32 init {p.init} {p.scale:.6g} {p.group} lr {p.lr:g}")
        params, planned = params + p.size, planned + int(p.size * bits / 8)
    print(f"params: {params}\nplanned_artifact_bytes: {planned} (about, after zlib)")
    print(f"code_bytes: {code_bytes} (in all {planned + code_bytes})\nsteps: {Plan(s).num_steps}")
    return 0


NO_MEMORY = "out of memory|DefaultCPUAllocator|(Unable|Attempting) to allocate"  # torch, MLX
EXIT_CODES = {SettingError: 2, DataError: 3, FloatingPointError: 17, OSError: 16, dist.DistError: 16}


def run_script(open_machine: Function, make: Function, file: str, *arguments: str) -> int:
    """Do what the environment says. Returns the exit code."""
    help_asked = arguments in (("-h",), ("--help",))
    if arguments and not help_asked:
        raise SettingError(f"{' '.join(arguments)}: give settings as in PRESET=minute python train_gpt.py")
    s, origins = load_settings(os.environ, "10min_16mb" if torch.cuda.is_available() else "floppy")
    files = zip(("train_gpt.py", "train_gpt_mlx.py"), dict.fromkeys(map(os.path.realpath, (__file__, file))))
    scripts = {name: Path(path).read_bytes() for name, path in files}
    script = b"".join(scripts.values())
    size = len(script) if s.code_bytes == "raw" else len(zlib.compress(script, 9))
    if s.dry_run or help_asked:
        print(__doc__ if help_asked else "", end="")
        return dry_run(s, origins, size)
    try:
        machine = open_machine(s)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, SettingError) or "MASTER_ADDR" not in os.environ:
            raise
        kind = dist.DistError if isinstance(error, dist.DistError) else SettingError
        found = str(error).splitlines()[0]  # without torch's stack
        raise kind(f"{found}; see RANK, WORLD_SIZE, MASTER_PORT, GLOO_SOCKET_IFNAME") from None
    s = machine.on_rank_0(lambda: s)  # on another node the environment may differ
    for name in ("TERM", "INT", "HUP", "USR1", "USR2", "XCPU"):  # the last three: of clusters
        number = getattr(signal, f"SIG{name}")
        with contextlib.suppress(ValueError):  # a thread gets none
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does
                signal.signal(number, lambda number, frame: machine.signals.append(number))
    if s.eval_only:
        return score_only(s, origins, machine, make)
    about = {"origins": origins, "environment": {"code_bytes": size, "script_sha256": sha256(script)}}
    return run_all(s, about, scripts, machine, make)


def main(open_machine: Function = open_machine, make: Function = Trainer, argv: Any = (__file__,)) -> int:
    """The program, on this framework or the twin's. Returns the exit code."""
    try:
        code = run_script(open_machine, make, *argv)
    except (*EXIT_CODES, MemoryError, RuntimeError) as error:
        text, rank = str(error), os.environ.get("RANK", "0")
        code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 0)
        if isinstance(error, MemoryError) or re.search(NO_MEMORY, text):
            text, code = "out of memory: lower VAL_BATCH_SIZE, TRAIN_BATCH_TOKENS or MODEL_DIM", 2
        if not code:
            raise
        if rank == "0" or not (isinstance(error, SettingError) and dist.is_torchelastic_launched()):
            print(f"{Path(argv[0]).name}: {text}" + f" (rank {rank})" * (rank != "0"), file=sys.stderr)
    if dist.is_initialized():  # what waits for a rank which is gone would not end
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main(argv=sys.argv))
