"""Is a record what it says? One line a check: PASS | FAIL | SKIP name: what was found, what was expected.

    python -m records.verify records/<track>/<folder>...     all checks, the sandbox ones included
    python -m records.verify --all [--static]                every record; --static: nothing of it runs
    python -m records.verify FOLDER --retrain 1337           run its script again on this machine and compare

Exit code 1 if a check fails, 2 and 3 if the verification itself cannot be done.
"""

import argparse
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.command import DataError, open_streams, run, whole
from records.checks import Check, check, printable, skip
from records.files import read_bytes
from records.folders import SCRIPT, TWIN, artifact_paths, record_folders
from records.jobs import find_job
from records.papers import Record, check_papers
from records.proof import LEAST_PROOF
from records.referee import referee
from records.sandbox import NoSandbox
from records.scoring import Result
from records.submission import Run
from records.text import DATA, validation_text
from records.tracks import RECORDS
from records.verdicts import write_verdict

LOOSE, DECIMALS = 1e-4, 5.1e-9  # of a score: on another machine, and on one of the same kind
KEPT = ("PATH", "HOME", "OMP_NUM_THREADS")  # of the caller's environment when a script is run again


# --- the referee ------------------------------------------------------------------------------------------


def same_kind(about: dict[str, str]) -> bool:
    """Whether this machine is of the kind that a log describes."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    text = read_bytes(cpuinfo).decode(errors="replace") if cpuinfo.exists() else ""
    found = re.search(r"model name\s*:\s*(.*)", text)
    here = {
        "processor": found[1] if found else platform.processor(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "gpu": about.get("gpu"),
    }
    return all(about.get(name) == value for name, value in here.items())


def was_compiled(run: Run) -> bool:
    """Whether a run scored itself by compiled code, by its log."""
    return "compile:1" in run.log and "compile:0" not in run.log


def compare_score(run: Run, result: Result) -> Check:
    """The referee's score against the log's: to eight decimals where both computed alike."""
    off = result.bpb - run.value("val_bpb")
    compiled = result.job.mode.compiling and "compile:0" not in result.said
    same = same_kind(run.about) and compiled == was_compiled(run)
    bound, kind = (DECIMALS, "the same kind") if same else (LOOSE, "another kind")
    return check(
        "score",
        abs(off) <= bound,
        f"{result.bpb:.8f} bits per byte, {off:+.1e} from the log's {run.value('val_bpb'):.8f}, expected "
        f"within {bound:g} on {kind} of machine or code; {result.seconds:.1f} s",
    )


def check_by_referee(record: Record, options: argparse.Namespace) -> Iterator[Check]:
    """Score again, probe, prove. Raises NoSandbox."""
    if not record.artifacts:
        yield skip("score", "no artifact is here")
        return
    if record.track["device"] == "cuda" and not Path("/dev/nvidiactl").exists():
        yield skip("score", "the track's machine has a CUDA GPU, this one has none")
        return
    seed = min(record.artifacts)
    its_run = record.runs[seed]
    job = find_job(
        record.path,
        artifact=artifact_paths(record.path)[seed],
        data=options.data,
        trust=options.trust,
        second=options.second,
        compiling=was_compiled(its_run) and not options.eager,
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
        yield compare_score(its_run, line) if isinstance(line, Result) else line


# --- training again ---------------------------------------------------------------------------------------


def train_again(record: Record, seed: int, data: Path) -> subprocess.CompletedProcess:
    """Run the script in a folder of its own, with its settings.

    It runs as the user who calls: only for scripts that were read.
    """
    values = record.field("settings", "values")
    given = {name: values[name] for name in (*record.field("settings", "given"), "PRESET")}
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="bytegolf-retrain-") as name:
        folder = Path(name)
        for script in record.scripts:
            shutil.copyfile(record.path / script, folder / script)
        (folder / "data").symlink_to(data.resolve())
        return subprocess.run(
            [os.path.abspath(sys.executable), TWIN if TWIN in record.scripts else SCRIPT],
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**kept, **given, "SEED": str(seed), "RUN_ID": "again", "PYTHONUTF8": "1"},
        )


def retrain(record: Record, seed: int, data: Path) -> Check:
    """Train again and compare by the track's noise."""
    done = train_again(record, seed, data)
    found = re.search(r"^val_bpb: ([\d.]+)$", done.stdout.rpartition("\n---\n")[2], re.MULTILINE)
    if done.returncode or not found:
        return check("retrain", False, f"exit code {done.returncode}: {done.stderr.strip()[-200:]}")
    off = float(found[1]) - record.field("val_bpb", "mean")
    noise = record.track["noise_bpb"]
    text = f"seed {seed} gives {found[1]}, {off:+.4f} from the record's mean, expected within {noise}"
    return check("retrain", abs(off) <= noise, text)


# --- all of it --------------------------------------------------------------------------------------------


def verify(path: Path, options: argparse.Namespace) -> Iterator[Check]:
    """All checks of one folder. Raises NoSandbox."""
    record = Record(path)
    failed = False
    for line in check_papers(record):
        failed |= line.verdict == "FAIL"
        yield line
    if options.static:
        return
    if failed:
        yield skip("score", "nothing of a record that fails already is run")
        return
    yield from check_by_referee(record, options)
    if options.retrain is not None:
        yield retrain(record, options.retrain, options.data)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m records.verify", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER")
    add("--all", action="store_true", help="every record of every track")
    add("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
    add("--second", type=Path, help="second text: a JSON string a line, one for a document")
    add("--documents", type=Path, help="the validation text, as --second (default: from shards)")
    add("--static", action="store_true", help="only what needs no run")
    add("--eager", action="store_true", help="score without torch.compile")
    add("--trust", action="store_true", help="run the record without a sandbox where there is none")
    add("--proof-bytes", type=whole(0), default=4096, metavar="N", help="of the proof; 0: none")
    add("--retrain", type=whole(0), metavar="SEED", help="also train again, which takes as long as it does")
    add("--probe-seed", type=whole(0), help="of the random positions (default: drawn)")
    add("--write", action="store_true", help="keep the verdicts for records.board")
    args = parser.parse_args(argv)
    if args.proof_bytes and args.proof_bytes < LEAST_PROOF:
        parser.error(f"--proof-bytes {args.proof_bytes}: expected 0, or {LEAST_PROOF} at least")
    if bool(args.folders) == args.all:
        parser.error("name folders, or --all")
    return args


def work(args: argparse.Namespace) -> int:
    folders = record_folders(RECORDS) if args.all else [Path(os.path.abspath(f)) for f in args.folders]
    failed = 0
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{printable(folder)}: no such folder")
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


def main(argv: list[str] | None = None) -> int:
    open_streams()
    args = parse_args(argv)
    return run(lambda: work(args), "verify again")


if __name__ == "__main__":
    sys.exit(main())
