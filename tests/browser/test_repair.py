"""Repair beyond one calibration, in a real browser: models and runs compared, repairs beside repairs, damaged runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from driftlens.runs.run import DriftRun, open_run
from tests.browser.reading import drawn, settled
from tests.browser.server import serving

pytestmark = pytest.mark.slow
PATIENCE = 180_000
"""Milliseconds that a job may take on a busy machine, most of them to import torch."""


def choose(page: Any, box: str, option: str) -> None:
    page.get_by_role("combobox", name=box, exact=True).click()
    page.get_by_role("option", name=option, exact=True).click()
    settled(page)


def changes(page: Any) -> list[float]:
    """The numbers of the first line of the chart of changes, once it is drawn."""
    page.locator(".js-plotly-plot").first.wait_for()
    found: list[float] = page.evaluate("[...document.querySelector('.js-plotly-plot').data[0].y]")
    return found


def begins_with(page: Any, change: float) -> None:
    """Wait until the first number of the chart of changes is this one."""
    page.wait_for_function(
        "(wanted) => Math.abs(document.querySelector('.js-plotly-plot')?.data[0].y[0] - wanted) < 1e-9",
        arg=change,
    )


def test_two_models_and_two_runs_are_compared(page: Any, app_url: str, runs_folder: Path) -> None:
    run, other = (open_run(runs_folder / name) for name in ("full", "merged"))
    page.goto(f"{app_url}/repair?run={run.id}")
    settled(page)
    page.get_by_text("Compare", exact=True).click()
    drawn(page, page.get_by_role("heading", name="Change by layer"), timeout=PATIENCE)
    expect(page.get_by_role("heading", name="Change by task")).to_be_visible()
    name, task = run.variants[-1], run.tasks[0]
    before, after = (run.layers(task, of)["drift_l2_mean"] for of in ("merged", name))
    assert changes(page) == pytest.approx((after - before).tolist())

    choose(page, "After", "base")
    after = run.layers(task, "base")["drift_l2_mean"]
    begins_with(page, float((after - before).iloc[0]))
    assert "after=base" in page.url
    choose(page, "With", other.id)
    choose(page, "After", "merged")
    after = other.layers(task, "merged")["drift_l2_mean"]
    begins_with(page, float((after - before).iloc[0]))
    page.reload()
    begins_with(page, float((after - before).iloc[0]))
    assert f"with={other.id}" in page.url


def test_repairs_are_run_beside_one_another(page: Any, light: DriftRun, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "light"
    shutil.copytree(light.path, run)
    with serving(run.parent, tmp_path / "log") as address:
        page.goto(f"{address}/repair")
        settled(page)
        field = page.get_by_role("combobox", name="Repairs to compare")
        field.scroll_into_view_if_needed()
        page.get_by_role("button", name="Clear all").last.click()
        settled(page)
        for title in ("FeatCal", "SVC"):
            field.fill(title)
            page.get_by_role("option", name=title, exact=True).click()
            settled(page)
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Compare repairs").click()
        expect(page.get_by_role("button", name="Cancel").first).to_be_visible(timeout=PATIENCE)
        drawn(page, page.get_by_role("heading", name=re.compile("^Before and after ")), timeout=PATIENCE)
        expect(page.get_by_role("button", name="Compare repairs")).to_be_enabled(timeout=PATIENCE)
        settled(page)
        made = open_run(run)
        assert {at.method for at in made.manifest.calibrations.values()} == {"featcal", "svc"}
        plots = page.evaluate(
            "[...document.querySelectorAll('.js-plotly-plot')].map(it => it.data.flatMap(trace => trace.text))"
        )
        assert any({"featcal", "svc"} == {*names} for names in plots), plots
        expect(page.get_by_role("heading", name="Repairs: gain against cost")).to_be_visible()


def test_a_damaged_and_a_vanished_piece_take_nothing_else_along(
    page: Any, runs_folder: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(runs_folder, root)
    full = open_run(root / "full")
    file = full.path / "tables" / "outputs.parquet"
    file.write_bytes(file.read_bytes()[:100])
    shutil.rmtree(full.path / "features")
    with serving(root, tmp_path / "log") as address:
        page.goto(f"{address}/overview?run={full.id}")
        drawn(page, page.get_by_role("heading", name="Mean drift by layer"), timeout=PATIENCE)
        said = page.get_by_test_id("stAlertContentError").filter(has_text="outputs")
        expect(said.first).to_be_visible()
        page.get_by_test_id("stSidebarNav").get_by_role("link", name="Layers").click()
        drawn(page, page.get_by_role("heading", name="Drift by layer"), timeout=PATIENCE)
        expect(page.get_by_test_id("stAlertContentError")).to_have_count(0)
        page.get_by_test_id("stSidebarNav").get_by_role("link", name="Samples").click()
        expect(page.get_by_test_id("stAlertContentError").first).to_be_visible()
        settled(page)
        # The whole run goes while it is looked at; the other one is still there.
        shutil.rmtree(full.path)
        page.get_by_test_id("stSidebarNav").get_by_role("link", name="Overview").click()
        drawn(page, page.get_by_text(re.compile("is not here")), timeout=PATIENCE)
        expect(page.get_by_text("Traceback")).to_have_count(0)
        choose(page, "Run", "merged only")
        drawn(page, page.get_by_role("heading", name="merged only"), timeout=PATIENCE)
