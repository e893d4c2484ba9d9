"""Judge the record that a pull request adds, with the referee of the base branch, which is checked out.

    PYTHONPATH=. HEAD=<commit> python .github/scripts/pull_request.py find
    PYTHONPATH=. FOLDER=<folder> JUDGE=true|false python .github/scripts/pull_request.py judge

`find` puts the record's files into the checkout and gives GitHub the folder; `judge` verifies that folder,
and judges it where JUDGE says so. Both read a stranger's files as data, and only the referee's sandbox runs
any of them. Exit code 3 if the pull request is refused, else that of the last command that ran.
"""

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

from data.command import DataError, open_streams, printable
from records.archive.runs import FOLDER

MAX_BYTES = 256 << 20  # of a record's files; three runs of a floppy have about 5 MB
MAX_SUMMARY = 200_000  # characters of at most four bytes: GitHub takes 1 MiB
PLAIN = ("100644", "100755")  # modes of files in git that are neither a link nor a submodule


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], check=True, stdout=subprocess.PIPE).stdout


def append(variable: str, text: str) -> None:
    """Add to a file through which GitHub hears from a step; elsewhere there is none."""
    if variable in os.environ:
        with open(os.environ[variable], "a", encoding="utf-8") as file:
            file.write(text)


def summarise(headline: str, lines: list[str]) -> None:
    """The job's summary: a headline of ours, and a stranger's words in a block that they cannot end."""
    text = "\n".join(lines)[:MAX_SUMMARY]
    fence = max(["``", *re.findall("`+", text)], key=len) + "`"
    append("GITHUB_STEP_SUMMARY", f"{headline}\n\n{fence}text\n{text}\n{fence}\n")


def merge(head: str) -> str:
    """The tree that the base branch would have with the pull request. Raises DataError."""
    fetch = ["fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "origin", head]
    try:
        git("-c", "fetch.fsckObjects=true", *fetch)
        tree = git("-c", "merge.renames=false", "merge-tree", "--write-tree", "HEAD", head)
    except subprocess.CalledProcessError:
        raise DataError("git cannot merge the pull request; rebase it onto the base branch") from None
    return tree.decode().strip()


def changes(tree: str) -> list[tuple[Path, str, str, str]]:
    """The files that the merge would change: path, kind of change (one letter), mode, hash."""
    raw = git("diff-tree", "-r", "-z", "--no-renames", "HEAD", tree).split(b"\0")
    facts = (line.decode().split() for line in raw[::2] if line)
    return [
        (Path(os.fsdecode(path)), how, mode, name) for path, (_, mode, _, name, how) in zip(raw[1::2], facts)
    ]


def in_record(path: Path) -> bool:
    """Whether a path lies in a record's folder, or stands where one should be: two floors below a track."""
    top, *below = path.parts
    if top != "records":
        return False
    in_track = below[0].startswith("track_") and len(below) > 2
    return in_track or any(map(FOLDER.fullmatch, below))


def find() -> int:
    """Put the files of the one record into the checkout. Raises DataError."""
    changed = changes(merge(os.environ["HEAD"]))
    folder = next((Path(*path.parts[:3]) for path, *_ in changed if in_record(path)), None)
    if folder is None:
        summarise("No record to judge.", ["The pull request touches no record's folder."])
        return 0
    for path, how, mode, _ in changed:
        if path.parent != folder:
            raise DataError(f"{path} changes beside {folder}, expected one new folder and nothing else")
        if how != "A" or mode not in PLAIN:
            raise DataError(f"{path}: git says {how} {mode}, expected a plain file that is new")
    if folder.exists() or not FOLDER.fullmatch(folder.name):
        raise DataError(f"{folder}: expected a new folder of the name <YYYY-MM-DD>_<Name>")
    if not (folder.parent / "track.json").exists():
        raise DataError(f"{folder}: the base branch has no such track")
    if sum(int(git("cat-file", "-s", name)) for *_, name in changed) > MAX_BYTES:
        raise DataError(f"{folder}: holds more than {MAX_BYTES} bytes, which no record needs")
    folder.mkdir()
    for path, _, _, name in changed:
        path.write_bytes(git("cat-file", "blob", name))
    append("GITHUB_OUTPUT", f"folder={folder}\n")
    return 0


def run(command: str, folder: Path, lines: list[str]) -> int:
    """Run `records verify` or `records judge`, and pass on each line; its exit code."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    words = [sys.executable, "-m", "records", command, str(folder)]
    with subprocess.Popen(words, text=True, encoding="utf-8", errors="replace", **pipes) as process:
        for line in process.stdout:
            lines.append(printable(line.rstrip("\n")))
            print(lines[-1], flush=True)
    return process.returncode


def judge() -> int:
    """Verify the folder, and judge it if it is asked for and passes. Raises DataError."""
    folder = Path(os.environ["FOLDER"])
    lines = []
    code = run("verify", folder, lines)
    words = {0: "passes.", 1: "fails."}
    said = words.get(code, "could not be verified here, for no fault of its own.")
    if code == 0 and os.environ["JUDGE"] == "true":
        code = run("judge", folder, lines)
        words = {0: "So does the judge's trial.", 1: "The judge's trial does not."}
        said += " " + words.get(code, "It could not be judged here, for no fault of its own.")
    summarise(f"`{folder}` {said}", lines)
    return code


def main() -> int:
    """Between the first line and the last, GitHub obeys no command in what a step prints."""
    open_streams()
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        return {"find": find, "judge": judge}[sys.argv[1]]()
    except DataError as error:
        summarise("This pull request is refused.", [printable(error)])
        print(f"error: {printable(error)}", flush=True)
        return error.exit_code
    finally:
        print(f"::{token}::", flush=True)


if __name__ == "__main__":
    sys.exit(main())
