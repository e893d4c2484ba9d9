"""The trackers that a run can be followed to, by their public calls. Nothing is read back from them.

A tracker's package is imported when its first rows are sent: whoever uses one needs no other.
"""

import contextlib
import contextvars
import functools
import io
import os
import warnings
from pathlib import Path
from typing import Any, Protocol

from data.command import DataError, UsageError
from records.follow.cursor import Cursor
from records.follow.events import Measured


class Tracker(Protocol):
    """One run at a tracker. It begins there, or goes on behind the place that the cursor holds."""

    settles: float  # seconds after which rows that were sent outlive a kill of this process

    def __init__(self, folder: Path, cursor: Cursor, config: dict[str, Any]): ...

    def send(self, rows: list[Measured]) -> None:
        """Send them; return when the tracker has taken them."""

    def close(self, final: dict[str, Any] | None) -> None:
        """Send the final block, or None: the run has not ended."""


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir logs` shows each run by its name.

    A new file's first event says from which step on the files before it no longer count.
    """

    settles = 0

    def __init__(self, folder: Path, cursor: Cursor, config: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.writer = SummaryWriter(str(folder), purge_step=cursor.place // 2 + 1)
        _, settings, _ = hparams(config, {})
        self.writer.file_writer.add_summary(settings)

    def send(self, rows: list[Measured]) -> None:
        for row in rows:
            for name, value in row.numbers.items():
                self.writer.add_scalar(name, value, row.step)
        self.writer.flush()

    def close(self, final: dict[str, Any] | None) -> None:
        for name, value in (final or {}).items():
            if not isinstance(value, str):
                self.writer.add_scalar(f"final/{name}", value, final["steps"])
        if final is not None:
            rows = "".join(f"| {name} | {value} |\n" for name, value in final.items())
            self.writer.add_text("final", f"| name | value |\n|---|---|\n{rows}", final["steps"])
        self.writer.close()


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


class Wandb:
    """A run at wandb, whose files lie in the run's folder.

    wandb takes rows in ascending order only and would drop a validation that comes after its step was sent.
    So its own count `_step` is the place of a row, and `step` is a column, and the axis of all charts. A row
    that its server has already is dropped there.
    """

    settles = 4  # its process, which dies with ours, writes every two seconds

    def __init__(self, folder: Path, cursor: Cursor, config: dict[str, Any]):
        import wandb

        known = {name: value for name, value in WANDB.items() if name in wandb.Settings.model_fields}
        self.run = wandb.init(
            project=cursor.project,
            id=cursor.id,
            name=cursor.name,
            dir=folder,
            config=config,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**known),
        )
        self.run.define_metric("*", step_metric="step")

    def send(self, rows: list[Measured]) -> None:
        for row in rows:
            self.run.log({"step": row.step, **row.numbers}, step=row.place, commit=True)
        self.run.status()  # is answered after all that was sent before

    def close(self, final: dict[str, Any] | None) -> None:
        self.run.summary.update(final or {})
        self.run.finish(exit_code=0 if final is not None else 1)


class Trackio:
    """A run in trackio's database on this machine.

    trackio has no flush but the end of a run, so a run is begun and ended with each batch: 0.05 s. It knows
    a run by its name, so the name there has the cursor's id behind it.
    """

    settles = 0

    def __init__(self, folder: Path, cursor: Cursor, config: dict[str, Any]):
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if os.environ.get(name):
                raise UsageError(
                    f"unset {name}: runs go to trackio's local database; trackio sync uploads it"
                )
        self.cursor = cursor
        self.config = config

    def log(self, rows: list[tuple[int, dict[str, Any]]]) -> None:
        """Write numbers by step. Raises DataError where trackio warns: it drops what it cannot write."""
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("always", UserWarning)
            run = self.begin()
            for step, numbers in rows:
                run.log(numbers, step=step)
            run.finish()
        for each in caught:
            text = str(each.message)
            if (
                each.category is UserWarning and "Reserved keys" not in text
            ):  # those it stores by another name
                raise DataError(f"trackio: {text:.300}")

    def begin(self) -> Any:
        import trackio

        words = {"project": self.cursor.project, "name": f"{self.cursor.name}-{self.cursor.id}"}
        words |= {"config": self.config, "resume": "allow", "embed": False}
        init = functools.partial(trackio.init, **words, auto_log_gpu=False, auto_log_cpu=False)
        try:
            return contextvars.copy_context().run(init)  # else init() would end the run begun before it
        except ValueError as error:
            raise UsageError(f"--project {self.cursor.project}: {error}") from None

    def send(self, rows: list[Measured]) -> None:
        self.log([(row.step, row.numbers) for row in rows])

    def close(self, final: dict[str, Any] | None) -> None:
        if final is not None:
            self.log([(final["steps"], {f"final/{name}": value for name, value in final.items()})])


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "trackio": Trackio, "tensorboard": TensorBoard}
