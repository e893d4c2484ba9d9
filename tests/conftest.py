"""Fixtures of the trainer's tests: one tiny corpus and one finished run, made once."""

import os
import signal

import pytest
from hypothesis import settings

from records.sandbox import bubblewrap, limits
from tests.kit import helpers

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch loads; pytest -n runs files side by side
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background jobs ignore it, and their children
settings.register_profile("here", deadline=None, database=None, derandomize=True)
settings.load_profile("here")

# The files that take longest, as they are begun: a tail would keep one worker busy, and two that wait for the
# same sandbox would keep each other waiting.
LONGEST = """
    test_records test_cluster test_campaign test_follow test_run test_pages test_referee test_mlx
    test_reliability test_compare test_judge test_walls test_foreign test_hub_records
"""


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would begin the files with the most tests
    config.addinivalue_line("markers", "slow: seconds or more; left out by -m 'not slow'")
    config.addinivalue_line("markers", "cuda: needs a GPU; skipped where there is none")
    config.addinivalue_line("markers", "sandbox: needs bubblewrap; skipped where none works")
    config.addinivalue_line("markers", "cgroups: needs the kernel's account; skipped where there is none")


def pytest_runtest_setup(item):
    """Skip a test that needs what is not here, before it makes its fixtures."""
    if item.get_closest_marker("sandbox") and bubblewrap.find() is None:
        pytest.skip(bubblewrap.why_none())
    if item.get_closest_marker("cgroups") and limits.find() is None:
        pytest.skip("no cgroups here: they take root, or systemd")


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    """A lossless tokenizer of 400 pieces."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return helpers.train_tokenizer(folder / "tiny.model", helpers.documents(400, 3))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, tokenizer_path):
    """A tiny corpus with extended headers. Read only."""
    return helpers.make_corpus(tmp_path_factory.mktemp("corpus"), tokenizer_path)


@pytest.fixture(scope="session")
def base_run(tmp_path_factory, corpus):
    """20 fp32 steps. Read only."""
    import train_gpt  # most sessions of other folders need no torch

    env = corpus.env(RUN_ID="läuft-日本", ITERATIONS=20, VAL_LOSS_EVERY=10, TRAIN_LOG_EVERY=5)
    return helpers.run_here(train_gpt.main, tmp_path_factory.mktemp("base"), env)
