"""Accuracy tables with a block per model: text-to-text and language models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.comparison import measured_grids, score_columns, scored, test_note
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel
from driftlens_reports.paper.framing import framed, paper_note
from driftlens_reports.paper.grid import Block, Grid
from driftlens_reports.paper.places import Family, family
from driftlens_reports.paper.printed import printed_blocks
from driftlens_reports.paper.published import AVERAGE, published_tables


def model_table(
    name: str,
    runs: Sequence[DriftRun],
    options: ExhibitOptions,
    *,
    label: str,
    kind: Family,
    caption: str,
    needed: str,
    metrics: Sequence[tuple[str, str]] = (),
) -> Exhibited:
    """The runs about this kind of model, and the paper's table by model.

    Args:
        name: id of the exhibit.
        runs: all that were given.
        options: the writer's choice.
        label: of the paper's table.
        kind: which runs belong here.
        caption: what it shows.
        needed: what fills it where no run does.
        metrics: columns that don't hold accuracies, and what they hold.
    """
    table = published_tables()[label]
    used = [run for run in scored(runs) if family(run) == kind]
    shown = dict(metrics)
    blocks = [
        _renamed(block, shown)
        for model in dict.fromkeys(row.model for row in table.rows)
        for block in _titled(model, printed_blocks(table, model=model).values())
    ]
    titles = [shown.get(title, title) for title in table.columns if title != AVERAGE]
    return framed(
        name,
        [*measured_grids(used, options), Grid(score_columns(titles, options), tuple(blocks))],
        caption=caption,
        runs=used,
        notes=[test_note(used), paper_note(table)],
        missing=[] if used else [Panel("Measured rows", needed)],
    )


def _titled(model: str, blocks: Iterable[Block]) -> list[Block]:
    """The blocks of one model: its name above the first, bold the best of the model."""
    return [
        dataclasses.replace(block, title=model if at == 0 else "", group=model)
        for at, block in enumerate(blocks)
    ]


def _renamed(block: Block, shown: dict[str, str]) -> Block:
    lines = tuple(
        dataclasses.replace(line, cells={shown.get(name, name): cell for name, cell in line.cells.items()})
        for line in block.lines
    )
    return dataclasses.replace(block, lines=lines)
