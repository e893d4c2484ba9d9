"""What a track.json says of its text and of the text's tokens, from the shards and the tokenizer."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from data import check, shards
from records.referee.text import decode


def text_facts(paths: Iterable[Path], tokenizer: shards.Tokenizer) -> tuple[str, int]:
    """sha256 over the sha256 of each document, and bytes of all. Raises DataError.

    Documents are decoded one by one: a training text may be larger than the memory.
    """
    total = hashlib.sha256()
    size = 0
    for _, tokens in shards.documents(paths, tokenizer.bos_id):
        text = decode(tokenizer.processor, tokens)
        total.update(hashlib.sha256(text.documents[0]).digest())
        size += text.bytes
    return total.hexdigest(), size


def tokens_sha256(paths: Iterable[Path]) -> str:
    """Of all tokens, as a log has it."""
    total = hashlib.sha256()
    for path in paths:
        total.update(shards.open_shard(path)[1])
    return total.hexdigest()


def headers_sha256(paths: Iterable[Path]) -> str:
    """Of the shards' headers, as a log has it."""
    total = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            total.update(file.read(shards.HEADER_BYTES))
    return total.hexdigest()


def read_facts(folder: Path, tokenizer_path: Path) -> tuple[dict, dict]:
    """A dataset's facts by their names in track.json: of the text, and of its tokens.

    Every shard is checked first. Raises DataError.
    """
    tokenizer = shards.Tokenizer(tokenizer_path)
    val, train = shards.find_shards(folder)
    headers = {path: shards.read_header(path) for path in train + val}
    for path in headers:
        shards.raise_failed(check.verify_shard(path, tokenizer))
    shards.raise_failed(check.verify_set(folder, headers, whole=True))
    val_sha256, val_bytes = text_facts(val, tokenizer)
    train_sha256, _ = text_facts(train, tokenizer)
    of_text = {"val_sha256": val_sha256, "train_sha256": train_sha256, "val_bytes": val_bytes}
    of_tokens = {
        "tokenizer_sha256": tokenizer.sha256.hex(),
        "val_tokens": sum(headers[path].tokens for path in val) - 1,  # all but the first are scored
        "logged_val_sha256": tokens_sha256(val),
        "logged_train_sha256": headers_sha256(train),
    }
    return of_text, of_tokens
