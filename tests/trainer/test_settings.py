"""Settings: presets, bad values, impossible combinations, near misses, DRY_RUN."""

import contextlib
import dataclasses
import io

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import train_gpt
from tests.kit import helpers
from train_gpt import PRESETS, ROWS, SettingError, Settings, load_settings

GOLDEN = helpers.ROOT / "tests/golden"


def load(**env) -> Settings:
    return load_settings({name: str(value) for name, value in env.items()}, "10min_16mb")[0]


def refused(**env) -> str:
    """The one line that refuses these variables."""
    with pytest.raises(SettingError) as caught:
        load(**env)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- presets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_value_of_a_preset_is_one_that_its_variable_takes(preset):
    s, origins = load_settings({"ITERATIONS": "7"}, preset)
    assert s == dataclasses.replace(load(PRESET=preset), iterations=7)
    assert origins == dict.fromkeys(ROWS, "preset") | {"iterations": "environment"}
    for name, row in ROWS.items():
        value = getattr(s, name)
        assert type(value).__name__ == row.type and row.metadata["doc"], name
        assert train_gpt.parse_setting(name, train_gpt.format_value(value)) == value


# --- what is refused --------------------------------------------------------------------------------------

ARABIC_TEN = "\u0661\u0660"  # int() and float() read it
BAD = {
    "ITERATIONS": ("", "0", "-1", "1.5", "1e3", "many", "nan", "0x10", "1 0", "1_0", ARABIC_TEN),
    "MATRIX_LR": ("", "-0.1", "nan", "inf", "-inf", "1e999", "0,02", "fast", "1_0", ARABIC_TEN),
    "COMPILE": ("", "2", "true", "yes", "-1", "1.0"),
    "DEVICE": ("", "gpu", "CUDA", "cuda:0", "1"),
    "DTYPE": ("fp16",),
    "PRESET": ("large",),
    "VOCAB_SIZE": ("65537", "1"),
    "BETA1": ("1",),
    "SEED": ("-1",),
}
BAD_RUN_IDS = ("../x", "a/b", ".", "..", ".a", "a b", "x" * 101)  # no plain names of a folder


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_by_name_with_what_it_takes(name):
    for value in BAD[name]:
        assert refused(**{name: value}).startswith(f"{name}={value!r}: takes ")


# environment: how the line begins that refuses it
IMPOSSIBLE = {
    "NUM_HEADS=7": "NUM_HEADS=7: takes a divisor of half of MODEL_DIM=512",
    "MODEL_DIM=24 NUM_HEADS=8": "NUM_HEADS=8: takes a divisor of half of MODEL_DIM=24",
    "NUM_KV_HEADS=3": "NUM_KV_HEADS=3: takes a divisor of NUM_HEADS=8",
    "NUM_KV_HEADS=16": "NUM_KV_HEADS=16: takes a divisor of NUM_HEADS=8",
    "TRAIN_BATCH_TOKENS=393217": "TRAIN_BATCH_TOKENS=393217: takes a multiple of ",
    "TRAIN_SEQ_LEN=5000": "TRAIN_BATCH_TOKENS=393216: takes a multiple of ",
    "BATCH_SLOTS=7": "TRAIN_BATCH_TOKENS=393216: takes a multiple of ",
    "VAL_TOKENS_LIMIT=1": "VAL_TOKENS_LIMIT=1: takes 0 or at least 2",
    "MAX_FLOPS=1e12": "MAX_FLOPS=1000000000000: takes 0 or at least a step's ",
}


def test_impossible_combinations_are_refused_by_name():
    for env, line in IMPOSSIBLE.items():
        assert refused(**helpers.pairs(env)).startswith(line)
    for name in BAD_RUN_IDS:
        assert refused(RUN_ID=name).startswith(f"RUN_ID={name}: takes ")


NEAR_MISSES = helpers.pairs("""
    ITERATION=ITERATIONS iterations=ITERATIONS num_layers=NUM_LAYERS MAX_FLOP=MAX_FLOPS MAXFLOPS=MAX_FLOPS
    WARMDOWN_ITER=WARMDOWN_ITERS NUM_LAYER=NUM_LAYERS NUM_HEAD=NUM_HEADS VOCABSIZE=VOCAB_SIZE
    TRAIN_SEQLEN=TRAIN_SEQ_LEN MATRIX_LT=MATRIX_LR DRYRUN=DRY_RUN TOKENIZERPATH=TOKENIZER_PATH
""")
OTHER_WORDS = """
    SEEDS DEVICES PRESETS DTYPES RUN_IDS DATASET_PATH DATA_PATHS EVAL_BATCH_SIZE VAL_SEQ_LEN BETA COMPILED
    COMPILER TOKENIZERS_PATH WALLCLOCK_SECONDS MATRIX_LRS ITERATIONS_
"""


# What shells, CI services, schedulers, containers and libraries put into an environment: of their names,
# those that come nearest to a setting.
UNRELATED = """
    PATH LC_CTYPE MAIL HOSTTYPE OSTYPE MACHTYPE WINDOWID PYTHONPATH GITHUB_ACTIONS GITHUB_RUN_ID
    GITHUB_TOKEN BUILD_ID BUILD_NUMBER TRAVIS LD_LIBRARY_PATH COMPILER CPATH LIBRARY_PATH DOCKER_HOST
    SLURM_STEP_ID MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE ROLE_NAME OMP_NUM_THREADS
    MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_MAX_THREADS KMP_AFFINITY CUDA_CACHE_PATH TORCH_LOGS
    HF_TOKEN TOKENIZERS_PARALLELISM WANDB_RUN_ID MLFLOW_RUN_ID SM_MODEL_DIR MODEL_DIR RUNPOD_POD_ID
    TF_CPP_MIN_LOG_LEVEL
"""


def test_a_near_miss_stops_the_run_and_other_words_do_not(capsys):
    for name, meant in NEAR_MISSES.items():
        assert refused(**{name: "200"}).startswith(f"{name}='200' is no setting, {meant} is: ")
    for name in OTHER_WORDS.split():
        assert load(**{name: "1"}) == load()
        assert capsys.readouterr().err.startswith(f"note: {name}='1' is no setting, ")
    for name in UNRELATED.split():
        assert load(**{name: "1"}) == load()


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(ROWS)),
    st.one_of(
        st.text(max_size=20),
        st.text("0123456789.-+eE_ nai", max_size=8),
        st.integers().map(str),
        st.floats().map(repr),
        st.integers(10**17, 10**30).map(str),
    ),
)
@example("batch_slots", "1" + "0" * 4298)
def test_any_text_gives_settings_or_a_setting_error(name, text):
    try:
        s = load(**{name.upper(): text})
    except SettingError as error:
        assert str(error).startswith(("PRESET", "TRAIN_BATCH_TOKENS", "NUM_", name.upper()))
        return
    value, row = getattr(s, name), ROWS[name]
    assert type(value).__name__ == row.type
    assert row.type == "str" or row.metadata["low"] <= value <= row.metadata["high"]


@settings(max_examples=150)
@given(st.text(max_size=24), st.text(max_size=5))
def test_any_variable_is_ignored_or_refused_by_name(name, text):
    if name.upper() in {row.upper() for row in ROWS}:
        return
    try:
        assert load_settings({name: text}, "smoke")[0] == load_settings({}, "smoke")[0]
    except SettingError as error:
        assert str(error).startswith(f"{name}={text!r} is no setting")


# --- the script -------------------------------------------------------------------------------------------


def without_code_bytes(text: str) -> str:
    """What DRY_RUN=1 prints, without the line that the script's own size changes."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("code_bytes:"))


def golden_lines(preset: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert train_gpt.dry_run(*load_settings({"PRESET": preset, "DRY_RUN": "1"}, preset), 0) == 0
    return without_code_bytes(said.getvalue())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_dry_run_prints_the_golden_output(preset):
    """To write the files anew after a wanted change: python -m tests.trainer.test_settings"""
    assert golden_lines(preset) == (GOLDEN / f"dry_run_{preset}.txt").read_text()


@pytest.mark.slow
def test_dry_run_needs_an_empty_folder_and_no_environment(tmp_path):
    """Without a preset, a machine without a GPU takes the floppy's."""
    done = helpers.python(helpers.SCRIPT, cwd=tmp_path, env={"DRY_RUN": "1"}, timeout=120)
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])
    preset = "10min_16mb" if torch.cuda.is_available() else "floppy"
    chosen, given = (f"PRESET={preset} ({origin})" for origin in ("preset", "environment"))
    assert without_code_bytes(done.stdout) == golden_lines(preset).replace(given, chosen)
    size, found = helpers.SCRIPT.stat().st_size, int(done.stdout.split("code_bytes: ")[1].split()[0])
    assert found == size if preset == "10min_16mb" else 0 < found < size  # at zlib level 9


if __name__ == "__main__":
    for name in PRESETS:
        (GOLDEN / f"dry_run_{name}.txt").write_text(golden_lines(name))
