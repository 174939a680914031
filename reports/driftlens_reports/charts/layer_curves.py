"""Charts over layers: curves by task and variant with bands and gaps, and a heat map of contributions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from driftlens.results.formatting import error, percent, signs
from driftlens.runs.run import DriftRun
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

_AROUND_ZERO = {"tickformat": theme.TICK_NUMBER, "autorangeoptions": {"include": [0.0]}}
_ENDS = "Whiskers: 95 % bootstrap intervals over samples."
# Half the width, in layers, of a band with no neighbour.
_LONE = 0.2


@dataclass(frozen=True)
class Curves:
    """The content of a panel of curves over layers; `band` and `error` name columns of interval ends."""

    column: str
    title: str
    axis: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    number: str = theme.NUMBER
    band: Sequence[str] = ()
    error: Sequence[str] = ()
    markers: tuple[str, str] | None = None
    line: float | None = None

    def traces(self, rows: pd.DataFrame, brush: theme.Brush, *, opacity: float) -> Iterator[theme.Trace]:
        """Yield the traces of one variant on one task, which share a legend entry.

        Args:
            rows: rows of the layer table, sorted by layer.
            brush: the colours of the figure.
            opacity: of the band, in [0, 1].
        """
        if rows.empty:
            return
        rows = panels.parted(rows)
        task, variant, layers = rows["task"].iloc[0], str(rows["variant"].iloc[0]), rows["layer"]
        if self.band:
            yield band(rows, self.band[0], self.band[1], brush, opacity=opacity)
        ends = (rows[self.error[0]], rows[self.error[1]]) if self.error else None
        hover = {"text": [words.literal(f"{task}, {where}") for where in rows["where"]]}
        template = f"%{{text}}<br>{self.column} %{{y:{self.number}}}"
        yield brush.line(variant, layers, rows[self.column], ends, hovertemplate=template, **hover)
        if self.markers:
            column, meaning = self.markers
            style, template = brush.look(variant), f"%{{text}}<br>{meaning} %{{y:{theme.NUMBER}}}"
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
    """Draw a row of panels per task, one panel of each kind.

    Args:
        run: the run that the rows belong to.
        rows: rows of the layer table.
        kinds: what each panel of a row shows.
        dark: True for the dark theme.
        variants: all variants, which decide colours; those of the run if empty.
        below: traces under the curves of the first panel.
        settings: further arguments of `panel_grid`.
    """
    tasks, shown = list(dict.fromkeys(rows["task"])), list(dict.fromkeys(rows["variant"]))
    rows = picking.named_layers(run, rows)
    placed: dict[str, Any] = {"titles": [*map(words.label, tasks)]}
    if len(kinds) > 1:
        titles = [
            f"{words.label(task, words.LONGEST_OF_TWO)}: {kind.name}" for task in tasks for kind in kinds
        ]
        placed = {"titles": titles, "columns": len(kinds), "height": 150}
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
    """Return the area between two columns. It has a gap where either column has no number.

    Args:
        rows: rows of one variant and task.
        low: column of the lower end.
        high: column of the upper end.
        brush: the colours of the figure.
        opacity: of the area, in [0, 1].
    """
    variant = str(rows["variant"].iloc[0])
    x: list[float | None] = []
    y: list[float | None] = []
    values = rows[["layer", low, high]].astype(float).to_numpy().tolist()
    for is_gap, run in itertools.groupby(values, lambda row: any(map(math.isnan, row))):
        if is_gap:
            continue
        layers, lows, highs = map(list, zip(*run, strict=True))
        # A single layer has no area without some width.
        if len(layers) == 1:
            layers, lows, highs = [layers[0] - _LONE, layers[0] + _LONE], lows * 2, highs * 2
        # Forward along the low ends, back along the high ones; None separates areas.
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


def _of_layers(
    run: DriftRun, figure: go.Figure, rows: pd.DataFrame, *columns: str, alt: str, notes: Sequence[str] = ()
) -> Drawn:
    """Return a chart of the layer table with its data and notes."""
    data = rows[["task", "variant", "layer", "role", "path", "n", *columns]]
    return Drawn(figure, alt, data, (*words.sample_notes(run, rows), *notes))


_DRIFTS = {
    **{"drift_l2_mean": "mean drift", "drift_rel": "relative drift"},
    **{"drift_l2_q10": "10 % quantile", "drift_l2_q90": "90 % quantile"},
}


@chart(
    "layer-drift",
    title="Drift by layer",
    section="drift",
    rank=10,
    presets=("summary", "standard", "calibration"),
    needs=("layers", ("drift_l2_mean",)),
    caption="Drift from the task's expert after each layer: mean and band over diagnosis samples, one panel per task.",
    hint="Calibration helps where its line is below that of merged. Feature scales differ between layers, so a rise is "
    "not a fault by itself: see relative drift, and amplification for inherited drift (full state).",
)
def _layer_drift(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw panels of curves with one y range, so that tasks compare."""
    rows = picking.layer_rows(run, options).rename(columns=_DRIFTS)
    source, quantity, band = (
        "drift_l2_mean",
        "mean L2 drift",
        (_DRIFTS["drift_l2_q10"], _DRIFTS["drift_l2_q90"]),
    )
    note = "Band: 10 % to 90 % quantiles over samples."
    if options.relative:
        source, quantity, band = "drift_rel", "drift / expert norm", ()
        note = "Relative drift is a ratio of sums over samples, without a band."
    title, axis = panels.titled(quantity, "layers", source), panels.value_axis(options)
    kind = Curves(_DRIFTS[source], title, axis, band=band)
    figure = draw_curves(run, rows, kind, dark=options.dark)
    alt = f"{quantity[0].upper()}{quantity[1:]} by layer. {words.final_sentence(rows, kind.column)}"
    return _of_layers(run, figure, rows, kind.column, *band, alt=alt, notes=[note])


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
    caption="Local mismatch m (the layer's own error) and propagation p (inherited error) by layer, mean norms over "
    "diagnosis samples, and their cross term, a ratio of sums.",
    hint="Large m: the layer's own weights are at fault. Large p: it passes on earlier errors. Where the cross term is "
    "positive the two add up, where negative they cancel in part. Norms of m and p do not sum to the drift; "
    "contributions do.",
)
def _decomposition(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw three panels per task; both norms share a y range."""
    names = {source: name for name, (source, _) in _PARTS.items()}
    rows = picking.layer_rows(run, options).rename(columns=names)
    norms = panels.value_axis(options)
    axes = [norms, {**norms, "matches": "y"}, _AROUND_ZERO]  # norms in one unit compare
    kinds = [
        Curves(
            name,
            panels.titled(quantity, "layers", source),
            axis,
            name,
            line=0.0 if axis is _AROUND_ZERO else None,
        )
        for (name, (source, quantity)), axis in zip(_PARTS.items(), axes, strict=True)
    ]
    figure = draw_curves(run, rows, *kinds, dark=options.dark)
    alt = "Local mismatch, propagation and cross term by layer. "
    alt += f"Mismatch: {words.peak_sentence(rows, 'mismatch')} Propagation: {words.peak_sentence(rows, 'propagation')}"
    return _of_layers(run, figure, rows, "reference", *_PARTS, alt=alt)


@chart(
    "amplification",
    title="Amplification",
    section="amplification",
    rank=20,
    presets=("standard",),
    needs=("layers", ("amplification",)),
    caption="Norm of the propagated drift relative to the incoming drift, a ratio of sums over diagnosis samples; "
    "band: relative error of the path-averaged Jacobian; open markers: its mean gain on random directions.",
    hint="Above 1 a layer enlarges inherited drift, below 1 it damps it. Far above the open markers, it enlarges the "
    "drift's direction more than a random one. The stem inherits nothing. A visible band means that the Jacobian "
    "does not explain the layer.",
)
def _amplification(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw the amplification of inherited drift by layer, a panel per task, with a line at 1."""
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
        markers=("random gain", "mean gain on random directions"),
        line=1.0,
    )
    note = "Without Jacobians there is no band and no random gain."
    if spread.notna().any():
        note = f"Largest Jacobian error {error(float(spread.max()))}, relative to the propagation."
    figure = draw_curves(run, rows, kind, dark=options.dark)
    columns = ("amplification", *ends, "lower", "upper", *names.values(), "jacobian samples")
    note = f"{_ENDS} {note}" if ends else note
    alt = f"Amplification by layer, with a line at 1. {words.peak_sentence(rows, 'amplification')}"
    return _of_layers(run, figure, rows, *columns, alt=alt, notes=[note])


CONTRIBUTED, REST = "share of final drift", "remainder"
_SHARE_LOW, _SHARE_HIGH = f"{CONTRIBUTED} low", f"{CONTRIBUTED} high"
_SHARE_TITLE = "share of final drift (%)"
_SHARES = {
    "final_share": CONTRIBUTED,
    "final_share_low": _SHARE_LOW,
    "final_share_high": _SHARE_HIGH,
    "remainder_share": REST,
}
# Pixels: of a row of cells, and of a panel.
_ROW, _LEAST = 26, 72
# Pixels of a colour bar below the panels of a narrow window, with its title and numbers.
_BAR_BELOW = 66


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
    caption="Signed share of the final drift from each layer's local mismatch, a ratio of sums over diagnosis samples, "
    "by task and layer (last column: remainder), one panel per variant.",
    hint="Orange layers cause final drift, blue ones reduce it. Each row sums to 100 % with its remainder; a large "
    "remainder means that the quadrature of the Jacobians was too coarse.",
)
def _contributions_heatmap(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw panels of cells on a scale that is symmetric around zero."""
    rows = picking.layer_rows(run, options).rename(columns=_SHARES)
    rows = rows[rows[CONTRIBUTED].notna().groupby(rows["variant"]).transform("any")]
    ends = [name for name in (_SHARE_LOW, _SHARE_HIGH) if rows[name].notna().any()]
    figure = _draw_cells(run, _cells_of(run, rows), list(dict.fromkeys(rows["task"])), dark=options.dark)
    peaks = words.peak_sentence(rows, CONTRIBUTED, percent)
    alt = f"Heatmap of signed shares of the final drift by task and layer. {peaks}"
    notes = words.gap_notes(run, rows, CONTRIBUTED)
    return _of_layers(run, figure, rows, CONTRIBUTED, *ends, REST, alt=alt, notes=notes)


def _cells_of(run: DriftRun, rows: pd.DataFrame) -> list[_Cells]:
    # Layers without rows are gaps too: left out, their neighbours' cells would grow over them.
    layers = [layer.index for layer in run.manifest.layers]
    tasks, key = list(dict.fromkeys(rows["task"])), ["variant", "task"]
    rows = rows.assign(interval=theme.interval_texts(rows, _SHARE_LOW, _SHARE_HIGH))
    wide = rows.pivot(index=key, columns="layer", values=[CONTRIBUTED, "interval"])
    rest = rows.groupby(key)[REST].max()
    cells = []
    for variant in rows["variant"].unique():
        table = wide.loc[variant].reindex(tasks)
        shares = table[CONTRIBUTED].reindex(columns=layers)
        # The remainder is a column after the last layer.
        shares[layers[-1] + 1] = rest.loc[variant]
        intervals = table["interval"].fillna("").reindex(columns=[*shares], fill_value="")
        cells.append(_Cells(words.shown(str(variant)), shares, intervals))
    return cells


def _draw_cells(run: DriftRun, cells: list[_Cells], tasks: list[str], *, dark: bool) -> go.Figure:
    """Draw one panel above the other, with one colour bar."""
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
    # One symmetric scale for all panels: colours compare, and the middle is 0.
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
    longest = words.LONGEST_OF_TWO if is_narrow else words.LONGEST
    names = [words.label(task, longest) for task in tasks]
    ticks = {"tickvals": list(range(len(names))), "ticktext": names, "showgrid": False}
    first_on_top = {"range": [len(names) - 0.5, -0.5]}
    grid.set_axes(x={**panels.layer_axis(run, "rest"), "showgrid": False}, y={**ticks, **first_on_top})
    # Numbers that don't fit into their cell are left out; hover text has them.
    grid.lay_out(
        uniformtext={"minsize": theme.SMALL - 2, "mode": "hide"},
        bargap=0,
        plot_bgcolor=theme.palette(dark).gap,
        margin=panels.room_beside(names),
    )
    bar = {
        **{"thickness": 14, "outlinewidth": 0, "tickformat": theme.SHARE},
        "title": {"text": _SHARE_TITLE, "side": "right"},
    }
    if is_narrow:
        height, margin = grid.layout["height"], grid.layout["margin"]
        bar |= {"title": {"text": _SHARE_TITLE, "side": "top"}, "orientation": "h"}
        # Measured from the container, a low chart would have no room left for its cells.
        inner = height - margin["t"] - margin["b"]
        bar |= {"y": -margin["b"] / inner, "yanchor": "top"}
        grid.lay_out(height=height + _BAR_BELOW, margin={"r": 12, "b": margin["b"] + _BAR_BELOW})
    ends = {"cmin": -highest, "cmax": highest, "colorscale": theme.palette(dark).diverging}
    grid.lay_out(coloraxis={**ends, "colorbar": bar})
    return grid.figure


def _numbers(drawn: theme.Trace, highest: float, *, dark: bool) -> theme.Trace:
    """Return the numbers in the cells, as text of invisible bars."""
    extent = 2 * highest or 1.0
    places = np.argwhere(~np.isnan(drawn["z"]))
    values = [float(drawn["z"][row, across]) for row, across in places]
    colours = theme.palette(dark).diverging
    backgrounds = [theme.shade(colours, (value + highest) / extent) for value in values]
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
        insidetextfont={"size": theme.SMALL - 1, "color": [theme.readable(colour) for colour in backgrounds]},
        hoverinfo="skip",
        showlegend=False,
    )
