"""Figures of sweeps, one line per run and method: calibration samples per task, and FeatCal's coefficients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from driftlens.results.sweep_results import (
    add_mean_scores,
    mean_over_seeds,
    one_factor_sweep_name,
    reference_mean,
    swept_methods,
)
from driftlens.runs.run import DriftRun
from driftlens.utils.variants import ACCURACY
from driftlens_reports.charts.words import count_range, variant_title
from driftlens_reports.paper.exhibit import ROUNDED, ExhibitOptions, ExhibitResult, figure
from driftlens_reports.paper.plate import GUIDE, PaperFigure, add_legend, format_percent_axis, line_style

MEAN = "accuracy (average over tasks), mean over seeds"
_SPREAD = "accuracy (average over tasks), std over seeds"

_FACTORS = {"lam": "λ (ridge)", "alpha": "α (expert share of target)", "rho": "ρ (anchor)"}
# Values that the hint for a missing sweep proposes.
_EXAMPLES: Mapping[str, Sequence[float]] = MappingProxyType(
    {
        "lam": (0.0005, 0.005, 0.05, 0.5, 5.0),
        "alpha": (0.0, 0.15, 0.3, 0.6, 1.0),
        "rho": (1.0, 1.5, 2.0, 2.5, 3.0),
        "n": (8, 16, 32, 64, 128, 256, 512),
    }
)
# Models that calibrated ones are compared with, and the dash of their level.
_LEVELS: Mapping[str, Any] = MappingProxyType({"merged": (0, (1, 2)), "base": (0, (4, 1.5, 1, 1.5))})


@figure("efficiency", title="Accuracy by calibration samples per task")
def _draw_sample_efficiency(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    plate = PaperFigure(runs, options, options.width * (0.8 if options.is_single_column else 0.48))
    axes = plate.figure.subplots()
    entries, points_of = _draw_sweep_curves(plate, axes, runs, "a", "n", options)
    lead = "Accuracy, averaged over tasks, by the number of calibration samples per task."
    if not points_of:
        plate.note_missing_panel(
            axes, "accuracy by calibration samples", f"{_sweep_command_hint('n')}, with labelled test data"
        )
        return plate.finish(lead)
    counts = sorted({float(n) for points in points_of.values() for n in points["setting"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts)
    axes.xaxis.set_major_formatter(lambda value, _: f"{round(value):,}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="calibration samples per task", ylabel="accuracy, average over tasks")
    format_percent_axis(axes.yaxis)
    add_legend(plate.figure, entries)
    measured = [run for run in runs if run.id in points_of]
    return plate.finish(lead, *_sweep_caption_sentences(measured, [*points_of.values()], options), ROUNDED)


@figure("sweeps", title="Sensitivity to the coefficients")
def _draw_coefficient_sweeps(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    """Draw accuracy by coefficient of FeatCal, one panel per coefficient, with a mark at the run's own one."""
    narrow = options.is_single_column
    plate = PaperFigure(runs, options, options.width * (1.7 if narrow else 0.42))
    panels = plate.figure.subplots(3 if narrow else 1, 1 if narrow else 3, sharey=True)
    entries: dict[str, Artist] = {}
    drawn: list[pd.DataFrame] = []
    notes: list[str] = []
    for letter, factor, axes in zip("abc", _FACTORS, panels, strict=True):
        lines, points_of = _draw_sweep_curves(plate, axes, runs, letter, factor, options)
        entries = lines | entries
        drawn += points_of.values()
        if not points_of:
            plate.note_missing_panel(axes, f"({letter}) accuracy by {_FACTORS[factor]}", _sweep_command_hint(factor))
            continue
        axes.set_xlabel(_FACTORS[factor])
        axes.set_title(f"({letter})")
        if factor == "lam":
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(numticks=6))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            settings = [_accuracy_by_setting(run, factor, options.tasks_of(run))["setting"] for run in runs]
            if any((values <= 0).any() for values in settings):
                notes.append(f"({letter}) λ = 0 was measured too; a logarithmic axis cannot show it.")
    for axes in panels if narrow else panels[:1]:
        if axes.has_data():
            axes.set_ylabel("accuracy" if narrow else "accuracy, average over tasks")
            format_percent_axis(axes.yaxis)
    add_legend(plate.figure, entries)
    lead = "Accuracy, averaged over tasks, as one coefficient of the calibration varies."
    if drawn:
        about = "One line per run" + (
            "; dashed and vertical: the setting of its newest FeatCal calibration."
            if any(_own_setting(run, factor) is not None for run in runs for factor in _FACTORS)
            else "."
        )
        notes = [*_sweep_caption_sentences(runs, drawn, options), about, *notes]
    return plate.finish(lead, *notes, ROUNDED)


def _accuracy_by_setting(run: DriftRun, factor: str, tasks: Sequence[str], method: str = "featcal") -> pd.DataFrame:
    """Return mean accuracy and std over the seeds with all tasks, for each value of a swept setting."""
    rows = run.sweeps()
    rows = rows[(rows["sweep"] == one_factor_sweep_name(factor, method)) & rows["task"].isin(tasks)]
    rows = add_mean_scores(run, rows)
    rows = rows.assign(setting=rows[factor].astype(float))
    points = mean_over_seeds(rows, "setting", "score", len(tasks)).rename(columns={"std over seeds": "std"})
    return points[points["mean"].notna()].drop(columns=["tested_low", "tested_high"])


def _draw_sweep_curves(
    plate: PaperFigure,
    axes: Axes,
    runs: Sequence[DriftRun],
    panel: str,
    factor: str,
    options: ExhibitOptions,
) -> tuple[dict[str, Artist], dict[str, pd.DataFrame]]:
    """Draw one sweep curve per run and method; return legend lines by name and points by run id."""
    entries: dict[str, Artist] = {}
    points_of: dict[str, pd.DataFrame] = {}
    names = [run.name for run in runs]
    thin = rcParams["axes.linewidth"]
    methods = {run.id: swept_methods(run, factor) if factor == "n" else ["featcal"] for run in runs}
    every = [(run, method) for run in runs for method in methods[run.id]]
    # One name per line, by which lines of one method differ in their shade, marker and dash.
    lines = {f"calibrated:{method}-{number}": method for number, (_, method) in enumerate(every)}
    for (run, method), line in zip(every, lines, strict=True):
        points = _accuracy_by_setting(run, factor, options.tasks_of(run), method)
        # A logarithmic axis has no 0.
        points = points[points["setting"] > 0] if factor == "lam" else points
        if points.empty:
            continue
        is_first = run.id not in points_of
        points_of[run.id] = points if is_first else pd.concat([points_of[run.id], points])
        x, mean, spread = (points[name].to_numpy(dtype=float) for name in ("setting", "mean", "std"))
        look = line_style(lines, line)
        colour = look["color"]
        name = run.id if names.count(run.name) > 1 else run.name
        if methods[run.id] != ["featcal"]:
            name = method if len(runs) == 1 else f"{name}, {method}"
        (entries[name],) = axes.plot(x, mean, **look)
        axes.vlines(x, mean - spread, mean + spread, color=colour, linewidth=1.3 * thin)
        plate.record(panel, run, {MEAN: mean, _SPREAD: spread}, method=method, **{factor: list(x)})
        for variant, dots in _LEVELS.items() if is_first else ():
            height = reference_mean(run, variant, ACCURACY.name, options.tasks_of(run))
            if not math.isnan(height):
                named = f"{variant_title(variant)}, {name}" if len(runs) > 1 else variant_title(variant)
                entries[named] = axes.axhline(height, color=colour, linewidth=1.3 * thin, linestyle=dots)
                plate.record(panel, run, {"accuracy (average over tasks)": height}, variant=variant)
        own = _own_setting(run, factor) if factor in _FACTORS else None
        if own is not None:
            axes.axvline(own, color=colour, linewidth=thin, linestyle=(0, (4, 2)), label=GUIDE)
    return entries, points_of


def _own_setting(run: DriftRun, factor: str) -> float | None:
    """Return a coefficient of the run's newest FeatCal calibration, which the curves vary; None without any."""
    own = [info.settings.get(factor) for info in run.manifest.calibrations.values() if info.method == "featcal"]
    return next((value for value in reversed(own) if isinstance(value, int | float)), None)


def _sweep_command_hint(factor: str) -> str:
    values = ",".join(f"{value:g}" for value in _EXAMPLES[factor])
    return f"`driftlens sweep RUN --param {factor}={values}` measures it"


def _sweep_caption_sentences(
    runs: Sequence[DriftRun], points: Sequence[pd.DataFrame], options: ExhibitOptions
) -> Iterator[str]:
    rows = pd.concat(points)
    counts = sorted({len(options.tasks_of(run)) for run in runs})
    yield f"Averages are over {' or '.join(map(str, counts))} task{'' if counts == [1] else 's'}."
    if rows["n_test"].notna().any():
        yield f"Accuracy on {count_range(rows['n_test'].dropna().astype(int))} test samples per task."
    if (rows["seeds"] == 1).all():
        yield "One seed per point, so no spread is shown."
    else:
        yield f"Points: mean over {count_range(rows['seeds'])} seeds; bars: one standard deviation over seeds (n - 1)."
    levels = (reference_mean(run, name, ACCURACY.name, options.tasks_of(run)) for run in runs for name in _LEVELS)
    if not all(map(math.isnan, levels)):
        yield "Levels: the merged model before calibration (dotted) and the base (dashed and dotted), where measured."
