"""The checks of a record's papers: all that can be said of its folder without running anything of it."""

import datetime
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.command import DataError
from records.checks import Check, check, equal, none_wrong, skip
from records.coder import LN2
from records.files import read_bytes, read_json, sha256
from records.folders import (
    FILES,
    FOLDER,
    SCRIPT,
    artifact_paths,
    code_of,
    read_scripts,
    record_folders,
    seed_of,
)
from records.jobs import find_evaluation
from records.source import check_source
from records.submission import Run, read_runs, summary
from records.tracks import Track, load_track, schema_errors
from records.verdicts import read_verdicts

MAX_FILE = {".log": 4 << 20, ".jsonl": 64 << 20, ".md": 1 << 17, ".json": 1 << 20, ".py": 1 << 20}
PICKLE_STARTS = (*(bytes((0x80, version)) for version in range(2, 6)), b"PK\x03\x04")


@dataclass(frozen=True)
class Record:
    """A folder, read when a check needs it. All properties raise DataError."""

    path: Path

    @cached_property
    def track(self) -> Track:
        return load_track(self.path.parent)

    @cached_property
    def submission(self) -> dict:
        return read_json(self.path / "submission.json")

    @cached_property
    def scripts(self) -> dict[str, bytes]:
        return read_scripts(self.path)

    @property
    def code(self) -> bytes:
        return code_of(self.scripts)

    @cached_property
    def runs(self) -> dict[int, Run]:
        return read_runs(self.path)

    @cached_property
    def artifacts(self) -> dict[int, bytes]:
        return {seed: read_bytes(path) for seed, path in artifact_paths(self.path).items()}

    @cached_property
    def tokenizer(self) -> bytes:
        """The record's own tokenizer; the track's is no file of it and costs nothing."""
        own = self.path / "tokenizer.model"
        return read_bytes(own) if own.exists() else b""

    def field(self, *keys: str) -> Any:
        """A value of submission.json."""
        value = self.submission
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise DataError(f"submission.json has no {'/'.join(keys)}")
            value = value[key]
        return value

    def values(self, name: str) -> list:
        """A value of every run's log."""
        return [run.value(name) for run in self.runs.values()]


# --- the folder -------------------------------------------------------------------------------------------


def check_folder(record: Record) -> Iterator[Check]:
    """Grammar of names, nothing hidden, nothing huge."""
    wrong = [] if FOLDER.fullmatch(record.path.name) else [f"the name {record.path.name!r}"]
    paths = sorted(record.path.iterdir())
    for path in paths:
        size = path.lstat().st_size
        if not FILES.fullmatch(path.name):
            wrong.append(f"{path.name!r} has no place in a record")
        elif path.is_symlink() or not path.is_file():
            wrong.append(f"{path.name} is no plain file")
        elif size > MAX_FILE.get(path.suffix, record.track["budget_bytes"]):
            wrong.append(f"{path.name} has {size} bytes")
    names = {path.name for path in paths}
    wrong += [f"{name} is missing" for name in ("README.md", "submission.json", SCRIPT) if name not in names]
    if "tokenizer.model" in names and record.track.dataset["tokenizer_policy"] != "own":
        wrong.append("tokenizer.model, which the track provides")
    wrong += incomplete_seeds(names)
    yield none_wrong("folder", wrong, "the files of a record and no others")


def incomplete_seeds(names: set[str]) -> Iterator[str]:
    """What does not go together among the files of the seeds."""
    logs, metrics, models = (
        [seed_of(name) for name in sorted(names) if re.match(rf"{start}_seed\d", name)]
        for start in ("train", "metrics", "model")
    )
    if sorted(logs) != sorted(metrics) or not set(models) <= set(logs) or len(set(models)) < len(models):
        yield f"logs of seeds {logs}, metrics of {metrics}, models of {models}"


def check_schema(record: Record) -> Iterator[Check]:
    yield none_wrong("schema", schema_errors(record.submission, "submission"), "by records/schema.json")
    yield check_evaluation(record)
    told = f"{record.field('track')}/{record.field('date')}_{record.field('name')}"
    yield equal("names", "the folder is", f"{record.track.folder.resolve().name}/{record.path.name}", told)
    mean = f"{record.field('val_bpb', 'mean'):.4f}"
    there = mean in read_bytes(record.path / "README.md").decode(errors="replace")
    yield check("readme", there, f"README.md has {'' if there else 'not '}the mean {mean}, expected it")


def check_evaluation(record: Record) -> Check:
    try:
        found = find_evaluation(record.path)
    except DataError as error:
        return check("evaluation", False, str(error))
    return check("evaluation", True, f"{found}, expected what the referee can cut")


def check_date(record: Record) -> Iterator[Check]:
    """No date to come, and none before a record that passed already.

    Records stand in the order of their folders' names, so a false date would let a record pass over those
    that it must beat, or stand in the way of those to come.
    """
    name = record.path.name
    text = record.path.name[:10]
    try:
        future = datetime.date.fromisoformat(text) > datetime.date.today() + datetime.timedelta(days=1)
    except ValueError:
        yield check("date", False, f"{text!r} is no date, expected one of the calendar")
        return
    wrong = [f"{text} lies in the future"] if future else []
    verdicts = read_verdicts(record.track.folder)
    later = [other for other, its in verdicts.items() if other > name and its["verdict"] == "pass"]
    if later and name not in verdicts:
        wrong.append(
            f"the folder's name comes before {max(later)}, which passed already: date it a day later"
        )
    yield none_wrong("date", wrong, f"{text}, not in the future and before no record that passed already")


def check_scripts(record: Record) -> Iterator[Check]:
    yield from check_source(record.scripts, record.track)


# --- logs and numbers -------------------------------------------------------------------------------------


def check_hashes(record: Record) -> Iterator[Check]:
    """All logs speak of this code and of the track's data."""
    logged = sorted(set(record.values("script_sha256")))
    yield equal("script-hash", "the logs ran scripts", logged, [sha256(record.code)])
    dataset = record.track.dataset
    tokenizer = sha256(record.tokenizer) if record.tokenizer else dataset["tokenizer_sha256"]
    yield same_data(record, "val", dataset["logged_val_sha256"])
    yield same_data(record, "train", dataset["logged_train_sha256"])
    yield same_data(record, "tokenizer", tokenizer)
    own = dataset["tokenizer_policy"] == "own"
    yield same_count(record, "val_tokens", None if own else dataset["val_tokens"])
    yield same_count(record, "val_bytes", dataset["val_bytes"])


def same_data(record: Record, name: str, wanted: str | None) -> Check:
    """The logs' sha256 of some data; `wanted`: None where the track does not know it."""
    found = sorted(set(record.values(f"{name}_sha256")))
    if wanted is None:
        return check(
            f"data-{name}", len(found) == 1, f"sha256 {found}, expected one, which the track leaves open"
        )
    return equal(f"data-{name}", "sha256", found, [wanted])


def same_count(record: Record, name: str, wanted: int | None) -> Check:
    found = sorted(set(record.values(name)))
    line = name.replace("_", "-")
    if wanted is None:
        return equal(line, "different values", len(found), 1)
    return equal(line, "scored", found, [wanted])


def differences(found: Any, expected: Any, place: str = "") -> Iterator[str]:
    """Where two JSON values differ, in words."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            if key not in found or key not in expected:
                yield f"{place}/{key} is in one of them only"
            else:
                yield from differences(found[key], expected[key], f"{place}/{key}")
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for i, (one, other) in enumerate(zip(found, expected)):
            yield from differences(one, other, f"{place}/{i}")
    elif found != expected or type(found) is not type(expected):
        yield f"{place} is {found}, expected {expected}"


def check_numbers(record: Record) -> Iterator[Check]:
    """Every computed field of submission.json, from the logs anew."""
    expected = summary(record.runs, record.code, record.track, len(record.tokenizer))
    found = {key: record.submission.get(key) for key in expected}
    yield none_wrong("numbers", list(differences(found, expected)), "all as computed from logs and files")


def check_logs(record: Record) -> Iterator[Check]:
    wrong = [
        f"seed {seed}: {what}" for seed, run in record.runs.items() for what in wrong_in_run(record, run)
    ]
    yield none_wrong("logs", wrong, "logs and metrics agree")


def wrong_in_run(record: Record, run: Run) -> Iterator[str]:
    """What is wrong between a log and its metrics, and within them."""
    finals = run.kind("final")
    told = {key: str(value) for key, value in (finals[0] if finals else {}).items() if key != "event"}
    if len(finals) != 1 or told != run.final:
        keys = sorted(key for key in told.keys() | run.final.keys() if told.get(key) != run.final.get(key))
        yield f"metrics end with other values than the log: {keys[:4]}"
    if run.events[-1].get("event") != "final":
        yield "metrics go on after the final event"
    wrong = list(wrong_steps(run)) + list(wrong_validations(run))
    yield from wrong
    if not wrong:
        yield from wrong_lines(record, run)


def wrong_steps(run: Run) -> Iterator[str]:
    """What is wrong with the steps of the metrics, and with their clock."""
    steps = run.kind("step")
    if [step.get("step") for step in steps] != list(range(1, run.value("steps") + 1)):
        yield f"metrics have {len(steps)} steps, expected 1 to {run.value('steps')}"
        return
    numbers = [step.get(key) for step in steps for key in ("train_seconds", "lr_mul")]
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers):
        yield "metrics hold a step without a finite time or rate"
        return
    seconds = [step["train_seconds"] for step in steps]
    if seconds != sorted(seconds) or (seconds and run.value("train_seconds") < seconds[-1] - 0.001):
        yield "the clock of the steps runs backwards, or past the end"


def wrong_validations(run: Run) -> Iterator[str]:
    vals = run.kind("val")
    if not vals or vals[-1].get("step") != run.value("steps"):
        yield "no validation at the last step"
    elif f"{vals[-1]['val_bpb']:.8f}" != run.final.get("val_bpb_unquantized"):
        yield f"val_bpb_unquantized is not the last validation's {vals[-1]['val_bpb']:.8f}"


def last_of_each(lines: list[tuple[str, ...]]) -> list[str]:
    """Lines by step. A run that was resumed tells some steps twice; the metrics know the last time."""
    by_step = {int(line[0]): " ".join(line) for line in lines}
    return [by_step[step] for step in sorted(by_step)]


def wrong_lines(record: Record, run: Run) -> Iterator[str]:
    """What is wrong in the log's lines for people, by the metrics."""
    settings = record.field("settings", "values")
    steps = run.kind("step")
    every, total = (int(settings.get(name, 0) or 0) for name in ("TRAIN_LOG_EVERY", "ITERATIONS"))
    expected = [
        f"{s['step']} {float(s['train_loss']):.4f} {s['lr_mul']:.3f} {s['train_seconds'] * 1e3:.0f}"
        for s in steps
        if s["step"] <= 10 or (every and s["step"] % every == 0) or s["step"] == total
    ]
    pattern = r"^step:(\d+)/\d+ train_loss:(\S+) lr_mul:(\S+) train_time:(\d+)ms"
    if last_of_each(re.findall(pattern, run.log, re.MULTILINE)) != expected:
        yield "the log's step lines are not those of the metrics"
    expected = [f"{v['step']} {v['val_loss']:.4f} {v['val_bpb']:.4f}" for v in run.kind("val")]
    pattern = r"^step:(\d+)/\d+ val_loss:(\S+) val_bpb:(\S+)"
    if last_of_each(re.findall(pattern, run.log, re.MULTILINE)) != expected:
        yield "the log's validation lines are not those of the metrics"
    seen = int(settings.get("TRAIN_BATCH_TOKENS", 0)) * len(steps)
    if seen and run.value("tokens_seen") != seen:
        yield f"tokens_seen {run.value('tokens_seen')}, expected {seen}"


def check_settings(record: Record) -> Iterator[Check]:
    """The first line of each log names what came from the environment."""
    wrong = [f"seed {seed}: {what}" for seed, run in record.runs.items() for what in wrong_given(record, run)]
    yield none_wrong("settings", wrong, "as in the logs")


def wrong_given(record: Record, run: Run) -> Iterator[str]:
    values = record.field("settings", "values")
    given = record.field("settings", "given")
    found = re.match(r"run:\S+ preset:(\S+) ?(.*)", run.given)
    if not found or found[1] != values.get("PRESET", found[1]):
        yield f"the log does not begin with run:... preset:{values.get('PRESET')}"
        return
    rest = found[2] + " "
    for name in given:
        setting = f"{name}={values.get(name)} "
        if setting not in rest:
            yield f"no {setting}in the log's first line"
        rest = rest.replace(setting, "", 1)
    for setting in (f"SEED={run.value('seed')} ", f"RUN_ID={run.value('run_id')} "):
        rest = rest.replace(setting, "", 1)
    if rest.strip():
        yield f"{rest.strip()} is not among the settings"


# --- limits -----------------------------------------------------------------------------------------------


def check_limits(record: Record) -> Iterator[Check]:
    """Bytes and seconds of every seed, by the track's rules and from the files where they are here."""
    track = record.track
    total = 0
    code = track.code_size(record.code)
    tokenizer = len(record.tokenizer)
    for seed, run in record.runs.items():
        size = max(run.value("artifact_bytes"), len(record.artifacts.get(seed, b"")))
        total = max(total, size + code + tokenizer)
    yield check(
        "bytes",
        total <= track["budget_bytes"],
        f"{total} bytes: {code} of code ({track['code_bytes']}), {tokenizer} of tokenizer; "
        f"expected {track['budget_bytes']} at most",
    )
    yield check_train_seconds(record)
    worst = max(record.values("eval_seconds"))
    limit = track["eval_seconds"]
    yield check("eval-seconds", worst <= limit, f"{worst:.1f} s, expected {limit} s at most")
    stopped = [run.name for run in record.runs.values() if "partial" in " ".join(run.final.values())]
    yield check("whole", not stopped, f"runs with a partial validation: {stopped}, expected none")


def check_train_seconds(record: Record) -> Check:
    """The step that was under way when the time was up may be ended."""
    over, texts = [], []
    limit = record.track["train_seconds"]
    for run in record.runs.values():
        ends = [0.0, *(step.get("train_seconds", 0.0) for step in run.kind("step"))]
        last_step = ends[-1] - ends[-2] if len(ends) > 1 else 0.0
        seconds = run.value("train_seconds")
        over.append(seconds - last_step - limit)
        texts.append(f"{seconds:.1f} s, the last step {last_step:.1f} s of them")
    worst = int(np.argmax(over))
    return check(
        "train-seconds", max(over) <= 0, f"{texts[worst]}, expected {limit} s and the step under way at most"
    )


def check_implied_bytes(record: Record) -> Iterator[Check]:
    """tokens * loss / ln 2 / bpb must be the text's bytes, whoever counted them."""
    known = record.track.dataset["val_bytes"]
    wrong = []
    found = set()
    for seed, run in record.runs.items():
        implied = run.value("val_tokens") * run.value("val_loss") / LN2 / run.value("val_bpb")
        expected = known if known is not None else run.value("val_bytes")
        found.add(round(implied))
        if abs(implied - expected) > 0.5 + 2e-8 * expected:
            wrong.append(f"seed {seed} implies {implied:.1f} bytes, the text has {expected}")
    yield none_wrong("implied-bytes", wrong, f"{sorted(found)}, the text's")


def check_seeds(record: Record) -> Iterator[Check]:
    """The track's seeds, and any number that follow, so that nobody can choose among many."""
    wanted = record.track["seeds"]
    found = sorted(record.runs)
    next_one = max(wanted) + 1
    more = max(0, len(found) - len(wanted))
    yield equal("seeds", "runs of seeds", found, sorted([*wanted, *range(next_one, next_one + more)]))
    logged = {seed: run.value("seed") for seed, run in record.runs.items()}
    same = all(seed == its for seed, its in logged.items())
    yield check("seed-names", same, f"by name and log {logged}, expected the same")
    states = record.values("state_sha256") + record.values("artifact_sha256")
    yield equal("seed-runs", "different states and artifacts", len(set(states)), 2 * len(found))


def check_artifact(record: Record) -> Iterator[Check]:
    """The artifact of one seed is here where it is small, and is the one of the log."""
    if not record.artifacts:
        below = record.track["artifact_below"]
        small = [seed for seed, run in record.runs.items() if run.value("artifact_bytes") < below]
        if small:
            yield check("artifact", False, f"none is here, expected one of the seeds {small}")
        else:
            yield skip("artifact", "none is here: too large for a folder")
        return
    wrong = []
    for seed, blob in record.artifacts.items():
        run = record.runs[seed]
        told = run.value("artifact_sha256"), run.value("artifact_bytes")
        if (sha256(blob), len(blob)) != told:
            wrong.append(f"seed {seed}: sha256 {sha256(blob)}, {len(blob)} bytes; the log says {told}")
    yield none_wrong("artifact", wrong, "the one of the log")
    bad = [seed for seed, blob in record.artifacts.items() if blob.startswith(PICKLE_STARTS)]
    yield check("artifact-format", not bad, f"pickles or zip files among the artifacts: {bad}, expected none")


# --- claims -----------------------------------------------------------------------------------------------


def earlier(record: Record) -> dict[str, dict]:
    """Submissions of the track's records before this one, by folder.

    Those that failed or are disputed are left out: nobody must beat a score that is not one.
    """
    verdicts = read_verdicts(record.track.folder)
    out = {name for name, its in verdicts.items() if its["verdict"] == "fail" or its.get("disputed")}
    found = {}
    for path in record_folders(record.track.folder.parent):
        if path.parent.name == record.track.name and path.name < record.path.name and path.name not in out:
            submission = read_json(path / "submission.json")
            if submission.get("claim") != "none":
                found[path.name] = submission
    return found


def values_of(submission: dict, name: str) -> list[float]:
    return [row[name] for row in submission["seeds"]]


def machine_of(hardware: dict) -> dict:
    return {name: hardware.get(name) for name in ("processor", "gpu", "threads", "ranks")}


def p_below(new: list[float], old: list[float]) -> float:
    """One-sided p of Welch's t-test that `new` is not below `old`. Without any spread the means decide."""
    from scipy.stats import ttest_ind  # a second that other checks need not pay

    if np.std(new) == np.std(old) == 0:
        return float(np.mean(new) >= np.mean(old))
    return float(ttest_ind(new, old, equal_var=False, alternative="less").pvalue)


def check_claim(record: Record) -> Iterator[Check]:
    """The gain over the record before it, in bits per byte or in seconds."""
    beats = record.field("beats")
    before = earlier(record)
    if record.field("claim") == "none":
        yield skip("gain", "claims nothing")
        return
    best = min(before, key=lambda name: before[name]["val_bpb"]["mean"], default=None)
    yield equal("beats", "claims to beat", beats, best)
    if best is None or beats != best:
        return
    old = before[best]
    yield equal("machine", "ran on", machine_of(record.field("hardware")), machine_of(old["hardware"]))
    yield check_gain(record, old)


def check_gain(record: Record, old: dict) -> Check:
    speed = record.field("claim") == "speed"
    unit, rule = ("train_seconds", "min_gain_seconds") if speed else ("val_bpb", "min_gain_bpb")
    least = record.track[rule]
    alpha = record.track["alpha"]
    new_values = values_of(record.submission, unit)
    old_values = values_of(old, unit)
    gain = float(np.mean(old_values) - np.mean(new_values))
    p = p_below(new_values, old_values)
    good = round(gain, 9) >= least and p < alpha
    expected = f"expected {least} at least, p below {alpha}"
    if speed:
        good = good and record.field("val_bpb", "mean") <= old["val_bpb"]["mean"]
        expected += " and no worse a score"
    return check("gain", good, f"{gain:.4f} {unit} over {record.field('beats')}, Welch p {p:.4g}; {expected}")


PAPERS: list[Callable[[Record], Iterator[Check]]] = [
    check_folder,
    check_schema,
    check_date,
    check_scripts,
    check_hashes,
    check_numbers,
    check_logs,
    check_settings,
    check_limits,
    check_implied_bytes,
    check_seeds,
    check_artifact,
    check_claim,
]


def check_papers(record: Record) -> Iterator[Check]:
    """All of them. A file that a check cannot read fails that check.

    So does whatever else a stranger's numbers make of it: a division by zero, a number too large.
    """
    for function in PAPERS:
        try:
            yield from function(record)
        except Exception as error:
            name = function.__name__.removeprefix("check_").replace("_", "-")
            yield check(name, False, f"cannot be checked: {type(error).__name__}: {error}")
