"""Which of the expert's decisions flip: how many are kept and how many flip, by the expert's margin."""

from __future__ import annotations

import numpy as np
import pandas as pd

from driftlens import variants
from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.panels import panel_grid
from driftlens_reports.charts.scored import no_scores, scored_samples
from driftlens_reports.charts.shares import FLIPPED, KEPT, marker
from driftlens_reports.charts.theme import TICK_NUMBER
from driftlens_reports.charts.words import counted, data_key, joined, overlap_notes, ranged, shown
from driftlens_reports.wording import number, percent

_BINS = 20
_SHARE = "share flipped, all margins"


def _samples(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Rows of the output table that have a margin and a verdict."""
    rows = scored_samples(run, options, "flipped", "margin")
    return rows.astype({"flipped": bool, "margin": float})


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    if len(_samples(run, options)):
        return None
    return no_scores(["flipped", "margin"], also="heads of two classes or more")


@chart(
    "flips",
    title="Which decisions flip",
    section="outputs",
    caption="Diagnosis samples of all chosen tasks by the expert's margin, its best score minus its second best: how "
    "many decisions the variant keeps and how many it flips, one panel per variant.",
    hint="Flips at small margins are decisions that were close anyway; flips at large margins mean that drift carried "
    "samples the expert was sure of. Tasks with different score scales share the axis: choose one task to compare.",
    missing=_missing,
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of stacked histograms with the same bins."""
    import plotly.graph_objects as go

    samples = _samples(run, options)
    rows = _histogram(samples)
    names = list(rows["variant"].unique())
    grid = panel_grid(
        [shown(variant) for variant in names],
        x_title="expert's margin (score units)",
        y_titles=["samples (count)"],
        dark=options.dark,
        key=data_key(run, "flips", options),
        columns=len(names) if len(names) <= 4 else 3,
        height=220,
    )
    for at, variant in enumerate(names):
        part = rows[rows["variant"] == variant]
        flipped, total = part[FLIPPED.name], part[FLIPPED.name] + part[KEPT.name]
        text = [
            f"margin {number(low)} to {number(high)}<br>{share} of {counted(count, 'sample')} flipped"
            for low, high, share, count in zip(part["from"], part["to"], flipped, total, strict=True)
        ]
        for outcome in (FLIPPED, KEPT):
            bar = go.Bar(
                x=part["middle"].tolist(),
                y=part[outcome.name].tolist(),
                width=(part["to"] - part["from"]).tolist(),
                name=outcome.name,
                legendgroup=outcome.name,
                showlegend=at == 0,
                marker=marker(outcome, dark=options.dark),
                text=text,
                textposition="none",
                hovertemplate=f"%{{text}}<extra>{outcome.name}</extra>",
            )
            grid.figure.add_trace(bar, **grid.place(at))
    grid.figure.update_layout(barmode="stack", bargap=0)
    grid.figure.update_xaxes(tickformat=TICK_NUMBER)
    grid.figure.update_yaxes(tickformat=TICK_NUMBER, rangemode="tozero")
    counts = samples.groupby(["task", "variant"], sort=False).size()
    return Drawn(
        grid.figure,
        alt=f"Share of the expert's decisions that flip: {_flips_in_words(rows)}.",
        data=rows,
        notes=(
            f"{ranged(counts, 'diagnosis sample')} per task, over {counted(samples['task'].nunique(), 'task')}.",
            *overlap_notes(run),
        ),
    )


def _histogram(samples: pd.DataFrame) -> pd.DataFrame:
    """Kept and flipped samples by variant and margin, in bins of one width that start at 0."""
    top = float(samples["margin"].max()) or 1.0
    edges = np.linspace(0, top, _BINS + 1)
    found = []
    for variant, part in samples.groupby("variant", sort=False):
        counts = {
            outcome.name: np.histogram(part.loc[part["flipped"] == flips, "margin"], edges)[0]
            for outcome, flips in ((KEPT, False), (FLIPPED, True))
        }
        ends = {"from": edges[:-1], "to": edges[1:], "middle": (edges[:-1] + edges[1:]) / 2}
        found.append(pd.DataFrame({"variant": variant, **ends, **counts, _SHARE: part["flipped"].mean()}))
    return pd.concat(found, ignore_index=True)


def _flips_in_words(rows: pd.DataFrame) -> str:
    shares = rows.drop_duplicates("variant")
    return joined(
        [
            f"{variants.title(variant)} {percent(share)}"
            for variant, share in zip(shares["variant"], shares[_SHARE], strict=True)
        ]
    )
