"""The heat map of contributions: tasks down, layers across, one panel per variant on one colour scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from driftlens.findings.reading import signs
from driftlens.runs.run import DriftRun
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.layer_curves import of_layers

CONTRIBUTED, REST = "share of final drift", "remainder"
_LOW, _HIGH = f"{CONTRIBUTED} low", f"{CONTRIBUTED} high"
_TITLE = "share of final drift (%)"
_NAMES = {
    "final_share": CONTRIBUTED,
    "final_share_low": _LOW,
    "final_share_high": _HIGH,
    "remainder_share": REST,
}
_ROW, _LEAST = 26, 72
"""Pixels: of a row of cells, and of a panel."""
_BAR_BELOW = 66
"""Pixels of a colour bar below the panels of a narrow window, with its title and numbers."""


@dataclass(frozen=True)
class _Cells:
    """One panel: a row of shares per task, a column per layer and one for the remainder."""

    title: str
    shares: pd.DataFrame
    intervals: pd.DataFrame


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
    rows = picking.layer_rows(run, options).rename(columns=_NAMES)
    rows = rows[rows[CONTRIBUTED].notna().groupby(rows["variant"]).transform("any")]
    ends = [name for name in (_LOW, _HIGH) if rows[name].notna().any()]
    figure = _draw(run, _panels(run, rows), list(dict.fromkeys(rows["task"])), dark=options.dark)
    alt = f"Heatmap of signed shares of the final drift by task and layer. {words.peak_share(rows, CONTRIBUTED)}"
    notes = words.gap_notes(run, rows, CONTRIBUTED)
    return of_layers(run, figure, rows, CONTRIBUTED, *ends, REST, alt=alt, notes=notes)


def _panels(run: DriftRun, rows: pd.DataFrame) -> list[_Cells]:
    # Layers without rows are gaps too: left out, their neighbours' cells would grow over them.
    layers = [layer.index for layer in run.manifest.layers]
    tasks, key = list(dict.fromkeys(rows["task"])), ["variant", "task"]
    rows = rows.assign(interval=theme.interval_texts(rows, _LOW, _HIGH))
    wide = rows.pivot(index=key, columns="layer", values=[CONTRIBUTED, "interval"])
    rest = rows.groupby(key)[REST].max()
    cells = []
    for variant in rows["variant"].unique():
        table = wide.loc[variant].reindex(tasks)
        shares = table[CONTRIBUTED].reindex(columns=layers)
        shares[layers[-1] + 1] = rest.loc[variant]
        intervals = table["interval"].fillna("").reindex(columns=[*shares], fill_value="")
        cells.append(_Cells(words.shown(str(variant)), shares, intervals))
    return cells


def _draw(run: DriftRun, cells: list[_Cells], tasks: list[str], *, dark: bool) -> go.Figure:
    """The panels below one another, with one colour bar."""
    grid = panels.panel_grid(
        [panel.title for panel in cells],
        x_title=panels.layer_title(run),
        y_titles=["task"],
        columns=1,
        height=max(_ROW * len(tasks) + 8, _LEAST),
        dark=dark,
    )
    places = [words.literal(run.layer_name(layer.index)) for layer in run.manifest.layers]
    texts = [[f"{words.literal(task)}, {place}" for place in (*places, REST)] for task in tasks]
    highest = max(float(np.nanmax(np.abs(panel.shares.to_numpy(dtype=float)))) for panel in cells)
    for index, panel in enumerate(cells):
        coloured = theme.heatmap(
            x=[*panel.shares.columns],
            y=list(range(len(tasks))),
            z=panel.shares.to_numpy(dtype=float),
            xgap=1,
            ygap=1,
            hoverongaps=False,
            coloraxis="coloraxis",
            text=texts,
            hovertext=panel.intervals.to_numpy().tolist(),
            hovertemplate=f"%{{text}}<br>%{{z:{theme.SHARE}}}%{{hovertext}}<extra></extra>",
        )
        grid.add(index, coloured, _numbers(coloured, highest, dark=dark))
    grid.add_lines("x", *panels.borders(run.layers()))
    is_narrow = panels.is_narrow()
    names = words.labels(tasks, words.LONGEST_OF_TWO if is_narrow else words.LONGEST)
    ticks = {"tickvals": list(range(len(names))), "ticktext": names, "showgrid": False}
    first_on_top = {"range": [len(names) - 0.5, -0.5]}
    grid.set_axes(x={**panels.layer_axis(run, "rest"), "showgrid": False}, y={**ticks, **first_on_top})
    # Numbers that don't fit into their cell are left out; hovering tells.
    grid.lay_out(
        uniformtext={"minsize": theme.SMALL - 2, "mode": "hide"},
        bargap=0,
        plot_bgcolor=theme.palette(dark).gap,
        margin=panels.room_beside(names),
    )
    bar = theme.colour_bar(title={"text": _TITLE, "side": "right"}, tickformat=theme.SHARE)
    if is_narrow:
        height, margin = grid.layout["height"], grid.layout["margin"]
        bar |= {"title": {"text": _TITLE, "side": "top"}, "orientation": "h"}
        # Measured from the container, a low chart would have no room left for its cells.
        inner = height - margin["t"] - margin["b"]
        bar |= {"y": -margin["b"] / inner, "yanchor": "top"}
        grid.lay_out(height=height + _BAR_BELOW, margin={"r": 12, "b": margin["b"] + _BAR_BELOW})
    ends = {"cmin": -highest, "cmax": highest, "colorscale": theme.palette(dark).diverging}
    grid.lay_out(coloraxis={**ends, "colorbar": bar})
    return grid.figure


def _numbers(drawn: theme.Trace, highest: float, *, dark: bool) -> theme.Trace:
    """The numbers in the cells, on unseen bars: a heatmap's own have one colour and run over narrow cells."""
    extent = 2 * highest or 1.0
    places = np.argwhere(~np.isnan(drawn["z"]))
    values = [float(drawn["z"][row, across]) for row, across in places]
    colours = theme.palette(dark).diverging
    behind = [theme.shade(colours, (value + highest) / extent) for value in values]
    return theme.bar(
        x=[drawn["x"][across] for _, across in places],
        base=[float(row) - 0.5 for row, _ in places],
        y=[1.0] * len(values),
        width=1,
        marker={"color": "rgba(0, 0, 0, 0)", "line_width": 0},
        text=[signs(f"{round(value, 2) + 0.0:.0%}") for value in values],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"size": theme.SMALL - 1, "color": [theme.readable(colour) for colour in behind]},
        hoverinfo="skip",
        showlegend=False,
    )
