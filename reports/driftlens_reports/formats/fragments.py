r"""The LaTeX format: a fragment per table, to \input, with booktabs rules, a caption and a label."""

from __future__ import annotations

import math
from dataclasses import replace

from driftlens.records import layout
from driftlens_reports.content import Cell, Column, ReportContent, Table
from driftlens_reports.paper import grid
from driftlens_reports.paper.latex import to_latex

_LEFT_OUT = {"glossary", "environment", "layers"}
"""Tables that no paper prints."""
_SIGNIFICANT, _MOST_DIGITS = 4, 4
"""Digits of the largest number of a column, and decimals that are never exceeded."""
_LINE, _WRAPPED, _BETWEEN = 80, 32, 2
"""Letters that fit in a line of a page, those after which words go on in the next line, and those of a gap."""
_LETTER_EM = 0.5
"""Width of an average letter."""
_PAGE = 40
"""Lines of text that fit on a page below a caption and above the notes."""


def fragments(content: ReportContent) -> dict[str, bytes]:
    """Files by name: table environments for every table of the report, each no taller than a page."""
    return {
        f"{layout.escape(table.name)}.tex": _fragment(content, table).encode()
        for table in content.tables
        if table.name not in _LEFT_OUT
    }


def _fragment(content: ReportContent, table: Table) -> str:
    notes = [f"Run {content.run.name} ({content.run.id}).", table.note, *content.stamps]
    if table.has_gaps:
        notes.append("A dash: not measured.")
    parts = _parts(_grid(_without_empty(table)))
    below = {len(parts): [note for note in notes if note]}
    return "".join(
        to_latex([part], table.name, f"{table.title}.", notes=below.get(at, ()), part=at)
        for at, part in enumerate(parts, start=1)
    )


def _without_empty(table: Table) -> Table:
    """The table without columns of words that say nothing in any row."""
    kept = [
        at
        for at, column in enumerate(table.columns)
        if at == 0 or column.kind != "text" or any(row[at] for row in table.rows)
    ]
    return table.model_copy(
        update={
            "columns": tuple(table.columns[at] for at in kept),
            "rows": tuple(tuple(row[at] for at in kept) for row in table.rows),
        }
    )


def _grid(table: Table) -> grid.Grid:
    """The first column names the lines; percentages carry their sign in the heading."""
    first, *others = table.columns
    wraps = _wraps(table)
    columns = tuple(
        grid.Column(_heading(column), _digits(table, column), best=None, wrap=wrap)
        for column, wrap in zip(others, wraps[1:], strict=True)
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
    return grid.Grid(columns, (grid.Block(lines),), first=first.name, wrap=wraps[0])


def _wraps(table: Table) -> list[float]:
    """Width in em of each column whose words go on in the next line; 0 for the others, and where all fits."""
    cells = [[column.name, *texts] for column, texts in zip(table.columns, _columns_of(table), strict=True)]
    longest = [max(map(len, texts)) for texts in cells]
    if sum(longest) + _BETWEEN * len(longest) <= _LINE:
        return [0.0] * len(longest)
    return [
        _WRAPPED * _LETTER_EM if column.kind == "text" and letters > _WRAPPED else 0.0
        for column, letters in zip(table.columns, longest, strict=True)
    ]


def _columns_of(table: Table) -> list[list[str]]:
    texts = table.texts()
    return [[row[at] for row in texts] for at in range(len(table.columns))]


def _parts(whole: grid.Grid) -> list[grid.Grid]:
    """The grid in as many parts as it has pages."""
    pages: list[list[grid.Line]] = [[]]
    room = _PAGE
    for line in whole.lines:
        height = _height(whole, line)
        if height > room and pages[-1]:
            pages.append([])
            room = _PAGE
        pages[-1].append(line)
        room -= height
    return [replace(whole, blocks=(grid.Block(tuple(lines)),)) for lines in pages]


def _height(whole: grid.Grid, line: grid.Line) -> int:
    """Lines of text that a line of the grid takes."""
    words = [line.label] if whole.wrap else []
    words += [
        value
        for column in whole.columns
        if column.wrap and isinstance(value := line.cells[column.title].value, str)
    ]
    return max((math.ceil(len(text) / _WRAPPED) for text in words), default=1)


def _digits(table: Table, column: Column) -> int | None:
    """Decimals of a column, the same for all of one unit; None for words and errors, which have their own."""
    if column.kind != "number":
        return {"count": 0, "share": 1}.get(column.kind)
    alike = [
        at for at, other in enumerate(table.columns) if (other.kind, other.unit) == ("number", column.unit)
    ]
    return max(_digits_at(table, at) for at in alike)


def _digits_at(table: Table, at: int) -> int:
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
