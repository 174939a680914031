"""The opening triptych: one task's features, its drift by layer, and every task's accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.paper import captions, choice
from driftlens_reports.paper.accuracy_bars import accuracy_sentence, draw_accuracy
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.layouts import Layout, draw_pairs, layout_of
from driftlens_reports.paper.plate import Plate, legend, legend_key, short
from driftlens_reports.paper.series import by_layer, draw_band, draw_line, layer_axis
from driftlens_reports.paper.style import figure, hairline, venue_of
from driftlens_reports.wording import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@figure("intro", title="Feature drift after merging, and what calibration leaves of it", paper="Figure 1")
def intro(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Matched features, drift by layer and accuracy, merged against calibrated."""
    run, task = runs[0], choice.task_of(runs[0], options)
    calibrated, anchor = choice.calibrated_of(run, options), choice.anchor_of(run, options)
    plate, panels = _panels(options.width)
    layout = layout_of(run, task, ["merged", *filter(None, [calibrated])], "final", options.method)
    for variant, name in (("merged", "merged"), (calibrated, "calibrated")):
        _draw_features(plate, panels[name], run, layout, variant)
    shown = [variant for variant in ("merged", anchor, calibrated) if variant in run.variants]
    change = _draw_drift(plate, panels["layers"], run, task, shown, calibrated)
    draw_accuracy(plate, panels["accuracy"], run, choice.tasks_of(run, options), [*shown, "expert"], "c")
    plate.title(panels["merged"], f"(a) final features, {short(task)}")
    plate.title(panels["layers"], f"(b) drift by layer, {short(task)}")
    plate.title(panels["accuracy"], "(c) accuracy per task")
    legend(plate.figure, {title(variant): legend_key(variant, bar=True) for variant in ["expert", *shown]})
    return plate.exhibited(captions.together(_caption(run, task, layout, change, plate, options)))


def _panels(width: float) -> tuple[Plate, dict[str, Axes]]:
    """The figure and its panels: rows are figures of their own, so that their columns need not line up."""
    narrow = venue_of(width) == "icml-column"
    plate = Plate(width, width * (1.75 if narrow else 0.66))
    if narrow:
        top, middle, bottom = plate.figure.subfigures(3, 1, height_ratios=[1.05, 1, 1])
        merged, calibrated = top.subplots(1, 2)
        layers = middle.subplots()
    else:
        top, bottom = plate.figure.subfigures(2, 1, height_ratios=[1.2, 1])
        merged, calibrated, layers = top.subplots(1, 3, width_ratios=[1, 1, 1.3])
    for axes in (merged, calibrated):
        axes.set_anchor("N")
    return plate, {
        "merged": merged,
        "calibrated": calibrated,
        "layers": layers,
        "accuracy": bottom.subplots(),
    }


def _draw_features(
    plate: Plate, axes: Axes, run: DriftRun, layout: Layout | str, variant: str | None
) -> None:
    if variant is None:
        plate.note(axes, "(a) calibrated features", f"`{choice.CALIBRATE}` adds them")
    elif isinstance(layout, str):
        plate.note(axes, f"(a) features of {title(variant)}", layout)
    elif variant not in set(layout.rows["variant"]):
        plate.note(axes, f"(a) features of {title(variant)}", "the run has no features of this variant")
    else:
        draw_pairs(plate, axes, run, layout, variant, "a")
        cosine = run.value("cos_mean", task=layout.task, variant=variant)
        axes.set_xlabel(f"mean cosine {cosine:.2f}" if not math.isnan(cosine) else "cosine not measured")
        plate.record("a", run, "cos_mean", cosine, task=layout.task, variant=variant, layer=_final(run))


def _draw_drift(
    plate: Plate, axes: Axes, run: DriftRun, task: str, shown: Sequence[str], calibrated: str | None
) -> str:
    """Draw panel (b); returns the final layer's change in words, empty where there is none."""
    drift = run.layers(task)
    if drift.loc[drift["variant"].isin(shown), "drift_l2_mean"].isna().all():
        plate.note(axes, "(b) drift by layer", f"no drift of {task} was measured: `driftlens analyze` does")
        return ""
    for variant in shown:
        rows, is_main = by_layer(run, task, variant), variant in ("merged", calibrated)
        if is_main:
            draw_band(plate, axes, run, "b", rows, task=task, variant=variant)
        draw_line(plate, axes, run, "b", rows, "drift_l2_mean", task=task, variant=variant, thin=not is_main)
    layer_axis(axes, run)
    axes.set(ylabel="mean L2 drift (feature units)", ylim=(0, 1.35 * axes.dataLim.y1))  # room for the box
    if calibrated is None or "merged" not in shown:
        return ""
    before, after = (run.value("drift_l2_mean", task=task, variant=name) for name in ("merged", calibrated))
    if math.isnan(before) or math.isnan(after) or before == 0:
        return ""
    shift, share = after - before, 100 * (after - before) / before
    key: dict[str, Any] = {"task": task, "variant": calibrated, "layer": _final(run)}
    plate.record("b", run, "change of final drift_l2_mean", shift, **key)
    plate.record("b", run, "change of final drift_l2_mean, percent", share, **key)
    box = {
        "boxstyle": "round,pad=0.35",
        "facecolor": "white",
        "edgecolor": "#888888",
        "linewidth": hairline(),
    }
    words = f"{captions.signed(share, 0)} % ({captions.signed(shift, 2)})"
    axes.text(0.04, 0.95, f"final layer:\n{words}", va="top", transform=axes.transAxes, bbox=box)
    return (
        f"At the final layer {number(before)} become {number(after)}, "
        f"{captions.signed(share, 1)} % ({captions.signed(shift, 2)})."
    )


def _caption(
    run: DriftRun, task: str, layout: Layout | str, change: str, plate: Plate, options: ExhibitOptions
) -> Iterator[str]:
    yield "Feature drift after merging and after calibration."
    yield from captions.origin([run])
    if not isinstance(layout, str):
        yield (
            f"(a) Final features of task {task}, scaled to norm 1 and matched by sample, in one joint "
            f"layout ({layout.method}, fitted once to all variants); below, the mean cosine to the expert's feature."
        )
        yield f"Trustworthiness of the plane: {layout.trust}." if layout.trust else ""
        yield from layout.notes
    yield f"(b) Mean L2 drift of task {task} by layer. {captions.BAND}"
    yield change
    if choice.anchor_of(run, options) is not None:
        yield "Thin line: the calibration's anchor by itself."
    yield captions.samples(run.layers(task))
    yield accuracy_sentence(run, choice.tasks_of(run, options), "(c)")
    yield captions.ROUNDED
    yield from captions.gaps(plate.missing)


def _final(run: DriftRun) -> int:
    return run.layer_index("final")
