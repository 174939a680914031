"""Marks side by side, one per variant in its colours: for every task and their mean, and for layers and modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from driftlens.results.formatting import format_estimate, format_number, format_percent
from driftlens.results.measures import main_metrics
from driftlens.runs.run import DriftRun
from driftlens.utils.intervals import Interval, mean_over_tasks
from driftlens.utils.variants import ACCURACY, describe_metrics, metric_by_name, metrics_title
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

AVERAGE = "mean of tasks"


def _add_mean_over_tasks(
    rows: pd.DataFrame, column: str, tasks: Sequence[str], *, has_intervals: bool = False
) -> pd.DataFrame:
    """Add rows with the mean over tasks of each variant and its interval; null if a task was not measured."""
    if len(tasks) < 2:
        return rows
    means = []
    for variant, part in rows.groupby("variant", sort=False):
        # A mean over fewer tasks is not comparable with the others.
        mean = {column: float(part[column].mean()) if part[column].count() == len(tasks) else None}
        if has_intervals and mean[column] is not None:
            ends = part[[column, "low", "high"]].astype(float).to_numpy()
            over_tasks = mean_over_tasks([Interval(*row) for row in ends])
            mean |= {"low": over_tasks.low, "high": over_tasks.high}
        means.append({"task": AVERAGE, "variant": variant, **mean})
    added = pd.DataFrame(means)
    # The types of the rows: a column of None alone would have another one.
    kinds = {name: rows[name].dtype for name in added if name not in ("task", "variant")}
    return pd.concat([rows, added.astype(kinds)], ignore_index=True)


def _draw_by_task(
    run: DriftRun,
    rows: pd.DataFrame,
    column: str,
    title: str,
    *,
    interval: str = "",
    as_bars: bool = False,
    dark: bool,
) -> go.Figure:
    """Draw values by task with the variants next to one another: shares as bars, other values as points."""
    traces, brush = list[theme.TraceSettings](), theme.VariantPlotter(run.variants, dark)
    write, form = (format_percent, theme.SHARE) if as_bars else (format_number, theme.NUMBER)
    for name, of_variant in rows.groupby("variant", sort=False):
        # Apart by whether they have whiskers: plotly draws a missing one as one of no length.
        has = of_variant["low"].notna() if "low" in of_variant else pd.Series(False, index=of_variant.index)
        for part in (part for part in (of_variant[has], of_variant[~has]) if len(part)):
            tasks = [words.escape_plotly(str(task)) for task in part["task"]]
            ends = (part["low"], part["high"]) if has[part.index[0]] else None
            hover: dict[str, Any] = {
                "offsetgroup": str(name),
                "text": tasks,
                "customdata": theme.interval_hover_texts(part, "low", "high", interval, write),
                "hovertemplate": f"%{{text}}<br>{column} %{{y:{form}}}%{{customdata}}",
            }
            hover |= {} if as_bars else {"mode": "markers", "marker_size": 9}
            draw = brush.bars if as_bars else brush.line
            traces.append(draw(str(name), tasks, part[column], ends, **hover))
    tasks = [str(task) for task in rows["task"].unique()]
    tick, start = (theme.TICK_SHARE, "tozero") if as_bars else (theme.TICK_NUMBER, "normal")
    figure = theme.themed_figure(
        *traces,
        **{"dark": dark, "height": 400, "scattermode": "group", "scattergap": 0.4},
        **{"barmode": "group", "bargap": 0.25, "bargroupgap": 0.08},
        xaxis={"title": {"text": "task"}, **theme.category_axis(tasks)},
        yaxis={"title": {"text": title}, "tickformat": tick, "rangemode": start},
    )
    if AVERAGE in tasks:
        figure.add_vline(len(tasks) - 1.5, line={"color": brush.palette.quiet, "width": 1, "dash": "dot"})
    return figure


def _mean_over_tasks_text(rows: pd.DataFrame, column: str) -> str:
    """Format the mean over tasks of each variant: "merged 0.6120; featcal 0.8010"."""
    last = rows[rows["task"] == (AVERAGE if (rows["task"] == AVERAGE).any() else rows["task"].iloc[0])]
    means = last[[name for name in (column, "low", "high") if name in last]].astype(float).to_numpy()
    texts = [format_estimate(Interval(*row), "number") for row in means.tolist()]
    return words.join_by_variant(zip(last["variant"], texts, strict=True))


def _rename_score_columns(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    names = {"value": column, "ci_low": "low", "ci_high": "high"}
    return rows[["task", "variant", "n", "seed", *names]].rename(columns=names)


def _main_scores(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Return the main score of every task if all have the same metric, so that they can share an axis."""
    rows = run.accuracy()
    main = {task: metric.name for task, metric in main_metrics(run).items() if metric.is_averaged}
    rows = rows[rows["metric"] == rows["task"].map(main)]
    # Base first and expert last: the two ends between which merges lie.
    variants = [*picking.chosen_variants(run, options, base=True), "expert"]
    return picking.filter_and_sort(rows, picking.chosen_tasks(run, options), variants)


def _unmeasured_notices(run: DriftRun) -> list[str]:
    return [f"{text}." for text in run.manifest.notices if " not measured: " in text]


def _missing_scores_message(run: DriftRun, options: ChartOptions) -> str | None:
    if len(_main_scores(run, options)):
        return None
    lacking = picking.missing_data_message(run, options, "accuracy", ["value"]) or picking.missing_columns_message(
        "accuracy", ["value"]
    )
    return " ".join(_unmeasured_notices(run)) or lacking


@chart(
    "accuracy",
    title="Score by task",
    section="accuracy",
    rank=10,
    presets=("standard", "calibration"),
    needs=("accuracy", ("value",)),
    lacks=_missing_scores_message,
    caption="Accuracy on test samples (or the task's own score) per task and on average (right), with 95 % intervals.",
    hint="Widely overlapping intervals may mean no difference. The mean hides the worst task.",
)
def _draw_scores(run: DriftRun, options: ChartOptions) -> Drawn:
    rows = _main_scores(run, options)
    metrics = {name: metric_by_name(name) for name in rows["metric"].unique()}
    quantity, column = (
        metrics_title(metrics.values()),
        "accuracy" if [*metrics] == [ACCURACY.name] else "score",
    )
    tasks = [str(task) for task in rows["task"].unique()]
    judged = rows.drop_duplicates("task")[["task", "metric"]].to_numpy()
    by_task = ", ".join(f"{task}: {metrics[name].title}" for task, name in judged)
    rows = _add_mean_over_tasks(_rename_score_columns(rows, column), column, tasks, has_intervals=True)
    is_wilson = all(metric.kind == "share" for metric in metrics.values())
    interval = "95 % Wilson interval" if is_wilson else "95 % interval"
    title = f"{quantity} ({'%' if is_wilson else 'times 100'})"
    return Drawn(
        _draw_by_task(run, rows, column, title, interval=interval, as_bars=True, dark=options.dark),
        alt=f"{quantity[:1].upper()}{quantity[1:]} over {words.count_with_noun(len(tasks), 'task')}: "
        f"{_mean_over_tasks_text(rows, column)}.",
        data=rows,
        notes=(
            f"{words.count_range_with_noun(rows['n'], 'test sample')} per task.",
            f"Whiskers: {interval}s; for the mean over tasks, over samples of these tasks.",
            *([] if column == "accuracy" else [f"Metrics: {by_task}."]),
            *_unmeasured_notices(run),
            *describe_metrics(metric for metric in metrics.values() if metric != ACCURACY),
        ),
    )


def _sample_deciles(samples: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the 10 % and 90 % quantiles over samples, one row per task and variant."""
    measured = samples[["task", "variant", column]].astype({column: float})
    groups = measured.groupby(["task", "variant"], sort=False)[column]
    return pd.DataFrame({"low": groups.quantile(0.1), "high": groups.quantile(0.9)}).reset_index()


@chart(
    "task-cosine",
    title="Cosine to the expert, by task",
    section="features",
    rank=10,
    presets=("standard", "calibration"),
    needs=("layers", ("cos_mean",)),
    caption="Mean cosine to the expert's feature over diagnosis samples, per task and on average (right), with "
    "whiskers over samples.",
    hint="Higher is closer to the expert; 1 is the same direction. Cosine ignores length, so drift can shrink alone.",
)
def _draw_task_cosines(run: DriftRun, options: ChartOptions) -> Drawn:
    tasks = picking.chosen_tasks(run, options)
    means = picking.rows_at_layer(run, options, "layers")[["task", "variant", "n", "cos_mean"]]
    bands = _sample_deciles(picking.rows_at_layer(run, options, "samples"), "cos")
    rows = means.merge(bands, on=["task", "variant"], how="left")
    rows = _add_mean_over_tasks(rows.rename(columns={"cos_mean": "mean cosine"}), "mean cosine", tasks)
    title, whiskers = "mean cosine to the expert", "10 % to 90 % quantiles over samples"
    last = rows[rows["task"] == (AVERAGE if len(tasks) > 1 else tasks[0])]
    cosines = words.join_by_variant(
        zip(last["variant"], last["mean cosine"].astype(float).map(format_number), strict=True)
    )
    return Drawn(
        _draw_by_task(run, rows, "mean cosine", title, interval=whiskers, dark=options.dark),
        alt=f"Mean cosine of the {picking.feature_name(run, options)} to the expert's over "
        f"{words.count_with_noun(len(tasks), 'task')}: {cosines}.",
        data=rows,
        notes=(*words.layer_sample_notes(run, rows), f"Whiskers: {whiskers}."),
    )


_PARTS = (
    "Groups: q, k, v and o of attention (qkv: one module), gate, up and down of the feed-forward part; one cosine per "
    "group."
)
_VALUE, _SCOPES = "mean cosine of task vectors", ("layer", "group")


def _cosine_summary(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    groups = rows.groupby(["variant", by], sort=False)["cos"]
    ends = {"lowest": groups.min(), "highest": groups.max()}
    return pd.DataFrame({_VALUE: groups.mean(), **ends, "cosines": groups.size()}).reset_index()


@chart(
    "alignment",
    title="Task vectors by layer and group of modules",
    section="parameters",
    rank=20,
    needs=("params", ("cos",)),
    caption="Mean cosine of each variant's task vector to the expert's, by layer and by group of modules, with "
    "whiskers from the lowest to the highest task; no samples are involved.",
    hint="A task vector is a model's weights minus the base's. A low cosine means that the merge left the expert's "
    "direction. Calibration may lower these cosines: it repairs features, not weights.",
)
def _draw_task_vector_alignment(run: DriftRun, options: ChartOptions) -> Drawn:
    table = run.params()
    params = picking.select_rows(run, options, table[table["scope"].isin(_SCOPES)]).dropna(subset="cos")
    index = {layer.path: layer.index for layer in run.manifest.layers}
    by_layer = params[params["scope"] == "layer"]
    by_layer = by_layer.assign(layer=by_layer["path"].map(index)).dropna(subset="layer")
    by_layer = by_layer.astype({"layer": int})
    layers = _cosine_summary(picking.select_rows(run, options, by_layer), "layer")
    groups = _cosine_summary(
        params[params["scope"] == "group"].assign(**{"module group": params["path"]}), "module group"
    )
    grid = panels.panel_grid(
        ["", ""],
        x_title=[panels.layer_axis_title(run), "group of modules"],
        y_titles=["cosine of task vectors"],
        columns=2,
        height=310,
        dark=options.dark,
    )
    brush = theme.VariantPlotter(run.variants, options.dark)
    for variant in map(str, params["variant"].unique()):
        for place, (rows, by) in enumerate([(layers, "layer"), (groups, "module group")]):
            part, is_layer = rows[rows["variant"] == variant], by == "layer"
            reach = zip(part["lowest"], part["highest"], part["cosines"], strict=True)
            points = brush.line(
                variant,
                part[by] if is_layer else [words.escape_plotly(str(group)) for group in part[by]],
                part[_VALUE],
                (part["lowest"], part["highest"]),
                mode="markers",
                marker_size=7,
                offsetgroup=variant,
                text=[f"{format_number(low)} to {format_number(high)} over {count}" for low, high, count in reach],
                hovertemplate=f"{'layer ' if is_layer else ''}%{{x}}<br>mean cosine %{{y:{theme.NUMBER}}}<br>%{{text}}",
            )
            grid.add(place, points)
    x = [panels.layer_axis_settings(run), {"type": "category", "showgrid": False}]
    grid.set_axes(x=x, y={"tickformat": theme.TICK_NUMBER})
    grid.update_layout(scattermode="group", scattergap=0.4)
    tasks = words.count_with_noun(params["task"].nunique(), "task")
    spans = words.min_max_by_variant(
        layers, _VALUE, lambda row: f"{format_number(row[_VALUE])} ({run.layer_name(row['layer'])})"
    )
    return Drawn(
        grid.figure,
        alt=f"Cosine of task vectors to the experts', mean over {tasks}, lowest to highest layer: {spans}.",
        data=pd.concat([layers, groups], ignore_index=True).astype({"layer": "Int64"}),
        notes=(f"Means over {tasks}; whiskers: lowest to highest of them. {_PARTS}",),
    )
