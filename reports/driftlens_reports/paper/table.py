"""Table exhibits: what a table says of itself, and the notes that every table owes its reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from driftlens.records.run import DriftRun
from driftlens_reports.paper.captions import gaps, origin, together
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.grid import Column, Grid, Line, shows_gains, tidy
from driftlens_reports.paper.latex import Setting, to_latex
from driftlens_reports.paper.published import PublishedTable, published_tables, source

_BOLD = "Bold: the best of its source in a column, references left out; shaded: calibrated."
_GAINS = (
    "Grey: points gained over the block's merged model, of measured rows from unrounded values, of the paper's rows "
    "from its printed ones."
)


@dataclass(frozen=True)
class Table:
    """What a table shows.

    Attributes:
        grids: from top to bottom.
        caption: in a sentence or two.
        runs: those behind its measured lines; named below it.
        notes: what else a reader must know, in sentences.
        missing: parts that the runs can't fill.
    """

    grids: Sequence[Grid]
    caption: str
    runs: Sequence[DriftRun] = ()
    notes: Sequence[str] = ()
    missing: Sequence[Panel] = ()


Rows = Callable[[Sequence[DriftRun], ExhibitOptions], Table]
PaperRows = Callable[[Sequence[DriftRun], ExhibitOptions, PublishedTable], Table]


def table(name: str, *, title: str) -> Callable[[Rows], Rows]:
    """Decorator that files a function as a table of ours."""

    def file(rows: Rows) -> Rows:
        exhibit(name, kind="table", title=title)(lambda runs, options: _exhibited(name, rows(runs, options)))
        return rows

    return file


def paper_table(name: str, *, title: str, label: str) -> Callable[[PaperRows], PaperRows]:
    """Decorator that files a function as a table with rows of the paper's table with this LaTeX label."""
    printed = published_tables()[label]
    note = f"Paper: {printed.number} of {source()}, as printed there."

    def file(rows: PaperRows) -> PaperRows:
        exhibit(name, kind="table", title=title, paper=printed.number)(
            lambda runs, options: _exhibited(name, rows(runs, options, printed), note)
        )
        return rows

    return file


def needed(there: Sequence[object], how: str, what: str = "Measured rows") -> tuple[Panel, ...]:
    """Rows that the runs lack, and how to get them; nothing where something is there."""
    return () if there else (Panel(what, how),)


def plain_columns(*titles: str) -> tuple[Column, ...]:
    """Columns without better or worse, of words or numbers with up to three significant digits."""
    return tuple(Column(title, None, best=None) for title in titles)


def _exhibited(name: str, shown: Table, paper_note: str = "") -> Exhibited:
    grids = [grid for grid in shown.grids if grid.lines]
    runs = origin(shown.runs) if shown.runs else ()
    below = together([*runs, *shown.notes, paper_note, *_legend(grids), *_daggers(grids)])
    return Exhibited(
        tidy(grids),
        " ".join(together([shown.caption, *below, *gaps(shown.missing)])),
        latex=to_latex(grids, Setting(name, shown.caption, below, shown.missing)),
        missing=tuple(shown.missing),
    )


def _legend(grids: Sequence[Grid]) -> Iterator[str]:
    """What bold, shade and grey mean, where there are any."""
    columns = [(grid, column) for grid in grids for column in grid.columns]
    if any(column.best for _, column in columns) and any(line.role != "reference" for line in _lines(grids)):
        yield _BOLD
    if any(shows_gains(grid, column) for grid, column in columns):
        yield _GAINS


def _daggers(grids: Iterable[Grid]) -> Iterator[str]:
    notes = [
        note
        for line in _lines(grids)
        for note in (line.note, *(cell.note for cell in line.cells.values()))
        if note
    ]
    if notes:
        yield f"† {' '.join(dict.fromkeys(notes))}"


def _lines(grids: Iterable[Grid]) -> list[Line]:
    return [line for grid in grids for line in grid.lines]
