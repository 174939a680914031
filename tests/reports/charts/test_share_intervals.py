"""Shares of the final drift with their intervals: as whiskers and in hovered text; without, in runs that have none."""

from __future__ import annotations

import numpy as np
import pytest

from driftlens.findings.reading import percent
from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.charts.chart import ChartOptions, charts

SHARES = {"carried share": "final_share", "swapped share": "prefix_share"}
ONE = ChartOptions(tasks=["mnist"], variants=["merged"])


@pytest.fixture(scope="module")
def sampled(full: DriftRun) -> DriftRun:
    """The full run with an interval around every share, wider above than below."""
    run, rows = open_run(full.path), full.layers()
    for share in SHARES.values():
        rows[f"{share}_low"] = rows[share] - 0.01 * rows["layer"]
        rows[f"{share}_high"] = rows[share] + 0.02 * rows["layer"]
    run._frames["layers"] = rows
    return run


def written(low: float, high: float) -> str:
    return f"<br>95 % interval: {percent(low)} to {percent(high)}".replace("%", "&#37;")


def test_splits_have_whiskers_at_the_ends_of_the_intervals(sampled: DriftRun) -> None:
    drawn = charts["splits"].draw(sampled, ONE)
    rows = sampled.layers("mnist", "merged")
    for name, share in SHARES.items():
        bars = next(trace for trace in drawn.figure.data if trace.name == name)
        heights = np.array(bars.y, dtype=float)
        assert heights + np.array(bars.error_y.array) == pytest.approx(rows[f"{share}_high"].to_numpy())
        assert heights - np.array(bars.error_y.arrayminus) == pytest.approx(rows[f"{share}_low"].to_numpy())
        ends = zip(rows[f"{share}_low"], rows[f"{share}_high"], strict=True)
        assert list(bars.customdata) == [written(*pair) for pair in ends]
        assert "%{customdata}" in bars.hovertemplate
        assert drawn.data[f"{name} low"].tolist() == pytest.approx(rows[f"{share}_low"].tolist())
    assert any("95 % intervals" in note for note in drawn.notes)


def test_segments_have_whiskers_at_their_ends_and_the_remainder_has_none(sampled: DriftRun) -> None:
    segments, remainder = charts["contributions"].draw(sampled, ONE).figure.data[:2]
    rows = sampled.layers("mnist", "merged")
    assert list(segments.error_x.array) == pytest.approx((0.02 * rows["layer"]).tolist())
    assert list(segments.error_x.arrayminus) == pytest.approx((0.01 * rows["layer"]).tolist())
    ends = zip(rows["final_share_low"], rows["final_share_high"], strict=True)
    assert [told for _, told in segments.customdata] == [written(*pair) for pair in ends]
    assert remainder.error_x.array is None and [told for _, told in remainder.customdata] == [""]


def test_cells_tell_their_interval_when_hovered(sampled: DriftRun) -> None:
    cells = charts["contributions-heatmap"].draw(sampled, ONE).figure.data[0]
    rows = sampled.layers("mnist", "merged")
    ends = zip(rows["final_share_low"], rows["final_share_high"], strict=True)
    assert list(cells.hovertext[0]) == [*(written(*pair) for pair in ends), ""], "and the remainder has none"
    assert "%{hovertext}" in cells.hovertemplate


@pytest.mark.parametrize("name", ["splits", "contributions", "contributions-heatmap"])
def test_a_run_of_an_older_schema_is_drawn_without(name: str, full: DriftRun) -> None:
    drawn = charts[name].draw(full)
    assert "interval" not in drawn.figure.to_json() and not any("interval" in note for note in drawn.notes)
    assert not [column for column in drawn.data if column.endswith((" low", " high"))]
    for trace in drawn.figure.data:
        assert trace.type != "bar" or (trace.error_x.array is None and trace.error_y.array is None)


@pytest.mark.parametrize("name", ["splits", "contributions"])
def test_a_share_without_an_interval_is_not_drawn_as_if_it_were_certain(name: str, sampled: DriftRun) -> None:
    """plotly draws a whisker of no length where one of several is missing."""
    run, rows = open_run(sampled.path), sampled.layers()
    rows.loc[(rows["task"] == "mnist") & (rows["layer"] == 3), "final_share_high"] = np.nan
    run._frames["layers"] = rows
    carried = charts[name].draw(run, ONE).figure.data[0]
    assert carried.error_x.array is None and carried.error_y.array is None
