"""Figures that the browser need not draw twice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from driftlens_reports.charts.theme import lay_out


def drawn_once(figure: Any, *, selecting: bool = False) -> Any:
    """`figure` itself, which looks as before and is drawn once where it would have been drawn twice.

    Streamlit's client gives plotly a copy of every figure right after the first, and plotly draws that from scratch
    unless it finds nothing changed. It takes a revision's word for that where data are lists, but not where they are
    typed arrays, and a template that is another object counts as changed: so the axes get its settings themselves. A
    template stays where it is if it speaks of more than axes, or of axes that only traces name. A figure that has a
    revision stays as it is.

    Args:
        figure: a plotly figure.
        selecting: whether points are to be selected in it, which Streamlit else tells plotly only with the copy.
    """
    if figure.layout.datarevision is not None:
        return figure
    traces = [_lists(trace.to_plotly_json()) for trace in figure.data]
    figure.data = ()  # an array of the same numbers would not be replaced
    figure.add_traces(traces)
    revision = hashlib.sha256(figure.to_json(validate=False).encode()).hexdigest()
    layout = {**figure.layout.to_plotly_json(), "datarevision": revision}
    if selecting:
        layout["clickmode"] = "event+select"
    template = layout.pop("template", {})
    axes = template.get("layout", {})
    used = {_axis(trace.get(f"{letter}axis", letter)) for trace in traces for letter in "xy"}
    if used - layout.keys() or template.keys() - {"layout"} or axes.keys() - {"xaxis", "yaxis"}:
        return lay_out(figure, {**layout, "template": template})
    figure.layout = {name: axes.get(name[:5], {}) for name in layout if name[1:5] == "axis"}
    lay_out(figure, layout)
    figure.layout.template = None  # a new layout has plotly's own
    return figure


def _axis(reference: str) -> str:
    """Name in the layout of the axis that a trace calls `x2`."""
    return f"{reference[0]}axis{reference[1:]}"


def _lists(settings: Any) -> Any:
    """A trace's settings with lists in place of the arrays that plotly sends as typed ones."""
    if isinstance(settings, Mapping):
        return {name: _lists(value) for name, value in settings.items()}
    is_number = isinstance(settings, np.ndarray) and settings.dtype.kind in "iuf"
    return settings.tolist() if is_number else settings
