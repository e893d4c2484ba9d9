"""The trackers that a run can be followed to, by their public calls. Nothing is read back from them.

A tracker's package is imported when its first rows are sent: whoever uses one needs no other.
Each begins its run, or goes on behind the place that the cursor holds.
"""

import dataclasses
import uuid
from pathlib import Path
from typing import Any

from records.follow.events import Measured


@dataclasses.dataclass
class Cursor:
    """How a tracker knows a run, and how far the run was sent: follow-<tracker>.json in the run's folder."""

    folder: int  # the inode of the run's folder: a copied folder holds the cursor of another run
    project: str
    name: str
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:8])
    place: int = -1  # of the last row that the tracker has
    ended: bool = False  # whether it has the final block


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir logs` shows each run by its name.

    A new file's first event says from which step on the files before it no longer count.
    """

    settles = 0  # seconds after which rows that were sent outlive a kill of this process

    def __init__(self, folder: Path, cursor: Cursor, config: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.writer = SummaryWriter(str(folder), purge_step=cursor.place // 2 + 1)
        _, settings, _ = hparams(config, {})
        self.writer.file_writer.add_summary(settings)

    def send(self, rows: list[Measured]) -> None:
        """Send rows; return when the tracker has taken them."""
        for row in rows:
            for name, value in row.numbers.items():
                self.writer.add_scalar(name, value, row.step)
        self.writer.flush()

    def close(self, final: dict[str, Any] | None) -> None:
        """Send the final block, or None: the run has not ended."""
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


TRACKERS = {"wandb": Wandb, "tensorboard": TensorBoard}
