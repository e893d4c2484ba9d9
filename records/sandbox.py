"""A record's predictor in a process of its own, which sees nothing but itself and may use little."""

import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from records import bubblewrap, worker
from records.checks import printable
from records.text import MAX_VOCAB

HAS_PROC = Path("/proc/meminfo").exists()  # elsewhere only trusted records run, without limits on their sum
LEAST_FREE = 256 << 10  # KiB of memory that this machine must keep
TAIL = 2000  # bytes that are kept of what a record writes


class SandboxError(Exception):
    """The record broke a limit or the protocol, raised, or died. `kind` says which."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class NoSandbox(Exception):
    """bubblewrap is not here or does not work here, and nobody said that the record is trusted."""


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use."""

    memory: int = 8 << 30  # bytes of all its processes together
    tasks: int = 128  # processes and threads
    seconds: float = 1800.0  # wall time of the referee's waiting, start and all requests together
    output: int = 1 << 20  # bytes on stdout and stderr
    files: int = 1 << 28  # bytes of one file, and four times that of all of /tmp


@dataclass(frozen=True)
class Mode:
    """How a record's process runs."""

    device: str = "cpu"
    trust: bool = False  # without a sandbox
    compiling: bool = False  # let torch compile
    quick: bool = False  # only to look at what the model writes: nothing is hidden, torch computes plainly


def environment(mode: Mode) -> dict[str, str]:
    """Nothing of the caller's but the number of threads."""
    variables = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "record",
        "LANG": "C.UTF-8",
        "GOMP_SPINCOUNT": "1000",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    if not mode.compiling:
        variables["TORCH_COMPILE_DISABLE"] = "1"
    if "OMP_NUM_THREADS" in os.environ:
        variables["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
    return variables


# --- the watch --------------------------------------------------------------------------------------------


class Watchdog(threading.Thread):
    """Ends a process tree that uses more memory or tasks than it may; reads its output and bounds it."""

    def __init__(self, process: subprocess.Popen, limits: Limits):
        super().__init__(daemon=True)
        self.process = process
        self.limits = limits
        self.verdict = None  # (kind, message) once it ended the process
        self.tail = b""
        self.written = 0
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        out = self.process.stderr
        os.set_blocking(out.fileno(), False)
        while not self.stopped.is_set() and self.verdict is None:
            if select.select([out], [], [], 0.1)[0]:
                chunk = out.read(1 << 16) or b""
                self.written += len(chunk)
                self.tail = (self.tail + chunk)[-TAIL:]
                if not chunk:
                    self.stopped.wait(0.1)
            self.look()

    def look(self) -> None:
        """One look at the tree."""
        tasks, memory = usage(self.process.pid)
        if self.written > self.limits.output:
            self.end("output", f"wrote more than {self.limits.output} bytes to stdout")
        elif tasks > self.limits.tasks:
            self.end("tasks", f"has {tasks} processes and threads, at most {self.limits.tasks} are allowed")
        elif memory > self.limits.memory or low_memory():
            self.end("memory", f"holds {memory >> 20} MiB, at most {self.limits.memory >> 20} are allowed")

    def end(self, kind: str, message: str) -> None:
        self.verdict = self.verdict or (kind, message)
        kill(self.process)


def kill(process: subprocess.Popen) -> None:
    """End a process with its group; bubblewrap's first process takes the rest of the sandbox along."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def usage(root: int) -> tuple[int, int]:
    """(tasks, resident bytes) of a process and all that descend from it."""
    children = defaultdict(list)
    facts = {}
    for entry in os.listdir("/proc") if HAS_PROC else ():
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        children[int(stat[1])].append(int(entry))
        facts[int(entry)] = int(stat[17]), int(stat[21]) * resource.getpagesize()
    todo = [root]
    tasks = 0
    memory = 0
    while todo:
        pid = todo.pop()
        todo += children[pid]
        its_tasks, its_memory = facts.get(pid, (0, 0))
        tasks += its_tasks
        memory += its_memory
    return tasks, memory


def low_memory() -> bool:
    """Whether this machine runs out of memory, whoever holds it (files in memory belong to no process)."""
    found = HAS_PROC and re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    return bool(found) and int(found[1]) < LEAST_FREE


# --- the process ------------------------------------------------------------------------------------------


class Predictor:
    """The record behind the contract of records/README.md, every answer checked for size.

    Use as a context manager. Raises NoSandbox, and SandboxError for whatever the record does wrong.
    """

    def __init__(
        self,
        script: Path,
        artifact: Path,
        imports: Iterable[str],
        mode: Mode = Mode(),
        limits: Limits = Limits(),
    ):
        if not mode.trust and bubblewrap.find() is None:
            raise NoSandbox(
                "bubblewrap (bwrap) is not installed or does not work here, so foreign code is refused: "
                "apt-get install bubblewrap, or --trust the record"
            )
        self.limits = limits
        self.spent = 0.0
        self.stage = Path(tempfile.mkdtemp(prefix="bytegolf-record-"))
        try:
            self.fill_stage({"train_gpt.py": script, "model.ptz": artifact, "worker.py": worker.__file__})
            self.start(imports, mode)
        except BaseException:
            shutil.rmtree(self.stage)
            raise

    def fill_stage(self, sources: dict[str, Path]) -> None:
        """Copies of all that the sandbox sees of the record."""
        for name, source in sources.items():
            shutil.copyfile(source, self.stage / name)
            (self.stage / name).chmod(0o644)
        self.stage.chmod(0o755)

    def start(self, imports: Iterable[str], mode: Mode) -> None:
        """Start the worker. Its descriptors are three pipes to us, and none else of ours."""
        limits = self.limits
        inside = str(self.stage)
        prefix, keys = [], []
        if not mode.trust:
            prefix = bubblewrap.command(self.stage, imports, mode.device, limits.files, not mode.quick)
            inside = "/record"
            if bubblewrap.no_keys():
                keys = [os.memfd_create("no-keys")]  # bwrap reads it and closes it
                os.pwrite(keys[0], bubblewrap.no_keys(), 0)
                prefix += ["--seccomp", str(keys[0])]
            prefix.append("--")
        memory = 0 if mode.device == "cuda" else limits.memory
        tasks = 0 if mode.trust else limits.tasks
        user = 64000 + os.getpid() % 1000 if os.geteuid() == 0 and not mode.trust else 0
        numbers = int(mode.quick), memory, tasks, int(limits.seconds) * 4, limits.files, user
        python = [os.path.abspath(sys.executable), "-I", "-B", "-u", f"{inside}/worker.py"]
        self.process = subprocess.Popen(
            [*prefix, *python, inside, mode.device, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            pass_fds=keys,
            start_new_session=True,
            env=environment(mode),
        )
        for fd in keys:
            os.close(fd)
        self.requests = self.process.stdin.fileno()
        self.responses = self.process.stdout.fileno()
        for fd in (self.requests, self.responses):
            os.set_blocking(fd, False)
        self.watchdog = Watchdog(self.process, limits)

    def __enter__(self) -> "Predictor":
        try:
            facts = np.frombuffer(self.ask(worker.LOAD, np.zeros((0, 0)), 24), "<i8").tolist()
            self.vocab_size, self.max_len, adapts = facts
            self.adapts = bool(adapts)
            if not (1 <= self.vocab_size <= MAX_VOCAB and self.max_len >= 1):
                raise SandboxError(
                    "contract",
                    f"the predictor has vocab_size {self.vocab_size} and max_len {self.max_len}, expected "
                    f"1 to {MAX_VOCAB} and 1 at least",
                )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def said(self) -> str:
        """The last that the record wrote."""
        return printable(self.watchdog.tail.decode("utf-8", "replace"))

    def close(self) -> None:
        """End the process; nothing of it remains."""
        self.watchdog.stopped.set()
        self.watchdog.join()
        kill(self.process)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        shutil.rmtree(self.stage)

    # --- the contract -------------------------------------------------------------------------------------

    def nll(self, ids: np.ndarray) -> np.ndarray:
        """int64[B, T+1] -> float32[B, T]."""
        shape = ids.shape[0], ids.shape[1] - 1
        return np.frombuffer(self.ask(worker.NLL, ids, 4 * shape[0] * shape[1]), "<f4").reshape(shape)

    def logprobs(self, ids: np.ndarray, first: int = 0, end: int | None = None) -> np.ndarray:
        """int64[B, T] -> float32[B, end - first, V]: of the positions first .. end - 1 (default: all)."""
        end = ids.shape[1] if end is None else end
        shape = ids.shape[0], end - first, self.vocab_size
        data = self.ask(worker.LOGPROBS, ids, 4 * int(np.prod(shape)), first, end)
        return np.frombuffer(data, "<f4").reshape(shape)

    def adapt(self, ids: np.ndarray) -> None:
        self.ask(worker.ADAPT, ids, 0)

    # --- frames -------------------------------------------------------------------------------------------

    def ask(self, operation: int, ids: np.ndarray, size: int, first: int = 0, end: int = 0) -> bytes:
        """Send one request, receive its answer of exactly `size` bytes."""
        began = time.monotonic()
        deadline = began + self.limits.seconds - self.spent
        head = worker.REQUEST.pack(worker.REQUEST_MAGIC, operation, *ids.shape, first, end)
        self.send(head + ids.astype("<i8").tobytes(), deadline)
        magic, status, found = worker.RESPONSE.unpack(self.receive(worker.RESPONSE.size, deadline))
        if magic != worker.RESPONSE_MAGIC or status not in (0, 1):
            raise SandboxError("protocol", "the answer has no header of the protocol")
        if status == 1:
            text = self.receive(min(found, worker.MAX_MESSAGE), deadline).decode("utf-8", "replace")
            raise SandboxError("record", "the record raised " + printable(text))
        if found != size:
            raise SandboxError("protocol", f"the answer has {found} bytes, expected {size}")
        data = self.receive(size, deadline)
        self.spent += time.monotonic() - began
        return data

    def send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self.wait(self.requests, select.POLLOUT, deadline)
            try:
                view = view[os.write(self.requests, view[: 1 << 16]) :]
            except BrokenPipeError:
                self.fail()

    def receive(self, size: int, deadline: float) -> bytes:
        data = bytearray(size)
        filled = 0
        view = memoryview(data)
        while filled < size:
            self.wait(self.responses, select.POLLIN, deadline)
            got = os.readv(self.responses, [view[filled:]])
            if not got:
                self.fail()
            filled += got
        return bytes(data)

    def wait(self, fd: int, event: int, deadline: float) -> None:
        """Until the pipe is ready. Raises SandboxError at the deadline or when the watchdog has spoken.

        The deadline counts for a pipe that is ready, too: a byte now and then would be endless.
        """
        poll = select.poll()
        poll.register(fd, event)
        while True:
            if time.monotonic() > deadline:
                self.watchdog.end("time", f"took longer than {self.limits.seconds:g} seconds")
                self.fail()
            if poll.poll(100):
                return
            if self.watchdog.verdict:
                self.fail()

    def fail(self):
        """Raise what ended the process."""
        self.watchdog.stopped.wait(0.3)  # let the watchdog see the last output
        if self.watchdog.verdict:
            raise SandboxError(self.watchdog.verdict[0], "the record " + self.watchdog.verdict[1])
        kill(self.process)
        status = self.process.wait()
        last = f"the record's process ended (exit status {status}) {self.said[-300:]}"
        raise SandboxError("died", last.strip())
