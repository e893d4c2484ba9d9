"""What a script cannot take: memory, seconds and tasks by the kernel's limits, the machine beside another.

Each dishonest script here had its way once. The honest ones beside them pass.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest

from data.files import scratch_folder
from records.archive.runs import ClaimedRun
from records.sandbox import NoSandbox, cgroups, jobs, predictor
from records.sandbox.limits import Limits
from records.verify import training
from tests.kit import helpers, record_kit
from tests.kit.data_kit import call
from tests.records.test_referee import Stand
from tests.records.test_walls import run

sandboxed = pytest.mark.sandbox
bounded = pytest.mark.cgroups


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    return Stand(tmp_path_factory.mktemp("limits"))


# --- limits by the kernel ---------------------------------------------------------------------------------

SMALL = Limits(memory=256 << 20, processor=60, seconds=60)


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
    assert run(code, limits=SMALL, given={"/shard.bin": shard}) == "sum 0"


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


# --- cgroups ----------------------------------------------------------------------------------------------


def killed(code: str, **environment: str) -> list[str]:
    """What a referee prints before it is killed."""
    words = [sys.executable, "-c", f"import os\n{code}\n    os.kill(os.getpid(), 9)"]
    env = os.environ | environment
    done = subprocess.run(words, capture_output=True, text=True, cwd=helpers.ROOT, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.split()


@bounded
def test_a_group_goes_with_its_sandbox_and_after_a_killed_referee():
    group = cgroups.make(1 << 28, 40)
    cgroups.clean()  # a living referee's is left alone
    with subprocess.Popen([*group.words(), "sleep", "99"]) as process:
        ends = time.monotonic() + 5
        while group.usage().tasks < 1 and time.monotonic() < ends:
            time.sleep(0.01)
        group.remove()
        assert process.wait() == -signal.SIGKILL
    assert not any(folder.exists() for folder in group.folders)
    code = "from records.sandbox import cgroups\nif group := cgroups.make(1 << 28, 40):\n"
    left = killed(code + "    print(*group.folders, flush=True)")
    assert not left or os.path.exists(left[0])
    cgroups.clean()
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
    group = cgroups.Group(cgroups.V2, [tmp_path])
    group.bound(1 << 28, 40)
    bounds = {name: (tmp_path / name).read_text() for name in files if name.endswith(".max")}
    assert bounds == {"memory.max": str(1 << 28), "memory.swap.max": "0", "pids.max": "40"}
    assert group.usage() == cgroups.Usage(2.5, 1 << 28, 3, killed=True, refused=2)
    scope = cgroups.Scope()
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
    said = "another record runs on this machine: waiting for its sandbox to end\n"
    assert capsys.readouterr().err == (said if "text" in kinds else "")


def is_free(kind: int) -> bool:
    """Whether another sandbox could live here now, with a lock of this kind."""
    lock = os.open(predictor.lock_folder(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_NB | kind)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def test_scoring_takes_the_machine_and_training_shares_it(stand, tmp_path, monkeypatch):
    monkeypatch.setattr(predictor, "LOCKS", tmp_path)
    seen = []

    def look(*args, **options):
        seen.append((is_free(fcntl.LOCK_SH), is_free(fcntl.LOCK_EX)))
        raise NoSandbox

    for module in (jobs, training):
        monkeypatch.setattr(module, "watched", look)
    job = stand.job(stand.record())
    with pytest.raises(NoSandbox), job.predictor():
        pass
    record = SimpleNamespace(track=job.track, path=job.script.parent)
    monkeypatch.setattr(training, "sandbox_files", lambda *_: {})
    with pytest.raises(NoSandbox), training.training_sandbox(record, stand.data, {}):
        pass
    assert seen == [(False, False), (True, False)] and is_free(fcntl.LOCK_EX)


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
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, cwd=helpers.ROOT)
    assert done.stdout == "run and metrics.jsonl differ: 3000000000 steps and 1\n", done.stderr


@pytest.mark.parametrize("threads", ["0", "²", "9" * 5000, "1"])
def test_threads_of_a_log_that_this_machine_has_not_are_left_out(threads):
    log = f"run:x preset:y\n processor:{training.cpuinfo('model name')} threads:{threads} script_sha256:x"
    record = SimpleNamespace(runs={1: ClaimedRun("run", log, {}, b"")}, track={"device": "cpu"})
    given = training.settings(record, 1)
    assert given.get("OMP_NUM_THREADS") == ("1" if threads == "1" else None)
