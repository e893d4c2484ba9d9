"""The patches of tests/ideas: each is short, applies to train_gpt.py, trains, scores and is in effect.

After a change of train_gpt.py a patch may no longer apply. Then `git apply --3way tests/ideas/NAME.patch`
merges it, and `git diff HEAD train_gpt.py` prints its new body.
"""

import dataclasses
import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import zlib
from types import ModuleType

import numpy as np
import pytest
import safetensors.numpy
import torch

import train_gpt
from tests.kit import helpers
from tests.kit.helpers import ScriptRun
from tests.trainer.test_model import assert_operations, nats_of_steps

PATCHES = {path.stem: path for path in sorted((helpers.ROOT / "tests/ideas").glob("*.patch"))}
MOST_LINES = 40


@pytest.fixture(scope="module")
def modules(tmp_path_factory) -> dict[str, ModuleType]:
    """The patched script of each idea, imported."""
    made = {}
    for name, patch in PATCHES.items():
        folder = tmp_path_factory.mktemp(name)
        script = shutil.copy(helpers.SCRIPT, folder)
        # found within a repository, git would take the paths from its top and skip them without a word
        env = helpers.clean_environment(GIT_CEILING_DIRECTORIES=folder.parent)
        done = subprocess.run(["git", "apply", patch], cwd=folder, env=env, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, ""), name
        spec = importlib.util.spec_from_file_location(f"idea_{name}", script)
        made[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made[name])
    return made


@dataclasses.dataclass
class Fork:
    """A patched script, imported, and a run of it that wrote a checkpoint after each step."""

    module: ModuleType
    env: dict[str, str]
    run: ScriptRun

    def weights(self) -> dict[str, np.ndarray]:
        """By name, as the artifact gives them back."""
        return self.module.decode_artifact((self.run.folder / "model.ptz").read_bytes(), "")[1]

    def states(self) -> list[dict[str, np.ndarray]]:
        """The optimizer's state in the last two checkpoints, the newest last."""
        blobs = [path.read_bytes() for path in sorted(self.run.folder.glob("checkpoint/*.ckpt"))]
        return [self.module.unpack_tensors(blob)[0] for blob in blobs]

    def settings(self):
        return self.module.load_settings(self.env, "smoke")[0]

    def predictor(self):
        """What the referee asks."""
        return self.module.load_predictor(self.run.folder / "model.ptz")


@pytest.fixture(scope="module")
def forks(modules, corpus, tmp_path_factory):
    """A function that gives the Fork of an idea, trained when it is first asked for."""
    more = {"ITERATIONS": 20, "CKPT_SECONDS": 1e-9, "VAL_LOSS_EVERY": 1000, "VAL_BATCH_SIZE": 65536}
    env = corpus.env(RUN_ID="fork", **more)

    @functools.cache
    def fork(name: str) -> Fork:
        run = helpers.run_here(modules[name].main, tmp_path_factory.mktemp(name), env)
        assert (run.code, run.err) == (0, "")
        return Fork(modules[name], env, run)

    return fork


def stored(run: ScriptRun) -> dict[str, np.ndarray]:
    """The tensors in a run's artifact, as they lie in it."""
    return safetensors.numpy.load(zlib.decompress((run.folder / "model.ptz").read_bytes()))


# --- all ideas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_short_and_says_what_it_does(name):
    head, _, body = PATCHES[name].read_text(encoding="utf-8").partition("diff --git ")
    changed = re.findall(r"^(?:\+(?!\+\+)|-(?!--)).*", body, re.MULTILINE)
    assert 0 < len(changed) <= MOST_LINES
    assert 3 <= len(head.strip().splitlines()) <= 4 and f"{len(changed)} lines: " in head
    for hunk in re.split(r"^@@ .*\n", body, flags=re.MULTILINE)[1:]:
        context = [line.startswith(" ") or not line for line in hunk.splitlines()]
        assert context[:3] == context[-3:] == [True] * 3 and not context[3], "three lines of context"


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_patched_scripts_are_tidy(modules, command):
    scripts = [module.__file__ for module in modules.values()]
    ruff = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", "--config", ".ruff.toml"]
    done = subprocess.run([*ruff, *scripts], cwd=helpers.ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHES)
def test_a_fork_learns_counts_its_operations_and_its_artifact_scores_the_same_again(forks, corpus, name):
    """Fed token by token, too: four streams of a window each."""
    fork = forks(name)
    assert float(fork.run.final["val_loss"]) < 0.8 * fork.run.losses()[0]
    assert_operations(fork.module, fork.settings())
    env = corpus.env(EVAL_ONLY=fork.run.folder / "model.ptz")
    again = helpers.run_here(fork.module.main, fork.run.cwd, env)
    assert (again.code, again.err) == (0, "")
    for key in ("val_bpb", "val_loss", "artifact_sha256"):
        assert again.final[key] == fork.run.final[key]
    if name != "learn_while_scored":
        predictor = fork.predictor()
        windows = corpus.tokens["val"][: 4 * 33].astype(np.int64).reshape(4, 33)
        found = nats_of_steps(predictor, windows)[:, 1:]
        assert np.allclose(found, predictor.model.nll(windows), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cooldown_average", "normuon"])
def test_more_state_and_another_plan_survive_a_resume(forks, tmp_path, name):
    fork = forks(name)
    kept = sorted(fork.run.folder.glob("checkpoint/*.ckpt"))[0]
    folder = tmp_path / "logs/fork/checkpoint"
    folder.mkdir(parents=True)
    shutil.copy(kept, folder)
    again = helpers.run_here(fork.module.main, tmp_path, fork.env)
    assert (again.code, again.final["resumes"]) == (0, "1")
    for key in ("artifact_sha256", "state_sha256"):
        assert again.final[key] == fork.run.final[key]


@pytest.mark.slow
@pytest.mark.parametrize("name, said", [("normuon", "state is "), ("value_embeddings", "PARAMS=")])
def test_a_run_of_a_fork_is_not_resumed_without_its_patch(forks, tmp_path, name, said):
    fork = forks(name)
    shutil.copytree(fork.run.folder / "checkpoint", tmp_path / "logs/fork/checkpoint")
    run = helpers.run_here(train_gpt.main, tmp_path, fork.env)
    assert run.code == 3 and said in run.err and run.err.count("\n") == 1


# --- each is in effect ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name, gate", [("smear_gate", "smear"), ("value_embeddings", "value_share")])
def test_gates_start_closed_and_are_learned(forks, base_run, name, gate):
    """No gradient would reach a gate that the model does not use."""
    fork = forks(name)
    assert fork.run.losses()[0] == pytest.approx(base_run.losses()[0], rel=1e-6)
    assert fork.weights()[gate].all()


@pytest.mark.slow
def test_int6_levels_are_what_the_model_computes_with_and_what_is_stored(forks, base_run):
    fork = forks("int6_qat")
    tensors, weights = stored(fork.run), fork.weights()
    for name in ("qkv", "attn_out", "mlp_up", "mlp_down"):
        row = weights[name][0, 0]
        assert len(np.unique(row)) > 10 and np.abs(row / tensors[name + ".scale"][0, 0]).max() == 31
    rounded, trained = (fork.run.events(kind)[-1]["val_loss"] for kind in ("artifact", "val"))
    assert trained == pytest.approx(rounded, rel=1e-5), "trained in full, the weights would score better"
    assert int(fork.run.final["artifact_bytes"]) < 0.8 * int(base_run.final["artifact_bytes"])


def test_int6_levels_take_less_than_six_bits(modules):
    """Of weights as they are after training, spread like a bell."""
    matrix = torch.randn(512, 192, generator=torch.Generator().manual_seed(0))
    levels, _ = modules["int6_qat"].int6_levels(matrix)
    assert 8 * len(zlib.compress(levels.char().numpy(), 9)) < 5.9 * levels.numel()


@pytest.mark.slow
def test_the_average_is_the_mean_over_the_cool_down_and_is_exported(forks):
    """Of 20 steps the rate is below its height in the last 9: WARMDOWN_ITERS is half of the run in smoke."""
    fork = forks("cooldown_average")
    before, last = fork.states()
    assert (before["averaged"], last["averaged"]) == (8, 9)
    mean = (8 * before["average"] + last["weights"]) / 9
    assert np.allclose(last["average"], mean, atol=1e-6)
    assert np.abs(last["average"] - last["weights"]).max() > 0.01
    exported = np.concatenate([array.ravel() for array in fork.weights().values()])
    assert np.allclose(exported, last["average"], rtol=1e-3, atol=1e-6)  # float16
    score, unquantized = (fork.run.events(kind)[-1]["val_bpb"] for kind in ("artifact", "val"))
    assert unquantized == pytest.approx(score, abs=1e-4), "the score on the way is the mean's, too"


@pytest.mark.slow
def test_the_token_after_next_steers_training_and_leaves_no_values_behind(forks, base_run):
    fork = forks("next_token_after")
    first, *later = fork.run.losses()
    base_first, *base_later = base_run.losses()
    assert first == pytest.approx(base_first, rel=1e-6), "what is logged is the next token's loss"
    assert np.abs(np.subtract(later, base_later)).min() > 0
    tensors, base = stored(fork.run), stored(base_run)
    assert not tensors.pop("ahead").any()
    shapes, base_shapes = ({name: x.shape for name, x in part.items()} for part in (tensors, base))
    assert shapes == base_shapes


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64])
def test_learning_while_scored_pays_on_a_foreign_text_and_is_forgotten(forks, corpus, rows):
    foreign = ["wer reitet so spät durch nacht und wind", "es ist der vater mit seinem kind"]
    tokens = helpers.encode_documents(corpus.tokenizer, helpers.documents(400, 5, foreign))
    ids = tokens[: 64 * 60].astype(np.int64).reshape(rows, -1)[:, :400]
    predictor = forks("learn_while_scored").predictor()
    learned = nats_of_steps(predictor, ids)
    assert np.array_equal(nats_of_steps(predictor, ids), learned)
    predictor.head_rate = predictor.bias_rate = 0.0
    fixed = nats_of_steps(predictor, ids)
    assert learned[:, :2] == pytest.approx(fixed[:, :2], abs=1e-6), "nothing was learned yet"
    assert learned.mean() < 0.95 * fixed.mean()


@pytest.mark.slow
def test_normuon_measures_every_row_and_makes_updates_even(forks, base_run):
    """What it knows of the rows is in its state; from the first step on it goes another way than Muon."""
    fork = forks("normuon")
    before, last = fork.states()
    assert (before["rows"] > 0).all() and not np.array_equal(before["rows"], last["rows"])
    first, *later = fork.run.losses()
    base_first, *base_later = base_run.losses()
    assert first == base_first and np.abs(np.subtract(later, base_later)).min() > 0
    optimizer = fork.module.Trainer(fork.settings(), fork.module.Machine(torch.device("cpu"))).optimizer
    random = torch.Generator().manual_seed(1)
    stacks = [torch.randn(param.shape, generator=random) for param in optimizer.matrices]
    scaled = [stack * torch.logspace(-2, 0, stack.size(1))[:, None] for stack in stacks]
    found, _ = optimizer.even_rows([stack.flatten() for stack in scaled])
    for param, flat in zip(optimizer.matrices, found.split(optimizer.matrix_sizes)):
        lengths = torch.linalg.vector_norm(flat.view(param.shape), dim=-1)
        for part in lengths.split(param.parts, 1):
            assert torch.allclose(part, part[:, :1], rtol=1e-3)
