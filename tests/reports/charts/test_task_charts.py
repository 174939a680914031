"""Charts with a mark per task: they draw the tables' numbers, name the control, and never fill a gap."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import CALIBRATE
from driftlens.utils.intervals import Interval, mean_over_tasks
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.scores import AVERAGE
from tests.reports.charts.recording import finite, with_rows
from tests.runs.full_run import write_full_run

CALIBRATED = "calibrated:featcal"


def by_legend(figure) -> dict[str, list[float]]:  # type: ignore[no-untyped-def]
    """Values of all traces by the variant they are of."""
    found: dict[str, list[float]] = {}
    for trace in figure.data:
        found.setdefault(trace.legendgroup, []).extend(finite(trace.y))
    return found


@pytest.fixture(scope="module")
def gappy(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """The merged model's cosine and accuracy on mnist were not measured."""
    path = write_full_run(tmp_path_factory.mktemp("gappy") / "run")
    for table, column in (("layers", "cos_mean"), ("accuracy", "value")):
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
        ("accuracy", "accuracy", "value"),
    ],
)
def test_marks_are_the_tables_values_and_their_means(name: str, table: str, column: str, full: DriftRun) -> None:
    rows = full.layers(layer="final") if table == "layers" else getattr(full, table)()
    for variant, values in by_legend(charts[name].draw(full, ChartOptions()).figure).items():
        wanted = rows.loc[rows["variant"] == variant, column].astype(float)
        assert finite(values) == finite([*wanted, wanted.mean()])


def test_accuracy_has_the_base_and_the_expert_with_the_tables_intervals(full: DriftRun) -> None:
    figure = charts["accuracy"].draw(full, ChartOptions()).figure
    order = list(dict.fromkeys(trace.legendgroup for trace in figure.data))
    assert order == ["base", "merged", CALIBRATED, "expert"]
    for trace in figure.data:
        rows = full.accuracy(variant=trace.legendgroup)[["value", "ci_low", "ci_high"]].to_numpy(dtype=float)
        mean = mean_over_tasks([Interval(*row) for row in rows])
        assert trace.x[-1] == AVERAGE
        up = np.array(trace.y) + np.array(trace.error_y.array)
        down = np.array(trace.y) - np.array(trace.error_y.arrayminus)
        assert up == pytest.approx([*rows[:, 2], mean.high]) and down == pytest.approx([*rows[:, 1], mean.low])


@pytest.mark.parametrize("name", ["task-cosine", "accuracy"])
def test_a_gap_stays_a_gap_and_spoils_the_mean(name: str, gappy: DriftRun) -> None:
    data = charts[name].draw(gappy, ChartOptions()).data
    column = "accuracy" if name == "accuracy" else "mean cosine"
    merged = data[data["variant"] == "merged"].set_index("task")[column]
    assert pd.isna(merged["mnist"]) and pd.isna(merged[AVERAGE]) and merged["cars"] > 0
    calibrated = data[data["variant"] == CALIBRATED].set_index("task")[column]
    assert not calibrated.isna().any()


def test_whiskers_are_quantiles_over_samples(full: DriftRun) -> None:
    drawn = charts["task-cosine"].draw(full)
    values = full.samples("cars", "merged", "final")["cos"].to_numpy(dtype=float)
    row = drawn.data.set_index(["task", "variant"])[["low", "high"]].astype(float).loc[("cars", "merged")]
    assert [row["low"], row["high"]] == pytest.approx([*np.quantile(values, [0.1, 0.9])])
    assert any("Whiskers" in note for note in drawn.notes)


def test_one_task_has_no_mean_of_tasks(full: DriftRun) -> None:
    drawn = charts["task-cosine"].draw(full, ChartOptions(tasks=["cars"]))
    assert set(drawn.data["task"]) == {"cars"}


def test_without_a_rival_there_is_no_gain(uncalibrated: DriftRun) -> None:
    reason = charts["sample-cosine"].missing(uncalibrated, ChartOptions())
    assert reason == f"needs a variant besides the merged model; choose one, or `{CALIBRATE}` adds one."


def test_without_labels_the_accuracy_chart_names_the_command(tmp_path: Path) -> None:
    bare = open_run(write_full_run(tmp_path / "run", has_labels=False, tasks=["cars"]))
    reason = charts["accuracy"].missing(bare, ChartOptions())
    assert "`driftlens analyze RUN`" in str(reason)


DEFAULTS = {"lam": 0.05, "rho": 2.0, "alpha": 0.3, "n": 64}


def sweep_rows(
    sweep: str, values: list[float], seeds: int = 3, tasks: tuple[str, ...] = ("cars", "dtd")
) -> pd.DataFrame:
    rng = np.random.default_rng(len(sweep))
    rows = [
        {
            **{"sweep": sweep, "point": point, "seed": seed, "task": task, "n_test": 100},
            **DEFAULTS,
            **{sweep: value, "drift_l2_mean": rng.uniform(1, 2), "accuracy": rng.uniform(0.5, 0.9)},
        }
        for point, value in enumerate(values)
        for seed in range(seeds)
        for task in tasks
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def swept(full: DriftRun) -> DriftRun:
    rows = [sweep_rows("lam", [0.005, 0.05, 0.5, 5]), sweep_rows("alpha", [0, 0.3, 1])]
    return with_rows(full, "sweeps", pd.concat(rows))


def test_alignment_is_the_mean_over_tasks_with_its_extremes(full: DriftRun) -> None:
    data = charts["alignment"].draw(full, ChartOptions()).data
    params = full.params(variant=CALIBRATED)
    for layer in full.manifest.layers:
        cosines = params.loc[(params["scope"] == "layer") & (params["path"] == layer.path), "cos"]
        row = data[(data["variant"] == CALIBRATED) & (data["layer"] == layer.index)].iloc[0]
        found = [row["mean cosine of task vectors"], row["lowest"], row["highest"]]
        assert found == pytest.approx([cosines.mean(), cosines.min(), cosines.max()])


def test_groups_of_modules_are_drawn_as_the_run_measured_them(full: DriftRun) -> None:
    params = full.params()
    modules = params[params["scope"] == "backbone"]
    groups = pd.concat([modules.assign(scope="group", path=name) for name in ("q", "norms")])
    drawn = charts["alignment"].draw(with_rows(full, "params", pd.concat([params, groups])))
    right = next(trace for trace in drawn.figure.data if trace.legendgroup == "merged" and not trace.showlegend)
    assert list(right.x) == ["q", "norms"]
    mean = modules.loc[modules["variant"] == "merged", "cos"].mean()
    assert list(right.y) == pytest.approx([mean, mean])


def test_sweeps_average_tasks_first_and_then_seeds(swept: DriftRun) -> None:
    drawn = charts["sweeps"].draw(swept, ChartOptions())
    rows = swept.sweeps()
    bold = [trace for trace in drawn.figure.data if trace.legendgroup == "mean"]
    panels = [(measure, sweep) for sweep in ("lam", "alpha") for measure in ("drift_l2_mean", "accuracy")]
    for (measure, sweep), trace in zip(panels, bold, strict=True):
        own = rows[rows["sweep"] == sweep]
        for value, mean, spread in zip(trace.x, trace.y, trace.error_y.array, strict=True):
            by_seed = [own[(own[sweep] == value) & (own["seed"] == seed)][measure].mean() for seed in range(3)]
            assert mean == pytest.approx(np.mean(by_seed))
            assert spread == pytest.approx(np.std(by_seed, ddof=1))


def test_thin_lines_are_the_tasks(swept: DriftRun) -> None:
    drawn = charts["sweeps"].draw(swept, ChartOptions())
    thin = next(trace for trace in drawn.figure.data if trace.legendgroup == "tasks")
    rows = swept.sweeps()
    cars = rows[(rows["sweep"] == "lam") & (rows["task"] == "cars")].groupby("lam")["drift_l2_mean"].mean()
    assert list(thin.y) == pytest.approx(cars.tolist())


def test_one_seed_has_no_whiskers_and_the_notes_say_so(full: DriftRun) -> None:
    run = with_rows(full, "sweeps", sweep_rows("rho", [1, 2], seeds=1))
    drawn = charts["sweeps"].draw(run, ChartOptions())
    assert "With one seed there is no spread to show." in drawn.notes
    assert all(trace.error_y.array is None for trace in drawn.figure.data)


def test_a_sweep_of_several_settings_is_named_and_not_drawn(full: DriftRun) -> None:
    several = sweep_rows("lam", [0.1]).assign(sweep="lam+rho", rho=1.5)
    run = with_rows(full, "sweeps", pd.concat([sweep_rows("alpha", [0, 1]), several]))
    drawn = charts["sweeps"].draw(run, ChartOptions())
    assert set(drawn.data["sweep"]) == {"alpha"}
    assert "Not drawn here: lam+rho." in drawn.notes
    reason = charts["sweeps"].missing(with_rows(full, "sweeps", several), ChartOptions())
    assert reason is not None and "`driftlens sweep RUN --param" in reason


def test_without_accuracy_sweeps_show_drift_alone(full: DriftRun) -> None:
    rows = sweep_rows("n", [8, 64, 512]).assign(accuracy=np.nan)
    drawn = charts["sweeps"].draw(with_rows(full, "sweeps", rows))
    assert set(drawn.data["measure"]) == {"drift_l2_mean"}
    assert all(axis.type == "log" for axis in drawn.figure.select_xaxes())


def test_a_task_without_a_number_spoils_the_mean_but_not_the_other_task(full: DriftRun) -> None:
    rows = sweep_rows("alpha", [0, 1])
    rows.loc[(rows["task"] == "dtd") & (rows["alpha"] == 1), "drift_l2_mean"] = np.nan
    data = charts["sweeps"].draw(with_rows(full, "sweeps", rows)).data
    drift = data[data["measure"] == "drift_l2_mean"].set_index(["task", "alpha"])["mean"]
    assert math.isnan(drift[("mean of tasks", 1)]) and math.isnan(drift[("dtd", 1)])
    assert finite([drift[("mean of tasks", 0)], drift[("cars", 1)]])
