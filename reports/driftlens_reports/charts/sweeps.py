"""Drift and accuracy as one setting of the calibration is varied, with the spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import titled
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.picking import chosen_tasks, chosen_variants
from driftlens_reports.charts.sweep_points import default_of, main_task, over_seeds
from driftlens_reports.charts.theme import NUMBER, SHARE, TICK_NUMBER, TICK_SHARE, apply_theme, palette
from driftlens_reports.charts.words import counted, data_key, joined, label, literal, ranged
from driftlens_reports.wording import number

if TYPE_CHECKING:
    import plotly.graph_objects as go

_SETTINGS = {
    "lam": "lambda (ridge, log)",
    "rho": "rho (anchor: 0 base, 1 merged)",
    "alpha": "alpha (share of expert features)",
    "n": "n (calibration samples per task, log)",
}
_LOGARITHMIC = ("lam", "n")
_PANEL, _GAP, _TOP, _BOTTOM = 200, 26, 44, 56


@dataclass(frozen=True)
class _Measure:
    column: str
    title: str
    number: str
    tick: str


def _measures(rows: pd.DataFrame, options: ChartOptions) -> list[_Measure]:
    """The measures that have numbers: drift and accuracy."""
    drift = (
        _Measure("drift_rel", titled("final drift / expert norm", "sweeps", "drift_rel"), NUMBER, TICK_NUMBER)
        if options.relative
        else _Measure(
            "drift_l2_mean", titled("mean final drift", "sweeps", "drift_l2_mean"), NUMBER, TICK_NUMBER
        )
    )
    accuracy = _Measure("accuracy", "accuracy (% of test samples)", SHARE, TICK_SHARE)
    return [measure for measure in (drift, accuracy) if rows[measure.column].notna().any()]


def _swept(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Rows of sweeps of one setting, of the chosen tasks."""
    chosen_variants(run, options)  # a sweep's points are no variants, but one that is not there is a mistake
    rows = run.sweeps()
    return rows[rows["sweep"].isin(list(_SETTINGS)) & rows["task"].isin(chosen_tasks(run, options))]


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    rows = _swept(run, options)
    if len(rows) and _measures(rows, options):
        return None
    return "needs a sweep of one setting; `driftlens sweep RUN --param alpha=0,0.1,0.3,1` adds one."


@chart(
    "sweeps",
    title="How settings matter",
    section="outputs",
    caption="Final drift on the diagnosis samples and accuracy on the test samples against one setting of the "
    "calibration at a time, mean over seeds with whiskers of one standard deviation over seeds; bold the mean of "
    "tasks, thin the tasks, a ring around the default.",
    hint="Flat curves mean that the setting matters little. Differences smaller than the whiskers are noise of the "
    "calibration samples. Choosing the best point on these very samples makes it look better than it is.",
    missing=_missing,
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels: measures down, settings across."""
    from plotly.subplots import make_subplots

    rows = _swept(run, options)
    measures = _measures(rows, options)
    settings = [name for name in _SETTINGS if (rows["sweep"] == name).any()]
    inner = len(measures) * _PANEL + (len(measures) - 1) * _GAP
    figure = make_subplots(
        len(measures),
        len(settings),
        shared_xaxes="columns",
        shared_yaxes="rows",
        vertical_spacing=_GAP / inner if len(measures) > 1 else 0,
        horizontal_spacing=0.03,
    )
    found = []
    for down, measure in enumerate(measures, start=1):
        for across, setting in enumerate(settings, start=1):
            points = over_seeds(rows[rows["sweep"] == setting], setting, measure.column)
            points["is default"] = points[setting] == default_of(run, setting)
            found.append(points)
            for trace in _traces(points, setting, measure, options.dark, legend=down == across == 1):
                figure.add_trace(trace, row=down, col=across)
    apply_theme(
        figure, dark=options.dark, key=data_key(run, "sweeps", options), height=inner + _TOP + _BOTTOM
    )
    _finish(
        figure, measures, {name: rows.loc[rows["sweep"] == name, name].astype(float) for name in settings}
    )
    data = pd.concat(found, ignore_index=True)
    return Drawn(
        figure,
        alt=f"Sweeps of {', '.join(settings)}; {measures[0].title}, {main_task(data)}: {_in_words(data, measures[0])}.",
        data=data,
        notes=tuple(_notes(run, rows)),
    )


def _traces(
    points: pd.DataFrame, setting: str, measure: _Measure, dark: bool, *, legend: bool
) -> list[go.Scatter]:
    """The tasks thin, their mean bold with whiskers, and a ring around the default."""
    colours = palette(dark)
    main = colours.roles["calibrated"][0]
    bold = points[points["task"] == main_task(points)]
    bars = {"array": bold["std over seeds"].fillna(0).tolist(), "color": main, "thickness": 1.2, "width": 3}
    traces = [
        _line(bold, setting, measure).update(
            name=label(main_task(points)),
            legendgroup="mean",
            showlegend=legend,
            mode="lines+markers",
            line={"color": main, "width": 2},
            marker={"color": main, "symbol": "diamond", "size": 7},
            error_y=bars if bold["std over seeds"].notna().any() else None,
        ),
        _line(bold[bold["is default"]], setting, measure).update(
            name="default",
            legendgroup="default",
            showlegend=legend,
            mode="markers",
            marker={"symbol": "circle-open", "size": 16, "color": colours.ink, "line": {"width": 1.5}},
        ),
    ]
    others = points[points["task"] != main_task(points)]
    if len(others):
        thin = _line(others, setting, measure).update(
            name="each task",
            legendgroup="tasks",
            showlegend=legend,
            mode="lines",
            line={"color": colours.quiet, "width": 1},
            opacity=0.6,
        )
        traces.insert(0, thin)
    return traces


def _line(points: pd.DataFrame, setting: str, measure: _Measure) -> go.Scatter:
    """One trace with a line per task, apart by gaps: a trace each would be slow where tasks are many."""
    import plotly.graph_objects as go

    x: list[float | None] = []
    y: list[float | None] = []
    text: list[str] = []
    for task, own in points.groupby("task", sort=False):
        x += [*own[setting].tolist(), None]
        y += [*(None if pd.isna(value) else value for value in own["mean"]), None]
        text += [literal(str(task))] * (len(own) + 1)
    return go.Scatter(
        x=x[:-1],
        y=y[:-1],
        text=text[:-1],
        connectgaps=False,
        hovertemplate=f"%{{text}}<br>{setting} %{{x:{NUMBER}}}: %{{y:{measure.number}}}<extra></extra>",
    )


def _finish(figure: go.Figure, measures: Sequence[_Measure], swept: Mapping[str, pd.Series[float]]) -> None:
    for across, (setting, values) in enumerate(swept.items(), start=1):
        figure.update_xaxes(tickformat=TICK_NUMBER, col=across)
        if setting in _LOGARITHMIC:
            # Over two decades or more, a label per decade; what plotly chooses itself overlaps in narrow panels.
            is_wide = values.min() > 0 and values.max() / values.min() >= 100
            figure.update_xaxes(type="log", dtick=1 if is_wide else None, col=across)
        figure.update_xaxes(title_text=_SETTINGS[setting], row=len(measures), col=across)
    for down, measure in enumerate(measures, start=1):
        figure.update_yaxes(tickformat=measure.tick, row=down)
        figure.update_yaxes(title_text=measure.title, row=down, col=1)
    figure.update_layout(margin_t=_TOP)


def _notes(run: DriftRun, rows: pd.DataFrame) -> list[str]:
    seeds = rows.groupby(["sweep", "point"])["seed"].nunique()
    notes = [f"{ranged(seeds, 'seed')} per point; {counted(rows['task'].nunique(), 'task')}."]
    if seeds.max() == 1:
        notes.append("With one seed there is no spread to show.")
    if rows["n_test"].notna().any():
        notes.append(f"{ranged(rows['n_test'].dropna(), 'test sample')} per task.")
    others = [str(name) for name in run.sweeps()["sweep"].unique() if name not in _SETTINGS]
    if others:
        notes.append(f"Sweeps of several settings at once are not drawn: {', '.join(others)}.")
    return notes


def _in_words(data: pd.DataFrame, measure: _Measure) -> str:
    """The lowest and the highest mean of tasks of each sweep, with the setting's value there."""
    means = data[
        (data["measure"] == measure.column) & (data["task"] == main_task(data)) & data["mean"].notna()
    ]
    parts = []
    for sweep, rows in means.groupby("sweep", sort=False):
        ends = [rows.loc[rows["mean"].idxmin()], rows.loc[rows["mean"].idxmax()]]
        values = [f"{number(end['mean'])} at {sweep} {end[str(sweep)]:g}" for end in ends]
        parts.append(" to ".join(values))
    return joined(parts)
