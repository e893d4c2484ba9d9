"""How many bits per byte well-known compressors need for the validation text of a track.

python -m records.yardsticks records/track_floppy            measure and print them
python -m records.yardsticks records/track_floppy --write    and keep them for the board
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from data import command
from data.command import Parser, say, shown
from data.files import write_whole
from records.archive.tracks import DATA, YARDSTICKS, Yardstick, load_track
from records.referee.compressors import measure, training_text
from records.referee.text import validation_text


def work(args: argparse.Namespace) -> int:
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
    options = f"--dataset {track.dataset['name']} --write"
    value = {
        "written": f"by a program: python -m records.yardsticks {shown(track.folder)} {options}",
        "val_sha256": text.sha256,
        "val_bytes": text.bytes,
        "train_sha256": training and training.sha256,
        "train_bytes": training and training.bytes,
        "rows": rows,
    }
    write_whole(track.folder / YARDSTICKS, (json.dumps(value, indent=1) + "\n").encode())
    say(f"{track.folder / YARDSTICKS}: written; python -m records.board shows it")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.yardsticks", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("track", type=Path, metavar="TRACK_FOLDER", help="such as records/track_floppy")
    add("--dataset", help="one of the track's (default: its first)")
    add("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")
    add("--write", action="store_true", help=f"keep the rows in the track's {YARDSTICKS}")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return command.main(parse_args, work, "measure again", argv)


if __name__ == "__main__":
    sys.exit(main())
