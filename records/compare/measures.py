"""What is measured of a run, which way is better, and what noise it has.

Noise that is `known` and floors are in the measure's unit, or parts where the measure is relative.
"""

import contextlib
import math
import statistics
from functools import partial

import numpy as np

from data.command import DataError
from records.archive.metrics import Metrics, count
from records.archive.record import Record
from records.archive.tracks import RECORDS, Track, load_track, schema_errors
from records.compare.bands import Measure

NOISE_BPB = 0.02  # where no track is known
BEYOND = 2.576 * math.sqrt(2)  # standard deviations; two runs lie further apart once in a hundred times
UPPER_QUARTILE = 0.75


def find_track(runs: list[Metrics]) -> Track | None:
    """The track of their validation text."""
    found = {run.environment.get("val_sha256") for run in runs} - {None}
    for path in sorted(RECORDS.glob("*/track.json")):
        track = load_track(path.parent)
        if found & {one["logged_val_sha256"] for one in track.rules["dataset"]["vocabularies"]}:
            return track
    return None


def noise_again(runs: list[Metrics]) -> float:
    """Bits per byte that two runs of one seed and one commit may lie apart, as the track says."""
    track = find_track(runs)
    return track["noise_bpb"] if track else NOISE_BPB


def noise_bpb(runs: list[Metrics]) -> float:
    """The same of any seeds: three of four records of the track have seeds that lie closer together.

    The median would be too narrow: as calm records join, runs of wilder ones would look changed.
    """
    again, track = noise_again(runs), find_track(runs)
    if track is None or len({run.seed for run in runs}) == 1:
        return again
    spreads = []
    for folder in track.records:
        with contextlib.suppress(DataError):  # which is the board's to tell
            record = Record(folder)
            if not schema_errors(record.submission, "submission") and len(record.scores) > 1:
                spreads.append(statistics.stdev(record.scores.values()))
    if not spreads:
        return again
    return max(again, BEYOND * float(np.quantile(spreads, UPPER_QUARTILE)))


def in_nats(runs: list[Metrics], bits: float) -> float:
    """Bits per byte as nats a token."""
    ratios = [
        run.vals[-1]["val_loss"] / run.vals[-1]["val_bpb"]
        for run in runs
        if run.vals and run.vals[-1]["val_bpb"]
    ]
    ends = [(run.logged("val_loss"), run.logged("val_bpb")) for run in runs]
    ratios += [loss / bpb for loss, bpb in ends if loss and bpb]
    ratios = [ratio for ratio in ratios if math.isfinite(ratio)]
    return bits * (statistics.median(ratios) if ratios else 1.0)


def noise_nats(runs: list[Metrics]) -> float:
    return in_nats(runs, noise_bpb(runs))


def floor_nats(runs: list[Metrics]) -> float:
    return in_nats(runs, floor_bpb(runs))


def floor_bpb(runs: list[Metrics]) -> float:
    return 0.1 * noise_again(runs)


def noise_last(runs: list[Metrics]) -> float:
    """The same of the last steps' mean, and three standard errors more: batches differ, too."""
    errors = [run.last_losses.std() / math.sqrt(len(run.last_losses)) for run in runs]
    return noise_nats(runs) + 3 * math.sqrt(2) * max(errors)


def part(share: float, function):
    return lambda runs: share * function(runs)


def constant(value: float):
    return lambda runs: value


def noise_speed(runs: list[Metrics]) -> float:
    """5 %, or as far as the machine's speed wandered within the runs."""
    return max(0.05, *(math.expm1(run.wander) for run in runs))


def noise_start(runs: list[Metrics]) -> float:
    """Seconds: what was compiled before is found again, and disks differ."""
    return max(1.0, 0.3 * max(run.start_seconds or 0.0 for run in runs))


def final_loss(run: Metrics) -> float | None:
    """Nats a token, after the export; else of the last validation."""
    last = run.vals[-1]["val_loss"] if run.final and run.vals else None
    return run.logged("val_loss") or last


def per_second(run: Metrics, amount: float | None) -> float | None:
    return amount / run.step_seconds if amount and run.step_seconds else None


def step_ms(run: Metrics) -> float | None:
    return run.step_seconds and 1e3 * run.step_seconds


def machine(run: Metrics) -> tuple:
    """What the speed of products depends on."""
    names = ("processor", "gpu", "threads", "dtype", "torch")
    return tuple(run.environment.get(name) for name in names)


def mfu(runs: list[Metrics], run: Metrics) -> float | None:
    """Per cent of the machine's products: the best of what the runs measured of it at their starts."""
    peaks = [one.own_peak for one in runs if one.own_peak and machine(one) == machine(run)]
    rate = per_second(run, run.flops_per_step)
    if not peaks or not rate:
        return None
    return 100 * rate / max(peaks) / (count(run.environment.get("ranks")) or 1)


def logged(name: str):
    return lambda run: run.logged(name)


def final_train_loss(run: Metrics) -> float | None:
    return float(run.last_losses.mean()) if run.final else None


def training(run: Metrics) -> float:
    """Seconds of all steps: a run that is slow for less than half of its steps shows it nowhere else."""
    return float(run.table["train_seconds"][-1])


def tokens(run: Metrics) -> float | None:
    return run.tokens_per_step and run.tokens_per_step * run.steps


def flops(run: Metrics) -> float | None:
    return run.flops_per_step and run.flops_per_step * run.steps


def measures(runs: list[Metrics]) -> list[Measure]:
    """The lines of the table. `runs`: all of both sides."""
    rate = lambda run: per_second(run, run.tokens_per_step)
    loss = {"good": -1, "seeded": True}
    nats = loss | {"known": noise_nats, "floor": floor_nats}
    last = nats | {"known": noise_last}
    bits = loss | {"known": noise_bpb, "floor": floor_bpb, "needs": ("val_bytes",)}
    speed = {"relative": True, "known": noise_speed, "floor": constant(0.01), "steady": True}
    start = {"good": -1, "known": noise_start, "floor": part(0.3, noise_start)}
    memory = {"good": -1, "relative": True, "known": constant(0.2), "floor": constant(0.01)}
    packed = {
        "good": -1,
        "relative": True,
        "seeded": True,
        "known": constant(0.005),
        "floor": constant(0.001),
    }
    text = ("val_bytes", "tokenizer_sha256")
    score = Measure("score", "bits per byte by the referee", "", ".4f", lambda run: run.score, **bits)
    return [
        Measure("params", "parameters", "", ",.0f", logged("params")),
        Measure("steps", "steps", "", ",.0f", lambda run: float(run.steps)),
        Measure("tokens", "tokens", "", ",.0f", tokens),
        Measure("flops", "operations", "", ".4e", flops),
        Measure(
            "train_loss", "train loss at the end", "nats", ".4f", final_train_loss, needs=text[1:], **last
        ),
        Measure("val_loss", "validation loss", "nats", ".4f", final_loss, needs=text, **nats),
        Measure(
            "bpb_before", "bits per byte before export", "", ".4f", logged("val_bpb_unquantized"), **bits
        ),
        Measure("bpb", "bits per byte after export", "", ".4f", logged("val_bpb"), **bits),
        *([score] if any(run.score for run in runs) else []),
        Measure("step_ms", "median step", "ms", ",.1f", step_ms, -1, needs=("tokens_per_step",), **speed),
        Measure("tokens_per_second", "tokens/s", "", ",.0f", rate, 1, **speed),
        Measure("mfu", "MFU", "%", ".1f", partial(mfu, runs), 1, **speed),
        Measure("train_seconds", "training", "s", ",.1f", training, unjudged="not judged"),
        Measure("start_seconds", "start-up and compile", "s", ",.1f", lambda run: run.start_seconds, **start),
        Measure("peak_memory_mib", "peak memory", "MiB", ",.0f", logged("peak_memory_mib"), **memory),
        Measure("code_bytes", "code", "bytes", ",.0f", logged("code_bytes"), -1),
        Measure("artifact_bytes", "artifact", "bytes", ",.0f", logged("artifact_bytes"), **packed),
    ]
