"""Runs inside the sandbox: imports a record and answers the referee. records/sandbox.py starts it.

Requests come on stdin, answers leave on stdout; what the record itself prints goes to stderr. Frames are
fixed binary: a header, then raw little-endian numbers whose size both sides know beforehand. Only the answers
of the record are believed here, and the referee checks those; this file holds no secret and no judgement.
"""

import contextlib
import importlib.util
import operator
import os
import resource
import struct
import sys
from pathlib import Path

REQUEST = struct.Struct("<4sIQQQQ")  # magic, operation, rows, columns, first and end column to answer
RESPONSE = struct.Struct("<4sIQ")  # magic, 0 or 1 for an error, bytes that follow
REQUEST_MAGIC, RESPONSE_MAGIC = b"BGq1", b"BGr1"
LOAD, NLL, LOGPROBS, ADAPT = range(4)
MAX_MESSAGE = 4096
MAX_FILES = 256


def limit(memory: int, tasks: int, cpu_seconds: int, file_bytes: int, user: int) -> None:
    """Give up all rights and most resources. `user`: number to become, 0 to stay; a limit of 0 is none."""
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    limits = {
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_NPROC: tasks,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: MAX_FILES,
    }
    for what, value in limits.items():
        hard = resource.getrlimit(what)[1]
        if value and hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        if value:
            resource.setrlimit(what, (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def take_pipes() -> tuple[int, int]:
    """Requests and answers under numbers of their own; stdin is empty then, and stdout is stderr."""
    requests = os.dup(0)
    responses = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, responses


def read_exactly(fd: int, size: int) -> bytearray:
    """So many bytes. Raises EOFError where the referee has gone."""
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size:
        got = os.readv(fd, [view[filled:]])
        if not got:
            raise EOFError
        filled += got
    return data


def write_all(fd: int, *parts: bytes) -> None:
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            view = view[os.write(fd, view) :]


def be_quick(device: str) -> None:
    """For text that is only looked at: torch compiles nothing, and a CPU computes in float32.

    Importing the compiler takes seconds, and a CPU without bfloat16 is a hundred times slower in it.
    """
    try:
        import torch
    except ImportError:
        return
    torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)
    if device == "cpu":
        torch.bfloat16 = torch.float32


def load(folder: Path, device: str):
    """Import the record's script and let it load its artifact."""
    spec = importlib.util.spec_from_file_location("record", folder / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["record"] = module
    spec.loader.exec_module(module)
    return module.load_predictor(folder / "model.ptz", device)


def answer(predictor, operation: int, ids, first: int, end: int):
    """The numbers that one request asks for, float32. Raises TypeError or ValueError off the contract."""
    import numpy as np

    if operation == ADAPT:
        predictor.adapt(ids)
        return np.zeros(0, np.float32)
    if operation == NLL:
        name = "nll"
        found = predictor.nll(ids)
        shape = (ids.shape[0], ids.shape[1] - 1)
    else:
        name = "logprobs"
        found = predictor.logprobs(ids)
        shape = (*ids.shape, int(predictor.vocab_size))
    if not isinstance(found, np.ndarray) or found.dtype != np.float32:
        kind = getattr(found, "dtype", type(found).__name__)
        raise TypeError(f"{name} gave {kind}, expected a float32 array")
    if found.shape != shape:
        raise ValueError(f"{name} gave shape {found.shape}, expected {shape}")
    return np.ascontiguousarray(found[:, first:end] if operation == LOGPROBS else found, "<f4")


def serve(requests: int, responses: int, folder: Path, device: str) -> None:
    """Answer until the referee closes its end."""
    predictor = None
    while True:
        magic, operation, rows, columns, first, end = REQUEST.unpack(read_exactly(requests, REQUEST.size))
        assert magic == REQUEST_MAGIC
        body = read_exactly(requests, 8 * rows * columns)
        try:
            import numpy as np  # within the limits, and its failure is reported

            if operation == LOAD:
                predictor = load(folder, device)
                facts = (predictor.vocab_size, predictor.max_len, callable(getattr(predictor, "adapt", None)))
                result = np.array([operator.index(fact) for fact in facts], "<i8")
            else:
                ids = np.frombuffer(body, "<i8").reshape(rows, columns).astype(np.int64)
                result = answer(predictor, operation, ids, first, end)
            status = 0
            payload = result.tobytes()
        except (Exception, SystemExit) as error:  # whatever a record raises is told to the referee
            text = " ".join(f"{type(error).__name__}: {error}".split())
            status = 1
            payload = text.encode("utf-8", "backslashreplace")[:MAX_MESSAGE]
        write_all(responses, RESPONSE.pack(RESPONSE_MAGIC, status, len(payload)), payload)


def main() -> None:
    folder, device, *numbers = sys.argv[1:]
    quick, *limits = map(int, numbers)
    pipes = take_pipes()
    limit(*limits)
    if quick:
        be_quick(device)
    with contextlib.suppress(EOFError):  # the referee has closed its end: done
        serve(*pipes, Path(folder), device)


if __name__ == "__main__":
    main()
