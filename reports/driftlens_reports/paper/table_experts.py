"""How good the experts are by themselves, and what merging them costs."""

from __future__ import annotations

from collections.abc import Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.choice import tasks_of
from driftlens_reports.paper.comparison import scored, test_note
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed, paper_note
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line
from driftlens_reports.paper.measured import column_titles, method_lines, reference_lines
from driftlens_reports.paper.printed import printed_cell
from driftlens_reports.paper.published import AVERAGE, published_tables

_ROWS = {"Pre-trained": "Base", "Fine-tuned (STL)": "Expert", "Task Arithmetic": "Merged"}


@exhibit("experts", kind="table", title="Experts by task", paper="Table 1")
def experts(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """One line per task: base, its own expert, the merged model, and what merging costs."""
    table = published_tables()["tab:clip-vit-b32-results"]
    used = scored(runs)
    blocks = [Block(_measured(run, options), run.name if len(used) > 1 else "") for run in used]
    columns = [Column(title, options.digits, best=None) for title in ("Base", "Expert", "Merged", "Cost")]
    return framed(
        "experts",
        [Grid((*columns, Column("n", 0, best=None)), (*blocks, Block(_printed())), first="Task")],
        caption="Accuracy (%) of each task's own expert. Cost: points that the merged model loses against it.",
        runs=used,
        notes=[test_note(used), paper_note(table)],
        missing=[]
        if used
        else [Panel("Measured rows", "`driftlens evaluate RUN` adds the accuracies of a run.")],
    )


def _measured(run: DriftRun, options: ExhibitOptions) -> tuple[Line, ...]:
    titles = column_titles(run, tasks_of(run, options))
    names = {"base": "Base", "expert": "Expert", "merged": "Merged"}
    found = {
        line.variant: line for line in (*reference_lines(run, titles), *method_lines(run, titles, options))
    }
    lines = []
    for title in (*titles.values(), AVERAGE):
        there = [
            line.cells[title] for line in found.values() if line.variant in names and title in line.cells
        ]
        cells = {
            names[key]: line.cells[title]
            for key, line in found.items()
            if key in names and title in line.cells
        }
        counts = {cell.n for cell in there if cell.n is not None}
        if len(counts) == 1:
            cells["n"] = Cell(counts.pop())
        if cells:
            lines.append(Line(title, _with_cost(cells), "reference", "measured", run.id))
    return tuple(lines)


def _printed() -> tuple[Line, ...]:
    table = published_tables()["tab:clip-vit-b32-results"]
    rows = {_ROWS[row.name]: row for row in table.rows if row.name in _ROWS}
    return tuple(
        Line(
            column,
            _with_cost({name: printed_cell(table, rows[name], column) for name in _ROWS.values()}),
            "reference",
            "paper",
        )
        for column in table.columns
    )


def _with_cost(cells: dict[str, Cell]) -> dict[str, Cell]:
    if "Expert" in cells and "Merged" in cells:
        cells["Cost"] = Cell(cells["Expert"].number - cells["Merged"].number)
    return cells
