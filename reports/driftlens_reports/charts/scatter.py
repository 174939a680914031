"""Final features of one task on a plane: expert and variants side by side, in one layout with shared axes."""

from __future__ import annotations

from typing import Any

import pandas as pd

from driftlens.config.requests import ProjectionRequest
from driftlens.results.formatting import number, percent
from driftlens.results.projection import Projection, project
from driftlens.runs.run import DriftRun
from driftlens.utils import variants
from driftlens.utils.errors import DataError
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

# Panels in a row: more would be too narrow for their words in a telephone's window.
_MOST_COLUMNS = 2
# Pixels: of a panel, and of the lines below it that need more than the room of the ticks, which there are
# none of.
_HEIGHT, _BELOW = 240, 42
# Letters of a panel's title.
_TITLE = 22
# Letters of a sample's text in the hover label.
_LONGEST_TEXT = 80
_BARE = {"showticklabels": False, "ticks": ""}
# Quality columns of a projection, and their names in the plotted data.
_QUALITY = {
    "mean_cosine": "mean cosine",
    "mean_drift": "mean drift",
    "knn_overlap": "shared neighbours",
    "trustworthiness": "trustworthiness",
}
_INDICATIVE = (
    "Distances are approximate. The numbers below the panels come from the features: mean cosine to the expert, mean "
    "drift, share of neighbours in common with the expert, and trustworthiness of the plane (1 is best)."
)


def _shown_task(run: DriftRun, options: ChartOptions) -> str:
    """Return the task that is drawn: of the chosen ones, that with the largest mean drift of the merged model."""
    tasks = picking.chosen_tasks(run, options)
    return picking.worst_task(run, tasks, "merged", options.layer) if len(tasks) > 1 else tasks[0]


def _variants_but_base(run: DriftRun, options: ChartOptions) -> list[str]:
    """Return the chosen variants without the base, which the layout leaves out."""
    return [name for name in picking.chosen_variants(run, options) if name != "base"]


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    task = _shown_task(run, options)
    if not run.manifest.layers:
        return picking.absent("layers", ["drift_l2_mean"])
    laid_out = _variants_but_base(run, options)
    if not laid_out:
        return "the layout leaves out the base; choose another variant."
    try:
        run.sample_ids(task)
        for variant in ("expert", *laid_out):
            run.features(task, variant, options.layer)
    except DataError as error:
        return f"{error.message}. {error.hint}".strip()
    return None


@chart(
    "scatter",
    title="Features side by side",
    section="plane",
    rank=30,
    needs=("samples", ("drift_l2",)),
    lacks=_missing,
    caption="Features of one task's diagnosis samples, expert and variants side by side in one joint layout, with "
    "quality numbers below each panel.",
    hint="Look for clusters of the expert that the merged model blurs or shifts and the calibrated one restores. "
    "Positions compare between panels, not between tasks. Distances are approximate: trust the numbers below the "
    "panels. `driftlens view RUN` writes a page in which these samples move from model to model.",
)
def _scatter_panels(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw panels with the same axes."""
    task = _shown_task(run, options)
    layout = project(run, task, ProjectionRequest(layer=options.layer), store_it=False)
    names = ["expert", *_variants_but_base(run, options)]
    rows = _samples(run, task, layout.frame[layout.frame["variant"].isin(names)], options)
    drawn, thinned = picking.thinned_samples(rows, options, len(names))
    shares = [words.literal(percent(share)) for share in layout.explained_variance or ()]
    x_title, y_title = (f"PC {axis} ({share} of variance)" for axis, share in enumerate(shares, 1))
    grid = panels.panel_grid(
        [words.label(variants.title(variant), _TITLE) for variant in names],
        x_title=x_title,
        y_titles=[y_title],
        columns=_MOST_COLUMNS,
        height=_HEIGHT,
        below=_BELOW,
        dark=options.dark,
    )
    brush = theme.Brush(run.variants, options.dark)
    for panel, variant in enumerate(names):
        points = drawn[drawn["variant"] == variant]
        cloud = brush.cloud(
            variant,
            points["x"],
            points["y"],
            total=len(drawn),
            text=[_hover(row) for row in points.to_dict("records")],
            hovertemplate="%{text}<extra></extra>",
        )
        grid.add(panel, cloud.update(showlegend=False))
        _write_below(grid, panel, x_title, layout.quality, variant)
    # Coordinates have no unit, so ticks would mean nothing.
    grid.set_axes(x=_BARE, y=_BARE)
    # One scale for x and y, as distances in all directions compare.
    grid.lay_out(margin={"l": 48}, yaxis={"scaleanchor": "x"})
    quality = layout.quality[["variant", *_QUALITY]].rename(columns=_QUALITY)
    cosines = quality[quality["variant"].isin(names[1:])]
    listed = words.by_variant(zip(cosines["variant"], cosines["mean cosine"].map(number), strict=True))
    return Drawn(
        grid.figure,
        alt=f"{layout.method} layout of the {picking.feature_name(run, options)} on {task}. "
        f"Mean cosine to the expert: {listed}.",
        data=drawn.merge(quality, on="variant", how="left"),
        notes=(*thinned, *_notes(run, options, task, layout)),
    )


def _samples(run: DriftRun, task: str, rows: pd.DataFrame, options: ChartOptions) -> pd.DataFrame:
    """Add drift and text to the rows of the layout."""
    drifts = run.samples(task, layer=options.layer)[["variant", "sample_id", "drift_l2"]]
    rows = rows.merge(drifts.rename(columns={"drift_l2": "drift"}), on=["variant", "sample_id"], how="left")
    if texts := run.texts(task):
        rows["text"] = rows["sample_id"].map(texts)
    return rows


def _hover(row: dict[str, Any]) -> str:
    lines = [words.literal(str(row["sample_id"]))]
    lines += [] if pd.isna(row["label"]) else [f"class {words.literal(str(row['label']))}"]
    lines += [] if pd.isna(row["drift"]) else [f"drift {number(float(row['drift']))}"]
    lines += [words.label(row["text"], _LONGEST_TEXT)] if isinstance(row.get("text"), str) else []
    return "<br>".join(lines)


def _notes(run: DriftRun, options: ChartOptions, task: str, layout: Projection) -> list[str]:
    notes = [f"Task {task}; {words.counted(int(layout.quality['n'].max()), 'diagnosis sample')}."]
    if len(picking.chosen_tasks(run, options)) > 1:
        notes.append("Shown: the chosen task with the largest drift; choose one task to see another.")
    if "base" in picking.chosen_variants(run, options):
        notes.append("The layout leaves out the base: the base has no panel.")
    return [*notes, *(f"{text}." for text in layout.notes), _INDICATIVE, *words.overlap_notes(run)]


def _write_below(grid: panels.Grid, panel: int, x_title: str, quality: pd.DataFrame, variant: str) -> None:
    """Write the axis title and a variant's numbers below `panel`; the expert has none but trustworthiness."""
    row = quality[quality["variant"] == variant].iloc[0]
    # A line is no wider than a panel in a telephone's window.
    lines = [f"cosine {number(row['mean_cosine'])}, drift {number(row['mean_drift'])}"]
    lines = [] if variant == "expert" else [*lines, f"neighbours {number(row['knn_overlap'])}"]
    lines.append(f"trust {number(row['trustworthiness'])}")
    grid.set_axis("x", panel, title={"text": "<br>".join([x_title, *lines])})
