"""The explorer inside the dashboard: what is chosen stands in the address, and no click of it asks the server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from driftlens.results.measures import OUTCOMES, sample_outcomes
from driftlens.runs.run import DriftRun, open_run
from tests.browser.reading import choose, drawn, eventually, settled
from tests.runs.full_run import Size, write_full_run

pytestmark = pytest.mark.slow


@pytest.fixture
def full(runs_folder: Path) -> DriftRun:
    return open_run(runs_folder / "full")


@pytest.fixture
def opened(page: Any, app_url: str, full: DriftRun) -> Callable[..., Any]:
    """Opens a page of the dashboard on the run, and gives the explorer's frame in it once that is drawn."""
    page.emulate_media(reduced_motion="reduce")
    page.said = []
    page.on(
        "console",
        lambda message: page.said.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: page.said.append(str(error)))

    def open_at(name: str, state: str = "", address: str = app_url, run: DriftRun = full, **query: str) -> Any:
        said = "&".join(f"{key}={value}" for key, value in {"run": run.id, **query}.items())
        page.goto(f"{address}/{name}?{said}{f'#{state}' if state else ''}")
        return frame_of(page)

    return open_at


def frame_of(page: Any) -> Any:
    """The explorer's frame, once it has drawn."""
    settled(page)
    page.locator("iframe").scroll_into_view_if_needed()  # browsers let frames rest that nobody sees
    frame = page.locator("iframe").element_handle().content_frame()
    eventually(frame, "window.explorer && explorer.frames > 0")
    eventually(frame, "document.documentElement.scrollHeight === innerHeight")  # nothing moves any more
    return frame


def selected(frame: Any) -> list[str]:
    found: list[str] = frame.evaluate("explorer.selected()")
    return sorted(found)


def test_a_link_brings_back_what_was_chosen_and_choosing_asks_no_server(
    page: Any, app_url: str, full: DriftRun, opened: Callable[..., Any]
) -> None:
    sent: list[Any] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda data: sent.append(data)))
    frame = opened("samples", task="cars")
    assert frame.evaluate("[explorer.state.task, explorer.selected().length]") == [
        full.tasks.index("cars"),
        len(full.sample_ids("cars")),
    ]
    settled(page)
    before = len(sent)
    became = sample_outcomes(full, "cars", "merged", "calibrated:featcal")["outcome"]
    name = str(became.value_counts().index[0])
    frame.locator(f"[data-outcome='{name}']").click()
    frame.locator("#colour").select_option("class")
    frame.locator("#layer").fill("1")
    frame.locator("canvas").focus()
    for key in (
        "b",
        *["ArrowLeft"] * 2,
        "Enter",
        *["Shift+ArrowRight"] * 9,
        *["Shift+ArrowDown"] * 9,
        "Enter",
    ):
        page.keyboard.press(key)
    inside = selected(frame)
    wanted = {*became.index[became == name]}
    assert inside and {*inside} < wanted
    eventually(
        page,
        "['selected=', 'only.outcome=', 'colour=class', 'layer=1'].every(at => location.hash.includes(at))",
    )
    assert len(sent) == before
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    again = frame_of(page)
    assert selected(again) == inside and page.url == address
    assert again.evaluate("[explorer.state.colour, explorer.state.layer]") == ["class", 1]
    page.get_by_role("link", name="Layers", exact=True).click()
    drawn(page, page.get_by_role("heading", name="Layers", exact=True), timeout=60_000)
    assert "#" not in page.url
    page.get_by_role("link", name="Samples", exact=True).click()
    page.get_by_role("heading", name="Samples", exact=True).wait_for()
    assert selected(frame_of(page)) == inside and page.said == []


def test_a_task_that_is_chosen_in_the_explorer_is_that_of_other_pages_and_back(
    page: Any, full: DriftRun, opened: Callable[..., Any]
) -> None:
    """And one of another page's is the explorer's."""
    frame = opened("samples", task=full.tasks[0])
    for at, back in ((1, 2), (2, 0)):
        frame.locator("#task").select_option(str(at))
        page.wait_for_url(f"**task={full.tasks[at]}#*")  # the server's; behind the # stands the frame's
        settled(page)
        page.get_by_role("link", name="Layers", exact=True).click()
        expect(page.get_by_role("combobox", name="Task")).to_have_value(full.tasks[at])
        settled(page)
        choose(page, "Task", full.tasks[back])
        page.wait_for_url(f"**task={full.tasks[back]}**")
        page.get_by_role("link", name="Samples", exact=True).click()
        page.get_by_role("heading", name="Samples", exact=True).wait_for()
        frame = frame_of(page)
        assert frame.evaluate("explorer.state.task") == back
    assert page.said == []


def test_a_task_is_told_at_once_as_the_next_click_may_lead_to_another_page(
    page: Any, full: DriftRun, opened: Callable[..., Any]
) -> None:
    frame = opened("samples", task=full.tasks[0])
    frame.evaluate("window.setTimeout = () => 0")  # all else that is chosen is told a moment later
    frame.locator("#task").select_option(label=full.tasks[1])
    expect(page).to_have_url(re.compile(f"task={full.tasks[1]}#"))


def test_one_click_leads_from_the_verdict_to_the_flips_behind_it_and_one_press_back(
    page: Any, full: DriftRun, app_url: str
) -> None:
    page.goto(f"{app_url}/overview?run={full.id}")
    settled(page)
    before, entries = page.url, page.evaluate("history.length")
    page.get_by_role("button", name="flipped samples of").press("Enter")
    page.get_by_role("heading", name="Samples", exact=True).wait_for()
    frame = frame_of(page)
    rows = full.outputs(variant="merged")
    counts = rows[rows["flipped"].astype(bool)]["task"].value_counts()
    task = str(counts.index[0])
    flips = rows[(rows["task"] == task) & rows["flipped"].astype(bool)]
    assert selected(frame) == sorted(flips["sample_id"])
    first = flips.sort_values("margin", ascending=False)["sample_id"].iloc[0]
    assert frame.locator(".card").first.get_attribute("data-sample") == first
    assert frame.locator("[data-outcome=flipped]").inner_text() == f"flipped {len(flips)}"
    assert page.evaluate("history.length") == entries + 1
    page.go_back()
    page.get_by_role("heading", name="full", exact=True).wait_for()
    settled(page)
    assert page.url == before


def test_the_repair_stands_beside_what_the_merge_broke(page: Any, full: DriftRun, opened: Callable[..., Any]) -> None:
    frame = opened("repair")
    task = full.tasks[frame.evaluate("explorer.state.task")]
    became = sample_outcomes(full, task, "merged", "calibrated:featcal")["outcome"]
    groups = frame.locator(".groups section")
    names = {meaning.rstrip("."): name for name, meaning in OUTCOMES.items()}
    for group in groups.all():
        heading, _, rest = group.locator("h3").inner_text().rpartition(" (")
        name = names[heading]
        shown = group.locator(".card").evaluate_all("cards => cards.map(card => card.dataset.sample)")
        assert int(rest.partition(")")[0]) == (became == name).sum() and shown
        assert {*shown} <= {*became.index[became == name]}
    assert groups.count() and "#" not in page.url and page.said == []


def test_a_page_that_was_lost_on_its_way_is_sent_again(page: Any, opened: Callable[..., Any]) -> None:
    opened("samples")
    page.evaluate("delete window.explorerPage")
    page.get_by_role("link", name="Repair", exact=True).click()
    page.get_by_role("heading", name="Repair", exact=True).wait_for()
    page.wait_for_function("window.explorerPage")
    assert frame_of(page).locator(".groups section").count() and page.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_frame_has_the_dashboards_theme_whatever_the_systems_is(
    page: Any, opened: Callable[..., Any], scheme: str
) -> None:
    other = {"light": "dark", "dark": "light"}
    page.emulate_media(color_scheme=other[scheme], reduced_motion="reduce")
    frame = opened("samples")
    ink = "getComputedStyle(document.body).color"
    before = frame.evaluate(ink)
    page.get_by_test_id("stMainMenu").get_by_role("button").click()
    page.get_by_test_id(f"stMainMenuItem-theme-{scheme.capitalize()}").click()
    eventually(frame, f"{ink} !== {json.dumps(before)}")
    assert frame.evaluate("document.documentElement.dataset.theme") == scheme


def test_hostile_names_run_nothing_in_the_dashboard(
    page: Any, workshop: tuple[str, Path], opened: Callable[..., Any]
) -> None:
    evil = (
        "</script><script>parent.document.title = 'ran'</script>",
        "<img src=x onerror=\"top.name='ran'\">",
    )
    address, root = workshop
    run = open_run(
        write_full_run(
            root / "evil",
            name=evil[0],
            tasks=evil,
            class_names=evil,
            size=Size(blocks=1, samples=8, width=4, tests=8),
        )
    )
    frame = opened("samples", address=address, run=run)
    frame.locator(".card").first.click()
    expect(frame.locator("#detail h2")).to_contain_text("Sample")
    assert page.title() != "ran" and page.evaluate("name") != "ran" and frame.locator("img").count() == 0
    # Nothing in the frame can reach the page around it.
    with pytest.raises(Exception, match="cross-origin"):
        frame.evaluate("parent.document.title")
    assert [text for text in page.said if "Blocked" not in text] == []


def test_the_keyboard_alone_gets_from_the_page_into_the_points(page: Any, opened: Callable[..., Any]) -> None:
    frame = opened("samples")
    page.get_by_role("radio", name="Explore").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        if frame.evaluate("document.activeElement.tagName") == "CANVAS":
            break
    page.keyboard.press("ArrowRight")
    expect(frame.locator("#live")).not_to_be_empty()
    page.keyboard.press("Enter")
    expect(frame.locator("#detail h2")).to_contain_text("Sample")
    assert page.said == []


@pytest.mark.parametrize("width", [420, 1440])
def test_the_frame_is_as_wide_as_the_page_and_as_high_as_what_it_shows(
    page: Any, opened: Callable[..., Any], width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    frame = opened("samples")
    eventually(frame, "document.documentElement.scrollHeight === innerHeight")
    assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth") and page.said == []
    if width == 1440:  # below Streamlit's own head, map and drawer fill the window
        page.locator("iframe").evaluate("frame => frame.scrollIntoView({block: 'end'})")
        box, head = page.locator("iframe").bounding_box(), page.get_by_test_id("stHeader").bounding_box()
        assert head["height"] <= 900 - box["height"] <= head["height"] + 30
        assert frame.evaluate("document.querySelector('canvas').offsetHeight") >= 0.55 * 900


def test_a_frame_out_of_sight_has_the_height_of_what_it_shows(page: Any, app_url: str, full: DriftRun) -> None:
    """Or it would grow once it is scrolled to, and a press on what lies below would hit something else."""
    page.goto(f"{app_url}/repair?run={full.id}")
    settled(page)
    box = page.locator("iframe").bounding_box()
    assert box is not None and box["y"] > page.viewport_size["height"]
    frame = page.locator("iframe").element_handle().content_frame()
    eventually(frame, "window.explorer")
    held = frame.evaluate("document.body.offsetHeight")
    assert held != 700, "which it is given before anything is known of it"
    expect(page.locator("iframe")).to_have_js_property("clientHeight", held)
    assert page.evaluate("scrollY") == 0


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


@pytest.mark.parametrize("title", ["Overview", "Layers"])
def test_no_chart_of_a_page_is_drawn_twice(page: Any, app_url: str, runs_folder: Path, title: str) -> None:
    page.goto(f"{app_url}/export?run={open_run(runs_folder / 'full').id}")
    settled(page)
    page.evaluate(_WATCH)
    page.get_by_test_id("stSidebarNav").get_by_role("link", name=title, exact=True).click()
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    settled(page)
    page.wait_for_function(_COMPARED)
    assert [chart["again"] for chart in page.evaluate("window.drawn")] == [0] * page.locator(".js-plotly-plot").count()
