"""Repairs beside each other: what each gains against what it costs."""

from __future__ import annotations

import math

import pandas as pd
import plotly.graph_objects as go

from driftlens.base.variants import calibrated
from driftlens.findings.arena import arena_rows
from driftlens.runs.run import DriftRun
from driftlens_reports.charts import marks, placing, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.marks import Brush

_FEW = (
    "needs two calibrations of the run; `driftlens arena RUN --methods featcal,residual,surgery` makes some."
)


def _rows(run: DriftRun) -> pd.DataFrame:
    """Base, merged model, calibrations that were scored, experts."""
    rows = pd.DataFrame(arena_rows(run))
    return rows[rows["score"].notna()]


def _lacks(run: DriftRun, options: ChartOptions) -> str | None:
    if len(run.manifest.calibrations) < 2:
        return _FEW
    rows = _rows(run)
    if rows["method"].notna().sum() < 2:
        return "needs scores of two calibrations; `driftlens evaluate RUN` adds them."
    return None


def _beside(made: pd.DataFrame) -> list[str]:
    """Where each point's name stands, as `places` says of a panel whose axes begin at the lowest ends."""
    seconds = made["seconds"].clip(lower=1e-9).map(math.log)
    ends = {"x": seconds, "x_low": seconds, "x_high": seconds}
    ends |= {"y": made["score"], "y_low": made["low"], "y_high": made["high"]}
    crosses = pd.DataFrame(ends, dtype=float)
    crosses = crosses - crosses.min()[["x"] * 3 + ["y_low"] * 3].fillna(crosses["y"].min()).to_numpy()
    return placing.places([words.label(str(name)) for name in made["model"]], crosses)


def _ticks(seconds: pd.Series[float]) -> list[float]:
    """1, 2 and 5 of every power of ten around the values; plotly itself writes 20 as 2."""
    positive = seconds[seconds > 0]
    if positive.empty:
        return []
    first, last = (math.floor(math.log10(end)) for end in (positive.min(), positive.max()))
    digits = (1, 2, 5) if last - first < 3 else (1,)
    return [float(f"{digit}e{power}") for power in range(first - 1, last + 2) for digit in digits]


@chart(
    "arena",
    title="Repairs: gain against cost",
    section="calibration",
    rank=5,
    presets=("calibration",),
    needs=("accuracy", ("value",)),
    lacks=_lacks,
    caption="Mean score over tasks on test samples against seconds of calibrating (logarithmic), a point per "
    "calibration; whiskers are 95 % intervals over samples; rings must know the task of an input; lines are base, "
    "merged model and experts.",
    hint="Upper left is better. Seconds are those of one run on one machine. A ring is no single model: for every task "
    "it has a map of its own.",
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """One panel."""
    rows = _rows(run)
    is_made = rows["method"].notna()
    made = rows[is_made]
    figure, brush = go.Figure(), Brush(run.variants, options.dark)
    for (at, row), beside in zip(made.iterrows(), _beside(made), strict=True):
        of = made.loc[[at]]
        point = brush.line(
            calibrated(str(row["model"])),
            of["seconds"],
            of["score"],
            (of["low"], of["high"]),
            marker_size=11,
            mode="markers+text",
            text=[words.label(str(row["model"]))],
            textposition=beside,
            textfont=marks.ink(dark=options.dark),
            showlegend=False,
            hovertemplate="%{text}<br>%{y:.1%}, %{x:.3g} s",
        )
        ring = "circle-open" if row["task_id"] else "circle"
        figure.add_trace(point.update(marker={"symbol": ring, "line": {"width": 2}}))
    theme.apply_theme(figure, height=420, dark=options.dark)
    for row in rows[~is_made].to_dict("records"):
        part = "expert" if row["model"] == "experts" else str(row["model"])
        figure.add_hline(
            row["score"],
            line={"color": brush.look(part).colour, "width": 1, "dash": "dot"},
            annotation_text=words.label(str(row["model"])),
            annotation_font=marks.ink(dark=options.dark),
            annotation_position="top right",
        )
    at = _ticks(made["seconds"])
    ticks = {"tickvals": at, "ticktext": [f"{second:,.10g}" for second in at]}
    figure.update_xaxes(title_text="seconds of calibrating", type="log", **ticks)
    figure.update_yaxes(title_text="mean score over tasks", tickformat=theme.TICK_SHARE)
    scores = words.joined(
        [f"{name} {score:.1%}" for name, score in zip(rows["model"], rows["score"], strict=True)]
    )
    return Drawn(
        figure,
        alt=f"Mean score: {scores}. Calibrating took {made['seconds'].min():.3g} to {made['seconds'].max():.3g} s.",
        data=rows,
        notes=(f"{int(rows['n'].max())} test samples; one draw of calibration samples.",),
    )
