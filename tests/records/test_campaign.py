"""records.campaign: runs in processes of their own that are stopped, killed and resumed, and the statistics.

Most tests run a stand-in for train_gpt.py, which takes milliseconds; the slow ones run the script itself.
"""

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from data.command import DataError
from data.files import sha256
from records.board import pictures
from records.campaign import __main__ as campaign
from records.campaign import arms, runs, standings
from tests.kit import helpers, record_kit
from tests.kit.data_kit import call, refused, start

# Ten steps in a folder as the real script makes it; its score is WIDTH + SEED / 1000.
STAND_IN = """
import json, os, pathlib, signal, sys, time
import numpy as np

SETTINGS = "preset seed max_flops val_tokens_limit width pace fail"


class Predictor:
    rows, vocab_size = 16, 400

    def start(self, rows):
        return np.zeros((rows, 400), np.float32)

    def step(self, ids):
        return self.start(len(ids))


def load_predictor(artifact, device):
    return Predictor()


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(16))
    env = os.environ
    folder = pathlib.Path("logs", env["RUN_ID"])
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    with open(folder / "attempts", "a") as file:
        file.write(" ".join(sorted(env)) + "\\n")
    for step in range(len(metrics.read_text().splitlines()) if metrics.exists() else 0, 10):
        time.sleep(float(env.get("PACE", 0)))
        with open(metrics, "a") as file:
            file.write(json.dumps({"event": "step", "step": step}) + "\\n")
    if env.get("FAIL") == env["SEED"]:
        print("no finite numbers")
        return 17
    (folder / "model.ptz").write_bytes(b"model")
    bpb = float(env["WIDTH"]) + int(env["SEED"]) / 1000
    final = {"val_bpb": f"{bpb:.8f}", "artifact_bytes": 5, "steps": 10, "budget": "ok"}
    final["train_flops"] = int(env["MAX_FLOPS"])
    with open(metrics, "a") as file:
        file.write(json.dumps({"event": "final", **final}) + "\\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
"""
PATCH = """--- a/train_gpt.py
+++ b/train_gpt.py
@@ -57,3 +57,3 @@
     bpb = float(env["WIDTH"]) + int(env["SEED"]) / 1000
-    final = {"val_bpb": f"{bpb:.8f}", "artifact_bytes": 5, "steps": 10, "budget": "ok"}
+    final = {"val_bpb": f"{bpb + 1:.8f}", "artifact_bytes": 5, "steps": 10, "budget": "ok"}
     final["train_flops"] = int(env["MAX_FLOPS"])
"""


class Place:
    """A folder with a tiny track, its data, a script, and a campaign's file."""

    def __init__(self, root: Path):
        self.root = root
        self.file = root / "tiny.toml"
        self.script = root / "stand_in.py"
        self.script.write_text(STAND_IN)
        self.patch = root / "more.patch"
        self.patch.write_text(PATCH)
        self.corpus = record_kit.make_data(root / "data")
        record_kit.make_track(root / "records/track_tiny", self.corpus)
        self.manifest("tiny_sp400", val_sha256="ab" * 32)
        self.write(narrow="settings = {WIDTH = 1}", wide="settings = {WIDTH = 2.5}")

    @property
    def home(self) -> Path:
        return self.root / "campaigns/tiny"

    def manifest(self, name: str, val_sha256: str) -> None:
        """Say what a dataset holds; only its validation text has to differ."""
        folder = self.root / "data/datasets" / name
        tokenizer = {"file": "../../tokenizers/tiny.model", "sha256": "cd" * 32}
        facts = {"format": "bytegolf dataset", "corpus_sha256": "", "lossy": False, "files": []}
        folder.mkdir(exist_ok=True)
        facts |= {"tokenizer": tokenizer, "val_sha256": val_sha256}
        (folder / "manifest.json").write_text(json.dumps(facts))

    def write(self, head: str = "", base: str = "narrow", seeds=(1, 2), **arms: str) -> None:
        lines = ['track = "track_tiny"', 'dataset = "tiny_sp400"', f'base = "{base}"', f"seeds = {[*seeds]}"]
        lines += [head, *(f"[arms.{name}]\n{text}" for name, text in arms.items())]
        self.file.write_text("\n".join(lines))

    @property
    def options(self) -> list:
        places = {"script": self.script, "data": self.root / "data", "records": self.root / "records"}
        places["logs"] = self.root / "campaigns"
        return [self.file, *(word for name, path in places.items() for word in (f"--{name}", path))]

    def run(self, *more: object, code: int = 0) -> str:
        return call(campaign.main, *self.options, *more, code=code)

    def start(self, *more: object, **options) -> subprocess.Popen:
        return start("records.campaign", *self.options, *more, **options)

    def attempts(self, arm: str, seed: int, budget: str = "1") -> list[str]:
        return (self.home / budget / arm / f"logs/{seed}/attempts").read_text().splitlines()


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


def rows_of(said: str) -> list[list[str]]:
    """The cells of all tables."""
    lines = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("|")]
    return [[cell.strip("` ") for cell in line] for line in lines if line[0].strip("- ")]


def wait_until(condition) -> None:
    end = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# --- running ----------------------------------------------------------------------------------------------


def test_every_arm_and_seed_is_run_once_and_reported(place, monkeypatch):
    monkeypatch.setenv("WIDTH", "77")
    monkeypatch.setenv("PACE", "9")  # of the shell, so none of the runs' business
    said = place.run("--cores", 2, "--budget", 0.5)
    assert "wide 2: 2.5020 bits per byte" in said
    head, narrow, wide = rows_of(said)
    assert " | ".join(head) == standings.ARMS
    assert narrow == ["narrow", "2 of 2", "1.0015", "0.0007", "-", "-", "-", "5", "10", "5e+11"]
    assert wide[:6] == ["wide", "2 of 2", "2.5015", "0.0007", "+1.5000", "0.0000"]
    assert rows_of(place.run("--budget", 0.5)) == [head, narrow, wide]
    (names,) = place.attempts("wide", 2, "0.5")
    expected = {"SEED", "RUN_ID", "MAX_FLOPS", "WIDTH", "PRESET", "DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE"}
    expected.add("VAL_TOKENS_LIMIT")
    assert expected <= set(names.split()) <= expected | {"PATH", "HOME", "OMP_NUM_THREADS", "LC_CTYPE"}


def test_a_patch_counts_and_a_changed_arm_is_refused(place):
    both = f'settings = {{WIDTH = 1}}\npatches = ["{place.patch}"]'
    place.write(narrow="settings = {WIDTH = 1}", more=both)
    assert rows_of(place.run())[2][:5] == ["more", "2 of 2", "2.0015", "0.0007", "+1.0000"]
    place.write(narrow="settings = {WIDTH = 3}", more=both)
    line = refused(place.run(code=3))
    assert line.endswith(f"/narrow: made with other settings; rm -r {place.home}/1/narrow to run it anew")
    assert "other settings" in refused(place.run("--report", code=3))
    place.write(narrow="settings = {WIDTH = 1}", more=both)
    place.patch.write_text(PATCH.replace("bpb + 1", "bpb + 2"))
    assert "more: made with other patches and script" in refused(place.run(code=3))
    place.patch.write_text(PATCH)
    place.script.write_text(STAND_IN + "\n")
    assert "narrow: made with other script" in refused(place.run(code=3))
    assert "2.0015" in place.run("--report"), "what was run can still be read"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_gently_and_the_same_command_goes_on(place, number):
    place.write(narrow="settings = {WIDTH = 1, PACE = 0.15}")
    process = place.start("--cores", 2)
    metrics = [place.home / f"1/narrow/logs/{seed}/metrics.jsonl" for seed in (1, 2)]
    wait_until(lambda: all(path.exists() and path.read_text().count("\n") > 1 for path in metrics))
    assert "at work there already" in refused(place.run(code=2))
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 16
    assert "stopped; this goes on: python -m records.campaign" in said
    before = metrics[0].read_text()
    assert "1.0015" in place.run()
    assert metrics[0].read_text().startswith(before)
    assert len(place.attempts("narrow", 1)) == 2


def test_a_killed_run_is_reported_and_goes_on(place):
    place.write(narrow="settings = {WIDTH = 1}", wide="settings = {WIDTH = 2, FAIL = 1}")
    said = place.run(code=1)
    assert "wide 1: exit code 17: no finite numbers\n" in said
    assert [row[:2] for row in rows_of(said)[1:]] == [["narrow", "2 of 2"], ["wide", "1 of 2"]]
    assert rows_of(said)[2][3:7] == ["-", "+1.0000", "-", "-"]
    assert "wide 1: exit code 17" in place.run(code=1)
    assert len(place.attempts("wide", 1)) == 2
    assert len(place.attempts("wide", 2)) == 1


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, line",
    [
        ({"narrow": "setings = {WIDTH = 1}"}, "arms: narrow: Additional properties are not allowed"),
        ({"narrow": "settings = {WIDTH = [1]}"}, "arms: narrow: settings: WIDTH: [1] is not of type"),
        ({"narrow": "settings = {SEED = 1}"}, "settings hold SEED, which the campaign sets"),
        ({"narrow": "settings = {HEIGHT = 1}"}, "arm narrow: HEIGHT is no setting of its script"),
        ({"narrow": 'patches = ["no.patch"]'}, "no.patch: cannot be read"),
        ({"narrow": 'dataset = "gone"'}, "gone: holds no manifest.json"),
        ({"narrow": "", "base": "broad"}, "base is 'broad', expected one of narrow"),
        ({"narrow": "", "seeds": []}, "seeds: [] should be non-empty"),
        ({"narrow": "", "head": "x = "}, "is no TOML"),
        ({"head": "arms = 3"}, "arms: 3 is not of type 'object'"),
    ],
)
def test_a_bad_file_is_one_line_and_runs_nothing(place, change, line):
    place.write(**change)
    code = 3 if "no.patch" in line or "gone" in line else 2
    assert line in refused(place.run(code=code))
    assert not list(place.home.glob("*/*"))


def test_a_patch_that_does_not_apply(place):
    place.write(narrow=f'settings = {{WIDTH = 1}}\npatches = ["{place.patch}", "{place.patch}"]')
    line = refused(place.run(code=2))
    assert (
        f"{place.patch}: does not apply to {place.script} and the patches before it: patch failed: train"
        in line
    )
    assert not list(place.home.glob("*/*"))


def test_the_validation_text_is_refused(place):
    rules = json.loads((place.root / "records/track_tiny/track.json").read_text())
    place.manifest("tiny_sp400", rules["dataset"]["val_sha256"])
    line = refused(place.run(code=3))
    assert "tiny_sp400: holds the validation text of track_tiny, expected another" in line
    assert "python -m data.prepare development" in line
    place.manifest("tiny_sp400", "ab" * 32)
    place.manifest("other_sp400", "cd" * 32)
    place.write(narrow="", wide='dataset = "other_sp400"')
    assert "other_sp400: its validation text is not that of" in refused(place.run(code=3))


def test_a_track_of_seconds_and_a_silly_budget(place):
    path = place.root / "records/track_tiny/track.json"
    rules = json.loads(path.read_text())
    del rules["train_flops"]
    path.write_text(json.dumps(rules))
    assert "track_tiny counts no operations" in refused(place.run(code=2))
    assert "expected a share above 0" in refused(place.run("--budget", 0, code=2))


def test_a_part_of_the_text_is_no_score(place):
    place.write(narrow="settings = {WIDTH = 1}", seeds=[1])
    place.script.write_text(STAND_IN.replace("{bpb:.8f}", "{bpb:.8f} partial"))
    assert "scored on a part of the text" in refused(place.run(code=3))


# --- scores and statistics --------------------------------------------------------------------------------


@pytest.mark.slow
def test_scores_in_streams_are_made_once(place):
    place.write(narrow="settings = {WIDTH = 1}", seeds=[1])
    said = place.run("--score")
    uniform = (len(place.corpus.tokens["val"]) - 1) * np.log2(400) / place.corpus.val_bytes()
    assert f"narrow 1: {uniform:.4f} bits per byte in streams" in said
    assert rows_of(said)[1][2] == f"{uniform:.4f}"
    assert "in streams\n\n" in place.run("--report", "--score")
    assert "narrow 1" not in place.run("--score")
    assert rows_of(place.run("--report"))[1][2] == "1.0010"


def test_differences_are_paired_and_p_is_welchs():
    base = {1: 1.50, 2: 1.60, 3: 1.71, 4: 1.58}
    mine = {1: 1.49, 3: 1.65, 2: 1.55}
    difference, sd, p = standings.against(mine, base)
    pairs = [1.49 - 1.50, 1.55 - 1.60, 1.65 - 1.71]
    assert (difference, sd) == (f"{np.mean(pairs):+.4f}", f"{np.std(pairs, ddof=1):.4f}")
    new, old = [*mine.values()], [*base.values()]
    error = [statistics.variance(values) / len(values) for values in (new, old)]
    free = sum(error) ** 2 / (error[0] ** 2 / 2 + error[1] ** 2 / 3)
    t = (np.mean(new) - np.mean(old)) / sum(error) ** 0.5
    assert p == f"{scipy.stats.t.cdf(t, free):.2g}"
    assert standings.against(base, base) == ["-", "-", "-"]
    assert standings.against({5: 1.0}, base) == ["-", "-", "-"]
    assert standings.against({1: 1.0}, base) == ["-0.5000", "-", "-"]


@pytest.mark.slow
def test_smaller_budgets_are_held_against_the_largest(place):
    """At a quarter of the operations two of four arms change places; e was another arm then."""
    widths = {"a": 1, "b": 2, "c": 3, "d": 4}
    flat = {name: f"settings = {{WIDTH = {width}}}" for name, width in widths.items()}
    place.write(base="a", seeds=[1], **flat, e="settings = {WIDTH = 9}")
    place.run("--budget", 0.25)
    for name, bpb in (("a", 2.5), ("b", 2.0)):  # as if they had done worse and better
        path = place.home / f"0.25/{name}/logs/1/metrics.jsonl"
        path.write_text(path.read_text().replace(f'"{widths[name]}.00100000"', f'"{bpb}"'))
    place.write(base="a", seeds=[1], **flat, e="settings = {WIDTH = 0.5}")
    said = place.run()
    head, row = rows_of(said)[-2:]
    assert " | ".join(head) == standings.BUDGETS
    by_hand = 1 - 6 * (1 + 1) / (4 * 15)
    assert row == ["0.25", "4", f"{by_hand:.2f}", "b", "2 of 4"]


def test_settings_grow_with_the_operations_and_the_law_is_that_of_the_scores(place):
    """Scores are WIDTH, a power of the budget; the gain of `half` is half of the base's score."""
    rule = "scale.WIDTH = {{value = {}, power = {}, multiple = 1}}"
    widths = {"whole": (10000, -0.25), "half": (5000, -0.25), "rising": (50000, 0.05)}
    place.write(base="whole", seeds=[1], **{name: rule.format(*width) for name, width in widths.items()})
    budgets = [0.01, 0.03, 0.1, 0.3, 1]
    for budget in budgets:
        place.run("--budget", budget)
    rows = rows_of(place.run("--law"))
    falls = {row[0]: row[2] for row in rows if row[3].startswith("0.01")}
    assert falls == {name: f"{1 - 10**power:.1%} ± 0.0%" for name, (_, power) in widths.items()}
    gains = {row[0]: row[3] for row in rows if row[3] in ("grows", "holds", "fades")}
    assert gains == {"half": "fades", "rising": "fades"}
    written = json.loads(place.file.with_suffix(".json").read_text())
    assert written["arms"]["half"]["scores"]["0.01"] == {"1": round(5000 * 10**0.5) + 0.001}
    drawn = pictures.law_data(written)
    assert [flops for flops, _ in drawn["half"]["means"]] == [written["flops"] * share for share in budgets]


# --- the script itself ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_real_script_killed_with_its_campaign_ends_as_if_undisturbed(place):
    """Two arms, one of them patched; SIGKILL to the whole group in the middle."""
    shared = {key: value for key, value in helpers.pairs(helpers.TINY).items() if key not in arms.OURS}
    shared |= {"ITERATIONS": "200", "CKPT_SECONDS": "0.05", "TRAIN_LOG_EVERY": "1"}
    head = "[settings]\n" + "\n".join(f'{name} = "{value}"' for name, value in shared.items())
    place.script = helpers.SCRIPT
    smear = f'patches = ["{helpers.ROOT / "tests/ideas/smear_gate.patch"}"]'
    place.write(head, plain="", smear=smear, base="plain", seeds=[1])
    process = place.start("--cores", 2, start_new_session=True)
    logs = place.home / "1/plain/logs/1"
    wait_until(lambda: len(list(logs.glob("checkpoint/*.ckpt"))) > 1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    said = place.run("--cores", 2, "--score")
    assert [row[1] for row in rows_of(said)[1:]] == ["1 of 1", "1 of 1"]
    final = json.loads((logs / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["resumes"] == 1
    env = place.corpus.env(**shared, SEED=1, RUN_ID="alone", MAX_FLOPS=record_kit.MOST_FLOPS)
    alone = helpers.run_script(place.root / "alone", env)
    assert alone.final["val_bpb"] == final["val_bpb"]
    score = json.loads((logs / "score.json").read_text())["val_bpb"]
    first_tokens = 256 * np.log2(400) / place.corpus.val_bytes()  # of its streams, guessed from nothing
    assert 0 < score - float(final["val_bpb"]) < first_tokens


def test_patches_for_another_script_are_listed_and_renewed(place):
    """Such a patch may still apply; then the runs go on, and one who looked at it says so in the patch."""
    today = sha256(place.script.read_bytes())
    old = "ab" * 32
    place.patch.write_text(f"One more.\nMade for train_gpt.py of sha256 {old}.\n\n{PATCH}")
    place.write(narrow=f'settings = {{WIDTH = 1}}\npatches = ["{place.patch}"]', seeds=[1])
    assert f"more.patch: made for train_gpt.py of sha256 {old}, which " in place.run()
    assert "more.patch: says now that it is for" in place.run("--renew")
    assert place.patch.read_text() == f"One more.\nMade for train_gpt.py of sha256 {today}.\n\n{PATCH}"
    assert place.run("--renew") == ""
    place.script.write_text(STAND_IN.replace("bpb:", "its:"))
    before = place.patch.read_text()
    assert "does not apply" in refused(place.run("--renew", code=2))
    assert place.patch.read_text() == before
    place.patch.write_text(f"{PATCH}+Made for train_gpt.py of sha256 {old}.\n")
    assert arms.made_for(place.patch) is None, "a line of the patch is no line of its head"


# --- a cluster --------------------------------------------------------------------------------------------


class RayNodes:
    """A head of one thread, and more nodes, as processes of this machine."""

    def __init__(self):
        cluster_utils = pytest.importorskip("ray.cluster_utils", reason="ray is in tests/requirements.txt")
        self.cluster = cluster_utils.Cluster()
        self.add(include_dashboard=False)  # the head

    def add(self, **options):
        return self.cluster.add_node(num_cpus=1, **options)

    def kill(self, node) -> None:
        self.cluster.remove_node(node, allow_graceful=False)

    @property
    def options(self) -> list:
        return ["--ray", self.cluster.address, "--keep-every", 0.2]


@pytest.fixture
def ray_nodes(monkeypatch):
    """Clusters that end with the test."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # nothing but these processes is spoken to
    monkeypatch.setenv("RAY_worker_niceness", "0")  # not 15: beside other tests it would starve
    made = []

    def begin() -> RayNodes:
        made.append(RayNodes())
        return made[-1]

    handler = signal.getsignal(signal.SIGTERM)
    yield begin
    for nodes in made:
        nodes.cluster.shutdown()
    signal.signal(signal.SIGTERM, handler)  # Ray took it


def final_of(folder: Path) -> dict:
    """The final event of a run, without what may differ between two runs that did the same."""
    final = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["event"] == "final"
    return {name: final[name] for name in ("val_bpb", "state_sha256", "artifact_sha256", "batches_crc32")}


@pytest.mark.slow
def test_a_node_killed_in_the_middle_changes_no_bit_of_the_results(place, ray_nodes):
    shared = {key: value for key, value in helpers.pairs(helpers.TINY).items() if key not in arms.OURS}
    shared |= {"ITERATIONS": "200", "CKPT_SECONDS": "0.05", "TRAIN_LOG_EVERY": "100"}
    head = "[settings]\n" + "\n".join(f'{name} = "{value}"' for name, value in shared.items())
    place.script = helpers.SCRIPT
    smear = f'patches = ["{helpers.ROOT / "tests/ideas/smear_gate.patch"}"]'
    place.write(head, plain="", smear=smear, base="plain", seeds=[1])
    nodes = ray_nodes()
    second = nodes.add()
    process = place.start(*nodes.options)

    def on_second() -> list[Path]:
        """Runs that the second node sent a checkpoint of."""
        files = [path for path in place.home.glob("1/*/places_1.jsonl") if second.node_id in path.read_text()]
        return [path.parent for path in files if list(path.parent.glob("logs/1/checkpoint/*.ckpt"))]

    wait_until(on_second)
    (moved,) = on_second()
    nodes.kill(second)
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    (row,) = [row for row in rows_of(said) if row[0] == f"{moved.name} 1" and len(row) == 3]
    assert second.node_id[:8] in row[1].split(", ")[0]
    assert nodes.cluster.head_node.node_id[:8] in row[1].split(", ")[-1]
    assert json.loads((moved / "logs/1/metrics.jsonl").read_text().splitlines()[-1])["resumes"] == 1
    there = {name: final_of(place.home / f"1/{name}/logs/1") for name in ("plain", "smear")}
    place.home.rename(place.root / "there")
    place.run("--cores", 2)
    assert there == {name: final_of(place.home / f"1/{name}/logs/1") for name in ("plain", "smear")}


@pytest.mark.slow
def test_a_command_that_was_stopped_or_lost_its_head_goes_on_and_a_strange_node_is_refused(
    place, ray_nodes, tmp_path
):
    place.write(narrow="settings = {WIDTH = 1, PACE = 0.3}", seeds=[1, 2, 3])
    nodes = ray_nodes()
    process = place.start(*nodes.options)
    metrics = [place.home / f"1/narrow/logs/{seed}/metrics.jsonl" for seed in (1, 2, 3)]

    def has_steps(path: Path) -> bool:
        return path.exists() and path.read_text().count("\n") > 1

    wait_until(lambda: has_steps(metrics[0]))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.count("stopped; this goes on: ")) == (16, 1), errors
    before = metrics[0].read_text()

    process = place.start(*nodes.options)
    wait_until(lambda: '"final"' in metrics[0].read_text() and has_steps(metrics[1]))
    nodes.cluster.shutdown()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert metrics[0].read_text().startswith(before)

    nodes = ray_nodes()
    other = tmp_path / "other/torch-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Name: torch\nVersion: 9.9.9\n")
    strange = nodes.add(env_vars={"PYTHONPATH": str(other.parent)})
    process = place.start(*nodes.options)
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert f"refused: node {strange.node_id} (" in said
    assert ") has torch 9.9.9, expected " in said
    assert rows_of(said)[1][:3] == ["narrow", "3 of 3", "1.0020"]
    assert [path.read_text().count('"step"') for path in metrics] == [20, 20, 20], "a key and a value each"
    assert "narrow 1: " not in said, "it had ended"


def test_a_node_takes_the_script_and_data_that_were_meant(place, monkeypatch, tmp_path):
    cluster = pytest.importorskip("records.campaign.cluster", reason="ray is in tests/requirements.txt")
    script = place.script.read_bytes()
    kit = cluster.ArmKit(None, script, sha256(script), cluster.metadata.version("torch"), runs.Share(1), 1)
    assert cluster.unlike(kit) == ""
    assert "a script of sha256 " in cluster.unlike(dataclasses.replace(kit, script=script + b" "))

    tokenizer = place.corpus.tokenizer_path
    paths = sorted(place.corpus.data_path.glob("*.bin"))
    named = {"file": str(tokenizer), "sha256": sha256(tokenizer.read_bytes())}
    files = [{"name": path.name, "sha256": sha256(path.read_bytes())} for path in paths]
    there = arms.Dataset(place.corpus.data_path, {"tokenizer": named, "files": files})
    asked = []

    def lend(path: Path) -> list[bytes]:
        asked.append(path)
        return [path.read_bytes()]

    desk = types.SimpleNamespace(lend=types.SimpleNamespace(remote=lend))
    monkeypatch.setattr(cluster.ray, "get", lambda value: value)
    monkeypatch.setattr(cluster, "CACHE", tmp_path / "cache")
    here = cluster.dataset_here(there, desk)
    assert here.settings["VOCAB_SIZE"] == there.settings["VOCAB_SIZE"]
    assert [path.read_bytes() for path in sorted(here.folder.glob("*.bin"))] == [
        path.read_bytes() for path in paths
    ]
    assert cluster.dataset_here(there, desk) == here
    assert asked == [tokenizer, *paths], "once"
    files[0]["sha256"] = "ab" * 32
    with pytest.raises(DataError, match="is not the file of its manifest"):
        cluster.dataset_here(there, desk)


def test_ray_is_for_those_who_ask_for_it(place, monkeypatch):
    place.write(narrow="settings = {WIDTH = 1}", seeds=[1])
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "records.campaign.cluster", raising=False)
    monkeypatch.delattr("records.campaign.cluster", raising=False)
    assert "pip install 'ray[default]==" in refused(place.run("--ray", "auto", code=2))
    place.run()


# --- the campaigns of the repository ----------------------------------------------------------------------


CAMPAIGNS = helpers.ROOT / "records/campaigns"


def of_another_script(patches: list[Path]) -> list[str]:
    """Those that name another script than today's. All of records/campaigns must name one."""
    today = sha256(helpers.SCRIPT.read_bytes())
    stamps = {path: arms.made_for(path) for path in patches}
    assert not [path.name for path, its in stamps.items() if its is None and CAMPAIGNS in path.parents]
    return [
        f"{path.name} is for the script {its[:12]}"
        for path, its in stamps.items()
        if its not in (None, today)
    ]


@pytest.mark.parametrize("path", sorted(CAMPAIGNS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_campaigns_of_the_repository_can_begin(path):
    """Their arms whose patches are for today's script; pytest lists the others below its results."""
    value = arms.read_campaign(path)
    for name, arm in value["arms"].items():
        patches = arms.patches_of(value, arm)
        if others := of_another_script(patches):
            warnings.warn(f"{path.stem}: {name} was not tried: {', '.join(others)}", stacklevel=1)
            continue
        compile(arms.patched(helpers.SCRIPT, patches), "train_gpt.py", "exec")


def test_every_patch_belongs_to_a_campaign():
    used = {
        patch
        for path in CAMPAIGNS.glob("*.toml")
        for value in [arms.read_campaign(path)]
        for arm in value["arms"].values()
        for patch in arms.patches_of(value, arm)
    }
    assert set(CAMPAIGNS.rglob("*.patch")) <= used
