"""The trusted scorer: bits per byte of a record by the referee's own count, probes, a proof by compression.

    python records/referee.py score      RECORD
    python records/referee.py prove      RECORD --bytes 4096
    python records/referee.py compress   RECORD FILE [-o FILE.bg]
    python records/referee.py decompress RECORD FILE.bg [-o FILE]

RECORD is a folder with a train_gpt.py that defines load_predictor, and an artifact. The record runs in a
sandbox and sees tokens only; the text, the count of bytes, the sum of nats, the clock and the verdict are
the referee's.
"""

import argparse
import hashlib
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coder import HEAD, Evaluation, bits_per_byte, compress, decompress, others
from common import (
    LN2,
    REPO,
    Check,
    DataError,
    Text,
    Track,
    UsageError,
    check,
    encode,
    exit_code_of,
    load_tokenizer,
    load_track,
    read_bytes,
    read_json,
    schema_errors,
    second_text,
    skip,
    tokenizer_path,
    validation_text,
    write_whole,
)
from sandbox import Limits, NoSandbox, Predictor, SandboxError

EXACT = 0.02            # nats between two calls of one shape in one process
CALL_TOKENS = 1 << 22   # of one call, rows times window
CROSS = 0.5             # nats at one token where rounding differs: compiled or not, in another row
CROSS_MEAN = 0.002      # nats on average there: with rounding, less than a track's least gain
ROUNDING = 0.02         # standard deviation of one token there, in bfloat16 (0.012 measured)
BIAS = 0.001            # nats between nll and logprobs on average, in one process
SUM = 1e-3              # how far from 1 probabilities may sum
PROBE_BYTES = 1 << 25   # of one answer with whole distributions
FUTURE_ROUNDS = 16      # calls with hidden futures
LEAST_PROOF = 16        # bytes of text
PROOF = 0.005           # how much larger than the model's nats the proof may be
PROOF_BYTES = 8         # and by how many bytes more: the coder ends on whole words


@dataclass(frozen=True)
class Job:
    """A record and how to run it."""
    track: Track
    script: Path
    artifact: Path
    evaluation: Evaluation
    data: Path
    tokenizer_path: Path
    device: str
    trust: bool = False
    compiling: bool = True
    second: Path | None = None
    limits: Limits = Limits()

    @property
    def name(self) -> bytes:
        """Eight bytes that tell records apart."""
        digest = hashlib.sha256()
        for path in (self.script, self.artifact):
            digest.update(hashlib.sha256(read_bytes(path)).digest())
        return digest.digest()[:8]

    def predictor(self, compiling: bool = False) -> Predictor:
        """A fresh sandbox."""
        return Predictor(self.script, self.artifact, self.track["imports"], self.device, self.trust,
                         compiling and self.compiling, self.limits)


def find_evaluation(record: Path) -> Evaluation:
    """How a record says that it is to be scored; without a submission.json, windows of size 0 that
    with_windows fills in. Raises DataError."""
    submission = record / "submission.json"
    if not submission.exists():
        return Evaluation(0, 0, 32)
    value = read_json(submission)
    errors = [error for error in schema_errors(value, "submission") if error.startswith("evaluation")]
    if errors or "evaluation" not in value:
        raise DataError(f"{submission}: {(errors or ['evaluation is missing'])[0]}")
    found = Evaluation(**value["evaluation"])
    if found.stride > found.window or found.rows * found.window > CALL_TOKENS:
        # a longer stride would leave tokens out, a larger call would fill the referee's memory
        raise DataError(f"{submission}: evaluation is {found}, expected a stride of at most the window, and "
                        f"rows * window of at most {CALL_TOKENS}")
    return found


def find_job(
    record: Path,
    track: Path | None = None,
    artifact: Path | None = None,
    data: Path = REPO / "data",
    **options,
) -> Job:
    """The job of a record folder. Without a submission.json windows are as long as the predictor takes.
    Raises DataError, UsageError."""
    if not record.is_dir():
        raise DataError(f"{record}: no such folder")
    folder = track or record.resolve().parent
    if not (folder / "track.json").exists():
        raise DataError(f"{folder}: holds no track.json; --track records/track_10min_floppy names the track")
    rules = load_track(folder)
    if artifact is None:
        found = sorted(record.glob("model_seed*.int8.ptz")) or sorted(record.glob("model*"))
        if not found:
            raise UsageError(f"{record}: holds no model_seed<N>.int8.ptz; --artifact names the file")
        artifact = found[0]
    evaluation = find_evaluation(record)
    script = record / "train_gpt.py"
    for path in (script, artifact):
        read_bytes(path)
    limits = Limits(seconds=2 * rules["eval_seconds"] + 300)     # probes of a record that adapts score again
    return Job(rules, script, artifact, evaluation, data, tokenizer_path(rules, data, record),
               **{"limits": limits, "device": rules["device"]} | options)


# --- score ------------------------------------------------------------------------------------------------

def read_batches(tokens: np.ndarray, evaluation: Evaluation) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(windows, ids) of each call. All calls have one shape: rows of zeros fill the last one up."""
    windows = evaluation.windows(len(tokens))
    rows = min(evaluation.rows, len(windows))
    for at in range(0, len(windows), rows):
        part = windows[at:at + rows]
        ids = evaluation.read(tokens, part)
        yield part, np.pad(ids, ((0, rows - len(ids)), (0, 0)))


def score(
    predictor: Predictor, tokens: np.ndarray, evaluation: Evaluation, batches: range | None = None
) -> np.ndarray:
    """float64[n]: nats of each token, written once; the first, and what is in no batch of `batches` (default:
    all), stays nan."""
    nats = np.full(len(tokens), np.nan)
    for number, (windows, ids) in enumerate(read_batches(tokens, evaluation)):
        if batches is not None and number not in batches:
            continue
        found = predictor.nll(ids)
        for (start, first, end), row in zip(windows, found):
            assert np.isnan(nats[first:end + 1]).all(), "a token is scored once"
            nats[first:end + 1] = row[first - start - 1:end - start]
        if evaluation.state == "adapt":
            predictor.adapt(ids[:len(windows)])       # every token of it has its score by now
    return nats


def with_windows(job: Job, predictor: Predictor) -> Job:
    """The job with windows as long as the predictor takes, where nothing was declared."""
    if job.evaluation.window:
        return job
    window = min(predictor.max_len, 4096)
    state = "adapt" if predictor.adapts else "none"
    return replace(job, evaluation=Evaluation(window, window, max(1, 16384 // window), state))


@dataclass(frozen=True)
class Result:
    """A score by the referee."""
    job: Job
    nats: np.ndarray
    bpb: float
    loss: float
    seconds: float          # of the referee's clock, without starting the process
    said: str               # the last that the record wrote to stdout


def score_record(job: Job, text: Text) -> tuple[Result, list[Check]]:
    """Score the whole text in a sandbox. Raises SandboxError, NoSandbox."""
    with job.predictor(compiling=True) as predictor:
        job = with_windows(job, predictor)
        checks = [
            check(
                "contract",
                predictor.vocab_size > int(text.tokens.max())
                and predictor.max_len >= job.evaluation.window
                and (job.evaluation.state == "none" or predictor.adapts),
                f"vocab_size {predictor.vocab_size}, max_len {predictor.max_len}, adapt {predictor.adapts}; "
                f"expected a vocabulary above {int(text.tokens.max())} and what {job.evaluation} needs",
            )
        ]
        if checks[0].verdict == "FAIL":
            return Result(job, np.full(len(text.tokens), np.nan), np.nan, np.nan, 0.0, ""), checks
        began = time.monotonic()
        nats = score(predictor, text.tokens, job.evaluation)
        seconds, said = time.monotonic() - began, predictor.said
    good = np.isfinite(nats[1:]).all() and (nats[1:] >= -SUM).all()
    checks.append(
        check(
            "finite",
            bool(good),
            f"nats from {nats[1:].min():.6g} to {nats[1:].max():.6g}, expected finite "
            "numbers, none below 0",
        )
    )
    total = float(nats[1:].sum())
    limit = job.track["eval_seconds"]
    checks.append(
        check("eval-time", seconds <= limit, f"scored in {seconds:.1f} s, expected at most {limit} s")
    )
    return Result(job, nats, bits_per_byte(total, text.bytes), total / (len(nats) - 1), seconds, said), checks


# --- probes -----------------------------------------------------------------------------------------------

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
    ids: np.ndarray         # int64[R, T+1]
    cuts: np.ndarray        # the last place that all three share
    later: np.ndarray
    next: np.ndarray

    @property
    def before(self) -> np.ndarray:
        """bool[R, T]: scores of targets up to the cut."""
        return np.arange(self.ids.shape[1] - 1) < self.cuts[:, None]


def make_probe(tokens: np.ndarray, windows: np.ndarray, evaluation: Evaluation, vocab_size: int,
               rng: np.random.Generator) -> Probe:
    ids = evaluation.read(tokens, windows)
    cuts = np.array([rng.integers(first - 1 - start, end - start) for start, first, end in windows])
    after = np.arange(ids.shape[1]) - cuts[:, None]
    changed = (ids + rng.integers(1, vocab_size, ids.shape)) % vocab_size
    return Probe(windows, ids, cuts, np.where(after > 0, changed, ids), np.where(after == 1, changed, ids))


def probe_future(predictor: Predictor, rounds: list[tuple[int, int, np.ndarray]], result: Result,
                 tokens: np.ndarray, rng: np.random.Generator) -> Check:
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
        later[:, cut + 1:] = rng.integers(0, predictor.vocab_size, later[:, cut + 1:].shape)
        logprobs = predictor.logprobs(later[:, :-1], cut, cut + 1)[:, 0]
        found += (-np.take_along_axis(logprobs, ids[:, cut + 1:cut + 2], 1)[:, 0]).tolist()
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
            np.arange(before.shape[1]) <= probe.cuts[:, None])
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
    yield check("nll-agrees", worst <= EXACT and abs(mean) <= BIAS, f"nll and logprobs are {told(worst)}, "
                f"{mean:+.2g} on average, expected at most {EXACT} and {BIAS}")
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
    there = [(row[first - start - 1:end - start], nats[first:end + 1])
             for (start, first, end), row in zip(probe.windows, own)]
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
        p = (hits - 1 + p) / seen           # of both counts one is the token itself
        context = np.concatenate([pairs[:1], pairs[:-1]])       # one token longer
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
        pool = pool[int(rng.integers(0, min(apart, len(pool))))::apart]
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
    with job.predictor(compiling=job.evaluation.state == "adapt") as predictor:     # else rounding adds up
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


# --- proof ------------------------------------------------------------------------------------------------

def proof_text(text: Text, size: int, rng: np.random.Generator) -> bytes:
    """So many bytes of real validation text from the start of a random document on."""
    whole = b"".join(text.documents)
    starts = np.cumsum([0, *map(len, text.documents)])[:-1]
    fitting = [start for start in starts if start + size <= len(whole)] or [0]
    start = int(rng.choice(fitting))
    return whole[start:start + size].decode(errors="ignore").encode()


def prove(job: Job, text: Text, size: int, rng: np.random.Generator) -> Iterator[Check]:
    """Compress real text, decompress it in a fresh sandbox, compare. Raises SandboxError."""
    if size < LEAST_PROOF:
        raise UsageError(f"--bytes {size}: expected {LEAST_PROOF} at least")
    tokenizer, sample = load_tokenizer(job.tokenizer_path), proof_text(text, size, rng)
    try:
        with job.predictor() as predictor:
            job = with_windows(job, predictor)
            packed, coded = compress(predictor, job.evaluation, tokenizer, job.name, sample)
        with job.predictor() as predictor:
            back = decompress(predictor, job.evaluation.state, tokenizer, job.name, packed)
    except DataError as error:
        yield check("proof", False, str(error))
        return
    yield check(
        "proof",
        back == sample,
        f"{len(sample)} bytes of validation text came back from {len(packed)}, " "expected the same",
    )
    with job.predictor() as predictor:
        nats = float(score(predictor, encode(tokenizer, [sample]).tokens, job.evaluation)[1:].sum())
    payload, model = len(packed) - HEAD.size, nats / np.log(2) / 8
    yield check(
        "proof-size",
        abs(payload - model) <= PROOF * model + PROOF_BYTES,
        f"{payload} bytes coded, {model:.1f} by nll, "
        f"{coded / np.log(2) / 8:.1f} by logprobs, expected within "
        f"{PROOF:.1%} and {PROOF_BYTES} bytes; " + table(sample, payload),
    )


def table(text: bytes, size: int) -> str:
    """A size beside those of well-known programs."""
    rows = {"bytes": len(text), **others(text), "this model": size}
    return ", ".join(
        f"{name} {value} ({8 * value / max(len(text), 1):.3f} bits per byte)" for name, value in rows.items()
    )


# --- all of it --------------------------------------------------------------------------------------------

def referee(job: Job, text: Text, proof_bytes: int, rng: np.random.Generator) -> Iterator[Check | Result]:
    """Score, probes and proof; the Result comes first. What the sandbox ends is one FAIL, and the end."""
    try:
        result, checks = score_record(job, text)
        yield result
        yield from checks
        if any(line.verdict == "FAIL" for line in checks):
            return
        tokenizer = load_tokenizer(job.tokenizer_path)
        yield from probe_record(result, text, second_text(job.track, tokenizer, job.second), rng)
        if proof_bytes:
            yield from prove(result.job, text, proof_bytes, rng)
        yield check("sandbox", True, "within its limits, expected so")
    except SandboxError as error:
        yield check("sandbox", False, f"{error.kind}: {error}")


# --- command line -----------------------------------------------------------------------------------------

def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("score", "score the track's validation text and probe the record"),
                        ("prove", "compress real validation text and decompress it in a fresh sandbox"),
                        ("compress", "compress a text file by the record's probabilities"),
                        ("decompress", "and back")):
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument(
            "record", type=Path, metavar="RECORD", help="folder with train_gpt.py and an artifact"
        )
        command.add_argument(
            "--track", type=Path, help="folder with track.json (default: the record's parent)"
        )
        command.add_argument("--artifact", type=Path, help="(default: the record's model_seed<N>.int8.ptz)")
        command.add_argument(
            "--data", type=Path, default=REPO / "data", help="folder with datasets/ and tokenizers/"
        )
        command.add_argument("--device", default=argparse.SUPPRESS, help="cpu or cuda (default: the track's)")
        command.add_argument(
            "--trust", action="store_true", help="run the record without a sandbox where there is none"
        )
        if name in ("score", "prove"):
            command.add_argument(
                "--documents", type=Path, help="the validation text, as --second (default: from shards)"
            )
        if name == "score":
            command.add_argument(
                "--second", type=Path, help="second text: a JSON string a line, one for a document"
            )
            command.add_argument("--eager", action="store_true", help="without torch.compile")
        if name == "prove":
            command.add_argument(
                "--bytes", type=int, default=4096, metavar="N", help="of text (default: 4096)"
            )
        if name in ("compress", "decompress"):
            command.add_argument("file", type=Path, metavar="FILE")
            command.add_argument("-o", "--output", type=Path, help="(default: FILE.bg, or FILE without .bg)")
        command.add_argument(
            "--probe-seed", type=int, help="of the random positions (default: drawn, and printed)"
        )
    return parser.parse_args(argv)


def convert(job: Job, args: argparse.Namespace) -> int:
    """compress and decompress."""
    packing, tokenizer = args.command == "compress", load_tokenizer(job.tokenizer_path)
    output = args.output or (
        args.file.with_name(args.file.name + ".bg") if packing else args.file.with_suffix("")
    )
    if output.exists():
        raise UsageError(f"{output}: exists and is never overwritten; -o names another file")
    if not packing and args.output is None and args.file.suffix != ".bg":
        raise UsageError(f"{args.file}: -o names the file to write, since the name does not end in .bg")
    data = read_bytes(args.file)
    with job.predictor() as predictor:
        job = with_windows(job, predictor)
        try:
            if packing:
                made, _ = compress(predictor, job.evaluation, tokenizer, job.name, data)
                print(table(data, len(made)))
            else:
                made = decompress(predictor, job.evaluation.state, tokenizer, job.name, data)
        except DataError as error:
            raise DataError(f"{args.file}: {error}") from None
    write_whole(output, made)
    print(f"{output}: {len(made)} bytes")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    options = {name: getattr(args, name) for name in ("trust", "second", "device") if hasattr(args, name)}
    job = find_job(
        args.record,
        args.track,
        args.artifact,
        args.data,
        compiling=not getattr(args, "eager", False),
        **options,
    )
    try:
        if args.command in ("compress", "decompress"):
            return convert(job, args)
        seed = secrets.randbits(32) if args.probe_seed is None else args.probe_seed
        rng, failed, result = np.random.default_rng(seed), 0, None
        text = validation_text(job.track, args.data, args.record, args.documents)
        print(f"probe_seed: {seed}")
        lines = referee(job, text, 0, rng) if args.command == "score" else prove(job, text, args.bytes, rng)
        for line in lines:
            if isinstance(line, Result):
                result = line
                continue
            print(line, flush=True)
            failed += line.verdict == "FAIL"
        if result:
            print(
                "---",
                f"val_loss: {result.loss:.8f}",
                f"val_bpb: {result.bpb:.8f}",
                f"val_bytes: {text.bytes}",
                f"val_tokens: {len(text.tokens) - 1}",
                f"seconds: {result.seconds:.1f}",
                sep="\n",
            )
        return 1 if failed else 0
    except (SandboxError, NoSandbox) as error:
        raise DataError(str(error)) from None


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
