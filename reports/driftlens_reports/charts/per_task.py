"""Marks side by side for every task, one per variant in its colours, and their mean over tasks at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens import variants
from driftlens.records.intervals import Interval, mean_over_tasks
from driftlens.records.run import DriftRun
from driftlens_reports.charts.theme import Look, apply_theme, look, palette
from driftlens_reports.charts.words import joined, label, literal, shown
from driftlens_reports.wording import number, percent

if TYPE_CHECKING:
    import plotly.graph_objects as go

AVERAGE = "mean of tasks"
HEIGHT = 400


@dataclass(frozen=True)
class Marks:
    """What the marks show.

    Attributes:
        column: column of the value; `low` and `high` beside it, where they are, become whiskers.
        title: of the value axis, unit included.
        number: format of the hovered value.
        tick: format of the axis ticks.
        interval: what hovered text calls the whiskers.
        as_bars: whether bars from zero, for shares; points otherwise.
    """

    column: str
    title: str
    number: str
    tick: str
    interval: str = ""
    as_bars: bool = False


def with_average(
    rows: pd.DataFrame, column: str, tasks: Sequence[str], *, has_intervals: bool = False
) -> pd.DataFrame:
    """The rows, and one more per variant: the mean over tasks, every task weighing the same.

    Null where a task has no number: a mean of the others would look better or worse than it is. With one task there is
    nothing to average, and no row is added. Where `low` and `high` are ends of 95 % intervals, the mean has its own,
    over samples: the tasks are the ones that were chosen.
    """
    if len(tasks) < 2:
        return rows
    means = []
    for variant, own in rows.groupby("variant", sort=False):
        mean = {column: float(own[column].mean()) if own[column].count() == len(tasks) else None}
        if has_intervals and mean[column] is not None:
            ends = own[[column, "low", "high"]].astype(float).to_numpy()
            found = mean_over_tasks([Interval(*row) for row in ends])
            mean |= {"low": found.low, "high": found.high}
        means.append({"task": AVERAGE, "variant": variant, **mean})
    added = pd.DataFrame(means)
    kinds = {name: rows[name].dtype for name in added if name not in ("task", "variant")}
    return pd.concat([rows, added.astype(kinds)], ignore_index=True)


def task_figure(run: DriftRun, rows: pd.DataFrame, marks: Marks, *, dark: bool, key: str) -> go.Figure:
    """A figure of the rows (task, variant, value): tasks along the axis, variants side by side."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for variant, own in rows.groupby("variant", sort=False):
        style = look(run.variants, str(variant), dark=dark)
        for at, part in enumerate(_with_and_without_whiskers(own)):
            figure.add_trace(_trace(part, marks, style, dark).update(showlegend=at == 0))
    figure.update_layout(scattermode="group", scattergap=0.4, barmode="group", bargap=0.25, bargroupgap=0.08)
    apply_theme(figure, dark=dark, key=key, height=HEIGHT)
    tasks = [str(task) for task in rows["task"].unique()]
    names = [literal(task) for task in tasks]
    figure.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=names,
        tickvals=names,
        ticktext=[label(task) for task in tasks],
        title_text="task (name)",
        showgrid=False,
    )
    figure.update_yaxes(
        title_text=marks.title, tickformat=marks.tick, rangemode="tozero" if marks.as_bars else "normal"
    )
    if AVERAGE in tasks:
        figure.add_vline(len(tasks) - 1.5, line={"color": palette(dark).quiet, "width": 1, "dash": "dot"})
    return figure


def averages_in_words(rows: pd.DataFrame, column: str) -> str:
    """Each variant's mean over tasks, or its value on the only task: "merged 0.6120; featcal 0.8010"."""
    last = rows[rows["task"] == (AVERAGE if (rows["task"] == AVERAGE).any() else rows["task"].iloc[0])]
    values = zip(last["variant"], last[column].astype(float), strict=True)
    return joined([f"{variants.title(variant)} {number(value)}" for variant, value in values])


def _trace(rows: pd.DataFrame, marks: Marks, style: Look, dark: bool) -> Any:
    import plotly.graph_objects as go

    variant = str(rows["variant"].iloc[0])
    values = rows[marks.column].astype(float)
    common: dict[str, Any] = {
        "x": [literal(str(task)) for task in rows["task"]],
        "y": [None if pd.isna(value) else value for value in values],
        "name": shown(variant),
        "legendgroup": variant,
        "offsetgroup": variant,
        "text": [literal(str(task)) for task in rows["task"]],
        "textposition": "none" if marks.as_bars else None,
        "customdata": _interval_texts(rows, marks),
        "hovertemplate": f"%{{text}}<br>{marks.column} %{{y:{marks.number}}}%{{customdata}}",
        "error_y": _whiskers(rows, values, palette(dark).ink if marks.as_bars else style.colour),
    }
    if marks.as_bars:
        pattern = {"shape": style.hatch, "fillmode": "overlay", "size": 6, "solidity": 0.25}
        return go.Bar(**common, marker={"color": style.colour, "pattern": pattern})
    marker = {"color": style.colour, "symbol": style.symbol, "size": 9}
    return go.Scatter(**common, mode="markers", marker=marker)


def _with_and_without_whiskers(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows apart by whether they have whiskers: plotly draws a missing one as one of no length."""
    if "low" not in rows:
        return [rows]
    has = rows["low"].notna()
    return [part for part in (rows[has], rows[~has]) if len(part)]


def _whiskers(rows: pd.DataFrame, values: pd.Series[Any], colour: str) -> dict[str, Any] | None:
    if "low" not in rows or rows["low"].isna().any():
        return None
    return {
        "array": (rows["high"].astype(float) - values).tolist(),
        "arrayminus": (values - rows["low"].astype(float)).tolist(),
        "color": colour,
        "thickness": 1.2,
        "width": 3,
    }


def _interval_texts(rows: pd.DataFrame, marks: Marks) -> list[str]:
    if "low" not in rows:
        return [""] * len(rows)
    word = percent if marks.as_bars else number
    ends = zip(rows["low"].astype(float), rows["high"].astype(float), strict=True)
    return [
        f"<br>{marks.interval}: {literal(word(low))} to {literal(word(high))}" if not pd.isna(low) else ""
        for low, high in ends
    ]
