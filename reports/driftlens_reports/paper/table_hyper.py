"""The settings behind every calibration, and those of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from driftlens.records.run import DriftRun
from driftlens.variants import calibrated
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line
from driftlens_reports.paper.places import merger, run_spec
from driftlens_reports.paper.published import Settings, settings, source

_COLUMNS = ("Merger", "Method", "λ", "ρ", "α", "Updates", "n", "Layers")


@exhibit("hyper", kind="table", title="Settings per run")
def hyper(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """One line per calibration of every run, then the paper's by model."""
    lines = tuple(line for run in runs for line in _measured(run, options))
    printed = Block(tuple(_printed(entry) for entry in settings()))
    return framed(
        "hyper",
        [
            Grid(
                tuple(Column(title, None, best=None) for title in _COLUMNS),
                (Block(lines), printed),
                "Run or model",
            )
        ],
        caption=(
            "Settings: ridge λ relative to a Gram matrix of Frobenius norm 1, anchor position ρ from base (0) to "
            "merged model (1), expert share α of the target; n calibration samples per task."
        ),
        runs=[run for run in runs if run.manifest.calibrations],
        notes=[f"Paper: section 5.1 of {source()}."],
        missing=[] if lines else [Panel("Measured rows", "`driftlens calibrate RUN --name NAME` adds one.")],
    )


def _measured(run: DriftRun, options: ExhibitOptions) -> Iterator[Line]:
    for name, info in run.manifest.calibrations.items():
        if calibrated(name) not in run.variants or options.calibrated not in (None, calibrated(name)):
            continue
        counts = sorted(set(info.samples.values()))
        cells = {
            "Merger": Cell(_merge(run)),
            "Method": Cell(info.method),
            **_numbers(info.settings),
            "n": Cell(_span(counts)),
            "Layers": Cell(_span(info.layers)),
        }
        yield Line(f"{run.name}, {name}", cells, "reference", "measured", run.id, calibrated(name))


def _numbers(chosen: Mapping[str, Any]) -> dict[str, Cell]:
    cells = {
        title: Cell(float(chosen[key]))
        for title, key in (("λ", "lam"), ("ρ", "rho"), ("α", "alpha"))
        if isinstance(chosen.get(key), int | float)
    }
    if isinstance(chosen.get("update"), list | tuple):
        cells["Updates"] = Cell(", ".join(map(str, chosen["update"])))
    return cells


def _merge(run: DriftRun) -> str:
    given = run_spec(run).get("merge") or {}
    extra = ", ".join(f"{key} {value}" for key, value in given.items() if key != "method")
    return f"{merger(run)}{f' ({extra})' if extra else ''}"


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "--"
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _printed(entry: Settings) -> Line:
    chosen = {"lam": entry.lam, "rho": entry.rho, "alpha": entry.alpha, "update": entry.update}
    cells = {"Method": Cell("FeatCal"), **_numbers(chosen), "n": Cell(str(entry.n))}
    return Line(entry.model, cells, "reference", "paper")
