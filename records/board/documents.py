"""Documents: Jinja2 templates that escape all they are given, one style sheet, and the program of the charts.

A document needs no network address. Vega, Vega-Lite and vega-embed come from vl-convert as one program, which
a document holds inside, or a site keeps once as PROGRAM beside its pages.
"""

from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

HERE = Path(__file__).resolve().parent
PROGRAM = "charts.js"  # in a site


@cache
def program() -> str:
    """What draws all charts of a document; three seconds."""
    import vl_convert

    text = f"{vl_convert.javascript_bundle()}\n{(HERE / 'embed.js').read_text()}"
    return text.replace("</script", "<\\/script")


def render(template: str, charts: dict[str, dict], program_address: str | None = None, **values) -> bytes:
    """A document from one of the templates. `values`: what it shows, all escaped.

    `charts`: in Vega-Lite, drawn where the template has their names. `program_address`: from the
    document; without it the program stands inside.
    """
    loader = jinja2.FileSystemLoader(HERE / "templates")
    environment = jinja2.Environment(
        autoescape=True, loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    text = environment.get_template(template).render(
        charts=charts,
        style=Markup((HERE / "style.css").read_text()),
        program=None if program_address else Markup(program()),
        program_address=program_address,
        **values,
    )
    # what is no character, as half of a pair in somebody's JSON, becomes a question mark
    return text.encode(errors="replace")


def markdown(text: str) -> Markup:
    """HTML of somebody's Markdown, its headings two levels below those of the page.

    HTML in it is shown as text, and links lead to the web alone.
    """
    from markdown_it import MarkdownIt

    rules = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    rules.validateLink = lambda link: link.startswith(("https://", "http://"))
    tokens = rules.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"
    html = rules.renderer.render(tokens, rules.options, {})
    html = html.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return Markup(html.replace("</table>", "</table></div>"))
