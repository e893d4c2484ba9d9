"""The commands that run one record's model: score, proof, samples, and a codec."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from data import door
from data.command import DataError, UsageError, shell, some, training_command
from data.files import read_bytes, write_whole
from records.archive.checks import Check
from records.archive.runs import SCRIPT, is_address, is_own
from records.archive.tracks import DATA, NOTHING, Track, read_reference_compressors
from records.archive.verdicts import read_verdicts
from records.referee import coder, scoring
from records.referee.sample import sample as sampled
from records.referee.text import load_tokenizer, validation_text
from records.sandbox import NoSandbox, SandboxError, bubblewrap
from records.sandbox.jobs import PredictorJob, find_job

# --- a record ---------------------------------------------------------------------------------------------

RECORD = [
    click.Argument(["record"], type=Path),
    click.Option(["--track"], type=Path, help="folder with track.json  [default: the record's parent]"),
    click.Option(["--dataset"], help="one of the track's vocabularies  [default: the record's]"),
    click.Option(["--artifact"], type=Path, help="[default: the record's model_seed<N>.ptz]"),
    click.Option(["--data"], type=Path, default=DATA, help="folder with datasets/ and tokenizers/"),
    click.Option(["--device"], type=click.Choice(["cpu", "cuda"]), help="[default: track's; to write: cpu]"),
    click.Option(["--trust"], is_flag=True, help="run the record without a sandbox"),
]


def need_record(place: Path) -> None:
    """Raises DataError of a file, and of a folder that is neither, with those that could be meant."""
    if place.is_file():
        its = f", as {place.parent}" if [*place.parent.glob("model*")] else ""
        raise DataError(f"{place}: is a file, expected the folder of a run or a record{its}")
    if place.is_dir() and not (place / SCRIPT).exists():
        inside = [shell(script.parent) for script in sorted(place.glob(f"*/{SCRIPT}"))]
        named = f"but holds some: {click.get_current_context().command_path} with one of {some(inside)}"
        made = f"expected its {SCRIPT}; {training_command(RUN_ID='first', PRESET='minute')} makes logs/first"
        raise DataError(f"{place}: is no run or record, {named if inside else made}")


@contextlib.contextmanager
def job_of(
    record: Path,
    track: Path | None,
    data: Path,
    device: str | None,
    trust: bool,
    alone: bool = False,
    **more: Any,
) -> Iterator[PredictorJob]:
    """The job of a record's folder or address. What a record does wrong in the block is a DataError.

    `alone`: the job is for one stream only, for which a CPU is the usual machine.
    """
    if is_address(record):
        from records.archive.hub import fetch_record  # which loads the hub's client

        found = fetch_record(str(record), data, track)
        print(f"{found.address}, of {found.track.name}", file=sys.stderr)
        record = found.path
        track = found.track
    need_record(record)
    if is_own(record) and not (trust or bubblewrap.find()):
        print(f"{record}: is your own run and runs without a sandbox: none works here", file=sys.stderr)
        trust = True
    device = device or ("cpu" if alone else None)
    job = find_job(record, track, data=data, device=device, trust=trust, alone=alone, **more)
    try:
        yield job
    except (SandboxError, NoSandbox) as error:
        raise DataError(str(error)) from None


# --- score and prove --------------------------------------------------------------------------------------


def print_all(lines: Iterable) -> int:
    """Print line by line; the exit code, 1 if a check failed."""
    failed = 0
    for line in lines:
        print(line, flush=True)
        failed += isinstance(line, Check) and line.verdict == "FAIL"
    return 1 if failed else 0


def beside(track: Track) -> Iterator[str]:
    """What others need for the same text: well-known compressors, and the best record that was judged."""
    rows = [row for row in read_reference_compressors(track) if row.after == NOTHING]
    found = {row.name: row.bits_per_byte for row in rows}
    verdicts = read_verdicts(track.folder) if rows else {}
    ranked = {name: its["judged"]["mean"] for name, its in verdicts.items() if its["verdict"] == "ranked"}
    for name in sorted(ranked, key=ranked.get)[:1]:
        found[name] = ranked[name]
    if found:
        yield "beside: " + ", ".join(f"{name} {bpb:.4f}" for name, bpb in found.items())


SECOND = click.Option(["--second"], type=Path, help="second text: a JSON string a line, one for a document")


@click.command(cls=door.Command, params=[*RECORD, SECOND])
def score(**place: Any) -> int:
    """Score the track's validation text and a second text. Exit code 1 if a check fails.

    The last line is what compressors and the best judged record need, where the track has them.
    """
    with job_of(**place) as job:
        text = validation_text(job.track, place["data"])
        lines = scoring.referee(job, text, proof=False)
        return print_all(itertools.chain(lines, beside(job.track)))


@click.command(cls=door.Command, params=RECORD)
def prove(**place: Any) -> int:
    """Compress the validation text and decompress it in a fresh sandbox. Exit code 1 if a check fails."""
    with job_of(**place) as job:
        text = validation_text(job.track, place["data"])
        result = scoring.score_record(job, text, coding=True)
        proof = scoring.check_proof(result, load_tokenizer(job.tokenizer_path))
        return print_all(itertools.chain([result], proof))


# --- sample and complete ----------------------------------------------------------------------------------

# a stranger's model must not steer the terminal
CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\t"), ord("\n")}, "\ufffd")
CONTEXT = 1024  # last tokens of a prompt that the model is fed
WRITING = [
    click.Option(["--tokens"], type=click.IntRange(1), default=200, metavar="N", help="to write"),
    click.Option(["--temperature"], type=door.Number(0), default=0.8, metavar="T", help="0: no chance"),
    click.Option(["--seed"], type=click.IntRange(0), default=1, metavar="N", help="another: another text"),
]
FILE = click.Argument(["file"], type=Path)
TO_FILE = click.Option(["-o", "--output"], type=Path, help="[default: FILE.bg, or FILE without .bg]")


def write(prompt: str, shown: bool, tokens: int, temperature: float, seed: int, **place: Any) -> int:
    """Print what the model writes after the prompt, which is `shown` or not; the exit code."""
    with job_of(**place, alone=True) as job:
        tokenizer = load_tokenizer(job.tokenizer_path)
        fed = tokenizer.encode(prompt)[-CONTEXT:]
        with job.predictor(scored=False) as predictor:
            written = sampled(predictor, tokenizer, fed, tokens, temperature, np.random.default_rng(seed))
            first = next(written)  # once the model is there: an error stands on a line of its own
            print(prompt if shown else "", end="")
            for part in itertools.chain([first], written):
                safe = part.translate(CONTROLS) if sys.stdout.isatty() else part
                print(safe, end="", flush=True)
    print()
    return 0


PROMPT = click.Option(["--prompt"], type=door.text, default="", metavar="TEXT", help="how the text begins")


@click.command(cls=door.Command, params=[*RECORD, PROMPT, *WRITING])
def sample(prompt: str, **how: Any) -> int:
    """Let the record's model write text."""
    return write(prompt, True, **how)


@click.command(cls=door.Command, params=[*RECORD, FILE, *WRITING])
def complete(file: Path, **how: Any) -> int:
    """Let the record's model go on where a text file ends. Only what is new is printed."""
    try:
        prompt = read_bytes(file).decode()
    except ValueError as error:
        raise DataError(f"{file}: {error}; expected a text in UTF-8") from None
    return write(prompt, False, **how)


# --- compress and decompress ------------------------------------------------------------------------------


def need_same_model(file: Path, packed: bytes, job: PredictorJob) -> None:
    """Raises DataError of a file that another model has compressed."""
    if packed.startswith(coder.MAGIC) and not packed.startswith(coder.MAGIC + job.name):
        theirs = f"{job.artifact} with the {SCRIPT} beside it"
        mend = "give the run or record that compressed it, with its --artifact if it had one"
        raise DataError(f"{file}: was compressed with another model than {theirs}; {mend}")


def convert(codec: Callable[..., bytes], file: Path, output: Path, place: dict[str, Any]) -> int:
    """Write what the codec makes of a file; the exit code. Raises UsageError, DataError."""
    with job_of(**place) as job:
        if output.exists():
            raise UsageError(f"{output}: exists and is never overwritten; -o names another file")
        given = read_bytes(file)
        if codec is coder.decompress:
            need_same_model(file, given, job)
        with job.predictor(scored=False) as predictor:
            try:
                made = codec(predictor, load_tokenizer(job.tokenizer_path), job.name, given)
            except DataError as error:
                raise DataError(f"{file}: {error}") from None
    if codec is coder.compress:
        print(coder.table(given, len(made)))
    write_whole(output, made)
    print(f"{output}: {len(made)} bytes")
    return 0


@click.command(cls=door.Command, params=[*RECORD, FILE, TO_FILE])
def compress(file: Path, output: Path | None, **place: Any) -> int:
    """Compress a text file by the record's probabilities. gzip, bzip2, xz and zstd stand beside."""
    return convert(coder.compress, file, output or file.with_name(file.name + ".bg"), place)


@click.command(cls=door.Command, params=[*RECORD, FILE, TO_FILE])
def decompress(file: Path, output: Path | None, **place: Any) -> int:
    """Give back the text of a file that `compress` made with the same record."""
    if output is None and file.suffix != ".bg":
        raise UsageError(f"{file}: -o names the file to write, since the name does not end in .bg")
    return convert(coder.decompress, file, output or file.with_suffix(""), place)
