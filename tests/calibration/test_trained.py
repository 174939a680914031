"""Trained repairs: what they declare, that they can be stopped, that they learn from the right task; distillation."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from driftlens.base.errors import IncompatibleModelsError, SpecError
from driftlens.calibration import descent
from driftlens.calibration.calibrator import Trained, calibrators, require_task_id
from driftlens.calibration.distill import Distill
from driftlens.calibration.interv_merge import IntervMerge
from driftlens.calibration.react import ReACT
from driftlens.calibration.surgery import ProbSurgery, Surgery, SurgeryV2
from driftlens.data.samples import Batch
from driftlens.engine.attached import attachment_tensors
from driftlens.engine.calibrating import Ground, Step
from driftlens.engine.walk import Given
from tests.calibration.helpers import (
    TASKS,
    Memory,
    Subject,
    final_features,
    given,
    ground,
    learnt,
    subject,
    trained,
)
from tests.quick import few
from tests.refusing import refusing
from tests.zoo.cases import family
from tests.zoo.mixtures import case

TRAINED = [name for name, kind in calibrators.items() if issubclass(kind, Trained)]


def test_where_nothing_can_be_attached_no_sample_is_read() -> None:
    """Behind Gemma 3n's blocks are several streams of each token."""

    def unread() -> Any:
        pytest.fail("samples are read")

    place = Ground(family(case("Gemma 3n")).pool, {task: [Given(unread)] for task in TASKS})
    with refusing(IncompatibleModelsError, "several streams of each token", hint="changes weights", code=4):
        next(SurgeryV2().calibrated(place))


def test_all_others_are_one_model() -> None:
    for name, kind in calibrators.items():
        if name not in TRAINED:
            assert not kind.needs_task_id and kind.leaves() == "a checkpoint"
            require_task_id("unknown", name)
    for name in TRAINED:
        assert calibrators[name].needs_task_id
        assert calibrators[name].leaves() == "a checkpoint and attachments"
        with pytest.raises(SpecError, match=f"{name} has a map for every task, and task_id is unknown"):
            require_task_id("unknown", name)
    assert {*TRAINED} == {"react", "surgery", "surgery_v2", "prob_surgery", "interv_merge", "low_rank"}


@pytest.mark.parametrize("name", ["open_clip_vit", "hf_clip_vit", "llama"])
def test_it_is_what_an_optimiser_makes_of_all_parameters_of_the_librarys_own_model(name: str) -> None:
    """All samples of all tasks at once; queries, keys and values apart or fused, embeddings, norms, projection."""
    models, steps = subject(name, n=4), 3
    found = learnt(models, Distill(steps=steps, batch=99, lr=1e-3))
    merged = models.modules["merged"].double().requires_grad_()
    start = copy.deepcopy(merged.state_dict())
    with torch.no_grad():
        wanted = {
            task: final_features(models.modules[f"expert:{task}"].double(), models.inputs) for task in TASKS
        }
    optimiser = torch.optim.Adam(merged.parameters(), lr=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        own = final_features(merged, models.inputs)
        sum((own - w).abs().sum() / w.abs().sum() / len(TASKS) for w in wanted.values()).backward()
        optimiser.step()
    state, seen = merged.state_dict(), set()
    for layer in models.pool.chain.layers:
        for key, slot in models.pool.chain.owned(layer).items():
            rows = slice(None) if slot.rows is None else slice(*slot.rows)
            torch.testing.assert_close(
                found[layer.index][key], slot.own(state[slot.key][rows]), rtol=1e-6, atol=1e-8
            )
            assert not torch.equal(state[slot.key], start[slot.key])
            seen.add(slot.key)
    untouched = {key for key in state if torch.equal(state[key], start[key])}
    assert seen and {*state} - untouched <= seen | {"lm_head.weight"}


@pytest.mark.slow
def test_more_steps_bring_features_nearer_to_every_expert() -> None:
    """Both tasks have the same samples here: no model can be nearer to both experts than half their distance."""
    models, losses = subject(n=4), []
    with torch.no_grad():
        one, other = (
            final_features(models.modules[f"expert:{task}"].double(), models.inputs) for task in TASKS
        )
    least = float((one - other).abs().sum() / max(one.abs().sum(), other.abs().sum()) / 2)
    for steps in (1, 60):
        told: list[Step] = []
        learnt(models, Distill(steps=steps, batch=8, lr=1e-3), on_step=told.append)
        losses.append(told[-1].loss)
    assert least < losses[1] < least + 0.5 * (losses[0] - least)


FEW_STEPS: dict[str, Any] = {"steps": 7, "batch": 4}
STOPPED = [
    Surgery(**FEW_STEPS),
    SurgeryV2(**FEW_STEPS),
    ProbSurgery(**FEW_STEPS),
    IntervMerge(**FEW_STEPS),
    Distill(**FEW_STEPS),
]


def result(method: Any, memory: Memory | None) -> dict[str, torch.Tensor]:
    models = subject(n=6)
    if isinstance(method, Distill):
        found = learnt(models, method, memory=memory)
        return {f"{layer}.{name}": value for layer, of in found.items() for name, value in of.items()}
    return attachment_tensors(trained(models, method, memory=memory))


@pytest.mark.parametrize("stop", few([1, 3, 7, 8, 12], quick=[7]))
@pytest.mark.parametrize("method", STOPPED, ids=lambda method: type(method).__name__)
def test_it_goes_on_to_equal_numbers(method: Any, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept behind every step: in the middle of either task, behind its last step, and behind all of it."""
    monkeypatch.setattr(descent, "KEPT_EVERY_S", 0.0)
    wanted, memory = result(method, None), Memory(stops_after=stop)
    if isinstance(method, Distill) and stop > 7:
        pytest.skip("there is one training of seven steps")
    with pytest.raises(KeyboardInterrupt):
        result(method, memory)
    at_stop = {name: dict(tensors) for name, tensors in memory.kept.items()}
    found = result(method, memory)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert (
        any(not torch.equal(memory.kept[name]["at"], of["at"]) for name, of in at_stop.items() if "at" in of)
        or stop > 6
    )


def test_what_is_finished_is_not_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    result(STOPPED[0], memory)
    monkeypatch.setattr(Surgery, "train", None)
    found = result(STOPPED[0], memory)
    assert {name.partition(" ")[0] for name in memory.kept} > {"finished"} and found


@pytest.mark.slow
def test_features_beyond_the_budget_wait_on_disk_and_give_the_same(tmp_path: Any) -> None:
    """Inputs, and what the experts make of them; the folder is empty afterwards."""
    for method in (SurgeryV2(**FEW_STEPS), IntervMerge(**FEW_STEPS)):
        wanted = attachment_tensors(trained(subject(n=6), method))
        written: list[int] = []

        def step(*_: Any, seen: list[int] = written) -> None:
            seen.append(len(list(tmp_path.glob("spill/*"))))

        found = attachment_tensors(
            trained(subject(n=6), method, feature_budget=0, spill=tmp_path / "spill", on_step=step)
        )
        assert max(written) > 3 and not list(tmp_path.iterdir())
        for name, value in wanted.items():
            assert torch.equal(found[name], value)


HALF = 6
SHUFFLED = [
    ReACT(),
    Surgery(steps=150, lr=1e-2),
    ProbSurgery(steps=150, lr=1e-2),
    SurgeryV2(steps=40, lr=1e-2),
    IntervMerge(rank=4, steps=40, lr=1e-2),
    Distill(steps=40, batch=12, lr=3e-3),
]


def remaining(models: Subject, method: Any, shown: dict[str, str]) -> float:
    """Of the repaired model, the mean distance to each task's own expert on its own samples.

    Half of the samples are one task's; `shown` says whose the repair takes for a task's.
    """
    halves = dict(zip(TASKS, models.inputs.split(HALF), strict=True))
    parts = {task: given([Batch(0, HALF, halves[shown[task]])]) for task in TASKS}
    pool = models.pool
    layers = list(method.calibrate(ground(models, parts=parts, sites={})))
    maps = {(task, at.layer): each for at in layers for task, each in at.attachments.items()}
    weights = {at.layer: at.updates for at in layers}
    total = 0.0
    with torch.no_grad():
        for task, half in halves.items():
            start, side = pool.chain.start(half)
            ends = []
            for variant in ("merged", f"expert:{task}"):
                state = start
                for layer in pool.chain.layers:
                    walked = pool.layer_map(variant, layer, task)
                    if variant == "merged":
                        parameters = {**walked.parameters, **weights.get(layer.index, {})}
                        walked = dataclasses.replace(
                            walked, parameters=parameters, attachment=maps.get((task, layer.index))
                        )
                    state = walked(state, side)
                ends.append(state["hidden"])
            total += float((ends[0] - ends[1]).norm(dim=1).mean())
    return total


@pytest.mark.slow
@pytest.mark.parametrize("method", SHUFFLED, ids=lambda method: type(method).__name__)
def test_it_loses(method: Any) -> None:
    models = subject(n=2 * HALF)
    right = remaining(models, method, {task: task for task in TASKS})
    shuffled = remaining(models, method, dict(zip(TASKS, reversed(TASKS), strict=True)))
    assert right < 0.9 * shuffled
