"""The packaged theme: what is written on what can be read."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from driftlens_app import settings
from tests.reports.charts.recording import contrast

THEME = tomllib.loads(Path(settings.__file__).with_name("theme.toml").read_text(encoding="utf-8"))["theme"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_marks_stand_out(scheme: str) -> None:
    colours = THEME[scheme]
    surfaces = [colours["backgroundColor"], colours["secondaryBackgroundColor"]]
    for surface in surfaces:
        assert contrast(colours["textColor"], surface) >= 4.5
        assert contrast(colours["primaryColor"], surface) >= 3, "marks of chosen options"
    assert contrast("#FFFFFF", colours["primaryColor"]) >= 4.5, "words on primary buttons"
    assert contrast(colours.get("linkColor", colours["primaryColor"]), surfaces[0]) >= 4.5
