"""Scores by task and variant as lines, blocks and grids of tables: what runs measured, beside what the paper prints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import control_of, is_control, part_of, title
from driftlens_reports.paper.captions import span
from driftlens_reports.paper.choice import tasks_of
from driftlens_reports.paper.exhibit import ExhibitOptions
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line, Role, with_average
from driftlens_reports.paper.places import Family, canonical, family, merger, titles_of
from driftlens_reports.paper.printed import printed_blocks
from driftlens_reports.paper.published import AVERAGE, PublishedTable

MOST_GAINS = 9
"""Columns up to which each cell shows its gain; wider tables show that of the average only."""

Member = tuple[DriftRun, Mapping[str, str]]
"""A run with the column of each of its tasks that is shown."""


def scored(runs: Sequence[DriftRun], kind: Family | None = None) -> list[DriftRun]:
    """The runs that have any score, of all kinds of models or one."""
    return [run for run in runs if len(run.accuracy()) and kind in (None, family(run))]


def measured_grids(runs: Sequence[DriftRun], options: ExhibitOptions) -> list[Grid]:
    """One grid per choice of tasks: their columns, references, a block per run."""
    by_columns: dict[tuple[str, ...], list[Member]] = {}
    for run in runs:
        titles = column_titles(run, options)
        by_columns.setdefault(tuple(titles.values()), []).append((run, titles))
    return [
        Grid(score_columns(titles, options), tuple(_blocks(members, options)))
        for titles, members in by_columns.items()
    ]


def joint_grid(runs: Sequence[DriftRun], table: PublishedTable, options: ExhibitOptions) -> Grid:
    """The paper's table, and above each of its blocks those of the runs with the same tasks and backbone."""
    members = [(run, _shown(run, table, options)) for run in runs]
    shown = {title for _, titles in members for title in titles.values()}
    if not shown and options.tasks is not None:
        wanted = {canonical(task) for task in options.tasks}
        shown = {title for title in table.columns if canonical(title) in wanted}
    columns = [title for title in table.columns if title != AVERAGE and (not shown or title in shown)]
    references, *measured = _blocks(members, options) if members else (Block(()),)
    printed = printed_blocks(table, columns=columns)
    blocks = [Block((*references.lines, *printed[""].lines))]
    for name, block in printed.items():
        if name:
            blocks += [*(other for other in measured if other.lines[0].label == name), block]
    blocks += [other for other in measured if other.lines[0].label not in printed]
    return Grid(score_columns(columns, options), tuple(blocks))


def score_columns(titles: Sequence[str], options: ExhibitOptions) -> tuple[Column, ...]:
    """A column per task, and their average."""
    is_wide = len(titles) >= MOST_GAINS
    tasks = [Column(title, options.digits, has_gain=not is_wide) for title in titles]
    return (*tasks, Column(AVERAGE, options.digits, has_gain=True))


def column_titles(run: DriftRun, options: ExhibitOptions) -> Mapping[str, str]:
    """The column head of each task: its name, and its metric where that is not accuracy."""
    metrics = _metrics_of(run)
    return {
        task: task if metrics.get(task, "accuracy") == "accuracy" else f"{task} ({metrics[task]})"
        for task in tasks_of(run, options)
    }


def reference_lines(run: DriftRun, titles: Mapping[str, str]) -> tuple[Line, ...]:
    """Base and experts, in percent; `titles` names the column of each task shown."""
    return _with_cells(
        _line(run, variant, label, titles, "reference")
        for variant, label in (("base", "Base"), ("expert", "Experts"))
    )


def method_lines(run: DriftRun, titles: Mapping[str, str], options: ExhibitOptions) -> tuple[Line, ...]:
    """The merged model, baselines, and each calibration after its anchor-only control, in percent."""
    lines = [_line(run, "merged", merger(run), titles, "plain")]
    for variant in shown_variants(run, options):
        role: Role = "own" if part_of(variant) == "calibrated" else "other"
        lines.append(_line(run, variant, f"w/ {title(variant)}", titles, role))
    return _with_cells(iter(lines))


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


def test_note(runs: Sequence[DriftRun]) -> str:
    """How many test samples are behind the measured scores."""
    counts = [int(n) for run in runs for n in run.accuracy()["n"].dropna()]
    if not counts:
        return ""
    return f"Measured on {span(counts)} test samples per task; 95 % Wilson intervals stand in the CSV file."


def _shown(run: DriftRun, table: PublishedTable, options: ExhibitOptions) -> Mapping[str, str]:
    titles = titles_of(run, table) or {}
    shown = {titles[task]: task for task in tasks_of(run, options) if task in titles}
    return {shown[title]: title for title in table.columns if title in shown}


def _blocks(members: Sequence[Member], options: ExhibitOptions) -> Iterator[Block]:
    """The runs' references, once each, then a block per run; several runs are told apart by name."""
    references: dict[tuple[object, ...], Line] = {}
    for run, titles in members:
        for line in reference_lines(run, titles):
            told = line if len(members) == 1 else dataclasses.replace(line, label=f"{line.label}, {run.name}")
            # Runs on the same suite share base and experts.
            references.setdefault((line.label, *(line.number(title) for title in titles.values())), told)
    yield Block(tuple(references.values()))
    for run, titles in members:
        lines = method_lines(run, titles, options)
        if lines:
            yield Block(lines, run.name if len(members) > 1 else "")


def _line(run: DriftRun, variant: str, label: str, titles: Mapping[str, str], role: Role) -> Line:
    """One variant's scores in each task's metric, and their average; what was not scored has no cell."""
    rows = run.accuracy(variant=variant)
    rows = rows[(rows["metric"] == rows["task"].map(_metrics_of(run))) & rows["value"].notna()]
    scores = {row["task"]: row for row in rows.to_dict("records")}
    cells = {column: _cell(scores[task]) for task, column in titles.items() if task in scores}
    return with_average(Line(label, cells, role, "measured", run.id, variant), list(titles.values()))


def _with_cells(lines: Iterator[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.cells)


def _metrics_of(run: DriftRun) -> Mapping[str, str]:
    """What is shown of each scored task: accuracy, or its first metric where it has none."""
    metrics = run.accuracy().groupby("task", sort=False)["metric"].unique()
    return {
        str(task): "accuracy" if "accuracy" in names else str(names[0]) for task, names in metrics.items()
    }


def _cell(row: Mapping[Any, Any]) -> Cell:
    low, high = (math.nan if pd.isna(row[end]) else 100 * row[end] for end in ("ci_low", "ci_high"))
    return Cell(100 * row["value"], n=None if pd.isna(row["n"]) else int(row["n"]), low=low, high=high)
