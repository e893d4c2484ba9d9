"""Measure the trainer on a CPU, alone or beside another commit, in one process.

    python -m tests.bench step                    a whole optimizer step, against the machine's limit
    python -m tests.bench eval                    a forward pass of the evaluation
    python -m tests.bench predictor               a token of each of 256 streams, with the window half full
    python -m tests.bench step --against REV      this tree and a commit in turns, and the ratio of speeds

Settings are taken from the environment, the rest is the shape of SHAPE; --preset-shape takes that of PRESET.
Prints one `key: value` a line.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.kit import helpers

Call = Callable[[], Any]
FLOPPY = "floppy"
SHAPE = helpers.pairs("""
    NUM_LAYERS=6 MODEL_DIM=256 NUM_HEADS=4 NUM_KV_HEADS=2 MLP_MULT=2 VOCAB_SIZE=1024
    TRAIN_SEQ_LEN=512 TRAIN_BATCH_TOKENS=16384 BATCH_SLOTS=8 VAL_BATCH_SIZE=32768
""")
STREAMS = 256  # of a predictor on a CPU


def load_script(path: Path) -> ModuleType:
    """The trainer at a path, under a name of its own: by names torch.compile finds what it guards."""
    spec = importlib.util.spec_from_file_location(f"train_gpt_{len(sys.modules)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the clock, and limits of the machine -----------------------------------------------------------------


def all_seconds(call: Call, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def peak_flops(side: int = 2048, dtype: torch.dtype | None = None) -> float:
    """Operations per second of a square product, median of nine; in the faster format if none is named."""
    a, b = torch.randn(2, side, side).to(dtype or faster_dtype())
    seconds = all_seconds(lambda: a @ b, 11)[2:]
    return 2 * side**3 / statistics.median(seconds)


@functools.cache
def faster_dtype() -> torch.dtype:
    """bfloat16, which some processors only emulate, or float32."""
    return max((torch.bfloat16, torch.float32), key=lambda dtype: peak_flops(512, dtype))


def peak_memory_mib() -> int:
    """Of this process."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return math.ceil(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


# --- what is measured -------------------------------------------------------------------------------------


def make_trainer(script: ModuleType, s: Any) -> Any:
    """A trainer on this process alone."""
    script.keep_freed_memory()
    dtype = faster_dtype() if s.dtype == "auto" else getattr(torch, s.dtype)
    return script.Trainer(s, script.Machine(torch.device("cpu"), dtype=dtype, compile=s.compile))


def random_tokens(s: Any, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, s.vocab_size, shape)


def step(script: ModuleType, s: Any) -> tuple[Call, int]:
    """Forward, backward, gradient sum, Muon and Adam."""
    trainer = make_trainer(script, s)
    batch = torch.from_numpy(random_tokens(s, s.batch_slots, s.slot_tokens + 1))
    first = next(script.Plan(s).steps())._replace(number=1)
    return functools.partial(trainer.step, batch, first, 1.0), s.train_batch_tokens


def evaluation(script: ModuleType, s: Any) -> tuple[Call, int]:
    rows = max(1, s.val_batch_size // s.batch_slots // s.eval_window)
    ids = random_tokens(s, rows, s.eval_window + 1)
    model = make_trainer(script, s).model
    return functools.partial(model.nll, ids), rows * s.eval_window


def predictor(script: ModuleType, s: Any) -> tuple[Call, int]:
    """Eager, as load_predictor has it."""
    model = make_trainer(script, dataclasses.replace(s, compile=False)).model
    its = script.Predictor(model)
    its.start(STREAMS)
    ids = np.full(STREAMS, 7)
    its.step(ids)  # a cache that is empty knows no key before

    def feed() -> None:
        for cache in its.caches:
            cache.position = s.eval_window // 2
        its.step(ids)

    return feed, STREAMS


WHAT = {"step": step, "eval": evaluation, "predictor": predictor}


def prepared(path: Path, args: argparse.Namespace) -> tuple[ModuleType, Any, Call, int]:
    """The script at a path, its settings, a call that is compiled and warm, and the call's tokens."""
    script = load_script(path)
    given = {name: value for name, value in os.environ.items() if name.lower() in script.ROWS}
    shape = {} if args.preset_shape else SHAPE
    s = script.load_settings({"PRESET": FLOPPY, **shape, **given}, FLOPPY)[0]
    call, tokens = WHAT[args.what](script, s)
    all_seconds(call, 3)
    return script, s, call, tokens


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and tokens per second; of a step also the share of the peak of products."""
    script, s, call, tokens = prepared(helpers.SCRIPT, args)
    before = peak_flops()
    seconds = all_seconds(call, args.repeats)
    peak = max(before, peak_flops())
    median = statistics.median(seconds)
    found = {
        "tokens_per_second": round(tokens / median),
        "ms_min_median_max": [round(each * 1e3, 1) for each in (min(seconds), median, max(seconds))],
        "peak_gflops": round(peak / 1e9),
    }
    if args.what == "step":
        flops = script.step_flops(s, s.train_seq_len, s.batch_slots)
        found |= {"mfu": f"{flops / median / peak:.1%}"}
    return found


def against(args: argparse.Namespace) -> dict[str, Any]:
    """The ratio of the speeds of two trees.

    Processes that follow one another are no pair: on a shared host the second was up to 5 % faster.
    """
    show = ["git", "-C", str(helpers.ROOT), "show", f"{args.against}:train_gpt.py"]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "train_gpt.py")
        other.write_bytes(subprocess.run(show, check=True, stdout=subprocess.PIPE).stdout)
        calls = [prepared(path, args)[2] for path in (helpers.SCRIPT, other)]
    seconds = np.zeros((args.repeats, 2))
    for number, row in enumerate(seconds):
        for which in (0, 1) if number % 2 else (1, 0):
            row[which] = all_seconds(calls[which], 1)[0]
    ratios = seconds[:, 1] / seconds[:, 0]
    return {
        "figure": f"{np.median(ratios):.3f} speed of this tree / {args.against}, {args.what}",
        "quartiles": np.quantile(ratios, (0.25, 0.5, 0.75)).round(3).tolist(),
        "median_ms_this_that": (1e3 * np.median(seconds, 0)).round(1).tolist(),
    }


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--repeats", type=int, default=10, help="how often, for the median")
    parser.add_argument("--preset-shape", action="store_true", help="the shape of PRESET")
    parser.add_argument("--against", metavar="REV", help="another commit to compare with")
    args = parser.parse_args()
    rows = against(args) if args.against else alone(args)
    rows |= {"threads": torch.get_num_threads(), "peak_memory_mib": peak_memory_mib()}
    for key, value in rows.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
