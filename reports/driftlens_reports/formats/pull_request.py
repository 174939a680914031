"""The Markdown format: GitHub's flavour, short enough for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from driftlens_reports.columns import printable
from driftlens_reports.content import Figure, ReportContent, Section, Table

MOST_CHARACTERS = 60_000
"""GitHub takes 65 536; the rest is for what people write around it."""

MAIN = "layer-drift"
"""The figure that has a picture."""

_MOST_ROWS = 40
_SECTIONS = ("setup", "glossary", "environment")
"""Sections that a comment can do without."""
_TABLES = {"layers", "models", "samples", "calibration-settings", "self-checks"}
"""Tables that a comment can do without; the sentences say what matters of them."""
_MARKUP = re.compile(r"[\\`*_\[\]<>|~&$]")
_AT_START = re.compile(r"(?:[#+\-=]|\d+[.)])(?=\s|$)|[#=\-]{2,}")
"""What would begin a list, a heading or a rule where a line begins."""
_REFERENCE = re.compile(r"[@#](?=\w)|(?<=:)//|(?<=www)\.", re.IGNORECASE)
"""Where GitHub would see a mention, an issue or a link."""
_WORD_JOINER = "\u2060"


def markdown(content: ReportContent, pictures: Mapping[str, str]) -> bytes:
    """The report as Markdown.

    Args:
        content: what it says.
        pictures: path of a figure's picture, relative to the report, for figures that have one.
    """
    parts = [_head(content)]
    left_out = []
    shown = [section for section in content.sections if section.name not in _SECTIONS]
    for section in shown:
        part = "\n\n".join(_section(section, pictures))
        if sum(map(len, parts)) + len(part) > MOST_CHARACTERS:
            left_out.append(section.title)
        elif part:
            parts.append(part)
    if left_out:
        parts.append(f"Left out for length: {', '.join(left_out)}. The other formats have them.")
    parts.append(f"<sub>DriftLens {escape(content.driftlens)}, run {escape(content.run.id)}</sub>")
    return ("\n\n".join(parts) + "\n").encode()


def escape(text: str) -> str:
    """Text that GitHub shows letter by letter: no markup, link, mention or reference comes of it."""
    literal = _MARKUP.sub(r"\\\g<0>", printable(text))
    literal = _REFERENCE.sub(lambda found: found[0][:1] + _WORD_JOINER + found[0][1:], literal)
    return _AT_START.sub(_marked, literal, count=1) if _AT_START.match(literal) else literal


def _marked(found: re.Match[str]) -> str:
    """The beginning of a list, heading or rule with the letter marked that makes it one."""
    return f"{found[0][:-1]}\\{found[0][-1]}" if found[0][0].isdigit() else f"\\{found[0]}"


def prose(text: str) -> str:
    """A sentence, escaped, with what stands between backticks as code."""
    parts = printable(text).split("`")
    if len(parts) % 2 == 0:  # a backtick without its twin is a letter like any other
        return escape(text)
    return "".join(f"`{part}`" if at % 2 else escape(part) for at, part in enumerate(parts))


def _head(content: ReportContent) -> str:
    stamps = [f"> {prose(text)}" for text in content.stamps]
    return "\n\n".join([f"## Drift report: {escape(content.run.name)}", *stamps])


def _section(section: Section, pictures: Mapping[str, str]) -> Iterator[str]:
    tables = [table for table in section.tables if table.name not in _TABLES]
    if not section.sentences and not tables and not section.figures:
        return
    yield f"### {section.title}"
    sentences = [prose(text) for text in section.sentences] + [
        _in_words(figure) for figure in section.figures
    ]
    if sentences:
        yield "\n".join(f"- {text}" for text in sentences)
    for figure in section.figures:
        if figure.name in pictures:
            yield f"![{escape(figure.alt)}]({pictures[figure.name]})"
    for table in tables:
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    sides = [":--" if column.kind == "text" else "--:" for column in table.columns]
    lines = [
        _line([escape(column.name) for column in table.columns]),
        _line(sides),
        *(_line([escape(cell) for cell in row]) for row in table.texts()[:_MOST_ROWS]),
    ]
    notes = [table.note] if table.note else []
    if table.has_gaps:
        notes.append("A dash: not measured.")
    if len(table.rows) > _MOST_ROWS:
        notes.append(f"{len(table.rows) - _MOST_ROWS} more rows in the other formats.")
    yield f"**{escape(table.title)}**"
    yield "\n".join(lines)
    if notes:
        yield f"<sub>{prose(' '.join(notes))}</sub>"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _in_words(figure: Figure) -> str:
    if figure.missing:
        return f"*{escape(figure.title)}*: not measured; {prose(figure.missing)}"
    return f"*{escape(figure.title)}*: {prose(figure.alt)}"
