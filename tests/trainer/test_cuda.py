"""What only a GPU shows; skipped where there is none. `python -m pytest -m cuda tests` runs these alone."""

import math

import numpy as np
import pytest
import torch

import train_gpt
from tests.kit import helpers
from tests.trainer.test_model import attention_case, math_attention
from tests.trainer.test_run import losses

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus) -> dict[str, helpers.ScriptRun]:
    """The same 20 steps on the CPU and on the GPU, there in both number formats and compiled."""
    cwd = tmp_path_factory.mktemp("cuda")
    kinds = {
        "cpu": {"DEVICE": "cpu"},
        "cuda": {"DEVICE": "cuda"},
        "again": {"DEVICE": "cuda"},
        "bfloat16": {"DEVICE": "cuda", "DTYPE": "bfloat16"},
        "compiled": {"DEVICE": "cuda", "DTYPE": "bfloat16", "COMPILE": 1, "WARMUP_STEPS": 2},
    }
    done = {}
    for name, more in kinds.items():
        env = corpus.env(RUN_ID=name, ITERATIONS=20, VAL_LOSS_EVERY=10, **more)
        done[name] = helpers.run_script(cwd, env)
        assert done[name].code == 0, done[name].err
    return done


@pytest.mark.parametrize("name, tolerance", [("cuda", 1e-3), ("bfloat16", 0.02), ("compiled", 0.02)])
def test_the_gpu_trains_what_the_cpu_trains(runs, name, tolerance):
    run = runs[name]
    cpu = runs["cpu"]
    assert run.final["device"] == "cuda:0"
    assert "device:cuda:0" in run.out
    assert run.final["batches_crc32"] == cpu.final["batches_crc32"]
    np.testing.assert_allclose(losses(run), losses(cpu), rtol=tolerance)
    assert float(run.final["val_bpb"]) == pytest.approx(float(cpu.final["val_bpb"]), rel=2 * tolerance)
    assert float(run.final["peak_memory_mib"]) > 0
    for found, expected in zip(run.events("val"), cpu.events("val")):
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=2 * tolerance)


def test_an_artifact_scores_alike_on_both(runs, corpus, tmp_path):
    envs = [
        corpus.env(EVAL_ONLY=runs["bfloat16"].folder / "model.ptz", DEVICE=device)
        for device in ("cpu", "cuda")
    ]
    scores = [float(helpers.run_script(tmp_path, env).final["val_bpb"]) for env in envs]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    assert scores[1] == pytest.approx(float(runs["bfloat16"].final["val_bpb"]), rel=2e-3)


def test_the_gpu_gives_the_same_losses_twice(runs):
    np.testing.assert_allclose(losses(runs["again"]), losses(runs["cuda"]), rtol=1e-5)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 4e-3), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("case", [(2, 256, 4, 2, 16), (2, 130, 4, 4, 64), (1, 1000, 8, 2, 64)], ids=str)
@pytest.mark.parametrize("window", [math.inf, 60])
def test_attention_on_the_gpu_is_pytorchs_in_float64(case, dtype, error, window):
    parts = [part.detach().cuda().requires_grad_() for part in attention_case(*case, dtype, gain=1.5)]
    out = train_gpt.attention(*parts, window)
    reference = math_attention(*parts, window)
    largest = reference.abs().max()
    assert (out.double() - reference).abs().max() < error / 2 * largest
    weight = torch.randn(reference.shape, generator=torch.Generator().manual_seed(0)).cuda()
    found = torch.autograd.grad((out.float() * weight).sum(), parts)
    expected = torch.autograd.grad((reference * weight).sum(), parts)
    for grad, want in zip(found, expected):
        assert (grad.double() - want).abs().max() < error * want.abs().max()


def test_without_a_setting_a_gpu_takes_the_reference_preset_bf16_and_itself(tmp_path, corpus):
    dry = helpers.run_script(tmp_path, {"DRY_RUN": "1"})
    assert dry.code == 0 and "PRESET=10min_16mb (preset)" in dry.out.splitlines()
    env = corpus.env(RUN_ID="auto")
    del env["DTYPE"]
    run = helpers.run_script(tmp_path, env)
    assert run.code == 0, run.err
    assert "dtype:bfloat16" in run.out
    assert run.final["device"] == "cuda:0"


def test_the_reference_shape_takes_a_step_on_the_gpu(tmp_path, tokenizer_path, corpus):
    """Sequences of 4096 at the preset's width; the pieces of the tokenizer are fewer."""
    shape = {"PRESET": "10min_16mb", "MODEL_DIM": 512, "NUM_LAYERS": 9, "TRAIN_SEQ_LEN": 4096}
    sizes = {"TRAIN_BATCH_TOKENS": 98304, "VAL_BATCH_SIZE": 32768, "ITERATIONS": 2, "DTYPE": "bfloat16"}
    env = corpus.env(**shape | sizes, RUN_ID="large")
    run = helpers.run_script(tmp_path, env)
    assert run.code == 0, run.err
    assert losses(run)[0] == pytest.approx(math.log(400), abs=0.1)
