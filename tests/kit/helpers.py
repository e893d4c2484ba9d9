"""What several test files share: texts, tokenizers and shards made on the spot, and the real script run.

Shards are written here from the table in data/README.md, by no code of the project.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import sentencepiece

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "train_gpt.py"
MLX_SCRIPT = ROOT / "train_gpt_mlx.py"
BOS = 1
CORPUS = hashlib.sha256(b"tiny").digest()  # names the texts of make_corpus in its headers

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "Быстрая коричневая лиса прыгает",
    "敏捷的棕色狐狸跳过懒狗",
    "والثعلب البني السريع يقفز",
    "def f(x):\n    return x  # twice",
    "naïve café, déjà vu",
    "🦊 ✨ 👍🏽 🇩🇪",
    "for i in range(10):\n\tprint(i)",
    "שועל חום מהיר",
    "갈색 여우가 개를",
]

# A run of a second or two: the smoke preset, smaller still.
TINY = """
    PRESET=smoke VOCAB_SIZE=400 MODEL_DIM=32 NUM_LAYERS=2 TRAIN_SEQ_LEN=32 TRAIN_BATCH_TOKENS=512
    VAL_BATCH_SIZE=4096 VAL_TOKENS_LIMIT=0 ITERATIONS=3 WARMUP_STEPS=0 MAX_WALLCLOCK_SECONDS=0
    COMPILE=0 DTYPE=float32
"""


def documents(count: int, seed: int, sentences: list[str] = SENTENCES) -> list[str]:
    """Documents of one to a few dozen words, separated by all kinds of white space."""
    rng = random.Random(seed)
    gaps = [" ", " ", " ", "  ", "\n", "   ", ""]
    made = []
    for _ in range(count):
        words = rng.choice(sentences).split(" ") + rng.choice(sentences).split(" ")
        parts = [rng.choice(words) + rng.choice(gaps) for _ in range(rng.randint(1, 40))]
        made.append("".join(parts))
    return made


# The kind of tokenizer that data.prepare makes: it gives every text back.
LOSSLESS = {
    "vocab_size": 400,
    "hard_vocab_limit": False,
    "model_type": "bpe",
    "byte_fallback": True,
    "character_coverage": 0.98,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "split_by_whitespace": True,
    "max_sentence_length": 100_000,
    "num_threads": 1,
    "minloglevel": 2,
}


def train_tokenizer(path: Path, texts: list[str], **options) -> Path:
    """A SentencePiece model file, LOSSLESS but for the options."""
    train = sentencepiece.SentencePieceTrainer.train
    with open(path, "wb") as file:
        train(sentence_iterator=iter(texts), model_writer=file, **LOSSLESS | options)
    return path


PLACES = {"vocabulary": 5, "documents": 7, "index": 12, "shards": 13, "split": 14, "flags": 15}


def header(tokens: np.ndarray, extended: bool = True, **fields: int | bytes) -> bytes:
    """The 1024 bytes before the tokens. fields: those of PLACES, text_bytes, tokenizer, corpus (sha256)."""
    ints = np.zeros(256, "<u4")
    ints[:3] = 20240520, 1, len(tokens)
    if extended:
        text_bytes = fields.get("text_bytes", 0)
        ints[3:5] = 0x31464C47, 1
        ints[6:9] = BOS, (tokens == BOS).sum(), tokens.max(initial=0)
        ints[9:11] = text_bytes % 2**32, text_bytes >> 32
        ints[11] = zlib.crc32(tokens.astype("<u2").tobytes())
        for name in PLACES.keys() & fields:
            ints[PLACES[name]] = fields[name]
        for place, name in ((16, "tokenizer"), (24, "corpus")):
            ints[place : place + 8] = np.frombuffer(fields.get(name, bytes(32)), "<u4")
    return ints.tobytes()


def sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def patch(path: Path, at: int, new: bytes) -> None:
    """Overwrite bytes of a file; a negative place counts from the end."""
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(new)


def put(path: Path, place: int, value: int) -> None:
    """Overwrite one int of a shard's header."""
    patch(path, 4 * place, (value % 2**32).to_bytes(4, "little"))


def flip(path: Path, at: int) -> None:
    """Another bit in a byte of a file."""
    patch(path, at, bytes([path.read_bytes()[at] ^ 1]))


def pairs(text: str) -> dict[str, str]:
    """The NAME=value words of a text."""
    return dict(word.split("=") for word in text.split())


def tiny_env(**more) -> dict[str, str]:
    """The environment of a tiny run."""
    return pairs(TINY) | {name: str(value) for name, value in more.items()}


@dataclass
class TinyCorpus:
    """A dataset folder, its tokenizer, and what went into them."""

    data_path: Path
    tokenizer_path: Path
    tokens: dict[str, np.ndarray]  # of a split, end to end
    texts: dict[str, list[str]]

    @property
    def tokenizer(self) -> sentencepiece.SentencePieceProcessor:
        return sentencepiece.SentencePieceProcessor(model_file=str(self.tokenizer_path))

    def env(self, **more) -> dict[str, str]:
        """The environment of a tiny run on this corpus."""
        paths = {"DATA_PATH": self.data_path, "TOKENIZER_PATH": self.tokenizer_path}
        return tiny_env(**paths | more)

    def val_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts["val"])


def encode_documents(tokenizer: sentencepiece.SentencePieceProcessor, texts: list[str]) -> np.ndarray:
    return np.array([i for ids in tokenizer.encode(texts) for i in [BOS, *ids]], np.uint16)


def write_shards(folder: Path, split: str, parts: list[np.ndarray], **fields) -> list[Path]:
    """One whole set of shards of a split. text_bytes may be given as a list: one number for each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    text_bytes = fields.pop("text_bytes", [0] * len(parts))
    whole = {"shards": len(parts), "split": int(split == "train")}
    paths = [folder / f"tiny_{split}_{index:06}.bin" for index in range(len(parts))]
    for index, (path, part) in enumerate(zip(paths, parts)):
        own = {"index": index, "text_bytes": text_bytes[index]}
        path.write_bytes(header(part, **whole | own | fields) + part.astype("<u2").tobytes())
    return paths


def make_corpus(
    folder: Path, tokenizer_path: Path, train_shards: int = 3, train_docs: int = 500, **fields
) -> TinyCorpus:
    """A tiny corpus of documents in several scripts; 60 of them, in two shards, are for validation."""
    made = TinyCorpus(folder, tokenizer_path, {}, {})
    about = {"corpus": CORPUS, "tokenizer": sha256(tokenizer_path)}
    about |= {"vocabulary": made.tokenizer.vocab_size(), **fields}
    for split, count, shards, seed in (("train", train_docs, train_shards, 1), ("val", 60, 2, 2)):
        texts = documents(count, seed)
        groups = [list(group) for group in np.array_split(np.array(texts, object), shards)]
        parts = [encode_documents(made.tokenizer, group) for group in groups]
        sizes = [sum(len(text.encode()) for text in group) for group in groups]
        write_shards(folder, split, parts, **{"text_bytes": sizes} | about)
        made.texts[split] = texts
        made.tokens[split] = np.concatenate(parts)
    return made


def damaged(blob: bytes, rng: random.Random) -> bytes:
    """Some bits flipped, anywhere or at one end, or the end cut off, or bytes put in or taken out."""
    made, kind, at = bytearray(blob), rng.randrange(6), rng.randrange(len(blob))
    if kind == 0:
        return bytes(made[:at])
    if kind == 1:
        return bytes(made[:at] + rng.randbytes(rng.randint(1, 9)) + made[at:])
    if kind == 2:
        return bytes(made[:at] + made[at + rng.randint(1, 9) :])
    places = {3: range(len(made)), 4: range(60), 5: range(-40, 0)}[kind]
    for _ in range(rng.choice([1, 1, 2, 20])):
        made[rng.choice(places)] ^= 1 << rng.randrange(8)
    return bytes(made)


def events(folder: Path, kind: str) -> list[dict]:
    """The events of a kind in a run's metrics.jsonl; what a dying run left unfinished is none."""
    found = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [event for event in found if event["event"] == kind]


@dataclass
class ScriptRun:
    """What a run of the script left behind."""

    code: int
    out: str
    err: str
    cwd: Path

    @property
    def final(self) -> dict[str, str]:
        """The block after '---'."""
        lines = self.out.split("\n---\n")[-1].strip().splitlines()
        return dict(line.split(": ", 1) for line in lines)

    @property
    def folder(self) -> Path:
        return self.cwd / "logs" / self.final["run_id"]

    def events(self, kind: str) -> list[dict]:
        return events(self.folder, kind)

    def losses(self) -> list[float]:
        return [event["train_loss"] for event in self.events("step")]


def clean_environment(**more) -> dict[str, str]:
    """Nothing of the caller's environment but where programs and the home folder are."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in more.items()}


def command(
    ranks: int = 0, script: Path = SCRIPT, torchrun: tuple[str, ...] = ("--standalone",)
) -> list[str]:
    """The command line of the script; with ranks, under the real torchrun."""
    words = ["-m", "torch.distributed.run", *torchrun, f"--nproc_per_node={ranks}"] if ranks else []
    return [sys.executable, *words, str(script)]


def python(*words: object, **options) -> subprocess.CompletedProcess[str]:
    """What Python does with these words, by default in the repository's folder."""
    options = {"cwd": ROOT, "text": True, "capture_output": True} | options
    return subprocess.run([sys.executable, *map(str, words)], **options)


def run_script(
    cwd: Path, env: dict[str, str], ranks: int = 0, prefix: tuple[str, ...] = (), script: Path = SCRIPT
) -> ScriptRun:
    """Run the real train_gpt.py as a process of its own in `cwd`."""
    cwd.mkdir(parents=True, exist_ok=True)
    words, env = [*prefix, *command(ranks, script)], clean_environment(**env)
    options = {"timeout": 900, "capture_output": True, "encoding": "utf-8"}  # compilers take minutes
    done = subprocess.run(words, cwd=cwd, env=env, **options)
    return ScriptRun(done.returncode, done.stdout, done.stderr, cwd)


def run_here(main: Callable[[], int], cwd: Path, env: dict[str, str]) -> ScriptRun:
    """The same by the main of a script that is imported: torch takes longer to import than such a run.

    In a thread, as in a notebook: it takes no signals, and pytest keeps its own.
    """
    cwd.mkdir(parents=True, exist_ok=True)
    out, err = io.StringIO(), io.StringIO()
    environment = clean_environment(**env)
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        ThreadPoolExecutor(1) as pool,
    ):
        code = pool.submit(main).result()
    return ScriptRun(code, out.getvalue(), err.getvalue(), cwd)
