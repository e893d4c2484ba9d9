"""Whole runs of the real script: what they leave behind, exit codes, ranks, EVAL_ONLY, compiled and eager."""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from tests.kit import helpers, launch
from tests.kit.helpers import ScriptRun
from tests.trainer.test_model import nats_of_steps

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: other presets and numbers")
LINE = {
    "step": r"step:\d+/\d+ train_loss:\d+\.\d{4} time:\d+s left:\d+s tok_s:\d+ mfu:\d+%",
    "val": r"(step:\d+/\d+|artifact) val_loss:\d+\.\d{4} val_bpb:\d+\.\d{4}( partial)? time:\d+s",
}
FINAL = """
    val_loss val_bpb val_tokens val_bytes steps train_flops tokens_seen params
    train_seconds eval_seconds peak_memory_mib artifact_bytes code_bytes
    total_bytes budget_bytes budget artifact_sha256 script_sha256 train_sha256 val_sha256 tokenizer_sha256
    state_sha256 preset seed run_id device torch skipped_steps resumes"""
FINAL = FINAL.split()


def flops_of_a_step(run: ScriptRun) -> int:
    config = json.loads((run.folder / "config.json").read_text(encoding="utf-8"))
    return next(train_gpt.Plan(train_gpt.Settings(**config["settings"])).steps()).flops


def lines(run: ScriptRun, kind: str) -> list[str]:
    return [line for line in run.out.splitlines() if re.fullmatch(LINE[kind], line)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def strict_json(text: str):
    """NaN and Infinity are no JSON."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


# --- what a run leaves behind -----------------------------------------------------------------------------


def test_a_run_ends_with_the_promised_block(base_run, corpus):
    assert (base_run.code, base_run.err) == (0, "")
    final, folder = base_run.final, base_run.folder
    assert set(FINAL) <= set(final)
    assert re.fullmatch(r"\d+\.\d{8}", final["val_loss"]) and re.fullmatch(r"\d+\.\d{8}", final["val_bpb"])
    numbers = {name: float(final[name]) for name in FINAL if re.fullmatch(r"[\d.]+", final[name])}
    assert (numbers["steps"], numbers["tokens_seen"], numbers["seed"]) == (20, 20 * 512, 1337)
    assert numbers["val_tokens"] == len(corpus.tokens["val"]) - 1
    assert numbers["val_bytes"] == corpus.val_bytes(), "the first token is a begin mark, worth nothing"
    assert numbers["val_bpb"] == pytest.approx(
        numbers["val_loss"] / math.log(2) * numbers["val_tokens"] / numbers["val_bytes"], abs=2e-8
    )
    sample = base_run.events("val")[-1]
    assert (sample["partial"], sample["val_tokens"]) == (True, 4096), (
        "one batch, before the weights are rounded"
    )
    assert final["train_flops"] == str(20 * flops_of_a_step(base_run))
    blob, script = (folder / "model.ptz").read_bytes(), helpers.SCRIPT.read_bytes()
    assert numbers["artifact_bytes"] == len(blob)
    assert numbers["code_bytes"] == len(zlib.compress(script, 9))  # what smoke says
    assert numbers["total_bytes"] == numbers["artifact_bytes"] + numbers["code_bytes"]
    assert numbers["total_bytes"] < numbers["budget_bytes"] == 1_474_560 and final["budget"] == "ok"
    assert final["run_id"] == folder.name and final["preset"] == "smoke"
    assert final["artifact_sha256"] == hashlib.sha256(blob).hexdigest()
    assert final["script_sha256"] == hashlib.sha256(script).hexdigest()
    assert final["tokenizer_sha256"] == helpers.sha256(corpus.tokenizer_path).hex()
    assert final["val_sha256"] == hashlib.sha256(corpus.tokens["val"].astype("<u2").tobytes()).hexdigest()
    assert 0 < numbers["train_seconds"] < 60


def test_the_run_learns(base_run):
    losses_at = base_run.losses()
    assert losses_at[0] == pytest.approx(math.log(400), abs=0.05)
    middle, last = (event["val_loss"] for event in base_run.events("val"))
    assert last < middle < 0.9 * losses_at[0]


def test_the_log_has_the_promised_lines(base_run):
    assert (base_run.folder / "train.log").read_text(encoding="utf-8") == base_run.out
    steps = [int(re.match(r"step:(\d+)/20 ", line)[1]) for line in lines(base_run, "step")]
    assert steps == [*range(1, 11), 15, 20], "the first ten, then every TRAIN_LOG_EVERY"
    assert [line.split()[0] for line in lines(base_run, "val")] == ["step:10/20", "step:20/20", "artifact"]
    assert "\r" not in base_run.out and "%|" not in base_run.out, "no progress bar in a file"
    assert base_run.out.count("\n---\n") == 1
    for words in ("device:cpu", "dtype:float32", "compile:0", "preset:smoke"):
        assert words in base_run.out


def test_metrics_are_strict_json_with_exact_floats(base_run):
    text = (base_run.folder / "metrics.jsonl").read_text(encoding="utf-8")
    events = [strict_json(line) for line in text.splitlines()]
    kinds = [*["step"] * 10, "val", *["step"] * 10, "val", "artifact", "final"]
    assert [event["event"] for event in events] == kinds
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 21))
    for event in steps:
        assert np.float32(event["train_loss"]) == event["train_loss"] != round(event["train_loss"], 4)
        assert event["grad_norm"] > 0 and 0 < event["lr_mul"] <= 1
    seconds = [event["train_seconds"] for event in steps]
    assert seconds == sorted(seconds)
    flops = flops_of_a_step(base_run)
    assert [event["train_flops"] for event in steps] == [flops * n for n in range(1, 21)]
    printed = {line.split()[0]: line for line in lines(base_run, "step")}
    assert all(
        f"train_loss:{event['train_loss']:.4f} " in printed[f"step:{event['step']}/20"]
        for event in steps
        if f"step:{event['step']}/20" in printed
    )
    final = events[-1]
    assert {name: str(final[name]) for name in base_run.final} == base_run.final


def test_the_config_tells_settings_origins_and_environment(base_run, corpus):
    config = strict_json((base_run.folder / "config.json").read_text(encoding="utf-8"))
    assert config["settings"]["iterations"] == 20 and config["settings"]["run_id"] == "läuft-日本"
    assert config["settings"]["data_path"] == str(corpus.data_path)
    assert config["origins"]["iterations"] == "environment" and config["origins"]["beta1"] == "preset"
    about = config["environment"]
    assert about["torch"] == torch.__version__ and about["threads"] == 1 and about["ranks"] == 1


def test_a_run_needs_no_network(base_run, offline):
    if not offline:
        pytest.skip("this system does not let us take the network away")
    assert base_run.code == 0  # it ran under `unshare --net`


@pytest.mark.slow
def test_the_same_run_again_gives_the_same_bytes(base_run, corpus, tmp_path):
    """By a copy of the script alone, elsewhere, from data under other names, after a warm-up."""
    here = tmp_path / "ein Ordner, ü 数据"
    shutil.copytree(corpus.data_path, here / "töken$ 1")
    shutil.copy(corpus.tokenizer_path, here / "模型.model")
    script = Path(shutil.copy(helpers.SCRIPT, here / "frozen.py"))
    paths = {"DATA_PATH": "töken$ 1", "TOKENIZER_PATH": "./模型.model"}
    env = corpus.env(**paths, ITERATIONS=20, WARMUP_STEPS=2, VAL_LOSS_EVERY=10)
    run = helpers.run_script(here, env, script=script)
    assert (run.code, run.err) == (0, "")
    same = [name for name in FINAL if re.search("sha256|loss|bpb|_bytes", name)]
    assert {name: run.final[name] for name in same} == {name: base_run.final[name] for name in same}
    assert run.losses() == base_run.losses()
    assert "warming up: 2 untimed steps" in run.out
    assert sorted(os.listdir(run.folder)) == sorted(os.listdir(base_run.folder))
    assert re.fullmatch(r"\d{8}-\d{6}-smoke-\d+", run.final["run_id"])


@pytest.mark.slow
def test_a_line_that_is_not_due_waits_for_a_pause(monkeypatch, capsys):
    """Steps and evaluations say how far they are every ten seconds."""
    now = [0.0]
    monkeypatch.setattr(train_gpt.time, "monotonic", lambda: now[0])
    run = train_gpt.Run(train_gpt.Machine(torch.device("cpu")), train_gpt.Settings())
    for now[0] in (1.0, 12.0, 13.0, 22.5):
        run.line(f"at {now[0]}", pause=10)
    run.line("at once")
    assert capsys.readouterr().out.splitlines() == ["at 12.0", "at 22.5", "at once"]


# --- refused, untouched -----------------------------------------------------------------------------------


def test_a_run_that_exists_is_refused_and_untouched(base_run, corpus):
    before = contents(base_run.cwd)
    again = helpers.run_here(train_gpt.main, base_run.cwd, corpus.env(RUN_ID="läuft-日本"))
    assert again.code == 2 and again.err.startswith("train_gpt.py: RUN_ID=läuft-日本: ")
    assert again.err.count("\n") == 1 and contents(base_run.cwd) == before


def test_eval_only_gives_exactly_the_score_of_the_run_and_writes_nothing(base_run, corpus):
    """Without any setting of the run: the artifact knows its shape."""
    before = contents(base_run.cwd)
    env = {
        "DATA_PATH": str(corpus.data_path),
        "TOKENIZER_PATH": str(corpus.tokenizer_path),
        "DTYPE": "float32",
        "EVAL_ONLY": str(base_run.folder / "model.ptz"),
        "COMPILE": "0",
        "VAL_BATCH_SIZE": "4096",
    }
    run = helpers.run_here(train_gpt.main, base_run.cwd, env)
    assert (run.code, run.err) == (0, "")
    for name in ("val_bpb", "val_loss", "val_tokens", "val_bytes", "artifact_sha256", "artifact_bytes"):
        assert run.final[name] == base_run.final[name]
    assert contents(base_run.cwd) == before and "train_loss" not in run.out


@pytest.mark.slow
def test_load_predictor_scores_the_artifact_as_the_run_did(base_run, corpus):
    """The referee's way in, over the raw bytes, in the number format of the run, which the artifact carries.

    Each window is a stream. It begins a token early: that token is charged to the stream before.
    """
    predictor = train_gpt.load_predictor(base_run.folder / "model.ptz", "cpu")
    tokens = corpus.tokens["val"].astype(np.int64)
    length = 32
    rows = (len(tokens) - 1) // length
    whole = tokens[np.arange(rows)[:, None] * length + np.arange(length + 1)]
    assert predictor.vocab_size == 400
    assert predictor.rows >= 1
    assert predictor.model.machine.dtype is torch.float32
    parts = (nats_of_steps(predictor, ids)[:, 1:] for ids in (whole, tokens[None, rows * length :]))
    nats = sum(part.sum() for part in parts)
    bpb = nats / np.log(2) / int(base_run.final["val_bytes"])
    assert abs(bpb - float(base_run.final["val_bpb"])) < 1e-6
    with pytest.raises(train_gpt.DataError, match="no-such"):
        train_gpt.load_predictor(base_run.folder / "no-such", "cpu")


@pytest.mark.slow
def test_a_predictor_of_a_gpu_has_more_streams_in_bfloat16(base_run, monkeypatch):
    """A device without numbers stands for a GPU. cuDNN would plan anew for each number of keys."""
    chosen = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", chosen.append)
    predictor = train_gpt.load_predictor(base_run.folder / "model.ptz", "meta")
    assert (predictor.rows, predictor.model.machine.dtype) == (1024, torch.bfloat16)
    assert chosen == [False]


# --- without a validation text ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unscored(tmp_path_factory, corpus) -> ScriptRun:
    """The base run without *_val_*.bin: the sealed room."""
    cwd = tmp_path_factory.mktemp("unscored")
    shutil.copytree(corpus.data_path, cwd / "data", ignore=shutil.ignore_patterns("*_val_*"))
    env = corpus.env(DATA_PATH="data", RUN_ID="run", ITERATIONS=20, VAL_LOSS_EVERY=10, TRAIN_LOG_EVERY=5)
    return helpers.run_here(train_gpt.main, cwd, env)


@pytest.mark.slow
def test_a_run_without_validation_text_says_so_and_makes_the_same_bytes(unscored, base_run):
    assert (unscored.code, unscored.err) == (0, "")
    assert "note: no validation text, no score" in unscored.out.splitlines()
    assert not re.search("val_(loss|bpb)", unscored.out)
    missing = base_run.final.keys() - unscored.final.keys() - {"eval_seconds"}
    assert missing == {name for name in base_run.final if name.startswith("val_")}
    for name in ("artifact_sha256", "state_sha256", "train_flops", "train_sha256"):
        assert unscored.final[name] == base_run.final[name]
    assert (unscored.folder / "model.ptz").read_bytes() == (base_run.folder / "model.ptz").read_bytes()
    assert unscored.losses() == base_run.losses()
    assert unscored.events("val") == []


@pytest.mark.slow
def test_without_validation_text_an_artifact_is_not_scored(unscored, corpus):
    env = corpus.env(DATA_PATH="data", EVAL_ONLY="logs/run/model.ptz")
    run = helpers.run_here(train_gpt.main, unscored.cwd, env)
    assert (run.code, run.out) == (3, "")
    assert re.fullmatch(r"train_gpt\.py: DATA_PATH=data .*no \*_val_0\.bin.*\n", run.err), run.err


# --- exit codes; 2 and 3 are provoked in test_settings.py and test_damage.py ------------------------------


@pytest.mark.slow
def test_exit_4_over_the_budget_with_all_files_written(corpus, tmp_path):
    run = helpers.run_here(
        train_gpt.main, tmp_path, corpus.env(RUN_ID="big", BUDGET_BYTES=100_000, CODE_BYTES="raw")
    )
    assert (run.code, run.final["budget"]) == (4, "over")
    assert int(run.final["code_bytes"]) == helpers.SCRIPT.stat().st_size
    total = int(run.final["code_bytes"]) + int(run.final["artifact_bytes"])
    assert int(run.final["total_bytes"]) == total > 100_000
    assert {"config.json", "metrics.jsonl", "model.ptz", "train.log"} <= set(os.listdir(run.folder))


@pytest.mark.slow
@pytest.mark.parametrize("number, ranks", [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_exit_16_after_a_signal_with_a_checkpoint_and_the_way_on(corpus, tmp_path, number, ranks):
    """SIGTERM to a single process: test_reliability.py."""
    run = launch.Launch(tmp_path, corpus.env(RUN_ID="long", ITERATIONS=10**6), ranks)
    run.signal_at("step:8/", number)
    run.need(16 if not ranks else 1)  # torchrun has an exit code of its own
    said = re.search(r"stopped by a signal after step (\d+) of 1000000; (.*) goes on", run.err)
    assert 8 <= int(said[1]) < 10**6 and "RUN_ID=long" in said[2]
    assert (tmp_path / f"logs/long/checkpoint/step_{int(said[1]):08}.ckpt").exists()


@pytest.mark.slow
def test_exit_17_when_the_loss_is_no_number(corpus, tmp_path):
    env = corpus.env(RUN_ID="nan", ITERATIONS=50, SCALAR_LR=1e30, LR_WARMUP_STEPS=0)
    run = helpers.run_here(train_gpt.main, tmp_path, env)
    assert run.code == 17 and "---" not in run.out.splitlines()
    assert re.fullmatch(r"train_gpt\.py: step 1\d .*MAX_SKIPPED.*\n", run.err)
    assert not (tmp_path / "logs/nan/model.ptz").exists()
    for line in (tmp_path / "logs/nan/metrics.jsonl").read_text(encoding="utf-8").splitlines():
        strict_json(line)


@pytest.mark.slow
def test_exit_17_when_the_score_is_no_number(corpus, tmp_path):
    run = helpers.run_here(train_gpt.main, tmp_path, corpus.env(ITERATIONS=1, QK_GAIN_INIT=-1e38))
    assert run.code == 17 and re.fullmatch(r"train_gpt\.py: .*nan nats.*\n", run.err), run.err


# --- surroundings: one line at most, and no traceback -----------------------------------------------------


SURROUNDINGS = {
    "no output": (">&-", {}),
    "nothing is open": ("<&- >&- 2>&-", {}),
    "a locale of ASCII, and no programs": ("", {"LC_ALL": "C", "PYTHONUTF8": 0, "PATH": "/nonexistent"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SURROUNDINGS)
def test_bare_surroundings_do_not_stop_a_run(corpus, tmp_path, kind):
    closed, env = SURROUNDINGS[kind]
    prefix = ("/bin/sh", "-c", f'"$@" {closed}', "sh")
    run = helpers.run_script(tmp_path, corpus.env(RUN_ID="run", **env), prefix=prefix)
    assert (run.code, run.err) == (0, "")
    log = (tmp_path / "logs/run/train.log").read_text(encoding="utf-8")
    assert "val_bpb: " in log.split("\n---\n")[1], "the files have it all"


def cannot_allocate(size: int = 2**60) -> None:
    torch.empty(size)


def fail_with(error: Exception):
    def fail(s):
        raise error

    return fail


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    "fail",
    [
        lambda s: cannot_allocate(),
        lambda s: bytes(2**60),
        lambda s: np.empty(2**60, np.uint8),
        fail_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        fail_with(RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")),
    ],
    ids=["torch", "python", "numpy", "cuda", "mlx"],
)
def test_any_library_that_has_no_memory_left_is_understood_on_any_rank(monkeypatch, capsys, fail, rank):
    monkeypatch.setenv("PRESET", "smoke")
    monkeypatch.setenv("RANK", rank)
    assert train_gpt.main(open_machine=fail) == 2
    said = "train_gpt.py: out of memory: lower VAL_BATCH_SIZE, TRAIN_BATCH_TOKENS or MODEL_DIM"
    assert capsys.readouterr().err == said + (" (rank 1)" if rank == "1" else "") + "\n"


def test_memory_in_an_errors_text_is_no_lack_of_it(corpus, tmp_path, monkeypatch):
    run = helpers.run_here(train_gpt.main, tmp_path, corpus.env(DATA_PATH="/nonexistent/memory"))
    assert run.code == 3 and "DATA_PATH=/nonexistent/memory" in run.err and "out of" not in run.err
    monkeypatch.setenv("PRESET", "smoke")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train_gpt.main(
            open_machine=fail_with(RuntimeError("CUDA error: an illegal memory access was encountered"))
        )


def test_nccl_waits_longer_than_gloo(monkeypatch):
    """Its watchdog ends the process by SIGABRT; before, gloo fails, and the run says how to go on."""
    groups, patience = {}, {}
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(train_gpt.dist, "rendezvous", lambda *_, **__: iter([("store", 0, 2)]))
    monkeypatch.setattr(train_gpt.dist, "PrefixStore", lambda *_: "store")
    monkeypatch.setattr(
        train_gpt.dist, "init_process_group", lambda kind, timeout, **_: patience.update({kind: timeout})
    )
    monkeypatch.setattr(
        train_gpt.dist,
        "new_group",
        lambda backend="", timeout=None: groups.setdefault(backend, timeout) or backend,
    )
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    machine = train_gpt.open_machine(train_gpt.load_settings(helpers.tiny_env(DIST_TIMEOUT=60), "smoke")[0])
    assert patience["gloo"].total_seconds() == 60 < groups["nccl"].total_seconds()
    assert machine.reducers is not None


def test_a_relative_path_is_named_with_the_folder_that_it_was_sought_in(corpus, tmp_path):
    run = helpers.run_here(train_gpt.main, tmp_path, corpus.env(DATA_PATH="data/datasets/nothing"))
    assert run.code == 3 and run.err.count("\n") == 1
    assert "DATA_PATH=data/datasets/nothing" in run.err and str(tmp_path) in run.err


# --- ranks ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_any_number_of_ranks_trains_the_same_model(base_run, corpus, tmp_path, ranks):
    env = corpus.env(RUN_ID="ranks", ITERATIONS=20, VAL_LOSS_EVERY=10, TRAIN_LOG_EVERY=5)
    env |= {"PROVOKE": "hash@20", "PYTHONPATH": str(helpers.ROOT)}
    run = helpers.run_script(tmp_path, env, ranks, script=launch.FAULTS)
    assert run.code == 0, run.err
    for name in ("tokens_seen", "val_tokens", "val_bytes", "train_sha256", "params"):
        assert run.final[name] == base_run.final[name]
    np.testing.assert_allclose(run.losses(), base_run.losses(), rtol=1e-4)
    for found, expected in zip(run.events("val"), base_run.events("val")):
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-4)
    assert float(run.final["val_bpb"]) == pytest.approx(float(base_run.final["val_bpb"]), rel=1e-3)
    replicas = dict(re.findall(r"state before step 20 on rank (\d): ([0-9a-f]{64})", run.out))
    assert len(replicas) == ranks and len(set(replicas.values())) == 1
    assert run.out.count("\n---\n") == 1, "one rank speaks"


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_slots_are_refused_by_name(corpus, tmp_path):
    run = helpers.run_script(tmp_path, corpus.env(RUN_ID="three"), ranks=3)
    assert run.code != 0 and "exitcode  : 2" in run.err
    said = [line for line in run.err.splitlines() if line.startswith("train_gpt.py: ")]
    assert len(said) == 1 and "WORLD_SIZE=3: by BATCH_SLOTS takes one of 1, 2, 4, 8" in said[0]
    assert not (tmp_path / "logs").exists()


# --- compiled or eager ------------------------------------------------------------------------------------


@NO_CUDA
@pytest.mark.slow
def test_compiled_and_eager_runs_agree(base_run, corpus, tmp_path):
    env = corpus.env(RUN_ID="compiled", ITERATIONS=20, COMPILE=1)
    run = helpers.run_script(tmp_path, env | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    said = [line for line in run.err.splitlines() if "No CUDA runtime is found" not in line]
    assert (run.code, said) == (0, [])  # torch's CUDA build says so where there is no GPU
    if "compile:1" not in run.out:
        pytest.skip("no compiler here: " + re.search(r"compile:0.*", run.out)[0])
    np.testing.assert_allclose(run.losses(), base_run.losses(), rtol=1e-3)
    assert float(run.final["val_bpb"]) == pytest.approx(float(base_run.final["val_bpb"]), rel=2e-3)


@NO_CUDA
@pytest.mark.slow
def test_without_a_compiler_one_line_says_so_and_the_run_is_eager(base_run, corpus, tmp_path):
    env = corpus.env(RUN_ID="eager", ITERATIONS=20, COMPILE=1)
    broken = {"CXX": "/nonexistent/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    run = helpers.run_script(tmp_path, env | broken)
    assert (run.code, run.err) == (0, "")
    said = [line for line in run.out.splitlines() if line.startswith("compile:0")]
    assert len(said) == 1 and "eager" in said[0]
    assert run.final["state_sha256"] == base_run.final["state_sha256"]


# --- settings at work -------------------------------------------------------------------------------------

TINY_FLOPS = next(train_gpt.Plan(train_gpt.load_settings(helpers.tiny_env(), "smoke")[0]).steps()).flops
VARIANTS = {
    "base": {},
    "seed": {"SEED": 7},
    "bfloat16": {"DTYPE": "bfloat16"},
    "window": {"EVAL_SEQ_LEN": 16},
    "partial": {"VAL_TOKENS_LIMIT": 1000},
    "capped": {"MAX_WALLCLOCK_SECONDS": 4, "ITERATIONS": 10**6},
    "counted": {"MAX_FLOPS": 24.9 * TINY_FLOPS, "ITERATIONS": 10**6},
    "slots": {"BATCH_SLOTS": 4},
    "softcap": {"LOGIT_SOFTCAP": 3},
    "length": {"TRAIN_SEQ_LEN": 25, "TRAIN_BATCH_TOKENS": 600},  # no divisor of the reference's batch
    "int8": {"MODEL_DIM": 192, "NUM_HEADS": 2},  # wide enough for matrices in int8
}


@pytest.fixture(scope="module")
def variants(tmp_path_factory, corpus) -> dict[str, ScriptRun]:
    """A run of ten steps for each variant, by its name."""
    cwd = tmp_path_factory.mktemp("variants")
    return {
        name: helpers.run_here(train_gpt.main, cwd, corpus.env(**{"RUN_ID": name, "ITERATIONS": 10} | more))
        for name, more in VARIANTS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_runs_through_and_learns(variants, name):
    run = variants[name]
    assert (run.code, run.err) == (0, "")
    assert run.losses()[-1] < run.losses()[0] - 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "base"])
def test_every_variant_changes_what_it_should(variants, name):
    base, run = variants["base"], variants[name]
    same_training = name in ("window", "partial")
    assert (run.losses() == base.losses()) == same_training
    assert run.final["artifact_sha256"] != base.final["artifact_sha256"], "it carries its settings"
    assert run.final["val_bpb"] != base.final["val_bpb"]
    assert (run.final["params"] == base.final["params"]) == (name != "int8")


@pytest.mark.slow
def test_a_partial_score_says_so_in_every_line(variants):
    run = variants["partial"]
    assert lines(run, "val")[-1].count(" partial ") == 1
    for name in ("val_loss", "val_bpb"):
        assert run.final[name].endswith(" partial"), name
    assert run.final["val_tokens"] == "999"
    assert "partial" not in lines(variants["base"], "val")[-1] + variants["base"].final["val_bpb"]


@pytest.mark.slow
def test_the_clock_ends_a_run_at_a_rate_near_zero(variants):
    run = variants["capped"]
    steps = run.events("step")
    assert steps[-2]["train_seconds"] < 4 < float(run.final["train_seconds"]) + 0.1  # a step is logged, too
    assert len(steps) == int(run.final["steps"])
    assert max(event["lr_mul"] for event in steps) == 1.0 and steps[-1]["lr_mul"] < 0.2
    assert run.events("val")[-1]["step"] == steps[-1]["step"]


@pytest.mark.slow
def test_operations_end_a_run_at_the_last_step_within_them(variants):
    """The rate falls to the end of these steps."""
    run = variants["counted"]
    assert (run.final["steps"], run.final["train_flops"]) == ("24", str(24 * TINY_FLOPS))
    rates = [event["lr_mul"] for event in run.events("step")]
    assert rates[11] == 1.0
    assert rates[-1] == pytest.approx((1 - 23 / 24.9) / 0.5)  # WARMDOWN_ITERS is half of the run
    assert lines(run, "step")[0].startswith("step:1/24 ")


@NO_CUDA
@pytest.mark.slow
def test_without_a_preset_a_machine_without_cuda_takes_the_floppy(tmp_path):
    run = helpers.run_here(train_gpt.main, tmp_path, {"DRY_RUN": "1"})
    assert run.code == 0 and run.out.startswith("PRESET=floppy (preset): ")
