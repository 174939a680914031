"""Accuracy by the number of calibration samples per task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.paper import captions, choice, sweep_points
from driftlens_reports.paper.captions import spaced
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.plate import Plate, legend
from driftlens_reports.paper.published import published_tables, source
from driftlens_reports.paper.series import percent_axis
from driftlens_reports.paper.style import figure, hairline, venue_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

PRINTED = "tab:ta8-full-data-efficiency"
_PRINTED_LOOKS = (("#2E9E6B", "v"), ("#9467BD", "^"), ("#444444", "s"))
_MISSING = (
    "`driftlens sweep RUN --param n=8,16,32,64,128,256,512` measures it, with test data that have labels"
)


@figure("data-efficiency", title="Accuracy by calibration samples per task", paper="Figure 3")
def data_efficiency(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """One line per run, mean and standard deviation over seeds; the paper's curves when asked for."""
    narrow = venue_of(options.width) == "icml-column"
    plate = Plate(options.width, options.width * (0.8 if narrow else 0.48))
    axes = plate.figure.subplots()
    looks, points = sweep_points.run_looks(runs), {}
    entries: dict[str, Artist] = {}
    for run in runs:
        tasks, (name, look) = choice.tasks_of(run, options), looks[run.id]
        found = sweep_points.sweep_points(run, "n", tasks)
        if len(found):
            points[run.id] = found
            entries[name] = sweep_points.draw_points(plate, axes, run, "a", "n", found, look)
            sweep_points.draw_level(plate, axes, run, "a", tasks, look)
    if options.paper:
        entries |= _draw_printed(plate, axes)
    if entries:
        _finish(axes)
        legend(plate.figure, entries, columns=2 if narrow else 3)
    if not points:
        _note_missing(plate, axes, is_empty=not entries)
    return plate.exhibited(captions.together(_caption(runs, points, plate, options)))


def _draw_printed(plate: Plate, axes: Axes) -> dict[str, Artist]:
    """The paper's curves: dotted and hollow, so that nobody takes them for measured ones."""
    table = published_tables()[PRINTED]
    entries: dict[str, Artist] = {}
    for row, (colour, marker) in zip(table.rows, _PRINTED_LOOKS, strict=True):
        counts = [float(column.removeprefix("n=")) for column in row.values]
        mean = np.array(list(row.values.values())) / 100
        spread = np.array([row.spread[column] for column in row.values]) / 100
        (line,) = axes.plot(
            counts, mean, color=colour, marker=marker, linestyle=(0, (1, 1.5)), linewidth=1.3 * hairline()
        )
        line.set_markerfacecolor("white")
        axes.vlines(counts, mean - spread, mean + spread, color=colour, linewidth=hairline())
        entries[f"paper: {row.name}"] = line
        for quantity, values in ((sweep_points.MEAN, mean), (sweep_points.SPREAD, spread)):
            plate.record("a", None, quantity, values, source="paper", variant=row.name, n=counts)
    return entries


def _finish(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    counts = sorted(
        {float(x) for line in axes.lines if line.get_marker() != "None" for x in line.get_xdata()}
    )
    axes.set_xticks(counts)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: spaced(round(count))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="calibration samples per task", ylabel="accuracy, average over tasks")
    percent_axis(axes.yaxis)


def _note_missing(plate: Plate, axes: Axes, *, is_empty: bool) -> None:
    """Say what the runs lack: in place of the plot, or in the caption where the paper's curves fill the plot."""
    name = "accuracy by calibration samples"
    if is_empty:
        plate.note(axes, name, _MISSING)
    else:
        plate.lack(name, _MISSING)


def _caption(
    runs: Sequence[DriftRun], points: Mapping[str, pd.DataFrame], plate: Plate, options: ExhibitOptions
) -> Iterator[str]:
    yield "Accuracy, averaged over tasks, by the number of calibration samples per task."
    yield from captions.origin(runs)
    yield from sweep_points.behind([run for run in runs if run.id in points], points.values(), options)
    if options.paper:
        yield (
            f"Dotted and hollow: as printed in {published_tables()[PRINTED].number} of {source()} "
            "(other models, other data); mean and standard deviation over 3 seeds."
        )
    yield captions.ROUNDED
    yield from captions.gaps(plate.missing)
