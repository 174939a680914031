"""Marks side by side for every task, one per variant in its colours, and their mean over tasks at the end.

First what such charts share, then accuracy, cosine to the expert, and cosine of task vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens.records.intervals import Interval, mean_over_tasks
from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.marks import (
    Trace,
    bar,
    category_axis,
    gapped,
    hatched,
    interval_texts,
    named,
    scatter,
    whiskers,
)
from driftlens_reports.charts.picking import (
    chosen_tasks,
    chosen_variants,
    layer_name,
    ordered,
    rows_at,
)
from driftlens_reports.charts.theme import (
    NUMBER,
    SHARE,
    TICK_NUMBER,
    TICK_SHARE,
    Look,
    apply_theme,
    look,
    palette,
)
from driftlens_reports.charts.words import by_variant, counted, literal, ranged, sample_notes, shown, themed
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
        interval: what hovered text calls the whiskers.
        as_bars: whether bars from zero, for shares; points otherwise.
    """

    column: str
    title: str
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
            figure.add_trace(_trace(part, marks, style, dark, legend=at == 0))
    figure.update_layout(scattermode="group", scattergap=0.4, barmode="group", bargap=0.25, bargroupgap=0.08)
    apply_theme(figure, dark=dark, key=key, height=HEIGHT)
    tasks = [str(task) for task in rows["task"].unique()]
    figure.update_xaxes(title_text="task (name)", **category_axis(tasks))
    tick, start = (TICK_SHARE, "tozero") if marks.as_bars else (TICK_NUMBER, "normal")
    figure.update_yaxes(title_text=marks.title, tickformat=tick, rangemode=start)
    if AVERAGE in tasks:
        figure.add_vline(len(tasks) - 1.5, line={"color": palette(dark).quiet, "width": 1, "dash": "dot"})
    return figure


def averages_in_words(rows: pd.DataFrame, column: str) -> str:
    """Each variant's mean over tasks, or its value on the only task: "merged 0.6120; featcal 0.8010"."""
    last = rows[rows["task"] == (AVERAGE if (rows["task"] == AVERAGE).any() else rows["task"].iloc[0])]
    return by_variant(zip(last["variant"], last[column].astype(float).map(number), strict=True))


def _trace(rows: pd.DataFrame, marks: Marks, style: Look, dark: bool, *, legend: bool) -> Trace:
    variant = str(rows["variant"].iloc[0])
    values = rows[marks.column].astype(float)
    tasks = [literal(str(task)) for task in rows["task"]]
    has_whiskers = "low" in rows and not rows["low"].isna().any()
    colour = palette(dark).ink if marks.as_bars else style.colour
    common: dict[str, Any] = {
        "x": tasks,
        "y": gapped(values),
        **named(variant, shown(variant), legend=legend),
        "offsetgroup": variant,
        "text": tasks,
        "customdata": interval_texts(
            rows, "low", "high", marks.interval, percent if marks.as_bars else number
        ),
        "hovertemplate": f"%{{text}}<br>{marks.column} %{{y:{SHARE if marks.as_bars else NUMBER}}}%{{customdata}}",
        "error_y": whiskers(values, rows["low"], rows["high"], colour, thickness=1.2, width=3)
        if has_whiskers
        else None,
    }
    if marks.as_bars:
        return bar(**common, textposition="none", marker=hatched(style))
    marker = {"color": style.colour, "symbol": style.symbol, "size": 9}
    return scatter(**common, mode="markers", marker=marker)


def _with_and_without_whiskers(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows apart by whether they have whiskers: plotly draws a missing one as one of no length."""
    if "low" not in rows:
        return [rows]
    has = rows["low"].notna()
    return [part for part in (rows[has], rows[~has]) if len(part)]


_ACCURACY = Marks("accuracy", "accuracy (% of test samples)", "95 % Wilson interval", as_bars=True)
_ACCURACIES = {"value": "accuracy", "ci_low": "low", "ci_high": "high"}


def _accuracies(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = run.accuracy()
    # Base first and expert last: the two ends between which merges lie.
    variants = [*chosen_variants(run, options, base=True), "expert"]
    return ordered(rows[rows["metric"] == "accuracy"], chosen_tasks(run, options), variants)


def _scored(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = _accuracies(run, options)
    return rows[rows["value"].notna()]


@chart(
    "accuracy",
    title="Accuracy by task",
    section="accuracy",
    rank=10,
    presets=("standard", "calibration"),
    needs=("accuracy", ("value",)),
    rows=_scored,
    caption="Accuracy on the test samples of every task with 95 % Wilson intervals, from base to expert, and the mean "
    "over tasks at the end.",
    hint="Where intervals overlap widely there may be no difference. The anchor-only control shows what rescaling the "
    "merge does by itself; only what a calibration gains over it is the calibration's own. The mean over tasks hides "
    "the worst one.",
)
def accuracy(run: DriftRun, options: ChartOptions) -> Drawn:
    """Accuracy per task and variant with its interval, and the mean over tasks."""
    tasks = chosen_tasks(run, options)
    columns = ["task", "variant", "n", "seed", *_ACCURACIES]
    rows = _accuracies(run, options)[columns].rename(columns=_ACCURACIES)
    rows = with_average(rows, "accuracy", tasks, has_intervals=True)
    return Drawn(
        task_figure(run, rows, _ACCURACY, **themed(run, "accuracy", options)),
        alt=f"Accuracy over {counted(len(tasks), 'task')}: {averages_in_words(rows, 'accuracy')}.",
        data=rows,
        notes=(
            f"{ranged(rows['n'], 'test sample')} per task.",
            "Whiskers: 95 % Wilson intervals; that of the mean over tasks is over samples, of these very tasks.",
        ),
    )


_QUANTILES = {"q10-q90": (0.1, 0.9), "q25-q75": (0.25, 0.75)}
_SPREADS = {
    "q10-q90": "10 % to 90 % quantiles over samples",
    "q25-q75": "25 % to 75 % quantiles over samples",
    "std": "one standard deviation over samples around the mean",
}


def spread(samples: pd.DataFrame, column: str, by: Sequence[str], options: ChartOptions) -> pd.DataFrame:
    """Columns `by`, `low` and `high`: how far per-sample values scatter around their mean, one row per group.

    `low` and `high` are null where the options ask for no band.
    """
    groups = samples.astype({column: float}).groupby(list(by), sort=False)[column]
    if options.band in _QUANTILES:
        low, high = (groups.quantile(level) for level in _QUANTILES[options.band])
    else:
        width = groups.std(ddof=0) if options.band == "std" else float("nan")
        low, high = groups.mean() - width, groups.mean() + width
    return pd.DataFrame({"low": low, "high": high}).reset_index()


def _cosines(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = rows_at(run, options, "layers")
    return rows[rows["cos_mean"].notna()]


@chart(
    "task-cosine",
    title="Cosine to the expert, by task",
    section="features",
    rank=10,
    presets=("standard", "calibration"),
    needs=("layers", ("cos_mean",)),
    rows=_cosines,
    caption="Mean cosine of each variant's feature to the same task's expert's over the diagnosis samples of every "
    "task, with the whiskers over samples that the notes name, and the mean over tasks at the end.",
    hint="Higher is closer to the expert; 1 is the same direction. From merged to the anchor-only control is "
    "rescaling, the rest is calibration. Cosine ignores length: drift can shrink while the cosine stays.",
)
def task_cosine(run: DriftRun, options: ChartOptions) -> Drawn:
    """Mean cosine per task and variant, and the mean over tasks."""
    tasks = chosen_tasks(run, options)
    means = rows_at(run, options, "layers")[["task", "variant", "n", "cos_mean"]]
    bands = spread(rows_at(run, options, "samples"), "cos", ["task", "variant"], options)
    rows = means.merge(bands, on=["task", "variant"], how="left")
    rows = with_average(rows.rename(columns={"cos_mean": "mean cosine"}), "mean cosine", tasks)
    said = _SPREADS.get(options.band, "")
    marks = Marks("mean cosine", "mean cosine to the expert (1: same direction)", said)
    return Drawn(
        task_figure(run, rows, marks, **themed(run, "task-cosine", options)),
        alt=f"Mean cosine of the {layer_name(options)} to the expert's over {counted(len(tasks), 'task')}: "
        f"{averages_in_words(rows, 'mean cosine')}.",
        data=rows,
        notes=(*sample_notes(run, rows), *([f"Whiskers: {said}."] if said else [])),
    )


_VECTORS = {
    "cos": "cosine of task vectors",
    "norm_ratio": "norm against the expert's",
    "sign_agreement": "share of equal signs",
}


def _backbones(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = run.params()
    rows = rows[rows["scope"] == "backbone"]
    return ordered(rows, chosen_tasks(run, options), chosen_variants(run, options))


def _vectors(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = _backbones(run, options)
    return rows[rows["cos"].notna()]


@chart(
    "backbone-alignment",
    title="Task vectors of the whole backbone",
    section="parameters",
    rank=10,
    presets=("standard", "calibration"),
    needs=("params", ("cos",)),
    rows=_vectors,
    caption="Cosine of each variant's task vector to the same task's expert's over all parameters of the backbone at "
    "once, one number per task and variant without samples, and the mean over tasks at the end.",
    hint="A task vector is a model's weights minus the base's. Read it beside the feature cosine: features can come "
    "closer to the expert while weights do not, because calibration repairs what the merged model computes, not how "
    "its weights look.",
)
def backbone_alignment(run: DriftRun, options: ChartOptions) -> Drawn:
    """Whole-backbone cosine per task and variant, and the mean over tasks."""
    tasks, column = chosen_tasks(run, options), _VECTORS["cos"]
    rows = _backbones(run, options)[["task", "variant", *_VECTORS]].rename(columns=_VECTORS)
    rows = with_average(rows, column, tasks)
    marks = Marks(column, "cosine of task vectors (1: same direction)")
    return Drawn(
        task_figure(run, rows, marks, **themed(run, "backbone-alignment", options)),
        alt=f"Cosine of task vectors to the expert's over the whole backbone and {counted(len(tasks), 'task')}: "
        f"{averages_in_words(rows, column)}.",
        data=rows,
        notes=("One number per model and task; no samples are involved.",),
    )
