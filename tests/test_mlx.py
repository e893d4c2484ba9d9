"""train_gpt_mlx.py runs: beside train_gpt.py, on its files, by several processes, and in trouble.

The model itself is held by tests/test_parity.py, the shared source by tests/test_twin.py.
"""
import gc
import hashlib
import json
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import helpers
import record_kit
import train_gpt
from helpers import Run
from submission import parse_run

mx = pytest.importorskip("mlx.core", reason="mlx is not installed: nothing of train_gpt_mlx.py can be tried")
import train_gpt_mlx  # noqa: E402  (needs mlx)

LOSS = BPB = 1e-3       # how far 50 steps of the two scripts may lie apart: sums are taken in another order
STEPS = dict(ITERATIONS=50, VAL_LOSS_EVERY=25, TRAIN_LOG_EVERY=5, EMA_DECAY=0.9, BATCH_SLOTS=2)
SCRIPTS = {"torch": helpers.SCRIPT, "mlx": helpers.MLX_SCRIPT}


def start(cwd: Path, env: dict, script: Path = helpers.MLX_SCRIPT, prefix: tuple = ()) -> subprocess.Popen:
    cwd.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen([*prefix, sys.executable, str(script)], cwd=cwd, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, encoding="utf-8",
                            env=helpers.clean_environment(**env))


def end(process: subprocess.Popen, cwd: Path) -> Run:
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    return Run(process.returncode, out, err, cwd)


def mlx_run(cwd: Path, env: dict) -> Run:
    return end(start(cwd, env), cwd)


def finals(run: Run) -> dict[str, str]:
    assert run.code == 0, run.err
    return run.final


@pytest.fixture(scope="module")
def pair(tmp_path_factory, corpus) -> dict[str, Run]:
    """The same 50 steps by both scripts, at the same time."""
    cwd = tmp_path_factory.mktemp("pair")
    env = corpus.env(**STEPS)
    running = {name: start(cwd / name, env | {"RUN_ID": "r"}, script) for name, script in SCRIPTS.items()}
    runs = {name: end(process, cwd / name) for name, process in running.items()}
    assert [run.code for run in runs.values()] == [0, 0], [run.err for run in runs.values()]
    return runs


# --- beside train_gpt.py ----------------------------------------------------------------------------------

def test_fifty_steps_are_those_of_train_gpt(pair):
    """The same batches by hash, losses and scores within 1e-3, and all counts equal."""
    told, found = pair["torch"], pair["mlx"]
    for one, other in zip(told.events("step"), found.events("step"), strict=True):
        assert one["step"] == other["step"] and one["lr_mul"] == other["lr_mul"]
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=LOSS)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.01)
    assert found.events("step")[-1]["train_loss"] < found.events("step")[0]["train_loss"] - 0.5, "it learns"
    for one, other in zip(told.events("val"), found.events("val"), strict=True):
        assert one["val_bpb"] == pytest.approx(other["val_bpb"], abs=BPB)
    assert float(told.final["val_bpb"]) == pytest.approx(float(found.final["val_bpb"]), abs=BPB)
    same = """val_tokens val_bytes steps params tokens_seen skipped_steps resumes batches_crc32 budget_bytes
        budget train_sha256 val_sha256 tokenizer_sha256 preset seed run_id device""".split()
    assert [told.final[name] for name in same] == [found.final[name] for name in same]
    assert [{"torch": "mlx"}.get(name, name) for name in told.final] == [*found.final]


TIMES = re.compile(r"(?<=train_time:)\d+(?=ms)|(?<=step_avg:)[\d.]+|(?<=tok_s:)\d+|(?<=mfu:)[\d.]+(?=%)|"
                   r"(?<=data_wait:)[\d.]+|\d+(?=GFLOP/s)|[\d.]+(?=s$)")
LOSSES = re.compile(r"(?<=train_loss:)[\d.]+|(?<=val_loss:)[\d.]+|(?<=val_bpb:)[\d.]+")


def test_the_log_lines_are_those_of_train_gpt_but_for_times(pair):
    logs = [(pair[name].folder / "train.log").read_text(encoding="utf-8") for name in ("torch", "mlx")]
    assert logs[1] == pair["mlx"].out, "a file gets what a terminal would get"
    lines = [TIMES.sub("#", log.split("\n---\n")[0]).splitlines() for log in logs]
    environments = [dict(pair.split(":", 1) for pair in re.findall(r"(?:^|(?<= ))\w+:\S+", part.pop(1)))
                    for part in lines]
    assert {*environments[0]} - {*environments[1]} == {"torch", "threads"}
    assert {*environments[1]} - {*environments[0]} == {"mlx"}
    assert [line.split("'")[0] for line in (lines[0].pop(), lines[1].pop())] == ["the model writes: "] * 2
    about = [line for line in lines[0] if line.startswith("device:")]
    assert about == [line for line in lines[1] if line.startswith("device:")] and len(about) == 1
    assert [LOSSES.sub("#", line) for line in lines[0]] == [LOSSES.sub("#", line) for line in lines[1]]
    values = [[float(value) for line in part for value in LOSSES.findall(line)] for part in lines]
    assert len(values[0]) > 20 and values[0] == pytest.approx(values[1], abs=LOSS + 1e-4)


def test_the_records_tools_read_the_log_of_either(pair):
    files = ("train.log", "metrics.jsonl")
    told, found = (parse_run(name, *((run.folder / file).read_bytes() for file in files))
                   for name, run in pair.items())
    assert (told.about["mlx"], found.about["torch"]) == ("none", "none")
    assert told.about["torch"] == torch.__version__ and re.fullmatch(r"[\d.]+", found.about["mlx"])
    assert set(told.about) == set(found.about) and told.value("steps") == found.value("steps") == 50


@pytest.mark.skipif(not record_kit.HAS_SANDBOX, reason=record_kit.NO_SANDBOX)
def test_a_record_of_mlx_runs_is_frozen_scored_and_proven(tmp_path):
    kit = record_kit.Kit(tmp_path, helpers.MLX_SCRIPT)
    checks = kit.verify(kit.good, "--proof-bytes", "400")
    assert record_kit.failed(checks) == set(), "\n".join(map(str, checks))
    assert {"score", *record_kit.PROBES} <= {line.name for line in checks if line.verdict == "PASS"}


def test_the_files_and_the_config_are_those_of_train_gpt(pair):
    names = [sorted(str(path.relative_to(run.folder)) for path in run.folder.rglob("*"))
             for run in pair.values()]
    assert names[0] == names[1] and "checkpoint/step_00000050.ckpt" in names[0]
    one, other = (json.loads((run.folder / "config.json").read_text()) for run in pair.values())
    assert [*one] == [*other]
    assert [one[part] == other[part] for part in ("settings", "origins", "sha256")] == [True] * 3


def test_dry_run_says_the_same(tmp_path):
    lines = []
    for script in SCRIPTS.values():
        env = helpers.tiny_env(DRY_RUN=1, NUM_LAYERS=4, CODE_BYTES="raw")
        done = end(start(tmp_path, env, script), tmp_path)
        assert (done.code, done.err) == (0, "")
        assert f"code_bytes: {script.stat().st_size}\n" in done.out
        lines.append([line for line in done.out.splitlines() if not line.startswith("code_bytes")])
    assert lines[0] == lines[1] and len(lines[0]) > 70


def test_mistakes_end_with_the_same_codes(tmp_path, corpus):
    for env, code, told in ((helpers.tiny_env(ITERATION=3), 2, "ITERATION='3'"),
                            (corpus.env(DEVICE="cuda"), 2, "DEVICE=cuda: mlx"),
                            (helpers.tiny_env(TOKENIZER_PATH="none"), 3, "none: cannot be read"),
                            (corpus.env(EVAL_ONLY="none"), 3, "EVAL_ONLY=none"),
                            (corpus.env(MLX_HOSTFILE="none"), 2, "MLX_HOSTFILE=none")):
        done = mlx_run(tmp_path, env)
        assert (done.code, done.out) == (code, "") and done.err.startswith("train_gpt_mlx.py: "), done.err
        assert told in done.err and done.err.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_exit_4_over_the_budget(tmp_path, corpus):
    done = mlx_run(tmp_path, corpus.env(ITERATIONS=1, BUDGET_BYTES=1000))
    assert done.code == 4 and done.final["budget"] == "over" and (done.folder / "model.int8.ptz").exists()


# --- artifacts and predictors -----------------------------------------------------------------------------

def test_equal_weights_give_equal_artifacts():
    """The start weights, of a shape with all three schemes."""
    env = helpers.tiny_env(MODEL_DIM=128, NUM_LAYERS=3, TIE_EMBEDDINGS=0, SEED=5)
    blobs = []
    for script in (train_gpt, train_gpt_mlx):
        s, _ = script.load_settings(env, "smoke")
        blobs.append(script.Trainer(s, script.open_machine(s)).export())
    assert blobs[0] == blobs[1]
    scheme = [train_gpt.scheme_of(param) for param in train_gpt.parameter_table(s)]
    assert set(scheme) == {"int8 rows", "float16", "float32"}


@pytest.mark.parametrize("script", [train_gpt, train_gpt_mlx], ids=["by torch", "by mlx"])
def test_each_reads_the_others_artifact_and_writes_the_same_bytes(pair, script):
    for run in pair.values():
        blob = (run.folder / "model.int8.ptz").read_bytes()
        s, weights = script.decode_artifact(blob, "artifact")
        assert run.final["artifact_sha256"] == hashlib.sha256(blob).hexdigest()
        assert all(value.dtype == np.float32 for value in weights.values())
        stored = [name for name, value in weights.items() if script.scheme_of(next(
            p for p in script.parameter_table(s) if p.name == name)) != "int8 rows"]
        assert stored and script.encode_artifact(s, weights) == train_gpt.encode_artifact(s, weights)


@pytest.mark.parametrize("scorer", SCRIPTS)
def test_each_scores_the_others_artifact_as_it_did(pair, corpus, tmp_path, scorer):
    other = pair["mlx" if scorer == "torch" else "torch"]
    env = corpus.env(EVAL_ONLY=other.folder / "model.int8.ptz", BATCH_SLOTS=2)
    done = end(start(tmp_path, env, SCRIPTS[scorer]), tmp_path)
    assert done.code == 0 and not [*tmp_path.iterdir()], done.err
    assert float(done.final["val_bpb"]) == pytest.approx(float(other.final["val_bpb"]), abs=1e-5)
    same = ("val_tokens", "val_bytes", "artifact_sha256", "val_sha256")
    assert [done.final[name] for name in same] == [other.final[name] for name in same]


def test_load_predictor_gives_what_torch_gives(pair):
    artifact = pair["mlx"].folder / "model.int8.ptz"
    s, weights = train_gpt.decode_artifact(artifact.read_bytes(), "artifact")
    one = train_gpt.Predictor(train_gpt.GPT(s, train_gpt.Machine(torch.device("cpu"))))     # float32
    one.model.weights.set(one.model.weights.pack(weights))
    other = train_gpt_mlx.load_predictor(artifact)
    ids = np.random.default_rng(0).integers(0, 400, (3, 30))
    assert (one.vocab_size, one.max_len) == (other.vocab_size, other.max_len)
    for found, told in ((other.nll(ids), one.nll(ids)), (other.nll(ids, 5), one.nll(ids, 5)),
                        (other.logprobs(ids), one.logprobs(ids))):
        assert type(found) is np.ndarray and found.dtype == np.float32 and found.shape == told.shape
        assert np.abs(found - told).max() < 1e-4


# --- checkpoints: to and fro ------------------------------------------------------------------------------

def test_torch_to_mlx_to_torch_goes_on_as_if_undisturbed(pair, corpus, tmp_path):
    """Killed twice; who goes on is another script each time."""
    env = corpus.env(**STEPS, RUN_ID="swap", CKPT_SECONDS=1e-6)
    for script, fault, code in (("torch", "kill@18", -9), ("mlx", "kill@35", -9), ("torch", "", 0)):
        done = end(start(tmp_path, env | {"FAULT": fault}, SCRIPTS[script]), tmp_path)
        assert done.code == code, done.err
        if script == "mlx":
            arrays, facts, _ = train_gpt.load_checkpoint(tmp_path / "logs/swap/checkpoint")
            assert 18 < facts["step"] <= 35 and facts["resumes"] == 1
    told = train_gpt.load_checkpoint(pair["torch"].folder / "checkpoint")
    assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == \
        {name: (x.shape, x.dtype) for name, x in told[0].items()}
    assert [*facts] == [*told[1]], "the same facts in the same order"
    assert "note: mlx was " in done.out and ", is none: bits may differ" in done.out
    for one, other in zip(pair["torch"].events("step"), done.events("step"), strict=True):
        assert (one["step"], one["lr_mul"]) == (other["step"], other["lr_mul"])
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=LOSS)
    assert done.final["batches_crc32"] == pair["torch"].final["batches_crc32"]
    assert float(done.final["val_bpb"]) == pytest.approx(float(pair["torch"].final["val_bpb"]), abs=BPB)


def test_a_signal_ends_with_16_and_the_told_command_goes_on_to_the_same_bits(pair, corpus, tmp_path):
    env = corpus.env(**STEPS, RUN_ID="stopped", FAULT="sleep@10:1")
    process = start(tmp_path, env)
    head = ""
    while "step:9/" not in head:
        line = process.stdout.readline()
        assert line, "it ended too early"
        head += line
    process.send_signal(signal.SIGTERM)
    done = end(process, tmp_path)
    told = re.fullmatch(r"train_gpt_mlx\.py: stopped by a signal after step \d+ of 50; to go on: (.*)\n",
                        done.err)
    assert done.code == 16 and told, done.err
    again = subprocess.run(["sh", "-c", told[1]], cwd=tmp_path, capture_output=True, text=True, timeout=200,
                           env=helpers.clean_environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin"))
    assert again.returncode == 0, again.stderr
    found = Run(0, again.stdout, again.stderr, tmp_path).final
    same = ("state_sha256", "artifact_sha256", "batches_crc32", "val_bpb")
    assert [found[name] for name in same] == [pair["mlx"].final[name] for name in same]
    assert found["resumes"] == "1"


# --- several processes ------------------------------------------------------------------------------------

def ring(ranks: int) -> str:
    """What mlx.launch writes to MLX_HOSTFILE, with ports that are free."""
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    places = [[f"127.0.0.1:{server.getsockname()[1]}"] for server in with_ports]
    for server in with_ports:
        server.close()
    return json.dumps(places)


def on_ranks(cwd: Path, env: dict, ranks: int = 2) -> list[subprocess.Popen]:
    """The script as mlx.launch starts it, without its habit of ending the others when one has ended."""
    cwd.mkdir(parents=True, exist_ok=True)
    (cwd / "ring.json").write_text(ring(ranks))
    return [start(cwd, env | {"MLX_HOSTFILE": cwd / "ring.json", "MLX_RANK": rank}) for rank in range(ranks)]


def test_two_processes_replay_what_one_did(pair, corpus, tmp_path):
    """Under the real mlx.launch; the rates of the first 6 steps come from LR_TRACE."""
    env = corpus.env(**STEPS | dict(ITERATIONS=6, LR_TRACE=pair["torch"].folder / "metrics.jsonl"))
    one = mlx_run(tmp_path / "one", env)
    finals(one)
    port = json.loads(ring(2))[0][0].split(":")[1]
    launch = [str(Path(sys.executable).parent / "mlx.launch"), "-n", "2", "-p", port, sys.executable,
              str(helpers.MLX_SCRIPT)]
    (tmp_path / "two").mkdir()
    done = subprocess.run(launch, cwd=tmp_path / "two", capture_output=True, text=True, timeout=200,
                          stdin=subprocess.DEVNULL, env=helpers.clean_environment(**env))
    two = Run(done.returncode, done.stdout, done.stderr, tmp_path / "two")
    assert finals(two)["batches_crc32"] == one.final["batches_crc32"], "the same tokens in the same slots"
    assert "\nranks:2 " in two.out and " ranks:" in two.out.split("step:6/6 train_loss")[1].splitlines()[0]
    for told, *found in zip(pair["torch"].events("step"), one.events("step"), two.events("step")):
        for event in found:
            assert event["lr_mul"] == told["lr_mul"]
            assert event["train_loss"] == pytest.approx(told["train_loss"], abs=1e-4)
    assert float(two.final["val_bpb"]) == pytest.approx(float(one.final["val_bpb"]), abs=1e-5)


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_rank_that_dies_or_hangs_ends_the_other_by_name(corpus, tmp_path, kind):
    env = corpus.env(FAULT=f"{kind}@3:rank1", RUN_ID="lost", DIST_TIMEOUT=8, ITERATIONS=5)
    first, second = on_ranks(tmp_path, env)
    try:
        done = end(first, tmp_path)
    finally:
        second.kill()
        second.communicate()
    assert done.code == 16, done.err
    told = [line for line in done.err.splitlines() if line.startswith("train_gpt_mlx.py: ")]
    assert len(told) == 1 and "lost rank 1: dead, or silent for DIST_TIMEOUT" in told[0]
    assert "to go on: " in told[0] and "mlx.launch -n 2 python " in told[0]


def test_a_rank_that_never_comes_is_named(corpus, tmp_path):
    """mlx itself would wait for ever, deaf to signals."""
    (tmp_path / "ring.json").write_text(ring(2))
    done = mlx_run(tmp_path, corpus.env(MLX_HOSTFILE="ring.json", MLX_RANK=0, DIST_TIMEOUT=2))
    assert done.code == 16 and "rank 1 did not come within DIST_TIMEOUT" in done.err
    refused = mlx_run(tmp_path, corpus.env(MLX_HOSTFILE="ring.json", MLX_RANK=1, BATCH_SLOTS=1))
    assert refused.code == 2 and not refused.out


def test_ranks_that_differ_end_with_17(corpus, tmp_path):
    processes = on_ranks(tmp_path, corpus.env(FAULT="drift@2:rank1", ITERATIONS=2, DIST_TIMEOUT=20))
    done = [end(process, tmp_path) for process in processes]
    assert [run.code for run in done] == [17, 17]
    assert "step 2: the weights of rank 1 differ from the others'" in done[0].err + done[1].err


# --- trouble ----------------------------------------------------------------------------------------------

def small_trainer(compile: bool = False, **more):
    s, _ = train_gpt_mlx.load_settings(helpers.tiny_env(**more), "smoke")
    machine = train_gpt_mlx.open_machine(s)
    machine.compile = compile
    return train_gpt_mlx.Trainer(s, machine)


def batch_of(s, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, s.vocab_size, (s.batch_slots, s.slot_tokens + 1))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_bad_step_changes_nothing_and_is_marked(value):
    trainer = small_trainer(FAULT=f"{value}@2:1.qkv", EMA_DECAY=0.9, BATCH_SLOTS=2, SKIP_SIGMA=5)
    batch = trainer.convert(batch_of(trainer.s))
    assert trainer.step(batch, 0, 1.0).tolist()[2:] == [1.0, 0.0]
    before = trainer.optimizer.sha256(1)
    loss, norm, taken, bad = trainer.step(batch, 1, 1.0).tolist()
    assert (np.isfinite(loss), np.isfinite(norm), taken, bad) == (True, False, 0.0, 1.0)
    assert trainer.optimizer.sha256(1) == before
    assert trainer.step(batch, 2, 1.0).tolist()[2] == 1.0 and trainer.optimizer.sha256(1) != before


def test_spikes_are_skipped_as_torch_skips_them():
    """Losses and norms with rare jumps, and some that are no numbers: the same verdicts, the same memory."""
    rng, optimizers = np.random.default_rng(0), []
    for script in (train_gpt, train_gpt_mlx):
        s, _ = script.load_settings(helpers.tiny_env(SKIP_SIGMA=4), "smoke")
        optimizers.append(script.Trainer(s, script.open_machine(s)).optimizer)
    verdicts = []
    for step in range(400):
        seen = (rng.standard_normal(2) * [0.1, 0.3] + [3, 1]).astype(np.float32)
        seen *= 2.0 if step % 37 == 36 else 1.0
        seen[step % 2] = np.nan if step % 90 == 50 else seen[step % 2]
        found = [bool(optimizers[0].judge(torch.from_numpy(seen))), bool(optimizers[1].judge(mx.array(seen)))]
        assert found[0] == found[1], step
        verdicts.append(found[0])
    assert 8 < verdicts.count(False) < 40 and all(verdicts[:36]), "four nan, and spikes after 128 steps"
    assert np.array_equal(optimizers[0].recent.numpy(), np.array(optimizers[1].recent))


def test_exit_17_after_max_skipped_bad_steps(corpus, tmp_path):
    done = mlx_run(tmp_path, corpus.env(FAULT="nan@2,inf@3", MAX_SKIPPED=2, ITERATIONS=5, RUN_ID="r"))
    assert done.code == 17 and "step 3: " in done.err and "MAX_SKIPPED" in done.err
    assert done.out.count("skipped, weights and optimizer are as before") == 2


def test_memory_is_flat_over_500_steps():
    trainer = small_trainer(MODEL_DIM=16, NUM_HEADS=2, NUM_LAYERS=1, TRAIN_SEQ_LEN=8, BATCH_SLOTS=1,
                            VOCAB_SIZE=50, TRAIN_BATCH_TOKENS=16, EMA_DECAY=0.9, SKIP_SIGMA=9)
    batch, found = trainer.convert(batch_of(trainer.s)), []
    gc.collect()        # of other tests
    for step in range(550):
        stats = trainer.step(batch, step, 0.1)
        if step % 50 == 49:
            assert np.isfinite(stats.tolist()).all()
            mx.synchronize()
            found.append((mx.get_active_memory(), mx.get_peak_memory(),
                          1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
            if step == 49:
                mx.reset_peak_memory()
    active, peak, resident = np.array(found[1:]).T
    assert active.max() < 200_000 and np.ptp(active) < 20_000, "a step's array kept would be 500 of them"
    assert np.ptp(peak) < 50_000 and np.ptp(resident) < 3_000_000, found


def test_passes_are_sized_to_the_memory_and_give_the_same():
    """A machine that holds one sequence at a time, one that holds five, and one that holds all."""
    found = []
    for rows in (1, 5, 100):
        trainer = small_trainer(BATCH_SLOTS=2, TRAIN_BATCH_TOKENS=512)
        length = trainer.s.train_seq_len
        trainer.machine.memory = 10**12
        trainer.machine.memory = 10**12 // trainer.model.rows_at_once(length) * rows
        assert trainer.model.rows_at_once(length) in (rows, rows - 1, rows + 1)
        ids = batch_of(trainer.s)[:, :length + 1]
        loss, norm, *_ = trainer.step(trainer.convert(batch_of(trainer.s)), 0, 0.0).tolist()
        found.append((loss, norm, np.array(trainer.grad), trainer.predictor.nll(ids),
                      trainer.predictor.logprobs(ids)))
    for others in zip(*found):
        for other in others[1:]:
            assert np.allclose(others[0], other, rtol=1e-5, atol=1e-7)
    assert train_gpt_mlx.GPT.rows_at_once(trainer.model, 10**9) == 1


def test_bfloat16_follows_torchs():
    losses = []
    for script in (train_gpt, train_gpt_mlx):
        s, _ = script.load_settings(helpers.tiny_env(DTYPE="bfloat16", BATCH_SLOTS=2), "smoke")
        trainer = script.Trainer(s, script.open_machine(s))
        assert str(trainer.machine.dtype).endswith("bfloat16")
        losses.append([trainer.step(trainer.convert(batch_of(s, step)), step, 1.0).tolist()[0]
                       for step in range(5)])
    assert losses[0] == pytest.approx(losses[1], abs=0.03)


@pytest.mark.parametrize("kind", ["broken", "none"])
def test_without_a_compiler_one_line_says_so_and_the_run_goes_on(corpus, tmp_path, kind):
    """g++ that answers, but cannot compile; and none at all."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sh").symlink_to(shutil.which("sh"))
    if kind == "broken":
        (tmp_path / "bin/g++").write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexit 1\n')
        (tmp_path / "bin/g++").chmod(0o755)
    env = corpus.env(PATH=tmp_path / "bin", TMPDIR=tmp_path, ITERATIONS=1)     # mlx keeps what it compiled
    eager, quick = (mlx_run(tmp_path / str(flag), env | {"COMPILE": str(flag)}) for flag in (0, 1))
    assert finals(eager)["state_sha256"] == finals(quick)["state_sha256"]
    said = {"broken": "\ncompile:0 (failed, so eager and slower: RuntimeError: ",
            "none": " compile:0 (no g++ here)"}[kind]
    assert quick.out.count(said) == 1 and said not in eager.out
