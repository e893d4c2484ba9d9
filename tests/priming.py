"""What the files that a sandbox shows are worth to the memory of a record, beyond the bytes that it pays for.

    python -m tests.priming records/track_floppy/2026-11-26_Rung12-OwnValue names bytecode --slots 8388608

A sandbox of a score has the Python installation: some sources, and bytecode. A text of Python sources is
scored, so a script could feed both to its memory before the first token. This lets a short reader look for
them, feeds what it finds, tokenized, and scores the first part of the validation text with and without. A
script would need the reader's bytes, and a new byte costs 8 bits over the text's bytes: that is the price.
`originals` are what the best of decompilers would make of all the bytecode.
"""

import ast
import dis
import importlib.util
import marshal
import sys
import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import click
import numpy as np

from records.archive.tracks import DATA, load_track
from records.referee.coder import LN2, Charge, code, stream_starts
from records.referee.text import Tokenizer, load_tokenizer, validation_text
from records.sandbox.installation import DOCUMENTED, Files, installation

READERS = {
    "sources": """for f in Path('/').rglob('*.py'):e(f.read_text())""",
    "names": """def r(c):
 s.extend(map(str,c.co_names+c.co_varnames))
 for k in c.co_consts:r(k)if type(k)==type(c)else s.append(str(k))
for f in Path('/').rglob('*.pyc'):s=[];r(marshal.loads(f.read_bytes()[16:]));e(' '.join(s))""",
    "bytecode": """def r(c):
 for i in dis.get_instructions(c):
  if i.argval!=None and type(i.argval)!=type(c):s.append(str(i.argval))
 for k in c.co_consts:
  if type(k)==type(c):r(k)
for f in Path('/').rglob('*.pyc'):s=[];r(marshal.loads(f.read_bytes()[16:]));e(' '.join(s))""",
    "originals": "",
}


def original(path: Path) -> str:
    """A source without what its bytecode lacks: comments, docstrings, and how lines are broken."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # of another Python
        return ""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body[:1] = [] if len(node.body) > 1 else [ast.Pass()]
    return ast.unparse(tree)


def read(files: Files, reader: str) -> list[str]:
    """The texts that a reader finds in a sandbox."""
    if reader == "originals":
        sys.setrecursionlimit(1 << 14)  # of a long sum
        modules = [place for place, source in files.items() if source == b"" and place.endswith(".py")]
        return [original(Path(place)) for place in modules]
    found: list[str] = []
    paths = [(place, source) for place, source in files.items() if isinstance(source, Path)]
    root = SimpleNamespace(rglob=lambda name: [path for place, path in paths if place.endswith(name[1:])])
    exec(READERS[reader], {"Path": lambda _: root, "e": found.append, "dis": dis, "marshal": marshal})
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
@click.argument("record", type=Path)
@click.argument("readers", type=click.Choice([*READERS]), nargs=-1)
@click.option("--slots", type=int, default=1 << 21, help="contexts of one length in the memory")
@click.option("--part", type=float, default=0.12, help="of the text, from its start")
def main(record: Path, readers: tuple[str, ...], slots: int, part: float) -> None:
    track = load_track(record.parent).using("demo_sp1024")
    tokenizer = load_tokenizer(DATA / "tokenizers" / track.dataset["tokenizer"])
    text = validation_text(track, DATA)
    tokens = text.tokens[: int(part * len(text.tokens))]
    size = len(tokenizer.decode(tokens.tolist()).encode())
    script = load_script(record)
    script.Memory.slots = slots
    artifact = min(record.glob("model_seed*"))
    files = installation(tuple(track["imports"]), "cpu", scores=True)
    before = score(script, artifact, np.zeros(0, np.uint16), tokens)
    print(f"nothing: {before / size:.5f} bits per byte of {size:,} bytes", flush=True)
    for reader in readers:
        fed = tokens_of(tokenizer, read(files, reader))
        gain = (before - score(script, artifact, fed, tokens)) / size
        price = 8 * len(zlib.compress(READERS[reader].encode(), 9)) / text.bytes
        print(f"{reader}: {len(fed):,} tokens, gain {gain:+.5f}, price {price:.5f}", flush=True)


if __name__ == "__main__":
    main()
