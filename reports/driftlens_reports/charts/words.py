"""Text on charts: escaped names, numbers in sentences, and notes about samples."""

from __future__ import annotations

import contextlib
import functools
import html
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import pandas as pd

from driftlens.results.formatting import number, printable
from driftlens.runs.run import DriftRun
from driftlens.utils import variants

# Characters of a name that a figure shows, alone or with another one; hover texts show all of it.
LONGEST, LONGEST_OF_TWO = 26, 14

Tell = Callable[["pd.Series[Any]"], str]

_NAMES: ContextVar[Mapping[str, str]] = ContextVar("display names of tasks and variants")


@contextlib.contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Use the display names in `names` within the context."""
    token = _NAMES.set(names)
    try:
        yield
    finally:
        _NAMES.reset(token)


def called(name: str) -> str:
    """Return the display name of a task."""
    return _NAMES.get({}).get(name, name)


def title(variant: str) -> str:
    """Return the display name of a variant."""
    name, comma, control = variants.title(variant).partition(", ")
    return _NAMES.get({}).get(variant) or f"{called(name)}{comma}{control}"


@functools.lru_cache(maxsize=4096)  # every point needs one of few names
def literal(text: str) -> str:
    """Return text escaped for plotly: no markup, formula, hover placeholder or entity remains."""
    # `$` would start a formula, `%` a hover placeholder.
    return html.escape(printable(text), quote=False).replace("$", "&#36;").replace("%", "&#37;")


def label(text: str, longest: int = LONGEST) -> str:
    """Return the display name of `text`, as `literal`, cut in the middle if it is too long for its place."""
    return literal(short(called(text), longest))


def short(text: str, longest: int = 16) -> str:
    """Return `text` on one line, with an ellipsis in the middle if it is longer than `longest`."""
    text = printable(text)
    end = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[: longest - 1 - end]}…{text[-end:]}"


def shown(variant: str) -> str:
    """Return the escaped display name of a variant."""
    return label(title(variant))


def by_variant(texts: Iterable[tuple[object, str]]) -> str:
    """Join a text per variant: "merged 0.6120; featcal 0.8010"."""
    return "; ".join(f"{title(str(variant))} {text}" for variant, text in texts)


def span(rows: pd.DataFrame, column: str, tell: Tell) -> str:
    """Return the rows with the smallest and the largest value in words, `a to b`."""
    values = rows[column].astype(float)
    return " to ".join(tell(rows.loc[row]) for row in dict.fromkeys([values.idxmin(), values.idxmax()]))


def spans(rows: pd.DataFrame, column: str, tell: Tell) -> str:
    """Return the span of each variant that has a number."""
    groups = rows[rows[column].notna()].groupby("variant", sort=False)
    return by_variant((variant, span(part, column, tell)) for variant, part in groups)


def spaced(count: int) -> str:
    """Format a count with thin spaces between thousands: "8 041"."""
    return f"{count:,}".replace(",", "\u202f")


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: "1 task", "8 tasks"."""
    return f"{spaced(count)} {noun if count == 1 else noun + 's'}"


def between(counts: Iterable[int]) -> str:
    """Format a range of counts: "24" or "24 to 30"."""
    # Doubled, so that a single count is both ends.
    low, *_, high = sorted(counts) * 2
    return spaced(low) if low == high else f"{spaced(low)} to {spaced(high)}"


def ranged(values: Iterable[float], noun: str) -> str:
    """Format a range of counts with a noun: "24 samples" or "16 to 24 samples"."""
    counts = {int(value) for value in values if not pd.isna(value)}
    if not counts:
        return f"an unknown number of {noun}s"
    return f"{between(counts)} {noun if counts == {1} else f'{noun}s'}"


def sample_notes(run: DriftRun, rows: pd.DataFrame) -> list[str]:
    """Return notes on the number and the split of the samples of layer rows."""
    return [f"{ranged(rows['n'], 'diagnosis sample')} per task.", *overlap_notes(run)]


def table_notes(run: DriftRun, samples: pd.DataFrame, *, over_tasks: bool = True) -> list[str]:
    """Return notes on the number of samples and tasks of sample rows.

    Args:
        run: the run.
        samples: a row per sample.
        over_tasks: True to name the number of tasks.
    """
    counts = samples.groupby(["task", "variant"], sort=False).size()
    over = f", over {counted(samples['task'].nunique(), 'task')}" if over_tasks else ""
    return [f"{ranged(counts, 'diagnosis sample')} per task{over}.", *overlap_notes(run)]


def overlap_notes(run: DriftRun) -> list[str]:
    """Return the run's notices about diagnosis samples that are calibration samples, too."""
    return [
        f"{text}." for text in run.manifest.notices if "calibration and diagnosis draw from the same" in text
    ]


def final_sentence(rows: pd.DataFrame, column: str) -> str:
    """Describe the last layer: the first variant's worst task, with every variant's value there."""
    last = rows[(rows["layer"] == rows["layer"].max()) & rows[column].notna()]
    if last.empty:
        return "Nothing was measured at the last layer."
    of_variant = last[last["variant"] == last["variant"].iloc[0]]
    task = of_variant.loc[of_variant[column].astype(float).idxmax(), "task"]
    there = last[last["task"] == task]
    values = by_variant(zip(there["variant"], there[column].astype(float).map(number), strict=True))
    num_others = rows["task"].nunique() - 1
    among = f", the highest of {num_others + 1} tasks" if num_others else ""
    return f"At {last['where'].iloc[0]}, on {task}{among}: {values}."


def peak_sentence(rows: pd.DataFrame, column: str, write: Callable[[float], str] = number) -> str:
    """Describe the highest value of each variant, with its task and layer."""
    peaks = rows[rows[column].notna()].astype({column: float})
    peaks = peaks.loc[peaks.groupby("variant", sort=False)[column].idxmax()]
    texts = [f"{write(row[column])} ({row['task']}, {row['where']})" for row in peaks.to_dict("records")]
    return f"Highest: {by_variant(zip(peaks['variant'], texts, strict=True))}."


def gap_notes(run: DriftRun, rows: pd.DataFrame, column: str) -> list[str]:
    """Return a note on cells of a task x layer heatmap that have no number."""
    cells = rows["task"].nunique() * rows["variant"].nunique() * len(run.manifest.layers)
    gaps = cells - int(rows[column].notna().sum())
    if not gaps:
        return []
    return [f"{counted(gaps, 'cell')} in the background's colour: not measured."]
