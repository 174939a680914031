"""Charts with a mark per task: they draw the tables' numbers, name the control, and never fill a gap."""

from __future__ import annotations

import pathlib

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from driftlens.base.intervals import Interval, mean_over_tasks, unpaired_difference
from driftlens.findings.frame import paired_by_task, pairing
from driftlens.findings.measures import SCORE, change
from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.gains import NO_RIVAL, _ticks
from driftlens_reports.charts.marks import places
from driftlens_reports.charts.per_task import AVERAGE
from tests.records.full_run import Size, write_full_run
from tests.reports.charts.recording import finite

CONTROL, CALIBRATED = "baseline:featcal-anchor", "calibrated:featcal"


def by_legend(figure) -> dict[str, list[float]]:  # type: ignore[no-untyped-def]
    """Values of all traces by the variant they are of."""
    found: dict[str, list[float]] = {}
    for trace in figure.data:
        found.setdefault(trace.legendgroup, []).extend(finite(trace.y))
    return found


@pytest.fixture(scope="module")
def gappy(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """The merged model's cosine, backbone and accuracy on mnist were not measured."""
    path = write_full_run(tmp_path_factory.mktemp("gappy") / "run")
    for table, column in (("layers", "cos_mean"), ("params", "cos"), ("accuracy", "value")):
        file = path / "tables" / f"{table}.parquet"
        rows = pq.read_table(file)
        is_gap = (rows["task"].to_pandas() == "mnist") & (rows["variant"].to_pandas() == "merged")
        values = rows[column].to_pandas().mask(is_gap)
        at = rows.schema.get_field_index(column)
        pq.write_table(rows.set_column(at, rows.schema.field(at), pa.array(values, from_pandas=True)), file)
    return open_run(path)


@pytest.mark.parametrize(
    ("name", "table", "column"),
    [
        ("task-cosine", "layers", "cos_mean"),
        ("backbone-alignment", "params", "cos"),
        ("accuracy", "accuracy", "value"),
    ],
)
def test_marks_are_the_tables_values_and_their_means(
    name: str, table: str, column: str, full: DriftRun
) -> None:
    rows = full.layers(layer="final") if table == "layers" else getattr(full, table)()
    if table == "params":
        rows = rows[rows["scope"] == "backbone"]
    for variant, values in by_legend(charts[name].draw(full).figure).items():
        wanted = rows.loc[rows["variant"] == variant, column].astype(float)
        assert finite(values) == finite([*wanted, wanted.mean()])


def test_accuracy_has_the_base_the_control_and_the_expert_with_the_tables_intervals(full: DriftRun) -> None:
    figure = charts["accuracy"].draw(full).figure
    order = list(dict.fromkeys(trace.legendgroup for trace in figure.data))
    assert order == ["base", "merged", CONTROL, CALIBRATED, "expert"]
    for trace in figure.data:
        rows = full.accuracy(variant=trace.legendgroup)[["value", "ci_low", "ci_high"]].to_numpy(dtype=float)
        mean = mean_over_tasks([Interval(*row) for row in rows])
        assert trace.x[-1] == AVERAGE
        up = np.array(trace.y) + np.array(trace.error_y.array)
        down = np.array(trace.y) - np.array(trace.error_y.arrayminus)
        assert up == pytest.approx([*rows[:, 2], mean.high]) and down == pytest.approx(
            [*rows[:, 1], mean.low]
        )


@pytest.mark.parametrize("name", ["task-cosine", "backbone-alignment", "accuracy"])
def test_a_gap_stays_a_gap_and_spoils_the_mean(name: str, gappy: DriftRun) -> None:
    data = charts[name].draw(gappy).data
    column = next(
        column for column in ("mean cosine", "cosine of task vectors", "accuracy") if column in data
    )
    merged = data[data["variant"] == "merged"].set_index("task")[column]
    assert pd.isna(merged["mnist"]) and pd.isna(merged[AVERAGE]) and merged["cars"] > 0
    calibrated = data[data["variant"] == CALIBRATED].set_index("task")[column]
    assert not calibrated.isna().any()


@pytest.mark.parametrize("band", ["q10-q90", "q25-q75", "std", "none"])
def test_whiskers_are_the_band_that_the_options_name(band: str, full: DriftRun) -> None:
    drawn = charts["task-cosine"].draw(full, ChartOptions(band=band))  # type: ignore[arg-type]
    values = full.samples("cars", "merged", "final")["cos"].to_numpy(dtype=float)
    row = drawn.data.set_index(["task", "variant"])[["low", "high"]].astype(float).loc[("cars", "merged")]
    wanted = {
        "q10-q90": np.quantile(values, [0.1, 0.9]),
        "q25-q75": np.quantile(values, [0.25, 0.75]),
        "std": values.mean() + np.array([-1, 1]) * values.std(),
        "none": [np.nan, np.nan],
    }[band]
    assert [row["low"], row["high"]] == pytest.approx(list(wanted), nan_ok=True)
    assert any("Whiskers" in note for note in drawn.notes) == (band != "none")


def test_one_task_has_no_mean_of_tasks(full: DriftRun) -> None:
    drawn = charts["task-cosine"].draw(full, ChartOptions(tasks=["cars"]))
    assert set(drawn.data["task"]) == {"cars"}


def test_gains_are_differences_of_the_tables(full: DriftRun) -> None:
    drawn = charts["gains"].draw(full)
    assert set(drawn.data["variant"]) == {CONTROL, CALIBRATED}
    for trace in drawn.figure.data:
        variant = CALIBRATED if trace.name == "featcal" else CONTROL
        for at, task in enumerate(full.tasks):
            cosines = [full.value("cos_mean", task=task, variant=name) for name in (variant, "merged")]
            scores = [full.accuracy(task, name).iloc[0] for name in (variant, "merged")]
            assert trace.x[at] == pytest.approx(cosines[0] - cosines[1])
            assert trace.y[at] == pytest.approx(100 * (scores[0]["value"] - scores[1]["value"]))
            counts = [(round(score["value"] * score["n"]), int(score["n"])) for score in reversed(scores)]
            low, high = unpaired_difference(*counts[0], *counts[1])
            assert trace.y[at] + trace.error_y.array[at] == pytest.approx(100 * high)
            assert trace.y[at] - trace.error_y.arrayminus[at] == pytest.approx(100 * low)


def test_gains_are_called_by_the_metric_that_tasks_are_judged_by(full: DriftRun) -> None:
    asked = open_run(full.path)
    asked._frames["accuracy"] = asked.accuracy().assign(metric="exact_match")
    drawn = charts["gains"].draw(asked)
    assert drawn.figure.layout.yaxis.title.text.startswith("gain in exact match over")
    assert "accuracy" not in drawn.alt and set(drawn.data["metric"]) == {"exact_match"}


def test_the_calibrated_points_carry_the_names_of_tasks(full: DriftRun) -> None:
    modes = {trace.name: trace.mode for trace in charts["gains"].draw(full).figure.data}
    assert modes == {"featcal, anchor only": "markers", "featcal": "markers+text"}


def test_names_of_points_stand_apart_and_on_the_panel() -> None:
    points = pd.DataFrame({"x": [0.0, 0.01, 0.1, 0.2], "y": [0.0, 1.0, 8.0, 10.0]})
    for axis, half in (("x", 0.01), ("y", 1.5)):
        points[f"{axis}_low"], points[f"{axis}_high"] = points[axis] - half, points[axis] + half
    found = places(["lowest", "above it", "alone", "at the end"], points)
    assert found[0].split()[0] == "bottom" or found[1].split()[0] == "top"
    assert found[3].endswith("left"), "to the right there is no room"
    assert places(["one"], points[:1].assign(x_low=np.nan, x_high=np.nan)) == ["top right"]
    assert places([], points) == []


def test_the_axis_of_seconds_writes_whole_numbers() -> None:
    ends = pd.Series([3.8, 19.5])
    assert [at for at in _ticks(ends) if 3 < at < 30] == [5, 10, 20]
    assert _ticks(pd.Series([0.0])) == [] and 100_000 in _ticks(pd.Series([2.0, 150_000.0]))


def test_gains_say_of_their_intervals_whether_they_are_paired(full: DriftRun, tmp_path: pathlib.Path) -> None:
    # As many test samples as diagnosis samples: then single answers of all of them are stored.
    paired = open_run(write_full_run(tmp_path / "run", tasks=["cars"], size=Size(tests=24)))
    for run in (paired, full):
        drawn = charts["gains"].draw(run)
        changes = [
            change(run, SCORE, row["task"], ("merged", row["variant"]))
            for row in drawn.data.to_dict("records")
        ]
        assert {gain.paired for gain in changes} == {run is paired}
        assert any(pairing(paired_by_task(changes)) in note for note in drawn.notes)
        assert drawn.data["accuracy gain (points) low"].tolist() == [100 * gain.low for gain in changes]


@pytest.mark.parametrize("name", ["gains", "sample-cosine"])
def test_without_a_rival_there_is_no_gain(name: str, uncalibrated: DriftRun) -> None:
    assert charts[name].missing(uncalibrated, ChartOptions()) == NO_RIVAL


@pytest.mark.parametrize("name", ["gains", "sample-cosine"])
def test_a_rival_that_is_not_chosen_is_not_made_again(name: str, full: DriftRun) -> None:
    reason = charts[name].missing(full, ChartOptions(variants=["base"], baseline="base"))
    assert reason == "needs a variant besides the baseline; choose another variant, or another baseline."


def test_gains_count_from_the_baseline_that_is_named(full: DriftRun) -> None:
    drawn = charts["gains"].draw(full, ChartOptions(baseline=CONTROL, variants=[CALIBRATED]))
    assert set(drawn.data["variant"]) == {CALIBRATED}
    row = drawn.data[drawn.data["task"] == "dtd"].iloc[0]
    cosines = [full.value("cos_mean", task="dtd", variant=name) for name in (CALIBRATED, CONTROL)]
    assert row["cosine gain"] == pytest.approx(cosines[0] - cosines[1])


def test_without_labels_accuracy_charts_name_the_command(tmp_path: pathlib.Path) -> None:
    bare = open_run(write_full_run(tmp_path / "run", has_labels=False, tasks=["cars"]))
    for name in ("accuracy", "gains"):
        assert "`driftlens evaluate RUN`" in str(charts[name].missing(bare, ChartOptions()))
