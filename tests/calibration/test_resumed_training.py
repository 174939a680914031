"""A training that is stopped anywhere goes on to the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftlens.calibration import descent
from driftlens.calibration.distill import Distill
from driftlens.calibration.interv_merge import IntervMerge
from driftlens.calibration.surgery import ProbSurgery, Surgery, SurgeryV2
from driftlens.engine.attached import attachment_tensors
from tests.calibration.helpers import subject
from tests.calibration.training import Memory, learnt, trained

SETTINGS: dict[str, Any] = {"steps": 7, "batch": 4}
METHODS = [
    Surgery(**SETTINGS),
    SurgeryV2(**SETTINGS),
    ProbSurgery(**SETTINGS),
    IntervMerge(**SETTINGS),
    Distill(**SETTINGS),
]


def result(method: Any, memory: Memory | None) -> dict[str, torch.Tensor]:
    models = subject(n=6)
    if isinstance(method, Distill):
        found = learnt(models, method, memory=memory)
        return {f"{layer}.{name}": value for layer, of in found.items() for name, value in of.items()}
    return attachment_tensors(trained(models, method, memory=memory))


@pytest.mark.parametrize("stop", [1, 3, 7, 8, 12])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
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
    result(METHODS[0], memory)
    monkeypatch.setattr(Surgery, "train", None)
    found = result(METHODS[0], memory)
    assert {name.partition(" ")[0] for name in memory.kept} > {"finished"} and found


def test_features_beyond_the_budget_wait_on_disk_and_give_the_same(tmp_path: Any) -> None:
    """Inputs, and what the experts make of them; the folder is empty afterwards."""
    for method in (SurgeryV2(**SETTINGS), IntervMerge(**SETTINGS)):
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
