"""What a chart is: a function from a saved run to a figure, the words that belong to it, and where it stands."""

from __future__ import annotations

import inspect
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
from driftlens_reports.charts.picking import ChartOptions, lacking


@dataclass(frozen=True)
class Place:
    """Where the charts of a section stand: section of a report, page of the dashboard, and its heading there."""

    report: str
    page: str = ""
    part: str = ""


SECTIONS: Mapping[str, Place] = MappingProxyType(
    {
        "drift": Place("layers", "layers", "Drift"),
        "contributions": Place("origins", "layers", "Sources"),
        "mismatch": Place("decomposition", "layers", "Mismatch and propagation"),
        "amplification": Place("decomposition", "layers", "Amplification"),
        "features": Place("cosine", "layers", "Theory"),
        "parameters": Place("parameters", "layers", "Theory"),
        "scores": Place("outputs", "layers", "Theory"),
        "plane": Place("cosine", "samples", "Explore"),
        "decisions": Place("outputs", "samples", "Decisions"),
        "accuracy": Place("outputs", "samples", "Accuracy"),
        "calibration": Place("calibration"),
    }
)
"""What a chart may declare as its section; a page shows its parts in this order."""


@dataclass(frozen=True)
class Drawn:
    """A drawn chart: what it shows in a sentence or two, every plotted number unrounded, and what else to know."""

    figure: go.Figure
    alt: str
    data: pd.DataFrame
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Drawn: {textwrap.shorten(self.alt, 60, placeholder=' ...')} {len(self.data)} rows>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **options: Any) -> dict[str, Any]:
        """Return the figure as notebooks show it."""
        shown: dict[str, Any] = self.figure._repr_mimebundle_(include, exclude, **options)
        return shown


_Render = Callable[[DriftRun, ChartOptions], Drawn]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart, as its file declares it.

    Attributes:
        name: its name, for example `layer-drift`.
        title: a heading.
        section: where it belongs, one of `SECTIONS`.
        rank: its place, ascending, in its section of a report and its part of a page.
        caption: one sentence that says what is plotted, with n, dispersion and split.
        hint: how to read it, and what it can't tell.
        needs: a table of the run, and the columns of it that the chart can't do without.
        presets: the report presets that it belongs to besides `full`.
        also: what a spec must give besides for there to be rows.
        lacks: what `missing` says where a number in every needed column is not enough to draw.
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
    def place(self) -> Place:
        """Where its section stands."""
        return SECTIONS[self.section]

    def missing(self, run: DriftRun, options: ChartOptions) -> str | None:
        """None, or one sentence that says what the run lacks and which command adds it."""
        if self.lacks is not None:
            return self.lacks(run, options)
        return lacking(run, options, *self.needs, also=self.also)

    def draw(self, run: DriftRun, options: ChartOptions | None = None) -> Drawn:
        """The chart of `run`; DataError says which command adds what the run lacks, in its context without the name."""
        chosen = options or ChartOptions()
        lacking = self.missing(run, chosen)
        if lacking is not None:
            raise DataError(f"{self.name}: {lacking}", lacking=lacking)
        drawn = self.render(run, chosen)
        # Zoom and hidden traces stay as long as this does: when only the theme changes.
        drawn.figure.layout.uirevision = f"{run.id} {self.name} {astuple(replace(chosen, dark=False))}"
        return drawn

    def attempt(self, run: DriftRun, options: ChartOptions) -> tuple[Drawn | None, str]:
        """The chart, or in words what the run lacks for it, which may be the variant that it compares with."""
        try:
            lacking = self.missing(run, options)
            return (None, lacking) if lacking else (self.render(run, options), "")
        except DataError as error:
            return None, f"{error.message}."


charts: Registry[Chart] = Registry("chart", "driftlens_reports.charts", "driftlens.charts")


def chart(name: str, **declared: Any) -> Callable[[_Render], _Render]:
    """Decorator that files a drawing function as the chart `name`; `declared` are the other attributes of `Chart`."""

    def file(render: _Render) -> _Render:
        charts.register(name)(Chart(name=name, render=render, **declared))
        return render

    return file


def by_rank(entries: Iterable[Chart]) -> list[Chart]:
    """Charts in the order in which a reader meets them."""
    return sorted(entries, key=lambda entry: (entry.rank, entry.name))


def parts_of(page: str) -> dict[str, list[str]]:
    """Names of the charts that a page of the dashboard shows, by the heading of their part."""
    parts: dict[str, list[str]] = {}
    for section, place in SECTIONS.items():
        if place.page == page:
            entries = by_rank(entry for entry in charts.values() if entry.section == section)
            parts.setdefault(place.part, []).extend(entry.name for entry in entries)
    return parts


class Plots:
    """The charts of one run, each a function of `ChartOptions` by keyword; names have `_` where charts have `-`."""

    def __init__(self, run: DriftRun) -> None:
        self._run = run

    def __dir__(self) -> list[str]:
        return [name.replace("-", "_") for name in charts]

    def __getattr__(self, name: str) -> Callable[..., Drawn]:
        if name.startswith("_") or name not in dir(self):
            raise AttributeError(f"there is no chart {name!r}; there are {', '.join(dir(self))}")
        chart = charts[name.replace("_", "-")]

        def draw(**options: Any) -> Drawn:
            return chart.draw(self._run, ChartOptions(**options))

        draw.__name__ = name
        draw.__doc__ = f"{chart.title}.\n\n{chart.caption}\n\n{chart.hint}"
        taken = inspect.signature(ChartOptions, eval_str=True).parameters.values()
        draw.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in taken], return_annotation=Drawn
        )
        return draw

    def __repr__(self) -> str:
        names = textwrap.shorten(self._run.name, 60, placeholder=" ...")
        return textwrap.fill(f"<charts of run {names!r}: {', '.join(dir(self))}>", 100)
