"""Hooks that build the site's pages: formulas as MathML, functions quoted from their source, the gallery of charts."""

from __future__ import annotations

import html
import inspect
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
GALLERY = "<!-- gallery -->"
SOURCE = re.compile(r"<!-- source of ([\w.]+): ([\w, ]+) -->")
"""A module and the names of its functions, whose source replaces the comment."""
SHIM = "https://unpkg.com/iframe-worker/shim"
OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./[^)]+\)")
"""Links to files of the repository that are no pages."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside the site by their text, and insert source code and the gallery."""
    markdown = SOURCE.sub(_quoted, OUTSIDE.sub(r"\1", markdown))
    return markdown.replace(GALLERY, _gallery()) if GALLERY in markdown else markdown


def _quoted(found: re.Match[str]) -> str:
    """Return the source of some functions of a module as a code block."""
    names = found[2].split(", ")
    parts = [inspect.getsource(resolve_name(f"{found[1]}:{name}")) for name in names]
    return "```python\n" + "\n\n".join(parts) + "```"


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which browsers render without scripts."""

    def formula(found: re.Match[str]) -> str:
        is_block = found[2] == "["
        drawn = convert(html.unescape(found[3]), display="block" if is_block else "inline")
        return f'<div class="formula">{drawn}</div>' if is_block else drawn

    return FORMULA.sub(formula, content)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the script of the offline search from the site's assets instead of the network."""
    return output.replace(SHIM, f"{'../' * page.url.count('/')}assets/worker.js")


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    """Do the same for the 404 page, whose paths start at the site's root."""
    return output.replace(SHIM, "/assets/worker.js") if template_name == "404.html" else output


def _gallery() -> str:
    """Return every chart of the demo run: how to read it, the line that draws it, and the live figure."""
    import os

    from plotly.offline import get_plotlyjs

    import driftlens as dl
    from driftlens.utils.errors import DataError
    from driftlens_reports.charts.chart import SECTIONS, charts, sort_by_rank

    place = Path(os.environ.get("DRIFTLENS_DOCS_RUN", "build/demo"))
    if not place.is_dir():
        raise FileNotFoundError(f"{place} is no run to draw the gallery of; `make docs` makes it")
    run = dl.open_run(place)
    parts = [f"<script>{get_plotlyjs()}</script>"]
    for section in SECTIONS:
        for chart in sort_by_rank(entry for entry in charts.values() if entry.section == section):
            call = f"run.plot.{chart.name.replace('-', '_')}()"
            parts.append(f"## {chart.title}\n\n{chart.caption}\n\n*{chart.hint}*\n\n```python\n{call}\n```\n")
            try:
                drawn = chart.draw(run)
            except DataError as missing:
                parts.append(f"The demo's run has no such chart. {html.escape(str(missing))}\n")
                continue
            config = {"displaylogo": False}
            figure = drawn.figure.to_html(full_html=False, include_plotlyjs=False, config=config)
            parts.append(f'<div role="img" aria-label="{html.escape(drawn.alt)}">{figure}</div>\n')
    return "\n".join(parts)
