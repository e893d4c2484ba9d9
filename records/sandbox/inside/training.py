"""Runs inside the training sandbox: a record's script, which trains in the folder /room/work.

    python training.py SETTINGS DEVICES    a process for each device

SETTINGS is the script's environment as a JSON object. records/verify/training.py starts it.
"""

import json
import logging
import os
import sys

SCRIPT = "/room/train_gpt.py"


def train(devices: int) -> None:
    """Become the script; with several devices, let torchrun start it and end as it does."""
    if devices == 1:
        os.execv(sys.executable, [sys.executable, SCRIPT])
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # the last words are to be the script's own, and torchrun adds pages
    try:
        run.main(["--standalone", f"--nproc_per_node={devices}", SCRIPT])
    except ChildFailedError:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.update(json.loads(sys.argv[1]))
    os.chdir("/room/work")
    train(int(sys.argv[2]))
