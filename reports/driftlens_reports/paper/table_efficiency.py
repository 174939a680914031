"""Average accuracy by the number of calibration samples per task."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.paper.choice import tasks_of
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed, paper_note
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line
from driftlens_reports.paper.places import merger
from driftlens_reports.paper.printed import printed_blocks
from driftlens_reports.paper.published import published_tables
from driftlens_reports.paper.sweeps import sweep_points


@exhibit("efficiency", kind="table", title="Accuracy by calibration samples", paper="Table 12")
def efficiency(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Mean and standard deviation over seeds, a column per number of samples."""
    table = published_tables()["tab:ta8-full-data-efficiency"]
    found = {run.id: _line(run, options, several=len(runs) > 1) for run in runs}
    used = [run for run in runs if found[run.id].cells]
    lines = tuple(found[run.id] for run in used)
    counts = {title for line in lines for title in line.cells} | set(table.columns)
    titles = sorted(counts, key=lambda title: int(title.partition("=")[2]))
    needed = "`driftlens sweep RUN --param n=8,16,32,64,128,256,512` measures them."
    return framed(
        "efficiency",
        [
            Grid(
                tuple(Column(title, options.digits) for title in titles),
                (Block(lines), *printed_blocks(table).values()),
            )
        ],
        caption=(
            "Accuracy (%), averaged over tasks, by calibration samples n per task: mean ± standard deviation over "
            "seeds (n - 1 in the denominator), without one where there is one seed."
        ),
        runs=used,
        notes=[*(_behind(run, options) for run in used), "Paper: seeds 42, 43, 44.", paper_note(table)],
        missing=[] if used else [Panel("Measured rows", needed)],
    )


def _line(run: DriftRun, options: ExhibitOptions, *, several: bool) -> Line:
    points = sweep_points(run, "n", tasks_of(run, options)).to_dict("records")
    cells = {
        f"n={int(point['setting'])}": Cell(
            100 * point["mean"],
            100 * point["std"],
            None if pd.isna(point["n_test"]) else int(point["n_test"]),
        )
        for point in points
    }
    label = f"{merger(run)} w/ FeatCal{f', {run.name}' if several else ''}"
    return Line(label, cells, "own", "measured", run.id)


def _behind(run: DriftRun, options: ExhibitOptions) -> str:
    rows = run.sweeps()
    rows = rows[(rows["sweep"] == "n") & rows["accuracy"].notna()]
    seeds = ", ".join(str(int(seed)) for seed in sorted(rows["seed"].unique()))
    return f"{run.name}: seeds {seeds}; {len(tasks_of(run, options))} tasks."
