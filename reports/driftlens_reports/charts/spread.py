"""How far samples scatter around their mean: the band that the options name."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from driftlens_reports.charts.chart import ChartOptions
from driftlens_reports.charts.words import literal

_QUANTILES = {"q10-q90": (0.1, 0.9), "q25-q75": (0.25, 0.75)}
_NAMES = {
    "q10-q90": "10 % to 90 % quantiles over samples",
    "q25-q75": "25 % to 75 % quantiles over samples",
    "std": "one standard deviation over samples around the mean",
}


def spread(samples: pd.DataFrame, column: str, by: Sequence[str], options: ChartOptions) -> pd.DataFrame:
    """Columns `by`, `mean`, `low` and `high` of a column of per-sample values, one row per group.

    `low` and `high` are null where the options ask for no band.
    """
    groups = samples.astype({column: float}).groupby(list(by), sort=False)[column]
    found = pd.DataFrame({"mean": groups.mean()})
    if options.band in _QUANTILES:
        low, high = _QUANTILES[options.band]
        found["low"], found["high"] = groups.quantile(low), groups.quantile(high)
    else:
        width = groups.std(ddof=0) if options.band == "std" else float("nan")
        found["low"], found["high"] = found["mean"] - width, found["mean"] + width
    return found.reset_index()


def spread_name(options: ChartOptions) -> str:
    """What the band is, safe to put into a figure."""
    return literal(_NAMES.get(options.band, ""))


def spread_notes(options: ChartOptions) -> list[str]:
    """The note that says what whiskers are; none where there are none."""
    return [f"Whiskers: {_NAMES[options.band]}."] if options.band in _NAMES else []
