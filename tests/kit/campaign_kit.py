"""What the tests of campaigns share: a tiny track with a campaign, and a stand-in for train_gpt.py."""

import difflib
import json
import subprocess
import time
from pathlib import Path

import pytest

from records.campaign import variants
from tests.kit import record_kit
from tests.kit.data_kit import call, start

# Ten steps in a folder as the real script makes it; its score is WIDTH + SEED / 1000.
STAND_IN = """
import json, os, pathlib, signal, sys, time
import numpy as np


class Settings:
    width: float = 0
    pace: float = 0
    others = "preset max_flops val_tokens_limit wait_for fail"


class Predictor:
    rows, vocab_size = 16, 400

    def start(self, rows):
        return np.zeros((rows, 400), np.float32)

    def step(self, ids):
        return self.start(len(ids))


def load_predictor(artifact, device):
    return Predictor()


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(16))
    env = os.environ
    folder = pathlib.Path("logs", env["RUN_ID"])
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    with open(folder / "attempts", "a") as file:
        file.write(" ".join(sorted(env)) + "\\n")
    for step in range(len(metrics.read_text().splitlines()) if metrics.exists() else 0, 10):
        time.sleep(float(env.get("PACE", 0)))
        while step == 5 and "WAIT_FOR" in env and not os.path.exists(env["WAIT_FOR"]):
            time.sleep(0.05)
        with open(metrics, "a") as file:
            file.write(json.dumps({"event": "step", "step": step}) + "\\n")
    if env.get("FAIL") == env["SEED"]:
        print("no finite numbers")
        return 17
    (folder / "model.ptz").write_bytes(b"model")
    bpb = float(env["WIDTH"]) + int(env["SEED"]) / 1000
    final = {"val_bpb": f"{bpb:.8f}", "artifact_bytes": 5, "steps": 10, "budget": "ok"}
    final["train_flops"] = int(env["MAX_FLOPS"])
    with open(metrics, "a") as file:
        file.write(json.dumps({"event": "final", **final}) + "\\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
"""
NARROW = "settings = {WIDTH = 1}"


def idea(gains: list[float]) -> str:
    """The stand-in as somebody changed it: its score falls by gains[seed]."""
    return STAND_IN.replace('float(env["WIDTH"])', f'1 - {gains}[int(env["SEED"]) - 1337]')


def committed(folder: Path, script: str) -> str:
    """The commit of a repository in which train_gpt.py is this script."""
    folder.mkdir(exist_ok=True)
    (folder / "train_gpt.py").write_text(script)
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@here"]
    commit = ["commit", "-q", "--allow-empty", "-m", "base"]
    for words in (["init", "-q"], ["add", "train_gpt.py"], commit):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], cwd=folder, text=True).strip()


class Place:
    """A folder with a tiny track, its data, a script, and a campaign's file."""

    def __init__(self, root: Path):
        self.root = root
        self.file = root / "tiny.toml"
        self.script = root / "stand_in.py"
        self.script.write_text(STAND_IN)
        self.patch = root / "more.patch"
        worse = STAND_IN.replace("{bpb:.8f}", "{bpb + 1:.8f}").splitlines(True)
        names = "a/train_gpt.py", "b/train_gpt.py"
        self.patch.write_text("".join(difflib.unified_diff(STAND_IN.splitlines(True), worse, *names)))
        self.more = f'{NARROW}\npatches = ["{self.patch}"]'  # a variant whose scores are higher by one
        self.corpus = record_kit.make_data(root / "data")
        record_kit.make_track(root / "records/track_tiny", self.corpus)
        self.manifest("tiny_sp400", val_sha256="ab" * 32)
        self.write(narrow=NARROW, wide="settings = {WIDTH = 2.5}")

    @property
    def home(self) -> Path:
        return self.root / "campaigns/tiny"

    def manifest(self, name: str, val_sha256: str) -> None:
        """Say what a dataset holds; only its validation text has to differ."""
        folder = self.root / "data/datasets" / name
        tokenizer = {"file": "../../tokenizers/tiny.model", "sha256": "cd" * 32}
        facts = {"format": "bytegolf dataset", "corpus_sha256": "", "lossy": False, "files": []}
        folder.mkdir(exist_ok=True)
        facts |= {"tokenizer": tokenizer, "val_sha256": val_sha256}
        (folder / "manifest.json").write_text(json.dumps(facts))

    def write(self, head: str = "", base: str = "narrow", seeds=(1, 2), **texts: str) -> None:
        lines = ['track = "track_tiny"', 'dataset = "tiny_sp400"', f'base = "{base}"', f"seeds = {[*seeds]}"]
        lines += [head, *(f"[arms.{name}]\n{text}" for name, text in texts.items())]
        self.file.write_text("\n".join(lines))

    @property
    def places(self) -> list:
        folders = {"data": "data", "records": "records", "logs": "campaigns"}
        return [word for name, folder in folders.items() for word in (f"--{name}", self.root / folder)]

    @property
    def options(self) -> list:
        return [self.file, "--script", self.script, *self.places]

    def run(self, *more: object, code: int = 0) -> str:
        return call("records", "sweep", *self.options, *more, code=code)

    def start(self, *more: object, **options) -> subprocess.Popen:
        return start("records", "sweep", *self.options, *more, **options)

    def try_idea(self, script: str, *more: object, code: int = 0) -> str:
        """Try a script beside HEAD's, in a repository of its own."""
        repository = self.root / "repository"
        committed(repository, idea([0] * 9))
        (repository / "train_gpt.py").write_text(script)
        words = ["--script", repository / "train_gpt.py", "--track", "track_tiny", "--dataset", "tiny_sp400"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(variants, "REPO", repository)
            return call("records", "sweep", "--try", *words, *self.places, *more, code=code)

    def attempts(self, arm: str, seed: int, budget: str = "1") -> list[str]:
        return (self.home / budget / arm / f"logs/{seed}/attempts").read_text().splitlines()


def rows_of(said: str) -> list[list[str]]:
    """The cells of all tables."""
    lines = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("|")]
    return [[cell.strip("` ") for cell in line] for line in lines if line[0].strip("- ")]


def wait_until(condition) -> None:
    end = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
