"""Records: freezing, verifying, the board; and tampered copies of a good record, each failed by its check.

The record is made by real runs of the real script; test_referee.py has what happens in the sandbox.
"""

import datetime
import json
import os
import random
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.command import REPO, DataError
from data.files import sha256
from records.archive import verdicts
from records.archive.checks import check
from records.archive.runs import Record, pack, parse_run, read_runs
from records.archive.tracks import load_track, record_folders
from records.archive.verdicts import Draw, record_draw
from records.referee.text import validation_text
from records.verify import claims, freezing, training
from tests.kit import helpers, record_kit
from tests.kit.data_kit import call, refused
from tests.kit.record_kit import (
    ARTIFACT,
    NAME,
    SEEDS,
    TRACK,
    edit,
    edit_json,
    failed,
    log_value,
    passed_earlier,
    reseal,
    scale_scores,
)

RECORDS = helpers.ROOT / "records"
slow = pytest.mark.slow
sandboxed = pytest.mark.sandbox


@pytest.fixture(scope="session")
def author(tmp_path_factory):
    """Three runs of the real script, frozen."""
    root = tmp_path_factory.mktemp("records")
    return record_kit.Author(root, SEEDS, helpers.SCRIPT.read_text(encoding="utf-8"))


# --- good records -----------------------------------------------------------------------------------------


@slow
def test_a_good_record_passes_every_check_on_paper(author):
    checks = author.checks(author.folder, static=True)
    assert failed(checks) == set(), "\n".join(map(str, checks))
    assert all(re.fullmatch(r"(PASS|SKIP) [a-z0-9-]+: .+", str(line)) for line in checks)


@slow
@sandboxed
def test_a_good_record_passes_in_the_sandbox(author):
    checks = author.checks(author.folder)
    assert failed(checks) == set(), "\n".join(map(str, checks))
    assert {"score", *record_kit.REFEREE} <= {line.name for line in checks if line.verdict == "PASS"}


@slow
def test_a_folder_holds_what_its_runs_left(author):
    record = Record(author.folder)
    whole = {"README.md": None, "submission.json": None, "train_gpt.py": author.script}
    for seed in SEEDS:
        names = ("train.log", "metrics.jsonl", "model.ptz")
        sources = [author.root / f"logs/run{seed}" / name for name in names]
        whole |= dict(zip((path.name for path in files_of(author.folder, seed)), sources))
        assert record.scores[seed] == pytest.approx(record.runs[seed].value("val_bpb"), abs=0.2)
    assert {path.name for path in author.folder.iterdir()} == set(whole)
    for name, source in whole.items():
        assert source is None or (author.folder / name).read_bytes() == source.read_bytes()
    assert f"{record.mean:.4f} bits per byte" in (author.folder / "README.md").read_text()


# --- tampered copies --------------------------------------------------------------------------------------


def change(*keys):
    """change(key, key, ..., value) sets the last of these in submission.json."""
    *keys, last, value = keys

    def apply(submission):
        for key in keys:
            submission = submission[key]
        submission[last] = value

    return lambda folder: edit_json(folder / "submission.json", apply)


def log(old, new, seeds=(2,)):
    """Replace text in logs."""
    return lambda folder: [edit(folder / f"train_seed{seed}.log", (old, new)) for seed in seeds]


def more_metrics(text):
    """Append to seed 2's metrics."""
    return lambda folder: (folder / METRICS).open("a").write(text)


def steps(edit_event):
    """Change each event of seed 2's metrics, or leave it out."""

    def apply(folder):
        events = map(edit_event, map(json.loads, (folder / METRICS).read_text().splitlines()))
        (folder / METRICS).write_text("".join(json.dumps(event) + "\n" for event in events if event))

    return apply


def at_step(step, **values):
    """Other values in one step of seed 2's metrics."""
    return steps(lambda event: event | (values if event.get("step") == step else {}))


def sealed(change_it):
    def apply(folder):
        change_it(folder)
        reseal(folder)

    return apply


def append(code):
    return sealed(lambda folder: (folder / "train_gpt.py").open("a", encoding="utf-8").write(code))


def every(name, value):
    return sealed(lambda folder: [log_value(folder, seed, name, value) for seed in SEEDS])


def link(name, target):
    return lambda folder: (folder / name).symlink_to(target)


def redated(date):
    return lambda folder: folder.rename(folder.with_name(f"{date}_Good"))


def files_of(folder, seed):
    names = (f"train_seed{seed}.log", f"metrics_seed{seed}.jsonl", f"model_seed{seed}.ptz")
    return [folder / name for name in names]


def other_seed(folder):
    """Seed 3 was bad luck: seed 9 is sent instead."""
    for old, new in zip(files_of(folder, 3), files_of(folder, 9)):
        old.rename(new)
    log("SEED=3", "SEED=9", (9,))(folder)
    log_value(folder, 9, "seed", 9)


def copied_seed(folder):
    """One good run, sent three times."""
    for seed in (2, 3):
        for old, new in zip(files_of(folder, 1), files_of(folder, seed)):
            shutil.copy(old, new)
        log("SEED=1", f"SEED={seed}", (seed,))(folder)
        log_value(folder, seed, "seed", seed)


def swapped_logs(folder):
    first, second = (folder / f"train_seed{seed}.log" for seed in (1, 2))
    text = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(text)


def padded_artifact(folder):
    """As many bytes as the budget leaves, and one more."""
    path = folder / ARTIFACT
    track = load_track(folder.parent)
    size = track["budget_bytes"] - track.code_size((folder / "train_gpt.py").read_bytes()) + 1
    path.write_bytes(path.read_bytes().ljust(size, b"\0"))
    log_value(folder, 1, "artifact_bytes", size)
    log_value(folder, 1, "artifact_sha256", sha256(path.read_bytes()))


def triple_byte_pieces(folder):
    """The script's table counts byte pieces as three: more bytes, fewer bits for each."""
    for seed, run in read_runs(folder).items():
        more = int(run.value("val_bytes") * 1.3)
        log_value(folder, seed, "val_bpb", f"{run.value('val_bpb') * run.value('val_bytes') / more:.8f}")
        log_value(folder, seed, "val_bytes", more)


def fewer_bits(folder):
    """The same, with the count of bytes left as it should be."""
    for seed, run in read_runs(folder).items():
        log_value(folder, seed, "val_bpb", f"{run.value('val_bpb') * 0.8:.8f}")


def beside(factors, name="2025-11-20_Old", change_it=lambda folder: None):
    """Another record beside it, which passed, with the scores of each seed times a factor."""

    def apply(folder):
        old = folder.parent / name
        shutil.copytree(folder, old)
        for seed, factor in zip(SEEDS, factors):
            scale_scores(old, factor, (seed,))
        change_it(old)
        reseal(old)
        passed_earlier(old)

    return apply


def other_machine(folder):
    """A gain over a record that ran on something slower, on a track that counts seconds."""
    edit_json(folder.parent / "track.json", lambda v: v.pop("train_flops"))
    beside((1.3, 1.3, 1.3), change_it=log(" processor:", " processor:Slow ", SEEDS))(folder)


def one_slow_step(folder):
    """A pause in the middle does not make the ten minutes longer; the step under way at the end may."""
    log_value(folder, 2, "train_seconds", 75.0)

    def later(event):
        late = event["event"] == "step" and event["step"] > 10
        return event | ({"train_seconds": event["train_seconds"] + 50} if late else {})

    steps(later)(folder)


def more_flops(folder):
    """Twice the operations that the track allows, logged honestly."""
    most = load_track(folder.parent)["train_flops"]
    log_value(folder, 2, "train_flops", 2 * most)

    def spent(event):
        return event | ({"train_flops": event["step"] * most // 6} if event["event"] == "step" else {})

    steps(spent)(folder)


def linked_log(folder):
    (folder / LOG).rename(folder.parent / "log")
    (folder / LOG).symlink_to(folder.parent / "log")


def metrics_twice(folder):
    metrics = (folder / METRICS).read_bytes()
    (folder / f"{METRICS}.gz").write_bytes(pack(metrics.replace(b"loss", b"gain")))


def unquantized(folder):
    """A score before rounding, as older scripts log it, that no validation gave."""
    log("\nval_bpb: ", "\nval_bpb_unquantized: 0.10000000\nval_bpb: ")(folder)
    more = {"val_bpb_unquantized": "0.10000000"}
    steps(lambda event: event | (more if event["event"] == "final" else {}))(folder)


def without_contract(folder):
    edit(folder / "train_gpt.py", ("def load_predictor", "def load_it"))


def hidden_code(folder):
    script = folder / "train_gpt.py"
    script.write_bytes(b"# coding: raw_unicode_escape\n" + script.read_bytes())


NOISE = "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=45000))
BY_HEART = "".join(f"\nT = '{NOISE[i : i + 30]}'  {'# words of a text' * 4}" for i in range(0, 45000, 30))
NEXT_WEEK = (datetime.date.today() + datetime.timedelta(9)).isoformat()
LOG, METRICS = "train_seed2.log", "metrics_seed2.jsonl"
BOTH = f"{LOG} and {METRICS} differ"
END = "\n---\n"
TAMPERED = {
    # the folder
    "weights beside the artifact": (lambda f: (f / "extra.bin").write_bytes(bytes(9)), "folder"),
    "hidden folder": (lambda f: (f / ".cache").mkdir(), "folder"),
    "a link to a file elsewhere": (linked_log, "folder"),
    "a log too many": (lambda f: shutil.copy(f / LOG, f / "train_seed7.log"), "folder"),
    "no README": (lambda f: (f / "README.md").unlink(), "folder: README.md is missing$"),
    "no log": (lambda f: (f / LOG).unlink(), "folder: train_seed2.log is missing$"),
    "no metrics": (lambda f: (f / METRICS).unlink(), "folder: metrics_seed2.jsonl.gz is missing$"),
    "weights in a log": (log(END, "\n" + "0" * (5 << 20) + END), "folder"),
    "a pipe": (lambda f: os.mkfifo(f / "train_seed4.log"), "folder"),
    "a link to a file without end": (link("train_seed4.log", "/dev/zero"), "folder"),
    "metrics twice, once packed": (metrics_twice, "folder"),
    "one seed under two names": (lambda f: shutil.copy(f / LOG, f / "train_seed02.log"), "folder"),
    "one artifact under two names": (
        lambda f: shutil.copy(f / ARTIFACT, f / "model_seed1.int8.ptz"),
        "folder",
    ),
    "a name that is no text": (lambda f: open(os.fsencode(f) + b"/\xff\n.bin", "w").close(), "folder"),
    "a date that is none": (redated("2025-13-45"), "date"),
    "a date to come": (redated(NEXT_WEEK), "date"),
    "dated before what passed already": (beside((0.5, 0.5, 0.5), "2025-11-22_Old"), "date"),
    # the submission
    "no author": (change("author", ""), "schema: submission.json: author: '' should be non-empty$"),
    "a field of its own": (change("rank", 1), "schema"),
    "submission is no JSON": (lambda f: (f / "submission.json").write_text("{"), "file"),
    "submission too deep": (lambda f: (f / "submission.json").write_text("[" * 100000), "file"),
    "one score polished": (change("scores", "2", 0.5), "readme"),
    "a score of a seed that was not run": (change("scores", "9", 0.5), "scores"),
    "a score that is no number": (change("scores", "2", "good"), "schema"),
    "a score that the log knows nothing of": (sealed(change("scores", "2", 3.5)), "log-agrees"),
    "a seed without a score": (change("scores", {"1": 2.0, "3": 2.0}), "scores"),
    "another vocabulary of the track": (change("dataset", "tiny_sp260"), "tokenizer-sha256"),
    "a vocabulary that the track has not": (change("dataset", "tiny_sp9"), "dataset"),
    "settings that hold a text": (log("ITERATIONS=", f"NOTE={'x' * 2000} ITERATIONS=", SEEDS), "settings"),
    "settings that are no ASCII": (log("ITERATIONS=", "NOTE=\N{SNOWMAN} ITERATIONS=", SEEDS), "settings"),
    "other settings for one seed": (log(" ITERATIONS=12", " ITERATIONS=99"), "settings"),
    "a setting concealed in one log": (log(" ITERATIONS=12", ""), "settings"),
    "no settings": (log("run:", "ran:"), "file"),
    "a second verdict in a field": (change("claim", "x\nPASS score: fine"), "schema"),
    "README with another score": (lambda f: (f / "README.md").write_text("0.1234 bits per byte"), "readme"),
    "built on a record that is not there": (change("built_on", "2025-11-20_Gone"), "built-on"),
    "built on itself": (change("built_on", NAME), "built-on"),
    "an idea from a whole page": (change("idea_from", "x" * 201), "schema"),
    # logs
    "edited log": (log("\nval_bpb: ", "\nval_bpb: 0"), f"logs: {LOG}:[0-9]+ and .*: val_bpb is 0[0-9.]+ and"),
    "steps left out": (
        steps(lambda e: e if e.get("step") != 7 else None),
        f"logs: {METRICS}:[0-9]+: step 8, expected 7; {BOTH}: 12 steps and 11$",
    ),
    "a clock that runs backwards": (at_step(9, train_seconds=0.0), "logs"),
    "no validation at the end": (
        steps(lambda e: e if e["event"] != "val" or e["step"] < 12 else None),
        "logs",
    ),
    "unquantized score made up": (sealed(unquantized), "logs"),
    "log without an end": (log(END, "\n"), "file"),
    "log with nan": (log("\nval_loss: ", "\nval_loss: nan"), "logs"),
    "two ends": (log(END, f"{END}val_bpb: 1.0{END}"), "file"),
    "one value twice": (log(END, f"{END}val_bpb: 1.0\n"), "file"),
    "NUL in a log": (log("preset: smoke", "preset: sm\0oke"), "file"),
    "events after the end": (
        more_metrics('{"event": "note"}\n'),
        f"logs: {METRICS}:[0-9]+: a line after the final event, expected none$",
    ),
    "one key twice": (lambda f: edit(f / METRICS, ('{"event"', '{"event": "x", "event"')), "file"),
    "a loss that is not a number": (at_step(11, train_loss=float("nan")), "file"),
    "JSON too deep": (more_metrics("[" * 100000), "file"),
    "bits of nothing": (every("val_bpb", "0.00000000"), "log-agrees"),
    "a number as Python alone reads it": (lambda f: log_value(f, 2, "val_bpb", "1_0.5"), "file"),
    "swapped logs": (swapped_logs, "seed-names"),
    # script
    "script with one more space": (lambda f: (f / "train_gpt.py").open("a").write(" "), "script-sha256"),
    "script that does not compile": (append("\ndef (:\n"), "compiles"),
    "script without the contract": (sealed(without_contract), "compiles"),
    "import of what is not listed": (append("\nimport scipy\n"), "style"),
    "import within a function": (append("\ndef _f():\n    from requests import get\n"), "style"),
    "an encoding that hides code": (sealed(hidden_code), "style"),
    "text that runs backwards": (append("\n_e = '\u202e'\n"), "style"),
    "weights in a text": (append(f"\nT = '{NOISE[:6000]}'\n"), "style"),
    "weights in comments": (append("\n" + re.sub("(.{90})", r"# \1\n", NOISE[:6000])), "style"),
    "a text by heart, well spread": (append(BY_HEART), "style"),
    # limits and data
    "artifact with one more byte than the budget": (
        sealed(padded_artifact),
        "bytes: .*; track_tiny allows 400000$",
    ),
    "artifact of another run": (
        lambda f: (f / ARTIFACT).write_bytes(b"x"),
        "artifact: model_seed1.ptz and train_seed1.log differ: 1 bytes of sha256 ",
    ),
    "no artifact": (lambda f: (f / ARTIFACT).unlink(), "artifact"),
    "trained too long": (every("train_seconds", 75.0), "train-seconds"),
    "one long step in the middle": (sealed(one_slow_step), "train-seconds"),
    "more operations than the track allows": (sealed(more_flops), "train-flops"),
    "fewer operations in the end": (every("train_flops", 999), "logs"),
    "operations that grow less": (at_step(9, train_flops=7), "logs"),
    "wrong val split": (
        every("val_sha256", "ab" * 32),
        "val-sha256: train_seed1.log: sha256 of the validation tokens (ab){32}, that of track_tiny's",
    ),
    "other training data": (every("train_sha256", "ab" * 32), "train-sha256"),
    "other tokenizer": (every("tokenizer_sha256", "ab" * 32), "tokenizer-sha256"),
    "tokens left out": (every("val_tokens", 100), "val-tokens"),
    "partial validation": (lambda f: log_value(f, 2, "val_bpb", "1.00000000 partial"), "file"),
    "byte pieces counted as three": (sealed(triple_byte_pieces), "val-bytes"),
    "fewer bits than the nats": (fewer_bits, "log-agrees"),
    # seeds and claims
    "a seed left out": (sealed(lambda f: [path.unlink() for path in files_of(f, 3)]), "seeds"),
    "another seed instead": (sealed(other_seed), "seeds"),
    "one run three times": (sealed(copied_seed), "seed-runs"),
    "does not beat the best": (beside((0.5, 0.5, 0.5)), "gain"),
    "gain below the least": (beside((1.0005, 1.0005, 1.0005)), "gain"),
    "gain by luck": (beside((0.9, 1.0, 1.4)), "gain"),
    "another machine than the record before": (other_machine, "machine"),
}
# One sin, one line: else a reader cannot see what is wrong. Beside other checks more may fail.
LONELY = (
    "style seeds val-sha256 gain folder file schema settings train-seconds train-flops machine log-agrees "
    "built-on scores"
)
IN_COMPANY = {"bits of nothing", "one long step in the middle"}


@slow
@pytest.mark.parametrize("kind", TAMPERED)
def test_a_tampered_record_is_failed_by_its_check(author, tmp_path, kind):
    """The line names the file that is wrong, or the two that differ."""
    folder = author.copy(tmp_path)
    tamper, words = TAMPERED[kind]
    moved = tamper(folder)
    checks = author.checks(moved if isinstance(moved, Path) and moved.is_dir() else folder, static=True)
    lines = [str(line) for line in checks if line.verdict == "FAIL"]
    name, *_ = words.split(":")
    its = [line for line in lines if line.startswith(f"FAIL {name}: ")]
    assert its and re.match(f"FAIL {words}", its[0]) and len(its[0].splitlines()) == 1, lines
    if name in LONELY.split() and kind not in IN_COMPANY:
        assert lines == its


def test_the_line_of_an_edited_log_is_named():
    metrics = b'{"event": "val", "step": 1, "val_bpb": 2}\n{"event": "final", "steps": 1, "val_bpb": 2.0}\n'
    run = parse_run("a.log", b"run:a\nstep:1/1\n---\nsteps: 1\nval_bpb: 1.0\n", metrics)
    assert [*claims.wrong_end(run)] == ["a.log:5 and metrics.jsonl differ: val_bpb is 1.0 and 2.0"]


@slow
def test_a_forged_score_fails(author):
    """It is the referee's to eight decimals on the same kind of machine, else within 1e-3."""
    record = Record(author.folder)

    def verdict(off: float) -> str:
        return claims.compare_score(record, 2, SimpleNamespace(bpb=record.scores[2] + off)).verdict

    assert (verdict(4e-9), verdict(1e-8)) == ("PASS", "FAIL")
    record.submission["scored_on"] = {}
    assert (verdict(9e-4), verdict(-2e-3)) == ("PASS", "FAIL")


# --- training again ---------------------------------------------------------------------------------------


@slow
@sandboxed
@pytest.mark.cgroups
def test_the_judge_trains_the_real_script_and_ranks_it(author, tmp_path, monkeypatch):
    """The preset smoke on a copy of the floppy's track: fresh seeds are drawn. It shows how far each is."""
    folder = author.copy(tmp_path)
    edit_json(folder.parent / "track.json", lambda rules: rules.update(seeds=[1, 2]))  # of three runs
    beside((2, 2, 2))(folder)
    monkeypatch.setattr(training, "QUIET", 0.5)
    words = [folder, "--data", author.data, "--second", author.data / "second.jsonl"]
    said = call("records", "judge", *words, "--work", tmp_path / "judge", "--write", "--by", "Ada")
    assert "\nverdict: ranked\n" in said, said
    its = verdicts.read_verdicts(folder.parent)[NAME]
    assert its["judged"]["beats"] == "2025-11-20_Old" and len(its["judged"]["seeds"]) == 2
    for seed in its["judged"]["seeds"]:
        assert re.search(rf"^seed {seed} trains: \d+ s", said, re.MULTILINE), said
    assert re.search(r"^seed \d+ trains: \d+ s step:\d+/12$", said, re.MULTILINE), said


@slow
@sandboxed
def test_an_artifact_that_knows_more_than_the_training_text_is_found(author, tmp_path):
    """By its bits, and then by the score that only it has. Here training gave the good record's artifact."""
    folder = author.copy(tmp_path)
    text = validation_text(Record(folder).track, author.data)
    artifact = author.folder / "model_seed2.ptz"

    def compare():
        options = claims.VerifyOptions(author.data)
        return claims.compare_artifact(Record(folder), 2, artifact, text, options)

    log_value(folder, 2, "artifact_sha256", "ab" * 32)
    assert "0.0000 from the record's" in compare().text
    change("scores", "2", 0.3)(folder)
    line = compare()
    assert line.verdict == "FAIL" and "expected 0.2000 to 0.4000" in line.text
    change("claim", "none")(folder)  # then it may lie wherever its seeds do
    assert compare().verdict == "PASS"


SPY = """
import json, os, pathlib, socket, sys

found = [str(path) for root in ("/room", "/tmp", "/home", "/root", "/work", "/data", "/mnt")
         for path in pathlib.Path(root).rglob("*") if path.is_file()
         and not str(path).startswith((os.path.realpath(sys.prefix), sys.base_prefix))]
try:
    socket.create_connection(("1.1.1.1", 53), 1)
    found.append("network")
except OSError:
    pass
try:
    open(__file__, "a")
    found.append("its own script")
except OSError:
    pass
given = {name: os.environ.get(name) for name in ("SEED", "MATRIX_LR", "DTYPE", "DATA_PATH")}
json.dump([found, given], open("seen.json", "w"))
"""


@slow
@sandboxed
def test_the_training_sandbox_has_the_training_text_and_nothing_else(author, tmp_path):
    folder = author.copy(tmp_path)
    (folder / "train_gpt.py").write_text(SPY)
    record = Record(folder)
    with training.training_sandbox(record, author.data, training.settings(record, 2)) as ended:
        assert ended.code == 0, ended
        found, given = json.loads((ended.work / "seen.json").read_text())
    shards = {f"/room/data/{path.name}" for path in author.corpus.data_path.glob("*_train_*.bin")}
    own = {f"/room/{name}" for name in ("train_gpt.py", "training.py", "tokenizer.model")}
    assert set(found) == shards | own
    dtype = training.number_format(record.track)  # whatever the run's was
    assert given == {"SEED": "2", "MATRIX_LR": None, "DTYPE": dtype, "DATA_PATH": "/room/data"}


@slow
@sandboxed
def test_a_script_that_does_not_come_to_an_end_is_ended(author, tmp_path, monkeypatch):
    folder = author.copy(tmp_path)
    monkeypatch.setattr(training, "SETUP_SECONDS", 2)
    edit_json(folder.parent / "track.json", lambda v: v.update(train_seconds=1))
    (folder / "train_gpt.py").write_text("import time\ntime.sleep(99)\n")
    text = validation_text(Record(folder).track, author.data)
    (line,) = claims.retrain(Record(folder), 2, text, claims.VerifyOptions(author.data))
    assert line.name == "retrain" and "took longer than 3 seconds" in line.text


def test_links_in_what_a_run_left_lead_nowhere(tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "work/logs").mkdir(parents=True)
    link("room", tmp_path)(tmp_path / "work/logs")
    link("link", tmp_path / "secret")(tmp_path / "work")
    link("circle", "circle")(tmp_path / "work")
    os.mkfifo(tmp_path / "work/pipe")
    for name in ("logs/room/secret", "link", "circle", "pipe", "logs", "none"):
        with pytest.raises(DataError, match="the run left"):
            training.read_below(tmp_path / "work", Path(name), 99)


# --- freeze -----------------------------------------------------------------------------------------------


@slow
def test_freeze_refuses(author, tmp_path):
    def refusal(*words: str, code: int = 2) -> str:
        return refused(call("records", "freeze", *words, code=code))

    before = sorted(author.track.parent.rglob("*"))
    assert "runs of seeds [1, 2]" in refusal(*author.freeze_words(name="Two", runs=(1, 2)))
    assert "never overwritten" in refusal(*author.freeze_words())
    other = author.freeze_words("--track", "track_floppy", name="Other")
    assert "track_floppy has no dataset 'tiny_sp400', expected one of demo_sp1024" in refusal(*other, code=3)
    assert "built-on: 2025-11-20_Gone is not another record" in refusal(
        *author.freeze_words("--built-on", "2025-11-20_Gone", name="Other")
    )
    away = tmp_path / "logs"
    for seed in SEEDS:
        shutil.copytree(author.root / f"logs/run{seed}", away / f"run{seed}")
    args = [*map(str, sorted(away.iterdir())), *author.freeze_words(name="Other")[3:]]
    shutil.copytree(away / "run2", away / "run2_again")
    assert "one run of each" in refusal(str(away / "run2_again"), *args)
    script = away / "run1/train_gpt.py"
    script.rename(away / "script")
    assert "run1: holds no train_gpt.py; copy the script as it ran into" in refusal(*args, code=3)
    (away / "script").rename(script)
    edit(away / "run2/train.log", (" ITERATIONS=12", " MATRIX_LR=0.5 ITERATIONS=12"))
    assert "settings: MATRIX_LR=0.5" in refusal(*args)
    (away / "run2/train.log").write_text("killed")
    refusal(*args, code=3)
    assert sorted(author.track.parent.rglob("*")) == before


@slow
def test_a_freeze_that_is_stopped_keeps_its_scores(author, monkeypatch):
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (author.root / f"logs/run{SEEDS[-1]}/referee.json").unlink()
    monkeypatch.setattr(freezing, "referee", stopped)
    said = call("records", "freeze", *author.freeze_words(name="Again"), code=16)
    assert said.count("bits per byte, kept in ") == len(SEEDS) - 1 and "; the same command goes on" in said


# --- board ------------------------------------------------------------------------------------------------


@slow
def test_the_board_shows_what_was_verified(author, tmp_path):
    folder = author.copy(tmp_path)
    (tmp_path / "README.md").write_text("# Records\n<!-- board -->\nold\n<!-- /board -->\nend\n")
    other = author.copy(tmp_path, "2025-11-22_Bad")
    change("what_changed", "a | pipe\nand <b>markup</b>")(other)
    good = [check(name, True, "x") for name in verdicts.NEEDED]
    verdicts.write_verdict(folder, good, "Ada")
    verdicts.write_verdict(other, [check("seeds", False, "x")], "Ada")

    def board() -> str:
        call("records", "board", "--records", tmp_path)
        return (tmp_path / "README.md").read_text()

    call("records", "board", "--records", tmp_path, "--check", code=1)
    text = board()
    call("records", "board", "--records", tmp_path, "--check")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "[" in line]
    assert text.endswith("end\n") and "\nold\n" not in text and len(rows) == 2
    good_row = f"|  | [Good]({TRACK}/{NAME}/) | Eve | 2025-11-21 | {Record(folder).mean:.4f} ± "
    assert rows[0].startswith(good_row)
    assert "Not judged yet" in text and "Disputed" in text
    assert all(words in rows[1] for words in ("failed, ", ": seeds", "a \\| pipe and &lt;b"))
    verdicts.write_verdict(folder, [*good, check("retrained", True, "x")], "Bob")
    text = board()
    assert "| 1 | [Good]" not in text and "by Bob (" in text, "a seed of its own gives no rank"
    judged = {"seeds": {"77": {"score": 1.25}, "78": {"score": 1.75}}}
    found = verdicts.Finding("ranked", verdicts.ON_TRAINING, more={"judged": judged})
    assert verdicts.write_finding(folder, found, "Bob", "0123abcd")
    for name, seeds in ((NAME, (75, 76)), ("2025-11-20_Gone", (1, 2)), (NAME, (77, 78))):
        record_draw(tmp_path / TRACK, Draw(name, name, "t", "0123abcd", "2025-11-22", "Bob", seeds))
    text = board()
    assert "| 1 | [Good]" in text and "| 1.5000 ± " in text, "the scores of the judge"
    assert "by an earlier referee; seeds 77, 78 on " in text
    assert "; evaluation 2 of 2 of this folder" in text
    assert "; evaluations so far: 3, of folders: 2\n" in text, "also of what is gone"
    for name, stale in (("README.md", False), ("submission.json", True)):
        edit(folder / name, ("nothing", "something"))
        assert ("changed since" in board()) is stale


@slow
def test_the_repository_s_own_records_are_good_and_on_the_board():
    """The one test whose time grows with the records, by a second each.

    The sandboxed checks of the records are for the one who merges them: verify --all --write.
    """
    said = call("records", "verify", "--all", "--static")
    assert said.endswith(f"\n{len(record_folders(RECORDS))} records, 0 checks failed\n")
    call("records", "board", "--check")


# --- tracks, schema, command line -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo_sp1024", "demo_sp260", "demo_sp4096"])
def test_the_floppy_s_track_is_of_the_demo_corpus(name):
    manifest = helpers.ROOT / f"data/datasets/{name}/manifest.json"
    if not manifest.exists():
        pytest.skip("no demo corpus: python -m data prepare demo")
    made = json.loads(manifest.read_text())
    dataset = load_track(RECORDS / "track_floppy").using(name).dataset
    val = made["files"][0]
    assert (dataset["val_sha256"], dataset["train_sha256"]) == (made["val_sha256"], made["train_sha256"])
    assert (dataset["val_bytes"], dataset["val_tokens"]) == (val["bytes"], val["tokens"] - 1)
    assert dataset["tokenizer_sha256"] == made["tokenizer"]["sha256"]


@pytest.mark.parametrize("name", ["track_10min_16mb", "track_floppy"])
def test_the_script_of_today_keeps_the_rules_of_its_tracks(name):
    script = SimpleNamespace(script=helpers.SCRIPT.read_bytes(), track=load_track(RECORDS / name))
    checks = list(claims.check_script(script))
    assert failed(checks) == set(), checks


def test_errors_are_one_line(tmp_path):
    (tmp_path / "track.json").write_text("[" * 100_000)
    (tmp_path / "naïve").mkdir()
    (tmp_path / "naïve/train_gpt.py").write_text("")
    ascii_only = helpers.clean_environment(LC_ALL="C", PYTHONUTF8="0")
    for args, code in (
        (("verify", tmp_path / "no"), 3),
        (("verify",), 2),
        (("score", tmp_path / "naïve"), 3),
        (("freeze", "logs/ü", "--track", "t", "--name", "a b"), 2),
        (("board", "--records", tmp_path), 3),
    ):
        done = helpers.python("-m", "records", *args, encoding="utf-8", env=ascii_only)
        assert done.returncode == code and "Traceback" not in done.stderr and done.stderr.strip(), args


def test_output_may_be_closed_or_go_away(tmp_path):
    words = f"{sys.executable} -m records verify --static {tmp_path}"
    for shell, code in ((f"{words} >&-", 1), (f"{words} | true; exit ${{PIPESTATUS[0]}}", 141)):
        done = subprocess.run(["bash", "-c", shell], cwd=REPO, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (code, ""), shell
