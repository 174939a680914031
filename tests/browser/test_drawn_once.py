"""Every chart is drawn once, though Streamlit gives plotly each figure twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from driftlens.runs.run import open_run
from tests.browser.reading import settled

pytestmark = pytest.mark.slow

_WATCH = """() => {
    window.drawn = [];
    const known = new WeakSet();
    new MutationObserver(() => document.querySelectorAll('.js-plotly-plot').forEach(chart => {
        if (!chart.on || known.has(chart)) return;
        known.add(chart);
        const entry = {again: 0, compared: 0};
        window.drawn.push(entry);
        chart.on('plotly_beforeplot', () => entry.again++);
        chart.on('plotly_react', () => entry.compared++);
    })).observe(document.body, {subtree: true, childList: true});
}"""
"""From here on, how often each new chart is drawn again, and how often plotly is given its figure again."""

_COMPARED = """() => window.drawn.length && window.drawn.every(chart => chart.compared)
    && window.drawn.length === document.querySelectorAll('.js-plotly-plot').length"""


@pytest.mark.parametrize("title", ["Overview", "Layers", "Samples", "Theory"])
def test_no_chart_of_a_page_is_drawn_twice(page: Any, app_url: str, runs_folder: Path, title: str) -> None:
    page.goto(f"{app_url}/export?run={open_run(runs_folder / 'full').id}")
    settled(page)
    page.evaluate(_WATCH)
    page.get_by_test_id("stSidebarNav").get_by_role("link", name=title, exact=True).click()
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    settled(page)
    page.wait_for_function(_COMPARED)
    assert [chart["again"] for chart in page.evaluate("window.drawn")] == [0] * page.locator(
        ".js-plotly-plot"
    ).count()
