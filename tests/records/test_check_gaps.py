"""Missing numbers: a check that lacks them is skipped with the reason, and never passes."""

from __future__ import annotations

import math
import pathlib

import pytest

import driftlens as dl
from driftlens.base.errors import RunError
from driftlens.runs.run import DriftRun, open_run
from tests.records.full_run import write_full_run
from tests.records.judged import CALIBRATED, SIZE, judge, only
from tests.records.spoiling import spoil


def test_a_change_from_zero_is_skipped(copied: pathlib.Path) -> None:
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


def test_a_run_without_outputs_passes_nothing_about_them(tmp_path: pathlib.Path) -> None:
    path = write_full_run(tmp_path / "run", tasks=("a",), size=SIZE, has_labels=False)
    assert only(path, metric="ce", agg="mean", lte=100).reason == "ce was not measured"
    assert only(path, metric="value", gte=0).reason == "the run has no rows in its table 'accuracy'"


@pytest.mark.parametrize("agg", ["worst", "mean", "max", "min", "median"])
def test_a_gap_never_passes_and_does_not_hide_a_failure(copied: pathlib.Path, agg: str) -> None:
    rows = open_run(copied).layers()
    at = rows.index[(rows["variant"] == "merged") & (rows["role"] == "head") & (rows["task"] == "mnist")][0]
    spoil(copied, "layers", int(at), "cos_mean", None)
    where = {"variant": "merged", "layer": "final"}
    skipped = only(copied, metric="cos_mean", where=where, agg=agg, gte=-1)
    assert skipped.status == "skip" and skipped.reason == "1 of 3 rows were not measured, first task mnist"
    assert only(copied, metric="cos_mean", where=where, agg=agg, gte=0.999).status == "fail"
    by_task = judge(copied, metric="cos_mean", where=where, agg=agg, gte=-1, per="task")
    assert [result.status for result in by_task] == ["pass", "skip", "pass"]


def test_a_task_without_any_row_is_skipped_not_forgotten(tmp_path: pathlib.Path) -> None:
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


def test_self_checks_that_were_not_measured_are_skipped(tmp_path: pathlib.Path) -> None:
    path = write_full_run(tmp_path / "run", tasks=("a",), variants=("base",), size=SIZE, has_labels=False)
    found = {result.metric: result.status for result in dl.check(path).results}
    assert found["cross-entropy"] == found["contributions"] == "skip" and found["closure"] == "pass"


def test_a_damaged_table_is_an_error_not_a_skip(copied: pathlib.Path) -> None:
    table = copied / "tables" / "layers.parquet"
    table.write_bytes(table.read_bytes()[:500])
    with pytest.raises(RunError, match=r"layers\.parquet"):
        judge(copied, metric="cos_mean", gte=0)
