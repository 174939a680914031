"""What a table shows before it is set: columns, blocks of lines, gains, best cells; and the same as rows or as LaTeX.

pandas' `Styler.to_latex` sets no rules, notes and shading by block and line, and lets `<`, `|` and `[` pass unescaped.
"""

from __future__ import annotations

import functools
import math
import pathlib
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from driftlens.findings.reading import printable, with_code

if TYPE_CHECKING:
    import jinja2

    from driftlens_reports.paper.exhibit import Gap

AVERAGE = "Avg."
"""Column of averages, as the paper calls it."""

Role = Literal["reference", "plain", "other", "own"]
Source = Literal["measured", "paper"]

_COLUMNS = (
    *("part", "block", "row", "source", "run", "variant", "column", "value", "text"),
    *("gain", "spread", "n", "ci_low", "ci_high", "note"),
)
_SPECIAL = {
    **{letter: f"\\{letter}" for letter in "{}$&#_%"},
    # At the start of a line these would be read as arguments of the line break before.
    **{letter: f"{{{letter}}}" for letter in "[]*"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "…": r"\dots{}",
    "\ufffd": "?",
    "−": "$-$",
    **{"±": r"$\pm$", "×": r"$\times$", "≤": r"$\le$", "≥": r"$\ge$"},
    **{"λ": r"$\lambda$", "ρ": r"$\rho$", "α": r"$\alpha$"},
}
_UNFAMILIAR = re.compile(r"[^\x00-\u017f\u2010-\u2027]")
"""Letters that pdfLaTeX has no fonts for without further packages."""
_UNLABELLED = re.compile(r"[^A-Za-z0-9.:-]+")
"""What a label can't hold."""
_GAPS = ((8, 5.0), (12, 3.5), (math.inf, 2.0))
"""Columns up to which the space on each side of a column is so many points."""
_PARAGRAPH = r">{{\raggedright\arraybackslash}}p{{{:g}em}}"
_BREAKABLE = re.compile(r"([/.:=,]|\\_)(?=\w)")
"""Where a word that is longer than its column may go on in the next line."""
_COLUMN, _TEXT = 235.0, 397.0
"""Points: an ICML column, beyond which a table takes both, and NeurIPS's text, which is narrower than ICML's two."""
_DIGIT, _FOOT_LETTER, _GAIN = 4.6, 4.0, 22.0
"""Points: widths of an average letter of a table and of a note, both on the wide side, and of a gain."""
_SMALLEST = 7 / 9
"""Of a table's size of type, down to which one that is too wide is set."""
_LITERAL = {"-": "{-}", "'": r"\textquotesingle{}"}
"""What fonts would join to a dash or bend in code that a reader copies."""
_COMMAND = re.compile(r"\\[a-zA-Z]+|[{}$\\]")
_DAGGER = r"\textsuperscript{\dag}"


@dataclass(frozen=True)
class Cell:
    """One entry of a table, unrounded: words, or a number with its standard deviation; NaN: not measured."""

    value: float | str
    spread: float = math.nan
    n: int | None = None
    low: float = math.nan
    high: float = math.nan
    note: str = ""
    is_best: bool = False

    @property
    def number(self) -> float:
        """The value as a number; NaN for words."""
        return math.nan if isinstance(self.value, str) else float(self.value)


def percent_cell(value: float, spread: float = math.nan, n: Any = None, **ends: float) -> Cell:
    """The cell of a share, in percent; `n` may be missing as tables have it."""
    ends = {end: 100 * number for end, number in ends.items()}
    return Cell(100 * value, 100 * spread, None if pd.isna(n) else int(n), **ends)


@dataclass(frozen=True)
class Line:
    """One line of a table, with cells by column title. Gains count from `plain` lines, `own` ones are shaded."""

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
    """Lines that belong together, set apart by a rule."""

    lines: tuple[Line, ...]
    title: str = ""


@dataclass(frozen=True)
class Column:
    """One column; without `digits` of words or of three significant digits; `wrap`: em beyond which words go on."""

    title: str
    digits: int | None = 1
    has_gain: bool = False
    wrap: float = 0.0
    head: str = ""


@dataclass(frozen=True)
class Grid:
    """One tabular; `first` is the head of the column of labels and `wrap` its width, as a column's."""

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
    gains = (gain(block, line, column.title) for block in grid.blocks for line in block.lines)
    return column.has_gain and not all(map(math.isnan, gains))


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


def escape(text: str) -> str:
    """User text that LaTeX sets literally: no command, no markup, no line break survives."""
    return "".join(_SPECIAL.get(letter, letter) for letter in printable(text))


def prose(text: str) -> str:
    """A sentence that LaTeX sets literally, with what stands between backticks as code."""

    def code(part: str) -> str:
        literal = "".join(_LITERAL.get(letter, letter) for letter in escape(part))
        literal = literal.replace(r"\_", r"{\char95}")  # else a rule, not a letter
        literal = literal.replace(",", r",\allowbreak{}")  # of a setting's values
        return rf"\texttt{{{literal}}}"

    return with_code(text, escape, code)


def to_latex(
    grids: Sequence[Grid],
    name: str,
    caption: str,
    *,
    notes: Sequence[str] = (),
    missing: Sequence[Gap] = (),
    part: int = 1,
    splits: bool = True,
) -> str:
    """The grids as one table environment; as many of `notes`, the most needed first, as it is long; `part` from 1."""
    # Without a line of the paper's nobody can mistake a source; with one, every line says its own.
    has_sources = any(line.source == "paper" for grid in grids for line in grid.lines)
    if splits:
        grids = [part for grid in grids for part in _narrow(grid, has_sources)]
    width = max((_width(grid, has_sources) for grid in grids), default=0.0)
    room = sum(2 + len(grid.lines) + sum(bool(block.title) for block in grid.blocks) for grid in grids)
    letters = int((_TEXT if width > _COLUMN else _COLUMN) / _FOOT_LETTER)
    below: list[str] = []
    for note in notes:
        below += [note] if len(textwrap.wrap(" ".join([*below, note]), letters)) <= room else []
    text = _template().render(
        label=_UNLABELLED.sub("-", name) + (f"-{part}" if part > 1 else ""),
        is_first=part == 1,
        caption=caption,
        missing=missing,
        grids=grids,
        has_sources=has_sources,
        notes=below,
        left_out=[note for note in notes if note not in below],
        environment="table*" if width > _COLUMN else "table",
    )
    hint = "% Some names need fonts that only XeLaTeX and LuaLaTeX can load.\n"
    return hint + text if _UNFAMILIAR.search(text) else text


@functools.cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(literal=escape, prose=prose, words=_words)
    environment.globals.update(gap=_gap, alignment=_alignment, side=_side, value=_value)
    environment.globals.update(shows_gains=shows_gains, gained=_gained, dagger=_DAGGER)
    source = pathlib.Path(__file__).with_name("table.tex.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


def _gap(grid: Grid) -> float:
    return next(points for most, points in _GAPS if len(grid.columns) <= most)


def _width(grid: Grid, has_sources: bool) -> float:
    """About how wide the grid is, in points, before it is fitted to the page."""
    words = (
        [max(len(line.label) + 2 for line in grid.lines), *([8] if has_sources else [])] if grid.lines else []
    )
    width = sum(words) * _DIGIT if not grid.wrap else 9 * grid.wrap
    for column in grid.columns:
        cells = [_value(line, column) for line in grid.lines]
        longest = max(len(_COMMAND.sub("", text)) for text in (*cells, column.head or column.title))
        width += 9 * column.wrap if column.wrap else longest * _DIGIT
        width += _GAIN if shows_gains(grid, column) else 0.0
    return width + 2 * _gap(grid) * (len(grid.columns) + len(words))


def _narrow(grid: Grid, has_sources: bool) -> list[Grid]:
    """The grid, or some of its columns below the others where all are wider than the page in its smallest type."""
    if _SMALLEST * _width(grid, has_sources) <= _TEXT or len(grid.columns) == 1:
        return [grid]
    half = -(-len(grid.columns) // 2)
    parts = (replace(grid, columns=columns) for columns in (grid.columns[:half], grid.columns[half:]))
    return [narrow for part in parts for narrow in _narrow(part, has_sources)]


def _alignment(grid: Grid, has_sources: bool) -> str:
    wraps = [(grid.wrap, "l"), *([(0.0, "l")] if has_sources else [])]
    wraps += [(column.wrap, _side(grid, column)) for column in grid.columns]
    return "".join(_PARAGRAPH.format(wrap) if wrap else side for wrap, side in wraps)


def _side(grid: Grid, column: Column) -> str:
    """Left for a column of words, right for numbers."""
    cells = [line.cells[column.title].value for line in grid.lines if column.title in line.cells]
    return "l" if cells and all(isinstance(value, str) for value in cells) else "r"


def _gained(block: Block, line: Line, column: Column) -> str:
    gained = gain(block, line, column.title)
    digits = 1 if column.digits is None else column.digits
    return "" if math.isnan(gained) else _minus(f"{gained:+.{digits}f}")


def _value(line: Line, column: Column) -> str:
    cell = line.cells.get(column.title)
    if cell is None or (not isinstance(cell.value, str) and math.isnan(cell.value)):
        return "--"
    if isinstance(cell.value, str):
        return _words(cell.value, column.wrap)
    text = _number(cell.value, column)
    if not math.isnan(cell.spread):
        text += rf" $\pm$ {_number(cell.spread, column)}"
    if cell.is_best:
        text = rf"\textbf{{{text}}}"
    return f"{text}{_DAGGER}" if cell.note else text


def _words(text: str, wrap: float) -> str:
    return _BREAKABLE.sub(r"\1\\allowbreak{}", escape(text)) if wrap else escape(text)


def _number(value: float, column: Column) -> str:
    if column.digits is not None:
        return _minus(f"{value:.{column.digits}f}")
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    if not exponent:
        return _minus(mantissa)
    power = f"$10^{{{int(exponent)}}}$"
    return power if mantissa == "1" else rf"{_minus(mantissa)} $\times$ {power}"


def _minus(number: str) -> str:
    return number.replace("-", "$-$")
