"""A record's page on the Hugging Face hub: the card, and the fields by which the hub shows scores."""

from huggingface_hub import EvalResult, ModelCardData

from records.archive.verdicts import PASSED
from records.board.entries import Entry
from records.board.tables import cell, limits


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


def verdict_words(entry: Entry) -> str:
    """A record that did not pass says so before anything else."""
    if entry.state in PASSED:
        return f"The referee's verdict: {cell(entry.words)}."
    return f"**This record did not pass.** The scores are its own claims. Verdict: {cell(entry.words)}."


def card(entry: Entry, repo_id: str, license_id: str) -> str:
    """The whole README.md of the repo."""
    record = entry.record
    author, what, why = (cell(record.field(key)) for key in ("author", "what_changed", "why"))
    return f"""---
{metadata(entry, license_id)}
---

# {cell(entry.name)}: {entry.interval} bits per byte

{verdict_words(entry)}

| | |
|---|---|
| score | {entry.interval} bits per byte: the mean of {len(entry.scores)} seeds, 95 % confidence interval |
| size | {record.total_bytes:,} bytes of code, settings and artifact, of {record.track["budget_bytes"]:,} |
| track | {cell(record.track["title"])} (`{record.track.name}`): {limits(record.track)} |
| dataset | `{record.track.dataset["name"]}` |
| by | {author} |
| licence | {cell(license_id)} |

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
