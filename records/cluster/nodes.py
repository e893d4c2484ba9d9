"""How a command reaches the nodes of a Ray cluster, and how files of its machine get there.

Imported with --ray alone.
"""

import json
import os
import signal
import socket
from pathlib import Path

from data.command import REPO, DataError, UsageError
from data.files import growing_folder, locked, read_bytes, sha256

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise UsageError(f"--ray: {error}: pip install 'ray[default]==2.60.0'") from None

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bytegolf/datasets"
KNOCK_SECONDS = 10  # that a head may take to answer
PLACES = ["/data", "/records", "/requirements.txt"]  # of the repository, that travel
STAYS = ["/[!.]*", *(f"!{place}{part}" for place in PLACES for part in ("", "/**")), ".?*", "__pycache__"]
STAYS += ["/data/datasets", "/data/tokenizers", "/records/track_*", "/records/campaigns"]


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


def knock(address: str) -> None:
    """Raises UsageError where nothing answers, after seconds: Ray itself tries for minutes. ValueError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
    except OSError as error:
        raise UsageError(f"--ray {address}: no head answers there: {error}") from None


class Lender:
    """Files of the command's machine for the nodes. An actor there."""

    def __init__(self):
        self.lent: dict[Path, ray.ObjectRef] = {}

    def lend(self, path: Path) -> list:
        """A reference to a file's bytes: nodes that want the same file take it from each other."""
        if path not in self.lent:
            self.lent[path] = ray.put(read_bytes(path))
        return [self.lent[path]]


def actor_here(kind: type):
    """An actor on the machine of the command."""
    mine = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(mine, soft=False)
    kept = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(kind).options(scheduling_strategy=here, **kept).remote()


# --- on a node --------------------------------------------------------------------------------------------


Wanted = dict[str, tuple[Path, str]]  # by names below a folder: paths on the command's machine, and sha256


def home_of(files: Wanted) -> Path:
    names = {name: digest for name, (_, digest) in files.items()}
    return CACHE / sha256(json.dumps(names).encode())


def fetched(files: Wanted, lender) -> Path:
    """A folder of this node with files of the command's machine, which are fetched once. Raises DataError."""
    home = home_of(files)
    home.parent.mkdir(parents=True, exist_ok=True)
    with locked(home.parent, file=f"{home.name}.lock"):  # of the tasks of this node, one fetches
        if not home.exists():
            with growing_folder(home) as folder:
                for name, (path, digest) in files.items():
                    fetch(lender, path, folder / name, digest)
    return home


def value_of(reference: ray.ObjectRef):
    """Wait for it. In a task ray.get would lend the task's processor to another one, which then stays."""
    return reference.future().result()


def fetch(lender, source: Path, target: Path, digest: str) -> None:
    """Raises DataError where the bytes are not those of the digest."""
    (lent,) = value_of(lender.lend.remote(source))
    blob = value_of(lent)
    if sha256(blob) != digest:
        raise DataError(f"{source}: is not the file that was meant; make its dataset anew")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(blob)
