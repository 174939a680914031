"""Figures put together from charts: those of the report and the dashboard, drawn for paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens.errors import DataError
from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, charts
from driftlens_reports.charts.per_task import AVERAGE
from driftlens_reports.paper import captions, choice
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.marks import Panel
from driftlens_reports.paper.plate import Plate
from driftlens_reports.paper.static import add_legend, draw_panels, height_of
from driftlens_reports.paper.style import figure, venue_of

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

_KEYS = ("task", "variant", "layer", "sample_id")


@dataclass(frozen=True)
class View:
    """One chart of a figure.

    Attributes:
        chart: its name.
        quantities: which of its numbers are recorded, and under which name.
        is_about_one: whether it shows one task instead of all.
        is_about_calibrated: whether it shows the calibrated variant against the baseline and no other.
        options: further options of the chart.
    """

    chart: str
    quantities: Mapping[str, str]
    is_about_one: bool = False
    is_about_calibrated: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """A view of a run: the drawn chart, or in words what the run lacks for it.

    Attributes:
        view: what was to be drawn.
        drawn: the chart.
        lacking: what the run lacks.
        task: the only one that it is about; empty where it shows all.
    """

    view: View
    drawn: Drawn | None
    lacking: str
    task: str = ""

    def height(self, width: float) -> float:
        """Height in inches of a figure of this width."""
        return height_of(self.drawn.figure, width) if self.drawn else 0.25 * width


def chart_figure(
    name: str, *, title: str, lead: str, rows: Sequence[Sequence[View]], paper: str = ""
) -> None:
    """File a figure of charts, row by row; in a narrow column each has a row of its own.

    Args:
        name: id of the figure.
        title: what it shows, in a few words.
        lead: the caption's first sentence.
        rows: the charts.
        paper: where the paper has its like.
    """

    @figure(name, title=title, paper=paper)
    def draw(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
        run, width = runs[0], options.width
        is_narrow = venue_of(width) == "icml-column"
        lines = [[view] for row in rows for view in row] if is_narrow else rows
        pictures = [[picture_of(run, options, view) for view in row] for row in lines]
        heights = [max(picture.height(width / len(row)) for picture in row) for row in pictures]
        plate = Plate(width, sum(heights))
        bands = plate.figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)[:, 0]
        letters, sentences = iter("abcdefgh"), [lead, *captions.origin([run])]
        for band, row in zip(bands, pictures, strict=True):
            for part, picture in zip(band.subfigures(1, len(row), squeeze=False)[0], row, strict=True):
                letter = next(letters) if len(lines) * len(row) > 1 else ""
                place(plate, part, run, letter, picture)
                sentences += caption_of(picture, letter)
        if choice.calibrated_of(run, options) is None:
            plate.lack("the calibrated model", f"`{choice.CALIBRATE}` adds it")
        add_legend(plate.figure, [entry.drawn.figure for row in pictures for entry in row if entry.drawn])
        sentences.append(captions.jacobian_samples(run.layers()))
        return plate.exhibited(captions.together([*sentences, *captions.gaps(plate.missing)]))


def picture_of(run: DriftRun, options: ExhibitOptions, view: View) -> Picture:
    """The chart of a run, of the tasks and variants that the writer chose.

    Raises:
        DataError: the run lacks a task or variant that was asked for.
        RunError: a table can't be read.
    """
    chart, calibrated = charts[view.chart], choice.calibrated_of(run, options)
    task = choice.task_of(run, options) if view.is_about_one else ""
    chosen = ChartOptions(
        tasks=(task,) if task else choice.tasks_of(run, options),
        variants=(calibrated or "merged",) if view.is_about_calibrated else choice.compared(run, options),
        baseline=choice.baseline_of(run, options),
        **view.options,
    )
    try:
        lacking = chart.missing(run, chosen)
        return Picture(view, chart.render(run, chosen) if lacking is None else None, lacking or "", task)
    except DataError as error:
        return Picture(view, None, f"{error.message}.")


def place(plate: Plate, part: SubFigure, run: DriftRun, letter: str, picture: Picture) -> list[Panel]:
    """Draw a picture into a part of a figure and record its numbers, or put a framed note there."""
    title = f"({letter}) {charts[picture.view.chart].title}" if letter else charts[picture.view.chart].title
    if picture.drawn is None:
        plate.note(part.subplots(), title, picture.lacking.removesuffix("."))
        return []
    if letter:
        part.suptitle(title, x=0.01, ha="left", fontsize="medium")
    for key in _tidy(run, picture.drawn.data, picture.view.quantities):
        plate.record(letter or "a", run, **key)
    panels = draw_panels(picture.drawn.figure, part)
    plate.panels += panels
    return panels


def caption_of(picture: Picture, letter: str) -> Iterator[str]:
    """What the chart says of itself, after the letter of its panel."""
    if picture.drawn is not None:
        yield (
            f"({letter}) {charts[picture.view.chart].caption}"
            if letter
            else charts[picture.view.chart].caption
        )
        yield f"Task: {picture.task}." if picture.task else ""
        yield from picture.drawn.notes


def _tidy(run: DriftRun, data: pd.DataFrame, quantities: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A chart's numbers by quantity, as a plate records them."""
    for column, quantity in quantities.items():
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
