"""A machine on which no sandbox can be made: what needs one is skipped and says why. CI has such machines."""

import re
import subprocess
import sys

import pytest

from tests.kit import helpers, record_kit


@pytest.mark.slow
def test_all_tests_are_collected_and_those_of_the_sandbox_skipped(tmp_path):
    """Of a set in which anything fails to import, or makes a fixture first, the exit code is not 0."""
    env = helpers.clean_environment(**record_kit.without_sandbox(tmp_path))
    words = ["-q", "-rs", "-p", "no:cacheprovider", "-m", "sandbox", "tests"]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, cwd=helpers.ROOT, env=env, text=True, capture_output=True, timeout=300)
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    ended = re.fullmatch(r"(\d+) skipped, \d+ deselected.*", said.splitlines()[-1])
    assert ended and int(ended[1]) > 50, said
    reasons = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert len(reasons) == 1 and ": no sandbox can be made here (" in reasons[0], said
    assert f"{tmp_path / 'bwrap'}: bwrap: no permissions" in reasons[0]
