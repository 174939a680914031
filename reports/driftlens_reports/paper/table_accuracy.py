"""The main table: accuracy by task, of the merged models and of what calibration makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.comparison import joint_grid, measured_grids, scored, test_note
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed, paper_note
from driftlens_reports.paper.places import family, titles_of
from driftlens_reports.paper.published import published_tables

_CAPTION = (
    "Accuracy (%) by task. References first, then a block per merger: the merged model as it is, with baselines, "
    "and calibrated; “anchor only” is what a calibration's anchor does without calibration."
)


@exhibit("accuracy", kind="table", title="Accuracy by task", paper="Table 1")
def accuracy(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Accuracy of every run of image classifiers, and of the paper's CLIP-ViT-B/32 on eight tasks."""
    table = published_tables()["tab:clip-vit-b32-results"]
    used = [run for run in scored(runs) if family(run) == "image"]
    alike = [run for run in used if titles_of(run, table)]
    others = [run for run in used if run not in alike]
    missing = (
        [] if used else [Panel("Measured rows", "`driftlens evaluate RUN` adds the accuracies of a run.")]
    )
    return framed(
        "accuracy",
        [*measured_grids(others, options), joint_grid(alike, table, options)],
        caption=_CAPTION,
        runs=used,
        notes=[test_note(used), paper_note(table)],
        missing=missing,
    )
