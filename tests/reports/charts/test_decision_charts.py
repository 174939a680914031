"""Charts of decisions: counts against loops over the output table."""

from __future__ import annotations

import numpy as np
import pytest

from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.charts.chart import ChartOptions, charts
from tests.reports.charts.recording import finite, with_rows
from tests.runs.full_run import Size, write_full_run


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
    """Enough samples for flips at many margins."""
    size = Size(samples=120, width=16, classes=6, blocks=8)
    return open_run(write_full_run(tmp_path_factory.mktemp("wild") / "run", tasks=["cars", "dtd"], size=size))


def test_histograms_count_every_sample_once(wild: DriftRun) -> None:
    drawn = charts["flips"].draw(wild, ChartOptions())
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


def test_decisions_need_no_labels(bare: DriftRun) -> None:
    for name in ("flips", "bound"):
        assert charts[name].missing(bare, ChartOptions()) is None


def test_one_class_has_no_margins(one_class: DriftRun) -> None:
    reason = charts["flips"].missing(one_class, ChartOptions())
    assert reason is not None and "heads of two classes or more" in reason


@pytest.mark.parametrize("name", ["flips", "bound"])
def test_a_sample_without_scores_is_left_out_of_every_share(name: str, wild: DriftRun) -> None:
    rows = wild.outputs()
    columns = ["flipped", "certified", "margin", "confidence", "score_drift_l2"]
    rows.loc[rows["sample_id"] == "test/0", columns] = None
    notes = " ".join(charts[name].draw(with_rows(wild, "outputs", rows)).notes)
    assert "119 diagnosis samples per task" in notes
