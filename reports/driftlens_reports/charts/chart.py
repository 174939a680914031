"""The registry of charts. A chart turns a saved run and `ChartOptions` into a plotly figure. Entry point: `charts`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from driftlens.runs.run import DriftRun
from driftlens.utils.errors import DataError
from driftlens.utils.registry import Registry
from driftlens_reports.charts.picking import ChartOptions, missing_data_message


@dataclass(frozen=True)
class ChartPlacement:
    """The report section, dashboard page and page heading under which charts are shown."""

    report: str
    page: str = ""
    part: str = ""


# The sections that a chart may declare; a page shows its parts in this order.
SECTIONS: Mapping[str, ChartPlacement] = MappingProxyType(
    {
        "drift": ChartPlacement("layers", "layers", "Drift"),
        "contributions": ChartPlacement("origins", "layers", "Sources"),
        "mismatch": ChartPlacement("decomposition", "layers", "Drift"),
        "amplification": ChartPlacement("decomposition", "layers", "Path-averaged Jacobians"),
        "features": ChartPlacement("cosine", "layers", "Expert cosine"),
        "parameters": ChartPlacement("parameters", "layers", "Task-vector alignment"),
        "scores": ChartPlacement("outputs", "layers", "Output drift"),
        "plane": ChartPlacement("cosine", "samples", "Explore"),
        "decisions": ChartPlacement("outputs", "samples", "Decisions"),
        "accuracy": ChartPlacement("outputs", "samples", "Accuracy"),
        "calibration": ChartPlacement("calibration"),
    }
)


@dataclass(frozen=True)
class Drawn:
    """A drawn chart: the plotly figure, its alt text, all plotted numbers (unrounded), and notes."""

    figure: go.Figure
    alt: str
    data: pd.DataFrame
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Drawn: {textwrap.shorten(self.alt, 60, placeholder=' ...')} {len(self.data)} rows>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **options: Any) -> dict[str, Any]:
        shown: dict[str, Any] = self.figure._repr_mimebundle_(include, exclude, **options)
        return shown


_Render = Callable[[DriftRun, ChartOptions], Drawn]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A registered chart: its drawing function, title, caption, section and required columns.

    Attributes:
        name: its name, for example `layer-drift`.
        title: a heading.
        section: one of `SECTIONS`.
        rank: its place, ascending, in its section of a report and its part of a page.
        caption: the plotted quantity in a sentence of one line; then dispersion, n and split.
        hint: how to read it, and its limits.
        needs: a table of the run, and its required columns.
        presets: the report presets that it belongs to besides `full`.
        also: a further requirement on the spec.
        lacks: replaces the default test of `missing`.
        render: draws it; call `draw`.
    """

    name: str
    title: str
    section: str
    rank: int
    caption: str
    hint: str
    needs: tuple[str, tuple[str, ...]]
    presets: tuple[str, ...] = ()
    also: str = ""
    lacks: Callable[[DriftRun, ChartOptions], str | None] | None = None
    render: _Render

    @property
    def place(self) -> ChartPlacement:
        """The report section, dashboard page and heading of the chart."""
        return SECTIONS[self.section]

    def missing(self, run: DriftRun, options: ChartOptions) -> str | None:
        """Return None if the run has the chart's data, else what is missing and the command that adds it."""
        if self.lacks is not None:
            return self.lacks(run, options)
        return missing_data_message(run, options, *self.needs, also=self.also)

    def draw(self, run: DriftRun, options: ChartOptions | None = None) -> Drawn:
        """Draw the chart of `run` as a plotly figure with notes and data.

        Raises:
            DataError: the run lacks numbers; the message names the command that adds them.
        """
        chosen = options or ChartOptions()
        lacking = self.missing(run, chosen)
        if lacking is not None:
            raise DataError(f"{self.name}: {lacking}", lacking=lacking)
        drawn = self.render(run, chosen)
        # Plotly keeps zoom and hidden traces while this value stays the same, that is, when only the theme changes.
        drawn.figure.layout.uirevision = f"{run.id} {self.name} {astuple(replace(chosen, dark=False))}"
        return drawn

    def try_draw(self, run: DriftRun, options: ChartOptions) -> tuple[Drawn | None, str]:
        """Draw the chart; return None and the reason if the run lacks the data."""
        try:
            lacking = self.missing(run, options)
            return (None, lacking) if lacking else (self.render(run, options), "")
        except DataError as error:
            return None, f"{error.message}."


charts: Registry[Chart] = Registry("chart", "driftlens_reports.charts", "driftlens.charts")


def chart(name: str, **declared: Any) -> Callable[[_Render], _Render]:
    """Register a drawing function as the chart `name`; `declared` are further attributes of `Chart`."""

    def register_chart(render: _Render) -> _Render:
        charts.register(name)(Chart(name=name, render=render, **declared))
        return render

    return register_chart


def sort_by_rank(entries: Iterable[Chart]) -> list[Chart]:
    """Return charts in display order: by rank, then by name."""
    return sorted(entries, key=lambda entry: (entry.rank, entry.name))


def chart_names_by_heading(page: str) -> dict[str, list[str]]:
    """Return the names of the charts on a dashboard page by rank, keyed by heading."""
    parts: dict[str, list[Chart]] = {}
    for section, place in SECTIONS.items():
        if place.page == page:
            entries = sort_by_rank(entry for entry in charts.values() if entry.section == section)
            parts.setdefault(place.part, []).extend(entries)
    # A part may have the charts of two sections; of equal ranks, those of the first section come first.
    return {
        part: [entry.name for entry in sorted(found, key=lambda entry: entry.rank)] for part, found in parts.items()
    }


class RunCharts:
    """All charts of one run as methods that take `ChartOptions` by keyword, for example `layer_drift(log=True)`."""

    def __init__(self, run: DriftRun) -> None:
        self._run = run

    def __dir__(self) -> list[str]:
        return [name.replace("-", "_") for name in charts]

    def __getattr__(self, name: str) -> Callable[..., Drawn]:
        # Python looks up private names, too, for example when it copies an object.
        if name.startswith("_") or name not in dir(self):
            raise AttributeError(f"there is no chart {name!r}; there are {', '.join(dir(self))}")
        chart = charts[name.replace("_", "-")]

        def draw(**options: Any) -> Drawn:
            return chart.draw(self._run, ChartOptions(**options))

        draw.__name__ = name
        draw.__doc__ = f"{chart.title}.\n\n{chart.caption}\n\n{chart.hint}"
        return draw

    def __repr__(self) -> str:
        names = textwrap.shorten(self._run.name, 60, placeholder=" ...")
        return textwrap.fill(f"<charts of run {names!r}: {', '.join(dir(self))}>", 100)
