"""What the final drift is made of: each layer's signed share, stacked, and the remainder that no layer accounts for."""

from __future__ import annotations

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import last_layer, layer_axis, layer_places, room_beside
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.layer_curves import layer_data
from driftlens_reports.charts.marks import Trace, bar, colour_bar, scatter
from driftlens_reports.charts.panels import panel_grid, reference_post
from driftlens_reports.charts.picking import layer_rows
from driftlens_reports.charts.theme import SHARE, SMALL, TICK_SHARE, palette, readable, scale, shade
from driftlens_reports.charts.words import label, literal, peak_share, sample_notes, shown, themed

_COLUMN = "share of final drift"
_BAR, _LEAST = 30, 70


@chart(
    "contributions",
    title="Contributions to the final drift",
    section="contributions",
    rank=10,
    needs=("layers", ("final_share",)),
    caption="The final drift as a stack of what each layer's local mismatch ends up as, signed projections on the "
    "final drift and ratios of sums over diagnosis samples without a band; the hatched bar is the remainder.",
    hint="Segments to the right make the final drift, segments to the left of zero work against it; with the remainder "
    "they sum to 100 %, marked by a line. Shares of different variants refer to different drifts: a larger share of "
    "a smaller drift may be less in feature units.",
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """A panel per task with one stack per variant; all panels have one x axis range."""
    rows = stacked(layer_rows(run, options))
    tasks, variants = list(dict.fromkeys(rows["task"])), list(dict.fromkeys(rows["variant"]))
    grid = panel_grid(
        [label(task) for task in tasks],
        x_title="share of final drift (%)",
        y_titles=["variant (name)"],
        height=max(_BAR * len(variants) + 12, _LEAST),
        **themed(run, "contributions", options),
    )
    layers, remainders = rows[rows["role"] != "remainder"], rows[rows["role"] == "remainder"]
    for at, task in enumerate(tasks):
        grid.add(at, _layers(run, layers[layers["task"] == task], variants, options.dark))
        of_task = remainders[remainders["task"] == task]
        grid.add(at, _remainders(of_task, variants, options.dark, legend=at == 0))
    for end in (0.0, 1.0):
        reference_post(grid, end, dark=options.dark)
    titles = [shown(variant) for variant in variants]
    rows_of_bars = {"autorangeoptions": {"include": [-0.5, len(variants) - 0.5]}, "autorange": "reversed"}
    grid.set_axes(
        x={"tickformat": TICK_SHARE, "autorangeoptions": {"include": [0.0, 1.0]}},
        y={"tickvals": list(range(len(titles))), "ticktext": titles, **rows_of_bars, "showgrid": False},
    )
    grid.add(0, _depth(run, options.dark))
    # Numbers of segments that are too narrow for one size are left out; hovering tells.
    written = {"minsize": SMALL - 2, "mode": "hide"}
    grid.figure.update_layout(barmode="overlay", uniformtext=written, margin=room_beside(titles))
    return Drawn(
        grid.figure,
        alt=f"Stacked signed shares of the final drift by layer. {peak_share(layers, _COLUMN)}",
        data=layer_data(rows, _COLUMN, "start"),
        notes=tuple(sample_notes(run, rows)),
    )


def stacked(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a share, and where their segments start: positive ones go right from zero, negative ones left.

    The remainder is a row of its own behind the head, with role `remainder` and no layer.

    Args:
        rows: rows of the layer table, by task, variant and layer.
    """
    rows = rows.rename(columns={"final_share": _COLUMN})
    stacks = [_stack(part) for _, part in rows.groupby(["task", "variant"], sort=False)]
    return pd.concat(stacks, ignore_index=True)


def _stack(rows: pd.DataFrame) -> pd.DataFrame:
    heads = rows[rows["remainder_share"].notna()]
    remainder = heads.assign(
        **{_COLUMN: heads["remainder_share"], "role": "remainder", "path": "", "layer": pd.NA}
    )
    segments = pd.concat(
        [part for part in (rows[rows[_COLUMN].notna()], remainder) if len(part)] or [remainder]
    )
    values = segments[_COLUMN].astype(float)
    return segments.assign(start=values.groupby(values < 0).cumsum() - values)


def _layers(run: DriftRun, rows: pd.DataFrame, variants: list[str], dark: bool) -> Trace:
    """One segment per layer and variant, coloured by depth."""
    # Colours are worked out here: plotly can't choose readable text on those of a colour axis.
    colours = [shade(palette(dark).sequential, layer / last_layer(run)) for layer in rows["layer"]]
    return _segments(rows, variants, dark).update(
        marker_color=colours,
        insidetextfont_color=[readable(colour) for colour in colours],
        text=rows["layer"].astype(str).tolist(),
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        customdata=layer_places(rows),
        showlegend=False,
    )


def _remainders(rows: pd.DataFrame, variants: list[str], dark: bool, *, legend: bool) -> Trace:
    """The hatched bar of each variant."""
    colours = palette(dark)
    hatch = {"shape": "x", "fgcolor": colours.ink, "bgcolor": colours.surface, "size": 5, "solidity": 0.4}
    return _segments(rows, variants, dark).update(
        name="remainder",
        legendgroup="remainder",
        marker_pattern=hatch,
        customdata=["remainder"] * len(rows),
        showlegend=legend,
    )


def _segments(rows: pd.DataFrame, variants: list[str], dark: bool) -> Trace:
    names = [
        f"{literal(str(task))}, {shown(variant)}"
        for task, variant in zip(rows["task"], rows["variant"], strict=True)
    ]
    return bar(
        orientation="h",
        x=rows[_COLUMN].astype(float).tolist(),
        base=rows["start"].tolist(),
        y=[variants.index(variant) for variant in rows["variant"]],
        width=0.7,
        marker_line={"color": palette(dark).quiet, "width": 0.5},
        hovertext=names,
        hovertemplate=f"%{{hovertext}}<br>%{{customdata}}<br>share %{{value:{SHARE}}}<extra></extra>",
    )


def _depth(run: DriftRun, dark: bool) -> Trace:
    """Nothing but the colour bar; 0 on it keeps the stem apart from the background."""
    beside = colour_bar(
        title={"text": "layer (index)", "side": "right"}, tickvals=layer_axis(run)["tickvals"]
    )
    marker = {
        **{"color": [0], "cmin": 0, "cmax": last_layer(run), "showscale": True},
        **{"colorscale": scale(palette(dark).sequential), "colorbar": beside},
    }
    return scatter(x=[None], y=[None], mode="markers", showlegend=False, marker=marker)
