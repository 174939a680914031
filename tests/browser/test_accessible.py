"""Every page held against the rules of axe, and what its shell and address say of it, in a real browser."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from driftlens.runs.run import open_run
from driftlens_app.pages import pages
from tests.browser.reading import drawn, settled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe, out of the package that ships it: nothing is fetched."""
    found = find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe-playwright-python is not installed")
    return Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_any_page(
    browser: Any, app_url: str, runs_folder: Path, axe: str, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 1000}, color_scheme=scheme)
    serious, page = [], context.new_page()
    for name in [Path(path).stem for path in pages()]:
        page.goto(f"{app_url}/{name}?run={open_run(runs_folder / 'full').id}")
        drawn(page, page.get_by_role("heading", level=1), timeout=60_000)
        page.evaluate(axe)
        found = page.evaluate("axe.run()")
        assert found["passes"], "axe looked at nothing"
        serious += [
            (name, rule["id"], rule["nodes"][0]["html"][:200])
            for rule in found["violations"]
            if rule["impact"] in ("serious", "critical")
        ]
    context.close()
    assert serious == []


def test_the_shell_says_where_one_is(page: Any, app_url: str, runs_folder: Path) -> None:
    run = open_run(runs_folder / "full")
    for path, entry in pages().items():
        if entry.needs_run:
            page.goto(f"{app_url}/{Path(path).stem}?run={run.id}")
            drawn(page, page.get_by_role("heading", level=1), timeout=60_000)
            assert page.title() == f"full run - {entry.title} - DriftLens"
    page.goto(f"{app_url}/overview?run={run.id}")
    settled(page)
    wordmark = page.get_by_test_id("stSidebarLogo")
    expect(wordmark).to_be_visible()
    assert wordmark.evaluate("logo => logo.naturalWidth") > 0
    expect(page.get_by_role("button", name="Self-checks")).to_be_visible()
    page.goto(app_url)
    settled(page)
    page.get_by_text("New run", exact=True).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("New run", timeout=60_000)


def test_two_tabs_keep_their_own_choices(page: Any, app_url: str, runs_folder: Path) -> None:
    ids = [open_run(runs_folder / name).id for name in ("full", "merged")]
    tabs = (page, page.context.new_page())
    for tab, run, task in zip(tabs, ids, ("mnist", "dtd"), strict=True):
        tab.goto(f"{app_url}/layers?run={run}&task={task}")
        drawn(tab, tab.get_by_role("heading", level=1), timeout=60_000)
    for tab, run, task in zip(tabs, ids, ("mnist", "dtd"), strict=True):
        tab.get_by_test_id("stSidebarNav").get_by_role("link", name="Overview").click()
        tab.wait_for_url("**/overview?**")
        settled(tab)
        assert f"run={run}" in tab.url and f"task={task}" in tab.url


@pytest.mark.parametrize("name", [Path(path).stem for path in pages()])
def test_no_page_of_a_telephones_width_scrolls_sideways(
    browser: Any, app_url: str, runs_folder: Path, name: str
) -> None:
    context = browser.new_context(viewport={"width": 420, "height": 900})
    page = context.new_page()
    page.goto(f"{app_url}/{name}?run={open_run(runs_folder / 'full').id}")
    drawn(page, page.get_by_role("heading", level=1), timeout=60_000)
    for part in ("document.querySelector('[data-testid=stMain]')", "document.documentElement"):
        assert page.evaluate(f"{part}.scrollWidth") <= 420
    if name == "layers":  # panels stand below one another as soon as the browser has said how wide it is
        page.wait_for_function(
            """() => { const plot = document.querySelector('.js-plotly-plot');
                return plot && Object.keys(plot.layout).filter((key) => key.startsWith('xaxis')).length > 1
                    && plot._fullLayout._subplots.xaxis.every((axis) => plot._fullLayout[
                        axis.replace('x', 'xaxis')].domain[1] === 1) }""",
            timeout=60_000,
        )
    context.close()
