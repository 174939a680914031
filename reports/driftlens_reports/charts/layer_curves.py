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
_WHOLE, _APART = ("whole",), ("body", "head")
"""What of the layers the panels of one kind have."""
_HEAD = 0.14
"""Width of a head's own panel against that of its body."""
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
    what: str = ""
    number: str = theme.NUMBER
    band: tuple[str, str] | None = None
    error: Sequence[str] = ()
    beside: tuple[str, str] | None = None
    line: float | None = None
    is_norm: bool = False

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
        template = f"%{{text}}<br>{self.what or self.column} %{{y:{self.number}}}"
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
    apart: bool = False,
    below: Sequence[theme.Trace] = (),
    **settings: Any,
) -> go.Figure:
    """A row of panels per task, one of each kind; with `apart` norms have their head in a narrow panel of its own.

    `below`: what lies below the curves of the first panel.
    """
    tasks, shown = list(dict.fromkeys(rows["task"])), list(dict.fromkeys(rows["variant"]))
    rows, last = picking.named_layers(run, rows), panels.last_layer(run)
    parts = [(kind, part) for kind in kinds for part in (_APART if apart and kind.is_norm else _WHOLE)]
    names = iter(words.task_titles(tasks, [kind.name for kind in kinds]))
    titles = ["head" if part == "head" else next(names) for _ in tasks for _, part in parts]
    placed: dict[str, Any] = {"titles": titles}
    if len(parts) > 1:
        placed |= {"columns": len(parts), "height": 150 if len(kinds) > 1 else 190}
        placed["widths"] = [_HEAD if part == "head" else 1.0 for _, part in parts]
    grid = panels.panel_grid(
        **{**placed, **settings},
        x_title=panels.layer_title(run),
        y_titles=["" if part == "head" else kind.title for kind, part in parts],
        legend=[words.shown(variant) for variant in shown],
        dark=dark,
    )
    opacity = min(0.14, 0.5 / max(1, len(shown)))  # the more bands lie over one another, the less
    brush = theme.Brush(variants or run.variants, dark)
    grid.add(0, *below)
    for (task, _), line in rows.groupby(["task", "variant"], sort=False):
        for column, (kind, part) in enumerate(parts):
            points = line if part == "whole" else line[(line["layer"] == last) == (part == "head")]
            grid.add(tasks.index(task) * len(parts) + column, *kind.traces(points, brush, opacity=opacity))
    grid.add_lines("x", *panels.borders(rows))
    for column, (kind, _) in enumerate(parts):
        if kind.line is not None:
            grid.add_lines("y", kind.line, column=column if len(parts) > 1 else None)
    whole = panels.layer_axis(run) | ({"matches": None} if apart else {})
    body, head = panels.whole(0.5, last - 0.5), panels.whole(last - 0.5, last + 0.5)
    axes = {
        "whole": whole,
        "body": {**whole, "autorangeoptions": body, "matches": "x"},
        "head": {"matches": None, "autorangeoptions": head, "tickvals": [last]},
    }
    shared = {"matches": "y2"}  # norms that compare share a scale, and so do their heads
    y = [
        {**kind.axis, **(shared if part == "head" and "matches" in kind.axis else {})} for kind, part in parts
    ]
    grid.set_axes(x=[axes[part] for _, part in parts], y=y)
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
    kind = Curves(_DRIFTS[source], title, axis, band=band, is_norm=not options.relative)
    figure = draw_curves(run, rows, kind, dark=options.dark, apart=options.apart)
    alt = f"{what[0].upper()}{what[1:]} by layer. {words.final_sentence(rows, kind.column)}"
    return of_layers(run, figure, rows, kind.column, *(band or ()), alt=alt, notes=[note] if note else [])


_DISTANCE = "drift / base distance"


@chart(
    "base-distance",
    title="Drift against the base's distance",
    section="distance",
    rank=30,
    presets=("calibration",),
    needs=("layers", ("drift_vs_base",)),
    caption="Drift leaving each layer against the distance from base to expert there, a ratio of sums over diagnosis "
    "samples without a band; the line at 1 is the base itself.",
    hint="At 0 features are the expert's, at 1 they are no nearer to them than the base's, above 1 they are farther. "
    "Unlike drift in feature units, this compares across layers and tasks.",
)
def base_distance(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of curves with a line at 1: beyond it, merging has undone what fine-tuning gained."""
    rows = picking.layer_rows(run, options).rename(columns={"drift_vs_base": _DISTANCE})
    title = panels.titled(_DISTANCE, "layers", "drift_vs_base")
    kind = Curves(_DISTANCE, title, panels.value_axis(options, include=[1.0]), line=1.0)
    figure = draw_curves(run, rows, kind, dark=options.dark)
    alt = "Drift against the distance from base to expert, by layer, with a line at 1. "
    return of_layers(run, figure, rows, _DISTANCE, alt=alt + words.final_sentence(rows, _DISTANCE))


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
    kinds = []
    for (name, (source, what)), axis in zip(_PARTS.items(), axes, strict=True):
        is_norm = axis is not _AROUND_ZERO
        title, line = panels.titled(what, "layers", source), None if is_norm else 0.0
        kinds.append(Curves(name, title, axis, name, line=line, is_norm=is_norm))
    figure = draw_curves(run, rows, *kinds, dark=options.dark, apart=options.apart)
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


_GROWTH = {
    "gain_excess_mean": "gain excess",
    "mismatch_ratio_mean": "mismatch ratio",
    "growth_holds": "share that grows",
}


@chart(
    "growth",
    title="Growth condition",
    section="growth",
    rank=30,
    needs=("layers", tuple(_GROWTH)),
    caption="Gain excess gamma (curve: amplification minus 1) and mismatch ratio eta (open markers: |m| against the "
    "inherited drift), means over diagnosis samples without a band, and the share of samples with gamma above eta.",
    hint="Where gamma exceeds eta on a sample, its drift grows through the layer whichever way the local mismatch "
    "points. The condition is sufficient, not necessary: drift may also grow where it fails. The means compare less "
    "sharply than the share, which counts sample by sample. The stem inherits nothing and has no value.",
)
def growth(run: DriftRun, options: ChartOptions) -> Drawn:
    """A row of two panels per task; each column has one y axis range."""
    rows = picking.layer_rows(run, options).rename(columns=_GROWTH)
    ratios = Curves(
        "gain excess",
        panels.titled("gamma, eta", "layers", "gain_excess_mean"),
        _AROUND_ZERO,
        "gamma and eta",
        what="gamma",
        beside=("mismatch ratio", "eta"),
        line=0.0,
    )
    what = "samples with gamma above eta"
    axis = {"tickformat": theme.TICK_SHARE, "autorangeoptions": panels.whole(-0.03, 1.03)}
    shares = Curves("share that grows", "share of samples (%)", axis, what, what, theme.SHARE)
    figure = draw_curves(run, rows, ratios, shares, dark=options.dark)
    alt = "Gain excess, mismatch ratio and the share of samples whose drift must grow, by layer. "
    alt += f"Share: {words.peak_sentence(rows, 'share that grows')}"
    return of_layers(run, figure, rows, *_GROWTH.values(), alt=alt)


_SPECTRAL = {
    "spectral_norm_mean": "spectral norm",
    "spectral_residual_max": "residual",
    "jacobian_samples": "jacobian samples",
}


@chart(
    "spectral",
    title="Spectral norm",
    section="growth",
    rank=40,
    needs=("layers", ("spectral_norm_mean",)),
    caption="Largest gain of each layer's path-averaged Jacobian in any direction: mean over the diagnosis samples it "
    "was taken on, with error bars of the power iteration's largest relative residual; open markers: amplification of "
    "the actual drift.",
    hint="The gap between the two says how far the drift is from the worst direction: small where layers happen to "
    "enlarge just what merging breaks. A residual that is not small means that the power iteration had not "
    "settled, so the norm is too low.",
)
def spectral(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of curves with a line at 1; all panels have one y axis range."""
    rows = picking.layer_rows(run, options).rename(columns=_SPECTRAL)
    center, wide = (rows[name].astype(float) for name in ("spectral norm", "residual"))
    rows = rows.assign(error=center * wide, lower=center * (1 - wide), upper=center * (1 + wide))
    kind = Curves(
        "spectral norm",
        panels.titled("gain", "layers", "spectral_norm_mean"),
        panels.value_axis(options, include=[1.0]),
        error=("lower", "upper"),
        beside=("amplification", "amplification"),
        line=1.0,
    )
    largest = rows["residual"].astype(float).max()
    taken = f"Jacobians are of {words.ranged(rows['jacobian samples'], 'diagnosis sample')} per task."
    figure = draw_curves(run, rows, kind, dark=options.dark)
    columns = ("spectral norm", "residual", "error", "amplification", "jacobian samples")
    alt = "Spectral norm by layer beside the amplification of the actual drift. "
    alt += words.peak_sentence(rows, "spectral norm")
    notes = [taken, f"Largest residual {error(float(largest))}."]
    return of_layers(run, figure, rows, *columns, alt=alt, notes=notes)
