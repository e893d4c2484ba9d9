"""Make a record's folder from the run directories of its seeds.

    python records/freeze.py logs/RUN... --track track_10min_floppy --name NAME --author WHO \\
        --what "what changed" --why "why it helps" [--beats FOLDER] [--claim record|speed|none]

Nothing in it is typed: script, logs and metrics are copied byte for byte, all numbers computed from them.
"""
import argparse
import datetime
import json
import re
import sys
from pathlib import Path

from common import (HERE, REPO, DataError, Track, UsageError, exit_code_of, growing_folder, load_track,
                    read_bytes, read_json, schema_errors, sha256, show)
from submission import Run, parse_run, summary

OF_ONE_RUN = ("seed", "run_id")     # settings in which the runs of one record may differ
CALL_TOKENS = 16384                 # of one call of the referee, where the run's slots are smaller


def load_run(folder: Path) -> tuple[Run, dict]:
    """A finished run's log and metrics, and its settings. Raises DataError."""
    run = parse_run(str(folder), read_bytes(folder / "train.log"), read_bytes(folder / "metrics.jsonl"))
    config = read_json(folder / "config.json")
    if not isinstance(config.get("settings"), dict) or not isinstance(config.get("origins"), dict):
        raise DataError(f"{folder / 'config.json'}: no settings or origins")
    return run, config


def settings_of(config: dict) -> dict:
    """What all runs of a record must share, as environment variables."""
    values = {name.upper(): show(value) for name, value in config["settings"].items()
              if name not in OF_ONE_RUN}
    given = sorted(name.upper() for name, origin in config["origins"].items()
                   if origin == "environment" and name not in OF_ONE_RUN)
    return {"values": values, "given": given}


def evaluation_of(config: dict, window: int | None, stride: int | None, rows: int | None,
                  state: str) -> dict:
    """The windows by which the run scored itself; options override what the settings say."""
    s = config["settings"]
    try:
        width = window or s.get("eval_seq_len") or s["train_seq_len"]
        step = stride or s.get("eval_stride") or width
        rows = rows or max(1, max(CALL_TOKENS, s["val_batch_size"] // s["batch_slots"]) // width)
    except KeyError as error:
        raise UsageError(f"the run has no setting {error}: say --window, --stride and --rows") from None
    return {"window": width, "stride": step, "rows": min(rows, 4096), "state": state}


def refuse_differences(runs: dict[Path, tuple[Run, dict]]) -> None:
    """All runs must be of one script, one text and one set of settings, each of another seed."""
    (first, (run, config)), *rest = runs.items()
    for folder, (other, its) in rest:
        for name in ("script_sha256", "train_sha256", "val_sha256", "tokenizer_sha256"):
            if other.value(name) != run.value(name):
                raise UsageError(f"{folder}: {name} is {other.value(name)}, in {first} {run.value(name)}")
        ours, theirs = (settings_of(c)["values"] for c in (config, its))
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise UsageError(f"{folder}: {name} is {theirs.get(name)}, in {first} {ours.get(name)}; the "
                                 "runs of a record differ in their seed alone")
    seeds = [r.value("seed") for r, _ in runs.values()]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds {seeds}: expected each once")


def refuse_left_out(runs: dict[Path, tuple[Run, dict]]) -> None:
    """A finished run of the same script and settings that lies beside the given ones must be among them."""
    (run, config) = next(iter(runs.values()))
    given = {folder.resolve() for folder in runs}
    for parent in sorted({folder.parent for folder in given}):
        for folder in sorted(parent.iterdir()):
            if folder in given or not (folder / "config.json").exists():
                continue
            try:
                other, its = load_run(folder)
                same = other.value("script_sha256") == run.value("script_sha256")
            except DataError:
                continue        # it did not finish
            if same and settings_of(its)["values"] == settings_of(config)["values"]:
                raise UsageError(f"{folder}: a run of the same script and settings, seed "
                                 f"{other.value('seed')}, is left out; a record has all of its runs")


def refuse_unfit(runs: dict[Path, tuple[Run, dict]], track: Track, tokenizer: int) -> None:
    """Seeds that the track asks for, whole validation, artifacts within the budget."""
    seeds = sorted(run.value("seed") for run, _ in runs.values())
    missing = [seed for seed in track["seeds"] if seed not in seeds]
    if missing:
        raise UsageError(f"seeds {seeds}: {track.name} asks for {track['seeds']}, {missing} are missing")
    for folder, (run, _) in runs.items():
        total = run.value("artifact_bytes") + run.value("code_bytes") + tokenizer
        if total > track["budget_bytes"]:
            raise UsageError(f"{folder}: {total} bytes, {track.name} allows {track['budget_bytes']}")


def find_script(path: Path, wanted: str) -> bytes:
    """The script as it ran. Raises UsageError."""
    script = read_bytes(path)
    if sha256(script) != wanted:
        raise UsageError(
            f"{path}: sha256 {sha256(script)}, the logs say {wanted}: --script names the file as "
            "it ran (git show COMMIT:train_gpt.py; the log's second line has the commit)"
        )
    return script


def readme(submission: dict, track: Track) -> str:
    """The record's README, with a table to fill in."""
    rows = "".join(f"| {s['seed']} | {s['val_loss']:.8f} | {s['val_bpb']:.8f} | {s['total_bytes']:,} | "
                   f"{s['train_seconds']:.1f} | {s['steps']:,} |\n" for s in submission["seeds"])
    given = " ".join(f"{name}={submission['settings']['values'][name]}"
                     for name in submission["settings"]["given"])
    bpb = submission["val_bpb"]
    return f"""# {submission['name']}: {bpb['mean']:.4f} bits per byte

{submission['what_changed']}

Why: {submission['why']}

{track['title']} · {submission['author']} · {submission['date']} · beats {submission['beats'] or 'nothing'}

| seed | val_loss | val_bpb | total bytes | train seconds | steps |
|---|---|---|---|---|---|
{rows}| mean ± std | {submission['val_loss']['mean']:.8f} | {bpb['mean']:.8f} ± {bpb['std']:.8f} | | | |

Run it again, once for each seed: `{given} SEED={submission['seeds'][0]['seed']} python train_gpt.py`

## Ablation

One change taken away at a time, the same seeds. Fill in what you measured; delete what you did not.

| without | val_bpb | difference | seeds |
|---|---|---|---|
| (nothing: the record) | {bpb['mean']:.4f} | 0 | {len(submission['seeds'])} |
|  |  |  |  |
"""


def freeze(args: argparse.Namespace) -> Path:
    """Write the folder; it appears whole or not at all. Raises UsageError, DataError."""
    track = load_track(args.records / args.track)
    runs = {Path(folder): load_run(Path(folder)) for folder in args.runs}
    refuse_differences(runs)
    refuse_left_out(runs)
    tokenizer = read_bytes(args.tokenizer) if args.tokenizer else b""
    refuse_unfit(runs, track, len(tokenizer))
    first_run, config = next(iter(runs.values()))
    script = find_script(args.script, first_run.value("script_sha256"))
    by_seed = {run.value("seed"): run for run, _ in runs.values()}
    submission = {"format": "bytegolf record", "version": 1, "track": track.name, "name": args.name,
                  "author": args.author, "date": args.date, "claim": args.claim, "beats": args.beats,
                  "what_changed": args.what, "why": args.why,
                  "evaluation": evaluation_of(config, args.window, args.stride, args.rows, args.state),
                  "settings": settings_of(config), **summary(by_seed, script, track, len(tokenizer))}
    if errors := schema_errors(submission, "submission"):
        raise UsageError(f"the submission is not what schema.json asks for: {errors[0]}")
    target = track.folder / f"{args.date}_{args.name}"
    with growing_folder(target) as folder:
        (folder / "train_gpt.py").write_bytes(script)
        (folder / "submission.json").write_text(json.dumps(submission, indent=1, ensure_ascii=False) + "\n")
        (folder / "README.md").write_text(readme(submission, track))
        for source, (run, _) in runs.items():
            seed = run.value("seed")
            (folder / f"train_seed{seed}.log").write_bytes(read_bytes(source / "train.log"))
            (folder / f"metrics_seed{seed}.jsonl").write_bytes(read_bytes(source / "metrics.jsonl"))
        add_artifact(folder, runs, track)
        if args.tokenizer:
            (folder / "tokenizer.model").write_bytes(tokenizer)
    return target


def add_artifact(folder: Path, runs: dict[Path, tuple[Run, dict]], track: Track) -> None:
    """The artifact of the first seed, where it is small."""
    source, (run, _) = min(runs.items(), key=lambda item: item[1][0].value("seed"))
    artifact = read_bytes(source / "model.int8.ptz")
    if sha256(artifact) != run.value("artifact_sha256"):
        raise DataError(f"{source / 'model.int8.ptz'}: not the artifact that the log speaks of")
    if len(artifact) < track["artifact_below"]:
        (folder / f"model_seed{run.value('seed')}.int8.ptz").write_bytes(artifact)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, one for each seed")
    parser.add_argument("--track", required=True, help="folder of records/ that holds track.json")
    parser.add_argument("--name", required=True, help="letters, digits and -, as in 'LongerContext'")
    parser.add_argument("--author", required=True)
    parser.add_argument("--what", required=True, help="what changed, in a sentence or two")
    parser.add_argument("--why", required=True, help="why it helps")
    parser.add_argument("--claim", choices=["record", "speed", "none"], default="record")
    parser.add_argument("--beats", metavar="FOLDER", help="record that it beats (default: none was there)")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="(default: today)")
    parser.add_argument("--script", type=Path, default=REPO / "train_gpt.py", help="as it ran")
    parser.add_argument("--tokenizer", type=Path, help="the record's own, where the track allows one")
    parser.add_argument("--records", type=Path, default=HERE, help="folder of the tracks")
    for name in ("window", "stride", "rows"):
        parser.add_argument(f"--{name}", type=int, help="of the evaluation (default: by the settings)")
    parser.add_argument("--state", choices=["none", "adapt"], default="none",
                        help="adapt: the predictor learns from scored tokens")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,59}", args.name):
        raise UsageError(f"--name {args.name!r}: takes letters, digits and -, at most 60")
    return args


def main(argv: list[str] | None = None) -> int:
    target = freeze(parse_args(argv))
    print(f"{target}: fill in the README's ablation, then python records/verify.py {target}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
