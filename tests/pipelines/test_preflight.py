"""Preflight: every check finds the fault planted for it, and nothing where there is none."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.sources import write_images
from tests.pipelines.checking import check, found, notices, saved, visual, with_expert
from tests.quick import few
from tests.zoo.world import CLASSES, MODEL, Weights, World

EXPERT = "expert of flowers"


@pytest.mark.parametrize("form", few(["open_clip", "hf"], quick=["hf"]))
def test_a_sound_spec_has_neither_problems_nor_notices(world: World, form: Any) -> None:
    result = check(world.spec(form))
    assert {finding.level for finding in result.findings} == {"ok"}, result.text()
    assert result.exit_code == 0
    assert {*result.needs} == {"analyze", "calibrate"}
    assert result.text().endswith("\nready")
    assert "quick_gelu" in found(result, "ok", "architecture").text
    subjects = {finding.subject for finding in result.findings}
    assert {"base", "expert of flowers", "expert of shapes", "data of shapes", "head of flowers"} <= subjects


def test_a_merge_that_reads_moments_needs_memory_for_them(world: World) -> None:
    plain, moments = (check(world.spec(merge={"method": method})) for method in ("average", "regmean"))
    assert not moments.problems, moments.text()
    needed = [result.needs["analyze"].memory.get("merging", 0) for result in (plain, moments)]
    assert needed[1] > needed[0]


@pytest.mark.parametrize("form", ["open_clip", "hf"])
def test_real_checkpoints_have_no_problems(real: Path, form: str) -> None:
    tasks = ["clothing10", "sign_digits"]
    suffix = "" if form == "hf" else ".safetensors"
    source = real / ("hf/base" if form == "hf" else "open_clip/model_config.json")
    spec = {
        "version": 1,
        "architecture": {"loader": "hf-clip" if form == "hf" else "open-clip", "source": str(source)},
        "base": {"weights": str(real / form / f"base{suffix}")},
        "experts": {task: {"weights": str(real / form / f"{task}{suffix}")} for task in tasks},
        "merge": {"method": "average"},
        "heads": {
            task: {"file": str(real / "heads.safetensors"), "tensor": task, "logit_scale": 16.8} for task in tasks
        },
        "data": {
            "defaults": {"n": 8, "n_diagnosis": 48},
            **{task: {"kind": "npz", "file": str(real / "data" / f"{task}.npz")} for task in tasks},
        },
        "compute": {"device": "cpu"},
    }
    result = check(spec, deep=form == "hf")
    assert not result.problems, result.text()
    # Only open_clip's configuration there says nothing about preprocessing.
    assert [finding.subject for finding in notices(result)] == ([] if form == "hf" else ["architecture"])
    # |expert - base| / |base| over whole towers, computed apart: 0.0987 and 0.1456.
    assert "have relative distance 0.10 to 0.15 from the base" in found(result, "ok", "shared base").text


def test_all_problems_are_found_in_one_go(world: World, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(world.weights("shapes").read_bytes()[:-100])
    spec = world.spec(
        experts={
            "flowers": {"weights": str(tmp_path / "nothing.safetensors")},
            "shapes": {"weights": str(broken)},
        },
        layers={"select": "visual.*.nowhere"},
        merge={"method": "task_arithmetic", "scalling": 1},
        data={"flowers": {"kind": "npz", "file": str(tmp_path / "nothing.npz")}},
    )
    result = check(spec)
    assert "nothing.safetensors" in found(result, "problem", "expert of flowers").text
    assert "broken.safetensors" in found(result, "problem", "expert of shapes").text
    assert "visual.*.nowhere" in found(result, "problem", "layers").text
    assert "scalling" in found(result, "problem", "merge").text
    assert "nothing.npz" in found(result, "problem", "data of flowers").text
    assert "shapes" in found(result, "problem", "data of shapes").text
    assert result.exit_code == 4
    assert not result.needs
    assert result.text().endswith("\n6 problems")


def test_a_broken_base_hides_no_other_problem(world: World, tmp_path: Path) -> None:
    spec = with_expert(world, {"weights": str(tmp_path / "x.safetensors")})
    result = check({**spec, "base": {"weights": str(tmp_path / "y.safetensors")}})
    assert [finding.subject for finding in result.problems] == ["base", "expert of flowers"]


def test_unexpected_errors_are_not_swallowed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # Raised by a line of ours, as a defect is; errors of other packages are findings.
    monkeypatch.setattr("driftlens.experiment.study_loading.open_checkpoint", None)
    with pytest.raises(TypeError):
        check(world.spec())


def without(weights: Weights, name: str) -> Weights:
    return {key: value for key, value in weights.items() if key != name}


def with_nan(weights: Weights) -> Weights:
    broken = weights["visual.transformer.resblocks.1.mlp.c_fc.weight"].clone()
    broken[0, 3] = math.nan
    return {**weights, "visual.transformer.resblocks.1.mlp.c_fc.weight": broken}


@pytest.mark.parametrize(
    ("change", "level", "subject", "words"),
    [
        (lambda at: without(at, "visual.ln_post.bias"), "problem", EXPERT, ["lacks 'ln_post.bias'"]),
        (lambda at: {**at, "visual.ln_post.bias": torch.zeros(24)}, "problem", EXPERT, ["[24]", "[16]"]),
        (lambda at: at | {f"ema.{key}": of.clone() for key, of in at.items()}, "problem", EXPERT, ["2 keys"]),
        (with_nan, "problem", EXPERT, ["resblocks.1.mlp.c_fc.weight"]),
        (
            lambda at: visual(at, Tensor.half),
            "notice",
            "dtypes",
            ["float16: expert:flowers", "float32: base"],
        ),
    ],
    ids=["a missing key", "another width", "two towers", "NaN", "half precision"],
)
def test_what_is_odd_about_weights_is_named(
    world: World, tmp_path: Path, change: Any, level: str, subject: str, words: list[str]
) -> None:
    result = check(with_expert(world, saved(change(world.state("flowers")), tmp_path / "x.safetensors")))
    assert all(word in found(result, level, subject).text for word in words)
    assert change is not with_nan or found(result, "ok", "shared base"), "other checks go on"


@pytest.mark.parametrize(
    ("file", "key", "value", "shown"),
    [
        pytest.param("config.json", "hidden_act", "gelu", ("gelu", "quick_gelu"), id="activation"),
        pytest.param("config.json", "layer_norm_eps", 1e-6, ("1e-06", "1e-05"), id="epsilon"),
        pytest.param("config.json", "num_attention_heads", 4, ("4", "2"), id="number of attention heads"),
        pytest.param("preprocessor_config.json", "image_mean", [0.1, 0.1, 0.1], ("0.1", "0.4"), id="image mean"),
        pytest.param("preprocessor_config.json", "crop_size", 24, ("24", "16"), id="image size"),
        pytest.param("processor_config.json", "crop_size", 24, ("24", "16"), id="image size in version 5"),
    ],
)
def test_an_experts_own_configuration_contradicts(
    world: World, tmp_path: Path, file: str, key: str, value: Any, shown: tuple[str, str]
) -> None:
    folder = tmp_path / "expert"
    shutil.copytree(world.weights("flowers", "hf"), folder)
    nested = {"image_processor": json.loads((folder / "preprocessor_config.json").read_text())}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    if file != "processor_config.json":
        (folder / "processor_config.json").unlink()
    stated = json.loads((folder / file).read_text())
    stated.get("image_processor", stated)[key] = value
    (folder / file).write_text(json.dumps(stated))
    spec = world.spec("hf")
    result = check({**spec, "experts": {**spec["experts"], "flowers": {"weights": str(folder)}}})
    problem = found(result, "problem", "expert of flowers")
    assert all(word in problem.text for word in (file, key, *shown))
    assert problem.exit_code == 4


def test_another_spelling_of_the_same_configuration_agrees(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "expert"
    shutil.copytree(world.weights("flowers", "hf"), folder)
    for file, changes in (
        ("preprocessor_config.json", {"size": 16, "crop_size": 16}),
        ("config.json", {"layer_norm_eps": None}),
    ):
        stated = {**json.loads((folder / file).read_text()), **changes}
        given = {key: value for key, value in stated.items() if value is not None}
        (folder / file).write_text(json.dumps(given))
    spec = world.spec("hf")
    result = check({**spec, "experts": {**spec["experts"], "flowers": {"weights": str(folder)}}})
    assert not result.problems, result.text()


def test_a_base_trained_with_the_other_activation_is_named(world: World, tmp_path: Path) -> None:
    """The architecture says GELU (a model name without -quickgelu), the base's own folder says QuickGELU."""
    folder = tmp_path / "base"
    folder.mkdir()
    shutil.copy(world.weights("base"), folder / "open_clip_model.safetensors")
    stated = json.loads((world.folder / "model_config.json").read_text())
    (folder / "open_clip_config.json").write_text(json.dumps(stated))
    gelu = {**stated, "model_cfg": {**MODEL, "quick_gelu": False}}
    (tmp_path / "gelu.json").write_text(json.dumps(gelu))
    spec = world.spec(
        base={"weights": str(folder)},
        architecture={"loader": "open-clip", "source": str(tmp_path / "gelu.json")},
    )
    problem = found(check(spec), "problem", "base")
    assert "quick_gelu" in problem.text
    assert "but gelu is used" in problem.text


def test_prompts_without_a_text_tower_and_without_a_base(world: World) -> None:
    head = {"templates": ["a photo of a {}."]}
    assert check(world.spec(heads={"flowers": head})).exit_code == 0
    assert "no text tower" in found(check(world.spec("hf", heads={"flowers": head})), "problem", "text tower").text
    alone = world.spec(heads={"flowers": head}, base=None, merge={"method": "average"})
    assert "no base" in found(check(alone), "problem", "head of flowers").text


def test_unequal_counts_and_shared_samples_are_notices(world: World) -> None:
    spec = world.spec()
    entry = {
        "kind": "npz",
        "file": str(world.data("flowers")),
        "calibration": {"x": "x_train", "y": "y_train"},
        "diagnosis": {"x": "x_train", "y": "y_train"},
        "test": {"x": "x_test", "y": "y_test"},
        "n": 3,
    }
    result = check({**spec, "data": {**spec["data"], "flowers": entry}})
    assert "calibration samples: flowers 3, shapes 4" in found(result, "notice", "data").text
    assert "of 5 diagnosis samples are in both" in found(result, "notice", "data of flowers").text


@pytest.mark.parametrize("split", ["calibration", "diagnosis"])
def test_unreadable_images_among_the_drawn_ones_are_found(split: str, world: World, tmp_path: Path) -> None:
    files = {f"{name}/{place}.png": place for name in CLASSES["flowers"] for place in range(6)}
    entry: dict[str, Any] = {"kind": "imagefolder", "n": 18, "n_diagnosis": 18}
    for part in ("calibration", "diagnosis", "test"):
        entry[part] = str(write_images(tmp_path / part, files))
    spec = world.spec()
    spec["data"]["flowers"] = entry
    assert not check(spec).problems
    for name in list(files)[1::6]:
        file = tmp_path / split / name
        file.write_bytes(file.read_bytes()[:-40])
    (problem,) = check(spec).problems
    assert problem.subject == "data of flowers" and problem.hint
    assert "3 of 36 sampled images can't be read, such as " in problem.text and "/1.png" in problem.text
