"""The patches of tests/ideas: each is short, applies to train_gpt.py, trains, scores and is in effect.

After a change of train_gpt.py a patch may no longer apply. Then `git apply --3way tests/ideas/NAME.patch`
merges it, and `git diff HEAD train_gpt.py` prints its new body.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

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


class Fork(NamedTuple):
    """A patched script, imported, and a run of it that wrote a checkpoint after each step."""

    module: ModuleType
    env: dict[str, str]
    run: ScriptRun


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


# --- all ideas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_short_and_says_what_it_does(name):
    head, _, body = PATCHES[name].read_text(encoding="utf-8").partition("diff --git ")
    changed = re.findall(r"^(?:\+(?!\+\+)|-(?!--)).*", body, re.MULTILINE)
    assert 0 < len(changed) <= MOST_LINES
    assert 3 <= len(head.strip().splitlines()) <= 4 and f"{len(changed)} lines: " in head


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_patched_scripts_are_tidy(modules, command):
    scripts = [module.__file__ for module in modules.values()]
    options = ["--no-cache", "--config", ".ruff.toml"]
    done = helpers.python("-m", "ruff", *command.split(), *options, *scripts)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHES)
def test_a_fork_learns_counts_its_operations_and_its_artifact_scores_the_same_again(forks, corpus, name):
    """Fed token by token, too: four streams of a window each."""
    fork = forks(name)
    assert float(fork.run.final["val_loss"]) < 0.8 * fork.run.losses()[0]
    assert_operations(fork.module, fork.module.load_settings(fork.env, "smoke")[0])
    env = corpus.env(EVAL_ONLY=fork.run.folder / "model.ptz")
    again = helpers.run_here(fork.module.main, fork.run.cwd, env)
    assert (again.code, again.err) == (0, "")
    for key in ("val_bpb", "val_loss", "artifact_sha256"):
        assert again.final[key] == fork.run.final[key]
    if name != "learn_while_scored":
        predictor = fork.module.load_predictor(fork.run.folder / "model.ptz")
        windows = corpus.tokens["val"][: 4 * 33].astype(np.int64).reshape(4, 33)
        found = nats_of_steps(predictor, windows)[:, 1:]
        assert np.allclose(found, predictor.model.nll(windows), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cooldown_average", "normuon"])
def test_more_state_survives_a_resume(forks, tmp_path, name):
    fork = forks(name)
    kept = min(fork.run.folder.glob("checkpoint/*.ckpt"))
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

SAME_LOSSES = {"cooldown_average", "learn_while_scored"}
SAME_ARTIFACT = {"learn_while_scored"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHES)
def test_an_idea_changes_the_training_the_artifact_or_neither(forks, base_run, name):
    run = forks(name).run
    assert (run.losses() == base_run.losses()) == (name in SAME_LOSSES)
    same = run.final["artifact_sha256"] == base_run.final["artifact_sha256"]
    assert same == (name in SAME_ARTIFACT)
    assert run.final["tokens_seen"] == base_run.final["tokens_seen"]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64])
def test_learning_while_scored_pays_on_a_foreign_text_and_is_forgotten(forks, corpus, rows):
    foreign = ["wer reitet so spät durch nacht und wind", "es ist der vater mit seinem kind"]
    tokens = helpers.encode_documents(corpus.tokenizer, helpers.documents(400, 5, foreign))
    ids = tokens[: 64 * 60].astype(np.int64).reshape(rows, -1)[:, :400]
    fork = forks("learn_while_scored")
    predictor = fork.module.load_predictor(fork.run.folder / "model.ptz")
    learned = nats_of_steps(predictor, ids)
    assert np.array_equal(nats_of_steps(predictor, ids), learned)
    predictor.head_rate = predictor.bias_rate = 0.0
    fixed = nats_of_steps(predictor, ids)
    assert learned[:, :2] == pytest.approx(fixed[:, :2], abs=1e-6), "nothing was learned yet"
    assert learned.mean() < 0.95 * fixed.mean()
