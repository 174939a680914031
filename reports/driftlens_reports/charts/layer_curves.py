"""Curves over layers: one panel per task, one line per variant, a band around it, a gap where nothing was measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from driftlens.findings.reading import error
from driftlens.runs.run import DriftRun
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

_AROUND_ZERO = {"tickformat": theme.TICK_NUMBER, "autorangeoptions": {"include": [0.0]}}
_ENDS = "Whiskers: 95 % intervals over the samples, which were drawn again (bootstrap)."
_LONE = 0.2
"""Half the width, in layers, of a band with no neighbour."""


@dataclass(frozen=True)
class Curves:
    """What a panel shows of a layer table; `band`, `error`: columns of ends; `beside`: of open markers, in words."""

    column: str
    title: str
    axis: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    number: str = theme.NUMBER
    band: tuple[str, str] | None = None
    error: Sequence[str] = ()
    beside: tuple[str, str] | None = None
    line: float | None = None

    def traces(self, rows: pd.DataFrame, brush: theme.Brush, *, opacity: float) -> Iterator[theme.Trace]:
        """What is drawn of one variant on one task; its legend entry shows and hides all of it."""
        if rows.empty:
            return
        rows = panels.parted(rows)
        task, variant, layers = rows["task"].iloc[0], str(rows["variant"].iloc[0]), rows["layer"]
        if self.band:
            yield band(rows, *self.band, brush, opacity=opacity)
        ends = (rows[self.error[0]], rows[self.error[1]]) if self.error else None
        hover = {"text": [words.literal(f"{task}, {where}") for where in rows["where"]]}
        template = f"%{{text}}<br>{self.column} %{{y:{self.number}}}"
        yield brush.line(variant, layers, rows[self.column], ends, hovertemplate=template, **hover)
        if self.beside:
            column, what = self.beside
            style, template = brush.look(variant), f"%{{text}}<br>{what} %{{y:{theme.NUMBER}}}"
            marker = {"color": style.colour, "symbol": f"{style.symbol}-open", "size": 7}
            hover |= {"mode": "markers", "marker": marker}
            yield brush.line(variant, layers, rows[column], hovertemplate=template, **hover)


def draw_curves(
    run: DriftRun,
    rows: pd.DataFrame,
    *kinds: Curves,
    dark: bool,
    variants: Sequence[str] = (),
    below: Sequence[theme.Trace] = (),
    **settings: Any,
) -> go.Figure:
    """A row of panels per task, one of each kind; `below`: what lies below the curves of the first panel."""
    tasks, shown = list(dict.fromkeys(rows["task"])), list(dict.fromkeys(rows["variant"]))
    rows = picking.named_layers(run, rows)
    placed: dict[str, Any] = {"titles": words.task_titles(tasks, [kind.name for kind in kinds])}
    if len(kinds) > 1:
        placed |= {"columns": len(kinds), "height": 150}
    grid = panels.panel_grid(
        **{**placed, **settings},
        x_title=panels.layer_title(run),
        y_titles=[kind.title for kind in kinds],
        legend=[words.shown(variant) for variant in shown],
        dark=dark,
    )
    opacity = min(0.14, 0.5 / max(1, len(shown)))  # the more bands lie over one another, the less
    brush = theme.Brush(variants or run.variants, dark)
    grid.add(0, *below)
    for (task, _), line in rows.groupby(["task", "variant"], sort=False):
        for column, kind in enumerate(kinds):
            grid.add(tasks.index(task) * len(kinds) + column, *kind.traces(line, brush, opacity=opacity))
    grid.add_lines("x", *panels.borders(rows))
    for column, kind in enumerate(kinds):
        if kind.line is not None:
            grid.add_lines("y", kind.line, column=column if len(kinds) > 1 else None)
    grid.set_axes(x=panels.layer_axis(run), y=[kind.axis for kind in kinds])
    return grid.figure


def band(rows: pd.DataFrame, low: str, high: str, brush: theme.Brush, *, opacity: float) -> theme.Trace:
    """The area between two columns; it stops where either has no number, and hides with its curve."""
    variant = str(rows["variant"].iloc[0])
    x: list[float | None] = []
    y: list[float | None] = []
    values = rows[["layer", low, high]].astype(float).to_numpy().tolist()
    for is_gap, run in itertools.groupby(values, lambda row: any(map(math.isnan, row))):
        if is_gap:
            continue
        layers, lows, highs = map(list, zip(*run, strict=True))
        if len(layers) == 1:
            layers, lows, highs = [layers[0] - _LONE, layers[0] + _LONE], lows * 2, highs * 2
        x += [*layers, *reversed(layers), None]
        y += [*lows, *reversed(highs), None]
    return theme.scatter(
        x=x[:-1],
        y=y[:-1],
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=theme.faded(brush.look(variant).colour, opacity),
        legendgroup=variant,
        showlegend=False,
        hoverinfo="skip",
    )


def of_layers(
    run: DriftRun, figure: go.Figure, rows: pd.DataFrame, *columns: str, alt: str, notes: Sequence[str] = ()
) -> Drawn:
    """A chart of the layer table: its rows with what names them, n, and these columns; how many samples they are of."""
    data = rows[["task", "variant", "layer", "role", "path", "n", *columns]]
    return Drawn(figure, alt, data, (*words.sample_notes(run, rows), *notes))


_BANDS = {
    "q10-q90": ("10 % quantile", "90 % quantile"),
    "q25-q75": ("25 % quantile", "75 % quantile"),
    "std": ("mean - std", "mean + std"),
}
_DRIFTS = {
    **{"drift_l2_mean": "mean drift", "drift_rel": "relative drift"},
    **{f"drift_l2_q{level}": f"{level} % quantile" for level in (10, 25, 75, 90)},
}


@chart(
    "layer-drift",
    title="Drift by layer",
    section="drift",
    rank=10,
    presets=("summary", "standard", "calibration"),
    needs=("layers", ("drift_l2_mean",)),
    caption="Drift from the task's expert leaving each layer: mean over diagnosis samples with a band over them, one "
    "panel per task.",
    hint="Compare lines within a panel: calibration helps where its line lies below that of merged. "
    "Layers differ in feature scale, so a rise along the axis need not mean that a layer is bad; see the relative "
    "drift, and amplification for what layers do to the drift that reaches them (full state).",
)
def layer_drift(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of curves; all panels have one y axis range, so that tasks compare."""
    rows = picking.layer_rows(run, options).rename(columns=_DRIFTS)
    spread = rows["drift_l2_std"].astype(float)
    ends = {"mean - std": rows["mean drift"] - spread, "mean + std": rows["mean drift"] + spread}
    rows = rows.assign(**ends)
    source, what = "drift_l2_mean", "mean L2 drift"
    band = _BANDS.get(options.band)
    note = f"Band: {picking.SPREADS[options.band]}." if band else ""
    if options.relative:
        source, what = "drift_rel", "drift / expert norm"
        band, note = None, "Relative drift is one ratio of sums over the samples; it has no band."
    title, axis = panels.titled(what, "layers", source), panels.value_axis(options)
    kind = Curves(_DRIFTS[source], title, axis, band=band)
    figure = draw_curves(run, rows, kind, dark=options.dark)
    alt = f"{what[0].upper()}{what[1:]} by layer. {words.final_sentence(rows, kind.column)}"
    return of_layers(run, figure, rows, kind.column, *(band or ()), alt=alt, notes=[note] if note else [])


_PARTS = {
    "mismatch": ("mismatch_l2_mean", "|m|"),
    "propagation": ("propagation_l2_mean", "|p|"),
    "cross term": ("cross_term", "2⟨m, p⟩ / |e|²"),
}


@chart(
    "decomposition",
    title="Mismatch and propagation",
    section="mismatch",
    rank=10,
    presets=("standard",),
    needs=("layers", ("mismatch_l2_mean", "propagation_l2_mean", "cross_term")),
    caption="What each layer adds to the drift by itself (local mismatch m) and passes on from below (propagation p), "
    "both mean norms over diagnosis samples without a band, and the cross term, a ratio of sums over them.",
    hint="Where m is large, the layer's own weights are at fault; where p is, it hands on what earlier layers broke. A "
    "positive cross term means that the two point the same way, a negative one that they cancel in part. Norms "
    "of m and p do not add up to the norm of the drift; contributions show parts that do.",
)
def decomposition(run: DriftRun, options: ChartOptions) -> Drawn:
    """A row of three panels per task; both norms have one y axis range, the cross term another."""
    names = {source: name for name, (source, _) in _PARTS.items()}
    rows = picking.layer_rows(run, options).rename(columns=names)
    norms = panels.value_axis(options)
    axes = [norms, {**norms, "matches": "y"}, _AROUND_ZERO]  # norms in one unit compare
    kinds = [
        Curves(
            name,
            panels.titled(what, "layers", source),
            axis,
            name,
            line=0.0 if axis is _AROUND_ZERO else None,
        )
        for (name, (source, what)), axis in zip(_PARTS.items(), axes, strict=True)
    ]
    figure = draw_curves(run, rows, *kinds, dark=options.dark)
    alt = "Local mismatch, propagation and cross term by layer. "
    alt += f"Mismatch: {words.peak_sentence(rows, 'mismatch')} Propagation: {words.peak_sentence(rows, 'propagation')}"
    return of_layers(run, figure, rows, "reference", *_PARTS, alt=alt)


@chart(
    "amplification",
    title="Amplification",
    section="amplification",
    rank=20,
    presets=("standard",),
    needs=("layers", ("amplification",)),
    caption="Norm of the drift a layer passes on against that of the drift it inherits, a ratio of sums over diagnosis "
    "samples; band: relative error of the path-averaged Jacobian; open markers: its mean gain on random directions.",
    hint="Above 1 a layer enlarges inherited drift, below 1 it damps it. Far above the open markers, it enlarges the "
    "drift's own direction more than a random one. The stem inherits nothing and has no value. A visible "
    "band means that the Jacobian does not explain what the layer does; then trust the other charts of causes.",
)
def amplification(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of curves with a line at 1; all panels have one y axis range."""
    names = {"random_gain_mean": "random gain", "jacobian_error": "Jacobian error"}
    ends = tuple(f"amplification {end}" for end in ("low", "high"))
    called = {
        **names,
        **{name.replace(" ", "_"): name for name in ends},
        "jacobian_samples": "jacobian samples",
    }
    rows = picking.layer_rows(run, options).rename(columns=called)
    center, spread = rows["amplification"].astype(float), rows["Jacobian error"].astype(float)
    rows = rows.assign(lower=center * (1 - spread), upper=center * (1 + spread))
    ends = ends if rows[list(ends)].notna().any(axis=None) else ()
    kind = Curves(
        "amplification",
        error=ends,
        title=panels.titled("amplification", "layers", "amplification"),
        axis=panels.value_axis(options, zero=False, include=[1.0]),
        band=("lower", "upper"),
        beside=("random gain", "mean gain on random directions"),
        line=1.0,
    )
    note = "Without Jacobians there is no band and no random gain."
    if spread.notna().any():
        note = f"Largest Jacobian error {error(float(spread.max()))}, relative to the propagation."
    figure = draw_curves(run, rows, kind, dark=options.dark)
    columns = ("amplification", *ends, "lower", "upper", *names.values(), "jacobian samples")
    note = f"{_ENDS} {note}" if ends else note
    alt = f"Amplification by layer, with a line at 1. {words.peak_sentence(rows, 'amplification')}"
    return of_layers(run, figure, rows, *columns, alt=alt, notes=[note])
