"""The formats that are text: JSON, CSV, Markdown as a comment on a pull request, and LaTeX tables to \\input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

import pandas as pd

from driftlens.results.formatting import (
    Table,
    keep_units_together,
    map_code_spans,
    strip_control_chars,
    typeset_signs,
)
from driftlens.results.verdict import headline_sentence
from driftlens.runs import schema
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import csv_text
from driftlens.utils.errors import pluralize
from driftlens.utils.variants import safe_file_name as file_name
from driftlens_reports.content import ReportContent
from driftlens_reports.paper.latex_tables import escape_latex as tex, latex_tables

# Tables of the run with a row per sample: only in a full report.
_BY_SAMPLE = ("samples", "outputs", "adjoint")


def report_json(content: ReportContent) -> bytes:
    """Return the report as one JSON object; missing numbers are null."""
    # `allow_nan=False`: NaN is invalid JSON and must fail here, not in a reader.
    text = json.dumps(content.model_dump(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text}\n".encode()


def csv_files(run: DriftRun, content: ReportContent) -> dict[str, bytes]:
    """Return CSV files by name: tables of the run, of the report and of its figures, and their units."""
    every: list[tuple[str, pd.DataFrame, pd.DataFrame]] = []
    for name in schema.TABLES:
        if content.preset == "full" or name not in _BY_SAMPLE:
            about = [(column.name, column.unit, column.meaning) for column in run.columns(name)]
            # A run's tables are its methods.
            every.append((name, getattr(run, name)(), pd.DataFrame(about, columns=["column", "unit", "meaning"])))
    for table in (*content.tables, *content.figure_tables.values()):
        prefix = "" if table.name.startswith("figure-") else "report-"
        units = pd.DataFrame([(column.name, column.unit) for column in table.columns], columns=["column", "unit"])
        every.append((f"{prefix}{table.name}", table.frame(), units))
    files: dict[str, bytes] = {}
    for name, rows, units in every:
        if len(rows):
            files[f"csv/{file_name(name)}.csv"] = csv_text(rows).encode()
            files[f"csv/{file_name(name)}.units.csv"] = csv_text(units).encode()
    return files


MOST_LINES = 30
_MOST_STAMPS, _MOST_FAILED = 3, 5
_MARKUP = re.compile(r"[\\`*_\[\]<>|~&$]")
# What would begin a list, a heading or a rule where a line begins.
_AT_START = re.compile(r"(?:[#+\-=]|\d+[.)])(?=\s|$)|[#=\-]{2,}")
# Where GitHub would see a mention, an issue or a link.
_REFERENCE = re.compile(r"[@#](?=\w)|(?<=:)//|(?<=www)\.", re.IGNORECASE)
_WORD_JOINER = "\u2060"


def report_markdown(content: ReportContent) -> bytes:
    """Return the report as Markdown."""
    tables = {table.name: table for section in content.sections for table in section.tables}
    judged = [row for name in ("checks", "self-checks") if name in tables for row in tables[name].formatted_rows()[1:]]
    failed = [
        f"- **{status}**: {sentence_markdown(check)}: {sentence_markdown(reason)}"
        for level in ("fail", "warn")
        for check, status, *_, reason in judged
        if status == level
    ]
    blocks = [
        [f"## Drift report: {escape_markdown(content.run.name)}"],
        _truncate_lines([f"> - {sentence_markdown(text)}" for text in content.stamps], _MOST_STAMPS, "> - "),
        _truncate_lines(failed, _MOST_FAILED, "- "),
        [f"**{sentence_markdown(headline_sentence(content.verdict.headline))}**"],
        [f"- {sentence_markdown(text)}" for text in content.verdict.sentences],
    ]
    about = [f"DriftLens {escape_markdown(content.driftlens)}, run {escape_markdown(content.run.id)}."]
    if (table := tables.get("tasks")) and table.rows:
        # Reserve room for the table's two first lines, the last line and empty lines.
        room = MOST_LINES - sum(len(block) + 1 for block in blocks if block) - 4
        head, *rows = table.formatted_rows()
        # The last row, the mean over tasks, always stays.
        shown = rows if len(rows) <= room else [*rows[: room - 1], rows[-1]]
        blocks.append(_markdown_table_lines(table, [head, *shown]))
        about += [f"{pluralize(len(rows) - len(shown), 'more task')} in the other formats."] * (len(rows) > len(shown))
        about.append(sentence_markdown(table.notes()))
    blocks.append([f"<sub>{' '.join(about)}</sub>"])
    return ("\n\n".join("\n".join(block) for block in blocks if block) + "\n").encode()


def _markdown_table_lines(table: Table, rows: Sequence[Sequence[str]]) -> list[str]:
    head, *lines = [f"| {' | '.join(escape_markdown(typeset_signs(cell)) for cell in line)} |" for line in rows]
    ends = (":--" if shown.kind == "text" else "--:" for shown in table.display_columns())
    return [head, f"|{'|'.join(ends)}|", *lines]


def _truncate_lines(lines: Iterable[str], most: int, mark: str) -> list[str]:
    every = list(lines)
    return every if len(every) <= most else [*every[: most - 1], f"{mark}{len(every) - most + 1} more"]


def escape_markdown(text: str) -> str:
    """Escape text for GitHub Markdown: no markup, link, mention or reference remains."""
    literal = _MARKUP.sub(r"\\\g<0>", strip_control_chars(text))
    # A word joiner is invisible and keeps GitHub from linking.
    literal = _REFERENCE.sub(lambda match: match[0][:1] + _WORD_JOINER + match[0][1:], literal)
    return _AT_START.sub(_escape_line_start, literal, count=1) if _AT_START.match(literal) else literal


def _escape_line_start(start: re.Match[str]) -> str:
    """Escape a line that Markdown would read as a list, heading or rule."""
    return f"{start[0][:-1]}\\{start[0][-1]}" if start[0][0].isdigit() else f"\\{start[0]}"


def sentence_markdown(text: str) -> str:
    """Escape a sentence for Markdown, with text between backticks as code."""
    marked = map_code_spans(typeset_signs(strip_control_chars(text)), escape_markdown, "`{}`".format)
    return keep_units_together(marked)


# Tables that no paper prints.
_NOT_PRINTED = {"glossary", "environment", "layers"}
# Rows of a table that fit on a page below a caption and above the notes.
_ROWS_PER_PAGE = 40


def latex_tables_by_file(content: ReportContent) -> dict[str, bytes]:
    """Return LaTeX files by name, one per table of the report."""
    return {
        f"latex/{file_name(table.name)}.tex": _latex_fragment(content, table).encode()
        for table in content.tables
        if table.name not in _NOT_PRINTED
    }


def _latex_fragment(content: ReportContent, table: Table) -> str:
    """Return a table as LaTeX, split into several environments if it is longer than a page, with notes below."""
    notes = [f"Run {content.run.name} ({content.run.id}).", table.notes(), *content.stamps]
    head, *rows = [[tex(typeset_signs(cell)) for cell in line] for line in table.formatted_rows(gap="--")]
    pages = [rows[start : start + _ROWS_PER_PAGE] for start in range(0, max(len(rows), 1), _ROWS_PER_PAGE)]
    captions = [f"{table.title}.", *[f"{table.title} (continued)."] * (len(pages) - 1)]
    frames = [pd.DataFrame(page, columns=head) for page in pages]
    return latex_tables(frames, table.name, captions, [*filter(None, notes)])
