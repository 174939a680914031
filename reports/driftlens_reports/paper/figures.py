"""Figures put together from charts of the report and the dashboard, and the plate that every figure is drawn on."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from numpy.typing import ArrayLike

from driftlens.findings.reading import printable
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import ATTRIBUTED, CALIBRATE, TABLES
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.per_task import AVERAGE
from driftlens_reports.charts.words import between, called, label
from driftlens_reports.paper import exhibit
from driftlens_reports.paper.marks import Panel
from driftlens_reports.paper.static import add_legend, draw_panels, finish, height_of, rough_size
from driftlens_reports.paper.style import venue_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLUMNS = ("panel", "run", "task", "variant", "layer", "sample_id", "quantity", "value", "source")
"""Columns of the plotted numbers; figures of sweeps have the settings as well."""


# Numbers of charts, by what the run's tables call them.
DRIFT = {"mean drift": "drift_l2_mean", "10 % quantile": "drift_l2_q10", "90 % quantile": "drift_l2_q90"}
SPLIT = {"mismatch": "mismatch_l2_mean", "propagation": "propagation_l2_mean", "cross term": "cross_term"}
GROWTH = {
    **{"amplification": "amplification", "Jacobian error": "jacobian_error"},
    **{f"amplification {end}": f"amplification_{end}" for end in ("low", "high")},
    **{"random gain": "random_gain_mean"},
}
SHARES = {"carried share": "final_share", "swapped share": "prefix_share"}
DECISIONS = {name: f"share {name}" for name in ("certified", "kept without certificate", "flipped")}
SAMPLES = {"cosine": "cos", "baseline cosine": "cos of the baseline", "mean gain": "mean gain of cos"}
GAINS = {"cosine gain": "gain of cos_mean", "accuracy gain (points)": "gain of accuracy, points"}
ACCURACY = {"accuracy": "accuracy", "score": "score", "low": "ci_low", "high": "ci_high"}

COST = {"score": "accuracy", "low": "ci_low", "high": "ci_high", "seconds": "seconds"}

_KEYS = ("task", "variant", "layer", "sample_id", "model")


class Plate:
    """A figure while it is drawn, without pyplot: what it has plotted so far, and what the runs can't fill."""

    def __init__(self, width: float, height: float, name: str) -> None:
        self._name = name
        if venue_of(width) == "slide":
            height = width * 9 / 16
        self.figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self.figure)
        self.missing: list[exhibit.Gap] = []
        self.charts: list[go.Figure] = []
        self.panels: list[Panel] = []
        self._rows: list[pd.DataFrame] = []

    def record(
        self,
        panel: str,
        run: DriftRun | None,
        quantity: str,
        value: ArrayLike,
        *,
        source: str = "measured",
        **key: Any,
    ) -> None:
        """Note plotted numbers, unrounded: of a run, or the paper's own; `key` is one for all values, or one each."""
        key_of_all = {"panel": panel, "run": run and run.id, "quantity": quantity, "source": source, **key}
        self._rows.append(pd.DataFrame({**key_of_all, "value": np.atleast_1d(np.asarray(value, float))}))

    def note(self, axes: Axes, name: str, missing: str) -> None:
        """Put a framed note in place of a panel that the runs can't fill."""
        _frame(axes, self.lack(name, missing))

    def lack(self, name: str, missing: str) -> exhibit.Gap:
        """Note a part that the runs can't fill, where other things stand in its place."""
        gap = exhibit.Gap.of(self._name, name, missing)
        if gap not in self.missing:
            self.missing.append(gap)
        return gap

    def exhibited(self, caption: Iterable[str]) -> exhibit.Exhibited:
        """The finished exhibit; `caption` is its sentences, to which those about missing parts are added."""
        add_legend(self.figure, self.charts)
        finish(self.figure, self.panels)
        frame = pd.concat(self._rows, ignore_index=True) if self._rows else pd.DataFrame()
        extra = [name for name in frame.columns if name not in COLUMNS]
        frame = frame.reindex(columns=[*COLUMNS[:-2], *extra, *COLUMNS[-2:]])
        frame = frame[frame["value"].notna()].reset_index(drop=True).astype({"layer": "Int64"})
        sentences = exhibit.together(caption, self.missing)
        return exhibit.Exhibited(frame, " ".join(sentences), figure=self.figure, missing=tuple(self.missing))


def _frame(axes: Axes, gap: exhibit.Gap) -> None:
    """A frame with what is missing in place of a plot, so that nobody takes the gap for a result."""
    axes.set_title("")  # it names the panel itself
    for axis in (axes.xaxis, axes.yaxis):  # ticks themselves may be shared with other panels
        axis.set_visible(False)
    for spine in axes.spines.values():
        spine.set(visible=True, linestyle=(0, (3, 2)), color="#999999")
    size = rcParams["xtick.labelsize"]
    # Letters of the packaged fonts are about 0.45 em wide.
    letters = max(12, int(0.9 * rough_size(axes)[0] * 72 / (0.45 * size)))
    whole: dict[str, Any] = dict.fromkeys(("break_on_hyphens", "break_long_words"), False)
    # Backticks mark commands where the words are typeset; a figure has one font.
    parts = [
        "\n".join(textwrap.wrap(printable(part.replace("`", "")), letters, **whole))
        for part in (gap.name, gap.missing)
    ]
    lines = "\n\n".join(parts)
    if 1.3 * size * (lines.count("\n") + 1) > 0.9 * rough_size(axes)[1] * 72:
        lines = parts[0]  # the caption has the rest
    text = axes.text(0.5, 0.5, lines, ha="center", va="center", transform=axes.transAxes)
    text.set(fontsize=size, color="#555555", linespacing=1.3, in_layout=False)


def short(text: str, longest: int = 16) -> str:
    """A user's name as it stands on a figure: on one line, and shortened in the middle where it is long."""
    clean = printable(text)
    if len(clean) <= longest:
        return clean
    end = (longest - 1) // 2
    return f"{clean[: longest - 1 - end]}…{clean[-end:]}"


def legend(figure: Figure, entries: Mapping[str, Artist], columns: int = 0) -> None:
    """One legend for the whole figure, above its panels."""
    if entries:
        names = [short(name, 28) for name in entries]
        columns = columns or len(entries)
        figure.legend([*entries.values()], names, loc="outside upper center", ncols=columns)


@dataclass(frozen=True)
class View:
    """One chart of a figure; `quantities`: which of its numbers are recorded, and under which name.

    `caption` stands in the place of the chart's own, where that is about other options.
    """

    chart: str
    quantities: Mapping[str, str]
    is_about_one: bool = False
    is_about_calibrated: bool = False
    caption: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


_OF_JACOBIANS = {
    column.name
    for column in TABLES["layers"].columns
    if column.option in ATTRIBUTED and column.option != "prefix"
}


class Picture:
    """A view of a run, as the writer chose: the drawn chart, or in words what the run lacks for it."""

    def __init__(self, view: View, run: DriftRun, options: exhibit.ExhibitOptions) -> None:
        self.view, self.run, self.chart = view, run, charts[view.chart]
        self.task = options.task_of(run) if view.is_about_one else ""
        calibrated = options.calibrated_of(run) or ("merged",)
        chosen = ChartOptions(
            tasks=(self.task,) if self.task else options.tasks_of(run),
            variants=calibrated if view.is_about_calibrated else options.compared(run),
            baseline=options.baseline_of(run),
            **view.options,
        )
        self.drawn, self.lacking = self.chart.attempt(run, chosen)

    @property
    def needs_jacobian(self) -> bool:
        """Whether it is drawn, and any of what it shows is of the samples with Jacobians."""
        return self.drawn is not None and not _OF_JACOBIANS.isdisjoint(self.view.quantities.values())

    def height(self, width: float) -> float:
        """Height in inches of a figure of this width."""
        return height_of(self.drawn.figure, width) if self.drawn else 0.25 * width

    def place(self, plate: Plate, part: SubFigure, letter: str = "") -> list[Panel]:
        """Draw it into a part of a figure and record its numbers, or put a framed note there."""
        title = f"({letter}) {self.chart.title}" if letter else self.chart.title
        if self.drawn is None:
            plate.note(part.subplots(), title, self.lacking.removesuffix("."))
            return []
        if letter:
            part.suptitle(title, x=0.01, ha="left", fontsize="medium")
        for key in _tidy(self.run, self.drawn.data, self.view.quantities):
            plate.record(letter or "a", self.run, **key)
        if self.task:  # the caption says it
            begun = label(self.task)[:8]  # longer names are cut, each as its panel asks for
            for note in self.drawn.figure.layout.annotations:
                if note.text and note.text.startswith(begun):
                    note.text = note.text.split(": ", 1)[-1]
        panels = draw_panels(self.drawn.figure, part)
        plate.panels += panels
        plate.charts.append(self.drawn.figure)
        return panels

    def caption(self, letter: str = "") -> Iterator[str]:
        """What the chart says of itself, after the letter of its panel."""
        if self.drawn is not None:
            text = self.view.caption or self.chart.caption
            yield f"({letter}) {text}" if letter else text
            yield f"Task: {called(self.task)}." if self.task else ""
            yield from self.drawn.notes


def _tidy(run: DriftRun, data: pd.DataFrame, quantities: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A chart's numbers by quantity, as a plate records them."""
    for column, quantity in quantities.items():
        if column not in data:  # the name depends on what tasks are judged by
            continue
        rows = data[[name for name in _KEYS if name in data]].assign(
            value=data[column].astype(float), quantity=quantity
        )
        if "task" in rows:
            is_mean = rows["task"] == AVERAGE
            rows.loc[is_mean, "quantity"] = f"{quantity} (average over tasks)"
            rows["task"] = rows["task"].mask(is_mean)
        if "role" in data:  # what no layer accounts for belongs to the head
            is_rest = data["role"] == "remainder"
            rows.loc[is_rest, "quantity"] = "remainder_share"
            rows["layer"] = rows["layer"].mask(is_rest, len(run.manifest.layers))
        if quantity.startswith("mean "):  # one for all samples
            rows = rows.drop(columns="sample_id").drop_duplicates()
        for name, part in rows.groupby("quantity", sort=False):
            yield {"quantity": name, **part.drop(columns="quantity").to_dict("list")}


def _chart_figure(
    name: str, title: str, lead: str, rows: Sequence[Sequence[View]], *, paper: str = ""
) -> None:
    """File a figure of charts, row by row, in a narrow column one below the other; `lead` begins its caption."""

    @exhibit.figure(name, title=title, paper=paper)
    def draw(runs: Sequence[DriftRun], options: exhibit.ExhibitOptions) -> exhibit.Exhibited:
        run, width = runs[0], options.width
        lines = [[view] for row in rows for view in row] if options.is_narrow else rows
        pictures = [[Picture(view, run, options) for view in row] for row in lines]
        heights = [max(picture.height(width / len(row)) for picture in row) for row in pictures]
        plate = Plate(width, sum(heights), name)
        bands = plate.figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)[:, 0]
        is_alone = len(lines) * len(lines[0]) == 1
        letters, sentences = iter("abcdefgh"), [lead, *exhibit.origin([run])]
        for band, row in zip(bands, pictures, strict=True):
            for part, picture in zip(band.subfigures(1, len(row), squeeze=False)[0], row, strict=True):
                letter = "" if is_alone else next(letters)
                picture.place(plate, part, letter)
                sentences += picture.caption(letter)
        if not options.calibrated_of(run):
            plate.lack("the calibrated model", f"`{CALIBRATE}` adds it")
        needs = any(picture.needs_jacobian for row in pictures for picture in row)
        return plate.exhibited([*sentences, _jacobian_samples(run.layers()) if needs else ""])


def _jacobian_samples(rows: pd.DataFrame) -> str:
    """How many of the samples are behind what needs a Jacobian; empty where it is all of them."""
    rows = rows[rows["jacobian_samples"].notna() & (rows["jacobian_samples"] != rows["n"])]
    if rows.empty:
        return ""
    return f"What needs a Jacobian: n = {between(rows['jacobian_samples'].astype(int))} of these samples."


_chart_figure(
    "heatmap",
    "Relative drift by task and layer",
    "Drift against the expert's feature norm, by task and layer, ratios of sums over samples.",
    [
        [
            View(
                "heatmap",
                {"relative drift": "drift_rel"},
                caption="Tasks down and layers across, one panel per variant on one colour scale.",
                options={"relative": True},
            )
        ]
    ],
)
_chart_figure(
    "amplification",
    "Growth of incoming drift by layer",
    "Above 1 a layer lets drift grow; the stem has no incoming drift.",
    [[View("amplification", GROWTH, is_about_one=True)]],
)
_chart_figure(
    "decomposition",
    "Local mismatch and propagation by layer",
    "Drift by layer, split exactly into e = m + p; norms alone do not add up.",
    [
        [View("layer-drift", DRIFT, is_about_one=True, options={"apart": True})],
        [View("decomposition", SPLIT, is_about_one=True, options={"apart": True})],
    ],
)
_chart_figure(
    "contributions",
    "Layers that the final drift comes from",
    "Signed shares of the final drift by the layer whose local mismatch they come from; they sum to 1.",
    [
        [View("contributions", {"share of final drift": "final_share"}, is_about_one=True)],
        [View("splits", SHARES, is_about_one=True)],
    ],
)
_chart_figure(
    "output-drift",
    "Margins, score drift and flipped decisions",
    "What drift does to decisions: how many the margins protect, and how many flip.",
    [
        [View("margins", DECISIONS)],
        [View("flips", {"kept": "kept decisions", "flipped": "flipped decisions"}, is_about_one=True)],
    ],
)
_chart_figure(
    "repairs",
    "Repairs: score against cost",
    "What every calibration of the run scores, and what it takes.",
    [[View("arena", COST)]],
)
_chart_figure(
    "diagnostics",
    "Calibration against a baseline, in features and parameters",
    "What calibration changes, compared with a baseline; cosine is a diagnostic, not an explanation of accuracy.",
    [
        [
            View("task-cosine", {"mean cosine": "cos_mean"}),
            View("sample-cosine", SAMPLES, is_about_one=True, is_about_calibrated=True),
        ],
        [
            View("gains", GAINS, is_about_calibrated=True),
            View("backbone-alignment", {"cosine of task vectors": "cos"}),
        ],
    ],
    paper="Figures 2 and 7",
)
