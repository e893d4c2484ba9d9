"""Records and datasets to the hub and back: the real client against tests/kit/hub_server.py."""
