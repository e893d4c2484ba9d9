"""The papers: what they link to and name exists, and their commands can be typed."""

import functools
import importlib.util
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import train_gpt
from tests.kit import data_kit, helpers, record_kit

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


FILES = tracked()
PAPERS = [name for name in FILES if name.endswith(".md")]


# --- what the papers name ---------------------------------------------------------------------------------


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


# --- the bigram -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_record_in_the_papers_scores_as_it_stands_there(tmp_path):
    """The bigram of records/referee/README.md, by the referee and by counts of our own."""
    script = re.search(r"```python\n(.*?)```", text_of("records/referee/README.md"), re.DOTALL)[1]
    corpus = record_kit.make_data(tmp_path / "data")
    record_kit.make_track(tmp_path / "track", corpus)
    folder = record_kit.foreign(corpus, tmp_path / "mine")
    (folder / "train_gpt.py").write_text(script)
    places = {"track": "track", "data": "data", "second": "data/second.jsonl"}
    options = [f"--{name}={tmp_path / path}" for name, path in places.items()]
    options += ["--dataset=tiny_sp400", *record_kit.TRUST]
    said = data_kit.call("records", "score", folder, *options)
    score = float(re.search(r"val_bpb: (\S+)", said)[1])
    counts = np.fromfile(folder / "model.bin", "<u2").reshape(400, 400) + 0.01
    nats = -np.log(counts / counts.sum(1, keepdims=True))
    streams = np.array_split(corpus.tokens["val"], 64)
    within = sum(nats[stream[:-1], stream[1:]].sum() for stream in streams)
    total = within + 63 * np.log(400)  # of the streams' first tokens, but for the text's own
    assert score == pytest.approx(total / np.log(2) / corpus.val_bytes(), abs=1e-6)
