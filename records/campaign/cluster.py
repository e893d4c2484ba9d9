"""Runs of a campaign as tasks of a Ray cluster. Imported with --ray alone.

A task makes a folder of its own on its node, with the script and the last checkpoint, and starts the run
there. The desk is an actor on the machine of the command: it lends files to the nodes, and keeps checkpoints
and results on that machine's disk. So any node may go, and where the head or the command itself went, the
same command goes on.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from data.command import DataError, say
from data.files import read_bytes, read_json, scratch_folder, sha256, write_beside
from records.archive.runs import SCRIPT, cpuinfo
from records.campaign.arms import Arm, Dataset
from records.campaign.runs import ArmRun, Endings, Share, end_with_parent
from records.cluster.nodes import Lender, actor_here, connect, fetched, ray, value_of

METRICS = "metrics.jsonl"
LOST_NODES = 20  # so many may go during one run before it counts as failed
PATIENCE = 40  # seconds for runs that are stopped to write checkpoints
ATTEMPTS = 3  # to stop them


@dataclass(frozen=True)
class ArmKit:
    """What a node needs for an arm's runs, beside the desk. Sent to each node once."""

    arm: Arm
    script: bytes
    alike: dict[str, str]  # what must be the same on all nodes
    share: Share
    every: float  # seconds between two checkpoints that come back


@dataclass(frozen=True)
class Ending:
    """What came of a task: an exit code, or why its node was refused."""

    node: str  # Ray's id
    code: int
    refused: str = ""


def facts_of(script: bytes) -> dict[str, str]:
    """What results depend on, beside settings, seed and processor."""
    return {"torch": metadata.version("torch"), "a script of sha256": sha256(script)}


# --- on the machine of the command ------------------------------------------------------------------------


class Desk(Lender):
    """Lends files to the nodes, and keeps what comes back. An actor on the command's machine."""

    def begin(self, run: ArmRun, place: dict) -> dict[str, bytes]:
        """Note where a run is now; what an earlier attempt left in its folder."""
        with open(run.places, "a") as file:
            file.write(json.dumps(place) + "\n")
        return resumable(run)

    def keep(self, run: ArmRun, files: dict[str, bytes], output: bytes) -> None:
        """Write what came back. A checkpoint wants the metrics before it; a final event ends the run."""
        write_beside(run.output, output)
        ended = run_ended(files)
        for name in sorted(files, key=lambda name: (name == METRICS) == ended):
            path = run.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_beside(path, files[name])
        if ended:
            shutil.rmtree(run.folder / "checkpoint", ignore_errors=True)
            return
        for old in sorted(run.folder.glob("checkpoint/*.ckpt"))[:-2]:
            old.unlink()


# --- on a node --------------------------------------------------------------------------------------------


def run_ended(files: dict[str, bytes]) -> bool:
    return b'{"event": "final"' in files.get(METRICS, b"")


def newest_checkpoint(run: ArmRun) -> dict[str, bytes]:
    """Its name in the run's folder, and its bytes; empty if there is none."""
    for path in sorted(run.folder.glob("checkpoint/*.ckpt"), reverse=True):
        with contextlib.suppress(FileNotFoundError):  # the run keeps two, and wrote two more meanwhile
            return {str(path.relative_to(run.folder)): path.read_bytes()}
    return {}


def resumable(run: ArmRun) -> dict[str, bytes]:
    """What the run needs to go on: its newest checkpoint, then its metrics, which may hold more than that."""
    files = newest_checkpoint(run)
    with contextlib.suppress(FileNotFoundError):
        files[METRICS] = (run.folder / METRICS).read_bytes()
    return files


def results(run: ArmRun) -> dict[str, bytes]:
    """All files of a run that has ended, without checkpoints; of another one what it needs to go on."""
    files = resumable(run)
    if not run_ended(files):
        return files
    return {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()}


def unlike(kit: ArmKit) -> str:
    """Why this node would give other results; '' if it would not."""
    found = facts_of(kit.script)
    return "; ".join(
        f"{name} {found[name]}, expected {it}" for name, it in kit.alike.items() if found[name] != it
    )


def dataset_here(dataset: Dataset, desk) -> Dataset:
    """The dataset on this node: where the command has it, if that is here too, else fetched once.

    Raises DataError.
    """
    manifest = dataset.folder / "manifest.json"
    if manifest.exists() and read_json(manifest) == dataset.manifest:
        return dataset
    tokenizer = {"file": "tokenizer.model", "sha256": dataset.manifest["tokenizer"]["sha256"]}
    paths = {"tokenizer.model": dataset.tokenizer}
    paths |= {file["name"]: dataset.folder / file["name"] for file in dataset.manifest["files"]}
    wanted = {name: (paths[name], digest) for name, digest in zip(paths, dataset.digests, strict=True)}
    return Dataset(fetched(wanted, desk), dataset.manifest | {"tokenizer": tokenizer})


def watch(process: subprocess.Popen, here: ArmRun, every: float, send: Callable[[dict], Any]) -> int:
    """Until the process has ended: its exit code. Its files are sent every so many seconds, and at its end.

    A task that is cancelled gets a KeyboardInterrupt: the process then writes a checkpoint.
    """
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(every)
            send(resumable(here))
    finally:
        process.terminate()
        process.wait()
        value_of(send(results(here)))


def carry_out(kit: ArmKit, seed: int, desk) -> Ending:
    """The task itself. Raises DataError."""
    run = ArmRun(kit.arm, seed)
    node = ray.get_runtime_context().get_node_id()
    if why := unlike(kit):
        return Ending(node, 0, f"node {node} ({socket.gethostname()}) has {why}")
    processor = cpuinfo("model name") or os.uname().machine  # results are equal to the bit on one kind alone
    place = {"node": node, "host": socket.gethostname(), "processor": processor}
    with scratch_folder() as folder:
        (folder / SCRIPT).write_bytes(kit.script)
        dataset = dataset_here(kit.arm.dataset, desk)
        here = ArmRun(replace(kit.arm, folder=folder, dataset=dataset), seed)
        for name, blob in value_of(desk.begin.remote(run, place)).items():
            (here.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (here.folder / name).write_bytes(blob)
        process = here.start(kit.share, preexec_fn=end_with_parent)

        def send(files: dict[str, bytes]) -> ray.ObjectRef:
            return desk.keep.remote(run, files, here.output.read_bytes())

        return Ending(node, watch(process, here, kit.every, send))


# --- the command's part -----------------------------------------------------------------------------------


class Cluster:
    """The runs of a campaign as tasks."""

    def __init__(self, runs: list[ArmRun], share: Share, every: float):
        self.share = share
        self.kits = {arm: ray.put(kit_of(arm, share, every)) for arm in {run.arm for run in runs}}
        self.refused: set[str] = set()  # Ray's ids of nodes
        self.working: dict[ray.ObjectRef, ArmRun] = {}
        self.desk = actor_here(Desk)
        needs = {"num_cpus": share.threads, "num_gpus": share.gpus, "max_retries": LOST_NODES}
        self.task = ray.remote(**needs)(carry_out)
        for run in runs:
            self.submit(run)

    def submit(self, run: ArmRun) -> None:
        others = {"ray.io/node-id": f"!in({','.join(self.refused)})"} if self.refused else None
        task = self.task.options(label_selector=others)
        self.working[task.remote(self.kits[run.arm], run.seed, self.desk)] = run

    def ended(self) -> Endings:
        """The runs as they end; those whose node was refused go on elsewhere. Raises DataError."""
        while self.working:
            (task,), _ = ray.wait([*self.working])
            run = self.working.pop(task)
            try:
                ending = ray.get(task)
            except ray.exceptions.RayError as error:
                run.output.write_text(str(error))
                yield run, 1
                continue
            if ending.refused:
                self.refuse(ending)
                self.submit(run)
            else:
                yield run, ending.code

    def refuse(self, ending: Ending) -> None:
        """Say it of a node, once. Raises DataError where no other node is left."""
        if ending.node not in self.refused:
            self.refused.add(ending.node)
            say(f"refused: {ending.refused}")
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"] and self.fits(node["Resources"])}
        if alive <= self.refused:
            raise DataError(f"{ending.refused}; no other node is left that could take a run")

    def fits(self, resources: dict[str, float]) -> bool:
        return resources.get("CPU", 0) >= self.share.threads and resources.get("GPU", 0) >= self.share.gpus

    def stop(self) -> None:
        """Cancel what is at work, and wait until it has sent its checkpoints.

        The last first: a run that waits would begin in the place of one that was cancelled. Those that are
        still at work are told again, since an interrupt in the midst of Ray's own code is lost.
        """
        working = [*reversed(self.working)]
        for _ in range(ATTEMPTS):
            for task in working:
                ray.cancel(task, recursive=False)
            _, working = ray.wait(working, num_returns=len(working), timeout=PATIENCE)
            if not working:
                return


def kit_of(arm: Arm, share: Share, every: float) -> ArmKit:
    script = read_bytes(arm.folder / SCRIPT)
    return ArmKit(arm, script, facts_of(script), share, every)


def run_there(runs: list[ArmRun], address: str, share: Share, every: float) -> Endings:
    """All at once, as far as nodes have room. Closed before its end, it stops those that are at work.

    Raises UsageError, DataError.
    """
    if not runs:
        return
    connect(address)
    cluster = Cluster(runs, share, every)
    try:
        yield from cluster.ended()
    finally:
        if cluster.working:
            cluster.stop()
        ray.shutdown()
