"""A machine on which no sandbox can be made: what needs one is skipped and says why, and nothing fails."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import helpers, record_kit

pytestmark = pytest.mark.slow
REASON = "no sandbox can be made here"


def said_without_a_sandbox(folder: Path, *words: str) -> str:
    """What pytest says with `words` where bwrap is hidden; it must not fail."""
    env = helpers.clean_environment(**record_kit.without_sandbox(folder))
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=helpers.ROOT, env=env, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_tests_are_collected_and_those_of_the_sandbox_skipped(tmp_path):
    """Of a set in which anything fails to import, or makes a fixture first, the exit code is not 0."""
    said = said_without_a_sandbox(tmp_path, "-m", "sandbox", "tests")
    ended = re.fullmatch(r"(\d+) skipped, \d+ deselected.*", said.splitlines()[-1])
    assert ended and int(ended[1]) > 50, said
    reasons = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert len(reasons) == 1 and f": {REASON} (" in reasons[0], said
    assert f"{tmp_path / 'bwrap'}: bwrap: no permissions" in reasons[0]


def test_papers_of_records_are_checked_all_the_same(tmp_path):
    """The fixture of most tests of records freezes runs, which the referee scores."""
    test = "tests/records/test_records.py::test_a_good_record_passes_every_check_on_paper"
    assert said_without_a_sandbox(tmp_path, test).splitlines()[-1].startswith("1 passed in ")
