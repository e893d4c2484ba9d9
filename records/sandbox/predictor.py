"""A record's predictor in a sandboxed process of its own, and the calls that ask it for logits."""

import contextlib
import os
import resource
import select
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data import shards
from data.command import printable
from data.files import locked
from records.sandbox import NoSandbox, SandboxError, bubblewrap
from records.sandbox import limits as account
from records.sandbox.bubblewrap import own_files
from records.sandbox.inside import worker
from records.sandbox.installation import Files, installation
from records.sandbox.limits import Limits, Watchdog, kill

MAX_FILES = 1024  # that a process has open at once: as many as most systems allow
MAX_ANSWER = 1 << 28  # bytes of logits
LOCKS = Path("/tmp")  # on every machine, and whatever a caller's TMPDIR


@dataclass(frozen=True)
class Mode:
    """How a record's process runs."""

    device: str = "cpu"
    trust: bool = False  # without a sandbox
    alone: bool = False  # it is fed one stream only
    scores: bool = False  # it sees a text, token by token
    hidden: tuple[Path, ...] = ()  # data that no sandbox may show, beside the repository's


# --- starting ---------------------------------------------------------------------------------------------

ALONE = {
    "OMP_NUM_THREADS": "1",  # one token's products are too small to be shared
    "NUMPY_MADVISE_HUGEPAGE": "0",  # few places of a table are touched: 4 KiB are cleared, not 2 MiB
}


def environment(mode: Mode) -> dict[str, str]:
    """The process's environment: of the caller's the number of threads, the choice of GPUs, and libraries."""
    callers = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "record",
        "LANG": "C.UTF-8",
        "GOMP_SPINCOUNT": "1000",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **(ALONE if mode.alone else {}),
        **{name: os.environ[name] for name in callers if name in os.environ},
    }


def sandbox_user() -> int:
    """Number of the user that a sandbox runs as; 0: the caller, who is not root."""
    return 64000 + os.getpid() % 1000 if os.geteuid() == 0 else 0


def lowered(mode: Mode, limits: Limits) -> list[str]:
    """The command line that runs what follows it within limits, and as another user if we are root."""
    values = {"NPROC": limits.tasks, "NOFILE": MAX_FILES, "FSIZE": limits.files, "CORE": 0}
    values["CPU"] = int(limits.processor) + 10  # of one process; the account is of all
    if mode.device == "cpu" and account.find() is None:
        # For want of a better bound: what a GPU's driver or 128 threads reserve is not what they use.
        values["DATA"] = limits.memory
    words = ["prlimit"]
    for name, value in values.items():
        hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
        words.append(f"--{name.lower()}={value if hard == resource.RLIM_INFINITY else min(value, hard)}")
    user = sandbox_user()
    groups = {path.stat().st_gid for path in bubblewrap.gpus(mode.device)} - {0}  # some systems ask for video
    kept = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    return ["setpriv", f"--reuid={user}", f"--regid={user}", kept, *words] if user else words


def memory_file() -> BinaryIO:
    """A file without a name, in memory if the system can do that."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("bytegolf"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def lock_folder() -> Path:
    """The folder whose lock all sandboxes of this machine take, whoever starts them. Raises NoSandbox."""
    folder = LOCKS / "bytegolf-sandboxes"
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o755)  # whatever the caller's umask: others lock it
    if folder.is_symlink() or not folder.is_dir():
        raise NoSandbox(f"{folder}: is no folder, expected the one that all sandboxes lock: remove it")
    return folder


@contextlib.contextmanager
def on_this_machine(sees_text: bool) -> Iterator[None]:
    """The machine for a sandbox that sees a text, or for one of several that see none, until the block ends.

    Caches and clocks carry bits between sandboxes that live at once, so one that trains must not live beside
    a text that it will be scored on. Raises NoSandbox.
    """
    waiting = "another record is scored or trained on this machine: waiting for its end; Ctrl-C is safe"
    with locked(lock_folder(), shared=not sees_text, waiting=waiting):
        yield


@contextlib.contextmanager
def watched(
    words: Sequence[str],
    given: Files,
    imports: Iterable[str],
    mode: Mode,
    limits: Limits,
    pass_fds: tuple[int, ...] = (),
    **pipes,
) -> Iterator[Watchdog]:
    """A command line in a sandbox and in a cgroup, if there are such, watched until the block ends.

    It sees the files `given`, the packages `imports` and Python. What it writes to stderr, or to stdout where
    that is the same, is bounded. `pipes` are Popen's stdin, stdout and stderr. Raises NoSandbox.
    """
    options = {"bufsize": 0, "start_new_session": True, "env": environment(mode), **pipes}
    with contextlib.ExitStack() as stack:
        group = account.make(limits.memory, limits.tasks)
        before = []
        if group:
            stack.callback(group.remove)
            before = group.words()
        if mode.trust:
            process = subprocess.Popen([*before, *words], pass_fds=pass_fds, cwd="/", **options)
            stack.enter_context(process)
            space = None
        else:
            if bubblewrap.find() is None:
                raise NoSandbox(f"foreign code is refused: {bubblewrap.why_none()}")
            bubblewrap.check_given(given, mode.hidden)
            files = installation(tuple(imports), mode.device, mode.scores) | given
            filters = stack.enter_context(memory_file())
            filters.write(bubblewrap.refused_calls())
            filters.seek(0)
            walls = [*bubblewrap.command(files, mode.device), "--seccomp", str(filters.fileno()), "--"]
            line = [*walls, *lowered(mode, limits), *words]
            fds = (*pass_fds, filters.fileno())
            own = own_files(line, files, 4 * limits.files, before, fds, **options)
            process, space = stack.enter_context(own)
        watchdog = Watchdog(process, limits, group, space)
        stack.callback(watchdog.stop)
        yield watchdog


# --- the contract -----------------------------------------------------------------------------------------


class RemotePredictor:
    """The record behind the contract of records/referee/README.md, every answer checked for size.

    The shared memory with the answers is read here like a file, and never mapped. So a record that truncates
    it, or writes while it is read, damages its own answer and nothing else.
    """

    def __init__(self, memory: BinaryIO, watchdog: Watchdog, most_rows: int):
        self.process = watchdog.process
        self.memory = memory
        self.watchdog = watchdog
        self.answers = [np.zeros(0, np.float32)] * 2  # the last one and the one before
        self.early = select.poll()
        self.early.register(self.process.stdout, select.POLLIN)
        self.watchdog.asked = time.monotonic()
        self.vocab_size, self.rows = size, rows = self.receive()
        if not (0 < size <= shards.IDS and 0 < rows <= most_rows and 4 * rows * size <= MAX_ANSWER):
            raise SandboxError(
                "contract",
                f"the predictor has vocab_size {size} and rows {rows}, expected 1 to {shards.IDS} and "
                f"1 to {most_rows}, and answers of at most {MAX_ANSWER >> 20} MiB",
            )

    @property
    def seconds(self) -> float:
        """Processor seconds of all its processes; exact once it is closed."""
        return self.watchdog.seconds

    @property
    def limits(self) -> str:
        """Who counts and bounds it: "cgroup v1", "cgroup v2" or "watchdog"."""
        return self.watchdog.kind

    def start(self, rows: int) -> np.ndarray:
        """float32[rows, V], a copy, valid until the call after the next: logits of each first token."""
        return self.logits(rows, worker.REQUEST.pack(False, rows))

    def step(self, ids: np.ndarray) -> np.ndarray:
        """int64[rows] -> float32[rows, V] as above: fed a token of each stream, the logits of the next."""
        return self.logits(len(ids), worker.REQUEST.pack(True, len(ids)) + ids.astype("<i8").tobytes())

    def logits(self, rows: int, request: bytes) -> np.ndarray:
        """Ask, and copy the answer out of the shared memory, so that later writes change nothing."""
        self.send(request)
        self.receive()
        self.answers.reverse()
        if self.answers[0].shape != (rows, self.vocab_size):
            self.answers[0] = np.empty((rows, self.vocab_size), "<f4")
        answer = self.answers[0]
        if os.preadv(self.memory.fileno(), [answer], 0) != answer.nbytes:
            raise SandboxError("protocol", "the record has cut the memory of its answers")
        finite = np.isfinite(answer).all(1)
        if not finite.all():
            raise SandboxError("numbers", f"the logits of row {finite.argmin()} are not finite")
        return answer

    def send(self, request: bytes) -> None:
        """Send a request. Raises SandboxError, also if the record answered before it was asked."""
        self.watchdog.asked = time.monotonic()
        if any(event & select.POLLIN for _, event in self.early.poll(0)):
            raise SandboxError("protocol", "the record answered before it was asked")
        try:
            while request:
                request = request[self.process.stdin.write(request) :]
        except BrokenPipeError:
            self.fail()

    def receive(self) -> tuple[int, int]:
        """The vocabulary's size and the rows that an answer names. Raises SandboxError.

        The pipe waits: when the watchdog ends the record, the pipe is closed, and the wait is over.
        """
        frame = self.process.stdout.read(worker.RESPONSE.size)
        if not frame:
            self.fail()
        if len(frame) < worker.RESPONSE.size or frame[:4] != worker.MAGIC:
            raise SandboxError("protocol", "the answer is none of the protocol")
        self.watchdog.asked = None
        _, failed, *facts, message = worker.RESPONSE.unpack(frame)
        if failed:
            text = message.rstrip(b"\0").decode("utf-8", "replace")
            raise SandboxError("record", "the record raised " + printable(text))
        return tuple(facts)

    def fail(self):
        """Raise SandboxError with what ended the process."""
        self.watchdog.stopped.wait(0.3)  # let the watchdog see the last output
        self.watchdog.check_machine()
        if self.watchdog.verdict:
            raise SandboxError(self.watchdog.verdict[0], "the record " + self.watchdog.verdict[1])
        kill(self.process)
        status = self.process.wait()
        said = printable(self.watchdog.tail.decode("utf-8", "replace"))[-300:]
        raise SandboxError("died", f"the record's process ended (exit status {status}) {said}".strip())
