"""Charts of gains: the cosine of every sample before and after, and the score of repairs against their cost."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from driftlens.results.calibration_summary import arena_rows
from driftlens.results.formatting import signs
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens.utils import variants
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

# The variant that gains in cosine are counted from.
_BASELINE = "merged"


def _gain_in_words(row: pd.Series[Any]) -> str:
    return f"{row['mean gain']:+#.3g} ({row['task']})"


def _paired(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Return the baseline's cosine and the variant's cosine, a row per task, variant and sample."""
    samples = picking.rows_at(run, options, "samples", _BASELINE)
    rivals = [name for name in picking.chosen_variants(run, options) if name != _BASELINE]
    measured = samples[samples["cos"].notna()].rename(columns={"cos": "cosine"})
    before = measured[measured["variant"] == _BASELINE][["task", "sample_id", "cosine"]]
    after = measured[measured["variant"].isin(rivals)][["task", "variant", "sample_id", "label", "cosine"]]
    return after.merge(before.rename(columns={"cosine": "baseline cosine"}), on=["task", "sample_id"])


def _no_pairs(run: DriftRun, options: ChartOptions) -> str | None:
    if len(_paired(run, options)):
        return None
    if picking.rows_at(run, options, "samples")["cos"].isna().all():
        return picking.absent("samples", ["cos"])
    if any(name not in ("base", "expert", _BASELINE) for name in run.variants):
        return "needs a variant besides the merged model; choose another variant."
    return f"needs a variant besides the merged model; `{CALIBRATE}` adds one."


@chart(
    "sample-cosine",
    title="Cosine of every sample, before and after",
    section="features",
    rank=20,
    needs=("samples", ("cos",)),
    lacks=_no_pairs,
    caption="Cosine to the expert's feature per diagnosis sample, merged model on x and other variants on y, with the "
    "line of no change and each variant's mean gain, one panel per task.",
    hint="Above the line a sample is closer to the expert than with the merged model, below it farther. Samples at the "
    "lower left were far off before.",
)
def _sample_cosine(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw panels of points with the same axes."""
    rows = _paired(run, options)
    gains = rows.assign(**{"mean gain": rows["cosine"] - rows["baseline cosine"]})
    means = gains.groupby(["task", "variant"], sort=False)["mean gain"].mean().reset_index()
    drawn, thinned = picking.thinned_samples(rows, options, rows["variant"].nunique())
    tasks, rivals = list(rows["task"].unique()), rows["variant"].unique()
    baseline = variants.title(_BASELINE)
    grid = panels.panel_grid(
        [*map(words.label, tasks)],
        x_title=f"cosine, {words.literal(baseline)}",
        y_titles=[f"cosine, {words.shown(str(rivals[0])) if len(rivals) == 1 else 'others'}"],
        dark=options.dark,
    )
    brush = theme.Brush(run.variants, options.dark)
    for (task, variant), part in drawn.groupby(["task", "variant"], sort=False):
        trace = brush.cloud(
            str(variant),
            part["baseline cosine"],
            part["cosine"],
            total=len(drawn),
            text=theme.literal_column(part["sample_id"]).to_numpy(),
            hovertemplate=f"%{{text}}<br>{words.literal(baseline)} %{{x:{theme.NUMBER}}}, "
            f"{words.shown(str(variant))} %{{y:{theme.NUMBER}}}",
        )
        grid.add(tasks.index(task), trace)
    # Axes start at 0, so that gains are not exaggerated; a cosine may be negative.
    low = min(0.0, float(rows[["baseline cosine", "cosine"]].min().min()))
    for panel, task in enumerate(tasks):
        grid.add_identity(panel, low, 1)
        # In the corner below the line where few points are.
        of_task = means[means["task"] == task]
        pairs = zip(of_task["variant"], of_task["mean gain"], strict=True)
        lines = [signs(f"{words.shown(variant)} {gain:+.3f}") for variant, gain in pairs]
        grid.annotate(
            panel,
            text="<br>".join(["mean gain", *lines]),
            **{"x": 0.98, "y": 0.03, "xanchor": "right", "yanchor": "bottom"},
            align="right",
            showarrow=False,
            font=theme.ink(dark=options.dark),
            # Points may be under it.
            bgcolor=theme.faded(brush.palette.surface, 0.8),
        )
    grid.lay_out(legend=theme.LARGE_MARKS)
    reach = [low - 0.03, 1.03]
    axis = {"range": reach, "tickformat": theme.TICK_NUMBER}
    grid.set_axes(x=axis, y=axis)
    return Drawn(
        grid.figure,
        alt=f"Mean gain in cosine of the {picking.feature_name(run, options)} over {baseline}: "
        f"{words.spans(means, 'mean gain', _gain_in_words)}.",
        data=drawn.merge(means, on=["task", "variant"], how="left"),
        notes=(*thinned, *words.table_notes(run, rows, over_tasks=False)),
    )


def _repairs(run: DriftRun) -> pd.DataFrame:
    """Return rows of the base, the merged model, scored calibrations and the experts."""
    rows = pd.DataFrame(arena_rows(run))
    return rows[rows["score"].notna()]


def _lacks(run: DriftRun, options: ChartOptions) -> str | None:
    if len(run.manifest.calibrations) < 2:
        command = "driftlens sweep RUN --methods featcal,residual,surgery"
        return f"needs two calibrations of the run; `{command}` makes some."
    is_scored = _repairs(run)["method"].notna().sum() >= 2
    return None if is_scored else "needs scores of two calibrations; `driftlens analyze RUN` adds them."


@chart(
    "arena",
    title="Repairs: gain against cost",
    section="calibration",
    rank=5,
    presets=("calibration",),
    needs=("accuracy", ("value",)),
    lacks=_lacks,
    caption="Mean test score against calibration time on all samples, a point per calibration; whiskers: 95 % "
    "intervals over samples; rings need the task ID at inference; lines: base, merged model and experts.",
    hint="Upper left is better. Seconds: one run on one machine. A ring has one map per task, so it is not a single "
    "model.",
)
def _arena(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw score against seconds."""
    rows = _repairs(run)
    is_made = rows["method"].notna()
    points = rows[is_made]
    traces, brush = list[theme.Trace](), theme.Brush(run.variants, options.dark)
    # The middle of a logarithmic axis, from which names point inwards.
    middle = math.sqrt(points["seconds"].min() * points["seconds"].max())
    for index, row in points.iterrows():
        repair = points.loc[[index]]
        point = brush.line(
            variants.calibrated(str(row["model"])),
            repair["seconds"],
            repair["score"],
            (repair["low"], repair["high"]),
            marker_size=11,
            mode="markers+text",
            text=[words.label(str(row["model"]))],
            textposition="top right" if row["seconds"] <= middle else "top left",
            textfont=theme.ink(dark=options.dark),
            showlegend=False,
            hovertemplate="%{text}<br>%{y:.1%}, %{x:.3g} s",
        )
        ring = "circle-open" if row["task_id"] else "circle"
        traces.append(point.update(marker={"symbol": ring, "line": {"width": 2}}))
    figure = theme.themed_figure(*traces, height=420, dark=options.dark)
    # Sorted by score, so that names of close lines do not overlap.
    levels = rows[~is_made].sort_values("score").to_dict("records")
    for row, place in zip(levels, ("bottom right", "top left", "top right")[-len(levels) :], strict=True):
        part = "expert" if row["model"] == "experts" else str(row["model"])
        figure.add_hline(
            row["score"],
            line={"color": brush.look(part).colour, "width": 1, "dash": "dot"},
            annotation_text=words.label(str(row["model"])),
            annotation_font=theme.ink(dark=options.dark),
            annotation_position=place,
        )
    figure.update_xaxes(title_text="seconds of calibrating", type="log", dtick="D2", tickformat=",~g")
    low, high = float(rows["score"].min()), float(rows["score"].max())
    room = {"include": [low - 0.1 * (high - low), high + 0.1 * (high - low)]}  # for names next to lines
    figure.update_yaxes(
        title_text="mean score over tasks", tickformat=theme.TICK_SHARE, autorangeoptions=room
    )
    scores = "; ".join(
        f"{name} {score:.1%}" for name, score in zip(rows["model"], rows["score"], strict=True)
    )
    return Drawn(
        figure,
        alt=f"Mean score: {scores}. Calibrating took {points['seconds'].min():.3g} to {points['seconds'].max():.3g} s.",
        data=rows,
        notes=(f"{int(rows['n'].max())} test samples; one draw of calibration samples.",),
    )
