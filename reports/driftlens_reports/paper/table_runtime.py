"""What a calibration costs: time, energy, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from driftlens.records.run import DriftRun
from driftlens.variants import calibrated
from driftlens_reports.paper.costs import ENERGY, MEMORY, PAPER_PROTOCOL, TIME, cost_cells
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed, paper_note
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line
from driftlens_reports.paper.places import merger
from driftlens_reports.paper.printed import printed_blocks
from driftlens_reports.paper.published import published_tables

_SPEEDUP = "Speedup"
_PROTOCOL = (
    "Measured: wall-clock time of the calibration alone, without merging, evaluation and the analysis after it; peak "
    "resident memory of the process up to its end; energy where the machine reports it."
)


@exhibit("runtime", kind="table", title="Cost of a calibration", paper="Table 5")
def runtime(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Time, energy and memory of every calibration; speed-ups over the first line of its source."""
    table = published_tables()["tab:ta8-runtime-efficiency-n256"]
    lines = tuple(line for run in runs for line in _lines(run, options, several=len(runs) > 1))
    first = f"measured rows over {lines[0].label}, " if lines else ""
    columns = (Column(_SPEEDUP), *(Column(title, 1, best="lowest") for title in (TIME, ENERGY, MEMORY)))
    return framed(
        "runtime",
        [Grid(columns, (Block(_with_speedup(lines)), *printed_blocks(table).values()))],
        caption=f"Cost of calibrating a merged model. Speed-up: {first}the paper's over Surgery.",
        runs=[run for run in runs if run.manifest.calibrations],
        notes=[_PROTOCOL if lines else "", PAPER_PROTOCOL, paper_note(table)],
        missing=[] if lines else [Panel("Measured rows", "`driftlens calibrate RUN --name NAME` adds one.")],
    )


def _lines(run: DriftRun, options: ExhibitOptions, *, several: bool) -> Iterator[Line]:
    resources = run.resources().set_index("phase")
    for name, info in run.manifest.calibrations.items():
        if calibrated(name) not in run.variants or options.calibrated not in (None, calibrated(name)):
            continue
        phase = f"calibrate:{name}"
        used = (
            resources.loc[phase] if phase in resources.index else {"energy_wh": None, "peak_rss_bytes": None}
        )
        cells = cost_cells(info.seconds, used["energy_wh"], used["peak_rss_bytes"])
        where = f", {run.name}" if several else ""
        label = f"{merger(run)} w/ {name}{where}"
        yield Line(label, cells, "own", "measured", run.id, calibrated(name))


def _with_speedup(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    def speedup(line: Line) -> Cell:
        return Cell(lines[0].number(TIME) / line.number(TIME) if line.number(TIME) > 0 else math.nan)

    return tuple(dataclasses.replace(line, cells={_SPEEDUP: speedup(line), **line.cells}) for line in lines)
