"""What an analysis will take, against hand counts and against a run."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch

from driftlens.jobs.analyze.job import analyze
from driftlens.jobs.preflight.costs import (
    TaskLoad,
    Workload,
    disk_bytes,
    layer_costs,
    memory_bytes,
    operations,
)
from driftlens.jobs.preflight.solving import look_effort
from driftlens.jobs.study.study import Settings
from driftlens.models.architecture import load_architecture
from driftlens.spec.requests import AnalysisRequest
from tests.pipeline.checking import check
from tests.zoo.cases import CASES, family
from tests.zoo.world import World, write_images


@pytest.mark.slow
def test_disk_agrees_with_a_run(world: World, tmp_path: pathlib.Path) -> None:
    spec = world.spec(metrics={"jacobian": False})
    for task in world.tasks:
        write_images(tmp_path / f"{task}.npz", ("a", "b", "c"), train=6, test=300)
    spec["data"] = {
        "defaults": {"n": 4, "n_diagnosis": 300, "batch_size": 100},
        **{task: {"kind": "npz", "file": str(tmp_path / f"{task}.npz")} for task in world.tasks},
    }
    spec["heads"] = {task: {**entry, "classes": ["a", "b", "c"]} for task, entry in spec["heads"].items()}
    cost = check(spec).cost
    assert cost is not None
    run = analyze(spec, AnalysisRequest(out=tmp_path / "run"))
    used = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    assert used / 2 < cost.disk_bytes < 2 * used


def test_operations_are_those_counted_by_hand(world: World) -> None:
    """Two per multiply-add of every matrix product of a small vision transformer."""
    architecture = load_architecture("open-clip", world.models["open_clip"])
    stem, *blocks, head = layer_costs(architecture, torch.zeros(1, 3, 16, 16), torch.float32, "cls")
    tokens, width, inner, patches, patch = 17, 16, 64, 16, 48
    attention = 2 * tokens * tokens * width
    assert stem.operations == 2 * patches * patch * width
    assert blocks[0].operations == 2 * (tokens * (4 * width**2 + 2 * width * inner) + attention)
    assert head.operations == 2 * width * 8
    assert [layer.state_bytes for layer in (stem, *blocks, head)] == [tokens * width * 4] * 4 + [8 * 4]
    assert blocks[0].parameter_bytes == 4 * (4 * width**2 + 2 * width * inner + 9 * width + inner)


@pytest.mark.parametrize("name", CASES)
def test_shapes_in_a_layers_layout_are_known_from_headers(name: str) -> None:
    pool = family(CASES[name]).pool
    headers = pool.source("merged").headers
    for layer in pool.chain.layers:
        for part, value in pool.parameters("merged", layer).items():
            slot = layer.parameters[part]
            assert slot.shape(headers[slot.key].shape) == tuple(value.shape)


def test_more_samples_cost_more_of_everything(world: World, tmp_path: pathlib.Path) -> None:
    small, large = workload_of(world, 4), workload_of(world, 8)
    assert operations(large) == 2 * operations(small)
    assert memory_bytes(large) > memory_bytes(small)
    assert disk_bytes(large) > disk_bytes(small)


def test_features_beyond_the_budget_do_not_count(world: World) -> None:
    work = workload_of(world, 1_000_000)
    tight = dataclasses.replace(work, settings=dataclasses.replace(work.settings, feature_budget=1 << 20))
    assert memory_bytes(work) - memory_bytes(tight) == work.settings.feature_budget - (1 << 20)


def test_layers_read_ahead_count_once_more_for_each_model(world: World) -> None:
    work = workload_of(world, 4)
    ahead, widest = dataclasses.replace(work, ahead=1), max(layer.parameter_bytes for layer in work.layers)
    assert memory_bytes(ahead) - memory_bytes(work) == (work.variants + 1) * widest


def test_a_first_look_takes_as_many_samples_as_a_task_was_calibrated_on_and_has(world: World) -> None:
    work = workload_of(world, 10)
    (once,) = look_effort(work, {"a": 1}).operations.values()
    assert once == sum(layer.operations for layer in work.layers)
    assert [look_effort(work, {"a": n}).samples for n in (4, 10, 64)] == [4, 10, 10]


def workload_of(world: World, n: int) -> Workload:
    """Drift alone, of one variant, on n samples of one task in batches of n."""

    architecture = load_architecture("open-clip", world.models["open_clip"])
    layers = layer_costs(architecture, torch.zeros(1, 3, 16, 16), torch.float32, "cls")
    settings = Settings("cls", frozenset(range(1, len(layers) + 1)))
    return Workload(layers, {"a": TaskLoad(n, 0, n)}, 1, 1, settings, min(n, 100))
