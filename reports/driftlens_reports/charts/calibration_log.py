"""What a calibration did to every site: how far its objective fell, and how far its weights moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import calibrated
from driftlens_reports.charts.axes import layer_axis, layer_title, room_beside
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.module_groups import block_of
from driftlens_reports.charts.picking import absent, chosen_tasks, chosen_variants
from driftlens_reports.charts.theme import NUMBER, SIZE, SMALL, TICK_NUMBER, apply_theme, palette, scale
from driftlens_reports.charts.words import counted, data_key, joined, label, literal, ranged
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


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    rows = _rows(run, options)
    if rows[["objective ratio", "weight change"]].notna().any().any():
        return None
    return absent("calibration", ["objective_before", "weight_change"], "driftlens calibrate RUN --name NAME")


@chart(
    "calibration-log",
    title="What the calibration did",
    section="causes",
    caption="For all calibrated sites, layers across and modules down: the objective after calibration against before, "
    "and the norm of the weight change against that of the weights, one number per site over the calibration samples.",
    hint="A ratio near 1 means that the site could do little; a large weight change with a ratio near 1 is effort "
    "without effect. Objectives are those of the calibration samples and of one site at a time: what the calibration "
    "does to the model is in the drift charts.",
    missing=_missing,
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
    apply_theme(
        figure,
        dark=options.dark,
        key=data_key(run, "calibration-log", options),
        height=inner + _TOP + _BOTTOM,
    )
    _finish(figure, run, rows, sites, dark=options.dark)
    kept = ["name", "layer", "site", "kind", "lam", *_NAMES.values(), "objective ratio"]
    return Drawn(
        figure,
        alt=f"Calibration log. {_in_words(rows)}.",
        data=rows[kept],
        notes=(f"{counted(len(rows), 'site')} calibrated.", *_sample_notes(run, names)),
    )


def _cells(rows: pd.DataFrame, measure: _Measure, sites: list[str]) -> go.Heatmap:
    import plotly.graph_objects as go

    layers = sorted(int(layer) for layer in rows["layer"].unique())
    places = {"index": "site in block", "columns": "layer"}
    values = rows.pivot(**places, values=measure.column).reindex(index=sites, columns=layers)
    texts = rows.assign(text=[_hover(row) for row in rows.to_dict("records")])
    hovers = texts.pivot(**places, values="text").reindex(index=sites, columns=layers)
    return go.Heatmap(
        x=layers,
        y=list(range(len(sites))),
        z=values.to_numpy(dtype=float),
        coloraxis=measure.colours,
        xgap=1,
        ygap=1,
        hoverongaps=False,
        text=hovers.fillna("").to_numpy().tolist(),
        texttemplate="%{z:.2~g}" if len(layers) <= _MOST_WRITTEN else None,
        textfont={"size": SMALL - 1},
        hovertemplate=f"%{{text}}<br>{measure.title} %{{z:{NUMBER}}}<extra></extra>",
    )


def _hover(row: dict[str, object]) -> str:
    values = [f"{name} {number(float(str(row[name])))}" for name in _NAMES.values() if not pd.isna(row[name])]
    return f"layer {row['layer']}: {literal(str(row['site']))}<br>" + "<br>".join(values)


def _finish(figure: go.Figure, run: DriftRun, rows: pd.DataFrame, sites: list[str], *, dark: bool) -> None:
    colours, titles = palette(dark), [label(site) for site in sites]
    figure.update_xaxes(**layer_axis(run), showgrid=False)
    figure.update_xaxes(title_text=layer_title(run), row=len(figure.data), col=1)
    figure.update_yaxes(
        tickvals=list(range(len(sites))),
        ticktext=titles,
        range=[len(sites) - 0.5, -0.5],
        showgrid=False,
        title_text="site (name)",
    )
    figure.update_annotations(font={"size": SIZE, "color": colours.ink})
    figure.update_layout(plot_bgcolor=colours.gap, margin={"t": _TOP, **room_beside(titles)})
    for at, measure in enumerate(_MEASURES):
        top = rows[measure.column].astype(float).max()
        figure.update_layout(
            {
                measure.colours: {
                    "cmin": 0,
                    "cmax": max(measure.least_top, top) or 1.0,
                    "colorscale": scale(colours.sequential),
                    "colorbar": {
                        "len": 0.46,
                        "y": 0.77 - 0.54 * at,
                        "thickness": 14,
                        "outlinewidth": 0,
                        "tickformat": TICK_NUMBER,
                    },
                }
            }
        )


def _in_words(rows: pd.DataFrame) -> str:
    parts = []
    for name, part in rows.groupby("name", sort=False):
        ratio = part["objective ratio"].astype(float)
        if ratio.notna().any():
            low, high = part.loc[ratio.idxmin()], part.loc[ratio.idxmax()]
            parts.append(
                f"{name}: objective after against before from {number(low['objective ratio'])} ({low['site']}) to "
                f"{number(high['objective ratio'])} ({high['site']})"
            )
    return joined(parts) or "No objective was measured"


def _sample_notes(run: DriftRun, names: list[str]) -> list[str]:
    """How many calibration samples stand behind each calibration, where the run says so."""
    notes = []
    for name in names:
        info = run.manifest.calibrations.get(name)
        if info is not None and info.samples:
            notes.append(f"{name}: {ranged(info.samples.values(), 'calibration sample')} per task.")
    return notes
