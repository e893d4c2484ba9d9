"""Pages: one HTML file each, with all that it needs inside, for disks and for servers without a network."""

import html
import itertools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from records.archive.metrics import Metrics
from records.compare.noise import BETTER, OTHER, SAME, UNKNOWN, WORSE

WEB = Path(__file__).resolve().parent / "web"
SCRIPTS = ("uPlot.iife.min.js", "page.js", "curves.js", "board.js")
BUCKETS, ALL_BUCKETS = 400, 4000  # of a curve, and of that kind of curve in a page: ten runs stay below 1 MB
MEANS = 120  # points of a curve's means
NO_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
SIGNS = {BETTER: "▲ better", WORSE: "▼ worse", SAME: "= same", OTHER: "≠ differs", UNKNOWN: "–"}

escape = html.escape


def document(title: str, body: str, data: dict) -> str:
    """A whole page; `data` is what the scripts draw."""
    style = (WEB / "uPlot.min.css").read_text() + (WEB / "page.css").read_text()
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    scripts = [(WEB / name).read_text() for name in SCRIPTS]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{NO_NETWORK}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{escape(title)}</title><link rel="icon" href="data:,">',
            f"<style>{style}</style></head><body>",
            body,
            f'<script type="application/json" id="data">{numbers}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def encoded(text: str) -> bytes:
    """A page's bytes. What is no character, as half of a pair in somebody's JSON, becomes a question mark."""
    return text.encode(errors="replace")


def table(head: list[str], rows: Iterable[tuple[str, list[str]]], name: str, number: range = range(0)) -> str:
    """A table of texts that scrolls by itself. rows: (class, cells); `number`: the columns of numbers."""

    def cell(at: int, text: str) -> str:
        kind = " ".join(["n"] * (at in number) + ["v"] * (at == len(head) - 1))
        tag = 'th scope="row"' if at == 0 else "td"
        return f'<{tag} class="{kind}"><bdi>{escape(text)}</bdi></{tag[:2]}>'

    top = "".join(
        f'<th scope="col"{" class=n" if at in number else ""}><bdi>{escape(one)}</bdi></th>'
        for at, one in enumerate(head)
    )
    body = "".join(
        f'<tr class="{kind}">{"".join(cell(*one) for one in enumerate(cells))}</tr>' for kind, cells in rows
    )
    box = f'class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"'
    judged = ' class="judged"' if head[-1] == "verdict" else ""
    return f"<div {box}><table{judged}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


# --- curves -----------------------------------------------------------------------------------------------


def short(values: np.ndarray, digits: int = 5) -> list[float | int | None]:
    """Numbers as JSON should have them: few digits, None for those that are not finite."""
    rounded = [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
    return [int(value) if value is not None and value == int(value) else value for value in rounded]


def thin(values: np.ndarray, buckets: int) -> np.ndarray:
    """Places of the first and the last value, and of the least and the greatest of each bucket, int[n]."""
    if len(values) <= 2 * buckets:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), buckets + 1).astype(int)
    low, high = (np.where(np.isfinite(values), values, worst) for worst in (np.inf, -np.inf))
    found = {0, len(values) - 1}
    for start, end in itertools.pairwise(edges):
        found |= {start + int(np.argmin(low[start:end])), start + int(np.argmax(high[start:end]))}
    return np.array(sorted(found))


def curve(run: Metrics, places: np.ndarray, values: np.ndarray) -> dict:
    """{x: steps, s: seconds, y: values}; `values`: at the places."""
    return {"x": (places + 1).tolist(), "s": short(run.table["train_seconds"][places]), "y": short(values)}


def means(run: Metrics, values: np.ndarray, mean: Callable = np.mean) -> dict:
    """The mean of each of MEANS buckets, at its middle; nothing where a run is too short for that.

    `every`: how many steps are in a bucket, at most.
    """
    if len(values) < 2 * MEANS:
        return curve(run, np.arange(0), values[:0])
    parts = np.array_split(np.arange(len(values)), MEANS)
    middles = np.array([part[len(part) // 2] for part in parts])
    return {"every": len(parts[0]), **curve(run, middles, np.array([mean(values[part]) for part in parts]))}


def scores(run: Metrics, partial: bool | None) -> dict:
    """The curve of the validations on a part of the text, or of those on all of it; None: of none."""
    chosen = [val for val in run.vals if val["partial"] == partial and 0 < val["step"] <= run.steps]
    places = np.array([int(val["step"]) - 1 for val in chosen], int)
    return curve(run, places, np.array([val["val_bpb"] for val in chosen]))


def run_data(run: Metrics, side: int, place: int, of: int, buckets: int) -> dict:
    """What curves.js draws of a run. Step times are milliseconds."""
    every = np.arange(run.steps)
    losses, times, rates = run.table["train_loss"], 1e3 * run.seconds, run.table["lr_mul"]
    seen, slow, quick = thin(losses, buckets), np.flatnonzero(run.stalls), thin(times, buckets)
    some = any(val["partial"] for val in run.vals)
    few = thin(rates, MEANS // 2) if not np.isnan(rates).all() else every[:0]
    return {
        "name": run.name,
        "side": side,
        "place": place,
        "of": of,
        "steps": run.steps,
        "seconds": short(run.table["train_seconds"][-1:])[0],  # as the last point has them
        "tokens": run.tokens_per_step,
        "flops": run.flops_per_step,
        "loss": curve(run, seen, losses[seen]),
        "mean": means(run, losses),
        "val": scores(run, some),
        "whole": scores(run, not some) if some else scores(run, None),
        "time": curve(run, quick, np.maximum(times[quick], 1e-3)),
        "median": means(run, np.maximum(times, 1e-3), np.median),
        "stalls": curve(run, slow, times[slow]),
        "rate": curve(run, few, rates[few]),
    }


def runs_data(sides: list[tuple[str, list[Metrics]]]) -> dict:
    """The runs of all sides, and the sides' titles."""
    buckets = max(50, min(BUCKETS, ALL_BUCKETS // max(1, sum(len(runs) for _, runs in sides))))
    found = [
        run_data(run, side, place, len(runs), buckets)
        for side, (_, runs) in enumerate(sides)
        for place, run in enumerate(runs)
    ]
    return {"sides": [title for title, _ in sides], "runs": found}


CHARTS = {
    "loss": "Loss of training",
    "bpb": "Bits per byte of validation",
    "time": "Step times and stalls",
    "rate": "Learning rate",
}

NOTES = {
    "bpb": "Before the export. A ring is a score on the whole text where the others are on a part of it.",
    "time": "A ring is a stall, a step that took far longer than those around it.",
}


def charts() -> str:
    """Where curves.js puts the curves, and what switches them."""
    parts = ["<div data-controls></div>"]
    for name, title in CHARTS.items():
        note = f'<p class="quiet">{NOTES[name]}</p>' if name in NOTES else ""
        chart = f'<div class="chart" data-chart="{name}"></div>'
        parts.append(f"<section><header><h3>{title}</h3></header>{note}{chart}</section>")
    return "".join(parts)


# --- a comparison -----------------------------------------------------------------------------------------


def differing(title: str, lines: list[list[str]]) -> str:
    if not lines:
        return f"<h3>{title}</h3><p class=quiet>The same.</p>"
    return f"<h3>{title}</h3>" + table(["name", "base", "new"], [("", line) for line in lines], title)


def environments(runs: list[Metrics]) -> str:
    """A table of what each run's numbers depend on."""
    names = sorted({name for run in runs for name in run.environment})
    rows = [("", [name, *(run.environment.get(name, UNKNOWN)[:16] for run in runs)]) for name in names]
    rows.insert(0, ("", ["seed", *(str(run.seed) for run in runs)]))
    return table(["", *(run.name for run in runs)], rows, "environment of each run")


def summary(its) -> str:
    """One line: what got worse and what better."""
    words = []
    for verdict in (WORSE, BETTER):
        found = [one.row.label for one in its.rows if one.verdict == verdict]
        if found:
            words.append(f"<b>{verdict.capitalize()} by more than noise:</b> {escape(', '.join(found))}.")
    kind = WORSE if its.worse else BETTER if words else SAME
    return f'<p class="verdict {kind}">{" ".join(words) or "No difference is more than noise."}</p>'


def stalls(runs: list[Metrics]) -> str:
    told = [one for run in runs for one in run.stalled]
    rows = [("", [one["run"], f"{one['step']:,}", f"{one['seconds']:.1f} s"]) for one in told]
    words = "<p class=quiet>Steps that took far longer than those around them. No speed counts them.</p>"
    return words + (table(["run", "step", "took"], rows, "stalls", range(1, 3)) if rows else "<p>None.</p>")


def comparison_page(its, cells: Callable, parting: Callable) -> str:
    """The page of a records.compare.Comparison. `cells` of a row and `parting` are its words for people."""
    names = [", ".join(run.name for run in side) for side in (its.base, its.new)]
    rows = []
    for found in its.rows:
        *told, verdict = cells(found)
        kind = {UNKNOWN: "none", OTHER: "differs"}.get(verdict, verdict)
        rows.append((kind, [*told, SIGNS[verdict]]))
    head = ["", "base", "new", "difference", "noise", "verdict"]
    partings = [f"<li>{escape(parting(one))}</li>" for one in its.partings]
    body = [
        f"<main><h1>{len(its.new)} new against {len(its.base)} base</h1>",
        f"<p class=lead>base: <bdi>{escape(names[0])}</bdi><br>new: <bdi>{escape(names[1])}</bdi></p>",
        *(f"<p><bdi>{escape(run.name)}</bdi> {run.state}.</p>" for run in its.runs if not run.final),
        summary(its),
        "<h2>What differs before the start</h2>",
        differing(its.settings_title.capitalize(), its.settings),
        differing("Environment", its.environment),
        "<h2>Numbers</h2><p class=quiet>Means of the runs; speeds are medians over each run's steady steps. "
        "A difference within the noise has no colour.</p>",
        table(head, rows, "numbers", range(1, 5)),
        f"<h2>Stalls</h2>{stalls(its.runs)}",
        "<h2>Where losses part</h2>",
        f"<ul>{''.join(partings)}</ul>" if partings else "<p class=quiet>No seed is on both sides.</p>",
        f"<h2>Curves</h2>{charts()}",
        f"<h2>Environment of each run</h2>{environments(its.runs)}</main>",
    ]
    data = runs_data([("Base", its.base), ("New", its.new)])
    return document(f"{names[1]} against {names[0]}", "".join(body), data)
