"""The trusted scorer: bits per byte of a record by the referee's own count, probes, a proof by compression.

    python -m records.referee score      RECORD
    python -m records.referee sample     RECORD --prompt "def "
    python -m records.referee prove      RECORD --bytes 4096
    python -m records.referee compress   RECORD FILE [-o FILE.bg]
    python -m records.referee decompress RECORD FILE.bg [-o FILE]

RECORD is a folder with a train_gpt.py that defines load_predictor, and an artifact. The record runs in a
sandbox and sees tokens only; the text, the count of bytes, the sum of nats, the clock and the verdict are
the referee's.
"""

import argparse
import math
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.command import DataError, UsageError, open_streams, run, whole
from records.checks import Check, check
from records.coder import compress, decompress
from records.files import read_bytes, utf8, write_whole
from records.jobs import Job, find_job
from records.probes import probe_record
from records.proof import LEAST_PROOF, prove, table
from records.sample import sample
from records.sandbox import NoSandbox, SandboxError
from records.scoring import Result, score_record, with_windows
from records.text import DATA, Text, load_tokenizer, second_text, validation_text


def referee(job: Job, text: Text, proof_bytes: int, rng: np.random.Generator) -> Iterator[Check | Result]:
    """Score, probes and proof; the Result comes first. What the sandbox ends is one FAIL, and the end."""
    try:
        result, checks = score_record(job, text)
        yield result
        yield from checks
        if any(line.verdict == "FAIL" for line in checks):
            return
        tokenizer = load_tokenizer(job.tokenizer_path)
        yield from probe_record(result, text, second_text(job.track, tokenizer, job.second), rng)
        if proof_bytes:
            yield from prove(result.job, text, proof_bytes, rng)
        yield check("sandbox", True, "within its limits, expected so")
    except SandboxError as error:
        yield check("sandbox", False, f"{error.kind}: {error}")


# --- command line ----------------------------------------------------------------------------------------


def temperature(text: str) -> float:
    """The type of --temperature."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} given, expected a number of 0 or more")
    return value


def add_text_options(command: argparse.ArgumentParser) -> None:
    """Options of the commands that read the validation text."""
    add = command.add_argument
    add("--documents", type=Path, help="the validation text, a JSON string a line (default: from shards)")
    add("--probe-seed", type=whole(0), help="of the random positions (default: drawn, and printed)")


def add_score(command: argparse.ArgumentParser) -> None:
    add_text_options(command)
    command.add_argument("--second", type=Path, help="second text: a JSON string a line, one for a document")
    command.add_argument("--eager", action="store_true", help="without torch.compile")


def add_sample(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--prompt", type=utf8, default="", help="how the text begins (default: it begins a document)")
    add("--tokens", type=whole(1), default=200, help="how many the model writes (default: %(default)s)")
    add("--temperature", type=temperature, default=0.8, help="0: no chance at all (default: %(default)s)")
    add("--seed", type=whole(0), default=1, help="another one, another text (default: %(default)s)")


def add_prove(command: argparse.ArgumentParser) -> None:
    add_text_options(command)
    what = "of text (default: %(default)s)"
    command.add_argument("--bytes", type=whole(LEAST_PROOF), default=4096, metavar="N", help=what)


def add_convert(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, metavar="FILE")
    command.add_argument("-o", "--output", type=Path, help="(default: FILE.bg, or FILE without .bg)")


COMMANDS = {
    "score": (add_score, "score the track's validation text and probe the record"),
    "sample": (add_sample, "let the record's model write text"),
    "prove": (add_prove, "compress real validation text and decompress it in a fresh sandbox"),
    "compress": (add_convert, "compress a text file by the record's probabilities"),
    "decompress": (add_convert, "and back"),
}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m records.referee", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (add_options, words) in COMMANDS.items():
        command = commands.add_parser(name, help=words, description=words)
        add = command.add_argument
        add(
            "record", type=Path, metavar="RECORD", help="folder with train_gpt.py and an artifact, or a run's"
        )
        add("--track", type=Path, help="folder with track.json (default: the record's parent)")
        add("--artifact", type=Path, help="(default: the record's model_seed<N>.ptz)")
        add("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
        add("--device", choices=["cpu", "cuda"], help="(default: the track's; sample: cpu)")
        add("--trust", action="store_true", help="run the record without a sandbox where there is none")
        add_options(command)
    return parser.parse_args(argv)


def convert(job: Job, args: argparse.Namespace) -> int:
    """compress and decompress."""
    packing = args.command == "compress"
    if not packing and args.output is None and args.file.suffix != ".bg":
        raise UsageError(f"{args.file}: -o names the file to write, since the name does not end in .bg")
    default = args.file.with_name(args.file.name + ".bg") if packing else args.file.with_suffix("")
    output = args.output or default
    if output.exists():
        raise UsageError(f"{output}: exists and is never overwritten; -o names another file")
    tokenizer = load_tokenizer(job.tokenizer_path)
    data = read_bytes(args.file)
    with job.predictor() as predictor:
        job = with_windows(job, predictor)
        try:
            if packing:
                made, _ = compress(predictor, job.evaluation, tokenizer, job.name, data)
                print(table(data, len(made)))
            else:
                made = decompress(predictor, job.evaluation.state, tokenizer, job.name, data)
        except DataError as error:
            raise DataError(f"{args.file}: {error}") from None
    write_whole(output, made)
    print(f"{output}: {len(made)} bytes")
    return 0


def write_sample(job: Job, args: argparse.Namespace) -> int:
    """sample."""
    tokenizer = load_tokenizer(job.tokenizer_path)
    rng = np.random.default_rng(args.seed)
    with job.predictor(quick=True) as predictor:
        for text in sample(predictor, tokenizer, args.prompt, args.tokens, args.temperature, rng):
            print(text, end="", flush=True)
    print()
    return 0


def judge(job: Job, args: argparse.Namespace) -> int:
    """score and prove."""
    seed = secrets.randbits(32) if args.probe_seed is None else args.probe_seed
    rng = np.random.default_rng(seed)
    failed = 0
    result = None
    text = validation_text(job.track, args.data, args.record, args.documents)
    print(f"probe_seed: {seed}")
    lines = referee(job, text, 0, rng) if args.command == "score" else prove(job, text, args.bytes, rng)
    for line in lines:
        if isinstance(line, Result):
            result = line
            continue
        print(line, flush=True)
        failed += line.verdict == "FAIL"
    if result:
        print("---")
        print(f"val_loss: {result.loss:.8f}")
        print(f"val_bpb: {result.bpb:.8f}")
        print(f"val_bytes: {text.bytes}")
        print(f"val_tokens: {len(text.tokens) - 1}")
        print(f"seconds: {result.seconds:.1f}")
    return 1 if failed else 0


def work(args: argparse.Namespace) -> int:
    device = args.device or ("cpu" if args.command == "sample" else None)
    compiling = not getattr(args, "eager", False)
    second = getattr(args, "second", None)
    job = find_job(args.record, args.track, args.artifact, args.data, device, args.trust, compiling, second)
    do = {"score": judge, "prove": judge, "sample": write_sample}.get(args.command, convert)
    try:
        return do(job, args)
    except (SandboxError, NoSandbox) as error:
        raise DataError(str(error)) from None


def main(argv: list[str] | None = None) -> int:
    open_streams()
    args = parse_args(argv)
    return run(lambda: work(args), "run the command again")


if __name__ == "__main__":
    sys.exit(main())
