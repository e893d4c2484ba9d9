"""Published shards and their tokenizer from the Hugging Face hub: each file whole and checked, or not there.

    python -m data download --variant sp1024 --train-shards 80
    python -m data download --variant sp1024 --train-shards 0      # the validation split alone
    python -m data download --variant sp1024 --verify              # check every byte of what is there

The hub client fetches: token, mirror, proxy, retries and rate limits are its own, set by HF_ENDPOINT,
HF_TOKEN and its other variables. This program chooses the files and checks them. All come from one commit of
one repo, which source.json in the dataset's folder names. They arrive in a hidden folder beside it and move
when all of them are right, so any moment is safe to stop. A later call goes on with the same commit.

Exit codes: 0 all is there, 2 bad argument, 3 it is not (the last line says why, and what to do), 130 Ctrl-C.
"""

import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

import click
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars
from tqdm.contrib.concurrent import thread_map

from data import door, files, hub, shards
from data.command import REPO, DataError, say, shell, training_command
from data.hub import GO_ON, RemoteFile, Repo, brief, checksum_or_none, damage

REPO_ID = "willdepueoai/parameter-golf"
PREFIX = "datasets"  # the manifest's paths, and all of ours, start from this folder of the repo
MANIFEST = f"{PREFIX}/manifest.json"
RECORD = "source.json"
USUAL = 80  # training shards

# --- what is published -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """What a variant consists of at one commit, as source.json has it; `train` holds all shards."""

    repo_id: str
    revision: str  # as asked for; `commit` is what it meant then
    commit: str
    name: str
    folder: str  # below the root
    vocab_size: int | None
    tokenizer: tuple[RemoteFile, ...]  # first the one that TOKENIZER_PATH names
    train: tuple[RemoteFile, ...]
    val: tuple[RemoteFile, ...]

    @property
    def origin(self) -> str:
        return f"{self.repo_id}@{self.commit[:12]}"


def repo_of(repo_id: str) -> Repo:
    return Repo(repo_id, "dataset", f"--repo-id {repo_id}")


def fits(name: str, variant: str) -> bool:
    return name == variant or name.endswith("_" + variant)


def faulty(what: str) -> DataError:
    """The error of a repo that contradicts itself."""
    return DataError(f"{what}: tell the repo's owner, or use another --revision")


def ask_release(repo_id: str, revision: str, variant: str) -> Release:
    """What the hub publishes as the variant now. Raises DataError."""
    repo = repo_of(repo_id)
    commit, listing = hub.ask_listing(repo, revision)
    origin = f"{repo_id}@{commit[:12]}"
    if MANIFEST not in listing:
        raise DataError(f"{origin} has no {MANIFEST}, and so no shards: check --repo-id and --revision")
    with tempfile.TemporaryDirectory() as stage:
        raw = hub.fetch(repo, commit, listing[MANIFEST], Path(stage)).read_bytes()
    ours = {}
    for path, file in listing.items():
        if path.startswith(f"{PREFIX}/"):
            path = path.removeprefix(f"{PREFIX}/")
            ours[path] = replace(file, path=path)
    try:
        dataset, tokenizer = choose(files.parse_json(raw), variant, origin)
        folder = inside(dataset.get("path") or f"datasets/{dataset['name']}").rstrip("/")
        paths = shards_of(ours, folder, origin)
        promised = (dataset.get("stats") or {}).get("files_val", max(1, len(paths["val"])))
        if len(paths["val"]) != promised:
            where = f"{origin} holds {len(paths['val'])} validation shards of {promised} in {folder}"
            raise faulty(f"{where}, and a score needs the whole split")
        paths["tokenizer"] = tokenizer_files(tokenizer, ours, origin)
        claims = {PurePosixPath(f.get("path") or f["name"]).name: f for f in dataset.get("files") or ()}
        sha256 = tokenizer.get("model_sha256") or tokenizer.get("sha256")
        claims[PurePosixPath(paths["tokenizer"][0]).name] = {"sha256": sha256}
        for path in itertools.chain(*paths.values()):  # what the manifest claims must come, else it is found
            claim = claims.get(ours[path].name, {})
            size = claim.get("size", ours[path].size)
            if "tokens" in claim:
                size = shards.HEADER_BYTES + 2 * claim["tokens"]
            etag = checksum_or_none(claim.get("sha256")) or ours[path].etag
            ours[path] = RemoteFile(path, size, etag)
        groups = {key: tuple(ours[path] for path in paths[key]) for key in paths}
        name, vocab_size = dataset["name"], tokenizer.get("vocab_size")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise faulty(f"{origin}: {MANIFEST} is not as it should be ({brief(error)})") from error
    return Release(repo_id, revision, commit, name, folder, vocab_size, **groups)


def choose(manifest: dict, variant: str, origin: str) -> tuple[dict, dict]:
    """The manifest's entries of the variant and of its tokenizer."""
    datasets = [entry for entry in manifest["datasets"] if fits(entry["name"], variant)]
    if len(datasets) != 1:
        names = ", ".join(sorted(entry["name"] for entry in datasets or manifest["datasets"]))
        raise DataError(
            f"{origin} has {'more than one' if datasets else 'no'} variant {variant!r}: "
            f"call with --variant and one of: {names or 'none at all'}"
        )
    name = datasets[0]["tokenizer_name"]
    for tokenizer in manifest["tokenizers"]:
        if tokenizer["name"] == name:
            return datasets[0], tokenizer
    raise faulty(f"{origin}: {MANIFEST} lacks the tokenizer {name} of {datasets[0]['name']}")


def tokenizer_files(tokenizer: dict, listing: dict[str, RemoteFile], origin: str) -> list[str]:
    """The tokenizer, then its vocabulary as text where that is published too."""
    paths = [inside(tokenizer[key]) for key in ("model_path", "path", "vocab_path") if tokenizer.get(key)]
    if not paths or paths[0] not in listing:
        raise faulty(f"{origin} lacks the file of the tokenizer {tokenizer['name']} {paths[:1]}")
    if not paths[0].endswith(".model"):
        raise DataError(
            f"{origin}: the tokenizer {paths[0]} is no SentencePiece model (.model), and nothing here can "
            "train with another: choose another --variant"
        )
    return [path for path in paths if path in listing]


def shards_of(listing: dict[str, RemoteFile], folder: str, origin: str) -> dict[str, list[str]]:
    """The paths of each split in order. Raises DataError where one is missing, or a name is doubtful."""
    splits = shards.by_split(Path(path) for path in listing if path.rpartition("/")[0] == folder)
    try:
        shards.raise_failed(shards.verify_names(f"{origin}: {folder}", splits[0] + splits[1]))
    except DataError as error:
        raise faulty(str(error)) from None
    return {name: [path.as_posix() for path in split] for name, split in zip(shards.SPLIT_NAMES, splits)}


def inside(path: str) -> str:
    """`path` where it stays below the root on every system. Raises DataError."""
    if not path or path.startswith("/") or ".." in path.split("/") or re.search(r"[\\:\0]", path):
        raise DataError(f"{MANIFEST} has the path {path!r}, which leads out of the folder: use another repo")
    return path


# --- the folder: where it came from, what it lacks -------------------------------------------------------


def read_record(folder: Path) -> Release | None:
    """The release that `folder` was fetched from, None where this program did not fetch it."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        raw = files.read_json(path)
        for key in ("tokenizer", "train", "val"):
            raw[key] = tuple(RemoteFile(**file) for file in raw[key])
        return Release(**raw)
    except (DataError, TypeError, KeyError) as error:
        mend = f"{shell('rm', '-r', folder)}, then run the same command again"
        raise DataError(f"{path}: not what this program wrote ({brief(error)}): {mend}") from error


def recorded_release(root: Path, repo_id: str, revision: str, variant: str) -> Release | None:
    """What an earlier call for the same repo, revision and variant fetched."""
    for path in root.glob(f"datasets/*/{RECORD}"):
        release = read_record(path.parent)
        same = release.repo_id == repo_id and revision in (release.revision, release.commit)
        if same and fits(release.name, variant):
            return release
    return None


def check_origin(root: Path, release: Release) -> bool:
    """Whether the dataset's folder was fetched from this release.

    Raises DataError where it comes from another repo or commit, or holds files that are not of this one.
    """
    folder = root / release.folder
    record = read_record(folder)
    mend = f"use another --root, or {shell('rm', '-r', folder)}"
    if record and (record.repo_id, record.commit) != (release.repo_id, release.commit):
        options = shell("--repo-id", record.repo_id, "--revision", record.commit)
        other = f"{folder} is from {record.origin}, and this call asks for {release.origin}"
        raise DataError(f"{other}: go on with {options}, {mend}")
    names = {path.name for path in folder.glob("*.bin") if shards.parse_name(path)}
    strangers = names - {file.name for file in release.train + release.val}
    if strangers:
        raise DataError(
            f"{folder} holds {min(strangers)}, which is not of {release.origin}, and a trainer "
            f"would take two sets for one: {mend}"
        )
    if record:
        return True
    for file in release.tokenizer + release.train + release.val:
        path = root / file.path
        if path.is_file() and (problem := damage(path, file, thorough=True)):
            mend = f"use another --root, or {shell('rm', path)}"
            raise DataError(f"{path} is not the one of {release.origin} ({problem}): {mend}")
    return False


# --- the download ----------------------------------------------------------------------------------------


def fetch(release: Release, file: RemoteFile, stage: Path) -> None:
    """Have the client bring a file into `stage`, and check all that can be. Raises DataError."""
    there = replace(file, path=f"{PREFIX}/{file.path}")
    path = hub.fetch(repo_of(release.repo_id), release.commit, there, stage)
    if file.name.endswith(".bin"):
        try:
            shards.read_shard(path)
        except DataError as error:
            path.unlink()  # else the client would take it for whole
            raise faulty(f"{file.path} as published is no shard ({error})") from error
    with open(path, "r+b") as stream:
        files.sync(stream)


def fetch_all(root: Path, release: Release, missing: dict[RemoteFile, str], workers: int) -> None:
    """Bring all `missing` files, `workers` at a time, and give them their places. Raises DataError.

    They arrive on the file system of the dataset's folder, and hidden. A new dataset appears at once.
    """
    folder = root / release.folder
    hidden = folder.with_name(f".{folder.name}.partial")
    stage = hidden / release.commit
    stage.mkdir(parents=True, exist_ok=True)
    for leftover in stage.rglob("*.incomplete"):  # of a client that was killed
        leftover.unlink()
    for file, problem in missing.items():
        if problem != "absent":
            click.echo(f"{root / file.path}: {problem}: it is fetched again", err=True)
    to_come = sum(file.size for file in missing if not (stage / PREFIX / file.path).exists())
    free = shutil.disk_usage(stage).free
    if to_come > free:
        raise DataError(f"{root}: {to_come} bytes to come and {free} free: make room, then {GO_ON}")
    say(f"{release.name} of {release.origin}: {len(missing)} files, {to_come / 1e6:.1f} MB to come")
    thread_map(
        lambda file: fetch(release, file, stage),
        missing,
        max_workers=workers,
        desc=release.name,
        disable=None,  # where no terminal shows it
    )
    place = folder if folder.exists() else stage / "whole"
    place.mkdir(exist_ok=True)
    write_record(place, release)
    for file in missing:  # training shards in order, so that a kill leaves no gap
        arrived = stage / PREFIX / file.path
        if file in release.tokenizer:
            (root / file.path).parent.mkdir(parents=True, exist_ok=True)
            files.write_beside(root / file.path, arrived.read_bytes())
        else:
            os.replace(arrived, place / file.name)
    if place != folder:
        os.rename(place, folder)
    shutil.rmtree(hidden, ignore_errors=True)  # with what came of other commits


def write_record(folder: Path, release: Release) -> None:
    record = json.dumps(asdict(release), indent=1) + "\n"
    files.write_beside(folder / RECORD, record.encode())


def report(root: Path, release: Release) -> None:
    """Say what is there and the command that trains on it."""
    train = [file for file in release.train if (root / file.path).is_file()]
    tokens = sum((file.size - shards.HEADER_BYTES) // 2 for file in train)
    tokenizer = release.tokenizer[0]
    print(
        f"{release.name} of {release.origin}: {len(train)} training shards ({tokens:,} tokens), "
        f"{len(release.val)} validation shards, tokenizer {tokenizer.name}. To train on it:"
    )
    print(training_command(root / release.folder, root / tokenizer.path, release.vocab_size))


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
@click.option("--workers", type=click.IntRange(1), default=8, metavar="N", help="files at a time")
@click.option("--verify", is_flag=True, help="compare the checksums of files that are there")
def main(
    variant: str,
    train_shards: int | None,
    repo_id: str,
    revision: str,
    root: Path,
    workers: int,
    verify: bool,
) -> int:
    door.on_signals(interrupt, signal.SIGINT, signal.SIGTERM)
    disable_progress_bars()
    root = root.absolute()
    release = recorded_release(root, repo_id, revision, variant)
    if not release:
        say(f"asking {constants.ENDPOINT} for {repo_id} at {revision}")
        release = ask_release(repo_id, revision, variant)
    there = len(release.train)
    if (train_shards or 0) > there:
        raise DataError(
            f"{release.name} of {release.origin} has {there} training shards, and not "
            f"{train_shards}: call with --train-shards {there} or fewer"
        )
    train = release.train[: USUAL if train_shards is None else train_shards]
    needed = release.tokenizer + release.val + train

    def survey() -> tuple[bool, dict[RemoteFile, str]]:
        """Whether the folder was fetched from this release, and what is missing or damaged, in what way."""
        recorded = check_origin(root, release)
        if verify:
            click.echo(f"comparing the checksums of {len(needed)} files in {root}", err=True)
        with ThreadPoolExecutor(workers) as pool:
            problems = list(pool.map(lambda file: damage(root / file.path, file, verify), needed))
        return recorded, {file: problem for file, problem in zip(needed, problems) if problem}

    recorded, missing = survey()
    if missing or not recorded:  # else nothing is written, since the root may be read-only
        (root / "datasets").mkdir(parents=True, exist_ok=True)
        waiting = f"another download into {root} is under way: waiting for it to end"
        with files.locked(root / "datasets", file=".download.lock", waiting=waiting):
            recorded, missing = survey()  # now that no other download changes anything
            if missing:
                fetch_all(root, release, missing, workers)
            elif not recorded:
                write_record(root / release.folder, release)
    if not missing:
        checked = "checksums are right" if verify else "sizes are right (--verify checks every byte)"
        print(f"nothing to download: all {len(needed)} files are there, {checked}")
    report(root, release)
    return 0


if __name__ == "__main__":  # as pages of before 2026-11-26 have it
    from data.__main__ import main as of_all

    sys.exit(of_all(["download", *sys.argv[1:]]))
