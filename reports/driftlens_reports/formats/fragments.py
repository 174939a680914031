r"""The LaTeX format: a fragment per table, to \input, with booktabs rules, a caption and a label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from driftlens.findings.reading import p_value, written
from driftlens.findings.table import Cell, Column, Table
from driftlens.runs import layout
from driftlens_reports.content import ReportContent
from driftlens_reports.paper import grid
from driftlens_reports.paper.grid import to_latex

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
    notes = [f"Run {content.run.name} ({content.run.id}).", table.notes(), *content.stamps]
    parts = _parts(_grid(table))
    below = {len(parts): [note for note in notes if note]}
    return "".join(
        to_latex([part], table.name, f"{table.title}.", notes=below.get(at, ()), part=at, splits=False)
        for at, part in enumerate(parts, start=1)
    )


def _grid(table: Table) -> grid.Grid:
    """The first column names the lines; halves of intervals go beside their numbers, empty columns of words go."""
    names = [column.name for column in table.columns]
    first, *others = [
        at
        for at, column in enumerate(table.columns)
        if not column.name.endswith(" +-")
        and (at == 0 or column.kind != "text" or any(row[at] for row in table.rows))
    ]
    halves = {at: names.index(f"{names[at]} +-") for at in others if f"{names[at]} +-" in names}
    wraps = _wraps(table, [first, *others])
    units = {"share": " (%)", "points": " (points)"}
    heads = {at: f"{names[at]}{units.get(table.columns[at].kind, '')}" for at in others}
    columns = [
        grid.Column(head, _digits(table, table.columns[at]), wrap=wraps[at]) for at, head in heads.items()
    ]
    lines = []
    for row in table.rows:
        cells = {head: grid.Cell(_value(row[at], table.columns[at])) for at, head in heads.items()}
        for at, half in halves.items():
            if (spread := row[half]) is not None:
                cells[heads[at]] = replace(cells[heads[at]], spread=float(_value(spread, table.columns[at])))
        lines.append(grid.Line(str(row[first]), cells, role="reference"))
    return grid.Grid(tuple(columns), (grid.Block(tuple(lines)),), first=names[first], wrap=wraps[first])


def _wraps(table: Table, shown: Sequence[int]) -> dict[int, float]:
    """Width in em of each column whose words go on in the next line; 0 for the others, and where all fits."""
    longest = {}
    for at in shown:
        column = table.columns[at]
        longest[at] = max(map(len, [column.name, *(written(row[at], column.kind) for row in table.rows)]))
    is_wide = sum(longest.values()) + _BETWEEN * len(longest) > _LINE
    return {
        at: _WRAPPED * _LETTER_EM
        if is_wide and table.columns[at].kind == "text" and letters > _WRAPPED
        else 0.0
        for at, letters in longest.items()
    }


def _parts(whole: grid.Grid) -> list[grid.Grid]:
    """The grid in as many parts as it has pages."""
    pages: list[list[grid.Line]] = [[]]
    room = _PAGE
    for line in whole.lines:
        words = [line.label] if whole.wrap else []
        words += [str(line.cells[column.title].value) for column in whole.columns if column.wrap]
        height = max((math.ceil(len(text) / _WRAPPED) for text in words), default=1)
        if height > room and pages[-1]:
            pages.append([])
            room = _PAGE
        pages[-1].append(line)
        room -= height
    return [replace(whole, blocks=(grid.Block(tuple(lines)),)) for lines in pages]


def _digits(table: Table, column: Column) -> int | None:
    """Decimals of a column, the same for all of one unit; None for words and errors, which have their own."""
    if column.kind != "number":
        return {"count": 0, "share": 1, "points": 1}.get(column.kind)
    decimals = []
    for at, other in enumerate(table.columns):
        if (other.kind, other.unit) == ("number", column.unit):
            largest = max(
                (abs(cell) for row in table.rows if isinstance(cell := row[at], (int, float))), default=0.0
            )
            above = math.floor(math.log10(largest)) if largest else 0
            decimals.append(min(max(_SIGNIFICANT - 1 - above, 0), _MOST_DIGITS))
    return max(decimals)


def _value(cell: Cell, column: Column) -> float | str:
    if cell is None:
        return "" if column.kind == "text" else math.nan
    if isinstance(cell, str):
        return cell
    if column.kind == "p":
        return p_value(cell)
    return 100 * float(cell) if column.kind in ("share", "points") else float(cell)
