"""What a calibration did to every site: how far its objective fell, and how far its weights moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import calibrated
from driftlens_reports.charts.alignment import block_of
from driftlens_reports.charts.axes import layer_axis, layer_title, room_beside
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.marks import Trace, cell_rows, cells, colour_bar, ink
from driftlens_reports.charts.picking import chosen_tasks, chosen_variants
from driftlens_reports.charts.theme import NUMBER, SIZE, SMALL, TICK_NUMBER, apply_theme, palette, scale
from driftlens_reports.charts.words import counted, joined, label, literal, ranged, span, themed
from driftlens_reports.wording import number

if TYPE_CHECKING:
    import plotly.graph_objects as go

_ROW, _GAP, _TOP, _BOTTOM = 24, 46, 34, 56
_MOST_WRITTEN = 14
"""Layers beyond which cells are too narrow for their number."""


@dataclass(frozen=True)
class _Measure:
    column: str
    title: str
    colours: str
    least_top: float
    """The scale reaches at least this far."""


_MEASURES = (
    _Measure("objective ratio", "objective after / before (1: unchanged)", "coloraxis", 1.0),
    _Measure("weight change", "change of the weights (relative norm)", "coloraxis2", 0.0),
)
_NAMES = {
    **{"objective_before": "objective before", "objective_after": "objective after"},
    **{"weight_change": "weight change", "condition_estimate": "condition"},
}


def _rows(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """The log of the chosen calibrations, with each objective's ratio; null where there was nothing to lower."""
    rows = run.calibration()
    chosen_tasks(run, options)  # a calibration serves all tasks, but a task that is not there is a mistake
    wanted = [
        name for name in rows["name"].unique() if calibrated(str(name)) in chosen_variants(run, options)
    ]
    rows = rows[rows["name"].isin(wanted)].rename(columns=_NAMES)
    before = rows["objective before"].astype(float)
    ratio = rows["objective after"].astype(float) / before.where(before > 0)
    sites = rows["site"].astype(str)
    inside = [site[len(block) + 1 :] if (block := block_of(run, site)) else site for site in sites]
    return rows.assign(**{"objective ratio": ratio, "site in block": inside}).reset_index(drop=True)


def _solved(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = _rows(run, options)
    return rows[rows[["objective ratio", "weight change"]].notna().any(axis=1)]


@chart(
    "calibration-log",
    title="What the calibration did",
    section="calibration",
    rank=10,
    presets=("standard", "calibration"),
    needs=("calibration", ("objective_before", "weight_change")),
    rows=_solved,
    caption="For all calibrated sites, layers across and modules down: the objective after calibration against before, "
    "and the norm of the weight change against that of the weights, one number per site over the calibration samples.",
    hint="A ratio near 1 means that the site could do little; a large weight change with a ratio near 1 is effort "
    "without effect. Objectives are those of the calibration samples and of one site at a time: what the calibration "
    "does to the model is in the drift charts.",
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Heatmaps, one row of panels per measure and calibration."""
    from plotly.subplots import make_subplots

    rows = _rows(run, options)
    names, sites = list(rows["name"].unique()), list(rows["site in block"].unique())
    panels = [(measure, name) for measure in _MEASURES for name in names]
    panel = max(_ROW * len(sites), 72)
    inner = len(panels) * panel + (len(panels) - 1) * _GAP
    figure = make_subplots(
        len(panels),
        1,
        subplot_titles=[f"{label(str(name))}: {measure.title}" for measure, name in panels],
        vertical_spacing=_GAP / inner,
        shared_xaxes=True,
    )
    for at, (measure, name) in enumerate(panels, start=1):
        figure.add_trace(_cells(rows[rows["name"] == name], measure, sites), row=at, col=1)
    apply_theme(figure, height=inner + _TOP + _BOTTOM, **themed(run, "calibration-log", options))
    _finish(figure, run, rows, sites, dark=options.dark)
    kept = ["name", "layer", "site", "kind", "lam", *_NAMES.values(), "objective ratio"]
    return Drawn(
        figure,
        alt=f"Calibration log. {_in_words(rows)}.",
        data=rows[kept],
        notes=(f"{counted(len(rows), 'site')} calibrated.", *_sample_notes(run, names)),
    )


def _cells(rows: pd.DataFrame, measure: _Measure, sites: list[str]) -> Trace:
    layers = sorted(int(layer) for layer in rows["layer"].unique())
    places = {"index": "site in block", "columns": "layer"}
    values = rows.pivot(**places, values=measure.column).reindex(index=sites, columns=layers)
    texts = rows.assign(text=[_hover(row) for row in rows.to_dict("records")])
    hovers = texts.pivot(**places, values="text").reindex(index=sites, columns=layers)
    return cells(
        values.to_numpy(dtype=float),
        layers,
        coloraxis=measure.colours,
        text=hovers.fillna("").to_numpy().tolist(),
        texttemplate="%{z:.2~g}" if len(layers) <= _MOST_WRITTEN else None,
        textfont={"size": SMALL - 1},
        hovertemplate=f"%{{text}}<br>{measure.title} %{{z:{NUMBER}}}<extra></extra>",
    )


def _hover(row: dict[str, object]) -> str:
    values = [f"{name} {number(float(str(row[name])))}" for name in _NAMES.values() if not pd.isna(row[name])]
    return f"layer {row['layer']}: {literal(str(row['site']))}<br>" + "<br>".join(values)


def _finish(figure: go.Figure, run: DriftRun, rows: pd.DataFrame, sites: list[str], *, dark: bool) -> None:
    rows_of_cells = cell_rows(sites, "site (name)")
    figure.update_xaxes(**layer_axis(run), showgrid=False)
    figure.update_xaxes(title_text=layer_title(run), row=len(figure.data), col=1)
    figure.update_yaxes(**rows_of_cells)
    figure.update_annotations(font=ink(dark=dark, size=SIZE))
    room = {"t": _TOP, **room_beside(rows_of_cells["ticktext"])}
    figure.update_layout(plot_bgcolor=palette(dark).gap, margin=room)
    for at, measure in enumerate(_MEASURES):
        top = rows[measure.column].astype(float).max()
        settings = {
            "cmin": 0,
            "cmax": max(measure.least_top, top) or 1.0,
            "colorscale": scale(palette(dark).sequential),
            "colorbar": colour_bar(len=0.46, y=0.77 - 0.54 * at, tickformat=TICK_NUMBER),
        }
        figure.update_layout({measure.colours: settings})


def _in_words(rows: pd.DataFrame) -> str:
    parts = []
    for name, part in rows.groupby("name", sort=False):
        ratio = part["objective ratio"].astype(float)
        if ratio.notna().any():
            ends = span(
                part, "objective ratio", lambda row: f"{number(row['objective ratio'])} ({row['site']})"
            )
            parts.append(f"{name}: objective after against before from {ends}")
    return joined(parts) or "No objective was measured"


def _sample_notes(run: DriftRun, names: list[str]) -> list[str]:
    """How many calibration samples stand behind each calibration, where the run says so."""
    notes = []
    for name in names:
        info = run.manifest.calibrations.get(name)
        if info is not None and info.samples:
            notes.append(f"{name}: {ranged(info.samples.values(), 'calibration sample')} per task.")
    return notes
