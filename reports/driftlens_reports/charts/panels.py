"""Small multiples: a grid of panels with common axes, sized in pixels so that many panels stay readable."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from driftlens.runs.run import DriftRun
from driftlens.runs.schema import TABLES
from driftlens_reports.charts.picking import ChartOptions
from driftlens_reports.charts.theme import SIZE, TICK_NUMBER, deep_merge, palette, theme_layout

# Columns of up to nine panels, and of more.
_FEW_COLUMNS, _MOST_COLUMNS = 3, 4
_GAP, _TITLE, _BOTTOM = 34, 22, 56
# Pixels: a row of the legend, its width in a window and in a narrow one, and what an entry takes of it.
_LEGEND_ROW, _LEGEND_WIDTHS, _SYMBOL, _LEGEND_LETTER = 24, (600, 330), 46, 7
# Panels from which on a number means the right value axis of a panel.
_RIGHT = 1000
# Display names of units of the schema; others are shown unchanged.
_UNITS = {"feature": "feature units", "score": "score units", "1": "ratio"}
_MOST_TICKS = 8
_ONE_COLUMN: ContextVar[bool] = ContextVar("panels are stacked", default=False)
Settings = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@contextmanager
def stack_panels(is_narrow: bool = True) -> Iterator[None]:
    """Stack the panels of all figures drawn within the context in one column, for a narrow window."""
    # A context variable, since a server draws for several windows at once.
    token = _ONE_COLUMN.set(is_narrow)
    try:
        yield
    finally:
        _ONE_COLUMN.reset(token)


def has_stacked_panels() -> bool:
    """Return True if panels are stacked for a narrow window."""
    return _ONE_COLUMN.get()


def title_with_unit(label: str, table: str, column: str) -> str:
    """Return an axis title with the unit of the column in brackets."""
    unit = TABLES[table].column(column).unit
    return f"{label} ({_UNITS.get(unit, unit)})"


def layer_axis_title(run: DriftRun) -> str:
    """Return the title of the layer axis, which gives the indices of stem, decoder start and head."""
    decoder = "".join(f", {border + 0.5:.0f} decoder's first" for border in stream_boundaries(run.layers()))
    return f"layer (index: 1 stem{decoder}, {_last_layer_index(run)} head)"


def _last_layer_index(run: DriftRun) -> int:
    return max((layer.index for layer in run.manifest.layers), default=1)


def layer_axis_settings(run: DriftRun, beyond: str = "") -> dict[str, Any]:
    """Return plotly settings of the layer axis; `beyond` labels one more column after the head."""
    last = _last_layer_index(run)
    # Rounded up, so that the limit holds.
    step = -(-last // _MOST_TICKS)
    ticks = [*(layer for layer in range(1, last, step) if last - layer >= step), last]
    high = last + (1.5 if beyond else 0.5)
    axis = {"autorangeoptions": {"include": [0.5, high], "clipmin": 0.5, "clipmax": high}, "tickvals": ticks}
    if not beyond:
        return axis
    ticks = ticks[:-1] if step > 1 else ticks  # the title says which is the last, and the name needs its room
    # Slanted, the numbers would be as hard to read as the name.
    return {**axis, "tickangle": 0, "tickvals": [*ticks, last + 1], "ticktext": [*map(str, ticks), beyond]}


def insert_stream_gaps(rows: pd.DataFrame) -> pd.DataFrame:
    """Insert an empty row after each feature stream (encoder, decoder), so that curves have a gap there."""
    if "stream" not in rows or rows["stream"].nunique(dropna=False) < 2:
        return rows
    parts: list[pd.DataFrame] = []
    for _, part in rows.groupby(_stream_numbers(rows)):
        parts += [
            part,
            # NaN, at which plotly breaks a line.
            part.tail(1).assign(**dict.fromkeys(part.select_dtypes("float").columns, float("nan"))),
        ]
    return pd.concat(parts[:-1])


def stream_boundaries(rows: pd.DataFrame) -> list[float]:
    """Return the layer-axis positions between encoder and decoder, where one feature stream ends."""
    if "stream" not in rows or rows["stream"].nunique(dropna=False) < 2:
        return []
    layers = rows.drop_duplicates("layer").sort_values("layer")
    firsts = layers.groupby(_stream_numbers(layers))["layer"].min()
    return [start - 0.5 for start in firsts.tolist()[1:]]


def _stream_numbers(rows: pd.DataFrame) -> pd.Series[int]:
    streams = rows["stream"].fillna("").astype(str)
    return streams.ne(streams.shift()).cumsum()


def value_axis_settings(options: ChartOptions, *, zero: bool = True, include: Sequence[float] = ()) -> dict[str, Any]:
    """Return plotly settings of a value axis, logarithmic if the options ask for it.

    Args:
        options: the user's options.
        zero: True to start a linear axis at zero.
        include: values that a linear axis must show.
    """
    if options.log:
        # `include` would be compared with logarithms, and by default every digit of a decade gets a tick.
        return {"type": "log", "nticks": 3, "tickformat": TICK_NUMBER}
    return {
        "rangemode": "tozero" if zero else "normal",
        "tickformat": TICK_NUMBER,
        "autorangeoptions": {"include": list(include)} if include else None,
    }


class PanelGrid:
    """A grid of panels in one plotly figure, filled row by row and validated once, in `figure`."""

    def __init__(self, kinds: int, panels: int, dark: bool, layout: Mapping[str, Any]) -> None:
        self.kinds, self.panels, self.dark = kinds, panels, dark
        self.layout, self._traces = dict(layout), list[Any]()

    @functools.cached_property
    def figure(self) -> go.Figure:
        """The finished plotly figure. Later changes to the grid have no effect on it."""
        return go.Figure(self._traces, self.layout)

    def add(self, panel: int, *traces: Any, right: bool = False) -> None:
        """Add plotly traces to a panel (counted from 0), on its right value axis if `right`; the first is lowest."""
        y = _plotly_axis_name("y", panel + _RIGHT * right, "")
        for trace in traces:
            self._traces.append(trace.update(xaxis=_plotly_axis_name("x", panel, ""), yaxis=y))

    def add_right_axis(self, panel: int, leader: int, **settings: Any) -> None:
        """Add a second value axis, on the right of a panel, with the scale of the one of the panel `leader`."""
        over, along = (_plotly_axis_name(letter, panel, "") for letter in "yx")
        matches = _plotly_axis_name("y", leader + _RIGHT, "") if leader != panel else None
        place = {"overlaying": over, "anchor": along, "side": "right", "matches": matches, "showgrid": False}
        place["tickmode"] = "auto"  # plotly else puts ticks where the left axis has some
        self.set_axis("y", panel + _RIGHT, **{**settings, **place})

    def update_layout(self, **settings: Any) -> None:
        """Update layout settings of the whole figure."""
        self.layout = deep_merge(self.layout, settings)

    def set_axis(self, letter: str, panel: int, **settings: Any) -> None:
        """Update plotly settings of one axis of a panel."""
        self.update_layout(**{_plotly_axis_name(letter, panel): settings})

    def set_axes(self, *, x: Settings = (), y: Settings = ()) -> None:
        """Update plotly settings of the axes of all panels: one mapping for all, or one per column."""
        for letter, settings in (("x", x), ("y", y)):
            by_column = [settings] if isinstance(settings, Mapping) else settings
            for panel in range(self.panels if by_column else 0):
                self.set_axis(letter, panel, **by_column[panel % len(by_column)])

    def is_last_of_row(self, panel: int) -> bool:
        """Return True if no panel is on the right of this one."""
        return (panel + 1) % self.kinds == 0 or panel + 1 == self.panels

    def add_reference_lines(
        self, letter: str, *values: float, panel: int | None = None, ends: Sequence[float] = ()
    ) -> None:
        """Add horizontal reference lines at values of y, or dotted vertical ones at values of x.

        Args:
            letter: the axis of the values, "x" or "y".
            values: where the lines are.
            panel: only this panel, from 0; None is all panels.
            ends: start and end along the other axis; the lines cross the whole panel if empty.
        """
        colours, is_level = palette(self.dark), letter == "y"
        line = {"color": colours.quiet} if is_level else {"color": colours.ink, "dash": "dot"}
        across = "x" if is_level else "y"
        for value in values:
            for each in range(self.panels) if panel is None else (panel,):
                along, whole = (_plotly_axis_name(name, each, "") for name in (letter, across))
                self._add_line_shape(
                    line={**line, "width": 1},
                    layer="below" if is_level else "above",
                    **{f"{letter}ref": along, f"{letter}0": value, f"{letter}1": value},
                    **{f"{across}ref": whole if ends else f"{whole} domain"},
                    **dict(zip((f"{across}0", f"{across}1"), ends or (0, 1), strict=True)),
                )

    def add_identity_line(self, panel: int, low: float, high: float) -> None:
        """Add the identity line y = x from (low, low) to (high, high)."""
        self._add_line_shape(
            line={"color": palette(self.dark).quiet, "width": 1, "dash": "dot"},
            layer="below",
            **{"x0": low, "y0": low, "x1": high, "y1": high},
            **{"xref": _plotly_axis_name("x", panel, ""), "yref": _plotly_axis_name("y", panel, "")},
        )

    def annotate(self, panel: int, **settings: Any) -> None:
        """Add text to a panel, at positions from 0 to 1."""
        refs = {f"{letter}ref": f"{_plotly_axis_name(letter, panel, '')} domain" for letter in "xy"}
        self.layout["annotations"] = [*self.layout["annotations"], {**refs, **settings}]

    def _add_line_shape(self, **settings: Any) -> None:
        self.layout["shapes"] = [*self.layout.get("shapes", ()), {"type": "line", **settings}]


def _plotly_axis_name(letter: str, panel: int, word: str = "axis") -> str:
    return f"{letter}{word}{panel + 1 if panel else ''}"


def panel_grid(
    titles: Sequence[str],
    *,
    x_title: str | Sequence[str],
    y_titles: Sequence[str],
    dark: bool,
    columns: int = 0,
    height: int = 190,
    legend: Sequence[str] | None = (),
    below: int = 0,
) -> PanelGrid:
    """Create a grid of empty panels with titles, axis titles and a legend.

    Args:
        titles: one escaped title per panel.
        x_title: one title for all x axes, or one per column or panel.
        y_titles: one title for all y axes, or one per column.
        dark: True for the dark theme.
        columns: the largest number of columns; 0 chooses it by the number of panels.
        height: height of a panel, in pixels.
        legend: names in the legend, for which room is reserved; None without a legend.
        below: pixels reserved for lines of text below each panel.
    """
    is_common, x_titles = len(y_titles) == 1, [x_title] if isinstance(x_title, str) else x_title
    columns = min(columns or (_FEW_COLUMNS if len(titles) <= 9 else _MOST_COLUMNS), len(titles))
    # What differs from column to column would leave none of them the room for its titles. Parts of one have one.
    kinds = len(y_titles) if all(y_titles) else 0
    if has_stacked_panels() and kinds:
        columns = 1
    rows = -(-len(titles) // columns)
    columns = -(-len(titles) // rows)  # rows of like length: four panels are two and two
    gap = _GAP + (_TITLE if any(titles) else 0) + below
    inner = rows * height + (rows - 1) * gap
    across = _equal_domains(columns, 0.05 if is_common else 0.11)
    down = _equal_domains(rows, gap / inner)[::-1]
    axes = _grid_axes_settings(len(titles), across, down, x_titles, y_titles)
    theme, font = theme_layout(dark), {"size": SIZE, "color": palette(dark).ink}
    # Of one row where the names are not known.
    wide = sum(_SYMBOL + _LEGEND_LETTER * len(html.unescape(name)) for name in legend or ())
    lines = 0 if legend is None else max(1, -(-wide // _LEGEND_WIDTHS[has_stacked_panels()]))
    top = 12 + _LEGEND_ROW * lines + (_TITLE if any(titles) else 0)
    settings = {
        **theme,
        **axes,
        "height": inner + top + _BOTTOM + below,
        "margin": {**theme["margin"], "t": top, "b": theme["margin"]["b"] + below},
        "annotations": [
            {
                **{"text": title, "font": font, "showarrow": False, "xanchor": "center", "yanchor": "bottom"},
                **{"x": 0.5, "xref": f"{_plotly_axis_name('x', panel, '')} domain"},
                **{"y": 1, "yref": f"{_plotly_axis_name('y', panel, '')} domain"},
            }
            for panel, title in enumerate(titles)
            if title
        ],
    }
    return PanelGrid(max(columns, kinds), len(titles), dark, settings)


def _equal_domains(count: int, gap: float) -> list[tuple[float, float]]:
    """Return the start and end of equal parts of [0, 1] with gaps, as domains of plotly axes."""
    size = (1 - gap * (count - 1)) / count
    starts = [part * (size + gap) for part in range(count)]
    return [(start, min(1.0, start + size)) for start in starts]


def _grid_axes_settings(
    num_panels: int,
    across: Sequence[tuple[float, float]],
    down: Sequence[tuple[float, float]],
    x_titles: Sequence[str],
    y_titles: Sequence[str],
) -> dict[str, Any]:
    is_common, apart, columns = len(y_titles) == 1, len(x_titles), len(across)
    axes = {}
    for panel, (y_domain, x_domain) in enumerate(product(down, across)):
        column, x, y = panel % columns, _plotly_axis_name("x", panel, ""), _plotly_axis_name("y", panel, "")
        is_panel, is_lowest = panel < num_panels, panel + (columns if apart == 1 else apart) >= num_panels
        # Once, below the middle: side by side, titles run into each other in a narrow window.
        is_named = is_lowest and (apart > 1 or column == (columns - 1) // 2)
        axes[_plotly_axis_name("x", panel)] = {
            **{"anchor": y, "domain": x_domain, "visible": is_panel, "showticklabels": is_lowest},
            "matches": _plotly_axis_name("x", panel % apart, "") if panel >= apart and is_panel else None,
            "title": {"text": x_titles[panel % apart]} if is_named else None,
        }
        # The first axis of a kind leads, as plotly refuses one that matches itself.
        kind = 0 if is_common else panel % max(columns, len(y_titles))
        has_labels = column == 0 or not is_common
        axes[_plotly_axis_name("y", panel)] = {
            **{"anchor": x, "domain": y_domain, "visible": is_panel, "showticklabels": has_labels},
            "matches": _plotly_axis_name("y", kind, "") if panel != kind and is_panel else None,
            "title": {"text": y_titles[kind]} if has_labels and is_panel else None,
        }
    return axes
