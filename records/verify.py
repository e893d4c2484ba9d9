"""Is a record what it says? One line a check: PASS | FAIL | SKIP name: what was found, what was expected.

    python records/verify.py records/<track>/<folder>...     all checks, the sandbox ones included
    python records/verify.py --all [--static]                every record; --static: nothing of it runs
    python records/verify.py FOLDER --retrain 1337           run its script again on this machine and compare

Exit code 1 if a check fails, 2 and 3 if the verification itself cannot be done.
"""
import argparse
import datetime
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from common import (FILES, FOLDER, HERE, LN2, REPO, Check, DataError, Track, check, equal, exit_code_of,
                    load_track, printable, read_bytes, read_json, record_folders, schema_errors, sha256, skip,
                    validation_text)
from referee import LEAST_PROOF, Result, find_evaluation, find_job, referee
from sandbox import NoSandbox
from source import check_source
from submission import Run, read_runs, summary
from verdicts import read_verdicts, write_verdict

MAX_FILE = {".log": 4 << 20, ".jsonl": 64 << 20, ".md": 1 << 17, ".json": 1 << 20, ".py": 1 << 20}
PICKLE_STARTS = (*(bytes((0x80, version)) for version in range(2, 6)), b"PK\x03\x04")
LOOSE, DECIMALS = 1e-4, 5.1e-9      # of a score: on another machine, and on one of the same kind


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
    def script(self) -> bytes:
        return read_bytes(self.path / "train_gpt.py")

    @cached_property
    def runs(self) -> dict[int, Run]:
        return read_runs(self.path)

    @cached_property
    def artifacts(self) -> dict[int, bytes]:
        return {int(re.search(r"seed(\d+)", path.name)[1]): read_bytes(path)
                for path in sorted(self.path.glob("model_seed*.int8.ptz"))}

    @cached_property
    def tokenizer_bytes(self) -> int:
        """Of the record's own tokenizer; the track's costs nothing."""
        own = self.path / "tokenizer.model"
        return own.stat().st_size if own.exists() else 0

    def field(self, *keys: str):
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
    names = set()
    for path in sorted(record.path.iterdir()):
        names.add(path.name)
        size = path.lstat().st_size
        if not FILES.fullmatch(path.name):
            wrong.append(f"{path.name!r} has no place in a record")
        elif path.is_symlink() or not path.is_file():
            wrong.append(f"{path.name} is no plain file")
        elif size > MAX_FILE.get(path.suffix, record.track["budget_bytes"]):
            wrong.append(f"{path.name} has {size} bytes")
    wrong += [
        f"{name} is missing" for name in ("README.md", "submission.json", "train_gpt.py") if name not in names
    ]
    seeds = [{re.search(r"\d+", name)[0] for name in names if name.startswith(start)}
             for start in ("train_seed", "metrics_seed", "model_seed")]
    if seeds[0] != seeds[1] or not seeds[2] <= seeds[0]:
        wrong.append(
            f"logs of seeds {sorted(seeds[0])}, metrics of {sorted(seeds[1])}, models of {sorted(seeds[2])}"
        )
    if "tokenizer.model" in names and record.track.dataset["tokenizer_policy"] != "own":
        wrong.append("tokenizer.model, which the track provides")
    yield check(
        "folder", not wrong, "; ".join(wrong[:4]) or "the files of a record and no others, expected so"
    )


def check_schema(record: Record) -> Iterator[Check]:
    errors = schema_errors(record.submission, "submission")
    yield check(
        "schema",
        not errors,
        "; ".join(errors[:3]) or "submission.json is by records/schema.json, expected so",
    )
    yield from check_evaluation(record)
    told = f"{record.field('track')}/{record.field('date')}_{record.field('name')}"
    yield equal("names", "the folder is", f"{record.track.folder.resolve().name}/{record.path.name}", told)
    readme = read_bytes(record.path / "README.md").decode(errors="replace")
    text = f"{record.field('val_bpb', 'mean'):.4f}"
    yield check(
        "readme",
        text in readme,
        f"README.md has {'' if text in readme else 'not '}the mean {text}, expected it",
    )


def check_evaluation(record: Record) -> Iterator[Check]:
    try:
        yield check("evaluation", True, f"{find_evaluation(record.path)}, expected what the referee can cut")
    except DataError as error:
        yield check("evaluation", False, str(error))


def check_date(record: Record) -> Iterator[Check]:
    """Records stand in the order of their folders' names, so a false date would let a record pass over those
    that it must beat, or stand in the way of those to come."""
    text = record.path.name[:10]
    try:
        future = datetime.date.fromisoformat(text) > datetime.date.today() + datetime.timedelta(days=1)
    except ValueError:
        yield check("date", False, f"{text!r} is no date, expected one of the calendar")
        return
    verdicts = read_verdicts(record.track.folder)
    after = [] if record.path.name in verdicts else [
        name for name, its in verdicts.items() if name > record.path.name and its["verdict"] == "pass"]
    what = f"{text} lies in the future" if future else ""
    if after:
        what = f"the folder's name comes before {max(after)}, which passed already: date it a day later"
    yield check("date", not what, what or f"{text}, expected no day in the future and none before a record "
                "that passed already")


# --- logs and numbers -------------------------------------------------------------------------------------

def check_hashes(record: Record) -> Iterator[Check]:
    yield equal("script-hash", "the logs ran scripts", sorted(set(record.values("script_sha256"))),
                [sha256(record.script)])
    dataset = record.track.dataset
    logged = {"val": dataset["logged_val_sha256"], "train": dataset["logged_train_sha256"]}
    if not (record.path / "tokenizer.model").exists():
        logged["tokenizer"] = dataset["tokenizer_sha256"]
    else:
        logged["tokenizer"] = sha256(read_bytes(record.path / "tokenizer.model"))
    for name, wanted in logged.items():
        found = sorted(set(record.values(f"{name}_sha256")))
        if wanted is None:
            yield check(
                f"data-{name}", len(found) == 1, f"sha256 {found}, expected one; the track does not know it"
            )
        else:
            yield equal(f"data-{name}", "sha256", found, [wanted])
    for name in ("val_tokens", "val_bytes"):
        if dataset[name] is None or name == "val_tokens" and dataset["tokenizer_policy"] == "own":
            yield equal(name.replace("_", "-"), "different values", len(set(record.values(name))), 1)
        else:
            yield equal(name.replace("_", "-"), "scored", sorted(set(record.values(name))), [dataset[name]])


def first_difference(found, expected, place: str = "") -> str | None:
    """Where two JSON values differ, in words."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            if key not in found or key not in expected:
                return f"{place}/{key} is in one of them only"
            if difference := first_difference(found[key], expected[key], f"{place}/{key}"):
                return difference
        return None
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return next((d for i, pair in enumerate(zip(found, expected))
                     if (d := first_difference(*pair, f"{place}/{i}"))), None)
    return (
        None
        if found == expected and type(found) is type(expected)
        else f"{place} is {found}, expected {expected}"
    )


def check_numbers(record: Record) -> Iterator[Check]:
    """Every computed field of submission.json, from the logs anew."""
    expected = summary(record.runs, record.script, record.track, record.tokenizer_bytes)
    found = {key: record.submission.get(key) for key in expected}
    difference = first_difference(found, expected)
    yield check(
        "numbers", difference is None, difference or "all as computed from logs and files, expected so"
    )


def check_run(record: Record, run: Run) -> Iterator[str]:
    """What is wrong between a log and its metrics, and within them."""
    finals = run.kind("final")
    told = {key: str(value) for key, value in (finals[0] if finals else {}).items() if key != "event"}
    if len(finals) != 1 or told != run.final:
        keys = sorted(key for key in told.keys() | run.final.keys() if told.get(key) != run.final.get(key))
        yield f"metrics end with other values than the log: {keys[:4]}"
    steps, vals = run.kind("step"), run.kind("val")
    if [step.get("step") for step in steps] != list(range(1, run.value("steps") + 1)):
        yield f"metrics have {len(steps)} steps, expected 1 to {run.value('steps')}"
        return
    numbers = [step.get(key) for step in steps for key in ("train_seconds", "lr_mul")]
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers):
        yield "metrics hold a step without a finite time or rate"
        return
    if run.events[-1].get("event") != "final":
        yield "metrics go on after the final event"
    seconds = [step["train_seconds"] for step in steps]
    if seconds != sorted(seconds) or seconds and run.value("train_seconds") < seconds[-1] - 0.001:
        yield "the clock of the steps runs backwards, or past the end"
    if [val.get("step") for val in vals[:1] + vals[-1:]] != [0, run.value("steps")]:
        yield "no validation at step 0 and at the last step"
        return
    if f"{vals[-1]['val_bpb']:.8f}" != run.final.get("val_bpb_unquantized"):
        yield f"val_bpb_unquantized is not the last validation's {vals[-1]['val_bpb']:.8f}"
    yield from check_lines(record, run, steps, vals)


def last_of_each(lines: list[tuple[str, ...]]) -> list[str]:
    """Lines by step. A run that was resumed tells some steps twice; the metrics know the last time."""
    by_step = {int(line[0]): " ".join(line) for line in lines}
    return [by_step[step] for step in sorted(by_step)]


def check_lines(record: Record, run: Run, steps: list[dict], vals: list[dict]) -> Iterator[str]:
    """The log's lines for people against the metrics."""
    every = int(record.field("settings", "values").get("TRAIN_LOG_EVERY", 0) or 0)
    total = int(record.field("settings", "values").get("ITERATIONS", 0) or 0)
    expected = [
        f"{s['step']} {float(s['train_loss']):.4f} {s['lr_mul']:.3f} {s['train_seconds'] * 1e3:.0f}"
        for s in steps
        if s["step"] <= 10 or every and s["step"] % every == 0 or s["step"] == total
    ]
    found = re.findall(
        r"^step:(\d+)/\d+ train_loss:(\S+) lr_mul:(\S+) train_time:(\d+)ms", run.log, re.MULTILINE
    )
    if last_of_each(found) != expected:
        yield "the log's step lines are not those of the metrics"
    expected = [f"{v['step']} {v['val_loss']:.4f} {v['val_bpb']:.4f}" for v in vals]
    found = re.findall(r"^step:(\d+)/\d+ val_loss:(\S+) val_bpb:(\S+)", run.log, re.MULTILINE)
    if last_of_each(found) != expected:
        yield "the log's validation lines are not those of the metrics"
    batch = record.field("settings", "values").get("TRAIN_BATCH_TOKENS")
    if batch and run.value("tokens_seen") != int(batch) * len(steps):
        yield f"tokens_seen {run.value('tokens_seen')}, expected {int(batch) * len(steps)}"


def check_logs(record: Record) -> Iterator[Check]:
    wrong = [f"seed {seed}: {what}" for seed, run in record.runs.items() for what in check_run(record, run)]
    yield check("logs", not wrong, "; ".join(wrong[:3]) or "logs and metrics agree, expected so")


def check_settings(record: Record) -> Iterator[Check]:
    """The first line of each log names what came from the environment."""
    values, given = record.field("settings", "values"), record.field("settings", "given")
    wrong = []
    for seed, run in record.runs.items():
        found = re.match(r"run:\S+ preset:(\S+) ?(.*)", run.given)
        if not found or found[1] != values.get("PRESET", found[1]):
            wrong.append(f"seed {seed}: the log does not begin with run:... preset:{values.get('PRESET')}")
            continue
        rest, tokens = found[2] + " ", [f"{name}={values.get(name)}" for name in given]
        for token in (*tokens, f"SEED={seed}", f"RUN_ID={run.value('run_id')}"):
            if token in tokens and token + " " not in rest:
                wrong.append(f"seed {seed}: no {token} in the log's first line")
            rest = rest.replace(token + " ", "", 1)
        if rest.strip():
            wrong.append(f"seed {seed}: {rest.strip()} is not among the settings")
    yield check("settings", not wrong, "; ".join(wrong[:3]) or "as in the logs, expected so")


def check_limits(record: Record) -> Iterator[Check]:
    """Bytes and seconds of every seed, by the track's rules and from the files where they are here."""
    track, total = record.track, 0
    code = track.code_size(record.script)
    for seed, run in record.runs.items():
        size = max(run.value("artifact_bytes"), len(record.artifacts.get(seed, b"")))
        total = max(total, size + code + record.tokenizer_bytes)
    yield check(
        "bytes",
        total <= track["budget_bytes"],
        f"{total} bytes: {code} of code ({track['code_bytes']}), "
        f"{record.tokenizer_bytes} of tokenizer; expected {track['budget_bytes']} at most",
    )
    for name, limit in (("train", track["train_seconds"]), ("eval", track["eval_seconds"])):
        worst, allowed = 0.0, float(limit)
        for run in record.runs.values():
            ends = [0.0, *(step.get("train_seconds", 0.0) for step in run.kind("step"))]
            under_way = ends[-1] - ends[-2] if name == "train" and len(ends) > 1 else 0.0
            last = [run.value(f"{name}_seconds")]
            if name == "train" and "last_train_read_seconds" in run.final:
                last.append(float(run.final["last_train_read_seconds"]))
            if max(last) - under_way > worst - (allowed - limit):
                worst, allowed = max(last), limit + under_way
        more = " and the step under way" if name == "train" else ""
        yield check(f"{name}-seconds", worst <= allowed, f"{worst:.1f} s, expected {limit} s{more} at most")
    stopped = [run.name for run in record.runs.values() if "partial" in " ".join(run.final.values())]
    yield check("whole", not stopped, f"runs with a partial validation: {stopped}, expected none")


def check_implied_bytes(record: Record) -> Iterator[Check]:
    """tokens * loss / ln 2 / bpb must be the text's bytes, whoever counted them."""
    known = record.track.dataset["val_bytes"]
    wrong, found = [], []
    for seed, run in record.runs.items():
        implied = run.value("val_tokens") * run.value("val_loss") / LN2 / run.value("val_bpb")
        expected = known if known is not None else run.value("val_bytes")
        found.append(round(implied))
        if abs(implied - expected) > 0.5 + 2e-8 * expected:
            wrong.append(f"seed {seed} implies {implied:.1f} bytes, the text has {expected}")
    yield check(
        "implied-bytes", not wrong, "; ".join(wrong[:3]) or f"{sorted(set(found))}, expected the text's"
    )


def check_seeds(record: Record) -> Iterator[Check]:
    """The track's seeds, and any number that follow, so that nobody can choose among many."""
    wanted, found = record.track["seeds"], sorted(record.runs)
    last = max(wanted)
    full = wanted + list(range(last + 1, last + 1 + max(0, len(found) - len(wanted))))
    yield equal("seeds", "runs of seeds", found, sorted(full))
    logged = {seed: run.value("seed") for seed, run in record.runs.items()}
    yield check(
        "seed-names",
        all(seed == its for seed, its in logged.items()),
        f"by name and log {logged}, expected " "the same",
    )
    states = record.values("state_sha256") + record.values("artifact_sha256")
    yield equal("seed-runs", "different states and artifacts", len(set(states)), 2 * len(found))


def check_artifact(record: Record) -> Iterator[Check]:
    """The artifact of one seed is here where it is small, and is the one of the log."""
    small = [
        s for s, run in record.runs.items() if run.value("artifact_bytes") < record.track["artifact_below"]
    ]
    if not record.artifacts:
        yield check("artifact", not small, f"none is here, expected one of the seeds {small}") if small else \
            skip("artifact", "none is here: too large for a folder")
        return
    wrong = [f"seed {seed}: sha256 {sha256(blob)}, {len(blob)} bytes; the log says "
             f"{record.runs[seed].value('artifact_sha256')}, {record.runs[seed].value('artifact_bytes')}"
             for seed, blob in record.artifacts.items()
             if sha256(blob) != record.runs[seed].value("artifact_sha256")
             or len(blob) != record.runs[seed].value("artifact_bytes")]
    yield check("artifact", not wrong, "; ".join(wrong) or "the one of the log, expected so")
    bad = [seed for seed, blob in record.artifacts.items() if blob.startswith(PICKLE_STARTS)]
    yield check("artifact-format", not bad, f"pickles or zip files among the artifacts: {bad}, expected none")


# --- claims -----------------------------------------------------------------------------------------------

def earlier(record: Record) -> dict[str, dict]:
    """Submissions of the track's records before this one, by folder, but for those that failed or are
    disputed: nobody must beat a score that is not one."""
    found, verdicts = {}, read_verdicts(record.track.folder)
    out = {name for name, its in verdicts.items() if its["verdict"] == "fail" or its.get("disputed")}
    for path in record_folders(record.track.folder.parent):
        if path.parent.name == record.track.name and path.name < record.path.name and path.name not in out:
            submission = read_json(path / "submission.json")
            if submission.get("claim") != "none":
                found[path.name] = submission
    return found


def values_of(submission: dict, name: str) -> list[float]:
    return [row[name] for row in submission["seeds"]]


def p_below(new: list[float], old: list[float]) -> float:
    """One-sided p of Welch's t-test that `new` is not below `old`. Without any spread the means decide."""
    from scipy.stats import ttest_ind       # a second that other checks need not pay
    if np.std(new) == np.std(old) == 0:
        return float(np.mean(new) >= np.mean(old))
    return float(ttest_ind(new, old, equal_var=False, alternative="less").pvalue)


def check_claim(record: Record) -> Iterator[Check]:
    """The gain over the record before it, in bits per byte or in seconds."""
    claim, beats, before = record.field("claim"), record.field("beats"), earlier(record)
    if claim == "none":
        yield skip("gain", "claims nothing")
        return
    best = min(before, key=lambda name: before[name]["val_bpb"]["mean"], default=None)
    yield equal("beats", "claims to beat", beats, best)
    if best is None or beats != best:
        return
    machines = [{name: hardware.get(name) for name in ("processor", "gpu", "cores", "ranks")}
                for hardware in (record.field("hardware"), before[best]["hardware"])]
    yield equal("machine", "ran on", *machines)
    old, unit = before[best], ("val_bpb", "train_seconds")[claim == "speed"]
    least = record.track["min_gain_bpb" if claim == "record" else "min_gain_seconds"]
    new_values, old_values = values_of(record.submission, unit), values_of(old, unit)
    gain, p = float(np.mean(old_values) - np.mean(new_values)), p_below(new_values, old_values)
    good = round(gain, 9) >= least and p < record.track["alpha"]
    if claim == "speed":
        good = good and record.field("val_bpb", "mean") <= old["val_bpb"]["mean"]
    yield check(
        "gain",
        good,
        f"{gain:.4f} {unit} over {best}, Welch p {p:.4g}; expected {least} at least, p below "
        f"{record.track['alpha']}" + (" and no worse a score" if claim == "speed" else ""),
    )


# --- the referee ------------------------------------------------------------------------------------------

def same_kind(about: dict[str, str]) -> bool:
    """Whether this machine is of the kind that a log describes."""
    import torch
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    here = {"processor": found[1] if found else platform.processor(), "cores": str(os.cpu_count()),
            "threads": str(torch.get_num_threads()), "torch": torch.__version__, "gpu": about["gpu"]}
    return all(about[name] == value for name, value in here.items())


def was_compiled(run: Run) -> bool:
    """Whether a run scored itself by compiled code, by its log."""
    return "compile:1" in run.log and "compile:0" not in run.log


def compare_score(run: Run, result: Result) -> Check:
    """The referee's score against the log's: to eight decimals where both computed alike."""
    off = result.bpb - run.value("val_bpb")
    compiled = result.job.compiling and "compile:0" not in result.said
    same = same_kind(run.about) and compiled == was_compiled(run)
    bound, kind = (DECIMALS, "the same kind") if same else (LOOSE, "another kind")
    return check("score", abs(off) <= bound, f"{result.bpb:.8f} bits per byte, {off:+.1e} from the log's "
                 f"{run.value('val_bpb'):.8f}, expected within {bound:g} on {kind} of machine or code; "
                 f"{result.seconds:.1f} s")


def check_by_referee(record: Record, options: argparse.Namespace) -> Iterator[Check]:
    """Score again, probe, prove. Raises NoSandbox."""
    if not record.artifacts:
        yield skip("score", "no artifact is here")
        return
    if record.track["device"] == "cuda" and not Path("/dev/nvidiactl").exists():
        yield skip("score", "the track's machine has a CUDA GPU, this one has none")
        return
    seed = min(record.artifacts)
    run = record.runs[seed]
    job = find_job(
        record.path,
        artifact=record.path / f"model_seed{seed}.int8.ptz",
        data=options.data,
        trust=options.trust,
        second=options.second,
        compiling=was_compiled(run) and not options.eager,
    )
    try:
        validation_text(record.track, options.data, documents=options.documents)
    except DataError as error:
        yield skip("score", f"no validation text: {error}")
        return
    try:
        text = validation_text(record.track, options.data, record.path, options.documents)
    except DataError as error:
        yield check("score", False, f"the record's own tokenizer cannot be used: {error}")
        return
    drawn = secrets.randbits(32) if options.probe_seed is None else options.probe_seed
    for line in referee(job, text, options.proof_bytes, np.random.default_rng(drawn)):
        yield compare_score(run, line) if isinstance(line, Result) else line


def retrain(record: Record, seed: int, data: Path) -> Iterator[Check]:
    """Run the script again in a folder of its own, with its settings, and compare by the track's noise. It
    runs as the user who calls: only for scripts that were read."""
    values = record.field("settings", "values")
    given = {name: values[name] for name in record.field("settings", "given")} | {"PRESET": values["PRESET"]}
    folder = Path(tempfile.mkdtemp(prefix="bytegolf-retrain-"))
    try:
        shutil.copyfile(record.path / "train_gpt.py", folder / "train_gpt.py")
        (folder / "data").symlink_to(data.resolve())
        clean = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
        done = subprocess.run([sys.executable, "train_gpt.py"], cwd=folder, capture_output=True, text=True,
                              env={**clean, **given, "SEED": str(seed), "RUN_ID": "again"})
        found = re.search(r"^val_bpb: ([\d.]+)$", done.stdout.rpartition("\n---\n")[2], re.MULTILINE)
        if done.returncode or not found:
            yield check("retrain", False, f"exit code {done.returncode}: {done.stderr.strip()[-200:]}")
            return
        off = float(found[1]) - record.field("val_bpb", "mean")
        noise = record.track["noise_bpb"]
        yield check(
            "retrain",
            abs(off) <= noise,
            f"seed {seed} gives {found[1]}, {off:+.4f} from the record's mean, " f"expected within {noise}",
        )
    finally:
        shutil.rmtree(folder)


# --- all of it --------------------------------------------------------------------------------------------

def check_script(record: Record) -> Iterator[Check]:
    yield from check_source(record.script, record.track)


STATIC: list[Callable[[Record], Iterator[Check]]] = [
    check_folder, check_schema, check_date, check_script, check_hashes, check_numbers, check_logs,
    check_settings, check_limits, check_implied_bytes, check_seeds, check_artifact, check_claim]


def verify(path: Path, options: argparse.Namespace) -> Iterator[Check]:
    """All checks of one folder. A file that a check cannot read fails that check; so does whatever else a
    stranger's numbers make of it (a division by zero, a number too large, JSON too deep)."""
    record = Record(path)
    failed = False
    for function in STATIC:
        try:
            for line in function(record):
                failed |= line.verdict == "FAIL"
                yield line
        except Exception as error:
            failed = True
            name = function.__name__.removeprefix("check_").replace("_", "-")
            yield check(name, False, f"cannot be checked: {type(error).__name__}: {error}")
    if options.static:
        return
    if failed and not options.keep_going:
        yield skip("score", "nothing of a record that fails already is run; --keep-going does")
        return
    yield from check_by_referee(record, options)
    if options.retrain is not None:
        yield from retrain(record, options.retrain, options.data)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--all", action="store_true", help="every record of every track")
    parser.add_argument("--records", type=Path, default=HERE, help="folder of the tracks, for --all")
    parser.add_argument(
        "--data", type=Path, default=REPO / "data", help="folder with datasets/ and tokenizers/"
    )
    parser.add_argument("--second", type=Path, help="second text: a JSON string a line, one for a document")
    parser.add_argument(
        "--documents", type=Path, help="the validation text, as --second (default: from shards)"
    )
    parser.add_argument("--static", action="store_true", help="only what needs no run")
    parser.add_argument("--keep-going", action="store_true", help="run also what has failed already")
    parser.add_argument("--eager", action="store_true", help="score without torch.compile")
    parser.add_argument(
        "--trust", action="store_true", help="run the record without a sandbox where there is none"
    )
    parser.add_argument("--proof-bytes", type=int, default=4096, metavar="N", help="of the proof; 0: none")
    parser.add_argument(
        "--retrain", type=int, metavar="SEED", help="also train again, which takes as long as it does"
    )
    parser.add_argument("--probe-seed", type=int, help="of the random positions (default: drawn)")
    parser.add_argument("--write", action="store_true", help="keep the verdicts for records/board.py")
    args = parser.parse_args(argv)
    if args.proof_bytes and args.proof_bytes < LEAST_PROOF:
        parser.error(f"--proof-bytes {args.proof_bytes}: expected 0, or {LEAST_PROOF} at least")
    if bool(args.folders) == args.all:
        parser.error("name folders, or --all")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    folders = record_folders(args.records) if args.all else [Path(os.path.abspath(f)) for f in args.folders]
    failed = 0
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        print(f"{printable(folder)}:")
        lines = []
        try:
            for line in verify(folder, args):
                lines.append(line)
                print(line, flush=True)
        except NoSandbox as error:
            raise DataError(str(error)) from None
        failed += sum(line.verdict == "FAIL" for line in lines)
        if args.write:
            write_verdict(folder, lines)
    print(f"{len(folders)} records, {failed} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
