"""Measure the trainer beside the machine's limit, in one process.

    python tests/bench.py step       tokens/s of the whole optimizer step, at the shape of the issue on speed
    python tests/bench.py step --reference    the same model written the plain way, for comparison
    MODEL_DIM=192 NUM_LAYERS=5 python tests/bench.py step      another shape: settings as in the trainer

Prints one `key: value` a line, then the same as one line of JSON. The limit is the rate of a 2048^3
bfloat16 product in the same process, measured before and after; the quotient is against the faster one.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt  # noqa: E402

SHAPE = dict(PRESET="10min_floppy", NUM_LAYERS="6", MODEL_DIM="256", NUM_HEADS="4", NUM_KV_HEADS="2", MLP_MULT="2",
             VOCAB_SIZE="1024", TRAIN_SEQ_LEN="512", TRAIN_BATCH_TOKENS="16384")


def peak_flops(side: int = 2048, repeats: int = 9) -> float:
    """Operations per second of a square bfloat16 product, median of `repeats`."""
    a, b = torch.randn(2, side, side).bfloat16()
    seconds = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    return 2 * side ** 3 / statistics.median(seconds[2:])


def plain_attention(q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor) -> torch.Tensor:
    """What the reference run uses: scaled_dot_product_attention, whatever the device."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


def step(repeats: int, reference: bool) -> dict[str, object]:
    """Whole optimizer steps on random tokens: forward, backward, gradient sum, Muon and Adam."""
    if reference:
        train_gpt.attention = plain_attention
    else:
        train_gpt.keep_freed_memory()
    s, _ = train_gpt.load_settings({**SHAPE, **{k: v for k, v in os.environ.items() if k in SETTING_NAMES}}, "smoke")
    dtype = torch.float32 if s.dtype == "float32" else torch.bfloat16
    machine = train_gpt.Machine(torch.device("cpu"), dtype=dtype, compile=s.compile)
    trainer = train_gpt.Trainer(s, machine)
    batch = torch.from_numpy(np.random.default_rng(0).integers(0, s.vocab_size, (s.batch_slots, s.slot_tokens + 1)))
    began = time.perf_counter()
    for at in range(2):
        trainer.step(batch, at, 1.0)
    compile_seconds, peaks, seconds = time.perf_counter() - began, [peak_flops()], []
    for at in range(repeats):
        began = time.perf_counter()
        trainer.step(batch, at, 1.0)
        seconds.append(time.perf_counter() - began)
    peaks.append(peak_flops())
    rate, peak = s.train_batch_tokens / statistics.median(seconds), max(peaks)
    return {"what": "plain scaled_dot_product_attention" if reference else "train_gpt.py", "threads": torch.get_num_threads(),
            "shape": f"L{s.num_layers} D{s.model_dim} H{s.num_heads} KV{s.num_kv_heads} MLP{s.mlp_mult} "
                     f"V{s.vocab_size} T{s.train_seq_len} batch {s.train_batch_tokens}",
            "steps": repeats, "step_ms_min_median_max": [round(f(seconds) * 1e3) for f in (min, statistics.median, max)],
            "tokens_per_second": round(rate), "peak_gflops": [round(p / 1e9) for p in peaks],
            "tokens_per_second_per_gflops": round(rate / peak * 1e9, 2),
            "mfu": round(rate * train_gpt.flops_per_token(s) / peak, 3), "first_steps_seconds": round(compile_seconds, 1),
            "peak_memory_mib": math.ceil(machine.peak_memory_mib())}


SETTING_NAMES = {name.upper() for name in vars(train_gpt.Settings())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--reference", action="store_true", help="plain attention instead of the trainer's own")
    args = parser.parse_args()
    rows = step(args.repeats, args.reference)
    for key, value in rows.items():
        print(f"{key}: {value}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
