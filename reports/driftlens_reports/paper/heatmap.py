"""Relative drift of every task at every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.charts.theme import LIGHT
from driftlens_reports.paper import captions, choice
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.plate import Plate, short
from driftlens_reports.paper.series import by_layer
from driftlens_reports.paper.style import figure, venue_of
from driftlens_reports.wording import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable


@figure("heatmap", title="Relative drift by task and layer")
def heatmap(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """A cell per task and layer, merged and calibrated on one colour scale."""
    run, tasks = runs[0], choice.tasks_of(runs[0], options)
    variants = ["merged", choice.calibrated_of(run, options)]
    grids = {variant: _grid(run, tasks, variant) for variant in variants if variant in run.variants}
    narrow = venue_of(options.width) == "icml-column"
    rows, columns = (2, 1) if narrow else (1, 2)
    cells = len(tasks) * options.width * (0.05 if narrow else 0.032)
    plate = Plate(options.width, rows * (cells + 0.16 * options.width))
    panels = plate.figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    highest = max(
        (float(np.nanmax(grid)) for grid in grids.values() if not np.isnan(grid).all()), default=0.0
    )
    images: list[ScalarMappable] = []
    for letter, variant, axes in zip("ab", variants, panels, strict=True):
        if variant not in grids or np.isnan(grids[variant]).all():
            has_rows = variant in grids
            command = "`driftlens analyze` measures it" if has_rows else f"`{choice.CALIBRATE}` adds it"
            plate.note(axes, f"({letter}) {'drift' if variant is None else title(variant)}", command)
        else:
            images.append(_draw(plate, axes, run, letter, tasks, variant, grids[variant], highest))
    if images:
        bar = plate.figure.colorbar(
            images[0], ax=list(panels), label="drift / expert norm", aspect=25, pad=0.02
        )
        bar.outline.set_visible(False)
    return plate.exhibited(captions.together(_caption(run, tasks, grids, plate)))


def _grid(run: DriftRun, tasks: Sequence[str], variant: str) -> np.ndarray:
    """`drift_rel` [tasks, layers]; NaN where it was not measured."""
    rows = [by_layer(run, task, variant)["drift_rel"].to_numpy(dtype=float) for task in tasks]
    return np.stack(rows) if rows else np.empty((0, len(run.manifest.layers)))


def _draw(
    plate: Plate,
    axes: Axes,
    run: DriftRun,
    panel: str,
    tasks: Sequence[str],
    variant: str,
    grid: np.ndarray,
    highest: float,
) -> ScalarMappable:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    colours = LinearSegmentedColormap.from_list("drift", LIGHT.sequential).with_extremes(bad=LIGHT.gap)
    count = grid.shape[1]
    window = (0.5, count + 0.5, len(tasks) - 0.5, -0.5)
    image = axes.imshow(
        np.ma.masked_invalid(grid), cmap=colours, vmin=0, vmax=highest, extent=window, aspect="auto"
    )
    image.set_interpolation("nearest")
    axes.set_yticks(range(len(tasks)), [short(task) for task in tasks])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    plate.title(axes, f"({panel}) {short(title(variant), 28)}")
    if axes.get_subplotspec().is_last_row():
        axes.set_xlabel(f"layer (1: stem, {count}: head)" if count > 1 else "layer")
    for task, values in zip(tasks, grid, strict=True):
        key: dict[str, Any] = {"task": task, "variant": variant, "layer": list(range(1, count + 1))}
        plate.record(panel, run, "drift_rel", values, **key)
    return image


def _caption(
    run: DriftRun, tasks: Sequence[str], grids: dict[str, np.ndarray], plate: Plate
) -> Iterator[str]:
    yield "Drift against the expert's feature norm, by task and layer; both panels share one colour scale."
    yield from captions.origin([run])
    for variant, grid in grids.items():
        if not np.isnan(grid).all():
            at, layer = np.unravel_index(int(np.nanargmax(grid)), grid.shape)
            largest = number(float(grid[at, layer]))
            yield f"Largest, {title(variant)}: {largest} (task {tasks[at]}, layer {layer + 1})."
    if any(np.isnan(grid).any() for grid in grids.values()):
        yield "Grey: not measured."
    rows: pd.DataFrame = run.layers()
    yield captions.samples(rows[rows["task"].isin(tasks)])
    yield "Ratios of sums over samples."
    yield from captions.gaps(plate.missing)
