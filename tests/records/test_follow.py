"""records/follow with the real trackers, offline: what was sent is read from the files that they wrote."""

import collections
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from records.__main__ import main as records
from records.follow import command as follow
from records.follow import events
from tests.kit import helpers

slow = pytest.mark.slow
ALL = ["tensorboard", "wandb"]
CONFIG = {"settings": {"seed": 7, "matrix_lr": 0.06, "preset": "smoke"}, "environment": {"torch": "2"}}


def step(number: int, **more) -> str:
    """A line as train_gpt.py writes it."""
    event = {"event": "step", "train_loss": 6 / number, "grad_norm": 0.5, "step": number}
    return json.dumps(event | {"train_seconds": number / 3, "train_flops": number * 10**17} | more) + "\n"


def val(number: int) -> str:
    event = {"event": "val", "step": number, "val_loss": 2.5, "val_bpb": 1.25, "partial": True}
    return json.dumps(event) + "\n"


def final(steps: int) -> str:
    event = {"event": "final", "val_bpb": "1.12500000 partial", "steps": steps, "state_sha256": "0732e123"}
    return json.dumps(event) + "\n"


def lines(first: int, last: int) -> str:
    """Steps, with a validation after every tenth."""
    return "".join(step(n) + val(n) * (n % 10 == 0) for n in range(first, last + 1))


def make_run(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "metrics.jsonl").write_text(text)
    return folder


# --- what a tracker has -----------------------------------------------------------------------------------


def tensorboard_run(root: Path, name: str) -> dict:
    """As tensorboard itself reads it, whose reader leaves out what a later file replaces."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found = EventAccumulator(str(root / "logs" / name), {"scalars": 0, "tensors": 0}).Reload()
    rows = [(tag, each.step, each.value) for tag in found.Tags()["scalars"] for each in found.Scalars(tag)]
    blob = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(blob).session_start_info.hparams
    config = {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()}
    return {"rows": rows, "config": config, "summary": {}}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: https://github.com/google/leveldb/blob/main/doc/log_format.md"""
    at = 7
    record = b""
    while at + 7 <= len(data):
        left = (32 << 10) - at % (32 << 10)
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(data):
            yield record
            record = b""


def wandb_run(root: Path, name: str) -> dict:
    """From all files of the run that `wandb sync` would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {"rows": [], "config": {}, "summary": {}}
    ids = set()
    for path in sorted((root / "logs" / name / "wandb").glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, wandb_records(path.read_bytes())):
            if record.HasField("run"):
                found["config"] |= {
                    each.key: json.loads(each.value_json) for each in record.run.config.update
                }
                ids.add((record.run.run_id, record.run.display_name))
            pairs = {"".join(each.nested_key) or each.key: each for each in record.summary.update}
            found["summary"] |= {key: json.loads(each.value_json) for key, each in pairs.items()}
            items = {"".join(each.nested_key) or each.key: each for each in record.history.item}
            row = {key: json.loads(each.value_json) for key, each in items.items() if key[0] != "_"}
            found["rows"] += [(key, row["step"], value) for key, value in row.items() if key != "step"]
    assert [own for _, own in ids] == [name]
    return found


READERS = {"tensorboard": tensorboard_run, "wandb": wandb_run}


def check_steps(to: str, root: Path, name: str, steps: int, again: int = 0) -> dict:
    """Every step and validation is there. At most so many rows are there again, with the same values."""
    found = READERS[to](root, name)
    ends = {tag.removeprefix("final/"): value for tag, _, value in found["rows"] if tag.startswith("final/")}
    found["summary"] |= ends
    rows = [row for row in found["rows"] if not row[0].startswith("final/")]
    assert sorted({at for tag, at, _ in rows if tag == "train_loss"}) == [*range(1, steps + 1)]
    assert sorted({at for tag, at, _ in rows if tag == "val_bpb"}) == [*range(10, steps + 1, 10)]
    values = {(tag, at): value for tag, at, value in rows}
    assert all(values[tag, at] == value for tag, at, value in rows if tag in ("train_loss", "val_bpb"))
    counts = collections.Counter(at for tag, at, _ in rows if tag in ("train_loss", "val_loss"))
    assert counts.total() - steps - steps // 10 <= again
    return found | {"values": values}


# --- the command ------------------------------------------------------------------------------------------


def start(to: str, root: Path, *more) -> subprocess.Popen:
    """A follower of root/logs, offline, whose tracker writes all below `root`."""
    caches = dict.fromkeys(("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "XDG_CACHE_HOME"), root / "cache")
    env = helpers.clean_environment(WANDB_MODE="offline", PYTHONPATH=helpers.ROOT, **caches)
    words = [sys.executable, "-m", "records", "follow", "logs", "--to", to, *map(str, more)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=root, env=env, **pipes)


def follow_all(to: str, root: Path, *more) -> str:
    """Follow root/logs until all have ended; what the command said."""
    with start(to, root, *more) as follower:
        out, err = follower.communicate()
    assert follower.returncode == 0 and err == "", err
    return out


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Calls the command in this process, with TensorBoard, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.01)
    return lambda *args: records(["follow", *map(str, args), "--to", "tensorboard"])


@pytest.mark.parametrize("to", [pytest.param(to, marks=() if to == "tensorboard" else slow) for to in ALL])
def test_a_run_is_at_the_tracker(to, tmp_path):
    make_run(tmp_path / "logs/läuft-日本", lines(1, 20) + final(20))
    assert follow_all(to, tmp_path) == "läuft-日本: 22 rows sent, has ended\n"
    assert follow_all(to, tmp_path) == f"läuft-日本: 0 rows sent, has ended and is at {to} already\n"
    found = check_steps(to, tmp_path, "läuft-日本", 20)
    values = found["values"]
    assert values["train_loss", 7] == pytest.approx(6 / 7, rel=1e-7)
    assert values["train_flops", 20] == pytest.approx(2e18, rel=1e-7)
    assert values["partial", 20] == 1 and values["val_loss", 20] == 2.5
    assert found["config"].items() >= {"seed": 7, "matrix_lr": 0.06, "preset": "smoke", "torch": "2"}.items()
    assert found["summary"].items() >= {"val_bpb": 1.125, "steps": 20, "partial": 1}.items()
    assert found["summary"].get("state_sha256", "0732e123") == "0732e123"


def test_numbers_that_are_not_finite_and_foreign_values():
    foreign = {"note": "words", "parts": [1], "large": 10**20, "huge": 10**400}
    event = {"event": "step", "step": 1, "train_loss": "nan", "grad_norm": "inf", **foreign}
    found = events.row_of(event).numbers
    assert str(found) == "{'train_loss': nan, 'grad_norm': inf, 'large': 1e+20}"


# --- living runs, and kills -------------------------------------------------------------------------------


@pytest.mark.parametrize("seen_cut", [True, False])
def test_a_resume_doubles_nothing(tmp_path, capsys, seen_cut):
    """The run is killed at step 27 and goes on from step 20; the follower sees that at once, or late."""
    folder = make_run(tmp_path / "logs/one", lines(1, 27) + '{"event": "st')
    followed = follow.follow(folder, "tensorboard")
    next(followed)
    assert "one: 29 rows sent to tensorboard" in capsys.readouterr().out
    text = lines(1, 19) + step(20)
    if seen_cut:
        (folder / "metrics.jsonl").write_text(text)
        next(followed)
    text += val(20) + step(21, train_seconds=99)
    (folder / "metrics.jsonl").write_text(text)
    next(followed)
    (folder / "metrics.jsonl").write_text(text + lines(22, 40) + final(40))
    assert next(followed, "ended") == "ended"
    check_steps("tensorboard", tmp_path, "one", 40)


def test_what_is_silent_is_left_open_and_gone_on_with(here, tmp_path, capsys):
    folder = make_run(tmp_path / "logs/one", lines(1, 20) + step(21)[:-9])
    make_run(tmp_path / "logs/two", "")
    assert here("logs", "--patience", 0) == 0
    silent = r"{} rows sent, has not ended and was silent for \d+ s; the same command goes on with it"
    said = capsys.readouterr().out
    for name, rows in (("one", 22), ("two", 0)):
        assert re.search(f"{name}: {silent.format(rows)}", said)
    assert not list(tmp_path.rglob("two/events.out*"))
    (folder / "metrics.jsonl").write_text(lines(1, 30) + final(30))
    assert here(folder) == 0
    check_steps("tensorboard", tmp_path, "one", 30)


@slow
@pytest.mark.parametrize("to", ALL)
def test_a_cursor_that_lags_sends_to_the_same_run_again(to, tmp_path):
    """As after a kill between the tracker's yes and the cursor. TensorBoard shows the newer rows alone."""
    folder = make_run(tmp_path / "logs/one", lines(1, 20))
    follow_all(to, tmp_path, "--patience", 0)
    cursor = (folder / f"follow-{to}.json").read_bytes()
    (folder / "metrics.jsonl").write_text(lines(1, 30) + final(30))
    follow_all(to, tmp_path)
    (folder / f"follow-{to}.json").write_bytes(cursor)
    assert "one: 11 rows sent, has ended" in follow_all(to, tmp_path)
    check_steps(to, tmp_path, "one", 30, again=0 if to == "tensorboard" else 11)


@slow
@pytest.mark.parametrize("to", ALL)
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


def last_step(to: str, root: Path) -> int:
    """The last step that can be seen at the tracker just now."""
    try:
        return max(at for tag, at, _ in READERS[to](root, "one")["rows"] if tag == "train_loss")
    except (ValueError, KeyError, AssertionError):
        return 0


@slow
@pytest.mark.parametrize("to", ALL)
def test_a_living_run_is_seen_within_five_seconds(to, tmp_path):
    """It is resumed once, from step 17 on. Another run, which has ended, is followed beside it."""
    make_run(tmp_path / "logs/other", lines(1, 30) + final(30))
    metrics = make_run(tmp_path / "logs/one", lines(1, 1)) / "metrics.jsonl"
    with start(to, tmp_path) as follower:
        while not last_step(to, tmp_path):  # its packages load
            assert follower.poll() is None
            time.sleep(0.1)
        for last in (2, 10, 20, 21, 22, 40):
            metrics.write_text(lines(1, last) + step(last + 1)[:30])
            written = time.monotonic()
            while last_step(to, tmp_path) < last:
                assert time.monotonic() - written < 5
                time.sleep(0.1)
            if last == 20:
                metrics.write_text(lines(1, 17))
                time.sleep(1.5)
        metrics.write_text(lines(1, 40) + final(40))
        follower.communicate()
    assert follower.returncode == 0
    check_steps(to, tmp_path, "one", 40)
    check_steps(to, tmp_path, "other", 30)


@slow
@pytest.mark.parametrize("to", ALL)
def test_a_follower_that_is_killed_goes_on(to, tmp_path):
    """Killed as it sends 5,000 steps: the tracker has what the cursor says, and later it has all."""
    folder = make_run(tmp_path / "logs/one", lines(1, 10))
    cursor = folder / f"follow-{to}.json"
    with start(to, tmp_path) as follower:
        while not cursor.exists() or json.loads(cursor.read_text())["place"] < 21:
            assert follower.poll() is None
            time.sleep(0.01)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(lines(11, 5000))
        time.sleep(1.2)
        follower.send_signal(signal.SIGKILL)
    held = json.loads(cursor.read_text())["place"] // 2
    assert held <= last_step(to, tmp_path)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(final(5000))
    follow_all(to, tmp_path)
    check_steps(to, tmp_path, "one", 5000, again=5500)


@slow
def test_a_real_run(tmp_path, base_run):
    shutil.copytree(base_run.folder, tmp_path / "logs/real")
    follow_all("tensorboard", tmp_path)
    found = check_steps("tensorboard", tmp_path, "real", 20)
    losses = {at: value for (tag, at), value in found["values"].items() if tag == "train_loss"}
    expected = {event["step"]: event["train_loss"] for event in base_run.events("step")}
    assert losses == pytest.approx(expected, rel=1e-7)
    assert found["config"]["matrix_lr"] == pytest.approx(0.04)
    assert found["summary"]["val_bpb"] == pytest.approx(float(base_run.final["val_bpb"]), rel=1e-7)


@slow
def test_a_follower_that_is_stopped_says_so(tmp_path):
    make_run(tmp_path / "logs/one", lines(1, 10))
    with start("wandb", tmp_path) as follower:
        expected = "one: 11 rows sent to wandb, has not ended and is waited for\n"
        assert follower.stdout.readline() == expected
        follower.send_signal(signal.SIGTERM)
        out, err = follower.communicate()
    assert follower.returncode == 130 and "Traceback" not in err
    assert out == "one: 11 rows sent, has not ended; the same command goes on with it\n"
    check_steps("wandb", tmp_path, "one", 10)


# --- errors -----------------------------------------------------------------------------------------------

NOT_OURS = r"expected the events of a train_gpt\.py"
BROKEN = [
    ("metrics.jsonl", step(1) + "nonsense\n", f"line 2: .*{NOT_OURS}"),
    ("metrics.jsonl", "\udcff\0\n", f"line 1: .*{NOT_OURS}"),
    ("metrics.jsonl", '{"loss": 3.1, "iter": 7}\n', "no object with a name at 'event'"),
    ("metrics.jsonl", '{"event": "step", "step": "7"}\n', "step is '7', no whole number"),
    ("metrics.jsonl", lines(1, 3) + '{"event": "final", "steps": "abc"}\n', "steps is 'abc', no whole"),
    ("config.json", '{"settings": {"se', "no JSON: "),
    ("config.json", "[]", "holds a list"),
    ("follow-tensorboard.json", '{"place": 7}', "is no cursor; remove it"),
    ("follow-tensorboard.json", '{"settings": {"se', "no JSON: "),
]


@pytest.mark.parametrize(("name", "text", "expected"), BROKEN)
def test_a_broken_file_is_one_line_and_the_others_are_followed(here, tmp_path, capsys, name, text, expected):
    folder = make_run(tmp_path / "logs/a", lines(1, 10) + final(10))
    (folder / name).write_text(text, errors="surrogateescape")
    make_run(tmp_path / "logs/b", lines(1, 10) + final(10))
    assert here("logs") == 3
    said = capsys.readouterr()
    assert re.fullmatch(rf"error: .*{name}: .*{expected}.*\n", said.err), said.err
    assert "b: 11 rows sent, has ended\n" in said.out
    check_steps("tensorboard", tmp_path, "b", 10)


@pytest.mark.parametrize("above", [False, True])
def test_a_run_that_vanishes_is_left_and_the_others_followed(here, tmp_path, monkeypatch, capsys, above):
    gone, stays = (make_run(tmp_path / f"logs/{name}", lines(1, 10)) for name in ("gone", "stays"))

    def meanwhile(seconds: float) -> None:
        if gone.exists():
            shutil.rmtree(gone)
        else:
            (stays / "metrics.jsonl").write_text(lines(1, 20) + final(20))

    monkeypatch.setattr(follow.time, "sleep", meanwhile)
    assert here(*(["logs"] if above else [gone, stays])) == 3
    said = capsys.readouterr()
    assert re.fullmatch(r"error: .*No such file.*\n", said.err)
    assert "stays: 22 rows sent, has ended" in said.out
    check_steps("tensorboard", tmp_path, "stays", 20)


def test_a_folder_whose_name_is_no_text_is_refused(here, tmp_path, capsys):
    make_run(tmp_path / os.fsdecode(b"logs/\xff"), lines(1, 10) + final(10))
    make_run(tmp_path / "logs/☃/7", lines(1, 10) + final(10))
    assert here("logs") == 3
    said = capsys.readouterr()
    assert re.fullmatch(r"error: .*logs.*expected a name in UTF-8.*\n", said.err)
    assert said.out == "☃/7: 11 rows sent, has ended\n"


def test_wrong_uses_are_one_line(here, tmp_path, capsys, monkeypatch):
    folder = make_run(tmp_path / "logs/a", lines(1, 10))
    for path in (tmp_path / "logs/b", tmp_path / "logs/a/config.json"):
        assert here(path) == 3
        assert "holds no metrics.jsonl, expected a run's folder" in capsys.readouterr().err
    first = follow.follow(folder, "tensorboard")
    next(first)
    assert here(folder) == 2
    assert "is followed to tensorboard already, expected one at a time" in capsys.readouterr().err
    first.close()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert here(folder) == 2
    assert capsys.readouterr().err.endswith("-m pip install tensorboard\n")
    assert records(["follow", str(folder), "--to", "mlflow"]) == 2


@slow
def test_a_tracker_that_fails_is_one_line(tmp_path):
    make_run(tmp_path / "logs/a", lines(1, 10))
    with start("wandb", tmp_path, "--project", "a/b") as follower:
        _, err = follower.communicate()
    assert follower.returncode == 3 and re.fullmatch("error: wandb says UsageError: .*\n", err), err
