"""Figures of drift: relative, by local mismatch and propagation, contributions, amplification, decisions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import SubFigure
from matplotlib.patches import Patch

from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens_reports.charts.theme import LIGHT
from driftlens_reports.charts.words import count_range, shorten_middle, task_title, variant_title
from driftlens_reports.paper.exhibit import ExhibitOptions, ExhibitResult, figure, sample_count_sentence
from driftlens_reports.paper.plate import (
    PaperFigure,
    add_legend,
    draw_guide_line,
    format_percent_axis,
    line_style,
    variant_colour,
)

# Width ratios of the body's panel and the head's: norms of the head are in another feature space.
_BODY_AND_HEAD = (1.0, 0.14)
_GAINS = (
    *("amplification", "amplification_low", "amplification_high"),
    *("jacobian_error", "random_gain_mean"),
)


def draw_norms_by_layer(
    plate: PaperFigure,
    part: SubFigure,
    run: DriftRun,
    panel: str,
    task: str,
    variants: Sequence[str],
    column: str,
) -> tuple[Axes, dict[str, Artist]]:
    """Draw a drift norm by layer, one line per variant, with the head in its own narrow panel.

    Return the body's axes, and the legend's entries.
    """
    body, head = part.subplots(1, 2, width_ratios=_BODY_AND_HEAD)
    entries: dict[str, Artist] = {}
    heads = {layer.index for layer in run.manifest.layers if layer.role == "head"}
    band = ("drift_l2_q10", "drift_l2_q90") if column == "drift_l2_mean" else ()
    for variant in variants:
        rows = run.layers(task, variant).sort_values("layer")
        for axes, chosen in ((body, ~rows["layer"].isin(heads)), (head, rows["layer"].isin(heads))):
            layers, values = rows.loc[chosen, "layer"], rows.loc[chosen, column].astype(float)
            (line,) = axes.plot(layers, values, **line_style(run, variant))
            entries.setdefault(variant_title(variant), line)
            if band:
                low, high = (rows.loc[chosen, end].astype(float) for end in band)
                if axes is body:
                    axes.fill_between(layers, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
                else:
                    # The head is one layer, so its band is a line.
                    axes.vlines(layers, low, high, color=line.get_color(), alpha=0.5)
        for quantity in (column, *band):
            key = {"task": task, "variant": variant, "layer": rows["layer"].to_numpy()}
            plate.record(panel, run, quantity, rows[quantity], **key)
    for axes in (body, head):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
    _label_layer_axis(run, body, [layer.index for layer in run.manifest.layers if layer.role != "head"])
    head.set(xticks=sorted(heads), xlim=(max(heads) - 0.5, max(heads) + 0.5) if heads else (0, 1))
    head.set_title("head", fontsize=rcParams["xtick.labelsize"])
    return body, entries


def _label_layer_axis(run: DriftRun, axes: Axes, layers: Sequence[int]) -> None:
    """Label the layer axis with at most eight layer indices."""
    step = -(-len(layers) // 8) or 1
    axes.set_xticks(layers[::step])
    axes.set_xlabel("layer")


@figure("drift", title="Relative drift by task and layer")
def _draw_drift_heatmaps(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    run, tasks, variants = runs[0], options.tasks_of(runs[0]), options.compared_variants(runs[0])
    lead = (
        "Drift relative to the expert's feature norm (ratios of sums over samples) by task and layer, one panel per "
        "variant on one colour scale."
    )
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
            plate.record("a", run, "drift_rel", of_task, task=task, variant=variant, layer=layers)
    for axes in cells[-1]:
        _label_layer_axis(run, axes, layers)
    bar = plate.figure.colorbar(mesh, ax=cells, label="relative drift", pad=0.02)
    format_percent_axis(bar.ax.yaxis)
    gap = "Grey: not measured." if rows["drift_rel"].isna().any() else ""
    return plate.finish(lead, gap, sample_count_sentence(rows))


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
    (line,) = axes.plot(rows["layer"], rows[column].astype(float), **line_style(run, variant))
    layers = rows["layer"].to_numpy()
    plate.record(panel, run, column, rows[column], task=task, variant=variant, layer=layers)
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
            _label_layer_axis(run, axes, [layer.index for layer in run.manifest.layers])
        else:
            axes, drawn = draw_norms_by_layer(plate, part, run, panel, task, variants, column)
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
    panels = plate.figure.subplots(len(variants), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for letter, axes, variant in zip("abcdefgh", panels, variants, strict=False):
        _draw_share_bars(plate, axes, run, letter, task, variant)
        axes.set_title(f"({letter}) {shorten_middle(variant_title(variant), 28)}")
    entries = {
        "carried by Jacobians": Patch(facecolor="#777777"),
        "swapping prefixes": Patch(facecolor="white", edgecolor="#777777", hatch="////"),
        "remainder": Patch(facecolor="white", edgecolor="#222222", hatch="xxxx"),
    }
    add_legend(plate.figure, entries)
    shown = run.layers(task)
    has_intervals = shown.loc[shown["variant"].isin(variants), "final_share_low"].notna().any()
    return plate.finish(
        lead,
        f"Task: {task_title(task)}. Solid: propagated by path-averaged Jacobians; they sum to 100 % with the remainder "
        "R. Hatched: by swapping model prefixes; they sum to 100 %.",
        "Whiskers: 95 % bootstrap intervals over the samples with Jacobians." if has_intervals else "",
        sample_count_sentence(shown),
        _jacobian_samples_sentence(shown),
    )


def _draw_share_bars(plate: PaperFigure, axes: Axes, run: DriftRun, panel: str, task: str, variant: str) -> None:
    rows = run.layers(task, variant).sort_values("layer")
    layers, colour = rows["layer"].to_numpy(), variant_colour(run, variant)
    carried, swapped = (rows[name].astype(float).to_numpy() for name in ("final_share", "prefix_share"))
    axes.bar(layers - 0.2, np.nan_to_num(carried), 0.38, color=colour)
    axes.bar(layers + 0.2, np.nan_to_num(swapped), 0.38, facecolor="white", edgecolor=colour, hatch="////")
    remainder = rows["remainder_share"].dropna().astype(float)
    # The remainder has a bar after the last layer.
    place = int(layers.max()) + 1
    for value in remainder:
        axes.bar([place], [value], 0.38, facecolor="white", edgecolor="#222222", hatch="xxxx")
        plate.record(panel, run, "remainder_share", value, task=task, variant=variant, layer=place - 1)
    low, high = (rows[f"final_share_{end}"].astype(float) for end in ("low", "high"))
    axes.vlines(layers - 0.2, low, high, color="#222222", linewidth=rcParams["axes.linewidth"])
    key = {"task": task, "variant": variant, "layer": layers}
    for quantity in ("final_share", "final_share_low", "final_share_high", "prefix_share"):
        plate.record(panel, run, quantity, rows[quantity], **key)
    draw_guide_line(axes, 0)
    _label_layer_axis(run, axes, list(layers))
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
    axes = plate.figure.subplots()
    entries: dict[str, Artist] = {}
    for variant in variants:
        entries[variant_title(variant)] = _draw_layer_curve(plate, axes, run, "a", task, variant, "amplification")
        rows, style = run.layers(task, variant).sort_values("layer"), line_style(run, variant)
        layers = rows["layer"].to_numpy()
        middle, low, high, error, gain = rows[[*_GAINS]].astype(float).to_numpy().T
        band = (middle * (1 - error), middle * (1 + error))
        axes.fill_between(layers, *band, color=style["color"], alpha=0.12, linewidth=0)
        axes.vlines(layers, low, high, color=style["color"])
        axes.plot(layers, gain, **{**style, "linestyle": "", "markerfacecolor": "none"})
        for quantity in _GAINS[1:]:
            plate.record("a", run, quantity, rows[quantity], task=task, variant=variant, layer=layers)
    draw_guide_line(axes, 1)
    axes.grid(axis="y")
    axes.set_ylabel("amplification")
    _label_layer_axis(run, axes, [layer.index for layer in run.manifest.layers])
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
        "certified": (LIGHT.sequential[1], certified & ~flipped),
        "kept without certificate": (LIGHT.sequential[3], ~certified & ~flipped),
        "flipped": (LIGHT.sequential[5], flipped),
    }
    panels = plate.figure.subplots(1, len(variants), sharey=True, squeeze=False)[0]
    for axes, variant in zip(panels, variants, strict=True):
        start, is_shown = np.zeros(len(tasks)), rows["variant"] == variant
        for outcome, (shade, mask) in shades.items():
            shares = mask[is_shown].groupby(rows["task"]).mean().reindex(tasks).astype(float)
            axes.barh(range(len(tasks)), shares.fillna(0), 0.7, start, color=shade)
            start = start + shares.fillna(0).to_numpy()
            plate.record("a", run, f"share {outcome}", shares, task=list(tasks), variant=variant)
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
