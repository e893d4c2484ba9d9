"""The papers: what they link to and name exists, and their commands can be typed."""

import functools
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

import train_gpt
from tests.kit import data_kit, helpers

FROZEN = re.compile(r"records/track_\w+/20\d\d-")  # a record's folder stays as it was sent


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


TOP = "LICENSE README.md data records requirements.txt tests train_gpt.py train_gpt_mlx.py"
FILES = tracked()
PAPERS = [name for name in FILES if name.endswith(".md")]


# --- what the papers name ---------------------------------------------------------------------------------


def test_nothing_else_stands_at_the_top():
    """A package that was fetched for a look was committed once."""
    command = ["git", "ls-tree", "--name-only", "HEAD"]
    names = subprocess.run(command, cwd=helpers.ROOT, text=True, capture_output=True).stdout.split()
    assert {name for name in names if name[0] != "."} <= {*TOP.split()}


@pytest.mark.parametrize("paper", PAPERS)
def test_links_and_pictures_lead_to_files(paper):
    targets = re.findall(r"\]\(([^)\s#]+)", text_of(paper))
    local = [target for target in targets if not target.startswith("https://")]
    assert not [target for target in local if not ((helpers.ROOT / paper).parent / target).exists()]


PATH = re.compile(r"(?<![\w<>{}/.])\.?\w+/[\w<>{}./*-]*\w")
PLACEHOLDER = re.compile(r"[<>{}]|[A-Z]{4}\b|^data/(datasets|tokenizers)|MyIdea|_pages")  # readers' own


@pytest.mark.parametrize("paper", PAPERS)
def test_files_that_are_named_with_their_folder_exist(paper):
    """Of a pattern such as *.patch, at least one."""
    folders = {Path(name).parts[0] for name in FILES}
    named = [word for word in PATH.findall(text_of(paper)) if word.split("/")[0] in folders]
    assert not [word for word in named if not PLACEHOLDER.search(word) and not [*helpers.ROOT.glob(word)]]


def test_the_tour_names_what_the_script_has():
    for name in re.findall(
        r"`([A-Za-z_.]+)`", text_of(".github/CONTRIBUTING.md").partition("## Add an idea")[2]
    ):
        first, *rest = name.split(".")
        if hasattr(train_gpt, first):
            assert all(hasattr(getattr(train_gpt, first), part) for part in rest), name


OURS = re.compile(r"-m (data|records|tests(?:\.\w+)+)\b([^&|;#`']*)")
help_of = functools.cache(data_kit.call)


@pytest.mark.parametrize("paper", PAPERS)
def test_commands_name_modules_scripts_and_options_that_exist(paper):
    for line in commands_of(paper):
        for script in re.findall(r"python3? ([\w/]+\.py)", line):
            assert (helpers.ROOT / script).exists(), line
        for module, rest in OURS.findall(line):
            assert importlib.util.find_spec(module), line
            if module.startswith("tests"):  # which begin to work at once
                continue
            command, *more = rest.split()
            words = [command, more[0].split(":")[0]] if command in ("prepare", "track") else [command]
            named = help_of(module, *words, "--help")
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", rest):
                assert option in named, line
