"""What the models of records write, kept for the pages: records/<track>/excerpts.json.

    python -m records.excerpts records/track_floppy/2026-11-22_Par

A sample is what `records.referee sample` prints with the settings below; it takes a minute or less.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from data import command
from data.command import REPO, DataError, Parser, say, shell
from data.files import read_json, write_whole
from records.archive.tracks import DATA, load_track
from records.archive.verdicts import folder_sha256
from records.board.excerpts import FILE

PROMPT = 'def read_file(path):\n    """'  # how the text begins
TOKENS, TEMPERATURE, SEED = 300, 0.8, 1


def make_excerpt(record: Path, options: list[str]) -> dict:
    """Raises DataError with the referee's words."""
    given = {"--prompt": PROMPT, "--tokens": TOKENS, "--temperature": TEMPERATURE, "--seed": SEED}
    words = ["records.referee", "sample", str(record), *(str(one) for pair in given.items() for one in pair)]
    called = [sys.executable, "-m", *words, *options]
    done = subprocess.run(
        called, cwd=REPO, capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        raise DataError(f"{record}: no sample: {done.stderr.strip()[-300:]}")
    shown = f"records/{record.parent.name}/{record.name}"
    words[2] = shown
    return {
        "sha256": folder_sha256(record),
        "command": shell("python", "-m", *words),
        "prompt": PROMPT,
        "temperature": TEMPERATURE,
        "text": done.stdout.removesuffix("\n"),
    }


def work(args: argparse.Namespace) -> int:
    for record in args.records:
        record = record.resolve()
        track = load_track(record.parent)
        options = ["--data", str(args.data.absolute()), *(["--trust"] if args.trust else [])]
        if args.artifact:
            options += ["--artifact", str(args.artifact.absolute())]
        made = make_excerpt(record, options)
        path = track.folder / FILE
        kept = read_json(path) if path.exists() else {}
        kept[record.name] = made
        value = dict(sorted(kept.items()))
        write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())
        say(f"{path}: has a sample of {record.name}; python -m records.board --html DIR shows it")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.excerpts", description=__doc__)
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="a record's folder")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
    about = "of the record, where its folder holds none"
    parser.add_argument("--artifact", type=Path, help=about)
    parser.add_argument("--trust", action="store_true", help="run the record without a sandbox")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return command.main(parse_args, work, "make the sample again", argv)


if __name__ == "__main__":
    sys.exit(main())
