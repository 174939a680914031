"""The list of runs in a real browser: names open, ticked rows are compared, renamed and put away."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from driftlens.runs.run import open_run
from driftlens_app.jobs.record import write_job
from tests.app.pages import failed
from tests.browser.reading import settled
from tests.browser.server import serving

pytestmark = pytest.mark.slow
HEAD, ROW = 35, 35
"""Pixels of a table's head and of each of its rows."""


@pytest.fixture
def root(runs_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(runs_folder, tmp_path / "root")
    return tmp_path / "root"


def click(page: Any, row: int, x: int) -> None:
    """A click into a row of the table, which is drawn and holds no elements of its own."""
    page.get_by_test_id("stDataFrame").wait_for()
    settled(page)
    page.get_by_test_id("stDataFrame").scroll_into_view_if_needed()
    box = page.get_by_test_id("stDataFrame").locator("canvas").first.bounding_box()
    page.mouse.click(box["x"] + x, box["y"] + HEAD + ROW * (row + 0.5))
    settled(page)


def test_runs_are_opened_compared_renamed_and_put_away(page: Any, root: Path, tmp_path: Path) -> None:
    ids = [open_run(folder).id for folder in root.iterdir()]
    with serving(root, tmp_path / "log") as url:
        page.goto(f"{url}/runs")
        click(page, 0, 15)
        click(page, 1, 15)
        page.get_by_role("button", name="Compare").click()
        page.wait_for_url("**/repair?**")
        assert all(id in page.url for id in ids)

        page.goto(f"{url}/runs")
        click(page, 0, 15)
        page.get_by_role("button", name="Rename").click()
        page.get_by_label("Name", exact=True).fill("better so")
        page.keyboard.press("Enter")
        page.get_by_role("dialog").get_by_role("button", name="Rename").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        settled(page)
        names = sorted(open_run(folder).name for folder in root.iterdir())
        assert "better so" in names and len(names) == 2

        for folder in [*root.iterdir()]:  # later than the run was finished, or nobody would be told
            write_job(replace(failed(root, folder.name), started="2999-01-01T00:00:00.000Z"))
        page.goto(f"{url}/runs")
        expect(page.get_by_role("button", name="Dismiss")).to_have_count(2)
        click(page, 0, 15)
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        settled(page)
        (put_away,) = (root / "deleted").iterdir()
        (left,) = (folder for folder in root.iterdir() if folder.name not in ("deleted", ".driftlens"))
        assert {open_run(put_away).name, open_run(left).name} == {*names}
        expect(page.get_by_test_id("stToast")).to_contain_text(f"Deleted: {open_run(put_away).name}")
        # How it once ended is not told of what is no longer there.
        expect(page.get_by_role("button", name="Dismiss")).to_have_count(1)
        # Nothing is ticked in the list that is left.
        expect(page.get_by_role("button", name="Delete")).to_have_count(0)

        page.goto(f"{url}/runs")
        settled(page)
        expect(page.get_by_test_id("stToast")).to_have_count(0)
        click(page, 0, 70)
        page.wait_for_url("**/overview?**")
        assert open_run(left).id in page.url

        page.goto(f"{url}/runs")
        click(page, 0, 15)
        page.get_by_role("button", name="Archive").click()
        page.get_by_role("dialog").get_by_role("button", name="Archive").click()
        expect(page.get_by_test_id("stToast")).to_contain_text("Archived: ")
        (archived,) = (root / "archived").iterdir()
        assert open_run(archived).name in names and not left.exists()
