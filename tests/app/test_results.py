"""Compare, and Report & export: changes as in the tables, files as the command line writes them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from driftlens.results.compare import compare
from driftlens.results.verdict import shown_repair
from driftlens.runs.run import open_run
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import DataError, RunError
from driftlens_app.views.compare import comparison_of_task
from driftlens_app.views.export import zip_files
from driftlens_reports import build
from tests.app.conftest import Open, shown_data
from tests.app.pages import said
from tests.quick import few
from tests.runs.full_run import Size, write_full_run


@pytest.mark.parametrize("table", few(["accuracy", "outputs", "calibration"], ["outputs"]))
def test_a_damaged_table_leaves_the_files_of_a_calibration(open_app: Open, root: Path, table: str) -> None:
    folder = root / "full" / "calibrations" / "featcal"
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(b"x" * 2_000_000)
    (folder / "README.md").write_text("# card")
    file = root / "full" / "tables" / f"{table}.parquet"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    app = open_app(root, "repair")
    labels = [button.label for button in app.get("download_button")]
    assert "Calibrated checkpoint (2 MB)" in labels and "Model card" in labels
    assert app.error and all(table in element.value for element in app.error)
    assert "Drift" in said(app).splitlines()


@pytest.mark.slow
def test_a_link_brings_back_the_calibration_and_an_unknown_one_the_newest(open_app: Open, tmp_path: Path) -> None:
    write_full_run(tmp_path / "two", variants=("base", "merged", "calibrated:first", "calibrated:second"))

    def at(**query: str) -> AppTest:
        return open_app(tmp_path, "repair", **query)

    assert at().selectbox(key="calibration").value == "second"
    assert at(calibration="nosuch").selectbox(key="calibration").value == "second"
    app = at(calibration="first")
    assert app.selectbox(key="calibration").value == "first" and "Before and after first" in said(app)
    # The browser writes the choice into the URL; a default it would leave out.
    box = app.selectbox(key="calibration")
    assert box.proto.query_param_key == "calibration" and not box.proto.HasField("default")
    assert box.set_value("second").run().selectbox(key="calibration").value == "second"


@pytest.mark.slow
def test_a_pinned_calibration_has_the_headline_until_it_is_released(open_app: Open, tmp_path: Path) -> None:
    folder = write_full_run(tmp_path / "two", variants=("base", "merged", "calibrated:first", "calibrated:second"))
    best = shown_repair(open_run(folder)).removeprefix("calibrated:")
    other = {"first": "second", "second": "first"}[best]
    for wanted in (other, best):
        app = open_app(tmp_path, "repair", calibration=other)
        (switch,) = [toggle for toggle in app.toggle if toggle.label == "Pin to the headline"]
        assert switch.value == (wanted == best)
        switch.set_value(wanted == other).run()
        assert shown_repair(open_run(folder)) == f"calibrated:{wanted}"
    with pytest.raises(DataError, match="no calibration 'none'"), RunWriter.resume(folder) as writer:
        writer.pin_calibration("none")


@pytest.mark.slow
def test_one_task_of_a_comparison_can_be_chosen(open_app: Open, root: Path) -> None:
    app = open_app(root, "repair", repair="Compare", task="dtd")
    assert app.dataframe[0].value["task"].tolist() == ["dtd"]
    assert set(shown_data(app)[0]["task"]) == {"dtd"}
    with pytest.raises(DataError, match="only one of the runs has the task 'none'"):
        comparison_of_task(compare(root / "full", before="merged", after="base"), "none")


@pytest.mark.slow
def test_runs_of_other_samples_are_compared_under_a_warning_that_names_the_field(open_app: Open, root: Path) -> None:
    write_full_run(root / "other", name="other", size=Size(samples=12))
    app = open_app(root, "repair", repair="Compare", run="full")
    app.selectbox(key="with").set_value("other").run()
    (warning,) = app.warning
    assert "diagnosis samples of cars, mnist, dtd" in warning.value.replace("\\", "")
    assert not app.error and app.get("plotly_chart")


def test_a_run_with_one_model_points_to_calibration(open_app: Open, tmp_path: Path) -> None:
    write_full_run(tmp_path / "single", variants=("merged",))
    app = open_app(tmp_path, "repair", repair="Compare")
    assert "Nothing to compare" in said(app) and not app.error
    app = open_app(tmp_path, "repair")
    (head,) = [entry.proto.body for entry in app.get("html") if "headline" in entry.proto.body]
    assert "tile" in head and not app.error
    assert "driftlens sweep" not in said(app)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats without charts: a page, a folder of two files, and one that fails."""

    def fail(*_: object) -> dict[str, bytes]:
        raise RunError("a table is *damaged*", hint="run verify")

    made = {
        "html-light": lambda *_: {"report-light.html": b"<html><body>all is well</body></html>"},
        "csv": lambda *_: {"csv/layers.csv": b"task\n", "csv/layers.units.csv": b"unit\n"},
        "json": fail,
    }
    monkeypatch.setattr(build, "FORMATS", {**build.FORMATS, **made})


@pytest.mark.usefixtures("quick")
def test_a_format_that_fails_says_why_and_the_others_are_offered(open_app: Open, root: Path) -> None:
    before = sorted(root.rglob("*"))
    app = open_app(root, "export")
    app.multiselect(key="formats").set_value(["html-light", "json", "csv"])
    app.button[0].click().run()
    (error,) = app.error
    assert "a table is *damaged*" in error.value.replace("\\", "") and r"\*damaged" in error.value
    labels = [button.proto.label.replace("\\", "") for button in app.get("download_button")]
    assert [label.partition(" (")[0] for label in labels] == [
        "HTML without scripts, for mail",
        "CSV, a file per table",
    ]
    assert "Preview" in said(app) and sorted(root.rglob("*")) == before


@pytest.mark.usefixtures("quick")
def test_what_was_built_of_a_run_is_not_offered_once_the_run_has_changed(open_app: Open, root: Path) -> None:
    app = open_app(root, "export")
    app.multiselect(key="formats").set_value(["html-light"])
    app.button[0].click().run()
    assert app.get("download_button")
    manifest = root / "full" / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    app.run()
    assert not app.get("download_button") and not app.error


def test_several_files_are_one_archive_of_the_same_bytes() -> None:
    files = {"csv/layers.csv": b"task\n"}
    with zipfile.ZipFile(io.BytesIO(zip_files(files))) as archive:
        assert archive.read("csv/layers.csv") == b"task\n"
    assert zip_files(files) == zip_files(files)
