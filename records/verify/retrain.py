"""The sealed room: a record's script trains once more where it can see nothing but the training text.

It holds the record's script, the training shards, the tokenizer, the packages of the track and a folder to
write to. It holds no validation text, no artifact, no network and no other file. So the artifact that comes
out of it was made from the script and the training text alone.

torch's counter counts the operations. Checkpoints of the run, drawn at random, are resumed in rooms of their
own, uncompiled, for a few steps. A script can cheat here. The counter sees only the products of torch, not
those of numpy, of C or of a fused LSTM, and it runs in the script's own process. So operations that it does
not see are no fault, and no merit. A script can find out that it is being counted and do less. But its losses
must then be those of the whole run, and the line shows how many operations a processor second of the whole
run had, beside what this machine can do. The rest is for a person who reads the script.
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.command import DataError, printable
from data.files import parse_json, sha256
from records.archive.checks import Check, VerifierError, check, note, skip
from records.archive.folders import SCRIPT
from records.archive.record import Record
from records.archive.submission import ClaimedRun, cpuinfo, parse_run
from records.archive.tracks import Track, tokenizer_path
from records.referee.scoring import Result, referee
from records.referee.text import Text
from records.sandbox.inside import room
from records.sandbox.jobs import processor_speed
from records.sandbox.limits import Limits
from records.sandbox.predictor import Mode, sandbox_user, watched
from records.verify.papers import wrong_steps

RUN = Path("logs/room")  # the run's folder in the room's /room/work
METRICS = "metrics.jsonl"
FINAL = b'{"event": "final"'  # the mark of a run that must not go on
SETUP_SECONDS = 600  # beside the track's: to start, compile and write the artifact
CHECKPOINT_SECONDS = 2.0  # between checkpoints of the run
POINTS = 3  # checkpoints from which operations are counted, beside the start
LAST = POINTS  # place of the last checkpoint
STEPS, TO_THE_END = 6, 1 << 30  # counted from each, or more, and from the last
COMPARED = 9  # of them, by their losses
SLACK = 0.01  # of operations
LOSS_SLACK = {"float32": 0.005, "bfloat16": 0.03}  # of a loss, between compiled and uncompiled steps
MAX_FILE, MAX_WORK = 1 << 30, 8 << 30  # bytes that a run may leave in one file, and in all
MAX_METRICS = 64 << 20  # bytes of its metrics or log
# beside our own errors, whatever numbers and names of a stranger lead to
OF_THE_RECORD = (DataError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
HEADER = 1024  # bytes of a shard before its tokens
HOSTS = "127.0.0.1 localhost sandbox\n"  # by which a script's processes find each other


# --- what a record wrote ----------------------------------------------------------------------------------


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A temporary folder, removed at the end with everything that a record put into it, however deep."""
    folder = tempfile.mkdtemp(prefix="bytegolf-retrain-")
    try:
        yield Path(folder)
    finally:
        subprocess.run(["rm", "-rf", folder])


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


def settings(record: Record, seed: int, **more: str) -> dict[str, str]:
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
    threads = run.about.get("threads", "")
    alike = run.about.get("processor") == cpuinfo("model name")
    if alike and threads.isdigit() and 0 < int(threads) <= os.cpu_count():
        given["OMP_NUM_THREADS"] = threads  # bits depend on it
    return given | more


def need_devices(track: Track) -> None:
    """Raises VerifierError where this machine has fewer GPUs than the track's."""
    here = len([*Path("/dev").glob("nvidia[0-9]*")])
    if track["device"] == "cuda" and here < track.devices:
        raise VerifierError(f"{track.name}: trains on {track.devices} CUDA GPUs, this machine has {here}")


def training_shards(record: Record, data: Path) -> list[Path]:
    """Paths of the track's training shards. Raises VerifierError if they are not here.

    Nobody has cut the training text by a record's own tokenizer.
    """
    if record.own_tokenizer:
        raise VerifierError(f"{record.path}: brings a tokenizer, and a room has the track's shards alone")
    dataset = record.track.dataset
    folder = data / "datasets" / dataset["name"]
    paths = sorted(folder.glob("*_train_*.bin"))
    headers = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            headers.update(file.read(HEADER))
    if not paths or dataset["logged_train_sha256"] not in (None, headers.hexdigest()):
        mend = "python -m data.prepare demo makes the demo's"
        raise VerifierError(f"{folder}: has not the track's training shards; {mend}")
    return paths


@dataclass(frozen=True)
class Done:
    """How a process in the room ended."""

    code: int
    seconds: float
    processor: float  # seconds of all its cores
    said: str  # the last of it, or what ended it
    limits: str  # who counted: "cgroup v1", "cgroup v2" or "watchdog"


def run_room(
    record: Record,
    data: Path,
    work: Path,
    given: dict[str, str],
    look: Callable = lambda: None,
    steps: int = 0,
) -> Done:
    """Run the record's script in the folder `work`, to which it may write. `look` is called every 0.2 s.

    `steps`: 0, or the number of steps whose operations are counted. Raises NoSandbox, VerifierError.
    """
    track = record.track
    need_devices(track)
    seconds = SETUP_SECONDS if 0 < steps < TO_THE_END else SETUP_SECONDS + track["train_seconds"]
    limits = Limits(
        memory=track.devices * Limits.memory,
        tasks=track.devices * Limits.tasks,
        processor=os.cpu_count() * seconds,
        seconds=seconds,
        output=16 << 20,
        files=MAX_FILE,
    )
    mode = Mode(track["device"], hidden=(data / "datasets",))
    for path in (work, *work.rglob("*")):
        os.chown(path, sandbox_user() or -1, -1)
    inside = {"work": work, "tokenizer.model": tokenizer_path(track, data, record.path)}
    inside |= {f"data/{path.name}": path for path in training_shards(record, data)}
    with tempfile.TemporaryDirectory(prefix="bytegolf-room-") as folder:
        stage = Path(folder, "room")
        hosts = Path(folder, "hosts")
        hosts.write_text(HOSTS)
        for name in ("work", "data"):
            (stage / name).mkdir(parents=True)
        for name in inside.keys() - {"work"}:
            (stage / name).touch()  # what it is mounted on
        for source in (record.path / SCRIPT, Path(room.__file__)):
            shutil.copyfile(source, stage / source.name)
        for path in Path(folder).rglob("*"):
            path.chmod(0o755)  # whatever the caller's umask: another user reads them
        binds = [(path, f"/room/{name}", name == "work") for name, path in inside.items()]
        binds = [(stage, "/room", False), (hosts, "/etc/hosts", False), *binds]
        what = ["count", str(steps)] if steps else ["train", str(track.devices)]
        words = [os.path.abspath(sys.executable), "-I", "-B", "/room/room.py", json.dumps(given), *what]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with watched(words, binds, track["imports"], mode, limits, folders=(work,), **pipes) as watchdog:
            while watchdog.process.poll() is None:
                look()
                size = subprocess.run(["du", "-sk", work], capture_output=True, text=True).stdout.split()
                if size and int(size[0]) << 10 > MAX_WORK:
                    watchdog.end("files", f"wrote more than {MAX_WORK} bytes")
                time.sleep(0.2)
    watchdog.check_machine()
    said = watchdog.verdict[1] if watchdog.verdict else watchdog.tail.decode(errors="replace")[-300:]
    wall = time.monotonic() - watchdog.began
    code = watchdog.process.returncode or int(bool(watchdog.verdict))
    return Done(code, wall, watchdog.seconds, printable(said), watchdog.kind)


# --- points from which operations are counted -------------------------------------------------------------


class Points:
    """Copies of checkpoints, drawn with equal chance while a run writes them, and of the last one."""

    def __init__(self, work: Path, root: Path):
        self.work = work
        self.root = root
        self.rng = np.random.default_rng()
        self.seen: set[str] = set()
        self.kept: dict[int, Path] = {}  # by place; the last one's is LAST

    def look(self) -> None:
        """Take up what is new."""
        try:
            fd = open_below(self.work, RUN / "checkpoint")
            names = os.listdir(fd)
            os.close(fd)
        except OSError:
            return
        for name in sorted(name for name in names if name.endswith(".ckpt") and name not in self.seen):
            self.seen.add(name)
            place = len(self.kept) if len(self.kept) < POINTS else int(self.rng.integers(len(self.seen)))
            if place < POINTS:
                self.keep(place, name)

    def keep(self, place: int, name: str) -> None:
        """Copy a checkpoint and what belongs to it, unless the run has removed it meanwhile."""
        target = self.root / f"point{place}"
        shutil.rmtree(target, ignore_errors=True)
        self.kept.pop(place, None)
        try:
            for file in (RUN / "checkpoint" / name, RUN / METRICS, RUN / "config.json"):
                data = read_below(self.work, file, MAX_FILE)
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                (target / file).write_bytes(data.partition(FINAL)[0] if file.name == METRICS else data)
        except DataError:
            return
        self.kept[place] = target


@dataclass(frozen=True)
class Counted:
    """Operations of a few steps of a run that was resumed in a room of its own."""

    steps: str
    found: int  # by torch; 0: what it counted is not known to be theirs
    logged: int  # by the metrics of the whole run
    beside: int  # by torch, before and after all steps
    loss_off: float  # largest difference to the whole run, as a part of the loss


def step_events(metrics: bytes) -> dict[int, dict]:
    """The steps of a metrics.jsonl by number."""
    events = [parse_json(line) for line in metrics.split(b"\n") if line]
    return {event["step"]: event for event in events if event["event"] == "step"}


@dataclass(frozen=True)
class Readings:
    """What the counter had when a room's steps were logged."""

    steps: dict[int, dict]  # those that were logged while operations were counted, by number
    at: dict[int, int]  # operations by step; steps that were logged together have one count, the last one's
    begun: int  # operations at the first reading
    last: int  # at the last one
    ended: bool  # the whole run did
    total: int  # operations at the end


def read_counts(work: Path) -> Readings:
    """What a room left. Raises DataError."""
    metrics = read_below(work, RUN / METRICS, MAX_METRICS)
    counts = parse_json(read_below(work, Path(room.COUNTS), MAX_METRICS))
    readings, found = counts["readings"], {}
    lasts = {}  # the last step that was logged with so many operations
    ends = [offset for offset, _ in readings[1:]] + [len(metrics)]
    for (offset, operations), end in zip(readings, ends):
        if steps := step_events(metrics[offset:end]):
            found |= steps
            lasts[operations] = max(steps)
    if [*found] != [*range(min(found, default=1), max(found, default=0) + 1)] or min(found, default=1) < 1:
        raise DataError("steps were logged out of order while operations were counted")
    begun, last = (readings[at][1] if readings else 0 for at in (0, -1))
    if not counts["ended"]:
        lasts.pop(last, None)  # more steps may have been about to be logged with these
    at = {step: operations for operations, step in lasts.items()}
    return Readings(found, at, begun, last, counts["ended"], counts["total"])


def loss_off(its: Readings, logged: dict[int, dict]) -> float:
    """The largest difference to the losses that the whole run logged, as a part of the loss.

    Uncompiled steps drift away from the compiled ones, so only the first of a room that was ended count.
    """
    steps = [*its.steps][: None if its.ended else COMPARED]
    pairs = [(its.steps[step]["train_loss"], logged[step]["train_loss"]) for step in steps if step in logged]
    return float(np.max([abs(float(one) / float(other) - 1) for one, other in pairs], initial=0.0))


def compare_counts(work: Path, logged: dict[int, dict], before: int) -> Counted:
    """Counted operations of a room beside those that the whole run logged. Raises DataError.

    `before`: steps that had been logged before. A step may be logged while the next one is under way, so a
    count may stand for one step more than was logged.
    """
    its = read_counts(work)
    end, first, last = max(logged, default=0), min(its.steps, default=before), max(its.steps, default=before)
    if last - before < min(3, end - before) or first > before + 1:
        raise DataError(f"steps {first} to {last} were logged while operations were counted, after {before}")
    if not its.steps:
        return Counted("none", 0, 0, its.total, 0.0)

    def flops(step: int) -> int:
        return logged[min(step, end)]["train_flops"] if step > 0 else 0

    first_read, last = min(its.at, default=last), max(its.at, default=last)
    counted = its.at.get(last, its.last)
    if first_read < last:
        operations = counted - its.at[first_read]
        claims = [flops(last + by) - flops(first_read + by) for by in (0, 1)]
        claim = next((claim for claim in claims if near(claim, operations)), max(claims))
        beside = its.at[first_read] - (flops(first_read + 1) - flops(first - 1))
        first = first_read
    else:  # a single count: what came since the first reading is theirs, or nobody knows whose it is
        claim = flops(last) - flops(first - 1)
        beside = counted - claim
        operations = claim if its.at and near(counted - its.begun, claim) else 0
        if its.ended and last - first < STEPS:  # a run's last steps may come together: others are compared
            claim = operations
    if its.ended:
        beside = max(0, beside) + its.total - counted
    return Counted(f"{first} to {last}", operations, claim, max(0, beside), loss_off(its, logged))


# --- verdict ----------------------------------------------------------------------------------------------


def count_again(
    record: Record, seed: int, data: Path, root: Path, points: Points, run: ClaimedRun
) -> Iterator[Counted]:
    """Count operations from the start and from the points. Raises NoSandbox, DataError."""
    logged = {event["step"]: event for event in run.kind("step")}
    slow = {"COMPILE": "0", "TORCH_COMPILE_DISABLE": "1", "WARMUP_STEPS": "0", "CKPT_SECONDS": "0"}
    given = settings(record, seed, **slow)
    start = root / "start"
    start.mkdir()
    points.kept.setdefault(LAST, start)
    for work in {start, *points.kept.values()}:
        steps = TO_THE_END if work == points.kept[LAST] else STEPS
        copied = work / RUN / METRICS
        before = max(step_events(copied.read_bytes()), default=0) if copied.exists() else 0
        done = run_room(record, data, work, given, steps=steps)
        if done.code:
            raise DataError(f"counting ended with exit code {done.code}: {done.said}")
        yield compare_counts(work, logged, before)


def near(one: int, other: int) -> bool:
    """Whether two numbers of operations are the same."""
    return abs(one - other) <= SLACK * max(one, other)


def check_counts(record: Record, seed: int, run: ClaimedRun, done: Done, counted: list[Counted]) -> Check:
    """Operations of the run in the room: no more by torch than it logged, and within the track's limit.

    A note where torch saw fewer than were logged, or none: that they were done, nobody has seen.
    """
    total, limit = run.value("train_flops"), record.track["train_flops"]
    logged = record.runs.get(seed, run).value("train_flops")  # of a fresh seed nothing was logged before
    apart = [one for one in counted if not near(one.found, one.logged)]
    wrong = any(one.found > one.logged for one in apart) or not near(total, logged)
    wrong = wrong or total > limit or list(wrong_steps(run))
    unseen = apart or not any(one.found for one in counted)
    most_off = LOSS_SLACK.get(run.about.get("dtype"), LOSS_SLACK["bfloat16"])
    beside = max(one.beside for one in counted)
    off = max(one.loss_off for one in counted)
    parts = [f"{one.found:.6g} of {one.logged:.6g} in steps {one.steps}" for one in counted]
    rate, peak = total / max(done.processor, 1e-9), processor_speed()
    words = (
        f"{', '.join(parts)}, losses {off:.2%} off, {beside:.3g} beside the steps, in all {total:.6g}, by "
        f"the log {logged:.6g}; expected within {SLACK:.0%}, {most_off:.1%}, {SLACK * limit:g}, {limit:g}; "
        f"{rate / 1e9:.1f} GFLOP in a processor second, of {peak / 1e9:.1f} that this machine can"
    )
    good = not wrong and off <= most_off and beside <= SLACK * limit
    if good and unseen:
        return note("counted", words + "; what is none of torch's products, its counter does not see")
    return check("counted", good, words)


def room_run(work: Path) -> ClaimedRun:
    """What the run in a room's folder says of itself. Raises DataError."""
    log = read_below(work, RUN / "train.log", MAX_METRICS)
    return parse_run("the room", log, read_below(work, RUN / METRICS, MAX_METRICS))


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


def train_whole(record: Record, seed: int, data: Path, root: Path) -> tuple[Done, Points]:
    """A whole run of a seed in a room whose folder is root/work. Raises NoSandbox, VerifierError."""
    work = root / "work"
    work.mkdir()
    points = Points(work, root)
    if not record.track.counts_flops:  # no checkpoint is needed, and none may take seconds from the run
        return run_room(record, data, work, settings(record, seed)), points
    given = settings(record, seed, CKPT_SECONDS=str(CHECKPOINT_SECONDS))
    done = run_room(record, data, work, given, points.look)
    points.look()
    if points.seen and not done.code:
        points.keep(LAST, max(points.seen))
    return done, points


def train_again(
    record: Record, seed: int, data: Path, job_of: Callable, text: Text, root: Path
) -> Iterator[Check]:
    """The lines of one seed. Raises NoSandbox, DataError, and what a stranger's numbers lead to."""
    if seed not in record.runs:
        raise VerifierError(f"--retrain {seed}: the record has the seeds {sorted(record.runs)}")
    done, points = train_whole(record, seed, data, root)
    work = points.work
    words = f"seed {seed}: {done.seconds:.0f} s, {done.processor:.0f} of processors, exit code {done.code}, "
    yield check("retrain", done.code == 0, words + "expected 0" + f": {done.said}" * bool(done.code))
    if done.code:
        return
    artifact = root / "model.ptz"
    artifact.write_bytes(read_below(work, RUN / artifact.name, record.track["budget_bytes"]))
    yield compare_artifact(record, seed, artifact, job_of, text)
    if not record.track.counts_flops:
        yield skip("counted", "the track limits no operations")
        return
    run = room_run(work)
    yield check_counts(record, seed, run, done, list(count_again(record, seed, data, root, points, run)))


def retrain(record: Record, seed: int, data: Path, job_of: Callable, text: Text) -> Iterator[Check]:
    """Train one seed again. `job_of(artifact path)`: how the referee scores.

    Raises NoSandbox and VerifierError, which are no fault of the record.
    """
    name = "retrained"  # of the line that an error ends
    with private_folder() as root:
        try:
            for line in train_again(record, seed, data, job_of, text, root):
                yield line
                name = "counted" if line.name == "retrained" else name
        except OF_THE_RECORD as error:
            yield check(name, False, f"seed {seed}: {error}")
