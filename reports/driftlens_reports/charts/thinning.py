"""Fewer points for scatters: evenly from every stratum, and the same ones each time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from driftlens_reports.charts.words import counted


def thinned(rows: pd.DataFrame, limit: int, by: Sequence[str]) -> pd.DataFrame:
    """At most `limit` of the rows, in their order: as many of each stratum as its size asks for, rare ones included.

    Which ones depends on their sample ids alone, so that order and neighbours don't matter, nor the day.

    Args:
        rows: one per sample, with a column `sample_id`.
        limit: how many to keep.
        by: columns whose values make the strata.
    """
    if len(rows) <= limit:
        return rows
    ids = rows["sample_id"].to_numpy(dtype=object)
    drawn = pd.DataFrame({"order": pd.util.hash_array(ids, categorize=False)}, index=rows.index)
    strata = drawn.groupby([rows[column].astype(str) for column in by])["order"]
    # Row r of a stratum of s comes up at r / s: the first of each stratum first, then all in step.
    turn = (strata.rank(method="first") - 1) / strata.transform("size")
    kept = np.sort(np.argsort(turn.to_numpy(), kind="stable")[:limit])
    return rows.iloc[kept]


def thinning_notes(shown: int, there: int) -> tuple[str, ...]:
    """The note that says how many of the samples are shown; none where all are."""
    if shown >= there:
        return ()
    return (f"{counted(shown, '', ' ').strip()} of {counted(there, 'sample')} shown, of every class alike.",)
