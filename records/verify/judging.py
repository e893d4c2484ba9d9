"""The judge: a rank rests on what the referee trained itself.

1. The folder's digest is taken, and its papers are checked.
2. As many seeds as the track asks for are drawn from the system's randomness, and recorded in the track's
   folder before any of them is trained. So every try is counted, and nobody draws again until lucky.
3. Each seed is trained in a sealed room. The training text of each room lacks other documents, drawn by its
   seed, so that no script makes its seeds alike. All rooms come before the referee decodes the text or runs
   a predictor.
4. The rooms' artifacts are scored and proven, and their scores are held against the judged scores of the best
   record before it.

Nothing that a submitter wrote but the script, and the settings that it ran with, enters a rank. Logs and
artifacts are claims: whether their scores lie where the judged ones do is reported, and decides nothing.

A judging goes on where it was stopped, a seed at a time. Several processes that share repository and work
folder, on one machine or on several, take a seed each. On one machine rooms may live at once, since none of
them sees the text. A sandbox that does lives alone, whoever started it.

Where another record before it stands later, the rule is applied once more to the scores that the verdict
keeps.
"""

import contextlib
import fcntl
import json
import secrets
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.command import DataError
from data.files import read_json, sha256, write_whole
from records.archive.checks import Check, VerifierError, check, note, skip
from records.archive.judgings import Draw, number_of, read_draws, record_draw
from records.archive.ranks import Evidence, Rival, best_before, check_gain, kept_evidence
from records.archive.record import Record
from records.archive.submission import this_machine
from records.archive.tracks import DATA, Track
from records.archive.verdicts import (
    NOTHING,
    ON_PAPERS,
    ON_ROOMS,
    Finding,
    folder_sha256,
    number_of_referee,
    today,
    track_sha256,
)
from records.referee.scoring import Result, referee
from records.referee.text import Text, validation_text
from records.sandbox import cgroups
from records.sandbox.jobs import PredictorJob, find_job
from records.verify.papers import check_papers
from records.verify.retrain import ARTIFACT, check_work, need_devices, room_files, train
from records.verify.version import referee_version

SEEDS = 1 << 31  # numbers that a seed is drawn from
KIND = ("processor", "gpu")  # of a machine, where seconds count
KEPT = (  # what a verdict keeps of a room
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
    """What the judge does, as the command's help has it."""

    work: Path  # folder of all judgings
    data: Path = DATA
    second: Path | None = None
    again: bool = False
    write: bool = False
    by: str = "unknown"


# --- what a judging keeps ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judging:
    """One judging of one state of a folder, and what came of each of its seeds so far."""

    record: Record
    home: Path  # of all judgings of the folder
    draw: Draw

    @property
    def folder(self) -> Path:
        return self.home / str(self.seeds[0])

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.draw.seeds

    @property
    def track(self) -> Track:
        return self.record.track

    @property
    def obstacle(self) -> str:
        """Why it cannot go on; empty where it can."""
        now = versions(self.record)
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
        """`room` or `score` of a seed; None where it is not there yet."""
        path = self.place(seed) / f"{name}.json"
        return read_json(path) if path.exists() else None

    def write(self, seed: int, name: str, value: dict) -> None:
        text = json.dumps(value, indent=1)
        write_whole(self.place(seed) / f"{name}.json", f"{text}\n".encode())

    @property
    def failed_in_room(self) -> bool:
        rooms = [self.read(seed, "room") for seed in self.seeds]
        return any(room and (room["code"] or room["wrong"]) for room in rooms)

    @property
    def finished(self) -> bool:
        return self.failed_in_room or all(self.read(seed, "score") for seed in self.seeds)

    def check_unchanged(self) -> None:
        """Raises VerifierError if the folder is another than the one whose digest was taken."""
        if folder_sha256(self.record.path) != self.draw.sha256:
            raise VerifierError(f"{self.record.path}: has changed while it was judged; judge it --again")

    def evidence(self) -> Evidence:
        """What came of it so far."""
        draws = read_draws(self.track.folder)
        number = number_of(draws, self.record.name, self.draw.sha256, self.seeds)
        seeds = {str(seed): self.found(seed) for seed in self.seeds}
        return Evidence(seeds, number, self.draw.referee, self.draw.track, this_machine())

    def found(self, seed: int) -> dict:
        """What a verdict keeps of a seed."""
        room = self.read(seed, "room") or {}
        score = self.read(seed, "score") or {}
        its = {name: room[name] for name in KEPT if name in room}
        its["room_processor_seconds"] = room.get("processor_seconds")
        if "score" in score:
            its |= {"score": score["score"], "eval_processor_seconds": score["processor_seconds"]}
        return its


def versions(record: Record) -> dict[str, str]:
    """The digests of folder and track, and the referee's version, as they are now."""
    track = track_sha256(record.track.folder)
    return {"sha256": folder_sha256(record.path), "track": track, "referee": referee_version()}


def draw_seeds(record: Record, earlier: list[Draw], by: str) -> Draw:
    """As many seeds as the track asks for, none of which the submission or an earlier judging used."""
    wanted = record.track["seeds"]
    taken = {*record.runs, *wanted, *(seed for draw in earlier for seed in draw.seeds)}
    seeds = []
    while len(seeds) < len(wanted):
        seed = secrets.randbelow(SEEDS)
        if seed not in taken:
            seeds.append(seed)
            taken.add(seed)
    return Draw(record.name, date=today(), by=by, seeds=tuple(seeds), **versions(record))


def open_judging(record: Record, args: JudgeOptions) -> Judging:
    """The judging that was begun, or a new one whose seeds are drawn and recorded now.

    The draw of a trial is recorded in the work folder alone, and no verdict is kept of it. One that was begun
    must be ended before there is another. Raises VerifierError if it cannot go on, unless another one is
    asked for, which counts.
    """
    home = args.work / f"{record.track.name}_{record.name}"
    place = record.track.folder if args.write else home
    with claimed(home, wait=True):
        earlier = [draw for draw in read_draws(place) if draw.folder == record.name]
        if earlier:
            last = Judging(record, home, earlier[-1])
            if last.obstacle and not args.again:
                words = f"its judging of {last.draw.date} cannot go on: {last.obstacle}"
                raise VerifierError(f"{record.path}: {words}; --again draws other seeds, and is counted")
            if not last.obstacle and not (args.again and last.finished):
                return last
        judging = Judging(record, home, draw_seeds(record, earlier, args.by))
        judging.folder.mkdir()
        record_draw(place, judging.draw)
        return judging


# --- rooms ------------------------------------------------------------------------------------------------


def need_everything(record: Record, data: Path, second: Path | None) -> None:
    """Raises VerifierError where something of ours is missing. No text is decoded: rooms come first."""
    track = record.track
    need_devices(track)
    room_files(record, data)
    folder = data / "datasets" / track.dataset["name"]
    missing = [str(second)] if second and not second.exists() else []
    if not any(folder.glob("*_val_*.bin")):
        missing.append(f"{folder}/*_val_*.bin")
    if track.dataset["second"] == "file" and second is None:
        missing.append("the second text, which --second names")
    if missing:
        raise VerifierError(f"{record.path}: cannot be judged here, for want of {', '.join(missing)}")


def train_seed(judging: Judging, seed: int, data: Path) -> dict:
    """Train a seed in a room that lacks other documents; what came of it. Raises NoSandbox, VerifierError."""
    room = train(judging.record, seed, data, judging.place(seed), lacking=seed)
    judging.write(seed, "room", room)
    return room


def of_seed(seed: int, lines: Iterable[Check]) -> Iterator[Check]:
    """The same lines, which say whose they are."""
    return (replace(line, text=f"seed {seed}: {line.text}") for line in lines)


def check_room(record: Record, room: dict) -> Iterator[Check]:
    """The track's limits, of a run that we watched."""
    track = record.track
    good = not room["code"] and not room["wrong"]
    reason = "" if good else f": {room['wrong'] or room['said']}"
    took = f"{room['seconds']} s, {room['processor_seconds']} of processors"
    yield check("room", good, f"{took}, exit code {room['code']}, expected 0{reason}")
    if not good:
        return
    size = room["artifact_bytes"] + record.code_bytes
    most = track["budget_bytes"]
    yield check("bytes", size <= most, f"{size} bytes, expected {most} at most")
    seconds, most = room["train_seconds"], track["train_seconds"]
    text = f"{seconds:.1f} s and the step under way, expected {most:g} s at most"
    yield check("train-seconds", seconds <= most, text)
    yield from check_work(track, room)


def train_all(judging: Judging, data: Path) -> Iterator[Check]:
    """Each seed in a room. One that fails is the last. Raises NoSandbox, VerifierError."""
    for seed in in_turn(judging):
        room = judging.read(seed, "room")
        if room is None:
            judging.check_unchanged()
            room = train_seed(judging, seed, data)
        yield from of_seed(seed, check_room(judging.record, room))
        if room["code"] or room["wrong"]:
            return


def in_turn(judging: Judging) -> Iterator[int]:
    """Each seed, while it is ours: the free ones first, then each of the others once its process is done."""
    left = [*judging.seeds]
    for wait in (False, True):
        for seed in [*left]:
            with claimed(judging.place(seed), wait) as mine:
                if mine:
                    left.remove(seed)
                    yield seed


@contextlib.contextmanager
def claimed(folder: Path, wait: bool) -> Iterator[bool]:
    """Whether nobody else works in a folder now; it is ours until the block ends, or this process does.

    `wait`: until that is so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


# --- scores -----------------------------------------------------------------------------------------------


def score_seed(judging: Judging, seed: int, text: Text, args: JudgeOptions) -> dict:
    """Score and prove a room's artifact. Raises NoSandbox, DataError."""
    job = job_of(judging, seed, args)
    found = {}
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
    judging.check_unchanged()
    found["lines"] = lines
    judging.write(seed, "score", found)
    return found


def job_of(judging: Judging, seed: int, args: JudgeOptions) -> PredictorJob:
    """How the referee runs the artifact of a room."""
    artifact = judging.place(seed) / ARTIFACT
    room = judging.read(seed, "room")
    if sha256(artifact.read_bytes()) != room["artifact_sha256"]:
        raise VerifierError(f"{artifact}: is not what came out of the room; remove {artifact.parent}")
    return find_job(judging.record.path, artifact=artifact, data=args.data, second=args.second)


def score_all(judging: Judging, args: JudgeOptions) -> Iterator[Check]:
    """Each room's artifact. Raises NoSandbox, VerifierError, DataError."""
    text = None
    for seed in in_turn(judging):
        found = judging.read(seed, "score")
        if found is None or any(line[:2] == ["SKIP", "eval-time"] for line in found["lines"]):
            text = text or validation_text(judging.track, args.data)
            found = score_seed(judging, seed, text, args)
        yield from of_seed(seed, check_scored(judging.track, found))


def check_scored(track: Track, found: dict) -> Iterator[Check]:
    """The referee's lines on a room's artifact."""
    if "score" in found:
        yield check("score", True, f"{found['score']:.8f} bits per byte of the room's artifact")
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


def check_rank(record: Record, found: Evidence, before: Rival | None) -> Check:
    """The track's rule, over the best record before it that stands now."""
    if record.field("claim") == "none":
        return note("gain", "claims nothing")
    if before and not record.track.counts_flops:
        machine, theirs = ({name: one.get(name) for name in KIND} for one in (found.machine, before.machine))
        if machine != theirs:
            text = f"seconds count, and {before.name} was judged on {theirs}, this one on {machine}"
            return skip("machine", text)
    return check_gain(found.rival(record), before, "the judged scores of both")


def kept_fields(record: Record, found: Evidence, before: Rival | None) -> dict:
    """What the verdict keeps of a judging."""
    judged = {"seeds": found.seeds, "mean": statistics.fmean(found.scores) if found.scores else None}
    if found.complete and before and record.field("claim") != "none":
        gain = found.rival(record).gain_over(before)
        judged |= {"beats": before.name, "gain": gain.bpb, "least": gain.least, "p": gain.p}
        judged["alpha"] = gain.below
    return {"judged": judged, "referee": found.referee, "track": found.track, "machine": found.machine}


class Judge:
    """One command's judging of a folder: its lines as they come, then `finding`."""

    def __init__(self, path: Path, args: JudgeOptions):
        self.record = Record(path)
        self.args = args
        self.said: list[Check] = []
        self.evidence: Evidence | None = None
        self.rival: Rival | None = None
        self.finding: Finding | None = None

    def lines(self) -> Iterator[Check]:
        """Raises NoSandbox, VerifierError: then there is no verdict."""
        for step in (check_papers(self.record), self.judge()):
            for line in step:
                self.said.append(line)
                yield line
            if self.texts("FAIL"):
                break
        self.finding = self.conclude()

    def texts(self, verdict: str) -> dict[str, str]:
        """What was said with a verdict, by the names of the checks."""
        return {line.name: line.text for line in self.said if line.verdict == verdict}

    def judge(self) -> Iterator[Check]:
        """Rooms and scores, or what a verdict kept of them, and the rule."""
        if not self.args.again:
            self.evidence = kept_evidence(self.record)
        if self.evidence:
            seeds = ", ".join(self.evidence.seeds)
            yield note("judging", f"seeds {seeds} were judged already: nothing is trained again")
        elif cgroups.find() is None:
            yield skip("limits", "no cgroups bound a room here, so it could hide seconds and memory")
            return
        else:
            yield from self.train_and_score()
        self.rival = best_before(self.record.track, self.record.name)
        if self.evidence.complete:
            yield compare_claims(self.record, self.evidence.scores)
            yield check_rank(self.record, self.evidence, self.rival)

    def train_and_score(self) -> Iterator[Check]:
        """Rooms and scores."""
        need_everything(self.record, self.args.data, self.args.second)
        judging = open_judging(self.record, self.args)
        kind = "judging" if self.args.write else "a trial, of which no verdict is kept: judging"
        number = judging.evidence().judging
        yield note("judging", f"{kind} {number} of this folder, seeds {[*judging.seeds]}; {judging.folder}")
        yield from train_all(judging, self.args.data)
        if not judging.failed_in_room:
            try:
                yield from score_all(judging, self.args)
            except DataError as error:
                raise VerifierError(str(error)) from None
        self.evidence = judging.evidence()

    def conclude(self) -> Finding:
        """The verdict on what the lines say. Whatever is missing makes it `not judged`."""
        failed = [*self.texts("FAIL")]
        left = self.texts("SKIP")
        left.pop("gain", None)  # of papers that claim nothing
        if self.evidence is None:
            return Finding("fails", ON_PAPERS, failed) if failed else Finding("not judged", NOTHING, [], left)
        more = kept_fields(self.record, self.evidence, self.rival)
        if failed:
            return Finding("fails", ON_ROOMS, failed, left, more)
        if left:
            return Finding("not judged", NOTHING, [], left, more)
        claims_nothing = self.record.field("claim") == "none"
        return Finding("holds" if claims_nothing else "ranked", ON_ROOMS, [], {}, more)
