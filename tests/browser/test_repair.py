"""Repair beyond one calibration, in a real browser: models and runs compared, repairs beside repairs, damaged runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import TimeoutError, expect

import driftlens as dl
from driftlens.results.formatting import typeset_signs
from driftlens.results.verdict import verdict
from driftlens.runs.manifest import EVENTS, MERGES, live_lock_owner
from driftlens.runs.run import DriftRun, open_run
from driftlens_app.calibration import START
from driftlens_reports.merges import read_merge_ranking
from tests.browser.reading import PATIENCE, choose, drawn, open_drawer, settled
from tests.pipelines.calibrating import roomy_run
from tests.runs.full_run import write_full_run
from tests.zoo.world import World

pytestmark = pytest.mark.slow


def changes(page: Any) -> list[float]:
    """The numbers of the first line of the chart of changes, once it is drawn; the head has an axis of its own."""
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
    assert changes(page) == pytest.approx((after - before).tolist()[:-1])

    choose(page, "After", "base")
    after = run.layers(task, "base")["drift_l2_mean"]
    begins_with(page, float((after - before).iloc[0]))
    assert "after=base" in page.url
    choose(page, "With", "merged")
    choose(page, "After", "merged")
    after = other.layers(task, "merged")["drift_l2_mean"]
    begins_with(page, float((after - before).iloc[0]))
    page.reload()
    begins_with(page, float((after - before).iloc[0]))
    assert "with=merged" in page.url


def test_repairs_are_run_beside_one_another(page: Any, light: DriftRun, workshop: tuple[str, Path]) -> None:
    address, root = workshop
    run = root / "light"
    shutil.copytree(light.path, run)
    page.goto(f"{address}/repair")
    settled(page)
    page.get_by_role("button", name="Clear all").last.click()
    settled(page)
    choose(page, "Repairs to compare", "FeatCal", "Surgery", closes=False)
    page.get_by_role("button", name="Compare repairs").click()
    expect(page.get_by_role("button", name="Cancel").first).to_be_visible(timeout=PATIENCE)
    drawn(page, page.get_by_role("heading", name=re.compile("^Before and after ")), timeout=PATIENCE)
    expect(page.get_by_role("button", name="Compare repairs")).to_be_enabled(timeout=PATIENCE)
    settled(page)
    made = open_run(run)
    assert {at.method for at in made.manifest.calibrations.values()} == {"featcal", "surgery"}
    plots = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map(it => it.data.flatMap(trace => trace.text))"
    )
    assert any({"featcal", "surgery"} == {*names} for names in plots), plots
    expect(page.get_by_role("heading", name="Repairs: gain against cost")).to_be_visible()


def test_a_damaged_and_a_vanished_piece_take_nothing_else_along(
    page: Any, runs_folder: Path, workshop: tuple[str, Path]
) -> None:
    address, root = workshop
    shutil.copytree(runs_folder, root, dirs_exist_ok=True)
    full = open_run(root / "full")
    file = full.path / "tables" / "outputs.parquet"
    file.write_bytes(file.read_bytes()[:100])
    shutil.rmtree(full.path / "features")
    page.goto(f"{address}/overview?run={full.id}")
    drawn(page, page.get_by_role("heading", name="Drift", exact=True), timeout=PATIENCE)
    said = page.get_by_test_id("stAlertContentError").filter(has_text="outputs")
    expect(said.first).to_be_visible()
    page.get_by_test_id("stSidebarNav").get_by_role("link", name="Layers").click()
    drawn(page, page.get_by_text("Drift by layer", exact=True), timeout=PATIENCE)
    expect(page.get_by_test_id("stAlertContentError")).to_have_count(0)
    page.get_by_test_id("stSidebarNav").get_by_role("link", name="Samples").click()
    expect(page.get_by_test_id("stAlertContentError").first).to_be_visible()
    settled(page)
    # The whole run goes while it is looked at; the other one is still there.
    shutil.rmtree(full.path)
    page.get_by_test_id("stSidebarNav").get_by_role("link", name="Overview").click()
    drawn(page, page.get_by_text(re.compile("is not here")), timeout=PATIENCE)
    expect(page.get_by_text("Traceback")).to_have_count(0)
    choose(page, "Run", "merged")
    drawn(page, page.get_by_role("heading", name="merged", exact=True), timeout=PATIENCE)


@pytest.fixture
def writable(light: DriftRun, workshop: tuple[str, Path]) -> tuple[str, Path]:
    """The address of a dashboard on a copy of a small real run, and the copy."""
    address, root = workshop
    return address, Path(shutil.copytree(light.path, root / "light"))


def test_calibrating_shows_progress_survives_a_reload_and_ends_with_the_tables_numbers(
    page: Any, writable: tuple[str, Path]
) -> None:
    address, run = writable
    page.goto(f"{address}/repair")
    settled(page)
    for width in (1440, 420):
        page.set_viewport_size({"width": width, "height": 900})
        settled(page)
        for name in ("FeatCal calibrate", "Find the best repair"):
            box = page.get_by_role("button", name=name).bounding_box()
            assert box is not None and box["y"] >= 0 and box["y"] + box["height"] < 900, (name, width)
    page.get_by_role("button", name="FeatCal calibrate").click()
    expect(page.get_by_text("Calibration featcal").first).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_role("button", name="FeatCal calibrate")).to_have_count(0)
    page.reload()
    # After the reload the job is either still shown, or over already; it has not begun again.
    drawn(page, page.get_by_role("heading", name="Before and after featcal"), timeout=PATIENCE)
    assert len(list((run / "logs").glob("calibrate-*.log"))) == 1
    calibrated = open_run(run)
    assert list(calibrated.manifest.calibrations) == ["featcal"]
    *said, following = verdict(calibrated, "featcal").sentences
    for sentence in said:
        if sentence.startswith("Accuracy ("):  # the scale of all models has these numbers
            for part in sentence.rstrip(".").split(": ")[1].split(", "):  # such as "merged 33.3 %"
                named = re.compile("on one scale.*" + r"\s".join(map(re.escape, part.split())))
                expect(page.get_by_role("img", name=named)).to_be_visible()
        else:
            expect(page.get_by_text(typeset_signs(sentence))).to_be_visible()
    assert following.startswith("Next: `driftlens ")
    expect(page.get_by_test_id("stMain").get_by_role("link", name="Export")).to_be_visible()
    # First numbers are shown while the job goes on; at its end the page is drawn anew, with other files to hand out.
    expect(page.get_by_text("Calibration featcal is done.")).to_be_visible(timeout=PATIENCE)
    settled(page)  # the wall of samples comes last, and buttons are drawn anew until then
    weights = run / "calibrations" / "featcal" / "weights.safetensors"
    assert _handed_out(page, "Calibrated checkpoint").read_bytes() == weights.read_bytes()


@contextmanager
def stopped_at_a_layer(run: Path) -> Iterator[dict[int, float]]:
    """Hold the run's job where it has solved some layers; the drift that it has told of each."""
    drifts: dict[int, float] = {}
    while not drifts:
        text = (run / EVENTS).read_text(encoding="utf-8") if (run / EVENTS).is_file() else ""
        told = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        told = [event.get("metrics", event) for event in told]
        drifts = {event["layer"]: event["drift_l2_mean"] for event in told if "drift_l2_mean" in event}
        time.sleep(0.002)
    owner = live_lock_owner(run)
    assert owner is not None, "it ended before it could be held"
    os.killpg(owner.pid, signal.SIGSTOP)
    try:
        yield drifts
    finally:
        os.killpg(owner.pid, signal.SIGCONT)


def test_the_live_curve_takes_the_place_of_the_buttons_and_the_result_is_one_screen(
    page: Any, writable: tuple[str, Path]
) -> None:
    address, run = writable
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{address}/repair")
    settled(page)
    button = page.get_by_role("button", name="FeatCal calibrate")
    place = button.bounding_box()
    button.click()
    with stopped_at_a_layer(run) as drifts:
        curve = page.locator(".st-key-chart-running")
        curve.locator(".main-svg").first.wait_for()
        settled(page)
        for name in ("FeatCal calibrate", "Find the best repair"):
            expect(page.get_by_role("button", name=name)).to_have_count(0)
        top = page.get_by_text("Calibration featcal").bounding_box()
        settings = page.get_by_text("Settings", exact=True).bounding_box()
        box = curve.bounding_box()
        assert place["y"] - 10 <= top["y"] <= place["y"] + 40 and box["y"] + box["height"] <= min(settings["y"], 900)
        expect(page.get_by_role("progressbar")).to_be_visible()
        lines = page.evaluate("document.querySelector('.st-key-chart-running .js-plotly-plot').data.map(it => it.y)")
        assert any(set(drifts.values()) <= {*line} for line in lines), (drifts, lines)
    heading = page.get_by_role("heading", name="Before and after featcal")
    expect(page.get_by_text("Calibration featcal is done.")).to_be_visible(timeout=PATIENCE)
    expect(button).to_be_visible()
    settled(page)
    heading.evaluate("it => it.scrollIntoView()")
    settled(page)
    curves, samples = (
        page.locator(f".st-key-chart-{name}").bounding_box() for name in ("mean-drift", "moved-samples")
    )
    assert curves["x"] + curves["width"] <= samples["x"] and abs(curves["y"] - samples["y"]) < 1
    tiles = page.locator(".headline .tile")
    scores, table = tiles.last.bounding_box(), page.get_by_test_id("stDataFrame").first.bounding_box()
    assert 0 <= heading.bounding_box()["y"] < curves["y"] < scores["y"] and scores["y"] + scores["height"] <= 900
    for text in tiles.all_inner_texts():  # a score and its interval
        assert re.search(r"[\d.]+\s%\s+[\d.]+\sto\s[\d.]+\s%", text), text
    assert scores["y"] < table["y"] < page.get_by_text("All numbers", exact=True).bounding_box()["y"]


def test_one_press_compares_merges_and_ends_in_a_ranked_chart(
    page: Any, world: World, workshop: tuple[str, Path]
) -> None:
    """Of a run without scores, whose merge may always be farther from its experts than another one."""
    address, root = workshop
    run = dl.analyze(world.spec(heads=None, metrics={"jacobian": False}), out=root / "light", progress="none").path
    page.goto(f"{address}/overview")
    settled(page)
    button = page.get_by_role("button", name="Compare merges")
    button.click()
    expect(page.get_by_role("progressbar")).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_text("Comparison of merges of light")).to_be_visible()
    expect(button).to_have_count(0)
    drawn(page, page.get_by_role("heading", name="Compared merges"), timeout=PATIENCE)
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    ranking = read_merge_ranking(run / MERGES)
    names = [row["merge"] for row in sorted(ranking["merges"], key=lambda row: row["place"])]
    assert len(names) > 3
    chart = page.locator(".st-key-chart-merges .js-plotly-plot")
    chart.locator(".main-svg").first.wait_for()
    shown = chart.evaluate("it => it.data.flatMap(line => [...line.y])")
    assert {*names} <= {*shown}


def _handed_out(page: Any, button: str) -> Path:
    """The file behind a button; a press that falls between two drawings of the page asks for a file of the first."""
    for _ in range(3):
        settled(page)
        with suppress(TimeoutError):
            with page.expect_download(timeout=PATIENCE / 3) as taken:
                page.get_by_role("button", name=button).click()
            return Path(taken.value.path())
    pytest.fail(f"{button} hands out nothing, however often it is pressed")


def test_from_the_first_visit_to_the_repaired_model_by_pressing_only_buttons(
    page: Any, world: World, workshop: tuple[str, Path]
) -> None:
    address, root = workshop
    run = roomy_run(world, root).path
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(address)
    settled(page)
    page.get_by_test_id("stSidebarNav").get_by_role("link", name=re.compile("Calibrate|Repair")).click()
    button = page.get_by_role("button", name="Find the best repair")
    expect(button).to_be_enabled()
    settled(page)
    box = button.bounding_box()
    assert box is not None and box["y"] + box["height"] < 900, "above the fold"
    button.click()
    expect(page.get_by_role("progressbar").first).to_be_visible(timeout=PATIENCE)
    drawn(page, page.get_by_role("heading", name="Before and after"), timeout=PATIENCE)
    expect(page.locator(".headline").first).to_be_visible()
    drawn(page, page.get_by_text(re.compile("Calibration .+ is done.")), timeout=PATIENCE)
    expect(button).to_be_enabled()
    ((name, info),) = open_run(run).manifest.calibrations.items()
    expect(page.get_by_text(f"Calibration {name} is done.")).to_be_visible()
    assert name == (info.selection.get("merge", {}).get("method") or ("auto" if info.kept else info.method))


def test_a_second_calibration_is_shown_when_it_is_done_in_every_tab_and_the_console_stays_empty(
    page: Any, writable: tuple[str, Path]
) -> None:
    address, run = writable
    dl.open_run(run).calibrate(dl.FeatCal(), name="featcal")
    said: list[str] = []
    tabs = (page, page.context.new_page())
    for tab in tabs:
        tab.on("console", lambda entry: said.append(entry.text) if entry.type in ("error", "warning") else None)
        tab.goto(address)
        settled(tab)
        tab.get_by_test_id("stSidebarNav").get_by_role("link", name="Repair").click()
        drawn(tab, tab.get_by_role("heading", name="Before and after featcal"), timeout=PATIENCE)
    open_drawer(page, "Settings")
    name = page.get_by_role("textbox", name="Name")
    assert name.input_value() == "featcal-2"
    name.fill("featcal")
    page.get_by_role("button", name=START).click()
    drawn(page, page.get_by_text("or choose another name"), timeout=PATIENCE)
    assert not list((run / "logs").glob("calibrate-*.log"))
    name.fill("featcal-2")
    page.get_by_role("button", name=START).click()
    expect(page.get_by_role("button", name="Cancel").first).to_be_visible(timeout=PATIENCE)
    tabs[1].get_by_text("Solved modules").click()  # which draws the page again
    for tab in tabs:
        drawn(tab, tab.get_by_text("Calibration featcal-2 is done."), timeout=PATIENCE)
        expect(tab.get_by_role("heading", name="Before and after featcal-2")).to_be_visible()
        open_drawer(tab, "All numbers")
        expect(tab.get_by_role("heading", name="largest weight moves")).to_be_visible()
    assert name.input_value() == "featcal-3"
    assert said == []


def test_a_cancelled_calibration_leaves_no_variant(page: Any, writable: tuple[str, Path]) -> None:
    address, run = writable
    before = open_run(run).variants
    page.goto(f"{address}/repair")
    settled(page)
    open_drawer(page, "Settings")
    page.get_by_role("textbox", name="Name").fill("given-up")
    page.get_by_role("button", name=START).click()
    page.get_by_role("button", name="Cancel").click(timeout=PATIENCE)
    drawn(page, page.get_by_text("was cancelled"), timeout=PATIENCE)
    expect(page.get_by_role("button", name="FeatCal calibrate")).to_be_enabled()
    assert page.get_by_role("textbox", name="Name").input_value() == "given-up"
    assert open_run(run).variants == before and open_run(run).manifest.calibrations == {}


def test_the_tables_of_a_result_need_no_sideways_scrolling(page: Any, workshop: tuple[str, Path]) -> None:
    address, root = workshop
    write_full_run(root / "full", tasks=("house_numbers", "textures"))
    page.goto(f"{address}/repair")
    page.get_by_text("All numbers", exact=True).click(timeout=60_000)
    expect(page.get_by_test_id("stDataFrame")).to_have_count(7, timeout=60_000)
    settled(page)
    fitting = "[...document.querySelectorAll('.dvn-scroller')].filter(it => it.scrollWidth <= it.clientWidth)"
    page.wait_for_function(f"{fitting}.length === 7")
