"""Verifications on a Ray cluster: what runs anything of a record runs on a node. Imported with --ray alone.

Papers are checked on the machine of the command. A record gets a whole node, as it gets a whole machine
without Ray: of sandboxes that see the text, one lives at a time, and seconds count.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from data.command import say
from data.files import file_sha256, read_bytes, scratch_folder
from records.archive.checks import Check, VerifierError
from records.archive.record import Record
from records.archive.submission import this_machine
from records.archive.tracks import tokenizer_path
from records.cluster.nodes import (
    Lender,
    NodeAffinitySchedulingStrategy,
    Wanted,
    actor_here,
    connect,
    fetched,
    ray,
)
from records.sandbox import bubblewrap
from records.verify.claims import VerifyOptions, check_runs, our_errors

Checks = Callable[..., Iterator[Check]]  # `claims.verify` of one folder; takes what runs the record


@dataclass(frozen=True)
class RecordKit:
    """What a node needs to run a record, beside the lender."""

    name: str
    track: str
    rules: bytes  # track.json
    files: dict[str, bytes]  # of the record's folder
    data: Wanted  # what the referee reads of the folder data/
    second: bytes | None  # the second text, of which no node keeps a copy
    options: VerifyOptions


@dataclass(frozen=True)
class Answer:
    """What a node says of a record."""

    lines: list[Check]
    machine: dict[str, str]


def kit_of(record: Record, options: VerifyOptions) -> RecordKit:
    """Raises DataError."""
    dataset = Path("datasets", record.track.dataset["name"])
    kinds = ["val"] if options.retrain is None else ["val", "train"]
    paths = [path for kind in kinds for path in sorted((options.data / dataset).glob(f"*_{kind}_*.bin"))]
    tokenizer = tokenizer_path(record.track, options.data)
    paths += [tokenizer] if tokenizer.exists() else []
    wanted = {str(path.relative_to(options.data)): (path, file_sha256(path).hex()) for path in paths}
    files = {path.name: read_bytes(path) for path in record.path.iterdir()}
    second = read_bytes(options.second) if options.second else None
    rules = read_bytes(record.home / "track.json")
    return RecordKit(record.name, record.track.name, rules, files, wanted, second, options)


# --- on a node --------------------------------------------------------------------------------------------


def run_record(kit: RecordKit, lender) -> Answer | str:
    """What `check_runs` says here, or why this node is refused. Raises VerifierError, DataError."""
    if not kit.options.trust and bubblewrap.find() is None:
        return "has no bubblewrap (bwrap) that works"
    os.environ.pop("OMP_NUM_THREADS", None)  # which Ray set: bits depend on it, and without Ray it is not set
    with scratch_folder() as folder:
        track = folder / "records" / kit.track
        path = track / kit.name
        path.mkdir(parents=True)
        (track / "track.json").write_bytes(kit.rules)
        for name, blob in kit.files.items():
            (path / name).write_bytes(blob)
        options = kit.options
        if kit.second is not None:
            options = replace(options, second=folder / "second.jsonl")
            options.second.write_bytes(kit.second)
        with our_errors(path):
            options = replace(options, data=fetched(kit.data, lender))
            return Answer(list(check_runs(Record(path), options)), this_machine())


# --- the command's part -----------------------------------------------------------------------------------


class NodePool:
    """The nodes, each of which runs one record at a time."""

    def __init__(self, machines: dict[Path, dict[str, str]]):
        self.machines = machines
        self.lender = actor_here(Lender)
        self.changed = threading.Condition()
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        self.left = {node["NodeID"]: node for node in nodes}  # that were neither refused nor lost
        self.free = [*self.left]
        self.working: dict[str, ray.ObjectRef] = {}
        self.why = "none has a CPU to give"

    def take(self, cuda: bool) -> str:
        """The id of a free node, once there is one; with a GPU, if one is asked for and any has it.

        Raises VerifierError.
        """
        with self.changed:
            while self.left:
                having = [one for one, node in self.left.items() if cuda and node["Resources"].get("GPU")]
                fitting = [one for one in self.free if one in (having or self.left)]
                if fitting:
                    self.free.remove(fitting[0])
                    return fitting[0]
                self.changed.wait()
        raise VerifierError(f"no node is left that could verify: {self.why}")

    def give_back(self, one: str) -> None:
        with self.changed:
            self.free.append(one)
            self.changed.notify_all()

    def drop(self, one: str, why: str) -> None:
        """Use a node no more, and say so."""
        with self.changed:
            node = self.left.pop(one, None)
            if node:
                self.why = f"node {one} ({node['NodeManagerHostname']}) {why}"
                say(f"refused: {self.why}")
            self.changed.notify_all()

    def run(self, record: Record, options: VerifyOptions) -> Iterator[Check]:
        """`check_runs` on a node that is free; where that one is refused or lost, on another.

        Raises VerifierError, DataError.
        """
        kit = kit_of(record, options)
        while True:
            one = self.take(record.track["device"] == "cuda")
            try:
                found = self.ask(one, kit)
            except ray.exceptions.RayTaskError as error:
                self.give_back(one)
                raise error.cause from error
            except ray.exceptions.RayError as error:
                self.drop(one, f"was lost: {str(error).splitlines()[0]}")
                continue
            if isinstance(found, str):
                self.drop(one, found)
                continue
            self.give_back(one)
            self.machines[record.path] = found.machine
            yield from found.lines
            return

    def ask(self, one: str, kit: RecordKit) -> Answer | str:
        """The answer of a node, all of whose processors and GPUs are ours until it comes."""
        resources = self.left[one]["Resources"]
        needs = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), "max_retries": 0}
        there = NodeAffinitySchedulingStrategy(one, soft=False)
        task = ray.remote(**needs, scheduling_strategy=there)(run_record)
        self.working[one] = task.remote(kit, self.lender)
        return ray.get(self.working[one])

    def stop(self) -> None:
        """End what is at work."""
        with self.changed:
            self.left.clear()
            self.changed.notify_all()
        for reference in [*self.working.values()]:
            ray.cancel(reference, force=True)


def verify_there(
    all_checks: list[Checks], address: str, machines: dict[Path, dict[str, str]]
) -> Iterator[list[Check]]:
    """The lines of each, at once as far as there are nodes. Closed before its end, it ends what is at work.

    `machines`: gets the machine on which each folder was run. Raises UsageError.
    """
    connect(address)
    nodes = NodePool(machines)
    threads = ThreadPoolExecutor(len(nodes.left) or 1)
    try:
        yield from threads.map(lambda checks: list(checks(run=nodes.run)), all_checks)
    finally:
        nodes.stop()
        threads.shutdown(cancel_futures=True)
        ray.shutdown()
