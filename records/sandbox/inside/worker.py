"""Runs inside the sandbox: imports a record and answers the referee. records/sandbox/jobs.py starts it.

Requests come on stdin and short answers leave on stdout; logits are left in a file in memory that is shared
with the referee. What the record itself prints goes to stderr. The referee believes nothing that comes from
here: it copies the numbers, checks them and judges them; this file holds no secret and no judgement.
"""

import importlib.util
import operator
import os
import struct
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np

REQUEST = struct.Struct("<?I")  # whether rows tokens (int64) follow, else the model begins anew; rows
# magic, 1 for an error, vocab_size, rows, the error; a pipe keeps it whole
RESPONSE = struct.Struct("<4sIqq480s")
MAGIC = b"BGr3"


def take_pipes() -> tuple[BinaryIO, int]:
    """Requests and answers under numbers of their own; stdin is empty then, and stdout is stderr."""
    requests = os.fdopen(os.dup(0), "rb")
    responses = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, responses


def load(folder: Path, device: str):
    """Import the record's script and let it load its artifact."""
    spec = importlib.util.spec_from_file_location("record", folder / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["record"] = module
    spec.loader.exec_module(module)
    return module.load_predictor(folder / "model.ptz", device)


def leave(memory: int, found, shape: tuple[int, int]) -> None:
    """Put logits into the shared memory. Raises TypeError or ValueError off the contract."""
    if not isinstance(found, np.ndarray) or found.dtype != np.float32:
        kind = getattr(found, "dtype", type(found).__name__)
        raise TypeError(f"the predictor gave {kind}, expected a float32 array")
    if found.shape != shape:
        raise ValueError(f"the predictor gave shape {found.shape}, expected {shape}")
    os.pwrite(memory, np.ascontiguousarray(found), 0)


def serve(folder: Path, device: str, memory: int, requests: BinaryIO, responses: int) -> None:
    """Load the record, then answer until the referee closes its end."""
    predictor = load(folder, device)
    facts = operator.index(predictor.vocab_size), operator.index(predictor.rows)
    os.write(responses, RESPONSE.pack(MAGIC, 0, *facts, b""))
    while request := requests.read(REQUEST.size):
        fed, rows = REQUEST.unpack(request)
        if fed:
            ids = np.frombuffer(requests.read(8 * rows), "<i8")
            logits = predictor.step(ids.astype(np.int64))
        else:
            logits = predictor.start(rows)
        leave(memory, logits, (rows, facts[0]))
        os.write(responses, RESPONSE.pack(MAGIC, 0, *facts, b""))


def main() -> None:
    folder, device, memory = sys.argv[1:]
    requests, responses = take_pipes()
    try:
        serve(Path(folder), device, int(memory), requests, responses)
    except (Exception, SystemExit) as error:  # whatever a record raises is reported to the referee
        text = " ".join(f"{type(error).__name__}: {error}".split())
        message = text.encode("utf-8", "backslashreplace")
        os.write(responses, RESPONSE.pack(MAGIC, 1, 0, 0, message))


if __name__ == "__main__":
    main()
