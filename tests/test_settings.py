"""Settings: presets, bad values, impossible combinations, near misses, DRY_RUN."""
import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import helpers
import train_gpt
from train_gpt import PRESETS, SettingError, Settings, load_settings

ROWS = {row.name: row for row in dataclasses.fields(Settings)}
GOLDEN = Path(__file__).parent / "golden"


def load(**env) -> Settings:
    return load_settings({name: str(value) for name, value in env.items()}, "10min_16mb")[0]


def refused(**env) -> str:
    """The one line that refuses these variables."""
    with pytest.raises(SettingError) as caught:
        load(**env)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- presets ----------------------------------------------------------------------------------------------

REFERENCE = dict(       # SEED.md's table, typed in once more
    DATA_PATH="./data/datasets/fineweb10B_sp1024", TOKENIZER_PATH="./data/tokenizers/fineweb_1024_bpe.model",
    SEED=1337, VAL_BATCH_SIZE=524288, VAL_LOSS_EVERY=1000, TRAIN_LOG_EVERY=200, ITERATIONS=20000,
    WARMDOWN_ITERS=3000, WARMUP_STEPS=20, TRAIN_BATCH_TOKENS=393216, TRAIN_SEQ_LEN=4096,
    MAX_WALLCLOCK_SECONDS=600, VOCAB_SIZE=1024, NUM_LAYERS=9, MODEL_DIM=512, NUM_HEADS=8, NUM_KV_HEADS=4,
    MLP_MULT=2, TIE_EMBEDDINGS=1, ROPE_BASE=10000, LOGIT_SOFTCAP=30, QK_GAIN_INIT=1.5, EMBED_LR=0.6,
    HEAD_LR=0.008, TIED_EMBED_LR=0.03, TIED_EMBED_INIT_STD=0.005, MATRIX_LR=0.02, SCALAR_LR=0.02,
    MUON_MOMENTUM=0.99, MUON_BACKEND_STEPS=5, MUON_MOMENTUM_WARMUP_START=0.92,
    MUON_MOMENTUM_WARMUP_STEPS=1500, BETA1=0.9, BETA2=0.95, ADAM_EPS=1e-8, GRAD_CLIP_NORM=0)


def test_the_reference_preset_is_seed_md():
    s = load(PRESET="10min_16mb")
    assert {name: getattr(s, name.lower()) for name in REFERENCE} == REFERENCE
    assert s == load(PRESET="10min_16mb", **REFERENCE)
    params = {p.name: math.prod(p.shape) for p in train_gpt.parameter_table(s)}
    assert sum(params.values()) == 17_059_912
    # counted by hand from SEED.md's shapes: 9 layers of q, k, v, out and a 2x MLP
    assert params["qkv"] + params["attn_out"] == 9 * (512 * 512 * 2 + 256 * 512 * 2)
    assert params["mlp_up"] + params["mlp_down"] == 9 * 2 * 512 * 1024 and params["tok_emb"] == 1024 * 512
    assert (s.slot_tokens * s.batch_slots, s.slot_tokens % 4096, s.eval_window) == (393_216, 0, 4096)


def test_untied_head_adds_one_matrix():
    tied, untied = (train_gpt.parameter_table(load(TIE_EMBEDDINGS=tie)) for tie in (1, 0))
    assert [p for p in untied if p not in tied and p.name != "tok_emb"] == \
        [train_gpt.Param("head", (1024, 512), "constant", 0.0, "head")]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_load_and_every_value_is_one_its_variable_takes(preset):
    s, origins = load_settings({"PRESET": preset}, "10min_16mb")
    assert origins == {name: "environment" if name == "preset" else "preset" for name in ROWS}
    for name, row in ROWS.items():
        value = getattr(s, name)
        assert type(value).__name__ == row.type and row.metadata["doc"], name
        if value != "":
            assert train_gpt.parse_setting(row, train_gpt.show(value)) == value


def test_the_default_preset_is_the_callers_and_any_variable_overrides():
    s, origins = load_settings({"ITERATIONS": "7"}, "smoke")
    assert (s.preset, s.iterations, s.model_dim) == ("smoke", 7, PRESETS["smoke"]["model_dim"])
    assert [name for name, origin in origins.items() if origin == "environment"] == ["iterations"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.iterations = 8


# --- what is refused --------------------------------------------------------------------------------------

BAD = [("ITERATIONS", bad) for bad in ("", "0", "-1", "1.5", "1e3", "many", "nan", "0x10", "1 0")] + \
      [("MATRIX_LR", bad) for bad in ("", "-0.1", "nan", "inf", "-inf", "1e999", "0,02", "fast")] + \
      [("COMPILE", bad) for bad in ("", "2", "true", "yes", "-1", "1.0")] + \
      [("DEVICE", bad) for bad in ("", "gpu", "CUDA", "cuda:0")] + \
      [("DTYPE", "fp16"), ("PRESET", "large"), ("DATA_ORDER", "random"), ("CODE_BYTES", "xz")] + \
      [("VOCAB_SIZE", "65537"), ("VOCAB_SIZE", "1"), ("CLIP_PERCENTILE", "101"), ("SEED", "-1")] + \
      [("BATCH_SLOTS", "0"), ("ROPE_BASE", "0"), ("LOGIT_SOFTCAP", "0")]


@pytest.mark.parametrize("name, value", BAD)
def test_a_bad_value_is_refused_by_name_with_what_it_takes(name, value):
    message = refused(**{name: value})
    assert message.startswith(f"{name}={value!r}: takes ")


IMPOSSIBLE = [
    (dict(NUM_HEADS=7), "NUM_HEADS=7: takes a divisor of MODEL_DIM=512"),
    (dict(MODEL_DIM=24, NUM_HEADS=8), "NUM_HEADS=8: takes heads of even width"),
    (dict(NUM_KV_HEADS=3), "NUM_KV_HEADS=3: takes a divisor of NUM_HEADS=8"),
    (dict(NUM_KV_HEADS=16), "NUM_KV_HEADS=16: takes a divisor of NUM_HEADS=8"),
    (dict(TRAIN_BATCH_TOKENS=393217), "TRAIN_BATCH_TOKENS=393217: takes a multiple of "),
    (dict(TRAIN_SEQ_LEN=5000), "TRAIN_BATCH_TOKENS=393216: takes a multiple of "),
    (dict(BATCH_SLOTS=7), "TRAIN_BATCH_TOKENS=393216: takes a multiple of BATCH_SLOTS * TRAIN_SEQ_LEN"),
    (dict(EVAL_STRIDE=5000), "EVAL_STRIDE=5000: takes at most the window, 4096"),
    (dict(EVAL_SEQ_LEN=64, EVAL_STRIDE=65), "EVAL_STRIDE=65: takes at most the window, 64"),
    (dict(VAL_TOKENS_LIMIT=1), "VAL_TOKENS_LIMIT=1: takes 0 or at least 2"),
    (dict(BETA1=1), "BETA1='1': takes a number from 0 to 0.99999"),
    (dict(BETA2=1), "BETA2='1': takes"), (dict(EMA_DECAY=1), "EMA_DECAY='1': takes"),
    (dict(MUON_MOMENTUM=1), "MUON_MOMENTUM='1': takes"),
    *((dict(RUN_ID=bad), f"RUN_ID={bad}: takes")
      for bad in ("../x", "a/b", ".", "..", ".a", "a b", "x" * 101)),
]


@pytest.mark.parametrize("env, start", IMPOSSIBLE, ids=lambda part: str(part)[:40])
def test_impossible_combinations_are_refused_by_name(env, start):
    assert refused(**env).startswith(start)


NEAR_MISSES = dict(
    ITERATION="ITERATIONS", ITERATIONS_="ITERATIONS", iterations="ITERATIONS", num_layers="NUM_LAYERS",
    SEQ_LEN="EVAL_SEQ_LEN", MAX_WALLCLOCK="MAX_WALLCLOCK_SECONDS", WALLCLOCK_SECONDS="MAX_WALLCLOCK_SECONDS",
    BATCH_TOKENS="TRAIN_BATCH_TOKENS", WARMDOWN_ITER="WARMDOWN_ITERS", NUM_LAYER="NUM_LAYERS",
    TRAIN_SEQLEN="TRAIN_SEQ_LEN", MATRIX_LRS="MATRIX_LR", KV_HEADS="NUM_KV_HEADS", DRYRUN="DRY_RUN",
    TOKENIZERPATH="TOKENIZER_PATH", VOCABSIZE="VOCAB_SIZE", NUM_HEAD="NUM_HEADS", GRAD_CLIP="GRAD_CLIP_NORM")


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_stops_the_run_and_names_the_setting(name):
    message = refused(**{name: "200"})
    assert message.startswith(f"{name}='200' is no setting") and NEAR_MISSES[name] in message


# what shells, CI services, schedulers, containers and the libraries below us put into an environment
UNRELATED = """
    PATH HOME USER LOGNAME SHELL PWD OLDPWD SHLVL TERM TERM_PROGRAM COLORTERM LANG LANGUAGE LC_ALL
    LC_CTYPE TZ EDITOR PAGER LESS LS_COLORS HISTSIZE MAIL DISPLAY HOSTNAME HOSTTYPE OSTYPE MACHTYPE TMPDIR
    TEMP TMP _ PS1 IFS XDG_RUNTIME_DIR XDG_SESSION_ID XDG_DATA_DIRS DBUS_SESSION_BUS_ADDRESS SSH_CLIENT
    SSH_CONNECTION SSH_TTY SSH_AUTH_SOCK SUDO_USER WINDOWID GPG_AGENT_INFO VIRTUAL_ENV CONDA_PREFIX
    CONDA_DEFAULT_ENV PYTHONPATH PYTHONUNBUFFERED PYTHONHASHSEED PYTHONIOENCODING PYTHONSTARTUP
    PIP_INDEX_URL PYTEST_CURRENT_TEST TOX_ENV_NAME CI GITHUB_ACTIONS GITHUB_RUN_ID GITHUB_RUN_NUMBER
    GITHUB_SHA GITHUB_WORKSPACE GITHUB_TOKEN RUNNER_OS RUNNER_TEMP GITLAB_CI CI_JOB_ID CI_PIPELINE_ID
    CI_COMMIT_SHA JENKINS_HOME BUILD_ID BUILD_NUMBER JOB_NAME WORKSPACE TRAVIS CIRCLECI BUILDKITE_JOB_ID
    CODEBUILD_BUILD_ID MAKEFLAGS MAKELEVEL CC CXX CFLAGS CXXFLAGS LDFLAGS LD_LIBRARY_PATH LD_PRELOAD
    PKG_CONFIG_PATH CMAKE_PREFIX_PATH COMPILER CPATH LIBRARY_PATH JAVA_HOME GOPATH CARGO_HOME NODE_ENV
    DOCKER_HOST KUBERNETES_PORT KUBERNETES_SERVICE_HOST POD_NAME NODE_NAME SLURM_JOB_ID SLURM_JOBID
    SLURM_NNODES SLURM_NTASKS SLURM_PROCID SLURM_LOCALID SLURM_NODELIST SLURM_STEP_ID SLURM_CPUS_PER_TASK
    SLURM_GPUS_ON_NODE PBS_JOBID LSB_JOBID SGE_TASK_ID PMI_RANK OMPI_COMM_WORLD_SIZE MASTER_ADDR
    MASTER_PORT WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE
    TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE
    TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS MKL_NUM_THREADS
    OPENBLAS_NUM_THREADS NUMEXPR_MAX_THREADS KMP_AFFINITY GOMP_CPU_AFFINITY CUDA_VISIBLE_DEVICES CUDA_HOME
    CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_CACHE_PATH NVIDIA_VISIBLE_DEVICES
    NVIDIA_DRIVER_CAPABILITIES CUBLAS_WORKSPACE_CONFIG NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_DISABLE
    GLOO_SOCKET_IFNAME PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_ENABLE_MPS_FALLBACK TORCH_LOGS
    TORCH_HOME TORCHINDUCTOR_CACHE_DIR TORCHINDUCTOR_FX_GRAPH_CACHE TRITON_CACHE_DIR HF_HOME HF_TOKEN
    HF_ENDPOINT HF_HUB_OFFLINE HF_DATASETS_CACHE TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM WANDB_MODE
    WANDB_PROJECT WANDB_API_KEY WANDB_RUN_ID MLFLOW_RUN_ID AWS_REGION AWS_ACCESS_KEY_ID SM_MODEL_DIR
    MODEL_DIR RUNPOD_POD_ID TF_CPP_MIN_LOG_LEVEL XLA_FLAGS NO_COLOR FORCE_COLOR COLUMNS LINES http_proxy
    https_proxy no_proxy HTTP_PROXY
    """.split()


def test_variables_of_other_programs_do_not_stop_a_run():
    stopped = []
    for name in UNRELATED:
        try:
            assert load(**{name: "1"}) == load()
        except SettingError as error:
            stopped.append(str(error))
    assert not stopped


@settings(max_examples=400)
@given(st.sampled_from(sorted(ROWS)), st.one_of(
    st.text(max_size=20), st.text("0123456789.-+eE_ nai", max_size=8), st.integers().map(str),
    st.floats().map(repr), st.integers(10**17, 10**30).map(str)))
@example("batch_slots", "1" + "0" * 4298)
def test_any_text_gives_settings_or_a_setting_error(name, text):
    try:
        s = load(**{name.upper(): text})
    except SettingError as error:
        assert str(error).startswith(("PRESET", "TRAIN_BATCH_TOKENS", "NUM_", "EVAL_STRIDE", name.upper()))
        return
    value = getattr(s, name)
    assert type(value).__name__ == ROWS[name].type
    if isinstance(value, float):
        assert math.isfinite(value)
    low, high = ROWS[name].metadata["low"], ROWS[name].metadata["high"]
    assert (low is None or value >= low) and (high is None or value <= high)


@settings(max_examples=300)
@given(st.text(max_size=24), st.text(max_size=5))
def test_any_variable_is_ignored_or_refused_by_name(name, text):
    if name.upper() in {row.upper() for row in ROWS}:
        return
    try:
        assert load_settings({name: text}, "smoke")[0] == load_settings({}, "smoke")[0]
    except SettingError as error:
        assert str(error).startswith(f"{name}={text!r} is no setting")


# --- schedules --------------------------------------------------------------------------------------------

@settings(max_examples=200)
@given(st.integers(1, 500), st.floats(0, 600), st.integers(0, 50), st.floats(0, 100), st.data())
def test_learning_rate_rises_stays_and_falls(iterations, warmdown, warmup, cap, data):
    s = load(ITERATIONS=iterations, WARMDOWN_ITERS=repr(warmdown), LR_WARMUP_STEPS=warmup,
             MAX_WALLCLOCK_SECONDS=repr(cap))
    step, elapsed = data.draw(st.integers(0, iterations)), data.draw(st.floats(0, 200))
    part = warmdown if warmdown < 1 else warmdown / iterations
    done = min(1.0, max(step / iterations, elapsed / cap if cap else 0))
    got = train_gpt.lr_multiplier(s, step, elapsed)
    fall = 1.0 if not part or done < 1 - part else (1 - done) / part
    assert got == pytest.approx(fall * (min(1, (step + 1) / warmup) if warmup else 1), abs=1e-9)
    assert 0 <= got <= 1 and train_gpt.lr_multiplier(s, step, elapsed + 1) <= got


def test_a_slow_machine_does_not_decay_before_its_time():
    """The fault of the reference: warm-down = iterations x mean step time decays from step 1."""
    s = load(ITERATIONS=1000, MAX_WALLCLOCK_SECONDS=100, WARMDOWN_ITERS=0.3, LR_WARMUP_STEPS=0)
    assert [train_gpt.lr_multiplier(s, step, 0.1 * step) for step in (0, 350, 699)] == [1.0, 1.0, 1.0]
    assert train_gpt.lr_multiplier(s, 10, 50.0) == 1.0                      # slow, but only half way
    assert train_gpt.lr_multiplier(s, 10, 85.0) == pytest.approx(0.5)       # the clock decides
    assert train_gpt.lr_multiplier(s, 850, 10.0) == pytest.approx(0.5)      # the steps decide, cap or not
    assert train_gpt.lr_multiplier(s, 1000, 0.0) == train_gpt.lr_multiplier(s, 0, 100.0) == 0.0


def test_muon_momentum_warms_up():
    s = load()
    assert [train_gpt.muon_momentum(s, step) for step in (0, 1500, 9000)] == [0.92, 0.99, 0.99]
    assert train_gpt.muon_momentum(s, 750) == pytest.approx(0.955)
    assert train_gpt.muon_momentum(load(MUON_MOMENTUM_WARMUP_STEPS=0), 0) == 0.99


@given(st.integers(1, 500), st.integers(0, 500), st.floats(0, 100), st.floats(0, 200))
def test_progress_is_the_further_of_steps_and_clock(iterations, step, cap, elapsed):
    s = load(ITERATIONS=iterations, MAX_WALLCLOCK_SECONDS=repr(cap))
    got = train_gpt.progress(s, step, elapsed)
    assert got == min(1.0, max(step / iterations, elapsed / s.max_wallclock_seconds if cap else 0.0))


# --- the script -------------------------------------------------------------------------------------------

def dry_run(folder: Path, **env) -> str:
    """DRY_RUN=1 in an empty folder, under an empty environment; the lines that the script's size changes
    are dropped."""
    done = subprocess.run([sys.executable, str(helpers.SCRIPT)], cwd=folder, text=True, capture_output=True,
                          env={"DRY_RUN": "1", **env}, timeout=120)
    assert (done.returncode, done.stderr, list(folder.iterdir())) == (0, "", [])
    lines = done.stdout.splitlines(True)
    return "".join(line for line in lines if not line.startswith(("code_bytes:", "budget:")))


@pytest.mark.parametrize("preset", PRESETS)
def test_dry_run_prints_the_golden_output(tmp_path, preset):
    """To write the files anew after a wanted change: python tests/test_settings.py"""
    assert dry_run(tmp_path, PRESET=preset) == (GOLDEN / f"dry_run_{preset}.txt").read_text()


def test_golden_output_of_the_reference_holds_its_figures():
    text = (GOLDEN / "dry_run_10min_16mb.txt").read_text()
    for line in ("params: 17059912", "TRAIN_BATCH_TOKENS=393216 (preset)", "TRAIN_SEQ_LEN=4096 (preset)",
                 "DRY_RUN=1 (environment)", "tok_emb 1024x512 float32 init normal 0.005 adam embed"):
        assert line in text.splitlines()


def test_exit_2_with_one_line_for_a_bad_value_and_for_a_near_miss(tmp_path):
    for env, words in ((dict(ITERATIONS="0"), "ITERATIONS='0': takes a whole number from 1"),
                       (dict(ITERATION="200"), "ITERATION='200' is no setting")):
        run = helpers.run_script(tmp_path, env)
        assert (run.code, run.out, list(tmp_path.iterdir())) == (2, "", [])
        assert run.err.startswith("train_gpt.py: " + words) and run.err.count("\n") == 1


@pytest.mark.parametrize("env, start", [
    (dict(WORLD_SIZE="many"), "WORLD_SIZE="), (dict(WORLD_SIZE="0"), "WORLD_SIZE="),
    (dict(DEVICE="mps"), "DEVICE="),
    (dict(WORLD_SIZE="3", RANK="0"), "WORLD_SIZE=3: takes a divisor of BATCH_SLOTS=8")])
def test_a_machine_that_is_not_there_is_a_bad_setting(monkeypatch, env, start):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError) as caught:
        train_gpt.open_machine(load(PRESET="smoke", DEVICE=env.get("DEVICE", "cpu")))
    assert str(caught.value).startswith(start)


if __name__ == "__main__":      # PYTHONPATH=. python tests/test_settings.py writes the golden files anew
    import tempfile
    GOLDEN.mkdir(exist_ok=True)
    for each in PRESETS:
        with tempfile.TemporaryDirectory() as empty:
            (GOLDEN / f"dry_run_{each}.txt").write_text(dry_run(Path(empty), PRESET=each))
