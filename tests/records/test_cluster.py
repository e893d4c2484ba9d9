"""--ray: campaigns on Ray nodes that are processes of this machine."""

import contextlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from records.campaign import variants
from tests.kit import helpers
from tests.kit.campaign_kit import NARROW, Place, wait_until
from tests.kit.data_kit import refused

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="ray is in tests/requirements.txt")


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


# --- campaigns --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_killed_in_the_middle_changes_no_bit_of_the_results(place, begin):
    place.script = helpers.SCRIPT
    shared = helpers.tiny_env(ITERATIONS=200, CKPT_SECONDS=0.05, TRAIN_LOG_EVERY=1)
    lines = [f'{name} = "{value}"' for name, value in shared.items() if name not in variants.OURS]
    patch = helpers.ROOT / "tests/ideas/smear_gate.patch"
    place.write("\n".join(["[settings]", *lines]), base="smear", seeds=[1], smear=f'patches = ["{patch}"]')
    logs = place.home / "1/smear/logs/1"

    def final() -> dict:
        """Its final event, without what may differ between two runs that did the same."""
        (found,) = helpers.events(logs, "final")
        return {name: found[name] for name in ("val_bpb", "state_sha256", "artifact_sha256")}

    nodes = begin()
    with tempfile.TemporaryDirectory() as scratch:
        lost = nodes.add_node(num_cpus=1, env_vars={"TMPDIR": scratch})
        process = place.start("--ray", nodes.address)
        wait_until(lambda: [*Path(scratch).glob("*/logs/1/checkpoint/*.ckpt")])
        nodes.add_node(num_cpus=1)
        nodes.remove_node(lost, allow_graceful=False)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    there = final()
    place.home.rename(place.root / "there")
    place.run("--cores", 1)
    assert there == final()


def processes_with(word: str) -> list[str]:
    """Processes in whose environment a word stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if word.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


@pytest.mark.slow
def test_a_command_that_was_stopped_goes_on_with_what_had_not_ended(place, begin, tmp_path):
    go = tmp_path / "go"
    place.write(narrow=NARROW, waits=f'settings = {{WIDTH = 2, WAIT_FOR = "{go}"}}', seeds=[1])
    process = place.start("--ray", begin(num_cpus=1).address)
    assert next(process.stdout) == "narrow 1: 1.0010 bits per byte\n"
    wait_until(lambda: processes_with(f"WAIT_FOR={go}"))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.count("stopped; the same command goes on")) == (16, 1), errors
    wait_until(lambda: not processes_with(f"WAIT_FOR={go}"))
    go.touch()
    process = place.start("--ray", begin(num_cpus=1).address)
    said, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert said.startswith("waits 1: 2.0010 bits per byte\n")
    assert len(place.attempts("narrow", 1)) == len(place.attempts("waits", 1)) == 1


@pytest.mark.slow
def test_a_node_with_another_torch_is_refused(place, begin, tmp_path):
    torch = tmp_path / "odd/torch-9.9.9.dist-info"
    torch.mkdir(parents=True)
    (torch / "METADATA").write_text("Name: torch\nVersion: 9.9.9\n")
    nodes = begin()
    strange = nodes.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(torch.parent)})
    process = place.start("--ray", nodes.address)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 3
    line = refused(errors)
    assert line.startswith(f"error: node {strange.node_id} (")
    assert ") has torch 9.9.9, expected " in line and "ray stop there" in line


# --- without nodes ----------------------------------------------------------------------------------------


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
    monkeypatch.delitem(sys.modules, "records.campaign.cluster", raising=False)
    monkeypatch.delattr("records.campaign.cluster", raising=False)
    assert "pip install 'ray[default]==" in refused(place.run("--ray", "auto", code=2))
    place.run()
