"""Which layers the final drift comes from, as signed shares that sum to one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.paper import captions, choice
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.plate import Plate, guide, short
from driftlens_reports.paper.series import by_layer, percent_axis
from driftlens_reports.paper.style import figure, hairline, look_of, venue_of
from driftlens_reports.wording import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MISSING = "`driftlens analyze` with `metrics.contributions: true` in the spec measures it"


@figure("contributions", title="Layers that the final drift comes from")
def contributions(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Bars of `final_share` with the remainder, marks of `prefix_share`; a panel per variant on one scale."""
    run, task = runs[0], choice.task_of(runs[0], options)
    shown = dict.fromkeys(("merged", choice.anchor_of(run, options), choice.calibrated_of(run, options)))
    variants = [variant for variant in shown if variant in run.variants]
    narrow = venue_of(options.width) == "icml-column"
    plate = Plate(options.width, len(variants or "1") * options.width * (0.5 if narrow else 0.3))
    panels = plate.figure.subplots(len(variants) or 1, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    drawn = []
    for letter, variant, axes in zip("abc", variants, panels, strict=False):
        rows = by_layer(run, task, variant)
        if rows[["final_share", "prefix_share"]].isna().all(axis=None):
            plate.note(axes, f"({letter}) {title(variant)}", _MISSING)
        else:
            drawn.append(_draw(plate, axes, run, letter, rows, task, variant))
    if choice.calibrated_of(run, options) is None:
        plate.lack("the calibrated model", f"`{choice.CALIBRATE}` adds it")
    return plate.exhibited(captions.together(_caption(run, task, drawn, plate)))


def _draw(
    plate: Plate, axes: Axes, run: DriftRun, panel: str, rows: pd.DataFrame, task: str, variant: str
) -> str:
    """Draw one variant's shares; returns their sum in words."""
    look, layers = look_of(variant), rows.index.to_numpy()
    shares, swapped = (rows[name].to_numpy(dtype=float) for name in ("final_share", "prefix_share"))
    rest = rows["remainder_share"].astype(float).iloc[-1]
    places, heights = np.append(layers, len(layers) + 1.5), np.append(shares, rest)
    axes.bar(places, heights, 0.7, color=look.colour, edgecolor="white", linewidth=0, hatch=look.hatch)
    marks = axes.plot(layers, swapped, linestyle="", marker="o", color="#111111")[0]
    marks.set(markerfacecolor="white", markeredgewidth=hairline())
    guide(axes, y=0)
    key: dict[str, Any] = {"task": task, "variant": variant, "layer": list(layers)}
    plate.record(panel, run, "final_share", shares, **key)
    plate.record(panel, run, "prefix_share", swapped, **key)
    plate.record(panel, run, "remainder_share", rest, task=task, variant=variant, layer=len(layers))
    plate.title(axes, f"({panel}) {short(title(variant), 28)}, {short(task)}")
    axes.set_ylabel("share of final drift")
    percent_axis(axes.yaxis)
    every = 1 + len(layers) // 16
    axes.set_xticks([*layers[::every], places[-1]], [*map(str, layers[::every]), "rest"])
    axes.set(xlim=(0.4, places[-1] + 0.6))
    if axes.get_subplotspec().is_last_row():
        axes.set_xlabel(f"layer (1: stem, {len(layers)}: head)")
    return f"{title(variant)}: {percent(float(np.nansum(heights)))}"


def _caption(run: DriftRun, task: str, drawn: Sequence[str], plate: Plate) -> Iterator[str]:
    yield f"Signed shares of the final drift of task {task} by the layer whose local mismatch they come from."
    yield from captions.origin([run])
    if drawn:
        yield (
            "Bars: each layer's mismatch carried on by the path-averaged Jacobians of later layers, projected on the "
            f"final drift; rest: the quadrature's remainder. Bars sum to 1 ({'; '.join(drawn)})."
        )
        yield "Circles: the shares by swapping prefixes of layers, which need no derivative and sum to 1 too."
        yield "Shares are ratios of sums over samples; a negative one cancels drift of other layers."
    yield captions.samples(run.layers(task))
    yield captions.jacobian_samples(run.layers(task))
    yield from captions.gaps(plate.missing)
