"""Charts of output drift: flipped decisions, and score drift against its bound."""

from __future__ import annotations

import numpy as np
import pandas as pd

from driftlens.results.formatting import number, percent
from driftlens.runs.run import DriftRun
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

_BINS = 20
_KEPT, _FLIPPED = "kept", "flipped"
# Index in the sequential scale and hatch of each outcome. Heavier is worse in both.
_LOOKS = {_FLIPPED: (5, "x"), _KEPT: (2, "")}
_SHARE = "share flipped, all margins"


@chart(
    "flips",
    title="Which decisions flip",
    section="decisions",
    rank=40,
    presets=("standard", "calibration"),
    needs=("outputs", ("flipped", "margin")),
    also="heads of two classes or more",
    caption="Kept and flipped decisions on the diagnosis samples of the chosen tasks, by the expert's margin (best "
    "minus second-best score), one panel per variant.",
    hint="Flips at small margins were close decisions; flips at large margins are samples the expert was sure of. "
    "Score scales differ between tasks: choose one task to compare.",
)
def _flips(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw stacked histograms with the same bins, one panel per variant."""
    samples = picking.scored_samples(run, options, "flipped", "margin")
    # Without gaps nullable columns become plain ones, which numpy can mask.
    samples = samples.astype({"flipped": bool, "margin": float})
    rows = _histogram(samples)
    names = list(rows["variant"].unique())
    grid = panels.panel_grid(
        [words.shown(variant) for variant in names],
        x_title="expert's margin (score units)",
        y_titles=["samples (count)"],
        columns=len(names) if len(names) <= 4 else 3,
        height=220,
        dark=options.dark,
    )
    brush = theme.Brush(names, options.dark)
    for panel, variant in enumerate(names):
        part = rows[rows["variant"] == variant]
        texts = [
            f"margin {number(row['from'])} to {number(row['to'])}<br>{row[_FLIPPED]} of "
            f"{words.counted(row[_FLIPPED] + row[_KEPT], 'sample')} flipped"
            for row in part.to_dict("records")
        ]
        for outcome, (shade, hatch) in _LOOKS.items():
            fill = {
                "color": brush.palette.sequential[shade],
                "line": {"color": brush.palette.quiet, "width": 0.5},
                "pattern": {"shape": hatch, "fillmode": "overlay", "size": 6, "solidity": 0.25},
            }
            bars = theme.bar(
                x=part["middle"].tolist(),
                y=part[outcome].tolist(),
                width=(part["to"] - part["from"]).tolist(),
                marker=fill,
                text=texts,
                textposition="none",
                hovertemplate=f"%{{text}}<extra>{outcome}</extra>",
                **brush.named(outcome, outcome),
            )
            grid.add(panel, bars)
    grid.lay_out(barmode="stack", bargap=0)
    ticks = {"tickformat": theme.TICK_NUMBER}
    grid.set_axes(x=ticks, y={**ticks, "rangemode": "tozero"})
    shares = rows.groupby("variant", sort=False)[_SHARE].first().map(percent)
    listed = words.by_variant(shares.items())
    alt = f"Share of the expert's decisions that flip: {listed}."
    return Drawn(grid.figure, alt, rows, tuple(words.table_notes(run, samples)))


def _histogram(samples: pd.DataFrame) -> pd.DataFrame:
    """Count kept and flipped samples by variant and margin, in bins of equal width from 0."""
    top = float(samples["margin"].max()) or 1.0
    edges = np.linspace(0, top, _BINS + 1)
    bins = []
    for variant, part in samples.groupby("variant", sort=False):
        outcomes = {_KEPT: ~part["flipped"], _FLIPPED: part["flipped"]}
        counts = {name: np.histogram(part.loc[mask, "margin"], edges)[0] for name, mask in outcomes.items()}
        ends = {"from": edges[:-1], "to": edges[1:], "middle": (edges[:-1] + edges[1:]) / 2}
        bins.append(pd.DataFrame({"variant": variant, **ends, **counts, _SHARE: part["flipped"].mean()}))
    return pd.concat(bins, ignore_index=True)


_ESTIMATES = {
    "secant": ("score_gain_secant", "secant: exact along the drift"),
    "directional": ("score_gain", "directional: sampled along the drift"),
    "spectral": ("score_gain_spectral", "spectral: sampled, any direction"),
    "certified": ("score_gain_certified", "certified: holds everywhere"),
}
_ACTUAL, _USE = "score drift", "median share of the certified bound used"


def _bounds(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Return score drift and its bound by each estimate of the gain (Eq. 7), a row per task, variant and sample."""
    outputs = picking.scored_samples(run, options, "score_drift_l2")
    final = run.samples(layer="final" if run.manifest.layers else None)
    drifts = final[["task", "variant", "sample_id", "drift_l2"]]
    rows = outputs.merge(drifts, on=["task", "variant", "sample_id"], how="left")
    # No value where models share the score map.
    apart = rows["score_map_mismatch"].fillna(0.0)
    bounds = {name: rows[column] * rows["drift_l2"] + apart for name, (column, _) in _ESTIMATES.items()}
    keys = rows[["task", "variant", "sample_id", "label"]]
    values = pd.DataFrame({_ACTUAL: rows["score_drift_l2"], **bounds}, dtype=float)
    return pd.concat([keys, values], axis=1)


@chart(
    "bound",
    title="Score drift and its bound",
    section="scores",
    rank=60,
    needs=("outputs", ("score_drift_l2", "score_gain")),
    also="heads",
    caption="Norm of the score drift of diagnosis samples against its bound (gain of the score map times final drift, "
    "plus the mismatch of score maps) on logarithmic axes with the line of equality, one panel per estimate of the "
    "gain.",
    hint="No point may be above the line of the certified bound; the distance below it shows how loose the bound is. "
    "Secant points are on the line where models share the score map, and on or below it elsewhere. Directional and "
    "spectral gains are sampled and guarantee nothing.",
)
def _bound(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw four panels of points with the same logarithmic axes."""
    rows = _bounds(run, options)
    share = rows[_ACTUAL] / rows["certified"].where(rows["certified"] > 0)
    rows = rows.assign(**{_USE: share.groupby(rows["variant"], sort=False).transform("median")})
    drawn, thinned = picking.thinned_samples(rows, options, len(_ESTIMATES) * rows["variant"].nunique())
    names = list(drawn["variant"].unique())
    grid = panels.panel_grid(
        [title for _, title in _ESTIMATES.values()],
        x_title="bound (score units, log)",
        y_titles=["norm of the score drift (score units, log)"],
        columns=2,
        height=230,
        dark=options.dark,
        legend=[words.shown(str(name)) for name in names],
    )
    brush = theme.Brush(run.variants, options.dark)
    texts = (theme.literal_column(drawn["task"]) + ", " + theme.literal_column(drawn["sample_id"])).to_numpy()
    # Without a drift or a finite bound, a sample has no place on logarithmic axes.
    drawable = {
        name: (drawn[name] > 0) & np.isfinite(drawn[name]) & (drawn[_ACTUAL] > 0) for name in _ESTIMATES
    }
    for panel, estimate in enumerate(_ESTIMATES):
        for variant in names:
            is_shown = ((drawn["variant"] == variant) & drawable[estimate]).to_numpy()
            trace = brush.cloud(
                variant,
                drawn.loc[is_shown, estimate],
                drawn.loc[is_shown, _ACTUAL],
                total=len(drawn) * len(_ESTIMATES),
                text=texts[is_shown],
                hovertemplate=f"%{{text}}<br>score drift %{{y:{theme.NUMBER}}}, bound %{{x:{theme.NUMBER}}}",
            )
            grid.add(panel, trace)
    values = drawn[[_ACTUAL, *_ESTIMATES]].to_numpy()
    values = values[np.isfinite(values) & (values > 0)]
    reach = (float(values.min()), float(values.max())) if len(values) else (1.0, 10.0)
    for panel in range(len(_ESTIMATES)):
        grid.add_identity(panel, *reach)
    grid.lay_out(legend=theme.LARGE_MARKS)
    # Of two decades plotly else writes every digit, one over the other.
    step = "D2" if reach[1] < 1000 * reach[0] else 1
    axis = {"type": "log", "tickformat": theme.TICK_NUMBER, "minor": {"ticks": "outside"}, "dtick": step}
    grid.set_axes(x=axis, y=axis)
    lost = sum(int((~is_drawn).sum()) for is_drawn in drawable.values())
    why = "without a place on logarithmic axes (no drift or no finite bound)."
    left_out = [f"{words.counted(lost, 'point')} {why}"] if lost else []
    counts, *overlaps = words.table_notes(run, rows, over_tasks=False)
    return Drawn(grid.figure, _used_in_words(rows), drawn, (*thinned, counts, *left_out, *overlaps))


def _used_in_words(rows: pd.DataFrame) -> str:
    """Return how many samples exceed the certified bound (none may), and the share of it that they use."""
    measured = rows[np.isfinite(rows["certified"]) & (rows["certified"] > 0)]
    # A relative tolerance for rounding, as drift and bound may be equal.
    over = int((measured[_ACTUAL] > measured["certified"] * (1 + 1e-6)).sum())
    medians = measured.drop_duplicates("variant").set_index("variant")[_USE]
    used = words.by_variant(medians.astype(float).map(percent).items())
    above = f"{words.counted(over, 'sample')} of {len(measured)} above the certified bound."
    return f"{above} Median share of it used: {used}."
