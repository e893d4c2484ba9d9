"""What is measured of a run, which way is better, and what noise it has."""

from functools import partial

from records.archive.metrics import Metrics, count
from records.archive.tracks import RECORDS, Track, load_track
from records.compare.bands import Measure

NOISE_BPB = 0.02  # where no track is known


def find_track(runs: list[Metrics]) -> Track | None:
    """The track of their validation text."""
    found = {run.environment.get("val_sha256") for run in runs} - {None}
    for path in sorted(RECORDS.glob("*/track.json")):
        track = load_track(path.parent)
        if found & {one["logged_val_sha256"] for one in track.rules["dataset"]["vocabularies"]}:
            return track
    return None


def apart(runs: list[Metrics]) -> float:
    """How far the speeds of two runs lie apart, as a logarithm: 5 %, or what they wandered within a run."""
    return max(0.05, *(run.wander for run in runs))


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


def train_loss(run: Metrics) -> float | None:
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
    track = find_track(runs)
    noise = track["noise_bpb"] if track else NOISE_BPB
    text = ("val_bytes", "tokenizer_sha256")
    unjudged = {"unjudged": "not judged"}
    loss = {"unit": "nats", "form": ".4f", "good": -1, **unjudged}
    bits = {"form": ".4f", "good": -1, "needs": ("val_bytes",), "noise": noise}
    ratio = {"relative": True, "noise": 0.05, "least": 0.01}
    speed = {**ratio, "steady": True, "single": apart(runs)}
    step = {"unit": "ms", "form": ",.1f", "good": -1, **speed}
    step |= {"needs": ("tokens_per_step",)}
    seconds = {"unit": "s", "form": ",.1f", **unjudged}
    memory = {"unit": "MiB", "good": -1, **ratio, "single": 0.2}
    packed = {"unit": "bytes", "good": -1, "relative": True}
    packed |= {"noise": 0.005, "single": 0.005, "least": 0.001}
    rate = lambda run: per_second(run, run.tokens_per_step)
    score = Measure("stream_bpb", "bits per byte by the referee", lambda run: run.score, **bits)
    return [
        Measure("params", "parameters", logged("params"), exact=True),
        Measure("steps", "steps", lambda run: float(run.steps), exact=True),
        Measure("tokens", "tokens", tokens, exact=True),
        Measure("flops", "operations", flops, form=".4e", exact=True),
        Measure("train_loss", "train loss at the end", train_loss, needs=text[1:], **loss),
        Measure("val_loss", "validation loss", final_loss, needs=text, **loss),
        Measure("val_bpb", "bits per byte", logged("val_bpb"), **bits),
        *([score] if any(run.score for run in runs) else []),
        Measure("step_ms", "median step", step_ms, **step),
        Measure("tokens_per_second", "tokens/s", rate, good=1, **speed),
        Measure("mfu", "MFU", partial(mfu, runs), unit="%", form=".1f", good=1, **speed),
        Measure("train_seconds", "training", training, **seconds),
        Measure("start_seconds", "start-up and compile", lambda run: run.start_seconds, **seconds),
        Measure("peak_memory_mib", "peak memory", logged("peak_memory_mib"), **memory),
        Measure("code_bytes", "code", logged("code_bytes"), unit="bytes", good=-1, exact=True),
        Measure("artifact_bytes", "artifact", logged("artifact_bytes"), **packed),
    ]
