"""Probes: what a predictor must not change when tokens, rows or calls around a score change."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from records.checks import Check, check, skip
from records.coder import LN2, Evaluation
from records.sandbox import Predictor
from records.scoring import Result, score
from records.text import Text

EXACT = 0.02  # nats between two calls of one shape in one process
CROSS = 0.5  # nats at one token where rounding differs: compiled or not, in another row
CROSS_MEAN = 0.002  # nats on average there: with rounding, less than a track's least gain
ROUNDING = 0.02  # standard deviation of one token there, in bfloat16 (0.012 measured)
BIAS = 0.001  # nats between nll and logprobs on average, in one process
SUM = 1e-3  # how far from 1 probabilities may sum
PROBE_BYTES = 1 << 25  # of one answer with whole distributions
FUTURE_ROUNDS = 16  # calls with hidden futures


def gap(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference; infinite where one is not finite."""
    if a.size == 0 or np.array_equal(a, b):
        return 0.0
    return float(np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), np.inf).max())


def distance(logp: np.ndarray, logq: np.ndarray) -> float:
    """Largest total variation distance between distributions that stand in the last axis."""
    return gap(
        np.zeros(1),
        np.abs(np.exp(logp.astype(np.float64)) - np.exp(logq.astype(np.float64))).sum(-1).ravel() / 2,
    )


def told(difference: float) -> str:
    return "the same bit for bit" if difference == 0 else f"{difference:.3g} apart"


@dataclass
class Probe:
    """Rows of real windows, a cut in each, and two copies: later tokens random, only the next one changed."""

    windows: np.ndarray
    ids: np.ndarray  # int64[R, T+1]
    cuts: np.ndarray  # the last place that all three share
    later: np.ndarray
    next: np.ndarray

    @property
    def before(self) -> np.ndarray:
        """bool[R, T]: scores of targets up to the cut."""
        return np.arange(self.ids.shape[1] - 1) < self.cuts[:, None]


def make_probe(
    tokens: np.ndarray, windows: np.ndarray, evaluation: Evaluation, vocab_size: int, rng: np.random.Generator
) -> Probe:
    ids = evaluation.read(tokens, windows)
    cuts = np.array([rng.integers(first - 1 - start, end - start) for start, first, end in windows])
    after = np.arange(ids.shape[1]) - cuts[:, None]
    changed = (ids + rng.integers(1, vocab_size, ids.shape)) % vocab_size
    return Probe(windows, ids, cuts, np.where(after > 0, changed, ids), np.where(after == 1, changed, ids))


def probe_future(
    predictor: Predictor,
    rounds: list[tuple[int, int, np.ndarray]],
    result: Result,
    tokens: np.ndarray,
    rng: np.random.Generator,
) -> Check:
    """What a process that has never seen the next token gives it, against its score. The strictest probe: it
    comes first in a fresh sandbox, so no memory of an earlier call can help, and one cut stands in each of
    hundreds of windows, so looking ahead in a few of them is found too. A record that adapts scores and
    learns on the way what it did before each of them."""
    found, scored, learnt = [], [], 0
    for before, cut, windows in rounds:
        if before > learnt:
            score(predictor, tokens, result.job.evaluation, range(learnt, before))
            learnt = before
        ids = result.job.evaluation.read(tokens, windows)
        later = ids.copy()
        later[:, cut + 1 :] = rng.integers(0, predictor.vocab_size, later[:, cut + 1 :].shape)
        logprobs = predictor.logprobs(later[:, :-1], cut, cut + 1)[:, 0]
        found += (-np.take_along_axis(logprobs, ids[:, cut + 1 : cut + 2], 1)[:, 0]).tolist()
        scored += result.nats[windows[:, 0] + cut + 1].tolist()
    return alike("hidden-future", np.array(found), np.array(scored), "where the record cannot have seen them")


def alike(name: str, found: np.ndarray, scored: np.ndarray, where: str) -> Check:
    """Whether tokens cost what they cost in the score, but for rounding: on average and each."""
    worst, mean = gap(found, scored), float(np.mean(found - scored))
    most = CROSS_MEAN + 3 * ROUNDING / len(found) ** 0.5
    return check(
        name,
        worst <= CROSS and abs(mean) <= most,
        f"{len(found)} tokens cost {mean:+.5f} nats more on average, {worst:.3g} at most, {where}; "
        f"expected {most:.4f} and {CROSS}",
    )


def probe_calls(
    predictor: Predictor, probe: Probe, nats: np.ndarray, rng: np.random.Generator
) -> Iterator[Check]:
    """One probe after the other, all calls of one shape."""
    before = probe.before
    later, later_p = predictor.nll(probe.later), predictor.logprobs(probe.later[:, :-1])
    nexts, nexts_p = predictor.nll(probe.next), predictor.logprobs(probe.next[:, :-1])
    own, own_p = predictor.nll(probe.ids), predictor.logprobs(probe.ids[:, :-1])
    for name, scores, p in (("later-tokens", later, later_p), ("next-token", nexts, nexts_p)):
        up_to = np.concatenate([np.ones((len(before), 1), bool), before], 1)[:, :-1] & (
            np.arange(before.shape[1]) <= probe.cuts[:, None]
        )
        worst = max(gap(scores[before], own[before]), distance(p[up_to], own_p[up_to]))
        yield check(
            name,
            worst <= EXACT,
            f"with {name.replace('-', ' ')} changed, what stands before is {told(worst)}, "
            f"expected at most {EXACT}",
        )
    sums = np.log(np.exp(own_p.astype(np.float64)).sum(-1))
    worst = max(gap(sums, np.zeros_like(sums)), float(own_p.max()))
    yield check("normalised", worst <= SUM, f"probabilities sum to 1 within {worst:.3g}, expected {SUM}")
    picked = -np.take_along_axis(own_p, probe.ids[:, 1:, None], 2)[:, :, 0]
    worst, mean = gap(own, picked), float(np.mean(own.astype(np.float64) - picked))
    yield check(
        "nll-agrees",
        worst <= EXACT and abs(mean) <= BIAS,
        f"nll and logprobs are {told(worst)}, {mean:+.2g} on average, expected at most {EXACT} and {BIAS}",
    )
    mixed = probe.ids.copy()
    mixed[1::2] = rng.integers(0, own_p.shape[-1], mixed[1::2].shape)
    beside = gap(predictor.nll(mixed)[::2], own[::2])
    moved = gap(predictor.nll(probe.ids[::-1].copy())[::-1], own)
    yield check(
        "rows",
        beside <= EXACT and moved <= CROSS,
        f"beside other rows scores are {told(beside)}, in "
        f"another order {told(moved)}; expected at most {EXACT} and {CROSS}",
    )
    worst = gap(predictor.nll(probe.ids), own)
    yield check("repeat", worst <= EXACT, f"scored again: {told(worst)}, expected at most {EXACT}")
    there = [
        (row[first - start - 1 : end - start], nats[first : end + 1])
        for (start, first, end), row in zip(probe.windows, own)
    ]
    found, scored = (np.concatenate(parts) for parts in zip(*there))
    yield alike("state", found, scored, "in a fresh process, among other windows")


def surprise(tokens: np.ndarray, orders: int = 4) -> np.ndarray:
    """float64[n]: nats of each token by what follows its last 0 to orders - 1 tokens elsewhere in the text,
    each context's counts blended with those of the next shorter one as by a Dirichlet prior of weight 1."""
    vocab_size, context = int(tokens.max()) + 1, np.zeros(len(tokens), np.int64)
    p = np.full(len(tokens), 1 / vocab_size)
    for _ in range(orders):
        seen = np.bincount(context)[context]
        _, pairs = np.unique(context * vocab_size + tokens, return_inverse=True)
        hits = np.bincount(pairs)[pairs]
        p = (hits - 1 + p) / seen  # of both counts one is the token itself
        context = np.concatenate([pairs[:1], pairs[:-1]])  # one token longer
    return -np.log(p)


def choose_cut(windows: np.ndarray, doubt: np.ndarray, rng: np.random.Generator) -> int:
    """A place that all windows score: that of the most doubtful score among a random thousand."""
    low, high = (windows[:, 1] - 1 - windows[:, 0]).max(), (windows[:, 2] - windows[:, 0]).min()
    cuts = rng.integers(low, max(high, low + 1), 1000)
    return int(cuts[np.argmax(doubt[rng.choice(windows[:, 0], 1000) + cuts + 1])])


def choose_windows(
    tokens: np.ndarray, nats: np.ndarray, evaluation: Evaluation, vocab_size: int, rng: np.random.Generator
) -> tuple[list[tuple[int, int, np.ndarray]], np.ndarray]:
    """(rounds of hidden futures, each the batches to learn before, its cut and its windows; windows for the
    other probes). No two overlap, and all have full length where there are such. Half of a round's windows
    have a doubtful score at the cut, far below what the text's own counts give: so looking ahead where it
    pays, at one token in a thousand, is found. The rounds of a record that adapts are spread over the whole
    text: it could be honest until it has learnt often enough."""
    windows, doubt = evaluation.windows(len(tokens)), surprise(tokens) - nats
    rows, width = min(evaluation.rows, len(windows)), int((windows[:, 2] - windows[:, 0]).max())
    apart = max(1, -(-width // evaluation.stride))

    def pick(first: int, end: int) -> np.ndarray:
        pool = windows[first:end]
        pool = pool[int(rng.integers(0, min(apart, len(pool)))) :: apart]
        whole = pool[pool[:, 2] - pool[:, 0] == width]
        return rng.permutation(whole if len(whole) else pool)

    most = max(2, min(8, PROBE_BYTES // (4 * vocab_size * width)))
    rounds = []
    if evaluation.state == "adapt":
        batches = -(-len(windows) // rows)
        for stop in sorted(rng.choice(batches, min(batches, FUTURE_ROUNDS), replace=False).tolist()):
            part = pick(stop * rows, (stop + 1) * rows)
            rounds.append((stop, choose_cut(part, doubt, rng), part))
        return rounds, part[:most]
    pool = pick(0, len(windows))
    others = pool[:most]
    while len(pool) and len(rounds) < FUTURE_ROUNDS:
        cut = choose_cut(pool, doubt, rng)
        order = np.argsort(-doubt[pool[:, 0] + cut + 1])
        half = (rows + 1) // 2
        order[half:] = rng.permutation(order[half:])
        rounds.append((0, cut, pool[order[:rows]]))
        pool = pool[order[rows:]]
    return rounds, others


def probe_record(
    result: Result, text: Text, second: Text | None, rng: np.random.Generator
) -> Iterator[Check]:
    """All probes, in a fresh sandbox. Raises SandboxError."""
    job, tokens = result.job, text.tokens
    with job.predictor(compiling=job.evaluation.state == "adapt") as predictor:  # else rounding adds up
        rounds, windows = choose_windows(tokens, result.nats, job.evaluation, predictor.vocab_size, rng)
        yield probe_future(predictor, rounds, result, tokens, rng)
        probe = make_probe(tokens, windows, job.evaluation, predictor.vocab_size, rng)
        yield from probe_calls(predictor, probe, result.nats, rng)
        if second is None:
            yield skip("second-text", "the track has no second text here; --second FILE names one")
        else:
            yield probe_second(predictor, result, text, second)


def by_document(text: Text, nats: np.ndarray) -> float:
    """Geometric mean over documents of their bits per byte. One large or odd document does not decide it, and
    knowing some of the documents by heart shows."""
    starts = np.flatnonzero(text.tokens == text.tokens[0])
    sums = np.add.reduceat(np.nan_to_num(nats), starts)
    sizes = np.array([max(len(document), 1) for document in text.documents])
    return float(np.exp(np.log(np.maximum(sums / LN2 / sizes, 1e-9)).mean()))


def probe_second(predictor: Predictor, result: Result, text: Text, second: Text) -> Check:
    """A model that knows the public text by heart is worse on another of its kind."""
    nats = score(predictor, second.tokens, result.job.evaluation)
    public, hidden = by_document(text, result.nats), by_document(second, nats)
    low, high = result.job.track["second_band"]
    return check(
        "second-text",
        low <= hidden / public <= high,
        f"{hidden:.4f} bits per byte, the mean over {len(second.documents)} documents that are in no "
        f"shard, is {hidden / public:.3f} times that of the public ones, expected {low} to {high}",
    )
