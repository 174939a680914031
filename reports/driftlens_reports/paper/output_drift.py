"""What drift does to decisions: how many the margins protect, and how many flip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import is_control, title
from driftlens_reports.charts.thinning import thinned
from driftlens_reports.paper import captions, choice
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.plate import Plate, diagonal, legend, legend_key, short
from driftlens_reports.paper.series import draw_dots, percent_axis
from driftlens_reports.paper.style import dot_area, figure, hairline, look_of, venue_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 1000
"""Samples drawn per variant in panel (c)."""

_MISSING = "`driftlens analyze` measures it where the spec gives heads"


@figure("output-drift", title="Margins, score drift and flipped decisions")
def output_drift(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Share of decisions certified by their margin, share flipped, and score drift against half the margin."""
    run, task = runs[0], choice.task_of(runs[0], options)
    tasks = choice.tasks_of(run, options)
    shown = dict.fromkeys(("merged", choice.anchor_of(run, options), choice.calibrated_of(run, options)))
    variants = [variant for variant in shown if variant in run.variants]
    plate, panels = _panels(options.width, len(tasks))
    rows = run.outputs()
    rows = rows[rows["task"].isin(tasks) & rows["variant"].isin(variants)]
    for panel, quantity, words in (
        ("a", "certified", "decisions certified by their margin"),
        ("b", "flipped", "decisions flipped"),
    ):
        _draw_shares(plate, panels[panel], run, panel, _shares(rows, quantity, variants), quantity, tasks)
        if panels[panel].has_data():
            panels[panel].set_xlabel(words)
            plate.title(panels[panel], f"({panel}) {'margin coverage' if panel == 'a' else 'flips'}")
    drawn = _draw_samples(plate, panels["c"], run, rows[rows["task"] == task], variants)
    if drawn:
        plate.title(panels["c"], f"(c) samples of {short(task)}")
    legend(plate.figure, {title(variant): legend_key(variant, line=False) for variant in variants})
    return plate.exhibited(captions.together(_caption(run, rows, task, drawn, plate)))


def _panels(width: float, tasks: int) -> tuple[Plate, dict[str, Axes]]:
    narrow = venue_of(width) == "icml-column"
    rows = width * (0.045 if narrow else 0.022) * (tasks + 1)
    if narrow:
        plate = Plate(width, 1.5 * width + 2 * rows)
        return plate, plate.figure.subplot_mosaic([["a"], ["b"], ["c"]])
    plate = Plate(width, 0.3 * width + rows)
    plate.figure.get_layout_engine().set(wspace=0.06)  # "100 %" and the next panel's "0 %" stand apart
    return plate, plate.figure.subplot_mosaic([["a", "b", "c"]], width_ratios=[1, 1, 1.25])


def _shares(rows: pd.DataFrame, quantity: str, variants: Sequence[str]) -> dict[str, dict[str, float]]:
    """By variant and task, the share of samples for which `quantity` holds."""
    values = rows.assign(value=rows[quantity].astype("Float64").astype(float))
    means = values[values["value"].notna()].groupby(["variant", "task"])["value"].mean()
    return {
        variant: {str(task): float(share) for task, share in means[variant].items()}
        for variant in variants
        if variant in means
    }


def _draw_shares(
    plate: Plate,
    axes: Axes,
    run: DriftRun,
    panel: str,
    found: Mapping[str, Mapping[str, float]],
    quantity: str,
    tasks: Sequence[str],
) -> None:
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    if not found:
        plate.note(axes, f"({panel}) share {quantity}", _MISSING)
        return
    draw_dots(plate, axes, run, panel, f"share {quantity}", found, tasks)
    highest = max(share for shares in found.values() for share in shares.values())
    axes.set_xlim(0, 1 if panel == "a" else 1.08 * highest or 0.1)
    axes.xaxis.set_major_locator(MultipleLocator(0.5) if panel == "a" else MaxNLocator(nbins=3))
    percent_axis(axes.xaxis)
    if panel == "b" and venue_of(plate.figure.get_figwidth()) != "icml-column":
        axes.set_yticklabels([])


def _draw_samples(
    plate: Plate, axes: Axes, run: DriftRun, rows: pd.DataFrame, variants: Sequence[str]
) -> str:
    """Draw panel (c); returns its part of the caption, empty where the run lacks scores."""
    rows = rows[rows["margin"].notna() & rows["score_drift_inf"].notna()]
    if rows.empty:
        plate.note(axes, "(c) score drift against margin", _MISSING)
        return ""
    corner, shown, there = [0.0, 0.0], 0, 0
    for variant in (name for name in variants if not is_control(name)):
        found = rows[rows["variant"] == variant]
        kept, look = thinned(found, MOST, by=["flipped"]), look_of(variant)
        half, drift = kept["margin"].astype(float) / 2, kept["score_drift_inf"].astype(float)
        flipped = kept["flipped"].fillna(False).astype(bool)
        # Flipped decisions are filled, kept ones hollow.
        fill = [look.colour if is_flipped else "none" for is_flipped in flipped]
        axes.scatter(
            half,
            drift,
            s=dot_area(0.8),
            marker=look.marker,
            facecolor=fill,
            edgecolor=look.colour,
            linewidths=0.8 * hairline(),
        )
        key: dict[str, Any] = {
            "task": list(kept["task"]),
            "variant": variant,
            "sample_id": list(kept["sample_id"]),
        }
        plate.record("c", run, "margin / 2", half, **key)
        plate.record("c", run, "score_drift_inf", drift, **key)
        corner = [max(corner[0], float(half.max())), max(corner[1], float(drift.max()))]
        shown, there = shown + len(kept), there + len(found)
    diagonal(axes, 0.0, min(corner))
    axes.set(
        xlabel="half the expert's margin (score)",
        ylabel="largest score change",
        xlim=(0, 1.06 * corner[0]),
        ylim=(0, 1.06 * corner[1]),
    )
    part = f" {captions.spaced(shown)} of {captions.spaced(there)} points are drawn." if shown < there else ""
    return f"below the diagonal no flip is possible; filled: flipped.{part}"


def _caption(run: DriftRun, rows: pd.DataFrame, task: str, drawn: str, plate: Plate) -> Iterator[str]:
    yield "What drift does to decisions."
    yield from captions.origin([run])
    counts = rows.groupby(["task", "variant"]).size()
    if len(counts):
        yield f"n = {captions.span(list(counts))} samples of the diagnosis split per task."
        yield (
            "(a) Share of samples whose largest score change is below half the expert's margin, so that the decision "
            "cannot differ; (b) share whose decision differs from the expert's. Averages are over tasks."
        )
    if drawn:
        yield f"(c) Score change against half the margin, samples of task {task}: {drawn}"
    yield from captions.gaps(plate.missing)
