"""What the script meets away from home: others' shards and names, other launchers, mounts and tokenizers."""

import contextlib
import dataclasses
import errno
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from data import command, shards
from tests.kit import helpers
from tests.trainer.test_damage import loaded
from train_gpt import DataError, find_shards, load_settings

# --- names and order of shards: the rule of data/README.md ------------------------------------------------

NAMES = [f"a_{split}_{n}.bin" for split in ("train", "val") for n in ("0", "00", "1", "000002", "10", "3")]
NAMES += ["a_val_bytes_0.bin", "a_val_0 (1).bin", "a_val_1_old.bin", ".a_val_1.bin", "._a_train_0.bin"]
NAMES += ["a_train.bin", "b_val_1.bin", "b_train_1.bin", "a_val_1.BIN", "notes.txt"]


@settings(max_examples=150)
@given(st.lists(st.sampled_from(NAMES), max_size=7, unique=True))
def test_trainer_and_data_read_the_same_files_in_the_same_order(names):
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where, "set")  # others' folders may stand beside `where`, and go
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        notes: list[str] = []
        found = {}
        for split in ("val", "train"):
            with contextlib.suppress(DataError):
                found[split] = find_shards(str(folder), split, notes)
        sets = {path.name.split("_")[0] for path in itertools.chain(*found.values())}
        try:
            expected = dict(zip(("val", "train"), shards.find_shards(folder)))
        except command.DataError:
            assert len(found) < 2 or len(sets) > 1
            return
        assert found == {split: paths for split, paths in expected.items() if paths}
        left_out = [name for name in names if name.endswith(".bin") and name[0] != "."]
        left_out = sorted({*left_out} - {path.name for path in itertools.chain(*expected.values())})
        assert not found or bool(left_out) == bool(notes)
        assert not notes or left_out[0] in notes[0]


def test_a_part_of_the_training_shards_trains(corpus, tmp_path):
    shutil.copytree(corpus.data_path, tmp_path / "data")
    (tmp_path / "data/tiny_train_000002.bin").unlink()
    part = dataclasses.replace(corpus, data_path=tmp_path / "data")
    assert len(loaded(part).train.paths) == 2


# --- text and tokenizer -----------------------------------------------------------------------------------


def test_documents_and_text_of_legacy_shards_are_known_by_the_tokenizer(corpus, tmp_path, tokenizer_path):
    legacy = helpers.make_corpus(tmp_path, tokenizer_path, extended=False)
    before = loaded(legacy)
    assert np.array_equal(before.train.documents, loaded(corpus).train.documents)
    assert loaded(legacy).sha256 == before.sha256
    path = tmp_path / "tiny_train_000000.bin"
    raw = path.read_bytes()
    helpers.patch(path, 1026, raw[1028:1030] + raw[1026:1028])
    assert loaded(legacy).sha256["train_sha256"] != before.sha256["train_sha256"], "of the same size"


def test_a_tokenizer_without_a_piece_for_the_space_is_refused_where_bytes_are_decoded(tmp_path):
    texts = [text.replace(" ", "") for text in helpers.documents(400, 3)]
    path = helpers.train_tokenizer(tmp_path / "x.model", texts)
    made = helpers.make_corpus(tmp_path / "data", path, extended=False)
    with pytest.raises(DataError, match=r"x\.model: whether spaces have no piece is True"):
        loaded(made, VOCAB_SIZE=made.tokenizer.vocab_size())


def test_data_path_alone_names_tokenizer_and_vocabulary(tmp_path):
    folder = tmp_path / "datasets/notes"
    folder.mkdir(parents=True)
    about = {"tokenizer": {"file": "../../tokenizers/x.model", "vocab_size": 300}}
    (folder / "manifest.json").write_text(json.dumps(about))
    env = helpers.tiny_env(DATA_PATH=folder)
    env.pop("VOCAB_SIZE")
    s, origins = load_settings(env, "smoke")
    assert (s.tokenizer_path, s.vocab_size) == (str(tmp_path / "tokenizers/x.model"), 300)
    assert origins["vocab_size"] == "dataset"
    assert load_settings(env | {"VOCAB_SIZE": "400"}, "smoke")[0].vocab_size == 400
    for damaged in ("", "[]", "{}", '{"tokenizer": {"file": 1}}', '{"tokenizer": {"file": "x"}}'):
        (folder / "manifest.json").write_text(damaged)
        assert load_settings(env, "smoke")[0].vocab_size == load_settings({}, "smoke")[0].vocab_size


@pytest.mark.slow
def test_an_artifact_is_not_scored_with_another_tokenizer(base_run, tmp_path):
    path = helpers.train_tokenizer(tmp_path / "other.model", helpers.documents(400, 9))
    other = helpers.make_corpus(tmp_path / "data", path)
    run = helpers.run_here(train_gpt.main, tmp_path, other.env(EVAL_ONLY=base_run.folder / "model.ptz"))
    assert run.code == 3 and "model.ptz: sha256 of the tokenizer is " in run.err and run.err.count("\n") == 1


# --- arguments, launchers, mounts -------------------------------------------------------------------------


def main(capsys, *arguments: str) -> tuple[int, str, str]:
    code = train_gpt.main(argv=[str(helpers.SCRIPT), *arguments])
    return code, *capsys.readouterr()


def test_help_lists_the_settings_and_other_arguments_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("PRESET", "smoke")
    code, out, _ = main(capsys, "--help")
    assert code == 0 and out.startswith(train_gpt.__doc__)
    assert all(
        f"{name.upper()}=" in out and row.metadata["doc"] in out for name, row in train_gpt.ROWS.items()
    )
    for argument in ("--num_layers=3", "ITERATIONS=5", "-v"):
        code, out, err = main(capsys, argument)
        assert (code, out) == (2, "") and f"{argument}: give settings as in PRESET=" in err


def open_machine(**env) -> train_gpt.Machine:
    return train_gpt.open_machine(load_settings(helpers.tiny_env(DEVICE="cpu", **env), "smoke")[0])


def test_without_asserts_nothing_is_compiled():
    """torch would make wrong code, and keep it for later runs with asserts."""
    s = "train_gpt.load_settings({'DEVICE': 'cpu'}, 'floppy')[0]"
    done = helpers.python("-O", "-c", f"import train_gpt; print(train_gpt.open_machine({s}).compile)")
    assert done.stdout == "False\n"


LEFT_OVER = "RANK=1 WORLD_SIZE=2 WORLD_SIZE= WORLD_SIZE=x WORLD_SIZE=-2 RANK=x LOCAL_RANK=-1 LOCAL_RANK=7"
WRONG = dict.fromkeys(("MASTER_PORT=x", "MASTER_PORT=70000"), "MASTER_PORT")
WRONG |= {"RANK=x": "RANK", "WORLD_SIZE=x": "WORLD_SIZE", "WORLD_SIZE=0": "WORLD_SIZE"}
WRONG |= {"WORLD_SIZE=3": "WORLD_SIZE=3: by BATCH_SLOTS takes one of 1, 2, 4, 8"}


@pytest.mark.parametrize("word", LEFT_OVER.split())
def test_ranks_without_an_address_are_left_over_and_one_process_runs(word, monkeypatch):
    monkeypatch.setenv(*word.split("="))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    machine = open_machine()
    assert (machine.rank, machine.world) == (0, 1)


@pytest.mark.parametrize("word", WRONG)
def test_wrong_ranks_are_one_line_and_no_traceback(word, capsys, monkeypatch):
    name, value = word.split("=")
    ranks = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": 2, "RANK": 0, "DEVICE": "cpu"}
    for each, text in helpers.tiny_env(**ranks | {name: value}).items():
        monkeypatch.setenv(each, text)
    code, _, err = main(capsys)
    assert code == 2 and err.count("\n") == 1 and WRONG[word] in err


def test_two_tasks_of_slurm_without_torchrun_are_noted(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    open_machine()
    assert "note: SLURM_NTASKS" in capsys.readouterr().out


def fail(number: int) -> mock.Mock:
    return mock.Mock(side_effect=OSError(number, "not here"))


def test_a_mount_without_locks_is_noted_and_one_without_fsync_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    about = {"settings": {}, "sha256": {}, "environment": {"threads": 2, "script_sha256": "ab"}}
    monkeypatch.setattr(train_gpt.fcntl, "flock", fail(errno.ENOLCK))
    monkeypatch.setattr(train_gpt.os, "fsync", fail(errno.EINVAL))
    s = load_settings({"RUN_ID": "x"}, "smoke")[0]
    folder, *_ = train_gpt.open_run(s, about, {"train_gpt.py": b"pass"})
    assert (folder / "train_gpt.py").read_bytes() == b"pass" and "has no lock" in capsys.readouterr().out
    monkeypatch.setattr(train_gpt.os, "fsync", fail(errno.EIO))
    with pytest.raises(OSError, match="not here"):
        train_gpt.write_whole(folder / "model", b"")


LIMITS = [("cpu.max", "100000 100000", 1), ("cpu.max", "250000 100000", 2), ("cpu.max", "max 100000", 4)]
LIMITS += [("cpu/cpu.cfs_quota_us", "25000", 1), ("cpu/cpu.cfs_quota_us", "-1", 4), ("cpu.max", "", 4)]
LIMITS += [("job/cpu.max", "200000 100000", 2), ("cpu/job/step/cpu.cfs_quota_us", "150000", 3)]
LIMITS += [("cpu/x/cpu.cfs_quota_us", "100000", 4), ("job/step/cpu.max", "800000 100000", 4)]


@pytest.mark.parametrize(("name", "text", "threads"), LIMITS)
def test_a_containers_limit_bounds_the_threads(tmp_path, monkeypatch, capsys, name, text, threads):
    """Or that of the process's own group or one above it; a line says so."""
    groups = "0::/job/step\n9:memory:/x\n4:cpu,cpuacct:/job/step\n1:name=systemd:/\n"
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    (tmp_path / name.replace("quota", "period")).write_text("50000" if "quota" in name else text)
    monkeypatch.setattr(train_gpt, "read_proc", lambda _: groups)
    monkeypatch.setattr(train_gpt, "Path", lambda path: tmp_path / path.removeprefix("/sys/fs/cgroup/"))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        open_machine()
        assert torch.get_num_threads() == threads
        assert capsys.readouterr().out.count(f"{name} limits the threads") == (threads < 4)
    finally:
        torch.set_num_threads(before)
