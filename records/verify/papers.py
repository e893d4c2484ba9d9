"""The checks of a record's papers: everything that can be checked without running anything of it.

`style` helps people who read the script. It does not protect the score, because Python has ways round each of
its rules. The sandbox protects it: it holds no data, no network and no packages but those of the track. The
limit on the script's size bounds how much text a script can contain, and none of it should look like data.
"""

import ast
import datetime
import io
import itertools
import re
import sys
import tokenize
import unicodedata
import zlib
from collections.abc import Callable, Iterator

from data.command import REPO, UsageError, shell
from data.files import read_bytes, sha256
from records.archive.checks import Check, check, equal, none_wrong, skip
from records.archive.ranks import ScoredRecord, best_before, check_gain, claimed_scores, standing
from records.archive.record import (
    FILES,
    FOLDER,
    MAX_SEEDS,
    MOST_FILES,
    OF_ONE_RUN,
    Record,
    most_bytes,
    seed_of,
)
from records.archive.runs import SCRIPT, ClaimedRun
from records.archive.tracks import Track, load_track, schema_errors
from records.archive.verdicts import PASSED, folder_sha256, read_draws, read_verdicts

MAX_SETTINGS = 256  # bytes; 2026-11-22_Par has 230
MAX_CODE = 48 << 10  # bytes of a script at zlib level 9; a text that was learned by heart needs more
PART = 4096  # bytes of a script
MAX_DENSITY = 0.55  # what a part compresses to: programs 0.47, base64 0.76, hex 0.57


# --- the folder -------------------------------------------------------------------------------------------


def check_folder(record: Record) -> Iterator[Check]:
    budget = load_track(record.home)["budget_bytes"]  # record.track would read submission.json
    wrong = [] if FOLDER.fullmatch(record.name) else [f"the name {record.name!r}"]
    paths = sorted(itertools.islice(record.path.iterdir(), MOST_FILES + 1))
    if len(paths) > MOST_FILES:
        text = f"more than {MOST_FILES} files, expected those of {MAX_SEEDS} seeds at most"
        yield check("folder", False, text)
        return
    for path in paths:
        size = path.lstat().st_size
        if not FILES.fullmatch(path.name):
            wrong.append(f"{path.name!r} has no place in a record")
        elif path.is_symlink() or not path.is_file():
            wrong.append(f"{path.name} is no plain file")
        elif size > most_bytes(path, budget):
            wrong.append(f"{path.name} has {size} bytes")
    names = sorted(path.name for path in paths)
    wrong += [f"{name} is missing" for name in ("README.md", "submission.json", SCRIPT) if name not in names]
    logs, metrics, models = (
        [seed_of(name) for name in names if re.match(rf"{start}_seed\d", name)]
        for start in ("train", "metrics", "model")
    )
    if sorted(logs) != sorted(metrics) or not set(models) <= set(logs) or len(set(models)) < len(models):
        wrong.append(f"logs of seeds {logs}, metrics of {metrics}, models of {models}")
    yield none_wrong("folder", wrong, "the files of a record and no others")


def check_date(record: Record) -> Iterator[Check]:
    """The date is not in the future, and not before that of a record that has passed already.

    With a false date a record would not have to beat all that came before it, or later records would have to
    beat it too early. A folder may stay where it is once its date has passed, but only with the files that
    this verdict names.
    """
    day = record.name[:10]
    try:
        future = datetime.date.fromisoformat(day) > datetime.date.today() + datetime.timedelta(days=1)
    except ValueError:
        yield check("date", False, f"{day!r} is no date, expected one of the calendar")
        return
    wrong = [f"{day} lies in the future"] if future else []
    verdicts = read_verdicts(record.track.folder)
    later = [other for other, its in verdicts.items() if other[:10] > day and its["verdict"] in PASSED]
    its = verdicts.get(record.name, {})
    same = its.get("sha256") == folder_sha256(record.path)
    known = same and not {"folder", "date"} & {*its["failed"]}  # of a bad folder no date is checked
    if later and not known:
        wrong.append(f"its day is before that of {max(later)}, which passed already: date it as late")
    yield none_wrong("date", wrong, f"{day}, not in the future and before no record that passed already")


# --- the script -------------------------------------------------------------------------------------------


def data_in(script: bytes) -> Iterator[str]:
    """Parts of the script that compress so little that they must be data."""
    for start in range(0, len(script) - PART + 1, PART // 2):
        density = len(zlib.compress(script[start : start + PART], 9)) / PART
        if density > MAX_DENSITY:
            line = script.count(b"\n", 0, start) + 1
            yield f"line {line} on compresses to {density:.0%}, programs to {MAX_DENSITY:.0%} at most"
            return


def unreadable(script: bytes) -> Iterator[str]:
    """Why a person cannot see what Python runs: encoding, invisible characters. Raises SyntaxError."""
    encoding = tokenize.detect_encoding(io.BytesIO(script).readline)[0]
    if encoding != "utf-8":
        yield f"declares the encoding {encoding}, expected utf-8"
        return
    odd = sorted({c for c in script.decode() if unicodedata.category(c) in ("Cc", "Cf")} - set("\t\n\r\f"))
    if odd:
        yield f"holds the invisible character U+{ord(odd[0]):04X}, expected none"


def foreign_imports(tree: ast.Module, allowed: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." if node.level else node.module]
        else:
            continue
        for module in modules:
            if module.split(".")[0] not in allowed:
                yield f"line {node.lineno} imports {module}, which the track does not list"


def check_source(script: bytes, track: Track) -> Iterator[Check]:
    """`compiles`: this Python reads the script and finds load_predictor. `style`: people can read it."""
    try:
        tree = ast.parse(script)
        odd = [*unreadable(script), *data_in(script)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        yield check("compiles", False, f"{error}, expected Python {python}")
        return
    there = any(getattr(node, "name", "") == "load_predictor" for node in tree.body)
    yield check("compiles", there, f"load_predictor is {'' if there else 'not '}defined, expected so")
    odd += foreign_imports(tree, {*track["imports"], *sys.stdlib_module_names, "__future__"})
    size = len(zlib.compress(script, 9))
    if size > MAX_CODE:
        odd.append(f"compresses to {size} bytes, expected {MAX_CODE} at most")
    yield none_wrong("style", odd, "no data, no invisible characters, no imports but the track's")


def check_script(record: Record) -> Iterator[Check]:
    yield from check_source(record.script, record.track)


# --- logs and numbers -------------------------------------------------------------------------------------


def check_hashes(record: Record) -> Iterator[Check]:
    """All logs name this script and the track's data. A value that the track leaves open is None."""
    dataset = record.track.dataset
    wanted = {
        "val_sha256": dataset["logged_val_sha256"],
        "train_sha256": dataset["logged_train_sha256"],
        "tokenizer_sha256": dataset["tokenizer_sha256"],
        "val_tokens": dataset["val_tokens"],
        "script_sha256": sha256(record.script),
        "val_bytes": dataset["val_bytes"],
    }
    for name, value in wanted.items():
        found = sorted(set(record.values(name)))
        expected = found[:1] if value is None else [value]
        yield equal(name.replace("_", "-"), "logged", found, expected)


def check_logs(record: Record) -> Iterator[Check]:
    """Logs and metrics agree, and the runs differ in nothing but the seed."""
    wrong = []
    for seed, run in record.runs.items():
        wrong += [f"seed {seed}: {what}" for what in (*wrong_end(run), *wrong_steps(run))]
    yield none_wrong("logs", wrong, "logs and metrics agree")
    given = [run.given.items() for run in record.runs.values()]
    shared = [{(name, value) for name, value in items if name not in OF_ONE_RUN} for items in given]
    odd = sorted(f"{name}={value}" for name, value in set.union(*shared) - set.intersection(*shared))
    if not record.settings.isascii() or len(record.settings) > MAX_SETTINGS:
        odd.append(f"{len(record.settings)} bytes, expected {MAX_SETTINGS} of ASCII at most")
    yield none_wrong("settings", odd, "the same for every seed")


def wrong_end(run: ClaimedRun) -> Iterator[str]:
    events = [*run.events]
    finals = [event for event in events if event.get("event") == "final"]
    last = {key: str(value) for key, value in (finals[0] if finals else {}).items() if key != "event"}
    if len(finals) != 1 or last != run.final:
        keys = sorted(key for key in last.keys() | run.final.keys() if last.get(key) != run.final.get(key))
        yield f"metrics end with other values than the log: {keys[:4]}"
    if events[-1].get("event") != "final":
        yield "metrics go on after the final event"
    vals = run.kind("val")
    if not vals or vals[-1].get("step") != run.value("steps"):
        yield "no validation at the last step"
    elif run.final.get("val_bpb_unquantized") not in (None, f"{vals[-1]['val_bpb']:.8f}"):
        yield f"val_bpb_unquantized is not the last validation's {vals[-1]['val_bpb']:.8f}"


def wrong_steps(run: ClaimedRun) -> Iterator[str]:
    """What is wrong with the steps of a run's metrics, their clock and their operations."""
    steps = run.kind("step")
    in_order = all(step.get("step") == at for at, step in enumerate(steps, 1))
    if len(steps) != run.value("steps") or not in_order:
        yield f"metrics have {len(steps)} steps, expected 1 to {run.value('steps')}"
    for name, slack in (("train_seconds", 0.001), ("train_flops", 0)):
        grown = [0, *(step.get(name) for step in steps)]
        if not all(isinstance(x, (int, float)) for x in grown) or grown != sorted(grown):
            yield f"{name} of the steps are no numbers that grow"
        elif run.value(name) < grown[-1] - slack:
            yield f"{name} is {run.value(name)}, the last step's {grown[-1]}"


# --- limits -----------------------------------------------------------------------------------------------


def check_seconds(track: Track, seconds: float) -> Check:
    most = track["train_seconds"]
    text = f"{seconds:.1f} s and the step under way, expected {most:g} s at most"
    return check("train-seconds", seconds <= most, text)


def check_flops(track: Track, flops: int) -> Check:
    most = track["train_flops"]
    return check("train-flops", flops <= most, f"{flops:.6g} operations, expected {most:g} at most")


def check_limits(record: Record) -> Iterator[Check]:
    track = record.track
    code = f"{track.code_size(record.script)} of code ({track['code_bytes']})"
    text = f"{record.total_bytes} bytes: {code}, {len(record.settings)} of settings; "
    text += f"expected {track['budget_bytes']} at most"
    yield check("bytes", record.total_bytes <= track["budget_bytes"], text)
    yield check_seconds(track, max(run.seconds_before_last_step() for run in record.runs.values()))
    if track.counts_flops:
        yield check_flops(track, max(record.values("train_flops")))
    stopped = [run.name for run in record.runs.values() if "partial" in " ".join(run.final.values())]
    yield check("whole", not stopped, f"runs with a partial validation: {stopped}, expected none")


def check_seeds(record: Record) -> Iterator[Check]:
    """The runs have the track's seeds, and more only in order, so that nobody can choose among many."""
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
    """Every artifact below the track's `artifact_below` is here or has an address, and is its log's."""
    wrong = [f"an address of seed {seed}, which has no run" for seed in record.addresses.keys() - record.runs]
    for seed, run in record.runs.items():
        logged = run.value("artifact_sha256"), run.value("artifact_bytes")
        path = record.artifacts.get(seed)
        blob = read_bytes(path) if path else None
        named = record.addresses.get(seed)
        if named and (named.sha256, named.bytes) != logged:
            its = f"{named.at} for {named.sha256}, {named.bytes} bytes"
            wrong.append(f"seed {seed}: {its}; the log says {logged}")
        elif not named and blob is None and logged[1] < record.track["artifact_below"]:
            wrong.append(f"model_seed{seed}.ptz is missing, and submission.json names no address")
        elif blob is not None and (sha256(blob), len(blob)) != logged:
            wrong.append(f"seed {seed}: sha256 {sha256(blob)}, {len(blob)} bytes; the log says {logged}")
    elsewhere = f", and addresses of {sorted(record.addresses)}" if record.addresses else ""
    good = f"those of seeds {sorted(record.artifacts)}{elsewhere}, as the logs have them"
    yield none_wrong("artifact", wrong, good)


# --- the submission ---------------------------------------------------------------------------------------


def check_submission(record: Record) -> Iterator[Check]:
    """submission.json by itself and beside logs and README. The referee checks the scores later."""
    yield none_wrong("schema", schema_errors(record.submission, "submission"), "by records/schema.json")
    yield equal("dataset", "trained and scored on", record.field("dataset"), record.track.dataset["name"])
    yield equal("scores", "of seeds", sorted(record.scores), sorted(record.runs))
    mean = f"{record.mean:.4f}"
    there = mean in read_bytes(record.path / "README.md").decode(errors="replace")
    yield check("readme", there, f"README.md has {'' if there else 'not '}the mean {mean}, expected it")
    above = {seed: record.scores[seed] - run.value("val_bpb") for seed, run in record.runs.items()}
    worst = max(above, key=above.get)
    most = record.track["log_tolerance_bpb"]
    text = f"seed {worst} scores {above[worst]:+.4f} from its log, expected {most:+g} at most"
    yield check("log-agrees", above[worst] <= most, text)


def check_lineage(record: Record) -> Iterator[Check]:
    """The record that it was built on is one of the track."""
    if "built_on" not in record.submission:
        return
    named = record.submission["built_on"]
    others = {path.name for path in record.track.records} - {record.name}
    there = "is" if named in others else "is not"
    yield check("built-on", named in others, f"{named} {there} another record of the track, expected so")


def check_claim(record: Record) -> Iterator[Check]:
    """The gain that the submission claims over the incumbent, which is derived.

    One that has a rank already is held to the rule by which it got it.
    """
    if record.field("claim") == "none":
        yield skip("gain", "claims nothing")
        return
    incumbent = best_before(record.track, record.name)
    if incumbent and not record.track.counts_flops:  # seconds of one machine are not those of another
        yield equal("machine", "ran on", record.machine, incumbent.record.machine)
    folder = record.track.folder
    ranked = standing(record, read_verdicts(folder).get(record.name, {}), read_draws(folder))
    its = ScoredRecord(record, claimed_scores(record), {}, referee=ranked.referee if ranked else None)
    yield check_gain(its, incumbent, "its own scores")


OF_THE_RUNS = [
    check_folder,
    check_date,
    check_script,
    check_hashes,
    check_logs,
    check_limits,
    check_seeds,
    check_artifact,
]
PAPERS = [*OF_THE_RUNS, check_submission, check_lineage, check_claim]


def check_papers(record: Record, checks: list[Callable] = PAPERS) -> Iterator[Check]:
    """All checks of the papers. A file that cannot be read fails its check.

    So does any other error that a record's numbers cause: a division by zero, a number too large. A folder
    with links, pipes or huge files fails its own check, and nothing of it is read.
    """
    for function in checks:
        for line in guarded(function, record):
            yield line
            if (line.name, line.verdict) == ("folder", "FAIL"):
                yield skip("papers", "nothing in such a folder is read")
                return


def guarded(function: Callable, record: Record) -> Iterator[Check]:
    """The lines of a check, and one more if it cannot be done."""
    try:
        yield from function(record)
    except ModuleNotFoundError as error:  # the verifier's fault, so no verdict
        mend = shell("pip", "install", "-r", REPO / "tests/requirements.txt")
        raise UsageError(f"{record.name}: not checked, {error.name} is not installed: {mend}") from None
    except Exception as error:
        name = function.__name__.removeprefix("check_")
        yield check(name, False, f"cannot be checked: {type(error).__name__}: {error}")
