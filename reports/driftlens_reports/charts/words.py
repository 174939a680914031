"""Words on charts: names made safe, numbers in sentences, and what stands below every figure."""

from __future__ import annotations

import contextlib
import functools
import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import pandas as pd

from driftlens.results.formatting import number, printable
from driftlens.runs.run import DriftRun
from driftlens.utils import variants

LONGEST, LONGEST_OF_TWO = 26, 14
"""Characters of a name that a figure shows, alone or beside another one; hover texts show all of it."""

Tell = Callable[["pd.Series[Any]"], str]

_NAMES: ContextVar[Mapping[str, str]] = ContextVar("display names of tasks and variants")


@contextlib.contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Within it, tasks and variants with an entry in `names` are called by it."""
    token = _NAMES.set(names)
    try:
        yield
    finally:
        _NAMES.reset(token)


def called(name: str) -> str:
    """What a reader sees of a task: its display name, where it has one."""
    return _NAMES.get({}).get(name, name)


def title(variant: str) -> str:
    """What a reader sees of a variant; a display name goes by its whole name or by that of its calibration."""
    name, comma, control = variants.title(variant).partition(", ")
    return _NAMES.get({}).get(variant) or f"{called(name)}{comma}{control}"


@functools.lru_cache(maxsize=4096)  # the same few names stand behind every point
def literal(text: str) -> str:
    """`text` as plotly shows it character by character: no markup, formula, hover placeholder or entity."""
    return html.escape(printable(text), quote=False).replace("$", "&#36;").replace("%", "&#37;")


def label(text: str, longest: int = LONGEST) -> str:
    """What `text` is called, as `literal`, cut where it is too long for a tick, a legend or a panel title."""
    text = called(text)
    return literal(text if len(text) <= longest else f"{text[: longest - 1]}…")


def labels(names: Sequence[str], longest: int = LONGEST) -> list[str]:
    """A label per name; of those that would be cut to the same words, what they share is left out."""
    cut = [label(name, longest) for name in names]
    for alike in ([index for index, text in enumerate(cut) if text == repeated] for repeated in set(cut)):
        whole = [called(names[index]) for index in alike]
        if len(alike) == 1 or len(whole[0]) <= longest:
            continue
        ends = (place for place, letters in enumerate(zip(*whole, strict=False)) if len({*letters}) > 1)
        differ = next(ends, min(map(len, whole)))
        word = re.split(r"[\W_]", whole[0][:differ])[-1]  # a number or a short word is kept whole
        begin = differ - min(len(word), longest // 3)
        for index, name in zip(alike, whole, strict=True):
            cut[index] = label(f"{name[: longest // 3]}…{name[begin:]}", longest)
    return cut


def shown(variant: str) -> str:
    """What a figure calls a variant, safe to put into it."""
    return label(title(variant))


def by_variant(texts: Iterable[tuple[object, str]]) -> str:
    """A text for each variant behind what a reader calls it: "merged 0.6120; featcal 0.8010"."""
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
    """A count with its thousands set apart: "8 041"."""
    return f"{count:,}".replace(",", "\u202f")


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 task", "8 tasks", "2 000 samples"."""
    return f"{spaced(count)} {noun if count == 1 else noun + 's'}"


def between(counts: Iterable[int]) -> str:
    """A count, or the smallest and the largest where they differ: "24" or "24 to 30"."""
    low, *_, high = sorted(counts) * 2
    return spaced(low) if low == high else f"{spaced(low)} to {spaced(high)}"


def ranged(values: Iterable[float], noun: str) -> str:
    """How many, where counts may differ: "24 samples" or "16 to 24 samples"."""
    counts = {int(value) for value in values if not pd.isna(value)}
    if not counts:
        return f"an unknown number of {noun}s"
    return f"{between(counts)} {noun if counts == {1} else f'{noun}s'}"


def sample_notes(run: DriftRun, rows: pd.DataFrame) -> list[str]:
    """How many samples of which split stand behind `rows` of the layer table, and whether they also calibrated."""
    return [f"{ranged(rows['n'], 'diagnosis sample')} per task.", *overlap_notes(run)]


def table_notes(run: DriftRun, samples: pd.DataFrame, *, over_tasks: bool = True) -> list[str]:
    """The same for rows of single samples, and over how many tasks they are taken together."""
    counts = samples.groupby(["task", "variant"], sort=False).size()
    over = f", over {counted(samples['task'].nunique(), 'task')}" if over_tasks else ""
    return [f"{ranged(counts, 'diagnosis sample')} per task{over}.", *overlap_notes(run)]


def overlap_notes(run: DriftRun) -> list[str]:
    """What the run says about diagnosis samples that are calibration samples too: it belongs on every figure."""
    return [
        f"{text}." for text in run.manifest.notices if "calibration and diagnosis draw from the same" in text
    ]


def final_sentence(rows: pd.DataFrame, column: str) -> str:
    """The last layer in words: the worst task of the first variant, with every variant's value there."""
    last = rows[(rows["layer"] == rows["layer"].max()) & rows[column].notna()]
    if last.empty:
        return "Nothing was measured at the last layer."
    first = last[last["variant"] == last["variant"].iloc[0]]
    task = first.loc[first[column].astype(float).idxmax(), "task"]
    there = last[last["task"] == task]
    values = by_variant(zip(there["variant"], there[column].astype(float).map(number), strict=True))
    num_others = rows["task"].nunique() - 1
    among = f", the highest of {num_others + 1} tasks" if num_others else ""
    return f"At {last['where'].iloc[0]}, on {task}{among}: {values}."


def peak_sentence(rows: pd.DataFrame, column: str, write: Callable[[float], str] = number) -> str:
    """Return the highest value of each variant in words, with the task and layer where it is."""
    peaks = rows[rows[column].notna()].astype({column: float})
    peaks = peaks.loc[peaks.groupby("variant", sort=False)[column].idxmax()]
    texts = [f"{write(row[column])} ({row['task']}, {row['where']})" for row in peaks.to_dict("records")]
    return f"Highest: {by_variant(zip(peaks['variant'], texts, strict=True))}."


def gap_notes(run: DriftRun, rows: pd.DataFrame, column: str) -> list[str]:
    """A note about cells of a task x layer heatmap without a number, where there are any."""
    cells = rows["task"].nunique() * rows["variant"].nunique() * len(run.manifest.layers)
    gaps = cells - int(rows[column].notna().sum())
    if not gaps:
        return []
    return [f"{counted(gaps, 'cell')} without a number, in the background's colour: not measured."]
