"""The script as a process that a test watches, signals and kills, and what its run leaves behind."""

import contextlib
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.kit import helpers

FAULTS = helpers.ROOT / "tests/kit/faults.py"
PATIENCE = 200.0  # seconds that any process gets: nothing here takes a tenth of it
FIRST_STEP = re.compile(r"^step:\d+/\d+ train_loss", re.M)


def status(pid: int) -> str:
    """The state of a process, as psutil names it, or "gone"."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status()
    return "gone"


def ended(pid: int) -> bool:
    return status(pid) in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, "gone")


class Launch:
    """A command started in `cwd`, by default the script; what it prints goes to files there.

    `ranks`: under torchrun. `provoke`: with the faults of tests/kit/faults.py.
    """

    def __init__(
        self,
        cwd: Path,
        env: dict[str, str],
        ranks: int = 0,
        provoke: str = "",
        command: list[str] | None = None,
    ):
        cwd.mkdir(parents=True, exist_ok=True)
        number = len([*cwd.glob("*.out")])
        self.cwd, self.files = cwd, (cwd / f"{number}.out", cwd / f"{number}.err")
        self.began, self.first_step = time.monotonic(), None
        command = command or helpers.command(ranks, FAULTS if provoke else helpers.SCRIPT)
        env = helpers.clean_environment(PYTHONPATH=helpers.ROOT, PROVOKE=provoke, **env)
        with open(self.files[0], "w") as out, open(self.files[1], "w") as err:
            places = {"cwd": cwd, "stdout": out, "stderr": err}
            self.process = subprocess.Popen(command, env=env, start_new_session=True, **places)

    @property
    def out(self) -> str:
        return self.files[0].read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        return self.files[1].read_text(encoding="utf-8", errors="replace")

    def runs(self) -> bool:
        """Whether it still runs; notes when its first step was logged."""
        running = self.process.poll() is None
        if self.first_step is None and FIRST_STEP.search(self.out):
            self.first_step = time.monotonic() - self.began
        return running

    def wait(self, seconds: float = PATIENCE, until: Callable[[], Any] = lambda: False) -> int | None:
        """The exit code, or None after so many seconds or when `until` holds."""
        end = time.monotonic() + seconds
        while self.runs():
            if until():
                return None
            if time.monotonic() > end:
                if seconds < PATIENCE:
                    return None
                self.kill()
                raise AssertionError(f"still ran after {seconds:.0f} s")
            time.sleep(0.01)
        return self.process.returncode

    def wait_for_step(self, more: float = 0.0) -> int | None:
        """Until the first step is logged and some seconds more; the exit code if it ends before."""
        code = self.wait(until=lambda: self.first_step is not None)
        return code if code is not None else self.wait(more)

    def signal_at(self, words: str, number: int) -> None:
        """Send a signal when the log has these words."""
        code = self.wait(until=lambda: words in self.out)
        assert code is None, f"it ended before {words}: {self.err}"
        self.process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        """All processes below it, parents first."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        """SIGKILL to all its processes, parents first: as when the power fails."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [self.process, *self.children()]:
                each.kill()
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks under torchrun."""
        found: dict[int, int] = {}
        for each in self.children():
            with contextlib.suppress(psutil.Error):
                if rank := each.environ().get("RANK"):
                    found.setdefault(int(rank), each.pid)
        return found

    def need(self, *codes: int) -> helpers.ScriptRun:
        """It ends with one of these exit codes, and without a traceback of the script's."""
        code = self.wait()
        assert code in codes, f"exit {code}, expected {codes}: {self.err[-1500:]}"
        assert "Traceback" not in self.err.split("torch/distributed")[0], f"a traceback: {self.err[-1500:]}"
        return helpers.ScriptRun(code, self.out, self.err, self.cwd)


# --- lost ranks -------------------------------------------------------------------------------------------


def all_ranks(run: Launch, world: int) -> dict[int, int]:
    """Process ids of all ranks, once each trains."""
    run.wait_for_step()
    found = run.ranks()
    assert len(found) == world, f"ranks {found}: {run.err[-1500:]}"
    return found


# --- what a run leaves ------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    """All files below it, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_seconds(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind, of which nothing but seconds may differ between two runs that did the same."""
    found = helpers.events(folder, kind)
    return [{k: v for k, v in event.items() if "seconds" not in k} for event in found]


def is_done(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and b'"event": "final"' in metrics.read_bytes()


def end_of(folder: Path) -> dict[str, Any]:
    """What must be equal of two finished runs that did the same, to the last bit.

    Each step is logged once, and the artifact is the one that the run reports.
    """
    (final,) = helpers.events(folder, "final")
    assert helpers.sha256(folder / "model.ptz").hex() == final["artifact_sha256"]
    steps = without_seconds(folder, "step")
    assert [event["step"] for event in steps] == list(range(1, final["steps"] + 1))
    names = ("state_sha256", "artifact_sha256", "val_bpb", "steps", "tokens_seen")
    end = {name: final[name] for name in names}
    return end | {"logged": steps, "vals": without_seconds(folder, "val")}
