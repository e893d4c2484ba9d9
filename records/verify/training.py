"""The training sandbox: a record's script trains once more where it can see nothing but the training text.

It holds the record's script, the training shards, the tokenizer, the packages of the track and a folder to
write to. It holds no validation text, no artifact, no network and no other file. So the artifact that comes
out of it was made from the script and the training text alone.

A training is charged operations for its processor seconds, whatever spent them: numpy, C or torch. What its
log says of them is not believed. Of a processor second it is charged what a preset makes of one on the same
machine, which is measured there, and as many seconds as the preset takes to start are free.
"""

import contextlib
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from data.command import QUIET, DataError, printable
from data.files import sha256
from data.shards import Tokenizer, without_some
from records.archive import runs
from records.archive.checks import Check, VerifierError, check, skip
from records.archive.runs import ARTIFACT, SCRIPT, ClaimedRun, Record, cpuinfo, this_machine
from records.archive.tracks import FLOPPY_BYTES, RECORDS, Track, tokenizer_path
from records.sandbox.inside import training as program
from records.sandbox.installation import Files
from records.sandbox.jobs import processor_speed
from records.sandbox.limits import Limits, Watchdog
from records.sandbox.predictor import Mode, on_this_machine, watched

RUN = Path("logs/room")  # the run's folder in the sandbox's /room/work
SETUP_SECONDS = 600  # beside the track's: to start, compile and write the artifact
REFERENCE = RECORDS / "track_floppy/2026-11-22_Preset" / SCRIPT  # frozen, so no fork changes the charge
REFERENCE_STEPS = 40  # about 20 seconds
SMALL = {  # the shape of the preset minute, which makes a third as much of a processor second
    "NUM_LAYERS": "2",
    "MODEL_DIM": "128",
    "NUM_HEADS": "2",
    "NUM_KV_HEADS": "1",
    "BATCH_SLOTS": "8",
    "TRAIN_SEQ_LEN": "256",
    "TRAIN_BATCH_TOKENS": "2048",
    "COMPILE": "0",
}
REFERENCE_IMPORTS = ("numpy", "safetensors", "sentencepiece", "torch", "tqdm")
STEP = re.compile(rb"^step:(\d+)/.* train_flops:(\S+)\n", re.MULTILINE)  # a line of the reference's log
SLACK = 1.5  # how much of the track's operations a training may be charged
SMALL_SLACK = 2.0  # where products are small, so that threads wait for each other
ONE_CORE = 64  # size of products that no library shares among threads, whose waiting takes processor seconds
SPEED_EVERY = 60  # seconds between two measurements of the machine; a tenth of them beside the reference
MOST_LEFT = 1 << 30  # bytes that a run may leave in one file, and a quarter of those in all
# beside our own errors, whatever numbers and names of a stranger lead to
OF_THE_RECORD = (DataError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
HEADER = 1024  # bytes of a shard before its tokens
PATHS = {"DATA_PATH": "/room/data", "TOKENIZER_PATH": "/room/tokenizer.model", "RUN_ID": RUN.name}
HOSTS = b"127.0.0.1 localhost sandbox\n"  # by which a script's processes find each other


# --- what it is given -------------------------------------------------------------------------------------


def number_format(track: Track) -> str:
    """DTYPE of all trainings. A processor that must emulate bfloat16 would take days."""
    native = {"avx512_bf16", "amx_bf16"} & set(cpuinfo("flags").split())
    return "bfloat16" if native or track["device"] == "cuda" else "float32"


def settings(record: Record, seed: int) -> dict[str, str]:
    """The script's environment: the settings of the record's run, and the paths in the sandbox."""
    run = record.runs.get(seed) or next(iter(record.runs.values()))  # a fresh seed's are those of the others
    given = run.given | PATHS | {"SEED": str(seed), "DTYPE": number_format(record.track)}
    threads = run.about.get("threads")
    alike = run.about.get("processor") == cpuinfo("model name")
    if alike and threads in map(str, range(1, os.cpu_count() + 1)):
        given["OMP_NUM_THREADS"] = threads  # bits depend on it
    return given


def need_devices(track: Track) -> None:
    """Raises VerifierError where this machine has fewer GPUs than the track's."""
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if track["device"] == "cuda" and found < track.devices:
        raise VerifierError(f"{track.name} trains on {track.devices} CUDA GPUs, this machine has {found}")


def training_files(record: Record, data: Path) -> dict[str, Path]:
    """The training text and the tokenizer, by their names in the sandbox. Raises VerifierError."""
    dataset = record.track.dataset
    folder = data / "datasets" / dataset["name"]
    shards = sorted(folder.glob("*_train_*.bin"))
    headers = hashlib.sha256()
    for path in shards:
        with open(path, "rb") as file:
            headers.update(file.read(HEADER))
    if not shards or dataset["logged_train_sha256"] not in (None, headers.hexdigest()):
        mend = "python -m data prepare demo makes the demo's"
        raise VerifierError(f"{folder}: has not the track's training shards; {mend}")
    tokenizer = tokenizer_path(record.track, data)
    if not tokenizer.exists():
        raise VerifierError(f"{tokenizer}: is missing, and no seed can be trained without it")
    return {"tokenizer.model": tokenizer, **{f"data/{path.name}": path for path in shards}}


def sandbox_files(record: Record, data: Path, lacking: int | None) -> Files:
    """All that it holds, by path. `lacking`: the seed that draws the documents which the text lacks."""
    given: Files = {**training_files(record, data)}
    if lacking is not None:
        tokenizer = Tokenizer(given["tokenizer.model"])
        for name in [name for name in given if name.startswith("data/")]:
            given[name] = without_some(given[name], tokenizer, lacking)
    given |= {SCRIPT: record.path / SCRIPT, "training.py": Path(program.__file__)}
    return {f"/room/{name}": source for name, source in given.items()} | {"/etc/hosts": HOSTS}


# --- the process ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    work: Path  # the folder that it wrote to
    code: int
    said: str  # the last of it, or what ended it
    seconds: float
    processor_seconds: float  # of all its cores
    speeds: tuple[float, float, float]  # operations in a processor second of products: least, mean, greatest
    limits: str  # who counted: "cgroup v1", "cgroup v2" or "watchdog"


@contextlib.contextmanager
def script_sandbox(
    track: Track, data: Path, files: Files, given: dict[str, str], imports: Iterable[str]
) -> Iterator[Watchdog]:
    """A script that trains until the block ends; `given`: its settings. Raises NoSandbox, VerifierError."""
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
    python = [os.path.abspath(sys.executable), "-I", "-B", "/room/training.py"]
    words = [*python, json.dumps(given), str(track.devices)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with on_this_machine(sees_text=False), watched(words, files, imports, mode, limits, **pipes) as watchdog:
        yield watchdog


@contextlib.contextmanager
def training_sandbox(
    record: Record, data: Path, given: dict[str, str], lacking: int | None = None
) -> Iterator[Training]:
    """Run the record's script to its end; what it left can be read until the block ends.

    `lacking`: the seed that draws the documents which its training text lacks; None: it lacks none.
    Raises NoSandbox, VerifierError.
    """
    files = sandbox_files(record, data, lacking)
    with script_sandbox(record.track, data, files, given, record.track["imports"]) as watchdog:
        speeds: list[float] = []
        for _ in waiting(watchdog, f"seed {given.get('SEED')} trains", speeds, SPEED_EVERY):
            pass
        watchdog.stop()
        watchdog.check_machine()
        wall = time.monotonic() - watchdog.began
        speeds.append(processor_speed(ONE_CORE))
        yield Training(
            work=watchdog.space / "work",
            code=watchdog.process.returncode or int(bool(watchdog.verdict)),
            said=last_words(watchdog),
            seconds=round(wall, 1),
            processor_seconds=round(watchdog.seconds, 1),
            speeds=(min(speeds), statistics.fmean(speeds), max(speeds)),
            limits=watchdog.kind,
        )


def waiting(watchdog: Watchdog, what: str, speeds: list[float], every: float) -> Iterator[None]:
    """Until the process ends, five times a second. Every QUIET seconds a line says how far it is.

    `speeds` gets the machine's: one at first, and one each `every` seconds.
    """
    said = 0.0
    while watchdog.process.poll() is None:
        seconds = time.monotonic() - watchdog.began
        if seconds >= len(speeds) * every:
            speeds.append(processor_speed(ONE_CORE))
        if seconds - said >= QUIET:
            said = seconds
            steps = re.findall(rb"\bstep:[0-9/]+", watchdog.tail)
            where = f"{what}: {seconds:.0f} s {steps[-1].decode() if steps else ''}".rstrip()
            print(where, file=sys.stderr, flush=True)
        yield
        time.sleep(0.2)


def last_words(watchdog: Watchdog) -> str:
    """What ended a process, or what it said last, and whether it had no room for its files."""
    said = watchdog.verdict[1] if watchdog.verdict else watchdog.tail.decode(errors="replace")[-300:]
    space = os.statvfs(watchdog.space)
    if not space.f_bavail or not space.f_favail:
        size = space.f_blocks * space.f_frsize
        said = f"all of its {size} bytes or {space.f_files} files are used: {said}"
    return printable(said)


# --- the charge -------------------------------------------------------------------------------------------


def is_small(track: Track) -> bool:
    """Whether the preset minute fits the track, and floppy does not."""
    return track["budget_bytes"] < FLOPPY_BYTES


def reference_settings(track: Track, data: Path) -> dict[str, str]:
    """The preset that fits the track, on its text, one thread, a line a step. Raises DataError."""
    preset = {
        "PRESET": "floppy",
        "VOCAB_SIZE": str(Tokenizer(tokenizer_path(track, data)).vocab_size),
        "DTYPE": number_format(track),
        "OMP_NUM_THREADS": "1",
        "SEED": "0",
        "DOC_TOKENS": "0",
        "MAX_FLOPS": "0",
        "ITERATIONS": str(REFERENCE_STEPS),
        "TRAIN_LOG_EVERY": "1",
    }
    return PATHS | preset | (SMALL if is_small(track) else {})


def measure_reference(record: Record, data: Path) -> dict[str, float]:
    """How a training is charged here, by what the preset makes of this machine on the track's training text.

    `factor`: operations that its steps make in a processor second, over the products of a core in one.
    `start`: processor seconds before its first step. Nothing that a submission says changes them. Empty
    where the track limits no operations. Raises NoSandbox, VerifierError, DataError.
    """
    track = record.track
    if not track.counts_flops:
        return {}
    files = sandbox_files(record, data, None) | {f"/room/{SCRIPT}": REFERENCE}
    given = reference_settings(track, data)
    speeds: list[float] = []
    points = []  # operations and processor seconds so far
    step = 0
    with script_sandbox(track, data, files, given, REFERENCE_IMPORTS) as watchdog:
        for _ in waiting(watchdog, "the reference trains", speeds, SPEED_EVERY / 10):
            if lines := STEP.findall(watchdog.tail):
                step, flops = int(lines[-1][0]), float(lines[-1][1])
                points.append((flops, watchdog.seconds))
            if step == REFERENCE_STEPS:
                break
        watchdog.stop()
        watchdog.check_machine()
        if step < REFERENCE_STEPS:
            why = f"the reference ended after step {step} of {REFERENCE_STEPS}: {last_words(watchdog)}"
            raise VerifierError(f"{REFERENCE}: no operations can be charged here, {why}")
    (first, began), (last, ended) = points[0], points[-1]
    factor = (last - first) / (ended - began) / statistics.fmean(speeds)
    return {"factor": factor, "start": round(began, 1)}


# --- what it left -----------------------------------------------------------------------------------------


def read_below(folder: Path, name: Path, most: int) -> bytes:
    """A plain file of at most so many bytes that an ended process left, behind no link. Raises DataError."""
    path = folder / name
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), name) or not path.exists():
        raise DataError(f"the run left no {name}")
    if not path.is_file() or path.stat().st_size > most:
        raise DataError(f"the run left a {name} that is no plain file of at most {most} bytes")
    return path.read_bytes()


def run_of(work: Path) -> ClaimedRun:
    """What the run in the sandbox's folder says of itself. Raises DataError."""
    log = read_below(work, RUN / "train.log", runs.MAX_FILE[".log"])
    metrics = read_below(work, RUN / "metrics.jsonl", runs.MAX_FILE[".jsonl"])
    return runs.parse_run("train.log", log, metrics)


def train(
    record: Record,
    seed: int,
    data: Path,
    folder: Path,
    reference: dict[str, float],
    lacking: int | None = None,
) -> dict:
    """Train a seed; what came of it, its artifact in `folder`. Raises NoSandbox, VerifierError."""
    track = record.track
    with training_sandbox(record, data, settings(record, seed), lacking) as ended:
        found = asdict(ended) | {"wrong": ""} | reference | this_machine()
        del found["work"]
        if ended.code:
            return found
        try:
            blob = read_below(ended.work, RUN / ARTIFACT, track["budget_bytes"])
            run = run_of(ended.work)
            (folder / ARTIFACT).write_bytes(blob)
            found |= {
                "artifact_sha256": sha256(blob),
                "artifact_bytes": len(blob),
                "train_flops": run.value("train_flops") if track.counts_flops else None,
                "train_seconds": run.seconds_before_last_step(),
            }
        except OF_THE_RECORD as error:
            found["wrong"] = str(error)
    return found


def check_seconds(track: Track, seconds: float) -> Check:
    most = track["train_seconds"]
    text = f"{seconds:.1f} s and the step under way; {track.name} allows {most:g} s"
    return check("train-seconds", seconds <= most, text)


def check_flops(track: Track, flops: int) -> Check:
    most = track["train_flops"]
    return check("train-flops", flops <= most, f"{flops:.6g} operations; {track.name} allows {most:g}")


def check_ended(name: str, found: dict) -> Check:
    """Whether a training came to its end and left what it should."""
    good = not found["code"] and not found["wrong"]
    reason = "" if good else f": {found['wrong'] or found['said']}"
    took = f"{found['seconds']} s, {found['processor_seconds']} of processors"
    return check(name, good, f"{took}, exit code {found['code']}, expected 0{reason}")


def check_work(track: Track, found: dict) -> Iterator[Check]:
    """Operations as logged, and as charged for a training's processor seconds: what the preset makes in them.

    It fails if it was charged too much at the least of this machine's speeds, and passes if it was not at
    their mean. Nothing is checked where the track limits no operations.
    """
    if not track.counts_flops:
        return
    yield check_flops(track, found["train_flops"])
    processor = max(0.0, found["processor_seconds"] - found["start"])
    factor = found["factor"]
    limit = (SMALL_SLACK if is_small(track) else SLACK) * track["train_flops"]
    low, mean, high = found["speeds"]
    charged = factor * mean * processor
    text = (
        f"{charged:.4g} operations are charged for {processor:.1f} processor seconds, after "
        f"{found['start']:.1f} to start, expected {limit:.4g} at most: this machine makes {low / 1e9:.1f} to "
        f"{high / 1e9:.1f} GFLOP of products in one, and the preset {factor:.2f} times as many"
    )
    if charged > limit >= factor * low * processor:
        yield skip("work", f"{text}; the machine's speed varies too much to tell: again, when it is quiet")
    else:
        yield check("work", charged <= limit, text)
