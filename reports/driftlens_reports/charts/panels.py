"""Small multiples: a grid of panels with common axes, sized in pixels so that many panels stay readable."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftlens_reports.charts.theme import SIZE, lay_out, palette, theme_layout

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_COLUMNS = 3
_GAP, _TITLE = 34, 22
_BOTTOM = 56
_LEGEND_ROW, _LEGEND_WIDTH, _SYMBOL, _LETTER = 24, 600, 46, 7
"""Pixels: a row of the legend, its width in a narrow window, and what an entry takes of it."""


@dataclass(frozen=True)
class Grid:
    """A figure of empty panels, filled row by row.

    Attributes:
        figure: the figure.
        columns: panels in a row.
        panels: how many there are.
    """

    figure: go.Figure
    columns: int
    panels: int

    def place(self, at: int) -> dict[str, int]:
        """Where panel `at`, counted from 0, is: arguments for `figure.add_trace` and the like."""
        return {"row": at // self.columns + 1, "col": at % self.columns + 1}

    def add(self, at: int, *traces: Any) -> None:
        """Draw `traces` in panel `at`, the first one at the bottom."""
        for trace in traces:
            self.figure.add_trace(trace, **self.place(at))

    def set_axes(
        self, *, x: Mapping[str, Any] | None = None, y: Mapping[str, Any] | Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Settings of the axes of every panel; of y axes, one for all or one per column; none leaves them."""
        by_column = [y] * self.columns if isinstance(y, Mapping) else y
        axes = {_axis("x", at): x or {} for at in range(self.panels)}
        axes |= {_axis("y", at): by_column[at % self.columns] for at in range(self.panels) if by_column}
        lay_out(self.figure, axes)


def _axis(letter: str, at: int) -> str:
    return f"{letter}axis{at + 1 if at else ''}"


def panel_grid(
    titles: Sequence[str],
    *,
    x_title: str,
    y_titles: Sequence[str],
    dark: bool,
    key: str,
    columns: int = MOST_COLUMNS,
    height: int = 190,
    share_y: bool = True,
    legend: Sequence[str] = (),
    below: int = 0,
) -> Grid:
    """Empty panels with one x axis range for all.

    Args:
        titles: one per panel, escaped already.
        x_title: title of the x axes, below the middle column.
        y_titles: one for all panels, which then have one y axis range, or one per column, each with a range of its own.
        dark: which theme.
        key: names the data shown, as for `apply_theme`.
        columns: panels in a row; fewer if there are fewer panels.
        height: of a panel, in pixels.
        share_y: False gives every panel a y range of its own.
        legend: what the legend will say, so that there is room for it above the panels.
        below: room for more lines below every panel, in pixels.
    """
    from plotly.subplots import make_subplots

    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    gap = _GAP + _TITLE + below
    inner = rows * height + (rows - 1) * gap
    figure = make_subplots(
        rows,
        columns,
        subplot_titles=list(titles),
        vertical_spacing=gap / inner if rows > 1 else 0,
        horizontal_spacing=(0.05 if len(y_titles) == 1 and share_y else 0.09) if columns > 1 else 0,
    )
    axes: dict[str, dict[str, Any]] = {}
    for at in range(rows * columns):
        is_panel, is_lowest = at < len(titles), at + columns >= len(titles)
        axes[_axis("x", at)] = {
            "matches": "x" if at and is_panel else None,
            "showticklabels": is_lowest,
            # Once, below the middle: side by side, titles run into each other in a narrow window.
            "title": {"text": x_title} if is_lowest and at % columns == (columns - 1) // 2 else None,
            "visible": is_panel,
        }
        axes[_axis("y", at)] = {"visible": False}
        if is_panel:
            axes[_axis("y", at)] = _y_axis(at, columns, y_titles, share_y)
    font = {"size": SIZE, "color": palette(dark).ink}
    theme = theme_layout(dark)
    top = _legend_room(legend) + _TITLE
    settings = {
        **theme,
        **axes,
        "uirevision": key,
        "height": inner + top + _BOTTOM + below,
        "margin": {**theme["margin"], "t": top, "b": theme["margin"]["b"] + below},
        "annotations": [{**entry.to_plotly_json(), "font": font} for entry in figure.layout.annotations],
    }
    lay_out(figure, settings)
    return Grid(figure, columns, len(titles))


def _legend_room(names: Sequence[str]) -> int:
    """Height of a legend of these names; of one row where they are not known."""
    width = sum(_SYMBOL + _LETTER * len(html.unescape(name)) for name in names)
    return 12 + _LEGEND_ROW * max(1, -(-width // _LEGEND_WIDTH))


def _y_axis(at: int, columns: int, y_titles: Sequence[str], share_y: bool) -> dict[str, Any]:
    """Whose range a panel's y axis has, and whether it is labelled."""
    column = at % columns
    is_common = len(y_titles) == 1
    first = 0 if is_common else column
    is_labelled = column == 0 or not (is_common and share_y)
    return {
        # The first axis of a group leads: plotly refuses an axis that matches itself.
        "matches": ("y" if first == 0 else f"y{first + 1}") if share_y and at != first else None,
        "showticklabels": is_labelled,
        "title": {"text": y_titles[first]} if column == 0 or not is_common else None,
    }


def reference_line(grid: Grid, y: float, *, dark: bool, column: int | None = None) -> None:
    """A thin line at `y` in every panel, or in those of one column (from 0): what the values are compared with."""
    _reference(grid, "y", y, {"color": palette(dark).quiet, "width": 1}, "below", column)


def reference_post(grid: Grid, x: float, *, dark: bool) -> None:
    """A thin dotted line at `x` in every panel, above what is drawn."""
    _reference(grid, "x", x, {"color": palette(dark).ink, "width": 1, "dash": "dot"}, "above", None)


def _reference(
    grid: Grid, letter: str, value: float, line: dict[str, Any], layer: str, column: int | None
) -> None:
    across = "x" if letter == "y" else "y"
    shapes = [
        {
            **{"type": "line", "line": line, "layer": layer},
            **{f"{letter}ref": f"{letter}{at + 1 if at else ''}", f"{letter}0": value, f"{letter}1": value},
            **{f"{across}ref": f"{across}{at + 1 if at else ''} domain", f"{across}0": 0, f"{across}1": 1},
        }
        for at in range(grid.panels)
        if column in (None, at % grid.columns)
    ]
    lay_out(grid.figure, {"shapes": [*grid.figure.layout.shapes, *shapes]})
