"""What the files that a sandbox shows are worth to the memory of a record, beyond the bytes that it pays for.

    python -m tests.priming records/track_floppy/2026-11-26_Rung12-OwnValue

A sandbox of a score has the Python installation: some sources, and bytecode. A text of Python sources is
scored, so a script could feed both to its memory before the first token. This feeds them, tokenized, and
scores the first part of the validation text with and without. A script would need bytes for this, and a new
byte costs 8 bits over the text's bytes; the price of a short reader stands beside the gain.
"""

import dis
import importlib.util
import marshal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

import click
import numpy as np

from records.archive.tracks import DATA, load_track
from records.referee.coder import LN2, Charge, code, stream_starts
from records.referee.text import Tokenizer, load_tokenizer, validation_text
from records.sandbox.installation import Files, installation

PART = 0.12  # of the text; of the whole, a memory that is its own teacher gains less by what it was fed
SLOTS = (
    1 << 23
)  # contexts of one length that the memory keeps: four times the record's, so that all have room
PYC_HEADER = 16  # bytes before the marshalled code (PEP 552)
READERS = {
    "sources": """for f in Path('/').rglob('*.py'):e(f.read_text())""",
    "bytecode": """def r(c):
 for i in dis.get_instructions(c):
  if type(i.argval)!=type(c):s.append(str(i.argval))
 for k in c.co_consts:
  if type(k)==type(c):r(k)
for f in Path('/').rglob('*.pyc'):s=[];r(marshal.loads(f.read_bytes()[16:]));e(' '.join(s))""",
}


def words(code: CodeType) -> Iterator[str]:
    """The names and constants of a module in the order of its instructions, functions after their module."""
    for instruction in dis.get_instructions(code):
        if instruction.argval is not None and not isinstance(instruction.argval, CodeType):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from words(constant)


def shown(files: Files) -> dict[str, list[str]]:
    """The texts that a script can read in a sandbox, by the way to read them."""
    found: dict[str, list[str]] = {"sources": [], "bytecode": []}
    for place, path in files.items():
        if not isinstance(path, Path):
            continue
        if place.endswith(".py"):
            found["sources"].append(path.read_text(errors="replace"))
        if place.endswith(".pyc"):
            loaded = marshal.loads(path.read_bytes()[PYC_HEADER:])
            found["bytecode"].append(" ".join(words(loaded)))
    return found


def tokens_of(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """uint16[n]: each text behind a BOS."""
    rows = tokenizer.encode(texts)
    return np.array([i for row in rows for i in (tokenizer.bos_id(), *row)], np.uint16)


def load_script(record: Path) -> ModuleType:
    """The record's script as a module, not run as a program."""
    spec = importlib.util.spec_from_file_location("script", record / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["script"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def score(script: ModuleType, artifact: Path, fed: np.ndarray, tokens: np.ndarray) -> float:
    """Bits of the tokens by the artifact's predictor, whose memory is fed others before its own text."""
    predictor = script.load_predictor(artifact)
    predictor.text = np.concatenate((fed, predictor.text))
    charge = Charge(tokens)
    code(predictor, stream_starts(len(tokens), predictor.rows), int(tokens[0]), charge)
    return float(charge.nats.sum()) / LN2


@click.command(help=__doc__)
@click.argument("record", type=click.Path(path_type=Path))
def main(record: Path) -> None:
    track = load_track(record.parent).using("demo_sp1024")
    tokenizer = load_tokenizer(DATA / "tokenizers" / track.dataset["tokenizer"])
    text = validation_text(track, DATA)
    tokens = text.tokens[: int(PART * len(text.tokens))]
    size = len(tokenizer.decode(tokens.tolist()).encode())
    script = load_script(record)
    script.Memory.slots = SLOTS
    artifact = min(record.glob("model_seed*"))
    texts = shown(installation(tuple(track["imports"]), "cpu"))
    before = score(script, artifact, np.zeros(0, np.uint16), tokens)
    print(f"nothing: {before / size:.5f} bits per byte of {size:,} bytes", flush=True)
    for way, found in texts.items():
        fed = tokens_of(tokenizer, found)
        gain = (before - score(script, artifact, fed, tokens)) / size
        price = 8 * len(zlib.compress(READERS[way].encode(), 9)) / text.bytes
        print(f"{way}: {len(fed):,} tokens, gain {gain:+.5f}, price {price:.5f}", flush=True)


if __name__ == "__main__":
    main()
