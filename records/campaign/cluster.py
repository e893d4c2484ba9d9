"""Runs of a campaign as tasks of a Ray cluster. Imported with --ray alone.

A task makes a folder of its own on its node, with the script and the last checkpoint, and starts the run
there. It calls functions on the machine of the command, which keep checkpoints and results on that machine's
disk. So any node may go, and where the head or the command itself went, the same command goes on.
"""

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from data.command import REPO, DataError, UsageError, say
from data.files import growing_folder, locked, read_bytes, read_json, scratch_folder, sha256, write_beside
from records.archive.runs import SCRIPT, cpuinfo
from records.campaign.runs import Endings, SeedRun, Share
from records.campaign.variants import Dataset

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise UsageError(f"--ray: {error}: pip install 'ray[default]==2.60.0'") from None

METRICS = "metrics.jsonl"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bytegolf/datasets"
LOST_NODES = 20  # so many may go during one run before it counts as failed
KNOCK_SECONDS = 10  # that a head may take to answer
PATIENCE = 40  # seconds for runs that are stopped to write checkpoints
ATTEMPTS = 3  # to stop them
PLACES = ["/data", "/records", "/requirements.txt"]  # of the repository, that travel
STAYS = ["/[!.]*", *(f"!{place}{part}" for place in PLACES for part in ("", "/**")), ".?*", "__pycache__"]
STAYS += ["/data/datasets", "/data/tokenizers", "/records/track_*", "/records/campaigns"]
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


class StrangeNodeError(Exception):
    """A node would give other results: Ray's id of it, and why."""


@dataclass(frozen=True)
class RunTask:
    """What a node needs for a run."""

    run: SeedRun
    script: bytes
    share: Share
    torch: str  # the version that all nodes must have
    home: str  # Ray's id of the command's node
    every: float  # seconds between two checkpoints that come back


# --- on the machine of the command ------------------------------------------------------------------------


def begin(run: SeedRun, place: dict[str, str]) -> dict[str, bytes]:
    """Note where a run is now; what an earlier attempt left in its folder."""
    with open(run.places, "a") as file:
        file.write(json.dumps(place) + "\n")
    return files_of(run)


def keep(run: SeedRun, files: dict[str, bytes], output: bytes) -> None:
    """Write what came back, in its order. Older checkpoints go."""
    write_beside(run.output, output)
    for name, blob in files.items():
        path = run.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(path, blob)
    for path in run.folder.glob("checkpoint/*.ckpt"):
        if f"checkpoint/{path.name}" not in files:
            path.unlink()


def files_of(run: SeedRun) -> dict[str, bytes]:
    """All files of a run that has ended, its metrics last; of another one its metrics and newest checkpoint.

    The checkpoint is read first: a resume wants metrics that hold no less.
    """
    if run.end():
        paths = sorted(run.folder.iterdir(), key=lambda path: path.name == METRICS)
        return {path.name: path.read_bytes() for path in paths if path.is_file()}
    newest: dict[str, bytes] = {}
    for path in sorted(run.folder.glob("checkpoint/*.ckpt")):
        with contextlib.suppress(FileNotFoundError):  # the run keeps two, and wrote two more meanwhile
            newest = {f"checkpoint/{path.name}": path.read_bytes()}
    metrics = run.folder / METRICS
    return ({METRICS: metrics.read_bytes()} if metrics.exists() else {}) | newest


# --- on a node --------------------------------------------------------------------------------------------


def call_home(home: str, function: Callable, *args: Any) -> Any:
    """What a function gives on the machine of the command.

    Waits by a future: ray.get would lend this task's processor to another task, which then stays.
    """
    return remote_at(home, function).remote(*args).future().result()


@functools.cache
def remote_at(home: str, function: Callable) -> ray.remote_function.RemoteFunction:
    there = NodeAffinitySchedulingStrategy(home, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=there)(function)


def dataset_here(dataset: Dataset, fetch: Callable[[Path], bytes]) -> Dataset:
    """The dataset on this node: where the command has it, if that is here too, else fetched once.

    Raises DataError where the bytes are not those of the manifest.
    """
    manifest = dataset.folder / "manifest.json"
    if manifest.exists() and read_json(manifest) == dataset.manifest:
        return dataset
    files = {"tokenizer.model": dataset.tokenizer}
    files |= {file["name"]: dataset.folder / file["name"] for file in dataset.manifest["files"]}
    target = CACHE / sha256(json.dumps([*zip(files, dataset.digests)]).encode())
    target.parent.mkdir(parents=True, exist_ok=True)
    # of the tasks of this node, one fetches
    with locked(target.parent, file=f"{target.name}.lock"):
        if not target.exists():
            with growing_folder(target) as folder:
                for (name, path), digest in zip(files.items(), dataset.digests, strict=True):
                    blob = fetch(path)
                    if sha256(blob) != digest:
                        raise DataError(f"{path}: is not the file that was meant; make its dataset anew")
                    (folder / name).write_bytes(blob)
    tokenizer = dataset.manifest["tokenizer"] | {"file": "tokenizer.model"}
    return Dataset(target, dataset.manifest | {"tokenizer": tokenizer})


def end_with_parent() -> None:
    """Have Linux stop this process when the thread that started it is gone, whatever ended that one."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def carry_out(task: RunTask) -> int:
    """The exit code of the run's process. Raises StrangeNodeError, DataError.

    A task that is cancelled gets a KeyboardInterrupt: the process then writes a checkpoint.
    """
    node = ray.get_runtime_context().get_node_id()
    host = socket.gethostname()
    torch = metadata.version("torch")
    if torch != task.torch:
        raise StrangeNodeError(node, f"node {node} ({host}) has torch {torch}, expected {task.torch}")
    processor = cpuinfo("model name") or os.uname().machine  # results are equal to the bit on one kind alone
    place = {"node": node, "host": host, "processor": processor}
    with scratch_folder() as folder:
        (folder / SCRIPT).write_bytes(task.script)
        dataset = dataset_here(task.run.variant.dataset, lambda path: call_home(task.home, read_bytes, path))
        here = SeedRun(replace(task.run.variant, folder=folder, dataset=dataset), task.run.seed)
        for name, blob in call_home(task.home, begin, task.run, place).items():
            (here.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (here.folder / name).write_bytes(blob)
        process = here.start(task.share, preexec_fn=end_with_parent)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(task.every)
                call_home(task.home, keep, task.run, files_of(here), here.output.read_bytes())
        finally:
            process.terminate()
            process.wait()
            call_home(task.home, keep, task.run, files_of(here), here.output.read_bytes())


# --- the command's part -----------------------------------------------------------------------------------


def knock(address: str) -> None:
    """Raises UsageError where nothing answers, after seconds: Ray itself tries for minutes. ValueError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
    except OSError as error:
        raise UsageError(f"--ray {address}: no head answers there: {error}") from None


def connect(address: str) -> None:
    """Raises UsageError."""
    if "://" in address:
        raise UsageError(f"--ray {address}: expected auto or HOST:PORT; from elsewhere use ray job submit")
    travels = {"working_dir": str(REPO), "excludes": STAYS}
    try:
        if address != "auto":
            knock(address)
        ray.init(address, runtime_env=travels, log_to_driver=False, logging_level="ERROR")
    except ValueError:
        raise UsageError(f"--ray {address}: is no address, expected auto or HOST:PORT") from None
    except ConnectionError:
        raise UsageError(
            f"--ray {address}: no Ray node of it runs on this machine; ray start --head begins one, "
            "ray start --address=HOST:PORT joins one"
        ) from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray took it


class Cluster:
    """The runs of a campaign as tasks, and the nodes that were refused."""

    def __init__(self, share: Share, every: float):
        self.share = share
        self.every = every
        self.home = ray.get_runtime_context().get_node_id()
        self.refused: set[str] = set()  # Ray's ids of nodes
        self.working: dict[ray.ObjectRef, SeedRun] = {}
        self.task = ray.remote(carry_out)

    def submit(self, run: SeedRun) -> None:
        """As a task, which Ray repeats elsewhere when its node is lost."""
        needs = {"num_cpus": self.share.threads, "num_gpus": self.share.gpus, "max_retries": LOST_NODES}
        if self.refused:
            needs["label_selector"] = {"ray.io/node-id": f"!in({','.join(self.refused)})"}
        script = read_bytes(run.variant.folder / SCRIPT)
        task = RunTask(run, script, self.share, metadata.version("torch"), self.home, self.every)
        self.working[self.task.options(**needs).remote(task)] = run

    def ended(self) -> Endings:
        """The runs as they end; those whose node was refused go on elsewhere. Raises DataError."""
        while self.working:
            (task,), _ = ray.wait([*self.working])
            run = self.working.pop(task)
            try:
                code = ray.get(task)
            except StrangeNodeError as error:
                self.refuse(*error.cause.args)
                self.submit(run)
                continue
            except ray.exceptions.RayError as error:
                run.output.write_text(str(error))
                code = 1
            yield run, code

    def refuse(self, node: str, why: str) -> None:
        """Say it of a node, once. Raises DataError where no other node is left."""
        if node not in self.refused:
            self.refused.add(node)
            say(f"refused: {why}")
        needed = {"CPU": self.share.threads, "GPU": self.share.gpus}
        left = [
            node
            for node in ray.nodes()
            if node["Alive"]
            and node["NodeID"] not in self.refused
            and all(node["Resources"].get(kind, 0) >= count for kind, count in needed.items())
        ]
        if not left:
            raise DataError(f"{why}; no other node is left that could take a run")

    def stop(self) -> None:
        """Cancel what is at work, and wait until it has sent its checkpoints.

        The last first: a run that waits would begin in the place of one that was cancelled. Those that are
        still at work are cancelled again, since an interrupt in the midst of Ray's own code is lost.
        """
        working = [*reversed(self.working)]
        for _ in range(ATTEMPTS):
            for task in working:
                ray.cancel(task, recursive=False)
            if working:
                _, working = ray.wait(working, num_returns=len(working), timeout=PATIENCE)


def run_there(runs: list[SeedRun], address: str, share: Share, every: float) -> Endings:
    """On a cluster, all at once, as far as nodes have room. Closed before its end, it stops those at work.

    Raises UsageError, DataError.
    """
    if not runs:
        return
    connect(address)
    cluster = Cluster(share, every)
    try:
        for run in runs:
            cluster.submit(run)
        yield from cluster.ended()
    finally:
        cluster.stop()
        ray.shutdown()
