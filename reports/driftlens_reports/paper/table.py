"""Table exhibits: what a table says of itself, and the notes that every table owes its reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from driftlens.records.run import DriftRun
from driftlens_reports.paper.exhibit import (
    Exhibit,
    Exhibited,
    ExhibitOptions,
    Gap,
    exhibits,
    origin,
    together,
)
from driftlens_reports.paper.grid import Column, Grid, shows_gains, tidy
from driftlens_reports.paper.latex import to_latex
from driftlens_reports.paper.published import published_tables, source

_BOLD = "Bold: the best of its source in a column, references left out; shaded: calibrated."
_GAINS = "Grey: points gained over the block's merged model, of measured rows from unrounded values"
_GAINS_PRINTED = ", of the paper's rows from its printed ones"


@dataclass(frozen=True)
class Table:
    """What a table shows.

    Attributes:
        grids: from top to bottom; those without a line are left out.
        caption: in a sentence or two.
        runs: those behind its measured lines; named below it.
        notes: what else a reader must know, in sentences.
        missing: parts that the runs can't fill.
    """

    grids: Sequence[Grid]
    caption: str
    runs: Sequence[DriftRun] = ()
    notes: Sequence[str] = ()
    missing: Sequence[Gap] = ()


Rows = Callable[..., Table]
"""From runs and options to what a table shows; a table that the paper has too is given the paper's as well."""


def table(name: str, *, title: str, label: str = "") -> Callable[[Rows], Rows]:
    """Decorator that files a function as a table.

    Args:
        name: its id.
        title: what it shows, in a few words.
        label: LaTeX label of the paper's table that it is the like of; empty for ours. The function gets that table
            as a third argument, with its rows where the writer asks for the paper's, else without any.
    """
    printed = published_tables()[label] if label else None
    number = printed.number if printed else ""

    def file(rows: Rows) -> Rows:
        def draw(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
            if printed is None:
                return _exhibited(name, rows(runs, options))
            theirs = printed if options.paper else dataclasses.replace(printed, rows=())
            note = f"Paper: {number} of {source()}, as printed there." if options.paper else ""
            return _exhibited(name, rows(runs, options, theirs), note)

        exhibits.register(name)(Exhibit(name, "table", title, number, draw))
        return rows

    return file


def needed(there: Sequence[object], how: str, what: str = "Measured rows") -> tuple[Gap, ...]:
    """Rows that the runs lack, and how to get them; nothing where something is there."""
    return () if there else (Gap(what, how),)


def plain_columns(*titles: str) -> tuple[Column, ...]:
    """Columns without better or worse, of words or numbers with up to three significant digits."""
    return tuple(Column(title, None, best=None) for title in titles)


def _exhibited(name: str, shown: Table, paper_note: str = "") -> Exhibited:
    grids = [grid for grid in shown.grids if grid.lines]
    below = together([*origin(shown.runs), *shown.notes, paper_note, *_legend(grids)])
    return Exhibited(
        tidy(grids),
        " ".join(together([shown.caption, *below], shown.missing)),
        latex=to_latex(grids, name, shown.caption, notes=below, missing=shown.missing),
        missing=tuple(shown.missing),
    )


def _legend(grids: Sequence[Grid]) -> Iterator[str]:
    """What bold, shade, grey and daggers mean, where there are any."""
    lines = [line for grid in grids for line in grid.lines]
    columns = [(grid, column) for grid in grids for column in grid.columns]
    if any(column.best for _, column in columns) and any(line.role != "reference" for line in lines):
        yield _BOLD
    if any(shows_gains(grid, column) for grid, column in columns):
        has_printed = any(line.source == "paper" for line in lines)
        yield f"{_GAINS}{_GAINS_PRINTED if has_printed else ''}."
    notes = [note for line in lines for note in (line.note, *(cell.note for cell in line.cells.values()))]
    if any(notes):
        yield f"† {' '.join(dict.fromkeys(filter(None, notes)))}"
