"""What drift does to outputs: to the expert's decisions, to probabilities, and to scores, which have a bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from driftlens.base.intervals import wilson
from driftlens.findings.reading import number, percent
from driftlens.runs.run import DriftRun
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart, is_of_language
from driftlens_reports.charts.per_task import spread, task_figure

_BINS, CONFIDENCE_BINS = 20, 10
_CERTIFIED, _KEPT_ONLY, _KEPT, _FLIPPED = "certified", "kept without certificate", "kept", "flipped"
_LOOKS = {_CERTIFIED: (1, ""), _KEPT: (2, ""), _KEPT_ONLY: (3, "/"), _FLIPPED: (5, "x")}
"""Of an outcome: where in the sequential scale its colour stands, and its hatch. Heavier is worse in both."""
_SHARE = "share flipped, all margins"
_SCORED = ("label", "pred", "confidence", "expert_pred", "confidence_expert")
_ERROR = "expected calibration error"


def _stacks(
    rows: pd.DataFrame,
    outcomes: Sequence[str],
    bars: Callable[[pd.DataFrame, str], Mapping[str, Any]],
    titles: tuple[str, str],
    height: int,
    *,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    dark: bool,
    **settings: Any,
) -> go.Figure:
    """A panel of stacked bars per variant of the rows, of which `bars` are the settings for an outcome."""
    names = list(rows["variant"].unique())
    grid = panels.panel_grid(
        [words.shown(variant) for variant in names],
        x_title=titles[0],
        y_titles=titles[1:],
        columns=len(names) if len(names) <= 4 else 3,
        height=height,
        dark=dark,
    )
    brush = theme.Brush(names, dark)
    colours = brush.palette
    for panel, variant in enumerate(names):
        for outcome in outcomes:
            shade, hatch = _LOOKS[outcome]
            fill = {"color": colours.sequential[shade], "line": {"color": colours.quiet, "width": 0.5}}
            fill["pattern"] = {"shape": hatch, "fillmode": "overlay", "size": 6, "solidity": 0.25}
            shown = bars(rows[rows["variant"] == variant], outcome)
            grid.add(panel, theme.bar(marker=fill, **brush.named(outcome, outcome), **shown))
    grid.lay_out(barmode="stack", **settings)
    grid.set_axes(x=x, y=y)
    return grid.figure


def _outcomes(run: DriftRun, options: ChartOptions, of: str = "") -> pd.DataFrame:
    """One row per task and variant with the share of each outcome; only samples with both columns count."""
    rows = picking.scored_samples(run, options, f"{of}flipped", f"{of}certified")
    flipped, certified = rows[f"{of}flipped"].astype(bool), rows[f"{of}certified"].astype(bool)
    shares = {_CERTIFIED: certified & ~flipped, _KEPT_ONLY: ~certified & ~flipped, _FLIPPED: flipped}
    groups = rows.assign(**shares).groupby(["task", "variant"], sort=False)
    return groups[list(shares)].mean().assign(n=groups.size()).reset_index()


@chart(
    "margins",
    title="Decisions: certified, kept, flipped",
    section="decisions",
    rank=30,
    presets=("standard", "calibration"),
    needs=("outputs", ("flipped", "certified")),
    rows=_outcomes,
    also="heads",
    caption="Share of diagnosis samples whose expert decision is certified by its margin, kept without a certificate "
    "or flipped, for every task and one panel per variant.",
    hint="Certified: the largest change of a score is below half the expert's margin, so no flip is possible. A wide "
    "middle part means decisions survive by luck of direction rather than by small drift. A flip is a disagreement "
    "with the expert, not always a mistake.",
)
def margins(run: DriftRun, options: ChartOptions, of: str = "") -> Drawn:
    """Panels of stacked bars that each add up to all samples."""
    rows = _outcomes(run, options, of)
    tasks = [str(task) for task in rows["task"].unique()]

    def bars(part: pd.DataFrame, outcome: str) -> dict[str, Any]:
        return {
            "x": part[outcome].tolist(),
            "y": [words.literal(str(task)) for task in part["task"]],
            "orientation": "h",
            "hovertemplate": f"%{{y}}<br>{outcome} %{{x:{theme.SHARE}}}",
        }

    titles, height = ("share of samples (%)", "task"), 60 + 26 * len(tasks)
    outcomes, x = (_CERTIFIED, _KEPT_ONLY, _FLIPPED), {"range": [0, 1], "tickformat": theme.TICK_SHARE}
    y = {**theme.category_axis(tasks), "autorange": "reversed"}
    looks: dict[str, Any] = {"bargap": 0.3, "legend": {"traceorder": "normal"}, "dark": options.dark}
    figure = _stacks(rows, outcomes, bars, titles, height, x=x, y=y, **looks)
    worst = words.worst_tasks(rows, _FLIPPED, percent)
    alt = f"Share of the expert's decisions that flip, worst task of each variant: {worst}."
    return Drawn(figure, alt, rows, tuple(words.sample_notes(run, rows)))


_OF_LANGUAGE = "models with a language-model head"


chart(
    "next-token",
    title="Next token, of all: certified, kept, flipped",
    section="decisions",
    rank=50,
    presets=("standard", "calibration"),
    needs=("outputs", ("token_flipped", "token_certified")),
    rows=partial(_outcomes, of="token_"),
    also=_OF_LANGUAGE,
    applies=is_of_language,
    caption="The same over the whole vocabulary: share of diagnosis samples whose likeliest next token is certified to "
    "be the expert's, kept without a certificate or flipped, for every task and one panel per variant.",
    hint="Label words are few and far apart; among all tokens a small drift flips more. A model that would not answer "
    "with a label word at all flips here and perhaps not above.",
)(partial(margins, of="token_"))


@chart(
    "next-token-divergence",
    title="Divergence of the next token",
    section="probabilities",
    rank=60,
    presets=("calibration",),
    needs=("outputs", ("token_kl",)),
    rows=lambda run, options: picking.scored_samples(run, options, "token_kl"),
    also=_OF_LANGUAGE,
    applies=is_of_language,
    caption="Kullback-Leibler divergence from the expert's distribution of the next token, over all tokens, to "
    "the variant's: mean over the diagnosis samples of every task, with whiskers from the 10 % to the 90 % quantile.",
    hint="In nats: 0 is the same distribution. It sees what decisions don't: how sure a model is, and of what else.",
)
def next_token_divergence(run: DriftRun, options: ChartOptions) -> Drawn:
    """Mean divergence per task and variant."""
    samples, column = picking.scored_samples(run, options, "token_kl"), "mean KL divergence"
    means = samples.groupby(["task", "variant"], sort=False)["token_kl"].agg(["mean", "size"]).reset_index()
    ends = spread(samples, "token_kl")
    rows = means.merge(ends, on=["task", "variant"]).rename(columns={"mean": column, "size": "n"})
    title, whiskers = "mean KL divergence of the next token (nat)", picking.SPREADS["q10-q90"]
    worst = words.worst_tasks(rows, column, number)
    figure = task_figure(run, rows, column, title, interval=whiskers, dark=options.dark)
    alt = f"Mean divergence of the next token in nats, worst task of each variant: {worst}."
    notes = (f"Whiskers: {whiskers}.", *words.table_notes(run, samples, over_tasks=False))
    return Drawn(figure, alt, rows, notes)


def _decided(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Rows of the output table that have a margin and a verdict."""
    rows = picking.scored_samples(run, options, "flipped", "margin")
    return rows.assign(flipped=rows["flipped"].astype(bool), margin=rows["margin"].astype(float))


@chart(
    "flips",
    title="Which decisions flip",
    section="decisions",
    rank=40,
    presets=("calibration",),
    needs=("outputs", ("flipped", "margin")),
    rows=_decided,
    also="heads of two classes or more",
    caption="Diagnosis samples of all chosen tasks by the expert's margin, its best score minus its second best: how "
    "many decisions the variant keeps and how many it flips, one panel per variant.",
    hint="Flips at small margins are decisions that were close anyway; flips at large margins mean that drift carried "
    "samples the expert was sure of. Tasks with different score scales share the axis: choose one task to compare.",
)
def flips(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of stacked histograms with the same bins."""
    samples = _decided(run, options)
    rows = _histogram(samples)

    def bars(part: pd.DataFrame, outcome: str) -> dict[str, Any]:
        texts = [
            f"margin {number(row['from'])} to {number(row['to'])}<br>{row[_FLIPPED]} of "
            f"{words.counted(row[_FLIPPED] + row[_KEPT], 'sample')} flipped"
            for row in part.to_dict("records")
        ]
        hover = {"text": texts, "textposition": "none", "hovertemplate": f"%{{text}}<extra>{outcome}</extra>"}
        width = (part["to"] - part["from"]).tolist()
        return {"x": part["middle"].tolist(), "y": part[outcome].tolist(), "width": width, **hover}

    titles = ("expert's margin (score units)", "samples (count)")
    x = {"tickformat": theme.TICK_NUMBER}
    y = {**x, "rangemode": "tozero"}
    figure = _stacks(rows, (_FLIPPED, _KEPT), bars, titles, 220, x=x, y=y, bargap=0, dark=options.dark)
    shares = rows.groupby("variant", sort=False)[_SHARE].first().map(percent)
    listed = words.by_variant(shares.items())
    alt = f"Share of the expert's decisions that flip: {listed}."
    return Drawn(figure, alt, rows, tuple(words.table_notes(run, samples)))


def _histogram(samples: pd.DataFrame) -> pd.DataFrame:
    """Kept and flipped samples by variant and margin, in bins of one width that start at 0."""
    top = float(samples["margin"].max()) or 1.0
    edges = np.linspace(0, top, _BINS + 1)
    bins = []
    for variant, part in samples.groupby("variant", sort=False):
        outcomes = {_KEPT: ~part["flipped"], _FLIPPED: part["flipped"]}
        counts = {name: np.histogram(part.loc[mask, "margin"], edges)[0] for name, mask in outcomes.items()}
        ends = {"from": edges[:-1], "to": edges[1:], "middle": (edges[:-1] + edges[1:]) / 2}
        bins.append(pd.DataFrame({"variant": variant, **ends, **counts, _SHARE: part["flipped"].mean()}))
    return pd.concat(bins, ignore_index=True)


def reliability(confidence: NDArray[np.float64], is_right: NDArray[np.bool_]) -> pd.DataFrame:
    """One row per tenth of confidence, (0, 0.1] to (0.9, 1], from each sample's, [n]; an empty bin has no accuracy."""
    edges = np.arange(CONFIDENCE_BINS + 1) / CONFIDENCE_BINS
    at = np.clip(np.ceil(confidence * CONFIDENCE_BINS).astype(int) - 1, 0, CONFIDENCE_BINS - 1)
    count = np.bincount(at, minlength=CONFIDENCE_BINS)
    right, surety = (np.bincount(at, weights=of, minlength=CONFIDENCE_BINS) for of in (is_right, confidence))
    whole = np.where(count > 0, count, np.nan)
    bins = {"from": edges[:-1], "to": edges[1:], "samples": count}
    ends = [wilson(int(k), int(n)) if n else (np.nan, np.nan) for k, n in zip(right, count, strict=True)]
    low, high = zip(*ends, strict=True)
    return pd.DataFrame(
        {**bins, "confidence": surety / whole, "accuracy": right / whole, "low": low, "high": high}
    )


def expected_calibration_error(bins: pd.DataFrame) -> float:
    """Mean over samples of their bin's distance between accuracy and mean confidence, from rows of `reliability`."""
    distance = (bins["accuracy"] - bins["confidence"]).abs()
    return float((distance * bins["samples"]).sum() / bins["samples"].sum())


def _reliabilities(samples: pd.DataFrame) -> pd.DataFrame:
    """The bins of the expert and of every variant, with each network's calibration error."""
    # Every variant's rows repeat what the expert said of the same samples.
    once = samples.drop_duplicates(["task", "sample_id"])
    networks = {"expert": (once, "expert_pred", "confidence_expert")}
    networks |= {name: (part, "pred", "confidence") for name, part in samples.groupby("variant", sort=False)}
    diagrams = []
    for variant, (rows, answer, confidence) in networks.items():
        is_right = (rows[answer] == rows["label"]).to_numpy(dtype=bool)
        bins = reliability(rows[confidence].to_numpy(dtype=float), is_right)
        diagrams.append(bins.assign(variant=variant, **{_ERROR: expected_calibration_error(bins)}))
    return pd.concat(diagrams, ignore_index=True)


@chart(
    "confidence",
    title="Can the probabilities be believed?",
    section="probabilities",
    rank=50,
    presets=("calibration",),
    needs=("outputs", ("label", "confidence")),
    rows=lambda run, options: picking.scored_samples(run, options, *_SCORED),
    also="heads and labelled samples",
    caption="First, accuracy of predictions on the diagnosis samples of all chosen tasks against their confidence, the "
    "largest class probability, in ten bins with 95 % Wilson intervals; then, how many samples each bin holds.",
    hint="On the dotted line, predictions of 80 % confidence are right 80 % of the time; below it a network is surer "
    "than it should be. Bins with few samples say little: look at their intervals. The error in the notes is the mean "
    "distance from the line, weighted by samples.",
)
def confidence(run: DriftRun, options: ChartOptions) -> Drawn:
    """A reliability diagram and a histogram, the expert's beside every variant's."""
    samples = picking.scored_samples(run, options, *_SCORED)
    rows = _reliabilities(samples)
    grid = panels.panel_grid(
        ["", ""],
        x_title=["mean confidence in the bin (%)", "confidence (%)"],
        y_titles=["accuracy in the bin (%)", "samples (count)"],
        columns=2,
        widths=[0.58, 0.42],
        height=330,
        dark=options.dark,
    )
    brush = theme.Brush(run.variants, options.dark)
    for name, bins in rows.groupby("variant", sort=False):
        curve = brush.line(
            str(name),
            theme.gapped(bins["confidence"]),
            bins["accuracy"],
            (bins["low"], bins["high"]),
            marker_size=7,
            text=[words.counted(count, "sample") for count in bins["samples"]],
            hovertemplate=f"confidence %{{x:{theme.SHARE}}}, accuracy %{{y:{theme.SHARE}}}<br>%{{text}}",
        )
        counts = brush.bars(
            str(name),
            (bins["from"] + bins["to"]) / 2,
            bins["samples"],
            marker_line={"width": 0.5, "color": brush.palette.surface},
            hovertemplate=f"confidence around %{{x:{theme.SHARE}}}<br>%{{y}} samples",
        )
        grid.add(0, curve)
        grid.add(1, counts)
    grid.add_identity(0, 0, 1)
    share = {"range": [-0.02, 1.02], "tickformat": theme.TICK_SHARE}
    grid.set_axes(x=[share, {**share, "dtick": 0.2, "showgrid": False}], y=[share, {"rangemode": "tozero"}])
    grid.lay_out(barmode="group", bargap=0.15, bargroupgap=0)
    errors = rows.groupby("variant", sort=False)[_ERROR].first().map(number)
    errors_said = words.by_variant(errors.items())
    return Drawn(
        grid.figure,
        alt=f"Reliability diagram. Expected calibration error: {errors_said}.",
        data=rows[["variant", *(name for name in rows if name != "variant")]],
        notes=(
            f"Expected calibration error over {CONFIDENCE_BINS} bins of equal width: {errors_said}.",
            *words.table_notes(run, samples),
        ),
    )


_ESTIMATES = {
    "secant": ("score_gain_secant", "secant: exact along the drift"),
    "directional": ("score_gain", "directional: sampled along the drift"),
    "spectral": ("score_gain_spectral", "spectral: sampled, any direction"),
    "certified": ("score_gain_certified", "certified: holds everywhere"),
}
_ACTUAL, _USE = "score drift", "median share of the certified bound used"


def _bounds(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """One row per task, variant and sample: score drift, and the bound by each estimate of the gain (Eq. 7)."""
    outputs = picking.scored_samples(run, options, "score_drift_l2")
    final = run.samples(layer="final" if run.manifest.layers else None)
    drifts = final[["task", "variant", "sample_id", "drift_l2"]]
    rows = outputs.merge(drifts, on=["task", "variant", "sample_id"], how="left")
    apart = rows["score_map_mismatch"].fillna(0.0)
    bounds = {name: rows[column] * rows["drift_l2"] + apart for name, (column, _) in _ESTIMATES.items()}
    keys = rows[["task", "variant", "sample_id", "label"]]
    values = pd.DataFrame({_ACTUAL: rows["score_drift_l2"], **bounds}, dtype=float)
    return pd.concat([keys, values], axis=1)


@chart(
    "bound",
    title="Score drift and its bound",
    section="scores",
    rank=60,
    per_sample=True,
    needs=("outputs", ("score_drift_l2", "score_gain")),
    rows=lambda run, options: _bounds(run, options).dropna(subset=[*_ESTIMATES], how="all"),
    also="heads",
    caption="Norm of the score drift of all diagnosis samples against the gain of the score map times the norm of the "
    "final drift plus the mismatch of the score maps, which is 0 where models share one, on logarithmic axes with the "
    "line of equality, one panel per estimate of the gain.",
    hint="No point may lie above the line of the certified bound; how far below it points lie is how loose the bound "
    "is. The secant gain is the score map's own on each drift, so its points lie on the line where models share the "
    "map, and on it or below elsewhere; directional and spectral gains are sampled and guarantee nothing.",
)
def bound(run: DriftRun, options: ChartOptions) -> Drawn:
    """Four panels of points with the same logarithmic axes."""
    rows = _bounds(run, options)
    share = rows[_ACTUAL] / rows["certified"].where(rows["certified"] > 0)
    rows = rows.assign(**{_USE: share.groupby(rows["variant"], sort=False).transform("median")})
    drawn, thinned = picking.thinned_samples(rows, options, len(_ESTIMATES) * rows["variant"].nunique())
    names = list(drawn["variant"].unique())
    grid = panels.panel_grid(
        [title for _, title in _ESTIMATES.values()],
        x_title="bound (score units, log)",
        y_titles=["norm of the score drift (score units, log)"],
        columns=2,
        height=230,
        dark=options.dark,
        legend=[words.shown(str(name)) for name in names],
    )
    brush = theme.Brush(run.variants, options.dark)
    texts = (theme.literal_column(drawn["task"]) + ", " + theme.literal_column(drawn["sample_id"])).to_numpy()
    drawable = {estimate: _drawable(drawn, estimate) for estimate in _ESTIMATES}
    for panel, estimate in enumerate(_ESTIMATES):
        for variant in names:
            is_shown = ((drawn["variant"] == variant) & drawable[estimate]).to_numpy()
            trace = brush.cloud(
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
        grid.add_identity(panel, *reach)
    grid.lay_out(legend=theme.LARGE_MARKS)
    # Of two decades plotly else writes every digit, one over the other.
    step = "D2" if reach[1] < 1000 * reach[0] else 1
    axis = {"type": "log", "tickformat": theme.TICK_NUMBER, "minor": {"ticks": "outside"}, "dtick": step}
    grid.set_axes(x=axis, y=axis)
    lost = sum(int((~is_drawn).sum()) for is_drawn in drawable.values())
    why = "without a place on logarithmic axes: no drift, or no finite bound."
    left_out = [f"{words.counted(lost, 'point')} {why}"] if lost else []
    counts, *overlaps = words.table_notes(run, rows, over_tasks=False)
    return Drawn(grid.figure, _used_in_words(rows), drawn, (*thinned, counts, *left_out, *overlaps))


def _drawable(rows: pd.DataFrame, estimate: str) -> pd.Series[bool]:
    """Whether a sample has a place on logarithmic axes."""
    return (rows[estimate] > 0) & np.isfinite(rows[estimate]) & (rows[_ACTUAL] > 0)


def _used_in_words(rows: pd.DataFrame) -> str:
    """How many samples exceed the certified bound (none may) and how much of it they use."""
    measured = rows[np.isfinite(rows["certified"]) & (rows["certified"] > 0)]
    over = int((measured[_ACTUAL] > measured["certified"] * (1 + 1e-6)).sum())
    medians = measured.drop_duplicates("variant").set_index("variant")[_USE]
    used = words.by_variant(medians.astype(float).map(percent).items())
    above = f"{words.counted(over, 'sample')} of {len(measured)} above the certified bound."
    return f"{above} Median share of it used: {used}."
