"""`records compare`: noise, change, and broken logs. Most runs are made up."""

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies

from data.command import DataError
from records.__main__ import main as records
from records.archive.intervals import means_interval, pairs_interval
from records.archive.metrics import find_runs
from records.compare.comparison import load
from tests.kit.helpers import ROOT
from tests.kit.metrics_kit import edit_events, edit_lines, write_run

PAR = ROOT / "records/track_floppy/2026-11-22_Par"
PRESET = ROOT / "records/track_floppy/2026-11-22_Preset"


def five(folder, name: str, **values) -> list:
    """Runs of one commit. Their speeds lie 1 % apart, by their seeds and the length of their names."""
    return [write_run(folder / f"{name}{seed}", seed, **values) for seed in range(1, 6)]


@pytest.fixture
def sides(tmp_path):
    return [five(tmp_path, name) for name in ("a", "bb")]


def run(capsys, base, new, *words) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a comparison of two lists of runs."""
    sides = ["--base", *base, "--new", *new]
    code = records(["compare", *map(str, [*sides, *words])])
    return code, *capsys.readouterr()


def verdicts(base, new) -> dict[str, str]:
    return {found.measure.key: found.verdict for found in load(base, new).rows}


def keys(base, new, verdict) -> set[str]:
    return {key for key, found in verdicts(base, new).items() if found == verdict}


SPEED = {"step_ms", "tokens_per_second"}
SLOW = {"step_seconds": 0.25 / 0.92}  # 8 % less speed
LOSS = {"loss": 2.02}  # 0.02 nats more
STALLS = [1, 2, 30, 59, 60]
STALL = {"stalls": dict.fromkeys(STALLS, 40.0)}


# --- noise and change -------------------------------------------------------------------------------------


def test_two_sides_of_one_commit_are_grey(sides, capsys):
    """And `--json` has what the table has."""
    code, out, _ = run(capsys, *sides)
    assert code == 0 and "settings: the same" in out
    assert out.splitlines()[-1].startswith("val_bpb: same difference:")
    code, out, _ = run(capsys, *sides, "--json")
    value = json.loads(out)
    assert code == 0 and (value["on"], value["verdict"]) == ("val_bpb", "same")
    rows = {row["key"]: row for row in value["rows"]}
    assert {row["verdict"] for row in rows.values()} == {"same", "-"}
    assert rows["step_ms"]["base"] == pytest.approx(250, rel=0.02)
    assert len(rows["val_bpb"]["new_runs"]) == 5


@pytest.mark.parametrize(
    "values, red, stalls",
    [(SLOW, SPEED, []), (LOSS, {"val_bpb"}, []), (STALL, set(), STALLS * 5)],
    ids=["slow", "loss", "stall"],
)
@pytest.mark.parametrize("name", ["c", "dd"], ids=["copies", "others"])
def test_a_change_reddens_its_rows_and_no_others(sides, tmp_path, values, red, stalls, name):
    new = five(tmp_path, name, **values)
    assert [keys(sides[0], new, verdict) for verdict in ("worse", "better")] == [red, set()]
    assert [one["step"] for one in load(sides[0], new).stalls] == stalls


def test_the_metric_decides_the_exit_code(sides, tmp_path, capsys):
    slow, lossy = five(tmp_path, "c", **SLOW), five(tmp_path, "d", **LOSS)
    assert keys(slow, sides[0], "better") == SPEED
    assert run(capsys, sides[0], slow)[0] == 0, "speed is not bits per byte"
    code, out, _ = run(capsys, sides[0], slow, "--on", "tokens_per_second")
    assert code == 1 and out.splitlines()[-1].startswith("tokens_per_second: worse difference:-0.08 low:")
    fat = five(tmp_path, "ee", code_bytes=40_000)
    assert keys(sides[0], fat, "worse") == {"code_bytes"}
    assert run(capsys, sides[0], fat)[0] == 0, "nor are bytes of code"
    code, out, _ = run(capsys, sides[0], lossy)
    assert code == 1 and out.splitlines()[-1].startswith("val_bpb: worse difference:+0.01316")
    assert run(capsys, lossy, sides[0])[0] == 0
    code, out, _ = run(capsys, sides[0][:1], lossy[:1])
    assert code == 4 and "no interval: it takes 3 seeds on each side" in out and "sweep --try" in out


def speed(verdict: str) -> dict[str, str]:
    return dict.fromkeys(SPEED, verdict)


LENGTH = dict.fromkeys(("steps", "tokens", "flops"), "differs")
UNJUDGED = dict.fromkeys(("train_loss", "val_loss", "train_seconds"), "-")
ONE_RUN = {  # what a run has other than seed 1's, and the verdicts that are not "same"
    "repeat": ({}, {}),
    "4 % quicker": ({"seed": 2, "step_seconds": 0.24}, {"val_bpb": "not known"}),
    "20 % slower": ({"seed": 2, "step_seconds": 0.30}, speed("worse") | {"val_bpb": "not known"}),
    "0.1 nats more": ({"loss": 2.1}, {"val_bpb": "not known"}),
    "few steps": ({"steps": 5}, LENGTH | speed("-") | {"val_bpb": "not known"}),
    "diverged": ({"val_loss": "nan", "val_bpb": "nan"}, {"val_loss": "worse", "val_bpb": "worse"}),
    "other text": ({"val_bytes": 7}, {"val_bpb": "-"}),
    "other tokens a step": (
        {"settings": {"train_batch_tokens": 8192}},
        {"step_ms": "-", "tokens": "differs", "tokens_per_second": "better"},
    ),
    "not above zero": ({"peak_memory_mib": 0}, {"peak_memory_mib": "-"}),
}


@pytest.mark.parametrize("case", ONE_RUN)
def test_one_run_a_side_says_something_of_speed_and_nothing_of_losses(tmp_path, case):
    values, expected = ONE_RUN[case]
    found = verdicts([write_run(tmp_path / "a")], [write_run(tmp_path / "b", **values)])
    assert {key: verdict for key, verdict in found.items() if verdict != "same"} == UNJUDGED | expected


def test_a_partial_score_is_called_so(tmp_path, capsys):
    part = [write_run(tmp_path / "a", val_bpb="1.5 partial")]
    assert "\nbits per byte, partial " in run(capsys, part, part)[1]


def losses_of(tmp_path, side: str, losses: list[float], first: int = 1) -> list:
    return [write_run(tmp_path / f"{side}{seed}", seed, loss=loss) for seed, loss in enumerate(losses, first)]


def test_more_pairs_never_take_away_what_is_known(tmp_path):
    old, new = [2.0, 2.2, 1.9, 2.1, 2.0, 2.15], [1.95, 2.14, 1.86, 2.05, 1.94, 2.10]
    base, pairs = losses_of(tmp_path, "a", old), losses_of(tmp_path, "b", new)
    found = [verdicts(base[:count], pairs[:count])["val_bpb"] for count in range(1, 7)]
    assert found == ["not known"] * 2 + ["better"] * 4
    others = losses_of(tmp_path, "c", new, first=101)
    assert verdicts(base, others)["val_bpb"] == "not known", "the spread of seeds hides a small gain"


PAIR = strategies.tuples(strategies.floats(0.5, 4), strategies.floats(0.5, 4))


@pytest.mark.slow
@given(strategies.lists(PAIR, min_size=1, max_size=9))
def test_no_interval_grows_with_more_runs(values):
    """With and without pairs; so the band of a difference is monotone in evidence."""
    for count in range(1, len(values)):
        fewer, more = ([*zip(*values[:seen])] for seen in (count, count + 1))
        for interval in (means_interval, lambda old, new: pairs_interval(np.subtract(new, old).tolist())):
            low, high = interval(*map(list, fewer))
            lower, higher = interval(*map(list, more))
            assert lower >= low and higher <= high


@pytest.mark.slow
def test_intervals_hold_for_whoever_looks_after_each_run():
    """Three hundred equal sides of eight: at most one in twenty is ever thought to differ."""
    generator = np.random.default_rng(1)
    wrong = 0
    for old, new in generator.standard_normal((300, 2, 8)):
        for low, high in (pairs_interval((new - old).tolist()), means_interval([*old], [*new])):
            wrong += not low <= 0 <= high
    assert 0 < wrong <= 2 * 15


def test_repeats_of_one_seed_are_no_evidence_about_another(tmp_path):
    first, second = ([write_run(tmp_path / f"{name}{seed}", seed) for name in "ab"] for seed in (1, 2))
    assert not {"worse", "better"} & {*verdicts(first, second).values()}
    worse = [write_run(tmp_path / name, 1, **LOSS) for name in ("c1", "d1", "e1")]
    assert keys(first, worse, "worse") == set(), "what one seed has again and again is one run"


def test_a_setting_is_the_same_in_a_log_and_in_a_config(tmp_path):
    folder = write_run(tmp_path / "a", settings={"preset": "floppy", "compile": False, "grad_clip_norm": 1.0})
    (run,) = find_runs(folder)
    about = json.loads((folder / "config.json").read_text())
    about["origins"] = dict.fromkeys(about["settings"], "preset") | {"compile": "environment"}
    assert run.settings["COMPILE"] == "0" and run.settings["GRAD_CLIP_NORM"] == "1"
    assert replace(run, config=about).given == {"PRESET": "floppy", "COMPILE": "0"}


@pytest.mark.parametrize("large", [1e160, 1e308, 10**200])
def test_repeats_of_huge_numbers_are_compared(sides, capsys, large):
    huge = dict.fromkeys(("val_loss", "code_bytes"), large)
    edit_events(sides[0][0], lambda event: event | huge)
    assert verdicts(*sides)["code_bytes"] == "not known", "a side differs by more than the sides do"
    assert run(capsys, *sides)[2] == ""


def test_a_machine_that_wanders_is_told_from_a_slower_script(tmp_path):
    base = write_run(tmp_path / "a", 1, steps=200)
    slower = dict.fromkeys(range(101, 201), 0.075)  # in its second half
    wanders = write_run(tmp_path / "b", 2, steps=200, stalls=slower)
    assert keys([base], [wanders], "worse") == set()


def test_a_run_is_no_repeat_of_itself(tmp_path, capsys):
    one, other = (write_run(tmp_path / name, 1) for name in "ab")
    assert run(capsys, [one], [one])[0] == 0
    alike = write_run(tmp_path / "deep/er/a", 1)
    assert f"base: 1 run: {one}\nnew: 2 runs: {alike}, b\n" in run(capsys, [one], [alike, other])[1]
    code, _, err = run(capsys, [one, one / "metrics.jsonl"], [other])
    assert code == 2 and "is named twice on one side" in err


def test_no_name_of_a_setting_looks_like_a_line_of_ours(tmp_path, capsys):
    steers = write_run(tmp_path / "a", 1, settings={"x": "\x1b[31m\nworse by more"})
    out = run(capsys, [steers], [write_run(tmp_path / "b")])[1]
    assert "\x1b" not in out and "\nworse by more\n" not in out


def test_settings_and_the_first_step_where_losses_part(tmp_path, capsys):
    base = write_run(tmp_path / "a", 1)
    other = shutil.copytree(base, tmp_path / "b")
    edit_events(other, lambda event: event | {"train_loss": 1.0} if event.get("step") == 31 else event)
    about = json.loads((other / "config.json").read_text())
    about["settings"]["matrix_lr"] = 0.02
    (other / "config.json").write_text(json.dumps(about))
    _, out, _ = run(capsys, [base], [other])
    assert "MATRIX_LR: 0.06 | 0.02" in out
    assert "the losses part at step 31 of 60" in out
    assert "the same to the last bit over 60 steps" in run(capsys, [base], [base])[1]


def test_records_are_compared_by_all_their_seeds(capsys):
    code, out, _ = run(capsys, [PRESET], [PAR])
    assert "NUM_LAYERS: unset | 5" in out and "base: 3 runs" in out
    assert code == 4, "seeds of the preset differ by more than the two scripts"


def test_a_campaign_s_variant_stands_for_the_runs_of_its_seeds(tmp_path, capsys):
    for variant, loss in (("old", 2.1), ("new", 2.0)):
        for seed in (1, 2, 3):
            write_run(tmp_path / variant / "logs" / str(seed), seed, loss=loss)
        (tmp_path / variant / "arm.json").write_text("{}")
    code, out, _ = run(capsys, [tmp_path / "old"], [tmp_path / "new"])
    assert code == 0 and all(f"{tmp_path}/new/logs/{seed}" in out for seed in (1, 2, 3))


def test_a_record_s_scores_are_numbers(tmp_path):
    assert "stream_bpb" not in verdicts([write_run(tmp_path / "a", 1)], [write_run(tmp_path / "b", 1)])
    broken = shutil.copytree(PAR, tmp_path / "broken")
    (broken / "submission.json").write_text('{"scores": {"1337": "good", "1338": 1, "1339": 1}}')
    with pytest.raises(DataError, match="the score of seed 1337 is 'good', expected a number"):
        find_runs(broken)


# --- broken logs ------------------------------------------------------------------------------------------

STEP = '{"event": "step", "train_loss": 1.0, "step": 1, "train_seconds": 1.0}'


@pytest.mark.parametrize(
    "change, where, words",
    [
        (lambda lines: [], "metrics.jsonl", "is empty"),
        (lambda lines: lines[:30], "metrics.jsonl:30", "without a final event"),
        (lambda lines: [*lines[:30], lines[30][:50]], "metrics.jsonl:31", "is no JSON"),
        (lambda lines: [*lines[:20], *lines[10:]], "metrics.jsonl:21", "keep the later ones"),
        (lambda lines: [*lines[:20], *lines[22:]], "metrics.jsonl:21", "after step 19, expected step 20"),
        (lambda lines: [*lines, *lines], "metrics.jsonl:67", "after the run's end"),
        (lambda lines: ['{"loss": 3.1, "iter": 1}'], "metrics.jsonl:1", 'an object with "event"'),
        (lambda lines: [lines[-1]], "metrics.jsonl", "has no step"),
        (lambda lines: [STEP.replace('"train_seconds"', '"seconds"')], ":1", "without train_seconds"),
        (lambda lines: [STEP.replace("1.0,", "NaN,")], ":1", "is no JSON"),
        (lambda lines: [STEP.replace("1.0,", '"much",')], ":1", "train_loss is 'much', expected a number"),
        (lambda lines: [STEP.replace(": 1.0}", ": -1.0}")], ":1", "train_seconds is -1"),
        (lambda lines: [lines[0], '{"event": "val", "step": 1}'], ":2", "numbers step, val_loss"),
    ],
)
def test_a_broken_log_gets_one_line(tmp_path, capsys, change, where, words):
    good = write_run(tmp_path / "good")
    broken = edit_lines(write_run(tmp_path / "broken"), change)
    code, out, err = run(capsys, [good], [broken])
    assert (code, out) == (3, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert where in err and words in err


def test_a_run_that_has_not_ended(tmp_path, capsys):
    """Its last line is half written; the numbers of the steps before it failed."""

    def fail(event):
        return event | {"grad_norm": "nan"} if event.get("step", 0) > 57 else event

    good, living = write_run(tmp_path / "good"), edit_events(write_run(tmp_path / "living"), fail)
    path = living / "metrics.jsonl"
    path.write_text(path.read_text()[:-99])
    code, _, err = run(capsys, [good], [living])
    assert code == 3 and "the last line is cut off" in err and "--unfinished" in err
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, [good], [living], "--unfinished", "--html", page)
    words = "living has not ended: 60 steps so far; the last 3 changed nothing"
    assert code == 4 and words in out and words in page.read_text()
    assert "\nno verdict: a run has not ended\nval_bpb: - " in out


ODD = [None, True, -1, 0, 1e308, 10**400, "", "nan", "x", [], {}, [1] * 9, "1.5 partial", "\ud800", 0.5]


@pytest.mark.parametrize("seed", range(40))
def test_no_log_makes_a_traceback(tmp_path, capsys, seed):
    """Values and bytes changed at random, in metrics, log and config: a table, or one line of error."""
    rng = random.Random(seed)
    good, broken = (write_run(tmp_path / name, steps=20) for name in ("good", "broken"))

    def odd_value(event):
        if rng.random() < (0.5 if event["event"] != "step" else 0.03):
            event[rng.choice([*event])] = rng.choice(ODD)
        return event

    if seed % 2:
        edit_events(broken, odd_value)
        about = json.loads((broken / "config.json").read_text())
        part = rng.choice([*about.values()]) or about
        part[rng.choice([*part])] = rng.choice(ODD)
        (broken / "config.json").write_text(json.dumps(about))
    else:
        for name in rng.sample(["metrics.jsonl", "train.log", "config.json"], 2):
            blob = bytearray((broken / name).read_bytes())
            for _ in range(rng.choice([1, 5, 50])):
                blob[rng.randrange(len(blob))] = rng.choice([0, 10, 34, 48, 57, 123, 255])
            (broken / name).write_bytes(blob[: rng.choice([len(blob), rng.randrange(len(blob))])])
    words = ["--unfinished"] * (seed % 3 > 0)
    code, _, err = run(capsys, [good], [broken], *words, "--html", tmp_path / "page.html")
    one_line = code == 3 and err.startswith("error: ") and err.count("\n") == 1
    assert one_line or (code in (0, 1, 4) and not err)


def test_metrics_alone_and_runs_without_the_newer_fields(tmp_path, capsys):
    newer = "train_flops", "lr_mul"
    old = edit_events(write_run(tmp_path), lambda e: {k: v for k, v in e.items() if k not in newer})
    alone = (old / "metrics.jsonl").rename(tmp_path / "old.jsonl")
    code, out, _ = run(capsys, [alone], [alone])
    assert code == 0 and "tokens/s" in out


@pytest.mark.parametrize(
    "words, code, message",
    [
        ("--base A", 2, ""),
        ("--base --new A", 2, ""),
        ("--base no --new A", 3, "no such file"),
        ("--base . --new A", 3, "holds no metrics.jsonl"),
        ("--base A --new A --on bpb", 2, "expected one of params, steps"),
        ("--base A --new A --html .", 2, ""),
    ],
)
def test_wrong_words_are_one_line(tmp_path, monkeypatch, capsys, words, code, message):
    write_run(tmp_path / "A", 1)
    monkeypatch.chdir(tmp_path)
    assert records(["compare", *words.split()]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    "words",
    [["compare", "--new", "logs/first", "--base"], ["follow"], ["sample"]],
    ids=lambda words: words[0],
)
def test_a_misspelt_run_gets_the_nearest_names(tmp_path, monkeypatch, capsys, words):
    write_run(tmp_path / "logs/first")
    monkeypatch.chdir(tmp_path)
    assert records([*words, "logs/frist"]) == 3
    assert capsys.readouterr().err.endswith("; the nearest runs: logs/first\n")
    monkeypatch.chdir(tmp_path / "logs")
    assert records([*words, "lags/first"]) == 3
    assert f"; commands are run from the repository's folder: cd {ROOT}\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_the_script_fills_every_row(tmp_path, base_run):
    ran = base_run.cwd / "logs/läuft-日本"
    copy = shutil.copytree(ran, tmp_path / "copy")
    found = load([ran], [copy]).rows
    assert [one.measure.key for one in found if None in one.base + one.new] == ["peak_memory_mib"]  # a GPU's
    assert {one.verdict for one in found} <= {"same", "-"}
