"""Charts of single samples: cosines before and after, features on a plane, flipped decisions, and score drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from driftlens.config.requests import ProjectionRequest
from driftlens.results.formatting import format_number, format_percent, typeset_signs
from driftlens.results.projection import Projection, project
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens.utils import variants
from driftlens.utils.errors import DataError, pluralize
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

# The variant that gains in cosine are counted from.
_BASELINE = "merged"


def _paired_cosines(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Return the cosine to the expert under baseline and variant, one row per task, variant and sample."""
    samples = picking.rows_at_layer(run, options, "samples", _BASELINE)
    rivals = [name for name in picking.chosen_variants(run, options) if name != _BASELINE]
    measured = samples[samples["cos"].notna()].rename(columns={"cos": "cosine"})
    before = measured[measured["variant"] == _BASELINE][["task", "sample_id", "cosine"]]
    after = measured[measured["variant"].isin(rivals)][["task", "variant", "sample_id", "label", "cosine"]]
    return after.merge(before.rename(columns={"cosine": "baseline cosine"}), on=["task", "sample_id"])


def _missing_pairs_message(run: DriftRun, options: ChartOptions) -> str | None:
    if len(_paired_cosines(run, options)):
        return None
    lack = picking.missing_data_message(run, options, "samples", ["cos"])
    return lack or f"needs a variant besides the merged model; choose one, or `{CALIBRATE}` adds one."


@chart(
    "sample-cosine",
    title="Cosine of every sample, before and after",
    section="features",
    rank=20,
    needs=("samples", ("cos",)),
    lacks=_missing_pairs_message,
    caption="Cosine to the expert's feature per diagnosis sample: merged model on x, other variants on y; dotted: "
    "no change. Text: each variant's mean gain.",
    hint="Above the line a sample is closer to the expert than with the merged model, below it farther. Samples at the "
    "lower left were far off before.",
)
def _draw_sample_cosines(run: DriftRun, options: ChartOptions) -> Drawn:
    rows = _paired_cosines(run, options)
    gains = rows.assign(**{"mean gain": rows["cosine"] - rows["baseline cosine"]})
    means = gains.groupby(["task", "variant"], sort=False)["mean gain"].mean().reset_index()
    drawn, thinned = picking.subsample_rows(rows, options, rows["variant"].nunique())
    tasks, rivals = list(rows["task"].unique()), rows["variant"].unique()
    baseline = variants.display_name(_BASELINE)
    grid = panels.panel_grid(
        [*map(words.escaped_label, tasks)],
        x_title=f"cosine, {words.escape_plotly(baseline)}",
        y_titles=[f"cosine, {words.variant_label(str(rivals[0])) if len(rivals) == 1 else 'others'}"],
        dark=options.dark,
    )
    brush = theme.VariantPlotter(run.roles, options.dark)
    for (task, variant), part in drawn.groupby(["task", "variant"], sort=False):
        trace = brush.scatter_trace(
            str(variant),
            part["baseline cosine"],
            part["cosine"],
            total=len(drawn),
            text=theme.escape_column(part["sample_id"]).to_numpy(),
            hovertemplate=f"%{{text}}<br>{words.escape_plotly(baseline)} %{{x:{theme.NUMBER}}}, "
            f"{words.variant_label(str(variant))} %{{y:{theme.NUMBER}}}",
        )
        grid.add(tasks.index(task), trace)
    # Axes start at 0, so that gains are not exaggerated; a cosine may be negative.
    low = min(0.0, float(rows[["baseline cosine", "cosine"]].min().min()))
    for panel, task in enumerate(tasks):
        grid.add_identity_line(panel, low, 1)
        # In the corner below the line where few points are.
        of_task = means[means["task"] == task]
        lines = [
            typeset_signs(f"{words.variant_label(variant)} {gain:+.3f}")
            for variant, gain in zip(of_task["variant"], of_task["mean gain"], strict=True)
        ]
        grid.annotate(
            panel,
            text="<br>".join(["mean gain", *lines]),
            **{"x": 0.98, "y": 0.03, "xanchor": "right", "yanchor": "bottom"},
            align="right",
            showarrow=False,
            font=theme.text_font(dark=options.dark),
            # Points may be under it.
            bgcolor=theme.with_opacity(brush.palette.surface, 0.8),
        )
    grid.update_layout(legend=theme.LARGE_MARKS)
    axis = {"range": [low - 0.03, 1.03], "tickformat": theme.TICK_NUMBER}
    grid.set_axes(x=axis, y=axis)
    spans = words.min_max_by_variant(means, "mean gain", lambda row: f"{row['mean gain']:+#.3g} ({row['task']})")
    return Drawn(
        grid.figure,
        alt=f"Mean gain in cosine of the {picking.feature_name(run, options)} over {baseline}: {spans}.",
        data=drawn.merge(means, on=["task", "variant"], how="left"),
        notes=(*thinned, *words.sample_count_notes(run, rows, over_tasks=False)),
    )


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


def _worst_chosen_task(run: DriftRun, options: ChartOptions) -> str:
    """Return the selected task on which the merged model has the largest mean drift."""
    return picking.worst_task(run, picking.chosen_tasks(run, options), "merged", options.layer)


def _variants_without_base(run: DriftRun, options: ChartOptions) -> list[str]:
    return [name for name in picking.chosen_variants(run, options) if name != "base"]


def _no_projection_message(run: DriftRun, options: ChartOptions) -> str | None:
    task = _worst_chosen_task(run, options)
    if not run.manifest.layers:
        return picking.missing_columns_message("layers", ["drift_l2_mean"])
    laid_out = _variants_without_base(run, options)
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
    presets=("standard", "calibration"),
    needs=("samples", ("drift_l2",)),
    lacks=_no_projection_message,
    caption="Features of one task's diagnosis samples, expert and variants side by side in one joint layout, with "
    "quality numbers below each panel.",
    hint="Look for clusters of the expert that the merged model blurs or shifts and the calibrated one restores. "
    "Positions compare between panels, not between tasks. Distances are approximate: trust the numbers below the "
    "panels. `driftlens view RUN` writes a page in which these samples move from model to model.",
)
def _draw_feature_panels(run: DriftRun, options: ChartOptions) -> Drawn:
    task = _worst_chosen_task(run, options)
    layout = project(run, task, ProjectionRequest(layer=options.layer), store_it=False)
    names = ["expert", *_variants_without_base(run, options)]
    rows = _add_drift_and_hover_text(run, task, layout.frame[layout.frame["variant"].isin(names)], options)
    drawn, thinned = picking.subsample_rows(rows, options, len(names))
    shares = [words.escape_plotly(format_percent(share)) for share in layout.explained_variance or ()]
    x_title, y_title = (f"PC {axis} ({share} of variance)" for axis, share in enumerate(shares, 1))
    grid = panels.panel_grid(
        [words.escaped_label(variants.display_name(variant), 22) for variant in names],
        x_title=x_title,
        y_titles=[y_title],
        columns=2,  # more would be too narrow for their words in a telephone's window
        height=240,
        below=42,  # for the lines of numbers
        dark=options.dark,
    )
    brush = theme.VariantPlotter(run.roles, options.dark)
    for panel, variant in enumerate(names):
        points = drawn[drawn["variant"] == variant]
        cloud = brush.scatter_trace(
            variant,
            points["x"],
            points["y"],
            total=len(drawn),
            text=[_hover_text(row) for row in points.to_dict("records")],
            hovertemplate="%{text}<extra></extra>",
        )
        grid.add(panel, cloud.update(showlegend=False))
        _annotate_panel(grid, panel, x_title, layout.quality, variant)
    # Coordinates have no unit, so ticks would mean nothing.
    grid.set_axes(x=_BARE, y=_BARE)
    # One scale for x and y, as distances in all directions compare.
    grid.update_layout(margin={"l": 48}, yaxis={"scaleanchor": "x"})
    quality = layout.quality[["variant", *_QUALITY]].rename(columns=_QUALITY)
    cosines = quality[quality["variant"].isin(names[1:])]
    listed = words.join_by_variant(zip(cosines["variant"], cosines["mean cosine"].map(format_number), strict=True))
    return Drawn(
        grid.figure,
        alt=f"{layout.method} layout of the {picking.feature_name(run, options)} on {task}. "
        f"Mean cosine to the expert: {listed}.",
        data=drawn.merge(quality, on="variant", how="left"),
        notes=(*thinned, *_projection_notes(run, options, task, layout)),
    )


def _add_drift_and_hover_text(run: DriftRun, task: str, rows: pd.DataFrame, options: ChartOptions) -> pd.DataFrame:
    drifts = run.samples(task, layer=options.layer)[["variant", "sample_id", "drift_l2"]]
    rows = rows.merge(drifts.rename(columns={"drift_l2": "drift"}), on=["variant", "sample_id"], how="left")
    if texts := run.texts(task):
        rows["text"] = rows["sample_id"].map(texts)
    return rows


def _hover_text(row: dict[str, Any]) -> str:
    lines = [
        words.escape_plotly(str(row["sample_id"])),
        "" if pd.isna(row["label"]) else f"class {words.escape_plotly(str(row['label']))}",
        "" if pd.isna(row["drift"]) else f"drift {format_number(float(row['drift']))}",
        words.escaped_label(row["text"], 80) if isinstance(row.get("text"), str) else "",
    ]
    return "<br>".join(filter(None, lines))


def _projection_notes(run: DriftRun, options: ChartOptions, task: str, layout: Projection) -> list[str]:
    notes = [f"Task {task}; {pluralize(int(layout.quality['n'].max()), 'diagnosis sample')}."]
    if len(picking.chosen_tasks(run, options)) > 1:
        notes.append("Shown: the chosen task with the largest drift; choose one task to see another.")
    if "base" in picking.chosen_variants(run, options):
        notes.append("The layout leaves out the base: the base has no panel.")
    return [*notes, *(f"{text}." for text in layout.notes), _INDICATIVE, *words.split_overlap_notes(run)]


def _annotate_panel(grid: panels.PanelGrid, panel: int, x_title: str, quality: pd.DataFrame, variant: str) -> None:
    """Write the variant's mean cosine, drift, neighbour overlap and trustworthiness below its panel."""
    row = quality[quality["variant"] == variant].iloc[0]
    # A line is no wider than a panel in a telephone's window.
    lines = [f"cosine {format_number(row['mean_cosine'])}, drift {format_number(row['mean_drift'])}"]
    lines = [] if variant == "expert" else [*lines, f"neighbours {format_number(row['knn_overlap'])}"]
    lines.append(f"trust {format_number(row['trustworthiness'])}")
    grid.set_axis("x", panel, title={"text": "<br>".join([x_title, *lines])})


_KEPT, _FLIPPED = "kept", "flipped"
# The outcome whose colour each decision has.
_LOOKS = {_FLIPPED: "wrong", _KEPT: "right"}
_FLIPPED_SHARE = "share flipped, all margins"


@chart(
    "flips",
    title="Which decisions flip",
    section="decisions",
    rank=40,
    presets=("standard", "calibration"),
    needs=("outputs", ("flipped", "margin")),
    also="heads of two classes or more",
    caption="Kept and flipped decisions on diagnosis samples, by the expert's margin (best minus second-best "
    "score). One panel per variant.",
    hint="Flips at small margins were close decisions; flips at large margins are samples the expert was sure of. "
    "Score scales differ between tasks: choose one task to compare.",
)
def _draw_decision_flips(run: DriftRun, options: ChartOptions) -> Drawn:
    samples = picking.measured_outputs(run, options, "flipped", "margin")
    # Without gaps nullable columns become plain ones, which numpy can mask.
    samples = samples.astype({"flipped": bool, "margin": float})
    rows = _margin_histogram(samples)
    names = list(rows["variant"].unique())
    grid = panels.panel_grid(
        [words.variant_label(variant) for variant in names],
        x_title="expert's margin (score units)",
        y_titles=["samples (count)"],
        columns=len(names) if len(names) <= 4 else 3,
        height=220,
        dark=options.dark,
    )
    brush = theme.VariantPlotter(run.roles, options.dark)
    for panel, variant in enumerate(names):
        part = rows[rows["variant"] == variant]
        texts = [
            f"margin {format_number(row['from'])} to {format_number(row['to'])}<br>{row[_FLIPPED]} of "
            f"{pluralize(row[_FLIPPED] + row[_KEPT], 'sample')} flipped"
            for row in part.to_dict("records")
        ]
        for outcome, colour in _LOOKS.items():
            bars = theme.bar(
                x=part["middle"].tolist(),
                y=part[outcome].tolist(),
                width=(part["to"] - part["from"]).tolist(),
                marker={"color": brush.palette.outcomes[colour]},
                text=texts,
                textposition="none",
                hovertemplate=f"%{{text}}<extra>{outcome}</extra>",
                **brush.legend_settings(outcome, outcome),
            )
            grid.add(panel, bars)
    grid.update_layout(barmode="stack", bargap=0)
    ticks = {"tickformat": theme.TICK_NUMBER}
    grid.set_axes(x=ticks, y={**ticks, "rangemode": "tozero"})
    shares = rows.groupby("variant", sort=False)[_FLIPPED_SHARE].first().map(format_percent)
    alt = f"Share of the expert's decisions that flip: {words.join_by_variant(shares.items())}."
    return Drawn(grid.figure, alt, rows, tuple(words.sample_count_notes(run, samples)))


def _margin_histogram(samples: pd.DataFrame) -> pd.DataFrame:
    """Count kept and flipped decisions by variant and expert margin, in bins of equal width."""
    top = float(samples["margin"].max()) or 1.0
    edges = np.linspace(0, top, 21)
    bins = []
    for variant, part in samples.groupby("variant", sort=False):
        outcomes = {_KEPT: ~part["flipped"], _FLIPPED: part["flipped"]}
        counts = {name: np.histogram(part.loc[mask, "margin"], edges)[0] for name, mask in outcomes.items()}
        ends = {"from": edges[:-1], "to": edges[1:], "middle": (edges[:-1] + edges[1:]) / 2}
        bins.append(pd.DataFrame({"variant": variant, **ends, **counts, _FLIPPED_SHARE: part["flipped"].mean()}))
    return pd.concat(bins, ignore_index=True)


_ESTIMATES = {
    "secant": ("score_gain_secant", "secant: exact along the drift"),
    "directional": ("score_gain", "directional: sampled along the drift"),
    "spectral": ("score_gain_spectral", "spectral: sampled, any direction"),
    "certified": ("score_gain_certified", "certified: holds everywhere"),
}
_ACTUAL, _USE = "score drift", "median share of the certified bound used"


def _score_drift_bounds(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Return score drift and its bound (Eq. 7) under each gain estimate, one row per task, variant and sample."""
    outputs = picking.measured_outputs(run, options, "score_drift_l2")
    final = run.samples(layer="final" if run.manifest.layers else None)
    drifts = final[["task", "variant", "sample_id", "drift_l2"]]
    rows = outputs.merge(drifts, on=["task", "variant", "sample_id"], how="left")
    # No value where models share the score map.
    apart = rows["score_map_mismatch"].fillna(0.0)
    bounds = {name: rows[column] * rows["drift_l2"] + apart for name, (column, _) in _ESTIMATES.items()}
    values = pd.DataFrame({_ACTUAL: rows["score_drift_l2"], **bounds}, dtype=float)
    return pd.concat([rows[["task", "variant", "sample_id", "label"]], values], axis=1)


@chart(
    "bound",
    title="Score drift and its bound",
    section="scores",
    rank=60,
    needs=("outputs", ("score_drift_l2", "score_gain")),
    also="heads",
    caption="Norm of the score drift of diagnosis samples against its bound; dotted: equality. The bound is the "
    "gain of the score map times the final drift, plus the mismatch of score maps; one panel per estimate "
    "of the gain.",
    hint="No point may be above the line of the certified bound; the distance below it shows how loose the bound is. "
    "Secant points are on the line where models share the score map, and on or below it elsewhere. Directional and "
    "spectral gains are sampled and guarantee nothing.",
)
def _draw_score_drift_bound(run: DriftRun, options: ChartOptions) -> Drawn:
    rows = _score_drift_bounds(run, options)
    share = rows[_ACTUAL] / rows["certified"].where(rows["certified"] > 0)
    rows = rows.assign(**{_USE: share.groupby(rows["variant"], sort=False).transform("median")})
    drawn, thinned = picking.subsample_rows(rows, options, len(_ESTIMATES) * rows["variant"].nunique())
    names = list(drawn["variant"].unique())
    grid = panels.panel_grid(
        [title for _, title in _ESTIMATES.values()],
        x_title="bound (score units, log)",
        y_titles=["norm of the score drift (score units, log)"],
        columns=2,
        height=230,
        dark=options.dark,
        legend=[words.variant_label(str(name)) for name in names],
    )
    brush = theme.VariantPlotter(run.roles, options.dark)
    texts = (theme.escape_column(drawn["task"]) + ", " + theme.escape_column(drawn["sample_id"])).to_numpy()
    # Without a drift or a finite bound, a sample has no place on logarithmic axes.
    drawable = {name: (drawn[name] > 0) & np.isfinite(drawn[name]) & (drawn[_ACTUAL] > 0) for name in _ESTIMATES}
    for panel, estimate in enumerate(_ESTIMATES):
        for variant in names:
            is_shown = ((drawn["variant"] == variant) & drawable[estimate]).to_numpy()
            trace = brush.scatter_trace(
                variant,
                drawn.loc[is_shown, estimate],
                drawn.loc[is_shown, _ACTUAL],
                total=len(drawn) * len(_ESTIMATES),
                text=texts[is_shown],
                hovertemplate=f"%{{text}}<br>score drift %{{y:{theme.NUMBER}}}, bound %{{x:{theme.NUMBER}}}",
            )
            grid.add(panel, trace)
    values = drawn[[_ACTUAL, *_ESTIMATES]].to_numpy()
    values = values[np.isfinite(values) & (values > 0)]
    reach = (float(values.min()), float(values.max())) if len(values) else (1.0, 10.0)
    for panel in range(len(_ESTIMATES)):
        grid.add_identity_line(panel, *reach)
    grid.update_layout(legend=theme.LARGE_MARKS)
    # Of two decades plotly else writes every digit, one over the other.
    step = "D2" if reach[1] < 1000 * reach[0] else 1
    axis = {"type": "log", "tickformat": theme.TICK_NUMBER, "minor": {"ticks": "outside"}, "dtick": step}
    grid.set_axes(x=axis, y=axis)
    notes = [*thinned, *words.sample_count_notes(run, rows, over_tasks=False)]
    if lost := sum(int((~is_drawn).sum()) for is_drawn in drawable.values()):
        why = "without a place on logarithmic axes (no drift or no finite bound)."
        notes.append(f"{pluralize(lost, 'point')} {why}")
    return Drawn(grid.figure, _bound_usage_sentence(rows), drawn, tuple(notes))


def _bound_usage_sentence(rows: pd.DataFrame) -> str:
    """Return a sentence on how many samples exceed the certified bound of the score drift, and how tight it is."""
    measured = rows[np.isfinite(rows["certified"]) & (rows["certified"] > 0)]
    # A relative tolerance for rounding, as drift and bound may be equal.
    over = int((measured[_ACTUAL] > measured["certified"] * (1 + 1e-6)).sum())
    medians = measured.drop_duplicates("variant").set_index("variant")[_USE]
    used = words.join_by_variant(medians.astype(float).map(format_percent).items())
    return (
        f"{pluralize(over, 'sample')} of {len(measured)} above the certified bound. Median share of it used: {used}."
    )
