"""records/follow.py with the real trackers, offline: what was sent is read back from their own files."""

import collections
import json
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from records.follow import __main__ as follow
from records.follow.trackers import free_name, wandb_records
from tests.kit import helpers

slow = pytest.mark.slow
ALL = ["tensorboard", *(pytest.param(name, marks=slow) for name in ("trackio", "wandb"))]
CONFIG = {"settings": {"seed": 7, "matrix_lr": 0.06, "preset": "smoke"}, "environment": {"torch": "2"}}


def step(number: int, **more) -> str:
    """A line as train_gpt.py writes it."""
    event = {"event": "step", "train_loss": 6 / number, "grad_norm": 0.5, "step": number}
    return json.dumps(event | {"train_seconds": number / 3, "train_flops": number * 10**17} | more) + "\n"


def val(number: int) -> str:
    event = {"event": "val", "step": number, "val_loss": 2.5, "val_bpb": 1.25, "partial": True}
    return json.dumps(event) + "\n"


def final(steps: int, **more) -> str:
    event = {"event": "final", "val_bpb": "1.12500000 partial", "steps": steps, "batches_crc32": "0732e123"}
    return json.dumps(event | {"budget": "ok"} | more) + "\n"


def lines(first: int, last: int) -> str:
    """Steps, with a validation after every tenth."""
    return "".join(step(n) + val(n) * (n % 10 == 0) for n in range(first, last + 1))


def make_run(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "metrics.jsonl").write_text(text)
    return folder


# --- reading back -----------------------------------------------------------------------------------------


def told_tensorboard(root: Path, name: str) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found = EventAccumulator(str(root / "logs" / name), {"scalars": 0, "tensors": 0}).Reload()
    tags = found.Tags()
    rows = [(tag, each.step, each.value) for tag in tags["scalars"] for each in found.Scalars(tag)]
    config = {}
    if "_hparams_/session_start_info" in found.summary_metadata:
        blob = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        hparams = HParamsPluginData.FromString(blob).session_start_info.hparams
        config = {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()}
    ends = {tag.removeprefix("final/"): value for tag, _, value in rows if tag.startswith("final/")}
    return {"rows": [row for row in rows if "/" not in row[0]], "config": config, "summary": ends}


def told_trackio(root: Path, name: str) -> dict:
    """From the database itself."""
    with sqlite3.connect(root / "trackio/bytegolf.db") as base:
        metrics = base.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", [name]).fetchall()
        configs = base.execute("SELECT config FROM configs WHERE run_name = ?", [name]).fetchall()
    rows = [(tag, at, value) for at, blob in metrics for tag, value in json.loads(blob).items()]
    ends = {tag.removeprefix("final/"): value for tag, _, value in rows if tag.startswith("final/")}
    rows = [row for row in rows if "/" not in row[0]]
    return {"rows": rows, "config": json.loads(configs[0][0]), "summary": ends}


def told_wandb(root: Path, name: str) -> dict:
    """From all files of the run that `wandb sync` would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    told = {"rows": [], "config": {}, "summary": {}}
    ids = set()
    for path in sorted((root / "logs" / name / "wandb").glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, wandb_records(path.read_bytes())):
            if record.HasField("run"):
                told["config"] |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
                ids.add((record.run.run_id, record.run.display_name))
            pairs = {"".join(each.nested_key) or each.key: each for each in record.summary.update}
            told["summary"] |= {key: json.loads(each.value_json) for key, each in pairs.items()}
            items = {"".join(each.nested_key) or each.key: each for each in record.history.item}
            row = {key: json.loads(each.value_json) for key, each in items.items() if key[0] != "_"}
            told["rows"] += [(key, row["step"], value) for key, value in row.items() if key != "step"]
    assert len(ids) == 1 and name in next(iter(ids)), ids
    return told


TOLD = {"tensorboard": told_tensorboard, "trackio": told_trackio, "wandb": told_wandb}


def check_steps(to: str, root: Path, name: str, steps: int) -> dict:
    """Every step and every validation is there once."""
    told = TOLD[to](root, name)
    counts = collections.Counter((tag, at) for tag, at, _ in told["rows"])
    doubled = [key for key, count in counts.items() if count > 1]
    assert not doubled
    assert sorted(at for tag, at in counts if tag == "train_loss") == [*range(1, steps + 1)]
    assert sorted(at for tag, at in counts if tag == "val_bpb") == [*range(10, steps + 1, 10)]
    return told


# --- the command ------------------------------------------------------------------------------------------


def environment(root: Path) -> dict[str, str]:
    """Of a follower: offline, and all that a tracker writes below `root`."""
    own = {"WANDB_MODE": "offline", "TRACKIO_DIR": root / "trackio", "PYTHONPATH": helpers.ROOT}
    caches = dict.fromkeys(("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "XDG_CACHE_HOME"), root / "cache")
    return helpers.clean_environment(**own, **caches)


def command(to: str, *more) -> list[str]:
    return [sys.executable, "-m", "records.follow", "logs", "--to", to, *map(str, more)]


def follow_all(to: str, root: Path, *more) -> str:
    """Follow root/logs until all have ended; what the command said. TensorBoard needs no process for it."""
    done = subprocess.run(command(to, *more), cwd=root, env=environment(root), capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Calls the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.01)

    def call(*args) -> int:
        return follow.main([*map(str, args), "--to", "tensorboard"])

    return call


def test_a_run_is_at_the_tracker(here, tmp_path, capsys):
    make_run(tmp_path / "logs/one", lines(1, 20) + final(20))
    assert here("logs") == 0
    assert capsys.readouterr().out == "one: 22 rows sent, has ended\n"
    check_one(check_steps("tensorboard", tmp_path, "one", 20))
    assert here("logs/one") == 0
    assert capsys.readouterr().out == "one: 0 rows sent, has ended and is at tensorboard already\n"


@slow
@pytest.mark.parametrize("to", ["trackio", "wandb"])
def test_a_run_is_at_a_tracker_that_takes_seconds_to_load(to, tmp_path):
    make_run(tmp_path / "logs/one", lines(1, 20) + final(20))
    follow_all(to, tmp_path)
    check_one(check_steps(to, tmp_path, "one", 20))
    assert "is at " in follow_all(to, tmp_path)
    check_steps(to, tmp_path, "one", 20)


def check_one(told: dict) -> None:
    values = {(tag, at): value for tag, at, value in told["rows"]}
    assert values["train_loss", 7] == pytest.approx(6 / 7, rel=1e-7)
    assert values["train_flops", 20] == pytest.approx(2e18, rel=1e-7)
    assert values["partial", 20] == 1 and values["val_loss", 20] == 2.5
    assert told["config"].items() >= {"seed": 7, "matrix_lr": 0.06, "preset": "smoke", "torch": "2"}.items()
    assert told["summary"]["val_bpb"] == 1.125 and told["summary"]["steps"] == 20
    assert told["summary"]["partial"] == 1
    assert told["summary"].get("batches_crc32", "0732e123") == "0732e123"


def test_numbers_that_are_not_finite_and_foreign_values(tmp_path):
    event = json.loads(step(1, train_loss="nan", grad_norm="inf", note="words", parts=[1], large=10**20))
    found = follow.numbers(event | {"huge": 10**400})
    assert found["train_loss"] != found["train_loss"] and found["grad_norm"] == float("inf")
    assert found["large"] == 1e20 and found["huge"] == float("inf")
    assert not {"note", "parts", "step", "event"} & found.keys()


# --- living runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen_cut", [True, False])
def test_a_resume_doubles_nothing(here, tmp_path, seen_cut):
    """The run is killed at step 27 and goes on from step 20; the follower sees that at once, or late."""
    folder = make_run(tmp_path / "logs/one", lines(1, 27) + '{"event": "st')
    args = follow.parse_args([str(folder), "--to", "tensorboard"])
    followed = follow.Followed(folder, args)
    followed.look(600)
    assert followed.sent == 29
    if seen_cut:
        (folder / "metrics.jsonl").write_text(lines(1, 19) + step(20))
        followed.look(600)
    (folder / "metrics.jsonl").write_text(lines(1, 19) + step(20) + val(20) + step(21, train_seconds=99))
    followed.look(600)
    text = lines(1, 19) + step(20) + val(20) + step(21, train_seconds=99) + lines(22, 40)
    (folder / "metrics.jsonl").write_text(text + final(40))
    followed.look(600)
    assert followed.done
    check_steps("tensorboard", tmp_path, "one", 40)


def test_doubled_lines_are_sent_once(here, tmp_path):
    make_run(tmp_path / "logs/one", lines(1, 20) + lines(11, 30) + final(30))
    assert here("logs") == 0
    check_steps("tensorboard", tmp_path, "one", 30)


def test_a_run_that_was_cut_is_left_open_and_gone_on_with(here, tmp_path, capsys):
    folder = make_run(tmp_path / "logs/one", lines(1, 20) + step(21)[:-9])
    assert here("logs", "--patience", 0) == 0
    assert re.search(r"one: 22 rows sent, has not ended and was silent for \d+ s", capsys.readouterr().out)
    (folder / "metrics.jsonl").write_text(lines(1, 30) + final(30))
    assert here("logs") == 0
    check_steps("tensorboard", tmp_path, "one", 30)


@slow
@pytest.mark.parametrize("to", ["trackio", "wandb"])
def test_a_copy_of_a_run_s_folder_is_another_run(to, tmp_path):
    """As of a run that branches from another one's checkpoint."""
    one = make_run(tmp_path / "logs/one", lines(1, 20) + final(20))
    follow_all(to, tmp_path)
    two = Path(shutil.copytree(one, tmp_path / "logs/two"))
    (two / "metrics.jsonl").write_text(lines(1, 30) + final(30))
    assert "two: 33 rows sent, has ended" in follow_all(to, tmp_path)
    for path in one.glob("wandb/offline-run-*"):  # which were copied with the folder
        shutil.rmtree(two / "wandb" / path.name)
    check_steps(to, tmp_path, "one", 20)
    check_steps(to, tmp_path, "two", 30)


class Training(threading.Thread):
    """Writes a run: dies at step 27, is resumed from step 20, and ends at step 40. `seconds`: when each step
    was written."""

    def __init__(self, folder: Path, pause: float):
        super().__init__(daemon=True)
        self.path = folder / "metrics.jsonl"
        self.pause = pause
        self.seconds = {}

    def write(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            with open(self.path, "a") as file:
                file.write(lines(number, number))
            self.seconds[number] = time.monotonic()
            time.sleep(self.pause)

    def run(self) -> None:
        self.write(2, 27)
        with open(self.path, "a") as file:
            file.write(step(28)[:30])
        time.sleep(self.pause)
        self.path.write_text(lines(1, 19) + step(20))
        time.sleep(3 * self.pause)
        with open(self.path, "a") as file:
            file.write(val(20))
        self.write(21, 40)
        with open(self.path, "a") as file:
            file.write(final(40))


def last_step(to: str, root: Path) -> int:
    """The last step that can be seen at the tracker just now."""
    try:
        return max(at for tag, at, _ in TOLD[to](root, "one")["rows"] if tag == "train_loss")
    except (ValueError, AssertionError, IndexError, sqlite3.OperationalError):
        return 0


@slow
@pytest.mark.parametrize("to", ["tensorboard", "trackio", "wandb"])
def test_a_living_run_is_seen_within_five_seconds(to, tmp_path):
    """Another run, which has ended, is followed beside it."""
    make_run(tmp_path / "logs/other", lines(1, 30) + final(30))
    training = Training(make_run(tmp_path / "logs/one", lines(1, 1)), 0.2)
    seen = {}
    with subprocess.Popen(command(to), cwd=tmp_path, env=environment(tmp_path)) as process:
        while not last_step(to, tmp_path):  # its packages load
            time.sleep(0.2)
        training.start()
        while process.poll() is None:
            seen.setdefault(last_step(to, tmp_path), time.monotonic())
            time.sleep(0.1)
    assert process.returncode == 0
    check_steps(to, tmp_path, "one", 40)
    check_steps(to, tmp_path, "other", 30)
    for number in range(2, 41):
        first = min(when for at, when in seen.items() if at >= number)
        written = training.seconds[number]
        assert first - written < 5 or number in range(21, 28), (number, first - written)


@slow
@pytest.mark.parametrize(
    ("to", "moments"), [("tensorboard", (0.7, 0.9, 1.1)), ("trackio", (1, 1.3, 1.6)), ("wandb", (3, 4))]
)
def test_a_follower_that_is_killed_goes_on(to, moments, tmp_path):
    """Killed a few times amid a run of 10,000 steps; a whole one takes less than ten seconds by the clock.

    Other tests run beside this one, so processor seconds are bounded, and two cores have twenty.
    """
    text = lines(1, 10_000) + final(10_000)
    make_run(tmp_path / "logs/one", text)
    for seconds in moments:
        with subprocess.Popen(command(to), cwd=tmp_path, env=environment(tmp_path)) as process:
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)
        time.sleep(1)  # wandb's second process writes what it has got
    follow_all(to, tmp_path)
    check_steps(to, tmp_path, "one", 10_000)
    shutil.rmtree(tmp_path / "logs/one")
    make_run(tmp_path / "logs/two", text)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    follow_all(to, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20


@slow
@pytest.mark.parametrize("to", ["tensorboard", "trackio", "wandb"])
def test_a_real_run(to, tmp_path, base_run):
    shutil.copytree(base_run.folder, tmp_path / "logs/real")
    follow_all(to, tmp_path)
    told = TOLD[to](tmp_path, "real")
    losses = {at: value for tag, at, value in told["rows"] if tag == "train_loss"}
    expected = {event["step"]: event["train_loss"] for event in base_run.events("step")}
    assert losses == pytest.approx(expected, rel=1e-7)
    assert told["config"]["matrix_lr"] == pytest.approx(0.02)
    bpb = float(base_run.final["val_bpb"])
    assert told["summary"]["val_bpb"] == pytest.approx(bpb, rel=1e-7)


# --- errors -----------------------------------------------------------------------------------------------

BROKEN = {
    "no JSON": (step(1) + "nonsense\n", r"metrics\.jsonl: line 2: .*expected the events of a train_gpt\.py"),
    "no text": (b"\xff\x00\n", r"line 1: .*expected the events"),
    "NaN": ('{"event": "step", "step": 1, "train_loss": NaN}\n', "NaN is no JSON"),
    "another program's": ('{"loss": 3.1, "iter": 7}\n', "no object with a name at 'event'"),
    "a list": ("[1]\n", "no object with a name"),
    "step in words": ('{"event": "step", "step": "7"}\n', "step is '7', no whole number"),
    "no step": ('{"event": "val", "val_loss": 3}\n', "step is None, no whole number"),
    "half a character": (
        '{"event": "step", "step": 1, "note\\ud800": 1}\n',
        "line 1: .*surrogates not allowed",
    ),
    "steps in words": (
        lines(1, 3) + '{"event": "final", "steps": "abc"}\n',
        "steps is 'abc', no whole number",
    ),
    "nested": ("[" * 100_000 + "\n", "nested too deep"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_log_is_one_line(here, tmp_path, capsys, case):
    """And the others are followed all the same."""
    text, expected = BROKEN[case]
    folder = make_run(tmp_path / "logs/a", "")
    (folder / "metrics.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    make_run(tmp_path / "logs/b", lines(1, 10) + final(10))
    assert here("logs") == 3
    said = capsys.readouterr()
    assert re.fullmatch(rf"error: .*{expected}.*\n", said.err), said.err
    assert "b: 11 rows sent, has ended\n" in said.out
    check_steps("tensorboard", tmp_path, "b", 10)


def test_other_broken_files_are_one_line(here, tmp_path, capsys):
    folder = make_run(tmp_path / "logs/a", lines(1, 10) + final(10))
    (folder / "config.json").write_text('{"settings": {"se')
    assert here(folder) == 3
    assert re.fullmatch(r"error: .*config\.json: no JSON: .*\n", capsys.readouterr().err)
    (folder / "config.json").write_text('{"settings": [1]}')
    assert here(folder) == 3
    assert "'settings' is no object, expected the config.json" in capsys.readouterr().err
    (folder / "config.json").unlink()
    (folder / "events.out.tfevents.1.x").write_bytes(b"nonsense" * 20)
    assert here(folder) in (0, 3)
    assert capsys.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize("above", [False, True])
def test_a_run_that_vanishes_is_left_and_the_others_followed(tmp_path, monkeypatch, capsys, above):
    gone, stays = (make_run(tmp_path / f"logs/{name}", lines(1, 10)) for name in ("gone", "stays"))

    def meanwhile(seconds: float) -> None:
        if gone.exists():
            shutil.rmtree(gone)
        else:
            (stays / "metrics.jsonl").write_text(lines(1, 20) + final(20))

    monkeypatch.setattr(follow, "time", types.SimpleNamespace(sleep=meanwhile, time=time.time))
    paths = [tmp_path / "logs"] if above else [gone, stays]
    assert follow.main([*map(str, paths), "--to", "tensorboard"]) == 3
    said = capsys.readouterr()
    assert re.fullmatch(r"error: .*No such file.*\n", said.err)
    assert "stays: 22 rows sent, has ended" in said.out
    check_steps("tensorboard", tmp_path, "stays", 20)


def test_a_folder_whose_name_is_no_text_is_refused(here, tmp_path, capsys):
    make_run(tmp_path / os.fsdecode(b"logs/\xff"), lines(1, 10) + final(10))
    make_run(tmp_path / "logs/☃", lines(1, 10) + final(10))
    assert here("logs") == 3
    said = capsys.readouterr()
    assert re.fullmatch(r"error: .*logs.*expected a name in UTF-8.*\n", said.err)
    assert said.out == "☃: 11 rows sent, has ended\n"


def test_an_empty_log_is_waited_for_and_then_left(here, tmp_path, capsys):
    make_run(tmp_path / "logs/a", "")
    assert here("logs", "--patience", 0) == 0
    assert re.fullmatch(r"a: 0 rows sent, has not ended and was silent .*\n", capsys.readouterr().out)
    assert not list(tmp_path.rglob("events.out*"))


def test_wrong_uses_are_one_line(here, tmp_path, capsys, monkeypatch):
    folder = make_run(tmp_path / "logs/a", lines(1, 10))
    assert here(tmp_path / "logs/b") == 3
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert here(tmp_path / "empty") == 3
    assert "holds no metrics.jsonl, expected a run's folder" in capsys.readouterr().err
    args = follow.parse_args([str(folder), "--to", "tensorboard"])
    first = follow.Followed(folder, args)
    assert here(folder) == 2
    assert "is followed to tensorboard already, expected one at a time" in capsys.readouterr().err
    first.stop("")
    for missing in ("wandb", "trackio", "tensorboard"):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert follow.main([str(folder), "--to", missing]) == 2
        assert capsys.readouterr().err.endswith(f"-m pip install {missing}\n")
    with pytest.raises(SystemExit, match="2"):
        follow.main([str(folder), "--to", "mlflow"])


@slow
def test_trackio_elsewhere_is_refused(tmp_path):
    make_run(tmp_path / "logs/a", lines(1, 10))
    env = environment(tmp_path) | {"TRACKIO_SPACE_ID": "me/space"}
    done = subprocess.run(command("trackio"), cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and re.fullmatch(r"error: .*unset TRACKIO_SPACE_ID.*\n", done.stderr)
    env = environment(tmp_path)
    words = command("trackio", "--project", "registry-x")
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and re.fullmatch(r"error: --project registry-x: .*\n", done.stderr)
    (tmp_path / "file").touch()
    env = environment(tmp_path) | {"TRACKIO_DIR": str(tmp_path / "file")}
    done = subprocess.run(command("trackio"), cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 3 and re.fullmatch(r"error: .*file.*\n", done.stderr), done.stderr


@slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_follower_that_is_stopped_says_so(tmp_path):
    make_run(tmp_path / "logs/one", lines(1, 10))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = environment(tmp_path)
    with subprocess.Popen(command("wandb"), cwd=tmp_path, env=env, **pipes) as process:
        expected = "one: 11 rows sent to wandb, has not ended and is waited for\n"
        assert process.stdout.readline() == expected
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err
    assert out == "one: 11 rows sent, has not ended; the same command goes on with it\n"
    check_steps("wandb", tmp_path, "one", 10)


# --- names ------------------------------------------------------------------------------------------------


def test_names_of_runs():
    assert (
        follow.name_of(Path("/a/logs/campaigns/ideas/0.1/preset/1337")) == "campaigns/ideas/0.1/preset/1337"
    )
    assert follow.name_of(Path("/a/logs")) == "logs" and follow.name_of(Path("/a/b/c")) == "c"
    assert free_name("a", []) == "a" and free_name("a", ["a", "a-2"]) == "a-3"
