"""Published shards and their tokenizer from the Hugging Face hub: each file whole and checked, or not there.

    python -m data download --variant sp1024 --train-shards 80
    python -m data download --variant sp1024 --train-shards 0      # the validation split alone

All files come from one commit of one repo, which source.json in the dataset's folder names. They arrive in a
hidden folder beside it and move when all of them are right, so any moment is safe to stop. The same command
goes on. Files that are there are compared byte for byte. The hub's client reads HF_TOKEN, HF_ENDPOINT and its
other variables.
"""

import functools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars
from tqdm.contrib.concurrent import thread_map

from data import door, files, hub, shards
from data.command import REPO, DataError, say, shell, training_command
from data.hub import GO_ON, RemoteFile, Repo, brief, damage

REPO_ID = "willdepueoai/parameter-golf"
PREFIX = "datasets"  # the manifest's paths start from this folder of the repo
MANIFEST = f"{PREFIX}/manifest.json"
RECORD = "source.json"
USUAL = 80  # training shards
THREADS = 8  # files at a time

# --- what is published -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """What a variant consists of at one commit; `train` holds all shards."""

    repo: Repo
    commit: str
    name: str
    folder: str  # below the root
    vocab_size: int | None
    tokenizer: RemoteFile
    train: list[RemoteFile]
    val: list[RemoteFile]

    @property
    def origin(self) -> str:
        return f"{self.repo.id}@{self.commit[:12]}"


def local(root: Path, file: RemoteFile) -> Path:
    return root / file.path.removeprefix(f"{PREFIX}/")


def faulty(what: str) -> DataError:
    """The error of a repo that contradicts itself."""
    return DataError(f"{what}: tell the repo's owner, or use another --revision")


def ask_release(repo: Repo, revision: str, variant: str) -> Release:
    """What the hub publishes as the variant now. Raises DataError."""
    commit, listing = hub.ask_listing(repo, revision)
    origin = f"{repo.id}@{commit[:12]}"
    if MANIFEST not in listing:
        raise DataError(f"{origin} has no {MANIFEST}, and so no shards: check --repo-id and --revision")
    with tempfile.TemporaryDirectory() as stage:
        raw = hub.fetch(repo, commit, listing[MANIFEST], Path(stage)).read_bytes()
    try:
        dataset, tokenizer = choose(files.parse_json(raw), variant, origin)
        folder = inside(dataset.get("path") or f"datasets/{dataset['name']}").rstrip("/")
        val, train = shards_of(listing, folder, origin)
        promised = (dataset.get("stats") or {}).get("files_val", max(1, len(val)))
        model = tokenizer_file(tokenizer, listing, origin)
        name, vocab_size = dataset["name"], tokenizer.get("vocab_size")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise faulty(f"{origin}: {MANIFEST} is not as it should be ({brief(error)})") from error
    if len(val) != promised:
        where = f"{origin} holds {len(val)} validation shards of {promised} in {folder}"
        raise faulty(f"{where}, and a score needs the whole split")
    return Release(repo, commit, name, folder, vocab_size, model, train, val)


def choose(manifest: dict, variant: str, origin: str) -> tuple[dict, dict]:
    """The manifest's entries of the variant and of its tokenizer."""
    datasets = {entry["name"]: entry for entry in manifest["datasets"]}
    found = [name for name in datasets if name == variant or name.endswith("_" + variant)]
    if len(found) != 1:
        names = ", ".join(sorted(found or datasets)) or "none at all"
        many = "more than one" if found else "no"
        raise DataError(f"{origin} has {many} variant {variant!r}: call with --variant and one of: {names}")
    tokenizers = {entry["name"]: entry for entry in manifest["tokenizers"]}
    return datasets[found[0]], tokenizers[datasets[found[0]]["tokenizer_name"]]


def tokenizer_file(tokenizer: dict, listing: dict[str, RemoteFile], origin: str) -> RemoteFile:
    path = inside(tokenizer.get("model_path") or tokenizer["path"])
    if not path.endswith(".model"):
        what = f"{origin}: the tokenizer {path} is no SentencePiece model (.model)"
        raise DataError(f"{what}, and nothing here can train with another: choose another --variant")
    return listing[f"{PREFIX}/{path}"]


def shards_of(listing: dict[str, RemoteFile], folder: str, origin: str) -> list[list[RemoteFile]]:
    """Each split in order. Raises DataError where a shard is missing, or a name is doubtful."""
    there = f"{PREFIX}/{folder}"
    splits = shards.by_split(Path(path) for path in listing if path.rpartition("/")[0] == there)
    try:
        shards.raise_failed(shards.verify_names(f"{origin}: {folder}", splits[0] + splits[1]))
    except DataError as error:
        raise faulty(str(error)) from None
    return [[listing[path.as_posix()] for path in split] for split in splits]


def inside(path: str) -> str:
    """`path` where it stays below the root on every system. Raises DataError."""
    if not path or path.startswith("/") or ".." in path.split("/") or re.search(r"[\\:\x00-\x1f]", path):
        raise DataError(f"{MANIFEST} has the path {path!r}, which leads out of the folder: use another repo")
    return path


# --- the download ----------------------------------------------------------------------------------------


def refuse_others(root: Path, release: Release) -> None:
    """Raises DataError where what is in the way is not from this commit of this repo."""
    folder = root / release.folder
    tokenizer = local(root, release.tokenizer)
    if tokenizer.exists() and (problem := damage(tokenizer, release.tokenizer)):
        mend = f"use another --root, or {shell('rm', tokenizer)}"
        raise DataError(f"{tokenizer}: is not the one of {release.origin} ({problem}): {mend}")
    if not folder.exists():
        return
    mend = f"use another --root, or {shell('rm', '-r', folder)}"
    try:
        record = files.read_json(folder / RECORD)
    except DataError as error:
        raise DataError(f"{error}; expected a folder that data download made: {mend}") from error
    repo_id, commit = record.get("repo_id"), record.get("commit")
    if (repo_id, commit) != (release.repo.id, release.commit):
        options = shell("--repo-id", repo_id, "--revision", commit)
        other = f"{folder} is from {repo_id}@{commit}, and this call asks for {release.origin}"
        raise DataError(f"{other}: go on with {options}, {mend}")


def fetch(release: Release, stage: Path, file: RemoteFile) -> None:
    """Have the client bring a file into `stage`, and check all that can be. Raises DataError."""
    path = hub.fetch(release.repo, release.commit, file, stage)
    if file.name.endswith(".bin"):
        try:
            shards.read_shard(path)
        except DataError as error:
            path.unlink()  # else the client would take it for whole
            raise faulty(f"{file.path} as published is no shard ({error})") from error
    with open(path, "r+b") as stream:
        files.sync(stream)


def fetch_all(root: Path, release: Release, missing: list[RemoteFile]) -> None:
    """Bring all `missing` files and give them their places. Raises DataError.

    They arrive on the file system of the dataset's folder, and hidden. A new dataset appears at once.
    """
    folder = root / release.folder
    hidden = folder.with_name(f".{folder.name}.partial")
    stage = hidden / release.commit
    stage.mkdir(parents=True, exist_ok=True)
    for leftover in stage.rglob("*.incomplete"):  # of a client that was killed
        leftover.unlink()
    to_come = sum(file.size for file in missing if not (stage / file.path).exists())
    free = shutil.disk_usage(stage).free
    if to_come > free:
        raise DataError(f"{root}: {to_come} bytes to come and {free} free: make room, then {GO_ON}")
    say(f"{release.name} of {release.origin}: {len(missing)} files, {to_come / 1e6:.1f} MB to come")
    bring = functools.partial(fetch, release, stage)
    thread_map(bring, missing, max_workers=THREADS, desc=release.name, disable=None)  # on a terminal alone
    place = folder if folder.exists() else stage / "whole"
    place.mkdir(exist_ok=True)
    record = {"repo_id": release.repo.id, "commit": release.commit}
    files.write_beside(place / RECORD, (json.dumps(record, indent=1) + "\n").encode())
    for file in missing:  # training shards in order, so that a kill leaves no gap
        if file == release.tokenizer:
            local(root, file).parent.mkdir(parents=True, exist_ok=True)
            files.write_beside(local(root, file), (stage / file.path).read_bytes())
        else:
            os.replace(stage / file.path, place / file.name)
    if place != folder:
        os.rename(place, folder)
    shutil.rmtree(hidden, ignore_errors=True)  # with what came of other commits


def report(root: Path, release: Release) -> None:
    """Say what is there and the command that trains on it."""
    train = [file for file in release.train if local(root, file).is_file()]
    tokens = sum((file.size - shards.HEADER_BYTES) // 2 for file in train)
    count = f"{len(train)} training shards ({tokens:,} tokens), {len(release.val)} validation shards"
    print(f"{release.name} of {release.origin}: {count}, {release.tokenizer.name}. To train on it:")
    paths = {"DATA_PATH": root / release.folder, "TOKENIZER_PATH": local(root, release.tokenizer)}
    print(training_command(VOCAB_SIZE=release.vocab_size, **paths))


# --- the command line ------------------------------------------------------------------------------------


def interrupt(*_: object) -> None:
    click.echo(f"\ninterrupted: {GO_ON}", err=True)
    os._exit(door.INTERRUPTED)  # at once: nothing has its name before it is whole


@click.command(cls=door.Command, help=__doc__)
@click.option("--variant", default="sp1024", help="dataset by its name or the end of it")
@click.option(
    "--train-shards", type=click.IntRange(0), metavar="N", help=f"[default: {USUAL}, or all if fewer]"
)
@click.option("--repo-id", type=hub.repo_id, default=REPO_ID, metavar="USER/NAME", help="dataset repo")
@click.option("--revision", default="main", help="branch, tag or commit")
@click.option("--root", type=Path, default=REPO / "data", help="gets datasets/ and tokenizers/")
def main(variant: str, train_shards: int | None, repo_id: str, revision: str, root: Path) -> int:
    door.on_signals(interrupt, signal.SIGINT, signal.SIGTERM)
    disable_progress_bars()
    root = root.absolute()
    say(f"asking {constants.ENDPOINT} for {repo_id} at {revision}")
    release = ask_release(Repo(repo_id, "dataset", f"--repo-id {repo_id}"), revision, variant)
    there = len(release.train)
    if (train_shards or 0) > there:
        what = f"{release.name} of {release.origin} has {there} training shards, and not {train_shards}"
        raise DataError(f"{what}: call with --train-shards {there} or fewer")
    train = release.train[: USUAL if train_shards is None else train_shards]
    needed = [release.tokenizer, *release.val, *train]
    (root / "datasets").mkdir(parents=True, exist_ok=True)
    waiting = f"another download into {root} is under way: waiting for it to end"
    with files.locked(root / "datasets", file=".download.lock", waiting=waiting):
        refuse_others(root, release)
        with ThreadPoolExecutor(THREADS) as pool:
            problems = list(pool.map(lambda file: damage(local(root, file), file), needed))
        for file, problem in zip(needed, problems):
            if problem not in ("", "absent"):
                click.echo(f"{local(root, file)}: {problem}: it is fetched again", err=True)
        if any(problems):
            fetch_all(root, release, [file for file, problem in zip(needed, problems) if problem])
        else:
            say(f"nothing to download: all {len(needed)} files are there, and their checksums are right")
    report(root, release)
    return 0


if __name__ == "__main__":  # as pages of before 2026-11-26 have it
    from data.__main__ import main as of_all

    sys.exit(of_all(["download", *sys.argv[1:]]))
