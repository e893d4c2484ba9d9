"""Records and their referee: use a model, compare runs, send a record, check it, show the board.

    python -m records sample logs/first --prompt "def "                let a model of yours write
    python -m records verify records/track_floppy/2026-11-22_Par       check a record
    python -m records board --html site                                the board as pages

python -m records COMMAND --help explains a command. Exit codes: 0 done and all is well, 1 a check failed, 2 a
wrong argument, 3 bad data (the last line says which, and what mends it), 16 stopped and can go on, 130
Ctrl-C, 141 the output was closed.
"""

import sys

if not __package__:  # it was started by its path
    sys.exit(f"error: cd {__file__.rpartition('/records/')[0]} and give python -m records")
from data.door import Door

COMMANDS = {
    "sample": ("records.referee.commands:sample", "let the model of a run or a record write text"),
    "complete": ("records.referee.commands:complete", "let it go on where a text file ends"),
    "compress": ("records.referee.commands:compress", "compress a text file by its probabilities"),
    "decompress": ("records.referee.commands:decompress", "give the text back"),
    "score": ("records.referee.commands:score", "bits per byte, by the referee's own count"),
    "prove": ("records.referee.commands:prove", "the same by compressing and decompressing the text"),
    "compare": ("records.compare.command:main", "what differs between runs, and what of it is noise"),
    "follow": ("records.follow.command:main", "show runs in TensorBoard, while they live or after"),
    "sweep": ("records.campaign.command:main", "compare ideas by many runs, here or on a Ray cluster"),
    "freeze": ("records.verify.commands:freeze", "make a record's folder from the runs of its seeds"),
    "verify": ("records.verify.commands:verify", "check what a record says of itself"),
    "judge": ("records.verify.commands:judge", "train a record's script with fresh seeds, and rank it"),
    "publish": ("records.board.publishing:publish", "put a record on the Hugging Face hub"),
    "board": ("records.board.commands:board", "write the board's tables and pictures, or a site of pages"),
    "track": ("records.referee.track:main", "begin a track, measure well-known compressors"),
}


def main(argv: list[str] | None = None) -> int:
    return Door("records", COMMANDS, __doc__).obey(argv)


if __name__ == "__main__":
    sys.exit(main())
