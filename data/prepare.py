"""From text to a tokenizer, shards and a manifest. data/README.md explains the options.

    python -m data prepare demo
    python -m data prepare development
    python -m data prepare text PATH... --name NAME --vocab-size 1024
    python -m data prepare hub:OWNER/NAME

All run the same five steps, in bounded memory whatever the size of the text: read, split, train a tokenizer,
encode, seal. All of it grows in a hidden folder beside the target. A second run continues from the parts that
are whole.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import click

from data import check, files, hub, shards, texts
from data.command import REPO, DataError, UsageError, say, shell, training_command
from data.corpus import DEMO_PLAN, Corpus, Plan, demo_documents, spool
from data.door import Commands, Number, interrupt, on_signals
from data.encode import train_tokenizer, write_split
from data.shards import SPLIT_NAMES, TRAIN, VAL
from data.sources import DEMO_SHA256, TRAIN_NAMES, Read, Source, demo_sources, find_files

# --- job: a plan, and where it is carried out ------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A plan, where its documents come from, and where its results go."""

    plan: Plan
    documents: Iterable[Read]
    state: list  # of the source, as JSON: another state, another spool
    root: Path = REPO
    workers: int = 2
    given: bytes | None = None  # tokenizer file to use instead of training one
    expected: str | None = None  # sha256 that the corpus must have
    skip_bad: bool = False  # documents that cannot be used are counted, and do not end the run
    origin: str = ""  # where the text was published: hub:owner/name@commit

    @property
    def target(self) -> Path:
        return self.root / "data" / self.plan.dataset

    @property
    def tokenizer(self) -> Path:
        return self.root / "data" / self.plan.tokenizer

    @property
    def work(self) -> Path:
        return self.target.with_name(f".spool_{self.target.name}")  # on its file system


# --- the pipeline ----------------------------------------------------------------------------------------


def prepare(job: Job) -> dict:
    """Make the dataset of `job`, or continue making it, or find that it is there. Its manifest.

    Raises DataError and UsageError, after which nothing stays behind: the next run will have other text or
    other options. What ends a run otherwise leaves what is whole to the next one.
    """
    job.work.mkdir(parents=True, exist_ok=True)
    busy = f"{job.work}: another python -m data prepare is at work there, expected to be alone"
    with files.locked(job.work, file="lock", refusal=busy):
        try:
            manifest = finished(job, job.expected) or build(job)
        except (DataError, UsageError):
            remove(job.work)
            raise
        remove(job.work)
        return manifest


def clear(work: Path) -> None:
    """Empty the hidden folder; the plan first, so that no later run trusts what a kill may leave of it."""
    (work / "plan.json").unlink(missing_ok=True)
    for leftover in work.iterdir():
        if leftover.is_dir():
            shutil.rmtree(leftover)
        elif leftover.name != "lock":
            leftover.unlink()


def remove(work: Path) -> None:
    """Remove the hidden folder, the lock last: whoever waits for it finds it gone and makes a new one."""
    clear(work)
    (work / "lock").unlink()
    with contextlib.suppress(OSError):  # another run may have begun there
        work.rmdir()
        work.parent.rmdir()  # where nothing came of it


def finished(job: Job, corpus_sha256: str | None) -> dict | None:
    """The manifest of the target if that is there, whole, and of this corpus (None: not known yet).

    Raises UsageError where something else is in its place, DataError where it is damaged.
    """
    if not job.target.exists():
        return None
    try:
        manifest = shards.load_manifest(job.target) or {}
        same = manifest.get("options") == asdict(job.plan)
        if not same or corpus_sha256 not in (None, manifest["corpus_sha256"]):
            both = [job.target] if job.given else [job.target, job.tokenizer]
            raise UsageError(
                f"{job.target}: exists and was made from other text or with other options, expected "
                f"a free place; choose another --name, or remove it: {shell('rm', '-r', *both)}"
            )
        if corpus_sha256 is None:
            return None
        shards.raise_failed(check.verify_folder(job.target, shards.Tokenizer(job.tokenizer), whole=True))
    except DataError as error:
        mend = shell("rm", "-r", job.target)
        raise DataError(f"{error}; {mend} and the same command makes it anew") from error
    say(f"{job.target}: is whole, made by the same command")
    return manifest


def build(job: Job) -> dict:
    """The five steps, each skipped where its result is whole. The manifest."""
    begin(job)
    documents = job.work / "documents"
    dataset = job.work / "dataset"
    model = job.work / "tokenizer.model"
    if not documents.exists():
        say("reading the documents")
        spool(job.documents, job.plan, documents, job.skip_bad)
    corpus = Corpus(documents, job.plan, job.expected)
    if manifest := finished(job, corpus.sha256.hex()):
        return manifest
    if not model.exists():
        texts = (text for _, text in corpus.read("train"))
        files.write_beside(model, job.given or train_tokenizer(texts, job.plan))
    if job.tokenizer.exists() and job.tokenizer.read_bytes() != model.read_bytes():
        raise UsageError(
            f"{job.tokenizer}: another tokenizer has this name, expected a free place; choose "
            f"another --name, or remove it: {shell('rm', job.tokenizer)}"
        )
    tokenizer = shards.Tokenizer(model)
    dataset.mkdir(exist_ok=True)
    for split in (VAL, TRAIN):
        write_split(split, job.plan, job.workers, corpus, tokenizer, dataset)
    manifest = seal(dataset, job, corpus, tokenizer)
    job.tokenizer.parent.mkdir(parents=True, exist_ok=True)
    files.write_beside(job.tokenizer, model.read_bytes())
    os.rename(dataset, job.target)  # the folder appears at once and whole
    return manifest


def begin(job: Job) -> None:
    """Keep what an earlier run left if it did the same work with the same code, else clear it away."""
    code = [files.file_sha256(path).hex() for path in sorted(Path(__file__).parent.glob("*.py"))]
    job_json = json.dumps([asdict(job.plan), job.state, code])
    plan = job.work / "plan.json"
    if not plan.exists() or plan.read_text() != job_json:
        clear(job.work)
        files.write_beside(plan, job_json.encode())


def seal(folder: Path, job: Job, corpus: Corpus, tokenizer: shards.Tokenizer) -> dict:
    """Complete the headers, write the manifest, verify all. The manifest."""
    say("checking all of it")
    headers = complete_headers(folder)
    manifest = make_manifest(job, corpus, tokenizer, headers)
    files.write_beside(folder / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    shards.raise_failed(check.verify_folder(folder, tokenizer, whole=True))
    return manifest


def complete_headers(folder: Path) -> dict[Path, shards.Header]:
    """Write into each shard what it does not know alone: how many there are, and whether any loses text.

    A trainer asks all shards of a dataset for one answer.
    """
    splits = shards.by_split(folder.iterdir())
    headers = {path: shards.read_header(path) for path in splits[VAL] + splits[TRAIN]}
    flags = shards.LOSSY if any(header.lossy for header in headers.values()) else 0
    for path, header in headers.items():
        headers[path] = replace(header, count=len(splits[header.split]), flags=flags)
        with open(path, "r+b") as file:
            file.write(shards.pack(headers[path]))
            files.sync(file)
    return headers


def make_manifest(
    job: Job, corpus: Corpus, tokenizer: shards.Tokenizer, headers: dict[Path, shards.Header]
) -> dict:
    """What manifest.json says; data/README.md has it as a table."""
    plan = job.plan
    largest = corpus.largest["val"] / corpus.text_bytes["val"]
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
        "val_sha256": corpus.split_sha256["val"],
        "train_sha256": corpus.split_sha256["train"],
        "second_sha256": corpus.split_sha256["second"] if plan.second_fraction else None,
        "lossy": any(header.lossy for header in headers.values()),
        "dropped": corpus.dropped,
        "options": asdict(plan),
        "files": [entry(path, header) for path, header in headers.items()],
        "validation": {"largest_document": round(largest, 4)},
    }
    return manifest | ({"origin": job.origin} if job.origin else {})


def entry(path: Path, header: shards.Header) -> dict:
    """A shard in the manifest."""
    return {
        "name": path.name,
        "split": SPLIT_NAMES[header.split],
        "documents": header.documents,
        "bytes": header.text_bytes,
        "tokens": header.tokens,
        "sha256": files.file_sha256(path).hex(),
    }


FEW_DOCUMENTS = 10  # a validation text of fewer, or of fewer bytes, says little about other texts
FEW_BYTES = 100_000
LARGE = 0.05  # of the bytes: one document that a model does well or badly on moves the score by hundredths


def report(job: Job, manifest: dict) -> None:
    """Say what is there now, and the command that trains on it."""
    dropped = manifest["dropped"]
    say(f"dropped: {dropped['duplicates']:,} exact duplicates, {dropped['empty']:,} empty documents")
    if dropped.get("skipped"):  # older manifests have no such field
        say(f"skipped: {dropped['skipped']:,} documents that could not be used")
    for shard in manifest["files"]:
        say(
            f"{job.target / shard['name']}: {shard['documents']:,} documents, {shard['bytes']:,} bytes, "
            f"{shard['tokens']:,} tokens, {shard['bytes'] / shard['tokens']:.4f} bytes a token"
        )
    if manifest["lossy"]:
        say("LOSSY: the tokens do not give back all of the text exactly")
    say(f"tokenizer: {job.tokenizer}")
    for line in judgements(manifest):
        say(line)
    say("To train on it:")
    say(training_command(job.target, job.tokenizer, job.plan.vocab_size))


def judgements(manifest: dict) -> Iterator[str]:
    """What the validation text is worth: a line of facts, and warnings of what spoils a score."""
    val = [shard for shard in manifest["files"] if shard["split"] == "val"]
    documents = sum(shard["documents"] for shard in val)
    size = sum(shard["bytes"] for shard in val)
    largest = manifest["validation"]["largest_document"]
    yield f"validation text: the largest of {documents:,} documents has {largest:.1%} of the bytes"
    more = "--val-docs and --val-fraction take more"
    if documents < FEW_DOCUMENTS or size < FEW_BYTES:
        yield (
            f"warning: the validation text is small (documents: {documents}, bytes: {size}); below "
            f"{FEW_DOCUMENTS} documents or {FEW_BYTES:,} bytes a score depends on chance: {more}"
        )
    elif largest > LARGE:
        yield (
            f"warning: a score depends on one document, which has more than {LARGE:.0%} of the validation "
            f"text: --val-max-bytes leaves large ones to training, {more}"
        )


# --- the development text: cut from the demo's training documents, to choose settings and ideas on ---------

# The same rules as the demo's, so that a document is of the same kind; the next ones by their keys.
DEVELOPMENT_PLAN = Plan(
    "development", val_docs=200, val_max_bytes=DEMO_PLAN.val_max_bytes, train_names=TRAIN_NAMES
)


def demo_tokenizer(root: Path, vocab_size: int) -> shards.Tokenizer:
    """The demo's own, with which all settings carry over. Raises DataError."""
    path = root / "data" / replace(DEMO_PLAN, vocab_size=vocab_size).tokenizer
    if not path.exists():
        where = [] if root == REPO else ["--root", root]
        mend = shell("python", "-m", "data", "prepare", "demo", "--vocab-size", vocab_size, *where)
        raise DataError(f"{path}: no such file, expected the demo's tokenizer; {mend} makes it")
    return shards.Tokenizer(path)


# --- command line ----------------------------------------------------------------------------------------


def cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it, macOS and Windows do not
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def together(*options: Callable) -> Callable:
    """Several options as one decorator."""
    return lambda function: functools.reduce(lambda made, option: option(made), options, function)


COUNT = {"type": click.IntRange(1), "metavar": "N"}
OPTIONS = together(  # of all commands
    click.option("--root", type=Path, default=REPO, help="write into ROOT/data"),
    click.option("--workers", **COUNT, default=cores(), help="threads that encode"),
    click.option("--shard-tokens", **COUNT, default=Plan.shard_tokens, help="of a shard, at most"),
    click.option("--vocab-size", **COUNT, help="260 (bytes) to 65536  [default: 1024, or the tokenizer's]"),
)
MODEL_TYPE = click.option(
    "--model-type", type=click.Choice(["bpe", "unigram"]), help="of the tokenizer  [default: bpe]"
)
TEXT_OPTIONS = together(  # of texts, of one's own and of the hub
    click.option(
        "--val-fraction",
        type=Number(0, 1, min_open=True, max_open=True),
        metavar="F",
        help=f"of documents  [default: {Plan.val_fraction}]",
    ),
    click.option("--val-docs", **COUNT, help="validation documents, by hash, in place of --val-fraction"),
    click.option("--val-max-bytes", **COUNT, default=Plan.val_max_bytes, help="larger documents only train"),
    click.option("--lossy-ok", is_flag=True, help="accept loss of text; the headers say so"),
    click.option("--tokenizer", type=Path, metavar="FILE", help="take this SentencePiece model"),
    click.option(
        "--skip-bad", is_flag=True, help="leave out what cannot be used; names the first, counts all"
    ),
    click.option("--separator", metavar="LINE", help="between documents in plain text; '' for an empty line"),
    OPTIONS,
    MODEL_TYPE,
)


def planned(plan: Plan, **options: Any) -> Plan:
    """The plan with the options that were given. Raises UsageError."""
    return replace(plan, **{name: value for name, value in options.items() if value is not None})


def text_job(
    documents: Iterable[Read],
    state: list,
    tokenizer: Path | None,
    skip_bad: bool,
    root: Path,
    workers: int,
    origin: str = "",
    **fields: Any,
) -> Job:
    """The job that TEXT_OPTIONS ask for. Raises UsageError, DataError."""
    if fields["val_docs"] and fields["val_fraction"]:
        raise UsageError("--val-docs and --val-fraction given, expected one of them")
    plan = planned(Plan(fields["name"]), **fields)
    given = None
    if tokenizer:
        model = shards.Tokenizer(tokenizer)
        if fields["model_type"] or fields["vocab_size"] not in (None, model.vocab_size):
            raise UsageError(
                f"{tokenizer}: has {model.vocab_size} pieces and a type of its own, expected no "
                "--model-type and no other --vocab-size beside --tokenizer"
            )
        plan = with_tokenizer(plan, model)
        given = model.model
    state = [*state, skip_bad]
    return Job(plan, documents, state, root, workers, given, skip_bad=skip_bad, origin=origin)


def with_tokenizer(plan: Plan, model: shards.Tokenizer) -> Plan:
    """The plan that takes this tokenizer."""
    return replace(plan, model_type="given", vocab_size=model.vocab_size, given_tokenizer=model.sha256.hex())


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
    on_signals(interrupt, signal.SIGINT)  # a shell ignores it for what runs with &
    try:
        report(job, prepare(job))
    except KeyboardInterrupt:
        print("stopped; the same command continues from what is whole", file=sys.stderr)
        return 16
    return 0


@main.command()
@OPTIONS
@MODEL_TYPE
def demo(root: Path, workers: int, **fields: Any) -> Job:
    """The demo corpus: sources of the installed packages."""
    plan = planned(DEMO_PLAN, **fields)
    return Job(plan, demo_sources(), [DEMO_SHA256], root, workers, expected=DEMO_SHA256)


@main.command()
@OPTIONS
def development(root: Path, workers: int, **fields: Any) -> Job:
    """A text to choose settings on, cut from the demo's training documents."""
    plan = planned(DEVELOPMENT_PLAN, **fields)
    tokenizer = demo_tokenizer(root, plan.vocab_size)
    plan = with_tokenizer(plan, tokenizer)
    return Job(plan, demo_documents("train"), [DEMO_SHA256], root, workers, given=tokenizer.model)


@main.command()
@click.argument("paths", nargs=-1, required=True, type=Path, metavar="PATH...")
@click.option("--name", required=True, help="of the dataset: data/datasets/NAME_sp1024")
@click.option("--field", default="text", help="of JSON and parquet")
@click.option("--as-text", multiple=True, metavar="SUFFIX", help="of files that are plain text, too")
@TEXT_OPTIONS
def text(
    paths: tuple[Path, ...], field: str, separator: str | None, as_text: tuple[str, ...], **options: Any
) -> Job:
    """Your own text: files, and folders of them, in all formats that data/README.md names."""
    as_text = tuple(end.lower() for end in as_text)
    source = Source(find_files(paths, as_text), field, separator, as_text)
    return text_job(source.documents(), source.state(), **options)


@main.command("hub")
@click.argument("address", metavar="hub:OWNER/NAME")
@click.option("--name", help="of the dataset here  [default: NAME, or NAME-SUBSET]")
@click.option("--split", type=click.Choice([*texts.SPLITS]), default="train", help="of the dataset there")
@click.option(
    "--subset",
    default="",
    show_default=False,
    metavar="PATH",
    help="a folder or a file of the repo; . for all folders",
)
@click.option("--files", "most", **COUNT, help="only the first N files")
@click.option(
    "--field",
    "--column",
    default="",
    show_default=False,
    help="of JSON and parquet  [default: text, or the only one of strings]",
)
@TEXT_OPTIONS
def hub_text(
    address: str,
    name: str | None,
    split: str,
    subset: str,
    most: int | None,
    field: str,
    separator: str | None,
    **options: Any,
) -> Job:
    """A dataset of text from the Hugging Face hub, at main or at the commit after @."""
    repo, revision = hub.read_address(address, "dataset")
    name = name or "-".join([*PurePosixPath(repo.id).parts[1:], *PurePosixPath(subset).parts])
    found = texts.find_text(repo, revision, split, subset, most, field, separator)
    return text_job(found.documents(), found.state(), name=name, origin=found.origin, **options)


if __name__ == "__main__":  # as pages of before 2026-11-26 have it
    from data.__main__ import main as of_all

    sys.exit(of_all(["prepare", *sys.argv[1:]]))
