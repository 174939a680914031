"""Sentences of captions, made from a run's numbers and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.words import overlap_notes
from driftlens_reports.columns import printable
from driftlens_reports.facts import stamps
from driftlens_reports.paper.exhibit import Gap

ROUNDED = "Printed numbers are rounded; gains and changes are taken from unrounded values."


def origin(runs: Sequence[DriftRun]) -> Iterator[str]:
    """Which runs the numbers come from, and what a reader must know about each before any number."""
    if runs:
        names = ", ".join(f"{run.name} ({run.id})" for run in runs)
        yield f"{'Run' if len(runs) == 1 else 'Runs'}: {names}."
    for run in runs:
        yield from stamps(run)
        yield from overlap_notes(run)


def samples(rows: pd.DataFrame) -> str:
    """How many samples are behind the rows: "n = 24 samples of the diagnosis split per task."."""
    counts = rows["n"].dropna().astype(int)
    if counts.empty:
        return ""
    each = " per task" if rows["task"].nunique() > 1 else ""
    return f"n = {span(counts)} samples of the diagnosis split{each}."


def together(sentences: Iterable[str], gaps: Iterable[Gap] = ()) -> list[str]:
    """The sentences that say something, once each, and what is missing, without control characters of names in them."""
    lacking = [f"Not shown: {gap.name} ({gap.missing})." for gap in gaps]
    return [printable(sentence) for sentence in dict.fromkeys([*sentences, *lacking]) if sentence]


def signed(value: float, digits: int) -> str:
    """A change with its sign, and with a true minus."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def spaced(count: int) -> str:
    """A count with its thousands set apart: 8 041."""
    return f"{count:,}".replace(",", "\N{NO-BREAK SPACE}")


def span(counts: Sequence[int] | pd.Series[int]) -> str:
    """A count, or the smallest and the largest where they differ: "24" or "24 to 30"."""
    low, high = min(counts), max(counts)
    return spaced(low) if low == high else f"{spaced(low)} to {spaced(high)}"
