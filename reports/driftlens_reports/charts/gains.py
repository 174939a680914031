"""What variants gain: in cosine sample by sample, mean cosine against accuracy, and repairs against their cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.base import variants
from driftlens.base.intervals import Interval
from driftlens.base.metrics import title_of
from driftlens.findings.before_after import arena_rows
from driftlens.findings.frame import Finding, paired_by_task, pairing
from driftlens.findings.measures import SCORE, change, drift_changes, main_metrics
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

NO_RIVAL = f"needs a variant besides the baseline; `{CALIBRATE}` adds one."
_MOST_NAMES = 10
_COSINE, _ACCURACY = "cosine gain", "accuracy gain (points)"
_AXES, _ENDS = (("x", _COSINE), ("y", _ACCURACY)), ("", " low", " high")


def _extremes_in_words(rows: pd.DataFrame, column: str) -> str:
    """The smallest and the largest value of each variant, with their tasks."""
    return words.spans(rows, column, lambda row: f"{row[column]:+#.3g} ({row['task']})")


def _paired(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """One row per task, chosen variant and sample with the baseline's cosine beside the variant's own, of one layer."""
    samples = picking.rows_at(run, options, "samples", baseline=True)
    run.layers(variant=options.baseline)  # says which variants there are when this is none
    rivals = [name for name in picking.chosen_variants(run, options) if name != options.baseline]
    measured = samples[samples["cos"].notna()].rename(columns={"cos": "cosine"})
    before = measured[measured["variant"] == options.baseline][["task", "sample_id", "cosine"]]
    after = measured[measured["variant"].isin(rivals)][["task", "variant", "sample_id", "label", "cosine"]]
    return after.merge(before.rename(columns={"cosine": "baseline cosine"}), on=["task", "sample_id"])


def _no_pairs(run: DriftRun, options: ChartOptions) -> str | None:
    if len(_paired(run, options)):
        return None
    if picking.rows_at(run, options, "samples")["cos"].isna().all():
        return picking.absent("samples", ["cos"])
    if any(name not in ("base", "expert", options.baseline) for name in run.variants):
        return "needs a variant besides the baseline; choose another variant, or another baseline."
    return NO_RIVAL


@chart(
    "sample-cosine",
    title="Cosine of every sample, before and after",
    section="features",
    rank=20,
    per_sample=True,
    needs=("samples", ("cos",)),
    lacks=_no_pairs,
    caption="Cosine to the expert's feature for all diagnosis samples, the baseline's on x and the other variants' on "
    "y, with the line of no change and each variant's mean gain beside its symbol, one panel per task.",
    hint="Points above the line are closer to the expert than with the baseline. Look at the lower left: samples that "
    "were far off tell more than the mean, and those below the line got worse.",
)
def sample_cosine(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of points; all panels have the same axes."""
    rows = _paired(run, options)
    gains = rows.assign(**{"mean gain": rows["cosine"] - rows["baseline cosine"]})
    means = gains.groupby(["task", "variant"], sort=False)["mean gain"].mean().reset_index()
    drawn, thinned = picking.thinned_samples(rows, options, rows["variant"].nunique())
    tasks, rivals = list(rows["task"].unique()), rows["variant"].unique()
    baseline = variants.title(options.baseline)
    grid = panels.panel_grid(
        words.labels(tasks),
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
    low = min(0.0, float(rows[["baseline cosine", "cosine"]].min().min()))
    for panel, task in enumerate(tasks):
        grid.add_identity(panel, low, 1)
        # Each variant's mean gain beside its symbol, in the corner below the line where few points are.
        of_task = means[means["task"] == task]
        symbols = [(brush.look(variant).symbol, variant) for variant in of_task["variant"]]
        glyphs = [theme.GLYPHS.get(symbol, words.shown(variant)) for symbol, variant in symbols]
        gained = [f"{gain:+.3f}".replace("-", "\N{MINUS SIGN}") for gain in of_task["mean gain"]]
        lines = [f"{glyph} {gain}" for glyph, gain in zip(glyphs, gained, strict=True)]
        grid.annotate(
            panel,
            text="<br>".join(["mean gain", *lines]),
            **{"x": 0.98, "y": 0.03, "xanchor": "right", "yanchor": "bottom"},
            align="right",
            showarrow=False,
            font=theme.ink(dark=options.dark),
            # Points may lie below it all the same.
            bgcolor=theme.faded(brush.palette.surface, 0.8),
        )
    grid.lay_out(legend=theme.LARGE_MARKS)
    reach = [low - 0.03, 1.03]
    axis = {"range": reach, "tickformat": theme.TICK_NUMBER}
    grid.set_axes(x=axis, y=axis)
    return Drawn(
        grid.figure,
        alt=f"Mean gain in cosine of the {picking.feature_name(run, options)} over {baseline}: "
        f"{_extremes_in_words(means, 'mean gain')}.",
        data=drawn.merge(means, on=["task", "variant"], how="left"),
        notes=(*thinned, *words.table_notes(run, rows, over_tasks=False)),
    )


def _changes(run: DriftRun, options: ChartOptions) -> list[tuple[Interval, Finding]]:
    """Gain in cosine at the options' layer and in score, of each task and variant that has both."""
    both = []
    for task, variant in _paired(run, options)[["task", "variant"]].drop_duplicates().itertuples(index=False):
        pair = options.baseline, variant
        score = change(run, SCORE, task, pair)
        if score.about.kind == "share" and score.n:  # whatever the share of right answers is called
            changes = drift_changes(run, run, task, pair, column="cos", layer=options.layer)
            both += [(cosine.difference, score) for cosine in changes.values()]
    return both


def _no_gains(run: DriftRun, options: ChartOptions) -> str | None:
    return (
        None if _changes(run, options) else _no_pairs(run, options) or picking.absent("accuracy", ["value"])
    )


@chart(
    "gains",
    title="Cosine gain against gain in score",
    section="gains",
    rank=20,
    presets=("standard", "calibration"),
    needs=("samples", ("cos",)),
    lacks=_no_gains,
    caption="Mean gain in cosine to the expert over the diagnosis samples against that in test accuracy, or in another "
    "share of right answers by which a task is judged, both over the baseline, one point per task and variant with "
    "95 % intervals.",
    hint="Upper right: closer to the expert and more accurate. Cosine gain is a diagnostic, not an explanation of "
    "accuracy: tasks can gain accuracy at an unchanged cosine, and the reverse.",
)
def gains(run: DriftRun, options: ChartOptions) -> Drawn:
    """One cloud of labelled points per variant, with lines at no gain."""
    changes, rows = _changes(run, options), []
    for cosine, score in changes:
        points = score.scaled(100)
        rows.append((score.task, score.variant, cosine.n, *cosine.ends, points.n, *points.ends))
    cosines, scores = ([f"{name}{end}" for end in _ENDS] for name in (_COSINE, _ACCURACY))
    table = pd.DataFrame(rows, columns=["task", "variant", "n", *cosines, "test n", *scores])
    rows, scores = picking.ordered(table, run.tasks, run.variants), [score for _, score in changes]
    metrics = main_metrics(run)
    what = title_of(metrics[task] for task in rows["task"])
    names = [str(name) for name in rows["variant"].unique()]
    # Its points carry the names of tasks.
    labelled = ([name for name in names if variants.part_of(name) == "calibrated"] or names)[-1]
    rows["label"] = words.labels([str(task) for task in rows["task"]])
    is_named = rows.index.isin(_outermost(rows.loc[rows["variant"] == labelled, [_COSINE, _ACCURACY]]))
    columns = {f"{axis}{end.replace(' ', '_')}": f"{name}{end}" for axis, name in _AXES for end in _ENDS}
    crosses = pd.concat([rows[is_named], rows[~is_named]])[[*columns.values()]].set_axis([*columns], axis=1)
    beside = dict(zip(rows.index[is_named], places([*rows["label"][is_named]], crosses), strict=True))
    traces, brush = list[theme.Trace](), theme.Brush(run.variants, options.dark)
    for variant, part in rows.groupby("variant", sort=False):
        across, up = ((part[f"{name} low"], part[f"{name} high"]) for name in (_COSINE, _ACCURACY))
        colour = brush.look(str(variant)).colour
        cloud = brush.line(
            str(variant),
            part[_COSINE],
            part[_ACCURACY],
            up,
            error_x=theme.whiskers(part[_COSINE], *across, colour),
            marker_size=9,
            mode="markers+text" if variant == labelled else "markers",
            text=[label if row in beside else "" for row, label in part["label"].items()],
            textposition=[beside.get(row, "top center") for row in part.index],
            textfont=theme.ink(dark=options.dark),
            hovertext=[*part["label"]],
            hovertemplate="%{hovertext}<br>cosine %{x:+.3f}, score %{y:+.1f} points",
        )
        traces.append(cloud)
    baseline = words.literal(variants.title(options.baseline))
    titles = {
        "xaxis": f"gain in mean cosine over {baseline}",
        "yaxis": f"gain in {what} over {baseline} (points)",
    }
    axes = {
        name: {"title": {"text": title}, "tickformat": theme.TICK_NUMBER} for name, title in titles.items()
    }
    figure = theme.themed(*traces, height=460, dark=options.dark, **axes)
    line = {"color": theme.palette(options.dark).quiet, "width": 1}
    figure.add_hline(0, line=line, layer="below").add_vline(0, line=line, layer="below")
    return Drawn(
        figure,
        alt=f"Gain in cosine over {variants.title(options.baseline)}: {_extremes_in_words(rows, _COSINE)}. Gain in "
        f"{what} in points: {_extremes_in_words(rows, _ACCURACY)}.",
        data=rows.drop(columns="label").assign(metric=[metrics[task].name for task in rows["task"]]),
        notes=(
            f"{words.ranged(rows['n'], 'diagnosis sample')} "
            f"and {words.ranged(rows['test n'], 'test sample')} per task.",
            "Bars across: Student's 95 % interval of the mean gain in cosine.",
            f"Bars up: {pairing(paired_by_task(scores))}",
            *(
                [f"The {_MOST_NAMES} points farthest from the middle are named."]
                * (len(beside) < sum(rows["variant"] == labelled))
            ),
            *words.overlap_notes(run),
        ),
    )


def _outermost(points: pd.DataFrame) -> pd.Index[Any]:
    """The rows whose names are shown: those farthest from the middle, where names of all would hide one another."""
    away = (points - points.mean()) / points.std().replace(0, 1)
    return away.fillna(0).pow(2).sum(axis=1).nlargest(_MOST_NAMES).sort_index().index


def _repairs(run: DriftRun) -> pd.DataFrame:
    """Base, merged model, calibrations that were scored, experts."""
    rows = pd.DataFrame(arena_rows(run))
    return rows[rows["score"].notna()]


def _lacks(run: DriftRun, options: ChartOptions) -> str | None:
    if len(run.manifest.calibrations) < 2:
        command = "driftlens sweep RUN --methods featcal,residual,surgery"
        return f"needs two calibrations of the run; `{command}` makes some."
    is_scored = _repairs(run)["method"].notna().sum() >= 2
    return None if is_scored else "needs scores of two calibrations; `driftlens analyze RUN` adds them."


def _beside(points: pd.DataFrame) -> list[str]:
    """Where each point's name stands, as `places` says of a panel whose axes begin at the lowest ends."""
    seconds = points["seconds"].clip(lower=1e-9).map(math.log)
    ends = {"x": seconds, "x_low": seconds, "x_high": seconds}
    ends |= {"y": points["score"], "y_low": points["low"], "y_high": points["high"]}
    crosses = pd.DataFrame(ends, dtype=float)
    crosses = crosses - crosses.min()[["x"] * 3 + ["y_low"] * 3].fillna(crosses["y"].min()).to_numpy()
    return places([words.label(str(name)) for name in points["model"]], crosses)


def _ticks(seconds: pd.Series[float]) -> list[float]:
    """Round numbers around the values: 1, 2 and 5 of a power of ten, more of them where values are near each other."""
    positive = seconds[seconds > 0]
    if positive.empty:
        return []
    low, high = float(positive.min()), float(positive.max())
    if high < 5 * low:  # or none of them might lie between
        span = (high - low) / 5 or low / 10
        power = math.floor(math.log10(span))
        step = next(digit for digit in (1, 2, 5, 10) if span <= digit * 10**power)
        ends = (math.floor(low / step / 10**power) - 1, math.ceil(high / step / 10**power) + 2)
        return [float(f"{steps * step}e{power}") for steps in range(*ends) if steps > 0]
    first, last = (math.floor(math.log10(end)) for end in (low, high))
    digits = (1, 2, 5) if last - first < 3 else (1,)
    return [float(f"{digit}e{power}") for power in range(first - 1, last + 2) for digit in digits]


@chart(
    "arena",
    title="Repairs: gain against cost",
    section="calibration",
    rank=5,
    presets=("calibration",),
    needs=("accuracy", ("value",)),
    lacks=_lacks,
    caption="Mean score over tasks on test samples against seconds of calibrating (logarithmic), a point per "
    "calibration; whiskers are 95 % intervals over samples; rings must know the task of an input; lines are base, "
    "merged model and experts.",
    hint="Upper left is better. Seconds are those of one run on one machine. A ring is no single model: for every task "
    "it has a map of its own.",
)
def arena(run: DriftRun, options: ChartOptions) -> Drawn:
    """One panel."""
    rows = _repairs(run)
    is_made = rows["method"].notna()
    points = rows[is_made]
    traces, brush = list[theme.Trace](), theme.Brush(run.variants, options.dark)
    for (index, row), beside in zip(points.iterrows(), _beside(points), strict=True):
        repair = points.loc[[index]]
        point = brush.line(
            variants.calibrated(str(row["model"])),
            repair["seconds"],
            repair["score"],
            (repair["low"], repair["high"]),
            marker_size=11,
            mode="markers+text",
            text=[words.label(str(row["model"]))],
            textposition=beside,
            textfont=theme.ink(dark=options.dark),
            showlegend=False,
            hovertemplate="%{text}<br>%{y:.1%}, %{x:.3g} s",
        )
        ring = "circle-open" if row["task_id"] else "circle"
        traces.append(point.update(marker={"symbol": ring, "line": {"width": 2}}))
    figure = theme.themed(*traces, height=420, dark=options.dark)
    # In the order of their scores: names of lines that lie close stand apart.
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
    seconds = _ticks(points["seconds"])
    ticks = {"tickvals": seconds, "ticktext": [f"{second:,.10g}" for second in seconds]}
    figure.update_xaxes(title_text="seconds of calibrating", type="log", **ticks)
    low, high = float(rows["score"].min()), float(rows["score"].max())
    room = {"include": [low - 0.1 * (high - low), high + 0.1 * (high - low)]}  # of the names beside lines
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


_LETTERS = ((0.027, 0.06), (0.009, 0.04))
"""Width of a letter and height of a name in parts of a panel: of half a page on paper, and of a screen."""
_PLACES = {
    "top right": (1, 1),
    "top left": (0, 1),
    "bottom right": (1, 0),
    "bottom left": (0, 0),
    "middle right": (1, 0.5),
    "middle left": (0, 0.5),
    "top center": (0.5, 1),
    "bottom center": (0.5, 0),
}
"""As plotly calls them, with where the name lies: from left to right, and from below to above its point."""
_GAP, _NEAR, _HAIR = 0.012, 0.04, 0.004
"""From a point to its name; nearer than this to another point a name reads as that one's; a line's breadth."""
_ROUNDS = 5

Array = NDArray[np.float64]


def places(names: Sequence[str], crosses: pd.DataFrame) -> list[str]:
    """Where beside its point each name stands, as plotly calls it; `crosses` has x, y and their ends, names first."""
    x, y = _scaled(crosses, "x"), _scaled(crosses, "y")
    spots = np.stack([x[:, 0] - 0.012, x[:, 0] + 0.012, y[:, 0] - 0.018, y[:, 0] + 0.018], axis=1)
    across = np.stack([x[:, 1], x[:, 2], y[:, 0], y[:, 0]], axis=1)
    up = np.stack([x[:, 0], x[:, 0], y[:, 1], y[:, 2]], axis=1)
    count, ways = len(names), len(_PLACES)
    alone, mutual = np.zeros((count, ways)), np.zeros((count, ways, count, ways))
    others = ~np.eye(count, len(x), dtype=bool)[:, None]
    for letter, tall in _LETTERS:
        boxes = _boxes(np.array([letter * len(name) for name in names]), tall, x[:count, 0], y[:count, 0])
        beyond = np.maximum(np.maximum(-boxes, boxes - 1), 0).sum(-1)
        reach = [
            np.maximum(np.maximum(boxes[..., [side]] - to, to - boxes[..., [side + 1]]), 0)
            for side, to in ((0, x[:, 0]), (2, y[:, 0]))
        ]
        astray = np.maximum(_NEAR - np.hypot(*reach), 0)
        area = tall * letter * np.array([max(1, len(name)) for name in names])[:, None]
        alone += (
            40 * beyond + (60 * astray * others).sum(-1) + (_shared(boxes, spots) * others).sum(-1) * 4 / area
        )
        alone += 7 * (_shared(boxes, across) + _shared(boxes, up)).sum(-1) / area
        mutual += 4 * _shared(boxes, boxes.reshape(-1, 4)).reshape(mutual.shape) / area[..., None, None]
    mutual[np.arange(count), :, np.arange(count)] = 0
    mutual += mutual.transpose(2, 3, 0, 1)
    tries = []
    for start in range(ways):
        chosen = np.full(count, start)
        for point in [*range(count)] * _ROUNDS:
            chosen[point] = (alone[point] + mutual[point][:, np.arange(count), chosen].sum(-1)).argmin()
        total = alone[np.arange(count), chosen].sum()
        total += mutual[np.arange(count)[:, None], chosen[:, None], np.arange(count), chosen].sum() / 2
        tries.append((total, [[*_PLACES][way] for way in chosen]))
    return min(tries)[1]


def _boxes(wide: Array, tall: float, x: Array, y: Array) -> Array:
    """Left, right, low and high end of every name at each of the places."""
    across, up = np.array([*_PLACES.values()]).T
    left = x[:, None] + _GAP * (2 * across - 1) - wide[:, None] * (1 - across)
    low = y[:, None] + _GAP * (2 * up - 1) - tall * (1 - up)
    return np.stack([left, left + wide[:, None], low, low + tall], axis=-1)


def _shared(boxes: Array, others: Array) -> Array:
    """The area that each box shares with each of the others, lines being a hair broad."""
    each, low, high = boxes[..., None, :], others[:, ::2] - _HAIR / 2, others[:, 1::2] + _HAIR / 2
    common = np.minimum(each[..., 1::2], high) - np.maximum(each[..., ::2], low)
    shared: Array = np.maximum(common, 0).prod(-1)
    return shared


def _scaled(crosses: pd.DataFrame, axis: str) -> Array:
    """Value, low and high end on one axis, as they lie from 0 to 1 on a panel that has all of them and 0."""
    values = crosses[[axis, f"{axis}_low", f"{axis}_high"]].to_numpy(dtype=float)
    values = np.where(np.isnan(values), values[:, :1], values)
    low, high = min(0.0, values.min()), max(0.0, values.max())
    scaled: Array = 0.05 + 0.9 * (values - low) / ((high - low) or 1.0)
    return scaled
