"""From text to tokens: the tokenizer and the token shards that train_gpt.py reads.

    python -m data prepare demo                             the demo corpus; nothing is downloaded
    python -m data prepare text PATH... --name NAME         your own text
    python -m data prepare hub:OWNER/NAME                   a text from the Hugging Face hub
    python -m data download --variant sp1024                FineWeb from the Hugging Face hub

python -m data COMMAND --help explains a command. Exit codes: 0 done, 2 a wrong argument, 3 bad data (the last
line says which, and what mends it), 16 stopped and can go on, 130 Ctrl-C, 141 the output was closed.
"""

import sys

if not __package__:  # it was started by its path
    sys.exit(f"error: cd {__file__.rpartition('/data/')[0]} and give python -m data")
from data.door import Door

COMMANDS = {
    "prepare": ("data.prepare:main", "make tokenizer and shards of text: the demo's, your own, the hub's"),
    "download": ("data.download:main", "fetch published shards and their tokenizer"),
    "verify": ("data.check:verify", "check every byte of shards"),
    "inspect": ("data.check:inspect", "print the headers of shards"),
    "publish": ("data.publish:main", "put a dataset of your own on the Hugging Face hub"),
}


def main(argv: list[str] | None = None) -> int:
    return Door("data", COMMANDS, __doc__).obey(argv)


if __name__ == "__main__":
    sys.exit(main())
