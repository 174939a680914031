"""Checks: verdicts against the tables, what fails a run, and JUnit."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import driftlens as dl
from driftlens.results.checks import CHECKED_TABLES, CheckReport, junit_xml, run_self_checks
from driftlens.results.formatting import format_number
from driftlens.results.measures import drift_changes, score_change, variant_score
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import TABLES
from driftlens.utils.errors import ChecksFailedError, RunError
from driftlens.utils.variants import ACCURACY
from tests.quick import few
from tests.runs.full_run import REMAINDER, write_full_run
from tests.runs.judged import CALIBRATED, SIZE, judge, only
from tests.runs.spoiling import spoil


def test_each_task_is_judged_by_its_own_final_cosine(full: DriftRun) -> None:
    where = {"variant": CALIBRATED, "layer": "final"}
    bound = float(full.layers(variant=CALIBRATED, layer="final")["cos_mean"].median())
    results = judge(full, metric="cos_mean", where=where, per="task", gte=bound)
    assert [result.group for result in results] == [{"task": task} for task in full.tasks]
    for result in results:
        value = full.value("cos_mean", task=str(result.group["task"]), variant=CALIBRATED)
        assert (result.value, result.n, result.threshold, result.relation) == (value, 1, bound, ">=")
        assert result.margin == value - bound
        assert result.status == ("pass" if value >= bound else "fail")
    assert {result.status for result in results} == {"pass", "fail"}


@pytest.mark.parametrize("agg", ["mean", "max", "min", "median"])
def test_an_aggregate_is_numpys(full: DriftRun, agg: str) -> None:
    rows = full.layers(variant="merged", layer=2)["drift_l2_mean"].to_numpy(float)
    result = only(full, metric="drift_l2_mean", where={"variant": "merged", "layer": 2}, agg=agg, lte=100)
    assert result.value == pytest.approx(getattr(np, agg)(rows)) and result.n == len(full.tasks)


def test_without_an_aggregate_every_row_must_hold(full: DriftRun) -> None:
    values = full.layers(layer="final").set_index(["task", "variant"])["cos_mean"]
    task, variant = values.idxmin()
    bound = float(values.nsmallest(2).iloc[1])  # the mean and all rows but one are above it
    result = only(full, metric="cos_mean", where={"layer": "final"}, gte=bound)
    assert result.status == "fail" and result.value == values.min()
    assert result.where == f"task {task}, variant {variant}" and str(task) in result.reason
    assert only(full, metric="cos_mean", where={"layer": "final"}, gte=float(values.min())).status == "pass"


@pytest.mark.parametrize(
    ("bounds", "status"),  # of accuracies that are all measured on SIZE.tests samples
    [
        ({"gte": 200}, "pass"),
        ({"gt": 200}, "fail"),
        ({"lte": 200}, "pass"),
        ({"lt": 200}, "fail"),
        ({"gte": 100, "lte": 300}, "pass"),
        ({"gte": 100, "lt": 200}, "fail"),
        ({"gte": 201, "lte": 300}, "fail"),
    ],
    ids=lambda given: " ".join(map(str, given)) if isinstance(given, dict) else given,
)
def test_a_bound_includes_its_end_unless_it_is_strict(full: DriftRun, bounds: dict[str, int], status: str) -> None:
    assert only(full, metric="n", table="accuracy", **bounds).status == status


def test_a_change_is_relative_and_row_by_row(full: DriftRun) -> None:
    change = {"from": "merged", "to": CALIBRATED}
    results = judge(full, metric="drift_l2_mean", where={"layer": "final"}, change=change, per="task", lte=-0.2)
    for result in results:
        before, after = (
            full.value("drift_l2_mean", task=str(result.group["task"]), variant=variant) for variant in change.values()
        )
        assert result.value == pytest.approx((after - before) / before) and result.status == "pass"
    back = only(full, metric="drift_l2_mean", change={"from": CALIBRATED, "to": "merged"}, where={"layer": 1}, lt=0)
    assert back.status == "fail" and back.n == len(full.tasks)


def test_a_change_of_a_negative_number_keeps_its_sign(full: DriftRun) -> None:
    """From -0.4 by +0.1 is an increase of a quarter, not a decrease."""
    rows = full.layers(layer="final").set_index(["task", "variant"])["cross_term"]
    before, after = rows["cars", "base"], rows["cars", "merged"]
    where = {"layer": "final", "task": "cars"}
    result = only(full, metric="cross_term", where=where, change={"from": "base", "to": "merged"}, gte=-1e9)
    assert result.value == pytest.approx((after - before) / abs(before))


def test_truth_counts_as_one(full: DriftRun) -> None:
    result = only(full, metric="flipped", agg="mean", where={"variant": "base", "task": "cars"}, lte=1)
    assert result.value == full.outputs("cars", "base")["flipped"].astype(float).mean()
    assert result.n == SIZE.samples


def test_a_calibration_is_found_by_its_variant(full: DriftRun) -> None:
    result = only(full, metric="weight_change", agg="max", where={"variant": CALIBRATED}, lte=1)
    assert result.value == full.calibration("featcal")["weight_change"].max()
    assert only(full, metric="weight_change", where={"variant": "calibrated:x"}, lte=1).status == "skip"


def test_task_vectors_are_judged_whole_unless_modules_are_asked_for(full: DriftRun) -> None:
    backbone = full.params("cars", "merged").query("scope == 'backbone'")["cos"].iloc[0]
    where = {"variant": "merged", "task": "cars"}
    assert only(full, metric="cos", where=where, gte=0).value == backbone
    modules = only(full, metric="cos", where={**where, "scope": "module"}, agg="min", gte=0)
    assert modules.n == len(full.params("cars", "merged").query("scope == 'module'"))


def test_a_warning_does_not_fail_the_run(full: DriftRun) -> None:
    entries = [{"metric": "cos_mean", "gte": 1.1, "severity": "warn"}, {"metric": "cos_mean", "lte": 1}]
    report = dl.check(full, {"checks": entries})
    assert [result.status for result in report.results] == ["warn", "pass"]
    assert report.raise_if_failed() is report and not report.failed


def test_a_failure_raises_with_its_number(full: DriftRun) -> None:
    report = dl.check(full, {"checks": [{"metric": "cos_mean", "gte": 1.1, "name": "impossible"}]})
    with pytest.raises(ChecksFailedError, match=r"1 of 1 checks failed; impossible: .*wanted >= 1\.1") as failed:
        report.raise_if_failed()
    assert failed.value.exit_code == 3


@pytest.mark.parametrize("table", CHECKED_TABLES)
def test_every_number_of_a_table_can_be_checked(full: DriftRun, table: str) -> None:
    for column in TABLES[table].columns:
        if column.dtype == "str" or column.name in ("layer", "seed"):
            continue
        where = {"variant": CALIBRATED}
        result = only(full, metric=column.name, table=table, where=where, agg="median", gte=-1e12, lte=1e12)
        assert result.status == "pass" or result.reason.endswith("not measured"), (column.name, result)


def test_a_change_of_mean_drift_is_told_with_its_paired_interval(full: DriftRun) -> None:
    change = {"from": "merged", "to": CALIBRATED}
    results = judge(full, metric="drift_l2_mean", where={"layer": "final"}, change=change, per="task", lte=0.0)
    last = full.layer_index("final")
    for result in results:
        expected = drift_changes(full, full, str(result.group["task"]), ("merged", CALIBRATED))[last].relative
        assert (result.ci_low, result.ci_high) == (expected.low, expected.high)
        assert result.ci_low < result.value < result.ci_high and result.value == pytest.approx(expected.value)
    other = only(full, metric="cos_mean", where={"layer": "final"}, change=change, gte=-9)
    assert np.isnan(other.ci_low) and other.status == "pass"
    mean = only(full, metric="drift_l2_mean", where={"layer": "final"}, change=change, agg="mean", lte=9)
    assert np.isnan(mean.ci_high), "rows of several tasks have no interval of one"


def test_a_change_of_a_score_is_told_in_points_with_its_interval_and_samples(full: DriftRun) -> None:
    ends = ("merged", CALIBRATED)
    results = judge(full, metric="accuracy", change={"points": list(ends)}, per="task", gte=-1)
    assert [result.group["task"] for result in results] == list(full.tasks)
    for result in results:
        task = str(result.group["task"])
        change = score_change(full, full, task, ends, ACCURACY)
        start, end = (variant_score(full, task, variant, ACCURACY).value for variant in ends)
        assert result.value == pytest.approx(end - start)
        assert (result.ci_low, result.ci_high, result.samples) == (change.low, change.high, SIZE.tests)
    relative = judge(full, metric="accuracy", change={"relative": list(ends)}, per="task", gte=-1)[0]
    start = variant_score(full, full.tasks[0], "merged", ACCURACY)
    change = score_change(full, full, full.tasks[0], ends, ACCURACY)
    assert relative.value == pytest.approx(change.value / start.value)
    plain_score = judge(full, metric="accuracy", where={"variant": "merged"}, per="task", gte=0)[0]
    assert plain_score.value == start.value and plain_score.ci_low < start.value < plain_score.ci_high


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.86513, "0.865"), (0.0000012346, "0.00000123"), (1234567.0, "1234567"), (2.0, "2.00")],
)
def test_numbers_are_told_as_people_write_them(value: float, words: str) -> None:
    assert format_number(value) == words


def test_every_self_check_can_fail(full: DriftRun) -> None:
    """Shares by prefix swaps telescope to what they are divided by: a check of their sum would always hold."""
    assert [check.metric for check in run_self_checks(full).results] == [
        *("closure", "Jacobian", "contributions", "closed form", "softmax", "cross-entropy")
    ]


def test_self_checks_are_verdicts_of_the_same_limits(full: DriftRun) -> None:
    report = dl.check(full)
    for result in report.results:
        assert result.status == ("pass" if result.value <= result.threshold else "fail")
        assert (result.n > 0) == (result.status != "skip")
    by_name = {result.metric: result for result in report.results}
    contributions = by_name["contributions"]
    assert (contributions.status, contributions.value) == ("fail", REMAINDER)
    assert by_name["closure"].n == len(full.layers())


def test_junit_counts_what_happened_and_escapes_every_name(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>&'
    path = write_full_run(tmp_path / "run", name=f"{evil}\x07", tasks=(evil, "b"), size=SIZE)
    entries = [
        {"metric": "cos_mean", "gte": 1.1, "name": evil},
        {"metric": "cos_mean", "gte": -1, "per": "task"},
        {"metric": "cos_mean", "gte": -1, "where": {"variant": "calibrated:]]>"}},
        {"metric": "cos_mean", "gte": 1.1, "severity": "warn"},
    ]
    report = dl.check(path, {"checks": entries})
    root = ElementTree.fromstring(junit_xml(report))
    (suite,) = root
    assert suite.attrib == {
        **{"name": f"{evil}\ufffd", "tests": "5", "failures": "1"},
        **{"errors": "0", "skipped": "1"},
    }
    assert [case.get("name") for case in suite] == [result.title for result in report.results]
    outcomes = [[child.tag for child in case] for case in suite]
    values = ["properties"]
    assert outcomes == [[*values, "failure"], values, values, ["skipped"], [*values, "system-out"]]
    assert suite[0][1].get("message") == report.results[0].reason
    told = {entry.get("name"): entry.get("value") for entry in suite[0][0]}
    assert float(told["value"]) == pytest.approx(report.results[0].value, rel=1e-9)
    assert told["bound"] == ">= 1.1" and int(told["n"]) == report.results[0].samples > 0


def test_counts_add_up(full: DriftRun) -> None:
    entries = [{"metric": "cos_mean", "gte": 1.1}, {"metric": "cos_mean", "where": {"layer": 99}, "gte": 0}]
    report: CheckReport = dl.check(full, {"checks": entries})
    counts = [report.count(status) for status in ("pass", "warn", "fail", "skip")]
    assert counts == [0, 0, 1, 1] and report.executed == 1


def test_a_change_from_zero_is_skipped(copied: Path) -> None:
    rows = open_run(copied).layers()
    at = rows.index[(rows["task"] == "cars") & (rows["variant"] == "merged") & (rows["layer"] == 1)][0]
    spoil(copied, "layers", int(at), "drift_l2_mean", 0.0)
    entry = {"metric": "drift_l2_mean", "where": {"layer": 1}, "change": {"from": "merged", "to": CALIBRATED}}
    found = {str(result.group["task"]): result for result in judge(copied, per="task", lte=0, **entry)}
    assert found["cars"].status == "skip" and found["mnist"].status == "pass"


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"variant": "calibrated:nosuch"}, "no variant 'calibrated:nosuch'; it has base, merged"),
        ({"task": "nosuch"}, "no task 'nosuch'; it has cars, mnist, dtd"),
        ({"layer": 99}, "no layer 99"),
        ({"layer": "visual.nosuch"}, "no layer 'visual.nosuch'"),
        ({"role": "neck"}, "not measured where role is neck"),
        ({"variant": "expert"}, "not measured where variant is expert"),
    ],
    ids=["variant", "task", "layer", "module path", "other column", "expert"],
)
def test_what_the_run_lacks_is_skipped_with_the_reason(
    full: DriftRun, where: dict[str, str | int], reason: str
) -> None:
    result = only(full, metric="cos_mean", where=where, gte=-1)
    assert result.status == "skip" and reason in result.reason and math.isnan(result.value)


def test_a_run_without_outputs_passes_nothing_about_them(tmp_path: Path) -> None:
    path = write_full_run(tmp_path / "run", tasks=("a",), size=SIZE, has_labels=False)
    assert only(path, metric="ce", agg="mean", lte=100).reason == "ce was not measured"
    assert only(path, metric="value", gte=0).reason == "the run has no rows in its table 'accuracy'"


@pytest.mark.parametrize("agg", few(["worst", "mean", "max", "min", "median"], ["worst", "mean"]))
def test_a_gap_never_passes_and_does_not_hide_a_failure(copied: Path, agg: str) -> None:
    rows = open_run(copied).layers()
    at = rows.index[(rows["variant"] == "merged") & (rows["role"] == "head") & (rows["task"] == "mnist")][0]
    spoil(copied, "layers", int(at), "cos_mean", None)
    where = {"variant": "merged", "layer": "final"}
    skipped = only(copied, metric="cos_mean", where=where, agg=agg, gte=-1)
    assert skipped.status == "skip" and skipped.reason == "1 of 3 rows were not measured, first task mnist"
    assert only(copied, metric="cos_mean", where=where, agg=agg, gte=0.999).status == "fail"
    by_task = judge(copied, metric="cos_mean", where=where, agg=agg, gte=-1, per="task")
    assert [result.status for result in by_task] == ["pass", "skip", "pass"]


def test_a_task_without_any_row_is_skipped_not_forgotten(tmp_path: Path) -> None:
    """One task of two was evaluated: neither the whole nor the other task passes."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path = write_full_run(tmp_path / "run", tasks=("a", "b"), size=SIZE)
    table = path / "tables" / "accuracy.parquet"
    rows = pq.read_table(table)
    pq.write_table(rows.filter(pc.equal(rows["task"], "a")), table)
    whole = only(path, metric="value", gte=0)
    assert (whole.status, whole.reason) == ("skip", "not measured on b")
    each = judge(path, metric="value", gte=0, per="task")
    assert [(result.group["task"], result.status) for result in each] == [("a", "pass"), ("b", "skip")]
    assert only(path, metric="value", gte=0, where={"task": "a"}).status == "pass"


def test_a_quantity_that_a_layer_does_not_have_is_no_gap(full: DriftRun) -> None:
    """The stem amplifies nothing: a bound on amplification is about the other layers."""
    result = only(full, metric="amplification", lte=1e9)
    measured = full.layers()["amplification"].notna().sum()
    assert result.status == "pass" and result.n == measured < len(full.layers())


def test_self_checks_that_were_not_measured_are_skipped(tmp_path: Path) -> None:
    path = write_full_run(tmp_path / "run", tasks=("a",), variants=("base",), size=SIZE, has_labels=False)
    found = {result.metric: result.status for result in dl.check(path).results}
    assert found["cross-entropy"] == found["contributions"] == "skip" and found["closure"] == "pass"


def test_a_damaged_table_is_an_error_not_a_skip(copied: Path) -> None:
    table = copied / "tables" / "layers.parquet"
    table.write_bytes(table.read_bytes()[:500])
    with pytest.raises(RunError, match=r"layers\.parquet"):
        judge(copied, metric="cos_mean", gte=0)
