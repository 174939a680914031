"""Gain in cosine against gain in accuracy over the baseline, one point per task and variant."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from driftlens import variants
from driftlens.records.intervals import student, unpaired_difference
from driftlens.records.run import DriftRun
from driftlens.variants import part_of
from driftlens_reports.charts.at_layer import needs_at, rows_at
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.gain import against_baseline, extremes_in_words, no_rival
from driftlens_reports.charts.picking import absent, chosen_tasks, ordered
from driftlens_reports.charts.theme import SMALL, TICK_NUMBER, apply_theme, look, palette
from driftlens_reports.charts.words import data_key, label, literal, overlap_notes, ranged, shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

HEIGHT = 460
_COSINE, _ACCURACY = "cosine gain", "accuracy gain (points)"
_ENDS = tuple(f"{name} {end}" for name in (_COSINE, _ACCURACY) for end in ("low", "high"))


def _rows(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """One row per task and variant that has both gains."""
    key = ["task", "variant"]
    samples = rows_at(run, options, "samples", baseline=True)
    cosines = _cosine_gains(against_baseline(run, options, samples, "cos", ["task", "sample_id"]))
    scores = run.accuracy()
    scores = scores[(scores["metric"] == "accuracy") & scores["n"].notna()]
    scores = scores.assign(n_baseline=scores["n"])
    scored = against_baseline(run, options, scores, "value", ["task"])
    counts = scores[scores["variant"] == options.baseline][["task", "n_baseline"]]
    accuracies = _accuracy_gains(scored.drop(columns="n_baseline").merge(counts, on="task"))
    rows = cosines.merge(accuracies, on=key, how="inner")
    return ordered(rows, chosen_tasks(run, options), list(run.variants))


def _cosine_gains(paired: pd.DataFrame) -> pd.DataFrame:
    """Mean gain over samples, paired, with Student's 95 % interval."""
    gains = (paired["cos"] - paired["cos_baseline"]).astype(float)
    gain = gains.groupby([paired["task"], paired["variant"]], sort=False)
    mean, counts = gain.mean(), gain.size()
    error = (counts - 1).map(student) * gain.std(ddof=1) / np.sqrt(counts)
    columns = {
        "n": counts,
        _COSINE: mean,
        f"{_COSINE} low": mean - error,
        f"{_COSINE} high": mean + error,
    }
    return pd.DataFrame(columns).reset_index()


def _accuracy_gains(scored: pd.DataFrame) -> pd.DataFrame:
    """Gains in percentage points, with intervals from the counts of right answers alone."""
    found = []
    for row in scored.to_dict("records"):
        before, after = float(row["value_baseline"]), float(row["value"])
        n_before, n_after = int(row["n_baseline"]), int(row["n"])
        low, high = unpaired_difference(round(before * n_before), n_before, round(after * n_after), n_after)
        gains = {_ACCURACY: after - before, f"{_ACCURACY} low": low, f"{_ACCURACY} high": high}
        points = {name: 100 * gain for name, gain in gains.items()}
        found.append({"task": row["task"], "variant": row["variant"], "test n": n_after, **points})
    return pd.DataFrame(found, columns=["task", "variant", "test n", _ACCURACY, *_ENDS[2:]])


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    lacking = needs_at("samples", "cos")(run, options)
    if lacking:
        return lacking
    if not run.accuracy()["value"].notna().any():
        return absent("accuracy", ["value"], "driftlens evaluate RUN")
    return None if len(_rows(run, options)) else no_rival(run, options)


@chart(
    "gains",
    title="Cosine gain against accuracy gain",
    section="outputs",
    caption="Mean gain in cosine to the expert over the diagnosis samples against the gain in test accuracy, both over "
    "the baseline, one point per task and variant with 95 % intervals.",
    hint="Upper right: closer to the expert and more accurate. Cosine gain is a diagnostic, not an explanation of "
    "accuracy: tasks can gain accuracy at an unchanged cosine, and the reverse. Compare each variant with its "
    "anchor-only control before crediting the calibration.",
    missing=_missing,
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """One cloud of labelled points per variant, with lines at no gain."""
    import plotly.graph_objects as go

    rows = _rows(run, options)
    figure = go.Figure()
    labelled = _labelled(list(rows["variant"].unique()))
    for variant, part in rows.groupby("variant", sort=False):
        figure.add_trace(_trace(run, part, str(variant), labelled, dark=options.dark))
    apply_theme(figure, dark=options.dark, key=data_key(run, "gains", options), height=HEIGHT)
    line = {"color": palette(options.dark).quiet, "width": 1}
    figure.add_hline(0, line=line, layer="below")
    figure.add_vline(0, line=line, layer="below")
    baseline = literal(variants.title(options.baseline))
    figure.update_xaxes(
        title_text=f"gain in mean cosine over {baseline} (cosine, -1 to 1)", tickformat=TICK_NUMBER
    )
    figure.update_yaxes(
        title_text=f"gain in accuracy over {baseline} (percentage points)", tickformat=TICK_NUMBER
    )
    return Drawn(
        figure,
        alt=f"Gain in cosine over {variants.title(options.baseline)}: {extremes_in_words(rows, _COSINE)}. Gain in "
        f"accuracy in points: {extremes_in_words(rows, _ACCURACY)}.",
        data=rows,
        notes=(
            f"{ranged(rows['n'], 'diagnosis sample')} and {ranged(rows['test n'], 'test sample')} per task.",
            "Bars: Student's 95 % interval of the mean gain in cosine; that of the gain in accuracy is from the two "
            "counts alone (wider than it need be, as both answered the same samples).",
            *overlap_notes(run),
        ),
    )


def _labelled(names: list[str]) -> str:
    """The variant whose points carry the names of tasks: the last calibrated one, or the last."""
    calibrated = [name for name in names if part_of(name) == "calibrated"]
    return (calibrated or names)[-1]


def _trace(run: DriftRun, rows: pd.DataFrame, variant: str, labelled: str, *, dark: bool) -> go.Scatter:
    import plotly.graph_objects as go

    style = look(run.variants, variant, dark=dark)
    return go.Scatter(
        x=rows[_COSINE].tolist(),
        y=rows[_ACCURACY].tolist(),
        error_x=_bars(rows, _COSINE, style.colour),
        error_y=_bars(rows, _ACCURACY, style.colour),
        mode="markers+text" if variant == labelled else "markers",
        text=[label(str(task)) for task in rows["task"]],
        textposition=_sides(rows[_ACCURACY]),
        textfont={"size": SMALL, "color": palette(dark).ink},
        name=shown(variant),
        marker={"color": style.colour, "symbol": style.symbol, "size": 9},
        hovertemplate="%{text}<br>cosine %{x:+.3f}, accuracy %{y:+.1f} points",
    )


def _sides(heights: pd.Series[float]) -> list[str]:
    """Where each name goes: on the other side than that of the next higher point, which may be close."""
    order = heights.rank(method="first").astype(int)
    return ["bottom right" if place % 2 else "top left" for place in order]


def _bars(rows: pd.DataFrame, column: str, colour: str) -> dict[str, Any]:
    up, down = rows[f"{column} high"] - rows[column], rows[column] - rows[f"{column} low"]
    # One sample has no standard error; a bar of no length would claim certainty.
    return {
        "array": [None if math.isnan(length) else length for length in up],
        "arrayminus": [None if math.isnan(length) else length for length in down],
        "color": colour,
        "thickness": 1,
        "width": 0,
    }
