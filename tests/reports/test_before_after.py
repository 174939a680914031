"""A calibration's table and the sentences below it, against the rows they are made from."""

from __future__ import annotations

import pathlib
import shutil

import pandas as pd
import pytest
from scipy import stats

from driftlens.base.errors import DataError
from driftlens.findings.before_after import (
    before_after,
    calibration_document,
    calibration_sheets,
)
from driftlens.findings.features import DRIFT
from driftlens.findings.measures import mean
from driftlens.findings.verdict import verdict
from driftlens.runs.manifest import CalibrationInfo
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens_reports.terminal import before_after_text
from tests.records.full_run import write_full_run

NAME, VARIANT, CONTROL = "featcal", "calibrated:featcal", "baseline:featcal-anchor"


def calibrated_run(folder: pathlib.Path, *, control: str = CONTROL, has_labels: bool = True) -> DriftRun:
    variants = ["base", "merged", *([control] if control else []), VARIANT]
    write_full_run(folder, variants=variants, has_labels=has_labels)
    with RunWriter.resume(folder) as writer:
        info = CalibrationInfo("featcal", {"rho": 2.0}, control, 1.0, {"cars": 8})
        writer.describe(calibrations={NAME: info})
    return open_run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    return calibrated_run(tmp_path_factory.mktemp("runs") / "run")


def test_the_frame_holds_the_numbers_of_the_tables(run: DriftRun) -> None:
    rows = before_after(run, NAME).set_index(["task", "variant"])
    assert list(rows.index) == [
        (task, name) for task in run.tasks for name in ("merged", CONTROL, VARIANT, "expert")
    ]
    scores = run.accuracy().set_index(["task", "variant"])
    for (task, variant), row in rows.iterrows():
        assert row["accuracy"] == scores.loc[(task, variant), "value"]
        assert (row["low"], row["high"]) == tuple(scores.loc[(task, variant), ["ci_low", "ci_high"]])
        if variant == "expert":
            assert rows.loc[(task, variant), ["drift", "relative", "cosine"]].isna().all()
        else:
            assert row["drift"] == run.value("drift_l2_mean", task=task, variant=variant)
            final = run.layers(task, variant, "final").iloc[0]
            norms = run.samples(task, variant, "final")["drift_l2"].to_numpy(dtype=float)
            error = norms.std(ddof=1) / len(norms) ** 0.5
            assert row["drift_error"] == pytest.approx(stats.t.ppf(0.975, len(norms) - 1) * error)
            assert final["n"] == len(norms)
            assert row["cosine"] == run.value("cos_mean", task=task, variant=variant)
    assert rows["model"].unique().tolist() == ["merged", "featcal, anchor only", "featcal", "expert"]


def test_means_over_tasks_are_those_of_the_tables_and_the_anchor_alone_is_one_of_them(run: DriftRun) -> None:
    final, scores = run.layers(layer="final"), run.accuracy()
    expected = {
        "drift": final.groupby("variant")["drift_l2_mean"].mean(),
        "relative": final.groupby("variant")["drift_rel"].mean(),
        "cosine": final.groupby("variant")["cos_mean"].mean(),
        "accuracy": scores.groupby("variant")["value"].mean(),
    }
    found = {entry["measure"]: entry for entry in calibration_document(run, NAME)["means"]}
    assert set(found) == set(expected)
    for measure, entry in found.items():
        assert list(entry["means"]) == ["merged", CONTROL, VARIANT] and entry["tasks"] == run.tasks
        for variant, own in entry["means"].items():
            assert own.value == pytest.approx(expected[measure][variant], abs=1e-12)
            assert own.low < own.value < own.high
            assert own.n == len(run.tasks) * (400 if measure == "accuracy" else 24)
        change = entry["change"]
        assert change.value == pytest.approx(expected[measure][VARIANT] - expected[measure]["merged"])
        assert change.low < change.value < change.high


def test_a_mean_over_tasks_has_the_interval_of_its_tasks_samples(run: DriftRun) -> None:
    drift = mean(run, DRIFT, run.tasks, "merged")
    errors = []
    for task in run.tasks:
        norms = run.samples(task, "merged", "final")["drift_l2"].to_numpy(dtype=float)
        half = stats.t.ppf(0.975, len(norms) - 1) * norms.std(ddof=1) / len(norms) ** 0.5
        errors.append(half)
    expected = sum(error**2 for error in errors) ** 0.5 / len(errors)
    assert drift.high - drift.value == pytest.approx(expected)


def test_nothing_calls_a_part_of_the_gain_the_anchors(run: DriftRun) -> None:
    text = before_after_text(run, NAME, verbose=True)
    assert "featcal, anchor only" in text and "rescaling" not in text and "come from" not in text


def test_the_text_shows_every_task_and_its_numbers(run: DriftRun) -> None:
    text = before_after_text(run, NAME, verbose=True)
    for row in before_after(run, NAME).to_dict("records"):
        assert row["task"] in text and f"{100 * row['accuracy']:.1f} %" in text
        if row["variant"] != "expert":
            for column in ("drift", "cosine"):
                assert f"{row[column]:#.3g} +- {row[f'{column}_error']:#.2g}" in text
            assert f"{100 * row['relative']:.1f} % +- {100 * row['relative_error']:.1f} %" in text
    assert text.startswith("\n".join(verdict(run, NAME).sentences))


def test_without_a_control_there_is_no_row_of_it(tmp_path: pathlib.Path) -> None:
    run = calibrated_run(tmp_path / "run", control="")
    means = calibration_document(run, NAME)["means"]
    assert all(list(entry["means"]) == ["merged", VARIANT] for entry in means)
    assert "anchor only" not in before_after_text(run, NAME)


def test_without_labels_there_is_drift_and_no_accuracy(tmp_path: pathlib.Path) -> None:
    run = calibrated_run(tmp_path / "run", has_labels=False)
    means = calibration_document(run, NAME)["means"]
    assert [entry["measure"] for entry in means] == ["drift", "relative", "cosine"]
    assert "ccuracy" not in before_after_text(run, NAME) and "nan" not in before_after_text(run, NAME)


def with_accuracy(run: DriftRun, folder: pathlib.Path, **change: float) -> DriftRun:
    """A copy in which the calibrated model's accuracy differs by so much from the merged one's."""
    copied = pathlib.Path(shutil.copytree(run.path, folder))
    with RunWriter.resume(copied) as writer:
        for task, by in change.items():
            value = run.accuracy(task, "merged")["value"].iloc[0] + by
            rows = run.accuracy(task, VARIANT).assign(value=value)
            writer.append("accuracy", pd.DataFrame(rows), replace=True)
    return open_run(copied)


def test_a_task_that_lost_is_counted_beside_a_mean_that_rose(run: DriftRun, tmp_path: pathlib.Path) -> None:
    lost = with_accuracy(run, tmp_path / "run", cars=-0.125)
    (gap,) = [gap for gap in verdict(lost, NAME).gaps if gap.against == "merged"]
    assert gap.worse == ("cars",) and gap.better == ("mnist", "dtd")
    assert any(
        "(2 tasks better, 1 worse)" in text or "2 better, 1 worse" in text
        for text in verdict(lost, NAME).sentences
    )


def test_the_largest_weight_moves_are_the_logs(run: DriftRun) -> None:
    (sheet,) = [sheet for sheet in calibration_sheets(run, NAME) if sheet.name == f"weight-moves-{NAME}"]
    log = run.calibration(NAME).sort_values("weight_change", ascending=False, kind="stable").head(5)
    left = log["objective_after"] / log["objective_before"]
    expected = [*zip(log["site"], log["layer"], log["weight_change"], left, strict=True)]
    assert [tuple(row) for row in sheet.rows] == expected


def test_a_calibration_that_is_not_there_is_named(run: DriftRun) -> None:
    with pytest.raises(DataError, match="no calibration 'other'; it has featcal"):
        before_after_text(run, "other")
