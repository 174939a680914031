"""The list of runs in a real browser: names open, ticked rows are compared."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from driftlens.runs.manifest import NOTES
from driftlens.runs.notes import RunNotes, read_notes
from driftlens.runs.run import open_run
from driftlens.runs.verify import verify_files
from driftlens_app.show import pages
from driftlens_reports.build import Report
from driftlens_reports.explorer import Explorer
from tests.browser.reading import drawn, eventually, settled, visit
from tests.runs.full_run import write_full_run

pytestmark = pytest.mark.slow
SEEN = {
    (420, "overview"): "merged",
    (420, "runs"): "merge",
    (1440, "overview"): "relative drift",
    (1440, "runs"): "experts",
}
"""By width and page, a column that long names would push out of sight."""
HEAD, ROW = 35, 35
"""Pixels of a table's head and of each of its rows."""


def click(page: Any, row: int, x: int) -> None:
    """A click into a row of the table, which is drawn and holds no elements of its own."""
    page.get_by_test_id("stDataFrame").wait_for()
    settled(page)
    page.get_by_test_id("stDataFrame").scroll_into_view_if_needed()
    box = page.get_by_test_id("stDataFrame").locator("canvas").first.bounding_box()
    page.mouse.click(box["x"] + x, box["y"] + HEAD + ROW * (row + 0.5))
    settled(page)


def test_runs_are_opened_and_compared(page: Any, runs_folder: Path, workshop: tuple[str, Path]) -> None:
    url, root = workshop
    shutil.copytree(runs_folder, root, dirs_exist_ok=True)
    page.goto(f"{url}/runs")
    click(page, 0, 15)
    click(page, 1, 15)
    entries = page.evaluate("history.length")
    # Curves of both lie over each other, with a table of their verdicts.
    expect(page.get_by_role("heading", name="Drift by layer")).to_be_visible()
    expect(page.get_by_test_id("stDataFrame")).to_have_count(2)
    page.locator(".js-plotly-plot .main-svg").first.wait_for(timeout=60_000)
    names = page.evaluate("document.querySelector('.js-plotly-plot').data.map(line => line.name)")
    assert {"full, merged", "full, repaired", "merged, merged"} <= {*names}
    page.get_by_role("button", name="Compare layer by layer").click()
    page.wait_for_url("**/repair?**run=**")
    settled(page)
    asked = parse_qs(urlsplit(page.url).query)
    assert (asked["run"], asked["with"]) == (["merged"], ["full"])
    assert page.evaluate("history.length") == entries + 1

    page.goto(f"{url}/runs")
    settled(page)
    click(page, 0, 70)
    page.wait_for_url("**/overview?**")
    assert parse_qs(urlsplit(page.url).query)["run"] == ["full"]
    expect(page.get_by_role("heading", level=1)).to_have_text("full")
    expect(page.get_by_role("combobox", name="Run")).to_have_value("full")


def test_tags_and_a_note_are_kept_with_the_run_and_found(
    page: Any, runs_folder: Path, workshop: tuple[str, Path]
) -> None:
    url, root = workshop
    shutil.copytree(runs_folder / "full", root / "full")
    shutil.copytree(runs_folder / "merged", root / "merged")
    page.goto(f"{url}/runs")
    click(page, 0, 15)
    page.get_by_role("textbox", name="Tags").fill("paper, best,, paper")
    page.get_by_role("textbox", name="Note").fill("For figure 1.")
    page.get_by_role("button", name="Save").click()
    cells = page.get_by_test_id("stDataFrame").locator("canvas tbody td")
    expect(cells.filter(has_text="paper, best")).to_be_attached(timeout=60_000)
    (noted,) = [folder for folder in root.iterdir() if (folder / NOTES).is_file()]
    assert read_notes(noted) == RunNotes(("paper", "best"), "For figure 1.")
    assert verify_files(noted).ok and NOTES not in verify_files(noted).unlisted
    page.get_by_role("textbox", name="Filter").fill("best")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("stDataFrame").locator("canvas tbody tr")).to_have_count(1, timeout=60_000)
    # Links with the run's id, which were handed out before, lead to the address with its name.
    page.goto(f"{url}/overview?run={open_run(noted).id}")
    drawn(page, page.get_by_role("heading", level=1, name=noted.name), timeout=60_000)
    page.wait_for_url(f"**/overview?run={noted.name}")


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe, out of the package that ships it: nothing is fetched."""
    found = find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe-playwright-python is not installed")
    return Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        pytest.param("light", 420, marks=pytest.mark.every),
        pytest.param("light", 1440, marks=pytest.mark.every),
        pytest.param("dark", 420, marks=pytest.mark.every),
        ("dark", 1440),
    ],
)
def test_axe_finds_nothing_on_any_page(
    browser: Any, app_url: str, runs_folder: Path, tmp_path: Path, axe: str, scheme: str, width: int
) -> None:
    """In the dark, only colours are others."""
    asked = {"runOnly": ["color-contrast"]} if scheme == "dark" else {}
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    broken, page, run = [], context.new_page(), open_run(runs_folder / "full")
    view, report = Explorer(run).save(tmp_path / "view.html"), tmp_path / "report.html"
    Report(run).save(tmp_path, ["html"])
    addresses = {Path(path).stem: f"{app_url}/{Path(path).stem}?run={run.id}" for path in pages()}
    titles = {Path(path).stem: entry.title for path, entry in pages().items() if entry.needs_run}
    for name, address in {**addresses, "view": view.as_uri(), "report": report.as_uri()}.items():
        if name in titles:
            visit(page, titles[name])
        else:
            page.goto(address)
        if name == "view":
            eventually(page, "explorer.frames > 0")
        elif name == "report":
            page.locator("body[data-drawn=all]").wait_for(timeout=60_000)
        else:
            drawn(page, page.get_by_role("heading", level=1), timeout=60_000)
            eventually(page, "!document.querySelector('[data-testid=stFileUploaderDropzone][role]')")
        page.evaluate(axe)
        found = page.evaluate("asked => axe.run(document, asked)", asked)
        assert found["passes"], "axe looked at nothing"
        broken += [(name, rule["id"], rule["nodes"][0]["html"][:200]) for rule in found["violations"]]
    context.close()
    assert broken == []


def test_long_names_push_no_number_out(browser: Any, workshop: tuple[str, Path]) -> None:
    """Of 60 letters and more: of the run, tasks and classes."""
    tail = "_with_a_name_that_somebody_thought_would_tell_everything_about_it"
    url, root = workshop
    tasks, classes = ([f"{name}{tail}" for name in names] for names in (("a", "b"), ("cat", "dog", "fox")))
    run = open_run(write_full_run(root / f"run{tail}", name=f"spec{tail}", tasks=tasks, class_names=classes))
    page = browser.new_page()
    for address in ("runs", "overview", "layers", "layers?layers=Sources", "repair"):
        page.goto(f"{url}/{address}{'&' if '?' in address else '?'}run={run.id}")
        drawn(page, page.get_by_role("heading", level=1), timeout=60_000)
        for width in (1440, 420):
            page.set_viewport_size({"width": width, "height": 1000})
            settled(page)
            main = page.get_by_test_id("stMain")
            assert main.evaluate("it => it.scrollWidth - it.clientWidth") <= 0, (width, address)
            if seen := SEEN.get((width, address)):  # columns out of sight have no head
                table = page.get_by_test_id("stDataFrame").first
                table.scroll_into_view_if_needed()
                expect(table.locator("canvas th").filter(has_text=seen).first).to_be_attached()
    page.close()


def test_the_shell_says_where_one_is(page: Any, app_url: str, runs_folder: Path) -> None:
    run = open_run(runs_folder / "full")
    page.goto(f"{app_url}/?run={run.id}")
    settled(page)
    for entry in pages().values():
        if entry.needs_run:
            visit(page, entry.title)
            assert page.title() == f"full - {entry.title} - DriftLens"
    visit(page, "Overview")
    wordmark = page.get_by_test_id("stSidebarLogo")
    expect(wordmark).to_be_visible()
    assert wordmark.evaluate("logo => logo.naturalWidth") > 0
    expect(page.get_by_role("button", name="Self-checks")).to_be_visible()
    visit(page, "Runs")
    page.get_by_text("New run", exact=True).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("New run", timeout=60_000)


def test_two_tabs_keep_their_own_choices(page: Any, app_url: str, runs_folder: Path) -> None:
    tabs, runs = (page, page.context.new_page()), ("full", "merged")
    for tab, run, task in zip(tabs, runs, ("mnist", "dtd"), strict=True):
        tab.goto(f"{app_url}/layers?run={run}&task={task}")
        drawn(tab, tab.get_by_role("heading", level=1), timeout=60_000)
    for tab, run, task in zip(tabs, runs, ("mnist", "dtd"), strict=True):
        visit(tab, "Overview")
        assert f"run={run}" in tab.url and f"task={task}" in tab.url


def test_no_page_of_a_telephones_width_scrolls_sideways(browser: Any, app_url: str, runs_folder: Path) -> None:
    context = browser.new_context(viewport={"width": 420, "height": 900})
    page = context.new_page()
    page.goto(f"{app_url}/?run={open_run(runs_folder / 'full').id}")
    settled(page)
    for path, entry in pages().items():
        if not entry.is_listed:
            page.goto(f"{app_url}/{Path(path).stem}")
            drawn(page, page.get_by_role("heading", level=1), timeout=60_000)
        elif entry.title != "Runs":
            visit(page, entry.title)
        wide = page.evaluate("[...document.querySelectorAll('html, [data-testid=stMain]')].map(it => it.scrollWidth)")
        assert max(wide) <= 420, entry.title
        # Panels stand below one another as soon as the browser has said how wide it is.
        if entry.title == "Layers":
            page.wait_for_function(
                """() => { const plot = document.querySelector('.js-plotly-plot');
                    return plot && Object.keys(plot.layout).filter((key) => key.startsWith('xaxis')).length > 1
                        && plot._fullLayout._subplots.xaxis.every((axis) => plot._fullLayout[
                            axis.replace('x', 'xaxis')].domain[1] === 1) }""",
                timeout=60_000,
            )
    context.close()
