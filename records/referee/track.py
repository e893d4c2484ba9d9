"""A track: its rules with the hashes of its text, and what well-known compressors need for that text.

    python -m records track new records/track_NAME --dataset TinyStories_sp1024 --operations 1e13 \\
        --budget-bytes 500000                                        write the track.json of a new track
    python -m records track compressors records/track_floppy          measure compressors and print the rows
    python -m records track compressors records/track_floppy --write  and keep them for the board
"""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

import click

from data import check, shards
from data.command import DataError, UsageError, say, shell
from data.door import Commands, Number
from data.files import sha256, write_whole
from records.archive.tracks import (
    DATA,
    FLOPPY_BYTES,
    RECORDS,
    REFERENCE,
    ReferenceCompressor,
    Track,
    load_track,
)
from records.referee.compressors import measure, training_text
from records.referee.text import decode, validation_text

TRACK = "track.json"
of_data = click.option("--data", type=Path, default=DATA, help="folder with datasets/ and tokenizers/")


def write_json(path: Path, value: dict) -> None:
    write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


@click.group(cls=Commands, help=__doc__)
def main() -> None:
    pass


# --- what track.json says of a dataset --------------------------------------------------------------------


def read_dataset(data: Path, name: str, tokenizer_name: str) -> dict:
    """A dataset as track.json has it, but for its second text. All shards are checked. Raises DataError."""
    folder = data / "datasets" / name
    say(f"{name}: reading all shards of {folder}")
    tokenizer = shards.Tokenizer(data / "tokenizers" / tokenizer_name)
    val, train = shards.find_shards(folder)
    headers = {path: shards.read_header(path) for path in train + val}
    for path in headers:
        shards.raise_failed(check.verify_shard(path, tokenizer))
    shards.raise_failed(check.verify_set(folder, headers, whole=True))
    tokens = shards.read_split(folder, "val")
    text = decode(tokenizer.processor, tokens)
    logged = hashlib.sha256()  # of the training shards' headers
    for path in train:
        with open(path, "rb") as file:
            logged.update(file.read(shards.HEADER_BYTES))
    documents = hashlib.sha256()  # one by one: the training text may be larger than the memory
    for _, part in shards.documents(train, tokenizer.bos_id):
        document = decode(tokenizer.processor, part).documents[0]
        documents.update(hashlib.sha256(document).digest())
    vocabulary = {
        "name": name,
        "tokenizer": tokenizer_name,
        "tokenizer_sha256": tokenizer.sha256.hex(),
        "val_tokens": len(tokens) - 1,  # all but the first are scored
        "logged_val_sha256": sha256(tokens),
        "logged_train_sha256": logged.hexdigest(),
    }
    return {
        "val_sha256": text.sha256,
        "train_sha256": documents.hexdigest(),
        "val_bytes": text.bytes,
        "vocabularies": [vocabulary],
    }


# --- new --------------------------------------------------------------------------------------------------

OTHER_TOLERANCE = 0.1  # bits per byte by which the referee's score may exceed a log's, on an unknown text
NEXT = """Next: train each seed, make a record of them, judge it (this trains fresh seeds), measure
compressors for the same text, show all:
  {train}
  python -m records freeze logs/first-* --track {name} --name First --author ME --what "..." --why "..."
  python -m records verify {folder}/*_First --every-seed --write
  python -m records judge {folder}/*_First --write
  python -m records track compressors {folder} --write
  python -m records board
The preset floppy needs 1,200,000 bytes, minute 400,000. For fewer, lower MODEL_DIM.
Then commit records/, or open a pull request with {folder}/track.json, and then one with the record.
So that others get the text:
  {share}"""


def refuse_place(folder: Path, records: Path) -> None:
    """Raises UsageError of a track's folder that is no new one in records/."""
    if (folder / TRACK).exists():
        raise UsageError(f"{folder}: exists already; edit {folder / TRACK}, or choose another name")
    if folder.resolve().parent != records.resolve() or not re.fullmatch("track_[a-z0-9_]+", folder.name):
        named = shell(records / "track_tales")
        raise UsageError(f"{folder}: a track is a folder of records/, such as {named}, of a-z, 0-9 and _")


def tokenizer_of(folder: Path, like: Track) -> str:
    """The file in data/tokenizers of a dataset. Raises DataError."""
    if manifest := shards.load_manifest(folder):
        return Path(manifest["tokenizer"]["file"]).name
    named = {one["name"]: one["tokenizer"] for one in like["dataset"]["vocabularies"]}
    if folder.name not in named:
        make = "python -m data prepare text FILE --name NAME makes one"
        raise DataError(f"{folder}: holds no manifest.json, expected a dataset; {make}")
    return named[folder.name]


def training_command(track: Track, dataset: Path) -> str:
    """A shell's line that trains all seeds of a first record within the track's limits."""
    preset = "floppy" if track["budget_bytes"] >= FLOPPY_BYTES else "minute"
    settings = {
        "PRESET": "10min_16mb" if track["device"] == "cuda" else preset,
        "DATA_PATH": shell(dataset),
        "BUDGET_BYTES": track["budget_bytes"],
        "CODE_BYTES": track["code_bytes"],
    }
    limit = "train_flops" if track.counts_flops else "train_seconds"
    settings["MAX_FLOPS" if track.counts_flops else "MAX_WALLCLOCK_SECONDS"] = track[limit]
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    launch = ""
    if "devices" in track.rules:
        launch = f" -m torch.distributed.run --standalone --nproc_per_node={track.devices}"
    seeds = " ".join(map(str, track["seeds"]))
    return f"for seed in {seeds}; do SEED=$seed RUN_ID=first-$seed {words} python{launch} train_gpt.py; done"


@main.command()
@click.argument("folder", type=Path, metavar="records/track_NAME")
@click.option("--dataset", required=True, metavar="NAME", help="of data/datasets")
@click.option("--operations", type=Number(1), help="of a run's training  [default: as --like]")
@click.option("--budget-bytes", type=click.IntRange(1), help="of a record  [default: as --like]")
@click.option("--like", type=Path, default=RECORDS / "track_floppy", help="the track with all other rules")
@click.option("--records", type=Path, default=RECORDS, help="folder of the tracks")
@of_data
def new(
    folder: Path,
    dataset: str,
    operations: float | None,
    budget_bytes: int | None,
    like: Path,
    records: Path,
    data: Path,
) -> int:
    """Write the track.json of a new track, with the hashes of a text that is here."""
    refuse_place(folder, records)
    model = load_track(like)
    place = data / "datasets" / dataset
    facts = read_dataset(data, dataset, tokenizer_of(place, model))
    same_text = facts["val_sha256"] == model["dataset"]["val_sha256"]
    rules = model.rules | {
        "title": folder.name.removeprefix("track_").replace("_", " ").capitalize(),
        "budget_bytes": budget_bytes or model["budget_bytes"],
        "dataset": facts | {"second": model["dataset"]["second"] if same_text else None},
    }
    if not same_text:  # in streams of a few tokens a short text costs more than in windows
        rules["log_tolerance_bpb"] = max(OTHER_TOLERANCE, model["log_tolerance_bpb"])
    if operations:
        rules["train_flops"] = int(operations)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / TRACK, rules)
    say(f"{folder / TRACK}: written, with all other rules of {model.name}")
    say("Until a record is judged, any rule may be edited there; records/schema.json says what each means.")
    share = shell("python", "-m", "data", "publish", place, "--to", "USER/NAME")
    train = training_command(load_track(folder), place)
    say(NEXT.format(train=train, name=folder.name, folder=shell(folder), share=share))
    return 0


# --- compressors ------------------------------------------------------------------------------------------


@main.command()
@click.argument("folder", type=Path, metavar="TRACK_FOLDER")
@of_data
@click.option("--dataset", help="one of the track's  [default: its first]")
@click.option("--write", is_flag=True, help=f"keep the rows in the track's {REFERENCE}")
def compressors(folder: Path, data: Path, dataset: str | None, write: bool) -> int:
    """Measure what well-known compressors need for the validation text."""
    track = load_track(folder).using(dataset)
    text = validation_text(track, data)
    training = training_text(track, data)
    rows = []
    for found in measure(b"".join(text.documents), b"".join(training.documents if training else [])):
        say(str(found))
        if isinstance(found, ReferenceCompressor):
            rows.append(asdict(found))
    if not write:
        return 0
    words = ["track", "compressors", track.folder, "--dataset", track.dataset["name"], "--write"]
    value = {
        "written": f"by a program: {shell('python', '-m', 'records', *words)}",
        "val_sha256": text.sha256,
        "val_bytes": text.bytes,
        "train_sha256": training and training.sha256,
        "train_bytes": training and training.bytes,
        "rows": rows,
    }
    write_json(track.folder / REFERENCE, value)
    say(f"{track.folder / REFERENCE}: written; python -m records board shows it")
    return 0
