"""Tables of runs alone: drift by task and layer, self-checks, and the settings behind every calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import calibrated, title
from driftlens_reports.facts import self_checks
from driftlens_reports.paper.captions import samples, span
from driftlens_reports.paper.choice import tasks_of
from driftlens_reports.paper.cost_tables import CALIBRATE, chosen_calibrations
from driftlens_reports.paper.exhibit import ExhibitOptions, Panel
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line
from driftlens_reports.paper.places import merger, run_spec
from driftlens_reports.paper.published import settings, source
from driftlens_reports.paper.scores import shown_variants
from driftlens_reports.paper.table import Table, needed, plain_columns, table


@table("drift", title="Relative drift by task and layer")
def drift(runs: Sequence[DriftRun], options: ExhibitOptions) -> Table:
    """One line per task, one column per layer, one block per variant; a grid per run."""
    rows = [_drifts(run, options) for run in runs]
    shown = pd.concat(rows) if rows else pd.DataFrame()
    how = "`driftlens analyze` with this run's spec measures drift by layer."
    return Table(
        [
            _drift_grid(run, there, options, several=len(runs) > 1)
            for run, there in zip(runs, rows, strict=True)
        ],
        "Relative drift (%) by task and layer: norm of the feature's difference to the task's expert against the "
        "norm of the expert's feature, sums over samples. Layers in forward order; S is the stem, H the head.",
        runs,
        [samples(shown) if len(shown) else "", "A dash: not stored, or not measured."],
        [Panel(run.name, how) for run, there in zip(runs, rows, strict=True) if there.empty],
    )


@table("closure", title="Self-checks")
def closure(runs: Sequence[DriftRun], options: ExhibitOptions) -> Table:
    """One line per claim: the largest error over all rows, its limit, where it is; a block per run."""
    several = len(runs) > 1
    blocks = tuple(Block(tuple(_checks(run)), run.name if several else "") for run in runs)
    absent = {run.name: [check.name for check in self_checks(run) if not check.where] for run in runs}
    return Table(
        [Grid(plain_columns("Claim", "Largest error", "Limit", "Holds", "Where"), blocks, first="Check")],
        "Self-checks: claims that are exact in theory, and the largest error over all tasks, variants and layers.",
        runs,
        ["A check that was not measured is not a check that holds."],
        [
            Panel(
                f"Self-checks, {name}" if several else "Self-checks",
                f"not measured: {', '.join(checks)}; `metrics` in the spec turns them on",
            )
            for name, checks in absent.items()
            if checks
        ],
    )


@table("hyper", title="Settings per run")
def hyper(runs: Sequence[DriftRun], options: ExhibitOptions) -> Table:
    """One line per calibration of every run, then the paper's by model."""
    lines = tuple(line for run in runs for line in _settings(run, options))
    printed = []
    for entry in settings():
        cells = {"Method": Cell("FeatCal"), **_coefficients(vars(entry)), "n": Cell(str(entry.n))}
        printed.append(Line(entry.model, cells, "reference", "paper"))
    columns = plain_columns("Merger", "Method", "λ", "ρ", "α", "Updates", "n", "Layers")
    return Table(
        [Grid(columns, (Block(lines), Block(tuple(printed))), "Run or model")],
        "Settings: ridge λ relative to a Gram matrix of Frobenius norm 1, anchor position ρ from base (0) to "
        "merged model (1), expert share α of the target; n calibration samples per task.",
        [run for run in runs if run.manifest.calibrations],
        [f"Paper: section 5.1 of {source()}."],
        needed(lines, CALIBRATE),
    )


def _drifts(run: DriftRun, options: ExhibitOptions) -> pd.DataFrame:
    """The rows of the layer table that are shown."""
    rows = run.layers()
    is_shown = rows["variant"].isin(["merged", *shown_variants(run, options)])
    return rows[is_shown & rows["task"].isin(tasks_of(run, options)) & rows["drift_rel"].notna()]


def _drift_grid(run: DriftRun, rows: pd.DataFrame, options: ExhibitOptions, *, several: bool) -> Grid:
    heads = {
        layer.index: {"stem": "S", "head": "H"}.get(layer.role, str(layer.index))
        for layer in run.manifest.layers
    }
    shown = [head for at, head in heads.items() if (rows["layer"] == at).any()]
    blocks = []
    for variant in ("merged", *shown_variants(run, options)):
        own = rows[rows["variant"] == variant]
        lines = tuple(_drift_lines(run, own, heads, variant))
        if lines:
            blocks.append(Block(lines, f"{title(variant)}{f', {run.name}' if several else ''}"))
    return Grid(tuple(Column(head, options.digits, best=None) for head in shown), tuple(blocks), first="Task")


def _drift_lines(run: DriftRun, rows: pd.DataFrame, heads: Mapping[int, str], variant: str) -> Iterator[Line]:
    for task in run.tasks:
        cells = {
            heads[row["layer"]]: Cell(100 * row["drift_rel"], n=None if pd.isna(row["n"]) else int(row["n"]))
            for row in rows[rows["task"] == task].to_dict("records")
        }
        if cells:
            yield Line(task, cells, "reference", "measured", run.id, variant)


def _checks(run: DriftRun) -> Iterator[Line]:
    for check in self_checks(run):
        cells = {
            "Claim": Cell(check.claim),
            "Largest error": Cell(check.largest),
            "Limit": Cell(check.limit),
            "Holds": Cell(("yes" if check.holds else "NO") if check.where else "not measured"),
            "Where": Cell(check.where or "--"),
        }
        yield Line(check.name, cells, "reference", "measured", run.id)


def _settings(run: DriftRun, options: ExhibitOptions) -> Iterator[Line]:
    given = run_spec(run).get("merge") or {}
    extra = ", ".join(f"{key} {value}" for key, value in given.items() if key != "method")
    for name, info in chosen_calibrations(run, options).items():
        cells = {
            "Merger": Cell(f"{merger(run)}{f' ({extra})' if extra else ''}"),
            "Method": Cell(info.method),
            **_coefficients(info.settings),
            "n": Cell(_ends(list(info.samples.values()))),
            "Layers": Cell(_ends(info.layers)),
        }
        yield Line(f"{run.name}, {name}", cells, "reference", "measured", run.id, calibrated(name))


def _coefficients(chosen: Mapping[str, Any]) -> dict[str, Cell]:
    cells = {
        head: Cell(float(chosen[key]))
        for head, key in (("λ", "lam"), ("ρ", "rho"), ("α", "alpha"))
        if isinstance(chosen.get(key), int | float)
    }
    if isinstance(chosen.get("update"), list | tuple):
        cells["Updates"] = Cell(", ".join(map(str, chosen["update"])))
    return cells


def _ends(numbers: Sequence[int]) -> str:
    return span(numbers) if numbers else "--"
