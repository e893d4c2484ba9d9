"""A record put on the Hugging Face hub: its folder, the track's tokenizer, and a card."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from data import hub
from data.command import DataError, printable, say
from data.door import Command
from data.files import file_sha256
from data.hub import CARD, Repo, Standing
from records.archive.folders import FILES, FOLDER, SCRIPT
from records.archive.hub import TOKENIZERS, fetch_artifact
from records.archive.judgings import read_draws
from records.archive.record import Record
from records.archive.tracks import DATA, schema_errors, tokenizer_path
from records.archive.verdicts import PASSED, read_verdicts
from records.board.card import card
from records.board.entries import Entry


@dataclass(frozen=True)
class Published:
    """What a repo holds now."""

    address: str  # hub:user/name@commit
    files: int
    changed: list[str]
    state: str  # the verdict's word


def load_entry(folder: Path) -> Entry:
    """A record with its verdict. Raises DataError of a folder that is no record."""
    record = Record(folder)
    if not FOLDER.fullmatch(record.name):
        raise DataError(f"{folder}: expected a record's folder in its track's, <date>_<name>")
    if errors := schema_errors(record.submission, "submission"):
        raise DataError(f"{folder / 'submission.json'}: {errors[0]}")
    verdicts = read_verdicts(record.home)
    return Entry(record, verdicts.get(record.name, {}), tuple(read_draws(record.home)))


def place_of(record: Record) -> str:
    """The record's folder in its repo: where it lies in records/, too."""
    return f"{record.home.name}/{record.name}"


def files_of(record: Record, data: Path, there: Standing) -> dict[str, Path]:
    """All files to publish by their paths in the repo. Raises DataError."""
    place = place_of(record)
    found = {}
    for path in sorted(record.path.iterdir()):
        if not FILES.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            raise DataError(f"{printable(path)}: has no place in a record: nothing was published")
        found[f"{place}/{path.name}"] = path
    if f"{place}/{SCRIPT}" not in found:
        raise DataError(f"{record.path}: holds no {SCRIPT}, which a record has")
    for seed, named in record.addresses.items():
        at = f"{place}/model_seed{seed}.ptz"
        if at not in found and (at not in there.listing or there.listing[at].etag != named.sha256):
            found[at] = fetch_artifact(named)
    tokenizer = tokenizer_path(record.track, data)
    if not tokenizer.is_file():
        raise DataError(f"{tokenizer}: no such file, expected the track's tokenizer; --data names its folder")
    expected = record.track.dataset["tokenizer_sha256"]
    if expected not in (None, file_sha256(tokenizer).hex()):
        raise DataError(f"{tokenizer}: is not the track's tokenizer, whose sha256 is {expected}")
    found[f"{TOKENIZERS}/{tokenizer.name}"] = tokenizer
    return found


def publish_record(folder: Path, repo_id: str, license_id: str, data: Path) -> Published:
    """Put a record into a repo of its own, whatever its verdict. Raises DataError."""
    entry = load_entry(folder)
    record = entry.record
    there = hub.look(Repo(repo_id, "model", f"--to {repo_id}"))
    ours = (f"{place_of(record)}/", f"{TOKENIZERS}/{record.track.dataset['tokenizer']}")
    there.refuse_strangers(lambda path: path.startswith(ours), f"the record {record.name}")
    files = files_of(record, data, there)
    with tempfile.TemporaryDirectory() as folder_of_card:
        files[CARD] = Path(folder_of_card) / CARD
        files[CARD].write_text(card(entry, repo_id, license_id), encoding="utf-8")
        commit, changed = hub.publish(there, files, f"{record.name}: {entry.interval} bits per byte")
    return Published(f"hub:{repo_id}@{commit}", len(files), changed, entry.state)


@click.command(cls=Command)
@click.argument("record", type=Path)
@click.option("--to", type=hub.own_repo, required=True, metavar="USER/NAME", help="the repo that gets it")
@click.option("--license", "license_id", default="mit", help="of script and artifacts, as the hub names it")
@click.option("--data", type=Path, default=DATA, help="folder with tokenizers/")
def publish(record: Path, to: str, license_id: str, data: Path) -> int:
    """Put a record on the Hugging Face hub: folder, tokenizer, and a card with its score and verdict.

        python -m records publish records/<track>/<folder> --to user/name

    The token is HF_TOKEN, or that of `hf auth login`. A record that did not pass is published as such. When
    the same command is given again, only what has changed is sent, and an upload that was cut off goes on. A
    repo that holds anything else is left as it is.
    """
    folder = Path(os.path.abspath(record))
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    found = publish_record(folder, to, license_id, data)
    if found.state not in PASSED:
        say(f"the record did not pass, and its card says so: {found.state}")
    if not found.changed:
        say(f"nothing to publish: {found.address} holds all {found.files} files")
    else:
        say(f"{found.address}: {len(found.changed)} of {found.files} files were sent")
    return 0
