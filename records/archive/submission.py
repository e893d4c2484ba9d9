"""The logs and metrics of a record's runs, which verify must check, and a description of this machine."""

import io
import math
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.command import DataError
from data.files import parse_json, read_bytes, sha256
from records.archive.folders import MAX_PAPERS, metrics_path, read_metrics, seed_of

INTEGERS = ("seed", "steps", "val_tokens", "val_bytes", "artifact_bytes", "train_flops")
NUMBERS = ("val_bpb", "train_seconds")


def number(text, whole: bool):
    """A number of a log's final block. Raises ValueError for anything else ('1.5 partial', 'nan')."""
    value = int(text) if whole else float(text)
    if not math.isfinite(value) or not re.fullmatch(r"[0-9][0-9.e+-]*", text):  # '1_0' is 10 for Python
        raise ValueError(text)
    return value


@dataclass(frozen=True)
class ClaimedRun:
    """One seed's log, parsed, and its metrics."""

    name: str  # for messages
    log: str
    final: dict[str, str]  # the block after '---'
    metrics: bytes = b""  # metrics.jsonl, which parse_events can read

    @property
    def events(self) -> Iterator[dict]:
        """Parsed each time: they take forty times their text, which is too much for those of all seeds."""
        return parse_events(self.metrics)

    def kind(self, event: str) -> list[dict]:
        return [e for e in self.events if e.get("event") == event]

    @property
    def given(self) -> dict[str, str]:
        """PRESET and the environment's settings: the log's first line, run:... preset:... NAME=value..."""
        found = re.match(r"run:.*? preset:(\S+)(.*)", self.log)
        if not found:
            raise DataError(f"{self.name}: the log does not begin with run:... preset:...")
        parts = re.split(r" ([A-Z][A-Z0-9_]*)=", found[2])
        return {"PRESET": found[1], **dict(zip(parts[1::2], parts[2::2]))}

    @property
    def about(self) -> dict[str, str]:
        """Machine, versions and hashes, from the log's line of name:value that ends with script_sha256."""
        lines = self.log.split("\n")
        found = [line for line in lines if " processor:" in line and " script_sha256:" in line]
        if not found:
            raise DataError(f"{self.name}: the log has no line ... processor:... script_sha256:...")
        parts = re.split(r"(?:^| )([a-z][a-z0-9_]*):", found[0])
        return dict(zip(parts[1::2], parts[2::2]))

    def value(self, name: str):
        """A number, hash or word of the log's final block. Raises DataError."""
        try:
            text = self.final[name]
            if name in INTEGERS or name in NUMBERS:
                return number(text, name in INTEGERS)
            return text
        except KeyError:
            raise DataError(f"{self.name}: no '{name}:' after the line ---") from None
        except (ValueError, OverflowError):
            raise DataError(f"{self.name}: '{name}: {text[:99]}', expected a number") from None

    def seconds_before_last_step(self) -> float:
        """Training seconds before the last step: a run may finish the step in which its time is up.

        Raises DataError where they are no number, and what else a stranger's numbers lead to.
        """
        ends = [0.0, 0.0, *(step.get("train_seconds", 0.0) for step in self.kind("step"))]
        seconds = self.value("train_seconds") - (ends[-1] - ends[-2])
        if not math.isfinite(seconds):
            raise DataError(f"{self.name}: train_seconds of the last steps are {ends[-2]} and {ends[-1]}")
        return seconds


def parse_events(metrics: bytes) -> Iterator[dict]:
    """The objects of a metrics.jsonl. Raises ValueError."""
    for line in io.BytesIO(metrics):
        if line != b"\n":
            event = parse_json(line.decode())
            if not isinstance(event, dict):
                raise ValueError("a line of the metrics is no object")
            yield event


def parse_run(name: str, log: bytes, metrics: bytes) -> ClaimedRun:
    """Raises DataError."""
    try:
        text = log.decode()
        for _ in parse_events(metrics):
            pass
    except ValueError as error:
        raise DataError(f"{name}: log or metrics cannot be read: {error}") from None
    body, mark, block = text.rpartition("\n---\n")
    if not mark:
        raise DataError(f"{name}: no finished run: the log has no line '---'")
    lines = block.removesuffix("\n").split("\n")
    rows = dict(line.split(": ", 1) for line in lines if re.fullmatch(r"[a-z0-9_]+: \S.*", line))
    if len(rows) < len(lines) or "\n---\n" in body or not all(map(str.isprintable, lines)):
        # a reader would believe the first of two values, a program the last
        raise DataError(f"{name}: after the one line '---' expected lines 'name: value', each name once")
    return ClaimedRun(name, body, rows, metrics)


def read_runs(folder: Path) -> dict[int, ClaimedRun]:
    """The runs of a record folder by seed. Raises DataError."""
    runs = {}
    left = MAX_PAPERS
    for path in sorted(folder.glob("train_seed*.log")):
        seed = seed_of(path.name)
        log = read_bytes(path)
        metrics = read_metrics(metrics_path(folder, seed))
        left -= len(log) + len(metrics)
        if left < 0:
            raise DataError(f"{folder}: logs and metrics have more than {MAX_PAPERS} bytes, unpacked")
        runs[seed] = parse_run(path.name, log, metrics)
    if not runs:
        raise DataError(f"{folder}: holds no train_seed<N>.log")
    return runs


def cpuinfo(name: str) -> str:
    """The first value of a line of /proc/cpuinfo, '' where there is none."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace") if path.exists() else ""
    found = re.search(rf"^{name}\s*:\s*(.*)", text, re.MULTILINE)
    return found[1] if found else ""


def this_machine() -> dict[str, str]:
    """All that the bits of a score depend on here; `cpu` too, since clouds give many processors one name."""
    import torch

    kind = " ".join(cpuinfo(name) for name in ("cpu family", "model", "stepping", "flags", "Features"))
    return {
        "processor": cpuinfo("model name") or platform.processor(),
        "cpu": sha256(kind.encode())[:16],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }
