"""A record's script of its own: a bigram model in numpy, with nothing of this repository in it.

It trains as records/README.md asks: it reads SEED, RUN_ID, DATA_PATH and TOKENIZER_PATH, appends each step to
metrics.jsonl, and makes do without the validation text.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import numpy as np

STEPS = 4
LN2 = float(np.log(2))


class Bigram:
    rows = 16

    def __init__(self, counts: np.ndarray):
        self.vocab_size = len(counts)
        self.logits = np.log(counts.astype(np.float32) + 0.05)  # the referee normalises

    def start(self, rows: int) -> np.ndarray:
        return np.zeros((rows, self.vocab_size), np.float32)

    def step(self, ids: np.ndarray) -> np.ndarray:
        return self.logits[ids]


def load_predictor(artifact: Path, device: str) -> Bigram:
    counts = np.frombuffer(Path(artifact).read_bytes(), "<u2")
    size = round(len(counts) ** 0.5)
    return Bigram(counts.reshape(size, size))


def nats(counts: np.ndarray, tokens: np.ndarray) -> float:
    """Of all tokens but the first."""
    p = counts + 0.05
    p = p / p.sum(1, keepdims=True)
    return float(-np.log(p[tokens[:-1], tokens[1:]]).sum())


def read_shards(split: str) -> tuple[np.ndarray, list[bytes]]:
    """(tokens, headers) of a split; of one that is not here, none."""
    blobs = [path.read_bytes() for path in sorted(Path(os.environ["DATA_PATH"]).glob(f"*_{split}_*.bin"))]
    tokens = [np.frombuffer(blob[1024:], "<u2") for blob in blobs]
    return np.concatenate([*tokens, np.zeros(0, np.uint16)]).astype(np.int64), [blob[:1024] for blob in blobs]


def write_event(folder: Path, event: dict) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")


def train(folder: Path, tokens: np.ndarray, size: int) -> tuple[np.ndarray, dict]:
    """Pairs are counted, an operation for each. Each seed leaves out other tokens."""
    keep = np.random.default_rng(int(os.environ["SEED"])).random(len(tokens)) < 0.9
    batches = np.array_split(tokens[keep], STEPS)
    counts = np.zeros((size, size))
    totals = {"train_seconds": 0.0, "train_flops": 0}
    began = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        np.add.at(counts, (batch[:-1], batch[1:]), 1)
        totals["train_flops"] += len(batch) - 1
        totals["train_seconds"] = time.perf_counter() - began
        loss = nats(counts, batch) / (len(batch) - 1)
        write_event(folder, {"event": "step", "step": step, "train_loss": loss, **totals})
    return counts.astype("<u2"), totals


def validation(folder: Path, counts: np.ndarray) -> dict:
    """Values of the log's end. Empty in the training sandbox, which holds no validation text."""
    tokens, headers = read_shards("val")
    if not headers:
        return {}
    text_bytes = sum(int.from_bytes(head[36:44], "little") for head in headers)
    bpb = nats(counts, tokens) / LN2 / text_bytes
    write_event(folder, {"event": "val", "step": STEPS, "val_loss": bpb, "val_bpb": bpb})
    found = {"val_bpb": f"{bpb:.8f}", "val_bpb_unquantized": f"{bpb:.8f}"}
    found |= {"val_tokens": len(tokens) - 1, "val_bytes": text_bytes}
    return found | {"val_sha256": hashlib.sha256(tokens.astype("<u2")).hexdigest()}


def main() -> None:
    folder = Path("logs", os.environ["RUN_ID"])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"settings": {"data_path": os.environ["DATA_PATH"]}}))
    (folder / "metrics.jsonl").write_text("")
    tokens, headers = read_shards("train")
    code = Path(__file__).read_bytes()
    (folder / "train_gpt.py").write_bytes(code)  # which `freeze` copies
    script = hashlib.sha256(code).hexdigest()
    vocabulary = int.from_bytes(headers[0][20:24], "little")
    counts, final = train(folder, tokens, vocabulary)
    final |= validation(folder, counts)
    (folder / "model.ptz").write_bytes(counts.tobytes())
    final |= {
        "seed": int(os.environ["SEED"]),
        "steps": STEPS,
        "artifact_bytes": counts.nbytes,
        "artifact_sha256": hashlib.sha256(counts).hexdigest(),
        "state_sha256": hashlib.sha256(b"state" + counts.tobytes()).hexdigest(),
        "script_sha256": script,
        "train_sha256": hashlib.sha256(b"".join(headers)).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(Path(os.environ["TOKENIZER_PATH"]).read_bytes()).hexdigest(),
    }
    write_event(folder, {"event": "final", **final})
    lines = [
        f"run:{folder} preset:none SEED={final['seed']} RUN_ID={folder.name}",
        f"torch:none threads:1 gpu:none dtype:float32 processor:any script_sha256:{script}",
        "---",
        *(f"{name}: {value}" for name, value in final.items()),
    ]
    (folder / "train.log").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
