"""How far a run's own numbers are from claims that are exact in theory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.facts import self_checks
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line


@exhibit("closure", kind="table", title="Self-checks")
def closure(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """One line per claim: the largest error over all rows, its limit, where it is; a block per run."""
    columns = tuple(
        Column(title, None, best=None) for title in ("Claim", "Largest error", "Limit", "Holds", "Where")
    )
    several = len(runs) > 1
    blocks = tuple(Block(tuple(_lines(run)), run.name if several else "") for run in runs)
    return framed(
        "closure",
        [Grid(columns, blocks, first="Check")],
        caption=(
            "Self-checks: claims that are exact in theory, and the largest error over all tasks, variants and layers."
        ),
        runs=runs,
        notes=["A check that was not measured is not a check that holds."],
        missing=[Panel(_titled(run, several), _missing(run)) for run in runs if _missing(run)],
    )


def _lines(run: DriftRun) -> Iterator[Line]:
    for check in self_checks(run):
        is_measured = check.where != ""
        cells = {
            "Claim": Cell(check.claim),
            "Largest error": Cell(check.largest),
            "Limit": Cell(check.limit),
            "Holds": Cell(("yes" if check.holds else "NO") if is_measured else "not measured"),
            "Where": Cell(check.where or "--"),
        }
        yield Line(check.name, cells, "reference", "measured", run.id)


def _missing(run: DriftRun) -> str:
    absent = [check.name for check in self_checks(run) if not check.where]
    return f"not measured: {', '.join(absent)}; `metrics` in the spec turns them on" if absent else ""


def _titled(run: DriftRun, several: bool) -> str:
    return f"Self-checks, {run.name}" if several else "Self-checks"
