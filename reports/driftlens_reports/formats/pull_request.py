"""The Markdown format: a comment on a pull request, in GitHub's flavour and at most 30 lines, without pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from driftlens.base.words import counted
from driftlens.findings.reading import printable
from driftlens.findings.table import Table
from driftlens_reports.content import ReportContent

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
        [f"- {prose(text)}" for text in content.verdict.sentences],
    ]
    about = [f"DriftLens {escape(content.driftlens)}, run {escape(content.run.id)}."]
    if (table := tables.get("tasks")) and table.rows:
        # Below stand the table's two first lines, the last line, and the empty ones between.
        room = MOST_LINES - sum(len(block) + 1 for block in blocks if block) - 4
        head, *rows = table.texts()
        kept = rows if len(rows) <= room else [*rows[: room - 1], rows[-1]]
        blocks.append(_bars(table, [head, *kept]))
        about += [f"{counted(len(rows) - len(kept), 'more task')} in the other formats."] * (
            len(rows) > len(kept)
        )
        about.append(prose(table.notes()))
    blocks.append([f"<sub>{' '.join(about)}</sub>"])
    return ("\n\n".join("\n".join(block) for block in blocks if block) + "\n").encode()


def _bars(table: Table, rows: Sequence[Sequence[str]]) -> list[str]:
    head, *lines = [f"| {' | '.join(map(escape, line))} |" for line in rows]
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
    parts = printable(text).split("`")
    if len(parts) % 2 == 0:  # a backtick without its twin is a letter like any other
        return escape(text)
    return "".join(f"`{part}`" if at % 2 else escape(part) for at, part in enumerate(parts))
