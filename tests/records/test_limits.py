"""What a script can neither be paid for nor take: the price of its answers, the kernel's limits, the sandbox.

Each dishonest script here had its way once. The honest ones beside them pass.
"""

import ast
import contextlib
import errno
import fcntl
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from data.files import scratch_folder
from records.archive.runs import ClaimedRun
from records.referee import coder, scoring
from records.referee.text import Text
from records.sandbox import (
    MachineFull,
    NoSandbox,
    bubblewrap,
    cgroups,
    filesystem,
    installation,
    jobs,
    limits,
    predictor,
)
from records.sandbox.limits import Limits
from records.sandbox.predictor import Mode, watched
from records.verify import training
from tests.kit import helpers, record_kit
from tests.kit.data_kit import call
from tests.records.test_referee import Stand
from tests.records.test_walls import ended, run

sandboxed = pytest.mark.sandbox
bounded = pytest.mark.cgroups


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    return Stand(tmp_path_factory.mktemp("limits"))


# --- price ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1e3, 1e6, 1e17, -3e38, 3e38])
def test_a_price_is_that_of_exact_arithmetic(size):
    """Beside large logits too, where a small loss is left of two large numbers.

    Who answers the same large number for every token pays the vocabulary's logarithm.
    """
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(400, 50)) + size).astype(np.float32)
    ids = rng.integers(0, 50, 400)
    charge = coder.Charge(ids, writing=True)
    charge(logits, np.arange(400))
    shifted = logits.astype(np.longdouble) - logits.max(1, keepdims=True)
    exact = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(400), ids]
    assert charge.nats == pytest.approx(exact.astype(float), rel=1e-13, abs=1e-13)
    assert len(charge.payload()) >= exact.sum() / math.log(2) / 8 - 4
    if abs(size) > 1e16:
        assert charge.nats == pytest.approx(np.full(400, math.log(50)), rel=1e-15)


def test_bits_that_the_nats_do_not_explain_are_charged():
    text = Text([b"x" * 1000], np.zeros(401, np.int64))
    nats = np.full(401, 2.0)
    honest = scoring.Result(None, text, 4, 50, nats, bytes(289), 1.0, 1.0)  # 802 nats are 144.6 bytes
    assert honest.most_payload == pytest.approx(144.63 * 1.001 + 8, abs=0.1)
    assert honest.charged == pytest.approx(8 * 289 * math.log(2)) and honest.bpb == pytest.approx(2.312)
    for size in (0, 145, 150):  # no proof, and proofs of the usual size: the score is the same
        assert replace(honest, payload=bytes(size)).charged == nats.sum()


# --- limits by the kernel ---------------------------------------------------------------------------------

SMALL = Limits(memory=512 << 20, processor=60, seconds=60)
CHILDREN = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(40):
    read, write = os.pipe()
    if os.fork() == 0:
        while time.process_time() < 0.03:
            pass
        os._exit(0)
    os.close(write)
    os.read(read, 1)  # until it has ended
    os.close(read)
"""


@pytest.mark.slow
@sandboxed
@bounded
def test_children_whose_end_nobody_waits_for_are_counted():
    """Each lives shorter than the time between two looks of a watchdog."""
    with ended(CHILDREN, limits=SMALL) as watchdog:
        assert watchdog.process.returncode == 0 and watchdog.verdict is None
    assert watchdog.seconds > 40 * 0.03 and watchdog.kind.startswith("cgroup")


HOARDS = {  # memory that is in no process's account
    "memory files": """
import os
files = [os.memfd_create(str(i)) for i in range(8)]
for file in files:
    for _ in range(16):
        os.write(file, bytes(1 << 24))
print("alive with 2 GiB")
""",
    "page tables": """
import mmap
for _ in range(8):
    room = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | 0x4000, prot=mmap.PROT_READ)
    for place in range(0, 64 << 30, 2 << 20):
        room[place]
    globals().setdefault("rooms", []).append(room)
print("alive with 1 GiB")
""",
}


@sandboxed
@bounded
@pytest.mark.parametrize("kind", HOARDS)
def test_memory_that_no_process_holds_is_bounded(kind):
    with ended(HOARDS[kind], limits=SMALL) as watchdog:
        assert watchdog.process.returncode and b"alive" not in watchdog.tail
    assert watchdog.verdict == ("memory", "holds 512 MiB, at most 512 are allowed")


@sandboxed
@bounded
def test_mapped_files_are_no_memory_of_a_record(tmp_path):
    """Their pages are caches, which the kernel takes back."""
    shard = tmp_path / "shard.bin"
    with open(shard, "wb") as file:
        file.truncate(700 << 20)
    code = """
import numpy as np
tokens = np.memmap("/shard.bin", np.uint16, "r")
print("sum", sum(int(tokens[at : at + (1 << 22)].sum()) for at in range(0, len(tokens), 1 << 22)))
"""
    assert run(code, limits=replace(SMALL, memory=256 << 20), given={"/shard.bin": shard}) == "sum 0"


THREADS = """
import threading, numpy
event = threading.Event()
threads = [threading.Thread(target=event.wait) for _ in range(600)]
for thread in threads:
    thread.start()
print(threading.active_count(), (numpy.ones((400, 400)) @ numpy.ones((400, 400)))[0, 0])
event.set()
"""


@sandboxed
def test_threads_of_a_machine_with_128_cores_are_allowed():
    """numpy and torch start pools of their own, and each thread reserves a stack that it does not use."""
    assert run(THREADS, limits=Limits(processor=60, seconds=60)) == "601 400.0"


@sandboxed
@bounded
def test_tasks_are_bounded_by_the_kernel():
    code = "import os, time\nfor _ in range(60):\n    if os.fork() == 0:\n        time.sleep(9)\n"
    with ended(code, limits=replace(SMALL, tasks=40)) as watchdog:
        assert watchdog.verdict[0] == "tasks" and "at most 40 are allowed" in watchdog.verdict[1]


@bounded
def test_a_group_goes_with_its_sandbox_and_after_a_killed_referee():
    group = cgroups.make(1 << 28, 40)
    with subprocess.Popen([*group.words(), "sleep", "99"]) as process:
        ends = time.monotonic() + 5
        while group.usage().tasks < 1 and time.monotonic() < ends:
            time.sleep(0.01)
        cgroups.clean()  # a living referee's is left alone
        assert group.usage().tasks == 1
        group.remove()
        assert process.wait() == -signal.SIGKILL
    assert not any(folder.exists() for folder in group.folders)
    words = "import os, sys\nfrom records.sandbox import cgroups\n"
    words += "print(*cgroups.make(1 << 28, 40).folders, flush=True)\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, cwd=helpers.ROOT)
    left = done.stdout.split()
    assert done.returncode == -signal.SIGKILL and (not left or os.path.exists(left[0]))
    cgroups.clean()
    assert not any(map(os.path.exists, left))


KILLED = """
import os
from data.files import scratch_folder

with scratch_folder() as folder:
    (folder / "deep").mkdir()
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_the_next_referee_removes_the_folders_that_a_killed_one_left(tmp_path, monkeypatch):
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, cwd=helpers.ROOT, env=env
    )
    assert done.returncode == -signal.SIGKILL and [*map(str, tmp_path.iterdir())] == done.stdout.split()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as first, scratch_folder() as second:
        assert {*tmp_path.iterdir()} == {first, second}, "those of the living stay"
    assert not [*tmp_path.iterdir()]


def test_the_files_of_version_2_are_read_and_written(tmp_path):
    """As a kernel of that version has them; few machines have both versions."""
    group = cgroups.Group(cgroups.V2, tmp_path, tmp_path, tmp_path)
    group.bound(1 << 28, 40)
    assert (tmp_path / "memory.max").read_text() == str(1 << 28)
    assert (tmp_path / "pids.max").read_text() == "40" and (tmp_path / "memory.swap.max").read_text() == "0"
    files = {
        "cpu.stat": "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n",
        "memory.events": "low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n",
        "memory.peak": "268435456\n",
        "pids.current": "3\n",
        "pids.events": "max 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert group.usage() == cgroups.Usage(2.5, 1 << 28, 3, killed=True, refused=2)
    scope = cgroups.Scope()
    scope.make(1 << 28, 40)
    words = scope.words()
    assert words[:2] == ["systemd-run", "--scope"] and words[-1] == "--"
    assert {"--property=MemoryMax=268435456", "--property=TasksMax=40"} < set(words)
    assert ("--user" in words) == (os.geteuid() != 0)


@sandboxed
def test_a_full_machine_says_nothing_of_a_record(stand, tmp_path, monkeypatch):
    slow = "import time\ntime.sleep(1)\n"  # so that the watchdog looks before it ends
    job = stand.job(stand.foreign(tmp_path / "honest", slow))

    class Full:
        available = 1 << 20

    with monkeypatch.context() as patch:
        patch.setattr(limits.psutil, "virtual_memory", Full)
        with pytest.raises(MachineFull, match="machine is out of memory: make room"):
            stand.judge(job)
    monkeypatch.setattr(filesystem, "copy", Mock(side_effect=OSError(errno.ENOSPC, "")))
    with pytest.raises(MachineFull, match="has no memory for a sandbox's files: make room"):
        stand.judge(job)


@pytest.mark.slow
@sandboxed
def test_a_result_says_who_counted(stand, tmp_path, monkeypatch):
    job = stand.job(stand.foreign(tmp_path / "honest"))
    if cgroups.find() is not None:
        assert stand.judge(job)[0].limits.startswith("cgroup v")
    monkeypatch.setattr(cgroups, "find", lambda: None)
    result, checks = stand.judge(job)
    assert result.limits == "watchdog" and result.seconds > 0 and not record_kit.failed(checks)


# --- what the sandbox shows -------------------------------------------------------------------------------

LISTS = """
import os, sys
print(sorted(os.listdir(sys.argv[1])))
"""


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
    python = [str(root / "bin/python"), "-I", "-c", LISTS, str(root)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    monkeypatch.setattr(predictor, "installation", installation.installation.__wrapped__)
    with watched(python, {}, [], Mode(), SMALL, **pipes) as watchdog:
        watchdog.process.wait(timeout=30)
        time.sleep(0.3)
    said = watchdog.tail.decode()
    listed = said.partition("]")[0] + "]"
    assert set(ast.literal_eval(listed)) <= {"bin", "lib", "lib64", "include", "pyvenv.cfg"}, said
    assert {"bin", "pyvenv.cfg"} <= set(ast.literal_eval(listed)), said


def test_a_file_that_would_show_data_is_refused(stand, tmp_path):
    dataset = stand.data / "datasets"
    val = next(dataset.rglob("*_val_*.bin"))
    train = next(dataset.rglob("*_train_*.bin"))
    link = tmp_path / "a_train_000000.bin"
    link.symlink_to(val)
    (tmp_path / "text").symlink_to(second := stand.data / "second.jsonl")
    hidden = stand.job(stand.foreign(tmp_path / "job")).mode.hidden
    assert set(hidden) == {dataset, second}

    bubblewrap.check_given({"/x": train, "/y": b"bytes", "/z": helpers.ROOT / "train_gpt.py"}, hidden)
    for outside in (val, link, second, tmp_path / "text", helpers.ROOT / "data/datasets/new/x"):
        with pytest.raises(NoSandbox, match=f"would show {outside}, which is data, so it"):
            bubblewrap.check_given({"/x": outside}, hidden)


# --- one machine ------------------------------------------------------------------------------------------

LIVES = """
import sys
from records.sandbox.predictor import on_this_machine

with on_this_machine(sees_text=sys.argv[1] == "text"):
    print("lives", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def living(kind: str):
    """A process that holds the machine as a sandbox of this kind does, until the block ends."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = [sys.executable, "-c", LIVES, kind]
    with subprocess.Popen(words, text=True, cwd=helpers.ROOT, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.mark.parametrize("kinds", ["room room", "room text", "text room", "text text"])
def test_a_sandbox_that_sees_a_text_lives_alone(kinds):
    first, second = kinds.split()
    with living(first) as one:
        assert one.stdout.readline() == "lives\n"
        with living(second) as other:
            if kinds != "room room":
                assert other.stderr.readline().startswith("another record runs on this machine: waiting")
                assert not select.select([other.stdout], [], [], 0.3)[0]
                one.stdin.close()
            assert other.stdout.readline() == "lives\n"


def is_free(shared: bool) -> bool:
    """Whether another sandbox could live here now."""
    lock = os.open(predictor.lock_folder(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def test_scoring_takes_the_machine_and_a_room_shares_it(stand, tmp_path, monkeypatch):
    monkeypatch.setattr(predictor, "LOCKS", tmp_path)
    seen = []

    def look(*args, **options):
        seen.append((is_free(shared=True), is_free(shared=False)))
        raise NoSandbox

    monkeypatch.setattr(jobs, "watched", look)
    monkeypatch.setattr(training, "watched", look)
    job = stand.job(stand.foreign(tmp_path / "foreign"))
    with pytest.raises(NoSandbox), job.predictor():
        pass
    record = SimpleNamespace(track=job.track, path=tmp_path / "foreign")
    monkeypatch.setattr(training, "sandbox_files", lambda *_: {})
    with pytest.raises(NoSandbox), training.training_sandbox(record, stand.data, {}):
        pass
    assert seen == [(False, False), (True, False)] and is_free(shared=False)


# --- the folder -------------------------------------------------------------------------------------------


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
    command = [sys.executable, "-m", "records", "verify", str(folder), "--static"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=helpers.ROOT, timeout=60)
    assert "FAIL folder: submission.json is no plain file" in done.stdout, done
    assert "SKIP papers: nothing in such a folder is read\n" in done.stdout, done


def test_the_number_of_seeds_has_a_limit(folder):
    for seed in range(61):
        for name in ("train_seed{}.log", "metrics_seed{}.jsonl", "model_seed{}.ptz"):
            (folder / name.format(seed)).touch()
    said = call("records", "verify", folder, "--static", code=1)
    assert "FAIL folder: more than 183 files, expected those of 60 seeds at most\nSKIP papers: " in said


# --- numbers of a log -------------------------------------------------------------------------------------

STEPS = r"""
import resource
from records.archive.runs import parse_run
from records.verify.papers import wrong_steps

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
end = "steps: 3000000000\ntrain_seconds: 1\ntrain_flops: 1\n"
event = b'{"event": "step", "step": 1, "train_seconds": 1, "train_flops": 1}'
print(*wrong_steps(parse_run("run", f"run:x preset:y\n---\n{end}".encode(), event)))
"""


def test_a_log_of_three_billion_steps_takes_no_memory():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, cwd=helpers.ROOT)
    assert done.stdout == "metrics have 1 steps, expected 1 to 3000000000\n", done.stderr


@pytest.mark.parametrize("threads", ["0", "²", "9" * 5000, "1"])
def test_threads_of_a_log_that_this_machine_has_not_are_left_out(threads):
    log = f"run:x preset:y\n processor:{training.cpuinfo('model name')} threads:{threads} script_sha256:x"
    record = SimpleNamespace(runs={1: ClaimedRun("run", log, {}, b"")}, track={"device": "cpu"})
    given = training.settings(record, 1)
    assert given.get("OMP_NUM_THREADS") == ("1" if threads == "1" else None)
