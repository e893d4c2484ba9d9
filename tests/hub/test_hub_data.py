"""`data publish`, and `data download` of what it published."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import DatasetCard

from tests.kit import data_kit, helpers

pytestmark = pytest.mark.slow

REPO = "me/words"
NAME = "words_sp400"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """data/ with a dataset of ours in several shards."""
    root = tmp_path_factory.mktemp("here")
    options = ("--vocab-size", 400, "--shard-tokens", 4000, "--val-docs", 20)
    data_kit.prepare(root, helpers.documents(400, 3), *options, name="words")
    return root / "data"


def publish(hub, root: Path, code: int = 0, to: str = REPO) -> str:
    with hub.here():
        return data_kit.call("data", "publish", root / "datasets" / NAME, "--to", to, code=code)


def test_what_is_published_is_what_download_fetches(hub, root, tmp_path):
    assert "files were sent" in publish(hub, root)
    assert "nothing to publish" in publish(hub, root)
    ours = {path.name: path.read_bytes() for path in root.rglob("*.bin")}
    count = sum("_train_" in name for name in ours)
    assert count > 1
    options = ("--repo-id", REPO, "--variant", "sp400", "--train-shards", count, "--root", tmp_path / "data")
    with hub.here(token=""):  # by anybody
        data_kit.call("data", "download", *options)
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*.bin")} == ours
    name = "tokenizers/words_400_bpe.model"
    assert (tmp_path / "data" / name).read_bytes() == (root / name).read_bytes()
    card = DatasetCard(hub.files(REPO)["README.md"].decode())
    assert "lossy" not in card.content.lower() and f"--variant {NAME} --train-shards {count}" in card.text
    place = f"datasets/datasets/{NAME}/manifest.json"
    assert hub.files(REPO)[place] == (root / "datasets" / NAME / "manifest.json").read_bytes()


def test_the_card_of_a_lossy_dataset_says_so(hub, tmp_path):
    data_kit.prepare(tmp_path, [f"{n} \u2581" for n in range(9)], "--lossy-ok", name="words")
    with hub.here():
        data_kit.call("data", "publish", tmp_path / "data/datasets/words_sp260", "--to", REPO)
    card = DatasetCard(hub.files(REPO)["README.md"].decode())
    assert "**Lossy.**" in card.text and "lossy" in card.data.tags


def test_what_is_not_published(hub, root, tmp_path):
    hub.commit("me/other", {"datasets/manifest.json": b"{}", "data.bin": b""})
    assert "data.bin" in data_kit.refused(publish(hub, root, code=3, to="me/other"))
    copy = tmp_path / "data"
    shutil.copytree(root, copy)
    path = copy / "datasets" / NAME / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    assert f"expected {'0' * 64}" in data_kit.refused(publish(hub, copy, code=3))
    path.unlink()
    assert "holds no manifest.json" in data_kit.refused(publish(hub, copy, code=3))
