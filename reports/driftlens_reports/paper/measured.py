"""Lines of a table that say what a run measured: scores by task and variant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import control_of, is_control, part_of, title
from driftlens_reports.paper.exhibit import ExhibitOptions
from driftlens_reports.paper.grid import Cell, Line, Role, with_average
from driftlens_reports.paper.places import merger

_PERCENT = 100.0


def metrics_of(run: DriftRun) -> Mapping[str, str]:
    """What is shown of each scored task: accuracy, or its first metric where it has none."""
    rows = run.accuracy()
    found: dict[str, str] = {}
    for task, metrics in rows.groupby("task", sort=False)["metric"]:
        found[str(task)] = "accuracy" if (metrics == "accuracy").any() else str(metrics.iloc[0])
    return {task: found[task] for task in run.tasks if task in found}


def column_titles(run: DriftRun, tasks: Sequence[str]) -> Mapping[str, str]:
    """The column head of each task: its name, and its metric where that is not accuracy."""
    metrics = metrics_of(run)
    return {
        task: task if metrics.get(task, "accuracy") == "accuracy" else f"{task} ({metrics[task]})"
        for task in tasks
    }


def reference_lines(run: DriftRun, titles: Mapping[str, str]) -> tuple[Line, ...]:
    """Base and experts, in percent; `titles` names the column of each task shown."""
    lines = (
        _line(run, variant, label, titles, "reference")
        for variant, label in (("base", "Base"), ("expert", "Experts"))
    )
    return tuple(line for line in lines if line.cells)


def method_lines(run: DriftRun, titles: Mapping[str, str], options: ExhibitOptions) -> tuple[Line, ...]:
    """The merged model, baselines, and each calibration after its anchor-only control, in percent."""
    lines = [_line(run, "merged", merger(run), titles, "plain")]
    for variant in shown_variants(run, options):
        role: Role = "own" if part_of(variant) == "calibrated" else "other"
        lines.append(_line(run, variant, f"w/ {title(variant)}", titles, role))
    return tuple(line for line in lines if line.cells)


def shown_variants(run: DriftRun, options: ExhibitOptions) -> tuple[str, ...]:
    """What stands under the merged model: baselines, then each calibration after its control.

    With `options.calibrated`, other calibrations and their controls are left out.
    """
    others = [name for name in run.variants if part_of(name) == "baseline" and not is_control(name)]
    for variant in run.variants:
        if part_of(variant) == "calibrated" and options.calibrated in (None, variant):
            control = control_of(variant.partition(":")[2])
            others += [name for name in (control, variant) if name in run.variants]
    return tuple(others)


def _line(run: DriftRun, variant: str, label: str, titles: Mapping[str, str], role: Role) -> Line:
    scores = _scores(run, variant)
    cells = {column: _cell(scores[task]) for task, column in titles.items() if task in scores}
    line = Line(label, cells, role, "measured", run.id, variant)
    return with_average(line, list(titles.values()))


def _scores(run: DriftRun, variant: str) -> dict[str, dict[Any, Any]]:
    """The rows of a variant's shown metric, by task; what was not scored has none."""
    rows = run.accuracy()
    shown = (rows["metric"] == rows["task"].map(metrics_of(run))) & rows["value"].notna()
    chosen = rows[shown & (rows["variant"] == variant)].to_dict("records")
    return {str(row["task"]): row for row in chosen}


def _cell(row: Mapping[Any, Any]) -> Cell:
    low, high = (math.nan if pd.isna(row[end]) else _PERCENT * row[end] for end in ("ci_low", "ci_high"))
    return Cell(_PERCENT * row["value"], n=None if pd.isna(row["n"]) else int(row["n"]), low=low, high=high)
