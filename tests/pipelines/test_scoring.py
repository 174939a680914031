"""`validate --deep`: every expert scored on its own task."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from driftlens.experiment.sanity_checks import Finding
from driftlens.pipelines.validate import PreflightReport, _check_tied_weights
from tests.pipelines.checking import check, saved, visual
from tests.zoo.cases import CASES, family
from tests.zoo.world import CLASSES, World, build, clip, labels, pixels

NAMES = CLASSES["flowers"]
COUNT, SCORED = 60, 48


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> World:
    """One task whose classes are three colours, which any random tower tells apart."""
    world = build(tmp_path_factory.mktemp("colours") / "models", tasks=("flowers",))
    rows = np.arange(COUNT) % 3
    images = np.random.default_rng(0).integers(0, 40, (COUNT, 16, 16, 3), dtype=np.uint8)
    images[np.arange(COUNT), :, :, rows] += 180
    arrays = {"x_train": images, "y_train": rows, "x_test": images, "y_test": rows}
    np.savez(world.data("flowers"), **arrays, class_names=np.array(NAMES))
    return world


def class_means(world: World, name: str) -> Tensor:
    """Mean feature of each class less the mean of all, by open_clip's own module: a head that solves the task."""
    ids = [f"test/{row}" for row in range(COUNT)]
    with torch.no_grad():
        features = F.normalize(clip(world.state(name)).encode_image(pixels(world.data("flowers"), ids).float()))
    named = labels(world.data("flowers"), ids)
    means = [features[[label == name for label in named]].mean(dim=0) for name in NAMES]
    return torch.stack(means) - features.mean(dim=0)


def score(world: World, head: Tensor, folder: Path, **changes: Any) -> PreflightReport:
    save_file({"x": F.normalize(head, dim=1)}, folder / "head.safetensors")
    entry = {"file": str(folder / "head.safetensors"), "tensor": "x", "logit_scale": 10.0}
    data = {**world.spec()["data"], "defaults": {"n": 4, "n_diagnosis": SCORED}}
    return check(world.spec(heads={"flowers": entry}, data=data, **changes), deep=True)


def judged(result: PreflightReport) -> Finding:
    """The finding that holds the expert's score."""
    matching = [finding for finding in result.findings if "scores" in finding.text]
    assert len(matching) == 1, result.text()
    return matching[0]


def test_a_sound_expert_is_scored_with_its_interval_beside_the_base(colours: World, tmp_path: Path) -> None:
    shuffled = saved(visual(colours.state("base"), lambda value: value.flip(0)), tmp_path / "base.safetensors")
    finding = judged(score(colours, class_means(colours, "flowers"), tmp_path, base=shuffled))
    assert finding.level == "ok"
    # Wilson's interval for 48 of 48.
    assert "scores 100.0 % (92.6 to 100.0 %) in accuracy on 48 of its task's samples, the base" in finding.text


def test_an_expert_no_better_than_the_base_is_a_notice(colours: World, tmp_path: Path) -> None:
    experts = {"flowers": {"weights": str(colours.weights("base"))}}
    finding = judged(score(colours, class_means(colours, "base"), tmp_path, experts=experts))
    assert finding.level == "notice"
    assert finding.text.endswith("no better")


def test_an_expert_that_guesses_is_a_problem(colours: World, tmp_path: Path) -> None:
    """The head's rows stand in another order than the class names."""
    result = score(colours, class_means(colours, "flowers")[[1, 2, 0]], tmp_path)
    finding = judged(result)
    assert finding.level == "problem"
    assert "not clearly above chance for 3 classes (33.3 %)" in finding.text
    assert result.exit_code == 4


def test_a_tower_has_no_ties_not_even_in_its_fused_projection() -> None:
    collect = PreflightReport()
    _check_tied_weights(family(CASES["open_clip_vit"]).pool.chain, collect)
    assert [(finding.level, finding.subject) for finding in collect.findings] == [("ok", "ties")]


def test_a_weight_in_two_layers_is_named_with_both_places() -> None:
    chain = family(CASES["open_clip_vit"]).pool.chain
    first, second = chain.layers[1:3]
    name = next(iter(first.parameters))
    shared = dataclasses.replace(second, parameters={**second.parameters, name: first.parameters[name]})
    collect = PreflightReport()
    _check_tied_weights(dataclasses.replace(chain, layers=(*chain.layers[:2], shared, *chain.layers[3:])), collect)
    (finding,) = collect.findings
    assert finding.level == "notice"
    assert f"{name} of layer 2 and {name} of layer 3" in finding.text
