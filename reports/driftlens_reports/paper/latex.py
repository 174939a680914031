r"""A table as LaTeX that a paper can \input: booktabs rules, a caption, a label, every name escaped.

pandas' `Styler.to_latex` sets neither rules between blocks nor notes and shading by line, and lets `<`, `|` and `[`
pass unescaped; a template of our own is shorter than working around that.
"""

from __future__ import annotations

import functools
import math
import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from driftlens_reports.columns import printable
from driftlens_reports.paper.exhibit import Panel
from driftlens_reports.paper.grid import Block, Column, Grid, Line, best_value, gain, shows_gains

if TYPE_CHECKING:
    import jinja2

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    # At the start of a line these would be read as arguments of the line break before.
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "…": r"\dots{}",
    "\ufffd": "?",
    "λ": r"$\lambda$",
    "ρ": r"$\rho$",
    "α": r"$\alpha$",
}
_UNFAMILIAR = re.compile(r"[^\x00-\u017f\u2010-\u2027]")
"""Letters that pdfLaTeX has no fonts for without further packages."""
_UNLABELLED = re.compile(r"[^A-Za-z0-9.:-]+")
"""What a label can't hold."""
_EMPTY = "--"
_GAPS = ((8, 5.0), (12, 3.5), (math.inf, 2.0))
"""Columns up to which the space on each side of a column is so many points."""
_PARAGRAPH = r">{{\raggedright\arraybackslash}}p{{{:g}em}}"
_BREAKABLE = re.compile(r"([/.:=,]|\\_)(?=\w)")
"""Where a word that is longer than its column may go on in the next line."""
_DAGGER = r"\textsuperscript{\dag}"


@dataclass(frozen=True)
class Setting:
    """How a table stands in a paper; everything is plain text.

    Attributes:
        name: id of the exhibit, the end of its label.
        caption: a sentence or two above the table.
        notes: sentences below it.
        missing: parts that the runs can't fill, as framed notes.
        part: 1 for the first table of a file, which brings the commands that all of them use; those after it say
            that they continue it.
    """

    name: str
    caption: str
    notes: Sequence[str] = ()
    missing: Sequence[Panel] = ()
    part: int = 1


def escape(text: str) -> str:
    """User text that LaTeX sets literally: no command, no markup, no line break survives."""
    return "".join(_SPECIAL.get(letter, letter) for letter in printable(text))


def prose(text: str) -> str:
    """A sentence that LaTeX sets literally, with what stands between backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its twin is a letter like any other
        return escape(text)
    return "".join(rf"\texttt{{{escape(part)}}}" if at % 2 else escape(part) for at, part in enumerate(parts))


def to_latex(grids: Sequence[Grid], setting: Setting) -> str:
    """The grids, one below the other, as one table environment; the head of the file names the packages it needs."""
    # Without a line of the paper's nobody can mistake a source; with one, every line says its own.
    has_sources = any(line.source == "paper" for grid in grids for line in grid.lines)
    text = _template().render(
        label=_UNLABELLED.sub("-", setting.name) + (f"-{setting.part}" if setting.part > 1 else ""),
        is_first=setting.part == 1,
        caption=prose(setting.caption),
        frames=[f"{escape(panel.name)}: {prose(panel.missing)}" for panel in setting.missing],
        tabulars=[_tabular(grid, has_sources=has_sources) for grid in grids],
        footers=[prose(note) for note in setting.notes],
    )
    hint = "% Some names need fonts that only XeLaTeX and LuaLaTeX can load.\n"
    return hint + text if _UNFAMILIAR.search(text) else text


@dataclass(frozen=True)
class _Tabular:
    alignment: str
    header: str
    blocks: tuple[tuple[str, ...], ...]
    gap: float


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
    source = pathlib.Path(__file__).with_name("table.tex.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


def _tabular(grid: Grid, *, has_sources: bool) -> _Tabular:
    first = [escape(grid.first), "Source"] if has_sources else [escape(grid.first)]
    sides = ["l" if _has_words(grid, column) else "r" for column in grid.columns]
    labels = _PARAGRAPH.format(grid.wrap) if grid.wrap else "l"
    widths = [
        _PARAGRAPH.format(column.wrap) if column.wrap else side
        for column, side in zip(grid.columns, sides, strict=True)
    ]
    heads = [_head(grid, column, side) for column, side in zip(grid.columns, sides, strict=True)]
    span = len(first) + len(heads)
    blocks = tuple(_block(grid, block, span, has_sources) for block in grid.blocks if block.lines)
    gap = next(points for most, points in _GAPS if len(heads) <= most)
    alignment = "".join([labels, *("l" for _ in first[1:]), *widths])
    return _Tabular(alignment, " & ".join([*first, *heads]), blocks, gap)


def _head(grid: Grid, column: Column, side: str) -> str:
    # Gains stand to the right of the numbers, so a head at the far right would be off their middle.
    return rf"\multicolumn{{1}}{{{'c' if shows_gains(grid, column) else side}}}{{{escape(column.title)}}}"


def _has_words(grid: Grid, column: Column) -> bool:
    cells = [line.cells[column.title].value for line in grid.lines if column.title in line.cells]
    return any(isinstance(value, str) for value in cells) and all(isinstance(value, str) for value in cells)


def _block(grid: Grid, block: Block, span: int, has_sources: bool) -> tuple[str, ...]:
    title = rf"\multicolumn{{{span}}}{{l}}{{\emph{{{escape(block.title)}}}}} \\"
    lines = tuple(_line(grid, block, line, has_sources) for line in block.lines)
    return (title, *lines) if block.title else lines


def _line(grid: Grid, block: Block, line: Line, has_sources: bool) -> str:
    shade = r"\driftown " if line.role == "own" else ""
    indent = r"\quad " if line.role in ("other", "own") and _has_plain(block) else ""
    mark = _DAGGER if line.note else ""
    label = _breakable(escape(line.label)) if grid.wrap else escape(line.label)
    first = [f"{shade}{indent}{label}{mark}", *([line.source] if has_sources else [])]
    return " & ".join([*first, *(_cell(grid, block, line, column) for column in grid.columns)]) + r" \\"


def _breakable(text: str) -> str:
    return _BREAKABLE.sub(r"\1\\allowbreak{}", text)


def _has_plain(block: Block) -> bool:
    return any(line.role == "plain" for line in block.lines)


def _cell(grid: Grid, block: Block, line: Line, column: Column) -> str:
    text = _value(grid, block, line, column)
    if not shows_gains(grid, column):
        return text
    gained = gain(block, line, column.title)
    # Gains take the same room in every line, so that the numbers line up whether they have one or not.
    return rf"{text}\driftgain{{{'' if math.isnan(gained) else _signed(gained, column)}}}"


def _value(grid: Grid, block: Block, line: Line, column: Column) -> str:
    cell = line.cells.get(column.title)
    if cell is None or (not isinstance(cell.value, str) and math.isnan(cell.value)):
        return _EMPTY
    if isinstance(cell.value, str):
        return _breakable(escape(cell.value)) if column.wrap else escape(cell.value)
    text = _number(cell.value, column)
    if not math.isnan(cell.spread):
        text += rf" $\pm$ {_number(cell.spread, column)}"
    if line.role != "reference" and cell.value == best_value(grid, column, block, line.source):
        text = rf"\textbf{{{text}}}"
    return f"{text}{_DAGGER}" if cell.note else text


def _number(value: float, column: Column) -> str:
    if column.digits is not None:
        return f"{value:.{column.digits}f}".replace("-", "$-$")
    mantissa, _, exponent = f"{value:.3g}".replace("-", "$-$").partition("e")
    if not exponent:
        return mantissa
    power = f"$10^{{{int(exponent.replace('$-$', '-'))}}}$"
    return power if mantissa == "1" else rf"{mantissa} $\times$ {power}"


def _signed(value: float, column: Column) -> str:
    text = f"{value:+.{column.digits if column.digits is not None else 1}f}"
    return text.replace("-", "$-$")
