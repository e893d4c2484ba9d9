"""The papers: what they name exists, their commands can be typed, and readers can see all they speak of."""

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from records import curves
from tests import helpers

FROZEN = re.compile(r"records/track_\w+/20\d\d-")  # a record's folder stays as it was sent
UNSEEN = re.compile(r"(DESIGN|SEED|STYLE|TECHNIQUES)\.md|\b[Ii]ssues? \d|\bl[e]nt\b|/work[/]|\bGPU was\b")
TRACK = helpers.ROOT / "records/track_10min_floppy"


def tracked() -> list[str]:
    """Files of the repository, without the frozen records; where there is no git, all that are not hidden."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(command, cwd=helpers.ROOT, text=True, capture_output=True)
    found = done.stdout.splitlines()
    if not found:
        paths = [path.relative_to(helpers.ROOT) for path in helpers.ROOT.rglob("*")]
        found = [str(path) for path in paths if not path.parts[0].startswith((".venv", "logs"))]
    return sorted(name for name in found if not FROZEN.match(name) and (helpers.ROOT / name).is_file())


def text_of(name: str) -> str:
    return (helpers.ROOT / name).read_text(encoding="utf-8", errors="replace")


def commands_of(paper: str) -> list[str]:
    """The lines of its blocks of shell commands; a line that goes on is one."""
    blocks = re.findall(r"```bash\n(.*?)```", text_of(paper), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines()]


FILES = tracked()
PAPERS = [name for name in FILES if name.endswith(".md")]


# --- what the papers name ---------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", PAPERS)
def test_links_and_pictures_lead_to_files(paper):
    targets = re.findall(r"\]\(([^)\s#]+)", text_of(paper))
    local = [target for target in targets if not target.startswith("https://")]
    assert not [target for target in local if not ((helpers.ROOT / paper).parent / target).exists()]


PATH = re.compile(r"(?<![\w<>{}/.])\.?\w+/[\w<>{}./*-]*\w")
PLACEHOLDER = re.compile(r"[<>{}]|[A-Z]{4}\b|^data/(datasets|tokenizers)|MyIdea")  # what readers fill in


@pytest.mark.parametrize("paper", PAPERS)
def test_files_that_are_named_with_their_folder_exist(paper):
    """Of a pattern such as *.patch, at least one."""
    folders = {Path(name).parts[0] for name in FILES}
    named = [word for word in PATH.findall(text_of(paper)) if word.split("/")[0] in folders]
    assert not [word for word in named if not PLACEHOLDER.search(word) and not [*helpers.ROOT.glob(word)]]


@functools.cache
def help_of(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words, "--help"], cwd=helpers.ROOT, text=True, capture_output=True
    )
    return done.stdout if done.returncode == 0 else ""


OURS = re.compile(r"-m ((?:data|records|tests)\.\w+)([^&|;#]*)")


@pytest.mark.parametrize("paper", PAPERS)
def test_commands_name_modules_and_scripts_that_exist(paper):
    for line in commands_of(paper):
        for module, _ in OURS.findall(line):
            assert importlib.util.find_spec(module), line
        for script in re.findall(r"python3? ([\w/]+\.py)", line):
            assert (helpers.ROOT / script).exists(), line


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_options_in_commands_are_options_of_our_tools(paper):
    for line in commands_of(paper):
        for module, rest in OURS.findall(line):
            if module.startswith("tests."):  # some of them work at once, whatever they are told
                continue
            words = rest.split()
            told = help_of(module) + (help_of(module, words[0]) if words and words[0].isalpha() else "")
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", rest):
                assert not told or option in told, line


def test_every_word_speaks_of_what_a_reader_can_see():
    """Not of papers, issues and machines that only those who wrote it knew."""
    found = [f"{name}: {match[0]}" for name in FILES for match in UNSEEN.finditer(text_of(name))]
    assert not found


# --- what is made -----------------------------------------------------------------------------------------


def test_the_workflow_is_one_that_github_takes_and_runs_what_the_readme_says():
    path = ".github/workflows/tests.yml"
    assert "- run: .ci/run\n" in text_of(path) and "permissions:\n  contents: read\n" in text_of(path)
    program = shutil.which("actionlint", path=Path(sys.executable).parent) or shutil.which("actionlint")
    if not program:
        pytest.skip("no actionlint here: pip install -r tests/requirements.txt installs it on Linux")
    done = subprocess.run([program, path], cwd=helpers.ROOT, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_the_picture_of_the_readme_is_the_one_that_its_command_makes():
    """After a new record: python -m records.curves records/track_10min_floppy"""
    assert curves.picture(TRACK) == (TRACK / "curves.svg").read_bytes()


def test_curves_of_what_is_no_track_or_no_whole_run_are_refused_in_one_line(tmp_path, capsys):
    assert curves.main([str(tmp_path)]) == 3
    assert "holds no track.json, expected the folder of a track\n" in capsys.readouterr().err
    (tmp_path / "track.json").write_text("{}")
    (tmp_path / "2026-01-01_Mine").mkdir()
    (tmp_path / "2026-01-01_Mine/metrics_seed1.jsonl").write_text('{"event": "step"}\n')
    assert curves.main([str(tmp_path)]) == 3
    assert "metrics_seed1.jsonl: no metrics of a run that has ended" in capsys.readouterr().err
