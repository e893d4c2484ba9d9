"""The checks of a record's papers: everything that can be checked without running anything of it."""

import datetime
import itertools
import re
from collections.abc import Callable, Iterator

from data.command import REPO, UsageError, shell
from data.files import read_bytes, sha256
from records.archive.checks import Check, check, equal, none_wrong, skip
from records.archive.folders import FILES, FOLDER, MAX_SEEDS, MOST_FILES, SCRIPT, most_bytes, seed_of
from records.archive.judgings import read_draws
from records.archive.ranks import Rival, best_before, check_gain, standing
from records.archive.record import OF_ONE_RUN, Record
from records.archive.submission import ClaimedRun
from records.archive.tracks import load_track, schema_errors
from records.archive.verdicts import PASSED, folder_sha256, read_verdicts
from records.verify.source import check_source

MAX_SETTINGS = 256  # bytes; 2026-11-22_Par has 230


# --- the folder -------------------------------------------------------------------------------------------


def check_folder(record: Record) -> Iterator[Check]:
    """The folder has the files of a record and no others, each a plain file of a reasonable size."""
    track = load_track(record.home)  # record.track would read submission.json
    wrong = [] if FOLDER.fullmatch(record.name) else [f"the name {record.name!r}"]
    paths = sorted(itertools.islice(record.path.iterdir(), MOST_FILES + 1))
    if len(paths) > MOST_FILES:
        yield check(
            "folder", False, f"more than {MOST_FILES} files, expected those of {MAX_SEEDS} seeds at most"
        )
        return
    for path in paths:
        size = path.lstat().st_size
        if not FILES.fullmatch(path.name):
            wrong.append(f"{path.name!r} has no place in a record")
        elif path.is_symlink() or not path.is_file():
            wrong.append(f"{path.name} is no plain file")
        elif size > most_bytes(path, track["budget_bytes"]):
            wrong.append(f"{path.name} has {size} bytes")
    names = {path.name for path in paths}
    wrong += [f"{name} is missing" for name in ("README.md", "submission.json", SCRIPT) if name not in names]
    wrong += incomplete_seeds(names)
    yield none_wrong("folder", wrong, "the files of a record and no others")


def incomplete_seeds(names: set[str]) -> Iterator[str]:
    """Seeds that lack a log, metrics or an artifact."""
    logs, metrics, models = (
        [seed_of(name) for name in sorted(names) if re.match(rf"{start}_seed\d", name)]
        for start in ("train", "metrics", "model")
    )
    if sorted(logs) != sorted(metrics) or not set(models) <= set(logs) or len(set(models)) < len(models):
        yield f"logs of seeds {logs}, metrics of {metrics}, models of {models}"


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


def check_date(record: Record) -> Iterator[Check]:
    """The date is not in the future, and not before that of a record that has passed already.

    Records are ordered by the names of their folders. With a false date a record would not have to beat all
    that came before it, or later records would have to beat it too early. A folder may stay where it is once
    its date has passed, but only with the files that this verdict names.
    """
    name = record.name
    text = name[:10]
    try:
        future = datetime.date.fromisoformat(text) > datetime.date.today() + datetime.timedelta(days=1)
    except ValueError:
        yield check("date", False, f"{text!r} is no date, expected one of the calendar")
        return
    wrong = [f"{text} lies in the future"] if future else []
    verdicts = read_verdicts(record.track.folder)
    later = [other for other, its in verdicts.items() if other > name and its["verdict"] in PASSED]
    its = verdicts.get(name, {})
    same = its.get("sha256") == folder_sha256(record.path)
    known = same and not {"folder", "date"} & {*its["failed"]}  # of a bad folder no date is checked
    if later and not known:
        wrong.append(
            f"the folder's name comes before {max(later)}, which passed already: date it a day later"
        )
    yield none_wrong("date", wrong, f"{text}, not in the future and before no record that passed already")


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
    """Where the end of a run's metrics disagrees with its log."""
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


def check_limits(record: Record) -> Iterator[Check]:
    """Bytes, seconds and operations of every seed."""
    track = record.track
    text = f"{record.total_bytes} bytes: {track.code_size(record.script)} of code ({track['code_bytes']}), "
    text += f"{len(record.settings)} of settings; "
    text += f"expected {track['budget_bytes']} at most"
    yield check("bytes", record.total_bytes <= track["budget_bytes"], text)
    worst = max(run.seconds_before_last_step() for run in record.runs.values())
    text = f"{worst:.1f} s and the step under way, expected {track['train_seconds']:g} s at most"
    yield check("train-seconds", worst <= track["train_seconds"], text)
    if track.counts_flops:
        worst = max(record.values("train_flops"))
        text = f"{worst:.6g} operations, expected {track['train_flops']:g} at most"
        yield check("train-flops", worst <= track["train_flops"], text)
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
            wrong.append(
                f"seed {seed}: {named.at} for {named.sha256}, {named.bytes} bytes; the log says {logged}"
            )
        elif not named and blob is None and logged[1] < record.track["artifact_below"]:
            wrong.append(f"model_seed{seed}.ptz is missing, and submission.json names no address")
        elif blob is not None and (sha256(blob), len(blob)) != logged:
            wrong.append(f"seed {seed}: sha256 {sha256(blob)}, {len(blob)} bytes; the log says {logged}")
    elsewhere = f", and addresses of {sorted(record.addresses)}" if record.addresses else ""
    good = f"those of seeds {sorted(record.artifacts)}{elsewhere}, as the logs have them"
    yield none_wrong("artifact", wrong, good)


# --- claims -----------------------------------------------------------------------------------------------


def check_claim(record: Record) -> Iterator[Check]:
    """The gain that the submission claims over the best record before it, which is derived.

    One that has a rank already is held to the rule by which it got it.
    """
    if record.field("claim") == "none":
        yield skip("gain", "claims nothing")
        return
    old = best_before(record.track, record.name)
    if old and not record.track.counts_flops:  # seconds of one machine are not those of another
        yield equal("machine", "ran on", record.machine, old.record.machine)
    folder = record.track.folder
    ranked = standing(record, read_verdicts(folder).get(record.name, {}), read_draws(folder))
    priced = ranked is None or ranked.priced
    its = Rival(record, [*record.scores.values()], {}, priced=priced)
    yield check_gain(its, old, "its own scores")


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
PAPERS = [*OF_THE_RUNS, check_submission, check_claim]


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
