"""Calibrations of one run: interrupted, resumed, replaced, beside one another, and all that is refused."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

import driftlens as dl
from driftlens.calibration.featcal import FeatCal
from driftlens.config.requests import AnalysisRequest, CalibrationRequest
from driftlens.pipelines import analyze as reopening
from driftlens.pipelines.analyze import analyze
from driftlens.pipelines.calibrate import calibrate
from driftlens.results.listing import find_runs
from driftlens.runs.manifest import read_status
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.utils import errors
from driftlens.utils.distributed import JobContext
from driftlens.utils.progress import ProgressEvent
from tests.pipelines.calibrating import (
    CONTROL,
    NAME,
    VARIANT,
    calibrate_until,
    copied,
    files_of,
    request,
    same_rows,
    scored_again,
)
from tests.quick import few
from tests.zoo.world import TASKS, World, build

WEIGHTS = f"calibrations/{NAME}/weights.safetensors"


@pytest.fixture(scope="module")
def whole(light: DriftRun, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """The finished run, calibrated without interruption."""
    return calibrate(copied(light, tmp_path_factory.mktemp("whole") / "run"), request())


def in_layer(layer: int) -> Any:
    return lambda event: event.phase == "calibrate" and event.label.startswith(f"layer {layer} of")


def analysing(event: ProgressEvent) -> bool:
    return event.phase == "analyze" and event.done > 2


def evaluating(event: ProgressEvent) -> bool:
    return event.phase == "evaluate" and event.done > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "solved"),
    [
        pytest.param(in_layer(2), 0, id="first layer", marks=pytest.mark.slow),
        pytest.param(in_layer(3), 1, id="second layer"),
        pytest.param(in_layer(4), 2, id="last layer", marks=pytest.mark.slow),
        pytest.param(analysing, 3, id="while analyzing", marks=pytest.mark.slow),
        pytest.param(evaluating, 3, id="while evaluating", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_calibration_is_unseen_and_resumes_to_the_very_same(
    folder: Path, light: DriftRun, whole: DriftRun, stop: Any, solved: int
) -> None:
    calibrate_until(folder, stop)
    half = open_run(folder)
    assert half.variants == light.variants and not half.manifest.calibrations
    assert half.calibration().empty and len(half.layers()) == len(light.layers())
    status = read_status(folder)
    assert status is not None and status.state == "cancelled"
    assert (folder / WEIGHTS).exists() == (solved == 3), "no weights before every layer is solved"
    kept = {file.name: file.stat().st_mtime_ns for file in (folder / "scratch").rglob("*.safetensors")}
    assert sorted(kept) == [f"{layer:03d}.safetensors" for layer in range(2, 2 + solved)]

    events: list[ProgressEvent] = []
    resumed = calibrate(folder, request(resume=True), JobContext(on_progress=events.append))
    began = {event.label.split(",")[0] for event in events if event.phase == "calibrate"}
    assert (
        not any(label.startswith(f"layer {layer} ") for layer in range(2, 2 + solved) for label in began) or solved < 3
    )
    assert (folder / WEIGHTS).read_bytes() == (whole.path / WEIGHTS).read_bytes()
    same_rows(resumed, whole)
    history = [run.calibration(NAME).drop(columns="seconds") for run in (resumed, whole)]
    pd.testing.assert_frame_equal(*history, check_exact=True)
    assert not (folder / "scratch" / f"calibrate-{NAME}").exists() and verify_files(folder).ok


@pytest.mark.slow
def test_resuming_with_other_settings_is_refused_and_starting_afresh_is_not(folder: Path, whole: DriftRun) -> None:
    calibrate_until(folder, in_layer(3))
    for changed, words in (
        (request(parameters={"lam": 0.1}), r"settings\.lam: 0\.05, now 0\.1"),
        (request(parameters={"solve_dtype": "float32"}), r"settings\.solve_dtype"),
        (request(layers=[2, 3]), r"sites\.4"),
        (request(samples=2), "samples"),
    ):
        with pytest.raises(errors.SpecError, match=f"another {words}"):
            calibrate(folder, changed.with_changes(resume=True))
    fresh = calibrate(folder, request())
    same_rows(fresh, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        request(layers=[3]),
        request(sites=["*.mlp.*"]),
        request(samples=2),
        request(auto=True),
    ],
    ids=["layers", "sites", "samples", "auto"],
)
def test_a_finished_calibration_is_resumed_only_as_the_very_same(whole: DriftRun, changed: CalibrationRequest) -> None:
    before = files_of(whole.path)
    with pytest.raises(errors.SpecError, match="finished, with other settings"):
        calibrate(whole.path, changed.with_changes(resume=True))
    assert files_of(whole.path) == before


@pytest.mark.slow
def test_a_name_is_given_once_unless_it_is_to_be_replaced(folder: Path, light: DriftRun, whole: DriftRun) -> None:
    calibrate(folder, request(parameters={"lam": 2.0}))
    before = files_of(folder)
    with pytest.raises(errors.SpecError, match="has a calibration 'featcal' already"):
        calibrate(folder, request())
    with pytest.raises(errors.SpecError, match="finished, with other settings"):
        calibrate(folder, request(resume=True))
    assert files_of(folder) == before, "a refusal should leave no trace"
    replaced = calibrate(folder, request(replace=True))
    same_rows(replaced, whole)
    assert replaced.variants == whole.variants and verify_files(folder).ok
    assert (folder / WEIGHTS).read_bytes() == (whole.path / WEIGHTS).read_bytes()
    # With rho = 1 there is no control any more, and the earlier one's must not stay.
    calibrate(folder, request(parameters={"rho": 1.0}, replace=True))
    assert open_run(folder).variants == (*light.variants, VARIANT)
    assert (
        not list((folder / "features").rglob("*anchor*"))
        and not (folder / f"calibrations/{NAME}/anchor.safetensors").exists()
    )


@pytest.mark.parametrize("end", few(["failed", "cancelled"], quick=["cancelled"]))
@pytest.mark.slow
def test_what_has_the_name_stays_until_its_successor_is_solved_for(folder: Path, whole: DriftRun, end: str) -> None:
    calibrate(folder, request())
    if end == "failed":
        with pytest.raises(errors.SingularGramError):
            calibrate(folder, request(parameters={"lam": 0.0}, samples=1, replace=True))
    else:
        calibrate_until(folder, in_layer(3), replace=True)
    run = open_run(folder)
    same_rows(run, whole)
    assert run.variants == whole.variants and verify_files(folder).ok
    assert (folder / WEIGHTS).read_bytes() == (whole.path / WEIGHTS).read_bytes()
    assert (folder / "scratch" / f"calibrate-{NAME}").exists() is (end == "cancelled")
    if end == "cancelled":
        (left,) = find_runs(folder)[0].left
        assert f"--name {NAME} --replace --resume` resumes it" in left
        same_rows(calibrate(folder, request(replace=True, resume=True)), whole)
        assert not (folder / "scratch" / f"calibrate-{NAME}").exists() and find_runs(folder)[0].left == ()


@pytest.mark.parametrize(
    "said",
    [{}, {"resume": True}, {"parameters": {"lam": 0.05}, "attribution": False}],
    ids=["named alone", "resumed", "with its settings"],
)
def test_what_is_finished_is_saved_at_once_from_what_the_run_keeps(
    whole: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]
) -> None:
    folder, target = copied(whole, tmp_path / "run"), tmp_path / "out.safetensors"
    before = files_of(folder)
    monkeypatch.setattr(FeatCal, "solve", lambda *_: pytest.fail("it was solved for again"))
    if not said:  # neither samples nor experts are wanted
        monkeypatch.setattr(reopening, "reopen_study", lambda *_, **__: pytest.fail("the study was opened"))
    calibrate(folder, request(save_weights=target, **said))
    ours, theirs = load_file(target), load_file(whole.path / WEIGHTS)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert said.get("resume") or files_of(folder) == before
    same_rows(open_run(folder), whole)


@pytest.mark.parametrize(
    ("changed", "spoil", "error", "words"),
    [
        (
            {"parameters": {"lam": 0.1}},
            "",
            errors.SpecError,
            r"finished, with other settings: another settings\.lam: .*, now 0.1",
        ),
        ({"auto": True}, "", errors.SpecError, "finished, with other settings"),
        ({}, "other", errors.CheckpointError, "has changed since it was measured"),
    ],
    ids=["other settings", "auto", "other weights"],
)
def test_what_the_run_does_not_keep_is_not_saved_as_if_it_were(
    whole: DriftRun,
    tmp_path: Path,
    changed: dict[str, Any],
    spoil: str,
    error: type[errors.DriftLensError],
    words: str,
) -> None:
    folder, target = copied(whole, tmp_path / "run"), tmp_path / "out"
    if spoil:
        weights = load_file(folder / WEIGHTS)
        key = "visual.transformer.resblocks.1.mlp.c_fc.bias"
        save_file(weights | {key: weights[key] + 1e-6}, folder / WEIGHTS)
    asked = request(save_weights=target, **changed)
    with pytest.raises(error, match=words) as caught:
        calibrate(folder, asked)
    assert not target.exists()
    command = shlex.split(caught.value.hint.split("`")[1])
    assert command[:3] == ["driftlens", "calibrate", str(folder)]
    if spoil:
        assert {"--replace", f"--save-weights={target}", "--set=lam=0.05", "--method=featcal"} <= {*command}
    else:
        calibrate(folder, request(save_weights=target))  # as the hint says
        assert command[3:] == ["--name", NAME, "--save-weights", "FOLDER"]


@pytest.mark.slow
def test_calibrations_stand_beside_one_another(light: DriftRun, folder: Path) -> None:
    first = calibrate(folder, request("one", parameters={"rho": 1.0}))
    second = calibrate(folder, request("two", parameters={"lam": 5.0}))
    assert second.variants == (*light.variants, "calibrated:one", "baseline:two-anchor", "calibrated:two")
    assert second.manifest.calibrations["one"].control == "", "with rho = 1 the anchor is the merged model"
    same_rows(second, first)
    pd.testing.assert_frame_equal(second.calibration("one"), first.calibration("one"))
    scored = scored_again(folder).accuracy().sort_values(["task", "variant"]).reset_index(drop=True)
    expected = second.accuracy().sort_values(["task", "variant"]).reset_index(drop=True)
    pd.testing.assert_frame_equal(scored, expected)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"parameters": {"lam": -1.0}}, errors.SpecError, "lam"),
        ({"parameters": {"lam": float("nan")}}, errors.SpecError, "lam"),
        ({"parameters": {"alpha": 1.5}}, errors.SpecError, "alpha"),
        ({"parameters": {"alfa": 0.5}}, errors.SpecError, "Did you mean 'alpha'"),
        ({"method": "featcall"}, errors.SpecError, "Did you mean 'featcal'"),
        ({"preset": "paper-klip"}, errors.SpecError, "Did you mean 'paper-clip'"),
        ({"layers": ["*.resblock.*"]}, errors.LayerNotFoundError, "resblocks"),
        ({"sites": ["*.mlp.c_fo"]}, errors.LayerNotFoundError, "c_fc"),
        ({"layers": [99]}, errors.LayerNotFoundError, "no layer 99"),
        ({"samples": 7}, errors.DataError, "has 6"),
    ],
    ids=["lam below 0", "lam not a number", "alpha above 1", "unknown parameter", "unknown method", "unknown preset",
         "layer pattern", "site pattern", "layer number", "too many samples"],
)  # fmt: skip
def test_what_can_not_be_is_refused_before_anything_is_touched(
    folder: Path, asked: dict[str, Any], error: type[errors.DriftLensError], words: str
) -> None:
    before = files_of(folder)
    with pytest.raises(error, match=words):
        calibrate(folder, request(**asked))
    assert files_of(folder) == before


@pytest.mark.parametrize("name", ["a/b", "..", "a:b", ".hidden", "a b"])
def test_a_name_is_one_plain_word(name: str) -> None:
    with pytest.raises(errors.SpecError, match="name: String should match"):
        request(name)


def test_a_place_that_is_taken_is_refused_before_anything_is_computed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    before = files_of(folder)
    with pytest.raises(errors.RunError, match="exists already"):
        calibrate(folder, request(save_weights=tmp_path / "taken"))
    assert files_of(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", TASKS[1]])
def test_a_checkpoint_that_changed_since_the_run_is_named(tmp_path: Path, name: str) -> None:
    world = build(tmp_path / "models")
    spec = world.spec(metrics={"jacobian": False}, heads=None)
    analyze(spec, AnalysisRequest(out=tmp_path / "run"))
    calibrate_until(tmp_path / "run", in_layer(3))
    weights = world.state(name)
    key = "visual.transformer.resblocks.1.mlp.c_fc.bias"
    save_file(weights | {key: weights[key] + 1e-6}, world.weights(name))
    before = files_of(tmp_path / "run")
    who = name if name == "base" else f"expert:{name}"
    for resume in (False, True):
        with pytest.raises(errors.CheckpointError, match=f"^{who} differs from the run's"):
            calibrate(tmp_path / "run", request(resume=resume))
    with pytest.raises(errors.CheckpointError, match=f"^{who} differs from the run's"):
        analyze(spec, AnalysisRequest(out=tmp_path / "run", resume=True))
    assert files_of(tmp_path / "run") == before


def test_data_that_changed_since_the_run_is_refused(
    world: World, light: DriftRun, folder: Path, tmp_path: Path
) -> None:
    text = (folder / "spec.yaml").read_text(encoding="utf-8")
    shorter = shutil.copy(world.data(TASKS[1]), tmp_path / "other.npz")
    with np.load(shorter) as arrays:
        cut = {name: array[:-2] if name.endswith("_test") else array for name, array in arrays.items()}
    np.savez(shorter, **cut)
    (folder / "spec.yaml").write_text(text.replace(str(world.data(TASKS[1])), str(shorter)), encoding="utf-8")
    with pytest.raises(
        errors.DataError, match=f"test samples of task {TASKS[1]} differ from the run's|diagnosis samples"
    ):
        calibrate(folder, request())


def test_a_run_that_is_unfinished_is_refused(world: World, tmp_path: Path) -> None:
    token = dl.CancelToken()

    def stop(event: ProgressEvent) -> None:
        if event.phase == "analyze" and event.done > 3:
            token.cancel()

    with pytest.raises(dl.errors.Cancelled):
        dl.analyze(world.spec(), out=tmp_path / "run", progress="none", on_progress=stop, cancel=token)
    with pytest.raises(errors.RunError, match="unfinished"):
        calibrate(tmp_path / "run", request())


@pytest.mark.slow
def test_a_baseline_called_like_the_control_is_in_the_way(world: World, tmp_path: Path) -> None:
    spec = world.one_task(
        baselines={"x-anchor": {"weights": str(world.weights(TASKS[1]))}},
        metrics={"jacobian": False},
        heads=None,
    )
    dl.analyze(spec, out=tmp_path / "run", progress="none")
    with pytest.raises(errors.SpecError, match="already a baseline of the run"):
        calibrate(tmp_path / "run", request("x"))
    assert CONTROL not in calibrate(tmp_path / "run", request("y", parameters={"rho": 1})).variants
