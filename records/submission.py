"""What a record's own files say: logs and metrics of its runs, and the numbers of submission.json from them.

freeze.py writes these numbers and verify.py computes them again: one function, so a number is never typed.
"""

import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from data.command import DataError
from records.files import parse_json, read_bytes, sha256
from records.folders import seed_of
from records.tracks import Track


def words(text: str) -> list[str]:
    return text.split()


INTEGERS = words(
    "val_tokens val_bytes steps tokens_seen params artifact_bytes code_bytes total_bytes budget_bytes seed"
)
NUMBERS = words("val_loss val_bpb val_bpb_unquantized train_seconds eval_seconds data_wait_seconds")
OF_A_SEED = words(
    "seed val_loss val_bpb val_bpb_unquantized val_tokens val_bytes artifact_bytes total_bytes train_seconds "
    "eval_seconds steps tokens_seen params artifact_sha256 state_sha256 run_id"
)
HARDWARE = words("ranks dtype processor gpu cores threads platform")
VERSIONS = words("python torch mlx numpy sentencepiece")
UNTOLD = {"torch": "none", "mlx": "none", "git": "unknown", "threads": "unknown"}  # by some trainers


def number(text, whole: bool):
    """A number of a log's last block. Raises ValueError for anything else ('1.5 partial', 'nan')."""
    value = int(text) if whole else float(text)
    if not math.isfinite(value) or not re.fullmatch(r"[0-9][0-9.e+-]*", text):  # '1_0' is 10 for Python
        raise ValueError(text)
    return value


@dataclass(frozen=True)
class Run:
    """One seed's log and metrics, parsed."""

    name: str  # for messages
    log: str
    final: dict[str, str]  # the block after '---'
    events: list[dict]  # metrics.jsonl

    def kind(self, event: str) -> list[dict]:
        return [e for e in self.events if e.get("event") == event]

    @property
    def given(self) -> str:
        """The first line: run:<folder> preset:<preset> NAME=value..."""
        return self.log.split("\n", 1)[0]

    @property
    def about(self) -> dict[str, str]:
        """What the run depended on, from the line of name:value that ends with script_sha256."""
        found = re.search(r"^.* processor:.* script_sha256:.*$", self.log, re.MULTILINE)
        if not found:
            raise DataError(f"{self.name}: the log has no line ... processor:... script_sha256:...")
        parts = re.split(r"(?:^| )([a-z][a-z0-9_]*):", found[0])
        return UNTOLD | dict(zip(parts[1::2], parts[2::2]))

    def value(self, name: str):
        """A number, hash or word of the last block. Raises DataError."""
        try:
            text = self.final[name]
            if name in INTEGERS or name in NUMBERS:
                return number(text, name in INTEGERS)
            return text
        except KeyError:
            raise DataError(f"{self.name}: no '{name}:' after the line ---") from None
        except (ValueError, OverflowError):
            raise DataError(f"{self.name}: '{name}: {text[:99]}', expected a number") from None


def parse_run(name: str, log: bytes, metrics: bytes) -> Run:
    """Raises DataError."""
    try:
        text = log.decode()
        events = [parse_json(line) for line in metrics.decode().split("\n") if line]
    except ValueError as error:
        raise DataError(f"{name}: log or metrics cannot be read: {error}") from None
    body, mark, block = text.rpartition("\n---\n")
    if not mark or not all(isinstance(event, dict) for event in events):
        raise DataError(f"{name}: no finished run: the log has no line '---' or metrics are no objects")
    lines = block.removesuffix("\n").split("\n")
    rows = dict(line.split(": ", 1) for line in lines if re.fullmatch(r"[a-z0-9_]+: \S.*", line))
    if len(rows) < len(lines) or "\n---\n" in body or not all(map(str.isprintable, lines)):
        # a reader would believe the first of two values, a program the last
        raise DataError(f"{name}: after the one line '---' expected lines 'name: value', each name once")
    return Run(name, body, rows, events)


def read_runs(folder: Path) -> dict[int, Run]:
    """The runs of a record folder by seed. Raises DataError."""
    runs = {}
    for path in sorted(folder.glob("train_seed*.log")):
        seed = seed_of(path.name)
        runs[seed] = parse_run(path.name, read_bytes(path), read_bytes(folder / f"metrics_seed{seed}.jsonl"))
    if not runs:
        raise DataError(f"{folder}: holds no train_seed<N>.log")
    return runs


def spread(values: list[float]) -> dict[str, float]:
    """Mean and sample standard deviation, to the logs' eight decimals."""
    return {
        "mean": round(statistics.fmean(values), 8),
        "std": round(statistics.stdev(values), 8) if len(values) > 1 else 0.0,
    }


def summary(runs: dict[int, Run], code: bytes, track: Track, tokenizer: int = 0) -> dict:
    """The computed part of submission.json, from the logs of all seeds and `code`, its scripts end to end.

    `tokenizer`: bytes of the record's own. Raises DataError.
    """
    first = next(iter(runs.values()))
    seeds = [{name: run.value(name) for name in OF_A_SEED} for _, run in sorted(runs.items())]
    code_bytes = track.code_size(code)
    for row in seeds:
        row["total_bytes"] = row["artifact_bytes"] + code_bytes + tokenizer
    about = first.about
    data = {name: first.value(f"{name}_sha256") for name in ("train", "val", "tokenizer")}
    return {
        "seeds": seeds,
        "val_loss": spread([row["val_loss"] for row in seeds]),
        "val_bpb": spread([row["val_bpb"] for row in seeds]),
        "train_seconds": spread([row["train_seconds"] for row in seeds]),
        "code_bytes": code_bytes,
        "total_bytes": max(row["total_bytes"] for row in seeds),
        "hardware": {name: about[name] for name in HARDWARE if name in about},
        "versions": {name: about[name] for name in VERSIONS if name in about},
        "git": about["git"],
        "sha256": {"script": sha256(code), **data},
    }
