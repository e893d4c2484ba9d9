"""`records sweep`: runs in processes of their own that are stopped, killed and resumed, and the statistics.

They run a stand-in for train_gpt.py, which takes milliseconds; test_cluster.py runs the script itself.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.stats

from records.campaign import command, report, runs, variants
from tests.kit import helpers
from tests.kit.campaign_kit import NARROW, STAND_IN, Place, committed, idea, rows_of, wait_until
from tests.kit.data_kit import refused


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


# --- running ----------------------------------------------------------------------------------------------


def test_every_variant_and_seed_is_run_once_and_reported(place, monkeypatch):
    monkeypatch.setenv("WIDTH", "77")
    monkeypatch.setenv("PACE", "9")  # of the shell, so none of the runs' business
    place.write(narrow=NARROW, wide="settings = {WIDTH = 1.0005}", seeds=[1, 2, 3])
    said = place.run("--cores", 2, "--budget", 0.5)
    assert "warning: settings of the shell do not count: PACE, WIDTH; write them into train_gpt.py" in said
    assert "wide 2: 1.0025 bits per byte" in said
    head, narrow, wide = rows_of(said)
    assert " | ".join(head) == report.VARIANTS
    assert narrow == ["narrow", "3 of 3", "1.0020", "0.0010", "-", "-", "-", "5", "10", "5e+11"]
    scores = np.array([1.001, 1.002, 1.003])
    welch = scipy.stats.ttest_ind(scores + 0.0005, scores, equal_var=False, alternative="less")
    paired = ["+0.0005", "0.0000", f"{welch.pvalue:.2g}"]
    assert wide[:7] == ["wide", "3 of 3", "1.0025", "0.0010", *paired]
    assert rows_of(place.run("--budget", 0.5)) == [head, narrow, wide]
    (names,) = place.attempts("wide", 2, "0.5")
    expected = {"SEED", "RUN_ID", "MAX_FLOPS", "WIDTH", "PRESET", "DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE"}
    expected.add("VAL_TOKENS_LIMIT")
    assert expected <= set(names.split()) <= expected | {"PATH", "HOME", "OMP_NUM_THREADS", "LC_CTYPE"}


def test_a_patch_counts_and_a_changed_variant_is_refused(place):
    place.write(narrow=NARROW, more=place.more)
    patch = place.patch.read_text()
    assert rows_of(place.run())[2][:5] == ["more", "2 of 2", "2.0015", "0.0007", "+1.0000"]
    place.write(narrow="settings = {WIDTH = 3}", more=place.more)
    line = refused(place.run(code=3))
    assert line.endswith(f"/narrow: made with other settings; rm -r {place.home}/1/narrow to run it anew")
    assert "other settings" in refused(place.run("--report", code=3))
    place.write(narrow=NARROW, more=place.more)
    place.patch.write_text(patch.replace("bpb + 1", "bpb + 2"))
    assert "more: made with other patches and script" in refused(place.run(code=3))
    place.patch.write_text(patch)
    place.script.write_text(STAND_IN + "\n")
    assert "narrow: made with other script" in refused(place.run(code=3))
    assert "2.0015" in place.run("--report"), "what was run can still be read"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill, number, code",
    [(os.kill, signal.SIGTERM, 16), (os.kill, signal.SIGINT, 16), (os.killpg, signal.SIGKILL, -9)],
)
def test_after_a_signal_or_a_kill_of_all_the_same_command_goes_on(place, kill, number, code):
    place.write(narrow="settings = {WIDTH = 1, PACE = 0.15}")
    process = place.start("--cores", 2, start_new_session=True)
    metrics = [place.home / f"1/narrow/logs/{seed}/metrics.jsonl" for seed in (1, 2)]
    wait_until(lambda: all(path.exists() and path.read_text().count("\n") > 1 for path in metrics))
    assert "at work there already" in refused(place.run(code=2))
    while process.poll() is None:  # whoever is impatient changes nothing
        kill(process.pid, number)
        time.sleep(0.01)
    _, said = process.communicate(timeout=30)
    words = "stopped; the same command goes on\n" if code == 16 else ""
    assert (process.returncode, said) == (code, words)
    before = metrics[0].read_text()
    assert "1.0015" in place.run()
    assert metrics[0].read_text().startswith(before)
    assert len(place.attempts("narrow", 1)) == 2


def test_a_failed_run_is_reported_and_tried_again(place):
    place.write(narrow=NARROW, wide="settings = {WIDTH = 2, FAIL = 1}")
    for _ in range(2):
        said = place.run(code=1)
        assert "wide 1: exit code 17: no finite numbers\n" in said
    assert [row[:2] for row in rows_of(said)[1:]] == [["narrow", "2 of 2"], ["wide", "1 of 2"]]
    assert rows_of(said)[2][3:7] == ["-", "+1.0000", "-", "-"]
    assert [len(place.attempts("wide", seed)) for seed in (1, 2)] == [2, 1]


def test_a_campaign_of_a_commit_begins_from_its_script(place, monkeypatch):
    """The stand-in as it was committed, while --script names what has become of it since."""
    commit = committed(place.root, STAND_IN)
    monkeypatch.setattr(variants, "REPO", place.root)
    place.script.write_text("raise SystemExit(1)")

    def run(commit: str, code: int = 0) -> str:
        place.write(f'commit = "{commit}"', narrow=NARROW, more=place.more, seeds=[1])
        return place.run(code=code)

    assert [row[2] for row in rows_of(run(commit[:7]))[1:]] == ["1.0010", "2.0010"]
    assert "2.0010" in run(commit), "the same variants"
    assert "commit 0123456: git shows no train_gpt.py of it" in refused(run("0123456", code=2))
    assert "commit: 'HEAD' does not match" in refused(run("HEAD", code=2))
    monkeypatch.setenv("PATH", "")
    assert "commit 0123456: there is no git here" in refused(run("0123456", code=2))


# --- what is refused --------------------------------------------------------------------------------------

TWICE = NARROW + '\npatches = ["more.patch", "more.patch"]'


@pytest.mark.parametrize(
    "code, line, change",
    [
        (2, "arms: narrow: Additional properties are not allowed", {"narrow": "setings = {WIDTH = 1}"}),
        (2, "settings hold SEED, which the campaign sets", {"narrow": "settings = {SEED = 1}"}),
        (2, "variant narrow: HEIGHT is no setting of its script", {"narrow": "settings = {HEIGHT = 1}"}),
        (3, "no.patch: cannot be read", {"narrow": 'patches = ["no.patch"]'}),
        (2, "more.patch: does not apply to the script and the patches before it: patch", {"narrow": TWICE}),
        (3, "gone: holds no manifest.json", {"narrow": 'dataset = "gone"'}),
        (2, "base is 'broad', expected one of narrow", {"narrow": "", "base": "broad"}),
        (2, "seeds: [] should be non-empty", {"narrow": "", "seeds": []}),
        (2, "is no TOML", {"narrow": "", "head": "x = "}),
        (3, "other_sp400: its validation text is not", {"narrow": "", "wide": 'dataset = "other_sp400"'}),
    ],
)
def test_a_bad_file_is_one_line_and_runs_nothing(place, monkeypatch, code, line, change):
    monkeypatch.setattr(variants, "REPO", place.root)  # where patches are
    place.manifest("other_sp400", "cd" * 32)
    place.write(**change)
    assert line in refused(place.run(code=code))
    assert not list(place.home.glob("*/*"))


def test_what_gives_no_scores_is_refused(place):
    place.script.write_text(STAND_IN.replace("{bpb:.8f}", "{bpb:.8f} partial"))
    assert "scored on a part of the text" in refused(place.run(code=3))
    assert "0.0 is not in the range x>0" in refused(place.run("--budget", 0, code=2))
    path = place.root / "records/track_tiny/track.json"
    rules = json.loads(path.read_text())
    place.manifest("tiny_sp400", rules["dataset"]["val_sha256"])
    line = "tiny_sp400: holds the validation text of track_tiny, expected another one; python -m data prepare"
    assert line in refused(place.run(code=3))
    assert line in refused(place.try_idea(idea(GAINS), code=3))
    del rules["train_flops"]
    path.write_text(json.dumps(rules))
    assert "track_tiny counts no operations" in refused(place.run(code=2))


# --- a script tried beside HEAD's -------------------------------------------------------------------------

GAINS = [0.011, 0.009, 0.010, 0.012, 0.008, 0.010, 0.009, 0.011]


def test_a_gain_is_kept_and_a_loss_discarded_as_soon_as_that_is_known(place, monkeypatch):
    monkeypatch.setattr(runs, "QUIET", 0)
    said = place.try_idea(idea(GAINS))
    found = re.fullmatch(r"verdict: keep difference:-0.0100 low:(\S+) high:(\S+)", said.splitlines()[-1])
    assert float(found[1]) < -0.01 < float(found[2]) < 0
    assert said.count("bits per byte\n") == 6, "three pairs were enough"
    for line in ("\n0 of 16 trainings have ended; ", "\n1 of 16 trainings have ended, the rest takes about "):
        assert line in said
    said = place.try_idea(idea([-gain for gain in GAINS]), "--json", code=1)
    value = json.loads(said.splitlines()[-1])
    assert value["verdict"] == "discard" and value["low"] > 0 and value["pairs"] == 3
    assert said.count("bits per byte\n") == 3, "HEAD's runs serve both"
    fat = idea(GAINS).replace('"budget": "ok"', '"budget": "over"')
    assert "over its budget of bytes" in place.try_idea(fat, code=1)


@pytest.mark.slow
def test_noise_is_no_verdict(place):
    noise = [0.02, -0.03, 0.01, -0.01, 0.04, -0.02, 0.0, 0.01]
    said = place.try_idea(idea(noise), "--pairs", 5, code=2)
    assert said.splitlines()[-1].startswith("verdict: unknown difference:")
    assert said.count("verdict: ") == 1 and said.count("bits per byte\n") == 10
    assert "low:-inf high:+inf" in said, "two pairs say nothing"


def test_an_edit_that_does_not_reach_the_run_is_told_after_one_pair(place):
    said = place.try_idea(idea([0] * 9) + "# a comment\n", code=2)
    *_, words, verdict = said.splitlines()
    assert words.startswith(
        "pair 1 is alike to the last bit: the edit changes nothing in a run with PRESET=minute"
    )
    assert verdict == "verdict: unknown difference:+0.0000 low:-inf high:+inf"
    assert said.count("bits per byte\n") == 2


def test_a_try_without_a_verdict_is_refused_in_a_line(place, monkeypatch):
    assert "expected an idea in it" in refused(place.try_idea(idea([0] * 9), code=2))
    broken = idea(GAINS).replace('env.get("FAIL") == env["SEED"]', "True")
    said = place.try_idea(broken, code=3)
    assert "exit code 17: no finite numbers" in said and "no verdict" in refused(said)
    assert said.count(" 1337: ") == 1, "HEAD's script was not run"
    assert "SyntaxError: invalid syntax\n" in place.try_idea(idea(GAINS) + "x = = 1\n", code=3)
    said = place.try_idea(helpers.SCRIPT.read_text(), "--preset", "minut", code=2)
    assert "before any run: train_gpt.py: PRESET='minut': takes one of 10min_16mb, " in refused(said)
    assert "expected FILE, or --try" in refused(place.run("--try", code=2))
    assert "expected FILE, or --try" in refused(place.try_idea(idea(GAINS), "--report", code=2))
    monkeypatch.setattr(command, "judge", None)
    assert "TypeError: 'NoneType'" in place.try_idea(idea(GAINS), code=3), "1 would be discard"
    monkeypatch.setitem(sys.modules, "scipy", None)
    said = place.try_idea(idea(GAINS), code=2)
    assert "scipy is not installed: " in refused(said) and " 1337: " not in said


# --- scores and statistics --------------------------------------------------------------------------------


@pytest.mark.slow
def test_scores_in_streams_are_made_once(place):
    place.write(narrow=NARROW, seeds=[1])
    said = place.run("--score")
    uniform = (len(place.corpus.tokens["val"]) - 1) * np.log2(400) / place.corpus.val_bytes()
    assert f"narrow 1: {uniform:.4f} bits per byte in streams" in said
    assert rows_of(said)[1][2] == f"{uniform:.4f}"
    assert "in streams\n\n" in place.run("--report", "--score")
    assert "narrow 1" not in place.run("--score")
    assert rows_of(place.run("--report"))[1][2] == "1.0010"


@pytest.mark.slow
def test_settings_grow_with_the_operations_and_the_fit_is_that_of_the_scores(place):
    """Scores are WIDTH, a power of the budget; the gain of `half` is half of the base's score."""
    rule = "scale.WIDTH = {{value = {}, power = {}, multiple = 1}}"
    widths = {"whole": (10000, -0.25), "half": (5000, -0.25), "rising": (50000, 0.05)}
    place.write(base="whole", seeds=[1], **{name: rule.format(*width) for name, width in widths.items()})
    budgets = [0.01, 0.03, 0.1, 0.3, 1]
    for budget in budgets:
        place.run("--budget", budget)
    rows = rows_of(place.run("--scaling"))
    falls = {row[0]: row[2] for row in rows if row[3].startswith("0.01")}
    assert falls == {name: f"{1 - 10**power:.1%} ± 0.0%" for name, (_, power) in widths.items()}
    gains = {row[0]: row[3] for row in rows if row[3] in ("grows", "holds", "fades")}
    assert gains == {"half": "fades", "rising": "fades"}
    written = json.loads(place.file.with_suffix(".json").read_text())
    assert written["arms"]["half"]["scores"]["0.01"] == {"1": round(5000 * 10**0.5) + 0.001}
    place.write(base="new", seeds=[1], new=NARROW)
    assert "a line takes runs at 3 budgets" in refused(place.run("--law", code=3))  # its name until --scaling


# --- the campaigns of the repository ----------------------------------------------------------------------


CAMPAIGNS = helpers.ROOT / "records/campaigns"


@pytest.mark.parametrize("path", sorted(CAMPAIGNS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_campaigns_of_the_repository_can_begin(path):
    """All patches apply to the script that their campaign begins from, and it knows all settings."""
    value = variants.read_campaign(path)
    if commit := value.get("commit"):
        there = subprocess.run(["git", "cat-file", "-e", commit], cwd=helpers.ROOT, capture_output=True)
        if there.returncode:
            pytest.skip(f"this clone does not reach back to {commit}")
    base = variants.script_of(commit) if commit else helpers.SCRIPT.read_bytes()
    for variant in value["arms"].values():
        script = variants.patched(base, variants.patches_of(value, variant))
        compile(script, "train_gpt.py", "exec")
        for name in value.get("settings", {}) | variant.get("settings", {}):
            assert f"\n    {name.lower()}: ".encode() in script
