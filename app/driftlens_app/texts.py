"""Texts on a page: names made safe for Markdown, and how long ago something was."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from driftlens_reports.columns import printable

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:&=^\"'])")


def plain(text: object) -> str:
    """`text` on one line, so that Markdown shows every character of it and obeys none.

    Names come from runs and specs, which anybody may have written.
    """
    return _MARKDOWN.sub(r"\\\1", printable(str(text)))


def when(moment: str) -> str:
    """A UTC time from a run, to the minute, for reading; the text itself where it is no time."""
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError:
        return printable(moment)
    return parsed.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
