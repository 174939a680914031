"""Clouds of samples: points in a variant's colours, few enough to draw, with a line where two axes are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens_reports.charts.picking import ChartOptions
from driftlens_reports.charts.theme import Look, palette
from driftlens_reports.charts.thinning import thinned, thinning_notes
from driftlens_reports.charts.words import literal

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_SVG = 5000
"""Points that a browser still draws and moves smoothly as SVG; a figure of more draws them with WebGL.

Without a graphics processor a browser takes a quarter of a second and more to make ready for WebGL, as long as for
these as SVG; and a page may hold few figures that use it.
"""


def thinned_samples(rows: pd.DataFrame, options: ChartOptions, panels: int) -> tuple[pd.DataFrame, list[str]]:
    """The rows of as many samples as the options allow points, and a note where some are left out.

    A sample stays or goes in all its rows, so that variants stay matched. The share that stays is the same in every
    class of every task.

    Args:
        rows: task, sample_id and label, and whatever is drawn; a sample may have a row per variant.
        options: say how many points there may be.
        panels: how many points each sample becomes.
    """
    samples = rows[["task", "sample_id", "label"]].drop_duplicates(["task", "sample_id"])
    kept = thinned(samples, max(1, options.max_points // max(1, panels)), ["task", "label"])
    notes = thinning_notes(len(kept), len(samples))
    if not notes:
        return rows, notes
    wanted = pd.MultiIndex.from_frame(kept[["task", "sample_id"]])
    there = pd.MultiIndex.from_frame(rows[["task", "sample_id"]])
    return rows[there.isin(wanted)].reset_index(drop=True), notes


def literal_column(names: pd.Series[Any]) -> pd.Series[Any]:
    """Every name of a column as plotly shows it character by character; each is made safe once."""
    safe = {name: literal(str(name)) for name in names.unique()}
    return names.map(safe).astype(object)


def points(
    x: NDArray[np.floating[Any]], y: NDArray[np.floating[Any]], look: Look, *, total: int, **settings: Any
) -> go.Scatter | go.Scattergl:
    """A cloud of points in a variant's colours.

    Args:
        x: one number per point, [n].
        y: one number per point, [n].
        look: of the variant.
        total: points in the whole figure, which decides what draws them.
        settings: further settings of the trace.
    """
    import plotly.graph_objects as go

    draw = go.Scatter if total <= MOST_SVG else go.Scattergl
    marker = {"color": look.colour, "symbol": look.symbol, "size": 5, "opacity": 0.7, "line": {"width": 0}}
    return draw(x=x, y=y, mode="markers", marker=marker).update(**settings)


def identity_line(figure: go.Figure, low: float, high: float, *, dark: bool, **place: Any) -> None:
    """A thin line from (low, low) to (high, high): where both axes show the same."""
    line = {"color": palette(dark).quiet, "width": 1, "dash": "dot"}
    figure.add_shape(type="line", x0=low, y0=low, x1=high, y1=high, line=line, layer="below", **place)
