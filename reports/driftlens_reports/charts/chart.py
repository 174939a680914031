"""What a chart is: a function from a saved run to a plotly figure, and the words that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pandas as pd

from driftlens.errors import DataError
from driftlens.records.run import DriftRun
from driftlens.registry import Registry

if TYPE_CHECKING:
    import plotly.graph_objects as go

Section = Literal["layers", "causes", "features", "parameters", "outputs"]
"""Where a report and the app put a chart; they show sections in this order."""


@dataclass(frozen=True)
class ChartOptions:
    """What a reader may choose. Figures depend on these and on the run, never on a selection in the browser.

    Attributes:
        tasks: only these; None is all.
        variants: only these; None is all but the base.
        layer: layer index, "final" or module path, for charts of one layer.
        band: which dispersion the band shows: the 10-90 % or 25-75 % quantiles, one standard deviation, or none.
        log: a logarithmic value axis, where the chart has one.
        relative: drift against the expert's feature norm instead of in feature units.
        baseline: the variant that gains are counted from.
        colour: what colours the points of scatters.
        method: projection of the feature scatter.
        seed: of that projection's random numbers.
        classes: the feature scatter shows only samples of these classes; None is all.
        highlight: ids of samples whose way from expert to variant the feature scatter draws.
        max_points: more are thinned out, evenly and repeatably; the notes then say so.
        dark: the dark theme.
    """

    tasks: Sequence[str] | None = None
    variants: Sequence[str] | None = None
    layer: int | str = "final"
    band: Literal["q10-q90", "q25-q75", "std", "none"] = "q10-q90"
    log: bool = False
    relative: bool = False
    baseline: str = "merged"
    colour: Literal["role", "class", "drift"] = "role"
    method: str = "pca"
    seed: int = 0
    classes: Sequence[str] | None = None
    highlight: Sequence[str] = ()
    max_points: int = 20_000
    dark: bool = False


@dataclass(frozen=True)
class Drawn:
    """A drawn chart.

    Attributes:
        figure: the plotly figure; axis titles carry units.
        alt: what the figure shows, in a sentence or two made from its numbers.
        data: every plotted number, a tidy row each, at full precision.
        notes: what a reader must know besides, for example how many of the points are shown.
    """

    figure: go.Figure
    alt: str
    data: pd.DataFrame
    notes: tuple[str, ...] = ()


Missing = Callable[[DriftRun, ChartOptions], str | None]


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: its name, for example `layer-drift`.
        title: a heading.
        section: where it belongs.
        caption: one sentence that says what is plotted, with n, dispersion and split.
        hint: how to read it, and what it can't tell.
        missing: None, or one sentence that says what the run lacks and which command adds it.
        render: draws it; call `draw`.
    """

    name: str
    title: str
    section: Section
    caption: str
    hint: str
    missing: Missing
    render: Callable[[DriftRun, ChartOptions], Drawn]

    def draw(self, run: DriftRun, options: ChartOptions | None = None) -> Drawn:
        """The chart of `run`.

        Raises:
            DataError: the run lacks what the chart shows; says which command adds it.
            RunError: a table can't be read.
        """
        chosen = options or ChartOptions()
        lacking = self.missing(run, chosen)
        if lacking is not None:
            raise DataError(f"{self.name}: {lacking}")
        return self.render(run, chosen)


charts: Registry[Chart] = Registry("chart", "driftlens_reports.charts")


def chart(
    name: str, *, title: str, section: Section, caption: str, hint: str, missing: Missing
) -> Callable[[Callable[[DriftRun, ChartOptions], Drawn]], Callable[[DriftRun, ChartOptions], Drawn]]:
    """Decorator that files a drawing function as the chart `name`."""

    def file(
        render: Callable[[DriftRun, ChartOptions], Drawn],
    ) -> Callable[[DriftRun, ChartOptions], Drawn]:
        charts.register(name)(Chart(name, title, section, caption, hint, missing, render))
        return render

    return file
