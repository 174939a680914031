"""From grids to a finished table: LaTeX, tidy rows, caption, and the notes that every table owes its reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.captions import gaps, origin, together
from driftlens_reports.paper.exhibit import Exhibited, Panel
from driftlens_reports.paper.grid import Grid, shows_gains, tidy
from driftlens_reports.paper.latex import Setting, to_latex
from driftlens_reports.paper.published import PublishedTable, source

_BOLD = "Bold: the best of its source in a column, references left out; shaded: calibrated."
_GAINS = (
    "Grey: points gained over the block's merged model, of measured rows from unrounded values, of the paper's rows "
    "from its printed ones."
)


def framed(
    name: str,
    grids: Sequence[Grid],
    *,
    caption: str,
    runs: Sequence[DriftRun] = (),
    notes: Iterable[str] = (),
    missing: Sequence[Panel] = (),
) -> Exhibited:
    """The finished table.

    Args:
        name: id of the exhibit.
        grids: what it shows, from top to bottom.
        caption: what it shows, in a sentence or two.
        runs: the runs behind its measured lines; named below it.
        notes: what else a reader must know, in sentences.
        missing: parts that the runs can't fill.
    """
    grids = [grid for grid in grids if grid.lines]
    below = together([*(origin(runs) if runs else ()), *notes, *_legend(grids), *_daggers(grids)])
    return Exhibited(
        tidy(grids),
        " ".join(together([caption, *below, *gaps(missing)])),
        latex=to_latex(grids, Setting(name, caption, below, missing)),
        missing=tuple(missing),
    )


def paper_note(table: PublishedTable) -> str:
    """Where the lines marked "paper" come from."""
    return f"Paper: {table.number} of {source()}, as printed there."


def _legend(grids: Iterable[Grid]) -> Iterator[str]:
    """What bold, shade and grey mean, where there are any."""
    grids = list(grids)
    has_best = any(column.best for grid in grids for column in grid.columns)
    if has_best and any(line.role != "reference" for grid in grids for line in grid.lines):
        yield _BOLD
    if any(shows_gains(grid, column) for grid in grids for column in grid.columns):
        yield _GAINS


def _daggers(grids: Iterable[Grid]) -> Iterator[str]:
    notes = [
        note
        for grid in grids
        for line in grid.lines
        for note in (line.note, *(cell.note for cell in line.cells.values()))
        if note
    ]
    if notes:
        yield f"† {' '.join(dict.fromkeys(notes))}"
