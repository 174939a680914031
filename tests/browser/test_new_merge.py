"""New runs in a real browser, by the real engine: another merge of models on disk, and the demo."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from safetensors.torch import save_file

from driftlens.results.verdict import verdict
from driftlens.runs.run import DriftRun, open_run
from tests.browser.reading import PATIENCE, settled
from tests.browser.server import serving
from tests.zoo.world import World


@pytest.mark.slow
def test_models_on_disk_are_merged_and_analyzed(page: Any, light: DriftRun, workshop: tuple[str, Path]) -> None:
    """A spec in the folder is started by its name, and the page leads to the list of runs."""
    address, root = workshop
    (root / "mine.yaml").write_text((light.path / "spec.yaml").read_text())
    page.goto(f"{address}/new_run")
    settled(page)
    expect(page.get_by_role("textbox", name="Base")).to_be_visible()
    expect(page.get_by_role("combobox", name="Merge method")).to_be_visible()
    page.get_by_role("button", name="Start the analysis").last.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Runs", timeout=PATIENCE)
    settled(page)
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0, timeout=PATIENCE)
    assert open_run(root / "mine").tasks == light.tasks


@pytest.mark.slow
def test_a_base_given_as_a_file_in_its_folder_becomes_a_run_of_one_name(
    page: Any, world: World, workshop: tuple[str, Path]
) -> None:
    """`base/base.safetensors` looks like a name of the Hub; the experts of the form give the tasks."""
    address, root = workshop
    for name in world.names:
        (root / name).mkdir()
        tower = {key: value for key, value in world.state(name).items() if key.startswith("visual.")}
        save_file(tower, root / name / f"{name}.safetensors")
    shutil.copy(world.models["open_clip"], root / "base")
    (root / "data").mkdir()
    for task in world.tasks:
        shutil.copy(world.data(task), root / "data")
    page.goto(f"{address}/new_run")
    settled(page)
    page.get_by_role("textbox", name="Name", exact=True).fill("picked")
    page.get_by_role("textbox", name="Base").fill("base/nothing.safetensors")
    page.get_by_role("textbox", name="Experts").fill("\n".join(f"{task}/{task}.safetensors" for task in world.tasks))
    page.get_by_role("textbox", name="Data folder").fill("data")
    start = page.get_by_role("button", name="Start the analysis")
    start.click()
    alert = page.get_by_test_id("stAlertContentError")
    expect(alert).to_contain_text("base/nothing.safetensors", timeout=PATIENCE)
    settled(page)
    expect(start).to_be_enabled()  # what can be mended is sent again
    page.get_by_role("textbox", name="Base").fill("base/base.safetensors")
    start.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Runs", timeout=PATIENCE)
    settled(page)
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0, timeout=PATIENCE)
    run = open_run(root / "picked")
    assert run.name == "picked" and sorted(run.tasks) == sorted(world.tasks)
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("picked")
    settled(page)
    expect(page.get_by_role("combobox", name="Run")).to_have_value("picked")
    assert page.url == f"{address}/overview?run=picked" and "in its spec" not in page.inner_text("body")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_button_makes_the_demo_run(page: Any, browser: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    with serving(root, tmp_path / "log") as address:
        page.goto(address)
        settled(page)
        expect(page.get_by_role("heading", level=1)).to_contain_text("Welcome")
        button = page.get_by_role("button", name="Run the demo")
        button.click()
        expect(page.get_by_role("progressbar").first).to_be_visible(timeout=60_000)
        expect(button).to_be_disabled(timeout=60_000)
        expect(page.get_by_role("heading", level=1)).to_contain_text("Runs", timeout=300_000)
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0, timeout=300_000)
        page.get_by_role("link", name="Overview").click()
        settled(page)
        run = open_run(root / "driftlens-demo")
        made = ("baseline:featcal-anchor", "calibrated:featcal", "calibrated:residual")
        assert run.variants == ("base", "merged", *made)
        # The first sentence: models and scores as tiles, what they are above the table.
        about, _, scores = verdict(run).sentences[0].rstrip(".").partition(": ")
        expect(page.get_by_text(f"{about}.")).to_be_visible(timeout=60_000)
        tiles = page.locator(".headline .tile")
        expect(tiles).to_have_count(4)
        for score in scores.split(", "):
            name, _, number = score.partition(" ")
            expect(tiles.filter(has=page.get_by_text(name, exact=True))).to_contain_text(number)
