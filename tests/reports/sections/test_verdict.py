"""The verdict against means taken another way, and the words it chooses."""

from __future__ import annotations

import pathlib

import pytest

from driftlens.base.intervals import mean_over_tasks
from driftlens.findings.features import drift_changes
from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.build import Report
from driftlens_reports.content import Change
from tests.records.full_run import write_full_run
from tests.records.spoiling import spoil
from tests.reports.conftest import SMALL

CONTROL, AFTER = "baseline:featcal-anchor", "calibrated:featcal"
COLUMNS = {"final drift": "drift_l2_mean", "relative drift": "drift_rel", "cosine to the expert": "cos_mean"}


def changes(run: DriftRun) -> dict[str, Change]:
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
        [
            drift_changes(full, full, task, ("merged", AFTER), column="cos")[last].difference
            for task in full.tasks
        ]
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


def test_a_task_that_was_not_measured_counts_in_no_mean(full: DriftRun, tmp_path: pathlib.Path) -> None:
    write_full_run(tmp_path / "run", size=SMALL)
    key = ["mnist", AFTER, len(full.manifest.layers)]
    at = full.layers().index[(full.layers()[["task", "variant", "layer"]] == key).all(axis=1)]
    spoil(tmp_path / "run", "layers", int(at[0]), "drift_l2_mean", None)
    run = open_run(tmp_path / "run")
    change = changes(run)["final drift"]
    kept = [run.value("drift_l2_mean", task=task) for task in ("cars", "dtd")]
    assert change.num_tasks == 2
    assert change.before.value == pytest.approx(sum(kept) / 2)


def test_without_a_calibration_there_is_no_after(tmp_path: pathlib.Path) -> None:
    plain = open_run(write_full_run(tmp_path / "run", variants=("base", "merged"), size=SMALL))
    verdict = Report(plain, "summary").content.verdict
    assert (verdict.before, verdict.control, verdict.after) == ("merged", None, None)
    assert all(change.after is change.change is None for change in verdict.changes)
    assert "driftlens calibrate" in verdict.command and verdict.gaps[0].against == "expert"


def test_an_empty_run_has_no_verdict(tmp_path: pathlib.Path) -> None:
    only_base = open_run(write_full_run(tmp_path / "run", variants=("base",), size=SMALL))
    verdict = Report(only_base, "summary").content.verdict
    assert verdict.changes == () and verdict.worst_task is None
    assert verdict.sentences[0] == "Nothing was measured that a verdict could rest on."
