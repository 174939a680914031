"""The HTML formats, of one template: interactive, with plotly inside it, and light, with drawings and no script."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from driftlens.findings.reading import signs, unbroken, with_code, written
from driftlens.findings.table import Table
from driftlens_reports.charts.chart import Drawn
from driftlens_reports.charts.theme import palette
from driftlens_reports.content import ReportContent
from driftlens_reports.formats.headline import block
from driftlens_reports.paper.style import PAGE, PAGE_WIDTH, encode, sheet

if TYPE_CHECKING:
    import jinja2
    import plotly.graph_objects as go
    from markupsafe import Markup
    from matplotlib.figure import Figure

_LONG = 24
"""Letters beyond which a column's texts may break anywhere."""
_MOST_ROWS = 2_000
"""Rows of a figure's data table beyond which a browser gets slow; the JSON and CSV formats have them."""
_MOST_BYTES = 950_000
_OPENED = ("layers",)
"""Sections that are open behind the verdict; a click opens the others: a page has at most 8,000 pixels."""
_BUDGETS = (16_000, 6_000, 0)
"""Cells of figures' data tables in one light page; the next budget is tried while the page is too large."""

_ELEMENTS = {"svg", "g", "defs", "clipPath", "pattern", "path", "rect", "use", "text"}
_PLACES = {
    *("d", "transform", "x", "y", "width", "height", "viewBox"),
    *("href", "clip-path", "id", "patternUnits"),
}
_LOOKS = {
    *("fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray"),
    *("stroke-linecap", "stroke-dashoffset", "stroke-linejoin", "opacity", "text-anchor", "font-size"),
}
"""Style properties that are attributes of SVG too; a page's policy allows attributes, but no styles on elements."""
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_FONT_SIZE = re.compile(r"font:[^;]*?([\d.]+)px")


def interactive_page(
    content: ReportContent, drawn: Mapping[str, Drawn], dark: Mapping[str, go.Figure] | None = None
) -> bytes:
    """The report as one HTML file that asks the network for nothing; of `dark` figures it holds what differs."""
    from plotly.offline import get_plotlyjs

    scripts = (get_plotlyjs(), pathlib.Path(__file__).with_name("report.js").read_text(encoding="utf-8"))
    sources = [f"'{digest(source)}'" for source in scripts]
    if any(trace.type.endswith("gl") for entry in drawn.values() for trace in entry.figure.data):
        # Plotly's WebGL traces compile their drawing commands; only a report with raw points has any.
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


def light_page(content: ReportContent, drawn: Mapping[str, Drawn]) -> bytes:
    """The page without a script; too large for a mail, it drops data tables first, then its largest drawings."""
    drawings = {name: inline_svg(entry.figure, _anchor(name), entry.alt) for name, entry in drawn.items()}
    page = b""
    for cells in _BUDGETS:
        page = _render(content, _fitting(content, cells), drawings=drawings)
        if len(page) <= _MOST_BYTES:
            return page
    while drawings and len(page) > _MOST_BYTES:
        del drawings[max(drawings, key=lambda name: len(drawings[name]))]
        page = _render(content, set(), drawings=drawings)
    return page


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
    drawings: Mapping[str, str] | None = None,
    plots: Mapping[str, Any] | None = None,
    scripts: Sequence[str] = (),
    policy: str = "",
) -> bytes:
    """The page; everything that came with the run is escaped. `policy` is what scripts need."""
    from markupsafe import Markup

    environment = _environment()
    themes = {"light": palette(False), "dark": palette(True)}
    style = environment.get_template("report.css.jinja").render(**themes, twins=_twins())
    policy = policy or f"style-src '{digest(style)}'"
    text = environment.get_template("report.html.jinja").render(
        content=content,
        # Ours, not the run's: the style sheet, drawings and scripts stand as they are.
        style=Markup(style),
        scripts=[Markup(source) for source in scripts],
        plots=plots or {},
        policy=f"default-src 'none'; {policy}; base-uri 'none'; form-action 'none'",
        headline=block(content.verdict.headline),
        drawn={name: Markup(drawing) for name, drawing in (drawings or {}).items()},
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


def _twins() -> dict[str, str]:
    """The dark colour of every colour that drawings have in light, as these write it."""
    shades = []
    for theme in (palette(False), palette(True)):
        roles = [shade for role in theme.roles.values() for shade in role]
        shades.append([theme.ink, theme.quiet, theme.grid, theme.gap, *roles])
    return {light.lower(): dark for light, dark in zip(*shades, strict=True)}


def inline_svg(chart: go.Figure, name: str, alt: str) -> str:
    """The chart as one `svg` element of class `drawing`, which says `alt`; ids inside it begin with `name`."""
    figure = _static(chart)
    figure.patch.set_visible(False)  # the page is behind it, light or dark
    drawn = _cleaned(ElementTree.fromstring(encode(figure, "svg", PAGE)), name)
    del drawn.attrib["width"], drawn.attrib["height"]
    drawn.attrib |= {"class": "drawing", "role": "img", "aria-label": alt}
    return ElementTree.tostring(drawn, encoding="unicode")


def picture(chart: go.Figure) -> bytes:
    """The chart as PNG, the same bytes at every call in one environment."""
    return encode(_static(chart), "png", PAGE)


def _static(chart: go.Figure) -> Figure:
    from driftlens_reports.paper.static import draw_static  # with matplotlib, which an interactive page lacks

    with sheet(PAGE):
        return draw_static(chart, PAGE_WIDTH)


def _cleaned(element: ElementTree.Element, name: str) -> ElementTree.Element:
    """A copy that holds only what is known to be harmless, with numbers no longer than a screen shows."""
    clean = ElementTree.Element(_local(element.tag), dict(_attributes(element, name)))
    clean.text = element.text if clean.tag == "text" else None
    clean.extend(_cleaned(child, name) for child in element if _local(child.tag) in _ELEMENTS)
    return clean


def _attributes(element: ElementTree.Element, name: str) -> Iterator[tuple[str, str]]:
    attributes = {_local(key): value for key, value in element.attrib.items()}
    style = attributes.pop("style", "")
    yield from (("font-size", size) for size in _FONT_SIZE.findall(style))
    for part in style.split(";"):
        key, _, value = (word.strip() for word in part.partition(":"))
        if key in _LOOKS:
            yield key, _within(key, value, name)
    for key, value in attributes.items():
        if key == "id" and _local(element.tag) in ("g", "text"):
            continue  # nothing refers to groups
        if key == "href" and not value.startswith("#"):
            continue
        if key in _PLACES | _LOOKS:
            yield key, f"{name}-{value}" if key == "id" else _within(key, value, name)


def _within(key: str, value: str, name: str) -> str:
    """References by the names that elements have on the page; numbers with two decimals."""
    if key == "href" or value.startswith("url("):
        return value.replace("#", f"#{name}-")
    return _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}", value)


def _local(name: str) -> str:
    return name.rpartition("}")[2]
