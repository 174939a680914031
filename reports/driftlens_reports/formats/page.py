"""The HTML formats, of one template: interactive, with plotly inside it, and light, with pictures and no script."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from driftlens.findings.reading import signs, unbroken, with_code, written
from driftlens.findings.table import Table
from driftlens.runs.run import DriftRun
from driftlens_reports.charts.chart import Drawn
from driftlens_reports.charts.theme import palette
from driftlens_reports.content import ReportContent
from driftlens_reports.formats.headline import block
from driftlens_reports.paper.exhibit import ExhibitOptions

if TYPE_CHECKING:
    import jinja2
    import plotly.graph_objects as go
    from markupsafe import Markup

_LONG = 24
"""Letters beyond which a column's texts may break anywhere."""
_MOST_ROWS = 2_000
"""Rows of a figure's data table beyond which a browser gets slow; the JSON and CSV formats have them."""
_MOST_BYTES = 950_000
_OPENED = ("layers",)
"""Sections that are open behind the verdict; a click opens the others: a page has at most 8,000 pixels."""
_BUDGETS = (16_000, 6_000, 0)
"""Cells of figures' data tables in one light page; the next budget is tried while the page is too large."""

_EXHIBITS = {
    "accuracy": "intro",
    "layer-drift": "drift",
    "decomposition": "decomposition",
    "contributions-heatmap": "contributions",
    "amplification": "amplification",
    "flips": "output-drift",
    "scatter": "scatter-grid",
}
"""Charts, and the paper figures that a page without scripts shows in their place."""


def interactive_page(
    content: ReportContent, drawn: Mapping[str, Drawn], dark: Mapping[str, go.Figure] | None = None
) -> bytes:
    """The report as one HTML file that asks the network for nothing; of `dark` figures it holds what differs."""
    from plotly.offline import get_plotlyjs

    scripts = (get_plotlyjs(), pathlib.Path(__file__).with_name("report.js").read_text(encoding="utf-8"))
    sources = [f"'{digest(source)}'" for source in scripts]
    if any(trace.type.endswith("gl") for entry in drawn.values() for trace in entry.figure.data):
        # Plotly's WebGL traces compile their drawing commands; only a full report has any.
        sources.append("'unsafe-eval'")
    # Two scripts of ours, and what plotly needs: images that it makes of charts, and styles that it sets.
    policy = f"script-src {' '.join(sources)}; style-src 'unsafe-inline'; img-src data: blob:"
    plots = {name: json.loads(entry.figure.to_json()) for name, entry in drawn.items()}
    for name, figure in (dark or {}).items():
        plots[name]["dark"] = _other(plots[name], json.loads(figure.to_json()))
    shown = {name for name, table in _data_tables(content).items() if len(table.rows) <= _MOST_ROWS}
    return _render(content, shown, plots=plots, scripts=scripts, policy=policy)


def _other(light: Any, dark: Any) -> Any:
    """What of `dark` differs, in the same nesting; lists of traces and annotations by position, others whole."""
    if isinstance(dark, list) and any(isinstance(entry, dict) for entry in dark):
        light, dark = dict(enumerate(light)), dict(enumerate(dark))
    if not isinstance(light, dict) or not isinstance(dark, dict):
        return dark
    return {key: _other(light.get(key), value) for key, value in dark.items() if value != light.get(key)}


def light_page(content: ReportContent, pictures: Mapping[str, Picture]) -> bytes:
    """Return the page without a script. If too large for a mail, it drops data tables, then its largest pictures."""
    pictures = dict(pictures)
    page = b""
    for cells in _BUDGETS:
        page = _render(content, _fitting(content, cells), pictures=pictures)
        if len(page) <= _MOST_BYTES:
            return page
    while pictures and len(page) > _MOST_BYTES:
        del pictures[max(pictures, key=lambda name: len(pictures[name].source))]
        page = _render(content, set(), pictures=pictures)
    return page


@dataclass(frozen=True)
class Picture:
    """A picture inside a page, as a data address, with its caption."""

    source: str
    caption: str


def pictures_of(run: DriftRun, names: Iterable[str]) -> dict[str, Picture]:
    """Return the paper figures that show what charts of these names show, without those that the run can't fill."""
    from driftlens_reports.paper.export import draw  # with matplotlib, which an interactive page lacks

    pictures = {}
    for name in names:
        if name in _EXHIBITS:
            drawn = draw(_EXHIBITS[name], [run], ExhibitOptions())
            if len(drawn.data):
                encoded = base64.b64encode(drawn.content("png")).decode()
                pictures[name] = Picture(f"data:image/png;base64,{encoded}", drawn.caption)
    return pictures


def _data_tables(content: ReportContent) -> dict[str, Table]:
    return {figure.name: figure.data for figure in content.figures if figure.data is not None}


def _fitting(content: ReportContent, cells: int) -> set[str]:
    """The figures whose numbers fit into so many cells, the smallest tables first."""
    sizes = {name: len(table.rows) * len(table.columns) for name, table in _data_tables(content).items()}
    in_order = sorted(sizes, key=lambda name: sizes[name])
    return {
        name for name, end in zip(in_order, accumulate(map(sizes.get, in_order)), strict=True) if end <= cells
    }


def _render(
    content: ReportContent,
    shown_data: set[str],
    *,
    pictures: Mapping[str, Picture] | None = None,
    plots: Mapping[str, Any] | None = None,
    scripts: Sequence[str] = (),
    policy: str = "",
) -> bytes:
    """The page; everything that came with the run is escaped. `policy` is what scripts need."""
    from markupsafe import Markup

    environment = _environment()
    themes = {"light": palette(False), "dark": palette(True)}
    style = environment.get_template("report.css.jinja").render(**themes)
    policy = policy or f"style-src '{digest(style)}'; img-src data:"
    text = environment.get_template("report.html.jinja").render(
        content=content,
        # Style sheet and scripts are ours, not the run's: they are not escaped.
        style=Markup(style),
        scripts=[Markup(source) for source in scripts],
        plots=plots or {},
        policy=f"default-src 'none'; {policy}; base-uri 'none'; form-action 'none'",
        headline=block(content.verdict.headline),
        pictures=pictures or {},
        shown_data=shown_data,
        opened=_OPENED,
    )
    return text.encode()


def digest(source: str) -> str:
    """The hash by which a policy allows one inline style sheet or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=lambda name: not (name or "").endswith(".css.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.globals.update(zip=zip)
    environment.filters.update(anchor=_anchor, looks=_looks, prose=_prose, signs=signs, written=written)
    return environment


def _prose(text: str) -> Markup:
    """A sentence, escaped, with what stands between backticks as code."""
    from markupsafe import Markup, escape

    html = with_code(signs(text), lambda part: unbroken(str(escape(part))), Markup("<code>{}</code>").format)
    return Markup(html)


def _anchor(name: str) -> str:
    """A name as an id of an element."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def _looks(table: Table) -> list[str]:
    """Style classes of each column that is shown; empty for numbers."""
    _, *texts = table.texts()
    is_long = [any(len(row[index]) > _LONG for row in texts) for index, _ in enumerate(table.shown())]
    looks = ["text long" if long else "text" for long in is_long]
    return [look if shown.kind == "text" else "" for look, shown in zip(looks, table.shown(), strict=True)]
