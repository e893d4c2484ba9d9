"""Run train_gpt.py with faults in it: the example of how tests provoke, from outside, what breaks a run.

    PROVOKE=nan@30:rank=1:part=qkv,sleep@50:seconds=2 PYTHONPATH=. python tests/kit/faults.py
    PROVOKE=kill@70:rank=1 PYTHONPATH=. torchrun --standalone --nproc_per_node=2 tests/kit/faults.py

PROVOKE holds faults with commas between them, each KIND@STEP and what it needs. Steps count as in the log.

    nan, inf    a number of the gradient's part=NAME; without a part the loss
    sleep       so many seconds= before the step; with in=, before each gradient (those of step 0 are the
                warm-up's), pass of an evaluation behind the step, or fsync behind it
    kill, stop  SIGKILL or SIGSTOP to itself before the step
    gpu         the error of a broken GPU before the step
    drift       the rank's weights change before the step
    hash        print the sha256 of weights and optimizer before the step
    cut         SIGKILL half way through the checkpoint of the step, or of the first after it
    torn        the same, but half of the checkpoint has its final name: a disk that lost what it took

rank= says on which rank; without it, on all. The script is imported, so it runs as it is: what it says of
itself (its name, size and sha256) is train_gpt.py's.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import train_gpt

NUMBERS = {"nan": float("nan"), "inf": float("inf")}
RANK = int(os.environ.get("RANK", "0"))


def read_faults(text: str) -> list[dict[str, str]]:
    """Each fault as its words by name: kind, step and what else it has."""
    faults = []
    for fault in filter(None, text.split(",")):
        head, *words = fault.split(":")
        kind, step = head.split("@")
        faults.append({"kind": kind, "step": int(step)} | dict(word.split("=") for word in words))
    return [fault for fault in faults if int(fault.get("rank", RANK)) == RANK]


FAULTS = read_faults(os.environ.get("PROVOKE", ""))
real_init, real_step, real_nll = train_gpt.Trainer.__init__, train_gpt.Trainer.step, train_gpt.GPT.nll
real_write, real_fsync = train_gpt.write_whole, os.fsync
now = {"step": 0}  # where the run is


def due(*kinds: str) -> list[dict[str, str]]:
    """The faults of these kinds at the step that the run is in."""
    return [fault for fault in FAULTS if fault["kind"] in kinds and fault["step"] == now["step"]]


def sleep(place: str) -> None:
    for fault in due("sleep"):
        if fault.get("in", "step") == place:
            time.sleep(float(fault["seconds"]))


def step(trainer: train_gpt.Trainer, batch: torch.Tensor, its: train_gpt.Step) -> tuple[Any, Any, Any]:
    """Trainer.step after what happens before it."""
    now["step"] = its.number + 1
    sleep("step")
    for _ in due("drift"):
        trainer.optimizer.state["weights"][0] += 1.0
    for _ in due("hash"):
        # one write, so that the lines of several ranks do not mix
        state = trainer.sha256(*trainer.optimizer.state).hex()
        sys.stdout.write(f"state before step {now['step']} on rank {RANK}: {state}\n")
        sys.stdout.flush()
    for _ in due("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in due("gpu"):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nSearch for it in the manual.")
    for _ in due("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return real_step(trainer, batch, its)


def init(trainer: train_gpt.Trainer, *args: Any) -> None:
    """Trainer.__init__, and bad numbers around its gradient."""
    real_init(trainer, *args)
    real_gradient = trainer.gradient

    def gradient(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sleep("gradient")
        loss, grad = real_gradient(batch)
        for fault in due(*NUMBERS):
            spoilt = trainer.model.views(grad)[fault["part"]] if "part" in fault else loss
            spoilt.view(-1)[-1] = NUMBERS[fault["kind"]]
        return loss, grad

    trainer.gradient = gradient


def nll(model: train_gpt.GPT, ids: np.ndarray) -> np.ndarray:
    sleep("pass")
    return real_nll(model, ids)


def fsync(number: int) -> None:
    sleep("fsync")
    real_fsync(number)


def write_whole(path: Path, blob: bytes) -> None:
    """train_gpt.write_whole, unless the run is to die in the middle of it."""
    for fault in FAULTS:
        cuts = fault["kind"] in ("cut", "torn") and path.suffix == ".ckpt"
        if cuts and int(path.stem.removeprefix("step_")) >= fault["step"]:
            half = path if fault["kind"] == "torn" else path.with_name(path.name + ".part")
            half.write_bytes(blob[: len(blob) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
    real_write(path, blob)


if __name__ == "__main__":
    train_gpt.Trainer.__init__, train_gpt.Trainer.step, train_gpt.GPT.nll = init, step, nll
    train_gpt.write_whole, os.fsync = write_whole, fsync
    sys.argv[0] = train_gpt.__file__
    sys.exit(train_gpt.main())
