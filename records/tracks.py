"""What a track's folder says of its text: hashes and sizes, and what well-known compressors need for it.

python -m records.tracks fill records/track_10min_16mb           write the nulls of its track.json
python -m records.tracks yardsticks records/track_floppy         measure compressors and print the rows
python -m records.tracks yardsticks records/track_floppy --write     and keep them for the board

`fill` reads all shards and tokenizers of the track that are here. What track.json says already stays as it
is, and must be what they say.
"""

import argparse
import copy
import json
import sys
from dataclasses import asdict
from pathlib import Path

from data import command
from data.command import DataError, Parser, say, shell
from data.files import write_whole
from records.archive.tracks import DATA, YARDSTICKS, Yardstick, load_track
from records.referee.compressors import measure, training_text
from records.referee.facts import read_facts
from records.referee.text import validation_text


def write_json(path: Path, value: dict) -> None:
    write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


# --- fill -------------------------------------------------------------------------------------------------


def put(place: dict, facts: dict, folder: Path) -> None:
    """Give nulls their values. Raises DataError where another value stands already."""
    for name, value in facts.items():
        if place[name] is None:
            place[name] = value
            say(f"{name}: {value}")
        elif place[name] != value:
            raise DataError(
                f"{folder}: {name} is {value}, the track's is {place[name]}: "
                "this is another text, or some of its shards are not here"
            )


def fill(args: argparse.Namespace) -> int:
    track = load_track(args.track)
    rules = copy.deepcopy(track.rules)
    dataset = rules["dataset"]
    read = 0
    for vocabulary in dataset["vocabularies"]:
        folder = args.data / "datasets" / vocabulary["name"]
        if not any(folder.glob("*.bin")):
            say(f"{vocabulary['name']}: left as it is, since {folder} holds no shards")
            continue
        say(f"{vocabulary['name']}: reading all shards of {folder}")
        of_text, of_tokens = read_facts(folder, args.data / "tokenizers" / vocabulary["tokenizer"])
        put(dataset, of_text, folder)
        put(vocabulary, of_tokens, folder)
        read += 1
    if not read:
        raise DataError(f"{args.data}: holds the shards of no dataset of the track; --data names the folder")
    path = track.folder / "track.json"
    if rules == track.rules:
        say(f"{path}: says all of this already")
    else:
        write_json(path, rules)
        say(f"{path}: written")
    return 0


# --- yardsticks -------------------------------------------------------------------------------------------


def yardsticks(args: argparse.Namespace) -> int:
    track = load_track(args.track).using(args.dataset)
    text = validation_text(track, args.data)
    training = training_text(track, args.data)
    rows = []
    for found in measure(b"".join(text.documents), b"".join(training.documents if training else [])):
        say(str(found))
        if isinstance(found, Yardstick):
            rows.append(asdict(found))
    if not args.write:
        return 0
    words = ["yardsticks", track.folder, "--dataset", track.dataset["name"], "--write"]
    value = {
        "written": f"by a program: {shell('python', '-m', 'records.tracks', *words)}",
        "val_sha256": text.sha256,
        "val_bytes": text.bytes,
        "train_sha256": training and training.sha256,
        "train_bytes": training and training.bytes,
        "rows": rows,
    }
    write_json(track.folder / YARDSTICKS, value)
    say(f"{track.folder / YARDSTICKS}: written; python -m records.board shows it")
    return 0


# --- command line -----------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.tracks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    filling = commands.add_parser(
        "fill", help="write the nulls of a track.json from the shards that are here"
    )
    measuring = commands.add_parser("yardsticks", help="measure what well-known compressors need")
    for each, does in ((filling, fill), (measuring, yardsticks)):
        each.set_defaults(work=does)
        each.add_argument("track", type=Path, metavar="TRACK_FOLDER", help="such as records/track_floppy")
        about = "folder with datasets/ and tokenizers/"
        each.add_argument("--data", type=Path, default=DATA, help=about)
    measuring.add_argument("--dataset", help="one of the track's (default: its first)")
    about = f"keep the rows in the track's {YARDSTICKS}"
    measuring.add_argument("--write", action="store_true", help=about)
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    return args.work(args)


def main(argv: list[str] | None = None) -> int:
    return command.main(parse_args, work, "run the same command again", argv)


if __name__ == "__main__":
    sys.exit(main())
