"""Runs that were stopped: what a resume accepts, refuses and reports; one fault of each kind."""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import types
import zlib
from pathlib import Path

import psutil
import pytest
import safetensors.numpy
import torch

import train_gpt
from tests.kit import helpers, launch
from tests.kit.launch import Launch, all_ranks, contents, end_of, ended

ROWS = train_gpt.ROWS
# What may differ on a resume: it changes no result, or (paths, device) is compared by what came of it.
FREE = """
    preset dry_run data_path tokenizer_path run_id device compile eval_only val_batch_size val_loss_every
    train_log_every warmup_steps ckpt_seconds dist_timeout
"""
FREE = set(FREE.split())
MARGIN = 10.0  # seconds beyond DIST_TIMEOUT in which a rank has ended: Python's exit on a busy machine
SMALL = {"BATCH_SLOTS": 2, "TRAIN_BATCH_TOKENS": 128}


# --- lost ranks -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["kill@12:rank=0", "stop@12:rank=1"])
def test_the_others_end_in_time_when_a_rank_is_lost(corpus, tmp_path, spec):
    """And say so; torchrun names a dead one."""
    env = corpus.env(RUN_ID="lost", ITERATIONS=10**5, TRAIN_LOG_EVERY=1, DIST_TIMEOUT=4)
    run = Launch(tmp_path, env, 2, spec)
    others = all_ranks(run, 2)
    lost = others.pop(int(spec[-1]))
    run.wait(until=lambda: ended(lost) or launch.status(lost) == psutil.STATUS_STOPPED)
    run.wait(4.0 + MARGIN, until=lambda: all(map(ended, others.values())))
    assert all(map(ended, others.values())), run.err
    if spec.startswith("stop"):
        run.kill()  # torchrun would wait half a minute for the stopped one
    run.wait()
    assert re.search(r"^train_gpt\.py: lost a rank: .*RUN_ID=lost goes on", run.err, re.MULTILINE), run.err
    assert spec.startswith("stop") or re.search(r"rank +: 0 .*\n +exitcode +: -9 ", run.err), run.err


def test_a_gpu_that_waits_for_a_lost_rank_is_given_up(monkeypatch):
    """NCCL's kernels never end then. The GPU's answers are simulated: test_cuda.py has one card only."""
    said = [True, False]
    stream = types.SimpleNamespace(query=lambda: bool(said) and said.pop())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    machine = train_gpt.Machine(torch.device("cuda"), world=2, timeout=0.1, reducers="nccl")
    machine.collective(lambda: None)
    with pytest.raises(InterruptedError, match="lost a rank"):
        machine.collective(lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("same_text", [True, False])
def test_ranks_do_what_rank_0_is_to_do_on_the_same_text(corpus, tmp_path, same_text):
    """The shell of another node may hold other settings, and its disk other text."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = corpus.env(RUN_ID="run", ITERATIONS=5, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=2)
    env |= {"DATA_PATH": "data", "RANK": 0}
    ranks = []
    for rank, other in enumerate(({}, {"VAL_BATCH_SIZE": 1024, "TRAIN_BATCH_TOKENS": 2048, "ITERATIONS": 3})):
        shutil.copytree(corpus.data_path, tmp_path / f"{rank}/data")
        ranks.append((tmp_path / str(rank), env | {"RANK": rank} | other))
    if not same_text:
        max(tmp_path.glob("1/data/*_train_*.bin")).unlink()
    first, second = (Launch(*rank) for rank in ranks)
    if same_text:
        second.need(0)
        trained = first.need(0).final
        again = helpers.run_here(train_gpt.main, tmp_path / "0", corpus.env(EVAL_ONLY="logs/run/model.ptz"))
        assert trained["steps"] == "5" and trained["val_tokens"] == again.final["val_tokens"]
        assert float(trained["val_bpb"]) == pytest.approx(float(again.final["val_bpb"]), rel=1e-6)
    else:
        assert "data: text is {" in second.need(3).err and "rank 0's differs (rank 1)" in second.err
        assert "lost a rank" in first.need(16).err


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again_when_one_was_killed(corpus, tmp_path):
    """--max-restarts: the run goes on from its checkpoint by itself."""
    env = corpus.env(RUN_ID="run", ITERATIONS=200, CKPT_SECONDS=0.01, TRAIN_LOG_EVERY=1, **SMALL)
    command = helpers.command(2, torchrun=("--standalone", "--max-restarts=1"))
    run = Launch(tmp_path, env, command=command)
    ranks = all_ranks(run, 2)
    run.wait(until=lambda: "step:20/" in run.out)
    os.kill(ranks[1], signal.SIGKILL)
    final = run.need(0).final
    assert (final["steps"], final["resumes"]) == ("200", "1") and "resumed from" in run.out


@pytest.mark.slow
def test_bad_numbers_of_one_rank_change_none_and_a_replica_that_changed_is_named(corpus, tmp_path):
    """Before and behind a step without finite numbers, both ranks hold the same state."""
    faults = "nan@5:rank=1:part=qkv,inf@9:rank=0,drift@15:rank=1,hash@5,hash@6,hash@9,hash@10"
    env = corpus.env(RUN_ID="run", ITERATIONS=30, VAL_LOSS_EVERY=20, **SMALL)
    run = Launch(tmp_path, env, 2, faults).need(1)
    texts = [event["text"] for event in helpers.events(tmp_path / "logs/run", "warning")]
    assert [re.search(r"\d+", text)[0] for text in texts] == ["5", "9"]
    states = dict(re.findall(r"state before step (\d+ on rank \d): (\w+)", run.out))
    for step in (5, 9):
        assert len({states[f"{at} on rank {rank}"] for at in (step, step + 1) for rank in range(2)}) == 1
    assert re.search(r"step 20: the weights of rank \[?1\]? differ", run.err), run.err
    assert {*re.findall(r"exitcode\s*: (-?\d+)", run.err)} <= {"17", "-15"}, run.err


@pytest.mark.slow
def test_a_run_that_was_killed_even_in_a_checkpoint_ends_with_the_bits_of_one_that_was_not(corpus, tmp_path):
    """Operations end it, so that no seconds do: its seed repeats it."""
    env = corpus.env(RUN_ID="run", ITERATIONS=10**5, MAX_FLOPS=6e9, CKPT_SECONDS=1e-6, TRAIN_LOG_EVERY=1)
    for spec in ("sleep@5:seconds=0.5,cut@10", "torn@20", "kill@40"):
        Launch(tmp_path, env, provoke=spec).need(-signal.SIGKILL)
        assert (tmp_path / "logs/run/checkpoint/step_00000020.damaged").exists() == (spec == "kill@40")
    broken = Launch(tmp_path, env, provoke="gpu@45")
    assert broken.wait() == 1 and broken.err.endswith("RUN_ID=run goes on from the last checkpoint, if any\n")
    resumed = helpers.run_here(train_gpt.main, tmp_path, env)
    assert (resumed.code, resumed.final["steps"], resumed.final["resumes"]) == (0, "55", "4")
    kept = sorted(path.name for path in resumed.folder.glob("checkpoint/*.ckpt"))
    assert len(kept) == 2 and kept[-1] == "step_00000055.ckpt", "one at the end, and the one before it"
    log = (resumed.folder / "train.log").read_text(encoding="utf-8")
    assert "step_00000020.ckpt is damaged and put aside; the one before is taken" in log
    alone = helpers.run_here(train_gpt.main, tmp_path / "alone", env)
    assert end_of(resumed.folder) == end_of(alone.folder)


@pytest.mark.slow
def test_two_ranks_stop_with_a_checkpoint_and_in_the_last_evaluation_and_one_goes_on(corpus, tmp_path):
    """By a signal to torchrun, and by one to a rank."""
    env = corpus.env(RUN_ID="run", ITERATIONS=30, VAL_BATCH_SIZE=4096)
    run = Launch(tmp_path, env, 2, "sleep@10:seconds=1")
    run.signal_at("step:8/", signal.SIGTERM)
    run.need(1)  # torchrun has an exit code of its own
    said = re.search(r"stopped by a signal after step (\d+) of 30; (.*) goes on", run.err)
    assert 8 <= int(said[1]) < 30 and "RUN_ID=run" in said[2]
    assert (tmp_path / f"logs/run/checkpoint/step_{int(said[1]):08}.ckpt").exists()
    run = Launch(tmp_path, env, 2, "sleep@30:seconds=0.5:in=pass")
    ranks = all_ranks(run, 2)
    run.wait(until=lambda: "step:30/" in run.out)
    os.kill(ranks[1], signal.SIGTERM)
    run.need(1)
    # counted, since lines of two processes may mix
    assert run.err.count("stopped by a signal in an evaluation; ") == 2, run.err
    done = helpers.run_here(train_gpt.main, tmp_path, env)
    assert (done.code, done.final["steps"], done.final["resumes"]) == (0, "30", "2")


# --- a run that was stopped -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def env(corpus) -> dict[str, str]:
    more = {"ITERATIONS": 60, "VAL_LOSS_EVERY": 20, "TRAIN_LOG_EVERY": 1} | SMALL
    return corpus.env(RUN_ID="läuft-日本", CKPT_SECONDS=1e-6, **more)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, env) -> Path:
    """A folder with a run that got SIGINT at about its tenth step."""
    cwd = tmp_path_factory.mktemp("stopped")
    run = Launch(cwd, env, provoke="sleep@10:seconds=1")
    run.signal_at("step:8/", signal.SIGINT)
    run.need(16)
    said = r"train_gpt\.py: stopped by a signal after step \d+ of 60; the .*goes on.*\n"
    assert re.fullmatch(said, run.err)
    return cwd


@pytest.fixture
def copy(stopped, tmp_path, monkeypatch) -> Path:
    """The run's folder, in a copy that a test may change; the current directory is right for it."""
    shutil.copytree(stopped / "logs", tmp_path / "logs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logs/läuft-日本"


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def reopen(folder: Path, environment: dict | None = None, **changes):
    """open_run on a stopped run's folder, with other settings or facts of the machine."""
    about = config_of(folder)
    s = train_gpt.Settings(**about["settings"] | changes)
    about |= {"settings": dataclasses.asdict(s), "environment": about["environment"] | (environment or {})}
    return train_gpt.open_run(s, about, {})


def test_a_checkpoint_is_safetensors_in_zlib(copy):
    """No pickle: other programs can read it by the public formats alone."""
    for path in copy.glob("checkpoint/*"):
        arrays = safetensors.numpy.load(zlib.decompress(path.read_bytes()))
        assert set(arrays) == {"weights", "momentum", "moment1", "moment2"}


def test_a_damaged_checkpoint_is_put_aside(copy):
    """A run of which all are damaged begins anew, when the command is given again."""
    older, newest = sorted(copy.glob("checkpoint/*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    _, facts, notes = train_gpt.newest_checkpoint(copy / "checkpoint")
    assert facts["counters"]["steps"] == int(older.stem[5:])
    assert f"{newest.name} is damaged" in notes[0] and older.name in notes[-1]
    older.write_bytes(older.read_bytes()[:-1])
    with pytest.raises(train_gpt.DataError, match=r"all damaged .*begins anew"):
        train_gpt.newest_checkpoint(copy / "checkpoint")
    assert train_gpt.newest_checkpoint(copy / "checkpoint") == ({}, {}, [])
    assert all(path.with_suffix(".damaged").exists() for path in (older, newest))


# --- what may change --------------------------------------------------------------------------------------


def other(name: str, value):
    """Another value that the setting could take."""
    row = ROWS[name]
    if choices := row.metadata.get("choices"):
        return next(each for each in choices if each != value)
    if row.type == "bool":
        return not value
    return value + "x" if row.type == "str" else value + 1


def test_a_setting_that_changes_the_result_is_refused_by_name(copy, monkeypatch):
    monkeypatch.setattr(train_gpt.fcntl, "flock", lambda *_: None)  # this process opens it again and again
    before, values = contents(copy), config_of(copy)["settings"]
    for name in ROWS.keys() - FREE:
        was = re.escape(train_gpt.format_value(values[name]))
        said = f"^{name.upper()}=.* with {was}, by PRESET=.*: give that again, or a new RUN_ID$"
        with pytest.raises(train_gpt.SettingError, match=said):
            reopen(copy, **{name: other(name, values[name])})
    assert contents(copy) == before


def test_all_others_may_differ_and_another_number_of_threads_is_noted(copy):
    values = config_of(copy)["settings"]
    names = FREE - {"preset", "run_id"}
    changes = {name: other(name, values[name]) for name in names}
    folder, _, facts, notes = reopen(copy, {"threads": 7}, **changes)
    assert folder == Path("logs", copy.name) and facts["counters"]["steps"] >= 8
    resumed, threads = notes
    assert resumed.startswith("resumed from ")
    assert threads == f"note: threads: not as {folder} began, so other bits may follow"


@pytest.mark.slow
@pytest.mark.parametrize("named", ["TRAIN_SHA256", "VAL_SHA256"])
def test_other_documents_or_no_validation_text_are_refused(
    copy, corpus, env, tmp_path, tokenizer_path, named
):
    """Through the script, under the names of before."""
    if named == "TRAIN_SHA256":
        helpers.make_corpus(tmp_path / "data", corpus.tokenizer_path, train_docs=400)
    else:
        shutil.copytree(corpus.data_path, tmp_path / "data", ignore=shutil.ignore_patterns("*_val_*"))
    before = contents(copy)
    run = helpers.run_here(train_gpt.main, tmp_path, env | {"DATA_PATH": "data"})
    assert run.code == 3 and named in run.err and run.err.count("\n") == 1, run.err
    assert contents(copy) == before


def test_a_run_that_is_open_is_refused_and_an_empty_folder_is_none(copy):
    copy.with_name("other").mkdir()
    assert reopen(copy, run_id="other")[2] == {}
    reopen(copy)
    with pytest.raises(train_gpt.SettingError, match=r"^RUN_ID=läuft-日本: .*in use"):
        reopen(copy)


@pytest.mark.parametrize("kept, more", [(100, b""), (None, b'{"event": "final", "val_loss": "2.')])
def test_metrics_that_were_lost_or_half_of_a_final_event_do_not_stop_a_resume(copy, kept, more):
    """A disk that was full in the middle of it: the run said that it goes on."""
    path = copy / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:kept] + more)
    assert reopen(copy)[2]["counters"]["steps"] >= 8
    assert b"\0" not in path.read_bytes()


# --- full disks -------------------------------------------------------------------------------------------


LIMITED = ["bash", "-c", 'ulimit -f 90; exec "$0" "$@"', *helpers.command()]


@pytest.mark.slow
def test_a_checkpoint_for_which_there_is_no_room_is_a_warning(corpus, tmp_path):
    run = Launch(tmp_path, corpus.env(RUN_ID="run"), command=LIMITED).need(0)
    assert "\nwarning: no checkpoint: " in run.out and "File too large" in run.out


@pytest.mark.slow
def test_a_file_that_may_not_grow_stops_the_run_and_it_goes_on(corpus, tmp_path):
    small = SMALL | {"MODEL_DIM": 8, "NUM_HEADS": 2, "NUM_LAYERS": 1, "TRAIN_SEQ_LEN": 16}
    env = corpus.env(RUN_ID="run", ITERATIONS=700, TRAIN_LOG_EVERY=1, **small)
    for _ in range(2):
        run = Launch(tmp_path, env, command=LIMITED).need(16)
        assert "File too large" in run.err and "RUN_ID=run goes on" in run.err
    runs = [helpers.run_here(train_gpt.main, cwd, env) for cwd in (tmp_path, tmp_path / "alone")]
    assert end_of(runs[0].folder) == end_of(runs[1].folder)
