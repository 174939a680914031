"""Figures of matched features in the plane, two points per sample: intro and scatter-grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D

from driftlens.config.requests import ProjectionRequest
from driftlens.results.formatting import format_number, typeset_signs
from driftlens.results.measures import main_metrics, variant_score
from driftlens.results.projection import stratified_subset
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens.utils.errors import DataError, NumericsError
from driftlens_reports.charts.words import (
    count_range,
    format_count,
    shorten_middle,
    task_title,
    variant_title,
)
from driftlens_reports.paper import exhibit
from driftlens_reports.paper.layers import draw_norms_by_layer
from driftlens_reports.paper.plate import (
    PaperFigure,
    add_legend,
    format_percent_axis,
    marker_style,
    variant_colour,
    variant_hatch,
)

# Samples drawn per panel; more would hide one another.
MOST = 400

_METHODS = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}


@exhibit.figure("intro", title="Feature drift before and after calibration")
def _draw_intro_figure(runs: Sequence[DriftRun], options: exhibit.ExhibitOptions) -> exhibit.ExhibitResult:
    run, task = runs[0], options.median_task_of(runs[0])
    calibrated, compared = options.calibrated_of(run), options.compared_variants(run)
    plate = PaperFigure([run], options, options.width * (1.8 if options.is_single_column else 0.74))
    if options.is_single_column:
        left, right, bottom = plate.figure.subfigures(3, 1, height_ratios=[1.05, 1, 1])
    else:
        top, bottom = plate.figure.subfigures(2, 1, height_ratios=[1.2, 1])
        left, right = top.subfigures(1, 2, width_ratios=[1.5, 1])
    shown = ["merged", *(calibrated or [None])]
    axes = left.subplots(1, len(shown))
    layout = _load_projection(run, task, ["merged", *calibrated], "final", options.method)
    axes[0].set_title(f"(a) final features, {shorten_middle(task_title(task))}")
    for pair_axes, variant in zip(axes, shown, strict=True):
        # Square panels then stay aligned at their titles.
        pair_axes.set_anchor("N")
        _draw_projection_panel(plate, pair_axes, run, layout, variant, "a", "final")
    caption = []
    if isinstance(layout, TaskProjection):
        caption += [
            f"(a) Final features of task {task_title(task)}, L2-normalised and matched by sample, in one joint "
            f"layout of all variants ({layout.method}); below, the mean cosine to the expert's feature.",
            f"Trustworthiness of the plane: {layout.trust}." if layout.trust else "",
            *layout.notes,
        ]
    entries: dict[str, Artist] = {}
    if not plate.lacks(right, "(b) drift by layer", run, "layers", ["drift_l2_mean"], [task], compared):
        curves, entries = draw_norms_by_layer(plate, right, run, "b", task, compared, "drift_l2_mean")
        curves.set_title(f"(b) drift, {shorten_middle(task_title(task))}")
        changes = _annotate_drift_changes(plate, curves, run, task, calibrated)
        band = "mean over samples, with 10 % to 90 % quantiles; the head has its own panel."
        caption += [
            f"(b) Drift by layer on task {task_title(task)}: {band}",
            exhibit.sample_count_sentence(run.layers(task)),
            *changes,
        ]
    scores, bars = _draw_score_bars(plate, bottom.subplots(), run, options)
    add_legend(plate.figure, {**bars, **entries})
    lead = "Feature drift after merging and after calibration."
    return plate.finish(lead, *caption, *scores, exhibit.ROUNDED)


def _draw_score_bars(
    plate: PaperFigure, axes: Axes, run: DriftRun, options: exhibit.ExhibitOptions
) -> tuple[list[str], dict[str, Artist]]:
    """Draw the score of every task as bars; return caption sentences and legend entries."""
    tasks, compared = options.tasks_of(run), options.compared_variants(run)
    shown = [name for name in (*run.variants, "expert") if name in ("base", *compared, "expert")]
    metrics = {task: metric for task, metric in main_metrics(run).items() if metric.is_averaged}
    scored = [task for task in tasks if task in metrics]
    if not scored:
        missing = "no task has a score to show; `driftlens analyze RUN` adds it"
        plate.note_missing_panel(axes, "(c) accuracy by task", missing)
        return [], {}
    entries: dict[str, Artist] = {}
    width = 0.8 / len(shown)
    counts: set[int] = set()
    for place, variant in enumerate(shown):
        scores = [variant_score(run, task, variant, metrics[task]) for task in scored]
        ends = {name: [getattr(score, name) for score in scores] for name in ("value", "low", "high")}
        where = np.arange(len(scored)) + (place - (len(shown) - 1) / 2) * width
        looks = {
            "color": variant_colour(run, variant),
            "hatch": variant_hatch(run, variant),
            "edgecolor": "white",
        }
        # matplotlib needs a height; a missing score has a bar of 0 and no whisker.
        entries[variant_title(variant)] = axes.bar(where, np.nan_to_num(ends["value"]), width, linewidth=0, **looks)
        axes.vlines(where, ends["low"], ends["high"], color="#222222", linewidth=rcParams["axes.linewidth"])
        counts |= {score.n for score in scores if score.n}
        for quantity, name in (("accuracy", "value"), ("ci_low", "low"), ("ci_high", "high")):
            plate.record("c", run, quantity, ends[name], task=scored, variant=variant)
    axes.set_xticks(range(len(scored)), [shorten_middle(task_title(task), 11) for task in scored])
    if len(scored) > 6:
        axes.tick_params(axis="x", rotation=30)
    others = sorted({metric.title for task, metric in metrics.items() if task in scored})
    axes.set_title(f"(c) {', '.join(others)} by task")
    # Correlations may be negative.
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    format_percent_axis(axes.yaxis)
    about = (
        f"(c) {', '.join(others)} on {count_range(counts)} test samples per task" if counts else "(c) Scores by task"
    )
    return [f"{about}; whiskers: 95 % intervals."], entries


def _annotate_drift_changes(
    plate: PaperFigure, axes: Axes, run: DriftRun, task: str, calibrated: Sequence[str]
) -> list[str]:
    """Write the changes of final drift from the merged model into panel (b); return them as a caption sentence."""
    shown, sentences = [], []
    start = run.value("drift_l2_mean", task=task, variant="merged") if "merged" in run.variants else 0.0
    for variant in calibrated:
        end = run.value("drift_l2_mean", task=task, variant=variant)
        if math.isnan(start + end) or start == 0:
            continue
        change, percent = end - start, 100 * (end - start) / start
        key = {"task": task, "variant": variant, "layer": run.layer_index("final")}
        plate.record("b", run, "change of final drift_l2_mean", change, **key)
        plate.record("b", run, "change of final drift_l2_mean, percent", percent, **key)
        whose = f"{shorten_middle(variant_title(variant))}: " if len(calibrated) > 1 else ""
        shown.append(typeset_signs(f"{whose}{percent:+.0f} % ({change:+.2f})"))
        ends = f"{format_number(start)} become {format_number(end)}"
        sentences.append(typeset_signs(f"{whose}At the final layer {ends}, {percent:+.1f} % ({change:+.2f})."))
    if shown:
        axes.set_ylim(top=(1.25 + 0.1 * len(shown)) * axes.get_ylim()[1])  # room for the box
        box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#888888"}
        text = axes.text(0.04, 0.95, "\n".join(["final layer:", *shown]), va="top", transform=axes.transAxes)
        text.set_bbox({**box, "linewidth": rcParams["axes.linewidth"]})
    return sentences


@exhibit.figure("scatter-grid", title="Matched features of every task")
def _draw_scatter_grid(runs: Sequence[DriftRun], options: exhibit.ExhibitOptions) -> exhibit.ExhibitResult:
    """Draw 2-D feature projections of all tasks: merged features above, calibrated ones below."""
    run, tasks, layer = runs[0], options.tasks_of(runs[0]), options.layer
    calibrated = options.calibrated_of(run)
    variants, shown = ["merged", *calibrated], ["merged", *(calibrated or [None])]
    is_many = len(tasks) > 4 and not calibrated
    shown = shown[:1] if is_many else shown
    most = 3 if options.is_single_column else 4 if len(tasks) <= 12 else 5
    across = min(most, max(len(tasks), 2))
    # A cell is a square with its title or its cosine; the panels of a single task form a row.
    across, down = (len(shown), 1) if len(tasks) == 1 else (across, len(shown))
    rows = down * max(1, math.ceil(len(tasks) / across))
    plate = PaperFigure([run], options, rows * (options.width / across + 0.02 * options.width))
    if is_many:  # a frame below every task would say nothing but this
        plate.record_missing("calibrated features", f"`{CALIBRATE}` adds them")
    cells = plate.figure.subplots(rows, across, squeeze=False)
    layouts = []
    for place, task in enumerate(tasks):
        layout = _load_projection(run, task, variants, layer, options.method)
        layouts += [layout] if isinstance(layout, TaskProjection) else []
        top = down * (place // across)
        task_cells = cells[0] if down == 1 else cells[top : top + down, place % across]
        for axes, variant in zip(task_cells, shown, strict=True):
            _draw_projection_panel(plate, axes, run, layout, variant, task, layer)
        task_cells[0].set_title(shorten_middle(task_title(task)), loc="center")
    for axes in cells.ravel():
        if not axes.has_data() and not axes.texts:
            axes.set_axis_off()
    entries = {
        variant_title(name): Line2D([], [], linestyle="", **marker_style(run, name)) for name in ["expert", *variants]
    }
    add_legend(plate.figure, entries)
    where = "the final layer" if layer == "final" else run.layer_name(run.layer_index(layer))
    start = f"Features of every task at {where}, matched by sample: merged above, calibrated below."
    sentences = _projection_sentences(layouts, exhibit.sample_count_sentence(run.layers(layer=layer)))
    return plate.finish(start, *sentences)


def _projection_sentences(layouts: Sequence[TaskProjection], counts: str) -> Iterator[str]:
    if layouts:
        methods = " or ".join(dict.fromkeys(layout.method for layout in layouts))
        yield (
            f"Each task has its own joint layout of all variants ({methods} of L2-normalised features): distances "
            "compare within a task, not across tasks."
        )
        yield "Below each panel, the mean cosine to the expert's feature, rounded."
    yield counts
    trust = "; ".join(f"{task_title(layout.task)}: {layout.trust}" for layout in layouts if layout.trust)
    yield f"Trustworthiness of the planes: {trust}." if trust else ""
    for layout in layouts:
        yield from layout.notes


@dataclass(frozen=True)
class TaskProjection:
    """The 2-D projection of one task's features: coordinates by variant and sample, and trustworthiness."""

    task: str
    rows: pd.DataFrame
    method: str
    notes: tuple[str, ...]
    trust: str


def _load_projection(
    run: DriftRun, task: str, variants: Sequence[str], layer: int | str, method: str
) -> TaskProjection | str:
    """Load the joint 2-D projection of all variants on a task, or return the reason why there is none."""
    from driftlens.results.projection import project

    try:
        projection = project(run, task, ProjectionRequest(layer=layer, method=method), store_it=False)
    except (DataError, NumericsError) as error:
        return error.message
    rows = projection.frame[projection.frame["variant"].isin(["expert", *variants])]
    ids = stratified_subset(rows[rows["variant"] == "expert"], MOST, by=["label"])["sample_id"]
    drawn, there = format_count(len(ids)), format_count(int(projection.quality["n"].max()))
    thinning = f"{drawn} of {there} samples are drawn, evenly over classes"
    notes = [*([] if drawn == there else [thinning]), *projection.notes]
    quality = projection.quality[projection.quality["variant"].isin(variants)].dropna(subset="trustworthiness")
    trusted = zip(quality["variant"], quality["trustworthiness"], strict=True)
    return TaskProjection(
        task,
        rows[rows["sample_id"].isin(ids)],
        _METHODS[projection.method],
        tuple(f"{task_title(task)}: {note.removesuffix('.')}." for note in notes),
        ", ".join(f"{variant_title(variant)} {value:.2f}" for variant, value in trusted),
    )


def _draw_projection_panel(
    plate: PaperFigure,
    axes: Axes,
    run: DriftRun,
    layout: TaskProjection | str,
    variant: str | None,
    panel: str,
    layer: int | str,
) -> None:
    """Draw one panel of projected features, each sample joined to its expert point, with the mean cosine."""
    if variant is None:
        plate.note_missing_panel(axes, "calibrated features", f"`{CALIBRATE}` adds them")
    elif isinstance(layout, str):
        plate.note_missing_panel(axes, f"features of {variant_title(variant)}", layout)
    elif variant not in set(layout.rows["variant"]):
        plate.note_missing_panel(
            axes, f"features of {variant_title(variant)}", "the run has no features of this variant"
        )
    else:
        _draw_paired_points(plate, axes, run, layout, variant, panel)
        cosine = run.value("cos_mean", task=layout.task, variant=variant, layer=layer)
        axes.set_xlabel(f"mean cosine {cosine:.2f}" if not math.isnan(cosine) else "cosine not measured")
        key = {"task": layout.task, "variant": variant, "layer": run.layer_index(layer)}
        plate.record(panel, run, "cos_mean", cosine, **key)


def _draw_paired_points(
    plate: PaperFigure, axes: Axes, run: DriftRun, layout: TaskProjection, variant: str, panel: str
) -> None:
    points = {name: layout.rows[layout.rows["variant"] == name].set_index("sample_id") for name in ("expert", variant)}
    ids = points["expert"].index
    ends = [points[name].loc[ids, ["x", "y"]].to_numpy(dtype=float) for name in points]
    thin = 0.7 * rcParams["axes.linewidth"]
    axes.add_collection(LineCollection(np.stack(ends, axis=1), colors="#BBBBBB", linewidths=thin, zorder=1))
    for name, places in zip(points, ends, strict=True):
        (dots,) = axes.plot(*places.T, linestyle="", alpha=0.8, **marker_style(run, name))
        # Smaller, so that many points do not hide one another.
        dots.set_markersize((0.7 if len(ids) > 100 else 1.0) * dots.get_markersize())
        for column, quantity in enumerate(("x", "y")):
            key = {"task": layout.task, "variant": name, "sample_id": list(ids)}
            plate.record(panel, run, quantity, places[:, column], **key)
    # The same square window in all panels, without ticks: the axes of a layout have no unit.
    low, high = (layout.rows[["x", "y"]].agg(end).to_numpy(dtype=float) for end in ("min", "max"))
    middle, half = (low + high) / 2, 0.54 * max(float((high - low).max()), 1e-9)
    axes.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half))
    axes.set(aspect="equal", xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color="#BBBBBB")
