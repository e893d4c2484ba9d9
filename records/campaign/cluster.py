"""Runs of a campaign as tasks of a Ray cluster. Imported with --ray alone.

A task makes a folder of its own on its node, with the script and the dataset, and gives back what the run
wrote. So any node may go: Ray begins its runs anew elsewhere. Operations are the clock, so the results are
the same.
"""

import ctypes
import signal
import socket
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from data.command import QUIET, REPO, DataError, UsageError
from data.files import read_bytes, scratch_folder, write_beside
from records.archive.runs import METRICS, SCRIPT
from records.campaign.runs import Endings, SeedRun, Share
from records.campaign.variants import Dataset

try:
    import ray
except ImportError as error:
    raise UsageError(f"--ray: {error}: pip install 'ray[default]==2.60.0'") from None

LOST_NODES = 20  # so many may go during one run before it counts as failed
KNOCK_SECONDS = 10  # that a head may take to answer
TOKENIZER = "tokenizer.model"  # its name beside the shards on a node
PLACES = ["/data", "/records", "/requirements.txt"]  # of the repository, that travel
STAYS = ["/[!.]*", *(f"!{place}{part}" for place in PLACES for part in ("", "/**")), ".?*", "__pycache__"]
STAYS += ["/data/datasets", "/data/tokenizers", "/records/track_*", "/records/campaigns"]
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
Files = dict[str, bytes]  # by their names in a folder


class Ended(NamedTuple):
    """What a run's process left. There are no files of a run that failed."""

    code: int
    output: bytes  # all that it printed
    files: Files


def files_in(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# --- on a node --------------------------------------------------------------------------------------------


def check_torch(expected: str) -> None:
    """Another torch gives other bits. Raises DataError."""
    found = metadata.version("torch")
    if found != expected:
        node = f"node {ray.get_runtime_context().get_node_id()} ({socket.gethostname()})"
        mend = "ray stop there, install requirements.txt and let it join again; the same command goes on"
        raise DataError(f"{node} has torch {found}, expected {expected}: {mend}")


def unpack(dataset: Dataset, files: Files, folder: Path) -> Dataset:
    """The dataset as it lies on this node, in a folder that is new."""
    folder.mkdir()
    for name, blob in files.items():
        (folder / name).write_bytes(blob)
    tokenizer = dataset.manifest["tokenizer"] | {"file": TOKENIZER}
    return Dataset(folder, dataset.manifest | {"tokenizer": tokenizer})


def end_with_parent() -> None:
    """Have Linux stop this process when the thread that started it is gone, whatever ended that one."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def carry_out(run: SeedRun, script: bytes, data: Files, share: Share, torch: str) -> Ended:
    """Run it in a folder of its own; `torch` is the version that all nodes must have. Raises DataError."""
    check_torch(torch)
    with scratch_folder() as folder:
        (folder / SCRIPT).write_bytes(script)
        dataset = unpack(run.variant.dataset, data, folder / "data")
        here = SeedRun(replace(run.variant, folder=folder, dataset=dataset), run.seed)
        code = here.start(share, preexec_fn=end_with_parent).wait()
        return Ended(code, here.output.read_bytes(), files_in(here.folder) if here.end() else {})


# --- on the machine of the command ------------------------------------------------------------------------


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


def submit(runs: list[SeedRun], share: Share) -> dict[ray.ObjectRef, SeedRun]:
    """All runs as tasks, which Ray repeats elsewhere when their node is lost. A node gets a dataset once."""
    needs = {"num_cpus": share.threads, "num_gpus": share.gpus, "max_retries": LOST_NODES}
    remote = ray.remote(**needs)(carry_out)
    torch = metadata.version("torch")
    sent: dict[Path, ray.ObjectRef] = {}
    tasks = {}
    for run in runs:
        dataset = run.variant.dataset
        if dataset.folder not in sent:
            files = files_in(dataset.folder) | {TOKENIZER: read_bytes(dataset.tokenizer)}
            sent[dataset.folder] = ray.put(files)
        script = read_bytes(run.variant.folder / SCRIPT)
        tasks[remote.remote(run, script, sent[dataset.folder], share, torch)] = run
    return tasks


def keep(run: SeedRun, ended: Ended) -> None:
    """Write what came back, the metrics last: by them a run counts as ended."""
    write_beside(run.output, ended.output)
    for name in sorted(ended.files, key=lambda name: name == METRICS):
        run.folder.mkdir(parents=True, exist_ok=True)
        write_beside(run.folder / name, ended.files[name])


def run_there(runs: list[SeedRun], address: str, share: Share) -> Endings:
    """On a cluster, all at once, as far as nodes have room. Closed before its end, it ends those at work.

    Raises UsageError, DataError.
    """
    if not runs:
        return
    connect(address)
    try:
        working = submit(runs, share)
        while working:
            tasks, _ = ray.wait([*working], timeout=QUIET)
            if not tasks:
                yield next(iter(working.values())), None
            for task in tasks:
                run = working.pop(task)
                try:
                    ended = ray.get(task)
                except DataError as error:
                    raise DataError(*error.cause.args) from None
                except ray.exceptions.RayError as error:
                    ended = Ended(1, str(error).encode(), {})
                keep(run, ended)
                yield run, ended.code
    finally:
        ray.shutdown()
