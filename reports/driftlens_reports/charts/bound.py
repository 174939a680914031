"""Score drift against its bound, sample by sample: one panel per estimate of the gain."""

from __future__ import annotations

import numpy as np
import pandas as pd

from driftlens.records.reading import percent
from driftlens.records.run import DriftRun
from driftlens_reports.charts import marks, panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

_ESTIMATES = {
    "secant": ("score_gain_secant", "secant: exact by definition"),
    "directional": ("score_gain", "directional: sampled along the drift"),
    "spectral": ("score_gain_spectral", "spectral: sampled, any direction"),
    "certified": ("score_gain_certified", "certified: holds everywhere"),
}
_ACTUAL, _USE = "score drift", "median share of the certified bound used"


def _rows(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """One row per task, variant and sample: score drift, and the bound by each estimate of the gain."""
    outputs = picking.scored_samples(run, options, "score_drift_l2")
    final = run.samples(layer="final" if run.manifest.layers else None)
    drifts = final[["task", "variant", "sample_id", "drift_l2"]]
    rows = outputs.merge(drifts, on=["task", "variant", "sample_id"], how="left")
    bounds = {name: rows[column] * rows["drift_l2"] for name, (column, _) in _ESTIMATES.items()}
    kept = rows[["task", "variant", "sample_id", "label"]]
    return kept.assign(**{_ACTUAL: rows["score_drift_l2"], **bounds}).astype(
        dict.fromkeys([_ACTUAL, *bounds], float)
    )


def _bounded(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Those rows with a bound by any estimate."""
    rows = _rows(run, options)
    return rows[rows[_ACTUAL].notna() & rows[list(_ESTIMATES)].notna().any(axis=1)]


@chart(
    "bound",
    title="Score drift and its bound",
    section="scores",
    rank=60,
    per_sample=True,
    needs=("outputs", ("score_drift_l2", "score_gain")),
    rows=_bounded,
    also="heads",
    caption="Norm of the score drift of all diagnosis samples against the gain of the score map times the norm of the "
    "final drift, on logarithmic axes with the line of equality, one panel per estimate of the gain.",
    hint="No point may lie above the line of the certified bound; how far below it points lie is how loose the bound "
    "is. The secant gain is score drift over final drift itself, so its points lie on the line; directional and "
    "spectral gains are sampled and guarantee nothing.",
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Four panels of points with the same logarithmic axes."""
    rows = _rows(run, options)
    share = rows[_ACTUAL] / rows["certified"].where(rows["certified"] > 0)
    rows = rows.assign(**{_USE: share.groupby(rows["variant"], sort=False).transform("median")})
    drawn, thinned = marks.thinned_samples(rows, options, len(_ESTIMATES) * rows["variant"].nunique())
    grid = panels.panel_grid(
        [title for _, title in _ESTIMATES.values()],
        x_title="bound: gain times final drift (score units, log)",
        y_titles=["norm of the score drift (score units, log)"],
        columns=2,
        height=230,
        dark=options.dark,
    )
    names = list(drawn["variant"].unique())
    texts = (marks.literal_column(drawn["task"]) + ", " + marks.literal_column(drawn["sample_id"])).to_numpy()
    for at, estimate in enumerate(_ESTIMATES):
        for variant in names:
            is_shown = ((drawn["variant"] == variant) & _drawable(drawn, estimate)).to_numpy()
            trace = marks.points(
                drawn.loc[is_shown, estimate],
                drawn.loc[is_shown, _ACTUAL],
                theme.look(run.variants, variant, dark=options.dark),
                total=len(drawn) * len(_ESTIMATES),
                **marks.named(variant, words.shown(variant), legend=at == 0),
                text=texts[is_shown],
                hovertemplate=f"%{{text}}<br>score drift %{{y:{theme.NUMBER}}}, bound %{{x:{theme.NUMBER}}}",
            )
            grid.add(at, trace)
    for at in range(len(_ESTIMATES)):
        marks.identity_line(grid.figure, *_reach(drawn), dark=options.dark, **grid.place(at))
    axis = {"type": "log", "tickformat": theme.TICK_NUMBER, "minor": {"ticks": "outside"}}
    grid.figure.update_xaxes(**axis)
    grid.figure.update_yaxes(**axis)
    lost = sum(int((~_drawable(drawn, estimate)).sum()) for estimate in _ESTIMATES)
    said = "without a place on logarithmic axes: no drift, or no finite bound."
    left_out = [f"{words.counted(lost, 'point')} {said}"] if lost else []
    counts, *overlaps = words.table_notes(run, rows, over_tasks=False)
    return Drawn(
        grid.figure,
        alt=_used_in_words(rows),
        data=drawn,
        notes=(*thinned, counts, *left_out, *overlaps),
    )


def _reach(rows: pd.DataFrame) -> tuple[float, float]:
    """From the smallest to the largest number that has a place on logarithmic axes."""
    values = rows[[_ACTUAL, *_ESTIMATES]].to_numpy()
    values = values[np.isfinite(values) & (values > 0)]
    return (float(values.min()), float(values.max())) if len(values) else (1.0, 10.0)


def _drawable(rows: pd.DataFrame, estimate: str) -> pd.Series[bool]:
    """Whether a sample has a place on logarithmic axes."""
    return (rows[estimate] > 0) & np.isfinite(rows[estimate]) & (rows[_ACTUAL] > 0)


def _used_in_words(rows: pd.DataFrame) -> str:
    """How many samples exceed the certified bound (none may) and how much of it they use."""
    measured = rows[np.isfinite(rows["certified"]) & (rows["certified"] > 0)]
    over = int((measured[_ACTUAL] > measured["certified"] * (1 + 1e-6)).sum())
    medians = measured.drop_duplicates("variant").set_index("variant")[_USE]
    used = words.by_variant(medians.astype(float).map(percent).items())
    above = f"{words.counted(over, 'sample')} of {len(measured)} above the certified bound."
    return f"{above} Median share of it used: {used}."
