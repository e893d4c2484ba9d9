"""What lies on the disk of records: metrics that are packed, and which referee judged."""

import gzip
import os
import re
import shutil
import tracemalloc

import pytest

from data.command import REPO, DataError
from records.archive import runs
from records.archive.metrics import find_runs
from records.archive.runs import Record, read_runs
from records.verify import claims, version
from tests.kit.metrics_kit import write_run

# --- metrics ----------------------------------------------------------------------------------------------


def test_packed_metrics_are_read_as_the_plain_ones(tmp_path):
    run = write_run(tmp_path / "run")
    data = (run / "metrics.jsonl").read_bytes()
    (whole,) = find_runs(run)
    packed = runs.pack(data)
    assert len(packed) < 0.4 * len(data) and packed == runs.pack(data)
    (tmp_path / "metrics_seed1.jsonl.gz").write_bytes(packed)
    (tmp_path / "metrics_seed2.jsonl").write_bytes(data)
    one, other = find_runs(tmp_path)
    assert [one.name, other.name] == [f"{tmp_path.name} seed1", f"{tmp_path.name} seed2"]
    assert one.final == other.final == whole.final and one.steps == whole.steps
    assert find_runs(tmp_path / "metrics_seed1.jsonl.gz")[0].final == whole.final


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda data: gzip.compress(bytes(17 << 20), 1), "unpacks to more than 16777216 bytes"),
        (lambda data: gzip.compress(data)[:-20], "is no whole gzip file, or more than one"),
        (lambda data: gzip.compress(data) * 2, "is no whole gzip file, or more than one"),
        (lambda data: gzip.compress(data) + b"x", "is no whole gzip file, or more than one"),
        (lambda data: data, "cannot be unpacked: "),
        (lambda data: b"", "is no whole gzip file"),
    ],
    ids=["a bomb", "cut off", "two in one", "more behind it", "plain", "empty"],
)
def test_odd_packed_metrics_are_refused_in_one_line(tmp_path, make, words):
    path = tmp_path / "metrics_seed1.jsonl.gz"
    path.write_bytes(make(b'{"event": "step"}\n' * 100))
    for read in (runs.read_metrics, find_runs):
        with pytest.raises(DataError, match=words) as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_logs_and_metrics_of_a_record_are_bounded_together(tmp_path):
    """And their events are never in memory together: an object of one key takes forty times its text."""

    def write_seeds(count, packed):
        for seed in range(count):
            (tmp_path / f"train_seed{seed}.log").write_text("run:x preset:y\n---\nsteps: 1\n")
            (tmp_path / f"metrics_seed{seed}.jsonl.gz").write_bytes(packed)

    metrics = b'{"":0}\n' * 50_000
    write_seeds(3, runs.pack(metrics))
    tracemalloc.start()
    try:
        found = read_runs(tmp_path)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len([*found[0].events]) == 50_000 and kept < most < 6 * len(metrics)
    packed = runs.pack(b'{"event": "%s"}' % (b"x" * (15 << 20)))
    write_seeds(4, packed)
    assert len(read_runs(tmp_path)) == 4
    write_seeds(5, packed)
    with pytest.raises(DataError, match="logs and metrics have more than 67108864 bytes, unpacked"):
        read_runs(tmp_path)


# --- the referee's version -------------------------------------------------------------------------------


# Files that a score and a verdict rest on: whoever trusts them has to read these. May fall, not rise.
SCORE_FILES, VERDICT_FILES = 7, 22


def test_what_a_score_and_a_verdict_rest_on_grows_no_more():
    """Each package's __init__.py, which is a line, is not counted."""

    def size(*starts: str) -> int:
        return sum(not name.endswith("/__init__.py") for name in version.sources_of({*starts}))

    assert size("records/referee/scoring.py") <= SCORE_FILES
    assert size(*version.JUDGES, *version.INSIDE) <= VERDICT_FILES


def test_whoever_changes_what_decides_says_whether_it_can_alter_a_score_or_a_verdict():
    digest = version.sources_digest()
    text = (REPO / version.CHANGES).read_text(encoding="utf-8")
    mend = f"{version.CHANGES}: a new number if a score or a verdict can differ, and always `{digest}`"
    assert f"\nSources: `{digest}`\n" in text, mend
    newest, *_ = numbers = [int(number) for number in re.findall(r"^## (\d+)$", text, re.MULTILINE)]
    assert numbers == [*range(newest, 0, -1)] and version.referee_version() == f"{newest}+{digest}"


def test_a_user_s_name_in_latin_1_is_read(monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.name")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", os.fsdecode("Jörg".encode("latin-1")))
    assert version.who() == "J\ufffdrg"


def test_the_digest_changes_with_what_decides_and_with_nothing_else(tmp_path):
    for name in ("data", "records"):
        odd = shutil.ignore_patterns("track_*", "datasets", "tokenizers", "__pycache__", "*.svg")
        shutil.copytree(REPO / name, tmp_path / name, ignore=odd)
    first = version.sources_digest(tmp_path)
    assert first == version.sources_digest()
    late = "\n\ndef late():\n    from records.verify import rules\n"
    (tmp_path / "records/verify/rules.py").write_text("")
    for name, text, changes in (
        ("records/board/tables.py", "\n", 0),
        ("records/verify/evaluation.py", "\n", 1),
        ("records/sandbox/inside/training.py", "\n", 1),
        ("records/schema.json", "\n", 1),
        ("records/verify/claims.py", late, 1),
    ):
        before = version.sources_digest(tmp_path)
        with open(tmp_path / name, "a") as file:
            file.write(text)
        assert (version.sources_digest(tmp_path) != before) == changes, name
    assert "records/verify/rules.py" in version.sources_of(version.JUDGES, tmp_path)


def test_a_package_that_is_missing_is_no_verdict_on_a_record(tmp_path):
    def check_claim(_):
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    with pytest.raises(ModuleNotFoundError):
        list(claims.guarded(check_claim, Record(tmp_path)))
