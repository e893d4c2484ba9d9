"""Measure the trainer beside the machine's limit, in one process.

    python -m tests.bench step                tokens/s of the whole optimizer step
    python -m tests.bench step --reference    the same with torch's scaled_dot_product_attention
    python -m tests.bench eval                evaluation against training
    python -m tests.bench predictor           a text fed token by token against its evaluation in windows
    python -m tests.bench passes FOLDER ...   records fed token by token, in turns
    python -m tests.bench export              quantise, compress and read back the 17 M parameters
    python -m tests.bench loader              reading batches: its rate, and what a step waits for it
    python -m tests.bench start               seconds from the command to the first step
    python -m tests.bench profile             shares of the step: products, attention, elementwise, other
    python -m tests.bench profile --steps 10:15 --trace FILE    and what happens in steps 10 to 14, for
                                              https://ui.perfetto.dev
    python -m tests.bench step --against REV  the same of another commit, in turns, and the ratio

Settings are taken from the environment, the rest is the shape of SHAPE; `step --preset-shape` takes that of
PRESET. Prints one `key: value` a line, then the same as one line of JSON. Limits are measured in the same
process before and after, and the larger one counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
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
import torch.nn.functional as F

from data import shards

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt.py"
DEMO = {
    "DATA_PATH": str(ROOT / "data/datasets/demo_sp1024"),
    "TOKENIZER_PATH": str(ROOT / "data/tokenizers/demo_1024_bpe.model"),
}


def load_script(path: Path) -> ModuleType:
    """The trainer at a path, under a name of its own: by names torch.compile finds what it guards."""
    spec = importlib.util.spec_from_file_location(f"train_gpt_{len(sys.modules)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_gpt = load_script(SCRIPT)
FLOPPY = "floppy"
SHAPE = """
    NUM_LAYERS=6 MODEL_DIM=256 NUM_HEADS=4 NUM_KV_HEADS=2 MLP_MULT=2 VOCAB_SIZE=1024
    TRAIN_SEQ_LEN=512 TRAIN_BATCH_TOKENS=16384 BATCH_SLOTS=8 VAL_BATCH_SIZE=32768
"""
SHAPE = dict(word.split("=") for word in SHAPE.split())
SETTING_NAMES = {name.upper() for name in vars(train_gpt.Settings())}


# --- limits of the machine --------------------------------------------------------------------------------


def median_seconds(call: Callable[[], Any], repeats: int, warm: int = 1) -> float:
    """Median seconds of a call, after some that do not count."""
    return statistics.median(all_seconds(call, repeats, warm))


def all_seconds(call: Callable[[], Any], repeats: int, warm: int = 1) -> list[float]:
    seconds = []
    for _ in range(warm + repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds[warm:]


def peak_flops(side: int = 2048, dtype: torch.dtype | None = None) -> float:
    """Operations per second of a square product, median of nine; in the faster format if none is named."""
    a, b = torch.randn(2, side, side).to(dtype or faster_dtype())
    return 2 * side**3 / median_seconds(lambda: a @ b, 9, 2)


@functools.cache
def faster_dtype() -> torch.dtype:
    """bfloat16, which some processors only emulate, or float32."""
    return max((torch.bfloat16, torch.float32), key=lambda dtype: peak_flops(512, dtype))


def peak_memory_mib() -> int:
    """Of this process."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return math.ceil(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


def copy_bandwidth(mib: int = 256) -> float:
    """Bytes per second of a copy in memory: read and written count once."""
    a = torch.ones(mib * 2**18)
    b = torch.empty_like(a)
    return mib * 2**20 / median_seconds(lambda: b.copy_(a), 7)


# --- what is measured -------------------------------------------------------------------------------------


def settings(**named: str) -> train_gpt.Settings:
    """Settings of the benchmark: what the caller names, then what the environment says."""
    given = {name: value for name, value in os.environ.items() if name in SETTING_NAMES}
    return train_gpt.load_settings({"PRESET": FLOPPY, **named, **given}, FLOPPY)[0]


def make_trainer(s: train_gpt.Settings) -> tuple[train_gpt.Trainer, torch.Tensor]:
    """A trainer on this process alone, and a batch of random tokens."""
    train_gpt.keep_freed_memory()
    dtype = faster_dtype() if s.dtype == "auto" else getattr(torch, s.dtype)
    trainer = train_gpt.Trainer(s, train_gpt.Machine(torch.device("cpu"), dtype=dtype, compile=s.compile))
    tokens = np.random.default_rng(0).integers(0, s.vocab_size, (s.batch_slots, s.slot_tokens + 1))
    return trainer, torch.from_numpy(tokens)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: float = math.inf
) -> torch.Tensor:
    """scaled_dot_product_attention, whatever the device."""
    shape = q.shape
    q, k, v = (x.transpose(1, 2) for x in (q.flatten(2, 3), k, v))
    mask = None
    if window < q.size(2):
        places = torch.arange(q.size(2), device=q.device)
        distance = places[:, None] - places
        mask = (distance >= 0) & (distance < window)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2).reshape(shape)


def step_call(trainer: train_gpt.Trainer, batch: torch.Tensor) -> Callable[[], Any]:
    """A whole optimizer step; scripts until 2915aee are told its number alone."""
    step = 1
    if callable(getattr(train_gpt.Plan, "steps", None)):
        step = next(train_gpt.Plan(trainer.s).steps())._replace(number=1)
    return functools.partial(trainer.step, batch, step, 1.0)


def step_flops(s: train_gpt.Settings) -> int:
    return train_gpt.step_flops(s, s.train_seq_len, s.batch_slots)


def fill_caches(predictor: train_gpt.Predictor, tokens: int) -> None:
    """As if each stream had been given so many tokens."""
    for cache in predictor.caches:
        cache.position = tokens


def shape_of(s: train_gpt.Settings) -> str:
    return (
        f"L{s.num_layers} D{s.model_dim} H{s.num_heads} KV{s.num_kv_heads} MLP{s.mlp_mult} "
        f"V{s.vocab_size} T{s.train_seq_len} batch {s.train_batch_tokens}"
    )


def step(args: argparse.Namespace) -> dict[str, Any]:
    """Whole optimizer steps on random tokens: forward, backward, gradient sum, Muon and Adam."""
    if args.reference:
        train_gpt.attention = plain_attention
    s = settings(**{} if args.preset_shape else SHAPE)
    trainer, batch = make_trainer(s)
    call = step_call(trainer, batch)
    first = sum(all_seconds(call, 2, 0))
    peaks = [peak_flops(dtype=trainer.machine.dtype)]
    seconds = all_seconds(call, args.repeats, 0)
    peaks.append(peak_flops(dtype=trainer.machine.dtype))
    rate, peak = s.train_batch_tokens / statistics.median(seconds), max(peaks)
    return {
        "figure": round(rate / peak * 1e9, 2),
        "unit": "tokens/s per peak GFLOP/s",
        "shape": shape_of(s),
        "attention": "scaled_dot_product_attention" if args.reference else "the trainer's",
        "step_ms_min_median_max": [round(f(seconds) * 1e3) for f in (min, statistics.median, max)],
        "tokens_per_second": round(rate),
        "peak_gflops_before_after": [round(p / 1e9) for p in peaks],
        "mfu": round(rate / s.train_batch_tokens * step_flops(s) / peak, 3),
        "first_two_steps_seconds": round(first, 1),
        "peak_memory_mib": peak_memory_mib(),
    }


def evaluation(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens scored a second in windows side by side, against tokens trained a second; beside it what it
    would be if products took all the time and ran at their peak, the head's at that of float32."""
    s = settings(**SHAPE)
    trainer, batch = make_trainer(s)
    rows, ids = evaluated(s)
    training = step_call(trainer, batch)
    trained = s.train_batch_tokens / median_seconds(training, args.repeats, 2)
    scored = rows * s.eval_window / median_seconds(lambda: trainer.model.nll(ids), args.repeats, 2)
    head, forward = 2 * s.model_dim * s.vocab_size, step_flops(s) / s.train_batch_tokens / 3
    limit = 1 / ((forward - head) / peak_flops() + head / peak_flops(dtype=torch.float32))
    again = s.train_batch_tokens / median_seconds(training, args.repeats, 0)
    trained = (trained + again) / 2
    return {
        "figure": round(scored / trained, 2),
        "unit": "evaluation rate / training rate",
        "shape": shape_of(s),
        "rows": rows,
        "training_tokens_per_second": round(trained),
        "evaluation_tokens_per_second": round(scored),
        "at_the_peak_of_products": round(limit / trained, 2),
    }


def evaluated(s: train_gpt.Settings) -> tuple[int, np.ndarray]:
    """Rows of one forward pass of an evaluation, and random tokens for it."""
    rows = max(1, s.val_batch_size // s.batch_slots // s.eval_window)
    return rows, np.random.default_rng(0).integers(0, s.vocab_size, (rows, s.eval_window + 1))


VAL_TOKENS = 785_484  # of the demo corpus at 1024 pieces


def predictor(args: argparse.Namespace) -> dict[str, Any]:
    """The floppy's validation text fed token by token against its evaluation in windows, and the rate of
    one stream alone. Measured in turns: one pass of the evaluation, then steps with the window filled more
    or less. The quotient is of processor seconds, which other programs do not take away."""
    s = settings()
    trainer, _ = make_trainer(s)
    eager, _ = make_trainer(dataclasses.replace(s, compile=False))  # as load_predictor has it
    rows, ids = evaluated(s)
    trainer.model.nll(ids)
    streams = {count: train_gpt.Predictor(eager.model) for count in (train_gpt.Predictor.rows, 1)}
    for count, each in streams.items():
        each.start(count)
        for cache in each.caches:
            cache.keys.normal_()
            cache.values.normal_()
        each.step(np.full(count, 7))
    fills = np.random.default_rng(0).permutation(6 * args.repeats) * s.eval_window // (6 * args.repeats)
    spent = {name: np.zeros(2) for name in ("evaluation", *streams)}
    for turn in fills.reshape(args.repeats, 6):
        spent["evaluation"] += wall_and_processor(lambda: trainer.model.nll(ids))
        for count, each in streams.items():
            for fill in turn:
                fill_caches(each, int(fill))
                given = np.full(count, 7)
                spent[count] += wall_and_processor(functools.partial(each.step, given))
    tokens = {"evaluation": args.repeats * rows * s.eval_window}
    tokens |= {count: len(fills) * count for count in streams}
    text = {name: seconds / tokens[name] * VAL_TOKENS for name, seconds in spent.items()}
    many = train_gpt.Predictor.rows
    return {
        "figure": round(text[many][1] / text["evaluation"][1], 2),
        "unit": "processor seconds, fed token by token / in windows",
        "shape": shape_of(s),
        "streams": many,
        "fed_seconds_wall_processor": [round(seconds) for seconds in text[many]],
        "evaluation_seconds_wall_processor": [round(seconds) for seconds in text["evaluation"]],
        "one_stream_tokens_per_second": round(tokens[1] / spent[1][0]),
        "one_stream_tokens_per_processor_second": round(tokens[1] / spent[1][1]),
        "peak_memory_mib": peak_memory_mib(),
    }


TURN = 64  # tokens of each stream that one record is fed before the next one's turn


def passes(args: argparse.Namespace) -> dict[str, Any]:
    """The demo's validation text, fed to records token by token. They take turns of TURN tokens.

    Each learns from what it was fed, so a turn holds its share of lessons. Quotients are to the first record.
    """
    ids = shards.read_split(ROOT / "data/datasets/demo_sp1024", "val")
    steps, spent = {}, {}
    for folder in args.records:
        artifact = min(folder.glob("model_seed*.ptz"))
        its = load_script(folder / "train_gpt.py").load_predictor(artifact)
        its.start(its.rows)
        streams = ids[: len(ids) // its.rows * its.rows].reshape(its.rows, -1)
        steps[folder.name] = map(its.step, streams.T.astype(np.int64))
        spent[folder.name] = np.zeros(2)
    for _ in range(args.repeats):
        for name, each in steps.items():
            spent[name] += wall_and_processor(functools.partial(list, itertools.islice(each, TURN)))
    seconds = {name: float(processor) for name, (_, processor) in spent.items()}
    base, tokens = next(iter(seconds.values())), args.repeats * TURN
    return {
        "figure": {name: round(one / base, 3) for name, one in seconds.items()},
        "unit": "processor seconds / those of the first record",
        "tokens_of_each_stream": tokens,
        "processor_ms_a_token": {name: round(1e3 * one / tokens, 1) for name, one in seconds.items()},
    }


def wall_and_processor(call: Callable[[], Any]) -> np.ndarray:
    """Seconds of a call, float64[2]."""
    began = np.array([time.perf_counter(), time.process_time()])
    call()
    return np.array([time.perf_counter(), time.process_time()]) - began


def export(args: argparse.Namespace) -> dict[str, Any]:
    """Quantise, compress and read back trained-like weights of the reference model."""
    s = settings(PRESET="10min_16mb")
    rng, bandwidth = np.random.default_rng(0), copy_bandwidth()
    weights = {
        p.name: rng.standard_normal(p.shape, dtype=np.float32) * np.float32(0.02)
        for p in train_gpt.parameter_table(s)
    }
    sizes = []

    def whole() -> None:
        blob = train_gpt.encode_artifact(s, weights, bytes(32).hex())
        train_gpt.decode_artifact(blob, "benchmark")
        sizes.append(len(blob))

    seconds = median_seconds(whole, args.repeats)
    floats = 4 * sum(value.size for value in weights.values())
    return {
        "figure": round(seconds, 2),
        "unit": "seconds for encode and decode",
        "params": floats // 4,
        "artifact_bytes": sizes[0],
        "copy_gb_per_second": round(bandwidth / 1e9, 1),
        "times_a_copy_of_the_weights": round(seconds / (floats / bandwidth)),
        "peak_memory_mib": peak_memory_mib(),
    }


def loader(args: argparse.Namespace) -> dict[str, Any]:
    """A batch of the reference preset, 393,216 tokens, from a warm file: by one rank, and by one of eight."""
    with tempfile.TemporaryDirectory() as folder:
        s = settings(PRESET="10min_16mb", VOCAB_SIZE="65536", DATA_PATH=folder)
        tokens = np.random.default_rng(0).integers(0, 1024, 40_000_000).astype("<u2")
        head = np.zeros(256, "<i4")
        head[:3] = 20240520, 1, len(tokens)
        path = Path(folder, "bench_train_000000.bin")
        path.write_bytes(head.tobytes() + tokens.tobytes())
        stream = train_gpt.TokenStream(s, "train", bytes(32).hex(), 1, [])

        def seconds(world: int) -> float:
            machine = train_gpt.Machine(torch.device("cpu"), world=world)
            reader = train_gpt.BatchReader(s, stream, machine, [])
            steps = train_gpt.Plan(s).steps()
            return median_seconds(lambda: reader.read(next(steps)), 100)

        alone, of_eight = seconds(1), seconds(8)
    return {
        "figure": f"{of_eight / (args.step_ms / 1e3):.2%}",
        "unit": f"of a step of {args.step_ms} ms, by one of eight ranks",
        "milliseconds_of_one_rank": round(1e3 * alone, 2),
        "milliseconds_of_one_of_eight": round(1e3 * of_eight, 2),
        "million_tokens_per_second": round(s.train_batch_tokens / alone / 1e6),
    }


def seconds_to_step_1(env: dict[str, str], cwd: str) -> float:
    """From the command to the line of the first step."""
    began, first, lines = time.perf_counter(), math.nan, []
    env = {**os.environ, **DEMO, "VAL_TOKENS_LIMIT": "8192", "MAX_WALLCLOCK_SECONDS": "0", **env}
    with subprocess.Popen(
        [sys.executable, str(SCRIPT)], cwd=cwd, text=True, env=env, stdout=subprocess.PIPE
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step:1/"):
                first = time.perf_counter() - began
    if process.returncode:
        sys.exit(f"bench.py: the run ended with {process.returncode}: {''.join(lines[-3:])}")
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
        "figure": round(statistics.median(smoke), 1),
        "unit": "seconds to the first step, smoke",
        "floppy_cache_full_seconds": [round(seconds, 1) for seconds in again],
        "floppy_cache_empty_seconds": round(first, 1),
        "floppy_eager_seconds": round(eager, 1),
    }


def span(text: str) -> range:
    """The type of --steps: FIRST:END, as Python has it."""
    found = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", text)
    steps = range(*map(int, found.groups())) if found else ()
    if not steps or steps[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given, expected steps from 1 on, as 10:15 for 10 to 14")
    return steps


def trace_file(text: str) -> Path:
    """The type of --trace."""
    path = Path(text)
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} given, expected a file in a folder that can be written to"
        )
    return path


def costliest(found: torch.profiler.profile, steps: int) -> dict[str, str]:
    """The ten operations with the most time of their own."""
    own = [event for event in found.key_averages() if not event.key.startswith("step ")]
    own.sort(key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in own)
    rows = {}
    for rank, event in enumerate(own[:10], 1):
        spent = event.self_cpu_time_total
        each = f"{spent / steps / 1e3:.2f} ms a step, {event.count / steps:g} calls"
        rows[f"{rank}. {event.key}"] = f"{spent / total:.1%}, {each}"
    return rows


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Where the time of a step goes: the own time of each operation, Inductor's kernels apart."""
    import torch._inductor.config as inductor

    inductor.cpp.enable_kernel_profile = True
    if args.reference:
        train_gpt.attention = plain_attention
    s = settings(**{} if args.preset_shape else SHAPE)
    trainer, batch = make_trainer(s)
    for _ in range(1, args.steps[0]):
        step_call(trainer, batch)()
    peak, seconds = peak_flops(), []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as found:
        for step in args.steps:
            with torch.profiler.record_function(f"step {step}"):
                seconds += all_seconds(step_call(trainer, batch), 1, 0)
    if args.trace:
        found.export_chrome_trace(str(args.trace))  # which raises nothing where it fails
        ends = args.trace.read_bytes()[-1:] if args.trace.exists() else b""
        if not ends or (ends != b"}" and args.trace.suffix != ".gz"):
            sys.exit(f"error: {args.trace}: the trace could not be written; is there room on the disk?")
    groups = {
        "weight products (mm)": r"aten::(mm|addmm)$",
        "attention products (bmm)": r"aten::bmm$",
        "Newton-Schulz, second and third product (baddbmm)": r"aten::baddbmm",
        "attention (torch's)": r"aten::_scaled_dot_product",
        "elementwise, compiled": r".*cpp_fused",
        "elementwise, eager": r"aten::(copy_|add_?|mul_?|sub_?|div_?|cat|lerp_|sum|fill_)$",
    }
    shares, total = dict.fromkeys((*groups, "dispatch and other"), 0.0), 0.0
    for event in found.key_averages():
        if event.key.startswith("step "):  # what lies around the operations
            continue
        name = next(
            (name for name, pattern in groups.items() if re.match(pattern, event.key)), "dispatch and other"
        )
        shares[name] += event.self_cpu_time_total
        total += event.self_cpu_time_total
    rate = s.train_batch_tokens / statistics.median(seconds)
    return {
        "figure": round(rate / s.train_batch_tokens * step_flops(s) / peak, 3),
        "unit": "MFU while profiled",
        "shape": shape_of(s),
        "step_ms": [round(x * 1e3) for x in seconds],
        **{name: f"{share / total:.1%}" for name, share in shares.items()},
        **costliest(found, len(args.steps)),
    }


# --- another commit ---------------------------------------------------------------------------------------


def one_call(args: argparse.Namespace) -> Callable[[], Any]:
    """A step, a forward pass of the evaluation, or a token of all streams with half of the window filled."""
    s = settings(**{} if args.preset_shape or args.what == "predictor" else SHAPE)
    if args.what == "step":
        trainer, batch = make_trainer(s)
        return step_call(trainer, batch)
    if args.what == "eval":
        trainer, _ = make_trainer(s)
        return functools.partial(trainer.model.nll, evaluated(s)[1])
    trainer, _ = make_trainer(dataclasses.replace(s, compile=False))  # as load_predictor has it
    predictor = train_gpt.Predictor(trainer.model)
    predictor.start(predictor.rows)
    given = np.full(predictor.rows, 7)
    predictor.step(given)  # a cache that is empty knows no key before

    def call() -> None:
        fill_caches(predictor, s.eval_window // 2)
        predictor.step(given)

    return call


def against(revision: str, args: argparse.Namespace) -> dict[str, Any]:
    """One call of this tree and one of another commit in turns, in one process; the ratio of their speeds.

    Processes that follow one another are no pair: on a shared host the second was up to 5 % faster.
    """
    global train_gpt
    if args.what not in ("step", "eval", "predictor"):
        sys.exit(f"bench.py: --against compares step, eval or predictor, not {args.what}")
    show = ["git", "-C", str(ROOT), "show", f"{revision}:train_gpt.py"]
    calls = {"this": one_call(args)}
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "train_gpt.py")
        other.write_bytes(subprocess.run(show, check=True, stdout=subprocess.PIPE).stdout)
        train_gpt = load_script(other)
    calls[revision] = one_call(args)
    seconds = {name: all_seconds(call, 0, 3) for name, call in calls.items()}  # compiled, warm
    turn = list(calls)
    for _ in range(args.repeats):
        turn.reverse()
        for name in turn:
            seconds[name] += all_seconds(calls[name], 1, 0)
    this, others = seconds.values()
    ratios = [other / mine for mine, other in zip(this, others)]
    return {
        "figure": round(statistics.median(ratios), 3),
        "unit": f"speed of this tree / {revision}, {args.what}",
        "quartiles": [round(ratio, 3) for ratio in statistics.quantiles(ratios)],
        "median_ms": {name: round(statistics.median(all_) * 1e3, 1) for name, all_ in seconds.items()},
    }


WHAT = {
    "step": step,
    "eval": evaluation,
    "predictor": predictor,
    "passes": passes,
    "export": export,
    "loader": loader,
    "start": start,
    "profile": profile,
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("records", nargs="*", type=Path, help="passes: their folders")
    parser.add_argument("--repeats", type=int, default=10, help="how often, for the median")
    parser.add_argument("--reference", action="store_true", help="step, profile: torch's attention")
    parser.add_argument("--preset-shape", action="store_true", help="step, profile: the shape of PRESET")
    parser.add_argument("--step-ms", type=float, default=52.0, help="loader: length of a step")
    words = "profile: which ones, the end not among them; those before warm up (3:6)"
    parser.add_argument("--steps", type=span, default=range(3, 6), metavar="FIRST:END", help=words)
    words = "profile: write what happened when; compressed, if the name ends in .gz"
    parser.add_argument("--trace", type=trace_file, metavar="FILE", help=words)
    parser.add_argument("--against", metavar="REV", help="another commit to compare with")
    args = parser.parse_args()
    rows = against(args.against, args) if args.against else WHAT[args.what](args)
    rows = {"what": args.what, "threads": torch.get_num_threads(), "repeats": args.repeats, **rows}
    for key, value in rows.items():
        print(f"{key}: {value}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
