"""Where documents come from: text files of several formats."""

import bz2
import dataclasses
import gzip
import io
import itertools
import json
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data.command import DataError, UsageError, nearest, say, shell, some, warn_once
from data.corpus import MAX_DOCUMENT, Read

Reader = Callable[[Path, "Source"], Iterator[Read]]

# --- files: which are read, which are left out -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
    """Files to read and how. `field` is for JSON and parquet, "" to find it; `separator` for plain text.

    `origin`: hub:owner/name@commit of files that are on the hub, which `bring` fetches.
    """

    paths: tuple[Path, ...]
    field: str = ""
    separator: str | None = None
    origin: str = ""
    bring: Callable[[Path], Path] = Path
    unseparated: list[str] = dataclasses.field(default_factory=list)  # files that lack the separator
    nearly: list[str] = dataclasses.field(default_factory=list)  # the first line that is nearly it

    @property
    def few(self) -> bool:
        """Whether files of plain text are cut: as whole documents, two would be much of the text."""
        return len(self.paths) < FEW

    @property
    def more(self) -> str:
        """What is left to do for more documents."""
        plain = any((reader(path) or read_text) is read_text for path in self.paths)
        if not plain or (self.separator is None and self.few):
            return "give more text"
        if self.separator is None:
            return "give more text, or --separator LINE to cut each file ('' at empty lines)"
        few = "; without --separator a few files are cut" if self.few else ""
        return f"give more text, or another --separator than {self.separator!r}{few}"

    def state(self) -> list:
        """What changes when a file, or how it is read, changes."""
        files = [str(path) for path in self.paths]
        if not self.origin:
            stats = [path.stat() for path in self.paths]
            files = [[str(path.resolve()), s.st_size, s.st_mtime_ns] for path, s in zip(self.paths, stats)]
        return [self.origin, files, self.field, self.separator]

    def documents(self) -> Iterator[Read]:
        """All documents. Warns where the separator is missing, or nearly there."""
        for path in self.paths:
            here = self.bring(path)
            try:
                yield from (reader(path) or read_text)(here, self)
            except (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError) as error:
                yield str(here), DataError(f"{here}: cannot be read: {error}")
            except DataError as error:
                yield str(here), error
        separator = f"--separator {self.separator!r}"
        if self.unseparated:
            count = f"{len(self.unseparated)} of {len(self.paths)}"
            what = f"expected as a line of every file, is missing from {count}"
            warn_once(f"{separator}, {what}; one document each: {some(self.unseparated)}")
        if self.nearly:
            mend = "remove the white space at its ends, and at those of other such lines"
            warn_once(f"{self.nearly[0]}, which is no {separator}: {mend}")


def find_files(paths: list[Path]) -> tuple[Path, ...]:
    """The files that `paths` name, and the text files in folders, sorted. Raises DataError, UsageError."""
    found = set()
    for path in paths:
        if not path.exists():
            what = "does not exist, expected a text file or a folder of them"
            raise UsageError(f"{path}: {what}{nearest(path)}")
        inside = text_files(path) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"{path}: holds no files of text, expected {FORMATS}; {OTHERS}")
        found.update(inside)
    return tuple(sorted(found))


def reader(path: Path) -> Reader | None:
    """What reads a file: by the end of its name, that of a compression apart. None: nothing does."""
    compressed = path.suffix.lower() in COMPRESSIONS
    found = READERS.get((path.with_suffix("") if compressed else path).suffix.lower())
    return None if compressed and found is read_parquet else found


def opened(path: Path) -> BinaryIO:
    return COMPRESSIONS.get(path.suffix.lower(), open)(path, "rb")


def open_zst(path: Path, mode: str) -> BinaryIO:
    """zstandard's own reader takes a file that was cut off for a whole one; pyarrow's does not."""
    import pyarrow  # 0.2 s that other formats need not pay

    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"), 1 << 16)


def text_files(folder: Path) -> list[Path]:
    """The text files below a folder; says what else is there. Raises DataError where one cannot be read."""
    found = []
    others = Counter()
    for place, folders, names in os.walk(folder, onerror=refuse):
        paths = sorted(Path(place, name) for name in [*names, *folders])
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in paths:
            if path.name.startswith("."):
                others["hidden"] += 1
            elif path.is_symlink() and not path.is_file():
                others["links that lead to no file"] += 1
            elif path.is_file() and reader(path):
                found.append(path)
            elif not path.is_dir():
                others[path.suffix or "without a suffix"] += 1
    if others:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(others.items()))
        say(f"left out in {folder}: {kinds}; read are {FORMATS}; {OTHERS}")
    return found


def refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror}), expected a folder") from error


# --- readers: plain text, JSON, parquet ------------------------------------------------------------------

MAX_LINE = 8 * MAX_DOCUMENT  # of JSON, where one byte of text can take six
FEW = 10  # files of plain text are cut if they are fewer
PIECE = 2 << 10  # bytes at least of a document cut from a large file; at most four times as many


def read_text(path: Path, source: Source) -> Iterator[Read]:
    """What stands between separator lines, or the pieces of a file that is one of few, or the file."""
    with opened(path) as file:
        if source.separator is not None:
            yield from read_separated(file, path, source)
        elif source.few:
            yield from read_pieces(file, path, len(source.paths))
        else:
            yield str(path), checked(file.read(MAX_DOCUMENT + 1), str(path))


def read_separated(file: BinaryIO, path: Path, source: Source) -> Iterator[Read]:
    """What stands between the lines of a file that are the separator."""
    separator = source.separator.encode()
    document = []  # its lines, or as many as make it too large
    first = 1  # number of its first line
    size = 0
    found = 0
    lines = iter(lambda: file.readline(MAX_DOCUMENT + 1), b"")
    for number, line in enumerate(itertools.chain(lines, [separator]), 1):
        if line.rstrip(b"\r\n") != separator:
            if size <= MAX_DOCUMENT:
                document.append(line)
            size += len(line)
            if not source.nearly and line.strip() == separator.strip():
                shown = line.decode(errors="replace").removesuffix("\n")
                source.nearly.append(f"{path}:{number} is {shown!r}")
            continue
        yield f"{path}:{first}", checked(b"".join(document), f"{path}:{first}")
        document = []
        first = number + 1
        size = 0
        found += 1
    if found == 1 < number:
        source.unseparated.append(str(path))


def read_pieces(file: BinaryIO, path: Path, files: int) -> Iterator[Read]:
    """All of a file in pieces: each ends at an empty line, else a line's end, else a space (`piece_end`)."""
    first = 1  # number of its first line
    rest = file.read(1 << 16)
    least = min(PIECE, max(64, files * len(rest) // 32))  # shorter in a small text, if its files are alike
    while rest:
        if len(rest) < 4 * least:
            rest += file.read(1 << 16)
        end = piece_end(rest, least)
        yield f"{path}:{first}", checked(rest[:end], f"{path}:{first}")
        first += rest.count(b"\n", 0, end)
        rest = rest[end:]


def piece_end(text: bytes, least: int) -> int:
    """Where the first piece of a text ends: between `least` bytes and four times as many."""
    most = 4 * least
    for mark in (b"\n\n", b"\n\r\n", b"\n", b" "):
        at = text.find(mark, least, most)
        if at >= 0:
            return at + len(mark)
    while 0 < most < len(text) and text[most] & 0xC0 == 0x80:  # within a character
        most -= 1
    return most or len(text)


def read_jsonl(path: Path, source: Source) -> Iterator[Read]:
    """One document a line: a string, or an object's field. Blank lines are passed over."""
    with opened(path) as file:
        yield from texts_of(line_rows(file, path), source.field)


def read_json(path: Path, source: Source) -> Iterator[Read]:
    """One document a value of an array; else JSON lines."""
    with opened(path) as file:
        array = file.peek(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        rows = array_rows(file, path) if array else line_rows(file, path)
        yield from texts_of(rows, source.field)


def line_rows(file: BinaryIO, path: Path) -> Iterator[tuple[str, Any]]:
    """Where each line stands, and its value or error."""
    lines = iter(lambda: file.readline(MAX_LINE + 1), b"")
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if len(line) > MAX_LINE:
            raise too_large(where)
        if line.strip():
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield where, DataError(f"{where}: no JSON ({error}), expected one object a line in UTF-8")


def array_rows(file: BinaryIO, path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSON array, which is read at once. Raises DataError."""
    text = file.read(MAX_LINE + 1)
    if len(text) > MAX_LINE:
        what = f"an array of more than {MAX_LINE:,} bytes, expected less, or JSON lines"
        raise DataError(f"{path}: {what}, which {shell('jq', '-c', '.[]', path)} prints")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no JSON ({error}), expected an array of documents") from error
    for number, value in enumerate(values, 1):
        yield f"{path}:{number}", value


def texts_of(rows: Iterable[tuple[str, Any]], field: str) -> Iterator[Read]:
    """The text of each row. Its column, where no field is named, is found in the first one."""
    for where, row in rows:
        if not field and isinstance(row, dict):
            strings = [name for name, value in row.items() if isinstance(value, str) or name == "text"]
            field = column_of(strings, where)
        yield where, row if isinstance(row, DataError) else field_text(row, field, where)


def column_of(strings: list[str], where: object) -> str:
    """The column that is the text: `text`, or else the only one of strings. Raises DataError."""
    if "text" in strings:
        return "text"
    if len(strings) != 1:
        what = "has no column that is clearly the text, expected 'text' or only one of strings"
        raise DataError(f"{where}: {what}, and has {', '.join(strings) or 'none'}; --field NAME chooses")
    say(f"{where}: the text is in the column {strings[0]!r}")
    return strings[0]


def field_text(row: Any, field: str, where: str) -> bytes | DataError:
    """UTF-8 of a row's text, or why there is none; null counts as empty."""
    if isinstance(row, str):
        row = {field: row}
    if not isinstance(row, dict):
        return DataError(f"{where}: holds a {type(row).__name__}, expected a JSON object or a string")
    if field not in row:
        return DataError(f"{where}: no field {field!r} among {sorted(row)}; --field NAME chooses another")
    text = "" if row[field] is None else row[field]
    if not isinstance(text, str | bytes):
        return DataError(f"{where}: field {field!r} holds a {type(text).__name__}, expected a string")
    try:
        return checked(text.encode() if isinstance(text, str) else text, where)
    except UnicodeEncodeError as error:
        return DataError(f"{where}: half a surrogate pair at character {error.start}, expected all of it")


def read_parquet(path: Path, source: Source) -> Iterator[Read]:
    """One document a row, the string in column `field`; null counts as empty.

    Without a buffer size pyarrow would hold a whole column of a row group: all of the file, as some are made.
    """
    import pyarrow  # 0.2 s that other formats need not pay
    import pyarrow.parquet

    kinds = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            schema = file.schema_arrow
            strings = [one.name for one in schema if one.type in kinds or one.name == "text"]
            field = source.field or column_of(strings, path)
            if field not in schema.names:
                there = ", ".join(schema.names)
                raise DataError(f"{path}: no column {field!r} among {there}; --field NAME chooses another")
            batches = file.iter_batches(64, columns=[field])
            texts = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            for number, text in enumerate(texts, 1):
                where = f"{path}:{number}"
                yield where, field_text({field: text}, field, where)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no parquet file of text ({error})") from error


COMPRESSIONS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zst}
TEXT = ".txt .text .md .markdown .rst .org .adoc .tex .html .htm .xml .srt"
PROGRAMS = ".py .pyi .c .h .cc .cpp .hpp .cu .cs .java .js .ts .go .rs .rb .php .swift .kt .sh .sql .r .jl"
JSON = {".json": read_json, ".jsonl": read_jsonl, ".ndjson": read_jsonl}
READERS = {**dict.fromkeys(f"{TEXT} {PROGRAMS}".split(), read_text), **JSON, ".parquet": read_parquet}
KINDS = (read_parquet, read_jsonl, read_json, read_text)  # the most likely to be a dataset's text first
FORMATS = (
    f"plain text ({', '.join(TEXT.split())}, programs) and {', '.join(JSON)}, all of them also with "
    f"{', '.join(COMPRESSIONS)}, and .parquet"
)
OTHERS = "a file that is named as a PATH of its own is read as plain text, whatever its suffix"


def checked(text: bytes, where: str) -> bytes | DataError:
    """`text`, a document, if it is UTF-8 and not too large."""
    if len(text) > MAX_DOCUMENT:
        return too_large(where)
    try:
        text.decode()
    except UnicodeDecodeError as error:
        other = "UTF-16" if text.startswith((b"\xff\xfe", b"\xfe\xff")) else "LATIN1"
        return DataError(
            f"{where}: byte {error.start} of the document is {text[error.start]:#04x}, expected UTF-8 "
            f"({error.reason}); iconv -f {other} -t UTF-8 FILE > NEW converts {other}"
        )
    return text


def too_large(where: str) -> DataError:
    mend = "split it into several, as --separator LINE does with plain text"
    return DataError(f"{where}: a document of more than {MAX_DOCUMENT:,} bytes, expected less: {mend}")
