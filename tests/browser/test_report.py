"""Reports in a real browser: charts are drawn from the tables' numbers, quietly, without any request, and print."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from driftlens.utils.variants import is_control
from driftlens_reports.build import Report
from driftlens_reports.charts.theme import variant_style
from tests.browser.reading import Opened, eventually
from tests.runs.full_run import Size, write_full_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("report")
    written = write_full_run(
        folder / "run", name="<b>full</b>", size=Size(blocks=2, samples=6, width=4, classes=2, tests=40)
    )
    made = Report(written)
    made.save(folder, ["html", "html-light"])
    return made


@pytest.fixture(params=["light", "dark"])
def context(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    opened = browser.new_context(viewport={"width": 1100, "height": 900}, color_scheme=request.param)
    yield opened
    opened.close()


in_light = pytest.mark.parametrize("context", ["light"], indirect=True)
"""For what colours have no part in."""


def drawn(report: Report, context: Any) -> Opened:
    opened = Opened(context.new_page(), report.run.path.parent / "report.html")
    opened.page.locator("body[data-drawn=all]").wait_for(timeout=60_000)
    assert opened.page.locator(".plot:not(:has(.main-svg))").count() > 0, "closed sections are drawn when opened"
    opened.page.evaluate("for (const part of document.querySelectorAll('details.part')) part.open = true")
    eventually(opened.page, "[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.main-svg'))")
    return opened


def test_the_interactive_report_draws_every_chart_and_asks_for_nothing(report: Report, context: Any) -> None:
    opened = drawn(report, context)
    assert opened.said == []
    assert opened.asked == [(report.run.path.parent / "report.html").as_uri()]
    figures = [figure for figure in report.content.figures if not figure.missing]
    assert opened.page.locator(".plot .main-svg").count() >= len(figures) == opened.page.locator(".plot").count()


@in_light
def test_what_is_drawn_are_the_numbers_of_the_table(report: Report, context: Any) -> None:
    page = drawn(report, context).page
    lines = page.evaluate(
        """() => document.querySelector('[data-figure=plot-layer-drift]').data
             .filter(trace => trace.mode?.includes('lines') && !trace.fill)
             .map(trace => Array.from(trace.y))"""
    )
    wanted = [
        report.run.layers(task, variant)["drift_l2_mean"].tolist()[:-1]  # the head has its own axis
        for task in report.run.tasks
        for variant in report.run.variants
        if variant != "base" and not is_control(variant)
    ]
    assert all(any(line == pytest.approx(values) for line in lines) for values in wanted)


def test_the_pages_style_leaves_the_charts_colours_alone(report: Report, context: Any) -> None:
    page = drawn(report, context).page
    fills = page.evaluate(
        """() => [...document.querySelectorAll('[data-figure=plot-accuracy] .bars .point path')]
             .map(part => getComputedStyle(part).fill)"""
    )
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    colour = variant_style(report.run.roles, "merged", dark=is_dark).colour.removeprefix("#")
    merged = f"rgb{tuple(bytes.fromhex(colour))}"
    assert merged in fills and "rgb(0, 0, 0)" not in fills


@in_light
def test_charts_scroll_in_a_narrow_window_and_fit_a_sheet_of_paper(report: Report, context: Any) -> None:
    """Narrower than 640 pixels, panels would run into each other; the page itself never grows wider than the window."""
    narrow = "document.querySelector('.plot .main-svg').clientWidth === 640"
    page = drawn(report, context).page
    page.set_viewport_size({"width": 420, "height": 900})
    eventually(page, narrow)
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every(frame => frame.clientWidth <= 420)")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    widths = page.evaluate("[...document.querySelectorAll('.plot .main-svg')].map(drawing => drawing.clientWidth)")
    assert set(widths) == {1030}  # before the style sheet's zoom
    assert page.evaluate("[...document.querySelectorAll('.plot .main-svg')].every(plot => plot.clientHeight <= 700)")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    eventually(page, narrow)


@in_light
def test_a_printed_heading_stays_with_what_follows_and_a_tall_drawing_fits_a_page(
    report: Report, context: Any
) -> None:
    page = Opened(context.new_page(), report.run.path.parent / "report-light.html").page
    page.emulate_media(media="print")
    assert page.evaluate(
        """[...document.querySelectorAll('h2, h3, caption, .part > summary')]
             .every(part => getComputedStyle(part).breakAfter === 'avoid')"""
    )
    drawing = page.locator(".part[open] .drawing").first
    drawing.evaluate("part => { part.style.aspectRatio = '100 / 900'; }")  # of many tasks and models
    assert 0 < drawing.bounding_box()["height"] < 12 / 2.54 * 96


@in_light
@pytest.mark.parametrize("tasks", [2, 16])
def test_printed_pages_have_margins_and_none_is_half_empty(context: Any, tmp_path: Path, tasks: int) -> None:
    render = shutil.which("pdftoppm")
    if render is None:
        pytest.skip("needs pdftoppm")
    path = write_full_run(tmp_path / "run", tasks=[f"task{number}" for number in range(tasks)])
    (tmp_path / "report.html").write_bytes(Report(path).files(["html"])["report.html"])
    page = Opened(context.new_page(), tmp_path / "report.html").page
    page.locator("body[data-drawn=all]").wait_for(timeout=60_000)
    page.pdf(path=tmp_path / "report.pdf", format="A4", prefer_css_page_size=True)
    subprocess.run([render, "-r", "25.4", "-gray", tmp_path / "report.pdf", tmp_path / "page"], check=True)
    marks = [np.asarray(Image.open(file)) < 200 for file in sorted(tmp_path.glob("page-*.pgm"))]  # a pixel is 1 mm
    assert len(marks) > 3
    for number, mark in enumerate(marks[:-1], 1):
        rows, columns = np.flatnonzero(mark.any(axis=1)), np.flatnonzero(mark.any(axis=0))
        assert rows[0] >= 14 and rows[-1] <= 297 - 14 and columns[0] >= 13 and columns[-1] <= 210 - 13, number
        assert rows[-1] >= 0.55 * 297, f"page {number} ends at {rows[-1]} of 297 mm"


@in_light
def test_the_scatter_is_shown_without_a_click(report: Report, context: Any) -> None:
    page = Opened(context.new_page(), report.run.path.parent / "report.html").page
    page.locator("body[data-drawn=all]").wait_for(timeout=60_000)
    assert page.locator("#chart-scatter .plot .main-svg").first.is_visible()


@pytest.mark.parametrize("name", ["report.html", "report-light.html"])
def test_a_page_is_quiet_follows_the_colour_scheme_and_is_not_long(name: str, report: Report, context: Any) -> None:
    path = report.run.path.parent / name
    opened = Opened(context.new_page(), path)
    assert opened.said == [] and opened.asked == [path.as_uri()]
    background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = opened.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert background == ("rgb(22, 22, 22)" if is_dark else "rgb(255, 255, 255)")
    surfaces = opened.page.evaluate(
        "[...document.querySelectorAll('.plot .main-svg')].map(plot => plot.style.background)"
    )
    assert {text for text in surfaces if text} <= {background}
    if name == "report.html":
        assert background in surfaces
        opened.page.emulate_media(color_scheme="light" if is_dark else "dark")
        opened.page.wait_for_function(
            "before => document.querySelector('.plot .main-svg').style.background !== before", arg=background
        )
        opened.page.emulate_media(color_scheme="dark" if is_dark else "light")
    assert opened.page.locator("h1").inner_text() == "<b>full</b>"
    for width in (420, 1440):
        opened.page.set_viewport_size({"width": width, "height": 900})
        assert opened.page.evaluate("document.documentElement.scrollHeight") <= 8000
    assert opened.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
