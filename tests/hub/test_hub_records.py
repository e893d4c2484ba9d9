"""`records publish`, hub: addresses of referee and verify."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.kit import data_kit
from tests.kit.record_kit import TRUST, Author, bigram, passed_earlier

pytestmark = pytest.mark.slow

REPO = "me/mine"
MODEL = "model_seed1.ptz"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def author(tmp_path_factory):
    return Author(tmp_path_factory.mktemp("author"), script=bigram(), imports=["numpy"])


def call(hub, *args: object, code: int = 0, **hub_here: str) -> str:
    """What a command says that runs in this process; its exit code is checked."""
    with hub.here(**hub_here):
        return data_kit.call("records", *args, code=code)


def publish(hub, folder: Path, data: Path) -> str:
    return call(hub, "publish", folder, "--to", REPO, "--data", data)


def refused(hub, *args: object, **hub_here: str) -> str:
    return data_kit.refused(call(hub, *args, code=3, **hub_here))


def put(hub, author: Author, **changes: bytes | None) -> str:
    """A commit of a repo with the record in it, and files changed in its folder; None takes one away."""
    place = f"{author.track.name}/{author.folder.name}"
    files = {f"{place}/{path.name}": path.read_bytes() for path in author.folder.iterdir()}
    for name, data in changes.items():
        files[f"{place}/{name}"] = data
    kept = {path: data for path, data in files.items() if data is not None}
    return hub.commit(REPO, kept, kind="models")


# --- publish ----------------------------------------------------------------------------------------------


def test_a_record_that_did_not_pass_is_published_as_such_and_then_as_passed(hub, author, tmp_path):
    root = tmp_path / "records"
    shutil.copytree(author.track, root / "track_tiny")
    folder = root / "track_tiny" / author.folder.name
    out = publish(hub, folder, author.data)
    assert "the record did not pass, and its card says so: none" in out
    files = hub.files(REPO, "models")
    there = {path.removeprefix(f"track_tiny/{folder.name}/"): data for path, data in files.items()}
    for path in folder.iterdir():
        if path.name != "README.md":
            assert there[path.name] == path.read_bytes()
    assert files[f"track_tiny/{folder.name}/README.md"] == (folder / "README.md").read_bytes()
    assert files["tokenizers/tiny.model"] == (author.data / "tokenizers/tiny.model").read_bytes()
    card = ModelCard(files["README.md"].decode())
    (result,) = card.data.eval_results
    scores = json.loads((folder / "submission.json").read_text())["scores"].values()
    assert result.metric_value == pytest.approx(sum(scores) / len(scores), abs=1e-7)
    assert result.metric_name.endswith("claimed") and card.data.license == "mit"
    assert "**This record did not pass.**" in card.text and f"sample hub:{REPO}" in card.text

    sent = len(hub.requests)
    assert "nothing to publish: hub:me/mine@" in publish(hub, folder, author.data)
    assert not [one for one in hub.requests[sent:] if not one.startswith("GET")]

    passed_earlier(folder)
    assert f": 1 of {len(files) - 1} files were sent" in publish(hub, folder, author.data)
    card = ModelCard(hub.files(REPO, "models")["README.md"].decode())
    assert "did not pass" not in card.text and card.data.eval_results[0].metric_name == "bits per byte"


def test_what_holds_something_else_is_left_as_it_is(hub, author):
    theirs = {
        "me/card": ({"README.md": b"mine"}, "holds README.md"),
        "me/model": ({"model.bin": b"weights", "README.md": b"mine"}, "holds model.bin"),
    }
    for repo_id, (files, words) in theirs.items():
        hub.commit(repo_id, files, kind="models")
        args = ("publish", author.folder, "--data", author.data, "--to", repo_id)
        assert words in refused(hub, *args)
        assert hub.files(repo_id, "models") == files
    for repo_id, token, words in (
        ("me/x", "", "no token: set HF_TOKEN"),
        ("me/x", "hf_wrong", "HTTP 401"),
        ("you/x", "hf_write", "HTTP 403"),
    ):
        args = ("publish", author.folder, "--data", author.data, "--to", repo_id)
        line = refused(hub, *args, token=token)
        assert words in line and f"may write to {repo_id}" in line
    assert "check network" in refused(
        hub, "publish", author.folder, "--data", author.data, "--to", REPO, url=NOWHERE
    )


# --- hub: addresses ---------------------------------------------------------------------------------------


def test_a_record_is_fetched_at_a_commit_and_judged_in_the_sandbox(hub, author, tmp_path):
    publish(hub, author.folder, author.data)
    commit = hub.repos[f"models/{REPO}"]["refs"]["main"]
    places = ("--data", author.data, "--track", author.track, "--second", author.data / "second.jsonl")
    out = call(hub, "verify", f"hub:{REPO}", *places, *TRUST)
    assert f"hub:{REPO}@{commit}, of track_tiny" in out and "1 records, 0 checks failed" in out
    hub.commit(REPO, {"README.md": b"it has moved on"}, kind="models")

    # from the cache: a commit cannot change. The tokenizer that data/ lacks came with the record.
    data = tmp_path / "data"
    at = (f"hub:{REPO}@{commit}", "--track", author.track, "--data", data)
    text = tmp_path / "text.txt"
    text.write_text("one two")
    env = hub.environment(HF_ENDPOINT=NOWHERE)
    process = data_kit.start("records", "complete", at[0], text, *at[1:], *TRUST, env=env)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (data / "tokenizers/tiny.model").exists() and at[0] in err and "hub:" not in out
    assert "expected the one of a record" in refused(hub, "sample", f"hub:{REPO}")


def test_what_is_no_record_is_not_fetched(hub, author):
    script = author.folder.joinpath("train_gpt.py").read_bytes()
    cases = {
        "has no place in a record": put(hub, author, **{"usercustomize.py": b"import os"}),
        "has no place in a record ": put(hub, author, **{"deep/train_gpt.py": script}),
        "400000 at most": put(hub, author, **{MODEL: bytes(400_001)}),
        "expected the one of a record": hub.commit(REPO, {"train_gpt.py": script}, kind="models"),
        "no revision": "0" * 40,
    }
    for words, commit in cases.items():
        args = (f"hub:{REPO}@{commit}", "--track", author.track, "--static")
        assert words.strip() in refused(hub, "verify", *args)
    assert not hub.fetched()
    put(hub, author)
    assert "--track names the track" in refused(hub, "verify", f"hub:{REPO}", "--static")
    assert "no model repo" in refused(hub, "verify", "hub:no/body", "--static")
    for address in "hub:x", "hub:a/b/c", "hub:../b@main", "hub:a/b@":
        assert "is no address" in call(hub, "verify", address, "--static", code=2)
    hub.fault(f"GET .*{MODEL}", body=lambda data: data[:-1] + b"\xff")
    line = refused(hub, "verify", f"hub:{REPO}", "--track", author.track, "--static")
    assert "checksum is not" in line and not [*hub.home.rglob(MODEL)]
