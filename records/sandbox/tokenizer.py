"""A tokenizer that a record brings: a stranger's file, parsed in a sandbox and never by the referee.

Each question goes to a sandbox of its own. So the one that turns tokens back into text has not seen the text:
what comes back was in the tokens and the tokenizer.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from records.sandbox.inside import pieces
from records.sandbox.limits import Limits
from records.sandbox.predictor import Mode, SandboxError, memory_file, watched

SECONDS = 600.0  # for one question
MEMORY, MEMORY_FACTOR = 1 << 30, 40  # bytes for one question, and bytes more for each of its own
MOST_ANSWER = 16  # times as large as the question
IMPORTS = ("numpy", "sentencepiece")


class ForeignTokenizer:
    """As much of SentencePiece as the referee needs. All methods raise NoSandbox and SandboxError."""

    def __init__(self, path: Path, trust: bool = False):
        self.path = path
        self.mode = Mode(trust=trust)

    def ask(self, *question: Any) -> Any:
        """The answer of a fresh sandbox. It is what its prisoner wants it to be."""
        words = json.dumps(question).encode()
        most = MOST_ANSWER * (len(words) + self.path.stat().st_size)
        memory_bytes = MEMORY + MEMORY_FACTOR * len(words)
        limits = Limits(memory_bytes, processor=SECONDS, seconds=SECONDS, files=most)
        with tempfile.TemporaryDirectory(prefix="bytegolf-tokenizer-") as stage, memory_file() as memory:
            shutil.copyfile(self.path, f"{stage}/tokenizer.model")
            shutil.copyfile(pieces.__file__, f"{stage}/pieces.py")
            Path(stage, "question.json").write_bytes(words)
            for path in (Path(stage), *Path(stage).iterdir()):
                path.chmod(0o755)  # another user reads it
            inside = stage if self.mode.trust else "/record"
            self.run(inside, [(Path(stage), inside, False)], limits, memory.fileno())
            size = os.fstat(memory.fileno()).st_size
            if size > most:
                raise SandboxError("tokenizer", f"tokenizer.model gave {size} bytes, expected at most {most}")
            return parse(os.pread(memory.fileno(), size, 0))

    def run(self, inside: str, binds: list, limits: Limits, memory: int) -> None:
        """Run the program that answers. Raises SandboxError where it ends otherwise than well."""
        python = [os.path.abspath(sys.executable), "-I", "-B", f"{inside}/pieces.py", inside, str(memory)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with watched(python, binds, IMPORTS, self.mode, limits, (memory,), **pipes) as watchdog:
            code = watchdog.process.wait()
            if code:
                watchdog.stopped.wait(0.3)  # let the watchdog see why
        watchdog.check_machine()
        if watchdog.verdict:
            raise SandboxError(watchdog.verdict[0], f"the record's tokenizer {watchdog.verdict[1]}")
        if code:
            said = watchdog.tail.decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxError("tokenizer", f"tokenizer.model cannot be used (exit status {code}) {said}")

    @functools.cached_property
    def facts(self) -> dict:
        found = self.ask("facts")
        try:
            good = type(found["bos"]) is int
            good = good and all(is_text(piece) and kind in KINDS for piece, kind in found["pieces"])
        except (KeyError, TypeError, ValueError):
            good = False
        return found if good else wrong("facts")

    def bos_id(self) -> int:
        return self.facts["bos"]

    def vocab_size(self) -> int:
        return len(self.facts["pieces"])

    def is_control(self, token: int) -> bool:
        return self.facts["pieces"][token][1] == pieces.CONTROL

    def is_byte(self, token: int) -> bool:
        return self.facts["pieces"][token][1] == pieces.BYTE

    def id_to_piece(self, token: int) -> str:
        return self.facts["pieces"][token][0]

    def encode(self, texts: str | list[str]) -> list:
        """Ids of a text, or a list of ids for each of several."""
        several = [texts] if isinstance(texts, str) else texts
        found = self.ask("encode", several)
        size = self.vocab_size()
        good = type(found) is list and len(found) == len(several)
        good = good and all(type(row) is list for row in found)
        if not (good and all(type(i) is int and 0 <= i < size for row in found for i in row)):
            wrong("ids")
        return found[0] if isinstance(texts, str) else found

    def decode(self, rows: list) -> str | list[str]:
        """The text of ids, or of several lists of them."""
        several = rows if rows and isinstance(rows[0], list) else [rows]
        found = self.ask("decode", several)
        if type(found) is not list or len(found) != len(several) or not all(map(is_text, found)):
            wrong("texts")
        return found if several is rows else found[0]


KINDS = (pieces.CONTROL, pieces.BYTE, pieces.TEXT)


def wrong(what: str) -> None:
    raise SandboxError("tokenizer", f"tokenizer.model gave no {what} of the expected form")


def is_text(value: Any) -> bool:
    """Whether a stranger's value is a text that has bytes: JSON knows half characters too."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def parse(answer: bytes) -> Any:
    """JSON, a list or an object. Raises SandboxError."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, (list, dict)) else wrong("answer")
