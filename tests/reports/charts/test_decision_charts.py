"""Charts of decisions: shares and counts against loops over the output table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlens.findings.reading import number
from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.decisions import expected_calibration_error, reliability
from tests.records.full_run import Size, write_full_run
from tests.reports.charts.recording import finite, with_rows

CONTROL, CALIBRATED = "baseline:featcal-anchor", "calibrated:featcal"
OUTCOMES = ("certified", "kept without certificate", "flipped")


@pytest.fixture(scope="module")
def one_class(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A head with one class: nothing can flip, and there is no margin."""
    path = write_full_run(
        tmp_path_factory.mktemp("one") / "run",
        tasks=["cars"],
        class_names=["car", "never seen"],
        size=Size(samples=40),
    )
    run, cars = open_run(path), dict.fromkeys(("expert_pred", "pred", "label"), "car")
    rows = run.outputs().assign(margin=np.nan, certified=False, flipped=False, **cars)
    return with_rows(run, "outputs", rows)


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """Enough samples for all three outcomes and for several bins of confidence."""
    size = Size(samples=120, width=16, classes=6, blocks=8)
    return open_run(write_full_run(tmp_path_factory.mktemp("wild") / "run", tasks=["cars", "dtd"], size=size))


@pytest.mark.slow
def test_shares_of_outcomes_agree_with_counting(wild: DriftRun) -> None:
    figure = charts["margins"].draw(wild, ChartOptions(controls=True)).figure
    variants = ["merged", CONTROL, CALIBRATED]
    for at, trace in enumerate(figure.data):
        variant, outcome = variants[at // 3], OUTCOMES[at % 3]
        assert trace.name == outcome
        for task, share in zip(wild.tasks, trace.x, strict=True):
            rows = wild.outputs(task, variant).to_dict("records")
            kinds = ["flipped" if row["flipped"] else OUTCOMES[0 if row["certified"] else 1] for row in rows]
            assert share == pytest.approx(kinds.count(outcome) / len(rows))


def test_histograms_count_every_sample_once(wild: DriftRun) -> None:
    drawn = charts["flips"].draw(wild, ChartOptions(controls=True))
    for variant, rows in drawn.data.groupby("variant"):
        outputs = wild.outputs(variant=str(variant))
        for name, flips in (("flipped", True), ("kept", False)):
            margins = outputs.loc[outputs["flipped"] == flips, "margin"].astype(float)
            assert rows[name].sum() == len(margins)
            for low, high, count in zip(rows["from"], rows["to"], rows[name], strict=True):
                is_last = high == rows["to"].max()
                inside = [low <= margin < high or (is_last and margin == high) for margin in margins]
                assert count == sum(inside)
    bars = {trace.name: trace for trace in drawn.figure.data[:2]}
    merged = drawn.data[drawn.data["variant"] == "merged"]
    assert finite(bars["flipped"].y) == finite(merged["flipped"])
    assert finite(bars["kept"].y) == finite(merged["kept"])


def test_confidence_is_measured_of_the_expert_and_of_every_variant(wild: DriftRun) -> None:
    drawn = charts["confidence"].draw(wild, ChartOptions(controls=True))
    outputs = wild.outputs()
    curves = [trace for trace in drawn.figure.data if trace.type == "scatter"]
    assert [curve.legendgroup for curve in curves] == ["expert", "merged", CONTROL, CALIBRATED]
    for curve in curves:
        is_expert = curve.legendgroup == "expert"
        rows = outputs[outputs["variant"] == ("merged" if is_expert else curve.legendgroup)]
        answer, confidence = ("expert_pred", "confidence_expert") if is_expert else ("pred", "confidence")
        right = (rows[answer] == rows["label"]).to_numpy(bool)
        bins = reliability(rows[confidence].to_numpy(float), right)
        assert finite(curve.y) == finite(bins["accuracy"])
        assert number(expected_calibration_error(bins)) in drawn.notes[0]


def test_an_empty_bin_breaks_the_line_and_counts_nobody(wild: DriftRun) -> None:
    drawn = charts["confidence"].draw(wild, ChartOptions(controls=True))
    curve = next(trace for trace in drawn.figure.data if trace.legendgroup == "merged")
    bars = next(trace for trace in drawn.figure.data if trace.legendgroup == "merged" and trace.type == "bar")
    empty = [value is None for value in curve.y]
    assert any(empty) and [count == 0 for count in bars.y] == empty
    assert sum(bars.y) == len(wild.outputs(variant="merged"))


def test_without_labels_only_confidence_is_missing(bare: DriftRun) -> None:
    reason = charts["confidence"].missing(bare, ChartOptions(controls=True))
    assert reason is not None and "labelled samples" in reason
    for name in ("margins", "flips", "bound"):
        assert charts[name].missing(bare, ChartOptions(controls=True)) is None


def test_one_class_has_no_margins_but_keeps_every_decision(one_class: DriftRun) -> None:
    reason = charts["flips"].missing(one_class, ChartOptions(controls=True))
    assert reason is not None and "heads of two classes or more" in reason
    shares = charts["margins"].draw(one_class, ChartOptions(controls=True)).data
    assert (shares["kept without certificate"] == 1).all()
    assert (
        charts["confidence"]
        .draw(one_class, ChartOptions(controls=True))
        .data["accuracy"]
        .dropna()
        .eq(1)
        .all()
    )


@pytest.mark.parametrize("name", ["margins", "flips", "confidence", "bound"])
def test_a_sample_without_scores_is_left_out_of_every_share(name: str, wild: DriftRun) -> None:
    rows = wild.outputs()
    columns = ["flipped", "certified", "margin", "confidence", "score_drift_l2"]
    rows.loc[rows["sample_id"] == "test/0", columns] = None
    notes = " ".join(charts[name].draw(with_rows(wild, "outputs", rows)).notes)
    assert "119 diagnosis samples per task" in notes


answers = st.lists(st.tuples(st.floats(0.01, 1.0), st.booleans()), min_size=1, max_size=60)


def slow_error(pairs: list[tuple[float, bool]]) -> float:
    """The textbook sum over bins ((k - 1) / 10, k / 10], sample by sample."""
    total = 0.0
    for k in range(1, 11):
        own = [(p, right) for p, right in pairs if (k - 1) / 10 < p <= k / 10]
        if own:
            confidence = math.fsum(p for p, _ in own) / len(own)
            accuracy = sum(right for _, right in own) / len(own)
            total += len(own) / len(pairs) * abs(accuracy - confidence)
    return total


@given(pairs=answers)
def test_the_error_agrees_with_a_loop_over_samples(pairs: list[tuple[float, bool]]) -> None:
    # The product p * 10 rounds where p / 0.1 need not: such ties are no matter of the method.
    pairs = [(p, right) for p, right in pairs if abs(p * 10 - round(p * 10)) > 1e-9]
    if not pairs:
        return
    confidence, right = (np.array(column) for column in zip(*pairs, strict=True))
    found = reliability(confidence, right)
    assert expected_calibration_error(found) == pytest.approx(slow_error(pairs), abs=1e-12)
    assert found["samples"].sum() == len(pairs)


def test_a_network_that_is_right_as_often_as_it_says_has_no_error() -> None:
    right = np.array([True] * 3 + [False] + [True] * 9 + [False])
    confidence = np.array([0.75] * 4 + [0.9] * 10)
    assert expected_calibration_error(reliability(confidence, right)) == pytest.approx(0, abs=1e-15)


def test_one_that_is_always_sure_and_wrong_has_error_one() -> None:
    assert expected_calibration_error(reliability(np.ones(5), np.zeros(5, dtype=bool))) == 1


def test_an_empty_bin_has_no_accuracy_and_no_weight() -> None:
    found = reliability(np.array([0.95, 0.97]), np.array([True, False]))
    empty = found[found["samples"] == 0]
    assert len(empty) == 9 and empty[["accuracy", "confidence", "low", "high"]].isna().all(axis=None)
    assert expected_calibration_error(found) == pytest.approx(0.46)


def test_the_ends_of_bins_belong_to_the_lower_one() -> None:
    found = reliability(np.array([0.5, 1.0]), np.array([True, True]))
    assert found.loc[found["samples"] > 0, "to"].tolist() == [0.5, 1.0]
