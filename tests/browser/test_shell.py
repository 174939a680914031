"""The shell in a real browser: numbers, links, themes, and nothing fetched from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
from playwright.sync_api import expect

from driftlens.runs.run import open_run
from driftlens_app.pages import pages
from tests.browser.reading import drawn, settled
from tests.browser.server import serving
from tests.records.full_run import Size, write_full_run

pytestmark = pytest.mark.slow


def test_choosing_a_task_changes_the_page_and_the_link_keeps_it(
    page: Any, app_url: str, runs_folder: Path
) -> None:
    run = open_run(runs_folder / "merged")
    page.goto(f"{app_url}/layers?run={run.id}")
    settled(page)
    page.get_by_role("combobox", name="Task").fill("mnist")
    page.keyboard.press("Enter")
    page.wait_for_url("**task=mnist**")
    page.get_by_test_id("stSidebarNav").get_by_role("link", name="Overview").click()
    origins = page.get_by_role("listitem").filter(has_text="final drift:")
    expect(origins).to_have_count(1, timeout=60_000)
    settled(page)
    shared = page.url
    assert f"run={run.id}" in shared and "task=mnist" in shared
    other = page.context.browser.new_context().new_page()
    other.goto(shared)
    settled(other)
    origins = other.get_by_role("listitem").filter(has_text="final drift:")
    expect(origins).to_have_count(1, timeout=60_000)
    expect(origins).to_contain_text("mnist: ")
    expect(other.get_by_role("heading", name="merged only")).to_be_visible()
    other.context.close()


def test_a_click_on_a_row_of_the_overview_chooses_its_task(
    page: Any, app_url: str, runs_folder: Path
) -> None:
    page.goto(f"{app_url}/overview?run={open_run(runs_folder / 'merged').id}")
    table = page.get_by_test_id("stDataFrame").first.locator("canvas").first
    table.wait_for()
    settled(page)
    box = table.bounding_box()
    page.mouse.click(box["x"] + 150, box["y"] + 52)  # the first row, below the head
    page.wait_for_url("**task=*")
    settled(page)
    origins = page.get_by_role("listitem").filter(has_text="final drift:")
    expect(origins).to_have_count(1, timeout=60_000)


def test_names_that_are_streamlits_signs_are_text(page: Any, tmp_path: Path) -> None:
    """Icons, its logo and narrow spaces; a joiner without width may stand in them."""
    name, task = ":material/delete: :streamlit: a\N{NARROW NO-BREAK SPACE}b", ":material_home: :red[x]"
    run = open_run(write_full_run(tmp_path / "runs" / "odd", name=name, tasks=(task,), size=Size(blocks=1)))
    with serving(tmp_path / "runs", tmp_path / "log") as address:
        for path, called in (("overview", name), ("samples", f"Samples of {task}")):
            page.goto(f"{address}/{path}?run={run.id}")
            drawn(page, page.get_by_role("heading", level=1), timeout=60_000)
            said = page.get_by_role("heading", level=1).inner_text().replace("\N{WORD JOINER}", "")
            assert said == called.replace("\N{NARROW NO-BREAK SPACE}", " ")
        expect(page.locator("[data-testid=stMain] h1 :is(img, [role=img])")).to_have_count(0)


def test_the_choice_survives_a_walk_through_the_pages(page: Any, app_url: str, runs_folder: Path) -> None:
    run = open_run(runs_folder / "merged")
    page.goto(f"{app_url}/overview?run={run.id}&task=dtd")
    settled(page)
    for name in ("Repair", "Export", "Overview"):
        page.get_by_test_id("stSidebarNav").get_by_role("link", name=name).click()
        drawn(page, page.get_by_role("heading", level=1), timeout=60_000)
        assert f"run={run.id}" in page.url and "task=dtd" in page.url
    origins = page.get_by_role("listitem").filter(has_text="final drift:")
    expect(origins).to_have_count(1, timeout=60_000)
    expect(origins).to_contain_text("dtd: ")


def test_nothing_is_fetched_from_elsewhere_and_the_console_stays_empty(page: Any, app_url: str) -> None:
    said: list[str] = []
    asked: list[str] = []
    page.on(
        "console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("request", lambda request: asked.append(request.url))
    page.goto(app_url)
    settled(page)
    links = page.get_by_test_id("stSidebarNav").get_by_role("link")
    listed = [path for path, entry in pages().items() if entry.is_listed]
    assert links.count() == len(listed)
    for at in [*range(1, len(listed)), 0]:
        title = page.get_by_role("heading", level=1).inner_text()
        links.nth(at).click()
        expect(page.get_by_role("heading", level=1)).not_to_have_text(title)
        settled(page)
    assert said == []
    assert [url for url in asked if not url.startswith((app_url, "data:", "blob:"))] == []


@pytest.mark.parametrize("name", ["Samples", "Layers"])
def test_a_shared_link_opens_its_page_with_an_empty_console(
    page: Any, app_url: str, runs_folder: Path, name: str
) -> None:
    said: list[str] = []
    failed: list[str] = []
    sockets: list[str] = []
    page.on(
        "console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("response", lambda reply: failed.append(reply.url) if reply.status >= 400 else None)
    page.on("websocket", lambda socket: sockets.append(socket.url))
    path = f"/{name.lower().replace(' ', '_')}"
    choice = {"run": open_run(runs_folder / "merged").id, "task": "dtd"}

    def shows_what_was_shared() -> None:
        expect(page.get_by_role("heading", level=1)).to_contain_text(name, timeout=60_000)
        settled(page)
        shown = urlsplit(page.url)
        assert shown.path == path and choice.items() <= dict(parse_qsl(shown.query)).items()
        expect(page.get_by_role("combobox", name="Task")).to_have_value("dtd")
        page.locator(".js-plotly-plot").first.wait_for(timeout=60_000)

    page.goto(f"{app_url}{path}?{urlencode(choice)}")
    shows_what_was_shared()
    page.reload()
    shows_what_was_shared()
    links = page.get_by_test_id("stSidebarNav").get_by_role("link")
    paths = [urlsplit(link.evaluate("link => link.href")).path for link in links.all()]
    assert paths == ["/", *(f"/{Path(view).stem}" for view in list(pages())[1:] if pages()[view].is_listed)]
    for other in ("Runs", "Export", name):
        links.get_by_text(other, exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_contain_text(other, timeout=60_000)
        settled(page)
    shows_what_was_shared()
    assert said == [] and failed == []
    assert set(sockets) == {f"{app_url.replace('http', 'ws', 1)}/_stcore/stream"}


_SURFACES = {"light": ("#FFFFFF", "rgb(255, 255, 255)"), "dark": ("#161616", "rgb(22, 22, 22)")}


def has_surface(page: Any, scheme: str) -> None:
    """Wait until charts and page have the background of the theme."""
    page.wait_for_function(
        """([chart, app]) =>
        [...document.querySelectorAll('.js-plotly-plot')].every(plot => plot.layout.paper_bgcolor === chart)
        && getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor === app""",
        arg=_SURFACES[scheme],
        timeout=60_000,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_follow_the_theme_and_its_changes(browser: Any, app_url: str, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{app_url}/overview")
    page.locator(".js-plotly-plot").first.wait_for(timeout=60_000)
    has_surface(page, scheme)
    other = "dark" if scheme == "light" else "light"
    page.emulate_media(color_scheme=other)
    has_surface(page, other)
    page.emulate_media(color_scheme=scheme)
    has_surface(page, scheme)
    context.close()


def test_the_menus_choice_of_theme_reaches_the_charts(page: Any, app_url: str) -> None:
    page.goto(f"{app_url}/overview")
    page.locator(".js-plotly-plot").first.wait_for(timeout=60_000)
    has_surface(page, "light")
    page.get_by_test_id("stMainMenu").click()
    page.get_by_test_id("stMainMenuItem-theme-Dark").click()
    has_surface(page, "dark")


def test_a_narrow_window_needs_no_sideways_scrolling(browser: Any, app_url: str) -> None:
    context = browser.new_context(viewport={"width": 400, "height": 800})
    page = context.new_page()
    page.goto(f"{app_url}/overview")
    settled(page)
    page.locator(".js-plotly-plot").first.wait_for(timeout=60_000)
    wide = page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth")
    assert wide <= 400
    context.close()
