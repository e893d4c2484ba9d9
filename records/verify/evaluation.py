"""The judge: a rank rests on what the referee trained itself. records/verify/README.md has its steps.

Nothing that a submitter wrote but the script, and the settings that it ran with, enters a rank. An evaluation
goes on where it was stopped, a seed at a time. One that has ended is not trained again: the rule is applied
once more, since another record may be the incumbent now.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.command import DataError
from data.files import file_sha256, locked, read_json, write_whole
from records.archive import verdicts
from records.archive.checks import Check, VerifierError, check, note, of_seed, skip
from records.archive.runs import ARTIFACT, Record, this_machine
from records.archive.tracks import DATA, Track
from records.archive.verdicts import Draw, Finding, ScoredRecord, folder_sha256
from records.referee.scoring import Result, referee
from records.referee.text import Text, validation_text
from records.sandbox import limits
from records.sandbox.jobs import find_job
from records.verify import training
from records.verify.claims import check_papers

SEEDS = 1 << 31  # numbers that a seed is drawn from
KIND = ("processor", "gpu")  # of a machine, where seconds count
KEPT = ("artifact_sha256", "artifact_bytes", "train_flops", "train_seconds")  # by a verdict, of a training
KEPT += ("processor", "limits", "speeds", "factor", "start")


@dataclass(frozen=True)
class JudgeOptions:
    work: Path  # folder of all evaluations
    data: Path = DATA
    second: Path | None = None
    again: bool = False
    write: bool = False
    by: str = "unknown"
    referee: str = ""  # its version


# --- what an evaluation keeps -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one state of a folder, and what came of each of its seeds so far."""

    record: Record
    home: Path  # of all evaluations of the folder
    draw: Draw
    referee: str  # of now

    @property
    def folder(self) -> Path:
        return self.home / str(self.seeds[0])

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.draw.seeds

    @property
    def obstacle(self) -> str:
        """Why it cannot go on; empty where it can."""
        now = versions(self.record, self.referee)
        if now["sha256"] != self.draw.sha256:
            return "the folder has changed"
        if now["track"] != self.draw.track:
            return "the track's rules have changed"
        if now["referee"].partition("+")[0] != self.draw.referee.partition("+")[0]:  # by their numbers
            return "the referee has changed"
        return "" if self.folder.is_dir() else f"{self.folder} is not here"

    def place(self, seed: int) -> Path:
        return self.folder / f"seed{seed}"

    def read(self, seed: int, name: str) -> dict | None:
        """What came of a seed's training (`room`) or of its score; None where it is not there yet."""
        path = self.place(seed) / f"{name}.json"
        return read_json(path) if path.exists() else None

    def write(self, seed: int, name: str, value: dict) -> None:
        """Raises VerifierError if the folder is another than the one whose digest was taken."""
        self.check_unchanged()
        text = json.dumps(value, indent=1)
        write_whole(self.place(seed) / f"{name}.json", f"{text}\n".encode())

    def check_unchanged(self) -> None:
        if folder_sha256(self.record.path) != self.draw.sha256:
            raise VerifierError(f"{self.record.path}: has changed while it was judged; judge it --again")

    @property
    def failed_in_training(self) -> bool:
        trained = [self.read(seed, "room") for seed in self.seeds]
        return any(its and (its["code"] or its["wrong"]) for its in trained)

    @property
    def finished(self) -> bool:
        return self.failed_in_training or all(self.read(seed, "score") for seed in self.seeds)

    def scored(self) -> ScoredRecord:
        """What came of it so far, as a verdict keeps it."""
        seeds = {}
        for seed in self.seeds:
            trained = self.read(seed, "room") or {}
            score = self.read(seed, "score") or {}
            its = {name: trained[name] for name in KEPT if name in trained}
            its["room_processor_seconds"] = trained.get("processor_seconds")
            if "score" in score:
                its |= {"score": score["score"], "eval_processor_seconds": score["processor_seconds"]}
            seeds[str(seed)] = its
        draws = verdicts.read_draws(self.record.home)
        number = verdicts.number_of(draws, self.record.name, self.draw.sha256, self.seeds)
        return ScoredRecord(self.record, seeds, this_machine(), number)


def versions(record: Record, referee: str) -> dict[str, str]:
    track = verdicts.track_sha256(record.track.folder)
    return {"sha256": folder_sha256(record.path), "track": track, "referee": referee}


def draw_seeds(record: Record, earlier: list[Draw], args: JudgeOptions) -> Draw:
    """As many seeds as the track asks for, none of which the submission or an earlier evaluation used."""
    wanted = record.track["seeds"]
    taken = {*record.runs, *wanted, *(seed for draw in earlier for seed in draw.seeds)}
    seeds: list[int] = []
    while len(seeds) < len(wanted):
        seed = secrets.randbelow(SEEDS)
        if seed not in taken:
            seeds.append(seed)
            taken.add(seed)
    now = versions(record, args.referee)
    return Draw(record.name, date=verdicts.today(), by=args.by, seeds=tuple(seeds), **now)


def home_of(record: Record, args: JudgeOptions) -> Path:
    """The folder of all evaluations of a record's folder."""
    home = args.work / f"{record.track.name}_{record.name}"
    home.mkdir(parents=True, exist_ok=True)
    return home


def open_evaluation(record: Record, args: JudgeOptions) -> Evaluation:
    """The evaluation that was begun, or a new one whose seeds are drawn and recorded now.

    The draw of a trial is recorded in the work folder alone, and no verdict is kept of it. One that was begun
    must be ended before there is another. Raises VerifierError if it cannot go on, unless another one is
    asked for, which counts.
    """
    home = home_of(record, args)
    place = record.track.folder if args.write else home
    earlier = [draw for draw in verdicts.read_draws(place) if draw.folder == record.name]
    if earlier:
        last = Evaluation(record, home, earlier[-1], args.referee)
        if last.obstacle and not args.again:
            words = f"its evaluation of {last.draw.date} cannot go on: {last.obstacle}"
            raise VerifierError(f"{record.path}: {words}; --again draws other seeds, and is counted")
        if not last.obstacle and not (args.again and last.finished):
            return last
    evaluation = Evaluation(record, home, draw_seeds(record, earlier, args), args.referee)
    evaluation.folder.mkdir()
    verdicts.record_draw(place, evaluation.draw)
    return evaluation


# --- training ---------------------------------------------------------------------------------------------


def need_everything(record: Record, args: JudgeOptions) -> None:
    """Raises VerifierError where something of ours is missing. No text is decoded: training comes first."""
    training.need_devices(record.track)
    training.training_files(record, args.data)
    folder = args.data / "datasets" / record.track.dataset["name"]
    missing = [str(args.second)] if args.second and not args.second.exists() else []
    if not any(folder.glob("*_val_*.bin")):
        missing.append(f"{folder}/*_val_*.bin")
    if record.track.dataset["second"] == "file" and args.second is None:
        missing.append("the second text, which --second names")
    if missing:
        raise VerifierError(f"{record.path}: cannot be judged here, for want of {', '.join(missing)}")


def reference_of(evaluation: Evaluation, data: Path) -> dict[str, float]:
    """How operations are charged: as for the seeds that this machine trained before, else measured now."""
    here = this_machine().items()
    for seed in evaluation.seeds:
        trained = evaluation.read(seed, "room") or {}
        if here <= trained.items():
            return {name: trained[name] for name in ("factor", "start") if name in trained}
    return training.measure_reference(evaluation.record, data)


def train_seed(evaluation: Evaluation, seed: int, data: Path) -> dict:
    """Train a seed, without the documents that it draws; what came of it. Raises NoSandbox, VerifierError."""
    evaluation.check_unchanged()
    evaluation.place(seed).mkdir(exist_ok=True)
    reference = reference_of(evaluation, data)
    found = training.train(evaluation.record, seed, data, evaluation.place(seed), reference, lacking=seed)
    evaluation.write(seed, "room", found)
    return found


def train_all(evaluation: Evaluation, data: Path) -> Iterator[Check]:
    """Each seed. One that fails is the last. Raises NoSandbox, VerifierError."""
    for seed in evaluation.seeds:
        found = evaluation.read(seed, "room") or train_seed(evaluation, seed, data)
        yield from of_seed(seed, check_trained(evaluation.record, found))
        if found["code"] or found["wrong"]:
            return


def check_trained(record: Record, found: dict) -> Iterator[Check]:
    track = record.track
    ended = training.check_ended("training", found)
    yield ended
    if ended.verdict == "PASS":
        size = found["artifact_bytes"] + record.code_bytes
        most = track["budget_bytes"]
        yield check("bytes", size <= most, f"{size} bytes; {track.name} allows {most}")
        yield training.check_seconds(track, found["train_seconds"])
        yield from training.check_work(track, found)


# --- scores -----------------------------------------------------------------------------------------------


def score_seed(evaluation: Evaluation, seed: int, text: Text, args: JudgeOptions) -> dict:
    """Score and prove what a seed's training gave. Raises NoSandbox, VerifierError, DataError."""
    artifact = evaluation.place(seed) / ARTIFACT
    if file_sha256(artifact).hex() != evaluation.read(seed, "room")["artifact_sha256"]:
        raise VerifierError(f"{artifact}: is not what the training gave; remove {artifact.parent}")
    job = find_job(evaluation.record.path, artifact=artifact, data=args.data, second=args.second)
    found: dict = {}
    lines = []
    for line in referee(job, text, proof=True):
        if isinstance(line, Result):
            found = {
                "score": line.bpb,
                "processor_seconds": round(line.seconds, 1),
                "seconds": round(line.wall, 1),
                "limits": line.limits,
            }
        else:
            lines.append([line.verdict, line.name, line.text])
    found["lines"] = lines
    evaluation.write(seed, "score", found)
    return found


def score_all(evaluation: Evaluation, args: JudgeOptions) -> Iterator[Check]:
    """Each seed's artifact. Raises NoSandbox, VerifierError, DataError."""
    text = None
    for seed in evaluation.seeds:
        found = evaluation.read(seed, "score")
        if found is None or any(line[:2] == ["SKIP", "eval-time"] for line in found["lines"]):
            text = text or validation_text(evaluation.record.track, args.data)
            found = score_seed(evaluation, seed, text, args)
        yield from of_seed(seed, check_scored(evaluation.record.track, found))


def check_scored(track: Track, found: dict) -> Iterator[Check]:
    if "score" in found:
        yield check("score", True, f"{found['score']:.8f} bits per byte of the new artifact")
    for verdict, name, text in found["lines"]:
        if (verdict, name) != ("SKIP", "second-text") or track.dataset["second"] is not None:
            yield Check(verdict, name, text)


# --- the verdict ------------------------------------------------------------------------------------------


def check_rank(its: ScoredRecord, incumbent: ScoredRecord | None) -> Check:
    """The track's rule, over the incumbent of now."""
    if its.record.field("claim") == "none":
        return note("gain", "claims nothing")
    if incumbent and not its.record.track.counts_flops:
        machine, theirs = ({name: one.machine.get(name) for name in KIND} for one in (its, incumbent))
        if machine != theirs:
            text = f"seconds count, and {incumbent.name} was judged on {theirs}, this one on {machine}"
            return skip("machine", text)
    return verdicts.check_gain(its, incumbent, "the judged scores of both")


def judge(path: Path, args: JudgeOptions) -> Iterator[Check | Finding]:
    """The lines of one folder, then the verdict. Raises NoSandbox, VerifierError: then there is none."""
    record = Record(path)
    said = []
    for line in check_papers(record):
        said.append(line)
        yield line
    if any(line.verdict == "FAIL" for line in said):
        yield conclude(said)
    elif limits.find() is None:
        line = skip("limits", "no cgroups bound a script here, so it could hide seconds and memory")
        yield line
        yield conclude([*said, line])
    else:
        yield from judge_here(record, args, said)


def judge_here(record: Record, args: JudgeOptions, said: list[Check]) -> Iterator[Check | Finding]:
    """Trainings, scores, the rule and the verdict. `said`: of the papers. Raises NoSandbox, VerifierError."""
    need_everything(record, args)
    busy = f"{record.path}: another process judges it here; wait for its end"
    with locked(home_of(record, args), file="lock", refusal=busy):
        evaluation = open_evaluation(record, args)
        for line in check_evaluation(evaluation, args):
            said.append(line)
            yield line
        yield conclude(said, evaluation)


def check_evaluation(evaluation: Evaluation, args: JudgeOptions) -> Iterator[Check]:
    """Train and score each seed, as far as that was not done before. Raises NoSandbox, VerifierError."""
    kind = "evaluation" if args.write else "a trial, of which no verdict is kept: evaluation"
    number = evaluation.scored().evaluation
    seeds = [*evaluation.seeds]
    yield note("evaluation", f"{kind} {number} of this folder, seeds {seeds}; {evaluation.folder}")
    yield from train_all(evaluation, args.data)
    if evaluation.failed_in_training:
        return
    try:
        yield from score_all(evaluation, args)
    except DataError as error:
        raise VerifierError(str(error)) from None
    its = evaluation.scored()
    if its.complete:
        yield check_rank(its, verdicts.best_before(its.record.track, its.name))


def conclude(said: list[Check], evaluation: Evaluation | None = None) -> Finding:
    """The verdict on what the lines say. Whatever is missing makes it `unverified`."""
    failed = list(dict.fromkeys(line.name for line in said if line.verdict == "FAIL"))
    left = {line.name: line.text for line in said if line.verdict == "SKIP"}
    left.pop("gain", None)  # of papers that claim nothing
    more = kept_fields(evaluation) if evaluation else {}
    if failed:
        evidence = verdicts.ON_TRAINING if evaluation else verdicts.ON_PAPERS
        return Finding("fails", evidence, failed, left, more)
    if left or not evaluation:
        return Finding("unverified", verdicts.NOTHING, [], left, more)
    word = "verified" if evaluation.record.field("claim") == "none" else "ranked"
    return Finding(word, verdicts.ON_TRAINING, more=more)


def kept_fields(evaluation: Evaluation) -> dict:
    """What a verdict keeps of an evaluation."""
    its = evaluation.scored()
    judged = {"seeds": its.seeds, "mean": its.mean if its.scores else None}
    incumbent = verdicts.best_before(its.record.track, its.name)
    if its.complete and incumbent and its.record.field("claim") != "none":
        gain = its.gain_over(incumbent)
        judged |= {"beats": incumbent.name, "gain": gain.bpb, "least": gain.least, "p": gain.p}
        judged["alpha"] = gain.below
    draw = evaluation.draw
    return {"judged": judged, "referee": draw.referee, "track": draw.track, "machine": its.machine}
