"""Held-out scores and drift of a repair by how far it goes from the base."""

from __future__ import annotations

from typing import Any

import pandas as pd

from driftlens.base.variants import calibrated
from driftlens.findings.before_after import judged_by
from driftlens.findings.reading import number
from driftlens.runs.run import DriftRun
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

_TITLES = {
    "KL": "held-out KL to the experts (nat)",
    "Hellinger distance": "held-out Hellinger distance (0 to 1)",
    "relative drift": "held-out final drift / expert norm (ratio)",
}


def _curves(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """A row per chosen calibration, measure and share that was tried: mean, ends, samples, whether it was taken."""
    rows = [
        {
            "calibration": name,
            "measure": measure,
            "share": entry["share"],
            "mean": entry[column],
            "low": entry[f"{column}_low"],
            "high": entry[f"{column}_high"],
            "samples": entry["n"],
            "is chosen": entry["share"] == info.shrink["share"],
        }
        for name, info in run.manifest.calibrations.items()
        if calibrated(name) in picking.chosen_variants(run, options)
        for entry in info.shrink.get("curve", ())
        # Where a head is missing, drift is what decides, and stands there once.
        for measure, column in {judged_by(entry): "score", "relative drift": "drift"}.items()
    ]
    return pd.DataFrame(rows)


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    if len(_curves(run, options)):
        return None
    command = "driftlens calibrate RUN --name NAME --shrink auto"
    return f"needs a calibration whose share of the way from the base was chosen; `{command}` adds one."


@chart(
    "shares",
    title="How far from the base",
    section="calibration",
    rank=15,
    presets=("calibration",),
    needs=("layers", ("drift_l2_mean",)),
    lacks=_missing,
    caption="Distance of class decisions and final features from the experts' on calibration samples that the repair "
    "was fitted without, by the share a in base + a (repaired - base), mean over tasks with 95 % intervals and a ring "
    "around the share that was taken.",
    hint="The share with the lowest mean on the left was taken, on these very samples, so its mean is slightly too "
    "good. Where whiskers of neighbours overlap widely, the share matters little.",
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """A panel of what shares were chosen by, two where that differs, and one of drift."""
    rows = _curves(run, options)
    measures = [*dict.fromkeys(rows["measure"])]
    measures.sort(key=[*_TITLES].index)
    grid = panels.panel_grid(
        [""] * len(measures),
        x_title=["share a of the way from the base (0 base, 1 repair)"] * len(measures),
        y_titles=[_TITLES[measure] for measure in measures],
        height=260,
        y_by="panel",
        dark=options.dark,
    )
    brush = theme.Brush(run.variants, options.dark)
    for (name, measure), curve in rows.groupby(["calibration", "measure"], sort=False):
        variant = calibrated(str(name))
        hover: dict[str, Any] = {
            "text": theme.interval_texts(curve, "low", "high", write=number),
            "hovertemplate": f"a = %{{x}}: %{{y:{theme.NUMBER}}}%{{text}}",
        }
        panel, taken = measures.index(str(measure)), curve[curve["is chosen"]]
        grid.add(
            panel, brush.line(variant, curve["share"], curve["mean"], (curve["low"], curve["high"]), **hover)
        )
        ring = {"symbol": "circle-open", "size": 16, "line": {"width": 1.5}, "color": brush.palette.ink}
        ringed = brush.line(variant, taken["share"], taken["mean"], mode="markers", marker=ring)
        grid.add(panel, ringed.update(**brush.named("taken", "taken"), hoverinfo="skip"))
    grid.set_axes(
        x={"tickformat": theme.TICK_NUMBER, "tickvals": sorted({*rows["share"]})},
        y={"tickformat": theme.TICK_NUMBER, "rangemode": "tozero"},
    )
    shares = [
        f"{words.shown(calibrated(str(row['calibration'])))} takes {number(row['share'])} with {number(row['mean'])}"
        for row in rows[rows["is chosen"] & (rows["measure"] == measures[0])].to_dict("records")
    ]
    return Drawn(
        grid.figure,
        f"By share of the way from the base, {_TITLES[measures[0]]}: {'; '.join(shares)}.",
        rows,
        (f"{words.ranged(rows['samples'], 'held-out sample')} of all tasks together.",),
    )
