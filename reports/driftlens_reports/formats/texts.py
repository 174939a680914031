"""The formats that are text: JSON, CSV, Markdown as a comment on a pull request, and LaTeX fragments to \\input."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from driftlens.base.words import counted
from driftlens.findings.headline import sentence
from driftlens.findings.reading import p_value, printable, signs, unbroken, with_code, written
from driftlens.findings.table import Cell, Column, Table
from driftlens.runs import layout, schema
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import csv_text
from driftlens_reports.content import VERSION, ReportContent
from driftlens_reports.paper import grid
from driftlens_reports.paper.grid import to_latex

_BY_SAMPLE = ("samples", "outputs", "adjoint")
"""Tables of the run with a row per sample: only in a report with raw data."""


def json_document(content: ReportContent) -> bytes:
    """The report as one JSON object; a number that was not measured is null, never NaN."""
    text = json.dumps(content.model_dump(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text}\n".encode()


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the format, as the model declares it; `report.schema.json` ships the same."""
    return {
        **ReportContent.model_json_schema(mode="serialization"),
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"DriftLens report {VERSION.partition('.')[0]}",
    }


def spreadsheets(run: DriftRun, content: ReportContent) -> dict[str, bytes]:
    """Files by name: `NAME.csv` of the run's tables, the report's, and those behind its figures; `NAME.units.csv`."""
    every: list[tuple[str, pd.DataFrame, pd.DataFrame]] = []
    for name in schema.TABLES:
        if content.raw or name not in _BY_SAMPLE:
            about = [(column.name, column.unit, column.meaning) for column in run.columns(name)]
            # A run's tables are its methods.
            every.append(
                (name, getattr(run, name)(), pd.DataFrame(about, columns=["column", "unit", "meaning"]))
            )
    for table in (*content.tables, *(figure.data for figure in content.figures if figure.data is not None)):
        prefix = "" if table.name.startswith("figure-") else "report-"
        units = pd.DataFrame([(of.name, of.unit) for of in table.columns], columns=["column", "unit"])
        every.append((f"{prefix}{table.name}", table.frame(), units))
    files: dict[str, bytes] = {}
    for name, rows, units in every:
        if len(rows):
            files[f"{layout.escape(name)}.csv"] = csv_text(rows).encode()
            files[f"{layout.escape(name)}.units.csv"] = csv_text(units).encode()
    return files


MOST_LINES = 30
_MOST_STAMPS, _MOST_FAILED = 3, 5
_MARKUP = re.compile(r"[\\`*_\[\]<>|~&$]")
_AT_START = re.compile(r"(?:[#+\-=]|\d+[.)])(?=\s|$)|[#=\-]{2,}")
"""What would begin a list, a heading or a rule where a line begins."""
_REFERENCE = re.compile(r"[@#](?=\w)|(?<=:)//|(?<=www)\.", re.IGNORECASE)
"""Where GitHub would see a mention, an issue or a link."""
_WORD_JOINER = "\u2060"


def markdown(content: ReportContent) -> bytes:
    """The report as Markdown."""
    tables = {table.name: table for section in content.sections for table in section.tables}
    judged = [row for name in ("checks", "self-checks") if name in tables for row in tables[name].texts()[1:]]
    failed = [
        f"- **{status}**: {prose(check)}: {prose(reason)}"
        for wanted in ("fail", "warn")
        for check, status, *_, reason in judged
        if status == wanted
    ]
    blocks = [
        [f"## Drift report: {escape(content.run.name)}"],
        _few([f"> - {prose(text)}" for text in content.stamps], _MOST_STAMPS, "> - "),
        _few(failed, _MOST_FAILED, "- "),
        [f"**{prose(sentence(content.verdict.headline))}**"],
        [f"- {prose(text)}" for text in content.verdict.sentences],
    ]
    about = [f"DriftLens {escape(content.driftlens)}, run {escape(content.run.id)}."]
    if (table := tables.get("tasks")) and table.rows:
        # Below stand the table's two first lines, the last line, and the empty ones between.
        room = MOST_LINES - sum(len(block) + 1 for block in blocks if block) - 4
        head, *rows = table.texts()
        shown = rows if len(rows) <= room else [*rows[: room - 1], rows[-1]]
        blocks.append(_bars(table, [head, *shown]))
        about += [f"{counted(len(rows) - len(shown), 'more task')} in the other formats."] * (
            len(rows) > len(shown)
        )
        about.append(prose(table.notes()))
    blocks.append([f"<sub>{' '.join(about)}</sub>"])
    return ("\n\n".join("\n".join(block) for block in blocks if block) + "\n").encode()


def _bars(table: Table, rows: Sequence[Sequence[str]]) -> list[str]:
    head, *lines = [f"| {' | '.join(escape(signs(cell)) for cell in line)} |" for line in rows]
    ends = (":--" if shown.kind == "text" else "--:" for shown in table.shown())
    return [head, f"|{'|'.join(ends)}|", *lines]


def _few(lines: Iterable[str], most: int, mark: str) -> list[str]:
    """The first lines, and how many more there are."""
    every = list(lines)
    return every if len(every) <= most else [*every[: most - 1], f"{mark}{len(every) - most + 1} more"]


def escape(text: str) -> str:
    """Text that GitHub shows letter by letter: no markup, link, mention or reference comes of it."""
    literal = _MARKUP.sub(r"\\\g<0>", printable(text))
    literal = _REFERENCE.sub(lambda match: match[0][:1] + _WORD_JOINER + match[0][1:], literal)
    return _AT_START.sub(_marked, literal, count=1) if _AT_START.match(literal) else literal


def _marked(start: re.Match[str]) -> str:
    """The beginning of a list, heading or rule with the letter marked that makes it one."""
    return f"{start[0][:-1]}\\{start[0][-1]}" if start[0][0].isdigit() else f"\\{start[0]}"


def prose(text: str) -> str:
    """A sentence, escaped, with what stands between backticks as code."""
    marked = with_code(signs(printable(text)), escape, "`{}`".format)
    return unbroken(marked)


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
    parts, about = _parts(_grid(table)), [note for note in notes if note]
    return "".join(
        to_latex(
            [part], table.name, f"{table.title}.", notes=about * (nth == len(parts)), part=nth, splits=False
        )
        for nth, part in enumerate(parts, start=1)
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
    alike = [at for at, of in enumerate(table.columns) if (of.kind, of.unit) == ("number", column.unit)]
    values = [[abs(row[at]) for row in table.rows if isinstance(row[at], (int, float))] for at in alike]
    tops = [math.floor(math.log10(max(sizes))) if max(sizes, default=0.0) else 0 for sizes in values]
    return max(min(max(_SIGNIFICANT - 1 - above, 0), _MOST_DIGITS) for above in tops)


def _value(cell: Cell, column: Column) -> float | str:
    if cell is None:
        return "" if column.kind == "text" else math.nan
    if isinstance(cell, str):
        return cell
    if column.kind == "p":
        return p_value(cell)
    return 100 * float(cell) if column.kind in ("share", "points") else float(cell)
