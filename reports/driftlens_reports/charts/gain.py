"""What variants gain over a baseline, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from driftlens import variants
from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions
from driftlens_reports.charts.picking import chosen_variants
from driftlens_reports.charts.words import joined

NO_RIVAL = "needs a variant besides the baseline; `driftlens calibrate RUN --name NAME` adds one."


def against_baseline(
    run: DriftRun, options: ChartOptions, rows: pd.DataFrame, column: str, by: Sequence[str]
) -> pd.DataFrame:
    """The rows of the chosen variants that both they and the baseline have a number in, with the baseline's beside it.

    Args:
        run: the run.
        options: name the variants, and the baseline, which need not be among them.
        rows: rows of a table with the columns `variant`, `column` and `by`, of one layer at most.
        column: the value; the baseline's comes as `<column>_baseline`.
        by: what makes two rows match.

    Raises:
        DataError: the run has no such baseline.
    """
    run.layers(variant=options.baseline)  # says which variants there are when this is none
    rivals = [name for name in chosen_variants(run, options) if name != options.baseline]
    measured = rows[rows[column].notna()]
    before = measured[measured["variant"] == options.baseline][[*by, column]]
    after = measured[measured["variant"].isin(rivals)]
    return after.merge(before.rename(columns={column: f"{column}_baseline"}), on=list(by), how="inner")


def no_rival(run: DriftRun, options: ChartOptions) -> str:
    """The sentence for a selection that leaves nothing to compare with the baseline."""
    if any(name not in ("base", "expert", options.baseline) for name in run.variants):
        return "needs a variant besides the baseline; choose another variant, or another baseline."
    return NO_RIVAL


def extremes_in_words(rows: pd.DataFrame, column: str) -> str:
    """The smallest and the largest value of each variant, with their tasks."""
    parts = []
    for variant, own in rows.groupby("variant", sort=False):
        ends = [own.loc[own[column].idxmin()], own.loc[own[column].idxmax()]]
        values = [f"{row[column]:+#.4g} ({row['task']})" for row in ends[: min(len(own), 2)]]
        parts.append(f"{variants.title(str(variant))} {' to '.join(values)}")
    return joined(parts)
