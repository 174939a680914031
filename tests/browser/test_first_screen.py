"""Thirty seconds: what is wrong, how sure that is, where and what to do stand on the Overview's first screen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import expect

from driftlens.runs.layout import texts_file
from driftlens.runs.run import DriftRun, open_run
from tests.browser.reading import settled
from tests.browser.server import serving
from tests.records.full_run import write_full_run

pytestmark = pytest.mark.slow
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
        (texts.path / texts_file(task)).write_text(
            json.dumps(dict.fromkeys(texts.sample_ids(task), "Is it?"))
        )
    return root


@pytest.fixture(scope="module")
def three(browser: Any, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(runs, tmp_path_factory.mktemp("server") / "log") as address:
        yield address


@pytest.fixture
def screen(
    browser: Any, three: str, runs: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Any, DriftRun]]:
    run = open_run(runs / request.param)
    context = browser.new_context(viewport={"width": 1440, "height": FOLD})
    page = context.new_page()
    page.goto(f"{three}/overview?run={run.id}")
    expect(page.get_by_role("heading", level=1)).to_be_visible(timeout=60_000)
    settled(page)
    yield page, run
    context.close()


def told(page: Any, words: str) -> str:
    """The line with these words, which stands above the fold."""
    line = page.get_by_test_id("stMainBlockContainer").get_by_role("paragraph").filter(has_text=words).first
    expect(line).to_be_visible()
    box = line.bounding_box()
    assert box["y"] + box["height"] <= FOLD, f"{words} is below the fold"
    return str(line.inner_text()).replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("screen", ["good", "below", "texts"], indirect=True)
def test_the_first_screen_answers_what_how_sure_where_and_what_to_do(screen: tuple[Any, DriftRun]) -> None:
    page, run = screen
    rows = run.accuracy()
    means = 100 * rows.groupby("variant")["value"].mean()
    # What is wrong: every model's accuracy, and what the merge lost and won.
    first = told(page, "Accuracy (")
    for variant, called in (("base", "base"), ("expert", "experts"), ("merged", "merged")):
        assert f"{called} {means[variant]:.1f} %" in first
    lost, won = means["expert"] - means["merged"], means["merged"] - means["base"]
    found = re.match(
        r"merged: ([\d.]+) \+- ([\d.]+) points worse than experts.*; ([\d.]+) \+- ([\d.]+) (\w+) than base",
        told(page, "merged: "),
    )
    # How sure: half of a 95 % interval behind each, which does not hold zero.
    assert found is not None
    assert [float(at) for at in found.group(1, 3)] == pytest.approx([lost, abs(won)], abs=0.051)
    assert (
        found[5] == ("better" if won > 0 else "worse") == ("worse" if run.path.name == "below" else "better")
    )
    assert 0 < float(found[2]) < lost and 0 < float(found[4]) < abs(won)
    assert f"n = {int(rows[rows['variant'] == 'merged']['n'].sum())}" in first
    # Where: the layer with the largest share of the merged model's final drift, and the tasks, the worst first.
    layers = run.layers(variant="merged")
    source = layers.groupby("layer")["final_share"].mean().idxmax()
    assert run.layer_name(source) in told(page, "Largest source")
    table = page.get_by_test_id("stDataFrame").first.bounding_box()
    assert table["y"] + 3 * 35 < FOLD, "no row of the table is above the fold"
    # What to do: a command, and the button that does the same.
    assert "driftlens calibrate" in told(page, "Next: ")
    box = page.get_by_role("button", name="Repair").bounding_box()
    assert box is not None and box["y"] + box["height"] <= FOLD
    page.get_by_role("button", name="Repair").click()
    page.wait_for_url("**/repair?**")
    settled(page)
    expect(page.get_by_role("button", name="Repair with the best method")).to_be_visible()
