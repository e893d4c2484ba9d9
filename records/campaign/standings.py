"""The report of a campaign: how arms compare at a budget, and how well smaller budgets predicted that."""

import math
import statistics

from data.files import parse_json, read_bytes
from records.archive.ranks import p_below
from records.campaign.arms import Arm
from records.campaign.runs import ArmRun

ARMS = "arm | runs | bits per byte | sd | difference | sd | p | artifact bytes | steps | operations"
BUDGETS = "budget | arms in common | rank correlation | its best arm | place of that at the largest"
PLACES = "run | nodes, in turn | processor"
Scores = dict[int, float]  # bits per byte by seed


def table(head: str, rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, " | ".join(["---"] * (head.count("|") + 1)), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def scores_of(arm: Arm, seeds: list[int], scored: bool) -> Scores:
    """The scores of the runs that have ended. Raises DataError."""
    found = {seed: ArmRun(arm, seed).bpb(scored) for seed in seeds}
    return {seed: bpb for seed, bpb in found.items() if bpb is not None}


def mean(scores: Scores) -> float:
    """What the arms are sorted by."""
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


def sizes(arm: Arm, scores: Scores) -> list[str]:
    """The largest bytes, steps and operations of all runs."""
    ends = [ArmRun(arm, seed).end() for seed in scores]
    most = {name: max(end.value(name) for end in ends) for name in ("artifact_bytes", "steps", "train_flops")}
    over = " (over)" if any(end.value("budget") == "over" for end in ends) else ""
    return [f"{most['artifact_bytes']:,}{over}", f"{most['steps']:,}", f"{most['train_flops']:.4g}"]


def arms_table(arms: list[Arm], base: str, seeds: list[int], scored: bool) -> str:
    """The arms at one budget, the best first. Raises DataError."""
    scores = {arm.name: scores_of(arm, seeds, scored) for arm in arms}
    rows = []
    for arm in sorted(arms, key=lambda arm: mean(scores[arm.name])):
        own = scores[arm.name]
        cells = [f"`{arm.name}`", f"{len(own)} of {len(seeds)}"]
        if own:
            cells += [f"{mean(own):.4f}", deviation([*own.values()]), *against(own, scores[base])]
            cells += sizes(arm, own)
        rows.append(cells + ["-"] * (10 - len(cells)))
    return table(ARMS, rows)


def without_budget(arm: Arm) -> dict:
    """What the runs of an arm depended on, without their budget of operations."""
    stored = arm.stored()
    return stored | {"settings": stored["settings"] | {"MAX_FLOPS": ""}}


def common_means(small: list[Arm], large: list[Arm], seeds: list[int], scored: bool) -> dict:
    """(mean, mean) by name of the arms that ran at both budgets and differ in nothing else."""
    found = {}
    for one, other in zip(small, large):
        means = mean(scores_of(one, seeds, scored)), mean(scores_of(other, seeds, scored))
        if max(means) < math.inf and without_budget(one) == without_budget(other):
            found[one.name] = means
    return found


def budgets_table(arms_at: dict[float, list[Arm]], seeds: list[int], scored: bool) -> str:
    """How well the order of arms at each smaller budget predicted that at the largest. Raises DataError."""
    from scipy.stats import spearmanr  # a second that other reports need not pay

    *smaller, largest = sorted(arms_at)
    rows = []
    for budget in smaller:
        means = common_means(arms_at[budget], arms_at[largest], seeds, scored)
        cells = [f"{budget:g}", f"{len(means)}"]
        if len(means) > 1:
            by_small, by_large = (sorted(means, key=lambda name: means[name][at]) for at in (0, 1))
            correlation = spearmanr([*means.values()]).statistic
            place = f"{1 + by_large.index(by_small[0])} of {len(means)}"
            cells += [f"{correlation:.2f}", f"`{by_small[0]}`", place]
        rows.append(cells + ["-"] * (5 - len(cells)))
    return table(BUDGETS, rows)


def places_table(arms: list[Arm], seeds: list[int]) -> str:
    """The nodes of a cluster that runs were on; empty if all were run here. Raises DataError."""
    rows = []
    for arm in arms:
        for run in (ArmRun(arm, seed) for seed in seeds):
            if run.places.exists():
                places = [parse_json(line) for line in read_bytes(run.places).splitlines()]
                nodes = [f"{place['host']} {place['node'][:8]}" for place in places]
                processors = sorted({place["processor"] for place in places})
                rows.append([f"`{run}`", ", ".join(nodes), ", ".join(processors)])
    return table(PLACES, rows) if rows else ""
