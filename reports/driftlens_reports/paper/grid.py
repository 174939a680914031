"""What a table shows before it is set: columns, blocks of lines, gains, best cells; and the same as tidy rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

AVERAGE = "Avg."
"""Column of averages, as the paper calls it."""

Role = Literal["reference", "plain", "other", "own"]
Source = Literal["measured", "paper"]
Best = Literal["highest", "lowest"]


@dataclass(frozen=True)
class Cell:
    """One entry of a table, unrounded.

    Attributes:
        value: a number, NaN where nothing was measured; or words.
        spread: standard deviation; NaN without.
        n: test samples behind it; None where unknown.
        low: lower end of its interval; NaN without.
        high: upper end.
        note: what a reader must know about this cell; empty without.
    """

    value: float | str
    spread: float = math.nan
    n: int | None = None
    low: float = math.nan
    high: float = math.nan
    note: str = ""

    @property
    def number(self) -> float:
        """The value as a number; NaN for words."""
        return math.nan if isinstance(self.value, str) else float(self.value)


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Attributes:
        label: as shown in the first column.
        cells: by column title; a column that is left out is empty.
        role: `reference` lines are never the best, gains count from `plain` ones, `own` ones are shaded.
        source: who says so.
        run: id of the run; empty for the paper.
        variant: of the run; empty for the paper.
        note: what a reader must know about the whole line; empty without.
    """

    label: str
    cells: Mapping[str, Cell]
    role: Role = "other"
    source: Source = "measured"
    run: str = ""
    variant: str = ""
    note: str = ""

    def number(self, column: str) -> float:
        """The number in a column; NaN where there is none."""
        return self.cells[column].number if column in self.cells else math.nan


@dataclass(frozen=True)
class Block:
    """Lines that belong together, set apart by a rule. Among lines of one `group` the best are bold."""

    lines: tuple[Line, ...]
    title: str = ""
    group: str = ""


@dataclass(frozen=True)
class Column:
    """One column of numbers or words.

    Attributes:
        title: also the key of its cells.
        digits: decimals; None for words, and for numbers that are shown with up to three significant digits.
        best: which numbers are best; None where there is no better or worse.
        has_gain: whether its gains over the block's plain line are shown.
        wrap: width in em beyond which words go on in the next line; 0: as wide as its longest entry.
    """

    title: str
    digits: int | None = 1
    best: Best | None = "highest"
    has_gain: bool = False
    wrap: float = 0.0


@dataclass(frozen=True)
class Grid:
    """One tabular.

    Attributes:
        columns: those of numbers and words; the source has a column of its own.
        blocks: its lines.
        first: title of the column of labels.
        wrap: width of that column, as a column's.
    """

    columns: tuple[Column, ...]
    blocks: tuple[Block, ...]
    first: str = "Method"
    wrap: float = 0.0

    @property
    def lines(self) -> tuple[Line, ...]:
        """All lines, from top to bottom."""
        return tuple(line for block in self.blocks for line in block.lines)


def with_average(line: Line, columns: Sequence[str]) -> Line:
    """The line with the mean of exactly these columns; without one where any of them has no number."""
    values = [line.number(column) for column in columns]
    if not values or any(math.isnan(value) for value in values):
        return line
    return replace(line, cells={**line.cells, AVERAGE: Cell(statistics.fmean(values))})


def gain(block: Block, line: Line, column: str) -> float:
    """What the line gains over the block's plain line of the same source and run, unrounded; NaN without one."""
    if line.role not in ("other", "own"):
        return math.nan
    for plain in block.lines:
        if plain.role == "plain" and (plain.source, plain.run) == (line.source, line.run):
            return line.number(column) - plain.number(column)
    return math.nan


def shows_gains(grid: Grid, column: Column) -> bool:
    """Whether any line has a gain to show in this column."""
    return column.has_gain and any(
        not math.isnan(gain(block, line, column.title)) for block in grid.blocks for line in block.lines
    )


def best_value(grid: Grid, column: Column, block: Block, source: Source) -> float:
    """The best number of a column among a source's lines of the block's group, references left out; NaN without."""
    numbers = [
        line.number(column.title)
        for other in grid.blocks
        if other.group == block.group
        for line in other.lines
        if line.source == source and line.role != "reference"
    ]
    there = [number for number in numbers if not math.isnan(number)]
    if column.best is None or not there:
        return math.nan
    return max(there) if column.best == "highest" else min(there)


def tidy(grids: Iterable[Grid]) -> pd.DataFrame:
    """Every number and word of the tables, a row each, unrounded."""
    rows = [
        {
            "part": part,
            "block": block.title,
            "row": line.label,
            "source": line.source,
            "run": line.run,
            "variant": line.variant,
            "column": column.title,
            "value": cell.number,
            "text": cell.value if isinstance(cell.value, str) else "",
            "gain": gain(block, line, column.title),
            "spread": cell.spread,
            "n": cell.n,
            "ci_low": cell.low,
            "ci_high": cell.high,
            "note": " ".join(filter(None, (cell.note, line.note))),
        }
        for part, grid in enumerate(grids, start=1)
        for block in grid.blocks
        for line in block.lines
        for column in grid.columns
        if (cell := line.cells.get(column.title)) is not None
    ]
    frame = pd.DataFrame(rows, columns=list(_COLUMNS))
    return frame.astype({"value": "float64", "gain": "float64", "n": "Int64"})


_COLUMNS = (
    *("part", "block", "row", "source", "run", "variant", "column", "value", "text"),
    *("gain", "spread", "n", "ci_low", "ci_high", "note"),
)
