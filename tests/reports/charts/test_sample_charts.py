"""Charts of samples: every point is a row of the tables, and of too many the same few are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from hypothesis import given, strategies as st

from driftlens.config.requests import ProjectionRequest
from driftlens.results.formatting import typeset_signs
from driftlens.results.projection import project, stratified_subset
from driftlens.runs.manifest import ModelInfo
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens_reports.charts.chart import ChartOptions, Drawn, charts
from driftlens_reports.charts.picking import subsample_rows
from tests.reports.charts.recording import finite
from tests.runs.full_run import layer_list

CALIBRATED = "calibrated:featcal"
CLOUDS = ("scatter", "sample-cosine", "bound")


@pytest.fixture(scope="module", params=[10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def crowd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    return write_crowd(tmp_path_factory.mktemp("crowd") / "run", request.param)


def clouds(drawn: Drawn) -> list[go.Scatter]:
    return [trace for trace in drawn.figure.data if trace.mode == "markers" and len(trace.x) > 1]


def test_sample_cosine_has_the_baseline_on_x_and_the_variant_on_y(full: DriftRun) -> None:
    traces = clouds(charts["sample-cosine"].draw(full, ChartOptions()))
    assert len(traces) == len(full.tasks)
    for at, trace in enumerate(traces):
        samples = full.samples(full.tasks[at], layer="final").set_index("sample_id")["cos"].astype(float)
        variants = full.samples(full.tasks[at], layer="final").set_index("sample_id")["variant"]
        before = samples[variants == "merged"].loc[list(trace.text)]
        after = samples[variants == trace.legendgroup].loc[list(trace.text)]
        assert np.array_equal(trace.x, before) and np.array_equal(trace.y, after)


def test_each_panel_of_sample_cosine_writes_the_mean_gain(full: DriftRun) -> None:
    figure = charts["sample-cosine"].draw(full, ChartOptions()).figure
    gain = np.mean(
        full.samples("cars", CALIBRATED, "final")["cos"].to_numpy(float)
        - full.samples("cars", "merged", "final")["cos"].to_numpy(float)
    )
    assert any(typeset_signs(f"featcal {gain:+.3f}") in str(note.text) for note in figure.layout.annotations)


def test_samples_are_paired_by_name_not_by_row(full: DriftRun) -> None:
    """A table in another order, or with a sample missing, still pairs each sample with itself."""
    shuffled = open_run(full.path)
    rows = shuffled.samples()
    at = rows.index[(rows["variant"] == "merged") & (rows["layer"] == 6) & (rows["task"] == "cars")]
    rows = rows.drop(at[0]).sample(frac=1, random_state=1).reset_index(drop=True)
    shuffled._frames["samples"] = rows
    key = ["task", "variant", "sample_id"]
    straight = charts["sample-cosine"].draw(full, ChartOptions()).data.set_index(key)
    mixed = charts["sample-cosine"].draw(shuffled, ChartOptions()).data.set_index(key)
    assert len(straight) - len(mixed) == 1
    columns = ["baseline cosine", "cosine"]
    pd.testing.assert_frame_equal(mixed[columns].sort_index(), straight.loc[mixed.index, columns].sort_index())


def test_bounds_are_gain_times_drift_and_the_secant_is_exact(full: DriftRun) -> None:
    drawn = charts["bound"].draw(full, ChartOptions())
    rows = full.outputs(variant="merged").set_index(["task", "sample_id"])
    drift = full.samples(variant="merged", layer="final").set_index(["task", "sample_id"])["drift_l2"]
    merged = [trace for trace in clouds(drawn) if trace.legendgroup == "merged"]
    for trace, column in zip(
        merged,
        ["score_gain_secant", "score_gain", "score_gain_spectral", "score_gain_certified"],
        strict=True,
    ):
        assert finite(trace.x) == pytest.approx(finite((rows[column] * drift).astype(float)))
        assert finite(trace.y) == finite(rows["score_drift_l2"])
    assert np.allclose(merged[0].x, merged[0].y)
    assert (merged[3].y <= merged[3].x * (1 + 1e-9)).all()
    assert drawn.alt.startswith("0 samples of 144 above the certified bound.")
    apart = open_run(full.path)  # models with heads of their own: Eq. 7 has a second term
    apart._frames["outputs"] = apart.outputs().assign(score_map_mismatch=0.25)
    moved = charts["bound"].draw(apart, ChartOptions()).data
    assert (moved["certified"] - drawn.data["certified"]).to_numpy() == pytest.approx(0.25)


def test_points_without_a_place_on_logarithmic_axes_are_counted(full: DriftRun) -> None:
    spoiled = open_run(full.path)
    rows = spoiled.outputs()
    rows.loc[rows["variant"] == "merged", "score_gain_certified"] = np.inf
    spoiled._frames["outputs"] = rows
    drawn = charts["bound"].draw(spoiled, ChartOptions())
    assert any(note.startswith("72 points without a place") for note in drawn.notes)
    assert all(np.isfinite(trace.x).all() and (trace.x > 0).all() for trace in clouds(drawn))


@pytest.mark.parametrize("layer", [3, "final"])
def test_scatter_draws_the_projection_with_the_expert_first(layer: int | str, full: DriftRun) -> None:
    options = ChartOptions(tasks=["cars"], layer=layer)
    drawn = charts["scatter"].draw(full, options)
    found = project(full, "cars", ProjectionRequest(layer=layer), store_it=False)
    for variant, trace in zip(["expert", "merged", CALIBRATED], clouds(drawn), strict=True):
        rows = found.frame[found.frame["variant"] == variant]
        assert np.array_equal(trace.x, rows["x"]) and np.array_equal(trace.y, rows["y"])
    assert drawn.data["mean cosine"].dropna().nunique() >= 2


def test_scatter_shows_the_task_that_drifts_most(full: DriftRun) -> None:
    drifts = full.layers(variant="merged", layer="final").set_index("task")["drift_l2_mean"].astype(float)
    assert set(charts["scatter"].draw(full, ChartOptions()).data["task"]) == {drifts.idxmax()}


def test_choosing_variants_moves_no_point(full: DriftRun) -> None:
    few = charts["scatter"].draw(full, ChartOptions(tasks=["cars"], variants=["merged"])).data
    every = charts["scatter"].draw(full, ChartOptions(tasks=["cars"])).data
    assert set(few["variant"]) == {"expert", "merged"}
    columns = ["variant", "sample_id", "x", "y"]
    assert few[columns].merge(every[columns], how="inner").equals(few[columns])


def test_scatter_leaves_the_base_out_and_says_so(full: DriftRun) -> None:
    drawn = charts["scatter"].draw(full, ChartOptions(tasks=["cars"], variants=["base", "merged"]))
    assert [len(trace.x) > 0 for trace in clouds(drawn)] == [True, True]
    assert set(drawn.data["variant"]) == {"expert", "merged"}
    assert any("the base has no panel" in note for note in drawn.notes)
    reason = charts["scatter"].missing(full, ChartOptions(tasks=["cars"], variants=["base"]))
    assert reason is not None and "choose another variant" in reason


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOUDS)
def test_of_very_many_samples_few_are_drawn_and_the_notes_say_so(name: str, crowd: DriftRun) -> None:
    options = ChartOptions(max_points=6000)
    drawn = charts[name].draw(crowd, options)
    assert 0 < sum(len(trace.x) for trace in clouds(drawn)) <= options.max_points
    assert any(f" of {len(crowd.sample_ids('crowd')) // 1000}" in note for note in drawn.notes), drawn.notes
    again = charts[name].draw(crowd, options)
    assert again.figure.to_json() == drawn.figure.to_json()


@pytest.mark.parametrize(("most", "kind"), [(5000, "scatter"), (6000, "scattergl")])
def test_webgl_draws_only_what_would_be_slow_as_svg(most: int, kind: str, crowd: DriftRun) -> None:
    found = clouds(charts["sample-cosine"].draw(crowd, ChartOptions(max_points=most)))
    assert sum(len(trace.x) for trace in found) > 0.75 * most
    assert {trace.type for trace in found} == {kind}


def samples(sizes: list[int]) -> pd.DataFrame:
    """As many samples of each class as its size says, classes mixed."""
    labels = [f"class {at}" for at, size in enumerate(sizes) for _ in range(size)]
    rows = pd.DataFrame({"sample_id": [f"test/{at}" for at in range(len(labels))], "label": labels})
    return rows.sample(frac=1, random_state=0).reset_index(drop=True)


@given(sizes=st.lists(st.integers(1, 80), min_size=1, max_size=6), limit=st.integers(6, 200))
def test_every_class_keeps_its_share(sizes: list[int], limit: int) -> None:
    rows = samples(sizes)
    kept = stratified_subset(rows, limit, ["label"])
    assert len(kept) == min(limit, len(rows))
    for label, size in rows["label"].value_counts().items():
        share = size * len(kept) / len(rows)
        count = (kept["label"] == label).sum()
        assert count >= 1, "a rare class is not lost"
        assert abs(count - share) <= len(sizes), (label, count, share)


def test_order_and_neighbours_do_not_decide_which_are_kept() -> None:
    rows = samples([50, 30])
    kept = set(stratified_subset(rows, 20, ["label"])["sample_id"])
    backwards = stratified_subset(rows.iloc[::-1].reset_index(drop=True), 20, ["label"])
    assert set(backwards["sample_id"]) == kept and backwards.index.is_monotonic_increasing


def test_a_sample_stays_in_all_its_panels_or_in_none() -> None:
    each = samples([400, 100]).assign(task="cars")
    rows = pd.concat([each.assign(variant=name) for name in ("merged", "calibrated:featcal")])
    kept, notes = subsample_rows(rows, ChartOptions(max_points=100), 2)
    assert len(kept) == 100
    assert (kept.groupby("sample_id").size() == 2).all()
    assert notes == ("50 of 500 samples shown, of every class alike.",)


def test_missing_labels_are_a_class_of_their_own() -> None:
    rows = samples([40, 40]).assign(task="cars", label=None)
    kept, _ = subsample_rows(rows, ChartOptions(max_points=10), 1)
    assert len(kept) == 10


VARIANTS = ("merged", "baseline:featcal-anchor", "calibrated:featcal")


def write_crowd(path: Path, count: int) -> DriftRun:
    """One task with `count` samples of 50 classes at the last layer."""
    rng = np.random.default_rng(0)
    ids = [f"test/{at}" for at in range(count)]
    labels = [f"class {at}" for at in rng.integers(0, 50, count)]
    expert = rng.normal(size=(count, 3)).astype(np.float32)
    layers = layer_list(1)
    with RunWriter.create(path, spec_yaml="name: crowd\n", spec_digest="0" * 64, name="crowd") as writer:
        models = {variant: ModelInfo(f"{at:064x}", 1) for at, variant in enumerate(VARIANTS, start=1)}
        writer.update_manifest(tasks=["crowd"], variants=list(VARIANTS), layers=layers, models=models)
        writer.write_sample_ids("crowd", "diagnosis", ids)
        writer.write_features("crowd", "expert", 3, expert)
        for at, variant in enumerate(VARIANTS):
            drift = rng.normal(size=expert.shape).astype(np.float32) / (1 + at)
            writer.write_features("crowd", variant, 3, expert + drift)
            key = {"task": "crowd", "variant": variant, "sample_id": ids, "label": labels}
            size = np.linalg.norm(drift, axis=1).astype(float)
            cosine = rng.uniform(0.2, 1, count)
            writer.append("samples", pd.DataFrame({**key, "layer": 3, "drift_l2": size, "cos": cosine}))
            outputs = {"score_drift_l2": 2 * size, "score_gain": 3.0, "score_gain_certified": 4.0}
            writer.append("outputs", pd.DataFrame({**key, **outputs}))
    return open_run(path)
