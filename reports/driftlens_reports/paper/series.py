"""Panels that several figures share: a quantity by layer, and bars or dots by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.paper.plate import Plate, guide, short
from driftlens_reports.paper.style import dot_area, hairline, look_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.lines import Line2D


def by_layer(run: DriftRun, task: str, variant: str) -> pd.DataFrame:
    """One row per layer of the chain, in forward order; a layer that is not stored has NaN, and so makes a gap."""
    rows = run.layers(task, variant).set_index("layer")
    return rows.reindex(pd.RangeIndex(1, len(run.manifest.layers) + 1, name="layer"))


def draw_line(
    plate: Plate,
    axes: Axes,
    run: DriftRun,
    panel: str,
    rows: pd.DataFrame,
    quantity: str,
    *,
    task: str,
    variant: str,
    thin: bool = False,
    **drawn: Any,
) -> Line2D:
    """Draw and record one column of `by_layer` as a line in the variant's look; `drawn` overrides parts of it."""
    look = look_of(variant)
    values = rows[quantity].to_numpy(dtype=float)
    style: dict[str, Any] = {"color": look.colour, "linestyle": look.dash, "marker": look.marker}
    if thin:
        style |= {"linewidth": 1.2 * hairline(), "markersize": dot_area(0.65) ** 0.5}
    (line,) = axes.plot(rows.index.to_numpy(), values, **(style | drawn))
    plate.record(panel, run, quantity, values, task=task, variant=variant, layer=list(rows.index))
    return line


def draw_band(
    plate: Plate, axes: Axes, run: DriftRun, panel: str, rows: pd.DataFrame, *, task: str, variant: str
) -> None:
    """Draw and record the band between the 10 % and 90 % quantiles of the drift."""
    ends = [rows[name].to_numpy(dtype=float) for name in ("drift_l2_q10", "drift_l2_q90")]
    axes.fill_between(rows.index.to_numpy(), *ends, color=look_of(variant).colour, alpha=0.16, linewidth=0)
    for quantity, values in zip(("drift_l2_q10", "drift_l2_q90"), ends, strict=True):
        plate.record(panel, run, quantity, values, task=task, variant=variant, layer=list(rows.index))


def layer_axis(axes: Axes, run: DriftRun) -> None:
    """The axis of layers: whole numbers, with the ends named."""
    from matplotlib.ticker import MaxNLocator

    count = len(run.manifest.layers)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.set(xlim=(0.5, count + 0.5), xlabel=f"layer (1: stem, {count}: head)" if count > 1 else "layer")


def percent_axis(axis: Axis) -> None:
    """Fractions along an axis, labelled in percent with as many decimals as they need."""
    from matplotlib.ticker import FuncFormatter

    def label(value: float, _: int | None) -> str:
        return f"{100 * value:.6g} %".replace("-", "\N{MINUS SIGN}")

    axis.set_major_formatter(FuncFormatter(label))


def draw_bars(
    axes: Axes, values: Mapping[str, Sequence[float]], names: Sequence[str], *, horizontal: bool = False
) -> dict[str, np.ndarray]:
    """Draw groups of bars, one group per name, one bar per variant; returns where each variant's bars stand."""
    width = 0.84 / max(len(values), 1)
    places = {}
    for at, (variant, heights) in enumerate(values.items()):
        look = look_of(variant)
        place = np.arange(len(names)) + (at - (len(values) - 1) / 2) * width
        bar = axes.barh if horizontal else axes.bar
        # A white hatch on the variant's colour: an edge of zero width leaves the hatch only.
        bar(place, heights, width, color=look.colour, edgecolor="white", linewidth=0, hatch=look.hatch)
        places[variant] = place
    return places


def name_axis(axes: Axes, names: Sequence[str], *, horizontal: bool = False, longest: int = 16) -> None:
    """Name the groups along an axis; many or long names along the x axis are slanted."""
    labels = [short(name, longest) for name in names]
    if horizontal:
        axes.set_yticks(range(len(names)), labels)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        return
    axes.set_xticks(range(len(names)), labels)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.tick_params(axis="x", length=0)
    inches = axes.get_position().width * axes.get_figure(root=True).get_figwidth()
    if sum(len(label) + 2 for label in labels) * 0.055 > inches:
        axes.tick_params(axis="x", rotation=30)
        for tick in axes.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")


def draw_dots(
    plate: Plate,
    axes: Axes,
    run: DriftRun,
    panel: str,
    quantity: str,
    values: Mapping[str, Mapping[str, float]],
    names: Sequence[str],
) -> None:
    """Draw one row per task and a marker per variant, with the average over tasks below them.

    A variant has an average only where it has all tasks: one over other tasks could not be compared.

    Args:
        plate: the figure.
        axes: where to draw.
        run: whose numbers they are.
        panel: the panel's letter.
        quantity: what they are.
        values: by variant and task.
        names: the tasks.
    """
    places = np.arange(len(names))
    for variant, found in values.items():
        look = look_of(variant)
        across = np.array([found.get(name, np.nan) for name in names], dtype=float)
        # Shares of exactly 0 and 1 stand on the panel's edge and are shown whole.
        style: dict[str, Any] = {
            "color": look.colour,
            "marker": look.marker,
            "linestyle": "",
            "clip_on": False,
        }
        axes.plot(across, places, **style)
        plate.record(panel, run, quantity, across, task=list(names), variant=variant)
        if len(names) > 1 and not np.isnan(across).any():
            mean = float(across.mean())
            axes.plot([mean], [len(names)], **style)
            plate.record(panel, run, f"{quantity} (average over tasks)", mean, variant=variant)
    rows = [*names, "average"] if len(names) > 1 else list(names)
    name_axis(axes, rows, horizontal=True)
    axes.grid(axis="y")
    if len(names) > 1:
        guide(axes, y=len(names) - 0.5)
