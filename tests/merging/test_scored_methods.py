"""Methods that ask the experts' score maps: Fisher merging against autograd sample by sample, AdaMerging, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from driftlens.experiment.merging import merge_to_files
from driftlens.merging.method import merge_by_name, merge_methods
from driftlens.models.heads import LinearHead
from driftlens.utils.distributed import ProgressReporter
from driftlens.utils.errors import Cancelled, SpecError
from driftlens.utils.progress import CancelToken, ProgressEvent
from tests.merging.applying import (
    apply,
    calibration_images,
    head_of,
    open_models,
    random_model,
    stacks,
    study_of,
)
from tests.quick import few
from tests.reference import matrix_merging as reference

BASE, EXPERTS = random_model(0), {task: random_model(seed) for seed, task in enumerate("abc", start=1)}


def classifier(task: str) -> nn.Linear:
    head = nn.Linear(16, 3, bias=False)
    head.weight = nn.Parameter(head_of(task).weight)
    return head


@pytest.mark.parametrize("estimator", few(["exact", "batch_sqrt"], ["batch_sqrt"]))
def test_fisher_merging_weighs_by_the_information_of_each_expert(estimator: str) -> None:
    _, experts = stacks()
    images, found = calibration_images(), {}
    for task, expert in experts.items():
        if estimator == "exact":
            found[task] = reference.fisher_diagonal(expert, classifier(task), images)
        else:
            found[task] = reference.fisher_batches(expert, classifier(task), images, 4)
    norms = [float(torch.cat([f.flatten() for f in found[task].values()]).norm()) for task in experts]
    merged = apply(merge_methods["fisher"], BASE, EXPERTS, estimator=estimator, batch_size=4)
    for name in BASE:
        values, fishers = [EXPERTS[t][name] for t in experts], [found[t][name] for t in experts]
        expected = reference.fisher_merge(values, fishers, norms)
        dead = torch.stack(fishers).sum(dim=0) == 0  # a key's bias, which no softmax sees, is left to rounding
        if not name.endswith("key.bias"):
            torch.testing.assert_close(merged[name][~dead], expected[~dead], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("granularity", few(["layer", "task"], ["layer"]))
def test_adamerging_descends_as_autograd_through_the_whole_model_does(granularity: str) -> None:
    base, experts = stacks()
    heads = {task: classifier(task) for task in experts}
    whole = dict.fromkeys(experts, calibration_images())
    slow = reference.adamerging(base, experts, heads, [whole] * 5, by_layer=granularity == "layer")
    settings: dict[str, Any] = {"granularity": granularity, "batch_size": 6}
    merged = apply(merge_methods["adamerging"], BASE, EXPERTS, steps=5, **settings)
    still = apply(merge_methods["adamerging"], BASE, EXPERTS, steps=0, **settings)
    arithmetic = apply(merge_methods["task_arithmetic"], BASE, EXPERTS, scaling=0.3)
    for name in BASE:
        torch.testing.assert_close(still[name], arithmetic[name])
        # Adam goes by signs at first, and of a key's bias the slope is rounding alone.
        if not name.endswith("key.bias"):
            torch.testing.assert_close(merged[name], slow[name], rtol=1e-4, atol=1e-4)
    assert any(not torch.allclose(merged[name], still[name], atol=1e-3) for name in BASE)


@pytest.mark.parametrize("name", ["fisher", "adamerging"])
def test_a_task_without_a_score_map_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    models = open_models(BASE, EXPERTS)
    study = study_of(models)
    tasks = {**study.tasks, "b": dataclasses.replace(study.tasks["b"], head=None)}
    with pytest.raises(SpecError, match="missing: b") as caught:
        merge_to_files(models, merge_by_name(name), dataclasses.replace(study, tasks=tasks), beside=tmp_path / "x")
    assert "heads.b" in caught.value.hint and not list(tmp_path.iterdir())
    with pytest.raises(SpecError, match="calibration samples"):
        merge_to_files(models, merge_by_name(name), beside=tmp_path / "x")


@pytest.mark.parametrize("name", ["fisher", "adamerging"])
def test_labels_are_not_read_and_the_order_of_tasks_does_not_matter(name: str) -> None:
    def merged(order: str, label: str) -> dict[str, Tensor]:
        models = open_models(BASE, {task: EXPERTS[task] for task in order})
        study = study_of(models)
        tasks = {}
        for task in order:
            at = study.tasks[task]
            assert at.calibration is not None
            samples = dataclasses.replace(at.calibration, labels=(label,) * len(at.calibration))
            tasks[task] = dataclasses.replace(at, calibration=samples)
        settings = {"steps": 2} if name == "adamerging" else {}
        source = merge_to_files(models, merge_by_name(name, settings), dataclasses.replace(study, tasks=tasks))
        return {key: source.read(key) for key in source.headers}

    first, second = merged("abc", "x"), merged("cab", "z")
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["fisher", "adamerging"])
def test_every_batch_is_told_of_and_the_next_one_can_be_cancelled(name: str, tmp_path: Path) -> None:
    models, events, token = open_models(BASE, EXPERTS), list[ProgressEvent](), CancelToken()

    def see(event: ProgressEvent) -> None:
        events.append(event)
        if event.done == 8:
            token.cancel()

    settings = {"steps": 50, "batch_size": 4} if name == "adamerging" else {}
    with pytest.raises(Cancelled):
        merge_to_files(
            models,
            merge_by_name(name, settings),
            study_of(models),
            beside=tmp_path / "x",
            reporter=ProgressReporter(see, token),
        )
    total = 3 * (50 * 4 if name == "adamerging" else 6)
    assert [(event.done, event.total) for event in events if event.phase == "ask"][-1] == (8, total)
    assert events[-1].done == 8 and not list(tmp_path.iterdir())


def test_exact_information_of_a_vocabulary_is_refused_before_anything_is_computed() -> None:
    models = open_models(BASE, EXPERTS)
    study = study_of(models)
    words = LinearHead(tuple(map(str, range(3000))), torch.zeros(3000, 16))
    tasks = {**study.tasks, "b": dataclasses.replace(study.tasks["b"], head=words)}
    study, events = dataclasses.replace(study, tasks=tasks), list[ProgressEvent]()
    with pytest.raises(SpecError, match="3,000 classes needs 18,000 backward passes") as caught:
        merge_to_files(models, merge_by_name("fisher"), study, reporter=ProgressReporter(events.append))
    assert "estimator=batch_sqrt" in caught.value.hint and not events
    merge_to_files(models, merge_by_name("fisher", {"estimator": "batch_sqrt"}), study)
