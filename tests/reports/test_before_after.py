"""A calibration's table and the sentences below it, against the rows they are made from."""

from __future__ import annotations

import pathlib
import shutil

import pandas as pd
import pytest
from scipy import stats

from driftlens.errors import DataError
from driftlens.records.before_after import credit_sentences, credits_of, outcomes
from driftlens.records.manifest import CalibrationInfo
from driftlens.records.run import DriftRun, open_run
from driftlens.records.writer import RunWriter
from driftlens_reports.verdicts import before_after, before_after_text
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


def test_gains_split_exactly_into_rescaling_and_calibration(run: DriftRun) -> None:
    final, scores = run.layers(layer="final"), run.accuracy()
    means = {
        "relative drift": final.groupby("variant")["drift_rel"].mean(),
        "accuracy": scores.groupby("variant")["value"].mean(),
    }
    found = {credit.measure: credit for credit in credits_of(run, NAME)}
    assert set(found) == set(means)
    for measure, credit in found.items():
        mean = means[measure]
        assert credit.rescaling == pytest.approx(mean[CONTROL] - mean["merged"], abs=1e-12)
        assert credit.calibration == pytest.approx(mean[VARIANT] - mean[CONTROL], abs=1e-12)
        assert credit.rescaling + credit.calibration == pytest.approx(
            mean[VARIANT] - mean["merged"], abs=1e-12
        )


def test_the_sentences_say_who_earned_what_with_signs(run: DriftRun) -> None:
    accuracy, drift = credit_sentences(run, NAME)[:2]
    by_name = {credit.measure: credit for credit in credits_of(run, NAME)}
    gain = by_name["accuracy"]
    assert f"{100 * gain.rescaling:+.1f} points come from the anchor alone (rescaling)" in accuracy
    assert f"{100 * gain.calibration:+.1f} from calibration" in accuracy
    assert "rises to" in accuracy and "falls to" in drift


def test_the_text_shows_every_task_and_its_numbers(run: DriftRun) -> None:
    text = before_after_text(run, NAME)
    for entry in outcomes(run, NAME):
        assert entry.task in text and f"{100 * entry.accuracy:.1f} %" in text
        assert entry.variant == "expert" or f"{entry.drift:#.4g} +- {entry.drift_error:#.2g}" in text
    assert all(sentence in text for sentence in credit_sentences(run, NAME))


def test_without_a_control_nothing_is_called_rescaling(tmp_path: pathlib.Path) -> None:
    run = calibrated_run(tmp_path / "run", control="")
    assert [credit.rescaling for credit in credits_of(run, NAME)] == [0, 0]
    text = before_after_text(run, NAME)
    assert "anchor only" not in text and "come from the anchor" not in text
    assert "none of this is rescaling" in text


def test_without_labels_there_is_drift_and_no_accuracy(tmp_path: pathlib.Path) -> None:
    run = calibrated_run(tmp_path / "run", has_labels=False)
    assert [credit.measure for credit in credits_of(run, NAME)] == ["relative drift"]
    assert "not measured" in before_after_text(run, NAME) and "nan" not in before_after_text(run, NAME)


def test_a_task_that_lost_is_named_beside_a_mean_that_rose(run: DriftRun, tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(shutil.copytree(run.path, tmp_path / "run"))
    worse = run.accuracy("cars", VARIANT).assign(
        value=run.accuracy("cars", "merged")["value"].iloc[0] - 0.125
    )
    with RunWriter.resume(folder) as writer:
        writer.append("accuracy", pd.DataFrame(worse), replace=True)
    assert credit_sentences(open_run(folder), NAME)[-1] == "Less accurate than before on cars (-12.5 points)."
    assert not any("Less accurate" in text for text in credit_sentences(run, NAME))


def test_a_calibration_that_is_not_there_is_named(run: DriftRun) -> None:
    with pytest.raises(DataError, match="no calibration 'other'; it has featcal"):
        before_after_text(run, "other")
