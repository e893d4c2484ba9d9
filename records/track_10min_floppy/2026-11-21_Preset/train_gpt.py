"""Train the best language model that fits a byte budget, and score it in bits per byte.

    python train_gpt.py                                        one process; CUDA, MPS or CPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py      one process for each GPU
    PRESET=smoke ITERATIONS=20 python train_gpt.py             every setting is an environment variable

Exit codes: 0 done, 2 bad setting, 3 bad data or tokenizer, 4 artifact over its byte budget, 16 stopped by
a signal, a lost rank or a full disk (the same command with its RUN_ID goes on), 17 numerical failure.
"""
from __future__ import annotations

import contextlib, ctypes, dataclasses, datetime, difflib, errno, fcntl, functools, hashlib, json, math
import os, platform, re, resource, shlex, signal, subprocess, sys, threading, time, zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np
import safetensors.numpy
import sentencepiece
if __name__ == "__main__":      # read when torch loads: waiting threads soon sleep, 5 % slower alone but
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")     # twice as fast where another program takes a core
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

# --- errors: each is one line for the user, and an exit code ----------------------------------------------
class SettingError(ValueError): exit_code = 2       # does not parse, is impossible, or looks misspelt
class DataError(ValueError): exit_code = 3          # shard, tokenizer or artifact damaged, or not of one kind
class NumericalError(ArithmeticError): exit_code = 17   # no finite numbers, or replicas that differ
class Stopped(Exception): exit_code = 16            # by a signal; a run can go on, as after an OSError
class LostRank(Stopped): exit_code = 16             # another rank hangs or died
ERRORS = SettingError, DataError, NumericalError, Stopped, OSError

# --- settings: one table; the defaults are PRESET=10min_16mb, the other presets say how they differ -------
PRESETS: dict[str, dict[str, Any]] = {"10min_16mb": {}, "10min_floppy": dict(
    data_path="./data/datasets/demo_sp1024", tokenizer_path="./data/tokenizers/demo_1024_bpe.model",
    num_layers=4, model_dim=192, num_heads=3, num_kv_heads=3, train_seq_len=512, train_batch_tokens=8192,
    batch_slots=4, val_batch_size=16384, iterations=100000, warmdown_iters=0.6, warmup_steps=2,
    lr_warmup_steps=20, matrix_lr=0.06, muon_momentum=0.95, muon_momentum_warmup_start=0.85,
    muon_momentum_warmup_steps=300, qk_gain_init=4.0, budget_bytes=1474560, code_bytes="zlib")}
PRESETS["smoke"] = PRESETS["10min_floppy"] | dict(
    num_layers=3, model_dim=64, num_heads=2, num_kv_heads=1, train_seq_len=128, train_batch_tokens=4096,
    batch_slots=8, val_loss_every=0, val_tokens_limit=65536, train_log_every=10, iterations=60,
    max_wallclock_seconds=60.0, warmdown_iters=0.5, warmup_steps=1, lr_warmup_steps=5, matrix_lr=0.02,
    muon_momentum_warmup_steps=30, qk_gain_init=1.5, compile=False)
def var(default: Any, doc: str, low: float | None = None, high: float | None = None, pick: tuple = ()) -> Any:
    """A row of the settings table: default, one line of documentation, and what values it takes."""
    return dataclasses.field(default=default, metadata=dict(doc=doc, low=low, high=high, pick=pick))
@dataclasses.dataclass(frozen=True)
class Settings:
    """Every setting, read once. The environment variable is the field's name in upper case."""
    preset: str = var("10min_16mb", "row of defaults; unset, without CUDA: 10min_floppy", pick=(*PRESETS,))
    dry_run: bool = var(False, "print settings, parameters and planned bytes, then stop")
    # data
    data_path: str = var("./data/datasets/fineweb10B_sp1024", "folder of *_train_*.bin and *_val_*.bin")
    tokenizer_path: str = var("./data/tokenizers/fineweb_1024_bpe.model", "SentencePiece model file")
    data_order: str = var("shuffled", "of training windows", pick=("shuffled", "sequential"))
    run_id: str = var("", "name of the run's folder under logs/; empty: date, time and process id")
    seed: int = var(1337, "draws the start weights and the data order", low=0)
    # machine
    device: str = var("auto", "where to compute", pick=("auto", "cuda", "mps", "cpu"))
    dtype: str = var("auto", "of products; auto: the faster, measured", pick=("auto", "bfloat16", "float32"))
    compile: bool = var(True, "compile the model where that works")
    # validation
    val_batch_size: int = var(524288, "validation tokens of one forward pass over all slots", low=1)
    val_loss_every: int = var(1000, "steps between validations; the first and last step always are", low=0)
    val_tokens_limit: int = var(0, "score only so many tokens and mark the result partial; 0: all", low=0)
    eval_seq_len: int = var(0, "window of the evaluation in tokens; 0: TRAIN_SEQ_LEN", low=0)
    eval_stride: int = var(0, "tokens by which the window moves; 0: EVAL_SEQ_LEN (no overlap)", low=0)
    eval_only: str = var("", "path of an artifact to score; nothing is trained or written")
    train_log_every: int = var(200, "steps between log lines; the first ten steps are logged too", low=1)
    # safety
    ckpt_seconds: float = var(60.0, "between checkpoints; 0: at the end and on a signal only", low=0)
    ckpt_keep: int = var(2, "checkpoints kept, should the newest be damaged", low=1)
    resume: str = var("auto", "go on from RUN_ID's checkpoint: if it has one", pick=("auto", "must", "never"))
    lr_trace: str = var("", "metrics.jsonl of a run whose length and learning rates are repeated")
    max_skipped: int = var(10, "steps in a row without finite numbers that end the run", low=1)
    skip_sigma: float = var(0.0, "skip steps this many deviations above the last 128; 0: off", low=0)
    dist_timeout: float = var(60.0, "seconds after which a silent rank ends the others", low=1)
    fault: str = var("", "for tests: nan@30:rank1:2.qkv, sleep@50:0.5, kill@70, torn@ckpt:3, with commas")
    # length
    iterations: int = var(20000, "optimizer steps at most", low=1)
    max_wallclock_seconds: float = var(600.0, "training seconds at most on rank 0's clock; 0: no cap", low=0)
    warmdown_iters: float = var(3000.0, "last steps, while the rate falls; below 1: part of the run", low=0)
    warmup_steps: int = var(20, "untimed steps on dummy tokens before the start, then forgotten", low=0)
    lr_warmup_steps: int = var(10, "steps over which the learning rate rises linearly", low=0)
    train_batch_tokens: int = var(393216, "tokens of one optimizer step over all ranks", low=1)
    train_seq_len: int = var(4096, "tokens of one training sequence", low=1)
    batch_slots: int = var(8, "parts of a step's batch; the number of ranks must divide it", low=1)
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
    muon_momentum: float = var(0.99, "momentum of Muon", low=0, high=0.99999)
    muon_backend_steps: int = var(5, "Newton-Schulz steps", low=1)
    muon_momentum_warmup_start: float = var(0.92, "momentum of Muon at step 0", low=0, high=0.99999)
    muon_momentum_warmup_steps: int = var(1500, "steps over which it rises linearly", low=0)
    beta1: float = var(0.9, "Adam, first moment", low=0, high=0.99999)
    beta2: float = var(0.95, "Adam, second moment", low=0, high=0.99999)
    adam_eps: float = var(1e-8, "Adam, added to the root of the second moment", low=0)
    weight_decay: float = var(0.0, "decoupled decay of Muon's matrices: w -= lr * decay * w", low=0)
    grad_clip_norm: float = var(0.0, "largest norm of the whole gradient; 0: off", low=0)
    ema_decay: float = var(0.0, "score and export a moving average of weights; 0: off", low=0, high=0.99999)
    # artifact
    clip_percentile: float = var(99.99984, "int8 rows are clipped at this percentile of |w|", 50, 100)
    clip_std: float = var(0.0, "if above 0, clip at so many standard deviations of the row instead", low=0)
    budget_bytes: int = var(16000000, "most bytes of artifact and code together", low=1)
    code_bytes: str = var("raw", "how the script counts: its size, or at zlib level 9", pick=("raw", "zlib"))
    slot_tokens = property(lambda s: s.train_batch_tokens // s.batch_slots)     # of one rank's micro-step
    head_dim = property(lambda s: s.model_dim // s.num_heads)
    kv_dim = property(lambda s: s.head_dim * s.num_kv_heads)
    eval_window = property(lambda s: s.eval_seq_len or s.train_seq_len)
    eval_step = property(lambda s: s.eval_stride or s.eval_window)
def parse_setting(row: dataclasses.Field, text: str) -> Any:
    """The value of one environment variable. Raises SettingError naming what it takes."""
    low, high, pick = (row.metadata[key] for key in ("low", "high", "pick"))
    read = {"int": int, "float": float, "str": str, "bool": lambda text: ["0", "1"].index(text) > 0}[row.type]
    try:
        value = read(text)
        if pick and value not in pick or row.type == "int" and abs(value) >= 2**63 \
                or row.type == "float" and not math.isfinite(value) \
                or low is not None and value < low or high is not None and value > high:
            raise ValueError
    except ValueError:
        takes = {"int": "a whole number", "float": "a number", "bool": "0 or 1", "str": "a text"}[row.type]
        takes = "one of " + ", ".join(pick) if pick else takes
        takes += (f" from {low:g}" if low is not None else "") + (f" to {high:g}" if high is not None else "")
        raise SettingError(f"{row.name.upper()}={text!r}: takes {takes}") from None
    return value
def refuse_near_misses(env: dict[str, str], names: set[str]) -> None:
    """Stop at a variable that was probably meant as a setting (ITERATION, SEQ_LEN, num_layers)."""
    for name in sorted(set(env) - names - {"COMPILER", "MODEL_DIR"}):    # other programs' own
        upper = name.upper()
        close = [upper] if upper in names else difflib.get_close_matches(upper, names, 1, cutoff=0.85)
        if not close and "_" in upper:
            close = sorted(n for n in names if n.startswith(upper + "_") or n.endswith("_" + upper))
        if close:
            raise SettingError(f"{name}={env[name]!r} is no setting, {close[0]} is: write that or unset it")
def load_settings(env: dict[str, str], default_preset: str) -> tuple[Settings, dict[str, str]]:
    """The settings and the origin of each: 'preset' or 'environment'. Raises SettingError."""
    rows = {row.name.upper(): row for row in dataclasses.fields(Settings)}
    refuse_near_misses(env, set(rows))
    given = {row.name: parse_setting(row, env[name]) for name, row in rows.items() if name in env}
    preset = given.get("preset", default_preset)
    settings = Settings(**{**PRESETS[preset], **given, "preset": preset})
    check_settings(settings)
    return settings, {name: "environment" if name in given else "preset" for name in vars(settings)}
FAULT = re.compile(r"(nan|inf|sleep|kill|stop|drift|torn)@(\d+|ckpt)(?::rank(\d+))?(?::(\d[\w.]*))?")
def check_settings(s: Settings) -> None:
    """Refuse values that are possible alone but not together. Raises SettingError."""
    unit = s.batch_slots * s.train_seq_len
    for name, ok, takes in (
            ("num_heads", s.model_dim % s.num_heads == 0, f"a divisor of MODEL_DIM={s.model_dim}"),
            ("num_heads", s.head_dim % 2 == 0, f"heads of even width, MODEL_DIM / NUM_HEADS is {s.head_dim}"),
            ("num_kv_heads", s.num_heads % s.num_kv_heads == 0, f"a divisor of NUM_HEADS={s.num_heads}"),
            ("train_batch_tokens", s.train_batch_tokens % unit == 0,
             f"a multiple of BATCH_SLOTS * TRAIN_SEQ_LEN = {unit}"),
            ("eval_stride", s.eval_step <= s.eval_window, f"at most the window, {s.eval_window}"),
            ("val_tokens_limit", s.val_tokens_limit != 1, "0 or at least 2: the first token is not scored"),
            ("run_id", re.fullmatch(r"([\w-][\w.-]{0,99})?", s.run_id),
             "at most 100 letters, digits, '.', '_', '-', the first no '.'"),
            ("resume", s.run_id or s.resume != "must", "auto or never where RUN_ID names no run"),
            ("fault", all(FAULT.fullmatch(f) for f in s.fault.split(",") if f), f"kinds of {FAULT.pattern}")):
        if not ok:
            raise SettingError(f"{name.upper()}={getattr(s, name)}: takes {takes}")
def show(value: Any) -> str:
    """A setting's value as its environment variable would be written."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(int(value) if isinstance(value, bool) else value)

# --- parameters: names, shapes, start values and optimizer of everything that is learned ------------------
class Param(NamedTuple):
    name: str
    shape: tuple[int, ...]
    init: str               # normal, uniform (by scale), or constant (the scale itself)
    scale: float
    group: str              # matrix (Muon); embed, head, vector (Adam)
def parameter_table(s: Settings) -> list[Param]:
    """All parameters in storage order, each a stack over the layers; qkv holds three matrices, [out, in]."""
    dim, layers, kv_dim, hidden = s.model_dim, s.num_layers, s.kv_dim, s.mlp_mult * s.model_dim
    bound = dim ** -0.5     # uniform in +-1/sqrt(fan in), the usual start of a linear layer
    std = s.tied_embed_init_std if s.tie_embeddings else 1.0
    table = [Param("qkv", (layers, dim + 2 * kv_dim, dim), "uniform", bound, "matrix"),
             Param("attn_out", (layers, dim, dim), "constant", 0.0, "matrix"),
             Param("mlp_up", (layers, hidden, dim), "uniform", bound, "matrix"),
             Param("mlp_down", (layers, dim, hidden), "constant", 0.0, "matrix"),
             Param("tok_emb", (s.vocab_size, dim), "normal", std, "embed")]
    if not s.tie_embeddings:
        table.append(Param("head", (s.vocab_size, dim), "constant", 0.0, "head"))
    starts = {"attn_scale": 1.0, "mlp_scale": 1.0, "mix_x": 1.0, "mix_x0": 0.0}
    table += [Param(name, (layers, dim), "constant", start, "vector") for name, start in starts.items()]
    table.append(Param("q_gain", (layers, s.num_heads), "constant", s.qk_gain_init, "vector"))
    table.append(Param("skip_weight", (layers // 2, dim), "constant", 1.0, "vector"))
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
    """Operations of one training token: 6 for each weight of a product, 6 D T a layer for attention."""
    matrices = sum(math.prod(p.shape) for p in parameter_table(s) if p.group == "matrix")
    return 6 * (matrices + s.vocab_size * s.model_dim) + 6 * s.num_layers * s.model_dim * s.train_seq_len

# --- schedules: pure functions of the step and of the progress in [0, 1] ----------------------------------
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

# --- shards: 256 little-endian int32, then uint16 tokens (format: data/README.md) -------------------------
SHARD_MAGIC, EXTENSION_MAGIC, HEADER_BYTES = 20240520, 0x31464C47, 1024
CLAIMS = {4: "extension version", 5: "vocabulary", 12: "index", 13: "shards", 14: "split", 15: "flags"}
GET_DATA = "python data/prepare.py demo makes the demo corpus, python data/download.py fetches FineWeb"
def need(where: Any, what: str, found: Any, expected: Any, more: str = "") -> None:
    """Raise DataError unless what was found is what was expected."""
    if found != expected:
        raise DataError(f"{where}: {what} is {found}, expected {expected}{more}")
def read_file(name: str, path: str | Path, size: int = -1) -> bytes:
    """The bytes of a file, or its first. Raises DataError that begins with `name`."""
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        more = f"; {GET_DATA}" if str(path).endswith((".bin", ".model")) else ""
        raise DataError(f"{name}{path}: cannot be read: {error.strerror}{more}") from None
class Shard:
    """A shard's header, held against the file's size; `claims`: what it says of its set. Raises DataError."""
    def __init__(self, path: Path):
        header, more = read_file("", path, HEADER_BYTES), f"; see python data/shards.py inspect {path}"
        need(path, "header", f"{len(header)} bytes", f"{HEADER_BYTES} bytes", more)
        ints = np.frombuffer(header, "<u4").tolist()
        self.path, self.header, self.tokens, self.extended = path, header, ints[2], ints[3] == EXTENSION_MAGIC
        need(path, "magic", ints[0], SHARD_MAGIC, more)
        need(path, "version", ints[1], 1, more)
        need(path, "file size", os.stat(path).st_size, HEADER_BYTES + 2 * max(self.tokens, 1),
             f" for the {self.tokens} uint16 tokens that its header names{more}")
        need(path, "extension", ints[3], EXTENSION_MAGIC if ints[3] else 0, more)
        self.max_id, self.text_bytes, self.crc32 = ints[8], ints[9] + (ints[10] << 32), ints[11]
        self.claims: dict[str, Any] = {"extended header": self.extended}
        if self.extended:
            self.claims |= {what: ints[place] for place, what in CLAIMS.items()}
            self.claims |= {"tokenizer": header[64:96].hex(), "corpus": header[96:128].hex()}
def find_shards(s: Settings, split: str, expected: dict[str, Any]) -> list[Shard]:
    """All shards of a split, one whole set that meets the claims `expected`, which the first adds to."""
    folder = Path(s.data_path)
    shards = [Shard(path) for path in sorted(folder.glob(f"*_{split}_*.bin"))]
    if not shards:
        raise DataError(f"DATA_PATH={folder} holds no *_{split}_*.bin; {GET_DATA}")
    stem = re.sub(r"_\d+\.bin$", "", shards[0].path.name)
    first = int(split == "train" and shards[0].path.name == f"{stem}_000001.bin")   # as others count those
    more = f"; see python data/shards.py verify {folder}"
    for at, shard in enumerate(shards):
        if not re.fullmatch(rf"{re.escape(stem)}_0*{at + first}\.bin", shard.path.name):
            raise DataError(f"{shard.path}: expected {stem} number {at + first}: a shard is missing or "
                            f"doubled, or the folder holds two sets{more}")
        here = {"index": at, "shards": len(shards), "split": ("val", "train").index(split)}
        for what, found in shard.claims.items():
            need(shard.path, what, found, here.get(what, expected.setdefault(what, found)),
                 ": these files do not belong together" + more)
        if shard.extended and shard.max_id >= s.vocab_size:
            raise DataError(f"{shard.path}: highest id {shard.max_id}, expected below {s.vocab_size}{more}")
    return shards
class TokenStream:
    """The tokens of a set of shards, end to end and around again, memory-mapped."""
    def __init__(self, shards: list[Shard], vocab_size: int):
        self.shards, self.vocab_size, self.maps = shards, vocab_size, {}
        self.starts = np.cumsum([0] + [shard.tokens for shard in shards])
        self.total = int(self.starts[-1])
    def payload(self, shard: Shard) -> np.ndarray:
        """uint16[tokens] of one shard; its checksum is computed when it is first touched."""
        try:
            size = os.stat(shard.path).st_size      # had it shrunk, reading would be a SIGBUS
            need(shard.path, "file size", size, HEADER_BYTES + 2 * shard.tokens, ": it changed under the run")
            if shard.path not in self.maps:
                tokens = np.memmap(shard.path, "<u2", "r", HEADER_BYTES, (shard.tokens,))
                if shard.extended:
                    need(shard.path, "crc32 of the tokens", zlib.crc32(tokens), shard.crc32,
                         f": the file is damaged, make or fetch it again; {GET_DATA}")
                self.maps[shard.path] = tokens
        except OSError as error:
            raise DataError(f"{shard.path}: cannot be read: {error.strerror}") from None
        return self.maps[shard.path]
    def read(self, start: int, length: int) -> np.ndarray:
        """uint16[length] from token `start` on, the first token following the last. Raises DataError."""
        out, filled = np.empty(length, np.uint16), 0
        while filled < length:
            at = (start + filled) % self.total
            index = int(np.searchsorted(self.starts, at, "right")) - 1
            offset, shard = at - int(self.starts[index]), self.shards[index]
            part = self.payload(shard)[offset:offset + length - filled]
            if int(part.max()) >= self.vocab_size:
                raise DataError(f"{shard.path}: token {int(part.max())} among the {len(part)} from number "
                                f"{offset} on, expected below VOCAB_SIZE={self.vocab_size}; see python "
                                f"data/shards.py inspect {shard.path}")
            out[filled:filled + len(part)] = part
            filled += len(part)
        return out

# --- batch order: a pure function of step and slot, so it is the same for every number of ranks -----------
def shuffled_windows(seed: int, count: int) -> np.ndarray:
    """A permutation of range(count), int64: by the splitmix64 hash of (seed, number)."""
    start = np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
    mixed = (start + np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")
def slot_start(step: int, slot: int, slots: int, length: int, total: int, windows: np.ndarray | None) -> int:
    """First of the length + 1 tokens that a slot reads: slots end to end, or in the order of `windows`."""
    number = step * slots + slot
    if windows is None:
        return number * (length + 1) % total
    return int(windows[number % len(windows)]) * (length + 1)
class BatchReader:
    """Reads a rank's part of the coming batches in a thread; crc32s: of all tokens read so far, by slot."""
    def __init__(self, s: Settings, stream: TokenStream, rank: int, world: int, step: int, crc32s: list[int],
                 convert: Callable[[np.ndarray], Any]):
        if stream.total <= s.slot_tokens:
            raise DataError(f"DATA_PATH={s.data_path}: {stream.total} training tokens, expected the "
                            f"{s.slot_tokens + 1} of a slot at least; lower TRAIN_BATCH_TOKENS")
        self.s, self.stream, self.convert, self.crc32s = s, stream, convert, crc32s
        self.slots, count = range(rank, s.batch_slots, world), stream.total // (s.slot_tokens + 1)
        self.windows = shuffled_windows(s.seed, count) if s.data_order == "shuffled" else None
        self.thread, self.step, self.coming = ThreadPoolExecutor(1, "batch reader"), step, []
        self.last_read = time.perf_counter()
    def read(self, step: int) -> tuple[Any, list[int]]:
        """This rank's slots of a step, int64[micro_steps, slot_tokens + 1] through `convert`, and crc32s."""
        slots, length, total = self.s.batch_slots, self.s.slot_tokens, self.stream.total
        starts = [slot_start(step, slot, slots, length, total, self.windows) for slot in self.slots]
        tokens = np.stack([self.stream.read(start, length + 1) for start in starts])
        self.crc32s, self.last_read = list(map(zlib.crc32, tokens, self.crc32s)), time.perf_counter()
        return self.convert(tokens.astype(np.int64)), self.crc32s
    def next(self) -> tuple[Any, list[int], float]:
        """(batch, crc32s up to and with it, seconds waited for it). Raises what reading it raised."""
        while len(self.coming) < 4:
            self.coming.append(self.thread.submit(self.read, self.step))
            self.step += 1
        began = time.perf_counter()
        return *self.coming.pop(0).result(), time.perf_counter() - began

# --- tokens and bytes: what each token of a text is worth -------------------------------------------------
def load_tokenizer(s: Settings) -> tuple[sentencepiece.SentencePieceProcessor, str]:
    """The tokenizer and the sha256 of its file. Raises DataError."""
    blob, where = read_file("TOKENIZER_PATH=", s.tokenizer_path), f"TOKENIZER_PATH={s.tokenizer_path}"
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=blob)
    except RuntimeError:
        raise DataError(f"{where} is no SentencePiece model; {GET_DATA}") from None
    need(where, "vocabulary", tokenizer.vocab_size(), s.vocab_size, " (VOCAB_SIZE)")
    return tokenizer, hashlib.sha256(blob).hexdigest()
class ByteTable(NamedTuple):
    """UTF-8 bytes that each token adds to the decoded text, int32[vocab]."""
    inner: np.ndarray       # after text
    first: np.ndarray       # after a control token, where a dummy prefix is dropped
    control: np.ndarray     # bool: begin, end and padding marks
def byte_table(tokenizer: sentencepiece.SentencePieceProcessor) -> ByteTable:
    """What decoding makes of each token; a byte piece is one byte, control and unknown are nothing."""
    ids = range(tokenizer.vocab_size())
    control, unknown, single = (np.array([test(i) for i in ids]) for test in
                                (tokenizer.is_control, tokenizer.is_unknown, tokenizer.is_byte))
    def sizes(prefix: list[int]) -> np.ndarray:
        return np.array([len(text.encode()) for text in tokenizer.decode([prefix + [i] for i in ids])])
    first = sizes([])
    usable = np.flatnonzero(~control & ~unknown & (first > 0))
    if not len(usable):
        raise DataError("the tokenizer has no piece that decodes to text")
    anchor = int(usable[0])
    inner = sizes([anchor]) - first[anchor]
    first, inner = (np.where(control | unknown, 0, np.where(single, 1, size)) for size in (first, inner))
    return ByteTable(inner.astype(np.int32), first.astype(np.int32), control)
def token_bytes(table: ByteTable, tokens: np.ndarray) -> np.ndarray:
    """Bytes of each token of a stream, int32[n]; documents begin after a control token."""
    after_control = np.concatenate([[True], table.control[tokens[:-1]]])
    return np.where(after_control, table.first[tokens], table.inner[tokens])
class Corpus(NamedTuple):
    """All data of a run, checked: training stream, validation tokens and the bytes each is worth."""
    train: TokenStream
    val_tokens: np.ndarray          # uint16[n]
    val_bytes: np.ndarray           # int32[n]
    notes: list[str]
    tokenizer: sentencepiece.SentencePieceProcessor
    sha256: dict[str, str]          # of the training headers, the validation tokens, the tokenizer's file
def load_corpus(s: Settings, with_train: bool = True) -> Corpus:
    """Open and check tokenizer and shards. Raises DataError."""
    tokenizer, tokenizer_sha256 = load_tokenizer(s)
    expected = {"extension version": 1, "vocabulary": s.vocab_size, "tokenizer": tokenizer_sha256}
    val = find_shards(s, "val", expected)
    train = find_shards(s, "train", expected) if with_train else []
    stream = TokenStream(val, s.vocab_size)
    tokens = stream.read(0, stream.total)
    headers = b"".join(shard.header for shard in train)     # each holds the checksum of its tokens
    return Corpus(TokenStream(train, s.vocab_size), tokens, *count_bytes(val, tokens, tokenizer), tokenizer, {
        "train_sha256": hashlib.sha256(headers).hexdigest(), "tokenizer_sha256": tokenizer_sha256,
        "val_sha256": hashlib.sha256(tokens.astype("<u2")).hexdigest()})
def count_bytes(val: list[Shard], tokens: np.ndarray, tokenizer: Any) -> tuple[np.ndarray, list[str]]:
    """Bytes of each validation token, held against the headers' count, and notes. Raises DataError."""
    worth, place = token_bytes(byte_table(tokenizer), tokens), val[0].path.parent
    total, stated = int(worth.sum(dtype=np.int64)), sum(shard.text_bytes for shard in val)
    if not val[0].extended:
        unknown = int((tokens == tokenizer.unk_id()).sum())
        return worth, [f"note: legacy shards: {total} validation bytes counted by decoding, {unknown} "
                       "unknown tokens as 0; no header vouches for them"]
    if val[0].claims["flags"] & 1:      # lossy tokenizer: the text's true bytes, spread over the tokens
        scaled = np.diff(np.cumsum(worth, dtype=np.int64) * stated // max(total, 1), prepend=0)
        return scaled.astype(np.int32), [f"note: lossy tokenizer: {total} bytes decoded of {stated}"]
    need(place, "byte count of the validation tokens", total, stated, " by the headers: this tokenizer does "
         f"not give the text back; see python data/shards.py verify {place}")
    return worth, []

# --- score: windows over the validation tokens, every token but the first scored exactly once -------------
class Score(NamedTuple):
    val_loss: float         # nats per token
    val_bpb: float          # bits per byte
    val_tokens: int         # scored
    val_bytes: int          # of the scored tokens
    partial: bool           # not the whole validation set
    def line(self) -> str:
        return f"val_loss:{self.val_loss:.4f} val_bpb:{self.val_bpb:.4f}{' partial' if self.partial else ''}"
    def rows(self) -> dict[str, str]:
        mark, values = " partial" if self.partial else "", [*self._asdict().items()][:-1]
        return {k: (f"{v:.8f}" if isinstance(v, float) else str(v)) + mark for k, v in values}
def eval_windows(total: int, window: int, stride: int) -> np.ndarray:
    """int64[n, 3]: (start, first scored, end). A window reads start .. end and scores first .. end: the first
    all it sees, later ones what is new, after at least window - stride tokens."""
    starts = np.arange(1 + max(0, -(-(total - 1 - window) // stride)), dtype=np.int64) * stride
    ends = np.minimum(starts + window, total - 1)
    return np.stack([starts, np.concatenate([[1], ends[:-1] + 1]), ends], axis=1)
def evaluate(s: Settings, nll: Callable[..., np.ndarray], corpus: Corpus, machine: Any) -> Score | None:
    """Score the validation tokens; None if a signal comes to a rank meanwhile. `nll` maps int64[B, T+1] and n
    to float32[B, n]: nats of the last n ids. Past its end a row repeats its last token, not scored."""
    tokens, worth = corpus.val_tokens, corpus.val_bytes
    total = min(len(tokens), s.val_tokens_limit or len(tokens))
    if total < 2:
        raise DataError(f"DATA_PATH={s.data_path}: {total} validation tokens, expected at least 2")
    window, stride = min(s.eval_window, total - 1), min(s.eval_step, total - 1)
    windows = eval_windows(total, window, stride)
    rows = max(1, min(s.val_batch_size // s.batch_slots // window, -(-len(windows) // machine.world)))
    nats = scored = 0.0
    for first_row in range(machine.rank * rows, len(windows), machine.world * rows):
        if machine.signals:
            break
        start, first, end = windows[first_row:first_row + rows].T[:, :, None]
        place = start + np.arange(window + 1)
        last = stride if first_row else window      # only the first window scores all it sees
        is_scored = ((place >= first) & (place <= end))[:, -last:]
        ids = tokens[np.minimum(place, end)].astype(np.int64)
        ids = np.pad(ids, ((0, rows - len(ids)), (0, 0)))
        nats += float(nll(ids, last)[:len(is_scored)][is_scored].sum(dtype=np.float64))
        scored += int(is_scored.sum())
    nats, scored, signals = (sum(parts) for parts in zip(*machine.share(nats, scored, len(machine.signals))))
    if signals:
        return None
    assert scored == total - 1, "every token but the first is scored once"
    scored_bytes = int(worth[1:total].sum(dtype=np.int64))
    return Score(nats / scored, nats / math.log(2) / max(scored_bytes, 1), int(scored), scored_bytes,
                 total < len(tokens))

# --- artifact: zlib level 9 over a safetensors file; metadata names the scheme of each tensor -------------
ARTIFACT_FORMAT = "bytegolf-1"
INT8_ABOVE = 65536      # elements: smaller tensors are not worth a scale for each row
DTYPES = {"int8 rows": np.int8, "float16": np.float16, "float32": np.float32}
CARRIED = ("vocab_size num_layers model_dim num_heads num_kv_heads mlp_mult tie_embeddings rope_base "
           "logit_softcap train_seq_len eval_seq_len eval_stride dtype").split()    # the settings within
def quantize_rows(matrix: np.ndarray, percentile: float, std: float) -> tuple[np.ndarray, np.ndarray]:
    """int8[..., rows, cols] and a scale for each row, clipped at a percentile of |w| or, if std > 0, at std
    deviations. Scales are float16 where all fit, else float32, without a floor under small rows."""
    limit = std * matrix.std(-1, np.float64) if std else np.quantile(np.abs(matrix), percentile / 100, -1)
    scale, half = (limit / 127).astype(np.float32), np.finfo(np.float16)
    if ((scale == 0) | (scale >= half.tiny) & (scale <= half.max)).all():
        scale = scale.astype(np.float16)
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
    return np.clip(np.rint(matrix / divisor), -127, 127).astype(np.int8), scale
def scheme_of(param: Param) -> str:
    """Large stacks of matrices int8 by rows, small ones float16, vectors (which steer) float32."""
    large = "int8 rows" if math.prod(param.shape) > INT8_ABOVE else "float16"
    return "float32" if param.group == "vector" else large
BAD_CONTENTS = (ValueError, LookupError, TypeError, AttributeError, zlib.error, safetensors.SafetensorError,
                ArithmeticError, RecursionError)
def pack_tensors(tensors: dict[str, np.ndarray], about: dict[str, Any]) -> bytes:
    """A safetensors file. One metadata key only: safetensors writes several in no fixed order."""
    return safetensors.numpy.save(tensors, {"bytegolf": json.dumps(about, sort_keys=True)})
def read_metadata(raw: bytes, expected: str) -> dict[str, Any]:
    """What pack_tensors was told about them. Raises one of BAD_CONTENTS."""
    header = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
    about = json.loads(header["__metadata__"]["bytegolf"])
    if about["format"] != expected:
        raise ValueError(f"format {about['format']!r}, expected {expected!r}")
    return about
def encode_artifact(s: Settings, weights: dict[str, np.ndarray]) -> bytes:
    """float32 weights by name -> the artifact's bytes. Raises NumericalError for what is not finite."""
    tensors, schemes = {}, {}
    for param in parameter_table(s):
        name, value = param.name, np.ascontiguousarray(weights[param.name])     # stored as it lies
        schemes[name] = scheme_of(param)
        if not np.isfinite(value).all():
            raise NumericalError(f"{name} holds values that are not finite: nothing was exported")
        if schemes[name] == "float16" and np.abs(value).max(initial=0) > np.finfo(np.float16).max:
            schemes[name] = "float32"
        if schemes[name] == "int8 rows":
            value, tensors[name + ".scale"] = quantize_rows(value, s.clip_percentile, s.clip_std)
        tensors[name] = value.astype(DTYPES[schemes[name]])
    about = {"format": ARTIFACT_FORMAT, "schemes": schemes, "settings": {k: getattr(s, k) for k in CARRIED}}
    return zlib.compress(pack_tensors(tensors, about), 9)
def inflate(blob: bytes) -> bytes:
    """Undo zlib at level 9, strictly. Raises ValueError or zlib.error if a bit is not as it was."""
    inflater, last = zlib.decompressobj(), blob[-5:-4]      # of the data; a checksum follows
    raw = inflater.decompress(blob)
    if not inflater.eof or inflater.unused_data or blob[:2] != b"\x78\xda":
        raise ValueError("zlib stream cut short, longer than it should be, or not of level 9")
    if last > b"\0":       # bits behind the last code are zero: the highest that is not must mean something
        with contextlib.suppress(zlib.error):
            zlib.decompress(blob[:-5] + bytes([last[0] ^ 1 << last[0].bit_length() - 1]) + blob[-4:])
            raise ValueError("bits set behind the zlib stream")
    return raw
def decode_artifact(blob: bytes, name: str) -> tuple[Settings, dict[str, np.ndarray]]:
    """Bytes of the file `name` -> its shape settings and float32 weights. Raises DataError if damaged."""
    try:
        raw = inflate(blob)
        about = read_metadata(raw, ARTIFACT_FORMAT)
        shape = {row.name: parse_setting(row, show(about["settings"][row.name]))
                 for row in dataclasses.fields(Settings) if row.name in CARRIED}
        s = Settings(**shape, train_batch_tokens=Settings.batch_slots * shape["train_seq_len"])
        check_settings(s)
        stored = safetensors.numpy.load(raw)
        weights = {p.name: dequantize(stored, p, about["schemes"][p.name]) for p in parameter_table(s)}
        if stored:
            raise ValueError(f"holds {sorted(stored)[0]!r}, which the model has no place for")
    except BAD_CONTENTS as error:
        raise DataError(f"{name} is no whole artifact: {type(error).__name__}: {error}") from None
    return s, weights
def dequantize(stored: dict[str, np.ndarray], param: Param, scheme: str) -> np.ndarray:
    """Take one tensor out of `stored` as float32. Raises ValueError or KeyError if it does not fit."""
    value = stored.pop(param.name)
    if value.shape != param.shape or value.dtype != DTYPES[scheme]:
        raise ValueError(f"{param.name} is {value.dtype}{value.shape}, expected {scheme}{param.shape}")
    value = value.astype(np.float32)
    if scheme == "int8 rows":
        value *= stored.pop(param.name + ".scale").astype(np.float32).reshape(*param.shape[:-1], 1)
    if not np.isfinite(value).all():
        raise ValueError(f"{param.name} holds values that are not finite")
    return value
def count_code(s: Settings, script: bytes) -> int:
    return len(script) if s.code_bytes == "raw" else len(zlib.compress(script, 9))
def write_whole(path: Path, blob: bytes, die: bool = False) -> None:
    """Write beside and rename, so that a file of this name is always whole; tests die halfway."""
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(exist_ok=True)
        with open(beside, "wb") as file:
            file.write(blob[:len(blob) // 2])
            os.kill(os.getpid(), signal.SIGKILL * die)
            file.write(blob[len(blob) // 2:])
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with contextlib.suppress(OSError):      # it is gone, or the disk takes no change
            beside.unlink()

# --- run directory: train.log for people, metrics.jsonl for programs --------------------------------------
class RunLog:
    """Rank 0 prints and writes (if there is a folder); what a full disk does not take is written later."""
    def __init__(self, folder: Path | None, speaks: bool):
        self.folder, self.speaks, self.pending = folder, speaks, {}
        self.lock = threading.RLock()       # the thread of the checkpoints speaks, too
    def write(self, name: str, text: str) -> None:
        with self.lock:
            was_well, lines = name not in self.pending, self.pending.pop(name, b"")
            lines += (text + "\n").encode(errors="backslashreplace")
            try:
                with open(self.folder / name, "ab", buffering=0) as file:
                    while lines:
                        lines = lines[file.write(lines):]
            except OSError as error:
                self.pending[name] = lines
                if was_well:
                    self.warn(f"{self.folder / name}: {error.strerror}; lines wait until the disk takes them")
    def line(self, *texts: str) -> None:
        if self.speaks:
            try:
                tqdm.write("\n".join(texts), file=sys.stdout)
                sys.stdout.flush()
            except OSError as error:    # a closed terminal, a full disk under it: the run goes on
                sys.stdout = open(os.devnull, "w")
                self.warn(f"nothing more is printed: {error.strerror}")
            if self.folder:
                self.write("train.log", "\n".join(texts))
    def event(self, event: str, **values: Any) -> None:
        """An object for programs to metrics.jsonl: floats exact, those that are not finite as text."""
        if self.speaks and self.folder:
            plain = {k: str(v) if v in (math.inf, -math.inf) or v != v else v for k, v in values.items()}
            self.write("metrics.jsonl", json.dumps({"event": event, **plain}))
    def warn(self, text: str, **facts: Any) -> None:
        self.line(f"warning: {text}")
        self.event("warning", text=text, **facts)
def read_metrics(blob: bytes) -> list[dict[str, Any]]:
    """The events of a metrics.jsonl; a line that a dying run left unfinished is none."""
    events = []
    for line in blob.splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("step", 0), int) and "event" in event:
                events.append(event)
    return events
def read_lr_trace(path: str) -> list[float]:
    """LR_TRACE: the learning rate multiplier of each step of a run. Raises DataError."""
    events = read_metrics(read_file("LR_TRACE=", path))
    found = {e.get("step"): e.get("lr_mul") for e in events if e["event"] == "step"}
    rates = [found.get(step) for step in range(1, len(found) + 1)]
    if not rates or not all(type(rate) is float and 0 <= rate < math.inf for rate in rates):
        raise DataError(f"LR_TRACE={path}: expected a metrics.jsonl with steps 1, 2, ... and their lr_mul")
    return rates

# --- checkpoints: a safetensors file and the sha256 over it; the newest whole one counts ------------------
CHECKPOINT_FORMAT = "bytegolf-checkpoint-1"
FREE_ON_RESUME = """preset dry_run data_path tokenizer_path run_id device compile val_batch_size fault resume
    val_loss_every train_log_every warmup_steps ckpt_seconds ckpt_keep lr_trace max_skipped dist_timeout
    """.split()     # settings that change no result, or that are compared by what came of them
def encode_checkpoint(arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> bytes:
    blob = pack_tensors(arrays, {"format": CHECKPOINT_FORMAT, **facts})
    return blob + hashlib.sha256(blob).digest()
def decode_checkpoint(blob: bytes, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays by name, and the facts. Raises DataError if a bit is not as it was."""
    try:
        if hashlib.sha256(blob[:-32]).digest() != blob[-32:]:
            raise ValueError("its checksum does not fit")
        return safetensors.numpy.load(blob[:-32]), read_metadata(blob[:-32], CHECKPOINT_FORMAT)
    except BAD_CONTENTS as error:
        raise DataError(f"{name} is no whole checkpoint: {type(error).__name__}: {error}") from None
def load_checkpoint(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any], list[str]]:
    """Arrays, facts and notes of the newest whole one, if there are any. Raises DataError if all are bad."""
    notes, paths = [], sorted(folder.glob("step_*.ckpt"), reverse=True)
    for at, path in enumerate(paths):
        try:
            arrays, facts = decode_checkpoint(read_file("", path), str(path))
        except DataError as error:
            notes.append(f"warning: {error}; the one before is taken")
            continue
        for damaged in paths[:at]:
            damaged.rename(damaged.with_suffix(".damaged"))
        return arrays, facts, [*notes, f"resumed from {path}"]
    if paths:
        raise DataError(f"{paths[0]} and all before it are damaged; to begin anew remove {folder}")
    return {}, {}, notes
class Checkpoints:
    """Writes the last CKPT_KEEP states of a run, in a thread of its own while training goes on."""
    def __init__(self, s: Settings, folder: Path, log: RunLog):
        self.s, self.folder, self.log, self.count = s, folder / "checkpoint", log, 0
        self.thread, self.writing = ThreadPoolExecutor(1, "checkpoint"), Future()
        self.writing.set_result(None)
    def save(self, *state: Any) -> None:
        self.writing = self.thread.submit(self.write, *state)
    def write(self, arrays: Callable[[], dict[str, np.ndarray]], facts: dict[str, Any]) -> None:
        """Runs in the thread. If the disk does not take it, the others stay and training goes on."""
        path, self.count = self.folder / f"step_{facts['step']:08}.ckpt", self.count + 1
        faults = re.sub(r"@ckpt(?!:)", "@ckpt:1", self.s.fault).split(",")
        try:
            write_whole(path, encode_checkpoint(arrays(), facts), f"kill@ckpt:{self.count}" in faults)
            if f"torn@ckpt:{self.count}" in faults:
                os.truncate(path, path.stat().st_size // 2)
            for old in sorted(self.folder.glob("step_*.ckpt"))[:-self.s.ckpt_keep]:
                old.unlink()
        except OSError as error:
            self.log.warn(f"no checkpoint of step {facts['step']}: {error}")
def open_run(s: Settings, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[Path, dict, list]:
    """logs/<RUN_ID>/, new or to go on from, locked; facts and notes of its checkpoint, whose tensors fill
    `arrays`. Raises SettingError or DataError where `about`, what the run depends on, has changed."""
    run_id = s.run_id or time.strftime("%Y%m%d-%H%M%S") + f"-{s.preset}-{os.getpid()}"
    folder, why = Path("logs") / run_id, ""
    try:
        folder.mkdir(parents=True, exist_ok=s.resume != "never")
        metrics = folder / "metrics.jsonl"
        events = read_metrics(metrics.read_bytes() if metrics.exists() else b"")
        if any(event["event"] == "final" for event in events):
            why = "is a run that has ended and is never overwritten"
        elif any(p.suffix != ".part" for p in folder.iterdir()) and not (folder / "config.json").exists():
            why = "holds something else than a run"
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)    # until the process ends
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP):    # of a disk without locks
            why = "is in use by another process" if error.errno == errno.EAGAIN else str(error.strerror)
    if why:
        raise SettingError(f"RUN_ID={run_id}: {folder} {why}; choose another RUN_ID")
    found, facts, notes = load_checkpoint(folder / "checkpoint")
    arrays.update(found)
    if s.resume == "must" and not facts:
        raise SettingError(f"RESUME=must: {folder} has no checkpoint; RESUME=auto begins anew")
    for name, was in facts.get("settings", {}).items():
        value = about["settings"][name]
        was = facts["environment"]["dtype"] if name == "dtype" else was
        if name not in FREE_ON_RESUME and value != was and (name, value) != ("dtype", "auto"):
            raise SettingError(f"{name.upper()}={show(value)}: {folder} was begun with {show(was)}; set that "
                               "or choose another RUN_ID")
    for name, was in facts.get("sha256", {}).items():
        need(folder, name, about["sha256"][name], was, ", the data that the run was begun with")
    notes += [f"note: {name} was {was}, is {now}: bits may differ" for name, was in facts.get(
              "environment", {}).items() if was != (now := about["environment"].get(name, "none"))]
    for part in folder.rglob("*.part"):     # of a run that died
        part.unlink()
    write_whole(folder / "config.json", json.dumps(about, indent=1).encode())
    # metrics.jsonl tells of the steps up to the checkpoint; the run writes the rest again
    kept = [e for e in events if e.get("step", 0) + (e["event"] == "val") <= facts.get("step", 0)]
    write_whole(metrics, "".join(json.dumps(event) + "\n" for event in kept).encode())
    lacking = facts.get("step", 0) - sum(event["event"] == "step" for event in kept)
    notes += [f"warning: metrics.jsonl lacks {lacking} of the steps before"] if lacking else []
    return folder, facts, notes
def dry_run(s: Settings, origins: dict[str, str], script: bytes) -> Iterator[str]:
    """The lines of DRY_RUN=1: all settings, all parameters, the planned size. Needs no data or device."""
    for name, origin in origins.items():
        yield f"{name.upper()}={show(getattr(s, name))} ({origin})"
    table = parameter_table(s)
    for p in table:
        init = f"{p.scale:g}" if p.init == "constant" else f"{p.init} {p.scale:.6g}"
        optimizer = "muon" if p.group == "matrix" else "adam"
        yield f"{p.name} {'x'.join(map(str, p.shape))} float32 init {init} {optimizer} {p.group}"
    yield f"params: {sum(math.prod(p.shape) for p in table)}\nflops_per_token: {flops_per_token(s)}"
    scales = sum(2 * math.prod(p.shape[:-1]) for p in table if scheme_of(p) == "int8 rows")
    artifact = scales + sum(math.prod(p.shape) * np.dtype(DTYPES[scheme_of(p)]).itemsize for p in table)
    code = count_code(s, script)
    yield f"planned_artifact_bytes: {artifact} (before zlib)\ncode_bytes: {code}"
    yield f"budget: {'ok' if artifact + code <= s.budget_bytes else 'over before zlib'}"

# --- machine: device, ranks, number format, compiler ------------------------------------------------------
@dataclasses.dataclass
class Machine:
    """Where this process computes. rank and world are its place among the processes of the run."""
    device: torch.device
    rank: int = 0
    world: int = 1
    dtype: torch.dtype = torch.float32
    peak_flops: float = math.inf        # per second, measured, of one process in dtype
    compile: bool = False
    about: str = ""                     # all this, and why it is so
    say: Callable[[str], None] = print
    store: Any = None                   # what the ranks know of each other outside collective operations
    signals: list[int] = dataclasses.field(default_factory=list)    # SIGTERM and SIGINT that came
    lost: str = "the node where torchrun's ranks meet, that of rank 0"  # if no other answer is found
    patience: float = 15.0              # seconds that a rank is waited for once a collective has failed
    def all(self, operation: Callable, *args: Any, **named: Any) -> None:
        """A collective operation. Raises LostRank, naming the ranks that do not come, if it fails."""
        try:
            return operation(*args, **named) if self.world > 1 else None
        except RuntimeError as error:
            why = re.sub(r"^\[\S*\] ", "", str(error)).split(". ")[0]
        asking = threading.Thread(target=self.who_is_lost, daemon=True)     # which can take for ever
        asking.start()
        asking.join(1.4 * self.patience)
        raise LostRank(f"lost {self.lost}: dead, or silent for DIST_TIMEOUT ({why})")
    def beat(self) -> None:
        """Runs in a thread: shows the other ranks that this process lives."""
        with contextlib.suppress(RuntimeError):     # the store ends with the run
            while threading.main_thread().is_alive():
                self.store.set(f"beat {self.rank}", str(time.monotonic()))
                time.sleep(0.3)
    def who_is_lost(self) -> None:
        """Sets `lost`: whose heart does not beat, or else who does not say that it failed for him, too."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"failed {self.rank}", "")
            ranks, before = range(self.world), [self.store.get(f"beat {rank}") for rank in range(self.world)]
            time.sleep(self.patience)
            still = [rank for rank in ranks if self.store.get(f"beat {rank}") == before[rank]]
            silent = [rank for rank in ranks if not self.store.check([f"failed {rank}"])]
            lost = "rank " + (", ".join(map(str, still or silent)) or "unknown")
            self.lost = self.store.compare_set("lost", "", lost).decode()   # who found out first may be gone
    def on_rank_0(self, function: Callable[[], Any]) -> Any:
        """What a function returns on rank 0, on every rank; if it raises there, the others exit."""
        box = [None, True]
        try:
            box = [function(), False] if self.rank == 0 else box
        finally:
            self.all(dist.broadcast_object_list, box, device=torch.device("cpu"))
        return sys.exit(1) if box[1] else box[0]
    def share(self, *numbers: float) -> list[list[float]]:
        """These numbers of every rank, in the order of the ranks; whole ones below 2^53."""
        own = torch.tensor(numbers, dtype=torch.float64)
        values = [own.clone() for _ in range(self.world)]
        self.all(dist.all_gather, values, own)
        return [row.tolist() for row in values]
    def synchronize(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()
    def compiled(self, function: Callable) -> Callable:
        """The function through torch.compile; after the first failure a line, and eager from then on."""
        quick = torch.compile(function, dynamic=False)
        def call(*args: Any) -> Any:
            if self.compile:
                try:
                    return quick(*args)
                except Exception as error:  # no C++ compiler, a broken one, no cache folder: eager runs
                    self.compile, why = False, re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:200]
                    self.say(f"compile:0 (failed, so eager and slower: {why})")
            return function(*args)
        return call
    def peak_memory_mib(self) -> float:
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)
        return (torch.cuda.max_memory_allocated() if self.device.type == "cuda" else size) / 2**20
def open_machine(s: Settings) -> Machine:
    """Device, process group, number format and compiler. Raises SettingError for what is not there."""
    numbers = (os.environ.get(k, v) for k, v in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")))
    world, rank, local = (int(number) if number.isdigit() else 0 for number in numbers)
    kinds = {"cuda": (torch.cuda.is_available(), "a GPU is here"), "cpu": (True, "no GPU is here"),
             "mps": (torch.backends.mps.is_available(), "no CUDA, an Apple GPU is here")}
    kind = next(k for k in ("cuda", "mps", "cpu") if kinds[k][0]) if s.device == "auto" else s.device
    if not kinds[kind][0]:
        raise SettingError(f"DEVICE={kind}: torch {torch.__version__} finds none here")
    if world < 1 or s.batch_slots % world:
        raise SettingError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: takes a divisor of BATCH_SLOTS="
                           f"{s.batch_slots} (torchrun --nproc_per_node times --nnodes)")
    if kind == "cuda" and local >= torch.cuda.device_count():
        raise SettingError(f"LOCAL_RANK={local}: {torch.cuda.device_count()} GPUs, lower --nproc_per_node")
    machine = Machine(torch.device(kind, local) if kind == "cuda" else torch.device(kind), rank, world)
    keep_freed_memory()
    if kind == "cuda":
        torch.cuda.set_device(local)
    if world > 1:       # small decisions travel as CPU tensors over gloo: no GPU waits for them
        machine.patience = min(5.0, s.dist_timeout / 4)
        timeout = datetime.timedelta(seconds=s.dist_timeout - 1.5 * machine.patience)   # and time to exit
        store, *_ = next(dist.rendezvous("env://"))     # outlives torchrun's restarts
        machine.store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        threading.Thread(target=machine.beat).start()
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=timeout,
                                store=machine.store, rank=rank, world_size=world)
    machine.compile, why = s.compile and kind != "mps", kinds[kind][1] if s.device == "auto" else "DEVICE"
    machine.about = f"device:{machine.device} ({why}) {choose_dtype(s, machine)} compile:{machine.compile:d}"
    return machine
def keep_freed_memory() -> None:
    """Let glibc keep freed memory: page faults of large temporaries slow a step. Elsewhere: nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)) if mallopt else ():
        mallopt(option, value)      # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
def measure_flops(machine: Machine, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a square matrix product: the median of five."""
    side, seconds = 8192 if machine.device.type == "cuda" else 1024, []
    a, b = torch.randn(2, side, side, device=machine.device).to(dtype)
    for _ in range(7):
        machine.synchronize()
        began = time.perf_counter()
        a @ b
        machine.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * side ** 3 / sorted(seconds[2:])[2]
def choose_dtype(s: Settings, machine: Machine) -> str:
    """Set dtype and peak_flops; the returned line says why. Rank 0 decides for all."""
    names, why = ([s.dtype], "DTYPE") if s.dtype != "auto" else (["bfloat16"], "CUDA") \
        if machine.device.type == "cuda" else (["bfloat16", "float32"], "the faster")
    flops = machine.on_rank_0(lambda: {n: measure_flops(machine, getattr(torch, n)) for n in names})
    name = max(flops, key=flops.get)
    machine.dtype, machine.peak_flops = getattr(torch, name), flops[name]
    return f"dtype:{name} ({why}) " + " ".join(f"{n}:{f / 1e9:.0f}GFLOP/s" for n, f in flops.items())

# --- model: B batch, T tokens, D width, H heads, G key-value heads, R = H / G, K head width, V vocabulary --
NORM_EPS = 1e-6     # written down: the default of rms_norm differs between torch versions
class Weights:
    """All parameters in one flat float32 tensor; `leaves`: what the forward pass reads, by name and layer:
    matrices in the compute dtype, cast once an optimizer step, all else views of `flat`."""
    def __init__(self, s: Settings, device: torch.device, dtype: torch.dtype):
        self.table = parameter_table(s)
        self.sizes = [math.prod(p.shape) for p in self.table]
        self.num_matrix = sum(n for n, p in zip(self.sizes, self.table) if p.group == "matrix")
        self.flat = torch.zeros(sum(self.sizes), device=device)
        self.matrices = torch.zeros(self.num_matrix, device=device, dtype=dtype)
        layers = self.layers(self.flat) | self.layers(self.matrices)
        self.leaves = {name: [x.detach().requires_grad_() for x in parts] for name, parts in layers.items()}
    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A tensor of the layout of `flat`, or of its matrices alone, as views by parameter name."""
        table = [p for p in self.table if p.group == "matrix" or len(flat) > self.num_matrix]
        return {p.name: part.view(p.shape) for p, part in zip(table, flat.split(self.sizes[:len(table)]))}
    def layers(self, flat: Tensor) -> dict[str, list[Tensor]]:
        """The same as lists over the layers; embedding and head are one each."""
        return {name: [view] if name in ("tok_emb", "head") else list(view.unbind(0))
                for name, view in self.views(flat).items()}
    def set(self, flat: Tensor) -> None:
        """Take over the values of a flat tensor, float32 in the table's order, in both copies."""
        self.flat.copy_(flat)
        self.matrices.copy_(self.flat[:self.num_matrix])
    def pack(self, values: dict[str, np.ndarray]) -> Tensor:
        """float32 arrays by name -> a flat tensor on the host."""
        return torch.from_numpy(np.concatenate([values[p.name].ravel() for p in self.table]))
def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, float32, no weights (Zhang and Sennrich 2019)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)
def rope_tables(s: Settings, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, cos) and (sin, -sin), float32[T, 1, K], of the rotary position embedding (Su et al. 2021)."""
    inverse = s.rope_base ** (-torch.arange(0, s.head_dim, 2, dtype=torch.float64) / s.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
    pairs = (angles.cos(), angles.cos()), (angles.sin(), -angles.sin())
    return tuple(torch.cat(pair, 1)[:, None].float().to(device) for pair in pairs)
def norm_and_rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RMS-normalise each head and turn its pairs (first half, second half) by the angle of their position."""
    x = rms_norm(x_BTHK)
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x * cos + swapped * sin
def attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
    """Causal grouped-query softmax attention at scale 1 / sqrt(K), [B, T, H * K], of the last T tokens."""
    if q_BTHK.device.type == "cpu":
        return block_causal_attention(q_BTHK, k_BTGK, v_BTGK)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    before, mask = k.size(2) - q.size(2), None
    if before:
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril(before)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not before, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)
def block_causal_attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
    """In plain tensor operations; the R query heads of a group are rows of one product."""
    q = q_BTHK.unflatten(2, (k_BTGK.size(2), -1)) * (q_BTHK.size(3) ** -0.5 * math.log2(math.e))
    return BlockCausal.apply(q, k_BTGK, v_BTGK).flatten(2)
class BlockCausal(torch.autograd.Function):
    """Attention of q [B, Tq, G, R, K] on k and v [B, T, G, K]: blocks of queries against the keys up to their
    own last. By hand, because autograd takes the powers again and transposes the gradient of k. Products get
    contiguous operands, else they copy them; q holds log2(e), for powers of 2."""
    @staticmethod
    def blocks(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
        """(queries, the keys that the last of them sees) of each block."""
        length, tokens = q.size(1), max(128, 256 // q.size(3))      # 256 rows at least fill a product's tiles
        ends = [min(start + tokens, length) for start in range(0, length, tokens)]
        return [(slice(i * tokens, end), slice(k.size(1) - length + end)) for i, end in enumerate(ends)]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs, saved, ctx.blocks = [], [], BlockCausal.blocks(q, k)
        for part, seen in ctx.blocks:
            turned = [x.transpose(1, 2).contiguous() for x in (q[:, part], k[:, seen], v[:, seen])]
            qs, ks, vs = (x.flatten(0, 1).flatten(1, -2) for x in turned)     # [B * G, t (* R), K]
            keys, rows = (torch.arange(x.size(1), dtype=torch.int32, device=q.device) for x in (ks, qs))
            causal = keys <= rows[:, None] // q.size(3) + (ks.size(1) - turned[0].size(2))
            scores = torch.bmm(qs, ks.mT).float().where(causal, -math.inf)
            weight = torch.exp2(scores - scores.amax(-1, keepdim=True)).to(v.dtype)
            total = weight.sum(-1, dtype=torch.float32).view_as(turned[0][..., :1])
            outs.append((torch.bmm(weight, vs).view_as(turned[0]).float() / total).to(v.dtype))
            saved += qs, ks, vs, weight, total
        ctx.save_for_backward(out := torch.cat(outs, 2).transpose(1, 2), *saved)
        return out
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        (out, *saved), dq, dk, dv = ctx.saved_tensors, [], 0.0, 0.0
        for (part, seen), qs, ks, vs, weight, total in zip(ctx.blocks, *(saved[i::5] for i in range(5))):
            g = grad[:, part].transpose(1, 2).float() / total
            shift = (g * out[:, part].transpose(1, 2)).sum(-1).view_as(weight[..., :1])
            g = g.to(vs.dtype).contiguous().view_as(qs)
            slope = (weight * (torch.bmm(g, vs.mT).float() - shift) * math.log(2)).to(vs.dtype)  # of scores
            dq.append(torch.bmm(slope, ks).view(*total.shape[:4], -1).transpose(1, 2))
            later = (0, 0, 0, ctx.blocks[-1][1].stop - seen.stop)
            dk = dk + F.pad(torch.bmm(slope.mT, qs), later).float()
            dv = dv + F.pad(torch.bmm(weight.mT, g), later).float()
        dk, dv = (x.to(grad.dtype).unflatten(0, total.shape[:2]).transpose(1, 2) for x in (dk, dv))
        return torch.cat(dq, 1), dk, dv
def embed(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """int64[B, T] -> [B, T, D]: normalised rows of the table."""
    return rms_norm(F.embedding(ids, table)).to(dtype)
def join(x: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
    """[B, T, D]: x and what a block of the first half left for this one."""
    return x + (weight * skip).to(x.dtype)
def block(x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor, w: dict[str, Tensor], head_dim: int,
          last: int) -> Tensor:
    """One pre-norm transformer block, [B, T, D] to [B, last, D]; vectors among its weights act in float32."""
    dtype, (B, T, D), H = x.dtype, x.shape, x.size(2) // head_dim
    x = w["mix_x"] * x + w["mix_x0"] * x0
    heads = F.linear(rms_norm(x).to(dtype), w["qkv"]).view(B, T, -1, head_dim)
    q, k, v = heads.split((H, *[(heads.size(2) - H) // 2] * 2), dim=2)
    x, q = x[:, -last:], q[:, -last:].unflatten(2, (k.size(2), -1))    # (G, R): over H no loop is vectorized
    q = norm_and_rotate(q, cos[-last:, None], sin[-last:, None]) * w["q_gain"].view(k.size(2), -1, 1)
    y = attention(q.to(dtype).flatten(2, 3), norm_and_rotate(k, cos, sin).to(dtype), v)
    x = x + w["attn_scale"] * F.linear(y, w["attn_out"])
    y = F.relu(F.linear(rms_norm(x).to(dtype), w["mlp_up"])).square()     # relu squared: So et al. 2021
    return (x + w["mlp_scale"] * F.linear(y, w["mlp_down"])).to(dtype)
def head_logits(x: Tensor, matrix: Tensor, softcap: float, dtype: torch.dtype) -> Tensor:
    """[..., D] -> float32[..., V]: final norm, product in dtype, softcap c tanh(z / c)."""
    z = F.linear(rms_norm(x).to(dtype), matrix.to(dtype)).float()
    m = torch.expm1((z * (2 / softcap)).clamp(max=80.0))     # tanh = m / (m + 2): its own is slow on a CPU
    return softcap * (m / (m + 2))
def head_nll(x: Tensor, matrix: Tensor, targets: Tensor, softcap: float, dtype: torch.dtype) -> Tensor:
    """float32[B, T]: cross-entropy of each target in nats."""
    logits = head_logits(x, matrix, softcap, dtype)
    hit = torch.arange(logits.size(-1), dtype=torch.int32, device=x.device) == targets[..., None].int()
    top = softcap if softcap <= 40 else logits.detach().amax(-1, keepdim=True)     # range of exp
    total = (logits - top).exp().sum(-1, keepdim=True).log() + top
    return total[..., 0] - (logits * hit).sum(-1)   # a gather's backward, a scatter, is slow
class GPT:
    """The forward pass over `Weights`: a U-Net of transformer blocks, which share one compiled function."""
    def __init__(self, s: Settings, machine: Machine):
        self.s, self.machine, self.weights = s, machine, Weights(s, machine.device, machine.dtype)
        leaves = self.weights.leaves
        self.embedding, self.skip_weight = leaves["tok_emb"][0], leaves["skip_weight"]
        self.head = leaves.get("head", leaves["tok_emb"])[0]
        names = [name for name in leaves if name not in ("tok_emb", "head", "skip_weight")]
        self.layers = [dict(zip(names, layer)) for layer in zip(*(leaves[name] for name in names))]
        self.positions = functools.cache(lambda length: rope_tables(s, length, machine.device))
        parts = map(machine.compiled, (embed, join, block, head_nll))
        self.embed, self.join, self.block, self.head_nll = parts
    def trunk(self, ids: Tensor, last: int) -> Tensor:
        """int64[B, T] -> the last block's output at the last positions, [B, last, D] in the compute dtype."""
        half, outputs, (cos, sin) = len(self.layers) // 2, [], self.positions(ids.size(1))
        x0 = self.embed(ids, self.embedding, self.machine.dtype)
        x = x0.view_as(x0)      # were it x0 itself, the block would be compiled once more for that case
        for i, layer in enumerate(self.layers):
            if i >= half and outputs:       # the second half takes up what the first left, last in first out
                x = self.join(x, outputs.pop(), self.skip_weight[i - half])
            length = last if i == len(self.layers) - 1 else ids.size(1)
            x = self.block(x, x0, cos, sin, layer, self.s.head_dim, length)
            if i < half:
                outputs.append(x)
        return x
    def nll(self, ids: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """int64[B, T] and targets [B, n] of the last n positions -> float32[B, n], nats; product in dtype."""
        x = self.trunk(ids, targets.size(1))
        return self.head_nll(x, self.head, targets, self.s.logit_softcap, dtype)
class Predictor:
    """A trained model behind numpy arrays: what evaluation, sampling and the referee call."""
    def __init__(self, model: GPT):
        self.model, self.vocab_size = model, model.s.vocab_size
        self.max_len = max(model.s.train_seq_len, model.s.eval_window)      # beyond it the model is untrained
    @torch.no_grad()
    def nll(self, ids: np.ndarray, last: int = 0) -> np.ndarray:
        """int64[B, T+1] -> float32[B, T]: nats of ids[:, 1:] given what stands left; of the last, if > 0."""
        tensor = torch.from_numpy(ids).to(self.model.machine.device)
        return self.model.nll(tensor[:, :-1], tensor[:, 1:][:, -last:], torch.float32).cpu().numpy()
    @torch.no_grad()
    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """int64[B, T] -> float32[B, T, V]: nats of every next token at each position."""
        x = self.model.trunk(torch.from_numpy(ids).to(self.model.machine.device), ids.shape[1])
        logits = head_logits(x, self.model.head, self.model.s.logit_softcap, torch.float32)
        return logits.log_softmax(-1).cpu().numpy()
def load_predictor(artifact: Path, device: str = "cpu") -> Predictor:
    """What the referee calls: the predictor of an artifact. Raises DataError."""
    s, weights = decode_artifact(read_file("", artifact), str(artifact))
    machine = Machine(torch.device(device), compile=device != "mps")
    keep_freed_memory()
    choose_dtype(s, machine)
    predictor = Predictor(GPT(s, machine))
    predictor.model.weights.set(predictor.model.weights.pack(weights))
    return predictor
def sample(predictor: Predictor, tokenizer: Any, seed: int, characters: int = 200) -> str:
    """At most so many characters that the model writes from nothing, at temperature 0.8."""
    rng, text = np.random.Generator(np.random.PCG64(seed)), ""
    ids = np.full((1, min(predictor.max_len, 256)), max(tokenizer.bos_id(), 0))
    with torch.compiler.set_stance("force_eager"):      # compiling for this one text would take longer
        for at in range(1, ids.size):
            p = np.exp(predictor.logprobs(ids[:, :at])[0, -1].astype(np.float64) / 0.8)
            ids[0, at] = rng.choice(len(p), p=p / p.sum())
            text = tokenizer.decode(ids[0, 1:at + 1].tolist())
            if len(text) >= characters:
                break
    return text[:characters]

# --- optimizer: Muon for the block matrices, Adam for everything else -------------------------------------
def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Singular values of a stack [n, rows <= cols] to 0.7 to 1.2: Muon's quintic (Jordan et al. 2024)."""
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
        matrices, rest = weights.flat.tensor_split([weights.num_matrix])
        self.momentum, self.moment1, self.moment2 = map(torch.zeros_like, (matrices, rest, rest))
        self.ema = weights.flat.clone() if s.ema_decay else None
        self.recent = torch.full((128, 2), math.nan, device=rest.device)    # losses and norms, for SKIP_SIGMA
        embed_lr = s.tied_embed_lr if s.tie_embeddings else s.embed_lr
        rates = {"embed": embed_lr, "head": s.head_lr, "vector": s.scalar_lr}
        self.adam_rates = torch.cat([torch.full((size,), rates[p.group], device=rest.device)
                                     for size, p in zip(weights.sizes, weights.table) if p.group in rates])
    def stacks(self, flat: Tensor) -> dict[tuple[int, ...], list[tuple[Tensor, float]]]:
        """By shape, a flat tensor's matrices as views [L, rows <= cols], and sqrt(max(1, out / in))."""
        s, views, groups = self.s, self.weights.views(flat), {}
        for stack in (*views.pop("qkv").split((s.model_dim, s.kv_dim, s.kv_dim), dim=1), *views.values()):
            factor = max(1.0, stack.size(1) / stack.size(2)) ** 0.5
            wide = stack.mT if stack.size(1) > stack.size(2) else stack
            groups.setdefault(wide.shape[1:], []).append((wide, factor))
        return groups
    def orthogonalize(self, update: Tensor) -> None:
        """Newton-Schulz on all matrices of a flat tensor, in place, dealt to the ranks and gathered."""
        rank, world = self.machine.rank, self.machine.world
        for shape, views in self.stacks(update).items():
            count = sum(len(view) for view, _ in views)
            share = -(-count // world)      # zeros fill up what the number of ranks does not divide
            filler = update.new_zeros(share * world - count, *shape)
            whole = torch.cat([view for view, _ in views] + [filler]).to(self.machine.dtype)
            done = newton_schulz(whole[rank * share:(rank + 1) * share], self.s.muon_backend_steps)
            if world > 1:
                self.machine.all(dist.all_gather, list(whole.split(share)), done)
                done = whole
            for at, (view, factor) in enumerate(views):
                view.copy_(done[at * len(view):(at + 1) * len(view)]).mul_(factor)
    @torch.no_grad()
    def step(self, grad: Tensor, step: int, multiplier: float, take: Tensor | float = 1.0) -> None:
        """Update the weights from the flat gradient, float32, at learning rates times multiplier. take:
        float32[], 1, or 0 with a gradient of zeros to leave everything as it is: the host need not know."""
        s, momentum, take = self.s, muon_momentum(self.s, step), torch.as_tensor(take, device=grad.device)
        matrices, rest = self.weights.flat.tensor_split([self.weights.num_matrix])
        matrix_grad, rest_grad = grad.tensor_split([self.weights.num_matrix])
        self.momentum.mul_(torch.where(take > 0, momentum, 1.0)).add_(matrix_grad)
        update = matrix_grad.add(self.momentum, alpha=momentum)     # Nesterov
        self.orthogonalize(update)
        rate = take * s.matrix_lr * multiplier
        matrices.mul_(1 - rate * s.weight_decay).addcmul_(update, rate, value=-1)
        self.moment1.lerp_(rest_grad, take * (1 - s.beta1))     # Adam (Kingma and Ba 2015)
        self.moment2.lerp_(rest_grad.square(), take * (1 - s.beta2))
        root = (self.moment2 / (1 - s.beta2 ** (step + 1))).sqrt_().add_(s.adam_eps)
        rest.addcdiv_(self.moment1 * (self.adam_rates * take), root,
                      value=-multiplier / (1 - s.beta1 ** (step + 1)))
        if self.ema is not None:    # a smaller decay at first, so that the start weights do not linger
            self.ema.lerp_(self.weights.flat, take * (1 - min(s.ema_decay, (1 + step) / (10 + step))))
        self.weights.set(self.weights.flat)
    def judge(self, seen: Tensor) -> Tensor:
        """bool[]: whether a step with this loss and gradient norm, float32[2], is to be taken."""
        take = seen.isfinite().all()
        if self.s.skip_sigma:       # no limit, NaN, before 128 are seen
            limit = self.recent.mean(0) + self.s.skip_sigma * self.recent.std(0)
            take &= ~(seen > limit).any()
            self.recent.copy_(torch.where(take, torch.cat((self.recent[1:], seen[None])), self.recent))
        return take
    def state(self) -> dict[str, Tensor]:
        """Everything the next step depends on, but for its number."""
        named = dict(weights=self.weights.flat, momentum=self.momentum, moment1=self.moment1,
                     moment2=self.moment2, ema=self.ema, recent=self.recent if self.s.skip_sigma else None)
        return {name: tensor for name, tensor in named.items() if tensor is not None}
    def sha256(self, step: int) -> str:
        digest = hashlib.sha256(str(step).encode())
        for tensor in self.state().values():
            digest.update(tensor.cpu().numpy())
        return digest.hexdigest()

# --- training ---------------------------------------------------------------------------------------------
MICRO_TOKENS = 8192     # slots below it share a forward pass: fewer calls, and a CPU's cache still holds them
class Trainer:
    """Model, optimizer and gradient of one run on this rank."""
    def __init__(self, s: Settings, machine: Machine):
        self.s, self.machine, self.model = s, machine, GPT(s, machine)
        self.weights, self.predictor = self.model.weights, Predictor(self.model)
        self.size = len(self.weights.flat)      # behind the gradient: the loss, and a mark of each bad rank
        self.grad = torch.zeros(self.size + 1 + machine.world, device=machine.device)
        self.leaves, self.grad_views = ([x for parts in layers.values() for x in parts] for layers in
                                        (self.weights.leaves, self.weights.layers(self.grad[:self.size])))
        self.reset()
    def reset(self) -> None:
        self.weights.set(self.weights.pack({p.name: draw(p, self.s.seed) for p in self.weights.table}))
        self.optimizer = Optimizer(self.s, self.weights, self.machine)
    def snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """A copy of the state now, as a function that brings it to the host: for another thread."""
        copies = {name: tensor.clone() for name, tensor in self.optimizer.state().items()}
        return lambda: {name: tensor.cpu().numpy() for name, tensor in copies.items()}
    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Take over rank 0's arrays of a checkpoint on all ranks. Raises DataError if they do not fit."""
        state, found = self.optimizer.state(), {name: value.shape for name, value in arrays.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
        self.machine.on_rank_0(lambda: need("checkpoint", "shapes", found, expected))
        for name, tensor in state.items():
            if self.machine.rank == 0:
                tensor.copy_(torch.from_numpy(arrays[name]))
            self.machine.all(dist.broadcast, tensor, 0)
        self.weights.set(self.weights.flat)
    def convert(self, tokens: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(tokens)
        return tensor.pin_memory() if self.machine.device.type == "cuda" else tensor
    def step(self, batch: Tensor, step: int, multiplier: float) -> Tensor:
        """One optimizer step on int64[micro_steps, slot_tokens + 1]; returns loss, gradient norm, 1 if it was
        taken, and 1 for each bad rank: what is not finite is so in the sum, and all ranks skip it alike."""
        began = time.perf_counter()
        self.grad.zero_()
        together = math.gcd(len(batch), max(1, MICRO_TOKENS // self.s.slot_tokens))
        for micro, slots in enumerate(batch.to(self.machine.device, non_blocking=True).split(together)):
            ids, targets = (part.reshape(-1, self.s.train_seq_len) for part in (slots[:, :-1], slots[:, 1:]))
            loss = self.model.nll(ids, targets, self.machine.dtype).mean() * len(slots)
            for view, grad in zip(self.grad_views, torch.autograd.grad(loss, self.leaves)):
                view += grad
            self.grad[self.size] += loss.detach()
            provoke(self, step + 1, range(micro * together, (micro + 1) * together))
        self.grad /= self.s.batch_slots
        self.grad[self.size + 1 + self.machine.rank] = ~self.grad[:self.size + 1].sum().isfinite()
        self.own_seconds = time.perf_counter() - began      # on CUDA the host's alone
        self.machine.all(dist.all_reduce, self.grad)
        (gradient, rest), norm = self.grad.tensor_split([self.size]), self.grad[:self.size].norm()
        take = self.optimizer.judge(torch.stack((rest[0], norm)))
        if self.s.grad_clip_norm:
            gradient *= (self.s.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step(gradient.masked_fill_(~take, 0.0), step, multiplier, take.float())
        return torch.cat((torch.stack((rest[0], norm, take)), rest[1:]))
    def check_replicas(self, step: int) -> None:
        """Raises NumericalError, naming the ranks, if not all hold the same weights."""
        hashes = self.machine.share(*hashlib.sha256(self.weights.flat.cpu().numpy()).digest())
        odd = [str(rank) for rank, found in enumerate(hashes) if found != max(hashes, key=hashes.count)]
        if odd:
            raise NumericalError(f"step {step}: the weights of rank {', '.join(odd)} differ from the others'")
    def warm_up(self) -> str:
        """Compile and touch everything with WARMUP_STEPS steps on random tokens, then forget them."""
        s, began = self.s, time.perf_counter()
        shape = (s.batch_slots // self.machine.world, s.slot_tokens + 1)
        tokens = np.random.Generator(np.random.PCG64(0)).integers(0, s.vocab_size, shape)
        for step in range(s.warmup_steps):
            if any(sum(self.machine.share(len(self.machine.signals)), [])):
                break
            self.step(self.convert(tokens), s.iterations + step, 1.0)   # a number that no FAULT has
        self.machine.synchronize()
        self.reset()
        return f"warmup_steps:{s.warmup_steps} untimed, state restored, {time.perf_counter() - began:.1f}s"
    def result(self) -> Tensor:
        """What is scored and exported: the weights, or their moving average where there is one."""
        return self.weights.flat if self.optimizer.ema is None else self.optimizer.ema
    def score(self, corpus: Corpus) -> Score | None:
        """Validate the result; the weights are as before afterwards."""
        trained = self.weights.flat.clone()
        self.weights.set(self.result())
        score = evaluate(self.s, self.predictor.nll, corpus, self.machine)
        self.weights.set(trained)
        return score
    def export(self) -> bytes:
        weights = {name: view.numpy() for name, view in self.weights.views(self.result().cpu()).items()}
        return encode_artifact(dataclasses.replace(self.s, dtype=str(self.machine.dtype)[6:]), weights)
def provoke(trainer: Trainer, step: int, slots: range) -> None:
    """FAULT, for tests: what is set for this step (counted from 1), rank and one of its slots happens."""
    for fault in filter(None, trainer.s.fault.split(",")):
        kind, at, rank, value = FAULT.fullmatch(fault).groups(default="")
        place, _, part = value.partition(".")
        if (at, int(rank or 0)) != (str(step), trainer.machine.rank):
            continue
        if kind in ("nan", "inf") and int(place or 0) in slots:
            names, sizes = [p.name for p in trainer.weights.table], trainer.weights.sizes
            if part and part not in names:
                raise SettingError(f"FAULT={fault}: {part} is no parameter of this model")
            trainer.grad[sum(sizes[:names.index(part)]) if part else trainer.size] = float(kind)
        elif kind == "sleep" and 0 in slots:
            time.sleep(float(value or 1))
        elif kind == "drift" and 0 in slots:
            trainer.weights.flat[step] += 1
        elif kind in ("kill", "stop") and 0 in slots:
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
class Meter:
    """Reports each step while the next one is under way, so that a GPU is never idle for it."""
    def __init__(self, s: Settings, machine: Machine, log: RunLog, saved: dict[str, Any]):
        self.s, self.machine, self.log, self.pending, self.own_seconds = s, machine, log, None, 0.0
        self.data_wait, self.skipped, self.in_a_row = saved["meter"]
        self.logged = saved["step"], saved["train_seconds"], self.data_wait
        self.bar = tqdm(total=s.iterations, initial=saved["step"], unit="step", leave=False,
                        file=sys.stdout, disable=None if log.speaks else True)   # None: on a terminal only
    def after_step(self, stats: Tensor, *facts: Any) -> None:
        """stats: of Trainer.step; facts: step, multiplier, seconds, seconds waited, the rank's own."""
        on_host, copied = stats, None
        if stats.device.type == "cuda":
            on_host = torch.empty_like(stats, device="cpu", pin_memory=True).copy_(stats, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self.flush()
        self.pending = on_host, copied, *facts
    def flush(self) -> None:
        """Report the step that is pending. Raises NumericalError after MAX_SKIPPED bad steps in a row."""
        if self.pending is None:
            return
        (stats, copied, step, multiplier, seconds, wait, own), self.pending, s = self.pending, None, self.s
        if copied:
            copied.synchronize()
        loss, norm, taken, *bad = stats.tolist()
        self.data_wait, self.own_seconds = self.data_wait + wait, self.own_seconds + own
        self.log.event("step", step=step, train_loss=loss, grad_norm=norm, lr_mul=multiplier,
                       train_seconds=seconds, data_wait_seconds=wait, **{} if taken else {"skipped": True})
        self.skipped, self.in_a_row = self.skipped + (not taken), 0 if taken else self.in_a_row + 1
        if not taken:
            ranks = ", ".join(str(rank) for rank, mark in enumerate(bad) if mark) or "all"
            self.log.warn(f"step {step} skipped, weights and optimizer are as before: train_loss {loss}, "
                          f"gradient norm {norm}, from rank {ranks}; {self.in_a_row} in a row", step=step)
        if self.in_a_row == s.max_skipped:
            raise NumericalError(f"step {step}: train_loss {loss}, gradient norm {norm}, {s.max_skipped} bad "
                                 "steps in a row (MAX_SKIPPED); lower MATRIX_LR, SCALAR_LR or TIED_EMBED_LR")
        self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self.bar.update()
        if step > 10 and step % s.train_log_every and step != s.iterations:
            return
        now = (step, seconds, self.data_wait)
        (steps, spent, waited), self.logged = (a - b for a, b in zip(now, self.logged)), now
        rate, ranks = steps * s.train_batch_tokens / max(spent, 1e-9), ""
        mfu = rate * flops_per_token(s) / (self.machine.peak_flops * self.machine.world)
        if self.machine.world > 1:      # time before the gradients' exchange: a slow rank shows
            own = [1e3 * row[0] / steps for row in self.machine.share(self.own_seconds)]
            ranks, self.own_seconds = f" ranks:{min(own):.1f}..{max(own):.1f}ms", 0.0
        self.log.line(f"step:{step}/{s.iterations} train_loss:{loss:.4f} lr_mul:{multiplier:.3f} "
                      f"train_time:{seconds * 1e3:.0f}ms step_avg:{spent / steps * 1e3:.2f}ms "
                      f"tok_s:{rate:.0f} mfu:{mfu:.1%} data_wait:{waited / steps * 1e3:.1f}ms{ranks}")
def train(trainer: Trainer, corpus: Corpus, log: RunLog, checkpoints: Checkpoints, saved: dict[str, Any],
          trace: list[float]) -> dict[str, Any]:
    """Validate and step until ITERATIONS, the cap or a signal (Stopped). Returns what was measured."""
    s, machine, meter = trainer.s, trainer.machine, Meter(trainer.s, trainer.machine, log, saved)
    step, crc32s = saved["step"], saved["crc32s"][machine.rank::machine.world]
    reader = BatchReader(s, corpus.train, machine.rank, machine.world, step, crc32s, trainer.convert)
    last, paused = time.perf_counter(), 0.0     # when the last checkpoint was; seconds of evaluation
    began = last - saved["train_seconds"]
    while True:
        now = time.perf_counter()       # rank 0's clock decides for all ranks, any rank's signal stops all
        due = 0 < s.ckpt_seconds <= now - last and checkpoints.writing.done()
        shared = machine.share(now - began - paused, due, len(machine.signals))
        (seconds, due, _), stop = shared[0], any(signals for *_, signals in shared)
        done = step == s.iterations or 0 < s.max_wallclock_seconds <= seconds
        if done or due or stop:
            meter.flush()
            last = time.perf_counter()
            by_slot = np.array(machine.share(*crc32s), "<u4").T.ravel()
            if machine.rank == 0:
                checkpoints.save(trainer.snapshot(), saved | dict(
                    step=step, train_seconds=seconds, eval_seconds=saved["eval_seconds"] + paused,
                    crc32s=by_slot.tolist(), meter=(meter.data_wait, meter.skipped, meter.in_a_row)))
            log.event("checkpoint", step=step, stall_seconds=time.perf_counter() - last)
        if stop:
            raise Stopped(f"stopped by a signal after step {step} of {s.iterations}")
        if done or step == 0 or (s.val_loss_every and step % s.val_loss_every == 0):
            machine.synchronize()
            pause = time.perf_counter()
            seconds = machine.share(pause - began - paused)[0][0]
            meter.flush()
            trainer.check_replicas(step)
            score = trainer.score(corpus)
            paused += time.perf_counter() - pause
            if score is None:
                continue        # the next round saves and stops
            log.line(f"step:{step}/{s.iterations} {score.line()} train_time:{seconds * 1e3:.0f}ms")
            log.event("val", step=step, train_seconds=seconds, **score._asdict())
            if done:
                meter.bar.close()
                break
        multiplier = trace[step] if trace else lr_multiplier(s, step, seconds)
        batch, crc32s, wait = reader.next()
        stats = trainer.step(batch, step, multiplier)
        step += 1
        meter.after_step(stats, step, multiplier, time.perf_counter() - began - paused, wait,
                         trainer.own_seconds)
    return {"val_bpb_unquantized": score.rows()["val_bpb"], "steps": step, "params": trainer.size,
            "tokens_seen": step * s.train_batch_tokens, "train_seconds": round(seconds, 3),
            "last_train_read_seconds": round(seconds - pause + reader.last_read, 3),
            "eval_seconds": round(saved["eval_seconds"] + paused, 3), "skipped_steps": meter.skipped,
            "data_wait_seconds": round(meter.data_wait, 4), "resumes": saved["resumes"],
            "batches_crc32": f"{zlib.crc32(by_slot):08x}"}

# --- main -------------------------------------------------------------------------------------------------
def environment(machine: Machine, script: bytes) -> dict[str, Any]:
    """What a run depends on beside its settings."""
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    cpu = re.search(r"model name\s*:\s*(.*)|$", cpu)[1] or platform.processor()
    git = 'git -C "$0" describe --always --dirty=+dirty --abbrev=40 --exclude="*"'
    commit = subprocess.run(("sh", "-c", git, Path(__file__).parent), capture_output=True, text=True).stdout
    gpu = torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else "none"
    return {"ranks": machine.world, "dtype": str(machine.dtype)[6:], "processor": cpu, "gpu": gpu,
            "cores": os.cpu_count(), "threads": torch.get_num_threads(), "platform": platform.platform(),
            "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
            "sentencepiece": sentencepiece.__version__, "git": commit.strip() or "none",
            "script_sha256": hashlib.sha256(script).hexdigest()}
def score_artifact(blob: bytes, weights: dict[str, np.ndarray], predictor: Predictor, corpus: Corpus) -> dict:
    """The result: what the weights of an artifact score. Raises Stopped at a signal."""
    model, began = predictor.model, time.perf_counter()
    model.weights.set(model.weights.pack(weights))
    score = evaluate(model.s, predictor.nll, corpus, model.machine)
    if score is None:
        raise Stopped("stopped by a signal while the artifact was scored")
    return {**score.rows(), "eval_seconds": round(time.perf_counter() - began, 3),
            "artifact_bytes": len(blob), "artifact_sha256": hashlib.sha256(blob).hexdigest()}
def eval_only(s: Settings, origins: dict[str, str], machine: Machine, log: RunLog) -> int:
    """EVAL_ONLY=path: score an artifact of any shape, write nothing. Window and stride can be overridden."""
    blob = read_file("EVAL_ONLY=", s.eval_only)
    shape, weights = decode_artifact(blob, s.eval_only)
    s = dataclasses.replace(s, train_batch_tokens=s.batch_slots * shape.train_seq_len, **{
        name: getattr(shape, name) for name in CARRIED
        if not (name.startswith(("eval_", "dtype")) and origins[name] == "environment")})
    check_settings(s)
    corpus = load_corpus(s, with_train=False)
    log.line(machine.about, choose_dtype(s, machine), *corpus.notes)
    rows = score_artifact(blob, weights, Predictor(GPT(s, machine)), corpus) | corpus.sha256
    log.line("---", *(f"{key}: {value}" for key, value in rows.items() if key != "train_sha256"))
    return 0
def finish(trainer: Trainer, corpus: Corpus, folder: Path, rows: dict[str, Any], log: RunLog,
           script: bytes) -> int:
    """Write the artifact, read it back from disk, score that: the result. Returns the exit code."""
    s, machine, path = trainer.s, trainer.machine, folder / "model.int8.ptz"
    state_sha256 = trainer.optimizer.sha256(rows["steps"])
    blob = machine.on_rank_0(lambda: write_whole(path, trainer.export()) or path.read_bytes())
    result = score_artifact(blob, decode_artifact(blob, str(path))[1], trainer.predictor, corpus)
    result["eval_seconds"] = round(rows.pop("eval_seconds") + result["eval_seconds"], 3)
    over = len(blob) + (code := count_code(s, script)) > s.budget_bytes
    rows = {**result, **rows, "peak_memory_mib": round(machine.peak_memory_mib()), "code_bytes": code,
            "total_bytes": len(blob) + code, "budget_bytes": s.budget_bytes, "budget": ("ok", "over")[over],
            "script_sha256": hashlib.sha256(script).hexdigest(), **corpus.sha256,
            "state_sha256": state_sha256, "preset": s.preset, "seed": s.seed, "run_id": folder.name,
            "device": str(machine.device), "torch": torch.__version__}
    if machine.rank == 0:
        log.line(f"the model writes: {sample(trainer.predictor, corpus.tokenizer, s.seed)!r}")
    log.event("final", **rows)
    log.line("---", *(f"{key}: {value}" for key, value in rows.items()))
    return 4 if over else 0
def catch_signals(machine: Machine) -> None:
    """Note signals to stop; the second SIGINT kills, if no torchrun passes on what a terminal sent."""
    def note(number: int, frame: Any) -> None:
        machine.signals.append(number)
        if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:      # not under nohup
            signal.signal(number, note)
def run(s: Settings, origins: dict[str, str], script: bytes) -> int:
    """A whole run on this rank. Returns the exit code; raises one of ERRORS."""
    machine = open_machine(s)
    catch_signals(machine)
    if s.eval_only:
        return eval_only(s, origins, machine, RunLog(None, machine.rank == 0))
    corpus, trace = load_corpus(s), read_lr_trace(s.lr_trace) if s.lr_trace else []
    if trace:       # not the clock but the trace says how far the run is
        s = dataclasses.replace(s, iterations=min(s.iterations, len(trace)), max_wallclock_seconds=0.0)
    # the first batch once now, so that damage in it shows before anything is compiled or made
    BatchReader(s, corpus.train, machine.rank, machine.world, 0, [0] * s.batch_slots, np.copy).read(0)
    about, arrays = {"settings": vars(s), "origins": origins, "sha256": corpus.sha256}, {}
    about["environment"] = environment(machine, script)
    folder, saved, notes = machine.on_rank_0(lambda: open_run(s, about, arrays))
    if saved:       # DTYPE=auto may have found another one this time
        about["environment"]["dtype"] = saved["environment"]["dtype"]
        choose_dtype(dataclasses.replace(s, dtype=saved["environment"]["dtype"]), machine)
    saved = {"step": 0, "train_seconds": 0.0, "eval_seconds": 0.0, "resumes": -1, "meter": (0.0, 0, 0),
             "crc32s": [0] * s.batch_slots, **saved, **about}
    saved["resumes"] += 1
    log = RunLog(folder, machine.rank == 0)
    machine.say = log.line
    given = {k.upper(): show(getattr(s, k)) for k in origins if origins[k] == "environment"}
    trainer, checkpoints = Trainer(s, machine), Checkpoints(s, folder, log)
    log.line(f"run:{folder} preset:{s.preset} " + " ".join(f"{k}={v}" for k, v in given.items()),
             " ".join(f"{k}:{v}" for k, v in about["environment"].items()), machine.about, *corpus.notes,
             f"params:{trainer.size} batch:{s.batch_slots}x{s.slot_tokens} train_tokens:{corpus.train.total} "
             f"val_tokens:{len(corpus.val_tokens)} val_bytes:{corpus.val_bytes.sum(dtype=np.int64)}", *notes)
    if s.warmup_steps:
        log.line(trainer.warm_up())
    if saved["resumes"]:
        trainer.restore(arrays)
        log.event("resume", step=saved["step"], resumes=saved["resumes"], notes=notes)
    try:
        rows = train(trainer, corpus, log, checkpoints, saved, trace)
        return finish(trainer, corpus, folder, rows, log, script)
    except (Stopped, OSError) as error:
        log.event("stopped", why=str(error))
        again = given | {"RUN_ID": folder.name, "FAULT": ""}
        again = " ".join(f"{k}={shlex.quote(v)}" for k, v in again.items() if v)
        program = f"torchrun --standalone --nproc_per_node={machine.world}" if machine.world > 1 else "python"
        error.to_go_on = f"; to go on: {again} {program} {shlex.quote(sys.argv[0])}"
        raise
    finally:
        checkpoints.writing.result()
def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    try:
        default = "10min_16mb" if torch.cuda.is_available() else "10min_floppy"
        s, origins = load_settings(dict(os.environ), default)
        script = Path(__file__).read_bytes()
        if s.dry_run:
            print("\n".join(dry_run(s, origins, script)))
            return 0
        return run(s, origins, script)
    except ERRORS as error:
        rank = os.environ.get("RANK", "0")      # data can be bad for one rank alone, settings are so for all
        if rank == "0" or isinstance(error, (DataError, LostRank)):
            more = getattr(error, "to_go_on", "") + (f" (rank {rank})" if rank != "0" else "")
            with contextlib.suppress(OSError):
                print(f"train_gpt.py: {error}{more}", file=sys.stderr)
        if isinstance(error, LostRank):
            os._exit(error.exit_code)   # a thread that waits for a store which is gone would not end
        return getattr(error, "exit_code", 16)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

if __name__ == "__main__":
    sys.exit(main())
