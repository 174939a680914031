"""The opening triptych: one task's features, its drift by layer, and every task's accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from driftlens.records.run import DriftRun
from driftlens_reports.paper import captions, choice
from driftlens_reports.paper.chart_figures import ACCURACY, DRIFT
from driftlens_reports.paper.charted import Picture, View, caption_of, picture_of, place
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.matched import Layout, draw_pairs, layout_of
from driftlens_reports.paper.plate import Plate, short
from driftlens_reports.paper.static import add_legend
from driftlens_reports.paper.style import figure, hairline, venue_of
from driftlens_reports.wording import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure


@figure("intro", title="Feature drift after merging, and what calibration leaves of it", paper="Figure 1")
def intro(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Matched features, drift by layer and accuracy, merged against calibrated."""
    run, task = runs[0], choice.task_of(runs[0], options)
    calibrated = choice.calibrated_of(run, options)
    drift = picture_of(run, options, View("layer-drift", DRIFT, is_about_one=True))
    accuracy = picture_of(run, options, View("accuracy", ACCURACY))
    plate, features, parts = _parts(options.width)
    layout = layout_of(run, task, ["merged", *filter(None, [calibrated])], "final", options.method)
    for variant, axes in zip(("merged", calibrated), features, strict=True):
        draw_pairs(plate, axes, run, layout, variant, "a")
    plate.title(features[0], f"(a) final features, {short(task)}")
    panels = place(plate, parts[0], run, "b", drift)
    change = _add_change(plate, panels[0].axes, run, task, calibrated) if panels else ""
    place(plate, parts[1], run, "c", accuracy)
    add_legend(plate.figure, [entry.drawn.figure for entry in (drift, accuracy) if entry.drawn])
    return plate.exhibited(captions.together(_caption(run, layout, (drift, change, accuracy), plate)))


def _parts(width: float) -> tuple[Plate, list[Axes], list[SubFigure]]:
    """The figure, the axes of both feature panels, and the parts for drift and accuracy."""
    narrow = venue_of(width) == "icml-column"
    plate = Plate(width, width * (1.8 if narrow else 0.74))
    if narrow:
        left, *parts = plate.figure.subfigures(3, 1, height_ratios=[1.05, 1, 1])
    else:
        top, bottom = plate.figure.subfigures(2, 1, height_ratios=[1.2, 1])
        left, right = top.subfigures(1, 2, width_ratios=[1.5, 1])
        parts = [right, bottom]
    features = list(left.subplots(1, 2))
    for axes in features:
        axes.set_anchor("N")
    return plate, features, parts


def _add_change(plate: Plate, axes: Axes, run: DriftRun, task: str, calibrated: str | None) -> str:
    """Write the final layer's change into panel (b); returns it in words, empty where there is none."""
    before, after = (
        run.value("drift_l2_mean", task=task, variant=name) if name in run.variants else math.nan
        for name in ("merged", calibrated or "")
    )
    if math.isnan(before) or math.isnan(after) or before == 0:
        return ""
    shift, share = after - before, 100 * (after - before) / before
    key: dict[str, Any] = {"task": task, "variant": calibrated, "layer": run.layer_index("final")}
    plate.record("b", run, "change of final drift_l2_mean", shift, **key)
    plate.record("b", run, "change of final drift_l2_mean, percent", share, **key)
    axes.set_ylim(top=1.35 * axes.get_ylim()[1])  # room for the box
    box = {
        "boxstyle": "round,pad=0.35",
        "facecolor": "white",
        "edgecolor": "#888888",
        "linewidth": hairline(),
    }
    words = f"final layer:\n{captions.signed(share, 0)} % ({captions.signed(shift, 2)})"
    axes.text(0.04, 0.95, words, va="top", transform=axes.transAxes, bbox=box)
    return (
        f"At the final layer {number(before)} become {number(after)}, "
        f"{captions.signed(share, 1)} % ({captions.signed(shift, 2)})."
    )


def _caption(
    run: DriftRun, layout: Layout | str, below: tuple[Picture, str, Picture], plate: Plate
) -> Iterator[str]:
    drift, change, accuracy = below
    yield "Feature drift after merging and after calibration."
    yield from captions.origin([run])
    if not isinstance(layout, str):
        yield (
            f"(a) Final features of task {layout.task}, scaled to norm 1 and matched by sample, in one joint "
            f"layout ({layout.method}, fitted once to all variants); below, the mean cosine to the expert's feature."
        )
        yield f"Trustworthiness of the plane: {layout.trust}." if layout.trust else ""
        yield from layout.notes
    yield from caption_of(drift, "b")
    yield change
    yield from caption_of(accuracy, "c")
    yield captions.ROUNDED
    yield from captions.gaps(plate.missing)
