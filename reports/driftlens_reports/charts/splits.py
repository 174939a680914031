"""Two exact splits of the final drift by layer side by side: carried by Jacobians, and by swapping prefixes."""

from __future__ import annotations

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_places, layer_title
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.layer_curves import layer_data, parts, task_titles
from driftlens_reports.charts.marks import Trace, bar, gapped
from driftlens_reports.charts.panels import MOST_COLUMNS, panel_grid, reference_line
from driftlens_reports.charts.picking import layer_rows
from driftlens_reports.charts.theme import SHARE, TICK_SHARE, Look, faded, palette
from driftlens_reports.charts.words import literal, peak_share, sample_notes, shown, themed
from driftlens_reports.wording import percent

_CARRIED, _SWAPPED = "carried share", "swapped share"


@chart(
    "splits",
    title="Both splits of the final drift",
    section="splits",
    rank=30,
    needs=("layers", ("final_share", "prefix_share")),
    caption="Signed share of the final drift that each layer's local mismatch accounts for, ratios of sums over "
    "diagnosis samples without a band: carried to the end by Jacobians (solid), by swapping model prefixes (hatched).",
    hint="Both splits are exact, but they answer different questions, so they may differ: swapping runs each layer on "
    "other inputs. Where they agree, the blame is robust; a large gap means that the layers behind bend the "
    "drift. Carried shares and the remainder in the notes sum to 100 %, swapped shares do so alone.",
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """A row of panels per task, one per variant; all panels have one y axis range."""
    rows = layer_rows(run, options).rename(columns={"final_share": _CARRIED, "prefix_share": _SWAPPED})
    rows = rows[rows[[_CARRIED, _SWAPPED]].notna().any(axis=1).groupby(rows["variant"]).transform("any")]
    variants = list(dict.fromkeys(rows["variant"]))
    grid = panel_grid(
        task_titles(rows, [shown(variant) for variant in variants]),
        x_title=layer_title(run),
        y_titles=["share of final drift (%)"],
        columns=min(len(variants), MOST_COLUMNS),
        height=120,
        **themed(run, "splits", options),
    )
    for part in parts(run, rows, dark=options.dark):
        at = part.at * len(variants) + variants.index(part.rows["variant"].iloc[0])
        grid.add(at, *(_bars(part.rows, column, part.marks, options.dark) for column in (_CARRIED, _SWAPPED)))
    grid.add(0, *_legend(options.dark))
    reference_line(grid, 0.0, dark=options.dark)
    grid.set_axes(x=layer_axis(run), y={"tickformat": TICK_SHARE})
    grid.figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0)
    return Drawn(
        grid.figure,
        alt=f"Two splits of the final drift by layer. Carried: {peak_share(rows, _CARRIED)} "
        f"Swapped: {peak_share(rows, _SWAPPED)}",
        data=layer_data(rows, _CARRIED, _SWAPPED, "remainder_share").rename(
            columns={"remainder_share": "remainder"}
        ),
        notes=(*sample_notes(run, rows), *remainder_notes(rows)),
    )


def remainder_notes(rows: pd.DataFrame) -> list[str]:
    """How much of the final drift no layer's carried share accounts for, at most."""
    remainder = rows["remainder_share"].astype(float)
    if not remainder.notna().any():
        return []
    row = rows.loc[remainder.abs().idxmax()]
    return [f"Largest remainder: {percent(float(row['remainder_share']))} ({row['task']}, {row['variant']})."]


def _bars(rows: pd.DataFrame, column: str, marks: Look, dark: bool) -> Trace:
    return bar(
        x=rows["layer"].tolist(),
        y=gapped(rows[column].astype(float)),
        name=column,
        marker=_fill(marks.colour, column, dark),
        showlegend=False,
        legendgroup=column,
        offsetgroup=column,
        text=[f"{literal(str(rows['task'].iloc[0]))}, {place}" for place in layer_places(rows)],
        textposition="none",
        hovertemplate=f"%{{text}}<br>{column} %{{y:{SHARE}}}<extra>{shown(rows['variant'].iloc[0])}</extra>",
    )


def _fill(colour: str, column: str, dark: bool) -> dict[str, object]:
    if column == _CARRIED:
        return {"color": colour, "line": {"color": colour, "width": 1}}
    hatch = {"shape": "/", "fgcolor": colour, "bgcolor": palette(dark).surface, "size": 5, "solidity": 0.35}
    return {"color": faded(colour, 1), "pattern": hatch, "line": {"color": colour, "width": 1}}


def _legend(dark: bool) -> list[Trace]:
    """Entries in the colour of text: the marks mean the same whatever colour the variant has."""
    names = {_CARRIED: "carried by Jacobians", _SWAPPED: "swapping prefixes"}
    fills = {column: _fill(palette(dark).quiet, column, dark) for column in names}
    groups = {column: {"legendgroup": column, "offsetgroup": column} for column in names}
    return [bar(x=[None], y=[None], name=names[at], marker=fills[at], **groups[at]) for at in names]
