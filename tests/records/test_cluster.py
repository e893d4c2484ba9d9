"""--ray: campaigns on Ray nodes that are processes of this machine."""

import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data.command import DataError
from data.files import sha256
from records.campaign import variants
from tests.kit import helpers
from tests.kit.campaign_kit import NARROW, SMEAR, Place, rows_of, wait_until
from tests.kit.data_kit import refused

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="ray is in tests/requirements.txt")
from records.campaign import cluster  # noqa: E402, which needs it


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def begin(monkeypatch) -> Iterator[Callable]:
    """Begins a cluster whose head has so many threads; it ends with the test."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # nothing but these processes is spoken to
    monkeypatch.setenv("RAY_worker_niceness", "0")  # not 15: beside other tests it would starve
    begun = []

    def begin(num_cpus: int = 0):
        begun.append(cluster_utils.Cluster())
        plain = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        begun[-1].add_node(num_cpus=num_cpus, **plain)
        return begun[-1]

    yield begin
    for each in begun:
        each.shutdown()


def options(nodes) -> list:
    return ["--ray", nodes.address, "--keep-every", 0.2]


# --- campaigns --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_killed_in_the_middle_changes_no_bit_of_the_results(place, begin):
    place.write_real(smear=SMEAR, base="smear")
    logs = place.home / "1/smear/logs/1"

    def final() -> dict:
        """Its final event, without what may differ between two runs that did the same."""
        (found,) = helpers.events(logs, "final")
        return {name: found[name] for name in ("val_bpb", "state_sha256", "artifact_sha256")}

    nodes = begin()
    both = {node.node_id: node for node in (nodes.add_node(num_cpus=1), nodes.add_node(num_cpus=1))}
    process = place.start(*options(nodes))
    wait_until(lambda: list(logs.glob("checkpoint/*.ckpt")))  # one came back
    first = json.loads((place.home / "1/smear/places_1.jsonl").read_text())["node"]
    nodes.remove_node(both.pop(first), allow_graceful=False)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (row,) = [row for row in rows_of(said) if row[0] == "smear 1" and len(row) == 3]
    assert [words[-8:] for words in row[1].split(", ")] == [first[:8], *(node[:8] for node in both)]
    assert helpers.events(logs, "final")[0]["resumes"] == 1
    there = final()
    place.home.rename(place.root / "there")
    place.run("--cores", 1)
    assert there == final()


@pytest.mark.slow
def test_a_command_that_was_stopped_or_lost_its_head_goes_on_and_a_strange_node_is_refused(
    place, begin, tmp_path
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

    torch = tmp_path / "odd/torch-9.9.9.dist-info"
    torch.mkdir(parents=True)
    (torch / "METADATA").write_text("Name: torch\nVersion: 9.9.9\n")
    nodes = begin()
    nodes.add_node(num_cpus=1)
    strange = nodes.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(torch.parent)})
    process = place.start(*options(nodes))
    line = next(line for line in process.stdout if line.startswith("refused: "))  # Ray speaks of killed nodes
    assert line.startswith(f"refused: node {strange.node_id} (")
    assert ") has torch 9.9.9, expected " in line
    wait_until(waiting)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=cluster.ATTEMPTS * cluster.PATIENCE + 60)
    assert (process.returncode, errors.count("stopped; the same command goes on")) == (16, 1), errors
    (first,) = waiting()
    before = first.read_text()
    assert begun() == 1

    process = place.start(*options(nodes))
    wait_until(lambda: begun() == 2)
    nodes.shutdown()
    process.communicate(timeout=100)
    assert process.returncode != 0
    assert first.read_text() == before

    go.touch()
    process = place.start(*options(begin(num_cpus=1)))
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
