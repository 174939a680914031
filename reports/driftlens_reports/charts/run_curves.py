"""Drift curves of several runs in one chart, merged dashed and repaired solid."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from driftlens.results.formatting import format_number
from driftlens.results.verdict import verdict
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import DataError, pluralize
from driftlens_reports.charts import panels, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn

_MEAN = "mean relative drift"


def draw_run_curves(runs: Mapping[str, DriftRun], *, dark: bool) -> Drawn:
    """Draw the mean relative drift by layer of each run's merged model and of the repair that its verdict is on.

    `runs` has them by name. Means are over the tasks that all runs have, else over each run's own.

    Raises:
        DataError: no run has a measured drift.
    """
    shared = set.intersection(*(set(run.tasks) for run in runs.values()))
    parts = []
    for number, (name, run) in enumerate(runs.items()):
        judged, rows = verdict(run), run.layers()
        for kind, variant in (("merged", judged.merged), ("repaired", judged.after)):
            of_model = rows[(rows["variant"] == variant) & rows["task"].isin(shared or run.tasks)]
            means = of_model.groupby("layer")["drift_rel"].mean().rename(_MEAN).dropna().reset_index()
            parts.append(means.assign(number=number, run=name, id=run.id, model=kind, variant=variant))
    curves = pd.concat(parts, ignore_index=True)
    if curves.empty:
        raise DataError("no drift was measured in these runs")
    # The first two hues are near those of experts and repairs.
    colours = theme.CLASSES[dark][2:] + theme.CLASSES[dark][:2]
    traces = []
    for (number, kind), curve in curves.groupby(["number", "model"], sort=False):
        name = words.escaped_label(f"{curve['run'].iloc[0]}, {kind}")
        colour = colours[int(number) % len(colours)]
        look = {"color": colour, "width": 2, "dash": "dash" if kind == "merged" else "solid"}
        traces.append(
            theme.scatter(
                x=curve["layer"].tolist(),
                y=curve[_MEAN].tolist(),
                mode="lines+markers",
                name=name,
                line=look,
                marker={"color": colour, "symbol": "square" if kind == "merged" else "diamond", "size": 6},
                hovertemplate=f"layer %{{x}}: %{{y:{theme.NUMBER}}}<extra>{name}</extra>",
            )
        )
    figure = theme.themed_figure(
        *traces,
        **{"dark": dark, "height": 340},
        xaxis={"title": {"text": "layer"}, "dtick": 1 if curves["layer"].max() < 16 else None},
        yaxis={"title": {"text": "drift / expert norm"}, **panels.value_axis_settings(ChartOptions())},
    )
    final = curves.groupby(["number", "model"], sort=False).tail(1)
    ends = "; ".join(
        f"{run}, {kind} {format_number(value)}" for run, kind, value in final[["run", "model", _MEAN]].to_numpy()
    )
    over = f"over {pluralize(len(shared), 'common task')}" if shared else "over each run's own tasks; none is common"
    return Drawn(
        figure,
        alt=f"Mean relative drift by layer of {pluralize(len(runs), 'run')}. At the last layer: {ends}.",
        data=curves.drop(columns="number"),
        notes=(f"Mean {over}. Dashed: merged; solid: repaired.",),
    )
