"""Records: freezing, verifying, the board; and tampered copies of a good record, each failed by its check.

The record is made by real runs of the real script; tests/test_referee.py has what happens in the sandbox.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from data.command import REPO
from records import board, freeze, submission, verdicts, verify
from records.checks import check
from records.files import sha256
from records.folders import TWIN, record_folders
from records.papers import Record
from records.source import check_source
from records.tracks import load_track
from tests import helpers, record_kit
from tests.record_kit import (
    ARTIFACT,
    NAME,
    SEEDS,
    TRACK,
    edit,
    edit_json,
    failed,
    log_value,
    reseal,
    scale_scores,
)

RECORDS = helpers.ROOT / "records"
slow = pytest.mark.slow


@pytest.fixture(scope="session")
def kit(tmp_path_factory):
    return record_kit.Kit(tmp_path_factory.mktemp("records"))


# --- good records -----------------------------------------------------------------------------------------


@slow
def test_a_good_record_passes_every_check_on_paper(kit):
    checks = kit.verify(kit.good, "--static")
    assert failed(checks) == set(), "\n".join(map(str, checks))
    assert len(checks) > 20 and len({line.name for line in checks}) == len(checks)
    assert all(re.fullmatch(r"(PASS|SKIP) [a-z-]+: .+", str(line)) for line in checks)


@slow
@pytest.mark.skipif(not record_kit.HAS_SANDBOX, reason=record_kit.NO_SANDBOX)
def test_a_good_record_passes_in_the_sandbox(kit):
    checks = kit.verify(kit.good, "--proof-bytes", "400")
    assert failed(checks) == set(), "\n".join(map(str, checks))
    names = {line.name for line in checks if line.verdict == "PASS"}
    assert {"score", *record_kit.PROBES} <= names


@slow
def test_the_numbers_are_those_of_the_logs(kit):
    value = json.loads((kit.good / "submission.json").read_text())
    finals = [
        dict(
            line.split(": ", 1)
            for line in (kit.root / f"logs/run{seed}/train.log").read_text().split("\n---\n")[1].splitlines()
        )
        for seed in SEEDS
    ]
    bpb = [float(final["val_bpb"]) for final in finals]
    assert [row["val_bpb"] for row in value["seeds"]] == bpb
    assert value["val_bpb"]["mean"] == pytest.approx(sum(bpb) / 3, abs=1e-8)
    assert (kit.good / "train_gpt.py").read_bytes() == helpers.SCRIPT.read_bytes()
    assert sorted(path.name for path in kit.good.iterdir()) == [
        "README.md",
        *(f"metrics_seed{seed}.jsonl" for seed in SEEDS),
        ARTIFACT,
        "submission.json",
        "train_gpt.py",
        *(f"train_seed{seed}.log" for seed in SEEDS),
    ]


# --- tampered copies --------------------------------------------------------------------------------------


def best_seed_mean(folder):
    path = folder / "submission.json"
    best = min(seed["val_bpb"] for seed in json.loads(path.read_text())["seeds"])
    edit_json(path, lambda v: v["val_bpb"].update(mean=best))
    edit(folder / "README.md", ("#", f"{best} #"))


def change(path, *keys):
    """An edit of submission.json: change(value, key, key, ...) sets the last."""
    *keys, last, value = keys

    def apply(v):
        for key in keys:
            v = v[key]
        v[last] = value

    edit_json(path / "submission.json", apply)


def drop_seed(folder, seed=3):
    for name in (f"train_seed{seed}.log", f"metrics_seed{seed}.jsonl"):
        (folder / name).unlink()


def other_seed(folder):
    """Seed 3 was bad luck: seed 9 is sent instead."""
    for name in ("train_seed{}.log", "metrics_seed{}.jsonl"):
        (folder / name.format(3)).rename(folder / name.format(9))
    edit(folder / "train_seed9.log", ("SEED=3", "SEED=9"))
    log_value(folder, 9, "seed", 9)
    reseal(folder)


def copied_seed(folder):
    """One good run, sent three times."""
    for seed in (2, 3):
        for name in ("train_seed{}.log", "metrics_seed{}.jsonl"):
            shutil.copy(folder / name.format(1), folder / name.format(seed))
        edit(folder / f"train_seed{seed}.log", ("SEED=1", f"SEED={seed}"))
        log_value(folder, seed, "seed", seed)
    reseal(folder)


def padded_artifact(folder):
    """As many bytes as the budget leaves, and one more; sealed again."""
    path = folder / ARTIFACT
    track = load_track(folder.parent)
    room = track["budget_bytes"] - track.code_size((folder / "train_gpt.py").read_bytes())
    path.write_bytes(path.read_bytes().ljust(room + 1, b"\0"))
    log_value(folder, 1, "artifact_bytes", room + 1)
    log_value(folder, 1, "artifact_sha256", sha256(path.read_bytes()))
    reseal(folder)


def triple_byte_pieces(folder):
    """The script's table counts byte pieces as three: more bytes, fewer bits for each."""
    for seed in SEEDS:
        run = submission.read_runs(folder)[seed]
        more = int(run.value("val_bytes") * 1.3)
        log_value(folder, seed, "val_bpb", f"{run.value('val_bpb') * run.value('val_bytes') / more:.8f}")
        log_value(folder, seed, "val_bytes", more)
    reseal(folder)


def fewer_bits(folder):
    """The same, with the count of bytes left as it should be."""
    for seed in SEEDS:
        log_value(folder, seed, "val_bpb", f"{submission.read_runs(folder)[seed].value('val_bpb') * 0.8:.8f}")
    reseal(folder)


def sealed(change_it):
    def apply(folder):
        change_it(folder)
        reseal(folder)

    return apply


def append(code):
    return sealed(
        lambda folder: (folder / "train_gpt.py").write_text(
            (folder / "train_gpt.py").read_text(encoding="utf-8") + code, encoding="utf-8"
        )
    )


def every(name, value):
    return sealed(lambda folder: [log_value(folder, seed, name, value) for seed in SEEDS])


def steps(edit_line):
    """Change each step of seed 2's metrics."""

    def apply(folder):
        path = folder / "metrics_seed2.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(edit_line(line)) + "\n" for line in lines if edit_line(line)))

    return apply


def worse_than(folder):
    """A better record stands there already, and is not the one that is named."""
    better = folder.parent / "2025-11-20_Better"
    shutil.copytree(folder, better)
    scale_scores(better, 0.5)
    reseal(better)
    change(better, "name", "Better")


def small_gain(folder):
    old = folder.parent / "2025-11-20_Old"
    shutil.copytree(folder, old)
    scale_scores(old, 1.0005)
    reseal(old)
    change(folder, "beats", old.name)


def lucky_gain(folder):
    """A gain on average that the spread of the seeds does not bear out."""
    old = folder.parent / "2025-11-20_Old"
    shutil.copytree(folder, old)
    for seed, factor in zip(SEEDS, (0.9, 1.0, 1.4)):
        scale_scores(old, factor, (seed,))
    reseal(old)
    change(folder, "beats", old.name)


def other_machine(folder):
    """A gain over a record that ran on something slower."""
    old = folder.parent / "2025-11-20_Old"
    shutil.copytree(folder, old)
    scale_scores(old, 1.3)
    for seed in SEEDS:
        edit(old / f"train_seed{seed}.log", (" processor:", " processor:Slow "))
    reseal(old)
    change(folder, "beats", old.name)


def slow_speed(folder):
    old = folder.parent / "2025-11-20_Old"
    shutil.copytree(folder, old)
    change(folder, "beats", old.name)
    change(folder, "claim", "speed")


def passed_before(folder, name="2025-11-21_Old", disputed=False):
    """A much better record beside it, which passed; or which somebody doubts."""
    old = folder.parent / name
    shutil.copytree(folder, old)
    scale_scores(old, 0.5)
    reseal(old)
    change(old, "name", "Old")
    verdicts.write_verdict(old, [check("score", True, "x")])
    if disputed:
        edit_json(folder.parent / "verdicts.json", lambda v: v[name].update(disputed="it looks ahead"))


def backdated(folder):
    """Dated before the record that it would have to beat."""
    passed_before(folder, "2025-11-22_Old")


def redated(date):
    def apply(folder):
        change(folder, "date", date)
        folder.rename(folder.with_name(f"{date}_Good"))
        return folder.with_name(f"{date}_Good")

    return apply


def one_slow_step(folder):
    """A pause in the middle does not make the ten minutes longer; the step under way at the end may."""
    log_value(folder, 2, "train_seconds", 75.0)
    steps(
        lambda e: (
            e
            | ({"train_seconds": e["train_seconds"] + 50} if e["event"] == "step" and e["step"] > 10 else {})
        )
    )(folder)
    reseal(folder)


def line_of(name, old, new):
    """Replace bytes in a file of seed 2."""

    def apply(folder):
        path = folder / name
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, 1))

    return apply


HIDDEN = "\ndef _unpack():\n    exec(bytes.fromhex('70617373'))\n"
TAMPERED = {
    # the folder
    "hidden helper file": (lambda f: (f / "helper.py").write_text("x = 1"), "folder"),
    "weights beside the artifact": (lambda f: (f / "extra.bin").write_bytes(bytes(9)), "folder"),
    "hidden folder": (lambda f: (f / ".cache").mkdir(), "folder"),
    "a link to a file elsewhere": (
        lambda f: (
            (f / "train_seed1.log").rename(f.parent / "log"),
            (f / "train_seed1.log").symlink_to(f.parent / "log"),
        ),
        "folder",
    ),
    "a log too many": (lambda f: shutil.copy(f / "train_seed1.log", f / "train_seed7.log"), "folder"),
    "no README": (lambda f: (f / "README.md").unlink(), "folder"),
    "weights in a log": (
        line_of("train_seed2.log", b"\n---\n", b"\n" + b"0" * (5 << 20) + b"\n---\n"),
        "folder",
    ),
    "tokenizer that the track provides": (lambda f: (f / "tokenizer.model").write_bytes(b"x"), "folder"),
    "a pipe": (lambda f: os.mkfifo(f / "train_seed4.log"), "folder"),
    "a link to a file without end": (lambda f: (f / "train_seed4.log").symlink_to("/dev/zero"), "folder"),
    "one seed under two names": (
        lambda f: shutil.copy(f / "train_seed1.log", f / "train_seed01.log"),
        "folder",
    ),
    "one artifact under two names": (
        lambda f: shutil.copy(f / ARTIFACT, f / "model_seed1.int8.ptz"),
        "folder",
    ),
    "a name that is no text": (lambda f: open(os.fsencode(f) + b"/\xff\n.bin", "w").close(), "folder"),
    "a date that is none": (redated("2025-13-45"), "date"),
    "a date to come": (redated((datetime.date.today() + datetime.timedelta(9)).isoformat()), "date"),
    "dated before what passed already": (backdated, "date"),
    "another date": (lambda f: change(f, "date", "2025-11-01"), "names"),
    "another track": (lambda f: change(f, "track", "track_10min_floppy"), "names"),
    # the submission
    "no author": (lambda f: change(f, "author", ""), "schema"),
    "a field of its own": (lambda f: change(f, "rank", 1), "schema"),
    "submission is no JSON": (lambda f: (f / "submission.json").write_text("{"), "schema"),
    "submission too deep": (lambda f: (f / "submission.json").write_text("[" * 100000), "schema"),
    "best-seed mean": (best_seed_mean, "numbers"),
    "one seed polished": (lambda f: change(f, "seeds", 1, "val_bpb", 0.5), "numbers"),
    "spread hidden": (lambda f: change(f, "val_bpb", "std", 0.0), "numbers"),
    "fewer code bytes": (lambda f: change(f, "code_bytes", 9), "numbers"),
    "faster than it was": (lambda f: change(f, "seeds", 0, "train_seconds", 0.5), "numbers"),
    "other hardware": (lambda f: change(f, "hardware", "processor", "abacus"), "numbers"),
    "other settings": (lambda f: change(f, "settings", "values", "ITERATIONS", "99"), "settings"),
    "a setting concealed": (
        lambda f: edit_json(f / "submission.json", lambda v: v["settings"]["given"].remove("ITERATIONS")),
        "settings",
    ),
    "a second verdict in a field": (lambda f: change(f, "track", "x\nPASS score: fine"), "names"),
    "a stride that leaves tokens out": (lambda f: change(f, "evaluation", "stride", 33), "evaluation"),
    "windows that fill the referee's memory": (
        lambda f: change(f, "evaluation", "rows", 4096) or change(f, "evaluation", "window", 1 << 20),
        "evaluation",
    ),
    "README with another score": (lambda f: (f / "README.md").write_text("0.1234 bits per byte"), "readme"),
    # logs
    "edited log": (lambda f: edit(f / "train_seed2.log", ("\nval_bpb: ", "\nval_bpb: 0")), "logs"),
    "edited metrics": (steps(lambda e: e | ({"train_loss": 1.0} if e.get("step") == 5 else {})), "logs"),
    "steps left out": (steps(lambda e: e if e.get("step") != 7 else None), "logs"),
    "a clock that runs backwards": (
        steps(lambda e: e | ({"train_seconds": 0.0} if e.get("step") == 9 else {})),
        "logs",
    ),
    "no validation at the end": (
        steps(lambda e: e if (e["event"], e.get("step")) != ("val", 12) else None),
        "logs",
    ),
    "more tokens than steps": (every("tokens_seen", 999), "logs"),
    "unquantized score made up": (every("val_bpb_unquantized", "0.10000000"), "logs"),
    "log without an end": (lambda f: edit(f / "train_seed1.log", ("\n---\n", "\n")), "hashes"),
    "log with nan": (lambda f: edit(f / "train_seed1.log", ("\nval_loss: ", "\nval_loss: nan")), "numbers"),
    "two ends": (line_of("train_seed2.log", b"\n---\n", b"\n---\nval_bpb: 1.0\n---\n"), "logs"),
    "one value twice": (line_of("train_seed2.log", b"\n---\n", b"\n---\nval_bpb: 1.0\n"), "logs"),
    "NUL in a log": (line_of("train_seed2.log", b"preset: smoke", b"preset: sm\0oke"), "logs"),
    "events after the end": (
        lambda f: (f / "metrics_seed2.jsonl").open("a").write('{"event": "note"}\n'),
        "logs",
    ),
    "one key twice": (line_of("metrics_seed2.jsonl", b'{"event"', b'{"event": "x", "event"'), "logs"),
    "a loss that is not a number": (
        steps(lambda e: e | ({"train_loss": float("nan")} if e.get("step") == 11 else {})),
        "logs",
    ),
    "JSON too deep": (lambda f: (f / "metrics_seed2.jsonl").open("a").write("[" * 100000), "logs"),
    "bits of nothing": (every("val_bpb", "0.00000000"), "implied-bytes"),
    "a number as Python alone reads it": (lambda f: log_value(f, 2, "val_bpb", "1_0.5"), "numbers"),
    "swapped logs": (
        lambda f: [
            (f / "x").write_bytes((f / "train_seed1.log").read_bytes()),
            (f / "train_seed2.log").replace(f / "train_seed1.log"),
            (f / "x").replace(f / "train_seed2.log"),
        ],
        "seed-names",
    ),
    # script
    "swapped script": (lambda f: (f / "train_gpt.py").write_text(record_kit.FOREIGN), "script-hash"),
    "script with one more space": (lambda f: (f / "train_gpt.py").open("a").write(" "), "script-hash"),
    "script that does not compile": (append("\ndef (:\n"), "compiles"),
    "script without the contract": (
        sealed(lambda f: edit(f / "train_gpt.py", ("def load_predictor", "def load_it"))),
        "compiles",
    ),
    "a second script that no log knows": (lambda f: (f / TWIN).write_text("x = 1"), "script-hash"),
    "a second script with a pickle": (sealed(lambda f: (f / TWIN).write_text("import pickle")), "no-pickle"),
    "import of what is not listed": (append("\nimport scipy\n"), "imports"),
    "import within a function": (append("\ndef _f():\n    from requests import get\n"), "imports"),
    "pickle": (append("\nimport pickle\n"), "no-pickle"),
    "torch.load": (append("\ndef _f(x):\n    return torch.load(x, weights_only=False)\n"), "no-pickle"),
    "packed code": (append(HIDDEN), "no-packed-code"),
    "packed code by another name": (
        append("\nimport builtins\n_run = getattr(builtins, 'ex' + 'ec')\n"),
        "no-packed-code",
    ),
    "code through marshal": (append("\nimport marshal\n"), "no-packed-code"),
    "unpickler by another name": (append("\nimport numpy as n\n_x = n.load\n"), "no-pickle"),
    "native code": (append("\ndef _f():\n    torch.ops.load_library('x')\n"), "no-packed-code"),
    "modules by another name": (append("\nfrom sys import modules as _m\n"), "no-packed-code"),
    "builtins by text": (append("\n_e = globals()['__buil' + 'tins__']\n"), "no-packed-code"),
    "code for another Python": (append("\nimport sys as _s\n_e = _s.executable\n"), "no-packed-code"),
    "the shell through another module": (append("\n_e = torch.os.system\n"), "no-packed-code"),
    "classes of all objects": (append("\n_e = ().__class__.__base__\n"), "no-packed-code"),
    "an encoding that hides code": (
        sealed(
            lambda f: (f / "train_gpt.py").write_bytes(
                b"# coding: raw_unicode_escape\n" + (f / "train_gpt.py").read_bytes()
            )
        ),
        "compiles",
    ),
    "text that runs backwards": (append("\n_e = '\u202e'\n"), "compiles"),
    "many small texts": (
        append("\n" + "".join(f"_t{i} = {'x' * 1900!r}\n" for i in range(40))),
        "no-large-constants",
    ),
    "many small numbers": (
        append("\n" + "".join(f"_n{i} = ({'7, ' * 250})\n" for i in range(40))),
        "no-large-constants",
    ),
    "table in a call": (append(f"\n_t = print({'7, ' * 300})\n"), "no-large-constants"),
    "table in a comment": (append("\n# " + "x" * 3000), "no-large-constants"),
    "table in a text": (append(f"\nT = {'x' * 3000!r}\n"), "no-large-constants"),
    "table of numbers": (append(f"\nT = {list(range(300))}\n"), "no-large-constants"),
    "table in one number": (append(f"\nT = {3**900}\n"), "no-large-constants"),
    "table in a docstring": (append(f"\ndef _f():\n    {'y' * 3000!r}\n"), "no-large-constants"),
    # limits and data
    "artifact with one more byte than the budget": (padded_artifact, "bytes"),
    "artifact of another run": (lambda f: (f / ARTIFACT).write_bytes(b"x"), "artifact"),
    "no artifact": (lambda f: (f / ARTIFACT).unlink(), "artifact"),
    "artifact that is a pickle": (
        lambda f: (f / ARTIFACT).write_bytes(b"\x80\x04N."),
        "artifact-format",
    ),
    "trained too long": (every("train_seconds", 75.0), "train-seconds"),
    "one long step in the middle": (one_slow_step, "train-seconds"),
    "evaluated too long": (every("eval_seconds", 75.0), "eval-seconds"),
    "wrong val split": (every("val_sha256", "ab" * 32), "data-val"),
    "other training data": (every("train_sha256", "ab" * 32), "data-train"),
    "other tokenizer": (every("tokenizer_sha256", "ab" * 32), "data-tokenizer"),
    "tokens left out": (every("val_tokens", 100), "val-tokens"),
    "partial validation": (lambda f: log_value(f, 2, "val_bpb", "1.00000000 partial"), "whole"),
    "byte pieces counted as three": (triple_byte_pieces, "val-bytes"),
    "fewer bits than the nats": (fewer_bits, "implied-bytes"),
    # seeds and claims
    "a seed left out": (sealed(drop_seed), "seeds"),
    "another seed instead": (other_seed, "seeds"),
    "one run three times": (copied_seed, "seed-runs"),
    "does not beat the best": (worse_than, "beats"),
    "beats itself": (lambda f: change(f, "beats", f.name), "beats"),
    "beats a record that is not there": (lambda f: change(f, "beats", "2025-01-01_Nobody"), "beats"),
    "gain below the least": (small_gain, "gain"),
    "gain by luck": (lucky_gain, "gain"),
    "another machine than the record before": (other_machine, "machine"),
    "no sooner": (slow_speed, "gain"),
}


# One sin, one line: else a reader cannot see what is wrong. Other checks may fail beside these:
LONELY = (
    "no-pickle no-packed-code no-large-constants imports seeds data-val gain folder schema implied-bytes "
    "train-seconds eval-seconds"
)
IN_COMPANY = {
    "a log too many",
    "a link to a file without end",
    "a pipe",
    "bits of nothing",
    "no README",
    "one long step in the middle",
    "submission is no JSON",
    "submission too deep",
    "tokenizer that the track provides",
}


@slow
@pytest.mark.parametrize("kind", TAMPERED)
def test_a_tampered_record_is_failed_by_its_check(kit, tmp_path, kind):
    folder = kit.copy(tmp_path)
    tamper, name = TAMPERED[kind]
    moved = tamper(folder)
    checks = kit.verify(moved if isinstance(moved, Path) and moved.is_dir() else folder, "--static")
    assert name in failed(checks), "\n".join(map(str, checks))
    if name in LONELY.split() and kind not in IN_COMPANY:
        assert failed(checks) == {name}
    lines = [str(line) for line in checks if line.name == name and line.verdict == "FAIL"]
    assert len(lines[0].splitlines()) == 1


@slow
def test_a_record_that_earned_it_passes(kit, tmp_path):
    folder = kit.copy(tmp_path, "2025-11-22_New")
    old = kit.copy(tmp_path, "2025-11-20_Old")
    scale_scores(old, 1.3)
    reseal(old)
    change(folder, "beats", old.name)
    change(folder, "name", "New")
    change(folder, "date", "2025-11-22")
    checks = kit.verify(folder, "--static")
    assert failed(checks) == set() and any(c.name == "gain" and c.verdict == "PASS" for c in checks)


@slow
def test_nobody_must_beat_a_disputed_record(kit, tmp_path):
    folder = kit.copy(tmp_path)
    passed_before(folder, "2025-11-20_Old", disputed=True)
    assert failed(kit.verify(folder, "--static")) == set()


@slow
def test_a_record_is_trained_again(kit):
    """The same seed on the same machine gives the same score."""
    again = verify.retrain(Record(kit.good), 2, kit.data)
    score = submission.read_runs(kit.good)[2].final["val_bpb"]
    assert again.verdict == "PASS" and f"seed 2 gives {score}," in again.text


# --- freeze -----------------------------------------------------------------------------------------------


def refusal(capsys, args: list[str], code: int = 2) -> str:
    """Run records.freeze; the one line that it says."""
    assert freeze.main(args) == code
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    return line


@slow
def test_freeze_refuses(kit, capsys, tmp_path):
    before = sorted(kit.records.rglob("*"))
    assert "left out" in refusal(capsys, kit.freeze_args(name="Two", runs=(1, 2)))
    assert "never overwritten" in refusal(capsys, kit.freeze_args())
    other = str(RECORDS / "verify.py")
    assert "--script" in refusal(capsys, kit.freeze_args("--script", other, name="Other"))
    away = tmp_path / "logs"
    for seed in (1, 2):
        shutil.copytree(kit.root / f"logs/run{seed}", away / f"run{seed}")
    args = [str(away / f"run{seed}") for seed in (1, 2)] + kit.freeze_args(name="Few")[3:]
    assert "are missing" in refusal(capsys, args)
    edit_json(away / "run2/config.json", lambda v: v["settings"].update(matrix_lr=0.5))
    assert "MATRIX_LR is 0.5" in refusal(capsys, args)
    (away / "run2/train.log").write_text("killed")
    refusal(capsys, args, 3)
    assert sorted(kit.records.rglob("*")) == before


@slow
def test_a_record_of_the_twin_holds_both_scripts(kit, tmp_path):
    """The code is train_gpt.py followed by train_gpt_mlx.py: hashed, counted and looked at together."""
    script = tmp_path / "train_gpt.py"
    twin = tmp_path / TWIN
    script.write_bytes((kit.good / "train_gpt.py").read_bytes())
    twin.write_text("import train_gpt\n")
    code = script.read_bytes() + twin.read_bytes()
    for seed in SEEDS:
        shutil.copytree(kit.root / f"logs/run{seed}", tmp_path / f"logs/run{seed}")
        log = tmp_path / f"logs/run{seed}/train.log"
        old = submission.read_runs(kit.good)[seed].value("script_sha256")
        edit(log, (old, sha256(code)))
        edit(log.with_name("metrics.jsonl"), (old, sha256(code)))
    runs = [str(tmp_path / f"logs/run{seed}") for seed in SEEDS]
    args = [*runs, *kit.freeze_args("--script", str(twin), name="Both")[3:], "--records", str(tmp_path)]
    shutil.copytree(kit.records / TRACK, tmp_path / TRACK, ignore=lambda *_: [NAME])
    folder = freeze.freeze(freeze.parse_args(args))
    assert (folder / "train_gpt.py").read_bytes() + (folder / TWIN).read_bytes() == code
    told = json.loads((folder / "submission.json").read_text())
    assert told["code_bytes"] == len(zlib.compress(code, 9)) and told["sha256"]["script"] == sha256(code)
    edit(folder / "README.md", ("# Both", "# both"))
    assert "python train_gpt_mlx.py" in (folder / "README.md").read_text()
    change(folder, "claim", "none")
    failures = failed(kit.verify(folder, "--static"))
    assert failures <= {"logs", "numbers"}, failures


# --- board ------------------------------------------------------------------------------------------------


@slow
def test_the_board_shows_what_was_verified(kit, tmp_path):
    folder = kit.copy(tmp_path)
    (tmp_path / "README.md").write_text("# Records\n<!-- board -->\nold\n<!-- /board -->\nend\n")
    other = kit.copy(tmp_path, "2025-11-22_Bad")
    change(other, "name", "Bad")
    change(other, "what_changed", "a | pipe\nand <b>markup</b>")
    verdicts.write_verdict(folder, [check("score", True, "x"), check("a", True, "y")])
    verdicts.write_verdict(other, [check("seeds", False, "x")])
    assert board.main(["--records", str(tmp_path), "--check"]) == 1
    assert board.main(["--records", str(tmp_path)]) == 0
    first = {path: path.read_bytes() for path in (tmp_path / "README.md", tmp_path / TRACK / "board.svg")}
    assert board.main(["--records", str(tmp_path), "--check"]) == 0
    text = first[tmp_path / "README.md"].decode()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "[" in line]
    mean = json.loads((folder / "submission.json").read_text())["val_bpb"]["mean"]
    assert text.endswith("end\n") and "old" not in text and len(rows) == 2
    assert rows[0].startswith(f"| 1 | [Good]({TRACK}/{NAME}/) | Ada |") and f"{mean:.4f} ± " in rows[0]
    assert (
        "Disputed" in text
        and "failed, " in rows[1]
        and ": seeds" in rows[1]
        and "a \\| pipe and &lt;b" in rows[1]
    )
    for field, stale in (("what_changed", False), ("author", True)):  # words may still be mended
        change(folder, field, "something else now")
        board.main(["--records", str(tmp_path)])
        assert ("changed since" in (tmp_path / "README.md").read_text()) is stale


def test_the_repository_s_own_records_are_good():
    """The sandboxed checks of the records are for the one who merges them: verify --all --write."""
    options = verify.parse_args(["--all", "--static"])
    for folder in record_folders(RECORDS):
        checks = list(verify.verify(folder, options))
        assert failed(checks) == set(), (folder, checks)


@slow
def test_the_board_is_up_to_date():
    assert board.main(["--check"]) == 0


# --- tracks, schema, command line -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["track_10min_16mb", "track_10min_floppy"])
def test_tracks_are_by_the_schema(name):
    rules = load_track(RECORDS / name)
    assert rules["budget_bytes"] == {"track_10min_16mb": 16_000_000, "track_10min_floppy": 1_474_560}[name]


def test_the_floppy_s_track_is_of_the_demo_corpus():
    manifest = helpers.ROOT / "data/datasets/demo_sp1024/manifest.json"
    if not manifest.exists():
        pytest.skip("no demo corpus: python -m data.prepare demo")
    made = json.loads(manifest.read_text())
    track = load_track(RECORDS / "track_10min_floppy")
    dataset = track.dataset
    val = made["files"][0]
    assert (dataset["val_sha256"], dataset["train_sha256"]) == (made["val_sha256"], made["train_sha256"])
    assert (dataset["val_bytes"], dataset["val_tokens"]) == (val["bytes"], val["tokens"] - 1)
    assert dataset["tokenizer_sha256"] == made["tokenizer"]["sha256"]


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("track_10min_16mb", [helpers.SCRIPT]),
        ("track_10min_floppy", [helpers.SCRIPT, helpers.MLX_SCRIPT]),
    ],
)
def test_the_scripts_of_today_keep_the_rules_of_their_tracks(name, paths):
    scripts = {path.name: path.read_bytes() for path in paths}
    checks = list(check_source(scripts, load_track(RECORDS / name)))
    assert failed(checks) == set(), checks


def command(*args, **environment) -> subprocess.CompletedProcess:
    """A tool as a process, from the repository's folder."""
    words = [sys.executable, "-m", *map(str, args)]
    kept = helpers.clean_environment(**environment)
    return subprocess.run(words, capture_output=True, encoding="utf-8", cwd=REPO, env=kept)


def test_errors_are_one_line(tmp_path):
    (tmp_path / "track.json").write_text("[" * 100_000)
    (tmp_path / "naïve").mkdir()
    (tmp_path / "naïve/train_gpt.py").write_text("")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    for args, code in (
        (("records.verify", tmp_path / "no"), 3),
        (("records.verify",), 2),
        (("records.referee", "score", tmp_path / "naïve"), 3),
        (("records.freeze", "logs/ü", "--track", "t", "--name", "a b"), 2),
        (("records.board", "--records", tmp_path), 3),
    ):
        done = command(*args, **ascii_only)
        assert done.returncode == code and "Traceback" not in done.stderr and done.stderr.strip(), args


def test_output_may_be_closed_or_go_away(tmp_path):
    words = f"{sys.executable} -m records.verify --static {tmp_path}"
    for shell, code in ((f"{words} >&-", 1), (f"{words} | true; exit ${{PIPESTATUS[0]}}", 141)):
        done = subprocess.run(["bash", "-c", shell], cwd=REPO, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (code, ""), shell


@slow
def test_a_verification_that_fails_exits_with_1(kit, tmp_path, capsys):
    bad = kit.copy(tmp_path)
    drop_seed(bad)
    assert verify.main([str(bad), "--static"]) == 1
    out = capsys.readouterr().out
    assert "FAIL seeds: " in out and out.endswith("1 records, 2 checks failed\n")
