"""Tracks: what track.json says of a text, a track of several devices, and reference compressors.

The sizes of these come from real round trips, also after the training text; their file and the board.
"""

import bz2
import json
import lzma
import re
import shutil
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import brotli
import pytest

from data.command import DataError
from records.archive.checks import VerifierError
from records.archive.runs import Record
from records.archive.tracks import NOTHING, TRAINING, ReferenceCompressor, load_track
from records.archive.verdicts import read_verdicts
from records.referee import compressors
from records.verify import training
from tests.kit import data_kit, helpers, record_kit
from tests.kit.data_kit import call
from tests.kit.data_kit import refused as one_line
from tests.kit.record_kit import edit_json

sandboxed = pytest.mark.sandbox
bounded = pytest.mark.cgroups


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """A tiny corpus: data/ and the folder of its track."""
    root = tmp_path_factory.mktemp("yardsticks")
    corpus = record_kit.make_data(root / "data")
    record_kit.make_track(root / "records/track_tiny", corpus)
    return root, corpus


def arguments(root, *more):
    return [root / "records/track_tiny", "--dataset", "tiny_sp400", "--data", root / "data", *more]


def text_of(corpus, split):
    return "".join(corpus.texts[split]).encode()


@pytest.fixture(scope="module")
def written(kit):
    """What the command said, and what it wrote."""
    root, _ = kit
    said = call("records", "track", "compressors", *arguments(root, "--write"))
    return said, json.loads((root / "records/track_tiny/yardsticks.json").read_text())


@pytest.fixture
def track(kit, written, tmp_path):
    """A copy of the track with its compressors, and a README beside it."""
    shutil.copytree(kit[0] / "records/track_tiny", tmp_path / "track_tiny")
    (tmp_path / "README.md").write_text("<!-- board -->\n<!-- /board -->\n")
    return tmp_path / "track_tiny"


# --- new --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tales(tmp_path_factory):
    """The folder data/ with somebody's own text, and its manifest."""
    root = tmp_path_factory.mktemp("tales")
    source = data_kit.write_jsonl(root / "tales.jsonl", helpers.documents(200, 3))
    options = ("--name", "tales", "--vocab-size", 400, "--val-docs", 20, "--root", root)
    call("data", "prepare", "text", source, *options)
    manifest = json.loads((root / "data/datasets/tales_sp400/manifest.json").read_text())
    return root / "data", manifest


def new_track(folder, data, *more, code=0, records=None):
    words = ("--dataset", "tales_sp400", "--data", data, "--records", records or folder.parent)
    return call("records", "track", "new", folder, *words, *more, code=code)


@pytest.mark.slow
def test_a_new_track_has_its_text_its_limits_and_the_rules_of_another(tales, tmp_path):
    """It ends with a command that trains within these limits, which the script takes as it is."""
    data, manifest = tales
    folder = tmp_path / "track_my_tales"
    said = new_track(folder, data, "--operations", "15e11", "--budget-bytes", 40_000)
    assert f"{folder}/track.json: written, with all other rules of track_floppy" in said
    made, like = load_track(folder), load_track(helpers.ROOT / "records/track_floppy")
    assert made["title"] == "My tales", "no number that a rule may change"
    assert (made["train_flops"], made["budget_bytes"]) == (15 * 10**11, 40_000)
    assert all(made[name] == like[name] for name in ("alpha", "seeds", "artifact_below"))
    val = manifest["files"][0]
    expected = {name: manifest[name] for name in ("val_sha256", "train_sha256")}
    expected |= {"val_bytes": val["bytes"], "val_tokens": val["tokens"] - 1, "second": None}
    expected |= {"tokenizer_sha256": manifest["tokenizer"]["sha256"]}
    assert expected.items() <= made.dataset.items()
    (line,) = re.findall("^  (for seed .*; done)$", said, re.MULTILINE)
    line = line.replace("1337 1338 1339", "1337").replace(" python ", f" DRY_RUN=1 {sys.executable} ")
    done = subprocess.run(["bash", "-c", line], cwd=helpers.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"  python -m records track compressors {folder} --write\n" in said
    assert "BUDGET_BYTES=40000" in done.stdout and "MAX_FLOPS=1500000000000 " in done.stdout


@pytest.mark.parametrize(
    "name, words",
    [
        ("records/track_here", "exists already; edit "),
        ("records/tales", "a track is a folder of records/, such as "),
        ("track_tales", "a track is a folder of records/, such as "),
        ("records/more/track_tales", "a track is a folder of records/, such as "),
    ],
)
def test_a_new_track_is_a_new_folder_of_records(tales, tmp_path, name, words):
    root = tmp_path / "records"
    (root / "track_here").mkdir(parents=True)
    (root / "track_here/track.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert words in one_line(new_track(tmp_path / name, tales[0], code=2, records=root))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda data: helpers.flip(data / "datasets/tales_sp400/tales_train_000000.bin", -1), "crc32"),
        (lambda data: (data / "datasets/tales_sp400/tales_val_000000.bin").unlink(), "val: no shards"),
        (lambda data: shutil.rmtree(data / "datasets/tales_sp400"), "holds no manifest.json"),
        (lambda data: (data / "tokenizers/tales_400_bpe.model").write_bytes(b"none"), "cannot be used"),
    ],
)
def test_a_text_that_is_not_whole_makes_no_track(tales, tmp_path, harm, words):
    data = tmp_path / "data"
    shutil.copytree(tales[0], data)
    harm(data)
    assert words in one_line(new_track(tmp_path / "track_tales", data, code=3))
    assert not (tmp_path / "track_tales").exists()


# --- a track of two devices -------------------------------------------------------------------------------

PAIR = 2  # ranks, and seeds too


def small(rules):
    """The track of eight H100 for two processes of this machine and a tiny text."""
    (vocabulary,) = rules["dataset"]["vocabularies"]
    vocabulary.update(name="tiny_sp400", tokenizer="tiny.model")
    rules.update(device="cpu", devices=PAIR, train_seconds=30, budget_bytes=300_000)
    rules.update(artifact_below=1000, noise_bpb=0.1, log_tolerance_bpb=0.2, seeds=[*range(PAIR)])


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """data/, and a record that was trained by two processes on a small copy of the track of eight H100."""
    root = tmp_path_factory.mktemp("team")
    data, track, like = (root / name for name in ("data", "records/track_pair", "like"))
    corpus = record_kit.make_data(data)
    like.mkdir()
    shutil.copy(helpers.ROOT / "records/track_10min_16mb/track.json", like)
    edit_json(like / "track.json", small)
    places = ["--records", track.parent, "--data", data, "--like", like]
    call("records", "track", "new", track, "--dataset", "tiny_sp400", *places)
    script = shutil.copy(helpers.SCRIPT, root)  # the repository's own may change under the runs
    runs = []
    for seed in range(PAIR):
        settings = {**record_kit.SETTINGS, "CODE_BYTES": "raw", "SEED": seed, "RUN_ID": f"run{seed}"}
        done = helpers.run_script(root, corpus.env(**settings), PAIR, script=Path(script))
        assert done.code == 0, done.err
        runs.append(done.folder)
    words = ["--name", "Pair", "--author", "Ada", "--what", "x", "--why", "y", "--date", "2025-11-21"]
    return data, record_kit.frozen(*runs, *words, "--track", track, "--data", data)


@pytest.fixture
def pair(team, tmp_path):
    """data/, and a copy of the record in a copy of the track."""
    data, record = team
    shutil.copytree(record.parent, tmp_path / record.parent.name)
    return data, tmp_path / record.parent.name / record.name


@pytest.mark.slow
@sandboxed
@bounded
def test_a_track_of_two_devices_judges_a_record_whose_artifacts_are_not_kept(pair, tmp_path, monkeypatch):
    """From a text to a first place: trained by torchrun, frozen, verified, judged, on the board."""
    data, record = pair
    assert not list(record.glob("model*")) and "ranks:2 " in (record / "train_seed0.log").read_text()
    said = call("records", "verify", record, "--data", data, "--write", "--by", "Ada", code=3)
    assert "SKIP score: no artifact is here" in said
    assert said.endswith("\n1 records, 0 checks failed, 1 not scored: their scores are claims\n")
    its = read_verdicts(record.parent)[record.name]
    assert its["verdict"] == "checked" and its["left"].keys() == {"score"}
    logs = []
    run_of = training.run_of

    def read_log(work):
        logs.append(run_of(work))
        return logs[-1]

    monkeypatch.setattr(training, "run_of", read_log)
    words = [record, "--data", data, "--work", tmp_path / "judge", "--write", "--by", "Ada"]
    said = call("records", "judge", *words)
    assert "verdict: ranked" in said and "no record stands before it" in said, said
    its = read_verdicts(record.parent)[record.name]
    assert len(its["judged"]["seeds"]) == PAIR and its["judged"]["mean"] > 0
    assert [run.about["ranks"] for run in logs] == ["2"] * PAIR
    (tmp_path / "README.md").write_text("<!-- board -->\n<!-- /board -->\n")
    call("records", "board", "--records", tmp_path)
    assert "| 1 | [Pair](" in (tmp_path / "README.md").read_text()
    artifact = next(tmp_path.glob("judge/**/model.ptz"))
    call("records", "score", record, "--artifact", artifact, "--data", data)
    call("records", "sample", record, "--artifact", artifact, "--data", data)


@pytest.mark.slow
@sandboxed
@bounded
def test_a_script_that_fails_in_a_room_of_two_devices_has_its_own_words_in_the_verdict(pair):
    data, record = pair
    settings = training.settings(Record(record), 0) | {"ITERATIONS": "none"}
    with training.training_sandbox(Record(record), data, settings) as done:
        pass
    assert done.code == 1 and "train_gpt.py: ITERATIONS='none'" in done.said, done


def test_a_machine_with_fewer_gpus_than_the_track_s_trains_nothing(monkeypatch):
    track = load_track(helpers.ROOT / "records/track_10min_16mb")
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(["/dev/nvidia0"]))
    with pytest.raises(VerifierError, match="trains on 8 CUDA GPUs, this machine has 1"):
        training.need_devices(track)


# --- sizes ------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_libraries(kit, written):
    text, training = text_of(kit[1], "val"), text_of(kit[1], "train")
    extreme = 9 | lzma.PRESET_EXTREME
    both = len(lzma.compress(training + text, preset=extreme))
    expected = {
        ("zlib", NOTHING): len(zlib.compress(text, 9)),
        ("bzip2", NOTHING): len(bz2.compress(text)),
        ("brotli", NOTHING): len(brotli.compress(text)),
        ("xz", TRAINING): both - len(lzma.compress(training, preset=extreme)),
    }
    rows = {(row["name"], row["after"]): row for row in written[1]["rows"]}
    assert {key: rows[key]["bytes"] for key in expected} == expected
    for name in ("zstd", "xz", "PPMd"):
        assert 0 < rows[name, TRAINING]["bytes"] < 0.9 * rows[name, NOTHING]["bytes"]
    for row in rows.values():
        assert row["bits_per_byte"] == pytest.approx(8 * row["bytes"] / len(text), abs=1e-6)


def test_a_compressor_that_loses_something_is_an_error():
    broken = replace(compressors.ZLIB, unpack=lambda packed: b"")
    with pytest.raises(DataError, match=r"zlib .*: does not give back"):
        compressors.cost(broken, b"text")


# --- the command, and the board ---------------------------------------------------------------------------


def test_what_cannot_be_measured_is_skipped(kit, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for most in (10, len(text_of(kit[1], "train")) - 1):  # tokens, bytes
        monkeypatch.setattr(compressors, "MOST_BYTES", most)
        said = call("records", "track", "compressors", *arguments(kit[0]))
        assert "SKIP zpaq -m5: is not installed: apt-get install zpaq\n" in said
        assert f"SKIP after the training text: it has more than {most} bytes\n" in said
        assert said.count("bits per byte") == 6


def test_a_wrong_track_or_text_is_reported(kit, track):
    def refused(*words):
        return one_line(call("records", "track", "compressors", *words, code=3))

    options = arguments(kit[0], "--write")[1:]
    assert "holds no track.json" in refused(track.parent, *options)
    assert "expected one of tiny_sp260, tiny_sp400" in refused(track, "--dataset", "other")
    assert "no such file" in refused(track, "--dataset", "tiny_sp400", "--data", track)
    for name, words in (("train_sha256", "training text has sha256"), ("val_sha256", "validation text has")):
        edit_json(track / "track.json", lambda rules, name=name: rules["dataset"].update({name: "ab" * 32}))
        assert words in refused(track, *options)


def test_the_board_shows_what_was_measured_and_how(kit, track, written):
    said, value = written
    printed = [line for line in said.splitlines() if "bits per byte" in line]
    assert printed == [str(ReferenceCompressor(**row)) for row in value["rows"]]
    sizes = [len(text_of(kit[1], split)) for split in ("val", "train")]
    assert [value["val_bytes"], value["train_bytes"]] == sizes
    root = ("--records", track.parent)
    call("records", "board", *root, "--check", code=1)
    call("records", "board", *root)
    call("records", "board", *root, "--check")
    text = (track.parent / "README.md").read_text()
    assert "python -m records track compressors records/track_tiny --write" in text
    for row in value["rows"]:
        assert f"| {row['after']} | {row['bytes']:,} | {row['bits_per_byte']:.4f} |\n" in text


@pytest.mark.parametrize(
    "change, message",
    [
        ({"val_sha256": "ab" * 32}, "measured a text of sha256 abab"),
        ({"rows": [dict(zip(ReferenceCompressor.__annotations__, "abcdef"))]}, "rows/0/after: "),
    ],
)
def test_the_board_refuses_those_of_another_text_and_damaged_ones(track, change, message):
    edit_json(track / "yardsticks.json", lambda kept: kept.update(change))
    before = (track.parent / "README.md").read_bytes()
    line = one_line(call("records", "board", "--records", track.parent, code=3))
    assert message in line and "python -m records track compressors" in line
    assert (track.parent / "README.md").read_bytes() == before
