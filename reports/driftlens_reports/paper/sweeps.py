"""How sensitive calibration is to its coefficients: accuracy by lambda, alpha and rho."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.paper import captions, choice, sweep_points
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.plate import GUIDE, Plate, legend
from driftlens_reports.paper.series import percent_axis
from driftlens_reports.paper.style import figure, hairline, venue_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

FACTORS = {"lam": "λ (ridge)", "alpha": "α (expert share of target)", "rho": "ρ (anchor)"}
_EXAMPLES = {"lam": "0.005,0.05,0.5,5", "alpha": "0,0.15,0.3,0.6,1", "rho": "1,1.5,2,2.5,3"}


@figure("sweeps", title="Sensitivity to the coefficients", paper="Figure 5")
def sweeps(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """A panel per coefficient, a line per run (an upstream merge), a mark at the run's own setting."""
    narrow = venue_of(options.width) == "icml-column"
    plate = Plate(options.width, options.width * (1.7 if narrow else 0.42))
    panels = plate.figure.subplots(3, 1, sharey=True) if narrow else plate.figure.subplots(1, 3, sharey=True)
    entries: dict[str, Artist] = {}
    drawn: list[pd.DataFrame] = []
    notes: list[str] = []
    for letter, factor, axes in zip("abc", FACTORS, panels, strict=True):
        lines, points, note = _draw(plate, axes, runs, letter, factor, options)
        entries, drawn = lines | entries, [*drawn, *points]
        notes.append(note)
    for axes in panels if narrow else panels[:1]:
        if axes.has_data():
            axes.set_ylabel("accuracy, average over tasks" if not narrow else "accuracy")
            percent_axis(axes.yaxis)
    legend(plate.figure, entries, columns=2 if narrow else 3)
    return plate.exhibited(captions.together(_caption(runs, drawn, notes, plate, options)))


def _draw(
    plate: Plate, axes: Axes, runs: Sequence[DriftRun], panel: str, factor: str, options: ExhibitOptions
) -> tuple[dict[str, Artist], list[pd.DataFrame], str]:
    """Draw one panel; returns the legend's lines, the points, and what the caption must say of the panel."""
    entries: dict[str, Artist] = {}
    drawn, note = [], ""
    for run in runs:
        name, look = sweep_points.run_looks(runs)[run.id]
        tasks = choice.tasks_of(run, options)
        points = sweep_points.sweep_points(run, factor, tasks)
        if factor == "lam" and (points["setting"] <= 0).any():
            points = points[points["setting"] > 0]
            note = f"({panel}) λ = 0 was measured too; it has no place on a logarithmic axis."
        if points.empty:
            continue
        drawn.append(points)
        entries[name] = sweep_points.draw_points(plate, axes, run, panel, factor, points, look)
        sweep_points.draw_level(plate, axes, run, panel, tasks, look)
        _mark_default(axes, run, factor, points, choice.calibrated_of(run, options), look.colour)
    if not drawn:
        command = f"`driftlens sweep RUN --param {factor}={_EXAMPLES[factor]}` measures it"
        plate.note(axes, f"({panel}) accuracy by {FACTORS[factor]}", command)
        return {}, [], ""
    axes.set(xlabel=FACTORS[factor])
    plate.title(axes, f"({panel})")
    if factor == "lam":
        _log_axis(axes)
    return entries, drawn, note


def _mark_default(
    axes: Axes, run: DriftRun, factor: str, points: pd.DataFrame, calibrated: str | None, colour: str
) -> None:
    """Ring the point of the run's own setting, or draw a line there where the sweep has no such point."""
    default = sweep_points.default_of(run, factor, calibrated)
    if math.isnan(default):
        return
    at = points[[math.isclose(setting, default, rel_tol=1e-9) for setting in points["setting"]]]
    if at.empty:
        axes.axvline(default, color=colour, linewidth=hairline(), linestyle=(0, (4, 2)), label=GUIDE)
    else:
        ring = axes.plot(at["setting"], at["mean"], linestyle="", marker="o", color=colour, label=GUIDE)[0]
        ring.set(markerfacecolor="none", markersize=2.4 * ring.get_markersize())


def _log_axis(axes: Axes) -> None:
    """A logarithmic axis labelled in plain digits: 0.05, not a power that would need mathematical text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _caption(
    runs: Sequence[DriftRun],
    drawn: Sequence[pd.DataFrame],
    notes: Sequence[str],
    plate: Plate,
    options: ExhibitOptions,
) -> Iterator[str]:
    yield "Accuracy, averaged over tasks, when one coefficient of the calibration varies and the others stay."
    yield from captions.origin(runs)
    if drawn:
        yield "One line per run, that is, per upstream merge; the ring or dashed line marks the run's own setting."
    yield from sweep_points.behind(runs, drawn, options)
    yield from notes
    yield captions.ROUNDED
    yield from captions.gaps(plate.missing)
