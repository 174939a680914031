"""Tables of runs: drift by task and layer, self-checks, the settings behind every calibration, and what it costs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from driftlens.base.variants import calibrated
from driftlens.findings.checks import CheckResult, measured_by, self_checks
from driftlens.findings.swept import sweep_named, swept_methods
from driftlens.runs.manifest import CalibrationInfo
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens_reports.charts.words import between, called, title
from driftlens_reports.paper import exhibit, published
from driftlens_reports.paper.drawn import sweep_points, sweeping
from driftlens_reports.paper.exhibit import ExhibitOptions, Gap, Table, needed, plain_columns, table
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line, percent_cell
from driftlens_reports.paper.published import PublishedTable, merger, method_title, printed_blocks
from driftlens_reports.paper.score_tables import shown_variants

_CALIBRATE = f"`{CALIBRATE}` adds one."

_TIME, _ENERGY, _MEMORY, _SPEEDUP = "Time (s)", "GPU energy (Wh)", "CPU RSS (GiB)", "Speedup"
_COSTS = tuple(Column(title, 1) for title in (_TIME, _ENERGY, _MEMORY))
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


@table("drift", title="Relative drift by task and layer")
def drift(runs: Sequence[DriftRun], options: ExhibitOptions) -> Table:
    """One line per task, one column per layer, one block per variant; a grid per run."""
    rows = {run: _drifts(run, options) for run in runs}
    shown = pd.concat(rows.values()) if rows else pd.DataFrame()
    how = "`driftlens analyze` with this run's spec measures drift by layer."
    return Table(
        [_drift_grid(run, drifts, options, several=len(runs) > 1) for run, drifts in rows.items()],
        "Relative drift (%) by task and layer: norm of the feature's difference to the task's expert against the "
        "norm of the expert's feature, sums over samples. Layers in forward order; S is the stem, H the head.",
        runs,
        [exhibit.samples(shown) if len(shown) else "", "A dash: not stored, or not measured."],
        [Gap(run.name, how) for run, drifts in rows.items() if drifts.empty],
    )


def _drifts(run: DriftRun, options: ExhibitOptions) -> pd.DataFrame:
    """The rows of the layer table that are shown."""
    rows = run.layers()
    is_shown = rows["variant"].isin(["merged", *shown_variants(run, options)])
    return rows[is_shown & rows["task"].isin(options.tasks_of(run)) & rows["drift_rel"].notna()]


def _drift_grid(run: DriftRun, rows: pd.DataFrame, options: ExhibitOptions, *, several: bool) -> Grid:
    letters = {"stem": "S", "head": "H"}
    heads = {layer.index: letters.get(layer.role, str(layer.index)) for layer in run.manifest.layers}
    groups, blocks = dict([*rows.groupby(["variant", "task"])]), []
    for variant in ("merged", *shown_variants(run, options)):
        lines = []
        for task in run.tasks:
            if (variant, task) in groups:
                drifts = groups[variant, task][["layer", "drift_rel", "n"]].itertuples(index=False)
                cells = {heads[layer]: percent_cell(drift, n=n) for layer, drift, n in drifts}
                lines.append(Line(called(task), cells, "reference", "measured", run.id, variant))
        blocks += (
            [Block(tuple(lines), f"{title(variant)}{f', {run.name}' if several else ''}")] if lines else []
        )
    shown = [head for layer, head in heads.items() if (rows["layer"] == layer).any()]
    return Grid(tuple(Column(head, options.digits) for head in shown), tuple(blocks), first="Task")


@table("closure", title="Self-checks")
def closure(runs: Sequence[DriftRun], options: ExhibitOptions) -> Table:
    """One line per claim: the largest error over all rows, its limit, where it is; a block per run."""
    blocks, missing, several = [], [], len(runs) > 1
    for run in runs:
        checks = self_checks(run).results
        blocks.append(Block(tuple(_check_line(run, check) for check in checks), run.name if several else ""))
        absent = [check.metric for check in checks if not check.where]
        if absent:
            commands = dict.fromkeys(map(measured_by, absent))
            said = {at: ", ".join(name for name in absent if measured_by(name) == at) for at in commands}
            how = "; ".join(f"`{command}` measures {names}" for command, names in said.items())
            named = f"self-checks of {', '.join(absent)}"
            missing.append(Gap(f"{named}, {run.name}" if several else named, how))
    return Table(
        [Grid(plain_columns("Claim", "Largest error", "Limit", "Holds", "Where"), tuple(blocks), "Check")],
        "Self-checks: claims that are exact in theory, and the largest error over all tasks, variants and layers.",
        runs,
        ["A check that was not measured is not a check that holds."],
        missing,
    )


def _check_line(run: DriftRun, check: CheckResult) -> Line:
    cells = {
        "Claim": Cell(check.claim),
        "Largest error": Cell(check.value),
        "Limit": Cell(check.threshold),
        "Holds": Cell(("yes" if check.status == "pass" else "NO") if check.where else "not measured"),
        "Where": Cell(check.where or "--"),
    }
    return Line(check.metric, cells, "reference", "measured", run.id)


@table("hyper", title="Settings per run")
def hyper(runs: Sequence[DriftRun], options: ExhibitOptions) -> Table:
    """One line per calibration of every run, then the paper's by model."""
    measured, printed = [], []
    for run in runs:
        merge = published.spec_section(run, "merge")
        extra = ", ".join(f"{key} {value}" for key, value in merge.items() if key != "method")
        for name, info in _calibrations(run, options).items():
            cells = {
                "Merger": Cell(f"{merger(run)}{f' ({extra})' if extra else ''}"),
                "Method": Cell(info.method),
                **_coefficients(info.settings),
                "n": Cell(between([*info.samples.values()]) if info.samples else "--"),
                "Layers": Cell(between(info.layers) if info.layers else "--"),
            }
            measured.append(
                Line(f"{run.name}, {called(name)}", cells, "reference", "measured", run.id, calibrated(name))
            )
    for entry in published.settings() if options.paper else ():
        cells = {"Method": Cell("FeatCal"), **_coefficients(entry), "n": Cell(str(entry["n"]))}
        printed.append(Line(entry["model"], cells, "reference", "paper"))
    columns = plain_columns("Merger", "Method", "λ", "ρ", "α", "Updates", "n", "Layers")
    return Table(
        [Grid(columns, (Block(tuple(measured)), Block(tuple(printed))), "Run or model")],
        "Settings: ridge λ relative to a Gram matrix of Frobenius norm 1, anchor position ρ from base (0) to "
        "merged model (1), expert share α of the target; n calibration samples per task.",
        [run for run in runs if run.manifest.calibrations],
        [f"Paper: section 5.1 of {published.source()}."] if printed else [],
        needed(measured, _CALIBRATE),
    )


@table("runtime", title="Cost of a calibration", label="tab:ta8-runtime-efficiency-n256")
def runtime(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """Time, energy and memory of every calibration; speed-ups over the first line of its source."""
    lines: list[Line] = []
    for run in runs:
        used = run.resources().set_index("phase")
        for name, info in _calibrations(run, options).items():
            row = used.loc[f"calibrate:{name}"] if f"calibrate:{name}" in used.index else {}
            cells = _costs(info.seconds, row.get("energy_wh"), row.get("peak_rss_bytes"))
            first = lines[0].number(_TIME) if lines else cells[_TIME].number
            cells[_SPEEDUP] = Cell(first / cells[_TIME].number if cells[_TIME].number > 0 else math.nan)
            label = f"{merger(run)} w/ {called(name)}{f', {run.name}' if len(runs) > 1 else ''}"
            lines.append(Line(label, cells, "own", "measured", run.id, calibrated(name)))
    sources = [f"measured rows over {lines[0].label}"] if lines else []
    sources += ["the paper's over Surgery"] if printed.rows else []
    over = [f"Speed-up: {', '.join(sources)}."] if sources else []
    return Table(
        [Grid((Column(_SPEEDUP), *_COSTS), (Block(tuple(lines)), *printed_blocks(printed).values()))],
        " ".join(["Cost of calibrating a merged model.", *over]),
        [run for run in runs if run.manifest.calibrations],
        [_OURS if lines else "", _THEIRS if printed.rows else ""],
        needed(lines, _CALIBRATE),
    )


@table("resources", title="Time and memory", label="tab:ta8-overall-runtime-appendix")
def resources(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """Averages over sample budgets and seeds, then every phase of every run."""
    averages = tuple(line for run in runs for line in _averages(run))
    phases = tuple(Block(tuple(_phases(run)), run.name if len(runs) > 1 else "") for run in runs)
    return Table(
        [
            Grid(_COSTS, (Block(averages), *printed_blocks(printed).values())),
            Grid(_COSTS, phases, first="Phase"),
        ],
        "Cost of calibrating, averaged over calibration samples per task and seeds; below it, time and memory of "
        "the runs by phase.",
        runs,
        [
            "Phases done once per task are summed; memory is the process's peak up to the end of the phase.",
            _THEIRS if printed.rows else "",
        ],
        needed(averages, sweeping("n"), "Averages over budgets"),
    )


@table("efficiency", title="Accuracy by calibration samples", label="tab:ta8-full-data-efficiency")
def efficiency(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """Mean and standard deviation over seeds, a column per number of samples."""
    lines, notes, used = [], [], []
    for run in runs:
        for method in swept_methods(run, "n"):
            cells = {
                f"n={int(point['setting'])}": percent_cell(point["mean"], point["std"], point["n_test"])
                for point in sweep_points(run, "n", options.tasks_of(run), method).to_dict("records")
            }
            if cells:
                label = f"{merger(run)} w/ {method_title(method)}{f', {run.name}' if len(runs) > 1 else ''}"
                lines.append(Line(label, cells, "own", "measured", run.id))
        if any(line.run == run.id for line in lines):
            used.append(run)
            rows = run.sweeps()
            rows = rows[rows["sweep"].isin([sweep_named("n", method) for method in swept_methods(run, "n")])]
            seeds = ", ".join(str(int(seed)) for seed in sorted(rows["seed"].unique()))
            notes.append(f"{run.name}: seeds {seeds}; {len(options.tasks_of(run))} tasks.")
    blocks = (Block(tuple(lines)), *printed_blocks(printed).values())
    counts = {title for block in blocks for line in block.lines for title in line.cells}
    titles = sorted(counts, key=lambda title: int(title.partition("=")[2]))
    return Table(
        [Grid(tuple(Column(title, options.digits) for title in titles), blocks)],
        "Accuracy (%), averaged over tasks, by calibration samples n per task: mean ± standard deviation over "
        "seeds (n - 1 in the denominator), without one where there is one seed.",
        used,
        [*notes, "Paper: seeds 42, 43, 44." if printed.rows else ""],
        needed(used, sweeping("n")),
    )


def _calibrations(run: DriftRun, options: ExhibitOptions) -> Mapping[str, CalibrationInfo]:
    """The run's calibrations by name, without those that left no variant or were not asked for."""
    return {
        name: info
        for name, info in run.manifest.calibrations.items()
        if calibrated(name) in run.variants and options.wants(run, calibrated(name))
    }


def _coefficients(chosen: Mapping[str, Any]) -> dict[str, Cell]:
    cells = {
        head: Cell(float(chosen[key]))
        for head, key in (("λ", "lam"), ("ρ", "rho"), ("α", "alpha"))
        if isinstance(chosen.get(key), int | float)
    }
    if isinstance(chosen.get("update"), list | tuple):
        cells["Updates"] = Cell(", ".join(map(str, chosen["update"])))
    return cells


def _averages(run: DriftRun) -> Iterator[Line]:
    every = run.sweeps()
    for method in swept_methods(run, "n"):
        rows = every[(every["sweep"] == sweep_named("n", method)) & every["seconds"].notna()]
        if rows.empty:
            continue
        # The time of a point stands in the row of each of its tasks.
        points = rows.drop_duplicates(["point", "seed"])
        budgets, seeds = points["n"].nunique(), points["seed"].nunique()
        label = f"{merger(run)} w/ {method_title(method)}, {budgets} budgets, {seeds} seed{'s' if seeds > 1 else ''}"
        yield Line(label, {_TIME: Cell(float(points["seconds"].mean()))}, "own", "measured", run.id)


def _phases(run: DriftRun) -> Iterator[Line]:
    rows = run.resources()
    kinds = rows["phase"].str.replace(_PER_TASK, r"\g<kind>:", regex=True)
    for kind, group in rows.groupby(kinds, sort=False):
        count = f" ({len(group)} task{'s' if len(group) > 1 else ''})" if str(kind).endswith(":") else ""
        cells = _costs(
            group["seconds"].sum(min_count=1),
            group["energy_wh"].sum(min_count=len(group)),
            group["peak_rss_bytes"].max(),
        )
        yield Line(f"{str(kind).removesuffix(':')}{count}", cells, "reference", "measured", run.id)


def _costs(seconds: Any, energy_wh: Any, peak_rss_bytes: Any) -> dict[str, Cell]:
    """The three costs by column; null becomes NaN, never 0."""
    values = (math.nan if pd.isna(value) else float(value) for value in (seconds, energy_wh, peak_rss_bytes))
    time, energy, memory = values
    return {_TIME: Cell(time), _ENERGY: Cell(energy), _MEMORY: Cell(memory / 2.0**30)}
