"""Run here, in the repository: texts, tokenizer, tracks and a tiny run for the GPU machine, all in .gpu/."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from data import corpus, shards
from data.shards import Header

HOME = Path(sys.argv[1] if len(sys.argv) > 1 else ".gpu")
SOURCE = Path("data/datasets/demo_sp1024")
TOKENIZER = Path("data/tokenizers/demo_1024_bpe.model")


def shorten(name: str, most: int) -> None:
    """The first documents of the demo's validation text, of at most so many tokens, as a dataset."""
    tokenizer = shards.Tokenizer(TOKENIZER)
    header = shards.read_header(SOURCE / "demo_val_000000.bin")
    tokens = shards.read_split(SOURCE, "val")
    starts = np.append(np.flatnonzero(tokens == tokenizer.bos_id), len(tokens))
    ends = starts[(starts > 0) & (starts <= most)]
    parts = np.split(tokens[: ends[-1]], ends[:-1])
    folder = HOME / f"data/datasets/{name}_sp1024"
    folder.mkdir(parents=True, exist_ok=True)
    empty = replace(header, tokens=0, documents=0, text_bytes=0, max_id=0, crc32=0)
    shards.write_shard(folder / f"{name}_val_000000.bin", empty, ((p, tokenizer.text_bytes(p), False) for p in parts))
    found = shards.read_header(folder / f"{name}_val_000000.bin")
    print(folder, found.tokens, "tokens", found.documents, "documents", found.text_bytes, "bytes")


def track() -> None:
    """A track of the device cuda for the short texts."""
    rules = json.loads(Path("records/track_10min_16mb/track.json").read_text())
    old = rules["dataset"]["vocabularies"][0]
    names = [f"{name}_sp1024" for name in ("half", "probe")] + ["demo_sp1024"]
    rules["dataset"]["vocabularies"] = [old | {"name": name, "tokenizer": TOKENIZER.name} for name in names]
    rules |= {"title": "GPU", "devices": 1}
    folder = HOME / "track_gpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "track.json").write_text(json.dumps(rules, indent=1))


def second() -> None:
    """The demo's second text as a file: on that machine the packages that it is made of have other versions."""
    texts = [text.decode() for _, text in corpus.demo_documents("second")]
    (HOME / "second.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    print("second", len(texts), "documents", (HOME / "second.jsonl").stat().st_size)


def tiny_run() -> None:
    env = os.environ | {"PRESET": "smoke", "RUN_ID": "gpu-tiny", "ITERATIONS": "3", "DATA_PATH": str(SOURCE)}
    env |= {"VAL_TOKENS_LIMIT": "4096", "COMPILE": "0", "DTYPE": "float32", "WARMUP_STEPS": "0", "VAL_BATCH_SIZE": "4096"}
    subprocess.run([sys.executable, "train_gpt.py"], env=env, check=True)
    shutil.rmtree(HOME / "tiny", ignore_errors=True)
    shutil.copytree("logs/gpu-tiny", HOME / "tiny", ignore=shutil.ignore_patterns("checkpoint*"))


shorten("half", 500_000)
shorten("probe", 20_000)
(HOME / "data/tokenizers").mkdir(exist_ok=True)
shutil.copyfile(TOKENIZER, HOME / "data/tokenizers" / TOKENIZER.name)
track()
second()
tiny_run()
