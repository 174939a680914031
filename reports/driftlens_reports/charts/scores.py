"""Charts of scores and cosines by task and module, and of calibrations: by one setting, and gain against cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from driftlens.results.calibration_summary import leaderboard_rows
from driftlens.results.formatting import format_estimate, format_number, format_percent
from driftlens.results.measures import main_metrics
from driftlens.results.sweep_results import mean_over_seeds
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import SWEEPS
from driftlens.utils.errors import pluralize, start_sentence
from driftlens.utils.intervals import Interval, mean_over_tasks
from driftlens.utils.variants import (
    ACCURACY,
    METRICS,
    calibrated_variant,
    describe_metrics,
    metric_by_name,
    metrics_title,
)
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
    traces, brush = list[theme.TraceSettings](), theme.VariantPlotter(run.roles, dark)
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
    longest = words.LONGEST_OF_TWO if panels.has_stacked_panels() else words.LONGEST
    tick, start = (theme.TICK_SHARE, "tozero") if as_bars else (theme.TICK_NUMBER, "normal")
    figure = theme.themed_figure(
        *traces,
        **{"dark": dark, "height": 400, "scattermode": "group", "scattergap": 0.4},
        **{"barmode": "group", "bargap": 0.25, "bargroupgap": 0.08},
        xaxis={"title": {"text": "task"}, **theme.category_axis(tasks, longest)},
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
    names = {"value": column, "ci_low": "low", "ci_high": "high"}
    rows = rows[["task", "variant", "n", "seed", *names]].rename(columns=names)
    rows = _add_mean_over_tasks(rows, column, tasks, has_intervals=True)
    is_wilson = all(metric.kind == "share" for metric in metrics.values())
    interval = "95 % Wilson interval" if is_wilson else "95 % interval"
    title = f"{quantity} ({'%' if is_wilson else 'times 100'})"
    return Drawn(
        _draw_by_task(run, rows, column, title, interval=interval, as_bars=True, dark=options.dark),
        alt=f"{start_sentence(quantity)} over {pluralize(len(tasks), 'task')}: {_mean_over_tasks_text(rows, column)}.",
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
    groups = samples.astype({column: float}).groupby(["task", "variant"], sort=False)[column]
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
    cosines = _mean_over_tasks_text(rows[["task", "variant", "mean cosine"]], "mean cosine")
    return Drawn(
        _draw_by_task(run, rows, "mean cosine", title, interval=whiskers, dark=options.dark),
        alt=f"Mean cosine of the {picking.feature_name(run, options)} to the expert's over "
        f"{pluralize(len(tasks), 'task')}: {cosines}.",
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
    presets=("standard", "calibration"),
    needs=("params", ("cos",)),
    caption="Mean cosine of each variant's task vector to the expert's, by layer and by group of modules. "
    "Whiskers: lowest to highest task; no samples are involved.",
    hint="A task vector is a model's weights minus the base's. A low cosine means that the merge left the expert's "
    "direction. Calibration may lower these cosines: it repairs features, not weights.",
)
def _draw_task_vector_alignment(run: DriftRun, options: ChartOptions) -> Drawn:
    table = run.params()
    params = picking.select_rows(run, options, table[table["scope"].isin(_SCOPES)]).dropna(subset="cos")
    index = {layer.path: layer.index for layer in run.manifest.layers}
    params = params.assign(**{"layer": params["path"].map(index), "module group": params["path"]})
    by_layer = params[params["scope"] == "layer"].dropna(subset="layer").astype({"layer": int})
    layers = _cosine_summary(picking.select_rows(run, options, by_layer), "layer")
    groups = _cosine_summary(params[params["scope"] == "group"], "module group")
    grid = panels.panel_grid(
        ["", ""],
        x_title=[panels.layer_axis_title(run), "group of modules"],
        y_titles=["cosine of task vectors"],
        columns=2,
        height=310,
        dark=options.dark,
    )
    brush = theme.VariantPlotter(run.roles, options.dark)
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
    tasks = pluralize(params["task"].nunique(), "task")
    spans = words.min_max_by_variant(
        layers, _VALUE, lambda row: f"{format_number(row[_VALUE])} ({run.layer_name(row['layer'])})"
    )
    return Drawn(
        grid.figure,
        alt=f"Cosine of task vectors to the experts', mean over {tasks}, lowest to highest layer: {spans}.",
        data=pd.concat([layers, groups], ignore_index=True).astype({"layer": "Int64"}),
        notes=(f"Means over {tasks}; whiskers: lowest to highest of them. {_PARTS}",),
    )


_SETTINGS = {
    "lam": "lambda (ridge, log)",
    "rho": "rho (anchor: 0 base, 1 merged)",
    "alpha": "alpha (share of expert features)",
    "n": "n (calibration samples per task, log)",
}
# The curves are of many calibrations by FeatCal.
_CALIBRATED = "calibrated:featcal"


class _SweepMeasure(NamedTuple):
    column: str
    title: str
    number: str = theme.NUMBER
    tick: str = theme.TICK_NUMBER


def _available_measures(rows: pd.DataFrame, options: ChartOptions) -> list[_SweepMeasure]:
    column = "drift_rel" if options.relative else "drift_l2_mean"
    quantity = "final drift / expert norm" if options.relative else "mean final drift"
    drift = _SweepMeasure(column, panels.title_with_unit(quantity, "sweeps", column))
    scores = [
        _SweepMeasure(metric.name, f"{metric.title} (% of test samples)", theme.SHARE, theme.TICK_SHARE)
        if metric.kind == "share"
        else _SweepMeasure(metric.name, metric.title)
        for metric in METRICS.values()
    ]
    return [measure for measure in (drift, *scores) if rows[measure.column].notna().any()]


def _sweep_rows(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    # A sweep's points are no variants, but one that is not there is a mistake.
    picking.chosen_variants(run, options)
    rows = run.sweeps()
    return rows[rows["sweep"].isin(list(_SETTINGS)) & rows["task"].isin(picking.chosen_tasks(run, options))]


def _missing_sweep_message(run: DriftRun, options: ChartOptions) -> str | None:
    rows = _sweep_rows(run, options)
    if len(rows) and _available_measures(rows, options):
        return None
    return f"needs a sweep of one setting; `{SWEEPS.command}` adds one."


@chart(
    "sweeps",
    title="How settings matter",
    section="calibration",
    rank=20,
    presets=("calibration",),
    needs=("sweeps", ("drift_l2_mean",)),
    lacks=_missing_sweep_message,
    caption="Final drift (diagnosis samples) and scores (test samples) by one setting; bold: mean of tasks, thin: "
    "each task. Mean and standard deviation over seeds.",
    hint="Where curves are flat the setting matters little. Differences smaller than the whiskers are noise of the "
    "calibration samples. The best point looks better on these samples than it is.",
)
def _draw_sweeps(run: DriftRun, options: ChartOptions) -> Drawn:
    rows = _sweep_rows(run, options)
    measures = _available_measures(rows, options)
    settings = [name for name in _SETTINGS if (rows["sweep"] == name).any()]
    pairs = list(product(settings, measures))
    grid = panels.panel_grid(
        [""] * len(pairs),
        x_title=[_SETTINGS[setting] for setting, _ in pairs],
        y_titles=[measure.title for measure in measures],
        columns=max(2, len(measures)),
        height=200,
        below=20,  # for the titles of the x axes
        dark=options.dark,
    )
    brush, curves = theme.VariantPlotter({_CALIBRATED: "featcal"}, options.dark), []
    for panel, (setting, measure) in enumerate(pairs):
        curves.append(_points_by_task(rows[rows["sweep"] == setting], setting, measure.column))
        grid.add(panel, *_sweep_curves(curves[-1], setting, measure, brush))
    x_axes = [_x_axis_settings(rows, setting) for setting, _ in pairs]
    grid.set_axes(x=x_axes, y=[{"tickformat": measure.tick} for measure in measures])
    data = pd.concat(curves, ignore_index=True)
    main_measure, main = measures[0], _mean_or_single_task(data)
    means = data[(data["measure"] == main_measure.column) & (data["task"] == main) & data["mean"].notna()]
    # The lowest and the highest mean of each sweep, with the setting's value there.
    spans = [
        words.min_max_text(
            sweep, "mean", lambda row, key=str(name): f"{format_number(row['mean'])} at {key} {row[key]:g}"
        )
        for name, sweep in means.groupby("sweep", sort=False)
    ]
    alt = f"Sweeps of {', '.join(settings)}; {main_measure.title}, {main}: {'; '.join(spans)}."
    return Drawn(grid.figure, alt, data, tuple(_sweep_notes(run, rows)))


def _x_axis_settings(rows: pd.DataFrame, setting: str) -> dict[str, Any]:
    axis: dict[str, Any] = {"tickformat": theme.TICK_NUMBER}
    if setting not in ("lam", "n"):
        return axis
    values = rows.loc[rows["sweep"] == setting, setting].astype(float)
    # Over two decades or more, a label per decade; what plotly chooses itself overlaps in narrow panels.
    is_wide = values.min() > 0 and values.max() / values.min() >= 100
    return {**axis, "type": "log", "dtick": 1 if is_wide else None}


def _sweep_curves(
    points: pd.DataFrame, setting: str, measure: _SweepMeasure, brush: theme.VariantPlotter
) -> Iterator[theme.TraceSettings]:
    """Yield a thin curve per task, then a thick one with error bars for the mean over tasks."""
    main = _mean_or_single_task(points)
    for task, curve in points.groupby("task", sort=False):
        name = words.escaped_label(str(task))
        hover = f"{name}<br>{setting} %{{x:{theme.NUMBER}}}: %{{y:{measure.number}}}<extra></extra>"
        if task != main:
            thin = {"line": {"color": brush.palette.quiet, "width": 1, "dash": None}, "opacity": 0.6}
            look = {"mode": "lines", **thin, **brush.legend_settings("tasks", "each task")}
            yield brush.line(_CALIBRATED, curve[setting], curve["mean"], hovertemplate=hover, **look)
            continue
        spread = curve["std over seeds"].astype(float)
        # With one seed there are no whiskers; those of length 0 would claim certainty.
        ends = (curve["mean"] - spread, curve["mean"] + spread) if spread.notna().any() else None
        look = brush.legend_settings("mean", name)
        yield brush.line(_CALIBRATED, curve[setting], curve["mean"], ends, hovertemplate=hover, **look)


def _sweep_notes(run: DriftRun, rows: pd.DataFrame) -> list[str]:
    seeds = rows.groupby(["sweep", "point"])["seed"].nunique()
    tasks = pluralize(rows["task"].nunique(), "task")
    notes = [f"{words.count_range_with_noun(seeds, 'seed')} per point; {tasks}."]
    if seeds.max() == 1:
        notes.append("With one seed there is no spread to show.")
    if rows["n_test"].notna().any():
        notes.append(f"{words.count_range_with_noun(rows['n_test'].dropna(), 'test sample')} per task.")
    others = [str(name) for name in run.sweeps()["sweep"].unique() if name not in _SETTINGS]
    if others:
        notes.append(f"Not drawn here: {', '.join(others)}.")
    return notes


def _points_by_task(rows: pd.DataFrame, setting: str, measure: str) -> pd.DataFrame:
    """Return the sweep points of every task, and of their mean if there are several tasks."""
    rows, tasks = rows.astype({setting: float}), rows["task"].nunique()
    parts = {str(task): mean_over_seeds(of_task, setting, measure) for task, of_task in rows.groupby("task")}
    parts |= {AVERAGE: mean_over_seeds(rows, setting, measure, tasks)} if tasks > 1 else {}
    points = pd.concat([part.assign(task=task) for task, part in parts.items()], ignore_index=True)
    columns = ["task", setting, "mean", "std over seeds", "seeds"]
    return points[columns].assign(sweep=setting, measure=measure)


def _mean_or_single_task(points: pd.DataFrame) -> str:
    return AVERAGE if (points["task"] == AVERAGE).any() else str(points["task"].iloc[0])


def _scored_models(run: DriftRun) -> pd.DataFrame:
    """Return scores of the base, the merged model, the calibrations and the experts, one row each."""
    rows = pd.DataFrame(leaderboard_rows(run))
    return rows[rows["score"].notna()]


def _missing_calibrations_message(run: DriftRun, options: ChartOptions) -> str | None:
    if len(run.manifest.calibrations) < 2:
        command = "driftlens sweep RUN --methods featcal,residual,surgery"
        return f"needs two calibrations of the run; `{command}` makes some."
    is_scored = _scored_models(run)["method"].notna().sum() >= 2
    return None if is_scored else "needs scores of two calibrations; `driftlens analyze RUN` adds them."


@chart(
    "arena",
    title="Repairs: gain against cost",
    section="calibration",
    rank=5,
    presets=("calibration",),
    needs=("accuracy", ("value",)),
    lacks=_missing_calibrations_message,
    caption="Mean test score against calibration time on all samples; lines: base, merged model and experts. "
    "Whiskers: 95 % intervals over samples; rings need the task ID at inference.",
    hint="Upper left is better. Seconds: one run on one machine. A ring has one map per task, so it is not a single "
    "model.",
)
def _draw_gain_against_cost(run: DriftRun, options: ChartOptions) -> Drawn:
    rows = _scored_models(run)
    is_made = rows["method"].notna()
    points = rows[is_made]
    traces, brush = list[theme.TraceSettings](), theme.VariantPlotter(run.roles, options.dark)
    # The middle of a logarithmic axis, from which names point inwards.
    middle = math.sqrt(points["seconds"].min() * points["seconds"].max())
    for index, row in points.iterrows():
        repair = points.loc[[index]]
        point = brush.line(
            calibrated_variant(str(row["model"])),
            repair["seconds"],
            repair["score"],
            (repair["low"], repair["high"]),
            marker_size=11,
            mode="markers+text",
            text=[words.escaped_label(str(row["model"]))],
            textposition="top right" if row["seconds"] <= middle else "top left",
            textfont=theme.text_font(dark=options.dark),
            showlegend=False,
            hovertemplate="%{text}<br>%{y:.1%}, %{x:.3g} s",
        )
        ring = "circle-open" if row["task_id"] else "circle"
        traces.append(point.update(marker={"symbol": ring, "line": {"width": 2}}))
    figure = theme.themed_figure(*traces, height=420, dark=options.dark)
    # Sorted by score, so that names of close lines do not overlap.
    levels = rows[~is_made].sort_values("score").to_dict("records")
    for row, place in zip(levels, ("bottom right", "top left", "top right")[-len(levels) :], strict=True):
        part = "expert" if row["model"] == "experts" else str(row["model"])
        figure.add_hline(
            row["score"],
            line={"color": brush.style_of(part).colour, "width": 1, "dash": "dot"},
            annotation_text=words.escaped_label(str(row["model"])),
            annotation_font=theme.text_font(dark=options.dark),
            annotation_position=place,
        )
    figure.update_xaxes(title_text="seconds of calibrating", type="log", dtick="D2", tickformat=",~g")
    low, high = float(rows["score"].min()), float(rows["score"].max())
    room = {"include": [low - 0.1 * (high - low), high + 0.1 * (high - low)]}  # for names next to lines
    figure.update_yaxes(title_text="mean score over tasks", tickformat=theme.TICK_SHARE, autorangeoptions=room)
    scores = "; ".join(f"{name} {score:.1%}" for name, score in zip(rows["model"], rows["score"], strict=True))
    return Drawn(
        figure,
        alt=f"Mean score: {scores}. Calibrating took {points['seconds'].min():.3g} to {points['seconds'].max():.3g} s.",
        data=rows,
        notes=(f"{int(rows['n'].max())} test samples; one draw of calibration samples.",),
    )
