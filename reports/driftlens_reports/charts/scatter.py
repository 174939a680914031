"""Final features of one task on a plane: expert and variants side by side, in one layout with shared axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens import variants
from driftlens.errors import DataError
from driftlens.projection import Projection, project, stored_projection
from driftlens.records.run import DriftRun
from driftlens_reports.charts.at_layer import layer_name, rows_at
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.panels import Grid, panel_grid
from driftlens_reports.charts.picking import absent, chosen_tasks, chosen_variants
from driftlens_reports.charts.points import points, thinned_samples
from driftlens_reports.charts.scatter_colours import add_drift_bar, class_legend, class_marks, class_notes
from driftlens_reports.charts.scatter_quality import (
    INDICATIVE,
    QUALITY,
    quality_in_words,
    write_below,
)
from driftlens_reports.charts.theme import look, palette
from driftlens_reports.charts.words import counted, data_key, label, literal, overlap_notes, shown
from driftlens_reports.wording import number, percent

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MOST_COLUMNS = 2
"""Panels in a row: more would be too narrow for their words in a telephone's window."""
_HEIGHT, _BELOW = 240, 42
"""Pixels: of a panel, and of the lines below it that need more than the room of the ticks, which there are none of."""
_TITLE = 22
"""Letters of a panel's title."""
_BARE = {"showticklabels": False, "ticks": ""}


def shown_task(run: DriftRun, options: ChartOptions) -> str:
    """The task that is drawn: of the chosen ones, that with the largest mean drift of the baseline."""
    tasks = chosen_tasks(run, options)
    if len(tasks) == 1:
        return tasks[0]
    rows = rows_at(run, options, "layers", baseline=True)
    rows = rows[(rows["variant"] == options.baseline) & rows["drift_l2_mean"].notna()]
    return str(rows.loc[rows["drift_l2_mean"].astype(float).idxmax(), "task"]) if len(rows) else tasks[0]


def _projection(run: DriftRun, options: ChartOptions) -> Projection | None:
    """The stored layout of all variants, so that it stays where it is whichever are chosen; PCA at once without one."""
    where: dict[str, Any] = {"layer": options.layer, "method": options.method, "seed": options.seed}
    task = shown_task(run, options)
    stored = stored_projection(run, task, **where)
    return stored or (project(run, task, **where, store_it=False) if options.method == "pca" else None)


def _laid_out(run: DriftRun, options: ChartOptions) -> list[str]:
    """The chosen variants that the layout has: it is that of all variants but the base."""
    return [name for name in chosen_variants(run, options) if name != "base"]


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    task = shown_task(run, options)
    if not run.manifest.layers:
        return absent("layers", ["drift_l2_mean"], "driftlens analyze RUN/spec.yaml --out NEW")
    if chosen_variants(run, options) == ["base"]:
        return "shows the expert and all variants but the base, which the layout leaves out; choose another variant."
    try:
        run.sample_ids(task)
        is_there = options.method == "pca" or _projection(run, options) is not None
        for variant in ("expert", *_laid_out(run, options)):
            run.features(task, variant, options.layer)
    except DataError as error:
        return f"{error.message}. {error.hint}".strip()
    if is_there:
        return None
    command = f"driftlens project RUN --task TASK --layer {options.layer} --method {options.method}"
    if options.seed:
        command += f" --seed {options.seed}"
    return f"needs the {options.method} layout of task {task}; `{command}` adds it."


@chart(
    "scatter",
    title="Features side by side",
    section="features",
    caption="Features of one task's diagnosis samples on a plane, expert and variants side by side in one joint layout "
    "with shared axes, and quality numbers from the features themselves below each panel.",
    hint="Look for clusters of the expert that the merged model blurs or shifts and the calibrated one restores. "
    "Panels share one layout, so positions compare; other tasks have layouts of their own and do not. Distances on the "
    "plane are indicative only: trust the numbers below the panels.",
    missing=_missing,
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels with the same axes; lines show where chosen samples moved."""
    task, found = shown_task(run, options), _projection(run, options)
    assert found is not None  # `missing` says so before
    names = ["expert", *_laid_out(run, options)]
    rows = found.frame[found.frame["variant"].isin(names)]
    rows = rows.merge(_drifts(run, options, task), on=["variant", "sample_id"], how="left")
    rows = _of_classes(rows, options)
    drawn, thinned = thinned_samples(rows, options, len(names))
    axes = _axis_titles(found)
    legend = class_legend(drawn["label"], dark=options.dark) if options.colour == "class" else []
    grid = panel_grid(
        [label(variants.title(variant), _TITLE) for variant in names],
        x_title=axes[0],
        y_titles=[axes[1]],
        dark=options.dark,
        key=data_key(run, "scatter", options),
        columns=_MOST_COLUMNS,
        height=_HEIGHT,
        legend=[entry.name for entry in legend],
        below=_BELOW,
    )
    for at, variant in enumerate(names):
        part = drawn[drawn["variant"] == variant]
        _draw_panel(run, grid, at, part, drawn, options)
        write_below(grid, at, axes[0], found.quality, variant)
    grid.figure.add_traces(legend)
    if options.colour == "drift" and drawn["drift"].notna().any():
        add_drift_bar(grid.figure, drawn["drift"], dark=options.dark)
    lost = _draw_ways(run, grid, names, rows, options)
    grid.set_axes(x=_BARE, y=_BARE)
    grid.figure.update_layout(margin_l=48, yaxis={"scaleanchor": "x"})
    quality = found.quality[["variant", *QUALITY]].rename(columns=QUALITY)
    return Drawn(
        grid.figure,
        alt=f"{found.method} layout of the {layer_name(options)} on {task}. {quality_in_words(found.quality, names)}",
        data=drawn.merge(quality, on="variant", how="left"),
        notes=(*thinned, *_notes(run, options, task, found), *lost),
    )


def _of_classes(rows: pd.DataFrame, options: ChartOptions) -> pd.DataFrame:
    if options.classes is None:
        return rows
    kept = rows[rows["label"].isin(list(options.classes))].reset_index(drop=True)
    if kept.empty:
        raise DataError(
            f"no sample shown is of the classes {', '.join(options.classes)}", hint="Choose other classes."
        )
    return kept


def _drifts(run: DriftRun, options: ChartOptions, task: str) -> pd.DataFrame:
    rows = run.samples(task, layer=options.layer)[["variant", "sample_id", "drift_l2"]]
    return rows.rename(columns={"drift_l2": "drift"})


def _axis_titles(found: Projection) -> tuple[str, str]:
    if found.explained_variance is None:
        return f"{found.method} 1 (no unit)", f"{found.method} 2 (no unit)"
    first, second = (literal(percent(share)) for share in found.explained_variance)
    return f"PC 1 ({first} of variance)", f"PC 2 ({second} of variance)"


def _draw_panel(
    run: DriftRun, grid: Grid, at: int, part: pd.DataFrame, drawn: pd.DataFrame, options: ChartOptions
) -> None:
    variant = str(part["variant"].iloc[0])
    trace = points(
        part["x"].to_numpy(dtype=float),
        part["y"].to_numpy(dtype=float),
        look(run.variants, variant, dark=options.dark),
        total=len(drawn),
        name=shown(variant),
        showlegend=False,
        text=[_hover(row) for row in part.to_dict("records")],
        # What the app learns of points that a reader selects.
        customdata=part["sample_id"].tolist(),
        hovertemplate="%{text}<extra></extra>",
    )
    if options.colour == "class":
        trace.update(marker=class_marks(part["label"], drawn["label"], dark=options.dark))
    if options.colour == "drift" and part["drift"].notna().any():
        trace.update(marker={"color": part["drift"].tolist(), "coloraxis": "coloraxis", "opacity": 0.9})
    grid.figure.add_trace(trace, **grid.place(at))


def _hover(row: dict[str, Any]) -> str:
    lines = [literal(str(row["sample_id"]))]
    if not pd.isna(row["label"]):
        lines.append(f"class {literal(str(row['label']))}")
    if not pd.isna(row["drift"]):
        lines.append(f"drift {number(float(row['drift']))}")
    return "<br>".join(lines)


def _draw_ways(
    run: DriftRun, grid: Grid, names: list[str], rows: pd.DataFrame, options: ChartOptions
) -> list[str]:
    """Lines from the expert's place of every highlighted sample to the variant's; a note on those that aren't there."""
    chosen = rows[rows["sample_id"].isin(list(options.highlight))]
    starts = chosen[chosen["variant"] == "expert"].set_index("sample_id")
    for at, variant in enumerate(names):
        ends = chosen[chosen["variant"] == variant]
        if len(ends):
            grid.figure.add_trace(_ways(starts, ends, variant, options.dark), **grid.place(at))
    lost = [name for name in options.highlight if name not in set(starts.index)]
    return [f"Not among the samples shown: {', '.join(lost)}."] if lost else []


def _ways(starts: pd.DataFrame, ends: pd.DataFrame, variant: str, dark: bool) -> go.Scatter:
    import plotly.graph_objects as go

    x: list[float | None] = []
    y: list[float | None] = []
    for row in ends.to_dict("records"):
        start = starts.loc[row["sample_id"]]
        x += [start["x"], row["x"], None]
        y += [start["y"], row["y"], None]
    ink = palette(dark).ink
    return go.Scatter(
        x=x[:-1],
        y=y[:-1],
        mode="lines+markers",
        line={"color": ink, "width": 1.5},
        marker={"symbol": ["circle-open", "circle", "circle"] * len(ends), "color": ink, "size": 7},
        name=f"{shown(variant)}, highlighted",
        showlegend=False,
        hoverinfo="skip",
    )


def _notes(run: DriftRun, options: ChartOptions, task: str, found: Projection) -> list[str]:
    notes = [f"Task {task}; {counted(int(found.quality['n'].max()), 'diagnosis sample')}."]
    if len(chosen_tasks(run, options)) > 1:
        notes.append(
            "Of the chosen tasks, the one with the largest drift is shown; choose one task to see another."
        )
    if "base" in chosen_variants(run, options):
        notes.append("The layout is that of all variants but the base: the base has no panel.")
    if options.classes is not None:
        notes.append(
            f"Only samples of the classes {', '.join(options.classes)}; the layout is that of all samples."
        )
    if options.colour == "class":
        notes += class_notes(found.frame["label"])
    notes += [f"{text}." for text in found.notes]
    return [*notes, INDICATIVE, *overlap_notes(run)]
