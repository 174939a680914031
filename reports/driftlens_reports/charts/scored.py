"""Rows of the output table that charts of decisions need, and the reason when there are none."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions
from driftlens_reports.charts.picking import ANALYZE, chosen_tasks, chosen_variants, ordered


def scored_samples(run: DriftRun, options: ChartOptions, *columns: str) -> pd.DataFrame:
    """Rows of the chosen tasks and variants in which all these columns are known, in their order.

    Raises:
        DataError: an unknown task or variant.
        RunError: the table can't be read.
    """
    rows = run.outputs()
    known = rows[rows[list(columns)].notna().all(axis=1)]
    return ordered(known, chosen_tasks(run, options), chosen_variants(run, options))


def no_scores(columns: Sequence[str], *, also: str = "heads") -> str:
    """The sentence that says which columns of the output table have no values, and what adds them.

    Args:
        columns: of the table.
        also: what the spec must give.
    """
    return f"needs {', '.join(columns)} of table outputs; with {also} in the spec, `{ANALYZE}` adds them."
