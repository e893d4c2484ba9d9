"""Tracks: what track.json says of a text, a track of several devices, and reference compressors.

The sizes of these come from real round trips, also after the training text; their file and the board.
"""

import bz2
import hashlib
import json
import lzma
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import brotli
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

HERE = [compressors.ZLIB, compressors.BZIP2, compressors.BROTLI, compressors.XZ, compressors.PPMD]
HERE += [compressors.zstd(), compressors.zstd(b"what the reader has")]
sandboxed = pytest.mark.sandbox
bounded = pytest.mark.cgroups
needs_zpaq = pytest.mark.skipif(not shutil.which("zpaq"), reason="no zpaq: apt-get install zpaq")


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


# --- new and fill -----------------------------------------------------------------------------------------


def test_a_new_track_asks_for_what_nobody_else_knows(tmp_path):
    """Operations, bytes and a text; the rest is another track's. It is a whole track then."""
    source = data_kit.write_jsonl(tmp_path / "mine.jsonl", helpers.documents(200, 3))
    options = ("--name", "mine", "--vocab-size", 400, "--val-docs", 20, "--root", tmp_path)
    call("data", "prepare", "text", source, *options)
    limits = ["--operations", "1e12", "--budget-bytes", 40_000]
    words = ["--data", tmp_path / "data", *limits, "--dataset", "mine_sp400"]
    folder = tmp_path / "track_mine"
    said = call("records", "track", "new", folder, *words)
    assert f"{folder}/track.json: written, with all other rules of track_floppy" in said
    made, like = load_track(folder), load_track(helpers.ROOT / "records/track_floppy")
    manifest = json.loads((tmp_path / "data/datasets/mine_sp400/manifest.json").read_text())
    assert made.dataset["val_sha256"] == manifest["val_sha256"]
    assert (made["train_flops"], made["budget_bytes"], made["alpha"]) == (10**12, 40_000, like["alpha"])
    before = (folder / "track.json").read_text()
    assert "says all of this already" in call("records", "track", "fill", folder, "--data", tmp_path / "data")
    assert "expected a new folder" in one_line(call("records", "track", "new", folder, *words, code=2))
    assert (folder / "track.json").read_text() == before
    other = tmp_path / "track_b"
    words[-1] = "gone_sp400"
    assert "holds no manifest" in one_line(call("records", "track", "new", other, *words, code=3))
    assert not other.exists()


OF_TEXT = ("val_sha256", "train_sha256", "val_bytes")
OF_TOKENS = ("tokenizer_sha256", "val_tokens", "logged_val_sha256", "logged_train_sha256")


def clear(rules, here=lambda name: True):
    """What a track says before its datasets were ever here."""
    rules["dataset"].update(dict.fromkeys(OF_TEXT))
    for one in rules["dataset"]["vocabularies"]:
        one.update(dict.fromkeys(OF_TOKENS) if here(one["name"]) else {})


def fill(folder, data, code=0):
    return call("records", "track", "fill", folder, "--data", data, code=code)


@pytest.fixture
def empty(kit, tmp_path):
    """A copy of the tiny track whose track.json has nulls."""
    folder = tmp_path / "track_tiny"
    folder.mkdir()
    shutil.copy(kit[0] / "records/track_tiny/track.json", folder)
    edit_json(folder / "track.json", clear)
    return folder


def test_nulls_get_what_the_shards_say_and_nothing_else_changes(kit, empty):
    root, corpus = kit
    before = json.loads((empty / "track.json").read_text())
    said = fill(empty, root / "data")
    assert "tiny_sp260: left as it is" in said
    now = json.loads((empty / "track.json").read_text())
    expected = json.loads((root / "records/track_tiny/track.json").read_text())["dataset"]
    texts = [hashlib.sha256(text.encode()).digest() for text in corpus.texts["train"]]
    expected["train_sha256"] = hashlib.sha256(b"".join(texts)).hexdigest()
    assert {name: now["dataset"][name] for name in OF_TEXT} == {name: expected[name] for name in OF_TEXT}
    left, filled = now["dataset"]["vocabularies"]
    assert filled == expected["vocabularies"][1] and left == before["dataset"]["vocabularies"][0]
    clear(now)
    assert now == before
    written = (empty / "track.json").stat()
    assert "says all of this already" in fill(empty, root / "data")
    assert (empty / "track.json").stat() == written


@pytest.mark.slow
def test_the_floppy_s_values_come_back(tmp_path):
    """Byte for byte, for the vocabularies whose shards are here."""
    committed = helpers.ROOT / "records/track_floppy/track.json"
    here = [path.name for path in (helpers.ROOT / "data/datasets").glob("demo_*")]
    if not here:
        pytest.skip("no demo corpus: python -m data prepare demo")
    shutil.copy(committed, tmp_path)
    edit_json(tmp_path / "track.json", lambda rules: clear(rules, here.__contains__))
    fill(tmp_path, helpers.ROOT / "data")
    assert (tmp_path / "track.json").read_bytes() == committed.read_bytes()


@pytest.mark.parametrize("name", [*OF_TEXT, *OF_TOKENS])
def test_another_value_is_never_written_over(kit, empty, name):
    other = 7 if name in ("val_bytes", "val_tokens") else "ab" * 32

    def change(rules):
        place = rules["dataset"] if name in OF_TEXT else rules["dataset"]["vocabularies"][1]
        place[name] = other

    edit_json(empty / "track.json", change)
    before = (empty / "track.json").read_bytes()
    line = one_line(fill(empty, kit[0] / "data", code=3))
    assert f": {name} is " in line and f", the track's is {other}: " in line
    assert (empty / "track.json").read_bytes() == before and len([*empty.iterdir()]) == 1


def damage(path):
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda data: damage(data / "datasets/tiny_sp400/tiny_train_000001.bin"), "crc32"),
        (lambda data: (data / "datasets/tiny_sp400/tiny_train_000001.bin").unlink(), "missing shards"),
        (lambda data: [p.unlink() for p in data.glob("datasets/*/*_val_*.bin")], "val: no shards"),
        (lambda data: shutil.rmtree(data / "datasets/tiny_sp400"), "shards of no dataset of the track"),
        (lambda data: (data / "tokenizers/tiny.model").unlink(), "tiny.model: cannot be used"),
        (lambda data: (data / "tokenizers/tiny.model").write_bytes(b"none"), "tiny.model: cannot be used"),
    ],
)
def test_what_is_not_whole_fills_nothing(kit, empty, tmp_path, harm, words):
    data = tmp_path / "data"
    shutil.copytree(kit[0] / "data", data)
    harm(data)
    before = (empty / "track.json").read_bytes()
    assert words in one_line(fill(empty, data, code=3))
    assert (empty / "track.json").read_bytes() == before and len([*empty.iterdir()]) == 1


# --- a track of two devices -------------------------------------------------------------------------------

PAIR = 2  # ranks, and seeds too


def small(rules):
    """The track of eight H100 for two processes of this machine, with limits for a tiny run."""
    (vocabulary,) = rules["dataset"]["vocabularies"]
    vocabulary.update(name="tiny_sp400", tokenizer="tiny.model")
    rules.update(device="cpu", devices=PAIR, train_seconds=30, budget_bytes=300_000)
    rules.update(artifact_below=1000, noise_bpb=0.1, log_tolerance_bpb=0.2, seeds=[*range(PAIR)])


class Team:
    """Somebody who trains on two processes, on a small copy of the track of eight H100."""

    def __init__(self, root):
        self.root = root
        self.data = root / "data"
        self.corpus = record_kit.make_data(self.data)
        self.track = root / "records/track_pair"
        self.track.mkdir(parents=True)
        shutil.copy(helpers.ROOT / "records/track_10min_16mb/track.json", self.track)
        edit_json(self.track / "track.json", small)
        fill(self.track, self.data)
        self.script = root / "train_gpt.py"
        shutil.copy(helpers.SCRIPT, self.script)  # the repository's own may change under the runs
        runs = [self.train(seed) for seed in range(PAIR)]
        words = ["--track", self.track, "--name", "Pair", "--author", "Ada", "--what", "x", "--why", "y"]
        places = ["--data", self.data]
        more = ["--date", "2025-11-21"]
        self.record = record_kit.frozen(*runs, *words, *places, *more)

    def train(self, seed):
        settings = {**record_kit.SETTINGS, "CODE_BYTES": "raw", "SEED": seed, "RUN_ID": f"run{seed}"}
        done = helpers.run_script(self.root, self.corpus.env(**settings), PAIR, script=self.script)
        assert done.code == 0, done.err
        return done.folder

    def copy(self, root):
        """A copy of the record in a copy of the track."""
        shutil.copytree(self.track, root / self.track.name)
        return root / self.track.name / self.record.name


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    return Team(tmp_path_factory.mktemp("team"))


@pytest.mark.slow
@sandboxed
@bounded
def test_a_track_of_two_devices_judges_a_record_whose_artifacts_are_not_kept(team, tmp_path, monkeypatch):
    """From nulls to a first place: filled, trained by torchrun, frozen, verified, judged, on the board."""
    record = team.copy(tmp_path)
    assert not list(record.glob("model*")) and "ranks:2 " in (record / "train_seed0.log").read_text()
    said = call("records", "verify", record, "--data", team.data, "--write", "--by", "Ada", code=3)
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
    words = [record, "--data", team.data, "--work", tmp_path / "judge", "--write", "--by", "Ada"]
    said = call("records", "judge", *words)
    assert "verdict: ranked" in said and "no record stands before it" in said, said
    its = read_verdicts(record.parent)[record.name]
    assert len(its["judged"]["seeds"]) == PAIR and its["judged"]["mean"] > 0
    assert [run.about["ranks"] for run in logs] == ["2"] * PAIR
    (tmp_path / "README.md").write_text("<!-- board -->\n<!-- /board -->\n")
    call("records", "board", "--records", tmp_path)
    assert "| 1 | [Pair](" in (tmp_path / "README.md").read_text()
    artifact = next(tmp_path.glob("judge/**/model.ptz"))
    call("records", "score", record, "--artifact", artifact, "--data", team.data)
    call("records", "sample", record, "--artifact", artifact, "--data", team.data)


@pytest.mark.slow
@sandboxed
@bounded
def test_a_seed_of_two_devices_comes_back_within_the_track_s_operations(team, tmp_path):
    record = team.copy(tmp_path)
    edit_json(record.parent / "track.json", lambda rules: rules.update(train_flops=10**12))
    said = call("records", "verify", record, "--data", team.data, "--retrain", "any")
    assert "the artifact came back bit for bit" in said and "PASS work: " in said, said


@pytest.mark.slow
@sandboxed
@bounded
def test_a_script_that_fails_in_a_room_of_two_devices_has_its_own_words_in_the_verdict(team, tmp_path):
    record = team.copy(tmp_path)
    settings = training.settings(Record(record), 0) | {"ITERATIONS": "none"}
    with training.training_sandbox(Record(record), team.data, settings) as done:
        pass
    assert done.code == 1 and "train_gpt.py: ITERATIONS='none'" in done.said, done


def test_a_machine_with_fewer_gpus_than_the_track_s_trains_nothing(monkeypatch):
    track = load_track(helpers.ROOT / "records/track_10min_16mb")
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(["/dev/nvidia0"]))
    with pytest.raises(VerifierError, match="trains on 8 CUDA GPUs, this machine has 1"):
        training.need_devices(track)


# --- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", HERE, ids=lambda one: f"{one.name} {one.settings}")
@settings(max_examples=5)
@given(text=st.binary(min_size=1, max_size=2000) | st.text(min_size=1).map(str.encode))
def test_every_text_comes_back(compressor, text):
    packed = compressor.pack(text)
    assert compressor.unpack(packed) == text
    assert compressors.cost(compressor, text) == len(packed)


@needs_zpaq
def test_zpaq_gives_the_text_back(kit):
    text = text_of(kit[1], "val")
    compressor = compressors.zpaq()
    packed = compressor.pack(text)
    assert compressor.unpack(packed) == text and compressor.version[0].isdigit()
    with pytest.raises(DataError, match="zpaq extract"):
        compressor.unpack(b"no archive")


def test_sizes_are_those_of_the_libraries(kit, written):
    text, training = text_of(kit[1], "val"), text_of(kit[1], "train")
    extreme = 9 | lzma.PRESET_EXTREME
    expected = {
        ("zlib", NOTHING): len(zlib.compress(text, 9)),
        ("bzip2", NOTHING): len(bz2.compress(text)),
        ("brotli", NOTHING): len(brotli.compress(text)),
        ("xz", NOTHING): len(lzma.compress(text, preset=extreme)),
        ("xz", TRAINING): len(lzma.compress(training + text, preset=extreme))
        - len(lzma.compress(training, preset=extreme)),
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


# --- the command ------------------------------------------------------------------------------------------


def test_the_file_tells_its_command_and_its_texts(kit, written):
    said, value = written
    assert "python -m records track compressors" in value["written"] and "--write" in value["written"]
    assert value["val_sha256"] == load_track(kit[0] / "records/track_tiny").dataset["val_sha256"]
    sizes = [len(text_of(kit[1], split)) for split in ("val", "train")]
    assert [value["val_bytes"], value["train_bytes"]] == sizes
    printed = [line for line in said.splitlines() if "bits per byte" in line]
    assert printed == [str(ReferenceCompressor(**row)) for row in value["rows"]]


def test_what_cannot_be_measured_is_skipped(kit, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for most in (10, len(text_of(kit[1], "train")) - 1):  # tokens, bytes
        monkeypatch.setattr(compressors, "MOST_BYTES", most)
        said = call("records", "track", "compressors", *arguments(kit[0]))
        assert "SKIP zpaq -m5: is not installed: apt-get install zpaq\n" in said
        assert f"SKIP after the training text: it has more than {most} bytes\n" in said
        assert said.count("bits per byte") == 6


def test_a_wrong_track_or_text_is_reported(kit, track):
    def refused(*words, code=3):
        line = one_line(call("records", "track", "compressors", *words, code=code))
        assert not list(track.parent.rglob("*.partial"))
        return line

    options = arguments(kit[0], "--write")[1:]
    assert "holds no track.json" in refused(track.parent, *options)
    assert "expected one of tiny_sp260, tiny_sp400" in refused(track, "--dataset", "other")
    assert "no such file" in refused(track, "--dataset", "tiny_sp400", "--data", track)
    for name, words in (("train_sha256", "training text has sha256"), ("val_sha256", "validation text has")):
        edit_json(track / "track.json", lambda rules, name=name: rules["dataset"].update({name: "ab" * 32}))
        assert words in refused(track, *options)
    one_line(call("records", "track", "compressors", code=2))


# --- the board --------------------------------------------------------------------------------------------


def test_the_board_shows_them(track, written):
    root = ("--records", track.parent)
    call("records", "board", *root, "--check", code=1)
    call("records", "board", *root)
    call("records", "board", *root, "--check")
    text = (track.parent / "README.md").read_text()
    assert "python -m records track compressors records/track_tiny --write" in text
    for row in written[1]["rows"]:
        assert f"| {row['after']} | {row['bytes']:,} | {row['bits_per_byte']:.4f} |\n" in text
    (track / "yardsticks.json").unlink()
    call("records", "board", *root)
    assert "track compressors" not in (track.parent / "README.md").read_text()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"val_sha256": "ab" * 32}, "measured a text of sha256 abab"),
        ({"rows": []}, "'rows' is no list of whole rows"),
        ({"rows": [{"name": "zlib"}]}, "'rows' is no list of whole rows"),
        (
            {"rows": [dict(zip(ReferenceCompressor.__annotations__, "abcdef"))]},
            "'rows' is no list of whole rows",
        ),
    ],
)
def test_the_board_refuses_those_of_another_text_and_damaged_ones(track, change, message):
    edit_json(track / "yardsticks.json", lambda kept: kept.update(change))
    before = (track.parent / "README.md").read_bytes()
    line = one_line(call("records", "board", "--records", track.parent, code=3))
    assert message in line and "python -m records track compressors" in line
    assert (track.parent / "README.md").read_bytes() == before
