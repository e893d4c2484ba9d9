"""The judge: a rank rests on what the referee trained itself.

1. The folder's digest is taken, and its papers are checked.
2. As many seeds as the track asks for are drawn from the system's randomness, and recorded in the track's
   folder before any of them is trained. So every try is counted, and nobody draws again until lucky.
3. Each seed is trained in a sandbox. Each training lacks other documents of the text, drawn by its seed, so
   that no script makes its seeds alike. All come before the referee decodes the text or runs a predictor.
4. Their artifacts are scored and proven, and the scores are held against the judged scores of the incumbent,
   the best record before this one.

Nothing that a submitter wrote but the script, and the settings that it ran with, enters a rank. Logs and
artifacts are claims: whether their scores lie where the judged ones do is reported, and decides nothing.

A judging goes on where it was stopped, a seed at a time. Several processes that share repository and work
folder, on one machine or on several, take a seed each. On one machine several may train at once, since none
of them sees the text. A sandbox that does lives alone, whoever started it.

Where another record is the incumbent later, the rule is applied once more to the scores that the verdict
keeps.
"""

import contextlib
import itertools
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.command import DataError, UsageError
from data.files import file_sha256, locked, read_json, write_whole
from records.archive.checks import Check, VerifierError, check, note, of_seed, skip
from records.archive.ranks import ScoredRecord, best_before, check_gain, kept_scores
from records.archive.record import Record
from records.archive.runs import ARTIFACT, this_machine
from records.archive.tracks import DATA, Track
from records.archive.verdicts import (
    NOTHING,
    ON_PAPERS,
    ON_TRAINING,
    Draw,
    Finding,
    folder_sha256,
    number_of,
    number_of_referee,
    read_draws,
    record_draw,
    today,
    track_sha256,
)
from records.referee.scoring import Result, referee
from records.referee.text import Text, validation_text
from records.sandbox import cgroups
from records.sandbox.jobs import find_job
from records.verify.papers import check_papers, check_seconds
from records.verify.training import check_ended, check_work, need_devices, train, training_files

SEEDS = 1 << 31  # numbers that a seed is drawn from
KIND = ("processor", "gpu")  # of a machine, where seconds count
KEPT = (  # what a verdict keeps of a training
    "artifact_sha256",
    "artifact_bytes",
    "train_flops",
    "train_seconds",
    "processor",
    "limits",
    "speeds",
)


@dataclass(frozen=True)
class JudgeOptions:
    work: Path  # folder of all judgings
    data: Path = DATA
    second: Path | None = None
    again: bool = False
    write: bool = False
    by: str = "unknown"
    referee: str = ""  # its version


# --- what a judging keeps ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judging:
    """One judging of one state of a folder, and what came of each of its seeds so far."""

    record: Record
    home: Path  # of all judgings of the folder
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
        if number_of_referee(now["referee"]) != number_of_referee(self.draw.referee):
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

    def in_turn(self) -> Iterator[int]:
        """Each seed, while no other process has it: the free ones first, then the others in turn."""
        left = [*self.seeds]
        for refusal in ("another process has it", ""):
            for seed in [*left]:
                self.place(seed).mkdir(exist_ok=True)
                with contextlib.suppress(UsageError), locked(self.place(seed), file="lock", refusal=refusal):
                    left.remove(seed)
                    yield seed

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
        draws = read_draws(self.record.home)
        number = number_of(draws, self.record.name, self.draw.sha256, self.seeds)
        return ScoredRecord(self.record, seeds, this_machine(), number, self.draw.referee, self.draw.track)


def versions(record: Record, referee: str) -> dict[str, str]:
    track = track_sha256(record.track.folder)
    return {"sha256": folder_sha256(record.path), "track": track, "referee": referee}


def draw_seeds(record: Record, earlier: list[Draw], args: JudgeOptions) -> Draw:
    """As many seeds as the track asks for, none of which the submission or an earlier judging used."""
    wanted = record.track["seeds"]
    taken = {*record.runs, *wanted, *(seed for draw in earlier for seed in draw.seeds)}
    seeds: list[int] = []
    while len(seeds) < len(wanted):
        seed = secrets.randbelow(SEEDS)
        if seed not in taken:
            seeds.append(seed)
            taken.add(seed)
    now = versions(record, args.referee)
    return Draw(record.name, date=today(), by=args.by, seeds=tuple(seeds), **now)


def open_judging(record: Record, args: JudgeOptions) -> Judging:
    """The judging that was begun, or a new one whose seeds are drawn and recorded now.

    The draw of a trial is recorded in the work folder alone, and no verdict is kept of it. One that was begun
    must be ended before there is another. Raises VerifierError if it cannot go on, unless another one is
    asked for, which counts.
    """
    home = args.work / f"{record.track.name}_{record.name}"
    place = record.track.folder if args.write else home
    home.mkdir(parents=True, exist_ok=True)
    with locked(home, file="lock"):
        earlier = [draw for draw in read_draws(place) if draw.folder == record.name]
        if earlier:
            last = Judging(record, home, earlier[-1], args.referee)
            if last.obstacle and not args.again:
                words = f"its judging of {last.draw.date} cannot go on: {last.obstacle}"
                raise VerifierError(f"{record.path}: {words}; --again draws other seeds, and is counted")
            if not last.obstacle and not (args.again and last.finished):
                return last
        judging = Judging(record, home, draw_seeds(record, earlier, args), args.referee)
        judging.folder.mkdir()
        record_draw(place, judging.draw)
        return judging


# --- training ---------------------------------------------------------------------------------------------


def need_everything(record: Record, args: JudgeOptions) -> None:
    """Raises VerifierError where something of ours is missing. No text is decoded: training comes first."""
    need_devices(record.track)
    training_files(record, args.data)
    folder = args.data / "datasets" / record.track.dataset["name"]
    missing = [str(args.second)] if args.second and not args.second.exists() else []
    if not any(folder.glob("*_val_*.bin")):
        missing.append(f"{folder}/*_val_*.bin")
    if record.track.dataset["second"] == "file" and args.second is None:
        missing.append("the second text, which --second names")
    if missing:
        raise VerifierError(f"{record.path}: cannot be judged here, for want of {', '.join(missing)}")


def train_seed(judging: Judging, seed: int, data: Path) -> dict:
    """Train a seed, without the documents that it draws; what came of it. Raises NoSandbox, VerifierError."""
    judging.check_unchanged()
    found = train(judging.record, seed, data, judging.place(seed), lacking=seed)
    judging.write(seed, "room", found)
    return found


def train_all(judging: Judging, data: Path) -> Iterator[Check]:
    """Each seed. One that fails is the last. Raises NoSandbox, VerifierError."""
    for seed in judging.in_turn():
        found = judging.read(seed, "room") or train_seed(judging, seed, data)
        yield from of_seed(seed, check_trained(judging.record, found))
        if found["code"] or found["wrong"]:
            return


def check_trained(record: Record, found: dict) -> Iterator[Check]:
    track = record.track
    ended = check_ended("training", found)
    yield ended
    if ended.verdict == "PASS":
        size = found["artifact_bytes"] + record.code_bytes
        most = track["budget_bytes"]
        yield check("bytes", size <= most, f"{size} bytes, expected {most} at most")
        yield check_seconds(track, found["train_seconds"])
        yield from check_work(track, found)


# --- scores -----------------------------------------------------------------------------------------------


def score_seed(judging: Judging, seed: int, text: Text, args: JudgeOptions) -> dict:
    """Score and prove what a seed's training gave. Raises NoSandbox, VerifierError, DataError."""
    artifact = judging.place(seed) / ARTIFACT
    if file_sha256(artifact).hex() != judging.read(seed, "room")["artifact_sha256"]:
        raise VerifierError(f"{artifact}: is not what the training gave; remove {artifact.parent}")
    job = find_job(judging.record.path, artifact=artifact, data=args.data, second=args.second)
    found: dict = {}
    lines = []
    for line in referee(job, text, True, np.random.default_rng()):
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
    judging.write(seed, "score", found)
    return found


def score_all(judging: Judging, args: JudgeOptions) -> Iterator[Check]:
    """Each seed's artifact. Raises NoSandbox, VerifierError, DataError."""
    text = None
    for seed in judging.in_turn():
        found = judging.read(seed, "score")
        if found is None or any(line[:2] == ["SKIP", "eval-time"] for line in found["lines"]):
            text = text or validation_text(judging.record.track, args.data)
            found = score_seed(judging, seed, text, args)
        yield from of_seed(seed, check_scored(judging.record.track, found))


def check_scored(track: Track, found: dict) -> Iterator[Check]:
    if "score" in found:
        yield check("score", True, f"{found['score']:.8f} bits per byte of the new artifact")
    for verdict, name, text in found["lines"]:
        if (verdict, name) != ("SKIP", "second-text") or track.dataset["second"] is not None:
            yield Check(verdict, name, text)


# --- the verdict ------------------------------------------------------------------------------------------


def compare_claims(record: Record, scores: list[float]) -> Check:
    """Whether the submission's scores lie where the judged ones do: a row, not a gate."""
    claims = [*record.scores.values()]
    noise = record.track["noise_bpb"]
    near = min(scores) - noise <= min(claims) and max(claims) <= max(scores) + noise
    return note(
        "claims",
        f"the submission's scores lie from {min(claims):.6f} to {max(claims):.6f}, the judged ones from "
        f"{min(scores):.6f} to {max(scores):.6f}: {'alike' if near else 'NOT ALIKE'} within {noise:g}",
    )


def check_rank(its: ScoredRecord, incumbent: ScoredRecord | None) -> Check:
    """The track's rule, over the incumbent of now."""
    if its.record.field("claim") == "none":
        return note("gain", "claims nothing")
    if incumbent and not its.record.track.counts_flops:
        machine, theirs = ({name: one.machine.get(name) for name in KIND} for one in (its, incumbent))
        if machine != theirs:
            text = f"seconds count, and {incumbent.name} was judged on {theirs}, this one on {machine}"
            return skip("machine", text)
    return check_gain(its, incumbent, "the judged scores of both")


def judge(path: Path, args: JudgeOptions) -> Iterator[Check | Finding]:
    """The lines of one folder, then the verdict. Raises NoSandbox, VerifierError: then there is none."""
    record = Record(path)
    said: list[Check] = []
    scored = None
    for line in itertools.chain(check_papers(record), check_judged(record, args, said)):
        if isinstance(line, ScoredRecord):
            scored = line
        else:
            said.append(line)
            yield line
    yield conclude(record, said, scored)


def check_judged(record: Record, args: JudgeOptions, said: list[Check]) -> Iterator[Check | ScoredRecord]:
    """Training and scores, or what a verdict kept of them, and the rule. `said`: of the papers."""
    if any(line.verdict == "FAIL" for line in said):
        return
    scored = None if args.again else kept_scores(record)
    if scored:
        seeds = ", ".join(scored.seeds)
        yield note("judging", f"seeds {seeds} were judged already: nothing is trained again")
    elif cgroups.find() is None:
        yield skip("limits", "no cgroups bound a script here, so it could hide seconds and memory")
        return
    else:
        need_everything(record, args)
        judging = open_judging(record, args)
        kind = "judging" if args.write else "a trial, of which no verdict is kept: judging"
        number = judging.scored().judging
        yield note("judging", f"{kind} {number} of this folder, seeds {[*judging.seeds]}; {judging.folder}")
        yield from train_all(judging, args.data)
        if not judging.failed_in_training:
            try:
                yield from score_all(judging, args)
            except DataError as error:
                raise VerifierError(str(error)) from None
        scored = judging.scored()
    yield scored
    if scored.complete:
        yield compare_claims(record, scored.scores)
        yield check_rank(scored, best_before(record.track, record.name))


def conclude(record: Record, said: list[Check], scored: ScoredRecord | None) -> Finding:
    """The verdict on what the lines say. Whatever is missing makes it `unverified`."""
    failed = list(dict.fromkeys(line.name for line in said if line.verdict == "FAIL"))
    left = {line.name: line.text for line in said if line.verdict == "SKIP"}
    left.pop("gain", None)  # of papers that claim nothing
    if scored is None:
        return Finding("fails", ON_PAPERS, failed) if failed else Finding("unverified", NOTHING, [], left)
    more = kept_fields(record, scored)
    if failed:
        return Finding("fails", ON_TRAINING, failed, left, more)
    if left:
        return Finding("unverified", NOTHING, [], left, more)
    claims_nothing = record.field("claim") == "none"
    return Finding("verified" if claims_nothing else "ranked", ON_TRAINING, [], {}, more)


def kept_fields(record: Record, scored: ScoredRecord) -> dict:
    judged = {"seeds": scored.seeds, "mean": scored.mean if scored.scores else None}
    incumbent = best_before(record.track, record.name)
    if scored.complete and incumbent and record.field("claim") != "none":
        gain = scored.gain_over(incumbent)
        judged |= {"beats": incumbent.name, "gain": gain.bpb, "least": gain.least, "p": gain.p}
        judged["alpha"] = gain.below
    return {
        "judged": judged,
        "referee": scored.referee,
        "track": scored.track,
        "machine": scored.machine,
    }
