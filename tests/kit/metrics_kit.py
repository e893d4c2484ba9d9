"""Runs that were never run: folders with metrics.jsonl, train.log and config.json, of any length."""

import json
from pathlib import Path

import numpy as np

STEP_FLOPS, STEP_TOKENS = 45_747_273_728, 4096
TEXT = {"val_tokens": 821312, "val_bytes": 1802551}
LOG = """run:logs/{name} preset:floppy PRESET=floppy SEED={seed}
torch:2.13.0+cpu threads:2 gpu:none dtype:bfloat16 ranks:1 processor:Test script_sha256:{script}
device:cpu dtype:bfloat16 compile:1 bfloat16:400GFLOP/s float32:167GFLOP/s
"""


def write_run(
    folder: Path,
    seed: int = 1,
    steps: int = 60,
    step_seconds: float = 0.25,
    loss: float = 2.0,
    spread: float = 0.01,
    stalls: dict[int, float] | None = None,
    settings: dict | None = None,
    **final,
) -> Path:
    """A run whose times have `spread`. `stalls`: more seconds by step; `final`: values of its end.

    A seed has the same losses again, as it has them in real runs, and other times.
    """
    rng = np.random.default_rng(seed)
    times = np.random.default_rng(seed + 1000 * len(folder.name))
    seconds = step_seconds * np.exp(spread * times.standard_normal(steps))
    for step, longer in (stalls or {}).items():
        seconds[step - 1] += longer
    clock = np.cumsum(seconds)
    curve = loss + 4.9 * np.exp(-np.arange(steps) / steps * 6) + 0.05 * rng.standard_normal(steps)
    own = loss + 0.1 * spread * rng.standard_normal()
    events = []
    for at in range(steps):
        place = {"step": at + 1, "train_seconds": clock[at]}
        facts = {"lr_mul": min(1.0, 2 - 2 * at / steps), "train_flops": (at + 1) * STEP_FLOPS}
        events.append({"event": "step", "train_loss": curve[at], "grad_norm": 0.5, **place, **facts})
        if (at + 1) % max(1, steps // 5) == 0:
            score = {"val_loss": curve[at], "val_bpb": curve[at] / 1.52}
            events.append({"event": "val", **place, **score, **TEXT, "partial": False})
    end = TEXT | {
        "val_loss": f"{own:.8f}",
        "val_bpb": f"{own / 1.52:.8f}",
        "artifact_bytes": 1_100_000 + seed,
        "seed": seed,
        "train_seconds": clock[-1],
        "steps": steps,
        "params": 1_183_372,
        "tokens_seen": steps * STEP_TOKENS,
        "code_bytes": 25_628,
        "peak_memory_mib": 792,
        "tokenizer_sha256": "ab",
    }
    events.append({"event": "final", **end, **final})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "train.log").write_text(LOG.format(name=folder.name, seed=seed, script="ab" * 32))
    own = {"seed": seed, "run_id": folder.name, "train_batch_tokens": STEP_TOKENS, "matrix_lr": 0.06}
    about = {"settings": own | (settings or {}), "sha256": {}, "origins": {"seed": "environment"}}
    about["environment"] = {"processor": "Test", "threads": 2, "ranks": 1, "dtype": "bfloat16", "gpu": "none"}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def edit_lines(run: Path, change) -> Path:
    """change(list of lines) -> list of lines, of a run's metrics."""
    path = run / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in change(path.read_text().splitlines())))
    return run


def edit_events(run: Path, change) -> Path:
    """change(event) -> event, of a run's metrics."""
    return edit_lines(run, lambda lines: [json.dumps(change(json.loads(line))) for line in lines])
