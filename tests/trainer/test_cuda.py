"""What only a GPU shows; skipped where there is none. `python -m pytest -m cuda tests` runs these alone."""

import math
import signal

import numpy as np
import pytest
import torch

import train_gpt
from tests.kit import helpers
from tests.kit.launch import Launch
from tests.trainer.test_model import assert_attention, attention_case

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
COMPILED = {"DEVICE": "cuda", "DTYPE": "bfloat16", "COMPILE": 1, "WARMUP_STEPS": 2}
SHAPE = {"MODEL_DIM": 64, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "SHORT_WINDOW": 20}  # kernels want heads of 16
KINDS = {
    "cpu": {"DEVICE": "cpu"},
    "cuda": {"DEVICE": "cuda"},
    "again": {"DEVICE": "cuda"},
    "bfloat16": {"DEVICE": "cuda", "DTYPE": "bfloat16"},
    "compiled": COMPILED,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus) -> dict[str, helpers.ScriptRun]:
    """The same 20 steps on the CPU and on the GPU, there in both number formats and compiled."""
    cwd = tmp_path_factory.mktemp("cuda")
    done = {}
    for name, more in KINDS.items():
        env = corpus.env(RUN_ID=name, ITERATIONS=20, VAL_LOSS_EVERY=10, **SHAPE, **more)
        done[name] = helpers.run_script(cwd, env)
        assert done[name].code == 0, done[name].err
    return done


@pytest.mark.parametrize("name, tolerance", [("cuda", 1e-3), ("bfloat16", 0.02), ("compiled", 0.02)])
def test_the_gpu_trains_what_the_cpu_trains(runs, name, tolerance):
    run, cpu = runs[name], runs["cpu"]
    assert run.final["device"] == "cuda:0" and "device:cuda:0" in run.out
    np.testing.assert_allclose(run.losses(), cpu.losses(), rtol=tolerance)
    assert float(run.final["val_bpb"]) == pytest.approx(float(cpu.final["val_bpb"]), rel=2 * tolerance)
    assert float(run.final["peak_memory_mib"]) > 0
    for found, expected in zip(run.events("val"), cpu.events("val")):
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=2 * tolerance)


def test_an_artifact_scores_alike_on_both(runs, corpus, tmp_path):
    artifact = runs["bfloat16"].folder / "model.ptz"
    envs = (corpus.env(EVAL_ONLY=artifact, DEVICE=device) for device in ("cpu", "cuda"))
    cpu, cuda = (float(helpers.run_script(tmp_path, env).final["val_bpb"]) for env in envs)
    assert cpu == pytest.approx(cuda, rel=1e-4)
    assert cuda == pytest.approx(float(runs["bfloat16"].final["val_bpb"]), rel=2e-3)


def test_the_gpu_gives_the_same_losses_twice(runs):
    np.testing.assert_allclose(runs["again"].losses(), runs["cuda"].losses(), rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 4e-3), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("case", [(2, 256, 4, 2, 16), (2, 130, 4, 4, 64), (1, 1000, 8, 2, 128)], ids=str)
@pytest.mark.parametrize("window", [math.inf, 60])
def test_attention_on_the_gpu_is_pytorchs_in_float64(monkeypatch, case, dtype, error, window, compiled):
    if compiled:
        monkeypatch.setattr(train_gpt, "attention", torch.compile(train_gpt.attention, dynamic=False))
    assert_attention(attention_case(*case, dtype, gain=1.5, device="cuda"), window, error)


def test_without_a_setting_a_gpu_takes_bf16_and_itself(tmp_path, corpus):
    """And the reference preset: test_settings.py."""
    env = corpus.env(RUN_ID="auto")
    del env["DTYPE"]
    run = helpers.run_script(tmp_path, env)
    assert run.code == 0, run.err
    assert "dtype:bfloat16" in run.out
    assert run.final["device"] == "cuda:0"


def test_the_reference_shape_takes_a_step_on_the_gpu(tmp_path, corpus):
    """Sequences of 4096 at the preset's width; the pieces of the tokenizer are fewer."""
    shape = {"PRESET": "10min_16mb", "MODEL_DIM": 512, "NUM_LAYERS": 9, "TRAIN_SEQ_LEN": 4096}
    sizes = {"TRAIN_BATCH_TOKENS": 98304, "VAL_BATCH_SIZE": 32768, "ITERATIONS": 2, "DTYPE": "bfloat16"}
    # zlib makes weights that have not learned no smaller
    run = helpers.run_script(tmp_path, corpus.env(**shape | sizes, BUDGET_BYTES=20_000_000))
    assert run.code == 0, run.err
    # what a CPU finds, with a single layer, since no block adds anything yet
    assert run.losses()[0] == pytest.approx(5.766, abs=0.02)


def test_a_killed_run_goes_on_where_it_was(corpus, tmp_path):
    env = corpus.env(**COMPILED, ITERATIONS=40, RUN_ID="run", CKPT_SECONDS=1e-6)
    whole = Launch(tmp_path / "whole", env).need(0)
    Launch(tmp_path, env, provoke="kill@20").need(-signal.SIGKILL)
    resumed = Launch(tmp_path, env).need(0)
    assert "resumed from" in resumed.out
    assert len(resumed.losses()) == len(whole.losses()) == 40
    np.testing.assert_allclose(resumed.losses(), whole.losses(), rtol=0.03)  # sums have no fixed order
