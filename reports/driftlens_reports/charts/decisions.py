"""What becomes of the expert's decisions: certified, kept or flipped by task, and which flip by the expert's margin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.marks import bar, category_axis, named
from driftlens_reports.charts.panels import Grid, panel_grid
from driftlens_reports.charts.picking import scored_samples
from driftlens_reports.charts.theme import SHARE, TICK_NUMBER, TICK_SHARE, palette
from driftlens_reports.charts.words import (
    by_variant,
    counted,
    literal,
    sample_notes,
    shown,
    table_notes,
    themed,
)
from driftlens_reports.wording import number, percent

_BINS = 20
_SHARE = "share flipped, all margins"


@dataclass(frozen=True)
class Outcome:
    """One outcome of a decision: its column, where in the sequential scale its colour stands, its hatch.

    Heavier is worse, also without colour.
    """

    name: str
    shade: int
    hatch: str

    def marker(self, *, dark: bool) -> dict[str, Any]:
        """How its bars are filled."""
        return {
            "color": palette(dark).sequential[self.shade],
            "line": {"color": palette(dark).quiet, "width": 0.5},
            "pattern": {"shape": self.hatch, "fillmode": "overlay", "size": 6, "solidity": 0.25},
        }


_CERTIFIED, _KEPT_ONLY = Outcome("certified", 1, ""), Outcome("kept without certificate", 3, "/")
_KEPT, _FLIPPED = Outcome("kept", 1, ""), Outcome("flipped", 5, "x")


def _grid(rows: pd.DataFrame, titles: tuple[str, str], height: int, **theme: Any) -> tuple[Grid, list[str]]:
    """Empty panels, one per variant of the rows, and the variants."""
    names = list(rows["variant"].unique())
    grid = panel_grid(
        [shown(variant) for variant in names],
        x_title=titles[0],
        y_titles=titles[1:],
        columns=len(names) if len(names) <= 4 else 3,
        height=height,
        **theme,
    )
    return grid, names


def _outcomes(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """One row per task and variant with the share of each outcome; only samples with both columns count."""
    rows = scored_samples(run, options, "flipped", "certified")
    flipped, certified = rows["flipped"].astype(bool), rows["certified"].astype(bool)
    outcomes = {
        _CERTIFIED.name: certified & ~flipped,
        _KEPT_ONLY.name: ~certified & ~flipped,
        _FLIPPED.name: flipped,
    }
    groups = rows.assign(**outcomes).groupby(["task", "variant"], sort=False)
    return groups[list(outcomes)].mean().assign(n=groups.size()).reset_index()


@chart(
    "margins",
    title="Decisions: certified, kept, flipped",
    section="decisions",
    rank=30,
    presets=("standard", "calibration"),
    needs=("outputs", ("flipped", "certified")),
    rows=_outcomes,
    also="heads",
    caption="Share of diagnosis samples whose expert decision is certified by its margin, kept without a certificate "
    "or flipped, for every task and one panel per variant.",
    hint="Certified: the largest change of a score is below half the expert's margin, so no flip is possible. A wide "
    "middle part means decisions survive by luck of direction rather than by small drift. A flip is a disagreement "
    "with the expert, not always a mistake.",
)
def margins(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of stacked bars that each add up to all samples."""
    rows = _outcomes(run, options)
    tasks = [str(task) for task in rows["task"].unique()]
    titles, height = ("share of samples (%)", "task (name)"), 60 + 26 * len(tasks)
    grid, names = _grid(rows, titles, height, **themed(run, "margins", options))
    for at, variant in enumerate(names):
        part = rows[rows["variant"] == variant]
        for outcome in (_CERTIFIED, _KEPT_ONLY, _FLIPPED):
            bars = bar(
                x=part[outcome.name].tolist(),
                y=[literal(str(task)) for task in part["task"]],
                orientation="h",
                **named(outcome.name, outcome.name, legend=at == 0),
                marker=outcome.marker(dark=options.dark),
                hovertemplate=f"%{{y}}<br>{outcome.name} %{{x:{SHARE}}}",
            )
            grid.add(at, bars)
    grid.figure.update_layout(barmode="stack", bargap=0.3, legend_traceorder="normal")
    grid.figure.update_xaxes(range=[0, 1], tickformat=TICK_SHARE)
    grid.figure.update_yaxes(**category_axis(tasks), autorange="reversed")
    worst = rows.loc[rows.groupby("variant", sort=False)[_FLIPPED.name].idxmax()].to_dict("records")
    said = by_variant((row["variant"], f"{percent(row[_FLIPPED.name])} ({row['task']})") for row in worst)
    return Drawn(
        grid.figure,
        alt=f"Share of the expert's decisions that flip, worst task of each variant: {said}.",
        data=rows,
        notes=tuple(sample_notes(run, rows)),
    )


def _decided(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Rows of the output table that have a margin and a verdict."""
    rows = scored_samples(run, options, "flipped", "margin")
    return rows.astype({"flipped": bool, "margin": float})


@chart(
    "flips",
    title="Which decisions flip",
    section="decisions",
    rank=40,
    presets=("calibration",),
    needs=("outputs", ("flipped", "margin")),
    rows=_decided,
    also="heads of two classes or more",
    caption="Diagnosis samples of all chosen tasks by the expert's margin, its best score minus its second best: how "
    "many decisions the variant keeps and how many it flips, one panel per variant.",
    hint="Flips at small margins are decisions that were close anyway; flips at large margins mean that drift carried "
    "samples the expert was sure of. Tasks with different score scales share the axis: choose one task to compare.",
)
def flips(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of stacked histograms with the same bins."""
    samples = _decided(run, options)
    rows = _histogram(samples)
    titles = ("expert's margin (score units)", "samples (count)")
    grid, names = _grid(rows, titles, 220, **themed(run, "flips", options))
    for at, variant in enumerate(names):
        part = rows[rows["variant"] == variant]
        flipped, total = part[_FLIPPED.name], part[_FLIPPED.name] + part[_KEPT.name]
        text = [
            f"margin {number(low)} to {number(high)}<br>{share} of {counted(count, 'sample')} flipped"
            for low, high, share, count in zip(part["from"], part["to"], flipped, total, strict=True)
        ]
        for outcome in (_FLIPPED, _KEPT):
            bars = bar(
                x=part["middle"].tolist(),
                y=part[outcome.name].tolist(),
                width=(part["to"] - part["from"]).tolist(),
                **named(outcome.name, outcome.name, legend=at == 0),
                marker=outcome.marker(dark=options.dark),
                text=text,
                textposition="none",
                hovertemplate=f"%{{text}}<extra>{outcome.name}</extra>",
            )
            grid.add(at, bars)
    grid.figure.update_layout(barmode="stack", bargap=0)
    grid.figure.update_xaxes(tickformat=TICK_NUMBER)
    grid.figure.update_yaxes(tickformat=TICK_NUMBER, rangemode="tozero")
    shares = rows.drop_duplicates("variant")
    said = by_variant(zip(shares["variant"], shares[_SHARE].map(percent), strict=True))
    return Drawn(
        grid.figure,
        alt=f"Share of the expert's decisions that flip: {said}.",
        data=rows,
        notes=tuple(table_notes(run, samples)),
    )


def _histogram(samples: pd.DataFrame) -> pd.DataFrame:
    """Kept and flipped samples by variant and margin, in bins of one width that start at 0."""
    top = float(samples["margin"].max()) or 1.0
    edges = np.linspace(0, top, _BINS + 1)
    found = []
    for variant, part in samples.groupby("variant", sort=False):
        counts = {
            outcome.name: np.histogram(part.loc[part["flipped"] == flips, "margin"], edges)[0]
            for outcome, flips in ((_KEPT, False), (_FLIPPED, True))
        }
        ends = {"from": edges[:-1], "to": edges[1:], "middle": (edges[:-1] + edges[1:]) / 2}
        found.append(pd.DataFrame({"variant": variant, **ends, **counts, _SHARE: part["flipped"].mean()}))
    return pd.concat(found, ignore_index=True)
