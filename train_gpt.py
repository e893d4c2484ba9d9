"""Train the best language model that fits a byte budget, and score it in bits per byte.

    python train_gpt.py                                        one process; CUDA, MPS or CPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py      one process for each GPU
    PRESET=smoke ITERATIONS=20 python train_gpt.py             every setting is an environment variable
    DRY_RUN=1 python train_gpt.py                              print what a run would be, and stop

Exit codes: 0 done, 2 bad setting, 3 bad data or tokenizer, 4 artifact over its byte budget,
16 stopped by a signal, 17 numerical failure.

`grep '^# ---' train_gpt.py` prints the contents. The sections down to "artifact" need no framework and
stand word for word in train_gpt_mlx.py too.
"""
from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np
import safetensors.numpy
import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

# ----------------------------------------------------------------------------------------------------
# --- errors: each is one line for the user, and an exit code
# ----------------------------------------------------------------------------------------------------

EXIT_OVER_BUDGET, EXIT_SIGNAL = 4, 16


class SettingError(ValueError):
    """A setting does not parse, is impossible, or looks like a misspelt one."""
    exit_code = 2


class DataError(ValueError):
    """A shard, tokenizer or artifact is damaged, or they do not belong together."""
    exit_code = 3


class NumericalError(ArithmeticError):
    """The loss is no longer a finite number."""
    exit_code = 17


# ----------------------------------------------------------------------------------------------------
# --- settings: one table; the defaults are PRESET=10min_16mb, the other presets say how they differ
# ----------------------------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "10min_16mb": {},
    "10min_floppy": dict(
        data_path="./data/datasets/demo_sp1024", tokenizer_path="./data/tokenizers/demo_1024_bpe.model",
        num_layers=5, model_dim=192, num_heads=3, num_kv_heads=1, train_seq_len=512,
        train_batch_tokens=16384, val_batch_size=131072, iterations=100000, warmdown_iters=0.6,
        warmup_steps=2, lr_warmup_steps=20, matrix_lr=0.03, muon_momentum=0.95,
        muon_momentum_warmup_start=0.85, muon_momentum_warmup_steps=300, budget_bytes=1474560,
        code_bytes="zlib"),
    "smoke": dict(
        data_path="./data/datasets/demo_sp1024", tokenizer_path="./data/tokenizers/demo_1024_bpe.model",
        num_layers=3, model_dim=64, num_heads=2, num_kv_heads=1, train_seq_len=128,
        train_batch_tokens=4096, val_batch_size=65536, val_loss_every=0, train_log_every=10,
        iterations=60, warmdown_iters=0.5, warmup_steps=1, lr_warmup_steps=5, max_wallclock_seconds=60.0,
        muon_momentum=0.95, muon_momentum_warmup_start=0.85, muon_momentum_warmup_steps=30,
        val_tokens_limit=65536, budget_bytes=1474560, code_bytes="zlib", compile=False),
}


def var(default: Any, doc: str, low: float | None = None, high: float | None = None,
        choices: tuple[str, ...] = ()) -> Any:
    """A row of the settings table: default, one line of documentation, and what values it takes."""
    return field(default=default, metadata=dict(doc=doc, low=low, high=high, choices=choices))


@dataclass(frozen=True)
class Settings:
    """Every setting, read once. The environment variable is the field's name in upper case."""
    preset: str = var("10min_16mb", "row of defaults; unset: 10min_16mb on CUDA, else 10min_floppy",
                      choices=tuple(PRESETS))
    dry_run: bool = var(False, "print settings, parameters and planned bytes, then stop")
    # data
    data_path: str = var("./data/datasets/fineweb10B_sp1024", "folder of *_train_*.bin and *_val_*.bin")
    tokenizer_path: str = var("./data/tokenizers/fineweb_1024_bpe.model", "SentencePiece model file")
    data_order: str = var("shuffled", "order of the training windows: shuffled by SEED, or as stored",
                          choices=("shuffled", "sequential"))
    run_id: str = var("", "name of the run's folder under logs/; empty: date, time and process id")
    seed: int = var(1337, "draws the start weights and the data order", low=0)
    # machine
    device: str = var("auto", "where to compute", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = var("auto", "of the matrix products; auto: bfloat16 on CUDA, else the faster, measured",
                     choices=("auto", "bfloat16", "float32"))
    compile: bool = var(True, "use torch.compile where it works")
    # validation
    val_batch_size: int = var(524288, "validation tokens of one forward pass over all slots", low=1)
    val_loss_every: int = var(1000, "steps between validations; the first and last step always are", low=0)
    val_tokens_limit: int = var(0, "score only so many tokens and mark the result partial; 0: all", low=0)
    eval_seq_len: int = var(0, "window of the evaluation in tokens; 0: TRAIN_SEQ_LEN", low=0)
    eval_stride: int = var(0, "tokens by which the window moves; 0: EVAL_SEQ_LEN (no overlap)", low=0)
    eval_only: str = var("", "path of an artifact to score; nothing is trained or written")
    train_log_every: int = var(200, "steps between log lines; the first ten steps are logged too", low=1)
    # length
    iterations: int = var(20000, "optimizer steps at most", low=1)
    max_wallclock_seconds: float = var(600.0, "training seconds at most on rank 0's clock; 0: no cap", low=0)
    warmdown_iters: float = var(3000.0, "end of the run with falling rate: steps of ITERATIONS, or if "
                                "below 1 a fraction; progress is by step or clock, whichever is further",
                                low=0)
    warmup_steps: int = var(20, "untimed steps on dummy tokens before the start; state restored after", low=0)
    lr_warmup_steps: int = var(10, "steps over which the learning rate rises linearly", low=0)
    train_batch_tokens: int = var(393216, "tokens of one optimizer step over all ranks", low=1)
    train_seq_len: int = var(4096, "tokens of one training sequence", low=1)
    batch_slots: int = var(8, "equal parts of a step's batch; ranks take turns, so they must divide it", low=1)
    # shape
    vocab_size: int = var(1024, "pieces of the tokenizer", low=2, high=65536)
    num_layers: int = var(9, "blocks", low=1)
    model_dim: int = var(512, "width of the residual stream", low=1)
    num_heads: int = var(8, "query heads", low=1)
    num_kv_heads: int = var(4, "key and value heads", low=1)
    mlp_mult: int = var(2, "hidden width of the MLP in model widths", low=1)
    tie_embeddings: bool = var(True, "the output matrix is the token embedding")
    rope_base: float = var(10000.0, "longest wavelength of the rotary positions, in radians' inverse", low=1)
    logit_softcap: float = var(30.0, "c in c tanh(z / c)", low=1e-3)
    qk_gain_init: float = var(1.5, "start of the learned gain of each query head")
    # optimizers
    embed_lr: float = var(0.6, "Adam rate of an untied embedding", low=0)
    head_lr: float = var(0.008, "Adam rate of an untied output matrix", low=0)
    tied_embed_lr: float = var(0.03, "Adam rate of a tied embedding", low=0)
    tied_embed_init_std: float = var(0.005, "start of a tied embedding", low=0)
    matrix_lr: float = var(0.02, "Muon rate of the blocks' matrices", low=0)
    scalar_lr: float = var(0.02, "Adam rate of vectors and scalars", low=0)
    muon_momentum: float = var(0.99, "momentum of Muon", low=0, high=1)
    muon_backend_steps: int = var(5, "Newton-Schulz steps", low=1)
    muon_momentum_warmup_start: float = var(0.92, "momentum of Muon at step 0", low=0, high=1)
    muon_momentum_warmup_steps: int = var(1500, "steps over which it rises linearly", low=0)
    beta1: float = var(0.9, "Adam, first moment", low=0, high=1)
    beta2: float = var(0.95, "Adam, second moment", low=0, high=1)
    adam_eps: float = var(1e-8, "Adam, added to the root of the second moment", low=0)
    weight_decay: float = var(0.0, "decoupled decay of Muon's matrices: w -= lr * decay * w", low=0)
    grad_clip_norm: float = var(0.0, "largest norm of the whole gradient; 0: off", low=0)
    ema_decay: float = var(0.0, "score and export a moving average of the weights; 0: off", low=0, high=1)
    # artifact
    clip_percentile: float = var(99.99984, "int8 rows are clipped at this percentile of |w|", low=50, high=100)
    clip_std: float = var(0.0, "if above 0, clip at so many standard deviations of the row instead", low=0)
    budget_bytes: int = var(16000000, "most bytes of artifact and code together", low=1)
    code_bytes: str = var("raw", "how the script counts: its size, or its size at zlib level 9",
                          choices=("raw", "zlib"))

    @property
    def slot_tokens(self) -> int:
        """Tokens of one slot: what one rank computes in one micro-step."""
        return self.train_batch_tokens // self.batch_slots

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def eval_window(self) -> int:
        return self.eval_seq_len or self.train_seq_len

    @property
    def eval_step(self) -> int:
        return self.eval_stride or self.eval_window


def parse_setting(row: dataclasses.Field, text: str) -> Any:
    """The value of one environment variable. Raises SettingError naming what it takes."""
    name, kind, limits = row.name.upper(), row.type, row.metadata
    takes = {"int": "a whole number", "float": "a number", "bool": "0 or 1", "str": "a text"}[kind]
    if limits["choices"]:
        takes = "one of " + ", ".join(limits["choices"])
    low, high = limits["low"], limits["high"]
    takes += f" from {low:g}" if low is not None else ""
    takes += f" to {high:g}" if high is not None else ""
    try:
        value = {"0": False, "1": True}[text] if kind == "bool" else {"int": int, "float": float, "str": str}[kind](text)
    except (KeyError, ValueError):
        raise SettingError(f"{name}={text!r}: takes {takes}") from None
    bad_choice = limits["choices"] and value not in limits["choices"]
    bad_number = kind in ("int", "float") and not (
        math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high))
    if bad_choice or bad_number:
        raise SettingError(f"{name}={text!r}: takes {takes}")
    return value


def refuse_near_misses(env: dict[str, str], names: set[str]) -> None:
    """Stop at a variable that was probably meant as a setting (ITERATION, SEQ_LEN, num_layers)."""
    for name in sorted(set(env) - names):
        upper = name.upper()
        close = [upper] if upper in names else difflib.get_close_matches(upper, names, 1, cutoff=0.85)
        if not close and "_" in upper:
            close = sorted(n for n in names if n.startswith(upper + "_") or n.endswith("_" + upper))
        if close:
            raise SettingError(f"{name}={env[name]!r} is no setting; {close[0]} is: write that, "
                               f"or unset {name}")


def load_settings(env: dict[str, str], default_preset: str) -> tuple[Settings, dict[str, str]]:
    """The settings and the origin of each: 'preset' or 'environment'. Raises SettingError."""
    rows = {row.name.upper(): row for row in dataclasses.fields(Settings)}
    refuse_near_misses(env, set(rows))
    given = {row.name: parse_setting(row, env[name]) for name, row in rows.items() if name in env}
    preset = given.get("preset", default_preset)
    settings = Settings(**{**PRESETS[preset], **given, "preset": preset})
    check_settings(settings)
    return settings, {name: "environment" if name in given else "preset" for name in vars(settings)}


def check_settings(s: Settings) -> None:
    """Refuse values that are possible alone but not together. Raises SettingError."""
    def need(ok: bool, name: str, takes: str) -> None:
        if not ok:
            raise SettingError(f"{name}={getattr(s, name.lower())}: takes {takes}")
    need(s.model_dim % s.num_heads == 0, "NUM_HEADS", f"a divisor of MODEL_DIM={s.model_dim}")
    need(s.head_dim % 2 == 0, "NUM_HEADS", f"heads of even width (MODEL_DIM / NUM_HEADS is {s.head_dim})")
    need(s.num_heads % s.num_kv_heads == 0, "NUM_KV_HEADS", f"a divisor of NUM_HEADS={s.num_heads}")
    unit = s.batch_slots * s.train_seq_len
    need(s.train_batch_tokens % unit == 0, "TRAIN_BATCH_TOKENS",
         f"a multiple of BATCH_SLOTS * TRAIN_SEQ_LEN = {unit}")
    need(s.eval_step <= s.eval_window, "EVAL_STRIDE", f"at most the window, {s.eval_window}")
    need(re.fullmatch(r"([\w-][\w.-]{0,99})?", s.run_id) is not None, "RUN_ID",
         "at most 100 letters, digits, '.', '_', '-', not beginning with '.'")
    for name in ("muon_momentum", "muon_momentum_warmup_start", "beta1", "beta2", "ema_decay"):
        need(getattr(s, name) < 1, name.upper(), "a number from 0 to below 1")
    need(s.val_tokens_limit != 1, "VAL_TOKENS_LIMIT", "0 or at least 2 (the first token is not scored)")


def settings_markdown() -> str:
    """The README's settings table: one row for each variable, one column for each preset."""
    lines = [f"| variable | {' | '.join(PRESETS)} | what it does |", "|---" * (len(PRESETS) + 2) + "|"]
    for row in dataclasses.fields(Settings):
        values = [{"preset": name, **overrides}.get(row.name, row.default) for name, overrides in PRESETS.items()]
        cells = " | ".join(f"`{show(v)}`" if show(v) else "" for v in values)
        lines.append(f"| `{row.name.upper()}` | {cells} | {row.metadata['doc']} |")
    return "\n".join(lines)


def show(value: Any) -> str:
    """A setting's value as its environment variable would be written."""
    return str(int(value)) if isinstance(value, bool) else f"{value:.10g}" if isinstance(value, float) else str(value)


# ----------------------------------------------------------------------------------------------------
# --- parameters: names, shapes, start values and optimizer of everything that is learned
# ----------------------------------------------------------------------------------------------------

class Param(NamedTuple):
    name: str
    shape: tuple[int, ...]
    init: str             # normal, uniform (by scale), or constant (the scale itself)
    scale: float
    group: str            # matrix (Muon); embed, head, vector (Adam)


def parameter_table(s: Settings) -> list[Param]:
    """All parameters in storage order. Matrices are [out, in] and first; equal ones of all layers are
    neighbours, so that the flat storage holds them as one stack [layers, out, in]."""
    dim, kv_dim, hidden = s.model_dim, s.head_dim * s.num_kv_heads, s.mlp_mult * s.model_dim
    blocks = range(s.num_layers)
    bound = dim ** -0.5     # uniform in +-1/sqrt(fan in), the usual start of a linear layer

    def stack(*rows: tuple) -> list[Param]:
        return [Param(f"blocks.{i}.{row[0]}", *row[1:]) for i in blocks for row in rows]

    table = stack(("attn.q", (dim, dim), "uniform", bound, "matrix"),
                  ("attn.k", (kv_dim, dim), "uniform", bound, "matrix"),
                  ("attn.v", (kv_dim, dim), "uniform", bound, "matrix"))
    table += stack(("attn.out", (dim, dim), "constant", 0.0, "matrix"))
    table += stack(("mlp.up", (hidden, dim), "uniform", bound, "matrix"))
    table += stack(("mlp.down", (dim, hidden), "constant", 0.0, "matrix"))
    std = s.tied_embed_init_std if s.tie_embeddings else 1.0
    table.append(Param("tok_emb", (s.vocab_size, dim), "normal", std, "embed"))
    if not s.tie_embeddings:
        table.append(Param("head", (s.vocab_size, dim), "constant", 0.0, "head"))
    table += stack(("attn_scale", (dim,), "constant", 1.0, "vector"))
    table += stack(("mlp_scale", (dim,), "constant", 1.0, "vector"))
    table += stack(("mix_x", (dim,), "constant", 1.0, "vector"))
    table += stack(("mix_x0", (dim,), "constant", 0.0, "vector"))
    table += stack(("q_gain", (s.num_heads,), "constant", s.qk_gain_init, "vector"))
    table += [Param(f"skip_weight.{i}", (dim,), "constant", 1.0, "vector") for i in range(s.num_layers // 2)]
    return table


def draw(param: Param, seed: int) -> np.ndarray:
    """Start value, float32, from the seed and the parameter's name alone: equal in every framework."""
    digest = hashlib.sha256(f"{seed}:{param.name}".encode()).digest()
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    if param.init == "normal":
        return rng.standard_normal(param.shape, dtype=np.float32) * np.float32(param.scale)
    if param.init == "uniform":
        return (2 * rng.random(param.shape, dtype=np.float32) - 1) * np.float32(param.scale)
    return np.full(param.shape, param.scale, np.float32)


def flops_per_token(s: Settings) -> int:
    """Floating-point operations of one training token, forward and backward: 6 for each weight of a
    matrix product and 6 * dim * T / 2 for each of the two causal attention products in each layer."""
    products = sum(math.prod(p.shape) for p in parameter_table(s) if p.group == "matrix")
    return 6 * (products + s.vocab_size * s.model_dim) + 6 * s.num_layers * s.model_dim * s.train_seq_len


def group_rate(s: Settings, group: str) -> float:
    """Learning rate of an optimizer group before the schedule."""
    embed = s.tied_embed_lr if s.tie_embeddings else s.embed_lr
    return {"matrix": s.matrix_lr, "embed": embed, "head": s.head_lr, "vector": s.scalar_lr}[group]


# ----------------------------------------------------------------------------------------------------
# --- schedules: pure functions of the step and of the progress in [0, 1]
# ----------------------------------------------------------------------------------------------------

def progress(s: Settings, step: int, elapsed: float) -> float:
    """How far the run is: by steps or by the clock (elapsed seconds), whichever is further."""
    by_clock = elapsed / s.max_wallclock_seconds if s.max_wallclock_seconds else 0.0
    return min(1.0, max(step / s.iterations, by_clock))


def lr_multiplier(s: Settings, step: int, elapsed: float) -> float:
    """Linear rise over LR_WARMUP_STEPS, constant, then linear fall to 0 over the last part of the run."""
    rise = min(1.0, (step + 1) / s.lr_warmup_steps) if s.lr_warmup_steps else 1.0
    part = s.warmdown_iters if s.warmdown_iters < 1 else s.warmdown_iters / s.iterations
    fall = min(1.0, (1.0 - progress(s, step, elapsed)) / part) if part else 1.0
    return rise * fall


def muon_momentum(s: Settings, step: int) -> float:
    done = min(1.0, step / s.muon_momentum_warmup_steps) if s.muon_momentum_warmup_steps else 1.0
    return (1 - done) * s.muon_momentum_warmup_start + done * s.muon_momentum


def ema_decay(s: Settings, step: int) -> float:
    """EMA_DECAY, smaller in the first steps so that the start weights do not linger in short runs."""
    return min(s.ema_decay, (1 + step) / (10 + step))


# ----------------------------------------------------------------------------------------------------
# --- shards: 256 little-endian int32, then uint16 tokens (format: data/README.md)
# ----------------------------------------------------------------------------------------------------

SHARD_MAGIC, SHARD_VERSION, EXTENSION_MAGIC, HEADER_BYTES = 20240520, 1, 0x31464C47, 1024
SPLITS = ("val", "train")


@dataclass(frozen=True)
class Shard:
    """The header of one shard file. A legacy shard says no more than its token count."""
    path: Path
    header: bytes
    tokens: int
    extended: bool
    vocab_size: int
    text_bytes: int
    max_id: int
    crc32: int
    index: int
    count: int
    split: str
    lossy: bool
    tokenizer_sha256: str
    corpus_sha256: str


def read_shard(path: Path) -> Shard:
    """Read and check one header and the file's exact size. Raises DataError."""
    mend = f"python data/shards.py inspect {path}"
    try:
        with open(path, "rb") as file:
            header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if len(header) < HEADER_BYTES:
        raise DataError(f"{path}: {size} bytes, expected a header of {HEADER_BYTES} ({mend})")
    ints, unsigned = np.frombuffer(header, "<i4"), np.frombuffer(header, "<u4")
    found = (int(ints[0]), int(ints[1]))
    if found != (SHARD_MAGIC, SHARD_VERSION):
        hint = "; its bytes are swapped" if found[0] == int(np.int32(SHARD_MAGIC).byteswap()) else ""
        raise DataError(f"{path}: magic and version {found}, expected {(SHARD_MAGIC, SHARD_VERSION)}{hint} ({mend})")
    tokens, expected = int(ints[2]), HEADER_BYTES + 2 * int(ints[2])
    if tokens < 1 or size != expected:
        raise DataError(f"{path}: {size} bytes, expected {expected} for the {tokens} uint16 tokens that the "
                        f"header names ({mend})")
    extended = int(unsigned[3]) == EXTENSION_MAGIC
    if not extended and unsigned[3]:
        raise DataError(f"{path}: header int [3] is {unsigned[3]:#x}, expected 0 or {EXTENSION_MAGIC:#x} ({mend})")
    if extended and ints[14] not in (0, 1):
        raise DataError(f"{path}: split {ints[14]}, expected 0 (val) or 1 (train) ({mend})")
    return Shard(path, header, tokens, extended, int(ints[5]), int(unsigned[9]) + (int(unsigned[10]) << 32),
                 int(ints[8]), int(unsigned[11]), int(ints[12]), int(ints[13]), SPLITS[int(ints[14])],
                 bool(ints[15] & 1), header[64:96].hex(), header[96:128].hex())


def find_shards(folder: Path, split: str) -> list[Shard]:
    """All shards of a split in order: one whole set, extended or legacy. Raises DataError."""
    if not folder.is_dir():
        raise DataError(f"DATA_PATH={folder} is no folder; python data/prepare.py demo makes the demo corpus, "
                        "python data/download.py fetches FineWeb")
    shards = [read_shard(path) for path in sorted(folder.glob(f"*_{split}_*.bin"))]
    if not shards:
        raise DataError(f"DATA_PATH={folder} holds no *_{split}_*.bin; python data/prepare.py demo makes some")
    names = {re.sub(r"_\d+\.bin$", "", shard.path.name) for shard in shards}
    if len(names) > 1:
        raise DataError(f"{folder} holds two {split} sets, {' and '.join(sorted(names)[:2])}: keep one in a folder")
    indices = [int(match[1]) if (match := re.search(r"_(\d+)\.bin$", s.path.name)) else -1 for s in shards]
    if indices != list(range(len(shards))):
        at = next(i for i, index in enumerate(indices) if i != index)
        raise DataError(f"{shards[at].path}: expected {split} shard number {at} here: one is missing or doubled")
    for at, shard in enumerate(shards):
        check_membership(shard, shards[0], split, at, len(shards))
    return shards


def check_membership(shard: Shard, first: Shard, split: str, index: int, count: int) -> None:
    """Does the shard belong at this place of this set? Raises DataError."""
    if shard.extended != first.extended:
        raise DataError(f"{shard.path}: extended and legacy shards in one set; python data/shards.py upgrade mends it")
    if not shard.extended:
        return
    for what, found, expected in (
            ("split", shard.split, split), ("index", shard.index, index), ("shards in the set", shard.count, count),
            ("corpus", shard.corpus_sha256, first.corpus_sha256), ("lossy", shard.lossy, first.lossy),
            ("tokenizer", shard.tokenizer_sha256, first.tokenizer_sha256)):
        if found != expected:
            raise DataError(f"{shard.path}: its header says {what} {found}, expected {expected}; "
                            f"python data/shards.py verify {shard.path.parent}")


class TokenStream:
    """The tokens of a set of shards, end to end and around again, memory-mapped."""

    def __init__(self, shards: list[Shard], vocab_size: int):
        self.shards, self.vocab_size = shards, vocab_size
        self.starts = np.cumsum([0] + [shard.tokens for shard in shards])
        self.total = int(self.starts[-1])
        self.maps: list[np.ndarray | None] = [None] * len(shards)

    def payload(self, index: int) -> np.ndarray:
        """uint16[tokens] of one shard; its checksum is computed when it is first touched."""
        shard = self.shards[index]
        try:
            if self.maps[index] is None:
                self.maps[index] = np.memmap(shard.path, "<u2", "r", HEADER_BYTES, (shard.tokens,))
                if shard.extended and zlib.crc32(self.maps[index]) != shard.crc32:
                    raise DataError(f"{shard.path}: crc32 of the tokens is {zlib.crc32(self.maps[index]):#010x}, "
                                    f"its header says {shard.crc32:#010x}: the file is damaged, make or fetch it again")
            size = os.stat(shard.path).st_size
        except OSError as error:
            raise DataError(f"{shard.path}: cannot be read: {error.strerror}") from None
        if size != HEADER_BYTES + 2 * shard.tokens:     # reading on would end the process with SIGBUS
            raise DataError(f"{shard.path}: changed to {size} bytes, expected {HEADER_BYTES + 2 * shard.tokens}")
        return self.maps[index]

    def read(self, start: int, length: int) -> np.ndarray:
        """uint16[length] from token `start` on, the first token following the last. Raises DataError."""
        out, filled = np.empty(length, np.uint16), 0
        while filled < length:
            at = (start + filled) % self.total
            index = int(np.searchsorted(self.starts, at, "right")) - 1
            offset = at - int(self.starts[index])
            part = self.payload(index)[offset:offset + length - filled]
            out[filled:filled + len(part)] = part
            filled += len(part)
        if int(out.max()) >= self.vocab_size:
            raise DataError(f"token {int(out.max())} within {length} tokens from number {start % self.total} of "
                            f"{self.shards[0].path.parent}, expected ids below VOCAB_SIZE={self.vocab_size}")
        return out


# ----------------------------------------------------------------------------------------------------
# --- batch order: a pure function of step and slot, so it is the same for every number of ranks
# ----------------------------------------------------------------------------------------------------

def shuffled_windows(seed: int, count: int) -> np.ndarray:
    """A permutation of range(count), int64: by the splitmix64 hash of (seed, number)."""
    mixed = np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95) + np.arange(1, count + 1, dtype=np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def slot_start(step: int, slot: int, slots: int, length: int, total: int, windows: np.ndarray | None) -> int:
    """First token of a slot of `length` inputs; it reads length + 1 tokens, the targets shifted by one.

    Sequential (windows is None): slot after slot through the stream of `total` tokens. Shuffled: the
    stream cut in windows of length + 1 tokens, taken in the order `windows`, again and again.
    """
    number = step * slots + slot
    if windows is None:
        return number * (length + 1) % total
    return int(windows[number % len(windows)]) * (length + 1)


class BatchReader:
    """Reads this rank's part of coming batches ahead of time, in one thread.

    `next()` gives (batch, wait): batch is what `convert` made of int64[micro_steps, slot_tokens + 1],
    wait the seconds spent waiting for it. `crc32s` holds, for each of this rank's slots, the checksum of
    all tokens it has been given so far: equal data, equal checksums, whatever the number of ranks.
    """

    def __init__(self, s: Settings, stream: TokenStream, rank: int, world: int, first_step: int,
                 crc32s: list[int], convert: Callable[[np.ndarray], Any]):
        if stream.total < s.slot_tokens + 1:
            raise DataError(f"DATA_PATH={s.data_path}: {stream.total} training tokens, expected at least the "
                            f"{s.slot_tokens + 1} of one slot; lower TRAIN_BATCH_TOKENS")
        self.s, self.stream, self.convert = s, stream, convert
        self.slots = range(rank, s.batch_slots, world)
        count = stream.total // (s.slot_tokens + 1)
        self.windows = shuffled_windows(s.seed, count) if s.data_order == "shuffled" else None
        self.crc32s = crc32s
        self.ready: queue.Queue = queue.Queue(maxsize=4)
        self.stopped = threading.Event()
        threading.Thread(target=self.run, args=(first_step,), name="batch reader", daemon=True).start()

    def read(self, step: int) -> np.ndarray:
        """uint16[micro_steps, slot_tokens + 1]: this rank's slots of one step."""
        s, length = self.s, self.s.slot_tokens
        starts = [slot_start(step, slot, s.batch_slots, length, self.stream.total, self.windows)
                  for slot in self.slots]
        return np.stack([self.stream.read(start, length + 1) for start in starts])

    def run(self, step: int) -> None:
        crc32s = self.crc32s
        while not self.stopped.is_set():
            try:
                tokens = self.read(step)
                crc32s = [zlib.crc32(slot, crc) for slot, crc in zip(tokens, crc32s)]
                item = self.convert(tokens.astype(np.int64)), crc32s
            except Exception as error:      # handed to the training thread, which raises it
                item = error, crc32s
            self.ready.put(item)
            step += 1

    def next(self) -> tuple[Any, float]:
        began = time.perf_counter()
        batch, crc32s = self.ready.get()
        if isinstance(batch, Exception):
            raise batch
        self.crc32s = crc32s
        return batch, time.perf_counter() - began

    def close(self) -> None:
        self.stopped.set()
        while not self.ready.empty():       # wake the thread if it waits for room
            self.ready.get()


# ----------------------------------------------------------------------------------------------------
# --- tokens and bytes: what each token of a text is worth
# ----------------------------------------------------------------------------------------------------

def load_tokenizer(s: Settings) -> tuple[sentencepiece.SentencePieceProcessor, str]:
    """The tokenizer and the sha256 of its file. Raises DataError."""
    try:
        blob = Path(s.tokenizer_path).read_bytes()
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=blob)
    except OSError as error:
        raise DataError(f"TOKENIZER_PATH={s.tokenizer_path}: {error.strerror}; python data/prepare.py demo "
                        "makes the demo tokenizer, python data/download.py fetches FineWeb's") from None
    except RuntimeError:
        raise DataError(f"TOKENIZER_PATH={s.tokenizer_path} is no SentencePiece model") from None
    if tokenizer.vocab_size() != s.vocab_size:
        raise DataError(f"TOKENIZER_PATH={s.tokenizer_path} has {tokenizer.vocab_size()} pieces, "
                        f"expected VOCAB_SIZE={s.vocab_size}")
    return tokenizer, hashlib.sha256(blob).hexdigest()


class ByteTable(NamedTuple):
    """UTF-8 bytes that each token adds to the decoded text, int32[vocab]."""
    inner: np.ndarray       # after text
    first: np.ndarray       # after a control token, where a dummy prefix is dropped
    control: np.ndarray     # bool: begin, end and padding marks


def byte_table(tokenizer: sentencepiece.SentencePieceProcessor) -> ByteTable:
    """What decoding makes of each token alone and after another one: space marks, dummy prefix and
    user-defined pieces are then counted as the tokenizer itself sees them. A byte piece is one byte
    (alone it need not be valid UTF-8), control and unknown are nothing."""
    ids = range(tokenizer.vocab_size())
    control = np.array([tokenizer.is_control(i) for i in ids])
    nothing = control | np.array([tokenizer.is_unknown(i) for i in ids])
    single = np.array([tokenizer.is_byte(i) for i in ids])

    def sizes(prefix: list[int]) -> np.ndarray:
        return np.array([len(text.encode()) for text in tokenizer.decode([prefix + [i] for i in ids])], np.int32)
    first = sizes([])
    usable = np.flatnonzero(~nothing & (first > 0))
    if not len(usable):
        raise DataError("the tokenizer has no piece that decodes to text")
    anchor = int(usable[0])
    inner = sizes([anchor]) - first[anchor]
    first, inner = (np.where(nothing, 0, np.where(single, 1, size)) for size in (first, inner))
    return ByteTable(inner.astype(np.int32), first.astype(np.int32), control)


def token_bytes(table: ByteTable, tokens: np.ndarray) -> np.ndarray:
    """Bytes of each token of a stream, int32[n]; documents begin after a control token."""
    after_control = np.concatenate([[True], table.control[tokens[:-1]]])
    return np.where(after_control, table.first[tokens], table.inner[tokens])


@dataclass(frozen=True)
class Corpus:
    """All data of a run, checked: training stream, validation tokens and the bytes each is worth."""
    train: TokenStream | None
    val_tokens: np.ndarray          # uint16[n]
    val_bytes: np.ndarray           # int32[n]
    tokenizer: sentencepiece.SentencePieceProcessor
    tokenizer_sha256: str
    train_sha256: str               # of the headers in order; each holds the checksum of its tokens
    val_sha256: str                 # of the validation tokens
    notes: list[str]


def load_corpus(s: Settings, with_train: bool = True) -> Corpus:
    """Open and check tokenizer and shards. Raises DataError."""
    tokenizer, tokenizer_sha256 = load_tokenizer(s)
    val = find_shards(Path(s.data_path), "val")
    train = find_shards(Path(s.data_path), "train") if with_train else []
    if train and train[0].extended != val[0].extended:
        raise DataError(f"{s.data_path}: extended and legacy shards together; python data/shards.py upgrade mends it")
    for shard in val + train:
        for what, found, expected in (("tokenizer", shard.tokenizer_sha256, tokenizer_sha256),
                                      ("vocabulary", shard.vocab_size, s.vocab_size),
                                      ("corpus", shard.corpus_sha256, val[0].corpus_sha256)):
            if shard.extended and found != expected:
                raise DataError(f"{shard.path}: made with {what} {found}, expected {expected} "
                                f"(TOKENIZER_PATH={s.tokenizer_path}, DATA_PATH={s.data_path})")
        if shard.extended and shard.max_id >= s.vocab_size:
            raise DataError(f"{shard.path}: highest token id {shard.max_id}, expected below VOCAB_SIZE={s.vocab_size}")
    stream = TokenStream(val, s.vocab_size)
    tokens = stream.read(0, stream.total)
    worth, notes = count_bytes(val, tokens, tokenizer)
    header_hash = hashlib.sha256(b"".join(shard.header for shard in train)).hexdigest()
    return Corpus(TokenStream(train, s.vocab_size) if train else None, tokens, worth, tokenizer, tokenizer_sha256,
                  header_hash, hashlib.sha256(tokens.astype("<u2")).hexdigest(), notes)


def count_bytes(val: list[Shard], tokens: np.ndarray, tokenizer: Any) -> tuple[np.ndarray, list[str]]:
    """Bytes of each validation token, held against the headers' byte count. Raises DataError."""
    worth, place = token_bytes(byte_table(tokenizer), tokens), val[0].path.parent
    total, stated = int(worth.sum(dtype=np.int64)), sum(shard.text_bytes for shard in val)
    if val[0].extended and not val[0].lossy:
        if total != stated:
            raise DataError(f"{place}: the validation tokens are worth {total} bytes, the headers say {stated}: the "
                            f"tokenizer does not give this text back; python data/shards.py verify {place}")
        return worth, []
    if val[0].extended:     # scored by the true bytes of the text, spread over the tokens
        scaled = np.diff(np.concatenate([[0], np.cumsum(worth, dtype=np.int64)]) * stated // max(total, 1))
        return scaled.astype(np.int32), [f"lossy tokenizer: {total} bytes decoded of {stated} in the validation text"]
    return worth, [f"legacy shards: {total} validation bytes counted by decoding; no header vouches for them"]


# ----------------------------------------------------------------------------------------------------
# --- score: windows over the validation tokens, every token but the first scored exactly once
# ----------------------------------------------------------------------------------------------------

class Score(NamedTuple):
    val_loss: float         # nats per token
    val_bpb: float          # bits per byte
    tokens: int             # scored
    bytes: int              # of the scored tokens
    partial: bool           # not the whole validation set

    def line(self) -> str:
        return f"val_loss:{self.val_loss:.4f} val_bpb:{self.val_bpb:.4f}" + (" partial" if self.partial else "")


def eval_windows(total: int, window: int, stride: int) -> np.ndarray:
    """int64[n, 3]: (start, first scored, end). A window reads tokens start .. end and scores the targets
    first .. end. It moves by `stride`; only the first scores all it sees, each later one what is new, so
    a target has at least window - stride tokens before it where the text has them."""
    count = 1 + max(0, -(-(total - 1 - window) // stride))
    starts = np.arange(count, dtype=np.int64) * stride
    ends = np.minimum(starts + window, total - 1)
    firsts = np.concatenate([[1], ends[:-1] + 1])
    return np.stack([starts, firsts, ends], axis=1)


def evaluate(s: Settings, nll: Callable[[np.ndarray], np.ndarray], corpus: Corpus, rank: int, world: int,
             sum_over_ranks: Callable[[list[float]], list[float]]) -> Score:
    """Score the validation tokens. `nll` maps int64[B, T+1] to float32[B, T]: nats of ids[:, 1:].

    All batches have one shape: past its end a row repeats its last token, which is not scored.
    """
    tokens, worth = corpus.val_tokens, corpus.val_bytes
    total = min(len(tokens), s.val_tokens_limit or len(tokens))
    if total < 2:
        raise DataError(f"DATA_PATH={s.data_path}: {total} validation tokens, expected at least 2")
    window = min(s.eval_window, total - 1)
    windows = eval_windows(total, window, min(s.eval_step, window))
    rows = max(1, min(s.val_batch_size // s.batch_slots // window, -(-len(windows) // world)))
    nats = scored = 0.0
    for first_row in range(rank * rows, len(windows), world * rows):
        start, first, end = windows[first_row:first_row + rows].T[:, :, None]
        place = start + np.arange(window + 1)
        ids = tokens[np.minimum(place, end)].astype(np.int64)
        if len(ids) < rows:
            ids = np.pad(ids, ((0, rows - len(ids)), (0, 0)))
        is_scored = ((place >= first) & (place <= end))[:, 1:]
        nats += float(nll(ids)[:len(is_scored)][is_scored].sum(dtype=np.float64))
        scored += int(is_scored.sum())
    nats, scored = sum_over_ranks([nats, scored])
    assert scored == total - 1, "every token but the first is scored once"
    scored_bytes = int(worth[1:total].sum(dtype=np.int64))
    return Score(nats / scored, nats / math.log(2) / max(scored_bytes, 1), int(scored), scored_bytes,
                 total < len(tokens))


# ----------------------------------------------------------------------------------------------------
# --- artifact: zlib level 9 over a safetensors file; metadata names the scheme of each tensor
# ----------------------------------------------------------------------------------------------------

ARTIFACT_FORMAT = "bytegolf-1"
INT8_ABOVE = 65536      # elements: smaller tensors are not worth a scale for each row
SHAPE_SETTINGS = ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp_mult",
                  "tie_embeddings", "rope_base", "logit_softcap", "train_seq_len", "eval_seq_len", "eval_stride")


def quantize_rows(matrix: np.ndarray, percentile: float, std: float) -> tuple[np.ndarray, np.ndarray]:
    """int8[rows, cols] and a scale for each row such that matrix is about scale * int8.

    Rows are clipped at a percentile of |w| or, if std > 0, at std times the row's standard deviation.
    Scales are float16 where all of them are normal or zero there, else float32; no floor is put under
    them, so a row of small weights keeps all 255 levels.
    """
    size = np.abs(matrix)
    limit = std * matrix.std(axis=1) if std else np.quantile(size, percentile / 100, axis=1)
    scale = (limit / 127).astype(np.float32)
    normal = scale[scale > 0]
    tiny, huge = np.finfo(np.float16).tiny, np.finfo(np.float16).max
    if not len(normal) or (normal.min() >= tiny and normal.max() <= huge):
        scale = scale.astype(np.float16)
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)[:, None]
    return np.clip(np.rint(matrix / divisor), -127, 127).astype(np.int8), scale


def encode_artifact(s: Settings, weights: dict[str, np.ndarray]) -> bytes:
    """Weights float32 by name -> the artifact's bytes, a function of the values alone.

    Matrices above INT8_ABOVE elements: int8 by rows. Other tensors: float16; vectors that the optimizer
    calls so, and values float16 cannot hold: float32. Raises NumericalError for what is not finite.
    """
    groups = {param.name: param.group for param in parameter_table(s)}
    tensors, schemes = {}, {}
    for name, value in weights.items():
        if not np.isfinite(value).all():
            raise NumericalError(f"{name} holds values that are not finite: nothing was exported")
        if value.ndim == 2 and value.size > INT8_ABOVE:
            schemes[name] = "int8 rows"
            tensors[name], tensors[name + ".scale"] = quantize_rows(value, s.clip_percentile, s.clip_std)
        elif groups.get(name) == "vector" or np.abs(value).max(initial=0) > np.finfo(np.float16).max:
            schemes[name], tensors[name] = "float32", value.astype(np.float32)
        else:
            schemes[name], tensors[name] = "float16", value.astype(np.float16)
    shape = {name: getattr(s, name) for name in SHAPE_SETTINGS}
    # one metadata key only: safetensors writes several in no fixed order
    about = json.dumps({"format": ARTIFACT_FORMAT, "settings": shape, "schemes": schemes}, sort_keys=True)
    return zlib.compress(safetensors.numpy.save(tensors, {"bytegolf": about}), 9)


def decode_artifact(blob: bytes, name: str = "artifact") -> tuple[Settings, dict[str, np.ndarray]]:
    """The artifact's shape settings and float32 weights by name. Raises DataError if it is damaged."""
    try:
        inflater = zlib.decompressobj()
        raw = inflater.decompress(blob)
        if not inflater.eof or inflater.unused_data:
            raise ValueError("the zlib stream is cut short" if not inflater.eof else "bytes follow the zlib stream")
        about = json.loads(json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["bytegolf"])
        if about["format"] != ARTIFACT_FORMAT:
            raise ValueError(f"format {about['format']!r}, expected {ARTIFACT_FORMAT!r}")
        rows = {row.name: row for row in dataclasses.fields(Settings) if row.name in SHAPE_SETTINGS}
        s = Settings(**{key: parse_setting(row, show(about["settings"][key])) for key, row in rows.items()})
        stored, weights = safetensors.numpy.load(raw), {}
        for param in parameter_table(s):
            weights[param.name] = dequantize(stored, param, about["schemes"][param.name])
        if stored:
            raise ValueError(f"holds {sorted(stored)[0]!r}, which the model has no place for")
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error, safetensors.SafetensorError) as error:
        raise DataError(f"{name}: not a whole artifact: {type(error).__name__}: {error}") from None
    return s, weights


def dequantize(stored: dict[str, np.ndarray], param: Param, scheme: str) -> np.ndarray:
    """Take one tensor out of `stored` as float32. Raises ValueError or KeyError if it does not fit."""
    value = stored.pop(param.name)
    dtype = {"int8 rows": np.int8, "float16": np.float16, "float32": np.float32}[scheme]
    if value.shape != param.shape or value.dtype != dtype:
        raise ValueError(f"{param.name} is {value.dtype}{value.shape}, expected {np.dtype(dtype)}{param.shape}")
    value = value.astype(np.float32)
    if scheme == "int8 rows":
        scale = stored.pop(param.name + ".scale")
        if scale.shape != param.shape[:1] or scale.dtype not in (np.float16, np.float32):
            raise ValueError(f"{param.name}.scale is {scale.dtype}{scale.shape}, expected {param.shape[:1]}")
        value *= scale.astype(np.float32)[:, None]
    if not np.isfinite(value).all():
        raise ValueError(f"{param.name} holds values that are not finite")
    return value


def count_code(s: Settings, script: bytes) -> int:
    return len(script) if s.code_bytes == "raw" else len(zlib.compress(script, 9))


def planned_bytes(s: Settings) -> int:
    """Bytes of the artifact before zlib, which saves little on trained weights."""
    total = 0
    for param in parameter_table(s):
        size = math.prod(param.shape)
        in_int8 = len(param.shape) == 2 and size > INT8_ABOVE
        total += size + 2 * param.shape[0] if in_int8 else size * (4 if param.group == "vector" else 2)
    return total


def write_whole(path: Path, blob: bytes) -> None:
    """Write beside and rename, so that a file of this name is always whole."""
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


# ----------------------------------------------------------------------------------------------------
# --- run directory: train.log for people, metrics.jsonl for programs
# ----------------------------------------------------------------------------------------------------

class RunLog:
    """Rank 0 prints and writes, the others are silent. Without a folder it only prints."""

    def __init__(self, folder: Path | None, speaks: bool):
        self.speaks, self.bar, self.files = speaks, None, []
        if folder and speaks:
            self.files = [open(folder / name, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
                          for name in ("train.log", "metrics.jsonl")]

    def line(self, text: str) -> None:
        """A line for people: to the terminal and train.log."""
        if self.speaks:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
            if self.files:
                self.files[0].write(text + "\n")

    def event(self, event: str, **values: Any) -> None:
        """An object for programs, floats exact, to metrics.jsonl."""
        if self.files:
            self.files[1].write(json.dumps({"event": event, **values}) + "\n")

    def show_bar(self, done: int, total: int, text: str) -> None:
        """A progress bar on a terminal, nothing elsewhere."""
        if self.speaks and sys.stdout.isatty():
            self.bar = self.bar or tqdm(total=total, unit="step", leave=False)
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(done - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        for file in self.files:
            file.close()


def make_run_folder(s: Settings) -> Path:
    """logs/<RUN_ID>/, new. Raises SettingError if it is there: a run is never overwritten."""
    run_id = s.run_id or time.strftime("%Y%m%d-%H%M%S") + f"-{s.preset}-{os.getpid()}"
    folder = Path("logs") / run_id
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SettingError(f"RUN_ID={run_id}: {folder} exists and is never overwritten: choose another name") from None
    except OSError as error:
        raise SettingError(f"RUN_ID={run_id}: {folder} cannot be made: {error.strerror}") from None
    return folder


def git_state() -> str:
    """Commit of the script's repository, with '+dirty' where files differ from it; 'none' outside one."""
    def git(*words: str) -> str:
        return subprocess.run(("git", "-C", str(Path(__file__).parent), *words), text=True, check=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"


def dry_run(s: Settings, origins: dict[str, str], script: bytes) -> Iterator[str]:
    """The lines of DRY_RUN=1: all settings, all parameters, the planned size. Needs no data or device."""
    for name, origin in origins.items():
        yield f"{name.upper()}={show(getattr(s, name))} ({origin})"
    table = parameter_table(s)
    for p in table:
        init = f"{p.scale:g}" if p.init == "constant" else f"{p.init} {p.scale:.6g}"
        optimizer = "muon" if p.group == "matrix" else "adam"
        yield f"{p.name} {'x'.join(map(str, p.shape))} float32 init {init} {optimizer} {p.group}"
    yield f"params: {sum(math.prod(p.shape) for p in table)}"
    yield f"flops_per_token: {flops_per_token(s)}"
    artifact, code = planned_bytes(s), count_code(s, script)
    yield f"planned_artifact_bytes: {artifact} (before zlib)"
    yield f"code_bytes: {code}"
    yield f"budget: {'ok' if artifact + code <= s.budget_bytes else 'over before zlib'}"


# ----------------------------------------------------------------------------------------------------
# --- machine: device, ranks, number format, compiler
# ----------------------------------------------------------------------------------------------------

@dataclass
class Machine:
    """Where this process computes. rank and world are its place among the processes of the run."""
    device: torch.device
    reason: str
    rank: int = 0
    world: int = 1
    dtype: torch.dtype = torch.float32
    peak_flops: float = math.inf        # measured, of one process, in dtype
    compile: bool = False

    def all_mean(self, flat: Tensor) -> None:
        """Average a tensor over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(flat)
            flat /= self.world

    def sum_floats(self, values: list[float]) -> list[float]:
        """Sum float64 numbers over all ranks."""
        if self.world > 1:
            total = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(total)
            values = total.tolist()
        return values

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's value, on every rank: one clock and one decision for all."""
        if self.world > 1:
            box = [value]
            dist.broadcast_object_list(box)
            value = box[0]
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def peak_memory_mib(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        import resource     # not on every platform
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def choose_device(s: Settings) -> tuple[torch.device, str]:
    """The device and why. Raises SettingError if DEVICE names one that is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(name for name in there if there[name]) if s.device == "auto" else s.device
    if not there[kind]:
        raise SettingError(f"DEVICE={kind}: torch {torch.__version__} finds none here; "
                           f"takes auto, {', '.join(name for name in there if there[name])}")
    reason = "DEVICE asks for it" if s.device != "auto" else \
        {"cuda": "a GPU is here", "mps": "no CUDA, an Apple GPU is here", "cpu": "no CUDA or Apple GPU is here"}[kind]
    if kind != "cuda":
        return torch.device(kind), reason
    local = int(os.environ.get("LOCAL_RANK", 0))
    if local >= torch.cuda.device_count():
        raise SettingError(f"LOCAL_RANK={local}: {torch.cuda.device_count()} GPUs are here: "
                           f"lower --nproc_per_node to that")
    return torch.device("cuda", local), f"{reason}: {torch.cuda.get_device_name(local)}"


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a square matrix product: the median of five."""
    side, seconds = 8192 if device.type == "cuda" else 1024, []
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    machine = Machine(device, "")
    for _ in range(7):
        machine.synchronize()
        began = time.perf_counter()
        a @ b
        machine.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * side ** 3 / sorted(seconds[2:])[2]


def choose_dtype(s: Settings, machine: Machine) -> str:
    """Set dtype and peak_flops; the returned line says why. Rank 0 decides for all."""
    tried = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if s.dtype != "auto" or machine.device.type == "cuda":
        name = "bfloat16" if s.dtype == "auto" else s.dtype
        flops, reason = {name: measure_flops(machine.device, tried[name])}, "DTYPE" if s.dtype != "auto" else "CUDA"
    else:
        flops = {name: measure_flops(machine.device, dtype) for name, dtype in tried.items()}
        name, reason = max(flops, key=flops.get), "the faster"
    name, flops = machine.from_rank_0((name, flops))
    machine.dtype, machine.peak_flops = tried[name], flops[name]
    return f"dtype:{name} ({reason}) " + " ".join(f"{n}:{f / 1e9:.0f}GFLOP/s" for n, f in flops.items())


def choose_compile(s: Settings, machine: Machine) -> str:
    """Set machine.compile after trying it on one small function; the returned line says why."""
    reason = "COMPILE=0"
    if s.compile and machine.device.type == "mps":
        reason = "not tried on MPS"
    elif s.compile:
        try:
            torch.compile(lambda x: (x * 2).tanh())(torch.ones(64, device=machine.device))
            reason = "torch.compile works here"
        except Exception as error:      # no compiler, a broken one, no cache folder: whatever it is, eager runs
            reason = f"torch.compile failed, so eager and slower: {type(error).__name__}: {str(error).strip()[:200]}"
            reason = reason.splitlines()[0]
    machine.compile = all(machine.gather(reason == "torch.compile works here"))
    return f"compile:{int(machine.compile)} ({reason})"


def open_machine(s: Settings) -> Machine:
    """Device and process group. Raises SettingError if the ranks cannot share the batch evenly."""
    device, reason = choose_device(s)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if s.batch_slots % world:
        raise SettingError(f"WORLD_SIZE={world}: takes a divisor of BATCH_SLOTS={s.batch_slots} "
                           f"(torchrun --nproc_per_node, --nnodes)")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        # small decisions travel as CPU tensors over gloo: no GPU waits for them
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Machine(device, reason, rank, world)


# ----------------------------------------------------------------------------------------------------
# --- model: B batch, T tokens, D width, H heads, G key-value heads, K head width, L layers, V vocabulary
# ----------------------------------------------------------------------------------------------------

NORM_EPS = 1e-6     # written down: the default of rms_norm differs between torch versions


class Weights:
    """All parameters in one flat float32 tensor, and the views that the forward pass and Muon use.

    `leaves` are what the forward pass reads and autograd differentiates: the block matrices of all layers
    as stacks [L, out, in] in the compute dtype, everything else in float32 views of `flat`. q, k and v of
    a layer are neighbours in storage, so their stack is one matrix and one product.
    """

    def __init__(self, s: Settings, device: torch.device, dtype: torch.dtype):
        self.table = parameter_table(s)
        sizes = [math.prod(p.shape) for p in self.table]
        self.starts = dict(zip((p.name for p in self.table), np.cumsum([0] + sizes).tolist()))
        self.flat = torch.zeros(sum(sizes), device=device)
        self.num_matrix = sum(n for n, p in zip(sizes, self.table) if p.group == "matrix")
        self.matrices = torch.zeros(self.num_matrix, device=device, dtype=dtype)    # the copy products read
        self.shapes = self.leaf_shapes(s)
        self.leaves = {name: (self.matrices if start < self.num_matrix else self.flat)
                       [start:start + math.prod(shape)].view(shape).detach().requires_grad_()
                       for name, (start, shape) in self.shapes.items()}

    def leaf_shapes(self, s: Settings) -> dict[str, tuple[int, tuple[int, ...]]]:
        """(offset in `flat`, shape) of each leaf, in storage order."""
        dim, layers, vocab = s.model_dim, s.num_layers, s.vocab_size
        kv_dim, hidden = s.head_dim * s.num_kv_heads, s.mlp_mult * dim
        shapes = {"attn.q": ("qkv", (layers, dim + 2 * kv_dim, dim)), "attn.out": ("out", (layers, dim, dim)),
                  "mlp.up": ("up", (layers, hidden, dim)), "mlp.down": ("down", (layers, dim, hidden)),
                  "attn_scale": ("attn_scale", (layers, dim)), "mlp_scale": ("mlp_scale", (layers, dim)),
                  "mix_x": ("mix_x", (layers, dim)), "mix_x0": ("mix_x0", (layers, dim)),
                  "q_gain": ("q_gain", (layers, s.num_heads))}
        leaves = {leaf: (self.starts[f"blocks.0.{name}"], shape) for name, (leaf, shape) in shapes.items()}
        leaves |= {name: (self.starts[name], (vocab, dim)) for name in ("tok_emb", "head") if name in self.starts}
        if layers > 1:
            leaves["skip_weight"] = self.starts["skip_weight.0"], (layers // 2, dim)
        return dict(sorted(leaves.items(), key=lambda item: item[1][0]))

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the compute copy of the matrices up to date with `flat`."""
        self.matrices.copy_(self.flat[:self.num_matrix])

    @torch.no_grad()
    def load(self, values: dict[str, np.ndarray]) -> None:
        whole = np.concatenate([values[p.name].ravel() for p in self.table])
        self.flat.copy_(torch.from_numpy(whole))
        self.refresh()

    def named(self, flat: Tensor | None = None) -> dict[str, np.ndarray]:
        """float32 arrays by parameter name, copied to the host: of `flat` or a tensor of its layout."""
        host = (self.flat if flat is None else flat).detach().cpu().numpy().copy()
        return {p.name: host[self.starts[p.name]:][:math.prod(p.shape)].reshape(p.shape) for p in self.table}


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, no weights (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def rope_tables(s: Settings, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32[T, K/2], of the rotary position embedding (Su et al. 2021)."""
    inverse = s.rope_base ** (-torch.arange(0, s.head_dim, 2, dtype=torch.float64) / s.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (first half, second half) of each head by their position's angles."""
    x1, x2 = x_BTHK.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)


def block_causal_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, block: int = 128) -> Tensor:
    """Causal softmax attention in plain tensor operations: query blocks against the keys up to their end.

    What lies above the diagonal blocks is never computed, and the query heads of a group stand as rows
    of one product, so keys and values are not repeated. On CPUs three times faster than
    scaled_dot_product_attention when compiled. Softmax in float32. Returns [B, H, T, K].
    """
    B, H, T, K = q_BHTK.shape
    G = k_BGTK.size(1)
    q = q_BHTK.view(B * G, H // G, T, K)
    k, v = k_BGTK.reshape(B * G, T, K), v_BGTK.reshape(B * G, T, K)
    out = []
    for start in range(0, T, block):
        end = min(start + block, T)
        rows = q[:, :, start:end].reshape(B * G, -1, K)
        scores = torch.bmm(rows, k[:, :end].transpose(1, 2)).view(B * G, H // G, end - start, end)
        above = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
        scores = (scores.float() * K ** -0.5).masked_fill(above, -math.inf)
        weights = scores.softmax(-1).to(v.dtype).view(B * G, -1, end)
        out.append(torch.bmm(weights, v[:, :end]).view(B * G, H // G, end - start, K))
    return torch.cat(out, dim=2).view(B, H, T, K)


def attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """Causal grouped-query attention by the fastest exact path of the device."""
    if q_BHTK.device.type == "cpu":
        return block_causal_attention(q_BHTK, k_BGTK, v_BGTK)
    return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=True)


class GPT:
    """The forward pass, functions of the leaves of `Weights`: a U-Net of pre-norm transformer blocks."""

    def __init__(self, s: Settings, machine: Machine):
        self.s, self.machine = s, machine
        self.weights = Weights(s, machine.device, machine.dtype)
        self.rope: dict[int, tuple[Tensor, Tensor]] = {}

    def positions(self, length: int) -> tuple[Tensor, Tensor]:
        if length not in self.rope:
            self.rope[length] = rope_tables(self.s, length, self.machine.device)
        return self.rope[length]

    def hidden(self, w: dict[str, Tensor], ids_BT: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The last layer's output after the final norm, [B, T, D] in the compute dtype."""
        layers, half = self.s.num_layers, self.s.num_layers // 2
        per_layer = {name: leaf.unbind(0) for name, leaf in w.items() if name not in ("tok_emb", "head")}
        x = x0 = rms_norm(F.embedding(ids_BT, w["tok_emb"])).to(self.machine.dtype)
        skips: list[Tensor] = []
        for i in range(layers):
            if i >= half and skips:     # the second half of the layers takes up what the first half left
                x = x + (per_layer["skip_weight"][i - half] * skips.pop()).to(x.dtype)
            x = self.block(x, x0, cos, sin, **{name: per_layer[name][i] for name in self.block_leaves})
            if i < half:
                skips.append(x)
        return rms_norm(x)

    block_leaves = ("qkv", "out", "up", "down", "attn_scale", "mlp_scale", "mix_x", "mix_x0", "q_gain")

    def block(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor, *, qkv: Tensor, out: Tensor, up: Tensor,
              down: Tensor, attn_scale: Tensor, mlp_scale: Tensor, mix_x: Tensor, mix_x0: Tensor,
              q_gain: Tensor) -> Tensor:
        """One transformer block, [B, T, D] to [B, T, D]; vectors are float32 and act in float32."""
        dtype, (B, T, D), K = x.dtype, x.shape, self.s.head_dim
        x = (mix_x * x + mix_x0 * x0).to(dtype)
        heads = F.linear(rms_norm(x), qkv).view(B, T, -1, K)
        q, k, v = heads.split((self.s.num_heads, self.s.num_kv_heads, self.s.num_kv_heads), dim=2)
        q = (rotate(rms_norm(q), cos, sin) * q_gain[:, None]).to(dtype)
        k = rotate(rms_norm(k), cos, sin).to(dtype)
        y = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).reshape(B, T, D)
        x = (x + attn_scale * F.linear(y, out)).to(dtype)
        y = F.linear(F.relu(F.linear(rms_norm(x), up)).square(), down)      # relu squared: So et al. 2021
        return (x + mlp_scale * y).to(dtype)

    def logits(self, w: dict[str, Tensor], hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """float32[..., V], softcapped; the product itself is in `dtype`."""
        matrix = w["head"] if "head" in w else w["tok_emb"]
        z = F.linear(hidden.to(dtype), matrix.to(dtype)).float()
        return self.s.logit_softcap * torch.tanh(z / self.s.logit_softcap)

    def loss(self, w: dict[str, Tensor], ids: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mean cross-entropy in nats of ids and targets int64[B, T], for training."""
        hidden = self.hidden(w, ids, cos, sin)
        return F.cross_entropy(self.logits(w, hidden, self.machine.dtype).flatten(0, 1), targets.flatten())

    def nll(self, w: dict[str, Tensor], ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """float32[B, T]: nats of ids[:, 1:], for scoring: the last layer is in float32."""
        logits = self.logits(w, self.hidden(w, ids[:, :-1], cos, sin), torch.float32)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.size(0), -1)


class Predictor:
    """A trained model behind numpy arrays: what evaluation, sampling and the referee call.

    `max_len` tokens of context were seen in training; a longer row is scored, but beyond what was learned.
    """

    def __init__(self, model: GPT):
        self.model, self.vocab_size = model, model.s.vocab_size
        self.max_len = max(model.s.train_seq_len, model.s.eval_window)
        self.compiled = torch.compile(model.nll, dynamic=False) if model.machine.compile else model.nll

    @torch.no_grad()
    def nll(self, ids: np.ndarray) -> np.ndarray:
        """int64[B, T+1] -> float32[B, T]: nats of ids[:, 1:], each given what stands left of it."""
        device_ids = torch.from_numpy(ids).to(self.model.machine.device)
        rope = self.model.positions(ids.shape[1] - 1)
        return self.compiled(self.model.weights.leaves, device_ids, *rope).cpu().numpy()

    @torch.no_grad()
    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """int64[B, T] -> float32[B, T, V]: nats of every next token at each position."""
        model, rope = self.model, self.model.positions(ids.shape[1])
        leaves = model.weights.leaves
        hidden = model.hidden(leaves, torch.from_numpy(ids).to(model.machine.device), *rope)
        return model.logits(leaves, hidden, torch.float32).log_softmax(-1).cpu().numpy()


def sample(predictor: Predictor, tokenizer: Any, seed: int, characters: int = 200) -> str:
    """A text of about `characters` that the model writes from nothing, at temperature 0.8."""
    rng, ids = np.random.Generator(np.random.PCG64(seed)), [max(tokenizer.bos_id(), 0)]
    while len(tokenizer.decode(ids[1:])) < characters and len(ids) < 2 * characters:
        z = predictor.logprobs(np.array([ids[-min(predictor.max_len, 128):]]))[0, -1].astype(np.float64) / 0.8
        p = np.exp(z - z.max())
        ids.append(int(rng.choice(len(p), p=p / p.sum())))
    return tokenizer.decode(ids[1:])[:characters]


# ----------------------------------------------------------------------------------------------------
# --- optimizer: Muon for the block matrices, Adam for everything else
# ----------------------------------------------------------------------------------------------------

def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Move the singular values of each matrix of a stack [n, rows <= cols] to about 1 (0.7 to 1.2).

    The quintic iteration of Muon (Jordan et al. 2024) on the Frobenius-normalised matrix.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Optimizer:
    """One step over the flat parameters. State: momentum of the matrices, both moments of the rest, EMA."""

    def __init__(self, s: Settings, weights: Weights, machine: Machine):
        self.s, self.weights, self.machine = s, weights, machine
        flat, self.n = weights.flat, weights.num_matrix
        self.momentum = torch.zeros_like(flat[:self.n])
        self.moment1, self.moment2 = torch.zeros_like(flat[self.n:]), torch.zeros_like(flat[self.n:])
        self.ema = flat.clone() if s.ema_decay else None
        ends: dict[str, int] = {}
        for p in weights.table:
            ends[p.group] = weights.starts[p.name] + math.prod(p.shape)
        bounds = [0, *ends.values()]
        self.segments = [(a - self.n, b - self.n, group_rate(s, g))
                         for a, b, g in zip(bounds, ends.values(), ends) if g != "matrix"]

    def stacks(self, flat: Tensor) -> dict[tuple[int, ...], list[tuple[Tensor, float]]]:
        """The matrices of a flat tensor as views [L, rows <= cols] with their factor sqrt(max(1, out / in)),
        those of equal shape together: one batched product for all of them."""
        s, leaves = self.s, {}
        for name in ("qkv", "out", "up", "down"):
            start, shape = self.weights.shapes[name]
            leaves[name] = flat[start:start + math.prod(shape)].view(shape)
        kv_dim = s.head_dim * s.num_kv_heads
        groups: dict[tuple[int, ...], list[tuple[Tensor, float]]] = {}
        for stack in (*leaves.pop("qkv").split((s.model_dim, kv_dim, kv_dim), dim=1), *leaves.values()):
            wide, factor = stack, 1.0
            if stack.size(1) > stack.size(2):
                wide, factor = stack.mT, (stack.size(1) / stack.size(2)) ** 0.5
            groups.setdefault(tuple(wide.shape[1:]), []).append((wide, factor))
        return groups

    def orthogonalize(self, update: Tensor) -> None:
        """Newton-Schulz on all matrices of a flat tensor, in place, dealt to the ranks and gathered."""
        rank, world = self.machine.rank, self.machine.world
        for shape, views in self.stacks(update).items():
            whole = torch.cat([view for view, _ in views]).to(self.machine.dtype)
            share = -(-len(whole) // world)
            if world > 1:       # zeros fill up what the number of ranks does not divide
                whole = torch.cat((whole, whole.new_zeros(share * world - len(whole), *shape)))
            done = newton_schulz(whole[rank * share:(rank + 1) * share], self.s.muon_backend_steps)
            if world > 1:
                dist.all_gather_into_tensor(whole, done)
                done = whole
            for at, (view, factor) in enumerate(views):
                view.copy_(done[at * len(view):(at + 1) * len(view)]).mul_(factor)

    @torch.no_grad()
    def step(self, grad: Tensor, step: int, multiplier: float) -> None:
        """Update the weights from the flat gradient, float32, at learning rates times multiplier."""
        s, n, momentum = self.s, self.n, muon_momentum(self.s, step)
        matrices, rate = self.weights.flat[:n], s.matrix_lr * multiplier
        self.momentum.mul_(momentum).add_(grad[:n])
        update = grad[:n].add(self.momentum, alpha=momentum)     # Nesterov
        self.orthogonalize(update)
        if s.weight_decay:
            matrices.mul_(1 - rate * s.weight_decay)
        matrices.sub_(update, alpha=rate)
        self.adam(grad[n:], step, multiplier)
        if self.ema is not None:
            self.ema.lerp_(self.weights.flat, 1 - ema_decay(s, step))
        self.weights.refresh()

    def adam(self, grad: Tensor, step: int, multiplier: float) -> None:
        """Adam (Kingma and Ba 2015) on embedding, head and vectors, with bias correction."""
        s = self.s
        self.moment1.lerp_(grad, 1 - s.beta1)
        self.moment2.mul_(s.beta2).addcmul_(grad, grad, value=1 - s.beta2)
        root = (self.moment2 / (1 - s.beta2 ** (step + 1))).sqrt_().add_(s.adam_eps)
        for start, end, rate in self.segments:
            self.weights.flat[self.n + start:self.n + end].addcdiv_(
                self.moment1[start:end], root[start:end], value=-rate * multiplier / (1 - s.beta1 ** (step + 1)))

    def sha256(self, step: int) -> str:
        """Of everything the next step depends on: weights, moments, average, step."""
        digest = hashlib.sha256(str(step).encode())
        for tensor in (self.weights.flat, self.momentum, self.moment1, self.moment2, self.ema):
            if tensor is not None:
                digest.update(tensor.cpu().numpy())
        return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------
# --- training
# ----------------------------------------------------------------------------------------------------

class Clock:
    """Seconds of training: stands still during validation, after the device has finished its work."""

    def __init__(self, machine: Machine):
        self.machine, self.total, self.began = machine, 0.0, None

    def start(self) -> None:
        self.machine.synchronize()
        self.began = time.perf_counter()

    def stop(self) -> None:
        self.machine.synchronize()
        self.total, self.began = self.seconds(), None

    def seconds(self) -> float:
        return self.total + (time.perf_counter() - self.began if self.began is not None else 0.0)


class Trainer:
    """Model, optimizer and gradient of one run on this rank."""

    def __init__(self, s: Settings, machine: Machine):
        self.s, self.machine, self.model = s, machine, GPT(s, machine)
        weights = self.model.weights
        self.grad = torch.zeros(len(weights.flat) + 1, device=machine.device)     # the last one is the loss
        self.grad_views = [self.grad[start:start + math.prod(shape)].view(shape)
                           for start, shape in weights.shapes.values()]
        self.leaves = [weights.leaves[name] for name in weights.shapes]
        self.loss = torch.compile(self.model.loss, dynamic=False) if machine.compile else self.model.loss
        self.predictor = Predictor(self.model)
        self.reset()

    def reset(self) -> None:
        """Start weights and a fresh optimizer."""
        weights = self.model.weights
        weights.load({param.name: draw(param, self.s.seed) for param in weights.table})
        self.optimizer = Optimizer(self.s, weights, self.machine)

    def convert(self, tokens: np.ndarray) -> Tensor:
        """Runs in the reader's thread: a tensor that can travel to the device while it computes."""
        tensor = torch.from_numpy(tokens)
        return tensor.pin_memory() if self.machine.device.type == "cuda" else tensor

    def step(self, batch: Tensor, step: int, multiplier: float) -> Tensor:
        """One optimizer step on int64[micro_steps, slot_tokens + 1]; returns (train loss, gradient norm)."""
        self.grad.zero_()
        rope = self.model.positions(self.s.train_seq_len)
        for tokens in batch.to(self.machine.device, non_blocking=True):
            ids, targets = (part.view(-1, self.s.train_seq_len) for part in (tokens[:-1], tokens[1:]))
            loss = self.loss(self.model.weights.leaves, ids, targets, *rope)
            torch._foreach_add_(self.grad_views, torch.autograd.grad(loss, self.leaves))
            self.grad[-1] += loss.detach()
        self.grad /= len(batch)
        self.machine.all_mean(self.grad)
        gradient, norm = self.grad[:-1], self.grad[:-1].norm()
        if self.s.grad_clip_norm:
            gradient *= (self.s.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step(gradient, step, multiplier)
        return torch.stack((self.grad[-1], norm))

    def warm_up(self, log: RunLog) -> None:
        """Compile and touch everything with WARMUP_STEPS steps on random tokens, then forget them."""
        shape = (self.s.batch_slots // self.machine.world, self.s.slot_tokens + 1)
        tokens = np.random.Generator(np.random.PCG64(0)).integers(0, self.s.vocab_size, shape)
        began = time.perf_counter()
        for step in range(self.s.warmup_steps):
            self.step(self.convert(tokens), step, 1.0)
        self.machine.synchronize()
        self.reset()
        log.line(f"warmup_steps:{self.s.warmup_steps} on dummy tokens, untimed, state restored: "
                 f"{time.perf_counter() - began:.1f}s")

    def score(self, corpus: Corpus) -> Score:
        """Validate the weights, or their moving average where there is one."""
        weights, ema, m = self.model.weights, self.optimizer.ema, self.machine
        trained = weights.flat.clone() if ema is not None else None
        if ema is not None:
            weights.flat.copy_(ema)
            weights.refresh()
        score = evaluate(self.s, self.predictor.nll, corpus, m.rank, m.world, m.sum_floats)
        if trained is not None:
            weights.flat.copy_(trained)
            weights.refresh()
        return score

    def export(self) -> bytes:
        ema = self.optimizer.ema
        return encode_artifact(self.s, self.model.weights.named(ema))


class Progress:
    """What has been measured so far, and the lines that say it. Losses are read one step late, so that a
    GPU is never waited for between steps."""

    def __init__(self, s: Settings, machine: Machine, log: RunLog):
        self.s, self.machine, self.log = s, machine, log
        self.data_wait, self.waits, self.pending = 0.0, 0.0, None
        self.logged = (0, 0.0)      # step and seconds of the last line

    def after_step(self, step: int, stats: Tensor, multiplier: float, seconds: float, wait: float) -> None:
        self.data_wait += wait
        self.waits += wait
        late, self.pending = self.pending, (step, fetch(stats), multiplier, seconds, wait)
        if late is not None:
            self.report(*late)

    def flush(self) -> None:
        if self.pending is not None:
            self.report(*self.pending)
            self.pending = None

    def report(self, step: int, stats: Callable[[], list[float]], multiplier: float, seconds: float,
               wait: float) -> None:
        """metrics.jsonl for every step, a line for some. Raises NumericalError at a loss that is not finite."""
        s, (loss, norm) = self.s, stats()
        self.log.event("step", step=step, train_loss=loss, grad_norm=norm, lr_mul=multiplier,
                       train_seconds=seconds, data_wait_seconds=wait)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise NumericalError(f"step {step}: train_loss {loss}, gradient norm {norm}, expected finite numbers; "
                                 "try a lower MATRIX_LR, SCALAR_LR or TIED_EMBED_LR")
        self.log.show_bar(step, s.iterations, f"loss {loss:.3f}")
        if step > 10 and step % s.train_log_every and step != s.iterations:
            return
        steps, spent = step - self.logged[0], max(seconds - self.logged[1], 1e-9)
        rate = steps * s.train_batch_tokens / spent
        mfu = rate * flops_per_token(s) / (self.machine.peak_flops * self.machine.world)
        self.log.line(f"step:{step}/{s.iterations} train_loss:{loss:.4f} lr_mul:{multiplier:.3f} "
                      f"train_time:{seconds * 1e3:.0f}ms step_avg:{spent / steps * 1e3:.2f}ms tok_s:{rate:.0f} "
                      f"mfu:{mfu:.1%} data_wait:{self.waits / steps * 1e3:.1f}ms")
        self.logged, self.waits = (step, seconds), 0.0


def fetch(tensor: Tensor) -> Callable[[], list[float]]:
    """Begin to copy a small tensor to the host; the returned function waits for it."""
    if tensor.device.type != "cuda":
        values = tensor.tolist()
        return lambda: values
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def wait() -> list[float]:
        event.synchronize()
        return host.tolist()
    return wait


def train(trainer: Trainer, corpus: Corpus, log: RunLog, stop_signal: list[int]) -> dict[str, Any]:
    """The loop: validate, step, until ITERATIONS, the cap or a signal. Returns what was measured."""
    s, machine = trainer.s, trainer.machine
    reader = BatchReader(s, corpus.train, machine.rank, machine.world, 0,
                         [0] * (s.batch_slots // machine.world), trainer.convert)
    clock, progress_log, step, eval_seconds = Clock(machine), Progress(s, machine, log), 0, 0.0
    clock.start()
    while True:
        seconds, signalled = machine.from_rank_0((clock.seconds(), bool(stop_signal)))
        capped = bool(s.max_wallclock_seconds) and seconds >= s.max_wallclock_seconds
        done = step == s.iterations or capped or signalled
        if done or step == 0 or (s.val_loss_every and step % s.val_loss_every == 0):
            clock.stop()
            progress_log.flush()
            began = time.perf_counter()
            score = trainer.score(corpus)
            eval_seconds += time.perf_counter() - began
            log.line(f"step:{step}/{s.iterations} {score.line()} train_time:{clock.total * 1e3:.0f}ms")
            log.event("val", step=step, train_seconds=clock.total, **score._asdict())
            if done:
                break
            clock.start()
            seconds = machine.from_rank_0(clock.seconds())
        multiplier = lr_multiplier(s, step, seconds)
        batch, wait = reader.next()
        stats = trainer.step(batch, step, multiplier)
        step += 1
        progress_log.after_step(step, stats, multiplier, clock.seconds(), wait)
    reader.close()
    crc32s = machine.gather(reader.crc32s)      # of rank 0's slots, rank 1's, ...
    in_order = [crc32s[slot % machine.world][slot // machine.world] for slot in range(s.batch_slots)]
    return dict(score=score, steps=step, train_seconds=clock.total, eval_seconds=eval_seconds,
                data_wait_seconds=progress_log.data_wait, signalled=signalled,
                batches_crc32=f"{zlib.crc32(np.array(in_order, '<u4')):08x}")


# ----------------------------------------------------------------------------------------------------
# --- main
# ----------------------------------------------------------------------------------------------------

def load_model(blob: bytes, name: str, machine: Machine, s: Settings) -> GPT:
    """The model of an artifact; shape settings come from the artifact, the others from s."""
    shape, weights = decode_artifact(blob, name)
    model = GPT(dataclasses.replace(s, **{key: getattr(shape, key) for key in SHAPE_SETTINGS}), machine)
    model.weights.load(weights)
    return model


def eval_only(s: Settings, origins: dict[str, str], machine: Machine, log: RunLog) -> int:
    """EVAL_ONLY=path: score an artifact, write nothing."""
    try:
        blob = Path(s.eval_only).read_bytes()
    except OSError as error:
        raise DataError(f"EVAL_ONLY={s.eval_only}: {error.strerror}") from None
    model = load_model(blob, s.eval_only, machine, s)
    windows = {key: getattr(s, key) for key in ("eval_seq_len", "eval_stride") if origins[key] == "environment"}
    model.s = s = dataclasses.replace(model.s, **windows)
    check_settings(s)
    corpus = load_corpus(s, with_train=False)
    began = time.perf_counter()
    score = evaluate(s, Predictor(model).nll, corpus, machine.rank, machine.world, machine.sum_floats)
    log.line(f"eval_only:{s.eval_only} {score.line()}")
    log.line("---")
    for key, value in {**score_rows(score), "eval_seconds": f"{time.perf_counter() - began:.3f}",
                       "artifact_sha256": hashlib.sha256(blob).hexdigest(), "val_sha256": corpus.val_sha256,
                       "tokenizer_sha256": corpus.tokenizer_sha256}.items():
        log.line(f"{key}: {value}")
    return 0


def score_rows(score: Score) -> dict[str, str]:
    partial = " partial" if score.partial else ""
    return {"val_loss": f"{score.val_loss:.8f}{partial}", "val_bpb": f"{score.val_bpb:.8f}{partial}",
            "val_tokens": f"{score.tokens}{partial}", "val_bytes": f"{score.bytes}{partial}"}


def environment(s: Settings, machine: Machine) -> dict[str, Any]:
    """What a run depended on beside its settings."""
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
            "sentencepiece": sentencepiece.__version__, "platform": platform.platform(),
            "processor": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "device": f"{machine.device} ({machine.reason})", "world_size": machine.world, "git": git_state()}


def cpu_name() -> str:
    try:
        return re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


def export_and_score(trainer: Trainer, corpus: Corpus, folder: Path) -> tuple[bytes, Score, float, str]:
    """Write the artifact, read it back from disk and score that: the result of the run."""
    machine, path, blob = trainer.machine, folder / "model.int8.ptz", b""
    if machine.rank == 0:
        write_whole(path, trainer.export())
        blob = path.read_bytes()
    blob = machine.from_rank_0(blob)
    model = trainer.model
    model.weights.load(decode_artifact(blob, str(path))[1])
    began = time.perf_counter()
    score = evaluate(trainer.s, trainer.predictor.nll, corpus, machine.rank, machine.world, machine.sum_floats)
    seconds = time.perf_counter() - began
    text = sample(trainer.predictor, corpus.tokenizer, trainer.s.seed) if machine.rank == 0 else ""
    return blob, score, seconds, text


def run(s: Settings, origins: dict[str, str], script: bytes) -> int:
    """A whole run on this rank. Returns the exit code; raises SettingError, DataError, NumericalError."""
    machine = open_machine(s)
    if s.eval_only:
        log = RunLog(None, machine.rank == 0)
        log.line(choose_dtype(s, machine))
        log.line(choose_compile(s, machine))
        return eval_only(s, origins, machine, log)
    corpus = load_corpus(s)
    folder = Path(machine.from_rank_0(str(make_run_folder(s)) if machine.rank == 0 else ""))
    log = RunLog(folder, machine.rank == 0)
    stop_signal: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop_signal.append(number))
    about = environment(s, machine)
    if machine.rank == 0:
        write_whole(folder / "config.json", json.dumps(
            {"settings": vars(s), "origins": origins, "environment": about}, indent=1).encode())
    log.line(f"run:{folder} preset:{s.preset} " + " ".join(
        f"{name.upper()}={show(getattr(s, name))}" for name, origin in origins.items() if origin == "environment"))
    log.line(" ".join(f"{key}:{value}" for key, value in about.items()))
    log.line(choose_dtype(s, machine))
    log.line(choose_compile(s, machine))
    for note in corpus.notes:
        log.line(f"note: {note}")
    trainer = Trainer(s, machine)
    log.line(f"params:{len(trainer.model.weights.flat)} train_tokens:{corpus.train.total} "
             f"val_tokens:{len(corpus.val_tokens)} val_bytes:{int(corpus.val_bytes.sum(dtype=np.int64))} "
             f"slots:{s.batch_slots}x{s.slot_tokens} ranks:{machine.world}")
    if s.warmup_steps:
        trainer.warm_up(log)
    totals = train(trainer, corpus, log, stop_signal)
    return finish(trainer, corpus, folder, totals, log, script)


def finish(trainer: Trainer, corpus: Corpus, folder: Path, totals: dict[str, Any], log: RunLog, script: bytes) -> int:
    """Export, score the export, print the final block. Returns the exit code."""
    s, machine = trainer.s, trainer.machine
    state_sha256 = trainer.optimizer.sha256(totals["steps"])
    blob, score, seconds, text = export_and_score(trainer, corpus, folder)
    code = count_code(s, script)
    over = len(blob) + code > s.budget_bytes
    rows = {**score_rows(score),
            "val_bpb_unquantized": f"{totals['score'].val_bpb:.8f}" + (" partial" if score.partial else ""),
            "steps": totals["steps"], "tokens_seen": totals["steps"] * s.train_batch_tokens,
            "params": len(trainer.model.weights.flat), "train_seconds": f"{totals['train_seconds']:.3f}",
            "eval_seconds": f"{totals['eval_seconds'] + seconds:.3f}",
            "data_wait_seconds": f"{totals['data_wait_seconds']:.3f}",
            "peak_memory_mib": f"{machine.peak_memory_mib():.0f}", "artifact_bytes": len(blob), "code_bytes": code,
            "total_bytes": len(blob) + code, "budget_bytes": s.budget_bytes, "budget": "over" if over else "ok",
            "artifact_sha256": hashlib.sha256(blob).hexdigest(), "script_sha256": hashlib.sha256(script).hexdigest(),
            "train_sha256": corpus.train_sha256, "val_sha256": corpus.val_sha256,
            "tokenizer_sha256": corpus.tokenizer_sha256, "state_sha256": state_sha256,
            "batches_crc32": totals["batches_crc32"], "preset": s.preset, "seed": s.seed, "run_id": folder.name,
            "device": str(machine.device), "torch": torch.__version__}
    log.event("final", **rows)
    log.line(f"the model writes: {text!r}")
    log.line("---")
    for key, value in rows.items():
        log.line(f"{key}: {value}")
    log.close()
    return EXIT_OVER_BUDGET if over else 0


def main() -> int:
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr.reconfigure(errors="backslashreplace")
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        default = "10min_16mb" if torch.cuda.is_available() else "10min_floppy"
        s, origins = load_settings(dict(os.environ), default)
        script = Path(__file__).read_bytes()
        if s.dry_run:
            print("\n".join(dry_run(s, origins, script)))
            return 0
        return run(s, origins, script)
    except (SettingError, DataError, NumericalError) as error:
        if speaks:
            print(f"train_gpt.py: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
