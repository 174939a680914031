"""Heatmaps with layers across, panels below one another: tasks down on one colour scale, and sites of a calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from driftlens.base.variants import calibrated
from driftlens.findings.reading import number, signs
from driftlens.runs.run import DriftRun
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.contributions import CONTRIBUTED, REST, share_rows, with_ends
from driftlens_reports.charts.layer_curves import of_layers
from driftlens_reports.charts.per_task import block_of

_ROW, _LEAST = 26, 72
"""Pixels: of a row of cells, and of a panel."""
_BAR_BELOW = 66
"""Pixels of a colour bar below the panels of a narrow window, with its title and numbers."""


@dataclass(frozen=True)
class Scale:
    """What colours stand for: the ends' values, the colours between, how numbers are written in cells and hovered."""

    title: str
    low: float
    high: float
    colours: Sequence[str]
    write: Callable[[float], str] = number
    hover: str = theme.TICK_NUMBER


@dataclass(frozen=True)
class Cells:
    """One panel: a row of cells per name, a column per layer, what hovering tells before and behind each value."""

    title: str
    values: pd.DataFrame
    texts: pd.DataFrame
    what: str = ""
    more: pd.DataFrame | None = None
    scale: int = 0


def draw_cells(
    run: DriftRun,
    cells: Sequence[Cells],
    scales: Sequence[Scale],
    *,
    y_title: str,
    beyond: str = "",
    dark: bool,
) -> go.Figure:
    """The panels below one another, with a colour bar for each scale; `beyond` names a column behind the head."""
    names, layers = list(cells[0].values.index), list(cells[0].values.columns)
    grid = panels.panel_grid(
        [panel.title for panel in cells],
        x_title=panels.layer_title(run),
        y_titles=[y_title],
        columns=1,
        height=max(_ROW * len(names) + 8, _LEAST),
        dark=dark,
    )
    for index, panel in enumerate(cells):
        more = "" if panel.more is None else "%{hovertext}"
        coloured = theme.heatmap(
            x=layers,
            y=list(range(len(names))),
            z=panel.values.to_numpy(dtype=float),
            xgap=1,
            ygap=1,
            hoverongaps=False,
            coloraxis=f"coloraxis{panel.scale + 1 if panel.scale else ''}",
            text=panel.texts.to_numpy().tolist(),
            hovertext=None if panel.more is None else panel.more.to_numpy().tolist(),
            hovertemplate=f"%{{text}}<br>{panel.what}%{{z:{scales[panel.scale].hover}}}{more}<extra></extra>",
        )
        grid.add(index, coloured, _numbers(coloured, scales[panel.scale]))
    grid.add_lines("x", *panels.borders(run.layers()))
    is_narrow = panels.is_narrow() and len(scales) == 1
    shown_names = words.labels(names, words.LONGEST_OF_TWO if is_narrow else words.LONGEST)
    ticks = {"tickvals": list(range(len(names))), "ticktext": shown_names, "showgrid": False}
    first_on_top = {"range": [len(names) - 0.5, -0.5]}
    grid.set_axes(x={**panels.layer_axis(run, beyond), "showgrid": False}, y={**ticks, **first_on_top})
    # Numbers that don't fit into their cell are left out; hovering tells.
    written = {"uniformtext": {"minsize": theme.SMALL - 2, "mode": "hide"}, "bargap": 0}
    settings = {**written, "plot_bgcolor": theme.palette(dark).gap, "margin": panels.room_beside(shown_names)}
    height, margin = grid.layout["height"], grid.layout["margin"]
    if is_narrow:
        settings["margin"] |= {"r": 12, "b": margin["b"] + _BAR_BELOW}
        settings["height"] = height + _BAR_BELOW
    for index, shades in enumerate(scales):
        # Of several scales, each is named above its panels.
        beside = theme.colour_bar(title={"text": shades.title, "side": "right"}, tickformat=shades.hover)
        if len(scales) > 1:
            beside |= {"title": None, "len": 0.92 / len(scales), "y": 1 - (index + 0.5) / len(scales)}
        elif is_narrow:
            beside |= {"title": {"text": shades.title, "side": "top"}, "orientation": "h"}
            # Measured from the container, a low chart would have no room left for its cells.
            inner = height - margin["t"] - margin["b"]
            beside |= {"y": -margin["b"] / inner, "yanchor": "top"}
        ends = {"cmin": shades.low, "cmax": shades.high, "colorscale": shades.colours}
        settings[f"coloraxis{index + 1 if index else ''}"] = {**ends, "colorbar": beside}
    grid.lay_out(**settings)
    return grid.figure


def _numbers(drawn: theme.Trace, shades: Scale) -> theme.Trace:
    """The numbers in the cells, on unseen bars: a heatmap's own have one colour and run over narrow cells."""
    extent = (shades.high - shades.low) or 1.0
    places = np.argwhere(~np.isnan(drawn["z"]))
    values = [float(drawn["z"][row, across]) for row, across in places]
    behind = [theme.shade(shades.colours, (value - shades.low) / extent) for value in values]
    return theme.bar(
        x=[drawn["x"][across] for _, across in places],
        base=[float(row) - 0.5 for row, _ in places],
        y=[1.0] * len(values),
        width=1,
        marker={"color": "rgba(0, 0, 0, 0)", "line_width": 0},
        text=[shades.write(value) for value in values],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"size": theme.SMALL - 1, "color": [theme.readable(colour) for colour in behind]},
        hoverinfo="skip",
        showlegend=False,
    )


def _task_cells(
    run: DriftRun, rows: pd.DataFrame, column: str, shades: Scale, *, beyond: str = "", dark: bool
) -> go.Figure:
    """One panel per variant of rows of the layer table, tasks down; `beyond` is a column shown behind the head."""
    # Layers without rows are gaps too: left out, their neighbours' cells would grow over them.
    places = {layer.index: words.literal(run.layer_name(layer.index)) for layer in run.manifest.layers}
    layers, tasks, cells = list(places), list(dict.fromkeys(rows["task"])), []
    if beyond:
        places[layers[-1] + 1] = beyond
    texts = pd.DataFrame([[f"{words.literal(task)}, {place}" for place in places.values()] for task in tasks])
    intervals = theme.interval_texts(rows, f"{column} low", f"{column} high")
    key = ["variant", "task"]
    wide = rows.assign(interval=intervals).pivot(index=key, columns="layer", values=[column, "interval"])
    rest = rows.groupby(key)[beyond].max() if beyond else pd.Series()
    for variant in rows["variant"].unique():
        table = wide.loc[variant].reindex(tasks)
        values = table[column].reindex(columns=list(places))
        more = table["interval"].fillna("").reindex(columns=list(places), fill_value="")
        if beyond:
            values[layers[-1] + 1] = rest.loc[variant]
        cells.append(Cells(words.shown(str(variant)), values, texts, more=more if any(intervals) else None))
    return draw_cells(run, cells, [shades], y_title="task", beyond="rest" if beyond else "", dark=dark)


@chart(
    "heatmap",
    title="Drift by task and layer",
    section="drift",
    rank=20,
    presets=("standard", "calibration"),
    needs=("layers", ("drift_l2_mean",)),
    caption="Drift from the task's expert leaving each layer, mean over diagnosis samples without a band, tasks down "
    "and layers across, one panel per variant on one colour scale.",
    hint="Look for rows that darken early (tasks that suffer throughout) and for columns that darken at once (layers "
    "that hurt every task). In feature units, later layers may look worse only because their features are larger; "
    "relative drift removes that.",
)
def heatmap(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of cells; the scale begins at zero and ends at the largest value shown."""
    source = "drift_rel" if options.relative else "drift_l2_mean"
    column = "relative drift" if options.relative else "mean drift"
    what = "drift / expert norm" if options.relative else "mean L2 drift"
    rows = picking.layer_rows(run, options).rename(columns={source: column})
    highest, colours = rows[column].astype(float).max(), theme.palette(options.dark).sequential
    top = highest if highest > 0 else 1.0
    shades = Scale(panels.titled(what, "layers", source), 0.0, top, colours)
    figure = _task_cells(run, rows, column, shades, dark=options.dark)
    alt = f"Heatmap of the {column} by task and layer. {words.peak_sentence(rows, column)}"
    return of_layers(run, figure, rows, column, alt=alt, notes=words.gap_notes(run, rows, column))


@chart(
    "cka",
    title="CKA with the expert",
    section="similarity",
    rank=40,
    needs=("layers", ("cka",)),
    caption="Debiased linear CKA between the features leaving each layer and the expert's, one number over all "
    "diagnosis samples of a task without a band, tasks down and layers across, one panel per variant on one scale.",
    hint="1 means the same geometry up to rotation and scale; cells that stand out from the background are less alike. "
    "CKA does not see rotations, which do harm a head, so a high value does not mean a small drift.",
)
def cka(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of cells; the scale runs from the lowest value shown, or 0, to 1."""
    rows = picking.layer_rows(run, options)
    lowest = min(0.0, float(rows["cka"].astype(float).min()))
    colours = theme.palette(options.dark).sequential[::-1]  # what is unlike stands out, as drift does
    shades = Scale(panels.titled("CKA", "layers", "cka"), lowest, 1.0, colours, lambda value: f"{value:.2f}")
    figure = _task_cells(run, rows, "cka", shades, dark=options.dark)
    alt = f"Heatmap of CKA with the expert by task and layer. {words.peak_sentence(rows, 'cka', lowest=True)}"
    return of_layers(run, figure, rows, "cka", alt=alt, notes=words.gap_notes(run, rows, "cka"))


@chart(
    "contributions-heatmap",
    title="Contributions by task and layer",
    section="contributions",
    rank=20,
    presets=("standard",),
    needs=("layers", ("final_share",)),
    caption="Signed share of the final drift that each layer's local mismatch ends up as, a ratio of sums over "
    "diagnosis samples without a band, tasks down, layers and remainder across, one panel per variant on one scale.",
    hint="Orange layers make the final drift, blue ones work against it. Each row sums to 100 % with its remainder, "
    "which no layer accounts for; a large one means that the quadrature of the Jacobians was too coarse.",
)
def contributions_heatmap(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of cells; the scale is symmetric around zero."""
    rows = share_rows(run, options, {"final_share": CONTRIBUTED}).rename(columns={"remainder_share": REST})
    rows = rows[rows[CONTRIBUTED].notna().groupby(rows["variant"]).transform("any")]
    shades = _shares(rows[[CONTRIBUTED, REST]], options.dark)
    figure = _task_cells(run, rows, CONTRIBUTED, shades, beyond=REST, dark=options.dark)
    alt = f"Heatmap of signed shares of the final drift by task and layer. {words.peak_share(rows, CONTRIBUTED)}"
    notes, columns = words.gap_notes(run, rows, CONTRIBUTED), [*with_ends(rows, CONTRIBUTED), REST]
    return of_layers(run, figure, rows, *columns, alt=alt, notes=notes)


def _shares(values: pd.DataFrame, dark: bool) -> Scale:
    highest, colours = values.astype(float).abs().max().max(), theme.palette(dark).diverging
    title, write = "share of final drift (%)", lambda value: signs(f"{round(value, 2) + 0.0:.0%}")
    return Scale(title, -highest, highest, colours, write, theme.SHARE)


@chart(
    "group-contributions",
    title="Contributions by module group and layer",
    section="contributions",
    rank=25,
    needs=("group_contributions", ("final_share",)),
    caption="Signed share of the final drift that each module group's part of a layer's local mismatch ends up as, a "
    "ratio of sums over diagnosis samples, mean over tasks without a band, groups down, layers across.",
    hint="A column sums to the layer's contribution, so a dark cell names the modules to repair or to merge otherwise: "
    "q, k, v, o of attention, gate, up, down of the feed-forward part. Groups become the variant's one by one; a "
    "part is the mean over forward and backward order.",
)
def group_contributions(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of cells, with groups in the place of tasks; the scale is symmetric around zero."""
    rows = picking.chosen(run, options, run.group_contributions())
    means = rows.groupby(["variant", "group", "layer"], sort=False)["final_share"].mean()
    cells = picking.named_layers(run, means.rename(CONTRIBUTED).reset_index()).rename(
        columns={"group": "task"}
    )
    shades, peak = _shares(cells[[CONTRIBUTED]], options.dark), words.peak_share(cells, CONTRIBUTED)
    figure = _task_cells(run, cells, CONTRIBUTED, shades, dark=options.dark)
    return Drawn(
        figure.update_yaxes(title_text="module group"),
        alt=f"Heatmap of signed shares of the final drift by module group and layer. {peak}",
        data=cells.rename(columns={"task": "module group"}),
        notes=(f"Mean over {words.counted(rows['task'].nunique(), 'task')}.", *words.overlap_notes(run)),
    )


_MEASURES = {
    "objective ratio": ("objective after / before (1: unchanged)", 1.0),
    "weight change": ("change of the weights (relative norm)", 0.0),
    "upstream share": ("upstream repair that held-out samples supported (share)", 1.0),
}
"""Title and least end of the scale of what panels of the calibration log show."""
_NAMES = {
    **{"objective_before": "objective before", "objective_after": "objective after"},
    **{"weight_change": "weight change", "condition_estimate": "condition"},
    **{"lam": "ridge", "upstream_ridge": "upstream ridge", "upstream_share": "upstream share"},
}


def _rows(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """The log of the chosen calibrations, with each objective's ratio; null where there was nothing to lower."""
    # A calibration serves all tasks, but a task that is not there is a mistake.
    picking.chosen_tasks(run, options)
    chosen, rows = picking.chosen_variants(run, options), run.calibration()
    rows = rows[rows["name"].astype(str).map(calibrated).isin(chosen)]
    before = rows["objective_before"].astype(float)
    ratio = rows["objective_after"].astype(float) / before.where(before > 0)
    sites = rows["site"].astype(str)
    inside = [site[len(block) + 1 :] if (block := block_of(run, site)) else site for site in sites]
    return rows.assign(**{"objective ratio": ratio, "site in block": inside}).reset_index(drop=True)


@chart(
    "calibration-log",
    title="What the calibration did",
    section="calibration",
    rank=10,
    presets=("standard", "calibration"),
    needs=("calibration", ("objective_before", "weight_change")),
    rows=_rows,
    caption="For all calibrated sites, layers across and modules down: the objective after calibration against before, "
    "and the norm of the weight change against that of the weights, one number per site over the calibration samples; "
    "of residual calibrations also how much repair of what earlier modules left the data supported.",
    hint="A ratio near 1 means that the site could do little; a large weight change with a ratio near 1 is effort "
    "without effect. Objectives are those of the calibration samples and of one site at a time: what the calibration "
    "does to the model is in the drift charts.",
)
def calibration_log(run: DriftRun, options: ChartOptions) -> Drawn:
    """One row of panels per measure and calibration."""
    rows = _rows(run, options).rename(columns=_NAMES)
    sites = list(rows["site in block"].unique())
    rows = rows.assign(text=[_hover(run, row) for row in rows.to_dict("records")])
    cells, scales = [], []
    for measure, (title, least) in _MEASURES.items():
        if measure not in rows or not rows[measure].notna().any():
            continue
        top = max(least, rows[measure].astype(float).max()) or 1.0
        colours = theme.palette(options.dark).sequential
        scales.append(Scale(title, 0.0, top, colours, lambda value: f"{value:.2g}", theme.NUMBER))
        for name, log in rows.groupby("name", sort=False):
            table = log.pivot(index="site in block", columns="layer", values=[measure, "text"]).reindex(sites)
            texts, above = table["text"].fillna(""), f"{words.label(str(name))}: {title}"
            cells.append(Cells(above, table[measure], texts, f"{title} ", scale=len(scales) - 1))
    columns = ["name", "layer", "site", "kind", *_NAMES.values(), "objective ratio"]
    samples = {
        name: info.samples.values()
        for name in rows["name"].unique()
        if (info := run.manifest.calibrations.get(name)) and info.samples
    }
    return Drawn(
        draw_cells(run, cells, scales, y_title="site", dark=options.dark),
        alt=f"Calibration log. {_in_words(rows)}.",
        data=rows[[name for name in columns if name in rows]],
        notes=(
            f"{words.counted(len(rows), 'site')} calibrated.",
            *(f"{name}: {words.ranged(of, 'calibration sample')} per task." for name, of in samples.items()),
        ),
    )


def _hover(run: DriftRun, row: dict[Any, Any]) -> str:
    named = words.literal(f"{run.layer_name(row['layer'])}: {row['site']}")
    measured = [name for name in _NAMES.values() if not pd.isna(row.get(name))]
    return "<br>".join([named, *(f"{name} {number(float(str(row[name])))}" for name in measured)])


def _in_words(rows: pd.DataFrame) -> str:
    parts, ratio = [], "objective ratio"
    for name, part in rows[rows[ratio].notna()].groupby("name", sort=False):
        ends = words.span(part, ratio, lambda row: f"{number(row[ratio])} ({row['site']})")
        parts.append(f"{name}: objective after against before from {ends}")
    return "; ".join(parts) or "No objective was measured"
