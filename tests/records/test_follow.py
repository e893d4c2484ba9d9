"""`records follow` with TensorBoard itself: what was sent is read from the event files by its own reader."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from records.__main__ import main as records
from records.follow import command as follow
from tests.kit.data_kit import start

FOLLOW = ("records", "follow", "logs", "--to", "tensorboard")
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


# --- what TensorBoard has ---------------------------------------------------------------------------------


def read(folder: Path):
    """As TensorBoard reads it, whose reader leaves out what a later file replaces."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"scalars": 0, "tensors": 0}).Reload()


def rows_of(folder: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of all scalars."""
    found = read(folder)
    return [(tag, each.step, each.value) for tag in found.Tags()["scalars"] for each in found.Scalars(tag)]


def hparams_of(folder: Path) -> dict:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    blob = read(folder).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(blob).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()}


def check_steps(folder: Path, steps: int) -> dict[tuple[str, int], float]:
    """Every step and every validation is there once; the values."""
    rows = rows_of(folder)
    assert [at for tag, at, _ in rows if tag == "train_loss"] == [*range(1, steps + 1)]
    assert [at for tag, at, _ in rows if tag == "val_bpb"] == [*range(10, steps + 1, 10)]
    return {(tag, at): value for tag, at, value in rows}


# --- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Calls the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.01)
    return lambda *args: records(["follow", *map(str, args)])


@pytest.mark.slow
def test_a_run_is_in_tensorboard_however_often_it_is_sent(tmp_path):
    foreign = {"note": "words", "hash": "0732e123", "parts": [1], "huge": 10**400}
    odd = step(21, train_loss="nan", grad_norm="inf", large=10**20, **foreign)
    folder = make_run(tmp_path / "logs/läuft-日本", lines(1, 20) + odd + final(21))
    for _ in range(2):
        with start(*FOLLOW, cwd=tmp_path) as follower:
            out, err = follower.communicate()
        assert (follower.returncode, err) == (0, "")
        assert out == f"{folder}: 23 rows sent, has ended\n"
        values = check_steps(folder, 21)
        assert values["train_loss", 7] == pytest.approx(6 / 7, rel=1e-7)
        assert values["train_flops", 20] == pytest.approx(2e18, rel=1e-7)
        assert values["partial", 20] == 1 and values["val_loss", 20] == 2.5
        assert values["final/val_bpb", 21] == 1.125
        assert str([values[tag, 21] for tag in ("train_loss", "grad_norm")]) == "[nan, inf]"
        assert values["large", 21] == pytest.approx(1e20) and not {tag for tag, _ in values} & {*foreign}
        assert hparams_of(folder) == {"seed": 7, "matrix_lr": 0.06, "preset": "smoke", "torch": "2"}


# --- living runs, and kills -------------------------------------------------------------------------------


@pytest.mark.parametrize("seen_cut", [True, False])
def test_a_resume_doubles_nothing(tmp_path, capsys, seen_cut):
    """The run is killed at step 27 and goes on from step 20; the follower sees that at once, or late."""
    folder = make_run(tmp_path / "logs/one", lines(1, 27) + '{"event": "st')
    followed = follow.follow(folder, patience=600)
    next(followed)
    assert "one: 29 rows sent, waiting for more" in capsys.readouterr().out
    text = lines(1, 19) + step(20)
    if seen_cut:
        (folder / "metrics.jsonl").write_text(text)
        next(followed)
    text += val(20) + step(21, train_seconds=99)
    (folder / "metrics.jsonl").write_text(text)
    next(followed)
    (folder / "metrics.jsonl").write_text(text + lines(22, 40) + final(40))
    assert next(followed, "ended") == "ended"
    check_steps(folder, 40)


def test_what_is_silent_is_left_and_sent_anew(here, tmp_path, capsys):
    folder = make_run(tmp_path / "logs/one", lines(1, 20) + step(21)[:-9])
    make_run(tmp_path / "logs/two", "")
    assert here("logs", "--patience", 0) == 0
    silent = r"{} rows sent, was silent for \d+ s, has not ended; the same command sends it anew"
    said = capsys.readouterr().out
    for name, rows in (("one", 22), ("two", 0)):
        assert re.search(f"{name}: {silent.format(rows)}", said)
    (folder / "metrics.jsonl").write_text(lines(1, 30) + final(30))
    assert here(folder) == 0
    check_steps(folder, 30)


def last_step(folder: Path) -> int:
    """The last step that can be seen just now."""
    if not folder.exists():
        return 0
    return max((at for tag, at, _ in rows_of(folder) if tag == "train_loss"), default=0)


@pytest.mark.slow
def test_a_living_run_is_seen_within_five_seconds(tmp_path):
    """Another run, which has ended, is followed beside it."""
    other = make_run(tmp_path / "logs/other", lines(1, 30) + final(30))
    folder = make_run(tmp_path / "logs/one", lines(1, 1))
    metrics = folder / "metrics.jsonl"
    with start(*FOLLOW, cwd=tmp_path) as follower:
        while not last_step(folder):  # its packages load
            assert follower.poll() is None
            time.sleep(0.1)
        for last in (2, 10, 40):
            metrics.write_text(lines(1, last) + step(last + 1)[:30])
            written = time.monotonic()
            while last_step(folder) < last:
                assert time.monotonic() - written < 5
                time.sleep(0.1)
        metrics.write_text(lines(1, 40) + final(40))
        follower.communicate()
    assert follower.returncode == 0
    check_steps(folder, 40)
    check_steps(other, 30)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_follower_that_is_stopped_or_killed_leaves_nothing_twice(here, tmp_path, number):
    folder = make_run(tmp_path / "logs/one", lines(1, 5000))
    with start(*FOLLOW, cwd=tmp_path) as follower:
        assert follower.stdout.readline() == f"{folder}: 5500 rows sent, waiting for more\n"
        follower.send_signal(number)
        out, err = follower.communicate()
    assert "Traceback" not in err
    if number == signal.SIGTERM:
        assert follower.returncode == 130
        assert out == f"{folder}: 5500 rows sent, has not ended; the same command sends it anew\n"
    (folder / "metrics.jsonl").write_text(lines(1, 5010) + final(5010))
    assert here("logs") == 0
    check_steps(folder, 5010)


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
]


@pytest.mark.parametrize(("name", "text", "expected"), BROKEN)
def test_a_broken_file_is_one_line_and_the_others_are_followed(here, tmp_path, capsys, name, text, expected):
    folder = make_run(tmp_path / "logs/a", lines(1, 10) + final(10))
    (folder / name).write_text(text, errors="surrogateescape")
    good = make_run(tmp_path / "logs/b", lines(1, 10) + final(10))
    assert here("logs") == 3
    said = capsys.readouterr()
    assert re.fullmatch(rf"error: .*{name}: .*{expected}.*\n", said.err), said.err
    assert "b: 11 rows sent, has ended\n" in said.out
    check_steps(good, 10)


def test_a_run_that_vanishes_is_left_and_the_others_followed(here, tmp_path, monkeypatch, capsys):
    gone, stays = (make_run(tmp_path / f"logs/{name}", lines(1, 10)) for name in ("gone", "stays"))

    def meanwhile(seconds: float) -> None:
        if gone.exists():
            shutil.rmtree(gone)
        else:
            (stays / "metrics.jsonl").write_text(lines(1, 20) + final(20))

    monkeypatch.setattr(follow.time, "sleep", meanwhile)
    assert here("logs") == 3
    said = capsys.readouterr()
    assert re.fullmatch(r"error: .*No such file.*\n", said.err)
    assert "stays: 22 rows sent, has ended" in said.out
    check_steps(stays, 20)


def test_wrong_uses_are_one_line(here, tmp_path, capsys):
    folder = make_run(tmp_path / "logs/first", lines(1, 10))
    assert here("logs/first/config.json") == 3
    assert "is no folder, expected a run's folder in logs/, or one above" in capsys.readouterr().err
    followed = follow.follow(folder, patience=600)
    next(followed)
    assert here(folder) == 2
    assert "is followed already, expected one command at a time" in capsys.readouterr().err
    followed.close()
    assert here(folder, "--to", "mlflow") == 2
