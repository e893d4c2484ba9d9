"""The trusted scorer: bits per byte of a record by the referee's own count, and a proof by compression.

    python -m records.referee score      RECORD
    python -m records.referee prove      RECORD
    python -m records.referee sample     RECORD --prompt "def "
    python -m records.referee complete   RECORD FILE
    python -m records.referee compress   RECORD FILE [-o FILE.bg]
    python -m records.referee decompress RECORD FILE.bg [-o FILE]

RECORD is a folder with an artifact and a train_gpt.py that defines load_predictor, or hub:user/name[@commit]
for a record that python -m records.publish put on the Hugging Face hub. The record runs in a sandbox, and is
fed each token after it gave its price. The referee owns the text, counts bytes and seconds, sums the nats
and gives the verdict.
"""

import argparse
import itertools
import math
import secrets
import sys
from pathlib import Path

import numpy as np

from data import command
from data.command import DataError, Parser, UsageError, utf8, whole
from data.files import read_bytes, write_whole
from records.archive.checks import Check
from records.archive.folders import is_address
from records.archive.runs import is_own
from records.archive.tracks import DATA
from records.referee import scoring
from records.referee.coder import compress, decompress, table
from records.referee.sample import sample
from records.referee.text import tokenizer_of, validation_text
from records.sandbox import bubblewrap
from records.sandbox.jobs import PredictorJob, find_job
from records.sandbox.predictor import NoSandbox, SandboxError

# --- commands ---------------------------------------------------------------------------------------------


def convert(job: PredictorJob, args: argparse.Namespace) -> int:
    """The commands compress and decompress."""
    packing = args.command == "compress"
    if not packing and args.output is None and args.file.suffix != ".bg":
        raise UsageError(f"{args.file}: -o names the file to write, since the name does not end in .bg")
    default = args.file.with_name(args.file.name + ".bg") if packing else args.file.with_suffix("")
    output = args.output or default
    if output.exists():
        raise UsageError(f"{output}: exists and is never overwritten; -o names another file")
    data = read_bytes(args.file)
    with job.predictor() as predictor:
        try:
            work = compress if packing else decompress
            made = work(predictor, tokenizer_of(job), job.name, data)
        except DataError as error:
            raise DataError(f"{args.file}: {error}") from None
    if packing:
        print(table(data, len(made)))
    write_whole(output, made)
    print(f"{output}: {len(made)} bytes")
    return 0


def write(job: PredictorJob, args: argparse.Namespace) -> int:
    """The commands sample and complete."""
    tokenizer = tokenizer_of(job)
    if args.command == "sample":
        prompt = shown = args.prompt
    else:
        try:
            prompt, shown = read_bytes(args.file).decode(), ""
        except ValueError as error:
            raise DataError(f"{args.file}: {error}; expected a text in UTF-8") from None
    tokens = tokenizer.encode(prompt)[-args.context :]
    rng = np.random.default_rng(args.seed)
    with job.predictor() as predictor:
        written = sample(predictor, tokenizer, tokens, args.tokens, args.temperature, rng)
        first = next(written)  # once the model is there: an error stands on a line of its own
        print(shown, end="")
        for text in itertools.chain([first], written):
            safe = text.translate(CONTROLS) if sys.stdout.isatty() else text
            print(safe, end="", flush=True)
    if args.command == "sample" or sys.stdout.isatty():  # else the text could go behind the file
        print()
    return 0


def judge(job: PredictorJob, args: argparse.Namespace) -> int:
    """The commands score and prove."""
    seed = secrets.randbits(32) if args.seed is None else args.seed
    rng = np.random.default_rng(seed)
    text = validation_text(job.track, args.data)
    print(f"seed: {seed}")
    if args.command == "prove":
        if args.bytes:
            text = scoring.part_of(text, tokenizer_of(job), args.bytes, rng)
        result = scoring.score_record(job, text, True)
        note = [scoring.PART] if args.bytes else []
        lines = itertools.chain([result], scoring.check_proof(result), note)
    else:
        lines = scoring.referee(job, text, False, rng)
    failed = 0
    for line in lines:
        print(line, flush=True)
        failed += isinstance(line, Check) and line.verdict == "FAIL"
    return 1 if failed else 0


def temperature(text: str) -> float:
    """The type of --temperature."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} given, expected a number of 0 or more")
    return value


# a stranger's model must not steer the terminal
CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\t"), ord("\n")}, "\ufffd")
COMMANDS = {
    "score": (judge, "score the track's validation text and a second text"),
    "prove": (judge, "compress the validation text and decompress it in a fresh sandbox"),
    "sample": (write, "let the record's model write text"),
    "complete": (write, "let it go on where a text file ends; prints only what is new"),
    "compress": (convert, "compress a text file by the record's probabilities"),
    "decompress": (convert, "and back"),
}
BYTES = whole(scoring.LEAST_PROOF)
CONTEXT = "last tokens of prompt or file that the model is fed (default: %(default)s)"
OPTIONS = [  # commands that have it (none: all), its name, what argparse makes of it
    ("", "--track", {"type": Path, "help": "folder with track.json (default: the record's parent)"}),
    ("", "--dataset", {"help": "one of the track's vocabularies (default: the record's)"}),
    ("", "--artifact", {"type": Path, "help": "(default: the record's model_seed<N>.ptz)"}),
    ("", "--data", {"type": Path, "default": DATA, "help": "folder with datasets/ and tokenizers/"}),
    ("", "--device", {"choices": ["cpu", "cuda"], "help": "(default: the track's; sample, complete: cpu)"}),
    ("", "--trust", {"action": "store_true", "help": "run the record without a sandbox"}),
    ("score prove", "--seed", {"type": whole(0), "help": "of random choices (default: drawn, and printed)"}),
    ("score", "--second", {"type": Path, "help": "second text: a JSON string a line, one for a document"}),
    ("prove", "--bytes", {"type": BYTES, "metavar": "N", "help": "of text (default: all)"}),
    ("sample", "--prompt", {"type": utf8, "default": "", "help": "how the text begins"}),
    ("sample complete", "--tokens", {"type": whole(1), "default": 200, "help": "(default: %(default)s)"}),
    (
        "sample complete",
        "--temperature",
        {"type": temperature, "default": 0.8, "help": "(default: %(default)s)"},
    ),
    ("sample complete", "--seed", {"type": whole(0), "default": 1, "help": "another one, another text"}),
    ("sample complete", "--context", {"type": whole(1), "default": 1024, "help": CONTEXT}),
    ("complete compress decompress", "file", {"type": Path, "metavar": "FILE"}),
    ("compress decompress", "-o --output", {"type": Path, "help": "(default: FILE.bg, or FILE without .bg)"}),
]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.referee", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, words) in COMMANDS.items():
        one = commands.add_parser(name, help=words, description=words)
        about_record = "a record's folder, or a run's, or hub:user/name[@commit]"
        one.add_argument("record", type=Path, metavar="RECORD", help=about_record)
        for owners, option, about in OPTIONS:
            if name in (owners or name).split():
                one.add_argument(*option.split(), **about)
    return parser.parse_args(argv)


def fetch(args: argparse.Namespace) -> None:
    """Put the folder and the track of a record from the hub in the place of its address."""
    from records.archive.hub import fetch_record  # which loads the hub's client

    found = fetch_record(str(args.record), args.data, args.track)
    print(f"{found.address}, of {found.track.name}", file=sys.stderr)
    args.record = found.path
    args.track = found.track


def work(args: argparse.Namespace) -> int:
    if is_address(args.record):
        fetch(args)
    if is_own(args.record) and not (args.trust or bubblewrap.find()):
        print(f"{args.record}: is your own run and runs without a sandbox: none works here", file=sys.stderr)
        args.trust = True
    same = ("track", "dataset", "artifact", "data", "trust", "second")
    options = {name: value for name, value in vars(args).items() if name in same}
    alone = args.command in ("sample", "complete")
    device = args.device or ("cpu" if alone else None)
    job = find_job(args.record, device=device, alone=alone, **options)
    try:
        return COMMANDS[args.command][0](job, args)
    except (SandboxError, NoSandbox) as error:
        raise DataError(str(error)) from None


def main(argv: list[str] | None = None) -> int:
    return command.main(parse_args, work, "run the command again", argv)


if __name__ == "__main__":
    sys.exit(main())
