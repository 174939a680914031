"""A calibrated checkpoint: loaded by the original library, measured again from its file, beside its control."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

import driftlens as dl
from driftlens.jobs.calibrate.job import calibrate
from driftlens.runs.run import DriftRun
from driftlens.runs.verify import verify
from tests.families import OPEN_CLIP, TRANSFORMERS_CLIP
from tests.pipeline.calibrating import CONTROL, NAME, TABLES, VARIANT, copied, request, same_rows
from tests.zoo.towers import under_transformers_names
from tests.zoo.world import DEPTH, SCALING, TASKS, Form, World, labels, merged_weights, pixels

FORMS = [pytest.param("open_clip", marks=OPEN_CLIP), pytest.param("hf", marks=TRANSFORMERS_CLIP)]
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
def exported(form: Form, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("exported") / form


@pytest.fixture(scope="module")
def run(
    form: Form, before: DriftRun, exported: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> DriftRun:
    """The same run, calibrated; the model is also saved as a folder."""
    folder = copied(before, tmp_path_factory.mktemp("after") / "run")
    return calibrate(folder, request(preset="paper-clip", save_weights=exported))


@pytest.fixture(scope="module")
def saved(run: DriftRun) -> dict[str, torch.Tensor]:
    return load_file(run.path / f"calibrations/{NAME}/weights.safetensors")


def tower(form: Form, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The image tower under the key names of a form, from open_clip's."""
    visual = {
        key.removeprefix("visual."): value for key, value in weights.items() if key.startswith("visual.")
    }
    return under_transformers_names(visual) if form == "hf" else visual


@pytest.fixture(scope="module")
def encode(form: Form, run: DriftRun, exported: pathlib.Path) -> Callable[[torch.Tensor], torch.Tensor]:
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


@torch.no_grad()
def test_the_exported_folder_computes_the_stored_features_in_its_own_library(
    run: DriftRun, encode: Callable[[torch.Tensor], torch.Tensor], world: World
) -> None:
    for task in TASKS:
        features = encode(pixels(world.data(task), run.sample_ids(task)).float())
        stored = run.features(task, VARIANT, "final")
        np.testing.assert_allclose(stored, features.numpy(), rtol=2e-3, atol=2e-3)  # kept in float16


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


def test_every_row_is_that_of_a_fresh_analysis_of_the_file(
    form: Form, run: DriftRun, world: World, tmp_path: pathlib.Path
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


def test_what_was_there_keeps_its_exact_values(run: DriftRun, before: DriftRun) -> None:
    same_rows(run, before)
    for name, info in before.manifest.files.items():
        if name.endswith(".npy"):
            assert run.manifest.files[name] == info, name
    assert run.variants == (*before.variants, CONTROL, VARIANT)
    assert verify(run.path).ok and not (run.path / "scratch" / "calibrate-featcal").exists()


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
    moved = {
        key for key, value in found.items() if not torch.allclose(value, merged[key], rtol=1e-6, atol=1e-7)
    }
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
    assert (
        f"Task Arithmetic with scaling {RHO * SCALING:g} in place of {SCALING:g}" in anchor
        and CONTROL in anchor
    )
    assert [text.split(" (")[0] for text in left_alone] == ["the stem", "the head"]
    config = yaml.safe_load((run.path / f"calibrations/{NAME}/config.yaml").read_text(encoding="utf-8"))
    assert config["settings"] == info.settings and config["control"] == CONTROL
    assert config["samples"] == {task: run.manifest.sample_id_digests["calibration"][task] for task in TASKS}
    assert config["models"]["merged"] == run.manifest.models["merged"].digest
    assert set(run.manifest.models) >= {VARIANT, CONTROL}


def test_finished_layers_are_events_that_draw_a_curve(run: DriftRun) -> None:
    lines = (run.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    found = [event for event in map(json.loads, lines) if event["event"] == "layer"]
    assert [event["layer"] for event in found] == [2, 3, 4] and {event["phase"] for event in found} == {
        "calibrate"
    }
    rows = run.calibration(NAME).groupby("layer")[["objective_before", "objective_after"]].sum()
    for event in found:
        assert event["objective_after"] == pytest.approx(rows.loc[event["layer"], "objective_after"])
    assert [event["drift_l2_mean"] is None for event in found] == [False, False, True]
