"""The explorer's page in a real browser, from a file: it asks for nothing, and what it does needs no server."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from driftlens.config.requests import ViewRequest
from driftlens.results.measures import OUTCOMES, sample_outcomes
from driftlens.runs.manifest import THUMB_SIDE, texts_file, thumbs_file
from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.explorer import Explorer, explorer_data, render_page as explorer_page
from tests.browser.reading import Opened, eventually
from tests.runs.full_run import Size, write_full_run

pytestmark = pytest.mark.slow

EVIL = (
    "</script><script>document.title = 'ran'</script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "=1+1",
)
Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run of images, texts and neither, and its page beside it."""
    folder = tmp_path_factory.mktemp("explorer")
    run = open_run(write_full_run(folder / "run", size=Size(blocks=3, samples=40, width=8, tests=60)))
    (run.path / "thumbs").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (40, THUMB_SIDE, THUMB_SIDE, 3), dtype=np.uint8)
    np.savez_compressed(run.path / thumbs_file("cars"), pictures=pixels)
    texts = {name: f"sentence number{at:02d}" for at, name in enumerate(run.sample_ids("mnist"))}
    (run.path / texts_file("mnist")).write_text(json.dumps(texts), encoding="utf-8")
    Explorer(run).save(folder / "page.html")
    return run


@pytest.fixture
def opened(page: Any, saved: DriftRun) -> Open:
    """Opens the page at a place in its address, without pauses of movement."""

    def open_at(address: str = "", path: Path | None = None) -> Opened:
        page.emulate_media(reduced_motion="reduce")
        shown = Opened(page, path or saved.path.parent / "page.html", address)
        eventually(page, "explorer.frames > 0")
        return shown

    return open_at


def selected(page: Any) -> list[str]:
    found: list[str] = page.evaluate("explorer.selected()")
    return found


def places(page: Any, panel: int = 0) -> dict[str, tuple[float, float]]:
    return {name: (x, y) for name, x, y in page.evaluate("at => explorer.places(at)", panel)}


def box_left_half(page: Any) -> list[str]:
    """Drag a box over the left half of the first panel; the samples that lie there."""
    page.get_by_role("radio", name="box").check()
    page.locator("canvas").first.scroll_into_view_if_needed()
    box = page.locator("canvas").first.bounding_box()
    middle = box["x"] + box["width"] / 2
    inside = [name for name, (x, _) in places(page).items() if x < middle]
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(middle, box["y"] + box["height"] - 2, steps=4)
    page.mouse.up()
    assert 1 < len(inside) < len(places(page))
    return inside


def test_it_asks_for_nothing_and_draws_every_sample(opened: Open, saved: DriftRun) -> None:
    shown = opened("task=0")
    assert shown.said == [] and {name.partition("#")[0] for name in shown.asked} == {
        (saved.path.parent / "page.html").as_uri(),
        *(name for name in shown.asked if name.startswith("data:")),
    }
    assert {*places(shown.page)} == {*saved.sample_ids(saved.tasks[0])}
    drawn = shown.page.evaluate(
        """() => { const canvas = document.querySelector('canvas'), box = canvas.getBoundingClientRect();
        const pen = canvas.getContext('2d'), k = canvas.width / box.width;
        const at = (x, y) => pen.getImageData((x - box.left) * k, (y - box.top) * k, 1, 1).data;
        return explorer.places().map(([, x, y]) => at(x, y).slice(0, 3).join()); }"""
    )
    assert "255,255,255" not in drawn


def test_samples_move_from_model_to_model_and_from_layer_to_layer(opened: Open) -> None:
    page = opened("stage=0").page
    before = places(page)
    page.locator("#stops").get_by_role("button", name="expert", exact=True).click()
    eventually(page, "explorer.state.stage === 3")
    after = places(page)
    assert sum(before[name] != after[name] for name in before) > len(before) / 2
    page.locator("#stage").focus()
    page.keyboard.press("ArrowLeft")  # a hundredth of the way back
    eventually(page, "explorer.state.stage < 3")
    page.locator("#layer").focus()
    page.keyboard.press("Home")
    expect(page.locator("#layer-name")).to_contain_text("layer 1 of 5")
    page.locator("#play").click()
    eventually(page, "explorer.state.stage === 3")


def test_a_box_selects_everywhere_and_the_address_brings_it_back(opened: Open) -> None:
    shown = opened("panels=layers&task=1")
    page = shown.page
    assert page.locator("canvas").count() == 5
    inside = box_left_half(page)
    assert sorted(selected(page)) == sorted(inside)
    expect(page.locator("#selected h2")).to_contain_text(f"{len(inside)} of 40")
    page.get_by_label("Name of this selection").fill("left")
    page.get_by_label("Name of this selection").press("Tab")
    page.get_by_role("button", name="Keep").click()
    eventually(page, "location.hash.includes('selected=') && location.hash.includes('kept=')")
    page.reload()
    assert sorted(selected(page)) == sorted(inside)
    page.locator("#clear").click()
    assert len(selected(page)) == 40
    page.get_by_role("button", name="left", exact=True).click()
    assert sorted(selected(page)) == sorted(inside) and shown.said == []


def test_numbers_of_a_selection_are_those_of_the_tables(opened: Open, saved: DriftRun) -> None:
    page = opened("task=1").page
    task, inside = saved.tasks[1], box_left_half(page)
    rows = page.locator("#selected table").first.locator("tbody tr")
    told = {cells[0]: cells[1:] for cells in (row.locator("td").all_inner_texts() for row in rows.all())}
    for variant in ("base", "merged", "calibrated:featcal"):
        answers = saved.outputs(task, variant).set_index("sample_id").loc[inside]
        drifts = saved.samples(task, variant, "final").set_index("sample_id").loc[inside, "drift_l2"]
        name = variant.removeprefix("calibrated:")
        assert told[name][0].startswith(f"{100 * (answers['pred'] == answers['label']).mean():.1f} %")
        assert float(told[name][1].partition(" ")[0]) == pytest.approx(drifts.mean(), rel=5e-3)
    page.get_by_text("Explain this selection").click()
    mismatch = saved.samples(task, "merged").query("sample_id in @inside").groupby("layer")["mismatch_l2"].mean()
    cells = page.locator(".explain tbody tr td:nth-child(2)")
    expect(cells).to_have_count(len(mismatch))
    assert [float(cell) for cell in cells.all_inner_texts()] == pytest.approx(mismatch.tolist(), rel=5e-3)


def test_chips_search_and_histograms_filter_and_all_pages_are_reached(opened: Open, saved: DriftRun) -> None:
    page, task = opened("task=1").page, saved.tasks[1]
    became = sample_outcomes(saved, task, "merged", "calibrated:featcal")["outcome"]
    name = str(became.value_counts().index[0])
    page.locator(f"[data-outcome='{name}']").click()
    assert sorted(selected(page)) == sorted(became.index[became == name])
    page.get_by_role("button", name="Show all").click()
    cards: list[str] = []
    for _ in range(2):
        cards += page.locator("[data-sample]").evaluate_all("cards => cards.map(card => card.dataset.sample)")
        if page.locator("#on").is_enabled():
            page.locator("#on").click()
    assert sorted(cards) == sorted(saved.sample_ids(task))
    page.get_by_label("Search").fill("Sentence number07")
    assert selected(page) == [saved.sample_ids(task)[7]]
    page.get_by_label("Search").fill("")
    drifts = saved.samples(task, "merged", "final").set_index("sample_id")["drift_l2"]
    page.get_by_label("drift from").fill(str(drifts.median()))
    page.get_by_label("drift from").press("Tab")
    assert sorted(selected(page)) == sorted(drifts.index[drifts >= drifts.median()])


def test_a_range_means_the_model_that_is_shown(opened: Open, saved: DriftRun) -> None:
    page, task = opened("task=1&stage=1").page, saved.tasks[1]
    drifts = {
        name: saved.samples(task, variant, "final").set_index("sample_id")["drift_l2"]
        for name, variant in (("merged", "merged"), ("featcal", "calibrated:featcal"))
    }
    least = 0.999 * drifts["merged"].min()
    page.get_by_label("drift from").fill(str(least))
    page.get_by_label("drift from").press("Tab")
    for name, stage in (("featcal", 2), ("merged", 1)):
        page.locator("#stops").get_by_role("button", name=name, exact=True).click()
        eventually(page, f"explorer.state.stage === {stage}")
        wanted = drifts[name].index[drifts[name] >= least]
        assert (len(wanted) == len(drifts[name])) == (name == "merged")
        eventually(page, f"explorer.selected().length === {len(wanted)}")
        assert sorted(selected(page)) == sorted(wanted)


def test_the_keyboard_alone_reaches_a_sample_its_neighbours_and_the_table(opened: Open) -> None:
    page = opened().page
    page.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    first = page.locator("#live").inner_text()
    page.keyboard.press("ArrowLeft")
    assert first and page.locator("#live").inner_text() not in ("", first)
    page.keyboard.press("Enter")
    expect(page.locator("#detail h2")).to_contain_text("Sample")
    assert page.locator("#detail .near").count() == 4 and page.locator(".neighbour").count() == 4 * 8
    stages = ["base", "merged", "featcal"]  # a line each through all layers, which its table has as numbers
    assert sorted(page.locator("#detail .lines text").all_text_contents()[-3:]) == sorted(stages)
    assert page.locator("#detail .lines path:not(.axis)").count() == len(stages)
    page.keyboard.press("Space")
    assert len(selected(page)) == 1
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()
    page.locator("#as").select_option("table")
    assert page.locator("#cards table tbody tr").count() == 24


def test_a_box_is_drawn_by_keys_and_adds_and_takes_away(opened: Open) -> None:
    page = opened().page
    page.locator("canvas").focus()
    x, y = page.evaluate(
        "(() => { const box = document.querySelector('canvas').getBoundingClientRect(); "
        "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
    )
    quarter = {name for name, (left, top) in places(page).items() if left > x and top > y}
    below = {name for name, (_, top) in places(page).items() if top > y}
    right, down = ["Shift+ArrowRight"] * 20, ["Shift+ArrowDown"] * 8
    for key in ("b", "Enter", *right, *down, "Enter"):
        page.keyboard.press(key)
    assert quarter and {*selected(page)} == quarter
    expect(page.locator("#live")).to_have_text(f"{len(quarter)} selected")
    for key in ("b", "Enter", *["Shift+ArrowLeft"] * 20, *down, "Shift+Enter"):
        page.keyboard.press(key)
    assert {*selected(page)} == below > quarter
    for key in ("b", "Enter", *right, *down, "Alt+Enter", "b", "ArrowLeft", "Escape"):
        page.keyboard.press(key)
    assert {*selected(page)} == below - quarter and page.evaluate("explorer.panels()[0].rod") is None
    page.get_by_text("Help", exact=True).click()
    expect(page.locator("#help")).to_contain_text("begins a box")


def test_what_merge_and_repair_changed_stands_side_by_side(opened: Open, saved: DriftRun) -> None:
    page = opened("as=groups").page
    task = saved.tasks[page.evaluate("explorer.state.task")]
    became = sample_outcomes(saved, task, "merged", "calibrated:featcal")["outcome"]
    counts = {
        name: count for name, count in became.value_counts().items() if name in ("repaired", "still wrong", "broken")
    }
    shown = page.locator(".groups section")
    assert shown.count() == len(counts) > 0
    for group in shown.all():
        name = group.get_attribute("data-outcome")
        assert group.locator("h3").inner_text() == f"{OUTCOMES[name].removesuffix('.')} ({counts[name]})"
        cards = group.locator(".card").evaluate_all("cards => cards.map(card => card.dataset.sample)")
        assert len(cards) == min(8, counts[name]) and {*cards} <= {*became.index[became == name]}
    expect(page.locator("#wall-title")).to_have_text(f"{sum(counts.values())} of 40 samples")


def test_a_model_without_stored_features_is_named(opened: Open, page: Any, tmp_path: Path) -> None:
    run = open_run(write_full_run(tmp_path / "run", tasks=("cars",), size=Size(blocks=1, samples=6, width=4, tests=8)))
    for file in (run.path / "features" / "cars" / "base").glob("*.npy"):
        file.unlink()
        del run.manifest.files[str(file.relative_to(run.path))]
    opened("stage=0", Explorer(run).save(tmp_path / "page.html"))
    expect(page.locator("figcaption")).to_contain_text("not stored here, drawn is merged")
    assert len(places(page)) == 6


def test_a_selection_is_handed_out(opened: Open, saved: DriftRun) -> None:
    page = opened("task=1").page
    inside = box_left_half(page)
    files = {}
    for kind in ("CSV", "JSON"):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=kind).click()
        files[kind] = Path(waiting.value.path()).read_text(encoding="utf-8")
    told = json.loads(files["JSON"])
    assert told["run"] == saved.id and [row["sample_id"] for row in told["samples"]] == inside
    assert [line.split(",")[1].strip('"') for line in files["CSV"].splitlines()[1:]] == inside


@pytest.mark.parametrize("as_frame", [False, True], ids=["file", "notebook"])
def test_hostile_names_run_nothing(opened: Open, page: Any, tmp_path: Path, as_frame: bool) -> None:
    size = Size(blocks=1, samples=8, width=4, tests=8)
    made = write_full_run(tmp_path / "run", name=EVIL[0], tasks=EVIL, class_names=EVIL, size=size)
    (made / "thumbs").mkdir()
    run = open_run(made)
    texts = dict.fromkeys(run.sample_ids(EVIL[0]), "".join(EVIL))
    (made / texts_file(EVIL[0])).write_text(json.dumps(texts), encoding="utf-8")
    if as_frame:
        path = tmp_path / "notebook.html"
        path.write_text(Explorer(run)._repr_html_(), encoding="utf-8")
        shown = Opened(page, path)
        frame = page.frames[1]
    else:
        told = explorer_data(run)
        told["ids"] = [EVIL[at % 3] + str(at) for at in range(len(told["ids"]))]
        told["layers"] = told["sentences"] = told["notes"] = [*EVIL]
        told["stages"] = [stage | {"title": "".join(EVIL)} for stage in told["stages"]]
        (tmp_path / "page.html").write_bytes(explorer_page(told))
        shown = opened("task=0", tmp_path / "page.html")
        frame = page.main_frame
    frame.locator(".card").first.click()
    expect(frame.locator("#detail h2")).to_contain_text("Sample")
    assert EVIL[0] in frame.locator(".card .text").first.inner_text()
    for what in ("table", "groups", "cards"):
        frame.locator("#as").select_option(what)
    if not as_frame:
        with page.expect_download() as waiting:
            page.get_by_role("button", name="CSV").click()
        cells = Path(waiting.value.path()).read_text(encoding="utf-8").split(",")
        assert any(EVIL[2] in cell for cell in cells)
        assert not [cell for cell in cells if cell.strip('"').startswith(("=", "+", "@"))]
    assert "ran" not in (page.title(), frame.evaluate("document.title")) and frame.locator("img").count() == 0
    assert shown.said == [] and not [name for name in shown.asked if name.startswith("http")]


@pytest.mark.parametrize("width", [420, 1440])
def test_the_page_is_never_wider_than_the_window(opened: Open, page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    opened("panels=tasks&as=table&picked=3")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def on_map(page: Any) -> tuple[float, float, dict[str, float]]:
    """The middle of the first map, and its box."""
    box = page.locator("canvas").first.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, box


def test_the_map_fills_the_window_and_the_cards_are_in_a_drawer(opened: Open, page: Any) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    opened()
    assert page.evaluate("document.documentElement.scrollHeight") <= 900
    _, _, box = on_map(page)
    assert box["height"] >= 0.6 * 900 and box["width"] >= 0.6 * 1440
    drawer = page.locator("#drawer").bounding_box()
    assert drawer["x"] >= box["x"] + box["width"] and drawer["height"] == 900
    assert page.locator("#drawer .card").count() > 0
    page.get_by_role("button", name="Hide cards").click()
    eventually(page, "document.querySelector('canvas').getBoundingClientRect().width > 1350")
    expect(page.locator("#drawer")).to_be_hidden()
    page.get_by_role("button", name="Show cards").click()
    expect(page.locator("#drawer")).to_be_visible()


def zoom(page: Any) -> float:
    return float(page.evaluate("explorer.panels()[0].zoom"))


def zoomed_to(page: Any, expected: float) -> None:
    """Wait until the first map has this zoom and has drawn it: a frame moves the points that `places` tells."""
    eventually(page, f"Math.abs(explorer.panels()[0].zoom / {expected} - 1) < 1e-6")
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def test_the_wheel_zooms_where_it_turns_and_a_double_click_keeps_the_selection(opened: Open) -> None:
    page = opened("task=0").page
    inside = box_left_half(page)
    x, y, _ = on_map(page)
    page.mouse.move(x + 120, y + 60)
    before, whole = places(page), zoom(page)
    page.mouse.wheel(0, -240)
    by = np.exp(240 / 400)
    zoomed_to(page, by * whole)
    after = places(page)
    for name, (left, top) in before.items():
        assert after[name] == pytest.approx((x + 120 + by * (left - x - 120), y + 60 + by * (top - y - 60)), abs=1)
    page.mouse.dblclick(x, y)
    zoomed_to(page, 2 * by * whole)
    assert sorted(selected(page)) == sorted(inside)
    page.locator("#whole").click()
    zoomed_to(page, whole)
    assert places(page) == {name: pytest.approx(place, abs=1) for name, place in before.items()}


def test_a_moved_map_opens_no_sample_and_a_shaky_click_selects_none(opened: Open) -> None:
    page = opened("task=0").page
    inside = box_left_half(page)
    page.get_by_role("radio", name="lasso").check()
    x, y, _ = on_map(page)
    page.mouse.move(x, y)
    page.mouse.down()
    for at in range(12):  # as a hand does that is not still
        page.mouse.move(x + at % 2, y)
    page.mouse.up()
    assert sorted(selected(page)) == sorted(inside)
    page.keyboard.press("Escape")
    name, (left, top) = next(iter(places(page).items()))
    page.get_by_role("radio", name="move").check()
    page.mouse.move(left - 50, top)
    page.mouse.down()
    page.mouse.move(left - 30, top, steps=4)
    page.mouse.up()
    eventually(page, f"Math.abs(explorer.places().find(([name]) => name === '{name}')[1] - {left + 20}) < 1")
    page.mouse.move(left + 20, top)
    page.mouse.down()
    page.mouse.move(left + 40, top, steps=4)
    page.mouse.up()
    expect(page.locator("#detail")).to_be_hidden()
    page.mouse.click(left + 40, top)
    expect(page.locator("#detail h2")).to_contain_text("Sample")


def test_clusters_have_the_names_of_classes_or_of_frequent_words(opened: Open, page: Any, saved: DriftRun) -> None:
    opened("task=0")
    labels = saved.outputs(saved.tasks[0], "merged")["label"]
    counts = labels.value_counts()
    shown = page.evaluate("explorer.labels().map(label => [label.text, label.n])")
    assert dict(shown) == {str(name): int(n) for name, n in counts.items() if n >= 4} != {}
    page.locator("#names").uncheck()
    told = explorer_data(saved)
    told["words"], told["columns"]["label"] = [], explorer_data(saved)["columns"]["label"]
    unlabelled = base64.b64encode(np.full(len(told["ids"]), -1, "<i4").tobytes()).decode()
    told["columns"]["label"] = unlabelled
    told["texts"] = [f"sample about {'summer' if at % 2 else 'winter'}" for at in range(len(told["ids"]))]
    path = saved.path.parent / "words.html"
    path.write_bytes(explorer_page(told))
    opened("task=0", path)
    words = page.evaluate("explorer.labels().map(label => label.text)")
    assert words and all("summer" in text or "winter" in text for text in words)


def test_models_stand_side_by_side_with_one_selection(opened: Open, saved: DriftRun) -> None:
    page = opened("panels=models&task=1").page
    stages = ["base", "merged", "featcal", "expert"]
    captions = page.locator("figcaption").all_inner_texts()
    assert len(captions) == len(stages) and all(name in text for name, text in zip(stages, captions, strict=True))
    found = [places(page, at) for at in range(len(stages))]
    assert all({*other} == {*found[0]} for other in found)
    inside = box_left_half(page)
    assert sorted(selected(page)) == sorted(inside)
    shown = page.evaluate("explorer.panels().map(panel => panel.stage)")
    assert shown == [0, 1, 2, 3]
    task = saved.tasks[1]
    page.locator("#colour").select_option("right")  # each panel by the answers of its own model
    page.wait_for_timeout(100)
    for text, variant in zip(page.locator("figcaption").all_inner_texts(), ("base", "merged"), strict=False):
        answers = saved.outputs(task, variant)
        assert f"{int((answers['pred'] == answers['label']).sum())} of 40 right" in text


def test_the_columns_that_separate_a_selection_are_ranked(opened: Open, saved: DriftRun) -> None:
    page, task = opened("task=1").page, saved.tasks[1]
    drifts = saved.samples(task, "merged", "final").set_index("sample_id")["drift_l2"]
    page.locator("summary", has_text="drift at").first.scroll_into_view_if_needed()
    high = drifts.nlargest(15).index
    ids = saved.sample_ids(task)
    start = page.evaluate("explorer.panels()[0].start")
    page.evaluate("list => explorer.choose(list)", [start + ids.index(name) for name in high])
    found = page.evaluate("explorer.separating()")
    best = found[0]
    assert best["key"] == "drift" and (best["here"], best["there"]) == (1, 0)
    gaps = [abs(row["here"] - row["there"]) for row in found]
    assert gaps == sorted(gaps, reverse=True)
    # By chance alone, a difference of this size comes up in 5 % of selections: Massart's bound.
    assert min(gaps) > np.sqrt(np.log(2 / 0.05) / 2) * np.sqrt(40 / (15 * 25))
    rows = page.locator(".common tbody tr")
    expect(rows).to_have_count(len(found))
    rows.first.get_by_role("button").click()
    assert page.evaluate("explorer.state.colour") == "drift"


def test_every_column_has_a_histogram(opened: Open) -> None:
    page = opened("task=1").page
    names = page.locator("#colour option").evaluate_all("all => all.map(each => each.textContent)")
    titles = page.locator("#histograms > details > summary").all_inner_texts()
    assert len(names) == len(titles) >= 10
    assert all(title.startswith(name) for name, title in zip(names, titles, strict=True))


def test_many_samples_are_thinned_while_they_move_and_the_page_says_so(opened: Open, saved: DriftRun) -> None:
    told = explorer_data(saved, ViewRequest(tasks=(saved.tasks[0],)))
    n, many = len(told["ids"]), 100_000 // len(told["ids"])
    told["ids"] = [f"{name}-{copy}" for copy in range(many) for name in told["ids"]]
    told["texts"], told["tasks"][0]["n"] = [""] * (n * many), n * many

    def repeat(text: str, kind: str, rows: int, width: int = 1) -> str:
        values = np.frombuffer(base64.b64decode(text), kind).reshape(rows, n * width)
        return base64.b64encode(np.tile(values, (1, many)).tobytes()).decode()

    columns, stages, layers = told["columns"], len(told["stages"]), len(told["layers"])
    for name, kind, rows in (
        ("label", "<i4", 1),
        ("answers", "<i4", stages),
        ("right", "i1", stages),
        ("confidence", "<f4", stages),
        ("margin", "<f4", 1),
    ):
        columns[name] = repeat(columns[name], kind, rows)
    for name in ("drift", "mismatch", "propagation", "share"):
        columns[name] = repeat(columns[name], "<f4", stages * layers)
    columns["outcome"] = {name: repeat(text, "i1", 1) for name, text in columns["outcome"].items()}
    told["pictures"]["places"] = repeat(told["pictures"]["places"], "<i4", 1)
    for plane in told["planes"][0]:
        plane["places"] = repeat(plane["places"], "<i2", len(plane["stages"]), 2)
        plane["neighbours"] = repeat(plane["neighbours"], "<i2", len(plane["stages"]), 8)
    path = saved.path.parent / "many.html"
    path.write_bytes(explorer_page(told))
    page = opened("stage=0", path).page
    assert len(page.evaluate("explorer.places()")) == n * many >= 99_000
    page.emulate_media(reduced_motion="no-preference")
    page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": 8})  # as on a slow machine
    page.locator("#play").click()
    eventually(page, "explorer.stride() > 1")
    expect(page.locator("#thinned")).to_have_text(re.compile("While it moves, one of [0-9]+ samples is drawn."))
    eventually(page, "explorer.state.stage === 3 && explorer.stride() === 1")
    expect(page.locator("#thinned")).to_be_empty()
