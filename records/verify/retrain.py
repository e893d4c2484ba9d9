"""The sealed room: a record's script trains once more where it can see nothing but the training text.

It holds the record's script, the training shards, the tokenizer, the packages of the track and a folder to
write to. It holds no validation text, no artifact, no network and no other file. So the artifact that comes
out of it was made from the script and the training text alone.

A room is charged operations for its processor seconds, whatever spent them: numpy, C or torch. What its log
says of them is not believed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.command import DataError, printable
from data.files import scratch_folder, sha256
from data.shards import Tokenizer, without_some
from records.archive.checks import Check, VerifierError, check, skip
from records.archive.folders import MAX_FILE, SCRIPT
from records.archive.record import Record
from records.archive.submission import ClaimedRun, cpuinfo, parse_run, this_machine
from records.archive.tracks import Track, tokenizer_path
from records.referee.scoring import Result, referee
from records.referee.text import Text
from records.sandbox.inside import training
from records.sandbox.jobs import processor_speed
from records.sandbox.limits import Limits, Watchdog
from records.sandbox.predictor import Mode, on_this_machine, watched

RUN = Path("logs/room")  # the run's folder in the room's /room/work
ARTIFACT = "model.ptz"
SETUP_SECONDS = 600  # beside the track's: to start, compile and write the artifact
# What a processor second is charged, over the products that a core makes in one. By its verdict the steps of
# 2026-11-26_Windows-OwnValue, the preset with two changes, made 129.3 GFLOP where products made 154.3.
WORK = 0.84
SLACK = 1.5  # how much of the track's operations a room may be charged, its start included
ONE_CORE = 64  # size of products that no library shares among threads, whose waiting takes processor seconds
SPEED_EVERY = 60  # seconds
MOST_LEFT = 1 << 30  # bytes that a run may leave in one file, and a quarter of those in all
# beside our own errors, whatever numbers and names of a stranger lead to
OF_THE_RECORD = (DataError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
HEADER = 1024  # bytes of a shard before its tokens
HOSTS = b"127.0.0.1 localhost sandbox\n"  # by which a script's processes find each other


# --- what a record wrote ----------------------------------------------------------------------------------


def open_below(folder: Path, name: Path) -> int:
    """Open a path below a record's folder. Links are not followed, because they may lead anywhere."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for part in name.parts:
        above = fd
        try:
            fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
        finally:
            os.close(above)
    return fd


def read_below(folder: Path, name: Path, most: int) -> bytes:
    """A plain file that a record wrote, of at most so many bytes. Raises DataError."""
    try:
        fd = open_below(folder, name)
    except OSError as error:
        raise DataError(f"the run left no {name}: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise DataError(f"the run left a {name} that is no plain file of at most {most} bytes")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(fd)


# --- the room ---------------------------------------------------------------------------------------------


def settings(record: Record, seed: int) -> dict[str, str]:
    """The script's environment: the settings of the record's run, and the paths in the room."""
    run = record.runs.get(seed) or next(iter(record.runs.values()))  # a fresh seed's are those of the others
    native = record.track["device"] == "cuda" or {"avx512_bf16", "amx_bf16"} & set(cpuinfo("flags").split())
    given = run.given | {
        "DATA_PATH": "/room/data",
        "TOKENIZER_PATH": "/room/tokenizer.model",
        "SEED": str(seed),
        "RUN_ID": RUN.name,
        # a processor that must emulate bfloat16 would take days
        "DTYPE": "bfloat16" if native and run.about.get("dtype") == "bfloat16" else "float32",
    }
    threads = run.about.get("threads")
    alike = run.about.get("processor") == cpuinfo("model name")
    if alike and threads in map(str, range(1, os.cpu_count() + 1)):
        given["OMP_NUM_THREADS"] = threads  # bits depend on it
    return given


def need_devices(track: Track) -> None:
    """Raises VerifierError where this machine has fewer GPUs than the track's."""
    here = len([*Path("/dev").glob("nvidia[0-9]*")])
    if track["device"] == "cuda" and here < track.devices:
        raise VerifierError(f"{track.name}: trains on {track.devices} CUDA GPUs, this machine has {here}")


def training_shards(record: Record, data: Path) -> list[Path]:
    """Paths of the track's training shards. Raises VerifierError if they are not here."""
    dataset = record.track.dataset
    folder = data / "datasets" / dataset["name"]
    paths = sorted(folder.glob("*_train_*.bin"))
    headers = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            headers.update(file.read(HEADER))
    if not paths or dataset["logged_train_sha256"] not in (None, headers.hexdigest()):
        mend = "python -m data prepare demo makes the demo's"
        raise VerifierError(f"{folder}: has not the track's training shards; {mend}")
    return paths


def room_files(record: Record, data: Path) -> dict[str, Path]:
    """The training text and the tokenizer, by their names in the room. Raises VerifierError."""
    files = {"tokenizer.model": tokenizer_path(record.track, data)}
    files |= {f"data/{path.name}": path for path in training_shards(record, data)}
    for path in files.values():
        if not path.exists():
            raise VerifierError(f"{path}: is missing, and no seed can be trained without it")
    return files


@dataclass(frozen=True)
class Done:
    """How a process in the room ended."""

    work: Path  # the folder that it wrote to
    code: int
    said: str  # the last of it, or what ended it
    seconds: float
    processor_seconds: float  # of all its cores
    speeds: tuple[float, float, float]  # operations in a processor second of products: least, mean, greatest
    limits: str  # who counted: "cgroup v1", "cgroup v2" or "watchdog"


def fewer_documents(files: dict[str, Path], seed: int) -> dict[str, bytes]:
    """The room's training shards without the documents that `seed` draws."""
    tokenizer = Tokenizer(files["tokenizer.model"])
    shards = {name: path for name, path in files.items() if name.startswith("data/")}
    return {name: without_some(path, tokenizer, seed) for name, path in shards.items()}


@contextlib.contextmanager
def run_room(record: Record, data: Path, given: dict[str, str], lacking: int | None = None) -> Iterator[Done]:
    """Run the record's script to its end; what it left can be read until the block ends.

    `lacking`: the seed that draws the documents which this room's training text lacks; None: it lacks none.
    Raises NoSandbox, VerifierError.
    """
    track = record.track
    need_devices(track)
    seconds = SETUP_SECONDS + track["train_seconds"]
    limits = Limits(
        memory=track.devices * Limits.memory,
        tasks=track.devices * Limits.tasks,
        processor=os.cpu_count() * seconds,
        seconds=seconds,
        output=16 << 20,
        files=MOST_LEFT,
    )
    mode = Mode(track["device"], hidden=(data / "datasets",))
    files = {f"/room/{path.name}": path for path in (record.path / SCRIPT, Path(training.__file__))}
    given_files = room_files(record, data)
    if lacking is not None:
        given_files |= fewer_documents(given_files, lacking)
    files |= {f"/room/{name}": source for name, source in given_files.items()}
    files["/etc/hosts"] = HOSTS
    python = [os.path.abspath(sys.executable), "-I", "-B", "/room/training.py"]
    words = [*python, json.dumps(given), str(track.devices)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with on_this_machine(sees_text=False):
        speeds = [processor_speed(ONE_CORE)]
        with watched(words, files, track["imports"], mode, limits, **pipes) as watchdog:
            while watchdog.process.poll() is None:
                if time.monotonic() - watchdog.began > len(speeds) * SPEED_EVERY:
                    speeds.append(processor_speed(ONE_CORE))
                time.sleep(0.2)
            watchdog.stop()
            watchdog.check_machine()
            wall = time.monotonic() - watchdog.began
            speeds.append(processor_speed(ONE_CORE))
            yield Done(
                work=watchdog.space / "work",
                code=watchdog.process.returncode or int(bool(watchdog.verdict)),
                said=last_words(watchdog),
                seconds=round(wall, 1),
                processor_seconds=round(watchdog.seconds, 1),
                speeds=(min(speeds), statistics.fmean(speeds), max(speeds)),
                limits=watchdog.kind,
            )


def last_words(watchdog: Watchdog) -> str:
    """What ended a process, or what it said last, and whether it had no room for its files."""
    said = watchdog.verdict[1] if watchdog.verdict else watchdog.tail.decode(errors="replace")[-300:]
    space = os.statvfs(watchdog.space)
    if not space.f_bavail or not space.f_favail:
        size = space.f_blocks * space.f_frsize
        said = f"all of its {size} bytes or {space.f_files} files are used: {said}"
    return printable(said)


def train(record: Record, seed: int, data: Path, folder: Path, lacking: int | None = None) -> dict:
    """Train a seed in a room; what came of it, its artifact in `folder`. Raises NoSandbox, VerifierError."""
    with run_room(record, data, settings(record, seed), lacking) as done:
        room = dataclasses.asdict(done) | {"wrong": "", "processor": this_machine()["processor"]}
        del room["work"]
        if not done.code:
            try:
                room |= keep_run(record.track, done.work, folder)
            except OF_THE_RECORD as error:
                room["wrong"] = str(error)
    return room


def keep_run(track: Track, work: Path, folder: Path) -> dict:
    """Keep the artifact of a room and read its log. Raises OF_THE_RECORD."""
    blob = read_below(work, RUN / ARTIFACT, track["budget_bytes"])
    run = room_run(work)
    (folder / ARTIFACT).write_bytes(blob)
    return {
        "artifact_sha256": sha256(blob),
        "artifact_bytes": len(blob),
        "train_flops": int(run.value("train_flops")) if track.counts_flops else None,
        "train_seconds": run.seconds_before_last_step(),
    }


def room_run(work: Path) -> ClaimedRun:
    """What the run in a room's folder says of itself. Raises DataError."""
    log = read_below(work, RUN / "train.log", MAX_FILE[".log"])
    return parse_run("the room", log, read_below(work, RUN / "metrics.jsonl", MAX_FILE[".jsonl"]))


# --- verdict ----------------------------------------------------------------------------------------------


def check_work(track: Track, room: dict) -> Iterator[Check]:
    """Operations as logged, and as charged for a room's processor seconds by this machine's speeds.

    It fails if it was charged too much at the least of them, and passes if it was not at their mean. Nothing
    is checked where the track limits no operations.
    """
    if not track.counts_flops:
        return
    most = track["train_flops"]
    logged = room["train_flops"]
    processor = room["processor_seconds"]
    yield check("train-flops", logged <= most, f"{logged:.6g} operations, expected {most:g} at most")
    limit = SLACK * most
    low, mean, high = room["speeds"]
    charged = WORK * mean * processor
    text = (
        f"{charged:.4g} operations are charged for {processor:.1f} processor seconds, at {WORK} of products, "
        f"{low / 1e9:.1f} to {high / 1e9:.1f} GFLOP/s, expected {limit:.4g} at most"
    )
    if charged > limit >= WORK * low * processor:
        yield skip("work", f"{text}; the machine's speed varies too much to tell: again, when it is quiet")
    else:
        yield check("work", charged <= limit, text)


def compare_artifact(record: Record, seed: int, artifact: Path, job_of: Callable, text: Text) -> Check:
    """The room's artifact is the record's bit for bit, or scores as it does, within the track's noise.

    Another processor rounds differently, which gives another run. If the record claims nothing, the new
    artifact may lie as far away as its seeds lie apart.
    """
    if sha256(artifact.read_bytes()) == record.runs[seed].value("artifact_sha256"):
        return check("retrained", True, f"seed {seed}: the artifact came back bit for bit, expected so")
    first = next(iter(referee(job_of(artifact), text, False, np.random.default_rng(0))))
    if not isinstance(first, Result):
        return check("retrained", False, f"seed {seed}: the new artifact cannot be scored: {first.text}")
    noise, own = record.track["noise_bpb"], record.scores[seed]
    near = record.scores.values() if record.field("claim") == "none" else [own]
    low, high = min(near) - noise, max(near) + noise
    return check(
        "retrained",
        low <= first.bpb <= high,
        f"seed {seed}: other bits than the record's; the new artifact scores {first.bpb:.8f}, "
        f"{first.bpb - own:+.4f} from the record's, expected {low:.4f} to {high:.4f}",
    )


def retrain(record: Record, seed: int, data: Path, job_of: Callable, text: Text) -> Iterator[Check]:
    """Train one seed again. `job_of(artifact path)`: how the referee scores.

    Raises NoSandbox and VerifierError, which are no fault of the record.
    """
    if seed not in record.runs:
        raise VerifierError(f"--retrain {seed}: the record has the seeds {sorted(record.runs)}")
    with scratch_folder() as folder:
        room = train(record, seed, data, folder)
        took = f"{room['seconds']:.0f} s, {room['processor_seconds']:.0f} of processors"
        reason = f": {room['said']}" if room["code"] else ""
        ended = f"seed {seed}: {took}, exit code {room['code']}, expected 0{reason}"
        yield check("retrain", room["code"] == 0, ended)
        if room["code"]:
            return
        try:
            if room["wrong"]:
                raise DataError(room["wrong"])
            yield compare_artifact(record, seed, folder / ARTIFACT, job_of, text)
        except OF_THE_RECORD as error:
            yield check("retrained", False, f"seed {seed}: {error}")
            return
    yield from check_work(record.track, room)
