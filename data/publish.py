"""Put a dataset that `prepare` made on the Hugging Face hub: shards, tokenizer, manifest and a card.

    python -m data publish data/datasets/NAME_sp1024 --to user/name

`python -m data download --repo-id user/name --variant NAME_sp1024` fetches it. The token is HF_TOKEN, or that
of `hf auth login`. The same command sends what has changed, or goes on. A repo that holds anything else is
left as it is.
"""

import json
import sys
import tempfile
from pathlib import Path

import click
from huggingface_hub import DatasetCardData

from data import check, hub, shards
from data.command import DataError, nearest, say, shell
from data.door import Command
from data.download import MANIFEST, PREFIX
from data.shards import SPLIT_NAMES

LOSSY = (
    "**Lossy.** The tokenizer does not give back all of the text. Shards, manifest and the logs of every run "
    "on this dataset carry the flag `lossy`. Scores are counted over the raw bytes all the same.\n\n"
)


def files_of(folder: Path, manifest: dict) -> dict[str, Path]:
    """Shards, tokenizer and manifest by their paths in the repo. Raises DataError where a check fails."""
    tokenizer = shards.own_tokenizer(folder, manifest)
    say(f"checking all of {folder}")
    shards.raise_failed(check.verify_folder(folder, shards.Tokenizer(tokenizer), whole=True))
    place = f"{PREFIX}/datasets/{folder.name}"
    names = [file["name"] for file in manifest["files"]]
    found = {f"{place}/{name}": folder / name for name in [*names, "manifest.json"]}
    return found | {f"{PREFIX}/tokenizers/{tokenizer.name}": tokenizer}


def index(folder: Path, manifest: dict) -> dict:
    """The manifest.json of the whole repo, which `download` reads."""
    model = Path(manifest["tokenizer"]["file"])
    dataset = {
        "name": folder.name,
        "tokenizer_name": model.stem,
        "path": f"datasets/{folder.name}",
        "stats": {f"files_{split}": shards.totals(manifest, split)["shards"] for split in SPLIT_NAMES},
    }
    tokenizer = {
        "name": model.stem,
        "vocab_size": manifest["tokenizer"]["vocab_size"],
        "model_path": f"tokenizers/{model.name}",
    }
    return {"datasets": [dataset], "tokenizers": [tokenizer]}


def card(folder: Path, manifest: dict, repo_id: str) -> str:
    """The README.md of the repo."""
    tags = ["bytegolf", "lossy"] if manifest["lossy"] else ["bytegolf"]
    head = DatasetCardData(tags=tags, pretty_name=folder.name, task_categories=["text-generation"])
    count = shards.totals(manifest, "train")["shards"]
    options = ["--repo-id", repo_id, "--variant", folder.name, "--train-shards", count]
    fetching = shell("python", "-m", "data", "download", *options)
    return f"""---
{head.to_yaml()}
---

# {folder.name}

{LOSSY if manifest["lossy"] else ""}Token shards of a text, and the tokenizer that made them. \
`datasets/datasets/{folder.name}/manifest.json` has their sizes, their hashes, and the options that made them.

In a copy of the bytegolf repository this fetches shards and tokenizer and checks every one of them:

```bash
{fetching}
```
"""


@click.command(cls=Command, help=__doc__)
@click.argument("dataset", type=Path)
@click.option("--to", type=hub.repo_id, required=True, metavar="USER/NAME", help="the repo that gets it")
def main(dataset: Path, to: str) -> int:
    folder = dataset.absolute()
    manifest = shards.load_manifest(folder)
    if manifest is None:
        what = "holds no manifest.json, expected a dataset of python -m data prepare"
        raise DataError(f"{folder}: {what}{nearest(folder)}")
    there = hub.look(hub.Repo(to, "dataset", f"--to {to}"))
    sources = files_of(folder, manifest)
    there.refuse_strangers(lambda path: path in sources or path == MANIFEST, f"the dataset {folder.name}")
    with tempfile.TemporaryDirectory() as stage:
        sources[MANIFEST] = Path(stage) / "manifest.json"
        sources[MANIFEST].write_text(json.dumps(index(folder, manifest), indent=1) + "\n")
        sources[hub.CARD] = Path(stage) / hub.CARD
        sources[hub.CARD].write_text(card(folder, manifest, to), encoding="utf-8")
        commit, changed = hub.publish(there, sources, folder.name)
    if changed:
        say(f"{to}@{commit}: {len(changed)} of {len(sources)} files were sent")
    else:
        say(f"nothing to publish: {to}@{commit} holds all {len(sources)} files")
    return 0


if __name__ == "__main__":  # as pages of before 2026-11-26 have it
    from data.__main__ import main as of_all

    sys.exit(of_all(["publish", *sys.argv[1:]]))
