"""All checks of what a record claims: its papers, score and proof of its artifacts, and a seed again.

The papers are everything that can be checked without running anything of the record. `style` helps people who
read the script. It does not protect the score, because Python has ways round each of its rules. The sandbox
protects it: it holds no data, no network and no packages but those of the track. The limit on the script's
size bounds how much text a script can contain, and none of it should look like data.
"""

import ast
import datetime
import io
import itertools
import re
import secrets
import sys
import tokenize
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.command import DataError
from data.files import file_sha256, read_bytes, scratch_folder, sha256
from records.archive import runs, verdicts
from records.archive.checks import Check, VerifierError, check, equal, none_wrong, of_seed, skip
from records.archive.runs import SCRIPT, ClaimedRun, Record, this_machine
from records.archive.tracks import DATA, load_track, schema_errors
from records.referee.scoring import Result, referee
from records.referee.text import Text, validation_text
from records.sandbox.jobs import PredictorJob, find_job
from records.verify import training

MAX_SETTINGS = 256  # bytes; 2026-11-22_Par has 230
MAX_CODE = 48 << 10  # bytes of a script at zlib level 9; a text that was learned by heart needs more
PART = 4096  # bytes of a script
MAX_DENSITY = 0.55  # what a part compresses to: programs 0.47, base64 0.76, hex 0.57
NO_ARTIFACT = skip("score", "no artifact is here; the judge scores those that it trains")
DECIMALS = 5.1e-9  # of a score, on the same kind of machine
# On another kind sums round otherwise, and a record that trains while it is scored amplifies that: seed 1338
# of 2026-11-26_Rung12-OwnValue has 0.711984 on an Intel Xeon, 0.712248 on an AMD EPYC.
LOOSE = 1e-3
LOGGED = (*runs.NUMBERS, "artifact_sha256", "state_sha256")  # what the end of a log has beside HASHES


# --- the folder -------------------------------------------------------------------------------------------


def check_folder(record: Record) -> Iterator[Check]:
    budget = load_track(record.home)["budget_bytes"]  # record.track would read submission.json
    wrong = [] if runs.FOLDER.fullmatch(record.name) else [f"the name {record.name!r}, not <date>_<Name>"]
    paths = sorted(itertools.islice(record.path.iterdir(), runs.MOST_FILES + 1))
    if len(paths) > runs.MOST_FILES:
        text = f"more than {runs.MOST_FILES} files, expected those of {runs.MAX_SEEDS} seeds at most"
        yield check("folder", False, text)
        return
    for path in paths:
        size = path.lstat().st_size
        if not runs.FILES.fullmatch(path.name):
            wrong.append(f"{path.name!r} has no place in a record; remove it")
        elif path.is_symlink() or not path.is_file():
            wrong.append(f"{path.name} is no plain file")
        elif size > runs.most_bytes(path, budget):
            wrong.append(f"{path.name} has {size} bytes, expected {runs.most_bytes(path, budget)} at most")
    wrong += wrong_names({path.name for path in paths})
    yield none_wrong("folder", wrong, "the files of a record and no others")


def wrong_names(names: set[str]) -> Iterator[str]:
    """Which files are missing: three of each record, and of each seed a log and its metrics once."""
    for name in ("README.md", "submission.json", SCRIPT):
        if name not in names:
            yield f"{name} is missing"
    for seed in sorted(set(re.findall(r"_(seed\d+)\.", "\n".join(names)))):
        if f"train_{seed}.log" not in names:
            yield f"train_{seed}.log is missing"
        metrics = names & {f"metrics_{seed}.jsonl", f"metrics_{seed}.jsonl.gz"}
        if not metrics:
            yield f"metrics_{seed}.jsonl.gz is missing"
        elif len(metrics) > 1:
            yield f"{' and '.join(sorted(metrics))}, expected one of them"


def check_date(record: Record) -> Iterator[Check]:
    """The date is not in the future, and not before that of a record that has passed already.

    Else a record would not have to beat all that came before it, or later ones would have to beat it too
    early. One that has passed keeps its date with the files that its verdict names.
    """
    day = record.name[:10]
    try:
        future = datetime.date.fromisoformat(day) > datetime.date.today() + datetime.timedelta(days=1)
    except ValueError:
        yield check("date", False, f"{day!r} is no date, expected one of the calendar")
        return
    wrong = [f"{day} lies in the future"] if future else []
    kept = verdicts.read_verdicts(record.track.folder)
    passed = [other for other, its in kept.items() if its["verdict"] in verdicts.PASSED]
    later = [other for other in passed if other[:10] > day]
    its = kept.get(record.name, {})
    same = its.get("sha256") == verdicts.folder_sha256(record.path)
    known = same and not {"folder", "date"} & {*its["failed"]}  # of a bad folder no date is checked
    if later and not known:
        wrong.append(f"its day is before that of {max(later)}, which passed already: date it as late")
    yield none_wrong("date", wrong, f"{day}, not in the future and before no record that passed already")


def check_files(record: Record) -> Iterator[Check]:
    """Each file can be read, and says what the other checks need. A damaged one has one line."""
    try:
        errors = [f"submission.json: {error}" for error in schema_errors(record.submission, "submission")]
        yield none_wrong("schema", errors, "submission.json is as records/schema.json has it")
    except DataError as error:
        yield check("file", False, str(error))
    try:
        for run in record.runs.values():
            for name in (*LOGGED, *HASHES):
                run.value(name)
            if not (run.given and run.about):
                raise DataError(f"{run.name}: says nothing of settings or machine")
    except DataError as error:
        yield check("file", False, str(error))


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


def check_script(record: Record) -> Iterator[Check]:
    """`compiles`: this Python reads the script and finds load_predictor. `style`: people can read it."""
    script = record.script
    try:
        tree = ast.parse(script)
        odd = [*unreadable(script), *data_in(script)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        yield check("compiles", False, f"{error}, expected Python {python}")
        return
    there = any(getattr(node, "name", "") == "load_predictor" for node in tree.body)
    yield check("compiles", there, f"load_predictor is {'' if there else 'not '}defined, expected so")
    odd += foreign_imports(tree, {*record.track["imports"], *sys.stdlib_module_names, "__future__"})
    size = len(zlib.compress(script, 9))
    if size > MAX_CODE:
        odd.append(f"compresses to {size} bytes, expected {MAX_CODE} at most")
    yield none_wrong("style", odd, "no data, no invisible characters, no imports but the track's")


# --- logs and numbers -------------------------------------------------------------------------------------


HASHES = {  # of script and data, by their names in a log: what they are
    "val_sha256": "sha256 of the validation tokens",
    "train_sha256": "sha256 of the training shards' headers",
    "tokenizer_sha256": "sha256 of the tokenizer",
    "val_tokens": "validation tokens",
    "script_sha256": "sha256 of the script",
    "val_bytes": "bytes of the validation text",
}


def wanted_value(record: Record, name: str) -> object:
    """One of HASHES as it should be; None where the track leaves it open."""
    if name == "script_sha256":
        return sha256(record.script)
    dataset = record.track.dataset
    return dataset.get(f"logged_{name}", dataset.get(name))


def check_hashes(record: Record) -> Iterator[Check]:
    """All logs name this script and the track's data."""
    for name, what in HASHES.items():
        value = wanted_value(record, name)
        expected = record.values(name)[0] if value is None else value
        owner = SCRIPT if name == "script_sha256" else f"{record.track.name}'s {record.track.dataset['name']}"
        others = [run for run in record.runs.values() if run.value(name) != expected]
        wrong = [f"{run.name}: {what} {run.value(name)}, that of {owner} is {expected}" for run in others]
        yield none_wrong(name.replace("_", "-"), wrong, f"{what} {expected} in all logs, as of {owner}")


def check_logs(record: Record) -> Iterator[Check]:
    """Logs and metrics agree, and the runs differ in nothing but the seed."""
    wrong = []
    for run in record.runs.values():
        wrong += [*wrong_end(run), *wrong_steps(run)]
    yield none_wrong("logs", wrong, "logs and metrics agree")
    given = [run.given.items() for run in record.runs.values()]
    shared = [{(name, value) for name, value in items if name not in runs.OF_ONE_RUN} for items in given]
    odd = sorted(f"{name}={value}" for name, value in set.union(*shared) - set.intersection(*shared))
    if not record.settings.isascii() or len(record.settings) > MAX_SETTINGS:
        odd.append(f"{len(record.settings)} bytes, expected {MAX_SETTINGS} of ASCII at most")
    yield none_wrong("settings", odd, "the same for every seed")


def wrong_end(run: ClaimedRun) -> Iterator[str]:
    """Where the ends of log and metrics differ."""
    both = f"{run.name} and {run.metrics_name} differ"
    events = [*run.events]
    ends = [at for at, (_, event) in enumerate(events) if event.get("event") == "final"]
    if not ends:
        yield f"{run.metrics_name}: has no final event, expected it last"
        return
    if events[ends[0] + 1 :]:
        place, _ = events[ends[0] + 1]
        yield f"{place}: a line after the final event, expected none"
    last = {key: str(value) for key, value in events[ends[0]][1].items() if key != "event"}
    lines = {key: f":{line}" for line, key in enumerate(run.final, run.log.count("\n") + 3)}
    for key in [*lines, *sorted(last.keys() - lines.keys())]:
        if last.get(key) != run.final.get(key):
            place = f"{run.name}{lines.get(key, '')} and {run.metrics_name} differ"
            yield f"{place}: {key} is {run.final.get(key)} and {last.get(key)}"
    vals = run.kind("val")
    if not vals or vals[-1].get("step") != run.value("steps"):
        yield f"{run.metrics_name}: no validation at step {run.value('steps')}, with which {run.name} ends"
    elif run.final.get("val_bpb_unquantized") not in (None, f"{vals[-1]['val_bpb']:.8f}"):
        yield f"{both}: val_bpb_unquantized is not the last validation's {vals[-1]['val_bpb']:.8f}"


def wrong_steps(run: ClaimedRun) -> Iterator[str]:
    """What is wrong with the steps of a run's metrics, their clock and their operations."""
    both = f"{run.name} and {run.metrics_name} differ"
    steps = [(place, event) for place, event in run.events if event.get("event") == "step"]
    for at, (place, event) in enumerate(steps, 1):
        if event.get("step") != at:
            yield f"{place}: step {event.get('step')!r}, expected {at}"
            break
    if len(steps) != run.value("steps"):
        yield f"{both}: {run.value('steps')} steps and {len(steps)}"
    for name, slack in (("train_seconds", 0.001), ("train_flops", 0)):
        grown = [0, *(event.get(name) for _, event in steps)]
        if not all(isinstance(x, (int, float)) for x in grown) or grown != sorted(grown):
            yield f"{run.metrics_name}: {name} of the steps are no numbers that grow"
        elif run.value(name) < grown[-1] - slack:
            yield f"{both}: {name} is {run.value(name)}, and {grown[-1]} at the last step"


# --- limits -----------------------------------------------------------------------------------------------


def check_limits(record: Record) -> Iterator[Check]:
    track = record.track
    code = f"{track.code_size(record.script)} of code ({track['code_bytes']})"
    text = f"{record.total_bytes} bytes: {code}, {len(record.settings)} of settings; "
    text += f"{track.name} allows {track['budget_bytes']}"
    yield check("bytes", record.total_bytes <= track["budget_bytes"], text)
    yield training.check_seconds(track, max(run.seconds_before_last_step() for run in record.runs.values()))
    if track.counts_flops:
        yield training.check_flops(track, max(record.values("train_flops")))


def check_seeds(record: Record) -> Iterator[Check]:
    """The runs have the track's seeds, and more only in order, so that nobody can choose among many."""
    wanted = record.track["seeds"]
    found = sorted(record.runs)
    next_one = max(wanted) + 1
    more = max(0, len(found) - len(wanted))
    yield equal("seeds", "runs of seeds", found, sorted([*wanted, *range(next_one, next_one + more)]))
    logged = [(seed, run.name, run.value("seed")) for seed, run in record.runs.items()]
    wrong = [f"{name} says seed: {its}" for seed, name, its in logged if its != seed]
    yield none_wrong("seed-names", wrong, "each log has the seed of its name")
    states = record.values("state_sha256") + record.values("artifact_sha256")
    yield equal("seed-runs", "different states and artifacts", len(set(states)), 2 * len(found))


def check_artifact(record: Record) -> Iterator[Check]:
    """Every artifact below the track's `artifact_below` is here, and is its log's."""
    wrong = []
    for seed, run in record.runs.items():
        logged = run.value("artifact_bytes"), run.value("artifact_sha256")
        name = f"model_seed{seed}.ptz"
        if seed in record.artifacts:
            blob = read_bytes(record.artifacts[seed])
            found = len(blob), sha256(blob)
            if found != logged:
                its, logs = (f"{size} bytes of sha256 {digest}" for size, digest in (found, logged))
                wrong.append(f"{name} and {run.name} differ: {its}, and {logs}")
        elif logged[0] < record.track["artifact_below"]:
            wrong.append(f"{name} is missing")
    yield none_wrong("artifact", wrong, f"those of seeds {sorted(record.artifacts)}, as the logs have them")


# --- the submission ---------------------------------------------------------------------------------------


def check_submission(record: Record) -> Iterator[Check]:
    """submission.json beside logs and README. The referee checks the scores later."""
    yield equal("dataset", "trained and scored on", record.field("dataset"), record.track.dataset["name"])
    complete = equal("scores", "of seeds", sorted(record.scores), sorted(record.runs))
    yield complete
    if complete.verdict == "FAIL":
        return
    mean = f"{record.mean:.4f}"
    there = mean in read_bytes(record.path / "README.md").decode(errors="replace")
    yield check("readme", there, f"README.md has {'' if there else 'not '}the mean {mean}, expected it")
    above = {seed: record.scores[seed] - run.value("val_bpb") for seed, run in record.runs.items()}
    worst = max(above, key=above.get)
    most = record.track["log_tolerance_bpb"]
    text = f"the score in submission.json is {above[worst]:+.4f} from val_bpb in {record.runs[worst].name}"
    expected = f"expected {most:+g} at most, the track's log_tolerance_bpb"
    yield check("log-agrees", above[worst] <= most, f"{text}, {expected}")


def check_lineage(record: Record) -> Iterator[Check]:
    """The record that it was built on is one of the track."""
    if "built_on" not in record.submission:
        return
    named = record.submission["built_on"]
    others = {path.name for path in record.track.records} - {record.name}
    there = "is" if named in others else "is not"
    yield check("built-on", named in others, f"{named} {there} another record of the track, expected so")


def check_claim(record: Record) -> Iterator[Check]:
    """The gain that the submission claims over the incumbent. A rank was earned by other scores."""
    if record.field("claim") == "none":
        yield skip("gain", "claims nothing")
        return
    folder = record.track.folder
    kept = verdicts.read_verdicts(folder).get(record.name, {})
    if verdicts.standing(record, kept, verdicts.read_draws(folder)):
        yield check("gain", True, "it has a rank already, expected so or a gain over the best before it")
        return
    incumbent = verdicts.best_before(record.track, record.name)
    if incumbent and not record.track.counts_flops:  # seconds of one machine are not those of another
        yield equal("machine", "ran on", record.machine, incumbent.record.machine)
    its = verdicts.ScoredRecord(record, verdicts.claimed_scores(record), {})
    yield verdicts.check_gain(its, incumbent, "its own scores")


OF_THE_RUNS = [
    check_folder,
    check_date,
    check_files,
    check_script,
    check_hashes,
    check_logs,
    check_limits,
    check_seeds,
    check_artifact,
]
PAPERS = [*OF_THE_RUNS, check_submission, check_lineage, check_claim]
FIRST = {  # after these checks nothing else is checked where one of their lines fails
    check_folder: "nothing in such a folder is read",
    check_files: "the other checks need all files whole",
}


def check_papers(record: Record, checks: list[Callable] = PAPERS) -> Iterator[Check]:
    """All checks of the papers. A folder with links, pipes or huge files is not read at all."""
    for function in checks:
        failed = False
        for line in guarded(function, record):
            failed |= line.verdict == "FAIL"
            yield line
        if failed and function in FIRST:
            yield skip("papers", FIRST[function])
            return


def guarded(function: Callable, record: Record) -> Iterator[Check]:
    """The lines of a check, and one more for whatever error a record's numbers lead to."""
    try:
        yield from function(record)
    except ModuleNotFoundError:
        raise  # the verifier's fault, so no verdict
    except Exception as error:
        name = function.__name__.removeprefix("check_")
        yield check(name, False, f"cannot be checked: {type(error).__name__}: {error}")


# --- all of it --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifyOptions:
    data: Path = DATA
    second: Path | None = None
    static: bool = False
    every_seed: bool = False
    trust: bool = False
    retrain: str | None = None


def verify(path: Path, options: VerifyOptions, track: Path | None = None) -> Iterator[Check]:
    """All checks of one folder. `track`: of one that lies in none. Raises NoSandbox, VerifierError."""
    record = Record(path, track_folder=track)
    failed = False
    for line in check_papers(record):
        failed |= line.verdict == "FAIL"
        yield line
    if options.static:
        return
    if failed:
        yield skip("score", "nothing of a record that fails already is run")
    elif record.track["device"] == "cuda" and not Path("/dev/nvidiactl").exists():
        yield skip("score", "the track's machine has a CUDA GPU, this one has none")
    elif not record.artifacts and options.retrain is None:
        yield NO_ARTIFACT
    else:
        try:
            yield from check_by_referee(record, options)
        except DataError as error:  # what is missing here says nothing of a record
            raise VerifierError(str(error)) from None


# --- artifacts --------------------------------------------------------------------------------------------


def check_by_referee(record: Record, options: VerifyOptions) -> Iterator[Check]:
    """Score again and prove; then train again. Raises NoSandbox, VerifierError, DataError."""
    text = validation_text(record.track, options.data)
    seeds = sorted(record.artifacts)
    if not seeds:
        yield NO_ARTIFACT
    elif not options.every_seed:
        seeds = [secrets.choice(seeds)]
    for seed in seeds:
        job = job_of(record, record.artifacts[seed], options)
        for line in referee(job, text, proof=True):
            yield compare_score(record, seed, line) if isinstance(line, Result) else line
    if options.retrain is None:
        yield skip("retrained", "--retrain SEED trains a seed again")
    else:
        drawn = secrets.choice(sorted(record.runs))  # by nobody who sent the record
        yield from retrain(record, drawn if options.retrain == "any" else int(options.retrain), text, options)


def job_of(record: Record, artifact: Path, options: VerifyOptions) -> PredictorJob:
    """How the referee scores an artifact with the record's script. Raises DataError."""
    places = record.path, record.home, artifact, options.data
    return find_job(*places, trust=options.trust, second=options.second)


def compare_score(record: Record, seed: int, result: Result) -> Check:
    """The referee's score is the submission's: to eight decimals on the same kind of machine."""
    claimed = record.scores[seed]
    same = this_machine() == record.field("scored_on")
    bound, kind = (DECIMALS, "the same kind") if same else (LOOSE, "another kind")
    off = result.bpb - claimed
    return check(
        "score",
        abs(off) <= bound,
        f"seed {seed}: {result.bpb:.8f} bits per byte, {off:+.1e} from the submission's {claimed:.8f}, "
        f"expected within {bound:g} on {kind} of machine",
    )


# --- a seed again -----------------------------------------------------------------------------------------


def retrain(record: Record, seed: int, text: Text, options: VerifyOptions) -> Iterator[Check]:
    """Train one seed again. Raises NoSandbox, VerifierError, DataError: no fault of the record."""
    if seed not in record.runs:
        raise VerifierError(f"--retrain {seed}: the record has the seeds {sorted(record.runs)}")
    with scratch_folder() as folder:
        reference = training.measure_reference(record, options.data)
        found = training.train(record, seed, options.data, folder, reference)
        (ended,) = of_seed(seed, [training.check_ended("retrain", found)])
        yield ended
        if ended.verdict == "PASS":
            yield compare_artifact(record, seed, folder / runs.ARTIFACT, text, options)
            yield from training.check_work(record.track, found)


def compare_artifact(record: Record, seed: int, artifact: Path, text: Text, options: VerifyOptions) -> Check:
    """The new artifact is the record's bit for bit, or scores as it does, within the track's noise.

    Another processor rounds differently, which gives another run. If the record claims nothing, the new
    artifact may lie as far away as its seeds lie apart.
    """
    if file_sha256(artifact).hex() == record.runs[seed].value("artifact_sha256"):
        return check("retrained", True, f"seed {seed}: the artifact came back bit for bit, expected so")
    first = next(iter(referee(job_of(record, artifact, options), text, proof=False)))
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
