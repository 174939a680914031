"""The feature scatter in a real browser: points are selected, samples tell their story, layouts are computed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from driftlens.findings.projection import project, stored_projection
from driftlens.runs.run import open_run
from driftlens.spec.requests import ProjectionRequest
from driftlens_app.jobs import watch
from driftlens_app.samples import pictures
from driftlens_app.settings import Settings
from tests.browser.reading import PATIENCE, drawn, settled
from tests.browser.server import serving

pytestmark = pytest.mark.slow

_PLACES = """panel => {
    const chart = document.querySelector('.js-plotly-plot'), axes = chart._fullLayout;
    const corner = chart.getBoundingClientRect(), number = panel ? panel + 1 : '';
    const x = axes[`xaxis${number}`], y = axes[`yaxis${number}`];
    return chart._fullData.filter(trace => trace.customdata && trace.xaxis === `x${number}`).flatMap(trace =>
        trace.customdata.map((name, at) => [
            name, corner.x + x._offset + x.d2p(trace.x[at]), corner.y + y._offset + y.d2p(trace.y[at])]));
}"""
"""Of every point of a panel: its sample, and where in the window it is."""

_TEXTS = """() => [...document.querySelectorAll('.js-plotly-plot text')]
    .filter(text => text.textContent.trim() && !text.closest('.legend, .hoverlayer'))
    .map(text => text.getBoundingClientRect())
    .map(box => [box.left, box.top, box.right, box.bottom])"""


def places(page: Any, panel: int = 1) -> dict[str, tuple[float, float]]:
    page.locator(".js-plotly-plot .nsewdrag").first.wait_for(timeout=60_000)
    settled(page)
    return {name: (x, y) for name, x, y in page.evaluate(_PLACES, panel)}


def features(page: Any, address: str, run: Path, **query: str) -> None:
    shown = {"run": open_run(run).id, **query}
    page.goto(f"{address}/samples?" + "&".join(f"{name}={value}" for name, value in shown.items()))
    settled(page)


@pytest.mark.parametrize(("panel", "points"), [(0, "500"), (1, "1000")], ids=["expert", "merged"])
def test_the_first_click_on_a_point_opens_its_samples_story(
    page: Any, app_url: str, runs_folder: Path, panel: int, points: str
) -> None:
    """A chart drawn for the first time and one from the cache must be one widget, else the first click is lost."""
    features(page, app_url, runs_folder / "full", task="mnist", points=points)
    for sample in list(places(page, panel))[3:5]:
        x, y = places(page, panel)[sample]
        page.mouse.move(x, y)
        expect(page.locator(".js-plotly-plot .hoverlayer").first).to_contain_text(sample)
        page.mouse.click(x, y)
        drawn(page, page.get_by_role("heading", name=f"Sample {sample}", exact=True), timeout=30_000)
        expect(page.get_by_text("1 selected in the chart")).to_be_visible()


def test_a_box_selects_the_samples_inside_it_and_a_double_click_none(
    page: Any, app_url: str, runs_folder: Path
) -> None:
    features(page, app_url, runs_folder / "full", task="cars")
    found = places(page)
    page.locator(".modebar-btn[data-val=select]").click(force=True)
    box = page.locator(".js-plotly-plot .nsewdrag").nth(1).bounding_box()
    middle = box["x"] + box["width"] / 2
    page.mouse.move(box["x"] + 3, box["y"] + 3)
    page.mouse.down()
    page.mouse.move(middle, box["y"] + box["height"] - 3, steps=5)
    page.mouse.up()
    inside = [name for name, (x, _) in found.items() if x < middle]
    assert 1 < len(inside) < len(found)
    drawn(page, page.get_by_text(f"{len(inside)} selected in the chart"), timeout=30_000)
    page.mouse.dblclick(box["x"] + box["width"] - 4, box["y"] + box["height"] - 4)
    expect(page.get_by_text("selected in the chart")).to_have_count(0, timeout=30_000)


_MARKED = """panels => panels.map(panel => [...document.querySelectorAll(
    `.js-plotly-plot .scatterlayer [data-marked=true]`)]
    .map(point => [point.closest('.trace').__data__[0].trace, point])
    .filter(([trace]) => trace.xaxis === panel)
    .map(([trace, point]) => trace.customdata[point.__data__.i]).sort())"""
"""Of each panel, by its x axis: the samples whose points are marked."""


def marked_in(page: Any, ids: list[str]) -> None:
    """Wait until exactly these samples are marked in all panels and stand on the wall."""
    wanted = [sorted(ids)] * 3
    page.wait_for_function(
        f"wanted => JSON.stringify(({_MARKED})(['x', 'x2', 'x3'])) === JSON.stringify(wanted)",
        arg=wanted,
        timeout=30_000,
    )
    expect(page.locator("button[data-sample]")).to_have_count(len(ids), timeout=30_000)
    found = page.locator("button[data-sample]").evaluate_all(
        "cards => cards.map(card => card.dataset.sample)"
    )
    assert sorted(found) == sorted(ids)


def test_brushing_marks_the_same_samples_in_all_panels_and_the_url_brings_them_back(
    page: Any, app_url: str, runs_folder: Path
) -> None:
    features(page, app_url, runs_folder / "full", task="mnist")
    found = places(page, panel=2)
    page.locator(".modebar-btn[data-val=select]").click(force=True)
    box = page.locator(".js-plotly-plot .nsewdrag").nth(2).bounding_box()
    middle = box["x"] + box["width"] / 2
    page.mouse.move(box["x"] + 3, box["y"] + 3)
    page.mouse.down()
    page.mouse.move(middle, box["y"] + box["height"] - 3, steps=5)
    page.mouse.up()
    inside = [name for name, (x, _) in found.items() if x < middle]
    assert 1 < len(inside) < len(found)
    marked_in(page, inside)
    page.wait_for_url("**selected=*")
    page.reload()
    settled(page)
    marked_in(page, inside)
    card = page.locator("button[data-sample]").first
    sample = card.get_attribute("data-sample")
    expect(card).to_contain_text("expert said")
    expect(card).to_contain_text("calibrated says")
    card.click()
    drawn(page, page.get_by_role("heading", name=f"Sample {sample}", exact=True), timeout=30_000)
    page.get_by_role("button", name="Show all samples").click()
    expect(page.locator("[data-marked]")).to_have_count(0, timeout=30_000)
    assert "selected=" not in page.url


def test_a_click_on_the_legend_hides_a_class_in_every_panel(
    page: Any, app_url: str, runs_folder: Path
) -> None:
    features(page, app_url, runs_folder / "full", task="cars", colour="class")
    places(page)
    points = page.locator(".js-plotly-plot .scatterlayer .trace:not(:has(.js-line)) .point")
    before = points.count()
    page.locator(".js-plotly-plot .legendtoggle").first.click()
    page.wait_for_function(
        """() => { const traces = document.querySelector('.js-plotly-plot')._fullData;
        return traces.filter(trace => trace.customdata && trace.visible === 'legendonly').length === 3; }"""
    )
    labels = open_run(runs_folder / "full").samples("cars", "merged", "final")["label"]
    gone = 3 * int((labels == "class 0").sum())
    assert gone
    expect(points).to_have_count(before - gone)


def test_one_click_leads_from_the_verdict_to_the_flipped_samples_behind_it(
    page: Any, app_url: str, runs_folder: Path
) -> None:
    run = open_run(runs_folder / "full")
    page.goto(f"{app_url}/overview?run={run.id}")
    settled(page)
    page.get_by_role("button", name="flipped samples of").click()
    drawn(page, page.get_by_role("heading", name="Samples of"), timeout=60_000)
    rows = run.outputs(variant="merged")
    counts = rows[rows["flipped"].astype(bool)]["task"].value_counts()
    task = str(counts.index[0])
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Samples of {task}")
    wanted = rows[(rows["task"] == task) & rows["flipped"].astype(bool)]["sample_id"]
    cards = page.locator("button[data-sample]")
    expect(cards).to_have_count(len(wanted), timeout=30_000)
    assert set(cards.evaluate_all("cards => cards.map(card => card.dataset.sample)")) == set(wanted)
    assert f"task={task}" in page.url and "outcome=flipped" in page.url


@pytest.mark.parametrize("colour", ["flip", "class", "drift"])
def test_in_a_narrow_window_no_words_of_the_panels_overlap(
    browser: Any, app_url: str, runs_folder: Path, colour: str
) -> None:
    context = browser.new_context(viewport={"width": 420, "height": 900})
    page = context.new_page()
    features(page, app_url, runs_folder / "full", colour=colour)
    places(page)
    page.wait_for_function("document.querySelector('.js-plotly-plot .main-svg').clientWidth <= 400")
    texts = page.evaluate(_TEXTS)
    assert len(texts) > 8
    for at, (left, top, right, bottom) in enumerate(texts):
        overlapped = [
            other
            for other in texts[at + 1 :]
            if left < other[2] - 1 and other[0] < right - 1 and top < other[3] - 2 and other[1] < bottom - 2
        ]
        assert not overlapped, (texts[at], overlapped)
    context.close()


@pytest.fixture
def writable(browser: Any, runs_folder: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a dashboard on a copy of a run, and the copy."""
    run = tmp_path / "runs" / "full"
    shutil.copytree(runs_folder / "full", run)
    with serving(run.parent, tmp_path / "log") as address:
        yield address, run


def looks_into(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the app's functions, called here, look where the server of a test does."""
    for name, value in Settings(folder.resolve(), read_only=False).environment().items():
        patch.setenv(name, value)


def test_a_layout_is_computed_by_a_job_and_then_drawn(
    page: Any, writable: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, run = writable
    looks_into(run.parent, monkeypatch)
    features(page, address, run, task="cars", method="t-SNE", seed="3")
    page.get_by_role("button", name="Compute this layout").click()
    drawn = places_of_layout(page)
    stored = stored_projection(run, "cars", ProjectionRequest(method="tsne", seed=3))
    assert stored is not None
    rows = stored.frame[stored.frame["variant"] == "merged"]
    assert drawn == dict(zip(rows["sample_id"], zip(rows["x"], rows["y"], strict=True), strict=True))
    assert (
        project(run, "cars", ProjectionRequest(method="tsne", seed=3), store_it=False).digest == stored.digest
    )
    view = watch(run, "project")
    assert view is not None and view.state == "done"
    assert view.progress is not None and (view.progress.done, view.progress.total) == (3, 3)


def places_of_layout(page: Any) -> dict[str, tuple[float, float]]:
    """Coordinates of the merged model's points, once they are drawn."""
    page.locator(".js-plotly-plot .nsewdrag").first.wait_for(timeout=PATIENCE)
    settled(page)
    points = page.evaluate(
        "() => document.querySelector('.js-plotly-plot')._fullData"
        ".filter(trace => trace.customdata && trace.xaxis === 'x2')"
        ".flatMap(trace => trace.customdata.map((name, at) => [name, trace.x[at], trace.y[at]]))"
    )
    return {name: (x, y) for name, x, y in points}


def come_to_rest_on(page: Any, x: float, y: float, shown: Any) -> None:
    """Move the pointer to a place, and within it again until what shall show does.

    A picture that is still on its way to the browser when the pointer comes to rest shows with its next motion.
    """
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not shown.is_visible():
        page.mouse.move(x + 40, y + 40)
        page.mouse.move(x, y)
        page.wait_for_timeout(300)


def test_the_picture_of_a_sample_shows_while_the_pointer_is_over_its_point(
    page: Any, app_url: str, runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_into(runs_folder, monkeypatch)
    run = open_run(runs_folder / "full")
    features(page, app_url, runs_folder / "full", task="mnist")
    found = places(page)
    ids = list(found)[2:4]
    for sample, address in zip(ids, pictures(run, "mnist", ids), strict=True):
        assert address is not None
        picture = page.get_by_role("img", name=f"sample {sample}", exact=True)
        come_to_rest_on(page, *found[sample], picture)
        expect(picture).to_be_visible()
        assert picture.get_attribute("src") == address
    page.mouse.move(2, 2)
    expect(picture).to_be_hidden()


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
