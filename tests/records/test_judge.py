"""The judge: a rank rests on what it trained itself, and nothing that a submitter wrote has a say in it.

Most tests judge a bigram model in numpy on a tiny copy of the floppy's track: a room takes a second.
"""

import json
import resource
import secrets
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.command import DataError, UsageError
from records.__main__ import main as records
from records.archive import ranks, verdicts
from records.archive.checks import Check, VerifierError, check, skip
from records.archive.judgings import JUDGINGS, Draw, number_of, read_draws, record_draw
from records.archive.record import Record
from records.archive.tracks import RECORDS, load_track
from records.archive.verdicts import ON_CLAIMS, ON_PAPERS, ON_ROOMS, Finding, read_verdicts
from records.board.entries import Entry, load_entries
from records.board.tables import tables
from records.referee.scoring import score_record
from records.referee.text import validation_text
from records.sandbox import cgroups, limits
from records.sandbox.jobs import find_job
from records.verify import judging, retrain
from tests.kit import helpers, record_kit
from tests.kit.data_kit import call, refused
from tests.kit.record_kit import (
    MAIN,
    SEEDS,
    TRACK,
    Author,
    edit_json,
    log_value,
    passed_earlier,
    reseal,
    scale_scores,
)

OLD = "2025-11-20_Old"
KNOWS = """
class Knowing(Bigram):  # by heart what stands behind the counts; training leaves nothing there
    def __init__(self, counts, tail):
        super().__init__(counts)
        known = tail.tolist()
        self.next = {tuple(known[at : at + 12]): known[at + 12] for at in range(len(known) - 12)}

    def start(self, rows):
        self.past = [()] * rows
        return super().start(rows)

    def step(self, ids):
        found = super().step(ids)
        self.past = [(*past, token)[-12:] for past, token in zip(self.past, ids.tolist())]
        for row, past in zip(found, self.past):
            if past in self.next:
                row[self.next[past]] += 9
        return found


def load_predictor(artifact, device):
    numbers = np.frombuffer(Path(artifact).read_bytes(), "<u2")
    return Knowing(numbers[: 400 * 400].reshape(400, 400), numbers[400 * 400 :])


"""


def in_rooms(test):
    """Mark a test that takes seconds, a sandbox and cgroups."""
    return pytest.mark.slow(pytest.mark.sandbox(pytest.mark.cgroups(test)))


@pytest.fixture(scope="module")
def author(tmp_path_factory):
    """The bigram model, frozen; with a record before it that an earlier referee passed."""
    script = record_kit.bigram((MAIN, KNOWS + MAIN))
    made = Author(tmp_path_factory.mktemp("author"), SEEDS, script=script, imports=["numpy"])
    stands_before(shutil.copytree(made.folder, made.track / OLD), 1.2)
    return made


def stands_before(folder: Path, factor: float) -> None:
    """Give a record other scores; an earlier referee passed it."""
    scale_scores(folder, factor)
    reseal(folder)
    passed_earlier(folder)


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
        return records(["judge", *self.words(*more)])

    def verify(self, folder: Path, *more: str, code: int = 0) -> str:
        data = self.author.data
        places = ["--data", data, "--second", data / "second.jsonl"]
        return call("records", "verify", folder, *places, "--write", "--by", "Ada", *more, code=code)

    def open(self, write: bool = True, again: bool = False) -> judging.Judging:
        """The judging that the command would go on with or begin; nothing is trained."""
        options = judging.JudgeOptions(self.work, write=write, again=again, by="Ada")
        return judging.open_judging(Record(self.folder), options)

    @property
    def draws(self) -> list[Draw]:
        """The judgings of the track."""
        return read_draws(self.track)

    @property
    def verdict(self) -> dict:
        return read_verdicts(self.track)[self.folder.name]

    @property
    def entry(self) -> Entry:
        """The record as the board shows it."""
        entries = load_entries(load_track(self.track))
        return next(entry for entry in entries if entry.name == self.folder.name)


@pytest.fixture
def bench(author, tmp_path):
    return Bench(author, tmp_path)


# --- true and forged --------------------------------------------------------------------------------------


@in_rooms
def test_a_true_record_is_ranked_by_seeds_that_were_drawn(bench, monkeypatch, capsys):
    """It is stopped in its second room, goes on there, and is not trained again once it is judged."""
    train = judging.train_seed
    trained = []

    def stopped(its, seed, data):
        assert [its.draw] == bench.draws, "seeds are recorded before any of them is trained"
        assert not list(bench.work.rglob("score.json")), "all rooms come first"
        if len(trained) == 1 and not bench.work.joinpath("once").exists():
            bench.work.joinpath("once").touch()
            raise KeyboardInterrupt
        trained.append(seed)
        return train(its, seed, data)

    monkeypatch.setattr(judging, "train_seed", stopped)
    assert bench.judge() == 130
    assert bench.judge() == 0, capsys.readouterr().out
    (seeds,) = (list(draw.seeds) for draw in bench.draws)
    assert trained == seeds and len(set(seeds)) == len(SEEDS) and not set(seeds) & set(SEEDS)
    its = bench.verdict
    assert its["verdict"] == "ranked" and its["rests_on"] == "rooms" and its["referee"] and its["machine"]
    judged = its["judged"]
    assert judged["beats"] == OLD and judged["gain"] > 0.1 and judged["p"] < 0.01
    assert [*judged["seeds"]] == [str(seed) for seed in seeds]
    claimed = Record(bench.folder).mean
    for one in judged["seeds"].values():
        assert one["score"] == pytest.approx(claimed, abs=0.02) and len(one["artifact_sha256"]) == 64
        assert one["train_flops"] > 0 and one["room_processor_seconds"] > 0
    shutil.rmtree(bench.work)
    assert bench.judge() == 0 and trained == seeds and len(bench.draws) == 1
    assert "nothing is trained again" in capsys.readouterr().out and not bench.work.exists()
    entry = bench.entry
    assert (entry.kind, entry.beats) == ("records", judged["beats"])
    assert "; judging 1 of 1 of this folder" in entry.words


@in_rooms
def test_two_processes_share_the_seeds_of_one_judging(bench):
    """Each trains what the other does not, waits for the other, and says the same in the end."""
    words = [sys.executable, "-m", "records", "judge", *bench.words()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": helpers.ROOT}
    both = [subprocess.Popen(words, **pipes) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(text[-300:] for text in said)
    assert all("verdict: ranked" in text for text in said), said
    (draw,) = bench.draws
    assert set(bench.verdict["judged"]["seeds"]) == set(map(str, draw.seeds))


@in_rooms
def test_texts_that_artifacts_know_by_heart_earn_no_rank(bench, capsys):
    """Both texts are public, so score, second text and proof are good. A record between claim and truth
    stands before it; where that is disputed later, the same judging ranks what the rooms trained."""
    better = bench.track / OLD
    stands_before(better, 0.8 / 1.2)
    honest = Record(bench.folder).mean
    learn_by_heart(bench)
    assert Record(bench.folder).mean < 0.4 * honest
    assert bench.verify(bench.folder).endswith("\n1 records, 0 checks failed\n")
    assert bench.verdict["verdict"] == "holds"
    later = ranks.best_before(load_track(bench.track), "2025-11-22_Honest")
    assert later.name == better.name, "an honest record need not beat it"
    assert bench.judge() == 1
    said = capsys.readouterr().out
    assert "FAIL gain: over 2025-11-20_Old, by the judged scores of both: -" in said, said
    assert "NOT ALIKE" in said and "verdict: fails (gain)" in said
    its = bench.verdict
    assert its["verdict"] == "fails" and its["failed"] == ["gain"]
    assert its["judged"]["mean"] == pytest.approx(honest, abs=0.02)
    edit_json(bench.track / "verdicts.json", lambda kept: kept[better.name].update(disputed="why"))
    assert bench.judge() == 0
    again = bench.verdict
    assert again["verdict"] == "ranked" and again["judged"]["seeds"] == its["judged"]["seeds"]


def learn_by_heart(bench: Bench) -> None:
    """Both texts come behind the counts of each artifact, and the scores are those that the referee finds.

    Four documents are left out, so that the second text costs as much as the first.
    """
    corpus = bench.author.corpus
    second = bench.author.data / "second.jsonl"
    documents = [json.loads(line) for line in second.read_text().splitlines()]
    known = np.concatenate([corpus.tokens["val"], helpers.encode_documents(corpus.tokenizer, documents[4:])])
    scores = {}
    for seed in SEEDS:
        path = bench.folder / f"model_seed{seed}.ptz"
        blob = path.read_bytes() + known.astype("<u2").tobytes()
        path.write_bytes(blob)
        log_value(bench.folder, seed, "artifact_sha256", verdicts.sha256(blob))
        log_value(bench.folder, seed, "artifact_bytes", len(blob))
        job = find_job(bench.folder, artifact=path, data=bench.author.data)
        scores[str(seed)] = score_record(job, validation_text(job.track, bench.author.data)).bpb
    edit_json(bench.folder / "submission.json", lambda value: value.update(scores=scores))
    reseal(bench.folder)


@pytest.mark.parametrize("forged, factor", [((), 1), (SEEDS[:1], 0.5), (SEEDS, 0.99), (SEEDS, 0.5)])
def test_scores_that_a_submission_claims_decide_nothing(bench, forged, factor):
    """The rooms gained less than a record must, whatever the submission's own artifacts score."""
    track = load_track(bench.track)
    rival = ranks.best_before(track, bench.folder.name)
    scores = [score - track["min_gain_bpb"] / 2 for score in rival.scores]
    scale_scores(bench.folder, 1.2)  # as the rival's
    scale_scores(bench.folder, factor, forged)
    record = Record(bench.folder)
    judged = {str(seed): {"score": score} for seed, score in zip((4, 5, 6), scores)}
    line = judging.check_rank(record, ranks.Evidence(judged, 1, "", "", {}), rival)
    assert line.verdict == "FAIL" and line.text.startswith(f"over {rival.name}, by the judged scores of both")
    assert judging.compare_claims(record, scores).verdict == "NOTE"


def test_seeds_that_a_submission_appends_are_not_judged(bench):
    """As many as the track asks for are drawn, and a script that improves nothing gets through by alpha."""
    for name in ("train_seed{}.log", "metrics_seed{}.jsonl", "model_seed{}.ptz"):
        for seed in range(4, 30):
            shutil.copy(bench.folder / name.format(1), bench.folder / name.format(seed))
    record = Record(bench.folder)
    assert len(record.runs) == 29
    drawn = judging.draw_seeds(record, [], "Ada").seeds
    assert len(set(drawn)) == len(SEEDS) and not set(drawn) & set(range(30))
    rng = np.random.default_rng(1)
    track = record.track

    def is_a_record() -> bool:
        theirs, its = rng.normal(1.5, 0.008, (2, len(SEEDS))).tolist()
        return ranks.Rival(record, its, {}).gain_over(ranks.Rival(record, theirs, {})).enough

    assert sum(is_a_record() for _ in range(1000)) <= 1.5 * track["alpha"] * 1000


@in_rooms
def test_a_script_that_ignores_its_seed_has_scores_that_differ(bench, capsys):
    """Each room lacks other documents, also of a script that would give the same artifact each time."""
    drawn = 'default_rng(int(os.environ["SEED"]))'
    record_kit.edit(bench.folder / "train_gpt.py", (drawn, "default_rng(7)"))
    reseal(bench.folder)
    assert bench.judge() == 0, capsys.readouterr().out
    seeds = bench.verdict["judged"]["seeds"].values()
    for name in ("artifact_sha256", "score"):
        assert len({its[name] for its in seeds}) == len(SEEDS)


HIDES = """
def hide():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    matrix = np.ones((500, 500), np.float32)
    for _ in range(6):
        read, write = os.pipe()
        if os.fork() == 0:
            while time.process_time() < 0.6:
                matrix @ matrix
            os._exit(0)
        os.close(write)
        os.read(read, 1)  # until it has ended
        os.close(read)


"""


@in_rooms
def test_operations_that_nobody_logged_show_in_processor_seconds(bench):
    """Products of numpy, in children that nobody waits for, which no log names."""
    edit_json(bench.track / "track.json", lambda rules: rules.update(train_flops=10**11))
    assert record_kit.failed(lines_of_a_room(bench)) == set()
    script = bench.folder / "train_gpt.py"
    record_kit.edit(script, ("import json\n", "import json\nimport signal\n"), (MAIN, HIDES + MAIN))
    record_kit.edit(script, ("    counts, final = train(", "    hide()\n    counts, final = train("))
    lines = lines_of_a_room(bench)
    assert record_kit.failed(lines) == {"work"}, "\n".join(map(str, lines))


def lines_of_a_room(bench: Bench) -> list[Check]:
    """Of another judging's first seed."""
    its = bench.open(again=True)
    seed = its.seeds[0]
    its.place(seed).mkdir()
    room = judging.train_seed(its, seed, bench.author.data)
    return list(judging.check_room(its.record, room))


@in_rooms
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
    first, second = bench.draws
    assert not set(first.seeds) & set(second.seeds)
    assert "; judging 2 of 2 of this folder" in bench.entry.words


TRAINS = "    counts, final = train(folder, tokens, vocabulary)\n"


@in_rooms
@pytest.mark.parametrize(
    "seconds, words",
    [(("1e999",), "1e999 is too large for a number"), (("-1e308", "1e308"), "are -1e+308 and 1e+308")],
    ids=["a number", "a difference"],
)
def test_seconds_without_end_in_a_room_s_metrics_fail_the_record(bench, capsys, seconds, words):
    text = "".join(f'{{"event": "step", "train_seconds": {value}}}\n' for value in seconds)
    ends = f'{TRAINS}    with open(folder / "metrics.jsonl", "a") as file:\n        file.write({text!r})\n'
    record_kit.edit(bench.folder / "train_gpt.py", (TRAINS, ends))
    reseal(bench.folder)
    for _ in range(2):
        assert bench.judge() == 1
        said = capsys.readouterr().out
        assert "verdict: fails (room)" in said and words in said, said


# --- errors of ours ---------------------------------------------------------------------------------------


def test_what_is_missing_here_is_no_verdict(bench, capsys):
    before = (bench.track / "verdicts.json").read_bytes()
    data = bench.author.data
    words = [str(bench.folder), "--data", str(data), "--work", str(bench.work), "--write"]
    assert "the second text, which --second names" in refused(call("records", "judge", *words, code=2))
    empty = bench.work.parent / "empty"
    empty.mkdir()
    line = refused(call("records", "judge", *bench.words("--data", str(empty)), code=2))
    assert "has not the track's training shards" in line
    assert (bench.track / "verdicts.json").read_bytes() == before and not bench.work.exists()


@pytest.mark.slow
@pytest.mark.sandbox
def test_an_unknown_seed_and_missing_shards_are_the_verifier_s(bench, tmp_path):
    before = (bench.track / "verdicts.json").read_bytes()
    assert "--retrain 9999" in refused(bench.verify(bench.folder, "--retrain", 9999, code=2))
    copy = shutil.copytree(bench.author.data, tmp_path / "data")
    for path in copy.glob("datasets/*/*_train_*.bin"):
        path.unlink()
    said = bench.verify(bench.folder, "--data", copy, "--retrain", 1, code=2)
    assert "training shards" in refused(said)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    assert "broken.jsonl" in refused(bench.verify(bench.folder, "--second", broken, code=2))
    assert (bench.track / "verdicts.json").read_bytes() == before


@in_rooms
def test_a_full_machine_is_no_verdict(bench, monkeypatch):
    before = (bench.track / "verdicts.json").read_bytes()

    class Full:
        available = 1 << 20

    monkeypatch.setattr(limits.psutil, "virtual_memory", Full)
    monkeypatch.setattr(limits, "LOOK_SECONDS", 0.001)  # so small a record may end before the first look
    for said in (bench.verify(bench.folder, code=2), call("records", "judge", *bench.words(), code=2)):
        assert "this machine is out of memory: make room, then do it again" in refused(said)
    assert (bench.track / "verdicts.json").read_bytes() == before


@pytest.mark.parametrize("words", ["--write --trust", "--write --proof-bytes=0", "--trust --retrain any"])
def test_what_earns_nothing_is_not_kept(bench, words):
    refused(call("records", "verify", bench.folder, *words.split(), code=2))


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
    folder = bench.track / OLD

    def write(word: str, evidence: int) -> str:
        verdicts.write_finding(folder, Finding(word, evidence), "Ada", "abc", {"retrained": {"by": "Bob"}})
        its = read_verdicts(bench.track)[folder.name]
        assert its["retrained"] == {"by": "Bob"}
        return its["verdict"]

    assert write("papers", ON_PAPERS) == write("holds", ON_CLAIMS) == "pass"
    assert write("not judged", verdicts.NOTHING) == "pass"
    assert write("ranked", ON_ROOMS) == "ranked"
    assert write("fails", ON_CLAIMS) == write("holds", ON_CLAIMS) == "ranked"
    assert write("fails", ON_ROOMS) == "fails"
    (folder / "submission.json").write_bytes((folder / "submission.json").read_bytes() + b"\n")
    assert write("papers", ON_PAPERS) == "papers"


def test_the_papers_alone_leave_a_verdict_that_rests_on_more(bench):
    folder = bench.track / OLD
    before = read_verdicts(bench.track)
    said = bench.verify(folder, "--static")
    assert said.endswith("the verdict that is kept rests on more, and stays\n1 records, 0 checks failed\n")
    assert read_verdicts(bench.track) == before and before[folder.name]["verdict"] == "pass"


def test_an_old_verdict_keeps_the_date_of_its_own_files_alone(bench):
    """Else another's record in the old folder would have its rank before all that came between."""
    folder = bench.track / OLD
    verdicts.write_finding(bench.folder, Finding("holds", ON_CLAIMS), "Ada", "1+abc")

    def date() -> Check:
        return next(line for line in judging.check_papers(Record(folder)) if line.name == "date")

    (folder / "README.md").write_text("other words")
    assert date().verdict == "PASS"
    shutil.copytree(bench.folder, folder, dirs_exist_ok=True)
    for failed in ([], ["date"], ["folder"]):  # nor does the verdict that says so help it
        if failed:
            verdicts.write_finding(folder, Finding("fails", ON_PAPERS, failed), "Ada", "1+abc")
        assert str(date()).startswith(f"FAIL date: the folder's name comes before {bench.folder.name}, which")


def test_the_record_before_is_derived_and_a_dispute_moves_it(bench):
    track = load_track(bench.track)
    name = bench.folder.name
    assert ranks.best_before(track, name).name == OLD
    edit_json(bench.folder / "submission.json", lambda value: value.update(beats="2020-01-01_Nobody"))
    assert not record_kit.failed(list(judging.check_papers(Record(bench.folder))))
    older = bench.track / "2025-11-19_Older"
    stands_before(shutil.copytree(bench.track / OLD, older), 1.1)
    edit_json(bench.track / "verdicts.json", lambda kept: kept[OLD].update(disputed="why"))
    assert ranks.best_before(track, name).name == older.name
    edit_json(bench.track / "verdicts.json", lambda kept: kept[older.name].update(verdict="holds"))
    assert ranks.best_before(track, name) is None, "what is not ranked need not be beaten"


def test_a_dispute_has_its_successors_judged_by_the_record_before(bench, monkeypatch, capsys):
    """Nothing is trained again, and no work folder is needed. So it is when the dispute is withdrawn."""
    mean = Record(bench.folder).mean
    older = "2025-11-19_Older"
    shutil.copytree(bench.track / OLD, bench.track / older)
    monkeypatch.setattr(judging, "open_judging", None)

    def judged(name: str, word: str, factor: float, failed: tuple[str, ...] = ()) -> None:
        scores = {str(77 + at): {"score": factor * mean + 0.001 * at} for at in range(3)}
        finding = Finding(word, ON_ROOMS, [*failed], more={"judged": {"seeds": scores}, "referee": "before"})
        verdicts.write_finding(bench.track / name, finding, "Ada", "now")

    def dispute(kept: dict) -> None:
        kept[OLD]["disputed"] = "it looks ahead"

    judged(older, "ranked", 1.4)
    judged(OLD, "ranked", 1.1)
    judged(bench.folder.name, "fails", 1.2, ("gain",))
    assert bench.judge() == 1 and bench.verdict["judged"]["beats"] == OLD
    edit_json(bench.track / "verdicts.json", dispute)
    assert bench.entry.kind == "small"
    assert bench.judge() == 0, capsys.readouterr().out
    assert bench.verdict["verdict"] == "ranked" and bench.verdict["judged"]["beats"] == older
    assert bench.verdict["referee"] == "before", "whose rooms they were"
    assert (bench.entry.kind, bench.entry.beats) == ("records", older)
    edit_json(bench.track / "verdicts.json", lambda kept: kept[OLD].pop("disputed"))
    assert bench.entry.kind == "small" and f"too little below {OLD}" in bench.entry.words
    later = bench.track / "2025-11-22_Later"
    assert ranks.best_before(load_track(bench.track), later.name).name == OLD, "it has no rank now"
    assert bench.judge() == 1 and bench.verdict["failed"] == ["gain"]


def test_scores_of_rooms_are_kept_beside_a_verdict_that_stays(bench, monkeypatch, capsys):
    """What was left was the rule alone, so nothing is trained again once that can be applied."""
    verdicts.write_finding(bench.folder, Finding("holds", ON_CLAIMS), "Ada", "3+abc")
    mean = Record(bench.folder).mean
    seeds = {str(77 + at): {"score": mean + 0.001 * at} for at in range(3)}
    rooms = {"judged": {"seeds": seeds}, "referee": "3+abc", "track": "ab", "machine": {"processor": "x"}}
    finding = Finding("not judged", verdicts.NOTHING, left={"machine": "another"}, more=rooms)
    assert not verdicts.write_finding(bench.folder, finding, "Ada", "3+abc")
    assert bench.verdict["verdict"] == "holds" and "judging" not in bench.entry.words
    verdicts.write_finding(bench.folder, Finding("holds", ON_CLAIMS), "Bob", "3+abc")
    monkeypatch.setattr(judging, "open_judging", None)
    assert bench.judge() == 0, capsys.readouterr().out
    assert bench.verdict["verdict"] == "ranked" and bench.verdict["judged"]["seeds"] == seeds
    assert "rooms" not in bench.verdict


def test_a_scoring_that_other_programs_slowed_is_done_again(bench, monkeypatch, capsys):
    its = bench.open()
    lines = []

    def slowed(judging_of, seed: int, *_) -> dict:
        lines.append(seed)
        word = "PASS" if len(lines) > len(SEEDS) else "SKIP"
        found = {"score": 1.0, "processor_seconds": 9.0, "lines": [[word, "eval-time", "x"]]}
        judging_of.write(seed, "score", found)
        return found

    monkeypatch.setattr(judging, "score_seed", slowed)
    monkeypatch.setattr(judging, "validation_text", lambda *_: None)
    for expected in ("SKIP", "PASS", "PASS"):
        said = [*judging.score_all(its, judging.JudgeOptions(bench.work))]
        assert [line.verdict for line in said if line.name == "eval-time"] == 3 * [expected]
    assert len(lines) == 2 * len(SEEDS)


# --- counts -----------------------------------------------------------------------------------------------


def test_a_judging_goes_on_or_another_one_is_counted(bench, monkeypatch):
    """Where it cannot go on, nobody gets other seeds without asking for them."""
    first = bench.open()
    assert bench.open() == bench.open(again=True) == first, "it is not ended"
    assert bench.draws == [first.draw] and first.evidence().judging == 1
    shutil.rmtree(bench.work)
    with pytest.raises(VerifierError, match=r"cannot go on: .* is not here; --again draws other seeds"):
        bench.open()
    second = bench.open(again=True)
    assert bench.draws == [first.draw, second.draw] and second.evidence().judging == 2
    number = second.draw.referee.partition("+")[0]
    monkeypatch.setattr(judging, "referee_version", lambda: f"{number}+another")
    assert bench.open() == second
    monkeypatch.setattr(judging, "referee_version", lambda: f"{number}0+another")
    with pytest.raises(VerifierError, match="cannot go on: the referee has changed; --again"):
        bench.open()
    assert "; judgings without a verdict: 2" in bench.entry.words
    assert "; judgings so far: 2, of folders: 1\n" in tables(load_track(bench.track), [])


def test_a_trial_is_not_counted_and_gives_no_seeds_to_a_judging(bench):
    trial = bench.open(write=False)
    assert bench.open(write=False) == trial and not bench.draws
    counted = bench.open()
    assert not set(counted.seeds) & set(trial.seeds) and bench.draws == [counted.draw]
    assert bench.open(write=False) == trial and trial.evidence().judging == 2, "as the next one would be"


def test_neither_another_name_nor_other_files_make_a_first_judging(tmp_path):
    draws = [
        Draw(name, digest, "t", "r", "2026-01-01", "Ada", (at,))
        for at, (name, digest) in enumerate([("A", "1"), ("B", "2"), ("A", "3"), ("C", "1")])
    ]
    for draw in [*draws, draws[1]]:
        record_draw(tmp_path, draw)
    assert read_draws(tmp_path) == draws, "a merge may double a line"
    assert number_of(draws, "A", "3", (2,)) == 2 and number_of(draws, "C", "1", (3,)) == 2
    assert number_of(draws, "B", "1", (9,)) == 4, "not recorded: the next one"
    with open(tmp_path / JUDGINGS, "a") as file:
        file.write('{"folder": "A"}\n')
    with pytest.raises(DataError, match="line 6 is no whole judging"):
        read_draws(tmp_path)


def test_a_full_disk_leaves_no_part_of_a_judging(tmp_path):
    first, second = (Draw(name, "1", "t", "r", "2026-01-01", "Ada", (1,)) for name in "AB")
    record_draw(tmp_path, first)
    path = tmp_path / JUDGINGS
    before = path.read_bytes()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, most))
    try:
        with pytest.raises((OSError, UsageError)):
            record_draw(tmp_path, second)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert path.read_bytes() == before and read_draws(tmp_path) == [first]


def test_a_judging_that_was_cut_off_ends_no_command_and_does_not_count(tmp_path, capsys):
    first, second = (Draw(name, "1", "t", "r", "2026-01-01", "Ada", (1,)) for name in "AB")
    record_draw(tmp_path, first)
    path = tmp_path / JUDGINGS
    line = path.read_bytes()
    for cut in (1, len(line) // 2, len(line) - 2):
        path.write_bytes(line + line[:cut])
        assert read_draws(tmp_path) == [first]
    assert f"{path}: line 2 was cut off before its judging began" in capsys.readouterr().err
    record_draw(tmp_path, second)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert read_draws(tmp_path) == [first, second], "an editor took the last line's end: it is whole"
    record_draw(tmp_path, replace(first, seeds=(2,)))
    assert [draw.folder for draw in read_draws(tmp_path)] == ["A", "B", "A"]


def test_git_merges_the_judgings_of_two_branches(tmp_path):
    track = tmp_path / "records" / TRACK
    track.mkdir(parents=True)
    shutil.copy(helpers.ROOT / ".gitattributes", tmp_path)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def git(*words: str) -> None:
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)

    def judged(seed: int) -> None:
        record_draw(track, Draw("A", "1", "t", "r", "2026-01-01", "Ada", (seed,)))
        git("add", "--all")
        git("commit", "-m", "judged")

    git("init", "--initial-branch=main")
    judged(0)
    git("checkout", "-b", "other")
    judged(1)
    git("checkout", "main")
    judged(2)
    git("merge", "other")
    assert sorted(draw.seeds for draw in read_draws(track)) == [(0,), (1,), (2,)]


def test_every_judging_of_a_folder_is_paid_for(bench):
    track = load_track(bench.track)
    rival = ranks.best_before(track, bench.folder.name)
    scores = [score / 1.2 for score in rival.scores]
    record = Record(bench.folder)
    first, tenth = (ranks.Rival(record, scores, {}, count).gain_over(rival) for count in (1, 10))
    assert first.p == tenth.p and tenth.below == first.below / 10


def test_equal_scores_are_as_sure_as_those_of_honest_seeds(bench):
    """Three equal scores 0.0141 below a record whose own lay near each other were sure at p 0.0004."""
    record = Record(RECORDS / "track_floppy/2026-11-26_Rung10-Votes")
    rival = ranks.best_before(record.track, record.name)
    scores = 3 * [rival.mean - 0.0141]
    assert ranks.Rival(record, scores, {}, priced=False).gain_over(rival).p == pytest.approx(
        0.0004, abs=0.0001
    )
    usual = [scores[0] + off for off in (-0.0023, 0, 0.0023)]
    p = ranks.Rival(record, scores, {}).gain_over(rival).p
    assert p == pytest.approx(ranks.Rival(record, usual, {}).gain_over(rival).p, rel=0.05) and p > 0.0008


def test_without_cgroups_nothing_is_ranked(bench, monkeypatch):
    monkeypatch.setattr(cgroups, "find", lambda: None)
    assert bench.judge() == 1
    assert bench.verdict["verdict"] == "not judged" and [*bench.verdict["left"]] == ["limits"]
    assert not bench.draws and not bench.work.exists(), "nothing is drawn for it"


def test_a_room_is_charged_for_what_it_spends_and_not_what_it_logs():
    """Eight times the operations that a log names were fewer than the seconds of five budgets."""
    track = load_track(RECORDS / "track_floppy")
    most = track["train_flops"]

    def work(flops: float, efficiency: float, *speeds: float) -> str:
        room = {"train_flops": most, "processor_seconds": flops / efficiency / 1e11}
        room["speeds"] = speeds or (0.9e11, 1e11, 1.1e11)
        return [*retrain.check_work(track, room)][-1].verdict

    for efficiency in (0.68, 0.84, 1.5):  # what rooms of records made of the products that the machine could
        assert work(most, efficiency) == "PASS"
        assert work(8 * most, efficiency) == "FAIL"
    assert work(2 * most, 0.84) == "FAIL"
    assert work(2 * most, 0.84, 0.5e11, 1e11, 1.5e11) == "SKIP", "at its slowest the machine made no more"


def test_a_text_in_the_place_of_other_code_costs_its_bits(bench):
    """A script that grew by nothing may hold a text, which must not pay."""
    rival = ranks.best_before(load_track(bench.track), bench.folder.name)
    old, new = rival.record.path, bench.folder
    track = rival.record.track
    worth = 8 * 200 / track.dataset["val_bytes"]
    scores = [score - track["min_gain_bpb"] - worth for score in rival.scores]
    assert ranks.Rival(Record(new), scores, {}).gain_over(rival).enough
    for folder in (old, new):
        with open(folder / "train_gpt.py", "a") as file:
            file.write(f"# {secrets.token_hex(200)}\n")
    rival = replace(rival, record=Record(old))
    gain = ranks.Rival(Record(new), scores, {}).gain_over(rival)
    assert gain.new_bytes > 200 and not gain.enough and f"since {gain.new_bytes} bytes of script" in str(gain)
    earlier = ranks.Rival(Record(new), scores, {}, priced=False)
    assert earlier.gain_over(rival).enough, "as earlier referees had it"


def test_settings_are_bytes_of_the_record_and_new_ones(bench):
    """Each of a run's settings is counted, but for those that a room sets itself and a preset's name."""
    before = Record(bench.folder)
    rival = ranks.best_before(before.track, before.name)
    assert before.settings == b""
    for seed in SEEDS:
        given = "SEED= RUN_ID=x DATA_PATH=/a/b TOKENIZER_PATH=/c DTYPE=bfloat16 PRESET=bigram WORDS=abcdef"
        record_kit.edit(bench.folder / f"train_seed{seed}.log", (" preset:none ", f" preset:bigram {given} "))
    after = Record(bench.folder)
    assert after.settings == b"WORDS=abcdef"
    assert after.total_bytes == before.total_bytes + 12
    new, old = (ranks.Rival(record, rival.scores, {}).gain_over(rival) for record in (after, before))
    assert new.new_bytes == old.new_bytes + 12


def test_all_that_have_a_rank_would_have_it_by_the_rule_that_prices_new_bytes():
    """And they have it by the rule under which they were judged."""
    entries = [entry for entry in load_entries(load_track(RECORDS / "track_floppy")) if entry.beats]
    assert len(entries) == 9
    for entry in entries:
        gain = ranks.Rival(entry.record, entry.scores, {}).gain_over(entry.rival)
        assert gain.enough and gain.new_bytes > 300, f"{entry.name}: {gain}"
