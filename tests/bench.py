"""Measure the trainer on a CPU beside the machine's limit, in one process.

    python -m tests.bench step                tokens/s of the whole optimizer step
    python -m tests.bench step --against REV  the same of another commit, in turns, and the ratio
    python -m tests.bench eval                evaluation against training
    python -m tests.bench predictor           a text fed token by token against its evaluation in windows
    python -m tests.bench export              quantise, compress and read back the 17 M parameters
    python -m tests.bench loader              reading batches, and what a step waits for it
    python -m tests.bench start               seconds from the command to the first step
    python -m tests.bench profile             shares of the step: products, attention, elementwise, other
    python -m tests.bench profile --trace FILE    and when each happened, for https://ui.perfetto.dev

Settings are taken from the environment, the rest is the shape of SHAPE; --preset-shape takes that of PRESET.
Prints one `key: value` a line. The machine's limit is measured in the same process before and after, and the
larger one counts.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import re
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
VAL_TOKENS = 785_484  # of the demo corpus at 1024 pieces
STEP_SECONDS = 0.052  # of the reference on 8 H100


def load_script(path: Path) -> ModuleType:
    """The trainer at a path, under a name of its own: by names torch.compile finds what it guards."""
    spec = importlib.util.spec_from_file_location(f"train_gpt_{len(sys.modules)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_gpt = load_script(helpers.SCRIPT)


# --- the clock, and limits of the machine -----------------------------------------------------------------


def all_seconds(call: Call, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def median_seconds(call: Call, repeats: int) -> float:
    """Median seconds of a call, after two that do not count."""
    return statistics.median(all_seconds(call, 2 + repeats)[2:])


def processor_seconds(call: Call) -> float:
    """These other programs do not take away."""
    began = time.process_time()
    call()
    return time.process_time() - began


def peak_flops(side: int = 2048, dtype: torch.dtype | None = None) -> float:
    """Operations per second of a square product, median of nine; in the faster format if none is named."""
    a, b = torch.randn(2, side, side).to(dtype or faster_dtype())
    return 2 * side**3 / median_seconds(lambda: a @ b, 9)


@functools.cache
def faster_dtype() -> torch.dtype:
    """bfloat16, which some processors only emulate, or float32."""
    return max((torch.bfloat16, torch.float32), key=lambda dtype: peak_flops(512, dtype))


def peak_memory_mib() -> int:
    """Of this process."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return math.ceil(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


# --- what is measured -------------------------------------------------------------------------------------


def settings(script: ModuleType = train_gpt, **named: str) -> Any:
    """Settings of the benchmark: what the caller names, then what the environment says."""
    given = {name: value for name, value in os.environ.items() if name.lower() in vars(script.Settings())}
    return script.load_settings({"PRESET": FLOPPY, **named, **given}, FLOPPY)[0]


def make_trainer(s: Any, script: ModuleType = train_gpt) -> tuple[Any, torch.Tensor]:
    """A trainer on this process alone, and a batch of random tokens."""
    script.keep_freed_memory()
    dtype = faster_dtype() if s.dtype == "auto" else getattr(torch, s.dtype)
    trainer = script.Trainer(s, script.Machine(torch.device("cpu"), dtype=dtype, compile=s.compile))
    tokens = np.random.default_rng(0).integers(0, s.vocab_size, (s.batch_slots, s.slot_tokens + 1))
    return trainer, torch.from_numpy(tokens)


def step_call(trainer: Any, batch: torch.Tensor, script: ModuleType = train_gpt) -> Call:
    """A whole optimizer step; scripts until 7c7c01c were given the rate beside it."""
    if callable(getattr(script.Plan, "steps", None)):
        step = next(script.Plan(trainer.s).steps())._replace(number=1)
        return functools.partial(trainer.step, batch, step, 1.0)
    return functools.partial(trainer.step, batch, script.Plan(trainer.s).step(1))


def step_flops(s: Any) -> int:
    return train_gpt.step_flops(s)


def evaluated(s: Any) -> np.ndarray:
    """Random tokens of one forward pass of an evaluation, int64[rows, T + 1]."""
    rows = max(1, s.val_batch_size // s.batch_slots // s.eval_window)
    return np.random.default_rng(0).integers(0, s.vocab_size, (rows, s.eval_window + 1))


def started(script: ModuleType, s: Any, rows: int) -> Any:
    """A predictor that was given a token of `rows` streams: eager, as load_predictor has it."""
    trainer, _ = make_trainer(dataclasses.replace(s, compile=False), script)
    predictor = script.Predictor(trainer.model)
    predictor.start(rows)
    predictor.step(np.full(rows, 7))  # a cache that is empty knows no key before
    return predictor


def feed(predictor: Any, rows: int, filled: int) -> None:
    """A token of each stream, as if each had been given so many before."""
    for cache in predictor.caches:
        cache.position = filled
    predictor.step(np.full(rows, 7))


def step(args: argparse.Namespace) -> dict[str, Any]:
    """Whole optimizer steps on random tokens: forward, backward, gradient sum, Muon and Adam."""
    s = settings(**{} if args.preset_shape else SHAPE)
    trainer, batch = make_trainer(s)
    call = step_call(trainer, batch)
    all_seconds(call, 2)
    peaks = [peak_flops(dtype=trainer.machine.dtype)]
    seconds = all_seconds(call, args.repeats)
    peaks.append(peak_flops(dtype=trainer.machine.dtype))
    median, peak = statistics.median(seconds), max(peaks)
    rate = s.train_batch_tokens / median
    return {
        "figure": f"{rate / peak * 1e9:.2f} tokens/s per peak GFLOP/s",
        "mfu": f"{step_flops(s) / median / peak:.1%}",
        "step_ms_min_median_max": [round(each * 1e3) for each in (min(seconds), median, max(seconds))],
        "tokens_per_second": round(rate),
        "peak_gflops_before_after": [round(each / 1e9) for each in peaks],
    }


def evaluation(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens scored a second in windows side by side, against tokens trained a second; beside it what it
    would be if products took all the time and ran at their peak, the head's at that of float32."""
    s = settings(**SHAPE)
    trainer, batch = make_trainer(s)
    ids, training = evaluated(s), step_call(trainer, batch)
    before = median_seconds(training, args.repeats)
    scored = ids[:, 1:].size / median_seconds(lambda: trainer.model.nll(ids), args.repeats)
    head, forward = 2 * s.model_dim * s.vocab_size, step_flops(s) / s.train_batch_tokens / 3
    limit = 1 / ((forward - head) / peak_flops() + head / peak_flops(dtype=torch.float32))
    after = median_seconds(training, args.repeats)
    trained = s.train_batch_tokens * statistics.harmonic_mean([1 / before, 1 / after])
    return {
        "figure": f"{scored / trained:.2f} evaluation rate / training rate",
        "training_tokens_per_second": round(trained),
        "evaluation_tokens_per_second": round(scored),
        "at_the_peak_of_products": round(limit / trained, 2),
    }


def predictor(args: argparse.Namespace) -> dict[str, Any]:
    """The floppy's validation text fed token by token against its evaluation in windows, in turns, and the
    rate of one stream alone, while the window fills."""
    s = settings()
    trainer, _ = make_trainer(s)
    ids = evaluated(s)
    trainer.model.nll(ids)
    streams = {rows: started(train_gpt, s, rows) for rows in (STREAMS, 1)}
    fills = np.linspace(0, s.eval_window - 1, 6, dtype=int).tolist()
    spent = {"evaluation": 0.0, STREAMS: 0.0, 1: 0.0}
    for _ in range(args.repeats):
        spent["evaluation"] += processor_seconds(lambda: trainer.model.nll(ids))
        for rows, each in streams.items():
            for fill in fills:
                spent[rows] += processor_seconds(functools.partial(feed, each, rows, fill))
    text = VAL_TOKENS * spent["evaluation"] / args.repeats / ids[:, 1:].size
    steps = args.repeats * len(fills)
    fed = VAL_TOKENS * spent[STREAMS] / steps / STREAMS
    return {
        "figure": f"{fed / text:.2f} processor seconds, fed token by token / in windows",
        "streams": STREAMS,
        "fed_seconds": round(fed),
        "evaluation_seconds": round(text),
        "one_stream_tokens_per_second": round(steps / spent[1]),
    }


def export(args: argparse.Namespace) -> dict[str, Any]:
    """Quantise, compress and read back trained-like weights of the reference model."""
    s, rng = settings(PRESET="10min_16mb"), np.random.default_rng(0)
    weights = {
        p.name: rng.standard_normal(p.shape, dtype=np.float32) * np.float32(0.02)
        for p in train_gpt.parameter_table(s)
    }

    def whole() -> None:
        blob = train_gpt.encode_artifact(s, weights, bytes(32).hex())
        train_gpt.decode_artifact(blob, "benchmark")

    seconds = median_seconds(whole, args.repeats)
    params = sum(value.size for value in weights.values())
    return {"figure": f"{seconds:.2f} seconds for encode and decode", "params": params}


def loader(args: argparse.Namespace) -> dict[str, Any]:
    """A batch of the reference preset, 393,216 tokens, from a warm file: by one rank, and by one of eight."""
    with tempfile.TemporaryDirectory() as folder:
        s = settings(PRESET="10min_16mb", VOCAB_SIZE="65536", DATA_PATH=folder)
        tokens = np.random.default_rng(0).integers(0, 1024, 40_000_000).astype(np.uint16)
        helpers.write_shards(Path(folder), "train", [tokens], extended=False)
        stream = train_gpt.TokenStream(s, "train", bytes(32).hex(), 1, [])

        def seconds(world: int) -> float:
            machine = train_gpt.Machine(torch.device("cpu"), world=world)
            reader = train_gpt.BatchReader(s, stream, machine, [])
            steps = itertools.count()
            return median_seconds(lambda: reader.read(next(steps)), 100)

        alone, of_eight = seconds(1), seconds(8)
    return {
        "figure": f"{of_eight / STEP_SECONDS:.2%} of a step, by one of eight ranks",
        "milliseconds_of_one_rank": round(1e3 * alone, 2),
        "milliseconds_of_one_of_eight": round(1e3 * of_eight, 2),
    }


def seconds_to_step_1(env: dict[str, str], cwd: str) -> float:
    """From the command to the line of the first step."""
    demo = {
        "DATA_PATH": str(helpers.ROOT / "data/datasets/demo_sp1024"),
        "TOKENIZER_PATH": str(helpers.ROOT / "data/tokenizers/demo_1024_bpe.model"),
    }
    env = {**os.environ, **demo, "VAL_TOKENS_LIMIT": "8192", "MAX_WALLCLOCK_SECONDS": "0", **env}
    began, first = time.perf_counter(), math.nan
    command = [sys.executable, str(helpers.SCRIPT)]
    with subprocess.Popen(command, cwd=cwd, text=True, env=env, stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if line.startswith("step:1/"):
                first = time.perf_counter() - began
    if process.returncode:
        sys.exit(f"bench.py: the run ended with {process.returncode}: {line}")
    return first


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the command to the first step's line: smoke, and the floppy preset with its compile cache
    empty, full, and eager."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"PRESET": FLOPPY, "ITERATIONS": "1", "TORCHINDUCTOR_CACHE_DIR": folder + "/cache"}
        first, *again = (seconds_to_step_1(env, folder) for _ in range(4))
        eager = seconds_to_step_1({**env, "COMPILE": "0"}, folder)
        smoke = [seconds_to_step_1({**env, "PRESET": "smoke"}, folder) for _ in range(3)]
    return {
        "figure": f"{statistics.median(smoke):.1f} seconds to the first step, smoke",
        "floppy_cache_full_seconds": [round(seconds, 1) for seconds in again],
        "floppy_cache_empty_seconds": round(first, 1),
        "floppy_eager_seconds": round(eager, 1),
    }


GROUPS = {
    "weight products (mm)": r"aten::(mm|addmm)$",
    "attention products (bmm)": r"aten::bmm$",
    "Newton-Schulz, second and third product (baddbmm)": r"aten::baddbmm",
    "elementwise, compiled": r".*cpp_fused",
    "elementwise, eager": r"aten::(copy_|add_?|mul_?|sub_?|div_?|cat|lerp_|sum|fill_)$",
    "dispatch and other": "",
}


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Where the time of a step goes: the own time of each operation, Inductor's kernels apart."""
    import torch._inductor.config as inductor

    inductor.cpp.enable_kernel_profile = True
    trainer, batch = make_trainer(settings(**{} if args.preset_shape else SHAPE))
    call = step_call(trainer, batch)
    all_seconds(call, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as found:
        all_seconds(call, 3)
    if args.trace:
        found.export_chrome_trace(str(args.trace))
    shares = dict.fromkeys(GROUPS, 0.0)
    for event in found.key_averages():
        group = next(name for name, pattern in GROUPS.items() if re.match(pattern, event.key))
        shares[group] += event.self_cpu_time_total
    total = sum(shares.values())
    table = found.key_averages().table(sort_by="self_cpu_time_total", row_limit=10, max_name_column_width=50)
    return {
        "step_ms": round(total / 3 / 1e3),
        **{name: f"{share / total:.1%}" for name, share in shares.items()},
        "costliest": f"\n{table}",
    }


# --- another commit ---------------------------------------------------------------------------------------


def one_call(script: ModuleType, args: argparse.Namespace) -> Call:
    """A step, a forward pass of the evaluation, or a token of all streams with half of the window filled."""
    preset = args.preset_shape or args.what == "predictor"
    s = settings(script, **{} if preset else SHAPE)
    if args.what == "predictor":
        return functools.partial(feed, started(script, s, STREAMS), STREAMS, s.eval_window // 2)
    trainer, batch = make_trainer(s, script)
    if args.what == "eval":
        return functools.partial(trainer.model.nll, evaluated(s))
    return step_call(trainer, batch, script)


def against(args: argparse.Namespace) -> dict[str, Any]:
    """One call of this tree and one of another commit in turns, in one process; the ratio of their speeds.

    Processes that follow one another are no pair: on a shared host the second was up to 5 % faster.
    """
    if args.what not in ("step", "eval", "predictor"):
        sys.exit(f"bench.py: --against compares step, eval or predictor, not {args.what}")
    show = ["git", "-C", str(helpers.ROOT), "show", f"{args.against}:train_gpt.py"]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "train_gpt.py")
        other.write_bytes(subprocess.run(show, check=True, stdout=subprocess.PIPE).stdout)
        calls = [one_call(script, args) for script in (train_gpt, load_script(other))]
    for call in calls:
        all_seconds(call, 3)  # compiled, warm
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


# --- main -------------------------------------------------------------------------------------------------


WHAT = {
    "step": step,
    "eval": evaluation,
    "predictor": predictor,
    "export": export,
    "loader": loader,
    "start": start,
    "profile": profile,
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--repeats", type=int, default=10, help="how often, for the median")
    parser.add_argument("--preset-shape", action="store_true", help="step, profile: the shape of PRESET")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="profile: write what happened when")
    parser.add_argument("--against", metavar="REV", help="another commit to compare with")
    args = parser.parse_args()
    rows = against(args) if args.against else WHAT[args.what](args)
    rows |= {"threads": torch.get_num_threads(), "peak_memory_mib": peak_memory_mib()}
    for key, value in rows.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
