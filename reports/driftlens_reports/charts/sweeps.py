"""Charts of calibrations: drift and accuracy as one setting is varied, and the score of each against its cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from driftlens.results.calibration_summary import leaderboard_rows
from driftlens.results.formatting import format_number
from driftlens.results.sweep_results import mean_over_seeds
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import SWEEPS
from driftlens.utils.variants import METRICS, calibrated_variant
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.per_task import AVERAGE

_SETTINGS = {
    "lam": "lambda (ridge, log)",
    "rho": "rho (anchor: 0 base, 1 merged)",
    "alpha": "alpha (share of expert features)",
    "n": "n (calibration samples per task, log)",
}
_LOGARITHMIC = ("lam", "n")
# Pixels: height of a panel.
_PANEL = 200
# The curves are of many calibrations, in the colour of the first one.
_CALIBRATED = "calibrated:"


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
    caption="Final drift (diagnosis samples) and scores (test samples) by one setting of the calibration, mean and "
    "standard deviation over seeds; bold: mean of tasks, thin: each task.",
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
        height=_PANEL,
        below=20,  # for the titles of the x axes
        dark=options.dark,
    )
    brush, curves = theme.VariantPlotter([_CALIBRATED], options.dark), []
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
    if setting not in _LOGARITHMIC:
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
    tasks = words.count_with_noun(rows["task"].nunique(), "task")
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


def _missing_scores_message(run: DriftRun, options: ChartOptions) -> str | None:
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
    lacks=_missing_scores_message,
    caption="Mean test score against calibration time on all samples, a point per calibration; whiskers: 95 % "
    "intervals over samples; rings need the task ID at inference; lines: base, merged model and experts.",
    hint="Upper left is better. Seconds: one run on one machine. A ring has one map per task, so it is not a single "
    "model.",
)
def _draw_gain_against_cost(run: DriftRun, options: ChartOptions) -> Drawn:
    rows = _scored_models(run)
    is_made = rows["method"].notna()
    points = rows[is_made]
    traces, brush = list[theme.TraceSettings](), theme.VariantPlotter(run.variants, options.dark)
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
