"""What well-known compressors need for a track's validation text, for reference on its board.

A text is its documents end to end. Every compressor packs the text alone. Some pack it once more for a reader
who has the training text. zstd takes that as a dictionary. For xz and PPMd it is the size of both texts end
to end, less the size of the training text. Whatever is packed is unpacked again and compared.
"""

import bz2
import lzma
import platform
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import brotli
import pyppmd
import zstandard

from data import shards
from data.command import DataError
from records.archive.checks import Check, skip
from records.archive.tracks import NOTHING, TRAINING, ReferenceCompressor, Track, tokenizer_path
from records.referee.text import Text, decode, load_tokenizer

MOST_BYTES = 64 << 20  # of training text: xz -9 looks back so far, no further

# --- compressors ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compressor:
    """A way to pack bytes, with the settings that a command line would have."""

    name: str
    version: str
    settings: str
    pack: Callable[[bytes], bytes]
    unpack: Callable[[bytes], bytes]


PYTHON = f"Python {platform.python_version()}"  # its bz2 and lzma do not name their libraries' versions
ZLIB = Compressor("zlib", zlib.ZLIB_RUNTIME_VERSION, "-9", partial(zlib.compress, level=9), zlib.decompress)
BZIP2 = Compressor("bzip2", PYTHON, "-9", bz2.compress, bz2.decompress)
XZ_PACK = partial(lzma.compress, preset=9 | lzma.PRESET_EXTREME)
XZ = Compressor("xz", PYTHON, "-9e", XZ_PACK, lzma.decompress)
BROTLI_PACK = partial(brotli.compress, quality=11, lgwin=24)
BROTLI = Compressor("brotli", brotli.__version__, "-q 11 --lgwin=24", BROTLI_PACK, brotli.decompress)


def zstd(before: bytes = b"") -> Compressor:
    """zstd; with `before` as its dictionary where there is one."""
    window = 27  # what --long means
    dictionary = zstandard.ZstdCompressionDict(before, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    given = {"dict_data": dictionary} if before else {}

    def pack(text: bytes) -> bytes:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            22, source_size=len(text), dict_size=len(before), window_log=window, enable_ldm=True
        )
        return zstandard.ZstdCompressor(compression_params=parameters, **given).compress(text)

    unpack = zstandard.ZstdDecompressor(max_window_size=1 << window, **given).decompress
    version = ".".join(map(str, zstandard.ZSTD_VERSION))
    settings = "--ultra -22 --long" + (" --patch-from=TRAINING_TEXT" if before else "")
    return Compressor("zstd", version, settings, pack, unpack)


# Order 16 fills 256 MiB within 14 MB of the floppy's training text, and variant H then forgets all it knows.
# With 256 << 20 here, the row after that text has 1.2848 bits per byte. In 1 GiB nothing is forgotten.
PPMD_ORDER, PPMD_BYTES = 16, 1 << 30
LENGTH = struct.Struct("<Q")  # PPMd marks no end, so that archives keep the length


def pack_ppmd(text: bytes) -> bytes:
    encoder = pyppmd.Ppmd7Encoder(PPMD_ORDER, PPMD_BYTES)
    return LENGTH.pack(len(text)) + encoder.encode(text) + encoder.flush()


def unpack_ppmd(packed: bytes) -> bytes:
    (length,) = LENGTH.unpack_from(packed)
    return pyppmd.Ppmd7Decoder(PPMD_ORDER, PPMD_BYTES).decode(packed[LENGTH.size :], length)


PPMD_SETTINGS = f"7z -m0=PPMd:o={PPMD_ORDER}:mem={PPMD_BYTES >> 30}g"  # both are variant H
PPMD = Compressor("PPMd", f"pyppmd {pyppmd.__version__}", PPMD_SETTINGS, pack_ppmd, unpack_ppmd)


def run_zpaq(words: str, given: str, wanted: str, data: bytes) -> bytes:
    """The file `wanted` that the program leaves beside the file `given`. Raises DataError."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, given).write_bytes(data)
        command = ["zpaq", *words.split(), "-threads", "1"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise DataError(f"zpaq {words}: {done.stderr.strip()[-200:]}")
        return Path(folder, wanted).read_bytes()


def zpaq() -> Compressor:
    """The program zpaq, which must be installed."""
    banner = subprocess.run(["zpaq"], capture_output=True, text=True).stdout  # zpaq v7.15 ...
    pack = partial(run_zpaq, "add text.zpaq text -m5 -noattributes", "text", "text.zpaq")
    unpack = partial(run_zpaq, "extract text.zpaq", "text.zpaq", "text")
    return Compressor("zpaq", banner.split()[1].removeprefix("v"), "-m5", pack, unpack)


# --- rows -------------------------------------------------------------------------------------------------


def cost(compressor: Compressor, text: bytes, before: bytes = b"") -> int:
    """Bytes that the text takes, or adds to those of `before`. Raises DataError if it does not come back."""
    packed = compressor.pack(before + text)
    if compressor.unpack(packed) != before + text:
        raise DataError(f"{compressor.name} {compressor.version}: does not give back what it packed")
    return len(packed) - (len(compressor.pack(before)) if before else 0)


def measure(text: bytes, training: bytes) -> Iterator[ReferenceCompressor | Check]:
    """A row for each compressor, or why it is skipped. Without `training`, only rows after nothing."""

    def row(compressor: Compressor, after: str = NOTHING, before: bytes = b"") -> ReferenceCompressor:
        size = cost(compressor, text, before)
        words = (compressor.name, compressor.version, compressor.settings, after)
        return ReferenceCompressor(*words, size, round(8 * size / len(text), 6))

    yield from map(row, (ZLIB, BZIP2, BROTLI, zstd(), XZ, PPMD))
    if shutil.which("zpaq"):
        yield row(zpaq())
    else:
        yield skip("zpaq -m5", "is not installed: apt-get install zpaq")
    if training:
        yield row(zstd(training), TRAINING)
        yield row(XZ, TRAINING, training)
        yield row(PPMD, TRAINING, training)
    else:
        yield skip(f"after {TRAINING}", f"it has more than {MOST_BYTES} bytes")


def training_text(track: Track, data: Path) -> Text | None:
    """The text to train on; None where it is too long for these compressors. Raises DataError for another."""
    folder = data / "datasets" / track.dataset["name"]
    paths = shards.by_split(folder.glob("*.bin"))[shards.TRAIN]
    if sum(shards.read_header(path).tokens for path in paths) > MOST_BYTES:
        return None  # before anything fills the memory: there are more bytes than tokens
    text = decode(load_tokenizer(tokenizer_path(track, data)), shards.read_split(folder, "train"))
    expected = track.dataset["train_sha256"]
    if expected not in (None, text.sha256):
        raise DataError(f"{folder}: the training text has sha256 {text.sha256}, the track's is {expected}")
    return text if text.bytes <= MOST_BYTES else None
