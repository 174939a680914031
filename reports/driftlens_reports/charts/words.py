"""Text on charts: escaped names, numbers in sentences, and notes about samples."""

from __future__ import annotations

import contextlib
import functools
import html
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import pandas as pd

from driftlens.results.formatting import format_number, strip_control_chars
from driftlens.runs.run import DriftRun
from driftlens.utils import variants
from driftlens.utils.errors import pluralize

# Characters of a name that a figure shows, alone or with another one; hover texts show all of it.
LONGEST, LONGEST_OF_TWO = 26, 14

Tell = Callable[["pd.Series[Any]"], str]

_NAMES: ContextVar[Mapping[str, str]] = ContextVar("display names of tasks and variants")


@contextlib.contextmanager
def use_display_names(names: Mapping[str, str]) -> Iterator[None]:
    """Use these display names of tasks and variants within the context."""
    token = _NAMES.set(names)
    try:
        yield
    finally:
        _NAMES.reset(token)


def task_title(name: str) -> str:
    """Return the display name of a task."""
    return _NAMES.get({}).get(name, name)


def variant_title(variant: str) -> str:
    """Return the display name of a variant."""
    name, comma, control = variants.display_name(variant).partition(", ")
    return _NAMES.get({}).get(variant) or f"{task_title(name)}{comma}{control}"


@functools.lru_cache(maxsize=4096)  # every point needs one of few names
def escape_plotly(text: str) -> str:
    """Escape text for plotly: no markup, formula or hover placeholder remains."""
    # `$` would start a formula, `%` a hover placeholder.
    return html.escape(strip_control_chars(text), quote=False).replace("$", "&#36;").replace("%", "&#37;")


def escaped_label(text: str, longest: int = LONGEST) -> str:
    """Return a display name, escaped for plotly and shortened in the middle if it is too long."""
    return escape_plotly(shorten_middle(task_title(text), longest))


def shorten_middle(text: str, longest: int = 16) -> str:
    """Return `text` on one line, with an ellipsis in the middle if it is longer than `longest`."""
    text = strip_control_chars(text)
    end = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[: longest - 1 - end]}…{text[-end:]}"


def variant_label(variant: str) -> str:
    """Return the display name of a variant, escaped for plotly."""
    return escaped_label(variant_title(variant))


def join_by_variant(texts: Iterable[tuple[object, str]]) -> str:
    """Join one text per variant into a sentence part: "merged 0.6120; featcal 0.8010"."""
    return "; ".join(f"{variant_title(str(variant))} {text}" for variant, text in texts)


def min_max_text(rows: pd.DataFrame, column: str, tell: Tell) -> str:
    """Describe the rows with the smallest and the largest value of a column: `a to b`."""
    values = rows[column].astype(float)
    return " to ".join(tell(rows.loc[row]) for row in dict.fromkeys([values.idxmin(), values.idxmax()]))


def min_max_by_variant(rows: pd.DataFrame, column: str, tell: Tell) -> str:
    """Describe the smallest and the largest value of each variant that has a number."""
    groups = rows[rows[column].notna()].groupby("variant", sort=False)
    return join_by_variant((variant, min_max_text(part, column, tell)) for variant, part in groups)


def count_range(counts: Iterable[int]) -> str:
    """Format a range of counts: "24" or "24 to 30"."""
    # Doubled, so that a single count is both ends.
    low, *_, high = sorted(counts) * 2
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def count_range_with_noun(values: Iterable[float], noun: str) -> str:
    """Format a range of counts with a noun: "24 samples" or "16 to 24 samples"."""
    counts = {int(value) for value in values if not pd.isna(value)}
    if not counts:
        return f"an unknown number of {noun}s"
    return f"{count_range(counts)} {noun if counts == {1} else f'{noun}s'}"


def layer_sample_notes(run: DriftRun, rows: pd.DataFrame) -> list[str]:
    """Return chart notes on how many diagnosis samples per task the layer statistics cover."""
    return [f"{count_range_with_noun(rows['n'], 'diagnosis sample')} per task.", *split_overlap_notes(run)]


def sample_count_notes(run: DriftRun, samples: pd.DataFrame, *, over_tasks: bool = True) -> list[str]:
    """Return chart notes on the number of samples and tasks in a table of samples.

    Args:
        run: the run.
        samples: a row per sample.
        over_tasks: True to name the number of tasks.
    """
    counts = samples.groupby(["task", "variant"], sort=False).size()
    over = f", over {pluralize(samples['task'].nunique(), 'task')}" if over_tasks else ""
    return [f"{count_range_with_noun(counts, 'diagnosis sample')} per task{over}.", *split_overlap_notes(run)]


def split_overlap_notes(run: DriftRun) -> list[str]:
    """Return the run's notices that calibration and diagnosis samples overlap."""
    return [f"{text}." for text in run.manifest.notices if "calibration and diagnosis draw from the same" in text]


def final_layer_sentence(rows: pd.DataFrame, column: str) -> str:
    """Describe the last layer: the worst task of the first variant, with the value of every variant there."""
    last = rows[(rows["layer"] == rows["layer"].max()) & rows[column].notna()]
    if last.empty:
        return "Nothing was measured at the last layer."
    of_variant = last[last["variant"] == last["variant"].iloc[0]]
    task = of_variant.loc[of_variant[column].astype(float).idxmax(), "task"]
    there = last[last["task"] == task]
    values = join_by_variant(zip(there["variant"], there[column].astype(float).map(format_number), strict=True))
    num_tasks = rows["task"].nunique()
    among = f", the highest of {num_tasks} tasks" if num_tasks > 1 else ""
    return f"At {last['where'].iloc[0]}, on {task}{among}: {values}."


def peak_sentence(rows: pd.DataFrame, column: str, write: Callable[[float], str] = format_number) -> str:
    """Describe the highest value of each variant, with its task and layer."""
    peaks = rows[rows[column].notna()].astype({column: float})
    peaks = peaks.loc[peaks.groupby("variant", sort=False)[column].idxmax()]
    texts = [f"{write(row[column])} ({row['task']}, {row['where']})" for row in peaks.to_dict("records")]
    return f"Highest: {join_by_variant(zip(peaks['variant'], texts, strict=True))}."


def empty_cell_notes(run: DriftRun, rows: pd.DataFrame, column: str) -> list[str]:
    """Return a chart note on the number of heatmap cells (task by layer) without a number."""
    cells = rows["task"].nunique() * rows["variant"].nunique() * len(run.manifest.layers)
    gaps = cells - int(rows[column].notna().sum())
    return [f"{pluralize(gaps, 'cell')} in the background's colour: not measured."] if gaps else []
