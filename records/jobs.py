"""A record, a track and a machine: all that it takes to run a record's predictor."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from data.command import REPO, DataError
from records.coder import Evaluation
from records.files import read_bytes, read_json
from records.folders import SCRIPT
from records.sandbox import Limits, Mode, Predictor
from records.text import DATA, tokenizer_path
from records.tracks import RECORDS, Track, load_track, schema_errors

CALL_TOKENS = 1 << 22  # of one call, rows times window


@dataclass(frozen=True)
class Job:
    """A record and how to run it."""

    track: Track
    script: Path
    artifact: Path
    evaluation: Evaluation
    tokenizer_path: Path
    mode: Mode
    limits: Limits
    second: Path | None = None  # file with the second text

    @property
    def name(self) -> bytes:
        """Eight bytes that tell records apart."""
        digest = hashlib.sha256()
        for path in (self.script, self.artifact):
            digest.update(hashlib.sha256(read_bytes(path)).digest())
        return digest.digest()[:8]

    def predictor(self, compiling: bool = False, quick: bool = False) -> Predictor:
        """A fresh sandbox. It compiles only if the job may, too."""
        mode = replace(self.mode, compiling=compiling and self.mode.compiling, quick=quick)
        return Predictor(self.script, self.artifact, self.track["imports"], mode, self.limits)


def find_evaluation(record: Path) -> Evaluation:
    """How a record says that it is to be scored. Raises DataError.

    Without a submission.json the windows have size 0, which scoring.with_windows fills in.
    """
    submission = record / "submission.json"
    if not submission.exists():
        return Evaluation(0, 0, 32)
    value = read_json(submission)
    errors = [error for error in schema_errors(value, "submission") if error.startswith("evaluation")]
    if errors or "evaluation" not in value:
        raise DataError(f"{submission}: {(errors or ['evaluation is missing'])[0]}")
    found = Evaluation(**value["evaluation"])
    if found.stride > found.window or found.rows * found.window > CALL_TOKENS:
        # a longer stride would leave tokens out, a larger call would fill the referee's memory
        raise DataError(
            f"{submission}: evaluation is {found}, expected a stride of at most the window, and "
            f"rows * window of at most {CALL_TOKENS}"
        )
    return found


def find_track(record: Path) -> Track:
    """The track in whose folder a record lies, or, for a run, the one with the run's tokenizer."""
    home = record.resolve().parent
    if (home / "track.json").exists():
        return load_track(home)
    config = record / "config.json"
    if config.exists():
        settings = read_json(config).get("settings")
        wanted = Path(str(settings.get("tokenizer_path"))).name if isinstance(settings, dict) else ""
        for path in sorted(RECORDS.glob("*/track.json")):
            track = load_track(path.parent)
            if track.dataset["tokenizer"] == wanted:
                return track
    raise DataError(
        f"{record}: lies in no track's folder, and no track has its tokenizer; "
        "--track records/track_10min_floppy names the track"
    )


def find_script(record: Path) -> Path:
    """The record's script; for a run in logs/ the one of this repository, which wrote it."""
    own = record / SCRIPT
    return REPO / SCRIPT if not own.exists() and (record / "config.json").exists() else own


def find_artifact(record: Path) -> Path:
    found = sorted(record.glob("model*"))
    if not found:
        raise DataError(f"{record}: holds no model_seed<N>.ptz; --artifact names the file")
    return found[0]


def find_job(
    record: Path,
    track: Path | None = None,
    artifact: Path | None = None,
    data: Path = DATA,
    device: str | None = None,
    trust: bool = False,
    compiling: bool = True,
    second: Path | None = None,
    limits: Limits | None = None,
) -> Job:
    """The job of a record's folder. None stands for what the folder or its track says. Raises DataError."""
    if not record.is_dir():
        raise DataError(f"{record}: no such folder")
    rules = load_track(track) if track else find_track(record)
    script = find_script(record)
    artifact = artifact or find_artifact(record)
    for path in (script, artifact):
        read_bytes(path)
    return Job(
        rules,
        script,
        artifact,
        find_evaluation(record),
        tokenizer_path(rules, data, record),
        Mode(device or rules["device"], trust, compiling),
        limits or Limits(seconds=2 * rules["eval_seconds"] + 300),  # probes may score a second time
        second,
    )
