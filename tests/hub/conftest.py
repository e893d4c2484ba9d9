"""The local server that speaks the hub's protocol."""

import pytest

from tests.kit.hub_server import HubServer


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def hub(server, tmp_path):
    server.reset()
    server.home = tmp_path / "home"
    yield server
    server.closing.set()
