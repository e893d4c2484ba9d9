"""tests/bench.py profile: the trace that it writes is one that Perfetto reads."""

import gzip
import json
import subprocess
import sys

import pytest

from tests.kit import helpers

TINY = (
    "NUM_LAYERS=1 MODEL_DIM=32 NUM_HEADS=2 NUM_KV_HEADS=1 TRAIN_SEQ_LEN=64 TRAIN_BATCH_TOKENS=512 COMPILE=0"
)


def bench(*args) -> subprocess.CompletedProcess:
    words = [sys.executable, str(helpers.ROOT / "tests/bench.py"), "profile", *map(str, args)]
    env = helpers.clean_environment(**helpers.pairs(TINY))
    return subprocess.run(words, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_a_profile_is_a_trace_and_ten_operations(tmp_path):
    """The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    path = tmp_path / "trace.json.gz"
    done = bench("--steps", "10:15", "--trace", path)
    assert done.returncode == 0, done.stderr
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    whole = [event for event in events if event["ph"] == "X"]
    for event in whole:
        assert event["dur"] >= 0 and event["ts"] > 0 and event["name"] and {"pid", "tid"} <= event.keys()
    names = [event["name"] for event in whole]
    assert [each for each in names if each.startswith("step ")] == [f"step {n}" for n in range(10, 15)]
    assert names.count("aten::mm") > 5
    rows = json.loads(done.stdout.splitlines()[-1])
    ranked = [key for key in rows if key.split(". ")[0].isdigit()]
    assert len(ranked) == 10 and ranked[0].startswith("1. ") and len(rows["step_ms"]) == 5
    assert all("% " not in rows[key] and " ms a step, " in rows[key] for key in ranked)
    shares = [float(rows[key].split("%")[0]) for key in ranked]
    assert shares == sorted(shares, reverse=True) and 30 < sum(shares) <= 100.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--steps", "15:10"], "'15:10' given, expected steps from 1 on"),
        (["--steps", "0:3"], "expected steps from 1 on"),
        (["--trace", "no/such/folder/t.json"], "expected a file in a folder that can be written to"),
        (["--trace", "/dev/full"], "expected a file in a folder that can be written to"),
    ],
)
def test_a_wrong_profile_is_refused(args, expected):
    done = bench(*args)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr
