"""The judge: a rank rests on what it trained itself, and nothing that a submitter wrote has a say in it.

Most tests judge a bigram model in numpy on a tiny copy of the floppy's track: a room takes a second.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from records import judge as command
from records.archive import ranks, verdicts
from records.archive.checks import check, skip
from records.archive.record import Record
from records.archive.tracks import load_track
from records.archive.verdicts import ON_CLAIMS, ON_PAPERS, ON_ROOMS, Finding, read_verdicts
from records.board.entries import load_entries
from records.sandbox import cgroups, pages, predictor
from records.sandbox.limits import WATCHDOG, Limits
from records.verify import __main__ as verify
from records.verify import judging
from tests.kit import record_kit
from tests.kit.data_kit import call, refused
from tests.kit.record_kit import (
    SEEDS,
    TRACK,
    Author,
    edit_json,
    log_value,
    passed_earlier,
    reseal,
    scale_scores,
)

sandboxed = pytest.mark.skipif(not record_kit.HAS_SANDBOX, reason=record_kit.NO_SANDBOX)
bounded = pytest.mark.skipif(
    not record_kit.HAS_SANDBOX or cgroups.find() is None, reason="no bubblewrap or no cgroups: nothing ranks"
)
slow = pytest.mark.slow
NUMPY = (  # the bigram model without torch, which takes seconds to start
    ("import torch\n", ""),
    ("counts = torch.zeros(size, size)", "counts = np.zeros((size, size))"),
    (
        "rows = torch.nn.functional.one_hot(torch.from_numpy(batch), size).float()",
        "pairs = batch[:-1], batch[1:]",
    ),
    ("counts += rows[:-1].T @ rows[1:]", "np.add.at(counts, pairs, 1)"),
    ("counts.numpy()", "counts"),
    ("torch:{torch.__version__}", "torch:none"),
)


def numpy_script() -> str:
    text = record_kit.BIGRAM.read_text()
    for old, new in NUMPY:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def author(tmp_path_factory):
    """The bigram model, frozen; with a record before it that an earlier referee passed."""
    made = Author(tmp_path_factory.mktemp("author"), SEEDS, script=numpy_script(), imports=["numpy"])
    old = made.track / "2025-11-20_Old"
    shutil.copytree(made.folder, old)
    scale_scores(old, 1.2)
    reseal(old)
    passed_earlier(old)
    return made


class Bench:
    """A copy of the track, on which one record is judged."""

    def __init__(self, author: Author, root: Path):
        self.author = author
        self.track = root / TRACK
        self.work = root / "judge"
        shutil.copytree(author.track, self.track)
        self.folder = self.track / author.folder.name

    def words(self, *more: str) -> list[str]:
        data = self.author.data
        places = {"--data": data, "--second": data / "second.jsonl", "--work": self.work}
        pairs = [str(word) for pair in places.items() for word in pair]
        return [str(self.folder), *pairs, "--write", "--by", "Ada", *more]

    def judge(self, *more: str) -> int:
        return command.main(self.words(*more))

    def drawn(self, number: int = 1) -> dict:
        (path,) = self.work.glob(f"*/*/{number}/draw.json")
        return json.loads(path.read_text())

    @property
    def verdict(self) -> dict:
        return read_verdicts(self.track)[self.folder.name]


@pytest.fixture
def bench(author, tmp_path):
    return Bench(author, tmp_path)


# --- true and forged --------------------------------------------------------------------------------------


@pytest.mark.slow
@bounded
def test_a_true_record_is_ranked_by_seeds_that_were_drawn(bench, monkeypatch, capsys):
    """It is stopped in its second room, goes on there, and is not trained again once it is judged."""
    train = judging.train_seed
    trained = []

    def stopped(its, seed, data):
        assert its.drawn == bench.drawn(), "seeds are written down before any of them is trained"
        assert not list(bench.work.rglob("score.json")), "all rooms come first"
        if len(trained) == 1 and not bench.work.joinpath("once").exists():
            bench.work.joinpath("once").touch()
            raise KeyboardInterrupt
        trained.append(seed)
        return train(its, seed, data)

    monkeypatch.setattr(judging, "train_seed", stopped)
    assert bench.judge() == 130
    assert bench.judge() == 0, capsys.readouterr().out
    seeds = bench.drawn()["seeds"]
    assert trained == seeds and len(set(seeds)) == len(SEEDS) and not set(seeds) & set(SEEDS)
    its = bench.verdict
    assert its["verdict"] == "ranked" and its["rests_on"] == "rooms" and its["referee"] and its["machine"]
    judged = its["judged"]
    assert judged["beats"] == "2025-11-20_Old" and judged["gain"] > 0.1 and judged["p"] < 0.01
    assert [*judged["seeds"]] == [str(seed) for seed in seeds] and its["judgings"] == {
        "folder": 1,
        "track": 1,
    }
    claimed = Record(bench.folder).mean
    for one in judged["seeds"].values():
        assert one["score"] == pytest.approx(claimed, abs=0.02) and len(one["artifact_sha256"]) == 64
        assert one["train_flops"] > 0 and one["room_processor_seconds"] > 0
    said = capsys.readouterr().out
    assert "verdict: ranked" in said or bench.judge() == 0
    assert trained == seeds
    (entry, *_) = load_entries(load_track(bench.track))
    assert (
        entry.kind == "records"
        and "judging 1 of this folder" in entry.words
        and entry.beats == judged["beats"]
    )


@pytest.mark.slow
@bounded
def test_forged_logs_edited_artifacts_and_chosen_seeds_have_nothing_to_act_on(bench, capsys):
    """The artifacts know the validation text by heart; a record between claim and truth stands before it."""
    better = bench.track / "2025-11-20_Old"
    scale_scores(better, 0.8 / 1.2 * 1.0)
    reseal(better)
    passed_earlier(better)
    tokens = bench.author.corpus.tokens["val"]
    for seed in SEEDS:
        path = bench.folder / f"model_seed{seed}.ptz"
        counts = np.frombuffer(path.read_bytes(), "<u2").reshape(400, 400).copy()
        np.add.at(counts, (tokens[:-1], tokens[1:]), 30)
        counts[0, 0] = seed
        path.write_bytes(counts.tobytes())
        log_value(bench.folder, seed, "artifact_sha256", verdicts.sha256(counts.tobytes()))
    honest = Record(bench.folder).mean
    scale_scores(bench.folder, 0.5)
    reseal(bench.folder)
    assert bench.judge() == 1
    said = capsys.readouterr().out
    assert "FAIL gain: over 2025-11-20_Old, by the judged scores of both: -" in said, said
    assert "NOT ALIKE" in said and "verdict: fails (gain)" in said
    its = bench.verdict
    assert its["verdict"] == "fails" and its["failed"] == ["gain"]
    assert its["judged"]["mean"] == pytest.approx(honest, abs=0.02)


@pytest.mark.slow
@bounded
def test_a_script_that_fails_in_the_room_fails_and_is_counted(bench, capsys):
    script = bench.folder / "train_gpt.py"
    edited = script.read_text().replace(
        "def main() -> None:\n", "def main() -> None:\n    raise SystemExit(3)\n"
    )
    script.write_text(edited)
    reseal(bench.folder)
    assert bench.judge() == 1
    assert "verdict: fails (room)" in capsys.readouterr().out
    assert bench.judge("--again") == 1
    assert bench.verdict["judgings"] == {"folder": 2, "track": 2}
    assert not set(bench.drawn(1)["seeds"]) & set(bench.drawn(2)["seeds"])


# --- errors of ours ---------------------------------------------------------------------------------------


def test_what_is_missing_here_is_no_verdict(bench, capsys):
    before = (bench.track / "verdicts.json").read_bytes()
    data = bench.author.data
    words = [str(bench.folder), "--data", str(data), "--work", str(bench.work), "--write"]
    assert "the second text, which --second names" in refused(call(command.main, *words, code=2))
    empty = bench.work.parent / "empty"
    empty.mkdir()
    line = refused(call(command.main, *bench.words("--data", str(empty)), code=2))
    assert "has not the track's training shards" in line
    assert (bench.track / "verdicts.json").read_bytes() == before and not bench.work.exists()


@pytest.mark.slow
@sandboxed
def test_an_unknown_seed_and_missing_shards_are_the_verifier_s(bench, tmp_path):
    data = bench.author.data
    words = [str(bench.folder), "--data", str(data), "--second", str(data / "second.jsonl"), "--write"]
    before = (bench.track / "verdicts.json").read_bytes()
    assert "--retrain 9999" in refused(call(verify.main, *words, "--retrain", "9999", code=2))
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    for path in copy.glob("datasets/*/*_train_*.bin"):
        path.unlink()
    line = refused(
        call(verify.main, str(bench.folder), "--data", str(copy), *words[3:], "--retrain", "1", code=2)
    )
    assert "training shards" in line
    (tmp_path / "broken.jsonl").write_text("{")
    words[4] = str(tmp_path / "broken.jsonl")
    assert "broken.jsonl" in refused(call(verify.main, *words, code=2))
    assert (bench.track / "verdicts.json").read_bytes() == before


@pytest.mark.parametrize("option", ["--trust", "--proof-bytes=0", "--proof-bytes=999"])
def test_what_earns_nothing_is_not_kept(bench, option):
    for words in (["--write", option], ["--trust", "--retrain", "any"]):
        with pytest.raises(SystemExit) as done:
            verify.parse_args([str(bench.folder), *words])
        assert done.value.code == 2


# --- verdicts ---------------------------------------------------------------------------------------------

GOOD = [check(name, True, "x") for name in ("score", "second-text", "proof", "sandbox")]


def test_missing_evidence_is_never_a_pass():
    assert verdicts.finding_of(GOOD).verdict == "holds"
    for name in ("score", "second-text", "proof", "sandbox"):
        lines = [line for line in GOOD if line.name != name]
        assert verdicts.finding_of(lines).verdict == "papers"
        assert verdicts.finding_of([*lines, skip(name, "why")]).left == {name: "why"}
        assert verdicts.finding_of([*lines, check(name, False, "x")]).failed == [name]
    without = [line for line in GOOD if line.name != "second-text"]
    assert verdicts.finding_of([*without, skip("second-text", "none")], second=False).verdict == "holds"


def test_a_weaker_verdict_never_takes_the_place_of_a_stronger_one(bench):
    """Of the same folder, that is; and an earlier referee's pass with a retrained seed keeps its rank."""
    folder = bench.track / "2025-11-20_Old"
    passed_earlier(folder, retrained={"what": "x", "by": "Bob", "date": "2025-11-20"})

    def write(word: str, evidence: int) -> str:
        verdicts.write_finding(folder, Finding(word, evidence), "Ada", "abc", {"judgings": {"folder": 7}})
        its = read_verdicts(bench.track)[folder.name]
        assert its["judgings"] == {"folder": 7}
        return its["verdict"]

    assert write("papers", ON_PAPERS) == write("holds", ON_CLAIMS) == "pass"
    assert write("not judged", verdicts.NOTHING) == "pass"
    assert write("ranked", ON_ROOMS) == "ranked"
    assert write("fails", ON_CLAIMS) == write("holds", ON_CLAIMS) == "ranked"
    assert write("fails", ON_ROOMS) == "fails"
    (folder / "submission.json").write_bytes((folder / "submission.json").read_bytes() + b"\n")
    assert write("papers", ON_PAPERS) == "papers"


def test_the_record_before_is_derived_and_a_dispute_moves_it(bench):
    track = load_track(bench.track)
    name = bench.folder.name
    assert ranks.best_before(track, name).name == "2025-11-20_Old"
    edit_json(bench.folder / "submission.json", lambda value: value.update(beats="2020-01-01_Nobody"))
    assert "beats" not in record_kit.failed(list(judging.check_papers(Record(bench.folder))))
    older = bench.track / "2025-11-19_Older"
    shutil.copytree(bench.track / "2025-11-20_Old", older)
    scale_scores(older, 1.1)
    passed_earlier(older)
    edit_json(bench.track / "verdicts.json", lambda kept: kept["2025-11-20_Old"].update(disputed="why"))
    assert ranks.best_before(track, name).name == older.name
    edit_json(bench.track / "verdicts.json", lambda kept: kept[older.name].update(verdict="holds"))
    assert ranks.best_before(track, name) is None, "what is not ranked need not be beaten"


def test_every_judging_of_a_folder_is_paid_for(bench):
    track = load_track(bench.track)
    rival = ranks.best_before(track, bench.folder.name)
    scores = [score / 1.2 for score in rival.scores]
    first, tenth = (ranks.gain_over(rival, scores, track, count) for count in (1, 10))
    assert first.p == tenth.p and tenth.below == first.below / 10


def test_without_cgroups_nothing_is_ranked_and_hidden_seconds_fail(bench):
    record = Record(bench.folder)
    its = judging.Judging(record, bench.work, {"seeds": [5], "number": 1, "sha256": ""})
    room = {"code": 0, "wrong": "", "said": "", "seconds": 9, "processor_seconds": 9, "speed": 5e10}
    room |= {"artifact_bytes": 100, "train_flops": 10, "train_seconds": 1.0, "limits": WATCHDOG}
    lines = list(judging.check_room(its, 5, room))
    assert [line.name for line in lines if line.verdict == "SKIP"] == ["limits"]
    args = argparse.Namespace(read_by=None)
    found = judging.conclude(its, lines, None, args)
    assert found.verdict == "not judged" and "limits" in found.left
    room |= {"limits": "cgroup v2", "processor_seconds": 9 + judging.START_SECONDS + 100}
    assert record_kit.failed(list(judging.check_room(its, 5, room))) == {"work"}


def test_much_new_code_waits_for_a_reader(bench):
    rival = ranks.best_before(load_track(bench.track), bench.folder.name)
    record = Record(bench.folder)
    assert judging.check_code(record, rival, None).verdict == "PASS"
    with open(bench.folder / "train_gpt.py", "a") as file:
        file.write(f"# {secrets.token_hex(5000)}\n")
    record = Record(bench.folder)
    line = judging.check_code(record, rival, None)
    assert line.verdict == "SKIP" and "--read-by NAME" in line.text
    assert judging.check_code(record, rival, "Ada").verdict == "PASS"


# --- pages ------------------------------------------------------------------------------------------------

BITS = 200
SENDER = """
import os, sys
for at, bit in enumerate(sys.argv[1]):
    fd = os.open(f"/room/{at}", os.O_RDONLY)
    if bit == "1":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
"""
READER = """
import os, sys
def absent(at):
    fd = os.open(f"/room/{at}", os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) < 1
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
print("".join(str(int(absent(at))) for at in range(int(sys.argv[1]))))
"""


def in_sandbox(program: str, bound: Path, *words: str) -> str:
    """What a Python program prints in a sandbox that sees some files."""
    line = [os.path.abspath(sys.executable), "-I", "-S", "-c", program, *words]
    process = predictor.launch(
        line, [(bound, "/room", False)], ["numpy"], predictor.Mode(), Limits(), stdout=subprocess.PIPE
    )
    with contextlib.closing(process.stdout):
        said = process.stdout.read().decode().strip()
    assert process.wait() == 0
    return said


@sandboxed
def test_one_sandbox_tells_the_next_nothing_by_which_pages_are_there(tmp_path, monkeypatch):
    """The bits that a reader gets out are a coin's; where no file is read in first, they come through."""
    bound = tmp_path / "room"
    bound.mkdir()
    tmp_path.chmod(0o755)
    bound.chmod(0o755)
    for at in range(BITS):
        (bound / str(at)).write_bytes(secrets.token_bytes(1 << 14))
    os.sync()  # what is not on the disk yet cannot be dropped
    secret = "".join(secrets.choice("01") for _ in range(BITS))

    def hits() -> int:
        in_sandbox(SENDER, bound, secret)
        got = in_sandbox(READER, bound, str(BITS))
        assert len(got) == BITS
        return sum(a == b for a, b in zip(got, secret))

    assert abs(hits() - BITS / 2) <= 4 * (BITS / 4) ** 0.5
    monkeypatch.setattr(pages, "read_in", lambda paths: 0)
    if hits() < 0.95 * BITS:
        pytest.skip("here, pages tell nothing even where no file is read in")
