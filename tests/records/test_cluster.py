"""--ray: campaigns and verifications on Ray nodes that are processes of this machine.

To begin a node takes seconds of a processor, so all tests share one cluster.
"""

import json
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.command import DataError
from data.files import sha256
from records.archive.record import Record
from records.archive.verdicts import read_verdicts
from records.campaign import variants
from tests.kit import helpers, record_kit
from tests.kit.campaign_kit import NARROW, SMEAR, Place, rows_of, wait_until
from tests.kit.data_kit import call, refused, start

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="ray is in tests/requirements.txt")
from records.campaign import cluster  # noqa: E402, which needs it
from records.cluster import nodes  # noqa: E402
from records.verify import cluster as verify_cluster  # noqa: E402


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


class RayNodes:
    """A head, and nodes of one thread. The strange one has another torch, and a bwrap that does not work."""

    def __init__(self, root: Path):
        torch = root / "torch-9.9.9.dist-info"
        torch.mkdir()
        (torch / "METADATA").write_text("Name: torch\nVersion: 9.9.9\n")
        self.odd = record_kit.without_sandbox(root)
        self.begin()

    def begin(self, **head: int) -> None:
        """A head that runs nothing, unless it is given a thread."""
        head = {"num_cpus": 0, **head}
        self.cluster = cluster_utils.Cluster()
        self.cluster.add_node(include_dashboard=False, include_log_monitor=False, no_monitor=True, **head)
        self.ordinary = []
        self.strange = None

    def have(self, ordinary: int) -> None:
        """So many ordinary nodes, and the strange one."""
        while len(self.ordinary) < ordinary:
            self.ordinary.append(self.cluster.add_node(num_cpus=1))
        while len(self.ordinary) > ordinary:
            self.kill(self.ordinary[-1])
        if self.strange is None:
            self.strange = self.cluster.add_node(num_cpus=1, env_vars=self.odd)

    def kill(self, node) -> None:
        self.cluster.remove_node(node, allow_graceful=False)
        self.ordinary.remove(node)

    @property
    def options(self) -> list:
        return ["--ray", self.cluster.address, "--keep-every", 0.2]


@pytest.fixture(scope="module")
def ray_nodes(tmp_path_factory) -> Iterator[RayNodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # nothing but these processes is spoken to
        patch.setenv("RAY_worker_niceness", "0")  # not 15: beside other tests it would starve
        made = RayNodes(tmp_path_factory.mktemp("odd"))
        yield made
        made.cluster.shutdown()


# --- verifications ----------------------------------------------------------------------------------------


def verdicts_in(said: str) -> list[str]:
    """PASS score, and so on, of all lines that say one."""
    return [line.split(":")[0] for line in said.splitlines() if line.startswith(("PASS", "FAIL", "SKIP"))]


def claim_more(submission: dict) -> None:
    submission["scores"] = {seed: score - 0.001 for seed, score in submission["scores"].items()}


@pytest.mark.slow
@pytest.mark.sandbox
def test_records_get_the_verdicts_of_one_machine_and_a_node_without_a_sandbox_is_refused(ray_nodes, tmp_path):
    """Three records and three nodes: each node gets one, so the third is asked, too. Scores are false."""
    author = record_kit.Author(tmp_path, script=record_kit.bigram(), imports=["numpy"])
    record_kit.edit_json(author.folder / "submission.json", claim_more)
    record_kit.reseal(author.folder)
    copies = [author.track / f"2025-11-2{day}_Copy" for day in (2, 3)]
    for copy in copies:
        shutil.copytree(author.folder, copy)
    words = ["--data", author.data, "--second", author.data / "second.jsonl", "--retrain", "any"]
    options = record_kit.options_of(*words)
    there = nodes.home_of(verify_cluster.kit_of(Record(author.folder), options).data)
    shutil.rmtree(there, ignore_errors=True)
    ray_nodes.have(ordinary=2)
    more = [*ray_nodes.options[:2], "--write", "--by", "Ada"]
    process = start("records", "verify", author.folder, *copies, *words, *more)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 1, said + errors
    assert f"refused: node {ray_nodes.strange.node_id} (" in said
    assert said.count(") has no bubblewrap (bwrap) that works\n") == said.count("refused: ") == 1
    assert said.endswith("3 records, 3 checks failed\n")
    kept = read_verdicts(author.track)
    assert [its["failed"] for its in kept.values()] == 3 * [["score"]]
    here = verdicts_in(call("records", "verify", author.folder, *words, code=1))
    assert {"FAIL score", "PASS second-text", "PASS proof", "PASS retrained", "PASS work"} <= {*here}
    assert verdicts_in(said) == 3 * here
    assert sorted(path.name for path in there.rglob("*.bin")) == [
        path.name for path in sorted(author.corpus.data_path.glob("*.bin"))
    ], "the nodes fetched them"


# --- campaigns --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_killed_in_the_middle_changes_no_bit_of_the_results(place, ray_nodes):
    place.write_real(smear=SMEAR, base="smear")
    logs = place.home / "1/smear/logs/1"

    def final() -> dict:
        """Its final event, without what may differ between two runs that did the same."""
        (found,) = helpers.events(logs, "final")
        return {name: found[name] for name in ("val_bpb", "state_sha256", "artifact_sha256")}

    ray_nodes.have(ordinary=2)
    process = place.start(*ray_nodes.options)
    wait_until(lambda: list(logs.glob("checkpoint/*.ckpt")))  # one came back
    first = json.loads((place.home / "1/smear/places_1.jsonl").read_text())["node"]
    (mine,) = [node for node in ray_nodes.ordinary if node.node_id == first]
    ray_nodes.kill(mine)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (row,) = [row for row in rows_of(said) if row[0] == "smear 1" and len(row) == 3]
    assert [words[-8:] for words in row[1].split(", ")] == [first[:8], ray_nodes.ordinary[0].node_id[:8]]
    assert helpers.events(logs, "final")[0]["resumes"] == 1
    there = final()
    place.home.rename(place.root / "there")
    place.run("--cores", 1)
    assert there == final()


@pytest.mark.slow
def test_a_command_that_was_stopped_or_lost_its_head_goes_on_and_a_strange_node_is_refused(
    place, ray_nodes, tmp_path
):
    """A run that waits keeps the ordinary node busy, so the next one is for the strange node."""
    go = tmp_path / "go"
    place.write(narrow=f'settings = {{WIDTH = 1, WAIT_FOR = "{go}"}}', seeds=[1, 2, 3])
    home = place.home / "1/narrow"
    metrics = [home / f"logs/{seed}/metrics.jsonl" for seed in (1, 2, 3)]

    def begun() -> int:
        """Attempts of all runs so far."""
        return sum(path.read_text().count("\n") for path in home.glob("places_*.jsonl"))

    def waiting() -> list[Path]:
        return [path for path in metrics if path.exists() and path.read_text().count("\n") == 5]

    ray_nodes.have(ordinary=1)
    process = place.start(*ray_nodes.options)
    line = next(line for line in process.stdout if line.startswith("refused: "))  # Ray speaks of killed nodes
    assert line.startswith(f"refused: node {ray_nodes.strange.node_id} (")
    assert ") has torch 9.9.9, expected " in line
    wait_until(waiting)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=cluster.ATTEMPTS * cluster.PATIENCE + 60)
    assert (process.returncode, errors.count("stopped; the same command goes on")) == (16, 1), errors
    (first,) = waiting()
    before = first.read_text()
    assert begun() == 1

    process = place.start(*ray_nodes.options)
    wait_until(lambda: begun() == 2)
    ray_nodes.cluster.shutdown()
    process.communicate(timeout=100)
    assert process.returncode != 0
    assert first.read_text() == before

    ray_nodes.begin(num_cpus=1)
    go.touch()
    process = place.start(*ray_nodes.options)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert rows_of(said)[1][:3] == ["narrow", "3 of 3", "1.0020"]
    assert [path.read_text().count('"step"') for path in metrics] == [20, 20, 20], "a key and a value each"
    assert first.read_text().startswith(before)


# --- without nodes ----------------------------------------------------------------------------------------


def test_a_node_fetches_a_dataset_once_and_takes_the_bytes_that_were_meant(place, monkeypatch, tmp_path):
    tokenizer = place.corpus.tokenizer_path
    paths = sorted(place.corpus.data_path.glob("*.bin"))
    files = [{"name": path.name, "sha256": sha256(path.read_bytes())} for path in paths]
    named = {"file": str(tokenizer), "sha256": sha256(tokenizer.read_bytes())}
    there = variants.Dataset(place.corpus.data_path, {"tokenizer": named, "files": files})
    asked = []

    def fetch(path: Path) -> bytes:
        asked.append(path)
        return path.read_bytes()

    monkeypatch.setattr(cluster, "CACHE", tmp_path / "cache")
    here = cluster.dataset_here(there, fetch)
    assert here.settings["VOCAB_SIZE"] == there.settings["VOCAB_SIZE"]
    assert [(here.folder / path.name).read_bytes() for path in paths] == [path.read_bytes() for path in paths]
    assert cluster.dataset_here(there, fetch) == here
    assert asked == [tokenizer, *paths], "once"
    files[0]["sha256"] = "ab" * 32
    with pytest.raises(DataError, match="is not the file that was meant"):
        cluster.dataset_here(there, fetch)


def test_an_address_where_nothing_answers_is_one_line(place):
    place.write(narrow=NARROW, seeds=[1])
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = f"127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    for address, line in (
        (dead, f"--ray {dead}: no head answers there: "),
        ("nowhere", "--ray nowhere: is no address"),
        ("ray://127.0.0.1:10001", "use ray job submit"),
    ):
        assert line in refused(place.run("--ray", address, code=2))
    assert time.monotonic() - began < 15


def test_ray_is_for_those_who_ask_for_it(place, monkeypatch):
    place.write(narrow=NARROW, seeds=[1])
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "records.campaign.cluster")
    monkeypatch.delattr("records.campaign.cluster")
    assert "pip install 'ray[default]==" in refused(place.run("--ray", "auto", code=2))
    place.run()
