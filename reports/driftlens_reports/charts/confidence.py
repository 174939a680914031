"""Whether class probabilities can be believed: a reliability diagram with the counts behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens import variants
from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.points import identity_line
from driftlens_reports.charts.reliability import BINS, expected_calibration_error, reliability
from driftlens_reports.charts.scored import no_scores, scored_samples
from driftlens_reports.charts.theme import SHARE, TICK_SHARE, apply_theme, look, palette
from driftlens_reports.charts.words import counted, data_key, joined, overlap_notes, ranged, shown
from driftlens_reports.wording import number

if TYPE_CHECKING:
    import plotly.graph_objects as go

HEIGHT = 440
_NEEDED = ("label", "pred", "confidence", "expert_pred", "confidence_expert")
_ERROR = "expected calibration error"


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    if len(scored_samples(run, options, *_NEEDED)):
        return None
    return no_scores(["label", "confidence"], also="heads and labelled samples")


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
    section="outputs",
    caption="Left, accuracy of predictions on the diagnosis samples of all chosen tasks against their confidence, the "
    "largest class probability, in ten bins with 95 % Wilson intervals; right, how many samples each bin holds.",
    hint="On the dotted line, predictions of 80 % confidence are right 80 % of the time; below it a network is surer "
    "than it should be. Bins with few samples say little: look at their intervals. The error in the notes is the mean "
    "distance from the line, weighted by samples.",
    missing=_missing,
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """A reliability diagram and a histogram, the expert's beside every variant's."""
    from plotly.subplots import make_subplots

    samples = scored_samples(run, options, *_NEEDED)
    rows = _rows(samples)
    figure = make_subplots(1, 2, column_widths=[0.58, 0.42], horizontal_spacing=0.1)
    for variant, bins in rows.groupby("variant", sort=False):
        figure.add_trace(_curve(run, bins, str(variant), dark=options.dark), row=1, col=1)
        figure.add_trace(_counts(run, bins, str(variant), dark=options.dark), row=1, col=2)
    apply_theme(figure, dark=options.dark, key=data_key(run, "confidence", options), height=HEIGHT)
    identity_line(figure, 0, 1, dark=options.dark, row=1, col=1)
    figure.update_layout(barmode="group", bargap=0.15, bargroupgap=0)
    reach = [-0.02, 1.02]
    figure.update_xaxes(range=reach, tickformat=TICK_SHARE)
    figure.update_xaxes(title_text="mean confidence in the bin (%)", col=1)
    figure.update_xaxes(title_text="confidence (%)", dtick=0.2, showgrid=False, col=2)
    figure.update_yaxes(range=reach, tickformat=TICK_SHARE, title_text="accuracy in the bin (%)", col=1)
    figure.update_yaxes(title_text="samples (count)", rangemode="tozero", col=2)
    errors = rows.drop_duplicates("variant")
    told = joined(
        [
            f"{variants.title(name)} {number(error)}"
            for name, error in zip(errors["variant"], errors[_ERROR], strict=True)
        ]
    )
    counts = samples.groupby(["task", "variant"], sort=False).size()
    return Drawn(
        figure,
        alt=f"Reliability diagram. Expected calibration error: {told}.",
        data=rows[["variant", *(name for name in rows if name != "variant")]],
        notes=(
            f"Expected calibration error over {BINS} bins of equal width: {told}.",
            f"{ranged(counts, 'diagnosis sample')} per task, over {counted(samples['task'].nunique(), 'task')}.",
            *overlap_notes(run),
        ),
    )


def _curve(run: DriftRun, bins: pd.DataFrame, variant: str, *, dark: bool) -> go.Scatter:
    import plotly.graph_objects as go

    style = look(run.variants, variant, dark=dark)
    whiskers = {
        "array": _gapped(bins["high"] - bins["accuracy"]),
        "arrayminus": _gapped(bins["accuracy"] - bins["low"]),
        "color": style.colour,
        "thickness": 1,
        "width": 3,
    }
    return go.Scatter(
        x=_gapped(bins["confidence"]),
        y=_gapped(bins["accuracy"]),
        error_y=whiskers,
        mode="lines+markers",
        connectgaps=False,
        line={"color": style.colour, "dash": style.dash, "width": 1.5},
        marker={"color": style.colour, "symbol": style.symbol, "size": 7},
        text=[counted(count, "sample") for count in bins["samples"]],
        hovertemplate=f"confidence %{{x:{SHARE}}}, accuracy %{{y:{SHARE}}}<br>%{{text}}",
        **_legend(variant, is_first=True),
    )


def _counts(run: DriftRun, bins: pd.DataFrame, variant: str, *, dark: bool) -> go.Bar:
    import plotly.graph_objects as go

    style = look(run.variants, variant, dark=dark)
    pattern = {"shape": style.hatch, "fillmode": "overlay", "size": 4, "solidity": 0.25}
    return go.Bar(
        x=((bins["from"] + bins["to"]) / 2).tolist(),
        y=bins["samples"].tolist(),
        marker={
            "color": style.colour,
            "pattern": pattern,
            "line": {"width": 0.5, "color": palette(dark).surface},
        },
        hovertemplate=f"confidence around %{{x:{SHARE}}}<br>%{{y}} samples",
        **_legend(variant, is_first=False),
    )


def _gapped(values: pd.Series[float]) -> list[float | None]:
    """The values, with None where a bin is empty: the line breaks there."""
    return [None if pd.isna(value) else float(value) for value in values]


def _legend(variant: str, *, is_first: bool) -> dict[str, Any]:
    return {"name": shown(variant), "legendgroup": variant, "showlegend": is_first}
