"""Runs inside the sealed room: a record's script, as it is or while torch counts its operations.

    python room.py SETTINGS train DEVICES    run it in the folder /room/work, a process for each device
    python room.py SETTINGS count STEPS      count until so many steps were logged or more, in one process;
                                             write what was counted to COUNTS

SETTINGS is the script's environment as a JSON object. records/verify/retrain.py starts it. What is written
here is as honest as the script that runs in the same process.
"""

import json
import logging
import os
import runpy
import sys
import time

SCRIPT = "/room/train_gpt.py"
COUNTS = "counts.json"  # {"readings": [[bytes of METRICS so far, operations so far]...], "total", "ended"}
METRICS = "metrics.jsonl"
BEFORE = 3  # lines that may be logged before the first step
COUNTS_SEEN = 4  # of the start, of two groups of steps that were logged together, and of what followed
PATIENCE = 60.0  # seconds in which the count has not grown: a script that torch does not see


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


def count(steps: int) -> None:
    """Run the script and read the counter whenever a line is added to its metrics.jsonl."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    readings = []
    seen = {}  # when the counter first had each of the counts

    def write(ended: bool) -> None:
        found = {"readings": readings, "total": counter.get_total_flops(), "ended": ended}
        with open(COUNTS, "w") as file:
            json.dump(found, file)

    def note(event: str, args: tuple) -> None:
        if event != "open" or "a" not in str(args[1]) or os.path.basename(str(args[0])) != METRICS:
            return
        size = os.path.getsize(args[0]) if os.path.exists(args[0]) else 0  # the first line makes the file
        operations, now = counter.get_total_flops(), time.monotonic()
        readings.append([size, operations])
        waited = now - seen.setdefault(operations, now)
        if len(readings) > BEFORE + steps and (len(seen) >= COUNTS_SEEN or waited > PATIENCE):
            write(ended=False)
            os._exit(0)

    sys.addaudithook(note)
    sys.path.insert(0, os.path.dirname(SCRIPT))
    sys.argv = [SCRIPT]
    try:
        with counter:
            runpy.run_path(SCRIPT, run_name="__main__")
    except SystemExit as done:
        if done.code:
            raise
    write(ended=True)


if __name__ == "__main__":
    os.environ.update(json.loads(sys.argv[1]))
    os.chdir("/room/work")
    {"train": train, "count": count}[sys.argv[2]](int(sys.argv[3]))
