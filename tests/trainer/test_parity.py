"""Both scripts against the plain model of parity.py: golden file, and random shapes and settings.

A gradient's error is its largest difference over the largest entry of the reference gradient of that name.
"""

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from tests import parity
from tests.kit import helpers

LOGITS, LOSS, GRADIENT, STEP_LOSSES = 1e-5, 1e-6, 1e-4, 1e-4  # relative
SCRIPTS = {"train_gpt": "torch", "train_gpt_mlx": "mlx.core"}


# --- what the tests ask of a script -----------------------------------------------------------------------


def torch_logits(trainer, ids: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        x, head = trainer.model.trunk(torch.from_numpy(ids))
        return train_gpt.head_logits(x, head, trainer.s.logit_softcap, torch.float32)


def mlx_logits(trainer, ids: np.ndarray):
    twin, mx = load("train_gpt_mlx"), importlib.import_module("mlx.core")
    x, head = trainer.model.trunk(trainer.model.flat, mx.array(ids))
    return twin.head_logits(x, head, trainer.s.logit_softcap, mx.float32)


LOGITS_OF = {"train_gpt": torch_logits, "train_gpt_mlx": mlx_logits}


class Adapter:
    """A script on these settings, in float32 on the CPU, with `start` as weights or those of the seed."""

    def __init__(self, script, text: str, start: dict[str, np.ndarray] | None = None, compile: bool = False):
        env = helpers.tiny_env(**helpers.pairs(text), DEVICE="cpu", COMPILE=int(compile))
        self.s, _ = train_gpt.load_settings(env, "smoke")
        plan = train_gpt.Plan(self.s)
        self.steps = [plan.step(number) for number in range(plan.num_steps)]
        self.logits_of = LOGITS_OF[script.__name__]
        self.trainer = script.Trainer(self.s, script.open_machine(self.s))
        if start is not None:
            shapes = {p.name: p.shape for p in train_gpt.parameter_table(self.s)}
            assert shapes == {name: value.shape for name, value in start.items()}
            self.trainer.load(start)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """float32[B, T, V] of int64[B, T]."""
        return np.asarray(self.logits_of(self.trainer, ids))

    def batch(self, slots: np.ndarray):
        return self.trainer.machine.tensor(slots.astype(np.int64))

    def random_slots(self, seed: int = 0) -> np.ndarray:
        shape = (self.s.batch_slots, self.s.slot_tokens + 1)
        return np.random.default_rng(seed).integers(0, self.s.vocab_size, shape)

    def step(self, slots: np.ndarray, number: int) -> tuple[float, float, float]:
        """One optimizer step: loss, gradient norm, whether finite."""
        return tuple(map(float, self.trainer.step(self.batch(slots), self.steps[number])))

    def gradient(self, slots: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and gradient by name."""
        loss, flat = self.trainer.gradient(self.batch(slots))
        views = self.trainer.model.views(flat)
        return float(loss), {name: self.trainer.machine.numpy(view) for name, view in views.items()}

    def state(self) -> bytes:
        return self.trainer.sha256(*self.trainer.optimizer.state)


def load(name: str):
    """A script as a module; the test is skipped where its framework is not installed."""
    pytest.importorskip(SCRIPTS[name], reason=f"{name}.py needs {SCRIPTS[name]}, which is not installed")
    return importlib.import_module(name)


@pytest.fixture(params=SCRIPTS, scope="module")
def script(request):
    return load(request.param)


def largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0))


def assert_gradients(found: dict, reference: dict, rounding: float = 0.0) -> None:
    """rounding: what may be lost of a gradient that is small beside the others, relative to the largest."""
    assert list(found) == list(reference)
    allowed = rounding * max(map(largest, reference.values()))
    for name, value in reference.items():
        assert largest(found[name] - value) <= GRADIENT * largest(value) + allowed, name


# --- golden file ------------------------------------------------------------------------------------------


class Case(dict):
    """One case of the golden file: its arrays by name."""

    def __init__(self, name: str):
        named = {key.removeprefix(f"{name}/"): value for key, value in GOLDEN.items() if key.startswith(name)}
        super().__init__(named)

    def below(self, folder: str) -> dict[str, np.ndarray]:
        return {key.removeprefix(folder): value for key, value in self.items() if key.startswith(folder)}

    def adapted(self, script, compile: bool = False) -> Adapter:
        return Adapter(script, self["settings"].item(), self.below("start/"), compile)


with np.load(parity.GOLDEN, allow_pickle=False) as golden_file:
    GOLDEN = dict(golden_file)
cases = pytest.mark.parametrize("case", [Case(name) for name in parity.CASES], ids=[*parity.CASES])


def test_the_golden_file_is_what_parity_py_makes():
    """To 1e-12 only: sums of another processor or torch have other last bits."""
    made = parity.make()
    assert list(made) == list(GOLDEN) and parity.GOLDEN.stat().st_size < 300_000
    for name, reference in GOLDEN.items():
        assert made[name].dtype == reference.dtype and made[name].shape == reference.shape, name
        if reference.dtype == np.float64:
            assert largest(made[name] - reference) <= 1e-12 * largest(reference), name
        else:
            assert np.array_equal(made[name], reference), name


@cases
def test_logits_loss_and_gradients_are_the_golden_ones(script, case):
    adapter = case.adapted(script)
    ids, _ = parity.sequences(adapter.s, case["tokens"][0, :1])
    assert largest(adapter.logits(ids) - case["logits"]) < LOGITS * largest(case["logits"])
    loss, found = adapter.gradient(case["tokens"][0])
    assert loss == pytest.approx(case["losses"][0], rel=LOSS)
    assert_gradients(found, case.below("grad/"))


def assert_ten_steps(adapter: Adapter, case: Case) -> None:
    """Loss and gradient norm before each update: the weights, moments and schedules of all updates before."""
    assert [step.lr_mul for step in adapter.steps] == pytest.approx(case["lr_muls"], rel=1e-12)
    assert [step.momentum for step in adapter.steps] == pytest.approx(case["momenta"], rel=1e-12)
    found = [adapter.step(case["tokens"][n], n) for n in range(parity.STEPS)]
    losses, norms, finite = np.array(found).T
    assert finite.all()
    assert losses == pytest.approx(case["losses"], rel=STEP_LOSSES)
    assert norms == pytest.approx(case["grad_norms"], rel=10 * STEP_LOSSES)


@cases
def test_ten_steps_are_the_golden_ones(script, case):
    assert_ten_steps(case.adapted(script), case)


def test_ten_compiled_steps_of_mlx_are_the_golden_ones():
    """mx.compile keeps for ever what a function reads but is not given: here that would show."""
    case = Case("plain")
    adapter = case.adapted(load("train_gpt_mlx"), compile=True)
    assert_ten_steps(adapter, case)
    assert adapter.trainer.machine.compile, "it failed, and went on without"


# --- what else both promise -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, -1, None], ids=["a matrix", "a vector", "the loss"])
def test_a_step_without_finite_numbers_changes_nothing(script, place, value, monkeypatch):
    case = Case("full")
    adapter = case.adapted(script)
    first, second, third, *_ = case["tokens"]
    adapter.step(first, 0)
    before = adapter.state()
    loss, gradient = adapter.trainer.gradient(adapter.batch(second))
    if place is None:
        loss = loss * value
    else:
        gradient[place] = value
    monkeypatch.setattr(adapter.trainer, "gradient", lambda *_: (loss, gradient))
    found, norm, finite = adapter.step(second, 1)
    assert (np.isfinite(found), np.isfinite(norm), finite) == (place is not None, place is None, 0.0)
    assert adapter.state() == before
    monkeypatch.undo()
    assert adapter.step(third, 2)[2] == 1.0
    assert adapter.state() != before


def test_passes_of_any_size_give_the_same(script, monkeypatch):
    """One slot or sequence at a time, some (the last pass has what is left), and all."""
    ids = np.random.default_rng(1).integers(0, 33, (7, 13))
    case = Case("full")
    found = []
    for micro_tokens in (1, 5 * 12, 10**6):
        monkeypatch.setattr(script, "MICRO_TOKENS", micro_tokens)
        adapter = case.adapted(script)
        found.append((*adapter.gradient(case["tokens"][0]), adapter.trainer.model.nll(ids)))
    for loss, gradient, nats in found[1:]:
        assert nats.shape == (7, 12) and np.allclose(nats, found[0][2], rtol=1e-5)
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert_gradients(gradient, found[0][1])


# --- any shape --------------------------------------------------------------------------------------------


@st.composite
def shapes(draw) -> str:
    """The settings of a small model of any shape that they allow."""
    pairs = [(1, 1), (2, 1), (3, 3), (4, 2), (4, 4), (6, 2), (5, 1)]
    heads, kv_heads = draw(st.sampled_from(pairs))
    length = draw(st.integers(2, 20))
    slots = draw(st.integers(1, 3))
    rows = draw(st.integers(1, 3))
    width = heads * draw(st.sampled_from([4, 6, 8]))
    return f"""
        NUM_HEADS={heads} NUM_KV_HEADS={kv_heads} MODEL_DIM={width} MLP_MULT={draw(st.integers(1, 3))}
        VOCAB_SIZE={draw(st.integers(2, 90))} NUM_LAYERS={draw(st.integers(1, 5))}
        LOGIT_SOFTCAP={draw(st.sampled_from([1, 7, 30, 60]))}
        ROPE_BASE={draw(st.sampled_from([2, 500]))} QK_GAIN_INIT=1.5
        KEY_SHIFT={draw(st.sampled_from([0, 0.5]))} SHORT_WINDOW={draw(st.integers(0, 21))}
        EXCLUSIVE_ATTENTION={draw(st.integers(0, 1))} MLP_LEAK={draw(st.sampled_from([0, 0.5, 1]))}
        TRAIN_SEQ_LEN={length} BATCH_SLOTS={slots} TRAIN_BATCH_TOKENS={length * slots * rows}
    """


@settings(max_examples=12)
@given(shapes(), st.integers(0, 99))
def test_logits_and_gradients_of_any_shape_are_those_of_the_reference(script, text, seed):
    s, rng = parity.read_settings(text), np.random.default_rng(seed)
    start = parity.start_weights(s, rng)
    adapter = Adapter(script, text, start)
    slots = adapter.random_slots(seed)
    ids, targets = parity.sequences(s, slots)
    exact = {name: value.astype(np.float64) for name, value in start.items()}
    logits, loss, reference = parity.logits_and_gradient(s, exact, ids, targets)
    assert largest(adapter.logits(ids) - logits) < LOGITS * largest(logits)
    found_loss, found = adapter.gradient(slots)
    assert found_loss == pytest.approx(loss, rel=LOSS)
    assert_gradients(found, reference, rounding=1e-7)
