"""A chart as SVG inside a page: shapes and words, without styles, scripts, links or metadata of its own."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import TYPE_CHECKING

from driftlens_reports.paper.static import draw_static
from driftlens_reports.paper.style import PAGE, PAGE_WIDTH, encode, sheet

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from matplotlib.figure import Figure

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


def inline_svg(chart: go.Figure, name: str, alt: str) -> str:
    """The chart drawn without a script, as one `svg` element of class `drawing`.

    Args:
        chart: the plotly figure.
        name: unique on the page; ids inside the element begin with it.
        alt: what the chart shows, in words.
    """
    figure = _static(chart)
    figure.patch.set_visible(False)  # the page is behind it, light or dark
    root = ElementTree.fromstring(encode(figure, "svg", PAGE))
    drawn = _cleaned(root, name)
    for size in ("width", "height"):
        drawn.attrib.pop(size, None)
    drawn.attrib |= {"class": "drawing", "role": "img", "aria-label": alt}
    return ElementTree.tostring(drawn, encoding="unicode")


def picture(chart: go.Figure) -> bytes:
    """The chart as PNG, the same bytes at every call in one environment."""
    return encode(_static(chart), "png", PAGE)


def _static(chart: go.Figure) -> Figure:
    with sheet(PAGE):
        return draw_static(chart, PAGE_WIDTH)


def _cleaned(element: ElementTree.Element, name: str) -> ElementTree.Element:
    """A copy that holds only what is known to be harmless, with numbers no longer than a screen shows."""
    kept = ElementTree.Element(_local(element.tag), dict(_attributes(element, name)))
    kept.text = element.text if kept.tag == "text" else None
    kept.extend(_cleaned(child, name) for child in element if _local(child.tag) in _ELEMENTS)
    return kept


def _attributes(element: ElementTree.Element, name: str) -> Iterator[tuple[str, str]]:
    given = {_local(key): value for key, value in element.attrib.items()}
    style = given.pop("style", "")
    yield from (("font-size", found) for found in _FONT_SIZE.findall(style))
    for part in style.split(";"):
        key, _, value = (word.strip() for word in part.partition(":"))
        if key in _LOOKS:
            yield key, _within(key, value, name)
    for key, value in given.items():
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
    return _LONG_NUMBER.sub(lambda found: f"{float(found[0]):.2f}", value)


def _local(name: str) -> str:
    return name.rpartition("}")[2]
