"""The light HTML format: one small file without a script, for mail, reviews and artifacts of a build."""

from __future__ import annotations

from collections.abc import Mapping

from driftlens_reports.charts.chart import Drawn
from driftlens_reports.content import ReportContent
from driftlens_reports.formats.inline import inline_svg
from driftlens_reports.formats.page import Extras, anchor, render

_MOST_BYTES = 950_000
_BUDGETS = (16_000, 6_000, 0)
"""Cells of figures' data tables in one page; the next budget is tried while the page is too large."""


def light_page(content: ReportContent, drawn: Mapping[str, Drawn]) -> bytes:
    """The report as one HTML file with drawings in it; it follows a reader's wish for dark colours.

    A page that would be too large for a mail leaves out data tables first, then its largest drawings.

    Args:
        content: what the report says.
        drawn: the drawn charts, by name of the figure.
    """
    drawings = {name: inline_svg(entry.figure, anchor(name), entry.alt) for name, entry in drawn.items()}
    page = b""
    for cells in _BUDGETS:
        page = _page(content, drawings, cells)
        if len(page) <= _MOST_BYTES:
            return page
    while drawings and len(page) > _MOST_BYTES:
        del drawings[max(drawings, key=lambda name: len(drawings[name]))]
        page = _page(content, drawings, 0)
    return page


def _page(content: ReportContent, drawings: Mapping[str, str], cells: int) -> bytes:
    return render(content, Extras(dark=True, drawn=drawings, shown_data=_shown_data(content, cells)))


def _shown_data(content: ReportContent, cells: int) -> frozenset[str]:
    """The figures whose numbers fit into so many cells, the smallest tables first."""
    left, shown = cells, set()
    sizes = {
        figure.name: len(figure.data.rows) * len(figure.data.columns)
        for figure in content.figures
        if figure.data is not None
    }
    for name, size in sorted(sizes.items(), key=lambda entry: entry[1]):
        if size <= left:
            left -= size
            shown.add(name)
    return frozenset(shown)
