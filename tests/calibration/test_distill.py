"""Distillation against a plain training loop on the library's own modules."""

from __future__ import annotations

import copy

import pytest
import torch

from driftlens.calibration.distill import Distill
from driftlens.engine.calibrating import Step
from tests.calibration.helpers import TASKS, subject
from tests.calibration.training import final_features, learnt


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
