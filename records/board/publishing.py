"""A record put on the Hugging Face hub: its folder, the track's tokenizer, and a card."""

import os
import tempfile
from pathlib import Path

import click
from huggingface_hub import EvalResult, ModelCardData

from data import hub
from data.command import DataError, printable, say
from data.door import Command
from data.files import file_sha256
from data.hub import CARD, Repo
from records.archive.hub import TOKENIZERS
from records.archive.runs import FILES, SCRIPT, Record
from records.archive.tracks import DATA, load_track, tokenizer_path
from records.archive.verdicts import PASSED
from records.board.entries import Entry, load_entries
from records.board.tables import cell, limits, table

# --- the card: the fields by which the hub shows scores, and a page ---------------------------------------


def metadata(entry: Entry, license_id: str) -> str:
    """The card's head. `model-index` has the score; of a record that did not pass, as a claim."""
    track = entry.record.track
    passed = entry.state in PASSED
    result = EvalResult(
        task_type="text-generation",
        dataset_type=track.dataset["name"],
        dataset_name=f"validation text of {track.name}",
        metric_type="bits_per_byte",
        metric_name="bits per byte" if passed else "bits per byte, claimed",
        metric_value=round(entry.mean, 8),
    )
    tags = ["bytegolf", track.name]
    data = ModelCardData(license=license_id, tags=tags, model_name=entry.name, eval_results=[result])
    return data.to_yaml()


def card(entry: Entry, repo_id: str, license_id: str) -> str:
    """The whole README.md of the repo. A record that did not pass says so before anything else."""
    record = entry.record
    what, why = (cell(record.field(name)) for name in ("what_changed", "why"))
    claims = "**This record did not pass.** The scores are its own claims.\n\n"
    warning = "" if entry.state in PASSED else claims
    facts = entry.facts | {"track": f"{record.track.name}: {limits(record.track)}", "licence": license_id}
    rows = [[name, cell(words)] for name, words in facts.items()]
    return f"""---
{metadata(entry, license_id)}
---

# {cell(entry.name)}: {entry.interval} bits per byte

{warning}{table("what | value", rows)}
What changed: {what}

Why: {why}

## Let it write

The folder `{record.track.name}/{entry.name}` is the record as it was sent: script, logs, metrics and
artifacts. Run these commands in a copy of the bytegolf repository. They fetch the record, check its hashes,
and run it in a sandbox.

```bash
python -m records sample hub:{repo_id} --prompt "def "
python -m records score hub:{repo_id}
python -m records verify hub:{repo_id}
```
"""


# --- the repo ---------------------------------------------------------------------------------------------


def load_entry(folder: Path) -> Entry:
    """A record with its verdict. Raises DataError of a folder that is no record."""
    for entry in load_entries(load_track(folder.parent)):
        if entry.name == folder.name:
            return entry
    raise DataError(f"{folder}: expected a record's folder in its track's, <date>_<name>")


def files_of(record: Record, data: Path) -> dict[str, Path]:
    """All files to publish by their paths in the repo. Raises DataError."""
    place = f"{record.home.name}/{record.name}"  # where it lies in records/, too
    found = {}
    for path in sorted(record.path.iterdir()):
        if not FILES.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            raise DataError(f"{printable(path)}: has no place in a record: nothing was published")
        found[f"{place}/{path.name}"] = path
    if f"{place}/{SCRIPT}" not in found:
        raise DataError(f"{record.path}: holds no {SCRIPT}, which a record has")
    tokenizer = tokenizer_path(record.track, data)
    if not tokenizer.is_file():
        raise DataError(f"{tokenizer}: no such file, expected the track's tokenizer; --data names its folder")
    expected = record.track.dataset["tokenizer_sha256"]
    if expected not in (None, file_sha256(tokenizer).hex()):
        raise DataError(f"{tokenizer}: is not the track's tokenizer, whose sha256 is {expected}")
    found[f"{TOKENIZERS}/{tokenizer.name}"] = tokenizer
    return found


@click.command(cls=Command)
@click.argument("record", type=Path)
@click.option("--to", type=hub.repo_id, required=True, metavar="USER/NAME", help="the repo that gets it")
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
    entry = load_entry(folder)
    there = hub.look(Repo(to, "model", f"--to {to}"))
    track = entry.record.track
    ours = (f"{track.name}/{entry.name}/", f"{TOKENIZERS}/{track.dataset['tokenizer']}")
    there.refuse_strangers(lambda path: path.startswith(ours), f"the record {entry.name}")
    files = files_of(entry.record, data)
    with tempfile.TemporaryDirectory() as folder_of_card:
        files[CARD] = Path(folder_of_card) / CARD
        files[CARD].write_text(card(entry, to, license_id), encoding="utf-8")
        commit, changed = hub.publish(there, files, f"{entry.name}: {entry.interval} bits per byte")
    if entry.state not in PASSED:
        say(f"the record did not pass, and its card says so: {entry.state}")
    address = f"hub:{to}@{commit}"
    if not changed:
        say(f"nothing to publish: {address} holds all {len(files)} files")
    else:
        say(f"{address}: {len(changed)} of {len(files)} files were sent")
    return 0
