"""The referee: what it makes of honest and dishonest predictors, and what a sandbox keeps from its prisoner.

The predictors here are foreign: a bigram model in numpy, and changes to it. tests/test_records.py lets the
referee score a record of the real script.
"""

import hashlib
import importlib.metadata
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

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from data import prepare
from data.command import DataError
from data.shards import read_split
from records import bubblewrap, coder, probes, referee, sandbox
from records.jobs import Job, find_job
from records.proof import prove
from records.sample import sample
from records.scoring import Result, score
from records.text import load_tokenizer, validation_text
from records.tracks import load_track
from tests import helpers, record_kit
from tests.record_kit import TRACK, failed

needs_sandbox = pytest.mark.skipif(not record_kit.HAS_SANDBOX, reason=record_kit.NO_SANDBOX)
slow = pytest.mark.slow


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

    def job(self, folder: Path, track: str = TRACK, **options) -> Job:
        known = {"compiling": False, "limits": sandbox.Limits(seconds=200)} | options
        return find_job(folder, self.root / track, data=self.data, second=self.data / "second.jsonl", **known)

    def judge(self, job: Job, proof_bytes: int = 0, evaluation: coder.Evaluation | None = None):
        """(result, checks) of a job."""
        job = replace(job, evaluation=evaluation or job.evaluation)
        text = validation_text(job.track, self.data)
        lines = list(referee.referee(job, text, proof_bytes, np.random.default_rng(3)))
        results = [line for line in lines if isinstance(line, Result)]
        return results[0] if results else None, [line for line in lines if line not in results]


@pytest.fixture(scope="session")
def stand(tmp_path_factory):
    return Stand(tmp_path_factory.mktemp("referee"))


@pytest.fixture(scope="session")
def bigram(stand):
    return stand.foreign(stand.root / "bigram")


# --- honest -----------------------------------------------------------------------------------------------


@needs_sandbox
def test_a_foreign_model_is_scored_probed_and_proven(stand, bigram):
    result, checks = stand.judge(stand.job(bigram), 600)
    assert failed(checks) == set(), "\n".join(map(str, checks))
    assert {line.name for line in checks} == {"contract", "finite", "eval-time"} | record_kit.PROBES
    tokens = stand.corpus.tokens
    counts = np.full((400, 400), 0.05)
    np.add.at(counts, (tokens["train"][:-1], tokens["train"][1:]), 1)
    p = counts / counts.sum(1, keepdims=True)
    nats = -np.log(p[tokens["val"][:-1], tokens["val"][1:]]).sum()
    assert result.bpb == pytest.approx(nats / math.log(2) / stand.corpus.val_bytes(), rel=1e-5)
    size = int(re.search(r"^(\d+) bytes coded", next(c.text for c in checks if c.name == "proof-size"))[1])
    assert size < 600


class Exact:
    """Scores that tell window and place, to see who asks for what."""

    def __init__(self):
        self.asked, self.learnt = [], []

    def nll(self, ids):
        self.asked.append(ids.copy())
        return np.ones((len(ids), ids.shape[1] - 1), np.float32)

    def adapt(self, ids):
        self.learnt.append((len(self.asked), ids.copy()))


@given(*map(strategies.integers, (2, 1, 1, 1), (60, 20, 20, 5)))
def test_each_token_is_scored_once_with_enough_before_it(total, window, stride, rows):
    stride = min(stride, window)
    evaluation = coder.Evaluation(window, stride, rows)
    nats = score(Exact(), np.arange(total), evaluation)
    assert np.isnan(nats[0]) and (nats[1:] == 1).all()
    for start, first, end in evaluation.windows(total):
        assert end - start <= window and (start == 0 or first - start >= min(window - stride, total))


def test_adapt_only_gets_tokens_that_have_their_score():
    predictor = Exact()
    tokens = np.arange(1000) % 400
    score(predictor, tokens, coder.Evaluation(16, 8, 4, "adapt"))
    scored = 0
    for calls, ids in predictor.learnt:
        scored = max(scored, max(int(call.max()) for call in predictor.asked[:calls]))
        assert ids.max() <= scored
        assert any(np.array_equal(ids, call[: len(ids)]) for call in predictor.asked[:calls])
    assert len(predictor.learnt) == len(predictor.asked)
    silent = Exact()
    score(silent, tokens, coder.Evaluation(16, 8, 4, "none"))
    assert silent.learnt == []


LEARNS = """
class Learner(Bigram):
    def __init__(self, artifact, size):
        super().__init__(artifact, size)
        self.counts = np.frombuffer(artifact.read_bytes(), "<u2").reshape(size, size) + 0.05
    def adapt(self, ids):
        np.add.at(self.counts, (ids[:, :-1].ravel(), ids[:, 1:].ravel()), 1)
        self.table = np.log(self.counts / self.counts.sum(1, keepdims=True)).astype(np.float32)
def load_predictor(artifact, device):
    return Learner(artifact, 400)
"""


@slow
@needs_sandbox
def test_learning_from_what_was_scored_is_allowed_and_proven(stand, bigram, tmp_path):
    learner = stand.job(stand.foreign(tmp_path / "learner", LEARNS))
    result, checks = stand.judge(learner, 3000, coder.Evaluation(32, 32, 8, "adapt"))
    assert failed(checks) == set(), "\n".join(map(str, checks))
    still, _ = stand.judge(stand.job(bigram), 0, coder.Evaluation(32, 32, 8))
    assert result.bpb < still.bpb


# --- dishonest --------------------------------------------------------------------------------------------

LOAD_CHEAT = """
def load_predictor(artifact, device):
    return Cheat(artifact, 400)
"""


def cheat(body: str, base: str = "Bigram") -> str:
    lines = "".join(f"    {line}\n" for line in body.strip("\n").splitlines())
    return f"\nclass Cheat({base}):\n{lines}\n" + LOAD_CHEAT


PEEK = """
def logprobs(self, ids):
    p = np.exp(self.table[ids]) * 0.5
    seen = ids[:, 1:]
    more = np.take_along_axis(p[:, :-1], seen[:, :, None], 2) + 0.5
    np.put_along_axis(p[:, :-1], seen[:, :, None], more, 2)
    return np.log(p / p.sum(-1, keepdims=True)).astype(np.float32)
def nll(self, ids):
    return -np.take_along_axis(self.logprobs(ids)[:, :-1], ids[:, 1:, None], 2)[:, :, 0]
"""
CHEATS = {
    "look-ahead by one token": (PEEK, "next-token"),
    "look-ahead in nll alone": (
        """
def nll(self, ids):
    return super().nll(ids) * 0.9
""",
        "nll-agrees",
    ),
    "look-ahead at all later tokens": (
        """
def logprobs(self, ids):
    p = np.exp(self.table[ids])
    for row, tokens in zip(p, ids):
        row[:, np.unique(tokens)] += 0.002
    return np.log(p / p.sum(-1, keepdims=True)).astype(np.float32)
""",
        "later-tokens",
    ),
    "honest at any second look": (
        """
def __init__(self, *more):
    super().__init__(*more)
    self.seen = {}
def logprobs(self, ids):
    return self.table[ids]
def nll(self, ids):
    honest, keys = super().nll(ids), [row.tobytes()[:64] for row in ids]
    return np.stack([self.seen.setdefault(key, nats * 0.7) for key, nats in zip(keys, honest)])
""",
        "hidden-future",
    ),
    "looking ahead in a twentieth of the windows": (
        """
def nll(self, ids):
    nats = super().nll(ids)
    nats[ids.sum(1) % 20 == 0] *= np.float32(0.2)
    return nats
""",
        "hidden-future",
    ),
    "an un-normalised cache": (
        """
def logprobs(self, ids):
    return np.minimum(self.table[ids] + np.float32(0.3), 0)
""",
        "normalised",
    ),
    "probabilities that sum to 277": (
        """
def logprobs(self, ids):
    return np.log(np.exp(self.table[ids]) * 277 + 0.001).astype(np.float32)
""",
        "finite",
    ),
    "adapting before scoring": (
        """
def nll(self, ids):
    counts = np.exp(self.table.astype(np.float64)) * 5
    np.add.at(counts, (ids[:, :-1].ravel(), ids[:, 1:].ravel()), 1)
    self.table = np.log(counts / counts.sum(1, keepdims=True)).astype(np.float32)
    return super().nll(ids)
""",
        "repeat",
    ),
    "other rows of the batch": (
        """
def nll(self, ids):
    own = np.array([np.isin(np.delete(ids, i, 0), row).mean() for i, row in enumerate(ids)])
    return (super().nll(ids) * (1 - 0.2 * own[:, None])).astype(np.float32)
""",
        "rows",
    ),
    "state that is not declared": (
        """
calls = 0
def nll(self, ids):
    self.calls += 1
    return super().nll(ids) * np.float32(1 - min(self.calls, 50) / 100)
""",
        "repeat",
    ),
    "nats below nothing": (
        """
def nll(self, ids):
    return super().nll(ids) - np.float32(6)
""",
        "finite",
    ),
    "not a number": (
        """
def nll(self, ids):
    return super().nll(ids) * np.float32("nan")
""",
        "finite",
    ),
    "double precision": (
        """
def nll(self, ids):
    return super().nll(ids).astype(np.float64)
""",
        "sandbox",
    ),
    "one score too few": (
        """
def nll(self, ids):
    return super().nll(ids)[:, 1:]
""",
        "sandbox",
    ),
    "a hundredth less for each token": (
        """
def nll(self, ids):
    return super().nll(ids) - np.float32(0.0095)
""",
        "hidden-future",
    ),
    "half precision": (
        """
def nll(self, ids):
    return super().nll(ids).astype(np.float16)
""",
        "sandbox",
    ),
    "windows of nothing": (
        """
def __init__(self, *more):
    super().__init__(*more)
    self.max_len = 0
""",
        "sandbox",
    ),
    "a vocabulary that fills the referee's memory": (
        """
def __init__(self, *more):
    super().__init__(*more)
    self.vocab_size = 10 ** 12
""",
        "sandbox",
    ),
    "a vocabulary that is too small": (
        """
def __init__(self, *more):
    super().__init__(*more)
    self.vocab_size = 4
""",
        "contract",
    ),
    "seconds that are not there": (
        """
def nll(self, ids):
    import time
    time.sleep(0.7)
    return super().nll(ids)
""",
        "eval-time",
    ),
}


@needs_sandbox
@pytest.mark.parametrize("kind", first_quick(CHEATS))
def test_a_dishonest_predictor_is_failed_by_its_check(stand, tmp_path, kind):
    body, name = CHEATS[kind]
    job = stand.job(stand.foreign(tmp_path / "cheat", cheat(body)))
    if name == "eval-time":
        job.track.rules["eval_seconds"] = 0.5
    _, lines = stand.judge(job, 0, coder.Evaluation(32, 32, 32))
    assert name in failed(lines), "\n".join(map(str, lines))


LATE = PEEK.replace(
    "def logprobs(self, ids):",
    """
lessons = 0
def adapt(self, ids):
    self.lessons += 1
def logprobs(self, ids):
    if self.lessons < 5:
        return self.table[ids]""",
)


@slow
@needs_sandbox
def test_looking_ahead_after_many_lessons_only_is_found(stand, tmp_path):
    """The probes of a record that adapts are spread over all that it learns."""
    job = stand.job(stand.foreign(tmp_path / "late", cheat(LATE)))
    _, checks = stand.judge(job, 0, coder.Evaluation(32, 32, 8, "adapt"))
    assert "hidden-future" in failed(checks), "\n".join(map(str, checks))


@slow
def test_probes_stand_where_looking_ahead_pays():
    """One token in a thousand, of those that cost most: every verification probes some of them."""
    folder = helpers.ROOT / "data/datasets/demo_sp1024"
    if not folder.exists():
        pytest.skip("no demo corpus: python -m data.prepare demo")
    tokens = read_split(folder, "val")
    rng = np.random.default_rng(5)
    nats = probes.surprise(tokens) * rng.random(len(tokens))  # of a model far better than counts
    peeked = rng.choice(np.flatnonzero(nats > 6), len(tokens) // 1000, replace=False)
    nats[peeked] *= 0.02
    for _ in range(5):
        rounds, _ = probes.choose_windows(tokens, nats, coder.Evaluation(512, 512, 32), 1024, rng)
        assert len(rounds) == probes.FUTURE_ROUNDS
        probed = np.concatenate([windows[:, 0] + cut + 1 for _, cut, windows in rounds])
        assert len(np.unique(probed)) == len(probed) == 32 * len(rounds)
        assert len(np.intersect1d(probed, peeked)) >= 3


def test_surprise_counts_the_rest_of_the_text():
    tokens = np.array([0, 1, 2, 0, 1, 3, 0, 1, 2])
    p0 = (np.array([2, 2, 1, 0]) + 1 / 4) / 9  # without the token itself
    assert probes.surprise(tokens, 1) == pytest.approx(-np.log(p0[tokens]))
    last = (1 + p0[2]) / 3  # after a 1 elsewhere: one 2, one 3
    assert probes.surprise(tokens, 2)[-1] == pytest.approx(-np.log(last))


@slow
@needs_sandbox
def test_a_model_that_knows_the_public_text_by_heart_is_failed_by_the_second(stand, tmp_path):
    by_heart = """
def __init__(self, artifact, size):
    super().__init__(artifact, size)
    val = np.frombuffer(artifact.read_bytes()[320000:], "<u2").tolist()
    self.next = {tuple(val[i:i + 8]): val[i + 8] for i in range(len(val) - 8)}
def logprobs(self, ids):
    p = np.exp(self.table[ids])
    for row, tokens in zip(p, ids.tolist()):
        for at in range(7, len(tokens)):
            known = self.next.get(tuple(tokens[at - 7:at + 1]))
            if known is not None:
                row[at, known] += 50
    return np.log(p / p.sum(-1, keepdims=True)).astype(np.float32)
"""
    code = cheat(by_heart)
    folder = stand.foreign(tmp_path / "heart", code)
    script = (
        (folder / "train_gpt.py")
        .read_text()
        .replace('artifact.read_bytes(), "<u2"', 'artifact.read_bytes()[:320000], "<u2"')
    )
    (folder / "train_gpt.py").write_text(script)
    with open(folder / "model.bin", "ab") as file:
        file.write(stand.corpus.tokens["val"].astype("<u2").tobytes())
    _, checks = stand.judge(stand.job(folder))
    assert failed(checks) == {"second-text"}, "\n".join(map(str, checks))


# --- prisoners --------------------------------------------------------------------------------------------

HUNG = sandbox.Limits(memory=1 << 30, tasks=40, seconds=100, output=1 << 16, files=1 << 24)
PRISONERS = {  # code that runs when the script is imported, and a word of the line that must tell of it
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
    "mounting": (
        "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0",
        "Assertion",
    ),
    "pickle bomb": ("import pickle\npickle.loads(b'cos\\nsystem\\n(S\"kill -9 -1\"\\ntR.')", "died"),
    "exit": ("import os\nos._exit(0)", "died"),
    "crash": ("import ctypes\nctypes.string_at(0)", "died"),
    "endless loop": ("while True:\n    pass", "time"),
    "sleep": ("import time\ntime.sleep(1000)", "time"),
    "a byte now and then": (
        "import os, time\nfor fd in range(3, 20):\n    try: os.write(fd, b'B'); break\n"
        "    except OSError: continue\nwhile True:\n    os.write(fd, b'G')\n    time.sleep(0.05)",
        "time|protocol",
    ),
    "a slow answer": (
        "import os, struct, time\nfor fd in range(3, 20):\n"
        "    try: os.write(fd, struct.pack('<4sIQ', b'BGr1', 1, 4096)); break\n"
        "    except OSError: continue\nwhile True:\n    os.write(fd, b'x')\n    time.sleep(0.05)",
        "time",
    ),
    "a note for the next sandbox in the kernel's key ring": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "number = {{'x86_64': 248}}.get(os.uname().machine, 217)\n"
        "key = libc.syscall(number, b'user', b'note', b'x', ctypes.c_size_t(1), ctypes.c_long(-4))\n"
        "raise LookupError(f'key {{key}} errno {{ctypes.get_errno()}}')",
        "key -1 errno 1 *$",
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
    "gigabytes of files": (
        "for i in range(1000):\n    open(f'/tmp/{{i}}', 'wb').write(bytes(1 << 23))",
        "OSError",
    ),
    "one huge file": ("open('/tmp/x', 'wb').write(bytes(1 << 25))", "OSError|died"),
    "garbage in the answer": (
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'x' * 4096)\n"
        "    except OSError: continue\nraise SystemExit(1)",
        "protocol",
    ),
    "an answer of its own": (
        "import os, struct\nfor fd in range(3, 20):\n"
        "    try: os.write(fd, struct.pack('<4sIQ', b'BGr1', 0, 1 << 60))\n"
        "    except OSError: continue",
        "protocol",
    ),
    "a message that never ends": ("raise ValueError('x' * 10 ** 7)", "ValueError"),
    "a message with control characters": ("raise ValueError('\\x1b[2J\\nPASS score: fine')", "ValueError"),
}


@needs_sandbox
@pytest.mark.parametrize("kind", first_quick(PRISONERS))
def test_a_prisoner_is_held_and_told(stand, tmp_path, kind, monkeypatch):
    code, word = PRISONERS[kind]
    val = next(stand.corpus.data_path.glob("*_val_*"))
    places = {
        "val": str(val),
        "train": str(val).replace("_val_", "_train_"),
        "repo": str(helpers.ROOT),
        "pid": os.getpid(),
        "second": str(stand.data / "second.jsonl"),
        "port": 9,
    }
    folder = stand.foreign(tmp_path / "prisoner", "\n" + code.format(**places))
    (folder / "helper.py").write_text("x = 1")
    began = time.monotonic()
    stages = tmp_path / "stages"  # of this test alone: others run beside it
    stages.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(stages))
    tasks = sandbox.usage(os.getpid())[0]
    limits = replace(HUNG, seconds=3) if word == "time" else HUNG
    _, checks = stand.judge(stand.job(folder, limits=limits))
    line = str(checks[-1])
    assert failed(checks) == {"sandbox"} and re.search(word, line), line
    assert line.isprintable() and len(line) < 5000
    assert time.monotonic() - began < 100
    assert not [*stages.glob("bytegolf-record-*")]
    assert is_alone(tasks), "a process is left"


def is_alone(tasks: int) -> bool:
    """Whether this process soon has no more processes and threads below it than before."""
    ends = time.monotonic() + 5
    while sandbox.usage(os.getpid())[0] > tasks and time.monotonic() < ends:
        time.sleep(0.05)
    return sandbox.usage(os.getpid())[0] <= tasks


OPEN = """
import os
raise LookupError(f"descriptors {sorted(map(int, os.listdir('/proc/self/fd')))[:-1]}")
"""


@needs_sandbox
def test_no_descriptor_of_ours_is_open_in_the_sandbox(stand, tmp_path):
    """However many this process has: there are the three standard ones and the two pipes."""
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
    assert "descriptors [0, 1, 2, 3, 4] " in f"{checks[-1]} ", checks[-1]


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
@needs_sandbox
def test_no_document_of_the_demo_corpus_is_in_the_sandbox(stand, tmp_path):
    """All of it: validation, second text and training text are in the installed packages outside."""
    try:
        documents = [text for _, text in prepare.demo_sources() if text]
    except DataError as error:
        pytest.skip(str(error))
    hashes = [hashlib.sha256(text).hexdigest() for text in documents]
    code = HUNTER.format(hashes=hashes, sizes={len(text) for text in documents})
    job = stand.job(stand.foreign(tmp_path / "hunter", code), "track_torch")
    _, checks = stand.judge(job)
    assert re.search(r"LookupError: 0 documents among \d{3,} sources", str(checks[-1])), checks[-1]


COMPILES = """
import torch
f = torch.compile(lambda x: (x * 2 + 1).sum())
raise LookupError(f"compiled, and the sum is {{f(torch.ones(4)).item()}}")
"""


@slow
@needs_sandbox
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler, so records run eager")
def test_torch_compile_works_in_the_sandbox(stand, tmp_path):
    folder = stand.foreign(tmp_path / "compiles", COMPILES.format())
    _, checks = stand.judge(stand.job(folder, "track_torch", compiling=True))
    assert "compiled, and the sum is 12.0" in str(checks[-1]), checks[-1]


@needs_sandbox
def test_no_docstring_of_the_corpus_is_in_the_bytecode():
    folder = bubblewrap.bytecode("tqdm")
    assert list(folder.rglob("*.pyc")) and not list(folder.rglob("*.py"))
    std = next(folder.rglob("std.pyc")).read_bytes()
    source = Path(importlib.metadata.distribution("tqdm").locate_file("tqdm/std.py")).read_text()
    assert "Decorate an iterable object" in source and b"Decorate an iterable object" not in std


def test_without_a_sandbox_foreign_code_is_refused(stand, bigram, monkeypatch):
    monkeypatch.setattr(bubblewrap, "find", lambda: None)
    with pytest.raises(sandbox.NoSandbox, match="--trust"):
        stand.judge(stand.job(bigram))
    result, checks = stand.judge(stand.job(bigram, trust=True))
    assert failed(checks) == set() and 0 < result.bpb < 8


# --- proof ------------------------------------------------------------------------------------------------


class Fixed:
    """A predictor in this process."""

    vocab_size, max_len = 400, 32

    def __init__(self, seed=0):
        self.table = np.random.default_rng(seed).normal(size=(400, 400)).astype(np.float32) * 2
        self.table -= np.log(np.exp(self.table).sum(-1, keepdims=True))

    def logprobs(self, ids, first, end=None):
        return self.table[ids[:, first:end]]


@pytest.fixture(scope="session")
def tokenizer(stand):
    return load_tokenizer(stand.corpus.tokenizer_path)


@settings(max_examples=40)
@given(strategies.text(max_size=60).filter(lambda text: "\u2581" not in text), strategies.integers(1, 20))
def test_what_is_compressed_comes_back(tokenizer, text, window):
    evaluation = coder.Evaluation(window, max(1, window // 2), 4)
    predictor = Fixed()
    raw = text.encode()
    try:
        packed, nats = coder.compress(predictor, evaluation, tokenizer, b"12345678", raw)
    except DataError as error:  # NUL and the like, which this tokenizer does not give back
        assert "give this text back" in str(error)
        return
    assert coder.decompress(predictor, "none", tokenizer, b"12345678", packed) == raw
    assert len(packed) - coder.HEAD.size <= nats / math.log(2) / 8 + 8


def test_what_cannot_be_coded_is_an_error_of_one_line(tokenizer):
    evaluation = coder.Evaluation(16, 16, 4)
    small = Fixed()
    small.vocab_size = 20
    with pytest.raises(DataError, match="vocabulary ends at 19"):
        coder.compress(small, evaluation, tokenizer, b"12345678", b"the fox")
    head = coder.HEAD.pack(coder.MAGIC, b"12345678", 1, 1, 1, 2**31, 2**32 - 1, 0)
    with pytest.raises(DataError, match="impossible"):
        coder.decompress(Fixed(), "none", tokenizer, b"12345678", head + bytes(9))


def test_a_damaged_file_is_an_error_of_one_line(tokenizer):
    evaluation = coder.Evaluation(16, 16, 4)
    predictor = Fixed()
    text = helpers.documents(3, 9)[0].encode() * 3
    packed, _ = coder.compress(predictor, evaluation, tokenizer, b"12345678", text)
    for place in range(0, len(packed), 7):
        broken = bytearray(packed)
        broken[place] ^= 0x55
        try:  # what does not matter may be changed: the number of rows, the last bits
            assert coder.decompress(predictor, "none", tokenizer, b"12345678", bytes(broken)) == text
        except DataError as error:
            assert "\n" not in str(error)
    with pytest.raises(DataError, match="other floats"):
        coder.decompress(Fixed(1), "none", tokenizer, b"12345678", packed)
    with pytest.raises(DataError, match="compressed by the record"):
        coder.decompress(predictor, "none", tokenizer, b"87654321", packed)
    with pytest.raises(DataError, match="no UTF-8"):
        coder.compress(predictor, evaluation, tokenizer, b"12345678", b"ab\xff")


@slow
@needs_sandbox
def test_a_score_that_cannot_be_decoded_is_no_proof(stand, tmp_path):
    """Looking ahead gives a small file, and nothing can read it."""
    job = stand.job(stand.foreign(tmp_path / "peek", cheat(PEEK)))
    job = replace(job, evaluation=coder.Evaluation(32, 32, 32))
    text = validation_text(job.track, stand.data)
    checks = list(prove(job, text, 600, np.random.default_rng(1)))
    assert "proof-size" in failed(checks)


def test_the_text_may_come_from_raw_documents(stand, tmp_path):
    """The same tokens as from shards; another text is refused."""
    track = load_track(stand.root / TRACK)
    path = tmp_path / "val.jsonl"
    texts = stand.corpus.texts["val"]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    text = validation_text(track, stand.data, documents=path)
    assert np.array_equal(text.tokens, stand.corpus.tokens["val"]) and text.bytes == stand.corpus.val_bytes()
    path.write_text("".join(json.dumps(text) + "\n" for text in texts[:-1]))
    with pytest.raises(DataError, match=r"val\.jsonl: the validation text has sha256"):
        validation_text(track, stand.data, documents=path)
    path.write_text("{}\n")
    with pytest.raises(DataError, match="expected a JSON string a line"):
        validation_text(track, stand.data, documents=path)


def command(stand: Stand, name: str, *args, **environment) -> subprocess.CompletedProcess:
    """The referee as a process, with a record that is trusted."""
    options = ["--track", stand.root / TRACK, "--data", stand.data, "--trust"]
    words = [sys.executable, "-m", "records.referee", name, *map(str, (*args, *options))]
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
    done = command(stand, "score", bigram, "--second", second, "--probe-seed", "5")
    assert done.returncode == 0 and "\nval_bpb: " in done.stdout, done.stdout
    assert "probe_seed: 5" in done.stdout


# --- samples ----------------------------------------------------------------------------------------------


class Scripted(Fixed):
    """Writes the tokens that it is given, whatever it reads."""

    def __init__(self, ids: list[int]):
        self.rest = list(ids)

    def logprobs(self, ids, first, end=None):
        found = np.full((1, 1, self.vocab_size), -20, np.float32)
        found[0, 0, self.rest.pop(0)] = 0
        return found


def test_a_sample_comes_in_whole_characters(tokenizer):
    """Some of these are four tokens of one byte each."""
    text = "🦊 naïve 𓀀 日本"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    pieces = list(sample(Scripted(ids), tokenizer, "a", len(ids), 0, np.random.default_rng(1)))
    assert "".join(pieces) == "a" + text and "\ufffd" not in "".join(pieces) and len(pieces) > 8


def test_a_sample_depends_on_seed_and_temperature(tokenizer):
    def text(seed: int, temperature: float) -> str:
        rng = np.random.default_rng(seed)
        return "".join(sample(Fixed(), tokenizer, "the ", 30, temperature, rng))

    assert text(1, 1) == text(1, 1) != text(2, 1)
    assert text(1, 0) == text(2, 0) == text(1, 1e-9)


@slow
def test_a_sample_is_written_by_a_process(stand, bigram, capsys):
    """Here without a sandbox; prompt and text may hold what the terminal does not know."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = command(stand, "sample", bigram, "--prompt", "naïve ", "--tokens", "50", **ascii_only)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("na\\xefve ") and len(done.stdout) > 60
    with pytest.raises(SystemExit, match="2"):
        referee.main(["sample", str(bigram), "--temperature", "-1"])
    assert "expected a number of 0 or more" in capsys.readouterr().err


def test_the_folder_of_a_run_is_a_record_with_the_repository_s_script(tmp_path):
    (tmp_path / "model.ptz").write_bytes(b"")
    settings = {"tokenizer_path": "./data/tokenizers/demo_1024_bpe.model"}
    (tmp_path / "config.json").write_text(json.dumps({"settings": settings}))
    job = find_job(tmp_path)
    assert job.script == helpers.ROOT / "train_gpt.py" and job.artifact == tmp_path / "model.ptz"
    assert job.track.name == "track_10min_floppy" and job.tokenizer_path.name == "demo_1024_bpe.model"
    (tmp_path / "config.json").unlink()
    with pytest.raises(DataError, match="--track"):
        find_job(tmp_path)


PLAIN = """
import torch
@torch.compile(dynamic=False)
def plain():
    return str(torch.bfloat16)
raise LookupError(f"{plain()} {'torch._dynamo' in __import__('sys').modules}")
"""


@slow
@needs_sandbox
def test_a_quick_record_neither_compiles_nor_waits_for_bfloat16(stand, tmp_path):
    job = stand.job(stand.foreign(tmp_path / "plain", PLAIN), "track_torch")
    with (
        pytest.raises(sandbox.SandboxError, match=r"LookupError: torch\.float32 False"),
        job.predictor(quick=True),
    ):
        pass
