"""The light HTML format: one small file without a script, for mail, reviews and artifacts of a build."""

from __future__ import annotations

from driftlens_reports.content import ReportContent
from driftlens_reports.formats.light_figures import drawings, styles_of
from driftlens_reports.formats.page import Extras, render

_MOST_BYTES = 950_000
_BUDGETS = (16_000, 6_000, 0)
"""Cells of figures' data tables in one page; the next budget is tried while the page is too large."""


def light_page(content: ReportContent) -> bytes:
    """The report as one HTML file with drawings in it; it follows a reader's wish for dark colours."""
    styles = styles_of(content)
    drawn = {figure.name: drawings(figure, styles) for figure in content.figures}
    page = b""
    for cells in _BUDGETS:
        page = render(content, Extras(dark=True, drawn=drawn, shown_data=_shown_data(content, cells)))
        if len(page) <= _MOST_BYTES:
            break
    return page


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
