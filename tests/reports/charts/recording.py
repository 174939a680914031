"""What a plotly figure would draw, read out of the figure itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import TABLES
from driftlens.runs.tables import conform_to_schema

INTERNAL = {"uirevision", "legendgroup", "offsetgroup", "ids", "meta"}
"""Settings that plotly compares and never shows."""
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]\d+)?(?: %)?")


def finite(values: Any) -> list[float]:
    """The numbers among `values`, sorted."""
    flat = [] if values is None else np.asarray(values, dtype=object).ravel()
    return sorted(float(value) for value in flat if value is not None and not math.isnan(float(value)))


def drawn_values(trace: Any) -> list[float]:
    """The measured values that a trace draws: heights, lengths of lying bars, or cells."""
    if isinstance(trace, go.Heatmap):
        return finite(trace.z)
    if isinstance(trace, go.Bar) and trace.orientation == "h":
        return finite(trace.x)
    is_unseen = isinstance(trace, go.Bar) and trace.marker.color == "rgba(0, 0, 0, 0)"
    return [] if is_unseen else finite(trace.y)


def data_values(data: pd.DataFrame) -> set[float]:
    """Every number in the rows behind a chart."""
    numbers = data.select_dtypes("number").astype(float)
    return set(numbers.to_numpy().ravel()) if len(numbers.columns) else set()


def leaves(figure: go.Figure) -> dict[str, Any]:
    """Every setting of the figure by its path."""
    return dict(_leaves("", figure.to_plotly_json()))


def shown_texts(figure: go.Figure) -> list[str]:
    """Every text that plotly may show."""
    return [
        str(value)
        for path, value in leaves(figure).items()
        if isinstance(value, str) and not INTERNAL & set(re.findall(r"[a-z]+", path))
    ]


def axis_titles(figure: go.Figure, letter: str) -> list[str]:
    axes = figure.select_xaxes() if letter == "x" else figure.select_yaxes()
    return [axis.title.text for axis in axes if axis.title.text]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(f"{path}.{key}", entry)
    elif isinstance(value, list | tuple):
        for at, entry in enumerate(value):
            yield from _leaves(f"{path}[{at}]", entry)
    else:
        yield path, value


def with_rows(run: DriftRun, table: str, rows: pd.DataFrame) -> DriftRun:
    """The run opened again, with these rows for the table's own."""
    opened = open_run(run.path)
    opened._frames[table] = conform_to_schema(rows, TABLES[table])
    return opened


Array = NDArray[np.float64]


XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def linear(colour: str) -> Array:
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""
    low, high = sorted(float(XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)
