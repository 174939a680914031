"""What a calibration may be asked: which layers, how many samples, which settings, with or without a base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import driftlens as dl
from driftlens.config.requests import CalibrationRequest
from driftlens.config.spec import Calibration
from driftlens.engine.pool import attachment_tensors
from driftlens.pipelines import calibration_plan
from driftlens.pipelines.calibrate import calibrate, prepare_calibration
from driftlens.pipelines.calibration_plan import resolve_calibrator
from driftlens.runs.manifest import corrections_file, sample_ids_digest
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import SpecError
from tests.pipelines.calibrating import NAME, VARIANT, files_of, request
from tests.zoo.world import TASKS, World

QUICK: dict[str, Any] = {"metrics": {"jacobian": False}, "heads": None}


def weights(run: DriftRun) -> dict[str, torch.Tensor]:
    return load_file(run.path / f"calibrations/{NAME}/weights.safetensors")


def moved_blocks(run: DriftRun) -> set[int]:
    """Blocks in which the calibrated model differs from the merged one."""
    merged = load_file(run.path / "models/merged.safetensors")
    changed = [key for key, value in weights(run).items() if not torch.equal(value, merged[key])]
    return {int(key.split("resblocks.")[1].split(".")[0]) for key in changed}


@pytest.mark.parametrize(
    ("section", "asked", "expected"),
    [
        (None, {}, (0.05, 2.0, 0.3)),
        ({"preset": "demo-clip"}, {}, (0.05, 2.2, 0.25)),
        ({"preset": "demo-clip", "lam": 0.7}, {}, (0.7, 2.2, 0.25)),
        ({"lam": 0.7}, {"preset": "demo-clip"}, (0.05, 2.2, 0.25)),
        ({"lam": 0.7, "alpha": 0.1}, {"preset": "demo-clip", "parameters": {"lam": 3.0}}, (3.0, 2.2, 0.25)),
        ({"alpha": 0.1}, {"parameters": {"rho": 1.5}}, (0.05, 1.5, 0.1)),
        ({"method": "other", "lam": 0.7}, {"method": "featcal"}, (0.05, 2.0, 0.3)),
    ],
    ids=["defaults", "spec's preset", "spec over its preset", "preset over spec", "flag over preset", "flag and spec",
         "spec's other method"],
)  # fmt: skip
def test_flags_stand_over_presets_and_presets_over_the_spec(
    section: dict[str, Any] | None, asked: dict[str, Any], expected: tuple[float, ...]
) -> None:
    written = None if section is None else Calibration.model_validate(section)
    found = resolve_calibrator(CalibrationRequest(name="x", **asked), written).get_params()
    assert (found["lam"], found["rho"], found["alpha"]) == expected


def test_views_of_a_preset_give_way_to_those_of_the_user_and_of_the_spec(folder: Path) -> None:
    wanted = CalibrationRequest(name=NAME, method="residual", preset="views")
    spec = yaml.safe_load((folder / "spec.yaml").read_text())
    defaults = spec["data"].setdefault("defaults", {})
    for in_spec, asked, views, preset in (
        (None, None, "auto:3", "views"),
        (None, "crop:1", "crop:1", ""),
        (None, "none", "none", ""),
        ("crop:2", None, "crop:2", ""),
        ("none", None, "none", ""),
    ):
        defaults["views"] = in_spec
        (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
        opened = prepare_calibration(folder, wanted.with_changes(views=asked))
        found = opened.plan.manifest_entry
        assert found.views == dict.fromkeys(TASKS, views) and found.preset == preset
        assert all(opened.study.calibration_sets[task].views == opened.plan.samples[task].views for task in TASKS)
    bare = prepare_calibration(folder, wanted.with_changes(preset=None, parameters={"mu": 0.9})).plan.manifest_entry
    assert set(bare.views.values()) == {"none"} and not bare.preset


def test_a_calibration_without_a_name_is_called_after_its_method(folder: Path) -> None:
    asked = CalibrationRequest(layers=[2], attribution=False)
    for _ in range(2):
        run = calibrate(folder, asked)
    assert [*run.manifest.calibrations][-2:] == ["featcal", "featcal-2"]
    assert [*calibrate(folder, asked.with_changes(replace=True)).manifest.calibrations][-1] == "featcal"


def test_adapters_are_saved_in_float32_even_where_they_were_trained_in_float64(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(*given: Any) -> dict[str, torch.Tensor]:
        return {key: value.double() for key, value in attachment_tensors(*given).items()}

    monkeypatch.setattr(calibration_plan, "attachment_tensors", doubled)
    asked = request(method="prob_surgery", parameters={"steps": 2, "rank": 2}, attribution=False)
    saved = load_file(calibrate(folder, asked).path / corrections_file(NAME))
    assert {value.dtype for value in saved.values()} == {torch.float32}


@pytest.mark.parametrize("asked", [{"layers": [2]}, {"sites": ["*attn*"]}])
def test_a_repair_that_is_trained_refuses_layers_and_sites(folder: Path, asked: dict[str, Any]) -> None:
    """It would train in its own all the same; what the spec says of another method's sites is not asked of it."""
    before = files_of(folder)
    with pytest.raises(SpecError, match=f"surgery takes no {next(iter(asked))}") as caught:
        calibrate(folder, CalibrationRequest(name=NAME, method="surgery", **asked))
    assert "Leave them out" in caught.value.hint and files_of(folder) == before
    spec = yaml.safe_load((folder / "spec.yaml").read_text())
    wanted = CalibrationRequest(name=NAME, method="surgery")
    for method in ("featcal", "surgery"):
        section = {"method": method, "sites": ["*attn*"]}
        (folder / "spec.yaml").write_text(yaml.safe_dump({**spec, "calibration": section}))
        if method == "featcal":
            assert not prepare_calibration(folder, wanted).plan.sites
        else:
            with pytest.raises(SpecError, match="surgery takes no sites"):
                prepare_calibration(folder, wanted)


@pytest.mark.slow
def test_patterns_choose_layers_and_sites(folder: Path) -> None:
    run = calibrate(folder, request(layers=["*.resblocks.1"], sites=["*.mlp.*"]))
    rows = run.calibration(NAME)
    block = "visual.transformer.resblocks.1" if rows["site"][0].startswith("visual") else "transformer.resblocks.1"
    assert rows["site"].tolist() == [f"{block}.mlp.c_fc", f"{block}.mlp.c_proj"] and moved_blocks(run) == {1}
    # Weights 64 x 16 twice, biases 64 and 16, of three blocks of 3 280 each.
    (told,) = [text for text in run.manifest.calibrations[NAME].notices if "only a part" in text]
    assert f"2 sites hold {100 * 2128 / (3 * 3280):.1f} % of the blocks' parameters" in told
    assert f"mlp.c_fc.weight ({100 * 2048 / (3 * 3280):.1f} %)" in told


@pytest.mark.slow
def test_fewer_samples_are_the_beginning_of_those_drawn(folder: Path, light: DriftRun) -> None:
    run = calibrate(folder, request(samples=2))
    info = run.manifest.calibrations[NAME]
    assert info.samples == dict.fromkeys(TASKS, 2)
    assert info.sample_digests == {
        task: sample_ids_digest(light.sample_ids(task, "calibration")[:2]) for task in TASKS
    }


@pytest.mark.slow
def test_more_samples_than_the_run_drew_are_drawn_and_leave_the_others_alone(folder: Path, light: DriftRun) -> None:
    run = calibrate(folder, request(samples=6))
    assert run.manifest.calibrations[NAME].samples == dict.fromkeys(TASKS, 6)
    assert run.manifest.sample_ids == light.manifest.sample_ids


@pytest.mark.slow
def test_without_a_base_the_anchor_is_the_merged_model(world: World, tmp_path: Path) -> None:
    spec = world.spec(base=None, merge={"method": "average"}, **QUICK)
    dl.analyze(spec, out=tmp_path / "run", progress="none")
    with pytest.raises(SpecError, match="there is no base"):
        calibrate(tmp_path / "run", request())
    run = calibrate(tmp_path / "run", request(parameters={"rho": 1.0}))
    assert run.variants == ("merged", VARIANT) and run.params().empty
    experts = [world.state(task) for task in TASKS]
    assert {f"visual.{key}" for key in weights(run)} == {key for key in experts[0] if key.startswith("visual.")}


@pytest.mark.slow
def test_a_merged_model_in_half_precision_does_not_round_the_control(world: World, tmp_path: Path) -> None:
    half = {key: value.half() for key, value in world.state(TASKS[1]).items()}
    save_file(half, tmp_path / "merged.safetensors")
    spec = world.one_task(merge=None, merged={"weights": str(tmp_path / "merged.safetensors")}, **QUICK)
    dl.analyze(spec, out=tmp_path / "run", progress="none")
    run = calibrate(tmp_path / "run", request())
    assert {value.dtype for value in weights(run).values()} == {torch.float32}
    control = load_file(run.path / f"calibrations/{NAME}/anchor.safetensors")
    key = "visual.transformer.resblocks.0.mlp.c_fc.weight"
    expected = 2 * half[key].double() - world.state("base")[key].double()
    torch.testing.assert_close(control[key].double(), expected, rtol=1e-7, atol=1e-9)
