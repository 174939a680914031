"""Figures made ready for the dashboard: they look as before, and plotly can tell that nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from driftlens_app.show import without_redraw
from driftlens_reports.charts.theme import palette, themed_figure


def _figure(*, last: float = 3.0) -> go.Figure:
    points = go.Scatter(x=np.array([1.0, 2.0]), y=np.array([2.0, last]), marker_size=np.array([4, 5]))
    axes = {"xaxis": {"title": {"text": "layer (index)"}}, "yaxis": {"tickfont": {"size": 20}}}
    return themed_figure(points, dark=False, height=300, **axes)


def _shown(figure: go.Figure) -> dict[str, Any]:
    """What plotly gets."""
    shown: dict[str, Any] = figure.to_dict()
    return shown


def test_the_theme_of_the_axes_stands_in_every_axis_below_what_the_axis_says_itself() -> None:
    theme = themed_figure(dark=False, height=300).layout.template.layout
    layout = _shown(without_redraw(_figure()))["layout"]
    assert "template" not in layout
    assert layout["xaxis"]["gridcolor"] == theme.xaxis.gridcolor == palette(False).grid
    assert layout["xaxis"]["title"]["text"] == "layer (index)"
    assert layout["xaxis"]["title"]["standoff"] == theme.xaxis.title.standoff
    assert layout["yaxis"]["tickfont"]["size"] == 20
    assert layout["yaxis"]["tickfont"]["color"] == theme.yaxis.tickfont.color


def test_numbers_stay_what_they_are_in_lists() -> None:
    (trace,) = _shown(without_redraw(_figure()))["data"]
    assert (trace["x"], trace["y"], trace["marker"]["size"]) == ([1.0, 2.0], [2.0, 3.0], [4, 5])


def test_a_revision_is_that_of_the_data() -> None:
    shown = (_shown(without_redraw(_figure(last=last)))["layout"] for last in (3.0, 3.0, 4.0))
    first, again, other = (layout["datarevision"] for layout in shown)
    assert first == again != other
