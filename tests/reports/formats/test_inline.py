"""Charts as SVG inside a page: nothing that could act, ask for anything or carry a style, and the same every time."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import plotly.graph_objects as go
import pytest

from driftlens.runs.run import DriftRun
from driftlens_reports.build import Report
from driftlens_reports.charts.chart import charts
from driftlens_reports.charts.theme import apply_theme
from driftlens_reports.formats.page import inline_svg

HARMFUL = "&lt;script&gt;alert(1)&lt;/script&gt; url(http://evil.test/a) javascript:x"


def chart() -> go.Figure:
    bars = go.Bar(
        x=[HARMFUL, "b"], y=[1.0, 2.0], name=HARMFUL, marker={"pattern": {"shape": "/"}}, showlegend=True
    )
    return apply_theme(go.Figure(bars), dark=False, height=300)


def test_only_shapes_and_words_are_left() -> None:
    root = ElementTree.fromstring(inline_svg(chart(), "chart", "what it shows"))
    tags = {element.tag for element in root.iter()}
    assert tags <= {"svg", "g", "defs", "clipPath", "pattern", "path", "rect", "use", "text"}
    names = {name for element in root.iter() for name in element.attrib}
    assert "style" not in names and not any(name.startswith("on") for name in names)
    assert {root.get("class"), root.get("role"), root.get("aria-label")} == {
        "drawing",
        "img",
        "what it shows",
    }


def test_names_stand_there_letter_by_letter() -> None:
    root = ElementTree.fromstring(inline_svg(chart(), "chart", "x"))
    said = [element.text for element in root.iter("text")]
    assert any("<script>alert(1)</script>" in (text or "") for text in said)
    assert "<script" not in inline_svg(chart(), "chart", "x")


def test_references_stay_inside_and_are_unique_to_the_chart() -> None:
    text = inline_svg(chart(), "chart", "x")
    root = ElementTree.fromstring(text)
    ids = {element.get("id") for element in root.iter() if element.get("id")}
    assert ids and all(str(name).startswith("chart-") for name in ids)
    marked = {value for element in root.iter() if (value := element.get("href"))}
    filled = re.findall(r'="url\((#[^)]*)\)"', text)
    assert filled and {*marked, *filled} <= {f"#{name}" for name in ids}


@pytest.mark.slow
def test_a_chart_drawn_again_has_the_same_bytes(full: DriftRun) -> None:
    for name in ("layer-drift", "heatmap", "decomposition"):
        first, again = (inline_svg(charts[name].draw(full).figure, name, "x") for _ in range(2))
        assert first == again


def test_colours_of_a_drawing_have_a_dark_twin_on_the_page(full: DriftRun) -> None:
    report = Report(full, sections=["layers"])
    page = report.files(["html-light"])["report-light.html"].decode()
    rules = set(re.findall(r'\[stroke="(#[0-9a-f]{6})"\]', page))
    drawing = inline_svg(charts["layer-drift"].draw(full).figure, "layer-drift", "x")
    drawn = set(re.findall(r' (?:stroke|fill)="(#[0-9a-f]{6})"', drawing))
    assert drawn and drawn <= rules - {"#ffffff"}  # white would be a background that stays white
