"""Promises that every figure keeps, over the registry: a new figure is tested without a line here."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from driftlens.runs.run import DriftRun, open_run
from driftlens.utils.errors import RunError
from driftlens_reports.paper.exhibit import PICTURES, exhibits
from tests.quick import few
from tests.reports.paper.drawn import all_numbers, draw, lines, scattered, shows, texts, words
from tests.reports.paper.saved_runs import HOSTILE, figure_run
from tests.runs.full_run import Size, write_full_run

pytestmark = pytest.mark.slow

FIGURES = [name for name, entry in exhibits.items() if entry.kind == "figure"]
PROMISED = {
    *("intro", "drift", "decomposition", "contributions", "amplification", "output-drift"),
    *("scatter-grid", "efficiency", "sweeps"),
}
WITHOUT_LAYERS = ("sweeps", "efficiency")
PRINTED = {
    "cos_mean": 2,
    "change of final drift_l2_mean": 2,
    "change of final drift_l2_mean, percent": 0,
}
"""Quantities that figures may print, with how many digits behind the point."""

SMALL = Size(blocks=1, samples=4, tests=20)

figures = pytest.mark.parametrize("name", FIGURES)
quick_figures = pytest.mark.parametrize("name", few(FIGURES, ["intro"]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    return figure_run(tmp_path_factory.mktemp("runs") / "run", name="upstream")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run without labels and without a calibration."""
    path = tmp_path_factory.mktemp("runs") / "run"
    return open_run(write_full_run(path, variants=["base", "merged"], has_labels=False))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run of one task, one block and one sample."""
    path = tmp_path_factory.mktemp("runs") / "run"
    return figure_run(path, tasks=["only"], size=Size(blocks=1, samples=1, tests=7), seeds=(1,))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run whose names would do harm wherever they were not shown letter by letter."""
    path = tmp_path_factory.mktemp("runs") / "run"
    return figure_run(path, name=HOSTILE[1], tasks=[*HOSTILE, "手写数字"], class_names=["$", "_"], size=SMALL)


def test_the_figures_of_the_paper_and_ours_are_there() -> None:
    assert set(FIGURES) == PROMISED


@figures
def test_every_recorded_number_is_drawn_or_printed(name: str, run: DriftRun) -> None:
    drawn = draw(name, run)
    numbers, said = all_numbers(drawn.figure), words(drawn.figure)
    for row in drawn.data.to_dict("records"):
        value, quantity = row["value"], row["quantity"]
        if "std over seeds" in quantity or quantity == "jacobian_error":
            continue  # drawn as ends of bars and bands; see test_figures_values
        if quantity in PRINTED and not shows(numbers, value):
            assert f"{abs(value):.{PRINTED[quantity]}f}" in said, row
        else:
            assert shows(numbers, value), row


@figures
def test_nothing_is_drawn_that_is_not_recorded(name: str, run: DriftRun) -> None:
    drawn = draw(name, run)
    recorded = np.sort(drawn.data["value"].to_numpy(dtype=float))
    for axes in drawn.figure.axes:
        for line in lines(axes):
            x, y = (np.asarray(part, float) for part in (line.get_xdata(), line.get_ydata()))
            are_recorded = [all(shows(recorded, v) for v in part[~np.isnan(part)]) for part in (x, y)]
            assert any(are_recorded), (name, line)
        for points in scattered(axes):
            assert all(shows(recorded, value) for value in points.ravel())


@figures
def test_recorded_columns_hold_what_the_tables_hold(name: str, run: DriftRun) -> None:
    data = draw(name, run).data
    checked = 0
    for row in data.to_dict("records"):
        expected = _from_table(run, row)
        if expected is not None:
            checked += 1
            assert row["value"] == pytest.approx(expected, rel=1e-12), row
    assert checked or name in WITHOUT_LAYERS


def _from_table(run: DriftRun, row: dict[str, object]) -> float | None:
    """The number that a table has under the row's key; None for what is derived."""
    quantity, task, variant, layer = (row[key] for key in ("quantity", "task", "variant", "layer"))
    if pd.notna(layer) and quantity in run.layers():
        return run.value(str(quantity), task=str(task), variant=str(variant), layer=int(str(layer)))
    if quantity == "cos" and pd.notna(row["sample_id"]):
        rows = run.samples(str(task), str(variant), "final").set_index("sample_id")
        return float(rows.loc[row["sample_id"], "cos"])
    if quantity == "cos":
        rows = run.params(str(task), str(variant))
        return float(rows.loc[rows["scope"] == "backbone", "cos"].iloc[0])
    if quantity in ("accuracy", "ci_low", "ci_high") and pd.notna(task):
        column = "value" if quantity == "accuracy" else str(quantity)
        return float(run.accuracy(str(task), str(variant))[column].iloc[0])
    if quantity in ("share certified", "share flipped"):
        return float(run.outputs(str(task), str(variant))[str(quantity).removeprefix("share ")].mean())
    return None


@figures
def test_captions_name_run_and_samples(name: str, run: DriftRun) -> None:
    caption = draw(name, run).text
    assert f"upstream ({run.id})" in caption
    if name not in WITHOUT_LAYERS:
        assert "n = 24 samples of the diagnosis split" in caption or "24 diagnosis samples" in caption


def test_a_synthetic_run_is_called_one(tmp_path: Path) -> None:
    run = open_run(write_full_run(tmp_path / "run", synthetic=True))
    # One figure per way captions are begun: of one run, and of several.
    assert all("no benchmark" in draw(name, run).text for name in ("drift", "sweeps"))


@quick_figures
def test_what_a_run_lacks_is_said_and_not_invented(name: str, bare: DriftRun) -> None:
    drawn = draw(name, bare)
    assert drawn.missing
    for panel in drawn.missing:
        assert panel.name in drawn.text and panel.missing in drawn.text
        assert "`driftlens" in panel.missing
    assert not drawn.data["value"].isna().any()
    shown = set(drawn.data["variant"].dropna())
    assert shown <= {"merged", "expert"}, shown


def test_notes_stand_on_the_figure_with_their_command(bare: DriftRun) -> None:
    said = words(draw("intro", bare).figure)
    assert "driftlens calibrate RUN --name featcal adds them" in said
    assert "driftlens analyze RUN adds it" in said and "`" not in said
    assert "driftlens sweep RUN" in words(draw("sweeps", bare).figure)


@quick_figures
def test_one_task_and_one_sample_fill_a_column(name: str, tiny: DriftRun) -> None:
    figure = draw(name, tiny, style="icml-column").figure
    assert figure.get_figwidth() == 3.25
    assert any(axes.has_data() for axes in figure.axes)


@quick_figures
def test_names_are_drawn_letter_by_letter(name: str, hostile: DriftRun) -> None:
    drawn = draw(name, hostile, task=HOSTILE[0])
    assert not any(text.get_parse_math() for text in texts(drawn.figure))
    assert "\x1b" not in drawn.text + words(drawn.figure)
    if name in ("intro", "scatter-grid", "drift", "output-drift"):
        assert "$x_1$" in words(drawn.figure)


@quick_figures
def test_drawing_again_gives_the_same_bytes(name: str, run: DriftRun) -> None:
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None, "lines.linewidth": 9}):
        other = draw(name, open_run(run.path))
        formats = PICTURES if name == "intro" else ("svg",)  # one figure in all formats: the others take no other way
        again = {file_format: other.content(file_format) for file_format in formats}
    for file_format in formats:
        assert draw(name, run).content(file_format) == again[file_format], file_format


def test_names_are_no_markup_in_files(hostile: DriftRun) -> None:
    drawn = ElementTree.fromstring(draw("intro", hostile, task=HOSTILE[1]).content("svg"))
    assert "script" not in {element.tag.rpartition("}")[2] for element in drawn.iter()}


def test_files_hold_their_fonts_and_no_date(run: DriftRun) -> None:
    pdf, svg = map(draw("intro", run).content, ("pdf", "svg"))
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf
    assert b"CreationDate" not in pdf and b"dc:date" not in svg


def test_settings_of_the_user_are_left_alone(run: DriftRun) -> None:
    before = dict(matplotlib.rcParams)
    draw("intro", open_run(run.path)).content("pdf")
    assert dict(matplotlib.rcParams) == before


def test_a_truncated_table_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = write_full_run(tmp_path / "run")
    table = path / "tables" / "layers.parquet"
    table.write_bytes(table.read_bytes()[:200])
    for name in ("intro", "drift", "decomposition"):
        with pytest.raises(RunError, match=r"layers\.parquet"):
            draw(name, open_run(path))


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run whose layer table holds no number."""
    folder = tmp_path_factory.mktemp("unmeasured") / "run"
    write_full_run(folder, size=Size(2, 8, 4, 3, 50))
    file = folder / "tables" / "layers.parquet"
    table = pq.read_table(file)
    for at, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            table = table.set_column(at, field, pa.array([math.nan] * table.num_rows, field.type))
    pq.write_table(table, file)
    return open_run(folder)


@figures
def test_a_figure_shows_no_number_that_was_not_measured(name: str, unmeasured: DriftRun) -> None:
    rows = draw(name, unmeasured).data
    of_layers = rows[rows["quantity"].isin(list(unmeasured.layers().columns))]
    assert of_layers["value"].isna().all()


def test_a_panel_without_any_drift_is_a_note(unmeasured: DriftRun) -> None:
    missing = draw("intro", unmeasured).missing
    assert "(b) drift by layer" in [panel.name for panel in missing]
