"""Figures that the browser need not draw twice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from driftlens_reports.charts.theme import lay_out


def drawn_once(figure: Any, *, selecting: bool = False) -> Any:
    """`figure` itself, which looks as before and is drawn once where it would have been drawn twice.

    A figure that has been here before stays as it is.

    Streamlit's client gives plotly a copy of every figure right after the first, and plotly draws that from scratch
    unless it finds nothing changed. It takes a revision's word for that where data are lists, but not where they are
    typed arrays, and a template that is another object counts as changed: so the axes get its settings themselves. A
    template that speaks of more than axes stays where it is.

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
    if template.keys() - {"layout"} or axes.keys() - {"xaxis", "yaxis"}:
        return lay_out(figure, {**layout, "template": template})
    figure.layout = {name: axes.get(name[:5], {}) for name in layout if name[1:5] == "axis"}
    lay_out(figure, layout)
    figure.layout.template = None
    return figure


def _lists(settings: Any) -> Any:
    """A trace's settings with lists in place of numpy arrays."""
    if isinstance(settings, Mapping):
        return {name: _lists(value) for name, value in settings.items()}
    return settings.tolist() if isinstance(settings, np.ndarray) else settings
