"""Tables of what calibrating costs: time, energy, memory, and accuracy by the number of samples."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from driftlens.records.manifest import CalibrationInfo
from driftlens.records.run import DriftRun
from driftlens.variants import calibrated
from driftlens_reports.paper.choice import tasks_of
from driftlens_reports.paper.exhibit import ExhibitOptions
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line
from driftlens_reports.paper.places import merger
from driftlens_reports.paper.printed import printed_blocks
from driftlens_reports.paper.published import PublishedTable
from driftlens_reports.paper.sweeps import sweep_points
from driftlens_reports.paper.table import Table, needed, paper_table

CALIBRATE = "`driftlens calibrate RUN --name NAME` adds one."
_SWEEP = "`driftlens sweep RUN --param n=8,16,32,64,128,256,512` measures them."

_TIME, _ENERGY, _MEMORY, _SPEEDUP = "Time (s)", "GPU energy (Wh)", "CPU RSS (GiB)", "Speedup"
_COSTS = tuple(Column(title, 1, best="lowest") for title in (_TIME, _ENERGY, _MEMORY))
_OURS = (
    "Measured: wall-clock time of the calibration alone, without merging, evaluation and the analysis after it; peak "
    "resident memory of the process up to its end; energy where the machine reports it."
)
_THEIRS = (
    "Paper: one A800-80GB GPU, batch size 16, 8 workers, 1000 steps of the iterative methods, final evaluation "
    "excluded, resident memory of the process tree. Other hardware, so times must not be compared across sources."
)
_PER_TASK = re.compile(r"^(?P<kind>(?:calibrate:.+:)?(?:analyze|evaluate|explain)):.+$")
"""Phases that are done once per task."""


@paper_table("runtime", title="Cost of a calibration", label="tab:ta8-runtime-efficiency-n256")
def runtime(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """Time, energy and memory of every calibration; speed-ups over the first line of its source."""
    lines = [line for run in runs for line in _calibrations(run, options, several=len(runs) > 1)]
    first = f"measured rows over {lines[0].label}, " if lines else ""
    for at, line in enumerate(lines):
        ratio = lines[0].number(_TIME) / line.number(_TIME) if line.number(_TIME) > 0 else math.nan
        lines[at] = dataclasses.replace(line, cells={_SPEEDUP: Cell(ratio), **line.cells})
    return Table(
        [Grid((Column(_SPEEDUP), *_COSTS), (Block(tuple(lines)), *printed_blocks(printed).values()))],
        f"Cost of calibrating a merged model. Speed-up: {first}the paper's over Surgery.",
        [run for run in runs if run.manifest.calibrations],
        [_OURS if lines else "", _THEIRS],
        needed(lines, CALIBRATE),
    )


@paper_table("resources", title="Time and memory", label="tab:ta8-overall-runtime-appendix")
def resources(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """Averages over sample budgets and seeds, then every phase of every run."""
    averages = tuple(line for run in runs for line in _averages(run))
    phases = tuple(Block(tuple(_phases(run)), run.name if len(runs) > 1 else "") for run in runs)
    return Table(
        [
            Grid(_COSTS, (Block(averages), *printed_blocks(printed).values())),
            Grid(tuple(dataclasses.replace(column, best=None) for column in _COSTS), phases, first="Phase"),
        ],
        "Cost of calibrating, averaged over calibration samples per task and seeds; below it, time and memory of "
        "the runs by phase.",
        runs,
        [
            "Phases done once per task are summed; memory is the process's peak up to the end of the phase.",
            _THEIRS,
        ],
        needed(averages, _SWEEP, "Averages over budgets"),
    )


@paper_table("efficiency", title="Accuracy by calibration samples", label="tab:ta8-full-data-efficiency")
def efficiency(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """Mean and standard deviation over seeds, a column per number of samples."""
    found = {run.id: _by_samples(run, options, several=len(runs) > 1) for run in runs}
    used = [run for run in runs if found[run.id].cells]
    lines = tuple(found[run.id] for run in used)
    counts = {title for line in lines for title in line.cells} | set(printed.columns)
    titles = sorted(counts, key=lambda title: int(title.partition("=")[2]))
    columns = tuple(Column(title, options.digits) for title in titles)
    return Table(
        [Grid(columns, (Block(lines), *printed_blocks(printed).values()))],
        "Accuracy (%), averaged over tasks, by calibration samples n per task: mean ± standard deviation over "
        "seeds (n - 1 in the denominator), without one where there is one seed.",
        used,
        [*(_seeds(run, options) for run in used), "Paper: seeds 42, 43, 44."],
        needed(used, _SWEEP),
    )


def chosen_calibrations(run: DriftRun, options: ExhibitOptions) -> Mapping[str, CalibrationInfo]:
    """The run's calibrations by name, without those that left no variant or were not asked for."""
    return {
        name: info
        for name, info in run.manifest.calibrations.items()
        if calibrated(name) in run.variants and options.calibrated in (None, calibrated(name))
    }


def _calibrations(run: DriftRun, options: ExhibitOptions, *, several: bool) -> Iterator[Line]:
    used = run.resources().set_index("phase")
    for name, info in chosen_calibrations(run, options).items():
        row = used.loc[f"calibrate:{name}"] if f"calibrate:{name}" in used.index else {}
        cells = _cells(info.seconds, row.get("energy_wh"), row.get("peak_rss_bytes"))
        label = f"{merger(run)} w/ {name}{f', {run.name}' if several else ''}"
        yield Line(label, cells, "own", "measured", run.id, calibrated(name))


def _averages(run: DriftRun) -> Iterator[Line]:
    rows = run.sweeps()
    rows = rows[(rows["sweep"] == "n") & rows["seconds"].notna()]
    if rows.empty:
        return
    # The time of a point stands in the row of each of its tasks.
    points = rows.drop_duplicates(["point", "seed"])
    budgets, seeds = points["n"].nunique(), points["seed"].nunique()
    label = f"{merger(run)} w/ FeatCal, {budgets} budgets, {seeds} seed{'s' if seeds > 1 else ''}"
    yield Line(label, {_TIME: Cell(float(points["seconds"].mean()))}, "own", "measured", run.id)


def _phases(run: DriftRun) -> Iterator[Line]:
    rows = run.resources()
    kinds = rows["phase"].str.replace(_PER_TASK, r"\g<kind>:", regex=True)
    for kind, group in rows.groupby(kinds, sort=False):
        count = f" ({len(group)} task{'s' if len(group) > 1 else ''})" if str(kind).endswith(":") else ""
        cells = _cells(
            group["seconds"].sum(min_count=1),
            group["energy_wh"].sum(min_count=len(group)),
            group["peak_rss_bytes"].max(),
        )
        yield Line(f"{str(kind).removesuffix(':')}{count}", cells, "reference", "measured", run.id)


def _cells(seconds: Any, energy_wh: Any, peak_rss_bytes: Any) -> dict[str, Cell]:
    """The three costs by column; null becomes NaN, never 0."""
    values = (math.nan if pd.isna(value) else float(value) for value in (seconds, energy_wh, peak_rss_bytes))
    time, energy, memory = values
    return {_TIME: Cell(time), _ENERGY: Cell(energy), _MEMORY: Cell(memory / 2.0**30)}


def _by_samples(run: DriftRun, options: ExhibitOptions, *, several: bool) -> Line:
    cells = {
        f"n={int(point['setting'])}": Cell(
            100 * point["mean"],
            100 * point["std"],
            None if pd.isna(point["n_test"]) else int(point["n_test"]),
        )
        for point in sweep_points(run, "n", tasks_of(run, options)).to_dict("records")
    }
    label = f"{merger(run)} w/ FeatCal{f', {run.name}' if several else ''}"
    return Line(label, cells, "own", "measured", run.id)


def _seeds(run: DriftRun, options: ExhibitOptions) -> str:
    rows = run.sweeps()
    rows = rows[(rows["sweep"] == "n") & rows["accuracy"].notna()]
    seeds = ", ".join(str(int(seed)) for seed in sorted(rows["seed"].unique()))
    return f"{run.name}: seeds {seeds}; {len(tasks_of(run, options))} tasks."
