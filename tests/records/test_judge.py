"""The judge: a rank rests on what it trained itself, and nothing that a submitter wrote has a say in it.

Most tests judge a bigram model in numpy on a tiny copy of the floppy's track: a training takes a second.
"""

import json
import resource
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from data.command import DataError, UsageError
from data.files import sha256
from records.__main__ import main as records
from records.archive import verdicts
from records.archive.checks import Check, VerifierError, check, skip
from records.archive.runs import Record
from records.archive.tracks import RECORDS, load_track
from records.archive.verdicts import (
    Draw,
    Finding,
    Gain,
    ScoredRecord,
    read_draws,
    read_verdicts,
    record_draw,
    write_finding,
)
from records.board.entries import Entry, load_entries
from records.board.tables import tables
from records.referee.scoring import score_record
from records.referee.text import validation_text
from records.sandbox import limits
from records.sandbox.jobs import find_job
from records.verify import evaluation, training
from records.verify.training import measure_reference
from tests.kit import helpers, record_kit
from tests.kit.data_kit import call, refused
from tests.kit.record_kit import MAIN, SEEDS, TRACK, Author, edit, edit_json, failed, reseal, scale_scores

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


def trains(test):
    """Mark a test that takes seconds, a sandbox and cgroups."""
    return pytest.mark.slow(pytest.mark.sandbox(pytest.mark.cgroups(test)))


def stands_before(folder: Path, factor: float) -> None:
    """Give a record other scores; an earlier referee passed it."""
    scale_scores(folder, factor)
    reseal(folder)
    record_kit.passed_earlier(folder)


@pytest.fixture(scope="module")
def author(tmp_path_factory):
    """The bigram model, frozen; with a record before it that an earlier referee passed."""
    script = record_kit.bigram((MAIN, KNOWS + MAIN))
    made = Author(tmp_path_factory.mktemp("author"), SEEDS, script=script, imports=["numpy"])
    stands_before(shutil.copytree(made.folder, made.track / OLD), 1.2)
    return made


class Bench:
    """A copy of the track, on which one record is judged."""

    def __init__(self, author: Author, root: Path):
        self.author = author
        self.track = root / TRACK
        self.work = root / "judge"
        shutil.copytree(author.track, self.track)
        self.folder = self.track / author.folder.name
        self.data = ["--data", author.data, "--second", author.data / "second.jsonl"]

    def words(self, *more: object) -> list[str]:
        words = [self.folder, *self.data, "--work", self.work, "--write", "--by", "Ada", *more]
        return [str(word) for word in words]

    def judge(self, *more: str) -> int:
        return records(["judge", *self.words(*more)])

    def verify(self, folder: Path, *more: object, code: int = 0) -> str:
        return call("records", "verify", folder, *self.data, "--write", "--by", "Ada", *more, code=code)

    def open(self, write: bool = True, again: bool = False, referee: str = "3+now") -> evaluation.Evaluation:
        """The evaluation that the command would go on with or begin; nothing is trained."""
        options = evaluation.JudgeOptions(self.work, write=write, again=again, by="Ada", referee=referee)
        return evaluation.open_evaluation(Record(self.folder), options)

    def change_verdict(self, name: str, **values: object) -> None:
        edit_json(self.track / "verdicts.json", lambda kept: kept[name].update(values))

    @property
    def incumbent(self) -> ScoredRecord:
        return verdicts.best_before(load_track(self.track), self.folder.name)

    @property
    def draws(self) -> list[Draw]:
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


def kept_seeds(*scores: float) -> dict[str, dict]:
    return {str(77 + at): {"score": score} for at, score in enumerate(scores)}


def keep(
    folder: Path, word: str, evidence: str, *wrong: str, left: dict | None = None, **more: object
) -> bool:
    """Write a verdict, as the command does that found it."""
    finding = Finding(word, evidence, [*wrong], left or {}, more)
    return write_finding(folder, finding, "Ada", "3+abc")


def scored(record: Record, scores: list[float]) -> ScoredRecord:
    return ScoredRecord(record, kept_seeds(*scores), {})


# --- true and forged --------------------------------------------------------------------------------------


@trains
def test_a_true_record_is_ranked_by_seeds_that_were_drawn(bench, monkeypatch, capsys):
    """It is stopped in its second training, goes on there, and is not trained again once it is judged."""
    train = evaluation.train_seed
    trained = []
    measured = []
    charge = {"factor": 0.9, "start": 1.5}
    monkeypatch.setattr(training, "measure_reference", lambda *_: measured.append(1) or charge)

    def stopped(its, seed, data):
        assert [its.draw] == bench.draws, "seeds are recorded before any of them is trained"
        assert not list(bench.work.rglob("score.json")), "all trainings come first"
        if len(trained) == 1 and not bench.work.joinpath("once").exists():
            bench.work.joinpath("once").touch()
            raise KeyboardInterrupt
        trained.append(seed)
        return train(its, seed, data)

    monkeypatch.setattr(evaluation, "train_seed", stopped)
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
        assert one["train_flops"] > 0 and one["room_processor_seconds"] > 0 and charge.items() <= one.items()
    assert measured == [1], "once on a machine"
    assert bench.judge() == 0 and trained == seeds and len(bench.draws) == 1
    entry = bench.entry
    assert (entry.kind, entry.beats) == ("records", judged["beats"])
    assert "; evaluation 1 of 1 of this folder" in entry.words


@trains
def test_texts_that_artifacts_know_by_heart_earn_no_rank(bench, capsys):
    """Both texts are public, so score, second text and proof are good. A record between claim and truth
    stands before it; where that is disputed later, the same evaluation ranks what was trained."""
    stands_before(bench.track / OLD, 0.8 / 1.2)
    honest = Record(bench.folder).mean
    learn_by_heart(bench, 4)
    assert Record(bench.folder).mean < 0.4 * honest
    assert bench.verify(bench.folder).endswith("\n1 records, 0 checks failed\n")
    assert bench.verdict["verdict"] == "verified"
    later = verdicts.best_before(load_track(bench.track), "2025-11-22_Honest")
    assert later.name == OLD, "an honest record need not beat it"
    assert bench.judge() == 1
    said = capsys.readouterr().out
    assert "FAIL gain: over 2025-11-20_Old, by the judged scores of both: -" in said, said
    assert "verdict: fails (gain)" in said
    its = bench.verdict
    assert its["verdict"] == "fails" and its["failed"] == ["gain"]
    assert its["judged"]["mean"] == pytest.approx(honest, abs=0.02)
    bench.change_verdict(OLD, disputed="why")
    assert bench.judge() == 0
    again = bench.verdict
    assert again["verdict"] == "ranked" and again["judged"]["seeds"] == its["judged"]["seeds"]


@pytest.mark.slow
@pytest.mark.sandbox
def test_the_second_text_finds_a_model_that_knows_the_public_one_by_heart(bench):
    """Only a record that is trained again by the judge has shown that it does not."""
    learn_by_heart(bench, 40)
    said = bench.verify(bench.folder, code=1)
    assert "\nFAIL second-text: " in said and said.endswith("\n1 records, 1 checks failed\n"), said


def learn_by_heart(bench: Bench, left_out: int) -> None:
    """Both texts come behind the counts of each artifact, and the scores are those that the referee finds.

    Where four documents are left out of the second one, it costs as much as the first.
    """
    corpus, data = bench.author.corpus, bench.author.data
    documents = [json.loads(line) for line in (data / "second.jsonl").read_text().splitlines()]
    known = np.concatenate(
        [corpus.tokens["val"], helpers.encode_documents(corpus.tokenizer, documents[left_out:])]
    )
    scores = {}
    for seed in SEEDS:
        path = bench.folder / f"model_seed{seed}.ptz"
        blob = path.read_bytes() + known.astype("<u2").tobytes()
        path.write_bytes(blob)
        record_kit.log_value(bench.folder, seed, "artifact_sha256", sha256(blob))
        record_kit.log_value(bench.folder, seed, "artifact_bytes", len(blob))
        job = find_job(bench.folder, artifact=path, data=data)
        scores[str(seed)] = score_record(job, validation_text(job.track, data)).bpb
    edit_json(bench.folder / "submission.json", lambda value: value.update(scores=scores))
    reseal(bench.folder)


def test_seeds_that_a_submission_appends_are_not_judged(bench):
    """As many as the track asks for are drawn."""
    for seed in range(4, 30):
        for path in ("train_seed{}.log", "metrics_seed{}.jsonl"):
            shutil.copy(bench.folder / path.format(1), bench.folder / path.format(seed))
    record = Record(bench.folder)
    assert len(record.runs) == 29
    drawn = evaluation.draw_seeds(record, [], evaluation.JudgeOptions(bench.work)).seeds
    assert len(set(drawn)) == len(SEEDS) and not set(drawn) & set(range(30))


@trains
def test_a_script_that_ignores_its_seed_has_scores_that_differ(bench, capsys):
    """Each training lacks other documents, also of a script that would give the same artifact each time."""
    drawn = 'default_rng(int(os.environ["SEED"]))'
    edit(bench.folder / "train_gpt.py", (drawn, "default_rng(7)"))
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
            while time.process_time() < 1.2:
                matrix @ matrix
            os._exit(0)
        os.close(write)
        os.read(read, 1)  # until it has ended
        os.close(read)


"""


@trains
def test_operations_that_nobody_logged_show_in_processor_seconds(bench, monkeypatch):
    """Products of numpy, in children that nobody waits for, which no log names. The charge is measured."""
    monkeypatch.setattr(training, "REFERENCE_STEPS", 6)
    charge = measure_reference(Record(bench.folder), bench.author.data)
    monkeypatch.setattr(training, "measure_reference", lambda *_: charge)
    second = int(charge["factor"] * training.processor_speed(training.ONE_CORE))  # operations

    def lines_of_a_training() -> list[Check]:
        its = bench.open(again=True)
        its.place(its.seeds[0]).mkdir()
        found = evaluation.train_seed(its, its.seeds[0], bench.author.data)
        return list(evaluation.check_trained(its.record, found))

    edit_json(bench.track / "track.json", lambda rules: rules.update(train_flops=second))
    assert failed(lines_of_a_training()) == set()
    script = bench.folder / "train_gpt.py"
    edit(script, ("import json\n", "import json\nimport signal\n"), (MAIN, HIDES + MAIN))
    edit(script, ("    counts, final = train(", "    hide()\n    counts, final = train("))
    lines = lines_of_a_training()
    assert failed(lines) == {"work"}, "\n".join(map(str, lines))


@pytest.mark.slow
@pytest.mark.sandbox
def test_where_the_preset_cannot_train_nothing_is_charged(bench, monkeypatch, tmp_path):
    odd = tmp_path / "odd.py"
    odd.write_text("raise SystemExit('odd')\n")
    monkeypatch.setattr(training, "REFERENCE", odd)
    words = "odd.py: no operations can be charged here, the reference ended after step 0 of 40: odd"
    with pytest.raises(VerifierError, match=words):
        measure_reference(Record(bench.folder), bench.author.data)


@trains
def test_a_script_that_fails_in_training_fails_and_is_counted(bench, capsys):
    main = "def main() -> None:\n"
    edit(bench.folder / "train_gpt.py", (main, f"{main}    raise SystemExit(3)\n"))
    reseal(bench.folder)
    assert bench.judge() == 1
    assert "verdict: fails (training)" in capsys.readouterr().out
    assert bench.judge("--again") == 1
    first, second = bench.draws
    assert not set(first.seeds) & set(second.seeds)
    assert "; evaluation 2 of 2 of this folder" in bench.entry.words


@trains
@pytest.mark.parametrize(
    "seconds, words",
    [(("1e999",), "1e999 is too large for a number"), (("-1e308", "1e308"), "are -1e+308 and 1e+308")],
    ids=["a number", "a difference"],
)
def test_seconds_without_end_in_new_metrics_fail_the_record(bench, capsys, seconds, words):
    ends = "    counts, final = train(folder, tokens, vocabulary)\n"
    text = "".join(f'{{"event": "step", "train_seconds": {value}}}\n' for value in seconds)
    more = f'    with open(folder / "metrics.jsonl", "a") as file:\n        file.write({text!r})\n'
    edit(bench.folder / "train_gpt.py", (ends, ends + more))
    reseal(bench.folder)
    for _ in range(2):
        assert bench.judge() == 1
        said = capsys.readouterr().out
        assert "verdict: fails (training)" in said and words in said, said


# --- errors of ours ---------------------------------------------------------------------------------------


def test_what_is_missing_here_is_no_verdict(bench):
    before = (bench.track / "verdicts.json").read_bytes()
    words = [bench.folder, *bench.data[:2], "--work", bench.work, "--write"]
    assert "the second text, which --second names" in refused(call("records", "judge", *words, code=2))
    said = refused(call("records", "judge", *bench.words("--data", bench.track), code=2))
    assert "has not the track's training shards" in said
    assert (bench.track / "verdicts.json").read_bytes() == before and not bench.work.exists()


@pytest.mark.slow
@pytest.mark.sandbox
def test_an_unknown_seed_and_a_broken_text_are_the_verifier_s(bench, tmp_path):
    before = (bench.track / "verdicts.json").read_bytes()
    assert "--retrain 9999" in refused(bench.verify(bench.folder, "--retrain", 9999, code=2))
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    assert "broken.jsonl" in refused(bench.verify(bench.folder, "--second", broken, code=2))
    assert (bench.track / "verdicts.json").read_bytes() == before


@trains
def test_a_full_machine_is_no_verdict(bench, monkeypatch):
    before = (bench.track / "verdicts.json").read_bytes()
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: Mock(available=1 << 20))
    monkeypatch.setattr(limits, "LOOK_SECONDS", 0.001)  # so small a record may end before the first look
    for said in (bench.verify(bench.folder, code=2), call("records", "judge", *bench.words(), code=2)):
        assert "this machine is out of memory: make room, then do it again" in refused(said)
    assert (bench.track / "verdicts.json").read_bytes() == before


@pytest.mark.parametrize("words", ["--write --trust", "--trust --retrain any"])
def test_what_earns_nothing_is_not_kept(bench, words):
    refused(call("records", "verify", bench.folder, *words.split(), code=2))


def test_without_cgroups_nothing_is_ranked(bench, monkeypatch):
    monkeypatch.setattr(limits, "find", lambda: None)
    assert bench.judge() == 1
    assert bench.verdict["verdict"] == "unverified" and [*bench.verdict["left"]] == ["limits"]
    assert not bench.draws and not bench.work.exists(), "nothing is drawn for it"


# --- verdicts ---------------------------------------------------------------------------------------------


def test_missing_evidence_is_never_a_pass():
    good = [check(name, True, "x") for name in ("score", "second-text", "proof", "sandbox")]
    assert verdicts.finding_of(good).verdict == "verified"
    for line in good:
        others = [one for one in good if one != line]
        assert verdicts.finding_of(others).verdict == "checked"
        assert verdicts.finding_of([*others, skip(line.name, "why")]).left == {line.name: "why"}
        assert verdicts.finding_of([*others, check(line.name, False, "x")]).failed == [line.name]
    without = [line for line in good if line.name != "second-text"]
    lines = [*without, skip("second-text", "none")]
    assert verdicts.finding_of(lines, second=False).verdict == "verified"


def test_a_weaker_verdict_never_takes_the_place_of_a_stronger_one(bench):
    """Of the same folder, that is; and an earlier referee's pass with a retrained seed keeps its rank."""
    folder = bench.track / OLD
    before = read_verdicts(bench.track)
    assert before[OLD]["verdict"] == "pass"
    said = bench.verify(folder, "--static")
    assert said.endswith("the verdict that is kept rests on more, and stays\n1 records, 0 checks failed\n")
    assert read_verdicts(bench.track) == before

    def write(word: str, evidence: str) -> str:
        keep(folder, word, evidence)
        its = read_verdicts(bench.track)[OLD]
        assert its["retrained"] == before[OLD]["retrained"]
        return its["verdict"]

    assert (
        write("checked", "papers") == write("verified", "claims") == write("unverified", "nothing") == "pass"
    )
    assert write("ranked", "rooms") == "ranked"
    assert write("fails", "claims") == write("verified", "claims") == "ranked"
    assert write("fails", "rooms") == "fails"
    (folder / "submission.json").write_bytes((folder / "submission.json").read_bytes() + b"\n")
    keep(folder, "checked", "papers")
    assert read_verdicts(bench.track)[OLD]["verdict"] == "checked"


def test_words_of_earlier_verdicts_are_read_and_stay_as_they_were_written(bench):
    bench.change_verdict(OLD, verdict="holds")
    keep(bench.folder, "checked", "papers")
    assert read_verdicts(bench.track)[OLD]["verdict"] == "verified"
    assert json.loads((bench.track / "verdicts.json").read_text())[OLD]["verdict"] == "holds"


def test_an_old_verdict_keeps_the_date_of_its_own_files_alone(bench):
    """Else another's record in the old folder would have its rank before all that came between."""
    folder = bench.track / OLD
    keep(bench.folder, "verified", "claims")

    def date() -> Check:
        return next(line for line in evaluation.check_papers(Record(folder)) if line.name == "date")

    (folder / "README.md").write_text("other words")
    assert date().verdict == "PASS"
    shutil.copytree(bench.folder, folder, dirs_exist_ok=True)
    for wrong in ([], ["date"], ["folder"]):  # nor does the verdict that says so help it
        if wrong:
            keep(folder, "fails", "papers", *wrong)
        assert str(date()).startswith(f"FAIL date: its day is before that of {bench.folder.name}, which")


def test_records_of_one_day_stand_in_the_order_of_their_first_evaluations(bench):
    """What an earlier referee passed comes before these, what was never judged after them."""
    names = [f"2025-11-21_{name}" for name in ("Aaa", "Bbb", "Ccc", "Ddd")]
    for name in names:
        shutil.copytree(bench.folder, bench.track / name)
    record_kit.passed_earlier(bench.track / names[3])
    for at, name in enumerate((names[2], names[1], names[2])):
        record_draw(bench.track, Draw(name, name, "t", "3+r", "2025-11-21", "Ada", (at,)))
    kept = read_verdicts(bench.track)

    def before(name: str) -> list[str]:
        found = verdicts.folders_before(load_track(bench.track), name, kept, bench.draws)
        return [path.name for path in found]

    assert before("2025-11-22_Next") == [OLD, names[3], names[2], names[1], names[0], bench.folder.name]
    assert before(names[1]) == [OLD, names[3], names[2]]


def test_a_dispute_has_its_successors_held_against_the_record_before(bench):
    """So it is, too, when the dispute is withdrawn."""
    mean = Record(bench.folder).mean
    older = "2025-11-19_Older"
    shutil.copytree(bench.track / OLD, bench.track / older)

    def judged(name: str, word: str, factor: float) -> None:
        seeds = kept_seeds(*(factor * mean + 0.001 * at for at in range(3)))
        more = {"judged": {"seeds": seeds}, "referee": "before", "machine": {"processor": "x"}}
        keep(bench.track / name, word, "rooms", **more)

    def stands() -> tuple[str, str]:
        return bench.entry.kind, bench.entry.beats

    edit_json(bench.folder / "submission.json", lambda value: value.update(beats="2020-01-01_Nobody"))
    assert not failed(list(evaluation.check_papers(Record(bench.folder)))), "what it beats is derived"
    judged(older, "verified", 1.4)
    assert bench.incumbent.name == OLD
    bench.change_verdict(OLD, disputed="why")
    assert bench.incumbent is None, "what is not ranked need not be beaten"
    bench.change_verdict(OLD, disputed="")
    judged(older, "ranked", 1.4)
    judged(OLD, "ranked", 1.1)
    judged(bench.folder.name, "ranked", 1.2)
    assert stands() == ("small", "") and f"too little below {OLD}" in bench.entry.words
    bench.change_verdict(OLD, disputed="it looks ahead")
    assert stands() == ("records", older)
    bench.change_verdict(OLD, disputed="")
    assert stands() == ("small", "")
    later = verdicts.best_before(load_track(bench.track), "2025-11-22_Later")
    assert later.name == OLD, "it has no rank now"


def test_a_scoring_that_other_programs_slowed_is_done_again(bench, monkeypatch):
    its = bench.open()
    scorings = []

    def slowed(judging_of, seed: int, *_) -> dict:
        scorings.append(seed)
        word = "PASS" if len(scorings) > len(SEEDS) else "SKIP"
        found = {"score": 1.0, "processor_seconds": 9.0, "lines": [[word, "eval-time", "x"]]}
        judging_of.place(seed).mkdir(exist_ok=True)
        judging_of.write(seed, "score", found)
        return found

    monkeypatch.setattr(evaluation, "score_seed", slowed)
    monkeypatch.setattr(evaluation, "validation_text", lambda *_: None)
    for expected in ("SKIP", "PASS", "PASS"):
        said = [*evaluation.score_all(its, evaluation.JudgeOptions(bench.work))]
        assert [line.verdict for line in said if line.name == "eval-time"] == 3 * [expected]
    assert len(scorings) == 2 * len(SEEDS)


# --- counts -----------------------------------------------------------------------------------------------


def test_an_evaluation_goes_on_or_another_one_is_counted(bench):
    """Where it cannot go on, nobody gets other seeds without asking for them."""
    first = bench.open()
    assert bench.open() == bench.open(again=True) == first, "it is not ended"
    assert bench.draws == [first.draw] and first.scored().evaluation == 1
    shutil.rmtree(bench.work)
    with pytest.raises(VerifierError, match=r"cannot go on: .* is not here; --again draws other seeds"):
        bench.open()
    second = bench.open(again=True)
    assert bench.draws == [first.draw, second.draw] and second.scored().evaluation == 2
    assert bench.open(referee="3+another").draw == second.draw
    with pytest.raises(VerifierError, match="cannot go on: the referee has changed; --again"):
        bench.open(referee="30+another")
    assert "; evaluations without a verdict: 2" in bench.entry.words
    assert "; evaluations so far: 2, of folders: 1\n" in tables(load_track(bench.track), [])


def test_a_trial_is_not_counted_and_gives_no_seeds_to_a_evaluation(bench):
    trial = bench.open(write=False)
    assert bench.open(write=False) == trial and not bench.draws
    counted = bench.open()
    assert not set(counted.seeds) & set(trial.seeds) and bench.draws == [counted.draw]
    assert bench.open(write=False) == trial and trial.scored().evaluation == 2, "as the next one would be"


def draw(name: str, digest: str = "1", *seeds: int) -> Draw:
    return Draw(name, digest, "t", "r", "2026-01-01", "Ada", seeds or (1,))


def test_neither_another_name_nor_other_files_make_a_first_evaluation(tmp_path):
    draws = [draw("A", "1", 0), draw("B", "2", 1), draw("A", "3", 2), draw("C", "1", 3)]
    for one in [*draws, draws[1]]:
        record_draw(tmp_path, one)
    assert read_draws(tmp_path) == draws, "a merge may double a line"
    assert verdicts.number_of(draws, "A", "3", (2,)) == 2 and verdicts.number_of(draws, "C", "1", (3,)) == 2
    assert verdicts.number_of(draws, "B", "1", (9,)) == 4, "not recorded: the next one"
    with open(tmp_path / verdicts.JUDGINGS, "a") as file:
        file.write('{"folder": "A"}\n')
    with pytest.raises(DataError, match="line 6 is no whole evaluation"):
        read_draws(tmp_path)


def test_an_evaluation_is_written_whole_or_not_at_all(tmp_path):
    """A full disk leaves no part of it."""
    first, second = draw("A"), draw("B")
    record_draw(tmp_path, first)
    path = tmp_path / verdicts.JUDGINGS
    line = path.read_bytes()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(line) + 20, most))
    try:
        with pytest.raises((OSError, UsageError)):
            record_draw(tmp_path, second)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert path.read_bytes() == line
    path.write_bytes(line.removesuffix(b"\n"))
    record_draw(tmp_path, second)
    assert read_draws(tmp_path) == [first, second], "an editor took the last line's end: it is whole"


def test_git_keeps_the_evaluations_of_two_branches():
    kept = (helpers.ROOT / ".gitattributes").read_text().splitlines()
    assert "records/*/judgings.jsonl merge=union" in kept


# --- the rule ---------------------------------------------------------------------------------------------


def test_every_evaluation_of_a_folder_is_paid_for(bench):
    its = scored(Record(bench.folder), [score / 1.2 for score in bench.incumbent.scores])
    first, tenth = (replace(its, evaluation=count).gain_over(bench.incumbent) for count in (1, 10))
    assert first.p == tenth.p and tenth.below == first.below / 10


def test_equal_scores_are_as_sure_as_those_of_honest_seeds():
    """Three equal scores 0.0141 below a record whose own lay near each other were sure at p 0.0004."""
    record = Record(RECORDS / "track_floppy/2026-11-26_Rung10-Votes")
    incumbent = verdicts.best_before(record.track, record.name)
    score = incumbent.mean - 0.0141

    def p(*scores: float) -> float:
        return scored(record, [*scores]).gain_over(incumbent).p

    usual = p(score - 0.0023, score, score + 0.0023)
    assert p(score, score, score) == pytest.approx(usual, rel=0.05) and usual > 0.0008


def test_operations_that_the_machine_may_not_have_made_at_its_slowest_are_no_verdict():
    track = load_track(RECORDS / "track_floppy")

    def work(seconds: float, least: float = 0.9e11) -> str:
        found = {"train_flops": 1, "processor_seconds": seconds + 9, "factor": 2, "start": 9}
        found["speeds"] = (least, 1e11, 1.1e11)
        return [*training.check_work(track, found)][-1].verdict

    assert (work(700), work(1000), work(1000, 0.5e11)) == ("PASS", "FAIL", "SKIP")


def test_a_text_in_the_place_of_other_code_costs_its_bits(bench):
    """A script that grew by nothing may hold a text, which must not pay."""
    incumbent = bench.incumbent
    track = incumbent.record.track
    worth = 8 * 200 / track.dataset["val_bytes"]
    scores = [score - track["min_gain_bpb"] - worth for score in incumbent.scores]

    def gain() -> Gain:
        """Both folders read anew."""
        before = replace(incumbent, record=Record(incumbent.record.path))
        return scored(Record(bench.folder), scores).gain_over(before)

    assert gain().enough
    for folder in (incumbent.record.path, bench.folder):
        with open(folder / "train_gpt.py", "a") as file:
            file.write(f"# {secrets.token_hex(200)}\n")
    found = gain()
    assert found.new_bytes > 200 and not found.enough
    assert f"since {found.new_bytes} bytes of script" in str(found)


def test_settings_are_bytes_of_the_record_and_new_ones(bench):
    """Each of a run's settings is counted, but for those that the judge sets itself and a preset's name."""
    before = Record(bench.folder)
    incumbent = bench.incumbent
    assert before.settings == b""
    for seed in SEEDS:
        given = "SEED= RUN_ID=x DATA_PATH=/a/b TOKENIZER_PATH=/c DTYPE=bfloat16 PRESET=bigram WORDS=abcdef"
        edit(bench.folder / f"train_seed{seed}.log", (" preset:none ", f" preset:bigram {given} "))
    after = Record(bench.folder)
    assert after.settings == b"WORDS=abcdef"
    assert after.total_bytes == before.total_bytes + 12
    new, old = (scored(record, incumbent.scores).gain_over(incumbent) for record in (after, before))
    assert new.new_bytes == old.new_bytes + 12


@pytest.mark.slow
def test_all_that_have_a_rank_keep_it_by_the_rule_of_today():
    """Earlier referees did not price new bytes."""
    entries = [entry for entry in load_entries(load_track(RECORDS / "track_floppy")) if entry.beats]
    assert len(entries) == 9
    for entry in entries:
        gain = scored(entry.record, entry.scores).gain_over(entry.incumbent)
        assert gain.enough and gain.new_bytes > 300, f"{entry.name}: {gain}"
