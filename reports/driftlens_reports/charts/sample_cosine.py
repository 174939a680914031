"""Cosine to the expert sample by sample: the baseline's on x, the other variants' on y, one panel per task."""

from __future__ import annotations

import pandas as pd

from driftlens import variants
from driftlens.records.run import DriftRun
from driftlens_reports.charts.at_layer import layer_name, needs_at, rows_at
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.gain import against_baseline, extremes_in_words, no_rival
from driftlens_reports.charts.panels import Grid, panel_grid
from driftlens_reports.charts.points import identity_line, literal_column, points, thinned_samples
from driftlens_reports.charts.theme import GLYPHS, NUMBER, SMALL, TICK_NUMBER, faded, look, palette
from driftlens_reports.charts.words import data_key, label, literal, overlap_notes, ranged, shown


def _rows(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """One row per task, variant and sample with the baseline's cosine beside the variant's own."""
    samples = rows_at(run, options, "samples", baseline=True)
    paired = against_baseline(run, options, samples, "cos", ["task", "sample_id"])
    names = {"cos": "cosine", "cos_baseline": "baseline cosine"}
    return paired.rename(columns=names)[["task", "variant", "sample_id", "label", *names.values()]]


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    lacking = needs_at("samples", "cos")(run, options)
    return lacking or (None if len(_rows(run, options)) else no_rival(run, options))


@chart(
    "sample-cosine",
    title="Cosine of every sample, before and after",
    section="features",
    caption="Cosine to the expert's feature for all diagnosis samples, the baseline's on x and the other variants' on "
    "y, with the line of no change and each variant's mean gain beside its symbol, one panel per task.",
    hint="Points above the line are closer to the expert than with the baseline. Look at the lower left: samples that "
    "were far off tell more than the mean, and those below the line got worse.",
    missing=_missing,
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of points; all panels have the same axes."""
    rows = _rows(run, options)
    means = _mean_gains(rows)
    drawn, thinned = thinned_samples(rows, options, rows["variant"].nunique())
    tasks = list(rows["task"].unique())
    baseline = variants.title(options.baseline)
    grid = panel_grid(
        [label(task) for task in tasks],
        x_title=f"cosine, {literal(baseline)} (1: as the expert)",
        y_titles=["cosine, others (1: as the expert)"],
        dark=options.dark,
        key=data_key(run, "sample-cosine", options),
    )
    named: set[str] = set()
    for (task, variant), part in drawn.groupby(["task", "variant"], sort=False):
        trace = points(
            part["baseline cosine"].to_numpy(dtype=float),
            part["cosine"].to_numpy(dtype=float),
            look(run.variants, str(variant), dark=options.dark),
            total=len(drawn),
            name=shown(str(variant)),
            legendgroup=variant,
            showlegend=variant not in named,
            text=literal_column(part["sample_id"]).to_numpy(),
            hovertemplate=f"%{{text}}<br>{literal(baseline)} %{{x:{NUMBER}}}, {shown(str(variant))} %{{y:{NUMBER}}}",
        )
        named.add(str(variant))
        grid.figure.add_trace(trace, **grid.place(tasks.index(task)))
    low = min(0.0, float(rows[["baseline cosine", "cosine"]].min().min()))
    for at, task in enumerate(tasks):
        identity_line(grid.figure, low, 1, dark=options.dark, **grid.place(at))
        _write_gains(grid, at, run, means[means["task"] == task], dark=options.dark)
    reach = [low - 0.03, 1.03]
    grid.figure.update_xaxes(range=reach, tickformat=TICK_NUMBER)
    grid.figure.update_yaxes(range=reach, tickformat=TICK_NUMBER)
    counts = rows.groupby(["task", "variant"], sort=False).size()
    return Drawn(
        grid.figure,
        alt=f"Mean gain in cosine of the {layer_name(options)} over {baseline}: "
        f"{extremes_in_words(means, 'mean gain')}.",
        data=drawn.merge(means, on=["task", "variant"], how="left"),
        notes=(*thinned, f"{ranged(counts, 'diagnosis sample')} per task.", *overlap_notes(run)),
    )


def _mean_gains(rows: pd.DataFrame) -> pd.DataFrame:
    gains = rows.assign(**{"mean gain": rows["cosine"] - rows["baseline cosine"]})
    return gains.groupby(["task", "variant"], sort=False)["mean gain"].mean().reset_index()


def _write_gains(grid: Grid, at: int, run: DriftRun, means: pd.DataFrame, *, dark: bool) -> None:
    """Each variant's mean gain beside its symbol, in the corner below the line where few points are."""
    lines = []
    for variant, gain in zip(means["variant"], means["mean gain"], strict=True):
        symbol = look(run.variants, variant, dark=dark).symbol
        lines.append(f"{GLYPHS.get(symbol, shown(variant))} {gain:+.3f}")
    axis = str(at + 1) if at else ""
    grid.figure.add_annotation(
        text="<br>".join(lines),
        xref=f"x{axis} domain",
        yref=f"y{axis} domain",
        x=0.98,
        y=0.03,
        xanchor="right",
        yanchor="bottom",
        align="right",
        showarrow=False,
        font={"size": SMALL, "color": palette(dark).ink},
        bgcolor=faded(palette(dark).surface, 0.8),  # points may lie below it all the same
    )
