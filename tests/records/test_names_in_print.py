"""Names in print: spaces that fonts lack are plain ones, and what steers a terminal is a sign that nobody misses."""

from __future__ import annotations

from driftlens.findings.reading import printable
from driftlens_reports.charts.words import label


def test_narrow_and_unbreakable_spaces_are_plain_ones_wherever_a_name_is_drawn() -> None:
    name = "12\u202f345\u00a0words\u2009here"
    assert printable(name) == label(name) == "12 345 words here"
    assert printable("a\nb\x1b[0m") == "a\ufffdb\ufffd[0m"
