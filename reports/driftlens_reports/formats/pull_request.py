"""The Markdown format: GitHub's flavour, short enough for a comment on a pull request."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from driftlens.records.reading import printable
from driftlens_reports.content import ReportContent

if TYPE_CHECKING:
    import jinja2

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
    parts = [f"## Drift report: {escape(content.run.name)}", *(f"> {prose(text)}" for text in content.stamps)]
    left_out = []
    for section in content.sections:
        tables = [table for table in section.tables if table.name not in _TABLES]
        if section.name in _SECTIONS or not (section.sentences or tables or section.figures):
            continue
        text = _template().render(section=section, tables=tables, pictures=pictures, most_rows=_MOST_ROWS)
        part = text.strip()
        if sum(map(len, parts)) + len(part) > MOST_CHARACTERS:
            left_out.append(section.title)
        else:
            parts.append(part)
    if left_out:
        parts.append(f"Left out for length: {', '.join(left_out)}. The other formats have them.")
    parts.append(f"<sub>DriftLens {escape(content.driftlens)}, run {escape(content.run.id)}</sub>")
    return ("\n\n".join(parts) + "\n").encode()


@functools.cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(literal=escape, prose=prose)
    source = pathlib.Path(__file__).with_name("section.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


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
