"""Both HTML formats: closed off from the network, names as text, plotly once or not at all, small where promised."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import plotly.graph_objects as go
import pytest

from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.build import Report
from driftlens_reports.charts.chart import charts
from driftlens_reports.charts.theme import DARK, LIGHT, apply_theme
from driftlens_reports.formats.page import inline_svg, interactive_page
from tests.records.full_run import Size, write_full_run
from tests.reports.conftest import HOSTILE
from tests.reports.formats.reading import Page

BREAKING = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def light(standard: Report) -> str:
    return standard.files(["html-light"])["report-light.html"].decode()


@pytest.fixture(scope="module")
def interactive(standard: Report) -> str:
    return standard.files(["html"])["report.html"].decode()


@pytest.fixture(scope="module")
def hostile_pages(tmp_path_factory: pytest.TempPathFactory) -> list[Page]:
    folder = write_full_run(
        tmp_path_factory.mktemp("hostile") / "run",
        name=HOSTILE,
        tasks=[HOSTILE, BREAKING],
        class_names=[BREAKING, "b"],
        size=Size(1, 4, 3, 2, 10),
    )
    files = Report(folder, "full", raw=True).files(["html", "html-light"])
    return [Page(data.decode()) for data in files.values()]


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_plotly_is_in_the_interactive_page_exactly_once(interactive: str) -> None:
    from plotly.offline import get_plotlyjs

    assert interactive.count(get_plotlyjs()) == 1
    programs = [text for attributes, text in Page(interactive).scripts if "type" not in attributes]
    assert len(programs) == 2 and programs[0] == get_plotlyjs()


def test_the_light_page_has_no_script(light: str) -> None:
    page = Page(light)
    assert page.scripts == [] and "<script" not in light
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_the_light_page_allows_its_own_style_and_nothing_else(light: str) -> None:
    page = Page(light)
    assert page.policy == {
        "default-src": ["'none'"],
        "style-src": [digest(page.style)],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    assert not [attributes for _, attributes in page.tags if "style" in attributes]


def test_the_interactive_page_allows_its_own_scripts_and_no_other(interactive: str) -> None:
    page = Page(interactive)
    programs = [text for attributes, text in page.scripts if "type" not in attributes]
    assert page.policy["script-src"] == [digest(text) for text in programs]
    assert page.policy["default-src"] == ["'none'"]
    assert "connect-src" not in page.policy


def test_only_charts_of_many_points_need_compiled_drawing_commands(
    standard: Report, interactive: str
) -> None:
    assert "'unsafe-eval'" not in Page(interactive).policy["script-src"]
    drawn = charts["layer-drift"].draw(standard.run)
    many = {"layer-drift": dataclasses.replace(drawn, figure=go.Figure(go.Scattergl(x=[1], y=[1])))}
    page = Page(interactive_page(standard.content, many).decode())
    assert "'unsafe-eval'" in page.policy["script-src"]


@pytest.mark.parametrize("name", ["light", "interactive"])
def test_a_page_refers_to_nothing_outside_itself(name: str, request: pytest.FixtureRequest) -> None:
    page = Page(request.getfixturevalue(name))
    targets = [
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in {"src", "href", "srcset", "xlink:href", "action", "data", "poster"}
    ]
    assert targets and all(str(target).startswith("#") for target in targets)
    assert "url(" not in page.style and "@import" not in page.style
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {str(target)[1:] for target in targets} <= ids


@pytest.mark.parametrize("name", ["light", "interactive"])
def test_no_id_is_there_twice(name: str, request: pytest.FixtureRequest) -> None:
    ids = [
        attributes["id"] for _, attributes in Page(request.getfixturevalue(name)).tags if "id" in attributes
    ]
    assert len(ids) == len(set(ids))


def test_names_are_text_and_never_markup(hostile_pages: list[Page]) -> None:
    for page in hostile_pages:
        assert "img" not in {tag for tag, _ in page.tags}
        assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
        assert HOSTILE in page.text and BREAKING in page.text
        assert sum("type" not in attributes for attributes, _ in page.scripts) in (0, 2)


def test_embedded_charts_are_the_charts_and_never_end_their_element(
    interactive: str, standard: Report, hostile_pages: list[Page]
) -> None:
    for page in (Page(interactive), hostile_pages[0]):
        embedded = {str(a["id"]): text for a, text in page.scripts if a.get("type") == "application/json"}
        assert embedded and not any("<" in text for text in embedded.values())
        for text in embedded.values():
            figure = json.loads(text)
            assert set(figure) == {"data", "layout", "dark"} and "uid" not in figure["dark"]
            assert figure["layout"]["paper_bgcolor"] == LIGHT.surface
            assert figure["dark"]["layout"]["paper_bgcolor"] == DARK.surface
            assert set(map(int, figure["dark"].get("data", {}))) < {*range(len(figure["data"]) + 1)}
            assert len(json.dumps(figure["dark"])) < len(text) / 2, "no more than what differs"
    ids = {attributes["id"] for attributes, _ in Page(interactive).scripts if "id" in attributes}
    assert ids == {f"plot-{figure.name}" for figure in standard.content.figures}


def test_every_drawing_says_what_it_shows(light: str, standard: Report) -> None:
    labels = [a.get("aria-label") for tag, a in Page(light).tags if tag == "svg" and a.get("role") == "img"]
    alts = {figure.alt for figure in standard.content.figures}
    assert labels and set(labels) <= alts


@pytest.mark.slow
def test_a_large_light_page_stays_below_a_megabyte(tmp_path: pathlib.Path) -> None:
    folder = write_full_run(
        tmp_path / "run",
        tasks=[f"task number {at} of many" for at in range(30)],
        size=Size(blocks=6, samples=3, width=3, classes=2, tests=10),
    )
    report = Report(open_run(folder))
    data = report.files(["html-light"])["report-light.html"]
    assert len(data) < 1_000_000
    assert "12 of 30 panels are drawn" in data.decode()


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


def test_colours_of_a_drawing_have_a_dark_twin_on_the_page(full: DriftRun) -> None:
    report = Report(full, sections=["layers"])
    page = report.files(["html-light"])["report-light.html"].decode()
    rules = set(re.findall(r'\[stroke="(#[0-9a-f]{6})"\]', page))
    drawing = inline_svg(charts["layer-drift"].draw(full).figure, "layer-drift", "x")
    drawn = set(re.findall(r' (?:stroke|fill)="(#[0-9a-f]{6})"', drawing))
    assert drawn and drawn <= rules - {"#ffffff"}  # white would be a background that stays white
