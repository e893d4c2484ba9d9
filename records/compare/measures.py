"""What is measured of a run, which way is better, and what noise it has."""

from collections.abc import Callable

from records.archive.metrics import Metrics
from records.archive.tracks import RECORDS, load_track
from records.compare.bands import Measure

NOISE_BPB = 0.02  # where no track is known


def find_noise(runs: list[Metrics]) -> float:
    """Bits per byte that are noise on the track of the runs' validation text."""
    found = {run.environment.get("val_sha256") for run in runs} - {None}
    for path in sorted(RECORDS.glob("*/track.json")):
        track = load_track(path.parent)
        if found & {one["logged_val_sha256"] for one in track.rules["dataset"]["vocabularies"]}:
            return track["noise_bpb"]
    return NOISE_BPB


def logged(name: str) -> Callable[[Metrics], float | None]:
    return lambda run: run.logged(name)


def over(amount: float | None, seconds: float | None) -> float | None:
    return amount / seconds if amount and seconds else None


def of_all_steps(amount: float | None, run: Metrics) -> float | None:
    return amount and amount * run.steps


def is_partial(run: Metrics) -> bool:
    """Whether a part of the text was scored, by VAL_TOKENS_LIMIT."""
    return "partial" in str(run.final.get("val_bpb"))


def val_loss(run: Metrics) -> float | None:
    """Nats a token, after the export; else of the last validation."""
    last = run.vals[-1]["val_loss"] if run.final and run.vals else None
    return run.logged("val_loss") or last


def measures(runs: list[Metrics]) -> list[Measure]:
    """The lines of the table. `runs`: all of both sides."""
    loss = {"unit": "nats", "form": ".4f", "good": -1, "judged": False}
    text = ("val_bytes", "tokenizer_sha256")
    partial = ", partial" if any(map(is_partial, runs)) else ""
    noise = find_noise(runs)
    bits = {"form": ".4f", "good": -1, "noise": noise}
    bits["needs"] = ("val_bytes",)
    ratio = {"relative": True, "noise": 0.05, "least": 0.01}
    # two runs of one program lie 5 % apart, or what their speed wandered within a run
    wander = max(run.wander for run in runs)
    speed = {**ratio, "steady": True, "single": max(0.05, wander)}
    step = {"unit": "ms", "form": ",.1f", "good": -1, **speed}
    step["needs"] = ("tokens_per_step",)
    seconds = {"unit": "s", "form": ",.1f", "judged": False}
    memory = {"unit": "MiB", "good": -1, **ratio, "single": 0.2}
    packed = {"relative": True, "noise": 0.005, "single": 0.005, "least": 0.001}
    size = {"unit": "bytes", "good": -1}
    score = Measure("stream_bpb", "bits per byte by the referee", lambda run: run.score, **bits)
    ended_loss = lambda run: float(run.last_losses.mean()) if run.final else None
    step_ms = lambda run: run.step_seconds and 1e3 * run.step_seconds
    tokens = lambda run: of_all_steps(run.tokens_per_step, run)
    flops = lambda run: of_all_steps(run.flops_per_step, run)
    rate = lambda run: over(run.tokens_per_step, run.step_seconds)
    training = lambda run: float(run.table["train_seconds"][-1])  # stalls and all
    return [
        Measure("params", "parameters", logged("params"), exact=True),
        Measure("steps", "steps", lambda run: float(run.steps), exact=True),
        Measure("tokens", "tokens", tokens, exact=True),
        Measure("flops", "operations", flops, form=".4e", exact=True),
        Measure("train_loss", "train loss at the end", ended_loss, needs=text[1:], **loss),
        Measure("val_loss", f"validation loss{partial}", val_loss, needs=text, **loss),
        Measure("val_bpb", f"bits per byte{partial}", logged("val_bpb"), **bits),
        *([score] if any(run.score for run in runs) else []),
        Measure("step_ms", "median step", step_ms, **step),
        Measure("tokens_per_second", "tokens/s", rate, good=1, **speed),
        Measure("train_seconds", "training", training, **seconds),
        Measure("peak_memory_mib", "peak memory", logged("peak_memory_mib"), **memory),
        Measure("code_bytes", "code", logged("code_bytes"), exact=True, **size),
        Measure("artifact_bytes", "artifact", logged("artifact_bytes"), **size, **packed),
    ]
