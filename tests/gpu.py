"""Measure the trainer on one GPU, by the GPU's own clock.

    python -m tests.gpu peak         products and copies, the limits of all else
    python -m tests.gpu step         an optimizer step on random tokens
    python -m tests.gpu predictor    a token of all streams, by number of streams and format

Settings are taken from the environment, as in `SHORT_WINDOW=512 python -m tests.gpu step`. Times are medians.
"""

import argparse
import functools
import math
import os
import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch

import train_gpt

GPU = torch.device("cuda")
VAL_TOKENS = 62_000_000  # of FineWeb's validation text


def milliseconds(call: Callable, repeats: int = 12, warm: int = 3) -> float:
    """Median milliseconds between two events around a call."""
    for _ in range(warm):
        call()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def peak() -> None:
    side = 8192
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.randn(2, side, side, device=GPU).to(dtype)
        speed = 2 * side**3 / milliseconds(lambda a=a, b=b: a @ b) / 1e9
        print(f"{dtype}: {speed:.0f} TFLOP/s")
    source = torch.randn(2**29, device=GPU)
    target = torch.empty_like(source)
    speed = 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6
    print(f"copy: {speed:.0f} GB/s, read and written")


def step() -> None:
    s = train_gpt.load_settings(os.environ, "10min_16mb")[0]
    machine = train_gpt.Machine(GPU, dtype=torch.bfloat16, compile=s.compile)
    trainer = train_gpt.Trainer(s, machine)
    tokens = np.random.default_rng(0).integers(0, s.vocab_size, (s.batch_slots, s.slot_tokens + 1))
    batch = machine.tensor(tokens)
    plan = train_gpt.Plan(s)
    one_step = functools.partial(trainer.step, batch, plan.step(0))
    found = milliseconds(one_step)
    print(f"step: {found:.2f} ms, {s.train_batch_tokens / found / 1e3:.3f} million tokens a second")
    memory = torch.cuda.max_memory_allocated() >> 20
    print(f"products: {plan.flops / found / 1e9:.0f} TFLOP/s, memory: {memory} MiB")


def predictor() -> None:
    """With the window full, as it is but for the first tokens of each stream."""
    s = train_gpt.load_settings(os.environ, "10min_16mb")[0]
    torch.backends.cuda.enable_cudnn_sdp(False)  # as load_predictor does
    for dtype in (torch.bfloat16, torch.float32):
        model = train_gpt.Trainer(s, train_gpt.Machine(GPU, dtype=dtype)).model
        for rows in (256, 512, 1024):
            its = train_gpt.Predictor(model)
            its.start(rows)
            ids = np.full(rows, 7)
            its.step(ids)
            for cache in its.caches:
                cache.keys.normal_()
                cache.values.normal_()
                cache.position = math.ceil(2.5 * s.eval_window)
            found = milliseconds(lambda its=its, ids=ids: its.step(ids))
            seconds = VAL_TOKENS / rows * found / 1e3
            text = f"{VAL_TOKENS / 1e6:.0f} million tokens in {seconds:.0f} s"
            print(f"{dtype}, {rows} streams: {found:.2f} ms, {text}")
            del its


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    whats = {"peak": peak, "step": step, "predictor": predictor}
    parser.add_argument("what", choices=whats)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tests.gpu: torch finds no GPU here; python -m tests.bench measures a CPU")
    whats[args.what]()


if __name__ == "__main__":
    main()
