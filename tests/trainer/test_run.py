"""Whole runs of the real script: what they leave behind, exit codes, ranks, EVAL_ONLY, compiled and eager."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import train_gpt
from tests.kit import helpers, launch
from tests.kit.helpers import ScriptRun
from tests.trainer.test_model import nats_of_steps

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: other presets and numbers")
STEP_LINE = r"step:(\d+)/20 train_loss:\d+\.\d{4} time:\d+s left:\d+s tok_s:\d+ mfu:\d+%"
VAL_LINE = r"(step:\d+/\d+|artifact) val_loss:\d+\.\d{4} val_bpb:\d+\.\d{4}( partial)? time:\d+s"
TINY_FLOPS = train_gpt.step_flops(train_gpt.load_settings(helpers.tiny_env(), "smoke")[0])
BASE = {"ITERATIONS": 20, "VAL_LOSS_EVERY": 10, "TRAIN_LOG_EVERY": 5}


def run_main(cwd: Path, env: dict[str, str]) -> ScriptRun:
    return helpers.run_here(train_gpt.main, cwd, env)


def strict_events(folder: Path) -> list[dict]:
    """All events of a run's metrics; NaN and Infinity are no JSON."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


# --- what a run leaves behind -----------------------------------------------------------------------------


def test_a_run_ends_with_the_promised_block(base_run, corpus):
    assert (base_run.code, base_run.err) == (0, "")
    final, folder = base_run.final, base_run.folder
    blob, script = (folder / "model.ptz").read_bytes(), helpers.SCRIPT.read_bytes()
    code_bytes = len(zlib.compress(script, 9))  # what smoke says
    expected = {
        "preset": "smoke",
        "seed": 1337,
        "run_id": folder.name,
        "steps": 20,
        "tokens_seen": 20 * 512,
        "train_flops": 20 * TINY_FLOPS,
        "val_tokens": len(corpus.tokens["val"]) - 1,  # the first one is a begin mark, worth nothing
        "val_bytes": corpus.val_bytes(),
        "artifact_bytes": len(blob),
        "code_bytes": code_bytes,
        "total_bytes": len(blob) + code_bytes,
        "budget_bytes": 1_474_560,
        "budget": "ok",
        "artifact_sha256": hashlib.sha256(blob).hexdigest(),
        "script_sha256": hashlib.sha256(script).hexdigest(),
        "tokenizer_sha256": helpers.sha256(corpus.tokenizer_path).hex(),
        "val_sha256": hashlib.sha256(corpus.tokens["val"].astype("<u2").tobytes()).hexdigest(),
        "skipped_steps": 0,
        "resumes": 0,
    }
    assert {name: final[name] for name in expected} == {name: str(value) for name, value in expected.items()}
    assert {"params", "train_sha256", "state_sha256", "device", "torch"} <= final.keys()
    assert 0 < float(final["train_seconds"]) < 60 and float(final["eval_seconds"]) > 0
    assert all(re.fullmatch(r"\d+\.\d{8}", final[name]) for name in ("val_loss", "val_bpb"))
    bits = float(final["val_loss"]) / math.log(2) * expected["val_tokens"]
    assert float(final["val_bpb"]) == pytest.approx(bits / expected["val_bytes"], abs=2e-8)


def test_the_log_has_the_promised_lines(base_run):
    assert (base_run.folder / "train.log").read_text(encoding="utf-8") == base_run.out
    lines = base_run.out.splitlines()
    steps = [int(found[1]) for line in lines if (found := re.fullmatch(STEP_LINE, line))]
    assert steps == [*range(1, 11), 15, 20], "the first ten, then every TRAIN_LOG_EVERY"
    scores = [found[1] for line in lines if (found := re.fullmatch(VAL_LINE, line))]
    assert scores == ["step:10/20", "step:20/20", "artifact"]
    assert "\r" not in base_run.out and "%|" not in base_run.out, "no progress bar in a file"
    assert base_run.out.count("\n---\n") == 1 and "note:" not in base_run.out
    for words in ("device:cpu", "dtype:float32", "compile:0", "preset:smoke"):
        assert words in base_run.out


def test_metrics_have_exact_floats_of_a_run_that_learns(base_run):
    events = strict_events(base_run.folder)
    kinds = [*["step"] * 10, "val", *["step"] * 10, "val", "artifact", "final"]
    assert [event["event"] for event in events] == kinds
    steps = [event for event in events if event["event"] == "step"]
    printed = dict(re.findall(r"^step:(\d+)/20 train_loss:(\S+) ", base_run.out, re.MULTILINE))
    for number, event in enumerate(steps, 1):
        assert (event["step"], event["train_flops"]) == (number, number * TINY_FLOPS)
        loss = event["train_loss"]
        assert np.float32(loss) == loss != round(loss, 4)
        assert printed.get(str(number), f"{loss:.4f}") == f"{loss:.4f}"
        assert event["grad_norm"] > 0 and 0 < event["lr_mul"] <= 1
    seconds = [event["train_seconds"] for event in steps]
    assert seconds == sorted(seconds)
    assert {name: str(events[-1][name]) for name in base_run.final} == base_run.final
    middle, sample = base_run.events("val")
    assert (sample["partial"], sample["val_tokens"]) == (True, 4096), "one batch, before rounding"
    assert steps[0]["train_loss"] == pytest.approx(math.log(400), abs=0.05)
    assert sample["val_loss"] < middle["val_loss"] < 0.9 * steps[0]["train_loss"]


@pytest.mark.slow
def test_the_same_run_again_gives_the_same_bytes(base_run, corpus, tmp_path):
    """By a copy of the script alone, elsewhere, from data under other names, after a warm-up.

    And without a network, where the system lets us take it away.
    """
    here = tmp_path / "ein Ordner, ü 数据"
    shutil.copytree(corpus.data_path, here / "töken$ 1")
    shutil.copy(corpus.tokenizer_path, here / "模型.model")
    script = Path(shutil.copy(helpers.SCRIPT, here / "frozen.py"))
    paths = {"DATA_PATH": "töken$ 1", "TOKENIZER_PATH": "./模型.model"}
    alone = ("unshare", "--map-root-user", "--net")
    lets = shutil.which("unshare") and not subprocess.run([*alone, "true"], capture_output=True).returncode
    env = corpus.env(**paths, **BASE, WARMUP_STEPS=2)
    run = helpers.run_script(here, env, prefix=alone if lets else (), script=script)
    assert (run.code, run.err) == (0, "")
    same = [name for name in base_run.final if re.search("sha256|loss|bpb|_bytes", name)]
    assert {name: run.final[name] for name in same} == {name: base_run.final[name] for name in same}
    assert run.losses() == base_run.losses()
    assert "warming up: 2 untimed steps" in run.out
    assert sorted(os.listdir(run.folder)) == sorted(os.listdir(base_run.folder))
    assert re.fullmatch(r"\d{8}-\d{6}-smoke-\d+", run.final["run_id"])


def test_a_line_that_is_not_due_waits_for_a_pause(monkeypatch, capsys):
    """Steps and evaluations say how far they are every ten seconds."""
    now = [0.0]
    monkeypatch.setattr(train_gpt.time, "monotonic", lambda: now[0])
    run = train_gpt.Run(train_gpt.Machine(torch.device("cpu")), train_gpt.Settings())
    for now[0] in (1.0, 12.0, 13.0, 22.5):
        run.line(f"at {now[0]}", pause=10)
    run.line("at once")
    assert capsys.readouterr().out.splitlines() == ["at 12.0", "at 22.5", "at once"]


# --- runs and artifacts that exist ------------------------------------------------------------------------


def test_a_run_that_exists_is_refused_and_untouched(base_run, corpus):
    before = launch.contents(base_run.cwd)
    again = run_main(base_run.cwd, corpus.env(RUN_ID="läuft-日本"))
    assert again.code == 2 and again.err.startswith("train_gpt.py: RUN_ID=läuft-日本: ")
    assert again.err.count("\n") == 1 and launch.contents(base_run.cwd) == before


def test_eval_only_gives_exactly_the_score_of_the_run_and_writes_nothing(base_run, corpus):
    """Without any setting of the run: the artifact knows its shape."""
    before = launch.contents(base_run.cwd)
    env = {
        "DATA_PATH": corpus.data_path,
        "TOKENIZER_PATH": corpus.tokenizer_path,
        "DTYPE": "float32",
        "EVAL_ONLY": base_run.folder / "model.ptz",
        "COMPILE": "0",
        "VAL_BATCH_SIZE": "4096",
    }
    run = run_main(base_run.cwd, env)
    assert (run.code, run.err) == (0, "")
    for name in ("val_bpb", "val_loss", "val_tokens", "val_bytes", "artifact_sha256", "artifact_bytes"):
        assert run.final[name] == base_run.final[name]
    assert launch.contents(base_run.cwd) == before and "train_loss" not in run.out


@pytest.mark.slow
def test_load_predictor_scores_the_artifact_as_the_run_did(base_run, corpus):
    """The referee's way in, over the raw bytes, in the number format of the run, which the artifact carries.

    Each window is a stream. It begins a token early: that token is charged to the stream before.
    """
    predictor = train_gpt.load_predictor(base_run.folder / "model.ptz", "cpu")
    assert (predictor.vocab_size, predictor.model.machine.dtype) == (400, torch.float32)
    assert predictor.rows >= 1
    tokens = corpus.tokens["val"].astype(np.int64)
    length = 32
    rows = (len(tokens) - 1) // length
    whole = tokens[np.arange(rows)[:, None] * length + np.arange(length + 1)]
    parts = (nats_of_steps(predictor, ids)[:, 1:] for ids in (whole, tokens[None, rows * length :]))
    nats = sum(part.sum() for part in parts)
    bpb = nats / np.log(2) / int(base_run.final["val_bytes"])
    assert abs(bpb - float(base_run.final["val_bpb"])) < 1e-6
    with pytest.raises(train_gpt.DataError, match="no-such"):
        train_gpt.load_predictor(base_run.folder / "no-such", "cpu")


@pytest.mark.slow
def test_without_validation_text_a_run_makes_the_same_bytes_and_no_score(base_run, corpus, tmp_path):
    """As in the referee's training sandbox. Nor is an artifact scored there."""
    shutil.copytree(corpus.data_path, tmp_path / "data", ignore=shutil.ignore_patterns("*_val_*"))
    env = corpus.env(DATA_PATH="data", RUN_ID="run", **BASE)
    run = run_main(tmp_path, env)
    assert (run.code, run.err) == (0, "")
    assert "note: no validation text or score" in run.out.splitlines()
    assert not re.search("val_(loss|bpb)", run.out) and run.events("val") == []
    missing = base_run.final.keys() - run.final.keys() - {"eval_seconds"}
    assert missing == {name for name in base_run.final if name.startswith("val_")}
    for name in ("artifact_sha256", "state_sha256", "train_flops", "train_sha256"):
        assert run.final[name] == base_run.final[name]
    assert run.losses() == base_run.losses()
    scored = run_main(tmp_path, env | {"EVAL_ONLY": "logs/run/model.ptz"})
    assert (scored.code, scored.out) == (3, "")
    assert re.fullmatch(r"train_gpt\.py: DATA_PATH=data .*no <set>_val_<number>.bin;.*\n", scored.err)


# --- exit codes; more of 2 and 3 is provoked in test_settings.py and test_damage.py -----------------------


@pytest.mark.slow
def test_exit_4_over_the_budget_with_all_files_written(corpus, tmp_path):
    run = run_main(tmp_path, corpus.env(BUDGET_BYTES=100_000, CODE_BYTES="raw"))
    assert (run.code, run.final["budget"]) == (4, "over")
    code, artifact, total = (int(run.final[f"{name}_bytes"]) for name in ("code", "artifact", "total"))
    assert code == helpers.SCRIPT.stat().st_size and code + artifact == total > 100_000
    assert {"config.json", "metrics.jsonl", "model.ptz", "train.log"} <= set(os.listdir(run.folder))


RUNAWAY = {"SCALAR_LR": 1e30, "LR_WARMUP_STEPS": 0, "ITERATIONS": 50}
# What is wrong: settings, exit code, how the one line goes on, and whether the run has a folder.
ENDS = {
    "a bad value": ({"ITERATIONS": 0}, 2, "ITERATIONS='0': takes a whole number from 1", False),
    "a relative path": ({"DATA_PATH": "memory/nothing"}, 3, r"DATA_PATH=memory/nothing \(in CWD\): ", False),
    "the loss": (RUNAWAY, 17, r"step 1\d .*tenth in a row", True),
    "the score": ({"QK_GAIN_INIT": -1e38, "ITERATIONS": 1}, 17, ".*: scores nan nats", True),
}


@pytest.mark.parametrize("kind", ENDS)
def test_what_goes_wrong_ends_with_one_line_and_its_code(corpus, tmp_path, kind):
    env, code, words, begun = ENDS[kind]
    run = run_main(tmp_path, corpus.env(RUN_ID="wrong", **env))
    assert run.code == code and "---" not in run.out.splitlines()
    words = words.replace("CWD", re.escape(str(tmp_path)))
    assert re.fullmatch(rf"train_gpt\.py: {words}.*\n", run.err), run.err
    folder = tmp_path / "logs/wrong"
    assert folder.exists() == begun
    assert (folder / "model.ptz").exists() == (kind == "the score")
    assert not begun or strict_events(folder)


# --- surroundings: one line at most, and no traceback -----------------------------------------------------


@pytest.mark.slow
def test_bare_surroundings_do_not_stop_a_run(corpus, tmp_path):
    """Nothing is open, the locale is ASCII, and there are no programs."""
    prefix = ("/bin/sh", "-c", '"$@" <&- >&- 2>&-', "sh")
    bare = {"LC_ALL": "C", "PYTHONUTF8": 0, "PATH": "/nonexistent"}
    run = helpers.run_script(tmp_path, corpus.env(RUN_ID="run", **bare), prefix=prefix)
    assert (run.code, run.out, run.err) == (0, "", "")
    log = (tmp_path / "logs/run/train.log").read_text(encoding="utf-8")
    assert "val_bpb: " in log.split("\n---\n")[1], "the files have it all"


NO_MEMORY = {
    "torch": lambda s: torch.empty(2**60),
    "python": lambda s: bytes(2**60),
    "numpy": lambda s: np.empty(2**60, np.uint8),
    "cuda": mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    "mlx": mock.Mock(side_effect=RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")),
}


@pytest.mark.parametrize("rank, mark", [("0", ""), ("1", " (rank 1)")])
@pytest.mark.parametrize("library", NO_MEMORY)
def test_any_library_that_has_no_memory_left_is_understood_on_any_rank(
    monkeypatch, capsys, library, rank, mark
):
    monkeypatch.setenv("PRESET", "smoke")
    monkeypatch.setenv("RANK", rank)
    assert train_gpt.main(open_machine=NO_MEMORY[library]) == 2
    said = "train_gpt.py: out of memory: lower VAL_BATCH_SIZE, TRAIN_BATCH_TOKENS or MODEL_DIM"
    assert capsys.readouterr().err == f"{said}{mark}\n"


def test_memory_in_an_errors_text_is_no_lack_of_it(monkeypatch):
    monkeypatch.setenv("PRESET", "smoke")
    error = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train_gpt.main(open_machine=mock.Mock(side_effect=error))


# --- ranks ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_that_are_slow_in_turn_train_the_model_that_one_trains(base_run, corpus, tmp_path):
    """A rank that takes longer than DIST_TIMEOUT in a compilation, a write or an evaluation is not lost.

    Where the cache of compiled code is empty, the first gradient takes minutes. An evaluation has five
    passes here, each of which takes less.
    """
    faults = "hash@20,sleep@0:rank=1:in=gradient:seconds=4,sleep@20:rank=0:in=fsync:seconds=4"
    faults += ",sleep@20:rank=1:in=pass:seconds=0.8"
    env = corpus.env(**BASE, DIST_TIMEOUT=3, RUN_ID="two")
    run = launch.Launch(tmp_path, env, ranks=2, provoke=faults).need(0)
    for name in ("tokens_seen", "val_tokens", "val_bytes", "train_sha256", "params"):
        assert run.final[name] == base_run.final[name]
    np.testing.assert_allclose(run.losses(), base_run.losses(), rtol=1e-4)
    for found, expected in zip(run.events("val"), base_run.events("val")):
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-4)
    assert float(run.final["val_bpb"]) == pytest.approx(float(base_run.final["val_bpb"]), rel=1e-3)
    replicas = dict(re.findall(r"state before step 20 on rank (\d): ([0-9a-f]{64})", run.out))
    assert len(replicas) == 2 and len(set(replicas.values())) == 1
    assert run.out.count("\n---\n") == 1, "one rank speaks"


# --- compiled or eager ------------------------------------------------------------------------------------


@NO_CUDA
@pytest.mark.slow
def test_compiled_and_eager_runs_agree(base_run, corpus, tmp_path):
    """torch keeps what it compiled where it always does, so here only a first run takes half a minute."""
    run = helpers.run_script(tmp_path, corpus.env(ITERATIONS=20, COMPILE=1))
    said = [line for line in run.err.splitlines() if "No CUDA runtime is found" not in line]
    assert (run.code, said) == (0, [])  # torch's CUDA build says so where there is no GPU
    if "compile:1" not in run.out:
        pytest.skip("no compiler here: " + re.search(r"compile:0.*", run.out)[0])
    np.testing.assert_allclose(run.losses(), base_run.losses(), rtol=1e-3)
    assert float(run.final["val_bpb"]) == pytest.approx(float(base_run.final["val_bpb"]), rel=2e-3)


@NO_CUDA
@pytest.mark.slow
def test_without_a_compiler_one_line_says_so_and_the_run_is_eager(base_run, corpus, tmp_path):
    broken = {"CXX": "/nonexistent/c++", "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    run = helpers.run_script(tmp_path, corpus.env(ITERATIONS=20, COMPILE=1, **broken))
    assert (run.code, run.err) == (0, "")
    said = [line for line in run.out.splitlines() if line.startswith("compile:0")]
    assert len(said) == 1 and "eager" in said[0]
    assert run.final["state_sha256"] == base_run.final["state_sha256"]


# --- settings at work -------------------------------------------------------------------------------------

VARIANTS = {
    "bfloat16": {"DTYPE": "bfloat16"},
    "window": {"EVAL_SEQ_LEN": 16},
    "int8": {"MODEL_DIM": 192, "NUM_HEADS": 2},  # wide enough for matrices in int8
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_setting_changes_what_it_should_and_the_run_learns(base_run, corpus, tmp_path, name):
    """In a thread, as in a notebook, where signals cannot be listened to."""
    run = run_main(tmp_path, corpus.env(ITERATIONS=20, **VARIANTS[name]))
    assert (run.code, run.err) == (0, "")
    assert run.losses()[-1] < run.losses()[0] - 0.3
    assert (run.losses() == base_run.losses()) == (name == "window")
    assert run.final["artifact_sha256"] != base_run.final["artifact_sha256"], "it carries its settings"
    assert run.final["val_bpb"] != base_run.final["val_bpb"]
    assert (run.final["params"] == base_run.final["params"]) == (name != "int8")


@pytest.mark.slow
def test_a_partial_score_says_so_in_every_line(base_run, corpus, tmp_path):
    run = run_main(tmp_path, corpus.env(VAL_TOKENS_LIMIT=1000))
    assert re.search(r"^artifact val_loss:\S+ val_bpb:\S+ partial ", run.out, re.MULTILINE)
    assert run.final["val_loss"].endswith(" partial") and run.final["val_bpb"].endswith(" partial")
    assert run.final["val_tokens"] == "999"
    assert not re.search(r"^artifact .*partial", base_run.out, re.MULTILINE)


@pytest.mark.slow
def test_the_clock_ends_a_run_at_a_rate_near_zero(corpus, tmp_path):
    run = run_main(tmp_path, corpus.env(MAX_WALLCLOCK_SECONDS=1, ITERATIONS=10**6))
    steps = run.events("step")
    assert steps[-2]["train_seconds"] < 1 < float(run.final["train_seconds"]) + 0.1  # a step is logged, too
    assert len(steps) == int(run.final["steps"])
    assert max(event["lr_mul"] for event in steps) == 1.0 and steps[-1]["lr_mul"] < 0.2
    assert run.events("val")[-1]["step"] == steps[-1]["step"]


@pytest.mark.slow
def test_operations_end_a_run_at_the_last_step_within_them(corpus, tmp_path):
    """The rate falls to the end of these steps."""
    run = run_main(tmp_path, corpus.env(MAX_FLOPS=24.9 * TINY_FLOPS, ITERATIONS=10**6))
    assert (run.final["steps"], run.final["train_flops"]) == ("24", str(24 * TINY_FLOPS))
    rates = [event["lr_mul"] for event in run.events("step")]
    assert rates[11] == 1.0
    assert rates[-1] == pytest.approx((1 - 23 / 24.9) / 0.5)  # WARMDOWN_ITERS is half of the run
    assert "\nstep:1/24 " in run.out
