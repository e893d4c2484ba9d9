"""`data prepare hub:OWNER/NAME`: datasets of text as others publish them, from the local hub."""

import gzip
import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.kit import data_kit, helpers

pytestmark = pytest.mark.slow

DOCUMENTS = helpers.documents(300, 3)
HALVES = (DOCUMENTS[:150], DOCUMENTS[150:])
STORIES = "roneneldan/TinyStories"


def parquet(documents: list[str], column: str = "text", **others: list) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({column: documents} | others), file)
    return file.getvalue()


def jsonl(documents: list[str], field: str = "text", **others: object) -> bytes:
    return "".join(json.dumps({field: text} | others) + "\n" for text in documents).encode()


def stories() -> dict[str, bytes]:
    """The layout of TinyStories: two splits in parquet, and other editions beside them as plain text."""
    shards = {f"data/train-0000{n}-of-00002-2d5a.parquet": parquet(half) for n, half in enumerate(HALVES)}
    others = {"README.md": b"# stories\n", "TinyStories-train.txt": b"a story\n" * 99}
    return shards | others | {"data/validation-00000-of-00001-869c.parquet": parquet(DOCUMENTS[:9])}


OPTIONS = ("--vocab-size", 400, "--val-docs", 20)


def run(hub, root: Path, *words: object, code: int = 0) -> str:
    with hub.here(token=""):
        return data_kit.call("data", "prepare", words[0], *OPTIONS, *words[1:], "--root", root, code=code)


def manifest(root: Path, name: str) -> dict:
    return data_kit.manifest_of(root / f"data/datasets/{name}_sp400")


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> str:
    """What identifies the same documents as a text of one's own: all their hashes."""
    root = tmp_path_factory.mktemp("own")
    data_kit.prepare(root, DOCUMENTS, *OPTIONS, name="own")
    return manifest(root, "own")["corpus_sha256"]


def test_tiny_stories_in_one_line_and_a_second_vocabulary_fetches_nothing(hub, own, tmp_path):
    commit = hub.commit(STORIES, stories())
    run(hub, tmp_path, f"hub:{STORIES}")
    made = manifest(tmp_path, "TinyStories")
    assert made["corpus_sha256"] == own and made["origin"] == f"hub:{STORIES}@{commit}"
    assert len(hub.fetched("parquet")) == 2, "neither the other split nor the other editions"
    run(hub, tmp_path, f"hub:{STORIES}@{commit}", "--vocab-size", 500)
    assert len(hub.fetched("parquet")) == 2


LAYOUTS = {
    "c4": ({f"en/c4-train.0000{n}-of-2.json.gz": gzip.compress(jsonl(h)) for n, h in enumerate(HALVES)}, ()),
    "folders": (
        {f"train/{n}/part.jsonl": jsonl(half) for n, half in enumerate(HALVES)},
        ("--subset", "train"),
    ),
    "nosplit": ({"all.ndjson": jsonl(DOCUMENTS)}, ()),
    "array": ({"train.json": json.dumps(DOCUMENTS).encode(), "dataset_infos.json": b"{}"}, ()),
    "content": ({"train.parquet": parquet(DOCUMENTS, "content", stars=[*range(300)])}, ()),
    "named": ({"train.jsonl": jsonl(DOCUMENTS, "body", title="x")}, ("--column", "body")),
    "edition": (
        {"a.txt": b"other", "v2-train.txt": "\n<|endoftext|>\n".join(DOCUMENTS).encode()},
        ("--subset", "v2-train.txt", "--separator", "<|endoftext|>", "--name", "edition"),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_others_publish_is_the_same_text(hub, own, tmp_path, layout):
    files, options = LAYOUTS[layout]
    hub.commit(f"them/{layout}", {"README.md": b"# card\n"} | files)
    run(hub, tmp_path, f"hub:them/{layout}", *options)
    (folder,) = tmp_path.glob("data/datasets/*_sp400")
    made = data_kit.manifest_of(folder)
    assert sum(file["documents"] for file in made["files"]) == 300
    if layout != "edition":  # plain text keeps the line's end before its separator
        assert made["corpus_sha256"] == own


def test_a_subset_and_the_first_files_of_it(hub, tmp_path):
    sample = {f"sample/10BT/00{n}_00000.parquet": parquet(half) for n, half in enumerate(HALVES)}
    dumps = {f"data/CC-MAIN-20{n}/000_00000.parquet": parquet(DOCUMENTS) for n in range(10, 30)}
    hub.commit("HuggingFaceFW/fineweb", sample | dumps | {"sample/100BT/000.parquet": parquet(DOCUMENTS)})
    said = data_kit.refused(run(hub, tmp_path, "hub:HuggingFaceFW/fineweb", code=2))
    assert said.endswith("or . for all: data (20 folders), sample/100BT, sample/10BT")
    said = data_kit.refused(run(hub, tmp_path, "hub:HuggingFaceFW/fineweb", "--subset", "10BT", code=2))
    assert "sample/10BT" in said
    assert not hub.fetched("parquet")
    run(hub, tmp_path, "hub:HuggingFaceFW/fineweb", "--subset", "sample/10BT", "--files", 1)
    assert hub.fetched("parquet") == ["000_00000.parquet"]
    made = manifest(tmp_path, "fineweb-sample-10BT")
    assert sum(file["documents"] for file in made["files"]) == 150


def test_text_that_cannot_be_found_is_refused_in_a_line(hub, tmp_path):
    for files, words in (
        ({"load.cfg": b"-"}, "but load.cfg; @refs/convert/parquet after the name reads what the hub made"),
        ({"train.jsonl": b'{"a": 1}'}, "has none; --field NAME chooses"),
    ):
        hub.commit("them/bad", files)
        assert words in data_kit.refused(run(hub, tmp_path, "hub:them/bad", code=3))


def test_names_that_are_not_there(hub, tmp_path):
    for words in (["hub:stories"], ["hub", "me/stories"]):
        assert "hub:user/name" in data_kit.refused(run(hub, tmp_path, *words, code=2))
    hub.commit("me/model", {"model.bin": b""}, kind="models")
    assert "no dataset repo" in data_kit.refused(run(hub, tmp_path, "hub:me/model", code=3))
