"""Curves that only the dashboard draws: of means, of a calibration while it runs, of one sample, of a comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pandas as pd
import plotly.graph_objects as go

from driftlens.results.calibration_summary import compared_variants
from driftlens.results.compare import Comparison
from driftlens.results.formatting import number, percent
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import LAYERS
from driftlens.utils.errors import DataError
from driftlens.utils.variants import calibrated
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn
from driftlens_reports.charts.layer_curves import Curves, draw_curves

_MEAN, _DRIFT, _LEFT = "mean drift", "drift", "drift left"
_SHARE, _CHANGE, _SWAPPED = "share of final drift", "change of mean drift", "swapped share"


def mean_curves(run: DriftRun, options: ChartOptions) -> Drawn:
    """Mean drift over tasks by layer, a line per variant, a thin one for each task."""
    column = "drift_rel" if options.relative else "drift_l2_mean"
    rows = picking.layer_rows(run, replace(options, tasks=None))
    if not rows[column].notna().any():
        raise DataError("no drift was measured in this run", hint=f"`{LAYERS.filled_by([column])}` adds it.")
    what = "drift / expert norm" if options.relative else "mean L2 drift"
    kind = Curves(_MEAN, panels.titled(what, "layers", column), panels.value_axis(options))
    figure, means = _over_tasks(run, rows, column, kind, options)
    figure.layout.uirevision = f"{run.id} mean {options.relative}"
    alt = f"{what[0].upper()}{what[1:]} by layer, mean over tasks. {words.final_sentence(means, _MEAN)}"
    note = f"Thick: mean over {words.counted(len(run.tasks), 'task')}; thin: each task."
    return Drawn(figure, alt, means[["variant", "layer", "role", "path", _MEAN]], (note,))


def left_curves(run: DriftRun, name: str, options: ChartOptions) -> Drawn:
    """What a calibration leaves of the merged model's drift, by layer: a thick line over tasks, a thin one for each."""
    options = ChartOptions(variants=("merged", compared_variants(run, name)[-2]), dark=options.dark)
    rows, drift = picking.layer_rows(run, options), "drift_l2_mean"
    before = rows[rows["variant"] == "merged"].set_index(["task", "layer"])[drift].astype(float)
    there = pd.MultiIndex.from_frame(rows[["task", "layer"]])
    before = before.where(before > 0).reindex(there).to_numpy()
    rows = rows.assign(**{_LEFT: rows[drift].astype(float) / before})[rows["variant"] != "merged"]
    if not rows[_LEFT].notna().any():
        raise DataError(f"no drift of {name!r} was measured beside the merged model's")
    axis = {"tickformat": theme.TICK_SHARE, "rangemode": "tozero", "autorangeoptions": {"include": [1.0]}}
    kind = Curves(_LEFT, f"{_LEFT} (% of the merged model's)", axis, number=theme.SHARE, line=1.0)
    figure, means = _over_tasks(run, rows, _LEFT, kind, options)
    figure.layout.uirevision = f"{run.id} left {name}"
    final = means[(means["variant"] == calibrated(name)) & means[_LEFT].notna()].tail(1)
    shares = [f"At {row['where']}: {percent(float(row[_LEFT]))}." for _, row in final.iterrows()]
    return Drawn(
        figure,
        alt=" ".join(["Share of the merged model's drift that is left, by layer, mean over tasks.", *shares]),
        data=means[["variant", "layer", "role", "path", _LEFT]],
        notes=("100 % is as merged. Thick: mean over tasks; thin: each task.",),
    )


def layer_strip(run: DriftRun, options: ChartOptions, variant: str) -> Drawn:
    """The model as a column, first layer on top: as wide as its mean drift is, coloured by its share of the final one.

    Hovering tells the share that swapping the layer, behind all before it, for the expert's would take away.
    """
    names = {"drift_l2_mean": _DRIFT, "final_share": _SHARE, "prefix_share": _SWAPPED}
    rows = picking.layer_rows(run, replace(options, variants=(variant,))).rename(columns=names)
    means = rows.groupby("layer", sort=True)[[*names.values()]].mean().reset_index()
    means = picking.named_layers(run, means[means[_DRIFT].notna()])
    if means.empty:
        raise DataError(
            "no drift was measured in this run", hint=f"`{LAYERS.filled_by(['drift_l2_mean'])}` adds it."
        )
    shown = theme.palette(options.dark)
    highest = float(means[_SHARE].abs().max())
    texts = [
        "<br>".join(
            [words.literal(row["where"]), f"mean drift {number(row[_DRIFT])}"]
            + [f"share of the final drift {words.literal(percent(row[_SHARE]))}"]
            * (row[_SHARE] == row[_SHARE])
            + [f"swapping it for the expert's takes away {words.literal(percent(row[_SWAPPED]))}"]
            * (row[_SWAPPED] == row[_SWAPPED])
        )
        for row in means.to_dict("records")
    ]
    scale = (
        {"cmin": -highest, "cmax": highest, "colorscale": [*shown.diverging]} if highest == highest else {}
    )
    colour = means[_SHARE].tolist() if scale else shown.roles["merged"][0]
    bars = theme.bar(
        orientation="h",
        x=means[_DRIFT],
        base=-means[_DRIFT] / 2,
        y=means["layer"],
        marker={"color": colour, **scale, "line": {"width": 1, "color": shown.quiet}},
        text=texts,
        textposition="none",
        hovertemplate="%{text}<extra></extra>",
    )
    bare = {"showticklabels": False, "ticks": "", "showgrid": False, "zeroline": False}
    figure = theme.themed(
        bars,
        dark=options.dark,
        height=max(180, 26 * len(means) + 70),
        bargap=0.12,
        margin={"l": 48, "r": 12, "t": 12, "b": 40},
        showlegend=False,
        yaxis={
            **{"autorange": "reversed", "tickvals": means["layer"].tolist()},
            **{"title": {"text": "layer"}, "showgrid": False},
        },
        xaxis={"title": {"text": "mean L2 drift (width)"}, **bare},
    )
    widest = means.loc[means[_DRIFT].idxmax()]
    return Drawn(
        figure,
        alt=f"The layers of {words.title(variant)} as a column. Widest: {widest['where']}, {number(widest[_DRIFT])}.",
        data=means[["layer", "where", *names.values()]],
        notes=("Wide: much drift behind this layer. Orange makes the final drift, blue works against it.",),
    )


def _over_tasks(
    run: DriftRun, rows: pd.DataFrame, column: str, kind: Curves, options: ChartOptions
) -> tuple[go.Figure, pd.DataFrame]:
    """Thin lines of a column for every task, behind a thick one of their mean; and the rows of the means."""
    by_task = rows.pivot_table(index=["variant", "layer"], columns="task", values=column, sort=False)
    # Of other tasks, it would jump.
    means = by_task.mean(axis=1, skipna=False).rename(kind.column).reset_index()
    means = picking.ordered(means.assign(task="mean over tasks"), ["mean over tasks"], run.variants)
    means = _placed(run, means)
    chosen = {at: [task for task in by_task if (task in (options.tasks or ())) == at] for at in (False, True)}
    brush = theme.Brush(run.variants, options.dark)
    where = {layer: words.literal(place) for layer, place in zip(rows["layer"], rows["where"], strict=True)}
    lines, thin = by_task.reset_index("layer"), list[theme.Trace]()
    by_variant = lines.groupby("variant", sort=False)
    for (variant, values), (is_chosen, tasks) in itertools.product(by_variant, chosen.items()):
        if not (parts := len(tasks)):
            continue
        thin.append(
            brush.line(
                str(variant),
                [*values["layer"], None] * parts,  # one trace for all, as each has its price
                pd.Series([value for task in tasks for value in (*values[task], math.nan)]),
                mode="lines",
                line={"width": 1.5 if is_chosen else 0.75, "dash": None},
                opacity=1.0 if is_chosen else 0.45,
                showlegend=False,
                text=[*map(where.get, values["layer"]), ""] * parts,
                customdata=[label for label in map(words.label, tasks) for _ in range(len(values) + 1)],
                hovertemplate=f"%{{customdata}}, {words.shown(str(variant))}: %{{y:{kind.number}}}, %{{text}}"
                "<extra></extra>",
            )
        )
    return draw_curves(run, means, kind, dark=options.dark, below=thin, titles=[""]), means


def running_curve(run: DriftRun, name: str, drifts: Mapping[int, float], *, dark: bool) -> Drawn:
    """Mean drift by layer of the merged model, and of the calibration as far as it has come, by finished layer."""
    measured, variant = run.layers(), calibrated(name)
    merged = measured[measured["variant"] == "merged"].groupby("layer")["drift_l2_mean"].mean()
    lines = {"merged": merged, variant: pd.Series(drifts, dtype=float).sort_index()}
    rows = pd.concat([line.rename_axis("layer").rename(_MEAN) for line in lines.values()], keys=lines)
    rows = _placed(run, rows.rename_axis(["variant", "layer"]).reset_index())
    rows = rows.fillna({"role": "layer", "path": ""}).assign(task="mean over tasks")
    title = panels.titled("mean L2 drift", "layers", "drift_l2_mean")
    kind = Curves(_MEAN, title, {"tickformat": theme.TICK_NUMBER, "rangemode": "tozero"})
    # Already its look of later: shades and marks follow from the variants that come before it.
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
            "Merged: diagnosis samples; the calibration: calibration samples while it runs.",
        ),
    )


def _placed(run: DriftRun, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with each layer's role, path and name."""
    columns = {"layer": "index", "role": "role", "path": "path"}
    layers = {name: [getattr(entry, key) for entry in run.manifest.layers] for name, key in columns.items()}
    return picking.named_layers(run, rows.merge(pd.DataFrame(layers), on="layer", how="left"))


def change_curves(comparison: Comparison, *, dark: bool) -> Drawn:
    """Change of mean drift by layer, after minus before: one panel per task, one line per compared pair."""
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
