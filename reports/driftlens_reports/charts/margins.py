"""What becomes of the expert's decisions: certified by their margin, kept without a certificate, or flipped."""

from __future__ import annotations

from typing import Any

import pandas as pd

from driftlens import variants
from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.panels import panel_grid
from driftlens_reports.charts.scored import no_scores, scored_samples
from driftlens_reports.charts.shares import CERTIFIED, FLIPPED, KEPT_ONLY, marker
from driftlens_reports.charts.theme import SHARE, TICK_SHARE
from driftlens_reports.charts.words import data_key, joined, label, literal, overlap_notes, ranged, shown
from driftlens_reports.wording import percent

_OUTCOMES = (CERTIFIED, KEPT_ONLY, FLIPPED)


def _rows(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """One row per task and variant with the share of each outcome; only samples with both columns count."""
    rows = scored_samples(run, options, "flipped", "certified")
    flipped, certified = rows["flipped"].astype(bool), rows["certified"].astype(bool)
    outcomes = {
        CERTIFIED.name: certified & ~flipped,
        KEPT_ONLY.name: ~certified & ~flipped,
        FLIPPED.name: flipped,
    }
    groups = rows.assign(**outcomes).groupby(["task", "variant"], sort=False)
    return groups[list(outcomes)].mean().assign(n=groups.size()).reset_index()


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    if len(_rows(run, options)):
        return None
    return no_scores(["flipped", "certified"])


@chart(
    "margins",
    title="Decisions: certified, kept, flipped",
    section="outputs",
    caption="Share of diagnosis samples whose expert decision is certified by its margin, kept without a certificate "
    "or flipped, for every task and one panel per variant.",
    hint="Certified: the largest change of a score is below half the expert's margin, so no flip is possible. A wide "
    "middle part means decisions survive by luck of direction rather than by small drift. A flip is a disagreement "
    "with the expert, not always a mistake.",
    missing=_missing,
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of stacked bars that each add up to all samples."""
    import plotly.graph_objects as go

    rows = _rows(run, options)
    names, tasks = list(rows["variant"].unique()), list(rows["task"].unique())
    grid = panel_grid(
        [shown(variant) for variant in names],
        x_title="share of samples (%)",
        y_titles=["task (name)"],
        dark=options.dark,
        key=data_key(run, "margins", options),
        columns=len(names) if len(names) <= 4 else 3,
        height=60 + 26 * len(tasks),
    )
    for at, variant in enumerate(names):
        part = rows[rows["variant"] == variant]
        for outcome in _OUTCOMES:
            bar = go.Bar(
                x=part[outcome.name].tolist(),
                y=[literal(str(task)) for task in part["task"]],
                orientation="h",
                name=outcome.name,
                legendgroup=outcome.name,
                showlegend=at == 0,
                marker=marker(outcome, dark=options.dark),
                hovertemplate=f"%{{y}}<br>{outcome.name} %{{x:{SHARE}}}",
            )
            grid.figure.add_trace(bar, **grid.place(at))
    grid.figure.update_layout(barmode="stack", bargap=0.3, legend_traceorder="normal")
    grid.figure.update_xaxes(range=[0, 1], tickformat=TICK_SHARE)
    grid.figure.update_yaxes(**_task_axis(tasks))
    return Drawn(
        grid.figure,
        alt=f"Share of the expert's decisions that flip, worst task of each variant: {_worst_in_words(rows)}.",
        data=rows,
        notes=(f"{ranged(rows['n'], 'diagnosis sample')} per task.", *overlap_notes(run)),
    )


def _task_axis(tasks: list[str]) -> dict[str, Any]:
    names = [literal(task) for task in tasks]
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": names,
        "tickvals": names,
        "ticktext": [label(task) for task in tasks],
        "autorange": "reversed",
        "showgrid": False,
    }


def _worst_in_words(rows: pd.DataFrame) -> str:
    worst = rows.loc[rows.groupby("variant", sort=False)[FLIPPED.name].idxmax()]
    return joined(
        [
            f"{variants.title(row['variant'])} {percent(row[FLIPPED.name])} ({row['task']})"
            for row in worst.to_dict("records")
        ]
    )
