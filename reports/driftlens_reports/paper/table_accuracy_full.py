"""The appendix's accuracy tables: the larger backbone, and suites of 14 and 20 tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.comparison import joint_grid, scored, test_note
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed, paper_note
from driftlens_reports.paper.places import titles_of
from driftlens_reports.paper.published import PublishedTable, published_tables

_LABELS = {
    "accuracy-full-l14-8": "tab:clip-vit-l14-full",
    "accuracy-full-b32-14": "tab:clip-14task-b32-full",
    "accuracy-full-l14-14": "tab:clip-14task-l14-full",
    "accuracy-full-b32-20": "tab:clip-20task-b32-full",
    "accuracy-full-l14-20": "tab:clip-20task-l14-full",
}


def _drawn(name: str, table: PublishedTable) -> Callable[[Sequence[DriftRun], ExhibitOptions], Exhibited]:
    def draw(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
        alike = [run for run in scored(runs) if titles_of(run, table)]
        return framed(
            name,
            [joint_grid(alike, table, options)],
            caption=f"Accuracy (%) of {table.model} merged from {table.suite}.",
            runs=alike,
            notes=[test_note(alike), paper_note(table)],
            missing=[] if alike else [_needed(table)],
        )

    return draw


def _needed(table: PublishedTable) -> Panel:
    what = f"no run given is about {table.model} and exactly these {table.suite}; "
    return Panel("Measured rows", f"{what}`driftlens analyze` and `driftlens evaluate` make one.")


for _name, _label in _LABELS.items():
    _table = published_tables()[_label]
    exhibit(
        _name,
        kind="table",
        title=f"Accuracy by task, {_table.model}, {_table.suite}",
        paper=_table.number,
    )(_drawn(_name, _table))
