"""Accuracies by task, as every accuracy table shows them: measured blocks, the paper's beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.choice import tasks_of
from driftlens_reports.paper.exhibit import ExhibitOptions
from driftlens_reports.paper.grid import Block, Column, Grid, Line
from driftlens_reports.paper.measured import column_titles, method_lines, reference_lines
from driftlens_reports.paper.places import canonical, titles_of
from driftlens_reports.paper.printed import printed_blocks
from driftlens_reports.paper.published import AVERAGE, PublishedTable

MOST_GAINS = 9
"""Columns up to which each cell shows its gain; wider tables show that of the average only."""


def scored(runs: Sequence[DriftRun]) -> list[DriftRun]:
    """The runs that have any score."""
    return [run for run in runs if len(run.accuracy())]


def measured_grids(runs: Sequence[DriftRun], options: ExhibitOptions) -> list[Grid]:
    """One grid per choice of tasks: their columns, references, a block per run."""
    by_columns: dict[tuple[str, ...], list[tuple[DriftRun, Mapping[str, str]]]] = {}
    for run in runs:
        titles = column_titles(run, tasks_of(run, options))
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
    measured = list(_blocks(members, options))
    printed = printed_blocks(table, columns=columns)
    references = Block((*(line for block in measured[:1] for line in block.lines), *printed[""].lines))
    blocks = [references]
    for merger, block in printed.items():
        if merger:
            blocks += [other for other in measured[1:] if other.lines[0].label == merger]
            blocks.append(block)
    blocks += [other for other in measured[1:] if other.lines[0].label not in printed]
    return Grid(score_columns(columns, options), tuple(blocks))


def score_columns(titles: Sequence[str], options: ExhibitOptions) -> tuple[Column, ...]:
    """A column per task, and their average."""
    is_wide = len(titles) >= MOST_GAINS
    tasks = [Column(title, options.digits, has_gain=not is_wide) for title in titles]
    return (*tasks, Column(AVERAGE, options.digits, has_gain=True))


def test_note(runs: Sequence[DriftRun]) -> str:
    """How many test samples are behind the measured scores."""
    counts = [int(n) for run in runs for n in run.accuracy()["n"].dropna()]
    if not counts:
        return ""
    low, high = min(counts), max(counts)
    number = str(low) if low == high else f"{low} to {high}"
    return f"Measured on {number} test samples per task; 95 % Wilson intervals stand in the CSV file."


def _shown(run: DriftRun, table: PublishedTable, options: ExhibitOptions) -> Mapping[str, str]:
    titles = titles_of(run, table) or {}
    shown = {titles[task]: task for task in tasks_of(run, options) if task in titles}
    return {shown[title]: title for title in table.columns if title in shown}


def _blocks(
    members: Sequence[tuple[DriftRun, Mapping[str, str]]], options: ExhibitOptions
) -> Iterator[Block]:
    """The runs' references, once each, then a block per run; several runs are told apart by name."""
    if not members:
        return
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
