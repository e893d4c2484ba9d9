"""Runs and records: a run's log and metrics, a record's folder that holds those of its seeds, a run in logs/.

All that they say are claims until they are verified.
"""

import difflib
import gzip
import io
import math
import platform
import re
import statistics
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from data.command import REPO, DataError, shell
from data.files import file_sha256, parse_json, read_bytes, read_json, sha256
from records.archive.tracks import RECORDS, Track, load_track

SCRIPT = "train_gpt.py"  # what the referee loads
ARTIFACT = "model.ptz"
METRICS = "metrics.jsonl"
PACKED = ".gz"
MAX_METRICS = 16 << 20  # bytes of a run's metrics, unpacked
SECONDS = 86_400  # of one scoring: no track limits them, but a model that hangs ends
NUMBERS = {  # of a log's final block
    **dict.fromkeys(("seed", "steps", "val_tokens", "val_bytes", "artifact_bytes", "train_flops"), int),
    **dict.fromkeys(("val_bpb", "train_seconds"), float),
}

FOLDER = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})_([A-Za-z0-9][A-Za-z0-9-]{0,59})")
SEED = "seed(?:0|[1-9][0-9]{0,9})"  # one way to write each number: seed01 would be seed1 again
FILES = re.compile(
    r"README\.md|submission\.json|train_gpt\.py"
    rf"|train_{SEED}\.log|metrics_{SEED}\.jsonl(?:\.gz)?|model_{SEED}\.ptz"
)
MAX_SEEDS = 60  # of a record
MOST_FILES = 3 * (1 + MAX_SEEDS)  # README, submission and script; of each seed log, metrics and artifact
MAX_PAPERS = 64 << 20  # bytes of the logs and metrics of all seeds, unpacked
MAX_FILE = {".log": 4 << 20, ".jsonl": MAX_METRICS, ".md": 1 << 17, ".json": 1 << 20, ".py": 1 << 20}
MAX_FILE |= {PACKED: 16 << 20}
OF_ONE_RUN = ("SEED", "RUN_ID")  # settings in which the runs of one record may differ
OF_THE_SANDBOX = (*OF_ONE_RUN, "DATA_PATH", "TOKENIZER_PATH", "DTYPE")  # which the judge sets itself


# --- log and metrics --------------------------------------------------------------------------------------


def pack(data: bytes) -> bytes:
    """The same bytes each time, so that a folder made again has the same digest."""
    return gzip.compress(data, 9, mtime=0)


def read_metrics(path: Path) -> bytes:
    """The bytes of metrics, unpacked where the name ends with .gz. Raises DataError."""
    blob = read_bytes(path)
    if path.suffix != PACKED:
        return blob
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        data = unpacker.decompress(blob, MAX_METRICS + 1)  # a thousandth of a file may hold them all
    except zlib.error as error:
        raise DataError(f"{path}: cannot be unpacked: {error}") from None
    if len(data) > MAX_METRICS:
        raise DataError(f"{path}: unpacks to more than {MAX_METRICS} bytes, which no run needs")
    if not unpacker.eof or unpacker.unused_data:
        raise DataError(
            f"{path}: is no whole gzip file, or more than one; python -m records freeze packs one"
        )
    return data


def parse_events(metrics: bytes, where: object) -> Iterator[tuple[str, dict]]:
    """(place, object) of each line of a metrics.jsonl. Raises DataError."""
    for at, line in enumerate(io.BytesIO(metrics), 1):
        if line == b"\n":
            continue
        place = f"{where}:{at}"
        try:
            event = parse_json(line.decode())
        except ValueError as error:
            words = f"is no JSON, expected one object a line: {line[:40]!r} ({error})"
            raise DataError(f"{place}: {words}") from None
        if not isinstance(event, dict):
            raise DataError(
                f'{place}: expected an object with "event", as train_gpt.py writes: {line[:40]!r}'
            )
        yield place, event


@dataclass(frozen=True)
class ClaimedRun:
    """One seed's log, parsed, and its metrics."""

    name: str  # of its log
    log: str
    final: dict[str, str]  # the block after '---'
    metrics: bytes = b""
    metrics_name: str = "metrics.jsonl"

    @property
    def events(self) -> Iterator[tuple[str, dict]]:
        """(place, event), parsed each time: they take forty times their text, too much for all seeds."""
        return parse_events(self.metrics, self.metrics_name)

    def kind(self, event: str) -> list[dict]:
        return [each for _, each in self.events if each.get("event") == event]

    @property
    def given(self) -> dict[str, str]:
        """PRESET and the environment's settings: the log's first line, run:... preset:... NAME=value..."""
        found = re.match(r"run:.*? preset:(\S+)(.*)", self.log)
        if not found:
            raise DataError(f"{self.name}: the log does not begin with run:... preset:...")
        parts = re.split(r" ([A-Z][A-Z0-9_]*)=", found[2])
        return {"PRESET": found[1], **dict(zip(parts[1::2], parts[2::2]))}

    @property
    def about(self) -> dict[str, str]:
        """Machine, versions and hashes, from the log's line of name:value that ends with script_sha256."""
        lines = self.log.split("\n")
        found = [line for line in lines if " processor:" in line and " script_sha256:" in line]
        if not found:
            raise DataError(f"{self.name}: the log has no line ... processor:... script_sha256:...")
        parts = re.split(r"(?:^| )([a-z][a-z0-9_]*):", found[0])
        return dict(zip(parts[1::2], parts[2::2]))

    def value(self, name: str) -> Any:
        """A number, hash or word of the log's final block. Raises DataError."""
        if name not in self.final:
            raise DataError(f"{self.name}: no '{name}:' after the line ---")
        text = self.final[name]
        if name not in NUMBERS:
            return text
        part = " of the whole text: train with VAL_TOKENS_LIMIT=0" if text.endswith(" partial") else ""
        wrong = DataError(f"{self.name}: '{name}: {text[:99]}', expected a number{part}")
        try:
            value = NUMBERS[name](text)
            finite = math.isfinite(value)
        except (ValueError, OverflowError):
            raise wrong from None
        if not finite or not re.fullmatch(r"[0-9][0-9.e+-]*", text):  # '1_0' is 10 for Python
            raise wrong
        return value

    def seconds_before_last_step(self) -> float:
        """Training seconds before the last step: a run may finish the step in which its time is up.

        Raises DataError where they are no number, and what else a stranger's numbers lead to.
        """
        ends = [0.0, 0.0, *(step.get("train_seconds", 0.0) for step in self.kind("step"))]
        seconds = self.value("train_seconds") - (ends[-1] - ends[-2])
        if not math.isfinite(seconds):
            raise DataError(
                f"{self.metrics_name}: train_seconds of the last steps are {ends[-2]} and {ends[-1]}"
            )
        return seconds


def parse_run(name: str, log: bytes, metrics: bytes, metrics_name: str = "metrics.jsonl") -> ClaimedRun:
    """Raises DataError."""
    try:
        text = log.decode()
    except ValueError as error:
        raise DataError(f"{name}: the log cannot be read: {error}") from None
    for _ in parse_events(metrics, metrics_name):
        pass
    body, mark, block = text.rpartition("\n---\n")
    if not mark:
        raise DataError(f"{name}: no finished run: no line '---' in it; the command that began it goes on")
    lines = block.removesuffix("\n").split("\n")
    rows = dict(line.split(": ", 1) for line in lines if re.fullmatch(r"[a-z0-9_]+: \S.*", line))
    if len(rows) < len(lines) or "\n---\n" in body or not all(map(str.isprintable, lines)):
        # a reader would believe the first of two values, a program the last
        raise DataError(f"{name}: after the one line '---' expected lines 'name: value', each name once")
    return ClaimedRun(name, body, rows, metrics, metrics_name)


# --- a record's folder ------------------------------------------------------------------------------------


def most_bytes(path: PurePath, budget: int) -> int:
    """How large a file of a record may be, by its name; an artifact has the track's budget."""
    return MAX_FILE.get(path.suffix, budget)


def is_address(place: object) -> bool:
    """Whether a command names a repo of the hub in place of a folder: hub:user/name[@commit]."""
    return str(place).startswith("hub:")


def seed_of(name: str) -> int:
    return int(re.search(r"seed(\d+)", name)[1])


def read_runs(folder: Path) -> dict[int, ClaimedRun]:
    """The runs of a record's folder by seed. Raises DataError."""
    runs = {}
    left = MAX_PAPERS
    for path in sorted(folder.glob("train_seed*.log")):
        seed = seed_of(path.name)
        log = read_bytes(path)
        found = sorted(folder.glob(f"metrics_seed{seed}.jsonl*"))  # of two verify takes none
        if not found:
            raise DataError(f"{folder}: holds no metrics_seed{seed}.jsonl")
        metrics = read_metrics(found[0])
        left -= len(log) + len(metrics)
        if left < 0:
            raise DataError(f"{folder}: logs and metrics have more than {MAX_PAPERS} bytes, unpacked")
        runs[seed] = parse_run(path.name, log, metrics, found[0].name)
    if not runs:
        raise DataError(f"{folder}: holds no train_seed<N>.log")
    return runs


@dataclass(frozen=True)
class Record:
    """A record's folder, whose files are read when they are needed. All properties raise DataError."""

    path: Path
    frozen_as: str | None = None  # the name that a folder which still grows will have
    track_folder: Path | None = None  # of a record that was fetched, and lies in no track's folder

    @property
    def name(self) -> str:
        """<YYYY-MM-DD>_<Name>"""
        return self.frozen_as or self.path.name

    @property
    def home(self) -> Path:
        return self.track_folder or self.path.parent

    @cached_property
    def track(self) -> Track:
        """The track, with the vocabulary that the record names."""
        track = load_track(self.home)
        try:
            return track.using(self.field("dataset"))
        except DataError:  # which check_submission reports
            return track

    @cached_property
    def submission(self) -> dict:
        return read_json(self.path / "submission.json")

    @cached_property
    def script(self) -> bytes:
        return read_bytes(self.path / SCRIPT)

    @cached_property
    def runs(self) -> dict[int, ClaimedRun]:
        return read_runs(self.path)

    @cached_property
    def artifacts(self) -> dict[int, Path]:
        return {seed_of(path.name): path for path in sorted(self.path.glob("model_seed*.ptz"))}

    @cached_property
    def settings(self) -> bytes:
        """What the judge sets for the script as its runs had it set: text that no artifact need hold.

        A preset that the script knows says nothing that is not in the script.
        """
        run = next(iter(self.runs.values()))
        given = {name: value for name, value in run.given.items() if name not in OF_THE_SANDBOX}
        if given["PRESET"].encode() in self.script:
            del given["PRESET"]
        return " ".join(f"{name}={value}" for name, value in given.items()).encode()

    @property
    def code_bytes(self) -> int:
        return self.track.code_size(self.script) + len(self.settings)

    @property
    def total_bytes(self) -> int:
        """Bytes that must fit the budget: code, and the largest artifact of all seeds."""
        return max(self.values("artifact_bytes")) + self.code_bytes

    @property
    def scores(self) -> dict[int, float]:
        """The referee's bits per byte by seed."""
        return {int(seed): score for seed, score in self.field("scores").items()}

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores.values())

    @property
    def machine(self) -> dict[str, str | None]:
        about = next(iter(self.runs.values())).about
        return {name: about.get(name) for name in ("processor", "gpu", "threads", "ranks")}

    def field(self, key: str) -> Any:
        if key not in self.submission:
            raise DataError(f"submission.json has no {key}")
        return self.submission[key]

    def values(self, name: str) -> list:
        return [run.value(name) for run in self.runs.values()]


# --- the machine ------------------------------------------------------------------------------------------


def cpuinfo(name: str) -> str:
    """The first value of a line of /proc/cpuinfo, '' where there is none."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace") if path.exists() else ""
    found = re.search(rf"^{name}\s*:\s*(.*)", text, re.MULTILINE)
    return found[1] if found else ""


def this_machine() -> dict[str, str]:
    """All that the bits of a score depend on here; `cpu` too, since clouds give many processors one name."""
    import torch

    kind = " ".join(cpuinfo(name) for name in ("cpu family", "model", "stepping", "flags", "Features"))
    return {
        "processor": cpuinfo("model name") or platform.processor(),
        "cpu": sha256(kind.encode())[:16],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }


# --- the folder -------------------------------------------------------------------------------------------


def run_artifact(folder: Path) -> Path:
    return folder / ARTIFACT


def is_run(folder: Path) -> bool:
    """Whether this is a run's folder in logs/."""
    return (folder / "config.json").exists()


def nearest_runs(path: Path) -> str:
    """What a message adds about a run that is not there: runs of a like name, or where commands are run."""
    homes = (Path("logs"), path if path.is_dir() else path.parent)
    found = [each.parent for home in homes for each in home.glob("*/metrics*.jsonl*")]  # a record's, too
    runs = {folder.name: folder for folder in found}
    if names := difflib.get_close_matches(path.name, runs, cutoff=0):
        return f"; the nearest runs: {', '.join(str(runs[name]) for name in names)}"
    if Path.cwd() != REPO and not path.is_absolute():
        return f"; commands are run from the repository's folder: {shell('cd', str(REPO))}"
    return ""


def is_own(folder: Path) -> bool:
    """Whether a run's script is the user's: it lies in logs/ of this checkout or of the working folder.

    Links are followed first. Nothing below records/ is own.
    """
    place = (folder / SCRIPT).resolve()
    homes = [(root / "logs").resolve() for root in (REPO, Path.cwd())]
    inside = any(place.is_relative_to(home) for home in homes)
    return is_run(folder) and inside and not place.is_relative_to(RECORDS.resolve())


def configuration(folder: Path) -> dict[str, str | int | float]:
    """Settings, environment and hashes of a run by their names in config.json. Raises DataError."""
    path = folder / "config.json"
    about = read_json(path) if path.exists() else {}
    found = {}
    for part in ("settings", "environment", "sha256"):
        if isinstance(about.get(part), dict):  # else it is another program's
            found |= about[part]
    return plain(found)


def plain(values: dict[str, Any]) -> dict[str, str | int | float]:
    return {name: value for name, value in values.items() if isinstance(value, str | int | float)}


def named_dataset(record: Path) -> str | None:
    """The dataset that a record's submission.json names, or that a run was trained on. Raises DataError."""
    if (record / "submission.json").exists():
        name = read_json(record / "submission.json").get("dataset")
    else:
        name = Path(str(configuration(record).get("data_path", ""))).name
    return str(name) if name else None


def named_tokenizer(record: Path) -> str | None:
    """sha256 of the tokenizer that a run was trained with. Raises DataError."""
    found = configuration(record).get("tokenizer_sha256")
    return found and str(found)


def places(record: Path, setting: str, home: Path) -> list[Path]:
    """Where a path leads that a run was given, from this folder or the repository, and its name in `home`."""
    path = Path(str(configuration(record).get(setting, "")))
    return [Path.cwd() / path, REPO / path, home.absolute() / path.name] if path.name else []


def find_tokenizer(record: Path, wanted: str | None, data: Path) -> Path:
    """The file of the sha256 `wanted`, from data/tokenizers where it is there. Raises DataError."""
    home = data / "tokenizers"
    # a stranger's folder may not name what is parsed here
    named = places(record, "tokenizer_path", home) if is_own(record) else []
    for path in [*sorted(home.absolute().glob("*.model")), *named]:
        if path.is_file() and file_sha256(path).hex() == wanted:
            return path
    looked = ", ".join(map(str, [*named, home / "*.model"]))
    raise DataError(
        f"{record}: is of no track, and none of {looked} has its tokenizer's sha256, "
        f"{wanted or 'which config.json does not name'}: {shell('cp', 'FILE.model', home)} "
        "brings the tokenizer; --track records/track_floppy names a track"
    )


def own_track(record: Path, wanted: str | None, data: Path) -> Track:
    """Rules for a folder whose text is no track's: those of track_floppy, which holds for any machine.

    Its dataset and its tokenizer are absolute paths. `wanted`: the tokenizer's sha256. Raises DataError.
    """
    folders = places(record, "data_path", data / "datasets") or [record.absolute()]
    dataset = next((path for path in folders if path.is_dir()), folders[0])
    tokenizer = find_tokenizer(record, wanted, data)
    known = configuration(record).get("val_sha256")
    vocabulary = {"name": str(dataset), "tokenizer": str(tokenizer), "logged_val_sha256": known}
    text = {"tokenizer_policy": "provided", "val_sha256": None, "second": None, "vocabularies": [vocabulary]}
    more = {"eval_seconds": SECONDS, "second_band": [0, math.inf], "dataset": text}
    return Track(record, load_track(RECORDS / "track_floppy").rules | more, vocabulary)
