"""The report of a campaign: how its variants compare."""

import math
import statistics

from records.archive.verdicts import p_below
from records.campaign.runs import SeedRun
from records.campaign.variants import Variant

VARIANTS = "variant | runs | bits per byte | sd | difference | sd | p | artifact bytes | steps | operations"
Scores = dict[int, float]  # bits per byte by seed


def table(head: str, rows: list[list[str]]) -> str:
    """In Markdown; cells that a row lacks are a dash."""
    columns = head.count("|") + 1
    full = [row + ["-"] * (columns - len(row)) for row in rows]
    lines = [head, " | ".join(["---"] * columns), *(" | ".join(row) for row in full)]
    return "".join(f"| {line} |\n" for line in lines)


def scores_of(variant: Variant, seeds: list[int], scored: bool) -> Scores:
    """The scores of the runs that have ended. Raises DataError."""
    found = {seed: SeedRun(variant, seed).bpb(scored) for seed in seeds}
    return {seed: bpb for seed, bpb in found.items() if bpb is not None}


def mean(scores: Scores) -> float:
    """What variants are sorted by."""
    return statistics.mean(scores.values()) if scores else math.inf


def deviation(values: list[float]) -> str:
    return f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-"


def against(scores: Scores, base: Scores) -> list[str]:
    """The difference to the base, paired by seed, and Welch's one-sided p that there is no gain."""
    pairs = [scores[seed] - base[seed] for seed in scores if seed in base]
    if scores is base or not pairs:
        return ["-", "-", "-"]
    enough = min(len(scores), len(base)) > 1
    p = f"{p_below([*scores.values()], [*base.values()]):.2g}" if enough else "-"
    return [f"{statistics.mean(pairs):+.4f}", deviation(pairs), p]


def sizes(runs: list[SeedRun]) -> list[str]:
    """The largest bytes, steps and operations of runs that have ended."""
    names = ("artifact_bytes", "steps", "train_flops")
    artifact, steps, flops = (max(run.end().value(name) for run in runs) for name in names)
    over = " (over)" if any(run.is_over() for run in runs) else ""
    return [f"{artifact:,}{over}", f"{steps:,}", f"{flops:.4g}"]


def variants_table(variants: list[Variant], base: str, seeds: list[int], scored: bool) -> str:
    """The variants at one budget, the best first. Raises DataError."""
    scores = {variant.name: scores_of(variant, seeds, scored) for variant in variants}
    rows = []
    for variant in sorted(variants, key=lambda variant: mean(scores[variant.name])):
        own = scores[variant.name]
        cells = [f"`{variant.name}`", f"{len(own)} of {len(seeds)}"]
        if own:
            cells += [f"{mean(own):.4f}", deviation([*own.values()]), *against(own, scores[base])]
            cells += sizes([SeedRun(variant, seed) for seed in own])
        rows.append(cells)
    return table(VARIANTS, rows)
