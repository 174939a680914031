"""Figures and tables for a paper, plotted from saved runs: `dl.paper.figure("intro", run).save("fig1.pdf")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from driftlens.config.requests import ExhibitRequest
from driftlens.front.keywords import keywords

if TYPE_CHECKING:
    from driftlens.runs.run import DriftRun
    from driftlens_reports.paper.exhibit import Artifact

__all__ = ["figure", "names", "table"]


@keywords(request=ExhibitRequest)
def figure(name: str, runs: DriftRun | Sequence[DriftRun], request: ExhibitRequest) -> Artifact:
    """Create the figure or table called `name`, with `save`, `caption` and `data`; a table also has `to_latex`.

    Args:
        name: one of `names()`.
        runs: one or several runs.
        request: by keywords, fields of `driftlens.config.requests.ExhibitRequest`, for example `style` or `task`.
    """
    from driftlens.runs.run import DriftRun
    from driftlens_reports.paper.exhibit import ExhibitOptions, draw

    several = [runs] if isinstance(runs, DriftRun) else list(runs)
    return draw(name, several, ExhibitOptions.of(request))


table = figure


def names() -> dict[str, str]:
    """Return the title of every figure and table by name."""
    from driftlens_reports.paper.exhibit import exhibits

    return {name: entry.title for name, entry in exhibits.items()}
