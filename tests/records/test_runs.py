"""Runs of one's own text: no track has it, a hash finds the tokenizer, and the script is the user's."""

import json
import re
import shutil
from pathlib import Path

import pytest

from data.command import DataError
from data.files import sha256
from records.archive import runs
from records.sandbox import bubblewrap
from records.sandbox.jobs import find_job
from tests.kit import helpers, record_kit
from tests.kit.data_kit import call, refused
from tests.kit.record_kit import edit_json

TOKENIZER = "data/tokenizers/tiny.model"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run in logs/ of the working folder, whose data lie in data/, with a script of its own."""
    monkeypatch.chdir(tmp_path)
    corpus = record_kit.make_data(tmp_path / "data")
    folder = record_kit.foreign(corpus, tmp_path / "logs/run")
    (folder / "model.bin").rename(folder / "model.ptz")
    settings = {"data_path": "data/datasets/tiny_sp400", "tokenizer_path": TOKENIZER}
    hashes = {"tokenizer_sha256": helpers.sha256(corpus.tokenizer_path).hex()}
    hashes["val_sha256"] = sha256(corpus.tokens["val"])
    (folder / "config.json").write_text(json.dumps({"settings": settings, "sha256": hashes}))
    return folder


def change(run, part, **values):
    edit_json(run / "config.json", lambda about: about[part].update(values))


@pytest.mark.slow
def test_all_commands_need_neither_track_nor_trust(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bubblewrap, "tried", dict)
    text = tmp_path / "a.txt"
    text.write_text(" ".join(helpers.documents(9, 8)), encoding="utf-8")
    words = "sample {0} --tokens 9, complete {0} a.txt --tokens 9, score {0}, prove {0}"
    words += ", compress {0} a.txt, decompress {0} a.txt.bg -o b.txt"
    for each in words.format(run).split(", "):
        said = call("records", *each.split(), "--data", "data")
        assert "is your own run and runs without a sandbox" in said, each
    assert (tmp_path / "b.txt").read_bytes() == text.read_bytes()
    run.rename("sent")
    assert "--trust" in refused(call("records", "sample", "sent", "--data", "data", code=3))
    assert "is a run, no record" in refused(call("records", "verify", "sent", code=3))


def test_a_run_is_one_s_own_in_logs_alone(run):
    """And if no link leads out of there."""
    out = shutil.copytree(run, Path("x").absolute())
    linked, link = Path("logs/linked"), Path("logs/link")
    shutil.copytree(run, linked, ignore=shutil.ignore_patterns("*.py"))
    (linked / "train_gpt.py").symlink_to(out / "train_gpt.py")
    link.symlink_to(out)
    record = shutil.copytree(out, "logs/record", ignore=shutil.ignore_patterns("config.json"))
    assert [path for path in (run, out, linked, link, Path(record)) if runs.is_own(path)] == [run]


FOUND = {  # where the tokenizer is put
    "under another name": lambda run, tokenizer: tokenizer.rename("data/tokenizers/z.model"),
    "by a path": lambda run, tokenizer: change(run, "settings", tokenizer_path=tokenizer.rename("x").name),
    "of a dataset that is called as a track's": lambda run, _: change(
        run, "settings", data_path="demo_sp1024"
    ),
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_tokenizer_is_found_by_its_hash(run, tmp_path, kind):
    tokenizer = tmp_path / TOKENIZER
    wanted = helpers.sha256(tokenizer)
    FOUND[kind](run, tokenizer)
    (tmp_path / "data/tokenizers/a.model").write_bytes(b"another")
    job = find_job(run, data=tmp_path / "data")
    assert helpers.sha256(job.tokenizer_path) == wanted


def test_a_strangers_folder_does_not_name_the_file_that_is_parsed(run, tmp_path):
    elsewhere = shutil.copytree(run, tmp_path / "elsewhere")
    change(elsewhere, "settings", tokenizer_path=(tmp_path / TOKENIZER).rename(tmp_path / "x").as_posix())
    with pytest.raises(DataError, match=r"none of .* has its tokenizer's sha256"):
        find_job(elsewhere, data=tmp_path / "data")


def test_what_is_missing_or_was_changed_is_named(run):
    def said(name):
        return refused(call("records", name, run, "--data", "data", "--trust", code=3))

    change(run, "sha256", val_sha256="ab" * 32)
    assert "the validation text has logged_val_sha256 " in said("score")
    (run / "train_gpt.py").write_text("def load_predictor(artifact, device):\n    int('width')\n")
    assert re.search(r"run/train_gpt\.py: the record raised ValueError: .*'width'", said("sample"))
    change(run, "sha256", tokenizer_sha256="cd" * 32)
    assert re.search(f"none of .*{TOKENIZER}, .*{'cd' * 32}: cp FILE.model data/tokenizers", said("sample"))
    change(run, "sha256", tokenizer_sha256=None)
    assert "which config.json does not name" in said("sample")
