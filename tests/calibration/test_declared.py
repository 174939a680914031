"""What calibrators declare of themselves is true of what they make."""

from __future__ import annotations

import pytest

from driftlens.base.errors import SpecError
from driftlens.calibration.calibrator import Trained, calibrators, require_task_id
from driftlens.engine.attached import attachment_tensors
from tests.calibration.helpers import TASKS, subject
from tests.calibration.training import trained

TRAINED = [name for name, kind in calibrators.items() if issubclass(kind, Trained)]


@pytest.mark.parametrize("name", TRAINED)
def test_so_many_numbers_are_added_for_every_task(name: str) -> None:
    kind, models = calibrators[name], subject(n=2)
    method = kind(**({"steps": 1} if "steps" in kind().get_params() else {}))
    found = trained(models, method)
    layers = models.pool.chain.layers
    places = list(method.boundaries(len(layers)))
    state, side = models.pool.chain.start(models.inputs)
    widths = []
    for layer in layers:
        state = models.pool.layer_map("merged", layer, TASKS[0])(state, side)
        widths += [state[layer.stream].shape[-1]] * (layer.index in places)
    numbers = sum(value.numel() for value in attachment_tensors(found).values() if value.dim())
    assert numbers == len(TASKS) * method.added(widths) > 0
    assert kind.needs_task_id and kind.leaves() == "a checkpoint and attachments"


def test_all_others_add_nothing_and_are_one_model() -> None:
    for name, kind in calibrators.items():
        if name not in TRAINED:
            assert not kind.needs_task_id and kind().added([8, 8]) == 0 and kind.leaves() == "a checkpoint"
            require_task_id("unknown", name)
    for name in TRAINED:
        with pytest.raises(SpecError, match=f"{name} has a map for every task, and task_id is unknown"):
            require_task_id("unknown", name)
    assert {*TRAINED} == {"react", "surgery", "surgery_v2", "prob_surgery", "interv_merge"}
