"""What a script can neither be paid for nor take: the price of its answers, the kernel's limits, the sandbox.

Each dishonest script here had its way once. The honest ones beside them pass.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from records.referee import coder, scoring
from records.referee.text import Text
from records.verify import __main__ as verify
from tests.kit import record_kit
from tests.records.test_referee import SIZE, Fixed, Stand, cheat

needs_sandbox = pytest.mark.skipif(not record_kit.HAS_SANDBOX, reason=record_kit.NO_SANDBOX)


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    return Stand(tmp_path_factory.mktemp("limits"))


# --- price ------------------------------------------------------------------------------------------------


class Flat(Fixed):
    """Knows nothing and answers the same large number for every token."""

    def __init__(self, size: int, answer: float):
        super().__init__(size)
        self.table = np.full((size, size), answer, np.float32)

    def start(self, rows: int) -> np.ndarray:
        return self.table[:rows]


@pytest.mark.parametrize("answer", [0, 1e7, 1e17, -3e38, 3e38])
def test_who_knows_nothing_pays_the_vocabulary_s_logarithm(answer):
    tokens = np.random.default_rng(1).integers(0, 50, 400)
    charge = coder.Charge(tokens, writing=True)
    coder.code(Flat(50, answer), coder.stream_starts(400, 4), None, charge)
    assert charge.nats == pytest.approx(np.full(400, math.log(50)), rel=1e-15)
    assert len(charge.payload()) >= 400 * math.log2(50) / 8 - 4


@needs_sandbox
def test_a_script_that_answers_1e17_for_every_token_has_no_score(stand, tmp_path):
    body = """
def start(self, rows):
    return np.full((rows, 400), 1e17, np.float32)
def step(self, ids):
    return self.start(len(ids))
"""
    result, _ = stand.judge(stand.job(stand.foreign(tmp_path / "large", cheat(body))))
    tokens = stand.corpus.tokens["val"]
    expected = (len(tokens) - 1) * math.log2(SIZE) / stand.corpus.val_bytes()
    assert result.bpb == pytest.approx(expected, rel=1e-9)


def test_a_price_is_that_of_exact_arithmetic():
    """Beside large logits too, where a small loss is left of two large numbers."""
    rng = np.random.default_rng(2)
    for size in (1, 1e3, 1e6):
        logits = (rng.normal(size=(9, 33)) + size).astype(np.float32)
        ids = rng.integers(0, 33, 9)
        charge = coder.Charge(ids)
        charge(logits, np.arange(9))
        shifted = logits.astype(np.longdouble) - np.longdouble(size)
        exact = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(9), ids]
        assert charge.nats == pytest.approx(exact.astype(float), rel=1e-13, abs=1e-13)


def test_bits_that_the_nats_do_not_explain_are_charged():
    text = Text([b"x" * 1000], np.zeros(401, np.int64))
    nats = np.full(401, 2.0)
    honest = scoring.Result(None, text, 4, 50, nats, bytes(289), 1.0, 1.0)  # 802 nats are 144.6 bytes
    assert honest.most_payload == pytest.approx(144.63 * 1.001 + 8, abs=0.1)
    assert honest.charged == pytest.approx(8 * 289 * math.log(2)) and honest.bpb == pytest.approx(2.312)
    for size in (0, 145, 150):  # no proof, and proofs of the usual size: the score is the same
        assert replace(honest, payload=bytes(size)).charged == nats.sum()


def test_a_proof_of_a_part_gives_no_verdict(capsys):
    with pytest.raises(SystemExit, match="2"):
        verify.parse_args(["x", "--write", "--proof-bytes", "900"])
    assert "--write keeps verdicts, and --proof-bytes gives none" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        verify.parse_args(["x", "--write", "--proof-bytes", "0"])
