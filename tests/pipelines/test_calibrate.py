"""A calibrated checkpoint: loaded by the original library, measured again from its file, beside its control."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

import driftlens as dl
from driftlens.config.requests import CalibrationRequest
from driftlens.pipelines import calibrate as job
from driftlens.pipelines.calibrate import _CalibrationJob, calibrate
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.utils.distributed import JobContext
from driftlens.utils.errors import RunError, SpecError
from driftlens.utils.progress import ProgressEvent
from tests.families import OPEN_CLIP, TRANSFORMERS_CLIP
from tests.pipelines.calibrating import CONTROL, NAME, TABLES, VARIANT, copied, request, same_rows
from tests.quick import few
from tests.zoo.towers import under_transformers_names
from tests.zoo.world import DEPTH, TASKS, Form, World, labels, merged_weights, pixels

FORMS = [
    pytest.param("open_clip", marks=[OPEN_CLIP, pytest.mark.slow]),
    pytest.param("hf", marks=TRANSFORMERS_CLIP),
]
LAYERS = DEPTH + 2
RHO = 2.0


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


@pytest.fixture(scope="module")
def before(form: Form, world: World, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A finished run in either form."""
    spec = world.spec(form, metrics={"jacobian": {"samples": 2}, "cka": True})
    return dl.analyze(spec, out=tmp_path_factory.mktemp("before") / "run", progress="none")


@pytest.fixture(scope="module")
def exported(form: Form, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported") / form


@pytest.fixture(scope="module")
def run(form: Form, before: DriftRun, exported: Path, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """The same run, calibrated; the model is also saved as a folder."""
    folder = copied(before, tmp_path_factory.mktemp("after") / "run")
    return calibrate(folder, request(preset="paper-clip", save_weights=exported))


@pytest.fixture(scope="module")
def saved(run: DriftRun) -> dict[str, torch.Tensor]:
    return load_file(run.path / f"calibrations/{NAME}/weights.safetensors")


def tower(form: Form, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The image tower under the key names of a form, from open_clip's."""
    visual = {key.removeprefix("visual."): value for key, value in weights.items() if key.startswith("visual.")}
    return under_transformers_names(visual) if form == "hf" else visual


@pytest.fixture(scope="module")
def encode(form: Form, run: DriftRun, exported: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """The exported folder as its own library loads it: pixels -> final features."""
    if form == "open_clip":
        import open_clip

        model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{exported}")
        return model.eval().encode_image
    from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection

    tower, loading = CLIPVisionModelWithProjection.from_pretrained(exported, output_loading_info=True)
    assert not any(loading.values()), loading
    assert list(CLIPImageProcessor.from_pretrained(exported).image_mean) == [0.5, 0.4, 0.3]
    return lambda images: tower.eval()(images).image_embeds


@pytest.mark.slow
@torch.no_grad()
def test_the_exported_folder_computes_the_stored_features_in_its_own_library(
    run: DriftRun, encode: Callable[[torch.Tensor], torch.Tensor], world: World
) -> None:
    for task in TASKS:
        features = encode(pixels(world.data(task), run.sample_ids(task)).float())
        stored = run.features(task, VARIANT, "final")
        np.testing.assert_allclose(stored, features.numpy(), rtol=2e-3, atol=2e-3)  # kept in float16


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.shows("drift", "sites", "reloads", heads="class embeddings")
def test_accuracy_in_the_original_library_is_that_of_the_tables(
    run: DriftRun, encode: Callable[[torch.Tensor], torch.Tensor], world: World
) -> None:
    for task in TASKS:
        ids, names = run.sample_ids(task, "test"), run.manifest.classes[task]
        heads = load_file(world.folder / "heads.safetensors")[task]
        scores = torch.nn.functional.normalize(encode(pixels(world.data(task), ids).float()), dim=1) @ heads.T
        predicted = [names[row] for row in scores.argmax(dim=1)]
        hits = [one == other for one, other in zip(predicted, labels(world.data(task), ids), strict=True)]
        assert run.accuracy(task, VARIANT)["value"].tolist() == pytest.approx([np.mean(hits)])


@pytest.mark.slow
def test_every_row_is_that_of_a_fresh_analysis_of_the_file(
    form: Form, run: DriftRun, world: World, tmp_path: Path
) -> None:
    weights = str(run.path / f"calibrations/{NAME}/weights.safetensors")
    metrics = {"jacobian": {"samples": 2}, "cka": True}
    spec = world.spec(form, merge=None, merged={"weights": weights}, metrics=metrics)
    fresh = dl.analyze(spec, out=tmp_path / "run", progress="none")
    for table in TABLES:
        found = getattr(run, table)(variant=VARIANT).drop(columns="variant")
        expected = getattr(fresh, table)(variant="merged").drop(columns="variant")
        keys = [name for name in ("task", "scope", "path", "layer", "sample_id") if name in found]
        pd.testing.assert_frame_equal(
            found.sort_values(keys).reset_index(drop=True),
            expected.sort_values(keys).reset_index(drop=True),
            check_exact=True,
            obj=table,
        )
    for task in TASKS:
        for layer in range(1, LAYERS + 1):
            assert np.array_equal(run.features(task, VARIANT, layer), fresh.features(task, "merged", layer))


@pytest.mark.slow
def test_what_was_there_keeps_its_exact_values(run: DriftRun, before: DriftRun) -> None:
    same_rows(run, before)
    for name, info in before.manifest.files.items():
        if name.endswith(".npy"):
            assert run.manifest.files[name] == info, name
    assert run.variants == (*before.variants, CONTROL, VARIANT)
    assert verify_files(run.path).ok and not (run.path / "scratch" / "calibrate-featcal").exists()


def test_only_parameters_of_blocks_moved_and_the_form_is_the_bases(
    form: Form, world: World, saved: dict[str, torch.Tensor]
) -> None:
    base = load_file(
        world.weights("base", form) / "model.safetensors" if form == "hf" else world.weights("base", form)
    )
    assert {key: (value.shape, value.dtype) for key, value in saved.items()} == {
        key: (value.shape, value.dtype) for key, value in base.items()
    }
    found = saved if form == "hf" else {k: v for k, v in saved.items() if k.startswith("visual.")}
    merged = tower(form, merged_weights(world))
    merged = merged if form == "hf" else {f"visual.{key}": value for key, value in merged.items()}
    moved = {key for key, value in found.items() if not torch.allclose(value, merged[key], rtol=1e-6, atol=1e-7)}
    inside = {key for key in found if "resblocks" in key or "encoder.layers" in key}
    assert moved == inside
    text = [key for key in saved if form == "open_clip" and not key.startswith("visual.")]
    assert all(torch.equal(saved[key], base[key]) for key in text)


def test_the_control_is_the_anchor_in_the_blocks_and_the_merged_model_elsewhere(
    form: Form, run: DriftRun, world: World
) -> None:
    control = load_file(run.path / f"calibrations/{NAME}/anchor.safetensors")
    merged, base = tower(form, merged_weights(world)), tower(form, world.state("base"))
    for key, value in merged.items():
        is_inside = "resblocks" in key or "encoder.layers" in key
        expected = RHO * value.double() + (1 - RHO) * base[key].double() if is_inside else value.double()
        found = control[key if form == "hf" else f"visual.{key}"]
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
    assert set(run.layers(variant=CONTROL)["task"]) == set(TASKS)
    assert len(run.accuracy(variant=CONTROL)) == len(TASKS)


def test_the_history_has_one_row_per_site_whose_objective_fell(run: DriftRun) -> None:
    rows = run.calibration(NAME)
    assert rows["layer"].tolist() == sorted(rows["layer"]) and set(rows["layer"]) == {2, 3, 4}
    assert len(rows) == DEPTH * 8 and rows["site"].is_unique
    assert (rows["objective_after"] <= rows["objective_before"]).all() and (rows["weight_change"] > 0).all()
    assert (rows["lam"] == 0.05).all() and (rows["smallest_eigenvalue"].dropna() >= 0).all()


def test_the_run_says_what_was_done(run: DriftRun, form: Form) -> None:
    info = run.manifest.calibrations[NAME]
    assert info.control == CONTROL and info.samples == dict.fromkeys(TASKS, 4) and info.seconds > 0
    assert {key: info.settings[key] for key in ("lam", "rho", "alpha")} == {
        "lam": 0.05,
        "rho": RHO,
        "alpha": 0.3,
    }
    assert info.settings["update"] == ["linear", "bias", "norm"]
    anchor, *left_alone = info.notices
    assert f"the anchor is base + {RHO:g} (merged - base)" in anchor and CONTROL in anchor
    assert [text.split(" (")[0] for text in left_alone] == ["the stem", "the head"]
    config = yaml.safe_load((run.path / f"calibrations/{NAME}/config.yaml").read_text(encoding="utf-8"))
    assert config["settings"] == info.settings and config["control"] == CONTROL
    assert config["samples"] == {task: run.manifest.sample_id_digests["calibration"][task] for task in TASKS}
    assert config["models"]["merged"] == run.manifest.models["merged"].digest
    assert set(run.manifest.models) >= {VARIANT, CONTROL}


def test_finished_layers_are_events_that_draw_a_curve(run: DriftRun) -> None:
    lines = (run.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    found = [event for event in map(json.loads, lines) if event["event"] == "layer"]
    assert [event["layer"] for event in found] == [2, 3, 4] and {event["phase"] for event in found} == {"calibrate"}
    rows = run.calibration(NAME).groupby("layer")[["objective_before", "objective_after"]].sum()
    for event in found:
        assert event["objective_after"] == pytest.approx(rows.loc[event["layer"], "objective_after"])
    assert [event["drift_l2_mean"] is None for event in found] == [False, False, True]


WANTED = request(method="residual", parameters={"folds": 2, "ridge": 0.1})


class _Poison:
    """Labels and other samples that nobody may look at."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")

    def __iter__(self) -> Any:
        raise AssertionError("they were read")


@pytest.mark.slow
def test_a_run_tells_ridges_and_shares_and_neither_labels_nor_test_samples_are_read(
    light: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[ProgressEvent] = []
    run = job.calibrate(copied(light, tmp_path / "run"), WANTED, JobContext(on_progress=said.append))
    solving = [(event.done, event.total or 0, event.label) for event in said if event.phase == "calibrate"]
    done = [at for at, _, _ in solving]
    assert done == sorted(done) and done[-1] == solving[-1][1] and all(at <= of for at, of, _ in solving)
    # Layers that gradients go back through are not taken for solved ones.
    weighing = {at / of for at, of, label in solving if label.startswith("weighing tokens")}
    assert weighing and max(weighing) < 0.5
    rows = run.calibration(NAME)
    assert rows["upstream_share"].between(0, 1).all() and (rows["lam"] > 0).all()
    assert (rows["upstream_ridge"] > 0).all() and set(rows["kind"]) == {"linear"}
    assert VARIANT in set(run.layers()["variant"])

    def blind(work: _CalibrationJob) -> Any:
        seeing = copy.copy(work)
        samples = {task: dataclasses.replace(of, labels=_Poison()) for task, of in work.plan.samples.items()}
        tasks = {
            task: dataclasses.replace(at, diagnosis=_Poison(), test=_Poison(), calibration=samples[task])
            for task, at in work.study.tasks.items()
        }
        seeing.study = dataclasses.replace(work.study, tasks=tasks)
        seeing.plan = dataclasses.replace(work.plan, samples=samples)
        return solve(seeing)

    solve = _CalibrationJob._solve_layers
    monkeypatch.setattr(_CalibrationJob, "_solve_layers", blind)
    poisoned = job.calibrate(copied(light, tmp_path / "poisoned"), WANTED)
    weights = [load_file(found.path / f"calibrations/{NAME}/weights.safetensors") for found in (run, poisoned)]
    assert all(bool((weights[0][key] == value).all()) for key, value in weights[1].items())


Stop = Callable[[ProgressEvent], bool]


def solving(event: ProgressEvent) -> bool:
    return event.phase == "calibrate" and event.label.startswith("layer 3 of")


def analysing(event: ProgressEvent) -> bool:
    return event.phase == "analyze" and event.done > 2


def evaluating(event: ProgressEvent) -> bool:
    return event.phase == "evaluate"


STOPS = few([solving, analysing, evaluating], [analysing])


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("is_there_again", [False, True], ids=["removed", "replaced"])
def test_a_run_that_goes_away_ends_its_calibration(
    folder: Path, light: DriftRun, stop: Stop, is_there_again: bool
) -> None:
    def remove(event: ProgressEvent) -> None:
        if stop(event) and open_run(folder).manifest.unfinished:
            shutil.rmtree(folder)
            if is_there_again:
                copied(light, folder)

    def watch(event: ProgressEvent) -> None:
        if folder.exists():
            remove(event)

    with pytest.raises(RunError, match="removed") as caught:
        calibrate(folder, request(), JobContext(on_progress=watch))
    assert "--resume" not in caught.value.hint
    if is_there_again:
        assert verify_files(folder).ok and not verify_files(folder).unlisted and not (folder / "run.lock").exists()
        assert read_manifest(folder) == light.manifest
    else:
        assert not folder.exists()


KILLED = """
import os, signal, sys
from driftlens.utils.distributed import JobContext
from driftlens.pipelines.calibrate import calibrate
from driftlens.config.requests import CalibrationRequest

folder, method, steps, at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
seen = 0

def told(event):
    global seen
    seen += event.phase == "calibrate" and ": step " in event.label
    if seen == at:
        os.kill(os.getpid(), signal.SIGKILL)

request = CalibrationRequest(name="trained", method=method, parameters={"steps": steps}, attribution=False)
calibrate(folder, request, JobContext(on_progress=told))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "at"),
    [
        pytest.param("surgery", 2, marks=pytest.mark.every),
        ("surgery", 5),
        pytest.param("prob_surgery", 5, marks=pytest.mark.every),
    ],
)
def test_it_ends_as_if_it_had_never_been_killed(light: DriftRun, tmp_path: Path, method: str, at: int) -> None:
    """Of the first task or the second, which are told of thrice each; no calibration is seen before it is done."""
    steps = 30
    whole, killed = (copied(light, tmp_path / name) for name in ("whole", "killed"))
    request = CalibrationRequest(name="trained", method=method, parameters={"steps": steps})
    calibrate(whole, request.with_changes(attribution=False))
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(killed), method, str(steps), str(at)], check=False, timeout=300
    )
    assert ended.returncode == -signal.SIGKILL
    assert "trained" not in open_run(killed).manifest.calibrations
    with pytest.raises(SpecError, match=r"had another settings\.steps: 30, now 31"):
        calibrate(killed, CalibrationRequest(name="trained", method=method, parameters={"steps": 31}, resume=True))
    calibrate(killed, request.with_changes(resume=True, attribution=False))
    file = "calibrations/trained/attachments.safetensors"
    found, wanted = load_file(killed / file), load_file(whole / file)
    assert found.keys() == wanted.keys() and all(found[key].equal(wanted[key]) for key in wanted)
    assert verify_files(killed).ok
    one, other = (open_run(run).layers(variant="calibrated:trained")["drift_l2_mean"] for run in (whole, killed))
    assert one.tolist() == other.tolist()
