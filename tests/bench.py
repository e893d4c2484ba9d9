"""Measure the trainer, alone or beside another commit, in one process.

    python -m tests.bench step                    a whole optimizer step, against the machine's limit
    python -m tests.bench eval                    a forward pass of the evaluation
    python -m tests.bench predictor               a token of each of a referee's streams, the window half full
    python -m tests.bench step --against REV      this tree and a commit in turns, and the ratio of speeds

PRESET names the shape, by default floppy, and other settings are taken from the environment, too: DEVICE=cuda
measures a GPU. --wide takes the shape of WIDE. Prints one `key: value` a line.
"""

import argparse
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

import numpy as np
import torch

from tests.kit import helpers

Call = Callable[[], Any]
WIDE = helpers.pairs("""
    NUM_LAYERS=6 MODEL_DIM=256 NUM_HEADS=4 NUM_KV_HEADS=2 MLP_MULT=2 VOCAB_SIZE=1024
    TRAIN_SEQ_LEN=512 TRAIN_BATCH_TOKENS=16384 BATCH_SLOTS=8 VAL_BATCH_SIZE=32768
""")


def load_script(path: Path) -> ModuleType:
    """The trainer at a path, under a name of its own: by names torch.compile finds what it guards."""
    spec = importlib.util.spec_from_file_location(f"train_gpt_{len(sys.modules)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def all_seconds(call: Call, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


# --- what is measured -------------------------------------------------------------------------------------


def make_trainer(script: ModuleType, s: Any) -> Any:
    machine = script.open_machine(s)
    machine.choose_dtype(s.dtype)
    return script.Trainer(s, machine)


def random_tokens(s: Any, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, s.vocab_size, shape)


def step(trainer: Any, folder: Path) -> tuple[Call, int]:
    """Forward, backward, gradient sum, Muon and Adam."""
    s = trainer.s
    batch = trainer.machine.tensor(random_tokens(s, s.batch_slots, s.slot_tokens + 1))
    plan = sys.modules[type(trainer).__module__].Plan(s)
    if hasattr(plan, "steps"):  # scripts until 7c7c01c are given the rate beside the step
        arguments = [batch, next(plan.steps()), 1.0]
    else:
        arguments = [batch, plan.step(0)]
    return lambda: float(trainer.step(*arguments)[0]), s.train_batch_tokens


def evaluation(trainer: Any, folder: Path) -> tuple[Call, int]:
    s = trainer.s
    ids = random_tokens(s, s.eval_rows, s.eval_window + 1)
    return lambda: trainer.model.nll(ids), s.eval_rows * s.eval_window


def predictor(trainer: Any, folder: Path) -> tuple[Call, int]:
    """As the referee has it."""
    artifact = folder / "model.ptz"
    artifact.write_bytes(trainer.export(""))
    script = sys.modules[type(trainer).__module__]
    its = script.load_predictor(artifact, trainer.machine.device.type)
    its.start(its.rows)
    ids = np.full(its.rows, 7)
    all_seconds(lambda: its.step(ids), trainer.s.eval_window // 2)
    return lambda: its.step(ids), its.rows


WHAT = {"step": step, "eval": evaluation, "predictor": predictor}


def prepared(path: Path, args: argparse.Namespace, folder: Path) -> tuple[Any, Call, int]:
    """A trainer of the script at a path, a call that is compiled and warm, and the call's tokens."""
    script = load_script(path)
    shape = WIDE if args.wide else {}
    given = {name: value for name, value in os.environ.items() if name.lower() in script.ROWS}
    trainer = make_trainer(script, script.load_settings({**shape, **given}, "floppy")[0])
    call, tokens = WHAT[args.what](trainer, folder)
    all_seconds(call, 3)
    return trainer, call, tokens


def alone(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Milliseconds and tokens per second; of a step also the share of the peak of products."""
    trainer, call, tokens = prepared(helpers.SCRIPT, args, folder)
    seconds = all_seconds(call, args.repeats)
    median = statistics.median(seconds)
    found = {
        "tokens_per_second": round(tokens / median),
        "ms_min_median_max": [round(each * 1e3, 1) for each in (min(seconds), median, max(seconds))],
        "peak_gflops": round(trainer.machine.peak_flops / 1e9),
    }
    if args.what == "step":
        script = sys.modules[type(trainer).__module__]
        flops = script.step_flops(trainer.s)
        found["mfu"] = f"{flops / median / trainer.machine.peak_flops:.1%}"
    return found


def against(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The ratio of the speeds of two trees.

    Processes that follow one another are no pair: on a shared host the second was up to 5 % faster.
    """
    show = ["git", "-C", str(helpers.ROOT), "show", f"{args.against}:train_gpt.py"]
    other = folder / "train_gpt.py"
    other.write_bytes(subprocess.run(show, check=True, stdout=subprocess.PIPE).stdout)
    calls = [prepared(path, args, folder)[1] for path in (helpers.SCRIPT, other)]
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
    parser.add_argument("--wide", action="store_true", help="the shape of WIDE")
    parser.add_argument("--against", metavar="REV", help="another commit to compare with")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = (against if args.against else alone)(args, Path(folder))
    rows["threads"] = torch.get_num_threads()
    for key, value in rows.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
