"""Whether class probabilities can be believed: a reliability diagram with the counts behind it."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.records.intervals import wilson
from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.marks import (
    Trace,
    bar,
    gapped,
    hatched,
    identity_line,
    named,
    scatter,
    whiskers,
)
from driftlens_reports.charts.picking import scored_samples
from driftlens_reports.charts.theme import SHARE, TICK_SHARE, apply_theme, look, palette
from driftlens_reports.charts.words import by_variant, counted, shown, table_notes, themed
from driftlens_reports.wording import number

BINS = 10
HEIGHT = 440
_NEEDED = ("label", "pred", "confidence", "expert_pred", "confidence_expert")
_ERROR = "expected calibration error"


def reliability(confidence: NDArray[np.float64], is_right: NDArray[np.bool_]) -> pd.DataFrame:
    """One row per tenth of confidence, (0, 0.1] to (0.9, 1]: samples, mean confidence, accuracy and its 95 % interval.

    Mean confidence and accuracy of an empty bin are null.

    Args:
        confidence: largest class probability of each sample, [n].
        is_right: whether that class is the sample's label, [n].
    """
    at = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    count = np.bincount(at, minlength=BINS)
    right = np.bincount(at, weights=is_right, minlength=BINS)
    whole = np.where(count > 0, count, np.nan)
    ends = [wilson(int(k), int(n)) if n else (np.nan, np.nan) for k, n in zip(right, count, strict=True)]
    return pd.DataFrame(
        {
            "from": np.arange(BINS) / BINS,
            "to": np.arange(1, BINS + 1) / BINS,
            "samples": count,
            "confidence": np.bincount(at, weights=confidence, minlength=BINS) / whole,
            "accuracy": right / whole,
            "low": [low for low, _ in ends],
            "high": [high for _, high in ends],
        }
    )


def expected_calibration_error(bins: pd.DataFrame) -> float:
    """Mean over samples of their bin's distance between accuracy and mean confidence, from rows of `reliability`."""
    distance = (bins["accuracy"] - bins["confidence"]).abs()
    return float((distance * bins["samples"]).sum() / bins["samples"].sum())


def _samples(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    return scored_samples(run, options, *_NEEDED)


def _rows(samples: pd.DataFrame) -> pd.DataFrame:
    """The bins of the expert and of every variant, with each network's calibration error."""
    # Every variant's rows repeat what the expert said of the same samples.
    own = samples.drop_duplicates(["task", "sample_id"])
    told = {"expert": (own, "expert_pred", "confidence_expert")}
    told |= {name: (part, "pred", "confidence") for name, part in samples.groupby("variant", sort=False)}
    found = []
    for variant, (rows, answer, confidence) in told.items():
        is_right = (rows[answer] == rows["label"]).to_numpy(dtype=bool)
        bins = reliability(rows[confidence].to_numpy(dtype=float), is_right)
        found.append(bins.assign(variant=variant, **{_ERROR: expected_calibration_error(bins)}))
    return pd.concat(found, ignore_index=True)


@chart(
    "confidence",
    title="Can the probabilities be believed?",
    section="probabilities",
    rank=50,
    presets=("calibration",),
    needs=("outputs", ("label", "confidence")),
    rows=_samples,
    also="heads and labelled samples",
    caption="Left, accuracy of predictions on the diagnosis samples of all chosen tasks against their confidence, the "
    "largest class probability, in ten bins with 95 % Wilson intervals; right, how many samples each bin holds.",
    hint="On the dotted line, predictions of 80 % confidence are right 80 % of the time; below it a network is surer "
    "than it should be. Bins with few samples say little: look at their intervals. The error in the notes is the mean "
    "distance from the line, weighted by samples.",
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """A reliability diagram and a histogram, the expert's beside every variant's."""
    from plotly.subplots import make_subplots

    samples = _samples(run, options)
    rows = _rows(samples)
    figure = make_subplots(1, 2, column_widths=[0.58, 0.42], horizontal_spacing=0.1)
    for variant, bins in rows.groupby("variant", sort=False):
        figure.add_trace(_curve(run, bins, str(variant), dark=options.dark), row=1, col=1)
        figure.add_trace(_counts(run, bins, str(variant), dark=options.dark), row=1, col=2)
    apply_theme(figure, height=HEIGHT, **themed(run, "confidence", options))
    identity_line(figure, 0, 1, dark=options.dark, row=1, col=1)
    figure.update_layout(barmode="group", bargap=0.15, bargroupgap=0)
    reach = [-0.02, 1.02]
    figure.update_xaxes(range=reach, tickformat=TICK_SHARE)
    figure.update_xaxes(title_text="mean confidence in the bin (%)", col=1)
    figure.update_xaxes(title_text="confidence (%)", dtick=0.2, showgrid=False, col=2)
    figure.update_yaxes(range=reach, tickformat=TICK_SHARE, title_text="accuracy in the bin (%)", col=1)
    figure.update_yaxes(title_text="samples (count)", rangemode="tozero", col=2)
    errors = rows.drop_duplicates("variant")
    told = by_variant(zip(errors["variant"], errors[_ERROR].map(number), strict=True))
    return Drawn(
        figure,
        alt=f"Reliability diagram. Expected calibration error: {told}.",
        data=rows[["variant", *(name for name in rows if name != "variant")]],
        notes=(
            f"Expected calibration error over {BINS} bins of equal width: {told}.",
            *table_notes(run, samples),
        ),
    )


def _curve(run: DriftRun, bins: pd.DataFrame, variant: str, *, dark: bool) -> Trace:
    style = look(run.variants, variant, dark=dark)
    ends = whiskers(bins["accuracy"], bins["low"], bins["high"], style.colour, thickness=1, width=3)
    return scatter(
        x=gapped(bins["confidence"]),
        y=gapped(bins["accuracy"]),
        error_y=ends,
        mode="lines+markers",
        connectgaps=False,
        line={"color": style.colour, "dash": style.dash, "width": 1.5},
        marker={"color": style.colour, "symbol": style.symbol, "size": 7},
        text=[counted(count, "sample") for count in bins["samples"]],
        hovertemplate=f"confidence %{{x:{SHARE}}}, accuracy %{{y:{SHARE}}}<br>%{{text}}",
        **named(variant, shown(variant), legend=True),
    )


def _counts(run: DriftRun, bins: pd.DataFrame, variant: str, *, dark: bool) -> Trace:
    style = look(run.variants, variant, dark=dark)
    return bar(
        x=((bins["from"] + bins["to"]) / 2).tolist(),
        y=bins["samples"].tolist(),
        marker={**hatched(style, size=4), "line": {"width": 0.5, "color": palette(dark).surface}},
        hovertemplate=f"confidence around %{{x:{SHARE}}}<br>%{{y}} samples",
        **named(variant, shown(variant), legend=False),
    )
