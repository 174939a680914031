"""Another merge of a run's experts in a real browser, by the real engine: analyzed alone, and compared with others."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from driftlens.findings.verdict import verdict
from driftlens.runs import layout
from driftlens.runs.run import DriftRun, open_run
from driftlens.suites.cache import RECORD
from driftlens.suites.embedded import embedded_suite
from driftlens.suites.recipe import Recipe
from tests.browser.reading import PATIENCE, check, choose, drawn, open_drawer, settled
from tests.browser.server import serving
from tests.suites.conftest import TINY, alone
from tests.zoo.world import World


def begin_with(page: Any, spec: str) -> None:
    choose(page, "Spec from", spec)
    open_drawer(page, "New merge")


@pytest.mark.slow
def test_a_new_merge_is_analyzed_and_several_are_compared(
    page: Any, light: DriftRun, workshop: tuple[str, Path]
) -> None:
    address, root = workshop
    shutil.copytree(light.path, root / "light")
    said: list[str] = []
    page.on("console", lambda entry: said.append(entry.text) if entry.type in ("error", "warning") else None)
    page.goto(f"{address}/new_run")
    settled(page)
    begin_with(page, "light/spec.yaml")
    drawn(page, page.get_by_role("combobox", name="Merge the experts by"), timeout=PATIENCE)
    choose(page, "Merge the experts by", "TIES-Merging", closes=False)
    scaling = page.get_by_role("spinbutton", name="scaling")
    scaling.fill("0.4")
    scaling.press("Tab")
    check(page)
    page.get_by_role("button", name="Start the analysis").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("light-ties", timeout=PATIENCE)
    made = open_run(root / "light-ties")
    assert made.manifest.merge is not None and made.manifest.name == "light-ties"
    assert made.manifest.merge["method"] == "ties" and made.manifest.merge["parameters"]["scaling"] == 0.4

    page.goto(f"{address}/new_run")
    settled(page)
    begin_with(page, "light/spec.yaml")
    drawn(page, page.get_by_role("combobox", name="Merge the experts by"), timeout=PATIENCE)
    for title in ("Simple Averaging", "TIES-Merging"):
        choose(page, "Merge the experts by", title, closes=False)
    check(page)
    page.get_by_role("button", name="Compare the merges").click()
    drawn(page, page.get_by_role("heading", name="Compared merges"), timeout=PATIENCE)
    (document,) = [json.loads(file.read_text()) for file in root.glob("*/merges.json")]
    merges = {row["merge"] for row in document["merges"] if row["place"]}
    assert merges == {"base", "average", "ties", "task_arithmetic scaling=0.3"}  # the spec's own, too
    page.get_by_test_id("stPlotlyChart").wait_for()
    expect(page.get_by_text("Ranked by Hellinger distance")).to_be_visible()
    # Repair has it beside the comparisons of the run whose experts were merged.
    page.goto(f"{address}/repair?run={light.id}&repair=Compare")
    drawn(page, page.get_by_role("heading", name="Compared merges"), timeout=PATIENCE)
    expect(page.get_by_test_id("stPlotlyChart").last).to_be_visible()
    expect(page.get_by_text("Ranked by Hellinger distance")).to_be_visible()
    assert not said


@pytest.mark.slow
def test_a_comparison_that_is_cancelled_leaves_nothing_half_written(
    page: Any, light: DriftRun, workshop: tuple[str, Path]
) -> None:
    """In the middle of a merge that would take minutes."""
    address, root = workshop
    shutil.copytree(light.path, root / "light")
    page.goto(f"{address}/new_run")
    settled(page)
    begin_with(page, "light/spec.yaml")
    drawn(page, page.get_by_role("combobox", name="Merge the experts by"), timeout=PATIENCE)
    for title in ("Simple Averaging", "WUDI-Merging"):
        choose(page, "Merge the experts by", title, closes=False)
    steps = page.get_by_role("spinbutton", name="steps")
    steps.fill("100000")
    steps.press("Tab")
    check(page)
    page.get_by_role("button", name="Compare the merges").click()
    expect(page.get_by_text("wudi steps=100000").first).to_be_visible(timeout=PATIENCE)
    page.get_by_role("button", name="Cancel").first.click(timeout=PATIENCE)
    expect(page.get_by_text("was cancelled").first).to_be_visible(timeout=PATIENCE)
    # What was finished waits for the same comparison to go on; nothing else is there, and nothing half-written.
    made = [path for path in (root / "light-merges").rglob("*") if path.is_file()]
    assert {path.parent.name for path in made} <= {layout.SCRATCH, "scores"}
    assert not list(root.rglob(".partial-*"))


@pytest.mark.slow
def test_what_lies_in_the_folder_is_picked_mended_and_analyzed(
    page: Any, world: World, workshop: tuple[str, Path]
) -> None:
    """Base, experts and data by choosing; the line that the check finds wrong is mended, and the work started."""
    address, root = workshop
    shutil.copytree(world.folder, root / "mine")
    page.goto(f"{address}/new_run")
    settled(page)
    open_drawer(page, "What nothing beside the base says")
    picks = {
        "Family of models": ["open-clip"],
        "Architecture": ["mine/model_config.json"],
        "Base": ["mine/open_clip/base.safetensors"],
        "Experts": [f"mine/open_clip/{task}.safetensors" for task in world.tasks],
    } | {f"Data of task {at}": [f"mine/{task}.npz"] for at, task in enumerate(world.tasks, 1)}
    for label, choices in picks.items():
        choose(page, label, *choices, closes=len(choices) == 1)
    page.get_by_role("button", name="Write the spec").click()
    text = page.get_by_role("textbox", name="Spec")
    expect(text).to_have_value(re.compile("task_arithmetic"), timeout=PATIENCE)
    settled(page)
    written = text.input_value()
    text.fill(written.replace("task_arithmetic", "task_arithmetik"))
    text.press("Control+Enter")
    settled(page)
    page.get_by_role("button", name="Check the spec").click()
    wrong = page.get_by_test_id("stAlertContentError").first
    expect(wrong).to_be_visible(timeout=PATIENCE)
    box = wrong.bounding_box()
    assert box is not None and box["y"] + box["height"] < 1000, "what is wrong is below the fold"
    few, _, _ = re.sub(r"\b(n|n_diagnosis|n_test): \d+", r"\1: 5", written).partition("metrics:")
    text.fill(f"{few}metrics: {{jacobian: false}}\n")
    text.press("Control+Enter")
    settled(page)
    check(page)
    page.get_by_role("button", name="Start the analysis").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("picked", timeout=PATIENCE)
    (made,) = root.glob("*/manifest.json")
    assert open_run(made.parent).tasks == world.tasks


@pytest.fixture(scope="module")
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which a suite that took seconds to make stands where the one that takes minutes would."""
    folder = tmp_path_factory.mktemp("cache")
    recipe = dataclasses.replace(TINY, num_train=80, num_test=140)
    with alone():
        made = embedded_suite(cache=folder / "driftlens", recipe=recipe)
    digest = Recipe().digest(0)
    record = made.folder / RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), "digest": digest}))
    made.folder.rename(made.folder.with_name(f"embedded-{digest[:12]}"))
    return folder


@pytest.mark.slow
def test_one_button_makes_the_demo_run_and_leads_to_its_overview(
    page: Any, browser: Any, user_cache: Path, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    with serving(root, tmp_path / "log", environment={"XDG_CACHE_HOME": str(user_cache)}) as address:
        page.goto(address)
        settled(page)
        expect(page.get_by_role("heading", level=1)).to_contain_text("Welcome")
        button = page.get_by_role("button", name="Make the demo run")
        button.click()
        expect(page.get_by_role("progressbar").first).to_be_visible(timeout=60_000)
        expect(button).to_be_disabled(timeout=60_000)
        page.wait_for_url("**/overview*", timeout=300_000)
        settled(page)
        run = open_run(root / "driftlens-demo")
        assert f"run={run.id}" in page.url
        made = ("baseline:featcal-anchor", "calibrated:featcal", "calibrated:residual")
        assert run.variants == ("base", "merged", *made)
        expect(page.get_by_text(verdict(run).sentences[0])).to_be_visible(timeout=60_000)
