"""Measure the trainer, alone or beside another commit, in one process.

\b
    python -m tests.bench step                    a whole optimizer step, against the machine's limit
    python -m tests.bench eval                    a forward pass of the evaluation
    python -m tests.bench step --against REV      this tree and a commit in turns, and the ratio of speeds

PRESET names the shape, by default floppy, and other settings are taken from the environment, too: DEVICE=cuda
measures a GPU. Prints one `key: value` a line.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import torch

from tests.kit import helpers

Call = Callable[[], Any]


def load_script(path: Path) -> ModuleType:
    """The trainer at a path, under a name of its own: by names torch.compile finds what it guards."""
    spec = importlib.util.spec_from_file_location(f"train_gpt_{len(sys.modules)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds_of(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def random_tokens(s: Any, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, s.vocab_size, shape)


def step(script: ModuleType, trainer: Any) -> tuple[Call, int]:
    """Forward, backward, gradient sum, Muon and Adam."""
    s = trainer.s
    batch = trainer.machine.tensor(random_tokens(s, s.batch_slots, s.slot_tokens + 1))
    first = script.Plan(s).step(0)
    return lambda: float(trainer.step(batch, first)[0]), s.train_batch_tokens


def evaluation(script: ModuleType, trainer: Any) -> tuple[Call, int]:
    s = trainer.s
    ids = random_tokens(s, s.eval_rows, s.eval_window + 1)
    return lambda: trainer.model.nll(ids), s.eval_rows * s.eval_window


WHAT = {"step": step, "eval": evaluation}


class Measured:
    """A trainer of the script at a path, and a call that is compiled and warm, with its tokens."""

    def __init__(self, path: Path, what: str):
        self.script = load_script(path)
        given = {name: value for name, value in os.environ.items() if name.lower() in self.script.ROWS}
        s, _ = self.script.load_settings(given, "floppy")
        machine = self.script.open_machine(s)
        machine.choose_dtype(s.dtype)
        self.trainer = self.script.Trainer(s, machine)
        self.call, self.tokens = WHAT[what](self.script, self.trainer)
        for _ in range(3):
            self.call()


def alone(what: str, repeats: int) -> dict[str, Any]:
    """Milliseconds and tokens per second; of a step also the share of the peak of products."""
    measured = Measured(helpers.SCRIPT, what)
    seconds = [seconds_of(measured.call) for _ in range(repeats)]
    median = statistics.median(seconds)
    peak = measured.trainer.machine.peak_flops
    found = {
        "tokens_per_second": round(measured.tokens / median),
        "ms_min_median_max": [round(each * 1e3, 1) for each in (min(seconds), median, max(seconds))],
        "peak_gflops": round(peak / 1e9),
    }
    if what == "step":
        found["mfu"] = f"{measured.script.step_flops(measured.trainer.s) / median / peak:.1%}"
    return found


def against(what: str, repeats: int, revision: str) -> dict[str, Any]:
    """The ratio of the speeds of two trees.

    Processes that follow one another are no pair: on a shared host the second was up to 5 % faster.
    """
    show = ["git", "-C", str(helpers.ROOT), "show", f"{revision}:train_gpt.py"]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "train_gpt.py")
        other.write_bytes(subprocess.run(show, check=True, stdout=subprocess.PIPE).stdout)
        calls = [Measured(path, what).call for path in (helpers.SCRIPT, other)]
        seconds = np.zeros((repeats, 2))
        for number, row in enumerate(seconds):
            for which in (0, 1) if number % 2 else (1, 0):
                row[which] = seconds_of(calls[which])
    ratios = seconds[:, 1] / seconds[:, 0]
    return {
        "figure": f"{np.median(ratios):.3f} speed of this tree / {revision}, {what}",
        "quartiles": np.quantile(ratios, (0.25, 0.5, 0.75)).round(3).tolist(),
        "median_ms_this_that": (1e3 * np.median(seconds, 0)).round(1).tolist(),
    }


@click.command(help=__doc__)
@click.argument("what", type=click.Choice([*WHAT]))
@click.option("--repeats", default=10, show_default=True, help="how often, for the median")
@click.option("--against", "revision", metavar="REV", help="another commit to compare with")
def main(what: str, repeats: int, revision: str | None) -> None:
    rows = against(what, repeats, revision) if revision else alone(what, repeats)
    rows["threads"] = torch.get_num_threads()
    for key, value in rows.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
