"""A run read from its metrics.jsonl, and from the log and config.json beside it if they exist.

A run is named by its folder or by its metrics.jsonl. The folder of a record stands for the runs of all seeds.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.ndimage import median_filter

from data.command import DataError
from data.files import read_bytes, read_json
from records.archive.runs import METRICS, ClaimedRun, nearest_runs, parse_events, read_metrics

STEADY_FROM = 10  # steps that caches, compilers and clocks take to settle; fewer where a run is short
NEAR = 31  # steps around one that say how long a step takes then: machines change their speed within minutes
STALL_TIMES, STALL_SECONDS, STALL_DEVIATIONS = 2.0, 1.0, 10.0  # a stall is beyond all three
LAST = 0.05  # part of the steps whose mean is the final training loss, ten steps at least
FIELDS = ("train_loss", "train_seconds", "train_flops", "lr_mul", "grad_norm")
NEEDED = ("train_loss", "train_seconds")
VALIDATION = ("step", "val_loss", "val_bpb")


def number(where: str, name: str, value: object) -> float:
    """A number of metrics.jsonl, where numbers that are not finite are text. Raises DataError."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if plain or value in ("nan", "inf", "-inf"):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise DataError(f"{where}: {name} is {str(value)!r:.40}, expected a number")


def positive(value: float) -> float | None:
    """A number above 0; None for anything else."""
    return value if 0 < value < math.inf else None


def count(value) -> int | None:
    """A whole number above 0; None for anything else, which other programs may have written."""
    text = str(value)
    return int(text) if re.fullmatch("[1-9][0-9]{0,14}", text) else None


@dataclass(frozen=True)
class Metrics:
    name: str  # for people
    path: Path  # of its metrics
    table: dict[str, np.ndarray]  # FIELDS of the steps, float64[steps]; NaN where a step does not say
    vals: list[dict]  # its validations
    final: dict  # the values of its end; empty while it has none
    log: str
    config: dict
    score: float | None = None  # bits per byte, the referee's

    @property
    def steps(self) -> int:
        return len(self.table["train_loss"])

    @cached_property
    def seconds(self) -> np.ndarray:
        """float64[steps]: training seconds of each step."""
        return np.diff(self.table["train_seconds"], prepend=0.0)

    @cached_property
    def stalls(self) -> np.ndarray:
        """Whether each step took far longer than the steps around it, bool[steps].

        Beyond STALL_TIMES the median of NEAR steps, and by STALL_SECONDS and STALL_DEVIATIONS (of the median
        absolute deviation, scaled to that of a normal distribution) at least.
        """
        usual = median_filter(self.seconds, min(NEAR, self.steps), mode="mirror")
        beyond = self.seconds - usual
        deviation = 1.4826 * np.median(np.abs(beyond))
        far = (beyond > STALL_SECONDS) & (beyond > STALL_DEVIATIONS * deviation)
        return far & (self.seconds > STALL_TIMES * usual)

    @property
    def stalled(self) -> list[dict]:
        return [
            {"run": self.name, "step": int(at) + 1, "seconds": float(self.seconds[at])}
            for at in np.flatnonzero(self.stalls)
        ]

    @cached_property
    def steady(self) -> np.ndarray:
        """Whether speed is measured on a step: no stall, and not among the first, bool[steps]."""
        first = np.arange(self.steps) < min(STEADY_FROM, self.steps // 5)
        return ~first & ~self.stalls

    def median(self, values: np.ndarray) -> float | None:
        """The median over the steady steps; None if they have no values."""
        chosen = values[self.steady]
        return float(np.median(chosen)) if len(chosen) and not np.isnan(chosen).any() else None

    @property
    def step_seconds(self) -> float | None:
        return self.median(self.seconds)

    @property
    def wander(self) -> float:
        """How much slower the slowest tenth of the run was than its quickest, as a logarithm."""
        parts = np.array_split(self.seconds[self.steady], 10)
        medians = [np.median(part) for part in parts if len(part)]
        if not medians or min(medians) <= 0:
            return 0.0
        return math.log(max(medians) / min(medians))

    @property
    def last_losses(self) -> np.ndarray:
        """float64[n]: the losses of the last steps, because one step's loss depends mostly on its batch.

        Those that are not finite changed no weight, and are left out unless there are no others.
        """
        losses = self.table["train_loss"][-max(10, round(LAST * self.steps)) :]
        finite = losses[np.isfinite(losses)]
        return finite if len(finite) else losses

    def logged(self, name: str) -> float | None:
        """A number of the final block, which may be text such as '1.5 partial'; None where there is none."""
        found = re.match(r"(-?[0-9][0-9.e+-]*|nan|-?inf)(?= |$)", str(self.final.get(name, "")))
        try:
            return float(found[0]) if found else None
        except ValueError:
            return None

    @property
    def flops_per_step(self) -> float | None:
        return positive(float(self.table["train_flops"][-1]) / self.steps)

    @property
    def tokens_per_step(self) -> float | None:
        given = count(self.config.get("settings", {}).get("train_batch_tokens"))
        if given:
            return float(given)
        tokens, steps = self.logged("tokens_seen"), self.logged("steps")
        return positive(tokens / steps) if tokens and steps else None

    @property
    def seed(self) -> int | None:
        seed = self.final.get("seed", self.config.get("settings", {}).get("seed"))
        return seed if isinstance(seed, int) else None

    @cached_property
    def environment(self) -> dict[str, str]:
        """What the run's numbers depend on beside its settings: machine, data, versions."""
        found = self.config.get("environment") or self.by_log(lambda run: run.about)
        hashes = ("train_sha256", "val_sha256", "tokenizer_sha256")
        data = {name: self.final.get(name, self.config.get("sha256", {}).get(name)) for name in hashes}
        return {name: str(value) for name, value in {**found, **data}.items() if value is not None}

    def fact(self, name: str) -> str | None:
        """A value of environment, final event or properties; None if none has it."""
        found = self.environment.get(name, self.final.get(name, getattr(self, name, None)))
        return None if found is None else str(found)

    @property
    def given(self) -> dict[str, str]:
        origins = self.config.get("origins", {})
        if origins:
            kept = {"PRESET", *(name.upper() for name, origin in origins.items() if origin != "preset")}
            return {name: text for name, text in self.settings.items() if name in kept}
        return self.by_log(lambda run: run.given)

    def by_log(self, read: Callable[[ClaimedRun], dict[str, str]]) -> dict[str, str]:
        """What the log says; nothing where it is another program's."""
        try:
            return read(ClaimedRun(self.name, self.log, {}))
        except DataError:
            return {}

    @property
    def settings(self) -> dict[str, str]:
        return {name.upper(): written(value) for name, value in self.config.get("settings", {}).items()}

    @property
    def state(self) -> str:
        """Whether it has ended; of a run that has not, also whether its numbers failed."""
        if self.final:
            return "has ended"
        norms = np.isfinite(self.table["grad_norm"])
        good = np.isfinite(self.table["train_loss"]) & (norms | ~norms.any())  # not all versions log norms
        last = int(np.argmax(good[::-1])) if good.any() else self.steps
        words = f"; the last {last} changed nothing, for their numbers were not finite" if last else ""
        return f"has not ended: {self.steps} steps so far{words}"


def written(value) -> str:
    """A setting's value as text: 1 for true, 0.5, 3 for 3.0."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(int(value) if isinstance(value, bool) else value)


# --- reading ----------------------------------------------------------------------------------------------

LIVING = "if the run goes on, wait for its end or compare it with --unfinished"


def read_events(path: Path, living: bool) -> Iterator[tuple[str, dict]]:
    """(place, event) of each line. `living`: a last line that is not whole yet is left out. DataError."""
    blob = read_metrics(path)
    if not blob.strip():
        raise DataError(f"{path}: is empty, expected a line for every step; train_gpt.py writes them")
    whole = blob[: blob.rfind(b"\n") + 1]
    if len(whole) < len(blob) and not living:
        count = whole.count(b"\n") + 1
        raise DataError(f"{path}:{count}: the last line is cut off; {LIVING}")
    for where, event in parse_events(whole, path):
        if not isinstance(event.get("event"), str):
            raise DataError(f'{where}: expected an object with "event", as train_gpt.py writes')
        yield where, event


def step_values(where: str, event: dict, before: list[float] | None, done: int) -> list[float]:
    """FIELDS of a step; `before`: those of the step before, number `done`. Raises DataError."""
    found = event.get("step")
    if found != done + 1:
        twice = isinstance(found, int) and found <= done
        mend = "; a resume wrote steps again: keep the later ones only" if twice else ""
        after = f"after step {done}, expected step {done + 1}" if done else "first, expected step 1"
        raise DataError(f"{where}: step {found!r:.40} comes {after}{mend}")
    for name in NEEDED:
        if name not in event:
            raise DataError(f"{where}: a step without {name}, which every version logs")
    values = [number(where, name, event.get(name, "nan")) for name in FIELDS]
    clock = FIELDS.index("train_seconds")
    least = before[clock] if before else 0.0
    if not least <= values[clock] < math.inf:
        raise DataError(f"{where}: train_seconds is {values[clock]:g}, expected {least:g} or more")
    return values


def read_run(path: Path, name: str, log: Path, config: Path, living: bool = False) -> Metrics:
    """The run of one metrics file. `living`: it may lack its end. Raises DataError."""
    rows: list[list[float]] = []
    vals: list[dict] = []
    final: dict = {}
    where = str(path)
    for where, event in read_events(path, living):
        if final:
            raise DataError(f"{where}: {event['event']!r} comes after the run's end, expected one run a file")
        if event["event"] == "step":
            rows.append(step_values(where, event, rows[-1] if rows else None, len(rows)))
        elif event["event"] == "val":
            if not event.keys() >= {*VALIDATION}:
                raise DataError(f"{where}: expected numbers step, val_loss and val_bpb of a validation")
            vals.append({key: number(where, key, event[key]) for key in VALIDATION})
            vals[-1]["partial"] = bool(event.get("partial"))
        elif event["event"] == "final":
            final = event
    if not rows:
        raise DataError(f'{path}: has no step, expected lines with "event": "step"')
    if not final and not living:
        raise DataError(f"{where}: ends after step {len(rows)} without a final event; {LIVING}")
    if final and final.get("steps", len(rows)) != len(rows):
        steps = f"{final['steps']!r:.40}"
        raise DataError(f"{where}: ends with a final event of {steps} steps, but has {len(rows)} steps")
    table = dict(zip(FIELDS, np.array(rows).T))
    text = read_bytes(log).decode(errors="replace") if log.exists() else ""
    about = read_json(config) if config.exists() else {}
    if not all(isinstance(value, dict) for value in about.values()):
        raise DataError(f"{config}: is no config.json of train_gpt.py")
    return Metrics(name, path, table, vals, final, text, about)


def referee_score(folder: Path, seed: str) -> float | None:
    """The score of a record's seed in its submission.json; None if it has none. Raises DataError."""
    path = folder / "submission.json"
    scores = read_json(path).get("scores") if path.exists() else None
    if not isinstance(scores, dict) or seed not in scores:
        return None
    return number(str(path), f"the score of seed {seed}", scores[seed])


def find_runs(path: Path, living: bool = False) -> list[Metrics]:
    """The runs that a path names: those of a run's, a record's or a campaign's variant's folder, or a file.

    Raises DataError.
    """
    if path.is_dir():
        files = [path / METRICS] if (path / METRICS).exists() else []
        files = files or sorted([*path.glob("metrics_seed*.jsonl"), *path.glob("metrics_seed*.jsonl.gz")])
        if not files and (path / "arm.json").exists():  # a variant's folder
            files = sorted(path.glob(f"logs/*/{METRICS}"))
    else:
        files = [path] if path.exists() else []
    if not files:
        what = f"holds no {METRICS} and no metrics_seed*.jsonl" if path.is_dir() else "no such file"
        takes = f"name a run's folder such as logs/RUN, its {METRICS}, a variant's folder or a record"
        raise DataError(f"{path}: {what}; {takes}{nearest_runs(path)}")
    return [find_run(file, living) for file in files]


def find_run(file: Path, living: bool) -> Metrics:
    """The run of a metrics file, whose name says which log is its own. Raises DataError."""
    folder = file.resolve().parent.name
    if seed := re.fullmatch(r"metrics_seed(\d+)\.jsonl(\.gz)?", file.name):
        names = f"{folder} seed{seed[1]}", f"train_seed{seed[1]}.log", "config.json"
    elif file.name == METRICS:
        names = folder, "train.log", "config.json"
    else:
        names = file.stem, f"{file.stem}.log", f"{file.stem}.config.json"
    name, log, config = names
    run = read_run(file, name, file.with_name(log), file.with_name(config), living)
    return replace(run, score=referee_score(file.parent, seed[1]) if seed else None)
