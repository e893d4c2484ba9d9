"""Run tests/kit/faults.py as one of several ranks that share one GPU.

    PYTHONPATH=. torchrun --standalone --nproc_per_node=2 tests/kit/one_gpu.py

NCCL takes one rank for each GPU. So gloo sums the gradients here, and every rank computes on the first GPU.
"""

import os
import runpy
from pathlib import Path

import torch.distributed as dist

real_new_group = dist.new_group


def new_group(*args, backend: str | None = None, **named) -> dist.ProcessGroup:
    """torch's new_group, always of gloo."""
    return real_new_group(*args, **named)


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    dist.new_group = new_group
    runpy.run_path(str(Path(__file__).with_name("faults.py")), run_name="__main__")
