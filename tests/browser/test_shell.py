"""The shell in a real browser: numbers, links, themes, and nothing fetched from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import expect

from driftlens.results.formatting import typeset_signs
from driftlens.results.measures import findings_frame
from driftlens.results.verdict import verdict
from driftlens.runs.manifest import texts_file
from driftlens.runs.run import DriftRun, open_run
from driftlens_app.show import pages
from tests.browser.reading import choose, drawn, settled, visit
from tests.browser.server import serving
from tests.runs.full_run import Size, write_full_run

pytestmark = pytest.mark.slow
CELLS = ".st-key-chart-contributions-heatmap .yaxislayer-above .ytick text"


def test_choosing_a_task_changes_the_page_and_the_link_keeps_it(page: Any, app_url: str, runs_folder: Path) -> None:
    run = open_run(runs_folder / "merged")
    page.goto(f"{app_url}/layers?run={run.id}")
    settled(page)
    choose(page, "Task", "mnist")
    page.wait_for_url("**task=mnist**")
    visit(page, "Overview")
    origins = page.locator(CELLS)
    expect(origins).to_have_count(1, timeout=60_000)
    settled(page)
    shared = page.url
    assert "run=merged" in shared and "task=mnist" in shared
    other = page.context.browser.new_context().new_page()
    other.goto(shared)
    settled(other)
    origins = other.locator(CELLS)
    expect(origins).to_have_count(1, timeout=60_000)
    expect(origins).to_have_text("mnist")
    expect(other.get_by_role("heading", name="merged", exact=True)).to_be_visible()
    other.context.close()


def test_a_click_on_a_row_of_the_overview_chooses_its_task(page: Any, app_url: str, runs_folder: Path) -> None:
    page.goto(f"{app_url}/overview?run={open_run(runs_folder / 'merged').id}")
    table = page.get_by_test_id("stDataFrame").first.locator("canvas").first
    table.wait_for()
    settled(page)
    table.scroll_into_view_if_needed()
    settled(page)
    box = table.bounding_box()
    page.mouse.click(box["x"] + 150, box["y"] + 52)  # the first row, below the head
    page.wait_for_url("**task=*")
    settled(page)
    origins = page.locator(CELLS)
    expect(origins).to_have_count(1, timeout=60_000)


def test_names_that_are_streamlits_signs_are_text(page: Any, workshop: tuple[str, Path]) -> None:
    """Icons, its logo, narrow spaces and addresses; a joiner without width may stand in them."""
    address, root = workshop
    name = ":material/delete: :streamlit: a\N{NARROW NO-BREAK SPACE}b https://evil.example www.evil.example"
    task, folder = (
        ":material_home: :red[x] me@evil.example",
        ":material_home: a\N{NARROW NO-BREAK SPACE}b www.evil.example",
    )
    run = open_run(write_full_run(root / folder, name=name, tasks=(task,), size=Size(blocks=1)))
    for path, called in (("overview", folder), ("samples", "Samples")):
        page.goto(f"{address}/{path}?run={run.id}")
        drawn(page, page.get_by_role("heading", level=1), timeout=60_000)
        said = page.get_by_role("heading", level=1).inner_text().replace("\N{WORD JOINER}", "")
        assert said == called.replace("\N{NARROW NO-BREAK SPACE}", " ")
        assert parse_qs(urlsplit(page.url).query)["run"] == [folder.replace("\N{NARROW NO-BREAK SPACE}", " ")]
        expect(page.locator("a[href*=evil]")).to_have_count(0)
        if path == "overview":
            expect(page.get_by_test_id("stCaptionContainer").first).to_contain_text("evil.example in its spec")
    expect(page.locator("[data-testid=stMain] :is(h1, p) :is(img, [role=img])")).to_have_count(0)


def test_the_choice_survives_a_walk_through_the_pages(page: Any, app_url: str, runs_folder: Path) -> None:
    run = open_run(runs_folder / "merged")
    page.goto(f"{app_url}/overview?run={run.id}&task=dtd")
    settled(page)
    before = page.evaluate("history.length")
    for step, name in enumerate(("Repair", "Export", "Overview"), 1):
        visit(page, name)
        assert "run=merged" in page.url and "task=dtd" in page.url
        assert page.evaluate("history.length") == before + step, "one press leads back"
        if name == "Repair":  # whose part is not in the next page's address
            page.get_by_role("radiogroup", name="Part of the page").get_by_text("Compare").click()
            page.wait_for_url("**repair=Compare**")
            settled(page)
    origins = page.locator(CELLS)
    expect(origins).to_have_count(1, timeout=60_000)
    expect(origins).to_have_text("dtd")
    for name in ("Export", "Repair"):
        page.go_back()
        page.get_by_role("heading", level=1, name=name).wait_for()
        settled(page)
        assert "run=merged" in page.url and "task=dtd" in page.url
    assert "repair=Compare" in page.url


def test_layers_starts_with_the_picture_of_both_parts_and_ticked_tasks_are_its_mean(
    page: Any, app_url: str, runs_folder: Path
) -> None:
    run = open_run(runs_folder / "full")
    page.set_viewport_size({"width": 1440, "height": FOLD})
    page.goto(f"{app_url}/layers?run={run.id}")
    settled(page)
    for name in ("Path-averaged Jacobians", "Expert cosine", "Task-vector alignment"):
        expect(page.get_by_role("radiogroup", name="Part of the page").get_by_text(name)).to_be_visible()
    page.locator(".js-plotly-plot .main-svg").first.wait_for(timeout=60_000)
    assert is_on_first_screen(page.locator(".js-plotly-plot").first)
    final = "document.querySelector('.js-plotly-plot').data.filter(it => it.mode === 'markers')[0].y[0]"
    last = run.layers(variant="merged", layer="final").set_index("task")["drift_rel"].astype(float)
    assert page.evaluate(final) == pytest.approx(last.mean())
    table = page.get_by_test_id("stDataFrame").first
    box = table.locator("canvas").first.bounding_box()
    page.mouse.click(box["x"] + 15, box["y"] + 52)  # the first task, below the head
    page.wait_for_function(f"Math.abs({final} - {last[run.tasks[0]]}) < 1e-6")


def test_opening_another_part_leaves_no_step_that_shows_the_same(page: Any, app_url: str, runs_folder: Path) -> None:
    run = open_run(runs_folder / "merged")
    page.goto(f"{app_url}/layers?run={run.id}")
    settled(page)
    before = page.evaluate("history.length")
    page.get_by_role("radiogroup", name="Part of the page").get_by_text("Sources").click()
    page.wait_for_url(lambda url: "layers=Sources" in url)
    settled(page)
    assert page.evaluate("history.length") == before
    choose(page, "Task", "dtd")
    page.wait_for_url("**task=dtd**")
    assert page.evaluate("history.length") == before + 1, "what is chosen on every page is a step"


def test_nothing_is_fetched_from_elsewhere_and_the_console_stays_empty(page: Any, app_url: str) -> None:
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(app_url)
    settled(page)
    links = page.get_by_test_id("stSidebarNav").get_by_role("link")
    first, *others = [entry.title for entry in pages().values() if entry.is_listed]
    assert links.count() == 1 + len(others)
    for title in [*others, first]:
        visit(page, title)
    assert said == []
    assert [url for url in asked if not url.startswith((app_url, "data:", "blob:"))] == []


def test_a_shared_link_opens_its_page_with_an_empty_console(page: Any, app_url: str, runs_folder: Path) -> None:
    said: list[str] = []
    failed: list[str] = []
    sockets: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("response", lambda reply: failed.append(reply.url) if reply.status >= 400 else None)
    page.on("websocket", lambda socket: sockets.append(socket.url))
    name, path = "Layers", "/layers"
    choice = {"run": "merged", "task": "dtd"}

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


def test_charts_follow_the_theme_and_its_changes(browser: Any, app_url: str) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(f"{app_url}/overview")
    page.locator(".js-plotly-plot").first.wait_for(timeout=60_000)
    has_surface(page, "dark")
    for scheme in ("light", "dark"):
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


FOLD = 900
TASKS = ("cars", "dtd", "mnist", "sun", "svhn", "traffic_signs", "satellite", "faces")
VARIANTS = ("base", "merged", "calibrated:best")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good merge with a stamp above all else, one below its base that nothing repaired, and one of texts."""
    root = tmp_path_factory.mktemp("three")
    write_full_run(root / "good", tasks=TASKS, variants=VARIANTS, synthetic=True)
    below = write_full_run(root / "below", tasks=TASKS, variants=VARIANTS[:2])
    file, swapped = below / "tables" / "accuracy.parquet", {"base": "merged", "merged": "base"}
    rows = pq.read_table(file)
    at = rows.schema.get_field_index("variant")
    named = [swapped.get(name, name) for name in rows.column(at).to_pylist()]
    pq.write_table(rows.set_column(at, rows.schema.field(at), pa.array(named, pa.string())), file)
    texts = open_run(write_full_run(root / "texts", tasks=TASKS[:4], variants=VARIANTS))
    manifest = json.loads((texts.path / "manifest.json").read_text())
    manifest["architecture"] |= {"loader": "hf-decoder", "adapter": "hf_llama"}
    (texts.path / "manifest.json").write_text(json.dumps(manifest))
    for task in texts.tasks:
        (texts.path / texts_file(task)).parent.mkdir(exist_ok=True)
        (texts.path / texts_file(task)).write_text(json.dumps(dict.fromkeys(texts.sample_ids(task), "Is it?")))
    return root


@pytest.fixture(scope="module")
def three(browser: Any, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(runs, tmp_path_factory.mktemp("server") / "log") as address:
        yield address


@pytest.fixture(scope="module")
def screen(browser: Any, three: str, runs: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, DriftRun]]:
    run = open_run(runs / request.param)
    context = browser.new_context(viewport={"width": 1440, "height": FOLD})
    page = context.new_page()
    page.goto(f"{three}/overview?run={run.id}")
    expect(page.get_by_role("heading", level=1)).to_be_visible(timeout=60_000)
    settled(page)
    yield page, run
    context.close()


def is_on_first_screen(element: Any, upper: float | None = None) -> bool:
    """Whether the element, or as many pixels of it as `upper`, stands above the fold before anybody scrolls."""
    expect(element).to_be_visible()
    box = element.bounding_box()
    return bool(box["y"] + (box["height"] if upper is None else upper) <= FOLD)


def told(page: Any, words: str) -> str:
    """The line with these words."""
    line = page.get_by_test_id("stMainBlockContainer").get_by_role("paragraph").filter(has_text=words).first
    return plain(line.inner_text())


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("screen", ["good", "below", "texts"], indirect=True)
def test_the_first_screen_answers_the_questions(screen: tuple[Any, DriftRun]) -> None:
    """The ten of tests/runs/questions.md, by the findings: in pictures on the screen, in words below it."""
    page, run = screen
    judged, rows = verdict(run), findings_frame(run)
    means = rows[(rows["measure"] == "accuracy") & (rows["task"] == "")].set_index(["variant", "against"])
    value = means["value"]
    first, merged = told(page, "Accuracy ("), told(page, "merged: ")
    lost = 100 * (value["expert", ""] - value["merged", ""])
    gained = 100 * (value["merged", ""] - value["base", ""])
    change = means.loc["merged", "base"]
    half = 100 * max(change["high"] - change["value"], change["value"] - change["low"])
    assert f"{abs(lost):.1f} ± " in merged and "experts" in merged  # 1
    assert f"{abs(gained):.1f} ± {half:.1f}" in merged and " base" in merged  # 2 and 3
    assert f"({len(run.tasks)} tasks, n = {change['n']})" in first  # 3
    sentence = next(text for text in judged.sentences if text.startswith("merged: "))
    assert merged == plain_words(sentence)  # 4: with the tasks that it says agree or don't
    if run.manifest.calibrations:
        repaired = means.loc[judged.after, "merged"]["value"]
        assert f"{abs(100 * repaired):.1f} ± " in told(page, "better than merged")  # 5
    table = page.get_by_test_id("stDataFrame").first
    expect(table.locator("canvas tbody tr").first).to_be_attached()
    worst = rows[(rows["measure"] == "accuracy") & (rows["against"] == "") & (rows["task"] != "")]
    cells = table.locator("canvas tbody tr").first.all_text_contents()[0]
    task = next(name for name in sorted(run.tasks, key=len, reverse=True) if name in cells)
    scored = worst.set_index(["task", "variant"])["value"]
    assert f"{100 * scored[task, 'merged']:.1f}" in cells  # 6
    source = next(text for text in judged.sentences if text.startswith("Main source of"))
    assert told(page, "Main source of") == plain_words(source)  # 7 and 8
    assert bool(judged.bad_experts) == bool(page.get_by_text("Experts worse than base").count())  # 9
    assert is_on_first_screen(page.get_by_role("button", name="Repair"))  # 10
    for number in range(2):
        assert is_on_first_screen(page.locator(".js-plotly-plot").nth(number), 100), "the picture is below the fold"


@pytest.mark.parametrize("screen", ["good", "below", "texts"], indirect=True)
def test_the_first_screen_answers_what_how_sure_where_and_what_to_do(screen: tuple[Any, DriftRun]) -> None:
    """At the end it leaves the screen."""
    page, run = screen
    rows = run.accuracy()
    means = 100 * rows.groupby("variant")["value"].mean()
    # What is wrong: every model's accuracy, and what the merge lost and won.
    first, head = told(page, "Accuracy ("), plain(page.locator(".headline").first.inner_text())
    for variant, called in (("base", "base"), ("expert", "experts"), ("merged", "merged")):
        assert re.search(rf"{called}\s+{means[variant]:.1f} %", head)
    lost, won = means["expert"] - means["merged"], means["merged"] - means["base"]
    found = re.match(
        r"merged: ([\d.]+) ± ([\d.]+) points worse than experts.*; ([\d.]+) ± ([\d.]+) (\w+) than base",
        told(page, "merged: "),
    )
    # How sure: half of a 95 % interval behind each, which does not hold zero.
    assert found is not None
    assert [float(at) for at in found.group(1, 3)] == pytest.approx([lost, abs(won)], abs=0.051)
    assert found[5] == ("better" if won > 0 else "worse") == ("worse" if run.path.name == "below" else "better")
    assert 0 < float(found[2]) < lost and 0 < float(found[4]) < abs(won)
    assert f"n = {int(rows[rows['variant'] == 'merged']['n'].sum())}" in first
    # Where: the layer with the largest share of the merged model's final drift, and the tasks, the worst first.
    layers = run.layers(variant="merged")
    source = layers.groupby("layer")["final_share"].mean().idxmax()
    assert run.layer_name(source) in told(page, "Main source of")
    assert is_on_first_screen(page.get_by_role("img", name="accuracy on one scale"))
    # What to do: a button that leads to repairs.
    assert is_on_first_screen(page.get_by_role("button", name="Repair"))
    page.get_by_role("button", name="Repair").click()
    page.wait_for_url("**/repair?**")
    settled(page)
    expect(page.get_by_role("button", name="FeatCal calibrate")).to_be_visible()


def plain_words(sentence: str) -> str:
    """A sentence as a page shows it, with blanks for those that hold a line together."""
    return plain(typeset_signs(sentence))
