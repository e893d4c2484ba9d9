"""Time what torch has for causal attention in a window, side by side, at the shapes of a training step.

\b
    python -m tests.bench_attention                        on the GPU, all rows
    python -m tests.bench_attention --only 'varlen|flex$'  rows whose name matches
    DEVICE=cpu python -m tests.bench_attention             tiny shapes: do the calls exist and agree?

Each row is a process of its own. It compiles beside others, holds the last sequence's last key head against
float32, and waits. Then one after the other is timed. A line has the median milliseconds of the forward pass,
and of forward and backward pass; their TFLOP/s, by 4 and 14 operations for each component of a pair that is
seen; and the relative errors of the output and of the worst gradient. A row that fails says so in its line.
On a CPU nothing is compiled, and flex_attention has no backward pass.
"""

import functools
import multiprocessing
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any, NamedTuple

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the rows are processes already
os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # looking for a GPU leaves CUDA unbegun: rows fork
import click
import torch
import torch._inductor.compile_fx  # loaded once, for all rows
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import train_gpt

Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # q[B, T, H, K], k and v[B, T, G, K]: of q's shape
Options = dict[str, Any]
LIMIT = 0.02  # of the relative error: bfloat16 has 3 digits


class Shape(NamedTuple):
    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    window: int  # 0: none

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, in one head and sequence."""
        window = self.window or self.tokens
        return sum(min(token + 1, window) for token in range(self.tokens))


SIZES = {"cuda": (12, 4096, (0, 512, 256)), "cpu": (2, 256, (0, 64))}
HEADS = ((8, 4, 64), (4, 2, 128))


# --- the candidates: each makes a call for a shape --------------------------------------------------------


def today(shape: Shape) -> Call:
    """What train_gpt.py does."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = torch.unflatten(q, 2, (shape.kv_heads, -1))
        return train_gpt.attention(grouped, k, v, shape.window or shape.tokens).flatten(2, 3)

    return call


def sdpa(shape: Shape, backend: Any, implementation: str = "") -> Call:
    if shape.window:
        raise NotImplementedError("has no window")
    if implementation:
        attention.activate_flash_attention_impl(implementation)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with attention.sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    return call


def varlen(shape: Shape, repeat: bool, **options: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeat:
            k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, dim=2) for x in (k, v))
        ends = torch.arange(0, q.size(0) * q.size(1) + 1, q.size(1), dtype=torch.int32, device=q.device)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        window = (shape.window - 1, 0) if shape.window else (-1, 0)
        y = varlen_attn(*flat, ends, ends, q.size(1), q.size(1), window_size=window, **options)
        return y.view_as(q)  # type: ignore[union-attr]

    return call


@functools.cache
def block_mask(tokens: int, window: int, device: str, block: int) -> BlockMask:
    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window)

    return create_block_mask(seen, None, None, tokens, tokens, device=device, BLOCK_SIZE=block)


def flex(shape: Shape, options: Options, block: int = 128) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        kernel: Any = options
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=kernel)
        return out.transpose(1, 2)  # type: ignore[union-attr]

    mask = block_mask(shape.tokens, shape.window or shape.tokens, device_of(shape), block)
    return call


def flash_4(shape: Shape) -> Call:
    """The package flash-attn-4 by its own function: torch 2.11 has no way to its windows' backward pass."""
    from flash_attn.cute.interface import flash_attn_func  # type: ignore[import-not-found]

    window = (shape.window - 1, 0) if shape.window else (None, None)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(q, k, v, causal=True, window_size=window)
        return found[0] if isinstance(found, tuple) else found

    return call


def forward_tile(rows: int, columns: int, warps: int, stages: int) -> Options:
    return dict(fwd_BLOCK_M=rows, fwd_BLOCK_N=columns, fwd_num_warps=warps, fwd_num_stages=stages)


def backward_tile(queries: int, keys: int, warps: int, stages: int) -> Options:
    """The inner loop over queries for keys and values, and the one over keys for queries."""
    tile = dict(bwd_BLOCK_M1=queries, bwd_BLOCK_N1=keys, bwd_BLOCK_M2=keys, bwd_BLOCK_N2=queries)
    return tile | dict(bwd_num_warps=warps, bwd_num_stages=stages)


SAFE = dict(ROWS_GUARANTEED_SAFE=True, BLOCKS_ARE_CONTIGUOUS=True, PRESCALE_QK=True)  # true of these masks
CANDIDATES: dict[str, Callable[[Shape], Call]] = {
    "today": today,
    "sdpa cudnn": lambda s: sdpa(s, attention.SDPBackend.CUDNN_ATTENTION),
    "sdpa flash": lambda s: sdpa(s, attention.SDPBackend.FLASH_ATTENTION),
    "sdpa fa4": lambda s: sdpa(s, attention.SDPBackend.FLASH_ATTENTION, "FA4"),
    "varlen repeated": lambda s: varlen(s, repeat=True),
    "varlen shared": lambda s: varlen(s, repeat=False),  # torch 2.11 has no check, its kernel takes them
    "varlen gqa": lambda s: varlen(s, repeat=False, enable_gqa=True),  # torch 2.12
    "flex": lambda s: flex(s, {}),
    "flex safe": lambda s: flex(s, SAFE),
    "flex tma": lambda s: flex(s, SAFE | dict(USE_TMA=True)),
    "flex 128x64": lambda s: flex(s, SAFE | forward_tile(128, 64, 4, 3) | backward_tile(64, 64, 4, 3)),
    "flex 64x64": lambda s: flex(s, SAFE | forward_tile(64, 64, 4, 3) | backward_tile(64, 64, 4, 2), 64),
    "flex 128x128": lambda s: flex(s, SAFE | forward_tile(128, 128, 8, 2) | backward_tile(64, 128, 8, 2)),
    "flex fa4": lambda s: flex(s, dict(BACKEND="FLASH")),
    "fa4": flash_4,
}
EAGER = {"fa4"}  # torch.compile would break the graph


# --- one row: a process -----------------------------------------------------------------------------------


def device_of(shape: Shape) -> str:
    return "cuda" if shape.tokens == SIZES["cuda"][1] else "cpu"


def reference(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention in float32, of heads that share one key head."""
    places = torch.arange(q.size(1), device=q.device)
    seen = places <= places[:, None]
    if window:
        seen &= places > places[:, None] - window
    scores = torch.einsum("bqhk,bsgk->bhqs", q, k) * q.size(-1) ** -0.5
    return torch.einsum("bhqs,bsgk->bqhk", scores.where(seen, -torch.inf).softmax(-1), v)


def errors(call: Call, inputs: list[Tensor], upstream: Tensor, window: int) -> list[float]:
    """Relative, of the output and of the gradients, in the last sequence and key head."""
    shared = inputs[0].size(2) // inputs[1].size(2)
    inside = [(slice(-1, None), slice(None), slice(-heads, None)) for heads in (shared, shared, 1, 1)]
    exact = [x[at].detach().float().requires_grad_() for x, at in zip(inputs, inside[1:])]
    right = [reference(*exact, window)]
    out = call(*inputs)
    found = [out]
    if out.requires_grad:
        right += torch.autograd.grad(right[0], exact, upstream[inside[0]].float())
        found += torch.autograd.grad(out, inputs, upstream)
    return [float(((x[at] - y).norm() / y.norm()).detach()) for x, y, at in zip(found, right, inside)]


def median_ms(call: Callable[[], Any], device: str, repeats: int) -> float:
    for _ in range(3):
        call()
    if device == "cpu":
        return 1e3 * statistics.median(elapsed(call) for _ in range(repeats))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def elapsed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(name: str, shape: Shape, repeats: int) -> Iterator[str]:
    """First that the row is ready, then, once it is asked again, the row."""
    device = device_of(shape)
    torch.manual_seed(0)
    call = CANDIDATES[name](shape)
    if device == "cuda" and name not in EAGER:
        call = torch.compile(call, dynamic=False)
    backward = device == "cuda" or not name.startswith("flex")  # which has none on a CPU
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    *inputs, upstream = (
        torch.randn(*shape[:2], heads, shape.width, device=device, dtype=torch.bfloat16) for heads in sizes
    )
    for x in inputs:
        x.requires_grad_(backward)
    found = errors(call, inputs, upstream, shape.window)
    if not max(found) < LIMIT:  # nor NaN
        raise ArithmeticError(f"wrong: relative errors {', '.join(f'{each:.2g}' for each in found)}")
    if device == "cuda":
        torch.cuda.empty_cache()
    yield "ready"
    calls = [lambda: call(*inputs), lambda: torch.autograd.grad(call(*inputs), inputs, upstream)]
    text = ""
    for run, products in zip(calls[: 1 + backward], (4, 14)):
        ms = median_ms(run, device, repeats)
        operations = products * shape.pairs * shape.width * shape.heads * shape.sequences
        text += f"{ms:10.3f}{operations / ms / 1e9:8.1f}"
    yield text.ljust(36) + f"{found[0]:10.1e}" + (f"{max(found[1:]):10.1e}" if backward else "")


def work(pipe: Any, *row: Any) -> None:
    """Answer each request with the next that measure has, or with the error."""
    warnings.simplefilter("ignore")
    try:
        for text in measure(*row):
            pipe.send(text)
            pipe.recv()
    except Exception as error:
        while error.__cause__ and isinstance(error.__cause__, Exception):
            error = error.__cause__
        lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        pipe.send("failed: " + " ".join(lines)[:200])


# --- all rows ---------------------------------------------------------------------------------------------


class Row:
    """A candidate at a shape, and its process."""

    start = "fork"  # torch is loaded, and CUDA is not begun

    def __init__(self, name: str, shape: Shape, repeats: int) -> None:
        self.name, self.shape, self.began = name, shape, time.monotonic()
        context = multiprocessing.get_context(self.start)
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, name, shape, repeats), daemon=True)
        self.process.start()
        other.close()

    def answer(self, seconds: float) -> str:
        """What it says within so many seconds of its begin; one that says nothing is ended."""
        try:
            if self.pipe.poll(max(0.0, seconds - (time.monotonic() - self.began))):
                return str(self.pipe.recv())
        except EOFError:
            self.process.join(5)
            return f"failed: its process ended with {self.process.exitcode}"
        self.process.kill()
        return f"failed: not done after {seconds:.0f} s"

    def time(self, seconds: float) -> str:
        self.began = time.monotonic()
        self.pipe.send("go on")
        text = self.answer(seconds)
        self.process.kill()
        return text

    def show(self, text: str) -> None:
        shape, window = self.shape, self.shape.window or "-"
        print(
            f"{shape.heads:5}{shape.kv_heads:4}{shape.width:6}{window:>7}  {self.name:16}{text}", flush=True
        )


def prepare(waiting: list[tuple[str, Shape]], jobs: int, seconds: float, repeats: int) -> list[Row]:
    """The rows that compiled and agree, in the order given; the others are shown."""
    order, running, ready = list(waiting), [], []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(Row(*waiting.pop(0), repeats))
        told = connection.wait([row.pipe for row in running], timeout=0.5)
        for row in list(running):
            if row.pipe in told or time.monotonic() - row.began > seconds:
                running.remove(row)
                text = row.answer(seconds)
                if text == "ready":
                    ready.append(row)
                else:
                    row.show(text)
    return sorted(ready, key=lambda row: order.index((row.name, row.shape)))


@click.command(help=__doc__)
@click.option("--device", type=click.Choice([*SIZES]), envvar="DEVICE", default="cuda", show_default=True)
@click.option("--only", default="", metavar="REGEX", help="rows whose name matches")
@click.option("--jobs", default=os.cpu_count() or 1, show_default="cores", help="rows that compile at once")
@click.option("--seconds", default=60.0, show_default=True, help="in which a row compiles, and is timed")
@click.option("--spawn", is_flag=True, help="rows load torch themselves: slower, where a fork finds no GPU")
@click.option("--repeats", default=30, show_default=True, help="how often, for the median")
def main(device: str, only: str, jobs: int, seconds: float, spawn: bool, repeats: int) -> None:
    Row.start = "spawn" if spawn else "fork"
    sequences, tokens, windows = SIZES[device]
    shapes = [Shape(sequences, tokens, *heads, window) for heads in HEADS for window in windows]
    names = [name for name in CANDIDATES if re.search(only, name)]
    windowless = [name for name in names if name.startswith("sdpa")]
    rows = [(name, s) for s in shapes for name in names if not (s.window and name in windowless)]
    print(f"torch {torch.__version__}, {sequences} sequences of {tokens} tokens, bfloat16, {len(rows)} rows")
    print("heads  kv width window  call                   fwd TFLOP/s   fwd+bwd TFLOP/s  err out   err grad")
    began = time.monotonic()
    ready = prepare(rows, jobs, seconds, repeats)
    print(f"compiled: {len(ready)} rows in {time.monotonic() - began:.0f} s", flush=True)
    for row in ready:
        row.show(row.time(seconds))


if __name__ == "__main__":
    main()
