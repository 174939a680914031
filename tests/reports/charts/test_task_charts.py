"""Charts with a mark per task: they draw the tables' numbers, name the control, and never fill a gap."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from driftlens.base.intervals import Interval, mean_over_tasks, unpaired_difference
from driftlens.findings.frame import paired_by_task, pairing
from driftlens.findings.measures import SCORE, change
from driftlens.runs.manifest import LayerInfo
from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.gains import NO_RIVAL, _ticks, places
from driftlens_reports.charts.per_task import AVERAGE, OUTSIDE, group_of
from tests.records.full_run import SITES, Size, write_full_run
from tests.reports.charts.recording import finite, with_rows

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
    for variant, values in by_legend(charts[name].draw(full, ChartOptions(controls=True)).figure).items():
        wanted = rows.loc[rows["variant"] == variant, column].astype(float)
        assert finite(values) == finite([*wanted, wanted.mean()])


def test_accuracy_has_the_base_the_control_and_the_expert_with_the_tables_intervals(full: DriftRun) -> None:
    figure = charts["accuracy"].draw(full, ChartOptions(controls=True)).figure
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
    data = charts[name].draw(gappy, ChartOptions(controls=True)).data
    column = next(
        column for column in ("mean cosine", "cosine of task vectors", "accuracy") if column in data
    )
    merged = data[data["variant"] == "merged"].set_index("task")[column]
    assert pd.isna(merged["mnist"]) and pd.isna(merged[AVERAGE]) and merged["cars"] > 0
    calibrated = data[data["variant"] == CALIBRATED].set_index("task")[column]
    assert not calibrated.isna().any()


@pytest.mark.parametrize("band", ["q10-q90", "q25-q75", "std", "none"])
def test_whiskers_are_the_band_that_the_options_name(band: str, full: DriftRun) -> None:
    drawn = charts["task-cosine"].draw(full, ChartOptions(controls=True, band=band))  # type: ignore[arg-type]
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
    drawn = charts["task-cosine"].draw(full, ChartOptions(controls=True, tasks=["cars"]))
    assert set(drawn.data["task"]) == {"cars"}


def test_gains_are_differences_of_the_tables(full: DriftRun) -> None:
    drawn = charts["gains"].draw(full, ChartOptions(controls=True))
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
    asked = with_rows(full, "accuracy", full.accuracy().assign(metric="exact_match"))
    drawn = charts["gains"].draw(asked, ChartOptions(controls=True))
    assert drawn.figure.layout.yaxis.title.text.startswith("gain in exact match over")
    assert "accuracy" not in drawn.alt and set(drawn.data["metric"]) == {"exact_match"}


def test_the_calibrated_points_carry_the_names_of_tasks(full: DriftRun) -> None:
    modes = {
        trace.name: trace.mode
        for trace in charts["gains"].draw(full, ChartOptions(controls=True)).figure.data
    }
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
    near = [11.2, 14.7]
    assert [at for at in _ticks(pd.Series(near)) if 11 < at < 15] == [12, 13, 14]
    assert 8 in _ticks(pd.Series([8.0]))
    assert _ticks(pd.Series([0.0])) == [] and 100_000 in _ticks(pd.Series([2.0, 150_000.0]))


def test_gains_say_of_their_intervals_whether_they_are_paired(full: DriftRun, tmp_path: Path) -> None:
    # As many test samples as diagnosis samples: then single answers of all of them are stored.
    paired = open_run(write_full_run(tmp_path / "run", tasks=["cars"], size=Size(tests=24)))
    for run in (paired, full):
        drawn = charts["gains"].draw(run, ChartOptions(controls=True))
        changes = [
            change(run, SCORE, row["task"], ("merged", row["variant"]))
            for row in drawn.data.to_dict("records")
        ]
        assert {gain.paired for gain in changes} == {run is paired}
        assert any(pairing(paired_by_task(changes)) in note for note in drawn.notes)
        assert drawn.data["accuracy gain (points) low"].tolist() == [100 * gain.low for gain in changes]


@pytest.mark.parametrize("name", ["gains", "sample-cosine"])
def test_without_a_rival_there_is_no_gain(name: str, uncalibrated: DriftRun) -> None:
    assert charts[name].missing(uncalibrated, ChartOptions(controls=True)) == NO_RIVAL


@pytest.mark.parametrize("name", ["gains", "sample-cosine"])
def test_a_rival_that_is_not_chosen_is_not_made_again(name: str, full: DriftRun) -> None:
    reason = charts[name].missing(full, ChartOptions(controls=True, variants=["base"], baseline="base"))
    assert reason == "needs a variant besides the baseline; choose another variant, or another baseline."


def test_gains_count_from_the_baseline_that_is_named(full: DriftRun) -> None:
    drawn = charts["gains"].draw(full, ChartOptions(controls=True, baseline=CONTROL, variants=[CALIBRATED]))
    assert set(drawn.data["variant"]) == {CALIBRATED}
    row = drawn.data[drawn.data["task"] == "dtd"].iloc[0]
    cosines = [full.value("cos_mean", task="dtd", variant=name) for name in (CALIBRATED, CONTROL)]
    assert row["cosine gain"] == pytest.approx(cosines[0] - cosines[1])


def test_without_labels_accuracy_charts_name_the_command(tmp_path: Path) -> None:
    bare = open_run(write_full_run(tmp_path / "run", has_labels=False, tasks=["cars"]))
    for name in ("accuracy", "gains"):
        assert "`driftlens analyze RUN`" in str(charts[name].missing(bare, ChartOptions(controls=True)))


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
    data = charts["alignment"].draw(full, ChartOptions(controls=True)).data
    params = full.params(variant=CALIBRATED)
    for layer in full.manifest.layers:
        cosines = params.loc[(params["scope"] == "layer") & (params["path"] == layer.path), "cos"]
        row = data[(data["variant"] == CALIBRATED) & (data["layer"] == layer.index)].iloc[0]
        found = [row["mean cosine of task vectors"], row["lowest"], row["highest"]]
        assert found == pytest.approx([cosines.mean(), cosines.min(), cosines.max()])


def test_modules_of_all_blocks_that_play_one_part_are_one_group(full: DriftRun) -> None:
    drawn = charts["alignment"].draw(full, ChartOptions(controls=True))
    params = full.params(variant="merged")
    modules = params[params["scope"] == "module"]
    right = next(
        trace for trace in drawn.figure.data if trace.legendgroup == "merged" and not trace.showlegend
    )
    assert list(right.x) == list(SITES)
    for site, value in zip(right.x, right.y, strict=True):
        assert value == pytest.approx(modules.loc[modules["path"].str.endswith(site), "cos"].mean())


def test_groups_of_modules_are_drawn_as_the_run_measured_them(full: DriftRun) -> None:
    params = full.params()
    modules = params[params["scope"] == "backbone"]
    groups = pd.concat([modules.assign(scope="group", path=name) for name in ("q", "norms")])
    drawn = charts["alignment"].draw(with_rows(full, "params", pd.concat([params, groups])))
    right = next(
        trace for trace in drawn.figure.data if trace.legendgroup == "merged" and not trace.showlegend
    )
    assert list(right.x) == ["q", "norms"]
    mean = modules.loc[modules["variant"] == "merged", "cos"].mean()
    assert list(right.y) == pytest.approx([mean, mean])


def test_block_one_does_not_hold_the_modules_of_block_ten() -> None:
    layers = (
        LayerInfo(1, "stem", "conv1"),
        LayerInfo(2, "block", "blocks.1"),
        LayerInfo(3, "block", "blocks.10"),
    )
    run = cast(DriftRun, SimpleNamespace(manifest=SimpleNamespace(layers=layers)))
    assert group_of(run, "blocks.10.mlp.fc") == group_of(run, "blocks.1.mlp.fc") == "mlp.fc"
    assert group_of(run, "conv1") == group_of(run, "blocks.100.mlp.fc") == OUTSIDE


def test_adjoint_bars_and_dots_are_means_over_samples(full: DriftRun) -> None:
    drawn = charts["adjoint"].draw(full, ChartOptions(controls=True))
    rows = full.adjoint(variant=CALIBRATED)
    bars = [trace for trace in drawn.figure.data if trace.type == "bar"][-2:]
    for target, bar in zip(("loss", "margin"), bars, strict=True):
        own = rows[rows["target"] == target]
        means = [
            np.mean(
                [own[(own["task"] == task) & (own["layer"] == layer)]["part"].mean() for task in full.tasks]
            )
            for layer in range(1, 7)
        ]
        rest = np.mean([own[own["task"] == task]["remainder"].mean() for task in full.tasks])
        assert list(bar.y) == pytest.approx([*means, rest])
        assert list(bar.x) == [1, 2, 3, 4, 5, 6, 7]


def test_module_groups_are_means_over_tasks_and_sum_to_the_layer(full: DriftRun) -> None:
    drawn = charts["group-contributions"].draw(full, ChartOptions(controls=True))
    cells = drawn.data[drawn.data["variant"] == CALIBRATED].groupby("layer")["share of final drift"].sum()
    layers = full.layers(variant=CALIBRATED).groupby("layer")["final_share"].mean()
    assert cells.tolist() == pytest.approx(layers.tolist())
    [cell] = drawn.data.query("variant == @CALIBRATED and `module group` == 'o' and layer == 3")[
        "share of final drift"
    ]
    rows = full.group_contributions(variant=CALIBRATED).query("group == 'o' and layer == 3")
    assert cell == pytest.approx(rows["final_share"].mean()) and cell < 0
    assert drawn.figure.layout.yaxis.title.text == "module group"


def test_adjoint_parts_and_remainder_add_up_to_the_change(full: DriftRun) -> None:
    data = charts["adjoint"].draw(full, ChartOptions(controls=True)).data
    sums = data[data["task"] == "cars"].groupby(["variant", "target"])["mean part"].sum()
    for (variant, target), total in sums.items():
        rows = full.adjoint("cars", variant)
        assert total == pytest.approx(rows.loc[rows["target"] == target, "change"].mean())


def test_without_a_loss_adjoint_shows_the_margin_alone(full: DriftRun) -> None:
    rows = full.adjoint()
    drawn = charts["adjoint"].draw(with_rows(full, "adjoint", rows[rows["target"] == "margin"]))
    assert set(drawn.data["target"]) == {"margin"}
    assert "score units of margin" in drawn.alt


def test_the_calibration_log_has_each_sites_ratio_and_change_in_its_cell(full: DriftRun) -> None:
    drawn = charts["calibration-log"].draw(full, ChartOptions(controls=True))
    ratios, changes = (trace for trace in drawn.figure.data if trace.type == "heatmap")
    log = full.calibration("featcal").set_index(["layer", "site"])
    for down, site in enumerate(SITES):
        for across, layer in enumerate(ratios.x):
            path = next(info.path for info in full.manifest.layers if info.index == layer)
            row = log.loc[(layer, f"{path}.{site}")]
            assert ratios.z[down][across] == pytest.approx(row["objective_after"] / row["objective_before"])
            assert changes.z[down][across] == pytest.approx(row["weight_change"])


def test_an_objective_that_was_zero_has_no_ratio(full: DriftRun) -> None:
    rows = full.calibration()
    rows.loc[0, "objective_before"] = 0.0
    drawn = charts["calibration-log"].draw(with_rows(full, "calibration", rows))
    assert math.isnan(drawn.figure.data[0].z[0][0]) and drawn.data["objective ratio"].isna().sum() == 1


def test_no_calibration_means_no_log(uncalibrated: DriftRun) -> None:
    reason = charts["calibration-log"].missing(uncalibrated, ChartOptions(controls=True))
    assert reason is not None and "`driftlens calibrate RUN --name featcal`" in reason


def test_sweeps_average_tasks_first_and_then_seeds(swept: DriftRun) -> None:
    drawn = charts["sweeps"].draw(swept, ChartOptions(controls=True))
    rows = swept.sweeps()
    bold = [trace for trace in drawn.figure.data if trace.legendgroup == "mean"]
    panels = [(measure, sweep) for measure in ("drift_l2_mean", "accuracy") for sweep in ("lam", "alpha")]
    for (measure, sweep), trace in zip(panels, bold, strict=True):
        own = rows[rows["sweep"] == sweep]
        for value, mean, spread in zip(trace.x, trace.y, trace.error_y.array, strict=True):
            by_seed = [
                own[(own[sweep] == value) & (own["seed"] == seed)][measure].mean() for seed in range(3)
            ]
            assert mean == pytest.approx(np.mean(by_seed))
            assert spread == pytest.approx(np.std(by_seed, ddof=1))


def test_thin_lines_are_the_tasks_apart_by_gaps(swept: DriftRun) -> None:
    drawn = charts["sweeps"].draw(swept, ChartOptions(controls=True))
    thin = next(trace for trace in drawn.figure.data if trace.legendgroup == "tasks")
    assert [value is None for value in thin.y] == [False] * 4 + [True] + [False] * 4
    rows = swept.sweeps()
    cars = rows[(rows["sweep"] == "lam") & (rows["task"] == "cars")].groupby("lam")["drift_l2_mean"].mean()
    assert list(thin.y[:4]) == pytest.approx(cars.tolist())


def test_the_calibrations_of_the_run_stand_among_the_points(swept: DriftRun) -> None:
    stars = [
        at
        for at in charts["sweeps"].draw(swept, ChartOptions(controls=True)).figure.data
        if at.legendgroup == "calibrations"
    ]
    info, tasks = swept.manifest.calibrations["featcal"], list(swept.tasks)
    values = [info.settings["lam"], info.settings["alpha"]]
    assert [list(at.x) for at in stars] == [[value] for value in values * 2]
    final = swept.layers(variant="calibrated:featcal", layer="final")["drift_l2_mean"].mean()
    rows = swept.accuracy()
    scored = rows[(rows["variant"] == "calibrated:featcal") & (rows["metric"] == "accuracy")]
    right = scored.set_index("task")["value"].reindex(tasks).mean(skipna=False)
    for at, wanted in zip(stars, [final, final, right, right], strict=True):
        assert list(at.y) == pytest.approx([wanted], nan_ok=True) and list(at.text) == ["featcal"]


def test_the_ring_marks_the_value_that_other_sweeps_keep(swept: DriftRun) -> None:
    rings = [
        trace
        for trace in charts["sweeps"].draw(swept, ChartOptions(controls=True)).figure.data
        if trace.legendgroup == "default"
    ]
    assert [list(ring.x) for ring in rings] == [[0.05], [0.3], [0.05], [0.3]]


def test_one_seed_has_no_whiskers_and_the_notes_say_so(full: DriftRun) -> None:
    run = with_rows(full, "sweeps", sweep_rows("rho", [1, 2], seeds=1))
    drawn = charts["sweeps"].draw(run, ChartOptions(controls=True))
    assert "With one seed there is no spread to show." in drawn.notes
    assert all(trace.error_y.array is None for trace in drawn.figure.data)


def test_a_sweep_of_several_settings_is_named_and_not_drawn(full: DriftRun) -> None:
    several = sweep_rows("lam", [0.1]).assign(sweep="lam+rho", rho=1.5)
    run = with_rows(full, "sweeps", pd.concat([sweep_rows("alpha", [0, 1]), several]))
    drawn = charts["sweeps"].draw(run, ChartOptions(controls=True))
    assert set(drawn.data["sweep"]) == {"alpha"}
    assert "Not drawn here: lam+rho." in drawn.notes
    reason = charts["sweeps"].missing(with_rows(full, "sweeps", several), ChartOptions(controls=True))
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


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ({"judged_by": "hellinger"}, "Hellinger distance"),
        ({"judged_by": "drift_rel"}, "relative drift"),
        ({"what": "KL(expert || calibrated) of class probabilities, nat"}, "KL"),
        ({"what": "relative final drift of all tasks, as there is no head for dtd"}, "relative drift"),
    ],
)
def test_the_share_that_was_taken_is_ringed_on_its_curve(
    full: DriftRun, what: dict[str, str], name: str
) -> None:
    """Drift stands once where it is what decided; older records say in words what that was."""
    assert "--shrink auto" in str(charts["shares"].missing(full, ChartOptions()))
    curve = [
        {"share": share, "n": 48, **what}
        | {f"{of}{end}": at + by for of in ("score", "drift") for end, by in ENDS.items()}
        for share, at in ((0.0, 0.5), (0.4, 0.3), (1.0, 0.4))
    ]
    info = replace(full.calibration_info("featcal"), shrink={"share": 0.4, "curve": curve})
    run = DriftRun(full.path, replace(full.manifest, calibrations={"featcal": info}))
    drawn = charts["shares"].draw(run)
    measures = list(dict.fromkeys([name, "relative drift"]))
    assert list(drawn.data["measure"].unique()) == measures and "takes 0.400 with 0.300" in drawn.alt
    for line, ring in zip(drawn.figure.data[::2], drawn.figure.data[1::2], strict=True):
        assert (list(line.x), list(line.y)) == ([0, 0.4, 1], [0.5, 0.3, 0.4])
        assert list(line.error_y.array) == pytest.approx([0.2] * 3)
        assert list(line.error_y.arrayminus) == pytest.approx([0.1] * 3)
        assert (list(ring.x), list(ring.y)) == ([0.4], [0.3])


ENDS = {"": 0.0, "_low": -0.1, "_high": 0.2}


def test_methods_stand_in_one_picture_beside_the_runs_own_models(full: DriftRun) -> None:
    rows = sweep_rows("n", [8, 64], tasks=tuple(full.tasks))
    other = rows.assign(sweep="residual:n", method="residual", accuracy=rows["accuracy"] + 0.05)
    assert "--method featcal,residual" in str(
        charts["samples"].missing(with_rows(full, "sweeps", rows), ChartOptions(controls=True))
    )
    drawn = charts["samples"].draw(with_rows(full, "sweeps", pd.concat([rows, other])))
    data = drawn.data.set_index(["measure", "method", "n"]).sort_index()
    for method, gain in (("featcal", 0.0), ("residual", 0.05)):
        by_seed = rows[rows["n"] == 8].groupby("seed")["accuracy"].mean() + gain
        found = data.loc[("accuracy", method, 8)]
        assert (found["value"], found["draws"]) == (pytest.approx(by_seed.mean()), 3)
        reach = 4.3026527 * by_seed.std() / 3**0.5  # Student's t with two degrees of freedom
        assert found["high"] - found["value"] == pytest.approx(reach)
    merged = next(trace for trace in drawn.figure.data if trace.name == "merged")
    level = full.accuracy(variant="merged")["value"].mean()
    assert list(merged.y) == pytest.approx([level, level])
