"""The trackers that a run can be followed to.

What a tracker holds is read back before anything is sent. So a follower that was killed goes on where the
tracker is, and no step is there twice or missing.
"""

import contextlib
import io
import json
import os
import struct
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from data.command import DataError, UsageError
from data.files import read_bytes, read_json, write_whole

NOTHING = -1  # the place before all others


def place(event: dict) -> int:
    """Where a step or a validation stands in the order of its run: a validation is behind its step."""
    return 2 * event["step"] + (event["event"] == "val")


class Tracker(Protocol):
    """One run at a tracker."""

    held: int  # place of the last event that the tracker has
    ended: bool  # whether it has the final block

    def open(self, config: dict[str, Any]) -> None:
        """Begin the tracker's run, or go on with it."""

    def log(self, event: dict, numbers: dict[str, float]) -> None:
        """Send the numbers of a step or of a validation."""

    def flush(self) -> None:
        """Let others see what was sent."""

    def close(self, final: dict[str, Any] | None) -> None:
        """Send the final block, or None: the run has not ended."""


# --- TensorBoard ------------------------------------------------------------------------------------------


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir logs` shows each run by its name."""

    def __init__(self, folder: Path, name: str, project: str):
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event

        self.folder = folder
        self.held = NOTHING
        self.ended = False
        for path in sorted(folder.glob("events.out.tfevents.*")):
            for raw in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(raw)
                tags = {value.tag for value in event.summary.value}
                self.ended |= "final" in tags
                if "train_loss" in tags or "val_loss" in tags:
                    self.held = max(self.held, 2 * event.step + ("val_loss" in tags))

    def open(self, config: dict[str, Any]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(self.folder))
        if self.held == NOTHING:
            known = {name: value for name, value in config.items() if value is not None}
            self.add(0, hparams_pb(known, trial_id=self.folder.name))

    def add(self, step: int, summary) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def add_numbers(self, step: int, numbers: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self.add(step, Summary(value=values))

    def log(self, event: dict, numbers: dict[str, float]) -> None:
        self.add_numbers(event["step"], numbers)

    def flush(self) -> None:
        self.writer.flush()

    def close(self, final: dict[str, Any] | None) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        if final is not None:
            step = final.get("steps", 0)
            numbers = {name: value for name, value in final.items() if isinstance(value, int | float)}
            self.add_numbers(step, {f"final/{name}": value for name, value in numbers.items()})
            rows = "".join(f"| {name} | {value} |\n" for name, value in final.items())
            self.add(step, text_pb("final", f"| name | value |\n|---|---|\n{rows}"))
        self.writer.close()


# --- Weights & Biases -------------------------------------------------------------------------------------

WANDB_BLOCK = 32 << 10  # bytes of LevelDB's log format, in which wandb keeps a run on disk
WANDB_HEAD = struct.Struct("<IHB")  # checksum, length, and whether a record is whole (1) or ends (4) here
WANDB = {  # settings; those whose names begin with x_ are not in every version
    "silent": True,
    "console": "off",
    "disable_git": True,  # the follower's folder, program and machine are not the run's
    "disable_code": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_file_stream_transmit_interval": 2,  # seconds, to the server; wandb's own are 15
    "x_transaction_log_flush_interval": 2,  # seconds, to the file; likewise
}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, up to its end or to where it was cut.

    The format: https://github.com/google/leveldb/blob/main/doc/log_format.md, behind seven bytes of wandb's.
    """
    at = 7
    record = b""
    while at + WANDB_HEAD.size <= len(data):
        left = WANDB_BLOCK - at % WANDB_BLOCK
        if left < WANDB_HEAD.size:
            at += left
            continue
        _, length, kind = WANDB_HEAD.unpack_from(data, at)
        at += WANDB_HEAD.size
        if kind == 0 or at + length > len(data):
            return
        record += data[at : at + length]
        at += length
        if kind in (1, 4):
            yield record
            record = b""


class Wandb:
    """A run at wandb, whose files lie in the run's folder.

    wandb takes rows in ascending order only and would drop a validation that comes after its step was sent.
    So its own count `_step` is the place of a row, and `step` is a column, and the axis of all charts.
    """

    def __init__(self, folder: Path, name: str, project: str):
        from wandb.proto.wandb_internal_pb2 import Record

        self.folder = folder
        self.name = name
        self.project = project
        self.id = uuid.uuid4().hex[:8]
        self.held = NOTHING
        self.ended = False
        for path in sorted(folder.glob("wandb/*run-*/run-*.wandb")):
            records = [Record.FromString(record) for record in wandb_records(read_bytes(path))]
            began = {(record.run.project, record.run.display_name) for record in records}
            if (project, name) in began:  # else of another project, or of the run that this was copied from
                self.id = path.stem.removeprefix("run-")
                rows = (record.history.step.num for record in records if record.HasField("history"))
                self.held = max([self.held, *rows])
                ends = [record for record in records if record.HasField("exit")]
                self.ended |= any(record.exit.exit_code == 0 for record in ends)

    def open(self, config: dict[str, Any]) -> None:
        import wandb

        known = {name: value for name, value in WANDB.items() if name in wandb.Settings.model_fields}
        self.run = wandb.init(
            project=self.project,
            id=self.id,
            name=self.name,
            dir=self.folder,
            config=config,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**known),
        )
        self.held = max(self.held, self.run.step - 1)  # what the server has; 0 - 1 offline
        self.run.define_metric("*", step_metric="step")

    def log(self, event: dict, numbers: dict[str, float]) -> None:
        self.run.log({"step": event["step"], **numbers}, step=place(event), commit=True)

    def flush(self) -> None:
        """wandb sends by itself."""

    def close(self, final: dict[str, Any] | None) -> None:
        self.run.summary.update(final or {})
        self.run.finish(exit_code=0 if final is not None else 1)


# --- trackio ----------------------------------------------------------------------------------------------


class Trackio:
    """A run in trackio's database on this machine. The run's folder keeps the name that it has there.

    It is kept by project and by the run's own name: a copy of the folder, under another name, is another run.
    """

    def __init__(self, folder: Path, name: str, project: str):
        from trackio import utils
        from trackio.sqlite_storage import SQLiteStorage

        if any(utils.resolve_space_id_and_server_url(None, None)) or utils.get_storage_mode() == "jsonl":
            raise UsageError(
                "trackio is set to log to a Space, a server or fragments, expected its local database: unset "
                "TRACKIO_SPACE_ID, TRACKIO_SERVER_URL and TRACKIO_STORAGE_MODE; trackio sync uploads later"
            )
        try:
            SQLiteStorage.validate_project_name(project)
        except ValueError as error:
            raise UsageError(f"--project {project}: {error}") from None
        database = SQLiteStorage.get_project_db_path(project)
        database.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(database if database.exists() else database.parent, os.W_OK):
            raise UsageError(f"{database}: cannot be written; TRACKIO_DIR names another folder for trackio")
        self.note = folder / "trackio.json"
        self.project = project
        names = read_json(self.note) if self.note.exists() else {}
        if not all(isinstance(one, str) for one in names.values()):
            raise DataError(f"{self.note}: expected names of runs; remove it, and the run begins anew there")
        taken = SQLiteStorage.get_runs(project)
        key = f"{project}/{name}"
        self.name = names.get(key) or free_name(name, taken)
        self.names = names | {key: self.name}
        self.held, self.ended = self.stored() if key in names else (NOTHING, False)

    def stored(self) -> tuple[int, bool]:
        """Place of the last event in the database, and whether the final block is there."""
        from trackio.sqlite_storage import SQLiteStorage

        held, ended = NOTHING, False
        for row in SQLiteStorage.get_logs(self.project, self.name):
            ended |= any(name.startswith("final/") for name in row)
            if "train_loss" in row or "val_loss" in row:
                held = max(held, 2 * row["step"] + ("val_loss" in row))
        return held, ended

    def open(self, config: dict[str, Any]) -> None:
        import trackio
        from trackio import context_vars

        write_whole(self.note, json.dumps(self.names).encode())
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = trackio.init(
                project=self.project,
                name=self.name,
                config=config,
                resume="allow",
                auto_log_gpu=False,
                auto_log_cpu=False,
                embed=False,
            )
        context_vars.current_run.set(None)  # which the next init() would end, though both may live

    def log(self, event: dict, numbers: dict[str, float]) -> None:
        self.run.log(dict(numbers), step=event["step"])

    def flush(self) -> None:
        """trackio writes twice a second by itself."""

    def close(self, final: dict[str, Any] | None) -> None:
        if final is not None:
            rows = {f"final/{name}": value for name, value in final.items()}
            self.run.log(rows, step=final.get("steps", 0))
        with contextlib.redirect_stdout(io.StringIO()):
            self.run.finish()
        if final and not self.stored()[1]:  # it warns of what it cannot keep, and goes on
            raise DataError(f"{self.name}: trackio has not kept what was sent; the same command goes on")


def free_name(name: str, taken: list[str]) -> str:
    """The name, with a number behind it where another run of the project has it."""
    number = 1
    found = name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found


TRACKERS = {"wandb": Wandb, "trackio": Trackio, "tensorboard": TensorBoard}
