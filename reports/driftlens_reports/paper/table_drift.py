"""Relative drift by task and layer, a block per variant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.paper.captions import samples
from driftlens_reports.paper.choice import tasks_of
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line
from driftlens_reports.paper.measured import shown_variants


@exhibit("drift", kind="table", title="Relative drift by task and layer")
def drift(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """One line per task, one column per layer, one block per variant; a grid per run."""
    grids = [_grid(run, options, several=len(runs) > 1) for run in runs]
    rows = [_rows(run, options) for run in runs]
    shown = pd.concat(rows) if rows else pd.DataFrame()
    return framed(
        "drift",
        grids,
        caption=(
            "Relative drift (%) by task and layer: norm of the feature's difference to the task's expert against the "
            "norm of the expert's feature, sums over samples. Layers in forward order; S is the stem, H the head."
        ),
        runs=runs,
        notes=[samples(shown) if len(shown) else "", "A dash: not stored, or not measured."],
        missing=[
            Panel(run.name, "`driftlens analyze` with this run's spec measures drift by layer.")
            for run, there in zip(runs, rows, strict=True)
            if there.empty
        ],
    )


def _rows(run: DriftRun, options: ExhibitOptions) -> pd.DataFrame:
    rows = run.layers()
    variants = [name for name in ("merged", *shown_variants(run, options)) if name in run.variants]
    return rows[
        rows["variant"].isin(variants) & rows["task"].isin(tasks_of(run, options)) & rows["drift_rel"].notna()
    ]


def _grid(run: DriftRun, options: ExhibitOptions, *, several: bool) -> Grid:
    heads = {
        layer.index: {"stem": "S", "head": "H"}.get(layer.role, str(layer.index))
        for layer in run.manifest.layers
    }
    rows = _rows(run, options)
    columns = tuple(
        Column(heads[at], options.digits, best=None) for at in heads if (rows["layer"] == at).any()
    )
    variants = dict.fromkeys(rows["variant"])
    order = [name for name in ("merged", *shown_variants(run, options)) if name in variants]
    name = f", {run.name}" if several else ""
    blocks = tuple(
        Block(tuple(_lines(run, rows[rows["variant"] == variant], heads, variant)), f"{title(variant)}{name}")
        for variant in order
    )
    return Grid(columns, blocks, first="Task")


def _lines(run: DriftRun, rows: pd.DataFrame, heads: dict[int, str], variant: str) -> Iterator[Line]:
    for task in run.tasks:
        own = rows[rows["task"] == task]
        cells = {
            heads[int(layer)]: Cell(100 * float(value), n=int(n) if pd.notna(n) else None)
            for layer, value, n in zip(own["layer"], own["drift_rel"], own["n"], strict=True)
        }
        if cells:
            yield Line(task, cells, "reference", "measured", run.id, variant)
