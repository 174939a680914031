r"""The LaTeX format: a fragment per table, to \input, with booktabs rules, a caption and a label."""

from __future__ import annotations

import math

from driftlens.records import layout
from driftlens_reports.content import Cell, Column, ReportContent, Table
from driftlens_reports.paper import grid
from driftlens_reports.paper.latex import Setting, to_latex

_LEFT_OUT = {"glossary", "environment", "layers"}
"""Tables that no paper prints."""
_SIGNIFICANT, _MOST_DIGITS = 4, 4
"""Digits of the largest number of a column, and decimals that are never exceeded."""


def fragments(content: ReportContent) -> dict[str, bytes]:
    """Files by name: a table environment for every table of the report."""
    return {
        f"{layout.escape(table.name)}.tex": _fragment(content, table).encode()
        for table in content.tables
        if table.name not in _LEFT_OUT
    }


def _fragment(content: ReportContent, table: Table) -> str:
    notes = [f"Run {content.run.name} ({content.run.id}).", table.note, *content.stamps]
    if table.has_gaps:
        notes.append("A dash: not measured.")
    setting = Setting(table.name, f"{table.title}.", [note for note in notes if note])
    return to_latex([_grid(table)], setting)


def _grid(table: Table) -> grid.Grid:
    """The first column names the lines; percentages carry their sign in the heading."""
    first, *others = table.columns
    columns = tuple(
        grid.Column(_heading(column), _digits(table, at), best=None)
        for at, column in enumerate(others, start=1)
    )
    lines = tuple(
        grid.Line(
            str(row[0]),
            {
                _heading(column): grid.Cell(_value(cell, column))
                for column, cell in zip(others, row[1:], strict=True)
            },
            role="reference",
        )
        for row in table.rows
    )
    return grid.Grid(columns, (grid.Block(lines),), first=first.name)


def _digits(table: Table, at: int) -> int | None:
    """Decimals of a column; None for words and errors, which have digits of their own."""
    kind = table.columns[at].kind
    if kind != "number":
        return {"count": 0, "share": 1}.get(kind)
    sizes = [abs(cell) for row in table.rows if isinstance(cell := row[at], (int, float))]
    largest = max(sizes, default=0.0)
    above = math.floor(math.log10(largest)) if largest else 0
    return min(max(_SIGNIFICANT - 1 - above, 0), _MOST_DIGITS)


def _heading(column: Column) -> str:
    return f"{column.name} (%)" if column.kind == "share" else column.name


def _value(cell: Cell, column: Column) -> float | str:
    if cell is None:
        return "" if column.kind == "text" else math.nan
    if isinstance(cell, str):
        return cell
    return 100 * float(cell) if column.kind == "share" else float(cell)
