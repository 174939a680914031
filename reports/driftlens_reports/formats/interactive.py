"""The HTML format: one file with interactive charts, plotly inside it once, and no request to anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from driftlens_reports.charts.chart import Drawn
from driftlens_reports.content import ReportContent
from driftlens_reports.formats.page import Extras, digest, render, template_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MOST_ROWS = 2_000
"""Rows of a figure's data table beyond which a browser gets slow; the JSON and CSV formats have them."""


def interactive_page(content: ReportContent, drawn: Mapping[str, Drawn]) -> bytes:
    """The report as one HTML file, always in light colours, as it also prints.

    Args:
        content: what the report says.
        drawn: the drawn charts, by name of the figure.
    """
    from plotly.offline import get_plotlyjs

    scripts = (get_plotlyjs(), template_text("report.js.jinja"))
    return render(
        content,
        Extras(
            dark=False,
            drawn={},
            plots={name: _embedded(entry.figure) for name, entry in drawn.items()},
            scripts=scripts,
            policy=_policy(scripts, drawn),
            shown_data=frozenset(
                figure.name
                for figure in content.figures
                if figure.data is not None and len(figure.data.rows) <= _MOST_ROWS
            ),
        ),
    )


def _policy(scripts: tuple[str, ...], drawn: Mapping[str, Drawn]) -> str:
    """Our two scripts and nothing else; images that plotly makes of a chart, and the styles it sets on elements."""
    sources = [f"'{digest(source)}'" for source in scripts]
    if any(_needs_webgl(entry.figure) for entry in drawn.values()):
        # Plotly's WebGL traces compile their drawing commands; only a report with raw points has any.
        sources.append("'unsafe-eval'")
    return f"script-src {' '.join(sources)}; style-src 'unsafe-inline'; img-src data: blob:"


def _needs_webgl(figure: go.Figure) -> bool:
    return any(trace.type.endswith("gl") for trace in figure.data)


def _embedded(figure: go.Figure) -> str:
    """A figure as JSON that can't end the script element it stands in."""
    text = json.dumps(json.loads(figure.to_json()), ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
