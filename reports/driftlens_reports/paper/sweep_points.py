"""Points of a sweep: accuracy averaged over tasks, by setting, with its spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import part_of
from driftlens_reports.paper import choice
from driftlens_reports.paper.accuracy_bars import accuracy_rows
from driftlens_reports.paper.captions import span
from driftlens_reports.paper.exhibit import ExhibitOptions
from driftlens_reports.paper.plate import Plate
from driftlens_reports.paper.style import Look, hairline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

MEAN = "accuracy (average over tasks), mean over seeds"
SPREAD = "accuracy (average over tasks), std over seeds"

RUN_LOOKS = (
    Look("#D55E00", "s", "-", ""),
    Look("#7A3300", "o", (0.0, (5.0, 1.5)), ""),
    Look("#F0A050", "D", (0.0, (1.2, 1.2)), ""),
    Look("#A8481C", "v", (0.0, (5.0, 1.5, 1.0, 1.5)), ""),
)
"""Looks of runs in one panel: all calibrated, hence all orange, and apart by shade, marker and dash."""


def sweep_points(run: DriftRun, factor: str, tasks: Sequence[str]) -> pd.DataFrame:
    """One row per value of `factor` in its single-factor sweep, ascending: setting, mean, std, seeds, n_test.

    `mean` and `std` are over seeds, of the accuracy averaged over tasks; `std` (of a sample: n - 1) is NaN with one
    seed. A seed that lacks a task is left out, because its average would be over other tasks.
    """
    rows = run.sweeps()
    rows = rows[(rows["sweep"] == factor) & rows["task"].isin(tasks) & rows["accuracy"].notna()]
    rows = rows.assign(setting=rows[factor].astype(float))
    seeds = rows.groupby(["setting", "seed"]).agg(
        value=("accuracy", "mean"), tasks=("task", "nunique"), n_test=("n_test", "min")
    )
    whole = seeds[seeds["tasks"] == len(tasks)].reset_index()
    points = whole.groupby("setting").agg(
        mean=("value", "mean"), std=("value", "std"), seeds=("seed", "nunique"), n_test=("n_test", "min")
    )
    return points.reset_index()


def run_looks(runs: Sequence[DriftRun]) -> dict[str, tuple[str, Look]]:
    """By run id: the name in legends, and the look. Runs that share a name go by their ids."""
    names = [run.name for run in runs]
    shown = [run.id if names.count(run.name) > 1 else run.name for run in runs]
    return {
        run.id: (name, RUN_LOOKS[at % len(RUN_LOOKS)])
        for at, (run, name) in enumerate(zip(runs, shown, strict=True))
    }


def draw_points(
    plate: Plate, axes: Axes, run: DriftRun, panel: str, factor: str, points: pd.DataFrame, look: Look
) -> Line2D:
    """Draw and record one run's sweep: a line through the means, bars of one standard deviation over seeds."""
    x, mean, spread = (points[name].to_numpy(dtype=float) for name in ("setting", "mean", "std"))
    (line,) = axes.plot(x, mean, color=look.colour, marker=look.marker, linestyle=look.dash)
    axes.vlines(x, mean - spread, mean + spread, color=look.colour, linewidth=1.3 * hairline())
    settings: dict[str, Any] = {factor: list(x)}
    plate.record(panel, run, MEAN, mean, **settings)
    plate.record(panel, run, SPREAD, spread, **settings)
    return line


def merged_level(run: DriftRun, tasks: Sequence[str]) -> float:
    """The merged model's accuracy, averaged over `tasks`; NaN where the run lacks it for one of them."""
    rows = accuracy_rows(run, tasks)
    merged = rows[rows["variant"] == "merged"]
    return float(merged["value"].mean()) if len(merged) == len(tasks) else math.nan


def draw_level(plate: Plate, axes: Axes, run: DriftRun, panel: str, tasks: Sequence[str], look: Look) -> None:
    """Draw and record `merged_level` as a dotted line, where there is one."""
    level = merged_level(run, tasks)
    if not math.isnan(level):
        axes.axhline(level, color=look.colour, linewidth=1.3 * hairline(), linestyle=(0, (1, 2)))
        plate.record(panel, run, "accuracy (average over tasks)", level, variant="merged")


def default_of(run: DriftRun, factor: str, wanted: str | None) -> float:
    """The setting of the run's calibration that the sweep varies around; NaN where the run does not say.

    Args:
        run: the run.
        factor: lam, rho or alpha.
        wanted: the calibrated variant; None where there is none.
    """
    if wanted is None or part_of(wanted) != "calibrated":
        return math.nan
    info = run.manifest.calibrations.get(wanted.partition(":")[2])
    value = None if info is None else info.settings.get(factor)
    return float(value) if isinstance(value, (int, float)) else math.nan


def behind(
    runs: Sequence[DriftRun], points: Iterable[pd.DataFrame], options: ExhibitOptions
) -> Iterator[str]:
    """What stands behind the points, in sentences: tasks, test samples, seeds, and the merged model's level."""
    frames = [frame for frame in points if len(frame)]
    if not frames:
        return
    counts = sorted({len(choice.tasks_of(run, options)) for run in runs})
    yield f"Averages are over {' or '.join(map(str, counts))} task{'' if counts == [1] else 's'}."
    tests = [int(count) for frame in frames for count in frame["n_test"].dropna()]
    if tests:
        yield f"Accuracy on {span(tests)} test samples per task."
    seeds = sorted({int(count) for frame in frames for count in frame["seeds"]})
    if seeds == [1]:
        yield "One seed per point, so no spread is shown."
    else:
        yield f"Points: mean over {span(seeds)} seeds; bars: one standard deviation over seeds (n - 1)."
    if any(not math.isnan(merged_level(run, choice.tasks_of(run, options))) for run in runs):
        yield "Dotted level: the merged model before calibration."
