"""The variants of a campaign: one script, one dataset and some settings for all seeds."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import jsonschema

from data import command, shards
from data.command import REPO, DataError, UsageError, nearest
from data.files import growing_folder, read_bytes, read_json, sha256
from records.archive.runs import SCRIPT
from records.archive.tracks import Track
from records.referee.text import load_tokenizer

ABOUT = "arm.json"  # in a variant's folder: what its runs depend on, beside the script
# What runs see of our environment: settings of the shell must not change them.
KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
OURS = {"SEED", "RUN_ID", "MAX_FLOPS", "DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE", "DRY_RUN", "EVAL_ONLY"}
OURS |= {"VAL_TOKENS_LIMIT"}  # 0: scores of a part of the text are no scores

# --- the file ---------------------------------------------------------------------------------------------


def closed(*required: str, **properties: dict) -> dict:
    """The schema of an object with these properties and no others."""
    kind = {"type": "object", "additionalProperties": False}
    return kind | {"properties": properties, "required": required}


def table_of(values: dict, **more: dict) -> dict:
    """The schema of an object whose values have a schema."""
    return {"type": "object", "additionalProperties": values, **more}


NAME = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_-]{0,59}$"}
COUNT = {"type": "integer", "minimum": 1}
# value * budget^power, as a whole multiple
RULE = closed("value", "power", "multiple", value=COUNT, power={"type": "number"}, multiple=COUNT)
SHARED = {
    "settings": table_of({"type": ["string", "number", "boolean"]}),
    "scale": table_of(RULE),
    "patches": {"type": "array", "items": {"type": "string"}},
}
SCHEMA = closed(
    "track",
    "dataset",
    "base",
    "seeds",
    "arms",
    track=NAME,
    dataset=NAME,
    base=NAME,
    commit={"type": "string", "pattern": "^[0-9a-f]{7,40}$"},
    seeds={"type": "array", "items": {"type": "integer"}, "minItems": 1, "uniqueItems": True},
    arms=table_of(closed(dataset=NAME, **SHARED), propertyNames=NAME),
    **SHARED,
)


def read_campaign(path: Path) -> dict:
    """What a campaign's file holds. Raises UsageError."""
    try:
        value = tomllib.loads(read_bytes(path).decode())
    except ValueError as error:
        raise UsageError(f"{path}: is no TOML: {error}") from None
    for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(value):
        place = "".join(f"{part}: " for part in error.absolute_path)
        raise UsageError(f"{path}: {place}{error.message}")
    if value["base"] not in value["arms"]:
        raise UsageError(f"{path}: base is {value['base']!r}, expected one of {', '.join(value['arms'])}")
    for table in (value, *value["arms"].values()):
        for name in sorted(OURS & (table.get("settings", {}) | table.get("scale", {})).keys()):
            raise UsageError(f"{path}: settings hold {name}, which the campaign sets for every run")
    return value


# --- the dataset ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """What runs train on, and the text that they are scored on."""

    folder: Path
    manifest: dict

    @property
    def tokenizer(self) -> Path:
        return (self.folder / self.manifest["tokenizer"]["file"]).resolve()

    @property
    def settings(self) -> dict[str, str]:
        """Raises DataError."""
        paths = {"DATA_PATH": str(self.folder.resolve()), "TOKENIZER_PATH": str(self.tokenizer)}
        return paths | {"VOCAB_SIZE": str(load_tokenizer(self.tokenizer).vocab_size())}

    @property
    def digests(self) -> list[str]:
        """Of tokenizer and shards."""
        return [self.manifest["tokenizer"]["sha256"], *(file["sha256"] for file in self.manifest["files"])]


def load_dataset(folder: Path, track: Track) -> Dataset:
    """The dataset in a folder. Raises DataError, also for a track's validation text."""
    manifest = shards.load_manifest(folder)
    mend = "python -m data prepare development makes development_sp1024"
    if manifest is None:
        what = "holds no manifest.json, expected a dataset of python -m data prepare"
        raise DataError(f"{folder}: {what}{nearest(folder) or f'; {mend}'}")
    if manifest["val_sha256"] == track["dataset"]["val_sha256"]:
        raise DataError(f"{folder}: holds the validation text of {track.name}, expected another one; {mend}")
    return Dataset(folder, manifest)


# --- scripts ----------------------------------------------------------------------------------------------


def git(what: str, wrong: str, *words: str, **options) -> bytes:
    """What git prints. Raises UsageError of `what`, which is `wrong` where git refuses."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, **options)
    except FileNotFoundError:
        raise UsageError(f"{what}: there is no git here, which reads commits and applies patches") from None
    if done.returncode:
        why = done.stderr.decode().splitlines()[0].removeprefix("fatal: ").removeprefix("error: ")
        raise UsageError(f"{what}: {wrong}: {why}")
    return done.stdout


def script_of(commit: str) -> bytes:
    """train_gpt.py of a commit. Raises UsageError."""
    wrong = f"git shows no {SCRIPT} of it in {REPO}"
    return git(f"commit {commit}", wrong, "show", f"{commit}:{SCRIPT}", cwd=REPO)


def patches_of(value: dict, variant: dict) -> list[Path]:
    """The patches of all variants, then the variant's own."""
    return [REPO / path for path in value.get("patches", []) + variant.get("patches", [])]


def patched(base: bytes, patches: list[Path]) -> bytes:
    """A script with all patches, in order. Raises UsageError for one that does not apply."""
    wrong = "does not apply to the script and the patches before it"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, SCRIPT)
        script.write_bytes(base)
        # found within a repository, git would take the paths from its top
        env = os.environ | {"GIT_CEILING_DIRECTORIES": str(script.parent.parent)}
        for patch in patches:
            git(str(patch), wrong, "apply", "-", input=read_bytes(patch), cwd=folder, env=env)
        return script.read_bytes()


# --- variants ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Variant:
    """What is compared with others. Its folder holds its script, ABOUT, and the runs in logs/."""

    folder: Path
    settings: dict[str, str]  # environment variables, but for those of the dataset and the seed
    patches: list[Path]
    dataset: Dataset

    @property
    def name(self) -> str:
        return self.folder.name

    def environment(self) -> dict[str, str]:
        """What its runs see, but for the seed. Raises DataError."""
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        return kept | self.settings | self.dataset.settings

    def about(self) -> dict:
        """What runs depend on now, beside the script."""
        patches = [sha256(read_bytes(path)) for path in self.patches]
        return {"settings": self.settings, "patches": patches, "dataset": self.dataset.digests}

    def check_same(self, script: bytes | None = None) -> None:
        """Raises DataError where the runs in its folder depended on something else, or on another script."""
        stored = read_json(self.folder / ABOUT)
        changed = [key for key, value in self.about().items() if stored.get(key) != value]
        if script is not None and script != read_bytes(self.folder / SCRIPT):
            changed.append("script")
        if changed:
            mend = command.shell("rm", "-r", self.folder)
            raise DataError(f"{self.folder}: made with other {' and '.join(changed)}; {mend} to run it anew")

    def make_folder(self, base: bytes) -> None:
        """Write the patched script, or check that earlier runs had it. Raises UsageError, DataError."""
        script = patched(base, self.patches)
        for name in self.settings:
            if not re.search(rf"\b{name.lower()}\b".encode(), script):
                raise UsageError(f"variant {self.name}: {name} is no setting of its script")
        if self.folder.exists():
            self.check_same(script)
            return
        with growing_folder(self.folder) as folder:
            (folder / SCRIPT).write_bytes(script)
            if b"dry_run" in script:  # one without would train
                self.rehearse(folder)
            (folder / ABOUT).write_text(json.dumps(self.about(), indent=1) + "\n")

    def rehearse(self, folder: Path) -> None:
        """Have the script itself look at the settings before any run. Raises UsageError, DataError."""
        env = self.environment() | {"DRY_RUN": "1"}
        done = subprocess.run([sys.executable, SCRIPT], cwd=folder, env=env, capture_output=True)
        if done.returncode:
            *before, last = done.stderr.decode(errors="replace").splitlines(True) or ["said nothing"]
            sys.stderr.writelines(before)
            kind = UsageError if done.returncode == UsageError.exit_code else DataError
            raise kind(f"variant {self.name}, before any run: {last.rstrip()}")


def setting_text(value: str | float | bool) -> str:
    """A value as the text of an environment variable."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def scaled(rule: dict, budget: float) -> int:
    """A setting at a share of the operations: the multiple next to value * budget^power, one at least."""
    multiple = rule["multiple"]
    return multiple * max(1, round(rule["value"] * budget ** rule["power"] / multiple))


@dataclass(frozen=True)
class Campaign:
    """What a file compares, and where its runs lie."""

    value: dict
    track: Track
    home: Path
    data: Path  # with datasets/

    def variants(self, budget: float) -> list[Variant]:
        """At a share of the track's operations. Raises DataError."""
        shared = {"PRESET": "floppy", **self.value.get("settings", {})}
        made: list[Variant] = []
        for name, variant in self.value["arms"].items():
            rules = self.value.get("scale", {}) | variant.get("scale", {})
            settings = {**shared, **variant.get("settings", {}), "VAL_TOKENS_LIMIT": 0}
            settings |= {key: scaled(rule, budget) for key, rule in rules.items()}
            settings["MAX_FLOPS"] = round(budget * self.track["train_flops"])
            texts = {key: setting_text(each) for key, each in settings.items()}
            folder = self.data / "datasets" / variant.get("dataset", self.value["dataset"])
            dataset = load_dataset(folder, self.track)
            if made and dataset.manifest["val_sha256"] != made[0].dataset.manifest["val_sha256"]:
                raise DataError(f"{folder}: its validation text is not that of {made[0].dataset.folder}")
            patches = patches_of(self.value, variant)
            made.append(Variant(self.home / f"{budget:g}" / name, texts, patches, dataset))
        return made

    def begun(self) -> dict[float, list[Variant]]:
        """The variants at all budgets that were begun, the smallest first. Raises DataError."""
        budgets = []
        for path in self.home.glob("[0-9]*"):
            with contextlib.suppress(ValueError):
                budgets.append(float(path.name))
        return {budget: self.variants(budget) for budget in sorted(budgets)}
