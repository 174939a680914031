"""The scatter before and after repair: where samples are, and a line from each to its place in the expert."""

from __future__ import annotations

import numpy as np

from driftlens.config.requests import ProjectionRequest
from driftlens.results.formatting import format_number
from driftlens.results.projection import project
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import DataError, pluralize
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn
from driftlens_reports.charts.drift_parts import compared_variants

_BARE = {"showticklabels": False, "ticks": "", "showgrid": False}


def draw_moved_samples(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw the final features of one task, merged and repaired, in one layout with lines to the expert's positions.

    Raises:
        DataError: the run has no features.
    """
    names = compared_variants(run, options)
    if not (names and run.manifest.layers):
        raise DataError("the run has no features yet")
    task = picking.worst_task(run, picking.chosen_tasks(run, options), names[0])
    request = ProjectionRequest(variants=tuple(names))
    layout = project(run, task, request, store_it=False)
    rows = layout.frame.astype({"x": float, "y": float})
    places = rows[rows["variant"] == "expert"].set_index("sample_id")[["x", "y"]]
    cosines = layout.quality.set_index("variant")["mean_cosine"]
    grid = panels.panel_grid(
        [f"{words.variant_label(name)}, cosine {format_number(cosines[name])}" for name in names],
        x_title=f"final features in one layout ({layout.method.upper()})",
        y_titles=[""],
        columns=2,
        height=190,
        legend=["expert", *map(words.variant_label, names)],
        dark=options.dark,
    )
    brush = theme.VariantPlotter(run.roles, options.dark)
    for panel, name in enumerate(names):
        points = rows[rows["variant"] == name]
        ends = places.reindex(points["sample_id"])
        # One trace of all lines, with a gap after each.
        lines = {
            axis: np.stack([points[axis], ends[axis], np.full(len(points), np.nan)], axis=1).ravel() for axis in "xy"
        }
        look = {"mode": "lines", "line": {"color": brush.palette.quiet, "width": 0.7}, "opacity": 0.55}
        grid.add(panel, theme.scatter(**lines, **look, hoverinfo="skip", showlegend=False))
        for shown, variant in ((places.reset_index(), "expert"), (points, name)):
            safe = [words.escape_plotly(str(sample)) for sample in shown["sample_id"]]
            hover = {"text": safe, "hovertemplate": f"%{{text}}<extra>{words.variant_label(variant)}</extra>"}
            cloud = brush.scatter_trace(variant, shown["x"], shown["y"], total=len(rows), **hover)
            grid.add(panel, cloud)
    grid.set_axes(x=_BARE, y=_BARE)
    # One scale for x and y, as distances in all directions compare.
    grid.update_layout(yaxis={"scaleanchor": "x"}, margin={"l": 16})
    grid.figure.layout.uirevision = f"{run.id} {task} {names}"
    listed = words.join_by_variant((name, format_number(cosines[name])) for name in names)
    return Drawn(
        grid.figure,
        alt=f"Final features of {task}, with lines to the expert's positions. Mean cosine to the expert: {listed}.",
        data=rows.merge(layout.quality[["variant", "mean_cosine"]], on="variant", how="left"),
        notes=(
            f"Task {task}, {pluralize(len(places), 'diagnosis sample')}; short lines are little drift.",
            *(f"{text}." for text in layout.notes),
        ),
    )
