"""How charts look. On pages colours are variables of the style sheet; pictures have their own."""

from dataclasses import dataclass

import altair as alt

SOLID, DASH = [1, 0], [7, 3]
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'


@dataclass(frozen=True)
class Look:
    """Colours by what they are for."""

    paper: str
    quiet: str  # letters and axes
    line: str  # of the grid
    ink: str
    mark: str
    other: str


PAGE = Look("var(--paper)", "var(--quiet)", "var(--line)", "var(--ink)", "var(--link)", "var(--worse)")
# a picture does not know its page: these have a contrast of about 4.3 with white and with black
PICTURE = Look("none", "#737c87", "#737c8740", "#737c87", "#3374dd", "#bf6a12")
MANY = PICTURE.quiet, PICTURE.other, "#2a8a3e", PICTURE.mark, "#b0509f"  # as many lines of a picture


def finished(chart: alt.LayerChart, look: Look = PAGE, font: str = FONT) -> dict:
    """The chart in this look, as Vega-Lite. Its layers name their data, which come as "datasets".

    Altair copies what it holds for every layer.
    """
    return (
        chart.configure(font=font, background="transparent", padding=4)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=look.quiet,
            titleColor=look.quiet,
            domainColor=look.line,
            tickColor=look.line,
            gridColor=look.line,
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
            titlePadding=8,
        )
        .configure_title(color=look.quiet, fontSize=12, fontWeight="normal")
        .to_dict()
    )
