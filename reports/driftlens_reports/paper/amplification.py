"""Whether layers let incoming drift grow or shrink, and how well their Jacobians account for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.paper import captions, choice
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.plate import Plate, guide, legend, legend_key, short
from driftlens_reports.paper.series import by_layer, draw_line, layer_axis
from driftlens_reports.paper.style import figure, look_of, venue_of
from driftlens_reports.wording import error

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@figure("amplification", title="Growth of incoming drift by layer")
def amplification(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Amplification by layer with the line at 1, and the band that the Jacobian's error leaves open."""
    run, task = runs[0], choice.task_of(runs[0], options)
    shown = dict.fromkeys(("merged", choice.anchor_of(run, options), choice.calibrated_of(run, options)))
    variants = [variant for variant in shown if variant in run.variants]
    narrow = venue_of(options.width) == "icml-column"
    plate = Plate(options.width, options.width * (0.75 if narrow else 0.42))
    axes = plate.figure.subplots()
    drawn: dict[str, pd.DataFrame] = {}
    for variant in variants:
        rows = by_layer(run, task, variant)
        if rows["amplification"].notna().any():
            drawn[variant] = rows
            _draw_band(plate, axes, run, rows, task, variant)
            draw_line(plate, axes, run, "a", rows, "amplification", task=task, variant=variant)
    if drawn:
        guide(axes, y=1)
        axes.annotate("no growth", (1, 1), (-2, 2), ha="right", va="bottom", **_in_axes(axes))
        layer_axis(axes, run)
        axes.set_ylabel("amplification |p| / |incoming e|")
        axes.set_title(short(task), loc="left")
        legend(plate.figure, {title(variant): legend_key(variant) for variant in drawn})
    else:
        plate.note(axes, "amplification by layer", "a run of more than one layer has it; `driftlens analyze`")
    if choice.calibrated_of(run, options) is None:
        plate.lack("the calibrated model", f"`{choice.CALIBRATE}` adds it")
    return plate.exhibited(captions.together(_caption(run, task, drawn, plate)))


def _in_axes(axes: Axes) -> dict[str, Any]:
    """A place given across in parts of the axes and along in data, with an offset in points."""
    return {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "color": "#444444"}


def _draw_band(plate: Plate, axes: Axes, run: DriftRun, rows: pd.DataFrame, task: str, variant: str) -> None:
    """The gain |A e| / |e| lies within jacobian_error of the amplification, by the triangle inequality."""
    middle, off = (rows[name].to_numpy(dtype=float) for name in ("amplification", "jacobian_error"))
    if np.isnan(off).all():
        return
    layers = rows.index.to_numpy()
    axes.fill_between(
        layers, middle * (1 - off), middle * (1 + off), color=look_of(variant).colour, alpha=0.2, linewidth=0
    )
    plate.record("a", run, "jacobian_error", off, task=task, variant=variant, layer=list(layers))


def _caption(run: DriftRun, task: str, drawn: dict[str, pd.DataFrame], plate: Plate) -> Iterator[str]:
    yield f"Norm of what each layer passes on of the incoming drift of task {task}, against that drift."
    yield from captions.origin([run])
    if drawn:
        yield "Above 1 a layer lets drift grow. Ratios of sums over samples; the stem has no incoming drift."
        worst = max((float(rows["jacobian_error"].max()) for rows in drawn.values()), default=np.nan)
        if not np.isnan(worst):
            nodes = captions.span([int(n) for rows in drawn.values() for n in rows["nodes"].dropna()])
            yield (
                "Bands: where the path-averaged Jacobian A puts the gain |A e| / |e|, given its error "
                f"|p - A e| / |p| (at most {error(worst)}, {nodes} quadrature nodes)."
            )
    yield captions.samples(run.layers(task))
    yield captions.jacobian_samples(run.layers(task))
    yield from captions.gaps(plate.missing)
