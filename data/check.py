"""Are token shards what they say? A line a check, and what their headers say."""

import hashlib
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np

from data import files, shards
from data.command import DataError, nearest, some
from data.door import Command
from data.shards import TRAIN, VAL, Header, Splits, Tokenizer, check

THREADS = 4  # each maps a whole shard; numpy and zlib let go of the lock
OF_LEGACY = (
    "to train on legacy shards, TOKENIZER_PATH names the SentencePiece model that made them, and VOCAB_SIZE "
    "its number of pieces, above the highest id; GPT-2, whose last id is 50256, has no such model: "
    "python -m data prepare text makes shards of the text"
)

# --- one shard -------------------------------------------------------------------------------------------


def verify_shard(path: Path, tokenizer: Tokenizer | None) -> list[str]:
    """Check one shard: its name and header against size and tokens, both against its tokenizer."""
    try:
        header, tokens = shards.open_shard(path)
    except DataError as error:
        return [f"FAIL {error}"]
    highest = int(tokens.max())
    lines = [f"ok   {path}: size {header.file_bytes}"]
    if header.legacy:
        lines.append(f"note {path}: legacy, says its number of tokens only; the highest id is {highest}")
    else:
        lines += verify_claims(path, header, tokens, highest)
    if tokenizer is None:
        return lines
    if not header.legacy:
        sha256 = tokenizer.sha256.hex()
        lines.append(check(path, "sha256 of the tokenizer", sha256, header.tokenizer.hex()))
        lines.append(check(path, "vocabulary size", header.vocab_size, tokenizer.vocab_size))
    if highest >= tokenizer.vocab_size:
        pieces = f"the {tokenizer.vocab_size} pieces of {tokenizer.path}"
        mend = "name the model that made it, here and as TOKENIZER_PATH with its VOCAB_SIZE"
        return [*lines, f"FAIL {path}: highest id is {highest}, expected below {pieces}: {mend}"]
    size = tokenizer.text_bytes(tokens)
    if header.legacy or header.lossy:
        why = "LOSSY, the tokens do not give back the text exactly" if header.lossy else "legacy"
        lines.append(f"note {path}: {why}; its tokens decode to {size} bytes")
    else:
        lines.append(check(path, "bytes of text", size, header.text_bytes))
    return lines


def verify_claims(path: Path, header: Header, tokens: np.ndarray, highest: int) -> list[str]:
    """Check what an extended header says of its tokens, and the file's name against it."""
    inside = highest < header.vocab_size
    documents = sum(int(np.count_nonzero(part == header.bos_id)) for part in shards.chunks(tokens))
    lines = [
        check(path, "crc32", f"{zlib.crc32(tokens):08x}", f"{header.crc32:08x}"),
        check(path, "highest id", highest, header.max_id),
        check(path, f"highest id below the vocabulary's {header.vocab_size}", inside, True),
        check(path, "documents (BOS tokens)", documents, header.documents),
    ]
    if header.corpus != shards.UNKNOWN:  # a shard upgraded by older tools may begin within a document
        lines.append(check(path, "first token", int(tokens[0]), header.bos_id))
    if name := shards.parse_name(path):
        lines.append(check(path, "split", header.split, name[1]))
    return lines


# --- a dataset -------------------------------------------------------------------------------------------


def verify_folder(folder: Path, tokenizer: Tokenizer | None, whole: bool = False) -> Iterator[str]:
    """Check a dataset: each shard alone, all as a set, the manifest, and that val stands apart from train.

    `whole`: its last training shards may not be missing.
    """
    splits = shards.by_split(folder.glob("*.bin"))
    paths = splits[TRAIN] + splits[VAL]
    if not paths:
        yield no_shards(folder)
        return
    lines = list(shards.verify_names(folder, folder.glob("*.bin")))
    yield from lines
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(lambda path: verify_shard(path, tokenizer), paths):
            yield from found
            lines += found
    if any(line.startswith("FAIL") for line in lines):
        yield f"note {folder}: not checked as a set while names or single shards fail"
        return
    headers = {path: shards.read_header(path) for path in paths}
    yield from verify_set(folder, headers, whole)
    if manifest := shards.load_manifest(folder):
        yield from verify_manifest(folder, headers, manifest)
        if tokenizer and not manifest["lossy"]:
            found = text_sha256(splits[VAL], tokenizer)
            yield check(folder, "sha256 of the validation text", found, manifest["val_sha256"])
    else:
        yield f"note {folder}: no manifest.json of python -m data prepare"
    if all(splits):
        yield from verify_apart(folder, splits, tokenizer)


def no_shards(folder: Path) -> str:
    others = some(sorted(path.name for path in folder.glob("*.bin")))
    mend = f"; rename {others} like this" if others else ""
    return f"FAIL {folder}: holds no shards, expected NAME_train_000000.bin and NAME_val_000000.bin{mend}"


def text_sha256(paths: list[Path], tokenizer: Tokenizer) -> str:
    """sha256 over the sha256 of each document's text, in order."""
    total = hashlib.sha256()
    for _, tokens in shards.documents(paths, tokenizer.bos_id):
        text = tokenizer.processor.decode(tokens.tolist())
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def verify_set(folder: Path, headers: dict[Path, Header], whole: bool) -> Iterator[str]:
    """Check that the shards, whose names are right, belong together and that none is missing."""
    legacy = [path.name for path, header in headers.items() if header.legacy]
    if 0 < len(legacy) < len(headers):
        few = f"{len(legacy)} of {len(headers)} shards are legacy, such as {legacy[0]}"
        yield f"FAIL {folder}: {few}, expected all or none: fetch or make the whole set anew"
    for split, paths in enumerate(shards.by_split(headers)):
        where = f"{folder}: {shards.SPLIT_NAMES[split]}"
        needed = whole or split == VAL
        if not paths:
            yield f"{'FAIL' if needed else 'note'} {where}: no shards, expected at least one"
        elif not legacy:
            yield from verify_places(where, {path: headers[path] for path in paths}, needed)
    for field in ("tokenizer", "vocab_size", "bos_id", "corpus", "lossy"):
        values = {getattr(header, field) for header in headers.values() if not header.legacy}
        if values:
            yield check(folder, f"different values of {field}", len(values), 1)


def verify_places(where: str, headers: dict[Path, Header], whole: bool) -> Iterator[str]:
    """Check what the extended headers of one split say of each shard's place, also against the names.

    Where it need not be `whole`, its last shards may be missing.
    """
    moved = [path.name for place, (path, header) in enumerate(headers.items()) if header.index != place]
    yield check(where, "shards that have another place by their headers", moved, [])
    counts = {header.count for header in headers.values()}
    yield check(where, "different numbers of shards by their headers", len(counts), 1)
    if whole or len(headers) >= max(counts):
        yield check(where, "number of shards", len(headers), max(counts))
    else:
        yield f"note {where}: the first {len(headers)} of {max(counts)} shards"


def verify_manifest(folder: Path, headers: dict[Path, Header], manifest: dict) -> Iterator[str]:
    """Check the shards against manifest.json; which of its shards are missing say their headers."""
    listed = {entry["name"]: entry for entry in manifest["files"]}
    unlisted = sorted({path.name for path in headers} - listed.keys())
    yield check(folder, "shards that the manifest lacks", unlisted, [])
    for path, header in headers.items():
        if entry := listed.get(path.name):
            yield check(path, "sha256", files.file_sha256(path).hex(), entry["sha256"])
            yield check(path, "tokens", header.tokens, entry["tokens"])
            yield check(path, "bytes", header.text_bytes, entry["bytes"])
            yield check(path, "documents", header.documents, entry["documents"])


def verify_apart(folder: Path, splits: Splits, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Check that no validation document stands in the training shards.

    One tokenizer makes one sequence of tokens of one text, so equal texts are equal sequences. A lossy
    tokenizer makes equal sequences of different texts, too.
    """
    header = shards.read_header(splits[VAL][0])
    bos_id = tokenizer.bos_id if tokenizer else header.bos_id
    if bos_id < 0 or header.lossy:
        why = "LOSSY" if header.lossy else "BOS id unknown, --tokenizer MODEL names it"
        yield f"note {folder}: val was not looked for in train: {why}"
        return
    yield f"note {folder}: looking for validation documents in the training shards"
    digests = {hashlib.sha256(tokens).digest() for _, tokens in shards.documents(splits[VAL], bos_id)}
    found = []
    documents = 0
    for path, tokens in shards.documents(splits[TRAIN], bos_id):
        documents += 1
        if hashlib.sha256(tokens).digest() in digests:
            found.append(path.name)
    where = f" (in {', '.join(sorted({*found}))})" if found else ""
    yield check(folder, f"validation documents among {documents} training documents", len(found), 0) + where


# --- commands --------------------------------------------------------------------------------------------


def verify_all(paths: tuple[Path, ...], given: Path | None) -> Iterator[str]:
    """Check datasets (folders) and shards, with the given tokenizer or the one that a manifest names."""
    for path in paths:
        if not path.exists():
            yield f"FAIL {path}: no such file, expected a shard or a folder of them{nearest(path)}"
            continue
        folder = path if path.is_dir() else path.parent
        try:
            model = given
            if not given and (manifest := shards.load_manifest(folder)):
                model = shards.own_tokenizer(folder, manifest)
            tokenizer = Tokenizer(model) if model else None
            if tokenizer is None:
                what = "tokenizer unknown, so text is not counted; --tokenizer MODEL names it"
                yield f"note {folder}: {what}; {OF_LEGACY}"
            yield from verify_folder(path, tokenizer) if path.is_dir() else verify_shard(path, tokenizer)
        except DataError as error:
            yield f"FAIL {error}"


def header_text(path: Path) -> str:
    """The header of a shard as text, or a line that says FAIL."""
    try:
        header, tokens = shards.open_shard(path)
    except DataError as error:
        return no_shards(path) if path.is_dir() else f"FAIL {error}"
    values = {"tokens": header.tokens, "highest id": tokens.max(), "legacy": "nothing else is known"}
    if not header.legacy:
        values = asdict(header) | {
            "split": shards.SPLIT_NAMES[header.split],
            "tokenizer": header.tokenizer.hex(),
            "crc32": f"{header.crc32:08x}",
            "lossy": header.lossy,
            "corpus": "unknown" if header.corpus == shards.UNKNOWN else header.corpus.hex(),
        }
    return "\n".join([str(path), *(f"  {key} {value}" for key, value in values.items())])


def headers_of(paths: tuple[Path, ...]) -> Iterator[str]:
    """The headers of the shards that `paths` name or hold."""
    for path in paths:
        val, train = shards.by_split(path.glob("*.bin"))
        yield from map(header_text, train + val or [path])


def print_all(lines: Iterator[str]) -> int:
    """Print line by line. Raises DataError if one says FAIL."""
    failed = 0
    for line in lines:
        print(line, flush=True)
        failed += line.startswith("FAIL")
    if failed:
        raise DataError(f"{failed} checks failed, see the FAIL lines")
    return 0


of_paths = click.argument("paths", nargs=-1, required=True, type=Path, metavar="FILE|FOLDER...")


@click.command(cls=Command)
@of_paths
@click.option("--tokenizer", type=Path, metavar="MODEL", help="that made the shards, if no manifest names it")
def verify(paths: tuple[Path, ...], tokenizer: Path | None) -> int:
    """Check every byte of datasets and single shards. Exit code 3 if a check fails."""
    return print_all(verify_all(paths, tokenizer))


@click.command(cls=Command)
@of_paths
def inspect(paths: tuple[Path, ...]) -> int:
    """Print the headers of shards. Exit code 3 if one cannot be read."""
    return print_all(headers_of(paths))
