"""Curves that only the dashboard draws: of means, of a calibration while it runs, of one sample, of a comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from driftlens.results.compare import Comparison
from driftlens.results.formatting import number
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import LAYERS
from driftlens.utils.errors import DataError
from driftlens.utils.variants import calibrated
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn
from driftlens_reports.charts.layer_curves import Curves, draw_curves

_MEAN, _CHANGE = "mean drift", "change of mean drift"


def mean_curves(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw the mean drift over tasks by layer: a thick line per variant, a thin one per task."""
    column = "drift_rel" if options.relative else "drift_l2_mean"
    # The mean is over all tasks; chosen ones are only emphasised.
    rows = picking.layer_rows(run, replace(options, tasks=None))
    if not rows[column].notna().any():
        raise DataError(
            "no drift was measured in this run", hint=f"`{LAYERS.command_to_fill([column])}` adds it."
        )
    quantity = "drift / expert norm" if options.relative else "mean L2 drift"
    kind = Curves(_MEAN, panels.titled(quantity, "layers", column), panels.value_axis(options))
    by_task = rows.pivot_table(index=["variant", "layer"], columns="task", values=column, sort=False)
    # A mean over fewer tasks would jump.
    means = by_task.mean(axis=1, skipna=False).rename(_MEAN).reset_index()
    means = picking.ordered(means.assign(task="mean over tasks"), ["mean over tasks"], run.variants)
    means = _placed(run, means)
    where = {layer: words.literal(place) for layer, place in zip(rows["layer"], rows["where"], strict=True)}
    thin = _thin_lines(run, by_task, where, options)
    figure = draw_curves(run, means, kind, dark=options.dark, below=thin, titles=[""])
    # Zoom is kept when tasks or theme change, not when the unit does.
    figure.layout.uirevision = f"{run.id} mean {options.relative}"
    alt = (
        f"{quantity[0].upper()}{quantity[1:]} by layer, mean over tasks. {words.final_sentence(means, _MEAN)}"
    )
    note = f"Thick: mean over {words.counted(len(run.tasks), 'task')}; thin: each task."
    return Drawn(figure, alt, means[["variant", "layer", "role", "path", _MEAN]], (note,))


def _thin_lines(
    run: DriftRun, by_task: pd.DataFrame, where: Mapping[int, str], options: ChartOptions
) -> list[theme.Trace]:
    """Return a line per task, those of chosen tasks emphasised."""
    selected = set(options.tasks or ())
    brush = theme.Brush(run.variants, options.dark)
    thin = []
    for (variant, values), is_chosen in itertools.product(
        by_task.reset_index("layer").groupby("variant", sort=False), (False, True)
    ):
        tasks = [task for task in by_task if (task in selected) == is_chosen]
        if not tasks:
            continue
        thin.append(
            brush.line(
                str(variant),
                # One trace for all tasks, as each has its price.
                [*values["layer"], None] * len(tasks),
                pd.Series([value for task in tasks for value in (*values[task], math.nan)]),
                mode="lines",
                line={"width": 1.5 if is_chosen else 0.75, "dash": None},
                opacity=1.0 if is_chosen else 0.45,
                showlegend=False,
                text=[*map(where.get, values["layer"]), ""] * len(tasks),
                customdata=[label for label in map(words.label, tasks) for _ in range(len(values) + 1)],
                hovertemplate=f"%{{customdata}}, {words.shown(str(variant))}: %{{y:{theme.NUMBER}}}, %{{text}}"
                "<extra></extra>",
            )
        )
    return thin


def running_curve(run: DriftRun, name: str, drifts: Mapping[int, float], *, dark: bool) -> Drawn:
    """Draw the mean drift by layer of the merged model and of a calibration in progress.

    Args:
        run: the run.
        name: the calibration.
        drifts: mean drift of each finished layer, by layer index.
        dark: True for the dark theme.
    """
    measured, variant = run.layers(), calibrated(name)
    merged = measured[measured["variant"] == "merged"].groupby("layer")["drift_l2_mean"].mean()
    lines = {"merged": merged, variant: pd.Series(drifts, dtype=float).sort_index()}
    rows = pd.concat([line.rename_axis("layer").rename(_MEAN) for line in lines.values()], keys=lines)
    rows = _placed(run, rows.rename_axis(["variant", "layer"]).reset_index())
    rows = rows.fillna({"role": "layer", "path": ""}).assign(task="mean over tasks")
    title = panels.titled("mean L2 drift", "layers", "drift_l2_mean")
    kind = Curves(_MEAN, title, {"tickformat": theme.TICK_NUMBER, "rangemode": "tozero"})
    # The style depends on the variants before it, so the line keeps it after the calibration.
    names = list(dict.fromkeys([*run.variants, *rows["variant"]]))
    figure = draw_curves(run, rows, kind, dark=dark, variants=names, titles=[""])
    figure.layout.uirevision = f"{run.id} running {name}"
    state = "No layer is calibrated yet."
    if drifts:
        layer = max(drifts)
        before = f", merged {number(float(merged[layer]))}" if layer in merged else ""
        done = f"{words.counted(len(drifts), 'layer')} of {len(run.manifest.layers)}"
        state = f"{done} so far; at {run.layer_name(layer)}: calibrated {number(drifts[layer])}{before}."
    return Drawn(
        figure,
        alt=f"Mean drift by layer while the calibration runs. {state}",
        data=rows[["variant", "layer", "role", "path", _MEAN]],
        notes=(
            "Mean over tasks.",
            "Merged: diagnosis samples; calibration: calibration samples.",
        ),
    )


def _placed(run: DriftRun, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with each layer's role, path and name."""
    columns = {"layer": "index", "role": "role", "path": "path"}
    layers = {name: [getattr(entry, key) for entry in run.manifest.layers] for name, key in columns.items()}
    return picking.named_layers(run, rows.merge(pd.DataFrame(layers), on="layer", how="left"))


def change_curves(comparison: Comparison, *, dark: bool) -> Drawn:
    """Draw the change of mean drift by layer between two runs: a panel per task, a line per pair of variants."""
    run = comparison.after
    # The compared layers as rows of a layer table, each pair under the name of the variant after.
    rows = comparison.layers.rename(columns={"after": "variant", "drift_change": _CHANGE})
    roles = {entry.index: entry.role for entry in run.manifest.layers}
    rows = rows.assign(role=rows["layer"].map(roles))
    kind = Curves(_CHANGE, "change of L2 drift (feature units)", {"tickformat": theme.TICK_NUMBER}, line=0.0)
    text, last = "Nothing was measured at the last layer.", rows[rows["layer"] == rows["layer"].max()]
    change = last[_CHANGE].dropna()
    if len(change):
        fewer, mean = int((change < 0).sum()), number(float(change.mean()))
        compared = f"{fewer} of {len(change)} comparisons"
        text = f"At the last layer it falls in {compared}; the mean change is {mean}."
    figure = draw_curves(run, rows, kind, dark=dark)
    figure.layout.uirevision = f"{comparison.before.id} {comparison.after.id} {comparison.pairs}"
    return Drawn(
        figure,
        alt=f"Change of mean drift by layer. {text}",
        data=comparison.layers,
        notes=("Mean over diagnosis samples, after minus before: below zero is an improvement.",),
    )
