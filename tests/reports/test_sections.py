"""What a report consists of: sections in order, figures with their numbers, stamps, checks, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import driftlens as dl
from driftlens.results.formatting import Table
from driftlens.results.measures import drift_changes
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import SpecError
from driftlens.utils.intervals import mean_over_tasks
from driftlens_reports.build import Report
from driftlens_reports.charts.chart import ChartOptions, RunCharts, charts
from driftlens_reports.content import MeasureChange, ReportContent
from driftlens_reports.sections import PRESETS, TITLES, section_charts
from tests.reports.conftest import SMALL
from tests.reports.paper.saved_runs import figure_run
from tests.runs.full_run import write_full_run
from tests.runs.spoiling import spoil

ORDER = [
    *("verdict", "setup", "layers", "decomposition", "origins", "cosine", "parameters"),
    *("outputs", "calibration", "checks", "caveats", "glossary", "environment"),
]


def frame(table: Table) -> pd.DataFrame:
    return pd.DataFrame(list(table.rows), columns=[column.name for column in table.columns])


def sentences(content: ReportContent, section: str) -> list[str]:
    return [text for entry in content.sections if entry.name == section for text in entry.sentences]


def test_sections_come_in_the_order_of_the_design(standard: Report) -> None:
    assert list(TITLES) == [section.name for section in standard.content.sections] == ORDER


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_sections_and_charts_exist(name: str) -> None:
    assert set(PRESETS[name]) <= set(ORDER)
    assert any(section_charts(section, name) for section in PRESETS[name])


@pytest.mark.slow
def test_a_figures_data_is_what_its_chart_plots(full: DriftRun, standard: Report) -> None:
    for figure in standard.content.figures:
        plotted = charts[figure.name].draw(full).data
        assert figure.data is not None
        assert list(plotted.columns) == [column.name for column in figure.data.columns]
        expected = [[None if pd.isna(cell) else cell for cell in row] for row in plotted.to_numpy(dtype=object)]
        assert [list(row) for row in figure.data.rows] == expected


@pytest.mark.slow
def test_every_chart_is_in_the_full_report(everything: Report) -> None:
    assert {figure.name for figure in everything.content.figures} == {*charts}


def test_a_figure_that_can_not_be_drawn_names_the_command_that_helps(bare: DriftRun) -> None:
    content = Report(bare).content
    accuracy = next(figure for figure in content.figures if figure.name == "accuracy")
    assert accuracy.data is None and "driftlens analyze" in accuracy.missing
    assert accuracy.title in " ".join(sentences(content, "caveats"))


@pytest.mark.slow
def test_synthetic_runs_and_shared_samples_are_stamped(tmp_path: Path) -> None:
    folder = write_full_run(tmp_path / "run", synthetic=True, size=SMALL)
    with RunWriter.resume(folder) as writer:
        writer.notice("task cars: calibration and diagnosis draw from the same 8 samples")
    stamps = Report(open_run(folder), sections=["verdict"]).content.stamps
    assert any(text.startswith("Synthetic demo") for text in stamps)
    assert any("calibration and diagnosis draw from the same" in text for text in stamps)


def test_the_users_checks_stand_beside_the_self_checks(full: DriftRun) -> None:
    checks = {"checks": [{"metric": "cos_mean", "where": {"layer": "final"}, "gte": 2, "name": "too much"}]}
    content = Report(full, "summary", checks=checks).content
    section = next(section for section in content.sections if section.name == "checks")
    own = {table.name: frame(table) for table in section.tables}
    assert list(own["checks"]["status"]) == ["fail"]
    assert set(own) == {"self-checks", "checks"}
    assert section.sentences[-1] == "0 of 1 checks holds; 1 failed."


@pytest.mark.slow
def test_a_calibration_on_record_has_its_settings_and_its_before_and_after(tmp_path: Path) -> None:
    run = figure_run(tmp_path / "run", size=SMALL)
    content = Report(run, "calibration").content
    tables = {table.name: frame(table) for table in content.tables}
    assert dict(zip(*(tables["calibration-settings"][name] for name in ("setting", "value")), strict=True)) == {
        **{"lam": "0.05", "rho": "2.0", "alpha": "0.3"}
    }
    rows = tables["before-after-featcal"]
    merged = rows[(rows["task"] == "cars") & (rows["model"] == "merged")]
    assert merged["L2 drift"].item() == run.value("drift_l2_mean", task="cars")
    assert "featcal, anchor only" in rows["model"].tolist()


def test_a_remainder_is_a_caveat_with_its_size(standard: Report) -> None:
    assert "Up to 2.0 %" in " ".join(sentences(standard.content, "caveats"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "standart"}, "no preset 'standart'"),
        ({"sections": ["layer"]}, "no section 'layer'"),
        ({"sections": []}, "no section is chosen"),
    ],
    ids=["preset", "section", "none"],
)
def test_what_does_not_exist_is_refused_before_anything_is_read(
    options: dict[str, object], message: str, full: DriftRun
) -> None:
    with pytest.raises(SpecError, match=message):
        Report(full, **options)  # type: ignore[arg-type]


def test_sections_are_chosen_in_reading_order_whatever_the_order_asked_for(full: DriftRun) -> None:
    content = Report(full, sections=["checks", "layers"]).content
    assert [section.name for section in content.sections] == ["layers", "checks"]


CONTROL, AFTER = "baseline:featcal-anchor", "calibrated:featcal"
COLUMNS = {"final drift": "drift_l2_mean", "relative drift": "drift_rel", "cosine to the expert": "cos_mean"}


def changes(run: DriftRun) -> dict[str, MeasureChange]:
    return {change.measure: change for change in Report(run, "summary").content.verdict.changes}


def test_means_before_and_after_are_those_of_the_last_layers_rows(full: DriftRun) -> None:
    rows = full.layers()
    last = rows[rows["layer"] == rows["layer"].max()].groupby("variant").mean(numeric_only=True)
    found = changes(full)
    for measure, column in COLUMNS.items():
        change = found[measure]
        for estimate, variant in (
            (change.before, "merged"),
            (change.control, CONTROL),
            (change.after, AFTER),
        ):
            assert estimate.value == pytest.approx(last.loc[variant, column], rel=1e-12)
            assert estimate.low < estimate.value < estimate.high
            assert estimate.n == SMALL.samples * len(full.tasks)


def test_mean_accuracy_is_that_of_the_accuracy_table(full: DriftRun) -> None:
    means = full.accuracy().groupby("variant")["value"].mean()
    change = changes(full)["accuracy"]
    assert (change.before.value, change.after.value) == pytest.approx((means["merged"], means[AFTER]))
    assert change.after.n == SMALL.tests * len(full.tasks)


def test_changes_of_means_over_tasks_have_the_intervals_of_their_strata(full: DriftRun) -> None:
    last, found = full.layer_index("final"), changes(full)
    drift = mean_over_tasks(
        [drift_changes(full, full, task, ("merged", AFTER))[last].difference for task in full.tasks]
    )
    of_drift, of_accuracy = found["final drift"].change, found["accuracy"].change
    assert (of_drift.low, of_drift.high) == pytest.approx((drift.low, drift.high))
    assert of_drift.value == pytest.approx(drift.value)
    assert of_accuracy.low < of_accuracy.value < of_accuracy.high
    cosine = mean_over_tasks(
        [drift_changes(full, full, task, ("merged", AFTER), column="cos")[last].difference for task in full.tasks]
    )
    of_cosine = found["cosine to the expert"].change
    assert (of_cosine.low, of_cosine.high) == pytest.approx((cosine.low, cosine.high))


def test_the_anchor_alone_is_a_row_of_the_means_and_in_no_sentence(full: DriftRun) -> None:
    content = Report(full, "summary").content
    (table,) = [table for table in content.tables if table.name == "verdict"]
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    for change in content.verdict.changes:
        at = change.control
        assert rows[change.measure, "featcal, anchor only"] == (at.value, at.low, at.high, 3, at.n)
        assert rows[change.measure, "change"][0] == pytest.approx(change.after.value - change.before.value)
    assert not any("anchor" in text or "rescaling" in text for text in content.verdict.sentences)


def test_the_worst_task_is_that_of_the_largest_relative_drift_after(full: DriftRun) -> None:
    verdict = Report(full, "summary").content.verdict
    final = full.layers(variant=AFTER, layer="final").set_index("task")["drift_rel"]
    assert (verdict.worst_task, verdict.worst_drift) == (final.idxmax(), final.max())


def test_a_task_that_was_not_measured_counts_in_no_mean(full: DriftRun, tmp_path: Path) -> None:
    write_full_run(tmp_path / "run", size=SMALL)
    key = ["mnist", AFTER, len(full.manifest.layers)]
    at = full.layers().index[(full.layers()[["task", "variant", "layer"]] == key).all(axis=1)]
    spoil(tmp_path / "run", "layers", int(at[0]), "drift_l2_mean", None)
    run = open_run(tmp_path / "run")
    change = changes(run)["final drift"]
    kept = [run.value("drift_l2_mean", task=task) for task in ("cars", "dtd")]
    assert change.num_tasks == 2
    assert change.before.value == pytest.approx(sum(kept) / 2)


def test_without_a_calibration_there_is_no_after(tmp_path: Path) -> None:
    plain = open_run(write_full_run(tmp_path / "run", variants=("base", "merged"), size=SMALL))
    verdict = Report(plain, "summary").content.verdict
    assert (verdict.before, verdict.control, verdict.after) == ("merged", None, None)
    assert all(change.after is change.change is None for change in verdict.changes)
    assert "driftlens merge" in verdict.command and verdict.gaps[0].against == "expert"


def test_an_empty_run_has_no_verdict(tmp_path: Path) -> None:
    only_base = open_run(write_full_run(tmp_path / "run", variants=("base",), size=SMALL))
    verdict = Report(only_base, "summary").content.verdict
    assert verdict.changes == () and verdict.worst_task is None
    assert verdict.sentences[0] == "No measurements to base a verdict on."


PNG = b"\x89PNG"


def test_every_chart_is_there_by_name_and_says_what_it_is(full: DriftRun) -> None:
    plots = RunCharts(full)
    assert dir(plots) == [name.replace("-", "_") for name in charts]
    for name, chart in charts.items():
        draw = getattr(plots, name.replace("-", "_"))
        assert chart.caption in draw.__doc__ and chart.hint in draw.__doc__
    lines = repr(plots).splitlines()
    assert len(lines) <= 12 and max(map(len, lines)) <= 100


def test_what_is_drawn_is_the_chart_with_the_options_given(full: DriftRun) -> None:
    drawn = dl.open_run(full.path).plot.layer_drift(tasks=["cars"], relative=True)
    same = charts["layer-drift"].draw(full, ChartOptions(tasks=["cars"], relative=True))
    assert drawn.figure == same.figure and drawn.data.equals(same.data) and set(drawn.data["task"]) == {"cars"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.io.renderers.default", "plotly_mimetype")
        said = repr(drawn)
        assert said.startswith(f"<Drawn: {drawn.alt[:30]}") and said.endswith(f" {len(drawn.data)} rows>")
        assert len(said) < 100 < len(drawn.alt)
        assert "application/vnd.plotly.v1+json" in drawn._repr_mimebundle_()


@pytest.mark.slow
def test_what_a_notebook_is_handed_shows_itself(full: DriftRun) -> None:
    figure, table = dl.paper.figure("decomposition", full), dl.paper.table("accuracy", full)
    assert repr(figure).startswith(f"<Artifact decomposition of {full.id}, ") and len(repr(figure)) < 100
    assert (figure._repr_png_() or b"").startswith(PNG) and figure._repr_html_() is None
    assert table._repr_png_() is None and "<table" in (table._repr_html_() or "")
    page = dl.Report(full, "summary")._repr_html_()
    assert page.startswith("<iframe srcdoc=") and page.count('"') == 8, "nothing of the page ends its frame"


def test_checks_and_comparisons_are_tables_of_what_they_hold(full: DriftRun) -> None:
    report = dl.check(full, {"checks": [{"metric": "cos_mean", "gte": 2.0, "name": "<b>too much"}]})
    shown = report._repr_html_()
    assert "<td>fail</td>" in shown and "&lt;b&gt;too much" in shown and "<td>≥ 2</td>" in shown
    found = dl.compare(full)
    shown = found._repr_html_()
    for row in found.tasks.to_dict("records"):
        assert f"<td>{row['task']}</td>" in shown and f"<td>{row['score_change']:.3g}</td>" in shown


def test_a_name_that_is_none_is_an_attribute_error_with_the_nearest(full: DriftRun) -> None:
    with pytest.raises(AttributeError, match="layer_drift"):
        _ = RunCharts(full).layer_drifts
    with pytest.raises(TypeError, match="task"):
        RunCharts(full).layer_drift(task="cars")
