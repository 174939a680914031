"""Curves over layers: one panel per task, one line per variant, a band around it, a gap wherever nothing was measured.

First the parts that such charts share, then the charts of the layer table that are made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_places, layer_title, titled, value_axis, whole
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.marks import Trace, gapped, named, scatter
from driftlens_reports.charts.panels import Grid, panel_grid, reference_line
from driftlens_reports.charts.picking import layer_rows
from driftlens_reports.charts.theme import NUMBER, SHARE, TICK_NUMBER, TICK_SHARE, Look, faded, look
from driftlens_reports.charts.words import (
    LONGEST_OF_TWO,
    final_sentence,
    label,
    literal,
    peak_sentence,
    ranged,
    sample_notes,
    shown,
    themed,
)
from driftlens_reports.wording import error

_LONE = 0.2
"""Half the width, in layers, of a band with no neighbour."""


@dataclass(frozen=True)
class Part:
    """What one variant shows on one task.

    Attributes:
        at: place of the task among those drawn, from 0.
        rows: its rows, by layer.
        marks: how the variant is drawn.
        is_first: whether the variant was not drawn before, so that the legend names it here.
        opacity: of its band: the more variants lie over one another, the less.
    """

    at: int
    rows: pd.DataFrame
    marks: Look
    is_first: bool
    opacity: float

    def curve(self, column: str, *, what: str = "", **changes: Any) -> Trace:
        """Its values by layer, named in the legend; `what` the value is, if not `column`, is for the hover text."""
        return curve(self.rows, column, self.marks, what=what or column, legend=self.is_first, **changes)

    def companion(self, column: str, *, what: str = "") -> Trace:
        """Open markers of a value to compare a curve with; the curve's legend entry shows and hides them too."""
        marker = {"color": self.marks.colour, "symbol": f"{self.marks.symbol}-open", "size": 7}
        return curve(self.rows, column, self.marks, what=what or column, mode="markers", marker=marker)

    def band(self, low: str, high: str) -> Trace:
        """The area between two columns."""
        return band(self.rows, low, high, self.marks, opacity=self.opacity)


def parts(run: DriftRun, rows: pd.DataFrame, *, dark: bool) -> Iterator[Part]:
    """`rows` of the layer table by task and variant, in their order."""
    tasks = list(dict.fromkeys(rows["task"]))
    named: set[str] = set()
    opacity = min(0.14, 0.5 / max(1, rows["variant"].nunique()))
    for (task, variant), part in rows.groupby(["task", "variant"], sort=False):
        style = look(run.variants, variant, dark=dark)
        yield Part(tasks.index(task), part, style, variant not in named, opacity)
        named.add(variant)


def curve(
    rows: pd.DataFrame,
    column: str,
    marks: Look,
    *,
    what: str,
    legend: bool = False,
    number: str = NUMBER,
    **changes: Any,
) -> Trace:
    """One variant's values by layer on one task.

    Args:
        rows: rows of the layer table, of one task and variant, by layer.
        column: what is plotted; NaN makes a gap.
        marks: how the variant is drawn.
        what: what the value is, for the hover text.
        legend: whether the legend names the variant here; once is enough for all panels.
        number: format of the hovered value.
        changes: further settings of the trace.
    """
    variant = str(rows["variant"].iloc[0])
    settings: dict[str, Any] = {
        "x": rows["layer"].tolist(),
        "y": gapped(rows[column].astype(float)),
        "mode": "lines+markers",
        "connectgaps": False,
        **named(variant, shown(variant), legend=legend),
        "line": {"color": marks.colour, "dash": marks.dash, "width": 2},
        "marker": {"color": marks.colour, "symbol": marks.symbol, "size": 6},
        "text": [f"{literal(str(rows['task'].iloc[0]))}, {place}" for place in layer_places(rows)],
        "hovertemplate": f"%{{text}}<br>{what} %{{y:{number}}}",
    }
    return scatter(**{**settings, **changes})


def band(rows: pd.DataFrame, low: str, high: str, marks: Look, *, opacity: float) -> Trace:
    """The area between two columns; it stops where either has no number.

    Rows as for `curve`, whose legend entry shows and hides it too.
    """
    x: list[float | None] = []
    y: list[float | None] = []
    for run in _unbroken(rows, low, high):
        layers = run["layer"].astype(float).tolist()
        if len(layers) == 1:
            layers = [layers[0] - _LONE, layers[0] + _LONE]
            run = pd.concat([run, run])
        lows, highs = run[low].astype(float).tolist(), run[high].astype(float).tolist()
        x += [*layers, *reversed(layers), None]
        y += [*lows, *reversed(highs), None]
    return scatter(
        x=x[:-1],
        y=y[:-1],
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=faded(marks.colour, opacity),
        legendgroup=str(rows["variant"].iloc[0]),
        showlegend=False,
        hoverinfo="skip",
    )


def _unbroken(rows: pd.DataFrame, *columns: str) -> Sequence[pd.DataFrame]:
    """The runs of rows without a gap in any of the columns."""
    is_gap = rows[list(columns)].isna().any(axis=1)
    return [run for _, run in rows[~is_gap].groupby(is_gap.cumsum()[~is_gap])]


def layer_grid(
    run: DriftRun,
    rows: pd.DataFrame,
    y_titles: Sequence[str],
    *,
    dark: bool,
    key: str,
    titles: Sequence[str] | None = None,
    **settings: Any,
) -> Grid:
    """Empty panels over the layers of the run, with a legend of the variants in `rows`.

    Args:
        run: the run.
        rows: rows of a layer table.
        y_titles: as for `panel_grid`.
        dark: which theme.
        key: names the data shown.
        titles: of the panels; None gives each task one.
        settings: further arguments of `panel_grid`.
    """
    grid = panel_grid(
        [label(task) for task in dict.fromkeys(rows["task"])] if titles is None else titles,
        x_title=layer_title(run),
        y_titles=y_titles,
        legend=[shown(variant) for variant in dict.fromkeys(rows["variant"])],
        dark=dark,
        key=key,
        **settings,
    )
    grid.set_axes(x=layer_axis(run))
    return grid


def task_titles(rows: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Titles of a row of panels per task, one panel per name."""
    tasks = dict.fromkeys(rows["task"])
    return [f"{label(task, LONGEST_OF_TWO)}: {name}" for task in tasks for name in names]


def layer_data(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The rows of a layer table with what names them, n, and these columns."""
    return rows[["task", "variant", "layer", "role", "path", "n", *columns]]


_BANDS = {
    "q10-q90": ("10 % quantile", "90 % quantile", "Band: 10 % to 90 % quantiles over samples."),
    "q25-q75": ("25 % quantile", "75 % quantile", "Band: 25 % to 75 % quantiles over samples."),
    "std": ("mean - std", "mean + std", "Band: one standard deviation over samples around the mean."),
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
    presets=("overview", "summary", "standard", "calibration"),
    needs=("layers", ("drift_l2_mean",)),
    caption="Drift from the task's expert leaving each layer: mean over diagnosis samples, with the band that "
    "the notes name, one panel per task.",
    hint="Compare lines within a panel: calibration helps where its line lies below both merged and its anchor alone. "
    "Layers differ in feature scale, so a rise along the axis need not mean that a layer is bad; see the relative "
    "drift, and amplification for what layers do to what they inherit.",
)
def layer_drift(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of curves; all panels have one y axis range, so that tasks compare."""
    rows = layer_rows(run, options).rename(columns=_DRIFTS)
    spread = rows["drift_l2_std"].astype(float)
    ends = {"mean - std": rows["mean drift"] - spread, "mean + std": rows["mean drift"] + spread}
    rows = rows.assign(**ends)
    source = "drift_rel" if options.relative else "drift_l2_mean"
    words = "drift / expert norm" if options.relative else "mean L2 drift"
    column = _DRIFTS[source]
    low, high, said = _BANDS.get("" if options.relative else options.band, ("", "", ""))
    titles = [titled(words, "layers", source)]
    grid = layer_grid(run, rows, titles, **themed(run, "layer-drift", options))
    for part in parts(run, rows, dark=options.dark):
        grid.add(part.at, *([part.band(low, high)] if low else []), part.curve(column))
    grid.set_axes(y=value_axis(options))
    if options.relative:
        said = "Relative drift is one ratio of sums over the samples; it has no band."
    return Drawn(
        grid.figure,
        alt=f"{words[0].upper()}{words[1:]} by layer. {final_sentence(rows, column)}",
        data=layer_data(rows, column, *((low, high) if low else ())),
        notes=(*sample_notes(run, rows), *([said] if said else [])),
    )


_DISTANCE = "drift / base distance"


@chart(
    "base-distance",
    title="Drift against the base's distance",
    section="drift",
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
    rows = layer_rows(run, options).rename(columns={"drift_vs_base": _DISTANCE})
    titles = [titled(_DISTANCE, "layers", "drift_vs_base")]
    grid = layer_grid(run, rows, titles, **themed(run, "base-distance", options))
    for part in parts(run, rows, dark=options.dark):
        grid.add(part.at, part.curve(_DISTANCE))
    reference_line(grid, 1.0, dark=options.dark)
    grid.set_axes(y=value_axis(options, include=[1.0]))
    return Drawn(
        grid.figure,
        alt="Drift against the distance from base to expert, by layer, with a line at 1. "
        + final_sentence(rows, _DISTANCE),
        data=layer_data(rows, _DISTANCE),
        notes=tuple(sample_notes(run, rows)),
    )


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
    rows = layer_rows(run, options).rename(columns={source: name for name, (source, _) in _PARTS.items()})
    grid = layer_grid(
        run,
        rows,
        [titled(words, "layers", source) for source, words in _PARTS.values()],
        titles=task_titles(rows, [*_PARTS]),
        columns=len(_PARTS),
        height=150,
        **themed(run, "decomposition", options),
    )
    for part in parts(run, rows, dark=options.dark):
        for at, name in enumerate(_PARTS):
            hidden = {"showlegend": False} if at else {}
            grid.add(part.at * len(_PARTS) + at, part.curve(name, **hidden))
    reference_line(grid, 0.0, dark=options.dark, column=2)
    norms = value_axis(options)
    shares = {"tickformat": TICK_NUMBER, "autorangeoptions": {"include": [0.0]}}
    grid.set_axes(y=[norms, {**norms, "matches": "y"}, shares])  # norms in one unit compare
    return Drawn(
        grid.figure,
        alt=f"Local mismatch, propagation and cross term by layer. Mismatch: {peak_sentence(rows, 'mismatch')} "
        f"Propagation: {peak_sentence(rows, 'propagation')}",
        data=layer_data(rows, "reference", *_PARTS),
        notes=tuple(sample_notes(run, rows)),
    )


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
    rows = layer_rows(run, options).rename(columns={**names, "jacobian_samples": "jacobian samples"})
    center, spread = rows["amplification"].astype(float), rows["Jacobian error"].astype(float)
    rows = rows.assign(lower=center * (1 - spread), upper=center * (1 + spread))
    titles = [titled("amplification", "layers", "amplification")]
    grid = layer_grid(run, rows, titles, **themed(run, "amplification", options))
    for part in parts(run, rows, dark=options.dark):
        random = part.companion("random gain", what="mean gain on random directions")
        grid.add(part.at, part.band("lower", "upper"), part.curve("amplification"), random)
    reference_line(grid, 1.0, dark=options.dark)
    grid.set_axes(y=value_axis(options, zero=False, include=[1.0]))
    largest = spread.max()
    said = (
        "Without Jacobians there is no band and no random gain."
        if pd.isna(largest)
        else f"Largest Jacobian error {error(float(largest))}, relative to the propagation."
    )
    return Drawn(
        grid.figure,
        alt=f"Amplification by layer, with a line at 1. {peak_sentence(rows, 'amplification')}",
        data=layer_data(rows, "amplification", "lower", "upper", *names.values(), "jacobian samples"),
        notes=(*sample_notes(run, rows), said),
    )


_GROWTH = {
    "gain_excess_mean": "gain excess",
    "mismatch_ratio_mean": "mismatch ratio",
    "growth_holds": "share that grows",
}


@chart(
    "growth",
    title="Growth condition",
    section="amplification",
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
    rows = layer_rows(run, options).rename(columns=_GROWTH)
    shares = "samples with gamma above eta"
    grid = layer_grid(
        run,
        rows,
        [titled("gamma, eta", "layers", "gain_excess_mean"), "share of samples (%)"],
        titles=task_titles(rows, ["gamma and eta", shares]),
        columns=2,
        height=150,
        **themed(run, "growth", options),
    )
    for part in parts(run, rows, dark=options.dark):
        gamma, eta = part.curve("gain excess", what="gamma"), part.companion("mismatch ratio", what="eta")
        grid.add(2 * part.at, gamma, eta)
        share = part.curve("share that grows", what=shares, number=SHARE, showlegend=False)
        grid.add(2 * part.at + 1, share)
    reference_line(grid, 0.0, dark=options.dark, column=0)
    ratios = {"tickformat": TICK_NUMBER, "autorangeoptions": {"include": [0.0]}}
    grid.set_axes(y=[ratios, {"tickformat": TICK_SHARE, "autorangeoptions": whole(-0.03, 1.03)}])
    return Drawn(
        grid.figure,
        alt="Gain excess, mismatch ratio and the share of samples whose drift must grow, by layer. "
        f"Share: {peak_sentence(rows, 'share that grows')}",
        data=layer_data(rows, *_GROWTH.values()),
        notes=tuple(sample_notes(run, rows)),
    )


_SPECTRAL = {
    "spectral_norm_mean": "spectral norm",
    "spectral_residual_max": "residual",
    "jacobian_samples": "jacobian samples",
}


@chart(
    "spectral",
    title="Spectral norm",
    section="amplification",
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
    rows = layer_rows(run, options).rename(columns=_SPECTRAL)
    titles = [titled("gain", "layers", "spectral_norm_mean")]
    grid = layer_grid(run, rows, titles, **themed(run, "spectral", options))
    rows = rows.assign(error=rows["spectral norm"].astype(float) * rows["residual"].astype(float))
    for part in parts(run, rows, dark=options.dark):
        bars = {"type": "data", "array": gapped(part.rows["error"]), "thickness": 1, "width": 3}
        grid.add(part.at, part.curve("spectral norm", error_y=bars), part.companion("amplification"))
    reference_line(grid, 1.0, dark=options.dark)
    grid.set_axes(y=value_axis(options, include=[1.0]))
    largest = rows["residual"].astype(float).max()
    taken = f"Jacobians are of {ranged(rows['jacobian samples'], 'diagnosis sample')} per task."
    return Drawn(
        grid.figure,
        alt="Spectral norm by layer beside the amplification of the actual drift. "
        + peak_sentence(rows, "spectral norm"),
        data=layer_data(rows, "spectral norm", "residual", "error", "amplification", "jacobian samples"),
        notes=(*sample_notes(run, rows), taken, f"Largest residual {error(float(largest))}."),
    )
