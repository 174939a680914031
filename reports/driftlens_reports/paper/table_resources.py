"""Where a run's time and memory went, and what calibrating costs on average over sample budgets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.costs import ENERGY, MEMORY, PAPER_PROTOCOL, TIME, cost_cells
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed, paper_note
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line
from driftlens_reports.paper.places import merger
from driftlens_reports.paper.printed import printed_blocks
from driftlens_reports.paper.published import published_tables

_PER_TASK = re.compile(r"^(?P<kind>(?:calibrate:.+:)?(?:analyze|evaluate)):.+$")
"""Phases that are done once per task."""


@exhibit("resources", kind="table", title="Time and memory", paper="Table 13")
def resources(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Averages over sample budgets and seeds, then every phase of every run."""
    table = published_tables()["tab:ta8-overall-runtime-appendix"]
    averages = tuple(line for run in runs for line in _averages(run))
    phases = [Block(tuple(_phases(run)), run.name if len(runs) > 1 else "") for run in runs]
    columns = tuple(Column(title, 1, best="lowest") for title in (TIME, ENERGY, MEMORY))
    plain = tuple(Column(column.title, 1, best=None) for column in columns)
    needed = "`driftlens sweep RUN --param n=8,16,32,64,128,256,512` measures them."
    return framed(
        "resources",
        [
            Grid(columns, (Block(averages), *printed_blocks(table).values())),
            Grid(plain, tuple(phases), first="Phase"),
        ],
        caption=(
            "Cost of calibrating, averaged over calibration samples per task and seeds; below it, time and memory of "
            "the runs by phase."
        ),
        runs=runs,
        notes=[
            "Phases done once per task are summed; memory is the process's peak up to the end of the phase.",
            PAPER_PROTOCOL,
            paper_note(table),
        ],
        missing=[] if averages else [Panel("Averages over budgets", needed)],
    )


def _averages(run: DriftRun) -> Iterator[Line]:
    rows = run.sweeps()
    rows = rows[(rows["sweep"] == "n") & rows["seconds"].notna()]
    if rows.empty:
        return
    # The time of a point stands in the row of each of its tasks.
    points = rows.drop_duplicates(["point", "seed"])
    budgets, seeds = points["n"].nunique(), points["seed"].nunique()
    label = f"{merger(run)} w/ FeatCal, {budgets} budgets, {seeds} seed{'s' if seeds > 1 else ''}"
    yield Line(label, {TIME: Cell(float(points["seconds"].mean()))}, "own", "measured", run.id)


def _phases(run: DriftRun) -> Iterator[Line]:
    rows = run.resources()
    kinds = rows["phase"].str.replace(_PER_TASK, r"\g<kind>:", regex=True)
    for kind, group in rows.groupby(kinds, sort=False):
        count = f" ({len(group)} task{'s' if len(group) > 1 else ''})" if str(kind).endswith(":") else ""
        label = f"{str(kind).removesuffix(':')}{count}"
        cells = cost_cells(
            group["seconds"].sum(min_count=1),
            group["energy_wh"].sum(min_count=len(group)),
            group["peak_rss_bytes"].max(),
        )
        yield Line(label, cells, "reference", "measured", run.id)
