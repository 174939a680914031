"""Figures and tables for a paper, plotted from saved runs: `dl.paper.figure("intro", run).save("fig1.pdf")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from driftlens.config.requests import ExhibitRequest, fields_as_keywords

if TYPE_CHECKING:
    from driftlens.runs.run import DriftRun
    from driftlens_reports.paper.exhibit import Artifact

__all__ = ["figure", "names", "table"]


@fields_as_keywords(request=ExhibitRequest)
def figure(name: str, runs: DriftRun | Sequence[DriftRun], request: ExhibitRequest) -> Artifact:
    """Create the paper figure or table called `name`; it has `save`, `caption` and `data`, a table also `to_latex`.

    Args:
        name: one of `names()`.
        runs: one or several runs.
        request: by keywords, fields of `driftlens.config.requests.ExhibitRequest`, for example `style` or `task`.
    """
    from driftlens.runs.run import DriftRun
    from driftlens_reports.paper.exhibit import ExhibitOptions, draw_exhibit

    several = [runs] if isinstance(runs, DriftRun) else list(runs)
    return draw_exhibit(name, several, ExhibitOptions.from_request(request))


table = figure


def names() -> dict[str, str]:
    """Return the titles of all paper figures and tables, by name."""
    from driftlens_reports.paper.exhibit import exhibits

    return {name: entry.title for name, entry in exhibits.items()}
