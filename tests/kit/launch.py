"""The script as a process that a test watches, signals and kills, and what its run leaves behind."""

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit import helpers

FAULTS = helpers.ROOT / "tests/kit/faults.py"
PATIENCE = 200.0  # seconds that any process gets: nothing here takes a tenth of it
FIRST_STEP = re.compile(r"^step:\d+/\d+ train_loss", re.M)


class Broken(Exception):
    """A promise that did not hold."""


def check(ok: Any, text: str) -> None:
    if not ok:
        raise Broken(text)


def descendants(pid: int) -> list[int]:
    """The process and all below it, parents first."""
    parents = collections.defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(fields[1])].append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += parents[each]
    return found


def state_of(pid: int) -> str:
    """R, S, D running, T stopped, Z ended, or nothing: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def ended(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def command(ranks: int = 0, provoke: str = "") -> list[str]:
    """The command line of the script; with faults, of the wrapper that has them."""
    return helpers.command(ranks, FAULTS if provoke else helpers.SCRIPT)


def under_torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, str(helpers.SCRIPT)]


STARTED: list["Launch"] = []  # all of this process, to end what a failed try leaves running


class Launch:
    """A command started in `cwd`; what it prints goes to files there."""

    def __init__(self, cwd: Path, env: dict[str, str], command: list[str]):
        cwd.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in cwd.glob("*.out"))
        self.files = cwd / f"{number}.out", cwd / f"{number}.err"
        self.began, self.first_step = time.monotonic(), None
        env = helpers.clean_environment(PYTHONPATH=helpers.ROOT, **env)
        with open(self.files[0], "w") as out, open(self.files[1], "w") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=env, stdout=out, stderr=err, start_new_session=True
            )
        STARTED.append(self)

    @property
    def out(self) -> str:
        return self.files[0].read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        return self.files[1].read_text(encoding="utf-8", errors="replace")

    def look(self) -> bool:
        """Whether it still runs; notes when its first step was logged."""
        running = self.process.poll() is None
        if self.first_step is None and FIRST_STEP.search(self.out):
            self.first_step = time.monotonic() - self.began
        return running

    def wait(self, seconds: float = PATIENCE, until: Callable[[], Any] = lambda: False) -> int | None:
        """The exit code, or None after so many seconds or when `until` holds."""
        end = time.monotonic() + seconds
        while self.look():
            if until():
                return None
            if time.monotonic() > end:
                if seconds < PATIENCE:
                    return None
                self.kill()
                raise Broken(f"still runs after {seconds:.0f} s")
            time.sleep(0.01)
        return self.process.returncode

    def wait_for_step(self, more: float = 0.0) -> int | None:
        """Until the first step is logged and some seconds more; the exit code if it ends before."""
        code = self.wait(until=lambda: self.first_step is not None)
        return code if code is not None else self.wait(more)

    def kill(self) -> None:
        """SIGKILL to all its processes, parents first: as when the power fails."""
        for pid in descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks under torchrun."""
        found = {}
        for pid in descendants(self.process.pid)[1:]:
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if rank := re.search(rb"(?:^|\0)RANK=(\d+)\0", environment):
                    found.setdefault(int(rank[1]), pid)
        return found

    def need(self, *codes: int) -> None:
        """It ends with one of these exit codes, and without a traceback of the script's."""
        code = self.wait()
        check(code in codes, f"exit {code}, expected {codes}: {self.err[-1500:]}")
        check("Traceback" not in self.err.split("torch/distributed")[0], f"a traceback: {self.err[-1500:]}")


# --- what a run leaves ------------------------------------------------------------------------------------


class End(NamedTuple):
    """What must be equal of two runs that did the same."""

    hashes: dict[str, Any]
    steps: list[dict[str, Any]]
    vals: list[dict[str, Any]]


def events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run's metrics.jsonl; what a dying run left unfinished is none."""
    found = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def without_seconds(logged: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of a kind, of which nothing but seconds may differ between two runs that did the same."""
    return [
        {k: v for k, v in event.items() if "seconds" not in k} for event in logged if event["event"] == kind
    ]


def is_done(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and b'"event": "final"' in metrics.read_bytes()


def end_of(folder: Path) -> End:
    """Read a finished run. Raises Broken if it is not finished."""
    logged = events(folder)
    final = [event for event in logged if event["event"] == "final"]
    check(len(final) == 1, f"{len(final)} final events in {folder}")
    artifact = helpers.sha256(folder / "model.ptz").hex()
    check(artifact == final[0]["artifact_sha256"], "the artifact is not the one that the run reports")
    names = ("state_sha256", "artifact_sha256", "val_bpb", "steps", "tokens_seen")
    hashes = {name: final[0][name] for name in names}
    return End(hashes, without_seconds(logged, "step"), without_seconds(logged, "val"))


def check_steps(found: End, count: int) -> None:
    check([e["step"] for e in found.steps] == list(range(1, count + 1)), "steps are missing or logged twice")


def check_same(found: End, expected: End) -> None:
    """To the last bit."""
    check_steps(found, len(expected.steps))
    for one, other in zip(found.steps, expected.steps):
        check(one == other, f"a step differs: {one}, expected {other}")
    check(found.hashes == expected.hashes, f"the end differs: {found.hashes}, expected {expected.hashes}")
    check(found.vals == expected.vals, f"validations differ: {found.vals}, expected {expected.vals}")
