"""Does `records compare` tell noise from change? Real runs of `smoke`, and changes put into copies.

    python -m tests.repeats FOLDER      makes ten runs in FOLDER/logs, but for those that are there; 5 minutes

The runs have five seeds, each twice: a1 b1 a2 b2 ... Each draw takes five runs for one side and leaves five
for the other. records/compare/README.md says what is expected, and has the result.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

from records.compare.bands import BETTER, WORSE
from records.compare.comparison import Comparison, load
from tests.kit.helpers import ROOT, run_script

SEEDS = (1, 2, 3, 4, 5)
RUNS = [f"{side}{seed}" for seed in SEEDS for side in "ab"]
DRAWS = 10
SPEED = {"step_ms", "tokens_per_second", "mfu"}
LOSSES = {"val_bpb"}
STALL_STEP, STALL_SECONDS = 40, 40.0
Change = Callable[[dict, int], dict]  # of an event of a run, by the run's place in its side


def make_runs(folder: Path) -> None:
    """a1 b1 a2 b2 ...: what drifts in the machine touches both of a seed alike."""
    settings = {"PRESET": "smoke", "DATA_PATH": ROOT / "data/datasets/demo_sp1024"}
    for name in RUNS:
        if not (folder / f"logs/{name}/model.ptz").exists():
            done = run_script(folder, {**settings, "SEED": name[1:], "RUN_ID": name})
            print(f"{name}: {done.err.strip()[-200:] or 'made'}", flush=True)


# --- changes ----------------------------------------------------------------------------------------------


def slow(event: dict, place: int) -> dict:
    """8 % fewer steps a second."""
    return event | {"train_seconds": event["train_seconds"] / 0.92} if "train_seconds" in event else event


def loss(event: dict, place: int) -> dict:
    """0.02 nats more. Values of the final block are text, which may end with ' partial'."""
    changed = dict(event)
    for name in ("train_loss", "val_loss", "val_bpb", "val_bpb_unquantized"):
        if name in event:
            nats = 0.02 if name.endswith("loss") else 0.02 / RATIO
            value, _, mark = str(event[name]).partition(" ")
            more = float(value) + nats
            changed[name] = f"{more:.8f} {mark}".strip() if isinstance(event[name], str) else more
    return changed


RATIO = 1.5595  # nats a token in a bit a byte: the demo's val_loss / val_bpb at 1024 pieces


def stall(event: dict, place: int) -> dict:
    """One step of 40 s more in the third run."""
    late = place == 2 and event.get("step", STALL_STEP) >= STALL_STEP and "train_seconds" in event
    return event | {"train_seconds": event["train_seconds"] + STALL_SECONDS} if late else event


def changed(runs: list[Path], change: Change, folder: Path) -> list[Path]:
    """Copies of the runs with every event of their metrics changed."""
    copies = []
    for place, run in enumerate(runs):
        copy = folder / run.name
        copy.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "train.log"):
            (copy / name).unlink(missing_ok=True)
            os.link(run / name, copy / name)
        events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        lines = [json.dumps(change(event, place)) + "\n" for event in events]
        (copy / "metrics.jsonl").write_text("".join(lines))
        copies.append(copy)
    return copies


# --- draws ------------------------------------------------------------------------------------------------


def draw(logs: Path, kind: str, rng: random.Random) -> tuple[list[Path], list[Path]]:
    """Two sides of five runs: of every seed one, or any."""
    first = {f"{rng.choice('ab')}{seed}" for seed in SEEDS}
    if kind == "any":
        first = set(rng.sample(RUNS, 5))
    return tuple([logs / name for name in RUNS if (name in first) == side] for side in (True, False))


def colours(its: Comparison) -> tuple[set[str], set[str]]:
    """Keys of the rows that are red, and of those that are green."""
    return tuple({found.measure.key for found in its.rows if found.verdict == one} for one in (WORSE, BETTER))


def trial(folder: Path, kind: str, rng: random.Random) -> dict[str, bool]:
    """One draw: whether each case came out as it must."""
    base, others = draw(folder / "logs", kind, rng)
    found = {"A/A": colours(load(base, others)) == (set(), set())}
    for change, expected in ((slow, SPEED), (loss, LOSSES), (stall, set())):
        for where, runs in (("copies", base), ("others", others)):
            its = load(base, changed(runs, change, folder / "changed" / where))
            good = colours(its) == (expected, set())
            if change is stall:
                good &= [one["step"] for one in its.stalls] == [STALL_STEP]
            found[f"{change.__name__} in {where}"] = good
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.repeats", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    make_runs(folder)
    rng = random.Random(1)
    code = 0
    for kind in ("pairs", "any"):
        trials = [trial(folder, kind, rng) for _ in range(DRAWS)]
        for case in trials[0]:
            good = sum(found[case] for found in trials)
            print(f"{kind:5} {case:16} {good} of {DRAWS} as expected", flush=True)
            code |= good < DRAWS and not case.endswith("others")
    return code


if __name__ == "__main__":
    sys.exit(main())
