"""Sweeps: every point is a plain calibration, whatever it is computed beside; rows append, replace and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import driftlens as dl
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.config.requests import SweepRequest
from driftlens.data.altered import corrupt_image
from driftlens.engine import sites as site_module
from driftlens.engine.calibrating import CalibrationContext
from driftlens.engine.sites import ExpertFeatureCache, record_activations, select_sites
from driftlens.experiment.study import Study
from driftlens.pipelines.analyze import reopen_study
from driftlens.pipelines.calibrate import calibrate
from driftlens.pipelines.sweep import sweep
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.utils.distributed import JobContext
from driftlens.utils.errors import Cancelled, DataError, SingularGramError, SpecError
from driftlens.utils.progress import CancelToken, ProgressEvent
from driftlens_reports.terminal import sweep_text
from tests.pipelines.calibrating import NAME, VARIANT, copied, files_of, request, same_rows
from tests.quick import few
from tests.zoo.world import TASKS, World

MEASURES = ("drift_l2_mean", "drift_rel", "cos_mean")
LAM = {"lam": [0.01, 0.3]}


@pytest.fixture(scope="module")
def study(light: DriftRun) -> Study:
    """The light run reopened; tests only add models of their own to its pool."""
    return reopen_study(light.path)[0]


def rows_of(run: DriftRun, name: str, **wanted: Any) -> pd.DataFrame:
    rows = run.sweeps()
    keep = rows["sweep"] == name
    for column, value in wanted.items():
        keep &= rows[column] == value
    return rows[keep].sort_values(["point", "seed", "task"]).reset_index(drop=True)


@pytest.mark.slow
@pytest.mark.parametrize("calibrator", [FeatCal(), ResidualCal(cv="off")])
def test_cached_expert_features_give_the_same_weights_as_none(
    study: Study, monkeypatch: pytest.MonkeyPatch, calibrator: Any
) -> None:
    """The second calibration on the same samples runs no expert where the cache holds all, and some where it can't."""
    sites = select_sites(study.pool.chain, update=calibrator.update)
    samples = {task: at.calibration for task, at in study.tasks.items() if at.calibration}
    runs = list[str]()

    def run(layer: Any, *args: Any, **options: Any) -> Any:
        if len(args) == 5:  # the cache asks for outputs, too; the merged model's pass for inputs alone
            runs.append(layer.path)
        return record_activations(layer, *args, **options)

    monkeypatch.setattr(site_module, "record_activations", run)

    def solved(cache: ExpertFeatureCache) -> tuple[dict[tuple[int, str], torch.Tensor], int]:
        runs.clear()
        layers = calibrator.calibrate(CalibrationContext(study.pool, samples, sites, expert_features=cache))
        found = {(layer.layer, name): value for layer in layers for name, value in layer.updates.items()}
        return found, len(runs)

    (plain, every), whole, part = (
        solved(ExpertFeatureCache()),
        ExpertFeatureCache(1 << 30),
        ExpertFeatureCache(1 << 16),
    )
    counts = {}
    for name, cache in (("whole", whole), ("part", part)):
        for sitting in (1, 2):
            found, counts[name, sitting] = solved(cache)
            assert found.keys() == plain.keys()
            assert all(torch.equal(found[key], value) for key, value in plain.items())
    assert counts["whole", 1] == counts["part", 1] == every > 0
    assert counts["whole", 2] == 0 < counts["part", 2] < every


VALUES = {"lam": 0.01, "rho": 1.3, "alpha": 0.8, "n": 3}


@pytest.mark.parametrize("setting", few(VALUES, (), some=["lam", "n"]))
def test_a_point_equals_a_plain_calibration_of_the_same_settings(
    folder: Path, light: DriftRun, tmp_path: Path, setting: str
) -> None:
    value = VALUES[setting]
    found = sweep(folder, SweepRequest(param={setting: [value], "lam": [0.01, 0.2]}))
    asked = {"samples": int(value)} if setting == "n" else {"parameters": {setting: value}}
    plain = calibrate(copied(light, tmp_path / "plain"), request(**asked))
    rows = rows_of(found, setting, **{setting: value})
    assert tuple(rows["task"]) == TASKS
    for row in rows.itertuples():
        final = plain.layers(task=row.task, variant=VARIANT, layer="final").iloc[0]
        score = plain.accuracy(task=row.task, variant=VARIANT).iloc[0]
        assert (row.accuracy, row.n_test) == (score["value"], score["n"])
        for measure in MEASURES:
            assert getattr(row, measure) == pytest.approx(final[measure], rel=1e-5)
        assert row.n == plain.manifest.calibrations[NAME].samples[row.task]


@pytest.mark.slow
def test_one_factor_at_a_time_or_all_combinations(folder: Path) -> None:
    values = {"lam": [0.01, 0.05], "alpha": [0.0, 0.3, 1.0]}
    run = sweep(folder, SweepRequest(param=values))
    one = run.sweeps()
    assert set(one["sweep"]) == {"lam", "alpha"} and one["accuracy"].notna().all()
    lam, alpha = rows_of(run, "lam", task=TASKS[0]), rows_of(run, "alpha", task=TASKS[0])
    assert lam["lam"].tolist() == [0.01, 0.05] and set(lam["alpha"]) == {0.3}
    assert alpha["alpha"].tolist() == [0.0, 0.3, 1.0] and set(alpha["lam"]) == {0.05}
    assert lam["drift_l2_mean"][1] == alpha["drift_l2_mean"][1], "one calibration serves both sweeps"
    run = sweep(folder, SweepRequest(param=values, grid=True))
    both = rows_of(run, "lam+alpha", task=TASKS[0])
    assert list(zip(both["lam"], both["alpha"], strict=True)) == [
        (lam, alpha) for lam in values["lam"] for alpha in values["alpha"]
    ]
    assert both["point"].tolist() == list(range(6))
    pd.testing.assert_frame_equal(run.sweeps()[lambda rows: rows["sweep"] != "lam+alpha"].reset_index(drop=True), one)


def test_everything_else_of_the_run_stays_as_it_is(folder: Path, light: DriftRun) -> None:
    run = sweep(folder, SweepRequest(param=LAM))
    same_rows(run, light)
    assert run.variants == light.variants and verify_files(folder).ok
    changed = {name for name, data in files_of(folder).items() if files_of(light.path).get(name) != data}
    allowed = {"manifest.json", "status.json", "events.jsonl", "run.lock", "run.lock.guard"}
    assert changed - allowed == {"tables/sweeps.parquet", "tables/resources.parquet"}, "no model tried is told of"


@pytest.mark.slow
def test_a_known_setting_keeps_its_number_and_a_new_one_gets_the_next(folder: Path) -> None:
    sweep(folder, SweepRequest(param={"lam": [0.3, 0.01]}))
    run = sweep(folder, SweepRequest(param={"lam": [0.1, 0.3]}))
    points = rows_of(run, "lam", task=TASKS[0]).set_index("lam")["point"].to_dict()
    assert points == {0.3: 0, 0.01: 1, 0.1: 2}


@pytest.mark.slow
def test_points_of_another_curve_are_not_mixed_in_unless_they_replace_it(folder: Path) -> None:
    sweep(folder, SweepRequest(param=LAM | {"rho": [1.0]}))
    before = files_of(folder)
    with pytest.raises(SpecError, match=r"with rho 2; now rho is 2\.2") as caught:
        sweep(folder, SweepRequest(param=LAM, preset="demo-clip"))
    assert "--replace" in caught.value.hint and files_of(folder) == before
    run = sweep(folder, SweepRequest(param={"lam": [0.7]}, preset="demo-clip", replace=True))
    assert set(rows_of(run, "lam")["lam"]) == {0.7} and set(rows_of(run, "rho")["rho"]) == {1.0}


@pytest.mark.slow
def test_an_interrupted_sweep_keeps_what_it_measured_and_goes_on(
    folder: Path, light: DriftRun, tmp_path: Path
) -> None:
    asked = SweepRequest(param={"lam": [0.01, 0.1, 1.0], "n": [2, 4]}, seeds=2)
    token, labels = CancelToken(), []

    def watch(event: ProgressEvent) -> None:
        labels.append(event.label)
        if "lam 0.1" in event.label:
            token.cancel()

    with pytest.raises(Cancelled):
        sweep(folder, asked, JobContext(on_progress=watch, cancel=token))
    kept = open_run(folder).sweeps()
    assert 0 < len(kept) < 20 and not (folder / "scratch" / "sweep").exists()
    run = sweep(
        folder,
        asked.with_changes(resume=True),
        JobContext(on_progress=lambda event: labels.append(event.label)),
    )
    again = run.sweeps().merge(kept, on=[*kept.columns])
    assert len(again) == len(kept), "finished points keep their very values, seconds included"
    straight = sweep(copied(light, tmp_path / "straight"), asked)
    for name in ("lam", "n"):
        left, right = rows_of(run, name), rows_of(straight, name)
        pd.testing.assert_frame_equal(left.drop(columns="seconds"), right.drop(columns="seconds"))
    labels.clear()
    sweep(
        folder,
        asked.with_changes(resume=True),
        JobContext(on_progress=lambda event: labels.append(event.label)),
    )
    assert not [label for label in labels if "layer" in label]


@pytest.mark.slow
def test_a_setting_that_cannot_be_solved_for_leaves_the_others_their_points(folder: Path) -> None:
    before = sweep(folder, SweepRequest(param=LAM, samples=1))
    with pytest.raises(SingularGramError, match=r"featcal, lam 0, 1 samples") as raised:
        sweep(folder, SweepRequest(param={"lam": [0.0, 0.3]}, samples=1, replace=True))
    assert "All other points are in the run" in raised.value.hint
    found = rows_of(open_run(folder), "lam")
    assert set(found["lam"]) == {0.3}
    wanted = rows_of(before, "lam", lam=0.3)
    for measure in MEASURES:
        np.testing.assert_allclose(found[measure], wanted[measure], rtol=1e-6)


def test_replacing_by_what_cannot_be_solved_for_takes_nothing_away(folder: Path) -> None:
    before = sweep(folder, SweepRequest(param=LAM, samples=1)).sweeps()
    with pytest.raises(SingularGramError):
        sweep(folder, SweepRequest(param={"lam": [0.0]}, samples=1, replace=True))
    pd.testing.assert_frame_equal(open_run(folder).sweeps(), before)


@pytest.mark.slow
def test_seeds_differ_in_the_samples_drawn_and_in_nothing_else(folder: Path) -> None:
    run = sweep(folder, SweepRequest(param={"n": [2, 6]}, seeds=3))
    few, all_there = (rows_of(run, "n", n=count, task=TASKS[0]) for count in (2, 6))
    assert few["seed"].tolist() == [0, 1, 2] and few["drift_l2_mean"].nunique() == 3
    # All six samples there are, in another order: the same calibration on the same diagnosis samples.
    assert np.ptp(all_there["drift_l2_mean"]) < 1e-5 * all_there["drift_l2_mean"][0]
    assert few["n_test"].nunique() == 1


@pytest.mark.slow
def test_no_sample_measures_that_some_seed_calibrates_on(world: World, tmp_path: Path) -> None:
    shared = {
        task: {"kind": "npz", "file": str(world.data(task)), "calibration": {"x": "x_test", "y": "y_test"}}
        for task in TASKS
    }
    data = {"defaults": {"n": 2, "n_diagnosis": 4, "batch_size": 3}, **shared}
    spec = world.spec(data=data, metrics={"jacobian": False})
    dl.analyze(spec, out=tmp_path / "run", progress="none")
    first = sweep(tmp_path / "run", SweepRequest(param={"lam": [0.1]}))
    assert set(first.sweeps()["n_test"]) == {7}
    run = sweep(tmp_path / "run", SweepRequest(param={"lam": [0.1]}, seeds=2, replace=True))
    assert set(run.sweeps()["n_test"]) <= {5, 6, 7} and set(run.sweeps()["n_test"]) != {7}
    with pytest.raises(DataError, match="none is left to measure with"):
        sweep(tmp_path / "run", SweepRequest(param={"lam": [0.1]}, seeds=12))


@pytest.mark.parametrize(
    ("values", "more", "words", "hint"),
    [
        ({"lamda": [1.0]}, {}, "featcal has no parameter 'lamda'", "Did you mean 'lam'?"),
        ({}, {}, "something to vary", "--param"),
        ({"lam": [-1.0]}, {}, "lam is -1", ""),
        ({"alpha": [0.1, 1.5]}, {}, "alpha is 1.5", ""),
        ({"n": [2.5]}, {}, "n is 2.5, expected a whole number", ""),
        ({"n": [0]}, {}, "n is 0, expected a whole number", ""),
        ({"n": [2, 7]}, {}, "7 calibration samples requested", ""),
        ({"lam": [float("nan")]}, {}, "lam is nan", ""),
        (LAM, {"seeds": 0}, "seeds: Input should be greater than or equal to 1", ""),
        (LAM, {"methods": ["featcal", "residual"]}, "residual has no parameter 'lam'", ""),
        ({"mu": [1.5]}, {"methods": ["residual"]}, "mu is 1.5", ""),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_written(
    folder: Path, values: dict[str, list[float]], more: dict[str, Any], words: str, hint: str
) -> None:
    before = files_of(folder)
    with pytest.raises(SpecError if "samples requested" not in words else DataError) as caught:
        sweep(folder, SweepRequest(param=values, **more))
    assert words in caught.value.message and hint in caught.value.hint
    assert files_of(folder) == before


@pytest.mark.slow
def test_methods_stand_side_by_side_over_samples_and_each_point_is_a_plain_calibration(
    folder: Path, light: DriftRun, tmp_path: Path
) -> None:
    asked = SweepRequest(param={"n": [2, 6]}, seeds=2, methods=["featcal", "residual"])
    with pytest.raises(DataError, match=r"residual, 2 samples\. The first one: .*folds"):
        sweep(folder, asked)
    run = sweep(folder, SweepRequest(param={"n": [5, 6]}, methods=["residual"], replace=True))
    assert set(run.sweeps()["sweep"]) == {"n", "residual:n"}, "what could be measured is there"
    assert len(rows_of(run, "n")) == 8 and rows_of(run, "n")["kl"].notna().all()
    plain = calibrate(
        copied(light, tmp_path / "plain"),
        request(samples=5).with_changes(method="residual", parameters={}),
    )
    for row in rows_of(run, "residual:n", n=5).itertuples():
        assert pd.isna(row.lam) and row.method == "residual" and row.seconds > 0
        final = plain.layers(task=row.task, variant=VARIANT, layer="final").iloc[0]
        kl = plain.outputs(row.task, VARIANT)["kl"].mean()
        assert row.drift_rel == pytest.approx(final["drift_rel"], rel=1e-5)
        assert row.kl == pytest.approx(kl, rel=1e-4)
        assert row.accuracy == plain.accuracy(task=row.task, variant=VARIANT).iloc[0]["value"]


@pytest.mark.slow
def test_corrupted_calibration_is_that_of_pictures_corrupted_beforehand(
    world: World, folder: Path, tmp_path: Path
) -> None:
    run = sweep(folder, SweepRequest(param={"corruption": ["none", "fog:5"]}, methods=["featcal", "residual"]))
    assert {*run.sweeps()["sweep"]} == {"corruption", "residual:corruption"}
    rows = rows_of(run, "corruption")
    assert [*rows["corruption"].unique()] == ["none", "fog:5"] and {*rows["n"]} == {4}

    spec = world.spec(metrics={"jacobian": False})
    for task in TASKS:
        stored = dict(np.load(world.data(task)))
        fogged = [corrupt_image(at, "fog", 5, (0, f"{task}/train/{i}")) for i, at in enumerate(stored["x_train"])]
        np.savez(tmp_path / f"{task}.npz", **stored | {"x_train": np.stack(fogged)})
        spec["data"][task] = {"kind": "npz", "file": str(tmp_path / f"{task}.npz")}
    fogged_run = dl.analyze(spec, out=tmp_path / "fogged", progress="none").path
    other = sweep(fogged_run, SweepRequest(param={"n": [4]}))
    for point, found in enumerate([sweep(folder, SweepRequest(param={"n": [4]})), other]):
        mine = rows[rows["point"] == point].reset_index(drop=True)
        pd.testing.assert_frame_equal(mine[[*MEASURES]], rows_of(found, "n")[[*MEASURES]])
    assert (rows["drift_rel"][:2].to_numpy() != rows["drift_rel"][2:].to_numpy()).all()
    assert "none" in sweep_text(run, "corruption") and "fog:5" in sweep_text(run, "residual:corruption")
