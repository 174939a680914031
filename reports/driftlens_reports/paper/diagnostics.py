"""Four panels against a baseline: cosines by task and sample, what they buy in accuracy, and parameter alignment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.charts.thinning import thinned
from driftlens_reports.paper import captions, choice
from driftlens_reports.paper.accuracy_bars import NO_ACCURACY, accuracy_rows
from driftlens_reports.paper.captions import spaced
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.placing import Point, label_points
from driftlens_reports.paper.plate import Plate, diagonal, guide, legend, legend_key, short
from driftlens_reports.paper.series import draw_dots
from driftlens_reports.paper.style import dot_area, figure, hairline, look_of, venue_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 2000
"""Samples drawn in panel (b)."""


@figure(
    "diagnostics", title="Calibration against a baseline, in features and parameters", paper="Figures 2 and 7"
)
def diagnostics(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Cosine by task, cosine by sample, cosine gain against accuracy gain, task-vector cosine."""
    run, task = runs[0], choice.task_of(runs[0], options)
    tasks, variants = choice.tasks_of(run, options), choice.compared(run, options)
    baseline, calibrated = choice.baseline_of(run, options), choice.calibrated_of(run, options)
    plate, axes = _panels(options.width, len(tasks))
    _draw_cosines(plate, axes["a"], run, tasks, variants)
    _draw_alignment(plate, axes["d"], run, tasks, variants)
    if calibrated is None:
        for panel, what in (("b", "cosine per sample"), ("c", "cosine gain against accuracy gain")):
            plate.note(axes[panel], f"({panel}) {what}", f"`{choice.CALIBRATE}` adds the calibrated model")
        drawn, gains = "", []
    else:
        drawn = _draw_samples(plate, axes["b"], run, task, baseline, calibrated)
        gains = _draw_gains(plate, axes["c"], run, tasks, baseline, calibrated)
    plate.title(axes["a"], "(a) final features")
    plate.title(axes["b"], f"(b) samples of {short(task)}")
    plate.title(axes["c"], f"(c) gain over {short(title(baseline), 24)}")
    plate.title(axes["d"], "(d) task vectors, whole backbone")
    legend(plate.figure, {title(variant): legend_key(variant, line=False) for variant in variants})
    label_points(axes["c"], gains)
    return plate.exhibited(captions.together(_caption(run, tasks, baseline, calibrated, drawn, plate)))


def _panels(width: float, tasks: int) -> tuple[Plate, dict[str, Axes]]:
    narrow = venue_of(width) == "icml-column"
    rows = width * (0.045 if narrow else 0.022) * (tasks + 1)
    places = [["a"], ["b"], ["c"], ["d"]] if narrow else [["a", "b"], ["c", "d"]]
    plate = Plate(width, 2 * (0.8 * width + rows) if narrow else 0.62 * width + 2 * rows)
    return plate, plate.figure.subplot_mosaic(places)


def _final_cosines(run: DriftRun, tasks: Sequence[str], variant: str) -> Mapping[str, float]:
    rows = run.layers(variant=variant, layer="final")
    rows = rows[rows["task"].isin(tasks) & rows["cos_mean"].notna()]
    return dict(zip(rows["task"], rows["cos_mean"].astype(float), strict=True))


def _draw_cosines(
    plate: Plate, axes: Axes, run: DriftRun, tasks: Sequence[str], variants: Sequence[str]
) -> None:
    found = {variant: _final_cosines(run, tasks, variant) for variant in variants}
    if not any(found.values()):
        plate.note(axes, "(a) cosine per task", "`driftlens analyze` measures it for merged models")
        return
    draw_dots(plate, axes, run, "a", "cos_mean", found, tasks)
    axes.set_xlabel("mean cosine to the expert's feature")


def _draw_samples(plate: Plate, axes: Axes, run: DriftRun, task: str, baseline: str, calibrated: str) -> str:
    """Draw panel (b); returns its part of the caption."""
    pairs = _pairs(run, task, baseline, calibrated)
    if pairs.empty:
        plate.note(axes, "(b) cosine per sample", f"no sample has both {baseline} and {calibrated}")
        return ""
    shown = thinned(pairs, MOST, by=["label"])
    look, gain = look_of(calibrated), float((pairs["after"] - pairs["before"]).mean())
    dots = axes.scatter(
        shown["before"], shown["after"], s=dot_area(0.75), marker=look.marker, linewidths=0.6 * hairline()
    )
    dots.set(facecolor=look.colour, edgecolor="white", alpha=0.7)
    ends = [float(shown[["before", "after"]].min().min()), float(shown[["before", "after"]].max().max())]
    diagonal(axes, *ends)
    margin = 0.04 * (ends[1] - ends[0]) or 0.01
    window = (ends[0] - margin, ends[1] + margin)
    axes.set(xlim=window, ylim=window)
    axes.set(xlabel=f"cosine, {short(title(baseline), 24)}", ylabel=f"cosine, {short(title(calibrated), 24)}")
    words = f"mean gain {captions.signed(gain, 3)}"
    axes.text(0.97, 0.05, words, ha="right", transform=axes.transAxes)
    for variant, column in ((baseline, "before"), (calibrated, "after")):
        ids = list(shown["sample_id"])
        plate.record("b", run, "cos", shown[column], task=task, variant=variant, sample_id=ids)
    plate.record("b", run, "mean gain of cos", gain, task=task, variant=calibrated)
    part = f"; {spaced(len(shown))} of them drawn" if len(shown) < len(pairs) else ""
    return (
        f"(b) Cosine of single samples of task {task} (n = {spaced(len(pairs))}{part}), {title(baseline)} "
        f"against {title(calibrated)}; dashed: no change; {words}."
    )


def _pairs(run: DriftRun, task: str, baseline: str, calibrated: str) -> pd.DataFrame:
    """The final cosines of the samples that both variants have: sample_id, label, before, after."""
    before, after = (
        run.samples(task, variant, "final")[["sample_id", "label", "cos"]]
        for variant in (baseline, calibrated)
    )
    pairs = before.rename(columns={"cos": "before"}).merge(
        after.rename(columns={"cos": "after"})[["sample_id", "after"]], on="sample_id"
    )
    return pairs[pairs["before"].notna() & pairs["after"].notna()].reset_index(drop=True)


def _draw_gains(
    plate: Plate, axes: Axes, run: DriftRun, tasks: Sequence[str], baseline: str, calibrated: str
) -> list[Point]:
    """Draw panel (c); returns its points, to be named when the layout is final."""
    rows = accuracy_rows(run, tasks)
    scores = {
        variant: dict(zip(of["task"], of["value"].astype(float), strict=True))
        for variant in (baseline, calibrated)
        for of in [rows[rows["variant"] == variant]]
    }
    cosines = {variant: _final_cosines(run, tasks, variant) for variant in (baseline, calibrated)}
    there = [task for task in tasks if all(task in found for found in (*scores.values(), *cosines.values()))]
    if not there:
        lacking = NO_ACCURACY if any(cosines.values()) else "no cosine was measured; `driftlens analyze` does"
        plate.note(axes, "(c) cosine gain against accuracy gain", lacking)
        return []
    across = np.array([cosines[calibrated][task] - cosines[baseline][task] for task in there])
    along = 100 * np.array([scores[calibrated][task] - scores[baseline][task] for task in there])
    look = look_of(calibrated)
    guide(axes, x=0, y=0)
    axes.scatter(across, along, s=dot_area(1.2), marker=look.marker, color=look.colour)
    axes.margins(0.18)
    axes.set(xlabel="gain in mean cosine", ylabel="accuracy gain (points)")
    for quantity, values in (("gain of cos_mean", across), ("gain of accuracy, points", along)):
        plate.record("c", run, quantity, values, task=there, variant=calibrated)
    return list(zip(across, along, there, strict=True))


def _draw_alignment(
    plate: Plate, axes: Axes, run: DriftRun, tasks: Sequence[str], variants: Sequence[str]
) -> None:
    rows = run.params()
    rows = rows[(rows["scope"] == "backbone") & rows["task"].isin(tasks) & rows["cos"].notna()]
    found = {
        variant: dict(zip(of["task"], of["cos"].astype(float), strict=True))
        for variant in variants
        for of in [rows[rows["variant"] == variant]]
        if len(of)
    }
    if not found:
        plate.note(
            axes, "(d) task-vector cosine", "`driftlens analyze` measures it where the spec names a base"
        )
        return
    draw_dots(plate, axes, run, "d", "cos", found, tasks)
    axes.set_xlabel("cosine of task vectors, variant and expert")


def _caption(
    run: DriftRun, tasks: Sequence[str], baseline: str, calibrated: str | None, drawn: str, plate: Plate
) -> Iterator[str]:
    yield f"What calibration changes, compared with {title(baseline)}."
    yield from captions.origin([run])
    yield "(a) Mean cosine between final features and those of each task's expert."
    rows = run.layers(layer="final")
    yield captions.samples(rows[rows["task"].isin(tasks)])
    yield drawn
    if calibrated is not None:
        yield (
            f"(c) Gain of {title(calibrated)} over {title(baseline)} in mean cosine and in accuracy, a point "
            "per task: cosine is a diagnostic, not an explanation of accuracy."
        )
    yield "(d) Cosine of each variant's task vector to the same task's expert, over the whole backbone."
    if len(tasks) > 1:
        yield f"Averages are over the {len(tasks)} tasks shown."
    yield captions.ROUNDED
    yield from captions.gaps(plate.missing)
