"""Make a record's folder from the run directories of its seeds.

    python -m records.freeze logs/RUN... --track track_10min_floppy --name NAME --author WHO \\
        --what "what changed" --why "why it helps" [--beats FOLDER] [--claim record|speed|none]

Nothing in it is typed: scripts, logs and metrics are copied byte for byte, all numbers computed from them.
"""

import argparse
import datetime
import json
import re
import sys
from pathlib import Path

from data.command import REPO, DataError, UsageError, open_streams, run, whole
from records.files import growing_folder, read_bytes, read_json, sha256, utf8
from records.folders import SCRIPT, TWIN, code_of, read_scripts, run_artifact
from records.submission import Run, parse_run, summary
from records.tracks import RECORDS, Track, load_track, schema_errors

OF_ONE_RUN = ("seed", "run_id")  # settings in which the runs of one record may differ
CALL_TOKENS = 16384  # of one call of the referee, where the run's slots are smaller
MAX_ROWS = 4096

Runs = dict[Path, tuple[Run, dict]]  # by folder: log and metrics, and what config.json says


# --- runs -------------------------------------------------------------------------------------------------


def load_run(folder: Path) -> tuple[Run, dict]:
    """A finished run's log and metrics, and its settings. Raises DataError."""
    found = parse_run(str(folder), read_bytes(folder / "train.log"), read_bytes(folder / "metrics.jsonl"))
    config = read_json(folder / "config.json")
    if not isinstance(config.get("settings"), dict) or not isinstance(config.get("origins"), dict):
        raise DataError(f"{folder / 'config.json'}: no settings or origins")
    return found, config


def show(value) -> str:
    """A setting as its environment variable would be written."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(int(value) if isinstance(value, bool) else value)


def settings_of(config: dict) -> dict:
    """What all runs of a record must share, as environment variables."""
    shared = {name: value for name, value in config["settings"].items() if name not in OF_ONE_RUN}
    given = sorted(name.upper() for name in shared if config["origins"].get(name) == "environment")
    return {"values": {name.upper(): show(value) for name, value in shared.items()}, "given": given}


def evaluation_of(config: dict, args: argparse.Namespace) -> dict:
    """The windows by which the run scored itself; options override what the settings say."""
    s = config["settings"]
    try:
        width = args.window or s.get("eval_seq_len") or s["train_seq_len"]
        step = args.stride or s.get("eval_stride") or width
        rows = args.rows or max(1, max(CALL_TOKENS, s["val_batch_size"] // s["batch_slots"]) // width)
    except KeyError as error:
        raise UsageError(f"the run has no setting {error}: say --window, --stride and --rows") from None
    return {"window": width, "stride": step, "rows": min(rows, MAX_ROWS), "state": args.state}


def refuse_differences(runs: Runs) -> None:
    """All runs must be of one script, one text and one set of settings, each of another seed."""
    (first, (one, config)), *rest = runs.items()
    values = settings_of(config)["values"]
    for folder, (other, its) in rest:
        for name in ("script_sha256", "train_sha256", "val_sha256", "tokenizer_sha256"):
            if other.value(name) != one.value(name):
                raise UsageError(f"{folder}: {name} is {other.value(name)}, in {first} {one.value(name)}")
        theirs = settings_of(its)["values"]
        for name in sorted(values.keys() | theirs.keys()):
            if values.get(name) != theirs.get(name):
                raise UsageError(
                    f"{folder}: {name} is {theirs.get(name)}, in {first} {values.get(name)}; the runs of a "
                    "record differ in their seed alone"
                )
    seeds = [found.value("seed") for found, _ in runs.values()]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds {seeds}: expected each once")


def refuse_left_out(runs: Runs) -> None:
    """A finished run of the same script and settings that lies beside the given ones must be among them."""
    one, config = next(iter(runs.values()))
    given = {folder.resolve() for folder in runs}
    for parent in sorted({folder.parent for folder in given}):
        for folder in sorted(parent.iterdir()):
            if folder in given or not (folder / "config.json").exists():
                continue
            try:
                other, its = load_run(folder)
                same = other.value("script_sha256") == one.value("script_sha256")
            except DataError:
                continue  # it did not finish
            if same and settings_of(its)["values"] == settings_of(config)["values"]:
                raise UsageError(
                    f"{folder}: a run of the same script and settings, seed {other.value('seed')}, is left "
                    "out; a record has all of its runs"
                )


def refuse_unfit(runs: Runs, track: Track, tokenizer: int) -> None:
    """Seeds that the track asks for, whole validation, artifacts within the budget."""
    seeds = sorted(found.value("seed") for found, _ in runs.values())
    missing = [seed for seed in track["seeds"] if seed not in seeds]
    if missing:
        raise UsageError(f"seeds {seeds}: {track.name} asks for {track['seeds']}, {missing} are missing")
    for folder, (found, _) in runs.items():
        total = found.value("artifact_bytes") + found.value("code_bytes") + tokenizer
        if total > track["budget_bytes"]:
            raise UsageError(f"{folder}: {total} bytes, {track.name} allows {track['budget_bytes']}")


# --- the folder -------------------------------------------------------------------------------------------


def find_scripts(path: Path, wanted: str) -> dict[str, bytes]:
    """The scripts as they ran, by the names that they get. Raises UsageError."""
    scripts = read_scripts(path.parent) if path.name == TWIN else {SCRIPT: read_bytes(path)}
    found = sha256(code_of(scripts))
    if found != wanted:
        raise UsageError(f"{path}: sha256 {found}, the logs say {wanted}: --script names the file as it ran")
    return scripts


def readme(submission: dict, track: Track, script: str) -> str:
    """The record's README, with a table to fill in."""
    rows = "".join(
        f"| {s['seed']} | {s['val_loss']:.8f} | {s['val_bpb']:.8f} | {s['total_bytes']:,} | "
        f"{s['train_seconds']:.1f} | {s['steps']:,} |\n"
        for s in submission["seeds"]
    )
    values = submission["settings"]["values"]
    given = submission["settings"]["given"]
    settings = " ".join(
        [*(f"{name}={values[name]}" for name in given), f"SEED={submission['seeds'][0]['seed']}"]
    )
    bpb = submission["val_bpb"]
    return f"""# {submission["name"]}: {bpb["mean"]:.4f} bits per byte

{submission["what_changed"]}

Why: {submission["why"]}

{track["title"]} · {submission["author"]} · {submission["date"]} · beats {submission["beats"] or "nothing"}

| seed | val_loss | val_bpb | total bytes | train seconds | steps |
|---|---|---|---|---|---|
{rows}| mean ± std | {submission["val_loss"]["mean"]:.8f} | {bpb["mean"]:.8f} ± {bpb["std"]:.8f} | | | |

Run it again, once for each seed: `{settings} python {script}`

## Ablation

One change taken away at a time, the same seeds. Fill in what you measured; delete what you did not.

| without | val_bpb | difference | seeds |
|---|---|---|---|
| (nothing: the record) | {bpb["mean"]:.4f} | 0 | {len(submission["seeds"])} |
|  |  |  |  |
"""


def add_artifact(folder: Path, runs: Runs, track: Track) -> None:
    """The artifact of the first seed, where it is small."""
    source, (first, _) = min(runs.items(), key=lambda item: item[1][0].value("seed"))
    path = run_artifact(source)
    artifact = read_bytes(path)
    if sha256(artifact) != first.value("artifact_sha256"):
        raise DataError(f"{path}: not the artifact that the log speaks of")
    if len(artifact) < track["artifact_below"]:
        (folder / f"model_seed{first.value('seed')}.ptz").write_bytes(artifact)


def make_submission(
    args: argparse.Namespace, runs: Runs, code: bytes, track: Track, tokenizer: bytes
) -> dict:
    """What submission.json holds. Raises UsageError where it is not by its schema."""
    _, config = next(iter(runs.values()))
    by_seed = {found.value("seed"): found for found, _ in runs.values()}
    submission = {
        "format": "bytegolf record",
        "version": 1,
        "track": track.name,
        "name": args.name,
        "author": args.author,
        "date": args.date,
        "claim": args.claim,
        "beats": args.beats,
        "what_changed": args.what,
        "why": args.why,
        "evaluation": evaluation_of(config, args),
        "settings": settings_of(config),
        **summary(by_seed, code, track, len(tokenizer)),
    }
    if errors := schema_errors(submission, "submission"):
        raise UsageError(f"the submission is not what schema.json asks for: {errors[0]}")
    return submission


def freeze(args: argparse.Namespace) -> Path:
    """Write the folder; it appears whole or not at all. Raises UsageError, DataError."""
    track = load_track(args.records / args.track)
    runs = {Path(folder): load_run(Path(folder)) for folder in args.runs}
    refuse_differences(runs)
    refuse_left_out(runs)
    tokenizer = read_bytes(args.tokenizer) if args.tokenizer else b""
    refuse_unfit(runs, track, len(tokenizer))
    first, _ = next(iter(runs.values()))
    scripts = find_scripts(args.script, first.value("script_sha256"))
    submission = make_submission(args, runs, code_of(scripts), track, tokenizer)
    target = track.folder / f"{args.date}_{args.name}"
    with growing_folder(target) as folder:
        for name, script in scripts.items():
            (folder / name).write_bytes(script)
        text = json.dumps(submission, indent=1, ensure_ascii=False)
        (folder / "submission.json").write_text(f"{text}\n", encoding="utf-8")
        (folder / "README.md").write_text(readme(submission, track, list(scripts)[-1]), encoding="utf-8")
        for source, (found, _) in runs.items():
            seed = found.value("seed")
            (folder / f"train_seed{seed}.log").write_bytes(read_bytes(source / "train.log"))
            (folder / f"metrics_seed{seed}.jsonl").write_bytes(read_bytes(source / "metrics.jsonl"))
        add_artifact(folder, runs, track)
        if args.tokenizer:
            (folder / "tokenizer.model").write_bytes(tokenizer)
    return target


# --- command line -----------------------------------------------------------------------------------------


def record_name(text: str) -> str:
    """The type of --name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,59}", text):
        raise argparse.ArgumentTypeError(f"{text!r} given, expected letters, digits and -, at most 60")
    return text


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m records.freeze", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run directories, one for each seed")
    add("--track", required=True, help="folder of records/ that holds track.json")
    add("--name", required=True, type=record_name, help="letters, digits and -, as in 'LongerContext'")
    add("--author", type=utf8, required=True)
    add("--what", type=utf8, required=True, help="what changed, in a sentence or two")
    add("--why", type=utf8, required=True, help="why it helps")
    add("--claim", choices=["record", "speed", "none"], default="record")
    add("--beats", metavar="FOLDER", help="record that it beats (default: none was there)")
    add("--date", default=datetime.date.today().isoformat(), help="(default: today)")
    add("--script", type=Path, default=REPO / SCRIPT, help=f"as it ran; {TWIN}: both scripts are copied")
    add("--tokenizer", type=Path, help="the record's own, where the track allows one")
    add("--records", type=Path, default=RECORDS, help="folder of the tracks")
    for name in ("window", "stride", "rows"):
        add(f"--{name}", type=whole(1), help="of the evaluation (default: by the settings)")
    add("--state", choices=["none", "adapt"], default="none", help="adapt: it learns from scored tokens")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    target = freeze(args)
    print(f"{target}: fill in the README's ablation, then python -m records.verify {target}")
    return 0


def main(argv: list[str] | None = None) -> int:
    open_streams()
    args = parse_args(argv)
    return run(lambda: work(args), "freeze again")


if __name__ == "__main__":
    sys.exit(main())
