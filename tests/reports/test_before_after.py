"""A calibration's table and the sentences below it, against the rows they are made from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from driftlens.results import measures
from driftlens.results.calibration_summary import (
    before_after_rows,
    calibration_effect_tables,
    calibration_json,
    final_drift_changes,
    score_change_note,
    score_changes,
)
from driftlens.results.compare import compare, mean_score_change
from driftlens.results.formatting import format_interval, format_p_value, format_points
from driftlens.results.measures import DRIFT, SCORE, change_on_task, mean_on_tasks
from driftlens.results.verdict import headline, headline_sentence, verdict
from driftlens.runs.manifest import CalibrationInfo
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import DataError
from driftlens.utils.intervals import (
    Interval,
    interval_p_value,
    mean_over_tasks,
    unpaired_difference,
)
from driftlens_reports.build import Report
from driftlens_reports.terminal import calibration_text, run_comparison_text
from tests.runs.full_run import Size, write_full_run

NAME, VARIANT, CONTROL = "featcal", "calibrated:featcal", "baseline:featcal-anchor"


def calibrated_run(folder: Path, *, control: str = CONTROL, has_labels: bool = True) -> DriftRun:
    variants = ["base", "merged", *([control] if control else []), VARIANT]
    write_full_run(folder, variants=variants, has_labels=has_labels)
    with RunWriter.resume(folder) as writer:
        info = CalibrationInfo("featcal", {"rho": 2.0}, control, 1.0, {"cars": 8})
        writer.update_manifest(calibrations={NAME: info})
    return open_run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    return calibrated_run(tmp_path_factory.mktemp("runs") / "run")


def test_the_frame_holds_the_numbers_of_the_tables(run: DriftRun) -> None:
    rows = before_after_rows(run, NAME).set_index(["task", "variant"])
    assert list(rows.index) == [(task, name) for task in run.tasks for name in ("merged", CONTROL, VARIANT, "expert")]
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
    found = {entry["measure"]: entry for entry in calibration_json(run, NAME)["means"]}
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
    drift = mean_on_tasks(run, DRIFT, run.tasks, "merged")
    errors = []
    for task in run.tasks:
        norms = run.samples(task, "merged", "final")["drift_l2"].to_numpy(dtype=float)
        half = stats.t.ppf(0.975, len(norms) - 1) * norms.std(ddof=1) / len(norms) ** 0.5
        errors.append(half)
    expected = sum(error**2 for error in errors) ** 0.5 / len(errors)
    assert drift.high - drift.value == pytest.approx(expected)


def test_the_text_shows_every_task_and_its_numbers(run: DriftRun) -> None:
    text = calibration_text(run, NAME, verbose=True)
    for row in before_after_rows(run, NAME).to_dict("records"):
        assert row["task"] in text and f"{100 * row['accuracy']:.1f} %" in text
        if row["variant"] != "expert":
            for column in ("drift", "cosine"):
                assert f"{row[column]:#.3g} +- {row[f'{column}_error']:#.2g}" in text
            assert f"{100 * row['relative']:.1f} % +- {100 * row['relative_error']:.1f} %" in text
    assert text.startswith("\n".join([headline_sentence(headline(run, NAME)), *verdict(run, NAME).sentences]))


@pytest.mark.slow
def test_without_a_control_there_is_no_row_of_it(tmp_path: Path) -> None:
    run = calibrated_run(tmp_path / "run", control="")
    means = calibration_json(run, NAME)["means"]
    assert all(list(entry["means"]) == ["merged", VARIANT] for entry in means)
    assert "anchor only" not in calibration_text(run, NAME)


@pytest.mark.slow
def test_without_labels_there_is_drift_and_no_accuracy(tmp_path: Path) -> None:
    run = calibrated_run(tmp_path / "run", has_labels=False)
    means = calibration_json(run, NAME)["means"]
    assert [entry["measure"] for entry in means] == ["drift", "relative", "cosine"]
    text = calibration_text(run, NAME, verbose=True)
    assert score_changes(run, NAME) == [] and "ccuracy" not in text and "nan" not in text
    names = [table.name for table in Report(run, "calibration").content.tables]
    assert f"before-after-{NAME}" in names and f"accuracy-change-{NAME}" not in names
    assert f"answers-changed-{NAME}" not in names


def with_accuracy(run: DriftRun, folder: Path, **change: float) -> DriftRun:
    """A copy in which the calibrated model's accuracy differs by so much from the merged one's."""
    copied = Path(shutil.copytree(run.path, folder))
    with RunWriter.resume(copied) as writer:
        for task, by in change.items():
            value = run.accuracy(task, "merged")["value"].iloc[0] + by
            rows = run.accuracy(task, VARIANT).assign(value=value)
            writer.append("accuracy", pd.DataFrame(rows), replace=True)
    return open_run(copied)


def test_a_task_that_lost_is_counted_beside_a_mean_that_rose(run: DriftRun, tmp_path: Path) -> None:
    lost = with_accuracy(run, tmp_path / "run", cars=-0.125)
    (gap,) = [gap for gap in verdict(lost, NAME).gaps if gap.against == "merged"]
    assert gap.worse == ("cars",) and gap.better == ("mnist", "dtd")
    assert any("clear on 2 of 3, 1 worse" in text for text in verdict(lost, NAME).sentences)


def test_the_largest_weight_moves_are_the_logs(run: DriftRun) -> None:
    (sheet,) = [sheet for sheet in calibration_effect_tables(run, NAME) if sheet.name == f"weight-moves-{NAME}"]
    log = run.calibration(NAME).sort_values("weight_change", ascending=False, kind="stable").head(5)
    left = log["objective_after"] / log["objective_before"]
    expected = [*zip(log["site"], log["layer"], log["weight_change"], left, strict=True)]
    assert [tuple(row) for row in sheet.rows] == expected


def test_a_calibration_that_is_not_there_is_named(run: DriftRun) -> None:
    with pytest.raises(DataError, match="no calibration 'other'; it has featcal"):
        calibration_text(run, "other")


def run_of(folder: Path, *, tests: int = 400, has_labels: bool = True) -> DriftRun:
    size = Size(blocks=1, samples=24, tests=tests)
    return open_run(write_full_run(folder, tasks=("cars", "dtd"), size=size, has_labels=has_labels))


def test_without_answers_of_all_test_samples_the_interval_is_of_the_counts(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    for entry in score_changes(run, NAME):
        before, after = (run.accuracy(entry.task, variant)["value"].iloc[0] for variant in ("merged", VARIANT))
        assert entry.value == after - before and entry.n == 400 and not entry.paired
        counts = (round(before * 400), 400, round(after * 400), 400)
        assert (entry.low, entry.high) == unpaired_difference(*counts)
        assert entry.answered == "diagnosis" and entry.answers is not None and entry.answers.n == 24
    text = calibration_text(run, NAME, verbose=True)
    assert (
        re.search(r" diagnosis +24 ", text)
        and "not paired and too wide" in text
        and "on the diagnosis samples" in text
    )


def test_stored_predictions_of_the_test_samples_pair_the_interval(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    right = {"merged": [1.0] * 200 + [0.0] * 200, VARIANT: [1.0] * 230 + [0.0] * 170, "expert": [1.0] * 400}
    with RunWriter.resume(tmp_path / "run") as writer:
        for variant, values in right.items():
            key = {"task": "cars", "variant": variant, "metric": "accuracy"}
            rows = [{**key, "sample_id": f"test/{at}", "value": value} for at, value in enumerate(values)]
            writer.append("scores", pd.DataFrame(rows))
            writer.append("accuracy", pd.DataFrame([{**key, "value": sum(values) / 400, "n": 400}]), replace=True)
    run = open_run(tmp_path / "run")
    paired, unpaired = score_changes(run, NAME)
    assert paired.paired and paired.answered == "test" and paired.value == 30 / 400 and paired.n == 400
    assert paired.answers is not None and (paired.answers.gained, paired.answers.lost) == (30, 0)
    low, high = unpaired_difference(200, 400, 230, 400)
    assert low < paired.low < paired.high < high and not unpaired.paired
    against_expert = change_on_task(run, SCORE, "cars", (VARIANT, "expert"))
    assert against_expert.paired and against_expert.value == 170 / 400
    assert "rerun the analysis" in score_change_note(
        [paired, unpaired]
    ) and "rerun the analysis" not in score_change_note([paired])
    text = calibration_text(run, NAME, verbose=True)
    assert re.search(r"cars +test +400 .* < \.001", text) and "0.0000" not in text
    rows = {row["task"]: row for row in compare(run).tasks.to_dict("records")}
    assert (rows["cars"]["score_ci_low"], rows["cars"]["score_ci_high"]) == (paired.low, paired.high)
    assert rows["cars"]["score_paired"] and not rows["dtd"]["score_paired"]
    said = run_comparison_text(compare(run))
    assert "McNemar p < .001" in said and "of dtd are not paired" in said
    mean = mean_score_change(compare(run).tasks)
    assert mean == mean_over_tasks([Interval(e.value, e.low, e.high) for e in (paired, unpaired)])
    p_value = format_p_value(interval_p_value(mean))
    told = f"{format_points(mean.value)} ({format_interval(mean.low, mean.high)}), p {p_value}"
    assert f"mean change of accuracy over 2 tasks: {told}" in said


@pytest.mark.slow
def test_the_report_tells_the_same_numbers(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    tables = {table.name: table for table in Report(run, "calibration").content.tables}
    found = tables[f"accuracy-change-{NAME}"]
    entries = score_changes(run, NAME)
    assert list(found.rows) == [(e.task, e.value, e.low, e.high, e.n) for e in entries]
    assert score_change_note(entries) in found.note
    answers = [entry.answers for entry in entries if entry.answers is not None]
    *rows, last = tables[f"answers-changed-{NAME}"].rows
    assert [row[1:] for row in rows] == [
        ("diagnosis", 24, at.gained, at.lost, at.difference, at.ci_low, at.ci_high, at.p_value) for at in answers
    ]
    mean = mean_over_tasks([Interval(at.difference, at.ci_low, at.ci_high, at.n) for at in answers])
    sums = sum(at.gained for at in answers), sum(at.lost for at in answers)
    assert last == (
        f"mean of {len(answers)}",
        "diagnosis",
        24 * len(answers),
        *sums,
        mean.value,
        mean.low,
        mean.high,
        interval_p_value(mean),
    )
    drifts = tables[f"before-after-{NAME}"]
    at = [column.name for column in drifts.columns].index("L2 drift +-")
    final = run.layers("cars", "merged", "final").iloc[0]
    freedom = int(final["n"]) - 1
    assert drifts.rows[0][at] == pytest.approx(stats.t.ppf(0.975, freedom) * final["drift_l2_std"] / freedom**0.5)
    changes = final_drift_changes(run, NAME)
    assert list(tables[f"drift-change-{NAME}"].rows) == [
        (
            *(drift.task, drift.value, drift.low, drift.high),
            *(relative.value, relative.low, relative.high, drift.n),
        )
        for drift, relative in changes
    ]
    assert all(drift.paired for drift, _ in changes) and [row.task for row, _ in changes] == list(run.tasks)
    for _, relative in changes:
        assert f"{100 * relative.value:+.1f} %" in calibration_text(run, NAME, verbose=True)


@pytest.mark.slow
def test_a_report_works_every_change_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("drift_changes", "score_change"):

        def counted(*given: object, work: object = getattr(measures, name), **more: object) -> object:
            asked.append((work, *given[2:], *more.items()))
            return work(*given, **more)  # type: ignore[operator]

        monkeypatch.setattr(measures, name, counted)
    run = run_of(tmp_path / "run")
    Report(run).content  # noqa: B018 -- asks for everything
    # Drift, cosine, and answers of every pair of base, expert, merged and calibrated.
    assert len(asked) == len(set(asked)) == (2 + 6) * len(run.tasks)
