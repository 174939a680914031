"""The verdict against means taken another way, and the words it chooses."""

from __future__ import annotations

import json
import pathlib

import pytest

from driftlens.records.compare import drift_changes
from driftlens.records.intervals import mean_over_tasks
from driftlens.records.run import DriftRun, open_run
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
        assert change.before == pytest.approx(last.loc["merged", column], rel=1e-12)
        assert change.control == pytest.approx(last.loc[CONTROL, column], rel=1e-12)
        assert change.after == pytest.approx(last.loc[AFTER, column], rel=1e-12)


def test_mean_accuracy_is_that_of_the_accuracy_table(full: DriftRun) -> None:
    means = full.accuracy().groupby("variant")["value"].mean()
    change = changes(full)["accuracy"]
    assert (change.before, change.after) == pytest.approx((means["merged"], means[AFTER]))


def test_changes_of_means_over_tasks_have_the_intervals_of_their_strata(full: DriftRun) -> None:
    last, found = full.layer_index("final"), changes(full)
    drift = mean_over_tasks(
        [drift_changes(full, full, task, ("merged", AFTER))[last].difference for task in full.tasks]
    )
    of_drift, of_accuracy = found["final drift"], found["accuracy"]
    assert (of_drift.change_low, of_drift.change_high) == pytest.approx((drift.low, drift.high))
    assert of_drift.change == pytest.approx(drift.value)
    assert of_accuracy.change_low < of_accuracy.change < of_accuracy.change_high
    assert found["cosine to the expert"].change_low is None
    sentences = Report(full, "summary").content.verdict.sentences
    (said,) = (text for text in sentences if text.startswith("Mean accuracy over 3 tasks"))
    assert (
        f"95 % interval {100 * of_accuracy.change_low:+.1f} to {100 * of_accuracy.change_high:+.1f})." in said
    )


def test_rescaling_and_calibration_add_up_to_the_change(full: DriftRun) -> None:
    for change in changes(full).values():
        assert None not in (change.rescaling, change.calibration, change.change)
        assert change.rescaling + change.calibration == pytest.approx(change.change, abs=1e-12)
        assert change.change == pytest.approx(change.after - change.before, abs=1e-12)


def test_parts_of_a_change_are_told_in_the_measures_own_unit(full: DriftRun) -> None:
    sentences = Report(full, "summary").content.verdict.sentences
    found = changes(full)
    for measure, written in (
        ("accuracy", lambda value: f"{100 * value:+.1f} points"),
        ("final drift", lambda value: f"{value:+.4g} feature units"),
        ("cosine to the expert", lambda value: f"{value:+.4f}"),
    ):
        (sentence,) = (text for text in sentences if text.startswith(f"Of the change in {measure}, "))
        change = found[measure]
        assert f"(the anchor alone) makes {written(change.rescaling)} and" in sentence
        assert sentence.endswith(f"calibration {written(change.calibration)}.") and "%" not in sentence


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
    assert change.before == pytest.approx(sum(kept) / 2)
    assert "over 2 of 3 tasks" in Report(run, "summary").content.verdict.sentences[0]


def test_without_a_calibration_there_is_no_after(tmp_path: pathlib.Path) -> None:
    plain = open_run(write_full_run(tmp_path / "run", variants=("base", "merged"), size=SMALL))
    verdict = Report(plain, "summary").content.verdict
    assert (verdict.before, verdict.control, verdict.after) == ("merged", None, None)
    assert all(change.after is change.change is None for change in verdict.changes)
    assert any(text.startswith("Not calibrated:") for text in verdict.sentences)


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [(True, "none of the change is rescaling"), (False, "can't be told apart")],
    ids=["the anchor is the merged model", "nobody knows the anchor"],
)
def test_without_a_control_that_is_said(recorded: bool, expected: str, tmp_path: pathlib.Path) -> None:
    folder = write_full_run(tmp_path / "run", variants=("merged", AFTER), size=SMALL)
    if not recorded:
        file = folder / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"calibrations": {}}))
    sentences = Report(open_run(folder), "summary").content.verdict.sentences
    assert sum(expected in text for text in sentences) == 1
    assert not any("rescaling (the anchor alone)" in text for text in sentences)


def test_an_empty_run_has_no_verdict(tmp_path: pathlib.Path) -> None:
    only_base = open_run(write_full_run(tmp_path / "run", variants=("base",), size=SMALL))
    verdict = Report(only_base, "summary").content.verdict
    assert verdict.changes == () and verdict.worst_task is None
    assert verdict.sentences[0] == "Nothing was measured that a verdict could rest on."
