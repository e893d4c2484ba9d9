"""Issue 5: the campaign in short, and what it does not try: changed settings, bad traces and faults."""
import collections
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import chaos
import helpers
import train_gpt

# what may differ on a resume: it changes no result, or (paths, DTYPE=auto) is compared by what came of it
FREE = set("""preset dry_run data_path tokenizer_path run_id device compile val_batch_size val_loss_every
    train_log_every warmup_steps ckpt_seconds ckpt_keep resume lr_trace max_skipped dist_timeout
    fault""".split())


# --- the campaign -----------------------------------------------------------------------------------------

QUICK = [row.name for row in chaos.ROWS if row.quick]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """The results of all rows of `chaos.py --quick`, by name."""
    made = chaos.Campaign(tmp_path_factory.mktemp("campaign"), seed=0, quick=True, minutes=60)
    rows = [row for row in chaos.ROWS if row.quick]
    return {result.row.name: result for result in chaos.run_rows(made, rows, jobs=2, say=print)}


@pytest.mark.parametrize("name", QUICK)
def test_every_promise_holds(campaign, name):
    result = campaign[name]
    assert result.failures == [] and result.survived == result.tried
    if result.skipped and not result.tried:
        pytest.skip(result.skipped)
    assert result.tried == result.row.quick


# --- a run that was stopped -------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def stopped(tmp_path_factory, corpus) -> tuple[Path, str]:
    """A folder with a run that got SIGTERM at about its tenth step, and what it said last."""
    cwd = tmp_path_factory.mktemp("stopped")
    env = corpus.env(RUN_ID="läuft-日本", ITERATIONS=60, CKPT_SECONDS=1e-6, CKPT_KEEP=3, TRAIN_LOG_EVERY=1,
                     BATCH_SLOTS=2, TRAIN_BATCH_TOKENS=128, VAL_LOSS_EVERY=20, FAULT="sleep@10:0.5")
    launch = chaos.Launch(cwd, env, helpers.command())
    launch.wait(until=lambda: "step:9/" in launch.out)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.wait() == 16, launch.err
    assert "FAULT=sleep@10:0.5" in launch.out.splitlines()[0], "a fault is named in the log"
    return cwd, launch.err


@pytest.fixture
def copy(stopped, tmp_path, monkeypatch) -> Path:
    """The run's folder, in a copy that a test may change; the current directory is right for it."""
    shutil.copytree(stopped[0] / "logs", tmp_path / "logs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logs/läuft-日本"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def reopen(folder: Path, about: dict | None = None, **changes):
    """open_run on a stopped run's folder, with changed settings; `about` replaces its facts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    s = train_gpt.Settings(**config["settings"] | changes)
    return train_gpt.open_run(s, config | {"settings": vars(s)} | (about or {}), {})


def shell(cwd: Path, line: str) -> subprocess.CompletedProcess:
    env = helpers.clean_environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return subprocess.run(["sh", "-c", line], cwd=cwd, env=env, capture_output=True, text=True,
                          encoding="utf-8", timeout=280)


def test_the_command_that_is_told_goes_on(stopped, copy):
    """Word for word through a shell; without FAULT, which ended with the run that it was for."""
    told = re.fullmatch(r"train_gpt\.py: stopped by a signal .*?; to go on: (.*)\n", stopped[1])
    assert told, stopped[1]
    assert "FAULT" not in told[1] and "RUN_ID=" in told[1]
    before = [event for event in chaos.events(copy) if event["event"] == "step"]
    done = shell(copy.parents[1], told[1])
    assert done.returncode == 0, done.stderr
    steps = [event for event in chaos.events(copy) if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 61))
    assert steps[:len(before)] == before, "what was told is kept to the last digit, seconds too"
    final = chaos.events(copy)[-1]
    assert (final["event"], final["resumes"]) == ("final", 1)
    assert f"resumed from {Path('logs', copy.name, 'checkpoint')}" in done.stdout
    assert len([*copy.glob("checkpoint/step_*.ckpt")]) == 3, "CKPT_KEEP"
    assert (copy / "checkpoint/step_00000060.ckpt").exists(), "one at the end"


def test_a_checkpoint_is_safetensors_and_a_sha256(copy):
    """No pickle: other programs can read it by the public format alone."""
    paths = sorted(copy.glob("checkpoint/*"))
    assert [path.suffix for path in paths] == [".ckpt"] * 3 and not [*copy.rglob("*.part")]
    blob = paths[-1].read_bytes()
    assert hashlib.sha256(blob[:-32]).digest() == blob[-32:]
    arrays = safetensors.numpy.load(blob[:-32])
    assert {"weights", "momentum", "moment1", "moment2"} <= set(arrays)
    assert all(array.dtype == np.float32 and np.isfinite(array).all() for array in arrays.values())
    header = json.loads(blob[8:8 + int.from_bytes(blob[:8], "little")])
    about = json.loads(header["__metadata__"]["bytegolf"])
    assert about["step"] == int(paths[-1].stem[5:]) and about["settings"]["iterations"] == 60


def test_any_other_byte_at_either_end_of_an_artifact_is_refused(corpus):
    """All values at the places where zlib and safetensors keep house, padding bits too."""
    s = train_gpt.load_settings(corpus.env(), "smoke")[0]
    rng = np.random.default_rng(1)
    blob = train_gpt.encode_artifact(s, {param.name: rng.standard_normal(param.shape, np.float32)
                                         for param in train_gpt.parameter_table(s)})
    train_gpt.decode_artifact(blob, "whole")
    for at in [*range(3), *range(-6, 0)]:
        for value in set(range(256)) - {blob[at]}:
            bad = bytearray(blob)
            bad[at] = value
            with pytest.raises(train_gpt.DataError):
                train_gpt.decode_artifact(bytes(bad), "damaged")


# --- what may change --------------------------------------------------------------------------------------

def other(row: dataclasses.Field, value):
    """Another value that the setting could take."""
    if row.metadata["pick"]:
        return next(pick for pick in row.metadata["pick"] if pick != value)
    return not value if row.type == "bool" else value + "x" if row.type == "str" else value + 1


ROWS = {row.name: row for row in dataclasses.fields(train_gpt.Settings)}


@pytest.mark.parametrize("name", sorted(set(ROWS) - FREE - {"dtype", "eval_only"}))
def test_a_setting_that_changes_the_result_is_refused_by_name(copy, name):
    before = contents(copy)
    value = json.loads((copy / "config.json").read_text(encoding="utf-8"))["settings"][name]
    with pytest.raises(train_gpt.SettingError, match=f"^{name.upper()}=.*{re.escape(train_gpt.show(value))}"):
        reopen(copy, **{name: other(ROWS[name], value)})
    assert contents(copy) == before


def test_all_others_may_differ(copy):
    changes = dict(data_path="elsewhere", tokenizer_path="elsewhere", compile=True, val_batch_size=1024,
                   val_loss_every=7, train_log_every=3, warmup_steps=1, ckpt_seconds=5.0, ckpt_keep=1,
                   resume="must", max_skipped=3, dist_timeout=9.0, fault="nan@99", device="auto")
    folder, facts, notes = reopen(copy, **changes)
    assert folder == Path("logs", copy.name) and facts["step"] >= 9
    assert len(notes) == 1 and notes[0].startswith("resumed from ")


def test_another_number_format_is_refused(copy):
    with pytest.raises(train_gpt.SettingError, match="^DTYPE=bfloat16: .*float32"):
        reopen(copy, dtype="bfloat16")


def test_another_machine_is_told(copy):
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    notes = reopen(copy, dict(environment=config["environment"] | {"torch": "9.9"}))[2]
    assert any(re.search("torch was .*, is 9.9", note) for note in notes)


def test_other_data_is_refused(copy, corpus, tmp_path, tokenizer_path):
    """Through the script: a corpus of other documents under the same name."""
    helpers.make_corpus(tmp_path / "data", tokenizer_path, train_docs=400)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    env = {name.upper(): train_gpt.show(value) for name, value in config["settings"].items()
           if config["origins"][name] == "environment" and name != "fault"}
    before = contents(copy)
    run = helpers.run_script(tmp_path, env | {"DATA_PATH": "data"})
    assert run.code == 3 and "train_sha256" in run.err and run.err.count("\n") == 1
    assert contents(copy) == before


# --- RESUME and folders -----------------------------------------------------------------------------------

def test_resume_never_refuses_a_folder_that_exists(copy):
    before = contents(copy)
    with pytest.raises(train_gpt.SettingError, match="^RUN_ID=läuft-日本: .*RUN_ID"):
        reopen(copy, resume="never")
    assert contents(copy) == before


def test_resume_must_needs_a_checkpoint_and_auto_does_not(copy):
    shutil.rmtree(copy / "checkpoint")
    with pytest.raises(train_gpt.SettingError, match="^RESUME=must: "):
        reopen(copy, resume="must")
    shutil.copytree(copy, copy.with_name("other"))      # the first is locked until this process ends
    folder, facts, _ = reopen(copy.with_name("other"), run_id="other")
    assert facts == {} and not {"step", "val"} & {event["event"] for event in chaos.events(folder)}


def test_resume_must_needs_a_name(corpus):
    with pytest.raises(train_gpt.SettingError, match="^RESUME=must"):
        train_gpt.load_settings(corpus.env(RESUME="must"), "smoke")


def test_a_run_that_is_open_is_refused(copy):
    reopen(copy)
    before = contents(copy)
    with pytest.raises(train_gpt.SettingError, match="^RUN_ID=läuft-日本: .*in use"):
        reopen(copy)
    assert contents(copy) == before


@pytest.mark.parametrize("name", ["notes.txt", "metrics.jsonl", "checkpoint/step_00000001.ckpt"])
def test_a_folder_that_holds_no_run_is_refused_untouched(copy, name):
    folder = copy.with_name("other")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text('{"event": "step", "step": 1}\n')
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    s = train_gpt.Settings(**config["settings"] | {"run_id": "other"})
    with pytest.raises(train_gpt.SettingError, match="^RUN_ID=other: "):
        train_gpt.open_run(s, config | {"settings": vars(s)}, {})
    assert list(contents(folder)) == [name]


def in_child(call, die_at: int = 0) -> int:
    """The exit code of a call in a process of its own, killed before its n-th fsync or rename: 9 then."""
    pid, seen = os.fork(), 0
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def dying(real):
        def call(*args):
            nonlocal seen
            seen += 1
            os.kill(os.getpid(), signal.SIGKILL if seen == die_at else 0)
            return real(*args)
        return call
    os.fsync, os.replace = dying(os.fsync), dying(os.replace)
    try:
        call()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("kind", ["new", "resumed"])
def test_a_kill_anywhere_in_the_opening_of_a_folder_can_be_gone_on_from(copy, tmp_path, kind):
    original = tmp_path / "original"
    shutil.copytree(copy, original)
    steps = [event for event in chaos.events(original) if event["event"] == "step"]
    for die_at in range(1, 99):
        shutil.rmtree(copy)
        shutil.copytree(original, copy)
        if kind == "new":
            shutil.rmtree(copy)
        config = json.loads((original / "config.json").read_text(encoding="utf-8"))
        s = train_gpt.Settings(**config["settings"])
        code = in_child(lambda: train_gpt.open_run(s, config | {"settings": vars(s)}, {}), die_at)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        facts, notes = train_gpt.open_run(s, config | {"settings": vars(s)}, {})[1:]
        assert bool(facts) == (kind == "resumed") and not [note for note in notes if "warning" in note]
        kept = [event for event in chaos.events(copy) if event["event"] == "step"]
        assert kept == (steps if kind == "resumed" else []), die_at
    assert die_at > 4


def test_an_empty_folder_is_as_good_as_none(copy):
    (copy.with_name("other")).mkdir()
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    s = train_gpt.Settings(**config["settings"] | {"run_id": "other"})
    assert train_gpt.open_run(s, config | {"settings": vars(s)}, {})[1:] == ({}, [])


def test_damaged_metrics_are_told_and_do_not_stop_a_resume(copy):
    """Three steps missing, noise, half a line, another program's object."""
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("step") not in (3, 4, 5)]
    path.write_bytes(b"".join(kept) + b'[1]\n{"step": "x"}\n\xff\x00\n' + lines[5][:20])
    notes = reopen(copy)[2]
    assert any(re.search("warning: metrics.jsonl lacks 3 of the .*steps", note) for note in notes)
    steps = [event["step"] for event in chaos.events(copy) if event["event"] == "step"]
    assert steps == [1, 2, *range(6, steps[-1] + 1)]


# --- LR_TRACE and FAULT -----------------------------------------------------------------------------------

def step_line(step, rate) -> str:
    return json.dumps({"event": "step", "step": step, "lr_mul": rate}) + "\n"


TRACES = {"missing": None, "empty": "", "noise": "\x00\x01\n{}", "no steps": '{"event": "val", "step": 0}\n',
          "a gap": step_line(1, 0.5) + step_line(3, 0.5), "from the middle": step_line(2, 0.5),
          "no rate": '{"event": "step", "step": 1}\n',
          "a text": step_line(1, "0.5"), "negative": step_line(1, -0.5), "NaN": step_line(1, float("nan")),
          "infinite": step_line(1, float("inf"))}


@pytest.mark.parametrize("kind", TRACES)
def test_a_bad_trace_is_refused(tmp_path, kind):
    path = tmp_path / "metrics.jsonl"
    if TRACES[kind] is not None:
        path.write_text(TRACES[kind])
    with pytest.raises(train_gpt.DataError, match="LR_TRACE"):
        train_gpt.read_lr_trace(str(path))


def test_the_script_refuses_a_bad_trace_before_it_makes_a_folder(corpus, tmp_path):
    run = helpers.run_script(tmp_path, corpus.env(LR_TRACE=tmp_path))
    assert run.code == 3 and re.fullmatch(r"train_gpt\.py: LR_TRACE=.*\n", run.err), run.err
    assert not (tmp_path / "logs").exists()


BAD_FAULTS = ["nan", "boom@3", "nan@", "nan@x", "nan@3:rankx", "kill@3:rank", "nan@3;kill@4", " kill@3"]


@pytest.mark.parametrize("fault", BAD_FAULTS)
def test_a_fault_that_is_none_is_refused(corpus, fault):
    with pytest.raises(train_gpt.SettingError, match="^FAULT="):
        train_gpt.load_settings(corpus.env(FAULT=fault), "smoke")


def test_a_fault_in_a_part_that_the_model_lacks_is_refused_by_name(corpus):
    s = train_gpt.load_settings(corpus.env(FAULT="nan@3:0.nothere"), "smoke")[0]
    trainer = train_gpt.Trainer(s, train_gpt.Machine(torch.device("cpu")))
    with pytest.raises(train_gpt.SettingError, match="^FAULT=.*nothere"):
        train_gpt.provoke(trainer, 3, range(1))


# --- SKIP_SIGMA -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sigma, place", [(0, 0), (6, 0), (6, 1)])
def test_spikes_of_loss_or_norm_are_skipped_once_128_are_seen(corpus, sigma, place):
    """By the formula: above mean + sigma * standard deviation of the last 128 taken steps."""
    s = train_gpt.load_settings(corpus.env(SKIP_SIGMA=sigma), "smoke")[0]
    optimizer = train_gpt.Trainer(s, train_gpt.Machine(torch.device("cpu"))).optimizer
    rng, recent = np.random.default_rng(1), collections.deque(maxlen=128)
    for step in range(400):
        seen = rng.normal([3.0, 1.0], [0.1, 0.2]).astype(np.float32)
        spike = step % 50 == 49
        if spike:
            seen[place] += 5
        limit = np.mean(recent, 0) + 6 * np.std(recent, 0, ddof=1) if len(recent) == 128 else np.inf
        expected = not sigma or bool((seen <= limit).all())
        assert bool(optimizer.judge(torch.from_numpy(seen))) == expected
        assert not sigma or step < 128 or expected != spike, "the test sees spikes and nothing else"
        if expected:
            recent.append(seen)


def test_what_is_not_finite_is_never_taken_nor_remembered(corpus):
    s = train_gpt.load_settings(corpus.env(SKIP_SIGMA=3), "smoke")[0]
    optimizer = train_gpt.Trainer(s, train_gpt.Machine(torch.device("cpu"))).optimizer
    for bad in (float("nan"), float("inf"), float("-inf")):
        for seen in ([bad, 1.0], [1.0, bad]):
            assert not optimizer.judge(torch.tensor(seen))
    assert optimizer.recent.isnan().all()
