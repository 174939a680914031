"""Figures of features in the plane, and of drift: by layer, its parts and sources, amplification, decisions."""

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
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from driftlens.config.requests import ProjectionRequest
from driftlens.results.formatting import format_number, typeset_signs
from driftlens.results.measures import main_metrics, variant_score
from driftlens.results.projection import project, stratified_subset
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens.utils.errors import DataError, NumericsError, start_sentence
from driftlens_reports.charts.theme import LIGHT
from driftlens_reports.charts.words import (
    count_range,
    shorten_middle,
    task_title,
    variant_title,
)
from driftlens_reports.paper.exhibit import (
    ROUNDED,
    ExhibitOptions,
    ExhibitResult,
    figure,
    sample_count_sentence,
)
from driftlens_reports.paper.plate import (
    PaperFigure,
    add_legend,
    draw_guide_line,
    format_percent_axis,
    line_style,
    marker_style,
    variant_colour,
)

# Opacity of the second of two bars of one model.
_LIGHT = 0.4
# Samples drawn per panel; more would hide one another.
MOST = 400

_METHODS = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}
_GAINS = (
    *("amplification", "amplification_low", "amplification_high"),
    *("jacobian_error", "random_gain_mean"),
)


@figure("intro", title="Feature drift before and after calibration")
def _draw_intro_figure(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
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
    caption: list[str] = []
    if isinstance(layout, _TaskProjection):
        caption += [
            f"(a) Final features of task {task_title(task)}, L2-normalised and matched by sample, in one joint "
            f"layout of all variants ({layout.method}); below, the mean cosine to the expert's feature.",
            f"Trustworthiness of the plane: {layout.trust}." if layout.trust else "",
            *layout.notes,
        ]
    entries: dict[str, Artist] = {}
    if not plate.lacks(right, "(b) drift by layer", run, "layers", ["drift_l2_mean"], [task], compared):
        curves, entries = _draw_norms_by_layer(plate, right, run, "b", task, compared, "drift_l2_mean")
        curves.set_title(f"(b) drift, {shorten_middle(task_title(task))}")
        caption += [
            f"(b) Drift by layer on task {task_title(task)}: mean over samples, with 10 % to 90 % quantiles; the head "
            "has its own panel.",
            sample_count_sentence(run.layers(task)),
            *_annotate_drift_changes(plate, curves, run, task, calibrated),
        ]
    scores, bars = _draw_score_bars(plate, bottom.subplots(), run, options)
    add_legend(plate.figure, {**bars, **entries})
    return plate.finish(
        "Feature drift before and after calibration: (a) final features, (b) drift by layer, (c) scores.",
        *caption,
        *scores,
        ROUNDED,
    )


def _draw_score_bars(
    plate: PaperFigure, axes: Axes, run: DriftRun, options: ExhibitOptions
) -> tuple[list[str], dict[str, Artist]]:
    """Draw the score of every task as bars; return caption sentences and legend entries."""
    tasks, compared = options.tasks_of(run), options.compared_variants(run)
    shown = [name for name in (*run.variants, "expert") if name in ("base", *compared, "expert")]
    main = main_metrics(run)
    metrics = {task: main[task] for task in tasks if task in main and main[task].is_averaged}
    if not metrics:
        missing = "no task has a score to show; `driftlens analyze RUN` adds it"
        plate.note_missing_panel(axes, "(c) accuracy by task", missing)
        return [], {}
    entries: dict[str, Artist] = {}
    width = 0.8 / len(shown)
    counts: set[int] = set()
    for place, variant in enumerate(shown):
        scores = [variant_score(run, task, variant, metric) for task, metric in metrics.items()]
        ends = {name: [getattr(score, name) for score in scores] for name in ("value", "low", "high")}
        where = np.arange(len(metrics)) + (place - (len(shown) - 1) / 2) * width
        # matplotlib needs a height; a missing score has a bar of 0 and no whisker.
        entries[variant_title(variant)] = axes.bar(
            where, np.nan_to_num(ends["value"]), 0.92 * width, color=variant_colour(run.roles, variant)
        )
        axes.vlines(where, ends["low"], ends["high"], color="#222222", linewidth=rcParams["axes.linewidth"])
        counts |= {score.n for score in scores if score.n}
        values = {"accuracy": ends["value"], "ci_low": ends["low"], "ci_high": ends["high"]}
        plate.record("c", run, values, task=[*metrics], variant=variant)
    slanted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(metrics) > 6 else {}
    axes.set_xticks(range(len(metrics)), [shorten_middle(task_title(task), 14) for task in metrics], **slanted)
    quantities = ", ".join(sorted({metric.title for metric in metrics.values()}))
    axes.set_title(f"(c) {quantities} by task")
    # Correlations may be negative.
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    format_percent_axis(axes.yaxis)
    about = f"(c) {quantities} on {count_range(counts)} test samples per task" if counts else "(c) Scores by task"
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
        changes = {"change of final drift_l2_mean": change, "change of final drift_l2_mean, percent": percent}
        plate.record("b", run, changes, task=task, variant=variant, layer=run.layer_index("final"))
        whose = f"{shorten_middle(variant_title(variant))}: " if len(calibrated) > 1 else ""
        shown.append(typeset_signs(f"{whose}{percent:+.0f} % ({change:+.2f})"))
        ends = f"{format_number(start)} become {format_number(end)}"
        sentences.append(typeset_signs(f"{whose}At the final layer {ends}, {percent:+.1f} % ({change:+.2f})."))
    if shown:
        axes.set_ylim(top=(1.25 + 0.1 * len(shown)) * axes.get_ylim()[1])  # room for the box
        box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#888888"}
        box["linewidth"] = rcParams["axes.linewidth"]
        axes.text(0.04, 0.95, "\n".join(["final layer:", *shown]), va="top", transform=axes.transAxes, bbox=box)
    return sentences


@figure("scatter-grid", title="Matched features of every task")
def _draw_scatter_grid(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
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
        layouts += [layout] if isinstance(layout, _TaskProjection) else []
        top = down * (place // across)
        task_cells = cells[0] if down == 1 else cells[top : top + down, place % across]
        for axes, variant in zip(task_cells, shown, strict=True):
            _draw_projection_panel(plate, axes, run, layout, variant, task, layer)
        task_cells[0].set_title(shorten_middle(task_title(task)), loc="center")
    for axes in cells.ravel():
        if not axes.has_data() and not axes.texts:
            axes.set_axis_off()
    entries = {
        variant_title(name): Line2D([], [], linestyle="", **marker_style(run.roles, name))
        for name in ["expert", *variants]
    }
    add_legend(plate.figure, entries)
    where = "the final layer" if layer == "final" else run.layer_name(run.layer_index(layer))
    lead = f"Features of every task at {where}, matched by sample: merged above, calibrated below."
    counts = sample_count_sentence(run.layers(layer=layer))
    return plate.finish(lead, *_projection_sentences(layouts, counts))


def _projection_sentences(layouts: Sequence[_TaskProjection], counts: str) -> Iterator[str]:
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
class _TaskProjection:
    """The 2-D projection of one task's features: coordinates by variant and sample, and trustworthiness."""

    task: str
    rows: pd.DataFrame
    method: str
    notes: tuple[str, ...]
    trust: str


def _load_projection(
    run: DriftRun, task: str, variants: Sequence[str], layer: int | str, method: str
) -> _TaskProjection | str:
    """Load the joint 2-D projection of all variants on a task, or return the reason why there is none."""
    try:
        projection = project(run, task, ProjectionRequest(layer=layer, method=method), store_it=False)
    except (DataError, NumericsError) as error:
        return error.message
    rows = projection.frame[projection.frame["variant"].isin(["expert", *variants])]
    ids = stratified_subset(rows[rows["variant"] == "expert"], MOST, by=["label"])["sample_id"]
    drawn, there = len(ids), int(projection.quality["n"].max())
    thinning = f"{drawn:,} of {there:,} samples are drawn, evenly over classes"
    notes = [*([] if drawn == there else [thinning]), *projection.notes]
    quality = projection.quality[projection.quality["variant"].isin(variants)].dropna(subset="trustworthiness")
    trusted = zip(quality["variant"], quality["trustworthiness"], strict=True)
    return _TaskProjection(
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
    layout: _TaskProjection | str,
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
        plate.record(panel, run, {"cos_mean": cosine}, **key)


def _draw_paired_points(
    plate: PaperFigure, axes: Axes, run: DriftRun, layout: _TaskProjection, variant: str, panel: str
) -> None:
    points = {name: layout.rows[layout.rows["variant"] == name].set_index("sample_id") for name in ("expert", variant)}
    ids = points["expert"].index
    ends = [points[name].loc[ids, ["x", "y"]].to_numpy(dtype=float) for name in points]
    thin = 0.7 * rcParams["axes.linewidth"]
    axes.add_collection(LineCollection(np.stack(ends, axis=1), colors="#BBBBBB", linewidths=thin, zorder=1))
    for name, places in zip(points, ends, strict=True):
        (dots,) = axes.plot(*places.T, linestyle="", alpha=0.8, **marker_style(run.roles, name))
        # Smaller, so that many points do not hide one another.
        dots.set_markersize((0.7 if len(ids) > 100 else 1.0) * dots.get_markersize())
        x, y = places.T
        plate.record(panel, run, {"x": x, "y": y}, task=layout.task, variant=name, sample_id=list(ids))
    # The same square window in all panels, without ticks: the axes of a layout have no unit.
    low, high = (layout.rows[["x", "y"]].agg(end).to_numpy(dtype=float) for end in ("min", "max"))
    middle, half = (low + high) / 2, 0.54 * max(float((high - low).max()), 1e-9)
    axes.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half))
    axes.set(aspect="equal", xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color="#BBBBBB")


def _draw_norms_by_layer(
    plate: PaperFigure,
    part: SubFigure,
    run: DriftRun,
    panel: str,
    task: str,
    variants: Sequence[str],
    column: str,
) -> tuple[Axes, dict[str, Artist]]:
    """Draw a drift norm by layer, with the head in its own panel; return the body's axes and legend entries."""
    # Norms of the head are in another feature space.
    body, head = part.subplots(1, 2, width_ratios=(1.0, 0.14))
    entries: dict[str, Artist] = {}
    heads = {layer.index for layer in run.manifest.layers if layer.role == "head"}
    band = ("drift_l2_q10", "drift_l2_q90") if column == "drift_l2_mean" else ()
    for variant in variants:
        rows = run.layers(task, variant).sort_values("layer")
        for axes, chosen in ((body, ~rows["layer"].isin(heads)), (head, rows["layer"].isin(heads))):
            layers, values = rows.loc[chosen, "layer"], rows.loc[chosen, column].astype(float)
            (line,) = axes.plot(layers, values, **line_style(run.roles, variant))
            entries.setdefault(variant_title(variant), line)
            if band:
                low, high = (rows.loc[chosen, end].astype(float) for end in band)
                if axes is body:
                    axes.fill_between(layers, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
                else:
                    # The head is one layer, so its band is a line.
                    axes.vlines(layers, low, high, color=line.get_color(), alpha=0.5)
        plate.record(panel, run, rows[[column, *band]], task=task, variant=variant, layer=rows["layer"].to_numpy())
    for axes in (body, head):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
    _label_layer_axis(body, [layer.index for layer in run.manifest.layers if layer.role != "head"])
    _finish_head_panel(head, sorted(heads))
    return body, entries


def _finish_head_panel(axes: Axes, heads: Sequence[int]) -> None:
    """Label the narrow panel of the head, whose values start at 0."""
    axes.set_ylim(bottom=0)
    axes.set(xticks=heads, xlim=(max(heads) - 0.5, max(heads) + 0.5) if heads else (0, 1))
    axes.set_title("head", fontsize=rcParams["xtick.labelsize"])


def _label_layer_axis(axes: Axes, layers: Sequence[int]) -> None:
    """Label the layer axis with at most eight layer indices."""
    step = -(-len(layers) // 8) or 1
    axes.set_xticks(layers[::step])
    axes.set_xlabel("layer")


@figure("drift", title="Relative drift by task and layer")
def _draw_drift_heatmaps(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    run, tasks, variants = runs[0], options.tasks_of(runs[0]), options.compared_variants(runs[0])
    lead = "Drift relative to the expert's feature norm, by task and layer, on one colour scale."
    across = 1 if options.is_single_column else max(len(variants), 1)
    down = -(-len(variants) // across) or 1
    plate = _new_figure(run, options, down * (0.7 + 0.2 * len(tasks)))
    if plate.lacks(plate.figure, "relative drift", run, "layers", ["drift_rel"], tasks, variants):
        return plate.finish(lead)
    rows = run.layers()
    rows = rows[rows["task"].isin(tasks) & rows["variant"].isin(variants)]
    # A colour scale needs some length, even without drift.
    top = max(float(rows["drift_rel"].max()), 1e-12)
    layers = [layer.index for layer in run.manifest.layers]
    cells = plate.figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    scale = LinearSegmentedColormap.from_list("drift", LIGHT.sequential)
    for axes, variant in zip(cells.ravel(), variants, strict=False):
        values = rows[rows["variant"] == variant].pivot(index="task", columns="layer", values="drift_rel")
        values = values.reindex(index=tasks, columns=layers).astype(float)
        # Masked cells show the background.
        axes.set_facecolor(LIGHT.gap)
        edges = np.arange(len(layers) + 1) + layers[0] - 0.5, np.arange(len(tasks) + 1) - 0.5
        mesh = axes.pcolormesh(*edges, np.ma.masked_invalid(values), cmap=scale, vmin=0, vmax=top)
        axes.set_title(shorten_middle(variant_title(variant)))
        axes.set_yticks(range(len(tasks)), [shorten_middle(task_title(task)) for task in tasks])
        # Reversed, with the first task on top.
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        for task, of_task in values.iterrows():
            plate.record("a", run, {"drift_rel": of_task}, task=task, variant=variant, layer=layers)
    for axes in cells[-1]:
        _label_layer_axis(axes, layers)
    bar = plate.figure.colorbar(mesh, ax=cells, label="relative drift", pad=0.02)
    format_percent_axis(bar.ax.yaxis)
    gap = "Grey: not measured." if rows["drift_rel"].isna().any() else ""
    return plate.finish(lead, "Ratios of sums over samples.", gap, sample_count_sentence(rows))


def _new_figure(run: DriftRun, options: ExhibitOptions, height: float) -> PaperFigure:
    """Create an empty figure; record that the calibration is missing if the run has none."""
    plate = PaperFigure([run], options, height)
    if not options.calibrated_of(run):
        plate.record_missing("the calibrated model", f"`{CALIBRATE}` adds it")
    return plate


def _draw_layer_curve(
    plate: PaperFigure, axes: Axes, run: DriftRun, panel: str, task: str, variant: str, column: str
) -> Artist:
    """Draw one column over the layers of a variant and record the plotted numbers."""
    rows = run.layers(task, variant).sort_values("layer")
    (line,) = axes.plot(rows["layer"], rows[column].astype(float), **line_style(run.roles, variant))
    plate.record(panel, run, rows[[column]], task=task, variant=variant, layer=rows["layer"].to_numpy())
    return line


@figure("decomposition", title="Local mismatch and propagation by layer")
def _draw_decomposition(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    run, task, variants = runs[0], options.task_of(runs[0]), options.compared_variants(runs[0])
    plate = _new_figure(run, options, options.width * (1.9 if options.is_single_column else 0.62))
    parts = plate.figure.subfigures(4, 1) if options.is_single_column else plate.figure.subfigures(2, 2).ravel()
    names = {
        "drift_l2_mean": "(a) drift |e|",
        "mismatch_l2_mean": "(b) local mismatch |m|",
        "propagation_l2_mean": "(c) propagation |p|",
        "cross_term": "(d) cross term",
    }
    entries: dict[str, Artist] = {}
    for part, panel, (column, name) in zip(parts, "abcd", names.items(), strict=True):
        if plate.lacks(part, name, run, "layers", [column], [task], variants):
            continue
        if column == "cross_term":
            axes = part.subplots()
            for variant in variants:
                _draw_layer_curve(plate, axes, run, panel, task, variant, column)
            draw_guide_line(axes, 0)
            axes.grid(axis="y")
            name += " 2⟨m, p⟩ / |e|²"
            _label_layer_axis(axes, [layer.index for layer in run.manifest.layers])
        else:
            axes, drawn = _draw_norms_by_layer(plate, part, run, panel, task, variants, column)
            entries |= drawn
        axes.set_title(name)
    add_legend(plate.figure, entries)
    return plate.finish(
        "Drift by layer, split into local mismatch and propagation (e = m + p); norms do not add up.",
        f"Task: {task_title(task)}. Means over samples; band in (a): 10 % to 90 % quantiles. The head has its own "
        "panel, as its outputs are in another space.",
        "(d) is a ratio of sums over samples: above 0 both parts add up, below 0 they cancel in part.",
        sample_count_sentence(run.layers(task)),
    )


@figure("contributions", title="Layers that the final drift comes from")
def _draw_contributions(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    """Draw the signed share of the final drift of each layer on one task, by both exact splits."""
    run, task, variants = runs[0], options.task_of(runs[0]), options.compared_variants(runs[0])
    lead = "Signed shares of the final drift by the layer whose local mismatch they come from."
    height = options.width * (0.55 if options.is_single_column else 0.3)
    plate = _new_figure(run, options, height * max(len(variants), 1))
    name = "shares of the final drift"
    if plate.lacks(plate.figure, name, run, "layers", ["final_share"], [task], variants):
        return plate.finish(lead)
    variants = plate.measured_variants(name, run, "final_share", task, variants)
    plate.figure.set_figheight(height * len(variants))
    panels = plate.figure.subplots(len(variants), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for letter, axes, variant in zip("abcdefgh", panels, variants, strict=False):
        _draw_share_bars(plate, axes, run, letter, task, variant)
        axes.set_title(f"({letter}) {shorten_middle(variant_title(variant), 28)}")
    entries = {"carried by Jacobians": Patch(facecolor="#777777")}
    shown = run.layers(task)
    measured = shown[shown["variant"].isin(variants)]
    text = "propagated by path-averaged Jacobians; they sum to 100 % with the remainder R."
    if measured["prefix_share"].notna().any():
        entries["swapping prefixes (light)"] = Patch(facecolor="#777777", alpha=_LIGHT)
        text = f"Dark: {text} Light: by swapping model prefixes; they sum to 100 %."
    else:
        text = start_sentence(text)
    add_legend(plate.figure, entries | {"remainder": Patch(facecolor="#222222")})
    has_intervals = measured["final_share_low"].notna().any()
    return plate.finish(
        lead,
        f"Task: {task_title(task)}. {text}",
        "Whiskers: 95 % bootstrap intervals over the samples with Jacobians." if has_intervals else "",
        sample_count_sentence(shown),
        _jacobian_samples_sentence(shown),
    )


def _draw_share_bars(plate: PaperFigure, axes: Axes, run: DriftRun, panel: str, task: str, variant: str) -> None:
    rows = run.layers(task, variant).sort_values("layer")
    layers, colour = rows["layer"].to_numpy(), variant_colour(run.roles, variant)
    carried, swapped = (rows[name].astype(float).to_numpy() for name in ("final_share", "prefix_share"))
    beside = 0.2 if np.isfinite(swapped).any() else 0.0
    axes.bar(layers - beside, np.nan_to_num(carried), 0.38, color=colour)
    axes.bar(layers + beside, np.nan_to_num(swapped), 0.38, color=colour, alpha=_LIGHT)
    remainder = rows["remainder_share"].dropna().astype(float)
    # The remainder has a bar after the last layer.
    place = int(layers.max()) + 1
    for value in remainder:
        axes.bar([place], [value], 0.38, color="#222222")
        plate.record(panel, run, {"remainder_share": value}, task=task, variant=variant, layer=place - 1)
    low, high = (rows[f"final_share_{end}"].astype(float) for end in ("low", "high"))
    axes.vlines(layers - beside, low, high, color="#222222", linewidth=rcParams["axes.linewidth"])
    shares = rows[["final_share", "final_share_low", "final_share_high", "prefix_share"]]
    plate.record(panel, run, shares, task=task, variant=variant, layer=layers)
    draw_guide_line(axes, 0)
    _label_layer_axis(axes, list(layers))
    axes.label_outer()
    axes.set_xticks([*axes.get_xticks(), place], [*(f"{tick:g}" for tick in axes.get_xticks()), "R"])
    format_percent_axis(axes.yaxis)


@figure("amplification", title="Growth of incoming drift by layer")
def _draw_amplification(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    run, task, variants = runs[0], options.task_of(runs[0]), options.compared_variants(runs[0])
    lead = "Norm of the propagated drift relative to the incoming drift. Above 1 drift grows."
    plate = _new_figure(run, options, options.width * (0.75 if options.is_single_column else 0.42))
    if plate.lacks(plate.figure, "amplification", run, "layers", ["amplification"], [task], variants):
        return plate.finish(lead)
    variants = plate.measured_variants("amplification", run, "amplification", task, variants)
    # The head maps into another space, so its gain has another scale.
    body, head = plate.figure.subplots(1, 2, width_ratios=(1.0, 0.1))
    entries: dict[str, Artist] = {}
    heads = [layer.index for layer in run.manifest.layers if layer.role == "head"]
    for variant in variants:
        rows, style = run.layers(task, variant).sort_values("layer"), line_style(run.roles, variant)
        for axes, chosen in ((body, ~rows["layer"].isin(heads)), (head, rows["layer"].isin(heads))):
            layers = rows.loc[chosen, "layer"].to_numpy()
            middle, low, high, error, gain = rows.loc[chosen, [*_GAINS]].astype(float).to_numpy().T
            (line,) = axes.plot(layers, middle, **style)
            entries.setdefault(variant_title(variant), line)
            axes.fill_between(layers, middle * (1 - error), middle * (1 + error), color=style["color"], alpha=0.12)
            axes.vlines(layers, low, high, color=style["color"])
            axes.plot(layers, gain, **{**style, "linestyle": "", "markerfacecolor": "none"})
        plate.record("a", run, rows[[*_GAINS]], task=task, variant=variant, layer=rows["layer"].to_numpy())
    draw_guide_line(body, 1)
    body.set_ylabel("amplification")
    _label_layer_axis(body, [layer.index for layer in run.manifest.layers if layer.role != "head"])
    _finish_head_panel(head, heads)
    for axes in (body, head):
        axes.grid(axis="y")
    entries["random directions"] = Line2D([], [], linestyle="", marker="s", color="#777777", markerfacecolor="none")
    add_legend(plate.figure, entries)
    shown = run.layers(task)
    there = shown[shown["variant"].isin(variants)].notna().any()
    jacobians = "Band: relative error of the path-averaged Jacobian; hollow: its mean gain on random directions."
    return plate.finish(
        lead,
        f"Task: {task_title(task)}. Ratios of sums over samples; the stem has no incoming drift.",
        jacobians if there["jacobian_error"] else "",
        "Whiskers: 95 % bootstrap intervals over the samples." if there["amplification_low"] else "",
        sample_count_sentence(shown),
        _jacobian_samples_sentence(shown),
    )


def _jacobian_samples_sentence(rows: pd.DataFrame) -> str:
    """Return a caption sentence on how many samples have Jacobians; empty if all have."""
    rows = rows[rows["jacobian_samples"].notna() & (rows["jacobian_samples"] != rows["n"])]
    if rows.empty:
        return ""
    return f"What needs a Jacobian: n = {count_range(rows['jacobian_samples'].astype(int))} of these samples."


@figure("output-drift", title="Certified, kept and flipped decisions")
def _draw_output_drift(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    """Draw the share of the expert's decisions that each variant keeps, a stacked bar per task."""
    run, tasks, variants = runs[0], options.tasks_of(runs[0]), options.compared_variants(runs[0])
    columns, name = ["flipped", "certified"], "certified, kept and flipped decisions"
    lead = "Decisions of the expert under drift: how many its margins certify, and how many flip."
    plate = _new_figure(run, options, 0.9 + 0.2 * len(tasks))
    if plate.lacks(plate.figure, name, run, "outputs", columns, tasks, variants):
        return plate.finish(lead)
    rows = run.outputs()
    rows = rows[rows[columns].notna().all(axis=1) & rows["task"].isin(tasks) & rows["variant"].isin(variants)]
    flipped, certified = (rows[name].astype(bool) for name in columns)
    shades = {
        "certified": (LIGHT.outcomes["right"], certified & ~flipped),
        "kept without certificate": (LIGHT.outcomes["repaired"], ~certified & ~flipped),
        "flipped": (LIGHT.outcomes["wrong"], flipped),
    }
    panels = plate.figure.subplots(1, len(variants), sharey=True, squeeze=False)[0]
    for axes, variant in zip(panels, variants, strict=True):
        start, is_shown = np.zeros(len(tasks)), rows["variant"] == variant
        for outcome, (shade, mask) in shades.items():
            shares = mask[is_shown].groupby(rows["task"]).mean().reindex(tasks).astype(float)
            axes.barh(range(len(tasks)), shares.fillna(0), 0.7, start, color=shade)
            start = start + shares.fillna(0).to_numpy()
            plate.record("a", run, {f"share {outcome}": shares}, task=list(tasks), variant=variant)
        axes.set_yticks(range(len(tasks)), [shorten_middle(task_title(task)) for task in tasks])
        axes.set(xlim=(0, 1), ylim=(len(tasks) - 0.5, -0.5))
        axes.set_title(shorten_middle(variant_title(variant)))
        format_percent_axis(axes.xaxis)
    add_legend(plate.figure, {outcome: Patch(facecolor=shade) for outcome, (shade, _) in shades.items()})
    return plate.finish(
        lead,
        "Certified: no score changes by half the expert's margin, so no flip is possible.",
        f"n = {count_range(rows.groupby(['task', 'variant']).size())} diagnosis samples per task.",
    )
