"""Where documents come from: text files of several formats, and the sources that are the demo corpus."""

import gzip
import importlib.metadata
import itertools
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data.command import REPO, DataError, UsageError, say, shell

Document = tuple[str, bytes]  # a name for people ("book.txt", "a.jsonl:17") and UTF-8 text

# --- files: which are read, which are left out -----------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Files to read and how. `field` is for jsonl and parquet, `separator` (a line) for txt."""

    paths: tuple[Path, ...]
    field: str = "text"
    separator: str | None = None

    def state(self) -> list:
        """What changes when a file, or how it is read, changes."""
        files = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in self.paths]
        return [files, self.field, self.separator]

    def documents(self) -> Iterator[Document]:
        for path in self.paths:
            read = READERS[suffix(path)]
            try:
                yield from read(path, self)
            except (OSError, EOFError, zlib.error) as error:  # a broken gzip file gives any of the three
                raise DataError(f"{path}: cannot be read: {error}") from error


def find_files(paths: list[Path]) -> tuple[Path, ...]:
    """The text files that `paths` name or hold, sorted. Raises DataError, UsageError."""
    found = set()
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: does not exist, expected a text file or a folder of them")
        inside = text_files(path) if path.is_dir() else [path]
        if not inside or not all(map(suffix, inside)):
            raise UsageError(f"{path}: expected {', '.join(READERS)} or a folder with such files")
        found.update(inside)
    return tuple(sorted(found))


def suffix(path: Path) -> str | None:
    return next((s for s in READERS if path.name.lower().endswith(s)), None)


def text_files(folder: Path) -> list[Path]:
    """The text files below a folder; says what else is there. Raises DataError where one cannot be read."""
    found = []
    others = Counter()
    for path in walk(folder):
        if not suffix(path):
            others[path.suffix or "without a suffix"] += 1
        elif not path.is_file():
            raise DataError(f"{path}: a dangling link or no regular file, expected text: remove or mend it")
        else:
            found.append(path)
    if others:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(others.items()))
        say(f"left out in {folder}: {kinds}; read are {', '.join(READERS)}")
    return found


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder; says which links to folders it leaves out. Raises DataError."""

    def refuse(error: OSError):
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}), expected a folder") from error

    for here, folders, names in os.walk(folder, onerror=refuse):
        for path in (Path(here, name) for name in folders):
            if path.is_symlink():
                say(f"left out: {path}, a link to a folder; to read it, name it as a PATH of its own")
        yield from (Path(here, name) for name in names)


# --- readers: text files, JSON lines, parquet ------------------------------------------------------------

MAX_DOCUMENT = 16 << 20  # bytes; SentencePiece needs about 30 times as much memory
MAX_LINE = 8 * MAX_DOCUMENT  # of JSON, where one byte of text can take six


def read_txt(path: Path, source: Source) -> Iterator[Document]:
    """One document a file, or what stands between separator lines."""
    with open(path, "rb") as file:
        if source.separator is None:
            yield str(path), checked(file.read(MAX_DOCUMENT + 1), str(path), 0)
        else:
            yield from read_separated(file, path, source.separator.encode())


def read_separated(file: BinaryIO, path: Path, separator: bytes) -> Iterator[Document]:
    """What stands between the lines of a file that are `separator`."""
    document = []  # its lines so far
    first = 1  # number of its first line
    start = size = 0  # its first byte, its bytes so far
    lines = iter(lambda: file.readline(MAX_DOCUMENT + 1), b"")
    for number, line in enumerate(itertools.chain(lines, [separator]), 1):
        if line.rstrip(b"\r\n") == separator:
            yield f"{path}:{first}", checked(b"".join(document), str(path), start)
            document = []
            first = number + 1
            start += size + len(line)
            size = 0
            continue
        document.append(line)
        size += len(line)
        if size > MAX_DOCUMENT:
            raise too_large(f"{path}:{first}")


def read_jsonl(path: Path, source: Source) -> Iterator[Document]:
    """One document a line, the string in `field`; null counts as empty. Blank lines are passed over."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rb") as file:
        start = 0
        for number in itertools.count(1):
            line = file.readline(MAX_LINE + 1)
            where = f"{path}:{number}"
            if not line:
                return
            if len(line) > MAX_LINE:
                raise too_large(where)
            if line.strip():
                yield where, field_text(parse_json(line, where, start), source.field, where)
            start += len(line)


def parse_json(line: bytes, where: str, start: int) -> dict:
    """The object on a line of JSON."""
    try:
        row = json.loads(checked(line, where, start, MAX_LINE))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no JSON ({error}), expected one object a line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds a {type(row).__name__}, expected a JSON object")
    return row


def field_text(row: dict, field: str, where: str) -> bytes:
    """UTF-8 of a row's text."""
    if field not in row:
        raise DataError(f"{where}: no field {field!r} among {sorted(row)}; --field NAME chooses another")
    text = row[field]
    if isinstance(text, bytes):
        return checked(text, where, 0)
    if not isinstance(text, str | None):
        raise DataError(f"{where}: field {field!r} holds a {type(text).__name__}, expected a string")
    try:
        raw = (text or "").encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: half a surrogate pair at character {error.start}, expected Unicode text "
            "that UTF-8 can hold"
        ) from error
    if len(raw) > MAX_DOCUMENT:
        raise too_large(where)
    return raw


def read_parquet(path: Path, source: Source) -> Iterator[Document]:
    """One document a row, the string in column `field`; null counts as empty.

    Without a buffer size pyarrow would hold a whole column of a row group: all of the file, as some are made.
    """
    import pyarrow  # 0.2 s that other formats need not pay
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            if source.field not in names:
                raise DataError(
                    f"{path}: no column {source.field!r} among {names}; --field NAME chooses another"
                )
            batches = file.iter_batches(64, columns=[source.field])
            texts = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            for number, text in enumerate(texts, 1):
                where = f"{path}:{number}"
                yield where, field_text({source.field: text}, source.field, where)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no parquet file of text ({error})") from error


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".jsonl.gz": read_jsonl, ".parquet": read_parquet}


def checked(text: bytes, where: str, start: int, limit: int = MAX_DOCUMENT) -> bytes:
    """`text`, which begins at byte `start` of its file, if it is UTF-8 and not too large."""
    if len(text) > limit:
        raise too_large(where)
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {start + error.start} is {text[error.start]:#04x}, expected UTF-8 "
            f"({error.reason}); iconv -t UTF-8 converts other encodings"
        ) from error
    return text


def too_large(where: str) -> DataError:
    return DataError(
        f"{where}: a document of more than {MAX_DOCUMENT:,} bytes, expected less; in .txt files "
        "--separator LINE splits it (--separator '' at empty lines)"
    )


# --- the demo corpus: sources of the pinned packages -----------------------------------------------------

DEMO_PACKAGES = [
    "sympy",
    "networkx",
    "mpmath",
    "Jinja2",
    "fsspec",
    "filelock",
    "huggingface_hub",
    "anyio",
    "click",
    "packaging",
    "idna",
    "httpx2",
    "httpcore2",
    "h11",
    "tqdm",
]
DEMO_SHA256 = "71cb47296fc2e2a3251d45f4feeb834cfbee06084025c421a6b297bf7298a28b"
# Packages that torch imports, so every record sees their modules; and the folders that nobody imports from.
# What a record can see is text to train on.
IMPORTED = ["filelock", "fsspec", "jinja2", "mpmath", "networkx", "packaging", "sympy", "tqdm"]
NOT_IMPORTED = ["tests", "benchmarks", "testing"]
TRAIN_NAMES = f"({'|'.join(IMPORTED)})/(?!(.*/)?({'|'.join(NOT_IMPORTED)})/)"


def demo_sources() -> Iterator[Document]:
    """The .py files of the pinned packages; whoever takes them compares the sha256 of them all.

    All of them are UTF-8, none holds NUL or U+2581, which a SentencePiece model cannot give back.
    """
    requirements = (REPO / "requirements.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", requirements, re.MULTILINE))
    for package in DEMO_PACKAGES:
        mend = shell("pip", "install", "--force-reinstall", "--no-deps", f"{package}=={pins[package]}")
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise DataError(f"{package}: not installed, expected version {pins[package]}: {mend}") from error
        if distribution.version != pins[package]:
            raise DataError(
                f"{package}: version {distribution.version} is installed, expected {pins[package]}: {mend}"
            )
        for file in distribution.files or ():
            # in the package's own folder: installers write elsewhere, as into ../../bin, and bytecode
            if file.suffix == ".py" and len(file.parts) > 1 and file.parts[0] != ".." and file.hash:
                try:
                    yield str(file), Path(file.locate()).read_bytes()
                except OSError as error:
                    raise DataError(f"{file}: cannot be read ({error.strerror}): {mend}") from error
