"""Every chart of a run by its name, for notebooks: `run.plot.layer_drift(tasks=["cars"])`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from driftlens.base.errors import did_you_mean
from driftlens.runs.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, charts


class Plots:
    """The charts of one run, each a function of `ChartOptions` by keyword; names have `_` where charts have `-`."""

    def __init__(self, run: DriftRun) -> None:
        self._run = run

    def __dir__(self) -> list[str]:
        return [name.replace("-", "_") for name in charts]

    def __getattr__(self, name: str) -> Callable[..., Drawn]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in dir(self):
            raise AttributeError(f"there is no chart {name!r}; {did_you_mean(name, dir(self))}")
        chart = charts[name.replace("_", "-")]

        def draw(**options: Any) -> Drawn:
            return chart.draw(self._run, ChartOptions(**options))

        draw.__name__ = name
        draw.__doc__ = f"{chart.title}.\n\n{chart.caption}\n\n{chart.hint}"
        draw.__signature__ = inspect.signature(ChartOptions)  # type: ignore[attr-defined]
        return draw

    def __repr__(self) -> str:
        return f"<charts of run {self._run.name!r}: {', '.join(dir(self))}>"
