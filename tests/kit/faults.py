"""Run train_gpt.py with faults in it: the example of how tests provoke, from outside, what breaks a run.

    PROVOKE=nan@30:rank=1:part=qkv,sleep@50:seconds=2 PYTHONPATH=. python tests/kit/faults.py
    PROVOKE=kill@70:rank=1 PYTHONPATH=. torchrun --standalone --nproc_per_node=2 tests/kit/faults.py

PROVOKE holds faults with commas between them, each KIND@STEP and what it needs. Steps count as in the log.

    nan, inf    a number of the gradient's part=NAME; without a part the loss of the rank's slot=0
    sleep       so many seconds= before the step; before step 0: while the others compile
    kill, stop  SIGKILL or SIGSTOP to itself before the step
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
real_step, real_gradient = train_gpt.Trainer.step, train_gpt.Trainer.gradient
real_loss, real_write = train_gpt.GPT.loss, train_gpt.write_whole
now = {"step": 0, "slot": 0}  # where the run is


def due(*kinds: str) -> list[dict[str, str]]:
    """The faults of these kinds at the step that the run is in."""
    return [fault for fault in FAULTS if fault["kind"] in kinds and fault["step"] == now["step"]]


def step(trainer: train_gpt.Trainer, batch: torch.Tensor, number: int, multiplier: float) -> torch.Tensor:
    """Trainer.step after what happens before it."""
    now["step"] = number + 1
    for fault in due("sleep"):
        time.sleep(float(fault["seconds"]))
    for _ in due("drift"):
        trainer.optimizer.state["weights"][0] += 1.0
    for _ in due("hash"):
        # one write, so that the lines of several ranks do not mix
        sys.stdout.write(f"state before step {number + 1} on rank {RANK}: {state_sha256(trainer)}\n")
        sys.stdout.flush()
    for _ in due("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in due("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return real_step(trainer, batch, number, multiplier)


def state_sha256(trainer: train_gpt.Trainer) -> str:
    return trainer.sha256(*trainer.optimizer.state).hex()


def gradient(trainer: train_gpt.Trainer, batch: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Trainer.gradient with a bad number in the parts that are due."""
    now["slot"] = 0
    for fault in due("sleep") if now["step"] == 0 else ():
        time.sleep(float(fault["seconds"]))
    total = real_gradient(trainer, batch, seq_len)
    for fault in due(*NUMBERS):
        if "part" in fault:
            part = trainer.model.views(total[: trainer.size])[fault["part"]]
            part.view(-1)[-1] = NUMBERS[fault["kind"]]
    return total


def loss(model: train_gpt.GPT, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """GPT.loss of one slot, bad if that is due."""
    value = real_loss(model, ids, targets)
    for fault in due(*NUMBERS):
        if "part" not in fault and int(fault.get("slot", "0")) == now["slot"]:
            value = value * NUMBERS[fault["kind"]]
    now["slot"] += 1
    return value


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
    if any("slot" in fault for fault in FAULTS):
        train_gpt.MICRO_TOKENS = 1  # each slot has a forward pass of its own
    train_gpt.Trainer.step, train_gpt.Trainer.gradient = step, gradient
    train_gpt.GPT.loss, train_gpt.write_whole = loss, write_whole
    sys.argv[0] = train_gpt.__file__
    sys.exit(train_gpt.main())
