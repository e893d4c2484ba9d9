"""The judge: a rank rests on what the referee trained itself.

1. The folder's digest is taken, and its papers are checked.
2. As many seeds as the track asks for are drawn from the system's randomness, and written down before any of
   them is trained, so that nobody draws again until lucky.
3. Each seed is trained in a sealed room. All rooms come before the referee decodes the text or runs a
   predictor.
4. The rooms' artifacts are scored and proven, and their scores are held against the judged scores of the best
   record before it.

Nothing that a submitter wrote but the script, and the settings that it ran with, enters a rank. Logs and
artifacts are claims: whether their scores lie where the judged ones do is reported, and decides nothing.

A judging goes on where it was stopped, a seed at a time. Several machines that share the work folder take a
seed each.
"""

import argparse
import contextlib
import fcntl
import json
import secrets
import statistics
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data.command import DataError
from data.files import read_json, sha256, write_whole
from records.archive.checks import Check, VerifierError, check, note, skip
from records.archive.ranks import Rival, best_before, gain_over
from records.archive.record import Record
from records.archive.statistics import p_apart
from records.archive.submission import this_machine
from records.archive.tracks import Track, tokenizer_path
from records.archive.verdicts import (
    NOTHING,
    ON_PAPERS,
    ON_ROOMS,
    Finding,
    folder_sha256,
    today,
    track_sha256,
)
from records.referee.scoring import Result, referee
from records.referee.text import Text, validation_text
from records.sandbox.jobs import PredictorJob, find_job, processor_speed
from records.sandbox.limits import WATCHDOG
from records.sandbox.predictor import SandboxError
from records.verify.claims import owner_of
from records.verify.papers import check_papers, seconds_before_last_step
from records.verify.retrain import (
    OF_THE_RECORD,
    RUN,
    Done,
    Points,
    check_counts,
    count_again,
    private_folder,
    read_below,
    room_run,
    train_whole,
    training_shards,
)
from records.verify.version import referee_version

SEEDS = 1 << 31  # numbers that a seed is drawn from
SLOWER = 5  # a room's operations run at least at this part of the machine's speed of products
START_SECONDS = 300  # of processors, that a room may spend beside its products: to start and to compile
MORE_CODE = 4096  # bytes at zlib level 9 that code may grow by before a person has read it
ARTIFACT = "model.ptz"


# --- what a judging keeps ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judging:
    """One judging of one state of a folder: the seeds that were drawn, and what came of each so far."""

    record: Record
    folder: Path
    drawn: dict

    @property
    def seeds(self) -> list[int]:
        return self.drawn["seeds"]

    @property
    def track(self) -> Track:
        return self.record.track

    @cached_property
    def tries(self) -> dict[str, int]:
        """How often this folder was judged, this time included, and folders of this track in all."""
        all_of_them = self.folder.parents[2].glob(f"{self.track.name}_*/*/*/draw.json")
        return {"folder": self.drawn["number"], "track": sum(1 for _ in all_of_them)}

    def place(self, seed: int) -> Path:
        return self.folder / f"seed{seed}"

    def read(self, seed: int, name: str) -> dict | None:
        """`room` or `score` of a seed; None where it is not there yet."""
        path = self.place(seed) / f"{name}.json"
        return read_json(path) if path.exists() else None

    def write(self, seed: int, name: str, value: dict) -> None:
        write_json(self.place(seed) / f"{name}.json", value)

    @property
    def failed_in_room(self) -> bool:
        rooms = [self.read(seed, "room") for seed in self.seeds]
        return any(room and (room["code"] or room["wrong"]) for room in rooms)

    @property
    def finished(self) -> bool:
        return self.failed_in_room or all(self.read(seed, "score") for seed in self.seeds)

    def check_unchanged(self) -> None:
        """Raises VerifierError if the folder is another than the one whose digest was taken."""
        if folder_sha256(self.record.path) != self.drawn["sha256"]:
            raise VerifierError(f"{self.record.path}: has changed while it was judged; judge it once more")


def write_json(path: Path, value: dict) -> None:
    write_whole(path, f"{json.dumps(value, indent=1)}\n".encode())


def draw_seeds(record: Record, taken: set[int]) -> list[int]:
    """As many as the track asks for, none of which the submission or an earlier judging used."""
    taken = taken | {*record.runs} | {*record.track["seeds"]}
    found = []
    while len(found) < len(record.track["seeds"]):
        seed = secrets.randbelow(SEEDS)
        if seed not in taken:
            found.append(seed)
            taken.add(seed)
    return found


def earlier_judgings(record: Record, home: Path) -> list[Judging]:
    """Those of the same state of a folder, in order."""
    draws = sorted(home.glob("*/draw.json"), key=lambda path: int(path.parent.name))
    return [Judging(record, path.parent, read_json(path)) for path in draws]


def open_judging(record: Record, work: Path, again: bool) -> Judging:
    """The judging that was begun, or a new one whose seeds are drawn and written down now.

    One that was begun must be ended before there is another, unless the referee or the track's rules have
    changed; each is counted.
    """
    digest = folder_sha256(record.path)
    home = work / f"{record.track.name}_{record.name}" / digest[:16]
    before = earlier_judgings(record, home)
    now = {"sha256": digest, "track": track_sha256(record.track.folder), "referee": referee_version()}
    if before:
        last = before[-1]
        same = {name: last.drawn.get(name) for name in now} == now
        if same and not (again and last.finished):
            return last
    taken = {seed for judging in before for seed in judging.seeds}
    seeds = draw_seeds(record, taken)
    number = len(before) + 1
    drawn = {**now, "number": number, "date": today(), "seeds": seeds, "counted": secrets.choice(seeds)}
    folder = home / str(number)
    folder.mkdir(parents=True)
    write_json(folder / "draw.json", drawn)
    return Judging(record, folder, drawn)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether nobody else works on a seed now; it is ours until the block ends, or this process does."""
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


# --- rooms ------------------------------------------------------------------------------------------------


def need_everything(record: Record, data: Path, second: Path | None) -> None:
    """Raises VerifierError where something of ours is missing. No text is decoded: rooms come first."""
    track = record.track
    training_shards(record, data)
    folder = data / "datasets" / track.dataset["name"]
    needed = [tokenizer_path(track, data), *([second] if second else [])]
    missing = [str(path) for path in needed if not path.exists()]
    if not any(folder.glob("*_val_*.bin")):
        missing.append(f"{folder}/*_val_*.bin")
    if track.dataset["second"] == "file" and second is None:
        missing.append("the second text, which --second names")
    if track["device"] == "cuda" and not Path("/dev/nvidiactl").exists():
        missing.append("a CUDA GPU, which the track's machine has")
    if missing:
        raise VerifierError(f"{record.path}: cannot be judged here, for want of {', '.join(missing)}")


def count_of(record: Record, seed: int, data: Path, root: Path, points: Points, done: Done) -> str:
    """Operations by torch's own counter, in words. It sees products of torch alone, and decides nothing."""
    try:
        run = room_run(points.work)
        return str(
            check_counts(record, seed, run, done, list(count_again(record, seed, data, root, points, run)))
        )
    except OF_THE_RECORD as error:
        return f"could not be counted: {error}"


def train_seed(judging: Judging, seed: int, data: Path) -> dict:
    """Train a seed in a room; what came of it, its artifact beside it. Raises NoSandbox, VerifierError."""
    record = judging.record
    with private_folder() as root:
        before = processor_speed()
        done, points = train_whole(record, seed, data, root)
        room = {
            "code": done.code,
            "said": done.said,
            "wrong": "",
            "seconds": round(done.seconds, 1),
            "processor_seconds": round(done.processor, 1),
            "speed": min(before, processor_speed()),
            "limits": done.limits,
            "processor": this_machine()["processor"],
        }
        if not done.code:
            try:
                room |= keep_run(judging, seed, points.work)
            except OF_THE_RECORD as error:
                room["wrong"] = str(error)
        if not done.code and not room["wrong"] and seed == judging.drawn["counted"]:
            counted = judging.track.counts_flops
            room["counted"] = count_of(record, seed, data, root, points, done) if counted else ""
    judging.write(seed, "room", room)
    return room


def keep_run(judging: Judging, seed: int, work: Path) -> dict:
    """Keep the artifact of a room and read its log. Raises OF_THE_RECORD."""
    blob = read_below(work, RUN / ARTIFACT, judging.track["budget_bytes"])
    run = room_run(work)
    (judging.place(seed) / ARTIFACT).write_bytes(blob)
    flops = int(run.value("train_flops")) if judging.track.counts_flops else None
    return {
        "artifact_sha256": sha256(blob),
        "artifact_bytes": len(blob),
        "train_flops": flops,
        "train_seconds": seconds_before_last_step(run),
    }


def check_room(judging: Judging, seed: int, room: dict) -> Iterator[Check]:
    """The track's limits, of a run that we watched."""
    track = judging.track
    good = not room["code"] and not room["wrong"]
    words = f"seed {seed}: {room['seconds']} s, {room['processor_seconds']} of processors, exit code "
    words += f"{room['code']}, expected 0" + f": {room['wrong'] or room['said']}" * (not good)
    yield check("room", good, words)
    if not good:
        return
    record = judging.record
    size = room["artifact_bytes"] + track.code_size(record.script) + record.own_tokenizer
    most = track["budget_bytes"]
    yield check("bytes", size <= most, f"seed {seed}: {size} bytes, expected {most} at most")
    took, most = room["train_seconds"], track["train_seconds"]
    words = f"seed {seed}: {took:.1f} s and the step under way, expected {most:g} s at most"
    yield check("train-seconds", took <= most, words)
    if track.counts_flops:
        yield from check_work(seed, room, track["train_flops"])
    if room["limits"] == WATCHDOG:
        yield skip("limits", f"seed {seed}: no cgroups bound its room, so seconds and memory may be hidden")


def check_work(seed: int, room: dict, most: int) -> Iterator[Check]:
    """Operations as logged, and as bounded by processor seconds, whatever spent them: numpy, C or torch."""
    logged = room["train_flops"]
    yield check(
        "train-flops", logged <= most, f"seed {seed}: {logged:.6g} operations, expected {most:g} at most"
    )
    seconds = START_SECONDS + SLOWER * most / room["speed"]
    words = (
        f"seed {seed}: {room['processor_seconds']} processor seconds, expected {seconds:.0f} at most: the "
    )
    words += (
        f"track's operations at a fifth of {room['speed'] / 1e9:.1f} GFLOP/s, and {START_SECONDS} to start"
    )
    yield check("work", room["processor_seconds"] <= seconds, words)


def train_all(judging: Judging, data: Path) -> Iterator[Check]:
    """Each seed in a room. One that fails is the last. Raises NoSandbox, VerifierError."""
    elsewhere = []
    for seed in judging.seeds:
        with claimed(judging.place(seed)) as mine:
            room = judging.read(seed, "room")
            if room is None and not mine:
                elsewhere.append(seed)
                continue
            if room is None:
                judging.check_unchanged()
                room = train_seed(judging, seed, data)
        yield from check_room(judging, seed, room)
        if room.get("counted"):
            yield note("counted", f"seed {seed}: {room['counted']}")
        if room["code"] or room["wrong"]:
            return
    wait_for(elsewhere)


def wait_for(elsewhere: list[int]) -> None:
    """Raises VerifierError where another process works on some seeds."""
    if elsewhere:
        raise VerifierError(f"seeds {elsewhere} are under way in another process; run the command again then")


# --- scores -----------------------------------------------------------------------------------------------


def score_seed(judging: Judging, seed: int, text: Text, args: argparse.Namespace) -> dict:
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


def job_of(judging: Judging, seed: int, args: argparse.Namespace) -> PredictorJob:
    """How the referee runs the artifact of a room."""
    artifact = judging.place(seed) / ARTIFACT
    room = judging.read(seed, "room")
    if sha256(artifact.read_bytes()) != room["artifact_sha256"]:
        raise VerifierError(f"{artifact}: is not what came out of the room; remove {artifact.parent}")
    return find_job(judging.record.path, artifact=artifact, data=args.data, second=args.second)


def score_all(judging: Judging, args: argparse.Namespace) -> Iterator[Check]:
    """Each room's artifact. Raises NoSandbox, VerifierError, DataError, SandboxError."""
    text = None
    elsewhere = []
    for seed in judging.seeds:
        with claimed(judging.place(seed)) as mine:
            found = judging.read(seed, "score")
            if found is None and not mine:
                elsewhere.append(seed)
                continue
            if found is None:
                text = text or validation_text(judging.track, args.data, judging.record.path)
                found = score_seed(judging, seed, text, args)
        yield from check_scored(judging, seed, found)
    wait_for(elsewhere)


def check_scored(judging: Judging, seed: int, found: dict) -> Iterator[Check]:
    """The referee's lines on a room's artifact."""
    if "score" in found:
        yield check("score", True, f"seed {seed}: {found['score']:.8f} bits per byte of the room's artifact")
        if found["limits"] == WATCHDOG:
            yield skip("limits", f"seed {seed}: no cgroups bound its scoring")
    for verdict, name, words in found["lines"]:
        if (verdict, name) != ("SKIP", "second-text") or judging.track.dataset["second"] is not None:
            yield Check(verdict, name, f"seed {seed}: {words}")


# --- the verdict ------------------------------------------------------------------------------------------


def code_bytes(script: bytes) -> int:
    return len(zlib.compress(script, 9))


def check_code(record: Record, rival: Rival | None, read_by: str | None) -> Check:
    """Much new code may hold text that was learned from nowhere: then a person reads it before it ranks."""
    size = code_bytes(record.script)
    before = code_bytes(rival.record.script) if rival else size
    words = f"{size} bytes by zlib, {size - before:+} from the record before"
    if size - before <= MORE_CODE or read_by:
        return check("code", True, words + f"; read by {read_by}" * bool(read_by))
    return skip("code", f"{words}, above {MORE_CODE}: whoever has read it says --read-by NAME")


def compare_claims(record: Record, scores: list[float]) -> Check:
    """Whether the submission's scores lie where the judged ones do: a row, not a gate."""
    claims = [*record.scores.values()]
    off = statistics.fmean(claims) - statistics.fmean(scores)
    p = p_apart(claims, scores)
    near = abs(off) <= record.track["noise_bpb"] or p >= record.track["alpha"]
    words = f"the submission's mean {statistics.fmean(claims):.6f} lies {off:+.6f} from the judged "
    return note(
        "claims", words + f"{statistics.fmean(scores):.6f}, p {p:.3g}: {'alike' if near else 'NOT ALIKE'}"
    )


def check_rank(judging: Judging, scores: list[float], rival: Rival | None) -> Iterator[Check]:
    """The track's rule, over the best record before it that stands now."""
    record = judging.record
    if record.field("claim") == "none":
        yield note("gain", "claims nothing")
        return
    if rival is None:
        yield check("gain", True, "no record stands before it, expected so or a gain over the best one")
        return
    machine = {name: this_machine().get(name) for name in ("processor", "gpu")}
    theirs = {name: rival.machine.get(name) for name in machine}
    if not judging.track.counts_flops and machine != theirs:
        yield skip("machine", f"seconds count, and {rival.name} was judged on {theirs}, this is {machine}")
        return
    gain = gain_over(rival, scores, judging.track, judging.drawn["number"])
    yield check("gain", gain.enough, f"over {rival.name}, by the judged scores of both: {gain}")


def evidence(judging: Judging, rival: Rival | None, args: argparse.Namespace) -> dict:
    """What the verdict keeps of a judging."""
    seeds = {}
    for seed in judging.seeds:
        room = judging.read(seed, "room") or {}
        score = judging.read(seed, "score") or {}
        names = ("artifact_sha256", "artifact_bytes", "train_flops", "train_seconds", "processor", "limits")
        its = {name: room[name] for name in names if name in room}
        its["room_processor_seconds"] = room.get("processor_seconds")
        if "score" in score:
            its |= {"score": score["score"], "eval_processor_seconds": score["processor_seconds"]}
        seeds[str(seed)] = its
    scores = [its["score"] for its in seeds.values() if "score" in its]
    judged = {"seeds": seeds, "mean": statistics.fmean(scores) if scores else None}
    if scores and rival and judging.record.field("claim") != "none":
        gain = gain_over(rival, scores, judging.track, judging.drawn["number"])
        judged |= {"beats": rival.name, "gain": gain.bpb, "p": gain.p, "alpha": gain.below}
    if args.read_by:
        judged["read_by"] = args.read_by
    return {"judged": judged}


def conclude(judging: Judging, lines: list[Check], rival: Rival | None, args: argparse.Namespace) -> Finding:
    """The verdict on what the lines say. Whatever is missing makes it `not judged`."""
    failed = list(dict.fromkeys(line.name for line in lines if line.verdict == "FAIL"))
    left = {line.name: line.text for line in lines if line.verdict == "SKIP"}
    more = evidence(judging, rival, args)
    if failed:
        return Finding("fails", ON_ROOMS, failed, left, more)
    if left:
        return Finding("not judged", NOTHING, [], left, more)
    claims_nothing = judging.record.field("claim") == "none"
    return Finding("holds" if claims_nothing else "ranked", ON_ROOMS, [], {}, more)


class Judge:
    """One command's judging of a folder: its lines as they come, then `finding` and `tries`."""

    def __init__(self, path: Path, args: argparse.Namespace):
        self.record = Record(path)
        self.args = args
        self.said: list[Check] = []
        self.finding: Finding | None = None
        self.tries: dict[str, int] | None = None

    def lines(self) -> Iterator[Check]:
        """Raises NoSandbox, VerifierError: then there is no verdict."""
        for line in check_papers(self.record):
            if line.verdict != "SKIP" or line.name != "gain":
                self.said.append(line)
            yield line
        failed = [line.name for line in self.said if line.verdict == "FAIL"]
        if failed:
            self.finding = Finding("fails", ON_PAPERS, failed)
            return
        for line in self.judge():
            self.said.append(line)
            yield line

    def judge(self) -> Iterator[Check]:
        """Rooms, scores and the rule."""
        need_everything(self.record, self.args.data, self.args.second)
        judging = open_judging(self.record, self.args.work, self.args.again)
        self.tries = judging.tries
        times = f"{self.tries['folder']} of this folder, {self.tries['track']} on this track"
        yield note("judging", f"seeds {judging.seeds}; judgings so far: {times}; {judging.folder}")
        yield from train_all(judging, self.args.data)
        rival = best_before(judging.track, self.record.name)
        if not judging.failed_in_room:
            try:
                yield from score_all(judging, self.args)
            except DataError as error:
                yield owner_of(self.record, self.args.data, error)
            except SandboxError as error:  # by the record's own tokenizer
                yield check("sandbox", False, f"{error.kind}: {error}")
            yield from self.rule(judging, rival)
        self.finding = conclude(judging, self.said, rival, self.args)

    def rule(self, judging: Judging, rival: Rival | None) -> Iterator[Check]:
        """The code, the claims and the gain, once every seed has a score."""
        scores = [(judging.read(seed, "score") or {}).get("score") for seed in judging.seeds]
        if None in scores:
            return
        yield check_code(self.record, rival, self.args.read_by)
        yield compare_claims(self.record, scores)
        yield from check_rank(judging, scores, rival)
