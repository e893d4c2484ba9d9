"""The referee: what it makes of honest and dishonest predictors, of texts, and of files that are no text.

The predictors here are foreign: a bigram model in numpy, and changes to it. test_records.py lets the
referee score a record of the real script; test_walls.py has what a sandbox shows and allows.
"""

import errno
import itertools
import json
import math
import os
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies

from data.command import DataError
from records.archive.tracks import load_track
from records.referee import coder, scoring
from records.referee.sample import sample
from records.referee.scoring import Result
from records.referee.text import Text, load_tokenizer, validation_text
from records.sandbox import MachineFull, NoSandbox, bubblewrap, jobs
from records.sandbox import limits as watch
from records.sandbox.inside import worker
from records.sandbox.jobs import PredictorJob, find_job
from tests.kit import helpers, record_kit
from tests.kit.data_kit import call, refused, start
from tests.kit.record_kit import TRACK, failed

sandboxed = pytest.mark.sandbox
slow = pytest.mark.slow
SIZE = 400  # of the tiny vocabulary
NAME = b"12345678"  # of a record, in a compressed file
ANSWER = worker.RESPONSE.pack(worker.MAGIC, 0, 1 << 60, 1 << 60, b"")
ATTACKER = """
import contextlib, ctypes, mmap, os, pickle, signal, socket, threading, time
links = {}
for fd in range(3, 99):
    if os.path.lexists(f"/proc/self/fd/{fd}"):
        links[fd] = os.readlink(f"/proc/self/fd/{fd}")
memory = next(fd for fd, link in links.items() if "memfd" in link)
pipe = max(fd for fd, link in links.items() if "pipe" in link)
def answers(change):
    Bigram.step = lambda self, ids: change(self.table[ids])
def claims(name, value):
    setattr(Bigram, name, property(lambda self: value, lambda self, own: None))
"""


class Stand:
    """Two tiny tracks: one whose records need numpy alone, one with all packages; and records for them."""

    def __init__(self, root: Path):
        self.root = root
        self.data = root / "data"
        self.corpus = record_kit.make_data(self.data)
        self.second = self.data / "second.jsonl"
        record_kit.make_track(root / TRACK, self.corpus, imports=["numpy"])
        record_kit.make_track(root / "track_torch", self.corpus)
        options = {"--track": root / TRACK, "--dataset": "tiny_sp400", "--data": self.data}
        self.place = [*itertools.chain(*options.items()), "--trust"]  # for a command

    def record(self, code: str = "") -> Path:
        """The bigram model, and behind it code that changes it. Paths outside of the sandbox have names."""
        val = next(self.corpus.data_path.glob("*_val_*"))
        train = str(val).replace("_val_", "_train_")
        places = {"VAL": str(val), "TRAIN": train, "SECOND": str(self.second), "REPO": str(helpers.ROOT)}
        places |= {"REFEREE": os.getpid(), "ANSWER": ANSWER}
        lines = [f"{name} = {value!r}" for name, value in places.items()]
        folder = Path(tempfile.mkdtemp(dir=self.root)) / "record"
        return record_kit.foreign(self.corpus, folder, ATTACKER + "\n".join([*lines, code]) if code else "")

    def job(self, record: Path, track: str = TRACK, limits: dict | None = None, **options) -> PredictorJob:
        options |= {"data": self.data, "second": self.second, "dataset": "tiny_sp400"}
        limits = watch.Limits(**{"processor": 200, "seconds": 200, **(limits or {})})
        return replace(find_job(record, self.root / track, **options), limits=limits)

    def judge(self, job: PredictorJob | str, proof: bool = False, **options):
        """(result, checks) of a job, or of code that changes the bigram model."""
        if isinstance(job, str):
            job = self.job(self.record(job), **options)
        text = validation_text(job.track, self.data)
        lines = list(scoring.referee(job, text, proof))
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
    return stand.record()


@pytest.fixture(scope="session")
def tokenizer(stand):
    return load_tokenizer(stand.corpus.tokenizer_path)


# --- honest -----------------------------------------------------------------------------------------------


@slow
@sandboxed
def test_a_foreign_model_is_scored_and_proven(stand, bigram):
    result, checks = stand.judge(stand.job(bigram), True)
    assert failed(checks) == set(), "\n".join(map(str, checks))
    assert {line.name for line in checks} == record_kit.REFEREE
    assert result.bpb == pytest.approx(stand.bigram_bpb(), rel=1e-6)
    assert result.rows == 16 and 0 < result.seconds < 60
    if watch.find() is not None:
        assert result.limits.startswith("cgroup v")


class Fed:
    """Notes what it is fed and what it answers, which depends on all that it was fed before."""

    vocab_size = 30

    def __init__(self, scale: float):
        self.scale = scale

    def start(self, rows: int) -> np.ndarray:
        self.rows = rows
        self.fed, self.answers = [], []
        return self.answer()

    def step(self, ids: np.ndarray) -> np.ndarray:
        assert ids.shape == (self.rows,) and ids.dtype == np.int64
        self.fed.append(ids.copy())
        return self.answer()

    def answer(self) -> np.ndarray:
        known = sum((at + 1) * int(ids.sum()) for at, ids in enumerate(self.fed))
        rng = np.random.default_rng([known, len(self.fed)])
        logits = (rng.normal(size=(self.rows, self.vocab_size)) * self.scale).astype(np.float32)
        self.answers.append(logits.astype(np.float64))
        return logits


@given(
    strategies.integers(1, 60), strategies.integers(1, 60), strategies.sampled_from([0, 0.1, 3, 1e4, 1e30])
)
def test_every_token_is_charged_once_and_fed_afterwards(total, rows, scale):
    rows = min(rows, total)
    tokens = np.random.default_rng(total).integers(0, 30, total)
    starts = coder.stream_starts(total, rows)
    predictor = Fed(scale)
    charge = coder.Charge(tokens, writing=True)
    assert np.array_equal(coder.code(predictor, starts, tokens[0], charge), tokens)
    streams = np.array_split(tokens, rows)
    lengths = [len(stream) for stream in streams]
    assert np.diff(starts).tolist() == lengths
    expected = np.array([np.pad(stream, (0, lengths[0] - len(stream))) for stream in streams])
    assert np.array_equal(np.reshape(predictor.fed, (-1, rows)).T, expected[:, :-1])
    logits = np.stack(predictor.answers, 1)
    logits -= np.logaddexp.reduce(logits, 2, keepdims=True)
    paid = -np.take_along_axis(logits, expected[:, :, None], 2)[:, :, 0]
    nats = np.concatenate([row[:length] for row, length in zip(paid, lengths)])
    nats[0] = 0
    assert charge.nats == pytest.approx(nats, rel=1e-9, abs=1e-9)
    decoder = coder.Decoder(charge.payload())
    assert np.array_equal(coder.code(Fed(scale), starts, tokens[0], decoder), tokens)
    assert len(charge.payload()) <= 1.001 * nats.sum() / math.log(2) / 8 + 8


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
    honest = Result(None, text, 4, 50, nats, bytes(289), 1.0, 1.0)  # 802 nats are 144.6 bytes
    assert honest.most_payload == pytest.approx(144.63 * 1.001 + 8, abs=0.1)
    assert honest.charged == pytest.approx(8 * 289 * math.log(2)) and honest.bpb == pytest.approx(2.312)
    for size in (0, 145, 150):  # no proof, and proofs of the usual size: the score is the same
        assert replace(honest, payload=bytes(size)).charged == nats.sum()


def test_processor_seconds_are_held_against_the_track_s():
    """A machine gets more of them where it is slower, before the score or after it."""
    track = {"device": "cpu", "eval_seconds": 10}
    text = Text([b"x"], np.zeros(1, np.int64))
    for before, after in ((3.0, 1.0), (1.0, 3.0)):
        job = Mock(track=track, device="cpu", slowness=before, measured_slowness=lambda after=after: after)
        result = Result(job, text, 4, 50, np.zeros(1), b"", 29.7, 1.0)
        assert "3.00 times slower" in str(scoring.check_time(result))
        for seconds, verdict in ((29.7, "PASS"), (36, "SKIP"), (39, "FAIL")):
            assert scoring.check_time(replace(result, seconds=seconds)).verdict == verdict
    assert jobs.slowness({"eval_gflops": 1e-3}) == 1
    assert jobs.slowness({"eval_gflops": 1e9}) == jobs.SLOWEST


# --- attacks ----------------------------------------------------------------------------------------------

# Each: a name, what the one line of the report says, its limits where they are not HELD, whether a watchdog
# alone would miss it, and its code.
HELD = {"memory": 1 << 30, "tasks": 40, "processor": 100, "seconds": 100, "output": 1 << 16, "files": 1 << 24}
ATTACKS = r"""
### what is not there or not allowed | LookupError: 13 of 13 are refused
tries = [
    (OSError, socket.create_connection, ("1.1.1.1", 53), 3),
    (ConnectionRefusedError, socket.socket().connect, ("127.0.0.1", 9)),
    (FileNotFoundError, open, VAL, "rb"),
    (FileNotFoundError, open, TRAIN, "rb"),
    (FileNotFoundError, open, SECOND),
    (FileNotFoundError, open, REPO + "/train_gpt.py"),
    (OSError, open, f"/proc/{REFEREE}/mem", "rb"),
    (ProcessLookupError, os.kill, REFEREE, signal.SIGKILL),
    (ModuleNotFoundError, __import__, "helper"),  # a file beside the record's
    (ModuleNotFoundError, __import__, "pytest"),  # a package that is not the track's
    (OSError, open, "/record/x", "w"),
    (OSError, open, np.__file__, "a"),
    (OSError, os.setuid, 0),
]
refused = 0
for error, call, *words in tries:
    try:
        call(*words)
    except error:
        refused += 1
raise LookupError(f"{refused} of {len(tries)} are refused")
### descriptors of ours | open: \['/dev/null', '/memfd', 'pipe', 'pipe', 'pipe', 'pipe'\]
found = []
for fd in os.listdir("/proc/self/fd"):  # its own is closed by then
    if os.path.lexists(f"/proc/self/fd/{fd}"):
        found.append(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0].split()[0])
raise LookupError(f"open: {sorted(found)}")
### not a number | numbers: the logits of row 5 are not finite
def step(found):
    found[5, 7] = np.nan
    return found
answers(step)
### an infinity | numbers: the logits of row 0 are not finite
Bigram.start = lambda self, rows: np.full((rows, 400), -np.inf, np.float32)
### double precision | the predictor gave float64, expected a float32 array
answers(lambda found: found.astype(np.float64))
### a list | the predictor gave list, expected a float32 array
Bigram.start = lambda self, rows: [[0.0] * 400] * rows
### one row too few | the predictor gave shape \(15, 400\), expected \(16, 400\)
answers(lambda found: found[1:])
### no rows | contract: the predictor has vocab_size 400 and rows 0, expected
claims("rows", 0)
### a vocabulary that fills the referee's memory | contract: the predictor has vocab_size 1000000000000 and
claims("vocab_size", 10 ** 12)
### answers that fill the referee's memory | contract: the predictor has vocab_size 65536 and rows 65536,
claims("rows", 1 << 16)
claims("vocab_size", 1 << 16)
### a vocabulary that is too small | contract: the predictor has vocab_size 4, the text has token
claims("vocab_size", 4)
### memory that is cut | protocol: the record has cut the memory
def step(found):
    os.ftruncate(memory, 100)
    os.write(pipe, ANSWER)
    time.sleep(9)
answers(step)
### two answers to one question | protocol: the record answered before it was asked
def step(found):
    os.write(pipe, ANSWER * 2)
    return found
answers(step)
### an answer of its own kind | protocol: the answer is none of the protocol
def step(found):
    os.write(pipe, ANSWER.replace(b"BG", b"GB"))
    time.sleep(9)
answers(step)
### half an answer | protocol: the answer is none of the protocol
def step(found):
    os.write(pipe, ANSWER[:99])
    time.sleep(9)
answers(step)
### no answer | time: the record gave no answer for more than 4 seconds | answer=4
answers(lambda found: time.sleep(99))
### an end in the middle | died: the record's process ended
answers(lambda found: os._exit(0))
### an error in the middle | record: .*/train_gpt.py: the record raised LookupError: one two
def step(found):
    raise LookupError("one\ntwo")
answers(step)
### work by children that nobody waits for | time: .* more than 2 processor seconds | processor=2 | tasks=400
def step(found):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in range(2):
        if os.fork() == 0:
            while time.process_time() < 0.6:
                pass
            os._exit(0)
    time.sleep(0.7)
    return found
answers(step)
### work by children that live short | time: .* more than 2 processor seconds | processor=2 | cgroups
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(80):
    read, write = os.pipe()
    if os.fork() == 0:
        while time.process_time() < 0.03:
            pass
        os._exit(0)
    os.close(write)
    os.read(read, 1)  # until it has ended
    os.close(read)
### work by threads | time: the record used more than 2 processor seconds | processor=2 | tasks=400
def burn():
    while True:
        pass
def step(found):
    for _ in range(2):
        threading.Thread(target=burn, daemon=True).start()
    return found
answers(step)
### pickle bomb | died
pickle.loads(b"cos\nsystem\n(S'kill -9 -1'\ntR.")
### crash | died
ctypes.string_at(0)
### sleep | time: the record took longer than 3 seconds | seconds=3
time.sleep(1000)
### a byte now and then | protocol
os.write(pipe, b"B")
while True:
    os.write(pipe, b"G")
    time.sleep(0.05)
### an interrupt | died
raise KeyboardInterrupt
### no pipes | died
os.closerange(3, 99)
### fork bomb | tasks|the record raised|protocol
while True:
    os.fork()
### threads | tasks|start new thread
while True:
    threading.Thread(target=time.sleep, args=(99,)).start()
### gigabytes of output | output
while True:
    os.write(1, bytes(65536))
### gigabytes of memory | memory|MemoryError
x = []
while True:
    x.append(bytearray(b"x" * (1 << 24)))
### gigabytes in many processes | memory|MemoryError
for i in range(8):
    os.fork()
    if i > 1: break
x = bytearray(b"x" * (900 << 20))
time.sleep(9)
### memory files | memory: the record holds 512 MiB, at most 512 are allowed | memory=536870912 | cgroups
for file in [os.memfd_create(str(i)) for i in range(128)]:
    os.write(file, bytes(1 << 24))
### page tables | memory: the record holds 512 MiB, at most 512 are allowed | memory=536870912 | cgroups
spaces = []
for _ in range(8):
    spaces.append(mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | 0x4000, prot=mmap.PROT_READ))
    for place in range(0, 64 << 30, 2 << 20):
        spaces[-1][place]
### tasks | tasks: the record has \d+ processes and threads, at most 40 are allowed | cgroups
for _ in range(60):
    with contextlib.suppress(BlockingIOError):
        if os.fork():
            continue
    time.sleep(9)
### one huge file | OSError|died
open("/tmp/x", "wb").write(bytes(1 << 25))
### garbage in the answer | protocol
os.write(pipe, b"x" * 4096)
raise SystemExit(1)
### an answer of its own | contract
os.write(pipe, ANSWER)
### a message that never ends | ValueError
raise ValueError("x" * 10 ** 7)
### a message with control characters | ValueError
raise ValueError("\x1b[2J\nPASS score: fine")
"""


def attacks() -> list:
    """The table's rows. The first one stands for all of it among the quick tests."""
    rows = []
    for row in ATTACKS.split("\n### ")[1:]:
        head, _, code = row.partition("\n")
        name, words, *more = head.split(" | ")
        limits = {name: int(value) for name, _, value in (one.partition("=") for one in more) if value}
        marks = ([slow] if rows else []) + ([pytest.mark.cgroups] if "cgroups" in more else [])
        rows.append(pytest.param(code, words, limits, id=name, marks=marks))
    return rows


@pytest.fixture(scope="module")
def descriptors():
    """Open ones that a process would inherit."""
    ours = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
    for fd in ours:
        os.set_inheritable(fd, True)
    yield
    for fd in ours:
        os.close(fd)


def count_tasks() -> int:
    """Processes and threads below this one, itself included."""
    return sum(task["num_threads"] for task in watch.tree(os.getpid()).values())


@sandboxed
@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("code, words, limits", attacks())
def test_an_attack_is_held_and_reported_in_one_line(stand, tmp_path, code, words, limits, monkeypatch):
    record = stand.record(code)
    (record / "helper.py").write_text("x = 1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of this test alone: others run beside it
    tasks = count_tasks()
    began = time.monotonic()
    _, checks = stand.judge(stand.job(record, limits=HELD | limits))
    line = str(checks[-1])
    assert failed(checks) == {"sandbox"} and re.search(f"^FAIL sandbox: .*({words})", line), line
    assert line.isprintable() and len(line) < 5000
    assert time.monotonic() - began < 100
    assert not [*tmp_path.glob("bytegolf-*")]
    ends = time.monotonic() + 5
    while count_tasks() > tasks and time.monotonic() < ends:
        time.sleep(0.05)
    assert count_tasks() <= tasks, "a process is left"


REWRITES = """
def leave(found):
    np.frombuffer(mmap.mmap(memory, found.nbytes), np.float32).reshape(found.shape)[:] = found

def step(self, ids):
    asked = np.eye(400, dtype=np.float32)[ids] * 99  # what was asked a moment ago
    leave(asked)
    threading.Timer(0, leave, [asked]).start()
    return self.table[ids]

Bigram.step = step
"""


@slow
@sandboxed
def test_an_answer_cannot_be_changed_once_it_was_given(stand):
    """What is written into the memory before and after each answer is of use for nothing."""
    result, _ = stand.judge(REWRITES)
    assert result.bpb > 0.999 * stand.bigram_bpb()


@slow
@sandboxed
def test_a_record_that_computes_otherwise_the_second_time_has_no_proof(stand):
    chance = "answers(lambda found: found + np.random.default_rng().normal(size=found.shape).astype('f4'))"
    _, checks = stand.judge(chance, True)
    assert "proof" in failed(checks), "\n".join(map(str, checks))


# --- the machine ------------------------------------------------------------------------------------------

EAGER = """
import torch
found = torch.nn.Linear(4, 1, bias=False)(torch.zeros(4)).item()
try:
    import sympy
except ModuleNotFoundError:
    raise LookupError(f"the sum is {found}, and sympy is not there")
"""


@slow
@sandboxed
def test_torch_runs_where_a_text_is_scored_without_what_it_compiles_with(stand):
    _, checks = stand.judge(EAGER, track="track_torch")
    assert "the sum is 0.0, and sympy is not there" in str(checks[-1]), checks[-1]


@slow
def test_without_a_sandbox_foreign_code_is_refused(stand, bigram, monkeypatch):
    monkeypatch.setattr(bubblewrap, "tried", lambda: {"/bin/bwrap": "no permissions"})
    with pytest.raises(NoSandbox, match=r"/bin/bwrap: no permissions.*--trust"):
        stand.judge(stand.job(bigram))
    result, checks = stand.judge(stand.job(bigram, trust=True))
    assert failed(checks) == set() and 0 < result.bpb < 8


@slow
@sandboxed
def test_a_full_machine_says_nothing_of_a_record(stand, bigram, monkeypatch):
    monkeypatch.setattr(bubblewrap, "copyfile", Mock(side_effect=OSError(errno.ENOSPC, "")))
    with pytest.raises(MachineFull, match="has no memory for a sandbox's files: make room"):
        stand.judge(stand.job(bigram))


@slow
@sandboxed
def test_without_cgroups_a_result_says_so(stand, bigram, monkeypatch):
    monkeypatch.setattr(watch, "find", lambda: None)
    result, checks = stand.judge(stand.job(bigram))
    assert result.limits == "watchdog" and result.seconds > 0 and not failed(checks)


def test_data_are_hidden_from_a_record(stand, tmp_path, bigram):
    dataset = stand.data / "datasets"
    val = next(dataset.rglob("*_val_*.bin"))
    train = next(dataset.rglob("*_train_*.bin"))
    link = tmp_path / "a_train_000000.bin"
    link.symlink_to(val)
    (tmp_path / "text").symlink_to(stand.second)
    hidden = stand.job(bigram).mode.hidden
    assert set(hidden) == {dataset, stand.second}
    bubblewrap.check_given({"/x": train, "/y": b"bytes", "/z": helpers.ROOT / "train_gpt.py"}, hidden)
    for outside in (val, link, stand.second, tmp_path / "text", helpers.ROOT / "data/datasets/new/x"):
        with pytest.raises(NoSandbox, match=f"would show {outside}, which is data, so it"):
            bubblewrap.check_given({"/x": outside}, hidden)


# --- texts ------------------------------------------------------------------------------------------------


class Fixed:
    """A predictor in this process."""

    def __init__(self, size: int = SIZE, rows: int = 4, seed: int = 0):
        self.vocab_size = size
        self.rows = rows
        self.table = np.random.default_rng(seed).normal(size=(size, size)).astype(np.float32) * 2

    def start(self, rows: int) -> np.ndarray:
        return np.zeros((rows, self.vocab_size), np.float32)

    def step(self, ids: np.ndarray) -> np.ndarray:
        return self.table[ids]


@settings(max_examples=40)
@example(" ".join(helpers.documents(600, 8)))
@given(strategies.text(max_size=60).filter(lambda text: "\u2581" not in text))
def test_what_is_compressed_comes_back(tokenizer, text):
    """A long file is cut into streams."""
    raw = text.encode()
    try:
        packed = coder.compress(Fixed(), tokenizer, NAME, raw)
    except DataError as error:  # NUL and the like, which this tokenizer does not give back
        assert "does not give back" in str(error)
        return
    assert coder.HEAD.unpack_from(packed)[2] == (4 if len(raw) > 60 * 4 else 1)
    assert coder.decompress(Fixed(), tokenizer, NAME, packed) == raw


def test_what_cannot_be_coded_or_is_damaged_is_an_error_of_one_line(tokenizer):
    text = helpers.documents(3, 9)[0].encode() * 3
    packed = coder.compress(Fixed(), tokenizer, NAME, text)
    heads = [(1, 2**31), (0, 9), (9, 8), (5, 9)]
    cases = [
        (coder.compress, Fixed(20), NAME, b"the fox", "vocabulary ends at 19"),
        (coder.compress, Fixed(), NAME, b"ab\xff", "no UTF-8"),
        (coder.decompress, Fixed(seed=1), NAME, packed, "other floats|damaged"),
        (coder.decompress, Fixed(), b"87654321", packed, "compressed by the record"),
    ]
    for rows, total in heads:
        head = coder.HEAD.pack(coder.MAGIC, NAME, rows, total, 2**32 - 1, 0)
        cases.append((coder.decompress, Fixed(), NAME, head + bytes(9), "impossible"))
    for codec, predictor, name, data, words in cases:
        with pytest.raises(DataError, match=words):
            codec(predictor, tokenizer, name, data)
    for place in range(0, len(packed), 7):
        broken = bytearray(packed)
        broken[place] ^= 0x55
        try:  # the last bits do not matter
            assert coder.decompress(Fixed(), tokenizer, NAME, bytes(broken)) == text
        except DataError as error:
            assert "\n" not in str(error)


def test_a_text_that_is_not_the_track_s_is_an_error_of_one_line(stand, tmp_path):
    track = load_track(stand.root / TRACK).using("tiny_sp400")
    assert np.array_equal(validation_text(track, stand.data).tokens, stand.corpus.tokens["val"])
    track.rules["dataset"]["val_sha256"] = "ab" * 32
    with pytest.raises(DataError, match=r"tiny_sp400: the validation text has val_sha256"):
        validation_text(track, stand.data)
    path = tmp_path / "second.jsonl"
    for broken in ("{}\n", "{", '["a"]\n', "\xff"):
        path.write_text(broken, encoding="latin-1")
        with pytest.raises(DataError, match="expected a JSON string a line"):
            jobs.read_documents(path)


# --- samples ----------------------------------------------------------------------------------------------


class Scripted(Fixed):
    """Writes the tokens that it is given, whatever it reads."""

    def __init__(self, ids: list[int], size: int):
        super().__init__(size)
        self.rest = [*ids, 0]

    def step(self, ids):
        return np.where(np.arange(self.vocab_size) == self.rest.pop(0), 0, -20)[None].astype(np.float32)


def write(tokenizer, ids: list[int], size: int = SIZE) -> list[str]:
    return [*sample(Scripted(ids, size), tokenizer, [], len(ids), 0, np.random.default_rng(1))]


@example("🦊 naïve 𓀀 日本")  # some of these are four tokens of one byte each
@given(strategies.text(max_size=30))
def test_a_sample_is_what_the_tokenizer_decodes_in_whole_characters(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = write(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all(piece.isascii() or len(piece) == 1 or "\ufffd" in text for piece in pieces)


def test_bytes_that_make_no_character_do_not_hold_a_sample_up(tokenizer):
    """A character that is cut by text, by another character or by the end; bytes that begin none."""
    fox = [tokenizer.piece_to_id(f"<0x{byte:02X}>") for byte in "🦊".encode()]
    a = tokenizer.encode("a")
    assert write(tokenizer, [*fox[:3], *a]) == ["", "", "", "\ufffda", ""]
    assert write(tokenizer, [*fox[:2], *fox]) == ["", "", "\ufffd", "", "", "🦊", ""]
    assert write(tokenizer, fox[:1]) == ["", "\ufffd"]
    assert write(tokenizer, fox[1:2] * 3) == ["\ufffd"] * 3 + [""]


def test_a_sample_is_of_the_tokenizer_s_ids_and_depends_on_seed_and_temperature(tokenizer):
    """A model may know more ids than there are, and its favourite may be one of these."""
    assert len(write(tokenizer, [SIZE + 5], SIZE + 10)) == 2
    with pytest.raises(DataError, match="do not fit the record's vocabulary of 5"):
        next(sample(Fixed(5), tokenizer, [7], 1, 1, np.random.default_rng(1)))
    prompt = tokenizer.encode("the ")

    def text(seed: int, temperature: float) -> str:
        rng = np.random.default_rng(seed)
        return "".join(sample(Fixed(), tokenizer, prompt, 30, temperature, rng))

    assert text(1, 1) == text(1, 1) != text(2, 1)
    assert text(1, 0) == text(2, 0) == text(1, 1e-9)


# --- commands ---------------------------------------------------------------------------------------------


@pytest.fixture
def told(stand, bigram):
    """What a command says of the bigram model, which is trusted; its exit code is checked."""

    def run(name: str, *more: object, code: int = 0) -> str:
        said = call("records", name, bigram, *more, *stand.place, code=code)
        return refused(said) if code > 1 else said

    return run


@slow
def test_a_file_is_compressed_beside_others_and_what_is_damaged_is_refused(told, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text(" ".join(helpers.documents(20, 8)), encoding="utf-8")
    said = told("compress", text)
    assert "xz -9e" in said and "zstd -19" in said
    assert "exists and is never overwritten" in told("compress", text, code=2)
    (tmp_path / "c.bg").write_bytes(b"none of ours")
    assert "c.bg: no file that" in told("decompress", tmp_path / "c.bg", code=3)
    (tmp_path / "other.bin").write_bytes(b"another model")
    words = tmp_path / "a.txt.bg", "-o", tmp_path / "x", "--artifact", tmp_path / "other.bin"
    other = told("decompress", *words, code=3)
    assert f"a.txt.bg: was compressed with another model than {tmp_path}/other.bin with" in other
    assert " cannot be written: " in told("compress", text, "-o", tmp_path / "no/such/x.bg", code=2)


def test_a_record_is_scored_and_proven_by_commands(told, stand):
    said = told("score", "--second", stand.second)
    assert "\nval_bpb: " in said and "PASS second-text: " in said
    assert "\nPASS proof: " in told("prove")


def test_a_sample_is_written(told, tmp_path):
    """An error does not stand behind the prompt."""
    said = told("sample", "--prompt", "naïve ", "--tokens", "50")
    assert said.startswith("naïve ") and len(said) > 60
    for wrong in ("-1", "nan"):
        told("sample", "--temperature", wrong, code=2)
    (tmp_path / "model.bin").write_bytes(b"no artifact")
    words = ("--artifact", tmp_path / "model.bin", "--prompt", "def ")
    assert "the record raised" in told("sample", *words, code=3)


@slow
def test_a_prompt_may_hold_what_the_terminal_does_not_know(stand, bigram):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    words = ["sample", bigram, *stand.place, "--prompt", "naïve "]
    said, errors = start("records", *words, env=ascii_only).communicate()
    assert said.startswith("na\\xefve ") and errors == ""


@slow
def test_a_file_is_completed(told, tmp_path):
    """A bigram model goes on from the last token alone. The last line has its end."""
    file = tmp_path / "a.txt"
    file.write_bytes("naïve \r\n the".encode())
    options = ("--tokens", "20", "--temperature", "0")
    said = told("complete", file, *options)
    assert not said.startswith("na") and said.endswith("\n")
    whole = told("sample", "--prompt", file.read_bytes().decode(), *options)
    assert whole.endswith(said.splitlines(True)[-1])
    file.write_bytes(b"caf\xe9")
    assert re.search(r"a\.txt: .*expected a text in UTF-8", told("complete", file, code=3))
    assert "none.txt: cannot be read" in told("complete", tmp_path / "none.txt", code=3)


def test_a_folder_of_runs_and_a_file_of_one_are_no_record(bigram, tmp_path):
    said = refused(call("records", "sample", bigram.parent, code=3))
    assert said.startswith(
        f"error: {bigram.parent}: is no run or record, but holds some: python -m records sample "
    )
    assert str(bigram) in said
    said = refused(call("records", "score", bigram / "train_gpt.py", code=3))
    assert said.endswith(f"is a file, expected the folder of a run or a record, as {bigram}")
    said = refused(call("records", "score", tmp_path, code=3))
    assert "is no run or record, expected its train_gpt.py; RUN_ID=first PRESET=minute " in said


def test_the_folder_of_a_run_is_a_record(tmp_path):
    script, model, config = (tmp_path / name for name in ("train_gpt.py", "model.ptz", "config.json"))
    for path in (script, model):
        path.touch()
    config.write_text(json.dumps({"settings": {"data_path": "./data/datasets/demo_sp1024"}}))
    job = find_job(tmp_path)
    assert [job.script, job.artifact] == [script, model]
    assert job.track.name == "track_floppy" and job.tokenizer_path.name == "demo_1024_bpe.model"
    script.rename(tmp_path / "x")
    with pytest.raises(DataError, match=r"holds no train_gpt\.py, expected the script that made its model"):
        find_job(tmp_path)
    model.rename(tmp_path / "model.ptz.part")  # as a kill leaves it
    with pytest.raises(DataError, match=r"holds no model\.ptz, .* train with RUN_ID="):
        find_job(tmp_path)
    config.unlink()
    script.touch()
    with pytest.raises(DataError, match="--track"):
        find_job(tmp_path)
