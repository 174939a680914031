"""Lines of a table that say what the paper prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from driftlens_reports.paper.grid import Block, Cell, Line, Role
from driftlens_reports.paper.published import AVERAGE, Erratum, Part, PublishedRow, PublishedTable, notes_on

_ROLES: Mapping[Part, Role] = MappingProxyType(
    {
        "base": "reference",
        "expert": "reference",
        "multitask": "reference",
        "single": "reference",
        "merged": "plain",
        "baseline": "other",
        "calibrated": "own",
    }
)


def printed_blocks(
    table: PublishedTable, *, columns: Sequence[str] | None = None, model: str | None = None
) -> Mapping[str, Block]:
    """The paper's blocks by merger, in its order; references stand under the empty name.

    Args:
        table: which table.
        columns: only these; None is all. An average is left out unless all are shown.
        model: only rows of this model; None is all.
    """
    kept = [name for name in table.columns if columns is None or name in columns]
    if set(kept) | {AVERAGE} == set(table.columns):
        kept = list(table.columns)
    rows = [row for row in table.rows if model in (None, row.model)]
    return {
        merger: Block(tuple(printed_line(table, row, kept) for row in rows if row.merger == merger))
        for merger in dict.fromkeys(row.merger for row in rows)
    }


def printed_line(table: PublishedTable, row: PublishedRow, columns: Sequence[str]) -> Line:
    """One printed row, with what is known to be wrong with it as notes."""
    cells = {column: printed_cell(table, row, column) for column in columns}
    is_headed = any(other.name == row.merger for other in table.rows)
    label = row.name if is_headed or not row.merger else f"{row.merger} {row.name}"
    whole = {entry.note: "" for name in columns for entry in notes_on(table, row, name) if not entry.columns}
    return Line(label, cells, _ROLES[row.part], "paper", note=_told(row, "", whole))


def printed_cell(table: PublishedTable, row: PublishedRow, column: str) -> Cell:
    """One printed cell, with what is known to be wrong with it as its note."""
    notes = [_in_words(entry) for entry in notes_on(table, row, column) if entry.columns]
    spread = row.spread.get(column, math.nan)
    return Cell(row.values[column], spread, note=_told(row, f", {column}", notes))


def _told(row: PublishedRow, where: str, notes: Iterable[str]) -> str:
    """The notes after the place they are about."""
    name = row.name if row.name == row.merger or not row.merger else f"{row.merger} {row.name}"
    return " ".join(f"{name}{where}: {note}" for note in notes)


def _in_words(entry: Erratum) -> str:
    return entry.note if math.isnan(entry.should_be) else f"{entry.note} It should be {entry.should_be:g}."
