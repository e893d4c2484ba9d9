"""train_gpt_mlx.py runs: beside train_gpt.py, on its files, by several processes, and in trouble.

The model itself is held against parity.py by test_parity.py.
"""

import contextlib
import hashlib
import json
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

import train_gpt
from tests.kit import helpers
from tests.kit.helpers import ScriptRun
from tests.kit.launch import Launch, contents
from tests.trainer.test_parity import Adapter

mx = pytest.importorskip("mlx.core", reason="mlx is not installed: nothing of train_gpt_mlx.py can be tried")
twin = pytest.importorskip("train_gpt_mlx")

LOSS = BPB = 1e-3  # how far 30 steps of the two scripts may lie apart: sums are taken in another order
STEPS = {"ITERATIONS": 30, "VAL_LOSS_EVERY": 15, "TRAIN_LOG_EVERY": 5, "BATCH_SLOTS": 2}
SCRIPTS = {"torch": helpers.SCRIPT, "mlx": helpers.MLX_SCRIPT}
COUNTS = """
    val_tokens val_bytes steps params train_flops tokens_seen skipped_steps resumes budget
    budget_bytes train_sha256 val_sha256 tokenizer_sha256 preset seed run_id device torch
"""


def mlx_main() -> int:
    return train_gpt.main(twin.open_machine, twin.Trainer, (twin.__file__,))


MAINS = {"torch": train_gpt.main, "mlx": mlx_main}


def start(cwd: Path, env: dict, name: str = "mlx") -> Launch:
    return Launch(cwd, env, command=helpers.command(script=SCRIPTS[name]))


@pytest.fixture(scope="module")
def pair(tmp_path_factory, corpus) -> dict[str, ScriptRun]:
    """The same 30 steps by both scripts."""
    cwd = tmp_path_factory.mktemp("pair")
    env = corpus.env(**STEPS, RUN_ID="r")
    runs = {name: helpers.run_here(main, cwd / name, env) for name, main in MAINS.items()}
    assert [run.code for run in runs.values()] == [0, 0], [run.err for run in runs.values()]
    return runs


def assert_same_training(reference: ScriptRun, found: ScriptRun) -> None:
    """The same steps on the same tokens, within rounding."""
    for one, other in zip(reference.events("step"), found.events("step"), strict=True):
        assert (one["step"], one["lr_mul"]) == (other["step"], other["lr_mul"])
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=LOSS)
    assert float(reference.final["val_bpb"]) == pytest.approx(float(found.final["val_bpb"]), abs=BPB)


# --- beside train_gpt.py ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_thirty_steps_are_those_of_train_gpt(pair):
    """Losses and scores within 1e-3, and all counts equal."""
    reference, found = pair["torch"], pair["mlx"]
    assert_same_training(reference, found)
    for one, other in zip(reference.events("step"), found.events("step")):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.01)
    assert found.losses()[-1] < found.losses()[0] - 0.5, "it learns"
    for one, other in zip(reference.events("val"), found.events("val"), strict=True):
        assert one["val_bpb"] == pytest.approx(other["val_bpb"], abs=BPB)
    same = COUNTS.split()
    assert [reference.final[name] for name in same] == [found.final[name] for name in same]
    assert [name for name in found.final if name != "mlx"] == [*reference.final]


@pytest.mark.slow
def test_log_lines_and_files_are_those_of_train_gpt(pair):
    """But for numbers, and for the line that names the machine."""
    kinds, files, configs = [], [], []
    for run in pair.values():
        log = (run.folder / "train.log").read_text(encoding="utf-8")
        assert log == run.out, "a file gets what a terminal would get"
        lines = re.sub(r"\d+(\.\d+)?", "#", log.split("\n---\n")[0]).splitlines()
        kinds.append([line for line in lines if " processor:" not in line])
        files.append(sorted(contents(run.folder)))
        config = json.loads((run.folder / "config.json").read_text())
        configs.append([config[part] for part in ("settings", "origins", "sha256")])
    assert kinds[0] == kinds[1] and len(kinds[0]) >= 20
    assert [*files[0], "train_gpt_mlx.py"] == files[1] and "checkpoint/step_00000030.ckpt" in files[0]
    assert configs[0] == configs[1]


def test_a_dry_run_counts_both_scripts(tmp_path):
    run = helpers.run_here(mlx_main, tmp_path, helpers.tiny_env(DRY_RUN=1, CODE_BYTES="raw"))
    code_bytes = sum(path.stat().st_size for path in SCRIPTS.values())
    assert (run.code, run.err) == (0, "") and f"code_bytes: {code_bytes} (in all " in run.out


@pytest.mark.parametrize(
    ("more", "message"),
    [({"DEVICE": "cuda"}, "DEVICE=cuda: mlx"), ({"MLX_HOSTFILE": "none"}, "MLX_HOSTFILE=none")],
)
def test_mistakes_about_the_machine_end_with_2(more, message, tmp_path):
    run = helpers.run_here(mlx_main, tmp_path, helpers.tiny_env(**more))
    assert (run.code, run.out) == (2, "") and message in run.err and run.err.count("\n") == 1


# --- artifacts --------------------------------------------------------------------------------------------


def test_equal_weights_give_equal_artifacts():
    """The start weights."""
    one, other = (
        Adapter(script, "NUM_LAYERS=3 VOCAB_SIZE=500 SEED=5").trainer for script in (train_gpt, twin)
    )
    assert one.export("") == other.export("")


@pytest.mark.slow
@pytest.mark.parametrize("scorer", SCRIPTS)
def test_each_scores_the_others_artifact_as_it_did(pair, corpus, tmp_path, scorer):
    other = pair["mlx" if scorer == "torch" else "torch"]
    artifact = other.folder / "model.ptz"
    assert other.final["artifact_sha256"] == hashlib.sha256(artifact.read_bytes()).hexdigest()
    done = helpers.run_here(MAINS[scorer], tmp_path, corpus.env(EVAL_ONLY=artifact, BATCH_SLOTS=2))
    assert done.code == 0 and not [*tmp_path.iterdir()], done.err
    assert float(done.final["val_bpb"]) == pytest.approx(float(other.final["val_bpb"]), abs=1e-5)
    same = ("val_tokens", "val_bytes", "artifact_sha256", "val_sha256")
    assert [done.final[name] for name in same] == [other.final[name] for name in same]


# --- checkpoints: to and fro ------------------------------------------------------------------------------


@pytest.mark.slow
def test_torch_to_mlx_to_torch_goes_on_as_if_undisturbed(pair, corpus, tmp_path):
    """Killed twice; who goes on is the other script each time."""
    env = corpus.env(**STEPS, RUN_ID="swap", CKPT_SECONDS=1e-6)
    for name, line in (("torch", "step:10/"), ("mlx", "step:20/")):
        run = start(tmp_path, env, name)
        run.signal_at(line, signal.SIGKILL)
        run.need(-signal.SIGKILL)
    done = helpers.run_here(train_gpt.main, tmp_path, env)
    assert done.code == 0 and done.final["resumes"] == "2", done.err
    assert_same_training(pair["torch"], done)


@pytest.mark.slow
def test_a_signal_ends_with_16_and_the_same_command_goes_on_to_the_same_bits(pair, corpus, tmp_path):
    env = corpus.env(**STEPS, RUN_ID="stopped")
    run = start(tmp_path, env)
    run.signal_at("step:6/", signal.SIGTERM)
    done = run.need(16)
    assert re.match(r"train_gpt_mlx\.py: stopped by a signal after step \d+ of 30; ", done.err)
    found = helpers.run_here(mlx_main, tmp_path, env).final
    same = ("state_sha256", "artifact_sha256", "val_bpb")
    assert [found[name] for name in same] == [pair["mlx"].final[name] for name in same]
    assert found["resumes"] == "1"


# --- several processes ------------------------------------------------------------------------------------


def ring(ranks: int) -> list[list[str]]:
    """What mlx.launch writes to MLX_HOSTFILE, with ports that are free."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(ranks)]
        return [[f"127.0.0.1:{server.getsockname()[1]}"] for server in servers]


@pytest.mark.slow
def test_two_processes_train_what_one_does(pair, corpus, tmp_path):
    """Under the real mlx.launch."""
    env = corpus.env(**STEPS, RUN_ID="two")
    launcher = Path(sys.executable).parent / "mlx.launch"
    port = ring(1)[0][0].split(":")[1]
    command = [launcher, "-n", "2", "-p", port, sys.executable, helpers.MLX_SCRIPT]
    run = Launch(tmp_path, env, command=command).need(0)
    assert run.final["tokens_seen"] == pair["torch"].final["tokens_seen"] and " ranks:2 " in run.out
    assert_same_training(pair["torch"], run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "silent"])
def test_a_lost_rank_ends_the_other(corpus, tmp_path, number):
    hosts = tmp_path / "ring.json"
    hosts.write_text(json.dumps(ring(2)))
    env = corpus.env(RUN_ID="lost", DIST_TIMEOUT=4, ITERATIONS=10_000, MLX_HOSTFILE=hosts)
    first, second = (start(tmp_path / str(rank), env | {"MLX_RANK": rank}) for rank in range(2))
    first.wait(until=lambda: "step:3/" in first.out)
    second.process.send_signal(number)
    done = first.need(16)
    second.kill()
    assert "train_gpt_mlx.py: lost a rank: dead or silent (DIST_TIMEOUT): " in done.err


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(corpus, tmp_path):
    (tmp_path / "ring.json").write_text(json.dumps(ring(2)))
    env = corpus.env(MLX_HOSTFILE="ring.json", MLX_RANK=0, DIST_TIMEOUT=1)
    assert re.search("1/2 clients joined.*; see RANK, WORLD_SIZE", start(tmp_path, env).need(16).err)


# --- trouble ----------------------------------------------------------------------------------------------


def test_bfloat16_follows_torchs():
    losses = []
    for script in (train_gpt, twin):
        adapter = Adapter(script, "BATCH_SLOTS=2 ITERATIONS=60")
        adapter.trainer.machine.choose_dtype("bfloat16")
        losses.append([adapter.step(adapter.random_slots(n), n)[0] for n in range(5)])
    assert losses[0] == pytest.approx(losses[1], abs=0.03)


@pytest.mark.slow
def test_without_a_compiler_one_line_says_so_and_the_run_goes_on(corpus, tmp_path):
    """g++ that answers, but cannot compile."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sh").symlink_to(shutil.which("sh"))
    (tmp_path / "bin/g++").write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexit 1\n')
    (tmp_path / "bin/g++").chmod(0o755)
    env = corpus.env(PATH=tmp_path / "bin", TMPDIR=tmp_path, ITERATIONS=1)  # mlx keeps what it compiled
    done = start(tmp_path, env | {"COMPILE": "1"}).need(0)
    assert done.out.count("compile:0 (mx.compile fails, so eager and slower: ") == 1
