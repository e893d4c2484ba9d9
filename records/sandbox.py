"""A record's predictor in a process of its own, which sees nothing but itself and may use little.

bubblewrap gives it a file system of the record's script and artifact, the Python installation and a C++
compiler, all read-only, an empty /tmp, no network and no other process. What stands in the installed
packages of the demo corpus is not there as text: modules that torch needs are there as bytecode without
docstrings, the rest is not.
"""

import atexit
import errno
import functools
import importlib.metadata
import importlib.util
import marshal
import os
import platform
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import worker
from common import MAX_VOCAB, printable as clean

CORPUS_PACKAGES = (
    "sympy networkx mpmath Jinja2 fsspec filelock huggingface_hub anyio click packaging idna httpx2 "
    "httpcore2 h11 tqdm"
).split()  # as in data/prepare.py; a test compares the two
HAS_PROC = Path("/proc/meminfo").exists()   # elsewhere only trusted records run, without limits on their sum
KEY_CALLS = {"x86_64": (0xC000003E, 248, 249, 250), "aarch64": (0xC00000B7, 217, 218, 219)}   # audit's number
VENDORS = {"setuptools"}        # needed by torch.compile, and holds copies of corpus packages
FOREIGN_FOLDERS = {"tests", "benchmarks", "testing"}  # of packages: nothing imports them


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
    memory: int = 8 << 30       # bytes of all its processes together
    tasks: int = 128            # processes and threads
    seconds: float = 1800.0     # wall time of the referee's waiting, start and all requests together
    output: int = 1 << 20       # bytes on stdout and stderr
    files: int = 1 << 28        # bytes of one file, and four times that of all of /tmp


# --- what the sandbox sees --------------------------------------------------------------------------------

@functools.cache
def bubblewrap() -> str | None:
    """Path of bwrap if it works here, else None."""
    path = shutil.which("bwrap")
    if path is None:
        return None
    test = [path, "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--proc", "/proc",
            "--dev", "/dev", "true"]
    return path if subprocess.run(test, capture_output=True).returncode == 0 else None


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


CORPUS = {canonical(name) for name in CORPUS_PACKAGES}


@functools.cache
def distributions(roots: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions by name that `roots` need, themselves included."""
    found, todo = {}, list(roots)
    while todo:
        name = canonical(todo.pop())
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue            # of another platform, or optional
        for line in found[name].requires or ():
            if "extra ==" not in line:
                todo.append(re.match(r"[\w.-]+", line)[0])
    return found


def top_level(distribution: importlib.metadata.Distribution) -> set[str]:
    """Names in site-packages that belong to a distribution."""
    return {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}


@functools.cache
def bytecode(name: str) -> Path:
    """A folder with the modules of one distribution as bytecode without docstrings and asserts."""
    folder = Path(tempfile.mkdtemp(prefix="bytegolf-bytecode-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    for file in importlib.metadata.distribution(name).files:
        if len(file.parts) < 2 or FOREIGN_FOLDERS & set(file.parts) or ".." in file.parts:
            continue
        target = folder / Path(*file.parts)
        if file.suffix == ".py":
            text = Path(file.locate()).read_bytes()
            code = compile(text, str(file), "exec", optimize=2, dont_inherit=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            data = importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
            target.with_suffix(".pyc").write_bytes(data)
        elif file.suffix == ".txt" and name in VENDORS:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), target)
    return folder


def packages(imports: tuple[str, ...]) -> list[str]:
    """Options of bwrap that put the needed packages into an otherwise empty site-packages."""
    sites = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    hidden = sites | {str(path) for path in Path(sys.base_prefix).glob("lib*/python*/*-packages")}
    options = [part for site in sorted(hidden) for part in ("--tmpfs", site)]
    seen = set()
    for name, distribution in distributions((*imports, "packaging", *VENDORS)).items():
        for top in sorted(top_level(distribution) - seen):
            seen.add(top)
            source = target = distribution.locate_file(top)
            if name in CORPUS | VENDORS:
                source = bytecode(name) / top
            if source.exists():
                options += ["--ro-bind", str(source), str(target)]
    return options


def libraries() -> list[Path]:
    """Shared libraries and the compiler's own files: not all of /usr/lib, where anything may be installed."""
    folders = [
        path for path in map(Path, ("/usr/lib", "/usr/lib64", "/usr/libexec")) if not path.is_symlink()
    ]
    children = [child for folder in folders if folder.is_dir() for child in sorted(folder.iterdir())]
    return [child for child in children if child.name.startswith("gcc") or child.name.endswith("-linux-gnu")
            or child.is_file() and ".so" in child.name]


def bind(path: Path) -> list[str]:
    """Options of bwrap for a read-only path and folders above it that everybody may pass."""
    parents = [
        part for parent in reversed(path.parents) for part in ("--perms", "0755", "--dir", str(parent))
    ]
    return [*parents, "--ro-bind", str(path), str(path)] if path.exists() else []


def system() -> list[str]:
    """Options of bwrap for libraries, the C++ compiler and Python itself."""
    found = [Path("/usr/bin"), Path("/usr/include"), *libraries(), Path("/etc/ld.so.cache"),
             Path("/etc/alternatives"), Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node")]
    options = [part for path in found for part in bind(path)]
    for path in map(Path, ("/usr/lib64", "/bin", "/sbin", "/lib", "/lib64")):
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.parent == Path("/"):
            options += bind(path)
    prefixes = {
        Path(p): None for p in (sys.base_prefix, sys.prefix, sysconfig.get_path("stdlib")) if p != "/usr"
    }
    return options + [
        part for path in prefixes if not set(prefixes) & set(path.parents) for part in bind(path)
    ]


def gpu_devices() -> list[str]:
    return [
        part for path in sorted(Path("/dev").glob("nvidia*")) for part in ("--dev-bind", str(path), str(path))
    ]


def bwrap_command(
    stage: Path, imports: tuple[str, ...], device: str, limits: Limits, seccomp: list[str]
) -> list[str]:
    """The command line before Python's."""
    rights = ["--cap-drop", "ALL"]
    if os.geteuid() == 0:       # root needs no user namespace; the worker becomes another user at once
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    space = ["--size", str(4 * limits.files), "--perms", "1777", "--tmpfs"]
    gpus = gpu_devices() if device == "cuda" else []
    return [
        bubblewrap(),
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        *gpus,
        *space,
        "/dev/shm",
        "--remount-ro",
        "/dev",
        *space,
        "/tmp",
        *system(),
        *packages(imports),
        "--ro-bind",
        str(stage),
        "/record",
        "--chdir",
        "/tmp",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--hostname",
        "sandbox",
        "--die-with-parent",
        "--new-session",
        *rights,
        *seccomp,
        "--",
    ]


def no_keys() -> bytes:
    """A seccomp program (struct sock_filter[]) that refuses the kernel's key rings: they outlive a sandbox,
    so the process that is scored could tell the one that is probed what text it saw."""
    if platform.machine() not in KEY_CALLS:
        return b""
    architecture, *calls = KEY_CALLS[platform.machine()]
    load, equal, at_least, result, refuse = 0x20, 0x15, 0x35, 0x06, 0x00050000 | errno.EPERM
    last = len(calls) + 1       # instructions between a comparison and the refusal at the end
    program = [(load, 0, 0, 4), (equal, 0, last + 2, architecture), (load, 0, 0, 0),
               (at_least, last, 0, 0x40000000)]       # another architecture's numbers are refused as a whole
    program += [(equal, last - 1 - i, 0, number) for i, number in enumerate(calls)]
    program += [(result, 0, 0, 0x7FFF0000), (result, 0, 0, refuse)]
    return b"".join(struct.pack("<HBBI", *line) for line in program)


def environment(compiling: bool) -> dict[str, str]:
    """Nothing of the caller's but the number of threads."""
    kept = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    off = {} if compiling else {"TORCH_COMPILE_DISABLE": "1"}
    return {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "USER": "record", "LANG": "C.UTF-8",
            "GOMP_SPINCOUNT": "1000", "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",
            "TORCHINDUCTOR_COMPILE_THREADS": "1", **off, **kept}


# --- the process ------------------------------------------------------------------------------------------

class Watchdog(threading.Thread):
    """Ends a process tree that uses more memory or tasks than it may; reads its output and bounds it."""
    def __init__(self, process: subprocess.Popen, limits: Limits):
        super().__init__(daemon=True)
        self.process, self.limits, self.verdict, self.tail, self.written = process, limits, None, b"", 0
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        out = self.process.stdout
        os.set_blocking(out.fileno(), False)
        while not self.stopped.is_set() and self.verdict is None:
            if select.select([out], [], [], 0.1)[0]:
                chunk = out.read(1 << 16) or b""
                self.written += len(chunk)
                self.tail = (self.tail + chunk)[-2000:]
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
    children, facts = defaultdict(list), {}
    for entry in os.listdir("/proc") if HAS_PROC else ():
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue        # it has ended meanwhile
            children[int(stat[1])].append(int(entry))
            facts[int(entry)] = int(stat[17]), int(stat[21]) * resource.getpagesize()
    todo, tasks, memory = [root], 0, 0
    while todo:
        pid = todo.pop()
        todo += children[pid]
        here = facts.get(pid, (0, 0))
        tasks, memory = tasks + here[0], memory + here[1]
    return tasks, memory


def low_memory() -> bool:
    """Whether this machine runs out of memory, whoever holds it (files in memory belong to no process)."""
    found = HAS_PROC and re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    return bool(found) and int(found[1]) < 256 << 10


class Predictor:
    """The record behind the contract of DESIGN.md, every answer checked for size. Use as a context manager.

    Raises NoSandbox, and SandboxError for whatever the record does wrong.
    """
    def __init__(
        self,
        script: Path,
        artifact: Path,
        imports: list[str],
        device: str = "cpu",
        trust: bool = False,
        compiling: bool = False,
        limits: Limits = Limits(),
    ):
        if not trust and bubblewrap() is None:
            raise NoSandbox(
                "bubblewrap (bwrap) is not installed or does not work here, so foreign code is refused: "
                "apt-get install bubblewrap, or --trust the record"
            )
        self.limits, self.spent = limits, 0.0
        self.stage = Path(tempfile.mkdtemp(prefix="bytegolf-record-"))
        try:
            for source, name in ((script, "train_gpt.py"), (artifact, "model.int8.ptz"),
                                 (Path(worker.__file__), "worker.py")):
                shutil.copyfile(source, self.stage / name)
                (self.stage / name).chmod(0o644)
            self.stage.chmod(0o755)
            self.start(tuple(imports), device, trust, compiling)
        except BaseException:
            shutil.rmtree(self.stage)
            raise

    def start(self, imports: tuple[str, ...], device: str, trust: bool, compiling: bool) -> None:
        inside = str(self.stage) if trust else "/record"
        keys = os.memfd_create("no-keys") if not trust and no_keys() else None
        if keys is not None:
            os.pwrite(keys, no_keys(), 0)
        seccomp = [] if keys is None else ["--seccomp", str(keys)]
        command = [] if trust else bwrap_command(self.stage, imports, device, self.limits, seccomp)
        there, self.requests = os.pipe()
        self.responses, back = os.pipe()
        user = 64000 + os.getpid() % 1000 if os.geteuid() == 0 and not trust else 0
        memory, tasks = (0 if device == "cuda" else self.limits.memory), (0 if trust else self.limits.tasks)
        numbers = there, back, memory, tasks, int(self.limits.seconds) * 4, self.limits.files, user
        command += [
            sys.executable,
            "-I",
            "-B",
            "-u",
            f"{inside}/worker.py",
            inside,
            device,
            *map(str, numbers),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd="/",
            stderr=subprocess.STDOUT,
            pass_fds=(there, back) if keys is None else (there, back, keys),
            start_new_session=True,
            env=environment(compiling),
        )
        for fd in (there, back) if keys is None else (there, back, keys):
            os.close(fd)
        for fd in (self.requests, self.responses):
            os.set_blocking(fd, False)
        self.watchdog = Watchdog(self.process, self.limits)

    def __enter__(self) -> "Predictor":
        try:
            facts = np.frombuffer(self.ask(worker.LOAD, np.zeros((0, 0)), 24), "<i8").tolist()
        except BaseException:
            self.close()
            raise
        self.vocab_size, self.max_len, self.adapts = facts[0], facts[1], bool(facts[2])
        if not (1 <= self.vocab_size <= MAX_VOCAB and self.max_len >= 1):
            self.close()
            raise SandboxError("contract", f"the predictor has vocab_size {self.vocab_size} and max_len "
                               f"{self.max_len}, expected 1 to {MAX_VOCAB} and 1 at least")
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def said(self) -> str:
        """The last that the record wrote."""
        return clean(self.watchdog.tail.decode("utf-8", "replace"))

    def close(self) -> None:
        """End the process; nothing of it remains."""
        self.watchdog.stopped.set()
        self.watchdog.join()
        kill(self.process)
        self.process.wait()
        self.process.stdout.close()
        for fd in (self.requests, self.responses):
            os.close(fd)
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
        return np.frombuffer(
            self.ask(worker.LOGPROBS, ids, 4 * int(np.prod(shape)), first, end), "<f4"
        ).reshape(shape)

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
            raise SandboxError("record", "the record raised " + clean(text))
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
                view = view[os.write(self.requests, view[:1 << 16]):]
            except BrokenPipeError:
                self.fail()

    def receive(self, size: int, deadline: float) -> bytes:
        data, filled = bytearray(size), 0
        view = memoryview(data)
        while filled < size:
            self.wait(self.responses, select.POLLIN, deadline)
            got = os.readv(self.responses, [view[filled:]])
            if not got:
                self.fail()
            filled += got
        return bytes(data)

    def wait(self, fd: int, event: int, deadline: float) -> None:
        """Until the pipe is ready. Raises SandboxError at the deadline or when the watchdog has spoken. The
        deadline counts for a pipe that is ready too: a byte now and then would be endless."""
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
        self.watchdog.stopped.wait(0.3)       # let the watchdog see the last output
        if self.watchdog.verdict:
            raise SandboxError(self.watchdog.verdict[0], "the record " + self.watchdog.verdict[1])
        kill(self.process)
        status = self.process.wait()
        raise SandboxError(
            "died", f"the record's process ended (exit status {status}) {self.said[-300:]}".strip()
        )
