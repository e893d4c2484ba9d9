"""A comparison as one HTML file, which holds all that it needs."""

from pathlib import Path

from records.archive.metrics import Metrics
from records.board.curves import curves_of, stall_rows
from records.board.documents import render
from records.compare.bands import BETTER, NONE, OTHER, SAME, UNKNOWN, WORSE
from records.compare.comparison import Comparison
from records.compare.words import HEAD, cells, parting_line

TEMPLATE = Path(__file__).resolve().parent / "templates" / "comparison.html"
SIGNS = {
    BETTER: "▲ better",
    WORSE: "▼ worse",
    SAME: "= same",
    OTHER: "≠ differs",
    UNKNOWN: "? not known",
    NONE: "–",
}
CLASSES = {
    UNKNOWN: "none",
    NONE: "none",
    OTHER: "differs",
}  # of rows, where they are not called by their verdict


def environments(runs: list[Metrics]) -> list[list[str]]:
    """What each run's numbers depend on; hashes by their first digits."""
    names = sorted({name for run in runs for name in run.environment})
    rows = [[name, *(run.environment.get(name, NONE)[:16] for run in runs)] for name in names]
    return [["seed", *(str(run.seed) for run in runs)], *rows]


def comparison_page(its: Comparison) -> bytes:
    """The whole document."""
    changes = {
        verdict.capitalize(): [found.measure.label for found in its.rows if found.verdict == verdict]
        for verdict in (WORSE, BETTER)
    }
    curves = curves_of([("base", its.base), ("new", its.new)])
    return render(
        TEMPLATE,
        {"curves": curves.spec},
        its=its,
        verdict=CLASSES.get(its.decisive.verdict, its.decisive.verdict),
        decisive=its.decisive,
        changes=changes,
        head=HEAD,
        rows=[[*cells(found)[:-1], SIGNS[found.verdict]] for found in its.rows],
        classes=[CLASSES.get(found.verdict, found.verdict) for found in its.rows],
        stalls=stall_rows(its.runs),
        partings=[parting_line(found) for found in its.partings],
        curves=curves,
        environment_head=["", *(run.name for run in its.runs)],
        environments=environments(its.runs),
    )
