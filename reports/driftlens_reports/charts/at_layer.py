"""Rows of one layer, for charts that look at one boundary: the final feature unless the options name another."""

from __future__ import annotations

from typing import Literal

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Missing
from driftlens_reports.charts.picking import ANALYZE, absent, chosen_tasks, chosen_variants, ordered

Table = Literal["layers", "samples"]


def rows_at(run: DriftRun, options: ChartOptions, table: Table, *, baseline: bool = False) -> pd.DataFrame:
    """Rows of the table at the options' layer, of the chosen tasks and variants and in their order.

    Args:
        run: the run.
        options: what the reader chose.
        table: which table.
        baseline: whether the options' baseline comes along, chosen or not.

    Raises:
        DataError: an unknown task or variant.
        LayerNotFoundError: an unknown layer.
        RunError: the table can't be read.
    """
    # A run that stopped early lists no layers; then none has rows, and none is wrong to ask for.
    layer = options.layer if run.manifest.layers else None
    rows = run.layers(layer=layer) if table == "layers" else run.samples(layer=layer)
    chosen = chosen_variants(run, options)
    if baseline and options.baseline not in chosen:
        chosen = [options.baseline, *chosen]
    return ordered(rows, chosen_tasks(run, options), chosen)


def needs_at(table: Table, *columns: str) -> Missing:
    """A chart's `missing`: None where every column has a number at the options' layer."""

    def missing(run: DriftRun, options: ChartOptions) -> str | None:
        rows = rows_at(run, options, table)
        lacking = [name for name in columns if not rows[name].notna().any()]
        return absent(table, lacking, ANALYZE) if lacking else None

    return missing


def layer_name(options: ChartOptions) -> str:
    """How a sentence calls the options' layer: "final feature", "feature leaving layer 3"."""
    return "final feature" if options.layer == "final" else f"feature leaving layer {options.layer}"
