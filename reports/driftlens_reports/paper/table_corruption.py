"""Accuracy after calibrating on corrupted images."""

from __future__ import annotations

from collections.abc import Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed, paper_note
from driftlens_reports.paper.grid import Column, Grid
from driftlens_reports.paper.printed import printed_blocks
from driftlens_reports.paper.published import published_tables


@exhibit("corruption", kind="table", title="Accuracy under corrupted calibration", paper="Table 6")
def corruption(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """The paper's rows: clean images and three corruptions of the calibration images, tested on clean ones."""
    table = published_tables()["tab:ta8-corrupted-calibration"]
    # No table of a run holds scores by corruption yet.
    needed = (
        "a study that calibrates on clean, noisy, blurred and foggy images (severity 3) and tests on clean ones "
        "fills them; runs don't hold one yet."
    )
    return framed(
        "corruption",
        [
            Grid(
                tuple(Column(title, options.digits) for title in table.columns),
                tuple(printed_blocks(table).values()),
            )
        ],
        caption=(
            "Accuracy (%), averaged over tasks, on clean test images after calibrating on corrupted ones. Without "
            "calibration there is nothing to corrupt, so the merged model has a clean column only."
        ),
        notes=[paper_note(table)],
        missing=[Panel("Measured rows", needed)],
    )
