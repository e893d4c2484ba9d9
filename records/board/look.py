"""How charts look. On pages colours are variables of the style sheet; pictures have their own."""

from dataclasses import dataclass

import altair as alt

SOLID, DASH = [1, 0], [7, 3]


@dataclass(frozen=True)
class Look:
    """Colours by what they are for, and the letters."""

    paper: str
    quiet: str  # letters and axes
    line: str  # of the grid
    mark: str
    font: str


FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
PAGE = Look("var(--paper)", "var(--quiet)", "var(--line)", "var(--link)", FONT)
# a picture does not know its page: these have a contrast of about 4.3 with white and with black
PICTURE = Look("none", "#737c87", "#737c8740", "#3374dd", "sans-serif")


def finished(chart: alt.LayerChart | alt.VConcatChart, look: Look = PAGE) -> dict:
    """The chart in this look, as Vega-Lite. Its layers name their data, which come as "datasets".

    Altair copies what it holds for every layer.
    """
    letters = {"labelColor": look.quiet, "labelFontSize": 12}
    titles = {"titleColor": look.quiet, "titleFontSize": 12, "titleFontWeight": "normal"}
    lines = {"domainColor": look.line, "tickColor": look.line, "gridColor": look.line}
    return (
        chart.configure(font=look.font, background="transparent", padding=4)
        .configure_view(stroke=None)
        .configure_axis(**letters, **titles, **lines, titlePadding=8)
        .configure_legend(**letters, symbolOpacity=1)
        .configure_title(color=look.quiet, fontSize=12, fontWeight="normal")
        .to_dict()
    )
