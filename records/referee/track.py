"""What a track's folder says of its text: hashes and sizes, and what well-known compressors need for it.

    python -m records track new records/track_NAME --dataset TinyStories_sp1024 --operations 1e13 \\
        --budget-bytes 500000                                        write the track.json of a new track
    python -m records track fill records/track_10min_16mb            write the nulls of its track.json
    python -m records track compressors records/track_floppy          measure compressors and print the rows
    python -m records track compressors records/track_floppy --write  and keep them for the board

`new` takes a text that is here, and all other rules from another track. `fill` reads all shards and
tokenizers of the track that are here. What track.json says already stays as it is, and must be what they say.
"""

import copy
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
from records.archive.tracks import DATA, RECORDS, REFERENCE, ReferenceCompressor, load_track
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


def read_facts(data: Path, dataset: str, tokenizer_name: str) -> tuple[dict, dict]:
    """A dataset's facts by their names in track.json: of the text, and of its tokens.

    Every shard is checked first. Raises DataError.
    """
    folder = data / "datasets" / dataset
    say(f"{dataset}: reading all shards of {folder}")
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
    of_text = {
        "val_sha256": text.sha256,
        "train_sha256": documents.hexdigest(),
        "val_bytes": text.bytes,
    }
    of_tokens = {
        "tokenizer_sha256": tokenizer.sha256.hex(),
        "val_tokens": len(tokens) - 1,  # all but the first are scored
        "logged_val_sha256": sha256(tokens),
        "logged_train_sha256": logged.hexdigest(),
    }
    return of_text, of_tokens


# --- new --------------------------------------------------------------------------------------------------


@main.command()
@click.argument("folder", type=Path, metavar="TRACK_FOLDER")
@click.option("--dataset", required=True, metavar="NAME", help="of data/datasets, made by `data prepare`")
@click.option("--operations", type=Number(0, min_open=True), required=True, help="of a run's training")
@click.option("--budget-bytes", type=click.IntRange(1), required=True, help="of artifact and code")
@click.option("--title", help="[default: operations, bytes and text in words]")
@click.option("--like", type=Path, default=RECORDS / "track_floppy", help="the track with all other rules")
@of_data
def new(
    folder: Path,
    dataset: str,
    operations: float,
    budget_bytes: int,
    title: str | None,
    like: Path,
    data: Path,
) -> int:
    """Write the track.json of a new track, with the hashes of a text that is here."""
    if not re.fullmatch("track_[a-z0-9_]+", folder.name) or (folder / TRACK).exists():
        raise UsageError(f"{folder}: expected a new folder with a name like records/track_tales")
    place = data / "datasets" / dataset
    manifest = shards.load_manifest(place)
    if manifest is None:
        raise DataError(f"{place}: holds no manifest.json, expected what data prepare makes")
    tokenizer = Path(manifest["tokenizer"]["file"]).name
    of_text, of_tokens = read_facts(data, dataset, tokenizer)
    vocabulary = {"name": dataset, "tokenizer": tokenizer} | of_tokens
    second = "demo" if manifest["name"] == "demo" else None
    rules = load_track(like).rules | {
        "title": title or f"{operations:g} operations, {budget_bytes:,} bytes, {manifest['name']}",
        "train_flops": int(operations),
        "budget_bytes": budget_bytes,
        "artifact_below": budget_bytes + 1,
        "dataset": of_text | {"second": second, "vocabularies": [vocabulary]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / TRACK, rules)
    load_track(folder)
    say(f"{folder / TRACK}: written, with all other rules of {like.name}")
    what = json.loads((RECORDS / "schema.json").read_text())["$defs"]["track"]["properties"]
    for name in ("train_seconds", "eval_seconds", "min_gain_bpb", "noise_bpb", "alpha", "seeds"):
        say(f"  {name}: {rules[name]}  {what[name].get('description', '')}".rstrip())
    if "origin" in manifest:
        same = shell("python", "-m", "data", "prepare", manifest["origin"])
        say(f"others make its text by: {same}, with the options of its manifest.json")
    return 0


# --- fill -------------------------------------------------------------------------------------------------


def put(place: dict, facts: dict, folder: Path) -> None:
    """Give nulls their values. Raises DataError where another value stands already."""
    for name, value in facts.items():
        if place[name] is None:
            place[name] = value
            say(f"{name}: {value}")
        elif place[name] != value:
            raise DataError(
                f"{folder}: {name} is {value}, the track's is {place[name]}: "
                "this is another text, or some of its shards are not here"
            )


@main.command()
@click.argument("folder", type=Path, metavar="TRACK_FOLDER")
@of_data
def fill(folder: Path, data: Path) -> int:
    """Write the nulls of a track.json from the shards that are here."""
    track = load_track(folder)
    rules = copy.deepcopy(track.rules)
    dataset = rules["dataset"]
    here = []
    for vocabulary in dataset["vocabularies"]:
        place = data / "datasets" / vocabulary["name"]
        if any(place.glob("*.bin")):
            here.append(place)
            of_text, of_tokens = read_facts(data, place.name, vocabulary["tokenizer"])
            put(dataset, of_text, place)
            put(vocabulary, of_tokens, place)
        else:
            say(f"{place.name}: left as it is, since {place} holds no shards")
    if not here:
        raise DataError(f"{data}: holds the shards of no dataset of the track; --data names the folder")
    path = track.folder / TRACK
    if rules == track.rules:
        say(f"{path}: says all of this already")
    else:
        write_json(path, rules)
        say(f"{path}: written")
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
