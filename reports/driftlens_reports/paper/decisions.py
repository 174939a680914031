"""The figure of decisions under drift: certified, kept and flipped, by task and by margin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from driftlens.runs.run import DriftRun
from driftlens_reports.charts.theme import LIGHT
from driftlens_reports.charts.words import between, called, title
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, figure, origin
from driftlens_reports.paper.layers import missing_columns, note_calibration
from driftlens_reports.paper.plate import Plate, legend, share_axis, short

_OUTCOMES = ("certified", "kept without certificate", "flipped")


@figure("output-drift", title="Certified, kept and flipped decisions")
def output_drift(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Draw how many of the expert's decisions each variant keeps, by task, and at which margins they flip."""
    run, tasks, variants = runs[0], options.tasks_of(runs[0]), options.compared(runs[0])
    task, columns = options.task_of(run), ["flipped", "certified", "margin"]
    lead = "Decisions of the expert under drift: how many its margins certify, and how many flip."
    narrow, count = options.is_narrow, max(len(variants), 1)
    plate = Plate(options.width, 1.1 + 0.2 * len(tasks) + options.width * (0.5 if narrow else 0.26))
    note_calibration(plate, run, options)
    above, below = plate.figure.subfigures(2, 1, height_ratios=[0.5 + 0.2 * len(tasks), 1.4])
    lack = missing_columns(run, "outputs", columns, tasks, variants)
    if lack:
        plate.note(above.subplots(), "(a) certified, kept and flipped decisions", lack)
        plate.note(below.subplots(), "(b) flips by margin", lack)
        return plate.exhibited([lead, *origin([run])])
    rows = run.outputs()
    rows = rows[rows[columns].notna().all(axis=1) & rows["task"].isin(tasks) & rows["variant"].isin(variants)]
    rows = rows.assign(flipped=rows["flipped"].astype(bool), certified=rows["certified"].astype(bool))
    shades = dict(
        zip(_OUTCOMES, (LIGHT.sequential[1], LIGHT.sequential[3], LIGHT.sequential[5]), strict=True)
    )
    panels = above.subplots(1, count, sharey=True, squeeze=False)[0]
    for axes, variant in zip(panels, variants, strict=True):
        _draw_outcomes(plate, axes, run, rows[rows["variant"] == variant], tasks, variant, shades)
    panels[0].set_title(f"(a) {panels[0].get_title('left')}")
    of_task = rows[rows["task"] == task]
    edges = (
        np.linspace(0, float(of_task["margin"].max()) or 1.0, 21) if len(of_task) else np.linspace(0, 1, 21)
    )
    panels = below.subplots(1, count, sharey=True, squeeze=False)[0]
    for axes, variant in zip(panels, variants, strict=True):
        part = of_task[of_task["variant"] == variant]
        bottom = np.zeros(len(edges) - 1)
        for name, mask in (("flipped", part["flipped"]), ("kept", ~part["flipped"])):
            heights = np.histogram(part.loc[mask, "margin"].astype(float), edges)[0]
            shade = shades["flipped" if name == "flipped" else "certified"]
            axes.bar(edges[:-1], heights, np.diff(edges), bottom, align="edge", color=shade)
            bottom = bottom + heights
            key = {"task": task, "variant": variant, "margin_from": edges[:-1]}
            plate.record("b", run, f"{name} decisions", heights, **key)
        axes.set_xlabel("expert's margin")
        axes.set_title(short(title(variant)))
    panels[0].set_ylabel("samples")
    panels[0].set_title(f"(b) {panels[0].get_title('left')}")
    legend(plate.figure, {name: Patch(facecolor=shade) for name, shade in shades.items()})
    sizes = rows.groupby(["task", "variant"]).size()
    about = [
        "(a) Certified: the largest change of a score is below half the expert's margin, so no flip is possible.",
        f"(b) Task: {called(task)}; samples by the expert's margin, its best score minus its second best.",
        f"n = {between(sizes)} diagnosis samples per task.",
    ]
    return plate.exhibited([lead, *origin([run]), *about])


def _draw_outcomes(
    plate: Plate,
    axes: Axes,
    run: DriftRun,
    rows: pd.DataFrame,
    tasks: Sequence[str],
    variant: str,
    shades: dict[str, str],
) -> None:
    """Draw one stacked bar per task: the shares of certified, kept and flipped decisions."""
    outcomes = {
        "certified": rows["certified"] & ~rows["flipped"],
        "kept without certificate": ~rows["certified"] & ~rows["flipped"],
        "flipped": rows["flipped"],
    }
    start = np.zeros(len(tasks))
    for name, mask in outcomes.items():
        shares = mask.groupby(rows["task"]).mean().reindex(tasks).astype(float)
        axes.barh(range(len(tasks)), shares.fillna(0), 0.7, start, color=shades[name])
        start = start + shares.fillna(0).to_numpy()
        plate.record("a", run, f"share {name}", shares, task=list(tasks), variant=variant)
    axes.set_yticks(range(len(tasks)), [short(called(task)) for task in tasks])
    axes.set(xlim=(0, 1), ylim=(len(tasks) - 0.5, -0.5))
    axes.set_title(short(title(variant)))
    share_axis(axes.xaxis)
