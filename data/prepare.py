"""From text to a tokenizer, shards and a manifest. data/README.md explains the options.

    python -m data prepare demo
    python -m data prepare development
    python -m data prepare text PATH... --name NAME --vocab-size 1024
    python -m data prepare hub:OWNER/NAME

The text may be larger than the memory. After a kill or a stop the same command continues from what is whole.
"""

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import click

from data import check, files, hub, shards, texts
from data.command import REPO, DataError, UsageError, say, shell, training_command
from data.corpus import (
    DEMO_PLAN,
    DEMO_SHA256,
    SPECIAL_PIECES,
    TRAIN_NAMES,
    Corpus,
    Plan,
    Read,
    demo_documents,
    demo_sources,
    spool,
)
from data.door import Commands, Number
from data.encode import train_tokenizer, write_split
from data.shards import SPLIT_NAMES, TRAIN, VAL
from data.sources import Source, find_files

# --- the pipeline ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A plan, where its documents come from, and where its results go."""

    plan: Plan
    documents: Iterable[Read]
    state: list  # of the source, as JSON: another state, another spool
    root: Path = REPO
    given: bytes | None = None  # tokenizer file to use instead of training one
    expected: str | None = None  # sha256 that the corpus must have
    skip_bad: bool = False  # documents that cannot be used are counted, and do not end the run
    origin: str = ""  # where the text was published: hub:owner/name@commit
    more: str = "give more text"  # what is left to do for more documents

    @property
    def target(self) -> Path:
        return self.root / "data" / self.plan.dataset

    @property
    def tokenizer(self) -> Path:
        return self.root / "data" / self.plan.tokenizer

    @property
    def work(self) -> Path:
        return self.target.with_name(f".spool_{self.target.name}")  # on its file system


def prepare(job: Job) -> dict:
    """Make the dataset of `job`, or continue making it, or find that it is there. Its manifest.

    Raises DataError and UsageError, after which nothing stays behind: the next run will have other text or
    other options. What ends a run otherwise leaves what is whole to the next one.
    """
    job.work.mkdir(parents=True, exist_ok=True)
    busy = f"{job.work}: another python -m data prepare is at work there, expected to be alone"
    with files.locked(job.work, file="lock", refusal=busy):
        try:
            manifest = build(job)
        except (DataError, UsageError):
            shutil.rmtree(job.work, ignore_errors=True)
            raise
        shutil.rmtree(job.work, ignore_errors=True)
        return manifest


def build(job: Job) -> dict:
    """The five steps, each skipped where an earlier run of the same work and code did it. The manifest."""
    code = [files.file_sha256(path).hex() for path in sorted(Path(__file__).parent.glob("*.py"))]
    same_work = json.dumps([asdict(job.plan), job.state, code])
    work = job.work / files.sha256(same_work.encode())[:16]
    documents = work / "documents"
    dataset = work / "dataset"
    model = work / "tokenizer.model"
    dataset.mkdir(parents=True, exist_ok=True)
    if not documents.exists():
        say("reading the documents")
        spool(job.documents, job.plan, documents, job.skip_bad)
    corpus = Corpus(documents, job.plan, job.expected, job.more)
    if job.target.exists():
        return finished(job, corpus)
    if not model.exists():
        train = (text for _, text in corpus.read("train"))
        files.write_beside(model, job.given or train_tokenizer(train, job.plan))
    if job.tokenizer.exists() and job.tokenizer.read_bytes() != model.read_bytes():
        mend = f"choose another --name, or remove it: {shell('rm', job.tokenizer)}"
        raise UsageError(f"{job.tokenizer}: another tokenizer has this name; {mend}")
    tokenizer = shards.Tokenizer(model)
    for split in (VAL, TRAIN):
        write_split(split, job.plan, corpus, tokenizer, dataset)
    manifest = seal(dataset, job, corpus, tokenizer)
    job.tokenizer.parent.mkdir(parents=True, exist_ok=True)
    files.write_beside(job.tokenizer, model.read_bytes())
    os.rename(dataset, job.target)  # the folder appears at once and whole
    return manifest


def finished(job: Job, corpus: Corpus) -> dict:
    """The manifest of the dataset that is there. Raises UsageError if it is another one, else DataError."""
    try:
        manifest = shards.load_manifest(job.target) or {}
        made_of = manifest.get("options"), manifest.get("corpus_sha256")
        if made_of != (asdict(job.plan), corpus.sha256.hex()):
            both = [job.target] if job.given else [job.target, job.tokenizer]
            mend = f"choose another --name, or remove it: {shell('rm', '-r', *both)}"
            raise UsageError(f"{job.target}: was made from other text or with other options; {mend}")
        shards.raise_failed(check.verify_folder(job.target, shards.Tokenizer(job.tokenizer), whole=True))
    except DataError as error:
        mend = shell("rm", "-r", job.target)
        raise DataError(f"{error}; {mend} and the same command makes it anew") from error
    say(f"{job.target}: is whole, made from the same documents")
    return manifest


def seal(folder: Path, job: Job, corpus: Corpus, tokenizer: shards.Tokenizer) -> dict:
    """Complete the headers, write manifest.json (a table of data/README.md), verify all. The manifest."""
    say("checking all of it")
    plan = job.plan
    splits = shards.by_split(folder.iterdir())
    headers = {path: shards.read_header(path) for path in splits[VAL] + splits[TRAIN]}
    lossy = any(header.lossy for header in headers.values())  # one answer for all shards of a dataset
    entries = []
    for path, header in headers.items():
        count = len(splits[header.split])
        with open(path, "r+b") as file:
            file.write(shards.pack(replace(header, count=count, flags=shards.LOSSY if lossy else 0)))
            files.sync(file)
        entries.append(
            {
                "name": path.name,
                "split": SPLIT_NAMES[header.split],
                "documents": header.documents,
                "bytes": header.text_bytes,
                "tokens": header.tokens,
                "sha256": files.file_sha256(path).hex(),
            }
        )
    manifest = {
        "format": shards.MANIFEST_FORMAT,
        "version": 1,
        "name": plan.name,
        "tokenizer": {
            "file": os.path.relpath(job.tokenizer, job.target),
            "sha256": tokenizer.sha256.hex(),
            "vocab_size": tokenizer.vocab_size,
            "model_type": plan.model_type,
        },
        "corpus_sha256": corpus.sha256.hex(),
        "val_sha256": corpus.sha256_of["val"],
        "train_sha256": corpus.sha256_of["train"],
        "second_sha256": corpus.sha256_of["second"] if plan.second_fraction else None,
        "lossy": lossy,
        "dropped": corpus.dropped,
        "options": asdict(plan),
        "files": entries,
        "validation": {"largest_document": round(corpus.largest["val"] / corpus.text_bytes["val"], 4)},
    }
    if job.origin:
        manifest["origin"] = job.origin
    files.write_beside(folder / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    shards.raise_failed(check.verify_folder(folder, tokenizer, whole=True))
    return manifest


FEW_DOCUMENTS = 10  # a validation text of fewer, or of fewer bytes, says little about other texts
FEW_BYTES = 100_000
LARGE = 0.05  # of the bytes: one document that a model does well or badly on moves the score by hundredths


def large(documents: int) -> float:
    """The share of the bytes above which a document is large: twice the mean, where they are few."""
    return max(LARGE, 2 / documents)


def weakness(val: Counter[str], train: Counter[str], largest: float) -> str:
    """Why the validation text says little about other texts; nothing where it says enough."""
    documents, size = val["documents"], val["bytes"]
    if size > train["bytes"]:
        return f"the validation text has {size:,} bytes, the training text {train['bytes']:,}"
    if documents < FEW_DOCUMENTS or size < FEW_BYTES:
        least = f"below {FEW_DOCUMENTS} documents or {FEW_BYTES:,} bytes a score depends on chance"
        return f"the validation text is small (documents: {documents}, bytes: {size}); {least}"
    if largest > large(documents):
        share = f"{large(documents):.0%} of the validation text"
        return f"a score depends on one document, which has more than {share}"
    return ""


def remedy(val: Counter[str], train: Counter[str], largest: float, more: str) -> str:
    """What mends a weakness: an option, or `more` documents."""
    documents, size = val["documents"], val["bytes"]
    total = documents + train["documents"]
    if total < 2 * FEW_DOCUMENTS:
        return more
    enough = max(2 * FEW_DOCUMENTS, documents * FEW_BYTES // size + 1)
    count = min(enough, total // 5)
    if documents < count or (count < documents and size > train["bytes"]):
        return f"take --val-docs {count}" + (f", and {more}" if count < enough else "")
    if largest > large(documents) and size >= FEW_BYTES:
        most = int(size * large(documents))
        return f"take --val-max-bytes {most}, which leaves larger documents to training"
    return more


def report(job: Job, manifest: dict) -> None:
    """Say what is there now, what its validation text is worth, and the command that trains on it."""
    dropped = [f"{count:,} {why}" for why, count in manifest["dropped"].items()]
    say(f"documents dropped: {', '.join(dropped)}")
    found = {split: shards.totals(manifest, split) for split in SPLIT_NAMES}
    for split, total in found.items():
        counts = ", ".join(f"{count:,} {what}" for what, count in total.items())
        say(f"{split}: {counts}, {total['bytes'] / total['tokens']:.4f} bytes a token")
    if manifest["lossy"]:
        say("LOSSY: the tokens do not give back all of the text exactly")
    largest = manifest["validation"]["largest_document"]
    say(f"validation text: its largest document has {largest:.1%} of the bytes")
    if wrong := weakness(**found, largest=largest):
        mend = remedy(**found, largest=largest, more=job.more)
        say(f"warning: {wrong}: {mend}; a text that is made anew takes another --name")
    say("To train on it for a minute:")
    say(training_command(PRESET="minute", DATA_PATH=job.target))


# --- command line ----------------------------------------------------------------------------------------

COUNT = {"type": click.IntRange(1), "metavar": "N"}
SHARD = {"type": click.IntRange(1, shards.MAX_TOKENS), "metavar": "N", "default": Plan.shard_tokens}
PIECES = {"type": click.IntRange(SPECIAL_PIECES + 1, shards.IDS), "metavar": "N"}
FRACTION = {"type": Number(0, 1, min_open=True, max_open=True), "metavar": "F"}
COLUMN = {"default": "", "show_default": "text, or the only one of strings", "metavar": "NAME"}
OPTIONS = [  # of all commands
    click.Option(["--root"], type=Path, default=REPO, help="write into ROOT/data"),
    click.Option(["--shard-tokens"], **SHARD, help="of a shard, at most"),
    click.Option(["--vocab-size"], **PIECES, help="260: bytes  [default: 1024, or the tokenizer's]"),
]
MODEL_TYPE = click.Option(["--model-type"], type=click.Choice(["bpe", "unigram"]), help="[default: bpe]")
TEXT_OPTIONS = [  # of texts, of one's own and of the hub
    *OPTIONS,
    MODEL_TYPE,
    click.Option(["--val-fraction"], **FRACTION, help=f"of documents  [default: {Plan.val_fraction}]"),
    click.Option(["--val-docs"], **COUNT, help="validation documents, by hash, in place of --val-fraction"),
    click.Option(["--val-max-bytes"], **COUNT, default=Plan.val_max_bytes, help="larger ones only train"),
    click.Option(["--lossy-ok"], is_flag=True, help="accept loss of text; the headers say so"),
    click.Option(["--tokenizer"], type=Path, metavar="FILE", help="take this SentencePiece model"),
    click.Option(["--skip-bad"], is_flag=True, help="leave out what cannot be used, and count it"),
    click.Option(["--separator"], metavar="LINE", help="between documents of plain text; '' for empty lines"),
    click.Option(["--field", "--column"], **COLUMN, help="of JSON and parquet"),
]


def planned(plan: Plan, model: shards.Tokenizer | None, fields: dict[str, Any]) -> Plan:
    """The plan with the options that were given, and the tokenizer. Raises UsageError."""
    plan = replace(plan, **{name: value for name, value in fields.items() if value is not None})
    if model is None:
        return plan
    return replace(plan, model_type="given", vocab_size=model.vocab_size, given_tokenizer=model.sha256.hex())


def text_job(
    source: Source,
    name: str,
    field: str,
    separator: str | None,
    tokenizer: Path | None,
    skip_bad: bool,
    root: Path,
    **fields: Any,
) -> Job:
    """The job that TEXT_OPTIONS ask for. Raises UsageError, DataError."""
    source = replace(source, field=field, separator=separator)
    if fields["val_docs"] and fields["val_fraction"]:
        raise UsageError("--val-docs and --val-fraction given, expected one of them")
    model = shards.Tokenizer(tokenizer) if tokenizer else None
    if model and (fields["model_type"] or fields["vocab_size"] not in (None, model.vocab_size)):
        own = f"has {model.vocab_size} pieces and a type of its own"
        raise UsageError(f"{tokenizer}: {own}, expected no --model-type and no other --vocab-size beside it")
    return Job(
        planned(Plan(name), model, fields),
        source.documents(),
        [*source.state(), skip_bad],
        root,
        given=model and model.model,
        skip_bad=skip_bad,
        origin=source.origin,
        more=source.more,
    )


class Preparations(Commands):
    """An address is enough of a command: its first word is the command's name."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple:
        return super().resolve_command(ctx, ["hub", *args] if args[0].startswith("hub:") else args)


@click.group(cls=Preparations, help=__doc__)
def main() -> None:
    pass


@main.result_callback()
def carry_out(job: Job) -> int:
    """Prepare what a command below asks for; the exit code."""
    try:
        report(job, prepare(job))
    except KeyboardInterrupt:
        print("stopped; the same command continues from what is whole", file=sys.stderr)
        return 16
    return 0


@main.command(params=[*OPTIONS, MODEL_TYPE])
def demo(root: Path, **fields: Any) -> Job:
    """The demo corpus: sources of the installed packages."""
    plan = planned(DEMO_PLAN, None, fields)
    return Job(plan, demo_sources(), [DEMO_SHA256], root, expected=DEMO_SHA256)


# The rules are the demo's, so that a document is of the same kind; the next ones by their keys.
DEVELOPMENT_PLAN = Plan(
    "development", val_docs=200, val_max_bytes=DEMO_PLAN.val_max_bytes, train_names=TRAIN_NAMES
)


@main.command(params=[*OPTIONS])
def development(root: Path, **fields: Any) -> Job:
    """A text to choose settings on, cut from the demo's training documents."""
    plan = planned(DEVELOPMENT_PLAN, None, fields)
    path = root / "data" / replace(DEMO_PLAN, vocab_size=plan.vocab_size).tokenizer
    if not path.exists():
        options = ["--vocab-size", plan.vocab_size, "--root", root]
        mend = shell("python", "-m", "data", "prepare", "demo", *options)
        raise DataError(f"{path}: no such file, expected the demo's tokenizer; {mend} makes it")
    model = shards.Tokenizer(path)  # with which all settings carry over
    plan = planned(plan, model, {})
    return Job(plan, demo_documents("train"), [DEMO_SHA256], root, given=model.model)


@main.command(params=[*TEXT_OPTIONS])
@click.argument("paths", nargs=-1, required=True, type=Path, metavar="PATH...")
@click.option("--name", required=True, help="of the dataset: data/datasets/NAME_sp1024")
def text(paths: tuple[Path, ...], **options: Any) -> Job:
    """Your own text: files, and folders of them, in all formats that data/README.md names."""
    return text_job(Source(find_files(paths)), **options)


@main.command("hub", params=[click.Argument(["address"], metavar="hub:OWNER/NAME"), *TEXT_OPTIONS])
@click.option("--name", help="of the dataset here  [default: NAME, or NAME-SUBSET]")
@click.option("--subset", metavar="PATH", help="a folder or a file of the repo; . for all folders")
@click.option("--files", "most", **COUNT, help="only the first N files")
def hub_text(address: str, name: str | None, subset: str | None, most: int | None, **options: Any) -> Job:
    """A dataset of text from the Hugging Face hub, at main or at the commit after @."""
    repo, revision = hub.read_address(address, "dataset")
    subset = subset or ""
    name = name or "-".join([*PurePosixPath(repo.id).parts[1:], *PurePosixPath(subset).parts])
    return text_job(texts.find_text(repo, revision, subset, most), name, **options)


if __name__ == "__main__":  # as pages of before 2026-11-26 have it
    from data.__main__ import main as of_all

    sys.exit(of_all(["prepare", *sys.argv[1:]]))
